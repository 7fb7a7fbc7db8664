//! GGUF block types: Q8_0, Q4_0, and the K-types Q4_K, Q5_K, Q6_K.
//!
//! A row is a sequence of blocks that carry their own scales. `d` and `dmin` are F16; all integer products below are exact
//! in F32, so a value is rounded at most once, in the subtraction of a minimum.
//!
//! | type | columns | bytes | layout | value |
//! | --- | --- | --- | --- | --- |
//! | Q8_0 | 32 | 34 | `d`, 32 signed codes | `d * q` |
//! | Q4_0 | 32 | 18 | `d`, 16 bytes: low nibbles are columns 0..16, high ones 16..32 | `d * (q - 8)` |
//! | Q4_K | 256 | 144 | `d`, `dmin`, 12 bytes of scales, 128 bytes of nibbles | `d * sc[g] * q - dmin * mn[g]` |
//! | Q5_K | 256 | 176 | `d`, `dmin`, 12 bytes of scales, 32 bytes of high bits, 128 bytes of nibbles | as Q4_K |
//! | Q6_K | 256 | 210 | 128 bytes of nibbles, 64 bytes of high bit pairs, 16 signed scales, `d` | `d * sc[g] * (q - 32)` |
//!
//! Groups `g` are 32 columns in Q4_K and Q5_K, 16 in Q6_K. The readers of scales and codes are public: kernels use them.

use super::float::f16_at;
use super::{Format, Matrix};

/// Bytes of a Q8_0 block.
pub const Q8_0_BYTES: usize = 34;
/// Bytes of a Q4_0 block.
pub const Q4_0_BYTES: usize = 18;
/// Bytes of a Q4_K block.
pub const Q4K_BYTES: usize = 144;
/// Bytes of a Q5_K block.
pub const Q5K_BYTES: usize = 176;
/// Bytes of a Q6_K block.
pub const Q6K_BYTES: usize = 210;
/// Columns of a Q8_0 or Q4_0 block.
pub const COLS: usize = 32;
/// Columns of a K-type block.
pub const K_COLS: usize = 256;

/// Splits the 12 scale bytes of a Q4_K or Q5_K block into 8 scales and 8 minima of 6 bits.
#[inline(always)]
pub fn q4k_scales(s: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let (mut scales, mut mins) = ([0; 8], [0; 8]);
    for j in 0..4 {
        scales[j] = s[j] & 63;
        mins[j] = s[j + 4] & 63;
        scales[j + 4] = s[j + 8] & 15 | s[j] >> 6 << 4;
        mins[j + 4] = s[j + 8] >> 4 | s[j + 4] >> 6 << 4;
    }
    (scales, mins)
}

/// The inverse of [`q4k_scales`]; bits above the sixth are dropped.
#[inline(always)]
pub fn q4k_pack_scales(scales: &[u8; 8], mins: &[u8; 8]) -> [u8; 12] {
    let mut s = [0; 12];
    for j in 0..4 {
        s[j] = scales[j] & 63 | (scales[j + 4] >> 4 & 3) << 6;
        s[j + 4] = mins[j] & 63 | (mins[j + 4] >> 4 & 3) << 6;
        s[j + 8] = scales[j + 4] & 15 | (mins[j + 4] & 15) << 4;
    }
    s
}

/// Codes (0..16) of the 32 columns of a Q4_0 block.
#[inline(always)]
pub fn q4_0_codes(block: &[u8; Q4_0_BYTES]) -> [u8; COLS] {
    let mut q = [0; COLS];
    for j in 0..16 {
        q[j] = block[2 + j] & 15;
        q[j + 16] = block[2 + j] >> 4;
    }
    q
}

/// Codes (0..16) of the 256 columns of a Q4_K block.
#[inline(always)]
pub fn q4k_codes(block: &[u8; Q4K_BYTES]) -> [u8; K_COLS] {
    let mut q = [0; K_COLS];
    for (q, qs) in q.as_chunks_mut::<64>().0.iter_mut().zip(block[16..].as_chunks::<32>().0) {
        for l in 0..32 {
            q[l] = qs[l] & 15;
            q[l + 32] = qs[l] >> 4;
        }
    }
    q
}

/// Codes (0..32) of the 256 columns of a Q5_K block.
#[inline(always)]
pub fn q5k_codes(block: &[u8; Q5K_BYTES]) -> [u8; K_COLS] {
    let mut q = [0; K_COLS];
    let high: &[u8; 32] = block[16..].first_chunk().expect("a block has 176 bytes");
    for (c, (q, qs)) in q.as_chunks_mut::<64>().0.iter_mut().zip(block[48..].as_chunks::<32>().0).enumerate() {
        for l in 0..32 {
            q[l] = qs[l] & 15 | (high[l] >> (2 * c) & 1) << 4;
            q[l + 32] = qs[l] >> 4 | (high[l] >> (2 * c + 1) & 1) << 4;
        }
    }
    q
}

/// Codes (0..64, the value is 32 less) of the 256 columns of a Q6_K block.
#[inline(always)]
pub fn q6k_codes(block: &[u8; Q6K_BYTES]) -> [u8; K_COLS] {
    let mut q = [0; K_COLS];
    let (low, high) = (block.as_chunks::<64>().0, block[128..].as_chunks::<32>().0);
    for (q, (low, high)) in q.as_chunks_mut::<128>().0.iter_mut().zip(low.iter().zip(high)) {
        for l in 0..32 {
            let h = high[l];
            q[l] = low[l] & 15 | (h & 3) << 4;
            q[l + 32] = low[l + 32] & 15 | (h >> 2 & 3) << 4;
            q[l + 64] = low[l] >> 4 | (h >> 4 & 3) << 4;
            q[l + 96] = low[l + 32] >> 4 | h >> 6 << 4;
        }
    }
    q
}

/// Writes codes as [`q4_0_codes`] reads them.
#[inline(always)]
pub fn q4_0_pack_codes(q: &[u8; COLS], block: &mut [u8; Q4_0_BYTES]) {
    for j in 0..16 {
        block[2 + j] = q[j] | q[j + 16] << 4;
    }
}

/// Writes codes as [`q4k_codes`] reads them.
#[inline(always)]
pub fn q4k_pack_codes(q: &[u8; K_COLS], block: &mut [u8; Q4K_BYTES]) {
    for (q, qs) in q.as_chunks::<64>().0.iter().zip(block[16..].as_chunks_mut::<32>().0) {
        for l in 0..32 {
            qs[l] = q[l] | q[l + 32] << 4;
        }
    }
}

/// Writes codes as [`q5k_codes`] reads them.
#[inline(always)]
pub fn q5k_pack_codes(q: &[u8; K_COLS], block: &mut [u8; Q5K_BYTES]) {
    let mut high = [0; 32];
    for (c, (q, qs)) in q.as_chunks::<64>().0.iter().zip(block[48..].as_chunks_mut::<32>().0).enumerate() {
        for l in 0..32 {
            qs[l] = q[l] & 15 | (q[l + 32] & 15) << 4;
            high[l] |= q[l] >> 4 << (2 * c) | q[l + 32] >> 4 << (2 * c + 1);
        }
    }
    block[16..48].copy_from_slice(&high);
}

/// Writes codes as [`q6k_codes`] reads them.
#[inline(always)]
pub fn q6k_pack_codes(q: &[u8; K_COLS], block: &mut [u8; Q6K_BYTES]) {
    let (low, high) = block.split_at_mut(128);
    let (low, high) = (low.as_chunks_mut::<64>().0, high.as_chunks_mut::<32>().0);
    for (q, (low, high)) in q.as_chunks::<128>().0.iter().zip(low.iter_mut().zip(high)) {
        for l in 0..32 {
            low[l] = q[l] & 15 | (q[l + 64] & 15) << 4;
            low[l + 32] = q[l + 32] & 15 | (q[l + 96] & 15) << 4;
            high[l] = q[l] >> 4 | q[l + 32] >> 4 << 2 | q[l + 64] >> 4 << 4 | q[l + 96] >> 4 << 6;
        }
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

fn with_minima(header: &[u8], codes: &[u8; K_COLS], out: &mut [f32; K_COLS]) {
    let (d, dmin) = (f16_at(header, 0), f16_at(header, 1));
    let (scales, mins) = q4k_scales(header[4..].first_chunk().expect("a header has 16 bytes"));
    for (g, (out, codes)) in out.as_chunks_mut::<32>().0.iter_mut().zip(codes.as_chunks::<32>().0).enumerate() {
        let (scale, min) = (d * scales[g] as f32, dmin * mins[g] as f32);
        for (o, &q) in out.iter_mut().zip(codes) {
            *o = scale * q as i32 as f32 - min;
        }
    }
}

fn q6k(block: &[u8; Q6K_BYTES], out: &mut [f32; K_COLS]) {
    let d = f16_at(&block[208..], 0);
    let codes = q6k_codes(block);
    for (g, (out, codes)) in out.as_chunks_mut::<16>().0.iter_mut().zip(codes.as_chunks::<16>().0).enumerate() {
        let scale = d * block[192 + g] as i8 as f32;
        for (o, &q) in out.iter_mut().zip(codes) {
            *o = scale * (q as i32 - 32) as f32;
        }
    }
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
        Format::Q4K => blocks(row, start, out, |b: &[u8; Q4K_BYTES], o| with_minima(b, &q4k_codes(b), o)),
        Format::Q5K => blocks(row, start, out, |b: &[u8; Q5K_BYTES], o| with_minima(b, &q5k_codes(b), o)),
        Format::Q6K => blocks(row, start, out, q6k),
        _ => {}
    }
}

/// Checks that `d` and `dmin` of each block of a row are finite; the message names the first block where they are not.
pub(super) fn check_scales(format: Format, row: &[u8]) -> Result<(), String> {
    let (bytes, at, names): (usize, usize, &[&str]) = match format {
        Format::Q8_0 => (Q8_0_BYTES, 0, &["d"]),
        Format::Q4_0 => (Q4_0_BYTES, 0, &["d"]),
        Format::Q4K => (Q4K_BYTES, 0, &["d", "dmin"]),
        Format::Q5K => (Q5K_BYTES, 0, &["d", "dmin"]),
        Format::Q6K => (Q6K_BYTES, 208, &["d"]),
        _ => return Ok(()),
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
        ] {
            let mut row = vec![0x11; bytes * 3];
            assert_eq!(check_scales(format, &row), Ok(()));
            row[bytes * 2 + at..][..2].copy_from_slice(&0x7c00u16.to_le_bytes());
            let message = check_scales(format, &row).unwrap_err();
            assert!(message.starts_with("block 2: d") && message.ends_with("is inf"), "{message}");
            assert_eq!(check_scales(format, &row[..bytes * 2]), Ok(()));
        }
    }
}
