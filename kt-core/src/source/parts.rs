//! Names of tensors that are not routed experts: what each is called in a Hugging Face directory and in a GGUF file.
//!
//! Routers, their biases and shared experts are called differently by families: [`Names`](super::names::Names) spells those.

/// A tensor of every layer, after the layer's prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Part {
    /// In a directory; empty where it is only in GGUF files.
    pub huggingface: &'static str,
    /// In a GGUF file.
    pub gguf: &'static str,
}

/// A tensor by both names.
pub const fn part(huggingface: &'static str, gguf: &'static str) -> Part {
    Part { huggingface, gguf }
}

/// Norm before attention.
pub const ATTENTION_NORM: Part = part("input_layernorm.weight", "attn_norm.weight");
/// Norm before the feed-forward part.
pub const FFN_NORM: Part = part("post_attention_layernorm.weight", "ffn_norm.weight");
/// Queries (also of latent attention without a narrow row).
pub const Q: Part = part("self_attn.q_proj.weight", "attn_q.weight");
/// Keys.
pub const K: Part = part("self_attn.k_proj.weight", "attn_k.weight");
/// Values.
pub const V: Part = part("self_attn.v_proj.weight", "attn_v.weight");
/// Norm of each query head.
pub const Q_NORM: Part = part("self_attn.q_norm.weight", "attn_q_norm.weight");
/// Norm of each key head.
pub const K_NORM: Part = part("self_attn.k_norm.weight", "attn_k_norm.weight");
/// Output of attention.
pub const O: Part = part("self_attn.o_proj.weight", "attn_output.weight");
/// Narrow row of queries.
pub const Q_A: Part = part("self_attn.q_a_proj.weight", "attn_q_a.weight");
/// Its norm.
pub const Q_A_NORM: Part = part("self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight");
/// Queries from their narrow row.
pub const Q_B: Part = part("self_attn.q_b_proj.weight", "attn_q_b.weight");
/// Narrow row of keys and values, and the rotated key.
pub const KV_A: Part = part("self_attn.kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight");
/// Norm of the narrow row.
pub const KV_A_NORM: Part = part("self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight");
/// Keys and values from the narrow row, `[heads, nope + value, kv_lora]`.
pub const KV_B: Part = part("self_attn.kv_b_proj.weight", "attn_kv_b.weight");
/// Only in GGUF: the keys' part of it, transposed, `[heads, kv_lora, nope]`.
pub const K_B: Part = part("", "attn_k_b.weight");
/// Only in GGUF: the values' part of it, `[heads, value, kv_lora]`.
pub const V_B: Part = part("", "attn_v_b.weight");
/// Gate, up and down of a dense feed-forward part.
pub const DENSE: [Part; 3] = [
    part("mlp.gate_proj.weight", "ffn_gate.weight"),
    part("mlp.up_proj.weight", "ffn_up.weight"),
    part("mlp.down_proj.weight", "ffn_down.weight"),
];

/// Biases of queries, keys and values.
pub const QKV_BIASES: [Part; 3] = [
    part("self_attn.q_proj.bias", "attn_q.bias"),
    part("self_attn.k_proj.bias", "attn_k.bias"),
    part("self_attn.v_proj.bias", "attn_v.bias"),
];
/// Bias of the output of attention.
pub const O_BIAS: Part = part("self_attn.o_proj.bias", "attn_output.bias");

/// The embedding, `[vocabulary, hidden]`.
pub const EMBEDDING: Part = part("model.embed_tokens.weight", "token_embd.weight");
/// The norm after the last layer.
pub const LAST_NORM: Part = part("model.norm.weight", "output_norm.weight");
/// The head, `[vocabulary, hidden]`; absent where it is tied to the embedding.
pub const HEAD: Part = part("lm_head.weight", "output.weight");
