//! GGUF files, v2 and v3, whole or split.

pub(crate) mod header;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use bytes::Bytes;

use super::fingerprint::Fingerprint;
use super::map::Map;
use super::metadata::{Metadata, Value};
use super::model::too_many_layers;
use super::names::{self, Family};
use super::{Stored, WeightSource};
use crate::error::{Error, Result};
use crate::format::{Format, Matrix};
use crate::layer::{LayerSpec, Proj};
use crate::routing::Routing;
use header::Tensor;

pub(crate) use header::Kind;

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
    /// Where the first file has its metadata values.
    values: BTreeMap<String, Range<usize>>,
    architecture: String,
    family: &'static Family,
    /// Number of layers without those for multi-token prediction.
    blocks: usize,
    layers: Vec<LayerSpec>,
    fingerprint: Option<u128>,
}

/// Where the matrices of a projection are: those of all experts in one tensor, or (in old files) one in a tensor.
struct Place<'a> {
    name: &'a str,
    tensor: &'a Tensor,
    /// Matrices in the tensor that belong to one expert: 2 where gate and up are fused, gate's rows first.
    fused: usize,
    /// Which matrix of the tensor it is.
    nth: usize,
    /// Whether the tensor is this expert's alone.
    alone: bool,
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
        let (mut tensors, mut metadata, mut values) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let mut fingerprint = Fingerprint::new("gguf");
        for (i, (file, map)) in parts.iter().enumerate() {
            let header = header::parse(file, map.bytes(), i)?;
            check_split(file, &header.metadata, i, parts.len())?;
            fingerprint.file(file.file_name().unwrap_or_default().as_ref(), map.stamp(), &map.bytes()[..header.bytes]);
            for (name, tensor) in header.tensors {
                if tensors.contains_key(&name) {
                    return Err(Error::tensor(file, name, "this tensor is there twice"));
                }
                tensors.insert(name, tensor);
            }
            if i == 0 {
                (metadata, values) = (header.metadata, header.values);
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
            values,
            architecture,
            family,
            blocks: 0,
            layers: Vec::new(),
            fingerprint: fingerprint.finish(),
        };
        // The last layers may be for multi-token prediction.
        let extra = source.value("nextn_predict_layers").and_then(Value::as_usize).unwrap_or(0);
        source.blocks = source.count("block_count")?.saturating_sub(extra);
        if let Some(what) = too_many_layers(source.blocks) {
            return Err(source.fail_key("block_count", what));
        }
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
            let what = "which is not decoded here; convert it to F32, F16, BF16, a Q, IQ or TQ type, or MXFP4";
            self.fail(name, format!("has type {}, {what}", t.kind.name))
        })
    }

    fn place(&self, layer: usize, expert: usize, proj: Proj) -> Result<Place<'_>> {
        let find = |name: String| self.tensors.get_key_value(&name);
        let stacked = |what: &str| find(format!("blk.{layer}.ffn_{what}_exps.weight"));
        let what = proj.name();
        if let Some((name, tensor)) = stacked(what) {
            return Ok(Place { name, tensor, fused: 1, nth: expert, alone: false });
        }
        if let Some((name, tensor)) = stacked("gate_up").filter(|_| proj != Proj::Down) {
            return Ok(Place { name, tensor, fused: 2, nth: expert * 2 + proj.index(), alone: false });
        }
        let of_expert = |e: usize| format!("blk.{layer}.ffn_{what}.{e}.weight");
        match find(of_expert(expert)) {
            Some((name, tensor)) => Ok(Place { name, tensor, fused: 1, nth: 0, alone: true }),
            None if self.tensors.contains_key(&of_expert(0)) => {
                Err(self.fail(&of_expert(expert), "missing from the model"))
            }
            None => Err(self.fail(&format!("blk.{layer}.ffn_{what}_exps.weight"), "missing from the model")),
        }
    }

    /// A tensor of one number or row per expert beside `ffn_gate_exps.weight` and so on: where it is, how many projections it is for,
    /// and which of them.
    fn beside(&self, layer: usize, proj: Proj, suffix: &str) -> Option<(&str, &Tensor, usize, usize)> {
        let find = |what: &str| self.tensors.get_key_value(&format!("blk.{layer}.ffn_{what}_exps.{suffix}"));
        let fused = || find("gate_up").filter(|_| proj != Proj::Down).map(|(name, t)| (name, t, 2, proj.index()));
        let (name, t, fused, nth) = find(proj.name()).map(|(name, t)| (name, t, 1, 0)).or_else(fused)?;
        Some((name, t, fused, nth))
    }

    /// A layer without any expert tensor may only be a dense one. In a file with nothing but experts, the first layers may not be there.
    fn is_dense_layer(&self, layer: usize) -> bool {
        let there = |i: usize| self.tensors.keys().any(|n| n.starts_with(&format!("blk.{i}.")));
        let nothing_yet = !self.tensors.contains_key("token_embd.weight") && !(0..=layer).any(there);
        if nothing_yet && (layer + 1..self.blocks).any(there) {
            return true;
        }
        let has = |what: &str| self.tensors.contains_key(&format!("blk.{layer}.ffn_{what}.weight"));
        has("up") && !["gate_exps", "up_exps", "gate_up_exps", "down_exps", "up.0"].into_iter().any(has)
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
            // What is left to be wrong after the counts above.
            let key = if routing.scale.is_finite() { "expert_group_count" } else { "expert_weights_scale" };
            routing.check(experts).map_err(|e| self.fail_key(key, e.to_string()))?;
        }
        let mut layers = Vec::new();
        for index in (0..self.blocks).filter(|&i| !self.is_dense_layer(i)) {
            let (mut formats, mut intermediate, mut biases) = ([Format::F32; 3], None, false);
            for proj in Proj::ALL {
                let Place { name, tensor, fused, alone, .. } = self.place(index, 0, proj)?;
                formats[proj.index()] = self.format(name, tensor)?;
                let wrong = |what: String| self.fail(name, format!("has dimensions {:?}; {what}", tensor.ne));
                let (cols, rows, e) = match tensor.ne[..] {
                    [cols, rows] if alone => (cols, rows, experts),
                    [cols, rows, e] if !alone => (cols, rows, e),
                    _ if alone => return Err(wrong("an expert's own have two: inputs, outputs".into())),
                    _ => return Err(wrong("stacked experts have three: inputs, outputs, experts".into())),
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
                for expert in (1..experts).filter(|_| alone) {
                    let Place { name: other, tensor: t, .. } = self.place(index, expert, proj)?;
                    if (t.kind, &t.ne) != (tensor.kind, &tensor.ne) {
                        let what = format!("has type {}, dimensions {:?}; `{name}` has others", t.kind.name, t.ne);
                        return Err(self.fail(other, what));
                    }
                }
                self.refuse_scales(index, experts, proj)?;
                biases |= self.has_bias(index, experts, proj, rows / fused)?;
            }
            layers.push(LayerSpec {
                index,
                experts,
                top_k,
                hidden,
                intermediate: intermediate.unwrap_or(0),
                formats,
                scales: [None; 3],
                activation: self.family.activation,
                biases,
            });
        }
        if layers.is_empty() {
            let what = "no layer holds experts (blk.N.ffn_gate_exps.weight): it is no Mixture-of-Experts model";
            return Err(Error::file(&self.path, what));
        }
        Ok(layers)
    }

    /// Whether a projection has biases; if so, they fit it.
    fn has_bias(&self, layer: usize, experts: usize, proj: Proj, rows: usize) -> Result<bool> {
        let Some((name, t, fused, _)) = self.beside(layer, proj, "bias") else { return Ok(false) };
        self.format(name, t)?;
        match t.ne == [rows * fused, experts] {
            true => Ok(true),
            false => Err(self.fail(name, format!("has dimensions {:?}, expected [{}, {experts}]", t.ne, rows * fused))),
        }
    }

    /// A factor on the outputs of each expert's projection must be 1: nothing here multiplies with it.
    fn refuse_scales(&self, layer: usize, experts: usize, proj: Proj) -> Result<()> {
        let Some((name, t, ..)) = self.beside(layer, proj, "scale") else { return Ok(()) };
        if t.ne.iter().product::<usize>() != experts {
            return Err(self.fail(name, format!("has dimensions {:?}, expected one number for each expert", t.ne)));
        }
        match self.view(name, t, 0, t.rows())?.decode().iter().find(|&&v| v != 1.0) {
            Some(v) => {
                let what = format!("is {v} for an expert; factors of whole experts are not supported, only 1 is");
                Err(self.fail(name, what))
            }
            None => Ok(()),
        }
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
        let mut parts = rest.split('.');
        let (what, next) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let alone = !next.is_empty()
            && next.bytes().all(|b| b.is_ascii_digit())
            && ["ffn_gate", "ffn_up", "ffn_down"].contains(&what);
        let expert = alone || what.starts_with("ffn_") && what.ends_with("_exps");
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

    fn fingerprint(&self) -> Option<u128> {
        self.fingerprint
    }

    fn layers(&self) -> &[LayerSpec] {
        &self.layers
    }

    fn matrix(&self, layer: usize, expert: usize, proj: Proj) -> Result<Matrix> {
        let (rows, _) = self.spec(layer, expert)?.shape(proj);
        let place = self.place(layer, expert, proj)?;
        self.view(place.name, place.tensor, place.nth * rows, rows)
    }

    fn bias(&self, layer: usize, expert: usize, proj: Proj) -> Result<Option<Vec<f32>>> {
        let spec = self.spec(layer, expert)?;
        let (rows, _) = spec.shape(proj);
        let Some((name, t, fused, nth)) = self.beside(layer, proj, "bias") else { return Ok(None) };
        let mut values = vec![0.0; rows * fused];
        self.view(name, t, expert, 1)?.decode_row(0, &mut values);
        Ok(Some(values[nth * rows..][..rows].to_vec()))
    }

    fn tensor_name(&self, layer: usize, expert: usize, proj: Proj) -> (PathBuf, String) {
        match self.place(layer, expert, proj) {
            Ok(p) if p.alone => (self.parts[p.tensor.part].0.clone(), p.name.to_owned()),
            Ok(p) => (self.parts[p.tensor.part].0.clone(), format!("{}[{expert}]", p.name)),
            Err(_) => (self.path.clone(), format!("layer {layer}, expert {expert}, {}", proj.name())),
        }
    }

    fn release(&self, layer: usize, expert: usize) {
        for proj in Proj::ALL {
            let (Ok(spec), Ok(p)) = (self.spec(layer, expert), self.place(layer, expert, proj)) else { return };
            let one = p.tensor.bytes.len() / if p.alone { 1 } else { spec.experts * p.fused };
            let start = p.tensor.bytes.start + p.nth * one;
            self.parts[p.tensor.part].1.release(start..start + one);
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

    fn stored(&self, name: &str) -> Option<Stored> {
        let t = self.tensors.get(name)?;
        let bytes = self.parts[t.part].1.slice(t.bytes.clone());
        Some(Stored { kind: t.kind.name.to_owned(), shape: t.ne.iter().rev().copied().collect(), bytes })
    }

    fn metadata_bytes(&self, key: &str) -> Option<Bytes> {
        let range = self.values.get(key)?;
        Some(self.parts.first()?.1.slice(range.clone()))
    }

    fn dense_bytes(&self) -> u64 {
        self.tensors.iter().filter(|(n, _)| self.is_dense(n)).map(|(_, t)| t.bytes.len() as u64).sum()
    }
}
