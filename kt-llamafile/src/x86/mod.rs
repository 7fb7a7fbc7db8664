//! Products for x86-64.

#![allow(unsafe_code)] // kernel

mod blocks;
mod simd;
mod simd256;
mod simd512;
mod tile;

use std::ops::Range;

use kt_core::Matrix;
use kt_core::cpu::input::Inputs;
use kt_core::cpu::memory::AlignedBytes;

use blocks::{Blocks, Panel};
use simd::{Simd, prefetch};
use tile::{TILE_ROWS, Tile};

/// `out[i, j] = sum_k w[outputs.start + j, k] * x[rows.start + i, k]` for a matrix of block type `B`. The caller has checked all
/// shapes and indices.
#[inline(always)]
fn product<S: Simd, B: Blocks>(
    s: S,
    w: &Matrix,
    outputs: Range<usize>,
    x: Inputs<'_>,
    rows: Range<usize>,
    out: &mut [f32],
    scratch: &mut AlignedBytes,
) {
    let (cols, width) = (w.cols(), outputs.len());
    if width == 0 || rows.is_empty() {
        return;
    }
    let mut sums = [0f32; TILE_ROWS * 16];
    let memory = scratch.get(Tile::bytes(rows.len(), cols));
    // Rows that follow each other without a gap are fetched ahead: the first panel now, each other one during the one before.
    let panel_bytes = w.contiguous().map(|_| w.stride() * S::LANES.min(width));
    prefetch(w.row(outputs.start).as_ptr(), panel_bytes.unwrap_or(0));
    for (first, out) in rows.clone().step_by(TILE_ROWS).zip(out.chunks_mut(TILE_ROWS * width)) {
        let rows = first..rows.end.min(first + TILE_ROWS);
        let tile = Tile::gather(&x, rows.clone(), B::SUMS16, &mut *memory);
        let sums = &mut sums[..rows.len() * S::LANES];
        for start in outputs.clone().step_by(S::LANES) {
            let lanes = S::LANES.min(outputs.end - start);
            let next = start + S::LANES;
            let next =
                if panel_bytes.is_some() && next < outputs.end { w.row(next).as_ptr() } else { std::ptr::null() };
            let mut panel = Panel { rows: [w.row(start).as_ptr(); 16], next };
            for (lane, p) in panel.rows.iter_mut().enumerate() {
                *p = w.row(start + lane.min(lanes - 1)).as_ptr();
            }
            sums.fill(0.0);
            // SAFETY: each pointer is the start of a row of `w`, whose length `Matrix::new` checked.
            unsafe { B::panel(s, &panel, cols, &tile, sums) };
            for (out, sums) in out.chunks_exact_mut(width).zip(sums.chunks_exact(S::LANES)) {
                out[start - outputs.start..][..lanes].copy_from_slice(&sums[..lanes]);
            }
        }
    }
}

/// The functions of one tier: each is compiled for its instructions, with everything below inlined.
macro_rules! tier {
    ($(#[$doc:meta])* $name:ident, $features:literal, $simd:ty) => {
        $(#[$doc])*
        pub mod $name {
            use std::ops::Range;

            use kt_core::activation::Activation;
            use kt_core::cpu::input::{self, InputLayout, Inputs};
            use kt_core::cpu::memory::AlignedBytes;
            use kt_core::{Format, Matrix};

            use super::blocks::{Q4_0, Q4K, Q5_0, Q6K, Q8_0};

            /// One function per block type.
            macro_rules! product {
                ($function:ident, $blocks:ty) => {
                    #[target_feature(enable = $features)]
                    fn $function(
                        w: &Matrix,
                        outputs: Range<usize>,
                        x: Inputs<'_>,
                        rows: Range<usize>,
                        out: &mut [f32],
                        scratch: &mut AlignedBytes,
                    ) {
                        super::product::<$simd, $blocks>(<$simd>::new(), w, outputs, x, rows, out, scratch);
                    }
                };
            }
            product!(q8_0, Q8_0);
            product!(q4_0, Q4_0);
            product!(q5_0, Q5_0);
            product!(q4k, Q4K);
            product!(q6k, Q6K);

            /// [`Kernel::product`](kt_core::cpu::kernel::Kernel::product), shapes checked.
            #[target_feature(enable = $features)]
            pub fn product(
                w: &Matrix,
                outputs: Range<usize>,
                x: Inputs<'_>,
                rows: Range<usize>,
                out: &mut [f32],
                scratch: &mut AlignedBytes,
            ) {
                match w.format() {
                    Format::Q8_0 => q8_0(w, outputs, x, rows, out, scratch),
                    Format::Q4_0 => q4_0(w, outputs, x, rows, out, scratch),
                    Format::Q5_0 => q5_0(w, outputs, x, rows, out, scratch),
                    Format::Q4K => q4k(w, outputs, x, rows, out, scratch),
                    Format::Q6K => q6k(w, outputs, x, rows, out, scratch),
                    other => unreachable!("{other} was not accepted"),
                }
            }

            /// [`input::pack_block`] with these instructions.
            #[target_feature(enable = $features)]
            pub fn pack_input(layout: InputLayout, x: &[f32], out: &mut [u8]) {
                input::pack_block(layout, x, out);
            }

            /// [`Activation::apply`] with these instructions.
            #[target_feature(enable = $features)]
            pub fn activate(rule: Activation, gate: &mut [f32], up: &[f32]) {
                rule.apply(gate, up);
            }
        }
    };
}

tier!(
    /// Tier avx2.
    avx2,
    "avx2,fma,f16c",
    super::simd256::Avx2
);
tier!(
    /// Tier avx512.
    avx512,
    "avx512f,avx512bw,avx512vl,avx512dq",
    super::simd512::Avx512
);
tier!(
    /// Tier avx512vnni.
    avx512vnni,
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni",
    super::simd512::Avx512Vnni
);
