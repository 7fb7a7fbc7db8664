//! Whether a checkpoint's files are what was written.

use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::write::checksum;
use super::{Container, INDEX, SUMMARY, beside};
use crate::backend::Progress;
use crate::error::{Error, Result};
use crate::source::gguf::header;
use crate::source::map::Map;

/// A checkpoint whose files are all what they were.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verified {
    /// Files with weights.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// Compares the files of a checkpoint that [`Conversion`](super::Conversion) wrote with their checksums: in the index of a directory,
/// in `FILE.gguf.json` of a GGUF file or, where that is gone, in the file's metadata. Then opens it, which checks all headers.
///
/// # Errors
/// There are no checksums; or the names of all files that are missing or damaged, and how.
pub fn verify(path: &Path, progress: &Progress) -> Result<Verified> {
    let (list, pointer, dir) = match Container::of(path) {
        Container::Gguf => (beside(path, ".json"), "/files", None),
        Container::Safetensors => (path.join(INDEX), "/metadata/kt/files", Some(path)),
    };
    let none = "there are no checksums of this checkpoint; those that kt converted have them";
    let text = match std::fs::read(&list) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => match summary(path) {
            Some((_, text)) => text.into_bytes(),
            None => {
                std::fs::metadata(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
                return Err(Error::file(list, none));
            }
        },
        Err(source) => return Err(Error::Io { path: list, source }),
    };
    let json: Value = serde_json::from_slice(&text).map_err(|e| Error::file(&list, format!("not valid JSON: {e}")))?;
    let files = json.pointer(pointer).and_then(Value::as_object).filter(|f| !f.is_empty());
    let files = files.ok_or_else(|| Error::file(&list, none))?;
    let mut all: Vec<(PathBuf, u64, &str)> = Vec::new();
    for (name, about) in files {
        let plain = !name.contains(['/', '\\']) && name != "..";
        let (bytes, sha256) = (about.get("bytes").and_then(Value::as_u64), about.get("sha256").and_then(Value::as_str));
        match (bytes, sha256) {
            // A GGUF file is the one that was named, whatever its name was when it was written.
            (Some(bytes), Some(sha256)) if plain => {
                all.push((dir.map_or_else(|| path.to_owned(), |dir| dir.join(name)), bytes, sha256));
            }
            _ => return Err(Error::tensor(&list, name, "its entry among the checksums is damaged")),
        }
    }
    progress.start(all.iter().map(|f| f.1).sum());
    let mut wrong = Vec::new();
    for (file, bytes, sha256) in &all {
        let say = |what: String| format!("{} {what}", file.display());
        match std::fs::metadata(file) {
            Err(e) => wrong.push(say(format!("cannot be read: {e}"))),
            Ok(m) if m.len() != *bytes => wrong.push(say(format!("has {} bytes in place of {bytes}", m.len()))),
            Ok(_) => {
                let blank = summary(file).map_or(0..0, |(place, _)| place);
                let found = checksum(file, blank, progress)?;
                if found != *sha256 {
                    wrong.push(say(format!("has checksum {found} in place of {sha256}")));
                }
            }
        }
    }
    if !wrong.is_empty() {
        let what = format!(
            "{} of {} files are missing or damaged: {}; convert again",
            wrong.len(),
            all.len(),
            wrong.join("; ")
        );
        return Err(Error::file(path, what));
    }
    crate::source::open(path)?;
    Ok(Verified { files: all.len(), bytes: all.iter().map(|f| f.1).sum() })
}

/// The summary in a GGUF file's metadata, and where it is.
fn summary(path: &Path) -> Option<(Range<u64>, String)> {
    let map = Map::open(path).ok()?;
    let header = header::parse(path, map.bytes(), 0).ok()?;
    let place = header.values.get(SUMMARY)?;
    // The text's type and length are in front of it.
    let text = header.metadata.get(SUMMARY)?.as_str()?;
    Some((place.end as u64 - text.len() as u64..place.end as u64, text.to_owned()))
}
