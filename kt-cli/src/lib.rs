//! What the command `kt` is made of: its subcommands, and the [`host`] that runs whole models.

pub mod bench;
pub mod convert;
pub mod doctor;
pub mod eval;
pub mod host;
pub mod limits;
pub mod model;
pub mod observe;
pub mod options;
pub mod plan;
#[cfg(feature = "plugins")]
pub mod plugins;
pub mod run;
pub mod system;
