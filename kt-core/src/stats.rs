//! Where the time of layer calls went, and how many bytes of weights they read.
//!
//! Times are those of the calling thread (with [`LayerExperts::submit`](crate::LayerExperts::submit): of the thread that does
//! the batch): it splits the batch, does tasks, waits for the other threads' last tasks, and adds up what banks give.

use std::fmt;
use std::ops::AddAssign;
use std::time::Duration;

use serde_json::{Value, json};

use crate::plan::human_bytes;
use crate::work::Spent;

/// What some layer calls did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Batches computed.
    pub calls: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Pairs of a token and an expert.
    pub rows: u64,
    /// Time from the start of a call to its end.
    pub wall: Duration,
    /// Of it, what the calling thread spent computing.
    pub kernels: Duration,
    /// Of it, what the calling thread spent waiting for other threads and devices.
    pub waiting: Duration,
    /// Bytes of weights, packed or in place, of the experts used: each once per pass of a call, however many rows it had.
    pub weight_bytes: u64,
}

impl Usage {
    /// The rest of the time: splitting the batch, waking threads, adding the outputs of banks.
    pub fn combining(&self) -> Duration {
        self.wall.saturating_sub(self.kernels + self.waiting)
    }

    /// Weights read per second of wall time, in 10^9 bytes; 0 before the first call.
    pub fn gb_per_s(&self) -> f64 {
        let seconds = self.wall.as_secs_f64();
        if seconds > 0.0 { self.weight_bytes as f64 / seconds / 1e9 } else { 0.0 }
    }

    /// For other programs: bytes, seconds and GB/s.
    pub fn to_json(&self) -> Value {
        json!({
            "calls": self.calls,
            "tokens": self.tokens,
            "rows": self.rows,
            "wall_s": self.wall.as_secs_f64(),
            "kernels_s": self.kernels.as_secs_f64(),
            "waiting_s": self.waiting.as_secs_f64(),
            "combining_s": self.combining().as_secs_f64(),
            "weight_bytes": self.weight_bytes,
            "gb_per_s": self.gb_per_s(),
        })
    }
}

impl AddAssign for Usage {
    fn add_assign(&mut self, other: Usage) {
        self.calls += other.calls;
        self.tokens += other.tokens;
        self.rows += other.rows;
        self.wall += other.wall;
        self.kernels += other.kernels;
        self.waiting += other.waiting;
        self.weight_bytes += other.weight_bytes;
    }
}

/// What the banks of one backend did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BankUsage {
    /// Pairs of a token and an expert.
    pub rows: u64,
    /// Bytes of weights, as in [`Usage`].
    pub weight_bytes: u64,
    /// What the calling thread spent on it: its own work where the bank is the host's, waiting where it is a device's. Of banks that work at
    /// the same time, the later ones in the list were waited for the less.
    pub waited: Duration,
}

impl BankUsage {
    fn to_json(self, backend: &str) -> Value {
        json!({
            "backend": backend,
            "rows": self.rows,
            "weight_bytes": self.weight_bytes,
            "waited_s": self.waited.as_secs_f64(),
        })
    }
}

impl AddAssign for BankUsage {
    fn add_assign(&mut self, other: BankUsage) {
        self.rows += other.rows;
        self.weight_bytes += other.weight_bytes;
        self.waited += other.waited;
    }
}

impl AddAssign<Spent> for Usage {
    fn add_assign(&mut self, spent: Spent) {
        self.kernels += spent.kernels;
        self.waiting += spent.waiting;
    }
}

/// What the calls of one layer did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerStats {
    /// Index of the layer in the model.
    pub layer: usize,
    /// Its calls, since loading or the last reset.
    pub usage: Usage,
    /// Backend and usage of each of the layer's banks, where its experts live in several; streamed layers are no bank's.
    pub banks: Vec<(String, BankUsage)>,
}

/// What the calls of every layer did; its `Display` is a table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stats {
    /// The expert layers, by rising index.
    pub layers: Vec<LayerStats>,
}

/// Most lines of the table, the header and the sum not counted: more layers share lines.
const LINES: usize = 12;

impl Stats {
    /// All layers together.
    pub fn total(&self) -> Usage {
        sum(&self.layers)
    }

    /// For other programs: the layers and their sum, as [`Usage::to_json`].
    pub fn to_json(&self) -> Value {
        let layers: Vec<Value> = self
            .layers
            .iter()
            .map(|l| {
                let mut json = l.usage.to_json();
                json["layer"] = l.layer.into();
                json["banks"] = l.banks.iter().map(|(backend, bank)| bank.to_json(backend)).collect();
                json
            })
            .collect();
        json!({ "layers": layers, "total": self.total().to_json() })
    }
}

/// What the banks of each backend did together.
fn backends(layers: &[LayerStats]) -> Vec<(&str, BankUsage)> {
    let mut all: Vec<(&str, BankUsage)> = Vec::new();
    for (backend, bank) in layers.iter().flat_map(|l| &l.banks) {
        match all.iter_mut().find(|b| b.0 == backend) {
            Some(b) => b.1 += *bank,
            None => all.push((backend, *bank)),
        }
    }
    all
}

fn sum(layers: &[LayerStats]) -> Usage {
    let mut sum = Usage::default();
    layers.iter().for_each(|l| sum += l.usage);
    sum
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (calls, tokens, rows, call, read) = ("calls", "tokens", "rows", "time a call", "read");
        writeln!(
            f,
            "{:<9} {calls:>9} {tokens:>9} {rows:>10} {call:>12} {:>9} {:>9} {:>9} {read:>11} {:>8}",
            "layers", "kernels", "waiting", "combining", "GB/s"
        )?;
        let line = |label: &str, usage: &Usage| {
            let wall = usage.wall.as_secs_f64();
            let share = |part: Duration| if wall > 0.0 { part.as_secs_f64() / wall * 100.0 } else { 0.0 };
            format!(
                "{label:<9} {:>9} {:>9} {:>10} {:>9.1} us {:>7.1} % {:>7.1} % {:>7.1} % {:>11} {:>8.2}",
                usage.calls,
                usage.tokens,
                usage.rows,
                wall * 1e6 / usage.calls.max(1) as f64,
                share(usage.kernels),
                share(usage.waiting),
                share(usage.combining()),
                human_bytes(usage.weight_bytes),
                usage.gb_per_s()
            )
        };
        for layers in self.layers.chunks(self.layers.len().div_ceil(LINES).max(1)) {
            let (first, last) = (layers[0].layer, layers[layers.len() - 1].layer);
            let label = if first == last { first.to_string() } else { format!("{first}-{last}") };
            writeln!(f, "{}", line(&label, &sum(layers)))?;
        }
        write!(f, "{}", line("all", &self.total()))?;
        let banks = backends(&self.layers);
        for (backend, bank) in banks.iter().filter(|_| banks.len() > 1) {
            let (waited, read) = (bank.waited.as_secs_f64(), human_bytes(bank.weight_bytes));
            write!(f, "\non {backend}: {} rows, {read} of weights, waited for {waited:.3} s", bank.rows)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(layer: usize) -> LayerStats {
        let micros = Duration::from_micros;
        let usage = Usage {
            calls: 2,
            tokens: 3,
            rows: 6,
            wall: micros(100),
            kernels: micros(75),
            waiting: micros(20),
            weight_bytes: 4_000_000,
        };
        LayerStats { layer, usage, banks: vec![("one".into(), BankUsage::default())] }
    }

    #[test]
    fn parts_make_the_whole() {
        let usage = layer(0).usage;
        assert_eq!(usage.combining(), Duration::from_micros(5));
        assert_eq!(usage.gb_per_s(), 40.0);
        assert_eq!(Usage::default().gb_per_s(), 0.0);
        let stats = Stats { layers: (3..10).map(layer).collect() };
        let total = stats.total();
        assert_eq!((total.calls, total.tokens, total.rows, total.weight_bytes), (14, 21, 42, 28_000_000));
        assert_eq!(total.wall, total.kernels + total.waiting + total.combining());
        let json = stats.to_json();
        assert_eq!((&json["layers"][6]["layer"], &json["total"]["calls"]), (&json!(9), &json!(14)));
        assert_eq!(json["layers"][0]["combining_s"], 5e-6);
    }

    #[test]
    fn many_layers_share_lines() {
        let table = |layers: usize| Stats { layers: (1..=layers).map(layer).collect() }.to_string();
        let lines = |layers: usize| table(layers).lines().count();
        assert_eq!((lines(0), lines(1), lines(12)), (2, 3, 14));
        assert!(lines(13) <= 14 && lines(61) <= 14);
        let folded = table(61);
        assert!(folded.lines().nth(1).unwrap().starts_with("1-6 "), "{folded}");
        assert!(folded.contains("\n61 ") && folded.contains("75.0 %") && folded.contains(" 40.00"), "{folded}");
        let widths: Vec<usize> = folded.lines().map(str::len).collect();
        assert!(widths.iter().all(|&w| w == widths[0]), "{folded}");
        let banks =
            vec![("one".into(), BankUsage::default()), ("two".into(), BankUsage { rows: 5, ..BankUsage::default() })];
        let two = LayerStats { banks, ..layer(1) };
        let text = Stats { layers: vec![two.clone(), two] }.to_string();
        assert!(text.contains("\non one: 0 rows") && text.contains("\non two: 10 rows"), "{text}");
    }
}
