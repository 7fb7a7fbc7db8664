//! The product on AVX2: which register tiles, in which order.
//!
//! As in `crate::product`, rows are gathered first and panels are outermost. Few rows are one tile that reads each line once and
//! unpacks it in registers; more rows are several tiles, all but the first reading lines from cache. FP8 lines, whose unpacking costs
//! as much as four rows of products, are unpacked into cache once for all tiles, INT4 lines from [`UNPACKED_ROWS`] rows on.

#![allow(unsafe_code)] // kernel

use std::ops::Range;

use kt_core::cpu::input::{BLOCK, Inputs};
use kt_core::cpu::kernel::{Scratch, Weights};
use kt_core::{Format, Group};

use super::tile::{DIRECT, FP8, NIBBLES, bf16_tile, int8_tile, operands_of, unpack};
use crate::layout::{CHUNK, Layout, PANEL};
use crate::product::{gather, zero_point};
use crate::tile::Tile;

/// Most rows of a tile: their sums take 12 of 16 registers.
const TILE_ROWS: usize = 6;
/// Rows from which INT4 lines are unpacked once for all tiles.
const UNPACKED_ROWS: usize = 25;

/// Panels at once for a tile of some rows: their sums take at most 12 registers too, and 8 hide the latency of adding them.
fn panels_for(rows: usize) -> usize {
    match rows {
        1 => 4,
        2..=3 => 2,
        _ => 1,
    }
}

/// Runs a tile of so many rows and panels.
type TileFn = unsafe fn(usize, usize, Tile<'_>);

/// A number path: its tiles as a function of rows and panels, on lines as stored and on unpacked ones.
struct Path {
    /// How lines are stored.
    lines: u8,
    /// Runs a tile on them.
    tile: TileFn,
    /// How lines are unpacked once for all tiles, if they ever are.
    unpacked: Option<Unpacked>,
    /// Input codes are widened to words.
    wide: bool,
}

/// Unpacking once for all tiles.
struct Unpacked {
    /// The number of rows from which it pays.
    from_rows: usize,
    /// Unpacks a panel.
    unpack: unsafe fn(&[u8], &mut [u8]),
    /// Runs a tile of one unpacked panel.
    tile: TileFn,
}

/// A function of rows and panels that runs `$tile` with R and P set to them: a `match` over the shapes that are compiled.
macro_rules! shapes {
    (all, $tile:expr) => {
        shapes!([1 x 4, 1 x 2, 1 x 1, 2 x 2, 2 x 1, 3 x 2, 3 x 1, 4 x 1, 5 x 1, 6 x 1], $tile)
    };
    (many, $tile:expr) => {
        shapes!([3 x 1, 4 x 1, 5 x 1, 6 x 1], $tile)
    };
    ([$($rows:literal x $panels:literal),*], $tile:expr) => {{
        #[target_feature(enable = "avx2,fma,f16c")]
        fn dispatch(r: usize, p: usize, t: Tile<'_>) {
            match (r, p) {
                $(($rows, $panels) => {
                    const R: usize = $rows;
                    const P: usize = $panels;
                    $tile(t);
                })*
                (r, p) => unreachable!("no register tile of {r} rows x {p} panels"),
            }
        }
        dispatch as TileFn
    }};
}

fn path(format: Format) -> Path {
    let plain = |tile, wide| Path { lines: DIRECT, tile, unpacked: None, wide };
    match format {
        Format::Bf16 => plain(shapes!(all, bf16_tile::<DIRECT, false, false, R, P>), false),
        Format::Fp8Channel => Path {
            lines: FP8,
            tile: shapes!(all, bf16_tile::<FP8, false, true, R, P>),
            unpacked: Some(Unpacked {
                from_rows: TILE_ROWS + 1,
                unpack: unpack::<FP8>,
                tile: shapes!(many, bf16_tile::<DIRECT, false, true, R, P>),
            }),
            wide: false,
        },
        Format::Fp8Block => Path {
            lines: FP8,
            tile: shapes!(all, bf16_tile::<FP8, true, false, R, P>),
            unpacked: Some(Unpacked {
                from_rows: TILE_ROWS + 1,
                unpack: unpack::<FP8>,
                tile: shapes!(many, bf16_tile::<DIRECT, true, false, R, P>),
            }),
            wide: false,
        },
        Format::Int8(Group::Row) | Format::Int8Offset(Group::Row) => {
            plain(shapes!(all, int8_tile::<DIRECT, true, BLOCK, false, R, P>), true)
        }
        Format::Int8(_) | Format::Int8Offset(_) => {
            plain(shapes!(all, int8_tile::<DIRECT, true, CHUNK, true, R, P>), true)
        }
        Format::Int4(_) => Path {
            lines: NIBBLES,
            tile: shapes!(all, int8_tile::<NIBBLES, false, CHUNK, true, R, P>),
            unpacked: Some(Unpacked {
                from_rows: UNPACKED_ROWS,
                unpack: unpack::<NIBBLES>,
                tile: shapes!(many, int8_tile::<DIRECT, false, CHUNK, true, R, P>),
            }),
            wide: false,
        },
        other => unreachable!("{other} was never accepted"),
    }
}

/// See [`kt_core::cpu::kernel::Kernel::product`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn product(
    weights: &Weights,
    outputs: Range<usize>,
    x: Inputs<'_>,
    rows: &[u32],
    out: &mut [f32],
    scratch: &mut Scratch,
) {
    assert_eq!(out.len(), rows.len() * outputs.len(), "output of another shape");
    assert!(outputs.start.is_multiple_of(PANEL) && outputs.end <= weights.rows(), "outputs out of range");
    if out.is_empty() {
        return;
    }
    let path = path(weights.format());
    let layout = Layout::new(weights.format(), weights.cols());
    let n = rows.len();
    let block_bytes = x.layout().block_bytes() + if path.wide { BLOCK } else { 0 };
    let row_bytes = layout.blocks * block_bytes;
    let unpacked = path.unpacked.filter(|u| n >= u.from_rows);
    let unpacked_bytes = if unpacked.is_some() { layout.weight_bytes * operands_of(path.lines) } else { 0 };
    let (buffer, inputs) = scratch.panel.get(unpacked_bytes + n * row_bytes).split_at_mut(unpacked_bytes);

    // Tiles of rows that differ by one row at most.
    let tiles = n.div_ceil(TILE_ROWS);
    let panels_at_once = panels_for(n.div_ceil(tiles));
    let tile_rows = |i: usize| n * i / tiles..n * (i + 1) / tiles;
    let zero_point = zero_point(weights.format());
    for i in 0..tiles {
        let picked = tile_rows(i);
        let to = &mut inputs[picked.start * row_bytes..picked.end * row_bytes];
        if path.wide {
            gather_wide(x, &rows[picked], zero_point, to);
        } else {
            gather(x, &rows[picked], zero_point, to);
        }
    }

    let width = outputs.len();
    let packed = &weights.bytes()[outputs.start / PANEL * layout.panel_bytes()..];
    let mut done = 0;
    while done < width {
        // 4, 2 or 1: what is left over is done in smaller steps.
        let left = (width - done).div_ceil(PANEL);
        let panels = panels_at_once.min(1 << left.ilog2());
        let lines = &packed[done / PANEL * layout.panel_bytes()..][..panels * layout.panel_bytes()];
        if let Some(u) = &unpacked {
            // SAFETY: this function has the instructions; more than one tile means one panel at once.
            unsafe { (u.unpack)(&lines[..layout.weight_bytes], buffer) };
        }
        for i in 0..tiles {
            let picked = tile_rows(i);
            let tile = Tile {
                weights: if unpacked.is_some() { &*buffer } else { lines },
                weight_stride: layout.panel_bytes(),
                scales: &lines[layout.weight_bytes..],
                scale_stride: layout.panel_bytes(),
                group: layout.group.unwrap_or(0),
                inputs: &inputs[picked.start * row_bytes..picked.end * row_bytes],
                blocks: layout.blocks,
                out: &mut out[picked.start * width + done..],
                out_stride: width,
                width: (width - done).min(panels * PANEL),
            };
            let run = unpacked.as_ref().map_or(path.tile, |u| u.tile);
            // SAFETY: this function has the instructions.
            unsafe { run(picked.len(), panels, tile) };
        }
        done += panels * PANEL;
    }
}

/// As [`gather`], with the codes of each four columns as words: 0, 2, 1, 3, which is how `vpmaddwd` meets the even and the odd bytes
/// of weights.
#[target_feature(enable = "avx2,fma,f16c")]
fn gather_wide(x: Inputs<'_>, rows: &[u32], zero_point: i32, to: &mut [u8]) {
    let bytes = x.layout().block_bytes();
    let mut to = to.chunks_exact_mut(bytes + BLOCK);
    for block in 0..x.blocks() {
        for (&row, to) in rows.iter().zip(&mut to) {
            let (codes, rest) = x.block(block, row as usize).split_at(BLOCK);
            let (words, rest_to) = to.split_at_mut(BLOCK * 2);
            for (code, words) in codes.as_chunks::<4>().0.iter().zip(words.as_chunks_mut::<8>().0) {
                for (word, k) in words.as_chunks_mut::<2>().0.iter_mut().zip([0, 2, 1, 3]) {
                    *word = i16::from(code[k] as i8).to_le_bytes();
                }
            }
            // Scales, then sums.
            rest_to.copy_from_slice(rest);
            for sum in rest_to[rest.len() / 2..].as_chunks_mut::<4>().0 {
                *sum = (i32::from_le_bytes(*sum) * -zero_point).to_le_bytes();
            }
        }
    }
}
