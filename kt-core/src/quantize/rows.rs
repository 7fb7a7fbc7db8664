//! Encoders of floating-point, FP8, and integer rows.

use super::search::{Nearest, Round, Weights, reciprocal, scale_and_zero, store_codes, symmetric_scale};
use super::tier::Lanes;
use super::{blocks, grids};
use crate::format::float::{bf16_to_f32, f32_to_bf16};
use crate::format::fp8::{E4M3, TILE, f32_to_e4m3};
use crate::format::mx::{self, E2M1, e8m0_to_f32, f32_to_e2m1};
use crate::format::{Format, Group};

/// Position of the first value that the format cannot hold, whatever its scales, or that searches for these cannot sum.
pub(super) fn unfit(format: Format, values: &[f32]) -> Option<usize> {
    match format {
        Format::F32 => None,
        Format::F16 => values.iter().position(|v| v.is_finite() && half::f16::from_f32(*v).is_infinite()),
        Format::Bf16 => values.iter().position(|v| v.is_finite() && bf16_to_f32(f32_to_bf16(*v)).is_infinite()),
        _ => {
            // Eight at a time: what has the exponent of 2^60 or a larger one, all ones for what is not finite. Searches for scales sum squares.
            let wrong = |v: &f32| v.to_bits() & 0x7f80_0000 >= (127 + 60) << 23;
            let eights = values.as_chunks::<8>().0;
            let fine = eights.iter().take_while(|eight| !eight.iter().fold(false, |any, v| any | wrong(v))).count() * 8;
            values[fine..].iter().position(wrong).map(|i| fine + i)
        }
    }
}

/// Whole rows that share no scale with others, and where what they become is put.
pub(super) struct Band<'a> {
    pub format: Format,
    pub cols: usize,
    /// `[rows, cols]`.
    pub values: &'a [f32],
    pub codes: &'a mut [u8],
    /// Separate scales, where the format has them, and zero points.
    pub scales: &'a mut [u8],
    pub zeros: &'a mut [i16],
    /// Factor of NVFP4's scales.
    pub global: f32,
}

/// Encodes a band; `weights` has one number per column.
#[inline(always)]
pub(super) fn encode<W: Weights>(band: Band<'_>, weights: W) {
    let Band { format, cols, values, codes, scales, zeros, global } = band;
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
        Format::Int8(group) | Format::Int8Offset(group) => {
            let offset = if matches!(format, Format::Int8(_)) { 0.0 } else { 128.0 };
            for g in groups(group, cols, values, codes, scales, 1) {
                let scale = g.scale.put(divisor(amax(g.values), 127.0));
                store_codes(g.values, g.codes, Nearest::<W::Lanes>::new(1.0 / scale, (-127.0, 127.0), offset));
            }
        }
        // The scale has the sign that gives the largest value code -8, which reaches further than 7.
        Format::Int4(group) => {
            for g in groups(group, cols, values, codes, scales, 2) {
                let scale = g.scale.put(symmetric_scale(g.values, weights.from(g.first), 8));
                store_nibbles(g.values, g.codes, Nearest::<W::Lanes>::new(1.0 / scale, (-8.0, 7.0), 8.0));
            }
        }
        // Columns of ordered formats come in the order of their groups.
        Format::Int4Asym(group) | Format::Int4Ordered(group) => {
            for (g, stored) in groups(group, cols, values, codes, scales, 2).zip(zeros) {
                let (scale, zero) = scale_and_zero(g.values, weights.from(g.first), 15);
                let scale = g.scale.put(scale);
                *stored = zero as i16;
                store_nibbles(g.values, g.codes, Nearest::<W::Lanes>::new(1.0 / scale, (-zero, 15.0 - zero), zero));
            }
        }
        Format::Int8Asym(group) | Format::Int8Ordered(group) => {
            for (g, stored) in groups(group, cols, values, codes, scales, 1).zip(zeros) {
                let (scale, zero) = scale_and_zero(g.values, weights.from(g.first), 255);
                let scale = g.scale.put(scale);
                *stored = zero as i16;
                store_codes(g.values, g.codes, Nearest::<W::Lanes>::new(1.0 / scale, (-zero, 255.0 - zero), zero));
            }
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
        Format::Q8_0 => {
            for (values, _, block) in blocks(values, cols, codes) {
                blocks::q8_0(values, block);
            }
        }
        Format::Q4_0 => {
            for (values, first, block) in blocks(values, cols, codes) {
                blocks::q4_0(values, weights.from(first), block);
            }
        }
        Format::Q4K => {
            for (values, first, block) in blocks(values, cols, codes) {
                blocks::q4k(values, weights.from(first), block);
            }
        }
        Format::Q5K => {
            for (values, first, block) in blocks(values, cols, codes) {
                blocks::q5k(values, weights.from(first), block);
            }
        }
        Format::Q6K => {
            for (values, first, block) in blocks(values, cols, codes) {
                blocks::q6k(values, weights.from(first), block);
            }
        }
        Format::Q4_1 => {
            for (values, first, block) in blocks(values, cols, codes) {
                blocks::q4_1(values, weights.from(first), block);
            }
        }
        Format::Q5_0 => {
            for (values, first, block) in blocks(values, cols, codes) {
                blocks::q5_0(values, weights.from(first), block);
            }
        }
        Format::Q5_1 => {
            for (values, first, block) in blocks(values, cols, codes) {
                blocks::q5_1(values, weights.from(first), block);
            }
        }
        Format::Q2K => {
            for (values, first, block) in blocks(values, cols, codes) {
                blocks::q2k(values, weights.from(first), block);
            }
        }
        Format::Q3K => {
            for (values, first, block) in blocks(values, cols, codes) {
                blocks::q3k(values, weights.from(first), block);
            }
        }
        Format::Iq4Nl => {
            for (values, first, block) in blocks(values, cols, codes) {
                blocks::iq4_nl(values, weights.from(first), block);
            }
        }
        Format::Iq4Xs => {
            for (values, first, block) in blocks(values, cols, codes) {
                blocks::iq4_xs(values, weights.from(first), block);
            }
        }
        Format::Mxfp4Ggml => {
            for (values, _, block) in blocks(values, cols, codes) {
                blocks::mxfp4(values, block);
            }
        }
        Format::Iq2Xxs => {
            for (values, _, block) in blocks(values, cols, codes) {
                grids::iq2_xxs(values, block);
            }
        }
        Format::Iq2Xs => {
            for (values, _, block) in blocks(values, cols, codes) {
                grids::iq2_xs(values, block);
            }
        }
        Format::Iq2S => {
            for (values, _, block) in blocks(values, cols, codes) {
                grids::iq2_s(values, block);
            }
        }
        Format::Iq3Xxs => {
            for (values, _, block) in blocks(values, cols, codes) {
                grids::iq3_xxs(values, block);
            }
        }
        Format::Iq3S => {
            for (values, _, block) in blocks(values, cols, codes) {
                grids::iq3_s(values, block);
            }
        }
        Format::Iq1S => {
            for (values, _, block) in blocks(values, cols, codes) {
                grids::iq1_s(values, block);
            }
        }
        Format::Iq1M => {
            for (values, _, block) in blocks(values, cols, codes) {
                grids::iq1_m(values, block);
            }
        }
        Format::Tq1_0 => {
            for (values, _, block) in blocks(values, cols, codes) {
                blocks::tq1_0(values, block);
            }
        }
        Format::Tq2_0 => {
            for (values, _, block) in blocks(values, cols, codes) {
                blocks::tq2_0(values, block);
            }
        }
    }
}

#[inline(always)]
fn copy<const N: usize>(values: &[f32], codes: &mut [u8], bytes: impl Fn(f32) -> [u8; N]) {
    for (&v, code) in values.iter().zip(codes.as_chunks_mut::<N>().0) {
        *code = bytes(v);
    }
}

/// Each block of each row, the number of its first column, and where its bytes are put.
#[inline(always)]
fn blocks<'a, const COLS: usize, const BYTES: usize>(
    values: &'a [f32],
    cols: usize,
    codes: &'a mut [u8],
) -> impl Iterator<Item = (&'a [f32; COLS], usize, &'a mut [u8; BYTES])> {
    let per_row = (cols / COLS).max(1);
    let all = values.as_chunks().0.iter().zip(codes.as_chunks_mut().0).enumerate();
    all.map(move |(i, (values, codes))| (values, i % per_row * COLS, codes))
}

/// Largest magnitude.
#[inline(always)]
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
#[inline(always)]
pub(super) fn divisor(amax: f32, largest: f32) -> f32 {
    let s = amax / largest;
    if s.is_normal() { s } else { 1.0 }
}

#[inline(always)]
fn fp8(values: &[f32], scale: f32, codes: &mut [u8]) {
    for (code, v) in codes.iter_mut().zip(values) {
        *code = f32_to_e4m3(v / scale);
    }
}

/// A band of up to 128 rows: one row of tiles.
#[inline(always)]
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

/// Where a scale is stored: BF16 of groups, F32 of rows.
struct Stored<'a>(&'a mut [u8]);

impl Stored<'_> {
    /// Stores a scale, and gives it as it will be read: 1 in place of one that cannot be divided by, whose values count as zero.
    #[inline(always)]
    fn put(self, scale: f32) -> f32 {
        let rounded = if self.0.len() == 2 { bf16_to_f32(f32_to_bf16(scale)) } else { scale };
        let scale = if rounded.is_normal() && (1.0 / rounded).is_normal() { rounded } else { 1.0 };
        match self.0.len() {
            2 => self.0.copy_from_slice(&f32_to_bf16(scale).to_le_bytes()),
            _ => self.0.copy_from_slice(&scale.to_le_bytes()),
        }
        scale
    }
}

/// Values of a row that share a scale.
struct OneGroup<'a> {
    /// Number of the first column.
    first: usize,
    values: &'a [f32],
    codes: &'a mut [u8],
    scale: Stored<'a>,
}

/// The groups of each row. Rows are multiples of the group, so that groups of a band follow each other.
#[inline(always)]
fn groups<'a>(
    group: Group,
    cols: usize,
    values: &'a [f32],
    codes: &'a mut [u8],
    scales: &'a mut [u8],
    per_byte: usize,
) -> impl Iterator<Item = OneGroup<'a>> {
    let size = group.cols(cols).max(1);
    let (per_row, scale_bytes) = ((cols / size).max(1), if group == Group::Row { 4 } else { 2 });
    let all = values.chunks_exact(size).zip(codes.chunks_exact_mut((size / per_byte).max(1)));
    all.zip(scales.chunks_exact_mut(scale_bytes)).enumerate().map(move |(i, ((values, codes), scale))| OneGroup {
        first: i % per_row * size,
        values,
        codes,
        scale: Stored(scale),
    })
}

/// Stores codes two to a byte, the even one low.
#[inline(always)]
fn store_nibbles<L: Lanes>(values: &[f32], codes: &mut [u8], integer: impl Round<L> + Copy) {
    let mut bytes = [0; 32];
    for (values, codes) in values.chunks(32).zip(codes.chunks_mut(16)) {
        store_codes(values, &mut bytes[..values.len()], integer);
        for (code, pair) in codes.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *code = pair[0] | pair[1] << 4;
        }
    }
}

#[inline(always)]
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
#[inline(always)]
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
