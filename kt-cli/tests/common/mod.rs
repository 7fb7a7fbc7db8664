//! Models and reference outputs for the tests.
#![allow(dead_code)] // each test program uses its part

pub mod cgroup;
pub mod gguf;
pub mod written;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kt::WeightSource;
use kt_cli::host::{Cache, Model, ModelConfig, Rows, Sampler};

/// The reference checkpoints, below `reference`.
pub const REFERENCES: [&str; 9] = [
    "qwen3_moe/bf16",
    "qwen3_moe/fp8_block",
    "qwen3_moe/rawint4",
    "qwen3_moe/gguf-Q8_0",
    "qwen3_moe/gguf-Q6_K",
    "qwen3_moe/gguf-Q4_K",
    "deepseek_v3/bf16",
    "deepseek_v3/fp8_block",
    "deepseek_v3/rawint4",
];

/// A path below `tests/data`.
pub fn data(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data")).join(path)
}

/// Opens a reference checkpoint: the GGUF file of its directory, or the directory.
pub fn open(directory: &Path) -> Arc<dyn WeightSource> {
    let files = std::fs::read_dir(directory).unwrap().map(|f| f.unwrap().path());
    let gguf = files.filter(|f| f.extension().is_some_and(|e| e == "gguf")).min();
    kt::open(gguf.as_deref().unwrap_or(directory)).unwrap()
}

/// A runtime on the backend of this name, or on the best.
pub fn runtime(backend: Option<&str>) -> kt::Runtime {
    let builder = kt::runtime();
    match backend {
        Some(name) => builder.backend(name).build().unwrap(),
        None => builder.build().unwrap(),
    }
}

/// Loads a model for up to `positions` tokens.
pub fn load(source: &Arc<dyn WeightSource>, backend: Option<&str>, positions: usize) -> Model {
    let config = ModelConfig::read(&**source).unwrap();
    Model::load(&runtime(backend), source, &config, (positions, Rows::All), &Default::default(), Arc::default())
        .unwrap()
}

/// All logits of a sequence, `[ids, vocabulary]`.
pub fn logits(model: &Model, ids: &[u32]) -> Vec<f32> {
    let mut cache = Cache::new(model.config(), ids.len()).unwrap();
    model.forward(ids, &mut cache, Rows::All).unwrap()
}

/// The `count` likeliest tokens behind a prompt, one after the other.
pub fn greedy(model: &Model, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut cache = Cache::new(model.config(), prompt.len() + count).unwrap();
    let mut row = model.forward(prompt, &mut cache, Rows::Last).unwrap();
    let mut ids = Vec::new();
    while ids.len() < count {
        ids.push(Sampler::greedy().next(&row));
        row = model.forward(&ids[ids.len() - 1..], &mut cache, Rows::Last).unwrap();
    }
    ids
}

/// Outputs of an independent implementation.
pub struct Reference {
    pub ids: Vec<u32>,
    pub logits: Vec<f32>,
    pub greedy_ids: Vec<u32>,
}

impl Reference {
    /// Reads `reference.safetensors`.
    pub fn read(path: PathBuf) -> Self {
        let bytes = std::fs::read(&path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let words = |name: &str| -> Vec<[u8; 4]> {
            file.tensor(name)
                .map(|t| t.data().chunks_exact(4).map(|b| b.try_into().unwrap()).collect())
                .unwrap_or_default()
        };
        let ints =
            |name: &str| words(name).into_iter().map(|w| u32::try_from(i32::from_le_bytes(w)).unwrap()).collect();
        let logits = words("logits").into_iter().map(f32::from_le_bytes).collect();
        Reference { ids: ints("input_ids"), logits, greedy_ids: ints("greedy_ids") }
    }
}

/// Largest difference.
pub fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |m, d| if d.is_nan() { f32::NAN } else { m.max(d) })
}

/// Median over rows of the relative RMS difference: single rows may rightly be off where a close routing decision fell
/// the other way.
pub fn median_relative_rms(got: &[f32], want: &[f32], width: usize) -> f64 {
    assert_eq!(got.len(), want.len());
    let mut rows: Vec<f64> = got
        .chunks_exact(width)
        .zip(want.chunks_exact(width))
        .map(|(g, w)| {
            let error: f64 = g.iter().zip(w).map(|(g, w)| (*g as f64 - *w as f64).powi(2)).sum();
            (error / w.iter().map(|w| (*w as f64).powi(2)).sum::<f64>()).sqrt()
        })
        .collect();
    rows.sort_by(f64::total_cmp);
    rows[rows.len() / 2]
}
