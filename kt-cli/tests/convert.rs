//! `kt convert` and `kt verify`: what they write runs as well as the same experts re-encoded at load, and survives its own end.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use common::{data, load};
use kt::convert::{Container, Conversion, Options};
use kt::quantize::Requantized;
use kt::{Format, Group, Progress, WeightSource};
use kt_cli::eval::score;
use kt_cli::host::Tokenizer;
use kt_cli::model::built_in;

/// What every source can become.
const OUTPUTS: [&str; 21] = [
    "bf16",
    "fp8-block",
    "fp8-channel",
    "int8-channel",
    "int8-g32",
    "int8-asym-g32",
    "int4-g32",
    "int4-g64",
    "int4-g128",
    "int4-asym-g32",
    "int4-asym-g128",
    "mxfp4",
    "bf16.gguf",
    "q8_0.gguf",
    "q4_0.gguf",
    "q4_1.gguf",
    "q5_0.gguf",
    "q4_k.gguf",
    "q5_k.gguf",
    "q6_k.gguf",
    "mxfp4-ggml.gguf",
];

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
fn nats(source: Arc<dyn WeightSource>, text: &str) -> f64 {
    let ids = Tokenizer::of(&*source).unwrap().encode(text).unwrap();
    let model = load(&source, Some("portable"), 128);
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
        let due = nats(Arc::new(Requantized::new(built_in().unwrap(), format).unwrap()), text);
        let got = nats(kt::open(&output).unwrap(), text);
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

/// A small filesystem in memory, unmounted when dropped.
#[cfg(target_os = "linux")]
struct Tmpfs(PathBuf);

#[cfg(target_os = "linux")]
impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[cfg(target_os = "linux")]
impl Tmpfs {
    /// Mounts it, or says why that cannot be.
    fn new(dir: &str, size: &str) -> Result<Self, String> {
        std::fs::create_dir(dir).unwrap();
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs", dir]).output();
        match mount {
            Ok(done) if done.status.success() => Ok(Tmpfs(dir.into())),
            Ok(done) => Err(String::from_utf8_lossy(&done.stderr).trim().to_string()),
            Err(e) => Err(e.to_string()),
        }
    }
}

/// Bytes of all files of a directory and those below it.
#[cfg(target_os = "linux")]
fn bytes_below(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let bytes = |e: std::fs::DirEntry| match e.metadata() {
        Ok(m) if m.is_dir() => bytes_below(&e.path()),
        Ok(m) => m.len(),
        Err(_) => 0, // gone in the meantime
    };
    entries.map(bytes).sum()
}

#[cfg(target_os = "linux")]
#[test]
fn a_small_filesystem_is_refused_before_and_continued_after() {
    let dir = Dir::new("tmpfs");
    let (whole, at) = (dir.at("whole"), dir.at("mounted"));
    let args = ["convert", "--to", "int8", "--memory", "1MiB", "--threads", "1", "--output"];
    let disk = match Tmpfs::new(&at, "2m") {
        Ok(disk) => disk,
        Err(why) => return eprintln!("skipped: a filesystem that is full: {why} (mounting needs root)"),
    };
    let output = format!("{at}/out");
    // Known before anything is written.
    refused(&[&args[..], &[&output]].concat(), &["free"]);
    assert!(!Path::new(&output).exists() && bytes_below(Path::new(&at)) < 1 << 16, "something was written");
    let remount = |size: &str| {
        let options = format!("remount,size={size}");
        assert!(Command::new("mount").args(["-o", &options, &at]).status().unwrap().success());
    };
    remount("64m");
    ok(&[&args[..], &[&whole]].concat());
    // Space that goes away while it writes: somebody else fills the disk.
    let mut filled = 0;
    for _ in 0..10 {
        let mut run = Command::new(env!("CARGO_BIN_EXE_kt"))
            .args(args)
            .arg(&output)
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        while run.try_wait().unwrap().is_none() && bytes_below(Path::new(&at)) < 1 << 18 {
            std::thread::yield_now();
        }
        let other = format!("{at}/other");
        let mut file = std::fs::File::create(&other).unwrap();
        while std::io::Write::write_all(&mut file, &[0; 1 << 16]).is_ok() {}
        drop(file);
        let out = run.wait_with_output().unwrap();
        std::fs::remove_file(&other).unwrap();
        if out.status.success() {
            std::fs::remove_dir_all(&output).unwrap(); // it was faster
            continue;
        }
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(text.contains("No space left") || text.contains("free"), "{text}");
        assert!(!Path::new(&output).exists(), "it looks finished");
        filled += 1;
        break;
    }
    println!("{filled} run met a disk that was full");
    ok(&[&args[..], &[&output]].concat());
    assert!(files(&output) == files(&whole), "the files differ");
    drop(disk);
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

#[test]
fn what_is_wrong_is_told_before_anything_is_written() {
    let dir = Dir::new("before");
    let (output, text, one) = (dir.at("out"), dir.at("text"), dir.at("one"));
    std::fs::write(&text, "The borrow checker").unwrap();
    std::fs::write(&one, "a").unwrap();
    let args = ["convert", "--to", "bf16", "--output", &output];
    for (with, says) in [
        (&["--backend", "abacus"][..], "abacus"),
        (&["--threads", "0"], "thread"),
        (&["--nodes", "99"], "99"),
        (&["--importance", &dir.at("")], "a directory"),
        (&["--max-error", "nan"], "0 or more"),
        (&["--max-error", "-1"], "0 or more"),
        (&["--eval", &text, "--max-kl", "-1"], "0 or more"),
        (&["--eval", &text, "--window", "1"], "--window"),
        (&["--eval", &text, "--experts-only"], "--experts-only"),
        (&["--eval", &one], "too short"),
        (&["--eval", "/nonexistent/text"], "/nonexistent/text"),
    ] {
        refused(&[&args[..], with].concat(), &[says]);
        let left: Vec<_> = std::fs::read_dir(&dir.0).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left.len(), 2, "{with:?} left {left:?}");
    }
    // A dry run says that the output is there.
    let dry = || String::from_utf8(kt(&[&args[..], &["--dry-run"]].concat()).stderr).unwrap();
    assert!(!dry().contains("is there already"), "{}", dry());
    ok(&args);
    assert!(dry().contains("is there already"), "{}", dry());
    ok(&[&args[..], &["--dry-run"]].concat());
}

/// The KL divergence that each output format costs the built-in model, twice what `kt-core/CONVERSION.md` lists at most.
#[test]
fn every_output_format_keeps_the_predictions() {
    let dir = Dir::new("formats");
    let (text, all) = (dir.at("text"), std::fs::read_to_string(data("tiny-moe/heldout.txt")).unwrap());
    std::fs::write(&text, all.chars().take(600).collect::<String>()).unwrap();
    for (formats, most) in [
        (&["bf16", "bf16.gguf"][..], 1e-6),
        (&["int8-g32", "int8-asym-g32", "int8-channel", "q8_0.gguf"], 0.0015),
        (&["fp8-block", "fp8-channel", "q6_k.gguf"], 0.006),
        (&["q5_k.gguf", "q5_0.gguf", "q5_1.gguf"], 0.007),
        (&["int4-g32", "int4-asym-g32", "q4_k.gguf", "q4_1.gguf", "q4_0.gguf", "iq4_nl.gguf"], 0.018),
        (&["int4-g64", "int4-g128", "int4-asym-g128", "int4-channel", "mxfp4"], 0.03),
    ] {
        for name in formats {
            let format = name.trim_end_matches(".gguf");
            let json = ok(&["convert", "--to", format, "--output", &dir.at(name), "--eval", &text, "--json"]);
            let json: serde_json::Value = serde_json::from_str(&json).unwrap();
            let kl = json.pointer("/evaluation/kl").and_then(serde_json::Value::as_f64).unwrap();
            assert!((-1e-9..most).contains(&kl), "{name}: {kl}");
        }
    }
}

#[test]
fn importance_goes_from_run_to_convert() {
    let dir = Dir::new("importance");
    let (file, with, without) = (dir.at("seen"), dir.at("with"), dir.at("without"));
    ok(&["run", "--max-tokens", "3", "--importance", &file]);
    for (output, more) in [(&with, &["--importance", &file][..]), (&without, &[])] {
        let args = ["convert", "--to", "int4-g32", "--output", output];
        let output = kt(&[&args[..], more].concat());
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
        assert_eq!(text.contains("of 32 experts have no importance"), !more.is_empty(), "{text}");
    }
    let weights = |dir: &str| std::fs::read(Path::new(dir).join("model.safetensors")).unwrap();
    assert!(weights(&with) != weights(&without));
    // Statistics of another model, and no statistics.
    let other = data("reference/qwen3_moe/bf16");
    let args = ["convert", "--to", "int4-g32", "--output", &dir.at("no"), "--importance"];
    let other = other.to_str().unwrap();
    refused(&[&args[..], &[&file, "--model", other]].concat(), &["importance of layer", "another model"]);
    refused(&[&args[..], &[&dir.at("none")]].concat(), &["none"]);
}

/// What a format's rounding costs at most, as a root mean square in proportion to the values: a tenth above the table of
/// `kt-core/CONVERSION.md`, as experts of the reference checkpoints are small and one may be worse.
fn error_of(format: Format) -> f64 {
    1.1 * match format {
        Format::Bf16 => 0.0017,
        Format::Q8_0 | Format::Int8(Group::Of(_)) | Format::Int8Offset(_) | Format::Int8Asym(_) => 0.0055,
        Format::Int8(Group::Row) => 0.007,
        Format::Q6K => 0.0175,
        Format::Fp8Block | Format::Fp8Channel => 0.0268,
        Format::Q5K | Format::Q5_0 => 0.0407,
        Format::Q4K | Format::Q4_1 => 0.0715,
        Format::Q4_0 | Format::Int4Asym(Group::Of(32)) | Format::Int4(Group::Of(32)) => 0.082,
        Format::Int4(_) | Format::Int4Asym(_) => 0.1,
        Format::Mxfp4 | Format::Mxfp4Ggml => 0.115,
        other => panic!("no bound for {other}"),
    }
}

/// Every reference checkpoint in every output format loads and runs: its logits are off those of the source, which are an
/// independent implementation's, by no more than the rounding of the experts explains.
#[test]
fn every_reference_runs_in_every_format() {
    let dir = Dir::new("pairs");
    let mut failures = Vec::new();
    for (checkpoint, name) in common::REFERENCES.iter().flat_map(|c| OUTPUTS.iter().map(move |n| (c, n))) {
        let path = data("reference").join(checkpoint);
        let (source, output) = (common::open(&path), dir.at(name));
        let format: Format = name.trim_end_matches(".gguf").parse().unwrap();
        let options = Options::new(Container::of(Path::new(&output)), format);
        let conversion = Conversion::plan(source.clone(), Path::new(&output), options).unwrap();
        conversion.write(&Progress::default()).unwrap().publish(None).unwrap();
        let written = kt::open(&output).unwrap();
        let reference = common::Reference::read(path.join("reference.safetensors"));
        let model = load(&written, Some("portable"), 64);
        let off =
            common::median_relative_rms(&common::logits(&model, &reference.ids), &reference.logits, model.vocabulary());
        println!("{checkpoint} to {name}: {off:.5}");
        // Layers outside of experts that the other container has no type for are BF16 there.
        let crosses = name.ends_with(".gguf") != checkpoint.contains("gguf");
        let most = 1.5 * error_of(format) + if crosses { 0.006 } else { 0.0 };
        if off.is_nan() || off > most {
            failures.push(format!("{checkpoint} to {name}: {off:.4}, above {most:.4}"));
        }
        match Path::new(&output).is_dir() {
            true => std::fs::remove_dir_all(&output).unwrap(),
            false => std::fs::remove_file(&output).unwrap(),
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
