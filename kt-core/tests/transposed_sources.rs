//! GPTQ, AWQ and compressed-tensors' integers: packed here one number at a time, by the formulas, and read by the source.

mod common;

use half::f16;
use kt_core::convert::Container;
use kt_core::cpu::CpuBackend;
use kt_core::cpu::portable::Portable;
use kt_core::source::safetensors::SafetensorsSource;
use kt_core::testing::{Random, mean_error};
use kt_core::{Batch, Candidate, Format, Group, Proj, RuntimeBuilder, WeightSource};
use serde_json::{Value, json};

use common::*;

/// A quantized matrix `[rows, cols]`, one entry per number.
struct Quantized {
    rows: usize,
    cols: usize,
    groups: usize,
    bits: usize,
    codes: Vec<u32>,
    /// `[rows, groups]`.
    zeros: Vec<u32>,
    scales: Vec<f16>,
    group_of: Vec<usize>,
}

/// How matrices are made.
#[derive(Clone, Copy, Debug)]
struct Recipe {
    bits: usize,
    /// Columns per scale; 0 for all.
    group: usize,
    symmetric: bool,
    ordered: bool,
    /// Zero points are at least this.
    least: u32,
}

impl Quantized {
    fn new(recipe: Recipe, rows: usize, cols: usize, random: &mut Random) -> Self {
        let group = if recipe.group == 0 { cols } else { recipe.group };
        let (groups, codes) = (cols / group, 1 << recipe.bits);
        let mut group_of: Vec<usize> = (0..cols).map(|k| k / group).collect();
        if recipe.ordered {
            for i in (1..cols).rev() {
                group_of.swap(i, random.below(i + 1));
            }
        }
        let zero = |random: &mut Random| match recipe.symmetric {
            true => codes as u32 / 2,
            false => recipe.least + random.below(codes) as u32,
        };
        Quantized {
            rows,
            cols,
            groups,
            bits: recipe.bits,
            codes: (0..rows * cols).map(|_| random.below(codes) as u32).collect(),
            zeros: (0..rows * groups).map(|_| zero(random)).collect(),
            scales: (0..rows * groups).map(|_| f16::from_f32(0.01 + random.uniform() / 64.0)).collect(),
            group_of,
        }
    }

    fn value(&self, n: usize, k: usize) -> f32 {
        let at = n * self.groups + self.group_of[k];
        (self.codes[n * self.cols + k] as f32 - self.zeros[at] as f32) * self.scales[at].to_f32()
    }

    fn values(&self) -> Vec<f32> {
        (0..self.rows * self.cols).map(|i| self.value(i / self.cols, i % self.cols)).collect()
    }

    fn scale_tensor(&self, name: &str) -> Tensor {
        let mut t = tensor(format!("{name}.scales"), "F16", &[self.groups, self.rows]);
        let by_group = (0..self.groups).flat_map(|g| (0..self.rows).map(move |n| self.scales[n * self.groups + g]));
        t.bytes = by_group.flat_map(|s| s.to_le_bytes()).collect();
        t
    }

    fn order_tensor(&self, name: String) -> Tensor {
        let mut t = tensor(name, "I32", &[self.cols]);
        t.bytes = self.group_of.iter().flat_map(|&g| (g as i32).to_le_bytes()).collect();
        t
    }

    /// `less` is what stored zero points lack: 1 in v1.
    fn gptq(&self, name: &str, less: u32) -> Vec<Tensor> {
        let per_word = 32 / self.bits;
        let mut codes = Words::new(self.cols / per_word, self.rows);
        let mut zeros = Words::new(self.groups, self.rows / per_word);
        for n in 0..self.rows {
            for k in 0..self.cols {
                codes.put(k / per_word, n, k % per_word * self.bits, self.codes[n * self.cols + k]);
            }
            for g in 0..self.groups {
                let mask = (1 << self.bits) - 1;
                let stored = self.zeros[n * self.groups + g].wrapping_sub(less) & mask;
                zeros.put(g, n / per_word, n % per_word * self.bits, stored);
            }
        }
        let (codes, zeros) = (codes.tensor(format!("{name}.qweight")), zeros.tensor(format!("{name}.qzeros")));
        vec![codes, zeros, self.scale_tensor(name), self.order_tensor(format!("{name}.g_idx"))]
    }

    fn awq(&self, name: &str) -> Vec<Tensor> {
        // Where in a word AWQ puts outputs 0 to 7.
        let shift = |n: usize| 4 * [0, 4, 1, 5, 2, 6, 3, 7][n % 8];
        let mut codes = Words::new(self.cols, self.rows / 8);
        let mut zeros = Words::new(self.groups, self.rows / 8);
        for n in 0..self.rows {
            for k in 0..self.cols {
                codes.put(k, n / 8, shift(n), self.codes[n * self.cols + k]);
            }
            for g in 0..self.groups {
                zeros.put(g, n / 8, shift(n), self.zeros[n * self.groups + g]);
            }
        }
        let (codes, zeros) = (codes.tensor(format!("{name}.qweight")), zeros.tensor(format!("{name}.qzeros")));
        vec![codes, zeros, self.scale_tensor(name)]
    }

    fn compressed(&self, name: &str, symmetric: bool, ordered: bool) -> Vec<Tensor> {
        let per_word = 32 / self.bits;
        let mut codes = Words::new(self.rows, self.cols / per_word);
        let mut zeros = Words::new(self.rows / per_word, self.groups);
        for n in 0..self.rows {
            for k in 0..self.cols {
                codes.put(n, k / per_word, k % per_word * self.bits, self.codes[n * self.cols + k]);
            }
            for g in 0..self.groups {
                zeros.put(n / per_word, g, n % per_word * self.bits, self.zeros[n * self.groups + g]);
            }
        }
        let mut scales = tensor(format!("{name}.weight_scale"), "F16", &[self.rows, self.groups]);
        scales.bytes = self.scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        let mut shape = tensor(format!("{name}.weight_shape"), "I64", &[2]);
        shape.bytes = [self.rows, self.cols].iter().flat_map(|&n| (n as u64).to_le_bytes()).collect();
        let mut all = vec![codes.tensor(format!("{name}.weight_packed")), scales, shape];
        if !symmetric {
            all.push(zeros.tensor(format!("{name}.weight_zero_point")));
        }
        if ordered {
            all.push(self.order_tensor(format!("{name}.weight_g_idx")));
        }
        all
    }

    /// compressed-tensors `int-quantized` with zero points, all signed.
    fn signed(&self, name: &str) -> Vec<Tensor> {
        let bytes = |values: &[u32]| values.iter().map(|&v| (v as i32 - 128) as i8 as u8).collect();
        let mut codes = tensor(format!("{name}.weight"), "I8", &[self.rows, self.cols]);
        codes.bytes = bytes(&self.codes);
        let mut zeros = tensor(format!("{name}.weight_zero_point"), "I8", &[self.rows, self.groups]);
        zeros.bytes = bytes(&self.zeros);
        let mut scales = tensor(format!("{name}.weight_scale"), "F16", &[self.rows, self.groups]);
        scales.bytes = self.scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        vec![codes, scales, zeros]
    }
}

/// Words `[rows, cols]` that numbers are put into.
struct Words(usize, usize, Vec<u32>);

impl Words {
    fn new(rows: usize, cols: usize) -> Self {
        Words(rows, cols, vec![0; rows * cols])
    }

    fn put(&mut self, row: usize, col: usize, shift: usize, value: u32) {
        self.2[row * self.1 + col] |= value << shift;
    }

    fn tensor(self, name: String) -> Tensor {
        let mut t = tensor(name, "I32", &[self.0, self.1]);
        t.bytes = self.2.iter().flat_map(|w| w.to_le_bytes()).collect();
        t
    }
}

/// The matrices of a model in order of experts and projections, and its tensors.
fn quantized(recipe: Recipe, pack: impl Fn(&Quantized, &str) -> Vec<Tensor>) -> (Vec<Quantized>, Vec<Tensor>) {
    let random = std::cell::RefCell::new(Random(11));
    let matrices = std::cell::RefCell::new(Vec::new());
    let tensors = model(|name, rows, cols| {
        let q = Quantized::new(recipe, rows, cols, &mut random.borrow_mut());
        let tensors = pack(&q, name);
        matrices.borrow_mut().push(q);
        tensors
    });
    (matrices.into_inner(), tensors)
}

fn gptq_config(recipe: Recipe, version: &str) -> Value {
    let group = if recipe.group == 0 { -1 } else { recipe.group as i64 };
    set(
        "quantization_config",
        json!({
            "quant_method": "gptq", "bits": recipe.bits, "group_size": group, "sym": recipe.symmetric,
            "desc_act": recipe.ordered, "checkpoint_format": version,
        }),
    )
}

/// Reads every matrix and compares it with what was packed.
fn check(source: &SafetensorsSource, matrices: &[Quantized], format: impl Fn(Group) -> Format, what: &str) {
    let keys = (0..EXPERTS).flat_map(|e| Proj::ALL.map(|p| (e, p)));
    for ((expert, proj), q) in keys.zip(matrices) {
        let group = if q.groups == 1 { Group::Row } else { Group::Of((q.cols / q.groups) as u32) };
        let m = source.matrix(0, expert, proj).unwrap();
        assert_eq!(m.format(), format(group), "{what}");
        assert_eq!(source.layers()[0].format(proj), m.format(), "{what}");
        assert_eq!(source.layers()[0].scales[proj.index()], m.scales().map(|s| s.kind()), "{what}");
        assert_eq!((m.rows(), m.cols()), (q.rows, q.cols));
        assert!(m.decode() == q.values(), "{what}, {proj:?} of expert {expert}");
        m.check_scales().unwrap();
        let by_name =
            source.tensor(&format!("model.layers.0.mlp.experts.{expert}.{}_proj.weight", proj.name())).unwrap();
        assert!((by_name.format(), by_name.decode()) == (m.format(), q.values()), "{what}, by name");
        let (_, name) = source.tensor_name(0, expert, proj);
        assert!(name.ends_with(".qweight") || name.ends_with(".weight_packed") || name.ends_with(".weight"), "{name}");
        // Words are as kernels read them; what is turned, or has signs that are not, is copied.
        let reads = source.reads(&source.layers()[0], proj);
        let copied = if name.ends_with(".weight_packed") { 0 } else { m.format().stored_bytes(q.rows, q.cols) };
        assert_eq!(reads.copied_bytes, copied, "{what}, {name}");
        assert!(reads.mapped_bytes >= m.codes().len() as u64, "{what}, {name}");
        source.release(0, expert);
    }
}

#[test]
fn gptq_in_all_its_variants() {
    for bits in [4, 8] {
        for (group, symmetric, ordered) in [
            (16, true, false),
            (16, false, false),
            (16, true, true),
            (16, false, true),
            (0, true, false),
            (0, false, true),
        ] {
            for (version, less) in [("gptq", 1), ("gptq_v2", 0)] {
                // v1 cannot hold 0, and reaches 16 or 256.
                let recipe = Recipe { bits, group, symmetric, ordered, least: less };
                let (matrices, tensors) = quantized(recipe, |q, name| q.gptq(name, less));
                let source = from_tensors(&gptq_config(recipe, version), &tensors).unwrap();
                let format = |g: Group| match (bits, ordered && g != Group::Row, symmetric) {
                    (4, true, _) => Format::Int4Ordered(g),
                    (4, _, true) => Format::Int4(g),
                    (4, _, false) => Format::Int4Asym(g),
                    (_, true, _) => Format::Int8Ordered(g),
                    (_, _, true) => Format::Int8Offset(g),
                    (_, _, false) => Format::Int8Asym(g),
                };
                check(&source, &matrices, format, &format!("{recipe:?} {version}"));
                if !symmetric && less == 1 && group > 0 {
                    assert!(matrices.iter().any(|q| q.zeros.contains(&(1 << bits))), "the largest zero point occurs");
                }
                let ordered = ordered && group > 0;
                assert_eq!(source.matrix(0, 0, Proj::Up).unwrap().column_groups().is_some(), ordered);
                // Without `g_idx` columns are in order; bits come from the config or the shapes.
                if !ordered {
                    let bare: Vec<Tensor> = tensors.into_iter().filter(|t| !t.name.ends_with("g_idx")).collect();
                    let source = from_tensors(&gptq_config(recipe, version), &bare).unwrap();
                    check(&source, &matrices, format, "without g_idx");
                }
            }
        }
    }
}

#[test]
fn the_worked_example_of_gptq() {
    // Eight outputs, output j = row * (1 + j / 8); scale = 2 amax / 15 in F16, zero point 8.
    let row: Vec<f32> = (0..128).map(|i| ((37 * i + 11) % 101) as f32 / 50.0 - 1.0).collect();
    let mut q =
        Quantized::new(Recipe { bits: 4, group: 0, symmetric: true, ordered: false, least: 0 }, 8, 128, &mut Random(1));
    for n in 0..8 {
        let values: Vec<f32> = row.iter().map(|v| v * (1.0 + n as f32 / 8.0)).collect();
        let amax = values.iter().fold(0f32, |a, v| a.max(v.abs()));
        q.scales[n] = f16::from_f32(2.0 * amax / 15.0);
        for (k, v) in values.iter().enumerate() {
            q.codes[n * 128 + k] = ((v / q.scales[n].to_f32()).round_ties_even() + 8.0).clamp(0.0, 15.0) as u32;
        }
    }
    let name = "model.layers.0.self_attn.q_proj";
    let tensors = q.gptq(name, 1);
    assert_eq!(tensors[0].bytes[..4], 0xb5f9_4d82u32.to_le_bytes());
    assert_eq!(tensors[1].bytes, 0x7777_7777u32.to_le_bytes());
    assert_eq!(q.scales[0].to_f32(), 0.133_300_78);
    let recipe = Recipe { bits: 4, group: 128, symmetric: true, ordered: false, least: 0 };
    let all = [model(bf16), tensors].concat();
    let source = from_tensors(&gptq_config(recipe, "gptq"), &all).unwrap();
    assert_eq!(source.layers()[0].formats, [Format::Bf16; 3]);
    let m = source.tensor(&format!("{name}.weight")).unwrap();
    assert_eq!((m.format(), m.rows(), m.cols()), (Format::Int4(Group::Row), 8, 128));
    assert_eq!(m.decode()[..4], [-0.799_804_7, 0.0, 0.666_503_9, -0.533_203_1]);
    assert!(source.tensors().contains(&format!("{name}.qweight")));
}

#[test]
fn awq_in_its_own_order() {
    for group in [8, 16, 0] {
        let recipe = Recipe { bits: 4, group, symmetric: false, ordered: false, least: 0 };
        let (matrices, tensors) = quantized(recipe, |q, name| q.awq(name));
        let size = if group == 0 { -1 } else { group as i64 };
        for said in [
            json!({"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": true, "version": "gemm"}),
            json!({"quant_method": "awq", "version": "GEMM"}),
            json!({"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "sym": true}),
        ] {
            let source = from_tensors(&set("quantization_config", said), &tensors).unwrap();
            check(&source, &matrices, Format::Int4Asym, &format!("AWQ {group}"));
        }
    }
}

#[test]
fn compressed_tensors_with_zero_points_and_orders() {
    for (bits, symmetric, ordered) in
        [(4, false, false), (4, false, true), (4, true, true), (8, false, false), (8, false, true), (8, true, true)]
    {
        let recipe = Recipe { bits, group: 16, symmetric, ordered, least: 0 };
        let (matrices, tensors) = quantized(recipe, |q, name| q.compressed(name, symmetric, ordered));
        let source = from_tensors(&config(), &tensors).unwrap();
        let format = |g| match (bits, ordered) {
            (4, false) => Format::Int4Asym(g),
            (4, true) => Format::Int4Ordered(g),
            (_, false) => Format::Int8Asym(g),
            (_, true) => Format::Int8Ordered(g),
        };
        check(&source, &matrices, format, &format!("{recipe:?}"));
        if ordered {
            // An order that was never set is none.
            let in_order = changed(tensors, &format!("{GATE_1}.weight_g_idx"), |t| t.bytes.fill(0xff));
            let source = from_tensors(&config(), &in_order).unwrap();
            let groups = source.matrix(0, 1, Proj::Gate).unwrap().column_groups().unwrap().to_vec();
            assert!(groups.iter().enumerate().all(|(k, &g)| g as usize == k / 16));
        }
    }
    for group in [16, 0] {
        let recipe = Recipe { bits: 8, group, symmetric: false, ordered: false, least: 0 };
        let (matrices, tensors) = quantized(recipe, |q, name| q.signed(name));
        check(&from_tensors(&config(), &tensors).unwrap(), &matrices, Format::Int8Asym, "int-quantized");
    }
}

#[test]
fn a_layer_of_gptq_or_awq_runs_on_the_portable_kernel() {
    let recipe = Recipe { bits: 4, group: 16, symmetric: false, ordered: true, least: 1 };
    let (gptq, gptq_tensors) = quantized(recipe, |q, name| q.gptq(name, 1));
    let awq_recipe = Recipe { ordered: false, least: 0, ..recipe };
    let (awq, awq_tensors) = quantized(awq_recipe, |q, name| q.awq(name));
    let awq_config = set("quantization_config", json!({"quant_method": "awq", "bits": 4, "group_size": 16}));
    for (config, tensors, matrices) in
        [(gptq_config(recipe, "gptq"), gptq_tensors, gptq), (awq_config, awq_tensors, awq)]
    {
        // From a directory, as a user has it.
        let dir = Dir::new(if config["quantization_config"]["quant_method"] == "gptq" { "gptq" } else { "awq" });
        dir.write("config.json", config.to_string());
        dir.write("model.safetensors", safetensors(&tensors));
        let source = kt_core::open(&dir.0).unwrap();
        let formats = [Some(Format::Bf16), Some(Format::Int4(Group::Of(32))), Some(Format::Mxfp4), None];
        // GPTQ's zero points are one more than their codes: 16 has none in compressed-tensors.
        let kept = usize::from(config["quantization_config"]["quant_method"] == "awq");
        converts_experts(&source, Container::Safetensors, &formats[..3 + kept]);
        let registry = |_| vec![Candidate::new("portable", Ok(CpuBackend::new("portable", Portable)))];
        let runtime = RuntimeBuilder::new(registry).threads(2).build().unwrap();
        let experts = runtime.load(&*source).unwrap();
        let tokens = 5;
        let mut random = Random(3);
        let input: Vec<f32> = (0..tokens * HIDDEN).map(|_| random.normal()).collect();
        let ids: Vec<i32> = (0..tokens).map(|_| random.below(EXPERTS) as i32).collect();
        let mut batch = Batch::new(tokens, input.clone(), ids.clone(), vec![1.0; tokens]).unwrap();
        experts.layer(0).unwrap().forward(&mut batch).unwrap();
        let dot = |m: &Quantized, x: &[f32]| -> Vec<f32> {
            (0..m.rows).map(|n| (0..m.cols).map(|k| m.value(n, k) * x[k]).sum()).collect()
        };
        let mut want = Vec::new();
        for (x, &id) in input.chunks(HIDDEN).zip(&ids) {
            let [gate, up, down] = [0, 1, 2].map(|p| &matrices[id as usize * 3 + p]);
            let h: Vec<f32> = dot(gate, x).iter().zip(dot(up, x)).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            want.extend(dot(down, &h).into_iter().map(f64::from));
        }
        let error = mean_error(&want, batch.output());
        assert!(error < 1e-5 && want.iter().any(|v| v.abs() > 0.1), "{error}");
    }
}

#[test]
fn gptq_that_does_not_fit_is_named() {
    let file = "checkpoint/model.safetensors";
    let recipe = Recipe { bits: 4, group: 16, symmetric: false, ordered: false, least: 1 };
    let (_, tensors) = quantized(recipe, |q, name| q.gptq(name, 1));
    let good = gptq_config(recipe, "gptq");
    let name = |suffix: &str| format!("{GATE_1}.{suffix}");
    let open = |config: &Value, tensors: &[Tensor]| from_tensors(config, tensors);
    let refuse = |suffix: &str, change: &dyn Fn(&mut Tensor), wants: &[&str]| {
        let bad = changed(tensors.clone(), &name(suffix), change);
        refused(open(&good, &bad), &[&[file], wants].concat());
    };
    let set_to = |dtype: &'static str, shape: &[usize]| {
        let shape = shape.to_vec();
        move |t: &mut Tensor| *t = tensor(t.name.clone(), dtype, &shape)
    };
    // Gate is [64, 32]: codes [4, 64], zero points [2, 8], scales [2, 64].
    refuse("qweight", &set_to("I32", &[3, 64]), &[&name("qweight"), "3 rows of words for 32 inputs"]);
    refuse("qweight", &set_to("I32", &[8, 64]), &[&name("qweight"), "has 8 bits", "says bits 4"]);
    refuse("qweight", &set_to("I32", &[4, 63]), &[&name("qweight"), "[4, 63]", "[4, 64]", "quant_method"]);
    refuse("qweight", &set_to("I32", &[256]), &[&name("qweight"), "two dimensions"]);
    refuse("qweight", &set_to("I32", &[4, 0]), &[&name("qweight"), "nothing empty"]);
    refuse("qweight", &set_to("F32", &[4, 64]), &[&name("qweight"), "F32", "I32 is due"]);
    refuse("qzeros", &set_to("I32", &[2, 7]), &[&name("qzeros"), "[2, 7]", "[2, 8]"]);
    refuse("qzeros", &set_to("U8", &[2, 8]), &[&name("qzeros"), "U8"]);
    refuse("scales", &set_to("I32", &[2, 64]), &[&name("scales"), "I32"]);
    refuse("scales", &set_to("U8", &[2, 64]), &[&name("scales"), "U8", "F16"]);
    refuse("scales", &set_to("F16", &[4, 64]), &[&name("scales"), "4 groups of 32", "group_size 16"]);
    refuse("scales", &set_to("F16", &[3, 64]), &[&name("scales"), "3 groups, which do not divide 32"]);
    refuse("g_idx", &set_to("I32", &[31]), &[&name("g_idx"), "[31]", "[32]"]);
    refuse("g_idx", &set_to("I64", &[32]), &[&name("g_idx"), "I64"]);
    refused(open(&good, &without(tensors.clone(), &name("qzeros"))), &[file, &name("qzeros"), "missing"]);
    refused(open(&good, &without(tensors.clone(), &name("scales"))), &[file, &name("scales"), "missing"]);
    refused(open(&good, &without(tensors.clone(), &name("qweight"))), &[file, &name("weight"), "missing"]);
    let twice = with(tensors.clone(), tensor(name("weight"), "BF16", &[64, 32]));
    refused(open(&good, &twice), &[file, &name("qweight"), "another format"]);

    // What the config says.
    let config_file = "checkpoint/config.json";
    let said = |key: &str, value: Value| {
        let mut config = good.clone();
        config["quantization_config"][key] = value;
        open(&config, &tensors)
    };
    refused(open(&config(), &tensors), &[file, "qweight", "quant_method"]);
    refused(said("quant_method", json!("eetq")), &[file, "qweight", "quant_method"]);
    refused(said("quant_method", json!("awq")), &[file, "qweight", "AWQ", "quant_method"]);
    refused(said("bits", json!(3)), &[config_file, "quantization_config.bits", "3"]);
    refused(said("bits", json!("four")), &[config_file, "quantization_config.bits", "four"]);
    refused(said("bits", json!(8)), &[file, "qweight", "4 bits", "says bits 8"]);
    refused(said("group_size", json!(-1)), &[file, "scales", "group_size -1"]);
    refused(said("checkpoint_format", json!("marlin")), &[config_file, "checkpoint_format", "marlin", "gptq_v2"]);
    let none: Vec<Tensor> = tensors.iter().filter(|t| !t.name.ends_with("g_idx")).cloned().collect();
    let mut ordered = good.clone();
    ordered["quantization_config"]["desc_act"] = json!(true);
    refused(open(&ordered, &none), &[file, "g_idx", "missing", "desc_act"]);
    let mut symmetric = good.clone();
    symmetric["quantization_config"]["sym"] = json!(true);
    refused(
        open(&symmetric, &tensors).unwrap().matrix(0, 1, Proj::Gate),
        &[file, &name("qzeros"), "sym true", "zero point [0, 0]"],
    );

    // What only the data tells.
    let at = |config: &Value, group: i32| {
        let bad = changed(tensors.clone(), &name("g_idx"), |t| t.bytes[20..24].copy_from_slice(&group.to_le_bytes()));
        let source = open(config, &bad).unwrap();
        source.matrix(0, 0, Proj::Gate).unwrap();
        source.matrix(0, 1, Proj::Gate)
    };
    for group in [1, 2, -1, i32::MIN] {
        let found = format!("input 5 is of group {group},");
        refused(at(&good, group), &[file, &name("g_idx"), &found, "desc_act false"]);
    }
    for group in [2, -1, i32::MAX] {
        refused(at(&ordered, group), &[file, &name("g_idx"), &format!("column 5 is of group {group}")]);
    }
    assert_eq!(at(&ordered, 1).unwrap().column_groups().unwrap()[4..7], [0, 1, 0]);

    // Modules with numbers of their own: the tensors tell.
    let (_, eight) = quantized(Recipe { bits: 8, group: 8, ..recipe }, |q, name| q.gptq(name, 1));
    let mut dynamic = good.clone();
    dynamic["quantization_config"]["dynamic"] =
        json!({"-:.*router.*": {}, "+:.*experts.*": {"bits": 8, "group_size": 8}});
    assert_eq!(open(&dynamic, &eight).unwrap().layers()[0].formats, [Format::Int8Asym(Group::Of(8)); 3]);
    dynamic["quantization_config"]["dynamic"] = json!({"-:.*router.*": {}});
    refused(open(&dynamic, &eight), &[file, "qweight", "8 bits", "says bits 4"]);
}

#[test]
fn awq_that_does_not_fit_is_named() {
    let file = "checkpoint/model.safetensors";
    let recipe = Recipe { bits: 4, group: 16, symmetric: false, ordered: false, least: 0 };
    let (_, tensors) = quantized(recipe, |q, name| q.awq(name));
    let said = |value: Value| set("quantization_config", value);
    let good = said(json!({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}));
    let name = |suffix: &str| format!("{GATE_1}.{suffix}");
    let refuse = |suffix: &str, dtype: &'static str, shape: &[usize], wants: &[&str]| {
        let bad = changed(tensors.clone(), &name(suffix), |t| *t = tensor(t.name.clone(), dtype, shape));
        refused(from_tensors(&good, &bad), &[&[file], wants].concat());
    };
    // Gate is [64, 32]: codes [32, 8], zero points [2, 8], scales [2, 64].
    refuse("qweight", "I32", &[32, 7], &[&name("qweight"), "[32, 7]", "[32, 8]"]);
    refuse("qweight", "I32", &[64, 8], &[&name("scales"), "2 groups of 64", "group_size 16"]);
    refuse("qzeros", "I32", &[2, 64], &[&name("qzeros"), "[2, 64]", "[2, 8]"]);
    refuse("scales", "F16", &[2, 60], &[&name("qweight"), "multiples of eight"]);
    refused(from_tensors(&good, &without(tensors.clone(), &name("qzeros"))), &[file, &name("qzeros"), "missing"]);
    let gemv = said(json!({"quant_method": "awq", "bits": 4, "version": "gemv"}));
    refused(from_tensors(&gemv, &tensors), &["checkpoint/config.json", "quantization_config.version", "gemv"]);
    let gptq = said(json!({"quant_method": "gptq", "bits": 4, "group_size": 16}));
    refused(from_tensors(&gptq, &tensors), &[file, "qweight", "32 rows of words for 32 inputs"]);
    let eight = said(json!({"quant_method": "awq", "bits": 8}));
    refused(from_tensors(&eight, &tensors), &[file, "qweight", "4 bits", "says bits 8"]);
}
