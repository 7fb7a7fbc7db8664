//! Any checkpoint to any format: the library under `kt convert` and `kt verify`.
//!
//! ```text
//! source ─plan (headers only)─▶ Conversion ─write─▶ Finished (weights under OUT.partial) ─publish─▶ OUT
//! ```
//!
//! What the output will be is known to the byte before a weight is read: files, tensors, offsets. Tensors are then made on rayon's
//! threads and written in order; the bytes are the same for any number of threads and any memory setting. Whoever begins again after
//! a crash or on a full disk goes on where the journal ends, and gets the same bytes. The output has its name only when it is
//! complete.
//!
//! | output | layout |
//! | --- | --- |
//! | directory | safetensors shards; integers, FP8 per channel, MXFP4, MXFP8 and NVFP4 (which is kept, not made) as compressed-tensors has them, FP8 blocks alone as DeepSeek |
//! | directory of gpt-oss | as published: MXFP4 blocks and scales, or floats with inputs first; gate's and up's rows in turn |
//! | `.gguf` file | llama.cpp's names; experts of a layer stacked; the report's summary in the metadata, as `kt.convert` |
//!
//! Whole models cross from one container to the other where their family is in the table of `family.rs`; of others, the routed experts do.
//!
//! What all this costs in accuracy and in time is in `kt-core/CONVERSION.md`.

mod config;
mod dense;
mod disk;
mod encode;
mod family;
mod layout;
mod plan;
mod tokenizer;
mod values;
mod verify;
mod write;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::backend::Progress;
use crate::error::{Error, Result};
use crate::format::Format;
use crate::importance::Importance;
use crate::plan::human_bytes;
use crate::quantize::Errors;
use crate::source::WeightSource;
use encode::{From, Sums};
use plan::{Laid, Output, What};
use write::{Journal, Written};

pub use verify::{Verified, verify};
pub(crate) use write::{hex, write_whole};

/// The index of a directory's shards.
const INDEX: &str = "model.safetensors.index.json";
/// Key of a report's summary in GGUF metadata, and the bytes that are kept for it, filled up with spaces.
const SUMMARY: &str = "kt.convert";
const SUMMARY_BYTES: usize = 2048;
/// The report of a conversion in its directory.
const REPORT: &str = "kt-convert.json";

/// What holds the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Container {
    /// A Hugging Face directory.
    Safetensors,
    /// A GGUF file.
    Gguf,
}

impl Container {
    /// The one that an output's name asks for: `.gguf` is a file, all else a directory.
    pub fn of(output: &Path) -> Self {
        match output.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) {
            true => Container::Gguf,
            false => Container::Safetensors,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Container::Safetensors => "a directory of safetensors",
            Container::Gguf => "a GGUF file",
        }
    }
}

/// What to convert to, and how.
#[derive(Debug, Clone)]
pub struct Options {
    /// What holds the output.
    pub container: Container,
    /// Formats of the routed experts' gate, up and down; `None` keeps those that they have.
    pub experts: Option<[Format; 3]>,
    /// Format of other linear layers; `None` keeps theirs (or BF16, where the output cannot hold it).
    pub dense: Option<Format>,
    /// Format of embedding and head; `None` as for `dense`.
    pub head: Option<Format>,
    /// Leaves out everything that is not a routed expert.
    pub experts_only: bool,
    /// How much each input of the routed experts counts in their rounding; `None`: all alike.
    pub importance: Option<Arc<Importance>>,
    /// Bytes of memory to work in. A tensor's pages in the system's file cache are not counted.
    pub memory: u64,
    /// Bytes that a shard of a directory has at most, if it has more than one tensor.
    pub shard_bytes: u64,
}

impl Options {
    /// The whole model into a container, experts in one format, all else as it is; 2 GiB of memory, shards of 5 GB.
    pub fn new(container: Container, experts: Format) -> Self {
        Options {
            container,
            experts: Some([experts; 3]),
            dense: None,
            head: None,
            experts_only: false,
            importance: None,
            memory: 2 << 30,
            shard_bytes: 5_000_000_000,
        }
    }
}

/// A conversion that is planned.
pub struct Conversion {
    source: Arc<dyn WeightSource>,
    output: PathBuf,
    options: Options,
    plan: Output,
    about: Value,
}

impl Conversion {
    /// Plans a conversion of `source` into `output`; reads headers, and matrices that only data describe (of GPTQ and the like).
    ///
    /// # Errors
    /// A model that the container cannot hold, a format that does not fit a shape, or options that make no sense.
    pub fn plan(source: Arc<dyn WeightSource>, output: &Path, options: Options) -> Result<Self> {
        // Without what ends a path and says nothing: `OUT/` is `OUT`, and what is beside it has its name.
        let output = output.components().collect::<PathBuf>();
        let name = output.file_name().and_then(|n| n.to_str());
        let name = name.ok_or_else(|| Error::file(&output, "the output needs a name that is text"))?;
        if options.experts_only && (options.dense.is_some() || options.head.is_some()) {
            return Err(Error::Invalid("experts only, and a format for other tensors: leave out one of them".into()));
        }
        if options.memory < 1 << 20 {
            let what = format!("{} of memory are too few: give 1 MiB at least", human_bytes(options.memory));
            return Err(Error::Invalid(what));
        }
        let plan = plan::plan(&*source, name, &options)?;
        let mut about = json!({
            "kt": env!("CARGO_PKG_VERSION"),
            "source": source.path().display().to_string(),
            "identity": identity(&*source, &plan)?,
        });
        if let Some(importance) = &options.importance {
            about["importance"] = json!(importance.digest());
        }
        Ok(Conversion { source, output, options, plan, about })
    }

    /// Bytes that the files with weights will have.
    pub fn bytes(&self) -> u64 {
        self.plan.files.iter().map(plan::File::bytes).sum()
    }

    /// What else the user should know: tensors that are not in the format asked for, and why.
    pub fn notes(&self) -> &[String] {
        &self.plan.notes
    }

    /// The output, without a separator at its end.
    pub fn output(&self) -> &Path {
        &self.output
    }

    fn journal_path(&self) -> PathBuf {
        beside(&self.output, ".journal")
    }

    fn partial(&self) -> PathBuf {
        beside(&self.output, ".partial")
    }

    /// Whether the output is there, complete, by an earlier run of this very conversion that ended before it could say so. Puts away
    /// what that run left behind.
    ///
    /// # Errors
    /// The output is there, and not of this conversion: it is not overwritten.
    pub fn is_published(&self) -> Result<bool> {
        if !self.is_taken() {
            return Ok(false);
        }
        if !self.journal_path().exists() || !self.has_moved() {
            return Err(self.taken());
        }
        Journal::open(&self.journal_path(), &self.about)?;
        self.clear()?;
        Ok(true)
    }

    /// Whether there is something of the output's name already: but for an empty directory, which a directory takes the place of, it is never overwritten.
    pub fn is_taken(&self) -> bool {
        let empty = || std::fs::read_dir(&self.output).is_ok_and(|mut d| d.next().is_none());
        self.output.exists() && !(self.options.container == Container::Safetensors && empty())
    }

    fn taken(&self) -> Error {
        Error::file(&self.output, "is there already; remove it, or choose another output")
    }

    /// Whether the files with weights are what the output has, and are no longer in the partial directory.
    fn has_moved(&self) -> bool {
        self.plan.files.iter().all(|file| {
            let there = match self.options.container {
                Container::Safetensors => self.output.join(&file.name),
                Container::Gguf => self.output.clone(),
            };
            std::fs::metadata(there).is_ok_and(|m| m.is_file() && m.len() == file.bytes())
                && !self.partial().join(&file.name).exists()
        })
    }

    /// Removes the journal and what is left of the partial directory.
    fn clear(&self) -> Result<()> {
        let partial = self.partial();
        if partial.exists() {
            std::fs::remove_dir_all(&partial).map_err(|source| Error::Io { path: partial, source })?;
        }
        let journal = self.journal_path();
        std::fs::remove_file(&journal).map_err(|source| Error::Io { path: journal, source })
    }

    /// Makes and writes all weights, or goes on with it, beside the output: `OUT.partial` and `OUT.journal`. Progress counts bytes
    /// of the output.
    ///
    /// # Errors
    /// The output is there already; too little room on the disk, which is known before anything is written; bad tensors, files that cannot be written (both leave
    /// what is done so far, to go on with); [`Error::Cancelled`].
    pub fn write(&self, progress: &Progress) -> Result<Finished<'_>> {
        if self.is_published()? {
            return Err(Error::file(&self.output, "is complete already"));
        }
        let partial = self.partial();
        let io = |source| Error::Io { path: partial.clone(), source };
        let parent = self.output.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::create_dir_all(parent).map_err(|source| Error::Io { path: parent.to_owned(), source })?;
        let mut journal = Journal::open(&self.journal_path(), &self.about)?;
        std::fs::create_dir_all(&partial).map_err(io)?;
        self.check_room(&partial)?;
        progress.start(self.bytes());
        let memory = self.options.memory;
        let from = From { source: &*self.source, importance: self.options.importance.as_deref() };
        let written = write::write(&from, &self.plan.files, &partial, &mut journal, memory, progress)?;
        let finished = Finished { report: self.report(&written), conversion: self, _journal: journal };
        if self.options.container == Container::Safetensors {
            for (name, content) in &self.plan.sides {
                write::write_whole(&partial.join(name), content)?;
            }
            finished.write_index(None)?;
        }
        Ok(finished)
    }

    /// Refuses to begin what does not fit the disk; what is written already counts as room.
    fn check_room(&self, partial: &Path) -> Result<()> {
        let io = |source| Error::Io { path: partial.to_owned(), source };
        let mut there = 0;
        for entry in std::fs::read_dir(partial).map_err(io)? {
            there += entry.and_then(|e| e.metadata()).map_err(io)?.len();
        }
        let sides: u64 = self.plan.sides.iter().map(|(_, content)| content.len() as u64).sum();
        // The report takes about as much as the journal.
        let need = (self.bytes() + sides + 2 * write::journal_bytes(&self.plan.files)).saturating_sub(there);
        match disk::free_bytes(partial) {
            Some(free) if free < need => {
                let what = format!(
                    "{} are still to be written, but {} are free on this disk",
                    human_bytes(need),
                    human_bytes(free)
                );
                Err(Error::file(&self.output, format!("{what}; make room, or choose another output")))
            }
            _ => Ok(()),
        }
    }

    fn report(&self, written: &[Written]) -> Report {
        let mut report = Report::default();
        for (file, written) in self.plan.files.iter().zip(written) {
            let sha256 = written.sha256.clone();
            report.files.push(FileReport { name: file.name.clone(), bytes: file.bytes(), sha256 });
            for (item, sums) in file.items.iter().zip(&written.sums) {
                if matches!(item.what, What::Bytes(_) | What::Bias(..) | What::BothBiases(..))
                    || item.laid == Laid::Scales
                {
                    continue;
                }
                if matches!(item.what, What::Expert(..) | What::Both(..)) {
                    report.experts.add(sums);
                }
                report.tensors.push(TensorReport {
                    name: item.name.clone(),
                    from: item.from,
                    to: item.format,
                    errors: sums.errors(),
                });
            }
        }
        report
    }
}

/// What tells one conversion from another: every header and item of the output, and the files of the source by size and time: those that it is made of,
/// where it knows them, else all in its directory.
fn identity(source: &dyn WeightSource, plan: &Output) -> Result<String> {
    let mut hash = Sha256::new();
    let io = |source_error| Error::Io { path: source.path().to_owned(), source: source_error };
    for file in &plan.files {
        hash.update(&file.header);
        hash.update(format!("{:?} {:?} {:?}", file.name, file.items, file.padding));
    }
    for (name, content) in &plan.sides {
        hash.update(format!("{name} {}", content.len()));
        hash.update(content);
    }
    let mut files = Vec::new();
    if let Some(fingerprint) = source.fingerprint() {
        hash.update(fingerprint.to_le_bytes());
    } else if source.path().is_dir() {
        for entry in std::fs::read_dir(source.path()).map_err(io)? {
            files.push(entry.map_err(io)?.path());
        }
        files.sort();
    } else if source.path().is_file() {
        files.push(source.path().to_owned());
    }
    for file in files {
        let about = std::fs::metadata(&file).map_err(io)?;
        hash.update(format!("{file:?} {} {:?}", about.len(), about.modified().ok()));
    }
    Ok(write::hex(&hash.finalize()))
}

/// A path with something behind its last name.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// A tensor of the output that was encoded, or an expert's part of one.
#[derive(Debug, Clone)]
pub struct TensorReport {
    /// Its name in the source.
    pub name: String,
    /// What it was stored as.
    pub from: Format,
    /// What it is stored as.
    pub to: Format,
    /// How far its values are from what they were; 0 where they are carried as they are.
    pub errors: Errors,
}

/// A file with weights.
#[derive(Debug, Clone)]
pub struct FileReport {
    /// Its name in the output.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// Its checksum (SHA-256) in hexadecimal digits; of a GGUF file, with spaces in place of the summary in its metadata.
    pub sha256: String,
}

/// What was written, and what it cost in accuracy.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Every tensor that was encoded, every expert's projection by itself.
    pub tensors: Vec<TensorReport>,
    /// The files.
    pub files: Vec<FileReport>,
    experts: Sums,
}

impl Report {
    /// The tensors of the largest error ([`Errors::rms_ratio`]), the worst first.
    pub fn worst(&self, count: usize) -> Vec<&TensorReport> {
        let mut all: Vec<_> = self.tensors.iter().collect();
        all.sort_by(|a, b| b.errors.rms_ratio.total_cmp(&a.errors.rms_ratio).then_with(|| a.name.cmp(&b.name)));
        all.truncate(count);
        all
    }

    /// The error over all routed experts' values together.
    pub fn experts(&self) -> Errors {
        self.experts.errors()
    }

    fn summary(&self, evaluation: Option<&Value>) -> Value {
        let files: serde_json::Map<String, Value> =
            self.files.iter().map(|f| (f.name.clone(), json!({"bytes": f.bytes, "sha256": f.sha256}))).collect();
        let worst = self.worst(1).first().map(|t| json!({"tensor": t.name, "rms": t.errors.rms_ratio}));
        let experts = self.experts();
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "files": files,
            "error": {"experts_rms": experts.rms_ratio, "experts_mean_abs": experts.mean_abs_ratio, "worst": worst},
            "evaluation": evaluation,
        })
    }

    /// The report as it is written beside the output.
    pub fn to_json(&self, evaluation: Option<&Value>) -> Value {
        let tensor = |t: &TensorReport| {
            json!({
                "name": t.name, "from": t.from.to_string(), "to": t.to.to_string(),
                "rms": t.errors.rms_ratio, "mean_abs": t.errors.mean_abs_ratio,
            })
        };
        let mut json = self.summary(evaluation);
        json["worst"] = self.worst(10).into_iter().map(tensor).collect();
        json["tensors"] = self.tensors.iter().map(tensor).collect();
        json
    }
}

/// Weights that are written, and not yet published under the output's name.
pub struct Finished<'a> {
    conversion: &'a Conversion,
    report: Report,
    /// Held until the output has its name.
    _journal: Journal,
}

impl Finished<'_> {
    /// The output where it is now; it can be opened.
    pub fn path(&self) -> PathBuf {
        let partial = self.conversion.partial();
        match (self.conversion.options.container, self.report.files.first()) {
            (Container::Gguf, Some(file)) => partial.join(&file.name),
            _ => partial,
        }
    }

    /// What was written, and what it cost.
    pub fn report(&self) -> &Report {
        &self.report
    }

    fn write_index(&self, evaluation: Option<&Value>) -> Result<()> {
        let index = plan::index(&self.conversion.plan.files, self.report.summary(evaluation));
        write::write_whole(&self.conversion.partial().join(INDEX), &index)
    }

    /// Puts the summary into the place that a GGUF file keeps for it. Its checksum is that of the file with spaces there.
    fn write_summary(&self, evaluation: Option<&Value>) -> Result<()> {
        let Some((start, file)) = self.conversion.plan.files.first().and_then(|f| Some((f.summary?, f))) else {
            return Ok(());
        };
        let mut text = self.report.summary(evaluation).to_string();
        if text.len() > SUMMARY_BYTES {
            // Names without end: what verifies the file is enough.
            text = json!({"files": self.report.summary(None)["files"]}).to_string();
        }
        if text.len() <= SUMMARY_BYTES {
            write::overwrite(&self.conversion.partial().join(&file.name), start, text.as_bytes())?;
        }
        Ok(())
    }

    /// Gives the output its name, its report beside (of GGUF: `OUT.gguf.json`) or in it (`kt-convert.json`). `evaluation` is what the
    /// caller measured with it.
    ///
    /// # Errors
    /// A file that cannot be written or renamed.
    pub fn publish(self, evaluation: Option<&Value>) -> Result<Report> {
        let (conversion, partial) = (self.conversion, self.conversion.partial());
        let output = &conversion.output;
        let io = |source| Error::Io { path: output.clone(), source };
        if conversion.is_taken() {
            return Err(conversion.taken());
        }
        let report = plan::pretty(&self.report.to_json(evaluation));
        match conversion.options.container {
            Container::Safetensors => {
                write::write_whole(&partial.join(REPORT), &report)?;
                self.write_index(evaluation)?;
                sync(&partial)?;
                std::fs::rename(&partial, output).map_err(io)?;
            }
            Container::Gguf => {
                write::write_whole(&beside(output, ".json"), &report)?;
                self.write_summary(evaluation)?;
                std::fs::rename(self.path(), output).map_err(io)?;
            }
        }
        sync(output.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")))?;
        conversion.clear()?;
        Ok(self.report)
    }

    /// Leaves the weights where they are, in a directory that nothing takes for a checkpoint, with the report in it. The same
    /// conversion with other thresholds then ends at once.
    ///
    /// # Errors
    /// The report cannot be written.
    pub fn reject(self, evaluation: Option<&Value>) -> Result<PathBuf> {
        let partial = self.conversion.partial();
        for name in ["config.json", INDEX] {
            let path = partial.join(name);
            if path.exists() {
                std::fs::remove_file(&path).map_err(|source| Error::Io { path, source })?;
            }
        }
        let report = partial.join(REPORT);
        write::write_whole(&report, &plan::pretty(&self.report.to_json(evaluation)))?;
        Ok(report)
    }
}

/// Makes renames in a directory last.
fn sync(dir: &Path) -> Result<()> {
    #[cfg(unix)]
    std::fs::File::open(dir).and_then(|d| d.sync_all()).map_err(|source| Error::Io { path: dir.to_owned(), source })?;
    #[cfg(not(unix))]
    let _ = dir;
    Ok(())
}
