//! Plain floating-point matrices: F32, F16, BF16. Stored as is, row-major.

use super::{Format, Matrix};

/// Little-endian F32 number `i` of a byte slice that need not be aligned.
#[inline]
pub fn f32_at(bytes: &[u8], i: usize) -> f32 {
    f32::from_le_bytes(bytes[i * 4..i * 4 + 4].try_into().expect("four bytes"))
}

/// Little-endian F16 number `i` of a byte slice that need not be aligned.
#[inline]
pub fn f16_at(bytes: &[u8], i: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes(bytes[i * 2..i * 2 + 2].try_into().expect("two bytes")))
}

/// Little-endian BF16 number `i` of a byte slice that need not be aligned.
#[inline]
pub fn bf16_at(bytes: &[u8], i: usize) -> f32 {
    bf16_to_f32(u16::from_le_bytes(bytes[i * 2..i * 2 + 2].try_into().expect("two bytes")))
}

/// A BF16 is the upper half of an F32.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// Rounds to the nearest BF16, ties to even; NaN stays NaN.
#[inline(always)]
pub fn f32_to_bf16(v: f32) -> u16 {
    let bits = v.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    if v.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded }
}

/// IEEE half to single precision, subnormals included.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    half::f16::from_bits(bits).to_f32()
}

pub(super) fn decode(m: &Matrix, row: usize, start: usize, out: &mut [f32]) {
    let bytes = m.row(row);
    match m.format() {
        Format::F32 => {
            for (o, b) in out.iter_mut().zip(bytes[start * 4..].chunks_exact(4)) {
                *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        Format::F16 => {
            for (o, b) in out.iter_mut().zip(bytes[start * 2..].chunks_exact(2)) {
                *o = f16_to_f32(u16::from_le_bytes([b[0], b[1]]));
            }
        }
        _ => {
            for (o, b) in out.iter_mut().zip(bytes[start * 2..].chunks_exact(2)) {
                *o = bf16_to_f32(u16::from_le_bytes([b[0], b[1]]));
            }
        }
    }
}
