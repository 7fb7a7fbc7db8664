//! The CPUs and the memory that this process may use, by NUMA node, and how threads and pages are bound to them.
//!
//! Read from `/proc` and `/sys`, below a root that tests replace; with the feature `numa`, nodes, cores and binding come from hwloc.
//! What is left out, and why, is in [`Topology::notes`].

#![allow(unsafe_code)] // system calls that bind

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[cfg(feature = "numa")]
mod hwloc;

/// One NUMA node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Number in the system's words.
    pub index: usize,
    /// Its CPUs that this process may use, one of each core first; none where it has only memory, or where it may use none.
    pub cpus: Vec<usize>,
    /// Physical cores that these CPUs belong to.
    pub cores: usize,
    /// Its memory; 0 where it has none, or where this process may use none of it.
    pub total_bytes: u64,
    /// Of that, unused.
    pub free_bytes: u64,
}

/// CPU time that the control groups of this process allow.
#[derive(Debug, Clone, PartialEq)]
pub struct Quota {
    /// CPUs' worth of time.
    pub cpus: f64,
    /// The file that sets it.
    pub file: PathBuf,
}

/// A node's part of a team of threads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// The node that holds what these threads read.
    pub node: usize,
    /// How many threads.
    pub threads: usize,
    /// The CPUs they may run on, one of each core first.
    pub cpus: Vec<usize>,
}

/// How threads and pages are bound.
#[derive(Debug, Clone)]
enum Binder {
    /// By system calls.
    System,
    #[cfg(feature = "numa")]
    Hwloc(std::sync::Arc<hwlocality::Topology>),
    /// Not at all, and why.
    No(String),
}

/// CPUs and memory of this process.
#[derive(Debug, Clone)]
pub struct Topology {
    nodes: Vec<Node>,
    /// Nodes whose memory is used: position in `nodes`, and the CPUs that read it.
    used: Vec<(usize, Vec<usize>)>,
    online: Vec<usize>,
    allowed: Vec<usize>,
    quota: Option<Quota>,
    notes: Vec<String>,
    binder: Binder,
}

impl Topology {
    /// This machine, as far as this process may use it.
    pub fn detect() -> Self {
        let root = Path::new("/");
        let mut notes = Vec::new();
        let (raw, binder) = read_here(root, &mut notes);
        let mut topology = Self::of(root, raw, notes, binder);
        if topology.allowed.is_empty() {
            // No /proc, no /sys: as many CPUs as the standard library counts.
            let n = std::thread::available_parallelism().map_or(1, |n| n.get());
            topology.allowed = (0..n).collect();
            topology.nodes =
                vec![Node { index: 0, cpus: topology.allowed.clone(), cores: n, total_bytes: 0, free_bytes: 0 }];
            topology.used = vec![(0, topology.allowed.clone())];
        }
        topology
    }

    /// What files below `root` say, in the places of `/proc` and `/sys`. Nothing is bound by it.
    pub fn under(root: &Path) -> Self {
        Self::of(root, raw_nodes(root), Vec::new(), Binder::No("the topology is not this machine's".into()))
    }

    /// A topology of hwloc's notation (`pack:2 [numa] core:4 pu:2`), for tests. Nothing is bound by it.
    ///
    /// # Errors
    /// hwloc does not take the description.
    #[cfg(feature = "numa")]
    pub fn synthetic(description: &str) -> crate::Result<Self> {
        let raw = hwloc::synthetic(description)?;
        let mut topology = Self::of(
            Path::new("/nonexistent"),
            raw,
            Vec::new(),
            Binder::No("the topology is hwloc's synthetic one, not this machine's".into()),
        );
        topology.online = topology.allowed.clone();
        Ok(topology)
    }

    /// A machine with so many CPUs on each of its nodes, for tests. Nothing is bound by it.
    #[cfg(any(test, feature = "testing"))]
    pub fn fake(cpus: &[usize]) -> Self {
        let mut first = 0;
        let node = |(index, &n): (usize, &usize)| {
            first += n;
            let cores = (first - n..first).map(|cpu| vec![cpu]).collect();
            RawNode { index, cores, total_bytes: 1 << 30, free_bytes: 1 << 30, distances: Vec::new() }
        };
        let raw = cpus.iter().enumerate().map(node).collect();
        let why = "the topology is not this machine's".into();
        Self::of(Path::new("/nonexistent"), raw, Vec::new(), Binder::No(why))
    }

    fn of(root: &Path, raw: Vec<RawNode>, mut notes: Vec<String>, binder: Binder) -> Self {
        let online = text(root, "sys/devices/system/cpu/online").map(|t| cpu_list(&t)).unwrap_or_default();
        let status = text(root, "proc/thread-self/status").or_else(|| text(root, "proc/self/status"));
        let status = status.unwrap_or_default();
        let list = |key: &str| status.lines().find_map(|l| l.strip_prefix(key)).map(cpu_list);
        let everywhere: Vec<usize> = raw.iter().flat_map(|n| n.cores.iter().flatten().copied()).collect();
        let mut allowed = list("Cpus_allowed_list:").unwrap_or_else(|| match online.is_empty() {
            true => everywhere.clone(),
            false => online.clone(),
        });
        // The mask may name CPUs that do not exist.
        allowed.retain(|c| online.is_empty() || online.contains(c));
        let mems = list("Mems_allowed_list:");
        let mut nodes: Vec<Node> = raw
            .iter()
            .map(|n| {
                let cores: Vec<Vec<usize>> = n
                    .cores
                    .iter()
                    .map(|core| core.iter().copied().filter(|c| allowed.contains(c)).collect::<Vec<_>>())
                    .filter(|core| !core.is_empty())
                    .collect();
                let memory = mems.as_ref().is_none_or(|m| m.contains(&n.index));
                if !memory && n.total_bytes > 0 {
                    notes.push(format!("node {}: this process may not use its memory (cpuset)", n.index));
                }
                Node {
                    index: n.index,
                    cpus: one_of_each_first(&cores),
                    cores: cores.len(),
                    total_bytes: if memory { n.total_bytes } else { 0 },
                    free_bytes: if memory { n.free_bytes } else { 0 },
                }
            })
            .collect();
        if nodes.is_empty() {
            let cpus = allowed.clone();
            nodes.push(Node { index: 0, cores: cpus.len(), cpus, total_bytes: 0, free_bytes: 0 });
        }
        nodes.sort_by_key(|n| n.index);
        if allowed.len() < online.len() {
            let lost: Vec<usize> = online.iter().copied().filter(|c| !allowed.contains(c)).collect();
            notes.push(format!(
                "CPUs {} are not used: this thread is kept to {} (affinity or cpuset)",
                cpu_ranges(&lost),
                cpu_ranges(&allowed)
            ));
        }
        let used = used_nodes(&nodes, &raw, &mut notes);
        let quota = cpu_quota(root);
        if let Some(q) = quota.as_ref().filter(|q| q.cpus < allowed.len() as f64) {
            notes.push(format!("a quota allows {:.2} CPUs' worth of time ({})", q.cpus, q.file.display()));
        }
        Topology { nodes, used, online, allowed, quota, notes, binder }
    }

    /// All nodes that the system names, by number.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// CPUs that are switched on.
    pub fn online(&self) -> &[usize] {
        &self.online
    }

    /// CPUs that this process (its current thread) may run on.
    pub fn allowed(&self) -> &[usize] {
        &self.allowed
    }

    /// Physical cores that the allowed CPUs belong to.
    pub fn cores(&self) -> usize {
        self.nodes.iter().map(|n| n.cores).sum::<usize>()
    }

    /// The tightest CPU quota, where there is one.
    pub fn quota(&self) -> Option<&Quota> {
        self.quota.as_ref()
    }

    /// What was left out, and why.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The most threads that make sense: one per allowed CPU, and no more than the quota pays for.
    pub fn most_threads(&self) -> usize {
        let cpus: usize = self.used.iter().map(|u| u.1.len()).sum();
        self.within_quota(cpus)
    }

    /// Threads by default: one per physical core, as siblings share the units that kernels keep busy; no more than the quota pays for.
    pub fn default_threads(&self) -> usize {
        let cores = self.used.iter().map(|(at, cpus)| self.used_cores(*at, cpus)).sum::<usize>();
        self.within_quota(cores)
    }

    fn within_quota(&self, threads: usize) -> usize {
        let quota = self.quota.as_ref().map_or(usize::MAX, |q| q.cpus as usize);
        threads.min(quota).max(1)
    }

    /// Cores of a used node, those of nodes without memory that work for it counted.
    fn used_cores(&self, at: usize, cpus: &[usize]) -> usize {
        let guests = self.nodes.iter().enumerate().filter(|(i, n)| *i != at && n.cpus.iter().any(|c| cpus.contains(c)));
        self.nodes[at].cores + guests.map(|(_, n)| n.cores).sum::<usize>()
    }

    /// The same with only these nodes used.
    ///
    /// # Errors
    /// A node that does not exist, or that has no CPUs or no memory for this process; or no node at all.
    pub fn only(mut self, nodes: &[usize]) -> crate::Result<Self> {
        let invalid = |what: String| Err(crate::Error::Invalid(what));
        let mut used = Vec::new();
        for &index in nodes {
            let known: Vec<String> = self.used.iter().map(|u| self.nodes[u.0].index.to_string()).collect();
            match self.used.iter().find(|u| self.nodes[u.0].index == index) {
                Some(u) if used.contains(u) => return invalid(format!("NUMA node {index} is named twice")),
                Some(u) => used.push(u.clone()),
                None => {
                    let which = match self.nodes.iter().any(|n| n.index == index) {
                        true => "has no CPUs or no memory that this process may use",
                        false => "does not exist",
                    };
                    return invalid(format!("NUMA node {index} {which}; usable are {}", known.join(", ")));
                }
            }
        }
        if used.is_empty() {
            return invalid("the list of NUMA nodes is empty; name one at least, or give no list".into());
        }
        used.sort();
        for (at, _) in self.used.iter().filter(|u| !used.contains(u)) {
            self.notes.push(format!("node {}: not in the list of nodes to use", self.nodes[*at].index));
        }
        self.used = used;
        Ok(self)
    }

    /// Divides a number of threads among the nodes by their cores, and siblings only when all cores have a thread. Nodes that
    /// get no thread are not in the answer. More threads than CPUs are divided likewise.
    pub fn allot(&self, threads: usize) -> Vec<Share> {
        let mut shares: Vec<(Share, usize)> = self
            .used
            .iter()
            .map(|(at, cpus)| {
                let share = Share { node: self.nodes[*at].index, threads: 0, cpus: cpus.clone() };
                (share, self.used_cores(*at, cpus).max(1))
            })
            .collect();
        for _ in 0..threads.max(1) {
            // Least loaded after the thread is there, first by cores, then by CPUs, then (oversubscribed) by CPUs without a limit.
            let least = |full: &dyn Fn(&(Share, usize)) -> usize, limit: bool| {
                let room = shares.iter().enumerate().filter(|(_, s)| !limit || s.0.threads < full(s));
                room.min_by(|(_, a), (_, b)| ((a.0.threads + 1) * full(b)).cmp(&((b.0.threads + 1) * full(a))))
                    .map(|(i, _)| i)
            };
            let (cores, cpus) = (|s: &(Share, usize)| s.1, |s: &(Share, usize)| s.0.cpus.len().max(1));
            let at = least(&cores, true).or_else(|| least(&cpus, true)).or_else(|| least(&cpus, false));
            if let Some(at) = at {
                shares[at].0.threads += 1;
            }
        }
        shares.into_iter().map(|s| s.0).filter(|s| s.threads > 0).collect()
    }

    /// Which of `shares` a CPU belongs to, 0 when to none.
    pub(crate) fn share_of_cpu(shares: &[Share], cpu: usize) -> usize {
        shares.iter().position(|s| s.cpus.contains(&cpu)).unwrap_or(0)
    }

    /// Keeps the calling thread to some CPUs.
    ///
    /// # Errors
    /// Why it could not be done.
    pub fn bind_thread(&self, cpus: &[usize]) -> Result<(), String> {
        match &self.binder {
            Binder::System => system::bind_thread(cpus),
            #[cfg(feature = "numa")]
            Binder::Hwloc(topology) => hwloc::bind_thread(topology, cpus),
            Binder::No(why) => Err(why.clone()),
        }
    }

    /// Asks for the pages of `area` on a node, whoever touches them first; other nodes serve when it is full. For pages that
    /// were not touched yet.
    ///
    /// # Errors
    /// Why it could not be done.
    pub fn bind_memory(&self, area: &mut [u8], node: usize) -> Result<(), String> {
        match &self.binder {
            Binder::System => system::bind_memory(area, node),
            #[cfg(feature = "numa")]
            Binder::Hwloc(topology) => hwloc::bind_memory(topology, area, node),
            Binder::No(why) => Err(why.clone()),
        }
    }
}

/// The nodes of this machine, and how to bind to them.
fn read_here(root: &Path, notes: &mut Vec<String>) -> (Vec<RawNode>, Binder) {
    #[cfg(feature = "numa")]
    match hwloc::here() {
        Ok(read) => return read,
        Err(why) => notes.push(format!("{why}: /sys is read instead")),
    }
    let binder = match cfg!(target_os = "linux") {
        true => Binder::System,
        false => {
            notes.push("threads and memory are bound on Linux only".into());
            Binder::No("threads and memory are bound on Linux only".into())
        }
    };
    (raw_nodes(root), binder)
}

/// The CPU that the calling thread runs on now, where the system tells.
pub(crate) fn current_cpu() -> Option<usize> {
    #[cfg(target_os = "linux")]
    // SAFETY: a query without preconditions.
    return usize::try_from(unsafe { libc::sched_getcpu() }).ok();
    #[cfg(not(target_os = "linux"))]
    None
}

/// On which nodes the pages of `area` lie: (node, share of the pages that were looked at), by node. Some hundred pages are
/// looked at; those not touched yet are left out. Empty where the system does not tell.
pub fn pages_by_node(area: &[u8]) -> Vec<(usize, f64)> {
    #[cfg(target_os = "linux")]
    let nodes = system::pages(area);
    #[cfg(not(target_os = "linux"))]
    let nodes: Vec<usize> = Vec::new();
    let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
    nodes.iter().for_each(|&n| *counts.entry(n).or_default() += 1);
    counts.into_iter().map(|(n, c)| (n, c as f64 / nodes.len() as f64)).collect()
}

/// A node as the system names it.
struct RawNode {
    index: usize,
    /// CPUs of each core.
    cores: Vec<Vec<usize>>,
    total_bytes: u64,
    free_bytes: u64,
    /// Distances to the nodes in the order of their numbers; may be empty.
    distances: Vec<u64>,
}

/// Nodes with CPUs and memory, and the CPUs that work for each: its own, and those of nodes that have no memory.
fn used_nodes(nodes: &[Node], raw: &[RawNode], notes: &mut Vec<String>) -> Vec<(usize, Vec<usize>)> {
    let mut used: Vec<(usize, Vec<usize>)> = Vec::new();
    // Where the system tells of no node's memory, each has some.
    let known = raw.iter().any(|n| n.total_bytes > 0);
    for (at, n) in nodes.iter().enumerate() {
        match (n.cpus.is_empty(), n.total_bytes > 0 || !known) {
            (false, true) => used.push((at, n.cpus.clone())),
            (true, true) if nodes.len() > 1 => {
                notes.push(format!("node {}: no weights there, as it has no CPUs that this process may use", n.index))
            }
            _ => {}
        }
    }
    if used.is_empty() {
        // Only CPUs and memory apart from each other: one pool.
        return vec![(0, nodes.iter().flat_map(|n| n.cpus.iter().copied()).collect())];
    }
    for n in nodes.iter().filter(|n| known && !n.cpus.is_empty() && n.total_bytes == 0) {
        let distances = raw.iter().find(|r| r.index == n.index).map_or(&[][..], |r| &r.distances);
        let mut order: Vec<usize> = raw.iter().map(|r| r.index).collect();
        order.sort();
        let far = |index: usize| {
            let at = order.iter().position(|&i| i == index).unwrap_or(usize::MAX);
            distances.get(at).copied().unwrap_or(u64::MAX)
        };
        if let Some(nearest) = used.iter_mut().min_by_key(|u| (far(nodes[u.0].index), nodes[u.0].index)) {
            nearest.1.extend(&n.cpus);
            notes.push(format!(
                "node {}: no memory of its own; its CPUs {} work for node {}",
                n.index,
                cpu_ranges(&n.cpus),
                nodes[nearest.0].index
            ));
        }
    }
    used
}

/// One CPU of each core, then the second ones, and so on.
fn one_of_each_first(cores: &[Vec<usize>]) -> Vec<usize> {
    let most = cores.iter().map(Vec::len).max().unwrap_or(0);
    (0..most).flat_map(|i| cores.iter().filter_map(move |core| core.get(i).copied())).collect()
}

fn text(root: &Path, path: impl AsRef<Path>) -> Option<String> {
    Some(std::fs::read_to_string(root.join(path)).ok()?.trim_end().to_owned())
}

/// The nodes of `/sys/devices/system/node`, or all CPUs as one where there are none.
fn raw_nodes(root: &Path) -> Vec<RawNode> {
    let dir = "sys/devices/system/node";
    let names = std::fs::read_dir(root.join(dir)).into_iter().flatten().flatten();
    let mut nodes: Vec<RawNode> = names
        .filter_map(|e| {
            let index: usize = e.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let dir = format!("{dir}/node{index}");
            let info = text(root, format!("{dir}/meminfo")).unwrap_or_default();
            // `Node 0 MemTotal:  24684096 kB`
            let bytes = |key: &str| {
                let line = info.lines().find_map(|l| l.find(key).map(|at| &l[at + key.len()..]))?;
                line.trim_start_matches(':').trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
            };
            let cpus = text(root, format!("{dir}/cpulist")).map(|t| cpu_list(&t)).unwrap_or_default();
            let distances = text(root, format!("{dir}/distance")).unwrap_or_default();
            Some(RawNode {
                index,
                cores: cores_of(root, &cpus),
                total_bytes: bytes("MemTotal").unwrap_or(0),
                free_bytes: bytes("MemFree").unwrap_or(0),
                distances: distances.split_whitespace().filter_map(|d| d.parse().ok()).collect(),
            })
        })
        .collect();
    nodes.sort_by_key(|n| n.index);
    if nodes.is_empty() {
        let cpus = text(root, "sys/devices/system/cpu/online").map(|t| cpu_list(&t)).unwrap_or_default();
        let cores = cores_of(root, &cpus);
        nodes.push(RawNode { index: 0, cores, total_bytes: 0, free_bytes: 0, distances: Vec::new() });
    }
    nodes
}

/// CPUs by the core they belong to, cores in the order of their first CPU.
fn cores_of(root: &Path, cpus: &[usize]) -> Vec<Vec<usize>> {
    let mut cores: BTreeMap<Vec<usize>, Vec<usize>> = BTreeMap::new();
    for &cpu in cpus {
        let dir = format!("sys/devices/system/cpu/cpu{cpu}/topology");
        let list = text(root, format!("{dir}/core_cpus_list"));
        let list = list.or_else(|| text(root, format!("{dir}/thread_siblings_list")));
        let siblings = list.map(|l| cpu_list(&l)).filter(|l| !l.is_empty()).unwrap_or_else(|| vec![cpu]);
        cores.entry(siblings).or_default().push(cpu);
    }
    let mut cores: Vec<Vec<usize>> = cores.into_values().collect();
    cores.sort();
    cores
}

/// The control groups that this process is in for `controller`, innermost first, up to the root; and whether they are of
/// version 2. Paths are relative to `root`.
pub(crate) fn cgroups(root: &Path, controller: &str) -> Vec<(PathBuf, bool)> {
    let groups = text(root, "proc/self/cgroup").unwrap_or_default();
    let mut dirs = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
        let v2 = controllers.is_empty();
        if !v2 && !controllers.split(',').any(|c| c == controller) {
            continue;
        }
        let mounts = if v2 { vec!["unified", ""] } else { vec![controllers, controller] };
        let mounts = mounts.iter().map(|m| PathBuf::from("sys/fs/cgroup").join(m));
        let Some(mount) = mounts.into_iter().find(|m| root.join(m).is_dir()) else { continue };
        let mut dir = mount.join(path.trim_start_matches('/'));
        // In a container the path may be the host's, which is not visible here; the mount's own root is.
        while dir != mount {
            dirs.push((dir.clone(), v2));
            if !dir.pop() {
                break;
            }
        }
        dirs.push((mount, v2));
    }
    dirs
}

/// The tightest CPU quota, where there is one.
fn cpu_quota(root: &Path) -> Option<Quota> {
    let quotas = cgroups(root, "cpu").into_iter().filter_map(|(dir, v2)| {
        let file = dir.join(if v2 { "cpu.max" } else { "cpu.cfs_quota_us" });
        let setting = text(root, &file)?;
        let (quota, period) = match setting.split_once(' ') {
            Some((quota, period)) => (quota.to_owned(), period.to_owned()),
            None => (setting, text(root, dir.join("cpu.cfs_period_us"))?),
        };
        // `max` and -1 stand for no limit.
        let (quota, period): (f64, f64) = (quota.parse().ok()?, period.parse().ok()?);
        (quota > 0.0 && period > 0.0).then(|| Quota { cpus: quota / period, file: Path::new("/").join(file) })
    });
    quotas.min_by(|a, b| a.cpus.total_cmp(&b.cpus))
}

/// `0-3,8` as numbers. Ranges beyond any machine are dropped.
pub fn cpu_list(text: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (last < 1 << 16).then_some(first..=last)
    };
    text.trim().split(',').filter_map(range).flatten().collect()
}

/// Numbers as `0-3,8`, whatever their order.
pub fn cpu_ranges(cpus: &[usize]) -> String {
    let mut cpus = cpus.to_vec();
    cpus.sort();
    let mut parts: Vec<String> = Vec::new();
    let mut at = 0;
    while at < cpus.len() {
        let first = at;
        while at + 1 < cpus.len() && cpus[at + 1] == cpus[at] + 1 {
            at += 1;
        }
        let (a, b) = (cpus[first], cpus[at]);
        parts.push(if a == b { a.to_string() } else { format!("{a}-{b}") });
        at += 1;
    }
    parts.join(",")
}

#[cfg(target_os = "linux")]
mod system {
    use std::io::Error;

    /// A bit mask of numbers, in longs.
    fn mask(numbers: &[usize]) -> Vec<libc::c_ulong> {
        const BITS: usize = libc::c_ulong::BITS as usize;
        let mut mask = vec![0; numbers.iter().max().map_or(1, |m| m / BITS + 1)];
        numbers.iter().for_each(|n| mask[n / BITS] |= 1 << (n % BITS));
        mask
    }

    pub fn bind_thread(cpus: &[usize]) -> Result<(), String> {
        let mask = mask(cpus);
        // SAFETY: the kernel reads as many bytes as it is told from a live buffer of that length; 0 is the calling thread.
        let answer = unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, size_of_val(&mask[..]), mask.as_ptr()) };
        match answer {
            -1 => Err(format!("sched_setaffinity to CPUs {}: {}", super::cpu_ranges(cpus), Error::last_os_error())),
            _ => Ok(()),
        }
    }

    fn page_bytes() -> usize {
        // SAFETY: a query without preconditions.
        let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(bytes).ok().filter(|b| b.is_power_of_two()).unwrap_or(4096)
    }

    pub fn bind_memory(area: &mut [u8], node: usize) -> Result<(), String> {
        /// `MPOL_PREFERRED` of `linux/mempolicy.h`: other nodes serve when this one is full, where `MPOL_BIND` would have the process killed.
        const PREFERRED: libc::c_int = 1;
        let mask = mask(&[node]);
        let page = page_bytes();
        let start = (area.as_mut_ptr() as usize).next_multiple_of(page);
        let end = (area.as_ptr() as usize + area.len()) / page * page;
        if start >= end {
            return Ok(());
        }
        // SAFETY: whole pages within a live, exclusively borrowed area; a policy changes where they are, not what they hold. The mask
        // is as long as the kernel is told (which it counts with one bit more).
        let answer = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                start,
                end - start,
                PREFERRED,
                mask.as_ptr(),
                size_of_val(&mask[..]) * 8 + 1,
                0,
            )
        };
        match answer {
            -1 => Err(format!("mbind to node {node}: {}", Error::last_os_error())),
            _ => Ok(()),
        }
    }

    /// Nodes of some hundred pages, evenly spread.
    pub fn pages(area: &[u8]) -> Vec<usize> {
        const SAMPLES: usize = 512;
        let page = page_bytes();
        let first = area.as_ptr() as usize / page * page;
        let pages = area.len() / page;
        let samples = pages.min(SAMPLES);
        let addresses: Vec<usize> = (0..samples).map(|i| first + i * pages / samples * page).collect();
        let mut status = vec![-1 as libc::c_int; samples];
        // SAFETY: with no nodes given, the kernel only writes the state of `samples` pages to a buffer of that many numbers; the addresses
        // are not dereferenced.
        let answer = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                0,
                samples,
                addresses.as_ptr(),
                std::ptr::null::<libc::c_int>(),
                status.as_mut_ptr(),
                0,
            )
        };
        if answer < 0 { Vec::new() } else { status.into_iter().filter_map(|s| usize::try_from(s).ok()).collect() }
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    pub fn bind_thread(_cpus: &[usize]) -> Result<(), String> {
        Err("threads are bound on Linux only".into())
    }

    pub fn bind_memory(_area: &mut [u8], _node: usize) -> Result<(), String> {
        Err("memory is bound on Linux only".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of files in a directory of its own, gone when dropped.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str, files: &[(&str, &str)]) -> Tree {
            let root = std::env::temp_dir().join(format!("kt-topology-{}-{name}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
            Tree(root)
        }

        fn topology(&self) -> Topology {
            Topology::under(&self.0)
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn cpu_lists() {
        assert_eq!(cpu_list("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(cpu_list(""), [0usize; 0]);
        assert_eq!(cpu_list("0-99999999999,x,7"), [7]);
        assert_eq!(cpu_ranges(&[10, 0, 1, 2, 3, 8, 11]), "0-3,8,10-11");
        assert_eq!(cpu_ranges(&[]), "");
    }

    #[test]
    fn cores_come_before_siblings_and_a_cpuset_cuts_a_node() {
        let tree = Tree::new(
            "smt",
            &[
                ("proc/self/status", "Name:\tkt\nCpus_allowed_list:\t0-1,4-127\nMems_allowed_list:\t0-1\n"),
                ("sys/devices/system/cpu/online", "0-7\n"),
                ("sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0-1\n"),
                ("sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "0-1\n"),
                ("sys/devices/system/cpu/cpu2/topology/core_cpus_list", "2-3\n"),
                ("sys/devices/system/cpu/cpu3/topology/core_cpus_list", "2-3\n"),
                ("sys/devices/system/cpu/cpu4/topology/core_cpus_list", "4,6\n"),
                ("sys/devices/system/cpu/cpu6/topology/core_cpus_list", "4,6\n"),
                ("sys/devices/system/cpu/cpu5/topology/core_cpus_list", "5,7\n"),
                ("sys/devices/system/cpu/cpu7/topology/core_cpus_list", "5,7\n"),
                ("sys/devices/system/node/node0/cpulist", "0-3\n"),
                ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:   2048 kB\nNode 0 MemFree:  1024 kB\n"),
                ("sys/devices/system/node/node1/cpulist", "4-7\n"),
                ("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal:   4096 kB\nNode 1 MemFree:  8 kB\n"),
            ],
        );
        let t = tree.topology();
        let node0 = Node { index: 0, cpus: vec![0, 1], cores: 1, total_bytes: 2 << 20, free_bytes: 1 << 20 };
        let node1 = Node { index: 1, cpus: vec![4, 5, 6, 7], cores: 2, total_bytes: 4 << 20, free_bytes: 8 << 10 };
        assert_eq!(t.nodes(), [node0, node1]);
        assert_eq!((t.online().len(), t.allowed(), t.cores()), (8, &[0, 1, 4, 5, 6, 7][..], 3));
        assert_eq!((t.default_threads(), t.most_threads()), (3, 6));
        assert!(t.notes().iter().any(|n| n.starts_with("CPUs 2-3 are not used")), "{:?}", t.notes());
        let threads = |n: usize| t.allot(n).iter().map(|s| (s.node, s.threads)).collect::<Vec<_>>();
        assert_eq!(threads(1), [(1, 1)]);
        assert_eq!(threads(3), [(0, 1), (1, 2)]);
        assert_eq!(threads(5), [(0, 2), (1, 3)]);
        assert_eq!(threads(6), [(0, 2), (1, 4)]);
        assert_eq!(threads(12), [(0, 4), (1, 8)]);
        assert_eq!(t.allot(3)[1].cpus, [4, 5, 6, 7]);
        assert!(t.bind_thread(&[0]).unwrap_err().contains("not this machine's"));

        let only = t.clone().only(&[1]).unwrap();
        assert_eq!((only.default_threads(), only.most_threads()), (2, 4));
        assert!(only.notes().iter().any(|n| n.contains("node 0: not in the list")), "{:?}", only.notes());
        for (nodes, want) in [(&[2][..], "does not exist"), (&[], "empty"), (&[0, 0], "twice")] {
            let error = t.clone().only(nodes).unwrap_err().to_string();
            assert!(error.contains(want), "{error}");
        }
    }

    #[test]
    fn nodes_without_memory_or_without_cpus() {
        let tree = Tree::new(
            "lopsided",
            &[
                ("proc/self/status", "Cpus_allowed_list:\t0-5\n"),
                ("sys/devices/system/cpu/online", "0-5\n"),
                ("sys/devices/system/node/node0/cpulist", "0-1\n"),
                ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: 2048 kB\n"),
                ("sys/devices/system/node/node1/cpulist", "2-3\n"),
                ("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal: 0 kB\n"),
                ("sys/devices/system/node/node1/distance", "32 10 16 40\n"),
                ("sys/devices/system/node/node2/cpulist", "4-5\n"),
                ("sys/devices/system/node/node2/meminfo", "Node 2 MemTotal: 2048 kB\n"),
                ("sys/devices/system/node/node3/cpulist", "\n"),
                ("sys/devices/system/node/node3/meminfo", "Node 3 MemTotal: 8192 kB\n"),
            ],
        );
        let t = tree.topology();
        assert_eq!((t.nodes().len(), t.cores(), t.default_threads()), (4, 6, 6));
        let shares = t.allot(6);
        assert_eq!(shares.iter().map(|s| (s.node, s.threads)).collect::<Vec<_>>(), [(0, 2), (2, 4)]);
        assert_eq!(shares[1].cpus, [4, 5, 2, 3]);
        assert_eq!((Topology::share_of_cpu(&shares, 3), Topology::share_of_cpu(&shares, 99)), (1, 0));
        let notes = t.notes().join("\n");
        assert!(notes.contains("node 1: no memory of its own; its CPUs 2-3 work for node 2"), "{notes}");
        assert!(notes.contains("node 3: no weights there"), "{notes}");
        assert!(t.clone().only(&[3]).unwrap_err().to_string().contains("usable are 0, 2"));
    }

    #[test]
    fn the_tightest_cpu_quota_on_the_way_up_counts() {
        let tree = Tree::new(
            "quota-v2",
            &[
                ("proc/self/cgroup", "0::/pod/app\n"),
                ("sys/devices/system/cpu/online", "0-3\n"),
                ("sys/fs/cgroup/cgroup.controllers", "cpu memory\n"),
                ("sys/fs/cgroup/pod/cpu.max", "250000 100000\n"),
                ("sys/fs/cgroup/pod/app/cpu.max", "max 100000\n"),
            ],
        );
        let t = tree.topology();
        assert_eq!(t.quota(), Some(&Quota { cpus: 2.5, file: "/sys/fs/cgroup/pod/cpu.max".into() }));
        assert_eq!((t.default_threads(), t.most_threads()), (2, 2));
        assert!(t.notes().iter().any(|n| n.contains("2.50 CPUs' worth")), "{:?}", t.notes());
    }

    #[test]
    fn cpu_quotas_of_version_1_and_their_absence() {
        let tree = Tree::new(
            "quota-v1",
            &[
                // The path is the host's and does not exist here.
                ("proc/self/cgroup", "4:cpu,cpuacct:/docker/abc\n0::/\n"),
                ("sys/devices/system/cpu/online", "0-3\n"),
                ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "50000\n"),
                ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
            ],
        );
        assert_eq!((tree.topology().quota().unwrap().cpus, tree.topology().most_threads()), (0.5, 1));
        let none = Tree::new(
            "quota-none",
            &[
                ("proc/self/cgroup", "4:cpu:/\n"),
                ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"),
                ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
            ],
        );
        assert_eq!(none.topology().quota(), None);
    }

    #[test]
    fn an_empty_tree_is_one_thread() {
        let tree = Tree::new("empty", &[("keep", "")]);
        let t = tree.topology();
        assert!(t.online().is_empty() && t.allowed().is_empty() && t.quota().is_none());
        assert_eq!((t.default_threads(), t.most_threads()), (1, 1));
        assert_eq!(t.allot(4).iter().map(|s| s.threads).sum::<usize>(), 4);
    }

    #[test]
    fn this_machine_has_cpus_and_a_thread_can_be_bound_to_one() {
        let t = Topology::detect();
        assert!(t.default_threads() >= 1 && t.most_threads() >= t.default_threads(), "{t:?}");
        let shares = t.allot(t.default_threads());
        assert_eq!(shares.iter().map(|s| s.threads).sum::<usize>(), t.default_threads());
        #[cfg(target_os = "linux")]
        {
            let cpu = t.allowed()[0];
            std::thread::spawn(move || {
                t.bind_thread(&[cpu]).unwrap();
                assert_eq!(current_cpu(), Some(cpu));
                assert_eq!(Topology::detect().allowed(), [cpu]);
                assert!(t.bind_thread(&[4000]).is_err());
            })
            .join()
            .unwrap();
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn memory_is_bound_where_the_system_lets_it() {
        let t = Topology::detect();
        let node = t.nodes()[0].index;
        let mut map = crate::cpu::memory::zeroed_pages(8 << 20, Default::default()).unwrap();
        match t.bind_memory(&mut map, node) {
            Ok(()) => {
                map.fill(1);
                let nodes = pages_by_node(&map);
                // Where the system does not tell, nothing is known; the node may be full.
                assert!(nodes.is_empty() || nodes[0].1 > 0.0, "{nodes:?}");
            }
            Err(why) => eprintln!("skipped: this system does not bind memory: {why}"),
        }
        assert!(t.bind_memory(&mut map, 900).is_err());
    }
}
