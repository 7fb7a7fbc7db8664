//! The host: the dense part of whole models, so that `kt` can run one without another engine.
//!
//! ```text
//! source ─Metadata─▶ ModelConfig ─plan─▶ bytes ─load─▶ Model        ids ─Model::forward + Cache─▶ logits ─Sampler─▶ id
//! ```
//!
//! Embeddings, norms, rotary positions, attention and the router run on candle in F32; every other dense matrix goes through
//! [`kt::Runtime::linear`], and the routed experts through [`kt::Runtime::load`]. A family is one file here that reads its
//! configuration into [`ModelConfig`]; tensors are found by the table in [`names`].

mod attention;
pub mod config;
mod deepseek;
mod model;
pub mod names;
mod qwen3_moe;
mod rope;
pub mod sampling;
pub mod text;
pub mod tokenizer;
mod weights;

pub use config::ModelConfig;
pub use model::{Cache, Model, Rows};
pub use sampling::Sampler;
pub use tokenizer::Tokenizer;
