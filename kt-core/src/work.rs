//! The share of a batch that one bank gets.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use half::bf16;

/// Rows of numbers as the caller has them: F32 or BF16.
#[derive(Debug, Clone, PartialEq)]
pub enum Hidden {
    /// Single precision.
    F32(Vec<f32>),
    /// BF16.
    Bf16(Vec<bf16>),
}

impl Hidden {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Hidden::F32(v) => v.len(),
            Hidden::Bf16(v) => v.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies elements `range` into `out` as F32.
    #[inline]
    pub fn read(&self, range: Range<usize>, out: &mut [f32]) {
        match self {
            Hidden::F32(v) => out.copy_from_slice(&v[range]),
            Hidden::Bf16(v) => {
                for (o, b) in out.iter_mut().zip(&v[range]) {
                    *o = b.to_f32();
                }
            }
        }
    }
}

impl From<Vec<f32>> for Hidden {
    fn from(v: Vec<f32>) -> Self {
        Hidden::F32(v)
    }
}

impl From<Vec<bf16>> for Hidden {
    fn from(v: Vec<bf16>) -> Self {
        Hidden::Bf16(v)
    }
}

/// One (token, expert) pair.
#[repr(C)] // as it crosses to plugins
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Row {
    /// Token of the work.
    pub token: u32,
    /// Routing weight.
    pub weight: f32,
}

/// The rows of one expert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertRows {
    /// Index of the expert within its bank.
    pub local: u32,
    /// Range of [`Work::rows`], by rising token; never empty.
    pub rows: Range<usize>,
}

/// The share of a batch that one bank gets, grouped by expert. It owns or shares all it needs, so that it can outlive the call
/// that made it.
#[derive(Debug, Clone)]
pub struct Work {
    /// Hidden states `[_, hidden]` of the whole batch, shared by the banks of a layer.
    pub input: Arc<Hidden>,
    /// The row of `input` that is token 0 of this work: long batches are done in several passes.
    pub first: usize,
    /// Tokens of this work.
    pub tokens: usize,
    /// Width of the hidden state.
    pub hidden: usize,
    /// (token, weight) pairs, grouped by expert.
    pub rows: Vec<Row>,
    /// Groups by rising local expert.
    pub experts: Vec<ExpertRows>,
    /// `[tokens, hidden]`: the bank adds to it.
    pub output: Vec<f32>,
    /// Where the time of this work went, for statistics: zero when it starts; a bank that does not know leaves it so.
    pub spent: Spent,
}

/// What the thread that ran some work did with its time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Spent {
    /// It computed.
    pub kernels: Duration,
    /// It waited for other threads: for their last tasks, or for its turn with the team.
    pub waiting: Duration,
}
