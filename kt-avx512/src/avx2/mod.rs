//! The kernel for CPUs without AVX-512: the same packed weights, multiplied in 256-bit registers.

#![allow(unsafe_code)] // kernel

mod product;
mod tile;

use std::ops::Range;

use kt_core::activation::Activation;
use kt_core::cpu::input::{self, BLOCK, InputLayout, Inputs};
use kt_core::cpu::kernel::{Kernel, Scratch, Weights};
use kt_core::cpu::tier::Tier;
use kt_core::{Format, Group, Matrix, Unsupported};

use crate::kernel::check_group;
use crate::layout::{self, CHUNK, Layout, PANEL};

/// AVX2 with FMA and F16C. A value proves that the instructions exist.
#[derive(Debug, Clone, Copy)]
pub struct Avx2(());

impl Avx2 {
    /// The tier `avx2`, where this CPU and `cap` allow it.
    ///
    /// # Errors
    /// The CPU features that are missing, or that `cap` is below.
    pub fn detect(cap: Tier) -> Result<Self, Unsupported> {
        if cap < Tier::Avx2 {
            return Err(Unsupported::new(format!("limited to tier {cap}, needs tier {} at least", Tier::Avx2)));
        }
        let missing = Tier::Avx2.missing();
        if !missing.is_empty() {
            return Err(Unsupported::new(format!("this CPU has no {}", missing.join(", "))));
        }
        Ok(Avx2(()))
    }
}

impl Kernel for Avx2 {
    fn tier(self) -> Tier {
        Tier::Avx2
    }

    fn accepts(self, format: Format, _rows: usize, _cols: usize) -> Result<(InputLayout, &'static str), Unsupported> {
        let grouped = InputLayout::Int8 { group: CHUNK };
        match format {
            Format::Bf16 => Ok((InputLayout::F32, "F32 products of widened weights, packed 16 x 2")),
            Format::Fp8Block | Format::Fp8Channel => {
                Ok((InputLayout::F32, "F32 products, E4M3 codes packed 16 x 4, to BF16 by nibble tables"))
            }
            Format::Int8(Group::Row) | Format::Int8Offset(Group::Row) => {
                Ok((InputLayout::Int8 { group: BLOCK }, "vpmaddwd, unsigned codes packed 16 x 4"))
            }
            Format::Int8(g) | Format::Int8Offset(g) => {
                check_group(format, g).map(|()| (grouped, "vpmaddwd, unsigned codes packed 16 x 4, F16 scales"))
            }
            Format::Int4(g) => {
                check_group(format, g).map(|()| (grouped, "vpmaddubsw, nibbles packed 16 x 8, F16 scales"))
            }
            other => Err(Unsupported::new(format!("no AVX2 product of {other}"))),
        }
    }

    fn packed_bytes(self, format: Format, rows: usize, cols: usize) -> Option<usize> {
        Some(rows.div_ceil(PANEL) * Layout::new(format, cols).panel_bytes())
    }

    fn pack(self, matrix: &Matrix, out: &mut [u8]) {
        layout::pack(matrix, out);
    }

    fn pack_input(self, layout: InputLayout, x: &[f32], out: &mut [u8]) {
        // SAFETY: `self` proves the instructions.
        unsafe { pack_input(layout, x, out) }
    }

    fn activate(self, rule: Activation, gate: &mut [f32], up: &[f32]) {
        // SAFETY: `self` proves the instructions.
        unsafe { activate(rule, gate, up) }
    }

    fn product(
        self,
        weights: &Weights,
        outputs: Range<usize>,
        inputs: Inputs<'_>,
        rows: &[u32],
        out: &mut [f32],
        scratch: &mut Scratch,
    ) {
        // SAFETY: `self` proves the instructions.
        unsafe { product::product(weights, outputs, inputs, rows, out, scratch) }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn pack_input(layout: InputLayout, x: &[f32], out: &mut [u8]) {
    input::pack_block(layout, x, out);
}

#[target_feature(enable = "avx2,fma,f16c")]
fn activate(rule: Activation, gate: &mut [f32], up: &[f32]) {
    rule.apply(gate, up);
}
