//! Integer codes with scales: compressed-tensors `int-quantized` and `pack-quantized`.
//!
//! INT8 is a signed byte per column (`int-quantized`) or a byte with offset 128 (8-bit `pack-quantized`). INT4 stores two
//! columns per byte (even column in the low nibble, as the little-endian I32 words of `weight_packed` read as bytes),
//! value = nibble - 8, or nibble - zero point where it is asymmetric. `W = value * scale[n, k / group]`.

use super::{Format, Matrix};

/// Rows whose zero points share a word.
pub const ZERO_ROWS: usize = 8;

/// Byte and shift of a zero point, of `groups` a row.
#[inline(always)]
pub(crate) fn zero_point_at(row: usize, group: usize, groups: usize) -> (usize, u32) {
    ((row / ZERO_ROWS * groups + group) * 4 + row % ZERO_ROWS / 2, row as u32 % 2 * 4)
}

pub(super) fn decode(m: &Matrix, row: usize, start: usize, out: &mut [f32]) {
    let Some(scales) = m.scales() else { return };
    let codes = m.row(row);
    let (group, nibbles, flip) = match m.format() {
        Format::Int4(g) | Format::Int4Asym(g) => (g.cols(m.cols()), true, 0),
        Format::Int8(g) => (g.cols(m.cols()), false, 0),
        Format::Int8Offset(g) => (g.cols(m.cols()), false, 0x80),
        _ => return,
    };
    let group = group.max(1);
    let (mut col, end) = (start, start + out.len());
    while col < end {
        let next = end.min((col / group + 1) * group);
        let s = scales.get(row, col / group);
        let out = &mut out[col - start..next - start];
        if nibbles {
            let zero = m.zero_points().map_or(8, |zeros| {
                let (at, shift) = zero_point_at(row, col / group, scales.cols());
                (zeros[at] >> shift & 15) as i32
            });
            // Groups and decoded ranges are even, so bytes never straddle them.
            for (o, &byte) in out.chunks_exact_mut(2).zip(&codes[col / 2..]) {
                o[0] = ((byte & 15) as i32 - zero) as f32 * s;
                o[1] = ((byte >> 4) as i32 - zero) as f32 * s;
            }
        } else {
            for (o, &c) in out.iter_mut().zip(&codes[col..]) {
                *o = (c ^ flip) as i8 as f32 * s;
            }
        }
        col = next;
    }
}
