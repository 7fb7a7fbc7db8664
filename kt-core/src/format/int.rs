//! Integer codes with scales: compressed-tensors `int-quantized` and `pack-quantized`, and what GPTQ, AWQ and kt-kernel's files become.
//!
//! Codes are bytes, signed in `Int8`, or nibbles, two columns per byte with the even one in the low nibble (as the little-endian
//! I32 words of `weight_packed` read as bytes). `W[n, k] = (code - zero) * scale[n, g]` with `g = k / group`, or `column_groups[k]` in
//! ordered formats. The zero is 0 for signed bytes, 8 for nibbles and 128 for bytes of symmetric formats, and
//! [`Matrix::zero_point`] for the others.

use super::{Format, Matrix, Scales};

pub(super) fn decode(m: &Matrix, row: usize, start: usize, out: &mut [f32]) {
    let (Some(scales), Some(group)) = (m.scales(), m.format().group()) else { return };
    if let Some(groups) = m.column_groups() {
        return decode_ordered(m, scales, groups, row, start, out);
    }
    let codes = m.row(row);
    let group = group.cols(m.cols()).max(1);
    let (mut col, end) = (start, start + out.len());
    while col < end {
        let next = end.min((col / group + 1) * group);
        let s = scales.get(row, col / group);
        let out = &mut out[col - start..next - start];
        let zero = match m.format() {
            Format::Int8(_) => 0,
            Format::Int4Asym(_) | Format::Int8Asym(_) => m.zero_point(row, col / group),
            format => format.middle(),
        };
        match m.format() {
            // Groups and decoded ranges are even, so bytes never straddle them.
            format if format.nibbles() => {
                for (o, &byte) in out.chunks_exact_mut(2).zip(&codes[col / 2..]) {
                    o[0] = ((byte & 15) as i32 - zero) as f32 * s;
                    o[1] = ((byte >> 4) as i32 - zero) as f32 * s;
                }
            }
            Format::Int8(_) => out.iter_mut().zip(&codes[col..]).for_each(|(o, &c)| *o = c as i8 as f32 * s),
            _ => out.iter_mut().zip(&codes[col..]).for_each(|(o, &c)| *o = (c as i32 - zero) as f32 * s),
        }
        col = next;
    }
}

/// Groups have their columns anywhere, so the row's scales and zero points are looked up once, and then by column.
fn decode_ordered(m: &Matrix, scales: &Scales, groups: &[u32], row: usize, start: usize, out: &mut [f32]) {
    let per_group: Vec<(f32, i32)> = (0..scales.cols()).map(|g| (scales.get(row, g), m.zero_point(row, g))).collect();
    let codes = m.row(row);
    let value = |code: u8, group: u32| {
        let (s, zero) = per_group[group as usize];
        (code as i32 - zero) as f32 * s
    };
    if m.format().nibbles() {
        let bytes = codes[start / 2..].iter().zip(groups[start..].as_chunks::<2>().0);
        for (o, (&byte, &[even, odd])) in out.as_chunks_mut::<2>().0.iter_mut().zip(bytes) {
            *o = [value(byte & 15, even), value(byte >> 4, odd)];
        }
    } else {
        for ((o, &code), &group) in out.iter_mut().zip(&codes[start..]).zip(&groups[start..]) {
            *o = value(code, group);
        }
    }
}
