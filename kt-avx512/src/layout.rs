//! How matrices are packed.
//!
//! ```text
//! matrix   panel of outputs 0..16 | panel of outputs 16..32 | …          outputs padded to 16
//! panel    lines of 64 bytes along k | row scales | group or tile scales  k padded to 128; sections padded to 64 bytes
//! ```
//!
//! | formats | a line | scales of a panel |
//! | --- | --- | --- |
//! | BF16 | 16 outputs x 2 k, BF16 | none |
//! | FP8 | 16 outputs x 4 k, codes | per channel: 16 F32; 128x128: an F32 per 128 k |
//! | INT8 | 16 outputs x 4 k, code + 128 | 16 F32, and for groups: 16 F16 per group |
//! | INT4 | 16 outputs x 8 k, code + 8: k 0..4 in the low nibbles, k 4..8 in the high ones | as INT8 |
//!
//! An unpacked line (INT4 gives two of 16 x 4 bytes, FP8 two of 16 x 2 BF16) is an operand of `vpdpbusd` or `vdpbf16ps`, and a
//! row of an AMX B tile. In an FP8 line each 128-bit lane holds 4 outputs x k 0..2, then the same outputs x k 2..4, because
//! interleaving low and high bytes of BF16 numbers works within halves of a lane.
//!
//! Weights are stored unsigned since `vpdpbusd` wants one unsigned operand; inputs are signed. The zero point is subtracted by
//! starting each sum at minus zero point times the sum of the input codes.
//!
//! Group scales are bandwidth, so they take two bytes whatever the checkpoint has: F16 relative to a power of two per output,
//! which is exact for BF16 and F16 scales (unless one output's scales span more than 2^28), and rounds F32 scales to 11 bits
//! (2.4e-4 at most, a twentieth of what rounding inputs to int8 costs). An output with one scale keeps it as F32.

use half::f16;
use kt_core::cpu::input::BLOCK;
use kt_core::{Format, Group, Matrix};

/// Outputs of a panel.
pub(crate) const PANEL: usize = 16;
/// Bytes of a line.
pub(crate) const LINE: usize = 64;
/// Columns per scale of the inputs that grouped weights are multiplied with; weight groups are multiples of it.
pub(crate) const CHUNK: usize = 32;

/// Where things are in a packed matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Blocks of 128 columns.
    pub blocks: usize,
    /// Bytes of a panel's lines.
    pub weight_bytes: usize,
    /// Bytes of a panel's scales.
    pub scale_bytes: usize,
    /// Columns that share a scale, for formats with group scales.
    pub group: Option<usize>,
}

impl Layout {
    /// The layout of a matrix of an accepted format.
    pub fn new(format: Format, cols: usize) -> Self {
        let blocks = cols.div_ceil(BLOCK);
        let padded = blocks * BLOCK;
        let group = match format {
            Format::Int8(Group::Of(g)) | Format::Int8Offset(Group::Of(g)) | Format::Int4(Group::Of(g)) => {
                Some(g as usize)
            }
            Format::Int4(Group::Row) => Some(padded),
            _ => None,
        };
        let scale_bytes = match format {
            Format::Fp8Block => blocks * 4,
            Format::Bf16 => 0,
            _ => PANEL * 4 + group.map_or(0, |g| padded.div_ceil(g) * PANEL * 2),
        };
        let bits = match format {
            Format::Bf16 => 16,
            Format::Int4(_) => 4,
            _ => 8,
        };
        Layout {
            blocks,
            weight_bytes: PANEL * padded * bits / 8,
            scale_bytes: scale_bytes.next_multiple_of(LINE),
            group,
        }
    }

    /// Bytes from one panel to the next.
    pub fn panel_bytes(&self) -> usize {
        self.weight_bytes + self.scale_bytes
    }
}

/// Packs `matrix` into `out`, which is zeroed.
pub(crate) fn pack(matrix: &Matrix, out: &mut [u8]) {
    let format = matrix.format();
    let layout = Layout::new(format, matrix.cols());
    for (panel, out) in out.chunks_exact_mut(layout.panel_bytes()).enumerate() {
        let first = panel * PANEL;
        let outputs = PANEL.min(matrix.rows() - first);
        let (lines, scales) = out.split_at_mut(layout.weight_bytes);
        for o in 0..outputs {
            let codes = matrix.row(first + o);
            match format {
                Format::Int8(_) => each_dword(codes, lines, o * 4, |v| (v ^ 0x8080_8080).to_le_bytes()),
                Format::Int4(_) => each_dword(codes, lines, o * 4, split_nibbles),
                Format::Fp8Block | Format::Fp8Channel => pack_fp8(codes, lines, o),
                _ => each_dword(codes, lines, o * 4, u32::to_le_bytes),
            }
        }
        pack_scales(matrix, layout, first, outputs, scales);
    }
}

/// Writes the dwords of a row, transformed, to the same place of consecutive lines.
fn each_dword(row: &[u8], lines: &mut [u8], at: usize, f: impl Fn(u32) -> [u8; 4]) {
    for (v, line) in dwords(row).zip(lines.chunks_exact_mut(LINE)) {
        line[at..at + 4].copy_from_slice(&f(v));
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

fn pack_fp8(row: &[u8], lines: &mut [u8], output: usize) {
    let at = output / 4 * 16 + output % 4 * 2;
    for (v, line) in dwords(row).zip(lines.chunks_exact_mut(LINE)) {
        let b = v.to_le_bytes();
        line[at..at + 2].copy_from_slice(&b[..2]);
        line[at + 8..at + 10].copy_from_slice(&b[2..]);
    }
}

fn pack_scales(matrix: &Matrix, layout: Layout, first: usize, outputs: usize, out: &mut [u8]) {
    let Some(scales) = matrix.scales() else { return };
    let mut put = |i: usize, v: f32| out[i * 4..][..4].copy_from_slice(&v.to_le_bytes());
    if matrix.format() == Format::Fp8Block {
        // 16 divides 128: all outputs of a panel are in one row of tiles.
        for tile in 0..scales.cols() {
            put(tile, scales.get(first / kt_core::format::fp8::TILE, tile));
        }
        return;
    }
    let base: Vec<f32> = (0..outputs).map(|o| base_scale(scales, first + o)).collect();
    for (o, &base) in base.iter().enumerate() {
        put(o, base);
    }
    if layout.group.is_some() {
        for (g, out) in out[PANEL * 4..].chunks_exact_mut(PANEL * 2).enumerate().take(scales.cols()) {
            for (o, &base) in base.iter().enumerate() {
                let relative = if scales.cols() == 1 { 1.0 } else { scales.get(first + o, g) / base };
                out[o * 2..][..2].copy_from_slice(&f16::from_f32(relative).to_le_bytes());
            }
        }
    }
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
    fn sizes_are_what_the_formats_need() {
        let bytes = |f, cols| Layout::new(f, cols).panel_bytes();
        assert_eq!(bytes(Format::Bf16, 128), 16 * 128 * 2);
        assert_eq!(bytes(Format::Int4(Group::Of(32)), 2048), 16 * 1024 + 64 + 64 * 32);
        assert_eq!(bytes(Format::Int8(Group::Row), 129), 16 * 256 + 64);
        assert_eq!(bytes(Format::Fp8Block, 2048), 16 * 2048 + 64);
        assert_eq!(bytes(Format::Fp8Channel, 704), 16 * 768 + 64);
    }
}
