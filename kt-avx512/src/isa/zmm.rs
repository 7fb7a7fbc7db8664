//! Tiers with 512-bit registers.

#![allow(unsafe_code)] // kernel

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::{Bits, Grid, Isa, fp8_bits, largest8, least_sum8, load_points, ops, run_with, same_code, sum8, token};
use crate::dots::LinesAt;
use crate::lines::{Codes, Floats};
use crate::tile::Tile;
use crate::tiled::{Streamed, StreamedInts, TileProduct, TileUnit};
use crate::words::Kind;
use crate::words::full::{Memory, Unit};

token!(
    /// AVX-512 F, BW, VL, DQ.
    Plain, "avx512"
);
token!(
    /// and VNNI.
    Vnni, "avx512vnni"
);
token!(
    /// and BF16 and VBMI.
    Bf16, "avx512bf16"
);
token!(
    /// The same where F32 products are faster than those of BF16.
    Vbmi, "avx512bf16"
);

/// The first `n` of 16 lanes.
#[inline(always)]
fn first(n: usize) -> u16 {
    if n >= 16 { 0xffff } else { (1 << n) - 1 }
}

/// What all tiers have in common.
macro_rules! common {
    () => {
        type Int = __m512i;
        type Flt = __m512;
        const LARGE: bool = true;
        const FP8_UP: f32 = FP8_UP;
        const FP8_NORMAL: bool = true;

        #[inline(always)]
        unsafe fn mul_add_lines<const PAIRS: bool, const R: usize, const P: usize>(
            self,
            sums: &mut [[__m512; P]; R],
            at: LinesAt,
        ) {
            // SAFETY: `self` proves AVX-512 F; what is read is so by the caller's promise.
            unsafe { if PAIRS { crate::dots::pairs::<R, P>(sums, at) } else { crate::dots::floats::<R, P>(sums, at) } }
        }

        #[inline(always)]
        unsafe fn load(self, p: *const u8) -> __m512i {
            // SAFETY: readable by the caller's promise; unaligned is fine.
            unsafe { _mm512_loadu_si512(p.cast()) }
        }

        #[inline(always)]
        unsafe fn store(self, p: *mut u8, v: __m512i) {
            // SAFETY: writable by the caller's promise; unaligned is fine.
            unsafe { _mm512_storeu_si512(p.cast(), v) }
        }

        #[inline(always)]
        unsafe fn load_dword(self, p: *const u8) -> __m512i {
            // SAFETY: readable by the caller's promise.
            let v = unsafe { p.cast::<i32>().read_unaligned() };
            self.splat(v)
        }

        #[inline(always)]
        unsafe fn load_f32(self, p: *const u8) -> __m512 {
            // SAFETY: readable by the caller's promise.
            self.as_f32(unsafe { self.load_dword(p) })
        }

        #[inline(always)]
        unsafe fn load_f16(self, p: *const u8) -> __m512 {
            // SAFETY: readable by the caller's promise, and `self` proves AVX-512 F.
            unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
        }

        #[inline(always)]
        unsafe fn load_u8(self, p: *const u8) -> __m512i {
            // SAFETY: readable by the caller's promise, and `self` proves AVX-512 F.
            unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())) }
        }

        #[inline(always)]
        unsafe fn load_u8_words(self, p: *const u8) -> __m512i {
            // SAFETY: readable by the caller's promise, and `self` proves AVX-512 BW.
            unsafe { _mm512_cvtepu8_epi16(_mm256_loadu_si256(p.cast())) }
        }

        #[inline(always)]
        fn up<const N: u32>(self, v: __m512i) -> __m512i {
            // SAFETY: `self` proves AVX-512 F.
            unsafe { _mm512_slli_epi32::<N>(v) }
        }

        #[inline(always)]
        fn down<const N: u32>(self, v: __m512i) -> __m512i {
            // SAFETY: `self` proves AVX-512 F.
            unsafe { _mm512_srai_epi32::<N>(v) }
        }

        #[inline(always)]
        unsafe fn load_i8(self, p: *const u8) -> __m512i {
            // SAFETY: readable by the caller's promise, and `self` proves AVX-512 F.
            unsafe { _mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())) }
        }

        #[inline(always)]
        unsafe fn load_bit_pairs<const UP: u32>(self, p: *const u8) -> [__m512i; 2] {
            const { assert!(UP == 0 || UP == 3) };
            // SAFETY: readable by the caller's promise, and `self` proves AVX-512 F and BW.
            unsafe {
                let bits = _mm512_broadcast_i64x4(_mm256_loadu_si256(p.cast()));
                let two = _mm512_set1_epi8(3 << UP);
                // Counts for both halves of a line.
                let counts = |first: i64, second: i64| {
                    let [a, b] = [first, second].map(|count| count * 0x0001_0001_0001_0001);
                    _mm512_set_epi64(b, b, b, b, a, a, a, a)
                };
                let (a, b) = if UP == 0 {
                    (_mm512_srlv_epi16(bits, counts(0, 2)), _mm512_srlv_epi16(bits, counts(4, 6)))
                } else {
                    (_mm512_sllv_epi16(bits, counts(3, 1)), _mm512_srlv_epi16(bits, counts(1, 3)))
                };
                [_mm512_and_si512(a, two), _mm512_and_si512(b, two)]
            }
        }

        #[inline(always)]
        unsafe fn load_nibble_halves(self, p: *const u8) -> __m512i {
            // SAFETY: readable by the caller's promise, and `self` proves AVX-512 F.
            unsafe {
                let bytes = _mm512_broadcast_i64x4(_mm256_loadu_si256(p.cast()));
                _mm512_srlv_epi32(bytes, _mm512_set_epi32(4, 4, 4, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0))
            }
        }

        #[inline(always)]
        unsafe fn load_i16(self, p: *const u8) -> __m512i {
            // SAFETY: readable by the caller's promise, and `self` proves AVX-512 F.
            unsafe { _mm512_cvtepi16_epi32(_mm256_loadu_si256(p.cast())) }
        }

        #[inline(always)]
        unsafe fn load_e4m3(self, p: *const u8) -> __m512 {
            // SAFETY: readable by the caller's promise, and `self` proves AVX-512 F and AVX2. The sign is copied to bit 15, and once
            // more to bit 14, where it is masked off.
            unsafe {
                let words = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast())));
                _mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16(0xbf80_u16 as i16)))
            }
        }

        #[inline(always)]
        unsafe fn load_first(self, p: *const f32, n: usize) -> __m512 {
            // SAFETY: lanes beyond `n` are masked off and not touched.
            unsafe { _mm512_maskz_loadu_ps(first(n), p) }
        }

        #[inline(always)]
        unsafe fn store_first(self, p: *mut f32, n: usize, v: __m512) {
            // SAFETY: lanes beyond `n` are masked off and not touched.
            unsafe { _mm512_mask_storeu_ps(p, first(n), v) }
        }

        #[inline(always)]
        unsafe fn store_firsts(self, p: *mut u8, v: __m512i) {
            // SAFETY: writable by the caller's promise.
            unsafe { _mm_storeu_si128(p.cast(), _mm512_castsi512_si128(_mm512_maskz_compress_epi32(0x1111, v))) }
        }

        #[inline(always)]
        fn in_quarters<const ORDER: i32>(self, v: __m512i) -> __m512i {
            // SAFETY: `self` proves AVX-512 F.
            unsafe { _mm512_shuffle_epi32::<ORDER>(v) }
        }

        #[inline(always)]
        unsafe fn store_i8(self, p: *mut u8, v: __m512i) {
            // SAFETY: writable by the caller's promise, and `self` proves AVX-512 F.
            unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(v)) }
        }

        #[inline(always)]
        fn look_up<const COLS: usize, const LEN: usize>(
            self,
            grid: &Grid<COLS, LEN>,
            points: &[u16; 64],
        ) -> [__m512i; 4] {
            if const { LEN <= MOST_POINTS } {
                // SAFETY: `self` proves AVX-512 F and BW.
                return unsafe { look_up(grid, points) };
            }
            let mut codes = [self.splat(0); 4];
            for (i, codes) in codes.iter_mut().enumerate() {
                // SAFETY: `self` proves AVX-512 F and AVX2.
                unsafe {
                    let low = _mm512_castsi256_si512(load_points(grid, points, 2 * i));
                    *codes = _mm512_inserti64x4::<1>(low, load_points(grid, points, 2 * i + 1));
                }
            }
            codes
        }

        #[inline(always)]
        fn with_signs(self, codes: __m512i, how: Bits, bits: [u8; 8]) -> __m512i {
            // SAFETY: `self` proves AVX-512 F and BW.
            unsafe { with_signs(codes, how, bits) }
        }

        #[inline(always)]
        fn transpose(self, rows: [&[u8; 64]; 16], how: Bits, bits: [[u8; 8]; 16], lines: &mut [[u8; 64]; 16]) {
            // SAFETY: `self` proves AVX-512 F and BW.
            unsafe { transpose(rows, how, bits, lines) }
        }

        ops! {
            fn zero(self) -> __m512 { _mm512_setzero_ps() }
            fn splat(self, v: i32) -> __m512i { _mm512_set1_epi32(v) }
            fn as_f32(self, v: __m512i) -> __m512 { _mm512_castsi512_ps(v) }
            fn as_int(self, v: __m512) -> __m512i { _mm512_castps_si512(v) }
            fn to_f32(self, v: __m512i) -> __m512 { _mm512_cvtepi32_ps(v) }
            fn mul(self, a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
            fn div(self, a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
            fn quarters(self, v: [__m512; 4]) -> [__m512; 4] {{
                let [a, b, c, d] = v;
                let (ab, cd) = (_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0x44>(c, d));
                let (ab2, cd2) = (_mm512_shuffle_f32x4::<0xee>(a, b), _mm512_shuffle_f32x4::<0xee>(c, d));
                [
                    _mm512_shuffle_f32x4::<0x88>(ab, cd),
                    _mm512_shuffle_f32x4::<0xdd>(ab, cd),
                    _mm512_shuffle_f32x4::<0x88>(ab2, cd2),
                    _mm512_shuffle_f32x4::<0xdd>(ab2, cd2),
                ]
            }}
            fn sums_of_quarters(self, v: [__m512; 4]) -> __m512 {{
                // Lanes 2 apart, then 1.
                let [a, b, c, d] = [_mm512_castps_pd(v[0]), _mm512_castps_pd(v[1]), _mm512_castps_pd(v[2]), _mm512_castps_pd(v[3])];
                let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
                let ab = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
                let (low, high) = (_mm512_unpacklo_pd(c, d), _mm512_unpackhi_pd(c, d));
                let cd = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
                let even = _mm512_shuffle_ps::<0b10_00_10_00>(ab, cd);
                let odd = _mm512_shuffle_ps::<0b11_01_11_01>(ab, cd);
                _mm512_add_ps(even, odd)
            }}
            fn bytes(self, v: [__m512i; 4]) -> __m512i {
                _mm512_packs_epi16(_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3]))
            }
            fn mix_quarters(self, a: __m512i, b: __m512i) -> [__m512i; 2] {{
                let low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
                let high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
                [_mm512_permutex2var_epi64(a, low, b), _mm512_permutex2var_epi64(a, high, b)]
            }}
            fn add_f32(self, a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
            fn least(self, a: __m512, b: __m512) -> __m512 { _mm512_min_ps(a, b) }
            fn where_equal(self, a: __m512, b: __m512, v: __m512) -> __m512 { _mm512_maskz_mov_ps(_mm512_cmpeq_ps_mask(a, b), v) }
            fn sums_of_four(self, v: [__m512i; 4]) -> __m512i {{
                // Dwords 0 and 2, then 1 and 3 of both, by turns.
                let a = _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
                let b = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
                _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b))
            }}
            fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
            // By the exponent: that goes on the adders, the multipliers are left to products.
            fn power(self, v: __m512) -> __m512 { _mm512_getexp_ps(v) }
            fn times_power(self, v: __m512, power: __m512) -> __m512 { _mm512_scalef_ps(v, power) }
            fn splat_f32(self, v: f32) -> __m512 { _mm512_set1_ps(v) }
            fn add(self, a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
            fn max(self, a: __m512i, b: __m512i) -> __m512i { _mm512_max_epu32(a, b) }
            fn abs(self, v: __m512) -> __m512 { _mm512_abs_ps(v) }
            fn fraction(self, v: __m512) -> __m512 { _mm512_reduce_ps::<0>(v) }
            fn rounded(self, v: __m512) -> __m512i { _mm512_cvtps_epi32(v) }
            fn sum(self, v: __m512i) -> i32 {
                sum8(_mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64::<1>(v)))
            }
            fn least_sum(self, v: [__m512; 4], worth: [f32; 4]) -> usize {{
                let mut halves = [_mm256_setzero_ps(); 4];
                for (half, v) in halves.iter_mut().zip(v) {
                    *half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
                }
                least_sum8(halves, worth)
            }}
            fn largest(self, v: __m512i) -> u32 {
                largest8(_mm256_max_epu32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64::<1>(v)))
            }
            fn sub(self, a: __m512i, b: __m512i) -> __m512i { _mm512_sub_epi32(a, b) }
            fn and(self, a: __m512i, b: __m512i) -> __m512i { _mm512_and_si512(a, b) }
            fn xor(self, a: __m512i, b: __m512i) -> __m512i { _mm512_xor_si512(a, b) }
            fn words(self, high: __m512i, low: __m512i) -> __m512i {
                _mm512_mask_blend_epi16(0xaaaa_aaaa, low, _mm512_slli_epi32::<16>(high))
            }
            fn add_words(self, a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi16(a, b) }
            fn mul_words(self, a: __m512i, b: __m512i) -> __m512i { _mm512_mullo_epi16(a, b) }
            fn mul_words_high(self, a: __m512i, b: __m512i) -> __m512i { _mm512_mulhrs_epi16(a, b) }
            fn madd(self, a: __m512i, b: __m512i) -> __m512i { _mm512_madd_epi16(a, b) }
            fn exp2(self, v: __m512i) -> __m512 {
                _mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32::<23>(v), _mm512_set1_epi32(1 << 22)))
            }
            fn nibbles(self, v: __m512i) -> [__m512i; 2] {{
                let low = _mm512_set1_epi8(15);
                [_mm512_and_si512(v, low), _mm512_and_si512(_mm512_srli_epi16::<4>(v), low)]
            }}
            fn lookup(self, table: __m512i, v: __m512i) -> __m512i { _mm512_shuffle_epi8(table, v) }
            // Not on the ports that lookups in two registers share with products on some CPUs.
            fn fp8_shifted(self, codes: __m512i) -> [__m512i; 2] {{
                let zero = _mm512_setzero_si512();
                [fp8_bf16(_mm512_unpacklo_epi8(zero, codes)), fp8_bf16(_mm512_unpackhi_epi8(zero, codes))]
            }}
            fn f16_halves(self, v: __m512i) -> [__m512; 2] {
                [
                    _mm512_cvtph_ps(_mm512_castsi512_si256(v)),
                    _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(v)),
                ]
            }
        }
    };
}

/// The longest grid that is looked up in registers. Points of one twice as long are loaded one by one in less time.
const MOST_POINTS: usize = 1024;

/// The digits of 32 points; see [`Grid`].
///
/// # Safety
/// The CPU has AVX-512 F and BW.
#[inline(always)]
unsafe fn digits<const COLS: usize, const LEN: usize>(grid: &Grid<COLS, LEN>, points: __m512i) -> __m512i {
    const { assert!(LEN >= 256 && LEN.is_power_of_two()) };
    // SAFETY: lines of 32 words, and the instructions by the caller's promise.
    unsafe {
        // A lookup takes six bits of the place; the others choose among lookups.
        let bit = [6, 7, 8, 9, 10];
        let mut set = [0; 5];
        for (set, bit) in set.iter_mut().zip(bit) {
            *set = _mm512_test_epi16_mask(points, _mm512_set1_epi16(1 << bit));
        }
        let mut found = _mm512_setzero_si512();
        for i in 0..LEN / 256 {
            let mut quarter = [_mm512_setzero_si512(); 4];
            for (j, quarter) in quarter.iter_mut().enumerate() {
                let at = 256 * i + 64 * j;
                let low = _mm512_loadu_si512(grid.digits[at..][..32].as_ptr().cast());
                let high = _mm512_loadu_si512(grid.digits[at + 32..][..32].as_ptr().cast());
                *quarter = _mm512_permutex2var_epi16(low, points, high);
            }
            let low = _mm512_mask_mov_epi16(quarter[0], set[0], quarter[1]);
            let high = _mm512_mask_mov_epi16(quarter[2], set[0], quarter[3]);
            let here = _mm512_mask_mov_epi16(low, set[1], high);
            // Those of `LEN / 256` parts whose number is the rest of the place.
            let mut mask = !0;
            for k in 0..3 {
                if LEN / 256 > 1 << k {
                    mask &= if i >> k & 1 == 1 { set[2 + k] } else { !set[2 + k] };
                }
            }
            found = if i == 0 { here } else { _mm512_mask_mov_epi16(found, mask, here) };
        }
        found
    }
}

/// See [`Isa::look_up`].
///
/// # Safety
/// The CPU has AVX-512 F and BW.
#[inline(always)]
unsafe fn look_up<const COLS: usize, const LEN: usize>(grid: &Grid<COLS, LEN>, points: &[u16; 64]) -> [__m512i; 4] {
    // SAFETY: the instructions by the caller's promise; what is loaded and stored is as long as that.
    unsafe {
        let mut codes = [_mm512_setzero_si512(); 4];
        let values = _mm512_broadcast_i32x4(_mm_loadu_si128(grid.values.as_ptr().cast()));
        let first = digits(grid, _mm512_loadu_si512(points.as_ptr().cast()));
        if COLS == 8 {
            // Each word four times, its digits two by two in bits 0 to 3, then a byte each.
            let shifts = _mm512_set1_epi64(0x000c_0008_0004_0000);
            let mut at = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
            at = _mm512_mullo_epi32(_mm512_shuffle_epi32::<0b10_10_00_00>(at), _mm512_set1_epi32(0x0001_0001));
            for codes in &mut codes {
                let words = _mm512_srlv_epi16(_mm512_permutexvar_epi16(at, first), shifts);
                let words = _mm512_and_si512(words, _mm512_set1_epi16(0x000f));
                // 0xa8 = (words | shifted) & places.
                let shifted = _mm512_slli_epi16::<6>(words);
                let digits = _mm512_ternarylogic_epi32::<0xa8>(words, shifted, _mm512_set1_epi16(0x0303));
                *codes = _mm512_shuffle_epi8(values, digits);
                at = _mm512_add_epi16(at, _mm512_set1_epi16(8));
            }
        } else {
            let second = digits(grid, _mm512_loadu_si512(points[32..].as_ptr().cast()));
            let parts = [
                _mm512_castsi512_si256(first),
                _mm512_extracti64x4_epi64::<1>(first),
                _mm512_castsi512_si256(second),
                _mm512_extracti64x4_epi64::<1>(second),
            ];
            for (codes, part) in codes.iter_mut().zip(parts) {
                // Digits 0 and 1 are in the low nibbles of bytes 0 and 1, digits 2 and 3 go to those of bytes 2 and 3.
                let words = _mm512_cvtepu16_epi32(part);
                let shifted = _mm512_slli_epi32::<12>(words);
                let digits = _mm512_ternarylogic_epi32::<0xa8>(words, shifted, _mm512_set1_epi8(0x0f));
                *codes = _mm512_shuffle_epi8(values, digits);
            }
        }
        codes
    }
}

/// See [`Isa::with_signs`].
///
/// # Safety
/// The CPU has AVX-512 F and BW.
#[inline(always)]
unsafe fn with_signs(codes: __m512i, how: Bits, bits: [u8; 8]) -> __m512i {
    // SAFETY: the instructions by the caller's promise; registers only.
    unsafe {
        let set = u64::from_le_bytes(bits);
        match how {
            Bits::Nothing => codes,
            Bits::Negate => _mm512_mask_sub_epi8(codes, set, _mm512_setzero_si512(), codes),
            Bits::TwoLess => _mm512_mask_sub_epi8(codes, set, codes, _mm512_set1_epi8(2)),
        }
    }
}

/// See [`Isa::transpose`].
///
/// # Safety
/// The CPU has AVX-512 F and BW.
#[inline(always)]
unsafe fn transpose(rows: [&[u8; 64]; 16], how: Bits, bits: [[u8; 8]; 16], lines: &mut [[u8; 64]; 16]) {
    // SAFETY: the instructions by the caller's promise; each row and line has 64 bytes.
    unsafe {
        let mut v = [_mm512_setzero_si512(); 16];
        for i in 0..16 {
            v[i] = with_signs(_mm512_loadu_si512(rows[i].as_ptr().cast()), how, bits[i]);
        }
        // Of each four rows: dword `c` of each 128-bit lane.
        let mut four = [_mm512_setzero_si512(); 16];
        for i in (0..16).step_by(4) {
            let (a, b) = (_mm512_unpacklo_epi32(v[i], v[i + 1]), _mm512_unpacklo_epi32(v[i + 2], v[i + 3]));
            (four[i], four[i + 1]) = (_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
            let (a, b) = (_mm512_unpackhi_epi32(v[i], v[i + 1]), _mm512_unpackhi_epi32(v[i + 2], v[i + 3]));
            (four[i + 2], four[i + 3]) = (_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
        }
        for c in 0..4 {
            let (a, b) = (four[c], four[4 + c]);
            let (d, e) = (four[8 + c], four[12 + c]);
            // Lanes 0 and 2, 1 and 3.
            let (even, odd) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
            let (even_2, odd_2) = (_mm512_shuffle_i32x4::<0x88>(d, e), _mm512_shuffle_i32x4::<0xdd>(d, e));
            _mm512_storeu_si512(lines[c].as_mut_ptr().cast(), _mm512_shuffle_i32x4::<0x88>(even, even_2));
            _mm512_storeu_si512(lines[4 + c].as_mut_ptr().cast(), _mm512_shuffle_i32x4::<0x88>(odd, odd_2));
            _mm512_storeu_si512(lines[8 + c].as_mut_ptr().cast(), _mm512_shuffle_i32x4::<0xdd>(even, even_2));
            _mm512_storeu_si512(lines[12 + c].as_mut_ptr().cast(), _mm512_shuffle_i32x4::<0xdd>(odd, odd_2));
        }
    }
}

/// Int8 products without VNNI.
macro_rules! bytes_by_maddubs {
    () => {
        type Wide = (__m512i, __mmask64);
        const VNNI: bool = false;

        ops! {
            // Magnitudes and signs: `vpmaddubsw` of magnitudes up to 128 with inputs up to 127 cannot saturate.
            fn wide(self, w: __m512i) -> (__m512i, __mmask64) {{
                let w = _mm512_xor_si512(w, _mm512_set1_epi8(-128));
                (_mm512_abs_epi8(w), _mm512_movepi8_mask(w))
            }}
            fn dot_wide(self, acc: __m512i, w: (__m512i, __mmask64), x: __m512i) -> __m512i {{
                let x = _mm512_mask_sub_epi8(x, w.1, _mm512_setzero_si512(), x);
                let pairs = _mm512_maddubs_epi16(w.0, x);
                _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
            }}
            fn dot_small(self, acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
                _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1)))
            }
            fn dot_narrow(self, acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
                _mm512_add_epi16(acc, _mm512_maddubs_epi16(w, x))
            }
        }
    };
}

/// Int8 products by VNNI.
macro_rules! bytes_by_vnni {
    () => {
        type Wide = __m512i;
        const VNNI: bool = true;

        #[inline(always)]
        fn multiply_words(self, kind: Kind, r: usize, tile: Tile<'_>) {
            // SAFETY: `self` proves AVX-512 F, BW and VNNI.
            unsafe { crate::words::run(kind, r, tile) }
        }

        #[inline(always)]
        unsafe fn add_unit<const R: usize, const P: usize, const GROUP: usize, const MINIMA: bool>(
            self,
            memory: &mut Memory<R, P>,
            at: Unit,
        ) {
            // SAFETY: `self` proves AVX-512 F, BW and VNNI; what is read is so by the caller's promise.
            unsafe { crate::words::full::zmm::<R, P, GROUP, MINIMA>(memory, at) }
        }

        #[inline(always)]
        unsafe fn dot_lines<const R: usize, const P: usize>(self, sums: &mut [[__m512i; P]; R], at: LinesAt) {
            // SAFETY: `self` proves AVX-512 F and VNNI; what is read is so by the caller's promise.
            unsafe { crate::dots::ints::<R, P>(sums, at) }
        }

        ops! {
            fn wide(self, w: __m512i) -> __m512i { w }
            fn dot_wide(self, acc: __m512i, w: __m512i, x: __m512i) -> __m512i { _mm512_dpbusd_epi32(acc, w, x) }
            fn dot_small(self, acc: __m512i, w: __m512i, x: __m512i) -> __m512i { _mm512_dpbusd_epi32(acc, w, x) }
            fn dot_narrow(self, acc: __m512i, w: __m512i, x: __m512i) -> __m512i { _mm512_dpbusd_epi32(acc, w, x) }
        }
    };
}

/// The bf16 path without BF16 instructions: F32 inputs, weights widened, multiplied exactly but for the rounding of each sum.
macro_rules! widened_bf16 {
    () => {
        type Pair = [__m512; 2];
        type Fp8Table = __m512i;
        const INPUT_BYTES: usize = 4;

        #[inline(always)]
        unsafe fn load_pair(self, p: *const u8) -> [__m512; 2] {
            // SAFETY: the caller promises 8 bytes.
            let first = unsafe { self.load_f32(p) };
            // SAFETY: as above.
            let second = unsafe { self.load_f32(p.add(4)) };
            [first, second]
        }

        ops! {
            fn dot_bf16(self, acc: __m512, w: __m512i, x: [__m512; 2]) -> __m512 {{
                let even = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(w));
                let odd = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(0xffff_0000_u32 as i32)));
                _mm512_fmadd_ps(odd, x[1], _mm512_fmadd_ps(even, x[0], acc))
            }}
            fn fp8_to_bf16(self, table: __m512i, codes: __m512i) -> [__m512i; 2] {{
                [
                    fp8_words(table, _mm512_unpacklo_epi8(codes, codes)),
                    fp8_words(table, _mm512_unpackhi_epi8(codes, codes)),
                ]
            }}
        }

        #[inline(always)]
        fn fp8_table(self) -> __m512i {
            // SAFETY: the table is 64 bytes long.
            unsafe { self.load(FP8_SMALL.as_ptr().cast()) }
        }
    };
}

// SAFETY: `Plain::new` asks for the features that `run` enables.
unsafe impl Isa for Plain {
    run_with!("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c");
    same_code!(int8: Plain, lookups: Plain, bf16: Plain, f32: Plain);
    common!();
    bytes_by_maddubs!();
    widened_bf16!();
}

// SAFETY: `Vnni::new` asks for the features that `run` enables.
unsafe impl Isa for Vnni {
    run_with!("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,avx512vnni");
    same_code!(int8: Vnni, lookups: Vnni, bf16: Plain, f32: Plain);
    common!();
    bytes_by_vnni!();
    widened_bf16!();
}

/// Lookups that take six bits of a byte, of which a table of 16 bytes, four times, ignores two.
macro_rules! lookups_by_vbmi {
    () => {
        const VBMI: bool = true;

        ops! {
            fn lookup_nibbles(self, table: __m512i, v: __m512i) -> [__m512i; 2] {
                [_mm512_permutexvar_epi8(v, table), _mm512_permutexvar_epi8(_mm512_srli_epi16::<4>(v), table)]
            }
        }
    };
}

/// The bf16 path by BF16 instructions.
macro_rules! bf16_pairs {
    () => {
        type Pair = __m512i;
        type Fp8Table = [__m512i; 4];
        const INPUT_BYTES: usize = 2;

        #[inline(always)]
        unsafe fn load_pair(self, p: *const u8) -> __m512i {
            // SAFETY: the caller promises 4 bytes.
            unsafe { self.load_dword(p) }
        }

        #[inline(always)]
        fn fp8_table(self) -> [__m512i; 4] {
            let [a, b, c, d] = &FP8_BYTES;
            // SAFETY: each table is 64 bytes long.
            unsafe { [self.load(a.as_ptr()), self.load(b.as_ptr()), self.load(c.as_ptr()), self.load(d.as_ptr())] }
        }

        ops! {
            // The vector types differ in name only.
            fn dot_bf16(self, acc: __m512, w: __m512i, x: __m512i) -> __m512 {
                _mm512_dpbf16_ps(
                    acc,
                    std::mem::transmute::<__m512i, __m512bh>(w),
                    std::mem::transmute::<__m512i, __m512bh>(x),
                )
            }
            // An index has 7 bits: the whole table. Bit 7, the sign, is or-ed into the high byte: 0xf8 = a | (b & c).
            fn fp8_to_bf16(self, table: [__m512i; 4], codes: __m512i) -> [__m512i; 2] {{
                let low = _mm512_permutex2var_epi8(table[0], codes, table[1]);
                let high = _mm512_permutex2var_epi8(table[2], codes, table[3]);
                let high = _mm512_ternarylogic_epi32::<0xf8>(high, codes, _mm512_set1_epi8(-128));
                [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
            }}
        }
    };
}

// SAFETY: `Bf16::new` asks for the features that `run` enables.
unsafe impl Isa for Bf16 {
    run_with!("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,avx512vnni,avx512bf16,avx512vbmi");
    same_code!(int8: Vnni, lookups: Bf16, bf16: Bf16, f32: Plain);
    common!();
    bytes_by_vnni!();
    lookups_by_vbmi!();
    bf16_pairs!();
}

// SAFETY: `Vbmi::new` asks for the features that `run` enables.
unsafe impl Isa for Vbmi {
    run_with!("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,avx512vnni,avx512bf16,avx512vbmi");
    same_code!(int8: Vnni, lookups: Bf16, bf16: Plain, f32: Plain);
    common!();
    bytes_by_vnni!();
    lookups_by_vbmi!();
    widened_bf16!();
}

/// AVX-512 with BF16, and a tile unit for products of many rows. A value proves both.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tiled<U> {
    unit: U,
    /// None where all weights are BF16 numbers.
    stream_rows: Option<usize>,
}

impl<U: TileUnit> Tiled<U> {
    /// Of a CPU with the instructions of tier `avx512bf16`: bf16 products of up to `rows` rows stream, 8 at most. None do, and weights are BF16
    /// numbers times their scales, if that is `None`.
    ///
    /// # Safety
    /// The CPU must have them.
    pub(crate) unsafe fn new(unit: U, rows: Option<usize>) -> Self {
        Tiled { unit, stream_rows: rows }
    }
}

/// The second of two BF16 numbers in a dword.
const SECOND: i32 = !0xffff;

// SAFETY: `Tiled::new` asks for the features that `run` enables.
unsafe impl<U: TileUnit> Isa for Tiled<U> {
    run_with!("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,avx512vnni,avx512bf16,avx512vbmi");
    common!();
    bytes_by_vnni!();
    lookups_by_vbmi!();
    widened_bf16!();

    type ForInt8 = Self;
    type ForLookups = Self;
    type ForBf16 = Self;
    type ForF32 = Plain;
    const TILES: bool = true;

    #[inline(always)]
    fn for_int8(self) -> Self {
        self
    }

    #[inline(always)]
    fn for_lookups(self) -> Self {
        self
    }

    #[inline(always)]
    fn for_bf16(self) -> Self {
        self
    }

    #[inline(always)]
    fn for_f32(self) -> Plain {
        Plain(super::Ports::Own)
    }

    #[inline(always)]
    fn stream_rows(self, most: usize) -> usize {
        self.stream_rows.unwrap_or(0).min(most)
    }

    #[inline(always)]
    fn widens(self) -> bool {
        self.stream_rows.is_none()
    }

    #[inline(always)]
    unsafe fn multiply_tiles(self, product: &TileProduct) {
        // SAFETY: by the caller's promise.
        unsafe { self.unit.multiply(product) }
    }

    #[inline(always)]
    fn stream_on_tiles<L: Floats, const SCALED: u8, const P: usize>(self, rows: usize, tile: Tile<'_>) {
        self.run(Streamed::<U, L, SCALED, P> { unit: self.unit, rows, tile, kind: PhantomData });
    }

    #[inline(always)]
    fn stream_ints_on_tiles<L: Codes>(self, rows: usize, tile: Tile<'_>) {
        self.run(StreamedInts::<U, L> { unit: self.unit, rows, tile, kind: PhantomData });
    }

    ops! {
        // Two F32 products, and not one of `vdpbf16ps` for each sum: those take more than two cycles each on CPUs with tiles (Emerald Rapids).
        fn dot_chains(self, acc: [__m512; 2], w: __m512i, x: [__m512; 2]) -> [__m512; 2] {{
            let first = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(w));
            let second = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(SECOND)));
            [_mm512_fmadd_ps(first, x[0], acc[0]), _mm512_fmadd_ps(second, x[1], acc[1])]
        }}
        fn end_chains(self, sum: __m512, chains: [__m512; 2]) -> __m512 {
            flush(_mm512_add_ps(sum, flush(_mm512_add_ps(chains[0], chains[1]))))
        }
        // By integers, which go on more ports than `vcvtne2ps2bf16` and a permutation: measured 7 % faster, with all around it.
        fn bf16_pairs(self, first: __m512, second: __m512) -> __m512i {{
            let rounded = |v| _mm512_add_epi32(_mm512_castps_si512(v), _mm512_set1_epi32(0x8000));
            // Bits of the second where those of the mask are set, else of the first.
            const CHOOSE: i32 = 0xca;
            let first = _mm512_srli_epi32::<16>(rounded(first));
            _mm512_ternarylogic_epi32::<CHOOSE>(_mm512_set1_epi32(SECOND), rounded(second), first)
        }}
        fn plain_nan(self, v: __m512) -> __m512 {{
            // For each kind of number, from the lowest bits on: NaN of both kinds become the default one, others stay.
            const KINDS: i32 = 0x1111_1133;
            _mm512_fixupimm_ps::<0>(v, v, _mm512_set1_epi32(KINDS))
        }}
    }
}

/// Subnormal numbers as zeros of their sign, which is what BF16 and tile instructions make of them.
///
/// # Safety
/// The CPU has AVX-512 F and DQ.
#[inline(always)]
unsafe fn flush(v: __m512) -> __m512 {
    // SAFETY: the instructions by the caller's promise; registers only.
    unsafe {
        let tiny = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(_mm512_abs_ps(v), _mm512_set1_ps(f32::MIN_POSITIVE));
        _mm512_mask_and_ps(v, tiny, v, _mm512_set1_ps(-0.0))
    }
}

/// 32 normal E4M3 codes, each in the high byte of a word, as BF16 over [`FP8_UP`]: the sign is copied down to where the exponent will have three
/// bits more, which are set then, as 112 of its bias are to be made up for. Low bytes may hold anything.
///
/// # Safety
/// The CPU has AVX-512 F and BW.
#[inline(always)]
unsafe fn fp8_bf16(codes: __m512i) -> __m512i {
    /// Of three bits, the last one, or both of the others.
    const BOTH_OR: i32 = 0xea;
    // SAFETY: the instructions by the caller's promise; registers only.
    unsafe {
        let (mask, up) = (_mm512_set1_epi16(0x87f0_u16 as i16), _mm512_set1_epi16(112 << 7));
        _mm512_ternarylogic_epi32::<BOTH_OR>(_mm512_srai_epi16::<4>(codes), mask, up)
    }
}

/// 32 E4M3 codes, each in both bytes of a word, as BF16 over [`FP8_UP`].
///
/// # Safety
/// The CPU has AVX-512 F and BW.
#[inline(always)]
unsafe fn fp8_words(small: __m512i, codes: __m512i) -> __m512i {
    // SAFETY: the instructions by the caller's promise; registers only.
    unsafe {
        // Without an exponent the last five bits, all that an index has, are the mantissa.
        let tiny = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x78));
        let sign = _mm512_and_si512(codes, _mm512_set1_epi16(i16::MIN));
        let subnormal = _mm512_or_si512(_mm512_permutexvar_epi16(codes, small), sign);
        _mm512_mask_mov_epi16(fp8_bf16(codes), tiny, subnormal)
    }
}

/// What [`fp8_words`] makes of zeros and subnormal codes, less their sign.
static FP8_SMALL: [u16; 32] = {
    let mut t = [0; 32];
    let mut i = 0;
    while i < 8 {
        t[i] = fp8_bits(i, FP8_UP);
        i += 1;
    }
    t
};

/// See [`Isa::FP8_UP`].
const FP8_UP: f32 = 256.0;

/// [`fp8_bits`] of the non-negative codes, over [`FP8_UP`], in registers of bytes: two of low bytes, two of high bytes.
static FP8_BYTES: [[u8; 64]; 4] = {
    let mut t = [[0; 64]; 4];
    let mut i = 0;
    while i < 128 {
        let bits = fp8_bits(i, FP8_UP);
        t[i / 64][i % 64] = bits as u8;
        t[2 + i / 64][i % 64] = (bits >> 8) as u8;
        i += 1;
    }
    t
};
