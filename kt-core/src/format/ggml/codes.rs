//! Readers and writers of the codes and scales of GGUF blocks: each `pack` is the inverse of the reader before it.

use super::*;

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
    nibbles(block[2..].first_chunk().expect("a block has 18 bytes"))
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
    block[2..].copy_from_slice(&pack_nibbles(q));
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

/// The 32 nibbles of 16 bytes: low nibbles are columns 0..16, high ones 16..32.
#[inline(always)]
pub fn nibbles(qs: &[u8; 16]) -> [u8; COLS] {
    std::array::from_fn(|j| if j < 16 { qs[j] & 15 } else { qs[j - 16] >> 4 })
}

/// Writes codes as [`nibbles`] reads them; bits above the fourth are dropped.
#[inline(always)]
pub fn pack_nibbles(q: &[u8; COLS]) -> [u8; 16] {
    std::array::from_fn(|j| q[j] & 15 | q[j + 16] << 4)
}

/// Codes (0..32) of 4 bytes of fifth bits (bit `j` belongs to column `j`) and 16 bytes of nibbles: the end of a Q5_0 and a Q5_1
/// block.
#[inline(always)]
pub fn five_bit_codes(codes: &[u8; 20]) -> [u8; COLS] {
    let high = u32::from_le_bytes([codes[0], codes[1], codes[2], codes[3]]);
    let low = nibbles(codes[4..].first_chunk().expect("20 bytes"));
    std::array::from_fn(|j| low[j] | ((high >> j & 1) as u8) << 4)
}

/// Writes codes as [`five_bit_codes`] reads them.
#[inline(always)]
pub fn pack_five_bit_codes(q: &[u8; COLS]) -> [u8; 20] {
    let high = q.iter().enumerate().fold(0u32, |high, (j, &q)| high | (q as u32 >> 4 & 1) << j);
    let mut codes = [0; 20];
    codes[..4].copy_from_slice(&high.to_le_bytes());
    codes[4..].copy_from_slice(&pack_nibbles(q));
    codes
}

/// The 256 numbers of two bits of 64 bytes, as Q2_K and Q3_K hold them: each 32 bytes are 128 columns, byte `l` has columns `l`,
/// `32 + l`, `64 + l` and `96 + l`, lowest bits first.
#[inline(always)]
pub fn bit_pairs(qs: &[u8; 64]) -> [u8; K_COLS] {
    let mut q = [0; K_COLS];
    for (q, qs) in q.as_chunks_mut::<128>().0.iter_mut().zip(qs.as_chunks::<32>().0) {
        for (p, q) in q.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for l in 0..32 {
                q[l] = qs[l] >> (2 * p) & 3;
            }
        }
    }
    q
}

/// Writes the lowest two bits of codes as [`bit_pairs`] reads them.
#[inline(always)]
pub fn pack_bit_pairs(q: &[u8; K_COLS]) -> [u8; 64] {
    let mut out = [0; 64];
    for (q, qs) in q.as_chunks::<128>().0.iter().zip(out.as_chunks_mut::<32>().0) {
        for (p, q) in q.as_chunks::<32>().0.iter().enumerate() {
            for l in 0..32 {
                qs[l] |= (q[l] & 3) << (2 * p);
            }
        }
    }
    out
}

/// Codes (0..8, the value is 4 less) of the 256 columns of a Q3_K block.
#[inline(always)]
pub fn q3k_codes(block: &[u8; Q3K_BYTES]) -> [u8; K_COLS] {
    let mut q = bit_pairs(block[32..].first_chunk().expect("a block has 110 bytes"));
    for (i, q) in q.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for l in 0..32 {
            q[l] |= (block[l] >> i & 1) << 2;
        }
    }
    q
}

/// Writes codes as [`q3k_codes`] reads them.
#[inline(always)]
pub fn q3k_pack_codes(q: &[u8; K_COLS], block: &mut [u8; Q3K_BYTES]) {
    let mut high = [0; 32];
    for (i, q) in q.as_chunks::<32>().0.iter().enumerate() {
        for l in 0..32 {
            high[l] |= (q[l] >> 2 & 1) << i;
        }
    }
    block[..32].copy_from_slice(&high);
    block[32..96].copy_from_slice(&pack_bit_pairs(q));
}

/// The 16 scales (-32..32) in the 12 scale bytes of a Q3_K block.
#[inline(always)]
pub fn q3k_scales(s: &[u8; 12]) -> [i8; 16] {
    std::array::from_fn(|g| {
        let (low, high) = (s[g % 8] >> (4 * (g / 8)) & 15, s[8 + g % 4] >> (2 * (g / 4)) & 3);
        (low | high << 4) as i8 - 32
    })
}

/// The inverse of [`q3k_scales`].
#[inline(always)]
pub fn q3k_pack_scales(scales: &[i8; 16]) -> [u8; 12] {
    let mut s = [0; 12];
    for (g, &scale) in scales.iter().enumerate() {
        let code = (scale + 32) as u8;
        s[g % 8] |= (code & 15) << (4 * (g / 8));
        s[8 + g % 4] |= (code >> 4 & 3) << (2 * (g / 4));
    }
    s
}

/// Codes (0..16, into [`IQ4_VALUES`]) of the 256 columns of an IQ4_XS block.
#[inline(always)]
pub fn iq4_xs_codes(block: &[u8; IQ4_XS_BYTES]) -> [u8; K_COLS] {
    let mut q = [0; K_COLS];
    for (q, qs) in q.as_chunks_mut::<COLS>().0.iter_mut().zip(block[8..].as_chunks::<16>().0) {
        *q = nibbles(qs);
    }
    q
}

/// Writes codes as [`iq4_xs_codes`] reads them.
#[inline(always)]
pub fn iq4_xs_pack_codes(q: &[u8; K_COLS], block: &mut [u8; IQ4_XS_BYTES]) {
    for (q, qs) in q.as_chunks::<COLS>().0.iter().zip(block[8..].as_chunks_mut::<16>().0) {
        *qs = pack_nibbles(q);
    }
}

/// The 8 scales (-32..32) in the 6 scale bytes of an IQ4_XS block: two of high bits, four of nibbles.
#[inline(always)]
pub fn iq4_xs_scales(s: &[u8; 6]) -> [i8; 8] {
    let high = u16::from_le_bytes([s[0], s[1]]);
    std::array::from_fn(|g| {
        let (low, high) = (s[2 + g / 2] >> (4 * (g % 2)) & 15, (high >> (2 * g) & 3) as u8);
        (low | high << 4) as i8 - 32
    })
}

/// The inverse of [`iq4_xs_scales`].
#[inline(always)]
pub fn iq4_xs_pack_scales(scales: &[i8; 8]) -> [u8; 6] {
    let (mut s, mut high) = ([0; 6], 0u16);
    for (g, &scale) in scales.iter().enumerate() {
        let code = (scale + 32) as u8;
        s[2 + g / 2] |= (code & 15) << (4 * (g % 2));
        high |= (code as u16 >> 4 & 3) << (2 * g);
    }
    s[..2].copy_from_slice(&high.to_le_bytes());
    s
}

/// Where the digits of bytes `start..end` of a TQ1_0 block go: the first column, and how many digits a byte has. Digit `n` of byte `l`
/// is column `first + n * (end - start) + l - start`.
const TQ1_0_PARTS: [(std::ops::Range<usize>, usize, usize); 3] = [(0..32, 0, 5), (32..48, 160, 5), (48..52, 240, 4)];

/// Codes (0..3, the value is 1 less) of the 256 columns of a TQ1_0 block. A byte is a fraction of 256 whose ternary digits are the
/// codes.
#[inline(always)]
pub fn tq1_0_codes(block: &[u8; TQ1_0_BYTES]) -> [u8; K_COLS] {
    let mut q = [0; K_COLS];
    for (range, first, digits) in TQ1_0_PARTS {
        let width = range.len();
        for (l, &byte) in block[range].iter().enumerate() {
            let mut fraction = byte;
            for n in 0..digits {
                let times = fraction as u16 * 3;
                q[first + n * width + l] = (times >> 8) as u8;
                fraction = times as u8;
            }
        }
    }
    q
}

/// Writes codes as [`tq1_0_codes`] reads them.
#[inline(always)]
pub fn tq1_0_pack_codes(q: &[u8; K_COLS], block: &mut [u8; TQ1_0_BYTES]) {
    for (range, first, digits) in TQ1_0_PARTS {
        let width = range.len();
        for (l, byte) in block[range].iter_mut().enumerate() {
            let number = (0..5).fold(0, |v, n| 3 * v + if n < digits { q[first + n * width + l] as u16 } else { 0 });
            // Rounded up, so that the digits come out whole.
            *byte = (number * 256).div_ceil(243) as u8;
        }
    }
}
