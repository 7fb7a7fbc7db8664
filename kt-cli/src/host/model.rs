//! A whole model: dense layers on candle and the runtime's products, routed experts on the runtime.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use candle_core::{CpuStorage, Device, Storage, Tensor};
use kt::cpu::cache::CacheReport;
use kt::importance::Recorder;
use kt::placement::PlacementOptions;
use kt::plan::{Change, Extra, Kind as MemoryKind, Verdict};
use kt::{Batch, Experts, LayerExperts, Linear, LoadOptions, Matrix, Plan, Progress, Routing, Runtime, WeightSource};

use super::attention::{Attention, numbers_of_token, scores_bytes};
use super::config::{Attention as Kind, ModelConfig};
use super::names;
use super::rope::Rotary;
use super::weights::{Dense, DenseBytes, LayerWeights};

/// Fewest and most tokens that go through the model at once: the most where that fits into memory. More than the runtime takes at once read no expert less
/// often. Longer inputs take several passes, as large as each other.
const PASS_TOKENS: [usize; 2] = [512, 2048];

/// A model, loaded.
pub struct Model {
    config: ModelConfig,
    path: PathBuf,
    embedding: Matrix,
    layers: Vec<Layer>,
    experts: Experts,
    norm: Tensor,
    head: Linear,
    rotary: Rotary,
    pass_tokens: usize,
    defer: usize,
    importance: Option<Recorder>,
}

struct Layer {
    attention_norm: Tensor,
    attention: Attention,
    ffn_norm: Tensor,
    ffn: FeedForward,
}

enum FeedForward {
    Dense(Mlp),
    Experts { router: Router, experts: Arc<LayerExperts>, shared: Option<Mlp> },
}

struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
}

struct Router {
    /// `[hidden, experts]`, F32: which experts are chosen must not hang on a kernel's rounding.
    weight: Tensor,
    bias: Option<Vec<f32>>,
    routing: Routing,
}

/// Which rows of logits [`Model::forward`] gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// One per token.
    All,
    /// That of the last token.
    Last,
}

/// Keys and values of the tokens so far.
pub struct Cache {
    layers: Vec<LayerCache>,
    tokens: usize,
    capacity: usize,
}

/// One layer's part of a [`Cache`].
pub(super) struct LayerCache {
    /// `[heads, capacity, key]`.
    keys: Tensor,
    /// `[heads, capacity, value]`; latent attention reads its values from the keys.
    values: Option<Tensor>,
}

impl Cache {
    /// An empty cache with room for `capacity` tokens.
    ///
    /// # Errors
    /// A shape that cannot be. The memory is what the plan counted; where the system refuses it all the same, the program ends.
    pub fn new(config: &ModelConfig, capacity: usize) -> Result<Self> {
        let zeros =
            |heads, width| Tensor::zeros((heads, capacity.max(1), width), candle_core::DType::F32, &Device::Cpu);
        let layer = || -> Result<LayerCache> {
            Ok(match config.attention {
                Kind::Grouped { kv_heads, head_dim } => {
                    LayerCache { keys: zeros(kv_heads, head_dim)?, values: Some(zeros(kv_heads, head_dim)?) }
                }
                Kind::Latent { .. } => LayerCache { keys: zeros(1, config.key_dim())?, values: None },
            })
        };
        Ok(Cache { layers: (0..config.layers).map(|_| layer()).collect::<Result<_>>()?, tokens: 0, capacity })
    }

    /// Forgets all tokens.
    pub fn reset(&mut self) {
        self.tokens = 0;
    }

    /// Tokens in the cache.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Tokens that it has room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }
}

impl LayerCache {
    /// Writes keys and values `[heads, tokens, _]` behind the first `past` tokens; gives all of them so far.
    pub(super) fn extend(
        &mut self,
        keys: &Tensor,
        values: Option<&Tensor>,
        past: usize,
    ) -> candle_core::Result<(Tensor, Tensor)> {
        let seen = past + keys.dim(1)?;
        self.keys.slice_set(&keys.contiguous()?, 1, past)?;
        let all = self.keys.narrow(1, 0, seen)?;
        match (&self.values, values) {
            (Some(cache), Some(values)) => {
                cache.slice_set(&values.contiguous()?, 1, past)?;
                Ok((all, cache.narrow(1, 0, seen)?))
            }
            _ => Ok((all.clone(), all)),
        }
    }
}

impl Model {
    /// What loading the model and running it over up to `positions` tokens takes, experts and host together, with the logits of
    /// `rows` of them. Reads headers only.
    ///
    /// # Errors
    /// A tensor that is missing or has a wrong shape, or that no backend can run.
    pub fn plan(
        runtime: &Runtime,
        source: &dyn WeightSource,
        config: &ModelConfig,
        positions: usize,
        rows: Rows,
        placement: &PlacementOptions,
    ) -> Result<Plan> {
        Ok(Self::plan_passes(runtime, source, config, (positions, rows), placement)?.0)
    }

    /// [`Model::plan`], and the most tokens of a pass.
    fn plan_passes(
        runtime: &Runtime,
        source: &dyn WeightSource,
        config: &ModelConfig,
        (positions, rows): (usize, Rows),
        placement: &PlacementOptions,
    ) -> Result<(Plan, usize)> {
        let dense = Dense::new(config, source, runtime);
        let bytes = dense.bytes()?;
        let runtimes = runtime.pass_tokens(source);
        let [fewest, most] = PASS_TOKENS.map(|tokens| tokens.min(runtimes).min(positions).max(1));
        let of_host = |positions, tokens| host_memory(&dense, bytes, (positions, tokens), rows);
        let of_passes = |tokens| -> Result<Plan> {
            Ok(runtime.plan_with(source, &load_options(of_host(positions, tokens)?, tokens, placement))?)
        };
        let (mut plan, mut tokens) = (of_passes(most)?, most);
        if plan.verdict() != Verdict::Fits && fewest < most {
            (plan, tokens) = (of_passes(fewest)?, fewest);
        }
        let extra = |positions| of_host(positions, tokens);
        if plan.verdict() != Verdict::Fits {
            // The longest context that fits better: all memory of the host grows with it.
            let (mut better, mut from) = (0, positions);
            let shorter = |positions| -> Result<Plan> { Ok(Plan { extra: extra(positions)?, ..plan.clone() }) };
            while from > better + 1 {
                let middle = better + (from - better) / 2;
                if shorter(middle)?.verdict() < plan.verdict() { better = middle } else { from = middle }
            }
            if better > 0 {
                let other = shorter(better)?;
                plan.offer(Change::Positions(better), other.need_bytes(), other.verdict());
            }
        }
        Ok((plan, tokens))
    }

    /// Loads the model, for running it over up to `positions` tokens with the logits of `rows` of them.
    ///
    /// # Errors
    /// [`kt::Error::Memory`] before anything is loaded, when it would not fit; otherwise as [`Model::plan`].
    pub fn load(
        runtime: &Runtime,
        source: &Arc<dyn WeightSource>,
        config: &ModelConfig,
        (positions, rows): (usize, Rows),
        placement: &PlacementOptions,
        progress: Arc<Progress>,
    ) -> Result<Self> {
        let (shared, source) = (source, &**source);
        let (plan, pass_tokens) = Self::plan_passes(runtime, source, config, (positions, rows), placement)?;
        if plan.verdict() == Verdict::Refuse {
            bail!(kt::Error::Memory(Box::new(plan)));
        }
        let dense = Dense::new(config, source, runtime);
        for spec in source.layers() {
            if spec.hidden != config.hidden || spec.index >= config.layers {
                bail!(
                    "{}: expert layer {} has hidden size {}, but the configuration has {} layers of hidden size {}",
                    source.path().display(),
                    spec.index,
                    spec.hidden,
                    config.layers,
                    config.hidden
                );
            }
        }
        // Not the plan's: what devices take would be in it twice.
        let host = host_memory(&dense, dense.bytes()?, (positions, pass_tokens), rows)?;
        let options = LoadOptions { progress, ..load_options(host, pass_tokens, placement) };
        let experts = runtime.load_shared(shared, options)?;
        let layers = (0..config.layers)
            .map(|index| {
                let mut weights = dense.layer(index)?;
                let ffn = match dense.experts(index) {
                    None => FeedForward::Dense(Mlp::new(&mut weights, names::DENSE)?),
                    Some(count) => FeedForward::Experts {
                        router: Router::new(&mut weights, source, index, count)?,
                        experts: experts.layer(index)?.clone(),
                        shared: match config.shared_intermediate {
                            0 => None,
                            _ => Some(Mlp::new(&mut weights, names::SHARED)?),
                        },
                    },
                };
                Ok(Layer {
                    attention_norm: weights.vector(names::ATTENTION_NORM)?,
                    attention: Attention::new(config, &mut weights)?,
                    ffn_norm: weights.vector(names::FFN_NORM)?,
                    ffn,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let embedding = dense.embedding()?;
        let head = dense.head(embedding.rows())?;
        Ok(Model {
            layers,
            experts,
            norm: dense.last_norm()?,
            head,
            rotary: Rotary::new(&config.rope),
            pass_tokens,
            importance: None,
            embedding,
            path: source.path().to_owned(),
            config: config.clone(),
            defer: 0,
        })
    }

    /// Has the `experts` experts of least weight of each token added one layer later ([`Batch::defer`]).
    pub fn defer(&mut self, experts: usize) {
        self.defer = experts;
    }

    /// What the packed cache did for this load, where the runtime has one.
    pub fn packed_cache(&self) -> Option<&CacheReport> {
        self.experts.packed_cache()
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Its routed experts, for what they tell of their work.
    pub fn experts(&self) -> &Experts {
        &self.experts
    }

    /// Collects from now on what experts are given.
    pub fn record_importance(&mut self, recorder: Recorder) {
        self.importance = Some(recorder);
    }

    /// What was collected, if it was asked for.
    pub fn importance(&self) -> Option<&Recorder> {
        self.importance.as_ref()
    }

    /// Entries of the vocabulary: columns of the logits.
    pub fn vocabulary(&self) -> usize {
        self.embedding.rows()
    }

    /// Runs `ids` behind the tokens that `cache` holds, adds them to it, and gives logits `[rows, vocabulary]`, F32.
    ///
    /// # Errors
    /// An id outside the vocabulary, more tokens than the cache has room for, or a failure of a backend. The cache then still holds
    /// what it held before.
    pub fn forward(&self, ids: &[u32], cache: &mut Cache, rows: Rows) -> Result<Vec<f32>> {
        let (past, vocabulary) = (cache.tokens, self.vocabulary());
        if ids.len() > cache.capacity - past {
            bail!("{} tokens after {past} do not fit into a cache for {}", ids.len(), cache.capacity);
        }
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocabulary) {
            bail!("token id {id} is outside the vocabulary of {}: 0..{vocabulary}", self.path.display());
        }
        let mut logits = Vec::new();
        let mut done = 0;
        let passes = ids.len().div_ceil(self.pass_tokens).max(1);
        for ids in ids.chunks(ids.len().div_ceil(passes).max(1)) {
            let hidden = self.pass(ids, cache, past + done)?;
            done += ids.len();
            let wanted = match rows {
                Rows::All => hidden,
                Rows::Last => hidden.narrow(0, ids.len() - 1, 1)?,
            };
            let x = numbers(&norm(&wanted.contiguous()?, &self.norm, self.config.norm_epsilon)?)?;
            if rows == Rows::Last {
                logits.clear();
            }
            let start = logits.len();
            logits.resize(start + x.len() / self.config.hidden * vocabulary, 0.0);
            self.head.forward(&x, &mut logits[start..])?;
        }
        cache.tokens = past + done;
        Ok(logits)
    }

    /// The hidden states `[ids, hidden]` after the last layer.
    fn pass(&self, ids: &[u32], cache: &mut Cache, past: usize) -> Result<Tensor> {
        let hidden = self.config.hidden;
        let mut rows = vec![0f32; ids.len() * hidden];
        for (&id, row) in ids.iter().zip(rows.chunks_exact_mut(hidden)) {
            self.embedding.decode_row(id as usize, row);
        }
        let mut x = Tensor::from_vec(rows, (ids.len(), hidden), &Device::Cpu)?;
        let angles = self.rotary.angles(past, ids.len())?;
        let epsilon = self.config.norm_epsilon;
        let mut batch = Batch::new(0, Vec::<f32>::new(), Vec::new(), Vec::new())?;
        batch.defer(self.defer);
        for (index, (layer, cache)) in self.layers.iter().zip(&mut cache.layers).enumerate() {
            let mixed = layer.attention.forward(&norm(&x, &layer.attention_norm, epsilon)?, &angles, cache, past)?;
            x = (x + mixed)?;
            let importance = self.importance.as_ref().map(|recorder| (recorder, index));
            let added = layer.ffn.forward(&norm(&x, &layer.ffn_norm, epsilon)?, &mut batch, importance)?;
            x = (x + added)?;
        }
        Ok(x)
    }
}

impl FeedForward {
    /// `batch` goes along from layer to layer, with its buffers and with what a layer left for the next. `importance` is told what experts of a
    /// layer of this index are given.
    fn forward(&self, x: &Tensor, batch: &mut Batch, importance: Option<(&Recorder, usize)>) -> Result<Tensor> {
        match self {
            FeedForward::Dense(mlp) => mlp.forward(x),
            FeedForward::Experts { router, experts, shared } => {
                let (ids, weights) = router.route(x)?;
                let (tokens, hidden) = x.dims2()?;
                let input = numbers(x)?;
                if let Some((recorder, index)) = importance {
                    recorder.record(index, &input, &ids)?;
                }
                batch.set(tokens, input, ids, weights)?;
                experts.forward(batch)?;
                let routed = Tensor::from_slice(batch.output(), (tokens, hidden), &Device::Cpu)?;
                match shared {
                    None => Ok(routed),
                    Some(mlp) => Ok((routed + mlp.forward(x)?)?),
                }
            }
        }
    }
}

impl Mlp {
    fn new(weights: &mut LayerWeights, [gate, up, down]: [names::Part; 3]) -> Result<Self> {
        Ok(Mlp { gate: weights.linear(gate)?, up: weights.linear(up)?, down: weights.linear(down)? })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let gate = candle_nn::ops::silu(&multiply(&self.gate, x)?)?;
        multiply(&self.down, &(gate * multiply(&self.up, x)?)?)
    }
}

impl Router {
    fn new(weights: &mut LayerWeights, source: &dyn WeightSource, layer: usize, experts: usize) -> Result<Self> {
        let routing = source.routing(layer).with_context(|| {
            format!("{}: the source does not know how layer {layer} chooses experts", source.path().display())
        })?;
        routing.check(experts)?;
        let bias = match weights.has(names::ROUTER_BIAS) {
            true => Some(numbers(&weights.vector(names::ROUTER_BIAS)?)?),
            false => None,
        };
        Ok(Router { weight: weights.numbers(names::ROUTER)?.t()?.force_contiguous()?, bias, routing })
    }

    /// Experts and weights of each token, `[tokens, top_k]`.
    fn route(&self, x: &Tensor) -> Result<(Vec<i32>, Vec<f32>)> {
        let logits = x.matmul(&self.weight)?;
        let (tokens, experts) = logits.dims2()?;
        let top_k = self.routing.top_k;
        let (mut ids, mut weights) = (vec![0i32; tokens * top_k], vec![0f32; tokens * top_k]);
        let slots = ids.chunks_exact_mut(top_k).zip(weights.chunks_exact_mut(top_k));
        for (logits, (ids, weights)) in numbers(&logits)?.chunks_exact(experts).zip(slots) {
            self.routing.route(logits, self.bias.as_deref(), ids, weights);
        }
        Ok((ids, weights))
    }
}

/// What the runtime is told of a host that takes `extra` and runs in passes of so many tokens.
fn load_options(extra: Vec<Extra>, pass_tokens: usize, placement: &PlacementOptions) -> LoadOptions {
    LoadOptions { extra, batch_tokens: Some(pass_tokens), placement: placement.clone(), ..LoadOptions::default() }
}

/// Memory of the host besides experts, by what it is for, over `positions` in passes of so many tokens; `weights` are those of `dense`.
fn host_memory(
    dense: &Dense<'_>,
    weights: DenseBytes,
    (positions, pass_tokens): (usize, usize),
    rows: Rows,
) -> Result<Vec<Extra>> {
    let config = dense.config;
    let tokens = positions.min(pass_tokens);
    // Upper bound of what is alive at once in a pass: the residual stream, a norm of it, what the experts' batch keeps, one more for what the allocator does,
    // and the most that attention, or a feed-forward part with its output, makes of it; packed inputs of a product; scores.
    let groups = match config.attention {
        Kind::Grouped { kv_heads, .. } => kv_heads,
        Kind::Latent { .. } => 1,
    };
    let has_dense = (0..config.layers).any(|layer| dense.experts(layer).is_none());
    let dense_part = if has_dense { 3 * config.dense_intermediate } else { 0 };
    let feed_forward = config.hidden + dense_part.max(config.hidden + 3 * config.shared_intermediate);
    let widest = numbers_of_token(config.heads, &config.attention).max(feed_forward);
    let per_token = (5 * config.hidden + widest) as u64 * 4 + weights.input_row;
    let scores = scores_bytes(config.heads / groups, positions, tokens);
    let activations = (tokens as u64 * per_token).saturating_add(scores);
    let rows = if rows == Rows::All { positions as u64 } else { 1 };
    let logits = rows.saturating_mul(dense.embedding()?.rows() as u64 * 4);
    let cache = config.cache_bytes(positions);
    Ok(vec![
        Extra::new("host: dense weights, packed in memory", MemoryKind::Weights, weights.packed)
            .read_per_token(weights.token),
        Extra::new("host: embedding and dense weights in place (page cache)", MemoryKind::InPlace, weights.mapped),
        Extra::new("host: while dense weights are loaded, given back after", MemoryKind::Loading, weights.loading),
        Extra::new(format!("host: keys and values of {positions} positions"), MemoryKind::Working, cache)
            .read_per_token(cache),
        Extra::new("host: activations and logits", MemoryKind::Working, activations.saturating_add(logits)),
    ])
}

/// The numbers of a tensor, row-major.
fn numbers(x: &Tensor) -> candle_core::Result<Vec<f32>> {
    x.flatten_all()?.to_vec1()
}

/// `x: [tokens, cols]` through a product of the runtime: `[tokens, rows]`.
pub(super) fn multiply(linear: &Linear, x: &Tensor) -> Result<Tensor> {
    let tokens = x.dim(0)?;
    let mut y = vec![0f32; tokens * linear.rows()];
    let x = x.contiguous()?;
    // As they are: prompts' are dozens of megabytes.
    let (storage, layout) = x.storage_and_layout();
    let (Storage::Cpu(CpuStorage::F32(numbers)), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
        bail!("inputs of a product are {:?} numbers, not F32", x.dtype());
    };
    linear.forward(&numbers[start..end], &mut y)?;
    Ok(Tensor::from_vec(y, (tokens, linear.rows()), &Device::Cpu)?)
}

/// RMS norm over the last dimension.
pub(super) fn norm(x: &Tensor, weight: &Tensor, epsilon: f32) -> candle_core::Result<Tensor> {
    candle_nn::ops::rms_norm(x, weight, epsilon)
}
