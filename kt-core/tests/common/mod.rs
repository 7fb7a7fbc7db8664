//! What the tests of checkpoints share.
#![allow(dead_code)] // each test program uses its part

pub mod gguf;

use std::path::PathBuf;

use kt_core::Result;

/// A directory that is removed with its content.
pub struct Dir(pub PathBuf);

impl Dir {
    /// An empty one; `name` makes it this test's own.
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kt-hostile-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Dir(path)
    }

    /// Writes a file into it.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, content).unwrap();
        path
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The error's text, which must contain all of `wants`.
#[track_caller]
pub fn refused<T>(outcome: Result<T>, wants: &[&str]) {
    let text = match outcome {
        Ok(_) => panic!("accepted, but an error with {wants:?} was expected"),
        Err(e) => e.to_string(),
    };
    for want in wants {
        assert!(text.contains(want), "`{want}` is not in: {text}");
    }
}
