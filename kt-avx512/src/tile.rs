//! Register tiles: R rows x P panels of 16 outputs, sums in registers over all of K.
//!
//! ```text
//! for each block of 128 columns
//!     for each line of the P panels: unpack it in registers if it is packed
//!         for each of the R rows: broadcast its inputs; for each panel: sum[r][p] += line[p] . inputs[r]
//!     scale what has one scale so far, and add it to the total
//! ```
//!
//! Each output of each row is one chain of additions in rising k, whatever R and P are and whether lines are unpacked here or
//! beforehand. So a number does not depend on the rows and outputs that are computed with it.

#![allow(unsafe_code)] // kernel

use std::arch::x86_64::{__m512, __m512i};
use std::marker::PhantomData;

use kt_core::cpu::input::BLOCK;

use crate::isa::{Base, Isa, Job, prefetch};
use crate::layout::{CHUNK, LINE, PANEL};

/// How many blocks of 128 columns weights are asked for ahead of use; past the end of a panel, in the panels that come next. The
/// hardware does this within a page only: without it, each panel starts with misses. More rows take longer over a block, yet gain
/// from a greater distance (measured).
const fn blocks_ahead(rows: usize) -> usize {
    if rows <= 2 { 1 } else { 4 }
}

/// What a register tile reads and writes.
pub(crate) struct Tile<'a> {
    /// Lines of the first panel; those of panel `p` begin at `p * weight_stride`.
    pub weights: &'a [u8],
    /// See `weights`.
    pub weight_stride: usize,
    /// Scales of the first panel; those of panel `p` begin at `p * scale_stride`.
    pub scales: &'a [u8],
    /// See `scales`.
    pub scale_stride: usize,
    /// Columns that share a scale, for grouped weights.
    pub group: usize,
    /// Gathered input rows: `[blocks][R]` input blocks.
    pub inputs: &'a [u8],
    /// Blocks of 128 columns.
    pub blocks: usize,
    /// Row `r`, output `j` goes to `r * out_stride + j`.
    pub out: &'a mut [f32],
    /// See `out`.
    pub out_stride: usize,
    /// Outputs to write: the last panel may be cut.
    pub width: usize,
}

/// How the lines of a panel are stored, and how one becomes operands.
pub(crate) trait Lines: Copy {
    /// Operands per stored line.
    const OPERANDS: usize;
    /// What the loop keeps in registers for unpacking.
    type Table: Copy;
    /// Loads it.
    fn table<I: Isa>(isa: I) -> Self::Table;
    /// The operands of a line, in rising k; only the first [`Lines::OPERANDS`] are used.
    fn operands<I: Isa>(isa: I, table: Self::Table, line: __m512i) -> [__m512i; 2];
}

/// Lines that are operands.
#[derive(Clone, Copy)]
pub(crate) struct Direct;

/// Two int8 operands in nibbles.
#[derive(Clone, Copy)]
pub(crate) struct Nibbles;

/// Two BF16 operands as E4M3 codes.
#[derive(Clone, Copy)]
pub(crate) struct Fp8;

impl Lines for Direct {
    const OPERANDS: usize = 1;
    type Table = ();
    #[inline(always)]
    fn table<I: Isa>(_: I) {}
    #[inline(always)]
    fn operands<I: Isa>(_: I, _: (), line: __m512i) -> [__m512i; 2] {
        [line, line]
    }
}

impl Lines for Nibbles {
    const OPERANDS: usize = 2;
    type Table = ();
    #[inline(always)]
    fn table<I: Isa>(_: I) {}
    #[inline(always)]
    fn operands<I: Isa>(isa: I, _: (), line: __m512i) -> [__m512i; 2] {
        isa.nibbles(line)
    }
}

impl Lines for Fp8 {
    const OPERANDS: usize = 2;
    type Table = [__m512i; 4];
    #[inline(always)]
    fn table<I: Isa>(isa: I) -> Self::Table {
        isa.fp8_table()
    }
    #[inline(always)]
    fn operands<I: Isa>(isa: I, table: Self::Table, line: __m512i) -> [__m512i; 2] {
        isa.fp8_to_bf16(table, line)
    }
}

/// Unpacks all lines of a panel.
pub(crate) struct Unpack<'a, L> {
    pub from: &'a [u8],
    pub to: &'a mut [u8],
    pub lines: PhantomData<L>,
}

impl<L: Lines> Job for Unpack<'_, L> {
    #[inline(always)]
    fn go<I: Isa>(self, isa: I) {
        let table = L::table(isa);
        for (from, to) in self.from.chunks_exact(LINE).zip(self.to.chunks_exact_mut(LINE * L::OPERANDS)) {
            // SAFETY: `from` is a line.
            let operands = L::operands(isa, table, unsafe { isa.load(from.as_ptr()) });
            for (to, v) in to.chunks_exact_mut(LINE).zip(operands) {
                // SAFETY: `to` is a line.
                unsafe { isa.store(to.as_mut_ptr(), v) };
            }
        }
    }
}

impl Tile<'_> {
    /// Checks that everything that a tile of `r` x `p` reads and writes is there.
    #[inline(always)]
    pub fn check(&self, r: usize, p: usize, weight_bytes: usize, scale_bytes: usize, input_bytes: usize) {
        assert!(self.weights.len() >= (p - 1) * self.weight_stride + weight_bytes);
        assert!(self.scales.len() >= (p - 1) * self.scale_stride + scale_bytes);
        assert!(self.inputs.len() >= self.blocks * r * input_bytes);
        assert!(self.width <= p * PANEL && self.width > (p - 1) * PANEL);
        assert!(self.out.len() >= (r - 1) * self.out_stride + self.width);
    }

    /// From a line of a block to the line that is to be prefetched.
    #[inline(always)]
    pub fn ahead<const R: usize, const P: usize>(&self, block: usize, block_bytes: usize) -> usize {
        if block + blocks_ahead(R) < self.blocks {
            blocks_ahead(R) * block_bytes
        } else {
            (P * self.weight_stride + blocks_ahead(R) * block_bytes).wrapping_sub(self.blocks * block_bytes)
        }
    }

    /// Multiplies by the row scales that open a panel's scales, if it has them, and writes the results.
    #[inline(always)]
    fn finish<I: Isa, const R: usize, const P: usize>(self, isa: I, total: [[__m512; P]; R], row_scales: bool) {
        for p in 0..P {
            for (r, total) in total.iter().enumerate() {
                let mut v = total[p];
                if row_scales {
                    // SAFETY: `check` saw the scales of P panels.
                    v = isa.mul(v, isa.as_f32(unsafe { isa.load(self.scales.as_ptr().add(p * self.scale_stride)) }));
                }
                // SAFETY: `check` saw that `width` outputs of R rows fit, and that all panels begin before `width`.
                let to = unsafe { self.out.as_mut_ptr().add(r * self.out_stride + p * PANEL) };
                // SAFETY: as above; cut at `width`.
                unsafe { isa.store_first(to, self.width - p * PANEL, v) };
            }
        }
    }
}

/// Unsigned weights x signed inputs with a scale per `XG` columns. `GROUPED`: weights have group scales too.
pub(crate) struct Int8Tile<'a, L, const XG: usize, const GROUPED: bool, const R: usize, const P: usize> {
    pub tile: Tile<'a>,
    pub lines: PhantomData<L>,
}

impl<L: Lines, const XG: usize, const GROUPED: bool, const R: usize, const P: usize> Job
    for Int8Tile<'_, L, XG, GROUPED, R, P>
{
    #[inline(always)]
    fn go<I: Isa>(self, isa: I) {
        let t = self.tile;
        let groups = BLOCK / XG;
        let block_bytes = BLOCK + groups * 8;
        let group_bytes = if GROUPED { (t.blocks * BLOCK).div_ceil(t.group) * PANEL * 2 } else { 0 };
        t.check(R, P, t.blocks * BLOCK * PANEL / L::OPERANDS, PANEL * 4 + group_bytes, block_bytes);

        // From here on every read is in bounds: `check` saw all blocks of the lines of P panels and of the inputs of R rows, and a
        // scale for every group, those of the padding included.
        let table = L::table(isa);
        let mut total = [[isa.zero(); P]; R];
        let mut line = t.weights.as_ptr();
        let mut x = t.inputs.as_ptr();
        let mut scale = t.scales[PANEL * 4..].as_ptr();
        let chunks_per_scale = if GROUPED { t.group / CHUNK } else { 1 };
        let mut chunks_left = chunks_per_scale;
        for block in 0..t.blocks {
            let ahead = t.ahead::<R, P>(block, BLOCK * PANEL / L::OPERANDS);
            for g in 0..groups {
                let mut sums = [[isa.splat(0); P]; R];
                for (r, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: the correction of group `g` of row `r`, in bounds as said above.
                    *sums = [unsafe { isa.load_dword(x.add(r * block_bytes + BLOCK + (groups + g) * 4)) }; P];
                }
                for j in 0..XG / 4 / L::OPERANDS {
                    let mut w = [[isa.splat(0); 2]; P];
                    for (p, w) in w.iter_mut().enumerate() {
                        let at = line.wrapping_add(p * t.weight_stride);
                        prefetch(at.wrapping_add(ahead));
                        // SAFETY: the next line of panel `p`, in bounds as said above.
                        *w = L::operands(isa, table, unsafe { isa.load(at) });
                    }
                    line = line.wrapping_add(LINE);
                    for l in 0..L::OPERANDS {
                        for (r, sums) in sums.iter_mut().enumerate() {
                            let k = g * XG + (j * L::OPERANDS + l) * 4;
                            // SAFETY: four codes of row `r`, in bounds as said above.
                            let x = unsafe { isa.load_dword(x.add(r * block_bytes + k)) };
                            for (sum, w) in sums.iter_mut().zip(&w) {
                                *sum = isa.dot_int8(*sum, w[l], x);
                            }
                        }
                    }
                }
                let mut w_scale = [isa.zero(); P];
                if GROUPED {
                    for (p, w_scale) in w_scale.iter_mut().enumerate() {
                        // SAFETY: 16 scales of this group of panel `p`, in bounds as said above.
                        *w_scale = unsafe { isa.load_f16(scale.add(p * t.scale_stride)) };
                        prefetch(scale.wrapping_add((P + p) * t.scale_stride));
                    }
                    chunks_left -= 1;
                    if chunks_left == 0 {
                        chunks_left = chunks_per_scale;
                        scale = scale.wrapping_add(PANEL * 2);
                    }
                }
                for (r, sums) in sums.iter().enumerate() {
                    // SAFETY: the scale of group `g` of row `r`, in bounds as said above.
                    let x_scale = unsafe { isa.load_f32(x.add(r * block_bytes + BLOCK + g * 4)) };
                    for p in 0..P {
                        let sum = isa.to_f32(sums[p]);
                        let (a, b) = if GROUPED { (isa.mul(sum, x_scale), w_scale[p]) } else { (sum, x_scale) };
                        total[r][p] = isa.mul_add(a, b, total[r][p]);
                    }
                }
            }
            x = x.wrapping_add(R * block_bytes);
        }
        t.finish(isa, total, true);
    }
}

/// BF16 weights x inputs of [`Isa::INPUT_BYTES`]. `TILES`: an F32 scale per panel and block (FP8 128x128); else `ROWS`: an F32
/// scale per output.
pub(crate) struct Bf16Tile<'a, L, const TILES: bool, const ROWS: bool, const R: usize, const P: usize> {
    pub tile: Tile<'a>,
    pub lines: PhantomData<L>,
}

impl<L: Lines, const TILES: bool, const ROWS: bool, const R: usize, const P: usize> Job
    for Bf16Tile<'_, L, TILES, ROWS, R, P>
{
    #[inline(always)]
    fn go<I: Isa>(self, isa: I) {
        let t = self.tile;
        let block_bytes = BLOCK * I::INPUT_BYTES;
        let scale_bytes = if TILES {
            t.blocks * 4
        } else if ROWS {
            PANEL * 4
        } else {
            0
        };
        t.check(R, P, t.blocks * BLOCK * PANEL * 2 / L::OPERANDS, scale_bytes, block_bytes);

        // From here on every read is in bounds: `check` saw all blocks of the lines of P panels and of the inputs of R rows, and a
        // scale for every block.
        let table = L::table(isa);
        let mut total = [[isa.zero(); P]; R];
        let mut line = t.weights.as_ptr();
        let mut x = t.inputs.as_ptr();
        for block in 0..t.blocks {
            let ahead = t.ahead::<R, P>(block, BLOCK * PANEL * 2 / L::OPERANDS);
            let mut sums = if TILES { [[isa.zero(); P]; R] } else { total };
            for j in 0..BLOCK / 2 / L::OPERANDS {
                let mut w = [[isa.splat(0); 2]; P];
                for (p, w) in w.iter_mut().enumerate() {
                    let at = line.wrapping_add(p * t.weight_stride);
                    prefetch(at.wrapping_add(ahead));
                    // SAFETY: the next line of panel `p`, in bounds as said above.
                    *w = L::operands(isa, table, unsafe { isa.load(at) });
                }
                line = line.wrapping_add(LINE);
                for l in 0..L::OPERANDS {
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let k = (j * L::OPERANDS + l) * 2;
                        // SAFETY: two inputs of row `r`, in bounds as said above.
                        let x = unsafe { isa.load_pair(x.add(r * block_bytes + k * I::INPUT_BYTES)) };
                        for (sum, w) in sums.iter_mut().zip(&w) {
                            *sum = isa.dot_bf16(*sum, w[l], x);
                        }
                    }
                }
            }
            if TILES {
                for p in 0..P {
                    // SAFETY: the scale of this block of panel `p`, in bounds as said above.
                    let scale = unsafe { isa.load_f32(t.scales.as_ptr().add(p * t.scale_stride + block * 4)) };
                    for r in 0..R {
                        total[r][p] = isa.mul_add(sums[r][p], scale, total[r][p]);
                    }
                }
            } else {
                total = sums;
            }
            x = x.wrapping_add(R * block_bytes);
        }
        t.finish(isa, total, ROWS);
    }
}
