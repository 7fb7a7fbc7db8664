//! The experts of a model, loaded: batches go through their layers.

mod prepared;

use std::borrow::Cow;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use crate::backend::{Backend, ExpertBank, Residence};
use crate::batch::{Batch, Carried, NO_EXPERT};
use crate::cpu::cache::CacheReport;
use crate::cpu::memory::Pieces;
use crate::cpu::team::Team;
use crate::cpu::topology::cpu_ranges;
use crate::error::{Error, Result};
use crate::heat::{HeatMap, LayerHeat};
use crate::layer::LayerSpec;
use crate::pending::Pending;
use crate::placement::{LayerPlacement, LayerTrace, Live, LiveOptions, Need, Placement, Swap, Trace};
use crate::runtime::pass_of_several;
use crate::scheduler::{self, Home, Share};
use crate::source::WeightSource;
use crate::stats::{BankUsage, LayerStats, Stats, Usage};
use crate::work::{Hidden, Spent, Work};

pub use prepared::{Prepared, Sums};

/// Numbers of an output that a task sets to zero.
const ZEROED: usize = 1 << 16;

/// All expert layers of a model, loaded.
pub struct Experts {
    pub(crate) layers: Vec<Arc<LayerExperts>>,
    pub(crate) cache: Option<CacheReport>,
    /// Where experts came from, if they may be moved.
    pub(crate) source: Option<Arc<dyn WeightSource>>,
    /// What devices were given.
    pub(crate) needs: Vec<Need>,
    pub(crate) stream_from: Arc<AtomicUsize>,
}

impl Experts {
    /// The experts of layer `index` (counting dense layers too, as the checkpoint does).
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`] when that layer holds no experts.
    pub fn layer(&self, index: usize) -> Result<&Arc<LayerExperts>> {
        self.layers.iter().find(|l| l.spec.index == index).ok_or_else(|| {
            let known: Vec<usize> = self.layers.iter().map(|l| l.spec.index).collect();
            let known = if known.is_empty() { "none".into() } else { cpu_ranges(&known) };
            Error::NoSuchLayer { layer: index, known }
        })
    }

    /// All expert layers, by rising index.
    pub fn layers(&self) -> &[Arc<LayerExperts>] {
        &self.layers
    }

    /// Where packed experts are in memory, by node; what a bank could not bind, with the reason.
    pub fn residence(&self) -> Vec<Residence> {
        let mut nodes: Vec<Residence> = Vec::new();
        for r in self.layers.iter().flat_map(|l| &l.banks).flat_map(|b| b.experts.residence()) {
            match nodes.iter_mut().find(|n| n.node == r.node) {
                Some(n) => n.add(&r),
                None => nodes.push(r),
            }
        }
        nodes.sort_by_key(|n| n.node);
        nodes
    }

    /// What the packed cache did for this load, if there is one ([`RuntimeBuilder::packed_cache`](crate::RuntimeBuilder::packed_cache)).
    pub fn packed_cache(&self) -> Option<&CacheReport> {
        self.cache.as_ref()
    }

    /// Bytes of host memory that hold packed experts; those mapped from the packed cache do not count.
    pub fn packed_bytes(&self) -> u64 {
        self.bank_bytes(|bank| bank.place == 0)
    }

    /// Bytes of devices' memory that hold experts.
    pub fn device_bytes(&self) -> u64 {
        self.bank_bytes(|bank| bank.place > 0)
    }

    fn bank_bytes(&self, of: impl Fn(&Bank) -> bool) -> u64 {
        self.layers.iter().flat_map(|l| &l.banks).filter(|b| of(b)).map(|b| b.experts.packed_bytes()).sum()
    }

    /// What the calls of every layer did since loading, or since [`Experts::reset_stats`].
    pub fn stats(&self) -> Stats {
        let layer = |l: &Arc<LayerExperts>| {
            let observed = l.observed();
            let names = l.banks.iter().map(|b| b.backend.clone());
            LayerStats {
                layer: l.spec.index,
                usage: observed.usage,
                banks: names.zip(observed.banks.iter().copied()).collect(),
            }
        };
        Stats { layers: self.layers.iter().map(layer).collect() }
    }

    /// Starts the statistics anew; the heat map goes on.
    pub fn reset_stats(&self) {
        for layer in &self.layers {
            let mut observed = layer.observed();
            observed.usage = Usage::default();
            observed.banks.fill(BankUsage::default());
        }
    }

    /// How often each expert was chosen since loading, or since [`Experts::reset_heat_map`]. A batch counts as soon as it is split
    /// over the banks.
    pub fn heat_map(&self) -> HeatMap {
        let layer = |l: &Arc<LayerExperts>| {
            let observed = l.observed();
            LayerHeat { layer: l.spec.index, tokens: observed.tokens, counts: observed.counts.clone() }
        };
        HeatMap::of(self.layers.iter().map(layer).collect())
    }

    /// Starts the heat map anew; the statistics go on.
    pub fn reset_heat_map(&self) {
        for layer in &self.layers {
            let mut observed = layer.observed();
            observed.tokens = 0;
            observed.counts.fill(0);
        }
    }

    /// Keeps what routers choose from now on, token by token, for [`Experts::take_trace`]: four to eight bytes per choice, which no plan counts.
    pub fn record_trace(&self) {
        self.layers.iter().for_each(|l| l.observed().trace = Some(Vec::new()));
    }

    /// What routers chose since [`Experts::record_trace`], and the end of recording. Of batches with more experts per token than the layer's
    /// `top_k`, the first so many; with fewer, none for the rest.
    pub fn take_trace(&self) -> Trace {
        let layer = |l: &Arc<LayerExperts>| LayerTrace {
            layer: l.spec.index,
            experts: l.spec.experts,
            top_k: l.spec.top_k.max(1),
            ids: l.observed().trace.take().unwrap_or_default(),
        };
        Trace::of(self.layers.iter().map(layer).collect())
    }

    /// Where every expert lives.
    pub fn placement(&self) -> Placement {
        Placement::of(self.layers.iter().map(|l| l.placement()).collect())
    }

    /// Tokens from which a batch's layer is streamed to a device in place of being computed where its experts live; `None` when nothing is
    /// streamed.
    pub fn stream_from(&self) -> Option<usize> {
        Some(self.stream_from.load(Ordering::Relaxed)).filter(|&n| n != usize::MAX)
    }

    /// Times one layer both ways with batches of 32 to `most` tokens of random numbers, and streams from the smallest at which streaming won,
    /// and at all larger ones; never, if it did not win at the largest. Takes seconds with large experts. Statistics and heat go on as if
    /// nothing had been.
    ///
    /// # Errors
    /// No layer can be streamed, or a backend fails.
    pub fn measure_streaming(&self, most: usize) -> Result<Option<usize>> {
        let Some(layer) = self.layers.iter().find(|l| l.stream.is_some()) else {
            return Err(Error::Invalid(
                "nothing can be streamed: ask for it when loading, with a device that can".into(),
            ));
        };
        let (spec, before) = (&layer.spec, self.stream_from.load(Ordering::Relaxed));
        let time = |tokens: usize, stream: bool| -> Result<Duration> {
            let mut best = Duration::MAX;
            for round in 0..3usize {
                let value = |i: usize| (((i * 2_654_435_761 + round) >> 7) % 2001) as f32 / 1000.0 - 1.0;
                let input: Vec<f32> = (0..tokens * spec.hidden).map(value).collect();
                let ids: Vec<i32> = (0..tokens * spec.top_k).map(|i| ((i * 7 + round) % spec.experts) as i32).collect();
                let weights = vec![1.0 / spec.top_k.max(1) as f32; ids.len()];
                let start = Instant::now();
                layer.compute(
                    &Arc::new(Hidden::F32(input)),
                    tokens,
                    (&ids, &weights),
                    0,
                    stream,
                    &mut Counted::nothing(),
                )?;
                best = best.min(start.elapsed());
            }
            Ok(best)
        };
        let mut from = usize::MAX;
        let mut tokens = most.max(1);
        while tokens >= 32.min(most.max(1)) && time(tokens, true)? < time(tokens, false)? {
            from = tokens;
            tokens /= 2;
        }
        tracing::info!(tokens = from, before, "streaming measured");
        self.stream_from.store(from, Ordering::Relaxed);
        Ok(self.stream_from())
    }

    /// Starts live placement: its state, for [`Experts::rebalance`].
    ///
    /// # Errors
    /// The experts were not loaded so that they could be moved
    /// ([`PlacementOptions::live`](crate::placement::PlacementOptions::live)).
    pub fn live(&self, options: LiveOptions) -> Result<Live> {
        if self.source.is_none() || !self.layers.iter().any(|l| l.banks.len() > 1) {
            return Err(Error::Invalid(
                "experts cannot be moved: load them with `load_shared`, and a placement that is live and has devices"
                    .into(),
            ));
        }
        let mut live = Live::new(options, self.needs.clone(), self.placement());
        live.follow(&self.heat_map()); // what was before is no news
        live.forget();
        Ok(live)
    }

    /// Takes in what routers chose since the last call, and moves experts that became hot to devices and colder ones back. To be called
    /// between steps; `elapsed` is the time since the last call. Returns what was moved.
    ///
    /// Experts are read and packed while calls go on. A layer's calls wait while two change places: for the time that one takes to a
    /// device. Experts of layers that have [prepared](LayerExperts::prepare) calls, or whose deferred work a batch still [carries](Batch::carries), stay
    /// where they are.
    ///
    /// # Errors
    /// A bank that cannot take an expert; the experts are then where they were, and live placement has ended, which its report says. Where
    /// even that fails, the layer's calls fail from then on.
    pub fn rebalance(&self, live: &mut Live, elapsed: Duration) -> Result<Vec<Swap>> {
        live.follow(&self.heat_map());
        let swaps = live.swaps(elapsed);
        let mut made = Vec::with_capacity(swaps.len());
        for (i, swap) in swaps.iter().enumerate() {
            let source = self.source.as_deref().ok_or_else(|| Error::Invalid("the source was not kept".into()));
            match source.and_then(|source| self.layer(swap.layer)?.swap(swap, source)) {
                Ok(true) => made.push(*swap),
                Ok(false) => live.undo(swap),
                Err(e) => {
                    swaps[i..].iter().for_each(|s| live.undo(s));
                    live.end(format!("an expert could not be moved: {e}"));
                    return Err(e);
                }
            }
        }
        Ok(made)
    }
}

impl Bank {
    /// An error of this bank's that says whose it is.
    fn named(&self, layer: usize, e: Error) -> Error {
        match e {
            e @ (Error::Backend { .. } | Error::Checkpoint { .. } | Error::Io { .. }) => e,
            e => Error::Backend { backend: self.backend.clone(), layer, what: e.to_string() },
        }
    }
}

pub(crate) struct Bank {
    pub backend: String,
    pub tier: String,
    pub experts: Box<dyn ExpertBank>,
    /// Bytes of weights of one expert, packed or in place.
    pub expert_bytes: u64,
    /// 0 in host memory, `n` on device `n - 1`.
    pub place: u32,
}

/// Which expert is where in a layer.
pub(crate) struct Placed {
    homes: Vec<Home>,
    /// The layer's number of each local expert, by bank.
    ids: Vec<Vec<u32>>,
    /// Why no call can be made any more.
    broken: Option<String>,
}

impl Placed {
    /// Of `ids[bank][local]`.
    pub(crate) fn new(experts: usize, ids: Vec<Vec<u32>>) -> Self {
        let mut homes = vec![Home { bank: 0, local: 0 }; experts];
        for (bank, ids) in ids.iter().enumerate() {
            for (local, &expert) in ids.iter().enumerate() {
                homes[expert as usize] = Home { bank: bank as u32, local: local as u32 };
            }
        }
        Placed { homes, ids, broken: None }
    }
}

/// How a layer's experts are streamed to a device.
pub(crate) struct LayerStream {
    pub backend: Arc<dyn Backend>,
    pub source: Arc<dyn WeightSource>,
    /// Bytes of one expert on the device.
    pub expert_bytes: u64,
}

/// What a layer's calls did. Behind one lock, taken three times a call, and once more for each further pass: that is no dearer than as many atomic numbers, and nobody sees
/// the time of a call without its bytes.
#[derive(Default)]
pub(crate) struct Observed {
    usage: Usage,
    banks: Vec<BankUsage>,
    /// For the heat map: tokens routed, and how often each expert was chosen.
    tokens: u64,
    counts: Vec<u64>,
    /// `[tokens, top_k]`, while a trace is recorded.
    trace: Option<Vec<i32>>,
}

impl Observed {
    pub(crate) fn new(experts: usize, banks: usize) -> Self {
        Observed { counts: vec![0; experts], banks: vec![BankUsage::default(); banks], ..Observed::default() }
    }
}

/// What a call did, before it is added to what the layer did.
struct Counted {
    usage: Usage,
    banks: Vec<BankUsage>,
    /// Whether anybody will look.
    wanted: bool,
}

impl Counted {
    fn new(layer: &LayerExperts, tokens: usize) -> Self {
        let banks = vec![BankUsage::default(); layer.banks.len()];
        Counted { usage: Usage { calls: 1, tokens: tokens as u64, ..Usage::default() }, banks, wanted: true }
    }

    /// Of a call that leaves no trace.
    fn nothing() -> Self {
        Counted { usage: Usage::default(), banks: Vec::new(), wanted: false }
    }
}

/// The experts of one layer.
pub struct LayerExperts {
    pub(crate) spec: LayerSpec,
    pub(crate) placed: RwLock<Placed>,
    pub(crate) banks: Vec<Bank>,
    pub(crate) pass_tokens: usize,
    pub(crate) team: Arc<Team>,
    pub(crate) observed: Mutex<Observed>,
    /// Held while two experts change places.
    pub(crate) moving: Mutex<()>,
    /// How many prepared calls and deferred parts need experts to stay where they are.
    pub(crate) staying: Arc<AtomicUsize>,
    /// The expert layer before, and whether another follows.
    pub(crate) previous: Option<usize>,
    pub(crate) last: bool,
    pub(crate) stream: Option<LayerStream>,
    /// Tokens from which batches are streamed, of all layers together.
    pub(crate) stream_from: Arc<AtomicUsize>,
}

/// Work under way: where its tokens begin in the batch, and whose it is.
pub(crate) struct Part {
    first: usize,
    /// Index of the bank, or nothing where a layer is streamed.
    bank: Option<usize>,
    pending: Pending<Work>,
    /// Of what outlives its layer's call.
    _stays: Option<Stays>,
}

/// Counts in [`LayerExperts::staying`] for as long as it lives.
struct Stays(Arc<AtomicUsize>);

impl Stays {
    fn new(staying: &Arc<AtomicUsize>) -> Self {
        staying.fetch_add(1, Ordering::SeqCst);
        Stays(staying.clone())
    }
}

impl Drop for Stays {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl LayerExperts {
    /// Shape and formats of the layer.
    pub fn spec(&self) -> &LayerSpec {
        &self.spec
    }

    /// Name and tier of the backends that hold its experts.
    pub fn backends(&self) -> impl Iterator<Item = (&str, &str)> {
        self.banks.iter().map(|b| (b.backend.as_str(), b.tier.as_str()))
    }

    /// What holds its experts, in the order in which their outputs are added: as many as [`LayerExperts::backends`]. For interfaces that
    /// a backend's banks have besides this one.
    pub fn banks(&self) -> impl Iterator<Item = &dyn ExpertBank> {
        self.banks.iter().map(|b| &*b.experts)
    }

    fn placed(&self) -> RwLockReadGuard<'_, Placed> {
        self.placed.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn observed(&self) -> MutexGuard<'_, Observed> {
        self.observed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn placement(&self) -> LayerPlacement {
        let placed = self.placed();
        let on = placed.homes.iter().map(|home| self.banks[home.bank as usize].place).collect();
        LayerPlacement { layer: self.spec.index, on }
    }

    /// Two experts change places; or none does, as calls of the layer are prepared for where they are, or what they deferred is under way.
    fn swap(&self, swap: &Swap, source: &dyn WeightSource) -> Result<bool> {
        // One move at a time: homes do not change between its parts.
        let _one = self.moving.lock().unwrap_or_else(PoisonError::into_inner);
        let stay = || self.staying.load(Ordering::SeqCst) > 0;
        if stay() {
            return Ok(false);
        }
        let home = |expert: u32| self.placed().homes.get(expert as usize).copied();
        let (Some(hot), Some(cold)) = (home(swap.hot), home(swap.cold)) else {
            return Err(Error::Invalid(format!("layer {} has {} experts", self.spec.index, self.spec.experts)));
        };
        let [host, device] = [hot, cold].map(|home| &self.banks[home.bank as usize]);
        let named = |bank: &Bank, e: Error| bank.named(self.spec.index, e);
        // Read and packed while calls go on, and put where they belong when there are none.
        let up = device.experts.replacement(cold.local, swap.hot, source).map_err(|e| named(device, e))?;
        let down = host.experts.replacement(hot.local, swap.cold, source).map_err(|e| named(host, e))?;
        let mut placed = self.placed.write().unwrap_or_else(PoisonError::into_inner);
        if stay() {
            return Ok(false);
        }
        // The device first, as it is the likelier to fail: the host has the hot expert until then.
        up().map_err(|e| named(device, e))?;
        if let Err(e) = down() {
            if let Err(again) = device.experts.replace(cold.local, swap.cold, source) {
                placed.broken =
                    Some(format!("expert {} was lost while it was moved: {e}; and back: {again}", swap.cold));
            }
            return Err(named(host, e));
        }
        placed.homes.swap(swap.hot as usize, swap.cold as usize);
        placed.ids[hot.bank as usize][hot.local as usize] = swap.cold;
        placed.ids[cold.bank as usize][cold.local as usize] = swap.hot;
        Ok(true)
    }

    /// Counts the rows and weights of a pass.
    fn count(&self, placed: &Placed, shares: &[Share], streamed: bool, counted: &mut Counted) {
        if !counted.wanted {
            return;
        }
        let mut observed = self.observed();
        for (b, share) in shares.iter().enumerate() {
            let rows = share.rows.len() as u64;
            counted.usage.rows += rows;
            match (&self.stream, streamed) {
                (Some(stream), true) => counted.usage.weight_bytes += share.experts.len() as u64 * stream.expert_bytes,
                _ => {
                    let bytes = share.experts.len() as u64 * self.banks[b].expert_bytes;
                    counted.usage.weight_bytes += bytes;
                    counted.banks[b].rows += rows;
                    counted.banks[b].weight_bytes += bytes;
                }
            }
            for group in &share.experts {
                let expert = if streamed { group.local } else { placed.ids[b][group.local as usize] };
                observed.counts[expert as usize] += group.rows.len() as u64;
            }
        }
    }

    /// Counts tokens for the heat map, and keeps their experts if a trace is recorded.
    fn trace(&self, tokens: usize, ids: &[i32]) {
        let mut observed = self.observed();
        observed.tokens += tokens as u64;
        if let Some(trace) = &mut observed.trace {
            let (k, top_k) = (ids.len() / tokens.max(1), self.spec.top_k.max(1));
            for token in 0..tokens {
                let token = &ids[token * k..][..k];
                trace.extend((0..top_k).map(|i| token.get(i).copied().unwrap_or(NO_EXPERT)));
            }
        }
    }

    fn check(&self, batch: &Batch) -> Result<()> {
        let expected = batch.tokens.saturating_mul(self.spec.hidden);
        if batch.input.len() != expected {
            return Err(Error::Length { what: "input [tokens, hidden]", expected, got: batch.input.len() });
        }
        self.check_ids(&batch.topk_ids, batch.top_k().max(1))
    }

    fn check_ids(&self, ids: &[i32], top_k: usize) -> Result<()> {
        for (i, &id) in ids.iter().enumerate() {
            if id != NO_EXPERT && !(0..self.spec.experts as i64).contains(&(id as i64)) {
                return Err(Error::ExpertOutOfRange {
                    layer: self.spec.index,
                    token: i / top_k,
                    slot: i % top_k,
                    id,
                    experts: self.spec.experts,
                });
            }
        }
        Ok(())
    }

    /// Nothing was lost in moving experts.
    fn check_whole(&self, placed: &Placed) -> Result<()> {
        match &placed.broken {
            None => Ok(()),
            Some(why) => {
                let backend = self.banks.first().map_or("", |b| &b.backend).into();
                Err(Error::Backend { backend, layer: self.spec.index, what: why.clone() })
            }
        }
    }

    /// Computes the batch's output: for every token, the weighted sum of its experts. The calling thread works too.
    ///
    /// With [`Batch::defer`], some experts of a token are left for the next layer's call, and those that the last layer's call left are added.
    ///
    /// # Errors
    /// Wrong slice lengths, an expert id out of range, or a backend's failure; the batch's output is then empty.
    pub fn forward(&self, batch: &mut Batch) -> Result<()> {
        let _span = tracing::debug_span!("forward", layer = self.spec.index, tokens = batch.tokens).entered();
        let start = Instant::now();
        let mut counted = Counted::new(self, batch.tokens);
        let reused = std::mem::take(&mut batch.output);
        // Of another layer's call, of other tokens or another model: nobody will ask for it again.
        let follows = |c: &Carried| {
            Some(c.layer) == self.previous && c.tokens == batch.tokens && Arc::ptr_eq(&c.of, &self.stream_from)
        };
        let carried = batch.carried.take().filter(follows);
        self.check(batch)?;
        self.trace(batch.tokens, &batch.topk_ids);
        let defer = if self.last { 0 } else { batch.defer };
        let stream = self.stream.is_some() && batch.tokens >= self.stream_from.load(Ordering::Relaxed);
        let routing = (&batch.topk_ids[..], &batch.topk_weights[..]);
        let (mut output, left) =
            self.compute_into(reused, &batch.input, batch.tokens, routing, defer, stream, &mut counted)?;
        let parts = carried.map(|c| c.parts.into_inner().unwrap_or_else(PoisonError::into_inner));
        for part in parts.into_iter().flatten() {
            // What a layer left is counted with the layer that waits for it; whose bank it was, that layer knows.
            self.add(Part { bank: None, ..part }, &mut output, &mut counted)?;
        }
        if !left.is_empty() {
            let of = self.stream_from.clone();
            batch.carried = Some(Carried { layer: self.spec.index, tokens: batch.tokens, of, parts: Mutex::new(left) });
        }
        batch.output = output;
        counted.usage.wall = start.elapsed();
        let mut observed = self.observed();
        observed.usage += counted.usage;
        observed.banks.iter_mut().zip(counted.banks).for_each(|(all, one)| *all += one);
        Ok(())
    }

    /// As [`LayerExperts::compute_into`], in memory of its own, waiting for what is left.
    fn compute(
        &self,
        input: &Arc<Hidden>,
        tokens: usize,
        routing: (&[i32], &[f32]),
        defer: usize,
        stream: bool,
        counted: &mut Counted,
    ) -> Result<Vec<f32>> {
        let (mut output, left) = self.compute_into(Vec::new(), input, tokens, routing, defer, stream, counted)?;
        left.into_iter().try_for_each(|part| self.add(part, &mut output, counted))?;
        Ok(output)
    }

    /// So many zeros, in the memory of `reused` if it is enough: by all threads where they are many.
    fn zeros(&self, len: usize, mut reused: Vec<f32>) -> Vec<f32> {
        if reused.capacity() < len {
            return vec![0.0; len];
        }
        let old = reused.len().min(len);
        reused.resize(len, 0.0);
        if old <= ZEROED {
            reused[..old].fill(0.0);
            return reused;
        }
        let parts = (0..old).step_by(ZEROED).map(|start| ZEROED.min(old - start));
        let tasks = parts.len();
        let pieces = Pieces::new(&mut reused[..old], parts);
        self.team.region().run(tasks, |i, _| pieces.take(i).fill(0.0));
        drop(pieces);
        reused
    }

    /// Splits a batch over passes and banks. All banks work at the same time; their outputs are added in the order of the banks. Returns the
    /// output, and what was left for later by `defer`.
    #[allow(clippy::too_many_arguments)] // the parts of a batch, which is borrowed
    fn compute_into(
        &self,
        output: Vec<f32>,
        input: &Arc<Hidden>,
        tokens: usize,
        (ids, weights): (&[i32], &[f32]),
        defer: usize,
        stream: bool,
        counted: &mut Counted,
    ) -> Result<(Vec<f32>, Vec<Part>)> {
        let hidden = self.spec.hidden;
        let top_k = ids.len() / tokens.max(1);
        let placed = self.placed();
        self.check_whole(&placed)?;
        let mut output = self.zeros(tokens * hidden, output);
        let deferred = scheduler::defer(ids, weights, top_k, defer);
        // A device takes a streamed layer in one pass: the weights of a second one would come again.
        let most = if stream { tokens.max(1) } else { self.pass_tokens };
        let mut left = Vec::new();
        let mut part = Vec::new();
        for range in passes(tokens, most, pass_of_several(&self.spec, most)) {
            let slots = range.start * top_k..range.end * top_k;
            let (ids, weights) = (&ids[slots.clone()], &weights[slots.clone()]);
            // What may wait is begun last, and is under way while the caller goes on.
            let (now, later) = match deferred.get(slots) {
                Some(deferred) if deferred.contains(&true) => {
                    let of = |wanted: bool| -> Vec<i32> {
                        ids.iter().zip(deferred).map(|(&id, &d)| if d == wanted { id } else { NO_EXPERT }).collect()
                    };
                    (Cow::Owned(of(false)), Some(of(true)))
                }
                _ => (Cow::Borrowed(ids), None),
            };
            if tokens == range.len() {
                output = self.pass(&placed, input, range.clone(), &now, weights, output, stream, counted)?;
            } else {
                part.clear();
                part.resize(range.len() * hidden, 0.0);
                part = self.pass(&placed, input, range.clone(), &now, weights, part, stream, counted)?;
                output[range.start * hidden..][..part.len()].copy_from_slice(&part);
            }
            if let Some(later) = later {
                left.extend(self.start(&placed, input, range, &later, weights, stream, counted));
            }
        }
        Ok((output, left))
    }

    /// The shares of the banks, or of the device that the layer is streamed to.
    fn split(&self, placed: &Placed, ids: &[i32], weights: &[f32], tokens: usize, stream: bool) -> Vec<Share> {
        let top_k = (ids.len() / tokens.max(1)).max(1);
        match stream {
            true => {
                let homes: Vec<Home> = (0..self.spec.experts as u32).map(|local| Home { bank: 0, local }).collect();
                scheduler::split(ids, weights, top_k, &homes, 1)
            }
            false => scheduler::split(ids, weights, top_k, &placed.homes, self.banks.len()),
        }
    }

    fn work(&self, input: &Arc<Hidden>, tokens: &Range<usize>, share: Share, output: Vec<f32>) -> Work {
        Work {
            input: input.clone(),
            first: tokens.start,
            tokens: tokens.len(),
            hidden: self.spec.hidden,
            rows: share.rows,
            experts: share.experts,
            output,
            spent: Spent::default(),
        }
    }

    /// Tokens `tokens` of the input, with their `ids` and `weights`, added to `output`.
    #[allow(clippy::too_many_arguments)] // as `compute_into`
    fn pass(
        &self,
        placed: &Placed,
        input: &Arc<Hidden>,
        tokens: Range<usize>,
        ids: &[i32],
        weights: &[f32],
        mut output: Vec<f32>,
        stream: bool,
        counted: &mut Counted,
    ) -> Result<Vec<f32>> {
        let shares = self.split(placed, ids, weights, tokens.len(), stream);
        self.count(placed, &shares, stream, counted);
        if let (true, Some(stream)) = (stream, &self.stream) {
            for share in shares.into_iter().filter(|s| !s.rows.is_empty()) {
                let start = Instant::now();
                let work = self.work(input, &tokens, share, output);
                output = stream.backend.stream(&self.spec, &stream.source, work).wait()?.output;
                counted.usage += Spent { kernels: Duration::ZERO, waiting: start.elapsed() };
            }
            return Ok(output);
        }
        // The bank that the calling thread works for: the host's, where it has anything to do.
        let (mut own, mut others) = (None, Vec::new());
        for (b, share) in shares.into_iter().enumerate().filter(|(_, s)| !s.rows.is_empty()) {
            if own.is_none() {
                own = Some((b, share));
                continue;
            }
            let work = self.work(input, &tokens, share, vec![0.0; tokens.len() * self.spec.hidden]);
            others.push(Part { first: 0, bank: Some(b), pending: self.banks[b].experts.submit(work), _stays: None });
        }
        if let Some((b, share)) = own {
            let start = Instant::now();
            let work = self.banks[b].experts.run(self.work(input, &tokens, share, output))?;
            counted.usage += work.spent;
            if counted.wanted {
                counted.banks[b].waited += start.elapsed();
            }
            output = work.output;
        }
        others.into_iter().try_for_each(|part| self.add(part, &mut output, counted))?;
        Ok(output)
    }

    /// Starts the same, for somebody to [`add`](LayerExperts::add).
    #[allow(clippy::too_many_arguments)] // as `compute_into`
    fn start(
        &self,
        placed: &Placed,
        input: &Arc<Hidden>,
        tokens: Range<usize>,
        ids: &[i32],
        weights: &[f32],
        stream: bool,
        counted: &mut Counted,
    ) -> Vec<Part> {
        let shares = self.split(placed, ids, weights, tokens.len(), stream);
        self.count(placed, &shares, stream, counted);
        let used = shares.into_iter().enumerate().filter(|(_, s)| !s.rows.is_empty());
        used.map(|(b, share)| {
            let work = self.work(input, &tokens, share, vec![0.0; tokens.len() * self.spec.hidden]);
            let (bank, pending) = match (&self.stream, stream) {
                (Some(s), true) => (None, s.backend.stream(&self.spec, &s.source, work)),
                _ => (Some(b), self.banks[b].experts.submit(work)),
            };
            Part { first: tokens.start, bank, pending, _stays: Some(Stays::new(&self.staying)) }
        })
        .collect()
    }

    /// Waits for a part and adds what it gives.
    fn add(&self, part: Part, output: &mut [f32], counted: &mut Counted) -> Result<()> {
        let start = Instant::now();
        let work = part.pending.wait()?;
        let waited = start.elapsed();
        // Whoever waits for work that nobody has begun does it: then this was no waiting.
        let kernels = work.spent.kernels.min(waited);
        counted.usage += Spent { kernels, waiting: waited - kernels };
        if let Some(bank) = part.bank.and_then(|b| counted.banks.get_mut(b)) {
            bank.waited += waited;
        }
        let to = &mut output[part.first * self.spec.hidden..][..work.output.len()];
        to.iter_mut().zip(&work.output).for_each(|(o, v)| *o += v);
        Ok(())
    }

    /// Starts the batch on a thread of the runtime's and returns at once; [`Pending::wait`] gives it back with its output.
    ///
    /// What is wrong with the batch is reported by `wait`.
    pub fn submit(self: &Arc<Self>, mut batch: Batch) -> Pending<Batch> {
        let span = tracing::debug_span!("submit", layer = self.spec.index, tokens = batch.tokens);
        let layer = self.clone();
        let backend = self.banks.first().map_or("", |bank| &bank.backend);
        self.team.spawn(backend, self.spec.index, move || {
            span.in_scope(|| layer.forward(&mut batch))?;
            Ok(batch)
        })
    }
}

/// One pass of `most` tokens at most, or passes of up to `several`: as few as can be, as large as each other, since a small one would read the weights for little.
fn passes(tokens: usize, most: usize, several: usize) -> impl Iterator<Item = Range<usize>> {
    let passes = tokens.div_ceil(if tokens <= most { most } else { several });
    (0..passes).map(move |i| i * tokens / passes..(i + 1) * tokens / passes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::activation::Activation;
    use crate::format::Format;
    use crate::source::synthetic::SyntheticSource;

    /// A bank that adds its number to every token it gets, and says how long it computed.
    struct Fake(f32, Duration);

    impl ExpertBank for Fake {
        fn submit(&self, mut work: Work) -> Pending<Work> {
            for row in &work.rows {
                work.output[row.token as usize * work.hidden] += self.0;
            }
            work.spent.kernels = self.1;
            let length = self.1.min(Duration::from_millis(5));
            Pending::new(move || {
                std::thread::sleep(length);
                Ok(work)
            })
        }

        fn packed_bytes(&self) -> u64 {
            0
        }
    }

    #[test]
    fn passes_are_few_and_as_large_as_each_other() {
        let sizes = |tokens, most| passes(tokens, most, most).map(|range| range.len()).collect::<Vec<_>>();
        assert!(sizes(0, 4).is_empty());
        assert_eq!(sizes(4, 4), [4]);
        assert_eq!(sizes(5, 4), [2, 3]);
        assert_eq!(sizes(10, 4), [3, 3, 4]);
        assert_eq!(sizes(4, 1), [1; 4]);
        for (tokens, most, several, n) in [
            (1, 1, 1, 1),
            (10, 4, 4, 3),
            (4096, 4096, 3072, 1),
            (4097, 4096, 3072, 2),
            (6145, 4096, 3072, 3),
            (8192, 4096, 3072, 3),
        ] {
            let all: Vec<Range<usize>> = passes(tokens, most, several).collect();
            assert_eq!(all.len(), n, "{tokens} by {most}");
            assert!(all.into_iter().flatten().eq(0..tokens), "{tokens} by {most}");
        }
        // Experts, of how many a token is, the most tokens, and those of several passes: fewer where that are 256 rows, and more than 1024 tokens.
        for (experts, top_k, most, several) in [
            (128, 8, 4096, 3072),
            (128, 8, 4095, 4095),
            (128, 8, 8192, 6144),
            (8, 2, 1024, 1024),
            (8, 2, 1200, 1024),
            (1, 1, 1, 1),
        ] {
            let source = SyntheticSource::builder().hidden(64).intermediate(64).experts(experts).top_k(top_k).build();
            let source = source.unwrap();
            assert_eq!(pass_of_several(&source.layers()[0], most), several, "{top_k} of {experts}, {most} tokens");
        }
    }

    #[test]
    fn banks_are_observed_together() {
        let bank = |number, kernels, expert_bytes, place| Bank {
            backend: "fake".into(),
            tier: "none".into(),
            experts: Box::new(Fake(number, kernels)),
            expert_bytes,
            place,
        };
        // The second says that it computed for longer than anybody waited for it.
        let hour = Duration::from_secs(3600);
        let banks = vec![bank(1.0, Duration::from_millis(2), 10, 0), bank(8.0, hour, 1000, 1)];
        let spec = LayerSpec {
            index: 4,
            experts: 4,
            top_k: 2,
            hidden: 2,
            intermediate: 2,
            formats: [Format::Bf16; 3],
            scales: [None; 3],
            activation: Activation::SiluMul,
            biases: false,
        };
        let layer = LayerExperts {
            spec,
            placed: RwLock::new(Placed::new(4, vec![vec![1, 2], vec![0, 3]])),
            observed: Mutex::new(Observed::new(4, banks.len())),
            moving: Mutex::default(),
            staying: Arc::default(),
            banks,
            pass_tokens: 8,
            team: Team::builder().threads(1).build().unwrap(),
            previous: None,
            last: true,
            stream: None,
            stream_from: Arc::default(),
        };
        let experts = Experts {
            layers: vec![Arc::new(layer)],
            cache: None,
            source: None,
            needs: vec![],
            stream_from: Arc::default(),
        };
        let mut batch = Batch::new(3, vec![0.0; 6], vec![3, 0, 3, 1, 1, -1], vec![1.0; 6]).unwrap();
        experts.layers[0].forward(&mut batch).unwrap();
        assert_eq!(batch.output(), [16.0, 0.0, 9.0, 0.0, 1.0, 0.0]);
        let map = experts.heat_map();
        assert_eq!(map.layers(), [LayerHeat { layer: 4, tokens: 3, counts: vec![1, 2, 0, 2] }]);
        let stats = experts.stats();
        let banks: Vec<_> =
            stats.layers[0].banks.iter().map(|(name, b)| (name.as_str(), b.rows, b.weight_bytes)).collect();
        assert_eq!(banks, [("fake", 2, 10), ("fake", 3, 2000)]);
        let usage = stats.layers[0].usage;
        assert_eq!((usage.calls, usage.tokens, usage.rows, usage.weight_bytes), (1, 3, 5, 10 + 2 * 1000));
        assert!(usage.kernels >= Duration::from_millis(7) && usage.kernels + usage.waiting <= usage.wall, "{usage:?}");
    }
}
