//! The plan tells the truth: memory of `kt run` on checkpoints on disk, as the system counts it.
//!
//! `KT_TEST_GIB` sets the size of each checkpoint (default 1).

#![allow(unsafe_code)] // wait4

mod common;

use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::cgroup;
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
#[expect(clippy::zombie_processes, reason = "wait4 waits for it, and tells its peak memory")]
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

#[test]
fn a_long_prompt_takes_what_the_plan_says() {
    let shape = Shape::filling(gib() / 8.0, Format::Int4(Group::Of(32)));
    let model = Written::safetensors("long", &shape, Format::Int4(Group::Of(32)));
    let prompt = "fn add(a: u32, b: u32) -> u32 { a + b }\n".repeat(120);
    let with = |option: &[&str]| {
        // Of what is planned for each of many threads, some would not be used.
        let option = [&["--threads", "1"], option].concat();
        let mut run = kt(&["run", "--prompt", &prompt, "--max-tokens", "1", "--no-echo"], &model);
        let ran = end(run.args(&option).arg("--tokenizer").arg(Written::tokenizer()));
        assert!(ran.success, "{}", ran.stderr);
        let prefill = ran.stderr.lines().find(|line| line.starts_with("prefill")).unwrap();
        let tokens: usize = prefill.split_whitespace().nth(1).unwrap().parse().unwrap();
        assert!(tokens > 1500, "{prefill}");
        let plan = end(kt(&["plan", "--json", "--context", &(tokens + 1).to_string()], &model).args(&option));
        assert!(plan.success, "{}", plan.stderr);
        let plan: serde_json::Value = serde_json::from_str(&plan.stdout).unwrap();
        let planned = plan["resident_bytes"].as_u64().unwrap();
        let ratio = ran.peak_bytes as f64 / planned as f64;
        println!(
            "{option:?}: {tokens} tokens, planned {planned} bytes, peak {} bytes, ratio {ratio:.4}",
            ran.peak_bytes
        );
        assert!((0.85..=1.03).contains(&ratio), "{ratio}");
        planned
    };
    // Prompts go in passes of up to 2048 tokens, unless they are told otherwise.
    assert!(with(&["--pass-tokens", "256"]) < with(&[]));
}

#[test]
fn weights_in_place_take_less_and_give_the_same_text() {
    let shape = Shape::filling(gib() / 4.0, Format::Iq2Xxs);
    let model = Written::gguf("iq2_xxs", &shape, Format::Iq2Xxs);
    let with = |option: &[&str]| {
        let plan = end(kt(&["plan", "--json", "--context", "40"], &model).args(option));
        assert!(plan.success, "{}", plan.stderr);
        let plan: serde_json::Value = serde_json::from_str(&plan.stdout).unwrap();
        let mut run = kt(&["run", "--prompt", "fn main() {", "--max-tokens", "24", "--ignore-eos"], &model);
        let ran = end(run.args(option).arg("--tokenizer").arg(Written::tokenizer()));
        assert!(ran.success, "{}", ran.stderr);
        let planned = plan["resident_bytes"].as_u64().unwrap();
        println!("{option:?}: planned {planned} bytes, peak {} bytes", ran.peak_bytes);
        (planned, ran.peak_bytes as f64 / planned as f64, ran.stdout)
    };
    let (packed, packed_ratio, text) = with(&[]);
    let (in_place, ratio, same) = with(&["--in-place"]);
    assert!(!text.is_empty() && text == same, "{text}\n{same}");
    if packed == in_place {
        println!("skipped: this CPU runs such experts in place only");
        return;
    }
    // 3.3 bits a weight against 2.1, of what is mostly experts, all of which every token uses.
    assert!(in_place < packed / 10 * 8, "{in_place} {packed}");
    assert!([packed_ratio, ratio].iter().all(|r| (0.97..=1.03).contains(r)), "{packed_ratio} {ratio}");
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
    let group = match cgroup::Group::new("memory", "limit") {
        Ok(group) => group,
        Err(why) => {
            eprintln!("SKIPPED: a limit on memory could not be set (needs root and a writable control group): {why}");
            return;
        }
    };
    let shape = Shape::filling(gib() * 0.25, Format::Bf16);
    let model = Written::safetensors("limited", &shape, Format::Bf16);
    let run = kt(&["run", "--prompt", "fn main() {", "--max-tokens", "1"], &model);
    let set_limit = |bytes: u64| group.set(["memory.limit_in_bytes", "memory.max"], &bytes.to_string());
    // Swap would let a process go on that should have been killed.
    group.try_set(["memory.swappiness", "memory.swap.max"], "0").ok();
    set_limit(1 << 40);
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
        set_limit(limit);
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
    set_limit(need + need / 50 + held);
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
    // Not the whole file: of the embedding few rows are read, and where a copy was packed pages are given back.
    let held_once = |found: &[[u64; 4]; 2]| {
        let each = |&[resident, share, shared, private]: &[u64; 4]| {
            resident > bytes / 10 * 8
                && shared > resident / 100 * 95
                && private < resident / 20
                && share < resident / 100 * 55
        };
        // Counted by shares, both together hold the file once.
        found.iter().all(each) && found.iter().map(|m| m[1]).sum::<u64>() <= bytes / 100 * 102
    };
    // Until both have read all layers.
    loop {
        let found = processes.each_ref().map(|p| mappings(p.0.id(), &model.model));
        if held_once(&found) {
            println!("{bytes} bytes in the file; resident, share, shared, private: {found:?}");
            break;
        }
        let waited = since.elapsed();
        assert!(waited < Duration::from_secs(60), "{bytes} bytes; resident, share, shared, private: {found:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Prints what `kt plan --measure` predicts and `kt run` does, in turns: `KT_TEST_GIB` of experts, 8 of 64 for each token.
#[test]
#[ignore = "measures, on a quiet machine: KT_TEST_GIB=2 cargo test --release -p kt-cli --test memory -- --ignored --nocapture"]
fn decode_speed_beside_its_prediction() {
    let shape = Shape { hidden: 2048, intermediate: 768, experts: 64, top_k: 8, ..Shape::filling(0.0, Format::Bf16) };
    for format in [Format::Bf16, Format::Int4(Group::Of(32))] {
        let layers = (gib() * (1u64 << 30) as f64 / shape.layer_bytes(format) as f64).ceil() as usize;
        let model = Written::safetensors("speed", &Shape { layers, ..shape }, format);
        let mut ratios = Vec::new();
        for _ in 0..5 {
            let plan = end(&mut kt(&["plan", "--json", "--measure", "--context", "68"], &model));
            assert!(plan.success, "{}", plan.stderr);
            let plan: serde_json::Value = serde_json::from_str(&plan.stdout).unwrap();
            let predicted = plan["tokens_per_s"].as_f64().unwrap();
            let options = ["run", "--prompt", "fn main() {", "--max-tokens", "64", "--ignore-eos"];
            let ran = end(&mut kt(&options, &model));
            assert!(ran.success, "{}", ran.stderr);
            let line = ran.stderr.lines().find(|l| l.starts_with("decode")).expect("a line about decoding");
            let words: Vec<&str> = line.split_whitespace().collect();
            let measured: f64 = words[words.len() - 2].parse().unwrap();
            println!("{format}: {predicted:.2} tokens/s predicted, {measured:.2} measured; {}", plan["read_gb_per_s"]);
            ratios.push(measured / predicted);
        }
        ratios.sort_by(f64::total_cmp);
        println!("{format}: measured over predicted, in the middle: {:.3}", ratios[ratios.len() / 2]);
    }
}
