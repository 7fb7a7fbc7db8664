//! The header and the library, by C programs that a C compiler makes here: skipped aloud where there is none.

use std::mem::{offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::Command;

use kt_c::*;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A checkpoint with experts.
fn checkpoint() -> PathBuf {
    root().join("tests/data/reference/qwen3_moe/bf16")
}

/// Compiles a C program against header and library, and runs it: its standard output.
fn run(source: &str, arguments: &[&str]) -> Option<String> {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    if Command::new(&compiler).arg("--version").output().is_err() {
        eprintln!("skipped: there is no C compiler `{compiler}`");
        return None;
    }
    // The library lies beside this test, or a directory above.
    let here = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let file = format!("{}kt_c{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let library = [here.clone(), here.join("..")].into_iter().find(|dir| dir.join(&file).exists()).unwrap();
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(Path::new(source).file_stem().unwrap());
    let mut compile = Command::new(&compiler);
    compile.args(["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-o"]).arg(&program);
    compile.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(source));
    compile.arg("-I").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("include"));
    compile.arg("-L").arg(&library).arg("-lkt_c").arg(format!("-Wl,-rpath,{}", library.display()));
    let compiled = compile.output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let output = Command::new(&program).args(arguments).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{source} ended with {}: {out}{err}", output.status);
    Some(out.into_owned())
}

#[test]
fn a_c_program_embeds_the_runtime() {
    let checkpoint = checkpoint();
    let Some(out) = run("examples/embed.c", &[checkpoint.to_str().unwrap(), "portable"]) else { return };
    // The same by the facade.
    let source = kt::open(&checkpoint).unwrap();
    let runtime = kt::runtime().backend("portable").build().unwrap();
    let experts = runtime.load(&*source).unwrap();
    assert!(!experts.layers().is_empty());
    for layer in experts.layers() {
        let spec = layer.spec();
        let input: Vec<f32> = (0..3 * spec.hidden).map(|i| ((i % 17) as f64 / 17.0 - 0.5) as f32).collect();
        let ids = (0..3 * spec.top_k).map(|i| (i % spec.experts) as i32).collect();
        let weights = vec![1.0 / spec.top_k as f32; 3 * spec.top_k];
        let mut batch = kt::Batch::new(3, input, ids, weights).unwrap();
        layer.forward(&mut batch).unwrap();
        let line = format!("layer {}: output[0] = {:.6}", spec.index, batch.output()[0]);
        assert!(out.contains(&line), "no {line:?} in {out}");
    }
    assert!(out.contains("portable"), "{out}");
}

#[test]
fn errors_are_told_and_types_agree() {
    let Some(out) = run("tests/errors.c", &[checkpoint().to_str().unwrap()]) else { return };
    let sizes = [
        size_of::<kt_error>(),
        size_of::<kt_options>(),
        size_of::<kt_layer>(),
        size_of::<kt_plan_bytes>(),
        size_of::<kt_batch>(),
        offset_of!(kt_options, in_place),
        offset_of!(kt_options, batch_invariant),
        offset_of!(kt_layer, stored_bytes),
        offset_of!(kt_batch, weights),
    ];
    let told: Vec<usize> = out.lines().next().unwrap().split(' ').map(|n| n.parse().unwrap()).collect();
    assert_eq!(told, sizes);
    assert!(out.ends_with("all said\n"), "{out}");
}

#[test]
fn the_library_exports_what_the_header_declares() {
    let header = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("include/kt.h")).unwrap();
    let library = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs")).unwrap();
    let exported: Vec<&str> = library
        .split("extern \"C\" fn ")
        .skip(1)
        .filter_map(|rest| rest.split('(').next())
        .filter(|name| name.starts_with("kt_"))
        .collect();
    assert!(exported.len() > 10);
    for name in exported {
        assert!(header.contains(&format!(" {name}(")), "kt.h does not declare {name}");
    }
}

#[test]
fn the_library_has_the_backends_that_the_facade_has_by_default() {
    // Of one package alone; a test of the whole workspace is built with what any of them wants.
    let defaults = |manifest: &str| -> Vec<String> {
        let text = std::fs::read_to_string(root().join(manifest)).unwrap();
        let list = text.split("default = [").nth(1).and_then(|rest| rest.split(']').next()).unwrap();
        list.split(',').map(|name| name.trim().trim_matches('"').to_owned()).collect()
    };
    let here = defaults("kt-c/Cargo.toml");
    for backend in defaults("Cargo.toml") {
        assert!(here.contains(&backend), "kt-c has no `{backend}` by default");
    }
}
