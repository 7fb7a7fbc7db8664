//! `kt plan`: what loading a model would take, from headers alone.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use kt::cpu::tier::Tier;
use kt::plan::human_bytes;
use kt::quantize::Requantized;
use kt::{Format, LoadOptions, Plan, Runtime};

use crate::host::{Model, ModelConfig, Rows, Tokenizer};
use crate::limits::{Meter, READ_BYTES, cpus_of};
use crate::options::{RuntimeArgs, threads_text};
use crate::placing::PlacementArgs;
use crate::system::System;

/// Positions that the KV cache is planned for when nothing else is said.
const DEFAULT_CONTEXT: usize = 4096;

/// Show what loading a model would take: bytes, backend per layer, and whether it fits. Reads headers only.
///
/// What a process holds before it loads (program, tokenizer) is counted by this process's own. For families that `kt run` runs, dense weights and KV cache are counted; for others, the experts alone.
#[derive(Debug, clap::Args)]
pub struct PlanArgs {
    /// The model: a directory with safetensors files, or a GGUF file.
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// Print JSON, all sizes in bytes.
    #[arg(long)]
    json: bool,
    /// Say for each layer why its backend was chosen, and why the others were not.
    #[arg(long)]
    explain: bool,
    /// Plan for the experts re-encoded at load, e.g. int4, int8, q8_0 [default: as the model has them].
    #[arg(long, value_name = "FORMAT")]
    experts_as: Option<Format>,
    /// Positions that the KV cache is for [default: 4096, or the most that the model was made for].
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Measure the read bandwidth of this machine, about a second, and predict the decode speed at the end of the context.
    #[arg(long)]
    measure: bool,
    #[command(flatten)]
    runtime: RuntimeArgs,
    #[command(flatten)]
    placement: PlacementArgs,
}

/// Runs the command.
pub fn run(args: PlanArgs) -> anyhow::Result<()> {
    crate::put(answer(&args)?)
}

fn answer(args: &PlanArgs) -> anyhow::Result<String> {
    let path = args
        .model
        .as_deref()
        .context("no model given; name one: kt plan --model DIRECTORY (with safetensors files) or --model FILE.gguf")?;
    let mut source = kt::open(path)?;
    if let Some(format) = args.experts_as {
        source = Arc::new(Requantized::new(source, format)?);
    }
    let runtime = args.runtime.build()?;
    let placement = args.placement.options(&runtime)?;
    // Held as `kt run` holds it.
    let _tokenizer = Tokenizer::of(&*source).ok();
    let (plan, scope) = match ModelConfig::read(&*source) {
        Ok(config) => {
            let most = config.max_positions.unwrap_or(DEFAULT_CONTEXT);
            let context = args.context.unwrap_or(DEFAULT_CONTEXT.min(most));
            let plan = Model::plan(&runtime, &*source, &config, context, Rows::Last, &placement)?;
            (plan, format!("experts and host, {context} positions"))
        }
        Err(why) => (
            runtime.plan_with(&*source, &LoadOptions { placement, ..LoadOptions::default() })?,
            format!("experts alone; the host does not run this model: {why:#}"),
        ),
    };
    let speed = args.measure.then(|| Speed::measure(&runtime, args.runtime.isa, &plan)).transpose()?;
    if args.json {
        let mut json = plan.to_json();
        if let Some(speed) = &speed {
            json["read_gb_per_s"] = speed.read_gb_per_s.into();
            json["tokens_per_s"] = speed.tokens_per_s.into();
        }
        json["scope"] = scope.into();
        json["model"] = path.display().to_string().into();
        json["threads"] = runtime.threads().into();
        if args.explain {
            json["explain"] = plan.explain().into();
        }
        return Ok(format!("{json:#}\n"));
    }
    let mut text = format!("{}, {}; {scope}\n{plan}\n", path.display(), threads_text(runtime.threads()));
    if let Some(Speed { read_gb_per_s, tokens_per_s }) = speed {
        text += &format!(
            "predicted decode speed: {tokens_per_s:.1} tokens/s ({} a token, {read_gb_per_s:.1} GB/s read)\n",
            human_bytes(plan.token_bytes())
        );
    }
    if args.explain {
        text += &format!("\n{}", plan.explain());
    } else {
        plan.notes.iter().for_each(|note| text += &format!("note: {note}\n"));
    }
    Ok(text)
}

/// What a plan's decode speed comes to on this machine.
struct Speed {
    /// 10^9 bytes per second, by all threads of the runtime.
    read_gb_per_s: f64,
    tokens_per_s: f64,
}

impl Speed {
    fn measure(runtime: &Runtime, isa: Option<Tier>, plan: &Plan) -> anyhow::Result<Speed> {
        let system = System::here();
        let bytes = READ_BYTES.min(system.available().bytes / 8);
        let cpus = cpus_of(runtime.team().topology(), runtime.threads());
        let meter = Meter::new(runtime.threads(), &cpus, bytes, isa.unwrap_or(Tier::Amx))?;
        let read_gb_per_s = meter.read_gb_per_s();
        Ok(Speed { read_gb_per_s, tokens_per_s: plan.tokens_per_second(read_gb_per_s * 1e9) })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        plan: PlanArgs,
    }

    const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/model");

    fn plan(options: &[&str]) -> anyhow::Result<String> {
        let args = ["kt"].iter().chain(options).copied();
        answer(&Cli::try_parse_from(args).expect("options that exist").plan)
    }

    #[test]
    fn the_model_that_comes_along_is_planned() {
        let table = plan(&["--model", MODEL, "--explain", "--threads", "1"]).unwrap();
        assert!(table.contains("1 thread;") && table.contains("BF16") && table.contains("FITS"), "{table}");
        assert!(table.contains("not portable: ") || table.contains("on portable"), "{table}");
        let json = plan(&["--model", MODEL, "--json"]).unwrap();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let cache = |context: &str| {
            let json = plan(&["--model", MODEL, "--json", "--context", context]).unwrap();
            let json: serde_json::Value = serde_json::from_str(&json).unwrap();
            json["resident_bytes"].as_u64().unwrap()
        };
        // 4 layers, keys and values of 2 heads of 64 numbers of 4 bytes.
        assert!(cache("900") - cache("100") >= 800 * 4 * 2 * 2 * 64 * 4);
        let layers = json["layers"].as_array().unwrap();
        assert!(!layers.is_empty() && layers.iter().all(|l| l["format"] == "BF16"), "{json}");
    }

    #[test]
    fn experts_can_be_planned_in_another_format() {
        let bytes = |options: &[&str]| {
            let json = plan(&[&["--model", MODEL, "--json", "--backend", "portable"], options].concat()).unwrap();
            let json: serde_json::Value = serde_json::from_str(&json).unwrap();
            json["expert_token_bytes"].as_u64().unwrap()
        };
        let (bf16, int8) = (bytes(&[]), bytes(&["--experts-as", "int8"]));
        assert!(int8 > bf16 * 2 / 5 && int8 < bf16 * 3 / 5, "{int8} of {bf16}");
    }

    #[test]
    fn speed_is_predicted_from_the_bytes_of_a_token() {
        let json = plan(&["--model", MODEL, "--json", "--measure", "--context", "100"]).unwrap();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let number = |key: &str| json[key].as_f64().unwrap();
        let bytes = number("token_bytes");
        // Experts, keys and values, and more: attention, router, head.
        assert!(bytes > number("expert_token_bytes") + 100.0 * (4 * 2 * 2 * 64 * 4) as f64, "{json}");
        let speed = number("read_gb_per_s") * 1e9 / bytes;
        assert!(number("read_gb_per_s") > 0.0 && (number("tokens_per_s") / speed - 1.0).abs() < 1e-9, "{json}");
        assert!(plan(&["--model", MODEL, "--measure"]).unwrap().contains("predicted decode speed"));
    }

    #[test]
    fn errors_say_what_to_do() {
        assert!(plan(&[]).unwrap_err().to_string().contains("--model DIRECTORY"));
        let error = plan(&["--model", "/no/such/model"]).unwrap_err().to_string();
        assert!(error.contains("/no/such/model"), "{error}");
        // What is of no use to a plan.
        for option in [["--defer", "1"], ["--trace", "t.json"]] {
            assert!(Cli::try_parse_from(["kt", "--model", MODEL, option[0], option[1]]).is_err(), "{option:?}");
        }
        let error = plan(&["--model", MODEL, "--backend", "abacus"]).unwrap_err().to_string();
        assert!(error.contains("abacus") && error.contains("portable"), "{error}");
    }
}
