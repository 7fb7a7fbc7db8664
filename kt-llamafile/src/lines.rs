//! How packed steps become codes, and how their scales are read; see `layout.rs` for where they are.

#![allow(unsafe_code)] // kernel

use kt_avx512::engine::{Bytes, Codes, Isa, LINE, Lines, Nibbles, PANEL, SHIFTED, Scale, Steps};
use kt_core::format::float::f16_to_f32;
use kt_core::format::ggml::IQ4_VALUES;

/// Defines codes that are unpacked without a table: the bytes of a step, how many panels take turns with their lines, how many steps
/// share lines, columns whose narrow sums fit, and the operands of step `step` of these, which begin at `at`; `line(n)` is a line.
macro_rules! codes {
    (
        $(#[$doc:meta])* $name:ident, $bytes:literal, bundle: $bundle:literal, steps: $steps:literal, span: $span:literal,
        |$isa:ident, $at:ident, $line:ident, $step:ident| $operands:expr
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $name;

        impl Lines for $name {
            const OPERANDS: usize = 2;
            const STEP: usize = $bytes;
            const BUNDLE: usize = $bundle;
            const SHARED: bool = $steps > 1;
            type Table<I: Isa> = ();
            #[inline(always)]
            fn table<I: Isa>(_: I) {}
            #[inline(always)]
            unsafe fn operands<I: Isa, const COLUMNS: usize>(
                $isa: I,
                _: (),
                at: *const u8,
                step: usize,
            ) -> [I::Int; 2] {
                const { assert!(Steps::<Self, COLUMNS>::COUNT.is_multiple_of($steps)) };
                let $step = among(step, $steps);
                let $at = Steps::<Self, COLUMNS>::at(at, step - $step);
                // SAFETY: a line of the steps that share it, by the caller's promise.
                let $line = |n: usize| unsafe {
                    $isa.load($at.wrapping_add(Steps::<Self, COLUMNS>::spread(n * LINE)))
                };
                $operands
            }
        }

        impl Codes for $name {
            const SPAN: usize = $span;
            type Unpacked = Bytes<$span>;
        }
    };
}

/// Which of so many steps that share lines a step is. A function: written out, it is 0 for steps that share none, which lints ask to be removed.
#[inline(always)]
fn among(step: usize, steps: usize) -> usize {
    step % steps
}

/// Bits of a line's bytes, moved down by `N`.
#[inline(always)]
fn bits<I: Isa, const N: u32>(isa: I, line: I::Int, mask: i32) -> I::Int {
    isa.and(if N > 0 { isa.down::<N>(line) } else { line }, isa.splat(mask * 0x0101_0101))
}

codes!(
    /// Two bits: 8 x 2 x 3 x 127 < 2^15.
    TwoBits, 32, bundle: 2, steps: 1, span: 32, |isa, at, _line, _step| {
        // SAFETY: a step, by the caller's promise.
        unsafe { isa.load_bit_pairs::<0>(at) }
    }
);
codes!(
    /// Two bits, times 8: of coordinates of IQ1, up to 25 with [`MoreOrLess::shift`], 4 x 2 x 25 x 127 < 2^15; or those of Q2_K with [`OfEights`].
    Eights, 32, bundle: 2, steps: 1, span: 16, |isa, at, _line, _step| {
        // SAFETY: a step, by the caller's promise.
        unsafe { isa.load_bit_pairs::<3>(at) }
    }
);
codes!(
    /// Three bits, four operands in a line and half of one: 8 x 2 x 7 x 127 < 2^15.
    ThreeBits, 48, bundle: 1, steps: 2, span: 32, |isa, at, line, step| match step {
        0 => [bits::<I, 0>(isa, line(0), 7), bits::<I, 3>(isa, line(0), 7)],
        _ => {
            // SAFETY: two steps, by the caller's promise.
            let half = unsafe { isa.load_nibble_halves(at.wrapping_add(LINE)) };
            [
                bits::<I, 0>(isa, half, 7),
                isa.add(bits::<I, 6>(isa, line(0), 3), bits::<I, 1>(isa, half, 4)),
            ]
        }
    }
);
/// Three bits, times 4: 4 x 2 x 28 x 127 < 2^15.
#[derive(Clone, Copy)]
pub struct Fours;

impl Lines for Fours {
    const OPERANDS: usize = ThreeBits::OPERANDS;
    const STEP: usize = ThreeBits::STEP;
    const BUNDLE: usize = ThreeBits::BUNDLE;
    const SHARED: bool = ThreeBits::SHARED;
    type Table<I: Isa> = ();
    #[inline(always)]
    fn table<I: Isa>(_: I) {}
    #[inline(always)]
    unsafe fn operands<I: Isa, const COLUMNS: usize>(isa: I, _: (), at: *const u8, step: usize) -> [I::Int; 2] {
        // SAFETY: the bytes of all steps, by the caller's promise.
        let [a, b] = unsafe { ThreeBits::operands::<I, COLUMNS>(isa, (), at, step) };
        [isa.up::<2>(a), isa.up::<2>(b)]
    }
}

impl Codes for Fours {
    const SPAN: usize = 16;
    type Unpacked = Bytes<16>;
}

codes!(
    /// Five bits, eight operands in five lines: 4 x 2 x 31 x 127 < 2^15.
    FiveBits, 80, bundle: 2, steps: 4, span: 16, |isa, _at, line, step| {
        let low = |n| bits::<I, 0>(isa, line(n), 0x1f);
        match step {
            0 => [low(0), low(1)],
            1 => [low(2), low(3)],
            2 => [low(4), isa.add(bits::<I, 5>(isa, line(0), 7), bits::<I, 2>(isa, line(1), 0x18))],
            _ => {
                let highest = isa.add(bits::<I, 4>(isa, line(1), 8), bits::<I, 3>(isa, line(3), 0x10));
                [
                    isa.add(bits::<I, 5>(isa, line(2), 7), highest),
                    isa.add(bits::<I, 5>(isa, line(4), 7), bits::<I, 2>(isa, line(3), 0x18)),
                ]
            }
        }
    }
);
codes!(
    /// Six bits, four operands in three lines: 2 x 2 x 63 x 127 < 2^15.
    SixBits, 96, bundle: 2, steps: 2, span: 8, |isa, _at, line, step| {
        let low = |n| bits::<I, 0>(isa, line(n), 0x3f);
        match step {
            0 => [low(0), low(1)],
            _ => {
                let lower = isa.add(bits::<I, 6>(isa, line(0), 3), bits::<I, 4>(isa, line(1), 0xc));
                [low(2), isa.add(lower, bits::<I, 2>(isa, line(2), 0x30))]
            }
        }
    }
);

/// What codes of IQ1_S stand for: coordinates. Eight times these, and one more or less, is what is multiplied.
pub const IQ1_S_VALUES: [i8; 3] = [-1, 0, 1];
/// The bit of the scale of a group of IQ1_S that makes one more one less.
pub const IQ1_S_LESS: u8 = 0x80;
/// What codes of IQ1_M stand for: eight times a coordinate, and one more or less.
pub const IQ1_VALUES: [i8; 6] = [-9, -7, -1, 1, 7, 9];
/// The zero point of their codes.
pub const IQ1_ZERO: i32 = 9;
/// The bit that makes one more one less.
pub const IQ1_FLIP: u8 = 1;
/// What codes of IQ2 stand for: coordinates of its grids, and the same negated.
pub const IQ2_VALUES: [i8; 7] = [8, 25, 43, 0, -8, -25, -43];
/// The zero point of their codes.
pub const IQ2_ZERO: i32 = 43;
/// The bit that negates.
pub const IQ2_FLIP: u8 = 4;
/// As [`IQ2_VALUES`], of IQ3_XXS.
pub const IQ3_XXS_VALUES: [i8; 16] = [-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62];
/// The zero point of their codes.
pub const IQ3_XXS_ZERO: i32 = 62;
/// As [`IQ2_VALUES`], of IQ3_S.
pub const IQ3_S_VALUES: [i8; 16] = [-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15];
/// The zero point of their codes.
pub const IQ3_S_ZERO: i32 = 15;
/// The bits that negate, of both.
pub const IQ3_FLIP: u8 = 15;

/// Values plus `zero`, which makes the least of them zero or more, in each 16 bytes; what no code stands for is zero.
const fn table(values: &[i8], zero: i32) -> [u8; LINE] {
    let mut t = [0; LINE];
    let mut i = 0;
    while i < LINE {
        if i % 16 < values.len() {
            let code = values[i % 16] as i32 + zero;
            assert!(code >= 0 && code < 256);
            t[i] = code as u8;
        }
        i += 1;
    }
    t
}

/// Defines codes that are unpacked as others are, and stand for values of a table, less a zero point; and columns whose narrow sums fit.
macro_rules! looked_up {
    ($(#[$doc:meta])* $name:ident, $values:expr, zero: $zero:expr, as $codes:ty, span: $span:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $name;

        impl Lines for $name {
            const OPERANDS: usize = 2;
            const STEP: usize = <$codes>::STEP;
            const SHARED: bool = <$codes>::SHARED;
            type Table<I: Isa> = I::Int;
            #[inline(always)]
            fn table<I: Isa>(isa: I) -> I::Int {
                static TABLE: [u8; LINE] = table(&$values, $zero);
                // SAFETY: 64 bytes.
                unsafe { isa.load(TABLE.as_ptr()) }
            }
            #[inline(always)]
            unsafe fn operands<I: Isa, const COLUMNS: usize>(
                isa: I,
                table: I::Int,
                at: *const u8,
                step: usize,
            ) -> [I::Int; 2] {
                // SAFETY: the bytes of all steps, by the caller's promise.
                let [a, b] = unsafe { <$codes>::operands::<I, COLUMNS>(isa, (), at, step) };
                [isa.lookup(table, a), isa.lookup(table, b)]
            }
        }

        impl Codes for $name {
            const SPAN: usize = $span;
            type Unpacked = Bytes<$span>;
        }
    };
}

looked_up!(
    /// Nibbles that stand for [`IQ4_VALUES`].
    Iq4, IQ4_VALUES, zero: 128, as Nibbles, span: 0
);
looked_up!(
    /// Nibbles that stand for [`IQ3_XXS_VALUES`]: 2 x 124 x 127 < 2^15.
    Iq3XxsCodes, IQ3_XXS_VALUES, zero: IQ3_XXS_ZERO, as Nibbles, span: 4
);
looked_up!(
    /// Nibbles that stand for [`IQ3_S_VALUES`]: 4 x 2 x 30 x 127 < 2^15.
    Iq3SCodes, IQ3_S_VALUES, zero: IQ3_S_ZERO, as Nibbles, span: 16
);
looked_up!(
    /// Three bits that stand for [`IQ2_VALUES`]: 2 x 86 x 127 < 2^15.
    Iq2Codes, IQ2_VALUES, zero: IQ2_ZERO, as ThreeBits, span: 4
);
looked_up!(
    /// Three bits that stand for [`IQ1_VALUES`]: 4 x 2 x 18 x 127 < 2^15.
    Iq1Codes, IQ1_VALUES, zero: IQ1_ZERO, as ThreeBits, span: 16
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

/// Scales of IQ1_S, with [`IQ1_S_LESS`], times F16 `d`, over 8; and zero points, which have the one more or less.
#[derive(Clone, Copy)]
pub struct MoreOrLess;

impl Scale for MoreOrLess {
    const RECORD: usize = PANEL;
    const SUPER: usize = PANEL * 2;
    const OUTPUTS: bool = false;
    const ZEROS: bool = true;
    const SHIFTS: bool = true;
    const LOW_ZEROS: bool = true;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, record: *const u8, above: *const u8) -> I::Flt {
        // SAFETY: readable by the caller's promise.
        let (v, d) = unsafe { (isa.load_u8(record), isa.load_f16(above)) };
        let scale = isa.and(v, isa.splat(!i32::from(IQ1_S_LESS)));
        isa.mul(isa.mul(isa.to_f32(scale), d), isa.splat_f32(0.125))
    }
    #[inline(always)]
    unsafe fn zeros<I: Isa>(isa: I, record: *const u8) -> I::Int {
        // SAFETY: readable by the caller's promise.
        let less = isa.down::<6>(unsafe { isa.load_u8(record) });
        isa.add(isa.and(less, isa.splat(2)), isa.splat(8 - 1))
    }
    #[inline(always)]
    unsafe fn shift<I: Isa>(isa: I, record: *const u8) -> I::Int {
        // SAFETY: as above.
        let shift = isa.sub(isa.splat(SHIFTED), unsafe { Self::zeros(isa, record) });
        // In all four bytes.
        let twice = isa.add(shift, isa.up::<8>(shift));
        isa.add(twice, isa.up::<16>(twice))
    }
}

/// I8 scales of 16 columns, times F16 `d`. `FOLDS`: they are those of Q3_K, of six bits.
#[derive(Clone, Copy)]
pub struct SignedPairs<const FOLDS: bool>;

impl<const FOLDS: bool> Scale for SignedPairs<FOLDS> {
    const RECORD: usize = PANEL;
    const SUPER: usize = PANEL * 2;
    const OUTPUTS: bool = false;
    const WORDS: usize = 2;
    const FOLDS: bool = FOLDS;
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

/// The same as F32.
#[derive(Clone, Copy)]
pub struct OfUnits;

impl Scale for OfUnits {
    const RECORD: usize = InUnits::RECORD;
    const SUPER: usize = InUnits::SUPER;
    const OUTPUTS: bool = false;
    const MINIMA: bool = true;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, record: *const u8, above: *const u8) -> I::Flt {
        // SAFETY: by the caller's promise.
        let (unit, words) =
            unsafe { (InUnits::load(isa, record, above), InUnits::words(isa, record, InUnits::factors(isa, above))) };
        isa.mul(isa.to_f32(isa.down::<16>(isa.up::<16>(words))), unit)
    }
    #[inline(always)]
    unsafe fn minima<I: Isa>(isa: I, record: *const u8, above: *const u8) -> I::Flt {
        // SAFETY: by the caller's promise.
        let (unit, words) =
            unsafe { (InUnits::load(isa, record, above), InUnits::words(isa, record, InUnits::factors(isa, above))) };
        // Less what the upper word has for the zero point: eight times the lower one.
        let lower = isa.down::<16>(isa.up::<16>(words));
        isa.mul(isa.to_f32(isa.sub(isa.down::<16>(words), isa.up::<3>(lower))), unit)
    }
}

/// F16 `d` and `-dmin` as multiples of the same unit, `s` and `m` of them: `s` is a power of two, `m` is rounded to eighths.
///
/// `unit` is `base / s`. What scales and minima, which have 6 bits, are multiplied to fits a word: `63 * (8 * s + |m|) < 2^15`. Where `-dmin` is some
/// 8 times `d`, `s` is 32 or 16, and the largest minima are off by 0.14 or 0.28 of `d` at most.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ratio {
    /// `d`; or `dmin`, where that is more than 500 times `d`. What scales give then, up to 945 times `d`, is lost: they are taken for 0.
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

/// As [`NibblesWithMinima`], for codes that are eight times as large.
#[derive(Clone, Copy)]
pub struct OfEights;

impl Scale for OfEights {
    const RECORD: usize = NibblesWithMinima::RECORD;
    const SUPER: usize = NibblesWithMinima::SUPER;
    const OUTPUTS: bool = false;
    const MINIMA: bool = true;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, record: *const u8, above: *const u8) -> I::Flt {
        // SAFETY: by the caller's promise.
        isa.mul(unsafe { NibblesWithMinima::load(isa, record, above) }, isa.splat_f32(0.125))
    }
    #[inline(always)]
    unsafe fn minima<I: Isa>(isa: I, record: *const u8, above: *const u8) -> I::Flt {
        // SAFETY: by the caller's promise.
        unsafe { NibblesWithMinima::minima(isa, record, above) }
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
