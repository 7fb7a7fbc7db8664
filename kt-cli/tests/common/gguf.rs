//! Writes a DeepSeek-V3 directory as a GGUF file of architecture `deepseek2`.

use std::path::Path;

use kt::quantize::encode;
use kt::{Format, Metadata, Proj, WeightSource};

/// What to write.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// `attn_k_b` and `attn_v_b`, as newer files have them, in place of `attn_kv_b`.
    pub split: bool,
    /// Format of the experts and of dense matrices.
    pub format: Format,
}

struct Tensor {
    name: String,
    /// Slowest first, as in `[rows, cols]`.
    shape: Vec<usize>,
    format: Format,
    values: Vec<f32>,
}

/// Metadata in GGUF's encoding.
#[derive(Default)]
pub struct Pairs {
    pub bytes: Vec<u8>,
    pub count: u64,
}

pub fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl Pairs {
    fn put(&mut self, key: &str, kind: u32, value: &[u8]) {
        string(&mut self.bytes, key);
        self.bytes.extend(kind.to_le_bytes());
        self.bytes.extend(value);
        self.count += 1;
    }

    pub fn uint(&mut self, key: &str, value: usize) {
        self.put(key, 4, &(value as u32).to_le_bytes());
    }

    pub fn float(&mut self, key: &str, value: f64) {
        self.put(key, 6, &(value as f32).to_le_bytes());
    }

    fn flag(&mut self, key: &str, value: bool) {
        self.put(key, 7, &[value as u8]);
    }

    pub fn text(&mut self, key: &str, value: &str) {
        let mut bytes = Vec::new();
        string(&mut bytes, value);
        self.put(key, 8, &bytes);
    }
}

/// GGUF's number of a tensor type.
pub fn type_id(format: Format) -> u32 {
    match format {
        Format::F32 => 0,
        Format::F16 => 1,
        Format::Q8_0 => 8,
        Format::Q4K => 12,
        Format::Iq2Xxs => 16,
        Format::Bf16 => 30,
        other => panic!("the writer does not know {other}"),
    }
}

/// Writes `source` to `path`.
pub fn write_deepseek2(source: &dyn WeightSource, path: &Path, options: Options) {
    let Metadata::HuggingFace(config) = source.metadata() else { panic!("not a Hugging Face directory") };
    let int = |key: &str| config[key].as_u64().unwrap() as usize;
    let (heads, nope, rope) = (int("num_attention_heads"), int("qk_nope_head_dim"), int("qk_rope_head_dim"));
    let (value, lora, layers) = (int("v_head_dim"), int("kv_lora_rank"), int("num_hidden_layers"));
    let scaling = &config["rope_scaling"];

    let mut pairs = Pairs::default();
    pairs.text("general.architecture", "deepseek2");
    pairs.text("general.name", "converted");
    let key = |name: &str| format!("deepseek2.{name}");
    for (name, value) in [
        ("block_count", layers + usize::from(options.split)),
        ("context_length", int("max_position_embeddings")),
        ("embedding_length", int("hidden_size")),
        ("feed_forward_length", int("intermediate_size")),
        ("attention.head_count", heads),
        ("attention.head_count_kv", if options.split { 1 } else { heads }),
        ("expert_count", int("n_routed_experts")),
        ("expert_used_count", int("num_experts_per_tok")),
        ("expert_feed_forward_length", int("moe_intermediate_size")),
        ("expert_shared_count", int("n_shared_experts")),
        ("expert_group_count", int("n_group")),
        ("expert_group_used_count", int("topk_group")),
        ("expert_gating_func", 2),
        ("leading_dense_block_count", int("first_k_dense_replace")),
        ("attention.q_lora_rank", int("q_lora_rank")),
        ("attention.kv_lora_rank", lora),
        ("rope.dimension_count", rope),
        (
            "rope.scaling.original_context_length",
            scaling["original_max_position_embeddings"].as_u64().unwrap() as usize,
        ),
        ("vocab_size", int("vocab_size")),
    ] {
        pairs.uint(&key(name), value);
    }
    if options.split {
        // Newer files count layers of multi-token prediction too, whether or not they hold them.
        pairs.uint(&key("nextn_predict_layers"), 1);
        pairs.uint(&key("attention.key_length"), lora + rope);
        pairs.uint(&key("attention.value_length"), lora);
        pairs.uint(&key("attention.key_length_mla"), nope + rope);
        pairs.uint(&key("attention.value_length_mla"), value);
    } else {
        pairs.uint(&key("attention.key_length"), nope + rope);
        pairs.uint(&key("attention.value_length"), value);
    }
    pairs.float(&key("rope.freq_base"), config["rope_theta"].as_f64().unwrap());
    pairs.float(&key("attention.layer_norm_rms_epsilon"), config["rms_norm_eps"].as_f64().unwrap());
    pairs.float(&key("expert_weights_scale"), config["routed_scaling_factor"].as_f64().unwrap());
    pairs.flag(&key("expert_weights_norm"), config["norm_topk_prob"].as_bool().unwrap());
    pairs.text(&key("rope.scaling.type"), "yarn");
    pairs.float(&key("rope.scaling.factor"), scaling["factor"].as_f64().unwrap());
    pairs.float(&key("rope.scaling.yarn_log_multiplier"), 0.1 * scaling["mscale_all_dim"].as_f64().unwrap());
    pairs.uint("tokenizer.ggml.eos_token_id", int("eos_token_id"));

    let mut tensors = Vec::new();
    let mut put = |name: String, shape: Vec<usize>, format: Format, values: Vec<f32>| {
        tensors.push(Tensor { name, shape, format, values });
    };
    let read = |name: &str| {
        let m = source.tensor(name).unwrap();
        (m.rows(), m.cols(), m.decode())
    };
    for (from, to) in [("model.embed_tokens", "token_embd"), ("lm_head", "output")] {
        let (rows, cols, values) = read(&format!("{from}.weight"));
        put(format!("{to}.weight"), vec![rows, cols], options.format, values);
    }
    put("output_norm.weight".into(), vec![int("hidden_size")], Format::F32, read("model.norm.weight").2);
    for layer in 0..layers {
        let from = |name: &str| format!("model.layers.{layer}.{name}");
        let to = |name: &str| format!("blk.{layer}.{name}");
        let has = |name: &str| source.tensors().contains(&from(name));
        for (hf, gguf) in [
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            ("self_attn.q_a_layernorm", "attn_q_a_norm"),
            ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
        ] {
            let (_, cols, values) = read(&from(&format!("{hf}.weight")));
            put(to(&format!("{gguf}.weight")), vec![cols], Format::F32, values);
        }
        for (hf, gguf) in [
            ("self_attn.q_a_proj", "attn_q_a"),
            ("self_attn.q_b_proj", "attn_q_b"),
            ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
            ("self_attn.o_proj", "attn_output"),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
            ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
            ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
            ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
        ] {
            if has(&format!("{hf}.weight")) {
                let (rows, cols, values) = read(&from(&format!("{hf}.weight")));
                put(to(&format!("{gguf}.weight")), vec![rows, cols], options.format, values);
            }
        }
        let (rows, _, kv_b) = read(&from("self_attn.kv_b_proj.weight"));
        if options.split {
            let (mut k, mut v) = (Vec::new(), Vec::new());
            for head in kv_b.chunks_exact((nope + value) * lora) {
                for l in 0..lora {
                    k.extend((0..nope).map(|n| head[n * lora + l]));
                }
                v.extend(&head[nope * lora..]);
            }
            // 48 columns without position are no multiple of a block.
            let format = if nope.is_multiple_of(32) { options.format } else { Format::F16 };
            let format = if options.format == Format::Q8_0 { format } else { options.format };
            put(to("attn_k_b.weight"), vec![heads, lora, nope], format, k);
            put(to("attn_v_b.weight"), vec![heads, value, lora], options.format, v);
        } else {
            put(to("attn_kv_b.weight"), vec![rows, lora], options.format, kv_b);
        }
        let Some(spec) = source.layers().iter().find(|l| l.index == layer) else { continue };
        let (experts, hidden, values) = read(&from("mlp.gate.weight"));
        put(to("ffn_gate_inp.weight"), vec![experts, hidden], Format::F32, values);
        let bias = read(&from("mlp.gate.e_score_correction_bias")).2;
        put(to("exp_probs_b.bias"), vec![experts], Format::F32, bias);
        for proj in Proj::ALL {
            let (rows, cols) = spec.shape(proj);
            let values = (0..experts).flat_map(|e| source.matrix(layer, e, proj).unwrap().decode()).collect();
            put(to(&format!("ffn_{}_exps.weight", proj.name())), vec![experts, rows, cols], options.format, values);
        }
    }

    const ALIGNMENT: usize = 32;
    let (mut infos, mut data) = (Vec::new(), Vec::new());
    for t in &tensors {
        let cols = t.shape[t.shape.len() - 1];
        let rows = t.values.len() / cols;
        string(&mut infos, &t.name);
        infos.extend((t.shape.len() as u32).to_le_bytes());
        for &dim in t.shape.iter().rev() {
            infos.extend((dim as u64).to_le_bytes());
        }
        infos.extend(type_id(t.format).to_le_bytes());
        infos.extend((data.len() as u64).to_le_bytes());
        let matrix = encode(t.format, rows, cols, &t.values).unwrap();
        data.extend_from_slice(matrix.contiguous().unwrap());
        data.resize(data.len().next_multiple_of(ALIGNMENT), 0);
    }
    let mut file = b"GGUF".to_vec();
    file.extend(3u32.to_le_bytes());
    file.extend((tensors.len() as u64).to_le_bytes());
    file.extend(pairs.count.to_le_bytes());
    file.extend(pairs.bytes);
    file.extend(infos);
    file.resize(file.len().next_multiple_of(ALIGNMENT), 0);
    file.extend(data);
    std::fs::write(path, file).unwrap();
}
