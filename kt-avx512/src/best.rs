//! The choice between the two kernels.

use std::ops::Range;

use kt_core::activation::Activation;
use kt_core::cpu::input::{InputLayout, Inputs};
use kt_core::cpu::kernel::{Kernel, Scratch, Weights};
use kt_core::cpu::tier::Tier;
use kt_core::{Format, Matrix, Unsupported};

use crate::{Avx2, Avx512};

/// One of this crate's kernels: AVX-512 where the CPU has it, else AVX2. Weights are packed the same for both.
#[derive(Debug, Clone, Copy)]
pub enum Avx {
    /// 256-bit registers.
    Avx2(Avx2),
    /// 512-bit registers.
    Avx512(Avx512),
}

impl Avx {
    /// The best kernel for the instructions that this CPU has, up to `cap`.
    ///
    /// # Errors
    /// The CPU features that are missing, or that `cap` is below AVX2.
    pub fn detect(cap: Tier) -> Result<Self, Unsupported> {
        Avx512::detect(cap).map(Avx::Avx512).or_else(|_| Avx2::detect(cap).map(Avx::Avx2))
    }
}

/// The same call to whichever kernel it is.
macro_rules! delegate {
    ($self:ident, $kernel:ident => $call:expr) => {
        match $self {
            Avx::Avx2($kernel) => $call,
            Avx::Avx512($kernel) => $call,
        }
    };
}

impl Kernel for Avx {
    fn tier(self) -> Tier {
        delegate!(self, k => k.tier())
    }

    fn accepts(self, format: Format, rows: usize, cols: usize) -> Result<(InputLayout, &'static str), Unsupported> {
        delegate!(self, k => k.accepts(format, rows, cols))
    }

    fn packed_bytes(self, format: Format, rows: usize, cols: usize) -> Option<usize> {
        delegate!(self, k => k.packed_bytes(format, rows, cols))
    }

    fn pack(self, matrix: &Matrix, out: &mut [u8]) {
        delegate!(self, k => k.pack(matrix, out));
    }

    fn pack_input(self, layout: InputLayout, x: &[f32], out: &mut [u8]) {
        delegate!(self, k => k.pack_input(layout, x, out));
    }

    fn activate(self, rule: Activation, gate: &mut [f32], up: &[f32]) {
        delegate!(self, k => k.activate(rule, gate, up));
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
        delegate!(self, k => k.product(weights, outputs, inputs, rows, out, scratch));
    }
}
