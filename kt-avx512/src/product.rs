//! The product of packed weights with input rows: which register tiles, in which order.
//!
//! Few rows stream: one tile of all rows, over all of K, so that each packed line is read from memory once and unpacked in registers.
//! For more rows, K is cut so that the lines of a panel or two fit the first-level cache, unpacked once if they are packed; tiles of
//! rows pass over them, while the lines that come next are asked for.

use std::marker::PhantomData;
use std::ops::Range;

use kt_core::cpu::input::{BLOCK, Inputs};
use kt_core::cpu::kernel::{Outputs, Scratch};
use kt_core::format::mx;
use kt_core::{Format, Group};

use crate::isa::{Isa, Job};
use crate::layout::{CHUNK, LINE, Layout, PANEL};
use crate::lines::{
    Bf16Lines, Bytes, Codes, E2m1, E4m3Scale, E8m0Scale, F16Lines, F16Scale, F32Lines, Floats, Fp8, Lines, Nibbles,
    NoScale, Scale, Unpack,
};
use crate::tile::{FloatTile, IntTile, Tile, scaled};

/// Bytes of lines that tiles of rows pass over: most of a first-level cache of 48 KiB, all of one of 32.
const CACHED: usize = 32 << 10;

/// A number path with a way of storing lines: which register tiles it has.
trait Path<I: Isa> {
    /// How its lines are stored.
    type Lines: Lines;
    /// Rows of the largest tile over cached lines: as many as keep sums (and totals, where scales come in between) in registers.
    const ROWS: usize;
    /// Whether lines are operands and nothing is scaled in between.
    const LIGHT: bool;
    /// Runs a tile of `r` rows x `p` panels on lines as stored.
    fn stream(isa: I, r: usize, p: usize, tile: Tile<'_>);
    /// Runs a tile of `r` rows x `p` panels on unpacked lines.
    fn cached(isa: I, r: usize, p: usize, tile: Tile<'_>);
}

/// INT8, INT4, MXFP4, NVFP4; see [`IntTile`].
struct Ints<L, S, const XG: usize, const WG: usize, const ZERO: usize>(PhantomData<(L, S)>);
/// Floating-point weights; see [`FloatTile`].
struct Numbers<L, const SCALED: u8>(PhantomData<L>);

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

/// [`shapes`] of tiles that stream.
macro_rules! stream_shapes {
    ($large:expr, $r:expr, $p:expr, $job:expr) => {
        if const { $large } {
            shapes!(
                $r,
                $p,
                [1 x 4, 2 x 4, 3 x 2, 4 x 2, 5 x 2, 6 x 2, 1 x 1, 2 x 1, 3 x 1, 4 x 1, 5 x 1, 6 x 1, 7 x 1, 8 x 1],
                $job
            )
        } else {
            shapes!($r, $p, [1 x 4, 2 x 2, 3 x 2, 1 x 1, 2 x 1, 3 x 1, 4 x 1, 5 x 1, 6 x 1], $job)
        }
    };
}

/// Most rows that stream.
const fn stream_rows(large: bool) -> usize {
    if large { 8 } else { 6 }
}

/// Panels at once for rows that stream. Where little happens per line, one: a single stream from memory is fastest. Else enough
/// independent sums to hide the latency of unpacking and scaling, as far as registers go.
fn stream_panels(large: bool, light: bool, rows: usize) -> usize {
    match (large, rows) {
        _ if light => 1,
        (_, 1) | (true, 2) => 4,
        (false, 2..=3) | (true, 3..=6) => 2,
        _ => 1,
    }
}

impl<I: Isa, L: Codes, S: Scale, const XG: usize, const WG: usize, const ZERO: usize> Path<I>
    for Ints<L, S, XG, WG, ZERO>
{
    type Lines = L;
    const ROWS: usize = 6;
    const LIGHT: bool = L::OPERANDS == 1 && S::BYTES == 0;

    fn stream(isa: I, r: usize, p: usize, tile: Tile<'_>) {
        stream_shapes!(I::LARGE, r, p, isa.run(IntTile::<L, S, XG, WG, ZERO, true, R, P> { tile, kind: PhantomData }))
    }

    fn cached(isa: I, r: usize, p: usize, tile: Tile<'_>) {
        if const { I::LARGE } {
            shapes!(
                r,
                p,
                [4 x 2, 5 x 2, 6 x 2, 4 x 1, 5 x 1, 6 x 1],
                isa.run(IntTile::<L::Unpacked, S, XG, WG, ZERO, false, R, P> { tile, kind: PhantomData })
            )
        } else {
            shapes!(
                r,
                p,
                [3 x 1, 4 x 1, 5 x 1, 6 x 1],
                isa.run(IntTile::<L::Unpacked, S, XG, WG, ZERO, false, R, P> { tile, kind: PhantomData })
            )
        }
    }
}

impl<I: Isa, L: Floats, const SCALED: u8> Path<I> for Numbers<L, SCALED> {
    type Lines = L;
    // Inputs in F32 take more registers. Totals beside the sums, where scales come in between, may lie in memory.
    const ROWS: usize = if !I::LARGE {
        6
    } else if L::BF16 && I::INPUT_BYTES > 2 {
        8
    } else {
        12
    };
    const LIGHT: bool = L::OPERANDS == 1;

    fn stream(isa: I, r: usize, p: usize, tile: Tile<'_>) {
        stream_shapes!(I::LARGE, r, p, isa.run(FloatTile::<L, SCALED, true, R, P> { tile, kind: PhantomData }))
    }

    fn cached(isa: I, r: usize, p: usize, tile: Tile<'_>) {
        if const { <Self as Path<I>>::ROWS > 8 } {
            shapes!(
                r,
                p,
                [6 x 2, 7 x 2, 8 x 2, 9 x 2, 10 x 2, 11 x 2, 12 x 2, 6 x 1, 7 x 1, 8 x 1, 9 x 1, 10 x 1, 11 x 1, 12 x 1],
                isa.run(FloatTile::<L::Unpacked, SCALED, false, R, P> { tile, kind: PhantomData })
            )
        } else if const { I::LARGE } {
            shapes!(
                r,
                p,
                [4 x 2, 5 x 2, 6 x 2, 7 x 2, 8 x 2, 4 x 1, 5 x 1, 6 x 1, 7 x 1, 8 x 1],
                isa.run(FloatTile::<L::Unpacked, SCALED, false, R, P> { tile, kind: PhantomData })
            )
        } else {
            shapes!(
                r,
                p,
                [3 x 1, 4 x 1, 5 x 1, 6 x 1],
                isa.run(FloatTile::<L::Unpacked, SCALED, false, R, P> { tile, kind: PhantomData })
            )
        }
    }
}

/// One product: what [`kt_core::cpu::kernel::Kernel::product`] is given.
pub(crate) struct Product<'a> {
    pub outputs: Outputs<'a>,
    pub inputs: Inputs<'a>,
    pub rows: Range<usize>,
    pub out: &'a mut [f32],
    pub scratch: &'a mut Scratch,
}

impl Job for Product<'_> {
    fn go<I: Isa>(self, isa: I) {
        let Outputs { of: weights, range, .. } = &self.outputs;
        assert_eq!(self.out.len(), self.rows.len() * range.len(), "output of another shape");
        assert!(range.start.is_multiple_of(PANEL) && range.end <= weights.rows(), "outputs out of range");
        assert!(self.rows.end <= self.inputs.rows(), "rows out of range");
        if self.out.is_empty() {
            return;
        }
        let (int8, bf16, f32) = (isa.for_int8(), isa.for_bf16(), isa.for_f32());
        // Whether groups are whole blocks.
        let blocks = |group: Group| group.cols(BLOCK).is_multiple_of(BLOCK);
        match weights.format() {
            Format::F32 => self.on::<_, Numbers<F32Lines, { scaled::NO }>>(f32),
            Format::F16 => self.on::<_, Numbers<F16Lines, { scaled::NO }>>(f32),
            Format::Bf16 => self.on::<_, Numbers<Bf16Lines, { scaled::NO }>>(bf16),
            Format::Fp8Channel => self.on::<_, Numbers<Fp8, { scaled::OUTPUTS }>>(bf16),
            Format::Fp8Block => self.on::<_, Numbers<Fp8, { scaled::TILES }>>(bf16),
            Format::Mxfp8 => self.on::<_, Numbers<Fp8, { scaled::GROUPS }>>(bf16),
            Format::Int8(Group::Row) | Format::Int8Offset(Group::Row) => {
                self.on::<_, Ints<Bytes<0>, NoScale, BLOCK, 0, 0>>(int8)
            }
            Format::Int8(g) | Format::Int8Offset(g) if blocks(g) => {
                self.on::<_, Ints<Bytes<0>, F16Scale, CHUNK, BLOCK, 0>>(int8)
            }
            Format::Int8(_) | Format::Int8Offset(_) => self.on::<_, Ints<Bytes<0>, F16Scale, CHUNK, CHUNK, 0>>(int8),
            Format::Int8Asym(g) if blocks(g) => self.on::<_, Ints<Bytes<0>, F16Scale, CHUNK, BLOCK, 2>>(int8),
            Format::Int8Asym(_) => self.on::<_, Ints<Bytes<0>, F16Scale, CHUNK, CHUNK, 2>>(int8),
            Format::Int4(Group::Row) => self.on::<_, Ints<Nibbles, NoScale, CHUNK, 0, 0>>(int8),
            Format::Int4(g) if blocks(g) => self.on::<_, Ints<Nibbles, F16Scale, CHUNK, BLOCK, 0>>(int8),
            Format::Int4(_) => self.on::<_, Ints<Nibbles, F16Scale, CHUNK, CHUNK, 0>>(int8),
            Format::Int4Asym(g) if blocks(g) => self.on::<_, Ints<Nibbles, F16Scale, CHUNK, BLOCK, 1>>(int8),
            Format::Int4Asym(_) => self.on::<_, Ints<Nibbles, F16Scale, CHUNK, CHUNK, 1>>(int8),
            Format::Mxfp4 => self.on::<_, Ints<E2m1, E8m0Scale, CHUNK, CHUNK, 0>>(int8),
            Format::Nvfp4 => self.on::<_, Ints<E2m1, E4m3Scale, { mx::NV_COLS }, { mx::NV_COLS }, 0>>(int8),
            other => unreachable!("{other} was never accepted"),
        }
    }
}

impl Product<'_> {
    fn on<I: Isa, K: Path<I>>(self, isa: I) {
        let Outputs { of: weights, range, next } = self.outputs;
        let layout = Layout::new(weights.format(), weights.cols());
        let packed = &weights.bytes()[range.start / PANEL * layout.panel_bytes()..];
        let (n, width) = (self.rows.len(), range.len());
        // The panels after those that begin with `at`: of this product, or of the next one.
        let following = |at: &[u8], panels: usize, done: usize| match next {
            Some((weights, first)) if done + panels * PANEL >= width => {
                let panel = Layout::new(weights.format(), weights.cols()).panel_bytes();
                weights.bytes().as_ptr().wrapping_add(first / PANEL * panel)
            }
            _ => at.as_ptr().wrapping_add(panels * layout.panel_bytes()),
        };
        let block_bytes = self.inputs.layout().block_bytes();
        let input_stride = self.inputs.rows() * block_bytes;
        let first_row = self.rows.start * block_bytes;
        let inputs = &self.inputs.bytes()[first_row..];
        // A tile of some panels from block `start` on, of all rows.
        let part = |panel: usize, start: usize, blocks: usize| {
            let scales = &packed[panel * layout.panel_bytes() + layout.weight_bytes..];
            let group = layout.group.unwrap_or(BLOCK);
            Tile {
                weights: &[],
                weight_stride: layout.panel_bytes(),
                scales,
                scale_stride: layout.panel_bytes(),
                group_at: layout.groups_at + start * BLOCK / group * layout.record,
                group,
                group_left: group - start * BLOCK % group,
                inputs: &inputs[start * input_stride..],
                input_stride,
                blocks,
                out: &mut [],
                out_stride: width,
                width: 0,
                fetch: std::ptr::null(),
                fetch_stride: 0,
                fetch_lines: 0,
                first: start == 0,
                last: start + blocks == layout.blocks,
            }
        };
        // Panels to do next: `most`, or one where fewer are left.
        let next_panels = |done: usize, most: usize| if (width - done).div_ceil(PANEL) >= most { most } else { 1 };
        let mut done = 0;
        if n <= stream_rows(I::LARGE) {
            while done < width {
                let panels = next_panels(done, stream_panels(I::LARGE, K::LIGHT, n));
                let lines = &packed[done / PANEL * layout.panel_bytes()..];
                let tile = Tile {
                    weights: lines,
                    fetch: following(lines, panels, done),
                    out: &mut self.out[done..],
                    width: (width - done).min(panels * PANEL),
                    ..part(done / PANEL, 0, layout.blocks)
                };
                K::stream(isa, n, panels, tile);
                done += panels * PANEL;
            }
            return;
        }

        let unpack = K::Lines::OPERANDS > 1;
        let most_panels = if I::LARGE { 2 } else { 1 };
        let packed_block = layout.weight_bytes / layout.blocks;
        let operand_block = packed_block * K::Lines::OPERANDS;
        let most_blocks = (CACHED / (most_panels * operand_block)).clamp(1, layout.blocks);
        let unpacked_stride = most_blocks * operand_block;
        let buffer = self.scratch.panel.get(if unpack { most_panels * unpacked_stride } else { 0 });
        // Tiles of rows that differ by one row at most.
        let tiles = n.div_ceil(K::ROWS);
        while done < width {
            let panels = next_panels(done, most_panels);
            let lines = &packed[done / PANEL * layout.panel_bytes()..];
            for start in (0..layout.blocks).step_by(most_blocks) {
                let blocks = most_blocks.min(layout.blocks - start);
                let here = start * packed_block..(start + blocks) * packed_block;
                if unpack {
                    for p in 0..panels {
                        let from = &lines[p * layout.panel_bytes()..][here.clone()];
                        let to = &mut buffer[p * unpacked_stride..][..blocks * operand_block];
                        isa.run(Unpack::<K::Lines> { from, to, lines: PhantomData });
                    }
                }
                // What comes next, a piece with each block of each tile: the next columns, or the first ones of the next panels.
                let (ahead, bytes) = if start + blocks < layout.blocks {
                    let bytes = most_blocks.min(layout.blocks - start - blocks) * packed_block;
                    (lines.as_ptr().wrapping_add(here.end), bytes)
                } else {
                    (following(lines, panels, done), most_blocks * packed_block)
                };
                let fetch_lines = (bytes / LINE).div_ceil(tiles * blocks);
                for i in 0..tiles {
                    let rows = n * i / tiles..n * (i + 1) / tiles;
                    let part = part(done / PANEL, start, blocks);
                    let tile = Tile {
                        weights: if unpack { &*buffer } else { &lines[here.start..] },
                        weight_stride: if unpack { unpacked_stride } else { layout.panel_bytes() },
                        inputs: &part.inputs[rows.start * block_bytes..],
                        out: &mut self.out[rows.start * width + done..],
                        width: (width - done).min(panels * PANEL),
                        fetch: ahead.wrapping_add(i * blocks * fetch_lines * LINE),
                        fetch_stride: layout.panel_bytes(),
                        fetch_lines,
                        ..part
                    };
                    K::cached(isa, rows.len(), panels, tile);
                }
            }
            done += panels * PANEL;
        }
    }
}
