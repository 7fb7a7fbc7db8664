//! Products of many rows by a unit that multiplies tiles of 16 rows x 64 bytes (AMX).
//!
//! ```text
//! for each piece of K whose sums fit their buffer
//!     ask for the lines that come next
//!     the unit: for each span of columns that share a scale: 2 x 2 tiles of sums of 32 rows x 32 outputs, written to the buffer
//!     for each 4 rows: the totals as `tile.rs` makes them, from the sums in place of products
//! ```
//!
//! A line of a panel is a row of the unit's second operand as it is, and 16 input rows are its first one. Integer sums are exact, so
//! int8 products have the bits of VNNI. The unit sums the first and the second of each two BF16 products of 32 columns apart, then adds
//! both to what it had; products that stream do the same there ([`Isa::dot_chains`]), so these too have the same bits for any number of rows.

#![allow(unsafe_code)] // kernel

use kt_core::cpu::input::BLOCK;

use crate::ahead::Level;
use crate::isa::Isa;
use crate::layout::{LINE, PANEL};
use crate::tile::Tile;

/// Rows of a tile.
pub const TILE_ROWS: usize = 16;
/// Panels whose products a unit makes.
pub const TILE_PANELS: usize = 2;
/// Bytes of a tile.
pub const TILE_BYTES: usize = TILE_ROWS * LINE;
/// Bytes of the sums of a span of columns: four tiles, of rows 0..16 with both panels, then of rows 16..32.
pub const SUMS_BYTES: usize = 4 * TILE_BYTES;
/// Spans whose sums are kept at a time: two thirds of a first-level cache of 48 KiB.
const SPANS: usize = 8;
/// Bytes of the buffer of sums: of 256 columns with a scale for 16 there are twice as many.
pub(crate) const SUMS_SIZE: usize = 2 * SPANS * SUMS_BYTES;
/// Columns whose BF16 products a tile unit sums before it adds them: the two bytes of each in a row of a tile.
pub(crate) const CHAIN: usize = LINE / 2;
/// Rows whose totals are in registers at the same time.
const ROWS: usize = 4;

/// What a tile unit multiplies: up to 32 input rows with two panels, step by step of up to 64 bytes of a row.
///
/// Step `s` of block `b` of row `r` is at `inputs + b * block_stride + r * row_stride + s * step_bytes`. The lines of a block, `step_bytes / 4`
/// for each step, come one after the other, and `line_skip` bytes after them those of the next one; those of panel `p` begin at `lines + p *
/// panel_stride`.
#[derive(Debug)]
pub struct TileProduct {
    /// BF16 numbers; else signed bytes of inputs with unsigned ones of weights, whose sums are I32.
    pub bf16: bool,
    /// Rows: 1 to 32.
    pub rows: usize,
    /// Bytes of a row in a step: 16, 32 or 64.
    pub step_bytes: usize,
    /// Blocks, at least 1.
    pub blocks: usize,
    /// Steps of a block.
    pub steps: usize,
    /// Steps until sums are written and begin anew; a divisor of all steps.
    pub sum_steps: usize,
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
    /// Where sums go: that of row `r`, panel `p` and span `n` are 64 bytes at
    /// `n * SUMS_BYTES + (r / 16 * 2 + p) * TILE_BYTES + r % 16 * 64`. Absent rows are left alone.
    pub sums: *mut u8,
    /// Whether the first sums begin with what is there, and not with zeros.
    pub from_sums: bool,
}

/// A unit that multiplies tiles.
///
/// # Safety
/// A value must exist only where its instructions do, and `multiply` must touch no memory but what its argument names.
pub unsafe trait TileUnit: Copy + Send + Sync + std::fmt::Debug + 'static {
    /// Multiplies.
    ///
    /// # Safety
    /// All steps of all rows, and their lines in all panels, are readable; the sums of all spans are writable, and of the caller alone.
    unsafe fn multiply(self, product: &TileProduct);
}

/// Which columns share a scale.
pub(crate) struct Spans {
    /// See [`TileProduct::bf16`].
    pub bf16: bool,
    /// Columns, up to 128; all where nothing is scaled in between.
    pub columns: Option<usize>,
    /// Bytes of the scales of a group.
    pub record: usize,
    /// Blocks that pieces of K are multiples of.
    pub blocks: usize,
}

/// Runs a tile of up to 32 rows x 2 panels of unpacked lines. `rest` runs tiles of up to [`ROWS`] rows over the sums.
#[inline(always)]
pub(crate) fn cached<I: Isa>(isa: I, rows: usize, mut tile: Tile<'_>, spans: Spans, rest: impl Fn(usize, Tile<'_>)) {
    // Bytes of a block in a row, and in the lines of a panel.
    let row_bytes = if spans.bf16 { BLOCK * 2 } else { BLOCK };
    let line_bytes = row_bytes * PANEL;
    let sums_of_block = spans.columns.map_or(0, |columns| BLOCK / columns);
    let most = SPANS.checked_div(sums_of_block).unwrap_or(tile.blocks).max(spans.blocks);
    assert!(most * sums_of_block * SUMS_BYTES <= SUMS_SIZE);
    let step_bytes = spans.columns.map_or(LINE, |columns| (columns * row_bytes / BLOCK).min(LINE));
    let steps = row_bytes / step_bytes;
    let row_stride = tile.row_bytes;
    assert!(tile.row_tiles == 1 && rows > 0 && rows <= 2 * TILE_ROWS && tile.sums.len() == SUMS_SIZE);
    assert!(row_stride >= row_bytes);
    let end = tile.lines_before(tile.blocks - 1, line_bytes) + line_bytes;
    assert!(tile.weights[0].len() >= (TILE_PANELS - 1) * tile.weight_stride + end);
    assert!(tile.inputs.len() >= (tile.blocks - 1) * tile.input_stride + rows * row_stride);
    let sums = std::mem::take(&mut tile.sums);
    let mut start = 0;
    while start < tile.blocks {
        let mut blocks = most.min(tile.blocks - start);
        if tile.line_skip > 0 && tile.unit > 1 {
            // No more than are one after the other.
            blocks = blocks.min(tile.unit - (tile.first_block + start) % tile.unit);
        }
        for _ in 0..blocks {
            tile.later.ask(Level::Second);
        }
        let from_sums = spans.columns.is_none() && tile.first_block > 0;
        if from_sums {
            for r in 0..rows {
                for p in 0..TILE_PANELS {
                    let left = tile.width.saturating_sub(p * PANEL).min(PANEL);
                    let at = r * tile.out_stride + p * PANEL;
                    let totals = if left > 0 { &tile.out[at..][..left] } else { &[] };
                    let at = (r / TILE_ROWS * 2 + p) * TILE_BYTES + r % TILE_ROWS * LINE;
                    for (sum, total) in sums[at..].chunks_exact_mut(4).zip(totals) {
                        sum.copy_from_slice(&total.to_le_bytes());
                    }
                }
            }
        }
        let inputs = &tile.inputs[start * tile.input_stride..];
        let product = TileProduct {
            bf16: spans.bf16,
            rows,
            step_bytes,
            blocks,
            steps,
            sum_steps: steps.checked_div(sums_of_block).unwrap_or(blocks * steps),
            inputs: inputs.as_ptr(),
            row_stride,
            block_stride: tile.input_stride,
            lines: tile.weights[0][tile.lines_before(start, line_bytes)..].as_ptr(),
            line_skip: if tile.unit > 1 { 0 } else { tile.line_skip },
            panel_stride: tile.weight_stride,
            sums: sums.as_mut_ptr(),
            from_sums,
        };
        // SAFETY: the asserts above saw all blocks of all rows and of the lines of all panels; `most` blocks have as many sums as fit.
        unsafe { isa.multiply_tiles(&product) };

        // The records of groups that end before this piece of K, and what the group it begins in has left.
        let columns = start * BLOCK;
        let (records, left) = match columns.checked_sub(tile.group_left) {
            None => (0, tile.group_left - columns),
            Some(beyond) => (beyond / tile.group + 1, tile.group - beyond % tile.group),
        };
        let mut done = 0;
        while done < rows {
            let now = ROWS.min(rows - done);
            let at = done / TILE_ROWS * 2 * TILE_BYTES + done % TILE_ROWS * LINE;
            let part = Tile {
                weights: [&sums[at..], &[]],
                weight_stride: TILE_BYTES,
                line_skip: 0,
                group_at: tile.group_at + records * spans.record + tile.units_before(start) * tile.record_skip,
                group_left: left,
                first_block: tile.first_block + start,
                inputs: &inputs[done * row_stride..],
                blocks,
                out: &mut tile.out[done * tile.out_stride..],
                last: tile.last && start + blocks == tile.blocks,
                sums: &mut [],
                ..tile
            };
            rest(now, part);
            done += now;
        }
        start += blocks;
    }
}
