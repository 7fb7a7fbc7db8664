//! The instructions, as safe operations on a value that proves them.
//!
//! A kernel is generic over [`Isa`] and marked `#[inline(always)]`; [`Isa::run`] is the one function per tier that carries
//! `#[target_feature]`. Everything inlines into it, so each kernel is compiled once per tier with that tier's instructions.
//! `zmm.rs` has the tiers with 512-bit registers, `ymm.rs` those whose 64 bytes are two registers of 256 bits.

#![allow(unsafe_code)] // kernel

mod ymm;
mod zmm;

use std::arch::x86_64::*;

use kt_core::format::fp8::E4M3;

use crate::dots::LinesAt;
use crate::lines::{Codes, Floats};
use crate::tile::Tile;
use crate::tiled::TileProduct;
use crate::words::Kind;
use crate::words::full::{Memory, Unit};

pub(crate) use ymm::{Avx2, AvxVnni};
pub(crate) use zmm::{Bf16, Plain, Tiled, Vbmi, Vnni};

/// Work that is to be compiled for an instruction set.
pub trait Job {
    /// Whether it has more in registers of 512 bits than there are, in loops that matter: such jobs have an aligned stack.
    const SPILLS: bool = false;

    /// Does it. For [`Isa::run`], implementations are `#[inline(always)]`: else they would be compiled without the instructions.
    fn go<I: Isa>(self, isa: I);
}

/// What vector operations beside products cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ports {
    /// Often nothing: there are ports for them that have no products.
    Own,
    /// The same, and there are two products of 512 bits a cycle, each of which takes four (AMD's Zen 5): eight sums are too few, and products that broadcast their
    /// inputs from memory wait for loads, of which there are two as well.
    Double,
    /// As much as products do, on whose ports they are: all 512-bit operations of Intel's CPUs are on two ports; loads take some of their time, too (`PERFORMANCE.md`). And
    /// `vdpbf16ps` is half as fast there as F32's products are. Measured on two Xeons.
    Shared,
}

/// What a bit per column does to codes, which are 128 more than what they stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bits {
    /// Nothing: dwords of any kind.
    Nothing,
    /// Negates what the code stands for.
    Negate,
    /// Takes 2 away.
    TwoLess,
}

/// A grid of `LEN` points of `COLS` columns, 4 or 8; `LEN` is a power of two from 256 up.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Grid<const COLS: usize, const LEN: usize> {
    /// The coordinates of points, plus 128.
    pub(crate) points: [[u8; COLS]; LEN],
    /// The coordinates as digits: of two bits each if there are eight of them, else of four bits, those of columns 1 and 2 swapped.
    pub(crate) digits: [u16; LEN],
    /// What digits stand for.
    pub(crate) values: [u8; 16],
}

/// An instruction set.
///
/// # Safety
/// A value must exist only on a CPU with the features that its `run` enables; its operations use no others.
pub unsafe trait Isa: Copy {
    /// 64 bytes: a line, or 16 dwords.
    type Int: Copy;
    /// 16 F32.
    type Flt: Copy;
    /// What [`Isa::dot_wide`] wants of a line.
    type Wide: Copy;
    /// Two consecutive inputs of the bf16 path, broadcast to all outputs.
    type Pair: Copy;
    /// The tables of [`Isa::fp8_to_bf16`], to be loaded once per loop.
    type Fp8Table: Copy;
    /// The lowest tier with the same int8 path: code is compiled for that one only.
    type ForInt8: Isa;
    /// The lowest tier with the same int8 path of codes that are looked up.
    type ForLookups: Isa;
    /// The lowest tier with the same bf16 path.
    type ForBf16: Isa;
    /// The lowest tier with registers as long.
    type ForF32: Isa;
    /// Whether there are 32 registers, one for 64 bytes; else 16, two for 64 bytes.
    const LARGE: bool;
    /// Bytes of one number in the inputs of the bf16 path: 2 (BF16) or 4 (F32). Where there is a tile unit, of rows that stream, which are widened before.
    const INPUT_BYTES: usize;
    /// Whether products of four bytes are added to dwords: no product of bytes is too large for that.
    const VNNI: bool;
    /// Whether nibbles of a byte are looked up without being told apart first.
    const VBMI: bool = false;
    /// What [`Isa::wide`] subtracts from the codes.
    const WIDE_OFFSET: i32 = if Self::VNNI { 0 } else { 128 };
    /// What products of [`Isa::fp8_to_bf16`] are to be multiplied with.
    const FP8_UP: f32;
    /// Whether [`Isa::fp8_shifted`] is for lines of normal numbers alone.
    const FP8_NORMAL: bool = false;
    /// Whether products of many rows run on a tile unit. Those of few rows that are not exact then add in its order, so that the bits are
    /// the same.
    const TILES: bool = false;

    /// Does a job with the instructions enabled.
    fn run<J: Job>(self, job: J);
    /// See [`Isa::ForInt8`].
    fn for_int8(self) -> Self::ForInt8;
    /// See [`Isa::ForLookups`].
    fn for_lookups(self) -> Self::ForLookups;
    /// See [`Isa::ForBf16`].
    fn for_bf16(self) -> Self::ForBf16;
    /// See [`Isa::ForF32`].
    fn for_f32(self) -> Self::ForF32;
    /// See [`Ports`].
    #[inline(always)]
    fn ports(self) -> Ports {
        Ports::Own
    }
    /// How many rows stream, where there are tiles for `most` of them; more go over cached lines.
    #[inline(always)]
    fn stream_rows(self, most: usize) -> usize {
        most
    }
    /// Multiplies on the tile unit; only where there is one.
    ///
    /// # Safety
    /// As [`TileUnit::multiply`](crate::tiled::TileUnit::multiply).
    unsafe fn multiply_tiles(self, _product: &TileProduct) {
        unreachable!("no tile unit")
    }

    /// Runs a tile of `rows` rows x the panels of a bundle, whose lines stream, on the tile unit; only where there is one.
    #[inline(always)]
    fn stream_on_tiles<L: Floats, const SCALED: u8, const P: usize>(self, _rows: usize, _tile: Tile<'_>) {
        unreachable!("no tile unit")
    }

    /// The same of integers with one scale an output.
    #[inline(always)]
    fn stream_ints_on_tiles<L: Codes>(self, _rows: usize, _tile: Tile<'_>) {
        unreachable!("no tile unit")
    }

    /// Adds the products of lines of codes of four panels to the sums of four to six rows; only with VNNI of 512 bits.
    ///
    /// # Safety
    /// They are readable.
    #[inline(always)]
    unsafe fn dot_lines<const R: usize, const P: usize>(self, _sums: &mut [[Self::Int; P]; R], _at: LinesAt) {
        unreachable!("no VNNI of 512 bits")
    }

    /// The same of F32 numbers, or of `PAIRS` of BF16 numbers, with F32 inputs; only with registers of 512 bits.
    ///
    /// # Safety
    /// They are readable.
    #[inline(always)]
    unsafe fn mul_add_lines<const PAIRS: bool, const R: usize, const P: usize>(
        self,
        _sums: &mut [[Self::Flt; P]; R],
        _at: LinesAt,
    ) {
        unreachable!("no registers of 512 bits")
    }

    /// Runs a tile of `r` rows of integers with words for scales; only with VNNI of 512 bits.
    #[inline(always)]
    fn multiply_words(self, _kind: Kind, _r: usize, _tile: Tile<'_>) {
        unreachable!("no VNNI of 512 bits")
    }

    /// Adds the products of blocks to the sums of a tile of words that fills the registers; only with VNNI.
    ///
    /// # Safety
    /// What it reads is readable.
    #[inline(always)]
    unsafe fn add_unit<const R: usize, const P: usize, const GROUP: usize, const MINIMA: bool>(
        self,
        _memory: &mut Memory<R, P>,
        _at: Unit,
    ) {
        unreachable!("no VNNI")
    }

    /// 64 bytes.
    ///
    /// # Safety
    /// `p .. p + 64` is readable.
    unsafe fn load(self, p: *const u8) -> Self::Int;
    /// Writes 64 bytes.
    ///
    /// # Safety
    /// `p .. p + 64` is writable.
    unsafe fn store(self, p: *mut u8, v: Self::Int);
    /// Four bytes, 16 times.
    ///
    /// # Safety
    /// `p .. p + 4` is readable.
    unsafe fn load_dword(self, p: *const u8) -> Self::Int;
    /// One F32, 16 times.
    ///
    /// # Safety
    /// `p .. p + 4` is readable.
    unsafe fn load_f32(self, p: *const u8) -> Self::Flt;
    /// 16 F16 as F32.
    ///
    /// # Safety
    /// `p .. p + 32` is readable.
    unsafe fn load_f16(self, p: *const u8) -> Self::Flt;
    /// 16 unsigned bytes as dwords.
    ///
    /// # Safety
    /// `p .. p + 16` is readable.
    unsafe fn load_u8(self, p: *const u8) -> Self::Int;
    /// 32 unsigned bytes as words.
    ///
    /// # Safety
    /// `p .. p + 32` is readable.
    unsafe fn load_u8_words(self, p: *const u8) -> Self::Int;
    /// 16 signed bytes as dwords.
    ///
    /// # Safety
    /// `p .. p + 16` is readable.
    unsafe fn load_i8(self, p: *const u8) -> Self::Int;
    /// 16 signed words as dwords.
    ///
    /// # Safety
    /// `p .. p + 32` is readable.
    unsafe fn load_i16(self, p: *const u8) -> Self::Int;
    /// 16 E4M3 codes, none NaN, as F32 times 2^-8.
    ///
    /// # Safety
    /// `p .. p + 16` is readable.
    unsafe fn load_e4m3(self, p: *const u8) -> Self::Flt;
    /// The first `n` numbers; the others are 0.
    ///
    /// # Safety
    /// `p .. p + n` is readable.
    unsafe fn load_first(self, p: *const f32, n: usize) -> Self::Flt;
    /// Writes the first `n` numbers.
    ///
    /// # Safety
    /// `p .. p + n` is writable.
    unsafe fn store_first(self, p: *mut f32, n: usize, v: Self::Flt);

    /// 16 zeros.
    fn zero(self) -> Self::Flt;
    /// 16 times a number.
    fn splat(self, v: i32) -> Self::Int;
    /// The bits.
    fn as_f32(self, v: Self::Int) -> Self::Flt;
    /// The values of dwords.
    fn to_f32(self, v: Self::Int) -> Self::Flt;
    /// `a * b`.
    fn mul(self, a: Self::Flt, b: Self::Flt) -> Self::Flt;
    /// `a * b + c`, rounded once.
    fn mul_add(self, a: Self::Flt, b: Self::Flt, c: Self::Flt) -> Self::Flt;
    /// Powers of two, as [`Isa::times_power`] wants them.
    fn power(self, v: Self::Flt) -> Self::Flt;
    /// `v` times powers of two: what [`Isa::mul`] gives, but beside products where it can be.
    fn times_power(self, v: Self::Flt, power: Self::Flt) -> Self::Flt;
    /// 16 times a number.
    fn splat_f32(self, v: f32) -> Self::Flt;
    /// `a + b` of dwords.
    fn add(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// Shifts dwords up by `N` bits.
    fn up<const N: u32>(self, v: Self::Int) -> Self::Int;
    /// Shifts signed dwords down by `N` bits.
    fn down<const N: u32>(self, v: Self::Int) -> Self::Int;
    /// The low words of `high` above those of `low`.
    fn words(self, high: Self::Int, low: Self::Int) -> Self::Int;
    /// The larger one, of unsigned dwords.
    fn max(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// Magnitudes.
    fn abs(self, v: Self::Flt) -> Self::Flt;
    /// What remains after the nearest integer, ties to even, is subtracted.
    fn fraction(self, v: Self::Flt) -> Self::Flt;
    /// The nearest integers, ties to even.
    fn rounded(self, v: Self::Flt) -> Self::Int;
    /// The sum of dwords.
    fn sum(self, v: Self::Int) -> i32;
    /// Which of four has the smallest sum times its `worth`, the first of equals. Sums are of pairs 8 lanes apart, then 4, 2 and 1.
    fn least_sum(self, v: [Self::Flt; 4], worth: [f32; 4]) -> usize;
    /// The largest lane, of unsigned dwords.
    fn largest(self, v: Self::Int) -> u32;
    /// Quarter `j` of register `i` as quarter `i` of register `j`.
    fn quarters(self, v: [Self::Flt; 4]) -> [Self::Flt; 4];
    /// The lanes of each quarter in another order: two bits of `ORDER` for each, the first one lowest.
    fn in_quarters<const ORDER: i32>(self, v: Self::Int) -> Self::Int;
    /// Lane `4 * g + t`: the sum of quarter `g` of register `t`, of lanes two apart, then of both.
    fn sums_of_quarters(self, v: [Self::Flt; 4]) -> Self::Flt;
    /// Dwords in -128..=127 as bytes: those of quarter `g` of each register, one after the other, as quarter `g`.
    fn bytes(self, v: [Self::Int; 4]) -> Self::Int;
    /// The quarters of both by turns.
    fn mix_quarters(self, a: Self::Int, b: Self::Int) -> [Self::Int; 2];
    /// Stores the first dword of each quarter.
    ///
    /// # Safety
    /// `p .. p + 16` is writable.
    unsafe fn store_firsts(self, p: *mut u8, v: Self::Int);
    /// `a + b`.
    fn add_f32(self, a: Self::Flt, b: Self::Flt) -> Self::Flt;
    /// The smaller one.
    fn least(self, a: Self::Flt, b: Self::Flt) -> Self::Flt;
    /// `v` where `a` equals `b`, zero elsewhere.
    fn where_equal(self, a: Self::Flt, b: Self::Flt, v: Self::Flt) -> Self::Flt;
    /// `a / b`.
    fn div(self, a: Self::Flt, b: Self::Flt) -> Self::Flt;
    /// Stores dwords in -128..=127 as bytes.
    ///
    /// # Safety
    /// `p .. p + 16` is writable.
    unsafe fn store_i8(self, p: *mut u8, v: Self::Int);
    /// `a - b` of dwords.
    fn sub(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// `a & b`.
    fn and(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// Bitwise.
    fn xor(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// Adds words, without carries between them.
    fn add_words(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// The low words of the products of words.
    fn mul_words(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// The products of signed words over 2^15, rounded: the nearest, upwards from the middle.
    fn mul_words_high(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// Adds the products of the signed words of each dword.
    fn madd(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// E8M0 exponents in dwords as F32; 255 is infinite.
    fn exp2(self, v: Self::Int) -> Self::Flt;
    /// Low and high nibbles, each in a byte of its own.
    fn nibbles(self, v: Self::Int) -> [Self::Int; 2];
    /// 128 numbers of two bits, of two lines `a` and `b`, moved up by `UP`, 0 or 3: byte `j` is `a[j] | a[32 + j] << 2 | b[j] << 4 | b[32 + j] << 6`.
    ///
    /// # Safety
    /// `p .. p + 32` is readable.
    unsafe fn load_bit_pairs<const UP: u32>(self, p: *const u8) -> [Self::Int; 2];
    /// A line of which 32 bytes have the low four bits of each byte: the first half of it in their low nibbles, the second in their high ones. The
    /// other bits are anything.
    ///
    /// # Safety
    /// `p .. p + 32` is readable.
    unsafe fn load_nibble_halves(self, p: *const u8) -> Self::Int;
    /// In each 16 bytes: the bytes of `table` at the indices `v`, which are below 16, or 128 for a zero.
    fn lookup(self, table: Self::Int, v: Self::Int) -> Self::Int;
    /// What [`Isa::lookup`] gives for the low and for the high nibbles of a line; `table` has the same 16 bytes four times.
    #[inline(always)]
    fn lookup_nibbles(self, table: Self::Int, v: Self::Int) -> [Self::Int; 2] {
        let [low, high] = self.nibbles(v);
        [self.lookup(table, low), self.lookup(table, high)]
    }
    /// The F16 of each half of a line as F32.
    fn f16_halves(self, v: Self::Int) -> [Self::Flt; 2];
    /// The bits, as a line.
    fn as_int(self, v: Self::Flt) -> Self::Int;

    /// An F16 as F32.
    #[inline(always)]
    fn f16(self, bits: u16) -> f32 {
        // SAFETY: all instruction sets have F16C.
        unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))) }
    }
    /// The low and the high dwords of eight qwords.
    #[inline(always)]
    fn dwords(self, qwords: &[u8; 64]) -> [[u8; 32]; 2] {
        // SAFETY: all instruction sets have AVX2.
        unsafe { dwords(qwords) }
    }
    /// Of eight dwords, the eight signs that each seven bits stand for, as [`even_signs`] has them.
    ///
    /// [`even_signs`]: kt_core::format::ggml::even_signs
    #[inline(always)]
    fn even_signs(self, words: &[u8; 32]) -> [u8; 32] {
        // SAFETY: all instruction sets have AVX2.
        unsafe { even_signs(words) }
    }
    /// Eight words, four times each.
    #[inline(always)]
    fn four_of_each(self, words: &[u8; 16]) -> [u8; 64] {
        // SAFETY: all instruction sets have AVX2.
        unsafe { four_of_each(words) }
    }
    /// The coordinates, plus 128, of points that make 256 columns; their places are taken modulo the length of the grid.
    fn look_up<const COLS: usize, const LEN: usize>(self, grid: &Grid<COLS, LEN>, points: &[u16; 64])
    -> [Self::Int; 4];
    /// Codes after bits have done to them what they do.
    fn with_signs(self, codes: Self::Int, how: Bits, bits: [u8; 8]) -> Self::Int;
    /// Sums of four consecutive dwords each: dword `4 * j + i` is the sum of dwords `4 * j .. 4 * j + 4` of `v[i]`.
    fn sums_of_four(self, v: [Self::Int; 4]) -> Self::Int;
    /// Transposes 16 x 16 dwords, after bits have done to the bytes of each row what they do.
    fn transpose(self, rows: [&[u8; 64]; 16], how: Bits, bits: [[u8; 8]; 16], lines: &mut [[u8; 64]; 16]);

    /// Codes of up to 8 bits as operands of [`Isa::dot_wide`].
    fn wide(self, w: Self::Int) -> Self::Wide;
    /// Adds to each of 16 sums the products of 4 codes, less [`Isa::WIDE_OFFSET`], with 4 signed bytes in -127..=127, exactly.
    fn dot_wide(self, acc: Self::Int, w: Self::Wide, x: Self::Int) -> Self::Int;
    /// Adds products of codes of up to 7 bits, no sum of two of which is too large for a word, with such bytes, exactly.
    fn dot_small(self, acc: Self::Int, w: Self::Int, x: Self::Int) -> Self::Int;
    /// Adds products as [`Isa::dot_small`] does, of smaller codes. Without VNNI to two words: those of the first two of each four columns to the lower one,
    /// and those of the others to the upper one.
    fn dot_narrow(self, acc: Self::Int, w: Self::Int, x: Self::Int) -> Self::Int;

    /// Broadcasts two inputs.
    ///
    /// # Safety
    /// `2 * INPUT_BYTES` bytes at `p` are readable.
    unsafe fn load_pair(self, p: *const u8) -> Self::Pair;
    /// Adds to each of 16 sums the products of 2 BF16 weights with 2 inputs.
    fn dot_bf16(self, acc: Self::Flt, w: Self::Int, x: Self::Pair) -> Self::Flt;
    /// As [`Isa::dot_bf16`], the first and the second product to a sum of its own; only where there is a tile unit.
    #[inline(always)]
    fn dot_chains(self, _acc: [Self::Flt; 2], _w: Self::Int, _x: Self::Pair) -> [Self::Flt; 2] {
        unreachable!("no tile unit")
    }
    /// Adds what [`Isa::dot_chains`] summed to a sum, as the tile unit does; only where there is one.
    #[inline(always)]
    fn end_chains(self, _sum: Self::Flt, _chains: [Self::Flt; 2]) -> Self::Flt {
        unreachable!("no tile unit")
    }

    /// Two columns of 16 outputs as BF16, the nearest, away from zero from the middle; of NaN for those that are [plain](Isa::plain_nan). Only where there
    /// is a tile unit.
    #[inline(always)]
    fn bf16_pairs(self, _first: Self::Flt, _second: Self::Flt) -> Self::Int {
        unreachable!("no tile unit")
    }
    /// The same numbers, with one NaN for all where there is a tile unit.
    #[inline(always)]
    fn plain_nan(self, v: Self::Flt) -> Self::Flt {
        v
    }
    /// Whether weights with scales are BF16 numbers for all rows, and not as exact as those that stream; only where there is a tile unit.
    #[inline(always)]
    fn widens(self) -> bool {
        unreachable!("no tile unit")
    }

    /// See [`Isa::Fp8Table`].
    fn fp8_table(self) -> Self::Fp8Table;
    /// 64 E4M3 codes as BF16, over [`Isa::FP8_UP`], exactly; what packing makes of NaN codes is in `layout.rs`. In each 128-bit lane
    /// the first 8 codes go to the first result, the others to the second.
    fn fp8_to_bf16(self, table: Self::Fp8Table, codes: Self::Int) -> [Self::Int; 2];
    /// The same in fewer instructions: the bits of a code are moved to where BF16 has them. With [`Isa::FP8_NORMAL`] some of the exponent's are set
    /// besides, which is right for normal codes, and else what comes out is 2^80 times smaller, subnormal codes being subnormal numbers.
    fn fp8_shifted(self, codes: Self::Int) -> [Self::Int; 2];
    /// Inputs times what [`Isa::fp8_shifted`] lacks. Those beyond 2^47 become infinite.
    #[inline(always)]
    fn pair_up(self, _x: Self::Pair) -> Self::Pair {
        unreachable!("nothing is lacking")
    }
    /// [`Isa::dot_bf16`] of weights times what [`Isa::fp8_shifted`] lacks.
    #[inline(always)]
    fn dot_up(self, _acc: Self::Flt, _w: Self::Int, _x: Self::Pair) -> Self::Flt {
        unreachable!("nothing is lacking")
    }
}

/// Most rows that stream, where tiles of more rows over cached lines have as little to do: as many as keep their sums in registers.
pub(crate) const fn stream_rows(large: bool) -> usize {
    if large { 8 } else { 6 }
}

/// Most rows that stream where more would have their lines unpacked first, or read twice by tiles with fewer rows each: sums and totals are 24 of 32 registers.
pub(crate) const fn most_stream_rows(large: bool) -> usize {
    if large { 12 } else { stream_rows(false) }
}

/// See [`Isa::least_sum`], of sums of lanes 8 apart.
///
/// # Safety
/// The CPU has AVX.
#[inline(always)]
unsafe fn least_sum8(v: [__m256; 4], worth: [f32; 4]) -> usize {
    // SAFETY: the instructions by the caller's promise; registers only.
    unsafe {
        let mut four = [_mm_setzero_ps(); 4];
        for (four, v) in four.iter_mut().zip(v) {
            *four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        }
        // Two sums of lanes 2 apart from each, side by side.
        let ab = _mm_add_ps(_mm_movelh_ps(four[0], four[1]), _mm_movehl_ps(four[1], four[0]));
        let cd = _mm_add_ps(_mm_movelh_ps(four[2], four[3]), _mm_movehl_ps(four[3], four[2]));
        let sums = _mm_add_ps(_mm_shuffle_ps::<0b10_00_10_00>(ab, cd), _mm_shuffle_ps::<0b11_01_11_01>(ab, cd));
        let sums = _mm_mul_ps(sums, _mm_setr_ps(worth[0], worth[1], worth[2], worth[3]));
        let least = _mm_min_ps(sums, _mm_shuffle_ps::<0b01_00_11_10>(sums, sums));
        let least = _mm_min_ps(least, _mm_shuffle_ps::<0b10_11_00_01>(least, least));
        // One at least is equal; the bit keeps the index in range whatever comes.
        (_mm_movemask_ps(_mm_cmpeq_ps(sums, least)) | 8).trailing_zeros() as usize
    }
}

/// The sum of dwords.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn sum8(v: __m256i) -> i32 {
    // SAFETY: the instructions by the caller's promise; registers only.
    unsafe {
        let v = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
        let v = _mm_add_epi32(v, _mm_unpackhi_epi64(v, v));
        _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32::<1>(v)))
    }
}

/// The largest of unsigned dwords.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn largest8(v: __m256i) -> u32 {
    // SAFETY: the instructions by the caller's promise; registers only.
    unsafe {
        let v = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
        let v = _mm_max_epu32(v, _mm_unpackhi_epi64(v, v));
        _mm_cvtsi128_si32(_mm_max_epu32(v, _mm_shuffle_epi32::<1>(v))) as u32
    }
}

/// The coordinates, plus 128, of points of 32 columns from column `32 * at` on, loaded one after another.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn load_points<const COLS: usize, const LEN: usize>(
    grid: &Grid<COLS, LEN>,
    points: &[u16; 64],
    at: usize,
) -> __m256i {
    const { assert!((COLS == 4 || COLS == 8) && LEN.is_power_of_two()) };
    // SAFETY: the instructions by the caller's promise; places are in the grid, whose points have `COLS` bytes.
    unsafe {
        let point = |i: usize| grid.points.as_ptr().add(points[32 / COLS * at + i] as usize & (LEN - 1));
        if COLS == 8 {
            let point = |i| point(i).cast::<i64>().read_unaligned();
            _mm256_set_epi64x(point(3), point(2), point(1), point(0))
        } else {
            let point = |i| point(i).cast::<i32>().read_unaligned();
            _mm256_set_epi32(point(7), point(6), point(5), point(4), point(3), point(2), point(1), point(0))
        }
    }
}

/// See [`Isa::dwords`].
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn dwords(qwords: &[u8; 64]) -> [[u8; 32]; 2] {
    // SAFETY: the instructions by the caller's promise; 64 bytes are read.
    unsafe {
        let (a, b) = (_mm256_loadu_ps(qwords.as_ptr().cast()), _mm256_loadu_ps(qwords[32..].as_ptr().cast()));
        let even = _mm256_castps_si256(_mm256_shuffle_ps::<0b10_00_10_00>(a, b));
        let odd = _mm256_castps_si256(_mm256_shuffle_ps::<0b11_01_11_01>(a, b));
        let even = _mm256_permute4x64_epi64::<0b11_01_10_00>(even);
        let odd = _mm256_permute4x64_epi64::<0b11_01_10_00>(odd);
        std::mem::transmute::<[__m256i; 2], [[u8; 32]; 2]>([even, odd])
    }
}

/// See [`Isa::even_signs`].
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn even_signs(words: &[u8; 32]) -> [u8; 32] {
    // SAFETY: the instructions by the caller's promise; 32 bytes are read.
    unsafe {
        let words = _mm256_loadu_si256(words.as_ptr().cast());
        // Each seven bits to a byte.
        let a = _mm256_and_si256(words, _mm256_set1_epi32(0x7f));
        let b = _mm256_and_si256(_mm256_slli_epi32::<1>(words), _mm256_set1_epi32(0x7f00));
        let c = _mm256_and_si256(_mm256_slli_epi32::<2>(words), _mm256_set1_epi32(0x7f_0000));
        let d = _mm256_and_si256(_mm256_slli_epi32::<3>(words), _mm256_set1_epi32(0x7f00_0000));
        let signs = _mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d));
        // The highest bit of each number with an odd number of bits: those of four and of three bits.
        let odd = _mm256_broadcastsi128_si256(_mm_set_epi64x(
            0x0080_8000_8000_0080_u64 as i64,
            0x8000_0080_0080_8000_u64 as i64,
        ));
        let high = _mm256_and_si256(_mm256_srli_epi16::<4>(signs), _mm256_set1_epi8(7));
        let (low, high) = (_mm256_shuffle_epi8(odd, signs), _mm256_shuffle_epi8(odd, high));
        std::mem::transmute::<__m256i, [u8; 32]>(_mm256_xor_si256(signs, _mm256_xor_si256(low, high)))
    }
}

/// See [`Isa::four_of_each`].
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn four_of_each(words: &[u8; 16]) -> [u8; 64] {
    // SAFETY: the instructions by the caller's promise; 16 bytes are read.
    unsafe {
        let words = _mm256_broadcastsi128_si256(_mm_loadu_si128(words.as_ptr().cast()));
        let of = |word: i64| 0x0100_0100_0100_0100 + 0x0202_0202_0202_0202 * word;
        let low = _mm256_shuffle_epi8(words, _mm256_set_epi64x(of(3), of(2), of(1), of(0)));
        let high = _mm256_shuffle_epi8(words, _mm256_set_epi64x(of(7), of(6), of(5), of(4)));
        std::mem::transmute::<[__m256i; 2], [u8; 64]>([low, high])
    }
}

/// BF16 bits of an E4M3 code, over `up`; each is exact, subnormal codes being normal BF16 numbers. A NaN code goes on the
/// way the others do, as [`Isa::fp8_shifted`] has it: NaN comes from one place only, the scale, so that its bits are always the same.
const fn fp8_bits(code: usize, up: f32) -> u16 {
    let value = if code % 128 == 127 { 480.0 } else { E4M3[code] };
    ((value / up).to_bits() >> 16) as u16
}

/// A value per tier, which proves its instructions.
macro_rules! token {
    ($(#[$doc:meta])* $name:ident, $tier:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name($crate::isa::Ports);
        impl $name {
            #[doc = concat!("A value for a CPU with the instructions of tier `", $tier, "`.")]
            ///
            /// # Safety
            /// The CPU must have them.
            #[inline(always)]
            pub(crate) unsafe fn new(ports: $crate::isa::Ports) -> Self {
                Self(ports)
            }
        }
    };
}
pub(crate) use token;

/// Safe operations out of intrinsics that touch registers only.
macro_rules! ops {
    ($($(#[$doc:meta])* fn $name:ident($self:ident $(, $a:ident: $t:ty)*) -> $r:ty { $e:expr })*) => {
        $($(#[$doc])*
        #[inline(always)]
        #[allow(unused_unsafe)] // some only pass a value on
        fn $name($self $(, $a: $t)*) -> $r {
            // SAFETY: a value of the type proves the instructions; registers only.
            unsafe { $e }
        })*
    };
}
pub(crate) use ops;

/// A line on the stack. A function that has one aligns its stack, and only then are registers that it has no room for kept at aligned
/// addresses: compilers decide on that before they know of these. Else many of them are across two lines, by chance of where a program's stack
/// begins: with registers of 256 bits, few rows took up to five times as long, with those of 512 [some jobs](Job::SPILLS) up to a third longer. It costs a register
/// for addresses: few rows of integers would take up to 8 % more time with registers of 512 bits.
#[repr(align(64))]
pub(crate) struct AlignedLine {
    _bytes: [u8; 64],
}

/// The function of a tier that everything inlines into.
macro_rules! run_with {
    ($features:literal) => {
        #[inline(always)]
        fn run<J: $crate::isa::Job>(self, job: J) {
            #[target_feature(enable = $features)]
            fn inner<I: $crate::isa::Isa, J: $crate::isa::Job>(isa: I, job: J) {
                if const { !I::LARGE || J::SPILLS } {
                    let mut line = std::mem::MaybeUninit::<$crate::isa::AlignedLine>::uninit();
                    std::hint::black_box(&mut line);
                }
                job.go(isa);
            }
            // SAFETY: `self` proves the features.
            unsafe { inner(self, job) }
        }
    };
}
pub(crate) use run_with;

/// Which tier's code does the work of another.
macro_rules! same_code {
    (int8: $int8:ident, lookups: $lookups:ident, bf16: $bf16:ident, f32: $f32:ident) => {
        type ForInt8 = $int8;
        type ForLookups = $lookups;
        type ForBf16 = $bf16;
        type ForF32 = $f32;

        #[inline(always)]
        fn ports(self) -> $crate::isa::Ports {
            self.0
        }

        #[inline(always)]
        fn for_int8(self) -> $int8 {
            $int8(self.0)
        }

        #[inline(always)]
        fn for_lookups(self) -> $lookups {
            $lookups(self.0)
        }

        #[inline(always)]
        fn for_bf16(self) -> $bf16 {
            $bf16(self.0)
        }

        #[inline(always)]
        fn for_f32(self) -> $f32 {
            $f32(self.0)
        }
    };
}
pub(crate) use same_code;
