//! Qwen3-MoE: grouped attention with normed heads, every feed-forward layer experts unless told otherwise.

use anyhow::Result;

use super::config::{Attention, Keys, ModelConfig};

/// Reads the family's configuration.
pub(super) fn config(keys: &Keys<'_>) -> Result<ModelConfig> {
    keys.check_silu()?;
    keys.refuse_flag(("attention_bias", ""))?;
    keys.refuse_flag(("use_sliding_window", ""))?;
    let hidden = keys.count(("hidden_size", "embedding_length"))?;
    let heads = keys.count(("num_attention_heads", "attention.head_count"))?;
    let head_dim = match keys.optional_count(("head_dim", "attention.key_length"))? {
        Some(_) => keys.count(("head_dim", "attention.key_length"))?,
        None => hidden / heads,
    };
    let kv_heads = keys.count(("num_key_value_heads", "attention.head_count_kv"))?;
    if !heads.is_multiple_of(kv_heads) {
        let what = format!("is {kv_heads}, which does not divide the {heads} query heads");
        return Err(keys.wrong(("num_key_value_heads", "attention.head_count_kv"), &what).into());
    }
    for key in [("", "attention.value_length"), ("", "rope.dimension_count")] {
        if let Some(n) = keys.optional_count(key)?.filter(|&n| n != head_dim) {
            return Err(keys.wrong(key, &format!("is {n}, which differs from the key heads' width {head_dim}")).into());
        }
    }
    Ok(ModelConfig {
        family: keys.family(),
        layers: keys.layers()?,
        hidden,
        heads,
        attention: Attention::Grouped { kv_heads, head_dim },
        rope: keys.rope(head_dim, false)?,
        norm_epsilon: keys.positive(("rms_norm_eps", "attention.layer_norm_rms_epsilon"))? as f32,
        dense_intermediate: keys.optional_count(("intermediate_size", "feed_forward_length"))?.unwrap_or(0),
        shared_intermediate: 0,
        tied_head: keys.tied_head(),
        max_positions: keys.optional_count(("max_position_embeddings", "context_length"))?,
        stop_ids: Vec::new(),
    })
}
