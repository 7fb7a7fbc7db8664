//! JSON files that this crate writes and reads back: heat maps and traces.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::Value;

use crate::error::{Error, Result};

/// Writes a file, replacing one that is there.
pub(crate) fn save(path: &Path, json: &Value) -> Result<()> {
    std::fs::write(path, format!("{json}\n")).map_err(|source| Error::Io { path: path.into(), source })
}

/// Reads a file of at most `most_bytes`; `what` it should be is said in errors.
pub(crate) fn load(path: &Path, what: &str, most_bytes: u64) -> Result<Value> {
    let io = |source| Error::Io { path: path.into(), source };
    let mut text = Vec::new();
    File::open(path).map_err(io)?.take(most_bytes + 1).read_to_end(&mut text).map_err(io)?;
    if text.len() as u64 > most_bytes {
        let most = most_bytes >> 20;
        return Err(Error::file(path, format!("{what}: larger than {most} MiB, this is something else")));
    }
    serde_json::from_slice(&text).map_err(|e| Error::file(path, format!("{what}: not JSON: {e}")))
}
