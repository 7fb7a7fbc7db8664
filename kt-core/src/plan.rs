//! What would be loaded where, in bytes, and whether it fits: made from headers alone.

use std::fmt;
use std::path::Path;

use crate::backend::Fit;

/// Whether a plan can be carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// Bytes as stored in the checkpoint.
    pub stored_bytes: u64,
    /// Checkpoint bytes that one token reads.
    pub token_bytes: u64,
    /// The backend chosen.
    pub backend: String,
    /// Its fit.
    pub fit: Fit,
    /// The backends not chosen, each with the reason.
    pub declined: Vec<(String, String)>,
}

/// What would be loaded where, in bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The expert layers.
    pub layers: Vec<LayerPlan>,
    /// Other memory that the caller announced: dense weights, KV cache.
    pub extra: Vec<(String, u64)>,
    /// Working memory of a layer call, for all threads.
    pub scratch_bytes: u64,
    /// Memory that this process may still take.
    pub available: Available,
}

impl Plan {
    /// Packed experts in memory of their own.
    pub fn packed_bytes(&self) -> u64 {
        self.layers.iter().map(|l| l.fit.packed_bytes).sum()
    }

    /// Experts used in place from the checkpoint's map: page cache, shared with other processes.
    pub fn mapped_bytes(&self) -> u64 {
        self.layers.iter().map(|l| l.fit.mapped_bytes).sum()
    }

    /// All that would be resident once every expert was used.
    pub fn resident_bytes(&self) -> u64 {
        self.packed_bytes() + self.mapped_bytes() + self.scratch_bytes + self.extra.iter().map(|e| e.1).sum::<u64>()
    }

    /// Expert bytes that one token reads in all layers: read bandwidth divided by it bounds the decode speed.
    pub fn token_bytes(&self) -> u64 {
        self.layers.iter().map(|l| l.token_bytes).sum()
    }

    /// Whether it can be carried out.
    pub fn verdict(&self) -> Verdict {
        let (need, have) = (self.resident_bytes(), self.available.bytes);
        if need > have {
            Verdict::Refuse
        } else if need > have / 10 * 9 {
            Verdict::Tight
        } else {
            Verdict::Fits
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
                    "mapped_bytes": l.fit.mapped_bytes,
                    "token_bytes": l.token_bytes,
                    "declined": l.declined.iter().map(|(b, r)| serde_json::json!({"backend": b, "reason": r})).collect::<Vec<_>>(),
                })
            })
            .collect();
        let extra: serde_json::Map<_, _> = self.extra.iter().map(|(k, v)| (k.clone(), (*v).into())).collect();
        serde_json::json!({
            "verdict": self.verdict().to_string(),
            "resident_bytes": self.resident_bytes(),
            "packed_bytes": self.packed_bytes(),
            "mapped_bytes": self.mapped_bytes(),
            "scratch_bytes": self.scratch_bytes,
            "token_bytes": self.token_bytes(),
            "extra_bytes": extra,
            "available_bytes": self.available.bytes,
            "available_from": self.available.from,
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
            "layers", "experts", "format", "backend (tier)", "packed", "mapped"
        )?;
        for (l, n) in self.runs() {
            let layers = if n == 1 { l.index.to_string() } else { format!("{}-{}", l.index, l.index + n - 1) };
            let backend = format!("{} ({})", l.backend, l.fit.tier);
            let (packed, mapped) = (l.fit.packed_bytes * n as u64, l.fit.mapped_bytes * n as u64);
            writeln!(
                f,
                "{layers:<12} {:>7} {:<14} {backend:<22} {:>11} {:>11}",
                l.experts,
                l.format,
                human_bytes(packed),
                human_bytes(mapped)
            )?;
        }
        let mut line = |label: &str, bytes: u64| writeln!(f, "{label:<58} {:>11}", human_bytes(bytes));
        line("experts, packed in memory", self.packed_bytes())?;
        line("experts, in place from the file (page cache)", self.mapped_bytes())?;
        line("scratch of a layer call", self.scratch_bytes)?;
        for (label, bytes) in &self.extra {
            line(label, *bytes)?;
        }
        line("resident in all", self.resident_bytes())?;
        line(&format!("available ({})", self.available.from), self.available.bytes)?;
        line("expert bytes read per token", self.token_bytes())?;
        match self.verdict() {
            Verdict::Refuse => write!(
                f,
                "{}: {} more memory is needed; take a smaller format or model, close other programs, or raise the limit",
                Verdict::Refuse,
                human_bytes(self.resident_bytes() - self.available.bytes)
            ),
            v => write!(f, "{v}"),
        }
    }
}

/// Memory that this process may still take, and what limits it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Available {
    /// Bytes.
    pub bytes: u64,
    /// `MemAvailable`, a cgroup's path, or the caller's own limit.
    pub from: String,
}

/// Reads what the system and the cgroups of this process leave it; unlimited where nothing can be read.
pub fn available_memory() -> Available {
    available_memory_under(Path::new("/"))
}

/// As [`available_memory`], for another root directory (a fixture, or a container's view).
pub fn available_memory_under(root: &Path) -> Available {
    let read = |path: &str| std::fs::read_to_string(root.join(path)).ok();
    let number = |path: &str| read(path).and_then(|t| t.trim().parse::<u64>().ok());
    let field = |text: &str, key: &str| {
        let line = text.lines().find(|l| l.strip_prefix(key).is_some_and(|r| r.starts_with([':', ' '])))?;
        line[key.len()..].trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()
    };
    let mut best = Available { bytes: u64::MAX, from: "no limit known".into() };
    let mut lower = |bytes: u64, from: String| {
        if bytes < best.bytes {
            best = Available { bytes, from };
        }
    };
    if let Some(kib) = read("proc/meminfo").and_then(|t| field(&t, "MemAvailable")) {
        lower(kib.saturating_mul(1024), "MemAvailable".into());
    }
    let cgroups = read("proc/self/cgroup").unwrap_or_default();
    for line in cgroups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (base, max, current, inactive) = if controllers.is_empty() {
            ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
        } else if controllers.split(',').any(|c| c == "memory") {
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        } else {
            continue;
        };
        // A limit of any ancestor counts. Inside a container the path may not exist below the mounted root: then the root counts.
        let mut dir = path.trim_matches('/').to_string();
        loop {
            let at =
                |file: &str| if dir.is_empty() { format!("{base}/{file}") } else { format!("{base}/{dir}/{file}") };
            if let (Some(limit), Some(used)) = (number(&at(max)), number(&at(current))) {
                let cache = read(&at("memory.stat")).and_then(|t| field(&t, inactive)).unwrap_or(0);
                lower(limit.saturating_sub(used.saturating_sub(cache)), format!("cgroup /{}", at(max)));
            }
            match dir.rfind('/') {
                Some(i) => dir.truncate(i),
                None if dir.is_empty() => break,
                None => dir.clear(),
            }
        }
    }
    best
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
        assert_eq!(available_memory_under(&root), Available { bytes: 800 * 1024, from: "MemAvailable".into() });

        let root = fixture(
            "v2",
            &[
                meminfo,
                ("proc/self/cgroup", "0::/a/b\n"),
                ("sys/fs/cgroup/a/memory.max", "300000\n"),
                ("sys/fs/cgroup/a/memory.current", "100000\n"),
                ("sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_file 50000\n"),
                ("sys/fs/cgroup/a/b/memory.max", "max\n"),
                ("sys/fs/cgroup/a/b/memory.current", "90000\n"),
            ],
        );
        let got = available_memory_under(&root);
        assert_eq!(got.bytes, 250000);
        assert!(got.from.contains("sys/fs/cgroup/a/memory.max"), "{}", got.from);

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
