//! A file, mapped or in memory.

#![allow(unsafe_code)] // maps files

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use memmap2::Mmap;

use super::fingerprint::Stamp;
use crate::error::{Error, Result};

/// A file's bytes. Slices of it are reference-counted and copy nothing.
pub(crate) struct Map {
    bytes: Bytes,
    map: Option<Arc<Mmap>>,
    stamp: Option<Stamp>,
}

/// A map that several handles own.
struct Shared(Arc<Mmap>);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Map {
    /// Maps a file. Whoever truncates it while it is mapped kills the process (SIGBUS), as with every mapped file.
    pub fn open(path: &Path) -> Result<Map> {
        let io = |source| Error::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        if metadata.len() == 0 {
            return Err(Error::file(path, "the file is empty; download it again"));
        }
        let mut map = Map::of(&file).map_err(io)?;
        map.stamp = Stamp::of(&metadata);
        Ok(map)
    }

    /// Maps an open file, which is not empty. As with [`Map::open`], nobody may truncate it.
    pub fn of(file: &File) -> std::io::Result<Map> {
        // SAFETY: the map is private and read-only; that nobody writes or truncates the file meanwhile is the caller's part.
        let map = Arc::new(unsafe { Mmap::map(file) }?);
        Ok(Map { bytes: Bytes::from_owner(Shared(map.clone())), map: Some(map), stamp: None })
    }

    /// Bytes that are in memory already.
    pub fn from_bytes(bytes: Bytes) -> Map {
        Map { bytes, map: None, stamp: None }
    }

    /// Size and time of the last change of a file that was opened by its path.
    pub fn stamp(&self) -> Option<Stamp> {
        self.stamp
    }

    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// A part of it, which must be within its length.
    pub fn slice(&self, range: Range<usize>) -> Bytes {
        self.bytes.slice(range)
    }

    /// Lets the system take back the whole pages of a range; they are read from the file again when touched.
    pub fn release(&self, range: Range<usize>) {
        let Some(map) = &self.map else { return };
        let page = page_bytes();
        let (start, end) = (range.start.next_multiple_of(page), range.end / page * page);
        if start < end && end <= map.len() {
            #[cfg(unix)]
            // SAFETY: the pages belong to a private, read-only, file-backed map that nobody writes: dropping them loses nothing.
            // A failure leaves them where they are.
            let _ = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start) };
        }
    }
}

#[cfg(unix)]
fn page_bytes() -> usize {
    // SAFETY: a query without preconditions.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).ok().filter(|b| b.is_power_of_two()).unwrap_or(64 << 10)
}

#[cfg(not(unix))]
fn page_bytes() -> usize {
    64 << 10
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// Pages of a range that this process has mapped in.
    fn resident(bytes: &[u8]) -> usize {
        let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let address = format!("{:x}-", bytes.as_ptr() as usize);
        let rss = text.lines().skip_while(|l| !l.starts_with(&address)).find(|l| l.starts_with("Rss:")).unwrap();
        rss.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
    }

    #[test]
    fn released_pages_leave_memory_and_come_back() {
        let path = std::env::temp_dir().join(format!("kt-map-{}", std::process::id()));
        let content: Vec<u8> = (0..1 << 20).map(|i| (i / 251) as u8).collect();
        std::fs::write(&path, &content).unwrap();
        let map = Map::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(map.bytes(), content);
        let before = resident(map.bytes());
        map.release(100..content.len() - 100);
        let after = resident(map.bytes());
        assert!(before >= 1 << 20 && after <= 2 * page_bytes(), "{before} bytes before, {after} after");
        assert_eq!(map.slice(5000..700_000), content[5000..700_000]);
        map.release(10..20);
        map.release(0..usize::MAX);
    }
}
