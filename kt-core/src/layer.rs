//! The shape of one layer's experts: all that a backend may know before it sees a weight.

use crate::activation::Activation;
use crate::format::{Format, ScaleType};

/// One of an expert's three projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Proj {
    /// `[intermediate, hidden]`, its output goes through the activation.
    Gate,
    /// `[intermediate, hidden]`, multiplied with the activated gate.
    Up,
    /// `[hidden, intermediate]`, back to the hidden size.
    Down,
}

impl Proj {
    /// The three, in the order that arrays indexed by projection use.
    pub const ALL: [Proj; 3] = [Proj::Gate, Proj::Up, Proj::Down];

    /// Position in [`Proj::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }

    /// `gate`, `up` or `down`.
    pub fn name(self) -> &'static str {
        ["gate", "up", "down"][self.index()]
    }
}

/// What the experts of one layer are, known from headers alone.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// Index of the layer in the model, counting dense layers too.
    pub index: usize,
    /// Number of routed experts.
    pub experts: usize,
    /// Experts that a token is sent to; used for sizing and speed estimates only.
    pub top_k: usize,
    /// Width of the hidden state.
    pub hidden: usize,
    /// Width of an expert's intermediate state.
    pub intermediate: usize,
    /// Format of gate, up and down (indexed by [`Proj::index`]).
    pub formats: [Format; 3],
    /// Type of the scales that lie beside the codes of gate, up and down, where headers tell it. Formats with groups leave it open.
    pub scales: [Option<ScaleType>; 3],
    /// How gate and up become the input of down.
    pub activation: Activation,
    /// Whether the three projections carry biases.
    pub biases: bool,
}

impl LayerSpec {
    /// `[rows, cols]` = `[outputs, inputs]` of a projection.
    pub fn shape(&self, proj: Proj) -> (usize, usize) {
        match proj {
            Proj::Gate | Proj::Up => (self.intermediate, self.hidden),
            Proj::Down => (self.hidden, self.intermediate),
        }
    }

    /// Format of a projection.
    pub fn format(&self, proj: Proj) -> Format {
        self.formats[proj.index()]
    }

    /// Bytes of one expert as stored in the checkpoint, scales included.
    pub fn expert_bytes(&self) -> u64 {
        Proj::ALL
            .iter()
            .map(|&p| {
                let (rows, cols) = self.shape(p);
                self.format(p).stored_bytes(rows, cols)
            })
            .sum()
    }

    /// The formats as a reader wants them: `BF16`, or `Q4_K+Q6_K` when down differs.
    pub fn format_label(&self) -> String {
        let mut names: Vec<String> = Vec::new();
        for f in self.formats {
            let n = f.to_string();
            if !names.contains(&n) {
                names.push(n);
            }
        }
        names.join("+")
    }
}
