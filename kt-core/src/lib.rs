//! The core of `kt`: expert-offload traits, weight formats, checkpoints, the scheduler and the one CPU flow.
//!
//! ```text
//! once, at start   checkpoint ─WeightSource─▶ Matrix ─Backend::load─▶ ExpertBank (packed experts of one layer)
//! every step       Batch ─scheduler─▶ Work per bank ─submit─▶ Pending ─wait and add─▶ the same Batch, output filled
//! ```
//!
//! Applications use the facade crate `kt`, which re-exports what they need and registers the compiled-in backends.

pub mod activation;
pub mod backend;
pub mod batch;
pub mod convert;
pub mod cpu;
pub mod error;
pub mod experts;
pub mod format;
pub mod heat;
pub mod importance;
mod json;
pub mod layer;
pub mod pending;
pub mod placement;
pub mod plan;
pub mod plugin;
pub mod quantize;
pub mod routing;
pub mod runtime;
pub mod scheduler;
pub mod source;
pub mod stats;
#[cfg(feature = "testing")]
pub mod testing;
pub mod work;

/// Has the numbers of [`Hidden::Bf16`].
pub use half;

pub use backend::{Backend, Device, ExpertBank, Fit, LinearOp, LoadContext, Progress};
pub use batch::Batch;
pub use error::{Error, Result, Unsupported};
pub use experts::{Experts, LayerExperts, Prepared};
pub use format::{Format, Group, Matrix, ScaleType};
pub use heat::HeatMap;
pub use importance::Importance;
pub use layer::{LayerSpec, Proj};
pub use pending::Pending;
pub use plan::Plan;
pub use routing::{Routing, Rule};
pub use runtime::{Candidate, Linear, LoadOptions, Runtime, RuntimeBuilder};
pub use source::{Metadata, WeightSource, open};
pub use stats::Stats;
pub use work::{Hidden, Work};
