//! `kt bench`, on a layer small enough to take no time.

use std::process::{Command, Output};

use serde_json::Value;

fn bench(args: &[&str]) -> Output {
    let tiny = ["bench", "--seconds", "0.02", "--memory-gib", "0.001"];
    Command::new(env!("CARGO_BIN_EXE_kt")).args(tiny).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn ok(args: &[&str]) -> String {
    let output = bench(args);
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

fn json_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_run_is_compared_with_an_earlier_one() {
    let path = std::env::temp_dir().join(format!("kt-bench-{}.json", std::process::id()));
    let file = path.to_str().unwrap();
    let shapes = "64x64x4x2,128x64x4x2";
    let earlier = ok(&["--shape", shapes, "--formats", "bf16,f32", "--tokens", "1,3", "--json"]);
    std::fs::write(&path, &earlier).unwrap();
    let lines = json_lines(&earlier);
    assert_eq!(lines.len(), 1 + 2 * 2 * 2);
    assert_eq!(lines[0]["kt_bench"], 1);
    assert!(lines[0]["limits"]["read_gb_per_s"]["median"].as_f64().unwrap() > 0.0);
    for case in &lines[1..] {
        let fraction = case["fraction_of_limit"].as_f64().unwrap();
        let quartiles = [&case["fraction_quartiles"][0], &case["fraction_quartiles"][1]].map(|q| q.as_f64().unwrap());
        assert!(quartiles[0] <= fraction && fraction <= quartiles[1] && fraction > 0.0, "{case}");
        assert!(case["ms"].as_f64().unwrap() > 0.0 && case["limits"]["peak_tera_op_per_s"].as_f64().unwrap() > 0.0);
    }

    let table = ok(&["--shape", "64x64x4x2", "--formats", "bf16,f16", "--tokens", "1,3", "--compare", file]);
    let row = |start: &str| table.lines().find(|l| l.starts_with(start)).unwrap_or_else(|| panic!("{start}: {table}"));
    for words in ["compared with a run of", "ratio", "earlier only: BF16, 128x64x4x2, 3 tokens", "earlier only: F32"] {
        assert!(table.contains(words), "no {words:?} in {table}");
    }
    assert!(row("F16 ").contains(" new "), "{table}");
    assert!(row("BF16 ").matches('%').count() == 2, "{table}");

    // Another machine's run is told; fractions of a half and a double come out as a ratio.
    let mut other = lines.clone();
    other[0]["cpu"] = "Another CPU".into();
    let half = other[1]["fraction_of_limit"].as_f64().unwrap() / 1e6;
    other[1]["fraction_of_limit"] = half.into();
    std::fs::write(&path, other.iter().map(|l| format!("{l}\n")).collect::<String>()).unwrap();
    let args = ["--shape", "64x64x4x2", "--formats", "bf16", "--tokens", "1", "--compare", file];
    assert!(ok(&args).contains("DIFFERENT CPU: Another CPU earlier"));
    let json = json_lines(&ok(&[&args[..], &["--json"]].concat()));
    // Numbers lose their last bit in JSON.
    assert!((json[1]["earlier"]["fraction_of_limit"].as_f64().unwrap() / half - 1.0).abs() < 1e-12);
    assert!(json[1]["earlier"]["ratio"].as_f64().unwrap() > 1e3, "{}", json[1]);

    let cut = &earlier[..earlier.len() - 9];
    std::fs::write(&path, cut).unwrap();
    let output = bench(&args);
    let says = text(&output.stderr);
    std::fs::remove_file(&path).unwrap();
    assert!(!output.status.success() && output.stdout.is_empty());
    assert!(says.contains(file) && says.contains("line 9") && says.contains("remove its last line"), "{says}");
}

#[test]
fn scheduling_is_told_beside_a_call_of_one_token() {
    let lines = json_lines(&ok(&["--scheduling", "--shape", "128x64x4x2", "--formats", "bf16,q4_k,int8", "--json"]));
    let formats: Vec<_> = lines.iter().map(|l| l["scheduling"]["format"].as_str().unwrap()).collect();
    assert_eq!(formats, ["BF16", "INT8-channel"], "a tiny layer cannot have blocks of 256 columns");
    for line in &lines {
        let s = |name: &str| line["scheduling"][name].as_f64().unwrap();
        assert!(s("tiny_layer_us") > 0.0 && s("products_on_one_thread_us") > 0.0 && s("one_token_us") > 0.0);
        let rest = s("tiny_layer_us") - s("products_on_one_thread_us") / s("threads");
        assert!((s("scheduling_us") - rest.max(0.0)).abs() < 1e-6, "{line}");
        assert!((s("share_of_one_token") * s("one_token_us") - s("scheduling_us")).abs() < 1e-6, "{line}");
    }
    let table = ok(&["--scheduling", "--shape", "128x64x4x2", "--formats", "bf16"]);
    assert!(table.contains("scheduling") && table.lines().any(|l| l.starts_with("BF16")), "{table}");
}

#[test]
fn the_environment_caps_the_tier_and_help_says_so() {
    let with = |isa: &str| {
        let args = ["bench", "--tokens", "100000000000"];
        let output = Command::new(env!("CARGO_BIN_EXE_kt")).args(args).env("KT_ISA", isa).output().unwrap();
        text(&output.stderr)
    };
    assert!(with("sse9").contains("KT_ISA is `sse9`"), "{}", with("sse9"));
    assert!(!with("").contains("KT_ISA"), "{}", with(""));
    assert!(ok(&["--help"]).contains("KT_ISA"));
}

#[test]
fn what_cannot_be_measured_is_refused() {
    for (args, says) in [
        (&["--shape", "300x300x4x2", "--formats", "q4_k"][..], "multiples of 256"),
        (&["--tokens", "0"], "--tokens"),
        (&["--tokens", "1,100000000000"], "are available"),
        (&["--seconds", "0"], "--seconds"),
        (&["--shape", "64x64x4x2", "--formats", "all", "--compare", "/nonexistent/x"], "/nonexistent/x"),
        (&["--scheduling", "--shape", "256x256x4x2", "--formats", "q4_k"], "bf16,int8"),
    ] {
        let output = bench(args);
        let error = text(&output.stderr);
        assert!(!output.status.success() && output.stdout.is_empty() && error.contains(says), "{args:?}: {error}");
    }
}
