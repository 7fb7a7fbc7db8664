//! Experts straight from GGUF files: Q8_0, Q4_0, Q5_0, Q4_K and Q6_K blocks multiplied as they lie in the map, on AVX2 and AVX-512.
//!
//! Nothing is repacked and nothing is copied at load: the pages of the file are the weights, shared between processes. The
//! price is paid in registers: the product takes a panel of outputs (16 on AVX-512, 8 on AVX2), transposes a step of 32 or 64
//! columns so that a register line holds 4 columns of each output, and multiplies that with every input row of a tile before
//! it goes on. One row pays for the transposition alone, and still runs ahead of memory; 64 rows share it. There is thus one
//! product for few rows and for many, no crossover, and **each number comes out bit for bit the same on every tier, for any
//! number of rows and any cut of the outputs**: integers are exact, and the float operations per output happen in one order.
//!
//! ```text
//! per group of 32 columns   y += (x_scale * sum(q * x_code)) * (d * sc)  -  (x_scale * sum(x_code)) * (dmin * mn)
//! ```

mod kernel;
#[allow(dead_code)] // until the kernels read it
mod layout;
#[cfg(all(test, target_arch = "x86_64"))]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

use kt_core::cpu::CpuBackend;
use kt_core::cpu::tier::Tier;
use kt_core::{Backend, Unsupported};

pub use kernel::Llamafile;

/// The backend `llamafile`, with the best instructions of this CPU up to `cap`.
///
/// # Errors
/// Which CPU features are missing, or that `cap` excludes all tiers of this crate.
pub fn backend(cap: Tier) -> Result<impl Backend, Unsupported> {
    Ok(CpuBackend::new("llamafile", Llamafile::detect(cap)?))
}
