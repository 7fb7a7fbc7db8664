//! Which dense tensors a model needs, what they take, and loading them.

use std::collections::{HashMap, HashSet};

use anyhow::{Context, Result, bail};
use candle_core::{Device, Tensor};
use kt::{Error, Linear, Matrix, Runtime, WeightSource};

use super::config::{Attention, ModelConfig};
use super::names::{self, Names, Part};

/// How a tensor is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    /// As a matrix product on the runtime's kernels.
    Product,
    /// As F32 numbers on candle.
    Numbers,
}

/// A tensor that a layer needs.
struct Need {
    part: Part,
    shape: (usize, usize),
    how: Use,
}

/// The dense tensors of a checkpoint, checked against its configuration.
pub(super) struct Dense<'a> {
    pub(super) config: &'a ModelConfig,
    source: &'a dyn WeightSource,
    runtime: &'a Runtime,
    names: Names,
    present: HashSet<String>,
}

/// Bytes of dense weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct DenseBytes {
    /// In memory of their own.
    pub(super) packed: u64,
    /// Used in place, from the checkpoint's map.
    pub(super) mapped: u64,
    /// Of both, what a token reads: all but the embedding, of which it reads a row.
    pub(super) token: u64,
    /// Most that loading one tensor takes besides: its pages of the file, and its numbers once more.
    pub(super) loading: u64,
    /// Most that one token's inputs of a product take when packed.
    pub(super) input_row: u64,
}

/// The loaded dense tensors of one layer.
pub(super) struct LayerWeights {
    layer: usize,
    products: HashMap<Part, Linear>,
    numbers: HashMap<Part, Tensor>,
}

impl<'a> Dense<'a> {
    pub(super) fn new(config: &'a ModelConfig, source: &'a dyn WeightSource, runtime: &'a Runtime) -> Self {
        let names = Names::of(source.metadata());
        Dense { config, source, runtime, names, present: source.tensors().into_iter().collect() }
    }

    /// What a layer needs; `experts` is the number of its experts, or `None` for a dense layer.
    fn needs(&self, layer: usize, experts: Option<usize>) -> Result<Vec<Need>> {
        let c = self.config;
        let mut needs = Vec::new();
        let mut need = |part, rows, cols, how| needs.push(Need { part, shape: (rows, cols), how });
        need(names::ATTENTION_NORM, 1, c.hidden, Use::Numbers);
        need(names::FFN_NORM, 1, c.hidden, Use::Numbers);
        match c.attention {
            Attention::Grouped { kv_heads, head_dim } => {
                need(names::Q, c.heads * head_dim, c.hidden, Use::Product);
                need(names::K, kv_heads * head_dim, c.hidden, Use::Product);
                need(names::V, kv_heads * head_dim, c.hidden, Use::Product);
                need(names::O, c.hidden, c.heads * head_dim, Use::Product);
                need(names::Q_NORM, 1, head_dim, Use::Numbers);
                need(names::K_NORM, 1, head_dim, Use::Numbers);
            }
            Attention::Latent { q_lora, kv_lora, nope, rope, value } => {
                let queries = c.heads * (nope + rope);
                match q_lora {
                    None => need(names::Q, queries, c.hidden, Use::Product),
                    Some(narrow) => {
                        need(names::Q_A, narrow, c.hidden, Use::Product);
                        need(names::Q_A_NORM, 1, narrow, Use::Numbers);
                        need(names::Q_B, queries, narrow, Use::Product);
                    }
                }
                need(names::KV_A, kv_lora + rope, c.hidden, Use::Product);
                need(names::KV_A_NORM, 1, kv_lora, Use::Numbers);
                need(names::O, c.hidden, c.heads * value, Use::Product);
                if self.present.contains(&self.names.layer(layer, names::V_B)) {
                    need(names::K_B, c.heads * kv_lora, nope, Use::Numbers);
                    need(names::V_B, c.heads * value, kv_lora, Use::Numbers);
                } else {
                    need(names::KV_B, c.heads * (nope + value), kv_lora, Use::Numbers);
                }
            }
        }
        let mut feed_forward = |parts: [Part; 3], width| {
            need(parts[0], width, c.hidden, Use::Product);
            need(parts[1], width, c.hidden, Use::Product);
            need(parts[2], c.hidden, width, Use::Product);
        };
        match experts {
            None if c.dense_intermediate == 0 => bail!(
                "{}: layer {layer} has no experts, and the configuration gives no width of dense layers",
                self.source.path().display()
            ),
            None => feed_forward(names::DENSE, c.dense_intermediate),
            Some(experts) => {
                if c.shared_intermediate > 0 {
                    feed_forward(names::SHARED, c.shared_intermediate);
                }
                need(names::ROUTER, experts, c.hidden, Use::Numbers);
                if self.present.contains(&self.names.layer(layer, names::ROUTER_BIAS)) {
                    need(names::ROUTER_BIAS, 1, experts, Use::Numbers);
                }
            }
        }
        Ok(needs)
    }

    /// Experts of a layer, where it has any.
    pub(super) fn experts(&self, layer: usize) -> Option<usize> {
        self.source.layers().iter().find(|l| l.index == layer).map(|l| l.experts)
    }

    fn matrix(&self, name: &str, (rows, cols): (usize, usize)) -> Result<Matrix> {
        let matrix = self.source.tensor(name)?;
        if (matrix.rows(), matrix.cols()) != (rows, cols) {
            let what =
                format!("is [{}, {}], but the configuration makes it [{rows}, {cols}]", matrix.rows(), matrix.cols());
            bail!(Error::tensor(self.source.path(), name, what));
        }
        Ok(matrix)
    }

    /// The embedding `[vocabulary, hidden]`, used in place.
    pub(super) fn embedding(&self) -> Result<Matrix> {
        let name = self.names.embedding();
        let rows = self.source.tensor(name)?.rows();
        self.matrix(name, (rows, self.config.hidden))
    }

    /// Name of the head: the embedding's where they are tied.
    fn head_name(&self) -> &'static str {
        let tied = self.config.tied_head && !self.present.contains(self.names.head());
        if tied { self.names.embedding() } else { self.names.head() }
    }

    /// The head `[vocabulary, hidden]`.
    pub(super) fn head(&self, vocabulary: usize) -> Result<Linear> {
        let matrix = self.matrix(self.head_name(), (vocabulary, self.config.hidden))?;
        let linear = self.runtime.linear(&matrix).with_context(|| format!("tensor `{}`", self.head_name()))?;
        if linear.packed_bytes() > 0 && self.head_name() != self.names.embedding() {
            self.source.release_tensor(self.head_name());
        }
        Ok(linear)
    }

    /// The norm after the last layer.
    pub(super) fn last_norm(&self) -> Result<Tensor> {
        let matrix = self.matrix(self.names.last_norm(), (1, self.config.hidden))?;
        Ok(Tensor::from_vec(matrix.decode(), self.config.hidden, &Device::Cpu)?)
    }

    /// What loading all of it will take. Reads headers only, and finds every missing or misshapen tensor.
    pub(super) fn bytes(&self) -> Result<DenseBytes> {
        let embedding = self.embedding()?;
        let norm = self.config.hidden as u64 * 4;
        let mut bytes = DenseBytes { packed: norm, mapped: embedding.byte_len(), token: norm, ..DenseBytes::default() };
        let mut product = |matrix: &Matrix| -> Result<()> {
            let fit = self.runtime.plan_linear(matrix.format(), matrix.rows(), matrix.cols())?;
            bytes.packed += fit.packed_bytes;
            bytes.mapped += fit.mapped_bytes;
            bytes.token += fit.packed_bytes + fit.mapped_bytes;
            bytes.input_row = bytes.input_row.max(fit.scratch_bytes_per_token);
            if fit.packed_bytes > 0 {
                bytes.loading = bytes.loading.max(matrix.byte_len());
            }
            Ok(())
        };
        let head = self.matrix(self.head_name(), (embedding.rows(), self.config.hidden))?;
        product(&head)?;
        let (mut numbers, mut loading) = (0, 0);
        for layer in 0..self.config.layers {
            for need in self.needs(layer, self.experts(layer))? {
                let matrix = self.matrix(&self.names.layer(layer, need.part), need.shape)?;
                match need.how {
                    Use::Product => product(&matrix)?,
                    Use::Numbers => {
                        let own = (need.shape.0 * need.shape.1) as u64 * 4;
                        numbers += own;
                        loading = loading.max(own + matrix.byte_len());
                    }
                }
            }
        }
        bytes.packed += numbers;
        bytes.token += numbers;
        bytes.loading = bytes.loading.max(loading);
        Ok(bytes)
    }

    /// Loads what a layer needs.
    pub(super) fn layer(&self, layer: usize) -> Result<LayerWeights> {
        let mut weights = LayerWeights { layer, products: HashMap::new(), numbers: HashMap::new() };
        for need in self.needs(layer, self.experts(layer))? {
            let name = self.names.layer(layer, need.part);
            let matrix = self.matrix(&name, need.shape)?;
            let read_in_place = match need.how {
                Use::Product => {
                    let linear = self.runtime.linear(&matrix).with_context(|| format!("tensor `{name}`"))?;
                    let in_place = linear.packed_bytes() == 0;
                    weights.products.insert(need.part, linear);
                    in_place
                }
                Use::Numbers => {
                    weights.numbers.insert(need.part, Tensor::from_vec(matrix.decode(), need.shape, &Device::Cpu)?);
                    false
                }
            };
            if !read_in_place {
                self.source.release_tensor(&name);
            }
        }
        Ok(weights)
    }
}

impl LayerWeights {
    /// Whether the layer has this tensor, as numbers, and it was not taken yet.
    pub(super) fn has(&self, part: Part) -> bool {
        self.numbers.contains_key(&part)
    }

    /// Takes a product.
    pub(super) fn linear(&mut self, part: Part) -> Result<Linear> {
        self.products.remove(&part).with_context(|| format!("layer {}: {part:?} is not among its products", self.layer))
    }

    /// Takes numbers, `[rows, cols]`.
    pub(super) fn numbers(&mut self, part: Part) -> Result<Tensor> {
        self.numbers.remove(&part).with_context(|| format!("layer {}: {part:?} is not among its numbers", self.layer))
    }

    /// Takes numbers of one row as a vector.
    pub(super) fn vector(&mut self, part: Part) -> Result<Tensor> {
        Ok(self.numbers(part)?.flatten_all()?)
    }
}
