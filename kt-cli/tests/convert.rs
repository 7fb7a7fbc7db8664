//! `kt convert` and `kt verify`: what they write runs as well as the same experts re-encoded at load, and survives its own end.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use common::{data, load};
use kt::quantize::Requantized;
use kt::{Format, WeightSource};
use kt_cli::eval::score;
use kt_cli::host::Tokenizer;
use kt_cli::model::built_in;

/// A directory that is removed with its content.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kt-convert-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Dir(path)
    }

    fn at(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn kt(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kt")).args(args).output().unwrap()
}

#[track_caller]
fn ok(args: &[&str]) -> String {
    let output = kt(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn refused(args: &[&str], wants: &[&str]) {
    let output = kt(args);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{args:?} succeeded");
    for want in wants {
        assert!(text.contains(want), "`{want}` is not in: {text}");
    }
}

/// All files of a directory by name.
fn files(dir: &str) -> BTreeMap<PathBuf, Vec<u8>> {
    let all = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    all.map(|p| (p.file_name().unwrap().into(), std::fs::read(&p).unwrap())).collect()
}

/// Nats for each predicted token of a text.
fn nats(source: &dyn WeightSource, text: &str) -> f64 {
    let ids = Tokenizer::of(source).unwrap().encode(text).unwrap();
    let model = load(source, Some("portable"), 128);
    score(&model, &ids, 128, |_| Ok(())).unwrap().mean_nats()
}

#[test]
fn converted_models_run_as_those_re_encoded_at_load() {
    let dir = Dir::new("runs");
    let text = std::fs::read_to_string(data("tiny-moe/heldout.txt")).unwrap();
    let text = &text.chars().take(600).collect::<String>();
    for (name, format) in [("int4", "int4-g32"), ("q8_0.gguf", "q8_0")] {
        let output = dir.at(name);
        ok(&["convert", "--output", &output, "--to", format]);
        let format: Format = format.parse().unwrap();
        let due = nats(&Requantized::new(std::sync::Arc::new(built_in().unwrap()), format).unwrap(), text);
        let got = nats(&*kt::open(&output).unwrap(), text);
        // Norms and routers are the same numbers, whatever type holds them.
        assert!((due - got).abs() < 1e-6, "{name}: {got} in place of {due}");
        assert!(ok(&["verify", &output]).contains("as they were written"));
    }
}

#[test]
fn killed_at_any_moment_it_ends_in_the_same_bytes() {
    let dir = Dir::new("kills");
    let whole = dir.at("whole");
    let args = |output: &str| {
        let with = ["convert", "--to", "q6_k,q6_k,q4_k", "--memory", "1MiB", "--threads", "1"];
        let with = with.iter().chain(&["--dense", "q8_0", "--output"]).map(|a| a.to_string());
        with.chain([output.to_owned()]).collect::<Vec<_>>()
    };
    let to = |dir: &str| format!("{dir}/m.gguf");
    for d in [&whole, &dir.at("cut")] {
        std::fs::create_dir(d).unwrap();
    }
    let start = std::time::Instant::now();
    ok(&args(&to(&whole)).iter().map(String::as_str).collect::<Vec<_>>());
    let time = start.elapsed();
    let cut = dir.at("cut");
    let (mut killed, mut random) = (0, 12345u64);
    for _ in 0..10 {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let wait = time.mul_f64((random >> 40) as f64 / (1u64 << 24) as f64 * 0.6);
        let mut child =
            Command::new(env!("CARGO_BIN_EXE_kt")).args(args(&to(&cut))).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(wait.max(Duration::from_millis(1)));
        // SIGKILL, on Unix.
        child.kill().unwrap();
        killed += usize::from(!child.wait().unwrap().success());
        if Path::new(&to(&cut)).exists() {
            // It was done: all over again.
            std::fs::remove_dir_all(&cut).unwrap();
            std::fs::create_dir(&cut).unwrap();
        }
    }
    println!("{killed} of 10 runs were killed");
    assert!(killed > 0);
    ok(&args(&to(&cut)).iter().map(String::as_str).collect::<Vec<_>>());
    assert!(files(&cut) == files(&whole), "the files differ");
}

/// A limit on the length of files stands in for a disk that is full: writing fails in the middle.
#[cfg(unix)]
#[test]
fn a_disk_that_fills_up_leaves_what_can_be_continued() {
    let dir = Dir::new("full");
    let (output, whole) = (dir.at("out"), dir.at("whole"));
    let script = "trap '' XFSZ; ulimit -f 2000; exec \"$0\" \"$@\"";
    let args = ["convert", "--to", "int4", "--memory", "1MiB"];
    let full = Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_kt")])
        .args(args)
        .args(["--output", &output])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&full.stderr);
    assert!(!full.status.success() && text.contains("model.safetensors.partial"), "{text}");
    assert!(!Path::new(&output).exists() && Path::new(&dir.at("out.journal")).exists());
    ok(&[&args[..], &["--output", &output]].concat());
    ok(&[&args[..], &["--output", &whole]].concat());
    assert!(files(&output) == files(&whole), "the files differ");
    assert!(!Path::new(&dir.at("out.journal")).exists());
}

#[test]
fn bad_results_are_failures() {
    let dir = Dir::new("bad");
    let (output, text) = (dir.at("out"), dir.at("text"));
    let all = std::fs::read_to_string(data("tiny-moe/heldout.txt")).unwrap();
    std::fs::write(&text, all.chars().take(600).collect::<String>()).unwrap();
    let args = ["convert", "--to", "int4-g128", "--output", &output];
    refused(
        &[&args[..], &["--max-error", "0.01"]].concat(),
        &["--max-error 0.01", "mlp.experts", "nothing was published"],
    );
    assert!(!Path::new(&output).exists() && kt::open(dir.at("out.partial")).is_err());
    refused(&[&args[..], &["--eval", &text, "--max-kl", "1e-9"]].concat(), &["--max-kl", "nothing was published"]);
    assert!(!Path::new(&output).exists());
    let json = ok(&[&args[..], &["--eval", &text, "--max-kl", "1", "--max-error", "0.5", "--json"]].concat());
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let number = |at: &str| json.pointer(at).and_then(serde_json::Value::as_f64).unwrap();
    let (kl, perplexity, before) =
        (number("/evaluation/kl"), number("/evaluation/perplexity"), number("/evaluation/source_perplexity"));
    assert!(kl > 1e-6 && kl < 0.5 && (perplexity / before).ln().abs() < 0.3, "{json}");
    let index = std::fs::read(Path::new(&output).join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
    assert_eq!(index["metadata"]["kt"]["evaluation"]["kl"], json["evaluation"]["kl"]);
    refused(&[&args[..], &[]].concat(), &["is there already"]);
    refused(&["convert", "--to", "q17", "--output", &output], &["q17"]);
    refused(&["convert", "--to", "int4,int4", "--output", &output], &["one format, or three"]);
}
