//! The one CPU flow, generic over [`kernel::Kernel`].

pub mod amx;
pub mod cache;
pub mod input;
pub mod kernel;
pub mod memory;
pub mod portable;
pub mod team;
pub mod tier;
pub mod topology;

mod flow;
mod slice;

pub use flow::CpuBackend;
pub(crate) use flow::FEW_TOKENS;
