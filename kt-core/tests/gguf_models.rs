//! Small GGUF files of every architecture: layers, routing, biases, mixed types, and that they plan, load and run.

mod common;

use common::gguf::{Gguf, type_id};
use common::{Dir, converts_experts, refused};
use kt_core::activation::Activation;
use kt_core::convert::Container;
use kt_core::cpu::CpuBackend;
use kt_core::cpu::portable::Portable;
use kt_core::source::names::Names;
use kt_core::source::synthetic::SyntheticSource;
use kt_core::testing::{Naive, Random, mean_error};
use kt_core::{Batch, Format, Hidden, Proj, Routing, Rule, RuntimeBuilder, WeightSource};

const HIDDEN: usize = 256;
const INTERMEDIATE: usize = 512;
const EXPERTS: usize = 4;

/// How a layer's experts are stored.
#[derive(Clone, Copy, PartialEq)]
enum Store {
    Stacked,
    Fused,
    Alone,
}

struct Model {
    file: Gguf,
    architecture: &'static str,
    /// The experts written, by layer.
    experts: Vec<(usize, SyntheticSource)>,
}

impl Model {
    fn new(architecture: &'static str, blocks: u32) -> Model {
        let file = Gguf::of(architecture);
        let model = Model { file, architecture, experts: vec![] };
        let model = model.uint("block_count", blocks).uint("embedding_length", HIDDEN as u32);
        model.uint("expert_count", EXPERTS as u32).uint("expert_used_count", 2)
    }

    fn uint(mut self, key: &str, value: u32) -> Model {
        self.file = self.file.uint(&format!("{}.{key}", self.architecture), value);
        self
    }

    fn float(mut self, key: &str, value: f32) -> Model {
        self.file = self.file.float(&format!("{}.{key}", self.architecture), value);
        self
    }

    fn flag(mut self, key: &str, value: bool) -> Model {
        self.file = self.file.flag(&format!("{}.{key}", self.architecture), value);
        self
    }

    /// Adds small F32 tensors of these names.
    fn plain(mut self, names: &[&str]) -> Model {
        for name in names {
            self.file.weights(name, &[HIDDEN], Format::F32, &[0; HIDDEN * 4]);
        }
        self
    }

    fn layer(self, index: usize, formats: impl Into<[Format; 3]>) -> Model {
        self.stored(index, formats.into(), Store::Stacked, false)
    }

    fn stored(mut self, index: usize, formats: [Format; 3], store: Store, biases: bool) -> Model {
        let source = SyntheticSource::builder()
            .hidden(HIDDEN)
            .intermediate(INTERMEDIATE)
            .experts(EXPERTS)
            .format(formats)
            .biases(biases)
            .seed(index as u64)
            .build()
            .unwrap();
        let codes = |e: usize, proj: Proj| source.matrix(0, e, proj).unwrap().codes().to_vec();
        let mut put = |name: String, ne: &[usize], format, bytes: Vec<u8>| {
            self.file.weights(&format!("blk.{index}.{name}"), ne, format, &bytes)
        };
        for proj in Proj::ALL {
            let (rows, cols) = source.layers()[0].shape(proj);
            let (name, format) = (proj.name(), formats[proj.index()]);
            match store {
                Store::Fused if proj == Proj::Up => continue,
                Store::Fused if proj == Proj::Gate => {
                    let both = |e| [codes(e, Proj::Gate), codes(e, Proj::Up)].concat();
                    let bytes = (0..EXPERTS).flat_map(both).collect();
                    put("ffn_gate_up_exps.weight".into(), &[cols, 2 * rows, EXPERTS], format, bytes);
                }
                Store::Alone => {
                    for e in 0..EXPERTS {
                        put(format!("ffn_{name}.{e}.weight"), &[cols, rows], format, codes(e, proj));
                    }
                }
                _ => {
                    let bytes = (0..EXPERTS).flat_map(|e| codes(e, proj)).collect();
                    put(format!("ffn_{name}_exps.weight"), &[cols, rows, EXPERTS], format, bytes);
                }
            }
            if biases {
                let values = (0..EXPERTS).flat_map(|e| source.bias(0, e, proj).unwrap().unwrap());
                let bytes = values.flat_map(f32::to_le_bytes).collect();
                put(format!("ffn_{name}_exps.bias"), &[rows, EXPERTS], Format::F32, bytes);
            }
        }
        self.experts.push((index, source));
        self
    }

    /// Opens the file, compares every expert, plans, loads, and runs the first layer.
    #[track_caller]
    fn check(self, rule: Rule, scale: f32, activation: Activation) -> std::sync::Arc<dyn WeightSource> {
        let dir = Dir::new(&format!("{}-{}", self.architecture, self.file.tensors.len()));
        let source = kt_core::open(dir.write("model.gguf", self.file.bytes())).unwrap();
        converts_experts(&source, Container::Gguf, &[None, Some(Format::Q8_0), Some(Format::Q4K)]);
        let indices: Vec<usize> = source.layers().iter().map(|l| l.index).collect();
        assert_eq!(indices, self.experts.iter().map(|e| e.0).collect::<Vec<_>>());
        assert_eq!(source.metadata().family(), Some(self.architecture));
        for (layer, (index, want)) in source.layers().iter().zip(&self.experts) {
            let spec = &want.layers()[0];
            assert_eq!((layer.experts, layer.top_k), (EXPERTS, 2));
            assert_eq!((layer.hidden, layer.intermediate), (HIDDEN, INTERMEDIATE));
            assert_eq!((layer.formats, layer.biases, layer.activation), (spec.formats, spec.biases, activation));
            assert_eq!(source.routing(*index), Some(Routing { top_k: 2, rule: rule.clone(), scale }));
            for (e, proj) in (0..EXPERTS).flat_map(|e| Proj::ALL.map(|p| (e, p))) {
                let (got, want_matrix) = (source.matrix(*index, e, proj).unwrap(), want.matrix(0, e, proj).unwrap());
                assert_eq!(got.codes(), want_matrix.codes(), "layer {index}, expert {e}, {proj:?}");
                assert_eq!(source.bias(*index, e, proj).unwrap(), want.bias(0, e, proj).unwrap());
                source.release(*index, e);
            }
        }
        assert!(!source.tensors().iter().any(|name| name.contains("_exps") || name.contains("ffn_up.0")));

        let runtime = RuntimeBuilder::new(|_| vec![]).with_backend(CpuBackend::new("portable", Portable));
        let runtime = runtime.threads(2).build().unwrap();
        let plan = runtime.plan(&*source).unwrap();
        let stored: u64 = source.layers().iter().map(|l| l.expert_bytes() * l.experts as u64).sum();
        assert_eq!(plan.mapped_bytes() + plan.packed_bytes(), stored);
        let experts = runtime.load(&*source).unwrap();
        let mut random = Random(3);
        let input: Vec<f32> = (0..3 * HIDDEN).map(|_| random.normal()).collect();
        let (ids, weights) = (vec![0, 3, 1, 2, 3, -1], vec![0.5, 0.25, 1.0, 0.5, 0.75, 0.0]);
        let mut batch = Batch::new(3, input.clone(), ids.clone(), weights.clone()).unwrap();
        experts.layer(source.layers()[0].index).unwrap().forward(&mut batch).unwrap();
        let want = Naive::new(&*source).forward(&Hidden::F32(input), 3, &ids, &weights, 2);
        let error = mean_error(&want, batch.output());
        assert!(error < 1e-5, "{error}");
        source
    }
}

const SHARED: [&str; 5] = [
    "blk.0.ffn_gate_inp.weight",
    "blk.0.ffn_gate_inp_shexp.weight",
    "blk.0.ffn_gate_shexp.weight",
    "blk.0.ffn_up_shexp.weight",
    "blk.0.ffn_down_shexp.weight",
];

#[test]
fn qwen_models_take_softmax() {
    let softmax = |renormalize| Rule::Softmax { renormalize };
    let model = Model::new("qwen2moe", 2).plain(&SHARED).layer(0, Format::Q4_0).layer(1, Format::Q5_1);
    let source = model.check(softmax(false), 1.0, Activation::SiluMul);
    // Everything but routed experts is for the host.
    assert_eq!(source.tensors().len(), SHARED.len());
    let names = Names::of(&*source).unwrap();
    for name in [names.router(0), names.shared(0, Proj::Down).unwrap(), names.shared_gate(0).unwrap()] {
        assert!(source.tensor(&name).is_ok(), "{name}");
    }
    Model::new("qwen3moe", 1).layer(0, Format::Q6K).check(softmax(true), 1.0, Activation::SiluMul);
    for architecture in ["qwen3next", "qwen35moe"] {
        // The last layer is for multi-token prediction.
        let model = Model::new(architecture, 3).uint("nextn_predict_layers", 1).plain(&SHARED);
        let formats = [Format::Iq4Xs, Format::Iq4Xs, Format::Q5K];
        let mut model = model.stored(0, formats, Store::Fused, false).layer(1, Format::Q8_0).layer(2, Format::Q8_0);
        model.experts.pop();
        let source = model.check(softmax(true), 1.0, Activation::SiluMul);
        assert_eq!(source.tensors().len(), SHARED.len());
    }
}

#[test]
fn types_may_differ_by_layer_and_projection() {
    use Format::*;
    let layers = [
        [Iq2Xxs, Iq2Xxs, Q2K],
        [Iq2Xs, Iq2S, Iq3Xxs],
        [Iq3S, Iq4Nl, Q3K],
        [Iq1S, Iq1M, Iq4Xs],
        [Tq1_0, Tq2_0, Mxfp4Ggml],
        [Q4_1, Q5_0, Q4K],
        [F32, F16, Bf16],
    ];
    let model = layers.iter().enumerate().fold(Model::new("qwen3moe", 7), |m, (i, &formats)| m.layer(i, formats));
    model.check(Rule::Softmax { renormalize: true }, 1.0, Activation::SiluMul);
}

#[test]
fn deepseek_glm_and_kimi_take_sigmoids_with_a_bias() {
    let dense = ["blk.0.ffn_gate.weight", "blk.0.ffn_up.weight", "blk.0.ffn_down.weight", "blk.1.exp_probs_b.bias"];
    let biased = |groups, keep| Rule::BiasedSigmoid { groups, keep, renormalize: true };
    let v3 = Model::new("deepseek2", 2).uint("expert_gating_func", 2).uint("expert_group_count", 2);
    let v3 = v3.uint("expert_group_used_count", 1).flag("expert_weights_norm", true).float("expert_weights_scale", 2.5);
    let source = v3.plain(&dense).layer(1, Format::Q4K).check(biased(2, 1), 2.5, Activation::SiluMul);
    let bias = Names::of(&*source).unwrap().correction_bias(1).unwrap();
    assert!(source.tensor(&bias).is_ok());
    let kimi = Model::new("deepseek2", 2).uint("expert_gating_func", 2).uint("expert_group_count", 1);
    let kimi = kimi.uint("expert_group_used_count", 1).flag("expert_weights_norm", true);
    let kimi = kimi.float("expert_weights_scale", 2.827).plain(&dense).layer(1, Format::Q4_0);
    kimi.check(biased(1, 1), 2.827, Activation::SiluMul);
    // Before there was a key for it: DeepSeek-V2.
    let v2 = Model::new("deepseek2", 2).float("expert_weights_scale", 16.0).plain(&dense).layer(1, Format::Q5_0);
    v2.check(Rule::Softmax { renormalize: false }, 16.0, Activation::SiluMul);
    let glm = Model::new("glm4moe", 3).uint("nextn_predict_layers", 1).flag("expert_weights_norm", true);
    let mut glm = glm.float("expert_weights_scale", 1.0).plain(&dense).layer(1, Format::Q3K).layer(2, Format::Q8_0);
    glm.experts.pop();
    glm.check(biased(1, 1), 1.0, Activation::SiluMul);
    let minimax = Model::new("minimax-m2", 1).uint("expert_gating_func", 2).plain(&["blk.0.exp_probs_b.bias"]);
    minimax.layer(0, Format::Iq3S).check(biased(1, 1), 1.0, Activation::SiluMul);
}

#[test]
fn gpt_oss_has_biases_and_its_own_activation() {
    let formats = [Format::Mxfp4Ggml; 3];
    let model = Model::new("gpt-oss", 2).plain(&["blk.0.ffn_gate_inp.bias"]);
    let model = model.stored(0, formats, Store::Stacked, true).stored(1, formats, Store::Stacked, true);
    let source = model.check(Rule::TopKSoftmax, 1.0, Activation::GptOss { alpha: 1.702, limit: 7.0 });
    assert!(source.tensor(&Names::of(&*source).unwrap().router_bias(0).unwrap()).is_ok());
}

#[test]
fn mixtral_is_a_llama_with_experts_in_new_files_and_old() {
    let softmax = Rule::Softmax { renormalize: true };
    Model::new("llama", 1).layer(0, Format::Q4K).check(softmax.clone(), 1.0, Activation::SiluMul);
    let alone = || Model::new("llama", 1).plain(&SHARED[..1]).stored(0, [Format::Q5K; 3], Store::Alone, false);
    let source = alone().check(softmax, 1.0, Activation::SiluMul);
    assert_eq!(source.tensors(), [SHARED[0]]);
    assert_eq!(source.tensor_name(0, 2, Proj::Up).1, "blk.0.ffn_up.2.weight");

    let third = "blk.0.ffn_up.2.weight";
    let missing = alone().file.entry(third, |t| t.0 = "other".into());
    refused(missing.open(), &["file.gguf", third, "missing"]);
    let other = alone().file.entry(third, |t| t.2 = type_id(Format::Q4K));
    refused(other.open(), &["file.gguf", third, "Q4_K", "ffn_up.0.weight"]);
    let flat = alone().file.entry("blk.0.ffn_up.0.weight", |t| t.1 = vec![(HIDDEN * INTERMEDIATE) as u64]);
    refused(flat.open(), &["file.gguf", "ffn_up.0.weight", "two"]);
    let none = Model::new("llama", 1).plain(&["blk.0.ffn_up.weight"]).file;
    refused(none.open(), &["file.gguf", "no layer holds experts"]);
}

#[test]
#[cfg(all(unix, target_pointer_width = "64"))]
fn tensors_lie_beyond_four_gibibytes() {
    use std::os::unix::fs::FileExt;
    const SIDE: usize = 8192;
    const EXPERTS: usize = 17;
    // 256 MiB a matrix, 4.25 GiB a tensor, nearly all of it a hole.
    let one = SIDE * SIDE * 4;
    let mut g = Gguf::of("qwen3moe");
    for (key, value) in [("block_count", 1), ("embedding_length", SIDE), ("expert_count", EXPERTS)] {
        g = g.uint(&format!("qwen3moe.{key}"), value as u32);
    }
    let mut g = g.uint("qwen3moe.expert_used_count", 2);
    for proj in Proj::ALL {
        let ne = vec![SIDE as u64, SIDE as u64, EXPERTS as u64];
        let name = format!("blk.0.ffn_{}_exps.weight", proj.name());
        g.tensors.push((name, ne, 0, (proj.index() * EXPERTS * one) as u64));
    }
    let (dir, header) = (Dir::new("holes"), g.bytes());
    let path = dir.write("model.gguf", &header);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    refused(kt_core::open(&path), &["model.gguf", "truncated"]);
    file.set_len((header.len() + 3 * EXPERTS * one) as u64).unwrap();
    let value = |e: usize, proj: Proj| (1 + 3 * e + proj.index()) as f32;
    let all = || [0, 1, 15, 16].into_iter().flat_map(|e| Proj::ALL.map(|p| (e, p)));
    for (e, proj) in all() {
        // The last number of each matrix.
        let at = header.len() + (proj.index() * EXPERTS + e + 1) * one - 4;
        file.write_all_at(&value(e, proj).to_le_bytes(), at as u64).unwrap();
    }
    let source = kt_core::open(&path).unwrap();
    for (e, proj) in all() {
        let (mut row, matrix) = (vec![0.0; SIDE], source.matrix(0, e, proj).unwrap());
        matrix.decode_row(SIDE - 1, &mut row);
        assert!(row[SIDE - 1] == value(e, proj) && row[..SIDE - 1].iter().all(|&v| v == 0.0), "{e} {proj:?}");
        source.release(0, e);
    }
}
