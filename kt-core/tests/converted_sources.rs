//! Directories as kt-kernel's converter writes them: packed here one code at a time by the index formulas, and read by the source.

mod common;

use half::bf16;
use kt_core::convert::Container;
use kt_core::source::converted::{ConvertedSource, Int8Layout};
use kt_core::source::names::Names;
use kt_core::testing::Random;
use kt_core::{Format, Group, Proj, WeightSource};
use serde_json::{Value, json};

use common::{Dir, EXPERTS, Tensor, converts_experts, refused, safetensors, tensor, without};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Method {
    Int4,
    Int8,
    MoeInt8,
}

impl Method {
    fn name(self) -> &'static str {
        match self {
            Method::Int4 => "INT4",
            Method::Int8 => "INT8",
            Method::MoeInt8 => "MOE_INT8",
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    method: Method,
    hidden: usize,
    intermediate: usize,
    nodes: usize,
}

/// Position of a code in bytes, and whether it is in the high nibble.
fn position(method: Method, (rows, cols): (usize, usize), n: usize, k: usize) -> (usize, bool) {
    let tall = match method {
        Method::MoeInt8 => return (n * cols + k, false),
        Method::Int8 => 64,
        Method::Int4 => 128,
    };
    let (nb, kb, n1, k1) = (n / tall, k / 3584, n % tall, k % 3584);
    let (nbs, kbs) = (tall.min(rows - tall * nb), 3584.min(cols - 3584 * kb));
    let before = nb * tall * cols + kb * 3584 * nbs + n1 / 32 * 32 * kbs;
    let within = n1 % 32 / 16 * 1024 + n1 % 16 * 4;
    if method == Method::Int8 {
        (before + k1 / 64 * 2048 + within + k1 % 64 / 4 * 64 + k1 % 4, false)
    } else {
        let j = k1 % 64;
        (before / 2 + k1 / 128 * 2048 + within + j / 4 * 64 + j % 4, k1 % 128 >= 64)
    }
}

/// A converted slice: codes and scales, and the values that they stand for.
struct Slice {
    name: String,
    method: Method,
    codes: Vec<u8>,
    scales: Vec<f32>,
    values: Vec<f32>,
}

/// Quantizes as the converter does: a scale per row; 4 bits by rounding 8-bit codes to steps of 16.
fn convert(method: Method, (rows, cols): (usize, usize), name: String, random: &mut Random) -> Slice {
    let mut slice = Slice {
        name,
        method,
        codes: vec![0; if method == Method::Int4 { rows * cols / 2 } else { rows * cols }],
        scales: Vec::new(),
        values: Vec::new(),
    };
    for n in 0..rows {
        let row: Vec<f32> = (0..cols).map(|_| random.normal() * 0.05).collect();
        let amax = row.iter().fold(0f32, |a, v| a.max(v.abs()));
        let scale = amax / if method == Method::Int4 { 112.0 } else { 127.0 };
        for (k, v) in row.iter().enumerate() {
            let (at, high) = position(method, (rows, cols), n, k);
            let code = (v / scale).round_ties_even() as i32;
            if method == Method::Int4 {
                let rounded = code.signum() * ((code.abs() + 8) & 0xf0);
                let upper = rounded as i8 as u8 & 0xf0;
                slice.codes[at] |= if high { upper } else { upper >> 4 };
                slice.values.push(rounded as f32 * scale);
            } else {
                slice.codes[at] = code as i8 as u8;
                slice.values.push(code as f32 * scale);
            }
        }
        slice.scales.push(scale);
    }
    slice
}

fn shape(case: Case, proj: Proj) -> (usize, usize) {
    match proj {
        Proj::Down => (case.hidden, case.intermediate / case.nodes),
        _ => (case.intermediate / case.nodes, case.hidden),
    }
}

/// All slices of a model of one expert layer, which follows a dense one.
fn slices(case: Case) -> Vec<(usize, Proj, usize, Slice)> {
    let mut random = Random(5);
    let mut all = Vec::new();
    for (e, proj) in (0..EXPERTS).flat_map(|e| Proj::ALL.map(|p| (e, p))) {
        for t in 0..case.nodes {
            let name = format!("blk.1.ffn_{}_exps.{e}.numa.{t}", proj.name());
            all.push((e, proj, t, convert(case.method, shape(case, proj), name, &mut random)));
        }
    }
    all
}

fn config_for(case: Case) -> Value {
    json!({
        "model_type": "deepseek_v2", "n_routed_experts": EXPERTS, "num_experts_per_tok": 1, "num_hidden_layers": 2,
        "first_k_dense_replace": 1, "hidden_size": case.hidden, "moe_intermediate_size": case.intermediate,
        // Of the model before it was converted.
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]},
    })
}

fn merged(slices: &[(usize, Proj, usize, Slice)]) -> Vec<Tensor> {
    let mut tensors = Vec::new();
    for (.., slice) in slices {
        let mut codes = tensor(format!("{}.weight", slice.name), "I8", &[slice.codes.len()]);
        codes.bytes = slice.codes.clone();
        let mut scales = tensor(format!("{}.scale", slice.name), "F32", &[slice.scales.len()]);
        scales.bytes = slice.scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        tensors.extend([codes, scales]);
    }
    let mut router = tensor("blk.1.ffn_gate_inp.weight", "BF16", &[EXPERTS, 2]);
    router.bytes = [1.0, 2.0, 3.0, 4.0].iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect();
    tensors.push(router);
    tensors
}

fn write_merged(dir: &Dir, config: &Value, tensors: &[Tensor]) {
    dir.write("config.json", config.to_string());
    dir.write("model.safetensors", safetensors(tensors));
}

fn write_tree(dir: &Dir, config: &Value, slices: &[(usize, Proj, usize, Slice)]) {
    dir.write("config.json", config.to_string());
    for (e, proj, t, slice) in slices {
        let node = format!("_layer_1/_numa_{t}");
        std::fs::create_dir_all(dir.0.join(&node)).unwrap();
        let (method, proj) = (slice.method.name(), proj.name());
        let scales: Vec<u8> = slice.scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        dir.write(&format!("{node}/{method}_{proj}_{e}_{}Byte_quant_.kt", slice.codes.len()), &slice.codes);
        dir.write(&format!("{node}/{method}_{proj}_{e}_{}Byte_scale_.kt", scales.len()), scales);
    }
}

fn check(source: &dyn WeightSource, case: Case, slices: &[(usize, Proj, usize, Slice)]) {
    let layer = &source.layers()[0];
    assert_eq!((source.layers().len(), layer.index, layer.experts), (1, 1, EXPERTS), "{case:?}");
    for (e, proj) in (0..EXPERTS).flat_map(|e| Proj::ALL.map(|p| (e, p))) {
        let m = source.matrix(1, e, proj).unwrap();
        let group = match proj {
            Proj::Down if case.nodes > 1 => Group::Of((case.intermediate / case.nodes) as u32),
            _ => Group::Row,
        };
        let format = if case.method == Method::Int4 { Format::Int4(group) } else { Format::Int8(group) };
        assert_eq!((m.format(), layer.format(proj)), (format, format), "{case:?}");
        assert_eq!(layer.scales[proj.index()], m.scales().map(|s| s.kind()), "{case:?}");
        assert_eq!((m.rows(), m.cols()), layer.shape(proj));
        assert!(source.reads(layer, proj).copied_bytes >= m.codes().len() as u64, "{case:?}");
        let values = m.decode();
        for (.., t, slice) in slices.iter().filter(|s| (s.0, s.1) == (e, proj)) {
            let (rows, cols) = shape(case, proj);
            for n in 0..rows {
                let at = if proj == Proj::Down { n * case.intermediate + t * cols } else { (t * rows + n) * cols };
                assert!(
                    values[at..at + cols] == slice.values[n * cols..][..cols],
                    "{case:?} {proj:?} {e} {t}: row {n}"
                );
            }
        }
        source.release(1, e);
    }
    assert!(source.matrix(0, 0, Proj::Up).is_err() && source.matrix(1, EXPERTS, Proj::Up).is_err());
    assert!(source.routing(1).is_some());
}

fn cases() -> Vec<Case> {
    let case = |method, hidden, intermediate, nodes| Case { method, hidden, intermediate, nodes };
    vec![
        case(Method::Int8, 192, 256, 1),
        case(Method::Int8, 128, 384, 2),
        case(Method::Int8, 64, 192, 3),
        case(Method::Int8, 64, 256, 4),
        case(Method::Int4, 128, 256, 1),
        case(Method::Int4, 256, 256, 2),
        case(Method::Int4, 128, 384, 3),
        case(Method::MoeInt8, 64, 128, 1),
        case(Method::MoeInt8, 96, 80, 2),
        case(Method::MoeInt8, 64, 192, 3),
        // More columns than a block of tiles has.
        case(Method::Int8, 3584 + 64, 64, 1),
        case(Method::Int4, 3584 + 256, 128, 1),
    ]
}

#[test]
fn merged_files_and_trees_are_read_whole_again() {
    for (i, case) in cases().into_iter().enumerate() {
        let slices = slices(case);
        let dir = Dir::new(&format!("converted-merged-{i}"));
        write_merged(&dir, &config_for(case), &merged(&slices));
        let source = kt_core::open(&dir.0).unwrap();
        check(&*source, case, &slices);
        let formats = [Some(Format::Bf16), Some(Format::Int8(Group::Row)), Some(Format::Int4(Group::Of(16)))];
        converts_experts(&source, Container::Safetensors, &formats);
        assert_eq!(source.tensors(), ["blk.1.ffn_gate_inp.weight"]);
        assert_eq!(source.dense_bytes(), EXPERTS as u64 * 4);
        assert_eq!(source.tensor_name(1, 1, Proj::Up).1, "blk.1.ffn_up_exps.1.numa.0.weight");
        let router = Names::of(&*source).unwrap().router(1);
        assert_eq!(source.tensor(&router).unwrap().decode(), [1.0, 2.0, 3.0, 4.0]);
        assert!(source.tensor("blk.0.attn_q.weight").is_err());

        let dir = Dir::new(&format!("converted-tree-{i}"));
        write_tree(&dir, &config_for(case), &slices);
        let source = kt_core::open(&dir.0).unwrap();
        check(&*source, case, &slices);
        converts_experts(&source, Container::Safetensors, &formats);
        assert!(source.tensors().is_empty());
        refused(source.tensor("blk.1.ffn_gate_inp.weight"), &["ffn_gate_inp", "original model"]);
        assert_eq!(source.side_file("tokenizer.json").unwrap(), None);
    }
}

#[test]
fn a_fingerprint_has_every_file_and_the_order_of_codes() {
    let case = cases()[1];
    let slices = slices(case);
    let dir = Dir::new("converted-fingerprint");
    write_tree(&dir, &config_for(case), &slices);
    let print = || kt_core::open(&dir.0).unwrap().fingerprint().unwrap();
    let first = print();
    assert_eq!(print(), first);
    let last = std::fs::read_dir(dir.0.join("_layer_1/_numa_1")).unwrap().last().unwrap().unwrap().path();
    let file = std::fs::File::options().write(true).open(last).unwrap();
    file.set_modified(std::time::SystemTime::UNIX_EPOCH - std::time::Duration::from_secs(5)).unwrap();
    assert_ne!(print(), first);

    let dir = Dir::new("converted-fingerprint-merged");
    write_merged(&dir, &config_for(case), &merged(&slices));
    let as_layout = |layout| ConvertedSource::open_as(&dir.0, layout).unwrap().fingerprint().unwrap();
    let [tiles, rows] = [Int8Layout::Tiles, Int8Layout::Rows].map(as_layout);
    assert!(tiles != rows && tiles == kt_core::open(&dir.0).unwrap().fingerprint().unwrap());
}

#[test]
fn tiles_and_rows_of_bytes_are_told_apart_or_asked_for() {
    let case = Case { method: Method::Int8, hidden: 128, intermediate: 128, nodes: 1 };
    let good = slices(case);
    let dir = Dir::new("converted-order");
    write_merged(&dir, &config_for(case), &merged(&good));
    check(&ConvertedSource::open_as(&dir.0, Int8Layout::Tiles).unwrap(), case, &good);
    let wrong = ConvertedSource::open_as(&dir.0, Int8Layout::Rows).unwrap();
    assert!(wrong.matrix(1, 0, Proj::Gate).unwrap().decode() != good[0].3.values);

    // Codes of an encoder that leaves the largest away: either is possible.
    let mut dull = slices(case);
    for (.., slice) in &mut dull {
        slice.codes.iter_mut().for_each(|c| *c = (*c as i8).clamp(-126, 126) as u8);
        let n = slice.values.len() / slice.scales.len();
        for (i, v) in slice.values.iter_mut().enumerate() {
            let s = slice.scales[i / n];
            *v = (*v / s).round().clamp(-126.0, 126.0) * s;
        }
    }
    write_merged(&dir, &config_for(case), &merged(&dull));
    refused(ConvertedSource::open(&dir.0), &["model.safetensors", "blk.1.ffn_gate_exps.0", "AMXINT8", "open_as"]);
    refused(kt_core::open(&dir.0), &["MOE_INT8"]);
    check(&ConvertedSource::open_as(&dir.0, Int8Layout::Tiles).unwrap(), case, &dull);
    // All zeros are so in any order, which only the caller can choose.
    let tree = Dir::new("converted-order-tree");
    write_tree(&tree, &config_for(case), &dull);
    check(&ConvertedSource::open(&tree.0).unwrap(), case, &dull);
    refused(ConvertedSource::open_as(&tree.0, Int8Layout::Rows), &["_numa_0", "rows", "otherwise"]);
}

#[test]
fn converted_directories_that_do_not_fit_are_refused() {
    let case = Case { method: Method::Int4, hidden: 128, intermediate: 384, nodes: 3 };
    let all = slices(case);
    let tensors = merged(&all);
    let dir = Dir::new("converted-hostile");
    let file = dir.0.join("model.safetensors").display().to_string();
    let open = |config: &Value, tensors: &[Tensor]| {
        write_merged(&dir, config, tensors);
        kt_core::open(&dir.0)
    };
    let up = "blk.1.ffn_up_exps.1.numa.2";
    let good = config_for(case);
    for part in ["weight", "scale"] {
        let name = format!("{up}.{part}");
        refused(open(&good, &without(tensors.clone(), &name)), &[&file, &name, "missing"]);
        let short =
            common::changed(tensors.clone(), &name, |t| *t = tensor(t.name.clone(), t.dtype, &[t.shape[0] - 1]));
        refused(open(&good, &short), &[&file, &name, "bytes", "due"]);
        let kind = common::changed(tensors.clone(), &name, |t| *t = tensor(t.name.clone(), "BF16", &t.shape));
        refused(open(&good, &kind), &[&file, &name, "BF16"]);
    }
    // A whole node is missing: what is left does not add up.
    let two: Vec<Tensor> = tensors.iter().filter(|t| !t.name.contains("numa.2")).cloned().collect();
    refused(open(&good, &two), &[&file, "ffn_gate_exps.0.numa.0", "2 NUMA nodes"]);
    let gap: Vec<Tensor> = tensors.iter().filter(|t| !t.name.contains("numa.0")).cloned().collect();
    refused(open(&good, &gap), &[&file, "ffn_gate_exps.0.numa.0.weight", "missing"]);
    let mut config = good.clone();
    config["moe_intermediate_size"] = json!(400);
    refused(open(&config, &tensors), &["3 NUMA nodes", "400"]);
    config["moe_intermediate_size"] = json!(768);
    refused(open(&config, &tensors), &[&file, "[256, 128]", "bytes"]);
    config = good.clone();
    config["n_routed_experts"] = json!(3);
    refused(open(&config, &tensors), &[&file, "exps.2.numa.0", "missing"]);
    config["model_type"] = json!("bert");
    refused(open(&config, &tensors), &["config.json", "bert"]);
    // Sizes that tiles cannot have.
    let odd = Case { method: Method::Int4, hidden: 192, intermediate: 128, nodes: 1 };
    let bytes = |name: String, len: usize, dtype| tensor(name, dtype, &[len]);
    let mut uneven = Vec::new();
    for (e, proj) in (0..EXPERTS).flat_map(|e| Proj::ALL.map(|p| (e, p))) {
        let name = format!("blk.1.ffn_{}_exps.{e}.numa.0", proj.name());
        uneven.push(bytes(format!("{name}.weight"), 192 * 128 / 2, "I8"));
        uneven.push(bytes(format!("{name}.scale"), if proj == Proj::Down { 192 } else { 128 }, "F32"));
    }
    let uneven_config = {
        let mut c = config_for(odd);
        c["hidden_size"] = json!(192);
        c
    };
    refused(open(&uneven_config, &uneven), &[&file, "ffn_gate_exps.0.numa.0", "whole tiles of [32, 128]"]);

    let tree = Dir::new("converted-hostile-tree");
    write_tree(&tree, &good, &all);
    let node = tree.0.join("_layer_1/_numa_2");
    let part = node.join(format!("INT4_up_1_{}Byte_quant_.kt", 128 * 128 / 2));
    let bytes = std::fs::read(&part).unwrap();
    std::fs::write(&part, &bytes[1..]).unwrap();
    let named = part.display().to_string();
    refused(kt_core::open(&tree.0), &[&named, up, "8191 bytes", "8192 are due"]);
    std::fs::remove_file(&part).unwrap();
    refused(kt_core::open(&tree.0), &[&named, "missing"]);
    std::fs::write(&part, &bytes).unwrap();
    let source = kt_core::open(&tree.0).unwrap();
    check(&*source, case, &all);
    std::fs::write(&part, &bytes[1..]).unwrap();
    refused(source.matrix(1, 1, Proj::Up), &[&named, "8191 bytes now"]);
    std::fs::remove_file(tree.0.join("config.json")).unwrap();
    refused(kt_core::open(&tree.0), &["config.json", "copy"]);
    tree.write("config.json", good.to_string());
    for entry in std::fs::read_dir(tree.0.join("_layer_1/_numa_0")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().replace("INT4", "MOE_INT4");
        std::fs::rename(&path, path.with_file_name(name)).unwrap();
    }
    refused(kt_core::open(&tree.0), &["_numa_0", "INT4, INT8, MOE_INT8"]);
    std::fs::remove_dir_all(tree.0.join("_layer_1")).unwrap();
    std::fs::create_dir(tree.0.join("_layer_0")).unwrap();
    refused(kt_core::open(&tree.0), &["_layer_1"]);
}
