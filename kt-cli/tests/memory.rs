//! The plan tells the truth: memory of `kt run` on checkpoints on disk, as the system counts it.
//!
//! `KT_TEST_GIB` sets the size of each checkpoint (default 1).

#![allow(unsafe_code)] // wait4

mod common;

use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::written::{Shape, Written};
use kt::{Format, Group};

/// How a `kt` ended.
struct Ended {
    /// With exit code 0.
    success: bool,
    /// The signal that ended it, 9 from the system that is out of memory.
    signal: Option<i32>,
    stdout: String,
    stderr: String,
    /// Most bytes that it had resident.
    peak_bytes: u64,
}

/// Runs a command to its end.
fn end(command: &mut Command) -> Ended {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut stdout, mut stderr) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    let mut status = 0;
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: both pointers are to values that the call fills; the child was not waited for, so its id is still its own.
    let id = unsafe { libc::wait4(child.id() as i32, &mut status, 0, usage.as_mut_ptr()) };
    assert_eq!(id, child.id() as i32, "{}", std::io::Error::last_os_error());
    // SAFETY: wait4 succeeded and filled it.
    let peak_bytes = unsafe { usage.assume_init() }.ru_maxrss as u64 * 1024;
    let signal = libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status));
    let success = signal.is_none() && libc::WEXITSTATUS(status) == 0;
    Ended { success, signal, stdout, stderr, peak_bytes }
}

fn kt(args: &[&str], model: &Written) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kt"));
    command.args(args).arg("--model").arg(&model.model);
    command
}

fn gib() -> f64 {
    std::env::var("KT_TEST_GIB").ok().and_then(|v| v.parse().ok()).unwrap_or(1.0)
}

#[test]
fn peak_memory_is_what_the_plan_says() {
    let bf16 = |shape: &Shape| Written::safetensors("bf16", shape, Format::Bf16);
    let int4 = |shape: &Shape| Written::safetensors("int4", shape, Format::Int4(Group::Of(32)));
    let q4_k = |shape: &Shape| Written::gguf("q4_k", shape, Format::Q4K);
    type Write<'a> = &'a dyn Fn(&Shape) -> Written;
    let cases: [(Format, Write<'_>); 3] =
        [(Format::Bf16, &bf16), (Format::Int4(Group::Of(32)), &int4), (Format::Q4K, &q4_k)];
    let mut ratios = Vec::new();
    for (format, write) in cases {
        let shape = Shape::filling(gib(), format);
        let model = write(&shape);
        let plan = end(&mut kt(&["plan", "--json", "--context", "16"], &model));
        assert!(plan.success, "{}", plan.stderr);
        let plan: serde_json::Value = serde_json::from_str(&plan.stdout).unwrap();
        let planned = plan["resident_bytes"].as_u64().unwrap();
        let mut run = kt(&["run", "--prompt", "fn main() {", "--max-tokens", "1"], &model);
        let ran = end(run.arg("--tokenizer").arg(Written::tokenizer()));
        assert!(ran.success, "{}", ran.stderr);
        let ratio = ran.peak_bytes as f64 / planned as f64;
        println!("{format}: planned {planned} bytes, peak {} bytes, ratio {ratio:.4}", ran.peak_bytes);
        ratios.push(ratio);
    }
    assert!(ratios.iter().all(|r| (0.97..=1.03).contains(r)), "ratios {ratios:.4?}");
}

/// A control group with a limit on memory, gone when dropped.
struct Limited {
    dir: PathBuf,
}

impl Drop for Limited {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.dir);
    }
}

impl Limited {
    /// A group of version 1 or 2, or why there can be none.
    fn new(name: &str) -> Result<Limited, String> {
        fn said(what: &Path) -> impl Fn(std::io::Error) -> String {
            move |e| format!("{}: {e}", what.display())
        }
        let name = format!("kt-test-{name}-{}", std::process::id());
        let root = Path::new("/sys/fs/cgroup");
        let v1 = root.join("memory");
        let dir = if v1.join("memory.limit_in_bytes").exists() {
            v1.join(name)
        } else {
            let controllers = std::fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
            if !controllers.split_whitespace().any(|c| c == "memory") {
                return Err("no control groups of memory are mounted at /sys/fs/cgroup".into());
            }
            let subtree = root.join("cgroup.subtree_control");
            std::fs::write(&subtree, "+memory").map_err(said(&subtree))?;
            root.join(name)
        };
        std::fs::create_dir(&dir).map_err(said(&dir))?;
        let group = Limited { dir };
        group.limit(1 << 40).map_err(said(&group.dir))?;
        // Swap would let a process go on that should have been killed.
        let _ = std::fs::write(group.dir.join("memory.swap.max"), "0");
        let _ = std::fs::write(group.dir.join("memory.swappiness"), "0");
        Ok(group)
    }

    fn limit(&self, bytes: u64) -> std::io::Result<()> {
        let file = ["memory.limit_in_bytes", "memory.max"].map(|f| self.dir.join(f)).into_iter().find(|f| f.exists());
        std::fs::write(file.ok_or(std::io::ErrorKind::NotFound)?, bytes.to_string())
    }

    /// The command, in this group from its first page on.
    fn inside(&self, command: &Command) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(self.dir.join("cgroup.procs"));
        shell.arg(command.get_program()).args(command.get_args());
        shell
    }
}

/// Writes files out and drops their pages: whoever reads them next is charged with them.
fn forget_pages(model: &Path) {
    for entry in std::fs::read_dir(model).unwrap() {
        let file = std::fs::File::open(entry.unwrap().path()).unwrap();
        file.sync_all().unwrap();
        // SAFETY: advice about a file that is open; it changes no memory of this process.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    }
}

#[test]
fn in_a_control_group_load_refuses_before_it_is_killed() {
    let group = match Limited::new("limit") {
        Ok(group) => group,
        Err(why) => {
            eprintln!("SKIPPED: a limit on memory could not be set (needs root and a writable control group): {why}");
            return;
        }
    };
    let shape = Shape::filling(gib() * 0.25, Format::Bf16);
    let model = Written::safetensors("limited", &shape, Format::Bf16);
    let run = kt(&["run", "--prompt", "fn main() {", "--max-tokens", "1"], &model);
    let inside = |command: &Command| {
        forget_pages(&model.model);
        end(&mut group.inside(command))
    };
    let plan = |options: &[&str]| {
        let plan = inside(&kt(&[&["plan", "--json", "--context", "5"], options].concat(), &model));
        assert!(plan.success, "{}", plan.stderr);
        serde_json::from_str::<serde_json::Value>(&plan.stdout).unwrap()
    };
    let free = plan(&[]);
    let (need, held) = (free["need_bytes"].as_u64().unwrap(), free["held_bytes"].as_u64().unwrap());

    // Too little by a tenth, and by half: an error and no kill.
    for limit in [need / 10 * 9, need / 2] {
        group.limit(limit).unwrap();
        let refused = inside(&run);
        assert_eq!(refused.signal, None, "killed with a limit of {limit}: {}", refused.stderr);
        assert!(!refused.success && refused.stdout.is_empty(), "{}", refused.stderr);
        for word in ["refusing to load", "REFUSE", "missing", "kt-test-limit", "raised by", "--experts-as"] {
            assert!(refused.stderr.contains(word), "no {word:?} in {}", refused.stderr);
        }
        assert!(refused.peak_bytes < need / 2, "{} bytes before it refused", refused.peak_bytes);
    }
    // What the plan says would fit does fit: experts re-encoded on the way in, at the limit of half.
    let tight = plan(&[]);
    assert_eq!(tight["verdict"], "REFUSE");
    let remedies = tight["remedies"].as_array().unwrap();
    let helps = remedies.iter().find(|r| r["experts_as"].is_string() && r["verdict"] != "REFUSE");
    let helps = helps.unwrap_or_else(|| panic!("no format helps: {tight}"));
    let format = helps["experts_as"].as_str().unwrap().to_lowercase();
    let mut smaller = kt(&["run", "--prompt", "fn main() {", "--max-tokens", "1"], &model);
    let ran = inside(smaller.args(["--experts-as", &format]));
    assert!(ran.success, "--experts-as {format}, signal {:?}: {}", ran.signal, ran.stderr);

    // A little more than it needs: it runs to its end.
    group.limit(need + need / 50 + held).unwrap();
    let ran = inside(&run);
    assert!(ran.success, "signal {:?}: {}", ran.signal, ran.stderr);
    assert!(ran.stderr.contains("TIGHT") && ran.stderr.contains("kt-test-limit"), "{}", ran.stderr);
}

/// A process that is ended when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sums over a process's mappings of a file, in bytes: resident, its proportional share, shared and clean, private.
fn mappings(process: u32, file: &Path) -> [u64; 4] {
    let text = std::fs::read_to_string(format!("/proc/{process}/smaps")).unwrap_or_default();
    let mut sums = [0; 4];
    let mut ours = false;
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let Some(key) = words.next() else { continue };
        if !key.ends_with(':') {
            ours = line.ends_with(file.to_str().unwrap());
            continue;
        }
        let at = match key {
            "Rss:" => 0,
            "Pss:" => 1,
            "Shared_Clean:" => 2,
            "Private_Clean:" | "Private_Dirty:" => 3,
            _ => continue,
        };
        if ours {
            sums[at] += words.next().unwrap().parse::<u64>().unwrap() * 1024;
        }
    }
    sums
}

#[test]
fn two_processes_hold_weights_in_place_once() {
    let shape = Shape { layers: 2, ..Shape::filling(0.0625, Format::Q4K) };
    let model = Written::gguf("shared", &shape, Format::Q4K);
    let bytes = std::fs::metadata(&model.model).unwrap().len();
    // Pages that are not written out yet would count as dirty.
    forget_pages(model.model.parent().unwrap());
    let start = || {
        let mut run = kt(&["run", "--prompt", "fn main() {", "--max-tokens", "1000", "--ignore-eos"], &model);
        run.args(["--backend", "portable", "--threads", "1"]).arg("--tokenizer").arg(Written::tokenizer());
        Running(run.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    };
    let processes = [start(), start()];
    let since = Instant::now();
    let found = loop {
        let found = processes.each_ref().map(|p| mappings(p.0.id(), &model.model));
        // The embedding's rows and the norms are not all read, and the head's pages are given back where a copy was packed.
        if found.iter().all(|m| m[0] > bytes / 10 * 8) {
            break found;
        }
        assert!(since.elapsed() < Duration::from_secs(120), "{bytes} bytes in the file, mapped in: {found:?}");
        std::thread::sleep(Duration::from_millis(50));
    };
    println!("{bytes} bytes in the file; resident, share, shared, private: {found:?}");
    for [resident, share, shared, private] in found {
        assert!(shared > resident / 100 * 95 && private < resident / 20, "{found:?}");
        assert!(share < resident / 100 * 55, "{found:?}");
    }
    // Counted by shares, both together hold the file once.
    assert!(found.iter().map(|m| m[1]).sum::<u64>() <= bytes / 100 * 102, "{found:?}");
}
