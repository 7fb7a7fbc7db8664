//! What Linux says of the machine and of this process's share of it, read from `/proc` and `/sys` under a root that tests replace.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use kt::plan::{Available, available_memory_under};

/// The files of `/proc` and `/sys`, below `root`.
pub struct System {
    root: PathBuf,
}

/// One NUMA node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Number in the system's words.
    pub index: usize,
    /// Its CPUs; a node may have none.
    pub cpus: Vec<usize>,
    /// Its memory; a node may have none.
    pub total_bytes: u64,
    /// Of that, unused.
    pub free_bytes: u64,
}

/// `/proc/meminfo`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// RAM.
    pub total_bytes: u64,
    /// What can be had without swapping.
    pub available_bytes: u64,
    /// Swap space.
    pub swap_bytes: u64,
    /// Of that, in use.
    pub swapped_bytes: u64,
}

/// CPU time that the control groups of this process allow.
#[derive(Debug, Clone, PartialEq)]
pub struct CpuQuota {
    /// CPUs' worth of time.
    pub cpus: f64,
    /// The file that sets it.
    pub file: PathBuf,
}

/// An NVIDIA driver and its devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// First line of the driver's version file, where the driver is loaded.
    pub driver: Option<String>,
    /// `nvidia0`, … in `/dev`.
    pub devices: Vec<String>,
}

impl System {
    /// This machine.
    pub fn here() -> Self {
        System::at("/")
    }

    /// A tree of files that looks like one.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        System { root: root.into() }
    }

    fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        Some(std::fs::read_to_string(self.root.join(path)).ok()?.trim_end().to_owned())
    }

    /// Names in a directory, sorted; none when there is no such directory.
    fn names(&self, path: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.root.join(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// A line `key : value` of `/proc/cpuinfo`, of its first CPU.
    fn cpuinfo(&self, key: &str) -> Option<String> {
        let text = self.text("proc/cpuinfo")?;
        text.lines().filter_map(|l| l.split_once(':')).find(|(k, _)| k.trim() == key).map(|(_, v)| v.trim().to_owned())
    }

    /// `AMD EPYC 9654 96-Core Processor`.
    pub fn cpu_model(&self) -> Option<String> {
        self.cpuinfo("model name")
    }

    /// Flags of the CPU in the kernel's words (`avx512_vnni`).
    pub fn cpu_flags(&self) -> BTreeSet<String> {
        self.cpuinfo("flags").unwrap_or_default().split_whitespace().map(str::to_owned).collect()
    }

    /// CPUs that are switched on.
    pub fn online_cpus(&self) -> Vec<usize> {
        self.text("sys/devices/system/cpu/online").map(|t| cpu_list(&t)).unwrap_or_default()
    }

    /// CPUs that this process may run on.
    pub fn allowed_cpus(&self) -> Vec<usize> {
        let status = self.text("proc/self/status").unwrap_or_default();
        let list = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).map(cpu_list);
        let online = self.online_cpus();
        match list {
            // The mask may name CPUs that do not exist.
            Some(mut list) => {
                list.retain(|c| online.is_empty() || online.contains(c));
                list
            }
            None => online,
        }
    }

    /// How many physical cores the given CPUs belong to.
    pub fn cores(&self, cpus: &[usize]) -> usize {
        let siblings = |cpu: &usize| {
            let dir = format!("sys/devices/system/cpu/cpu{cpu}/topology");
            let list =
                self.text(format!("{dir}/core_cpus_list")).or_else(|| self.text(format!("{dir}/thread_siblings_list")));
            list.unwrap_or_else(|| cpu.to_string())
        };
        cpus.iter().map(siblings).collect::<BTreeSet<_>>().len()
    }

    /// The control groups that this process is in for `controller`, innermost first, up to the root; and whether they
    /// are of version 2.
    fn cgroups(&self, controller: &str) -> Vec<(PathBuf, bool)> {
        let groups = self.text("proc/self/cgroup").unwrap_or_default();
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
            let Some(mount) = mounts.into_iter().find(|m| self.root.join(m).is_dir()) else { continue };
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
    pub fn cpu_quota(&self) -> Option<CpuQuota> {
        let quotas = self.cgroups("cpu").into_iter().filter_map(|(dir, v2)| {
            let file = dir.join(if v2 { "cpu.max" } else { "cpu.cfs_quota_us" });
            let text = self.text(&file)?;
            let (quota, period) = match text.split_once(' ') {
                Some((quota, period)) => (quota.to_owned(), period.to_owned()),
                None => (text, self.text(dir.join("cpu.cfs_period_us"))?),
            };
            // `max` and -1 stand for no limit.
            let (quota, period): (f64, f64) = (quota.parse().ok()?, period.parse().ok()?);
            (quota > 0.0 && period > 0.0).then(|| CpuQuota { cpus: quota / period, file: Path::new("/").join(file) })
        });
        quotas.min_by(|a, b| a.cpus.total_cmp(&b.cpus))
    }

    /// Memory that a load may take: what the system and the control groups leave.
    pub fn available(&self) -> Available {
        available_memory_under(&self.root)
    }

    /// RAM and swap.
    pub fn memory(&self) -> Option<Memory> {
        let text = self.text("proc/meminfo")?;
        let bytes = |key: &str| meminfo_bytes(&text, key);
        let swap_bytes = bytes("SwapTotal").unwrap_or(0);
        Some(Memory {
            total_bytes: bytes("MemTotal")?,
            available_bytes: bytes("MemAvailable")?,
            swap_bytes,
            swapped_bytes: swap_bytes.saturating_sub(bytes("SwapFree").unwrap_or(0)),
        })
    }

    /// NUMA nodes, by number.
    pub fn nodes(&self) -> Vec<Node> {
        let names = self.names("sys/devices/system/node");
        let mut nodes: Vec<Node> = names
            .iter()
            .filter_map(|name| {
                let index = name.strip_prefix("node")?.parse().ok()?;
                let dir = format!("sys/devices/system/node/{name}");
                let info = self.text(format!("{dir}/meminfo")).unwrap_or_default();
                // `Node 0 MemTotal:  24684096 kB`
                let bytes = |key: &str| {
                    let line = info.lines().find_map(|l| l.find(key).map(|at| &l[at..]))?;
                    meminfo_bytes(line, key)
                };
                Some(Node {
                    index,
                    cpus: self.text(format!("{dir}/cpulist")).map(|t| cpu_list(&t)).unwrap_or_default(),
                    total_bytes: bytes("MemTotal").unwrap_or(0),
                    free_bytes: bytes("MemFree").unwrap_or(0),
                })
            })
            .collect();
        nodes.sort_by_key(|n| n.index);
        nodes
    }

    /// Setting of transparent huge pages: `always`, `madvise` or `never`.
    pub fn huge_pages(&self) -> Option<String> {
        let text = self.text("sys/kernel/mm/transparent_hugepage/enabled")?;
        let (_, rest) = text.split_once('[')?;
        Some(rest.split_once(']')?.0.to_owned())
    }

    /// `vm.overcommit_memory`: 0 heuristic, 1 always, 2 never.
    pub fn overcommit(&self) -> Option<u32> {
        self.text("proc/sys/vm/overcommit_memory")?.parse().ok()
    }

    /// The NVIDIA driver, where one is loaded or devices are there. Runs none of its code.
    pub fn gpu(&self) -> Option<Gpu> {
        let driver = self.text("proc/driver/nvidia/version").and_then(|t| t.lines().next().map(str::to_owned));
        let is_device = |n: &String| n.strip_prefix("nvidia").is_some_and(|i| i.parse::<u32>().is_ok());
        let devices: Vec<String> = self.names("dev").into_iter().filter(is_device).collect();
        (driver.is_some() || !devices.is_empty()).then_some(Gpu { driver, devices })
    }
}

/// `key:  123 kB` as bytes.
fn meminfo_bytes(text: &str, key: &str) -> Option<u64> {
    let value = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))?;
    value.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
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

/// Numbers as `0-3,8`.
pub fn cpu_ranges(cpus: &[usize]) -> String {
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

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A tree of files in a directory of its own, gone when dropped.
    pub struct Tree(PathBuf);

    impl Tree {
        pub fn new(name: &str, files: &[(&str, &str)]) -> Tree {
            let root = std::env::temp_dir().join(format!("kt-system-{}-{name}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
            Tree(root)
        }

        pub fn system(&self) -> System {
            System::at(&self.0)
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
        assert_eq!(cpu_ranges(&[0, 1, 2, 3, 8, 10, 11]), "0-3,8,10-11");
        assert_eq!(cpu_ranges(&[]), "");
    }

    #[test]
    fn the_tightest_cpu_quota_on_the_way_up_counts() {
        let tree = Tree::new(
            "v2",
            &[
                ("proc/self/cgroup", "0::/pod/app\n"),
                ("sys/fs/cgroup/cgroup.controllers", "cpu memory\n"),
                ("sys/fs/cgroup/pod/cpu.max", "150000 100000\n"),
                ("sys/fs/cgroup/pod/app/cpu.max", "max 100000\n"),
            ],
        );
        let quota = tree.system().cpu_quota().unwrap();
        assert_eq!((quota.cpus, quota.file.as_path()), (1.5, Path::new("/sys/fs/cgroup/pod/cpu.max")));
    }

    #[test]
    fn cpu_quotas_of_version_1_and_their_absence() {
        let tree = Tree::new(
            "v1",
            &[
                // The path is the host's and does not exist here.
                ("proc/self/cgroup", "4:cpu,cpuacct:/docker/abc\n0::/\n"),
                ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "50000\n"),
                ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
            ],
        );
        assert_eq!(tree.system().cpu_quota().unwrap().cpus, 0.5);
        let none = Tree::new(
            "v1-none",
            &[
                ("proc/self/cgroup", "4:cpu:/\n"),
                ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"),
                ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
            ],
        );
        assert_eq!(none.system().cpu_quota(), None);
    }

    #[test]
    fn cpus_cores_nodes_and_memory() {
        let tree = Tree::new(
            "numa",
            &[
                ("proc/cpuinfo", "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 avx512f\n"),
                ("proc/self/status", "Name:\tkt\nCpus_allowed_list:\t0-1,4-127\n"),
                ("sys/devices/system/cpu/online", "0-7\n"),
                ("sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0,4\n"),
                ("sys/devices/system/cpu/cpu4/topology/thread_siblings_list", "0,4\n"),
                ("sys/devices/system/cpu/cpu1/topology/core_cpus_list", "1,5\n"),
                ("sys/devices/system/cpu/cpu5/topology/core_cpus_list", "1,5\n"),
                ("sys/devices/system/node/node1/cpulist", "4-7\n"),
                ("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal: 0 kB\nNode 1 MemFree: 0 kB\n"),
                ("sys/devices/system/node/node0/cpulist", "0-3\n"),
                ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:   2048 kB\nNode 0 MemFree:  1024 kB\n"),
                ("proc/meminfo", "MemTotal: 2048 kB\nMemAvailable: 1536 kB\nSwapTotal: 100 kB\nSwapFree: 60 kB\n"),
                ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
                ("proc/sys/vm/overcommit_memory", "2\n"),
                ("dev/nvidiactl", ""),
                ("dev/nvidia0", ""),
            ],
        );
        let s = tree.system();
        assert_eq!(s.cpu_model().as_deref(), Some("Some CPU"));
        assert!(s.cpu_flags().contains("avx512f"));
        assert_eq!(s.allowed_cpus(), [0, 1, 4, 5, 6, 7]);
        assert_eq!((s.cores(&[0, 1, 4, 5]), s.cores(&[0, 6])), (2, 2));
        assert_eq!(
            s.nodes(),
            [
                Node { index: 0, cpus: vec![0, 1, 2, 3], total_bytes: 2 << 20, free_bytes: 1 << 20 },
                Node { index: 1, cpus: vec![4, 5, 6, 7], total_bytes: 0, free_bytes: 0 },
            ]
        );
        let memory = s.memory().unwrap();
        assert_eq!(
            (memory.available_bytes, memory.swap_bytes, memory.swapped_bytes),
            (1536 << 10, 100 << 10, 40 << 10)
        );
        assert_eq!(s.huge_pages().as_deref(), Some("never"));
        assert_eq!(s.overcommit(), Some(2));
        assert_eq!(s.gpu().unwrap(), Gpu { driver: None, devices: vec!["nvidia0".into()] });
    }

    #[test]
    fn an_empty_tree_knows_nothing_and_does_not_fail() {
        let tree = Tree::new("empty", &[("keep", "")]);
        let s = tree.system();
        assert_eq!((s.cpu_model(), s.memory(), s.cpu_quota(), s.gpu()), (None, None, None, None));
        assert!(s.online_cpus().is_empty() && s.allowed_cpus().is_empty() && s.nodes().is_empty());
    }
}
