//! Checkpoints of made-up weights on disk, of the size and format asked for, written as fast as the disk takes them: all
//! experts have the same weights, and a token uses every expert, so that a short run touches every byte.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use kt::source::synthetic::SyntheticSource;
use kt::{Format, Group, Matrix, Proj, WeightSource};

use super::gguf::{Pairs, string, type_id};

/// Sizes of a Qwen3-MoE model; everything else follows.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub hidden: usize,
    pub intermediate: usize,
    pub experts: usize,
    pub top_k: usize,
    pub layers: usize,
    pub vocabulary: usize,
}

const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;

impl Shape {
    /// Every token goes through all experts; as many layers as it takes for experts of `format` to fill `gib`, one at least.
    pub fn filling(gib: f64, format: Format) -> Shape {
        let shape = Shape { hidden: 1024, intermediate: 1024, experts: 16, top_k: 16, layers: 1, vocabulary: 1280 };
        let layers = (gib * (1u64 << 30) as f64 / shape.layer_bytes(format) as f64).ceil() as usize;
        Shape { layers: layers.max(1), ..shape }
    }

    /// Bytes of a layer's experts.
    pub fn layer_bytes(&self, format: Format) -> u64 {
        Proj::ALL.iter().map(|&p| self.matrix(format, p).byte_len() * self.experts as u64).sum()
    }

    /// One projection of an expert.
    fn matrix(&self, format: Format, proj: Proj) -> Matrix {
        let source = SyntheticSource::builder()
            .hidden(self.hidden)
            .intermediate(self.intermediate)
            .experts(1)
            .top_k(1)
            .format(format)
            .seed(5)
            .build()
            .unwrap();
        source.matrix(0, 0, proj).unwrap()
    }

    /// Any other matrix: the gate of a layer of that shape.
    fn dense(&self, format: Format, rows: usize, cols: usize) -> Vec<u8> {
        let shape = Shape { hidden: cols, intermediate: rows, ..*self };
        shape.matrix(format, Proj::Gate).codes().to_vec()
    }

    /// Attention, router and norms of a layer: (name in a directory, name in GGUF, shape).
    fn parts(&self) -> Vec<(&'static str, &'static str, Vec<usize>)> {
        let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
        vec![
            ("self_attn.q_proj", "attn_q", vec![q, self.hidden]),
            ("self_attn.k_proj", "attn_k", vec![kv, self.hidden]),
            ("self_attn.v_proj", "attn_v", vec![kv, self.hidden]),
            ("self_attn.o_proj", "attn_output", vec![self.hidden, q]),
            ("mlp.gate", "ffn_gate_inp", vec![self.experts, self.hidden]),
            ("self_attn.q_norm", "attn_q_norm", vec![HEAD_DIM]),
            ("self_attn.k_norm", "attn_k_norm", vec![HEAD_DIM]),
            ("input_layernorm", "attn_norm", vec![self.hidden]),
            ("post_attention_layernorm", "ffn_norm", vec![self.hidden]),
        ]
    }

    /// The same outside of layers.
    fn outer_parts(&self) -> Vec<(&'static str, &'static str, Vec<usize>)> {
        vec![
            ("model.embed_tokens", "token_embd", vec![self.vocabulary, self.hidden]),
            ("lm_head", "output", vec![self.vocabulary, self.hidden]),
            ("model.norm", "output_norm", vec![self.hidden]),
        ]
    }
}

/// A checkpoint in a directory of its own, gone when dropped.
pub struct Written {
    dir: PathBuf,
    /// What `--model` wants.
    pub model: PathBuf,
}

impl Drop for Written {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

impl Written {
    /// The tiny model's tokenizer, which has as many tokens as [`Shape::filling`] gives.
    pub fn tokenizer() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("model/tokenizer.json")
    }

    fn directory(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("kt-written-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }

    /// A safetensors directory with experts of BF16 or INT4 (compressed-tensors, groups of 32).
    pub fn safetensors(name: &str, shape: &Shape, format: Format) -> Written {
        let dir = Self::directory(name);
        // (tensor, dtype, shape, bytes); one projection is many tensors of the same bytes.
        type Tensor<'a> = (String, &'static str, Vec<usize>, &'a [u8]);
        let matrices = Proj::ALL.map(|p| shape.matrix(format, p));
        let scales = matrices.each_ref().map(|m| m.scales().map(|s| s.bytes().to_vec()).unwrap_or_default());
        let shapes = matrices.each_ref().map(|m| [m.rows() as u64, m.cols() as u64].map(u64::to_le_bytes).concat());
        let file = |i: usize| format!("model-{:05}-of-{:05}.safetensors", i + 1, shape.layers + 1);
        let mut map = serde_json::Map::new();
        for layer in 0..=shape.layers {
            let outer = layer == shape.layers;
            let parts = if outer { shape.outer_parts() } else { shape.parts() };
            let prefix = if outer { String::new() } else { format!("model.layers.{layer}.") };
            let dense: Vec<Vec<u8>> = parts
                .iter()
                .map(|(_, _, dims)| match dims[..] {
                    [rows, cols] => shape.dense(Format::Bf16, rows, cols),
                    _ => [0x80, 0x3f].repeat(dims[0]),
                })
                .collect();
            let mut tensors: Vec<Tensor<'_>> = parts
                .into_iter()
                .zip(&dense)
                .map(|((name, _, dims), bytes)| (format!("{prefix}{name}.weight"), "BF16", dims, &bytes[..]))
                .collect();
            for expert in 0..if outer { 0 } else { shape.experts } {
                for proj in Proj::ALL {
                    let (i, m) = (proj.index(), &matrices[proj.index()]);
                    let base = format!("{prefix}mlp.experts.{expert}.{}_proj", proj.name());
                    if format == Format::Bf16 {
                        tensors.push((format!("{base}.weight"), "BF16", vec![m.rows(), m.cols()], m.codes()));
                        continue;
                    }
                    assert_eq!(format, Format::Int4(Group::Of(32)), "the writer does not know {format}");
                    let groups = m.cols() / 32;
                    tensors.push((format!("{base}.weight_packed"), "I32", vec![m.rows(), m.cols() / 8], m.codes()));
                    tensors.push((format!("{base}.weight_scale"), "BF16", vec![m.rows(), groups], &scales[i]));
                    tensors.push((format!("{base}.weight_shape"), "I64", vec![2], &shapes[i]));
                }
            }
            let mut header = serde_json::Map::new();
            let mut end = 0;
            for (name, kind, dims, bytes) in &tensors {
                let offsets = [end, end + bytes.len()];
                end = offsets[1];
                let info = serde_json::json!({"dtype": kind, "shape": dims, "data_offsets": offsets});
                header.insert(name.clone(), info);
                map.insert(name.clone(), file(layer).into());
            }
            let mut header = serde_json::Value::Object(header).to_string();
            header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
            let mut out = BufWriter::new(std::fs::File::create(dir.join(file(layer))).unwrap());
            out.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
            out.write_all(header.as_bytes()).unwrap();
            tensors.iter().for_each(|(_, _, _, bytes)| out.write_all(bytes).unwrap());
            out.flush().unwrap();
        }
        let index = serde_json::json!({"metadata": {}, "weight_map": map});
        std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
        let mut config = serde_json::json!({
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": shape.hidden,
            "moe_intermediate_size": shape.intermediate, "intermediate_size": shape.intermediate,
            "num_experts": shape.experts, "num_experts_per_tok": shape.top_k, "norm_topk_prob": true,
            "num_hidden_layers": shape.layers, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_act": "silu",
            "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": null, "max_position_embeddings": 1024,
            "tie_word_embeddings": false, "vocab_size": shape.vocabulary, "eos_token_id": 0, "attention_bias": false
        });
        if format != Format::Bf16 {
            config["quantization_config"] = serde_json::json!({
                "quant_method": "compressed-tensors", "format": "pack-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights":
                    {"num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 32}}}
            });
        }
        std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
        std::fs::copy(Self::tokenizer(), dir.join("tokenizer.json")).unwrap();
        Written { model: dir.clone(), dir }
    }

    /// A GGUF file with experts of a block type; the rest is F32 (norms) and F16.
    pub fn gguf(name: &str, shape: &Shape, format: Format) -> Written {
        let dir = Self::directory(name);
        let mut pairs = Pairs::default();
        pairs.text("general.architecture", "qwen3moe");
        for (key, value) in [
            ("block_count", shape.layers),
            ("context_length", 1024),
            ("embedding_length", shape.hidden),
            ("feed_forward_length", shape.intermediate),
            ("attention.head_count", HEADS),
            ("attention.head_count_kv", KV_HEADS),
            ("attention.key_length", HEAD_DIM),
            ("attention.value_length", HEAD_DIM),
            ("expert_count", shape.experts),
            ("expert_used_count", shape.top_k),
            ("expert_feed_forward_length", shape.intermediate),
        ] {
            pairs.uint(&format!("qwen3moe.{key}"), value);
        }
        pairs.float("qwen3moe.rope.freq_base", 10000.0);
        pairs.float("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6);
        pairs.uint("tokenizer.ggml.eos_token_id", 0);

        // (name, dimensions slowest first, format, index into `data`, how often these bytes come)
        let mut tensors: Vec<(String, Vec<usize>, Format, usize, usize)> = Vec::new();
        let mut data: Vec<Vec<u8>> = Vec::new();
        let mut dense = |prefix: &str, parts: Vec<(&str, &'static str, Vec<usize>)>, tensors: &mut Vec<_>| {
            for (_, name, dims) in parts {
                let (format, bytes) = match dims[..] {
                    [rows, cols] => (Format::F16, shape.dense(Format::F16, rows, cols)),
                    _ => (Format::F32, 1f32.to_le_bytes().repeat(dims[0])),
                };
                tensors.push((format!("{prefix}{name}.weight"), dims, format, data.len(), 1));
                data.push(bytes);
            }
        };
        dense("", shape.outer_parts(), &mut tensors);
        for layer in 0..shape.layers {
            dense(&format!("blk.{layer}."), shape.parts(), &mut tensors);
        }
        let first = data.len();
        data.extend(Proj::ALL.map(|p| shape.matrix(format, p).contiguous().unwrap().to_vec()));
        for layer in 0..shape.layers {
            for proj in Proj::ALL {
                let m = shape.matrix(format, proj);
                let name = format!("blk.{layer}.ffn_{}_exps.weight", proj.name());
                let dims = vec![shape.experts, m.rows(), m.cols()];
                tensors.push((name, dims, format, first + proj.index(), shape.experts));
            }
        }

        const ALIGNMENT: usize = 32;
        let (mut infos, mut offset) = (Vec::new(), 0u64);
        for (name, dims, format, bytes, times) in &tensors {
            string(&mut infos, name);
            infos.extend((dims.len() as u32).to_le_bytes());
            dims.iter().rev().for_each(|&d| infos.extend((d as u64).to_le_bytes()));
            infos.extend(type_id(*format).to_le_bytes());
            infos.extend(offset.to_le_bytes());
            offset += (data[*bytes].len() * times).next_multiple_of(ALIGNMENT) as u64;
        }
        let mut head = b"GGUF".to_vec();
        head.extend(3u32.to_le_bytes());
        head.extend((tensors.len() as u64).to_le_bytes());
        head.extend(pairs.count.to_le_bytes());
        head.extend(pairs.bytes);
        head.extend(infos);
        head.resize(head.len().next_multiple_of(ALIGNMENT), 0);
        let model = dir.join("model.gguf");
        let mut out = BufWriter::new(std::fs::File::create(&model).unwrap());
        out.write_all(&head).unwrap();
        for (_, _, _, bytes, times) in &tensors {
            (0..*times).for_each(|_| out.write_all(&data[*bytes]).unwrap());
            let length = data[*bytes].len() * times;
            out.write_all(&vec![0; length.next_multiple_of(ALIGNMENT) - length]).unwrap();
        }
        out.flush().unwrap();
        Written { dir, model }
    }
}
