//! Register tiles: R rows x P panels of 16 outputs, sums in registers over a range of K.
//!
//! ```text
//! for each block of 128 columns
//!     for each line of the P panels: unpack it in registers if it is packed
//!         for each of the R rows: broadcast its inputs; for each panel: sum[r][p] += line[p] . inputs[r]
//!     scale what has one scale so far, and add it to the total
//! ```
//!
//! Each output of each row is one chain of additions in rising k, whatever R and P are, wherever K is cut, and whether lines are
//! unpacked here or beforehand. So a number does not depend on the rows and outputs that are computed with it.

#![allow(unsafe_code)] // kernel

use std::marker::PhantomData;
use std::ops::Range;

use kt_core::cpu::input::{BLOCK, WORD_ZERO, WORD_ZEROS};

use crate::ahead::{Ahead, Later, Rows, prefetch_later, prefetch_now};
use crate::dots::{LinesAt, STEP};
use crate::isa::{Isa, Job};
use crate::layout::{BITS, LINE, MOST_PANELS, PANEL, SUPER, spread, unit_of};
use crate::lines::{Codes, Floats, Lines, SHIFTED, Scale, Steps, shifts_codes};
use crate::tiled::{CHAIN, INT_SPAN, NUMBER};

/// What register tiles read and write that follow each other in rows: `blocks` blocks of 128 columns of it.
pub struct Tile<'a> {
    /// The lines of the first panel, from its first block; those of panel `p` begin at `p * weight_stride`.
    pub weights: &'a [u8],
    /// See `weights`.
    pub weight_stride: usize,
    /// Blocks after which lines and scales of groups go on elsewhere: 1, 2 or 4.
    pub unit: usize,
    /// Bytes between the lines of such blocks and those of the next ones.
    pub line_skip: usize,
    /// The first panel, for its scales; panel `p` begins at `p * panel_stride`.
    pub panel: &'a [u8],
    /// See `panel`.
    pub panel_stride: usize,
    /// Bytes from a line of scales to the next one. What is said below of where scales are in a panel is as if it were [`LINE`].
    pub panel_step: usize,
    /// Where the scales of outputs begin in a panel.
    pub outputs_at: usize,
    /// Where the scales of the first group or block begin in a panel.
    pub group_at: usize,
    /// Columns that share a scale, for integer codes with group scales; and how many of them the first group has left.
    pub group: usize,
    /// See `group`.
    pub group_left: usize,
    /// Bytes between the scales of the groups of a unit and those of the next one.
    pub record_skip: usize,
    /// Bytes of scales at the beginning of a panel, before all blocks.
    pub front: usize,
    /// Where the records of [`SUPER`] columns begin in a panel.
    pub supers_at: usize,
    /// How many blocks come before the first one.
    pub first_block: usize,
    /// Input rows, from the first block: `b` of row `r` begins at `b * input_stride + r * row_bytes`, or, where blocks of inputs are of several of these, at
    /// `b / input_span * input_stride + r * row_bytes + b % input_span * 128`.
    pub inputs: &'a [u8],
    /// See `inputs`.
    pub input_stride: usize,
    /// Blocks that are one of the inputs, with one scale: sums of their products are scaled together. Tiles begin with the first of them, and end with the last one or where the
    /// matrix does.
    pub input_span: usize,
    /// Bytes of a block of the inputs.
    pub row_bytes: usize,
    /// Blocks of 128 columns.
    pub blocks: usize,
    /// How many tiles there are, of as many rows each.
    pub row_tiles: usize,
    /// Row `r`, output `j` goes to `r * out_stride + j`.
    pub out: &'a mut [f32],
    /// See `out`.
    pub out_stride: usize,
    /// Outputs to write: the last panel of them may be cut, and others may be there that pad the matrix.
    pub width: usize,
    /// When lines stream: the panels that come next.
    pub after: *const u8,
    /// How lines are asked for that stream.
    pub ahead: Ahead,
    /// What to ask for meanwhile, some with each block of each tile, when lines are in the cache.
    pub later: &'a Later,
    /// Memory for the sums of a tile unit, if there is one.
    pub sums: &'a mut [u8],
    /// Whether these are the last columns, so that the scales of outputs are due. If `first_block` is not 0, `out` holds the totals
    /// so far.
    pub last: bool,
}

/// Lines of a panel after which those that come later are asked for anew, in loops over so many lines that this costs nothing: all of a block at once are too many for
/// what a first-level cache has for misses.
const ASK_STEPS: usize = STEP;

/// How many times integers do that with each block. Those with scales of groups with each scale of the inputs. Where registers are few, once: hints inside of the loops cost
/// them (`PERFORMANCE.md`).
pub(crate) const fn int_asks<I: Isa, S: Scale, const XG: usize>() -> usize {
    match I::LARGE {
        true if XG == BLOCK => BLOCK / 4 / ASK_STEPS,
        true if I::VNNI => BLOCK / input_scale::<S, XG>(),
        _ => 1,
    }
}

/// Columns that share a scale of the inputs, of tiles that scale sums of `XG` columns.
const fn input_scale<S: Scale, const XG: usize>() -> usize {
    if S::WORDS == 2 { 2 * XG } else { XG }
}

/// What a tile reads of a panel, beside its lines, which are so many bytes apart.
struct Reads {
    /// Bytes from a line to the next one.
    line_step: usize,
    /// Bytes of scales, from the start of the panel.
    scales: usize,
    /// Bytes of a block of an input row.
    input: usize,
}

impl Tile<'_> {
    /// Checks that everything that tiles of `r` x `p` read and write is there.
    #[inline(always)]
    fn check(&self, r: usize, p: usize, block_bytes: usize, reads: Reads) {
        assert!(self.blocks > 0 && self.row_tiles > 0);
        let r = r * self.row_tiles;
        let lines = self.lines_before(self.blocks - 1, block_bytes) + block_bytes;
        assert!(self.weights.len() > (p - 1) * self.weight_stride + spread(lines - 1, reads.line_step));
        let last = |bytes| (p - 1) * self.panel_stride + spread(bytes - 1, self.panel_step);
        assert!(reads.scales == 0 || self.panel.len() > last(reads.scales));
        assert!(self.first_block.is_multiple_of(self.input_span));
        assert!(self.inputs.len() >= (self.blocks - 1) / self.input_span * self.input_stride + r * reads.input);
        assert!(self.width <= p * PANEL);
        assert!(self.out.len() >= (r - 1) * self.out_stride + self.width);
    }

    /// `n / self.unit`, which is a power of two.
    #[inline(always)]
    fn per_unit(&self, n: usize) -> usize {
        n >> self.unit.trailing_zeros()
    }

    /// Units that end before a block of these.
    #[inline(always)]
    pub fn units_before(&self, block: usize) -> usize {
        self.per_unit(self.first_block + block) - self.per_unit(self.first_block)
    }

    /// Bytes from the lines of the first block of these to those of another one, if each has `bytes` of them.
    #[inline(always)]
    pub fn lines_before(&self, block: usize, bytes: usize) -> usize {
        block * bytes + self.units_before(block) * self.line_skip
    }

    /// Where byte `at` of panel `p` is.
    #[inline(always)]
    fn panel_at(&self, p: usize, at: usize) -> *const u8 {
        self.panel.as_ptr().wrapping_add(p * self.panel_stride + spread(at, self.panel_step))
    }

    /// From something in the panels to where it is in those that follow.
    #[inline(always)]
    fn following(&self) -> usize {
        self.after.addr().wrapping_sub(self.panel.as_ptr().addr())
    }

    /// How many blocks before they are due lines are asked for; `block_bytes` as below.
    #[inline(always)]
    fn blocks_ahead<const P: usize>(&self, block_bytes: usize) -> usize {
        (self.ahead.bytes / P).div_ceil(block_bytes)
    }

    /// From a line of a block to the line that is to be prefetched, if lines are `line_step` bytes apart; `block_bytes` from one block to the next.
    #[inline(always)]
    fn ahead<const P: usize>(&self, block: usize, block_bytes: usize, line_step: usize) -> usize {
        self.ahead_by(block, self.blocks_ahead::<P>(block_bytes), block_bytes, line_step)
    }

    /// The same if that is so many blocks ahead.
    #[inline(always)]
    fn ahead_by(&self, block: usize, blocks: usize, block_bytes: usize, line_step: usize) -> usize {
        let (ahead, all) = (spread(blocks * block_bytes, line_step), spread(self.blocks * block_bytes, line_step));
        if block + blocks < self.blocks { ahead } else { self.following().wrapping_add(ahead).wrapping_sub(all) }
    }

    /// Whether the panels are a single stream: one alone, or those of a bundle.
    #[inline(always)]
    fn is_stream<const P: usize>(&self) -> bool {
        P == 1 || self.panel_stride == LINE
    }

    /// Asks for the scales in front of panels, which are few. All now: a hint more in the loop takes registers from it. Those of several panels
    /// a round before they are due, to the second level, since lines of all panels come before them. Those of a single stream as they come, in
    /// the order of addresses, if the hardware asks for its lines; else see [`Tile::ask_next_front`].
    #[inline(always)]
    fn ask_front<const P: usize>(&self) {
        if self.is_stream::<P>() && self.ahead.bytes > 0 {
            return;
        }
        for line in (0..self.front).step_by(LINE) {
            for p in 0..P {
                let here = self.panel_at(p, line);
                if self.is_stream::<P>() {
                    prefetch_now(here);
                } else {
                    prefetch_later(here.wrapping_add(self.following()));
                }
            }
        }
    }

    /// Asks for the scales in front of what follows a single stream, when block `block` of it is due at which the next lines to be asked for are those
    /// behind them: what is asked for in the order of addresses is there in time, and a gap of six lines and more made all that follows late.
    /// To the second level: they are read until the end of the panels, and lines that went past it are not in the first for long.
    #[inline(always)]
    fn ask_next_front<const P: usize>(&self, block: usize, block_bytes: usize) {
        if !self.is_stream::<P>() || block + self.blocks_ahead::<P>(block_bytes).min(self.blocks) != self.blocks {
            return;
        }
        for line in (0..self.front).step_by(LINE) {
            for p in 0..P {
                prefetch_later(self.panel_at(p, line).wrapping_add(self.following()));
            }
        }
    }

    /// Asks for where a single stream that ends at `end` goes on, if that is elsewhere.
    #[inline(always)]
    fn ask_next(&self, end: *const u8) {
        if self.after != end {
            for line in 0..NEXT_LINES {
                prefetch_later(self.after.wrapping_add(line * LINE));
            }
        }
    }

    /// Checks that all is there that a tile unit reads of `rows` rows and of panels of integers with one scale an output, a block of which has so many bytes,
    /// whose lines it streams, and asks for what is in front of those that follow.
    #[inline(always)]
    pub(crate) fn check_int_stream(&self, rows: usize, block_bytes: usize) {
        // Codes, a scale, and what is kept of their sum.
        let input = self.input_span * BLOCK + 8;
        assert!(self.unit == 1 && self.first_block == 0 && self.row_tiles == 1 && self.line_skip == 0);
        assert!(self.input_span <= INT_SPAN);
        assert!(self.row_bytes >= input);
        let reads = Reads { line_step: LINE, scales: self.outputs_at + PANEL * 4, input: self.row_bytes };
        self.check(rows, MOST_PANELS, block_bytes, reads);
        self.ask_front::<MOST_PANELS>();
    }

    /// From a line of a block of that to the one to ask for, at least so many blocks on.
    #[inline(always)]
    pub(crate) fn int_stream_ahead(&self, block: usize, block_bytes: usize, least: usize) -> usize {
        let blocks = self.blocks_ahead::<MOST_PANELS>(block_bytes).max(least);
        self.ahead_by(block, blocks, block_bytes, LINE)
    }

    /// Checks that totals of `r` rows and `p` panels fit, and that the scales of these `outputs` are there, if they are due.
    #[inline(always)]
    pub(crate) fn check_totals(&self, r: usize, p: usize, outputs: bool) {
        let scales = if outputs { self.outputs_at + PANEL * 4 } else { 0 };
        let last = (p - 1) * self.panel_stride + spread(scales.saturating_sub(1), self.panel_step);
        assert!(!outputs || self.panel.len() > last);
        assert!(self.width <= p * PANEL && self.out.len() >= (r - 1) * self.out_stride + self.width);
    }

    /// The totals to go on from, of the tile that begins with row `first`.
    #[inline(always)]
    pub(crate) fn begin<I: Isa, const R: usize, const P: usize>(&self, isa: I, first: usize) -> [[I::Flt; P]; R] {
        let mut total = [[isa.zero(); P]; R];
        if self.first_block > 0 {
            for (r, total) in total.iter_mut().enumerate() {
                for (p, total) in total.iter_mut().enumerate() {
                    let from = self.out.as_ptr().wrapping_add((first + r) * self.out_stride + p * PANEL);
                    // SAFETY: `check` saw that `width` outputs of all rows fit; cut there.
                    *total = unsafe { isa.load_first(from, self.width.saturating_sub(p * PANEL)) };
                }
            }
        }
        total
    }

    /// Writes the totals of the tile that begins with row `first`, at the end times `up`, and times the scales of outputs, if there are
    /// such.
    #[inline(always)]
    pub(crate) fn end<I: Isa, const R: usize, const P: usize>(
        &mut self,
        isa: I,
        first: usize,
        total: [[I::Flt; P]; R],
        output_scales: bool,
        up: f32,
    ) {
        for p in 0..P {
            for (r, total) in total.iter().enumerate() {
                let mut v = total[p];
                if up != 1.0 && self.last {
                    v = isa.mul(v, isa.splat_f32(up));
                }
                if output_scales && self.last {
                    let at = self.panel_at(p, self.outputs_at);
                    // SAFETY: `check` saw the scales of P panels.
                    v = isa.mul(v, isa.as_f32(unsafe { isa.load(at) }));
                }
                let to = self.out.as_mut_ptr().wrapping_add((first + r) * self.out_stride + p * PANEL);
                // SAFETY: `check` saw that `width` outputs of all rows fit; cut there.
                unsafe { isa.store_first(to, self.width.saturating_sub(p * PANEL), v) };
            }
        }
    }
}

/// Unsigned codes x signed inputs with a scale per `XG` columns.
///
/// Weights have a scale per `WG` columns, or several times as many, of kind `S`; 0: none but that of the output. `STREAM`: lines come
/// from memory.
pub(crate) struct IntTile<
    'a,
    L,
    S,
    const XG: usize,
    const WG: usize,
    const STREAM: bool,
    const R: usize,
    const P: usize,
> {
    pub tile: Tile<'a>,
    pub kind: PhantomData<(L, S)>,
}

/// Blocks whose scales come before the first one of them, if they are among the blocks, and lines of these; see [`Layout::of`](crate::layout::Layout::of).
const fn head<S: Scale, const XG: usize, const WG: usize>() -> (usize, usize) {
    let group = if S::WORDS > 0 { XG } else { WG };
    let of_block = match BLOCK.checked_div(group) {
        Some(groups) => groups * S::RECORD,
        None => 0,
    };
    let (unit, bytes) = unit_of(of_block, group == BLOCK);
    (unit, bytes / LINE)
}

/// Blocks whose sums are scaled once more before they are added to totals.
pub(crate) const fn scaled_blocks<S: Scale>() -> usize {
    if S::WORDS > 0 { SUPER / BLOCK } else { 1 }
}

/// The most rows that read one panel of integers after another, in the order of addresses, without hints.
pub(crate) const fn one_stream<L: Lines, S: Scale, const XG: usize, const WG: usize>() -> usize {
    // Codes of three or four bits with scales among their blocks, or with none.
    if (head::<S, XG, WG>().1 > 0 || S::RECORD == 0) && L::OPERANDS > 1 && L::BUNDLE == 1 {
        // Two rows gain by several panels and hints what one stream does not hide of their products; not where scales for more columns lie apart.
        if S::SUPER > 0 { 2 } else { 1 }
    } else {
        0
    }
}

/// Lines of a panel that steps share, at most: operands of 32 columns with five bits.
const MOST_SHARED: usize = 5;

/// The low nibble of each byte.
const LOW_NIBBLES: i32 = 0x0f0f_0f0f;

/// For each byte where it comes from in 16 bytes, so that the words of a dword change places. Rotations take longer on Zen 4 and 5.
pub(crate) static SWAPPED: [u8; LINE] = {
    let mut t = [0; LINE];
    let mut i = 0;
    while i < LINE {
        t[i] = ((i % 16) ^ 2) as u8;
        i += 1;
    }
    t
};

/// The same so that both become the lower one, or the upper one.
static TWICE: [[u8; LINE]; 2] = {
    let mut t = [[0; LINE]; 2];
    let mut i = 0;
    while i < LINE {
        let at = (i % 16 / 4 * 4 + i % 2) as u8;
        (t[0][i], t[1][i]) = (at, at + 2);
        i += 1;
    }
    t
};

/// Lines that are asked for where a single stream will go on elsewhere.
const NEXT_LINES: usize = 64;

/// The same number, of which the compiler does not know that.
#[inline(always)]
fn opaque(n: usize) -> usize {
    let mut n = n;
    // SAFETY: no instruction.
    unsafe { std::arch::asm!("/* {0} */", inout(reg) n, options(pure, nomem, nostack, preserves_flags)) };
    n
}

/// The same address, of which the compiler does not know that: what is read there twice is not kept in a register meanwhile.
#[allow(clippy::pointers_in_nomem_asm_block)] // no instruction
#[inline(always)]
fn opaque_at(at: *const u8) -> *const u8 {
    let mut at = at;
    // SAFETY: no instruction.
    unsafe { std::arch::asm!("/* {0} */", inout(reg) at, options(nomem, nostack, preserves_flags)) };
    at
}

/// Where a tile is.
#[derive(Clone, Copy)]
struct Place {
    /// The block of the first row.
    x: *const u8,
    /// Bytes of a block.
    input_bytes: usize,
    /// From a line to the one to ask for.
    ahead: usize,
    /// The same for steps that share lines: see [`Ahead::distances`].
    distances: [usize; 2],
}

impl<L: Codes, S: Scale, const XG: usize, const WG: usize, const STREAM: bool, const R: usize, const P: usize>
    IntTile<'_, L, S, XG, WG, STREAM, R, P>
{
    /// Whether it reads one panel in the order of addresses: a single stream, that the hardware asks for in time as long as little is done with
    /// each line.
    const ONE_STREAM: bool = STREAM && P == 1 && R <= one_stream::<L, S, XG, WG>();

    /// Whether sums that go on over several blocks begin anew with each, and are added up: where they are few, products wait for those before them, but not for those of another
    /// block.
    const ANEW: bool = STREAM && R * P < 10;

    /// Whether it reads a whole bundle, which is a single stream as well.
    const BUNDLE: bool = STREAM && P > 1 && P == L::BUNDLE;

    /// Whether scales of groups may be those of several blocks.
    const UNITS: bool = WG == BLOCK && S::WORDS == 0;

    /// Blocks of a unit, and lines of scales before its others.
    const HEAD: (usize, usize) = head::<S, XG, WG>();

    /// Whether high nibbles are multiplied where they are, as 16 times what they are, and their sums divided by that: for one and two rows less
    /// than a shift of each line.
    #[inline(always)]
    const fn apart<I: Isa>() -> bool {
        STREAM && R <= 2 && R * P <= 4 && L::NIBBLES && I::VNNI && I::LARGE
    }

    /// Whether the sum of a group is two words that are still to be added up, as multiplications without VNNI leave it. They begin with what inputs
    /// bring along ([`Sums::Pairs`](kt_core::cpu::input::Sums::Pairs)), so that they fit in the end, whatever they pass through: they are sums of
    /// products with codes less their zero point, 16 or less, of half of 32 columns.
    const fn in_words<I: Isa>() -> bool {
        L::SPAN > 4 && !I::VNNI && XG < BLOCK
    }

    /// Whether sums of such codes over a block, which would not fit words, are dwords that words of [`Codes::SPAN`] columns are added to.
    const fn by_spans<I: Isa>() -> bool {
        L::SPAN > 4 && !I::VNNI && XG == BLOCK
    }

    /// Whether the products of all `XG` columns of a call of [`Self::add_products`] go to the same sums, and not those of each [`Codes::SPAN`] of them.
    const fn in_one_span<I: Isa>() -> bool {
        XG == BLOCK && !Self::by_spans::<I>() || Self::in_words::<I>() || L::SPAN <= 4 || L::SPAN > XG || L::SHARED
    }

    /// Whether products are [in assembly](crate::dots).
    const fn in_assembly<I: Isa>() -> bool {
        !STREAM && P == MOST_PANELS && I::LARGE && I::VNNI && L::OPERANDS == 1 && XG.is_multiple_of(4 * STEP)
    }

    /// Whether zero points are added to nibbles: for all rows, where a subtraction is for each. From three rows on it is less, with registers of 512
    /// bits: with others each line takes two additions.
    const fn shifts<I: Isa>() -> bool {
        shifts_codes::<I, S, XG>() && L::NIBBLES && R > 2 && I::LARGE
    }

    /// Whether zero points are subtracted from sums: if there are any, and they are not in the codes, now or since these were
    /// [unpacked](crate::lines::Unpack): lines that stream, and nibbles, were not.
    const fn subtracts<I: Isa>() -> bool {
        S::ZEROS
            && !Self::zeros_apart()
            && !Self::shifts::<I>()
            && (!shifts_codes::<I, S, XG>() || L::NIBBLES || STREAM)
    }

    /// Whether sums are those with codes less 128, and what zero points differ from that comes once for several groups of the inputs.
    const fn zeros_apart() -> bool {
        S::ZEROS && !S::SHIFTS && WG > XG
    }

    /// Whether sums begin with what inputs bring along. Those of codes with minima, which have no zero point, do so as words if they would not fit
    /// else, and what they began with is taken off in the end.
    const fn begun<I: Isa>() -> bool {
        !S::MINIMA || Self::in_words::<I>() && L::SPAN < XG
    }

    /// Adds the products of `XG` columns, from column `k` of a block on, to `sums`, which are dwords or [words](Self::in_words).
    ///
    /// # Safety
    /// Their lines, which begin at `line`, and the codes of all rows are readable.
    #[inline(always)]
    unsafe fn add_products<I: Isa, const ASKS: bool>(
        t: &Tile<'_>,
        isa: I,
        (table, zeros): (L::Table<I>, [I::Int; P]),
        (line, at, k): (&mut *const u8, Place, usize),
        sums: &mut [[I::Int; P]; R],
    ) {
        if const { Self::in_assembly::<I>() } {
            let steps = XG / 4 / STEP;
            let hints = if XG == BLOCK { t.later.take_times(steps) } else { Rows::NONE };
            let (x, row) = (at.x.wrapping_add(k), at.input_bytes);
            let at = LinesAt { line: *line, stride: t.weight_stride, x, row, steps, hints };
            // SAFETY: lines of these columns, and codes of all rows, by the caller's promise.
            unsafe { isa.dot_lines(sums, at) };
            *line = Steps::<L, XG>::after(*line, 1);
            return;
        }
        let apart = Self::apart::<I>();
        let by_spans = const { Self::by_spans::<I>() };
        let span = if const { Self::in_one_span::<I>() } { XG } else { L::SPAN };
        let steps = span / 4 / L::OPERANDS;
        for s in 0..XG / span {
            let mut acc = if by_spans { [[isa.splat(0); P]; R] } else { *sums };
            let mut high = [[isa.splat(0); P]; R];
            macro_rules! add {
                ($step:expr, $asks:expr) => {
                    // SAFETY: lines of these columns, and codes of all rows, by the caller's promise.
                    unsafe {
                        let (line, step) = (*line, s * steps + $step);
                        Self::add_step::<I, { $asks }>(
                            t,
                            isa,
                            (table, zeros),
                            (line, at, k),
                            step,
                            [&mut acc, &mut high],
                        )
                    }
                };
            }
            if STREAM && L::SHARED {
                // By hand: of several panels compilers keep a loop, and find out at each step which lines begin there.
                assert!(matches!(steps, 2 | 4));
                macro_rules! shared {
                    ($step:expr) => {
                        if ASKS {
                            Self::ask_shared(t, *line, at.distances, $step);
                        }
                        add!($step, false);
                    };
                }
                shared!(0);
                shared!(1);
                if steps > 2 {
                    shared!(2);
                    shared!(3);
                }
            } else {
                // From three rows on (over one panel four) a loop: else compilers load the inputs of all steps at once, and keep them in memory.
                let steps = if STREAM && I::LARGE && R > 2 && R * P > 3 { opaque(steps) } else { steps };
                for step in 0..steps {
                    if !STREAM && I::LARGE && XG == BLOCK && step * L::OPERANDS % ASK_STEPS == 0 {
                        t.later.ask();
                    }
                    add!(step, ASKS);
                }
            }
            if apart {
                for (acc, high) in acc.iter_mut().zip(&high) {
                    for (acc, &high) in acc.iter_mut().zip(high) {
                        *acc = isa.add(*acc, isa.down::<4>(high));
                    }
                }
            }
            if by_spans {
                for (sums, acc) in sums.iter_mut().zip(&acc) {
                    for (sum, &acc) in sums.iter_mut().zip(acc) {
                        *sum = isa.add(*sum, isa.madd(acc, isa.splat(1 << 16 | 1)));
                    }
                }
            } else {
                *sums = acc;
            }
        }
        *line = Steps::<L, XG>::after(*line, 1);
    }

    /// Where the lines of panel `p` are.
    #[inline(always)]
    fn of_panel(t: &Tile<'_>, line: *const u8, p: usize) -> *const u8 {
        line.wrapping_add(p * if L::BUNDLE > 1 { LINE } else { t.weight_stride })
    }

    /// The lines that begin with a step, counted from those of the first one.
    #[inline(always)]
    fn lines_of(step: usize) -> Range<usize> {
        (step * L::STEP).div_ceil(LINE)..((step + 1) * L::STEP).div_ceil(LINE)
    }

    /// Asks for the line that begins with a step, of those that begin at `line`, if one does: where steps share none there is no more than one.
    #[inline(always)]
    fn ask_step(t: &Tile<'_>, line: *const u8, ahead: usize, step: usize) {
        const { assert!(L::SHARED || L::STEP <= LINE) };
        let lines = Self::lines_of(step);
        if !lines.is_empty() {
            let panels = if L::BUNDLE > 1 { 1 } else { P };
            t.ahead.ask_line(line.wrapping_add(Steps::<L, XG>::spread(lines.start * LINE)), ahead, panels);
        }
    }

    /// Asks for the lines that begin with a step, of those that steps share, which begin at `line`: in the order of addresses, if panels take turns, and not panel by panel, of
    /// which the hardware would not see that they are one stream.
    #[inline(always)]
    fn ask_shared(t: &Tile<'_>, line: *const u8, distances: [usize; 2], step: usize) {
        let lines = Self::lines_of(step);
        // So many that compilers unroll it; a loop over as many as there are they would keep.
        for n in 0..MOST_SHARED {
            for p in 0..P {
                if lines.contains(&n) {
                    Ahead::ask_at(Self::of_panel(t, line, p).wrapping_add(Steps::<L, XG>::spread(n * LINE)), distances);
                }
            }
        }
    }

    /// Adds the products of a step of `XG` columns, which begin with column `k` of a block, to `acc`; of high nibbles [apart](Self::apart) to the
    /// second.
    ///
    /// # Safety
    /// As that of [`Self::add_products`].
    #[inline(always)]
    unsafe fn add_step<I: Isa, const ASKS: bool>(
        t: &Tile<'_>,
        isa: I,
        (table, zeros): (L::Table<I>, [I::Int; P]),
        (line, at, k): (*const u8, Place, usize),
        step: usize,
        [acc, high]: [&mut [[I::Int; P]; R]; 2],
    ) {
        let apart = Self::apart::<I>();
        let Place { x, input_bytes, ahead, .. } = at;
        let mut w = [[isa.splat(0); 2]; P];
        for (p, w) in w.iter_mut().enumerate() {
            let line = Self::of_panel(t, line, p);
            if ASKS {
                Self::ask_step(t, line, ahead, step);
            }
            // SAFETY: a step of panel `p`, by the caller's promise.
            *w = unsafe {
                if apart {
                    let line = isa.load(Steps::<L, XG>::at(line, step));
                    [isa.and(line, isa.splat(LOW_NIBBLES)), isa.and(line, isa.splat(!LOW_NIBBLES))]
                } else {
                    L::operands::<I, XG>(isa, table, line, step)
                }
            };
            if const { Self::shifts::<I>() } {
                // No sum of bytes exceeds one.
                *w = w.map(|w| isa.add(w, zeros[p]));
            }
        }
        for l in 0..L::OPERANDS {
            let k = k + (step * L::OPERANDS + l) * 4;
            if L::SPAN == 0 {
                let mut wide = [isa.wide(w[0][l]); P];
                for (wide, w) in wide.iter_mut().zip(&w) {
                    *wide = isa.wide(w[l]);
                }
                for (r, acc) in acc.iter_mut().enumerate() {
                    // SAFETY: four codes of row `r`, by the caller's promise.
                    let x = unsafe { isa.load_dword(x.add(r * input_bytes + k)) };
                    for (acc, &w) in acc.iter_mut().zip(&wide) {
                        *acc = isa.dot_wide(*acc, w, x);
                    }
                }
            } else {
                let acc = if apart && l == 1 { &mut *high } else { &mut *acc };
                for (r, acc) in acc.iter_mut().enumerate() {
                    // SAFETY: four codes of row `r`, by the caller's promise.
                    let x = unsafe { isa.load_dword(x.add(r * input_bytes + k)) };
                    for (acc, w) in acc.iter_mut().zip(&w) {
                        *acc = if L::SPAN == 4 { isa.dot_small(*acc, w[l], x) } else { isa.dot_narrow(*acc, w[l], x) };
                    }
                }
            }
        }
    }
}

impl<L: Codes, S: Scale, const XG: usize, const WG: usize, const STREAM: bool, const R: usize, const P: usize> Job
    for IntTile<'_, L, S, XG, WG, STREAM, R, P>
{
    const SPILLS: bool = !STREAM;

    #[inline(always)]
    fn go<I: Isa>(self, isa: I) {
        if (Self::BUNDLE || Self::ONE_STREAM) && self.tile.ahead.bytes == 0 {
            self.tile::<I, false>(isa);
        } else {
            self.tile::<I, STREAM>(isa);
        }
    }
}

/// Unsigned codes in lines of bytes in the cache x signed inputs, whose weights have one scale an output, and inputs one for [`Scale::SPAN`] blocks, in `R` rows x four panels: products are in
/// assembly.
pub(crate) struct SquareTile<'a, S, const R: usize> {
    pub tile: Tile<'a>,
    pub kind: PhantomData<S>,
}

impl<S: Scale, const R: usize> Job for SquareTile<'_, S, R> {
    #[inline(always)]
    fn go<I: Isa>(self, isa: I) {
        const P: usize = MOST_PANELS;
        let t = self.tile;
        let block_bytes = BLOCK / 4 * LINE;
        // Codes, their scale, and what sums begin with.
        let scale_at = S::SPAN * BLOCK;
        let input = scale_at + 8;
        let row = if S::SPAN > 1 { input.next_multiple_of(LINE) } else { input };
        assert!(S::RECORD == 0 && S::OUTPUTS);
        assert!(t.unit == 1 && t.line_skip == 0 && t.input_span == S::SPAN);
        let scales = t.outputs_at + PANEL * 4;
        t.check(R, P, block_bytes, Reads { line_step: LINE, scales, input: row });
        for tile in 0..t.row_tiles {
            let first = tile * R;
            let out = t.out.as_mut_ptr().wrapping_add(first * t.out_stride);
            let mut line = t.weights.as_ptr();
            let mut x = t.inputs.as_ptr().wrapping_add(first * row);
            for block in (0..t.blocks).step_by(S::SPAN) {
                let steps = S::SPAN.min(t.blocks - block) * (BLOCK / 4 / STEP);
                let mut sums = [[isa.splat(0); P]; R];
                for (r, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: what the sums of row `r` begin with: `check` saw all blocks of the inputs of all rows.
                    *sums = [unsafe { isa.load_dword(x.wrapping_add(r * row + scale_at + 4)) }; P];
                }
                let at = LinesAt { line, stride: t.weight_stride, x, row, steps, hints: t.later.take_times(steps) };
                // SAFETY: `check` saw the lines of these blocks of all panels, and the inputs of all rows.
                unsafe { isa.dot_lines(&mut sums, at) };
                // Totals are read when they are due: tiles that begin with them wait for them.
                let (begun, ends) = (t.first_block + block > 0, t.last && block + S::SPAN >= t.blocks);
                for p in 0..P {
                    let outputs = t.width.saturating_sub(p * PANEL);
                    for (r, sums) in sums.iter().enumerate() {
                        let to = out.wrapping_add(r * t.out_stride + p * PANEL);
                        // SAFETY: the scale of row `r`, as above; `check` saw that `width` outputs of all rows fit, and the scales of all panels.
                        unsafe {
                            let scale = isa.load_f32(x.wrapping_add(r * row + scale_at));
                            let total = if begun { isa.load_first(to, outputs) } else { isa.zero() };
                            let mut total = isa.mul_add(isa.to_f32(sums[p]), scale, total);
                            if ends {
                                total = isa.mul(total, isa.as_f32(isa.load(t.panel_at(p, t.outputs_at))));
                            }
                            isa.store_first(to, outputs, total);
                        }
                    }
                }
                line = line.wrapping_add(S::SPAN * block_bytes);
                x = x.wrapping_add(t.input_stride);
            }
        }
    }
}

impl<L: Codes, S: Scale, const XG: usize, const WG: usize, const STREAM: bool, const R: usize, const P: usize>
    IntTile<'_, L, S, XG, WG, STREAM, R, P>
{
    /// Does it. `ASKS`: lines and scales are asked for.
    #[inline(always)]
    fn tile<I: Isa, const ASKS: bool>(self, isa: I) {
        let mut t = self.tile;
        const { assert!(WG.is_multiple_of(XG) && (!S::MINIMA || WG == XG) && !(S::MINIMA && S::ZEROS)) };
        const { assert!(!S::POWERS || WG == XG && !S::MINIMA) };
        const { assert!(S::WORDS == 0 || WG == BLOCK && S::SUPER > 0 && !S::MINIMA && !S::ZEROS && !S::POWERS) };
        const { assert!(S::WORDS <= 2) };
        let (in_words, begun) = const { (Self::in_words::<I>(), Self::begun::<I>()) };
        let (shifts, subtracts) = const { (Self::shifts::<I>(), Self::subtracts::<I>()) };
        // Whether zero points are sixteenths, as 2^15 times a number, of what inputs bring along.
        const { assert!(SHIFTED == 16) };
        let sixteenths = S::SHIFTS && S::LOW_ZEROS && in_words;
        // Columns of a sum before it is added to the total.
        let columns = if WG == 0 { XG } else { WG };
        // Columns that share a scale of the inputs.
        let scaled = const { input_scale::<S, XG>() };
        let asks = const { int_asks::<I, S, XG>() };
        let scales_of_inputs = S::SPAN * BLOCK;
        let sums_at = scales_of_inputs + BLOCK / scaled * 4;
        // Bytes of what is kept of the sums of a group, and where in them the last number is.
        let kept = if in_words && S::WORDS == 1 || S::MINIMA && begun || Self::zeros_apart() { 8 } else { 4 };
        let last_kept = kept - 4;
        // Whether that is the words of two groups.
        let of_two = S::WORDS == 2 && !in_words;
        let input_bytes = sums_at + BLOCK / XG * kept / if of_two { 2 } else { 1 };
        let input_bytes = if S::SPAN > 1 { input_bytes.next_multiple_of(LINE) } else { input_bytes };
        let line_step = L::BUNDLE * LINE;
        let steps = BLOCK / XG * Steps::<L, XG>::COUNT;
        let block_bytes = steps * L::STEP;
        let mut scales = if S::OUTPUTS { t.outputs_at + PANEL * 4 } else { 0 };
        if S::WORDS > 0 {
            scales = scales
                .max(t.group_at + t.blocks * (BLOCK / XG) * S::RECORD + t.units_before(t.blocks - 1) * t.record_skip);
        } else if S::RECORD > 0 {
            let records = (t.blocks * BLOCK).saturating_sub(t.group_left).div_ceil(t.group) + 1;
            scales = scales.max(t.group_at + records * S::RECORD + t.units_before(t.blocks - 1) * t.record_skip);
            assert!(t.group.is_multiple_of(WG) && t.group_left.is_multiple_of(WG) && t.group_left > 0);
        }
        if S::SUPER > 0 {
            scales = scales.max(t.supers_at + ((t.first_block + t.blocks) * BLOCK).div_ceil(SUPER) * S::SUPER);
        }
        t.check(R, P, block_bytes, Reads { line_step, scales, input: input_bytes });
        const { assert!(S::SPAN == 1 || S::SPAN.is_power_of_two() && XG == BLOCK && WG == 0) };
        assert!(t.input_span == S::SPAN);

        // From here on every read is in bounds: `check` saw all blocks of the lines of P panels and of the inputs of all rows, and the
        // records of all groups, and of all groups of groups.
        let table = L::table(isa);
        let offset = isa.splat(if L::SPAN == 0 { I::WIDE_OFFSET } else { 0 });
        // Where lines are unpacked, a loop: side by side, both sums of a pair would take registers, and compilers read the lines of the second first.
        let halves = match (S::WORDS, STREAM) {
            (2, true) => opaque(2),
            (2, false) => 2,
            _ => 1,
        };
        let (words, word_zero) = (isa.splat(0xffff), isa.splat(if of_two { WORD_ZEROS } else { WORD_ZERO }));
        // SAFETY: 64 bytes.
        let swapped = unsafe { isa.load(SWAPPED.as_ptr()) };
        // Where byte `at` of panel `p` is. Whether what is unpacked came from a bundle is not known before.
        let (panel, panel_stride, panel_step) = (t.panel.as_ptr(), t.panel_stride, t.panel_step);
        let scales_at = |p: usize, at: usize| {
            let (stride, step) = match (STREAM, L::BUNDLE) {
                (true, 1) => (panel_stride, LINE),
                (true, _) => (LINE, line_step),
                _ => (panel_stride, panel_step),
            };
            panel.wrapping_add(p * stride + spread(at, step))
        };
        assert!(
            !STREAM
                || t.panel_step == line_step && (L::BUNDLE == 1 || t.panel_stride == LINE && t.weight_stride == LINE)
        );
        if STREAM {
            t.ask_front::<P>();
            if !ASKS {
                let end = Steps::<L, XG>::spread(t.lines_before(t.blocks - 1, block_bytes) + block_bytes);
                t.ask_next(t.weights.as_ptr().wrapping_add(end));
            }
        }
        let stride = block_bytes + t.per_unit(t.line_skip);
        // Those of one panel alone, or of a bundle, that are among the blocks are asked for as they come.
        let asks_records = P > 1 && L::BUNDLE == 1 || t.line_skip == 0;
        assert!(if Self::UNITS { t.unit.is_power_of_two() } else { t.unit == 1 });
        assert!((t.first_block | t.blocks).is_multiple_of(scaled_blocks::<S>()));
        // Of steps that are unrolled, before products: which hint it is is a branch, behind which compilers put them off.
        macro_rules! ask_record {
            ($at:expr) => {
                for p in 0..if ASKS && S::RECORD > 0 && S::WORDS == 0 && asks_records { P } else { 0 } {
                    t.ahead.ask(scales_at(p, $at).wrapping_add(t.following()));
                }
            };
        }
        for tile in 0..t.row_tiles {
            let first = tile * R;
            let mut zeros = [isa.splat(0); P];
            let mut total = t.begin::<I, R, P>(isa, first);
            let mut line = t.weights.as_ptr();
            let mut x = t.inputs.as_ptr().wrapping_add(first * input_bytes);
            let mut record = t.group_at;
            let mut left = t.group_left;
            // What sums of words, scaled once, add up to until they are scaled once more.
            let mut scaled_words = [[isa.zero(); P]; R];
            // What products of the blocks before it, of the same block of inputs, add up to, which begins at `x`.
            let mut unscaled = [[isa.splat(0); P]; R];
            for block in 0..t.blocks {
                // Which one of that block it is, and whether another one follows.
                let within = block & (S::SPAN - 1);
                let goes_on = within + 1 < S::SPAN && block + 1 < t.blocks;
                if S::WORDS > 0 && block.is_multiple_of(scaled_blocks::<S>()) {
                    if !STREAM || R > 4 && P > 1 || R > 8 {
                        // To memory with the totals until they are due: the sums and what they add up to need the registers.
                        std::hint::black_box(&mut total);
                    }
                    scaled_words = [[isa.zero(); P]; R];
                }
                let ahead = if ASKS { t.ahead::<P>(block, stride, line_step) } else { 0 };
                let distances = t.ahead.distances(ahead, if L::BUNDLE > 1 { 1 } else { P });
                if ASKS {
                    t.ask_next_front::<P>(block, stride);
                }
                if STREAM && (P == 1 || L::BUNDLE > 1) && t.line_skip > 0 && block & (Self::HEAD.0 - 1) == 0 {
                    // The scales in the order of addresses, and not between lines.
                    for i in 0..Self::HEAD.1 {
                        let before = Steps::<L, XG>::spread((Self::HEAD.1 - i) * LINE);
                        for p in 0..P {
                            let at = line.wrapping_sub(before).wrapping_add(p * LINE);
                            if ASKS { t.ahead.ask(at.wrapping_add(ahead)) } else { prefetch_now(at) }
                        }
                    }
                }
                if !STREAM && asks == 1 {
                    t.later.ask();
                }
                let super_at = t.supers_at + (t.first_block + block) * BLOCK / SUPER * S::SUPER;
                let above = |p: usize| scales_at(p, if S::SUPER > 0 { super_at } else { 0 });
                let mut factors = [isa.splat(0); P];
                if S::WORDS > 0 {
                    for (p, factors) in factors.iter_mut().enumerate() {
                        // SAFETY: what is above the groups of panel `p`, in bounds as said above.
                        *factors = unsafe { S::factors(isa, above(p)) };
                    }
                }
                for c in 0..BLOCK / columns {
                    let mut part = if S::WORDS > 0 { scaled_words } else { [[isa.zero(); P]; R] };
                    if L::SHARED {
                        ask_record!(record);
                    }
                    for g in 0..columns / scaled {
                        let k = c * columns + g * scaled;
                        if !STREAM && XG < BLOCK && asks > 1 {
                            t.later.ask();
                        }
                        if (shifts || subtracts) && g == 0 {
                            for (p, zero) in zeros.iter_mut().enumerate() {
                                let at = scales_at(p, record);
                                if shifts {
                                    // SAFETY: the record of this group of panel `p`, in bounds as said above.
                                    *zero = unsafe { S::shift(isa, at) };
                                    continue;
                                }
                                // SAFETY: as above.
                                let z = unsafe { S::zeros(isa, at) };
                                *zero = if sixteenths {
                                    isa.up::<11>(z)
                                } else if S::SHIFTS {
                                    z
                                } else {
                                    isa.sub(offset, z)
                                };
                                *zero = if in_words { isa.words(*zero, *zero) } else { isa.and(*zero, words) };
                            }
                        }
                        let mut sums = if within > 0 && !Self::ANEW { unscaled } else { [[isa.splat(0); P]; R] };
                        let mut before = sums;
                        for h in 0..halves {
                            if of_two && h > 0 {
                                // The first sum to the upper word; what the second begins with was there, above 0, so that neither borrows.
                                for sum in sums.as_flattened_mut() {
                                    *sum = isa.lookup(*sum, swapped);
                                }
                            } else if begun && within == 0 {
                                for (r, sums) in sums.iter_mut().enumerate() {
                                    let group = if of_two { k / (2 * XG) } else { k / XG + h };
                                    let at = x.wrapping_add(r * input_bytes + sums_at + group * kept);
                                    // SAFETY: a sum of codes of row `r`, in bounds as said above.
                                    let mut codes = unsafe { isa.load_dword(at) };
                                    if S::SHIFTS && subtracts && !sixteenths {
                                        // Minus the sums.
                                        codes = if in_words {
                                            isa.mul_words_high(codes, isa.splat(1 << 27 | 1 << 11))
                                        } else {
                                            isa.down::<4>(codes)
                                        };
                                    }
                                    for (sum, &zero) in sums.iter_mut().zip(&zeros) {
                                        *sum = if subtracts {
                                            // Such a sum fits a word; the upper words of `zeros` are 0, or the same as the lower ones.
                                            if sixteenths {
                                                isa.mul_words_high(zero, codes)
                                            } else if in_words {
                                                isa.mul_words(zero, codes)
                                            } else {
                                                isa.madd(zero, codes)
                                            }
                                        } else {
                                            codes
                                        };
                                    }
                                }
                            }
                            let at = Place { x: x.wrapping_add(within * BLOCK), input_bytes, ahead, distances };
                            // SAFETY: `XG` columns from column `k + h * XG` on, in bounds as said above.
                            unsafe {
                                let at = (&mut line, at, k + h * XG);
                                Self::add_products::<I, ASKS>(&t, isa, (table, zeros), at, &mut sums)
                            };
                            if in_words {
                                for p in 0..P {
                                    // What words are multiplied with: one, or the scale of their group, the first one's being the upper word.
                                    let one = isa.splat(1 << 16 | 1);
                                    let (mut scales, mut by) = (isa.splat(0), one);
                                    if S::WORDS > 0 {
                                        let upper = usize::from(S::WORDS == 2 && h == 0);
                                        // SAFETY: the records of this group, or of these two, of panel `p`, in bounds as said above; 64 bytes.
                                        unsafe {
                                            scales = S::words(isa, scales_at(p, record), factors[p]);
                                            by = isa.lookup(scales, isa.load(TWICE[upper].as_ptr()));
                                        }
                                    }
                                    for (r, (sums, before)) in sums.iter_mut().zip(&before).enumerate() {
                                        let sum = &mut sums[p];
                                        *sum = isa.madd(*sum, by);
                                        let at = x.wrapping_add(r * input_bytes + sums_at + k / XG * kept);
                                        if S::WORDS == 1 {
                                            // SAFETY: the sum of codes of row `r` as an upper word, in bounds as said above.
                                            let codes = unsafe { isa.load_dword(at.wrapping_add(last_kept)) };
                                            *sum = isa.add(*sum, isa.madd(codes, scales));
                                        }
                                        if S::MINIMA && begun {
                                            // SAFETY: what the sum of row `r` began with, in bounds as said above.
                                            *sum = isa.sub(*sum, isa.madd(unsafe { isa.load_dword(at) }, one));
                                        }
                                        if h > 0 {
                                            *sum = isa.add(*sum, before[p]);
                                        }
                                    }
                                }
                                before = sums;
                            }
                        }
                        if Self::ANEW && within > 0 {
                            for (sums, unscaled) in sums.iter_mut().zip(&unscaled) {
                                for (sum, &unscaled) in sums.iter_mut().zip(unscaled) {
                                    *sum = isa.add(*sum, unscaled);
                                }
                            }
                        }
                        if goes_on {
                            unscaled = sums;
                            continue;
                        }
                        if S::WORDS > 0 {
                            for p in 0..P {
                                let at = scales_at(p, record);
                                if ASKS && asks_records {
                                    t.ahead.ask(at.wrapping_add(t.following()));
                                }
                                if !in_words {
                                    // SAFETY: the records of this group, or of these two, of panel `p`, in bounds as said above.
                                    let scales = unsafe { S::words(isa, at, factors[p]) };
                                    for sums in &mut sums {
                                        sums[p] = isa.madd(isa.xor(sums[p], word_zero), scales);
                                    }
                                }
                            }
                            record += S::WORDS * S::RECORD;
                        }
                        for (r, sums) in sums.iter().enumerate() {
                            // SAFETY: a scale of row `r`, in bounds as said above.
                            let x_scale =
                                unsafe { isa.load_f32(x.add(r * input_bytes + scales_of_inputs + k / scaled * 4)) };
                            for p in 0..P {
                                let sum = isa.to_f32(sums[p]);
                                if WG == 0 {
                                    total[r][p] = isa.mul_add(sum, x_scale, total[r][p]);
                                } else if S::POWERS {
                                    // Scaled below: by the weights' scale first, which is exact.
                                    part[r][p] = sum;
                                } else {
                                    let first = S::WORDS == 0 && g == 0;
                                    let part = &mut part[r][p];
                                    *part =
                                        if first { isa.mul(sum, x_scale) } else { isa.mul_add(sum, x_scale, *part) };
                                }
                            }
                        }
                    }
                    if S::WORDS > 0 {
                        scaled_words = part;
                        if !(block + 1).is_multiple_of(scaled_blocks::<S>()) {
                            continue;
                        }
                    }
                    if WG > 0 {
                        let mut w_scale = [isa.zero(); P];
                        let mut minimum = [isa.zero(); P];
                        for p in 0..P {
                            let (at, above) = (scales_at(p, record), above(p));
                            // SAFETY: the record of this group of panel `p`, and the one above it, in bounds as said above.
                            w_scale[p] = unsafe { S::load(isa, at, above) };
                            if S::MINIMA {
                                // SAFETY: as above.
                                minimum[p] = unsafe { S::minima(isa, at, above) };
                            }
                            if Self::zeros_apart() {
                                // SAFETY: as above.
                                let zero = isa.sub(isa.splat(128), unsafe { S::zeros(isa, at) });
                                minimum[p] = isa.mul(isa.to_f32(zero), w_scale[p]);
                            }
                        }
                        if !L::SHARED {
                            ask_record!(record);
                        }
                        if S::WORDS == 0 {
                            left -= WG;
                            if left == 0 {
                                left = t.group;
                                record += S::RECORD;
                            }
                        }
                        // With few rows, a multiplication each is less than what it takes to do without.
                        let by_power = S::POWERS && R > 2;
                        if by_power {
                            w_scale = w_scale.map(|scale| isa.power(scale));
                        }
                        for (r, (total, part)) in total.iter_mut().zip(&part).enumerate() {
                            if S::POWERS {
                                // SAFETY: a scale of row `r`, in bounds as said above.
                                let x_scale = unsafe { isa.load_f32(x.add(r * input_bytes + BLOCK + c * 4)) };
                                for p in 0..P {
                                    let (part, scale) = (part[p], w_scale[p]);
                                    let part =
                                        if by_power { isa.times_power(part, scale) } else { isa.mul(part, scale) };
                                    total[p] = isa.mul_add(part, x_scale, total[p]);
                                }
                                continue;
                            }
                            for p in 0..P {
                                total[p] = isa.mul_add(part[p], w_scale[p], total[p]);
                            }
                            if S::MINIMA {
                                // SAFETY: a sum of inputs of row `r`, in bounds as said above.
                                let sum =
                                    unsafe { isa.load_f32(x.add(r * input_bytes + sums_at + c * kept + last_kept)) };
                                for p in 0..P {
                                    total[p] = isa.mul_add(sum, minimum[p], total[p]);
                                }
                            }
                            if Self::zeros_apart() {
                                let mut sum = 0.0;
                                for group in 0..WG / XG {
                                    let at = x.wrapping_add(r * input_bytes + sums_at + group * kept + last_kept);
                                    // SAFETY: a sum of inputs of row `r`, in bounds as said above.
                                    sum += unsafe { at.cast::<f32>().read_unaligned() };
                                }
                                let sum = isa.splat_f32(sum);
                                for p in 0..P {
                                    total[p] = isa.mul_add(sum, minimum[p], total[p]);
                                }
                            }
                        }
                    }
                }
                if !goes_on {
                    x = x.wrapping_add(t.input_stride);
                }
                if !Self::UNITS || (t.first_block + block + 1) & (t.unit - 1) == 0 {
                    record += t.record_skip;
                    line = line.wrapping_add(Steps::<L, XG>::spread(t.line_skip));
                }
            }
            t.end(isa, first, total, S::OUTPUTS, 1.0);
        }
    }
}

/// Which scales floating-point weights have.
pub(crate) mod scaled {
    /// None.
    pub(crate) const NO: u8 = 0;
    /// An F32 per output.
    pub(crate) const OUTPUTS: u8 = 1;
    /// An F32 per panel and block (FP8 128x128).
    pub(crate) const TILES: u8 = 2;
    /// E8M0 per output and 32 columns.
    pub(crate) const GROUPS: u8 = 3;

    /// Whether totals are multiplied with scales of outputs.
    pub(crate) const fn of_outputs(scaled: u8) -> bool {
        scaled == OUTPUTS
    }

    /// Whether weights are FP8 codes.
    pub(crate) const fn fp8(scaled: u8) -> bool {
        matches!(scaled, OUTPUTS | TILES | GROUPS)
    }

    /// Lines after which those that come later are asked for: with each scale of groups once, as the totals of such tiles lie in memory already.
    pub(super) const fn ask_steps(scaled: u8) -> usize {
        if scaled == GROUPS { 16 } else { super::ASK_STEPS }
    }

    /// How many times that is with a block of so many lines.
    pub(crate) const fn asks<I: super::Isa>(scaled: u8, lines: usize) -> usize {
        if I::LARGE { lines / ask_steps(scaled) } else { 1 }
    }

    /// Columns, and bytes of scales of a panel, until a scale is due; no bytes where none is.
    pub(crate) const fn span(scaled: u8) -> (usize, usize) {
        match scaled {
            TILES => (super::BLOCK, 4),
            GROUPS => (32, super::PANEL),
            _ => (super::BLOCK, 0),
        }
    }
}

/// Floating-point weights x inputs of [`Isa::INPUT_BYTES`] (BF16 weights), or F32. Those with scales are FP8, or were integers.
///
/// FP8 lines that were not unpacked become operands by [`Isa::fp8_shifted`]; with [`Isa::FP8_NORMAL`] not those that have small codes, as their bits say.
/// Without it, what these lack is multiplied with inputs or with weights, whichever are fewer. Sums are the same bit for bit, as are those of unpacked lines: of the same exact products over
/// [`Isa::FP8_UP`]. But inputs beyond 2^47 become infinite, and so are the totals, or NaN: then weights are multiplied after all.
pub(crate) struct FloatTile<'a, L, const SCALED: u8, const STREAM: bool, const R: usize, const P: usize> {
    pub tile: Tile<'a>,
    pub kind: PhantomData<L>,
}

impl<L: Floats, const SCALED: u8, const STREAM: bool, const R: usize, const P: usize> Job
    for FloatTile<'_, L, SCALED, STREAM, R, P>
{
    const SPILLS: bool = !STREAM;

    #[inline(always)]
    fn go<I: Isa>(mut self, isa: I) {
        // Registers: of inputs, one for each of 4 columns of a row; of weights, 4 or 8 for each panel.
        if const { STREAM && scaled::fp8(SCALED) && !I::FP8_NORMAL && R < 2 * P } {
            assert!(self.tile.row_tiles == 1);
            let total = self.total_asked::<I, true>(isa, 0);
            let mut beyond = isa.zero();
            for total in &total {
                for &v in total {
                    beyond = isa.mul_add(v, isa.zero(), beyond);
                }
            }
            if isa.largest(isa.as_int(isa.abs(beyond))) == 0 {
                self.end(isa, 0, total);
            } else {
                again(isa, WeightsUp(self));
            }
        } else {
            for tile in 0..self.tile.row_tiles {
                if const { Self::SQUARE } && tile + 1 < self.tile.row_tiles {
                    // What the next one begins with, which it would wait for.
                    for r in 0..R {
                        let next = self.tile.out.as_ptr().wrapping_add(((tile + 1) * R + r) * self.tile.out_stride);
                        (0..P).for_each(|p| prefetch_now(next.wrapping_add(p * PANEL).cast()));
                    }
                }
                let total = self.total_asked::<I, false>(isa, tile * R);
                self.end(isa, tile * R, total);
            }
        }
    }
}

/// A tile whose inputs are left as they are.
struct WeightsUp<T>(T);

impl<L: Floats, const SCALED: u8, const STREAM: bool, const R: usize, const P: usize> Job
    for WeightsUp<FloatTile<'_, L, SCALED, STREAM, R, P>>
{
    #[inline(always)]
    fn go<I: Isa>(mut self, isa: I) {
        let total = self.0.total_asked::<I, false>(isa, 0);
        self.0.end(isa, 0, total);
    }
}

/// Keeps compilers from doing what was done before together with what is done else: products that follow unpacking would then wait for it. They are not to know
/// that it is seldom done, or it costs more than twice as much.
#[inline(always)]
fn apart_from_others() {
    // SAFETY: no instruction.
    unsafe { std::arch::asm!("/* apart */", options(nomem, nostack, preserves_flags)) };
}

/// Does what is seldom done out of line.
#[cold]
#[inline(never)]
fn again<I: Isa, J: Job>(isa: I, job: J) {
    isa.run(job);
}

impl<L: Floats, const SCALED: u8, const STREAM: bool, const R: usize, const P: usize>
    FloatTile<'_, L, SCALED, STREAM, R, P>
{
    /// Bytes from the scales of the first block to those of another one.
    #[inline(always)]
    fn record_at(&self, block: usize) -> usize {
        let (span, record) = scaled::span(SCALED);
        block * (BLOCK / span * record + self.tile.record_skip)
    }

    /// Bytes of the scales that a panel has for the tile, from its start.
    #[inline(always)]
    fn scales<I: Isa>(&self) -> usize {
        let (span, record) = scaled::span(SCALED);
        let scales = match SCALED {
            scaled::NO => 0,
            scaled::OUTPUTS => self.tile.outputs_at + PANEL * 4,
            _ => self.tile.group_at + self.record_at(self.tile.blocks - 1) + BLOCK / span * record,
        };
        if Self::flagged::<I>() { scales.max(self.bits_at(self.tile.blocks - 1) + BITS) } else { scales }
    }

    /// Whether lines with small codes, which are zeros and subnormal ones, are told from others.
    const fn flagged<I: Isa>() -> bool {
        L::TOLD && I::FP8_NORMAL
    }

    /// Where the bits of a block's lines are in a panel.
    #[inline(always)]
    fn bits_at(&self, block: usize) -> usize {
        self.tile.supers_at + (self.tile.first_block + block) * BITS
    }

    /// A bit for each line of a block that has small codes in any panel.
    ///
    /// # Safety
    /// They are readable in all panels, if lines are [told](Self::flagged) from others.
    #[inline(always)]
    unsafe fn small_of<I: Isa>(&self, block: usize) -> u32 {
        let mut small = 0;
        for p in 0..if Self::flagged::<I>() { P } else { 0 } {
            // SAFETY: readable by the caller's promise.
            small |= unsafe { self.tile.panel_at(p, self.bits_at(block)).cast::<u32>().read_unaligned() };
        }
        small
    }

    /// The scale, or those, of panel `p` of span `span` of block `block`.
    ///
    /// # Safety
    /// They are readable.
    #[inline(always)]
    pub(crate) unsafe fn scale_of<I: Isa>(&self, isa: I, p: usize, (block, span): (usize, usize)) -> I::Flt {
        let at = self.tile.group_at + self.record_at(block) + span * scaled::span(SCALED).1;
        let at = self.tile.panel_at(p, at);
        // SAFETY: readable by the caller's promise.
        let scale = unsafe { if SCALED == scaled::TILES { isa.load_f32(at) } else { isa.exp2(isa.load_u8(at)) } };
        if SCALED == scaled::GROUPS {
            // 255 is infinite so far: times 0 it is NaN.
            isa.mul_add(scale, isa.zero(), scale)
        } else {
            scale
        }
    }

    /// Adds the sums of a span, times its scales.
    ///
    /// # Safety
    /// They are readable in all panels.
    #[inline(always)]
    unsafe fn add_scaled<I: Isa>(
        &self,
        isa: I,
        total: &mut [[I::Flt; P]; R],
        sums: &[[I::Flt; P]; R],
        at: (usize, usize),
    ) {
        for p in 0..P {
            // SAFETY: readable by the caller's promise.
            let scale = unsafe { self.scale_of(isa, p, at) };
            for r in 0..R {
                total[r][p] = isa.mul_add(sums[r][p], scale, total[r][p]);
            }
        }
    }

    /// Writes the totals of the tile that begins with row `first`.
    #[inline(always)]
    fn end<I: Isa>(&mut self, isa: I, first: usize, total: [[I::Flt; P]; R]) {
        self.tile.end(isa, first, total, scaled::of_outputs(SCALED), Self::up::<I>());
    }

    /// Whether it is one of six rows and four panels, at most, whose products are in assembly.
    const SQUARE: bool = !STREAM && P == MOST_PANELS;

    /// What totals are multiplied with in the end.
    #[inline(always)]
    pub(crate) const fn up<I: Isa>() -> f32 {
        if scaled::fp8(SCALED) { I::FP8_UP } else { 1.0 }
    }

    /// [`Self::total`], with hints or, where there are none, without a trace of them.
    #[inline(always)]
    fn total_asked<I: Isa, const INPUTS_UP: bool>(&self, isa: I, first: usize) -> [[I::Flt; P]; R] {
        if const { STREAM && P > 1 && P == L::BUNDLE } && self.tile.ahead.bytes == 0 {
            self.total::<I, INPUTS_UP, false>(isa, first)
        } else {
            self.total::<I, INPUTS_UP, STREAM>(isa, first)
        }
    }

    /// Adds the products of a line of each panel, with or without `SMALL` codes, to `sums`; to `chains` in the order of a tile unit.
    ///
    /// # Safety
    /// The lines, `line` being the first panel's, and the inputs of all rows, `x` being the first of the first row, are readable.
    #[inline(always)]
    unsafe fn add_line<I: Isa, const SMALL: bool>(
        &self,
        isa: I,
        (line, x): (*const u8, *const u8),
        sums: &mut [[I::Flt; P]; R],
        chains: &mut [[[I::Flt; 2]; P]; R],
    ) {
        macro_rules! operands {
            ($p:expr) => {{
                // SAFETY: a line of panel `p`, by the caller's promise.
                let codes = unsafe { isa.load(line.wrapping_add($p * self.tile.weight_stride)) };
                if SMALL { isa.fp8_to_bf16(isa.fp8_table(), codes) } else { isa.fp8_shifted(codes) }
            }};
        }
        macro_rules! add {
            ($w:expr, $l:expr, $r:expr, $p:expr, $x:expr) => {
                // SAFETY: two inputs of row `r`, by the caller's promise.
                let x = unsafe { isa.load_pair($x.wrapping_add(($r * BLOCK + $l * 2) * I::INPUT_BYTES)) };
                if I::TILES {
                    chains[$r][$p] = isa.dot_chains(chains[$r][$p], $w[$l], x);
                } else {
                    sums[$r][$p] = isa.dot_bf16(sums[$r][$p], $w[$l], x);
                }
            };
        }
        // Two panels at a time: they are unpacked beside the products of those before, and an operand's products do not wait for those of the other one.
        for first in (0..P).step_by(2) {
            let xs = [opaque_at(x), opaque_at(x)];
            let mut w = [[isa.splat(0); 2]; 2];
            for (i, w) in w.iter_mut().enumerate().take(P - first) {
                *w = operands!(first + i);
            }
            for l in 0..2 {
                for r in 0..R {
                    for (i, w) in w.iter().enumerate().take(P - first) {
                        add!(w, l, r, first + i, xs[i]);
                    }
                }
            }
        }
    }

    /// The totals of the tile that begins with row `first`; see [`FloatTile`] for `INPUTS_UP`. `ASKS`: lines are asked for.
    #[inline(always)]
    fn total<I: Isa, const INPUTS_UP: bool, const ASKS: bool>(&self, isa: I, first: usize) -> [[I::Flt; P]; R] {
        let t = &self.tile;
        assert!(t.unit == 1);
        let shifted = const { STREAM && scaled::fp8(SCALED) && !I::FP8_NORMAL };
        let (number, per_operand) = if L::BF16 { (I::INPUT_BYTES, 2) } else { (4, 1) };
        let input_bytes = BLOCK * number;
        let block_bytes = BLOCK / per_operand / L::OPERANDS * LINE;
        let (span, record) = scaled::span(SCALED);
        let scales = self.scales::<I>();
        let line_step = L::BUNDLE * LINE;
        let panels = if L::BUNDLE > 1 { 1 } else { P };
        t.check(R, P, block_bytes, Reads { line_step, scales, input: input_bytes });
        if STREAM {
            t.ask_front::<P>();
            if !ASKS {
                let end = spread(t.blocks * block_bytes + (t.blocks - 1) * t.line_skip, line_step);
                t.ask_next(t.weights.as_ptr().wrapping_add(end));
            }
        }

        // From here on every read is in bounds: `check` saw all blocks of the lines of P panels and of the inputs of all rows, a
        // scale for every span, and the bits of all blocks that have such.
        let table = L::table(isa);
        let mut total = t.begin::<I, R, P>(isa, first);
        let mut line = t.weights.as_ptr();
        let mut x = t.inputs.as_ptr().wrapping_add(first * input_bytes);
        let stride = block_bytes + t.line_skip;
        for block in 0..t.blocks {
            let ahead = if ASKS { t.ahead::<P>(block, stride, line_step) } else { 0 };
            if ASKS {
                t.ask_next_front::<P>(block, stride);
            }
            if STREAM && SCALED == scaled::GROUPS {
                // The scales before lines, in the order of addresses.
                for i in 0..P {
                    let at = line.wrapping_sub(spread(t.line_skip, line_step)).wrapping_add(i * LINE);
                    if ASKS { t.ahead.ask(at.wrapping_add(ahead)) } else { prefetch_now(at) }
                }
            }
            if !STREAM && !I::LARGE {
                t.later.ask();
            }
            // SAFETY: the bits of a block's lines of P panels, in bounds as said above.
            let mut small = unsafe { self.small_of::<I>(block) };
            for s in 0..BLOCK / span {
                let mut sums = if record > 0 { [[isa.zero(); P]; R] } else { total };
                let mut chains = [[[isa.zero(); 2]; P]; R];
                if const { Self::SQUARE } {
                    assert!(number == 4 && L::OPERANDS == 1);
                    let steps = span / per_operand / STEP;
                    let hints = t.later.take_times(steps);
                    let (x, row) = (x.wrapping_add(s * span * number), input_bytes);
                    let at = LinesAt { line, stride: t.weight_stride, x, row, steps, hints };
                    // SAFETY: the lines of these columns of all panels, and their inputs of all rows, in bounds as said above.
                    unsafe {
                        if L::BF16 {
                            isa.mul_add_lines::<true, R, P>(&mut sums, at);
                        } else {
                            isa.mul_add_lines::<false, R, P>(&mut sums, at);
                        }
                    }
                    line = line.wrapping_add(span / per_operand * LINE);
                }
                for j in 0..if const { Self::SQUARE } { 0 } else { span / per_operand / L::OPERANDS } {
                    if !STREAM && I::LARGE && j % scaled::ask_steps(SCALED) == 0 {
                        t.later.ask();
                    }
                    if Self::flagged::<I>() {
                        for p in 0..if ASKS { P } else { 0 } {
                            t.ahead.ask_line(line.wrapping_add(p * t.weight_stride), ahead, panels);
                        }
                        let x = x.wrapping_add((s * span + j * L::OPERANDS * per_operand) * number);
                        // SAFETY: the next line of all panels, and its inputs of all rows, in bounds as said above.
                        unsafe {
                            if small & 1 == 0 {
                                self.add_line::<I, false>(isa, (line, x), &mut sums, &mut chains);
                            } else {
                                self.add_line::<I, true>(isa, (line, x), &mut sums, &mut chains);
                                apart_from_others();
                            }
                        }
                        small >>= 1;
                        line = line.wrapping_add(line_step);
                    } else {
                        let mut w = [[isa.splat(0); 2]; P];
                        for (p, w) in w.iter_mut().enumerate() {
                            let at = line.wrapping_add(p * t.weight_stride);
                            if ASKS {
                                t.ahead.ask_line(at, ahead, panels);
                            }
                            // SAFETY: the next line of panel `p`, in bounds as said above.
                            *w = unsafe {
                                if shifted {
                                    isa.fp8_shifted(isa.load(at))
                                } else {
                                    L::operands::<I, BLOCK>(isa, table, at, 0)
                                }
                            };
                        }
                        line = line.wrapping_add(line_step);
                        for l in 0..L::OPERANDS {
                            let k = s * span + (j * L::OPERANDS + l) * per_operand;
                            for (r, sums) in sums.iter_mut().enumerate() {
                                let at = x.wrapping_add(r * input_bytes + k * number);
                                if L::BF16 {
                                    // SAFETY: two inputs of row `r`, in bounds as said above.
                                    let x = unsafe { isa.load_pair(at) };
                                    if I::TILES {
                                        for (chains, w) in chains[r].iter_mut().zip(&w) {
                                            *chains = isa.dot_chains(*chains, w[l], x);
                                        }
                                        continue;
                                    }
                                    let x = if INPUTS_UP { isa.pair_up(x) } else { x };
                                    for (sum, w) in sums.iter_mut().zip(&w) {
                                        *sum = if shifted && !INPUTS_UP {
                                            isa.dot_up(*sum, w[l], x)
                                        } else {
                                            isa.dot_bf16(*sum, w[l], x)
                                        };
                                    }
                                } else {
                                    // SAFETY: an input of row `r`, in bounds as said above.
                                    let x = unsafe { isa.load_f32(at) };
                                    for (sum, w) in sums.iter_mut().zip(&w) {
                                        *sum = isa.mul_add(isa.as_f32(w[l]), x, *sum);
                                    }
                                }
                            }
                        }
                    }
                    if I::TILES && ((j + 1) * L::OPERANDS * per_operand).is_multiple_of(CHAIN) {
                        for (sums, chains) in sums.iter_mut().zip(&mut chains) {
                            for (sum, chains) in sums.iter_mut().zip(chains) {
                                *sum = isa.end_chains(*sum, *chains);
                                *chains = [isa.zero(); 2];
                            }
                        }
                    }
                }
                if record > 0 {
                    // SAFETY: the scales of this span of P panels, in bounds as said above.
                    unsafe { self.add_scaled(isa, &mut total, &sums, (block, s)) };
                } else {
                    total = sums;
                }
            }
            line = line.wrapping_add(spread(t.line_skip, line_step));
            x = x.wrapping_add(t.input_stride);
        }
        total
    }

    /// Checks that all is there that a tile unit reads of `rows` rows and of panels whose lines it streams, and asks for what is in front of them.
    #[inline(always)]
    pub(crate) fn check_stream<I: Isa>(&self, rows: usize) {
        let t = &self.tile;
        assert!(t.unit == 1 && t.first_block == 0 && t.row_tiles == 1);
        let input = BLOCK * NUMBER;
        assert!(t.row_bytes == input);
        let reads = Reads { line_step: L::BUNDLE * LINE, scales: self.scales::<I>(), input };
        t.check(rows, P, Self::LINE_BYTES, reads);
        t.ask_front::<P>();
    }

    /// Bytes of the lines of a block of a panel of BF16 operands.
    const LINE_BYTES: usize = BLOCK / 2 / L::OPERANDS * LINE;

    /// Where the lines of [`CHAIN`] columns of the first panel are, from `next` on, which goes on to what is behind them; asks for what comes with them that is no line.
    ///
    /// # Safety
    /// [`Self::check_stream`] saw them.
    #[inline(always)]
    unsafe fn next_chain<I: Isa>(&self, next: &mut Chain) -> *const u8 {
        let (t, line_step) = (&self.tile, L::BUNDLE * LINE);
        let skip = spread(t.line_skip, line_step);
        if next.column == 0 {
            let stride = Self::LINE_BYTES + t.line_skip;
            next.ahead = t.ahead::<P>(next.block, stride, line_step);
            t.ask_next_front::<P>(next.block, stride);
            if SCALED == scaled::GROUPS {
                for i in 0..P {
                    t.ahead.ask(next.line.wrapping_sub(skip).wrapping_add(i * LINE + next.ahead));
                }
            }
            // SAFETY: the bits of a block, by the caller's promise.
            next.small = unsafe { self.small_of::<I>(next.block) };
        }
        let line = next.line;
        next.line = line.wrapping_add(Self::LINE_BYTES / (BLOCK / CHAIN) / LINE * line_step);
        next.column += CHAIN;
        if next.column == BLOCK {
            (next.block, next.column) = (next.block + 1, 0);
            next.line = next.line.wrapping_add(skip);
        }
        line
    }

    /// Asks for what comes after the lines of [`CHAIN`] columns of operands, which it returns; `next` goes on to what is behind them.
    ///
    /// # Safety
    /// [`Self::check_stream`] saw them.
    #[inline(always)]
    pub(crate) unsafe fn ask_chain<I: Isa>(&self, next: &mut Chain) -> *const u8 {
        // SAFETY: by the caller's promise.
        let line = unsafe { self.next_chain::<I>(next) };
        for i in 0..CHAIN / 2 {
            self.tile.ahead.ask_line(line.wrapping_add(i * LINE), next.ahead, 1);
        }
        line
    }

    /// Unpacks the FP8 lines of [`CHAIN`] columns of all panels, those of a panel one after the other; `next` goes on to what is behind them.
    ///
    /// # Safety
    /// [`Self::check_stream`] saw them.
    #[inline(always)]
    pub(crate) unsafe fn unpack_chain<I: Isa>(&self, isa: I, next: &mut Chain, to: &mut [u8]) {
        assert!(L::FP8 && L::TOLD && L::BUNDLE > 1);
        const LINES: usize = CHAIN / 4;
        assert!(to.len() == P * LINES * 2 * LINE);
        // SAFETY: by the caller's promise.
        let mut line = unsafe { self.next_chain::<I>(next) };
        for j in 0..LINES {
            let small = next.small & 1 != 0;
            next.small >>= 1;
            for p in 0..P {
                let at = line.wrapping_add(p * LINE);
                self.tile.ahead.ask_line(at, next.ahead, 1);
                // SAFETY: a line of a bundle, by the caller's promise; two lines of `to`.
                unsafe {
                    let codes = isa.load(at);
                    let [first, second] =
                        if small { isa.fp8_to_bf16(isa.fp8_table(), codes) } else { isa.fp8_shifted(codes) };
                    let to = to.as_mut_ptr().add((p * LINES + j) * 2 * LINE);
                    isa.store(to, first);
                    isa.store(to.add(LINE), second);
                }
            }
            line = line.wrapping_add(L::BUNDLE * LINE);
        }
    }
}

/// Where a tile unit is in a stream of lines.
pub(crate) struct Chain {
    line: *const u8,
    block: usize,
    column: usize,
    /// From a line to the one to ask for.
    ahead: usize,
    /// A bit for each line of the block that is left.
    small: u32,
}

impl Chain {
    /// The first columns of a tile.
    pub(crate) fn of(tile: &Tile<'_>) -> Self {
        Chain { line: tile.weights.as_ptr(), block: 0, column: 0, ahead: 0, small: 0 }
    }
}
