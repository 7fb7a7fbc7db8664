//! DeepSeek-V3 and models of its architecture (R1, Kimi-K2): latent attention, dense first layers, shared experts.

use anyhow::Result;

use super::config::{Attention, Keys, ModelConfig};

/// Reads the family's configuration.
pub(super) fn config(keys: &Keys<'_>) -> Result<ModelConfig> {
    keys.check_silu()?;
    keys.refuse_flag(("attention_bias", ""))?;
    let rope = keys.count(("qk_rope_head_dim", "rope.dimension_count"))?;
    // GGUF gives the whole head's width; files made for absorbed attention keep it under another name.
    let (nope, value) = if keys.is_gguf() {
        let key = match keys.optional_count(("", "attention.key_length_mla"))? {
            Some(_) => ("", "attention.key_length_mla"),
            None => ("", "attention.key_length"),
        };
        let whole = keys.count(key)?;
        if whole <= rope {
            return Err(keys.wrong(key, &format!("is {whole}, no more than the {rope} rotated columns")).into());
        }
        let value = match keys.optional_count(("", "attention.value_length_mla"))? {
            Some(_) => ("", "attention.value_length_mla"),
            None => ("", "attention.value_length"),
        };
        (whole - rope, keys.count(value)?)
    } else {
        (keys.count(("qk_nope_head_dim", ""))?, keys.count(("v_head_dim", ""))?)
    };
    let shared = match keys.optional_count(("n_shared_experts", "expert_shared_count"))? {
        None | Some(0) => 0,
        Some(n) => n * keys.count(("moe_intermediate_size", "expert_feed_forward_length"))?,
    };
    let interleaved = keys.flag(("rope_interleave", "")).unwrap_or(true);
    Ok(ModelConfig {
        family: keys.family(),
        layers: keys.layers()?,
        hidden: keys.count(("hidden_size", "embedding_length"))?,
        heads: keys.count(("num_attention_heads", "attention.head_count"))?,
        attention: Attention::Latent {
            q_lora: keys.optional_count(("q_lora_rank", "attention.q_lora_rank"))?.filter(|&n| n > 0),
            kv_lora: keys.count(("kv_lora_rank", "attention.kv_lora_rank"))?,
            nope,
            rope,
            value,
        },
        rope: keys.rope(rope, interleaved)?,
        norm_epsilon: keys.positive(("rms_norm_eps", "attention.layer_norm_rms_epsilon"))? as f32,
        dense_intermediate: keys.optional_count(("intermediate_size", "feed_forward_length"))?.unwrap_or(0),
        shared_intermediate: shared,
        tied_head: keys.tied_head(),
        max_positions: keys.optional_count(("max_position_embeddings", "context_length"))?,
        stop_ids: Vec::new(),
    })
}
