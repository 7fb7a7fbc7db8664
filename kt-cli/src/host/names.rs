//! The table of dense tensors: what each is called in a Hugging Face directory and in a GGUF file.

use kt::Metadata;

/// A tensor of every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Part {
    huggingface: &'static str,
    gguf: &'static str,
}

const fn part(huggingface: &'static str, gguf: &'static str) -> Part {
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
/// The router, `[experts, hidden]`.
pub const ROUTER: Part = part("mlp.gate.weight", "ffn_gate_inp.weight");
/// Its correction bias, `[experts]`.
pub const ROUTER_BIAS: Part = part("mlp.gate.e_score_correction_bias", "exp_probs_b.bias");
/// Gate, up and down of a dense feed-forward part.
pub const DENSE: [Part; 3] = [
    part("mlp.gate_proj.weight", "ffn_gate.weight"),
    part("mlp.up_proj.weight", "ffn_up.weight"),
    part("mlp.down_proj.weight", "ffn_down.weight"),
];
/// Gate, up and down of the shared experts.
pub const SHARED: [Part; 3] = [
    part("mlp.shared_experts.gate_proj.weight", "ffn_gate_shexp.weight"),
    part("mlp.shared_experts.up_proj.weight", "ffn_up_shexp.weight"),
    part("mlp.shared_experts.down_proj.weight", "ffn_down_shexp.weight"),
];

/// A container's way to spell names.
#[derive(Debug, Clone, Copy)]
pub struct Names {
    gguf: bool,
}

impl Names {
    /// That of a checkpoint's container.
    pub fn of(metadata: &Metadata) -> Self {
        Names { gguf: matches!(metadata, Metadata::Gguf(_)) }
    }

    /// A tensor of a layer.
    pub fn layer(self, layer: usize, part: Part) -> String {
        match self.gguf {
            true => format!("blk.{layer}.{}", part.gguf),
            false => format!("model.layers.{layer}.{}", part.huggingface),
        }
    }

    /// The embedding, `[vocabulary, hidden]`.
    pub fn embedding(self) -> &'static str {
        if self.gguf { "token_embd.weight" } else { "model.embed_tokens.weight" }
    }

    /// The norm after the last layer.
    pub fn last_norm(self) -> &'static str {
        if self.gguf { "output_norm.weight" } else { "model.norm.weight" }
    }

    /// The head, `[vocabulary, hidden]`; absent where it is tied to the embedding.
    pub fn head(self) -> &'static str {
        if self.gguf { "output.weight" } else { "lm_head.weight" }
    }
}
