//! Damaged, incomplete and malicious GGUF files: each is refused, and the error names the file and the tensor or key.

mod common;

use bytes::Bytes;
use common::gguf::{EXPERTS, Entry, Gguf, HIDDEN, INTERMEDIATE, Q8_0, shape, text};
use common::{Dir, refused};
use kt_core::source::gguf::{GgufSource, is_part_of};
use kt_core::{Format, Proj, WeightSource};

const UP: &str = "blk.0.ffn_up_exps.weight";

#[test]
fn the_unharmed_gguf_file_opens() {
    for version in [2, 3] {
        let source = Gguf { version, ..Gguf::model() }.open().unwrap();
        assert_eq!(
            (source.layers()[0].format_label().as_str(), source.layers()[0].intermediate),
            ("Q8_0", INTERMEDIATE)
        );
        assert_eq!(source.matrix(0, 1, Proj::Down).unwrap().decode(), vec![0.0; HIDDEN * INTERMEDIATE]);
        assert_eq!((source.tensors(), source.dense_bytes()), (vec!["output_norm.weight".to_owned()], 128));
    }
    assert!(Gguf::model().uint("general.alignment", 8).open().is_ok());
}

#[test]
fn fused_gate_and_up_are_taken_apart() {
    let mut g = Gguf::model();
    g.tensors.retain(|t| !t.0.contains("gate_exps") && !t.0.contains("up_exps"));
    // F32, so that values are easy to write: every matrix holds its own number.
    let one = HIDDEN * INTERMEDIATE;
    g.tensor("blk.0.ffn_gate_up_exps.weight", &[HIDDEN as u64, 2 * INTERMEDIATE as u64, 2], 0, 4 * one * 4);
    let mut bytes = g.bytes();
    let start = bytes.len() - 4 * one * 4;
    for (i, value) in bytes[start..].chunks_exact_mut(4).enumerate() {
        value.copy_from_slice(&((i / one) as f32).to_le_bytes());
    }
    let source = GgufSource::from_bytes("file.gguf", vec![bytes.into()]).unwrap();
    assert_eq!(source.layers()[0].formats, [Format::F32, Format::F32, Format::Q8_0]);
    for (e, proj) in (0..EXPERTS).flat_map(|e| [(e, Proj::Gate), (e, Proj::Up)]) {
        assert_eq!(source.matrix(0, e, proj).unwrap().decode(), vec![(2 * e + proj.index()) as f32; one]);
    }
    let odd = g.entry("blk.0.ffn_gate_up_exps.weight", |t| t.1[1] -= 1);
    refused(odd.open(), &["file.gguf", "ffn_gate_up_exps", "even"]);
}

#[test]
fn damaged_gguf_files_are_refused() {
    let good = Gguf::model();
    let whole = good.bytes();
    let open = |bytes: &[u8]| GgufSource::from_bytes("file.gguf", vec![Bytes::copy_from_slice(bytes)]);
    // The padding after the last tensor may be missing; everything else may not, wherever the file ends.
    for len in (0..whole.len() - 32).step_by(7) {
        refused(open(&whole[..len]), &["file.gguf"]);
    }
    refused(open(&whole[..whole.len() - 40]), &["file.gguf", "blk.0.ffn_down_exps.weight", "truncated"]);
    refused(open(&whole[..190]), &["file.gguf", "metadata key 4", "truncated"]);
    refused(open(b"GGML\x03\0\0\0"), &["file.gguf", "GGUF"]);
    refused(open(&[&b"GGUF"[..], &3u32.to_be_bytes(), &[0; 16]].concat()), &["file.gguf", "big-endian"]);
    refused(Gguf { version: 1, ..good.clone() }.open(), &["file.gguf", "version 1"]);
    refused(Gguf { version: 4, ..good.clone() }.open(), &["file.gguf", "version 4"]);
    for n in [u64::MAX, u64::MAX / 24, 1 << 40] {
        refused(
            Gguf { counts: [Some(n), None], ..good.clone() }.open(),
            &["file.gguf", "number of tensors", &n.to_string()],
        );
        refused(
            Gguf { counts: [None, Some(n)], ..good.clone() }.open(),
            &["file.gguf", "metadata entries", &n.to_string()],
        );
        refused(
            good.clone().pair("some.text", 8, n.to_le_bytes().to_vec()).open(),
            &["file.gguf", "some.text", &n.to_string()],
        );
        let array = [&4u32.to_le_bytes()[..], &n.to_le_bytes()].concat();
        refused(good.clone().pair("some.array", 9, array).open(), &["file.gguf", "some.array", &n.to_string()]);
    }
    let nested = [9u32.to_le_bytes().to_vec(), 1u64.to_le_bytes().to_vec()].concat().repeat(9);
    refused(good.clone().pair("some.array", 9, nested).open(), &["file.gguf", "some.array", "deep"]);
    refused(
        good.clone().pair("some.array", 9, [99u32.to_le_bytes().to_vec(), vec![0; 8]].concat()).open(),
        &["some.array", "99"],
    );
    refused(good.clone().pair("some.key", 13, vec![0; 8]).open(), &["file.gguf", "some.key", "type 13"]);
    refused(
        good.clone().pair("some.text", 8, [&2u64.to_le_bytes()[..], &[0xc3, 0x28]].concat()).open(),
        &["some.text", "UTF-8"],
    );
    let mut twice = good.clone();
    twice.pairs.push(twice.pairs[1].clone());
    refused(twice.open(), &["file.gguf", "qwen3moe.block_count", "twice"]);
    for alignment in [0, 3, 48, 1 << 31] {
        refused(
            good.clone().uint("general.alignment", alignment).open(),
            &["file.gguf", "general.alignment", "power of two"],
        );
    }
    refused(good.clone().pair("general.alignment", 6, vec![0; 4]).open(), &["file.gguf", "general.alignment"]);
}

#[test]
fn gguf_tensors_that_cannot_be_are_named() {
    let refuse = |change: &dyn Fn(&mut Entry), wants: &[&str]| {
        refused(Gguf::model().entry(UP, change).open(), &[&["file.gguf", UP], wants].concat());
    };
    refuse(&|t| t.3 = 1 << 40, &["beyond", "truncated"]);
    refuse(&|t| t.3 = u64::MAX - 31, &["beyond"]);
    refuse(&|t| t.3 += 1, &["multiple of 32"]);
    refuse(&|t| t.3 -= 32, &["overlap", "ffn_gate_exps"]);
    refuse(&|t| t.1 = vec![1 << 32, 1 << 32, 2], &["overflow"]);
    refuse(&|t| t.1 = vec![u64::MAX, 1, 1], &["Q8_0"]);
    refuse(&|t| t.1 = vec![32, 0, 1 << 63], &["empty"]);
    refuse(&|t| t.1 = vec![32, 1, 1, 1, 1], &["5 dimensions"]);
    refuse(&|t| t.1 = vec![33, 64, 2], &["33", "Q8_0"]);
    refuse(&|t| t.1 = vec![64, 32, 2], &["hidden size 32"]);
    refuse(&|t| t.1 = vec![32, 64, 1], &["2 experts"]);
    refuse(&|t| t.1 = vec![32, 32, 2], &["intermediate"]);
    refuse(&|t| t.1 = vec![32, 64], &["three"]);
    refuse(&|t| t.2 = 99, &["type 99"]);
    refuse(&|t| t.2 = 31, &["Q4_0_4_4"]);
    refuse(&|t| t.2 = 24, &["I8", "convert"]);
    refuse(&|t| t.2 = 21, &["IQ3_S", "blocks of 256"]);
    refused(Gguf::model().entry(UP, |t| t.0 = "other".into()).open(), &["file.gguf", UP, "missing"]);
    let gate = "blk.0.ffn_gate_exps.weight";
    refused(Gguf::model().entry(UP, |t| t.0 = gate.into()).open(), &["file.gguf", gate, "twice"]);

    for (id, format) in [
        (0, "F32"),
        (1, "F16"),
        (2, "Q4_0"),
        (3, "Q4_1"),
        (6, "Q5_0"),
        (7, "Q5_1"),
        (8, "Q8_0"),
        (10, "Q2_K"),
        (11, "Q3_K"),
        (12, "Q4_K"),
        (13, "Q5_K"),
        (14, "Q6_K"),
        (16, "IQ2_XXS"),
        (17, "IQ2_XS"),
        (18, "IQ3_XXS"),
        (19, "IQ1_S"),
        (20, "IQ4_NL"),
        (21, "IQ3_S"),
        (22, "IQ2_S"),
        (23, "IQ4_XS"),
        (29, "IQ1_M"),
        (30, "BF16"),
        (34, "TQ1_0"),
        (35, "TQ2_0"),
        (39, "MXFP4-ggml"),
    ] {
        let want: kt_core::Format = format.parse().unwrap();
        assert_eq!(want.to_string(), format);
        let mut model = Gguf::model();
        model.tensor("other.weight", &[256, 2], id, want.row_bytes(256).unwrap() * 2);
        let matrix = model.open().unwrap().tensor("other.weight").unwrap();
        assert_eq!((matrix.format(), matrix.rows(), matrix.cols()), (want, 2, 256));
    }

    // A type that is not decoded matters only when it is asked for.
    let source = Gguf::model().entry("output_norm.weight", |t| t.2 = 24).open().unwrap();
    refused(source.tensor("output_norm.weight"), &["file.gguf", "output_norm.weight", "I8", "convert"]);
    refused(source.tensor("no.such"), &["file.gguf", "no.such", "missing"]);
    refused(source.matrix(0, 2, Proj::Up), &["file.gguf", "expert 2"]);
    refused(source.matrix(1, 0, Proj::Up), &["file.gguf", "layer 1"]);
}

#[test]
fn gguf_metadata_that_cannot_be_is_named() {
    let g = Gguf::model;
    let set = |key: &str, value: u32| g().uint(&format!("qwen3moe.{key}"), value);
    refused(g().without_pair("general.architecture").open(), &["file.gguf", "general.architecture", "missing"]);
    let mut name = Vec::new();
    text(&mut name, "clip");
    refused(
        g().pair("general.architecture", 8, name).open(),
        &["file.gguf", "general.architecture", "clip", "qwen3moe"],
    );
    refused(g().without_pair("qwen3moe.expert_count").open(), &["file.gguf", "qwen3moe.expert_count", "missing"]);
    refused(set("expert_count", 0).open(), &["file.gguf", "qwen3moe.expert_count"]);
    refused(set("expert_count", 3).open(), &["file.gguf", "ffn_gate_exps", "3 experts"]);
    refused(set("expert_used_count", 3).open(), &["file.gguf", "qwen3moe.expert_used_count", "3", "2 experts"]);
    refused(g().without_pair("qwen3moe.embedding_length").open(), &["file.gguf", "qwen3moe.embedding_length"]);
    refused(set("block_count", 2).open(), &["file.gguf", "blk.1.ffn_gate_exps.weight", "missing"]);
    refused(set("block_count", u32::MAX).open(), &["file.gguf", "blk.1.ffn_gate_exps.weight", "missing"]);
    refused(set("nextn_predict_layers", 1).open(), &["file.gguf", "no layer"]);
    let groups = set("expert_gating_func", 2).uint("qwen3moe.expert_group_count", 5);
    refused(groups.open(), &["file.gguf", "qwen3moe.expert_group_count", "5 groups"]);
    assert_eq!(set("expert_gating_func", 9).open().unwrap().routing(0), None);
}

#[test]
fn scales_of_gguf_blocks_are_checked() {
    let mut bytes = Gguf::model().bytes();
    let first = bytes.len() - 3 * EXPERTS * HIDDEN * INTERMEDIATE / 32 * 34;
    bytes[first..first + 2].copy_from_slice(&0x7e00u16.to_le_bytes());
    let source = GgufSource::from_bytes("file.gguf", vec![bytes.into()]).unwrap();
    let text = source.matrix(0, 0, Proj::Gate).unwrap().check_scales().unwrap_err();
    assert!(text.contains("row 0"), "{text}");
    source.matrix(0, 1, Proj::Gate).unwrap().check_scales().unwrap();
}

#[test]
fn parts_of_a_split_model_must_belong_together() {
    let split = |no: u16, mut g: Gguf, keep: &dyn Fn(&str) -> bool| {
        g.tensors.retain(|t| keep(&t.0));
        for (key, value) in [("split.no", no), ("split.count", 2)] {
            g = g.pair(key, 2, value.to_le_bytes().to_vec());
        }
        g.pair("split.tensors.count", 5, 4i32.to_le_bytes().to_vec())
    };
    let first = split(0, Gguf::model(), &|n| n != UP);
    let second = split(1, Gguf::model(), &|n| n == UP);
    let dir = Dir::new("split");
    let paths = [dir.write("m-00001-of-00002.gguf", first.bytes()), dir.write("m-00002-of-00002.gguf", second.bytes())];
    assert!(is_part_of(&paths[0], &paths[1]) && !is_part_of(&paths[0], &dir.0.join("n-00002-of-00002.gguf")));
    for path in [&paths[0], &paths[1], &dir.0] {
        let source = kt_core::open(path).unwrap();
        assert!(source.matrix(0, 1, Proj::Up).is_ok() && source.matrix(0, 1, Proj::Gate).is_ok());
        assert_eq!(source.tensor_name(0, 1, Proj::Up), (paths[1].clone(), format!("{UP}[1]")));
    }
    dir.write("m-00002-of-00002.gguf", split(1, Gguf::model(), &|_| true).bytes());
    refused(kt_core::open(&paths[0]), &["m-00002-of-00002.gguf", "output_norm.weight", "twice"]);
    dir.write("m-00002-of-00002.gguf", split(0, Gguf::model(), &|n| n == UP).bytes());
    refused(kt_core::open(&paths[0]), &["m-00002-of-00002.gguf", "split.no"]);
    dir.write("m-00002-of-00002.gguf", split(1, Gguf::model(), &|_| false).bytes());
    refused(kt_core::open(&paths[0]), &["m-00001-of-00002.gguf", "split.tensors.count", "3 tensors"]);
    dir.write("m-00002-of-00002.gguf", Gguf::model().bytes());
    refused(kt_core::open(&paths[0]), &["m-00002-of-00002.gguf", "split.count"]);
    std::fs::remove_file(&paths[0]).unwrap();
    refused(kt_core::open(&paths[1]), &["m-00002-of-00002.gguf", "m-00001-of-00002.gguf", "missing"]);
    let renamed = dir.write("renamed.gguf", first.bytes());
    refused(kt_core::open(&renamed), &["renamed.gguf", "split.count", "original names"]);
}
