//! GGUF files, v2 and v3, whole or split.
//!
//! ```text
//! "GGUF" u32 version, u64 tensors, u64 metadata entries
//! metadata: string key, u32 type, value            strings: u64 length, UTF-8
//! tensors:  string name, u32 rank, u64 dimensions (fastest first), u32 type, u64 offset
//! padding to general.alignment (32), then data; offsets count from there
//! ```
//!
//! Every count and length is checked against the bytes that are left before anything is allocated for it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use bytes::Bytes;

use super::metadata::{Metadata, Value};
use super::names::{self, Family};
use super::{Map, WeightSource};
use crate::error::{Error, Result};
use crate::format::Matrix;
use crate::format::Format;
use crate::layer::{LayerSpec, Proj};
use crate::routing::Routing;

/// Most dimensions of a tensor, as ggml has it.
const MAX_RANK: u32 = 4;
/// Arrays of arrays are legal; nobody nests them deeper than this.
const MAX_NESTING: u32 = 4;

/// Reads little-endian values off a header, never past its end.
struct Reader<'a> {
    file: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn fail(&self, what: impl std::fmt::Display) -> Error {
        Error::file(self.file, format!("{what} (at byte {})", self.at))
    }

    fn take(&mut self, n: usize, what: &str) -> Result<&'a [u8]> {
        let left = self.bytes.len() - self.at;
        if n > left {
            return Err(self.fail(format!("{what} takes {n} bytes, but only {left} are left: the file is truncated or damaged")));
        }
        self.at += n;
        Ok(&self.bytes[self.at - n..self.at])
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.take(4, what)?.try_into().unwrap_or_default()))
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.take(8, what)?.try_into().unwrap_or_default()))
    }

    /// A count of things that take at least `each` bytes.
    fn count(&mut self, each: usize, what: &str) -> Result<usize> {
        let n = self.u64(what)?;
        let left = self.bytes.len() - self.at;
        match usize::try_from(n) {
            Ok(n) if n.checked_mul(each).is_some_and(|bytes| bytes <= left) => Ok(n),
            _ => Err(self.fail(format!("{what} is {n}, more than the {left} bytes left can hold"))),
        }
    }

    fn string(&mut self, what: &str) -> Result<String> {
        let n = self.count(1, &format!("length of {what}"))?;
        let bytes = self.take(n, what)?;
        match std::str::from_utf8(bytes) {
            Ok(s) => Ok(s.to_string()),
            Err(_) => Err(self.fail(format!("{what} is not UTF-8"))),
        }
    }

    fn value(&mut self, kind: u32, key: &str, nesting: u32) -> Result<Value> {
        let int = |bytes: &[u8]| {
            let mut wide = [if bytes.last().is_some_and(|b| b & 0x80 != 0) { 0xff } else { 0 }; 8];
            wide[..bytes.len()].copy_from_slice(bytes);
            i64::from_le_bytes(wide)
        };
        let uint = |bytes: &[u8]| {
            let mut wide = [0; 8];
            wide[..bytes.len()].copy_from_slice(bytes);
            u64::from_le_bytes(wide)
        };
        Ok(match kind {
            0 => Value::Uint(uint(self.take(1, key)?)),
            1 => Value::Int(int(self.take(1, key)?)),
            2 => Value::Uint(uint(self.take(2, key)?)),
            3 => Value::Int(int(self.take(2, key)?)),
            4 => Value::Uint(uint(self.take(4, key)?)),
            5 => Value::Int(int(self.take(4, key)?)),
            6 => Value::Float(f32::from_bits(self.u32(key)?) as f64),
            7 => Value::Bool(self.take(1, key)?[0] != 0),
            8 => Value::String(self.string(key)?),
            9 => {
                if nesting >= MAX_NESTING {
                    return Err(self.fail(format!("`{key}` nests arrays more than {MAX_NESTING} deep")));
                }
                let element = self.u32(key)?;
                let Some(each) = value_bytes(element) else {
                    return Err(self.fail(format!("`{key}` is an array of unknown type {element}")));
                };
                let n = self.count(each, &format!("length of array `{key}`"))?;
                let mut values = Vec::with_capacity(n);
                for _ in 0..n {
                    values.push(self.value(element, key, nesting + 1)?);
                }
                Value::Array(values)
            }
            10 => Value::Uint(self.u64(key)?),
            11 => Value::Int(int(self.take(8, key)?)),
            12 => Value::Float(f64::from_bits(self.u64(key)?)),
            _ => return Err(self.fail(format!("`{key}` has unknown type {kind}"))),
        })
    }
}

/// Least bytes of a metadata value of a type.
fn value_bytes(kind: u32) -> Option<usize> {
    Some(match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        8 | 10 | 11 | 12 => 8,
        9 => 12,
        _ => return None,
    })
}

/// Name, values per block and bytes per block of every ggml type.
fn ggml_type(id: u32) -> Option<(&'static str, u64, u64)> {
    Some(match id {
        0 => ("F32", 1, 4),
        1 => ("F16", 1, 2),
        2 => ("Q4_0", 32, 18),
        3 => ("Q4_1", 32, 20),
        6 => ("Q5_0", 32, 22),
        7 => ("Q5_1", 32, 24),
        8 => ("Q8_0", 32, 34),
        9 => ("Q8_1", 32, 36),
        10 => ("Q2_K", 256, 84),
        11 => ("Q3_K", 256, 110),
        12 => ("Q4_K", 256, 144),
        13 => ("Q5_K", 256, 176),
        14 => ("Q6_K", 256, 210),
        15 => ("Q8_K", 256, 292),
        16 => ("IQ2_XXS", 256, 66),
        17 => ("IQ2_XS", 256, 74),
        18 => ("IQ3_XXS", 256, 98),
        19 => ("IQ1_S", 256, 50),
        20 => ("IQ4_NL", 32, 18),
        21 => ("IQ3_S", 256, 110),
        22 => ("IQ2_S", 256, 82),
        23 => ("IQ4_XS", 256, 136),
        24 => ("I8", 1, 1),
        25 => ("I16", 1, 2),
        26 => ("I32", 1, 4),
        27 => ("I64", 1, 8),
        28 => ("F64", 1, 8),
        29 => ("IQ1_M", 256, 56),
        30 => ("BF16", 1, 2),
        34 => ("TQ1_0", 256, 54),
        35 => ("TQ2_0", 256, 66),
        39 => ("MXFP4", 32, 17),
        _ => return None,
    })
}

/// The format of a ggml type, where this version decodes it.
fn format_of(id: u32) -> Option<Format> {
    Some(match id {
        0 => Format::F32,
        1 => Format::F16,
        2 => Format::Q4_0,
        8 => Format::Q8_0,
        12 => Format::Q4K,
        13 => Format::Q5K,
        14 => Format::Q6K,
        30 => Format::Bf16,
        _ => return None,
    })
}

#[derive(Debug, Clone)]
struct Tensor {
    part: usize,
    /// Dimensions, fastest first.
    ne: Vec<usize>,
    kind: u32,
    start: usize,
    bytes: usize,
}

impl Tensor {
    fn kind_name(&self) -> &'static str {
        ggml_type(self.kind).map_or("?", |t| t.0)
    }
}

struct Header {
    metadata: BTreeMap<String, Value>,
    tensors: Vec<(String, Tensor)>,
}

fn parse(file: &Path, bytes: &[u8], part: usize) -> Result<Header> {
    let mut r = Reader { file, bytes, at: 0 };
    if r.take(4, "the magic")? != b"GGUF" {
        return Err(Error::file(file, "not a GGUF file (magic)"));
    }
    let version = r.u32("the version")?;
    if version.swap_bytes() == 2 || version.swap_bytes() == 3 {
        return Err(Error::file(file, "a big-endian GGUF file; only little-endian ones are read"));
    }
    if version != 2 && version != 3 {
        return Err(Error::file(file, format!("GGUF version {version}; versions 2 and 3 are read")));
    }
    // A tensor entry takes at least 24 bytes (name length, rank, type, offset), a metadata entry 13.
    let tensor_count = r.count(24, "the tensor count")?;
    let metadata_count = r.count(13, "the metadata count")?;
    let mut metadata = BTreeMap::new();
    for i in 0..metadata_count {
        let key = r.string(&format!("key {i}"))?;
        let kind = r.u32(&key)?;
        let value = r.value(kind, &key, 0)?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(Error::tensor(file, key, "metadata key given twice"));
        }
    }
    let alignment = match metadata.get("general.alignment") {
        None => 32,
        Some(v) => match v.as_usize() {
            Some(a) if a.is_power_of_two() && (8..=1 << 20).contains(&a) => a,
            _ => return Err(Error::tensor(file, "general.alignment", format!("must be a power of two from 8, is {v:?}"))),
        },
    };
    let mut tensors = Vec::with_capacity(tensor_count);
    for i in 0..tensor_count {
        let name = r.string(&format!("name of tensor {i}"))?;
        let fail = |what: String| Error::tensor(file, name.clone(), what);
        let rank = r.u32(&name)?;
        if rank > MAX_RANK {
            return Err(fail(format!("has {rank} dimensions, at most {MAX_RANK} exist")));
        }
        let mut ne = Vec::with_capacity(rank as usize);
        for _ in 0..rank {
            let n = r.u64(&name)?;
            ne.push(usize::try_from(n).map_err(|_| fail(format!("a dimension of {n}")))?);
        }
        let kind = r.u32(&name)?;
        let offset = r.u64(&name)?;
        let Some((type_name, block, block_bytes)) = ggml_type(kind) else {
            return Err(fail(format!("has type {kind}, which this version does not know")));
        };
        if !offset.is_multiple_of(alignment as u64) {
            return Err(fail(format!("begins at {offset}, not on the alignment of {alignment}")));
        }
        let row = ne.first().copied().unwrap_or(1) as u64;
        if !row.is_multiple_of(block) {
            return Err(fail(format!("rows of {row} are not whole {type_name} blocks of {block}")));
        }
        let rows = ne.iter().skip(1).try_fold(1u64, |a, &n| a.checked_mul(n as u64));
        let size = rows.and_then(|r| r.checked_mul(row / block)).and_then(|b| b.checked_mul(block_bytes));
        let Some(size) = size.and_then(|s| usize::try_from(s).ok()) else {
            return Err(fail(format!("dimensions {ne:?} overflow")));
        };
        let start = usize::try_from(offset).map_err(|_| fail(format!("begins at {offset}, beyond the file")))?;
        tensors.push((name, Tensor { part, ne, kind, start, bytes: size }));
    }
    let data = r.at.next_multiple_of(alignment);
    for (name, t) in &mut tensors {
        t.start = t.start.saturating_add(data);
        if t.start.checked_add(t.bytes).is_none_or(|end| end > bytes.len()) {
            return Err(Error::tensor(
                file,
                name.clone(),
                format!("{} bytes from byte {} reach beyond the file's {}: it is truncated", t.bytes, t.start, bytes.len()),
            ));
        }
    }
    Ok(Header { metadata, tensors })
}

/// `base-00002-of-00005.gguf` as ("base", 2, 5).
fn split_name(path: &Path) -> Option<(String, usize, usize)> {
    let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
    let (rest, total) = stem.rsplit_once("-of-")?;
    let (base, number) = rest.rsplit_once('-')?;
    let digits = |s: &str| (s.len() == 5).then(|| s.parse::<usize>().ok()).flatten();
    Some((base.to_string(), digits(number)?, digits(total)?))
}

/// Whether two files are parts of one split model.
pub fn is_part_of(first: &Path, other: &Path) -> bool {
    match (split_name(first), split_name(other)) {
        (Some(a), Some(b)) => first.parent() == other.parent() && a.0 == b.0 && a.2 == b.2,
        _ => first == other,
    }
}

/// The files of a model, given any of them.
fn parts_of(path: &Path) -> Result<Vec<PathBuf>> {
    let Some((base, _, total)) = split_name(path) else { return Ok(vec![path.to_owned()]) };
    let parts: Vec<PathBuf> =
        (1..=total).map(|i| path.with_file_name(format!("{base}-{i:05}-of-{total:05}.gguf"))).collect();
    let missing: Vec<String> = parts.iter().filter(|p| !p.exists()).map(|p| p.display().to_string()).collect();
    if missing.is_empty() {
        Ok(parts)
    } else {
        Err(Error::file(path, format!("is one of {total} parts, and these are missing: {}", missing.join(", "))))
    }
}

/// A GGUF model, mapped.
pub struct GgufSource {
    path: PathBuf,
    parts: Vec<(PathBuf, Map)>,
    tensors: BTreeMap<String, Tensor>,
    metadata: Metadata,
    family: &'static Family,
    layers: Vec<LayerSpec>,
}

impl GgufSource {
    /// Opens a GGUF file; of a split one any part, and finds the others beside it.
    ///
    /// # Errors
    /// Files that are missing, truncated or damaged, unknown architectures, tensors that do not fit together.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let parts = parts_of(path)?;
        let mapped = parts.iter().map(|p| Ok((p.clone(), Map::open(p)?))).collect::<Result<Vec<_>>>()?;
        Self::from_parts(path, mapped)
    }

    /// The same from memory: the contents of one file, or of all parts in order.
    ///
    /// # Errors
    /// As [`GgufSource::open`].
    pub fn from_bytes(label: &str, parts: Vec<Bytes>) -> Result<Self> {
        let parts = parts.into_iter().map(|b| (PathBuf::from(label), Map::from_bytes(b))).collect();
        Self::from_parts(Path::new(label), parts)
    }

    fn from_parts(path: &Path, parts: Vec<(PathBuf, Map)>) -> Result<Self> {
        let mut tensors = BTreeMap::new();
        let mut metadata = BTreeMap::new();
        for (i, (file, map)) in parts.iter().enumerate() {
            let header = parse(file, map.bytes(), i)?;
            let split = |key: &str| header.metadata.get(key).and_then(Value::as_usize);
            let count = split("split.count").filter(|&n| n > 0).unwrap_or(1);
            if count != parts.len() || split("split.no").unwrap_or(i) != i {
                return Err(Error::tensor(
                    file,
                    "split.count",
                    format!(
                        "the file says it is part {} of {count} (counted from 0), its name part {i} of {}; give split files \
                         their original names",
                        split("split.no").unwrap_or(0),
                        parts.len()
                    ),
                ));
            }
            if i == 0 {
                metadata = header.metadata;
            }
            for (name, tensor) in header.tensors {
                if tensors.insert(name.clone(), tensor).is_some() {
                    return Err(Error::tensor(file, name, "given twice"));
                }
            }
        }
        let Some((first, _)) = parts.first() else { return Err(Error::file(path, "no file")) };
        let Some(architecture) = metadata.get("general.architecture").and_then(Value::as_str) else {
            return Err(Error::tensor(first, "general.architecture", "missing: what the model is stays unknown"));
        };
        let family = names::by_architecture(architecture).ok_or_else(|| {
            Error::tensor(
                first,
                "general.architecture",
                format!("`{architecture}` is not known here; known are {}", names::architectures().join(", ")),
            )
        })?;
        let mut source = GgufSource {
            path: path.to_owned(),
            parts,
            tensors,
            metadata: Metadata::Gguf(metadata),
            family,
            layers: Vec::new(),
        };
        source.layers = source.read_layers()?;
        Ok(source)
    }

    /// The family's row in the table of names.
    pub fn family(&self) -> &'static Family {
        self.family
    }

    fn value(&self, key: &str) -> Option<&Value> {
        let Metadata::Gguf(map) = &self.metadata else { return None };
        let architecture = map.get("general.architecture")?.as_str()?;
        map.get(&format!("{architecture}.{key}"))
    }

    fn fail(&self, name: &str, what: impl Into<String>) -> Error {
        let part = self.tensors.get(name).map_or(0, |t| t.part);
        Error::tensor(&self.parts[part].0, name, what)
    }

    fn tensor_format(&self, name: &str, t: &Tensor) -> Result<Format> {
        format_of(t.kind).ok_or_else(|| {
            self.fail(name, format!("has type {}, which is not supported yet; F32 F16 BF16 Q8_0 Q4_0 Q4_K Q5_K Q6_K are", t.kind_name()))
        })
    }

    /// The stacked tensor that holds a projection, and the first row of the projection within an expert's rows.
    fn stacked(&self, layer: usize, proj: Proj) -> Result<(String, &Tensor, usize)> {
        let name = format!("blk.{layer}.ffn_{}_exps.weight", proj.name());
        if let Some(t) = self.tensors.get(&name) {
            return Ok((name, t, 0));
        }
        let fused = format!("blk.{layer}.ffn_gate_up_exps.weight");
        match (self.tensors.get(&fused), proj) {
            (Some(t), Proj::Gate) => Ok((fused, t, 0)),
            (Some(t), Proj::Up) => Ok((fused, t, t.ne.get(1).copied().unwrap_or(0) / 2)),
            _ => Err(self.fail(&name, "missing")),
        }
    }

    fn read_layers(&self) -> Result<Vec<LayerSpec>> {
        let mut indices: Vec<usize> = self
            .tensors
            .keys()
            .filter_map(|n| {
                let (layer, rest) = n.strip_prefix("blk.")?.split_once('.')?;
                (rest.starts_with("ffn_") && rest.ends_with("_exps.weight")).then(|| layer.parse().ok())?
            })
            .collect();
        indices.sort_unstable();
        indices.dedup();
        let count = |key: &str| {
            self.value(key)
                .and_then(Value::as_usize)
                .ok_or_else(|| Error::tensor(&self.parts[0].0, key, "missing from the metadata, or not a count"))
        };
        // Layers from block_count minus nextn_predict_layers on are for multi-token prediction.
        let blocks = count("block_count")?;
        let plain = blocks.saturating_sub(self.value("nextn_predict_layers").and_then(Value::as_usize).unwrap_or(0));
        indices.retain(|&i| i < plain);
        if indices.is_empty() {
            return Err(Error::file(&self.path, "no layer has expert tensors (blk.N.ffn_gate_exps.weight): not a Mixture-of-Experts model"));
        }
        let top_k = count("expert_used_count")?;
        let hidden = count("embedding_length")?;
        let mut layers = Vec::with_capacity(indices.len());
        for index in indices {
            let mut formats = [Format::F32; 3];
            let mut shape = None;
            for proj in Proj::ALL {
                let (name, t, _) = self.stacked(index, proj)?;
                formats[proj.index()] = self.tensor_format(&name, t)?;
                let [cols, rows, experts] = t.ne[..] else {
                    return Err(self.fail(&name, format!("has dimensions {:?}, expected [inputs, outputs, experts]", t.ne)));
                };
                let rows = if name.contains("gate_up") { rows / 2 } else { rows };
                let (intermediate, h) = if proj == Proj::Down { (cols, rows) } else { (rows, cols) };
                if h != hidden {
                    return Err(self.fail(&name, format!("has dimensions {:?}, but embedding_length is {hidden}", t.ne)));
                }
                if *shape.get_or_insert((intermediate, experts)) != (intermediate, experts) || intermediate == 0 {
                    return Err(self.fail(&name, format!("has dimensions {:?}, which do not fit the layer's other projections", t.ne)));
                }
            }
            let (intermediate, experts) = shape.unwrap_or((0, 0));
            if top_k == 0 || top_k > experts {
                return Err(Error::tensor(
                    &self.parts[0].0,
                    "expert_used_count",
                    format!("is {top_k}, but layer {index} has {experts} experts"),
                ));
            }
            let biases = self.tensors.contains_key(&format!("blk.{index}.ffn_down_exps.bias"));
            layers.push(LayerSpec {
                index,
                experts,
                top_k,
                hidden,
                intermediate,
                formats,
                activation: self.family.activation,
                biases,
            });
        }
        Ok(layers)
    }

    fn view(&self, name: &str, t: &Tensor, rows: usize, cols: usize, from_row: usize) -> Result<Matrix> {
        let format = self.tensor_format(name, t)?;
        let row_bytes = format.row_bytes(cols).map_err(|e| self.fail(name, e))?;
        let (start, len) = (t.start + from_row * row_bytes, rows * row_bytes);
        if start + len > t.start + t.bytes {
            return Err(self.fail(name, "rows out of range"));
        }
        Matrix::new(format, rows, cols, self.parts[t.part].1.slice(start..start + len), None).map_err(|e| self.fail(name, e))
    }

    fn spec(&self, layer: usize) -> Result<&LayerSpec> {
        self.layers.iter().find(|l| l.index == layer).ok_or_else(|| Error::file(&self.path, format!("layer {layer} has no experts")))
    }
}

impl WeightSource for GgufSource {
    fn path(&self) -> &Path {
        &self.path
    }

    fn layers(&self) -> &[LayerSpec] {
        &self.layers
    }

    fn matrix(&self, layer: usize, expert: usize, proj: Proj) -> Result<Matrix> {
        let spec = self.spec(layer)?;
        let (rows, cols) = spec.shape(proj);
        let (name, t, first) = self.stacked(layer, proj)?;
        if expert >= spec.experts {
            return Err(self.fail(&name, format!("has no expert {expert}, only {}", spec.experts)));
        }
        let rows_per_expert = t.ne.get(1).copied().unwrap_or(rows);
        self.view(&name, t, rows, cols, expert * rows_per_expert + first)
    }

    fn bias(&self, layer: usize, expert: usize, proj: Proj) -> Result<Option<Vec<f32>>> {
        let spec = self.spec(layer)?;
        let name = format!("blk.{layer}.ffn_{}_exps.bias", proj.name());
        let Some(t) = self.tensors.get(&name) else { return Ok(None) };
        let (rows, _) = spec.shape(proj);
        if t.ne != [rows, spec.experts] || expert >= spec.experts {
            return Err(self.fail(&name, format!("has dimensions {:?}, expected [{rows}, {}]", t.ne, spec.experts)));
        }
        Ok(Some(self.view(&name, t, 1, rows, expert)?.decode()))
    }

    fn tensor_name(&self, layer: usize, expert: usize, proj: Proj) -> (PathBuf, String) {
        match self.stacked(layer, proj) {
            Ok((name, t, _)) => (self.parts[t.part].0.clone(), format!("{name}[{expert}]")),
            Err(_) => (self.path.clone(), format!("layer {layer}, expert {expert}, {}", proj.name())),
        }
    }

    fn release(&self, layer: usize, expert: usize) {
        for proj in Proj::ALL {
            if let (Ok((_, t, first)), Ok(m)) = (self.stacked(layer, proj), self.matrix(layer, expert, proj)) {
                let rows_per_expert = t.ne.get(1).copied().unwrap_or(0);
                let start = t.start + (expert * rows_per_expert + first) * m.stride();
                self.parts[t.part].1.release(start..start + m.codes().len());
            }
        }
    }

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Qwen3-MoE and Mixtral always renormalize; DeepSeek-2 files say all in their metadata (absent keys: softmax, one group, not
    /// renormalized, factor 1).
    fn routing(&self, layer: usize) -> Option<Routing> {
        let spec = self.layers.iter().find(|l| l.index == layer)?;
        self.family.gguf_routing(|key| self.value(key), spec.top_k)
    }

    fn tensors(&self) -> Vec<String> {
        self.tensors.keys().filter(|n| !n.contains("_exps.")).cloned().collect()
    }

    fn tensor(&self, name: &str) -> Result<Matrix> {
        let t = self.tensors.get(name).ok_or_else(|| self.fail(name, "missing"))?;
        let cols = t.ne.first().copied().unwrap_or(1);
        let rows = t.ne.iter().skip(1).product();
        self.view(name, t, rows, cols, 0)
    }

    fn release_tensor(&self, name: &str) {
        if let Some(t) = self.tensors.get(name) {
            self.parts[t.part].1.release(t.start..t.start + t.bytes);
        }
    }

    fn dense_bytes(&self) -> u64 {
        self.tensors.iter().filter(|(n, _)| !n.contains("_exps.")).map(|(_, t)| t.bytes as u64).sum()
    }
}
