//! `kt doctor`: what this machine offers, what keeps it from more, and how to mend that.

use kt::cpu::memory::zeroed_pages;
use kt::cpu::tier::Tier;
use kt::cpu::topology::{Node, Topology, cpu_ranges};
use kt::plan::{LimitKind, human_bytes};
use kt::{Format, LayerSpec};

use crate::limits::{Limits, Meter, READ_BYTES, cpus_of};
use crate::options::threads_text;
use crate::system::System;

/// Look at this machine: CPU, backends, memory, NUMA, GPU; each line OK, or WARN with what to do.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// Print JSON: an object with `checks` and, with --measure, `limits`.
    #[arg(long)]
    json: bool,
    /// Measure read bandwidth and multiply-add peaks too (a few seconds); and, on CPUs with AMX, from how many rows of an expert on its tiles
    /// are faster, which is kept in the user's cache directory for the other commands.
    #[arg(long)]
    measure: bool,
}

/// One line of the answer.
#[derive(Debug, Clone, PartialEq)]
struct Check {
    name: &'static str,
    text: String,
    /// What to do; its presence makes the line a WARN.
    mend: Option<String>,
}

impl Check {
    fn ok(name: &'static str, text: impl Into<String>) -> Check {
        Check { name, text: text.into(), mend: None }
    }

    fn warn(name: &'static str, text: impl Into<String>, mend: impl Into<String>) -> Check {
        Check { name, text: text.into(), mend: Some(mend.into()) }
    }
}

/// Runs the command.
pub fn run(args: DoctorArgs) -> anyhow::Result<()> {
    let system = System::here();
    let mut checks = vec![cpu(&system), tiers()];
    checks.extend(backends(kt::registry(Tier::Amx)));
    #[cfg(all(feature = "amx", target_arch = "x86_64"))]
    checks.push(crossover(&system, args.measure));
    let topology = system.topology();
    checks.push(cores(&topology));
    checks.push(numa(&topology, try_binding(&topology)));
    checks.push(memory(&system));
    checks.push(swap(&system));
    checks.push(huge_pages(&system));
    checks.push(overcommit(&system));
    checks.push(gpu(&system));
    let plugins = match cfg!(feature = "plugins") {
        true => "built in: `kt plugins DIR` lists those of a directory, --plugin PATH loads one",
        false => "not built in: this build loads no backends from shared libraries",
    };
    checks.push(Check::ok("plugins", plugins));
    let limits = match args.measure {
        true => {
            let bytes = READ_BYTES.min(system.available().bytes / 4);
            let threads = topology.default_threads();
            Some(Meter::new(threads, &cpus_of(&topology, threads), bytes, Tier::Amx)?.measure())
        }
        false => None,
    };
    if args.json {
        return say!("{:#}", to_json(&checks, limits.as_ref()));
    }
    for c in &checks {
        let state = if c.mend.is_some() { "WARN" } else { "OK" };
        say!("{state:<4} {:<11} {}", c.name, c.text)?;
        if let Some(mend) = &c.mend {
            say!("{:<16} -> {mend}", "")?;
        }
    }
    if let Some(limits) = limits {
        say!("OK   {:<11} {}", "measured", limits.summary())?;
    }
    Ok(())
}

fn to_json(checks: &[Check], limits: Option<&Limits>) -> serde_json::Value {
    let checks: Vec<_> = checks
        .iter()
        .map(|c| {
            let state = if c.mend.is_some() { "WARN" } else { "OK" };
            serde_json::json!({ "check": c.name, "state": state, "text": c.text, "mend": c.mend })
        })
        .collect();
    let mut json = serde_json::json!({ "checks": checks });
    if let Some(limits) = limits {
        json["limits"] = limits.to_json();
    }
    json
}

fn cpu(system: &System) -> Check {
    const FLAGS: [&str; 14] = [
        "avx2",
        "fma",
        "f16c",
        "avx_vnni",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512dq",
        "avx512_vnni",
        "avx512_bf16",
        "avx512vbmi",
        "amx_tile",
        "amx_int8",
        "amx_bf16",
    ];
    let model = system.cpu_model().unwrap_or_else(|| "unknown model".into());
    let flags = system.cpu_flags();
    let known: Vec<_> = FLAGS.into_iter().filter(|f| flags.contains(*f)).collect();
    let text = format!(
        "{model}, {}; {}",
        std::env::consts::ARCH,
        if known.is_empty() { "none of the features that kernels use".into() } else { known.join(" ") }
    );
    if known.contains(&"avx2") {
        Check::ok("cpu", text)
    } else {
        Check::warn(
            "cpu",
            text,
            "no AVX2: only the portable kernels run, slowly. In a virtual machine pass the host's CPU through (QEMU: -cpu host)",
        )
    }
}

fn tiers() -> Check {
    let have: Vec<_> = Tier::all_available(Tier::Amx).into_iter().map(Tier::name).collect();
    let lack: Vec<_> = Tier::ALL
        .into_iter()
        .filter(|t| !t.available())
        .map(|t| format!("{t} (lacks {})", t.missing().join(" ")))
        .collect();
    let mut text = format!("available: {}", have.join(" "));
    if !lack.is_empty() {
        text += &format!("; not: {}", lack.join(", "));
    }
    Check::ok("tiers", text)
}

/// What each compiled-in backend would use for a plain layer of some formats.
fn backends(candidates: Vec<kt::Candidate>) -> Vec<Check> {
    let describe = |candidate: kt::Candidate| {
        let backend = match candidate.backend {
            Ok(backend) => backend,
            // Nothing to mend: the runtime leaves it out, and portable runs everywhere.
            Err(why) => return Check::ok("backend", format!("{}: cannot run here: {why}", candidate.name)),
        };
        // Formats by the tier that would run them; tiers in the order of their first format.
        let mut by_tier: Vec<(String, Vec<String>)> = Vec::new();
        let mut declined = Vec::new();
        for format in kt::format::ALL {
            match backend.probe(&example_layer(format)) {
                Err(_) => declined.push(format.to_string()),
                Ok(fit) => match by_tier.iter_mut().find(|(tier, _)| *tier == fit.tier) {
                    Some((_, list)) => list.push(format.to_string()),
                    None => by_tier.push((fit.tier, vec![format.to_string()])),
                },
            }
        }
        let mut parts: Vec<_> = by_tier.iter().map(|(tier, list)| format!("{tier}: {}", list.join(" "))).collect();
        if !declined.is_empty() {
            parts.push(format!("left to others: {}", declined.join(" ")));
        }
        Check::ok("backend", format!("{}; {}", candidate.name, parts.join("; ")))
    };
    candidates.into_iter().map(describe).collect()
}

/// From how many rows on AMX tiles are used: by default, as kept, or measured and kept now.
#[cfg(all(feature = "amx", target_arch = "x86_64"))]
fn crossover(system: &System, measure: bool) -> Check {
    use crate::crossover::{file, measure as measure_and_keep, read};

    const NAME: &str = "amx rows";
    match if measure { measure_and_keep(system) } else { Ok(None) } {
        Ok(None) => {}
        Ok(Some(text)) => return Check::ok(NAME, format!("tiles are used from {text}")),
        Err(why) => {
            return Check::warn(
                NAME,
                format!("not measured and kept: {why}"),
                "free memory, or let the file be written (XDG_CACHE_HOME names another directory)",
            );
        }
    }
    let default = format!("tiles, where there are such, are used from {} rows on", kt::amx::Crossover::default());
    let Some(path) = file() else { return Check::ok(NAME, format!("{default}, the default")) };
    match read(&path, system) {
        Ok(Some(kept)) => Check::ok(NAME, format!("tiles are used from {kept} rows on, kept in {}", path.display())),
        Ok(None) => Check::ok(NAME, format!("{default}, the default: nothing was measured here")),
        Err(why) => Check::warn(
            NAME,
            format!("{why}; {default}, the default"),
            "delete the file; on a CPU with AMX, `kt doctor --measure` writes it anew",
        ),
    }
}

/// A layer like Qwen3-30B-A3B's, whose sizes every format can have.
fn example_layer(format: Format) -> LayerSpec {
    LayerSpec {
        index: 0,
        experts: 128,
        top_k: 8,
        hidden: 2048,
        intermediate: 768,
        formats: [format; 3],
        scales: [None; 3],
        activation: kt::activation::Activation::SiluMul,
        biases: false,
    }
}

fn cores(topology: &Topology) -> Check {
    let (online, allowed, cores) = (topology.online(), topology.allowed(), topology.cores());
    let mut text = format!("{} online, {} allowed ({})", online.len(), allowed.len(), cpu_ranges(allowed));
    if cores < allowed.len() {
        text += &format!(" on {cores} cores (SMT)");
    } else {
        text += ", no SMT siblings";
    }
    match topology.quota() {
        Some(q) => text += &format!(", quota of {:.2} CPUs ({})", q.cpus, q.file.display()),
        None => text += ", no quota",
    }
    text += &format!("; kt uses {}", threads_text(topology.default_threads()));
    if let Some(q) = topology.quota().filter(|q| q.cpus < allowed.len() as f64) {
        return Check::warn(
            "cores",
            text,
            format!(
                "the quota stops all threads for part of each period; raise it, or give whole CPUs instead (cpuset: {})",
                if q.cpus < 1.0 { "at least 1".into() } else { format!("{:.0}", q.cpus.floor()) }
            ),
        );
    }
    if !allowed.is_empty() && allowed.len() < online.len() {
        return Check::warn(
            "cores",
            text,
            "the process is kept to some of the CPUs (taskset, cpuset or container); widen that if it is not on purpose",
        );
    }
    if cores < allowed.len() {
        text += &format!(
            " (siblings share a core's multiply units; where they help, --threads {})",
            topology.most_threads()
        );
    }
    Check::ok("cores", text)
}

/// Whether a thread and its memory can be bound to where they belong, tried on a thread of its own.
fn try_binding(topology: &Topology) -> Result<(), String> {
    let topology = topology.clone();
    let Some(share) = topology.allot(1).into_iter().next() else { return Ok(()) };
    let attempt = move || {
        topology.bind_thread(&share.cpus)?;
        let mut pages = zeroed_pages(1 << 16, Default::default()).map_err(|e| e.to_string())?;
        topology.bind_memory(&mut pages, share.node)
    };
    std::thread::spawn(attempt).join().unwrap_or_else(|_| Err("the attempt failed".into()))
}

fn numa(topology: &Topology, binding: Result<(), String>) -> Check {
    let describe = |n: &Node| {
        let cpus = if n.cpus.is_empty() { "no CPUs".into() } else { format!("CPUs {}", cpu_ranges(&n.cpus)) };
        match n.total_bytes {
            0 => format!("node {}: {cpus}, no memory", n.index),
            total => {
                format!("node {}: {cpus}, {} ({} free)", n.index, human_bytes(total), human_bytes(n.free_bytes))
            }
        }
    };
    let mut text = topology.nodes().iter().map(describe).collect::<Vec<_>>().join("; ");
    let used = topology.allot(topology.default_threads()).len();
    for note in topology.notes().iter().filter(|n| n.starts_with("node ")) {
        text += &format!("; {note}");
    }
    if used <= 1 {
        return Check::ok("numa", text);
    }
    text += &format!("; every expert is divided over {used} nodes");
    match binding {
        Ok(()) => Check::ok("numa", text),
        Err(why) => Check::warn(
            "numa",
            format!("{text}; binding is refused: {why}"),
            "threads of each node touch its weights first, which helps only as far as they stay there; in a container, allow the calls \
             (docker: --cap-add SYS_NICE)",
        ),
    }
}

fn memory(system: &System) -> Check {
    let available = system.available();
    let Some(memory) = system.memory() else {
        return Check::warn(
            "memory",
            "/proc/meminfo cannot be read",
            "mount /proc; until then plans cannot tell what fits",
        );
    };
    let text = format!(
        "{} in all, {} available; a load may take {} ({})",
        human_bytes(memory.total_bytes),
        human_bytes(memory.available_bytes),
        human_bytes(available.bytes),
        available.from
    );
    if available.kind == LimitKind::Cgroup && available.bytes < memory.available_bytes {
        return Check::warn(
            "memory",
            text,
            "a control group allows less than the machine has; raise its limit (docker: --memory, systemd: MemoryMax=)",
        );
    }
    if available.bytes < 2 << 30 {
        return Check::warn("memory", text, "less than 2 GiB are left: close other programs");
    }
    Check::ok("memory", text)
}

fn swap(system: &System) -> Check {
    match system.memory() {
        Some(m) if m.swapped_bytes > 0 => Check::warn(
            "swap",
            format!("{} of {} in use", human_bytes(m.swapped_bytes), human_bytes(m.swap_bytes)),
            "weights that are swapped out make tokens wait for the disk: close other programs, then `swapoff -a`",
        ),
        Some(m) if m.swap_bytes > 0 => Check::ok("swap", format!("{}, none in use", human_bytes(m.swap_bytes))),
        _ => Check::ok("swap", "none"),
    }
}

fn huge_pages(system: &System) -> Check {
    let reserved = match system.reserved_huge_pages() {
        Some((all, free)) if all > 0 => {
            format!("; {all} pages of 2 MiB are reserved, {free} of them free (used with --huge-pages reserved)")
        }
        _ => String::new(),
    };
    match system.huge_pages().as_deref() {
        Some(setting @ ("always" | "madvise")) => {
            Check::ok("huge pages", format!("transparent huge pages: {setting}; packed weights ask for them{reserved}"))
        }
        Some(setting) => Check::warn(
            "huge pages",
            format!("transparent huge pages: {setting}; every 4 KiB of weights costs an address translation{reserved}"),
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        None => Check::ok("huge pages", format!("the system has no setting for transparent huge pages{reserved}")),
    }
}

fn overcommit(system: &System) -> Check {
    match system.overcommit() {
        Some(2) => Check::warn(
            "overcommit",
            "vm.overcommit_memory is 2: memory that is only reserved counts, so loads may fail before memory is used up",
            "sudo sysctl vm.overcommit_memory=0",
        ),
        Some(mode) => Check::ok("overcommit", format!("vm.overcommit_memory is {mode}")),
        None => Check::ok("overcommit", "the system has no such setting"),
    }
}

fn gpu(system: &System) -> Check {
    match system.gpu() {
        None => Check::ok("gpu", "no NVIDIA driver; none is needed for CPU backends"),
        Some(gpu) => {
            let driver = gpu.driver.as_deref().unwrap_or("driver version not visible");
            let text = format!(
                "{driver}; devices: {}",
                if gpu.devices.is_empty() { "none".into() } else { gpu.devices.join(" ") }
            );
            if gpu.devices.is_empty() {
                return Check::warn("gpu", text, "to use them, pass the devices in (docker: --gpus all)");
            }
            match cfg!(feature = "cuda") {
                true => Check::ok("gpu", text + "; experts go there by --gpu-budget or --gpu-experts"),
                false => Check::ok("gpu", text + "; not used: this build has no GPU backend (feature cuda)"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::system::tests::Tree;

    fn text(c: &Check) -> String {
        format!("{} {}", c.text, c.mend.as_deref().unwrap_or("(no mend)"))
    }

    #[test]
    fn a_container_with_limits_is_told_so() {
        let tree = Tree::new(
            "doctor-container",
            &[
                ("proc/self/cgroup", "0::/\n"),
                ("proc/self/status", "Cpus_allowed_list:\t0-3\n"),
                (
                    "proc/meminfo",
                    "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\nSwapTotal: 1024 kB\nSwapFree: 0 kB\n",
                ),
                ("sys/fs/cgroup/cgroup.controllers", "cpu memory\n"),
                ("sys/fs/cgroup/cpu.max", "150000 100000\n"),
                ("sys/fs/cgroup/memory.max", "4294967296\n"),
                ("sys/fs/cgroup/memory.current", "1073741824\n"),
                ("sys/devices/system/cpu/online", "0-3\n"),
                ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
                ("proc/sys/vm/overcommit_memory", "2\n"),
            ],
        );
        let s = tree.system();
        let cores = cores(&s.topology());
        assert!(cores.mend.is_some() && cores.text.contains("quota of 1.50 CPUs"), "{}", text(&cores));
        let memory = memory(&s);
        assert!(memory.mend.is_some() && memory.text.contains("may take 3.00 GiB"), "{}", text(&memory));
        assert!(memory.text.contains("memory.max"), "{}", text(&memory));
        assert!(swap(&s).mend.is_some() && overcommit(&s).mend.is_some());
        assert!(text(&huge_pages(&s)).contains("never") && huge_pages(&s).mend.is_some());
        assert_eq!(numa(&s.topology(), Ok(())).mend, None);
        assert_eq!(gpu(&s).mend, None);
    }

    #[test]
    fn a_plain_machine_has_nothing_to_mend() {
        let tree = Tree::new(
            "doctor-plain",
            &[
                ("proc/cpuinfo", "model name : Some CPU\nflags : avx2 fma f16c\n"),
                ("proc/self/status", "Cpus_allowed_list:\t0-1\n"),
                ("proc/meminfo", "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n"),
                ("sys/devices/system/cpu/online", "0-1\n"),
                ("sys/devices/system/node/node0/cpulist", "0-1\n"),
                ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: 33554432 kB\nNode 0 MemFree: 8 kB\n"),
                ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
            ],
        );
        let s = tree.system();
        let t = s.topology();
        for c in [cpu(&s), cores(&t), numa(&t, Ok(())), memory(&s), swap(&s), huge_pages(&s), overcommit(&s), gpu(&s)] {
            assert_eq!(c.mend, None, "{}: {}", c.name, c.text);
        }
        assert!(cpu(&s).text.contains("Some CPU") && cpu(&s).text.contains("avx2 fma f16c"));
    }

    #[test]
    fn nodes_affinity_and_old_cpus_are_warned_about() {
        let tree = Tree::new(
            "doctor-numa",
            &[
                ("proc/cpuinfo", "model name : Old CPU\nflags : sse2\n"),
                ("proc/self/status", "Cpus_allowed_list:\t0\n"),
                ("sys/devices/system/cpu/online", "0-1\n"),
                ("sys/devices/system/node/node0/cpulist", "0\n"),
                ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: 2097152 kB\nNode 0 MemFree: 1048576 kB\n"),
                ("sys/devices/system/node/node1/cpulist", "1\n"),
                ("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal: 2097152 kB\nNode 1 MemFree: 1048576 kB\n"),
                ("proc/driver/nvidia/version", "NVRM version: 570.1\nGCC\n"),
            ],
        );
        let s = tree.system();
        assert!(cpu(&s).mend.is_some());
        let t = s.topology();
        assert!(cores(&t).mend.is_some(), "{}", text(&cores(&t)));
        let one = numa(&t, Ok(()));
        assert!(one.mend.is_none() && one.text.contains("node 1: no CPUs, 2.00 GiB (1.00 GiB free)"), "{}", text(&one));
        assert!(one.text.contains("node 1: no weights there"), "{}", one.text);
        let two = Tree::new(
            "doctor-two-nodes",
            &[
                ("sys/devices/system/cpu/online", "0-1\n"),
                ("sys/devices/system/node/node0/cpulist", "0\n"),
                ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: 2097152 kB\n"),
                ("sys/devices/system/node/node1/cpulist", "1\n"),
                ("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal: 2097152 kB\n"),
            ],
        );
        let t = two.system().topology();
        let bound = numa(&t, Ok(()));
        assert!(bound.mend.is_none() && bound.text.contains("divided over 2 nodes"), "{}", text(&bound));
        let refused = numa(&t, try_binding(&t));
        assert!(
            text(&refused).contains("SYS_NICE") && refused.text.contains("not this machine's"),
            "{}",
            text(&refused)
        );
        assert!(gpu(&s).mend.is_some() && gpu(&s).text.contains("NVRM version: 570.1"));
        assert!(memory(&s).mend.is_some(), "no /proc/meminfo");
    }

    #[test]
    fn every_compiled_backend_has_a_line() {
        let names: Vec<_> = kt::registry(Tier::Amx).into_iter().map(|c| c.name).collect();
        let lines = backends(kt::registry(Tier::Amx));
        assert_eq!(lines.len(), names.len());
        for (line, name) in lines.iter().zip(&names) {
            assert!(line.mend.is_none() && line.text.starts_with(name), "{name}: {}", line.text);
        }
        let portable = lines.last().unwrap();
        assert!(portable.text.contains("Q6_K"), "{}", portable.text);
        let json = to_json(&lines, None);
        assert_eq!(json["checks"].as_array().unwrap().len(), lines.len());
        assert!(tiers().text.contains("portable"));
    }
}
