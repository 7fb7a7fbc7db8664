//! `kt bench`: the speed of one layer of experts, as a fraction of what the machine can do at most.
//!
//! Layers of a model's shape with made-up weights are loaded through the runtime, as many as it takes for the weights to come
//! from memory, and called in turn with a routing drawn anew for every call. What counts as a byte is a stored byte of an
//! expert that the call touches, each once; what counts as an operation is half a multiply-add.
//!
//! The limits are measured on both sides of every case, and the higher ones count. A case between limits that differ, or one
//! that comes out above its limit, says more about the machine's other users than about a kernel: it is marked as doubtful.

use std::collections::BTreeSet;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use half::bf16;
use kt::activation::Activation;
use kt::cpu::input::InputLayout;
use kt::cpu::tier::Tier;
use kt::plan::human_bytes;
use kt::source::synthetic::SyntheticSource;
use kt::{Batch, Experts, Fit, Format, Runtime};

use crate::limits::{Limits, Meter, Peak, READ_BYTES, median_of_sorted};
use crate::options::RuntimeArgs;
use crate::system::System;

/// Packed weights to rotate through by default: many times the caches of today's servers.
const ROTATE_GIB: f64 = 1.5;
/// Of the available memory, what the benchmark takes unless told otherwise.
const MEMORY_SHARE: f64 = 0.6;
/// A limit that moves more than this from one side of a case to the other makes the case doubtful.
const DRIFT: f64 = 0.1;
/// No case can be above 1; this much is the error of measurement.
const POSSIBLE: f64 = 1.03;

/// Measure one layer of experts against the limits of this machine.
#[derive(Debug, clap::Args)]
pub struct BenchArgs {
    /// qwen3-30b-a3b, deepseek-v3 (32 of its experts), gpt-oss, mixtral; or HIDDENxINTERMEDIATExEXPERTSxTOP_K.
    #[arg(long, default_value = "qwen3-30b-a3b")]
    shape: Shape,
    /// Formats of the weights.
    #[arg(long, value_delimiter = ',', default_value = "bf16,int8,int4")]
    formats: Vec<Format>,
    /// Tokens per call.
    #[arg(long, value_delimiter = ',', default_value = "1,16,1024")]
    tokens: Vec<usize>,
    /// Seconds to measure each case for.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// GiB of packed weights to rotate through [default: 1.5, or 60 % of the available memory if that is less].
    #[arg(long, value_name = "GIB")]
    memory_gib: Option<f64>,
    /// Print one JSON object a line.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

/// Name of the limit that is not a peak.
const MEMORY: &str = "read bandwidth";

/// Sizes of a layer.
#[derive(Debug, Clone, PartialEq)]
struct Shape {
    name: String,
    hidden: usize,
    intermediate: usize,
    experts: usize,
    top_k: usize,
    activation: Activation,
    biases: bool,
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let swiglu = Activation::SiluMul;
        let ([hidden, intermediate, experts, top_k], activation) = match name {
            "qwen3-30b-a3b" => ([2048, 768, 128, 8], swiglu),
            "deepseek-v3" => ([7168, 2048, 32, 8], swiglu),
            "gpt-oss" => ([2880, 2880, 32, 4], Activation::GptOss { alpha: 1.702, limit: 7.0 }),
            "mixtral" => ([4096, 14336, 8, 2], swiglu),
            _ => {
                let sizes: Option<Vec<usize>> = name.split('x').map(|s| s.parse().ok()).collect();
                match sizes.as_deref() {
                    Some(&[h, i, e, k]) if h > 0 && i > 0 && k > 0 && k <= e && h.max(i).max(e) <= 1 << 20 => {
                        ([h, i, e, k], swiglu)
                    }
                    _ => {
                        return Err("known shapes are qwen3-30b-a3b, deepseek-v3, gpt-oss, mixtral; or give \
                                    HIDDENxINTERMEDIATExEXPERTSxTOP_K, such as 2048x768x128x8"
                            .into());
                    }
                }
            }
        };
        Ok(Shape { name: name.into(), hidden, intermediate, experts, top_k, activation, biases: name == "gpt-oss" })
    }
}

impl Shape {
    fn source(&self, format: Format, layers: usize) -> kt::Result<SyntheticSource> {
        SyntheticSource::builder()
            .hidden(self.hidden)
            .intermediate(self.intermediate)
            .experts(self.experts)
            .top_k(self.top_k)
            .layers(layers)
            .format(format)
            .activation(self.activation)
            .biases(self.biases)
            .seed(1)
            .build()
    }

    /// Operations of a call: gate, up and down are a multiply-add per weight and row each.
    fn operations(&self, tokens: usize) -> f64 {
        2.0 * 3.0 * self.hidden as f64 * self.intermediate as f64 * (tokens * self.top_k) as f64
    }
}

/// What one case came to.
#[derive(Debug, Clone, PartialEq)]
struct Line {
    backend: String,
    tier: String,
    format: String,
    shape: String,
    tokens: usize,
    threads: usize,
    seconds: f64,
    gb_per_s: f64,
    tflop_per_s: f64,
    fraction_of_limit: f64,
    limit: &'static str,
}

impl Line {
    fn to_json(&self) -> serde_json::Value {
        serde_json::json!({
            "backend": self.backend,
            "tier": self.tier,
            "format": self.format,
            "shape": self.shape,
            "tokens": self.tokens,
            "threads": self.threads,
            "seconds": self.seconds,
            "gb_per_s": self.gb_per_s,
            "tflop_per_s": self.tflop_per_s,
            "fraction_of_limit": self.fraction_of_limit,
            "limit": self.limit,
        })
    }

    fn header() -> String {
        format!(
            "{:<14} {:>6}  {:<10} {:<11} {:>10} {:>8} {:>9} {:>9}  limit",
            "format", "tokens", "backend", "tier", "ms/call", "GB/s", "TFLOP/s", "of limit"
        )
    }

    fn row(&self) -> String {
        format!(
            "{:<14} {:>6}  {:<10} {:<11} {:>10.3} {:>8.2} {:>9.4} {:>7.1} %  {}",
            self.format,
            self.tokens,
            self.backend,
            self.tier,
            self.seconds * 1e3,
            self.gb_per_s,
            self.tflop_per_s,
            self.fraction_of_limit * 100.0,
            self.limit
        )
    }
}

/// The limit that a layer whose inputs are rounded like this computes against.
fn peak_of(limits: &Limits, inputs: InputLayout) -> (&'static str, Peak) {
    match inputs {
        InputLayout::F32 => ("f32 peak", limits.f32),
        InputLayout::Bf16 => ("bf16 peak", limits.bf16),
        InputLayout::Int8 { .. } => ("int8 peak", limits.int8),
    }
}

/// The limit of this name.
fn value_of(limits: &Limits, limit: &str, inputs: InputLayout) -> f64 {
    if limit == MEMORY { limits.read_gb_per_s.median } else { peak_of(limits, inputs).1.tera.median }
}

/// The nearer of the two limits, and how near.
fn nearest_limit(limits: &Limits, inputs: InputLayout, gb_per_s: f64, tflop_per_s: f64) -> (&'static str, f64) {
    let (name, peak) = peak_of(limits, inputs);
    let memory = gb_per_s / limits.read_gb_per_s.median;
    let compute = tflop_per_s / peak.tera.median;
    if memory >= compute { (MEMORY, memory) } else { (name, compute) }
}

/// Why a fraction should not be believed, if so.
fn doubt(line: &Line, inputs: InputLayout, before: &Limits, after: &Limits) -> Option<String> {
    let (a, b) = (value_of(before, line.limit, inputs), value_of(after, line.limit, inputs));
    if (b - a).abs() > DRIFT * a.min(b) {
        return Some(format!("{} drifted by {:+.0} % during the case", line.limit, 100.0 * (b / a - 1.0)));
    }
    (line.fraction_of_limit > POSSIBLE).then(|| format!("above its limit: {} moved during the case", line.limit))
}

/// Runs the command.
pub fn run(mut args: BenchArgs) -> anyhow::Result<()> {
    if args.runtime.isa.is_none()
        && let Some(tier) = std::env::var_os("KT_ISA")
    {
        let tier = tier.to_string_lossy();
        args.runtime.isa = Some(tier.parse().with_context(|| format!("the environment variable KT_ISA is `{tier}`"))?);
    }
    if args.tokens.contains(&0) {
        bail!("--tokens must be at least 1");
    }
    if !(args.seconds > 0.0 && args.seconds.is_finite()) || args.memory_gib.is_some_and(|g| !(g > 0.0 && g.is_finite()))
    {
        bail!("--seconds and --memory-gib must be above 0");
    }
    let runtime = args.runtime.build()?;
    // A shape that a format cannot have is told before anything is measured.
    for &format in &args.formats {
        runtime.plan(&args.shape.source(format, 1)?)?;
    }
    eprintln!("measuring limits ...");
    let system = System::here();
    let bytes = READ_BYTES.min(system.available().bytes / 8);
    let meter = Meter::new(runtime.threads(), &system.allowed_cpus(), bytes, args.runtime.isa.unwrap_or(Tier::Amx))?;
    let mut before = meter.measure();
    eprintln!("{}", before.summary());
    if !args.json {
        println!("{}; {}", args.shape.name, before.summary());
        println!("{}", Line::header());
    }
    let (mut cases, mut doubtful) = (0, 0);
    for &format in &args.formats {
        let (experts, fit) = load(&runtime, &args, format)?;
        before = meter.measure();
        for &tokens in &args.tokens {
            let speed = case(&experts, &args, tokens)?;
            let after = meter.measure();
            let line =
                judge(&runtime, &experts, &fit, &args.shape, tokens, speed, &before.clone().higher(after.clone()))?;
            let doubt = doubt(&line, fit.inputs[0], &before, &after);
            (cases, doubtful) = (cases + 1, doubtful + usize::from(doubt.is_some()));
            if args.json {
                println!("{}", line.to_json());
                if let Some(why) = doubt {
                    eprintln!("doubtful: {format}, {tokens} tokens: {why}");
                }
            } else {
                println!("{}{}", line.row(), doubt.map(|why| format!("  DOUBTFUL: {why}")).unwrap_or_default());
            }
            before = after;
        }
    }
    let verdict = match doubtful {
        0 => format!("limits measured before and after each of {cases} cases agree within 10 %"),
        n => format!("{n} of {cases} cases are doubtful: the limits moved; run them again when the machine is quiet"),
    };
    if args.json {
        eprintln!("{verdict}");
    } else {
        println!("{verdict}");
    }
    Ok(())
}

/// How many layers to load, when one takes `layer_bytes`.
fn layer_count(layer_bytes: u64, asked_gib: Option<f64>, available_bytes: u64) -> usize {
    let want = (asked_gib.unwrap_or(ROTATE_GIB) * (1u64 << 30) as f64 / layer_bytes.max(1) as f64).ceil().max(1.0);
    match asked_gib {
        // Asked for: the plan refuses what does not fit.
        Some(_) => want as usize,
        None => want.min((available_bytes as f64 * MEMORY_SHARE / layer_bytes.max(1) as f64).floor()).max(1.0) as usize,
    }
}

fn load(runtime: &Runtime, args: &BenchArgs, format: Format) -> anyhow::Result<(Experts, Fit)> {
    let one = runtime.plan(&args.shape.source(format, 1)?)?;
    let layer_bytes = one.packed_bytes() + one.mapped_bytes();
    let layers = layer_count(layer_bytes, args.memory_gib, one.available.bytes);
    eprintln!("{format}: loading {layers} layers of {} ...", human_bytes(layer_bytes));
    let start = Instant::now();
    let experts = runtime.load(&args.shape.source(format, layers)?)?;
    eprintln!("{format}: loaded in {:.1} s", start.elapsed().as_secs_f64());
    let fit = one.layers.into_iter().next().context("the plan of one layer has one layer")?.fit;
    Ok((experts, fit))
}

/// Median seconds of a call, and median rate of stored bytes in 10^9 a second.
#[derive(Debug, Clone, Copy)]
struct Speed {
    seconds: f64,
    gb_per_s: f64,
}

fn case(experts: &Experts, args: &BenchArgs, tokens: usize) -> anyhow::Result<Speed> {
    let shape = &args.shape;
    let mut random = Random(tokens as u64);
    let hidden: Vec<bf16> = (0..tokens * shape.hidden).map(|_| bf16::from_f32(random.normal())).collect();
    let routed = |random: &mut Random| -> kt::Result<Batch> {
        let (ids, weights) = route(random, tokens, shape.experts, shape.top_k);
        Batch::new(tokens, hidden.clone(), ids, weights)
    };
    // Drawn ahead in groups, so that small calls follow each other as closely as those of a model do.
    let group = (256 / tokens).clamp(1, 32);
    let layers = experts.layers();
    let (mut seconds, mut gb_per_s) = (Vec::new(), Vec::new());
    let mut next_layer = 0;
    // Calls for `length`, and at least `groups` groups unless they take far longer than that.
    let mut calls = |length: Duration, groups: usize| -> anyhow::Result<()> {
        seconds.clear();
        gb_per_s.clear();
        let start = Instant::now();
        while start.elapsed() < length || (seconds.len() < groups * group && start.elapsed() < length * 4) {
            let mut batches = (0..group).map(|_| routed(&mut random)).collect::<kt::Result<Vec<_>>>()?;
            for batch in &mut batches {
                let layer = &layers[next_layer % layers.len()];
                next_layer += 1;
                let start = Instant::now();
                layer.forward(batch)?;
                let elapsed = start.elapsed().as_secs_f64();
                let distinct = batch.topk_ids().iter().collect::<BTreeSet<_>>().len();
                seconds.push(elapsed);
                gb_per_s.push(distinct as f64 * layer.spec().expert_bytes() as f64 / elapsed * 1e-9);
            }
            let output = batches.last().map(Batch::output).unwrap_or_default();
            if !output.iter().all(|v| v.is_finite()) || output.iter().all(|&v| v == 0.0) {
                bail!(
                    "the layer's output is not made of numbers, or all zero: a kernel is broken, its speed means nothing"
                );
            }
        }
        Ok(())
    };
    let time = Duration::from_secs_f64(args.seconds);
    calls(time / 8, 1)?;
    calls(time, 3)?;
    seconds.sort_by(f64::total_cmp);
    gb_per_s.sort_by(f64::total_cmp);
    Ok(Speed { seconds: median_of_sorted(&seconds), gb_per_s: median_of_sorted(&gb_per_s) })
}

fn judge(
    runtime: &Runtime,
    experts: &Experts,
    fit: &Fit,
    shape: &Shape,
    tokens: usize,
    Speed { seconds, gb_per_s }: Speed,
    limits: &Limits,
) -> anyhow::Result<Line> {
    let tflop_per_s = shape.operations(tokens) / seconds * 1e-12;
    let (limit, fraction_of_limit) = nearest_limit(limits, fit.inputs[0], gb_per_s, tflop_per_s);
    let layer = experts.layers().first().context("no layers")?;
    let (backend, tier) = layer.backends().next().context("no backend")?;
    Ok(Line {
        backend: backend.into(),
        tier: tier.into(),
        format: layer.spec().format_label(),
        shape: shape.name.clone(),
        tokens,
        threads: runtime.threads(),
        seconds,
        gb_per_s,
        tflop_per_s,
        fraction_of_limit,
        limit,
    })
}

/// `top_k` different experts for every token, all equally likely, with weights that add up to 1.
fn route(random: &mut Random, tokens: usize, experts: usize, top_k: usize) -> (Vec<i32>, Vec<f32>) {
    let mut ids = Vec::with_capacity(tokens * top_k);
    let mut weights = Vec::with_capacity(tokens * top_k);
    let mut all: Vec<i32> = (0..experts as i32).collect();
    for _ in 0..tokens {
        for k in 0..top_k {
            all.swap(k, k + random.below(experts - k));
        }
        ids.extend_from_slice(&all[..top_k]);
        let raw: Vec<f32> = (0..top_k).map(|_| 0.1 + random.unit()).collect();
        let sum: f32 = raw.iter().sum();
        weights.extend(raw.iter().map(|w| w / sum));
    }
    (ids, weights)
}

/// SplitMix64: small, seeded, good enough for routing.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In `0..n`, `n` above 0.
    fn below(&mut self, n: usize) -> usize {
        ((self.next() as u128 * n as u128) >> 64) as usize
    }

    /// In `0..1`.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// About normal: mean 0, variance 1.
    fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() - 6.0
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::limits::Measured;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        bench: BenchArgs,
    }

    fn limits(read: f64, int8: f64, bf16: f64, f32: f64) -> Limits {
        let measured = |v| Measured { best: v, median: v };
        let peak = |v| Peak { tera: measured(v), instruction: "test" };
        Limits {
            threads: 1,
            read_bytes: 1,
            read_gb_per_s: measured(read),
            int8: peak(int8),
            bf16: peak(bf16),
            f32: peak(f32),
        }
    }

    #[test]
    fn shapes_are_read() {
        let shape: Shape = "deepseek-v3".parse().unwrap();
        assert_eq!((shape.hidden, shape.intermediate, shape.experts, shape.top_k), (7168, 2048, 32, 8));
        let own: Shape = "256x128x4x2".parse().unwrap();
        assert_eq!((own.hidden, own.intermediate, own.experts, own.top_k), (256, 128, 4, 2));
        assert_eq!(own.operations(3), 2.0 * 3.0 * 256.0 * 128.0 * 6.0);
        for bad in ["", "qwen", "1x2x3", "256x128x4x5", "0x1x1x1", "256x128x4x0", "99999999x1x1x1"] {
            assert!(bad.parse::<Shape>().unwrap_err().contains("TOP_K"), "{bad}");
        }
    }

    #[test]
    fn options_are_read() {
        let args = Cli::try_parse_from([
            "kt",
            "--shape",
            "mixtral",
            "--formats",
            "bf16,int4-g64",
            "--tokens",
            "1,2",
            "--isa",
            "avx2",
            "--backend",
            "portable",
        ]);
        let args = args.unwrap().bench;
        assert_eq!(args.formats, [Format::Bf16, Format::Int4(kt::Group::Of(64))]);
        assert_eq!((args.tokens.as_slice(), args.runtime.isa), (&[1, 2][..], Some(Tier::Avx2)));
        assert!(Cli::try_parse_from(["kt", "--formats", "int3"]).is_err());
        assert!(Cli::try_parse_from(["kt", "--isa", "sse9"]).is_err());
    }

    #[test]
    fn the_nearer_limit_counts() {
        let l = limits(40.0, 0.9, 0.45, 0.2);
        let int8 = InputLayout::Int8 { group: 32 };
        assert_eq!(nearest_limit(&l, int8, 36.0, 0.09), ("read bandwidth", 0.9));
        assert_eq!(nearest_limit(&l, int8, 4.0, 0.45), ("int8 peak", 0.5));
        assert_eq!(nearest_limit(&l, InputLayout::Bf16, 4.0, 0.45), ("bf16 peak", 1.0));
        assert_eq!(nearest_limit(&l, InputLayout::F32, 4.0, 0.1), ("f32 peak", 0.5));
    }

    #[test]
    fn moved_limits_and_impossible_fractions_are_doubted() {
        let line = |fraction_of_limit| Line {
            backend: "b".into(),
            tier: "t".into(),
            format: "f".into(),
            shape: "s".into(),
            tokens: 1,
            threads: 1,
            seconds: 1.0,
            gb_per_s: 1.0,
            tflop_per_s: 1.0,
            fraction_of_limit,
            limit: MEMORY,
        };
        let (l, slower) = (limits(40.0, 1.0, 1.0, 1.0), limits(30.0, 1.0, 1.0, 1.0));
        let quiet = limits(39.0, 0.1, 0.1, 0.1);
        assert_eq!(doubt(&line(0.9), InputLayout::Bf16, &l, &quiet), None, "peaks do not bound this case");
        assert!(doubt(&line(0.9), InputLayout::Bf16, &l, &slower).unwrap().contains("-25 %"));
        assert!(doubt(&line(1.2), InputLayout::Bf16, &l, &l).unwrap().contains("above its limit"));
    }

    #[test]
    fn layers_fill_the_memory_asked_for_or_what_is_there() {
        let gib = 1 << 30;
        assert_eq!(layer_count(gib, None, 100 * gib), 2);
        assert_eq!(layer_count(gib / 4, None, 100 * gib), 6);
        assert_eq!(layer_count(gib / 4, None, gib), 2);
        assert_eq!(layer_count(4 * gib, None, gib), 1);
        assert_eq!(layer_count(gib, Some(8.0), gib), 8);
    }

    #[test]
    fn routing_chooses_different_experts_evenly() {
        let mut random = Random(7);
        let (ids, weights) = route(&mut random, 2000, 16, 4);
        let mut counts = [0; 16];
        for (ids, weights) in ids.chunks(4).zip(weights.chunks(4)) {
            assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), 4);
            assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-5 && weights.iter().all(|&w| w > 0.0));
            ids.iter().for_each(|&i| counts[i as usize] += 1);
        }
        // 500 each on average, standard deviation about 19.
        assert!(counts.iter().all(|c| (400..600).contains(c)), "{counts:?}");
        assert_ne!(route(&mut random, 1, 16, 4), route(&mut random, 1, 16, 4));
    }

    #[test]
    fn a_small_case_runs_and_its_numbers_agree() {
        let args = ["kt", "--shape", "256x128x8x2", "--formats", "bf16", "--seconds", "0.05", "--memory-gib", "0.002"];
        let args = Cli::try_parse_from(args).unwrap().bench;
        let runtime = args.runtime.build().unwrap();
        let (experts, fit) = load(&runtime, &args, Format::Bf16).unwrap();
        assert!(experts.layers().len() >= 2);
        let l = limits(1e3, 1e3, 1e3, 1e3);
        let speed = case(&experts, &args, 5).unwrap();
        let line = judge(&runtime, &experts, &fit, &args.shape, 5, speed, &l).unwrap();
        assert_eq!((line.format.as_str(), line.tokens, line.threads), ("BF16", 5, runtime.threads()));
        assert!((line.tflop_per_s * 1e12 * line.seconds / args.shape.operations(5) - 1.0).abs() < 1e-9);
        // Five tokens with two experts each touch 2 to 8 experts of 3 * 256 * 128 * 2 bytes.
        let experts = line.gb_per_s * 1e9 * line.seconds / (3.0 * 256.0 * 128.0 * 2.0);
        assert!((1.0..10.0).contains(&experts), "{experts}");
        let keys: Vec<String> = line.to_json().as_object().unwrap().keys().cloned().collect();
        let mut want = [
            "backend",
            "tier",
            "format",
            "shape",
            "tokens",
            "threads",
            "seconds",
            "gb_per_s",
            "tflop_per_s",
            "fraction_of_limit",
            "limit",
        ];
        want.sort();
        let mut keys = keys;
        keys.sort();
        assert_eq!(keys, want);
    }

    #[test]
    fn too_much_memory_is_refused_with_the_plan() {
        let args = ["kt", "--shape", "2048x768x128x8", "--formats", "bf16", "--memory-gib", "100000"];
        let args = Cli::try_parse_from(args).unwrap().bench;
        let runtime = args.runtime.build().unwrap();
        let error = load(&runtime, &args, Format::Bf16).err().expect("100 TiB are refused").to_string();
        assert!(error.contains("refusing to load") && error.contains("REFUSE"), "{error}");
    }
}
