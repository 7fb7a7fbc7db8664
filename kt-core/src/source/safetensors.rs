//! Hugging Face directories: `config.json` and safetensors shards.
//!
//! The `safetensors` crate reads and checks each file's header; the shard index, the names and the formats are read here. What a
//! linear layer's format is, is told by the tensors that stand next to each other; of GPTQ and AWQ, the config must tell some things.

pub(crate) mod linear;
pub(super) mod shards;
pub(crate) mod transposed;

use std::path::{Path, PathBuf};

use bytes::Bytes;
use serde_json::Value;

use super::model::{self, Model};
use super::names::{ExpertNames, Family};
use super::{Metadata, Reads, Stored, WeightSource};
use crate::error::{Error, Result};
use crate::format::{Format, Matrix, ScaleType};
use crate::layer::{LayerSpec, Proj};
use crate::routing::Routing;
use linear::{Linear, inputs_first, linear, mxfp4, plain, plain_format};
use shards::{Files, Shards, Tensor};
use transposed::Quantization;

/// A Hugging Face directory of safetensors files, mapped.
pub struct SafetensorsSource {
    shards: Shards,
    model: Model,
    quantization: Quantization,
    prefix: &'static str,
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
        Self::from_shards(Shards::open(path, files)?)
    }

    pub(super) fn from_shards(shards: Shards) -> Result<Self> {
        let file = shards.path().join("config.json");
        let config = shards.json("config.json")?;
        let model = Model::read(config.clone(), &file)?;
        let config = config.unwrap_or_default();
        let quantization =
            config.get("quantization_config").or_else(|| model::text(&config).get("quantization_config"));
        let quantization = quantization.unwrap_or(&Value::Null);
        check_blocks(quantization, &file)?;
        let quantization = Quantization::read(quantization, &file)?;
        let prefix = model.family.prefix(shards.tensors().keys().map(String::as_str));
        let mut source = SafetensorsSource { shards, model, quantization, prefix };
        for i in 0..source.model.layers.len() {
            source.model.layers[i] = source.read_layer(source.model.layers[i].clone())?;
        }
        Ok(source)
    }

    /// The family's row in the table of names.
    pub fn family(&self) -> &'static Family {
        self.model.family
    }

    /// Checks every expert's tensors; reads headers only.
    fn read_layer(&self, mut spec: LayerSpec) -> Result<LayerSpec> {
        self.check_alternating(&mut spec)?;
        for proj in Proj::ALL {
            let i = proj.index();
            (spec.formats[i], spec.scales[i]) = match self.packed(spec.index, proj) {
                Some(packed) => (self.packed_format(packed, &spec, proj)?, None),
                None => self.common_format(&spec, proj)?,
            };
        }
        Ok(spec)
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

    /// The format that a projection of every expert of a layer has, and the type of the first one's scales.
    fn common_format(&self, spec: &LayerSpec, proj: Proj) -> Result<(Format, Option<ScaleType>)> {
        let (rows, cols) = spec.shape(proj);
        let mut common = None;
        for expert in 0..spec.experts {
            let found = self.linear(&self.base(spec.index, expert, proj), Some((rows, cols)))?;
            let (first, _) = *common.get_or_insert((found.format, found.scale_type(&self.shards)));
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
        if name.ends_with("_blocks") {
            let all = self.all_experts(name)?;
            if t.shape[..2] != [spec.experts, tall] || all.cols() != cols {
                let (shape, wide) = (&t.shape[..2], all.cols());
                let what =
                    format!("holds {shape:?} rows of {wide}, but by the config [{}, {tall}] of {cols}", spec.experts);
                return Err(self.shards.fail(name, what));
            }
            return Ok(all.format());
        }
        let inputs_first = self.alternates();
        let due = if inputs_first { [spec.experts, cols, tall] } else { [spec.experts, tall, cols] };
        if t.shape != due {
            let what = format!("has shape {:?}, but by the config it is {due:?}", t.shape);
            return Err(self.shards.fail(name, what));
        }
        plain_format(t.dtype).ok_or_else(|| {
            self.shards.fail(name, format!("packed experts of type {:?} are not supported yet", t.dtype))
        })
    }

    /// Whether the rows of gate and up alternate, as in gpt-oss; what is not in MXFP4 has inputs first then.
    fn alternates(&self) -> bool {
        matches!(self.model.family.experts, ExpertNames::Alternating(_))
    }

    /// The layouts of gpt-oss: tensors of all experts that must be there, and biases.
    fn check_alternating(&self, spec: &mut LayerSpec) -> Result<()> {
        let ExpertNames::Alternating(stem) = self.model.family.experts else { return Ok(()) };
        for proj in [Proj::Gate, Proj::Down] {
            if self.packed(spec.index, proj).is_none() {
                let name = format!("{}{}.{stem}.{}_blocks", self.prefix, spec.index, fused(proj));
                return Err(self
                    .shards
                    .fail(&name, "missing from the checkpoint, and so is the same without `_blocks`"));
            }
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
        let name = format!("{}{layer}.{}.{}_bias", self.prefix, self.model.family.expert_stem(), fused(proj));
        let bias = plain(&self.shards, &name)?;
        Ok((name, bias))
    }

    /// The tensor that holds a projection of all experts of a layer, where there is one.
    fn packed(&self, layer: usize, proj: Proj) -> Option<(&str, &Tensor)> {
        let named = |stem: &str, suffix: &str| {
            self.shards.get(&format!("{}{layer}.{stem}.{}{suffix}", self.prefix, fused(proj)))
        };
        match self.model.family.experts {
            ExpertNames::Packed(stem, _) => named(stem, ""),
            ExpertNames::Alternating(stem) => named(stem, "_blocks").or_else(|| named(stem, "")),
            ExpertNames::Each(..) => None,
        }
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
        format!("{}{layer}.{}", self.prefix, self.model.family.expert(expert, proj))
    }

    /// Whether a tensor is neither a routed expert nor part of multi-token prediction.
    fn is_dense(&self, name: &str) -> bool {
        let Some((layer, rest)) = name.strip_prefix(self.prefix).and_then(|r| r.split_once('.')) else {
            return !name.starts_with("mtp.");
        };
        let expert = rest.strip_prefix(self.model.family.expert_stem()).is_some_and(|r| r.starts_with('.'));
        !expert && layer.parse().is_ok_and(|l: usize| l < self.model.blocks)
    }
}

/// The tensor of a projection in names of all experts together.
fn fused(proj: Proj) -> &'static str {
    if proj == Proj::Down { "down_proj" } else { "gate_up_proj" }
}

/// Refuses FP8 blocks other than 128 x 128 and MXFP8's 1 x 32, which the shape of the scales cannot always tell.
fn check_blocks(quantization: &Value, file: &Path) -> Result<()> {
    match quantization.get("weight_block_size").filter(|s| !s.is_null()) {
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

    fn fingerprint(&self) -> Option<u128> {
        self.shards.fingerprint().finish()
    }

    fn layers(&self) -> &[LayerSpec] {
        &self.model.layers
    }

    fn matrix(&self, layer: usize, expert: usize, proj: Proj) -> Result<Matrix> {
        let spec = self.model.layer(layer, expert, self.path())?;
        let (rows, cols) = spec.shape(proj);
        let Some((name, t)) = self.packed(layer, proj) else {
            return self.linear(&self.base(layer, expert, proj), Some((rows, cols)))?.matrix(&self.shards);
        };
        let (tall, first, step) = match (proj, self.alternates()) {
            (Proj::Gate, false) => (2 * rows, 0, 1),
            (Proj::Up, false) => (2 * rows, rows, 1),
            (Proj::Gate, true) => (2 * rows, 0, 2),
            (Proj::Up, true) => (2 * rows, 1, 2),
            (Proj::Down, _) => (rows, 0, 1),
        };
        if self.alternates() && !name.ends_with("_blocks") {
            return inputs_first(&self.shards, (name, t), expert, (tall, cols), (first, step, rows));
        }
        let all = self.all_experts(name)?;
        all.select_rows(expert * tall + first, step, rows).map_err(|e| self.shards.fail(name, e))
    }

    fn reads(&self, layer: &LayerSpec, proj: Proj) -> Reads {
        let (rows, cols) = layer.shape(proj);
        let bytes = layer.format(proj).stored_bytes(rows, cols);
        let copies = match self.packed(layer.index, proj) {
            Some((name, _)) => self.alternates() && !name.ends_with("_blocks"),
            None => self.linear(&self.base(layer.index, 0, proj), None).is_ok_and(|l| l.copies()),
        };
        Reads { mapped_bytes: bytes, copied_bytes: if copies { bytes } else { 0 } }
    }

    fn bias(&self, layer: usize, expert: usize, proj: Proj) -> Result<Option<Vec<f32>>> {
        if !self.model.layer(layer, expert, self.path())?.biases {
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
        &self.model.metadata
    }

    fn routing(&self, layer: usize) -> Option<Routing> {
        self.model.routing(layer)
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

    fn stored(&self, name: &str) -> Option<Stored> {
        self.shards.stored(name)
    }

    fn side_file(&self, name: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.shards.read(name)?.map(|b| b.to_vec()))
    }
}
