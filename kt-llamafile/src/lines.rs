//! How packed steps become codes, and how their scales are read; see `layout.rs` for where they are.

#![allow(unsafe_code)] // kernel

use kt_avx512::engine::{Bytes, Codes, Isa, LINE, Lines, Nibbles, PANEL, Scale};
use kt_core::format::ggml::IQ4_VALUES;

/// Defines codes that are unpacked without a table: the bytes of a step in each plane, whether plane 1 lies apart, and columns whose narrow sums
/// fit.
macro_rules! codes {
    ($(#[$doc:meta])* $name:ident, $planes:expr, apart: $apart:literal, $span:literal, |$isa:ident, $at:ident| $operands:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $name;

        impl Lines for $name {
            const OPERANDS: usize = 2;
            const PLANES: [usize; 2] = $planes;
            const APART: bool = $apart;
            type Table<I: Isa> = ();
            #[inline(always)]
            fn table<I: Isa>(_: I) {}
            #[inline(always)]
            unsafe fn operands<I: Isa>($isa: I, _: (), $at: [*const u8; 2]) -> [I::Int; 2] {
                // SAFETY: the bytes of a step in both planes, by the caller's promise.
                unsafe { $operands }
            }
        }

        impl Codes for $name {
            const SPAN: usize = $span;
            type Unpacked = Bytes<$span>;
        }
    };
}

codes!(
    /// Two bits: 8 x 2 x 3 x 127 < 2^15.
    TwoBits, [32, 0], apart: false, 32, |isa, at| isa.load_bit_pairs(at[0])
);
codes!(
    /// Two bits and a third: 8 x 2 x 7 x 127 < 2^15.
    ThreeBits, [32, 16], apart: true, 32, |isa, at| {
        isa.with_bits::<2>(isa.load_bit_pairs(at[0]), at[1])
    }
);
codes!(
    /// Four bits and a fifth: 4 x 2 x 31 x 127 < 2^15. Their planes together measured faster with 512 bits and slower with 256, those of six
    /// bits slower, those of three no different.
    FiveBits, [LINE, 16], apart: false, 16, |isa, at| {
        isa.with_bits::<4>(Nibbles::operands(isa, (), at), at[1])
    }
);
codes!(
    /// Four bits and two: 2 x 2 x 63 x 127 < 2^15.
    SixBits, [LINE, 32], apart: true, 8, |isa, at| isa.with_bit_pairs(Nibbles::operands(isa, (), at), at[1])
);

/// The values of IQ4 codes plus 128, in each 16 bytes.
static IQ4_TABLE: [u8; 64] = {
    let mut t = [0; 64];
    let mut i = 0;
    while i < 64 {
        t[i] = (IQ4_VALUES[i % 16] as i32 + 128) as u8;
        i += 1;
    }
    t
};

/// Nibbles that stand for [`IQ4_VALUES`].
#[derive(Clone, Copy)]
pub struct Iq4;

impl Lines for Iq4 {
    const OPERANDS: usize = 2;
    type Table<I: Isa> = I::Int;
    #[inline(always)]
    fn table<I: Isa>(isa: I) -> I::Int {
        // SAFETY: 64 bytes.
        unsafe { isa.load(IQ4_TABLE.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn operands<I: Isa>(isa: I, table: I::Int, at: [*const u8; 2]) -> [I::Int; 2] {
        // SAFETY: a line, by the caller's promise.
        let [low, high] = unsafe { Nibbles::operands(isa, (), at) };
        [isa.lookup(table, low), isa.lookup(table, high)]
    }
}

impl Codes for Iq4 {
    const SPAN: usize = 0;
    type Unpacked = Bytes<0>;
}

/// F16 `d`; with `M`, F16 `m` as well, which is added.
#[derive(Clone, Copy)]
pub struct Half<const M: bool>;

impl<const M: bool> Scale for Half<M> {
    const RECORD: usize = if M { PANEL * 4 } else { PANEL * 2 };
    const OUTPUTS: bool = false;
    const MINIMA: bool = M;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, record: *const u8, _: *const u8) -> I::Flt {
        // SAFETY: readable by the caller's promise.
        unsafe { isa.load_f16(record) }
    }
    #[inline(always)]
    unsafe fn minima<I: Isa>(isa: I, record: *const u8, _: *const u8) -> I::Flt {
        // SAFETY: readable by the caller's promise.
        unsafe { isa.load_f16(record.wrapping_add(PANEL * 2)) }
    }
}

/// Halves of E8M0 powers of two.
#[derive(Clone, Copy)]
pub struct HalfPower;

impl Scale for HalfPower {
    const RECORD: usize = PANEL;
    const OUTPUTS: bool = false;
    const POWERS: bool = true;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, record: *const u8, _: *const u8) -> I::Flt {
        // SAFETY: readable by the caller's promise.
        isa.mul(isa.exp2(unsafe { isa.load_u8(record) }), isa.splat_f32(0.5))
    }
}

/// I8 scales times F16 `d`.
#[derive(Clone, Copy)]
pub struct Signed;

impl Scale for Signed {
    const RECORD: usize = PANEL;
    const SUPER: usize = PANEL * 2;
    const OUTPUTS: bool = false;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, record: *const u8, above: *const u8) -> I::Flt {
        // SAFETY: readable by the caller's promise.
        unsafe { isa.mul(isa.to_f32(isa.load_i8(record)), isa.load_f16(above)) }
    }
}

/// I8 scales of 16 columns, times F16 `d`.
#[derive(Clone, Copy)]
pub struct SignedPairs;

impl Scale for SignedPairs {
    const RECORD: usize = PANEL;
    const SUPER: usize = PANEL * 2;
    const OUTPUTS: bool = false;
    const PAIRS: bool = true;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, _: *const u8, above: *const u8) -> I::Flt {
        // SAFETY: readable by the caller's promise.
        unsafe { isa.load_f16(above) }
    }
    #[inline(always)]
    unsafe fn pair<I: Isa>(isa: I, records: *const u8) -> I::Int {
        // SAFETY: readable by the caller's promise.
        unsafe { isa.words(isa.load_i8(records), isa.load_i8(records.wrapping_add(PANEL))) }
    }
}

/// U8 scales times F16 `d`, less U8 minima times F16 `dmin`.
#[derive(Clone, Copy)]
pub struct WithMinima;

impl Scale for WithMinima {
    const RECORD: usize = PANEL * 2;
    const SUPER: usize = PANEL * 4;
    const OUTPUTS: bool = false;
    const MINIMA: bool = true;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, record: *const u8, above: *const u8) -> I::Flt {
        // SAFETY: readable by the caller's promise.
        unsafe { isa.mul(isa.to_f32(isa.load_u8(record)), isa.load_f16(above)) }
    }
    #[inline(always)]
    unsafe fn minima<I: Isa>(isa: I, record: *const u8, above: *const u8) -> I::Flt {
        // SAFETY: readable by the caller's promise.
        let (m, d) = unsafe { (isa.load_u8(record.wrapping_add(PANEL)), isa.load_f16(above.wrapping_add(PANEL * 2))) };
        isa.mul(isa.to_f32(m), isa.mul(d, isa.splat_f32(-1.0)))
    }
}

/// As [`WithMinima`], scale and minimum in a byte.
#[derive(Clone, Copy)]
pub struct NibblesWithMinima;

impl Scale for NibblesWithMinima {
    const RECORD: usize = PANEL;
    const SUPER: usize = PANEL * 4;
    const OUTPUTS: bool = false;
    const MINIMA: bool = true;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, record: *const u8, above: *const u8) -> I::Flt {
        // SAFETY: readable by the caller's promise.
        let (v, d) = unsafe { (isa.load_u8(record), isa.load_f16(above)) };
        isa.mul(isa.to_f32(isa.and(v, isa.splat(0x0f))), d)
    }
    #[inline(always)]
    unsafe fn minima<I: Isa>(isa: I, record: *const u8, above: *const u8) -> I::Flt {
        // SAFETY: readable by the caller's promise.
        let (v, d) = unsafe { (isa.load_u8(record), isa.load_f16(above.wrapping_add(PANEL * 2))) };
        // The high nibble where it is, 16 times as large.
        isa.mul(isa.to_f32(isa.and(v, isa.splat(0xf0))), isa.mul(d, isa.splat_f32(-1.0 / 16.0)))
    }
}
