//! What a line of 64 bytes holds, how it becomes operands, and how group scales are read.

#![allow(unsafe_code)] // kernel

use crate::isa::{Isa, Job};
use crate::layout::LINE;

/// How the lines of a panel are stored, and how one becomes operands.
pub(crate) trait Lines: Copy {
    /// Operands per stored line.
    const OPERANDS: usize;
    /// What the loop keeps in registers for unpacking.
    type Table<I: Isa>: Copy;
    /// Loads it.
    fn table<I: Isa>(isa: I) -> Self::Table<I>;
    /// The operands of a line, in rising k; only the first [`Lines::OPERANDS`] are used.
    fn operands<I: Isa>(isa: I, table: Self::Table<I>, line: I::Int) -> [I::Int; 2];
}

/// Lines of unsigned codes, four columns of 16 outputs per operand.
pub(crate) trait Codes: Lines {
    /// Columns over which the sums of [`Isa::dot_narrow`] fit; 0 for codes that need [`Isa::dot_wide`].
    const SPAN: usize;
    /// The same operands, each in a line of its own.
    type Unpacked: Codes;
}

/// Lines of floating-point numbers.
pub(crate) trait Floats: Lines {
    /// Operands are two columns of 16 outputs in BF16, or one column in F32.
    const BF16: bool;
    /// The same operands, each in a line of its own.
    type Unpacked: Floats;
}

/// Defines [`Lines`] that are operands.
macro_rules! direct {
    () => {
        const OPERANDS: usize = 1;
        type Table<I: Isa> = ();
        #[inline(always)]
        fn table<I: Isa>(_: I) {}
        #[inline(always)]
        fn operands<I: Isa>(_: I, _: (), line: I::Int) -> [I::Int; 2] {
            [line, line]
        }
    };
}

/// Codes of one byte, which are small enough for sums over `SPAN` columns, or not (0).
#[derive(Clone, Copy)]
pub(crate) struct Bytes<const SPAN: usize>;

impl<const S: usize> Lines for Bytes<S> {
    direct!();
}

impl<const S: usize> Codes for Bytes<S> {
    const SPAN: usize = S;
    type Unpacked = Self;
}

/// Codes 0..16 in nibbles: 8 x 2 x 15 x 127 < 2^15.
#[derive(Clone, Copy)]
pub(crate) struct Nibbles;

impl Lines for Nibbles {
    const OPERANDS: usize = 2;
    type Table<I: Isa> = ();
    #[inline(always)]
    fn table<I: Isa>(_: I) {}
    #[inline(always)]
    fn operands<I: Isa>(isa: I, _: (), line: I::Int) -> [I::Int; 2] {
        isa.nibbles(line)
    }
}

impl Codes for Nibbles {
    const SPAN: usize = 32;
    type Unpacked = Bytes<32>;
}

/// What is added to twice an E2M1 value, so that it becomes a code 0..=24.
pub(crate) const E2M1_ZERO: i32 = 12;

/// Twice the values of E2M1 codes, plus [`E2M1_ZERO`], in each 16 bytes.
static E2M1_TABLE: [u8; 64] = {
    const TWICE: [u8; 8] = [0, 1, 2, 3, 4, 6, 8, 12];
    let mut t = [0; 64];
    let mut i = 0;
    while i < 64 {
        let magnitude = TWICE[i % 8];
        t[i] = if i % 16 < 8 { E2M1_ZERO as u8 + magnitude } else { E2M1_ZERO as u8 - magnitude };
        i += 1;
    }
    t
};

/// E2M1 codes in nibbles, which become 0..=24: 4 x 2 x 24 x 127 < 2^15.
#[derive(Clone, Copy)]
pub(crate) struct E2m1;

impl Lines for E2m1 {
    const OPERANDS: usize = 2;
    type Table<I: Isa> = I::Int;
    #[inline(always)]
    fn table<I: Isa>(isa: I) -> I::Int {
        // SAFETY: 64 bytes.
        unsafe { isa.load(E2M1_TABLE.as_ptr()) }
    }
    #[inline(always)]
    fn operands<I: Isa>(isa: I, table: I::Int, line: I::Int) -> [I::Int; 2] {
        let [low, high] = isa.nibbles(line);
        [isa.lookup(table, low), isa.lookup(table, high)]
    }
}

impl Codes for E2m1 {
    const SPAN: usize = 16;
    type Unpacked = Bytes<16>;
}

/// BF16 numbers.
#[derive(Clone, Copy)]
pub(crate) struct Bf16Lines;

impl Lines for Bf16Lines {
    direct!();
}

impl Floats for Bf16Lines {
    const BF16: bool = true;
    type Unpacked = Self;
}

/// E4M3 codes, which become BF16 numbers.
#[derive(Clone, Copy)]
pub(crate) struct Fp8;

impl Lines for Fp8 {
    const OPERANDS: usize = 2;
    type Table<I: Isa> = I::Fp8Table;
    #[inline(always)]
    fn table<I: Isa>(isa: I) -> I::Fp8Table {
        isa.fp8_table()
    }
    #[inline(always)]
    fn operands<I: Isa>(isa: I, table: I::Fp8Table, line: I::Int) -> [I::Int; 2] {
        isa.fp8_to_bf16(table, line)
    }
}

impl Floats for Fp8 {
    const BF16: bool = true;
    type Unpacked = Bf16Lines;
}

/// F32 numbers.
#[derive(Clone, Copy)]
pub(crate) struct F32Lines;

impl Lines for F32Lines {
    direct!();
}

impl Floats for F32Lines {
    const BF16: bool = false;
    type Unpacked = Self;
}

/// F16 numbers, a column in each half of a line, which become F32.
#[derive(Clone, Copy)]
pub(crate) struct F16Lines;

impl Lines for F16Lines {
    const OPERANDS: usize = 2;
    type Table<I: Isa> = ();
    #[inline(always)]
    fn table<I: Isa>(_: I) {}
    #[inline(always)]
    fn operands<I: Isa>(isa: I, _: (), line: I::Int) -> [I::Int; 2] {
        let [a, b] = isa.f16_halves(line);
        [isa.as_int(a), isa.as_int(b)]
    }
}

impl Floats for F16Lines {
    const BF16: bool = false;
    type Unpacked = F32Lines;
}

/// Scales of the groups of integer codes, of 16 outputs each.
pub(crate) trait Scale: Copy {
    /// Bytes of one; 0 where an output has a single scale.
    const BYTES: usize;
    /// 16 of them.
    ///
    /// # Safety
    /// `p .. p + 16 * BYTES` is readable.
    unsafe fn load<I: Isa>(isa: I, p: *const u8) -> I::Flt;
}

/// No group scales.
#[derive(Clone, Copy)]
pub(crate) struct NoScale;

impl Scale for NoScale {
    const BYTES: usize = 0;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, _: *const u8) -> I::Flt {
        isa.zero()
    }
}

/// F16, relative to the scale of the output.
#[derive(Clone, Copy)]
pub(crate) struct F16Scale;

impl Scale for F16Scale {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, p: *const u8) -> I::Flt {
        // SAFETY: readable by the caller's promise.
        unsafe { isa.load_f16(p) }
    }
}

/// Powers of two: E8M0.
#[derive(Clone, Copy)]
pub(crate) struct E8m0Scale;

impl Scale for E8m0Scale {
    const BYTES: usize = 1;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, p: *const u8) -> I::Flt {
        // SAFETY: readable by the caller's promise.
        isa.exp2(unsafe { isa.load_u8(p) })
    }
}

/// E4M3 times 2^-8.
#[derive(Clone, Copy)]
pub(crate) struct E4m3Scale;

impl Scale for E4m3Scale {
    const BYTES: usize = 1;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, p: *const u8) -> I::Flt {
        // SAFETY: readable by the caller's promise.
        unsafe { isa.load_e4m3(p) }
    }
}

/// Unpacks lines.
pub(crate) struct Unpack<'a, L> {
    pub from: &'a [u8],
    pub to: &'a mut [u8],
    pub lines: std::marker::PhantomData<L>,
}

impl<L: Lines> Job for Unpack<'_, L> {
    #[inline(always)]
    fn go<I: Isa>(self, isa: I) {
        let table = L::table(isa);
        for (from, to) in self.from.chunks_exact(LINE).zip(self.to.chunks_exact_mut(LINE * L::OPERANDS)) {
            // SAFETY: `from` is a line.
            let operands = L::operands(isa, table, unsafe { isa.load(from.as_ptr()) });
            for (to, v) in to.chunks_exact_mut(LINE).zip(operands) {
                // SAFETY: `to` is a line.
                unsafe { isa.store(to.as_mut_ptr(), v) };
            }
        }
    }
}
