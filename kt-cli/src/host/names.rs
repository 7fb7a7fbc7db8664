//! Names of dense tensors, in a checkpoint's own spelling.

use kt::Metadata;
pub use kt::source::parts::*;

/// The router, `[experts, hidden]`.
pub const ROUTER: Part = part("mlp.gate.weight", "ffn_gate_inp.weight");
/// Its correction bias, `[experts]`.
pub const ROUTER_BIAS: Part = part("mlp.gate.e_score_correction_bias", "exp_probs_b.bias");
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

    fn model(self, part: Part) -> &'static str {
        if self.gguf { part.gguf } else { part.huggingface }
    }

    /// The embedding, `[vocabulary, hidden]`.
    pub fn embedding(self) -> &'static str {
        self.model(EMBEDDING)
    }

    /// The norm after the last layer.
    pub fn last_norm(self) -> &'static str {
        self.model(LAST_NORM)
    }

    /// The head, `[vocabulary, hidden]`; absent where it is tied to the embedding.
    pub fn head(self) -> &'static str {
        self.model(HEAD)
    }
}
