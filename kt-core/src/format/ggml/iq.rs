//! Readers of the scales and codes of IQ1, IQ2 and IQ3 blocks.
//!
//! A value of all of them is `d * unit * scale[g] * code`: the scales of groups are odd, the codes signed coordinates of a grid's
//! points (in IQ1: eight times them, and one more or less). Units: 1/8 in IQ1 and IQ2, 1/4 in IQ3_XXS, 1 in IQ3_S. All products are
//! exact in F32.
//!
//! Readers treat all columns of a block alike, in loops that compilers turn into a few vector instructions: what remains for each
//! point is to look it up.

use super::*;

/// What a block says beside its scale `d`: odd scales of `G` groups of `256 / G` columns, and `N` points of `256 / N` columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Points<const G: usize, const N: usize> {
    /// The scales of groups.
    pub scales: [u8; G],
    /// The points' places in the grid.
    pub points: [u16; N],
    /// A bit per column, the lowest bit of a byte first: whether its coordinate is negated; in IQ1, whether its code is one less
    /// than eight times the coordinate, not one more.
    pub bits: [u8; K_COLS / 8],
}

/// Signed codes of IQ2 and IQ3: the coordinates of points, negated where the bit is set.
pub fn signed_codes<const G: usize, const N: usize, const COLS: usize>(
    of: &Points<G, N>,
    grid: &[[i8; COLS]],
) -> [i8; K_COLS] {
    codes(of, grid, |p, bit| if bit { -p } else { p })
}

/// Signed codes of IQ1: eight times a coordinate, and one more, or less where the bit is set.
pub fn shifted_codes<const G: usize>(of: &Points<G, 32>) -> [i8; K_COLS] {
    codes(of, &IQ1_GRID, |p, bit| 8 * p + if bit { -1 } else { 1 })
}

/// `code(coordinate, bit)` of each column.
fn codes<const G: usize, const N: usize, const COLS: usize>(
    of: &Points<G, N>,
    grid: &[[i8; COLS]],
    code: impl Fn(i8, bool) -> i8,
) -> [i8; K_COLS] {
    const { assert!(N * COLS == K_COLS) };
    let mut out = [0; K_COLS];
    for (out, &point) in out.as_chunks_mut::<COLS>().0.iter_mut().zip(&of.points) {
        *out = grid[point as usize];
    }
    for (i, out) in out.iter_mut().enumerate() {
        *out = code(*out, of.bits[i / 8] >> (i % 8) & 1 != 0);
    }
    out
}

/// Four times the eight signs, a bit each, that seven bits stand for, the lowest seven first: an even number of each is set. The
/// highest four bits of `word` do not matter.
#[inline(always)]
pub fn even_signs(word: u32) -> [u8; 4] {
    // Each seven bits to a byte.
    let signs = word & 0x7f | (word & 0x3f80) << 1 | (word & 0x001f_c000) << 2 | (word & 0x0fe0_0000) << 3;
    // The lowest bit of a byte becomes the sum of all of them.
    let sum = signs ^ signs >> 4;
    let sum = sum ^ sum >> 2;
    let sum = sum ^ sum >> 1;
    (signs | (sum & 0x0101_0101) << 7).to_le_bytes()
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
    u32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]])
}

/// An IQ2_XXS block. Each group has four bytes that number points, and a word: four times seven bits of signs, then the scale.
#[inline(always)]
pub fn iq2_xxs_points(block: &[u8; IQ2_XXS_BYTES]) -> Points<8, 32> {
    let (mut scales, mut points, mut bits) = ([0; 8], [0; 32], [0; 32]);
    for g in 0..8 {
        let word = u32_at(&block[2..], 2 * g + 1);
        scales[g] = (word >> 28) as u8 * 2 + 1;
        bits[4 * g..][..4].copy_from_slice(&even_signs(word));
        for i in 0..4 {
            points[4 * g + i] = block[2 + 8 * g + i] as u16;
        }
    }
    Points { scales, points, bits }
}

/// An IQ2_XS block: a u16 per eight columns, nine bits that number a point and seven of signs; then nibbles of scales.
#[inline(always)]
pub fn iq2_xs_points(block: &[u8; IQ2_XS_BYTES]) -> Points<16, 32> {
    let (mut points, mut bits) = ([0; 32], [0; 32]);
    for i in 0..32 {
        let word = u16_at(&block[2..], i);
        points[i] = word & 511;
        bits[i] = even_signs((word >> 9) as u32)[0];
    }
    Points { scales: odd_nibbles(&block[66..]), points, bits }
}

/// An IQ2_S block: a byte that numbers a point and one of signs per eight columns, two high bits of the number in a byte for four of
/// them, nibbles of scales.
#[inline(always)]
pub fn iq2_s_points(block: &[u8; IQ2_S_BYTES]) -> Points<16, 32> {
    let (mut points, mut bits) = ([0; 32], [0; 32]);
    for (g, points) in points.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let (low, high) = (&block[2 + 4 * g..][..4], block[66 + g] as u16);
        for i in 0..4 {
            // Two bits to places 8 and 9.
            points[i] = low[i] as u16 | high << (8 - 2 * i) & 0x300;
        }
    }
    bits.copy_from_slice(&block[34..66]);
    Points { scales: odd_nibbles(&block[74..]), points, bits }
}

/// An IQ3_XXS block: a byte that numbers a point per four columns, then a word per group as in IQ2_XXS.
#[inline(always)]
pub fn iq3_xxs_points(block: &[u8; IQ3_XXS_BYTES]) -> Points<8, 64> {
    let (mut scales, mut points, mut bits) = ([0; 8], [0; 64], [0; 32]);
    for i in 0..64 {
        points[i] = block[2 + i] as u16;
    }
    for g in 0..8 {
        let word = u32_at(&block[66..], g);
        scales[g] = (word >> 28) as u8 * 2 + 1;
        bits[4 * g..][..4].copy_from_slice(&even_signs(word));
    }
    Points { scales, points, bits }
}

/// An IQ3_S block: a byte that numbers a point per four columns, a ninth bit for each, a byte of signs per eight columns, nibbles of
/// scales.
#[inline(always)]
pub fn iq3_s_points(block: &[u8; IQ3_S_BYTES]) -> Points<8, 64> {
    let (mut points, mut bits) = ([0; 64], [0; 32]);
    for (g, points) in points.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let (low, high) = (&block[2 + 8 * g..][..8], block[66 + g] as u16);
        for i in 0..8 {
            // A bit to place 8.
            points[i] = low[i] as u16 | high << (8 - i) & 0x100;
        }
    }
    bits.copy_from_slice(&block[74..106]);
    Points { scales: odd_nibbles(&block[106..]), points, bits }
}

/// An IQ1_S block: a byte that numbers a point per eight columns, then a u16 per group: four times three high bits, three of the
/// scale, and one for "less".
#[inline(always)]
pub fn iq1_s_points(block: &[u8; IQ1_S_BYTES]) -> Points<8, 32> {
    let (mut scales, mut points, mut bits) = ([0; 8], [0; 32], [0; 32]);
    for g in 0..8 {
        let word = u16_at(&block[34..], g);
        scales[g] = (word >> 12 & 7) as u8 * 2 + 1;
        let less = if word >> 15 == 1 { 0xff } else { 0 };
        for i in 0..4 {
            let high = (word as u32) << 8 >> (3 * i);
            points[4 * g + i] = block[2 + 4 * g + i] as u16 | high as u16 & 0x700;
            bits[4 * g + i] = less;
        }
    }
    Points { scales, points, bits }
}

/// An IQ1_M block: a byte that numbers a point per eight columns, a nibble for each of three high bits and one for "less", and four
/// u16, each of four scales of three bits and four bits of [`iq1_m_scale`].
#[inline(always)]
pub fn iq1_m_points(block: &[u8; IQ1_M_BYTES]) -> Points<16, 32> {
    let (mut points, mut bits) = ([0; 32], [0; 32]);
    for i in 0..32 {
        let high = block[32 + i / 2] >> (4 * (i % 2));
        points[i] = block[i] as u16 | (high as u16 & 7) << 8;
        bits[i] = if high & 8 != 0 { 0xff } else { 0 };
    }
    let scales = std::array::from_fn(|g| (u16_at(&block[48..], g / 4) >> (3 * (g % 4)) & 7) as u8 * 2 + 1);
    Points { scales, points, bits }
}

/// The F16 scale of an IQ1_M block, which lies in pieces.
#[inline(always)]
pub fn iq1_m_scale(block: &[u8; IQ1_M_BYTES]) -> f32 {
    crate::format::float::f16_to_f32(iq1_m_scale_bits(block))
}

/// The bits of [`iq1_m_scale`].
#[inline(always)]
pub fn iq1_m_scale_bits(block: &[u8; IQ1_M_BYTES]) -> u16 {
    (0..4).fold(0, |bits, i| bits | u16_at(&block[48..], i) >> 12 << (4 * i))
}

/// Writes the bytes of an F16 scale as [`iq1_m_scale`] reads them.
#[inline(always)]
pub fn iq1_m_pack_scale(d: [u8; 2], block: &mut [u8; IQ1_M_BYTES]) {
    for (i, word) in block[48..].as_chunks_mut::<2>().0.iter_mut().enumerate() {
        word[1] = word[1] & 15 | d[i / 2] >> (4 * (i % 2)) << 4;
    }
}
