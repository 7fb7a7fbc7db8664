//! Opening and loading the model that `run` and `eval` work with, and telling about it on stderr.

use std::error::Error;
use std::fs::OpenOptions;
use std::io::{ErrorKind, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use indicatif::{ProgressBar, ProgressStyle};
use kt::placement::{PlacementOptions, Stream};
use kt::plan::{Change, Remedy, Verdict, human_bytes};
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
    /// Add the N experts of least weight of each token one layer later. Changes what the model says, a little.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub defer: usize,
    /// Save which experts each token was given to, layer by layer (.json): what placements are compared on.
    #[arg(long, value_name = "FILE", value_parser = trace_file)]
    pub trace: Option<PathBuf>,
}

/// The name of a trace.
fn trace_file(text: &str) -> Result<PathBuf, String> {
    match extension(Path::new(text)).as_deref() {
        Some("json") => Ok(text.into()),
        _ => Err("the name must end in .json".into()),
    }
}

/// What a file's name ends in, in small letters.
pub(crate) fn extension(path: &Path) -> Option<String> {
    path.extension().map(|e| e.to_string_lossy().to_ascii_lowercase())
}

/// A model's headers, read and checked.
pub struct Opened {
    /// The checkpoint, its experts re-encoded if it was asked for.
    pub source: Arc<dyn WeightSource>,
    /// The checkpoint as it is.
    pub stored: Arc<dyn WeightSource>,
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
    /// As [`open_on`](Self::open_on), or the runtime cannot be had.
    pub fn open(&self) -> Result<Opened> {
        self.open_on(self.runtime.build()?)
    }

    /// Reads the headers of the model, for a runtime that is there.
    ///
    /// # Errors
    /// The model cannot be opened or is of a family that the host does not run, or the trace could not be written.
    pub fn open_on(&self, runtime: Runtime) -> Result<Opened> {
        let (mut source, name): (Arc<dyn WeightSource>, _) = match &self.model {
            Some(path) => (kt::open(path)?, path.display().to_string()),
            None => (built_in()?, "the built-in tiny model".to_owned()),
        };
        let stored = source.clone();
        if let Some(format) = self.experts_as {
            source = Arc::new(Requantized::new(source, [format; 3])?);
        }
        let config = ModelConfig::read(&*source)?;
        // Candle computes on rayon's threads: they are held to the same number.
        start_rayon(runtime.threads())?;
        let placement = self.placement.options(&runtime)?;
        let (defer, trace) = (self.defer, self.trace.clone());
        if let Some(path) = &trace {
            check_writable(path)?;
        }
        Ok(Opened { source, stored, config, runtime, name, stored_as: self.experts_as, placement, defer, trace })
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
    /// Whether [`load`](Self::load) would find room.
    ///
    /// # Errors
    /// [`kt::Error::Memory`]: it would not.
    pub fn check_room(&self, positions: usize, rows: Rows) -> Result<()> {
        let plan = Model::plan(&self.runtime, &*self.source, &self.config, positions, rows, &self.placement)?;
        if plan.verdict() == Verdict::Refuse {
            bail!(kt::Error::Memory(Box::new(plan)));
        }
        Ok(())
    }

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

/// Starts rayon's threads, on which candle computes and conversions are made: so many, or for 0 as many as rayon finds right. Those that run
/// already stay as they are.
///
/// # Errors
/// The system starts no more threads.
pub(crate) fn start_rayon(threads: usize) -> Result<()> {
    match rayon::ThreadPoolBuilder::new().num_threads(threads).build_global() {
        // Only the system's refusal has a source; the other error is that there are threads already.
        Err(e) if e.source().is_some() => Err(e).context(
            "threads cannot be started; ask for fewer by --threads, or raise the limit (ulimit -u, or pids.max of the control group)",
        ),
        _ => Ok(()),
    }
}

/// Makes sure that a file can be written, before the work that it is for. What is in it stays.
///
/// # Errors
/// It cannot; the file is named.
pub(crate) fn check_writable(path: &Path) -> Result<()> {
    let name = || path.display().to_string();
    match path.metadata() {
        // Who reads a pipe would take its being closed for the end.
        Ok(there) if !there.is_file() && !there.is_dir() => {}
        Ok(_) => drop(OpenOptions::new().write(true).open(path).with_context(name)?),
        // Only what was made here is removed again.
        Err(_) => match OpenOptions::new().write(true).create_new(true).open(path) {
            Ok(_) => std::fs::remove_file(path).with_context(name)?,
            // A link to what is not there yet.
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            Err(e) => return Err(e).with_context(name),
        },
    }
    Ok(())
}

/// Reads a text file, or standard input for `-`.
///
/// # Errors
/// It cannot be read or is not UTF-8.
pub fn read_text(path: &Path) -> Result<String> {
    if path.as_os_str() == "-" {
        std::io::read_to_string(std::io::stdin()).context("standard input")
    } else {
        std::fs::read_to_string(path).with_context(|| path.display().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_can_be_written_is_left_as_it_was() {
        let dir = std::env::temp_dir().join(format!("kt-writable-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (absent, there) = (dir.join("absent"), dir.join("there"));
        std::fs::write(&there, "text").unwrap();
        check_writable(&absent).unwrap();
        check_writable(&there).unwrap();
        assert!(!absent.exists() && std::fs::read_to_string(&there).unwrap() == "text");
        for bad in [dir.clone(), dir.join("no/file")] {
            let why = format!("{:#}", check_writable(&bad).unwrap_err());
            assert!(why.starts_with(bad.to_str().unwrap()), "{why}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
