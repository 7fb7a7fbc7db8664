//! The few vector operations that the products are written in, once for each instruction set.
//!
//! A value of a `Simd` type proves that its instructions exist, so all but the loads from weights are safe. Everything is
//! `#[inline(always)]`: the instructions take effect in the `#[target_feature]` function at the top of the call tree.

#![allow(unsafe_code)] // kernel

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

/// Where the rows of a panel begin; the first [`Simd::LANES`] count. A panel past the last output repeats that output.
pub type Rows = [*const u8; 16];

/// Asks for the cache lines of `bytes` bytes at `at`, which need not be readable. Into level 2: what is asked for ahead is
/// as large as level 1, and asking for level 1 ran at half the speed (Zen 4).
#[inline(always)]
pub fn prefetch(at: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(64) {
        // SAFETY: a hint, which never faults; part of every x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(line).cast()) };
    }
}

/// Vectors with one 32-bit lane per output.
pub trait Simd: Copy {
    /// A vector of integers; in products also 4 bytes, or 2 halves, per lane.
    type I: Copy;
    /// A vector of floats.
    type F: Copy;
    /// 32 columns of bytes with offset 128, ready for [`Simd::dot_bytes`].
    type Bytes: Copy;
    /// The two scales of each output in 32 columns of Q6_K, ready for [`Simd::dot_q6`].
    type Scales: Copy;

    /// Outputs per vector.
    const LANES: usize;

    /// 32 bytes of each row from byte `at` on, transposed: line `k` has bytes `4k..4k + 4` of each row.
    ///
    /// # Safety
    /// Those bytes must be readable.
    unsafe fn transpose32(self, rows: &Rows, at: usize) -> [Self::I; 8];
    /// As [`Simd::transpose32`] for 16 bytes.
    ///
    /// # Safety
    /// Those bytes must be readable.
    unsafe fn transpose16(self, rows: &Rows, at: usize) -> [Self::I; 4];
    /// The F16 at byte `at` of each row.
    ///
    /// # Safety
    /// Those two bytes must be readable.
    unsafe fn halves(self, rows: &Rows, at: usize) -> Self::F;
    /// The F16 in the low half of each lane.
    fn low_halves(self, v: Self::I) -> Self::F;

    /// `v` in each lane.
    fn splat(self, v: i32) -> Self::I;
    /// `a + b`, as integers.
    fn add(self, a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise and.
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise or.
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise exclusive or.
    fn xor(self, a: Self::I, b: Self::I) -> Self::I;
    /// Lanes shifted left.
    fn shl(self, v: Self::I, bits: u32) -> Self::I;
    /// Lanes shifted right, filling with zeros.
    fn shr(self, v: Self::I, bits: u32) -> Self::I;
    /// Lanes shifted right, filling with the sign.
    fn sar(self, v: Self::I, bits: u32) -> Self::I;

    /// Integers to floats.
    fn to_f32(self, v: Self::I) -> Self::F;
    /// `v` in each lane.
    fn splat_f32(self, v: f32) -> Self::F;
    /// `a * b`.
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `c - a * b`, rounded once.
    fn fnma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The first [`Simd::LANES`] floats.
    fn load(self, from: &[f32]) -> Self::F;
    /// Into the first [`Simd::LANES`] floats.
    fn store(self, v: Self::F, to: &mut [f32]);

    /// Low and high nibbles of each byte, as [`Simd::dot_low`] and [`Simd::dot_high`] want them.
    fn nibbles(self, v: [Self::I; 8]) -> [[Self::I; 8]; 2];
    /// `sum(nibble * x)` over 32 columns.
    fn dot_low(self, w: &[Self::I; 8], x: &[i32; 8]) -> Self::I;
    /// `16 * sum(nibble * x)` over 32 columns.
    fn dot_high(self, w: &[Self::I; 8], x: &[i32; 8]) -> Self::I;

    /// Takes bytes with offset 128.
    fn bytes(self, v: [Self::I; 8]) -> Self::Bytes;
    /// `init + sum(byte * x)` over 32 columns.
    fn dot_bytes(self, w: &Self::Bytes, x: &[i32; 8], init: i32) -> Self::I;

    /// Takes the scales (-128..=127) of columns `0..16` and `16..32`.
    fn scales(self, first: Self::I, second: Self::I) -> Self::Scales;
    /// `first * sum((w - 32) * x)` over the first 16 columns plus `second` times that over the others, for codes below 64.
    ///
    /// `sums` are `-32 *` the sums of `x` over each half, `pair` has `-16 *` those sums as two I16. All sums are below 2^24
    /// (128 * 32 * 127 * 32 < 2^24), so that the float is exact whichever way it is computed.
    fn dot_q6(self, w: &[Self::I; 8], by: &Self::Scales, x: &[i32; 8], sums: [i32; 2], pair: i32) -> Self::F;
}

/// Defines methods that are single expressions of intrinsics.
macro_rules! intrinsics {
    ($(fn $name:ident(self $(, $arg:ident: $ty:ty)*) -> $ret:ty = $body:expr;)*) => { $(
        #[inline(always)]
        fn $name(self $(, $arg: $ty)*) -> $ret {
            // SAFETY: only intrinsics on values, and `self` proves that the instructions exist.
            unsafe { $body }
        }
    )* };
}
pub(super) use intrinsics;
