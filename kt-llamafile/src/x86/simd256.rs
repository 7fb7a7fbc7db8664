//! AVX2: 8 outputs per vector, byte products through 16-bit sums.

#![allow(unsafe_code)] // kernel

use std::arch::x86_64::*;

use super::simd::{Rows, Simd, intrinsics};

/// Proof of AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub struct Avx2(());

impl Avx2 {
    /// Safe, because only functions that have the instructions can call it safely.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    pub fn new() -> Self {
        Avx2(())
    }

    intrinsics! {
        fn interleave32(self, a: __m256i, b: __m256i) -> [__m256i; 2]
            = [_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)];
        fn interleave64(self, a: __m256i, b: __m256i) -> [__m256i; 2]
            = [_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b)];
        fn join(self, a: __m256i, b: __m256i) -> [__m256i; 2]
            = [_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b)];
        fn maddubs(self, unsigned: __m256i, signed: i32) -> __m256i
            = _mm256_maddubs_epi16(unsigned, _mm256_set1_epi32(signed));
        fn add16(self, a: __m256i, b: __m256i) -> __m256i = _mm256_add_epi16(a, b);
        fn madd(self, a: __m256i, b: __m256i) -> __m256i = _mm256_madd_epi16(a, b);
        fn splat16(self, v: i16) -> __m256i = _mm256_set1_epi16(v);
        fn half8(self, v: [u16; 8]) -> __m256 = _mm256_cvtph_ps(std::mem::transmute::<[u16; 8], __m128i>(v));
    }

    /// Transposes 4 x 4 lanes within each 128 bits.
    #[inline(always)]
    fn quad(self, z: [__m256i; 4]) -> [__m256i; 4] {
        let ([a, c], [b, d]) = (self.interleave32(z[0], z[1]), self.interleave32(z[2], z[3]));
        let ([k0, k1], [k2, k3]) = (self.interleave64(a, b), self.interleave64(c, d));
        [k0, k1, k2, k3]
    }

    /// Sums of products of two neighbours, over 32 columns: 8 * 2 * 15 * 127 = 30480 fits 16 bits.
    #[inline(always)]
    fn sum16(self, w: &[__m256i; 8], x: &[i32; 8]) -> __m256i {
        let mut sum = self.maddubs(w[0], x[0]);
        for k in 1..8 {
            sum = self.add16(sum, self.maddubs(w[k], x[k]));
        }
        sum
    }
}

impl Simd for Avx2 {
    type I = __m256i;
    type F = __m256;
    type Bytes = [[__m256i; 8]; 2];
    /// As pairs of I16: first and first, second and second, first and second.
    type Scales = [__m256i; 3];

    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn transpose32(self, rows: &Rows, at: usize) -> [__m256i; 8] {
        let mut z = [self.splat(0); 8];
        for i in 0..8 {
            // SAFETY: 32 bytes from `at` on are readable (contract); `self` proves the instruction.
            z[i] = unsafe { _mm256_loadu_si256(rows[i].add(at).cast()) };
        }
        let (a, b) = (self.quad([z[0], z[1], z[2], z[3]]), self.quad([z[4], z[5], z[6], z[7]]));
        for k in 0..4 {
            [z[k], z[4 + k]] = self.join(a[k], b[k]);
        }
        z
    }

    #[inline(always)]
    unsafe fn transpose16(self, rows: &Rows, at: usize) -> [__m256i; 4] {
        let mut z = [self.splat(0); 4];
        for i in 0..4 {
            // SAFETY: 16 bytes from `at` on are readable (contract); `self` proves the instruction.
            z[i] = unsafe { _mm256_loadu2_m128i(rows[4 + i].add(at).cast(), rows[i].add(at).cast()) };
        }
        self.quad(z)
    }

    #[inline(always)]
    unsafe fn halves(self, rows: &Rows, at: usize) -> __m256 {
        let mut v = [0u16; 8];
        for i in 0..8 {
            // SAFETY: two bytes from `at` on are readable (contract).
            v[i] = unsafe { rows[i].add(at).cast::<u16>().read_unaligned() };
        }
        self.half8(v)
    }

    intrinsics! {
        fn low_halves(self, v: __m256i) -> __m256 = {
            let low = _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
            let packed = _mm256_permute4x64_epi64::<0b10_00>(_mm256_packus_epi32(low, low));
            _mm256_cvtph_ps(_mm256_castsi256_si128(packed))
        };
        fn splat(self, v: i32) -> __m256i = _mm256_set1_epi32(v);
        fn add(self, a: __m256i, b: __m256i) -> __m256i = _mm256_add_epi32(a, b);
        fn and(self, a: __m256i, b: __m256i) -> __m256i = _mm256_and_si256(a, b);
        fn or(self, a: __m256i, b: __m256i) -> __m256i = _mm256_or_si256(a, b);
        fn xor(self, a: __m256i, b: __m256i) -> __m256i = _mm256_xor_si256(a, b);
        fn shl(self, v: __m256i, bits: u32) -> __m256i = _mm256_sllv_epi32(v, _mm256_set1_epi32(bits as i32));
        fn shr(self, v: __m256i, bits: u32) -> __m256i = _mm256_srlv_epi32(v, _mm256_set1_epi32(bits as i32));
        fn sar(self, v: __m256i, bits: u32) -> __m256i = _mm256_srav_epi32(v, _mm256_set1_epi32(bits as i32));
        fn to_f32(self, v: __m256i) -> __m256 = _mm256_cvtepi32_ps(v);
        fn splat_f32(self, v: f32) -> __m256 = _mm256_set1_ps(v);
        fn mul(self, a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
        fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        fn fnma(self, a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fnmadd_ps(a, b, c);
    }

    #[inline(always)]
    fn load(self, from: &[f32]) -> __m256 {
        let from = &from[..8];
        // SAFETY: `from` has 8 floats; `self` proves the instruction.
        unsafe { _mm256_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, v: __m256, to: &mut [f32]) {
        let to = &mut to[..8];
        // SAFETY: `to` has 8 floats; `self` proves the instruction.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), v) }
    }

    #[inline(always)]
    fn nibbles(self, v: [__m256i; 8]) -> [[__m256i; 8]; 2] {
        let (mut low, mut high, mask) = (v, v, self.splat(0x0f0f_0f0f));
        for k in 0..8 {
            low[k] = self.and(v[k], mask);
            high[k] = self.and(self.shr(v[k], 4), mask);
        }
        [low, high]
    }

    #[inline(always)]
    fn dot_low(self, w: &[__m256i; 8], x: &[i32; 8]) -> __m256i {
        self.madd(self.sum16(w, x), self.splat16(1))
    }

    #[inline(always)]
    fn dot_high(self, w: &[__m256i; 8], x: &[i32; 8]) -> __m256i {
        self.madd(self.sum16(w, x), self.splat16(16))
    }

    /// A byte is two nibbles: 16-bit sums of whole bytes would overflow.
    #[inline(always)]
    fn bytes(self, v: [__m256i; 8]) -> Self::Bytes {
        self.nibbles(v)
    }

    #[inline(always)]
    fn dot_bytes(self, w: &Self::Bytes, x: &[i32; 8], init: i32) -> __m256i {
        self.add(self.add(self.dot_low(&w[0], x), self.dot_high(&w[1], x)), self.splat(init))
    }

    #[inline(always)]
    fn scales(self, first: __m256i, second: __m256i) -> Self::Scales {
        let low = |v| self.and(v, self.splat(0xffff));
        let (first, second) = (low(first), low(second));
        let high = |v| self.shl(v, 16);
        [self.or(first, high(first)), self.or(second, high(second)), self.or(first, high(second))]
    }

    #[inline(always)]
    fn dot_q6(self, w: &[__m256i; 8], by: &Self::Scales, x: &[i32; 8], _sums: [i32; 2], pair: i32) -> __m256 {
        let offset = self.madd(by[2], self.splat(pair));
        let mut sum = self.add(offset, offset);
        for k in [0, 2, 4, 6] {
            // 2 * 2 * 63 * 127 = 32004 fits 16 bits.
            let two = self.add16(self.maddubs(w[k], x[k]), self.maddubs(w[k + 1], x[k + 1]));
            sum = self.add(sum, self.madd(two, by[k / 4]));
        }
        self.to_f32(sum)
    }
}
