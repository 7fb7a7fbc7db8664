//! Input rows as kernels read them.
//!
//! Rows are cut into blocks of [`BLOCK`] columns, or [`WIDE`] ones, each self-contained (its codes, then its scales), and stored block by block:
//! block `b` of row `r` starts at `(b * rows + r) * layout.block_bytes()`. So the rows of one block are neighbours for a tile
//! of rows, and the task that computes 128 intermediate columns of an expert owns one contiguous piece of the down input.
//! The last block is padded with zeros, which add nothing to any product.

use std::fmt;

use crate::format::float::f32_to_bf16;

/// Columns of an input block.
pub const BLOCK: usize = 128;

/// Columns of a wide one, for inputs whose rows are known as a whole before they are packed. Wide blocks are whole cache lines, so that tile units load codes that lie within lines.
pub const WIDE: usize = 4 * BLOCK;

/// Bytes of a cache line.
const LINE: usize = 64;

/// How input rows are rounded and laid out within a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InputLayout {
    /// 128 F32: exact.
    F32,
    /// 128 BF16, rounded to nearest even.
    Bf16,
    /// 128 signed codes in -127..=127; then one F32 scale per `group` columns; then a number or two for each group, made of sums of
    /// its codes.
    ///
    /// `x = scale * code`, the scale being the best of four. A group with a NaN or an infinity has a NaN scale and zero codes; an all-zero group has scale 0.
    Int8 {
        /// Columns per scale: 16, 32 or 128; or 512, those of a [wide](WIDE) block of as many codes.
        group: usize,
        /// What is kept of the sums of the codes.
        sums: Sums,
    },
    /// 128 signed codes, as those of groups of 32 columns of [`InputLayout::Int8`]; then the unit of the block, an F32; then for each two groups of `group` columns,
    /// as weights have them, two pairs of words, or three:
    ///
    /// - the scales of both, that of the first one above: `x = code * scale * 2^-15 * unit`. Two groups of 16 columns have the same one;
    /// - what sums of products of both begin with, that of the first one below, as both words change places when its products are added: minus `zero` times
    ///   the sum of its codes;
    /// - with `minima`, their sums of codes times scales, times 2^-15, that of the first one above.
    ///
    /// For weights whose scales are words as well. Sums of products of the codes of a group with integers of up to `zero` fit a signed word: where they
    /// would not, the codes are smaller. Of two sums, each is one less where the other is negative while that is below it, which is every other time: hence
    /// both begin with 1 more in every other pair, not in the same ones. A second one that begins with less than 0 goes on as if with 2^16 more, which
    /// the first one begins with 1 less for.
    Int8Words {
        /// Columns per scale of the weights: 16 or 32.
        group: usize,
        /// The zero point of the weights, and the largest magnitude less that: up to 32 for groups of 16 columns, 16 for those of 32.
        zero: i32,
        /// Whether weights have minima.
        minima: bool,
    },
}

/// What [`InputLayout::Int8`] keeps of the sum of a group's codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sums {
    /// So many times the sum, as I32: minus the zero point of the weights, so that products start from it; or 1.
    Times(i32),
    /// The sum times the scale, as F32: for weights with minima.
    Scaled,
    /// As [`Sums::Times`], two words: of the first half of the group, and above it of the second one, each [`WORD_ZERO`] more. For weights whose scales are
    /// those of half as many columns: the words change places when the products of the first half are added. Products of the codes of a half with integers of
    /// up to so great a magnitude sum up to a signed word: where they would not, the codes of the group are smaller.
    Halves(i32),
    /// The sum as the upper word of an I32, and so many times the sum, [`WORD_ZERO`] more, below it: for weights that have integers for scales
    /// and for minima, so that one multiplication of words does for both. Weights have magnitudes of 8 at most, so that sums of products
    /// of the codes of 32 columns fit a word.
    Words(i32),
    /// As [`Sums::Times`], but two words: of the first two of each four columns, and above it of the others, as multiplications without VNNI
    /// leave sums of products. For groups of up to 32 columns and magnitudes of 16 at most, so that both fit.
    Pairs(i32),
    /// As [`Sums::Pairs`], of each half of the group: for the weights that [`Sums::Halves`] is for.
    PairHalves(i32),
    /// As [`Sums::Pairs`], and the sum as the upper word of an I32: see [`Sums::Words`].
    PairWords(i32),
    /// As [`Sums::Pairs`], and as [`Sums::Scaled`]: for weights with minima whose products begin with the first, and have it taken off in the end.
    PairScaled(i32),
    /// As [`Sums::Times`], and as [`Sums::Scaled`]: for weights whose zero points, less the one of the first, are those of several groups.
    TimesScaled(i32),
}

/// Added to a signed word, makes it an unsigned one: sums that are lower words begin with it, so that they never borrow from the sums above
/// them.
pub const WORD_ZERO: i32 = 1 << 15;

/// [`WORD_ZERO`] in both words.
pub const WORD_ZEROS: i32 = WORD_ZERO << 16 | WORD_ZERO;

impl Sums {
    /// Numbers that are kept of a group.
    #[inline(always)]
    pub const fn of_group(self) -> usize {
        match self {
            Sums::PairHalves(_) | Sums::PairWords(_) | Sums::PairScaled(_) | Sums::TimesScaled(_) => 2,
            Sums::Times(_) | Sums::Scaled | Sums::Halves(_) | Sums::Words(_) | Sums::Pairs(_) => 1,
        }
    }

    /// The zero point of the weights that it is for; 0 for those with minima. Means nothing for weights whose groups have zero points.
    pub const fn zero_point(self) -> i32 {
        match self {
            Sums::Scaled | Sums::PairScaled(_) => 0,
            Sums::Times(times)
            | Sums::Halves(times)
            | Sums::Words(times)
            | Sums::Pairs(times)
            | Sums::PairHalves(times)
            | Sums::PairWords(times)
            | Sums::TimesScaled(times) => -times,
        }
    }

    /// Whether it is of each half of a group.
    #[inline(always)]
    pub const fn in_halves(self) -> bool {
        matches!(self, Sums::Halves(_) | Sums::PairHalves(_))
    }

    /// What the magnitudes of the codes of half a group sum up to at most.
    #[inline(always)]
    pub fn most(self) -> i32 {
        match self {
            Sums::Halves(times) | Sums::PairHalves(times) => (i16::MAX as u32 / times.unsigned_abs().max(1)) as i32,
            _ => i32::MAX,
        }
    }

    /// Whether it is of pairs of columns.
    #[inline(always)]
    pub const fn in_pairs(self) -> bool {
        matches!(self, Sums::Pairs(_) | Sums::PairHalves(_) | Sums::PairWords(_) | Sums::PairScaled(_))
    }

    /// The same, not [in pairs](Sums::in_pairs): for CPUs with VNNI.
    pub const fn whole(self) -> Self {
        match self {
            Sums::Pairs(times) => Sums::Times(times),
            Sums::PairHalves(times) => Sums::Halves(times),
            Sums::PairWords(times) => Sums::Words(times),
            Sums::PairScaled(_) => Sums::Scaled,
            whole => whole,
        }
    }

    /// Writes what is kept of a group whose halves have these sums, each those of the first and of the second two of each four columns; if it
    /// is not [in pairs](Sums::in_pairs), only what both add up to counts.
    #[inline(always)]
    pub fn write(self, halves: [[i32; 2]; 2], scale: f32, out: &mut [u8]) {
        let pairs = [halves[0][0] + halves[1][0], halves[0][1] + halves[1][1]];
        let [first, second] = halves.map(|[first, second]| first + second);
        let sum = first + second;
        let scaled = (scale * sum as f32).to_bits() as i32;
        let words = |pairs: [i32; 2], times: i32| ((pairs[0] * times) & 0xffff) | (pairs[1] * times) << 16;
        let mut put = |numbers: &[i32]| {
            for (out, number) in out.as_chunks_mut::<4>().0.iter_mut().zip(numbers) {
                *out = number.to_le_bytes();
            }
        };
        match self {
            Sums::Times(times) => put(&[sum * times]),
            Sums::Scaled => put(&[scaled]),
            Sums::Words(times) => put(&[(sum << 16) + sum * times + WORD_ZERO]),
            Sums::Halves(times) => put(&[words([first, second], times) ^ WORD_ZEROS]),
            Sums::Pairs(times) => put(&[words(pairs, times)]),
            Sums::PairHalves(times) => put(&halves.map(|pairs| words(pairs, times))),
            Sums::PairWords(times) => put(&[words(pairs, times), sum << 16]),
            Sums::PairScaled(times) => put(&[words(pairs, times), scaled]),
            Sums::TimesScaled(times) => put(&[sum * times, scaled]),
        }
    }
}

impl InputLayout {
    /// Columns of a block: [`BLOCK`] or [`WIDE`].
    #[inline(always)]
    pub const fn columns(self) -> usize {
        match self {
            InputLayout::Int8 { group: WIDE, .. } => WIDE,
            _ => BLOCK,
        }
    }

    /// Blocks of a row of `cols` columns.
    #[inline(always)]
    pub const fn blocks(self, cols: usize) -> usize {
        cols.div_ceil(self.columns())
    }

    /// Bytes of a block: 512, 256, or 128 codes with 8 or 12 bytes a group; of a wide one, 512 codes with 8 or 12 bytes and what is left of a line.
    #[inline(always)]
    pub const fn block_bytes(self) -> usize {
        match self {
            InputLayout::F32 => BLOCK * 4,
            InputLayout::Bf16 => BLOCK * 2,
            InputLayout::Int8 { group: WIDE, sums } => (WIDE + 4 * (1 + sums.of_group())).next_multiple_of(LINE),
            InputLayout::Int8 { group, sums } => BLOCK + BLOCK / group * 4 * (1 + sums.of_group()),
            InputLayout::Int8Words { group, minima, .. } => BLOCK + 4 + BLOCK / (2 * group) * Self::pair_bytes(minima),
        }
    }

    /// Bytes of what [`InputLayout::Int8Words`] has for two groups.
    #[inline(always)]
    pub const fn pair_bytes(minima: bool) -> usize {
        if minima { 12 } else { 8 }
    }

    /// What [`to_words`] wants kept of the codes of groups of 32 columns, which are rounded accordingly, for weights with groups of `group`.
    #[inline(always)]
    pub const fn before_words(group: usize, zero: i32) -> Sums {
        // Halves that sum up to half as much make up groups that fit.
        Sums::Halves(if group == 16 { -zero } else { -2 * zero })
    }

    /// Bytes of `rows` rows of `cols` columns.
    pub const fn bytes(self, rows: usize, cols: usize) -> usize {
        self.blocks(cols) * rows * self.block_bytes()
    }
}

impl fmt::Display for InputLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InputLayout::F32 => f.pad("f32 inputs"),
            InputLayout::Bf16 => f.pad("bf16 inputs"),
            InputLayout::Int8 { group, .. } => f.pad(&format!("int8 inputs, groups of {group}")),
            InputLayout::Int8Words { .. } => f.pad("int8 inputs, groups of 32, scales as words"),
        }
    }
}

/// Packs up to [`InputLayout::columns`] columns of one row into one block; the rest is zero. Vectorizes inside a `#[target_feature]` caller.
///
/// # Panics
/// When `x` is longer than a block or `out` is not one block long.
#[inline(always)]
pub fn pack_block(layout: InputLayout, x: &[f32], out: &mut [u8]) {
    assert!(x.len() <= layout.columns() && out.len() == layout.block_bytes());
    if let InputLayout::Int8 { group: WIDE, sums } = layout {
        let mut full = [0f32; WIDE];
        full[..x.len()].copy_from_slice(x);
        let (codes, scale, kept) = wide_parts(sums, out);
        return pack_int8(WIDE, sums, &full, codes, scale, kept);
    }
    let mut full = [0f32; BLOCK];
    full[..x.len()].copy_from_slice(x);
    match layout {
        InputLayout::F32 => out.copy_from_slice(bytemuck::cast_slice(&full)),
        InputLayout::Bf16 => {
            // All of them, then bytes: vectors.
            let mut rounded = [0u16; BLOCK];
            for (rounded, v) in rounded.iter_mut().zip(full) {
                *rounded = f32_to_bf16(v);
            }
            out.copy_from_slice(bytemuck::cast_slice(&rounded));
        }
        InputLayout::Int8 { group, sums } => {
            let (codes, rest) = out.split_at_mut(BLOCK);
            let (scales, kept) = rest.split_at_mut(BLOCK / group * 4);
            pack_int8(group, sums, &full, codes, scales, kept);
        }
        InputLayout::Int8Words { group, zero, .. } => {
            let mut of_groups = OfGroups::default();
            let (codes, words) = out.split_at_mut(BLOCK);
            let sums = InputLayout::before_words(group, zero);
            pack_int8(32, sums, &full, codes, &mut of_groups.scales, &mut of_groups.kept);
            to_words(layout, &of_groups, words);
        }
    }
}

/// Of a wide block its codes, its scale, and what is kept of their sum; what is behind them is set to zero.
#[inline(always)]
pub fn wide_parts(sums: Sums, block: &mut [u8]) -> (&mut [u8], &mut [u8], &mut [u8]) {
    let (codes, rest) = block.split_at_mut(WIDE);
    let (scale, rest) = rest.split_at_mut(4);
    let (kept, padding) = rest.split_at_mut(sums.of_group() * 4);
    padding.fill(0);
    (codes, scale, kept)
}

/// A block of [`InputLayout::Int8`].
#[inline(always)]
fn pack_int8(group: usize, sums: Sums, x: &[f32], codes: &mut [u8], scales: &mut [u8], kept: &mut [u8]) {
    for (g, x) in x.chunks_exact(group).enumerate() {
        let codes = &mut codes[g * group..][..group];
        let scale = round_group(x, codes, sums.most());
        let halves = halves(codes, |code| code);
        scales[g * 4..][..4].copy_from_slice(&scale.to_le_bytes());
        let bytes = sums.of_group() * 4;
        sums.write(halves, scale, &mut kept[g * bytes..][..bytes]);
    }
}

/// Groups of 32 columns in a block.
const GROUPS: usize = BLOCK / 32;

/// What a block of [`InputLayout::Int8`] in groups of 32 has behind its codes, with [`InputLayout::before_words`].
#[derive(Debug, Default)]
pub struct OfGroups {
    /// Their scales.
    pub scales: [u8; GROUPS * 4],
    /// What is kept of their sums.
    pub kept: [u8; GROUPS * 4],
}

/// Makes what a block of [`InputLayout::Int8Words`] has behind its codes. Vectorizes inside a `#[target_feature]` caller.
///
/// # Panics
/// When `layout` is another one, or `out` not as long as that.
#[inline(always)]
pub fn to_words(layout: InputLayout, of_groups: &OfGroups, out: &mut [u8]) {
    let InputLayout::Int8Words { group, zero, minima } = layout else { panic!("not in words: {layout}") };
    assert!(out.len() == layout.block_bytes() - BLOCK);
    // Not `map`, which compilers leave a call.
    let (mut scales, mut largest) = ([0f32; GROUPS], 0);
    for (scale, &bytes) in scales.iter_mut().zip(of_groups.scales.as_chunks().0) {
        // Not negative, and so ordered as their bits, NaN above all.
        *scale = f32::from_le_bytes(bytes);
        largest = largest.max(scale.to_bits());
    }
    let largest = f32::from_bits(largest);
    let (unit, out) = out.split_at_mut(4);
    unit.copy_from_slice(&(largest * (32768.0 / WORD_TOP)).to_le_bytes());
    let by = if largest > 0.0 { largest } else { f32::INFINITY };
    let mut words = [0; GROUPS];
    for (word, scale) in words.iter_mut().zip(scales) {
        *word = nearest(scale / by * WORD_TOP);
    }
    let mut sums = [[0; 2]; GROUPS];
    for (sums, &bytes) in sums.iter_mut().zip(of_groups.kept.as_chunks::<4>().0) {
        let words = i32::from_le_bytes(bytes) ^ WORD_ZEROS;
        *sums = [i32::from(words as i16), words >> 16];
    }
    let down = -1.0 / (32768.0 * zero as f32);
    for (pair, out) in out.chunks_exact_mut(InputLayout::pair_bytes(minima)).enumerate() {
        let (sums, words) = if group == 16 {
            // Halves are the groups of the weights.
            (sums[pair], [words[pair]; 2])
        } else {
            // Both halves, each twice what it is to be.
            let ([a, b], [c, d]) = (sums[pair * 2], sums[pair * 2 + 1]);
            ([(a + b) / 2, (c + d) / 2], [words[pair * 2], words[pair * 2 + 1]])
        };
        let scaled =
            [nearest(sums[0] as f32 * words[0] as f32 * down), nearest(sums[1] as f32 * words[1] as f32 * down)];
        let odd = (pair & 1) as i32;
        let second = sums[1] + (odd ^ 1);
        let first = sums[0] + odd - i32::from(second < 0);
        // The last one only with minima.
        let numbers = [words[0] << 16 | words[1], (second << 16) + first, scaled[0] << 16 | (scaled[1] & 0xffff)];
        for (out, number) in out.as_chunks_mut::<4>().0.iter_mut().zip(numbers) {
            *out = number.to_le_bytes();
        }
    }
}

/// The largest scale of a block of [`InputLayout::Int8Words`].
const WORD_TOP: f32 = i16::MAX as f32;

/// Lanes of the sums below: kept apart so that they vectorize, and in the same order on every tier.
const LANES: usize = 16;

/// What the largest magnitude of a group becomes, in the order of preference. Where rounding falls is chance, and the best of four
/// draws loses 5 % less than the first: enough to keep groups of 32 within their accuracy bound, for a few cycles.
pub const TOPS: [f32; 4] = [127.0, 126.0, 125.0, 124.0];

/// What a squared error in codes is worth, for each of [`TOPS`], in the same unit.
pub const WORTH: [f32; 4] =
    [1.0 / (127.0 * 127.0), 1.0 / (126.0 * 126.0), 1.0 / (125.0 * 125.0), 1.0 / (124.0 * 124.0)];

/// Combines lanes pairwise, in a fixed order.
#[inline(always)]
fn fold(mut lanes: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut n = LANES / 2;
    while n > 0 {
        for l in 0..n {
            lanes[l] = f(lanes[l], lanes[l + n]);
        }
        n /= 2;
    }
    lanes[0]
}

/// Added to a number up to 2^22 in magnitude, leaves the nearest integer (ties to even) in the low bits. A cast would check its range
/// lane by lane.
const TO_INTEGER: f32 = (3 << 22) as f32;

/// The nearest integer of such a number.
#[inline(always)]
fn nearest(v: f32) -> i32 {
    (v + TO_INTEGER).to_bits() as i32 - TO_INTEGER.to_bits() as i32
}

/// The sums of both halves of codes, each of the first and of the second two of each four, of what `f` makes of each.
#[inline(always)]
fn halves(codes: &[u8], f: impl Fn(i32) -> i32) -> [[i32; 2]; 2] {
    let (first, second) = codes.split_at(codes.len() / 2);
    [first, second].map(|half| {
        let mut sums = [0; 4];
        for codes in half.as_chunks::<4>().0 {
            for (sum, &code) in sums.iter_mut().zip(codes) {
                *sum += f(i32::from(code as i8));
            }
        }
        [sums[0] + sums[1], sums[2] + sums[3]]
    })
}

/// What to multiply what the largest magnitude of a group of `cols` columns becomes with, because the magnitudes of the codes of half of
/// it sum up to `reach`, and not to `most` or less: rounding adds a half a code, then and now.
#[inline(always)]
pub fn shrink(most: i32, reach: i32, cols: usize) -> f32 {
    (most - cols as i32 / 2) as f32 / reach as f32
}

/// Rounds a group to codes, the magnitudes of which sum up to `most` or less in each half; returns the scale.
#[inline(always)]
fn round_group(x: &[f32], codes: &mut [u8], most: i32) -> f32 {
    let lanes = x.as_chunks::<LANES>().0;
    let mut largest = [0u32; LANES];
    for x in lanes {
        for l in 0..LANES {
            largest[l] = largest[l].max(x[l].abs().to_bits());
        }
    }
    // Magnitudes are ordered as their bits, NaN above all.
    let amax = f32::from_bits(largest.into_iter().fold(0, u32::max));
    let inverse = 1.0 / amax;
    if !amax.is_finite() || !(inverse * TOPS[0]).is_finite() {
        codes.fill(0);
        // Not a number, or infinite: the group is NaN. Below 4e-37 (or all zero): it counts as zero.
        return if amax.is_finite() { 0.0 } else { f32::NAN };
    }
    let mut best = (f32::INFINITY, TOPS[0]);
    for (top, worth) in TOPS.into_iter().zip(WORTH) {
        let up = inverse * top;
        let mut errors = [0f32; LANES];
        for x in lanes {
            for l in 0..LANES {
                let code = x[l] * up;
                let e = code - code.round_ties_even();
                errors[l] = e.mul_add(e, errors[l]);
            }
        }
        let error = fold(errors, |a, b| a + b) * worth;
        if error < best.0 {
            best = (error, top);
        }
    }
    let mut top = best.1;
    let mut round = |top: f32| {
        let up = inverse * top;
        for (codes, x) in codes.as_chunks_mut::<LANES>().0.iter_mut().zip(lanes) {
            for l in 0..LANES {
                codes[l] = nearest(x[l] * up) as u8;
            }
        }
        let [first, second] = if most < i32::MAX { halves(codes, i32::abs) } else { [[0; 2]; 2] };
        (first[0] + first[1]).max(second[0] + second[1])
    };
    let reach = round(top);
    if reach > most {
        top *= shrink(most, reach, x.len());
        round(top);
    }
    amax / top
}

/// Packed input rows, borrowed.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    layout: InputLayout,
    rows: usize,
    cols: usize,
    bytes: &'a [u8],
}

impl<'a> Inputs<'a> {
    /// Views `bytes` as `rows` packed rows of `cols` columns.
    ///
    /// # Panics
    /// When `bytes` has another length than [`InputLayout::bytes`] says, or does not begin on a multiple of 4.
    pub fn new(layout: InputLayout, rows: usize, cols: usize, bytes: &'a [u8]) -> Self {
        assert_eq!(bytes.len(), layout.bytes(rows, cols), "packed rows of another shape");
        assert!(bytes.as_ptr().addr().is_multiple_of(4), "packed rows begin off their alignment");
        Inputs { layout, rows, cols, bytes }
    }

    /// How rows are rounded.
    #[inline(always)]
    pub fn layout(&self) -> InputLayout {
        self.layout
    }

    /// Number of rows.
    #[inline(always)]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns, without padding.
    #[inline(always)]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Blocks per row.
    #[inline(always)]
    pub fn blocks(&self) -> usize {
        self.layout.blocks(self.cols)
    }

    /// Block `block` of row `row`.
    #[inline(always)]
    pub fn block(&self, block: usize, row: usize) -> &'a [u8] {
        let n = self.layout.block_bytes();
        &self.bytes[(block * self.rows + row) * n..][..n]
    }

    /// All bytes: block `b` of row `r` starts at `(b * rows + r) * block_bytes`.
    #[inline(always)]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn int8_blocks_round_to_nearest_and_pad_with_zeros() {
        let x: Vec<f32> = (0..100).map(|i| (i as f32 - 50.0) * 0.37).collect();
        for (group, times) in [(32, 1), (16, -8), (128, -128), (WIDE, -128)] {
            let layout = InputLayout::Int8 { group, sums: Sums::Times(times) };
            let mut out = vec![0xaa; layout.block_bytes()];
            pack_block(layout, &x, &mut out);
            let (columns, groups) = (layout.columns(), layout.columns() / group);
            assert!(out[columns + groups * 8..].iter().all(|&padding| padding == 0));
            for g in 0..groups {
                let f = |o: usize| <[u8; 4]>::try_from(&out[o..o + 4]).unwrap();
                let scale = f32::from_le_bytes(f(columns + g * 4));
                let sum = i32::from_le_bytes(f(columns + groups * 4 + g * 4));
                let codes: Vec<i32> = out[g * group..][..group].iter().map(|&c| c as i8 as i32).collect();
                assert_eq!(sum, times * codes.iter().sum::<i32>());
                let largest = codes.iter().map(|c| c.abs()).max().unwrap();
                assert!((124..=127).contains(&largest) || x[(g * group).min(x.len())..].is_empty(), "{largest}");
                for (i, c) in codes.iter().enumerate() {
                    let want = x.get(g * group + i).copied().unwrap_or(0.0);
                    assert!((want - scale * *c as f32).abs() <= scale * 0.5001);
                }
            }
        }
    }

    #[test]
    fn blocks_in_words_have_integer_scales_of_groups() {
        let mut random = crate::testing::Random(5);
        for (group, zero, minima) in [(16, 12, false), (16, 32, false), (16, 2, true), (32, 8, true), (32, 16, false)] {
            // Groups of unlike sizes, one of zeros, and one whose codes are all large.
            let x: [f32; BLOCK] = std::array::from_fn(|i| match i / 32 {
                0 => random.normal(),
                1 => 0.0,
                2 => 0.03 * random.normal(),
                _ => 0.5 * (random.normal().signum() + 0.01),
            });
            let layout = InputLayout::Int8Words { group, zero, minima };
            let mut out = vec![0xaa; layout.block_bytes()];
            pack_block(layout, &x, &mut out);
            let bits = |at: usize| i32::from_le_bytes([0, 1, 2, 3].map(|i| out[at + i]));
            let unit = f32::from_bits(bits(BLOCK) as u32);
            for pair in 0..BLOCK / (2 * group) {
                let at = BLOCK + 4 + pair * InputLayout::pair_bytes(minima);
                for second in 0..2 {
                    let first_column = (pair * 2 + second) * group;
                    let codes = out[first_column..][..group].iter().map(|&c| i32::from(c as i8));
                    let (sum, reach) = codes.clone().fold((0, 0), |(sum, reach), c| (sum + c, reach + c.abs()));
                    // What products are at most fits a word.
                    assert!(reach * zero < 1 << 15, "{layout:?} {reach}");
                    let word = |at: usize| if second == 0 { bits(at) >> 16 } else { i32::from(bits(at) as i16) };
                    let scale = word(at);
                    // As products go on, with weights that are all the same: the sum of the first group ends above that of the second one.
                    for weight in [0, 1, zero, 2 * zero] {
                        let columns = &out[pair * 2 * group..][..2 * group];
                        let [first, after] = [0, group].map(|start| {
                            columns[start..][..group].iter().map(|&c| weight * i32::from(c as i8)).sum::<i32>()
                        });
                        let ends = ((bits(at + 4) + first) as u32).rotate_left(16) as i32 + after;
                        let got = if second == 0 { ends >> 16 } else { i32::from(ends as i16) };
                        assert!(((weight - zero) * sum - got).abs() <= 1, "{layout:?} {weight}");
                    }
                    if minima {
                        assert!((f64::from(word(at + 8)) - f64::from(sum * scale) / 32768.0).abs() < 0.51);
                    }
                    for (code, x) in codes.zip(&x[first_column..]) {
                        let got = code as f32 * scale as f32 / 32768.0 * unit;
                        // Half a code, of as many as are left where sums would not fit, and what the scale is rounded by.
                        let code = unit * (scale as f32 + 0.5) / 32768.0;
                        assert!((got - x).abs() <= code * 0.51 + x.abs() * 1e-4 + unit * 2e-3, "{layout:?}: {got} {x}");
                    }
                }
            }
        }
        let layout = InputLayout::Int8Words { group: 32, zero: 8, minima: false };
        for (bad, unit) in [(f32::NAN, f32::NAN), (f32::INFINITY, f32::NAN), (0.0, 0.0)] {
            let (mut out, mut x) = (vec![0xaa; layout.block_bytes()], [0.0; BLOCK]);
            x[40] = bad;
            pack_block(layout, &x, &mut out);
            let got = f32::from_le_bytes([0, 1, 2, 3].map(|i| out[BLOCK + i]));
            assert!(got == unit || got.is_nan() && unit.is_nan(), "{got}");
        }
    }

    /// The codes, scales and sums of a block in groups of 32, in the order of their columns.
    fn packed(sums: Sums, x: &[f32]) -> (Vec<i32>, Vec<f32>, Vec<i32>) {
        let layout = InputLayout::Int8 { group: 32, sums };
        let mut out = vec![0; layout.block_bytes()];
        pack_block(layout, x, &mut out);
        let (codes, rest) = out.split_at(BLOCK);
        let (scales, sums) = rest.split_at(16);
        (
            codes.iter().map(|&c| i32::from(c as i8)).collect(),
            scales.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
            sums.as_chunks().0.iter().map(|&b| i32::from_le_bytes(b)).collect(),
        )
    }

    #[test]
    fn halves_have_sums_of_their_own() {
        let x: Vec<f32> = (0..BLOCK).map(|i| (i as f32).sin()).collect();
        let (codes, scales, sums) = packed(Sums::Halves(-4), &x);
        // Such codes are never too large.
        let (same, same_scales, whole) = packed(Sums::Times(1), &x);
        assert_eq!((&codes, &scales), (&same, &same_scales));
        assert_eq!((whole.len(), sums.len()), (4, 4));
        for (&kept, codes) in sums.iter().zip(codes.chunks(32)) {
            let [first, second] = [0, 16].map(|start| codes[start..][..16].iter().sum::<i32>());
            assert_eq!([kept & 0xffff, (kept as u32 >> 16) as i32], [first, second].map(|sum| -4 * sum + WORD_ZERO));
            // As products go on, with codes of 0..8: both sums less 4 times their codes, the first one above.
            for code in [0, 7] {
                let first_done = (kept + code * first) as u32;
                let words = (first_done.rotate_left(16) as i32 + code * second) ^ WORD_ZEROS;
                assert_eq!([words >> 16, i32::from(words as i16)], [first, second].map(|sum| (code - 4) * sum));
            }
        }
    }

    #[test]
    fn words_have_the_sum_above_what_it_takes_off() {
        let x: Vec<f32> = (0..BLOCK).map(|i| (i as f32).sin()).collect();
        let (codes, _, sums) = packed(Sums::Words(-8), &x);
        assert_eq!(codes, packed(Sums::Times(1), &x).0);
        for (kept, codes) in sums.iter().zip(codes.chunks(32)) {
            // As products go on: with codes of 0..16, the sum of 32 of them less 8 each fits a word.
            for code in [0, 15] {
                let sum: i32 = codes.iter().sum();
                let words = kept + code * sum;
                assert_eq!((words >> 16, (words & 0xffff) - WORD_ZERO), (sum, (code - 8) * sum));
            }
        }
    }

    /// As products go on: with codes of 0..=31, each the product of four columns added to both words, the sums of codes less 16 of all 32 fit, in the end.
    #[test]
    fn pairs_have_words_of_their_own() {
        let x: Vec<f32> = (0..BLOCK).map(|i| if i < 96 { (i as f32).sin() } else { -1.0 }).collect();
        let (codes, _, sums) = packed(Sums::Pairs(-16), &x);
        let (same, _, with_sums) = packed(Sums::PairWords(-16), &x);
        let (_, scales, with_scaled) = packed(Sums::PairScaled(-16), &x);
        assert_eq!((&codes, &codes), (&packed(Sums::Pairs(1).whole(), &x).0, &same));
        for (g, codes) in codes.chunks(32).enumerate() {
            let sum = |pair: usize| (0..32).filter(|i| i % 4 / 2 == pair).map(|i| codes[i]).sum::<i32>();
            assert_eq!(with_sums[2 * g..][..2], [sums[g], (sum(0) + sum(1)) << 16]);
            let scaled = (scales[g] * (sum(0) + sum(1)) as f32).to_bits() as i32;
            assert_eq!(with_scaled[2 * g..][..2], [sums[g], scaled]);
            for code in [0, 31] {
                for pair in [0, 1] {
                    let begin = (sums[g] >> (16 * pair)) as i16;
                    let word = begin.wrapping_add((code * sum(pair)) as i16);
                    assert_eq!(i32::from(word), (code - 16) * sum(pair));
                }
            }
        }
        // Of halves, with codes of 0..=63 in 16 columns, which are smaller where they would not fit.
        let (codes, _, sums) = packed(Sums::PairHalves(-32), &x);
        assert_eq!(codes, packed(Sums::PairHalves(-32).whole(), &x).0);
        assert!(codes[96..].iter().all(|&c| (-63..-60).contains(&c)), "{:?}", &codes[96..]);
        for (half, codes) in codes.chunks(16).enumerate() {
            for pair in [0, 1] {
                let sum: i32 = (0..16).filter(|i| i % 4 / 2 == pair).map(|i| codes[i]).sum();
                assert_eq!(i32::from((sums[half] >> (16 * pair)) as i16), -32 * sum);
            }
        }
    }

    /// With weights of up to 32, from constant inputs, the worst, to those with one that is far above the others, which need no more room.
    #[test]
    fn codes_of_a_half_add_up_to_a_word() {
        let most = Sums::Halves(-32).most();
        assert_eq!(most, 1023);
        let mut random = crate::testing::Random(3);
        let mut shrunk = 0;
        for power in 0..40 {
            let x: Vec<f32> = (0..BLOCK)
                .map(|i| {
                    let sign = if power == 0 || i % 3 > 0 { 1.0 } else { -1.0 };
                    sign * random.normal().abs().powf(power as f32 * 0.1)
                })
                .collect();
            let (codes, scales, _) = packed(Sums::Halves(-32), &x);
            for (g, (codes, x)) in codes.chunks(32).zip(x.chunks(32)).enumerate() {
                let reach = |half: &[i32]| half.iter().map(|c| c.abs()).sum::<i32>();
                let reach = reach(&codes[..16]).max(reach(&codes[16..]));
                assert!(reach <= most, "{reach}");
                let largest = codes.iter().map(|c| c.abs()).max().unwrap();
                if largest < 124 {
                    shrunk += 1;
                    assert!(reach > most - 32, "{reach}: smaller than need be");
                }
                for (&code, &x) in codes.iter().zip(x) {
                    assert!((x - scales[g] * code as f32).abs() <= scales[g] * 0.5001);
                }
            }
        }
        assert!((20..100).contains(&shrunk), "{shrunk} of 160 groups");
    }

    #[test]
    fn a_non_finite_group_poisons_itself_only() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0f32; BLOCK];
            x[40] = bad;
            let layout = InputLayout::Int8 { group: 32, sums: Sums::Times(1) };
            let mut out = vec![0; layout.block_bytes()];
            pack_block(layout, &x, &mut out);
            let scale = |g: usize| f32::from_le_bytes(out[BLOCK + g * 4..][..4].try_into().unwrap());
            assert!(scale(1).is_nan() && scale(0) == scale(2) && scale(0) > 0.0);
        }
        let mut out = vec![1; InputLayout::Int8 { group: 32, sums: Sums::Times(1) }.block_bytes()];
        pack_block(InputLayout::Int8 { group: 32, sums: Sums::Times(1) }, &[0.0; 128], &mut out);
        assert!(out.iter().all(|&b| b == 0));
    }
}
