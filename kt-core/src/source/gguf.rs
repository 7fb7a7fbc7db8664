//! GGUF files, v2 and v3, whole or split.

mod header;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use bytes::Bytes;

use super::WeightSource;
use super::map::Map;
use super::metadata::{Metadata, Value};
use super::names::{self, Family};
use crate::error::{Error, Result};
use crate::format::{Format, Matrix};
use crate::layer::{LayerSpec, Proj};
use crate::routing::Routing;
use header::Tensor;

/// `base-00002-of-00005.gguf` as ("base", 2, 5).
fn split_name(path: &Path) -> Option<(&str, usize, usize)> {
    let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
    let (rest, total) = stem.rsplit_once("-of-")?;
    let (base, number) = rest.rsplit_once('-')?;
    let digits = |s: &str| (s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit())).then(|| s.parse::<usize>().ok())?;
    let (number, total) = (digits(number)?, digits(total)?);
    (1..=total).contains(&number).then_some((base, number, total))
}

/// Whether two files are, by their names, parts of one split model (or the same file).
pub fn is_part_of(first: &Path, other: &Path) -> bool {
    match (split_name(first), split_name(other)) {
        (Some(a), Some(b)) => first.parent() == other.parent() && (a.0, a.2) == (b.0, b.2),
        _ => first == other,
    }
}

/// The files of a model, in order, given any of them.
fn parts_of(path: &Path) -> Result<Vec<PathBuf>> {
    let Some((base, _, total)) = split_name(path) else { return Ok(vec![path.to_owned()]) };
    let names = (1..=total).map(|i| format!("{base}-{i:05}-of-{total:05}.gguf"));
    let (there, missing): (Vec<_>, Vec<_>) = names.partition(|n| path.with_file_name(n).is_file());
    if !missing.is_empty() {
        let what = format!("one of {total} parts, of which these are missing: {}; download them", missing.join(", "));
        return Err(Error::file(path, what));
    }
    Ok(there.into_iter().map(|n| path.with_file_name(n)).collect())
}

/// A GGUF model, mapped.
pub struct GgufSource {
    path: PathBuf,
    parts: Vec<(PathBuf, Map)>,
    tensors: BTreeMap<String, Tensor>,
    metadata: Metadata,
    architecture: String,
    family: &'static Family,
    /// Number of layers without those for multi-token prediction.
    blocks: usize,
    layers: Vec<LayerSpec>,
}

/// Where a projection of a layer's experts is.
struct Stacked<'a> {
    name: &'a str,
    tensor: &'a Tensor,
    /// Projections in the tensor: 2 where gate and up are fused, gate's rows first.
    fused: usize,
    /// Which of them.
    nth: usize,
}

impl GgufSource {
    /// Opens a GGUF file; of a split one any part, and finds the others beside it. Files must not be truncated while the source or a
    /// matrix of it is in use: reading past the new end kills the process (SIGBUS).
    ///
    /// # Errors
    /// Files that are missing, truncated or damaged, unknown architectures, tensors that do not fit together.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let parts = parts_of(path)?.into_iter().map(|p| Ok((p.clone(), Map::open(&p)?))).collect::<Result<_>>()?;
        Self::from_parts(path, parts)
    }

    /// The same from memory: the contents of one file, or of all parts in order. `label` stands for the file in messages.
    ///
    /// # Errors
    /// As [`GgufSource::open`].
    pub fn from_bytes(label: &str, parts: Vec<Bytes>) -> Result<Self> {
        let parts = parts.into_iter().map(|b| (PathBuf::from(label), Map::from_bytes(b))).collect();
        Self::from_parts(Path::new(label), parts)
    }

    fn from_parts(path: &Path, parts: Vec<(PathBuf, Map)>) -> Result<Self> {
        let (mut tensors, mut metadata) = (BTreeMap::new(), BTreeMap::new());
        for (i, (file, map)) in parts.iter().enumerate() {
            let header = header::parse(file, map.bytes(), i)?;
            check_split(file, &header.metadata, i, parts.len())?;
            for (name, tensor) in header.tensors {
                if tensors.contains_key(&name) {
                    return Err(Error::tensor(file, name, "this tensor is there twice"));
                }
                tensors.insert(name, tensor);
            }
            if i == 0 {
                metadata = header.metadata;
            }
        }
        let Some((first, _)) = parts.first() else { return Err(Error::file(path, "no file was given")) };
        let stated = metadata.get("split.tensors.count").and_then(Value::as_usize);
        if let Some(count) = stated.filter(|&n| n != tensors.len()) {
            let what = format!("is {count}, but the parts hold {} tensors", tensors.len());
            return Err(Error::tensor(first, "split.tensors.count", what));
        }
        let Some(architecture) = metadata.get("general.architecture").and_then(Value::as_str).map(str::to_owned) else {
            return Err(Error::tensor(first, "general.architecture", "missing: what the model is stays unknown"));
        };
        let family = names::by_architecture(&architecture).ok_or_else(|| {
            let what = format!("`{architecture}` is not known here; known are {}", names::architectures().join(", "));
            Error::tensor(first, "general.architecture", what)
        })?;
        let mut source = GgufSource {
            path: path.to_owned(),
            parts,
            tensors,
            metadata: Metadata::Gguf(metadata),
            architecture,
            family,
            blocks: 0,
            layers: Vec::new(),
        };
        // The last layers may be for multi-token prediction.
        let extra = source.value("nextn_predict_layers").and_then(Value::as_usize).unwrap_or(0);
        source.blocks = source.count("block_count")?.saturating_sub(extra);
        source.layers = source.read_layers()?;
        Ok(source)
    }

    /// The family's row in the table of names.
    pub fn family(&self) -> &'static Family {
        self.family
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    /// Metadata under the architecture's prefix.
    fn value(&self, key: &str) -> Option<&Value> {
        let Metadata::Gguf(map) = &self.metadata else { return None };
        map.get(&self.key(key))
    }

    fn count(&self, key: &str) -> Result<usize> {
        let found = self.value(key).and_then(Value::as_usize).filter(|&n| n > 0);
        found.ok_or_else(|| self.fail_key(key, "missing from the metadata, or not a count of at least 1"))
    }

    fn fail_key(&self, key: &str, what: impl Into<String>) -> Error {
        Error::tensor(&self.parts[0].0, self.key(key), what)
    }

    /// An error about a tensor; about one that is missing, it names the model.
    fn fail(&self, name: &str, what: impl Into<String>) -> Error {
        let file = self.tensors.get(name).map_or(&self.path, |t| &self.parts[t.part].0);
        Error::tensor(file, name, what)
    }

    fn format(&self, name: &str, t: &Tensor) -> Result<Format> {
        t.kind.format().ok_or_else(|| {
            let what =
                "which holds no weights that can be read; convert it to F32, F16, BF16, a Q, IQ or TQ type, or MXFP4";
            self.fail(name, format!("has type {}, {what}", t.kind.name))
        })
    }

    fn stacked(&self, layer: usize, proj: Proj) -> Result<Stacked<'_>> {
        let find = |what: &str| self.tensors.get_key_value(&format!("blk.{layer}.ffn_{what}_exps.weight"));
        if let Some((name, tensor)) = find(proj.name()) {
            return Ok(Stacked { name, tensor, fused: 1, nth: 0 });
        }
        match find("gate_up").filter(|_| proj != Proj::Down) {
            Some((name, tensor)) => Ok(Stacked { name, tensor, fused: 2, nth: proj.index() }),
            None => Err(self.fail(&format!("blk.{layer}.ffn_{}_exps.weight", proj.name()), "missing from the model")),
        }
    }

    /// A layer without any expert tensor may only be a dense one.
    fn is_dense_layer(&self, layer: usize) -> bool {
        let has = |what: &str| self.tensors.contains_key(&format!("blk.{layer}.ffn_{what}.weight"));
        has("up") && !["gate_exps", "up_exps", "gate_up_exps", "down_exps"].into_iter().any(has)
    }

    fn read_layers(&self) -> Result<Vec<LayerSpec>> {
        if self.value("expert_count").and_then(Value::as_usize).unwrap_or(0) == 0 {
            return Err(self.fail_key("expert_count", "missing or 0: it is no Mixture-of-Experts model"));
        }
        let (experts, top_k) = (self.count("expert_count")?, self.count("expert_used_count")?);
        let hidden = self.count("embedding_length")?;
        if top_k > experts {
            return Err(self.fail_key("expert_used_count", format!("is {top_k}, but there are only {experts} experts")));
        }
        if let Some(routing) = self.family.gguf_routing(|key| self.value(key), top_k) {
            routing.check(experts).map_err(|e| self.fail_key("expert_gating_func", e.to_string()))?;
        }
        let mut layers = Vec::new();
        for index in (0..self.blocks).filter(|&i| !self.is_dense_layer(i)) {
            let (mut formats, mut intermediate) = ([Format::F32; 3], None);
            for proj in Proj::ALL {
                let Stacked { name, tensor, fused, .. } = self.stacked(index, proj)?;
                formats[proj.index()] = self.format(name, tensor)?;
                let wrong = |what: String| self.fail(name, format!("has dimensions {:?}; {what}", tensor.ne));
                let [cols, rows, e] = tensor.ne[..] else {
                    return Err(wrong("stacked experts have three: inputs, outputs, experts".into()));
                };
                if !rows.is_multiple_of(fused) {
                    return Err(wrong("fused gate and up have an even number of outputs".into()));
                }
                let (inner, outer) = if proj == Proj::Down { (cols, rows) } else { (rows / fused, cols) };
                if (outer, e) != (hidden, experts) {
                    return Err(wrong(format!("the metadata says hidden size {hidden} and {experts} experts")));
                }
                if *intermediate.get_or_insert(inner) != inner {
                    return Err(wrong("the layer's other projections have another intermediate size".into()));
                }
            }
            layers.push(LayerSpec {
                index,
                experts,
                top_k,
                hidden,
                intermediate: intermediate.unwrap_or(0),
                formats,
                activation: self.family.activation,
                biases: self.tensors.contains_key(&format!("blk.{index}.ffn_down_exps.bias")),
            });
        }
        if layers.is_empty() {
            let what = "no layer holds experts (blk.N.ffn_gate_exps.weight): it is no Mixture-of-Experts model";
            return Err(Error::file(&self.path, what));
        }
        Ok(layers)
    }

    /// `rows` rows of a tensor, from a row on.
    fn view(&self, name: &str, t: &Tensor, first: usize, rows: usize) -> Result<Matrix> {
        let format = self.format(name, t)?;
        let fail = |e: String| self.fail(name, e);
        let row_bytes = format.row_bytes(t.cols()).map_err(fail)?;
        // In range: callers check `first` and `rows` against the tensor's shape, and the header's check the shape against the file.
        let start = t.bytes.start + first * row_bytes;
        let bytes = self.parts[t.part].1.slice(start..start + rows * row_bytes);
        Matrix::new(format, rows, t.cols(), bytes, None).map_err(fail)
    }

    fn spec(&self, layer: usize, expert: usize) -> Result<&LayerSpec> {
        let spec = self.layers.binary_search_by_key(&layer, |l| l.index).ok().map(|i| &self.layers[i]);
        spec.filter(|l| expert < l.experts)
            .ok_or_else(|| Error::file(&self.path, format!("there is no expert {expert} in layer {layer}")))
    }

    /// Whether a tensor is neither a routed expert's nor part of multi-token prediction.
    fn is_dense(&self, name: &str) -> bool {
        let Some((layer, rest)) = name.strip_prefix("blk.").and_then(|r| r.split_once('.')) else { return true };
        let expert = rest.starts_with("ffn_") && rest.split('.').next().is_some_and(|r| r.ends_with("_exps"));
        !expert && layer.parse().is_ok_and(|l: usize| l < self.blocks)
    }
}

/// Checks that a file is the part that it is taken for.
fn check_split(file: &Path, metadata: &BTreeMap<String, Value>, part: usize, parts: usize) -> Result<()> {
    let number = |key: &str| metadata.get(key).and_then(Value::as_usize);
    let count = number("split.count").filter(|&n| n > 0).unwrap_or(1);
    if count != parts {
        let what =
            format!("is {count}, but there are {parts} files by the name; open split files under their original names");
        return Err(Error::tensor(file, "split.count", what));
    }
    match number("split.no") {
        Some(no) if no != part => {
            let what = format!("is {no}, but by its name or place the file is part {part}, counted from 0");
            Err(Error::tensor(file, "split.no", what))
        }
        _ => Ok(()),
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
        let (rows, _) = self.spec(layer, expert)?.shape(proj);
        let Stacked { name, tensor, fused, nth } = self.stacked(layer, proj)?;
        self.view(name, tensor, (expert * fused + nth) * rows, rows)
    }

    fn bias(&self, layer: usize, expert: usize, proj: Proj) -> Result<Option<Vec<f32>>> {
        let spec = self.spec(layer, expert)?;
        let (rows, _) = spec.shape(proj);
        let find = |what: &str| self.tensors.get_key_value(&format!("blk.{layer}.ffn_{what}_exps.bias"));
        let fused = || find("gate_up").filter(|_| proj != Proj::Down).map(|(name, t)| (name, t, 2, proj.index()));
        let Some((name, t, fused, nth)) = find(proj.name()).map(|(name, t)| (name, t, 1, 0)).or_else(fused) else {
            return Ok(None);
        };
        if t.ne != [rows * fused, spec.experts] {
            return Err(
                self.fail(name, format!("has dimensions {:?}, expected [{}, {}]", t.ne, rows * fused, spec.experts))
            );
        }
        let mut values = vec![0.0; rows * fused];
        self.view(name, t, expert, 1)?.decode_row(0, &mut values);
        Ok(Some(values[nth * rows..][..rows].to_vec()))
    }

    fn tensor_name(&self, layer: usize, expert: usize, proj: Proj) -> (PathBuf, String) {
        match self.stacked(layer, proj) {
            Ok(s) => (self.parts[s.tensor.part].0.clone(), format!("{}[{expert}]", s.name)),
            Err(_) => (self.path.clone(), format!("layer {layer}, expert {expert}, {}", proj.name())),
        }
    }

    fn release(&self, layer: usize, expert: usize) {
        for proj in Proj::ALL {
            let (Ok(spec), Ok(s)) = (self.spec(layer, expert), self.stacked(layer, proj)) else { return };
            let one = s.tensor.bytes.len() / (spec.experts * s.fused);
            let start = s.tensor.bytes.start + (expert * s.fused + s.nth) * one;
            self.parts[s.tensor.part].1.release(start..start + one);
        }
    }

    fn release_tensor(&self, name: &str) {
        if let Some(t) = self.tensors.get(name) {
            self.parts[t.part].1.release(t.bytes.clone());
        }
    }

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn routing(&self, layer: usize) -> Option<Routing> {
        let spec = self.spec(layer, 0).ok()?;
        self.family.gguf_routing(|key| self.value(key), spec.top_k)
    }

    fn tensors(&self) -> Vec<String> {
        self.tensors.keys().filter(|n| self.is_dense(n)).cloned().collect()
    }

    fn tensor(&self, name: &str) -> Result<Matrix> {
        let t = self.tensors.get(name).ok_or_else(|| self.fail(name, "missing from the model"))?;
        self.view(name, t, 0, t.rows())
    }

    fn dense_bytes(&self) -> u64 {
        self.tensors.iter().filter(|(n, _)| self.is_dense(n)).map(|(_, t)| t.bytes.len() as u64).sum()
    }
}
