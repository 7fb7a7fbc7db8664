//! Chooses a backend for every layer, loads, and runs batches.

use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, RwLock};

use crate::backend::{Backend, Device, Fit, LinearOp, LoadContext, Progress, Streaming};
use crate::batch::nearest_multiple;
use crate::cpu::FEW_TOKENS;
use crate::cpu::cache::PackedCache;
use crate::cpu::memory::HugePages;
use crate::cpu::team::Team;
use crate::cpu::tier::Tier;
use crate::error::{Error, Result, Unsupported};
use crate::experts::{Bank, Experts, LayerExperts, LayerStream, Observed, Placed};
use crate::format::{Format, Group, Matrix};
use crate::layer::{LayerSpec, Proj};
use crate::pending::contain;
use crate::placement::{Capacity, Need, Placement, PlacementOptions, Policy, Stream, place};
use crate::plan::{
    Available, Change, DevicePlan, Extra, Kind, LayerPlan, OnDevice, Plan, Remedy, Verdict, held_memory, human_bytes,
    memory_limits,
};
use crate::source::{Reads, WeightSource};

/// A backend that a build knows, or why it cannot run here.
pub struct Candidate {
    /// The backend's name.
    pub name: String,
    /// The backend, or what this machine lacks.
    pub backend: Result<Arc<dyn Backend>, Unsupported>,
}

impl Candidate {
    /// A candidate.
    pub fn new(name: &str, backend: Result<impl Backend + 'static, Unsupported>) -> Self {
        Candidate { name: name.into(), backend: backend.map(|b| Arc::new(b) as Arc<dyn Backend>) }
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
    in_place: bool,
    batch_invariant: bool,
    memory_limit: Option<u64>,
    packed_cache: Option<PathBuf>,
    pass_tokens: Option<usize>,
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
            in_place: false,
            batch_invariant: false,
            memory_limit: None,
            packed_cache: None,
            pass_tokens: None,
        }
    }

    /// Threads to compute with, the caller's counted. Default: the physical cores that this process may use; maximum: its CPUs. No more than a CPU quota pays for.
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

    /// Uses only the backend of this name; what it cannot do is an error, never another backend. Of a device's backend that goes for the experts: matrices outside of
    /// them run on others. Where the name is a CPU's, devices still take what a placement gives them.
    pub fn backend(mut self, name: impl Into<String>) -> Self {
        self.backend = Some(name.into());
        self
    }

    /// Adds a backend of the caller's own: in place of a built-in one of its name, and preferred over the others of equal rank.
    pub fn with_backend(mut self, backend: impl Backend + 'static) -> Self {
        self.own.push(Candidate { name: backend.name().into(), backend: Ok(Arc::new(backend)) });
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

    /// Uses weights from the checkpoint's map wherever a backend can, even where it would be faster to pack them; without this, only layers
    /// that find no room when they are packed. It is a choice for blocks of IQ1, IQ2 and IQ3, which take 1.25 to 2.0 times their bytes when they are packed, and
    /// for a few tokens are multiplied several times as fast; the map's memory is shared between processes. No bit of any number depends on it.
    pub fn in_place(mut self, in_place: bool) -> Self {
        self.in_place = in_place;
        self
    }

    /// Gives a token the same numbers, bit for bit, whatever else is in a call. Without this, a backend may have a faster way for calls of many tokens
    /// that rounds otherwise: on average over the experts of a layer, amx has one from 32 rows
    /// on, and avx512 and llamafile, on tiers with VNNI, from 32 rows on for NVFP4, Q4_1, Q5_0, Q5_1, Q5_K, Q2_K, IQ1_M and IQ3_S; on AMD's Zen 5,
    /// Intel's CPUs and tier avxvnni also for Q4_0, MXFP4 of GGUF files, and INT4 with groups that are no multiple of 128; and on the latter two for all
    /// INT4 in groups, MXFP4, Q3_K, Q4_K, Q6_K and IQ1_S. [`Runtime::explain`] says so.
    pub fn batch_invariant(mut self, batch_invariant: bool) -> Self {
        self.batch_invariant = batch_invariant;
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

    /// Most tokens computed at once: a larger batch goes through a layer in passes, as large as each other. More tokens mean more scratch and fewer
    /// readings of the weights. Default: as many as give an expert 256 rows on average, which is 4096 tokens where each has 8 of 128 experts, but no
    /// fewer than 1024 and no more than 6144. Where passes may be that large, those of larger batches have up to three fourths of it, which is faster.
    pub fn pass_tokens(mut self, tokens: usize) -> Self {
        self.pass_tokens = Some(tokens);
        self
    }

    /// Builds the runtime and starts its threads.
    ///
    /// # Errors
    /// The named backend does not exist or cannot run on this machine (the error says why), a number is 0, both a team and a number of
    /// threads were given, or a plugin that was named is refused or a directory of plugins cannot be read.
    pub fn build(self) -> Result<Runtime> {
        for (what, number) in [("threads", self.threads), ("pass_tokens", self.pass_tokens)] {
            if number == Some(0) {
                return Err(Error::Invalid(format!("{what} must be at least 1, got 0")));
            }
        }
        if self.threads.is_some() && self.team.is_some() {
            return Err(Error::Invalid("give either a team or a number of threads: a team has its own".into()));
        }
        let mut candidates = self.own;
        let own: Vec<String> = candidates.iter().map(|c| c.name.clone()).collect();
        #[cfg(feature = "plugins")]
        candidates.extend(crate::plugin::candidates(&self.plugins[0], &self.plugins[1], self.max_tier)?);
        candidates.extend((self.registry)(self.max_tier).into_iter().filter(|c| !own.contains(&c.name)));
        if self.batch_invariant {
            for backend in candidates.iter_mut().filter_map(|c| c.backend.as_mut().ok()) {
                if let Some(invariant) = backend.invariant() {
                    *backend = invariant;
                }
            }
        }
        if let Some(name) = &self.backend {
            let known: Vec<_> = candidates.iter().map(|c| c.name.clone()).collect();
            // A device's backend has the experts; whatever else there is to compute, others do.
            let is_device = |c: &Candidate| c.backend.as_ref().is_ok_and(|b| b.device().is_some());
            if !candidates.iter().any(|c| c.name == *name && is_device(c)) {
                candidates.retain(|c| c.name == *name || is_device(c));
            }
            match named(&candidates, name) {
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
            only: self.backend,
            in_place: self.in_place,
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
    /// The backend that was asked for by name.
    only: Option<String>,
    in_place: bool,
    memory_limit: Option<u64>,
    packed_cache: Option<PathBuf>,
    pass_tokens: Option<usize>,
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
    /// Which experts go to devices.
    pub placement: PlacementOptions,
}

impl Devices {
    /// What each device has of layer `i`, and the share of a token's choices that are of it.
    fn of_layer(&self, i: usize, layer: &LayerSpec, policy: &Policy) -> Vec<(OnDevice, f64)> {
        let placed = &self.placement.layers()[i];
        let heat = match policy {
            Policy::Frequency(heat) => heat.layers().iter().find(|l| l.layer == layer.index),
            _ => None,
        };
        let total = heat.map_or(0, |h| h.counts.iter().sum::<u64>());
        let on = |device: usize| {
            let experts = placed.experts(device as u32 + 1);
            let share = match heat {
                Some(h) if total > 0 => {
                    experts.iter().map(|&e| h.counts[e as usize] as f64).sum::<f64>() / total as f64
                }
                _ => experts.len() as f64 / layer.experts.max(1) as f64,
            };
            let each = self.needs[i].expert_bytes[device].unwrap_or(0);
            let token_bytes = (each as f64 * layer.top_k as f64 * share).round() as u64;
            (OnDevice { device, experts: experts.len(), bytes: each * experts.len() as u64, token_bytes }, share)
        };
        (0..self.backends.len()).map(on).collect()
    }
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
struct LayerPlans {
    plans: Vec<LayerPlan>,
    planned: Planned,
}

/// What a plan is of, and does not say.
#[derive(Default)]
struct Planned {
    /// Per token of a pass, per row of a thread's tile, and per token of few: down products, which are kept, and down inputs, of a thread.
    scratch_bytes_per_token: [u64; 4],
    load_bytes_per_thread: u64,
    /// Weights are in place wherever they can be, of layers from this place among them on.
    in_place_from: usize,
    /// Without their plans.
    devices: Devices,
}

/// The candidate of a name: one that cannot run does not hide another that can.
fn named<'a>(candidates: &'a [Candidate], name: &str) -> Option<&'a Candidate> {
    let named = || candidates.iter().filter(|c| c.name == name);
    named().find(|c| c.backend.is_ok()).or_else(|| named().next())
}

/// The devices that take experts, and what they take.
#[derive(Default)]
struct Devices {
    backends: Vec<Arc<dyn Backend>>,
    plans: Vec<DevicePlan>,
    /// By device and layer.
    fits: Vec<Vec<Option<Fit>>>,
    needs: Vec<Need>,
    placement: Placement,
    /// Host memory that streaming takes.
    stream_bytes: u64,
    /// Host memory that inputs and outputs of devices take, on their way.
    transfer_bytes: u64,
}

/// Most rows of an expert, on average, in a pass: a batch of no more is one pass. Those of a longer one have three fourths of that at most, and half of these
/// at least, from where on more rows at once gain little (`BENCHMARKS.md`).
const PASS_ROWS: usize = 256;
/// Fewest and most tokens at once, if nobody says otherwise.
const PASS_TOKENS: [usize; 2] = [1024, 6144];

/// How many tokens go through layers at once, if nobody says otherwise.
fn pass_tokens(layers: &[LayerSpec]) -> usize {
    let [fewest, most] = PASS_TOKENS;
    let of = |layer: &LayerSpec| layer.experts.saturating_mul(PASS_ROWS).div_ceil(layer.top_k.max(1));
    layers.iter().map(of).max().unwrap_or(fewest).clamp(fewest, most)
}

/// Most tokens of a pass of such a layer where a batch has several, of which none may have more than `most`.
pub(crate) fn pass_of_several(layer: &LayerSpec, most: usize) -> usize {
    let rows = most.saturating_mul(layer.top_k) / layer.experts.max(1);
    if rows < PASS_ROWS { most } else { most.min((most - most / 4).max(PASS_TOKENS[0])) }
}

/// Scratch of all threads for a pass; see [`Planned::scratch_bytes_per_token`].
fn scratch_bytes([per_token, per_row, kept, made]: [u64; 4], tokens: usize, threads: usize) -> u64 {
    let few = tokens.min(FEW_TOKENS) as u64;
    // A tile has up to 256 rows; a thread has a panel of unpacked weights, of about a MiB.
    let of_threads = (per_row * tokens.min(256) as u64 + made.saturating_mul(few) + (1 << 20)) * threads as u64;
    per_token.saturating_mul(tokens as u64).saturating_add(of_threads).saturating_add(kept * few)
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
struct Choice {
    backend: Arc<dyn Backend>,
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

    fn choose(
        &self,
        what: &str,
        in_place: bool,
        probe: impl Fn(&dyn Backend) -> Result<Fit, Unsupported>,
    ) -> Result<Choice> {
        let mut best: Option<(&str, &Arc<dyn Backend>, Fit)> = None;
        let mut declined = Vec::new();
        for c in &self.candidates {
            let fit = match &c.backend {
                Ok(backend) if backend.device().is_some() => {
                    Err(Unsupported::new("a device: it takes experts by placement, and nothing else"))
                }
                Ok(backend) => probe(&**backend).map(|fit| (backend, fit)),
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
            Some((_, backend, fit)) => {
                let smaller = if in_place { backend.in_place() } else { None };
                let smaller = smaller.and_then(|b| Some((probe(&*b).ok()?, b)));
                let (fit, backend) = match smaller {
                    Some((smaller, b)) if smaller.packed_bytes < fit.packed_bytes => (smaller, b),
                    _ => (fit, backend.clone()),
                };
                Ok(Choice { backend, fit, declined })
            }
            None => {
                let reasons: Vec<_> = declined.iter().map(|(b, r)| format!("{b}: {r}")).collect();
                Err(Unsupported::new(format!("no backend for {what}; {}", reasons.join("; "))).into())
            }
        }
    }

    fn choose_for(&self, layer: &LayerSpec, in_place: bool) -> Result<Choice> {
        let what = format!("layer {} ({})", layer.index, layer.format_label());
        self.choose(&what, in_place, |b| b.probe(layer))
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
    /// As [`Runtime::plan`]; devices in the options that are not there, are named twice, or are asked for more than they have free.
    pub fn plan_with(&self, source: &dyn WeightSource, options: &LoadOptions) -> Result<Plan> {
        Ok(self.plan_beside(source, options, self.cache_of(source).as_ref())?.0)
    }

    /// Most tokens of the layers of `source` that are computed at once: [`RuntimeBuilder::pass_tokens`].
    pub fn pass_tokens(&self, source: &dyn WeightSource) -> usize {
        self.pass_tokens.unwrap_or_else(|| pass_tokens(source.layers()))
    }

    /// Of those, as many as the caller may put into a batch.
    fn most_tokens(&self, source: &dyn WeightSource, options: &LoadOptions) -> usize {
        let tokens = self.pass_tokens(source);
        options.batch_tokens.map_or(tokens, |most| most.min(tokens))
    }

    /// The packed cache for this checkpoint.
    fn cache_of(&self, source: &dyn WeightSource) -> Option<PackedCache> {
        self.packed_cache.as_ref().map(|dir| PackedCache::new(dir, source))
    }

    /// The plan, and what it is of.
    fn plan_beside(
        &self,
        source: &dyn WeightSource,
        options: &LoadOptions,
        cache: Option<&PackedCache>,
    ) -> Result<(Plan, Planned)> {
        let tokens = self.most_tokens(source, options);
        let limits = match self.memory_limit {
            Some(bytes) => vec![Available::limited(bytes)],
            None => memory_limits(),
        };
        let layers = source.layers();
        let draft = |from: usize| self.draft(source, options, cache, tokens, &limits, from);
        let (mut plan, mut planned) = draft(if self.in_place { 0 } else { layers.len() })?;
        if !self.in_place && plan.verdict() != Verdict::Fits {
            let (smallest, of) = draft(0)?;
            let verdict = smallest.verdict();
            if verdict < plan.verdict() || smallest.need_bytes() < plan.need_bytes() && verdict == Verdict::Refuse {
                // What there is room for is packed, the first layers first.
                let fits = |from| draft(from).is_ok_and(|(plan, _)| plan.verdict() == Verdict::Fits);
                let room = if verdict == Verdict::Fits { largest(layers.len(), fits) } else { None };
                let packed_need = plan.need_bytes();
                (plan, planned) = match room {
                    None => (smallest, of),
                    Some(from) => draft(from)?,
                };
                plan.notes.push(format!(
                    "for want of memory, experts from layer {} on are used in place where they can be; packed they would be faster for \
                     few tokens, and {} be needed",
                    layers[planned.in_place_from].index,
                    human_bytes(packed_need)
                ));
            }
        }
        if plan.verdict() != Verdict::Fits {
            self.offer_formats(&mut plan, source, tokens, &options.placement);
            let with = |tokens, threads| Plan {
                scratch_bytes: scratch_bytes(planned.scratch_bytes_per_token, tokens, threads),
                load_bytes: planned.load_bytes_per_thread * threads as u64,
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
        Ok((plan, planned))
    }

    /// The plan without remedies, with weights in place wherever they can be from this layer on.
    fn draft(
        &self,
        source: &dyn WeightSource,
        options: &LoadOptions,
        cache: Option<&PackedCache>,
        tokens: usize,
        limits: &[Available],
        in_place_from: usize,
    ) -> Result<(Plan, Planned)> {
        // Elsewhere packed experts are copied out of the cache, to the memory of their nodes.
        let cache = cache.filter(|_| !self.team.wants_memory_near());
        let reads = |i: usize, proj| source.reads(&source.layers()[i], proj);
        let mut layers = self.plan_layers(source.layers(), cache, reads, &options.placement, tokens, in_place_from)?;
        let mut plan = Plan {
            scratch_bytes: scratch_bytes(layers.planned.scratch_bytes_per_token, tokens, self.threads()),
            load_bytes: layers.planned.load_bytes_per_thread * self.threads() as u64,
            layers: std::mem::take(&mut layers.plans),
            placement: options.placement.policy.to_string(),
            devices: std::mem::take(&mut layers.planned.devices.plans),
            extra: options.extra.clone(),
            held_bytes: held_memory(),
            available: limits[0].clone(),
            limits: limits.to_vec(),
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
        let devices = &layers.planned.devices;
        if devices.transfer_bytes > 0 {
            let bytes = devices.transfer_bytes;
            plan.extra.push(Extra::new("inputs and outputs on their way to devices and back", Kind::Working, bytes));
        }
        if devices.stream_bytes > 0 {
            plan.extra.push(Extra::new("uploads of streamed layers", Kind::Working, devices.stream_bytes));
            plan.notes.push(format!(
                "streamed layers are read from the checkpoint each time: {} that do not stay in the page cache come from disk",
                human_bytes(source.layers().iter().map(|l| l.expert_bytes() * l.experts as u64).sum())
            ));
        }
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
        Ok((plan, layers.planned))
    }

    fn plan_layers(
        &self,
        specs: &[LayerSpec],
        cache: Option<&PackedCache>,
        // Of the layer at this place among `specs`.
        reads: impl Fn(usize, Proj) -> Reads,
        options: &PlacementOptions,
        tokens: usize,
        in_place_from: usize,
    ) -> Result<LayerPlans> {
        let devices = self.place(specs, options, tokens)?;
        let mut all = Planned { devices, in_place_from, ..Planned::default() };
        let mut plans = Vec::with_capacity(specs.len());
        for (i, layer) in specs.iter().enumerate() {
            let placed = &all.devices.placement.layers()[i];
            let experts = placed.experts(0);
            let (backend, mut fit, declined) = match self.choose_for(layer, i >= in_place_from) {
                Ok(Choice { backend, fit, declined }) => {
                    (Some(backend), fit.of_experts(experts.len(), layer.experts), declined)
                }
                // What no backend of the host could run, devices may have in whole.
                Err(_) if experts.is_empty() => (None, Fit::nothing(), Vec::new()),
                Err(e) => return Err(e),
            };
            if let (Some(name), false) = (&self.only, experts.is_empty())
                && all.devices.backends.iter().any(|b| b.name() == name)
            {
                return Err(Unsupported::new(format!(
                    "{name} was asked for, and {} of the {} experts of layer {} find no room there",
                    experts.len(),
                    layer.experts,
                    layer.index
                ))
                .into());
            }
            let on_devices = all.devices.of_layer(i, layer, &options.policy);
            let hits: f64 = on_devices.iter().map(|(_, share)| share).sum();
            // What is used in place is read, and made, as ever.
            let mut reads = Proj::ALL.map(|proj| reads(i, proj));
            let used_in_place = fit.mapped_bytes;
            if cache.zip(backend.as_ref()).is_some_and(|(cache, backend)| backend.is_cached(layer, &experts, cache)) {
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
            // Packed inputs, the call's f32 output, and sums for it; per row of a tile, two
            // tiles of 256 outputs, the sums of two rows of them, and the gathered inputs; the down products of few tokens, and what a thread has for
            // down's inputs that does an expert whole.
            let input = fit.inputs[0].bytes(1, layer.hidden) as u64;
            let [token, row, kept, made] = &mut all.scratch_bytes_per_token;
            *token = (*token).max(fit.scratch_bytes_per_token + 2 * 4 * layer.hidden as u64);
            *row = (*row).max(4 * 256 * 4 + 2 * input);
            *kept = (*kept).max((layer.top_k * layer.hidden * 4) as u64);
            *made = (*made).max(fit.inputs[1].bytes(1, layer.intermediate) as u64);
            plans.push(LayerPlan {
                index: layer.index,
                experts: layer.experts,
                format: layer.format_label(),
                stored_bytes: layer.expert_bytes() * layer.experts as u64,
                token_bytes: {
                    let each = (fit.packed_bytes + fit.mapped_bytes) / experts.len().max(1) as u64;
                    (each as f64 * layer.top_k as f64 * (1.0 - hits)).round() as u64
                },
                copied_bytes: used_in_place.min(copied * experts.len() as u64),
                bias_bytes: if layer.biases { biases * experts.len() as u64 } else { 0 },
                backend: backend.map_or("none".into(), |b| b.name().into()),
                fit,
                declined,
                on_devices: on_devices.into_iter().map(|(on, _)| on).filter(|on| on.experts > 0).collect(),
            });
        }
        Ok(LayerPlans { plans, planned: all })
    }

    /// The backend of a device, and what it says of it.
    fn device(&self, name: &str) -> Result<(Arc<dyn Backend>, Device)> {
        let known = |c: &Candidate| match &c.backend {
            Ok(b) => b.device().map(|d| format!("{} ({})", c.name, d.label)),
            Err(_) => None,
        };
        let devices: Vec<String> = self.candidates.iter().filter_map(known).collect();
        let devices = if devices.is_empty() { "none".into() } else { devices.join(", ") };
        let why = match named(&self.candidates, name).map(|c| &c.backend) {
            Some(Ok(backend)) => match backend.device() {
                Some(device) => return Ok((backend.clone(), device)),
                None => format!("backend `{name}` is no device"),
            },
            Some(Err(why)) => format!("backend `{name}` cannot run here: {why}"),
            None => format!("there is no backend `{name}`"),
        };
        Err(Unsupported::new(format!("{why}; devices that can take experts: {devices}")).into())
    }

    /// Which experts go to which device.
    fn place(&self, specs: &[LayerSpec], options: &PlacementOptions, tokens: usize) -> Result<Devices> {
        let mut named = options.devices.clone();
        if let Some(name) = self.only.as_ref().filter(|_| named.is_empty())
            && self.device(name).is_ok()
        {
            named.push((name.clone(), Capacity::bytes(u64::MAX)));
        }
        if let Policy::Frequency(heat) = &options.policy {
            heat.check(specs)?;
        }
        let mut all = Devices::default();
        let mut capacities = Vec::new();
        for (d, (name, capacity)) in named.iter().enumerate() {
            let (backend, device) = self.device(name)?;
            if named[..d].iter().any(|(other, _)| other == name) {
                return Err(Error::Invalid(format!("device `{name}` is named twice: give it one capacity")));
            }
            if capacity.bytes != u64::MAX && capacity.bytes > device.free_bytes {
                return Err(Error::Invalid(format!(
                    "{} of experts were asked for on {name} ({}), which has {} free of {}",
                    human_bytes(capacity.bytes),
                    device.label,
                    human_bytes(device.free_bytes),
                    human_bytes(device.total_bytes)
                )));
            }
            let mut declined: Vec<String> = Vec::new();
            let mut scratch = 0;
            let mut fits = Vec::with_capacity(specs.len());
            for layer in specs {
                let fit = backend.probe(layer);
                if let Err(why) = &fit {
                    let why = format!("{}: {why}", layer.format_label());
                    if !declined.contains(&why) {
                        declined.push(why);
                    }
                }
                let fit = fit.ok();
                scratch = fit
                    .as_ref()
                    .map_or(scratch, |f| scratch.max(f.scratch_bytes_per_token.saturating_mul(tokens as u64)));
                fits.push(fit);
            }
            let mut streaming = Streaming::default();
            if d == 0 && options.stream != Stream::Never {
                for layer in specs {
                    let layer = backend.probe_stream(layer)?;
                    streaming.device_bytes = streaming.device_bytes.max(layer.device_bytes);
                    streaming.host_bytes = streaming.host_bytes.max(layer.host_bytes);
                }
            }
            let widest = specs.iter().map(|layer| layer.hidden as u64).max().unwrap_or(0);
            // At most F32, there and back.
            all.transfer_bytes = all.transfer_bytes.saturating_add((2 * 4 * widest).saturating_mul(tokens as u64));
            let scratch_bytes = scratch.saturating_add(streaming.device_bytes);
            let room = capacity.bytes.min(device.free_bytes.saturating_sub(scratch_bytes));
            capacities.push(Capacity { bytes: room, ..*capacity });
            all.stream_bytes += streaming.host_bytes;
            all.plans.push(DevicePlan { backend: name.clone(), device, capacity: *capacity, scratch_bytes, declined });
            all.fits.push(fits);
            all.backends.push(backend);
        }
        let need = |(i, layer): (usize, &LayerSpec)| {
            let bytes = |fits: &Vec<Option<Fit>>| {
                fits[i].as_ref().map(|f| f.packed_bytes.div_ceil(layer.experts.max(1) as u64))
            };
            Need { layer: layer.index, experts: layer.experts, expert_bytes: all.fits.iter().map(bytes).collect() }
        };
        all.needs = specs.iter().enumerate().map(need).collect();
        all.placement = place(&options.policy, &all.needs, &capacities);
        if options.stream != Stream::Never && all.backends.is_empty() {
            return Err(Error::Invalid("layers can be streamed to devices only, and none was named".into()));
        }
        Ok(all)
    }

    /// What the experts would take in smaller formats: up to three that help, or the smallest when none does.
    fn offer_formats(&self, plan: &mut Plan, source: &dyn WeightSource, tokens: usize, placement: &PlacementOptions) {
        let mut offers: Vec<Remedy> = Vec::new();
        for format in SMALLER {
            let specs: Option<Vec<LayerSpec>> = source
                .layers()
                .iter()
                .map(|layer| {
                    let fits = Proj::ALL.iter().all(|&p| format.row_bytes(layer.shape(p).1).is_ok());
                    fits.then(|| LayerSpec { formats: [format; 3], scales: [None; 3], ..layer.clone() })
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
            let Some(layers) =
                specs.and_then(|specs| self.plan_layers(&specs, None, reads, placement, tokens, specs.len()).ok())
            else {
                continue;
            };
            let other = Plan {
                scratch_bytes: scratch_bytes(layers.planned.scratch_bytes_per_token, tokens, self.threads()),
                load_bytes: layers.planned.load_bytes_per_thread * self.threads() as u64,
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
    /// As [`Runtime::load`] and [`Runtime::plan_with`], and [`Error::Cancelled`]; experts that are to be streamed to devices or to move, which need
    /// [`Runtime::load_shared`].
    pub fn load_with(&self, source: &dyn WeightSource, options: LoadOptions) -> Result<Experts> {
        self.load_from(source, None, options)
    }

    /// As [`Runtime::load_with`], keeping the source: so experts can be moved while the model runs, and layers be streamed to a device
    /// ([`PlacementOptions`]).
    ///
    /// # Errors
    /// As [`Runtime::load_with`]; a device that cannot stream.
    pub fn load_shared(&self, source: &Arc<dyn WeightSource>, options: LoadOptions) -> Result<Experts> {
        self.load_from(&**source, Some(source), options)
    }

    fn load_from(
        &self,
        source: &dyn WeightSource,
        shared: Option<&Arc<dyn WeightSource>>,
        options: LoadOptions,
    ) -> Result<Experts> {
        let _span = tracing::info_span!("load", path = %source.path().display(), threads = self.threads()).entered();
        let cache = self.cache_of(source).map(Arc::new);
        let (pass_tokens, most_tokens) = (self.pass_tokens(source), self.most_tokens(source, &options));
        let (plan, Planned { devices, in_place_from, .. }) = self.plan_beside(source, &options, cache.as_deref())?;
        if plan.verdict() == Verdict::Refuse {
            return Err(Error::Memory(Box::new(plan)));
        }
        if !self.in_place && in_place_from < source.layers().len() {
            tracing::warn!(need_bytes = plan.need_bytes(), from = in_place_from, "experts in place for want of memory");
        }
        let wanted = &options.placement;
        if shared.is_none() && (wanted.live || wanted.stream != Stream::Never) {
            return Err(Error::Invalid(
                "experts can be moved and streamed only from a source that is kept: use `load_shared`".into(),
            ));
        }
        let stream_from = Arc::new(AtomicUsize::new(match wanted.stream {
            Stream::From(tokens) => tokens,
            Stream::Never | Stream::Measured => usize::MAX,
        }));
        let context = LoadContext {
            team: self.team.clone(),
            progress: options.progress,
            huge_pages: self.huge_pages,
            cache: cache.clone(),
            replaceable: wanted.live && !devices.backends.is_empty(),
        };
        context.progress.start(plan.layers.iter().map(|l| l.stored_bytes).sum());
        let mut layers = Vec::new();
        for (i, spec) in source.layers().iter().enumerate() {
            let _span = tracing::info_span!("load_layer", layer = spec.index).entered();
            let placed = &devices.placement.layers()[i];
            let (mut banks, mut ids) = (Vec::new(), Vec::new());
            for place in 0..=devices.backends.len() as u32 {
                let experts = placed.experts(place);
                if experts.is_empty() {
                    continue;
                }
                let (backend, fit) = match place.checked_sub(1).map(|d| d as usize) {
                    None => {
                        let choice = tracing::info_span!("placement", layer = spec.index)
                            .in_scope(|| self.choose_for(spec, i >= in_place_from))?;
                        (choice.backend, choice.fit)
                    }
                    Some(d) => match &devices.fits[d][i] {
                        Some(fit) => (devices.backends[d].clone(), fit.clone()),
                        None => continue, // nothing is placed where it does not fit
                    },
                };
                let name = backend.name().to_string();
                // What devices hold is not packed for the host, nor cached.
                let context = match place {
                    0 => context.clone(),
                    _ => LoadContext { cache: None, ..context.clone() },
                };
                let bank =
                    contain(&name, spec.index, || backend.load(spec, &experts, source, &context)).and_then(|r| r)?;
                tracing::info!(
                    layer = spec.index,
                    experts = experts.len(),
                    format = %spec.format_label(),
                    backend = %name,
                    tier = %fit.tier,
                    how = %fit.how,
                    packed_bytes = bank.packed_bytes(),
                    "experts loaded"
                );
                banks.push(Bank {
                    backend: name,
                    tier: fit.tier,
                    experts: bank,
                    expert_bytes: (fit.packed_bytes + fit.mapped_bytes) / spec.experts.max(1) as u64,
                    place,
                });
                ids.push(experts);
            }
            let stream = match (shared, devices.backends.first()) {
                (Some(source), Some(backend)) if wanted.stream != Stream::Never => Some(LayerStream {
                    backend: backend.clone(),
                    source: source.clone(),
                    expert_bytes: devices.needs[i].expert_bytes[0].unwrap_or(0),
                }),
                _ => None,
            };
            layers.push(LayerExperts {
                spec: spec.clone(),
                placed: RwLock::new(Placed::new(spec.experts, ids)),
                observed: Mutex::new(Observed::new(spec.experts, banks.len())),
                moving: Mutex::default(),
                staying: Arc::default(),
                banks,
                pass_tokens,
                team: self.team.clone(),
                previous: i.checked_sub(1).map(|before| source.layers()[before].index),
                last: i + 1 == source.layers().len(),
                stream,
                stream_from: stream_from.clone(),
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
        let layers = layers.into_iter().map(Arc::new).collect();
        let source = shared.filter(|_| wanted.live).cloned();
        let experts = Experts { layers, cache, source, needs: devices.needs, stream_from };
        for residence in experts.residence().iter().filter(|r| r.is_astray()) {
            tracing::warn!("{residence}");
        }
        if wanted.stream == Stream::Measured {
            experts.measure_streaming(most_tokens)?;
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
        let context = LoadContext {
            team: self.team.clone(),
            progress: Arc::default(),
            huge_pages: self.huge_pages,
            cache: None,
            replaceable: false,
        };
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

    fn choose_linear(&self, format: Format, rows: usize, cols: usize) -> Result<Choice> {
        let what = format!("a {format} matrix [{rows}, {cols}]");
        self.choose(&what, self.in_place, |b| b.probe_linear(format, rows, cols))
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
            let expected = nearest_multiple(x.len(), cols);
            return Err(Error::Length { what: "x [n, cols]", expected, got: x.len() });
        }
        if y.len() != n * rows {
            return Err(Error::Length { what: "y [n, rows]", expected: n * rows, got: y.len() });
        }
        contain(&self.backend, 0, || self.op.forward(x, y))
    }
}
