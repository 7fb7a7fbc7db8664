//! What the caller owns: hidden states, the router's choice, and the output.

use std::fmt;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::experts::Part;
use crate::work::Hidden;

/// An expert id that stands for none, e.g. in rows that pad a batch.
pub const NO_EXPERT: i32 = -1;

/// Tokens on their way through one layer of experts.
///
/// Reuse it from layer to layer: [`Batch::set`] replaces the input and the routing and keeps the buffers.
#[derive(Debug)]
pub struct Batch {
    pub(crate) tokens: usize,
    pub(crate) input: Arc<Hidden>,
    pub(crate) topk_ids: Vec<i32>,
    pub(crate) topk_weights: Vec<f32>,
    pub(crate) output: Vec<f32>,
    pub(crate) defer: usize,
    pub(crate) carried: Option<Carried>,
}

/// What one layer's call left for the next one's.
pub(crate) struct Carried {
    /// Index of the layer in the model.
    pub layer: usize,
    /// What the layers of one load have in common, and no other has ([`LayerExperts`](crate::LayerExperts)' `stream_from`).
    pub of: Arc<AtomicUsize>,
    pub tokens: usize,
    /// Behind a lock that is never waited for, so that a batch can be shared for reading.
    pub parts: Mutex<Vec<Part>>,
}

impl fmt::Debug for Carried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        write!(f, "{} parts of layer {}", parts.len(), self.layer)
    }
}

impl Batch {
    /// A batch of `tokens` rows.
    ///
    /// - `input: [tokens, hidden]`, F32 or BF16
    /// - `topk_ids: [tokens, top_k]`, -1 for none
    /// - `topk_weights: [tokens, top_k]`
    ///
    /// # Errors
    /// [`Error::Length`] when a slice is no multiple of `tokens`, or ids and weights differ in length. Ids are checked against the
    /// layer when the batch is submitted.
    pub fn new(tokens: usize, input: impl Into<Hidden>, topk_ids: Vec<i32>, topk_weights: Vec<f32>) -> Result<Batch> {
        let input = Arc::new(input.into());
        let batch = Batch { tokens, input, topk_ids, topk_weights, output: Vec::new(), defer: 0, carried: None };
        batch.check()?;
        Ok(batch)
    }

    /// Replaces tokens, input and routing.
    ///
    /// # Errors
    /// As [`Batch::new`]; the batch is then empty.
    pub fn set(
        &mut self,
        tokens: usize,
        input: impl Into<Hidden>,
        topk_ids: Vec<i32>,
        topk_weights: Vec<f32>,
    ) -> Result<()> {
        let old = std::mem::replace(self, Batch { defer: self.defer, ..Batch::empty() });
        let new = Batch::new(tokens, input, topk_ids, topk_weights)?;
        *self = Batch { output: old.output, defer: old.defer, carried: old.carried, ..new };
        Ok(())
    }

    fn empty() -> Batch {
        let input = Arc::new(Hidden::F32(Vec::new()));
        Batch { tokens: 0, input, topk_ids: vec![], topk_weights: vec![], output: vec![], defer: 0, carried: None }
    }

    /// Defers `experts` experts of each token: those of least weight are added to the output of the next layer that holds experts, in place
    /// of this one's. They are computed while the caller goes on to that layer. It changes what the model computes, a little; so it is off (0)
    /// unless asked for. The last layer defers none.
    ///
    /// Which experts of a token wait depends on nothing but its own weights (among equals, the later ones wait). What a layer left is added by
    /// the next layer's call with this same batch, [`set`](Batch::set) to that layer's input for the same number of tokens; calls in another
    /// order, as those of the next request, drop it.
    pub fn defer(&mut self, experts: usize) {
        self.defer = experts;
    }

    /// Whether a layer's call left something for the next one's.
    pub fn carries(&self) -> bool {
        self.carried.is_some()
    }

    fn check(&self) -> Result<()> {
        let multiple = |what, got: usize| {
            let expected = nearest_multiple(got, self.tokens);
            if got == 0 || got == expected { Ok(()) } else { Err(Error::Length { what, expected, got }) }
        };
        multiple("input [tokens, hidden]", self.input.len())?;
        multiple("topk_ids [tokens, top_k]", self.topk_ids.len())?;
        if self.topk_weights.len() != self.topk_ids.len() {
            return Err(Error::Length {
                what: "topk_weights [tokens, top_k]",
                expected: self.topk_ids.len(),
                got: self.topk_weights.len(),
            });
        }
        Ok(())
    }

    /// Rows.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Experts per token.
    pub fn top_k(&self) -> usize {
        self.topk_ids.len() / self.tokens.max(1)
    }

    /// The hidden states `[tokens, hidden]`.
    pub fn input(&self) -> &Hidden {
        &self.input
    }

    /// The experts of each token `[tokens, top_k]`.
    pub fn topk_ids(&self) -> &[i32] {
        &self.topk_ids
    }

    /// Their weights `[tokens, top_k]`.
    pub fn topk_weights(&self) -> &[f32] {
        &self.topk_weights
    }

    /// `[tokens, hidden]`: the weighted sum of the chosen experts' outputs, after the batch went through a layer; empty before.
    pub fn output(&self) -> &[f32] {
        &self.output
    }

    /// The output, without copying.
    pub fn into_output(self) -> Vec<f32> {
        self.output
    }
}

/// The multiple of `of` that is nearest to `n`, and not 0 unless `of` is.
pub(crate) fn nearest_multiple(n: usize, of: usize) -> usize {
    n.saturating_add(of / 2).checked_div(of).unwrap_or(0).max(1).saturating_mul(of)
}
