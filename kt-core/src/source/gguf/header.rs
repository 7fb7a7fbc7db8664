//! The header of one GGUF file.
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
use std::ops::Range;
use std::path::Path;

use crate::error::{Error, Result};
use crate::format::Format;
use crate::source::metadata::Value;

/// Most dimensions of a tensor, as ggml has it.
const MAX_RANK: u32 = 4;
/// Arrays of arrays are legal; nobody nests them deeper than this.
const MAX_NESTING: u32 = 4;
/// Most array elements in all metadata of a file (vocabularies with merges have under a million): each takes 32 bytes in memory,
/// whatever it takes in the file.
const MAX_ELEMENTS: usize = 1 << 24;
/// Most tensors of a file (a model of 100 layers with experts has some thousands).
const MAX_TENSORS: usize = 1 << 20;

/// The highest number of a ggml type.
const LAST_KIND: u32 = 41;

/// A ggml type: its name, values per block and bytes per block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    id: u32,
    pub name: &'static str,
    block: usize,
    block_bytes: usize,
}

impl Kind {
    /// The type of a number, or the name of one that ggml has given up.
    fn of(id: u32) -> Result<Kind, Option<&'static str>> {
        let (name, block, block_bytes) = match id {
            0 => ("F32", 1, 4),
            1 => ("F16", 1, 2),
            2 => ("Q4_0", 32, 18),
            3 => ("Q4_1", 32, 20),
            4 => return Err(Some("Q4_2")),
            5 => return Err(Some("Q4_3")),
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
            31 => return Err(Some("Q4_0_4_4")),
            32 => return Err(Some("Q4_0_4_8")),
            33 => return Err(Some("Q4_0_8_8")),
            34 => ("TQ1_0", 256, 54),
            35 => ("TQ2_0", 256, 66),
            36 => return Err(Some("IQ4_NL_4_4")),
            37 => return Err(Some("IQ4_NL_4_8")),
            38 => return Err(Some("IQ4_NL_8_8")),
            39 => ("MXFP4", 32, 17),
            40 => ("NVFP4", 64, 36),
            41 => ("Q1_0", 128, 18),
            _ => return Err(None),
        };
        Ok(Kind { id, name, block, block_bytes })
    }

    /// The type of a name, where ggml has it.
    pub fn named(name: &str) -> Option<Kind> {
        (0..=LAST_KIND).filter_map(|id| Kind::of(id).ok()).find(|kind| kind.name == name)
    }

    /// The type that holds a format.
    pub fn holding(format: Format) -> Option<Kind> {
        (0..=LAST_KIND).filter_map(|id| Kind::of(id).ok()).find(|kind| kind.format() == Some(format))
    }

    /// The number that stands for it in files.
    pub fn id(self) -> u32 {
        self.id
    }

    /// The format of a type, where this version decodes it.
    pub fn format(self) -> Option<Format> {
        Some(match self.id {
            0 => Format::F32,
            1 => Format::F16,
            2 => Format::Q4_0,
            3 => Format::Q4_1,
            6 => Format::Q5_0,
            7 => Format::Q5_1,
            8 => Format::Q8_0,
            10 => Format::Q2K,
            11 => Format::Q3K,
            12 => Format::Q4K,
            13 => Format::Q5K,
            14 => Format::Q6K,
            16 => Format::Iq2Xxs,
            17 => Format::Iq2Xs,
            18 => Format::Iq3Xxs,
            19 => Format::Iq1S,
            20 => Format::Iq4Nl,
            21 => Format::Iq3S,
            22 => Format::Iq2S,
            23 => Format::Iq4Xs,
            29 => Format::Iq1M,
            30 => Format::Bf16,
            34 => Format::Tq1_0,
            35 => Format::Tq2_0,
            39 => Format::Mxfp4Ggml,
            _ => return None,
        })
    }
}

/// A tensor's entry: within the file, of whole blocks, not empty.
#[derive(Debug)]
pub struct Tensor {
    /// Index of the file in the model.
    pub part: usize,
    /// Dimensions, fastest first; one at least, none of them 0.
    pub ne: Vec<usize>,
    pub kind: Kind,
    /// Where its bytes are in the file.
    pub bytes: Range<usize>,
}

impl Tensor {
    /// Columns of a row.
    pub fn cols(&self) -> usize {
        self.ne[0]
    }

    /// All dimensions but the columns, folded.
    pub fn rows(&self) -> usize {
        // No overflow: the entry's check multiplied all dimensions.
        self.ne[1..].iter().product()
    }
}

/// A parsed header.
pub struct Header {
    pub metadata: BTreeMap<String, Value>,
    /// Where the metadata values are in the file, each with its type in front.
    pub values: BTreeMap<String, Range<usize>>,
    pub tensors: Vec<(String, Tensor)>,
    /// Its length, without the padding behind it.
    pub bytes: usize,
}

/// Parses the header of the file `bytes`, which is part `part` of its model. `file` is for messages.
pub fn parse(file: &Path, bytes: &[u8], part: usize) -> Result<Header> {
    let mut r = Reader { file, bytes, at: 0, elements: 0 };
    if r.take(4, "the magic number")? != b"GGUF" {
        return Err(Error::file(file, "not a GGUF file: it does not begin with `GGUF`"));
    }
    match r.u32("the version")? {
        2 | 3 => {}
        v if matches!(v.swap_bytes(), 1..=3) => {
            return Err(Error::file(file, "a big-endian GGUF file; only little-endian ones can be read"));
        }
        v => return Err(Error::file(file, format!("GGUF version {v}; versions 2 and 3 can be read"))),
    }
    // A tensor's entry takes at least 24 bytes (length of its name, rank, type, offset), one of metadata 13.
    let tensor_count = r.count(24, "the number of tensors")?;
    if tensor_count > MAX_TENSORS {
        return Err(r.fail(format!("the number of tensors is {tensor_count}, at most {MAX_TENSORS} are read")));
    }
    let metadata_count = r.count(13, "the number of metadata entries")?;
    let (mut metadata, mut values) = (BTreeMap::new(), BTreeMap::new());
    for i in 0..metadata_count {
        let key = r.string(&format!("metadata key {i}"))?;
        let start = r.at;
        let kind = r.u32(&key)?;
        let value = r.value(kind, &key, 0)?;
        values.insert(key.clone(), start..r.at);
        if metadata.insert(key.clone(), value).is_some() {
            return Err(Error::tensor(file, key, "this metadata key is there twice"));
        }
    }
    let alignment = match metadata.get("general.alignment") {
        None => 32,
        Some(v) => match v.as_usize() {
            Some(a) if a.is_power_of_two() && a <= 1 << 30 => a,
            _ => {
                let what = format!("is {v:?}; the alignment must be a power of two of at most 2^30");
                return Err(Error::tensor(file, "general.alignment", what));
            }
        },
    };
    let mut tensors = Vec::with_capacity(tensor_count);
    for i in 0..tensor_count {
        let name = r.string(&format!("the name of tensor {i}"))?;
        let entry = r.tensor(&name, part, alignment)?;
        tensors.push((name, entry));
    }
    // Bytes count from the data part on until here, where its beginning is known.
    let data = r.at.next_multiple_of(alignment);
    for (name, t) in &mut tensors {
        let end = t.bytes.end.checked_add(data).filter(|&end| end <= bytes.len());
        let Some(end) = end else {
            let what = format!(
                "its {} bytes from byte {} of the data part on reach beyond the file's {} bytes: the file is truncated, or its \
                 header damaged",
                t.bytes.len(),
                t.bytes.start,
                bytes.len()
            );
            return Err(Error::tensor(file, name.clone(), what));
        };
        t.bytes = t.bytes.start + data..end;
    }
    refuse_overlaps(file, &tensors)?;
    Ok(Header { metadata, values, tensors, bytes: r.at })
}

fn refuse_overlaps(file: &Path, tensors: &[(String, Tensor)]) -> Result<()> {
    let mut order: Vec<_> = tensors.iter().collect();
    order.sort_by_key(|(_, t)| t.bytes.start);
    match order.windows(2).find(|pair| pair[0].1.bytes.end > pair[1].1.bytes.start) {
        Some(pair) => Err(Error::tensor(file, &pair[1].0, format!("its bytes overlap with those of `{}`", pair[0].0))),
        None => Ok(()),
    }
}

/// Reads little-endian values off a header, never past its end.
struct Reader<'a> {
    file: &'a Path,
    bytes: &'a [u8],
    at: usize,
    /// Array elements so far.
    elements: usize,
}

impl<'a> Reader<'a> {
    fn fail(&self, what: impl std::fmt::Display) -> Error {
        Error::file(self.file, format!("{what} (before byte {})", self.at))
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, n: usize, what: &str) -> Result<&'a [u8]> {
        let Some(taken) = self.bytes[self.at..].get(..n) else {
            let left = self.left();
            return Err(
                self.fail(format!("`{what}` takes {n} bytes, but {left} are left: the file is truncated or damaged"))
            );
        };
        self.at += n;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N, what)?);
        Ok(array)
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A count of things that take at least `each` bytes.
    fn count(&mut self, each: usize, what: &str) -> Result<usize> {
        let n = self.u64(what)?;
        let left = self.left();
        match usize::try_from(n) {
            Ok(n) if n.checked_mul(each).is_some_and(|bytes| bytes <= left) => Ok(n),
            _ => Err(self.fail(format!(
                "`{what}` is {n}, more than the {left} bytes left can hold: the file is truncated or damaged"
            ))),
        }
    }

    fn string(&mut self, what: &str) -> Result<String> {
        let n = self.count(1, &format!("length of {what}"))?;
        match std::str::from_utf8(self.take(n, what)?) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => Err(self.fail(format!("`{what}` is not UTF-8"))),
        }
    }

    fn value(&mut self, kind: u32, key: &str, nesting: u32) -> Result<Value> {
        Ok(match kind {
            0 => Value::Uint(u8::from_le_bytes(self.array(key)?).into()),
            1 => Value::Int(i8::from_le_bytes(self.array(key)?).into()),
            2 => Value::Uint(u16::from_le_bytes(self.array(key)?).into()),
            3 => Value::Int(i16::from_le_bytes(self.array(key)?).into()),
            4 => Value::Uint(self.u32(key)?.into()),
            5 => Value::Int(i32::from_le_bytes(self.array(key)?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array(key)?).into()),
            7 => Value::Bool(self.array::<1>(key)? != [0]),
            8 => Value::String(self.string(key)?),
            9 => {
                if nesting >= MAX_NESTING {
                    return Err(self.fail(format!("`{key}` nests arrays more than {MAX_NESTING} deep")));
                }
                let element = self.u32(key)?;
                let Some(each) = least_bytes(element) else {
                    return Err(self.fail(format!("`{key}` is an array of unknown type {element}")));
                };
                let n = self.count(each, &format!("length of array {key}"))?;
                self.elements = self.elements.saturating_add(n);
                if self.elements > MAX_ELEMENTS {
                    return Err(self.fail(format!("with `{key}`, arrays hold more than {MAX_ELEMENTS} elements")));
                }
                let mut values = Vec::with_capacity(n);
                for _ in 0..n {
                    values.push(self.value(element, key, nesting + 1)?);
                }
                Value::Array(values)
            }
            10 => Value::Uint(self.u64(key)?),
            11 => Value::Int(i64::from_le_bytes(self.array(key)?)),
            12 => Value::Float(f64::from_le_bytes(self.array(key)?)),
            _ => return Err(self.fail(format!("`{key}` has unknown type {kind}"))),
        })
    }

    /// A tensor's entry; its bytes count from the beginning of the data part.
    fn tensor(&mut self, name: &str, part: usize, alignment: usize) -> Result<Tensor> {
        let (file, rank) = (self.file, self.u32(name)?);
        let fail = |what: String| Error::tensor(file, name, what);
        if rank > MAX_RANK {
            return Err(fail(format!("has {rank} dimensions; {MAX_RANK} are the most")));
        }
        let mut ne = Vec::with_capacity(MAX_RANK as usize);
        for _ in 0..rank {
            ne.push(self.u64(name)?);
        }
        let (id, offset) = (self.u32(name)?, self.u64(name)?);
        let kind = match Kind::of(id) {
            Ok(kind) => kind,
            Err(Some(old)) => {
                return Err(fail(format!("has type {old}, which ggml no longer has; convert the model again")));
            }
            Err(None) => return Err(fail(format!("has type {id}, which is not known here"))),
        };
        if ne.contains(&0) {
            return Err(fail(format!("has dimensions {ne:?}: it is empty")));
        }
        if ne.is_empty() {
            ne.push(1);
        }
        if !ne[0].is_multiple_of(kind.block as u64) {
            return Err(fail(format!("its rows of {} are not whole {} blocks of {}", ne[0], kind.name, kind.block)));
        }
        let size = ne.iter().try_fold(1u64, |size, &n| size.checked_mul(n));
        let size = size.and_then(|s| (s / kind.block as u64).checked_mul(kind.block_bytes as u64));
        // All elements fit into 64 bits, so each dimension does; on smaller machines the file is too large to be mapped anyway.
        let dimensions: Option<Vec<usize>> = ne.iter().map(|&n| usize::try_from(n).ok()).collect();
        let (Some(size), Some(dimensions)) = (size.and_then(|s| usize::try_from(s).ok()), dimensions) else {
            return Err(fail(format!("its dimensions {ne:?} are too large: their product overflows")));
        };
        if !offset.is_multiple_of(alignment as u64) {
            return Err(fail(format!("begins at byte {offset} of the data part, which is no multiple of {alignment}")));
        }
        let range = usize::try_from(offset).ok().and_then(|start| Some(start..start.checked_add(size)?));
        match range {
            Some(bytes) => Ok(Tensor { part, ne: dimensions, kind, bytes }),
            None => Err(fail(format!("begins at byte {offset} of the data part, beyond any file"))),
        }
    }
}

/// Least bytes of a metadata value of a type.
fn least_bytes(kind: u32) -> Option<usize> {
    Some(match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        8 | 10 | 11 | 12 => 8,
        9 => 12,
        _ => return None,
    })
}
