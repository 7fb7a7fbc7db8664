//! How much the input columns of experts' matrices count: the mean square of what each was multiplied with, while a model ran.
//!
//! A rounding error of a weight becomes one of the output in proportion to its input, so encoders that are told the inputs' sizes
//! ([`encode_weighted`](crate::quantize::encode_weighted)) round columns of large inputs with more care.
//!
//! A file is safetensors with F32 tensors, and `"kt_importance": "1"` in its metadata:
//!
//! ```text
//! layers.3.experts.17.tokens         [1]              tokens that were sent to the expert
//! layers.3.experts.17.input          [hidden]         mean square of each input of gate and up
//! layers.3.experts.17.intermediate   [intermediate]   mean square of each input of down
//! ```
//!
//! Experts that no token was sent to are not in it. Files of llama.cpp's `llama-imatrix` (GGUF) are read too.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use rayon::prelude::*;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use sha2::{Digest, Sha256};

use crate::convert::{hex, write_whole};
use crate::error::{Error, Result};
use crate::format::float::f32_at;
use crate::layer::{LayerSpec, Proj};
use crate::source::WeightSource;
use crate::source::gguf::header;
use crate::source::map::Map;

/// Key and value that a file's metadata have.
const MARK: (&str, &str) = ("kt_importance", "1");

/// Mean squares of the inputs of one expert.
#[derive(Debug, Clone, Default, PartialEq)]
struct Means {
    tokens: f32,
    /// Of gate and up.
    input: Option<Vec<f32>>,
    /// Of down.
    intermediate: Option<Vec<f32>>,
}

/// Statistics of activations, by layer and expert.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Importance {
    experts: BTreeMap<(usize, usize), Means>,
    digest: String,
}

impl Importance {
    /// Reads a file that [`Recorder::save`] or llama.cpp wrote.
    ///
    /// # Errors
    /// It cannot be read, is of another kind, or holds numbers that are negative or not finite.
    pub fn open(path: impl AsRef<Path>) -> Result<Importance> {
        let path = path.as_ref();
        let map = Map::open(path)?;
        let bytes = map.bytes();
        let mut found = Importance { digest: hex(&Sha256::digest(bytes)), ..Importance::default() };
        match bytes.starts_with(b"GGUF") {
            true => found.read_gguf(path, bytes)?,
            false => found.read_safetensors(path, bytes)?,
        }
        for ((layer, expert), means) in &found.experts {
            let all = means.input.iter().chain(&means.intermediate).flatten();
            if let Some(v) = all.copied().find(|v| !v.is_finite() || *v < 0.0) {
                return Err(Error::file(path, format!("layer {layer}, expert {expert}: {v} is no mean square")));
            }
        }
        if found.experts.is_empty() {
            return Err(Error::file(path, "holds no statistics of experts; record some with `kt run --importance`"));
        }
        Ok(found)
    }

    fn read_safetensors(&mut self, path: &Path, bytes: &[u8]) -> Result<()> {
        let wrong = |what: String| Error::file(path, what);
        let none = "not a file of importance: `kt run --importance` writes those, and llama.cpp as GGUF";
        let (_, about) = SafeTensors::read_metadata(bytes).map_err(|e| wrong(format!("{none} ({e})")))?;
        if about.metadata().as_ref().and_then(|m| m.get(MARK.0)).map(String::as_str) != Some(MARK.1) {
            return Err(wrong(none.into()));
        }
        let tensors = SafeTensors::deserialize(bytes).map_err(|e| wrong(e.to_string()))?;
        for (name, view) in tensors.iter() {
            let parts: Vec<&str> = name.split('.').collect();
            let (["layers", layer, "experts", expert, what], Dtype::F32, [_]) =
                (&parts[..], view.dtype(), view.shape())
            else {
                return Err(Error::tensor(path, name, "is no F32 vector of a layer's expert"));
            };
            let (Ok(layer), Ok(expert)) = (layer.parse(), expert.parse()) else {
                return Err(Error::tensor(path, name, "has no numbers of a layer and an expert in its name"));
            };
            let numbers: Vec<f32> = (0..view.data().len() / 4).map(|i| f32_at(view.data(), i)).collect();
            let means = self.experts.entry((layer, expert)).or_default();
            match *what {
                "tokens" => means.tokens = numbers.first().copied().unwrap_or(0.0),
                "input" => means.input = Some(numbers),
                "intermediate" => means.intermediate = Some(numbers),
                _ => return Err(Error::tensor(path, name, "is neither tokens nor input nor intermediate")),
            }
        }
        Ok(())
    }

    /// `blk.3.ffn_down_exps.weight.in_sum2` `[experts, columns]` and `….counts` `[experts, 1]`.
    fn read_gguf(&mut self, path: &Path, bytes: &[u8]) -> Result<()> {
        let header = header::parse(path, bytes, 0)?;
        let tensors: HashMap<&str, &header::Tensor> = header.tensors.iter().map(|(n, t)| (n.as_str(), t)).collect();
        let numbers = |name: &str, t: &header::Tensor| match t.kind.name {
            "F32" => Ok((0..t.cols() * t.rows()).map(|i| f32_at(&bytes[t.bytes.clone()], i)).collect::<Vec<f32>>()),
            other => Err(Error::tensor(path, name, format!("is {other}; F32 is due"))),
        };
        for (name, sums) in &header.tensors {
            let Some(stem) = name.strip_suffix(".in_sum2") else { continue };
            let parts: Vec<&str> = stem.split('.').collect();
            let ["blk", layer, what @ ("ffn_up_exps" | "ffn_gate_exps" | "ffn_down_exps"), "weight"] = parts[..] else {
                continue;
            };
            let layer: usize =
                layer.parse().map_err(|_| Error::tensor(path, name, "has no number of a layer in its name"))?;
            let counts = format!("{stem}.counts");
            let found = tensors.get(counts.as_str());
            let found = found.ok_or_else(|| Error::tensor(path, &counts, "missing: the sums are there"))?;
            let (sums_of, counts_of) = (numbers(name, sums)?, numbers(&counts, found)?);
            if counts_of.len() != sums.rows() {
                let what = format!("has {} numbers for {} experts", counts_of.len(), sums.rows());
                return Err(Error::tensor(path, counts, what));
            }
            for (expert, (sums, count)) in sums_of.chunks_exact(sums.cols()).zip(counts_of).enumerate() {
                if count > 0.0 {
                    let means = self.experts.entry((layer, expert)).or_default();
                    means.tokens = count;
                    let numbers = Some(sums.iter().map(|s| s / count).collect());
                    match what {
                        "ffn_down_exps" => means.intermediate = numbers,
                        _ => means.input = numbers,
                    }
                }
            }
        }
        Ok(())
    }

    /// Mean squares of the inputs of a projection, one per column; `None` where the expert was not seen.
    pub fn of(&self, layer: usize, expert: usize, proj: Proj) -> Option<&[f32]> {
        let means = self.experts.get(&(layer, expert))?;
        match proj {
            Proj::Gate | Proj::Up => means.input.as_deref(),
            Proj::Down => means.intermediate.as_deref(),
        }
    }

    /// What tells these statistics from others.
    pub(crate) fn digest(&self) -> &str {
        &self.digest
    }

    /// Compares the shapes with those of a model; gives the number of its experts of which nothing is known.
    ///
    /// # Errors
    /// Names the first layer and expert that the model does not have, or has in another size.
    pub fn check(&self, layers: &[LayerSpec]) -> Result<usize> {
        for (&(layer, expert), means) in &self.experts {
            let invalid = |what: String| {
                Err(Error::Invalid(format!(
                    "importance of layer {layer}, expert {expert}: {what}; was it another model?"
                )))
            };
            let Some(spec) = layers.iter().find(|l| l.index == layer).filter(|l| expert < l.experts) else {
                return invalid("the model has no such expert".into());
            };
            let due = [("input", &means.input, spec.hidden), ("intermediate", &means.intermediate, spec.intermediate)];
            for (name, numbers, due) in due {
                if let Some(numbers) = numbers.as_ref().filter(|n| n.len() != due) {
                    return invalid(format!("{name} has {} numbers, the model {due} columns", numbers.len()));
                }
            }
        }
        let known = |l: &LayerSpec| {
            (0..l.experts).filter(|&e| Proj::ALL.iter().all(|&p| self.of(l.index, e, p).is_some())).count()
        };
        Ok(layers.iter().map(|l| l.experts - known(l)).sum())
    }
}

/// Sums of squares while a model runs.
#[derive(Default)]
struct Sums {
    tokens: u64,
    input: Vec<f64>,
    intermediate: Vec<f64>,
}

/// Collects [`Importance`] from what a host sends to its layers of experts.
///
/// The inputs of down are not seen by a host: they are computed here, again, from the checkpoint's gate and up. So recording takes
/// some times as long as running.
pub struct Recorder {
    source: Arc<dyn WeightSource>,
    sums: Mutex<BTreeMap<(usize, usize), Sums>>,
}

impl Recorder {
    /// Nothing is collected yet.
    pub fn new(source: Arc<dyn WeightSource>) -> Recorder {
        Recorder { source, sums: Mutex::default() }
    }

    /// Adds a batch of layer `layer`: `input: [tokens, hidden]`, row-major, and the experts of each token, `ids: [tokens, top_k]`;
    /// negative ids are no experts, and without any nothing is added.
    ///
    /// # Errors
    /// A layer or an expert that the checkpoint does not have, lengths that do not fit, or weights that cannot be read.
    pub fn record(&self, layer: usize, input: &[f32], ids: &[i32]) -> Result<()> {
        let spec = self.source.layers().iter().find(|l| l.index == layer);
        let spec = spec.ok_or_else(|| Error::Invalid(format!("layer {layer} has no experts to record")))?;
        let tokens = input.len() / spec.hidden.max(1);
        if tokens * spec.hidden != input.len() || tokens == 0 || !ids.len().is_multiple_of(tokens) {
            let what =
                format!("{} inputs and {} experts are no batch of hidden size {}", input.len(), ids.len(), spec.hidden);
            return Err(Error::Invalid(format!("layer {layer}: {what}")));
        }
        if ids.is_empty() {
            return Ok(());
        }
        let mut sent: BTreeMap<usize, Vec<&[f32]>> = BTreeMap::new();
        for (row, ids) in input.chunks_exact(spec.hidden).zip(ids.chunks_exact(ids.len() / tokens)) {
            for expert in ids.iter().filter_map(|&id| usize::try_from(id).ok()) {
                sent.entry(expert).or_default().push(row);
            }
        }
        for (expert, rows) in sent {
            let squares = self.intermediate(spec, expert, &rows)?;
            let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
            let sums = sums.entry((layer, expert)).or_default();
            sums.tokens += rows.len() as u64;
            sums.input.resize(spec.hidden, 0.0);
            sums.intermediate.resize(spec.intermediate, 0.0);
            for row in rows {
                sums.input.iter_mut().zip(row).for_each(|(sum, &v)| *sum += v as f64 * v as f64);
            }
            sums.intermediate.iter_mut().zip(squares).for_each(|(sum, v)| *sum += v);
        }
        Ok(())
    }

    /// Sums over rows of the squares of an expert's inputs of down.
    fn intermediate(&self, spec: &LayerSpec, expert: usize, rows: &[&[f32]]) -> Result<Vec<f64>> {
        let of = |proj| -> Result<_> {
            let bias = self.source.bias(spec.index, expert, proj)?;
            Ok((self.source.matrix(spec.index, expert, proj)?, bias))
        };
        let ((gate, gate_bias), (up, up_bias)) = (of(Proj::Gate)?, of(Proj::Up)?);
        let work = || (vec![0.0; spec.hidden], vec![0.0; rows.len()], vec![0.0; rows.len()]);
        let column = |(weights, gates, ups): &mut (Vec<f32>, Vec<f32>, Vec<f32>), i: usize| {
            for (matrix, bias, out) in [(&gate, &gate_bias, &mut *gates), (&up, &up_bias, &mut *ups)] {
                matrix.decode_row(i, weights);
                let bias = bias.as_ref().map_or(0.0, |b| b[i]);
                for (out, row) in out.iter_mut().zip(rows) {
                    *out = bias + row.iter().zip(&*weights).map(|(x, w)| x * w).sum::<f32>();
                }
            }
            spec.activation.apply(gates, ups);
            gates.iter().map(|&v| v as f64 * v as f64).sum()
        };
        Ok((0..spec.intermediate).into_par_iter().map_init(work, column).collect())
    }

    /// Writes what was collected.
    ///
    /// # Errors
    /// Nothing was, or the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        let sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        if sums.is_empty() {
            return Err(Error::Invalid("no expert was used, so there is no importance to save".into()));
        }
        let mut tensors: Vec<(String, Vec<u8>)> = Vec::new();
        for ((layer, expert), sums) in &*sums {
            let mut put = |what: &str, numbers: &mut dyn Iterator<Item = f64>| {
                let bytes = numbers.flat_map(|v| (v as f32).to_le_bytes()).collect();
                tensors.push((format!("layers.{layer}.experts.{expert}.{what}"), bytes));
            };
            let tokens = sums.tokens as f64;
            put("tokens", &mut std::iter::once(tokens));
            put("input", &mut sums.input.iter().map(|sum| sum / tokens));
            put("intermediate", &mut sums.intermediate.iter().map(|sum| sum / tokens));
        }
        let invalid = |e: safetensors::SafeTensorError| Error::file(path, e.to_string());
        let mut views = Vec::new();
        for (name, bytes) in &tensors {
            views.push((name, TensorView::new(Dtype::F32, vec![bytes.len() / 4], bytes).map_err(invalid)?));
        }
        let about = HashMap::from([(MARK.0.to_owned(), MARK.1.to_owned())]);
        let bytes = safetensors::serialize(views, Some(about)).map_err(invalid)?;
        write_whole(path, &bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::synthetic::SyntheticSource;

    #[test]
    fn batches_without_experts_add_nothing_and_others_must_fit() {
        let source = SyntheticSource::builder().hidden(64).intermediate(32).experts(4).top_k(2).build().unwrap();
        let recorder = Recorder::new(Arc::new(source));
        let two = [0.5; 128];
        recorder.record(0, &two, &[]).unwrap();
        recorder.record(0, &two, &[-1, -1]).unwrap();
        let error = recorder.save(Path::new("never written")).unwrap_err().to_string();
        assert!(error.contains("no expert was used"), "{error}");
        for (input, ids) in [(&two[..], &[0, 1, 2][..]), (&two[..100], &[]), (&[], &[])] {
            let error = recorder.record(0, input, ids).unwrap_err().to_string();
            assert!(error.contains("layer 0") && error.contains("no batch of hidden size 64"), "{error}");
        }
        assert!(recorder.record(7, &two, &[]).is_err());
        recorder.record(0, &two, &[3, -1]).unwrap();
        assert_eq!(recorder.sums.lock().unwrap()[&(0, 3)].tokens, 1);
    }
}
