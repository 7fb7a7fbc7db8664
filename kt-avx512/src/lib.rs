//! Experts on AVX-512, and on AVX2 where that is missing: BF16, FP8, INT8 and INT4 weights, packed once at load.
//!
//! Two number paths: int8 x int8 (VNNI, or widening multiplies without it) for INT8 and INT4, and bf16 x bf16 (AVX512-BF16, or F32
//! inputs without it) for BF16 and FP8. See `layout.rs` for how weights are packed and `product.rs` for which loop runs when.
//! `avx2/` is the same on 256-bit registers: int8 products are the same bits on every tier, those of F32 inputs on `avx2` and `avx512`.
//! On other architectures than x86-64 the crate has no backend.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod best;
#[cfg(target_arch = "x86_64")]
mod isa;
#[cfg(target_arch = "x86_64")]
mod kernel;
#[cfg(target_arch = "x86_64")]
mod layout;
#[cfg(target_arch = "x86_64")]
mod product;
#[cfg(all(test, target_arch = "x86_64"))]
mod tests;
#[cfg(target_arch = "x86_64")]
mod tile;

use kt_core::cpu::tier::Tier;
use kt_core::{Backend, Unsupported};

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use best::Avx;
#[cfg(target_arch = "x86_64")]
pub use kernel::Avx512;

/// The backend for the best instructions that this CPU has, up to `cap`.
///
/// # Errors
/// The CPU features that are missing, or that `cap` is below AVX2.
#[cfg(target_arch = "x86_64")]
pub fn backend(cap: Tier) -> Result<impl Backend, Unsupported> {
    Ok(kt_core::cpu::CpuBackend::new("avx512", Avx::detect(cap)?))
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
