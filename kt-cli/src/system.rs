//! What Linux says of the machine and of this process's share of it, read from `/proc` and `/sys` under a root that tests replace.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use kt::cpu::topology::Topology;
use kt::plan::{Available, available_memory_under};

/// The files of `/proc` and `/sys`, below `root`.
pub struct System {
    root: PathBuf,
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

    /// CPUs and NUMA nodes, as far as this process may use them.
    pub fn topology(&self) -> Topology {
        if self.root == Path::new("/") { Topology::detect() } else { Topology::under(&self.root) }
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

    /// Setting of transparent huge pages: `always`, `madvise` or `never`.
    pub fn huge_pages(&self) -> Option<String> {
        let text = self.text("sys/kernel/mm/transparent_hugepage/enabled")?;
        let (_, rest) = text.split_once('[')?;
        Some(rest.split_once(']')?.0.to_owned())
    }

    /// Reserved pages of 2 MiB: how many, and how many of them are free.
    pub fn reserved_huge_pages(&self) -> Option<(u64, u64)> {
        let number =
            |name: &str| self.text(format!("sys/kernel/mm/hugepages/hugepages-2048kB/{name}"))?.parse::<u64>().ok();
        Some((number("nr_hugepages")?, number("free_hugepages")?))
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
    fn cpus_memory_and_devices() {
        let tree = Tree::new(
            "numa",
            &[
                ("proc/cpuinfo", "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 avx512f\n"),
                ("proc/self/status", "Name:\tkt\nCpus_allowed_list:\t0-1,4-127\n"),
                ("sys/devices/system/cpu/online", "0-7\n"),
                ("proc/meminfo", "MemTotal: 2048 kB\nMemAvailable: 1536 kB\nSwapTotal: 100 kB\nSwapFree: 60 kB\n"),
                ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
                ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "512\n"),
                ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "500\n"),
                ("proc/sys/vm/overcommit_memory", "2\n"),
                ("dev/nvidiactl", ""),
                ("dev/nvidia0", ""),
            ],
        );
        let s = tree.system();
        assert_eq!(s.cpu_model().as_deref(), Some("Some CPU"));
        assert!(s.cpu_flags().contains("avx512f"));
        assert_eq!(s.topology().allowed(), [0, 1, 4, 5, 6, 7]);
        let memory = s.memory().unwrap();
        assert_eq!(
            (memory.available_bytes, memory.swap_bytes, memory.swapped_bytes),
            (1536 << 10, 100 << 10, 40 << 10)
        );
        assert_eq!(s.huge_pages().as_deref(), Some("never"));
        assert_eq!(s.reserved_huge_pages(), Some((512, 500)));
        assert_eq!(s.overcommit(), Some(2));
        assert_eq!(s.gpu().unwrap(), Gpu { driver: None, devices: vec!["nvidia0".into()] });
    }

    #[test]
    fn an_empty_tree_knows_nothing_and_does_not_fail() {
        let tree = Tree::new("empty", &[("keep", "")]);
        let s = tree.system();
        assert_eq!((s.cpu_model(), s.memory(), s.gpu()), (None, None, None));
        assert!(s.topology().allowed().is_empty() && s.reserved_huge_pages().is_none());
    }
}
