//! What the command `kt` is made of: its subcommands, and the [`host`] that runs whole models.

pub mod bench;
pub mod convert;
#[cfg(all(feature = "amx", target_arch = "x86_64"))]
pub mod crossover;
pub mod doctor;
pub mod eval;
pub mod host;
pub mod limits;
pub mod model;
pub mod observe;
pub mod options;
pub mod placing;
pub mod plan;
#[cfg(feature = "plugins")]
pub mod plugins;
pub mod run;
pub mod system;
