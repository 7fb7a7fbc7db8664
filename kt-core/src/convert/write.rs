//! Writing the files of a plan: made on all threads, written in order by one, resumable after any end.
//!
//! ```text
//! OUT.partial/   the files; X.partial until complete and synced, then X
//! OUT.journal    one line of JSON each: what is converted into what; an item that is on the disk; a file that is complete
//! ```
//!
//! Items are made in batches. A batch is written and synced before its lines go into the journal, so that what the journal says
//! is on the disk holds after a crash of the machine, too. Whoever begins again with the same plan goes on behind the last line.

use std::fs::{File as Fs, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, sync_channel};

use rayon::prelude::*;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::encode::{self, From, Made, STEP, Sums};
use super::layout::{self, Sides};
use super::plan::{File, Item, Laid, What};
use crate::backend::Progress;
use crate::error::{Error, Result};
use crate::source::WeightSource;

/// A complete file.
#[derive(Debug, Clone, PartialEq)]
pub struct Written {
    pub sha256: String,
    /// Of each item.
    pub sums: Vec<Sums>,
}

/// The lines of a journal, and the journal opened behind them. Nobody else writes it while this is held.
pub struct Journal {
    path: PathBuf,
    file: Fs,
    lines: Vec<Value>,
}

impl Journal {
    /// Opens or begins a journal; `about` is its first line. What was torn off at its end is cut.
    ///
    /// # Errors
    /// It is of another conversion, or another process has it.
    pub fn open(path: &Path, about: &Value) -> Result<Self> {
        let io = |source| Error::Io { path: path.to_owned(), source };
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(io)?;
        if file.try_lock().is_err() {
            return Err(Error::file(
                path,
                "another process is converting into the same output; wait for it or stop it",
            ));
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(io)?;
        let (mut lines, mut end) = (Vec::new(), 0);
        for line in bytes.split_inclusive(|&b| b == b'\n').filter(|l| l.ends_with(b"\n")) {
            let Ok(value) = serde_json::from_slice::<Value>(line) else { break };
            lines.push(value);
            end += line.len();
        }
        let mut journal = Journal { path: path.to_owned(), file, lines };
        match journal.lines.first() {
            Some(first) if first != about => {
                let what = "an unfinished conversion of another source or with other options is here; remove this file and \
                            the `.partial` directory beside it to begin anew, or choose another output";
                return Err(Error::file(path, what));
            }
            Some(_) => {
                journal.file.set_len(end as u64).map_err(io)?;
                journal.file.seek(SeekFrom::End(0)).map_err(io)?;
                journal.lines.remove(0);
            }
            None => {
                journal.file.set_len(0).map_err(io)?;
                journal.file.seek(SeekFrom::Start(0)).map_err(io)?;
                journal.append(std::slice::from_ref(about))?;
            }
        }
        Ok(journal)
    }

    /// Adds lines.
    fn append(&mut self, lines: &[Value]) -> Result<()> {
        let text: String = lines.iter().map(|l| format!("{l}\n")).collect();
        self.file.write_all(text.as_bytes()).map_err(|source| Error::Io { path: self.path.clone(), source })
    }

    /// What is there already of each file: sums of the items that are on the disk, and the checksum of a complete file.
    fn state(&self, files: &[File]) -> Vec<(Vec<Sums>, Option<String>)> {
        let mut state: Vec<(Vec<Sums>, Option<String>)> = vec![Default::default(); files.len()];
        for line in &self.lines {
            let at = line.get("file").and_then(Value::as_u64).and_then(|i| state.get_mut(usize::try_from(i).ok()?));
            let Some((items, sha256)) = at else { break };
            let number = |key: &str| line.get(key).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
            if let (Some(i), Some(sums)) = (number("item"), line.get("sums").and_then(Sums::from_json)) {
                if i == items.len() {
                    items.push(sums);
                }
            } else if let Some(kept) = number("kept") {
                // The file had been cut by someone.
                items.truncate(kept);
            } else {
                *sha256 = line.get("sha256").and_then(Value::as_str).map(str::to_owned);
            }
        }
        state
    }
}

/// Bytes that a journal's lines take at most, for whoever asks whether the disk has room.
pub fn journal_bytes(files: &[File]) -> u64 {
    files.iter().map(|f| f.items.len() as u64 * 160 + 256).sum()
}

/// Memory that making a batch takes at most: enough for all threads, and little enough that writing begins soon.
const BATCH: u64 = 256 << 20;

/// What was made of some rows, on its way to the disk.
struct Piece {
    item: usize,
    made: Made,
    last: bool,
}

/// Rows that are made at once.
struct Job {
    item: usize,
    rows: Range<usize>,
    last: bool,
    /// Memory that making it takes.
    cost: u64,
}

/// Where a file is being written.
struct Target<'a> {
    plan: &'a File,
    index: usize,
    path: PathBuf,
    file: Fs,
    hash: Sha256,
}

/// Writes all files that are not complete; gives what each is, in the plan's order.
pub fn write(
    from: &From<'_>,
    files: &[File],
    dir: &Path,
    journal: &mut Journal,
    memory: u64,
    progress: &Progress,
) -> Result<Vec<Written>> {
    let state = journal.state(files);
    let mut all = Vec::new();
    for (index, (plan, (done, sha256))) in files.iter().zip(state).enumerate() {
        let complete = dir.join(&plan.name);
        let size = std::fs::metadata(&complete).ok().map(|m| m.len());
        if let Some(sha256) = sha256.filter(|_| done.len() == plan.items.len() && size == Some(plan.bytes())) {
            progress.advance(plan.bytes())?;
            all.push(Written { sha256, sums: done });
            continue;
        }
        let promised = done.len();
        let (mut target, mut sums) = Target::open(plan, index, dir, done, progress)?;
        let first = sums.len();
        if first < promised {
            journal.append(&[json!({"file": index, "kept": first})])?;
        }
        let jobs = jobs(plan, first, memory / 4);
        // One batch is made, one waits, one is written: each may take a quarter; the rest is for what is read.
        let (send, receive) = sync_channel::<Vec<Piece>>(1);
        let made = std::thread::scope(|scope| {
            let writer = scope.spawn(|| target.receive(from.source, receive, journal, progress));
            let made = make_all(from, plan, jobs, BATCH.min(memory / 4), send);
            let written = writer.join().unwrap_or(Err(Error::Cancelled));
            // A writer that stopped is why nothing more could be sent.
            written.and_then(|w| made.map(|()| w))
        });
        sums.extend(made?);
        let sha256 = target.finish(&complete, journal)?;
        all.push(Written { sha256, sums });
    }
    Ok(all)
}

/// Cuts the items from `first` on into jobs of at most about `most` bytes.
fn jobs(plan: &File, first: usize, most: u64) -> Vec<Job> {
    let mut jobs = Vec::new();
    for (i, item) in plan.items.iter().enumerate().skip(first) {
        // What is read where it is not mapped (at most as F32), and what is made, as codes and again as bytes.
        let values = item.rows as u64 * item.cols as u64;
        let copied = matches!(item.what, What::Bytes(_));
        let cost = if copied { item.bytes } else { 2 * item.bytes + 2 * values };
        // Rows of inputs are whole only once all outputs are known.
        let parts = if item.laid == Laid::InputsFirst { 1 } else { cost.div_ceil(most.max(1)).max(1) };
        let rows = (item.rows as u64).div_ceil(parts).next_multiple_of(STEP as u64) as usize;
        for start in (0..item.rows).step_by(rows.max(STEP)) {
            let end = item.rows.min(start + rows);
            let cost = cost * (end - start) as u64 / item.rows as u64;
            jobs.push(Job { item: i, rows: start..end, last: end == item.rows, cost });
        }
    }
    jobs
}

/// Makes jobs on rayon's threads, batch by batch, and sends what was made in order.
fn make_all(
    from: &From<'_>,
    plan: &File,
    jobs: Vec<Job>,
    most: u64,
    send: std::sync::mpsc::SyncSender<Vec<Piece>>,
) -> Result<()> {
    let mut rest = &jobs[..];
    while !rest.is_empty() {
        let mut cost = 0;
        let fits = |job: &&Job| {
            cost += job.cost;
            cost <= most
        };
        let (batch, after) = rest.split_at(rest.iter().take_while(fits).count().max(1));
        rest = after;
        let pieces = batch
            .par_iter()
            .map(|job| {
                let item = &plan.items[job.item];
                let made = encode::make(from, item, job.rows.clone())?;
                if job.last && !matches!(item.what, What::Bytes(_)) {
                    encode::release(from.source, item);
                }
                Ok(Piece { item: job.item, made, last: job.last })
            })
            .collect::<Result<Vec<_>>>()?;
        if send.send(pieces).is_err() {
            // The writer has stopped, and says why.
            break;
        }
    }
    Ok(())
}

impl<'a> Target<'a> {
    /// Opens the file behind the items that it holds already.
    fn open(
        plan: &'a File,
        index: usize,
        dir: &Path,
        done: Vec<Sums>,
        progress: &Progress,
    ) -> Result<(Target<'a>, Vec<Sums>)> {
        let path = dir.join(format!("{}.partial", plan.name));
        let io = |source| Error::Io { path: path.clone(), source };
        // A file that was renamed, but whose line did not make it into the journal, is as good as one that was not renamed.
        let renamed = dir.join(&plan.name);
        if renamed.exists() && !path.exists() {
            std::fs::rename(&renamed, &path).map_err(io)?;
        }
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).map_err(io)?;
        let behind = |items: usize| -> u64 {
            let written = plan.items.iter().zip(&plan.padding).take(items);
            plan.header.len() as u64 + written.map(|(i, p)| i.bytes + p).sum::<u64>()
        };
        let length = file.metadata().map_err(io)?.len();
        // Someone may have cut or removed the file meanwhile.
        let held = (0..=done.len()).rev().find(|&items| behind(items) <= length).filter(|&n| n > 0).unwrap_or(0);
        let mut hash = Sha256::new();
        if held == 0 {
            file.set_len(0).map_err(io)?;
            file.write_all(&plan.header).map_err(io)?;
            hash.update(&plan.header);
        } else {
            let mut left = behind(held);
            let mut buffer = vec![0; 1 << 20];
            while left > 0 {
                let part = left.min(buffer.len() as u64) as usize;
                file.read_exact(&mut buffer[..part]).map_err(io)?;
                hash.update(&buffer[..part]);
                left -= part as u64;
            }
            file.set_len(behind(held)).map_err(io)?;
        }
        progress.advance(behind(held))?;
        Ok((Target { plan, index, path, file, hash }, done.into_iter().take(held).collect()))
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.file.write_all(bytes).map_err(|source| Error::Io { path: self.path.clone(), source })
    }

    /// Writes what comes, and notes it in the journal once it is on the disk.
    fn receive(
        &mut self,
        source: &dyn WeightSource,
        from: Receiver<Vec<Piece>>,
        journal: &mut Journal,
        progress: &Progress,
    ) -> Result<Vec<Sums>> {
        let (mut all, mut sides, mut sums) = (Vec::new(), Sides::default(), Sums::default());
        for batch in from {
            let mut lines = Vec::new();
            for piece in batch {
                let item: &Item = &self.plan.items[piece.item];
                let mut bytes = piece.made.codes.len() as u64;
                self.put(&piece.made.codes)?;
                sides.extend(piece.made.sides);
                sums.add(&piece.made.sums);
                if piece.last {
                    if item.laid == Laid::CodesAndSides {
                        let shape = (item.rows, item.cols);
                        let tail = layout::tail(item.format, shape, std::mem::take(&mut sides));
                        self.put(&tail)?;
                        bytes += tail.len() as u64;
                    }
                    let padding = self.plan.padding[piece.item];
                    self.put(&vec![0; padding as usize])?;
                    bytes += padding;
                    lines.push(json!({"file": self.index, "item": piece.item, "sums": sums.to_json()}));
                    all.push(std::mem::take(&mut sums));
                    if let What::Bytes(_) = item.what {
                        encode::release(source, item);
                    }
                }
                progress.advance(bytes)?;
            }
            self.file.sync_data().map_err(|source| Error::Io { path: self.path.clone(), source })?;
            journal.append(&lines)?;
        }
        Ok(all)
    }

    /// The file is complete: under its name, and in the journal.
    fn finish(self, complete: &Path, journal: &mut Journal) -> Result<String> {
        let io = |source| Error::Io { path: self.path.clone(), source };
        let length = self.file.metadata().map_err(io)?.len();
        if length != self.plan.bytes() {
            let what = format!("has {length} bytes, but {} were announced; report this", self.plan.bytes());
            return Err(Error::file(&self.path, what));
        }
        self.file.sync_all().map_err(io)?;
        std::fs::rename(&self.path, complete).map_err(io)?;
        let sha256 = hex(&self.hash.finalize());
        journal.append(&[json!({"file": self.index, "sha256": sha256})])?;
        Ok(sha256)
    }
}

/// Lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Writes a small file at once: under another name first, and on the disk before it has its own.
pub fn write_whole(path: &Path, content: &[u8]) -> Result<()> {
    let io = |source| Error::Io { path: path.to_owned(), source };
    let mut name = path.as_os_str().to_owned();
    name.push(".partial");
    let partial = PathBuf::from(name);
    let mut file = Fs::create(&partial).map_err(io)?;
    file.write_all(content).and_then(|()| file.sync_all()).map_err(io)?;
    std::fs::rename(&partial, path).map_err(io)
}

/// Puts bytes over others in a file, and on the disk.
pub fn overwrite(path: &Path, start: u64, bytes: &[u8]) -> Result<()> {
    let io = |source| Error::Io { path: path.to_owned(), source };
    let mut file = OpenOptions::new().write(true).open(path).map_err(io)?;
    file.seek(SeekFrom::Start(start)).map_err(io)?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(io)
}

/// Checksum of a file with spaces in place of the bytes `blank`, told to `progress` as it is read.
pub fn checksum(path: &Path, blank: Range<u64>, progress: &Progress) -> Result<String> {
    let io = |source| Error::Io { path: path.to_owned(), source };
    let mut file = Fs::open(path).map_err(io)?;
    let (mut hash, mut buffer, mut at) = (Sha256::new(), vec![0; 1 << 20], 0);
    loop {
        match file.read(&mut buffer).map_err(io)? {
            0 => return Ok(hex(&hash.finalize())),
            n => {
                let inside = |position: u64| (position.clamp(at, at + n as u64) - at) as usize;
                buffer[inside(blank.start)..inside(blank.end)].fill(b' ');
                hash.update(&buffer[..n]);
                at += n as u64;
                progress.advance(n as u64)?;
            }
        }
    }
}
