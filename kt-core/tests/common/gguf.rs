//! Writes small GGUF files, right or wrong.

use kt_core::source::gguf::GgufSource;
use kt_core::{Proj, Result};

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

pub const Q8_0: u32 = 8;

impl Gguf {
    /// A model of one layer whose experts are Q8_0.
    pub fn model() -> Gguf {
        let mut g = Gguf { version: 3, pairs: vec![], tensors: vec![], data: vec![], counts: [None; 2] };
        let mut name = Vec::new();
        text(&mut name, "qwen3moe");
        g.pairs.push(("general.architecture".into(), 8, name));
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
