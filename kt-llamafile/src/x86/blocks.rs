//! The product of a panel of outputs with a tile of input rows, for each block type.
//!
//! Each function walks along the columns once. At each step it brings 32 or 64 columns of all outputs of the panel into
//! registers, transposed, and multiplies them with every row of the tile.

#![allow(unsafe_code)] // kernel

use super::simd::{Rows, Simd, prefetch};
use super::tile::{Record, Tile};

/// A panel of outputs.
pub struct Panel {
    /// Where its rows begin.
    pub rows: Rows,
    /// Where the next panel begins, whose bytes are fetched meanwhile; null when there is none, or when it does not lie in
    /// one piece. Rows of 16 outputs read side by side are more streams than the prefetchers of the CPU follow.
    pub next: *const u8,
}

impl Panel {
    /// Fetches as much of the next panel as is being read of this one: bytes `at..at + bytes` of each row.
    #[inline(always)]
    fn fetch_ahead<S: Simd>(&self, at: usize, bytes: usize) {
        if !self.next.is_null() {
            prefetch(self.next.wrapping_add(at * S::LANES), bytes * S::LANES);
        }
    }
}

/// A GGUF block type.
pub trait Blocks {
    /// Whether [`Record::sums16`] and [`Record::pairs`] are needed.
    const SUMS16: bool = false;

    /// `sums[row, lane] += sum_k w[lane, k] * x[row, k]` for the rows of the tile.
    ///
    /// # Safety
    /// Each of the first [`Simd::LANES`] pointers must be the start of a readable row of this format of `cols` columns.
    unsafe fn panel<S: Simd>(s: S, w: &Panel, cols: usize, x: &Tile<'_>, sums: &mut [f32]);
}

/// 32 columns: F16 scale, 32 signed bytes.
pub struct Q8_0;

/// 32 columns: F16 scale, 16 bytes of nibbles with offset 8: columns 0..16 low, 16..32 high.
pub struct Q4_0;

/// 32 columns: F16 scale, 32 fifth bits, nibbles as Q4_0; codes with offset 16.
pub struct Q5_0;

/// 256 columns: F16 `d` and `dmin`, 12 bytes of 6-bit scales and minima, then 4 times 32 bytes of nibbles.
pub struct Q4K;

/// 256 columns: 128 bytes of low nibbles, 64 of high bits, 16 signed scales, F16 `d`.
pub struct Q6K;

/// Input rows of one block of columns with the sums of each row.
#[inline(always)]
fn with_sums<'a, S: Simd>(x: &'a [Record], sums: &'a mut [f32]) -> impl Iterator<Item = (&'a Record, &'a mut [f32])> {
    x.iter().zip(sums.chunks_exact_mut(S::LANES))
}

impl Blocks for Q8_0 {
    #[inline(always)]
    unsafe fn panel<S: Simd>(s: S, panel: &Panel, cols: usize, x: &Tile<'_>, sums: &mut [f32]) {
        let w = &panel.rows;
        for i in 0..cols / 32 {
            let at = i * 34;
            panel.fetch_ahead::<S>(at, 34);
            // SAFETY: block `i` of each row is bytes `at..at + 34`.
            let (scale, mut codes) = unsafe { (s.halves(w, at), s.transpose32(w, at + 2)) };
            for c in &mut codes {
                *c = s.xor(*c, s.splat(0x8080_8080_u32 as i32));
            }
            let codes = s.bytes(codes);
            let g = i % 4;
            for (x, sum) in with_sums::<S>(x.block(i / 4), sums) {
                let dot = s.to_f32(s.dot_bytes(&codes, &x.codes[g], x.offset(g)));
                let y = s.fma(s.mul(dot, s.splat_f32(x.scale[g])), scale, s.load(sum));
                s.store(y, sum);
            }
        }
    }
}

impl Blocks for Q4_0 {
    #[inline(always)]
    unsafe fn panel<S: Simd>(s: S, panel: &Panel, cols: usize, x: &Tile<'_>, sums: &mut [f32]) {
        let mask = s.splat(0x0f0f_0f0f);
        let w = &panel.rows;
        for i in 0..cols / 32 {
            let at = i * 18;
            panel.fetch_ahead::<S>(at, 18);
            // SAFETY: block `i` of each row is bytes `at..at + 18`.
            let (scale, nibbles) = unsafe { (s.halves(w, at), s.transpose16(w, at + 2)) };
            let mut codes = [mask; 8];
            for k in 0..4 {
                codes[k] = s.and(nibbles[k], mask);
                codes[4 + k] = s.and(s.shr(nibbles[k], 4), mask);
            }
            let g = i % 4;
            for (x, sum) in with_sums::<S>(x.block(i / 4), sums) {
                // -128 times the sum of the input's codes is 16 times what the offset of 8 adds too much.
                let dot = s.to_f32(s.add(s.dot_low(&codes, &x.codes[g]), s.splat(x.offset(g) >> 4)));
                let y = s.fma(s.mul(dot, s.splat_f32(x.scale[g])), scale, s.load(sum));
                s.store(y, sum);
            }
        }
    }
}

impl Blocks for Q5_0 {
    #[inline(always)]
    unsafe fn panel<S: Simd>(s: S, panel: &Panel, cols: usize, x: &Tile<'_>, sums: &mut [f32]) {
        let mask = |v, m: u32| s.and(v, s.splat(m as i32));
        let w = &panel.rows;
        for i in 0..cols / 32 {
            let at = i * 22;
            panel.fetch_ahead::<S>(at, 22);
            // SAFETY: block `i` of each row is bytes `at..at + 22`.
            let (head, nibbles) = unsafe { (s.transpose16(w, at), s.transpose16(w, at + 6)) };
            // Codes times 8 have offset 128, as bytes.
            let scale = s.mul(s.low_halves(head[0]), s.splat_f32(1.0 / 8.0));
            let fifth = s.or(s.shr(head[0], 16), s.shl(head[1], 16));
            let mut codes = high_bits(s, fifth);
            for k in 0..4 {
                codes[k] = s.or(codes[k], mask(s.shl(nibbles[k], 3), 0x7878_7878));
                codes[4 + k] = s.or(codes[4 + k], mask(s.shr(nibbles[k], 1), 0x7878_7878));
            }
            let codes = s.bytes(codes);
            let g = i % 4;
            for (x, sum) in with_sums::<S>(x.block(i / 4), sums) {
                let dot = s.to_f32(s.dot_bytes(&codes, &x.codes[g], x.offset(g)));
                let y = s.fma(s.mul(dot, s.splat_f32(x.scale[g])), scale, s.load(sum));
                s.store(y, sum);
            }
        }
    }
}

/// Spreads 32 bits: bit `4 k + j` becomes the highest bit of byte `j` of line `k`.
#[inline(always)]
fn high_bits<S: Simd>(s: S, bits: S::I) -> [S::I; 8] {
    let mut lines = [bits; 8];
    for (k, line) in lines.iter_mut().enumerate() {
        let four = s.and(s.shr(bits, 4 * k as u32), s.splat(15));
        // Bit `j`, moved up by 7 * (j + 1), is bit 8 * j + 7; no two copies share a bit.
        let copies = s.or(s.or(s.shl(four, 7), s.shl(four, 14)), s.or(s.shl(four, 21), s.shl(four, 28)));
        *line = s.and(copies, s.splat(0x8080_8080_u32 as i32));
    }
    lines
}

impl Blocks for Q4K {
    #[inline(always)]
    unsafe fn panel<S: Simd>(s: S, panel: &Panel, cols: usize, x: &Tile<'_>, sums: &mut [f32]) {
        let mask = |v, m: u32| s.and(v, s.splat(m as i32));
        let w = &panel.rows;
        for i in 0..cols / 256 {
            let at = i * 144;
            // SAFETY: block `i` of each row is bytes `at..at + 144`.
            let head = unsafe { s.transpose16(w, at) };
            let (d, dmin) = (s.low_halves(head[0]), s.low_halves(s.shr(head[0], 16)));
            // Scales and minima of groups 0..4 and 4..8, one per byte.
            let six = |low: S::I, high: S::I| s.or(mask(low, 0x0f0f_0f0f), mask(s.shr(high, 2), 0x3030_3030));
            let scales = [mask(head[1], 0x3f3f_3f3f), six(head[3], head[1])];
            let minima = [mask(head[2], 0x3f3f_3f3f), six(s.shr(head[3], 4), head[2])];
            for half in 0..2 {
                for pair in 0..2 {
                    panel.fetch_ahead::<S>(at + 36 * (2 * half + pair), 36);
                    let g = 2 * pair;
                    let byte = |v: S::I, n: usize| s.to_f32(mask(s.shr(v, 8 * n as u32), 0xff));
                    // The dot product of high nibbles comes 16 times as large.
                    let low_scale = s.mul(d, byte(scales[half], g));
                    let high_scale = s.mul(s.mul(d, byte(scales[half], g + 1)), s.splat_f32(1.0 / 16.0));
                    let low_min = s.mul(dmin, byte(minima[half], g));
                    let high_min = s.mul(dmin, byte(minima[half], g + 1));
                    // SAFETY: the nibbles are bytes 16..144 of the block, 32 for each pair of groups.
                    let codes = unsafe { s.transpose32(w, at + 16 + 64 * half + 32 * pair) };
                    let [low, high] = s.nibbles(codes);
                    for (x, sum) in with_sums::<S>(x.block(2 * i + half), sums) {
                        let low = s.mul(s.to_f32(s.dot_low(&low, &x.codes[g])), s.splat_f32(x.scale[g]));
                        let high = s.mul(s.to_f32(s.dot_high(&high, &x.codes[g + 1])), s.splat_f32(x.scale[g + 1]));
                        let y = s.fnma(low_min, s.splat_f32(x.scaled_sum(g)), s.load(sum));
                        let y = s.fnma(high_min, s.splat_f32(x.scaled_sum(g + 1)), y);
                        s.store(s.fma(high, high_scale, s.fma(low, low_scale, y)), sum);
                    }
                }
            }
        }
    }
}

impl Blocks for Q6K {
    const SUMS16: bool = true;

    #[inline(always)]
    unsafe fn panel<S: Simd>(s: S, panel: &Panel, cols: usize, x: &Tile<'_>, sums: &mut [f32]) {
        let mask = |v, m: u32| s.and(v, s.splat(m as i32));
        let w = &panel.rows;
        for i in 0..cols / 256 {
            let at = i * 210;
            // SAFETY: block `i` of each row is bytes `at..at + 210`.
            let (scales, d) = unsafe { (s.transpose16(w, at + 192), s.halves(w, at + 208)) };
            for half in 0..2 {
                // SAFETY: the high bits are bytes 128..192 of the block, 32 for each half.
                let mut bits = unsafe { s.transpose32(w, at + 128 + 32 * half) };
                for g in 0..2 {
                    panel.fetch_ahead::<S>(at + 53 * (2 * half + g), 53);
                    // SAFETY: the low nibbles are bytes 0..128 of the block, 64 for each half, 32 for groups g and g + 2.
                    let nibbles = unsafe { s.transpose32(w, at + 64 * half + 32 * g) };
                    let (mut first, mut second) = (nibbles, nibbles);
                    for k in 0..8 {
                        first[k] = s.or(mask(nibbles[k], 0x0f0f_0f0f), mask(s.shl(bits[k], 4), 0x3030_3030));
                        second[k] = s.or(mask(s.shr(nibbles[k], 4), 0x0f0f_0f0f), mask(bits[k], 0x3030_3030));
                        bits[k] = s.shr(bits[k], 2);
                    }
                    // Groups of 16 columns have a scale each: 4 to a lane, g and g + 2 are in neighbouring lines.
                    let byte = |v: S::I, n: usize| s.sar(s.shl(v, 24 - 8 * n as u32), 24);
                    let (line, n) = (2 * half, 2 * g);
                    let first_scales = s.scales(byte(scales[line], n), byte(scales[line], n + 1));
                    let second_scales = s.scales(byte(scales[line + 1], n), byte(scales[line + 1], n + 1));
                    for (x, sum) in with_sums::<S>(x.block(2 * i + half), sums) {
                        let mut y = s.load(sum);
                        let dot = s.dot_q6(&first, &first_scales, &x.codes[g], x.sums16(g), x.pairs(g));
                        y = s.fma(s.mul(dot, s.splat_f32(x.scale[g])), d, y);
                        let dot = s.dot_q6(&second, &second_scales, &x.codes[g + 2], x.sums16(g + 2), x.pairs(g + 2));
                        y = s.fma(s.mul(dot, s.splat_f32(x.scale[g + 2])), d, y);
                        s.store(y, sum);
                    }
                }
            }
        }
    }
}
