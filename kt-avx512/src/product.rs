//! The product of packed weights with input rows: which register tiles, in which order.
//!
//! Rows are gathered first, so that a tile reads its inputs through one pointer. Then, panels outermost:
//!
//! - up to [`STREAMED_ROWS`] rows: one tile of all rows; each packed line is read once and unpacked in registers;
//! - more: tiles of rows, all but the first reading their lines from cache. INT4 and FP8 lines are still unpacked in registers for
//!   each tile, and above [`UNPACKED_ROWS`] once per pair of panels, into cache.

use std::marker::PhantomData;
use std::ops::Range;

use kt_core::cpu::input::{BLOCK, InputLayout, Inputs};
use kt_core::cpu::kernel::{Scratch, Weights};
use kt_core::{Format, Group};

use crate::isa::{Isa, Job};
use crate::layout::{CHUNK, Layout, PANEL};
use crate::tile::{Bf16Tile, Direct, Fp8, Int8Tile, Lines, Nibbles, Tile, Unpack};

/// Most rows of a tile that reads lines from memory or unpacks them.
const STREAMED_ROWS: usize = 8;
/// Most rows for which lines are unpacked in registers. Unpacking once is for CPUs where it competes with multiplying for execution
/// ports; on Zen 4, where it does not, unpacking again for every 8 rows is as fast at 256 rows and 8 % faster at 64.
const UNPACKED_ROWS: usize = 96;

/// A number path with a way of storing lines: which register tiles it has.
trait Path<I: Isa> {
    /// How its lines are stored.
    type Lines: Lines;
    /// The same path on unpacked lines.
    type Unpacked: Path<I>;
    /// Rows of the largest tile of two panels whose sums (and totals, where scales come in between) fit into registers.
    const ROWS: usize;
    /// Panels at once for one or two rows. Where little happens per line, one: a single stream from memory is fastest. Else 4,
    /// whose independent sums hide the latency of unpacking and scaling.
    const FEW_ROWS_PANELS: usize;
    /// Runs a tile of `r` rows x `p` panels.
    fn tile(isa: I, r: usize, p: usize, tile: Tile<'_>);
}

/// INT8 and INT4.
struct Int8Path<L, const XG: usize, const GROUPED: bool>(PhantomData<L>);
/// BF16 and FP8 per channel.
struct Bf16Path<L, const ROW_SCALES: bool>(PhantomData<L>);
/// FP8 with 128 x 128 tiles.
struct TilesPath<L>(PhantomData<L>);

/// Runs `$job` with R and P set to the numbers of rows and panels: a `match` over the shapes that are compiled.
macro_rules! shapes {
    ($r:expr, $p:expr, [$($rows:literal x $panels:literal),*], $job:expr) => {
        match ($r, $p) {
            $(($rows, $panels) => {
                const R: usize = $rows;
                const P: usize = $panels;
                $job
            })*
            (r, p) => unreachable!("no register tile of {r} rows x {p} panels"),
        }
    };
}

impl<I: Isa, L: Lines, const XG: usize, const GROUPED: bool> Path<I> for Int8Path<L, XG, GROUPED> {
    type Lines = L;
    type Unpacked = Int8Path<Direct, XG, GROUPED>;
    const ROWS: usize = 6;
    const FEW_ROWS_PANELS: usize = if GROUPED { 4 } else { 1 };

    fn tile(isa: I, r: usize, p: usize, tile: Tile<'_>) {
        shapes!(
            r,
            p,
            [1 x 4, 2 x 4, 1 x 2, 2 x 2, 3 x 2, 4 x 2, 5 x 2, 6 x 2, 1 x 1, 2 x 1, 3 x 1, 4 x 1, 5 x 1, 6 x 1, 7 x 1, 8 x 1],
            isa.run(Int8Tile::<L, XG, GROUPED, R, P> { tile, lines: PhantomData })
        )
    }
}

impl<I: Isa, L: Lines, const ROW_SCALES: bool> Path<I> for Bf16Path<L, ROW_SCALES> {
    type Lines = L;
    type Unpacked = Bf16Path<Direct, ROW_SCALES>;
    // F32 inputs take twice the registers.
    const ROWS: usize = if L::OPERANDS > 1 || I::INPUT_BYTES > 2 { 8 } else { 12 };
    const FEW_ROWS_PANELS: usize = if L::OPERANDS > 1 { 4 } else { 1 };

    fn tile(isa: I, r: usize, p: usize, tile: Tile<'_>) {
        if const { <Self as Path<I>>::ROWS > 8 } && r > 8 {
            return shapes!(
                r,
                p,
                [9 x 2, 10 x 2, 11 x 2, 12 x 2, 9 x 1, 10 x 1, 11 x 1, 12 x 1],
                isa.run(Bf16Tile::<L, false, ROW_SCALES, R, P> { tile, lines: PhantomData })
            );
        }
        shapes!(
            r,
            p,
            [1 x 4, 2 x 4, 1 x 2, 2 x 2, 3 x 2, 4 x 2, 5 x 2, 6 x 2, 7 x 2, 8 x 2, 1 x 1, 2 x 1, 3 x 1, 4 x 1, 5 x 1, 6 x 1,
             7 x 1, 8 x 1],
            isa.run(Bf16Tile::<L, false, ROW_SCALES, R, P> { tile, lines: PhantomData })
        )
    }
}

impl<I: Isa, L: Lines> Path<I> for TilesPath<L> {
    type Lines = L;
    type Unpacked = TilesPath<Direct>;
    // Unpacking takes registers too, and so do F32 inputs.
    const ROWS: usize = if L::OPERANDS > 1 || I::INPUT_BYTES > 2 { 4 } else { 6 };
    const FEW_ROWS_PANELS: usize = 4;

    fn tile(isa: I, r: usize, p: usize, tile: Tile<'_>) {
        if const { <Self as Path<I>>::ROWS > 4 } && r > 4 && p > 1 {
            return shapes!(
                r,
                p,
                [5 x 2, 6 x 2],
                isa.run(Bf16Tile::<L, true, false, R, P> { tile, lines: PhantomData })
            );
        }
        shapes!(
            r,
            p,
            [1 x 4, 2 x 4, 1 x 2, 2 x 2, 3 x 2, 4 x 2, 1 x 1, 2 x 1, 3 x 1, 4 x 1, 5 x 1, 6 x 1, 7 x 1, 8 x 1],
            isa.run(Bf16Tile::<L, true, false, R, P> { tile, lines: PhantomData })
        )
    }
}

/// One product: what [`kt_core::cpu::kernel::Kernel::product`] is given.
pub(crate) struct Product<'a> {
    pub weights: &'a Weights,
    pub outputs: Range<usize>,
    pub inputs: Inputs<'a>,
    pub rows: &'a [u32],
    pub out: &'a mut [f32],
    pub scratch: &'a mut Scratch,
}

impl Job for Product<'_> {
    fn go<I: Isa>(self, isa: I) {
        assert_eq!(self.out.len(), self.rows.len() * self.outputs.len(), "output of another shape");
        assert!(
            self.outputs.start.is_multiple_of(PANEL) && self.outputs.end <= self.weights.rows(),
            "outputs out of range"
        );
        if self.out.is_empty() {
            return;
        }
        match self.weights.format() {
            Format::Bf16 => self.on::<_, Bf16Path<Direct, false>>(isa.for_bf16()),
            Format::Fp8Channel => self.on::<_, Bf16Path<Fp8, true>>(isa.for_bf16()),
            Format::Fp8Block => self.on::<_, TilesPath<Fp8>>(isa.for_bf16()),
            Format::Int8(Group::Row) | Format::Int8Offset(Group::Row) => {
                self.on::<_, Int8Path<Direct, BLOCK, false>>(isa.for_int8())
            }
            Format::Int8(_) | Format::Int8Offset(_) => self.on::<_, Int8Path<Direct, CHUNK, true>>(isa.for_int8()),
            Format::Int4(_) => self.on::<_, Int8Path<Nibbles, CHUNK, true>>(isa.for_int8()),
            other => unreachable!("{other} was never accepted"),
        }
    }
}

impl Product<'_> {
    fn on<I: Isa, K: Path<I>>(self, isa: I) {
        let layout = Layout::new(self.weights.format(), self.weights.cols());
        let n = self.rows.len();
        let row_bytes = layout.blocks * self.inputs.layout().block_bytes();
        let packed_lines = K::Lines::OPERANDS > 1;
        let unpack = packed_lines && n > UNPACKED_ROWS;
        let unpacked_bytes = if unpack { layout.weight_bytes * K::Lines::OPERANDS } else { 0 };
        let scratch = self.scratch.panel.get(2 * unpacked_bytes + n * row_bytes);
        let (unpacked, inputs) = scratch.split_at_mut(2 * unpacked_bytes);

        // Tiles of rows that differ by one row at most.
        let two_panels = if unpack { <K::Unpacked as Path<I>>::ROWS } else { K::ROWS };
        let tiles = n.div_ceil(if n <= STREAMED_ROWS || packed_lines && !unpack { STREAMED_ROWS } else { two_panels });
        let panels_at_once = match n.div_ceil(tiles) {
            1..=2 => K::FEW_ROWS_PANELS,
            rows if rows <= two_panels => 2,
            _ => 1,
        };
        let tile_rows = |i: usize| n * i / tiles..n * (i + 1) / tiles;
        let zero_point = zero_point(self.weights.format());
        for i in 0..tiles {
            let rows = tile_rows(i);
            gather(
                self.inputs,
                &self.rows[rows.clone()],
                zero_point,
                &mut inputs[rows.start * row_bytes..rows.end * row_bytes],
            );
        }

        let width = self.outputs.len();
        let packed = &self.weights.bytes()[self.outputs.start / PANEL * layout.panel_bytes()..];
        let mut done = 0;
        while done < width {
            // 4, 2 or 1: what is left over is done in smaller steps.
            let left = (width - done).div_ceil(PANEL);
            let panels = panels_at_once.min(1 << left.ilog2());
            let lines = &packed[done / PANEL * layout.panel_bytes()..][..panels * layout.panel_bytes()];
            if unpack {
                for (from, to) in
                    lines.chunks_exact(layout.panel_bytes()).zip(unpacked.chunks_exact_mut(unpacked_bytes))
                {
                    isa.run(Unpack::<K::Lines> { from: &from[..layout.weight_bytes], to, lines: PhantomData });
                }
            }
            for i in 0..tiles {
                let rows = tile_rows(i);
                let tile = Tile {
                    weights: if unpack { &*unpacked } else { lines },
                    weight_stride: if unpack { unpacked_bytes } else { layout.panel_bytes() },
                    scales: &lines[layout.weight_bytes..],
                    scale_stride: layout.panel_bytes(),
                    group: layout.group.unwrap_or(0),
                    inputs: &inputs[rows.start * row_bytes..rows.end * row_bytes],
                    blocks: layout.blocks,
                    out: &mut self.out[rows.start * width + done..],
                    out_stride: width,
                    width: (width - done).min(panels * PANEL),
                };
                if unpack {
                    K::Unpacked::tile(isa, rows.len(), panels, tile);
                } else {
                    K::tile(isa, rows.len(), panels, tile);
                }
            }
            done += panels * PANEL;
        }
    }
}

/// What weight codes are stored with as an offset.
pub(crate) fn zero_point(format: Format) -> i32 {
    match format {
        Format::Int8(_) | Format::Int8Offset(_) => 128,
        Format::Int4(_) => 8,
        _ => 0,
    }
}

/// Copies the blocks of `rows` side by side, `[blocks][rows]`, int8 sums times minus the zero point.
pub(crate) fn gather(x: Inputs<'_>, rows: &[u32], zero_point: i32, to: &mut [u8]) {
    let bytes = x.layout().block_bytes();
    let mut to = to.chunks_exact_mut(bytes);
    for block in 0..x.blocks() {
        for (&row, to) in rows.iter().zip(&mut to) {
            to.copy_from_slice(x.block(block, row as usize));
            if let InputLayout::Int8 { group } = x.layout() {
                for sum in to[BLOCK + BLOCK / group * 4..].as_chunks_mut::<4>().0 {
                    *sum = (i32::from_le_bytes(*sum) * -zero_point).to_le_bytes();
                }
            }
        }
    }
}
