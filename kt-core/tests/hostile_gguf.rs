//! Damaged, incomplete and malicious GGUF files: each is refused, and the error names the file and the tensor or key.

mod common;

use bytes::Bytes;
use common::gguf::{EXPERTS, Entry, Gguf, HIDDEN, INTERMEDIATE, TYPES, text};
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
    refuse(&|t| (t.1, t.2) = (vec![64, 1, 1], 40), &["NVFP4", "convert"]);
    refuse(&|t| (t.1, t.2) = (vec![128, 1, 1], 41), &["Q1_0", "convert"]);
    refuse(&|t| t.2 = 21, &["IQ3_S", "blocks of 256"]);
    refused(Gguf::model().entry(UP, |t| t.0 = "other".into()).open(), &["file.gguf", UP, "missing"]);
    let gate = "blk.0.ffn_gate_exps.weight";
    refused(Gguf::model().entry(UP, |t| t.0 = gate.into()).open(), &["file.gguf", gate, "twice"]);

    for (id, want) in TYPES {
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
    refused(
        g().text("general.architecture", "clip").open(),
        &["file.gguf", "general.architecture", "clip", "qwen3moe"],
    );
    refused(g().without_pair("qwen3moe.expert_count").open(), &["file.gguf", "qwen3moe.expert_count", "missing"]);
    refused(set("expert_count", 0).open(), &["file.gguf", "qwen3moe.expert_count"]);
    refused(set("expert_count", 3).open(), &["file.gguf", "ffn_gate_exps", "3 experts"]);
    refused(set("expert_used_count", 3).open(), &["file.gguf", "qwen3moe.expert_used_count", "3", "2 experts"]);
    refused(g().without_pair("qwen3moe.embedding_length").open(), &["file.gguf", "qwen3moe.embedding_length"]);
    refused(set("block_count", 2).open(), &["file.gguf", "blk.1.ffn_gate_exps.weight", "missing"]);
    refused(set("block_count", 1 << 14).open(), &["file.gguf", "blk.1.ffn_gate_exps.weight", "missing"]);
    refused(set("block_count", u32::MAX).open(), &["file.gguf", "block_count", "4294967295"]);
    let endless = g().without_pair("qwen3moe.block_count");
    let endless = endless.pair("qwen3moe.block_count", 10, (1u64 << 60).to_le_bytes().to_vec());
    refused(endless.open(), &["file.gguf", "block_count", "more than"]);
    refused(set("nextn_predict_layers", 1).open(), &["file.gguf", "no layer"]);
    let groups = set("expert_gating_func", 2).uint("qwen3moe.expert_group_count", 5);
    refused(groups.open(), &["file.gguf", "qwen3moe.expert_group_count", "5 groups"]);
    assert_eq!(set("expert_gating_func", 9).open().unwrap().routing(0), None);
    let groups = set("expert_gating_func", 2).uint("qwen3moe.expert_group_count", 2);
    for used in [3, u32::MAX] {
        let used = groups.clone().uint("qwen3moe.expert_group_used_count", used);
        refused(used.open(), &["file.gguf", "qwen3moe.expert_group_count", "of 2 groups"]);
    }
    for scale in [f32::NAN, f32::INFINITY] {
        let key = "qwen3moe.expert_weights_scale";
        refused(g().float(key, scale).open(), &["file.gguf", key, &scale.to_string()]);
    }
    refused(g().pair("qwen3moe.expert_weights_scale", 12, 1e300f64.to_le_bytes().to_vec()).open(), &["inf"]);
}

/// Asks a model that opened for everything that a host does.
fn touch(source: &GgufSource) {
    let decode = |m: kt_core::Matrix| {
        assert!(m.rows() > 0 && m.cols() > 0);
        let _ = m.check_scales();
        let mut row = vec![0.0; m.cols()];
        m.decode_row(m.rows() - 1, &mut row);
    };
    for layer in source.layers() {
        assert!(layer.experts > 0 && layer.top_k > 0 && layer.top_k <= layer.experts);
        let _ = source.routing(layer.index);
        for (expert, proj) in [0, layer.experts - 1].into_iter().flat_map(|e| Proj::ALL.map(|p| (e, p))) {
            let m = source.matrix(layer.index, expert, proj).unwrap();
            assert_eq!(
                (m.rows(), m.cols(), m.format()),
                (layer.shape(proj).0, layer.shape(proj).1, layer.format(proj))
            );
            decode(m);
            let bias = source.bias(layer.index, expert, proj).unwrap();
            assert!(bias.is_none_or(|b| b.len() == layer.shape(proj).0));
        }
    }
    for name in source.tensors() {
        if let Ok(m) = source.tensor(&name) {
            decode(m);
        }
    }
}

/// Opens what may be wrong: it is refused by the file's name, or all of it can be read.
fn survive(bytes: Vec<u8>, what: impl Fn() -> String) -> bool {
    match GgufSource::from_bytes("file.gguf", vec![bytes.into()]) {
        Ok(source) => {
            touch(&source);
            true
        }
        Err(e) => {
            assert!(e.to_string().contains("file.gguf"), "{}: {e}", what());
            false
        }
    }
}

#[test]
fn every_byte_and_word_of_a_header_may_be_hostile() {
    let mut model = Gguf::model().uint("general.alignment", 32).flag("qwen3moe.expert_weights_norm", true);
    model = model.pair("tokens", 9, [&8u32.to_le_bytes()[..], &1u64.to_le_bytes(), &1u64.to_le_bytes(), b"a"].concat());
    model.tensor("blk.0.ffn_up_exps.bias", &[INTERMEDIATE as u64, EXPERTS as u64], 0, EXPERTS * INTERMEDIATE * 4);
    let whole = model.bytes();
    assert!(survive(whole.clone(), String::new));
    let header = whole.len() - model.data.len();
    let (mut opened, mut refused) = (0, 0);
    for at in 0..header {
        let words = [0u64, 1, 1 << 31, 1 << 32, 1 << 40, i64::MAX as u64, 1 << 63, u64::MAX - 31, u64::MAX];
        let words = words.iter().flat_map(|w| [w.to_le_bytes()[..4].to_vec(), w.to_le_bytes().to_vec()]);
        let bytes = [0u8, 1, 2, 9, 13, 0x7f, 0x80, 0xc0, 0xff].map(|b| vec![b]);
        for change in words.chain(bytes) {
            let mut hostile = whole.clone();
            let end = header.min(at + change.len());
            hostile[at..end].copy_from_slice(&change[..end - at]);
            match survive(hostile, || format!("{change:x?} at {at}")) {
                true => opened += 1,
                false => refused += 1,
            }
        }
    }
    // Names of metadata that nobody asks for, for one, may be anything.
    assert!(opened > 100 && refused > 1000, "{opened} opened, {refused} refused");
}

#[test]
fn metadata_may_have_any_type_and_value() {
    let keys = [
        "general.architecture",
        "general.alignment",
        "split.count",
        "split.no",
        "split.tensors.count",
        "qwen3moe.block_count",
        "qwen3moe.embedding_length",
        "qwen3moe.expert_count",
        "qwen3moe.expert_used_count",
        "qwen3moe.nextn_predict_layers",
        "qwen3moe.expert_gating_func",
        "qwen3moe.expert_group_count",
        "qwen3moe.expert_group_used_count",
        "qwen3moe.expert_weights_scale",
        "qwen3moe.expert_weights_norm",
    ];
    // Every type with its extremes; strings and arrays are empty.
    let bits = [0u64, 1, 2, 0x7fc0_0000, 0x7ff8_0000_0000_0000, i64::MAX as u64, 1 << 63, u64::MAX];
    let sizes = [1, 1, 2, 2, 4, 4, 4, 1, 8, 12, 8, 8, 8];
    for (key, kind) in keys.iter().flat_map(|key| (0..13u32).map(move |kind| (key, kind))) {
        for bits in bits {
            let mut value = bits.to_le_bytes().to_vec();
            if kind == 8 || kind == 9 {
                value = vec![0];
            }
            value.resize(sizes[kind as usize], 0);
            for model in [Gguf::model(), Gguf::model().uint("qwen3moe.expert_gating_func", 2)] {
                survive(model.pair(key, kind, value.clone()).bytes(), || format!("{key}, type {kind}, {bits:x}"));
            }
        }
    }
}

#[test]
fn large_vocabularies_and_templates_are_read() {
    let mut tokens = [8u32.to_le_bytes().to_vec(), 300_000u64.to_le_bytes().to_vec()].concat();
    (0..300_000).for_each(|i| text(&mut tokens, &format!("token {i}")));
    let scores = [6u32.to_le_bytes().to_vec(), 300_000u64.to_le_bytes().to_vec(), vec![0; 1_200_000]].concat();
    let model = Gguf::model().pair("tokenizer.ggml.tokens", 9, tokens).pair("tokenizer.ggml.scores", 9, scores);
    let source = model.text("tokenizer.chat_template", &"x".repeat(1 << 20)).open().unwrap();
    let kt_core::Metadata::Gguf(map) = source.metadata() else { panic!("not GGUF metadata") };
    let tokens = map["tokenizer.ggml.tokens"].as_array().unwrap();
    assert_eq!((tokens.len(), tokens[299_999].as_str()), (300_000, Some("token 299999")));
    assert_eq!(map["tokenizer.ggml.scores"].as_array().unwrap().len(), 300_000);
    assert_eq!(map["tokenizer.chat_template"].as_str().unwrap().len(), 1 << 20);
    // More elements than anybody has, in a file that is large enough for them.
    let many = [0u32.to_le_bytes().to_vec(), (1u64 << 24 | 1).to_le_bytes().to_vec(), vec![0; 1 << 24 | 1]].concat();
    refused(Gguf::model().pair("many", 9, many).open(), &["file.gguf", "many", "16777216 elements"]);
}

#[test]
fn biases_and_factors_of_experts_must_fit() {
    let bias = "blk.0.ffn_up_exps.bias";
    let with = |name: &str, ne: &[u64], kind: u32, bytes: &[u8]| {
        let mut g = Gguf::model();
        g.put(name, ne, kind, bytes);
        g.open()
    };
    let rows = INTERMEDIATE as u64;
    let good = with(bias, &[rows, 2], 0, &[0; 2 * INTERMEDIATE * 4]).unwrap();
    assert!(good.layers()[0].biases && good.tensors() == ["output_norm.weight"]);
    assert_eq!(good.bias(0, 1, Proj::Up).unwrap(), Some(vec![0.0; INTERMEDIATE]));
    assert_eq!(good.bias(0, 1, Proj::Down).unwrap(), None);
    for ne in [&[rows, 3][..], &[rows + 1, 2], &[rows], &[rows, 2, 1], &[2, rows]] {
        let size = ne.iter().product::<u64>() as usize * 4;
        refused(with(bias, ne, 0, &vec![0; size]), &["file.gguf", bias, &format!("expected [{rows}, 2]")]);
    }
    refused(with(bias, &[rows, 2], 24, &[0; 2 * INTERMEDIATE]), &["file.gguf", bias, "I8"]);

    let scale = "blk.0.ffn_down_exps.scale";
    let factors = |v: &[f32]| v.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    assert!(with(scale, &[2], 0, &factors(&[1.0, 1.0])).is_ok());
    refused(with(scale, &[2], 0, &factors(&[1.0, 0.5])), &["file.gguf", scale, "0.5", "factors"]);
    refused(with(scale, &[2], 0, &factors(&[f32::NAN, 1.0])), &["file.gguf", scale, "NaN"]);
    refused(with(scale, &[3], 0, &factors(&[1.0; 3])), &["file.gguf", scale, "one number for each"]);
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
    // The first part may have metadata only; the others need not repeat it.
    let none = split(0, Gguf::model(), &|_| false);
    let mut all = split(1, Gguf::model(), &|_| true);
    all.pairs.retain(|p| p.0.starts_with("split."));
    dir.write("n-00001-of-00002.gguf", none.bytes());
    let second = dir.write("n-00002-of-00002.gguf", all.bytes());
    let source = kt_core::open(second).unwrap();
    assert_eq!((source.layers().len(), source.tensors()), (1, vec!["output_norm.weight".to_owned()]));
    let renamed = dir.write("renamed.gguf", first.bytes());
    refused(kt_core::open(&renamed), &["renamed.gguf", "split.count", "original names"]);
}
