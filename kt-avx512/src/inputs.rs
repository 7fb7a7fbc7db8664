//! Rounding of input rows to int8: the numbers of [`kt_core::cpu::input::pack_block`], bit for bit, in vector operations.

#![allow(unsafe_code)] // kernel

use kt_core::cpu::input::{self, BLOCK, InputLayout, Sums, TOPS, WORTH};

use crate::isa::{Isa, Job};

/// Lanes of a register.
const LANES: usize = 16;

/// Packs up to a block of columns.
pub(crate) struct PackInput<'a> {
    pub layout: InputLayout,
    pub x: &'a [f32],
    pub out: &'a mut [u8],
}

impl Job for PackInput<'_> {
    #[inline(always)]
    fn go<I: Isa>(self, isa: I) {
        let InputLayout::Int8 { group, sums } = self.layout else {
            return input::pack_block(self.layout, self.x, self.out);
        };
        assert!(self.out.len() == self.layout.block_bytes());
        let mut padded = [0f32; BLOCK];
        let x: &[f32; BLOCK] = match self.x.try_into() {
            Ok(x) => x,
            Err(_) => {
                padded[..self.x.len()].copy_from_slice(self.x);
                &padded
            }
        };
        match group {
            16 => groups::<I, 16>(isa, x, sums, self.out),
            32 => groups::<I, 32>(isa, x, sums, self.out),
            BLOCK => groups::<I, BLOCK>(isa, x, sums, self.out),
            _ => input::pack_block(self.layout, x, self.out),
        }
    }
}

/// Register `i` of a slice.
#[inline(always)]
fn load<I: Isa>(isa: I, x: &[f32], i: usize) -> I::Flt {
    let x = &x[i * LANES..][..LANES];
    // SAFETY: 16 numbers.
    isa.as_f32(unsafe { isa.load(x.as_ptr().cast()) })
}

/// Packs a block in groups of `G` columns.
#[inline(always)]
fn groups<I: Isa, const G: usize>(isa: I, x: &[f32; BLOCK], kept: Sums, out: &mut [u8]) {
    let (codes, rest) = out.split_at_mut(BLOCK);
    let (scales, sums) = rest.split_at_mut(BLOCK / G * 4);
    for g in 0..BLOCK / G {
        let (x, codes) = (&x[g * G..][..G], &mut codes[g * G..][..G]);
        let mut largest = isa.splat(0);
        for i in 0..G / LANES {
            largest = isa.max(largest, isa.as_int(isa.abs(load(isa, x, i))));
        }
        let amax = f32::from_bits(isa.largest(largest));
        let inverse = 1.0 / amax;
        if !amax.is_finite() || !(inverse * TOPS[0]).is_finite() {
            codes.fill(0);
            let scale: f32 = if amax.is_finite() { 0.0 } else { f32::NAN };
            sums[g * 4..][..4].copy_from_slice(&kept.bytes(0, scale));
            scales[g * 4..][..4].copy_from_slice(&scale.to_le_bytes());
            continue;
        }
        let mut errors = [isa.zero(); TOPS.len()];
        for (errors, top) in errors.iter_mut().zip(TOPS) {
            let up = isa.splat_f32(inverse * top);
            for i in 0..G / LANES {
                let e = isa.fraction(isa.mul(load(isa, x, i), up));
                *errors = isa.mul_add(e, e, *errors);
            }
        }
        // No branch: which of them is best is chance.
        let top = TOPS[isa.least_sum(errors, WORTH)];
        let up = isa.splat_f32(inverse * top);
        let scale = amax / top;
        scales[g * 4..][..4].copy_from_slice(&scale.to_le_bytes());
        let mut rounded = isa.splat(0);
        for (i, codes) in codes.chunks_exact_mut(LANES).enumerate() {
            let v = isa.rounded(isa.mul(load(isa, x, i), up));
            // SAFETY: 16 bytes.
            unsafe { isa.store_i8(codes.as_mut_ptr(), v) };
            rounded = isa.add(rounded, v);
        }
        let total = isa.sum(rounded);
        sums[g * 4..][..4].copy_from_slice(&kept.bytes(total, scale));
    }
}
