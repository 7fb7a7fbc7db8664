//! Checkpoints made of bytes, and what their refusals say. Each test uses a part.

#![allow(dead_code)]

pub mod gguf;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use kt_core::convert::{Container, Conversion, Options};
use kt_core::quantize::recode;
use kt_core::source::safetensors::SafetensorsSource;
use kt_core::{Format, Progress, Proj, Result, WeightSource, open};
use serde_json::{Value, json};

pub const HIDDEN: usize = 32;
pub const INTERMEDIATE: usize = 64;
pub const EXPERTS: usize = 2;
pub const GATE_1: &str = "model.layers.0.mlp.experts.1.gate_proj";

/// A directory that is removed with its content.
pub struct Dir(pub PathBuf);

impl Dir {
    /// An empty one; `name` makes it this test's own.
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kt-test-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Dir(path)
    }

    /// Writes a file into it.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, content).unwrap();
        path
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The error's text, which must contain all of `wants`.
#[track_caller]
pub fn refused<T>(outcome: Result<T>, wants: &[&str]) {
    let text = match outcome {
        Ok(_) => panic!("accepted, but an error with {wants:?} was expected"),
        Err(e) => e.to_string(),
    };
    for want in wants {
        assert!(text.contains(want), "`{want}` is not in: {text}");
    }
}

/// Converts a source's experts and nothing else, to each of these formats (`None`: as they are): their values are what the encoder makes
/// of the source's.
#[track_caller]
pub fn converts_experts(source: &Arc<dyn WeightSource>, container: Container, formats: &[Option<Format>]) {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let dir = Dir::new(&format!("experts-{}", COUNT.fetch_add(1, Ordering::Relaxed)));
    for (i, format) in formats.iter().enumerate() {
        let output = dir.0.join(match container {
            Container::Safetensors => format!("{i}"),
            Container::Gguf => format!("{i}.gguf"),
        });
        let options =
            Options { experts: format.map(|f| [f; 3]), experts_only: true, ..Options::new(container, Format::F32) };
        let conversion = Conversion::plan(source.clone(), &output, options).unwrap();
        conversion.write(&Progress::default()).unwrap().publish(None).unwrap();
        let written = open(&output).unwrap();
        assert!(written.tensors().is_empty());
        assert_eq!(source.layers().len(), written.layers().len());
        for (spec, out) in source.layers().iter().zip(written.layers()) {
            assert_eq!((spec.index, spec.experts, spec.biases), (out.index, out.experts, out.biases));
            for (expert, proj) in (0..spec.experts).flat_map(|e| Proj::ALL.map(|p| (e, p))) {
                let before = source.matrix(spec.index, expert, proj).unwrap();
                let due = recode(&before, format.unwrap_or(before.format())).unwrap();
                let got = written.matrix(spec.index, expert, proj).unwrap();
                assert!(got.decode() == due.decode(), "layer {}, expert {expert}, {proj:?} in {format:?}", spec.index);
                let bias = |s: &dyn WeightSource| s.bias(spec.index, expert, proj).unwrap();
                assert_eq!(bias(&**source), bias(&*written));
            }
        }
    }
}

#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

pub fn tensor(name: impl Into<String>, dtype: &'static str, shape: &[usize]) -> Tensor {
    let each = match dtype {
        "F32" | "I32" => 4,
        "BF16" | "F16" => 2,
        "I64" => 8,
        _ => 1,
    };
    Tensor { name: name.into(), dtype, shape: shape.to_vec(), bytes: vec![0; shape.iter().product::<usize>() * each] }
}

/// A safetensors file of a header and data.
pub fn container(header: &Value, data: &[u8]) -> Vec<u8> {
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

pub fn safetensors(tensors: &[Tensor]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for t in tensors {
        let offsets = [data.len(), data.len() + t.bytes.len()];
        header.insert(t.name.clone(), json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": offsets}));
        data.extend(&t.bytes);
    }
    container(&header.into(), &data)
}

pub fn config() -> Value {
    json!({
        "model_type": "qwen3_moe", "num_experts": EXPERTS, "num_experts_per_tok": 1, "num_hidden_layers": 1,
        "hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE,
    })
}

pub fn shape(proj: Proj) -> [usize; 2] {
    if proj == Proj::Down { [HIDDEN, INTERMEDIATE] } else { [INTERMEDIATE, HIDDEN] }
}

/// The tensors of a model; `linear` makes those of one linear layer from its name, rows and columns.
pub fn model(linear: impl Fn(&str, usize, usize) -> Vec<Tensor>) -> Vec<Tensor> {
    let mut tensors = vec![tensor("model.norm.weight", "BF16", &[HIDDEN])];
    for (e, proj) in (0..EXPERTS).flat_map(|e| Proj::ALL.map(|p| (e, p))) {
        let [rows, cols] = shape(proj);
        tensors.extend(linear(&format!("model.layers.0.mlp.experts.{e}.{}_proj", proj.name()), rows, cols));
    }
    tensors
}

pub fn bf16(name: &str, rows: usize, cols: usize) -> Vec<Tensor> {
    vec![tensor(format!("{name}.weight"), "BF16", &[rows, cols])]
}

/// Replaces the tensors of one linear layer by their name's suffix.
pub fn changed(mut tensors: Vec<Tensor>, name: &str, change: impl FnOnce(&mut Tensor)) -> Vec<Tensor> {
    change(tensors.iter_mut().find(|t| t.name == name).unwrap_or_else(|| panic!("{name}")));
    tensors
}

pub fn without(mut tensors: Vec<Tensor>, name: &str) -> Vec<Tensor> {
    let before = tensors.len();
    tensors.retain(|t| t.name != name);
    assert_eq!(tensors.len() + 1, before, "{name}");
    tensors
}

pub fn with(mut tensors: Vec<Tensor>, extra: Tensor) -> Vec<Tensor> {
    tensors.push(extra);
    tensors
}

pub fn from_files(config: &Value, files: &[(&str, Vec<u8>)]) -> Result<SafetensorsSource> {
    let mut all = vec![("config.json".to_owned(), Bytes::from(config.to_string()))];
    all.extend(files.iter().map(|(n, b)| (n.to_string(), Bytes::from(b.clone()))));
    SafetensorsSource::from_files("checkpoint", all)
}

pub fn from_tensors(config: &Value, tensors: &[Tensor]) -> Result<SafetensorsSource> {
    from_files(config, &[("model.safetensors", safetensors(tensors))])
}

pub fn set(key: &str, value: Value) -> Value {
    let mut config = config();
    config[key] = value;
    config
}
