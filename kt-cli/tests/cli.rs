//! The command itself.

use std::process::{Command, Output};

fn kt(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kt")).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn ok(args: &[&str]) -> (String, String) {
    let output = kt(args);
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn run_without_a_model_writes_text_and_reports_on_stderr() {
    let (out, err) = ok(&["run", "--max-tokens", "24", "--backend", "portable"]);
    assert!(out.starts_with("The ownership system in Rust.\n\nThe `wasm32"), "{out:?}");
    for word in ["qwen3_moe", "portable", "prefill", "decode", "tokens/s", "resident", "available"] {
        assert!(err.contains(word), "no {word:?} in {err}");
    }
    assert!(!out.contains("tokens/s"));
    let (out, _) = ok(&["run", "--max-tokens", "24", "--no-echo", "--stop", "wasm"]);
    assert_eq!(out, ".\n\nThe `\n");
}

#[test]
fn a_seed_gives_the_same_text_again() {
    let args =
        ["run", "--max-tokens", "32", "--temperature", "1.2", "--top-k", "50", "--ignore-eos", "--backend", "portable"];
    let with = |seed| ok(&[&args[..], &["--seed", seed]].concat()).0;
    assert_eq!(with("7"), with("7"));
    assert_ne!(with("7"), with("8"));
}

#[test]
fn experts_can_be_re_encoded_at_load() {
    let (out, err) = ok(&["run", "--max-tokens", "12", "--experts-as", "q8_0"]);
    assert!(out.len() > "The ownership system in Rust".len(), "{out:?}");
    assert!(err.contains("Q8_0"), "{err}");
}

#[test]
fn errors_are_said_and_the_exit_code_tells() {
    for (args, word) in [
        (&["run", "--model", "/nonexistent/model", "--prompt", "x"][..], "/nonexistent/model"),
        (&["run", "--model", env!("CARGO_MANIFEST_DIR"), "--prompt", "x"][..], "safetensors"),
        (&["run", "--model", concat!(env!("CARGO_MANIFEST_DIR"), "/model")][..], "--prompt"),
        (&["run", "--backend", "abacus"][..], "abacus"),
        (&["run", "--temperature", "-1"][..], "temperature"),
        (&["run", "--temperature", "inf"][..], "a finite number, 0 or more"),
        (&["run", "--experts-as", "q17"][..], "q17"),
        (&["eval", "--ids", "1,2,99999"][..], "99999"),
        (&["eval"][..], "--text"),
        (&["run", "--heatmap", "hot.jpg"][..], ".png"),
        (&["run", "--trace", "t.txt"][..], ".json"),
        (&["eval", "--ids", "1,2", "--text", "t.txt"][..], "cannot be used with"),
        (&["plan", "--model", "x", "--defer", "1"][..], "--defer"),
        (&["eval", "--ids", "1,2", "--heatmap", "/nonexistent/hot.png"][..], "/nonexistent/hot.png"),
        (&["eval", "--ids", "1,2", "--trace", "/nonexistent/t.json"][..], "/nonexistent/t.json"),
        (&["eval", "--ids", "1,2", "--logits", "/nonexistent/logits"][..], "/nonexistent/logits"),
        (&["run", "--heatmap", "/nonexistent/hot.json"][..], "/nonexistent/hot.json"),
        (&["run", "--trace", "/nonexistent/t.json"][..], "/nonexistent/t.json"),
        (&["run", "--importance", "/nonexistent/seen"][..], "/nonexistent/seen"),
    ] {
        let output = kt(args);
        assert!(!output.status.success(), "{args:?} succeeded");
        let says = text(&output.stderr);
        assert!(output.stdout.is_empty() && says.contains(word), "{args:?}: {says}");
        // Files that cannot be are told before the model is loaded.
        assert!(!word.starts_with("/nonexistent") || !says.contains("loaded"), "{args:?}: {says}");
    }
}

/// A pipe whose reader has gone is the end of the work, a disk that is full an error; neither is a panic.
#[test]
#[cfg(target_os = "linux")]
fn standard_output_that_takes_nothing_is_no_panic() {
    let dir = std::env::temp_dir().join(format!("kt-stdout-{}", std::process::id()));
    let at = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    std::fs::create_dir_all(&dir).unwrap();
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/model");
    let (converted, tiny) = (at("converted"), ["--shape", "64x64x4x2", "--formats", "bf16"]);
    ok(&["convert", "--to", "bf16", "--output", &converted]);
    let mut commands = vec![
        vec!["run", "--max-tokens", "1"],
        vec!["eval", "--ids", "1,2,3"],
        vec!["eval", "--ids", "1,2,3", "--json"],
        vec!["plan", "--model", model],
        vec!["doctor"],
        vec!["doctor", "--json"],
        vec!["verify", &converted],
    ];
    for more in [&["--tokens", "1"][..], &["--tokens", "1", "--json"], &["--scheduling"], &["--dispatch"]] {
        let fast = ["bench", "--seconds", "0.02", "--memory-gib", "0.001"];
        commands.push([&fast[..], &tiny, more].concat());
    }
    if cfg!(feature = "plugins") {
        commands.push(vec!["plugins", dir.to_str().unwrap()]);
    }
    for (name, gone) in [("gone", true), ("full", false)] {
        let output = at(name);
        let convert = vec!["convert", "--to", "bf16", "--json", "--output", &output];
        for args in commands.iter().chain([&convert]) {
            let stdout: std::process::Stdio = match gone {
                true => std::io::pipe().unwrap().1.into(),
                false => std::fs::File::options().write(true).open("/dev/full").unwrap().into(),
            };
            let output = Command::new(env!("CARGO_BIN_EXE_kt")).args(args).stdout(stdout).output().unwrap();
            let says = text(&output.stderr);
            assert!(output.status.success() == gone && !says.contains("panicked"), "{name}: {args:?}: {says}");
            assert!(gone || says.contains("kt: standard output: No space left"), "{args:?}: {says}");
        }
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn the_work_of_experts_is_told_and_drawn() {
    let dir = std::env::temp_dir().join(format!("kt-heat-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (json, png) = (dir.join("hot.json"), dir.join("hot.png"));
    let args = ["run", "--max-tokens", "9", "--ignore-eos", "--stats", "--heatmap", json.to_str().unwrap()];
    let (_, err) = ok(&args);
    for word in ["prefill: layers of experts took", "decode: layers of experts took", "kernels", "GB/s", "hot.json"] {
        assert!(err.contains(word), "no {word:?} in {err}");
    }
    // 9 tokens take 8 steps behind the prompt, in each of 4 layers, with 2 of 8 experts.
    let all = err.lines().filter(|l| l.starts_with("stats    all")).nth(1).unwrap();
    assert_eq!(all.split_whitespace().skip(2).take(3).collect::<Vec<_>>(), ["32", "32", "64"], "{err}");
    let map = kt::HeatMap::load(&json).unwrap();
    assert_eq!(
        map.layers().iter().map(|l| (l.layer, l.counts.len())).collect::<Vec<_>>(),
        [0, 1, 2, 3].map(|l| (l, 8))
    );
    assert!(map.tokens() > 8 && map.total() == map.tokens() * 4 * 2, "{map:?}");

    let (out, err) = ok(&["eval", "--ids", "462,1049,387", "--stats", "--json", "--heatmap", png.to_str().unwrap()]);
    let out: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&out["stats"]["total"]["tokens"], &out["stats"]["layers"][3]["rows"]), (&12.into(), &6.into()));
    let picture = std::fs::read(&png).unwrap();
    assert!(picture.starts_with(b"\x89PNG") && err.contains("hot.png"), "{err}");
    assert!(!ok(&["run", "--max-tokens", "1"]).1.contains("stats"), "not asked for");
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn eval_writes_scores_and_logits() {
    let dir = std::env::temp_dir().join(format!("kt-eval-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (file, prose) = (dir.join("logits.safetensors"), dir.join("text.txt"));
    std::fs::write(&prose, "The `panic!` macro can be used to create a new thread.").unwrap();
    let (file_name, prose_name) = (file.to_str().unwrap(), prose.to_str().unwrap());
    let args = ["eval", "--text", prose_name, "--window", "8", "--logits", file_name, "--json"];
    let json: serde_json::Value = serde_json::from_str(&ok(&args).0).unwrap();
    let tokens = json["tokens"].as_u64().unwrap() as usize;
    assert_eq!(json["predicted"].as_u64().unwrap() as usize, tokens - tokens.div_ceil(8));
    assert!(json["perplexity"].as_f64().unwrap() > 1.0 && json["bits_per_byte"].as_f64().unwrap() > 0.0);
    let bytes = std::fs::read(&file).unwrap();
    let logits = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(logits.tensor("logits").unwrap().shape(), [tokens, 1280]);
    let (out, _) = ok(&["eval", "--ids", "462,1049,387,72,643", "--backend", "portable"]);
    assert!(out.contains("perplexity"), "{out}");
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
#[cfg(all(feature = "amx", target_arch = "x86_64"))]
fn doctor_says_from_how_many_rows_on_amx_tiles_are_used() {
    let dir = std::env::temp_dir().join(format!("kt-cli-crossover-{}", std::process::id()));
    let file = dir.join("kt/amx-crossover");
    let line = || {
        let mut doctor = Command::new(env!("CARGO_BIN_EXE_kt"));
        let output = doctor.args(["doctor", "--json"]).env("XDG_CACHE_HOME", &dir).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        let all: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let line = all["checks"].as_array().unwrap().iter().find(|c| c["check"] == "amx rows").unwrap().clone();
        (line["state"].as_str().unwrap().to_owned(), line["text"].as_str().unwrap().to_owned())
    };
    let (state, says) = line();
    assert!(state == "OK" && says.contains("int8=2 many=32 bf16=2 fp8=2") && says.contains("the default"), "{says}");
    let of = kt::amx::Crossover { int8: 17, many: 60, bf16: 31, fp8: 32 };
    kt_cli::crossover::write(&file, &kt_cli::system::System::here(), of).unwrap();
    let (state, says) = line();
    assert!(
        state == "OK" && says.contains("int8=17 many=60 bf16=31 fp8=32") && says.contains(file.to_str().unwrap()),
        "{says}"
    );
    std::fs::write(&file, "int8=1 many=1 bf16=1").unwrap();
    let (state, says) = line();
    assert!(
        state == "WARN" && says.contains("in place of 3") && says.contains("int8=2 many=32 bf16=2 fp8=2"),
        "{says}"
    );
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
#[cfg(feature = "plugins")]
fn plugins_are_listed_and_refused_with_the_reason() {
    let dir = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("no-plugins");
    std::fs::create_dir_all(&dir).unwrap();
    let file = dir.join("text").with_extension(std::env::consts::DLL_EXTENSION);
    std::fs::write(&file, "not a library").unwrap();
    let (dir, file) = (dir.to_str().unwrap(), file.to_str().unwrap());
    let (out, _) = ok(&["plugins", dir]);
    assert!(out.starts_with("refused") && out.contains(file) && out.contains("wanted a shared library"), "{out}");
    for (wrong, says) in [("/nonexistent/plugins", "no such directory"), (file, "not a directory")] {
        let output = kt(&["plugins", wrong]);
        let error = text(&output.stderr);
        assert!(!output.status.success() && error.contains(wrong) && error.contains(says), "{error}");
    }
    let (out, _) = ok(&["plugins"]);
    assert!(out.starts_with("no plugins: ") && out.contains("does not exist"), "{out}");
    // One that was named must load; of a directory, what is no plugin declines.
    let args = ["run", "--max-tokens", "1", "--backend", "portable", "--plugin"];
    let output = kt(&[&args[..], &[file]].concat());
    assert!(!output.status.success());
    assert!(text(&output.stderr).contains(file) && text(&output.stderr).contains("wanted a shared library"));
    ok(&[&args[..], &[dir]].concat());
}

#[test]
#[cfg(feature = "plugins")]
fn a_plugin_is_listed_with_what_it_says_of_itself() {
    use std::path::Path;

    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("plugins");
    let rustc = |arguments: &[&str], source: &Path| {
        let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
        let output = Command::new(rustc).args(arguments).arg(source).arg("-Aunexpected_cfgs").output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
    };
    let abi = dir.join("abi");
    std::fs::create_dir_all(&abi).unwrap();
    let to = ["--edition=2024", "--crate-type=rlib", "--crate-name=kt_plugin_abi", "--out-dir", abi.to_str().unwrap()];
    rustc(&to, &here.join("../kt-plugin-abi/src/lib.rs"));
    let of = format!("kt_plugin_abi={}", abi.join("libkt_plugin_abi.rlib").display());
    for (variant, says) in [("one", "runs here"), ("declines", "not on a Saturday")] {
        let only = dir.join(variant);
        std::fs::create_dir_all(&only).unwrap();
        let file = only.join("it").with_extension(std::env::consts::DLL_EXTENSION);
        let cfg = format!("variant=\"{variant}\"");
        let to =
            ["--edition=2024", "--crate-type=cdylib", "--cfg", &cfg, "--extern", &of, "-o", file.to_str().unwrap()];
        rustc(&to, &here.join("../tests/plugins/nonsense.rs"));
        let (out, _) = ok(&["plugins", only.to_str().unwrap()]);
        for word in ["loaded", "nonsense", file.to_str().unwrap(), "ABI 1.3", says] {
            assert!(out.contains(word), "no {word:?} in {out}");
        }
    }
}
