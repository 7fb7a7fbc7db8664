//! Writes small GGUF files, right or wrong.

use kt_core::source::gguf::GgufSource;
use kt_core::{Format, Proj, Result};

pub const HIDDEN: usize = 32;
pub const INTERMEDIATE: usize = 64;
pub const EXPERTS: usize = 2;

/// `[rows, cols]` of a projection of [`Gguf::model`].
pub fn shape(proj: Proj) -> [usize; 2] {
    if proj == Proj::Down { [HIDDEN, INTERMEDIATE] } else { [INTERMEDIATE, HIDDEN] }
}

/// A string as GGUF has it.
pub fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Name, dimensions, type and offset of a tensor.
pub type Entry = (String, Vec<u64>, u32, u64);

#[derive(Clone)]
pub struct Gguf {
    pub version: u32,
    /// Key, type and value.
    pub pairs: Vec<(String, u32, Vec<u8>)>,
    pub tensors: Vec<Entry>,
    pub data: Vec<u8>,
    /// Numbers of tensors and pairs to write in place of the true ones.
    pub counts: [Option<u64>; 2],
}

/// Number and format of every type that holds weights.
pub const TYPES: [(u32, Format); 25] = [
    (0, Format::F32),
    (1, Format::F16),
    (2, Format::Q4_0),
    (3, Format::Q4_1),
    (6, Format::Q5_0),
    (7, Format::Q5_1),
    (8, Format::Q8_0),
    (10, Format::Q2K),
    (11, Format::Q3K),
    (12, Format::Q4K),
    (13, Format::Q5K),
    (14, Format::Q6K),
    (16, Format::Iq2Xxs),
    (17, Format::Iq2Xs),
    (18, Format::Iq3Xxs),
    (19, Format::Iq1S),
    (20, Format::Iq4Nl),
    (21, Format::Iq3S),
    (22, Format::Iq2S),
    (23, Format::Iq4Xs),
    (29, Format::Iq1M),
    (30, Format::Bf16),
    (34, Format::Tq1_0),
    (35, Format::Tq2_0),
    (39, Format::Mxfp4Ggml),
];

/// The number of a format's type.
pub fn type_id(format: Format) -> u32 {
    TYPES.iter().find(|t| t.1 == format).unwrap().0
}

const Q8_0: u32 = 8;

impl Gguf {
    /// An architecture without anything else.
    pub fn of(architecture: &str) -> Gguf {
        let g = Gguf { version: 3, pairs: vec![], tensors: vec![], data: vec![], counts: [None; 2] };
        g.text("general.architecture", architecture)
    }

    /// A model of one layer whose experts are Q8_0.
    pub fn model() -> Gguf {
        let mut g = Gguf::of("qwen3moe");
        for (key, value) in
            [("block_count", 1), ("embedding_length", HIDDEN), ("expert_count", EXPERTS), ("expert_used_count", 1)]
        {
            g = g.uint(&format!("qwen3moe.{key}"), value as u32);
        }
        g.tensor("output_norm.weight", &[HIDDEN as u64], 0, HIDDEN * 4);
        for proj in Proj::ALL {
            let [rows, cols] = shape(proj);
            let ne = [cols as u64, rows as u64, EXPERTS as u64];
            g.tensor(&format!("blk.0.ffn_{}_exps.weight", proj.name()), &ne, Q8_0, EXPERTS * rows * cols / 32 * 34);
        }
        g
    }

    /// Adds a tensor of a format.
    pub fn weights(&mut self, name: &str, ne: &[usize], format: Format, bytes: &[u8]) {
        let ne: Vec<u64> = ne.iter().map(|&n| n as u64).collect();
        self.put(name, &ne, type_id(format), bytes);
    }

    /// Adds a tensor of zeros.
    pub fn tensor(&mut self, name: &str, ne: &[u64], kind: u32, bytes: usize) {
        self.put(name, ne, kind, &vec![0; bytes]);
    }

    /// Adds a tensor of these bytes.
    pub fn put(&mut self, name: &str, ne: &[u64], kind: u32, bytes: &[u8]) {
        self.tensors.push((name.into(), ne.to_vec(), kind, self.data.len() as u64));
        self.data.extend(bytes);
        self.data.resize(self.data.len().next_multiple_of(32), 0);
    }

    /// Sets a metadata entry.
    pub fn pair(mut self, key: &str, kind: u32, value: Vec<u8>) -> Gguf {
        self.pairs.retain(|p| p.0 != key);
        self.pairs.push((key.into(), kind, value));
        self
    }

    pub fn uint(self, key: &str, value: u32) -> Gguf {
        self.pair(key, 4, value.to_le_bytes().to_vec())
    }

    pub fn float(self, key: &str, value: f32) -> Gguf {
        self.pair(key, 6, value.to_le_bytes().to_vec())
    }

    pub fn flag(self, key: &str, value: bool) -> Gguf {
        self.pair(key, 7, vec![value.into()])
    }

    pub fn text(self, key: &str, value: &str) -> Gguf {
        let mut bytes = Vec::new();
        text(&mut bytes, value);
        self.pair(key, 8, bytes)
    }

    pub fn without_pair(mut self, key: &str) -> Gguf {
        self.pairs.retain(|p| p.0 != key);
        self
    }

    /// Changes the entry of a tensor: name, dimensions, type, offset.
    pub fn entry(mut self, name: &str, change: impl FnOnce(&mut Entry)) -> Gguf {
        change(self.tensors.iter_mut().find(|t| t.0 == name).unwrap());
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.counts[0].unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.counts[1].unwrap_or(self.pairs.len() as u64).to_le_bytes());
        for (key, kind, value) in &self.pairs {
            text(&mut out, key);
            out.extend(kind.to_le_bytes());
            out.extend(value);
        }
        for (name, ne, kind, offset) in &self.tensors {
            text(&mut out, name);
            out.extend((ne.len() as u32).to_le_bytes());
            out.extend(ne.iter().flat_map(|n| n.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(&self.data);
        out
    }

    pub fn open(&self) -> Result<GgufSource> {
        GgufSource::from_bytes("file.gguf", vec![self.bytes().into()])
    }
}
