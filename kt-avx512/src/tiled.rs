//! Products of many rows by a unit that multiplies tiles of 16 rows x 64 bytes (AMX).
//!
//! ```text
//! for each piece of K
//!     the unit, for each part of it: 2 x 2 tiles of sums of 32 rows x 32 outputs, which begin with the totals so far and become those, while lines that come
//!         next are asked for
//! weights that stream: for each block of 128 columns, for each 16 rows
//!     the unit: 1 x 4 tiles of sums of 16 rows x 64 outputs, while lines of the next step are unpacked, or sums of the rows before are scaled
//! ```
//!
//! A line of a panel is a row of the unit's second operand as it is, and 16 input rows are its first one. Of BF16 numbers, the unit sums the
//! first and the second of each two products of 32 columns apart, then adds both to what it had; products that stream do the same there
//! ([`Isa::dot_chains`]), so these have the same bits for any number of rows. Integer sums are exact, so they have the bits of VNNI.
//!
//! Up to 16 rows of BF16, and any number of FP8 weights, stream ([`Streamed`]): lines are unpacked for a step while those of the step before are multiplied.
//! So do integers with one scale an output ([`StreamedInts`]), whose sums leave the tiles after the 128 columns that share a scale of the inputs.
//!
//! Codes with scales of groups are BF16 numbers here, unpacked with their scales ([`Widened`](crate::product::Widened)): as integers, scales
//! would be due after a few columns, outside of the tiles, which takes longer than what the unit saves.

#![allow(unsafe_code)] // kernel

use std::marker::PhantomData;
use std::ops::Range;

use kt_core::cpu::input::{BLOCK, WIDE};

use crate::ahead::{Later, Level, prefetch_later};
use crate::isa::{Isa, Job};
use crate::layout::{LINE, MOST_PANELS, PANEL};
use crate::lines::{Codes, Floats};
use crate::tile::{Chain, FloatTile, Tile, scaled};

/// Rows of a tile.
pub const TILE_ROWS: usize = 16;
/// Panels whose products a unit makes.
pub const TILE_PANELS: usize = 2;
/// Bytes of the sums of a row with both panels.
const SUM_ROW: usize = TILE_PANELS * LINE;
/// Bytes of a BF16 number.
pub(crate) const NUMBER: usize = 2;
/// Columns of BF16 of a step.
const STEP: usize = LINE / NUMBER;
/// Most rows of tiles that are done together.
pub(crate) const MOST_ROWS: usize = 256;
/// Bytes of the buffer of their sums: two thirds of a first-level cache of 48 KiB.
pub(crate) const SUMS_SIZE: usize = MOST_ROWS * SUM_ROW;
/// Bytes of lines of two panels that make a piece of K. Half of that was up to a tenth slower, a fourth up to a fifth (`kt-amx/PERFORMANCE.md`): sums go there
/// and back with each piece.
pub(crate) const PIECE: usize = 128 << 10;
/// Blocks of that.
const PIECE_BLOCKS: usize = PIECE / (TILE_PANELS * PANEL * NUMBER * BLOCK);
/// Blocks for which something is asked for at a time, at most: those of all tiles of rows.
const MOST_ASKED: usize = PIECE_BLOCKS * MOST_ROWS / (2 * TILE_ROWS);

/// Blocks of a part of a piece, at most, whose lines stay in a first-level cache of 48 KiB while tiles of rows pass over them: 512 columns.
const PART_BLOCKS: usize = 4;
/// From how many rows on a piece has parts. The first tile of rows waits for lines from the second level, and for fewer rows that takes longer: 64 of BF16 from
/// memory, 768 outputs x 2048 columns, 42.7/46.8 us (`kt-amx/PERFORMANCE.md`).
const PART_ROWS: usize = 97;

/// Columns whose products a tile unit sums before it adds them.
pub(crate) const CHAIN: usize = STEP;
/// Bytes of the lines of a step.
pub const STEP_LINES: usize = PANEL * LINE;
/// Most rows that stream at a time, where any number does.
pub(crate) const STREAM_ROWS: usize = 128;
/// Bytes of the sums of a tile of rows and of a bundle.
const SUMS_OF_STREAM: usize = MOST_PANELS * TILE_ROWS * LINE;

/// Bytes of the lines that [`Streamed`] has unpacked for so many rows: of a bundle, of two steps or two blocks.
const fn lines_size(rows: usize) -> usize {
    2 * MOST_PANELS * STEP_LINES * if rows <= TILE_ROWS { 1 } else { BLOCK_STEPS }
}

/// Bytes of what [`Streamed`] and [`StreamedInts`] have beside their tiles, for so many rows: lines, sums of a tile of rows, or of two, and totals of all.
pub(crate) const fn stream_size(rows: usize) -> usize {
    let totals = SUMS_OF_STREAM * rows.div_ceil(TILE_ROWS);
    let (floats, ints) = (lines_size(rows) + SUMS_OF_STREAM, INT_LINES + 2 * SUMS_OF_STREAM);
    totals + if floats > ints { floats } else { ints }
}

/// Lines to be asked for during a block, as many rows of them with each step of it.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Asked {
    /// The first one; any address will do.
    pub at: *const u8,
    /// Bytes from one of a row to the next.
    pub step: usize,
    /// Bytes from where those of a row end to the first one of the next row.
    pub next: usize,
}

/// What a tile unit multiplies: tiles of up to 32 input rows with two panels, steps of 32 BF16 numbers of a row. All tiles of rows pass over a part of the blocks
/// before they go on with the next one.
///
/// Step `s` of block `b` of row `r` is at `inputs + b * block_stride + r * row_stride + s * 64`. The lines of a block, 16 for each step, come one after
/// the other, and `line_skip` bytes after them those of the next one; those of panel `p` begin at `lines + p * panel_stride`.
#[derive(Debug)]
pub struct TileProduct {
    /// Steps of a block.
    pub steps: usize,
    /// Rows of a tile of rows: 1 to 32.
    pub rows: usize,
    /// How many of these follow each other: inputs, sums, what they begin with, and what to ask for.
    pub row_tiles: usize,
    /// Blocks, at least 1.
    pub blocks: usize,
    /// Those of a part, but for the last one, which may have fewer.
    pub part: usize,
    /// The first input row.
    pub inputs: *const u8,
    /// See above.
    pub row_stride: usize,
    /// See above.
    pub block_stride: usize,
    /// The lines of the first panel.
    pub lines: *const u8,
    /// See above.
    pub line_skip: usize,
    /// See above.
    pub panel_stride: usize,
    /// What the first sums begin with, as `sums` are; null: zeros.
    pub from: *const u8,
    /// Bytes from a row of it to the next one.
    pub from_stride: usize,
    /// Where sums go: those of row `r` and panel `p` are 64 bytes at `r * sums_stride + p * 64`. Absent rows are left alone.
    pub sums: *mut u8,
    /// See `sums`.
    pub sums_stride: usize,
    /// What to ask for, for each block of each tile of rows, in the order in which they are multiplied.
    pub asked: *const Asked,
    /// How many rows of lines with each step, and lines of each.
    pub asked_rows: usize,
    /// See above. 0: none.
    pub asked_lines: usize,
}

/// A unit that multiplies tiles.
///
/// # Safety
/// A value must exist only where its instructions do, and its methods must touch no memory but what their arguments name.
pub unsafe trait TileUnit: Copy + Send + Sync + std::fmt::Debug + 'static {
    /// Multiplies.
    ///
    /// # Safety
    /// All steps of all rows, their lines in all panels, what sums begin with and what is to be asked for are readable; the sums are writable, and of the caller alone: later
    /// parts begin with them.
    unsafe fn multiply(self, product: &TileProduct);
    /// Prepares for [`TileUnit::step`] with so many input rows, 1 to 16. From here to [`TileUnit::end`] the thread uses no tiles but by the methods between them,
    /// so that sums stay where they are.
    fn begin(self, rows: usize);
    /// Sets all sums to zero.
    ///
    /// # Safety
    /// Between [`TileUnit::begin`] and [`TileUnit::end`].
    unsafe fn clear(self);
    /// Sets the sums to what [`TileUnit::write`] wrote.
    ///
    /// # Safety
    /// Between [`TileUnit::begin`] and [`TileUnit::end`]; that is readable, of all rows and of `P` panels, 1 or 4.
    unsafe fn load<const P: usize>(self, sums: *const u8);
    /// Adds the BF16 products of 32 columns to the sums of each panel. Those of row `r` are at `inputs + r * row_stride`, the 16 lines of panel `p` at
    /// `lines + p * STEP_LINES`.
    ///
    /// # Safety
    /// Between [`TileUnit::begin`] and [`TileUnit::end`]; they are readable, of all rows and of `P` panels, 1 or 4.
    unsafe fn step<const P: usize>(self, inputs: *const u8, row_stride: usize, lines: *const u8);
    /// Adds the products of 64 columns of signed inputs and unsigned weights, as integers, to the sums of each of four panels. Those of row `r` are at
    /// `inputs + r * row_stride`, the 16 lines of panel `p` at `lines + p * panel_stride`.
    ///
    /// # Safety
    /// Between [`TileUnit::begin`] and [`TileUnit::end`]; they are readable, of all rows and panels.
    unsafe fn step_int8(self, inputs: *const u8, row_stride: usize, lines: *const u8, panel_stride: usize);
    /// Writes the sums, 64 bytes for each row and panel, those of a row one after the other.
    ///
    /// # Safety
    /// Between [`TileUnit::begin`] and [`TileUnit::end`]; as many bytes are writable, of all rows and of `P` panels, 1 or 4, and of the caller alone.
    unsafe fn write<const P: usize>(self, sums: *mut u8);
    /// Gives up the tiles.
    fn end(self);
}

/// Runs tiles of up to 32 rows x 2 panels of BF16 lines. `outputs`: totals are multiplied with the scales of outputs in the end.
#[inline(always)]
pub(crate) fn cached<I: Isa>(isa: I, rows: usize, mut tile: Tile<'_>, outputs: bool) {
    // Bytes of a block in a row, and in the lines of a panel.
    const ROW: usize = BLOCK * NUMBER;
    const LINES: usize = ROW * PANEL;
    let (row_tiles, all_rows) = (tile.row_tiles, tile.row_tiles * rows);
    let most = MOST_ASKED / row_tiles;
    let row_stride = tile.row_bytes;
    assert!(rows > 0 && rows <= 2 * TILE_ROWS && all_rows <= MOST_ROWS && most > 0 && tile.sums.len() == SUMS_SIZE);
    assert!(row_stride >= ROW && (tile.unit == 1 || tile.line_skip == 0));
    let end = tile.lines_before(tile.blocks - 1, LINES) + LINES;
    assert!(tile.weights.len() >= (TILE_PANELS - 1) * tile.weight_stride + end);
    assert!(tile.inputs.len() >= (tile.blocks - 1) * tile.input_stride + all_rows * row_stride);
    assert!(tile.out.len() >= (all_rows - 1) * tile.out_stride + tile.width);
    let sums = std::mem::take(&mut tile.sums);
    // Totals that the unit can begin with, and leave, where they belong.
    let in_place = tile.width == TILE_PANELS * PANEL;
    let mut start = 0;
    while start < tile.blocks {
        let blocks = most.min(tile.blocks - start);
        let (asked_rows, asked_lines) = (tile.later.rows(), tile.later.each());
        let mut asked = [Asked { at: tile.weights.as_ptr(), step: 0, next: 0 }; MOST_ASKED];
        ask_for(tile.later, BLOCK_STEPS * asked_rows, &mut asked[..row_tiles * blocks]);
        let begins = tile.first_block + start > 0;
        if begins && !in_place {
            for (r, sums) in sums.chunks_exact_mut(SUM_ROW).enumerate().take(all_rows) {
                let totals = &tile.out[r * tile.out_stride..][..tile.width];
                for (sum, total) in sums.as_chunks_mut::<4>().0.iter_mut().zip(totals) {
                    *sum = total.to_le_bytes();
                }
            }
        }
        let last = tile.last && start + blocks == tile.blocks;
        // Parts of as many blocks each.
        let part = match all_rows {
            PART_ROWS.. => blocks.div_ceil(blocks.div_ceil(PART_BLOCKS)),
            _ => blocks,
        };
        let buffer = (sums.as_mut_ptr(), SUM_ROW);
        let totals = if in_place { (tile.out.as_mut_ptr().cast::<u8>(), tile.out_stride * 4) } else { buffer };
        let done_in_place = in_place && !(last && outputs);
        let (to, sums_stride) = if done_in_place { totals } else { buffer };
        let (from, from_stride) = if begins { (totals.0.cast_const(), totals.1) } else { (std::ptr::null(), 0) };
        let product = TileProduct {
            steps: BLOCK_STEPS,
            rows,
            row_tiles,
            blocks,
            part,
            inputs: tile.inputs[start * tile.input_stride..].as_ptr(),
            row_stride,
            block_stride: tile.input_stride,
            lines: tile.weights[tile.lines_before(start, LINES)..].as_ptr(),
            line_skip: tile.line_skip,
            panel_stride: tile.weight_stride,
            from,
            from_stride,
            sums: to,
            sums_stride,
            asked: asked.as_ptr(),
            asked_rows,
            asked_lines,
        };
        // SAFETY: the asserts above saw all blocks of all rows and of the lines of all panels, and the totals of all rows, whole ones where they
        // are in place; the buffer has room for the sums of all rows, and as many blocks are asked for.
        unsafe { isa.multiply_tiles(&product) };
        if !done_in_place {
            isa.run(Totals { rows: all_rows, sums, tile: &mut tile, outputs: outputs && last });
        }
        start += blocks;
    }
}

/// Writes totals that a tile unit left in the buffer of sums, times the scales of `outputs` where these are due.
struct Totals<'a, 'b> {
    rows: usize,
    sums: &'a [u8],
    tile: &'a mut Tile<'b>,
    outputs: bool,
}

impl Job for Totals<'_, '_> {
    #[inline(always)]
    fn go<I: Isa>(self, isa: I) {
        self.tile.check_totals(self.rows, TILE_PANELS, self.outputs);
        let totals = &self.sums[..self.rows * SUM_ROW];
        end_rows::<I, TILE_PANELS>(isa, self.tile, 0, totals, (self.outputs, 1.0));
    }
}

/// Writes totals of the rows from `first` on, of which each has a line for each panel; in the end times the scales of outputs, if these are due, and times a
/// number: see [`Tile::end`].
#[inline(always)]
fn end_rows<I: Isa, const P: usize>(
    isa: I,
    tile: &mut Tile<'_>,
    first: usize,
    totals: &[u8],
    (outputs, up): (bool, f32),
) {
    for (r, from) in totals.chunks_exact(P * LINE).enumerate() {
        let mut total = [[isa.zero(); P]];
        for (p, total) in total[0].iter_mut().enumerate() {
            // SAFETY: a line.
            *total = isa.as_f32(unsafe { isa.load(from[p * LINE..][..LINE].as_ptr()) });
        }
        tile.end(isa, first + r, total, outputs, up);
    }
}

/// Sets what of `later` is to be asked for with each block, so many rows of it. What does not go into that is asked for now; where nothing is left, it stays a line
/// that is there, since a page that is not would be looked for each time.
#[inline(always)]
fn ask_for(later: &Later, rows: usize, asked: &mut [Asked]) {
    for asked in asked {
        let mut left = rows;
        while let Some(rows) = later.take(left) {
            if asked.step == 0 {
                *asked = Asked { at: rows.at, step: rows.step, next: rows.next.wrapping_sub(rows.lines * rows.step) };
            } else {
                rows.ask(Level::Second);
            }
            left -= rows.rows;
        }
    }
}

/// Up to 128 rows x the `P` panels of a bundle whose lines come from memory, over all of K: [`FloatTile`] by a tile unit, with the same bits as
/// [`cached`] has. Lines of FP8 are unpacked beside products of those before: for a step of one tile of rows, or a block for several.
pub(crate) struct Streamed<'a, U, L, const SCALED: u8, const P: usize> {
    pub unit: U,
    pub rows: usize,
    pub tile: Tile<'a>,
    pub kind: PhantomData<L>,
}

impl<U: TileUnit, L: Floats, const SCALED: u8, const P: usize> Job for Streamed<'_, U, L, SCALED, P> {
    #[inline(always)]
    fn go<I: Isa>(self, isa: I) {
        if self.rows <= TILE_ROWS {
            self.tiles::<I, 1>(isa);
        } else {
            assert!(L::OPERANDS > 1);
            self.tiles::<I, BLOCK_STEPS>(isa);
        }
    }
}

/// Steps of a block.
pub(crate) const BLOCK_STEPS: usize = BLOCK / STEP;

impl<U: TileUnit, L: Floats, const SCALED: u8, const P: usize> Streamed<'_, U, L, SCALED, P> {
    /// Does it, of lines of so many steps at a time: 1, for one tile of rows, or [`BLOCK_STEPS`].
    #[inline(always)]
    fn tiles<I: Isa, const STEPS: usize>(mut self, isa: I) {
        assert!(L::BF16 && P == L::BUNDLE && (STEPS == 1 || STEPS == BLOCK_STEPS));
        let unit = self.unit;
        let buffer = std::mem::take(&mut self.tile.sums);
        // As many rows in each, the last of which may have been in the tile before.
        let row_tiles = if STEPS == 1 { 1 } else { self.rows.div_ceil(TILE_ROWS) };
        let rows = self.rows.div_ceil(row_tiles);
        let first = |tile: usize| (tile * rows).min(self.rows - rows);
        assert!(rows > 0 && rows <= TILE_ROWS && buffer.len() >= stream_size(self.rows));
        let (lines, buffer) = buffer.split_at_mut(lines_size(self.rows));
        let (sums, totals) = buffer.split_at_mut(SUMS_OF_STREAM);
        let (sums, totals) = (&mut sums[..rows * P * LINE], &mut totals[..row_tiles * rows * P * LINE]);
        totals.fill(0);
        let mut of_row = FloatTile::<L, SCALED, true, 1, P> { tile: self.tile, kind: self.kind };
        of_row.check_stream::<I>(self.rows);
        let t = &of_row.tile;
        let (inputs, row_stride, input_stride) = (t.inputs.as_ptr(), t.row_bytes, t.input_stride);
        let steps = t.blocks * BLOCK_STEPS;
        let (span, record) = scaled::span(SCALED);
        // Where the lines of a step are, if they were unpacked: those of two times `STEPS` by turns.
        let unpacked = |step: usize| step % (2 * STEPS) * P * STEP_LINES;

        // From here on every read is in bounds: `check_stream` saw all blocks of the lines of P panels and of the inputs of all rows, a scale for every
        // span, and the bits of all blocks that have such.
        let mut next = Chain::of(t);
        unit.begin(rows);
        // SAFETY: begun.
        unsafe { unit.clear() };
        for step in 0..if const { L::OPERANDS > 1 } { STEPS } else { 0 } {
            // SAFETY: a step of the first ones, in bounds as said above; its lines.
            unsafe { of_row.unpack_chain(isa, &mut next, &mut lines[unpacked(step)..][..P * STEP_LINES]) };
        }
        for begin in (0..steps).step_by(STEPS) {
            for (tile, totals) in totals.chunks_exact_mut(rows * P * LINE).enumerate() {
                if STEPS > 1 && record == 0 {
                    // SAFETY: totals of a tile of rows and all panels.
                    unsafe { unit.load::<P>(totals.as_ptr()) };
                }
                for i in 0..STEPS {
                    let step = begin + i;
                    let at = if const { L::OPERANDS > 1 } {
                        let done = tile * STEPS + i;
                        if done.is_multiple_of(row_tiles) && begin + STEPS < steps {
                            let to = unpacked(begin + STEPS + done / row_tiles);
                            // SAFETY: a step of the next ones, in bounds as said above; its lines.
                            unsafe { of_row.unpack_chain(isa, &mut next, &mut lines[to..][..P * STEP_LINES]) };
                        }
                        lines[unpacked(step)..].as_ptr()
                    } else {
                        // SAFETY: a step, in bounds as said above.
                        unsafe { of_row.ask_chain::<I>(&mut next) }
                    };
                    let block = step / BLOCK_STEPS;
                    let x = block * input_stride + first(tile) * row_stride + step % BLOCK_STEPS * LINE;
                    // SAFETY: this step of all rows of the tile, in bounds as said above, and its lines.
                    unsafe { unit.step::<P>(inputs.wrapping_add(x), row_stride, at) };
                    t.later.ask();
                    if record == 0 || !((step + 1) * STEP).is_multiple_of(span) {
                        continue;
                    }
                    // SAFETY: sums of a tile of rows and all panels.
                    unsafe {
                        unit.write::<P>(sums.as_mut_ptr());
                        unit.clear();
                    }
                    let mut scales = [isa.zero(); P];
                    for (p, scale) in scales.iter_mut().enumerate() {
                        // SAFETY: the scales of this span of panel `p`, in bounds as said above.
                        *scale = unsafe { of_row.scale_of(isa, p, (block, step * STEP % BLOCK / span)) };
                    }
                    for (total, sum) in totals.chunks_exact_mut(P * LINE).zip(sums.chunks_exact(P * LINE)) {
                        for (p, &scale) in scales.iter().enumerate() {
                            let at = total[p * LINE..][..LINE].as_mut_ptr();
                            // SAFETY: a line of sums, and one of totals.
                            unsafe {
                                let sum = isa.as_f32(isa.load(sum[p * LINE..][..LINE].as_ptr()));
                                let total = isa.mul_add(sum, scale, isa.as_f32(isa.load(at)));
                                isa.store(at, isa.as_int(total));
                            }
                        }
                    }
                }
                if STEPS > 1 && record == 0 {
                    // SAFETY: totals of a tile of rows and all panels.
                    unsafe { unit.write::<P>(totals.as_mut_ptr()) };
                }
            }
        }
        if STEPS == 1 && record == 0 {
            // SAFETY: totals of all rows and panels.
            unsafe { unit.write::<P>(totals.as_mut_ptr()) };
        }
        unit.end();
        for (tile, totals) in totals.chunks_exact(rows * P * LINE).enumerate() {
            let in_the_end = (scaled::of_outputs(SCALED), FloatTile::<L, SCALED, true, 1, P>::up::<I>());
            end_rows::<I, P>(isa, &mut of_row.tile, first(tile), totals, in_the_end);
        }
    }
}

/// Up to [`STREAM_ROWS`] rows x four panels of integers with one scale an output, whose lines come from memory, over all of K, with the bits of VNNI. Sums
/// of a tile of rows and a block are scaled beside products of the next tile, or of the next block; and lines that are no operands are unpacked a block
/// before it is due.
pub(crate) struct StreamedInts<'a, U, L> {
    pub unit: U,
    pub rows: usize,
    pub tile: Tile<'a>,
    pub kind: PhantomData<L>,
}

const _: () = assert!(MOST_PANELS == 4, "as many as a tile unit's steps of integers have");

/// Steps of a block of that.
pub(crate) const INT_STEPS: usize = BLOCK / LINE;
/// Bytes of a block of a panel, as operands.
const INT_BLOCK: usize = BLOCK * PANEL;
/// The most blocks whose sums are scaled together.
pub(crate) const INT_SPAN: usize = WIDE / BLOCK;
/// Bytes of a block of four panels, as operands.
const INT_LINES_OF_BLOCK: usize = MOST_PANELS * INT_BLOCK;
/// Bytes of as many such blocks as are scaled together, of two times as many by turns.
const INT_LINES: usize = 2 * INT_SPAN * INT_LINES_OF_BLOCK;

/// Unpacks line `line` of the blocks that begin at `from`, those of the panels so many bytes apart.
///
/// # Safety
/// The lines up to this one are readable.
#[inline(always)]
unsafe fn unpack_ints<I: Isa, L: Codes>(
    isa: I,
    table: L::Table<I>,
    (from, stride): (*const u8, usize),
    line: usize,
    to: &mut [u8],
) {
    for (p, to) in to.chunks_exact_mut(INT_BLOCK).enumerate() {
        let from = from.wrapping_add(p * stride);
        // SAFETY: by the caller's promise.
        let operands = unsafe { L::operands::<I, BLOCK>(isa, table, from, line) };
        let to = to[line * L::OPERANDS * LINE..][..L::OPERANDS * LINE].as_mut_ptr();
        for (i, &operand) in operands[..L::OPERANDS].iter().enumerate() {
            // SAFETY: a line for each operand.
            unsafe { isa.store(to.wrapping_add(i * LINE), operand) };
        }
    }
}

impl<U: TileUnit, L: Codes> Job for StreamedInts<'_, U, L> {
    #[inline(always)]
    fn go<I: Isa>(self, isa: I) {
        // Not `const`, which is for code that never runs, too.
        assert!(L::STEP == LINE && !L::SHARED);
        let (unit, mut t) = (self.unit, self.tile);
        let unpacks = const { L::OPERANDS > 1 };
        let buffer = std::mem::take(&mut t.sums);
        // As many rows in each, the last of which may have been in the tile before.
        let row_tiles = self.rows.div_ceil(TILE_ROWS);
        let rows = self.rows.div_ceil(row_tiles);
        let first = |tile: usize| (tile * rows).min(self.rows - rows);
        let sums_of_tile = rows * MOST_PANELS * LINE;
        assert!(rows > 0 && buffer.len() >= stream_size(self.rows));
        let (unpacked, buffer) = buffer.split_at_mut(if unpacks { INT_LINES } else { 0 });
        let (sums, totals) = buffer.split_at_mut(2 * SUMS_OF_STREAM);
        let totals = &mut totals[..row_tiles * sums_of_tile];
        totals.fill(0);
        // Lines of a panel's block, and its bytes.
        let block_lines = INT_BLOCK / LINE / L::OPERANDS;
        let block_bytes = block_lines * LINE;
        t.check_int_stream(self.rows, block_bytes);
        let (inputs, row_stride, input_stride) = (t.inputs.as_ptr(), t.row_bytes, t.input_stride);
        // Blocks of the inputs have so many of these, whose sums are scaled together. A tile of rows alone keeps them from one to the next; of several, each multiplies all of them
        // before the next one does.
        let span = t.input_span;
        let together = if row_tiles == 1 { 1 } else { span };
        let blocks_from = |first: usize| first..t.blocks.min(first + together);
        // What is not unpacked is read by the first tile of rows, and asked for beside all of them.
        let least_ahead = if unpacks { 0 } else { together };

        // From here on every read is in bounds: `check_int_stream` saw all blocks of the lines of all panels and of the inputs of all rows.
        let table = L::table(isa);
        let lines_of = |block: usize| t.weights.as_ptr().wrapping_add(block * block_bytes);
        for block in if unpacks { blocks_from(0) } else { 0..0 } {
            for line in 0..block_lines {
                let to = &mut unpacked[block * INT_LINES_OF_BLOCK..][..INT_LINES_OF_BLOCK];
                // SAFETY: a line of the first blocks, in bounds as said above.
                unsafe { unpack_ints::<I, L>(isa, table, (lines_of(block), t.weight_stride), line, to) };
            }
        }
        let (mut current, mut next) = unpacked.split_at_mut(if unpacks { INT_LINES / 2 } else { 0 });
        let mut before = None;
        let mut half = 0;
        unit.begin(rows);
        for first_block in (0..t.blocks).step_by(together) {
            let blocks = blocks_from(first_block);
            let within = first_block % span;
            let steps = blocks.len() * INT_STEPS;
            // The blocks whose lines are read meanwhile: these, or those that come next, which are unpacked; in the end, of the panels that come next.
            let due = match blocks.end {
                _ if !unpacks => blocks.clone(),
                end if end < t.blocks => blocks_from(end),
                end => end..end + blocks_from(0).len(),
            };
            let mut ahead = [0; INT_SPAN];
            for (ahead, block) in ahead.iter_mut().zip(due.clone()) {
                *ahead = t.int_stream_ahead(block, block_bytes, least_ahead);
            }
            // How many lines of each panel are asked for, and unpacked, with each step; and how many rows are scaled.
            let lines = due.len() * block_lines;
            let step_lines = lines.div_ceil(row_tiles * steps);
            let step_rows = rows.div_ceil(steps);
            let mut done = 0;
            for tile in 0..row_tiles {
                let row = inputs.wrapping_add(first_block / span * input_stride + first(tile) * row_stride);
                if within == 0 {
                    // SAFETY: begun.
                    unsafe { unit.clear() };
                }
                for i in 0..steps {
                    let (block, step) = (i / INT_STEPS, i % INT_STEPS);
                    let (operands, panel_stride) = match unpacks {
                        true => (current[block * INT_LINES_OF_BLOCK..].as_ptr(), INT_BLOCK),
                        false => (lines_of(first_block + block), t.weight_stride),
                    };
                    let x = row.wrapping_add((within + block) * BLOCK + step * LINE);
                    // SAFETY: this step of all rows of the tile, in bounds as said above, and its lines.
                    unsafe { unit.step_int8(x, row_stride, operands.wrapping_add(step * STEP_LINES), panel_stride) };
                    t.later.ask();
                    for line in done..(done + step_lines).min(lines) {
                        let (i, line) = (line / block_lines, line % block_lines);
                        let from = lines_of(due.start + i);
                        for p in 0..MOST_PANELS {
                            let at = from.wrapping_add(p * t.weight_stride + line * LINE);
                            prefetch_later(at.wrapping_add(ahead[i]));
                        }
                        if unpacks && due.start < t.blocks {
                            let to = &mut next[i * INT_LINES_OF_BLOCK..][..INT_LINES_OF_BLOCK];
                            // SAFETY: a line of the next blocks, in bounds as said above.
                            unsafe { unpack_ints::<I, L>(isa, table, (from, t.weight_stride), line, to) };
                        }
                    }
                    done += step_lines;
                    if let Some((x, tile)) = before {
                        let part = (i * step_rows).min(rows)..((i + 1) * step_rows).min(rows);
                        let totals = &mut totals[tile * sums_of_tile..][..sums_of_tile];
                        // SAFETY: rows of the tile before, in bounds as said above.
                        unsafe { add_int_sums(isa, (x, row_stride), part, &sums[SUMS_OF_STREAM - half..], totals) };
                    }
                }
                before = None;
                if blocks.end.is_multiple_of(span) || blocks.end == t.blocks {
                    // SAFETY: sums of a tile of rows and all panels.
                    unsafe { unit.write::<MOST_PANELS>(sums[half..][..sums_of_tile].as_mut_ptr()) };
                    before = Some((row.wrapping_add(span * BLOCK), tile));
                    half = SUMS_OF_STREAM - half;
                }
            }
            std::mem::swap(&mut current, &mut next);
        }
        unit.end();
        if let Some((x, tile)) = before {
            let totals = &mut totals[tile * sums_of_tile..][..sums_of_tile];
            // SAFETY: rows of the last tile, in bounds as said above.
            unsafe { add_int_sums(isa, (x, row_stride), 0..rows, &sums[SUMS_OF_STREAM - half..], totals) };
        }
        for (tile, totals) in totals.chunks_exact(sums_of_tile).enumerate() {
            end_rows::<I, MOST_PANELS>(isa, &mut t, first(tile), totals, (true, 1.0));
        }
    }
}

/// Adds sums of some rows, with what their inputs bring along, to the totals, times the scales of the inputs.
///
/// # Safety
/// What the blocks of these rows have behind their codes is readable, of which that of the first row of the tile begins at the address given, and the next ones so many bytes on.
#[inline(always)]
unsafe fn add_int_sums<I: Isa>(
    isa: I,
    (x, row_stride): (*const u8, usize),
    rows: Range<usize>,
    sums: &[u8],
    totals: &mut [u8],
) {
    for r in rows {
        let at = x.wrapping_add(r * row_stride);
        // SAFETY: the scale of a block, and what is kept of its sum, by the caller's promise.
        let (scale, kept) = unsafe { (isa.load_f32(at), isa.load_dword(at.wrapping_add(4))) };
        const ROW: usize = MOST_PANELS * LINE;
        let (sums, totals) = (&sums[r * ROW..][..ROW], &mut totals[r * ROW..][..ROW]);
        for p in 0..MOST_PANELS {
            let to = totals[p * LINE..][..LINE].as_mut_ptr();
            // SAFETY: a line of sums, and one of totals.
            unsafe {
                let sum = isa.add(isa.load(sums[p * LINE..][..LINE].as_ptr()), kept);
                let total = isa.mul_add(isa.to_f32(sum), scale, isa.as_f32(isa.load(to)));
                isa.store(to, isa.as_int(total));
            }
        }
    }
}
