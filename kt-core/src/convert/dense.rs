//! Names of tensors that are not routed experts, in Hugging Face directories and in GGUF files.

use crate::source::names::Family;

/// What a tensor is for, which decides how it may be rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The embedding and the head.
    Ends,
    /// A linear layer.
    Linear,
    /// Norms, biases, routers and whatever else: small, and never rounded.
    Other,
}

/// Of every layer: after `model.layers.{i}.` and after `blk.{i}.`.
const LAYER: [(&str, &str); 19] = [
    ("input_layernorm.weight", "attn_norm.weight"),
    ("post_attention_layernorm.weight", "ffn_norm.weight"),
    ("self_attn.q_proj.weight", "attn_q.weight"),
    ("self_attn.k_proj.weight", "attn_k.weight"),
    ("self_attn.v_proj.weight", "attn_v.weight"),
    ("self_attn.q_proj.bias", "attn_q.bias"),
    ("self_attn.k_proj.bias", "attn_k.bias"),
    ("self_attn.v_proj.bias", "attn_v.bias"),
    ("self_attn.o_proj.weight", "attn_output.weight"),
    ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    ("self_attn.q_a_proj.weight", "attn_q_a.weight"),
    ("self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight"),
    ("self_attn.q_b_proj.weight", "attn_q_b.weight"),
    ("self_attn.kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight"),
    ("self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight"),
    ("mlp.gate_proj.weight", "ffn_gate.weight"),
    ("mlp.up_proj.weight", "ffn_up.weight"),
    ("mlp.down_proj.weight", "ffn_down.weight"),
];

/// Of the whole model.
const MODEL: [(&str, &str); 3] = [
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
];

/// Keys and values out of their narrow row: one matrix there, in GGUF often cut in two.
pub const KV_B: (&str, &str) = ("self_attn.kv_b_proj.weight", "attn_kv_b.weight");
pub const K_B: &str = "attn_k_b.weight";
pub const V_B: &str = "attn_v_b.weight";

/// What GGUF calls projections of experts.
pub const GGUF_PROJ: [&str; 3] = ["gate", "up", "down"];

/// All pairs of names of a family's layers, where the family's own names come in.
fn pairs(family: &Family) -> Vec<(String, String)> {
    let mut all: Vec<_> = LAYER.iter().chain([&KV_B]).map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
    all.push((format!("{}.weight", family.router), "ffn_gate_inp.weight".into()));
    // Rows without a correction bias may be of the same architecture as rows with one.
    let bias = family.correction_bias.unwrap_or("mlp.gate.e_score_correction_bias");
    all.push((bias.to_owned(), "exp_probs_b.bias".into()));
    if let Some((stem, names)) = family.shared {
        for (name, gguf) in names.iter().zip(GGUF_PROJ) {
            all.push((format!("{stem}.{name}.weight"), format!("ffn_{gguf}_shexp.weight")));
        }
    }
    if let Some(gate) = family.shared_gate {
        all.push((format!("{gate}.weight"), "ffn_gate_inp_shexp.weight".into()));
    }
    all
}

/// Both ways to spell every name of a family.
pub struct Spelling {
    layer: Vec<(String, String)>,
    prefix: String,
}

impl Spelling {
    /// `prefix` stands before a layer's index in the directory.
    pub fn new(family: &Family, prefix: &str) -> Self {
        Spelling { layer: pairs(family), prefix: prefix.to_owned() }
    }

    /// The directory's name as a GGUF file has it.
    pub fn to_gguf(&self, name: &str) -> Option<String> {
        if let Some((_, gguf)) = MODEL.iter().find(|(n, _)| *n == name) {
            return Some((*gguf).to_owned());
        }
        let (layer, rest) = name.strip_prefix(&self.prefix)?.split_once('.')?;
        let (_, gguf) = self.layer.iter().find(|(n, _)| n == rest)?;
        Some(format!("blk.{layer}.{gguf}"))
    }

    /// A GGUF file's name as the directory has it.
    pub fn to_directory(&self, name: &str) -> Option<String> {
        if let Some((n, _)) = MODEL.iter().find(|(_, gguf)| *gguf == name) {
            return Some((*n).to_owned());
        }
        let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        let (n, _) = self.layer.iter().find(|(_, gguf)| gguf == rest)?;
        Some(format!("{}{layer}.{n}", self.prefix))
    }
}

/// What a tensor of this name (either spelling) and shape is for.
pub fn role(name: &str, family: &Family, shape: &[usize]) -> Role {
    let [rows, _] = shape else { return Role::Other };
    let gate = |module: &str| name.strip_suffix(".weight").is_some_and(|base| base.ends_with(module));
    let ends = ["embed_tokens.weight", "lm_head.weight", "token_embd.weight"];
    if ends.iter().any(|end| name.ends_with(end)) || name == "output.weight" {
        return Role::Ends;
    }
    let routes = gate(family.router) || family.shared_gate.is_some_and(gate) || name.contains("ffn_gate_inp");
    if !name.ends_with(".weight") || routes || *rows < 2 || name.contains("norm") || name.contains("conv") {
        return Role::Other;
    }
    Role::Linear
}
