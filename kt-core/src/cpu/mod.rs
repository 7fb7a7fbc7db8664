//! The one CPU flow, generic over [`kernel::Kernel`].

pub mod amx;
pub mod input;
pub mod kernel;
pub mod memory;
pub mod portable;
pub mod team;
pub mod tier;

mod flow;

pub use flow::CpuBackend;
