//! Encoders of GGUF blocks. Scales are rounded to their stored type first, codes are then the nearest for the rounded ones.

use super::rows::amax;
use super::search::{
    Grid, Integers, Nearest, Table, Weights, errors_with_minima, nearest, reciprocal, scale_and_minimum, store_codes,
    symmetric_scale,
};
use crate::format::ggml::*;

/// Values of IQ4_NL and IQ4_XS.
const IQ4: Table = Table(&IQ4_VALUES);

/// Rounds a scale to F16: its stored bytes, and the value that they decode to.
#[inline(always)]
fn f16(v: f32) -> ([u8; 2], f32) {
    let h = half::f16::from_f32(v);
    (h.to_le_bytes(), h.to_f32())
}

#[inline(always)]
pub(super) fn q8_0(values: &[f32; COLS], block: &mut [u8; Q8_0_BYTES]) {
    let (bytes, d) = f16(amax(values) / 127.0);
    let inverse = reciprocal(d);
    block[..2].copy_from_slice(&bytes);
    for (code, v) in block[2..].iter_mut().zip(values) {
        *code = nearest((v * inverse).clamp(-127.0, 127.0)) as i32 as i8 as u8;
    }
}

#[inline(always)]
pub(super) fn q4_0<W: Weights>(values: &[f32; COLS], weights: W, block: &mut [u8; Q4_0_BYTES]) {
    let (bytes, d) = f16(symmetric_scale(values, weights, 8));
    let inverse = reciprocal(d);
    block[..2].copy_from_slice(&bytes);
    let mut codes = [0; COLS];
    store_codes(values, &mut codes, Nearest::<W::Lanes>::new(inverse, (-8.0, 7.0), 8.0));
    q4_0_pack_codes(&codes, block);
}

#[inline(always)]
pub(super) fn q5_0<W: Weights>(values: &[f32; COLS], weights: W, block: &mut [u8; Q5_0_BYTES]) {
    let (bytes, d) = f16(symmetric_scale(values, weights, 16));
    let inverse = reciprocal(d);
    block[..2].copy_from_slice(&bytes);
    let mut codes = [0; COLS];
    store_codes(values, &mut codes, Nearest::<W::Lanes>::new(inverse, (-16.0, 15.0), 16.0));
    block[2..].copy_from_slice(&pack_five_bit_codes(&codes));
}

/// The stored scale and minimum of Q4_1 and Q5_1, and the codes (0..=top).
#[inline(always)]
fn with_minimum<W: Weights>(values: &[f32; COLS], weights: W, top: u8) -> ([u8; 4], [u8; COLS]) {
    let (scale, minimum) = scale_and_minimum(values, weights, top, true);
    let ((d_bytes, d), (m_bytes, m)) = (f16(scale), f16(-minimum));
    let inverse = reciprocal(d);
    let mut codes = [0; COLS];
    store_codes(values, &mut codes, Nearest::<W::Lanes>::above(-m, inverse, top));
    ([d_bytes[0], d_bytes[1], m_bytes[0], m_bytes[1]], codes)
}

#[inline(always)]
pub(super) fn q4_1<W: Weights>(values: &[f32; COLS], weights: W, block: &mut [u8; Q4_1_BYTES]) {
    let (header, codes) = with_minimum(values, weights, 15);
    block[..4].copy_from_slice(&header);
    block[4..].copy_from_slice(&pack_nibbles(&codes));
}

#[inline(always)]
pub(super) fn q5_1<W: Weights>(values: &[f32; COLS], weights: W, block: &mut [u8; Q5_1_BYTES]) {
    let (header, codes) = with_minimum(values, weights, 31);
    block[..4].copy_from_slice(&header);
    block[4..].copy_from_slice(&pack_five_bit_codes(&codes));
}

#[inline(always)]
pub(super) fn iq4_nl<W: Weights>(values: &[f32; COLS], weights: W, block: &mut [u8; IQ4_NL_BYTES]) {
    let (bytes, d) = f16(IQ4.scale(values, weights));
    block[..2].copy_from_slice(&bytes);
    block[2..].copy_from_slice(&pack_nibbles(&IQ4.codes::<W::Lanes>(values, d)));
}

pub(super) fn mxfp4(values: &[f32; COLS], block: &mut [u8; MXFP4_BYTES]) {
    // The exponent that puts the largest value between 4 and 8, and its neighbours: the larger one clips nothing, the
    // smaller one has finer steps. Beyond 252 the largest code would decode to infinity.
    let exponent = (amax(values).to_bits() >> 23).saturating_sub(2).min(252) as i32;
    // 2^(127 - e), exact in F64.
    let factor = |e: i32| f64::from_bits(((1023 + 127 - e) as u64) << 52);
    let encode = |e: i32| {
        let mut codes = [0; COLS];
        let mut error = 0.0;
        for (code, &v) in codes.iter_mut().zip(values) {
            let x = (v as f64 * factor(e)) as f32;
            let size = x.abs();
            // Halfway between neighbours the even code wins.
            let bounds = [size > 0.25, size >= 0.75, size > 1.25, size >= 1.75, size > 2.5, size >= 3.5, size > 5.0];
            let near = bounds.iter().filter(|&&b| b).count();
            *code = if x < 0.0 && near > 0 { 8 | near as u8 } else { near as u8 };
            // In steps of the middle exponent, so that errors compare.
            error += ((MXFP4_HALVES[near] as f32 * 0.5 - size) as f64 * factor(exponent) / factor(e)).powi(2);
        }
        (error, codes)
    };
    let (mut best, (mut best_error, mut best_codes)) = (exponent, encode(exponent));
    for e in [exponent - 1, exponent + 1] {
        if (0..=252).contains(&e) {
            let (error, codes) = encode(e);
            if error < best_error {
                (best, best_error, best_codes) = (e, error, codes);
            }
        }
    }
    block[0] = best as u8;
    block[1..].copy_from_slice(&pack_nibbles(&best_codes));
}

/// What is stored of a block with a scale and a minimum for each of `G` groups of `N` columns.
struct Minima<const G: usize> {
    d: [u8; 2],
    dmin: [u8; 2],
    scales: [u8; G],
    minima: [u8; G],
    codes: [u8; K_COLS],
}

/// Codes in `0..=top`, scales and minima in `0..=largest`.
#[inline(always)]
fn with_minima<W: Weights, const G: usize, const N: usize>(
    values: &[f32; K_COLS],
    weights: W,
    top: u8,
    largest: f32,
) -> Minima<G> {
    let groups = values.as_chunks::<N>().0;
    let mut fits = [(0f32, 0f32); G];
    for (g, fit) in fits.iter_mut().enumerate() {
        *fit = scale_and_minimum(&groups[g], weights.from(g * N), top, false);
    }
    let (d_bytes, d) = f16(fits.iter().fold(0.0, |a, f| f.0.max(a)) / largest);
    let (dmin_bytes, dmin) = f16(fits.iter().fold(0.0, |a, f| f.1.max(a)) / largest);
    let (mut scales, mut minima, mut codes) = ([0; G], [0; G], [0; K_COLS]);
    for (g, codes) in codes.as_chunks_mut::<N>().0.iter_mut().enumerate() {
        let (values, near) = (&groups[g], |v: f32, unit: f32| nearest((v * reciprocal(unit)).clamp(0.0, largest)));
        let (scale, minimum) = (near(fits[g].0, d), near(fits[g].1, dmin));
        // Rounded one by one, the two no longer fit each other best: look around.
        let (mut best, mut best_error) = ((scale, minimum), f32::INFINITY);
        let around = [minimum, minimum - 1.0, minimum + 1.0];
        let tried = [dmin * around[0], dmin * around[1], dmin * around[2]];
        for scale in [scale, scale - 1.0, scale + 1.0] {
            let errors = errors_with_minima(values, weights.from(g * N), d * scale, tried, top);
            for (minimum, error) in around.into_iter().zip(errors) {
                let stored = (0.0..=largest).contains(&scale) && (0.0..=largest).contains(&minimum);
                if stored && error < best_error {
                    (best, best_error) = ((scale, minimum), error);
                }
            }
        }
        (scales[g], minima[g]) = (best.0 as i32 as u8, best.1 as i32 as u8);
        let (inverse, minimum) = (reciprocal(d * best.0), dmin * best.1);
        store_codes(values, codes, Nearest::<W::Lanes>::above(minimum, inverse, top));
    }
    Minima { d: d_bytes, dmin: dmin_bytes, scales, minima, codes }
}

/// The 16 bytes of scales that Q4_K and Q5_K share.
#[inline(always)]
fn header(m: &Minima<8>) -> [u8; 16] {
    let mut header = [0; 16];
    header[..2].copy_from_slice(&m.d);
    header[2..4].copy_from_slice(&m.dmin);
    header[4..].copy_from_slice(&q4k_pack_scales(&m.scales, &m.minima));
    header
}

#[inline(always)]
pub(super) fn q2k<W: Weights>(values: &[f32; K_COLS], weights: W, block: &mut [u8; Q2K_BYTES]) {
    let m: Minima<16> = with_minima::<W, 16, 16>(values, weights, 3, 15.0);
    for (byte, (scale, minimum)) in block.iter_mut().zip(m.scales.iter().zip(m.minima)) {
        *byte = scale | minimum << 4;
    }
    block[16..80].copy_from_slice(&pack_bit_pairs(&m.codes));
    block[80..82].copy_from_slice(&m.d);
    block[82..].copy_from_slice(&m.dmin);
}

#[inline(always)]
pub(super) fn q4k<W: Weights>(values: &[f32; K_COLS], weights: W, block: &mut [u8; Q4K_BYTES]) {
    let m = with_minima::<W, 8, 32>(values, weights, 15, 63.0);
    block[..16].copy_from_slice(&header(&m));
    q4k_pack_codes(&m.codes, block);
}

#[inline(always)]
pub(super) fn q5k<W: Weights>(values: &[f32; K_COLS], weights: W, block: &mut [u8; Q5K_BYTES]) {
    let m = with_minima::<W, 8, 32>(values, weights, 31, 63.0);
    block[..16].copy_from_slice(&header(&m));
    q5k_pack_codes(&m.codes, block);
}

/// The block's scale and that of each of its `G` groups of `N` columns, in `-largest..largest`, out of the scales that fit the
/// groups best: the neighbour of each that leaves the smallest error.
#[inline(always)]
fn group_scales<W: Weights, const G: usize, const N: usize>(
    values: &[f32; K_COLS],
    weights: W,
    largest: f32,
    grid: impl Grid,
) -> ([u8; 2], f32, [i8; G]) {
    let groups = values.as_chunks::<N>().0;
    let mut fits = [0f32; G];
    for (g, fit) in fits.iter_mut().enumerate() {
        *fit = grid.scale(&groups[g], weights.from(g * N));
    }
    let extreme = fits.iter().fold(0f32, |a, &s| if s.abs() > a.abs() { s } else { a });
    let (bytes, d) = f16(extreme / -largest);
    let mut scales = [0; G];
    for (g, stored) in scales.iter_mut().enumerate() {
        let near = nearest((fits[g] * reciprocal(d)).clamp(-largest, largest - 1.0));
        let (mut best, mut best_error) = (near, f32::INFINITY);
        for scale in [near, near - 1.0, near + 1.0] {
            let error = grid.error(&groups[g], weights.from(g * N), d * scale);
            if scale.clamp(-largest, largest - 1.0) == scale && error < best_error {
                (best, best_error) = (scale, error);
            }
        }
        *stored = best as i32 as i8;
    }
    (bytes, d, scales)
}

/// The block's scale, those of its groups, and the codes in `0..2 * half`.
#[inline(always)]
fn symmetric<W: Weights, const G: usize, const N: usize>(
    values: &[f32; K_COLS],
    weights: W,
    largest: f32,
    half: u8,
) -> ([u8; 2], [i8; G], [u8; K_COLS]) {
    let (bytes, d, scales) = group_scales::<W, G, N>(values, weights, largest, Integers(half));
    let (mut codes, edge) = ([0; K_COLS], half as f32);
    for (g, (codes, values)) in codes.as_chunks_mut::<N>().0.iter_mut().zip(values.as_chunks::<N>().0).enumerate() {
        let inverse = reciprocal(d * scales[g] as f32);
        store_codes(values, codes, Nearest::<W::Lanes>::new(inverse, (-edge, edge - 1.0), edge));
    }
    (bytes, scales, codes)
}

#[inline(always)]
pub(super) fn q3k<W: Weights>(values: &[f32; K_COLS], weights: W, block: &mut [u8; Q3K_BYTES]) {
    let (d, scales, codes) = symmetric::<W, 16, 16>(values, weights, 32.0, 4);
    q3k_pack_codes(&codes, block);
    block[96..108].copy_from_slice(&q3k_pack_scales(&scales));
    block[108..].copy_from_slice(&d);
}

#[inline(always)]
pub(super) fn q6k<W: Weights>(values: &[f32; K_COLS], weights: W, block: &mut [u8; Q6K_BYTES]) {
    let (d, scales, codes) = symmetric::<W, 16, 16>(values, weights, 128.0, 32);
    q6k_pack_codes(&codes, block);
    block[192..208].copy_from_slice(&scales.map(|s| s as u8));
    block[208..].copy_from_slice(&d);
}

#[inline(always)]
pub(super) fn iq4_xs<W: Weights>(values: &[f32; K_COLS], weights: W, block: &mut [u8; IQ4_XS_BYTES]) {
    let (bytes, d, scales) = group_scales::<W, 8, 32>(values, weights, 32.0, IQ4);
    let mut codes = [0; K_COLS];
    for (g, (codes, values)) in codes.as_chunks_mut::<32>().0.iter_mut().zip(values.as_chunks::<32>().0).enumerate() {
        *codes = IQ4.codes::<W::Lanes>(values, d * scales[g] as f32);
    }
    block[..2].copy_from_slice(&bytes);
    block[2..8].copy_from_slice(&iq4_xs_pack_scales(&scales));
    iq4_xs_pack_codes(&codes, block);
}

/// The scale of ternary codes that leaves the smallest error, and the codes, which are one more than their values: the largest
/// values become the scale with their signs, the others 0.
fn ternary(values: &[f32; K_COLS]) -> ([u8; 2], [u8; K_COLS]) {
    let mut sizes = values.map(f32::abs);
    sizes.sort_unstable_by(|a, b| b.total_cmp(a));
    // With the `count` largest ones, their mean is the best scale, and takes `sum * sum / count` off the squared error.
    let (mut sum, mut best, mut best_gain) = (0.0f32, 0.0, 0.0);
    for (i, size) in sizes.iter().enumerate() {
        sum += size;
        let gain = sum * (sum / (i + 1) as f32);
        if gain > best_gain {
            (best, best_gain) = (sum / (i + 1) as f32, gain);
        }
    }
    let (bytes, d) = f16(best);
    let inverse = reciprocal(d);
    (bytes, values.map(|v| (nearest((v * inverse).clamp(-1.0, 1.0)) + 1.0) as i32 as u8))
}

pub(super) fn tq1_0(values: &[f32; K_COLS], block: &mut [u8; TQ1_0_BYTES]) {
    let (d, codes) = ternary(values);
    tq1_0_pack_codes(&codes, block);
    block[52..].copy_from_slice(&d);
}

pub(super) fn tq2_0(values: &[f32; K_COLS], block: &mut [u8; TQ2_0_BYTES]) {
    let (d, codes) = ternary(values);
    block[..64].copy_from_slice(&pack_bit_pairs(&codes));
    block[64..].copy_from_slice(&d);
}
