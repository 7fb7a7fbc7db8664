//! How packed steps become codes, and how their scales are read; see `layout.rs` for where they are.

#![allow(unsafe_code)] // kernel

use kt_avx512::engine::{Bytes, Codes, Isa, LINE, Lines, Nibbles, PANEL, Scale};
use kt_core::format::float::f16_to_f32;
use kt_core::format::ggml::IQ4_VALUES;

/// Defines codes that are unpacked without a table: the bytes of a step in each plane, whether plane 1 lies apart, how many panels take turns with
/// their lines, and columns whose narrow sums fit.
macro_rules! codes {
    (
        $(#[$doc:meta])* $name:ident, $planes:expr, apart: $apart:literal, bundle: $bundle:expr, $span:literal,
        |$isa:ident, $at:ident| $operands:expr
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $name;

        impl Lines for $name {
            const OPERANDS: usize = 2;
            const PLANES: [usize; 2] = $planes;
            const APART: bool = $apart;
            const BUNDLE: usize = $bundle;
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
    TwoBits, [32, 0], apart: false, bundle: 2, 32, |isa, at| isa.load_bit_pairs(at[0])
);
codes!(
    /// Two bits and a third: 8 x 2 x 7 x 127 < 2^15.
    ThreeBits, [32, 16], apart: true, bundle: 1, 32, |isa, at| {
        isa.with_bits::<2>(isa.load_bit_pairs(at[0]), at[1])
    }
);
codes!(
    /// Four bits and a fifth: 4 x 2 x 31 x 127 < 2^15.
    FiveBits, [LINE, 16], apart: false, bundle: 2, 16, |isa, at| {
        isa.with_bits::<4>(Nibbles::operands(isa, (), at), at[1])
    }
);
codes!(
    /// Four bits and two: 2 x 2 x 63 x 127 < 2^15.
    SixBits, [LINE, 32], apart: false, bundle: 2, 8, |isa, at| isa.with_bit_pairs(Nibbles::operands(isa, (), at), at[1])
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
    const WORDS: usize = 2;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, _: *const u8, above: *const u8) -> I::Flt {
        // SAFETY: readable by the caller's promise.
        unsafe { isa.load_f16(above) }
    }
    #[inline(always)]
    unsafe fn words<I: Isa>(isa: I, records: *const u8, _: I::Int) -> I::Int {
        // SAFETY: readable by the caller's promise.
        unsafe { isa.words(isa.load_i8(records), isa.load_i8(records.wrapping_add(PANEL))) }
    }
}

/// U8 scales and minima by turns, which [`Ratio`] makes multiples of the same unit.
///
/// With zero points of 8: `unit * (s * scale * (code - 8) + (8 * s * scale + m * minimum))`.
#[derive(Clone, Copy)]
pub struct InUnits;

impl Scale for InUnits {
    const RECORD: usize = PANEL * 2;
    const SUPER: usize = PANEL * 4;
    const OUTPUTS: bool = false;
    const WORDS: usize = 1;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, _: *const u8, above: *const u8) -> I::Flt {
        // SAFETY: readable by the caller's promise.
        let (base, v) = unsafe { (isa.load_f16(above), isa.load_i16(above.wrapping_add(PANEL * 2))) };
        isa.mul(base, isa.exp2(isa.sub(isa.splat(127), isa.and(v, isa.splat(Ratio::POWER)))))
    }
    #[inline(always)]
    unsafe fn factors<I: Isa>(isa: I, above: *const u8) -> I::Int {
        // SAFETY: readable by the caller's promise.
        let v = unsafe { isa.load_i16(above.wrapping_add(PANEL * 2)) };
        // 64 times `s`, and as many times `m` in the upper word.
        let s = isa.rounded(isa.exp2(isa.add(isa.and(v, isa.splat(Ratio::POWER)), isa.splat(127 + 6))));
        isa.add(isa.up::<16>(isa.and(v, isa.splat(!Ratio::POWER))), s)
    }
    #[inline(always)]
    unsafe fn words<I: Isa>(isa: I, record: *const u8, factors: I::Int) -> I::Int {
        // SAFETY: readable by the caller's promise. Numbers of six bits do not reach the word above.
        let numbers = isa.up::<9>(unsafe { isa.load_u8_words(record) });
        let products = isa.mul_words_high(numbers, factors);
        // Eight times the lower word to the upper one.
        isa.add(products, isa.up::<19>(products))
    }
}

/// F16 `d` and `-dmin` as multiples of the same unit, `s` and `m` of them: `s` is a power of two, `m` is rounded to eighths.
///
/// `unit` is `base / s`. What scales and minima, which have 6 bits, are multiplied to fits a word: `63 * (8 * s + |m|) < 2^15`. Where `-dmin` is some
/// 8 times `d`, `s` is 32 or 16, and the largest minima are off by 0.14 or 0.28 of `d` at most.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ratio {
    /// `d`; or `dmin`, where `d` is nothing beside it, and scales are taken for 0.
    pub base: u16,
    /// The power of two that `s` is.
    pub power: u32,
    /// Eight times `m`.
    pub eighths: i32,
    /// Whether scales are not taken for 0.
    pub scales: bool,
}

impl Ratio {
    /// The bits of [`Ratio::power`] in [`Ratio::bits`].
    const POWER: i32 = 7;
    /// What [`Ratio::power`] is at most.
    const MOST_POWER: u32 = 5;
    /// What `8 * s + |m|` is at most.
    pub const MOST: i32 = i16::MAX as i32 / 63;
    /// What eight times `m` is at most: eight times that is a word.
    pub const MOST_EIGHTHS: i32 = (i16::MAX / 8) as i32;

    /// That of these F16.
    pub fn of(d: u16, dmin: u16) -> Ratio {
        let (scale, min) = (f16_to_f32(d), f16_to_f32(dmin));
        if !scale.is_finite() || !min.is_finite() {
            return Ratio { base: F16_NAN, power: 0, eighths: 0, scales: true };
        }
        if scale != 0.0 {
            let wanted = -8.0 * min / scale;
            for power in (0..=Self::MOST_POWER).rev() {
                let s = 1 << power;
                let eighths = (wanted * s as f32).round_ties_even();
                if eighths.abs() <= Self::MOST_EIGHTHS.min(8 * (Self::MOST - 8 * s)) as f32 {
                    return Ratio { base: d, power, eighths: eighths as i32, scales: true };
                }
            }
        }
        Ratio { base: dmin, power: 0, eighths: if min == 0.0 { 0 } else { -8 }, scales: false }
    }

    /// Both numbers in 16 bits: the power in the low three, and above them `eighths`.
    pub fn bits(self) -> i16 {
        (self.eighths << 3 | self.power as i32) as i16
    }

    /// The weight with these numbers.
    pub fn weight(self, scale: i32, min: i32, code: i32) -> f32 {
        let scale = if self.scales { scale } else { 0 };
        let units = (scale << self.power) * code + ((min * self.eighths + 4) >> 3);
        f16_to_f32(self.base) / (1 << self.power) as f32 * units as f32
    }
}

/// Not a number.
const F16_NAN: u16 = 0x7e00;

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

#[cfg(test)]
mod tests {
    use super::*;
    use kt_core::testing::Random;

    fn of(d: f32, dmin: f32) -> Ratio {
        Ratio::of(half::f16::from_f32(d).to_bits(), half::f16::from_f32(dmin).to_bits())
    }

    #[test]
    fn ratios_keep_signs_and_what_is_larger() {
        let parts = |d: f32, dmin: f32| {
            let Ratio { base, power, eighths, scales } = of(d, dmin);
            (f16_to_f32(base), power, eighths, scales)
        };
        assert_eq!(parts(0.0, 0.0), (0.0, 0, 0, false));
        assert_eq!(parts(0.5, 0.0), (0.5, 5, 0, true));
        assert_eq!(parts(0.5, 4.0), (0.5, 5, -8 * 256, true));
        assert_eq!(parts(-0.5, 4.5), (-0.5, 4, 8 * 144, true));
        assert_eq!(parts(-0.5, -250.0), (-0.5, 0, -8 * 500, true));
        // Minima alone, with their very value.
        assert_eq!(parts(0.0, -0.25), (-0.25, 0, -8, false));
        assert_eq!(parts(2f32.powi(-14), 8.0), (8.0, 0, -8, false));
        for (d, dmin) in [(f32::NAN, 1.0), (1.0, f32::NAN), (f32::INFINITY, 1.0), (0.0, f32::NEG_INFINITY)] {
            assert!(parts(d, dmin).0.is_nan(), "{d} {dmin}");
        }
    }

    #[test]
    fn ratios_fit_words_and_are_near() {
        let mut random = Random(2);
        let mut with_scales = 0;
        for _ in 0..20_000 {
            let [d, dmin] = [0; 2].map(|_| random.bits() as u16);
            let ratio = Ratio::of(d, dmin);
            let Ratio { power, eighths, scales, .. } = ratio;
            assert!(power <= 5 && 63 * (8 * 8 * (1 << power) + eighths.abs()) <= 8 * i32::from(i16::MAX), "{ratio:?}");
            let bits = i32::from(ratio.bits());
            assert_eq!((bits & 7, bits >> 3), (power as i32, eighths), "{ratio:?}");
            let (d, dmin) = (f16_to_f32(d), f16_to_f32(dmin));
            if scales && d.is_finite() && dmin.is_finite() {
                with_scales += 1;
                // Half an eighth for `m`, which 63 multiplies, and half a unit.
                let error = (f64::from(ratio.weight(0, 63, 0)) + 63.0 * f64::from(dmin)).abs();
                assert!(
                    error <= f64::from(d.abs()) * (63.0 / 16.0 + 0.5) / f64::from(1 << power) * 1.001,
                    "{d} {dmin}"
                );
                assert_eq!(ratio.weight(63, 0, 15), 63.0 * 15.0 * d);
            } else if d.is_finite() && dmin.is_finite() {
                assert!(dmin.abs() >= 500.0 * d.abs());
                assert_eq!(ratio.weight(63, 5, 15), -5.0 * dmin);
            }
        }
        assert!(with_scales > 5000, "{with_scales}");
    }
}
