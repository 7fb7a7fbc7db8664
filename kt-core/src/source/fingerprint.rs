//! What tells one state of a checkpoint from another without reading its weights.

use std::fs::Metadata;
use std::path::Path;
use std::time::UNIX_EPOCH;

use xxhash_rust::xxh3::Xxh3;

/// Size and time of the last change of a file, when it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    bytes: u64,
    /// Nanoseconds since 1970, negative before.
    modified: i128,
}

impl Stamp {
    /// `None` where the system does not know the time.
    pub fn of(file: &Metadata) -> Option<Stamp> {
        let modified = match file.modified().ok()?.duration_since(UNIX_EPOCH) {
            Ok(after) => after.as_nanos() as i128,
            Err(before) => -(before.duration().as_nanos() as i128),
        };
        Some(Stamp { bytes: file.len(), modified })
    }
}

/// A hash over names, sizes, times and headers of files. Anything without a [`Stamp`] (bytes in memory) makes it unknown.
#[derive(Clone)]
pub(crate) struct Fingerprint {
    /// Half a KiB: not inside of what holds it.
    hash: Box<Xxh3>,
    known: bool,
}

impl Fingerprint {
    /// Of a kind of source.
    pub fn new(kind: &str) -> Self {
        let mut new = Fingerprint { hash: Box::new(Xxh3::new()), known: true };
        new.add(kind.as_bytes());
        new
    }

    /// Adds something, its length first: two things never look like one.
    pub fn add(&mut self, bytes: &[u8]) {
        self.hash.update(&(bytes.len() as u64).to_le_bytes());
        self.hash.update(bytes);
    }

    /// Adds a file of the checkpoint, by its name there.
    pub fn file(&mut self, name: &Path, stamp: Option<Stamp>, header: &[u8]) {
        let Some(stamp) = stamp else {
            self.known = false;
            return;
        };
        self.add(name.as_os_str().as_encoded_bytes());
        self.hash.update(&stamp.bytes.to_le_bytes());
        self.hash.update(&stamp.modified.to_le_bytes());
        self.add(header);
    }

    /// The value, if all that was added is known.
    pub fn finish(self) -> Option<u128> {
        self.known.then(|| self.hash.digest128())
    }
}
