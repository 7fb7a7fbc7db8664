//! What `kt bench` found, for readers and as JSON lines.
//!
//! The first line of `--json` is the machine, the others are cases. Several such outputs one behind the other are one as well:
//! a machine's line is about the cases that follow it.

use std::time::SystemTime;

use serde_json::{Value, json};

use super::case::Speed;
use super::shape::Shape;
use crate::limits::{Factors, Limits};
use crate::system::System;

/// Version of the JSON lines, in the machine's line as `kt_bench`.
pub const VERSION: u64 = 1;

/// Where and when was measured, and with what.
#[derive(Debug, Clone, PartialEq)]
pub struct Machine {
    /// UTC, `2026-11-20T09:00:00Z`.
    pub date: String,
    /// Of this program.
    pub version: String,
    pub cpu: String,
    /// CPUs that the process may use, and the cores that they are on.
    pub cpus: usize,
    pub cores: usize,
    /// The highest tier that the CPU has and the options allow.
    pub tier: String,
    pub threads: usize,
}

impl Machine {
    pub fn here(system: &System, tier: String, threads: usize) -> Machine {
        let topology = system.topology();
        Machine {
            date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            version: env!("CARGO_PKG_VERSION").into(),
            cpu: system.cpu_model().unwrap_or_else(|| "unknown".into()),
            cores: topology.cores(),
            cpus: topology.allowed().len(),
            tier,
            threads,
        }
    }

    pub fn to_json(&self, limits: &Limits) -> Value {
        json!({
            "kt_bench": VERSION,
            "date": self.date,
            "version": self.version,
            "cpu": self.cpu,
            "cpus": self.cpus,
            "cores": self.cores,
            "tier": self.tier,
            "threads": self.threads,
            "limits": limits.to_json(),
        })
    }
}

/// One case, measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    pub backend: String,
    pub tier: String,
    pub format: String,
    pub shape: Shape,
    pub tokens: usize,
    pub threads: usize,
    pub factors: Factors,
    pub speed: Speed,
}

impl Line {
    /// Name of the limit that bounds the case.
    pub fn limit(&self) -> &'static str {
        if self.speed.reads { "read bandwidth" } else { self.factors.peak_name() }
    }

    pub fn to_json(&self) -> Value {
        let s = &self.speed;
        let [hidden, intermediate, experts, top_k] = self.shape.sizes();
        json!({
            "format": self.format,
            "shape": self.shape.name,
            "hidden": hidden,
            "intermediate": intermediate,
            "experts": experts,
            "top_k": top_k,
            "tokens": self.tokens,
            "backend": self.backend,
            "tier": self.tier,
            "threads": self.threads,
            "ms": s.seconds.median * 1e3,
            "ms_quartiles": [s.seconds.low * 1e3, s.seconds.high * 1e3],
            "gb_per_s": s.gb_per_s,
            "tflop_per_s": s.tera_op_per_s,
            "limit": self.limit(),
            "fraction_of_limit": s.of_limit.median,
            "fraction_quartiles": [s.of_limit.low, s.of_limit.high],
            "fraction_of_read": s.of_read,
            "fraction_of_peak": s.of_peak,
            "limits": {
                "read_gb_per_s": s.limits.read_gb_per_s,
                "peak": self.factors.peak_name(),
                "peak_tera_op_per_s": s.limits.tera_op_per_s,
            },
            "slices": s.slices,
            "doubt": s.doubt(),
        })
    }

    pub fn header() -> String {
        format!(
            "{:<14} {:>6}  {:<10} {:<11} {:>10} {:>8} {:>9} {:>9}  {:<14}  {:<14}",
            "format", "tokens", "backend", "tier", "ms/call", "GB/s", "TFLOP/s", "of limit", "(quartiles)", "limit"
        )
    }

    pub fn row(&self) -> String {
        let s = &self.speed;
        let quartiles = format!("({:.1} to {:.1})", s.of_limit.low * 100.0, s.of_limit.high * 100.0);
        format!(
            "{:<14} {:>6}  {:<10} {:<11} {:>10.3} {:>8.2} {:>9.4} {:>7.1} %  {quartiles:<14}  {:<14}",
            self.format,
            self.tokens,
            self.backend,
            self.tier,
            s.seconds.median * 1e3,
            s.gb_per_s,
            s.tera_op_per_s,
            s.of_limit.median * 100.0,
            self.limit()
        )
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::bench::case::Quartiles;
    use crate::limits::Moment;

    /// A line of BF16 with this fraction of its limit.
    pub fn line(shape: &str, tokens: usize, fraction: f64) -> Line {
        let q = |v: f64| Quartiles { low: v * 0.99, median: v, high: v * 1.01 };
        Line {
            backend: "avx512".into(),
            tier: "avx512bf16".into(),
            format: "BF16".into(),
            shape: shape.parse().unwrap(),
            tokens,
            threads: 2,
            factors: Factors::Bf16,
            speed: Speed {
                seconds: q(1e-3),
                gb_per_s: 40.0,
                tera_op_per_s: 0.1,
                of_read: fraction,
                of_peak: fraction / 2.0,
                of_limit: q(fraction),
                reads: true,
                limits: Moment { read_gb_per_s: 50.0, tera_op_per_s: 1.0 },
                slices: 10,
            },
        }
    }

    pub fn machine() -> Machine {
        Machine {
            date: "2026-11-20T09:00:00Z".into(),
            version: "0.1.0".into(),
            cpu: "Some CPU".into(),
            cpus: 2,
            cores: 2,
            tier: "avx512bf16".into(),
            threads: 2,
        }
    }

    #[test]
    fn a_line_names_its_limit() {
        let mut line = line("mixtral", 1, 0.5);
        assert_eq!((line.limit(), &line.to_json()["limit"]), ("read bandwidth", &json!("read bandwidth")));
        line.speed.reads = false;
        assert_eq!(line.limit(), "bf16 peak");
        assert!(line.row().contains("50.0 %  (49.5 to 50.5)") && line.row().contains("bf16 peak"), "{}", line.row());
    }
}
