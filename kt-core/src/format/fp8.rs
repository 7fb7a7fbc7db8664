//! FP8 E4M3 ("fn": no infinity, 0x7f and 0xff are NaN) with scales per 128 x 128 tile or per row.
//!
//! `W[n, k] = e4m3(code) * scale`, the scale being `weight_scale_inv[n / 128, k / 128]` or `weight_scale[n]`.

use super::{Format, Matrix};

/// Rows and columns that share one scale in [`Format::Fp8Block`].
pub const TILE: usize = 128;

const fn e4m3_bits(code: u8) -> u32 {
    let sign = ((code & 0x80) as u32) << 24;
    let (e, m) = ((code >> 3 & 15) as u32, (code & 7) as u32);
    let magnitude = match (e, m) {
        (15, 7) => 0x7fc0_0000,
        (0, 0) => 0,
        // m / 8 * 2^-6 with m in 1..8: normalize by the position of its highest bit.
        (0, _) => {
            let high = 31 - m.leading_zeros();
            (127 - 9 + high) << 23 | (m << (23 - high) & 0x7f_ffff)
        }
        _ => (e + 120) << 23 | m << 20,
    };
    sign | magnitude
}

/// Value of each E4M3 code.
pub const E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut i = 0;
    while i < 256 {
        table[i] = f32::from_bits(e4m3_bits(i as u8));
        i += 1;
    }
    table
};

/// Code of the E4M3 value nearest to `v`, ties to the even code. Beyond the largest magnitude, 448, it saturates; NaN stays
/// NaN.
#[inline(always)]
pub fn f32_to_e4m3(v: f32) -> u8 {
    let bits = v.to_bits();
    let (sign, magnitude) = ((bits >> 24) as u8 & 0x80, v.abs());
    let code = if v.is_nan() {
        0x7f
    } else if magnitude < 1.0 / 64.0 {
        // Subnormals are steps of 2^-9; adding 2^23 rounds to an integer, ties to even. 8 steps are the first normal code.
        (magnitude * 512.0 + 8_388_608.0).to_bits() as u8
    } else {
        let bits = bits & 0x7fff_ffff;
        // Keep three bits of the mantissa, and take 120 off the exponent's bias.
        let code = ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
        code.min(0x7e) as u8
    };
    sign | code
}

pub(super) fn decode(m: &Matrix, row: usize, start: usize, out: &mut [f32]) {
    let Some(scales) = m.scales() else { return };
    let codes = &m.row(row)[start..];
    if m.format() == Format::Fp8Channel {
        let s = scales.get(row, 0);
        for (o, &c) in out.iter_mut().zip(codes) {
            *o = E4M3[c as usize] * s;
        }
        return;
    }
    let mut col = start;
    let end = start + out.len();
    while col < end {
        let next = end.min((col / TILE + 1) * TILE);
        let s = scales.get(row / TILE, col / TILE);
        for (o, &c) in out[col - start..next - start].iter_mut().zip(&codes[col - start..]) {
            *o = E4M3[c as usize] * s;
        }
        col = next;
    }
}

#[cfg(test)]
mod tests {
    use super::{E4M3, f32_to_e4m3};

    #[test]
    fn encoding_takes_the_nearest_code_and_the_even_one_between_two() {
        for code in 0..=255u8 {
            assert!(f32_to_e4m3(E4M3[code as usize]) == code || code & 0x7f == 0x7f, "code {code:#x}");
        }
        for code in 0..0x7eu8 {
            let (low, high) = (E4M3[code as usize], E4M3[code as usize + 1]);
            let middle = (low + high) / 2.0;
            let even = if code % 2 == 0 { code } else { code + 1 };
            assert_eq!(f32_to_e4m3(middle), even);
            assert_eq!(f32_to_e4m3(-middle), even | 0x80);
            assert_eq!(f32_to_e4m3(middle.next_down()), code);
            assert_eq!(f32_to_e4m3(middle.next_up()), code + 1);
        }
        assert_eq!(f32_to_e4m3(1e30), 0x7e);
        assert_eq!(f32_to_e4m3(f32::NEG_INFINITY), 0xfe);
        assert!(E4M3[f32_to_e4m3(f32::NAN) as usize].is_nan());
    }

    #[test]
    fn examples_of_the_format() {
        assert_eq!(E4M3[0x38], 1.0);
        assert_eq!(E4M3[0x01], 2f32.powi(-9));
        assert_eq!(E4M3[0x08], 2f32.powi(-6));
        assert_eq!(E4M3[0xf8], -256.0);
        assert_eq!(E4M3[0x7a], 320.0);
        assert_eq!(E4M3[0x7e], 448.0);
        assert!(E4M3[0x7f].is_nan() && E4M3[0xff].is_nan());
        for (code, &v) in E4M3.iter().enumerate() {
            let (e, m) = ((code >> 3 & 15) as i32, (code & 7) as f32);
            let sign = if code < 128 { 1.0 } else { -1.0 };
            let formula = if e == 0 { m / 8.0 * 2f32.powi(-6) } else { (1.0 + m / 8.0) * 2f32.powi(e - 7) };
            assert!(v.is_nan() || v == sign * formula, "code {code:#x}");
        }
    }
}
