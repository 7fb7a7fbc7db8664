//! AVX-512: 16 outputs per vector; byte products through VNNI, or through 16-bit sums where that is missing.

#![allow(unsafe_code)] // kernel

use std::arch::x86_64::*;

use super::simd::{Rows, Simd, intrinsics};

/// Proof of AVX-512 F, BW, VL and DQ.
#[derive(Clone, Copy)]
pub struct Avx512(());

/// Proof of AVX-512 F, BW, VL, DQ and VNNI.
#[derive(Clone, Copy)]
pub struct Avx512Vnni(Avx512);

impl Avx512 {
    /// Safe, because only functions that have the instructions can call it safely.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    #[inline]
    pub fn new() -> Self {
        Avx512(())
    }

    intrinsics! {
        fn interleave32(self, a: __m512i, b: __m512i) -> [__m512i; 2]
            = [_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)];
        fn interleave64(self, a: __m512i, b: __m512i) -> [__m512i; 2]
            = [_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b)];
        fn join(self, a: __m512i, b: __m512i) -> [__m512i; 2]
            = [_mm512_shuffle_i64x2::<0b10_00_10_00>(a, b), _mm512_shuffle_i64x2::<0b11_01_11_01>(a, b)];
        fn maddubs(self, unsigned: __m512i, signed: i32) -> __m512i
            = _mm512_maddubs_epi16(unsigned, _mm512_set1_epi32(signed));
        fn add16(self, a: __m512i, b: __m512i) -> __m512i = _mm512_add_epi16(a, b);
        fn madd(self, a: __m512i, b: __m512i) -> __m512i = _mm512_madd_epi16(a, b);
        fn splat16(self, v: i16) -> __m512i = _mm512_set1_epi16(v);
        fn half16(self, v: [u16; 16]) -> __m512 = _mm512_cvtph_ps(std::mem::transmute::<[u16; 16], __m256i>(v));
    }

    /// Transposes 4 x 4 lanes within each 128 bits.
    #[inline(always)]
    fn quad(self, z: [__m512i; 4]) -> [__m512i; 4] {
        let ([a, c], [b, d]) = (self.interleave32(z[0], z[1]), self.interleave32(z[2], z[3]));
        let ([k0, k1], [k2, k3]) = (self.interleave64(a, b), self.interleave64(c, d));
        [k0, k1, k2, k3]
    }

    /// Sums of products of two neighbours, over 32 columns: 8 * 2 * 15 * 127 = 30480 fits 16 bits.
    #[inline(always)]
    fn sum16(self, w: &[__m512i; 8], x: &[i32; 8]) -> __m512i {
        let mut sum = self.maddubs(w[0], x[0]);
        for k in 1..8 {
            sum = self.add16(sum, self.maddubs(w[k], x[k]));
        }
        sum
    }
}

impl Avx512Vnni {
    /// Safe, because only functions that have the instructions can call it safely.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    pub fn new() -> Self {
        Avx512Vnni(Avx512::new())
    }

    intrinsics! {
        fn dpbusd(self, sum: __m512i, unsigned: __m512i, signed: i32) -> __m512i
            = _mm512_dpbusd_epi32(sum, unsigned, _mm512_set1_epi32(signed));
    }

    #[inline(always)]
    fn dot(self, init: i32, w: &[__m512i; 8], x: &[i32; 8]) -> __m512i {
        // Two chains: one of 8 would take longer than the work of four rows, which is all that the CPU looks ahead.
        let (mut even, mut odd) = (self.splat(init), self.splat(0));
        for k in [0, 2, 4, 6] {
            even = self.dpbusd(even, w[k], x[k]);
            odd = self.dpbusd(odd, w[k + 1], x[k + 1]);
        }
        self.0.add(even, odd)
    }
}

impl Simd for Avx512 {
    type I = __m512i;
    type F = __m512;
    type Bytes = [[__m512i; 8]; 2];
    /// As pairs of I16: first and first, second and second, first and second.
    type Scales = [__m512i; 3];

    const LANES: usize = 16;

    #[inline(always)]
    unsafe fn transpose32(self, rows: &Rows, at: usize) -> [__m512i; 8] {
        let mut z = [self.splat(0); 8];
        for (i, row) in [0, 1, 2, 3, 8, 9, 10, 11].into_iter().enumerate() {
            // SAFETY: 32 bytes of this row from `at` on are readable (contract); `self` proves the instruction.
            let low = unsafe { _mm256_loadu_si256(rows[row].add(at).cast()) };
            // SAFETY: as above, of the row four further on.
            let high = unsafe { _mm256_loadu_si256(rows[row + 4].add(at).cast()) };
            // SAFETY: `self` proves the instruction.
            z[i] = unsafe { _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high) };
        }
        let (a, b) = (self.quad([z[0], z[1], z[2], z[3]]), self.quad([z[4], z[5], z[6], z[7]]));
        for k in 0..4 {
            [z[k], z[4 + k]] = self.join(a[k], b[k]);
        }
        z
    }

    #[inline(always)]
    unsafe fn transpose16(self, rows: &Rows, at: usize) -> [__m512i; 4] {
        let mut z = [self.splat(0); 4];
        for i in 0..4 {
            let mut lanes = [std::ptr::null(); 4];
            for (lane, p) in lanes.iter_mut().enumerate() {
                // SAFETY: 16 bytes of this row from `at` on are readable (contract), so the start is within it.
                *p = unsafe { rows[i + 4 * lane].add(at) };
            }
            // SAFETY: 16 bytes from each of the four starts are readable (contract); `self` proves the instructions.
            z[i] = unsafe {
                let (v0, v1) = (_mm_loadu_si128(lanes[0].cast()), _mm_loadu_si128(lanes[1].cast()));
                let (v2, v3) = (_mm_loadu_si128(lanes[2].cast()), _mm_loadu_si128(lanes[3].cast()));
                let v = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(v0), v1);
                _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(v, v2), v3)
            };
        }
        self.quad(z)
    }

    #[inline(always)]
    unsafe fn halves(self, rows: &Rows, at: usize) -> __m512 {
        let mut v = [0u16; 16];
        for i in 0..16 {
            // SAFETY: two bytes from `at` on are readable (contract).
            v[i] = unsafe { rows[i].add(at).cast::<u16>().read_unaligned() };
        }
        self.half16(v)
    }

    intrinsics! {
        fn low_halves(self, v: __m512i) -> __m512 = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v));
        fn splat(self, v: i32) -> __m512i = _mm512_set1_epi32(v);
        fn add(self, a: __m512i, b: __m512i) -> __m512i = _mm512_add_epi32(a, b);
        fn and(self, a: __m512i, b: __m512i) -> __m512i = _mm512_and_si512(a, b);
        fn or(self, a: __m512i, b: __m512i) -> __m512i = _mm512_or_si512(a, b);
        fn xor(self, a: __m512i, b: __m512i) -> __m512i = _mm512_xor_si512(a, b);
        fn shl(self, v: __m512i, bits: u32) -> __m512i = _mm512_sllv_epi32(v, _mm512_set1_epi32(bits as i32));
        fn shr(self, v: __m512i, bits: u32) -> __m512i = _mm512_srlv_epi32(v, _mm512_set1_epi32(bits as i32));
        fn sar(self, v: __m512i, bits: u32) -> __m512i = _mm512_srav_epi32(v, _mm512_set1_epi32(bits as i32));
        fn to_f32(self, v: __m512i) -> __m512 = _mm512_cvtepi32_ps(v);
        fn splat_f32(self, v: f32) -> __m512 = _mm512_set1_ps(v);
        fn mul(self, a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        fn fnma(self, a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fnmadd_ps(a, b, c);
    }

    #[inline(always)]
    fn load(self, from: &[f32]) -> __m512 {
        let from = &from[..16];
        // SAFETY: `from` has 16 floats; `self` proves the instruction.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, v: __m512, to: &mut [f32]) {
        let to = &mut to[..16];
        // SAFETY: `to` has 16 floats; `self` proves the instruction.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), v) }
    }

    #[inline(always)]
    fn nibbles(self, v: [__m512i; 8]) -> [[__m512i; 8]; 2] {
        let (mut low, mut high, mask) = (v, v, self.splat(0x0f0f_0f0f));
        for k in 0..8 {
            low[k] = self.and(v[k], mask);
            high[k] = self.and(self.shr(v[k], 4), mask);
        }
        [low, high]
    }

    #[inline(always)]
    fn dot_low(self, w: &[__m512i; 8], x: &[i32; 8]) -> __m512i {
        self.madd(self.sum16(w, x), self.splat16(1))
    }

    #[inline(always)]
    fn dot_high(self, w: &[__m512i; 8], x: &[i32; 8]) -> __m512i {
        self.madd(self.sum16(w, x), self.splat16(16))
    }

    /// A byte is two nibbles: 16-bit sums of whole bytes would overflow.
    #[inline(always)]
    fn bytes(self, v: [__m512i; 8]) -> Self::Bytes {
        self.nibbles(v)
    }

    #[inline(always)]
    fn dot_bytes(self, w: &Self::Bytes, x: &[i32; 8], init: i32) -> __m512i {
        self.add(self.add(self.dot_low(&w[0], x), self.dot_high(&w[1], x)), self.splat(init))
    }

    #[inline(always)]
    fn scales(self, first: __m512i, second: __m512i) -> Self::Scales {
        let mask = self.splat(0xffff);
        let (first, second) = (self.and(first, mask), self.and(second, mask));
        let (first_high, second_high) = (self.shl(first, 16), self.shl(second, 16));
        [self.or(first, first_high), self.or(second, second_high), self.or(first, second_high)]
    }

    #[inline(always)]
    fn dot_q6(self, w: &[__m512i; 8], by: &Self::Scales, x: &[i32; 8], _sums: [i32; 2], pair: i32) -> __m512 {
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

/// Methods that are the same without VNNI.
macro_rules! inherit {
    ($(fn $name:ident(self $(, $arg:ident: $ty:ty)*) -> $ret:ty;)*) => { $(
        #[inline(always)]
        fn $name(self $(, $arg: $ty)*) -> $ret {
            self.0.$name($($arg),*)
        }
    )* };
}

impl Simd for Avx512Vnni {
    type I = __m512i;
    type F = __m512;
    type Bytes = [__m512i; 8];
    type Scales = [__m512; 2];

    const LANES: usize = 16;

    #[inline(always)]
    unsafe fn transpose32(self, rows: &Rows, at: usize) -> [__m512i; 8] {
        // SAFETY: the same contract.
        unsafe { self.0.transpose32(rows, at) }
    }

    #[inline(always)]
    unsafe fn transpose16(self, rows: &Rows, at: usize) -> [__m512i; 4] {
        // SAFETY: the same contract.
        unsafe { self.0.transpose16(rows, at) }
    }

    #[inline(always)]
    unsafe fn halves(self, rows: &Rows, at: usize) -> __m512 {
        // SAFETY: the same contract.
        unsafe { self.0.halves(rows, at) }
    }

    inherit! {
        fn low_halves(self, v: __m512i) -> __m512;
        fn splat(self, v: i32) -> __m512i;
        fn add(self, a: __m512i, b: __m512i) -> __m512i;
        fn and(self, a: __m512i, b: __m512i) -> __m512i;
        fn or(self, a: __m512i, b: __m512i) -> __m512i;
        fn xor(self, a: __m512i, b: __m512i) -> __m512i;
        fn shl(self, v: __m512i, bits: u32) -> __m512i;
        fn shr(self, v: __m512i, bits: u32) -> __m512i;
        fn sar(self, v: __m512i, bits: u32) -> __m512i;
        fn to_f32(self, v: __m512i) -> __m512;
        fn splat_f32(self, v: f32) -> __m512;
        fn mul(self, a: __m512, b: __m512) -> __m512;
        fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512;
        fn fnma(self, a: __m512, b: __m512, c: __m512) -> __m512;
        fn load(self, from: &[f32]) -> __m512;
        fn store(self, v: __m512, to: &mut [f32]) -> ();
    }

    /// The high nibbles stay where they are: the product is 16 times as large by itself.
    #[inline(always)]
    fn nibbles(self, v: [__m512i; 8]) -> [[__m512i; 8]; 2] {
        let (mut low, mut high, mask) = (v, v, self.splat(0x0f0f_0f0f));
        for k in 0..8 {
            low[k] = self.and(v[k], mask);
            high[k] = self.xor(v[k], low[k]);
        }
        [low, high]
    }

    #[inline(always)]
    fn dot_low(self, w: &[__m512i; 8], x: &[i32; 8]) -> __m512i {
        self.dot(0, w, x)
    }

    #[inline(always)]
    fn dot_high(self, w: &[__m512i; 8], x: &[i32; 8]) -> __m512i {
        self.dot(0, w, x)
    }

    #[inline(always)]
    fn bytes(self, v: [__m512i; 8]) -> Self::Bytes {
        v
    }

    #[inline(always)]
    fn dot_bytes(self, w: &Self::Bytes, x: &[i32; 8], init: i32) -> __m512i {
        self.dot(init, w, x)
    }

    #[inline(always)]
    fn scales(self, first: __m512i, second: __m512i) -> Self::Scales {
        [self.to_f32(first), self.to_f32(second)]
    }

    #[inline(always)]
    fn dot_q6(self, w: &[__m512i; 8], by: &Self::Scales, x: &[i32; 8], sums: [i32; 2], _pair: i32) -> __m512 {
        let mut half = [self.splat(sums[0]), self.splat(sums[1])];
        for k in 0..4 {
            half[0] = self.dpbusd(half[0], w[k], x[k]);
            half[1] = self.dpbusd(half[1], w[4 + k], x[4 + k]);
        }
        self.fma(self.to_f32(half[1]), by[1], self.mul(self.to_f32(half[0]), by[0]))
    }
}
