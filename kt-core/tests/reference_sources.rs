//! The reference checkpoints and the built-in model, opened: shapes, formats, routing, and sample rows of every expert.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kt_core::source::names::Names;
use kt_core::{Format, Group, Metadata, Proj, Routing, Rule, WeightSource};
use safetensors::SafeTensors;

const REFERENCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/reference");
const BUILT_IN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../kt-cli/model");

fn open(path: impl AsRef<Path>) -> Arc<dyn WeightSource> {
    kt_core::open(path).unwrap()
}

struct Expected {
    dir: &'static str,
    layers: &'static [usize],
    experts: usize,
    top_k: usize,
    intermediate: usize,
    format: Format,
    rule: Rule,
    scale: f32,
}

fn expected() -> Vec<Expected> {
    let qwen = |dir, format| Expected {
        dir,
        layers: &[0, 1],
        experts: 8,
        top_k: 3,
        intermediate: 256,
        format,
        rule: Rule::Softmax { renormalize: true },
        scale: 1.0,
    };
    let deepseek = |dir, format| Expected {
        dir,
        layers: &[1, 2],
        experts: 9,
        top_k: 4,
        intermediate: 128,
        format,
        rule: Rule::BiasedSigmoid { groups: 3, keep: 2, renormalize: true },
        scale: 2.5,
    };
    vec![
        qwen("qwen3_moe/bf16", Format::Bf16),
        qwen("qwen3_moe/fp8_block", Format::Fp8Block),
        qwen("qwen3_moe/rawint4", Format::Int4(Group::Of(32))),
        qwen("qwen3_moe/gguf-Q4_K/qwen3_moe-Q4_K.gguf", Format::Q4K),
        qwen("qwen3_moe/gguf-Q6_K/qwen3_moe-Q6_K.gguf", Format::Q6K),
        qwen("qwen3_moe/gguf-Q8_0", Format::Q8_0),
        deepseek("deepseek_v3/bf16", Format::Bf16),
        deepseek("deepseek_v3/fp8_block", Format::Fp8Block),
        deepseek("deepseek_v3/rawint4", Format::Int4(Group::Of(32))),
    ]
}

#[test]
fn layers_formats_and_routing_are_those_of_the_checkpoints() {
    for want in expected() {
        let source = open(Path::new(REFERENCE).join(want.dir));
        let indices: Vec<usize> = source.layers().iter().map(|l| l.index).collect();
        assert_eq!(indices, want.layers, "{}", want.dir);
        for layer in source.layers() {
            let got = (layer.experts, layer.top_k, layer.hidden, layer.intermediate, layer.formats, layer.biases);
            assert_eq!(
                got,
                (want.experts, want.top_k, 256, want.intermediate, [want.format; 3], false),
                "{}",
                want.dir
            );
            let routing = Routing { top_k: want.top_k, rule: want.rule.clone(), scale: want.scale };
            assert_eq!(source.routing(layer.index), Some(routing), "{}", want.dir);
            for expert in 0..layer.experts {
                for proj in Proj::ALL {
                    let m = source.matrix(layer.index, expert, proj).unwrap();
                    // Of GGUF, scales are among the codes.
                    assert_eq!(layer.scales[proj.index()], m.scales().map(|s| s.kind()), "{}", want.dir);
                    assert_eq!((m.format(), (m.rows(), m.cols())), (want.format, layer.shape(proj)));
                    m.check_scales().unwrap();
                }
            }
            assert!(source.matrix(layer.index, layer.experts, Proj::Up).is_err(), "one expert too many");
        }
        assert_eq!(source.routing(7), None);
        assert!(source.matrix(7, 0, Proj::Gate).unwrap_err().to_string().contains("layer 7"), "{}", want.dir);
    }
}

#[test]
fn the_built_in_model_opens() {
    let source = open(BUILT_IN);
    assert_eq!(source.layers().len(), 4);
    let layer = &source.layers()[3];
    assert_eq!((layer.experts, layer.top_k, layer.hidden, layer.format_label().as_str()), (8, 2, 256, "BF16"));
    assert_eq!(source.metadata().family(), Some("qwen3_moe"));
    assert!(source.side_file("tokenizer.json").unwrap().is_some_and(|t| t.starts_with(b"{")));
    assert!(source.side_file("no-such-file.json").unwrap().is_none());
    assert!(source.side_file("../model/config.json").is_err(), "a way out of the directory");
    // The same from one of its files, and all bytes are accounted for.
    let by_file = open(Path::new(BUILT_IN).join("model.safetensors"));
    assert_eq!(by_file.layers(), source.layers());
    let experts: u64 = source.layers().iter().map(|l| l.expert_bytes() * l.experts as u64).sum();
    let file = std::fs::read(Path::new(BUILT_IN).join("model.safetensors")).unwrap();
    let header = u64::from_le_bytes(file[..8].try_into().unwrap());
    assert_eq!(experts + source.dense_bytes(), file.len() as u64 - 8 - header);
}

/// A tensor of a small safetensors file, as F32.
fn f32_tensor(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let view = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(view.dtype(), safetensors::Dtype::F32, "{name}");
    view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

#[test]
fn first_and_last_rows_of_every_expert_equal_the_samples() {
    let mut compared = 0;
    for want in expected() {
        let dir: PathBuf = Path::new(REFERENCE).join(want.dir);
        let dir = if dir.is_dir() { dir } else { dir.parent().unwrap().to_owned() };
        let Ok(bytes) = std::fs::read(dir.join("dequant_sample.safetensors")) else { continue };
        let samples = SafeTensors::deserialize(&bytes).unwrap();
        let source = open(&dir);
        let gguf = matches!(source.metadata(), Metadata::Gguf(_));
        for layer in source.layers() {
            for (expert, proj) in (0..layer.experts).flat_map(|e| Proj::ALL.map(|p| (e, p))) {
                let (i, p) = (layer.index, proj.name());
                let (name, skip) = match gguf {
                    true => (format!("blk.{i}.ffn_{p}_exps.weight"), expert),
                    false => (format!("model.layers.{i}.mlp.experts.{expert}.{p}_proj.weight"), 0),
                };
                let m = source.matrix(i, expert, proj).unwrap();
                let mut row = vec![0.0; m.cols()];
                for (which, at) in [("first_rows", 0), ("last_rows", m.rows() - 1)] {
                    m.decode_row(at, &mut row);
                    let sample = f32_tensor(&samples, &format!("{name}.{which}"));
                    assert_eq!(row, sample[skip * m.cols()..][..m.cols()], "{}: {name} {which}", want.dir);
                    compared += 1;
                }
            }
        }
    }
    assert_eq!(compared, 2 * 3 * 2 * (8 * 5 + 9 * 2), "samples of 7 directories, 2 layers each");
}

#[test]
fn other_tensors_are_served_by_name_whatever_their_format() {
    for want in expected() {
        let source = open(Path::new(REFERENCE).join(want.dir));
        let names = Names::of(&*source).unwrap();
        let mut bytes = 0;
        for name in source.tensors() {
            // Quantized matrices are asked for by `.weight`; what belongs to them is not served by itself.
            if ["_scale", "_scale_inv", "_shape", "_packed"].iter().any(|s| name.ends_with(s)) {
                continue;
            }
            let m = source.tensor(&name).unwrap_or_else(|e| panic!("{}: {e}", want.dir));
            bytes += m.byte_len();
            source.release_tensor(&name);
            assert!(m.decode().iter().all(|v| v.is_finite()), "{name} after its release");
        }
        assert_eq!(bytes, source.dense_bytes(), "{}", want.dir);
        for &layer in want.layers {
            let router = source.tensor(&names.router(layer)).unwrap();
            assert_eq!((router.rows(), router.cols()), (want.experts, 256), "{}", want.dir);
            if let Some(bias) = names.correction_bias(layer) {
                assert_eq!(source.tensor(&bias).unwrap().cols(), want.experts);
            }
            if let Some(shared) = names.shared(layer, Proj::Down) {
                let shared = source.tensor(&shared).unwrap();
                assert_eq!((shared.rows(), shared.cols()), (256, want.intermediate));
            }
        }
        let missing = source.tensor("no.such.weight").unwrap_err().to_string();
        assert!(
            missing.contains("no.such.weight") && missing.contains(want.dir.split('/').nth(1).unwrap()),
            "{missing}"
        );
    }
}

#[test]
fn matrices_stay_readable_after_release_and_after_their_source() {
    for want in expected() {
        let source = open(Path::new(REFERENCE).join(want.dir));
        let m = source.matrix(want.layers[0], 1, Proj::Down).unwrap();
        let before = m.decode();
        for expert in 0..want.experts {
            source.release(want.layers[0], expert);
        }
        source.release(99, 99);
        drop(source);
        assert_eq!(m.decode(), before, "{}", want.dir);
    }
}
