//! What can hold and run experts: the traits that a backend crate implements.
//!
//! The runtime asks every registered backend to [`probe`](Backend::probe) each layer, picks one, and has it
//! [`load`](Backend::load) the layer's experts into an [`ExpertBank`]. At each step the scheduler hands every bank its share of
//! the batch as [`Work`]. A backend never sees files, placement or top-k arrays.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::cpu::cache::PackedCache;
use crate::cpu::input::InputLayout;
use crate::cpu::memory::HugePages;
use crate::cpu::team::Team;
use crate::error::{Error, Result, Unsupported};
use crate::format::{Format, Matrix};
use crate::layer::LayerSpec;
use crate::pending::Pending;
use crate::plan::human_bytes;
use crate::plugin::guest::HostLoad;
use crate::source::WeightSource;
use crate::work::Work;

/// How well a backend fits a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Fit {
    /// Higher is better; the runtime takes the highest and, among equals, the first registered.
    pub rank: u32,
    /// Instruction set or device that would run it, e.g. `avx512vnni`.
    pub tier: String,
    /// One line for `explain`: which kernels, packed or in place, any fallback inside.
    pub how: String,
    /// Bytes that the packed experts of the layer would take in this backend's own memory.
    pub packed_bytes: u64,
    /// Bytes of the checkpoint that would be used in place, from the map.
    pub mapped_bytes: u64,
    /// Bytes of scratch per token of a pass, of this backend's own memory; shared by all layers of a runtime.
    pub scratch_bytes_per_token: u64,
    /// How gate/up inputs and down inputs are rounded: it decides the accuracy that can be expected.
    pub inputs: [InputLayout; 2],
}

impl Fit {
    /// The same for `some` of the `all` experts that it is of.
    pub(crate) fn of_experts(self, some: usize, all: usize) -> Fit {
        let part = |bytes: u64| bytes / all.max(1) as u64 * some as u64;
        match some == all {
            true => self,
            false => Fit { packed_bytes: part(self.packed_bytes), mapped_bytes: part(self.mapped_bytes), ..self },
        }
    }

    /// Of a layer that has nothing in host memory.
    pub(crate) fn nothing() -> Fit {
        Fit {
            rank: 0,
            tier: "none".into(),
            how: "all of its experts are on devices".into(),
            packed_bytes: 0,
            mapped_bytes: 0,
            scratch_bytes_per_token: 0,
            inputs: [InputLayout::F32; 2],
        }
    }
}

/// What a backend gets from the runtime when it loads.
#[derive(Clone)]
pub struct LoadContext {
    /// The runtime's threads, for banks that compute on the CPU.
    pub team: Arc<Team>,
    /// Progress and cancellation of this load.
    pub progress: Arc<Progress>,
    /// Which pages packed weights take.
    pub huge_pages: HugePages,
    /// Packed experts on disk, for backends that map them in place of packing, and write what is not there.
    pub cache: Option<Arc<PackedCache>>,
    /// Experts of the bank will be replaced while it is used ([`ExpertBank::replace`]): each should have memory of its own.
    pub replaceable: bool,
}

/// A device whose own memory holds a backend's experts.
#[derive(Debug, Clone, PartialEq)]
pub struct Device {
    /// What it is, for people: `NVIDIA H200`.
    pub label: String,
    /// Its memory.
    pub total_bytes: u64,
    /// What of it can be had now.
    pub free_bytes: u64,
    /// How fast it reads its memory, bytes per second, where that is known.
    pub read_bytes_per_second: Option<f64>,
    /// What a call costs besides the experts' work: inputs there, outputs back, and waiting.
    pub call: Duration,
}

/// What streaming the experts of a layer takes, see [`Backend::stream`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Streaming {
    /// Bytes of the device's memory, for weights on their way.
    pub device_bytes: u64,
    /// Bytes of host memory that uploads go through.
    pub host_bytes: u64,
}

/// Where some of a bank's packed experts are in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Residence {
    /// The NUMA node they are meant for.
    pub node: usize,
    /// How many bytes.
    pub bytes: u64,
    /// Where their pages are: (node, share of them); empty where the system does not tell.
    pub nodes: Vec<(usize, f64)>,
    /// The share of them in huge pages, where the system tells.
    pub huge: Option<f64>,
    /// Why they are not bound to their node, if they had to be.
    pub unbound: Option<String>,
}

impl Residence {
    /// Whether some of it is not where it was meant to be, or was not bound there.
    pub fn is_astray(&self) -> bool {
        self.unbound.is_some() || self.nodes.iter().any(|&(node, share)| node != self.node && share > 0.01)
    }

    /// Counts `other`, meant for the same node, in.
    pub(crate) fn add(&mut self, other: &Residence) {
        let all = (self.bytes + other.bytes).max(1) as f64;
        let (a, b) = (self.bytes as f64 / all, other.bytes as f64 / all);
        self.nodes.iter_mut().for_each(|n| n.1 *= a);
        for &(node, share) in &other.nodes {
            match self.nodes.iter_mut().find(|n| n.0 == node) {
                Some(n) => n.1 += share * b,
                None => self.nodes.push((node, share * b)),
            }
        }
        self.nodes.sort_by_key(|n| n.0);
        self.huge = match (self.huge, other.huge) {
            (Some(x), Some(y)) => Some(x * a + y * b),
            (x, y) => x.or(y),
        };
        self.bytes += other.bytes;
        self.unbound = self.unbound.take().or_else(|| other.unbound.clone());
    }
}

/// Progress of a load, and the switch that cancels it.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicU64,
    total: AtomicU64,
    cancelled: AtomicBool,
    /// In a plugin: the host's side of the load.
    pub(crate) host: Option<Arc<HostLoad>>,
}

impl fmt::Display for Residence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "weights for node {}: {}", self.node, human_bytes(self.bytes))?;
        for (node, share) in &self.nodes {
            write!(f, ", {:.0} % on node {node}", share * 100.0)?;
        }
        if let Some(huge) = self.huge {
            write!(f, ", {:.0} % in huge pages", huge * 100.0)?;
        }
        match &self.unbound {
            Some(why) => write!(f, "; not bound: {why}"),
            None => Ok(()),
        }
    }
}

impl Progress {
    /// Checkpoint bytes of experts loaded so far.
    pub fn done_bytes(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Checkpoint bytes of experts to load in all; 0 before the load starts.
    pub fn total_bytes(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Asks the load to stop; it returns [`Error::Cancelled`] soon after, with nothing kept.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// For backends: adds bytes, and says whether to go on.
    ///
    /// # Errors
    /// [`Error::Cancelled`] after [`Progress::cancel`].
    pub fn advance(&self, bytes: u64) -> Result<()> {
        self.done.fetch_add(bytes, Ordering::Relaxed);
        if let Some(host) = &self.host {
            host.advance(bytes)?;
        }
        if self.cancelled.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { Ok(()) }
    }

    pub(crate) fn of_host(host: Arc<HostLoad>) -> Self {
        Progress { host: Some(host), ..Progress::default() }
    }

    pub(crate) fn start(&self, total: u64) {
        self.done.store(0, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
    }
}

/// Something that can hold and run experts. Called from any thread.
pub trait Backend: Send + Sync {
    /// Short and unique: `avx512`, `portable`.
    fn name(&self) -> &str;

    /// Could this backend hold experts of this layer, and how well? Looks at shapes and formats only; cheap.
    ///
    /// # Errors
    /// The reason it declines, for `explain`.
    fn probe(&self, layer: &LayerSpec) -> Result<Fit, Unsupported>;

    /// This backend for who has little memory: of its name, with weights used from the checkpoint's map wherever it can, even where it would
    /// be faster to pack them. The runtime turns to it for layers whose packed experts find no room, and asks it for fewer bytes
    /// ([`Fit::packed_bytes`]); no bit of any number may differ. `None` for backends that have no such choice.
    fn in_place(&self) -> Option<Arc<dyn Backend>> {
        None
    }

    /// This backend, of its name, with numbers for a token that do not depend on what else is in a call, where it has a faster way for calls of many
    /// tokens that rounds otherwise. `None` for backends that have no such choice.
    fn invariant(&self) -> Option<Arc<dyn Backend>> {
        None
    }

    /// Loads the given experts of a layer, packing them as its kernels want; expert `experts[i]` becomes local expert `i`.
    ///
    /// # Errors
    /// Bad tensors (with file and name), too little memory, cancellation.
    fn load(
        &self,
        layer: &LayerSpec,
        experts: &[u32],
        from: &dyn WeightSource,
        context: &LoadContext,
    ) -> Result<Box<dyn ExpertBank>>;

    /// The device whose memory holds this backend's experts; `None` for backends that compute in host memory. Experts come to a device
    /// by placement, or when it is the only backend asked for.
    fn device(&self) -> Option<Device> {
        None
    }

    /// What [`stream`](Backend::stream) would take for this layer.
    ///
    /// # Errors
    /// The reason why it cannot.
    fn probe_stream(&self, _layer: &LayerSpec) -> Result<Streaming, Unsupported> {
        Err(Unsupported::new(format!("{} does not stream experts", self.name())))
    }

    /// Starts work with experts of a layer that are brought from the source for this call, one behind the other, and not kept: for so many
    /// tokens that this is faster than computing where they live. Groups of `work` name experts by the layer's own numbers.
    ///
    /// As with [`ExpertBank::submit`], `weight * expert(input[token])` is added to `output[token]`.
    fn stream(&self, layer: &LayerSpec, _from: &Arc<dyn WeightSource>, _work: Work) -> Pending<Work> {
        Pending::ready(Err(match self.probe_stream(layer) {
            Err(why) => why.into(),
            Ok(_) => Error::Backend {
                backend: self.name().into(),
                layer: layer.index,
                what: "says that it streams experts, and does not".into(),
            },
        }))
    }

    /// Whether [`load`](Backend::load) would find these experts packed in the cache. For plans: only headers are looked at.
    fn is_cached(&self, _layer: &LayerSpec, _experts: &[u32], _cache: &PackedCache) -> bool {
        false
    }

    /// Could this backend multiply with one matrix of this format outside of experts ([`LinearOp`])?
    ///
    /// # Errors
    /// The reason it declines.
    fn probe_linear(&self, format: Format, _rows: usize, _cols: usize) -> Result<Fit, Unsupported> {
        Err(Unsupported::new(format!("no {format} matrices outside of experts")))
    }

    /// Packs one matrix for [`LinearOp::forward`].
    ///
    /// # Errors
    /// As [`Backend::load`].
    fn linear(&self, matrix: &Matrix, _context: &LoadContext) -> Result<Box<dyn LinearOp>> {
        Err(Unsupported::new(format!("no {} matrices outside of experts", matrix.format())).into())
    }
}

/// The experts of one layer that one backend holds. Called from any thread, one call or several at a time.
///
/// Every bank is an [`Any`]: whoever knows its type finds the bank's own interface by
/// `(bank as &dyn Any).downcast_ref()`, see [`LayerExperts::banks`](crate::LayerExperts::banks).
pub trait ExpertBank: Any + Send + Sync {
    /// Starts work and returns at once. For every row, adds `weight * expert(input[token])` to `output[token]`.
    ///
    /// The result for a token does not depend on the number of threads. The scheduler has checked all indices.
    fn submit(&self, work: Work) -> Pending<Work>;

    /// Bytes of the backend's own memory that hold the packed experts.
    fn packed_bytes(&self) -> u64;

    /// Where these bytes are, for backends that keep them in host memory.
    fn residence(&self) -> Vec<Residence> {
        Vec::new()
    }

    /// Puts expert `expert` of the layer in the place of local expert `local`. Work submitted before sees the old one, work submitted after
    /// the new one. Whoever calls it keeps the two apart: nothing is submitted while it runs.
    ///
    /// # Errors
    /// As [`Backend::load`], or this bank cannot: the old expert is then still there.
    fn replace(&self, _local: u32, _expert: u32, _from: &dyn WeightSource) -> Result<()> {
        Err(Unsupported::new("experts of this bank stay as they were loaded").into())
    }

    /// Makes room for work of up to `tokens` tokens with up to `top_k` rows each, no expert twice for a token: [`run`](ExpertBank::run)
    /// then allocates nothing for it. Banks that allocate in each call go on doing so: by default nothing is done.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    fn reserve(&self, _tokens: usize, _top_k: usize) -> Result<()> {
        Ok(())
    }

    /// [`replace`](ExpertBank::replace) in two parts: reads and packs the expert now, while work goes on, and returns what puts it in its
    /// place, for when nothing is submitted. Dropped, that changes nothing. By default it does all.
    ///
    /// # Errors
    /// As [`replace`](ExpertBank::replace), each part.
    fn replacement<'a>(&'a self, local: u32, expert: u32, from: &'a dyn WeightSource) -> Result<Replacement<'a>> {
        Ok(Box::new(move || self.replace(local, expert, from)))
    }

    /// Does the work on the calling thread and the backend's, returning when done.
    ///
    /// # Errors
    /// As [`Pending::wait`].
    fn run(&self, work: Work) -> Result<Work> {
        self.submit(work).wait()
    }
}

/// What puts an expert in its place: see [`ExpertBank::replacement`].
pub type Replacement<'a> = Box<dyn FnOnce() -> Result<()> + 'a>;

/// One matrix packed for a kernel: `y = W x`.
pub trait LinearOp: Send + Sync {
    /// Output features.
    fn rows(&self) -> usize;

    /// Input features.
    fn cols(&self) -> usize;

    /// Multiplies `x: [n, cols]` into `y: [n, rows]`, both row-major; `y` is overwritten. Lengths were checked.
    fn forward(&self, x: &[f32], y: &mut [f32]);

    /// Bytes of memory that hold the packed matrix.
    fn packed_bytes(&self) -> u64;
}
