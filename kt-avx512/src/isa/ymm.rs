//! Tiers with 256-bit registers, two of which hold a line.

#![allow(unsafe_code)] // kernel

use std::arch::x86_64::*;

use super::{Bits, Grid, Isa, fp8_bits, largest8, least_sum8, load_points, ops, run_with, same_code, sum8, token};
use crate::words::full::{Memory, Unit};

token!(
    /// AVX2, FMA, F16C.
    Avx2, "avx2"
);
token!(
    /// and VNNI on 256 bits.
    AvxVnni, "avxvnni"
);

/// 64 bytes.
type Int = [__m256i; 2];
/// 16 F32.
type Flt = [__m256; 2];

/// The same on both halves.
macro_rules! halves {
    ($f:ident($($a:expr),*)) => { [$f($($a[0]),*), $f($($a[1]),*)] };
}

/// An expression of `h`, the half, for both of them. Not a closure: those are functions without the instructions until inlined.
macro_rules! each {
    ($h:ident => $e:expr) => {
        [
            {
                let $h = 0;
                $e
            },
            {
                let $h = 1;
                $e
            },
        ]
    };
}

/// See [`Isa::FP8_UP`].
const FP8_UP: f32 = f32::from_bits((127 + 40) << 23);

/// See [`Isa::pair_up`].
const PAIR_UP: f32 = f32::from_bits((127 + 80) << 23);

/// The first `n` of the 8 lanes from `from` on.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn first(n: usize, from: usize) -> __m256i {
    // SAFETY: the instructions by the caller's promise; registers only.
    unsafe {
        let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        _mm256_cmpgt_epi32(_mm256_set1_epi32(n.saturating_sub(from).min(8) as i32), lane)
    }
}

/// What both tiers have in common.
macro_rules! common {
    () => {
        type Int = Int;
        type Flt = Flt;
        type Fp8Table = ();
        type Pair = [__m256; 2];
        const LARGE: bool = false;
        const INPUT_BYTES: usize = 4;
        const FP8_UP: f32 = FP8_UP;

        #[inline(always)]
        unsafe fn load(self, p: *const u8) -> Int {
            // SAFETY: readable by the caller's promise; unaligned is fine.
            unsafe { [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())] }
        }

        #[inline(always)]
        unsafe fn store(self, p: *mut u8, v: Int) {
            // SAFETY: writable by the caller's promise; unaligned is fine.
            unsafe {
                _mm256_storeu_si256(p.cast(), v[0]);
                _mm256_storeu_si256(p.add(32).cast(), v[1]);
            }
        }

        #[inline(always)]
        unsafe fn load_dword(self, p: *const u8) -> Int {
            // SAFETY: readable by the caller's promise.
            let v = unsafe { p.cast::<i32>().read_unaligned() };
            self.splat(v)
        }

        #[inline(always)]
        unsafe fn load_f32(self, p: *const u8) -> Flt {
            // SAFETY: readable by the caller's promise.
            self.as_f32(unsafe { self.load_dword(p) })
        }

        #[inline(always)]
        unsafe fn load_f16(self, p: *const u8) -> Flt {
            // SAFETY: readable by the caller's promise, and `self` proves F16C.
            unsafe { [_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(16).cast()))] }
        }

        #[inline(always)]
        unsafe fn load_u8(self, p: *const u8) -> Int {
            // SAFETY: readable by the caller's promise, and `self` proves AVX2.
            unsafe {
                [
                    _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())),
                    _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.add(8).cast())),
                ]
            }
        }

        #[inline(always)]
        unsafe fn load_u8_words(self, p: *const u8) -> Int {
            // SAFETY: readable by the caller's promise, and `self` proves AVX2.
            unsafe {
                [
                    _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast())),
                    _mm256_cvtepu8_epi16(_mm_loadu_si128(p.add(16).cast())),
                ]
            }
        }

        #[inline(always)]
        fn up<const N: u32>(self, v: Int) -> Int {
            // SAFETY: `self` proves AVX2. The count becomes part of the instruction.
            unsafe { each!(h => _mm256_sll_epi32(v[h], _mm_cvtsi32_si128(N as i32))) }
        }

        #[inline(always)]
        fn down<const N: u32>(self, v: Int) -> Int {
            // SAFETY: `self` proves AVX2. The count becomes part of the instruction.
            unsafe { each!(h => _mm256_sra_epi32(v[h], _mm_cvtsi32_si128(N as i32))) }
        }

        #[inline(always)]
        unsafe fn load_i8(self, p: *const u8) -> Int {
            // SAFETY: readable by the caller's promise, and `self` proves AVX2.
            unsafe {
                [
                    _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())),
                    _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.add(8).cast())),
                ]
            }
        }

        #[inline(always)]
        unsafe fn load_bit_pairs<const UP: u32>(self, p: *const u8) -> [Int; 2] {
            const { assert!(UP == 0 || UP == 3) };
            // SAFETY: readable by the caller's promise, and `self` proves AVX2.
            unsafe {
                let bits = _mm256_loadu_si256(p.cast());
                let two = _mm256_set1_epi8(3 << UP);
                let from = |bit: u32| {
                    let at_place = match UP.checked_sub(bit) {
                        Some(left) => _mm256_sll_epi16(bits, _mm_cvtsi32_si128(left as i32)),
                        None => _mm256_srl_epi16(bits, _mm_cvtsi32_si128((bit - UP) as i32)),
                    };
                    _mm256_and_si256(at_place, two)
                };
                [[from(0), from(2)], [from(4), from(6)]]
            }
        }

        #[inline(always)]
        unsafe fn load_nibble_halves(self, p: *const u8) -> Int {
            // SAFETY: readable by the caller's promise, and `self` proves AVX2.
            unsafe {
                let bytes = _mm256_loadu_si256(p.cast());
                [bytes, _mm256_srli_epi32::<4>(bytes)]
            }
        }

        #[inline(always)]
        unsafe fn load_i16(self, p: *const u8) -> Int {
            // SAFETY: readable by the caller's promise, and `self` proves AVX2.
            unsafe {
                [
                    _mm256_cvtepi16_epi32(_mm_loadu_si128(p.cast())),
                    _mm256_cvtepi16_epi32(_mm_loadu_si128(p.add(16).cast())),
                ]
            }
        }

        #[inline(always)]
        unsafe fn load_e4m3(self, p: *const u8) -> Flt {
            // SAFETY: readable by the caller's promise, and `self` proves AVX2 and F16C. The sign is copied to bit 15, and once more
            // to bit 14, where it is masked off.
            unsafe {
                let words = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast())));
                let words = _mm256_and_si256(words, _mm256_set1_epi16(0xbf80_u16 as i16));
                [_mm256_cvtph_ps(_mm256_castsi256_si128(words)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(words))]
            }
        }

        #[inline(always)]
        unsafe fn load_first(self, p: *const f32, n: usize) -> Flt {
            // SAFETY: lanes beyond `n` are masked off and not touched.
            unsafe { [_mm256_maskload_ps(p, first(n, 0)), _mm256_maskload_ps(p.wrapping_add(8), first(n, 8))] }
        }

        #[inline(always)]
        unsafe fn store_first(self, p: *mut f32, n: usize, v: Flt) {
            // SAFETY: lanes beyond `n` are masked off and not touched.
            unsafe {
                _mm256_maskstore_ps(p, first(n, 0), v[0]);
                _mm256_maskstore_ps(p.wrapping_add(8), first(n, 8), v[1]);
            }
        }

        #[inline(always)]
        unsafe fn load_pair(self, p: *const u8) -> [__m256; 2] {
            // SAFETY: the caller promises 8 bytes, and `self` proves AVX.
            unsafe { [_mm256_broadcast_ss(&*p.cast()), _mm256_broadcast_ss(&*p.add(4).cast())] }
        }

        #[inline(always)]
        unsafe fn store_firsts(self, p: *mut u8, v: Int) {
            // SAFETY: writable by the caller's promise, and `self` proves AVX2.
            unsafe {
                // Dwords 0 of the first, 4 of the first, the same of the second.
                let firsts = _mm256_permutevar8x32_epi32(
                    _mm256_unpacklo_epi32(v[0], v[1]),
                    _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5),
                );
                _mm_storeu_si128(p.cast(), _mm256_castsi256_si128(firsts));
            }
        }

        #[inline(always)]
        fn in_quarters<const ORDER: i32>(self, v: Int) -> Int {
            // SAFETY: `self` proves AVX2.
            unsafe { each!(h => _mm256_shuffle_epi32::<ORDER>(v[h])) }
        }

        #[inline(always)]
        unsafe fn store_i8(self, p: *mut u8, v: Int) {
            // SAFETY: writable by the caller's promise, and `self` proves AVX2.
            unsafe {
                // Packing works within lanes of 128 bits: dwords 0 4 1 5 in order.
                let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(v[0], v[1]));
                let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
                _mm_storeu_si128(p.cast(), bytes);
            }
        }

        #[inline(always)]
        fn fp8_table(self) {}

        #[inline(always)]
        fn look_up<const COLS: usize, const LEN: usize>(
            self,
            grid: &Grid<COLS, LEN>,
            points: &[u16; 64],
        ) -> [Int; 4] {
            let mut codes = [self.splat(0); 4];
            for (i, codes) in codes.iter_mut().enumerate() {
                // SAFETY: `self` proves AVX2.
                *codes = each!(h => unsafe { load_points(grid, points, 2 * i + h) });
            }
            codes
        }

        #[inline(always)]
        fn with_signs(self, codes: Int, how: Bits, bits: [u8; 8]) -> Int {
            // SAFETY: `self` proves AVX2.
            each!(h => unsafe { with_signs(codes[h], how, [bits[4 * h], bits[4 * h + 1], bits[4 * h + 2], bits[4 * h + 3]]) })
        }

        #[inline(always)]
        fn transpose(self, rows: [&[u8; 64]; 16], how: Bits, bits: [[u8; 8]; 16], lines: &mut [[u8; 64]; 16]) {
            // SAFETY: `self` proves AVX2.
            unsafe { transpose(rows, how, bits, lines) }
        }

        ops! {
            fn zero(self) -> Flt { [_mm256_setzero_ps(); 2] }
            fn splat(self, v: i32) -> Int { [_mm256_set1_epi32(v); 2] }
            fn as_f32(self, v: Int) -> Flt { halves!(_mm256_castsi256_ps(v)) }
            fn as_int(self, v: Flt) -> Int { halves!(_mm256_castps_si256(v)) }
            fn to_f32(self, v: Int) -> Flt { halves!(_mm256_cvtepi32_ps(v)) }
            fn mul(self, a: Flt, b: Flt) -> Flt { halves!(_mm256_mul_ps(a, b)) }
            fn div(self, a: Flt, b: Flt) -> Flt { halves!(_mm256_div_ps(a, b)) }
            fn mul_add(self, a: Flt, b: Flt, c: Flt) -> Flt { halves!(_mm256_fmadd_ps(a, b, c)) }
            fn power(self, v: Flt) -> Flt { v }
            fn times_power(self, v: Flt, power: Flt) -> Flt { self.mul(v, power) }
            fn splat_f32(self, v: f32) -> Flt { [_mm256_set1_ps(v); 2] }
            fn add(self, a: Int, b: Int) -> Int { halves!(_mm256_add_epi32(a, b)) }
            fn max(self, a: Int, b: Int) -> Int { halves!(_mm256_max_epu32(a, b)) }
            fn abs(self, v: Flt) -> Flt {{
                let sign = _mm256_set1_ps(-0.0);
                each!(h => _mm256_andnot_ps(sign, v[h]))
            }}
            fn fraction(self, v: Flt) -> Flt { each!(h => _mm256_sub_ps(v[h], _mm256_round_ps::<0>(v[h]))) }
            fn rounded(self, v: Flt) -> Int { halves!(_mm256_cvtps_epi32(v)) }
            fn sum(self, v: Int) -> i32 { sum8(_mm256_add_epi32(v[0], v[1])) }
            fn least_sum(self, v: [Flt; 4], worth: [f32; 4]) -> usize {{
                let mut halves = [_mm256_setzero_ps(); 4];
                for (half, v) in halves.iter_mut().zip(v) {
                    *half = _mm256_add_ps(v[0], v[1]);
                }
                least_sum8(halves, worth)
            }}
            fn quarters(self, v: [Flt; 4]) -> [Flt; 4] {{
                // The first or the second quarters of the halves `h` of two registers.
                macro_rules! firsts {
                    ($a:literal, $b:literal, $h:literal) => { _mm256_permute2f128_ps::<0x20>(v[$a][$h], v[$b][$h]) };
                }
                macro_rules! seconds {
                    ($a:literal, $b:literal, $h:literal) => { _mm256_permute2f128_ps::<0x31>(v[$a][$h], v[$b][$h]) };
                }
                [
                    [firsts!(0, 1, 0), firsts!(2, 3, 0)],
                    [seconds!(0, 1, 0), seconds!(2, 3, 0)],
                    [firsts!(0, 1, 1), firsts!(2, 3, 1)],
                    [seconds!(0, 1, 1), seconds!(2, 3, 1)],
                ]
            }}
            fn sums_of_quarters(self, v: [Flt; 4]) -> Flt {
                // Lanes 2 apart, then 1.
                each!(h => {
                    let [a, b, c, d] = [_mm256_castps_pd(v[0][h]), _mm256_castps_pd(v[1][h]), _mm256_castps_pd(v[2][h]), _mm256_castps_pd(v[3][h])];
                    let (low, high) = (_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b));
                    let ab = _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high));
                    let (low, high) = (_mm256_unpacklo_pd(c, d), _mm256_unpackhi_pd(c, d));
                    let cd = _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high));
                    let even = _mm256_shuffle_ps::<0b10_00_10_00>(ab, cd);
                    let odd = _mm256_shuffle_ps::<0b11_01_11_01>(ab, cd);
                    _mm256_add_ps(even, odd)
                })
            }
            fn bytes(self, v: [Int; 4]) -> Int {
                each!(h => _mm256_packs_epi16(_mm256_packs_epi32(v[0][h], v[1][h]), _mm256_packs_epi32(v[2][h], v[3][h])))
            }
            fn mix_quarters(self, a: Int, b: Int) -> [Int; 2] {
                each!(h => [_mm256_permute2x128_si256::<0x20>(a[h], b[h]), _mm256_permute2x128_si256::<0x31>(a[h], b[h])])
            }
            fn add_f32(self, a: Flt, b: Flt) -> Flt { halves!(_mm256_add_ps(a, b)) }
            fn least(self, a: Flt, b: Flt) -> Flt { halves!(_mm256_min_ps(a, b)) }
            fn where_equal(self, a: Flt, b: Flt, v: Flt) -> Flt {
                each!(h => _mm256_and_ps(_mm256_cmp_ps::<_CMP_EQ_OQ>(a[h], b[h]), v[h]))
            }
            fn sums_of_four(self, v: [Int; 4]) -> Int {
                // Dwords 0 and 2, then 1 and 3 of both, by turns.
                each!(h => {
                    let [v0, v1, v2, v3] = [v[0][h], v[1][h], v[2][h], v[3][h]];
                    let a = _mm256_add_epi32(_mm256_unpacklo_epi32(v0, v1), _mm256_unpackhi_epi32(v0, v1));
                    let b = _mm256_add_epi32(_mm256_unpacklo_epi32(v2, v3), _mm256_unpackhi_epi32(v2, v3));
                    _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b))
                })
            }
            fn largest(self, v: Int) -> u32 { largest8(_mm256_max_epu32(v[0], v[1])) }
            fn sub(self, a: Int, b: Int) -> Int { halves!(_mm256_sub_epi32(a, b)) }
            fn and(self, a: Int, b: Int) -> Int { halves!(_mm256_and_si256(a, b)) }
            fn xor(self, a: Int, b: Int) -> Int { halves!(_mm256_xor_si256(a, b)) }
            fn words(self, high: Int, low: Int) -> Int {
                each!(h => _mm256_blend_epi16::<0xaa>(low[h], _mm256_slli_epi32::<16>(high[h])))
            }
            fn add_words(self, a: Int, b: Int) -> Int { halves!(_mm256_add_epi16(a, b)) }
            fn mul_words(self, a: Int, b: Int) -> Int { halves!(_mm256_mullo_epi16(a, b)) }
            fn mul_words_high(self, a: Int, b: Int) -> Int { halves!(_mm256_mulhrs_epi16(a, b)) }
            fn madd(self, a: Int, b: Int) -> Int { halves!(_mm256_madd_epi16(a, b)) }
            fn exp2(self, v: Int) -> Flt {{
                let least = _mm256_set1_epi32(1 << 22);
                each!(h => _mm256_castsi256_ps(_mm256_max_epi32(_mm256_slli_epi32::<23>(v[h]), least)))
            }}
            fn nibbles(self, v: Int) -> [Int; 2] {{
                let low = _mm256_set1_epi8(15);
                [
                    [_mm256_and_si256(v[0], low), _mm256_and_si256(v[1], low)],
                    [
                        _mm256_and_si256(_mm256_srli_epi16::<4>(v[0]), low),
                        _mm256_and_si256(_mm256_srli_epi16::<4>(v[1]), low),
                    ],
                ]
            }}
            fn lookup(self, table: Int, v: Int) -> Int { halves!(_mm256_shuffle_epi8(table, v)) }
            fn f16_halves(self, v: Int) -> [Flt; 2] {
                each!(h => [
                    _mm256_cvtph_ps(_mm256_castsi256_si128(v[h])),
                    _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(v[h])),
                ])
            }
            fn dot_bf16(self, acc: Flt, w: Int, x: [__m256; 2]) -> Flt {{
                let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
                each!(h => {
                    let even = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(w[h]));
                    let odd = _mm256_castsi256_ps(_mm256_and_si256(w[h], high));
                    _mm256_fmadd_ps(odd, x[1], _mm256_fmadd_ps(even, x[0], acc[h]))
                })
            }}
            fn fp8_to_bf16(self, _table: (), codes: Int) -> [Int; 2] {{
                let [a, b] = each!(h => fp8_to_bf16(codes[h]));
                [[a[0], b[0]], [a[1], b[1]]]
            }}
            // A code in the high byte of a word, its sign copied down to bit 11 of the moved bits, and masked off but for bit 15.
            fn fp8_shifted(self, codes: Int) -> [Int; 2] {{
                let (zero, mask) = (_mm256_setzero_si256(), _mm256_set1_epi16(0x87f0_u16 as i16));
                [
                    each!(h => _mm256_and_si256(_mm256_srai_epi16::<4>(_mm256_unpacklo_epi8(zero, codes[h])), mask)),
                    each!(h => _mm256_and_si256(_mm256_srai_epi16::<4>(_mm256_unpackhi_epi8(zero, codes[h])), mask)),
                ]
            }}
            fn pair_up(self, x: [__m256; 2]) -> [__m256; 2] {{
                let up = _mm256_set1_ps(PAIR_UP);
                each!(h => _mm256_mul_ps(x[h], up))
            }}
            fn dot_up(self, acc: Flt, w: Int, x: [__m256; 2]) -> Flt {{
                let (high, up) = (_mm256_set1_epi32(0xffff_0000_u32 as i32), _mm256_set1_ps(PAIR_UP));
                each!(h => {
                    let even = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(w[h])), up);
                    let odd = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_and_si256(w[h], high)), up);
                    _mm256_fmadd_ps(odd, x[1], _mm256_fmadd_ps(even, x[0], acc[h]))
                })
            }}
        }
    };
}

/// [`Isa::with_signs`] of 32 codes.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn with_signs(codes: __m256i, how: Bits, bits: [u8; 4]) -> __m256i {
    // SAFETY: the instructions by the caller's promise; registers only.
    unsafe {
        if how == Bits::Nothing {
            return codes;
        }
        let (lane_0, lane_1) = (0x0101_0101_0101_0101, 0x0303_0303_0303_0303);
        let spread = _mm256_set_epi64x(lane_1, lane_1 - 0x0101_0101_0101_0101, lane_0, 0);
        let places = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
        // Byte `j` gets the byte that holds its bit, then that bit alone.
        let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(i32::from_le_bytes(bits)), spread);
        let set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, places), places);
        match how {
            // Minus a number is that of all bits flipped, and one more.
            Bits::Negate => _mm256_sub_epi8(_mm256_xor_si256(codes, set), set),
            _ => _mm256_add_epi8(codes, _mm256_add_epi8(set, set)),
        }
    }
}

/// See [`Isa::transpose`].
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn transpose(rows: [&[u8; 64]; 16], how: Bits, bits: [[u8; 8]; 16], lines: &mut [[u8; 64]; 16]) {
    // SAFETY: the instructions by the caller's promise; each half of a row or line has 32 bytes.
    unsafe {
        // Eight rows and eight dwords at a time.
        for (half, part) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let mut v = [_mm256_setzero_si256(); 8];
            for i in 0..8 {
                let row = _mm256_loadu_si256(rows[8 * half + i][32 * part..][..32].as_ptr().cast());
                let bits = bits[8 * half + i][4 * part..].first_chunk().expect("four bytes");
                v[i] = with_signs(row, how, *bits);
            }
            let mut four = [_mm256_setzero_si256(); 8];
            for i in [0, 4] {
                let (a, b) = (_mm256_unpacklo_epi32(v[i], v[i + 1]), _mm256_unpacklo_epi32(v[i + 2], v[i + 3]));
                (four[i], four[i + 1]) = (_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
                let (a, b) = (_mm256_unpackhi_epi32(v[i], v[i + 1]), _mm256_unpackhi_epi32(v[i + 2], v[i + 3]));
                (four[i + 2], four[i + 3]) = (_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
            }
            for c in 0..4 {
                let (low, high) = (
                    _mm256_permute2x128_si256::<0x20>(four[c], four[4 + c]),
                    _mm256_permute2x128_si256::<0x31>(four[c], four[4 + c]),
                );
                _mm256_storeu_si256(lines[8 * part + c][32 * half..][..32].as_mut_ptr().cast(), low);
                _mm256_storeu_si256(lines[8 * part + 4 + c][32 * half..][..32].as_mut_ptr().cast(), high);
            }
        }
    }
}

// SAFETY: `Avx2::new` asks for the features that `run` enables.
unsafe impl Isa for Avx2 {
    run_with!("avx2,fma,f16c");
    same_code!(int8: Avx2, lookups: Avx2, bf16: Avx2, f32: Avx2);
    common!();

    /// Magnitudes, and the codes for their signs.
    type Wide = [Int; 2];
    const VNNI: bool = false;

    ops! {
        // `vpmaddubsw` of magnitudes up to 128 with inputs up to 127 cannot saturate.
        fn wide(self, w: Int) -> [Int; 2] {{
            let w = each!(h => _mm256_xor_si256(w[h], _mm256_set1_epi8(-128)));
            [halves!(_mm256_abs_epi8(w)), w]
        }}
        fn dot_wide(self, acc: Int, w: [Int; 2], x: Int) -> Int {
            each!(h => {
                let pairs = _mm256_maddubs_epi16(w[0][h], _mm256_sign_epi8(x[h], w[1][h]));
                _mm256_add_epi32(acc[h], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
            })
        }
        fn dot_small(self, acc: Int, w: Int, x: Int) -> Int {
            each!(h => {
                let pairs = _mm256_maddubs_epi16(w[h], x[h]);
                _mm256_add_epi32(acc[h], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
            })
        }
        fn dot_narrow(self, acc: Int, w: Int, x: Int) -> Int {
            each!(h => _mm256_add_epi16(acc[h], _mm256_maddubs_epi16(w[h], x[h])))
        }
    }
}

// SAFETY: `AvxVnni::new` asks for the features that `run` enables.
unsafe impl Isa for AvxVnni {
    run_with!("avx2,fma,f16c,avxvnni");
    same_code!(int8: AvxVnni, lookups: AvxVnni, bf16: Avx2, f32: Avx2);
    common!();

    type Wide = Int;
    const VNNI: bool = true;

    #[inline(always)]
    unsafe fn add_unit<const R: usize, const P: usize, const GROUP: usize, const MINIMA: bool>(
        self,
        memory: &mut Memory<R, P>,
        at: Unit,
    ) {
        // SAFETY: `self` proves AVX2, FMA and AVX-VNNI; what is read is so by the caller's promise.
        unsafe { crate::words::full::ymm::<R, P, GROUP, MINIMA>(memory, at) }
    }

    ops! {
        fn wide(self, w: Int) -> Int { w }
        fn dot_wide(self, acc: Int, w: Int, x: Int) -> Int { halves!(_mm256_dpbusd_avx_epi32(acc, w, x)) }
        fn dot_small(self, acc: Int, w: Int, x: Int) -> Int { halves!(_mm256_dpbusd_avx_epi32(acc, w, x)) }
        fn dot_narrow(self, acc: Int, w: Int, x: Int) -> Int { halves!(_mm256_dpbusd_avx_epi32(acc, w, x)) }
    }
}

/// For the bytes of BF16 numbers, low and high: what a code below 16 adds, by exclusive or, to what would come out if there were no
/// subnormal codes.
static SMALL: [[u8; 16]; 2] = {
    let mut t = [[0; 16]; 2];
    let mut i = 0;
    while i < 16 {
        let exact = fp8_bits(i, FP8_UP);
        t[0][i] = exact as u8 ^ ((i as u8) << 4);
        t[1][i] = (exact >> 8) as u8 ^ HIGH[0];
        i += 1;
    }
    t
};

/// High bytes of BF16 numbers by the high nibble of a code: the sign, and the upper three exponent bits moved to the bias of BF16, less
/// the exponent of [`FP8_UP`].
static HIGH: [u8; 16] = {
    let mut t = [0; 16];
    let mut i = 0;
    while i < 16 {
        t[i] = (i as u8 & 8) << 4 | (0x28 + (i as u8 & 7));
        i += 1;
    }
    t
};

/// A table of 16 bytes in both lanes.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn table(bytes: &[u8; 16]) -> __m256i {
    // SAFETY: 16 bytes, and the instructions by the caller's promise.
    unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes.as_ptr().cast())) }
}

/// 32 E4M3 codes as BF16, over [`FP8_UP`], exactly. In each 128-bit lane the first 8 codes go to the first result, the others to
/// the second.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn fp8_to_bf16(codes: __m256i) -> [__m256i; 2] {
    // SAFETY: the instructions by the caller's promise; registers and the tables above only.
    unsafe {
        let magnitude = _mm256_and_si256(codes, _mm256_set1_epi8(0x7f));
        // A lookup gives 0 where bit 7 of the index is set: here, for all codes from 16 up.
        let small = _mm256_add_epi8(magnitude, _mm256_set1_epi8(0x70));
        let low = _mm256_and_si256(_mm256_slli_epi16::<4>(codes), _mm256_set1_epi8(0xf0_u8 as i8));
        let low = _mm256_xor_si256(low, _mm256_shuffle_epi8(table(&SMALL[0]), small));
        let top = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), _mm256_set1_epi8(0x0f));
        let high =
            _mm256_xor_si256(_mm256_shuffle_epi8(table(&HIGH), top), _mm256_shuffle_epi8(table(&SMALL[1]), small));
        [_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)]
    }
}
