//! `kt run --packed-cache`: the same text, and how long loading takes.

mod common;

use std::path::Path;
use std::process::Command;

use common::written::{Shape, Written};
use kt::{Format, Group};

/// Runs `kt run` for a few tokens; gives its text and what it reported.
fn run(model: Option<&Written>, cache: Option<&Path>) -> (String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kt"));
    command.args(["run", "--prompt", "fn main() {", "--max-tokens", "2", "--ignore-eos"]);
    if let Some(model) = model {
        command.arg("--model").arg(&model.model).arg("--tokenizer").arg(Written::tokenizer());
    }
    if let Some(cache) = cache {
        command.arg("--packed-cache").arg(cache);
    }
    let output = command.output().unwrap();
    let [stdout, stderr] = [output.stdout, output.stderr].map(|b| String::from_utf8(b).unwrap());
    assert!(output.status.success(), "{stderr}");
    (stdout, stderr)
}

#[test]
fn the_text_is_the_same_and_the_report_says_where_experts_came_from() {
    let model = Written::gguf("cached", &Shape::filling(0.005, Format::Q4K), Format::Q4K);
    let cache = model.model.with_file_name("cache");
    let (want, without) = run(Some(&model), None);
    assert!(!without.contains("\ncache "), "{without}");
    let (text, first) = run(Some(&model), Some(&cache));
    let (again, second) = run(Some(&model), Some(&cache));
    assert!(text == want && again == want);
    let line = |report: &str| report.lines().find(|l| l.starts_with("cache ")).unwrap_or("").to_owned();
    // On a CPU for which nothing is packed there is nothing to keep.
    if without.contains("on portable") {
        println!("skipped: this CPU runs experts in place");
    } else {
        let (first, second) = (line(&first), line(&second));
        assert!(first.contains("0 layers (0 B) from ") && first.ends_with("written there"), "{first}");
        assert!(
            second.contains("0 layers (0 B) written there") && !second.contains(" 0 layers (0 B) from"),
            "{second}"
        );
    }
    // The model in this program is in no file.
    let (_, told) = run(None, Some(&cache));
    assert!(told.contains("cannot be cached"), "{told}");
}

/// Lets the system forget the files that it holds in memory; `false` where it may not (it takes root).
fn forget_files() -> bool {
    Command::new("sync").status().is_ok_and(|s| s.success()) && std::fs::write("/proc/sys/vm/drop_caches", "3").is_ok()
}

/// A table of load times, for checkpoints of `KT_TEST_GIB` (4): medians of three loads each.
#[test]
#[ignore = "measures: takes some minutes and twice the size of a checkpoint on disk; build it with --release"]
fn load_times() {
    let gib = std::env::var("KT_TEST_GIB").ok().and_then(|v| v.parse().ok()).unwrap_or(4.0);
    println!(
        "seconds to load {gib} GiB of experts | packed, cold | packed, warm | packed and written, warm | cached, cold | cached, warm"
    );
    for format in [Format::Bf16, Format::Int4(Group::Of(32))] {
        let model = Written::safetensors("load-times", &Shape::filling(gib, format), format);
        let cache = model.model.join("cache");
        let seconds = |cache: Option<&Path>| {
            let (_, report) = run(Some(&model), cache);
            let line = report.lines().find_map(|l| l.strip_prefix("loaded   in ")?.strip_suffix(" s")).unwrap();
            line.parse::<f64>().unwrap()
        };
        let median = |prepare: &dyn Fn() -> bool, cache: Option<&Path>| {
            let mut times: Vec<f64> = (0..3).filter(|_| prepare()).map(|_| seconds(cache)).collect();
            times.sort_by(f64::total_cmp);
            times.get(times.len() / 2).map_or("not root".into(), |s| format!("{s:.1}"))
        };
        let cells = [
            median(&forget_files, None),
            median(&|| true, None),
            median(&|| std::fs::remove_dir_all(&cache).is_ok() || !cache.exists(), Some(&cache)),
            median(&forget_files, Some(&cache)),
            median(&|| true, Some(&cache)),
        ];
        println!("{format} | {}", cells.join(" | "));
    }
}
