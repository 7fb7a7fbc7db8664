//! `kt convert` and `kt verify`: any checkpoint to any format, and whether one is still what was written.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use kt::convert::{Container, Conversion, Finished, Options, Report};
use kt::plan::human_bytes;
use kt::{Format, Importance, Progress, Runtime, WeightSource};
use serde_json::json;

use crate::eval::{Score, score};
use crate::host::Rows;
use crate::model::{ModelArgs, memory_line, read_text, resident_bytes, start_rayon, with_progress_bar};
use crate::options::RuntimeArgs;

/// Convert a checkpoint: a directory of safetensors, or a GGUF file, in any format to any other.
///
/// Between directories and GGUF files, models of Qwen2-MoE, Qwen3-MoE, DeepSeek-V2 and V3, Mixtral, GLM-4.5, MiniMax-M2 and gpt-oss are
/// carried whole; of other families, the routed experts (--experts-only). Within one container, all are.
///
/// Ended at any moment and started again, it goes on where it was; the output has its name only when it is complete. What is lost is what was
/// being made in one go: a part of --memory, up to 256 MiB.
#[derive(Debug, clap::Args)]
pub struct ConvertArgs {
    /// The model: a directory with safetensors files, or a GGUF file [default: the tiny one that is built in].
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// What to write: a file where it ends with .gguf, otherwise a directory of safetensors.
    #[arg(long, value_name = "PATH")]
    output: PathBuf,
    /// Format of the routed experts, or three for gate, up and down; `keep` re-encodes nothing. Directories hold bf16, fp8-block,
    /// fp8-channel, mxfp8, f16, f32, int4-g32 (g64, g128), int4-channel, int4-asym-g32, int8-channel, int8-g32, int8-asym-…, mxfp4 (those of gpt-oss: bf16 and mxfp4);
    /// GGUF files hold bf16, q8_0, q4_0, q4_k, q5_k, q6_k, mxfp4 and its other types.
    #[arg(long, value_name = "FORMAT", value_delimiter = ',', required = true)]
    to: Vec<String>,
    /// Format of all other linear layers [default: as they are, or bf16 where the output cannot hold that].
    #[arg(long, value_name = "FORMAT")]
    dense: Option<Format>,
    /// Format of embedding and head [default: as they are, or bf16 where the output cannot hold that].
    #[arg(long, value_name = "FORMAT")]
    head: Option<Format>,
    /// Write nothing but the routed experts.
    #[arg(long, conflicts_with_all = ["dense", "head", "eval"])]
    experts_only: bool,
    /// Round the experts' weights by how much their inputs count: a file of `kt run --importance`, or of llama.cpp's llama-imatrix.
    #[arg(long, value_name = "FILE")]
    importance: Option<PathBuf>,
    /// Memory to work in: bytes, or with KiB, MiB, GiB.
    #[arg(long, value_name = "SIZE", default_value = "2GiB", value_parser = parse_size)]
    memory: u64,
    /// Most bytes of a shard of a directory.
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = parse_size)]
    shard_size: u64,
    /// Show what would be written, and write nothing.
    #[arg(long)]
    dry_run: bool,
    /// Fail where a tensor's error (root mean square, in proportion to its values) is larger.
    #[arg(long, value_name = "RATIO", allow_negative_numbers = true, value_parser = most)]
    max_error: Option<f64>,
    /// Measure perplexity on this text, and KL divergence from the source model; `-` reads standard input.
    #[arg(long, value_name = "FILE")]
    eval: Option<PathBuf>,
    /// Tokens of a window of that text.
    #[arg(long, value_name = "N", default_value_t = 256)]
    window: usize,
    /// Fail where the KL divergence (nats per token) is larger.
    #[arg(long, value_name = "NATS", requires = "eval", allow_negative_numbers = true, value_parser = most)]
    max_kl: Option<f64>,
    /// Print the report's summary as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

/// Check that the files of a converted checkpoint are what was written.
#[derive(Debug, clap::Args)]
pub struct VerifyArgs {
    /// The directory or GGUF file.
    path: PathBuf,
}

/// A number of bytes: `2GiB`, `500MB`, `1073741824`.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kib" | "k" => 1 << 10,
        "mib" | "m" => 1 << 20,
        "gib" | "g" => 1 << 30,
        "kb" => 1000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        other => return Err(format!("`{other}` is no unit of bytes; KiB, MiB, GiB, KB, MB and GB are")),
    };
    let count: u64 = digits.trim().parse().map_err(|_| format!("`{text}` is no size: write 2GiB or 500MB"))?;
    count.checked_mul(unit).ok_or_else(|| format!("`{text}` is too large"))
}

/// What a result may be at most.
fn most(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|most| *most >= 0.0).ok_or_else(|| "a number, 0 or more".into())
}

/// The formats of gate, up and down; `None` keeps them.
fn formats(to: &[String]) -> Result<Option<[Format; 3]>> {
    if to == ["keep"] {
        return Ok(None);
    }
    let parsed: Vec<Format> = to.iter().map(|f| f.parse()).collect::<Result<_, _>>()?;
    match parsed[..] {
        [all] => Ok(Some([all; 3])),
        [gate, up, down] => Ok(Some([gate, up, down])),
        _ => bail!("--to takes one format, or three: gate, up, down"),
    }
}

/// Runs `kt convert`.
///
/// # Errors
/// Anything wrong with the model, the options or the disk; a result beyond `--max-error` or `--max-kl`.
pub fn run(args: ConvertArgs) -> Result<()> {
    if args.window < 2 {
        bail!("--window must be at least 2: the first token of a window is not predicted");
    }
    // Whatever the options of the runtime ask for that cannot be is told now.
    let runtime = args.runtime.build()?;
    // Unless told otherwise, encoders take all CPUs, not one a core as products do.
    start_rayon(args.runtime.threads.map_or(0, |_| runtime.threads()))?;
    let source: Arc<dyn WeightSource> = match &args.model {
        Some(path) => kt::open(path)?,
        None => crate::model::built_in()?,
    };
    if let Some(path) = args.importance.as_ref().filter(|path| path.is_dir()) {
        bail!("{}: a directory; --importance wants a file, as `kt run --importance FILE` writes it", path.display());
    }
    let options = Options {
        container: Container::of(&args.output),
        experts: formats(&args.to)?,
        dense: args.dense,
        head: args.head,
        experts_only: args.experts_only,
        importance: args.importance.as_ref().map(Importance::open).transpose()?.map(Arc::new),
        memory: args.memory,
        shard_bytes: args.shard_size,
    };
    let conversion = Conversion::plan(source, &args.output, options)?;
    if !args.dry_run && conversion.is_published()? {
        eprintln!("complete already: an earlier run finished it");
        return Ok(());
    }
    let text = args.eval.as_ref().map(|text| text_for(&args, text, runtime)).transpose()?;
    eprintln!("output   {}, {}", args.output.display(), human_bytes(conversion.bytes()));
    for note in conversion.notes() {
        eprintln!("note     {note}");
    }
    if args.dry_run {
        if conversion.is_taken() {
            eprintln!("note     {} is there already, and is never overwritten", args.output.display());
        }
        return Ok(());
    }
    let (progress, start) = (Progress::default(), Instant::now());
    let finished = with_progress_bar("writing", &progress, || conversion.write(&progress))?;
    let seconds = start.elapsed().as_secs_f64();
    let rate = conversion.bytes() as f64 / 1e6 / seconds.max(1e-9);
    eprintln!("written  in {seconds:.2} s, {rate:.0} MB/s of output");
    eprint!("{}", summary(finished.report()));
    let evaluation = text.map(|ids| evaluate(&args, &ids, &conversion, &finished)).transpose()?;
    let json = evaluation.as_ref().map(Evaluation::to_json);
    if let Some(e) = &evaluation {
        eprintln!(
            "quality  perplexity {:.4}, the source's {:.4}; KL divergence {:.6}",
            e.output.perplexity(),
            e.source.perplexity(),
            e.kl
        );
    }
    if let Some(why) = too_bad(&args, finished.report(), evaluation.as_ref()) {
        let report = finished.reject(json.as_ref())?;
        bail!("{why}; nothing was published, and the report is {}", report.display());
    }
    let report = finished.publish(json.as_ref())?;
    eprintln!("{}", memory_line());
    if args.json {
        let mut all = report.to_json(json.as_ref());
        if let Some(map) = all.as_object_mut() {
            map.remove("tensors");
            map.insert("seconds".into(), json!(seconds));
            map.insert("peak_resident_bytes".into(), json!(resident_bytes().map(|r| r.1)));
        }
        say!("{all:#}")?;
    }
    Ok(())
}

/// What a threshold says against the result.
fn too_bad(args: &ConvertArgs, report: &Report, evaluation: Option<&Evaluation>) -> Option<String> {
    if let (Some(max), Some(worst)) = (args.max_error, report.worst(1).first()) {
        // Not a number is no good result either.
        if worst.errors.rms_ratio.partial_cmp(&max).is_none_or(|order| order.is_gt()) {
            let error = worst.errors.rms_ratio;
            return Some(format!("`{}` has an error of {error:.5}, more than --max-error {max}", worst.name));
        }
    }
    if let (Some(max), Some(e)) = (args.max_kl, evaluation)
        && e.kl.partial_cmp(&max).is_none_or(|order| order.is_gt())
    {
        return Some(format!("the KL divergence is {:.6}, more than --max-kl {max}", e.kl));
    }
    None
}

fn summary(report: &Report) -> String {
    let mut text =
        format!("error    {:.5} of all experts (root mean square, in proportion)\n", report.experts().rms_ratio);
    for t in report.worst(10).into_iter().filter(|t| t.errors.rms_ratio > 0.0) {
        text += &format!("worst    {:.5} {} ({} to {})\n", t.errors.rms_ratio, t.name, t.from, t.to);
    }
    text
}

/// How the output predicts a text beside the source.
struct Evaluation {
    source: Score,
    output: Score,
    /// Mean over tokens of KL(source ‖ output), in nats.
    kl: f64,
}

impl Evaluation {
    fn to_json(&self) -> serde_json::Value {
        json!({
            "tokens": self.source.tokens,
            "source_perplexity": self.source.perplexity(),
            "perplexity": self.output.perplexity(),
            "kl": self.kl,
        })
    }
}

/// The text of an evaluation, and whatever is wrong with it or with running the source: before anything is converted.
fn text_for(args: &ConvertArgs, text: &Path, runtime: Runtime) -> Result<Vec<u32>> {
    let model = model_args(args, args.model.clone());
    let opened = model.open_on(runtime)?;
    let ids = model.tokenizer(&opened)?.encode(&read_text(text)?)?;
    if ids.len() < 2 {
        bail!("{}: too short to predict anything", text.display());
    }
    opened.check_room(args.window.min(ids.len()), Rows::All)?;
    Ok(ids)
}

/// Runs both models over the text, one after the other: the logits of the first wait in a file.
fn evaluate(args: &ConvertArgs, ids: &[u32], conversion: &Conversion, finished: &Finished<'_>) -> Result<Evaluation> {
    let mut name = conversion.output().as_os_str().to_owned();
    name.push(".logits");
    let logits = Removed(name.into());
    let io = || logits.0.display().to_string();
    let window = args.window.min(ids.len());
    let mut file = BufWriter::new(File::create(&logits.0).with_context(io)?);
    let loaded = model_args(args, args.model.clone()).open()?.load(window, Rows::All)?;
    let source = score(&loaded, ids, args.window, |rows| {
        rows.iter().try_for_each(|l| file.write_all(&l.to_le_bytes())).with_context(io)
    })?;
    file.into_inner().map_err(|e| e.into_error()).with_context(io)?;
    let vocabulary = loaded.vocabulary();
    drop(loaded);
    let mut file = BufReader::new(File::open(&logits.0).with_context(io)?);
    let loaded = model_args(args, Some(finished.path())).open()?.load(window, Rows::All)?;
    if loaded.vocabulary() != vocabulary {
        bail!("the output has a vocabulary of {}, the source one of {vocabulary}", loaded.vocabulary());
    }
    let mut divergence = 0.0;
    let output = score(&loaded, ids, args.window, |rows| {
        let mut before = vec![0u8; vocabulary * 4];
        for after in rows.chunks_exact(vocabulary) {
            file.read_exact(&mut before).with_context(io)?;
            let before = before.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
            divergence += kl_divergence(&before.collect::<Vec<_>>(), after);
        }
        Ok(())
    })?;
    Ok(Evaluation { source, output, kl: divergence / ids.len() as f64 })
}

fn model_args(args: &ConvertArgs, model: Option<PathBuf>) -> ModelArgs {
    ModelArgs { model, runtime: args.runtime.clone(), ..ModelArgs::default() }
}

/// A file that is removed when this is dropped.
struct Removed(PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// KL(softmax(p) ‖ softmax(q)) in nats.
fn kl_divergence(p: &[f32], q: &[f32]) -> f64 {
    let norm = |logits: &[f32]| {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
        max + logits.iter().map(|&l| (l as f64 - max).exp()).sum::<f64>().ln()
    };
    let (norm_p, norm_q) = (norm(p), norm(q));
    p.iter()
        .zip(q)
        .map(|(&p, &q)| {
            let (p, q) = (p as f64 - norm_p, q as f64 - norm_q);
            p.exp() * (p - q)
        })
        .sum()
}

/// Runs `kt verify`.
///
/// # Errors
/// A file that is missing or damaged, or a checkpoint without checksums.
pub fn verify(args: VerifyArgs) -> Result<()> {
    let progress = Progress::default();
    let verified = with_progress_bar("verifying", &progress, || kt::convert::verify(&args.path, &progress))?;
    say!(
        "{}: {} files with {} are as they were written",
        args.path.display(),
        verified.files,
        human_bytes(verified.bytes)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(parse_size("2GiB"), Ok(2 << 30));
        assert_eq!(parse_size("500MB"), Ok(500_000_000));
        assert_eq!(parse_size("17"), Ok(17));
        for wrong in ["", "GiB", "2 parsecs", "-1", "99999999999GiB"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn limits_are_numbers_from_zero_on() {
        assert_eq!((most("0"), most("0.5")), (Ok(0.0), Ok(0.5)));
        for wrong in ["", "NaN", "-1", "-inf", "much"] {
            assert!(most(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn divergence_of_known_distributions() {
        let logits = |p: [f64; 2]| p.map(|p| (p.ln() + 3.0) as f32);
        let kl = kl_divergence(&logits([0.5, 0.5]), &logits([0.25, 0.75]));
        let due = 0.5 * (0.5f64 / 0.25).ln() + 0.5 * (0.5f64 / 0.75).ln();
        assert!((kl - due).abs() < 1e-6, "{kl} {due}");
        assert_eq!(kl_divergence(&[1.0, 2.0], &[1.0, 2.0]), 0.0);
    }
}
