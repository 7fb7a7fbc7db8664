//! `kt run`: continues a prompt.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use kt::importance::Recorder;
use kt::placement::LiveOptions;

use crate::host::text::TextStream;
use crate::host::{Cache, Rows, Sampler};
use crate::model::{ModelArgs, check_writable, memory_line};
use crate::observe::ObserveArgs;
use crate::{is_read, put};

/// What the built-in model continues when it is not told otherwise.
const DEFAULT_PROMPT: &str = "The ownership system in Rust";

/// Continue a prompt: text on stdout, numbers on stderr. Without a model, a tiny built-in one.
#[derive(Debug, clap::Args)]
pub struct RunArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The text to continue, as it is (no chat template); `-` reads it from standard input.
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Most tokens to generate.
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_tokens: u32,
    /// How freely to choose: 0 takes the likeliest token always.
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_negative_numbers = true)]
    temperature: f32,
    /// Choose among the K likeliest tokens only; 0 means all.
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,
    /// Choose among the fewest tokens whose probabilities add up to P.
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f32,
    /// Seed of the choice: the same one gives the same text.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Stop before this text (may be given several times).
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Go on behind the model's end-of-text tokens.
    #[arg(long)]
    ignore_eos: bool,
    /// Do not repeat the prompt in front of the text.
    #[arg(long)]
    no_echo: bool,
    /// Save how large the inputs of each expert were, for `kt convert --importance`. Takes several times as long.
    #[arg(long, value_name = "FILE")]
    importance: Option<PathBuf>,
    #[command(flatten)]
    observe: ObserveArgs,
}

/// Runs the command.
///
/// # Errors
/// Anything wrong with the model, the options or the output.
pub fn run(args: RunArgs) -> Result<()> {
    let mut sampler = Sampler::new(args.temperature, args.top_k, args.top_p, args.seed)?;
    let prompt = match (&args.prompt, &args.model.model) {
        (Some(p), _) if p == "-" => crate::model::read_text("-".as_ref())?,
        (Some(p), _) => p.clone(),
        (None, None) => DEFAULT_PROMPT.to_owned(),
        (None, Some(_)) => bail!("no prompt given; add --prompt TEXT"),
    };
    let opened = args.model.open()?;
    args.observe.check()?;
    if let Some(path) = &args.importance {
        // Written beside, and renamed.
        if path.exists() && !path.is_file() {
            bail!("{}: not a plain file, and --importance would take its place", path.display());
        }
        let mut beside = path.clone().into_os_string();
        beside.push(".partial");
        check_writable(beside.as_ref())?;
    }
    let tokenizer = args.model.tokenizer(&opened)?;
    let ids = tokenizer.encode_prompt(&prompt)?;
    if ids.is_empty() {
        bail!("the prompt is empty; this model needs at least one token to continue");
    }
    let most = args.max_tokens as usize;
    let positions = ids.len() + most;
    let mut model = opened.load(positions, Rows::Last)?;
    if args.importance.is_some() {
        model.record_importance(Recorder::new(opened.stored.clone()));
    }
    let mut cache = Cache::new(model.config(), positions)?;
    let mut read = args.no_echo || is_read(put(&prompt))?;

    let start = Instant::now();
    let mut logits = model.forward(&ids, &mut cache, Rows::Last)?;
    let prefill = start.elapsed();
    let prefill_stats = model.experts().stats();
    model.experts().reset_stats();
    let mut stream = TextStream::new(&tokenizer, &args.stop);
    let (mut generated, mut steps) = (0, 0);
    let mut live = if args.model.placement.live { Some(model.experts().live(LiveOptions::default())?) } else { None };
    let start = Instant::now();
    let mut moved = start;
    let ended = loop {
        if !read {
            break "nobody reading on";
        }
        if !logits.iter().any(|l| l.is_finite()) {
            bail!("{}: no logit is a number after {generated} tokens; weights or config are broken", opened.name);
        }
        if generated == most {
            break "the number of tokens asked for";
        }
        let id = sampler.next(&logits);
        generated += 1;
        if !args.ignore_eos && model.config().stop_ids.contains(&id) {
            break "the model's end of text";
        }
        let piece = stream.push(id)?;
        read = is_read(put(&piece.text))?;
        if piece.stopped {
            break "a stop text";
        }
        if generated < most {
            logits = model.forward(&[id], &mut cache, Rows::Last)?;
            steps += 1;
            if let Some(live) = &mut live {
                let elapsed = moved.elapsed();
                moved = Instant::now();
                if let Err(e) = model.experts().rebalance(live, elapsed) {
                    eprintln!("warning  {e}");
                }
            }
        }
    };
    if ended != "a stop text" {
        is_read(put(stream.finish()?.text))?;
    }
    is_read(say!(""))?;
    let decode = start.elapsed();
    let speed = |tokens: usize, time: Duration| {
        let seconds = time.as_secs_f64();
        format!("{tokens} tokens in {seconds:.3} s, {:.1} tokens/s", tokens as f64 / seconds.max(1e-9))
    };
    eprintln!("prefill  {}", speed(ids.len(), prefill));
    eprint!("{}", args.observe.report("prefill", &prefill_stats, prefill));
    if steps > 0 {
        eprintln!("decode   {}", speed(steps, decode));
        eprint!("{}", args.observe.report("decode", &model.experts().stats(), decode));
    }
    if let Some(live) = &live {
        eprintln!("placed   {}", live.report());
    }
    eprintln!("ended    after {generated} tokens, by {ended}");
    eprintln!("{}", memory_line());
    opened.save_trace(&model)?;
    if let (Some(path), Some(recorder)) = (&args.importance, model.importance()) {
        recorder.save(path)?;
    }
    args.observe.save_heat_map(&model, &opened.name)
}
