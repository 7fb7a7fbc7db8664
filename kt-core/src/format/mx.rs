//! Microscaling formats: MXFP4 (E2M1 codes) and MXFP8 (E4M3 codes), with one E8M0 scale per 32 columns.
//!
//! NVFP4 has E2M1 codes, too, with an E4M3 scale per 16 columns and a factor for all of them: `W = code * (scale * factor)`.
//!
//! A byte of MXFP4 or NVFP4 holds two columns, the even one in the low nibble. An E8M0 byte `u` is `2^(u - 127)`; 255 is NaN. Products are
//! exact in F32, but for those of the largest scales, which are beyond its range.

use super::fp8::E4M3;
use super::{Format, Matrix};

/// Columns that share one scale.
pub const COLS: usize = 32;

/// Columns that share one scale in NVFP4.
pub const NV_COLS: usize = 16;

/// Value of each E2M1 code: three bits of magnitude, and a sign.
pub const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Value of an E8M0 byte. 0 is a subnormal F32.
#[inline(always)]
pub fn e8m0_to_f32(u: u8) -> f32 {
    f32::from_bits(match u {
        0 => 0x0040_0000,
        255 => 0x7fc0_0000,
        _ => (u as u32) << 23,
    })
}

/// Code of the E2M1 value nearest to `v`, ties to the even code; larger magnitudes than 6 saturate.
#[inline(always)]
pub fn f32_to_e2m1(v: f32) -> u8 {
    let m = v.abs();
    let code = (m > 0.25) as u8
        + (m >= 0.75) as u8
        + (m > 1.25) as u8
        + (m >= 1.75) as u8
        + (m > 2.5) as u8
        + (m >= 3.5) as u8
        + (m > 5.0) as u8;
    code | (v.is_sign_negative() as u8) << 3
}

pub(super) fn decode(m: &Matrix, row: usize, start: usize, out: &mut [f32]) {
    let Some(scales) = m.scales() else { return };
    let codes = m.row(row);
    let group = if m.format() == Format::Nvfp4 { NV_COLS } else { COLS };
    let (mut col, end) = (start, start + out.len());
    while col < end {
        let next = end.min((col / group + 1) * group);
        let s = scales.get(row, col / group);
        let out = &mut out[col - start..next - start];
        if m.format() != Format::Mxfp8 {
            // Groups and decoded ranges are even, so bytes never straddle them.
            for (o, &byte) in out.chunks_exact_mut(2).zip(&codes[col / 2..]) {
                o[0] = E2M1[(byte & 15) as usize] * s;
                o[1] = E2M1[(byte >> 4) as usize] * s;
            }
        } else {
            for (o, &c) in out.iter_mut().zip(&codes[col..]) {
                *o = E4M3[c as usize] * s;
            }
        }
        col = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_powers_of_two_down_to_a_subnormal() {
        for u in 0..255u8 {
            assert_eq!(e8m0_to_f32(u) as f64, 2f64.powi(u as i32 - 127), "{u}");
        }
        assert!(e8m0_to_f32(255).is_nan() && e8m0_to_f32(0) > 0.0);
    }

    #[test]
    fn encoding_takes_the_nearest_code_and_the_even_one_between_two() {
        for code in 0..7u8 {
            let (low, high) = (E2M1[code as usize], E2M1[code as usize + 1]);
            let middle = (low + high) / 2.0;
            let even = code + code % 2;
            assert_eq!(f32_to_e2m1(low), code);
            assert_eq!((f32_to_e2m1(middle), f32_to_e2m1(-middle)), (even, even | 8), "{middle}");
            assert_eq!((f32_to_e2m1(middle.next_down()), f32_to_e2m1(middle.next_up())), (code, code + 1));
        }
        assert_eq!((f32_to_e2m1(1e30), f32_to_e2m1(-1e30), f32_to_e2m1(-0.0)), (7, 15, 8));
    }
}
