//! Packed experts on disk, mapped at the next start in place of being packed again.
//!
//! ```text
//! file  the experts of one layer for one backend
//!       0     "ktpacked"
//!       8     u32 version of this file format
//!       12    u32 bytes of the key
//!       16    u64 bytes of the packed matrices
//!       24    u64 their checksum
//!       32    the key, lines of `name value`: all that decides what the packed bytes are
//!       …     packed matrices from the next multiple of 4096 to the end: expert after expert, of each gate, up, down
//! ```
//!
//! All of a header but the checksum is known beforehand, so that it is compared, never believed: a file whose header is not the one that
//! would be written now is refused with what differs. What is refused is made anew by the loader and takes the place of the old file.
//!
//! Files appear under their names whole, by renaming, so that a reader never sees a part of one, and those who mapped the old file keep it.
//! A directory may be shared by processes, and be deleted at any time. It must be trusted as the checkpoint is: the checksum finds
//! damage, not forgery.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use rayon::prelude::*;
use xxhash_rust::xxh3::{Xxh3, xxh3_64, xxh3_128};

use super::tier::Tier;
use crate::error::{Error, Result};
use crate::layer::{LayerSpec, Proj};
use crate::plan::human_bytes;
use crate::source::WeightSource;
use crate::source::map::Map;

const MAGIC: &[u8; 8] = b"ktpacked";
const VERSION: u32 = 1;
/// Bytes in front of the key.
const PREFIX: usize = 32;
/// Where packed matrices may begin: kernels want multiples of 64, direct I/O and most page sizes this.
const ALIGN: usize = 4096;
/// Longest key that is read for a message: many times what any is.
const MOST_KEY: usize = 1 << 16;
/// Bytes whose checksums are computed independently: a few milliseconds' work, and enough pieces of a layer for all threads.
const CHUNK: usize = 8 << 20;
/// Ends the names of files that are being written.
const TEMPORARY: &str = ".tmp";

/// What decides the packed bytes of a layer, besides the checkpoint.
#[derive(Debug, Clone)]
pub struct Key<'a> {
    /// Name of the backend.
    pub backend: &'a str,
    /// Its tier.
    pub tier: Tier,
    /// [`layout_version`](super::kernel::Kernel::layout_version) of its kernel.
    pub layout_version: u32,
    /// Index, shape and formats of the layer.
    pub layer: &'a LayerSpec,
    /// Which experts, in the order in which they are packed.
    pub experts: &'a [u32],
    /// Bytes of all their packed matrices.
    pub bytes: usize,
}

/// What [`PackedCache::find`] found.
#[derive(Debug)]
pub enum Found {
    /// The packed matrices, mapped and checked: expert after expert, of each gate, up, down. On a multiple of 4096 bytes.
    Mapped(Bytes),
    /// There is no file.
    Missing,
    /// There is a file that must not be used, and why.
    Refused(String),
}

/// What a cache did for a load.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CacheReport {
    /// The directory.
    pub dir: PathBuf,
    /// Layers that were mapped from the cache.
    pub mapped_layers: usize,
    /// Bytes of their packed experts.
    pub mapped_bytes: u64,
    /// Layers that were packed and written to the cache.
    pub written_layers: usize,
    /// Bytes of their packed experts.
    pub written_bytes: u64,
    /// Files that were refused and what could not be written, with the reasons. The experts were packed all the same.
    pub problems: Vec<String>,
}

/// One line of what was found and written, then the problems, a line each.
impl fmt::Display for CacheReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layers =
            |n: usize, bytes: u64| format!("{n} layer{} ({})", if n == 1 { "" } else { "s" }, human_bytes(bytes));
        let mapped = layers(self.mapped_layers, self.mapped_bytes);
        let written = layers(self.written_layers, self.written_bytes);
        write!(f, "{mapped} from {}, {written} written there", self.dir.display())?;
        self.problems.iter().try_for_each(|problem| write!(f, "\n{problem}"))
    }
}

/// A directory of packed experts, for one checkpoint and one load.
#[derive(Debug)]
pub struct PackedCache {
    dir: PathBuf,
    model: PathBuf,
    /// `None`: nothing tells the checkpoint from others.
    fingerprint: Option<u128>,
    report: Mutex<CacheReport>,
}

impl PackedCache {
    /// The cache of a checkpoint in a directory, which is made when it is needed. Takes the checkpoint's
    /// [`fingerprint`](WeightSource::fingerprint) now; of one without, nothing is found or written.
    pub fn new(dir: impl Into<PathBuf>, source: &dyn WeightSource) -> Self {
        let (dir, fingerprint) = (dir.into(), source.fingerprint());
        let mut report = CacheReport { dir: dir.clone(), ..CacheReport::default() };
        if fingerprint.is_none() {
            let model = source.path().display();
            report.problems.push(format!("{model} is not in files whose changes can be seen, so it cannot be cached"));
        }
        // The same model by whichever path it was named; a label that is no path stays one.
        let model = fs::canonicalize(source.path()).unwrap_or_else(|_| source.path().to_owned());
        PackedCache { dir, model, fingerprint, report: Mutex::new(report) }
    }

    /// What it did so far.
    pub fn report(&self) -> CacheReport {
        self.report_mut().clone()
    }

    fn report_mut(&self) -> MutexGuard<'_, CacheReport> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn problem(&self, layer: usize, what: String) {
        tracing::warn!(layer, problem = %what, "packed cache");
        self.report_mut().problems.push(what);
    }

    /// For backends, while they load: the packed matrices of this key, if the cache has them. What it refuses goes into the report.
    pub fn load(&self, key: &Key<'_>) -> Option<Bytes> {
        match self.find(key) {
            Found::Mapped(bytes) => {
                let mut report = self.report_mut();
                report.mapped_layers += 1;
                report.mapped_bytes += bytes.len() as u64;
                Some(bytes)
            }
            Found::Missing => None,
            Found::Refused(why) => {
                self.problem(key.layer.index, format!("{why}; packed again"));
                None
            }
        }
    }

    /// For backends, after packing: writes the packed matrices, which are `parts` one after another. Failing to goes into the report and
    /// changes nothing else.
    pub fn save(&self, key: &Key<'_>, parts: &[&[u8]]) {
        match self.store(key, parts) {
            Ok(false) => {}
            Ok(true) => {
                let mut report = self.report_mut();
                report.written_layers += 1;
                report.written_bytes += key.bytes as u64;
            }
            Err(e) => self.problem(key.layer.index, format!("not written: {e}")),
        }
    }

    /// The file of a key. Its name has what a user chooses (a model, a backend, formats to re-encode into) and not what the
    /// content depends on besides, so that what is stale is replaced and does not pile up.
    pub fn path(&self, key: &Key<'_>) -> PathBuf {
        let LayerSpec { index, hidden, intermediate, formats, .. } = key.layer;
        let what = format!("{hidden}x{intermediate} {formats:?} {}", ranges(key.experts));
        let identity = [self.model.as_os_str().as_encoded_bytes(), b"\0", what.as_bytes()].concat();
        let plain = |text: &str| {
            let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
            text.chars().take(48).map(plain).collect::<String>()
        };
        let model = self.model.file_name().unwrap_or_default().to_string_lossy();
        let (model, backend) = (plain(&model), plain(key.backend));
        self.dir.join(format!("{model}-{:016x}.layer-{index:03}.{backend}.packed", xxh3_128(&identity) as u64))
    }

    /// The header of a file, up to where its matrices begin.
    fn header(&self, key: &Key<'_>, fingerprint: u128, checksum: u64) -> Vec<u8> {
        let mut text = String::new();
        let mut line = |name: &str, value: String| text += &format!("{name} {}\n", value.replace('\n', " "));
        // Matrices may come out of checkpoints otherwise in another version: re-encoded, from other orders of codes.
        line("kt", env!("CARGO_PKG_VERSION").into());
        line("backend", key.backend.into());
        line("tier", key.tier.to_string());
        line("layout", key.layout_version.to_string());
        line("layer", key.layer.index.to_string());
        line("experts", ranges(key.experts));
        for proj in Proj::ALL {
            let (rows, cols) = key.layer.shape(proj);
            line(proj.name(), format!("{} [{rows}, {cols}]", key.layer.format(proj)));
        }
        line("checkpoint", format!("{fingerprint:032x}"));
        let mut header = Vec::with_capacity(ALIGN);
        header.extend(MAGIC);
        header.extend(VERSION.to_le_bytes());
        header.extend((text.len() as u32).to_le_bytes());
        header.extend((key.bytes as u64).to_le_bytes());
        header.extend(checksum.to_le_bytes());
        header.extend(text.as_bytes());
        header.resize(header.len().next_multiple_of(ALIGN), 0);
        header
    }

    /// Looks for the packed matrices of a key, and checks all of what it finds: reads the whole file.
    pub fn find(&self, key: &Key<'_>) -> Found {
        let Some((file, header, checksum)) = (match self.open(key) {
            Ok(found) => found,
            Err(why) => return Found::Refused(self.blame(key, &why)),
        }) else {
            return Found::Missing;
        };
        let map = match Map::of(&file) {
            Ok(map) if map.bytes().len() == header + key.bytes => map,
            Ok(_) => return Found::Refused(self.blame(key, "it is being changed by somebody")),
            Err(e) => return Found::Refused(self.blame(key, &e.to_string())),
        };
        let packed = map.slice(header..header + key.bytes);
        match self::checksum(&[&packed]) == checksum {
            true => Found::Mapped(packed),
            false => Found::Refused(self.blame(key, "its checksum is wrong: the file is damaged")),
        }
    }

    /// Whether there is a file for this key that by its header and length can be used. For plans: its content is not looked at.
    pub fn has(&self, key: &Key<'_>) -> bool {
        matches!(self.open(key), Ok(Some(_)))
    }

    fn blame(&self, key: &Key<'_>, why: &str) -> String {
        format!("{}: {why}", self.path(key).display())
    }

    /// Opens the file of a key and compares its header and length. Returns it with the length of its header and its checksum.
    fn open(&self, key: &Key<'_>) -> Result<Option<(File, usize, u64)>, String> {
        let Some(fingerprint) = self.fingerprint else { return Ok(None) };
        let path = self.path(key);
        let text = |e: io::Error| e.to_string();
        let mut options = OpenOptions::new();
        options.read(true);
        #[cfg(unix)]
        {
            // A pipe in its place must not make the open wait; what is no plain file is refused below.
            use std::os::unix::fs::OpenOptionsExt;
            options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        }
        match fs::symlink_metadata(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(text(e)),
            Ok(m) if m.is_symlink() => return Err("it is a symbolic link, and those are not followed".into()),
            Ok(m) if !m.is_file() => return Err("it is not a plain file".into()),
            Ok(_) => {}
        }
        let mut file = match options.open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(text(e)),
        };
        let metadata = file.metadata().map_err(text)?;
        if !metadata.is_file() {
            return Err("it is not a plain file".into());
        }
        let due = self.header(key, fingerprint, 0);
        let mut got = Vec::new();
        let most = due.len().max(PREFIX + MOST_KEY);
        Read::by_ref(&mut file).take(most as u64).read_to_end(&mut got).map_err(text)?;
        let checksum = compare(&got, &due)?;
        let (len, want) = (metadata.len(), (due.len() + key.bytes) as u64);
        if len != want {
            return Err(format!("it has {len} bytes where {want} are due: it is truncated, or something else's"));
        }
        Ok(Some((file, due.len(), checksum)))
    }

    /// Writes the packed matrices of a key, which are `parts` one after another, in place of whatever file was there. `false`: the
    /// checkpoint cannot be cached.
    ///
    /// The file is written under a name of its own, brought to the disk and renamed; when that fails, nothing is left of it. Several
    /// processes may do so at once: each succeeds, and the last one's file stays.
    ///
    /// # Errors
    /// What the system refused; that the disk has too little space, which is looked at beforehand.
    pub fn store(&self, key: &Key<'_>, parts: &[&[u8]]) -> Result<bool> {
        let Some(fingerprint) = self.fingerprint else { return Ok(false) };
        let got = parts.iter().map(|p| p.len()).sum();
        if got != key.bytes {
            return Err(Error::Length { what: "packed experts", expected: key.bytes, got });
        }
        let path = self.path(key);
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| Error::Io { path, source }
        };
        fs::create_dir_all(&self.dir).map_err(io(&self.dir))?;
        remove_leftovers(&self.dir, &path);
        let header = self.header(key, fingerprint, checksum(parts));
        let need = (header.len() + key.bytes) as u64;
        if let Some(free) = free_bytes(&self.dir)
            && free < need
        {
            let what =
                format!("{need} bytes are needed here, and {free} are free; make room or name another directory");
            return Err(Error::file(&self.dir, what));
        }
        let mut temporary = Temporary::new(&path)?;
        let file = &mut temporary.file;
        let mut pieces = std::iter::once(&header[..]).chain(parts.iter().copied());
        let written = pieces.try_for_each(|piece| file.write_all(piece)).and_then(|_| file.sync_all());
        written.map_err(io(&temporary.path))?;
        fs::rename(&temporary.path, &path).map_err(io(&path))?;
        temporary.renamed = true;
        Ok(true)
    }
}

/// Compares the beginning of a file with the header that is due, and returns its checksum; or says what differs.
fn compare(got: &[u8], due: &[u8]) -> Result<u64, String> {
    let number = |bytes: &[u8], at: usize| bytes[at..].first_chunk().map_or(0, |b| u32::from_le_bytes(*b));
    if got.len() < PREFIX {
        return Err(format!("it has only {} bytes: it is truncated, or something else's", got.len()));
    }
    if got[..8] != *MAGIC {
        return Err("it is no file of packed experts".into());
    }
    let version = number(got, 8);
    if version != VERSION {
        return Err(format!("it is of version {version} of the file format, {VERSION} is due"));
    }
    let key = |bytes: &[u8]| {
        let end = PREFIX.saturating_add(number(bytes, 12) as usize);
        bytes.get(PREFIX..end).map(|key| String::from_utf8_lossy(key).into_owned())
    };
    let key_due = key(due).unwrap_or_default();
    let Some(key_got) = key(got) else {
        return Err("its header claims more bytes than there are: it is truncated or damaged".into());
    };
    let differences: Vec<String> = key_due
        .lines()
        .filter(|line| !key_got.lines().any(|l| l == *line))
        .map(|line| {
            let (name, due) = line.split_once(' ').unwrap_or((line, ""));
            let got = key_got.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' '));
            match (name, got) {
                ("checkpoint", Some(_)) => "the checkpoint has changed since".into(),
                (_, Some(got)) => {
                    let got: String = got.chars().take(60).collect();
                    format!("{name} is {}, {due} is due", got.escape_debug())
                }
                (_, None) => format!("{name} is missing"),
            }
        })
        .collect();
    if !differences.is_empty() {
        return Err(format!("it was made for something else: {}", differences.join("; ")));
    }
    // The checksum, at 24..32, is the file's own.
    let at = 24;
    if got.len() < due.len() || got[..at] != due[..at] || got[PREFIX..due.len()] != due[PREFIX..] {
        return Err("its header is damaged".into());
    }
    Ok(u64::from_le_bytes(std::array::from_fn(|i| got[at + i])))
}

/// Experts as a reader wants them: `0-127`, `3,5-9`.
fn ranges(experts: &[u32]) -> String {
    let mut text = String::new();
    for run in experts.chunk_by(|a, b| a.checked_add(1) == Some(*b)) {
        let separator = if text.is_empty() { "" } else { "," };
        text += &match run {
            [first, .., last] => format!("{separator}{first}-{last}"),
            _ => format!("{separator}{}", run[0]),
        };
    }
    text
}

/// The checksum of packed matrices, which are `parts` one after another: of the checksums of their chunks, which all threads of rayon
/// compute. However they are cut into parts, it is the same.
fn checksum(parts: &[&[u8]]) -> u64 {
    let ends: Vec<usize> = parts
        .iter()
        .scan(0, |end, part| {
            *end += part.len();
            Some(*end)
        })
        .collect();
    let total = ends.last().copied().unwrap_or(0);
    let chunk = |i: usize| {
        let (mut hash, mut at, end) = (Xxh3::new(), i * CHUNK, total.min((i + 1) * CHUNK));
        let mut part = ends.partition_point(|&end| end <= at);
        while at < end {
            let start = ends[part] - parts[part].len();
            let upto = end.min(ends[part]);
            hash.update(&parts[part][at - start..upto - start]);
            (at, part) = (upto, part + 1);
        }
        hash.digest()
    };
    let chunks: Vec<u64> = (0..total.div_ceil(CHUNK)).into_par_iter().map(chunk).collect();
    let bytes: Vec<u8> = chunks.into_iter().flat_map(u64::to_le_bytes).collect();
    xxh3_64(&bytes)
}

/// A file that is being written: locked for as long as it is, and removed unless it was renamed.
struct Temporary {
    file: File,
    path: PathBuf,
    renamed: bool,
}

impl Temporary {
    /// A new file beside `path`.
    fn new(path: &Path) -> Result<Temporary> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        loop {
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let mut name = path.as_os_str().to_owned();
            // Processes of several containers or machines may have one number: then the name is taken, and the next is tried.
            name.push(format!(".{}-{count}{TEMPORARY}", std::process::id()));
            let name = PathBuf::from(name);
            let file = match OpenOptions::new().write(true).create_new(true).open(&name) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                other => other.map_err(|source| Error::Io { path: name.clone(), source })?,
            };
            // Where files cannot be locked, nobody takes this one for a leftover either.
            let locked = file.lock().is_ok();
            let temporary = Temporary { file, path: name, renamed: false };
            // Between its making and the lock, it may have been removed as a leftover.
            if locked && !temporary.path.exists() {
                continue;
            }
            return Ok(temporary);
        }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.renamed {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes what processes that were killed while they wrote `path` have left: files beside it that nobody holds locked.
fn remove_leftovers(dir: &Path, path: &Path) {
    let Some(start) = path.file_name() else { return };
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.as_encoded_bytes();
        let leftover = name.strip_prefix(start.as_encoded_bytes()).is_some_and(|n| n.ends_with(TEMPORARY.as_bytes()));
        if !leftover || !entry.file_type().is_ok_and(|t| t.is_file()) {
            continue;
        }
        // Held until it is removed: who locks it later sees that it is gone.
        if let Ok(file) = OpenOptions::new().write(true).open(entry.path())
            && file.try_lock().is_ok()
        {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Bytes that this process may still write to the disk of a directory; `None` where the system does not say.
#[cfg(unix)]
#[allow(unsafe_code)] // asks the system
fn free_bytes(dir: &Path) -> Option<u64> {
    use std::os::unix::ffi::OsStrExt;
    let dir = std::ffi::CString::new(dir.as_os_str().as_bytes()).ok()?;
    let mut answer = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: the path ends with a zero, and the structure is writable.
    if unsafe { libc::statvfs(dir.as_ptr(), answer.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: the call succeeded and filled the structure, of which zeros are a value anyway.
    let answer = unsafe { answer.assume_init() };
    // Types differ between systems.
    #[allow(clippy::unnecessary_cast)]
    Some((answer.f_bavail as u64).saturating_mul(answer.f_frsize as u64))
}

#[cfg(not(unix))]
fn free_bytes(_dir: &Path) -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checksum_is_of_the_bytes_and_not_of_how_they_are_cut() {
        let bytes: Vec<u8> = (0..2 * CHUNK + 1000).map(|i| (i / 7) as u8).collect();
        let whole = checksum(&[&bytes]);
        for cuts in [&[0, 1, CHUNK][..], &[CHUNK - 1, CHUNK + 1, 2 * CHUNK], &[64, 64, 2 * CHUNK + 999]] {
            let mut parts = Vec::new();
            let mut rest = &bytes[..];
            for cut in cuts.iter().rev() {
                let (head, tail) = rest.split_at(*cut);
                parts.insert(0, tail);
                rest = head;
            }
            parts.insert(0, rest);
            assert_eq!(checksum(&parts), whole, "{cuts:?}");
        }
        let mut other = bytes.clone();
        other[CHUNK + 5] ^= 1;
        assert_ne!(checksum(&[&other]), whole);
        assert_ne!(checksum(&[&bytes[..bytes.len() - 1]]), whole);
        assert_eq!(checksum(&[]), checksum(&[&[], &[]]));
    }
}
