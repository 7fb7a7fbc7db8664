//! Hugging Face directories: `config.json` and safetensors shards.
//!
//! The `safetensors` crate reads and checks each file's header; the shard index, the names and the formats are read here. What a
//! linear layer's format is, is told by the tensors that stand next to each other; of GPTQ and AWQ, the config must tell some things.

mod linear;
mod shards;
mod transposed;

use std::path::{Path, PathBuf};

use bytes::Bytes;
use serde_json::Value;

use super::names::{self, ExpertNames, Family, count};
use super::{Metadata, WeightSource};
use crate::error::{Error, Result};
use crate::format::{Format, Matrix};
use crate::layer::{LayerSpec, Proj};
use crate::routing::Routing;
use linear::{Linear, linear, mxfp4, plain, plain_format};
use shards::{Files, Shards, Tensor};
use transposed::Quantization;

/// No dimension of a model is larger: keeps products of two of them far from overflowing.
const MOST: usize = 1 << 24;

/// A Hugging Face directory of safetensors files, mapped.
pub struct SafetensorsSource {
    shards: Shards,
    config: Metadata,
    quantization: Quantization,
    family: &'static Family,
    prefix: &'static str,
    /// Number of layers; those beyond are for multi-token prediction.
    blocks: usize,
    routing: Option<Routing>,
    layers: Vec<LayerSpec>,
}

impl SafetensorsSource {
    /// Opens a directory. Files must not be truncated while the source or a matrix of it is in use: reading past the new end
    /// kills the process (SIGBUS).
    ///
    /// # Errors
    /// Files that are missing, truncated or damaged, unknown families, tensors that are missing or do not fit together.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::read(path.as_ref(), Files::Directory)
    }

    /// The same from memory: file names and contents, as of a checkpoint that is part of a program. `label` stands for the
    /// directory in messages.
    ///
    /// # Errors
    /// As [`SafetensorsSource::open`].
    pub fn from_files(label: &str, files: Vec<(String, Bytes)>) -> Result<Self> {
        Self::read(Path::new(label), Files::Memory(files.into_iter().collect()))
    }

    fn read(path: &Path, files: Files) -> Result<Self> {
        let file = path.join("config.json");
        let shards = Shards::open(path, files)?;
        let config = shards.json("config.json")?;
        let config = config.ok_or_else(|| Error::file(&file, "missing: it says what model the tensors are of"))?;
        let metadata = Metadata::HuggingFace(config.clone());
        let family = names::by_metadata(&metadata).ok_or_else(|| match metadata.family() {
            None => Error::tensor(&file, "model_type", "missing: what the model is stays unknown"),
            Some(name) => {
                let known = names::model_types().join(", ");
                Error::tensor(&file, "model_type", format!("`{name}` is not known here; known are {known}"))
            }
        })?;
        // Models with more than text describe the text part in a section of its own.
        let text = config.get("text_config").filter(|t| t.is_object()).unwrap_or(&config);
        check_blocks(&config, text, &file)?;
        let prefix = family.prefix(shards.tensors().keys().map(String::as_str));
        let blocks = config_count(text, &file, &["num_hidden_layers"])?;
        let quantization = Quantization::read(&config, text, &file)?;
        let mut source = SafetensorsSource {
            shards,
            config: metadata,
            quantization,
            family,
            prefix,
            blocks,
            routing: None,
            layers: Vec::new(),
        };
        source.layers = source.read_layers(text, &file)?;
        if let Some(layer) = source.layers.first() {
            source.routing = family.routing(text, layer.top_k);
            if let Some(routing) = &source.routing {
                routing.check(layer.experts).map_err(|e| Error::file(&file, e.to_string()))?;
            }
        }
        Ok(source)
    }

    /// The family's row in the table of names.
    pub fn family(&self) -> &'static Family {
        self.family
    }

    /// Checks every expert's tensors; reads headers only.
    fn read_layers(&self, config: &Value, file: &Path) -> Result<Vec<LayerSpec>> {
        let experts = config_count(config, file, names::EXPERTS_KEYS)?;
        let top_k = config_count(config, file, names::TOP_K_KEYS)?;
        let hidden = config_count(config, file, &["hidden_size"])?;
        let intermediate = config_count(config, file, &[self.family.intermediate_key])?;
        if top_k > experts {
            let what = format!("is {top_k}, but there are only {experts} experts");
            return Err(Error::tensor(file, names::TOP_K_KEYS[0], what));
        }
        let mut layers = Vec::new();
        for index in (0..self.blocks).filter(|&i| self.family.holds_experts(config, i)) {
            let mut spec = LayerSpec {
                index,
                experts,
                top_k,
                hidden,
                intermediate,
                formats: [Format::F32; 3],
                activation: self.family.activation,
                biases: false,
            };
            self.check_alternating(&mut spec)?;
            for proj in Proj::ALL {
                spec.formats[proj.index()] = match self.packed(index, proj) {
                    Some(packed) => self.packed_format(packed, &spec, proj)?,
                    None => self.common_format(&spec, proj)?,
                };
            }
            layers.push(spec);
        }
        if layers.is_empty() {
            return Err(Error::file(file, "no layer of this model holds experts: it is no Mixture-of-Experts model"));
        }
        Ok(layers)
    }

    /// A linear layer, of the shape that the config gives it.
    fn linear(&self, base: &str, shape: Option<(usize, usize)>) -> Result<Linear<'_>> {
        let found = linear(&self.shards, &self.quantization, base, shape.map(|s| s.1))?;
        match shape {
            Some((rows, cols)) if (found.rows, found.cols) != (rows, cols) => {
                let what = format!("is [{}, {}], but by the config it is [{rows}, {cols}]", found.rows, found.cols);
                Err(self.shards.fail(found.name, what))
            }
            _ => Ok(found),
        }
    }

    /// The format that a projection of every expert of a layer has.
    fn common_format(&self, spec: &LayerSpec, proj: Proj) -> Result<Format> {
        let (rows, cols) = spec.shape(proj);
        let mut common = None;
        for expert in 0..spec.experts {
            let found = self.linear(&self.base(spec.index, expert, proj), Some((rows, cols)))?;
            let first = *common.get_or_insert(found.format);
            if found.format != first {
                let what = format!(
                    "is {}, but expert 0 of this layer is {first}; one format per layer is supported",
                    found.format
                );
                return Err(self.shards.fail(found.name, what));
            }
        }
        common.ok_or_else(|| Error::file(self.shards.path(), "a layer without experts"))
    }

    fn packed_format(&self, (name, t): (&str, &Tensor), spec: &LayerSpec, proj: Proj) -> Result<Format> {
        let (rows, cols) = spec.shape(proj);
        let tall = if proj == Proj::Down { rows } else { 2 * rows };
        if let ExpertNames::Alternating(_) = self.family.experts {
            let all = self.all_experts(name)?;
            if t.shape[..2] != [spec.experts, tall] || all.cols() != cols {
                let (shape, wide) = (&t.shape[..2], all.cols());
                let what =
                    format!("holds {shape:?} rows of {wide}, but by the config [{}, {tall}] of {cols}", spec.experts);
                return Err(self.shards.fail(name, what));
            }
            return Ok(all.format());
        }
        if t.shape != [spec.experts, tall, cols] {
            let what = format!("has shape {:?}, but by the config it is [{}, {tall}, {cols}]", t.shape, spec.experts);
            return Err(self.shards.fail(name, what));
        }
        plain_format(t.dtype).ok_or_else(|| {
            self.shards.fail(name, format!("packed experts of type {:?} are not supported yet", t.dtype))
        })
    }

    /// The layouts of gpt-oss: MXFP4 tensors that must be there, and biases.
    fn check_alternating(&self, spec: &mut LayerSpec) -> Result<()> {
        let ExpertNames::Alternating(stem) = self.family.experts else { return Ok(()) };
        for proj in [Proj::Gate, Proj::Down] {
            let name = format!("{}{}.{stem}.{}", self.prefix, spec.index, fused(proj));
            let blocks = format!("{name}_blocks");
            if self.shards.get(&blocks).is_some() {
                continue;
            }
            return Err(match self.shards.get(&name) {
                Some(_) => self.shards.fail(&name, "experts of gpt-oss that are not in MXFP4 are not supported yet"),
                None => self.shards.fail(&blocks, "missing from the checkpoint"),
            });
        }
        for proj in [Proj::Gate, Proj::Down] {
            let (name, bias) = self.biases(spec.index, proj)?;
            let tall = if proj == Proj::Down { spec.hidden } else { 2 * spec.intermediate };
            if (bias.rows(), bias.cols()) != (spec.experts, tall) {
                let (rows, cols) = (bias.rows(), bias.cols());
                let what = format!("is [{rows}, {cols}], but by the config it is [{}, {tall}]", spec.experts);
                return Err(self.shards.fail(&name, what));
            }
        }
        spec.biases = true;
        Ok(())
    }

    /// Biases of a projection of all experts, those of gate and up alternating, and the tensor's name.
    fn biases(&self, layer: usize, proj: Proj) -> Result<(String, Matrix)> {
        let name = format!("{}{layer}.{}.{}_bias", self.prefix, self.family.expert_stem(), fused(proj));
        let bias = plain(&self.shards, &name)?;
        Ok((name, bias))
    }

    /// The tensor that holds a projection of all experts of a layer, where there is one.
    fn packed(&self, layer: usize, proj: Proj) -> Option<(&str, &Tensor)> {
        let (stem, suffix) = match self.family.experts {
            ExpertNames::Packed(stem, _) => (stem, ""),
            ExpertNames::Alternating(stem) => (stem, "_blocks"),
            ExpertNames::Each(..) => return None,
        };
        self.shards.get(&format!("{}{layer}.{stem}.{}{suffix}", self.prefix, fused(proj)))
    }

    /// What [`packed`](Self::packed) names, as one matrix of all experts.
    fn all_experts(&self, name: &str) -> Result<Matrix> {
        let (Some(stem), Some(codes)) = (name.strip_suffix("_blocks"), self.shards.get(name)) else {
            return plain(&self.shards, name);
        };
        let scales = format!("{stem}_scales");
        let scales =
            self.shards.get(&scales).ok_or_else(|| self.shards.fail(&scales, "missing from the checkpoint"))?;
        if codes.1.shape.len() != 4 || scales.1.shape.len() != 3 {
            let what = format!(
                "has shape {:?} and scales {:?}: four and three dimensions are due",
                codes.1.shape, scales.1.shape
            );
            return Err(self.shards.fail(name, what));
        }
        mxfp4(&self.shards, codes, scales)
    }

    /// The linear layer of a projection of one expert.
    fn base(&self, layer: usize, expert: usize, proj: Proj) -> String {
        format!("{}{layer}.{}", self.prefix, self.family.expert(expert, proj))
    }

    fn spec(&self, layer: usize, expert: usize) -> Result<&LayerSpec> {
        let spec = self.layers.binary_search_by_key(&layer, |l| l.index).ok().map(|i| &self.layers[i]);
        spec.filter(|l| expert < l.experts)
            .ok_or_else(|| Error::file(self.shards.path(), format!("there is no expert {expert} in layer {layer}")))
    }

    /// Whether a tensor is neither a routed expert nor part of multi-token prediction.
    fn is_dense(&self, name: &str) -> bool {
        let Some((layer, rest)) = name.strip_prefix(self.prefix).and_then(|r| r.split_once('.')) else {
            return !name.starts_with("mtp.");
        };
        let expert = rest.strip_prefix(self.family.expert_stem()).is_some_and(|r| r.starts_with('.'));
        !expert && layer.parse().is_ok_and(|l: usize| l < self.blocks)
    }
}

/// The tensor of a projection in names of all experts together.
fn fused(proj: Proj) -> &'static str {
    if proj == Proj::Down { "down_proj" } else { "gate_up_proj" }
}

/// A count in the config, which must be there.
fn config_count(config: &Value, file: &Path, keys: &[&str]) -> Result<usize> {
    let found = count(config, keys).filter(|n| (1..=MOST).contains(n));
    found.ok_or_else(|| {
        Error::tensor(file, keys.join("` or `"), format!("missing from the config, or not in 1..={MOST}"))
    })
}

/// Refuses FP8 blocks other than 128 x 128 and MXFP8's 1 x 32, which the shape of the scales cannot always tell.
fn check_blocks(config: &Value, text: &Value, file: &Path) -> Result<()> {
    let size = [config, text].into_iter().find_map(|c| c.get("quantization_config")?.get("weight_block_size"));
    match size.filter(|s| !s.is_null()) {
        Some(size) if ![[128, 128], [1, 32]].iter().any(|known| *size == serde_json::json!(known)) => {
            let what = format!("is {size}; blocks of [128, 128] are supported");
            Err(Error::tensor(file, "quantization_config.weight_block_size", what))
        }
        _ => Ok(()),
    }
}

impl WeightSource for SafetensorsSource {
    fn path(&self) -> &Path {
        self.shards.path()
    }

    fn layers(&self) -> &[LayerSpec] {
        &self.layers
    }

    fn matrix(&self, layer: usize, expert: usize, proj: Proj) -> Result<Matrix> {
        let spec = self.spec(layer, expert)?;
        let (rows, cols) = spec.shape(proj);
        let Some((name, _)) = self.packed(layer, proj) else {
            return self.linear(&self.base(layer, expert, proj), Some((rows, cols)))?.matrix(&self.shards);
        };
        let alternating = matches!(self.family.experts, ExpertNames::Alternating(_));
        let (tall, first, step) = match (proj, alternating) {
            (Proj::Gate, false) => (2 * rows, 0, 1),
            (Proj::Up, false) => (2 * rows, rows, 1),
            (Proj::Gate, true) => (2 * rows, 0, 2),
            (Proj::Up, true) => (2 * rows, 1, 2),
            (Proj::Down, _) => (rows, 0, 1),
        };
        let all = self.all_experts(name)?;
        all.select_rows(expert * tall + first, step, rows).map_err(|e| self.shards.fail(name, e))
    }

    fn bias(&self, layer: usize, expert: usize, proj: Proj) -> Result<Option<Vec<f32>>> {
        if !self.spec(layer, expert)?.biases {
            return Ok(None);
        }
        let (_, all) = self.biases(layer, proj)?;
        let mut bias = vec![0.0; all.cols()];
        all.decode_row(expert, &mut bias);
        Ok(Some(match proj {
            Proj::Gate => bias.into_iter().step_by(2).collect(),
            Proj::Up => bias.into_iter().skip(1).step_by(2).collect(),
            Proj::Down => bias,
        }))
    }

    fn tensor_name(&self, layer: usize, expert: usize, proj: Proj) -> (PathBuf, String) {
        let (name, shown) = match self.packed(layer, proj) {
            Some((name, _)) => (name.to_owned(), format!("{name}[{expert}]")),
            None => {
                let base = self.base(layer, expert, proj);
                let held = |name: &String| self.shards.get(name).is_some();
                let codes = ["weight_packed", "qweight"].map(|suffix| format!("{base}.{suffix}"));
                let name = codes.into_iter().find(held).unwrap_or_else(|| format!("{base}.weight"));
                (name.clone(), name)
            }
        };
        (self.shards.file_of(&name), shown)
    }

    fn release(&self, layer: usize, expert: usize) {
        for proj in Proj::ALL {
            match self.packed(layer, proj) {
                Some((name, t)) => {
                    let parts = t.shape.first().copied().unwrap_or(1);
                    self.shards.release(name, expert, parts);
                    if let Some(stem) = name.strip_suffix("_blocks") {
                        self.shards.release(&format!("{stem}_scales"), expert, parts);
                    }
                }
                None => self.release_tensor(&format!("{}.weight", self.base(layer, expert, proj))),
            }
        }
    }

    fn release_tensor(&self, name: &str) {
        self.shards.release(name, 0, 1);
        if let Some(base) = name.strip_suffix(".weight") {
            for suffix in linear::COMPANIONS {
                self.shards.release(&format!("{base}.{suffix}"), 0, 1);
            }
        }
    }

    fn metadata(&self) -> &Metadata {
        &self.config
    }

    fn routing(&self, layer: usize) -> Option<Routing> {
        self.spec(layer, 0).ok().and(self.routing.clone())
    }

    fn tensors(&self) -> Vec<String> {
        self.shards.tensors().keys().filter(|n| self.is_dense(n)).cloned().collect()
    }

    fn tensor(&self, name: &str) -> Result<Matrix> {
        match name.strip_suffix(".weight") {
            Some(base) => self.linear(base, None)?.matrix(&self.shards),
            None => plain(&self.shards, name),
        }
    }

    fn dense_bytes(&self) -> u64 {
        self.shards.tensors().iter().filter(|(n, _)| self.is_dense(n)).map(|(_, t)| t.byte_len() as u64).sum()
    }

    fn side_file(&self, name: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.shards.read(name)?.map(|b| b.to_vec()))
    }
}
