//! Opening and loading the model that `run` and `eval` work with, and telling about it on stderr.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bytes::Bytes;
use indicatif::{ProgressBar, ProgressStyle};
use kt::placement::{PlacementOptions, Stream};
use kt::plan::{Change, Remedy, human_bytes};
use kt::quantize::Requantized;
use kt::source::safetensors::SafetensorsSource;
use kt::{Format, Plan, Progress, Runtime, WeightSource};

use crate::host::{Model, ModelConfig, Rows, Tokenizer};
use crate::options::{RuntimeArgs, cache_text, threads_text};
use crate::placing::PlacementArgs;

/// Which model, and on what.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ModelArgs {
    /// The model: a directory with safetensors files, or a GGUF file [default: a tiny one that is built in].
    #[arg(long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// A tokenizer.json to use in place of the model's own tokenizer.
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// Re-encode the routed experts into this format while loading: bf16, fp8, int8, int4, q8_0, q4_k, q6_k …
    #[arg(long, value_name = "FORMAT")]
    pub experts_as: Option<Format>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub runtime: RuntimeArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub placement: PlacementArgs,
}

/// A model's headers, read and checked.
pub struct Opened {
    /// The checkpoint.
    pub source: Arc<dyn WeightSource>,
    /// Its shape.
    pub config: ModelConfig,
    /// What will run it.
    pub runtime: Runtime,
    /// What the model is called in reports: its path.
    pub name: String,
    stored_as: Option<Format>,
    placement: PlacementOptions,
    defer: usize,
    trace: Option<PathBuf>,
}

/// The model inside this program: a small Qwen3-MoE that imitates Rust documentation.
pub fn built_in() -> kt::Result<Arc<dyn WeightSource>> {
    macro_rules! file {
        ($name:literal) => {
            (
                $name.to_string(),
                Bytes::from_static(include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/model/", $name))),
            )
        };
    }
    let files = SafetensorsSource::from_files(
        "built-in",
        vec![
            file!("config.json"),
            file!("generation_config.json"),
            file!("tokenizer.json"),
            file!("tokenizer_config.json"),
            file!("model.safetensors"),
        ],
    );
    Ok(Arc::new(files?))
}

impl ModelArgs {
    /// Reads the headers of the model and builds the runtime.
    ///
    /// # Errors
    /// The model cannot be opened, is of a family that the host does not run, or the runtime cannot be had.
    pub fn open(&self) -> Result<Opened> {
        let (mut source, name): (Arc<dyn WeightSource>, _) = match &self.model {
            Some(path) => (kt::open(path)?, path.display().to_string()),
            None => (built_in()?, "the built-in tiny model".to_owned()),
        };
        if let Some(format) = self.experts_as {
            source = Arc::new(Requantized::new(source, [format; 3])?);
        }
        let config = ModelConfig::read(&*source)?;
        let runtime = self.runtime.build()?;
        // Candle computes on rayon's threads: they are held to the same number. Fails only when the pool exists already.
        let _ = rayon::ThreadPoolBuilder::new().num_threads(runtime.threads()).build_global();
        let placement = self.placement.options(&runtime)?;
        let (defer, trace) = (self.placement.defer, self.placement.trace.clone());
        Ok(Opened { source, config, runtime, name, stored_as: self.experts_as, placement, defer, trace })
    }

    /// The tokenizer named on the command line, or the model's own.
    ///
    /// # Errors
    /// There is none, or one that cannot be read.
    pub fn tokenizer(&self, opened: &Opened) -> Result<Tokenizer> {
        match &self.tokenizer {
            Some(path) => Tokenizer::from_file(path),
            None => Tokenizer::of(&*opened.source),
        }
    }
}

impl Opened {
    /// Plans, tells about it on stderr, and loads the model for up to `positions` tokens and the logits of `rows` of them.
    ///
    /// # Errors
    /// It would not fit, which is known before anything is loaded; or a bad tensor.
    pub fn load(&self, positions: usize, rows: Rows) -> Result<Model> {
        let plan = Model::plan(&self.runtime, &*self.source, &self.config, positions, rows, &self.placement)?;
        eprint!("{}", self.summary(&plan));
        if let Some(most) = self.config.max_positions.filter(|&most| positions > most) {
            eprintln!("warning  {positions} positions asked for, but the model was made for {most}");
        }
        let progress: Arc<Progress> = Arc::default();
        let start = Instant::now();
        let mut model = with_progress_bar("loading", &progress, || {
            Model::load(&self.runtime, &self.source, &self.config, (positions, rows), &self.placement, progress.clone())
        })?;
        model.defer(self.defer);
        if self.trace.is_some() {
            model.experts().record_trace();
        }
        eprintln!("loaded   in {:.2} s", start.elapsed().as_secs_f64());
        eprint!("{}", cache_text("cache    ", model.packed_cache()));
        for residence in model.experts().residence() {
            eprintln!("memory   {residence}");
        }
        if self.placement.stream == Stream::Measured {
            match model.experts().stream_from() {
                Some(tokens) => {
                    eprintln!("stream   layers go to the GPU for passes of {tokens} tokens and more, as measured")
                }
                None => eprintln!("stream   never: it was slower at every number of tokens"),
            }
        }
        Ok(model)
    }

    /// Saves what routers chose since loading, if it was asked for.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save_trace(&self, model: &Model) -> Result<()> {
        if let Some(path) = &self.trace {
            model.experts().take_trace().save(path)?;
            eprintln!("trace    {}", path.display());
        }
        Ok(())
    }

    fn summary(&self, plan: &Plan) -> String {
        let (config, layers) = (&self.config, self.source.layers());
        let experts = match layers.first() {
            Some(l) => format!("{} with {} experts, {} per token", layers.len(), l.experts, l.top_k),
            None => "none with experts".into(),
        };
        let stored: u64 = plan.layers.iter().map(|l| l.stored_bytes).sum();
        let mut labels: Vec<_> = plan.layers.iter().map(|l| l.format.as_str()).collect();
        labels.dedup();
        let from = if self.stored_as.is_some() { "re-encoded at load as" } else { "in" };
        let mut text = format!(
            "model    {}: {}, {} layers ({experts}), hidden size {}\n\
             weights  experts {from} {}, {}; the rest {}; {}\n",
            self.name,
            config.family,
            config.layers,
            config.hidden,
            labels.join(", "),
            human_bytes(stored),
            human_bytes(self.source.dense_bytes()),
            threads_text(self.runtime.threads()),
        );
        for line in plan.explain().lines() {
            text += &format!("backend  {line}\n");
        }
        for (i, device) in plan.devices.iter().enumerate() {
            let (experts, bytes) = (plan.device_experts(i), human_bytes(plan.device_bytes(i)));
            let free = human_bytes(device.device.free_bytes);
            text += &format!(
                "memory   {experts} experts, {bytes}, on {} ({}), {free} free\n",
                device.backend, device.device.label
            );
        }
        let own = plan.packed_bytes() + plan.copied_bytes();
        let (own, mapped) = (human_bytes(own), human_bytes(plan.mapped_bytes()));
        text += &format!("memory   experts {own} packed, {mapped} in place");
        text += &format!("; scratch {}", human_bytes(plan.scratch_bytes));
        for extra in plan.extra.iter().filter(|e| e.bytes > 0) {
            text += &format!("; {} {}", extra.label, human_bytes(extra.bytes));
        }
        text += &format!("\nmemory   {}: {}\n", plan.verdict(), plan.reason());
        let options = options_for(plan);
        if !options.is_empty() {
            text += &format!("memory   what helps: {}\n", options.join("; or "));
        }
        text
    }
}

/// The options of `kt run` and `kt eval` that give a plan a better verdict.
pub fn options_for(plan: &Plan) -> Vec<String> {
    let option = |remedy: &Remedy| {
        let option = match &remedy.change {
            Change::ExpertsAs(format) => format!("--experts-as {}", format.to_string().to_lowercase()),
            Change::PassTokens(n) => format!("--pass-tokens {n}"),
            Change::Threads(n) => format!("--threads {n}"),
            Change::Positions(n) => format!("a prompt and --max-tokens of {n} positions together"),
            _ => return None,
        };
        (remedy.verdict < plan.verdict())
            .then(|| format!("{option} ({} needed, {})", human_bytes(remedy.need_bytes), remedy.verdict))
    };
    plan.remedies.iter().filter_map(option).collect()
}

/// Runs `load`; when that takes longer than half a second, and somebody looks at stderr, a bar shows its progress, speed and time left.
pub(crate) fn with_progress_bar<T>(label: &str, progress: &Progress, load: impl FnOnce() -> T) -> T {
    if !std::io::stderr().is_terminal() {
        return load();
    }
    std::thread::scope(|scope| {
        let (done, wait) = mpsc::channel::<()>();
        scope.spawn(move || {
            if wait.recv_timeout(Duration::from_millis(500)) != Err(mpsc::RecvTimeoutError::Timeout) {
                return;
            }
            let bar = ProgressBar::new(progress.total_bytes());
            let template = format!("{label:<8} [{{wide_bar}}] {{bytes}}/{{total_bytes}} {{bytes_per_sec}} {{eta}}");
            if let Ok(style) = ProgressStyle::with_template(&template) {
                bar.set_style(style.progress_chars("=> "));
            }
            while wait.recv_timeout(Duration::from_millis(100)) == Err(mpsc::RecvTimeoutError::Timeout) {
                bar.set_length(progress.total_bytes());
                bar.set_position(progress.done_bytes());
            }
            bar.finish_and_clear();
        });
        let result = load();
        drop(done);
        result
    })
}

/// Resident memory of this process now, and at most so far; `None` where the system does not say.
pub fn resident_bytes() -> Option<(u64, u64)> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let field = |key: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(key))?;
        Some(line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()? * 1024)
    };
    Some((field("VmRSS")?, field("VmHWM")?))
}

/// [`resident_bytes`] as a line of a report.
pub fn memory_line() -> String {
    match resident_bytes() {
        Some((now, most)) => format!("memory   {} resident, {} at most", human_bytes(now), human_bytes(most)),
        None => "memory   unknown on this system".into(),
    }
}

/// Reads a text file, or standard input for `-`.
///
/// # Errors
/// It cannot be read or is not UTF-8.
pub fn read_text(path: &std::path::Path) -> Result<String> {
    if path.as_os_str() == "-" {
        std::io::read_to_string(std::io::stdin()).context("standard input")
    } else {
        std::fs::read_to_string(path).with_context(|| path.display().to_string())
    }
}
