//! How matrices are packed.
//!
//! ```text
//! matrix   panel of outputs 0..16 | panel of outputs 16..32 | …          outputs padded to 16
//! panel    lines of 64 bytes along k | row scales | group or tile scales  k padded to 128; sections padded to 64 bytes
//! ```
//!
//! | formats | a line | scales of a panel |
//! | --- | --- | --- |
//! | F32 | 16 outputs x 1 k | none |
//! | F16 | 16 outputs of one k, then 16 of the next | none |
//! | BF16 | 16 outputs x 2 k | none |
//! | FP8, MXFP8 | 16 outputs x 4 k, codes | per channel: 16 F32; 128x128: an F32 per 128 k; MXFP8: 16 E8M0 per 32 k |
//! | INT8 | 16 outputs x 4 k, unsigned codes | 16 F32, and for groups a record each: 16 F16, then 16 zero points as I16 |
//! | INT4 | 16 outputs x 8 k, unsigned codes: k 0..4 in the low nibbles, k 4..8 in the high ones | as INT8, zero points as bytes |
//! | MXFP4, NVFP4 | as INT4, E2M1 codes | 16 F32, and per 32 k 16 E8M0, or per 16 k 16 E4M3 |
//!
//! An unpacked line (INT4, MXFP4 and NVFP4 give two of 16 x 4 bytes, FP8 two of 16 x 2 BF16) is an operand of `vpdpbusd` or
//! `vdpbf16ps`, and a row of an AMX B tile. In an FP8 line each 128-bit lane holds 4 outputs x k 0..2, then the same outputs x
//! k 2..4, because interleaving low and high bytes of BF16 numbers works within halves of a lane. E2M1 codes stand for halves, so
//! that twice their values are integers; the F32 scale of an output takes the factor back.
//!
//! NaN codes of FP8 and MXFP8 (0x7f, 0xff) are finite (480) once they are BF16. So packing makes the scale of what
//! they are in NaN: of the output, of the output's 32 columns, or of the 128 columns of the panel. An output whose weights contain a NaN
//! is NaN for every input; with blocks of 128x128, so are the others of its panel.
//!
//! Weights are stored unsigned since `vpdpbusd` wants one unsigned operand; inputs are signed. The zero point is subtracted by
//! starting each sum at minus zero point times the sum of the input codes.
//!
//! Group scales are bandwidth. Those of one byte stay as they are. Others take two bytes whatever the checkpoint has: F16 relative
//! to a power of two per output, which is exact for BF16 and F16 scales (unless one output's scales span more than 2^28), and rounds
//! F32 scales to 11 bits (2.4e-4 at most, a twentieth of what rounding inputs to int8 costs). An output with one scale keeps it as F32.

use std::ops::Range;

use half::f16;
use kt_core::cpu::input::BLOCK;
use kt_core::format::mx;
use kt_core::{Format, Group, Matrix};

/// The version of everything said above, and of how scales are rounded. Packed weights are kept on disk with it: raise it with any
/// change of the bytes.
pub(crate) const VERSION: u32 = 1;

/// What version [`VERSION`] makes of fixed matrices: checksums, by format. A test compares; it prints this table as it should be.
#[cfg(test)]
pub(crate) const PACKED: &[(&str, u64)] = &[
    ("F32", 0xa936ba2df01695d1),
    ("F16", 0xc508e4065fd68614),
    ("BF16", 0x9e41c86f8170dc03),
    ("FP8-block", 0x117daffa8dbf681b),
    ("FP8-channel", 0x226bd9d734990af2),
    ("INT8-channel", 0x17a0cabc1d53d2a0),
    ("INT8-g32", 0x9f64faa53c069860),
    ("INT8-g128", 0x3fefee76d4798496),
    ("INT8-offset-channel", 0x25ec9147f31dc132),
    ("INT8-offset-g128", 0x396f4d8a155d30e2),
    ("INT8-asym-channel", 0xa077a8987a56bf44),
    ("INT8-asym-g32", 0xf13ebebb4afdf8a4),
    ("INT8-asym-g128", 0x84fb87ef8460f1e1),
    ("INT4-channel", 0x384f7990d7a40a64),
    ("INT4-g32", 0x445d221c8fed0088),
    ("INT4-g64", 0xefba3d9cb3af50e6),
    ("INT4-g128", 0x85e5920f0fd70786),
    ("INT4-asym-channel", 0xca232f5d02fceb9c),
    ("INT4-asym-g32", 0x26693f46d54612dc),
    ("INT4-asym-g128", 0x9bb2ae64a6897a49),
    ("MXFP4", 0xd70956741c8e3263),
    ("MXFP8", 0xfebeea0f7bb631dd),
    ("NVFP4", 0x04095d1ed7c74349),
    ("INT4-g96", 0xda5b1209e8f3bddf),
];

/// Outputs of a panel.
pub const PANEL: usize = 16;
/// Bytes of a line.
pub const LINE: usize = 64;
/// Columns that share a record above those of groups, in formats that have two levels of scales.
pub const SUPER: usize = 256;
/// Columns per scale of the inputs that most grouped weights are multiplied with; their groups are multiples of it.
pub(crate) const CHUNK: usize = 32;

/// Where things are in a packed matrix, and in each of its panels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Blocks of 128 columns.
    pub blocks: usize,
    /// Bytes of each plane of lines of a block.
    pub planes: [usize; 2],
    /// Where the scales of outputs begin in a panel: after all lines.
    pub outputs_at: usize,
    /// Where the scales of groups or blocks begin in a panel.
    pub groups_at: usize,
    /// Columns that share a scale (and a zero point), for formats with scales of groups or blocks.
    pub group: Option<usize>,
    /// Bytes of the scales of one group of all outputs of a panel.
    pub record: usize,
    /// Where the records of [`SUPER`] columns begin in a panel, if there are any.
    pub supers_at: usize,
    /// Bytes from one panel to the next.
    pub panel_bytes: usize,
}

impl Layout {
    /// The layout of a matrix of an accepted format.
    pub fn new(format: Format, cols: usize) -> Self {
        let blocks = cols.div_ceil(BLOCK);
        let padded = blocks * BLOCK;
        let outputs = PANEL * 4;
        let of = |g: Group, record: usize| match g {
            Group::Row => (outputs, None, 0),
            Group::Of(g) => (outputs, Some(g as usize), record * PANEL),
        };
        let asymmetric = |g: Group, record: usize| (outputs, Some(g.cols(padded)), record * PANEL);
        let (bits, (groups_at, group, record)) = match format {
            Format::F32 => (32, (0, None, 0)),
            Format::F16 | Format::Bf16 => (16, (0, None, 0)),
            Format::Fp8Channel => (8, (outputs, None, 0)),
            Format::Fp8Block => (8, (0, Some(BLOCK), 4)),
            Format::Mxfp8 => (8, (0, Some(mx::COLS), PANEL)),
            Format::Int4(g) => (4, of(g, 2)),
            Format::Int4Asym(g) => (4, asymmetric(g, 3)),
            Format::Int8Asym(g) => (8, asymmetric(g, 4)),
            Format::Mxfp4 => (4, (outputs, Some(mx::COLS), PANEL)),
            Format::Nvfp4 => (4, (outputs, Some(mx::NV_COLS), PANEL)),
            Format::Int8(g) | Format::Int8Offset(g) => (8, of(g, 2)),
            _ => (8, (outputs, None, 0)),
        };
        let records = group.map_or(0, |g| padded.div_ceil(g));
        let outputs_at = PANEL * padded * bits / 8;
        let supers_at = outputs_at + (groups_at + records * record).next_multiple_of(LINE);
        Layout {
            blocks,
            planes: [PANEL * BLOCK * bits / 8, 0],
            outputs_at,
            groups_at: outputs_at + groups_at,
            group,
            record,
            supers_at,
            panel_bytes: supers_at,
        }
    }

    /// Where the bytes of some blocks are in a panel: in each plane, in the scales, and in the records of [`SUPER`] columns. Scales of
    /// outputs count as if each block had some.
    pub(crate) fn parts(&self, blocks: Range<usize>) -> [Range<usize>; 4] {
        let ends = [self.blocks * self.planes[0], self.outputs_at, self.supers_at, self.panel_bytes];
        let mut start = 0;
        ends.map(|end| {
            let first = std::mem::replace(&mut start, end);
            let at = |block: usize| first + (end - first) * block / self.blocks;
            at(blocks.start)..at(blocks.end)
        })
    }
}

/// Packs rows `rows` of `matrix` into `out`, which is zeroed.
pub(crate) fn pack(matrix: &Matrix, rows: Range<usize>, out: &mut [u8]) {
    let format = matrix.format();
    let layout = Layout::new(format, matrix.cols());
    for (first, out) in rows.clone().step_by(PANEL).zip(out.chunks_exact_mut(layout.panel_bytes)) {
        let outputs = PANEL.min(rows.end - first);
        let (lines, scales) = out.split_at_mut(layout.outputs_at);
        for o in 0..outputs {
            let codes = matrix.row(first + o);
            match format {
                Format::Int8(_) => each_dword(codes, lines, o * 4, |v| (v ^ 0x8080_8080).to_le_bytes()),
                Format::Int4(_) | Format::Int4Asym(_) | Format::Mxfp4 | Format::Nvfp4 => {
                    each_dword(codes, lines, o * 4, split_nibbles)
                }
                Format::Fp8Block | Format::Fp8Channel | Format::Mxfp8 => {
                    let at = o / 4 * 16 + o % 4 * 2;
                    each_dword(codes, lines, [at, at + 8], u32::to_le_bytes);
                }
                Format::F16 => each_dword(codes, lines, [o * 2, o * 2 + LINE / 2], u32::to_le_bytes),
                _ => each_dword(codes, lines, o * 4, u32::to_le_bytes),
            }
        }
        pack_scales(matrix, layout, first, outputs, scales);
    }
}

/// Where in a line four bytes go: together, or two and two.
trait Place: Copy {
    fn put(self, line: &mut [u8], v: [u8; 4]);
}

impl Place for usize {
    fn put(self, line: &mut [u8], v: [u8; 4]) {
        line[self..self + 4].copy_from_slice(&v);
    }
}

impl Place for [usize; 2] {
    fn put(self, line: &mut [u8], v: [u8; 4]) {
        line[self[0]..self[0] + 2].copy_from_slice(&v[..2]);
        line[self[1]..self[1] + 2].copy_from_slice(&v[2..]);
    }
}

/// Writes the dwords of a row, transformed, to the same place of consecutive lines.
fn each_dword(row: &[u8], lines: &mut [u8], at: impl Place, f: impl Fn(u32) -> [u8; 4]) {
    for (v, line) in dwords(row).zip(lines.chunks_exact_mut(LINE)) {
        at.put(line, f(v));
    }
}

/// A row's bytes four at a time, the last ones padded with zeros.
fn dwords(row: &[u8]) -> impl Iterator<Item = u32> + '_ {
    let (whole, rest) = row.as_chunks::<4>();
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    let tail = (!rest.is_empty()).then_some(u32::from_le_bytes(last));
    whole.iter().map(|b| u32::from_le_bytes(*b)).chain(tail)
}

/// Nibbles k = 0..8 of a dword, lowest first, to bytes with k in the low and k + 4 in the high nibble.
fn split_nibbles(v: u32) -> [u8; 4] {
    let spread = |v: u32| {
        let v = (v | v << 8) & 0x00ff_00ff;
        (v | v << 4) & 0x0f0f_0f0f
    };
    (spread(v & 0xffff) | spread(v >> 16) << 4).to_le_bytes()
}

fn pack_scales(matrix: &Matrix, layout: Layout, first: usize, outputs: usize, out: &mut [u8]) {
    let Some(scales) = matrix.scales() else { return };
    let mut put = |i: usize, v: f32| out[i * 4..][..4].copy_from_slice(&v.to_le_bytes());
    let format = matrix.format();
    // Whether there are NaN codes among columns `group` of some that share a scale.
    let nan = |o: usize, group: usize, of: usize| {
        let codes = matrix.row(first + o);
        has_nan(&codes[(group * of).min(codes.len())..((group + 1) * of).min(codes.len())])
    };
    let base: Vec<f32> = match format {
        Format::Fp8Block => {
            // 16 divides 128: all outputs of a panel are in one row of tiles.
            for tile in 0..scales.cols() {
                let poisoned = (0..outputs).any(|o| nan(o, tile, BLOCK));
                let scale = scales.get(first / kt_core::format::fp8::TILE, tile);
                put(tile, if poisoned { f32::NAN } else { scale });
            }
            return;
        }
        Format::Fp8Channel => (0..outputs)
            .map(|o| if nan(o, 0, matrix.cols()) { f32::NAN } else { base_scale(scales, first + o) })
            .collect(),
        Format::Mxfp8 => Vec::new(),
        // Codes are twice the values.
        Format::Mxfp4 => vec![0.5; outputs],
        // And the scales are read as 2^-8 of theirs.
        Format::Nvfp4 => vec![128.0 * scales.factor(); outputs],
        _ => (0..outputs).map(|o| base_scale(scales, first + o)).collect(),
    };
    for (o, &base) in base.iter().enumerate() {
        put(o, base);
    }
    let groups = if layout.record > 0 { scales.cols() } else { 0 };
    for (g, out) in
        out[layout.groups_at - layout.outputs_at..].chunks_exact_mut(layout.record.max(1)).enumerate().take(groups)
    {
        for o in 0..outputs {
            match format {
                Format::Mxfp8 if nan(o, g, mx::COLS) => out[o] = 255,
                Format::Mxfp4 | Format::Mxfp8 | Format::Nvfp4 => out[o] = scales.byte(first + o, g),
                _ => {
                    let relative = if scales.cols() == 1 { 1.0 } else { scales.get(first + o, g) / base[o] };
                    out[o * 2..][..2].copy_from_slice(&f16::from_f32(relative).to_le_bytes());
                }
            }
            let zero = matrix.zero_point(first + o, g);
            match format {
                Format::Int4Asym(_) => out[PANEL * 2 + o] = zero as u8,
                Format::Int8Asym(_) => {
                    out[PANEL * 2 + o * 2..][..2].copy_from_slice(&(zero as i16).to_le_bytes());
                }
                _ => {}
            }
        }
    }
}

/// Whether there is a NaN among E4M3 codes.
fn has_nan(codes: &[u8]) -> bool {
    // No early exit, so that it vectorizes.
    codes.iter().fold(false, |nan, &c| nan | (c & 0x7f == 0x7f))
}

/// What an output's group scales are relative to: its only scale, or a power of two that brings the largest to 2^14..2^15.
fn base_scale(scales: &kt_core::format::Scales, row: usize) -> f32 {
    if scales.cols() == 1 {
        return scales.get(row, 0);
    }
    let largest = (0..scales.cols()).map(|g| scales.get(row, g).abs()).fold(0f32, f32::max);
    let exponent = (largest.to_bits() >> 23) as i32 - 127;
    // The base must be a normal number; scales below 2^-112 lose bits of no consequence.
    if largest == 0.0 || !largest.is_finite() { 1.0 } else { 2f32.powi((exponent - 14).max(-126)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nibbles_are_split_by_fours() {
        assert_eq!(split_nibbles(0x7654_3210), [0x40, 0x51, 0x62, 0x73]);
    }

    #[test]
    fn parts_of_all_blocks_are_the_panel() {
        // Two planes and records of 256 columns as well, which no format of this crate has.
        let two = Layout {
            planes: [1024, 256],
            outputs_at: 9 * 1280,
            groups_at: 9 * 1280,
            ..Layout::new(Format::Mxfp4, 1100)
        };
        let two = Layout { supers_at: two.groups_at + 640, panel_bytes: two.groups_at + 640 + 320, ..two };
        let others =
            [(Format::Bf16, 100), (Format::Int4(Group::Of(32)), 704), (Format::Fp8Block, 2048), (Format::Mxfp8, 2880)];
        for layout in others.map(|(format, cols)| Layout::new(format, cols)).into_iter().chain([two]) {
            let whole = layout.parts(0..layout.blocks);
            assert_eq!((whole[0].start, whole[3].end), (0, layout.panel_bytes), "{layout:?}");
            assert!(whole.windows(2).all(|w| w[0].end == w[1].start), "{layout:?}");
            let plane = layout.blocks * layout.planes[0];
            assert_eq!((whole[0].end, whole[1].end, whole[2].end), (plane, layout.outputs_at, layout.supers_at));
            for cut in 0..=layout.blocks {
                let (before, after) = (layout.parts(0..cut), layout.parts(cut..layout.blocks));
                for i in 0..4 {
                    assert_eq!(before[i].start..after[i].end, whole[i]);
                    assert_eq!(before[i].end, after[i].start);
                }
                // Lines are where products look for them.
                assert_eq!(before[0].end, cut * layout.planes[0]);
                assert_eq!(before[1].end, plane + cut * layout.planes[1]);
            }
        }
    }

    #[test]
    fn sizes_are_what_the_formats_need() {
        let bytes = |f, cols| Layout::new(f, cols).panel_bytes;
        assert_eq!(bytes(Format::Bf16, 128), 16 * 128 * 2);
        assert_eq!(bytes(Format::Int4(Group::Of(32)), 2048), 16 * 1024 + 64 + 64 * 32);
        assert_eq!(bytes(Format::Int8(Group::Row), 129), 16 * 256 + 64);
        assert_eq!(bytes(Format::Fp8Block, 2048), 16 * 2048 + 64);
        assert_eq!(bytes(Format::Fp8Channel, 704), 16 * 768 + 64);
    }
}
