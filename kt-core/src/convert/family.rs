//! The families that are carried whole between Hugging Face directories and GGUF files: what a file's names and keys are in a directory.
//!
//! A family more is a row more here, beside its row in [`names`](crate::source::names), which has its experts, router and routing.

use serde_json::{Value, json};

use crate::source::Metadata;
use crate::source::model::text;
use crate::source::parts::{self, Part, part};

/// A number or flag by both names.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    pub config: &'static str,
    /// After the architecture.
    pub gguf: &'static str,
    pub kind: Kind,
    pub absent: Absent,
}

/// What a key has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Uint,
    Float,
}

/// What is done where a key is not there.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Absent {
    /// The error asks for it by name.
    Refused,
    /// It counts as this on either side.
    Is(f64),
}

/// Which columns of a head are rotated by their position, and what says so.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rotary {
    /// All; nothing says so.
    All,
    /// All, and the file says how many they are.
    AllCounted,
    /// A part: `partial_rotary_factor` in a config (this where it is absent), a count in a file.
    Factor(f64),
    /// A part: `rotary_dim` in a config, a count in a file.
    Count,
}

/// One row of the table.
#[derive(Debug)]
pub struct Whole {
    /// `general.architecture` of files.
    pub architecture: &'static str,
    /// `model_type` of directories; one that is made of a file has the first.
    pub model_types: &'static [&'static str],
    /// What transformers calls the model.
    pub class: &'static str,
    /// Config key of the number of routed experts.
    pub experts: &'static str,
    /// Tensors of a layer that are not called as in most families; they take the place of others of the same name in a directory.
    pub parts: &'static [Part],
    /// Keys that not all families have.
    pub keys: &'static [Key],
    /// What every file of the family says, though no config does.
    pub stated: &'static [(&'static str, usize)],
    /// What every config of the family says, though no file does. A directory whose config says otherwise is refused. What is in
    /// `rope_scaling` is said only where positions are stretched.
    pub implied: fn() -> Value,
    /// Which columns of heads are rotated.
    pub rotary: Rotary,
    /// Whether files have rows of queries and keys in pairs: of each head, the first row of its first half, the first of its second,
    /// and so on.
    pub paired: bool,
    /// `Some(n)` where only every n-th layer sees all tokens, and the others a window of them.
    pub window: Option<usize>,
    /// Config keys that are true where files have these tensors in their first layers.
    pub told_by: &'static [(&'static str, &'static str)],
}

const fn required(config: &'static str, gguf: &'static str, kind: Kind) -> Key {
    Key { config, gguf, kind, absent: Absent::Refused }
}

const fn or(config: &'static str, gguf: &'static str, kind: Kind, value: f64) -> Key {
    Key { config, gguf, kind, absent: Absent::Is(value) }
}

/// Norm before the feed-forward part, by the name that it has in newer architectures.
const POST_NORM: Part = part(parts::FFN_NORM.huggingface, "post_attention_norm.weight");

const QWEN3: Whole = Whole {
    architecture: "qwen3moe",
    model_types: &["qwen3_moe"],
    class: "Qwen3MoeForCausalLM",
    experts: "num_experts",
    parts: &[],
    keys: &[],
    stated: &[],
    implied: || json!({"use_sliding_window": false}),
    rotary: Rotary::All,
    paired: false,
    window: None,
    told_by: &[],
};

/// The table.
pub static WHOLE: &[Whole] = &[
    QWEN3,
    Whole {
        architecture: "qwen2moe",
        model_types: &["qwen2_moe"],
        class: "Qwen2MoeForCausalLM",
        keys: &[required("shared_expert_intermediate_size", "expert_shared_feed_forward_length", Kind::Uint)],
        told_by: &[("qkv_bias", "attn_q.bias")],
        ..QWEN3
    },
    // Its attention and routing have keys of their own: see `config`.
    Whole {
        architecture: "deepseek2",
        model_types: &["deepseek_v3", "deepseek_v2", "deepseek_v32", "kimi_k2", "kimi_k25"],
        class: "DeepseekV3ForCausalLM",
        experts: "n_routed_experts",
        implied: || json!({"moe_layer_freq": 1}),
        ..QWEN3
    },
    Whole {
        architecture: "llama",
        model_types: &["mixtral"],
        class: "MixtralForCausalLM",
        experts: "num_local_experts",
        implied: || json!({}),
        rotary: Rotary::AllCounted,
        paired: true,
        ..QWEN3
    },
    Whole {
        architecture: "glm4moe",
        model_types: &["glm4_moe"],
        class: "Glm4MoeForCausalLM",
        experts: "n_routed_experts",
        parts: &[POST_NORM],
        keys: &[
            or("n_shared_experts", "expert_shared_count", Kind::Uint, 0.0),
            or("n_group", "expert_group_count", Kind::Uint, 1.0),
            or("topk_group", "expert_group_used_count", Kind::Uint, 1.0),
            or("routed_scaling_factor", "expert_weights_scale", Kind::Float, 1.0),
        ],
        stated: &[("expert_gating_func", 2)],
        implied: || json!({}),
        rotary: Rotary::Factor(0.5),
        told_by: &[("use_qk_norm", "attn_q_norm.weight")],
        ..QWEN3
    },
    Whole {
        architecture: "minimax-m2",
        model_types: &["minimax_m2"],
        class: "MiniMaxM2ForCausalLM",
        experts: "num_local_experts",
        stated: &[("expert_gating_func", 2)],
        implied: || {
            json!({
                "scoring_func": "sigmoid", "use_routing_bias": true, "use_qk_norm": true, "qk_norm_type": "per_layer",
                "shared_intermediate_size": 0,
            })
        },
        rotary: Rotary::Count,
        ..QWEN3
    },
    Whole {
        architecture: "gpt-oss",
        model_types: &["gpt_oss"],
        class: "GptOssForCausalLM",
        experts: "num_local_experts",
        parts: &[POST_NORM, part("self_attn.sinks", "attn_sinks.weight"), part("mlp.router.bias", "ffn_gate_inp.bias")],
        keys: &[required("sliding_window", "attention.sliding_window", Kind::Uint)],
        implied: || json!({"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "rope_scaling": {"truncate": false}}),
        window: Some(2),
        ..QWEN3
    },
];

/// The row of a checkpoint's model, where it can be carried whole.
pub fn of(metadata: &Metadata) -> Option<&'static Whole> {
    match metadata {
        Metadata::HuggingFace(config) => {
            let known = |config: &Value| {
                let name = config.get("model_type")?.as_str()?;
                WHOLE.iter().find(|w| w.model_types.contains(&name))
            };
            known(config).or_else(|| known(text(config)))
        }
        Metadata::Gguf(_) => WHOLE.iter().find(|w| metadata.family() == Some(w.architecture)),
    }
}

/// Names of all of them, for messages.
pub fn names() -> String {
    let of = |w: &Whole| format!("{} ({})", w.architecture, w.model_types[0]);
    WHOLE.iter().map(of).collect::<Vec<_>>().join(", ")
}
