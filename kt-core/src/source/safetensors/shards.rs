//! The files of a Hugging Face directory: which shards there are, and what tensors their headers list.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::source::Stored;
use crate::source::fingerprint::Fingerprint;
use crate::source::map::Map;

const INDEX: &str = "model.safetensors.index.json";
/// Length of a safetensors header's own length.
const LENGTH: usize = 8;

/// Where the files of a checkpoint come from.
pub enum Files {
    /// A directory.
    Directory,
    /// Names and contents.
    Memory(BTreeMap<String, Bytes>),
}

/// A tensor as its shard's header lists it; type, shape and length fit together.
#[derive(Debug)]
pub struct Tensor {
    shard: usize,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    bytes: Range<usize>,
}

impl Tensor {
    pub fn byte_len(&self) -> usize {
        self.bytes.len()
    }
}

struct Shard {
    path: PathBuf,
    map: Map,
}

/// All files of a checkpoint.
pub struct Shards {
    path: PathBuf,
    files: Files,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Tensor>,
    /// Which tensor is in which file, where an index says so.
    index: BTreeMap<String, String>,
    fingerprint: Fingerprint,
}

impl Shards {
    /// Reads the index, where there is one, and the headers of all shards.
    pub fn open(path: &Path, files: Files) -> Result<Self> {
        let mut all = Shards {
            path: path.to_owned(),
            files,
            shards: Vec::new(),
            tensors: BTreeMap::new(),
            index: BTreeMap::new(),
            fingerprint: Fingerprint::new("safetensors"),
        };
        let index = all.json(INDEX)?;
        let names = match &index {
            Some(json) => {
                all.index = weight_map(&path.join(INDEX), json)?;
                all.indexed_files()?
            }
            None => all.safetensors_files()?,
        };
        for name in &names {
            all.read_header(name, index.is_some())?;
        }
        // What tensors mean is in here, and which of two files a tensor is read from is in the index.
        for name in [INDEX, "config.json"] {
            let text = all.read(name)?;
            all.fingerprint.add(text.as_deref().unwrap_or_default());
        }
        if let Some((name, file)) = all.index.iter().find(|(n, _)| !all.tensors.contains_key(*n)) {
            let what = format!("{INDEX} says that this file holds it, but the file's header does not list it");
            return Err(Error::tensor(path.join(file), name, what));
        }
        Ok(all)
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What tells these files from others.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint.clone()
    }

    /// All tensors by name.
    pub fn tensors(&self) -> &BTreeMap<String, Tensor> {
        &self.tensors
    }

    /// A tensor and the name it is stored under.
    pub fn get(&self, name: &str) -> Option<(&str, &Tensor)> {
        self.tensors.get_key_value(name).map(|(n, t)| (n.as_str(), t))
    }

    /// A tensor's bytes.
    pub fn bytes(&self, t: &Tensor) -> Bytes {
        self.shards[t.shard].map.slice(t.bytes.clone())
    }

    /// A tensor as its shard holds it.
    pub fn stored(&self, name: &str) -> Option<Stored> {
        let t = self.tensors.get(name)?;
        Some(Stored { kind: format!("{:?}", t.dtype), shape: t.shape.clone(), bytes: self.bytes(t) })
    }

    /// The file that holds a tensor; for one that is missing, the file that should have listed it.
    pub fn file_of(&self, name: &str) -> PathBuf {
        match self.tensors.get(name) {
            Some(t) => self.shards[t.shard].path.clone(),
            None if !self.index.is_empty() => self.path.join(INDEX),
            None if self.shards.len() == 1 => self.shards[0].path.clone(),
            None => self.path.clone(),
        }
    }

    /// An error about a tensor.
    pub fn fail(&self, name: &str, what: impl Into<String>) -> Error {
        Error::tensor(self.file_of(name), name, what)
    }

    /// Lets the system take back part `part` of a tensor that is `parts` equal ones.
    pub fn release(&self, name: &str, part: usize, parts: usize) {
        let Some(t) = self.tensors.get(name) else { return };
        let one = t.bytes.len() / parts.max(1);
        let start = t.bytes.start + part.min(parts) * one;
        self.shards[t.shard].map.release(start..start + one);
    }

    /// The content of a file of the checkpoint.
    pub fn read(&self, name: &str) -> Result<Option<Bytes>> {
        match &self.files {
            Files::Memory(map) => Ok(map.get(plain_name(&self.path, name)?).cloned()),
            Files::Directory => side_file(&self.path, name),
        }
    }

    /// A JSON file of the checkpoint.
    pub fn json(&self, name: &str) -> Result<Option<Value>> {
        let Some(bytes) = self.read(name)? else { return Ok(None) };
        parsed(self.path.join(name), &bytes).map(Some)
    }

    /// The files that the index names, all of which must be there.
    fn indexed_files(&self) -> Result<BTreeSet<String>> {
        let names: BTreeSet<String> = self.index.values().cloned().collect();
        let exists = |name: &String| match &self.files {
            Files::Memory(map) => map.contains_key(name),
            Files::Directory => self.path.join(name).is_file(),
        };
        let missing: Vec<&str> = names.iter().filter(|n| !exists(n)).map(String::as_str).collect();
        if !missing.is_empty() {
            let what = format!("names files that are not there: {}; download them", missing.join(", "));
            return Err(Error::file(self.path.join(INDEX), what));
        }
        Ok(names)
    }

    /// Without an index: `model.safetensors` alone, as transformers reads it, or else every safetensors file.
    fn safetensors_files(&self) -> Result<BTreeSet<String>> {
        let mut names = BTreeSet::new();
        match &self.files {
            Files::Memory(map) => names.extend(map.keys().cloned()),
            Files::Directory => {
                let io = |source| Error::Io { path: self.path.clone(), source };
                for entry in std::fs::read_dir(&self.path).map_err(io)? {
                    names.extend(entry.map_err(io)?.file_name().into_string());
                }
            }
        }
        names.retain(|n| n.ends_with(".safetensors"));
        if names.contains("model.safetensors") {
            names.retain(|n| n == "model.safetensors");
        }
        if names.is_empty() {
            return Err(Error::file(&self.path, "no .safetensors file in this checkpoint"));
        }
        Ok(names)
    }

    fn read_header(&mut self, name: &str, indexed: bool) -> Result<()> {
        let path = self.path.join(name);
        let map = match &self.files {
            Files::Memory(files) => Map::from_bytes(files.get(name).cloned().unwrap_or_default()),
            Files::Directory => Map::open(&path)?,
        };
        let (header, metadata) =
            SafeTensors::read_metadata(map.bytes()).map_err(|e| blame(&path, map.bytes(), &e.to_string()))?;
        for (tensor, info) in metadata.tensors() {
            // With an index, a tensor is where it says; others of a shard are strays.
            if indexed && self.index.get(&tensor).is_none_or(|f| f != name) {
                continue;
            }
            let start = LENGTH + header;
            let entry = Tensor {
                shard: self.shards.len(),
                dtype: info.dtype,
                shape: info.shape.clone(),
                bytes: start + info.data_offsets.0..start + info.data_offsets.1,
            };
            if let Some(old) = self.tensors.insert(tensor.clone(), entry) {
                let what = format!("is in {} too; remove one of them", self.shards[old.shard].path.display());
                return Err(Error::tensor(path, tensor, what));
            }
        }
        self.fingerprint.file(name.as_ref(), map.stamp(), &map.bytes()[..LENGTH + header]);
        self.shards.push(Shard { path, map });
        Ok(())
    }
}

/// The content of a file in a directory, where it is there.
pub fn side_file(dir: &Path, name: &str) -> Result<Option<Bytes>> {
    let path = dir.join(plain_name(dir, name)?);
    match std::fs::read(&path) {
        Ok(bytes) => Ok(Some(bytes.into())),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Io { path, source }),
    }
}

/// What JSON a file of a checkpoint holds.
pub fn parsed(path: PathBuf, text: &[u8]) -> Result<Value> {
    serde_json::from_slice(text).map_err(|e| Error::file(path, format!("not valid JSON: {e}")))
}

fn plain_name<'a>(dir: &Path, name: &'a str) -> Result<&'a str> {
    match is_plain(name) {
        true => Ok(name),
        false => Err(Error::file(dir, format!("`{name}` is not a plain file name"))),
    }
}

/// A plain file name: no directories, no way out of the checkpoint.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', ':', '\0'])
}

fn weight_map(file: &Path, index: &Value) -> Result<BTreeMap<String, String>> {
    let map = index.get("weight_map").and_then(Value::as_object);
    let map = map.ok_or_else(|| Error::tensor(file, "weight_map", "missing, or not an object"))?;
    let mut files = BTreeMap::new();
    for (name, value) in map {
        match value.as_str().filter(|f| is_plain(f)) {
            Some(f) => files.insert(name.clone(), f.to_owned()),
            None => {
                return Err(Error::tensor(
                    file,
                    name,
                    format!("is said to be in {value}, which is not a plain file name"),
                ));
            }
        };
    }
    if files.is_empty() {
        return Err(Error::tensor(file, "weight_map", "names no tensor"));
    }
    Ok(files)
}

/// Says which tensor is to blame for a header that was refused, where that can be told.
fn blame(file: &Path, bytes: &[u8], why: &str) -> Error {
    let len = bytes.len();
    let Some(length) = bytes.first_chunk::<LENGTH>() else {
        return Error::file(file, format!("only {len} bytes: truncated, or not a safetensors file"));
    };
    let length = u64::from_le_bytes(*length);
    let data = usize::try_from(length).ok().and_then(|n| n.checked_add(LENGTH));
    let Some(header) = data.and_then(|d| bytes.get(LENGTH..d)) else {
        let what =
            format!("its header claims {length} bytes, but the file has {len}: truncated, or not a safetensors file");
        return Error::file(file, what);
    };
    let left = (len - LENGTH - header.len()) as u64;
    match serde_json::from_slice(header) {
        Ok(Value::Object(map)) => match map.iter().find_map(|(n, info)| Some((n, culprit(info, left)?))) {
            Some((name, what)) => Error::tensor(file, name, what),
            None => Error::file(file, format!("its header is wrong: {why}")),
        },
        Ok(_) => Error::file(file, "its header is not a JSON object: not a safetensors file"),
        Err(e) => {
            Error::file(file, format!("its header is not valid JSON: {e}; not a safetensors file, or a damaged one"))
        }
    }
}

/// What is wrong with one tensor's entry, judged by itself.
fn culprit(info: &Value, left: u64) -> Option<String> {
    let offsets = info.get("data_offsets")?.as_array()?;
    let (begin, end) = (offsets.first()?.as_u64()?, offsets.get(1)?.as_u64()?);
    if begin > end {
        return Some(format!("its data offsets run backwards, from {begin} to {end}"));
    }
    if end > left {
        return Some(format!("its data ends at byte {end} of {left}: the file is truncated, or its header damaged"));
    }
    let dtype = info.get("dtype")?;
    let Ok(known) = serde_json::from_value::<Dtype>(dtype.clone()) else {
        return Some(format!("its type {dtype} is not known"));
    };
    let shape = info.get("shape")?.as_array()?;
    let bits = shape.iter().try_fold(known.bitsize() as u64, |n, d| n.checked_mul(d.as_u64()?));
    match bits {
        Some(bits) if bits % 8 == 0 && bits / 8 == end - begin => None,
        _ => Some(format!(
            "{dtype} of shape {} does not take the {} bytes that it has",
            Value::from(shape.clone()),
            end - begin
        )),
    }
}
