//! Chooses a backend for every layer, loads, and runs batches.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::backend::{Backend, ExpertBank, Fit, LinearOp, LoadContext, Progress, Residence};
use crate::batch::{Batch, NO_EXPERT};
use crate::cpu::cache::{CacheReport, PackedCache};
use crate::cpu::memory::HugePages;
use crate::cpu::team::Team;
use crate::cpu::tier::Tier;
use crate::error::{Error, Result, Unsupported};
use crate::format::{Format, Group, Matrix};
use crate::heat::{HeatMap, LayerHeat};
use crate::layer::{LayerSpec, Proj};
use crate::pending::{Pending, contain};
use crate::plan::{
    Available, Change, Extra, LayerPlan, Plan, Remedy, Verdict, held_memory, human_bytes, memory_limits,
};
use crate::scheduler::{self, Home, Share};
use crate::source::{Reads, WeightSource};
use crate::stats::{LayerStats, Stats, Usage};
use crate::work::{Hidden, Spent, Work};

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
    #[cfg(feature = "plugins")]
    plugins: [Vec<PathBuf>; 2],
    threads: Option<usize>,
    team: Option<Arc<Team>>,
    huge_pages: HugePages,
    backend: Option<String>,
    max_tier: Tier,
    memory_limit: Option<u64>,
    packed_cache: Option<PathBuf>,
    pass_tokens: usize,
}

impl RuntimeBuilder {
    /// A builder over a list of backends: the list is the policy, best first among equals.
    pub fn new(registry: fn(Tier) -> Vec<Candidate>) -> Self {
        RuntimeBuilder {
            registry,
            own: Vec::new(),
            #[cfg(feature = "plugins")]
            plugins: Default::default(),
            threads: None,
            team: None,
            huge_pages: HugePages::default(),
            backend: None,
            max_tier: Tier::Amx,
            memory_limit: None,
            packed_cache: None,
            pass_tokens: 1024,
        }
    }

    /// Threads to compute with, the caller's counted. Default: the physical cores that this process may use; maximum: its CPUs.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// The threads to compute with, in place of a team of the runtime's own: [`Team::builder`] says where they run and how long they spin, or
    /// takes an application's pool. Runtimes may share one.
    pub fn team(mut self, team: Arc<Team>) -> Self {
        self.team = Some(team);
        self
    }

    /// Which pages packed weights take.
    pub fn huge_pages(mut self, huge_pages: HugePages) -> Self {
        self.huge_pages = huge_pages;
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

    /// Adds the backend of a plugin, preferred over the built-in ones of equal rank. Loading it runs its code.
    #[cfg(feature = "plugins")]
    pub fn plugin(mut self, path: impl Into<PathBuf>) -> Self {
        self.plugins[0].push(path.into());
        self
    }

    /// Adds the backends of all plugins of a directory. What there is no plugin is a candidate that declines, with the reason.
    #[cfg(feature = "plugins")]
    pub fn plugin_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.plugins[1].push(dir.into());
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

    /// Keeps experts on disk as they are packed, in a directory that is made when it is needed: the first load writes them, later ones map
    /// them in place of packing. It takes about as much disk as the experts take memory.
    ///
    /// Files of another version of this library, another tier, or a checkpoint that has changed since are made anew, each load telling why
    /// ([`Experts::packed_cache`]). One checkpoint has one set of files for each backend and format. The directory may be shared by
    /// processes, and be deleted at any time; it must be trusted as the checkpoint is, and nobody may truncate its files.
    pub fn packed_cache(mut self, dir: impl Into<PathBuf>) -> Self {
        self.packed_cache = Some(dir.into());
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
    /// The named backend does not exist or cannot run on this machine (the error says why), a number is 0, both a team and a number of
    /// threads were given, or a plugin that was named is refused or a directory of plugins cannot be read.
    pub fn build(self) -> Result<Runtime> {
        if self.threads == Some(0) || self.pass_tokens == 0 {
            return Err(Error::Invalid("threads and pass_tokens must be at least 1".into()));
        }
        if self.threads.is_some() && self.team.is_some() {
            return Err(Error::Invalid("give either a team or a number of threads: a team has its own".into()));
        }
        let mut candidates = self.own;
        #[cfg(feature = "plugins")]
        candidates.extend(crate::plugin::candidates(&self.plugins[0], &self.plugins[1], self.max_tier)?);
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
        let team = match (self.team, self.threads) {
            (Some(team), _) => team,
            (None, Some(threads)) => Team::builder().threads(threads).build()?,
            (None, None) => Team::builder().build()?,
        };
        for note in team.notes() {
            tracing::warn!("{note}");
        }
        Ok(Runtime {
            team,
            max_tier: self.max_tier,
            huge_pages: self.huge_pages,
            candidates,
            memory_limit: self.memory_limit,
            packed_cache: self.packed_cache,
            pass_tokens: self.pass_tokens,
        })
    }
}

/// Backends and threads. Several may live in one process.
pub struct Runtime {
    team: Arc<Team>,
    max_tier: Tier,
    huge_pages: HugePages,
    candidates: Vec<Candidate>,
    memory_limit: Option<u64>,
    packed_cache: Option<PathBuf>,
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

    /// What it does not use of this machine, and why: CPUs, nodes, bindings, and tiers by its own limit.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = self.team.notes().to_vec();
        let best = Tier::detect(Tier::Amx);
        if self.max_tier < best {
            notes.push(format!(
                "instruction sets above {} are not used, by request; this CPU has {best}",
                self.max_tier
            ));
        }
        notes
    }

    /// The threads it computes with.
    pub fn team(&self) -> &Arc<Team> {
        &self.team
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
        self.plan_beside(source, options, self.cache_of(source).as_ref())
    }

    /// The packed cache for this checkpoint.
    fn cache_of(&self, source: &dyn WeightSource) -> Option<PackedCache> {
        self.packed_cache.as_ref().map(|dir| PackedCache::new(dir, source))
    }

    fn plan_beside(
        &self,
        source: &dyn WeightSource,
        options: &LoadOptions,
        cache: Option<&PackedCache>,
    ) -> Result<Plan> {
        // Elsewhere packed experts are copied out of the cache, to the memory of their nodes.
        let cache = cache.filter(|_| !self.team.wants_memory_near());
        let layers = self.plan_layers(source.layers(), cache, |i, proj| source.reads(&source.layers()[i], proj))?;
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
            notes: self.notes(),
            remedies: Vec::new(),
        };
        plan.nodes = match self.team.shares() {
            [one] => vec![(one.node, plan.resident_bytes())],
            shares => {
                let (packed, threads) = (u128::from(plan.packed_bytes()), self.threads().max(1) as u128);
                shares.iter().map(|s| (s.node, (packed * s.threads as u128 / threads) as u64)).collect()
            }
        };
        for &(node, bytes) in plan.nodes.iter().filter(|_| self.team.shares().len() > 1) {
            let has = self.team.topology().nodes().iter().find(|n| n.index == node).map_or(0, |n| n.total_bytes);
            if has > 0 && bytes > has {
                plan.notes.push(format!(
                    "node {node}: {} of weights are meant for it and it has {}: the rest will lie on other nodes",
                    human_bytes(bytes),
                    human_bytes(has)
                ));
            }
        }
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

    fn plan_layers(
        &self,
        specs: &[LayerSpec],
        cache: Option<&PackedCache>,
        // Of the layer at this place among `specs`.
        reads: impl Fn(usize, Proj) -> Reads,
    ) -> Result<LayerPlans> {
        let mut all = LayerPlans::default();
        for (i, layer) in specs.iter().enumerate() {
            let Choice { backend, mut fit, declined } = self.choose_for(layer)?;
            let experts: Vec<u32> = (0..layer.experts as u32).collect();
            // What is used in place is read, and made, as ever.
            let mut reads = Proj::ALL.map(|proj| reads(i, proj));
            let used_in_place = fit.mapped_bytes;
            if cache.is_some_and(|cache| backend.is_cached(layer, &experts, cache)) {
                if fit.mapped_bytes == 0 {
                    reads = [Reads::default(); 3];
                }
                fit.mapped_bytes += std::mem::take(&mut fit.packed_bytes);
                fit.how += "; from the packed cache";
            }
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
                copied_bytes: used_in_place.min(copied * layer.experts as u64),
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
            let reads = |i: usize, proj| {
                let layer = &source.layers()[i];
                let (rows, cols) = layer.shape(proj);
                let own = source.reads(layer, proj);
                match layer.format(proj) == format {
                    true => own,
                    false => Reads { copied_bytes: format.stored_bytes(rows, cols), ..own },
                }
            };
            let Some(layers) = specs.and_then(|specs| self.plan_layers(&specs, None, reads).ok()) else { continue };
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
        let _span = tracing::info_span!("load", path = %source.path().display(), threads = self.threads()).entered();
        let cache = self.cache_of(source).map(Arc::new);
        let plan = self.plan_beside(source, &options, cache.as_deref())?;
        if plan.verdict() == Verdict::Refuse {
            return Err(Error::Memory(Box::new(plan)));
        }
        let context = LoadContext {
            team: self.team.clone(),
            progress: options.progress,
            huge_pages: self.huge_pages,
            cache: cache.clone(),
        };
        context.progress.start(plan.layers.iter().map(|l| l.stored_bytes).sum());
        let mut layers = Vec::new();
        for spec in source.layers() {
            let _span = tracing::info_span!("load_layer", layer = spec.index).entered();
            let choice = tracing::info_span!("placement", layer = spec.index).in_scope(|| self.choose_for(spec))?;
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
                banks: vec![Bank {
                    backend: name,
                    tier: choice.fit.tier,
                    experts: bank,
                    expert_bytes: (choice.fit.packed_bytes + choice.fit.mapped_bytes) / spec.experts.max(1) as u64,
                    ids: all,
                }],
                pass_tokens: self.pass_tokens,
                team: self.team.clone(),
                observed: Mutex::new(Observed { counts: vec![0; spec.experts], ..Observed::default() }),
            });
        }
        let cache = cache.map(|cache| cache.report());
        if let Some(cache) = &cache {
            tracing::info!(
                dir = %cache.dir.display(),
                mapped_bytes = cache.mapped_bytes,
                written_bytes = cache.written_bytes,
                problems = cache.problems.len(),
                "packed cache"
            );
        }
        let experts = Experts { layers: layers.into_iter().map(Arc::new).collect(), cache };
        for residence in experts.residence().iter().filter(|r| r.is_astray()) {
            tracing::warn!("{residence}");
        }
        Ok(experts)
    }

    /// Packs one matrix outside of experts, for a host's dense layers.
    ///
    /// # Errors
    /// No backend takes the format, or a scale is not a number.
    pub fn linear(&self, matrix: &Matrix) -> Result<Linear> {
        let (format, rows, cols) = (matrix.format(), matrix.rows(), matrix.cols());
        let choice = self.choose_linear(format, rows, cols)?;
        let context =
            LoadContext { team: self.team.clone(), progress: Arc::default(), huge_pages: self.huge_pages, cache: None };
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
    cache: Option<CacheReport>,
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

    /// What the packed cache did for this load, if there is one ([`RuntimeBuilder::packed_cache`]).
    pub fn packed_cache(&self) -> Option<&CacheReport> {
        self.cache.as_ref()
    }

    /// Bytes of memory that hold packed experts; those mapped from the packed cache do not count.
    pub fn packed_bytes(&self) -> u64 {
        self.layers.iter().flat_map(|l| &l.banks).map(|b| b.experts.packed_bytes()).sum()
    }

    /// What the calls of every layer did since loading, or since [`Experts::reset_stats`].
    pub fn stats(&self) -> Stats {
        let layer = |l: &Arc<LayerExperts>| LayerStats { layer: l.spec.index, usage: l.observed().usage };
        Stats { layers: self.layers.iter().map(layer).collect() }
    }

    /// Starts the statistics anew; the heat map goes on.
    pub fn reset_stats(&self) {
        self.layers.iter().for_each(|l| l.observed().usage = Usage::default());
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
}

struct Bank {
    backend: String,
    tier: String,
    experts: Box<dyn ExpertBank>,
    /// Bytes of weights of one expert, packed or in place.
    expert_bytes: u64,
    /// The layer's number of each local expert.
    ids: Vec<u32>,
}

/// What a layer's calls did. Behind one lock, taken twice a call: that is no dearer than as many atomic numbers, and nobody sees
/// the time of a call without its bytes.
#[derive(Default)]
struct Observed {
    usage: Usage,
    /// For the heat map: tokens routed, and how often each expert was chosen.
    tokens: u64,
    counts: Vec<u64>,
}

/// The experts of one layer.
pub struct LayerExperts {
    spec: LayerSpec,
    homes: Vec<Home>,
    banks: Vec<Bank>,
    pass_tokens: usize,
    team: Arc<Team>,
    observed: Mutex<Observed>,
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

    fn observed(&self) -> MutexGuard<'_, Observed> {
        self.observed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts the rows and weights of a pass, and its experts in the heat map.
    fn count(&self, tokens: usize, shares: &[Share], usage: &mut Usage) {
        let mut observed = self.observed();
        observed.tokens += tokens as u64;
        for (bank, share) in self.banks.iter().zip(shares) {
            usage.rows += share.rows.len() as u64;
            usage.weight_bytes += share.experts.len() as u64 * bank.expert_bytes;
            for group in &share.experts {
                observed.counts[bank.ids[group.local as usize] as usize] += group.rows.len() as u64;
            }
        }
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
        let _span = tracing::debug_span!("forward", layer = self.spec.index, tokens = batch.tokens).entered();
        let start = Instant::now();
        let mut usage = Usage { calls: 1, tokens: batch.tokens as u64, ..Usage::default() };
        let mut output = std::mem::take(&mut batch.output);
        self.check(batch)?;
        output.clear();
        output.resize(batch.tokens * self.spec.hidden, 0.0);
        if batch.tokens <= self.pass_tokens {
            output =
                self.pass(&batch.input, 0..batch.tokens, &batch.topk_ids, &batch.topk_weights, output, &mut usage)?;
        } else {
            let (hidden, top_k) = (self.spec.hidden, batch.top_k());
            let mut part = Vec::new();
            for first in (0..batch.tokens).step_by(self.pass_tokens) {
                let tokens = first..batch.tokens.min(first + self.pass_tokens);
                let slots = tokens.start * top_k..tokens.end * top_k;
                let (ids, weights) = (&batch.topk_ids[slots.clone()], &batch.topk_weights[slots]);
                part.clear();
                part.resize(tokens.len() * hidden, 0.0);
                part = self.pass(&batch.input, tokens, ids, weights, part, &mut usage)?;
                output[first * hidden..][..part.len()].copy_from_slice(&part);
            }
        }
        batch.output = output;
        usage.wall = start.elapsed();
        self.observed().usage += usage;
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
        usage: &mut Usage,
    ) -> Result<Vec<f32>> {
        let (first, tokens) = (tokens.start, tokens.len());
        let top_k = (ids.len() / tokens.max(1)).max(1);
        let shares = scheduler::split(ids, weights, top_k, &self.homes, self.banks.len());
        self.count(tokens, &shares, usage);
        let mut works = self.banks.iter().zip(shares).map(|(bank, share)| {
            let work = Work {
                input: input.clone(),
                first,
                tokens,
                hidden: self.spec.hidden,
                rows: share.rows,
                experts: share.experts,
                output: Vec::new(),
                spent: Spent::default(),
            };
            (bank, work)
        });
        let Some((bank, mut work)) = works.next() else { return Ok(output) };
        let others: Vec<Pending<Work>> = works
            .map(|(bank, work)| bank.experts.submit(Work { output: vec![0.0; tokens * self.spec.hidden], ..work }))
            .collect();
        work.output = output;
        let work = bank.experts.run(work)?;
        *usage += work.spent;
        let mut output = work.output;
        for pending in others {
            let start = Instant::now();
            let other = pending.wait()?;
            let waited = start.elapsed();
            // Whoever waits for work that nobody has begun does it: then this was no waiting.
            let kernels = other.spent.kernels.min(waited);
            *usage += Spent { kernels, waiting: waited - kernels };
            output.iter_mut().zip(&other.output).for_each(|(o, v)| *o += v);
        }
        Ok(output)
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::activation::Activation;

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
    fn banks_are_observed_together() {
        let bank = |number, kernels, expert_bytes, ids: &[u32]| Bank {
            backend: "fake".into(),
            tier: "none".into(),
            experts: Box::new(Fake(number, kernels)),
            expert_bytes,
            ids: ids.to_vec(),
        };
        let spec = LayerSpec {
            index: 4,
            experts: 4,
            top_k: 2,
            hidden: 2,
            intermediate: 2,
            formats: [Format::Bf16; 3],
            activation: Activation::SiluMul,
            biases: false,
        };
        let hour = Duration::from_secs(3600);
        let home = |bank, local| Home { bank, local };
        let layer = LayerExperts {
            spec,
            homes: vec![home(1, 0), home(0, 0), home(0, 1), home(1, 1)],
            // The second says that it computed for longer than anybody waited for it.
            banks: vec![bank(1.0, Duration::from_millis(2), 10, &[1, 2]), bank(8.0, hour, 1000, &[0, 3])],
            pass_tokens: 8,
            team: Team::builder().threads(1).build().unwrap(),
            observed: Mutex::new(Observed { counts: vec![0; 4], ..Observed::default() }),
        };
        let experts = Experts { layers: vec![Arc::new(layer)], cache: None };
        let mut batch = Batch::new(3, vec![0.0; 6], vec![3, 0, 3, 1, 1, -1], vec![1.0; 6]).unwrap();
        experts.layers[0].forward(&mut batch).unwrap();
        assert_eq!(batch.output(), [16.0, 0.0, 9.0, 0.0, 1.0, 0.0]);
        let map = experts.heat_map();
        assert_eq!(map.layers(), [LayerHeat { layer: 4, tokens: 3, counts: vec![1, 2, 0, 2] }]);
        let usage = experts.stats().layers[0].usage;
        assert_eq!((usage.calls, usage.tokens, usage.rows, usage.weight_bytes), (1, 3, 5, 10 + 2 * 1000));
        assert!(usage.kernels >= Duration::from_millis(7) && usage.kernels + usage.waiting <= usage.wall, "{usage:?}");
    }
}
