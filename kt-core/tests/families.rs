//! Whole models of every family, from directories into GGUF files and back: names, numbers and configs.

mod common;

use std::path::Path;
use std::sync::Arc;

use common::gguf::Gguf;
use common::{Dir, Tensor, refused, safetensors, tensor};
use kt_core::convert::{Container, Conversion, Options, verify};
use kt_core::source::metadata::Value as Meta;
use kt_core::testing::Random;
use kt_core::{Format, Group, Metadata, Progress, Proj, Result, WeightSource, open};
use serde_json::{Value, json};

const HIDDEN: usize = 64;
const WIDE: usize = 32;
const EXPERTS: usize = 4;
const VOCABULARY: usize = 48;
/// Of attention: heads, heads of keys and values, columns of each.
const HEADS: [usize; 3] = [4, 2, 16];
const LAYERS: usize = 2;

/// A family as the world knows it: names and keys are from published checkpoints and from the package `gguf`.
struct Case {
    architecture: &'static str,
    /// The config, without what all have.
    config: Value,
    /// Tensors of a layer by both names, rows and columns (0: a vector); routed experts are made by `experts`.
    layer: Vec<(&'static str, &'static str, [usize; 2])>,
    /// What takes the place of experts in the first layer, where it is dense.
    dense: bool,
    /// The expert's stem and projections; `None` for gpt-oss' own layout.
    experts: Option<(&'static str, [&'static str; 3])>,
    /// Metadata that the file must have, after the architecture.
    metadata: Vec<(&'static str, Meta)>,
}

const Q: usize = HEADS[0] * HEADS[2];
const KV: usize = HEADS[1] * HEADS[2];

fn attention() -> Vec<(&'static str, &'static str, [usize; 2])> {
    vec![
        ("input_layernorm.weight", "attn_norm.weight", [HIDDEN, 0]),
        ("self_attn.q_proj.weight", "attn_q.weight", [Q, HIDDEN]),
        ("self_attn.k_proj.weight", "attn_k.weight", [KV, HIDDEN]),
        ("self_attn.v_proj.weight", "attn_v.weight", [KV, HIDDEN]),
        ("self_attn.o_proj.weight", "attn_output.weight", [HIDDEN, Q]),
    ]
}

fn biases() -> Vec<(&'static str, &'static str, [usize; 2])> {
    vec![
        ("self_attn.q_proj.bias", "attn_q.bias", [Q, 0]),
        ("self_attn.k_proj.bias", "attn_k.bias", [KV, 0]),
        ("self_attn.v_proj.bias", "attn_v.bias", [KV, 0]),
    ]
}

fn cases() -> Vec<Case> {
    let uint = |v: usize| Meta::Uint(v as u64);
    let ffn_norm = ("post_attention_layernorm.weight", "ffn_norm.weight", [HIDDEN, 0]);
    let post_norm = ("post_attention_layernorm.weight", "post_attention_norm.weight", [HIDDEN, 0]);
    let proj = ["gate_proj", "up_proj", "down_proj"];
    let shared = |stem: &str| match stem {
        "mlp.shared_expert" => [
            ("mlp.shared_expert.gate_proj.weight", "ffn_gate_shexp.weight", [WIDE, HIDDEN]),
            ("mlp.shared_expert.up_proj.weight", "ffn_up_shexp.weight", [WIDE, HIDDEN]),
            ("mlp.shared_expert.down_proj.weight", "ffn_down_shexp.weight", [HIDDEN, WIDE]),
        ],
        _ => [
            ("mlp.shared_experts.gate_proj.weight", "ffn_gate_shexp.weight", [WIDE, HIDDEN]),
            ("mlp.shared_experts.up_proj.weight", "ffn_up_shexp.weight", [WIDE, HIDDEN]),
            ("mlp.shared_experts.down_proj.weight", "ffn_down_shexp.weight", [HIDDEN, WIDE]),
        ],
    };
    let router = ("mlp.gate.weight", "ffn_gate_inp.weight", [EXPERTS, HIDDEN]);
    let sparse_router = ("block_sparse_moe.gate.weight", "ffn_gate_inp.weight", [EXPERTS, HIDDEN]);
    vec![
        Case {
            architecture: "qwen2moe",
            config: json!({
                "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "num_experts": EXPERTS,
                "moe_intermediate_size": WIDE, "intermediate_size": 96, "shared_expert_intermediate_size": WIDE,
                "norm_topk_prob": false, "decoder_sparse_step": 1, "mlp_only_layers": [], "qkv_bias": true,
                "use_sliding_window": false,
            }),
            layer: [
                attention(),
                biases(),
                vec![ffn_norm, router],
                shared("mlp.shared_expert").to_vec(),
                vec![("mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight", [1, HIDDEN])],
            ]
            .concat(),
            dense: false,
            experts: Some(("mlp.experts", proj)),
            metadata: vec![
                ("expert_shared_feed_forward_length", uint(WIDE)),
                ("expert_feed_forward_length", uint(WIDE)),
                ("feed_forward_length", uint(96)),
            ],
        },
        Case {
            architecture: "llama",
            config: json!({
                "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": EXPERTS,
                "intermediate_size": WIDE,
            }),
            layer: [attention(), vec![ffn_norm, sparse_router]].concat(),
            dense: false,
            experts: Some(("block_sparse_moe.experts", ["w1", "w3", "w2"])),
            metadata: vec![("feed_forward_length", uint(WIDE)), ("rope.dimension_count", uint(HEADS[2]))],
        },
        Case {
            architecture: "glm4moe",
            config: json!({
                "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": EXPERTS,
                "moe_intermediate_size": WIDE, "intermediate_size": 96, "n_shared_experts": 1, "first_k_dense_replace": 1,
                "head_dim": HEADS[2], "partial_rotary_factor": 0.5, "attention_bias": true, "use_qk_norm": true, "n_group": 1,
                "topk_group": 1, "norm_topk_prob": true, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0,
            }),
            layer: [
                attention(),
                biases(),
                vec![
                    post_norm,
                    router,
                    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias", [EXPERTS, 0]),
                    ("self_attn.q_norm.weight", "attn_q_norm.weight", [HEADS[2], 0]),
                    ("self_attn.k_norm.weight", "attn_k_norm.weight", [HEADS[2], 0]),
                ],
                shared("mlp.shared_experts").to_vec(),
            ]
            .concat(),
            dense: true,
            experts: Some(("mlp.experts", proj)),
            metadata: vec![
                ("rope.dimension_count", uint(8)),
                ("leading_dense_block_count", uint(1)),
                ("expert_shared_count", uint(1)),
                ("expert_gating_func", uint(2)),
                ("expert_weights_norm", Meta::Bool(true)),
                ("expert_weights_scale", Meta::Float(1.5)),
                ("attention.key_length", uint(HEADS[2])),
            ],
        },
        Case {
            architecture: "minimax-m2",
            config: json!({
                "model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": EXPERTS,
                "intermediate_size": WIDE, "head_dim": HEADS[2], "rotary_dim": 8, "scoring_func": "sigmoid", "use_qk_norm": true,
                "use_routing_bias": true, "qk_norm_type": "per_layer", "shared_intermediate_size": 0,
            }),
            layer: [
                attention(),
                vec![
                    ffn_norm,
                    sparse_router,
                    ("block_sparse_moe.e_score_correction_bias", "exp_probs_b.bias", [EXPERTS, 0]),
                    ("self_attn.q_norm.weight", "attn_q_norm.weight", [Q, 0]),
                    ("self_attn.k_norm.weight", "attn_k_norm.weight", [KV, 0]),
                ],
            ]
            .concat(),
            dense: false,
            experts: Some(("block_sparse_moe.experts", ["w1", "w3", "w2"])),
            metadata: vec![
                ("rope.dimension_count", uint(8)),
                ("expert_gating_func", uint(2)),
                ("expert_feed_forward_length", uint(WIDE)),
            ],
        },
        Case {
            architecture: "gpt-oss",
            config: json!({
                "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_local_experts": EXPERTS,
                "intermediate_size": WIDE, "head_dim": HEADS[2], "sliding_window": 128, "swiglu_limit": 7.0, "attention_bias": true,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_scaling": {
                    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
                    "original_max_position_embeddings": 4096,
                },
            }),
            layer: [
                attention(),
                biases(),
                vec![
                    post_norm,
                    ("self_attn.o_proj.bias", "attn_output.bias", [HIDDEN, 0]),
                    ("self_attn.sinks", "attn_sinks.weight", [HEADS[0], 0]),
                    ("mlp.router.weight", "ffn_gate_inp.weight", [EXPERTS, HIDDEN]),
                    ("mlp.router.bias", "ffn_gate_inp.bias", [EXPERTS, 0]),
                ],
            ]
            .concat(),
            dense: false,
            experts: None,
            metadata: vec![
                ("attention.sliding_window", uint(128)),
                ("rope.scaling.type", Meta::String("yarn".into())),
                ("rope.scaling.factor", Meta::Float(32.0)),
                ("rope.scaling.original_context_length", uint(4096)),
                ("expert_feed_forward_length", uint(WIDE)),
            ],
        },
    ]
}

impl Case {
    fn config(&self) -> Value {
        let mut config = json!({
            "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS[0], "num_key_value_heads": HEADS[1],
            "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "max_position_embeddings": 4096,
            "vocab_size": VOCABULARY, "tie_word_embeddings": false, "hidden_act": "silu",
        });
        config.as_object_mut().unwrap().extend(self.config.as_object().unwrap().clone());
        config
    }

    /// All names of tensors but those of experts, in a directory and in a file.
    fn names(&self) -> Vec<(String, String, [usize; 2])> {
        let mut all = vec![
            ("model.embed_tokens.weight".to_owned(), "token_embd.weight".to_owned(), [VOCABULARY, HIDDEN]),
            ("model.norm.weight".into(), "output_norm.weight".into(), [HIDDEN, 0]),
            ("lm_head.weight".into(), "output.weight".into(), [VOCABULARY, HIDDEN]),
        ];
        for i in 0..LAYERS {
            let dense = self.dense && i == 0;
            for (name, gguf, shape) in &self.layer {
                if !(dense && name.starts_with("mlp.")) {
                    all.push((format!("model.layers.{i}.{name}"), format!("blk.{i}.{gguf}"), *shape));
                }
            }
            for (proj, shape) in [("gate", [96, HIDDEN]), ("up", [96, HIDDEN]), ("down", [HIDDEN, 96])] {
                if dense {
                    let name = format!("model.layers.{i}.mlp.{proj}_proj.weight");
                    all.push((name, format!("blk.{i}.ffn_{proj}.weight"), shape));
                }
            }
        }
        all
    }

    fn tensors(&self) -> Vec<Tensor> {
        let mut random = Random(17);
        let mut all: Vec<Tensor> = Vec::new();
        let mut put = |name: String, shape: &[usize]| {
            let mut t = tensor(name, "BF16", shape);
            for v in t.bytes.as_chunks_mut::<2>().0 {
                *v = half::bf16::from_f32(random.normal()).to_le_bytes();
            }
            all.push(t);
        };
        for (name, _, [rows, cols]) in self.names() {
            put(name, &[rows, cols][..if cols == 0 { 1 } else { 2 }]);
        }
        for i in usize::from(self.dense)..LAYERS {
            match self.experts {
                Some((stem, proj)) => {
                    for (e, p) in (0..EXPERTS).flat_map(|e| Proj::ALL.map(|p| (e, p))) {
                        let shape = if p == Proj::Down { [HIDDEN, WIDE] } else { [WIDE, HIDDEN] };
                        put(format!("model.layers.{i}.{stem}.{e}.{}.weight", proj[p.index()]), &shape);
                    }
                }
                None => {
                    let stem = format!("model.layers.{i}.mlp.experts");
                    put(format!("{stem}.gate_up_proj"), &[EXPERTS, HIDDEN, 2 * WIDE]);
                    put(format!("{stem}.gate_up_proj_bias"), &[EXPERTS, 2 * WIDE]);
                    put(format!("{stem}.down_proj"), &[EXPERTS, WIDE, HIDDEN]);
                    put(format!("{stem}.down_proj_bias"), &[EXPERTS, HIDDEN]);
                }
            }
        }
        all
    }

    fn write(&self, dir: &Path, config: &Value, tensors: &[Tensor]) -> Arc<dyn WeightSource> {
        std::fs::create_dir_all(dir).unwrap();
        std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
        std::fs::write(dir.join("model.safetensors"), safetensors(tensors)).unwrap();
        open(dir).unwrap()
    }
}

fn options(output: &Path) -> Options {
    Options { experts: None, ..Options::new(Container::of(output), Format::F32) }
}

fn convert(source: &Arc<dyn WeightSource>, output: &Path, options: Options) -> Result<Arc<dyn WeightSource>> {
    let conversion = Conversion::plan(source.clone(), output, options)?;
    conversion.write(&Progress::default())?.publish(None)?;
    verify(output, &Progress::default())?;
    open(output)
}

fn numbers(source: &dyn WeightSource, name: &str) -> Vec<f32> {
    source.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")).decode()
}

fn same_experts(a: &dyn WeightSource, b: &dyn WeightSource) {
    assert_eq!(
        a.layers().iter().map(|l| l.index).collect::<Vec<_>>(),
        b.layers().iter().map(|l| l.index).collect::<Vec<_>>()
    );
    for (spec, other) in a.layers().iter().zip(b.layers()) {
        assert_eq!(
            (spec.shape(Proj::Gate), spec.top_k, spec.biases),
            (other.shape(Proj::Gate), other.top_k, other.biases)
        );
        for (e, p) in (0..spec.experts).flat_map(|e| Proj::ALL.map(|p| (e, p))) {
            let [a_matrix, b_matrix] = [a, b].map(|s| s.matrix(spec.index, e, p).unwrap().decode());
            assert!(a_matrix == b_matrix, "layer {}, expert {e}, {p:?}", spec.index);
            assert_eq!(a.bias(spec.index, e, p).unwrap(), b.bias(spec.index, e, p).unwrap());
        }
    }
}

/// The rows of a head whose halves are one behind the other, in turn.
fn in_turn(rows: &[f32], heads: usize) -> Vec<f32> {
    let half = rows.len() / HIDDEN / heads / 2;
    let row = |i: usize| &rows[i * HIDDEN..][..HIDDEN];
    let order = (0..heads).flat_map(|h| (0..half).flat_map(move |i| [2 * h * half + i, (2 * h + 1) * half + i]));
    order.flat_map(row).copied().collect()
}

#[test]
fn every_family_goes_into_a_file_and_comes_back() {
    for case in cases() {
        let dir = Dir::new(&format!("families-{}", case.architecture));
        let (config, tensors) = (case.config(), case.tensors());
        let source = case.write(&dir.0.join("model"), &config, &tensors);
        let file = dir.0.join("model.gguf");
        let gguf = convert(&source, &file, options(&file)).unwrap_or_else(|e| panic!("{}: {e}", case.architecture));
        // Names and numbers in the file.
        let mut due: Vec<String> = case.names().into_iter().map(|n| n.1).collect();
        due.sort();
        assert_eq!(gguf.tensors(), due, "{}", case.architecture);
        for (name, there, [_, cols]) in case.names() {
            let (before, stored) = (numbers(&*source, &name), gguf.stored(&there).unwrap());
            let due = match (case.architecture, &there[6.min(there.len())..]) {
                ("llama", "attn_q.weight") => in_turn(&before, HEADS[0]),
                ("llama", "attn_k.weight") => in_turn(&before, HEADS[1]),
                _ => before,
            };
            assert!(numbers(&*gguf, &there) == due, "{}: {there}", case.architecture);
            let plain = cols == 0 || there.contains("ffn_gate_inp");
            assert_eq!(stored.kind, if plain { "F32" } else { "BF16" }, "{there}");
            assert_eq!(stored.shape.len(), if cols == 0 || there.contains("inp_shexp") { 1 } else { 2 }, "{there}");
        }
        same_experts(&*source, &*gguf);
        let Metadata::Gguf(map) = gguf.metadata() else { panic!("no metadata") };
        let general = [
            ("block_count", LAYERS),
            ("embedding_length", HIDDEN),
            ("attention.head_count", HEADS[0]),
            ("attention.head_count_kv", HEADS[1]),
            ("expert_count", EXPERTS),
            ("expert_used_count", 2),
            ("context_length", 4096),
        ];
        let general = general.map(|(k, v)| (k, Meta::Uint(v as u64)));
        for (key, value) in general.iter().chain(&case.metadata).chain([&("rope.freq_base", Meta::Float(150000.0))]) {
            assert_eq!(map.get(&format!("{}.{key}", case.architecture)), Some(value), "{} {key}", case.architecture);
        }
        assert_eq!(source.routing(1), gguf.routing(1), "{}", case.architecture);
        // And back.
        let path = dir.0.join("back");
        let back = convert(&gguf, &path, options(&path)).unwrap();
        assert_eq!(source.tensors(), back.tensors());
        for name in source.tensors() {
            assert!(numbers(&*source, &name) == numbers(&*back, &name), "{name}");
            assert_eq!(source.stored(&name).unwrap().shape, back.stored(&name).unwrap().shape, "{name}");
        }
        same_experts(&*source, &*back);
        assert_eq!(source.routing(1), back.routing(1));
        let Metadata::HuggingFace(after) = back.metadata() else { panic!("no config") };
        for (key, value) in config.as_object().unwrap() {
            let number = |v: Option<&Value>| v.and_then(Value::as_f64);
            assert!(
                after.get(key) == Some(value) || number(after.get(key)) == Some(value.as_f64().unwrap_or(f64::NAN)),
                "{} {key}: {value} became {:?}",
                case.architecture,
                after.get(key)
            );
        }
        // The other way around, with experts in other formats, all else is as it was.
        let gguf = convert(
            &source,
            &dir.0.join("q8.gguf"),
            Options { experts: Some([Format::Q8_0; 3]), dense: Some(Format::Q8_0), ..options(&dir.0.join("q8.gguf")) },
        );
        let path = dir.0.join("from-q8");
        let experts = if case.experts.is_some() { Format::Int8(Group::Of(32)) } else { Format::Mxfp4 };
        let back = convert(&gguf.unwrap(), &path, Options { experts: Some([experts; 3]), ..options(&path) }).unwrap();
        for (name, _, [rows, cols]) in case.names() {
            let [before, after] = [&source, &back].map(|s| numbers(&**s, &name));
            let most = before.iter().fold(0f32, |m, v| m.max(v.abs()));
            let error = before.iter().zip(&after).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
            // A half of a step of 127 in groups of 32, and of a BF16.
            let due = if rows < 2 || cols == 0 || name.contains("gate.w") || name.contains("router") {
                0.0
            } else {
                0.007 * most
            };
            assert!(error <= due, "{name}: {error} of {most}");
        }
    }
}

/// gpt-oss' own layouts: from either into the other, MXFP4 through a file without a bit changed.
#[test]
fn experts_with_rows_in_turn_are_written_as_they_are_read() {
    let case = cases().pop().unwrap();
    let dir = Dir::new("families-turns");
    let source = case.write(&dir.0.join("model"), &case.config(), &case.tensors());
    let at = |name: &str| dir.0.join(name);
    let to = |path: &Path, format: Format| Options { experts: Some([format; 3]), ..options(path) };
    let mxfp4 = convert(&source, &at("mxfp4"), to(&at("mxfp4"), Format::Mxfp4)).unwrap();
    let Metadata::HuggingFace(config) = mxfp4.metadata() else { panic!("no config") };
    assert_eq!(config["quantization_config"]["quant_method"], "mxfp4");
    let shapes = |s: &dyn WeightSource, name: &str| s.stored(&format!("model.layers.1.mlp.experts.{name}")).unwrap();
    let blocks = shapes(&*mxfp4, "gate_up_proj_blocks");
    assert_eq!((blocks.kind.as_str(), blocks.shape), ("U8", vec![EXPERTS, 2 * WIDE, HIDDEN / 32, 16]));
    assert_eq!(shapes(&*mxfp4, "down_proj_scales").shape, [EXPERTS, HIDDEN, WIDE / 32]);
    for spec in source.layers() {
        for (e, p) in (0..EXPERTS).flat_map(|e| Proj::ALL.map(|p| (e, p))) {
            let due = kt_core::quantize::recode(&source.matrix(spec.index, e, p).unwrap(), Format::Mxfp4).unwrap();
            assert!(due.decode() == mxfp4.matrix(spec.index, e, p).unwrap().decode(), "expert {e}, {p:?}");
            assert_eq!(source.bias(spec.index, e, p).unwrap(), mxfp4.bias(spec.index, e, p).unwrap());
        }
    }
    let gguf = convert(&mxfp4, &at("m.gguf"), options(&at("m.gguf"))).unwrap();
    assert_eq!(gguf.layers()[0].formats, [Format::Mxfp4Ggml; 3]);
    let back = convert(&gguf, &at("back"), options(&at("back"))).unwrap();
    for name in
        ["gate_up_proj_blocks", "gate_up_proj_scales", "gate_up_proj_bias", "down_proj_blocks", "down_proj_scales"]
    {
        assert!(shapes(&*mxfp4, name).bytes == shapes(&*back, name).bytes, "{name}");
    }
    let bf16 = convert(&back, &at("bf16"), to(&at("bf16"), Format::Bf16)).unwrap();
    assert_eq!(shapes(&*bf16, "gate_up_proj").shape, [EXPERTS, HIDDEN, 2 * WIDE]);
    same_experts(&*mxfp4, &*bf16);
    // In pieces, on a little memory: the same bytes.
    let little = Options { memory: 1 << 20, shard_bytes: 20_000, ..to(&at("little"), Format::Mxfp4) };
    let little = convert(&source, &at("little"), little).unwrap();
    assert!(shapes(&*mxfp4, "gate_up_proj_scales").bytes == shapes(&*little, "gate_up_proj_scales").bytes);
    // Experts alone.
    for (name, format) in [("alone", Format::Bf16), ("alone.gguf", Format::Q8_0)] {
        let alone = Options { experts_only: true, ..to(&at(name), format) };
        assert!(convert(&source, &at(name), alone).unwrap().tensors().is_empty());
    }
    let refuse =
        |with: Options, says: &[&str]| refused(Conversion::plan(source.clone(), &at("no"), with).map(|_| ()), says);
    refuse(to(&at("no"), Format::Int4(Group::Of(32))), &["INT4", "mxfp4 or bf16"]);
    refuse(
        Options { dense: Some(Format::Int8(Group::Row)), ..to(&at("no"), Format::Mxfp4) },
        &["nothing else is quantized"],
    );
    let mixed = Options { experts: Some([Format::Bf16, Format::Bf16, Format::Mxfp4]), ..options(&at("no")) };
    refuse(mixed, &["all of them"]);
    let bad = Options { experts: Some([Format::Bf16, Format::F16, Format::Bf16]), ..options(&at("no")) };
    refuse(bad, &["gate and up"]);
}

/// What one container says and the other cannot is refused by its key.
#[test]
fn what_the_other_container_cannot_say_is_refused() {
    let all = cases();
    let dir = Dir::new("families-refused");
    let case = |name: &str| all.iter().find(|c| c.architecture == name).unwrap();
    let plan = |source: &Arc<dyn WeightSource>, name: &str| {
        let output = dir.0.join(name);
        Conversion::plan(source.clone(), &output, options(&output)).map(|_| ())
    };
    let config = |name: &str, change: &dyn Fn(&mut Value), says: &[&str]| {
        let (case, path) = (case(name), dir.0.join("source"));
        let mut config = case.config();
        change(&mut config);
        refused(plan(&case.write(&path, &config, &case.tensors()), "out.gguf"), says);
    };
    let remove = |key: &'static str| {
        move |c: &mut Value| {
            c.as_object_mut().unwrap().remove(key);
        }
    };
    config("qwen2moe", &remove("shared_expert_intermediate_size"), &["shared_expert_intermediate_size", "missing"]);
    config("qwen2moe", &|c| c["use_sliding_window"] = json!(true), &["use_sliding_window", "is true"]);
    config("llama", &|c| c["sliding_window"] = json!(128), &["sliding_window", "is 128"]);
    config("llama", &|c| c["num_attention_heads"] = json!(24), &["q_proj.weight", "64 rows", "24"]);
    config("llama", &|c| c["partial_rotary_factor"] = json!(0.5), &["partial_rotary_factor"]);
    config("minimax-m2", &|c| c["scoring_func"] = json!("softmax"), &["scoring_func", "softmax"]);
    config("gpt-oss", &remove("sliding_window"), &["sliding_window", "missing"]);
    config("gpt-oss", &|c| c["swiglu_limit"] = json!(9.0), &["swiglu_limit", "is 9.0"]);
    config("gpt-oss", &|c| c["rope_scaling"]["truncate"] = json!(true), &["truncate"]);
    config("gpt-oss", &|c| c["rope_scaling"]["attention_factor"] = json!(2.0), &["attention_factor"]);
    config("gpt-oss", &|c| c["layer_types"] = json!(["full_attention", "full_attention"]), &["layer_types", "layer 0"]);
    config(
        "glm4moe",
        &|c| c["model_type"] = json!("glm4_moe_lite"),
        &["glm4_moe_lite", "--experts-only", "gpt-oss", "llama"],
    );
    // Files.
    let file = |name: &str, change: &dyn Fn(Gguf) -> Gguf, says: &[&str]| {
        let case = case(name);
        let source = change(written(case)).open().unwrap();
        refused(plan(&(Arc::new(source) as Arc<dyn WeightSource>), "out"), says);
    };
    file(
        "gpt-oss",
        &|g| g.without_pair("gpt-oss.attention.sliding_window"),
        &["gpt-oss.attention.sliding_window", "missing"],
    );
    file("gpt-oss", &|g| g.uint("gpt-oss.attention.sliding_window_pattern", 4), &["sliding_window_pattern"]);
    file("glm4moe", &|g| g.uint("glm4moe.expert_gating_func", 1), &["expert_gating_func", "is 1"]);
    file("llama", &|g| g.uint("llama.rope.dimension_count", 8), &["rope.dimension_count", "is 8"]);
    file("llama", &|g| g.uint("llama.attention.head_count", 0), &["attn_q.weight", "heads"]);
    file("llama", &|g| g.without_pair("llama.attention.head_count"), &["attn_q.weight", "not said"]);
    file("qwen2moe", &|g| g.without_pair("qwen2moe.context_length"), &["qwen2moe.context_length", "missing"]);
    for (i, scale) in [Some(0.0), None].into_iter().enumerate() {
        let (g, key) = (written(case("glm4moe")), "glm4moe.expert_weights_scale");
        let g = scale
            .map_or(g.clone().without_pair(key), |s| g.clone().float(key, s))
            .uint("glm4moe.expert_group_count", 0);
        let path = dir.0.join(format!("unscaled-{i}"));
        let back = convert(&(Arc::new(g.open().unwrap()) as Arc<dyn WeightSource>), &path, options(&path)).unwrap();
        let Metadata::HuggingFace(config) = back.metadata() else { panic!("no config") };
        assert_eq!((config["routed_scaling_factor"].as_f64(), config["n_group"].as_u64()), (Some(1.0), Some(1)));
    }
    let factors = |v: f32| {
        move |mut g: Gguf| {
            g.put("rope_freqs.weight", &[8], 0, &[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, v].map(f32::to_le_bytes).concat());
            g
        }
    };
    file("llama", &factors(8.0), &["rope_freqs.weight", "has 8"]);
    let ones = Arc::new(factors(1.0)(written(case("llama"))).open().unwrap()) as Arc<dyn WeightSource>;
    plan(&ones, "out").unwrap();
}

/// Tokenizers of pieces with marked spaces (Mixtral's), by SentencePiece's rules in GGUF.
#[test]
fn pieces_become_scores_and_merges_again() {
    let all = cases();
    let case = all.iter().find(|c| c.architecture == "llama").unwrap();
    let dir = Dir::new("families-pieces");
    let pieces = ["<unk>", "<s>", "</s>", "<0x0A>", "▁t", "th", "the", "▁the", "▁", "t", "h", "e", "<|user|>"];
    let vocab: Value =
        pieces.iter().enumerate().map(|(id, p)| (p.to_string(), json!(id))).collect::<serde_json::Map<_, _>>().into();
    let merges = json!([["▁", "t"], ["t", "h"], ["th", "e"], ["▁t", "he"], ["▁", "the"]]);
    let added = |id: usize, special: bool| json!({"id": id, "content": pieces[id], "special": special});
    let mut tokenizer = json!({
        "added_tokens": [added(0, true), added(1, true), added(2, true), added(12, false)],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": null,
        "model": {
            "type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true, "vocab": vocab, "merges": merges,
        },
    });
    let mut count = 0;
    let mut gguf = |tokenizer: &Value| {
        count += 1;
        let path = dir.0.join(count.to_string());
        case.write(&path, &case.config(), &case.tensors());
        std::fs::write(path.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        std::fs::write(path.join("tokenizer_config.json"), r#"{"bos_token": "<s>", "eos_token": "</s>"}"#).unwrap();
        let file = dir.0.join(format!("{count}.gguf"));
        convert(&open(&path).unwrap(), &file, options(&file)).unwrap()
    };
    let written = gguf(&tokenizer);
    let Metadata::Gguf(map) = written.metadata() else { panic!("no metadata") };
    let list = |key: &str| map[&format!("tokenizer.ggml.{key}")].as_array().unwrap().to_vec();
    assert_eq!(map["tokenizer.ggml.model"].as_str(), Some("llama"));
    let kinds: Vec<Option<usize>> = list("token_type").iter().map(Meta::as_usize).collect();
    assert_eq!(kinds[..14], [2, 3, 3, 6, 1, 1, 1, 1, 1, 1, 1, 1, 4, 5].map(Some));
    let scores: Vec<f64> = list("scores").iter().map(|s| s.as_f64().unwrap()).collect();
    assert_eq!(scores[4..8], [0.0, -1.0, -2.0, -3.0]);
    assert!(scores[8..12].iter().all(|&s| s == -4.0));
    for (key, id) in [("unknown", 0), ("bos", 1), ("eos", 2)] {
        assert_eq!(map[&format!("tokenizer.ggml.{key}_token_id")], Meta::Uint(id));
    }
    assert_eq!(map["tokenizer.ggml.add_bos_token"], Meta::Bool(true));
    let path = dir.0.join("back");
    let back = convert(&written, &path, options(&path)).unwrap();
    let back: Value = serde_json::from_slice(&back.side_file("tokenizer.json").unwrap().unwrap()).unwrap();
    for key in ["/model/vocab", "/model/unk_token", "/model/byte_fallback", "/normalizer/normalizers"] {
        assert_eq!(back.pointer(key), tokenizer.pointer(key), "{key}");
    }
    // All splits into two pieces, the longest first part first.
    let due = json!([["▁", "t"], ["t", "h"], ["th", "e"], ["▁", "the"]]);
    assert_eq!(back["model"]["merges"], due);
    assert_eq!(back["post_processor"]["special_tokens"]["<s>"]["ids"], json!([1]));
    // Spaces that are marked otherwise.
    tokenizer["normalizer"] = Value::Null;
    tokenizer["pre_tokenizer"] =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": false});
    let Metadata::Gguf(map) = gguf(&tokenizer).metadata().clone() else { panic!("no metadata") };
    assert_eq!(map["tokenizer.ggml.add_space_prefix"], Meta::Bool(false));
    tokenizer["pre_tokenizer"]["split"] = json!(true);
    let Metadata::Gguf(map) = gguf(&tokenizer).metadata().clone() else { panic!("no metadata") };
    assert!(!map.contains_key("tokenizer.ggml.model"));
}

/// A file of zeros of a family, as its case says.
fn written(case: &Case) -> Gguf {
    let mut g = Gguf::of(case.architecture);
    let key = |name: &str| format!("{}.{name}", case.architecture);
    for (name, value) in [
        ("block_count", LAYERS),
        ("embedding_length", HIDDEN),
        ("attention.head_count", HEADS[0]),
        ("context_length", 64),
        ("attention.head_count_kv", HEADS[1]),
        ("expert_count", EXPERTS),
        ("expert_used_count", 2),
        ("feed_forward_length", WIDE),
    ] {
        g = g.uint(&key(name), value as u32);
    }
    g = g.float(&key("attention.layer_norm_rms_epsilon"), 1e-5);
    for (name, value) in &case.metadata {
        g = match value {
            Meta::Uint(v) => g.uint(&key(name), *v as u32),
            Meta::Float(v) => g.float(&key(name), *v as f32),
            Meta::Bool(v) => g.flag(&key(name), *v),
            Meta::String(v) => g.text(&key(name), v),
            other => panic!("{other:?}"),
        };
    }
    for (_, name, [rows, cols]) in case.names() {
        let ne = if cols == 0 { vec![rows as u64] } else { vec![cols as u64, rows as u64] };
        g.tensor(&name, &ne, 0, 4 * rows * cols.max(1));
    }
    for (i, p) in (usize::from(case.dense)..LAYERS).flat_map(|i| Proj::ALL.map(|p| (i, p))) {
        let [rows, cols] = if p == Proj::Down { [HIDDEN, WIDE] } else { [WIDE, HIDDEN] };
        let (stem, ne) = (format!("blk.{i}.ffn_{}_exps", p.name()), [cols, rows, EXPERTS].map(|n| n as u64));
        g.tensor(&format!("{stem}.weight"), &ne, 1, 2 * EXPERTS * rows * cols);
        if case.experts.is_none() {
            g.tensor(&format!("{stem}.bias"), &[rows as u64, EXPERTS as u64], 0, 4 * EXPERTS * rows);
        }
    }
    g
}
