//! Encoders of GGUF blocks. Scales are rounded to their stored type first, codes are then the nearest for the rounded ones.

use super::rows::amax;
use super::search::{error_with_minimum, nearest, reciprocal, scale_and_minimum, symmetric_error, symmetric_scale};
use crate::format::ggml::{
    COLS, K_COLS, Q4_0_BYTES, Q4K_BYTES, Q5K_BYTES, Q6K_BYTES, Q8_0_BYTES, q4_0_pack_codes, q4k_pack_codes,
    q4k_pack_scales, q5k_pack_codes, q6k_pack_codes,
};

/// Rounds a scale to F16: its stored bytes, and the value that they decode to.
fn f16(v: f32) -> ([u8; 2], f32) {
    let h = half::f16::from_f32(v);
    (h.to_le_bytes(), h.to_f32())
}

pub(super) fn q8_0(values: &[f32; COLS], block: &mut [u8; Q8_0_BYTES]) {
    let (bytes, d) = f16(amax(values) / 127.0);
    let inverse = reciprocal(d);
    block[..2].copy_from_slice(&bytes);
    for (code, v) in block[2..].iter_mut().zip(values) {
        *code = nearest((v * inverse).clamp(-127.0, 127.0)) as i32 as i8 as u8;
    }
}

pub(super) fn q4_0(values: &[f32; COLS], block: &mut [u8; Q4_0_BYTES]) {
    let (bytes, d) = f16(symmetric_scale(values, 8, true));
    let inverse = reciprocal(d);
    block[..2].copy_from_slice(&bytes);
    q4_0_pack_codes(&values.map(|v| (nearest((v * inverse).clamp(-8.0, 7.0)) + 8.0) as i32 as u8), block);
}

/// The 16 bytes of scales that Q4_K and Q5_K share, and the codes (0..=top).
fn with_minima(values: &[f32; K_COLS], top: u8) -> ([u8; 16], [u8; K_COLS]) {
    let groups = values.as_chunks::<32>().0;
    let fits: [(f32, f32); 8] = std::array::from_fn(|g| scale_and_minimum(&groups[g], top));
    let (d_bytes, d) = f16(fits.iter().fold(0.0, |a, f| f.0.max(a)) / 63.0);
    let (dmin_bytes, dmin) = f16(fits.iter().fold(0.0, |a, f| f.1.max(a)) / 63.0);
    let (mut scales, mut minima, mut codes) = ([0; 8], [0; 8], [0; K_COLS]);
    for (g, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (values, near) = (&groups[g], |v: f32, unit: f32| nearest((v * reciprocal(unit)).clamp(0.0, 63.0)));
        let (scale, minimum) = (near(fits[g].0, d), near(fits[g].1, dmin));
        // Rounded one by one, the two no longer fit each other best: look around.
        let (mut best, mut best_error) = ((scale, minimum), f32::INFINITY);
        for scale in [scale, scale - 1.0, scale + 1.0] {
            for minimum in [minimum, minimum - 1.0, minimum + 1.0] {
                if scale.clamp(0.0, 63.0) == scale && minimum.clamp(0.0, 63.0) == minimum {
                    let error = error_with_minimum(values, d * scale, dmin * minimum, top);
                    if error < best_error {
                        (best, best_error) = ((scale, minimum), error);
                    }
                }
            }
        }
        (scales[g], minima[g]) = (best.0 as i32 as u8, best.1 as i32 as u8);
        let (inverse, minimum) = (reciprocal(d * best.0), dmin * best.1);
        *codes = values.map(|v| nearest(((v + minimum) * inverse).clamp(0.0, top as f32)) as i32 as u8);
    }
    let mut header = [0; 16];
    header[..2].copy_from_slice(&d_bytes);
    header[2..4].copy_from_slice(&dmin_bytes);
    header[4..].copy_from_slice(&q4k_pack_scales(&scales, &minima));
    (header, codes)
}

pub(super) fn q4k(values: &[f32; K_COLS], block: &mut [u8; Q4K_BYTES]) {
    let (header, codes) = with_minima(values, 15);
    block[..16].copy_from_slice(&header);
    q4k_pack_codes(&codes, block);
}

pub(super) fn q5k(values: &[f32; K_COLS], block: &mut [u8; Q5K_BYTES]) {
    let (header, codes) = with_minima(values, 31);
    block[..16].copy_from_slice(&header);
    q5k_pack_codes(&codes, block);
}

pub(super) fn q6k(values: &[f32; K_COLS], block: &mut [u8; Q6K_BYTES]) {
    let groups = values.as_chunks::<16>().0;
    let fits: [f32; 16] = std::array::from_fn(|g| symmetric_scale(&groups[g], 32, true));
    let extreme = fits.iter().fold(0f32, |a, &s| if s.abs() > a.abs() { s } else { a });
    let (bytes, d) = f16(extreme / -128.0);
    let mut codes = [0; K_COLS];
    for (g, codes) in codes.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let near = nearest((fits[g] * reciprocal(d)).clamp(-128.0, 127.0));
        let (mut best, mut best_error) = (near, f32::INFINITY);
        for scale in [near, near - 1.0, near + 1.0] {
            let error = symmetric_error(&groups[g], d * scale, 32);
            if scale.clamp(-128.0, 127.0) == scale && error < best_error {
                (best, best_error) = (scale, error);
            }
        }
        block[192 + g] = best as i32 as i8 as u8;
        let inverse = reciprocal(d * best);
        *codes = groups[g].map(|v| (nearest((v * inverse).clamp(-32.0, 31.0)) + 32.0) as i32 as u8);
    }
    q6k_pack_codes(&codes, block);
    block[208..].copy_from_slice(&bytes);
}
