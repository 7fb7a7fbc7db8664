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

/// What codes of IQ1 stand for: eight times a coordinate, and one more or less.
pub const IQ1_VALUES: [i8; 6] = [-9, -7, -1, 1, 7, 9];
/// The bit that makes one more one less.
pub const IQ1_FLIP: u8 = 1;
/// What codes of IQ2 stand for: coordinates of its grids, and the same negated.
pub const IQ2_VALUES: [i8; 7] = [8, 25, 43, 0, -8, -25, -43];
/// The bit that negates.
pub const IQ2_FLIP: u8 = 4;
/// As [`IQ2_VALUES`], of IQ3_XXS.
pub const IQ3_XXS_VALUES: [i8; 16] = [-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62];
/// As [`IQ2_VALUES`], of IQ3_S.
pub const IQ3_S_VALUES: [i8; 16] = [-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15];
/// The bits that negate, of both.
pub const IQ3_FLIP: u8 = 15;

/// Values plus 128, in each 16 bytes; what no code stands for is zero.
const fn table(values: &[i8]) -> [u8; LINE] {
    let mut t = [0; LINE];
    let mut i = 0;
    while i < LINE {
        if i % 16 < values.len() {
            t[i] = values[i % 16] as u8 ^ 0x80;
        }
        i += 1;
    }
    t
}

/// Defines codes that are unpacked as others are, and stand for values of a table.
macro_rules! looked_up {
    ($(#[$doc:meta])* $name:ident, $values:expr, as $codes:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $name;

        impl Lines for $name {
            const OPERANDS: usize = 2;
            const PLANES: [usize; 2] = <$codes>::PLANES;
            const APART: bool = <$codes>::APART;
            type Table<I: Isa> = I::Int;
            #[inline(always)]
            fn table<I: Isa>(isa: I) -> I::Int {
                static TABLE: [u8; LINE] = table(&$values);
                // SAFETY: 64 bytes.
                unsafe { isa.load(TABLE.as_ptr()) }
            }
            #[inline(always)]
            unsafe fn operands<I: Isa>(isa: I, table: I::Int, at: [*const u8; 2]) -> [I::Int; 2] {
                // SAFETY: the bytes of a step in both planes, by the caller's promise.
                let [a, b] = unsafe { <$codes>::operands(isa, (), at) };
                [isa.lookup(table, a), isa.lookup(table, b)]
            }
        }

        impl Codes for $name {
            const SPAN: usize = 0;
            type Unpacked = Bytes<0>;
        }
    };
}

looked_up!(
    /// Nibbles that stand for [`IQ4_VALUES`].
    Iq4, IQ4_VALUES, as Nibbles
);
looked_up!(
    /// Nibbles that stand for [`IQ3_XXS_VALUES`].
    Iq3XxsCodes, IQ3_XXS_VALUES, as Nibbles
);
looked_up!(
    /// Nibbles that stand for [`IQ3_S_VALUES`].
    Iq3SCodes, IQ3_S_VALUES, as Nibbles
);
looked_up!(
    /// Three bits that stand for [`IQ2_VALUES`].
    Iq2Codes, IQ2_VALUES, as ThreeBits
);
looked_up!(
    /// Three bits that stand for [`IQ1_VALUES`].
    Iq1Codes, IQ1_VALUES, as ThreeBits
);

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

/// I8 scales times F16 `d`, over `OVER`, a power of two.
#[derive(Clone, Copy)]
pub struct Signed<const OVER: u32>;

impl<const OVER: u32> Scale for Signed<OVER> {
    const RECORD: usize = PANEL;
    const SUPER: usize = PANEL * 2;
    const OUTPUTS: bool = false;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, record: *const u8, above: *const u8) -> I::Flt {
        // SAFETY: readable by the caller's promise.
        let scale = unsafe { isa.mul(isa.to_f32(isa.load_i8(record)), isa.load_f16(above)) };
        if const { OVER == 1 } { scale } else { isa.mul(scale, isa.splat_f32(1.0 / OVER as f32)) }
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
