//! What a line of 64 bytes holds, how it becomes operands, and how group scales are read.

#![allow(unsafe_code)] // kernel

use kt_core::cpu::input::BLOCK;

use crate::isa::{Isa, Job};
use crate::layout::{BUNDLE, CHUNK, LINE, PANEL, spread};

/// How the lines of a panel are stored, and how one becomes operands.
pub trait Lines: Copy {
    /// Operands per step: 1 or 2.
    const OPERANDS: usize;
    /// Bytes of a step.
    const STEP: usize = LINE;
    /// Whether steps share lines. Loops over them are unrolled then, so that compilers know which step it is.
    const SHARED: bool = false;
    /// How many panels take turns with them; see [`Layout::bundle`](crate::layout::Layout::bundle).
    const BUNDLE: usize = 1;
    /// Whether a bit for each line of a block, in front of its panel, tells those with small codes, which are zeros and subnormal ones, from others.
    const TOLD: bool = false;
    /// What the loop keeps in registers for unpacking.
    type Table<I: Isa>: Copy;
    /// Loads it.
    fn table<I: Isa>(isa: I) -> Self::Table<I>;
    /// The operands of step `step` of `COLUMNS` columns, which begin at `at`, in rising k; only the first [`Lines::OPERANDS`] are used.
    ///
    /// # Safety
    /// [`Lines::STEP`] bytes of all steps up to this one, or of all that share lines with it, are readable.
    unsafe fn operands<I: Isa, const COLUMNS: usize>(
        isa: I,
        table: Self::Table<I>,
        at: *const u8,
        step: usize,
    ) -> [I::Int; 2];
    /// The same of a line without small codes, in fewer instructions; only of those that are [told](Lines::TOLD).
    ///
    /// # Safety
    /// As [`Lines::operands`].
    #[inline(always)]
    unsafe fn normal_operands<I: Isa, const COLUMNS: usize>(_isa: I, _at: *const u8, _step: usize) -> [I::Int; 2] {
        unreachable!("all lines are alike")
    }
}

/// Lines of unsigned codes, four columns of 16 outputs per operand.
pub trait Codes: Lines {
    /// Columns over which the sums of [`Isa::dot_narrow`] fit that begin with zero; 4 for codes that need [`Isa::dot_small`], and 0 for those that
    /// need [`Isa::dot_wide`]. Of others, less their zero point, magnitudes are 16 at most, or 32 in groups of 16 columns with [`Sums::Halves`](kt_core::cpu::input::Sums::Halves).
    const SPAN: usize;
    /// Whether lines are codes in nibbles, as they are. Unpacking then goes on beside products, so that lines that many rows pass over stay packed.
    const NIBBLES: bool = false;
    /// The same operands, each in a line of its own.
    type Unpacked: Codes;
}

/// Lines of floating-point numbers.
pub trait Floats: Lines {
    /// Operands are two columns of 16 outputs in BF16, or one column in F32.
    const BF16: bool;
    /// Whether they are over [`Isa::FP8_UP`].
    const FP8: bool = false;
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
        unsafe fn operands<I: Isa, const COLUMNS: usize>(isa: I, _: (), at: *const u8, step: usize) -> [I::Int; 2] {
            // SAFETY: a line, by the caller's promise.
            [unsafe { isa.load(Steps::<Self, COLUMNS>::at(at, step)) }; 2]
        }
    };
}

/// Codes of one byte, which are small enough for sums over `SPAN` columns, or not (0).
#[derive(Clone, Copy)]
pub struct Bytes<const SPAN: usize>;

impl<const S: usize> Lines for Bytes<S> {
    direct!();
}

impl<const S: usize> Codes for Bytes<S> {
    const SPAN: usize = S;
    type Unpacked = Self;
}

/// Codes 0..16 in nibbles: 8 x 2 x 15 x 127 < 2^15.
#[derive(Clone, Copy)]
pub struct Nibbles;

impl Lines for Nibbles {
    const OPERANDS: usize = 2;
    type Table<I: Isa> = ();
    #[inline(always)]
    fn table<I: Isa>(_: I) {}
    #[inline(always)]
    unsafe fn operands<I: Isa, const COLUMNS: usize>(isa: I, _: (), at: *const u8, step: usize) -> [I::Int; 2] {
        // SAFETY: a line, by the caller's promise.
        isa.nibbles(unsafe { isa.load(Steps::<Self, COLUMNS>::at(at, step)) })
    }
}

impl Codes for Nibbles {
    const SPAN: usize = 32;
    const NIBBLES: bool = true;
    type Unpacked = Bytes<32>;
}

/// What is added to twice an E2M1 value, so that it becomes a code 0..=24.
pub const E2M1_ZERO: i32 = 12;

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
pub struct E2m1;

impl Lines for E2m1 {
    const OPERANDS: usize = 2;
    type Table<I: Isa> = I::Int;
    #[inline(always)]
    fn table<I: Isa>(isa: I) -> I::Int {
        // SAFETY: 64 bytes.
        unsafe { isa.load(E2M1_TABLE.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn operands<I: Isa, const COLUMNS: usize>(isa: I, table: I::Int, at: *const u8, step: usize) -> [I::Int; 2] {
        // SAFETY: a line, by the caller's promise.
        isa.lookup_nibbles(table, unsafe { isa.load(Steps::<Self, COLUMNS>::at(at, step)) })
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
    const BUNDLE: usize = BUNDLE;
    const TOLD: bool = true;
    type Table<I: Isa> = I::Fp8Table;
    #[inline(always)]
    fn table<I: Isa>(isa: I) -> I::Fp8Table {
        isa.fp8_table()
    }
    #[inline(always)]
    unsafe fn operands<I: Isa, const COLUMNS: usize>(
        isa: I,
        table: I::Fp8Table,
        at: *const u8,
        step: usize,
    ) -> [I::Int; 2] {
        // SAFETY: a line, by the caller's promise.
        isa.fp8_to_bf16(table, unsafe { isa.load(Steps::<Self, COLUMNS>::at(at, step)) })
    }
    #[inline(always)]
    unsafe fn normal_operands<I: Isa, const COLUMNS: usize>(isa: I, at: *const u8, step: usize) -> [I::Int; 2] {
        // SAFETY: as above.
        isa.fp8_shifted(unsafe { isa.load(Steps::<Self, COLUMNS>::at(at, step)) })
    }
}

impl Floats for Fp8 {
    const BF16: bool = true;
    const FP8: bool = true;
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
    const BUNDLE: usize = BUNDLE;
    type Table<I: Isa> = ();
    #[inline(always)]
    fn table<I: Isa>(_: I) {}
    #[inline(always)]
    unsafe fn operands<I: Isa, const COLUMNS: usize>(isa: I, _: (), at: *const u8, step: usize) -> [I::Int; 2] {
        // SAFETY: a line, by the caller's promise.
        let [a, b] = isa.f16_halves(unsafe { isa.load(Steps::<Self, COLUMNS>::at(at, step)) });
        [isa.as_int(a), isa.as_int(b)]
    }
}

impl Floats for F16Lines {
    const BF16: bool = false;
    type Unpacked = F32Lines;
}

/// Scales of the groups of integer codes, of 16 outputs each.
pub trait Scale: Copy {
    /// Bytes of the record of a group; 0 where an output has a single scale.
    const RECORD: usize;
    /// Bytes of the record of 256 columns, which scales are relative to; 0 where there is none.
    const SUPER: usize = 0;
    /// Blocks of 128 columns that a block of the inputs has: 4 if that is [wide](kt_core::cpu::input::WIDE), where weights have no scale but those of outputs.
    const SPAN: usize = 1;
    /// Whether totals are multiplied with an F32 scale of the output.
    const OUTPUTS: bool;
    /// Whether a group has its own zero point, which is subtracted from the codes. Inputs then bring the plain sums of their codes, or what
    /// [`Scale::SHIFTS`] says.
    const ZEROS: bool = false;
    /// Whether [`Scale::shift`] may be added to codes, in place of subtracting zero points from each sum; to those that are unpacked for many rows it
    /// is. Inputs then bring the sums of their codes times -16.
    const SHIFTS: bool = false;
    /// Whether zero points are below [`SHIFTED`], with [`Scale::SHIFTS`].
    const LOW_ZEROS: bool = false;
    /// Whether a group has a number that is added to its scaled codes. Inputs then bring the scaled sums of their codes.
    const MINIMA: bool = false;
    /// Whether all scales are powers of two.
    const POWERS: bool = false;
    /// How many sums of products share a dword, as words, because scales are integers relative to those above: 0, none. 2: those of two groups,
    /// which share a scale of the inputs ([`Sums::Halves`](kt_core::cpu::input::Sums::Halves)). 1: that of a group and that of the input codes, for
    /// scales and minima ([`Sums::Words`](kt_core::cpu::input::Sums::Words)). [`Scale::load`] is then of what is above alone.
    const WORDS: usize = 0;
    /// Whether scales, which then are signed bytes, are -32 to 31, and codes 0 to 7 with a zero point of 4: both together are bytes, to which lines may be unpacked.
    const FOLDS: bool = false;
    /// The scales of a group, from its record and the one above it.
    ///
    /// # Safety
    /// [`Scale::RECORD`] and [`Scale::SUPER`] bytes are readable.
    unsafe fn load<I: Isa>(isa: I, record: *const u8, above: *const u8) -> I::Flt;
    /// The zero points of a group.
    ///
    /// # Safety
    /// As above.
    #[inline(always)]
    unsafe fn zeros<I: Isa>(isa: I, _record: *const u8) -> I::Int {
        isa.splat(0)
    }
    /// What may be added to small codes of a group, so that their zero point is 16.
    ///
    /// # Safety
    /// As above.
    #[inline(always)]
    unsafe fn shift<I: Isa>(isa: I, _record: *const u8) -> I::Int {
        isa.splat(0)
    }
    /// What [`Scale::words`] needs of what is above.
    ///
    /// # Safety
    /// [`Scale::SUPER`] bytes are readable.
    #[inline(always)]
    unsafe fn factors<I: Isa>(isa: I, _above: *const u8) -> I::Int {
        isa.splat(0)
    }
    /// What multiplies the words of sums: the integer scales of two groups, the first one's above; or the minimum and, below it, the scale of one.
    ///
    /// # Safety
    /// [`Scale::WORDS`] records are readable.
    #[inline(always)]
    unsafe fn words<I: Isa>(isa: I, _records: *const u8, _factors: I::Int) -> I::Int {
        isa.splat(0)
    }
    /// What is added to the scaled codes of a group.
    ///
    /// # Safety
    /// As above.
    #[inline(always)]
    unsafe fn minima<I: Isa>(isa: I, _record: *const u8, _above: *const u8) -> I::Flt {
        isa.zero()
    }
}

/// No group scales.
#[derive(Clone, Copy)]
pub(crate) struct NoScale<const SPAN: usize = 1>;

impl<const SPAN: usize> Scale for NoScale<SPAN> {
    const SPAN: usize = SPAN;
    const RECORD: usize = 0;
    const OUTPUTS: bool = true;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, _: *const u8, _: *const u8) -> I::Flt {
        isa.zero()
    }
}

/// The zero point of codes that [`Scale::shift`] was added to: the largest that 4-bit codes can have, so that none becomes negative.
pub const SHIFTED: i32 = 16;

/// In each 16 bytes: where the first of four bytes is, for all of them.
static FIRST_OF_FOUR: [u8; 64] = {
    let mut t = [0; 64];
    let mut i = 0;
    while i < 64 {
        t[i] = (i % 16 / 4 * 4) as u8;
        i += 1;
    }
    t
};

/// F16, relative to the scale of the output; then zero points of `ZERO` bytes each, those of one byte of codes of four bits.
#[derive(Clone, Copy)]
pub(crate) struct F16Scale<const ZERO: usize>;

impl<const ZERO: usize> Scale for F16Scale<ZERO> {
    const RECORD: usize = PANEL * (2 + ZERO);
    const OUTPUTS: bool = true;
    const ZEROS: bool = ZERO > 0;
    const SHIFTS: bool = ZERO == 1;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, record: *const u8, _: *const u8) -> I::Flt {
        // SAFETY: readable by the caller's promise.
        unsafe { isa.load_f16(record) }
    }
    #[inline(always)]
    unsafe fn zeros<I: Isa>(isa: I, record: *const u8) -> I::Int {
        let at = record.wrapping_add(PANEL * 2);
        // SAFETY: readable by the caller's promise.
        unsafe { if ZERO == 1 { isa.load_u8(at) } else { isa.load_i16(at) } }
    }
    #[inline(always)]
    unsafe fn shift<I: Isa>(isa: I, record: *const u8) -> I::Int {
        // SAFETY: readable by the caller's promise; and the table is 64 bytes.
        let (zeros, first) = unsafe { (isa.load_u8(record.wrapping_add(PANEL * 2)), isa.load(FIRST_OF_FOUR.as_ptr())) };
        isa.sub(isa.splat(SHIFTED * 0x0101_0101), isa.lookup(zeros, first))
    }
}

/// Powers of two: E8M0.
#[derive(Clone, Copy)]
pub(crate) struct E8m0Scale;

impl Scale for E8m0Scale {
    const RECORD: usize = PANEL;
    const OUTPUTS: bool = true;
    const POWERS: bool = true;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, record: *const u8, _: *const u8) -> I::Flt {
        // SAFETY: readable by the caller's promise.
        isa.exp2(unsafe { isa.load_u8(record) })
    }
}

/// E4M3 times 2^-8.
#[derive(Clone, Copy)]
pub(crate) struct E4m3Scale;

impl Scale for E4m3Scale {
    const RECORD: usize = PANEL;
    const OUTPUTS: bool = true;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, record: *const u8, _: *const u8) -> I::Flt {
        // SAFETY: readable by the caller's promise.
        unsafe { isa.load_e4m3(record) }
    }
}

/// F32, of blocks that were decoded.
#[derive(Clone, Copy)]
pub(crate) struct F32Scale;

impl Scale for F32Scale {
    const RECORD: usize = PANEL * 4;
    const OUTPUTS: bool = false;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, record: *const u8, _: *const u8) -> I::Flt {
        // SAFETY: readable by the caller's promise.
        isa.as_f32(unsafe { isa.load(record) })
    }
}

/// Where the steps of `COLUMNS` columns are: they follow each other, and so do the next columns.
#[derive(Debug)]
pub struct Steps<L, const COLUMNS: usize>(std::marker::PhantomData<L>);

impl<L: Lines, const COLUMNS: usize> Steps<L, COLUMNS> {
    /// How many there are, if operands have four columns.
    pub const COUNT: usize = COLUMNS / 4 / L::OPERANDS;

    /// Where step `step` begins of the columns that begin at `at`.
    #[inline(always)]
    pub fn at(at: *const u8, step: usize) -> *const u8 {
        at.wrapping_add(Self::spread(step * L::STEP))
    }

    /// What begins after so many times as many columns.
    #[inline(always)]
    pub(crate) fn after(at: *const u8, times: usize) -> *const u8 {
        Self::at(at, times * Self::COUNT)
    }

    /// Where byte `at` is, from the first line: lines of a bundle take turns.
    #[inline(always)]
    pub fn spread(at: usize) -> usize {
        if L::BUNDLE > 1 { spread(at, L::BUNDLE * LINE) } else { at }
    }
}

/// Where the scales of the columns are that are unpacked next.
#[derive(Debug, Clone, Copy)]
pub struct Scales<'a> {
    /// The panel.
    pub panel: &'a [u8],
    /// Bytes from a line of it to the next one.
    pub step: usize,
    /// Where the record of the group of these columns begins in the panel; and how many of them it has left.
    pub record: usize,
    /// See `record`.
    pub left: usize,
    /// Columns of a group.
    pub group: usize,
    /// Where the record begins that is above those of groups.
    pub above: usize,
    /// The bits of a block's lines, of those that are [told](Lines::TOLD).
    pub small: u32,
    /// What codes are more than what they stand for, if groups do not say that.
    pub zero: i32,
}

impl<'a> Scales<'a> {
    /// Goes on by so many columns of a group, whose record has so many bytes. Returns where it begins.
    #[inline(always)]
    fn take(&mut self, columns: usize, record: usize) -> usize {
        let at = self.record;
        self.left -= columns;
        if self.left == 0 {
            (self.record, self.left) = (at + record, self.group);
        }
        at
    }

    /// So many bytes of the panel, of one line.
    #[inline(always)]
    fn bytes(&self, at: usize, bytes: usize) -> &'a [u8] {
        &self.panel[spread(at, self.step)..][..bytes]
    }
}

/// [`Lines::operands`], or, where lines are [told](Lines::TOLD) and the lowest bit of `small` is not set, [`Lines::normal_operands`].
///
/// # Safety
/// As these.
#[inline(always)]
unsafe fn told_operands<I: Isa, L: Lines, const COLUMNS: usize>(
    isa: I,
    table: L::Table<I>,
    at: *const u8,
    step: usize,
    small: u32,
) -> [I::Int; 2] {
    // SAFETY: by the caller's promise.
    unsafe {
        if L::TOLD && I::FP8_NORMAL && small & 1 == 0 {
            L::normal_operands::<I, COLUMNS>(isa, at, step)
        } else {
            L::operands::<I, COLUMNS>(isa, table, at, step)
        }
    }
}

/// Whether [`Scale::shift`] is added to codes with inputs in groups of `XG` columns: not where words are to hold sums of products of so many of them.
pub(crate) const fn shifts_codes<I: Isa, S: Scale, const XG: usize>() -> bool {
    S::SHIFTS && (I::VNNI || XG < BLOCK)
}

/// Unpacks the lines of a block, which has its steps by `COLUMNS` columns. `WIDEN`: each operand of BF16 becomes two lines of F32.
pub(crate) struct Unpack<'a, 'b, L, S, const COLUMNS: usize, const WIDEN: bool> {
    /// Its lines.
    pub from: &'a [u8],
    /// For [`Scale::SHIFTS`].
    pub scales: &'a mut Scales<'b>,
    pub to: &'a mut [u8],
    pub kind: std::marker::PhantomData<(L, S)>,
}

impl<L: Lines, S: Scale, const COLUMNS: usize, const WIDEN: bool> Job for Unpack<'_, '_, L, S, COLUMNS, WIDEN> {
    #[inline(always)]
    fn go<I: Isa>(self, isa: I) {
        const { assert!(!S::SHIFTS || matches!(COLUMNS, CHUNK | BLOCK) && !WIDEN) };
        let shifts = const { shifts_codes::<I, S, COLUMNS>() };
        let table = L::table(isa);
        let steps = Steps::<L, COLUMNS>::COUNT;
        let lines = if WIDEN { 2 } else { 1 };
        let groups = self.to.chunks_exact_mut(steps * L::OPERANDS * lines * LINE);
        let bytes = groups.len() * steps * L::STEP;
        assert!(bytes == 0 || self.from.len() > Steps::<L, COLUMNS>::spread(bytes - 1));
        let from = self.from.as_ptr();
        let mut small = self.scales.small;
        for (group, to) in groups.enumerate() {
            let from = Steps::<L, COLUMNS>::after(from, group);
            let mut shift = isa.splat(0);
            if shifts {
                let at = self.scales.take(COLUMNS, S::RECORD);
                // SAFETY: the bytes of a record.
                shift = unsafe { S::shift(isa, self.scales.bytes(at, S::RECORD).as_ptr()) };
            }
            macro_rules! unpack {
                ($step:expr) => {
                    let (step, bytes) = ($step, L::OPERANDS * lines * LINE);
                    let to = &mut to[step * bytes..][..bytes];
                    // SAFETY: the bytes of all steps: there are those of all groups, as said above.
                    let operands = unsafe { told_operands::<I, L, COLUMNS>(isa, table, from, step, small) };
                    small >>= 1;
                    for (to, v) in to.chunks_exact_mut(lines * LINE).zip(operands) {
                        let v = if shifts { isa.add(v, shift) } else { v };
                        let widened = [isa.up::<16>(v), isa.and(v, isa.splat(!0xffff))];
                        for (to, v) in to.chunks_exact_mut(LINE).zip(if WIDEN { widened } else { [v; 2] }) {
                            // SAFETY: `to` is a line.
                            unsafe { isa.store(to.as_mut_ptr(), v) };
                        }
                    }
                };
            }
            if L::SHARED {
                const { assert!(!L::SHARED || matches!(Steps::<L, COLUMNS>::COUNT, 2 | 4)) };
                unpack!(0);
                unpack!(1);
                if steps > 2 {
                    unpack!(2);
                    unpack!(3);
                }
            } else {
                for step in 0..steps {
                    unpack!(step);
                }
            }
        }
    }
}

/// Where the second and the third byte of a dword are in each 16 bytes, to be its first one; and zeros above.
static BYTE: [[u8; LINE]; 2] = {
    let mut t = [[0x80; LINE]; 2];
    let mut i = 0;
    while i < LINE {
        (t[0][i], t[1][i]) = ((i % 16) as u8 + 1, (i % 16) as u8 + 2);
        i += 4;
    }
    t
};

/// The bits of 2^(23 - `BIT`) as F32, to which a code from that bit on adds itself.
const fn plus_code<const BIT: u32>() -> i32 {
    ((127 + 23 - BIT) << 23) as i32
}

/// Unpacks the lines of a block to BF16 numbers, those that codes stand for: 16 outputs x 2 columns in a line. Scales are those of [`Ints`].
///
/// [`Ints`]: crate::product::Ints
pub(crate) struct Widen<'a, 'b, L, S, const XG: usize, const WG: usize> {
    /// Its lines.
    pub from: &'a [u8],
    pub scales: &'a mut Scales<'b>,
    pub to: &'a mut [u8],
    pub kind: std::marker::PhantomData<(L, S)>,
}

/// What codes of the next `XG` columns, the first of `group` times as many, are multiplied with, and what is added then. The scale of
/// the output is left to be applied.
#[inline(always)]
pub(crate) fn of_group<I: Isa, S: Scale, const XG: usize, const WG: usize>(
    isa: I,
    scales: &mut Scales<'_>,
    group: usize,
) -> [I::Flt; 2] {
    let zero = isa.splat_f32(-scales.zero as f32);
    if WG == 0 {
        return [isa.splat_f32(1.0), zero];
    }
    let at = scales.take(XG, S::RECORD);
    // Two groups share a dword of [`Scale::words`].
    let first = if S::WORDS == 2 { at - group % 2 * S::RECORD } else { at };
    let record = scales.bytes(first, S::WORDS.max(1) * S::RECORD).as_ptr();
    let above = if S::SUPER > 0 { scales.bytes(scales.above, S::SUPER).as_ptr() } else { record };
    // SAFETY: all bytes of the record, or of two of them, and of the one above.
    unsafe {
        let mut scale = isa.plain_nan(S::load(isa, record, above));
        let mut add = isa.zero();
        if S::WORDS > 0 {
            let words = S::words(isa, record, S::factors(isa, above));
            let (upper, lower) = (isa.down::<16>(words), isa.down::<16>(isa.up::<16>(words)));
            if S::WORDS == 1 {
                add = isa.mul(isa.to_f32(upper), scale);
            }
            let of_group = if S::WORDS == 2 && group.is_multiple_of(2) { upper } else { lower };
            scale = isa.mul(isa.to_f32(of_group), scale);
        } else if S::MINIMA {
            add = isa.plain_nan(S::minima(isa, record, above));
        }
        if S::ZEROS {
            add = isa.mul(scale, isa.to_f32(isa.sub(isa.splat(0), S::zeros(isa, record))));
        } else if !S::MINIMA {
            add = isa.mul_add(scale, zero, add);
        }
        [scale, add]
    }
}

impl<L: Codes, S: Scale, const XG: usize, const WG: usize> Job for Widen<'_, '_, L, S, XG, WG> {
    #[inline(always)]
    fn go<I: Isa>(self, isa: I) {
        let table = L::table(isa);
        // SAFETY: 64 bytes each.
        let middle = unsafe { [isa.load(BYTE[0].as_ptr()), isa.load(BYTE[1].as_ptr())] };
        let steps = Steps::<L, XG>::COUNT;
        let group_bytes = XG / 2 * LINE;
        assert!(self.to.len() == BLOCK / XG * group_bytes);
        assert!(self.from.len() > Steps::<L, XG>::spread(BLOCK / XG * steps * L::STEP - 1));
        let (from, mut to) = (self.from.as_ptr(), self.to.as_mut_ptr());
        for group in 0..BLOCK / XG {
            let from = Steps::<L, XG>::after(from, group);
            let [scale, add] = of_group::<I, S, XG, WG>(isa, self.scales, group);
            // Nibbles from a bit on become numbers without a conversion, as what they add to a power of two, which is taken off again here: exactly if scales have up to
            // 15 bits, else to 2^-13 of what one more in a code is (Q4_K; rounding to BF16 is 2^-9 of a number).
            let from_12 = isa.mul_add(scale, isa.splat_f32(-2048.0), add);
            let from_16 = isa.mul_add(scale, isa.splat_f32(-128.0), add);
            // No closures: compilers leave calls of some, and those have none of the instructions.
            macro_rules! nibble {
                ($v:expr, $bit:literal, $add:expr) => {{
                    let code = isa.and($v, isa.splat(0xf << $bit));
                    isa.mul_add(isa.as_f32(isa.xor(code, isa.splat(plus_code::<$bit>()))), scale, $add)
                }};
            }
            macro_rules! number {
                ($codes:expr) => {
                    isa.mul_add(isa.to_f32($codes), scale, add)
                };
            }
            macro_rules! store {
                ($($first:expr, $second:expr);*) => {$(
                    // SAFETY: as many lines as there are pairs of columns, as said above.
                    unsafe { isa.store(to, isa.bf16_pairs($first, $second)) };
                    to = to.wrapping_add(LINE);
                )*};
            }
            macro_rules! widen {
                ($step:expr) => {
                    if L::NIBBLES {
                        // SAFETY: the bytes of all steps, of all groups, as said above.
                        let v = unsafe { isa.load(Steps::<L, XG>::at(from, $step)) };
                        let (up_8, up_16) = (isa.up::<8>(v), isa.up::<16>(v));
                        let (down_8, down_16) = (isa.down::<8>(v), isa.down::<16>(v));
                        store!(
                            nibble!(up_16, 16, from_16), nibble!(up_8, 16, from_16);
                            nibble!(v, 16, from_16), nibble!(down_8, 16, from_16);
                            nibble!(up_8, 12, from_12), nibble!(v, 12, from_12);
                            nibble!(down_8, 12, from_12), nibble!(down_16, 12, from_12)
                        );
                    } else {
                        // SAFETY: as above.
                        let operands = unsafe { L::operands::<I, XG>(isa, table, from, $step) };
                        for &v in &operands[..L::OPERANDS] {
                            // By other ports than shifts are on.
                            let (second, third) = (isa.lookup(v, middle[0]), isa.lookup(v, middle[1]));
                            let low = isa.splat(0xff);
                            store!(
                                number!(isa.and(v, low)), number!(second);
                                number!(third), number!(isa.and(isa.down::<24>(v), low))
                            );
                        }
                    }
                };
            }
            if L::SHARED {
                const { assert!(!L::SHARED || matches!(Steps::<L, XG>::COUNT, 2 | 4)) };
                widen!(0);
                widen!(1);
                if steps > 2 {
                    widen!(2);
                    widen!(3);
                }
            } else {
                for step in 0..steps {
                    widen!(step);
                }
            }
        }
    }
}

/// The bits of the least scale that times [`Isa::FP8_UP`], which is 2^8 where there is a tile unit, might be infinite.
const LARGE_SCALE: u32 = (127 + 119) << 23;

/// Unpacks the lines of a block to BF16 numbers times their scales, E8M0 for an output and 32 columns.
pub(crate) struct WidenFloats<'a, 'b, L> {
    /// Its lines.
    pub from: &'a [u8],
    pub scales: &'a mut Scales<'b>,
    pub to: &'a mut [u8],
    pub kind: std::marker::PhantomData<L>,
}

impl<L: Floats> Job for WidenFloats<'_, '_, L> {
    #[inline(always)]
    fn go<I: Isa>(self, isa: I) {
        assert!(L::BF16 && !L::SHARED);
        let table = L::table(isa);
        let steps = CHUNK / 2 / L::OPERANDS;
        let bytes = BLOCK / CHUNK * steps * L::STEP;
        assert!(self.from.len() > Steps::<L, BLOCK>::spread(bytes - 1) && self.to.len() == BLOCK / 2 * LINE);
        let (mut from, mut to) = (self.from.as_ptr(), self.to.as_mut_ptr());
        let mut small = self.scales.small;
        for _ in 0..BLOCK / CHUNK {
            let at = self.scales.take(CHUNK, PANEL);
            let at = self.scales.bytes(at, PANEL).as_ptr();
            // SAFETY: the bytes of a record.
            let scale = isa.exp2(unsafe { isa.load_u8(at) });
            // 255 is infinite so far: times 0 it is NaN.
            let mut scale = isa.plain_nan(isa.mul_add(scale, isa.zero(), scale));
            // What FP8 lacks goes with scales, but for those so large that they would be infinite.
            let with_scale = L::FP8 && isa.largest(isa.as_int(isa.abs(scale))) < LARGE_SCALE;
            let up = isa.splat_f32(I::FP8_UP);
            if with_scale {
                scale = isa.mul(scale, up);
            }
            macro_rules! widen {
                ($up:literal) => {
                    for _ in 0..steps {
                        // SAFETY: the bytes of all steps, as said above.
                        let operands = unsafe { told_operands::<I, L, BLOCK>(isa, table, from, 0, small) };
                        small >>= 1;
                        from = from.wrapping_add(Steps::<L, BLOCK>::spread(L::STEP));
                        for &v in &operands[..L::OPERANDS] {
                            let (even, odd) = (isa.as_f32(isa.up::<16>(v)), isa.as_f32(isa.and(v, isa.splat(!0xffff))));
                            let (even, odd) = if $up { (isa.mul(even, up), isa.mul(odd, up)) } else { (even, odd) };
                            let scaled = isa.bf16_pairs(isa.mul(even, scale), isa.mul(odd, scale));
                            // SAFETY: as many lines as there are pairs of columns, as said above.
                            unsafe { isa.store(to, scaled) };
                            to = to.wrapping_add(LINE);
                        }
                    }
                };
            }
            if with_scale || !L::FP8 {
                widen!(false);
            } else {
                widen!(true);
            }
        }
    }
}
