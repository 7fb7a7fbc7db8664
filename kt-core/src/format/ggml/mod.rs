//! GGUF block types: Q4_0 to Q8_0, the K-types, the IQ types, TQ1_0, TQ2_0, and MXFP4 as GGUF has it.
//!
//! A row is a sequence of blocks that carry their own scales. `d`, `m` and `dmin` are F16; all products below are exact in
//! F32, so a value is rounded at most once, in the addition of a minimum.
//!
//! | type | columns | bytes | layout | value |
//! | --- | --- | --- | --- | --- |
//! | Q8_0 | 32 | 34 | `d`, 32 signed codes | `d * q` |
//! | Q4_0 | 32 | 18 | `d`, 16 bytes: low nibbles are columns 0..16, high ones 16..32 | `d * (q - 8)` |
//! | Q4_1 | 32 | 20 | `d`, `m`, nibbles as Q4_0 | `d * q + m` |
//! | Q5_0 | 32 | 22 | `d`, 4 bytes: bit `j` is bit 4 of column `j`; nibbles as Q4_0 | `d * (q - 16)` |
//! | Q5_1 | 32 | 24 | `d`, `m`, then as Q5_0 | `d * q + m` |
//! | IQ4_NL | 32 | 18 | as Q4_0 | `d * IQ4_VALUES[q]` |
//! | MXFP4 | 32 | 17 | exponent byte `e`, nibbles as Q4_0 | `e2m1(q) * 2^(e - 127)` |
//! | Q2_K | 256 | 84 | 16 bytes: scale and minimum of a group in a nibble each; 64 bytes of bit pairs; `d`, `dmin` | `d * sc[g] * q - dmin * mn[g]` |
//! | Q3_K | 256 | 110 | 32 bytes of high bits, 64 bytes of bit pairs, 12 bytes of scales, `d` | `d * sc[g] * (q - 4)` |
//! | Q4_K | 256 | 144 | `d`, `dmin`, 12 bytes of scales, 128 bytes of nibbles | as Q2_K |
//! | Q5_K | 256 | 176 | `d`, `dmin`, 12 bytes of scales, 32 bytes of high bits, 128 bytes of nibbles | as Q2_K |
//! | Q6_K | 256 | 210 | 128 bytes of nibbles, 64 bytes of high bit pairs, 16 signed scales, `d` | `d * sc[g] * (q - 32)` |
//! | IQ4_XS | 256 | 136 | `d`, 6 bytes of scales, 128 bytes: nibbles of each group as Q4_0 | `d * sc[g] * IQ4_VALUES[q]` |
//!
//! | IQ2_XXS | 256 | 66 | `d`, then see [`iq2_xxs_points`] | `d / 8 * sc[g] * point` |
//! | IQ2_XS | 256 | 74 | `d`, then see [`iq2_xs_points`] | as IQ2_XXS |
//! | IQ2_S | 256 | 82 | `d`, then see [`iq2_s_points`] | as IQ2_XXS |
//! | IQ3_XXS | 256 | 98 | `d`, then see [`iq3_xxs_points`] | `d / 4 * sc[g] * point` |
//! | IQ3_S | 256 | 110 | `d`, then see [`iq3_s_points`] | `d * sc[g] * point` |
//! | IQ1_S | 256 | 50 | `d`, then see [`iq1_s_points`] | `d * sc[g] * (point + 1/8)`, or `- 1/8` |
//! | IQ1_M | 256 | 56 | see [`iq1_m_points`] | as IQ1_S |
//! | TQ1_0 | 256 | 54 | 52 bytes of five (the last four: of four) ternary digits, `d` | `d * (q - 1)` |
//! | TQ2_0 | 256 | 66 | 64 bytes of bit pairs, `d` | `d * (q - 1)` |
//!
//! Groups `g` are 32 columns in Q4_K, Q5_K, IQ4_XS, IQ2_XXS, IQ3_XXS, IQ3_S and IQ1_S, 16 in the others. The readers of scales and
//! codes are public: kernels use them.

mod codes;
mod grids;
mod iq;

use super::float::f16_at;
use super::{Format, Matrix};

pub use codes::*;
pub use grids::*;
pub use iq::*;

/// Bytes of a Q8_0 block.
pub const Q8_0_BYTES: usize = 34;
/// Bytes of a Q4_0 block.
pub const Q4_0_BYTES: usize = 18;
/// Bytes of a Q4_1 block.
pub const Q4_1_BYTES: usize = 20;
/// Bytes of a Q5_0 block.
pub const Q5_0_BYTES: usize = 22;
/// Bytes of a Q5_1 block.
pub const Q5_1_BYTES: usize = 24;
/// Bytes of an IQ4_NL block.
pub const IQ4_NL_BYTES: usize = 18;
/// Bytes of a block of GGUF's MXFP4.
pub const MXFP4_BYTES: usize = 17;
/// Bytes of a Q2_K block.
pub const Q2K_BYTES: usize = 84;
/// Bytes of a Q3_K block.
pub const Q3K_BYTES: usize = 110;
/// Bytes of a Q4_K block.
pub const Q4K_BYTES: usize = 144;
/// Bytes of a Q5_K block.
pub const Q5K_BYTES: usize = 176;
/// Bytes of a Q6_K block.
pub const Q6K_BYTES: usize = 210;
/// Bytes of an IQ4_XS block.
pub const IQ4_XS_BYTES: usize = 136;
/// Bytes of an IQ2_XXS block.
pub const IQ2_XXS_BYTES: usize = 66;
/// Bytes of an IQ2_XS block.
pub const IQ2_XS_BYTES: usize = 74;
/// Bytes of an IQ2_S block.
pub const IQ2_S_BYTES: usize = 82;
/// Bytes of an IQ3_XXS block.
pub const IQ3_XXS_BYTES: usize = 98;
/// Bytes of an IQ3_S block.
pub const IQ3_S_BYTES: usize = 110;
/// Bytes of an IQ1_S block.
pub const IQ1_S_BYTES: usize = 50;
/// Bytes of an IQ1_M block.
pub const IQ1_M_BYTES: usize = 56;
/// Bytes of a TQ1_0 block.
pub const TQ1_0_BYTES: usize = 54;
/// Bytes of a TQ2_0 block.
pub const TQ2_0_BYTES: usize = 66;
/// Columns of a block of the types without groups: Q4_0 to Q8_0, IQ4_NL, MXFP4.
pub const COLS: usize = 32;
/// Columns of a block of all other types.
pub const K_COLS: usize = 256;

/// What the codes of IQ4_NL and IQ4_XS stand for.
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// What the codes of MXFP4 stand for, in halves. Code 8, minus zero by its bits, is plain zero as in ggml.
pub const MXFP4_HALVES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Columns and bytes of a block, for formats of this module; `None` for others.
pub fn block(format: Format) -> Option<(usize, usize)> {
    Some(match format {
        Format::Q8_0 => (COLS, Q8_0_BYTES),
        Format::Q4_0 => (COLS, Q4_0_BYTES),
        Format::Q4_1 => (COLS, Q4_1_BYTES),
        Format::Q5_0 => (COLS, Q5_0_BYTES),
        Format::Q5_1 => (COLS, Q5_1_BYTES),
        Format::Iq4Nl => (COLS, IQ4_NL_BYTES),
        Format::Mxfp4Ggml => (COLS, MXFP4_BYTES),
        Format::Q2K => (K_COLS, Q2K_BYTES),
        Format::Q3K => (K_COLS, Q3K_BYTES),
        Format::Q4K => (K_COLS, Q4K_BYTES),
        Format::Q5K => (K_COLS, Q5K_BYTES),
        Format::Q6K => (K_COLS, Q6K_BYTES),
        Format::Iq4Xs => (K_COLS, IQ4_XS_BYTES),
        Format::Iq2Xxs => (K_COLS, IQ2_XXS_BYTES),
        Format::Iq2Xs => (K_COLS, IQ2_XS_BYTES),
        Format::Iq2S => (K_COLS, IQ2_S_BYTES),
        Format::Iq3Xxs => (K_COLS, IQ3_XXS_BYTES),
        Format::Iq3S => (K_COLS, IQ3_S_BYTES),
        Format::Iq1S => (K_COLS, IQ1_S_BYTES),
        Format::Iq1M => (K_COLS, IQ1_M_BYTES),
        Format::Tq1_0 => (K_COLS, TQ1_0_BYTES),
        Format::Tq2_0 => (K_COLS, TQ2_0_BYTES),
        _ => return None,
    })
}

/// Half of an E8M0 scale: `2^(e - 128)`, subnormal for `e` of 0 and 1; NaN for 255.
#[inline(always)]
pub fn e8m0_half(e: u8) -> f32 {
    match e {
        0 | 1 => f32::from_bits(0x0020_0000 << e),
        255 => f32::NAN,
        _ => f32::from_bits((e as u32 - 1) << 23),
    }
}

fn q8_0(block: &[u8; Q8_0_BYTES], out: &mut [f32; COLS]) {
    let d = f16_at(block, 0);
    for (o, &q) in out.iter_mut().zip(&block[2..]) {
        *o = d * q as i8 as f32;
    }
}

fn q4_0(block: &[u8; Q4_0_BYTES], out: &mut [f32; COLS]) {
    let d = f16_at(block, 0);
    for (o, q) in out.iter_mut().zip(q4_0_codes(block)) {
        *o = d * (q as i32 - 8) as f32;
    }
}

fn with_minimum(block: &[u8], codes: [u8; COLS], out: &mut [f32; COLS]) {
    let (d, m) = (f16_at(block, 0), f16_at(block, 1));
    for (o, q) in out.iter_mut().zip(codes) {
        *o = d * q as i32 as f32 + m;
    }
}

fn q4_1(block: &[u8; Q4_1_BYTES], out: &mut [f32; COLS]) {
    with_minimum(block, nibbles(block.last_chunk().expect("a block has 20 bytes")), out);
}

fn q5_0(block: &[u8; Q5_0_BYTES], out: &mut [f32; COLS]) {
    let d = f16_at(block, 0);
    for (o, q) in out.iter_mut().zip(five_bit_codes(block.last_chunk().expect("a block has 22 bytes"))) {
        *o = d * (q as i32 - 16) as f32;
    }
}

fn q5_1(block: &[u8; Q5_1_BYTES], out: &mut [f32; COLS]) {
    with_minimum(block, five_bit_codes(block.last_chunk().expect("a block has 24 bytes")), out);
}

fn iq4_nl(block: &[u8; IQ4_NL_BYTES], out: &mut [f32; COLS]) {
    let d = f16_at(block, 0);
    for (o, q) in out.iter_mut().zip(nibbles(block.last_chunk().expect("a block has 18 bytes"))) {
        *o = d * IQ4_VALUES[q as usize & 15] as f32;
    }
}

fn mxfp4(block: &[u8; MXFP4_BYTES], out: &mut [f32; COLS]) {
    let half = e8m0_half(block[0]);
    for (o, q) in out.iter_mut().zip(nibbles(block.last_chunk().expect("a block has 17 bytes"))) {
        *o = half * MXFP4_HALVES[q as usize & 15] as f32;
    }
}

/// `scale[g] * q - min[g]` for groups of `N` columns.
fn grouped<const N: usize>(codes: &[u8; K_COLS], out: &mut [f32; K_COLS], group: impl Fn(usize) -> (f32, f32)) {
    for (g, (out, codes)) in out.as_chunks_mut::<N>().0.iter_mut().zip(codes.as_chunks::<N>().0).enumerate() {
        let (scale, min) = group(g);
        for (o, &q) in out.iter_mut().zip(codes) {
            *o = scale * q as i32 as f32 - min;
        }
    }
}

/// `scale[g] * value(q)` for groups of `N` columns.
fn scaled<const N: usize>(
    codes: &[u8; K_COLS],
    out: &mut [f32; K_COLS],
    scale: impl Fn(usize) -> f32,
    value: impl Fn(u8) -> i32,
) {
    for (g, (out, codes)) in out.as_chunks_mut::<N>().0.iter_mut().zip(codes.as_chunks::<N>().0).enumerate() {
        let scale = scale(g);
        for (o, &q) in out.iter_mut().zip(codes) {
            *o = scale * value(q) as f32;
        }
    }
}

fn q2k(block: &[u8; Q2K_BYTES], out: &mut [f32; K_COLS]) {
    let (d, dmin) = (f16_at(&block[80..], 0), f16_at(&block[80..], 1));
    let codes = bit_pairs(block[16..].first_chunk().expect("a block has 84 bytes"));
    grouped::<16>(&codes, out, |g| (d * (block[g] & 15) as f32, dmin * (block[g] >> 4) as f32));
}

/// Q4_K and Q5_K, which differ in their codes.
fn with_minima(header: &[u8], codes: &[u8; K_COLS], out: &mut [f32; K_COLS]) {
    let (d, dmin) = (f16_at(header, 0), f16_at(header, 1));
    let (scales, mins) = q4k_scales(header[4..].first_chunk().expect("a header has 16 bytes"));
    grouped::<32>(codes, out, |g| (d * scales[g] as f32, dmin * mins[g] as f32));
}

fn q3k(block: &[u8; Q3K_BYTES], out: &mut [f32; K_COLS]) {
    let d = f16_at(&block[108..], 0);
    let scales = q3k_scales(block[96..].first_chunk().expect("a block has 110 bytes"));
    scaled::<16>(&q3k_codes(block), out, |g| d * scales[g] as f32, |q| q as i32 - 4);
}

fn q6k(block: &[u8; Q6K_BYTES], out: &mut [f32; K_COLS]) {
    let d = f16_at(&block[208..], 0);
    scaled::<16>(&q6k_codes(block), out, |g| d * block[192 + g] as i8 as f32, |q| q as i32 - 32);
}

fn iq4_xs(block: &[u8; IQ4_XS_BYTES], out: &mut [f32; K_COLS]) {
    let d = f16_at(block, 0);
    let scales = iq4_xs_scales(block[2..].first_chunk().expect("a block has 136 bytes"));
    scaled::<32>(&iq4_xs_codes(block), out, |g| d * scales[g] as f32, |q| IQ4_VALUES[q as usize & 15].into());
}

/// `unit * scale[g] * code` for `G` groups.
fn odd<const G: usize>(unit: f32, scales: [u8; G], codes: [i8; K_COLS], out: &mut [f32; K_COLS]) {
    for (g, (out, codes)) in out.chunks_exact_mut(K_COLS / G).zip(codes.chunks_exact(K_COLS / G)).enumerate() {
        let scale = unit * scales[g] as f32;
        for (o, &q) in out.iter_mut().zip(codes) {
            *o = scale * q as f32;
        }
    }
}

/// IQ2 and IQ3.
fn signed<const G: usize, const N: usize, const COLS: usize>(
    unit: f32,
    of: Points<G, N>,
    grid: &[[i8; COLS]],
    out: &mut [f32; K_COLS],
) {
    odd(unit, of.scales, signed_codes(&of, grid), out);
}

/// IQ1.
fn shifted<const G: usize>(unit: f32, of: Points<G, 32>, out: &mut [f32; K_COLS]) {
    odd(unit, of.scales, shifted_codes(&of), out);
}

/// `d * (q - 1)`.
fn ternary(d: f32, codes: &[u8; K_COLS], out: &mut [f32; K_COLS]) {
    for (o, &q) in out.iter_mut().zip(codes) {
        *o = d * (q as i32 - 1) as f32;
    }
}

fn tq2_0(block: &[u8; TQ2_0_BYTES], out: &mut [f32; K_COLS]) {
    let codes = bit_pairs(block.first_chunk().expect("a block has 66 bytes"));
    ternary(f16_at(&block[64..], 0), &codes, out);
}

/// Decodes block after block from column `start`, which is a multiple of `N`.
fn blocks<const BYTES: usize, const N: usize>(
    row: &[u8],
    start: usize,
    out: &mut [f32],
    block: impl Fn(&[u8; BYTES], &mut [f32; N]),
) {
    let (row, _) = row.as_chunks::<BYTES>();
    for (b, o) in row[start / N..].iter().zip(out.as_chunks_mut::<N>().0) {
        block(b, o);
    }
}

pub(super) fn decode(m: &Matrix, row: usize, start: usize, out: &mut [f32]) {
    let row = m.row(row);
    match m.format() {
        Format::Q8_0 => blocks(row, start, out, q8_0),
        Format::Q4_0 => blocks(row, start, out, q4_0),
        Format::Q4_1 => blocks(row, start, out, q4_1),
        Format::Q5_0 => blocks(row, start, out, q5_0),
        Format::Q5_1 => blocks(row, start, out, q5_1),
        Format::Iq4Nl => blocks(row, start, out, iq4_nl),
        Format::Mxfp4Ggml => blocks(row, start, out, mxfp4),
        Format::Q2K => blocks(row, start, out, q2k),
        Format::Q3K => blocks(row, start, out, q3k),
        Format::Q4K => blocks(row, start, out, |b: &[u8; Q4K_BYTES], o| with_minima(b, &q4k_codes(b), o)),
        Format::Q5K => blocks(row, start, out, |b: &[u8; Q5K_BYTES], o| with_minima(b, &q5k_codes(b), o)),
        Format::Q6K => blocks(row, start, out, q6k),
        Format::Iq4Xs => blocks(row, start, out, iq4_xs),
        Format::Iq2Xxs => {
            blocks(row, start, out, |b, o| signed(f16_at(b, 0) / 8.0, iq2_xxs_points(b), &IQ2_XXS_GRID, o))
        }
        Format::Iq2Xs => blocks(row, start, out, |b, o| signed(f16_at(b, 0) / 8.0, iq2_xs_points(b), &IQ2_XS_GRID, o)),
        Format::Iq2S => blocks(row, start, out, |b, o| signed(f16_at(b, 0) / 8.0, iq2_s_points(b), &IQ2_S_GRID, o)),
        Format::Iq3Xxs => {
            blocks(row, start, out, |b, o| signed(f16_at(b, 0) / 4.0, iq3_xxs_points(b), &IQ3_XXS_GRID, o))
        }
        Format::Iq3S => blocks(row, start, out, |b, o| signed(f16_at(b, 0), iq3_s_points(b), &IQ3_S_GRID, o)),
        Format::Iq1S => blocks(row, start, out, |b, o| shifted(f16_at(b, 0) / 8.0, iq1_s_points(b), o)),
        Format::Iq1M => blocks(row, start, out, |b, o| shifted(iq1_m_scale(b) / 8.0, iq1_m_points(b), o)),
        Format::Tq1_0 => blocks(row, start, out, |b, o| ternary(f16_at(&b[52..], 0), &tq1_0_codes(b), o)),
        Format::Tq2_0 => blocks(row, start, out, tq2_0),
        _ => {}
    }
}

/// Checks that the scales of each block of a row (`d`, `m`, `dmin`, MXFP4's exponent) are finite; the message names the first
/// block where they are not.
pub(super) fn check_scales(format: Format, row: &[u8]) -> Result<(), String> {
    let Some((_, bytes)) = block(format) else { return Ok(()) };
    let (at, names): (usize, &[&str]) = match format {
        Format::Mxfp4Ggml => {
            return match row.chunks_exact(bytes).position(|block| block[0] == 255) {
                Some(index) => Err(format!("block {index}: its exponent is NaN")),
                None => Ok(()),
            };
        }
        Format::Q4_1 | Format::Q5_1 => (0, &["d", "m"]),
        Format::Q4K | Format::Q5K => (0, &["d", "dmin"]),
        Format::Q2K => (80, &["d", "dmin"]),
        Format::Q3K => (108, &["d"]),
        Format::Q6K => (208, &["d"]),
        Format::Tq1_0 => (52, &["d"]),
        Format::Tq2_0 => (64, &["d"]),
        Format::Iq1M => {
            let scales = row.as_chunks().0.iter().map(iq1_m_scale);
            return match scales.enumerate().find(|(_, d)| !d.is_finite()) {
                Some((index, d)) => Err(format!("block {index}: d is {d}")),
                None => Ok(()),
            };
        }
        _ => (0, &["d"]),
    };
    for (index, block) in row.chunks_exact(bytes).enumerate() {
        for (i, name) in names.iter().enumerate() {
            let v = f16_at(&block[at..], i);
            if !v.is_finite() {
                return Err(format!("block {index}: {name} is {v}"));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_unpack_as_the_format_says_and_pack_back() {
        // Straight from the definition: for j < 4 the low six bits, for j >= 4 four bits of byte j + 4 and two of byte j - 4.
        let s: [u8; 12] = std::array::from_fn(|i| (i as u8).wrapping_mul(89).wrapping_add(37));
        let (scales, mins) = q4k_scales(&s);
        for j in 0..8 {
            let (scale, min) = if j < 4 {
                (s[j] & 63, s[j + 4] & 63)
            } else {
                ((s[j + 4] & 15) | ((s[j - 4] >> 6) << 4), (s[j + 4] >> 4) | ((s[j] >> 6) << 4))
            };
            assert_eq!((scales[j], mins[j]), (scale, min), "group {j}");
        }
        assert_eq!(q4k_pack_scales(&scales, &mins), s);
    }

    #[test]
    fn codes_pack_back_to_the_same_bytes() {
        fn bytes<const N: usize>(seed: u8) -> [u8; N] {
            std::array::from_fn(|i| (i as u8).wrapping_mul(113).wrapping_add((i >> 8) as u8 * 7).wrapping_add(seed))
        }
        for seed in [3, 80, 191] {
            let (q4_0, q4k, q5k, q6k) = (bytes(seed), bytes(seed), bytes(seed), bytes(seed));
            let mut packed = [0; Q4_0_BYTES];
            q4_0_pack_codes(&q4_0_codes(&q4_0), &mut packed);
            assert_eq!(packed[2..], q4_0[2..]);
            let mut packed = [0; Q4K_BYTES];
            q4k_pack_codes(&q4k_codes(&q4k), &mut packed);
            assert_eq!(packed[16..], q4k[16..]);
            let mut packed = [0; Q5K_BYTES];
            q5k_pack_codes(&q5k_codes(&q5k), &mut packed);
            assert_eq!(packed[16..], q5k[16..]);
            let mut packed = [0; Q6K_BYTES];
            q6k_pack_codes(&q6k_codes(&q6k), &mut packed);
            assert_eq!(packed[..192], q6k[..192]);
            let (five, q3k, iq4) = (bytes(seed), bytes(seed), bytes(seed));
            assert_eq!(pack_five_bit_codes(&five_bit_codes(&five)), five);
            let mut packed = [0; Q3K_BYTES];
            q3k_pack_codes(&q3k_codes(&q3k), &mut packed);
            packed[96..108].copy_from_slice(&q3k_pack_scales(&q3k_scales(q3k[96..].first_chunk().unwrap())));
            assert_eq!(packed[..108], q3k[..108]);
            let mut packed = [0; IQ4_XS_BYTES];
            iq4_xs_pack_codes(&iq4_xs_codes(&iq4), &mut packed);
            packed[2..8].copy_from_slice(&iq4_xs_pack_scales(&iq4_xs_scales(iq4[2..].first_chunk().unwrap())));
            assert_eq!(packed[2..], iq4[2..]);
            let ternary = std::array::from_fn(|i| bytes::<K_COLS>(seed)[i] % 3);
            let mut packed = [0; TQ1_0_BYTES];
            tq1_0_pack_codes(&ternary, &mut packed);
            assert_eq!(tq1_0_codes(&packed), ternary);
        }
    }

    #[test]
    fn a_bad_scale_is_found_by_block() {
        for (format, bytes, at) in [
            (Format::Q8_0, Q8_0_BYTES, 0),
            (Format::Q4_0, Q4_0_BYTES, 0),
            (Format::Q4K, Q4K_BYTES, 2),
            (Format::Q5K, Q5K_BYTES, 0),
            (Format::Q6K, Q6K_BYTES, 208),
            (Format::Q4_1, Q4_1_BYTES, 2),
            (Format::Q5_0, Q5_0_BYTES, 0),
            (Format::Q5_1, Q5_1_BYTES, 2),
            (Format::Iq4Nl, IQ4_NL_BYTES, 0),
            (Format::Q2K, Q2K_BYTES, 82),
            (Format::Q3K, Q3K_BYTES, 108),
            (Format::Iq4Xs, IQ4_XS_BYTES, 0),
            (Format::Iq2Xxs, IQ2_XXS_BYTES, 0),
            (Format::Iq2Xs, IQ2_XS_BYTES, 0),
            (Format::Iq2S, IQ2_S_BYTES, 0),
            (Format::Iq3Xxs, IQ3_XXS_BYTES, 0),
            (Format::Iq3S, IQ3_S_BYTES, 0),
            (Format::Iq1S, IQ1_S_BYTES, 0),
            (Format::Tq1_0, TQ1_0_BYTES, 52),
            (Format::Tq2_0, TQ2_0_BYTES, 64),
        ] {
            let mut row = vec![0x11; bytes * 3];
            assert_eq!(check_scales(format, &row), Ok(()));
            row[bytes * 2 + at..][..2].copy_from_slice(&0x7c00u16.to_le_bytes());
            let message = check_scales(format, &row).unwrap_err();
            assert!(["block 2: d", "block 2: m"].iter().any(|m| message.starts_with(m)), "{message}");
            assert!(message.ends_with("is inf"), "{message}");
            assert_eq!(check_scales(format, &row[..bytes * 2]), Ok(()));
        }
        let mut row = vec![0xff; MXFP4_BYTES * 3];
        row[0] = 254;
        row[MXFP4_BYTES] = 0;
        assert_eq!(check_scales(Format::Mxfp4Ggml, &row[..MXFP4_BYTES * 2]), Ok(()));
        assert!(check_scales(Format::Mxfp4Ggml, &row).unwrap_err().starts_with("block 2"));
        // IQ1_M's scale is in the highest nibbles of its last four words: 0x7c00, infinity.
        let mut row = vec![0x11; IQ1_M_BYTES * 2];
        row[IQ1_M_BYTES * 2 - 8..].copy_from_slice(&[0, 0x01, 0, 0x02, 0, 0xc3, 0, 0x74]);
        assert_eq!(check_scales(Format::Iq1M, &row[..IQ1_M_BYTES]), Ok(()));
        assert_eq!(check_scales(Format::Iq1M, &row), Err("block 1: d is inf".to_owned()));
    }
}
