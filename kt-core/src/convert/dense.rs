//! Names of tensors that are not routed experts, in Hugging Face directories and in GGUF files.

use super::family::Whole;
use crate::source::names::Family;
use crate::source::parts::{self, Part};

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

/// Of every layer.
const LAYER: [Part; 13] = [
    parts::ATTENTION_NORM,
    parts::FFN_NORM,
    parts::Q,
    parts::K,
    parts::V,
    parts::O,
    parts::Q_NORM,
    parts::K_NORM,
    parts::Q_A,
    parts::Q_A_NORM,
    parts::Q_B,
    parts::KV_A,
    parts::KV_A_NORM,
];

/// Of the whole model.
const MODEL: [Part; 3] = [parts::EMBEDDING, parts::LAST_NORM, parts::HEAD];

/// What GGUF calls projections of experts.
pub const GGUF_PROJ: [&str; 3] = ["gate", "up", "down"];

/// All pairs of names of a family's layers, where the family's own names come in.
fn pairs(family: &Family, whole: Option<&Whole>) -> Vec<(String, String)> {
    let common = LAYER.iter().chain(&parts::QKV_BIASES).chain([&parts::O_BIAS, &parts::KV_B]).chain(&parts::DENSE);
    let own = whole.map_or(&[][..], |w| w.parts);
    let common = common.filter(|c| own.iter().all(|o| o.huggingface != c.huggingface));
    let named = |p: &Part| (p.huggingface.to_owned(), p.gguf.to_owned());
    let mut all: Vec<_> = common.chain(own).map(named).collect();
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
    pub fn new(family: &Family, whole: Option<&Whole>, prefix: &str) -> Self {
        Spelling { layer: pairs(family, whole), prefix: prefix.to_owned() }
    }

    /// The directory's name as a GGUF file has it.
    pub fn to_gguf(&self, name: &str) -> Option<String> {
        if let Some(part) = MODEL.iter().find(|p| p.huggingface == name) {
            return Some(part.gguf.to_owned());
        }
        let (layer, rest) = name.strip_prefix(&self.prefix)?.split_once('.')?;
        let (_, gguf) = self.layer.iter().find(|(n, _)| n == rest)?;
        Some(format!("blk.{layer}.{gguf}"))
    }

    /// A GGUF file's name as the directory has it.
    pub fn to_directory(&self, name: &str) -> Option<String> {
        if let Some(part) = MODEL.iter().find(|p| p.gguf == name) {
            return Some(part.huggingface.to_owned());
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
