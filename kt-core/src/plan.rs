//! What would be loaded where, in bytes, and whether it fits: made from headers alone.
//!
//! ```text
//! experts loading        experts + files in flight and copies of them, a matrix or an expert per thread
//! caller's weights       experts + caller's weights so far + what loading them takes
//! running                experts + caller's weights + scratch + caller's working memory
//! ```
//!
//! The largest of the three is what a plan needs; pages of files count, since a model whose weights do not stay in memory runs
//! at the speed of a disk. What this process holds already is counted beside it: the system has taken it off what is available.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::backend::{Device, Fit};
use crate::cpu::topology::cgroups;
use crate::format::Format;
use crate::placement::Capacity;

/// Whether a plan can be carried out; a later one is worse.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// It fits with room to spare.
    Fits,
    /// It fits, with less than a tenth of the available memory left.
    Tight,
    /// It does not fit; `load` refuses.
    Refuse,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Verdict::Fits => "FITS",
            Verdict::Tight => "TIGHT",
            Verdict::Refuse => "REFUSE",
        })
    }
}

/// One layer of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerPlan {
    /// Index of the layer in the model.
    pub index: usize,
    /// Its routed experts.
    pub experts: usize,
    /// Formats of its projections, as a label.
    pub format: String,
    /// Bytes as stored in the checkpoint, or as they would be in the format that they are re-encoded into.
    pub stored_bytes: u64,
    /// Bytes of memory that one token reads.
    pub token_bytes: u64,
    /// Of `fit.mapped_bytes`, those that the source does not have in that form: it makes them while loading, on the heap.
    pub copied_bytes: u64,
    /// Biases, as F32 in memory.
    pub bias_bytes: u64,
    /// The backend chosen.
    pub backend: String,
    /// Its fit.
    pub fit: Fit,
    /// The backends not chosen, each with the reason.
    pub declined: Vec<(String, String)>,
    /// Its experts on devices. All other numbers are of those in host memory.
    pub on_devices: Vec<OnDevice>,
}

/// Experts of one layer on one device.
#[derive(Debug, Clone, PartialEq)]
pub struct OnDevice {
    /// Place of the device in [`Plan::devices`].
    pub device: usize,
    /// How many.
    pub experts: usize,
    /// Bytes of the device's memory.
    pub bytes: u64,
    /// Bytes of it that one token reads, by the heat map that experts were placed by, or as if all were chosen alike.
    pub token_bytes: u64,
}

/// A device in a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct DevicePlan {
    /// Its backend.
    pub backend: String,
    /// What the backend says of it.
    pub device: Device,
    /// What it may take: the number asked for.
    pub capacity: Capacity,
    /// Scratch of a layer call, and weights on their way if layers are streamed.
    pub scratch_bytes: u64,
    /// Why it takes nothing of some layers.
    pub declined: Vec<String>,
}

/// When memory that a caller announces is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Weights in memory of their own, from loading on.
    Weights,
    /// Weights used in place from a file: page cache, shared with other processes.
    InPlace,
    /// Taken after loading: activations, keys and values.
    Working,
    /// While the caller's weights are loaded, and given back before any [`Working`](Kind::Working) memory is taken.
    Loading,
}

/// Memory that a caller of [`load_with`](crate::Runtime::load_with) takes besides the experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extra {
    /// What it is for.
    pub label: String,
    /// When it is taken.
    pub kind: Kind,
    /// Its bytes.
    pub bytes: u64,
    /// Of these, what computing one token reads.
    pub token_bytes: u64,
}

impl Extra {
    /// Memory that a token does not read.
    pub fn new(label: impl Into<String>, kind: Kind, bytes: u64) -> Self {
        Extra { label: label.into(), kind, bytes, token_bytes: 0 }
    }

    /// As it is, with so many bytes read for each token.
    pub fn read_per_token(self, bytes: u64) -> Self {
        Extra { token_bytes: bytes, ..self }
    }
}

/// What could be done differently, and what the plan would come to.
#[derive(Debug, Clone, PartialEq)]
pub struct Remedy {
    /// The change.
    pub change: Change,
    /// [`Plan::need_bytes`] with it.
    pub need_bytes: u64,
    /// The verdict with it.
    pub verdict: Verdict,
}

/// A change to a plan.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Change {
    /// The experts re-encoded into this format at load ([`Requantized`](crate::quantize::Requantized)).
    ExpertsAs(Format),
    /// A caller's context cut to so many positions.
    Positions(usize),
    /// Fewer tokens per pass ([`pass_tokens`](crate::RuntimeBuilder::pass_tokens)).
    PassTokens(usize),
    /// Fewer threads, each of which has scratch.
    Threads(usize),
    /// So many more bytes, of the limit that is in the way.
    Memory(u64, Available),
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.change {
            Change::ExpertsAs(format) => write!(f, "experts re-encoded at load as {format}")?,
            Change::Positions(n) => write!(f, "a context of {n} positions")?,
            Change::PassTokens(n) => write!(f, "passes of {n} tokens")?,
            Change::Threads(n) => write!(f, "{n} thread{}", if *n == 1 { "" } else { "s" })?,
            Change::Memory(bytes, limit) => {
                let (more, total) = (human_bytes(*bytes), human_bytes(limit.total_bytes));
                return match limit.kind {
                    LimitKind::System if limit.total_bytes < self.need_bytes => {
                        write!(f, "a machine with more memory: this one has {total} in all")
                    }
                    LimitKind::System => {
                        let others = human_bytes(limit.total_bytes.saturating_sub(limit.bytes));
                        write!(f, "{more} more free memory: other programs, the system and this process hold {others}")
                    }
                    LimitKind::Cgroup => write!(f, "{} raised by {more}; it is {total} now", limit.from),
                    LimitKind::Caller => write!(f, "the limit of {total} raised by {more}"),
                };
            }
        }
        write!(f, ": {} needed, {}", human_bytes(self.need_bytes), self.verdict)
    }
}

/// What would be loaded where, in bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The expert layers.
    pub layers: Vec<LayerPlan>,
    /// Other memory that the caller announced: dense weights, KV cache.
    pub extra: Vec<Extra>,
    /// Working memory of a layer call, for all threads.
    pub scratch_bytes: u64,
    /// Most that loading a layer of experts takes besides the layer, for all threads: pages of files, and copies.
    pub load_bytes: u64,
    /// Memory that this process has resident already.
    pub held_bytes: u64,
    /// Memory that this process may still take: the lowest of `limits`.
    pub available: Available,
    /// All limits known, the lowest first.
    pub limits: Vec<Available>,
    /// Devices that take experts.
    pub devices: Vec<DevicePlan>,
    /// By which policy, when there are devices.
    pub placement: String,
    /// NUMA nodes that weights are divided over, with the bytes of packed experts on each (to within a few panels). With one node, all that
    /// is resident.
    pub nodes: Vec<(usize, u64)>,
    /// What threads, nodes and instruction sets are not used, and why.
    pub notes: Vec<String>,
    /// What would give a better verdict, where there is one; an [`ExpertsAs`](Change::ExpertsAs) that does not is the smallest there is.
    pub remedies: Vec<Remedy>,
}

impl Plan {
    /// Packed experts in memory of their own.
    pub fn packed_bytes(&self) -> u64 {
        self.layers.iter().map(|l| l.fit.packed_bytes).sum()
    }

    /// What the source makes while loading, in memory of its own: experts re-encoded or turned into rows, and biases.
    pub fn copied_bytes(&self) -> u64 {
        self.layers.iter().map(|l| l.copied_bytes + l.bias_bytes).sum()
    }

    /// Experts used in place from the checkpoint's map: page cache, shared with other processes.
    pub fn mapped_bytes(&self) -> u64 {
        self.layers.iter().map(|l| l.fit.mapped_bytes.saturating_sub(l.copied_bytes)).sum()
    }

    fn extra_bytes(&self, kind: Kind) -> u64 {
        self.extra.iter().filter(|e| e.kind == kind).fold(0, |sum, e| sum.saturating_add(e.bytes))
    }

    /// Page cache that must stay for decoding at the speed of memory: experts and the caller's weights in place.
    pub fn page_cache_bytes(&self) -> u64 {
        self.mapped_bytes().saturating_add(self.extra_bytes(Kind::InPlace))
    }

    /// Most that loading and running take at once, beside what the process holds already, once every expert was used; as
    /// resident pages, that is without the system's own tables.
    fn new_bytes(&self) -> u64 {
        let weights = self.extra_bytes(Kind::Weights).saturating_add(self.extra_bytes(Kind::InPlace));
        let running = self.scratch_bytes.saturating_add(self.extra_bytes(Kind::Working));
        let rest = weights.saturating_add(running.max(self.extra_bytes(Kind::Loading))).max(self.load_bytes);
        (self.packed_bytes() + self.copied_bytes() + self.mapped_bytes()).saturating_add(rest)
    }

    /// What this process would have resident at most: what it holds already, and all that is new.
    pub fn resident_bytes(&self) -> u64 {
        self.held_bytes.saturating_add(self.new_bytes())
    }

    /// What must be available: all that is new, and the system's tables of its pages.
    pub fn need_bytes(&self) -> u64 {
        let new = self.new_bytes();
        // 8 bytes for each page of 4 KiB; huge pages take less.
        new.saturating_add(new / 512)
    }

    /// Bytes of experts that one token reads in all layers.
    pub fn expert_token_bytes(&self) -> u64 {
        self.layers.iter().map(|l| l.token_bytes).sum()
    }

    /// Bytes that computing one token reads: experts, and what the caller announced (dense weights, keys and values).
    pub fn token_bytes(&self) -> u64 {
        self.extra.iter().fold(self.expert_token_bytes(), |sum, e| sum.saturating_add(e.token_bytes))
    }

    /// Tokens per second of one sequence when reading is all that takes time, by the host's bandwidth in bytes per second. In a layer, host
    /// and devices read at the same time, and each device's call costs what it says ([`Device::call`]); how fast it reads counts where it is
    /// known.
    pub fn tokens_per_second(&self, read_bytes_per_second: f64) -> f64 {
        let extra = self.extra.iter().fold(0u64, |sum, e| sum.saturating_add(e.token_bytes));
        let layer = |l: &LayerPlan| {
            let on_device = |on: &OnDevice| {
                let device = &self.devices[on.device].device;
                let read = device.read_bytes_per_second.map_or(0.0, |speed| on.token_bytes as f64 / speed);
                device.call.as_secs_f64() + read
            };
            let host = l.token_bytes as f64 / read_bytes_per_second;
            l.on_devices.iter().filter(|on| on.experts > 0).map(on_device).fold(host, f64::max)
        };
        let seconds = extra as f64 / read_bytes_per_second + self.layers.iter().map(layer).sum::<f64>();
        1.0 / seconds.max(1e-12)
    }

    /// Bytes of experts on a device.
    pub fn device_bytes(&self, device: usize) -> u64 {
        self.layers.iter().flat_map(|l| &l.on_devices).filter(|on| on.device == device).map(|on| on.bytes).sum()
    }

    /// Experts on a device, all layers together.
    pub fn device_experts(&self, device: usize) -> usize {
        self.layers.iter().flat_map(|l| &l.on_devices).filter(|on| on.device == device).map(|on| on.experts).sum()
    }

    /// Whether it can be carried out.
    pub fn verdict(&self) -> Verdict {
        let (need, have) = (self.need_bytes(), self.available.bytes);
        if need > have {
            Verdict::Refuse
        } else if need > have / 10 * 9 {
            Verdict::Tight
        } else {
            Verdict::Fits
        }
    }

    /// Why the verdict is what it is: which limit, and how much is missing or left.
    pub fn reason(&self) -> String {
        let (need, have) = (self.need_bytes(), self.available.bytes);
        let of = format!("{} needed, {} available ({})", human_bytes(need), human_bytes(have), self.available.from);
        match self.verdict() {
            Verdict::Refuse => format!("{of}: {} missing", human_bytes(need - have)),
            Verdict::Tight => format!("{of}: {} left, less than a tenth", human_bytes(have - need)),
            Verdict::Fits => of,
        }
    }

    /// Adds a remedy, where it gives a better verdict.
    pub fn offer(&mut self, change: Change, need_bytes: u64, verdict: Verdict) {
        if verdict < self.verdict() {
            self.remedies.push(Remedy { change, need_bytes, verdict });
        }
    }

    /// The limits that are in the way, each with what it would have to give for the plan to fit.
    pub(crate) fn offer_memory(&mut self) {
        let need = self.need_bytes();
        // What is left must be a tenth.
        let want = if self.verdict() == Verdict::Tight { need.saturating_add(need / 9 + 10) } else { need };
        for limit in self.limits.clone().into_iter().filter(|l| l.bytes < want) {
            self.remedies.push(Remedy {
                need_bytes: need,
                verdict: if want > need { Verdict::Fits } else { Verdict::Tight },
                change: Change::Memory(want - limit.bytes, limit),
            });
        }
    }

    /// The plan for other programs: all sizes in bytes.
    pub fn to_json(&self) -> serde_json::Value {
        let layers: Vec<_> = self
            .layers
            .iter()
            .map(|l| {
                serde_json::json!({
                    "layer": l.index,
                    "experts": l.experts,
                    "format": l.format,
                    "backend": l.backend,
                    "tier": l.fit.tier,
                    "how": l.fit.how,
                    "stored_bytes": l.stored_bytes,
                    "packed_bytes": l.fit.packed_bytes,
                    "copied_bytes": l.copied_bytes + l.bias_bytes,
                    "mapped_bytes": l.fit.mapped_bytes.saturating_sub(l.copied_bytes),
                    "token_bytes": l.token_bytes,
                    "on_devices": l.on_devices.iter().map(|on| serde_json::json!({
                        "backend": self.devices[on.device].backend,
                        "experts": on.experts,
                        "bytes": on.bytes,
                        "token_bytes": on.token_bytes,
                    })).collect::<Vec<_>>(),
                    "declined": l.declined.iter().map(|(b, r)| serde_json::json!({"backend": b, "reason": r})).collect::<Vec<_>>(),
                })
            })
            .collect();
        let extra: serde_json::Map<_, _> = self.extra.iter().map(|e| (e.label.clone(), e.bytes.into())).collect();
        let limit = |l: &Available| serde_json::json!({"bytes": l.bytes, "total_bytes": l.total_bytes, "from": l.from});
        let remedy = |r: &Remedy| {
            let (change, value) = match &r.change {
                Change::ExpertsAs(format) => ("experts_as", format.to_string().into()),
                Change::Positions(n) => ("positions", (*n).into()),
                Change::PassTokens(n) => ("pass_tokens", (*n).into()),
                Change::Threads(n) => ("threads", (*n).into()),
                Change::Memory(bytes, _) => ("more_memory_bytes", serde_json::Value::from(*bytes)),
            };
            serde_json::json!({
                change: value, "need_bytes": r.need_bytes, "verdict": r.verdict.to_string(), "text": r.to_string()
            })
        };
        serde_json::json!({
            "verdict": self.verdict().to_string(),
            "reason": self.reason(),
            "remedies": self.remedies.iter().map(remedy).collect::<Vec<_>>(),
            "need_bytes": self.need_bytes(),
            "resident_bytes": self.resident_bytes(),
            "held_bytes": self.held_bytes,
            "packed_bytes": self.packed_bytes(),
            "copied_bytes": self.copied_bytes(),
            "mapped_bytes": self.mapped_bytes(),
            "page_cache_bytes": self.page_cache_bytes(),
            "scratch_bytes": self.scratch_bytes,
            "load_bytes": self.load_bytes,
            "expert_token_bytes": self.expert_token_bytes(),
            "token_bytes": self.token_bytes(),
            "extra_bytes": extra,
            "available_bytes": self.available.bytes,
            "available_from": self.available.from,
            "limits": self.limits.iter().map(limit).collect::<Vec<_>>(),
            "nodes": self.nodes.iter().map(|(node, bytes)| serde_json::json!({"node": node, "bytes": bytes})).collect::<Vec<_>>(),
            "devices": self.devices.iter().enumerate().map(|(i, d)| serde_json::json!({
                "backend": d.backend,
                "label": d.device.label,
                "total_bytes": d.device.total_bytes,
                "free_bytes": d.device.free_bytes,
                "experts": self.device_experts(i),
                "bytes": self.device_bytes(i),
                "scratch_bytes": d.scratch_bytes,
                "call_s": d.device.call.as_secs_f64(),
                "declined": d.declined,
            })).collect::<Vec<_>>(),
            "placement": self.placement,
            "notes": self.notes,
            "layers": layers,
        })
    }

    /// Runs of layers that are alike, for short listings.
    pub fn runs(&self) -> Vec<(&LayerPlan, usize)> {
        let mut runs: Vec<(&LayerPlan, usize)> = Vec::new();
        for l in &self.layers {
            match runs.last_mut() {
                Some((first, n))
                    if l.index == first.index + *n && LayerPlan { index: first.index, ..l.clone() } == **first =>
                {
                    *n += 1
                }
                _ => runs.push((l, 1)),
            }
        }
        runs
    }

    /// Why each backend was or was not chosen, run of layers by run of layers.
    pub fn explain(&self) -> String {
        let mut text = String::new();
        for (l, n) in self.runs() {
            let layers =
                if n == 1 { format!("layer {}", l.index) } else { format!("layers {}-{}", l.index, l.index + n - 1) };
            text += &format!("{layers}: {} on {} ({}): {}\n", l.format, l.backend, l.fit.tier, l.fit.how);
            for (backend, reason) in &l.declined {
                text += &format!("  not {backend}: {reason}\n");
            }
        }
        for (i, d) in self.devices.iter().enumerate() {
            text += &format!(
                "on {} ({}): {} experts, {}\n",
                d.backend,
                d.device.label,
                self.device_experts(i),
                self.placement
            );
            for why in &d.declined {
                text += &format!("  not {why}\n");
            }
        }
        for note in &self.notes {
            text += &format!("note: {note}\n");
        }
        text
    }
}

/// Bytes as a reader wants them: `3.21 GiB`.
pub fn human_bytes(bytes: u64) -> String {
    let b = bytes as f64;
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.1} KiB", b / 1024.0),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", b / 1_048_576.0),
        _ => format!("{:.2} GiB", b / 1_073_741_824.0),
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<12} {:>7} {:<14} {:<22} {:>11} {:>11}",
            "layers", "experts", "format", "backend (tier)", "own memory", "page cache"
        )?;
        for (l, n) in self.runs() {
            let layers = if n == 1 { l.index.to_string() } else { format!("{}-{}", l.index, l.index + n - 1) };
            let backend = format!("{} ({})", l.backend, l.fit.tier);
            let own = (l.fit.packed_bytes + l.copied_bytes + l.bias_bytes) * n as u64;
            let mapped = l.fit.mapped_bytes.saturating_sub(l.copied_bytes) * n as u64;
            writeln!(
                f,
                "{layers:<12} {:>7} {:<14} {backend:<22} {:>11} {:>11}",
                l.experts,
                l.format,
                human_bytes(own),
                human_bytes(mapped)
            )?;
        }
        let mut line = |label: &str, bytes: u64| writeln!(f, "{label:<68} {:>11}", human_bytes(bytes));
        line("experts, packed in memory", self.packed_bytes())?;
        if self.copied_bytes() > 0 {
            line("experts, in memory as made while loading", self.copied_bytes())?;
        }
        line("experts, in place from the file (page cache)", self.mapped_bytes())?;
        line("while experts are loaded, given back after", self.load_bytes)?;
        line("scratch of a layer call", self.scratch_bytes)?;
        for extra in &self.extra {
            line(&extra.label, extra.bytes)?;
        }
        line("needed at once, with the system's tables of pages", self.need_bytes())?;
        line("of that, page cache", self.page_cache_bytes())?;
        for limit in &self.limits {
            line(&format!("available ({})", limit.from), limit.bytes)?;
        }
        line("resident in all, with what this process holds already", self.resident_bytes())?;
        if self.nodes.len() > 1 {
            for (node, bytes) in &self.nodes {
                line(&format!("of packed experts, on NUMA node {node}"), *bytes)?;
            }
        }
        for (i, d) in self.devices.iter().enumerate() {
            let name = format!("{} ({})", d.backend, d.device.label);
            let experts = format!("{} experts on {name}, {}", self.device_experts(i), self.placement);
            line(&experts, self.device_bytes(i))?;
            line(&format!("scratch and weights on their way, on {name}"), d.scratch_bytes)?;
            line(&format!("free on {name}"), d.device.free_bytes)?;
        }
        line("read per token, of experts", self.expert_token_bytes())?;
        line("read per token, in all", self.token_bytes())?;
        write!(f, "{}: {}", self.verdict(), self.reason())?;
        for (i, remedy) in self.remedies.iter().enumerate() {
            let word = match (&remedy.change, i) {
                (Change::ExpertsAs(_), _) if remedy.verdict == self.verdict() => "not enough:",
                (_, 0) => "what helps:",
                _ => "or:",
            };
            write!(f, "\n  {word} {remedy}")?;
        }
        Ok(())
    }
}

/// Memory that this process may still take, and what limits it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Available {
    /// Bytes.
    pub bytes: u64,
    /// The limit itself: RAM, or what a control group or the caller allows.
    pub total_bytes: u64,
    /// `MemAvailable`, a cgroup's path, or the caller's own limit.
    pub from: String,
    /// Who sets it.
    pub kind: LimitKind,
}

/// Who sets a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitKind {
    /// The machine.
    System,
    /// A control group, such as a container.
    Cgroup,
    /// The caller.
    Caller,
}

impl Available {
    /// A limit of the caller's own.
    pub fn limited(bytes: u64) -> Self {
        Available { bytes, total_bytes: bytes, from: "limit set by the caller".into(), kind: LimitKind::Caller }
    }
}

/// Reads what the system and the cgroups of this process leave it; unlimited where nothing can be read.
pub fn available_memory() -> Available {
    available_memory_under(Path::new("/"))
}

/// As [`available_memory`], for another root directory (a fixture, or a container's view).
pub fn available_memory_under(root: &Path) -> Available {
    memory_limits_under(root).swap_remove(0)
}

/// Every limit on the memory of this process, the lowest first; at least one.
///
/// Page cache counts as available, whoever filled it: the system gives it up before it refuses memory.
pub fn memory_limits() -> Vec<Available> {
    memory_limits_under(Path::new("/"))
}

/// As [`memory_limits`], for another root directory.
pub fn memory_limits_under(root: &Path) -> Vec<Available> {
    let read = |path: PathBuf| std::fs::read_to_string(root.join(path)).ok();
    let number = |path: PathBuf| read(path).and_then(|t| t.trim().parse::<u64>().ok());
    let mut limits = Vec::new();
    let meminfo = read("proc/meminfo".into()).unwrap_or_default();
    let ram = kib(&meminfo, "MemTotal").unwrap_or(u64::MAX);
    if let Some(bytes) = kib(&meminfo, "MemAvailable") {
        limits.push(Available { bytes, total_bytes: ram, from: "MemAvailable".into(), kind: LimitKind::System });
    }
    // A limit of any ancestor counts.
    for (dir, v2) in cgroups(root, "memory") {
        let (maxima, current, caches): (&[&str], _, _) = match v2 {
            // Above `high` the system slows the group down until it is below: as bad as the end of memory.
            true => (&["memory.max", "memory.high"], "memory.current", ["inactive_file", "active_file"]),
            false => {
                (&["memory.limit_in_bytes"], "memory.usage_in_bytes", ["total_inactive_file", "total_active_file"])
            }
        };
        for max in maxima {
            let (Some(limit), Some(used)) = (number(dir.join(max)), number(dir.join(current))) else { continue };
            // Version 1 has a number for no limit, of about 2^63.
            if limit >= ram.min(1 << 62) {
                continue;
            }
            let stat = read(dir.join("memory.stat")).unwrap_or_default();
            let cache: u64 = caches.iter().filter_map(|key| field(&stat, key)).fold(0, u64::saturating_add);
            limits.push(Available {
                bytes: limit.saturating_sub(used.saturating_sub(cache)),
                total_bytes: limit,
                from: format!("cgroup /{}", dir.join(max).display()),
                kind: LimitKind::Cgroup,
            });
        }
    }
    limits.sort_by_key(|l| l.bytes);
    if limits.is_empty() {
        let (bytes, from) = (u64::MAX, "no limit known".into());
        limits.push(Available { bytes, total_bytes: bytes, from, kind: LimitKind::System });
    }
    limits
}

/// Memory that this process has resident; 0 where the system does not say.
pub(crate) fn held_memory() -> u64 {
    std::fs::read_to_string("/proc/self/status").ok().and_then(|t| kib(&t, "VmRSS")).unwrap_or(0)
}

/// The number behind `key` or `key:` at the start of a line.
fn field(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find(|l| l.strip_prefix(key).is_some_and(|r| r.starts_with([':', ' '])))?;
    line[key.len()..].trim_start_matches(':').split_whitespace().next()?.parse().ok()
}

/// The same, given in KiB, in bytes.
fn kib(text: &str, key: &str) -> Option<u64> {
    field(text, key).map(|n| n.saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture(name: &str, files: &[(&str, &str)]) -> std::path::PathBuf {
        let root = std::env::temp_dir().join(format!("kt-plan-{name}-{}", std::process::id()));
        for (path, text) in files {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn the_lowest_limit_counts() {
        let meminfo = ("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable:     800 kB\n");
        let root = fixture("plain", &[meminfo]);
        assert_eq!(
            available_memory_under(&root),
            Available {
                bytes: 800 * 1024,
                total_bytes: 1000 * 1024,
                from: "MemAvailable".into(),
                kind: LimitKind::System
            }
        );

        let root = fixture(
            "v2",
            &[
                meminfo,
                ("proc/self/cgroup", "0::/a/b\n"),
                ("sys/fs/cgroup/a/memory.max", "300000\n"),
                ("sys/fs/cgroup/a/memory.current", "100000\n"),
                ("sys/fs/cgroup/a/memory.high", "900000\n"),
                ("sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_file 30000\nactive_file 20000\n"),
                ("sys/fs/cgroup/a/b/memory.max", "max\n"),
                ("sys/fs/cgroup/a/b/memory.current", "90000\n"),
            ],
        );
        let got = available_memory_under(&root);
        assert_eq!(got.bytes, 250000);
        assert!(got.from.contains("sys/fs/cgroup/a/memory.max"), "{}", got.from);
        assert_eq!((got.total_bytes, got.kind), (300000, LimitKind::Cgroup));
        let all: Vec<u64> = memory_limits_under(&root).iter().map(|l| l.bytes).collect();
        assert_eq!(all, [250000, 800 * 1024, 850000]);

        let root = fixture(
            "v1",
            &[
                meminfo,
                ("proc/self/cgroup", "5:cpu,memory:/x\n"),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "200000"),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", "150000"),
            ],
        );
        assert_eq!(available_memory_under(&root).bytes, 50000);
        assert_eq!(available_memory_under(Path::new("/nonexistent")).bytes, u64::MAX);
    }
}
