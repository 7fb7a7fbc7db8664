//! Encoders of floating-point, FP8, and integer rows.

use super::search::{nearest, reciprocal, scale_and_zero, symmetric_scale};
use super::{blocks, grids};
use crate::format::float::{bf16_to_f32, f32_to_bf16};
use crate::format::fp8::{E4M3, TILE, f32_to_e4m3};
use crate::format::mx::{self, E2M1, e8m0_to_f32, f32_to_e2m1};
use crate::format::{Format, Group};

/// Position of the first value that the format cannot hold, whatever its scales.
pub(super) fn unfit(format: Format, values: &[f32]) -> Option<usize> {
    match format {
        Format::F32 => None,
        Format::F16 => values.iter().position(|v| v.is_finite() && half::f16::from_f32(*v).is_infinite()),
        Format::Bf16 => values.iter().position(|v| v.is_finite() && bf16_to_f32(f32_to_bf16(*v)).is_infinite()),
        _ => values.iter().position(|v| !v.is_finite()),
    }
}

/// Encodes a band of whole rows into its codes and, where the format has them, its separate scales and zero points; `global` is
/// the factor of NVFP4's scales.
pub(super) fn encode(
    format: Format,
    cols: usize,
    values: &[f32],
    codes: &mut [u8],
    scales: &mut [u8],
    (zeros, global): (&mut [i16], f32),
) {
    match format {
        Format::F32 => copy(values, codes, f32::to_le_bytes),
        Format::F16 => copy(values, codes, |v| half::f16::from_f32(v).to_le_bytes()),
        Format::Bf16 => copy(values, codes, |v| f32_to_bf16(v).to_le_bytes()),
        Format::Fp8Block => fp8_tiles(cols, values, codes, scales),
        Format::Fp8Channel => {
            let rows = values.chunks_exact(cols.max(1)).zip(codes.chunks_exact_mut(cols.max(1)));
            for ((values, codes), scale) in rows.zip(scales.as_chunks_mut::<4>().0) {
                let s = divisor(amax(values), 448.0);
                *scale = s.to_le_bytes();
                fp8(values, s, codes);
            }
        }
        Format::Int8(group) => {
            groups(group, cols, values, codes, scales, 1, |v, stored, codes| int8(v, 0, stored, codes))
        }
        Format::Int8Offset(group) => {
            groups(group, cols, values, codes, scales, 1, |v, stored, codes| int8(v, 0x80, stored, codes));
        }
        Format::Int4(group) => groups(group, cols, values, codes, scales, 2, int4),
        // Columns of ordered formats come in the order of their groups.
        Format::Int4Asym(group) | Format::Int4Ordered(group) => {
            let mut zeros = zeros.iter_mut();
            groups(group, cols, values, codes, scales, 2, |v, stored, codes| {
                let (scale, zero) = scale_and_zero(v, 15, stored);
                let code = asymmetric_code(scale, zero, 15.0);
                for (byte, v) in codes.iter_mut().zip(v.as_chunks::<2>().0) {
                    *byte = code(v[0]) | code(v[1]) << 4;
                }
                zeros.next().into_iter().for_each(|z| *z = zero as i16);
                scale
            });
        }
        Format::Int8Asym(group) | Format::Int8Ordered(group) => {
            let mut zeros = zeros.iter_mut();
            groups(group, cols, values, codes, scales, 1, |v, stored, codes| {
                let (scale, zero) = scale_and_zero(v, 255, stored);
                let code = asymmetric_code(scale, zero, 255.0);
                codes.iter_mut().zip(v).for_each(|(byte, v)| *byte = code(*v));
                zeros.next().into_iter().for_each(|z| *z = zero as i16);
                scale
            });
        }
        Format::Mxfp4 => microscaled(
            values,
            codes,
            scales,
            2,
            |v| E2M1[f32_to_e2m1(v) as usize],
            |v, codes| {
                for (byte, v) in codes.iter_mut().zip(v.as_chunks::<2>().0) {
                    *byte = f32_to_e2m1(v[0]) | f32_to_e2m1(v[1]) << 4;
                }
            },
        ),
        Format::Mxfp8 => microscaled(
            values,
            codes,
            scales,
            8,
            |v| E4M3[f32_to_e4m3(v) as usize],
            |v, codes| {
                codes.iter_mut().zip(v).for_each(|(code, &v)| *code = f32_to_e4m3(v));
            },
        ),
        Format::Nvfp4 => nvfp4(values, codes, scales, global),
        Format::Q8_0 => each(values, codes, blocks::q8_0),
        Format::Q4_0 => each(values, codes, blocks::q4_0),
        Format::Q4K => each(values, codes, blocks::q4k),
        Format::Q5K => each(values, codes, blocks::q5k),
        Format::Q6K => each(values, codes, blocks::q6k),
        Format::Q4_1 => each(values, codes, blocks::q4_1),
        Format::Q5_0 => each(values, codes, blocks::q5_0),
        Format::Q5_1 => each(values, codes, blocks::q5_1),
        Format::Q2K => each(values, codes, blocks::q2k),
        Format::Q3K => each(values, codes, blocks::q3k),
        Format::Iq4Nl => each(values, codes, blocks::iq4_nl),
        Format::Iq4Xs => each(values, codes, blocks::iq4_xs),
        Format::Mxfp4Ggml => each(values, codes, blocks::mxfp4),
        Format::Iq2Xxs => each(values, codes, grids::iq2_xxs),
        Format::Iq2Xs => each(values, codes, grids::iq2_xs),
        Format::Iq2S => each(values, codes, grids::iq2_s),
        Format::Iq3Xxs => each(values, codes, grids::iq3_xxs),
        Format::Iq3S => each(values, codes, grids::iq3_s),
        Format::Iq1S => each(values, codes, grids::iq1_s),
        Format::Iq1M => each(values, codes, grids::iq1_m),
        Format::Tq1_0 => each(values, codes, blocks::tq1_0),
        Format::Tq2_0 => each(values, codes, blocks::tq2_0),
    }
}

fn copy<const N: usize>(values: &[f32], codes: &mut [u8], bytes: impl Fn(f32) -> [u8; N]) {
    for (&v, code) in values.iter().zip(codes.as_chunks_mut::<N>().0) {
        *code = bytes(v);
    }
}

fn each<const COLS: usize, const BYTES: usize>(
    values: &[f32],
    codes: &mut [u8],
    block: impl Fn(&[f32; COLS], &mut [u8; BYTES]),
) {
    for (values, codes) in values.as_chunks().0.iter().zip(codes.as_chunks_mut().0) {
        block(values, codes);
    }
}

/// Largest magnitude.
pub(super) fn amax(values: &[f32]) -> f32 {
    let (chunks, rest) = values.as_chunks::<8>();
    let mut lanes = [0f32; 8];
    for c in chunks {
        for (lane, v) in lanes.iter_mut().zip(c) {
            *lane = lane.max(v.abs());
        }
    }
    lanes.iter().chain(rest).fold(0.0, |a, v| a.max(v.abs()))
}

/// Largest magnitude of each column of `[rows, cols]` values.
pub(super) fn column_amax(values: &[f32], cols: usize) -> Vec<f32> {
    let mut largest = vec![0f32; cols];
    for row in values.chunks_exact(cols.max(1)) {
        for (largest, v) in largest.iter_mut().zip(row) {
            *largest = largest.max(v.abs());
        }
    }
    largest
}

/// The scale that maps `amax` to `largest`; 1 for values so small that they count as zero.
pub(super) fn divisor(amax: f32, largest: f32) -> f32 {
    let s = amax / largest;
    if s.is_normal() { s } else { 1.0 }
}

fn fp8(values: &[f32], scale: f32, codes: &mut [u8]) {
    for (code, v) in codes.iter_mut().zip(values) {
        *code = f32_to_e4m3(v / scale);
    }
}

/// A band of up to 128 rows: one row of tiles.
fn fp8_tiles(cols: usize, values: &[f32], codes: &mut [u8], scales: &mut [u8]) {
    for (tile, scale) in scales.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let range = tile * TILE..cols.min((tile + 1) * TILE);
        let s = divisor(values.chunks_exact(cols).map(|row| amax(&row[range.clone()])).fold(0.0, f32::max), 448.0);
        *scale = s.to_le_bytes();
        for (values, codes) in values.chunks_exact(cols).zip(codes.chunks_exact_mut(cols)) {
            fp8(&values[range.clone()], s, &mut codes[range.clone()]);
        }
    }
}

/// Hands each group of each row to `encode`, with the function that turns a scale into its stored value, and stores it.
///
/// Rows are multiples of the group, so that groups of a band follow each other.
fn groups(
    group: Group,
    cols: usize,
    values: &[f32],
    codes: &mut [u8],
    scales: &mut [u8],
    per_byte: usize,
    mut encode: impl FnMut(&[f32], fn(f32) -> f32, &mut [u8]) -> f32,
) {
    let size = group.cols(cols).max(1);
    let all = values.chunks_exact(size).zip(codes.chunks_exact_mut((size / per_byte).max(1)));
    match group {
        Group::Row => {
            for ((values, codes), scale) in all.zip(scales.as_chunks_mut::<4>().0) {
                *scale = encode(values, |s| s, codes).to_le_bytes();
            }
        }
        Group::Of(_) => {
            for ((values, codes), scale) in all.zip(scales.as_chunks_mut::<2>().0) {
                *scale = f32_to_bf16(encode(values, |s| bf16_to_f32(f32_to_bf16(s)), codes)).to_le_bytes();
            }
        }
    }
}

fn int8(values: &[f32], flip: u8, stored: fn(f32) -> f32, codes: &mut [u8]) -> f32 {
    let scale = stored(divisor(amax(values), 127.0));
    let inverse = 1.0 / scale;
    for (code, v) in codes.iter_mut().zip(values) {
        *code = nearest(v * inverse).clamp(-127.0, 127.0) as i32 as i8 as u8 ^ flip;
    }
    scale
}

fn int4(values: &[f32], stored: fn(f32) -> f32, codes: &mut [u8]) -> f32 {
    let scale = symmetric_scale(values, 8, false);
    let scale = stored(if scale.is_normal() { scale } else { 1.0 });
    let inverse = 1.0 / scale;
    let code = |v: f32| (nearest(v * inverse).clamp(-8.0, 7.0) + 8.0) as i32 as u8;
    for (byte, v) in codes.iter_mut().zip(values.as_chunks::<2>().0) {
        *byte = code(v[0]) | code(v[1]) << 4;
    }
    scale
}

/// The code in `0..=top` of a value, with a group's scale and zero point.
fn asymmetric_code(scale: f32, zero: f32, top: f32) -> impl Fn(f32) -> u8 {
    let inverse = 1.0 / scale;
    move |v| (nearest(v * inverse) + zero).clamp(0.0, top) as i32 as u8
}

fn nvfp4(values: &[f32], codes: &mut [u8], scales: &mut [u8], global: f32) {
    let groups = values.as_chunks::<{ mx::NV_COLS }>().0.iter().zip(codes.as_chunks_mut::<{ mx::NV_COLS / 2 }>().0);
    for ((values, codes), scale) in groups.zip(scales) {
        let middle = f32_to_e4m3(amax(values) / 6.0 / global);
        let mut best = f32::INFINITY;
        // The scale of the largest value, and its neighbours.
        for code in [middle, middle.saturating_sub(1), (middle + 1).min(0x7e)] {
            let s = E4M3[code as usize] * global;
            let inverse = reciprocal(s);
            let rounded = values.map(|v| f32_to_e2m1(v * inverse));
            let unit = 1.0 / global;
            let error =
                values.iter().zip(rounded).map(|(v, q)| ((v - E2M1[q as usize] * s) * unit).powi(2)).sum::<f32>();
            if error < best {
                (best, *scale) = (error, code);
                for (byte, q) in codes.iter_mut().zip(rounded.as_chunks::<2>().0) {
                    *byte = q[0] | q[1] << 4;
                }
            }
        }
    }
}

/// Groups of 32 with a power of two as scale. `top` is the exponent of the largest value that codes have; `round` takes a value to
/// the nearest of them, `store` writes the codes of a group.
fn microscaled(
    values: &[f32],
    codes: &mut [u8],
    scales: &mut [u8],
    top: i32,
    round: impl Fn(f32) -> f32,
    store: impl Fn(&[f32; mx::COLS], &mut [u8]),
) {
    let bytes = codes.len() / scales.len().max(1);
    for ((values, codes), scale) in
        values.as_chunks::<{ mx::COLS }>().0.iter().zip(codes.chunks_exact_mut(bytes.max(1))).zip(scales)
    {
        // The exponent that keeps the largest value within the codes' last power of two, perhaps clipping it, and the one above.
        let low = ((amax(values).to_bits() >> 23) as i32 - top).clamp(0, 254) as u8;
        let scaled = |u: u8| values.map(|v| v / e8m0_to_f32(u));
        let error =
            |u: u8| scaled(u).iter().map(|&v| (v - round(v)).powi(2)).sum::<f32>() * if u == low { 1.0 } else { 4.0 };
        let high = low.saturating_add(1).min(254);
        *scale = if error(high) < error(low) { high } else { low };
        store(&scaled(*scale), codes);
    }
}
