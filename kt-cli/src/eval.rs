//! `kt eval`: how well a model, as loaded here, predicts a text.
//!
//! The text is encoded once, without special tokens, and cut into windows; each is a sequence of its own, from position 0 and with
//! an empty cache; the last one may be shorter. In each window every token but the first is predicted.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::host::{Cache, Model, Rows};
use crate::model::{ModelArgs, check_writable, memory_line, read_text, resident_bytes};
use crate::observe::ObserveArgs;

/// Measure how well a model predicts a text: negative log-likelihood, perplexity, bits per byte; or dump its logits.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("input").required(true).args(["text", "ids"])))]
pub struct EvalArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The text; `-` reads standard input.
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Token ids in place of a text, separated by commas.
    #[arg(long, value_name = "ID,ID,…", value_delimiter = ',')]
    ids: Option<Vec<u32>>,
    /// Tokens of a window.
    #[arg(long, value_name = "N", default_value_t = 256)]
    window: usize,
    /// Write the logits of all tokens to this safetensors file: `logits`, F32 [tokens, vocabulary].
    #[arg(long, value_name = "FILE")]
    logits: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    observe: ObserveArgs,
}

/// How well a text was predicted.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Score {
    /// Tokens of the text.
    pub tokens: usize,
    /// Tokens that were predicted.
    pub predicted: usize,
    /// Negative log-likelihood of the predicted tokens in nats, all together.
    pub nats: f64,
}

impl Score {
    /// Mean negative log-likelihood of a predicted token.
    pub fn mean_nats(&self) -> f64 {
        self.nats / self.predicted as f64
    }

    /// Perplexity: how many equally likely tokens there would be to choose from.
    pub fn perplexity(&self) -> f64 {
        self.mean_nats().exp()
    }

    /// Bits for each of the text's bytes.
    pub fn bits_per_byte(&self, bytes: usize) -> f64 {
        self.nats / std::f64::consts::LN_2 / bytes as f64
    }
}

/// Predicts `ids` in windows; `each` sees the logits `[tokens, vocabulary]` of every window.
///
/// # Errors
/// A failure of the model or of `each`.
pub fn score(model: &Model, ids: &[u32], window: usize, mut each: impl FnMut(&[f32]) -> Result<()>) -> Result<Score> {
    let mut cache = Cache::new(model.config(), window.min(ids.len()))?;
    let mut score = Score { tokens: ids.len(), ..Score::default() };
    for ids in ids.chunks(window.max(1)) {
        cache.reset();
        let logits = model.forward(ids, &mut cache, Rows::All)?;
        for (row, &next) in logits.chunks_exact(model.vocabulary()).zip(&ids[1..]) {
            score.nats += negative_log_likelihood(row, next);
            score.predicted += 1;
        }
        each(&logits)?;
    }
    Ok(score)
}

/// `-ln softmax(logits)[id]`.
fn negative_log_likelihood(logits: &[f32], id: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    let sum: f64 = logits.iter().map(|&l| (l as f64 - max).exp()).sum();
    max + sum.ln() - logits[id as usize] as f64
}

/// A safetensors file of one F32 tensor, written as its rows come.
struct LogitsFile {
    path: PathBuf,
    file: BufWriter<File>,
}

impl LogitsFile {
    fn create(path: &Path, tokens: usize, vocabulary: usize) -> Result<Self> {
        let bytes = tokens * vocabulary * 4;
        let mut header = serde_json::json!({
            "logits": {"dtype": "F32", "shape": [tokens, vocabulary], "data_offsets": [0, bytes]}
        })
        .to_string();
        header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
        let mut file = BufWriter::new(File::create(path).with_context(|| path.display().to_string())?);
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        Ok(LogitsFile { path: path.to_owned(), file })
    }

    fn write(&mut self, logits: &[f32]) -> Result<()> {
        let mut each = logits.iter().map(|l| l.to_le_bytes());
        each.try_for_each(|bytes| self.file.write_all(&bytes)).with_context(|| self.path.display().to_string())
    }

    fn finish(mut self) -> Result<()> {
        self.file.flush().with_context(|| self.path.display().to_string())
    }
}

/// Runs the command.
///
/// # Errors
/// Anything wrong with the model, the text or the files.
pub fn run(args: EvalArgs) -> Result<()> {
    if args.window < 2 {
        bail!("--window must be at least 2: the first token of a window is not predicted");
    }
    let opened = args.model.open()?;
    args.observe.check()?;
    if let Some(path) = &args.logits {
        check_writable(path)?;
    }
    let (ids, bytes) = match (&args.text, &args.ids) {
        (Some(path), _) => {
            let text = read_text(path)?;
            (args.model.tokenizer(&opened)?.encode(&text)?, Some(text.len()))
        }
        (None, ids) => (ids.clone().unwrap_or_default(), None),
    };
    if ids.is_empty() {
        bail!("nothing to predict: no token");
    }
    let model = opened.load(args.window.min(ids.len()), Rows::All)?;
    let mut file = match &args.logits {
        Some(path) => Some(LogitsFile::create(path, ids.len(), model.vocabulary())?),
        None => None,
    };
    let start = Instant::now();
    let score = score(&model, &ids, args.window, |logits| match &mut file {
        Some(file) => file.write(logits),
        None => Ok(()),
    })?;
    let time = start.elapsed();
    let (seconds, stats) = (time.as_secs_f64(), model.experts().stats());
    args.observe.save_heat_map(&model, &opened.name)?;
    opened.save_trace(&model)?;
    if let Some(file) = file {
        file.finish()?;
    }
    let rate = score.tokens as f64 / seconds.max(1e-9);
    // A single token predicts nothing: there are logits then, and no likelihood.
    let known = score.predicted > 0;
    if args.json {
        let number = |v: f64| if known { serde_json::json!(v) } else { serde_json::Value::Null };
        let mut json = serde_json::json!({
            "tokens": score.tokens,
            "predicted": score.predicted,
            "window": args.window,
            "nll": number(score.mean_nats()),
            "perplexity": number(score.perplexity()),
            "bits_per_byte": bytes.filter(|_| known).map(|b| score.bits_per_byte(b)),
            "seconds": seconds,
            "tokens_per_second": rate,
            "resident_bytes": resident_bytes().map(|r| r.0),
            "peak_resident_bytes": resident_bytes().map(|r| r.1),
        });
        if args.observe.stats {
            json["stats"] = stats.to_json();
        }
        return say!("{json:#}");
    }
    say!("tokens         {} in windows of {}, {} predicted", score.tokens, args.window, score.predicted)?;
    if known {
        say!("nll            {:.6}", score.mean_nats())?;
        say!("perplexity     {:.4}", score.perplexity())?;
        if let Some(bytes) = bytes {
            say!("bits per byte  {:.4}", score.bits_per_byte(bytes))?;
        }
    }
    eprintln!("speed    {} tokens in {seconds:.2} s, {rate:.1} tokens/s", score.tokens);
    eprint!("{}", args.observe.report("text", &stats, time));
    eprintln!("{}", memory_line());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn likelihoods_add_up_to_one() {
        let logits = [1.0, -2.0, 30.0, 29.5];
        let sum: f64 = (0..4).map(|id| (-negative_log_likelihood(&logits, id)).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-12);
        let uniform = Score { tokens: 5, predicted: 4, nats: 4.0 * negative_log_likelihood(&[0.0; 8], 3) };
        assert!((uniform.perplexity() - 8.0).abs() < 1e-9);
        assert!((uniform.bits_per_byte(2) - 6.0).abs() < 1e-9);
    }
}
