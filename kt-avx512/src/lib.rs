//! Experts on AVX2 and AVX-512 CPUs: every format of safetensors checkpoints but GPTQ's activation order and groups that are no multiple of 32, packed once at load.
//!
//! Two number paths serve most formats: int8 x int8 (VNNI, or byte multiply-adds without it) for INT8, INT4, GPTQ, AWQ, MXFP4 and
//! NVFP4, and bf16 x bf16 (AVX512-BF16, or F32 products without it and where it is slower) for BF16, FP8 and MXFP8; F16 and F32 weights meet F32 inputs. One
//! source is compiled for five tiers (`isa.rs`): a new tier is an implementation of its operations. See `layout.rs` for how weights are
//! packed, `lines.rs` for how they are unpacked, `tile.rs` for the loops, `product.rs` for which of them runs when and `ahead.rs` for how
//! weights are asked for before. `PERFORMANCE.md` says what limits them. On other architectures than x86-64 the crate has no backend.

#[cfg(target_arch = "x86_64")]
mod ahead;
#[cfg(target_arch = "x86_64")]
mod blocks;
#[cfg(target_arch = "x86_64")]
mod dots;
#[cfg(target_arch = "x86_64")]
mod inputs;
#[cfg(target_arch = "x86_64")]
mod isa;
#[cfg(target_arch = "x86_64")]
mod kernel;
#[cfg(target_arch = "x86_64")]
mod layout;
#[cfg(target_arch = "x86_64")]
mod lines;
#[cfg(target_arch = "x86_64")]
mod product;
#[cfg(target_arch = "x86_64")]
mod tile;
#[cfg(target_arch = "x86_64")]
mod tiled;
#[cfg(target_arch = "x86_64")]
mod words;

use kt_core::cpu::tier::Tier;
use kt_core::{Backend, Unsupported};

#[cfg(target_arch = "x86_64")]
pub use kernel::Avx;

/// What the products are made of, for backends with formats of their own: say how a matrix is packed ([`Layout`]), how its lines
/// become codes ([`Lines`], [`Codes`]) and how its scales are read ([`Scale`]); [`Product::on`] with [`Ints`] of them does the rest, on
/// every tier. For weights in place, say how a block is decoded ([`Blocks`]), for [`Product::decoded`]. Run either in a [`Job`] by [`Avx::run`].
///
/// [`Layout`]: engine::Layout
/// [`Lines`]: engine::Lines
/// [`Codes`]: engine::Codes
/// [`Scale`]: engine::Scale
/// [`Product::on`]: engine::Product::on
/// [`Blocks`]: engine::Blocks
/// [`Product::decoded`]: engine::Product::decoded
/// [`Ints`]: engine::Ints
/// [`Job`]: engine::Job
#[cfg(target_arch = "x86_64")]
pub mod engine {
    pub use crate::blocks::{Blocks, Row};
    pub use crate::isa::{Bits, Grid, Isa, Job, Ports};
    pub use crate::kernel::{AsWords, Worth};
    pub use crate::layout::{LINE, Layout, MOST_PANELS, PANEL, Parts, SUPER, panels};
    pub use crate::lines::{Bytes, Codes, E2M1_ZERO, E2m1, Lines, Nibbles, SHIFTED, Scale, Steps};
    pub use crate::product::{Ints, Path, Product};
    pub use crate::tile::Tile;
    pub use crate::tiled::{Asked, STEP_LINES, TILE_PANELS, TILE_ROWS, TileProduct, TileUnit};
}

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
