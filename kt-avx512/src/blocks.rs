//! Blocks whose codes number points of grids: decoded on the way, into lines and records of scales as `layout.rs` has them.
//!
//! Outputs of a panel are decoded one by one, since a block is a sequence of columns, and then transposed.

#![allow(unsafe_code)] // kernel

use std::marker::PhantomData;

use kt_core::cpu::input::BLOCK;

use crate::ahead::Later;
use crate::isa::{Bits, Grid, Isa, Job};
use crate::layout::{LINE, PANEL, SUPER};

/// Lines of codes of [`SUPER`] columns of one output.
const LINES: usize = SUPER / LINE;

/// Outputs after which what comes later is asked for.
pub(crate) const ASK: usize = 4;

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
    /// The codes of points.
    codes: [[u8; LINE]; LINES],
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
    fn read<I: Isa>(isa: I, block: &[u8], row: &mut Row);
    /// The codes of points, as [`Isa::look_up`] has them.
    fn look_up<I: Isa>(isa: I, points: &[u16; SUPER / 4]) -> [I::Int; LINES];
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
            for (o, (row, output)) in rows.iter_mut().zip(self.outputs).enumerate() {
                if o % ASK == 0 {
                    self.later.ask();
                }
                B::read(isa, &output[at * B::BYTES..][..B::BYTES], row);
            }
            for row in rows.iter_mut().take(self.outputs.len()) {
                for (line, codes) in row.codes.iter_mut().zip(B::look_up(isa, &row.points)) {
                    // SAFETY: a line.
                    unsafe { isa.store(line.as_mut_ptr(), codes) };
                }
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

/// The products of blocks of the outputs of a panel with `R` rows, without lines: each output's codes with the codes of the inputs, which lie in the
/// same order, then sums of groups are transposed in place of codes. `G` is [`Blocks::GROUP`].
///
/// Sums are exact and are scaled in the order in which tiles do it, so that the bits are those of [`Decode`] with a tile.
pub(crate) struct Direct<'a, B, const G: usize, const R: usize> {
    /// The rows of up to [`PANEL`] outputs.
    pub(crate) outputs: &'a [&'a [u8]],
    pub(crate) rows: &'a mut [Row; PANEL],
    /// Input rows: block `b` of row `r` begins at `b * input_stride + r * block_bytes`.
    pub(crate) inputs: &'a [u8],
    /// See `inputs`.
    pub(crate) input_stride: usize,
    /// Row `r`, output `j` goes to `r * out_stride + j`.
    pub(crate) out: &'a mut [f32],
    /// See `out`.
    pub(crate) out_stride: usize,
    /// What to ask for meanwhile, some with each output and block.
    pub(crate) later: &'a Later,
    pub(crate) kind: PhantomData<B>,
}

/// Lines of dwords.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Dwords([[u8; LINE]; PANEL]);

impl<B: Blocks, const G: usize, const R: usize> Job for Direct<'_, B, G, R> {
    #[inline(always)]
    fn go<I: Isa>(self, isa: I) {
        const { assert!(G == B::GROUP && (G == 16 || G == 32)) };
        let sums_at = BLOCK + BLOCK / G * 4;
        let block_bytes = sums_at + BLOCK / G * 4;
        let (rows, n) = (self.rows, self.outputs.len());
        let columns = self.outputs[0].len() / B::BYTES;
        let mut total = [isa.zero(); R];
        let mut sums = [Dwords([[0; LINE]; PANEL]); R];
        let mut lines = Dwords([[0; LINE]; PANEL]);
        let mut scales = Dwords([[0; LINE]; PANEL]);
        for at in 0..columns {
            // One thing at a time, so that nothing is loaded right after parts of it are stored.
            for (o, (row, output)) in rows.iter_mut().zip(self.outputs).enumerate() {
                if o % ASK == 0 {
                    self.later.ask();
                }
                B::read(isa, &output[at * B::BYTES..][..B::BYTES], row);
            }
            let x: [[&[u8]; SUPER / BLOCK]; R] = std::array::from_fn(|r| {
                std::array::from_fn(|b| {
                    let start = (at * (SUPER / BLOCK) + b) * self.input_stride + r * block_bytes;
                    &self.inputs[start..][..block_bytes]
                })
            });
            for (o, row) in rows.iter().take(n).enumerate() {
                let mut products = [[isa.splat(0); LINES]; R];
                let codes = B::look_up(isa, &row.points);
                for i in 0..LINES {
                    let bits = row.bits.as_chunks().0[i];
                    let w = isa.wide(isa.with_signs(codes[i], B::BITS, bits));
                    for (products, x) in products.iter_mut().zip(&x) {
                        let x = &x[i * LINE / BLOCK][i * LINE % BLOCK..][..LINE];
                        // SAFETY: `x` has 64 bytes.
                        products[i] = isa.dot_wide(products[i], w, unsafe { isa.load(x.as_ptr()) });
                    }
                }
                for (sums, products) in sums.iter_mut().zip(products) {
                    // SAFETY: a line.
                    unsafe { isa.store(sums.0[o].as_mut_ptr(), isa.sums_of_four(products)) };
                }
            }
            let of = std::array::from_fn(|o| rows[o].scales.as_flattened().first_chunk().expect("a line of scales"));
            isa.transpose(of, Bits::Nothing, [[0; 8]; PANEL], &mut scales.0);
            for (r, (total, sums)) in total.iter_mut().zip(&sums).enumerate() {
                isa.transpose(std::array::from_fn(|o| &sums.0[o]), Bits::Nothing, [[0; 8]; PANEL], &mut lines.0);
                // SAFETY: a line.
                let line = |i: usize| unsafe { isa.load(lines.0[i].as_ptr()) };
                for g in 0..SUPER / G {
                    // Line `4 * j + i`: 16 columns from `64 * i + 16 * j` on.
                    let first = |columns: usize| 4 * (columns % 64 / 16) + columns / 64;
                    let mut sum = line(first(g * G));
                    if G == 32 {
                        sum = isa.add(sum, line(first(g * G + 16)));
                    }
                    let (x, g_of_block) = (x[r][g * G / BLOCK], g % (BLOCK / G));
                    let start = x[sums_at + g_of_block * 4..][..4].as_ptr();
                    // SAFETY: four bytes.
                    sum = isa.add(sum, unsafe { isa.load_dword(start) });
                    let x_scale = x[BLOCK + g_of_block * 4..][..4].as_ptr();
                    // SAFETY: four bytes.
                    let part = isa.mul(isa.to_f32(sum), unsafe { isa.load_f32(x_scale) });
                    // SAFETY: a line.
                    let w_scale = isa.as_f32(unsafe { isa.load(scales.0[g].as_ptr()) });
                    *total = isa.mul_add(part, w_scale, *total);
                }
            }
        }
        for (r, total) in total.into_iter().enumerate() {
            let out = &mut self.out[r * self.out_stride..][..n];
            // SAFETY: `n` numbers.
            unsafe { isa.store_first(out.as_mut_ptr(), n, total) };
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
                let value = (times * points[i][col] + plus) as u8 ^ 0x80;
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
