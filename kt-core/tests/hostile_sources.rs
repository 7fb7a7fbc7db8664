//! Damaged, incomplete and malicious checkpoints: each is refused, and the error names the file and the tensor or key.

mod common;

use std::path::Path;

use bytes::Bytes;
use common::gguf::{EXPERTS, Gguf, HIDDEN, INTERMEDIATE, shape};
use common::{Dir, refused};
use kt_core::source::safetensors::SafetensorsSource;
use kt_core::{Format, Group, Proj, WeightSource};
use serde_json::{Value, json};

use common::*;

// ---- safetensors ----

fn fp8(name: &str, rows: usize, cols: usize) -> Vec<Tensor> {
    let scale = tensor(format!("{name}.weight_scale_inv"), "F32", &[rows.div_ceil(128), cols.div_ceil(128)]);
    vec![tensor(format!("{name}.weight"), "F8_E4M3", &[rows, cols]), scale]
}

fn int8(name: &str, rows: usize, cols: usize) -> Vec<Tensor> {
    vec![
        tensor(format!("{name}.weight"), "I8", &[rows, cols]),
        tensor(format!("{name}.weight_scale"), "BF16", &[rows, 1]),
    ]
}

/// compressed-tensors `pack-quantized`.
fn packed(bits: usize, group: usize) -> impl Fn(&str, usize, usize) -> Vec<Tensor> {
    move |name, rows, cols| {
        let mut shape = tensor(format!("{name}.weight_shape"), "I64", &[2]);
        shape.bytes = [rows, cols].iter().flat_map(|&n| (n as u64).to_le_bytes()).collect();
        let codes = tensor(format!("{name}.weight_packed"), "I32", &[rows, cols * bits / 32]);
        vec![codes, tensor(format!("{name}.weight_scale"), "BF16", &[rows, cols / group]), shape]
    }
}

/// `pack-quantized` with zero points, all 3.
fn asymmetric(name: &str, rows: usize, cols: usize) -> Vec<Tensor> {
    let mut zeros = tensor(format!("{name}.weight_zero_point"), "I32", &[rows / 8, cols / 16]);
    zeros.bytes.fill(0x33);
    with(packed(4, 16)(name, rows, cols), zeros)
}

/// compressed-tensors `mxfp4-pack-quantized`.
fn mxfp4(name: &str, rows: usize, cols: usize) -> Vec<Tensor> {
    let scale = tensor(format!("{name}.weight_scale"), "U8", &[rows, cols / 32]);
    vec![tensor(format!("{name}.weight_packed"), "U8", &[rows, cols / 2]), scale]
}

fn mxfp8(name: &str, rows: usize, cols: usize, scale: &'static str) -> Vec<Tensor> {
    let scale = tensor(format!("{name}.weight_scale_inv"), scale, &[rows, cols / 32]);
    vec![tensor(format!("{name}.weight"), "F8_E4M3", &[rows, cols]), scale]
}

/// NVFP4 as of compressed-tensors, or ModelOpt: all weights are 6 * 0.5 / 4, or 6 * 0.5 * 4.
fn nvfp4(name: &str, rows: usize, cols: usize, modelopt: bool) -> Vec<Tensor> {
    let (codes, global) =
        if modelopt { ("weight", "weight_scale_2") } else { ("weight_packed", "weight_global_scale") };
    let mut tensors = [
        tensor(format!("{name}.{codes}"), "U8", &[rows, cols / 2]),
        tensor(format!("{name}.weight_scale"), "F8_E4M3", &[rows, cols / 16]),
        tensor(format!("{name}.{global}"), "F32", if modelopt { &[] } else { &[1] }),
    ];
    tensors[0].bytes.fill(0x77);
    tensors[1].bytes.fill(0x30);
    tensors[2].bytes = 4f32.to_le_bytes().to_vec();
    tensors.into()
}

#[test]
fn nvfp4_is_divided_by_one_factor_or_multiplied_with_the_other() {
    for (modelopt, value) in [(false, 0.75), (true, 12.0)] {
        let tensors = model(|n, r, c| nvfp4(n, r, c, modelopt));
        let source = from_tensors(&config(), &tensors).unwrap();
        assert_eq!(source.layers()[0].formats, [Format::Nvfp4; 3]);
        for proj in Proj::ALL {
            let m = source.matrix(0, 1, proj).unwrap();
            m.check_scales().unwrap();
            assert!(m.decode() == vec![value; HIDDEN * INTERMEDIATE]);
        }
        let mut names = ["weight_global_scale", "weight_scale_2"].map(|suffix| format!("{GATE_1}.{suffix}"));
        names.rotate_left(modelopt as usize);
        let ([name, other], scale) = (names, format!("{GATE_1}.weight_scale"));
        let refuse = |tensors: Vec<Tensor>, want: &[&str]| refused(from_tensors(&config(), &tensors), want);
        refuse(without(tensors.clone(), &name), &[GATE_1, "missing"]);
        refuse(with(tensors.clone(), tensor(other.clone(), "F32", &[1])), &[GATE_1, "too"]);
        for (dtype, bad) in [("F32", &[2][..]), ("I32", &[1]), ("BF16", &[2])] {
            refuse(changed(tensors.clone(), &name, |t| *t = tensor(t.name.clone(), dtype, bad)), &[&name, "one F32"]);
        }
        for (dtype, bad) in [("F8_E4M3", &[64, 1][..]), ("F8_E4M3", &[63, 2]), ("F8_E4M3", &[128])] {
            refuse(changed(tensors.clone(), &scale, |t| *t = tensor(t.name.clone(), dtype, bad)), &[&scale, "[64, 2]"]);
        }
        let nan = changed(tensors.clone(), &name, |t| t.bytes = f32::NAN.to_le_bytes().to_vec());
        let source = from_tensors(&config(), &nan).unwrap();
        assert!(source.matrix(0, 1, Proj::Gate).unwrap().check_scales().unwrap_err().contains("NaN"));
        source.matrix(0, 1, Proj::Up).unwrap().check_scales().unwrap();
        refuse(with(model(bf16), tensor(name.clone(), "F32", &[1])), &[&name, "NVFP4"]);
    }
}

#[test]
fn one_scale_of_fp8_is_that_of_every_row() {
    for (dtype, shape, scale) in [
        ("F32", &[][..], 0.5f32.to_le_bytes().to_vec()),
        ("F32", &[1], 0.5f32.to_le_bytes().to_vec()),
        ("BF16", &[1, 1], half::bf16::from_f32(0.5).to_le_bytes().to_vec()),
    ] {
        let fp8 = |n: &str, r: usize, c: usize| {
            let codes = Tensor { bytes: vec![0x38; r * c], ..tensor(format!("{n}.weight"), "F8_E4M3", &[r, c]) };
            let scale = Tensor { bytes: scale.clone(), ..tensor(format!("{n}.weight_scale"), dtype, shape) };
            vec![codes, scale]
        };
        let source = from_tensors(&config(), &model(fp8)).unwrap();
        let block = shape.len() == 2; // of up to 128 x 128, which is the same
        let want = if block { Format::Fp8Block } else { Format::Fp8Channel };
        assert_eq!(source.layers()[0].formats, [want; 3]);
        for (e, proj) in (0..EXPERTS).flat_map(|e| Proj::ALL.map(|p| (e, p))) {
            let m = source.matrix(0, e, proj).unwrap();
            assert_eq!((m.rows(), m.cols()), source.layers()[0].shape(proj));
            assert!(m.decode().iter().all(|&v| v == 0.5), "{shape:?}");
        }
        for (bad, says) in if block { vec![] } else { vec![("F8_E8M0", "E8m0"), ("I32", "I32")] } {
            let name = format!("{GATE_1}.weight_scale");
            let tensors = changed(model(fp8), &name, |t| *t = tensor(t.name.clone(), bad, shape));
            refused(from_tensors(&config(), &tensors), &[&name, says]);
        }
    }
}

#[test]
fn the_unharmed_models_open_in_every_format() {
    let formats: [(Format, Vec<Tensor>); 11] = [
        (Format::Bf16, model(bf16)),
        (Format::Fp8Block, model(fp8)),
        (
            Format::Fp8Channel,
            model(|n, r, c| {
                vec![
                    tensor(format!("{n}.weight"), "F8_E4M3", &[r, c]),
                    tensor(format!("{n}.weight_scale"), "BF16", &[r, 1]),
                ]
            }),
        ),
        (Format::Int8(Group::Row), model(int8)),
        (Format::Int4(Group::Of(32)), model(packed(4, 32))),
        (Format::Int4(Group::Of(16)), model(packed(4, 16))),
        (Format::Int8Offset(Group::Of(8)), model(packed(8, 8))),
        (Format::Int4Asym(Group::Of(16)), model(asymmetric)),
        (Format::Mxfp4, model(mxfp4)),
        (Format::Mxfp8, model(|n, r, c| mxfp8(n, r, c, "U8"))),
        (Format::Mxfp8, model(|n, r, c| mxfp8(n, r, c, "F8_E8M0"))),
    ];
    for (format, tensors) in formats {
        // Down has twice the columns: one scale a row is groups of 32 for gate and up, when these have 32 columns.
        let source = from_tensors(&config(), &tensors).unwrap();
        let want = if format == Format::Int4(Group::Of(32)) { Format::Int4(Group::Row) } else { format };
        assert_eq!(source.layers()[0].formats, [want, want, format]);
        for (e, proj) in (0..EXPERTS).flat_map(|e| Proj::ALL.map(|p| (e, p))) {
            let m = source.matrix(0, e, proj).unwrap();
            assert!(m.decode().iter().all(|&v| v == 0.0), "{format}");
            let asked = source.tensor(&format!("model.layers.0.mlp.experts.{e}.{}_proj.weight", proj.name())).unwrap();
            assert_eq!((asked.format(), asked.rows(), asked.cols()), (m.format(), m.rows(), m.cols()));
        }
    }
}

#[test]
fn packed_experts_are_cut_into_their_parts() {
    let config = json!({"model_type": "qwen3_5_moe", "text_config": set("model_type", json!("qwen3_5_moe_text"))});
    let prefix = "model.language_model.layers.0.mlp.experts";
    let mut gate_up = tensor(format!("{prefix}.gate_up_proj"), "BF16", &[EXPERTS, 2 * INTERMEDIATE, HIDDEN]);
    let mut down = tensor(format!("{prefix}.down_proj"), "BF16", &[EXPERTS, HIDDEN, INTERMEDIATE]);
    for t in [&mut gate_up, &mut down] {
        // Each matrix holds its own number: gate 1, up 2 of expert 0, gate 3, up 4 of expert 1; down 1 and 2.
        let part = HIDDEN * INTERMEDIATE;
        let values = (0..t.bytes.len() / 2).map(|i| half::bf16::from_f32((1 + i / part) as f32));
        t.bytes = values.flat_map(|v| v.to_le_bytes()).collect();
    }
    let tensors = [gate_up, down];
    let source = from_tensors(&config, &tensors).unwrap();
    assert_eq!(source.layers()[0].formats, [Format::Bf16; 3]);
    assert_eq!((source.tensors().len(), source.dense_bytes()), (0, 0));
    let value = |e, p| {
        let m = source.matrix(0, e, p).unwrap();
        let values = m.decode();
        assert!((m.rows(), m.cols()) == shape(p).into() && values.iter().all(|&v| v == values[0]));
        values[0]
    };
    for e in 0..EXPERTS {
        let got = Proj::ALL.map(|p| value(e, p));
        assert_eq!(got, [(2 * e + 1) as f32, (2 * e + 2) as f32, (e + 1) as f32]);
    }
    let tall = changed(tensors.to_vec(), &tensors[0].name, |t| t.shape = vec![2 * EXPERTS, INTERMEDIATE, HIDDEN]);
    refused(from_tensors(&config, &tall), &["model.safetensors", "gate_up_proj", "[4, 64, 32]", "[2, 128, 32]"]);
    let bytes = changed(tensors.to_vec(), &tensors[1].name, |t| *t = tensor(t.name.clone(), "F8_E4M3", &t.shape));
    refused(from_tensors(&config, &bytes), &["model.safetensors", "down_proj", "F8_E4M3", "not supported yet"]);
}

#[test]
fn damaged_safetensors_files_are_refused() {
    let whole = safetensors(&model(bf16));
    let open = |bytes: &[u8]| from_files(&config(), &[("model.safetensors", bytes.to_vec())]);
    refused(open(&whole[..whole.len() - 1]), &["checkpoint/model.safetensors", "truncated", "model.layers.0"]);
    refused(open(&whole[..100]), &["model.safetensors", "claims", "truncated"]);
    refused(open(&whole[..5]), &["model.safetensors", "5 bytes"]);
    refused(open(&[]), &["model.safetensors"]);
    let mut long = whole.clone();
    long[..8].copy_from_slice(&(whole.len() as u64).to_le_bytes());
    refused(open(&long), &["model.safetensors", "claims", "truncated"]);
    long[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    refused(open(&long), &["model.safetensors", "18446744073709551615"]);
    refused(open(&[&whole[..], &[0; 9]].concat()), &["model.safetensors"]);
    refused(open(&container(&json!([1, 2]), &[])), &["model.safetensors", "not a JSON object"]);
    let mut garbage = whole.clone();
    garbage[20] = 0xff;
    refused(open(&garbage), &["model.safetensors", "header"]);

    let entry = |dtype: &str, shape: Value, begin: u64, end: u64| json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]});
    let one = |entry: Value, data: usize| open(&container(&json!({"some.weight": entry}), &vec![0; data]));
    refused(one(entry("F32", json!([4]), 0, 16), 12), &["model.safetensors", "some.weight", "truncated"]);
    refused(one(entry("F32", json!([4]), 16, 0), 16), &["model.safetensors", "some.weight", "backwards"]);
    refused(one(entry("F32", json!([5]), 0, 16), 16), &["model.safetensors", "some.weight", "16 bytes"]);
    refused(one(entry("F33", json!([4]), 0, 16), 16), &["model.safetensors", "some.weight", "F33"]);
    refused(one(entry("F32", json!([u64::MAX, 4]), 0, 16), 16), &["model.safetensors", "some.weight"]);
    refused(one(entry("F32", json!([4]), 0, u64::MAX), 16), &["model.safetensors", "some.weight", "truncated"]);
    refused(one(entry("F32", json!([4]), 4, 20), 20), &["model.safetensors", "some.weight"]);
    let overlapping = json!({"a.weight": entry("F32", json!([4]), 0, 16), "b.weight": entry("F32", json!([4]), 8, 24)});
    refused(open(&container(&overlapping, &[0; 24])), &["model.safetensors", "b.weight"]);
}

#[test]
fn tensors_that_are_missing_or_do_not_fit_are_named() {
    let file = "checkpoint/model.safetensors";
    let refuse =
        |tensors: Vec<Tensor>, wants: &[&str]| refused(from_tensors(&config(), &tensors), &[&[file], wants].concat());
    let part = |suffix: &str| format!("{GATE_1}.{suffix}");
    let (weight, scale, packed_name, shape_name) =
        (part("weight"), part("weight_scale"), part("weight_packed"), part("weight_shape"));
    refuse(without(model(bf16), &weight), &[&weight, "missing"]);
    refuse(changed(model(bf16), &weight, |t| t.shape.reverse()), &[&weight, "[32, 64]", "[64, 32]"]);
    refuse(changed(model(bf16), &weight, |t| t.dtype = "I16"), &[&weight, "I16"]);
    refuse(changed(model(bf16), &weight, |t| t.dtype = "F16"), &[&weight, "F16", "BF16"]);
    refuse(changed(model(bf16), &weight, |t| *t = tensor(t.name.clone(), "BF16", &[0, 1 << 40])), &[&weight, "empty"]);
    refuse(changed(model(bf16), &weight, |t| *t = tensor(t.name.clone(), "BF16", &[])), &[&weight, "[1, 1]"]);

    let inverse = part("weight_scale_inv");
    refuse(without(model(fp8), &inverse), &[&scale, "missing"]);
    refuse(changed(model(fp8), &inverse, |t| *t = tensor(t.name.clone(), "F32", &[1, 2])), &[&inverse, "[1, 2]"]);
    refuse(changed(model(fp8), &inverse, |t| *t = tensor(t.name.clone(), "I32", &[1, 1])), &[&inverse, "I32"]);
    refuse(changed(model(fp8), &inverse, |t| *t = tensor(t.name.clone(), "U8", &[64, 1])), &[&weight, "MXFP8"]);
    refuse(changed(model(fp8), &inverse, |t| *t = tensor(t.name.clone(), "U8", &[64, 2])), &[&inverse, "[64, 2]"]);
    let mx8 = || model(|n, r, c| mxfp8(n, r, c, "U8"));
    refuse(changed(mx8(), &inverse, |t| *t = tensor(t.name.clone(), "F32", &[64, 1])), &[&weight, "FP8-channel"]);
    refuse(changed(mx8(), &inverse, |t| *t = tensor(t.name.clone(), "I8", &[64, 1])), &[&inverse, "I8"]);
    refuse(without(mx8(), &inverse), &[&scale, "missing"]);

    let zeros = part("weight_zero_point");
    let asym = || model(asymmetric);
    for (dtype, bad) in [("I32", &[64, 2][..]), ("I32", &[8, 1]), ("I32", &[16]), ("I8", &[64, 2]), ("F32", &[8, 2])] {
        refuse(changed(asym(), &zeros, |t| *t = tensor(t.name.clone(), dtype, bad)), &[&zeros, dtype, "[8, 2]"]);
    }
    refuse(without(asym(), &zeros), &["INT4-g16", "INT4-asym-g16"]);
    refuse(with(model(packed(8, 16)), tensor(zeros.clone(), "I32", &[16, 2])), &["INT8-offset-g16", "INT8-asym-g16"]);
    let int8_zeros = || with(model(int8), tensor(zeros.clone(), "I8", &[64, 1]));
    refuse(int8_zeros(), &["INT8-channel", "INT8-asym-channel"]);
    refuse(changed(int8_zeros(), &zeros, |t| *t = tensor(t.name.clone(), "I8", &[64])), &[&zeros, "[64, 1]"]);
    refuse(changed(int8_zeros(), &zeros, |t| *t = tensor(t.name.clone(), "BF16", &[64, 1])), &[&zeros, "BF16", "I8"]);
    refuse(with(model(bf16), tensor(zeros.clone(), "I8", &[64, 1])), &[&zeros, "not of integers"]);

    refuse(without(model(mxfp4), &scale), &[&scale, "missing"]);
    for bad in [&[64, 2][..], &[63, 1], &[1, 64, 1], &[]] {
        refuse(changed(model(mxfp4), &scale, |t| *t = tensor(t.name.clone(), "U8", bad)), &[&scale, "fit"]);
    }
    refuse(changed(model(mxfp4), &scale, |t| t.shape = vec![0, 1 << 40]), &[file]);
    refuse(changed(model(mxfp4), &packed_name, |t| t.shape = vec![32, 32]), &[&scale, "[32, 32]"]);
    refuse(changed(model(mxfp4), &packed_name, |t| t.shape = vec![64, 1, 1, 16]), &[&scale, "fit"]);
    refuse(changed(model(mxfp4), &packed_name, |t| t.dtype = "I8"), &[&packed_name, "I8"]);
    refuse(changed(model(mxfp4), &scale, |t| *t = tensor(t.name.clone(), "BF16", &[64, 1])), &[&packed_name, "BF16"]);
    let second = part("scale");
    refuse(with(model(mxfp4), tensor(second.clone(), "U8", &[64, 1])), &[&second, "beside it"]);

    refuse(without(model(int8), &scale), &[&scale, "missing"]);
    refuse(changed(model(int8), &scale, |t| *t = tensor(t.name.clone(), "BF16", &[64, 5])), &[&scale, "5 scales"]);
    refuse(changed(model(int8), &scale, |t| *t = tensor(t.name.clone(), "BF16", &[63, 1])), &[&scale, "[63, 1]"]);

    let int4 = || model(packed(4, 16));
    refuse(without(int4(), &shape_name), &[&shape_name, "missing"]);
    refuse(without(int4(), &scale), &[&scale, "missing"]);
    refuse(changed(int4(), &packed_name, |t| *t = tensor(t.name.clone(), "I32", &[64, 5])), &[&packed_name, "5 words"]);
    refuse(
        changed(int4(), &packed_name, |t| *t = tensor(t.name.clone(), "U8", &[64, 16])),
        &[&packed_name, "U8", "BF16"],
    );
    refuse(changed(int4(), &scale, |t| *t = tensor(t.name.clone(), "BF16", &[64, 32])), &[&packed_name, "even"]);
    let order = part("weight_g_idx");
    refuse(with(int4(), tensor(order.clone(), "I32", &[32])), &["INT4-ordered-g16", "INT4-g16"]);
    refuse(with(int4(), tensor(order.clone(), "I32", &[31])), &[&order, "[31]", "[32]"]);
    refuse(with(int4(), tensor(order.clone(), "I64", &[32])), &[&order, "I64"]);
    refuse(with(model(int8), tensor(order.clone(), "I32", &[32])), &[&order, "pack-quantized"]);
    let qweight = part("qweight");
    refuse(with(int4(), tensor(qweight.clone(), "I32", &[4])), &[&qweight, "another format, too"]);
    for suffix in ["weight_global_scale", "weight_scale_2"] {
        refuse(with(int4(), tensor(part(suffix), "F32", &[1])), &[&part(suffix), "not in NVFP4"]);
    }
    // What the data says of the shape is read with the data, not when opening.
    let lying = changed(int4(), &shape_name, |t| t.bytes[8] = 64);
    let source = from_tensors(&config(), &lying).unwrap();
    refused(source.matrix(0, 1, Proj::Gate), &[file, &shape_name, "[64, 64]", "[64, 32]"]);
    assert!(source.matrix(0, 0, Proj::Gate).is_ok());
}

#[test]
fn scales_that_are_no_numbers_are_found() {
    let inverse = format!("{GATE_1}.weight_scale_inv");
    let nan = changed(model(fp8), &inverse, |t| t.bytes.copy_from_slice(&f32::NAN.to_le_bytes()));
    let source = from_tensors(&config(), &nan).unwrap();
    let text = source.matrix(0, 1, Proj::Gate).unwrap().check_scales().unwrap_err();
    assert!(text.contains("NaN") && text.contains("[0, 0]"), "{text}");
    source.matrix(0, 1, Proj::Up).unwrap().check_scales().unwrap();
    for (tensors, suffix) in
        [(model(mxfp4), "weight_scale"), (model(|n, r, c| mxfp8(n, r, c, "U8")), "weight_scale_inv")]
    {
        let nan = changed(tensors, &format!("{GATE_1}.{suffix}"), |t| t.bytes[5] = 255);
        let mx = from_tensors(&config(), &nan).unwrap();
        let text = mx.matrix(0, 1, Proj::Gate).unwrap().check_scales().unwrap_err();
        assert!(text.contains("[5, 0] is NaN"), "{text}");
        mx.matrix(0, 0, Proj::Gate).unwrap().check_scales().unwrap();
    }
    assert_eq!(
        source.tensor_name(0, 1, Proj::Gate),
        ("checkpoint/model.safetensors".into(), format!("{GATE_1}.weight"))
    );
}

#[test]
fn configs_that_cannot_be_are_refused() {
    let open = |config: Value| from_tensors(&config, &model(bf16));
    let file = "checkpoint/config.json";
    refused(open(set("model_type", json!("bert"))), &[file, "model_type", "bert", "qwen3_moe"]);
    refused(open(set("model_type", json!(7))), &[file, "model_type", "missing"]);
    refused(open(set("num_experts", json!(null))), &[file, "num_experts", "n_routed_experts"]);
    refused(open(set("num_experts", json!(-2))), &[file, "num_experts"]);
    refused(open(set("num_experts", json!(3))), &["model.safetensors", "experts.2.gate_proj.weight", "missing"]);
    refused(open(set("num_experts_per_tok", json!(3))), &[file, "num_experts_per_tok", "3", "2 experts"]);
    refused(open(set("num_experts_per_tok", json!(0))), &[file, "num_experts_per_tok"]);
    refused(open(set("hidden_size", json!(u64::MAX))), &[file, "hidden_size"]);
    refused(open(set("hidden_size", json!(16))), &["model.safetensors", "experts.0.gate_proj.weight", "[64, 16]"]);
    refused(open(set("moe_intermediate_size", json!("64"))), &[file, "moe_intermediate_size"]);
    refused(
        open(set("num_hidden_layers", json!(2))),
        &["model.safetensors", "model.layers.1.mlp.experts.0", "missing"],
    );
    refused(open(set("mlp_only_layers", json!([0]))), &[file, "no layer"]);
    let blocks = json!({"weight_block_size": [64, 64]});
    refused(open(set("quantization_config", blocks)), &[file, "weight_block_size", "[64,64]", "128"]);
    refused(from_files(&json!([]), &[("model.safetensors", safetensors(&model(bf16)))]), &[file, "model_type"]);
    let files = vec![("model.safetensors".to_owned(), Bytes::from(safetensors(&model(bf16))))];
    refused(SafetensorsSource::from_files("checkpoint", files.clone()), &[file, "missing"]);
    let broken = [files, vec![("config.json".to_owned(), Bytes::from_static(b"{\"model_type\":"))]].concat();
    refused(SafetensorsSource::from_files("checkpoint", broken), &[file, "JSON"]);
    let mut grouped = config();
    grouped["model_type"] = json!("deepseek_v3");
    grouped["n_group"] = json!(3);
    refused(open(grouped), &[file, "3 groups"]);
}

/// A config of a family that counts its experts in its own way.
fn config_of(family: &str) -> Value {
    json!({
        "model_type": family, "num_local_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 1,
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "moe_intermediate_size": INTERMEDIATE,
    })
}

#[test]
fn experts_of_deepseek_v4_are_mxfp4_and_the_rest_fp8() {
    let linear = |name: String, rows: usize, cols: usize| {
        let scale = tensor(format!("{name}.scale"), "F8_E8M0", &[rows, cols / 32]);
        [tensor(format!("{name}.weight"), "I8", &[rows, cols / 2]), scale]
    };
    let mut tensors = Vec::new();
    for (e, (proj, name)) in
        (0..EXPERTS).flat_map(|e| Proj::ALL.into_iter().zip(["w1", "w3", "w2"]).map(move |p| (e, p)))
    {
        let [rows, cols] = shape(proj);
        tensors.extend(linear(format!("layers.0.ffn.experts.{e}.{name}"), rows, cols));
    }
    let shared = "layers.0.ffn.shared_experts.w2";
    tensors.extend([
        tensor(format!("{shared}.weight"), "F8_E4M3", &[256, 130]),
        tensor(format!("{shared}.scale"), "F8_E8M0", &[2, 2]),
    ]);
    let scale = "layers.0.ffn.experts.1.w3.scale";
    let mut tensors = changed(tensors, scale, |t| t.bytes.fill(128));
    tensors = changed(tensors, "layers.0.ffn.experts.1.w3.weight", |t| t.bytes.fill(0xa7));
    tensors = changed(tensors, &format!("{shared}.weight"), |t| t.bytes.fill(0x38));
    tensors = changed(tensors, &format!("{shared}.scale"), |t| t.bytes.copy_from_slice(&[127, 128, 129, 130]));
    let source = from_tensors(&config_of("deepseek_v4"), &tensors).unwrap();
    assert_eq!((source.layers()[0].formats, source.routing(0)), ([Format::Mxfp4; 3], None));
    let up = source.matrix(0, 1, Proj::Up).unwrap().decode();
    assert!(up.chunks(2).all(|v| v == [12.0, -2.0]) && up.len() == INTERMEDIATE * HIDDEN);
    assert!(source.matrix(0, 1, Proj::Gate).unwrap().decode().iter().all(|&v| v == 0.0));
    let shared = source.tensor(&format!("{shared}.weight")).unwrap();
    let values = shared.decode();
    assert_eq!((shared.format(), values[0], values[129], values[255 * 130]), (Format::Fp8Block, 1.0, 2.0, 4.0));
    source.release(0, 1);

    let file = "model.safetensors";
    let open = |tensors: &[Tensor]| from_tensors(&config_of("deepseek_v4"), tensors);
    refused(open(&without(tensors.clone(), scale)), &[file, "experts.1.w3.weight_scale", "missing"]);
    let wide = changed(tensors.clone(), scale, |t| *t = tensor(scale, "F8_E8M0", &[64, 2]));
    refused(open(&wide), &[file, scale, "[64, 2]"]);
    let floats = changed(tensors.clone(), scale, |t| *t = tensor(scale, "F32", &[64, 1]));
    refused(open(&floats), &[file, "experts.1.w3.weight", "F32"]);
}

/// The tensors of a gpt-oss layer, their content from a formula.
fn gpt_oss() -> Vec<Tensor> {
    let mut tensors = Vec::new();
    for (name, rows, cols) in [("gate_up_proj", 2 * INTERMEDIATE, HIDDEN), ("down_proj", HIDDEN, INTERMEDIATE)] {
        let stem = format!("model.layers.0.mlp.experts.{name}");
        let mut blocks = tensor(format!("{stem}_blocks"), "U8", &[EXPERTS, rows, cols / 32, 16]);
        let mut scales = tensor(format!("{stem}_scales"), "U8", &[EXPERTS, rows, cols / 32]);
        let mut bias = tensor(format!("{stem}_bias"), "BF16", &[EXPERTS, rows]);
        blocks.bytes.iter_mut().enumerate().for_each(|(i, b)| *b = (i * 73 % 251) as u8 ^ (i / 97) as u8);
        scales.bytes.iter_mut().enumerate().for_each(|(i, b)| *b = 122 + (i * 5 % 4) as u8);
        let biases =
            (0..EXPERTS * rows).flat_map(|i| half::bf16::from_f32((i * 29 % 17) as f32 / 8.0 - 1.0).to_le_bytes());
        bias.bytes = biases.collect();
        tensors.extend([blocks, scales, bias]);
    }
    tensors
}

#[test]
fn a_layer_of_gpt_oss_runs_on_the_portable_kernel() {
    use kt_core::cpu::{CpuBackend, portable::Portable};
    let tensors = gpt_oss();
    let source = from_tensors(&config_of("gpt_oss"), &tensors).unwrap();
    let spec = &source.layers()[0];
    assert_eq!((spec.formats, spec.biases), ([Format::Mxfp4; 3], true));
    assert_eq!((source.tensors().len(), source.dense_bytes()), (0, 0));
    let routing = source.routing(0).unwrap();
    assert_eq!((routing.rule, routing.top_k), (kt_core::Rule::TopKSoftmax, 1));

    // Straight from the tensors: columns 2j and 2j + 1 are the nibbles of byte j, rows 2j and 2j + 1 are gate j and up j.
    let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let product = |part: usize, e: usize, row: usize, x: &[f64]| -> f64 {
        let [blocks, scales, bias] = [0, 1, 2].map(|i| &tensors[3 * part + i]);
        let row = e * blocks.shape[1] + row;
        let weight = |k: usize| {
            let code = blocks.bytes[(row * x.len() + k) / 2] >> (4 * (k % 2)) & 15;
            let sign = if code < 8 { 1.0 } else { -1.0 };
            let scale = scales.bytes[row * x.len() / 32 + k / 32] as i32;
            sign * magnitudes[code as usize % 8] * 2f64.powi(scale - 127)
        };
        let bias = half::bf16::from_le_bytes([bias.bytes[2 * row], bias.bytes[2 * row + 1]]).to_f64();
        bias + x.iter().enumerate().map(|(k, x)| weight(k) * x).sum::<f64>()
    };
    let expert = |e: usize, x: &[f64]| -> Vec<f64> {
        let h: Vec<f64> = (0..INTERMEDIATE)
            .map(|j| {
                let gate = product(0, e, 2 * j, x).min(7.0);
                let up = product(0, e, 2 * j + 1, x).clamp(-7.0, 7.0);
                (up + 1.0) * gate / (1.0 + (-1.702 * gate).exp())
            })
            .collect();
        (0..HIDDEN).map(|n| product(1, e, n, &h)).collect()
    };

    let tokens = 3;
    let x: Vec<f32> = (0..tokens * HIDDEN).map(|i| ((37 * i + 11) % 101) as f32 / 50.0 - 1.0).collect();
    let (ids, weights) = (vec![0, 1, 1, 0, 1, 1], vec![0.75, 0.25, 0.5, 0.5, 1.0, -0.5]);
    let mut want = vec![0.0; tokens * HIDDEN];
    for (slot, (&e, &w)) in ids.iter().zip(&weights).enumerate() {
        let token = slot / 2 * HIDDEN..(slot / 2 + 1) * HIDDEN;
        let x: Vec<f64> = x[token.clone()].iter().map(|&v| v as f64).collect();
        want[token].iter_mut().zip(expert(e as usize, &x)).for_each(|(o, y)| *o += w as f64 * y);
    }
    let backends = |_| vec![kt_core::Candidate::new("portable", Ok(CpuBackend::new("portable", Portable)))];
    let runtime = kt_core::RuntimeBuilder::new(backends).threads(2).build().unwrap();
    let experts = runtime.load(&source).unwrap();
    let mut batch = kt_core::Batch::new(tokens, x, ids, weights).unwrap();
    experts.layer(0).unwrap().forward(&mut batch).unwrap();
    let error = kt_core::testing::mean_error(&want, batch.output());
    assert!(error < 1e-5 && want.iter().any(|v| v.abs() > 1.0), "{error}");
    source.release(0, 1);
}

#[test]
fn gpt_oss_that_is_not_quantized_has_its_inputs_first() {
    let random = |name: &str, shape: &[usize]| {
        let mut t = tensor(format!("model.layers.0.mlp.experts.{name}"), "BF16", shape);
        let values = (0..t.bytes.len() / 2).map(|i| half::bf16::from_f32((i * 37 % 251) as f32 / 64.0 - 2.0));
        t.bytes = values.flat_map(|v| v.to_le_bytes()).collect();
        t
    };
    let tensors = [
        random("gate_up_proj", &[EXPERTS, HIDDEN, 2 * INTERMEDIATE]),
        random("gate_up_proj_bias", &[EXPERTS, 2 * INTERMEDIATE]),
        random("down_proj", &[EXPERTS, INTERMEDIATE, HIDDEN]),
        random("down_proj_bias", &[EXPERTS, HIDDEN]),
    ];
    let source = from_tensors(&config_of("gpt_oss"), &tensors).unwrap();
    assert_eq!((source.layers()[0].formats, source.layers()[0].biases), ([Format::Bf16; 3], true));
    let value = |t: &Tensor, at: usize| half::bf16::from_le_bytes([t.bytes[2 * at], t.bytes[2 * at + 1]]).to_f32();
    for (e, proj) in (0..EXPERTS).flat_map(|e| Proj::ALL.map(|p| (e, p))) {
        let (m, [rows, cols]) = (source.matrix(0, e, proj).unwrap(), shape(proj));
        let (t, wide, first, step) = match proj {
            Proj::Gate => (&tensors[0], 2 * rows, 0, 2),
            Proj::Up => (&tensors[0], 2 * rows, 1, 2),
            Proj::Down => (&tensors[2], rows, 0, 1),
        };
        let values = m.decode();
        for (n, k) in (0..rows).flat_map(|n| (0..cols).map(move |k| (n, k))) {
            assert_eq!(values[n * cols + k], value(t, (e * cols + k) * wide + first + step * n), "{proj:?} [{n}, {k}]");
        }
        assert_eq!(m.byte_len(), Format::Bf16.stored_bytes(rows, cols));
        let bias = source.bias(0, e, proj).unwrap().unwrap();
        let t = if proj == Proj::Down { &tensors[3] } else { &tensors[1] };
        assert_eq!(bias[3], value(t, e * wide + first + step * 3));
        source.release(0, e);
    }
}

#[test]
fn tensors_of_gpt_oss_that_do_not_fit_are_named() {
    let name = |suffix: &str| format!("model.layers.0.mlp.experts.{suffix}");
    let open = |tensors: Vec<Tensor>| from_tensors(&config_of("gpt_oss"), &tensors);
    let reshaped = |suffix: &str, dtype: &'static str, shape: &[usize]| {
        changed(gpt_oss(), &name(suffix), |t| *t = tensor(t.name.clone(), dtype, shape))
    };
    for suffix in
        ["gate_up_proj_blocks", "gate_up_proj_scales", "gate_up_proj_bias", "down_proj_blocks", "down_proj_bias"]
    {
        refused(open(without(gpt_oss(), &name(suffix))), &["model.safetensors", &name(suffix), "missing"]);
    }
    for (dtype, shape, want) in [("BF16", [2, 32, 64], "[2, 64, 32]"), ("F8_E4M3", [2, 64, 32], "F8_E4M3")] {
        let plain = changed(gpt_oss(), &name("down_proj_blocks"), |t| *t = tensor(name("down_proj"), dtype, &shape));
        refused(open(plain), &["model.safetensors", &name("down_proj"), want]);
    }
    for (suffix, dtype, shape, want) in [
        ("gate_up_proj_blocks", "U8", &[2, 64, 2, 16][..], "fit"),
        ("gate_up_proj_blocks", "U8", &[2, 128, 16], "dimensions"),
        ("gate_up_proj_blocks", "U8", &[], "dimensions"),
        ("gate_up_proj_blocks", "BF16", &[2, 128, 1, 16], "bytes"),
        ("gate_up_proj_scales", "U8", &[2, 128], "dimensions"),
        ("gate_up_proj_scales", "U8", &[2, 128, 0], "empty"),
        ("gate_up_proj_scales", "F32", &[2, 128, 1], "F32"),
        ("down_proj_scales", "U8", &[2, 32, 1], "fit"),
        ("gate_up_proj_bias", "BF16", &[2, 64], "[2, 128]"),
        ("down_proj_bias", "BF16", &[64], "[2, 32]"),
        ("down_proj_bias", "U8", &[2, 32], "U8"),
    ] {
        refused(open(reshaped(suffix, dtype, shape)), &["model.safetensors", "model.layers.0.mlp.experts", want]);
    }
    let three = |t: &mut Tensor, shape: &[usize]| *t = tensor(t.name.clone(), "U8", shape);
    let more = changed(gpt_oss(), &name("down_proj_blocks"), |t| three(t, &[3, 32, 2, 16]));
    let more = changed(more, &name("down_proj_scales"), |t| three(t, &[3, 32, 2]));
    refused(open(more), &["model.safetensors", &name("down_proj_blocks"), "[3, 32]", "[2, 32]"]);
    let nan = changed(gpt_oss(), &name("gate_up_proj_scales"), |t| t.bytes[128 + 7] = 255);
    let source = open(nan).unwrap();
    let text = source.matrix(0, 1, Proj::Up).unwrap().check_scales().unwrap_err();
    assert!(text.contains("[3, 0] is NaN"), "{text}");
    source.matrix(0, 1, Proj::Gate).unwrap().check_scales().unwrap();
    refused(source.matrix(0, 2, Proj::Up), &["expert 2"]);
    refused(source.bias(0, 2, Proj::Up), &["expert 2"]);
}

#[test]
fn shards_and_their_index_are_checked() {
    let tensors = model(packed(4, 16));
    let names = ["a-00001-of-00002.safetensors", "a-00002-of-00002.safetensors"];
    // Every second tensor is in the other file: weights, scales and shapes of one matrix are apart.
    let shard = |which: usize| -> Vec<Tensor> { tensors.iter().skip(which).step_by(2).cloned().collect() };
    let index = |change: &dyn Fn(&mut serde_json::Map<String, Value>)| {
        let mut map = tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), json!(names[i % 2]))).collect();
        change(&mut map);
        ("model.safetensors.index.json", json!({"weight_map": map}).to_string().into_bytes())
    };
    let files = |index: (&'static str, Vec<u8>)| {
        vec![(names[0], safetensors(&shard(0))), (names[1], safetensors(&shard(1))), index]
    };
    let open = |files: &[(&str, Vec<u8>)]| from_files(&config(), files);
    let source = open(&files(index(&|_| {}))).unwrap();
    assert_eq!(source.layers()[0].format_label(), "INT4-g16");
    assert!(source.matrix(0, 1, Proj::Down).is_ok());

    let index_file = "checkpoint/model.safetensors.index.json";
    refused(open(&files(index(&|_| {}))[1..]), &[index_file, names[0], "download"]);
    refused(open(&files(index(&|_| {}))[2..]), &[index_file, names[0], names[1]]);
    for escape in ["../a.safetensors", "/etc/passwd", "sub/a.safetensors", "..", ""] {
        let bad = index(&|m| _ = m.insert("model.norm.weight".into(), json!(escape)));
        refused(open(&files(bad)), &[index_file, "model.norm.weight", escape]);
    }
    let wrong_file = index(&|m| _ = m.insert("model.norm.weight".into(), json!(names[1])));
    refused(open(&files(wrong_file)), &[names[1], "model.norm.weight", "index"]);
    let phantom = index(&|m| _ = m.insert("phantom.weight".into(), json!(names[1])));
    refused(open(&files(phantom)), &[names[1], "phantom.weight", "index"]);
    let expert = format!("{GATE_1}.weight_packed");
    let forgotten = index(&|m| _ = m.remove(&expert));
    refused(open(&files(forgotten)), &[index_file, GATE_1, "missing"]);
    refused(open(&files((index_file.rsplit('/').next().unwrap(), b"{}".to_vec()))), &[index_file, "weight_map"]);
    // Without an index, all files are read, and none may hold what another has.
    assert!(open(&files(index(&|_| {}))[..2]).is_ok());
    let twice = [(names[0], safetensors(&tensors)), (names[1], safetensors(&shard(1)))];
    refused(open(&twice), &[names[1], names[0], "too"]);
}

// ---- both, on disk ----

#[test]
fn what_is_no_checkpoint_is_refused() {
    let dir = Dir::new("none");
    let path = |p: &Path| p.display().to_string();
    refused(kt_core::open(dir.0.join("nowhere")), &["nowhere"]);
    refused(kt_core::open(&dir.0), &[&path(&dir.0), "no .safetensors"]);
    refused(kt_core::open(dir.write("notes.txt", "hello")), &["notes.txt", "neither"]);
    refused(kt_core::open(dir.write("empty", "")), &["empty", "neither"]);
    refused(kt_core::open(dir.write("short.gguf", "GGUF")), &["short.gguf", "truncated"]);
    let other = dir.write("other.gguf", Gguf::model().bytes());
    refused(kt_core::open(&dir.0), &[&path(&dir.0), "2 GGUF files"]);
    assert!(kt_core::open(other).is_ok());
}

#[test]
fn damaged_files_on_disk_are_named_by_their_path() {
    let dir = Dir::new("disk");
    let whole = safetensors(&model(bf16));
    let shard = dir.write("model.safetensors", &whole);
    let path = shard.display().to_string();
    refused(kt_core::open(&dir.0), &[&dir.0.join("config.json").display().to_string(), "missing"]);
    dir.write("config.json", config().to_string());
    assert!(kt_core::open(&dir.0).is_ok());
    dir.write("stray.safetensors", "a stray file beside model.safetensors is not read");
    assert!(kt_core::open(&dir.0).is_ok());
    dir.write("model.safetensors", &whole[..whole.len() / 2]);
    refused(kt_core::open(&dir.0), &[&path, "truncated"]);
    dir.write("model.safetensors", "");
    refused(kt_core::open(&dir.0), &[&path, "empty"]);
    std::fs::remove_file(&shard).unwrap();
    std::fs::remove_file(dir.0.join("stray.safetensors")).unwrap();
    refused(kt_core::open(&dir.0), &[&dir.0.display().to_string(), "no .safetensors"]);
    let index = json!({"weight_map": {"model.norm.weight": "model-1.safetensors", "x": "model-2.safetensors"}});
    let index = dir.write("model.safetensors.index.json", index.to_string());
    refused(kt_core::open(&dir.0), &[&index.display().to_string(), "model-1.safetensors, model-2.safetensors"]);
}
