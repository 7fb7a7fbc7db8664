//! Blocks whose codes number points of grids: decoded on the way, into lines and records of scales as `layout.rs` has them.
//!
//! Outputs of a panel are decoded one by one, since a block is a sequence of columns, and then transposed.

use std::marker::PhantomData;

use crate::ahead::Later;
use crate::isa::{Bits, Grid, Isa, Job};
use crate::layout::{LINE, PANEL, SUPER};

/// Lines of codes of [`SUPER`] columns of one output.
const LINES: usize = SUPER / LINE;

/// A block of one output on its way.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub struct Row {
    /// Places in the grid: those of the first half only, if points have 8 columns.
    pub points: [u16; SUPER / 4],
    /// A bit per column: what it means is up to [`Blocks::BITS`].
    pub bits: [u8; SUPER / 8],
    /// The F32 scale of each group: those of the first half only, if groups have 32 columns.
    pub scales: [[u8; 4]; PANEL],
    /// What [`Blocks::look_up`] finds.
    pub codes: [[u8; LINE]; LINES],
}

impl Row {
    /// Zeros.
    pub const EMPTY: Row =
        Row { points: [0; SUPER / 4], bits: [0; SUPER / 8], scales: [[0; 4]; PANEL], codes: [[0; LINE]; LINES] };
}

/// Weights that are used as the checkpoint has them, in blocks of [`SUPER`] columns that are decoded on the way.
pub trait Blocks: Copy {
    /// Bytes of a block.
    const BYTES: usize;
    /// Columns that share a scale: 16 or 32.
    const GROUP: usize;
    /// What the bits of columns do to codes.
    const BITS: Bits;
    /// Reads a block but for its codes.
    fn read(block: &[u8], row: &mut Row);
    /// Writes signed codes of the row's points, as [`Isa::look_up`] does.
    fn look_up<I: Isa>(isa: I, row: &mut Row);
}

/// Decodes blocks of the outputs of a panel into lines of unsigned codes and records of scales.
pub(crate) struct Decode<'a, B> {
    /// The rows of up to [`PANEL`] outputs. Others get what the buffer holds; nobody reads their sums.
    pub(crate) outputs: &'a [&'a [u8]],
    pub(crate) rows: &'a mut [Row; PANEL],
    pub(crate) lines: &'a mut [u8],
    pub(crate) records: &'a mut [u8],
    /// What to ask for meanwhile, some with each output and block.
    pub(crate) later: &'a Later,
    pub(crate) kind: PhantomData<B>,
}

impl<B: Blocks> Job for Decode<'_, B> {
    #[inline(always)]
    fn go<I: Isa>(self, isa: I) {
        let rows = self.rows;
        let lines = self.lines.as_chunks_mut::<LINE>().0.as_chunks_mut::<PANEL>().0.as_chunks_mut::<LINES>().0;
        let records = self.records.as_chunks_mut::<LINE>().0.chunks_exact_mut(SUPER / B::GROUP);
        for (at, (lines, records)) in lines.iter_mut().zip(records).enumerate() {
            // One thing at a time, so that nothing is loaded right after parts of it are stored.
            for (row, output) in rows.iter_mut().zip(self.outputs) {
                self.later.ask();
                B::read(&output[at * B::BYTES..][..B::BYTES], row);
            }
            for row in rows.iter_mut().take(self.outputs.len()) {
                B::look_up(isa, row);
            }
            for (i, lines) in lines.iter_mut().enumerate() {
                let bits = std::array::from_fn(|o| rows[o].bits.as_chunks().0[i]);
                isa.transpose(std::array::from_fn(|o| &rows[o].codes[i]), B::BITS, bits, lines);
            }
            let scales =
                std::array::from_fn(|o| rows[o].scales.as_flattened().first_chunk().expect("a line of scales"));
            let mut all = [[0; LINE]; PANEL];
            isa.transpose(scales, Bits::Nothing, [[0; 8]; PANEL], &mut all);
            records.copy_from_slice(&all[..SUPER / B::GROUP]);
        }
    }
}

impl<const COLS: usize, const LEN: usize> Grid<COLS, LEN> {
    /// The grid whose coordinates are `times * p + plus` for those of `points`, which have four values at most, or sixteen if
    /// points have 4 columns.
    ///
    /// # Panics
    /// When there are more values.
    pub const fn new(points: &[[i8; COLS]; LEN], times: i8, plus: i8) -> Self {
        assert!(COLS == 4 || COLS == 8);
        let most = if COLS == 4 { 16 } else { 4 };
        let mut grid = Grid { points: [[0; COLS]; LEN], digits: [0; LEN], values: [0; 16] };
        let (mut i, mut count) = (0, 0);
        while i < LEN {
            let mut col = 0;
            while col < COLS {
                let value = times * points[i][col] + plus;
                let mut digit = 0;
                while digit < count && grid.values[digit] != value {
                    digit += 1;
                }
                if digit == count {
                    assert!(count < most);
                    grid.values[count] = value;
                    count += 1;
                }
                grid.points[i][col] = value;
                let place = if COLS == 4 { [0, 8, 4, 12][col] } else { 2 * col };
                grid.digits[i] |= (digit as u16) << place;
                col += 1;
            }
            i += 1;
        }
        grid
    }
}
