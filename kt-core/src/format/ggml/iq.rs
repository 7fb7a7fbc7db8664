//! Readers of the scales and codes of IQ1, IQ2 and IQ3 blocks.
//!
//! A value of all of them is `d * unit * scale[g] * code`: the scales of groups are odd, the codes signed coordinates of a grid's
//! points (in IQ1: eight times them, and one more or less). Units: 1/8 in IQ1 and IQ2, 1/4 in IQ3_XXS, 1 in IQ3_S. All products are
//! exact in F32.

use super::*;

/// The odd scales of `G` groups of `256 / G` columns, and the signed codes of the columns.
pub type OddScales<const G: usize> = ([u8; G], [i8; K_COLS]);

/// The eight signs that seven bits stand for, a bit each: an even number of them is set.
#[inline(always)]
pub fn even_signs(bits: u32) -> u8 {
    let bits = bits & 127;
    (bits | (bits.count_ones() & 1) << 7) as u8
}

/// A point's coordinates, negated where the bit is set.
#[inline(always)]
fn signed<const N: usize>(point: &[i8; N], signs: u8, out: &mut [i8]) {
    for (i, (o, p)) in out.iter_mut().zip(point).enumerate() {
        *o = if signs >> i & 1 == 0 { *p } else { -p };
    }
}

/// The scales in nibbles, low ones first.
#[inline(always)]
fn odd_nibbles<const G: usize>(bytes: &[u8]) -> [u8; G] {
    std::array::from_fn(|g| 2 * (bytes[g / 2] >> (4 * (g % 2)) & 15) + 1)
}

#[inline(always)]
fn u16_at(bytes: &[u8], i: usize) -> u16 {
    u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]])
}

#[inline(always)]
fn u32_at(bytes: &[u8], i: usize) -> u32 {
    u16_at(bytes, 2 * i) as u32 | (u16_at(bytes, 2 * i + 1) as u32) << 16
}

/// Scales and codes of an IQ2_XXS block. Each group has four bytes that number points, and a word: four times seven bits of
/// signs, then the scale.
#[inline(always)]
pub fn iq2_xxs_codes(block: &[u8; IQ2_XXS_BYTES]) -> OddScales<8> {
    let (mut scales, mut codes) = ([0; 8], [0; K_COLS]);
    for (g, (bytes, codes)) in block[2..].as_chunks::<8>().0.iter().zip(codes.as_chunks_mut::<32>().0).enumerate() {
        let word = u32_at(bytes, 1);
        scales[g] = (word >> 28) as u8 * 2 + 1;
        for (i, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            signed(&IQ2_XXS_GRID[bytes[i] as usize], even_signs(word >> (7 * i)), codes);
        }
    }
    (scales, codes)
}

/// Scales and codes of an IQ2_XS block: a u16 per eight columns, nine bits that number a point and seven of signs; then nibbles of
/// scales.
#[inline(always)]
pub fn iq2_xs_codes(block: &[u8; IQ2_XS_BYTES]) -> OddScales<16> {
    let mut codes = [0; K_COLS];
    for (i, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let word = u16_at(&block[2..], i);
        signed(&IQ2_XS_GRID[word as usize & 511], even_signs(word as u32 >> 9), codes);
    }
    (odd_nibbles(&block[66..]), codes)
}

/// Scales and codes of an IQ2_S block: a byte that numbers a point and one of signs per eight columns, two high bits of the number
/// in a byte for four of them, nibbles of scales.
#[inline(always)]
pub fn iq2_s_codes(block: &[u8; IQ2_S_BYTES]) -> OddScales<16> {
    let mut codes = [0; K_COLS];
    for (i, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let high = block[66 + i / 4] >> (2 * (i % 4)) & 3;
        signed(&IQ2_S_GRID[block[2 + i] as usize | (high as usize) << 8], block[34 + i], codes);
    }
    (odd_nibbles(&block[74..]), codes)
}

/// Scales and codes of an IQ3_XXS block: a byte that numbers a point per four columns, then a word per group as in IQ2_XXS.
#[inline(always)]
pub fn iq3_xxs_codes(block: &[u8; IQ3_XXS_BYTES]) -> OddScales<8> {
    let (mut scales, mut codes) = ([0; 8], [0; K_COLS]);
    for (g, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let word = u32_at(&block[66..], g);
        scales[g] = (word >> 28) as u8 * 2 + 1;
        for (i, codes) in codes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let signs = even_signs(word >> (7 * (i / 2))) >> (4 * (i % 2));
            signed(&IQ3_XXS_GRID[block[2 + 8 * g + i] as usize], signs, codes);
        }
    }
    (scales, codes)
}

/// Scales and codes of an IQ3_S block: a byte that numbers a point per four columns, a ninth bit for each, a byte of signs per eight
/// columns, nibbles of scales.
#[inline(always)]
pub fn iq3_s_codes(block: &[u8; IQ3_S_BYTES]) -> OddScales<8> {
    let mut codes = [0; K_COLS];
    for (i, codes) in codes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let high = block[66 + i / 8] >> (i % 8) & 1;
        let signs = block[74 + i / 2] >> (4 * (i % 2));
        signed(&IQ3_S_GRID[block[2 + i] as usize | (high as usize) << 8], signs, codes);
    }
    (odd_nibbles(&block[106..]), codes)
}

/// Eight times a point, and one more or less.
#[inline(always)]
fn shifted(point: &[i8; 8], less: bool, out: &mut [i8; 8]) {
    *out = point.map(|p| 8 * p + if less { -1 } else { 1 });
}

/// Scales and codes of an IQ1_S block: a byte that numbers a point per eight columns, then a u16 per group: four times three high
/// bits, three of the scale, and one for "less".
#[inline(always)]
pub fn iq1_s_codes(block: &[u8; IQ1_S_BYTES]) -> OddScales<8> {
    let (mut scales, mut codes) = ([0; 8], [0; K_COLS]);
    for (g, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let word = u16_at(&block[34..], g);
        scales[g] = (word >> 12 & 7) as u8 * 2 + 1;
        for (i, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let point = block[2 + 4 * g + i] as usize | (word as usize >> (3 * i) & 7) << 8;
            shifted(&IQ1_GRID[point], word >> 15 == 1, codes);
        }
    }
    (scales, codes)
}

/// Scales and codes of an IQ1_M block: a byte that numbers a point per eight columns, a nibble for each of three high bits and one
/// for "less", and four u16, each of four scales of three bits and four bits of [`iq1_m_scale`].
#[inline(always)]
pub fn iq1_m_codes(block: &[u8; IQ1_M_BYTES]) -> OddScales<16> {
    let mut codes = [0; K_COLS];
    for (i, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let high = block[32 + i / 2] >> (4 * (i % 2));
        shifted(&IQ1_GRID[block[i] as usize | (high as usize & 7) << 8], high & 8 != 0, codes);
    }
    (std::array::from_fn(|g| (u16_at(&block[48..], g / 4) >> (3 * (g % 4)) & 7) as u8 * 2 + 1), codes)
}

/// The F16 scale of an IQ1_M block, which lies in pieces.
#[inline(always)]
pub fn iq1_m_scale(block: &[u8; IQ1_M_BYTES]) -> f32 {
    let bits = (0..4).fold(0, |bits, i| bits | u16_at(&block[48..], i) >> 12 << (4 * i));
    crate::format::float::f16_to_f32(bits)
}

/// Writes the bytes of an F16 scale as [`iq1_m_scale`] reads them.
#[inline(always)]
pub fn iq1_m_pack_scale(d: [u8; 2], block: &mut [u8; IQ1_M_BYTES]) {
    for (i, word) in block[48..].as_chunks_mut::<2>().0.iter_mut().enumerate() {
        word[1] = word[1] & 15 | d[i / 2] >> (4 * (i % 2)) << 4;
    }
}
