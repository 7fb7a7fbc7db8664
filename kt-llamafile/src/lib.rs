//! Experts of GGUF files: every block type, from AVX2 to AVX-512 with VNNI.
//!
//! Blocks are repacked at load: the same bits, ordered so that a panel of 16 outputs is read as streams of lines (`layout.rs`). It costs
//! 0 to 4 % more memory than the file has bytes (TQ1_0: 22 %), and the plan counts it. Those of IQ1, IQ2 and IQ3 take 25 to 104 % more, as codes in place of
//! points; where that finds no room they stay in the file, and are decoded into the cache for each product (`blocks.rs`), which is 2.6 to 5.6 times as slow for few rows.
//! What a line holds is said in `lines.rs`; the products themselves are those of kt-avx512. `PERFORMANCE.md` says what limits them.
//! Lines are unpacked in registers for few rows, and once per panel into the cache for many, with the same sums. So
//! **each number comes out bit for bit the same on every tier, for any number of rows and any cut of the outputs** (but of Q4_1, Q5_0, Q5_1, Q5_K, Q2_K, IQ1_M and IQ3_S,
//! on Zen 5, Intel and tier `avxvnni` also of Q4_0 and MXFP4, on the latter two also of Q3_K, Q4_K, Q6_K and IQ1_S, in calls of 32 rows of an expert and more with VNNI, unless
//! the runtime is `batch_invariant`). On other architectures than x86-64 the crate has no backend.

#[cfg(target_arch = "x86_64")]
mod blocks;
#[cfg(target_arch = "x86_64")]
mod kernel;
#[cfg(target_arch = "x86_64")]
mod layout;
#[cfg(target_arch = "x86_64")]
mod lines;

use kt_core::cpu::tier::Tier;
use kt_core::{Backend, Unsupported};

#[cfg(target_arch = "x86_64")]
pub use kernel::{Llamafile, OfBlocks};
#[cfg(target_arch = "x86_64")]
pub use layout::as_packed;

/// The backend `llamafile`, with the best instructions of this CPU up to `cap`.
///
/// # Errors
/// Which CPU features are missing, or that `cap` excludes all tiers of this crate.
#[cfg(target_arch = "x86_64")]
pub fn backend(cap: Tier) -> Result<impl Backend, Unsupported> {
    Ok(kt_core::cpu::CpuBackend::new("llamafile", Llamafile::detect(cap)?))
}

/// No backend: this is not x86-64.
///
/// # Errors
/// Always.
#[cfg(not(target_arch = "x86_64"))]
pub fn backend(_cap: Tier) -> Result<impl Backend, Unsupported> {
    let declined: Result<kt_core::cpu::CpuBackend<kt_core::cpu::portable::Portable>, _> =
        Err(Unsupported::new("AVX-512 and AVX2 need an x86-64 CPU"));
    declined
}
