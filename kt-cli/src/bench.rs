//! `kt bench`: the speed of one layer of experts, as a fraction of what the machine can do at most.
//!
//! Layers of a model's shape with made-up weights are loaded through the runtime, as many as it takes for the weights to come
//! from memory, and called in turn with a routing drawn anew for every call. What counts as a byte is a stored byte of an
//! expert that the call touches, each once, scales included; what counts as an operation is half a multiply-add.
//!
//! A call cannot be faster than its bytes can be read, nor than its multiply-adds can be done with the numbers that its kernel
//! multiplies (int8, bf16 or F32): the longer of the two times is the limit. See `case` for how it is measured beside the calls.

mod case;
mod compare;
mod dispatch;
mod record;
mod scheduling;
mod shape;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use kt::cpu::tier::Tier;
use kt::plan::human_bytes;
use kt::{Experts, Fit, Format, Runtime};

use self::case::{Caller, Quartiles};
use self::compare::{Comparison, Earlier};
use self::dispatch::{Dispatch, Shared};
use self::record::{Line, Machine};
use self::scheduling::Scheduling;
use self::shape::{Formats, Shape, Shapes};
use crate::limits::{Factors, Meter, READ_BYTES, cpus_of};
use crate::options::{RuntimeArgs, cache_text};
use crate::system::System;

/// Packed weights to rotate through by default: many times the caches of today's servers.
const ROTATE_GIB: f64 = 1.5;
/// Of the available memory, what the benchmark takes unless told otherwise.
const MEMORY_SHARE: f64 = 0.6;
/// Of each column of a token: a bf16 input twice, an f32 output. Of each of its experts: the id and the weight.
const TOKEN_BYTES: u64 = 8;

/// Measure layers of experts against the limits of this machine.
///
/// Without --isa, the environment variable KT_ISA names the highest instruction set to use, where it is set.
#[derive(Debug, clap::Args)]
pub struct BenchArgs {
    /// Shapes, separated by commas: qwen3-30b-a3b, deepseek-v3 (32 of its experts), gpt-oss, mixtral, `all` of these; or
    /// HIDDENxINTERMEDIATExEXPERTSxTOP_K.
    #[arg(long, default_value = "qwen3-30b-a3b")]
    shape: Shapes,
    /// Formats of the weights, separated by commas; `all` stands for those that a kernel runs natively here.
    #[arg(long, default_value = "bf16,int8,int4")]
    formats: Formats,
    /// Tokens per call.
    #[arg(long, value_delimiter = ',', default_value = "1,16,1024")]
    tokens: Vec<usize>,
    /// Seconds of calls for each case, in ten slices between which limits are measured.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// GiB of packed weights to rotate through [default: 1.5, or 60 % of the available memory if that is less].
    #[arg(long, value_name = "GIB")]
    memory_gib: Option<f64>,
    /// Print one JSON object a line: the machine, then each case.
    #[arg(long)]
    json: bool,
    /// Hold each case against an earlier run: FILE is what `kt bench --json` printed then.
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
    /// Measure what a call of one token takes beside its products, in place of the cases.
    #[arg(long, conflicts_with_all = ["compare", "tokens"])]
    scheduling: bool,
    /// Measure how long it takes to hand work to threads, beside rayon; and a layer's calls beside a busy process.
    #[arg(long, conflicts_with_all = ["compare", "tokens", "scheduling"])]
    dispatch: bool,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

/// Runs the command.
pub fn run(mut args: BenchArgs) -> anyhow::Result<()> {
    if args.runtime.isa.is_none()
        && let Some(tier) = std::env::var_os("KT_ISA").filter(|tier| !tier.is_empty())
    {
        let tier = tier.to_string_lossy();
        args.runtime.isa = Some(tier.parse().with_context(|| format!("the environment variable KT_ISA is `{tier}`"))?);
    }
    if args.tokens.contains(&0) {
        bail!("--tokens must be at least 1");
    }
    let most = args.tokens.iter().copied().max().unwrap_or(0) as u64;
    let call_bytes = |shape: &Shape| most.saturating_mul((shape.hidden + shape.top_k) as u64 * TOKEN_BYTES);
    let need = args.shape.0.iter().map(call_bytes).max().unwrap_or(0);
    let available = System::here().available();
    if need > available.bytes {
        bail!(
            "--tokens {most}: inputs, outputs and routing of a call would take {}, and {} are available ({})",
            human_bytes(need),
            human_bytes(available.bytes),
            available.from
        );
    }
    // A day for each case is more than anybody waits.
    if !(args.seconds > 0.0 && args.seconds <= 86_400.0) {
        bail!("--seconds must be above 0 and at most 86400");
    }
    if args.memory_gib.is_some_and(|g| !(g > 0.0 && g.is_finite())) {
        bail!("--memory-gib must be above 0");
    }
    let earlier = args.compare.as_deref().map(Earlier::read).transpose()?;
    let runtime = args.runtime.build()?;
    // What a format cannot have is told before anything is measured.
    let layers = layers(&runtime, &args)?;
    if args.dispatch {
        measure_dispatch(&runtime, &args, &layers)
    } else if args.scheduling {
        measure_scheduling(&runtime, &args, &layers)
    } else {
        measure(&runtime, &args, &layers, earlier)
    }
}

/// The shapes to measure, each with the formats that it can have.
fn layers<'a>(runtime: &Runtime, args: &'a BenchArgs) -> anyhow::Result<Vec<(&'a Shape, Vec<Format>)>> {
    let mut layers = Vec::new();
    let mut left_out = Vec::new();
    for shape in &args.shape.0 {
        let formats: &[Format] = match &args.formats {
            Formats::All => &kt::format::ALL,
            Formats::These(formats) => formats,
        };
        let mut fits = Vec::new();
        for &format in formats {
            match shape.source(format, 1).and_then(|source| runtime.plan(&source)) {
                Ok(plan) => fits.extend(plan.layers.into_iter().next().map(|layer| (format, layer.fit.rank))),
                Err(e) => left_out.push(format!("{}, {format}: {e}", shape.name)),
            }
        }
        // Rank 0 is the portable kernel's, which runs everything: not native, unless there is no other.
        if args.formats == Formats::All && fits.iter().any(|(_, rank)| *rank > 0) {
            fits.retain(|(_, rank)| *rank > 0);
        }
        layers.push((shape, fits.into_iter().map(|(format, _)| format).collect()));
    }
    if layers.iter().all(|(_, formats): &(_, Vec<_>)| formats.is_empty()) {
        bail!("nothing to measure: {}", left_out.join("; "));
    }
    left_out.iter().for_each(|why| eprintln!("left out: {why}"));
    Ok(layers)
}

fn measure(
    runtime: &Runtime,
    args: &BenchArgs,
    layers: &[(&Shape, Vec<Format>)],
    earlier: Option<Earlier>,
) -> anyhow::Result<()> {
    eprintln!("measuring limits ...");
    let system = System::here();
    let cap = args.runtime.isa.unwrap_or(Tier::Amx);
    let machine = Machine::here(&system, Tier::detect(cap).to_string(), runtime.threads());
    let bytes = READ_BYTES.min(system.available().bytes / 8);
    let cpus = cpus_of(runtime.team().topology(), runtime.threads());
    let meter = Meter::new(runtime.threads(), &cpus, bytes, cap)?;
    let limits = meter.measure();
    // Of JSON, only that goes to standard output.
    let tell = |text: String| {
        if args.json {
            eprintln!("{text}");
            return Ok(());
        }
        say!("{text}")
    };
    if args.json {
        say!("{}", machine.to_json(&limits))?;
    }
    tell(format!("{}, {} CPUs: {}", machine.cpu, machine.cpus, limits.summary()))?;
    if let Some(earlier) = &earlier {
        earlier.preface(&machine).into_iter().try_for_each(tell)?;
    }
    let mut lines = Vec::new();
    for (shape, formats) in layers.iter().filter(|(_, formats)| !formats.is_empty()) {
        tell(format!("\n{}", shape.title()))?;
        if !args.json {
            say!("{}{}", Line::header(), earlier.as_ref().map(|_| Comparison::header()).unwrap_or_default())?;
        }
        for &format in formats {
            let (experts, fit) = load(runtime, args, shape, format)?;
            for &tokens in &args.tokens {
                let line = case(runtime, &meter, args, shape, &experts, &fit, tokens)?;
                let comparison = earlier.as_ref().map(|earlier| earlier.compare(&line));
                if args.json {
                    let mut json = line.to_json();
                    if let Some(comparison) = &comparison {
                        json["earlier"] = comparison.as_ref().map(Comparison::to_json).into();
                    }
                    say!("{json}")?;
                } else {
                    let columns = comparison.map(|c| Comparison::columns(c.as_ref())).unwrap_or_default();
                    let doubt = line.speed.doubt().map(|why| format!("  DOUBTFUL: {why}")).unwrap_or_default();
                    say!("{}{columns}{doubt}", line.row())?;
                }
                lines.push(line);
            }
        }
    }
    for missing in earlier.iter().flat_map(|earlier| earlier.missing(&lines)) {
        tell(format!("earlier only: {missing}"))?;
    }
    let doubtful = lines.iter().filter(|l| l.speed.doubt().is_some()).count();
    if doubtful > 0 {
        tell(format!("{doubtful} of {} cases are doubtful; run them again when the machine is quiet", lines.len()))?;
    }
    Ok(())
}

fn case(
    runtime: &Runtime,
    meter: &Meter,
    args: &BenchArgs,
    shape: &Shape,
    experts: &Experts,
    fit: &Fit,
    tokens: usize,
) -> anyhow::Result<Line> {
    let factors = Factors::of(fit.inputs[0]);
    let speed = Caller::new(experts, shape, tokens).measure(meter, factors, args.seconds)?;
    let layer = experts.layers().first().context("no layers")?;
    let (backend, tier) = layer.backends().next().context("no backend")?;
    Ok(Line {
        backend: backend.into(),
        tier: tier.into(),
        format: layer.spec().format_label(),
        shape: shape.clone(),
        tokens,
        threads: runtime.threads(),
        factors,
        speed,
    })
}

fn measure_scheduling(runtime: &Runtime, args: &BenchArgs, layers: &[(&Shape, Vec<Format>)]) -> anyhow::Result<()> {
    let one_thread = RuntimeArgs { threads: Some(1), ..args.runtime.clone() }.build()?;
    let fits =
        |format: &Format| scheduling::tiny().source(*format, 1).inspect_err(|e| eprintln!("left out: {e}")).is_ok();
    let mut layers = layers.to_vec();
    layers.iter_mut().for_each(|(_, formats)| formats.retain(fits));
    layers.retain(|(_, formats)| !formats.is_empty());
    if layers.is_empty() {
        bail!("none of these formats can have the tiny layer's matrices; try --formats bf16,int8");
    }
    for (shape, formats) in layers {
        if !args.json {
            say!("{}; one token, {} threads", shape.title(), runtime.threads())?;
            say!("{}", Scheduling::header())?;
        }
        for format in formats {
            let scheduling = Scheduling::measure(runtime, &one_thread, format, args.seconds)?;
            let (experts, _) = load(runtime, args, shape, format)?;
            let mut caller = Caller::new(&experts, shape, 1);
            let length = Duration::from_secs_f64(args.seconds);
            caller.calls(length / 8, || ())?;
            let calls = caller.calls(length, || ())?;
            let one_token_us = Quartiles::of(calls.iter().map(|c| c.seconds * 1e6).collect()).median;
            if args.json {
                say!("{}", scheduling.to_json(shape, one_token_us))?;
            } else {
                say!("{}", scheduling.row(one_token_us))?;
            }
        }
    }
    Ok(())
}

fn measure_dispatch(runtime: &Runtime, args: &BenchArgs, layers: &[(&Shape, Vec<Format>)]) -> anyhow::Result<()> {
    if !args.json {
        say!("{}", Dispatch::header())?;
    }
    for line in dispatch::measure(runtime.threads(), args.seconds * 6.0)? {
        say!("{}", if args.json { line.to_json().to_string() } else { line.row() })?;
    }
    let cpus = runtime.team().topology().allowed().len();
    for (shape, formats) in layers {
        for &format in formats {
            let (experts, _) = load(runtime, args, shape, format)?;
            let shared = Shared::measure(&experts, shape, (runtime.threads(), cpus), args.seconds * 4.0)?;
            say!("{}", if args.json { shared.to_json().to_string() } else { shared.row() })?;
        }
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

fn load(runtime: &Runtime, args: &BenchArgs, shape: &Shape, format: Format) -> anyhow::Result<(Experts, Fit)> {
    let one = runtime.plan(&shape.source(format, 1)?)?;
    let layer_bytes = one.packed_bytes() + one.copied_bytes() + one.mapped_bytes();
    let layers = layer_count(layer_bytes, args.memory_gib, one.available.bytes);
    eprintln!("{format}: loading {layers} layers of {} ...", human_bytes(layer_bytes));
    let start = Instant::now();
    let experts = runtime.load(&shape.source(format, layers)?)?;
    eprintln!("{format}: loaded in {:.1} s", start.elapsed().as_secs_f64());
    eprint!("{}", cache_text(&format!("{format}: "), experts.packed_cache()));
    let fit = one.layers.into_iter().next().context("the plan of one layer has one layer")?.fit;
    Ok((experts, fit))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        bench: BenchArgs,
    }

    fn args(options: &[&str]) -> BenchArgs {
        Cli::try_parse_from([&["kt"], options].concat()).unwrap().bench
    }

    #[test]
    fn options_are_read() {
        let options = ["--shape", "mixtral,all", "--formats", "bf16"];
        assert!(Cli::try_parse_from([&["kt"], &options[..]].concat()).is_err());
        let options = ["--shape", "mixtral", "--formats", "bf16,int4-g64", "--tokens", "1,2", "--isa", "avx2"];
        let args = args(&options);
        assert_eq!(args.formats, Formats::These(vec![Format::Bf16, Format::Int4(kt::Group::Of(64))]));
        assert_eq!((args.tokens.as_slice(), args.runtime.isa), (&[1, 2][..], Some(Tier::Avx2)));
        for bad in [["--formats", "int3"], ["--isa", "sse9"], ["--shape", "qwen"]] {
            assert!(Cli::try_parse_from(["kt", bad[0], bad[1]]).is_err(), "{bad:?}");
        }
        assert!(Cli::try_parse_from(["kt", "--scheduling", "--compare", "x"]).is_err());
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
    fn shapes_get_the_formats_that_they_can_have() {
        let options = ["--shape", "2880x2880x4x2,256x256x4x2", "--formats", "q4_k,bf16"];
        let some = args(&options);
        let runtime = some.runtime.build().unwrap();
        let formats: Vec<_> = layers(&runtime, &some).unwrap().into_iter().map(|l| l.1).collect();
        assert_eq!(formats, [vec![Format::Bf16], vec![Format::Q4K, Format::Bf16]]);
        let none = layers(&runtime, &args(&["--shape", "2880x2880x4x2", "--formats", "q4_k"])).unwrap_err().to_string();
        assert!(none.contains("nothing to measure") && none.contains("multiples of 256"), "{none}");
        // The portable kernel is native to no format, unless it is all there is.
        let portable = args(&["--shape", "256x256x4x2", "--formats", "all", "--backend", "portable"]);
        assert_eq!(layers(&portable.runtime.build().unwrap(), &portable).unwrap()[0].1, kt::format::ALL);
        if runtime.candidates().iter().any(|c| c.name == "avx512" && c.backend.is_ok()) {
            let all = args(&["--shape", "256x256x4x2", "--formats", "all"]);
            let native = layers(&runtime, &all).unwrap().remove(0).1;
            for format in kt::format::ALL {
                let plan = runtime.plan(&all.shape.0[0].source(format, 1).unwrap()).unwrap();
                assert_eq!(native.contains(&format), plan.layers[0].backend != "portable", "{format}");
            }
            assert!(native.contains(&Format::Bf16));
        }
    }

    #[test]
    fn a_small_case_runs_and_its_numbers_agree() {
        let options = ["--shape", "256x128x8x2", "--formats", "bf16", "--seconds", "0.05", "--memory-gib", "0.002"];
        let args = args(&options);
        let runtime = args.runtime.build().unwrap();
        let shape = &args.shape.0[0];
        let (experts, fit) = load(&runtime, &args, shape, Format::Bf16).unwrap();
        assert!(experts.layers().len() >= 2);
        let meter = Meter::new(1, &[], 4 << 20, Tier::Portable).unwrap();
        let line = case(&runtime, &meter, &args, shape, &experts, &fit, 5).unwrap();
        assert_eq!((line.format.as_str(), line.tokens, line.threads), ("BF16", 5, runtime.threads()));
        let s = &line.speed;
        assert!((s.tera_op_per_s * 1e12 * s.seconds.median / shape.operations(5) - 1.0).abs() < 1e-9);
        // Five tokens with two experts each touch 2 to 8 experts of 3 * 256 * 128 * 2 bytes.
        let experts = s.gb_per_s * 1e9 * s.seconds.median / (3.0 * 256.0 * 128.0 * 2.0);
        assert!((1.0..10.0).contains(&experts), "{experts}");
        assert!(s.of_limit.low > 0.0 && s.of_limit.low <= s.of_limit.median && s.of_limit.median <= s.of_limit.high);
        assert!(s.slices >= 3 && s.limits.read_gb_per_s > 0.0);
    }

    #[test]
    fn too_much_memory_is_refused_with_the_plan() {
        let args = args(&["--shape", "2048x768x128x8", "--formats", "bf16", "--memory-gib", "100000"]);
        let runtime = args.runtime.build().unwrap();
        let error =
            load(&runtime, &args, &args.shape.0[0], Format::Bf16).err().expect("100 TiB are refused").to_string();
        assert!(error.contains("refusing to load") && error.contains("REFUSE"), "{error}");
    }
}
