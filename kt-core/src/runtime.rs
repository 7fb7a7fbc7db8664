//! Chooses a backend for every layer, loads, and runs batches.

use std::ops::Range;
use std::sync::Arc;

use crate::backend::{Backend, ExpertBank, Fit, LinearOp, LoadContext, Progress};
use crate::batch::{Batch, NO_EXPERT};
use crate::cpu::team::{Team, allowed_cpus};
use crate::cpu::tier::Tier;
use crate::error::{Error, Result, Unsupported};
use crate::format::{Format, Group, Matrix};
use crate::layer::{LayerSpec, Proj};
use crate::pending::{Pending, contain};
use crate::plan::{Available, Change, Extra, LayerPlan, Plan, Remedy, Verdict, held_memory, memory_limits};
use crate::scheduler::{self, Home};
use crate::source::{Reads, WeightSource};
use crate::work::{Hidden, Work};

/// A backend that a build knows, or why it cannot run here.
pub struct Candidate {
    /// The backend's name.
    pub name: String,
    /// The backend, or what this machine lacks.
    pub backend: Result<Box<dyn Backend>, Unsupported>,
}

impl Candidate {
    /// A candidate.
    pub fn new(name: &str, backend: Result<impl Backend + 'static, Unsupported>) -> Self {
        Candidate { name: name.into(), backend: backend.map(|b| Box::new(b) as Box<dyn Backend>) }
    }
}

/// Builds a [`Runtime`]. Applications start from `kt::runtime()`, which knows the compiled-in backends.
pub struct RuntimeBuilder {
    registry: fn(Tier) -> Vec<Candidate>,
    own: Vec<Candidate>,
    threads: Option<usize>,
    backend: Option<String>,
    max_tier: Tier,
    memory_limit: Option<u64>,
    pass_tokens: usize,
}

impl RuntimeBuilder {
    /// A builder over a list of backends: the list is the policy, best first among equals.
    pub fn new(registry: fn(Tier) -> Vec<Candidate>) -> Self {
        RuntimeBuilder {
            registry,
            own: Vec::new(),
            threads: None,
            backend: None,
            max_tier: Tier::Amx,
            memory_limit: None,
            pass_tokens: 1024,
        }
    }

    /// Threads to compute with, the caller's counted; default and maximum are the CPUs that this process may use.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Uses only the backend of this name; what it cannot do is an error, never another backend.
    pub fn backend(mut self, name: impl Into<String>) -> Self {
        self.backend = Some(name.into());
        self
    }

    /// Adds a backend of the caller's own, preferred over the built-in ones of equal rank.
    pub fn with_backend(mut self, backend: impl Backend + 'static) -> Self {
        self.own.push(Candidate { name: backend.name().into(), backend: Ok(Box::new(backend)) });
        self
    }

    /// Uses no instruction set above this tier.
    pub fn max_tier(mut self, tier: Tier) -> Self {
        self.max_tier = tier;
        self
    }

    /// Memory that loading may take, in place of what the system says is available.
    pub fn memory_limit(mut self, bytes: u64) -> Self {
        self.memory_limit = Some(bytes);
        self
    }

    /// Most tokens computed at once (default 1024): a larger batch goes through a layer in passes. More tokens mean more scratch
    /// and fewer readings of the weights.
    pub fn pass_tokens(mut self, tokens: usize) -> Self {
        self.pass_tokens = tokens;
        self
    }

    /// Builds the runtime and starts its threads.
    ///
    /// # Errors
    /// The named backend does not exist or cannot run on this machine (the error says why), or a number is 0.
    pub fn build(self) -> Result<Runtime> {
        if self.threads == Some(0) || self.pass_tokens == 0 {
            return Err(Error::Invalid("threads and pass_tokens must be at least 1".into()));
        }
        let mut candidates = self.own;
        candidates.extend((self.registry)(self.max_tier));
        if let Some(name) = &self.backend {
            let known: Vec<_> = candidates.iter().map(|c| c.name.clone()).collect();
            candidates.retain(|c| c.name == *name);
            match candidates.first() {
                None => {
                    return Err(Unsupported::new(format!(
                        "there is no backend `{name}` in this build; it has: {}",
                        known.join(", ")
                    ))
                    .into());
                }
                Some(Candidate { backend: Err(why), .. }) => {
                    return Err(Unsupported::new(format!("backend `{name}` cannot run here: {why}")).into());
                }
                _ => {}
            }
        }
        Ok(Runtime {
            team: Team::new(self.threads.unwrap_or_else(allowed_cpus))?,
            candidates,
            memory_limit: self.memory_limit,
            pass_tokens: self.pass_tokens,
        })
    }
}

/// Backends and threads. Several may live in one process.
pub struct Runtime {
    team: Arc<Team>,
    candidates: Vec<Candidate>,
    memory_limit: Option<u64>,
    pass_tokens: usize,
}

/// Options of [`Runtime::load_with`].
#[derive(Default)]
pub struct LoadOptions {
    /// Memory that the caller will take besides: it counts in the plan.
    pub extra: Vec<Extra>,
    /// Most tokens that the caller will put into a batch, where it knows: scratch is planned for no more.
    pub batch_tokens: Option<usize>,
    /// Progress and cancellation; keep a clone to look at it from another thread.
    pub progress: Arc<Progress>,
}

/// What experts may become to take less, of what is encoded fast enough to be done at load.
const SMALLER: [Format; 8] = [
    Format::Int8(Group::Row),
    Format::Q8_0,
    Format::Q6K,
    Format::Q5K,
    Format::Int4(Group::Of(32)),
    Format::Q4K,
    Format::Q3K,
    Format::Q2K,
];

/// Layers of a plan, and what they take besides.
#[derive(Default)]
struct LayerPlans {
    plans: Vec<LayerPlan>,
    /// Per token of a pass, and per row of a thread's tile.
    scratch_bytes_per_token: [u64; 2],
    load_bytes_per_thread: u64,
}

impl LayerPlans {
    fn scratch_bytes(&self, tokens: usize, threads: usize) -> u64 {
        scratch_bytes(self.scratch_bytes_per_token, tokens, threads)
    }
}

/// Scratch of all threads for a pass; see [`LayerPlans::scratch_bytes_per_token`].
fn scratch_bytes([per_token, per_row]: [u64; 2], tokens: usize, threads: usize) -> u64 {
    // A tile has up to 256 rows; a thread has a panel of unpacked weights, of about a MiB.
    per_token * tokens as u64 + (per_row * tokens.min(256) as u64 + (1 << 20)) * threads as u64
}

/// The largest number below `most` of which `good` is true, where that is true up to some number and false from there on.
fn largest(most: usize, good: impl Fn(usize) -> bool) -> Option<usize> {
    let (mut below, mut from) = (0, most);
    while from > below + 1 {
        let middle = below + (from - below) / 2;
        if good(middle) { below = middle } else { from = middle }
    }
    (below > 0).then_some(below)
}

/// The backend chosen, and why the others were not.
struct Choice<'a> {
    backend: &'a dyn Backend,
    fit: Fit,
    declined: Vec<(String, String)>,
}

impl Runtime {
    /// Threads of the team, the caller's counted.
    pub fn threads(&self) -> usize {
        self.team.threads()
    }

    /// The backends it may choose from, with the reason for those that cannot run here.
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    fn choose(&self, what: &str, probe: impl Fn(&dyn Backend) -> Result<Fit, Unsupported>) -> Result<Choice<'_>> {
        let mut best: Option<(&str, &dyn Backend, Fit)> = None;
        let mut declined = Vec::new();
        for c in &self.candidates {
            let fit = match &c.backend {
                Ok(backend) => probe(&**backend).map(|fit| (&**backend, fit)),
                Err(why) => Err(why.clone()),
            };
            match fit {
                Err(why) => declined.push((c.name.clone(), why.to_string())),
                Ok((backend, fit)) => match &best {
                    Some((name, _, first)) if first.rank >= fit.rank => {
                        declined.push((
                            c.name.clone(),
                            format!("ranks below {name} ({} against {})", fit.tier, first.tier),
                        ));
                    }
                    _ => {
                        if let Some((name, _, old)) = best.take() {
                            declined.push((
                                name.into(),
                                format!("ranks below {} ({} against {})", c.name, old.tier, fit.tier),
                            ));
                        }
                        best = Some((&c.name, backend, fit));
                    }
                },
            }
        }
        match best {
            Some((_, backend, fit)) => Ok(Choice { backend, fit, declined }),
            None => {
                let reasons: Vec<_> = declined.iter().map(|(b, r)| format!("{b}: {r}")).collect();
                Err(Unsupported::new(format!("no backend for {what}; {}", reasons.join("; "))).into())
            }
        }
    }

    fn choose_for(&self, layer: &LayerSpec) -> Result<Choice<'_>> {
        let what = format!("layer {} ({})", layer.index, layer.format_label());
        self.choose(&what, |b| b.probe(layer))
    }

    /// What loading this checkpoint's experts would take; reads headers only.
    ///
    /// # Errors
    /// A layer that no backend can run, with every backend's reason.
    pub fn plan(&self, source: &dyn WeightSource) -> Result<Plan> {
        self.plan_with(source, &LoadOptions::default())
    }

    /// As [`Runtime::plan`], with what the options say of the caller. Where it fits badly or not at all, the plan says what would help.
    ///
    /// # Errors
    /// As [`Runtime::plan`].
    pub fn plan_with(&self, source: &dyn WeightSource, options: &LoadOptions) -> Result<Plan> {
        let layers = self.plan_layers(source.layers(), |layer, proj| source.reads(layer, proj))?;
        let limits = match self.memory_limit {
            Some(bytes) => vec![Available::limited(bytes)],
            None => memory_limits(),
        };
        let tokens = options.batch_tokens.unwrap_or(self.pass_tokens).min(self.pass_tokens);
        let (scratch_per_token, load_per_thread) = (layers.scratch_bytes_per_token, layers.load_bytes_per_thread);
        let mut plan = Plan {
            scratch_bytes: layers.scratch_bytes(tokens, self.threads()),
            load_bytes: layers.load_bytes_per_thread * self.threads() as u64,
            layers: layers.plans,
            extra: options.extra.clone(),
            held_bytes: held_memory(),
            available: limits[0].clone(),
            limits,
            nodes: Vec::new(),
            remedies: Vec::new(),
        };
        plan.nodes = vec![(0, plan.resident_bytes())];
        if plan.verdict() != Verdict::Fits {
            self.offer_formats(&mut plan, source, tokens);
            let with = |tokens, threads| Plan {
                scratch_bytes: scratch_bytes(scratch_per_token, tokens, threads),
                load_bytes: load_per_thread * threads as u64,
                ..plan.clone()
            };
            let better = |p: &Plan| p.verdict() < plan.verdict();
            let passes = largest(tokens, |n| better(&with(n, self.threads())));
            let threads = largest(self.threads(), |n| better(&with(tokens, n)));
            let offers = [
                passes.map(|n| (Change::PassTokens(n), with(n, self.threads()))),
                threads.map(|n| (Change::Threads(n), with(tokens, n))),
            ];
            for (change, other) in offers.into_iter().flatten() {
                plan.offer(change, other.need_bytes(), other.verdict());
            }
            plan.offer_memory();
        }
        Ok(plan)
    }

    fn plan_layers(&self, specs: &[LayerSpec], reads: impl Fn(&LayerSpec, Proj) -> Reads) -> Result<LayerPlans> {
        let mut all = LayerPlans::default();
        for layer in specs {
            let Choice { backend, fit, declined } = self.choose_for(layer)?;
            let reads = Proj::ALL.map(|proj| reads(layer, proj));
            // Sums are of one expert.
            let copied: u64 = reads.iter().map(|r| r.copied_bytes).sum();
            let read: u64 = reads.iter().map(|r| r.mapped_bytes).sum();
            let biases: u64 = Proj::ALL.iter().map(|&p| layer.shape(p).0 as u64 * 4).sum();
            let in_place = fit.packed_bytes == 0 && copied == 0;
            let one_copy = reads.iter().map(|r| r.copied_bytes).max().unwrap_or(0);
            let loading = match (in_place, fit.packed_bytes) {
                (true, _) => 0,
                (false, 0) => read,
                (false, _) => read + one_copy,
            };
            all.load_bytes_per_thread = all.load_bytes_per_thread.max(loading);
            // Packed inputs, and the call's f32 output; per row of a tile, two tiles of 256 outputs and the gathered inputs.
            let input = fit.inputs[0].bytes(1, layer.hidden) as u64;
            let [token, row] = &mut all.scratch_bytes_per_token;
            *token = (*token).max(fit.scratch_bytes_per_token + 4 * layer.hidden as u64);
            *row = (*row).max(2 * 256 * 4 + 2 * input);
            all.plans.push(LayerPlan {
                index: layer.index,
                experts: layer.experts,
                format: layer.format_label(),
                stored_bytes: layer.expert_bytes() * layer.experts as u64,
                token_bytes: (fit.packed_bytes + fit.mapped_bytes) / layer.experts.max(1) as u64 * layer.top_k as u64,
                copied_bytes: fit.mapped_bytes.min(copied * layer.experts as u64),
                bias_bytes: if layer.biases { biases * layer.experts as u64 } else { 0 },
                backend: backend.name().into(),
                fit,
                declined,
            });
        }
        Ok(all)
    }

    /// What the experts would take in smaller formats: up to three that help, or the smallest when none does.
    fn offer_formats(&self, plan: &mut Plan, source: &dyn WeightSource, tokens: usize) {
        let mut offers: Vec<Remedy> = Vec::new();
        for format in SMALLER {
            let specs: Option<Vec<LayerSpec>> = source
                .layers()
                .iter()
                .map(|layer| {
                    let fits = Proj::ALL.iter().all(|&p| format.row_bytes(layer.shape(p).1).is_ok());
                    fits.then(|| LayerSpec { formats: [format; 3], ..layer.clone() })
                })
                .collect();
            let reads = |layer: &LayerSpec, proj| {
                let (rows, cols) = layer.shape(proj);
                let stored = source.layers().iter().find(|l| l.index == layer.index);
                match stored.map(|l| (source.reads(l, proj), l.format(proj))) {
                    Some((reads, own)) if own == format => reads,
                    own => Reads {
                        mapped_bytes: own.map_or(0, |(reads, _)| reads.mapped_bytes),
                        copied_bytes: format.stored_bytes(rows, cols),
                    },
                }
            };
            let Some(layers) = specs.and_then(|specs| self.plan_layers(&specs, reads).ok()) else { continue };
            let other = Plan {
                scratch_bytes: layers.scratch_bytes(tokens, self.threads()),
                load_bytes: layers.load_bytes_per_thread * self.threads() as u64,
                layers: layers.plans,
                ..plan.clone()
            };
            let (need_bytes, verdict) = (other.need_bytes(), other.verdict());
            if need_bytes < plan.need_bytes() {
                offers.push(Remedy { change: Change::ExpertsAs(format), need_bytes, verdict });
            }
        }
        // The more bytes, the more exact.
        offers.sort_by_key(|r| std::cmp::Reverse(r.need_bytes));
        let now = plan.verdict();
        match offers.iter().any(|r| r.verdict < now) {
            true => plan.remedies.extend(offers.into_iter().filter(|r| r.verdict < now).take(3)),
            false => plan.remedies.extend(offers.pop()),
        }
    }

    /// Why each backend was or was not chosen for each layer.
    ///
    /// # Errors
    /// As [`Runtime::plan`].
    pub fn explain(&self, source: &dyn WeightSource) -> Result<String> {
        Ok(self.plan(source)?.explain())
    }

    /// Loads all experts.
    ///
    /// # Errors
    /// [`Error::Memory`], with the plan, when it would not fit; bad tensors; layers that no backend can run.
    pub fn load(&self, source: &dyn WeightSource) -> Result<Experts> {
        self.load_with(source, LoadOptions::default())
    }

    /// As [`Runtime::load`], with progress, cancellation and other memory counted in.
    ///
    /// # Errors
    /// As [`Runtime::load`], and [`Error::Cancelled`].
    pub fn load_with(&self, source: &dyn WeightSource, options: LoadOptions) -> Result<Experts> {
        let plan = self.plan_with(source, &options)?;
        if plan.verdict() == Verdict::Refuse {
            return Err(Error::Memory(Box::new(plan)));
        }
        let context = LoadContext { team: self.team.clone(), progress: options.progress };
        context.progress.start(plan.layers.iter().map(|l| l.stored_bytes).sum());
        let mut layers = Vec::new();
        for spec in source.layers() {
            let choice = self.choose_for(spec)?;
            let name = choice.backend.name().to_string();
            let all: Vec<u32> = (0..spec.experts as u32).collect();
            let bank =
                contain(&name, spec.index, || choice.backend.load(spec, &all, source, &context)).and_then(|r| r)?;
            tracing::info!(
                layer = spec.index,
                format = %spec.format_label(),
                backend = %name,
                tier = %choice.fit.tier,
                how = %choice.fit.how,
                packed_bytes = bank.packed_bytes(),
                "experts loaded"
            );
            layers.push(LayerExperts {
                spec: spec.clone(),
                homes: all.iter().map(|&local| Home { bank: 0, local }).collect(),
                banks: vec![Bank { backend: name, tier: choice.fit.tier, experts: bank }],
                pass_tokens: self.pass_tokens,
            });
        }
        Ok(Experts { layers: layers.into_iter().map(Arc::new).collect() })
    }

    /// Packs one matrix outside of experts, for a host's dense layers.
    ///
    /// # Errors
    /// No backend takes the format, or a scale is not a number.
    pub fn linear(&self, matrix: &Matrix) -> Result<Linear> {
        let (format, rows, cols) = (matrix.format(), matrix.rows(), matrix.cols());
        let choice = self.choose_linear(format, rows, cols)?;
        let context = LoadContext { team: self.team.clone(), progress: Arc::default() };
        let op = choice.backend.linear(matrix, &context)?;
        Ok(Linear { op, backend: choice.backend.name().into(), tier: choice.fit.tier })
    }

    /// What [`Runtime::linear`] would take for a matrix of this format and shape.
    ///
    /// # Errors
    /// No backend takes the format.
    pub fn plan_linear(&self, format: Format, rows: usize, cols: usize) -> Result<Fit> {
        self.choose_linear(format, rows, cols).map(|c| c.fit)
    }

    fn choose_linear(&self, format: Format, rows: usize, cols: usize) -> Result<Choice<'_>> {
        self.choose(&format!("a {format} matrix [{rows}, {cols}]"), |b| b.probe_linear(format, rows, cols))
    }
}

/// A matrix packed for a kernel, `y = W x`, run by the runtime's threads.
pub struct Linear {
    op: Box<dyn LinearOp>,
    backend: String,
    tier: String,
}

impl Linear {
    /// Output features.
    pub fn rows(&self) -> usize {
        self.op.rows()
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.op.cols()
    }

    /// The backend that runs it.
    pub fn backend(&self) -> &str {
        &self.backend
    }

    /// The instruction set that runs it.
    pub fn tier(&self) -> &str {
        &self.tier
    }

    /// Bytes of memory that hold the packed matrix; 0 when it is used from the map.
    pub fn packed_bytes(&self) -> u64 {
        self.op.packed_bytes()
    }

    /// Multiplies `x: [n, cols]` into `y: [n, rows]`, both row-major; `y` is overwritten.
    ///
    /// # Errors
    /// [`Error::Length`] when the slices do not have such shapes.
    pub fn forward(&self, x: &[f32], y: &mut [f32]) -> Result<()> {
        let (rows, cols) = (self.rows(), self.cols());
        let n = x.len() / cols.max(1);
        if x.len() != n * cols {
            return Err(Error::Length { what: "x [n, cols]", expected: n * cols, got: x.len() });
        }
        if y.len() != n * rows {
            return Err(Error::Length { what: "y [n, rows]", expected: n * rows, got: y.len() });
        }
        contain(&self.backend, 0, || self.op.forward(x, y))
    }
}

/// All expert layers of a model, loaded.
pub struct Experts {
    layers: Vec<Arc<LayerExperts>>,
}

impl Experts {
    /// The experts of layer `index` (counting dense layers too, as the checkpoint does).
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`] when that layer holds no experts.
    pub fn layer(&self, index: usize) -> Result<&Arc<LayerExperts>> {
        self.layers.iter().find(|l| l.spec.index == index).ok_or_else(|| {
            let known = match (self.layers.first(), self.layers.last()) {
                (Some(a), Some(b)) => format!("{}..={}", a.spec.index, b.spec.index),
                _ => "none".into(),
            };
            Error::NoSuchLayer { layer: index, known }
        })
    }

    /// All expert layers, by rising index.
    pub fn layers(&self) -> &[Arc<LayerExperts>] {
        &self.layers
    }

    /// Bytes of memory that hold packed experts.
    pub fn packed_bytes(&self) -> u64 {
        self.layers.iter().flat_map(|l| &l.banks).map(|b| b.experts.packed_bytes()).sum()
    }
}

struct Bank {
    backend: String,
    tier: String,
    experts: Box<dyn ExpertBank>,
}

/// The experts of one layer.
pub struct LayerExperts {
    spec: LayerSpec,
    homes: Vec<Home>,
    banks: Vec<Bank>,
    pass_tokens: usize,
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

    fn check(&self, batch: &Batch) -> Result<()> {
        let expected = batch.tokens * self.spec.hidden;
        if batch.input.len() != expected {
            return Err(Error::Length { what: "input [tokens, hidden]", expected, got: batch.input.len() });
        }
        let top_k = batch.top_k().max(1);
        for (i, &id) in batch.topk_ids.iter().enumerate() {
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

    /// Computes the batch's output: for every token, the weighted sum of its experts. The calling thread works too.
    ///
    /// # Errors
    /// Wrong slice lengths, an expert id out of range, or a backend's failure; the batch's output is then empty.
    pub fn forward(&self, batch: &mut Batch) -> Result<()> {
        let mut output = std::mem::take(&mut batch.output);
        self.check(batch)?;
        output.clear();
        output.resize(batch.tokens * self.spec.hidden, 0.0);
        if batch.tokens <= self.pass_tokens {
            output = self.pass(&batch.input, 0..batch.tokens, &batch.topk_ids, &batch.topk_weights, output)?;
        } else {
            let (hidden, top_k) = (self.spec.hidden, batch.top_k());
            let mut part = Vec::new();
            for first in (0..batch.tokens).step_by(self.pass_tokens) {
                let tokens = first..batch.tokens.min(first + self.pass_tokens);
                let slots = tokens.start * top_k..tokens.end * top_k;
                let (ids, weights) = (&batch.topk_ids[slots.clone()], &batch.topk_weights[slots]);
                part.clear();
                part.resize(tokens.len() * hidden, 0.0);
                part = self.pass(&batch.input, tokens, ids, weights, part)?;
                output[first * hidden..][..part.len()].copy_from_slice(&part);
            }
        }
        batch.output = output;
        Ok(())
    }

    /// Tokens `tokens` of the input, with their `ids` and `weights`. All banks work at the same time; their outputs are added in the order of the banks.
    fn pass(
        &self,
        input: &Arc<Hidden>,
        tokens: Range<usize>,
        ids: &[i32],
        weights: &[f32],
        output: Vec<f32>,
    ) -> Result<Vec<f32>> {
        let (first, tokens) = (tokens.start, tokens.len());
        let top_k = (ids.len() / tokens.max(1)).max(1);
        let shares = scheduler::split(ids, weights, top_k, &self.homes, self.banks.len());
        let mut works = self.banks.iter().zip(shares).map(|(bank, share)| {
            let work = Work {
                input: input.clone(),
                first,
                tokens,
                hidden: self.spec.hidden,
                rows: share.rows,
                experts: share.experts,
                output: Vec::new(),
            };
            (bank, work)
        });
        let Some((bank, mut work)) = works.next() else { return Ok(output) };
        let others: Vec<Pending<Work>> = works
            .map(|(bank, work)| bank.experts.submit(Work { output: vec![0.0; tokens * self.spec.hidden], ..work }))
            .collect();
        work.output = output;
        let mut output = bank.experts.run(work)?.output;
        for pending in others {
            let other = pending.wait()?;
            output.iter_mut().zip(&other.output).for_each(|(o, v)| *o += v);
        }
        Ok(output)
    }

    /// Starts the batch and returns at once; [`Pending::wait`] gives it back with its output.
    ///
    /// What is wrong with the batch is reported by `wait`.
    pub fn submit(self: &Arc<Self>, mut batch: Batch) -> Pending<Batch> {
        if let Err(e) = self.check(&batch) {
            return Pending::ready(Err(e));
        }
        // A single bank with one pass: its own submit is all there is to do.
        if let [bank] = &self.banks[..]
            && batch.tokens <= self.pass_tokens
        {
            let mut output = std::mem::take(&mut batch.output);
            output.clear();
            output.resize(batch.tokens * self.spec.hidden, 0.0);
            let top_k = batch.top_k().max(1);
            let mut shares = scheduler::split(&batch.topk_ids, &batch.topk_weights, top_k, &self.homes, 1);
            let share = shares.pop().unwrap_or_default();
            let work = Work {
                input: batch.input.clone(),
                first: 0,
                tokens: batch.tokens,
                hidden: self.spec.hidden,
                rows: share.rows,
                experts: share.experts,
                output,
            };
            return bank.experts.submit(work).map(move |work| {
                batch.output = work.output;
                Ok(batch)
            });
        }
        let layer = self.clone();
        Pending::new(move || {
            layer.forward(&mut batch)?;
            Ok(batch)
        })
    }
}
