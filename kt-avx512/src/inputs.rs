//! Rounding of input rows to int8: the numbers of [`kt_core::cpu::input::pack_block`], bit for bit, in vector operations.

#![allow(unsafe_code)] // kernel

use kt_core::cpu::input::{self, BLOCK, InputLayout, OfGroups, Sums, TOPS, WIDE, WORD_ZERO, WORD_ZEROS, WORTH, shrink};

use crate::isa::{Isa, Job};

/// Lanes of a register.
const LANES: usize = 16;

/// Packs a block of columns of some rows, which begin `stride` numbers apart, to blocks that follow each other.
pub(crate) struct PackInputs<'a> {
    pub layout: InputLayout,
    pub x: &'a [f32],
    pub stride: usize,
    pub out: &'a mut [u8],
}

impl Job for PackInputs<'_> {
    #[inline(always)]
    fn go<I: Isa>(self, isa: I) {
        let layout = self.layout;
        match layout {
            InputLayout::Int8 { group: 16, sums } if !sums.in_halves() => self.fours::<I, 16, false, false>(isa, sums),
            InputLayout::Int8 { group: 32, sums } if sums.in_halves() => self.fours::<I, 32, true, false>(isa, sums),
            InputLayout::Int8 { group: 32, sums } => self.fours::<I, 32, false, false>(isa, sums),
            InputLayout::Int8 { group: BLOCK, sums } if !sums.in_halves() => self.each(|x, out| {
                let (codes, rest) = out.split_at_mut(BLOCK);
                let (scale, kept) = rest.split_at_mut(4);
                one::<I, BLOCK, false>(isa, x, sums, (codes, scale, kept))
            }),
            InputLayout::Int8 { group: WIDE, sums } if !sums.in_halves() => {
                self.each(|x, out| one::<I, WIDE, false>(isa, x, sums, input::wide_parts(sums, out)))
            }
            InputLayout::Int8Words { group, zero, .. } => {
                self.fours::<I, 32, true, true>(isa, InputLayout::before_words(group, zero))
            }
            layout => self.each(|x, out| input::pack_block(layout, x, out)),
        }
    }
}

impl PackInputs<'_> {
    /// The blocks, one by one.
    #[inline(always)]
    fn each(self, mut pack: impl FnMut(&[f32], &mut [u8])) {
        for (i, out) in self.out.chunks_exact_mut(self.layout.block_bytes()).enumerate() {
            pack(&self.x[i * self.stride..][..self.layout.columns()], out);
        }
    }

    /// Blocks in groups of `G` columns. What is to be known of four groups comes before the four before them are rounded: each by itself is operations that wait
    /// for each other. `HALVES`: [`Sums::Halves`] are kept; `WORDS`: for [`InputLayout::Int8Words`].
    #[inline(always)]
    fn fours<I: Isa, const G: usize, const HALVES: bool, const WORDS: bool>(self, isa: I, kept: Sums) {
        let PackInputs { layout, x, stride, out } = self;
        let (size, four_kept) = (layout.block_bytes(), 4 * kept.of_group() * 4);
        let fours = BLOCK / (4 * G);
        let all = out.len() / size * fours;
        let four = |i: usize| &x[i / fours * stride + i % fours * (4 * G)..][..4 * G];
        if all == 0 {
            return;
        }
        let mut next = Four::<I, G>::new(isa, four(0));
        for (i, out) in out.chunks_exact_mut(size).enumerate() {
            let (codes, rest) = out.split_at_mut(BLOCK);
            let mut of_groups = OfGroups::default();
            let (scales, sums) = if WORDS {
                (&mut of_groups.scales[..], &mut of_groups.kept[..])
            } else {
                rest.split_at_mut(BLOCK / G * 4)
            };
            for j in 0..fours {
                let now = next;
                // The last one once more: no branch.
                next = Four::new(isa, four((i * fours + j + 1).min(all - 1)));
                // Not `zip`, which compilers leave a call.
                let codes = &mut codes[j * 4 * G..][..4 * G];
                now.pack::<HALVES>(
                    isa,
                    kept,
                    codes,
                    &mut scales[j * 16..][..16],
                    &mut sums[j * four_kept..][..four_kept],
                );
            }
            if WORDS {
                input::to_words(layout, &of_groups, rest);
            }
        }
    }
}

/// Register `i` of a slice.
#[inline(always)]
fn load<I: Isa>(isa: I, x: &[f32], i: usize) -> I::Flt {
    let x = &x[i * LANES..][..LANES];
    // SAFETY: 16 numbers.
    isa.as_f32(unsafe { isa.load(x.as_ptr().cast()) })
}

/// Four groups of `G` columns, 16 or 32, of which each has a quarter of every register: what is one number for a group then is one operation for four.
struct Four<'a, I: Isa, const G: usize> {
    x: &'a [f32],
    /// Lane `4 * g + j` of register `i`: column `4 * i + j` of group `g`, then those 16 columns on.
    columns: [[I::Flt; 4]; 2],
    /// The largest magnitudes, and their inverses.
    amax: I::Flt,
    inverse: I::Flt,
    /// Squared errors with each of [`TOPS`].
    errors: [I::Flt; TOPS.len()],
    /// Whether there are numbers that are none, infinite ones, or too small ones, and so no errors.
    special: bool,
}

/// [`TOPS`] in all quarters.
#[inline(always)]
fn tops<I: Isa>(isa: I) -> I::Flt {
    let tops: [f32; LANES] = std::array::from_fn(|i| TOPS[i % TOPS.len()]);
    load(isa, &tops, 0)
}

impl<'a, I: Isa, const G: usize> Four<'a, I, G> {
    const REGISTERS: usize = G / LANES;

    /// What there is to know before it is rounded.
    #[inline(always)]
    fn new(isa: I, x: &'a [f32]) -> Self {
        let mut columns = [[isa.zero(); 4]; 2];
        for (i, columns) in columns.iter_mut().enumerate().take(Self::REGISTERS) {
            let of = |g: usize| g * Self::REGISTERS + i;
            *columns =
                isa.quarters([load(isa, x, of(0)), load(isa, x, of(1)), load(isa, x, of(2)), load(isa, x, of(3))]);
        }
        let mut largest = isa.splat(0);
        for columns in columns.iter().take(Self::REGISTERS) {
            for &v in columns {
                largest = isa.max(largest, isa.as_int(isa.abs(v)));
            }
        }
        let largest = largest_of_quarters(isa, largest);
        let amax = isa.as_f32(largest);
        let inverse = isa.div(isa.splat_f32(1.0), amax);
        // Lane `4 * g + t`: of group `g`, with top `t`.
        let ups = isa.mul(inverse, tops(isa));
        let special = isa.largest(isa.max(largest, isa.as_int(ups))) >= f32::INFINITY.to_bits();
        let of_each = isa.as_int(ups);
        let of_each = [
            isa.in_quarters::<0b00_00_00_00>(of_each),
            isa.in_quarters::<0b01_01_01_01>(of_each),
            isa.in_quarters::<0b10_10_10_10>(of_each),
            isa.in_quarters::<0b11_11_11_11>(of_each),
        ];
        let mut errors = [isa.zero(); TOPS.len()];
        for (error, up) in errors.iter_mut().zip(of_each) {
            let up = isa.as_f32(up);
            let mut squares = [isa.zero(); 4];
            for (i, square) in squares.iter_mut().enumerate() {
                let e = isa.fraction(isa.mul(columns[0][i], up));
                *square = isa.mul(e, e);
                if G > LANES {
                    let e = isa.fraction(isa.mul(columns[1][i], up));
                    *square = isa.mul_add(e, e, *square);
                }
            }
            let [a, b, c, d] = squares;
            *error = isa.add_f32(isa.add_f32(a, c), isa.add_f32(b, d));
        }
        Four { x, columns, amax, inverse, errors, special }
    }

    /// Packs it: `4 * G` codes, four scales, and what is kept of four sums. `HALVES`: [`Sums::Halves`] are kept.
    #[inline(always)]
    fn pack<const HALVES: bool>(self, isa: I, kept: Sums, codes: &mut [u8], scales: &mut [u8], sums: &mut [u8]) {
        let Four { x, columns, amax, inverse, errors, special } = self;
        let kept_bytes = kept.of_group() * 4;
        assert!(codes.len() == 4 * G && scales.len() == 4 * 4 && sums.len() == 4 * kept_bytes);
        if special {
            for g in 0..4 {
                let kept_of = &mut sums[g * kept_bytes..][..kept_bytes];
                let parts = (&mut codes[g * G..][..G], &mut scales[g * 4..][..4], kept_of);
                one::<I, G, HALVES>(isa, &x[g * G..][..G], kept, parts);
            }
            return;
        }
        let shrinks = HALVES && kept.most() < G as i32 / 2 * TOPS[0] as i32;
        let worth: [f32; LANES] = std::array::from_fn(|i| WORTH[i % WORTH.len()]);
        // No branch: which of them is best is chance. The first of equals has the largest top.
        let errors = isa.mul(isa.sums_of_quarters(errors), load(isa, &worth, 0));
        let least = isa.least(errors, isa.as_f32(isa.in_quarters::<OPPOSITE>(isa.as_int(errors))));
        let least = isa.least(least, isa.as_f32(isa.in_quarters::<BESIDE>(isa.as_int(least))));
        let top = isa.as_f32(largest_of_quarters(isa, isa.as_int(isa.where_equal(errors, least, tops(isa)))));
        let (up, scale) = (isa.mul(inverse, top), isa.div(amax, top));
        let mut rounded = [[isa.splat(0); 4]; 2];
        let mut magnitudes = [isa.splat(0); 2];
        let each = rounded.iter_mut().zip(&mut magnitudes).zip(&columns).take(Self::REGISTERS);
        for ((rounded, magnitudes), columns) in each {
            for (rounded, &v) in rounded.iter_mut().zip(columns) {
                let scaled = isa.mul(v, up);
                *rounded = isa.rounded(scaled);
                if shrinks {
                    *magnitudes = isa.add(*magnitudes, isa.rounded(isa.abs(scaled)));
                }
            }
        }
        let bytes = isa.bytes(rounded[0]);
        // SAFETY: 64 bytes, or twice that.
        unsafe {
            if G > LANES {
                let [low, high] = isa.mix_quarters(bytes, isa.bytes(rounded[1]));
                isa.store(codes.as_mut_ptr(), low);
                isa.store(codes[4 * LANES..].as_mut_ptr(), high);
            } else {
                isa.store(codes.as_mut_ptr(), bytes);
            }
        }
        let mut of_halves = [isa.splat(0); 2];
        for (sum, &[a, b, c, d]) in of_halves.iter_mut().zip(&rounded).take(Self::REGISTERS) {
            *sum = isa.add(isa.add(a, b), isa.add(c, d));
        }
        if !HALVES {
            of_halves = [isa.add(of_halves[0], of_halves[1]), isa.splat(0)];
        }
        // SAFETY: 16 bytes.
        unsafe { isa.store_firsts(scales.as_mut_ptr(), isa.as_int(scale)) };
        let [one, two] = kept_of_quarters(isa, of_halves, scale, kept);
        if kept.of_group() == 1 {
            // SAFETY: 16 bytes.
            unsafe { isa.store_firsts(sums.as_mut_ptr(), one) };
        } else {
            let both = firsts_of_quarters(isa, one).into_iter().zip(firsts_of_quarters(isa, two));
            for (out, (one, two)) in sums.as_chunks_mut::<8>().0.iter_mut().zip(both) {
                *out = (u64::from(one as u32) | u64::from(two as u32) << 32).to_le_bytes();
            }
        }
        if shrinks {
            let [a, b] = magnitudes;
            let reach = isa.max(sum_of_quarters(isa, a), sum_of_quarters(isa, b));
            if isa.largest(reach) <= kept.most() as u32 {
                return;
            }
            let (reach, top) = (firsts_of_quarters(isa, reach), firsts_of_quarters(isa, isa.as_int(top)));
            let amax = firsts_of_quarters(isa, isa.as_int(amax));
            for g in 0..4 {
                if reach[g] <= kept.most() {
                    continue;
                }
                let top = f32::from_bits(top[g] as u32) * shrink(kept.most(), reach[g], G);
                let amax = f32::from_bits(amax[g] as u32);
                let kept_of = &mut sums[g * kept_bytes..][..kept_bytes];
                let parts = (&mut codes[g * G..][..G], &mut scales[g * 4..][..4], kept_of);
                round::<I, G, true>(isa, &x[g * G..][..G], (amax, top), kept, parts);
            }
        }
    }
}

/// For [`Isa::in_quarters`]: the lane beside each one of four, and the one two lanes on.
const BESIDE: i32 = 0b10_11_00_01;
const OPPOSITE: i32 = 0b01_00_11_10;

/// The largest of each quarter, of unsigned dwords, in all its lanes.
#[inline(always)]
fn largest_of_quarters<I: Isa>(isa: I, v: I::Int) -> I::Int {
    let v = isa.max(v, isa.in_quarters::<OPPOSITE>(v));
    isa.max(v, isa.in_quarters::<BESIDE>(v))
}

/// The sum of the dwords of each quarter, in all its lanes.
#[inline(always)]
fn sum_of_quarters<I: Isa>(isa: I, v: I::Int) -> I::Int {
    let v = isa.add(v, isa.in_quarters::<BESIDE>(v));
    isa.add(v, isa.in_quarters::<OPPOSITE>(v))
}

/// The first dword of each quarter.
#[inline(always)]
fn firsts_of_quarters<I: Isa>(isa: I, v: I::Int) -> [i32; 4] {
    let mut firsts = [0; 4];
    // SAFETY: 16 bytes.
    unsafe { isa.store_firsts(firsts.as_mut_ptr().cast(), v) };
    firsts
}

/// What [`Sums::write`] makes of the sums of the codes of four groups, or of their halves, in the first lane of each quarter: the first number that is kept of a
/// group, and the second one. The lanes of a quarter of `halves` add up to such a sum, those of columns of one place among each four in each.
#[inline(always)]
fn kept_of_quarters<I: Isa>(isa: I, halves: [I::Int; 2], scale: I::Flt, kept: Sums) -> [I::Int; 2] {
    // No closures: compilers leave calls of some, and those have none of the instructions.
    macro_rules! opposite {
        ($v:expr) => {
            isa.in_quarters::<OPPOSITE>($v)
        };
    }
    // Sums are words: of 32 codes at most.
    macro_rules! times {
        ($sum:expr, $times:expr) => {
            isa.madd($sum, isa.splat($times & 0xffff))
        };
    }
    macro_rules! pairs {
        ($v:expr, $times:expr) => {
            isa.words(times!(opposite!($v), $times), times!($v, $times))
        };
    }
    let [first, second] = halves;
    let first = isa.add(first, isa.in_quarters::<BESIDE>(first));
    let second = isa.add(second, isa.in_quarters::<BESIDE>(second));
    let both = isa.add(first, second);
    let sum = isa.add(both, opposite!(both));
    let scaled = isa.as_int(isa.mul(scale, isa.to_f32(sum)));
    let (word_zero, nothing) = (isa.splat(WORD_ZERO), isa.splat(0));
    match kept {
        Sums::Times(by) => [times!(sum, by), nothing],
        Sums::Scaled => [scaled, nothing],
        Sums::Words(by) => [isa.add(isa.up::<16>(sum), isa.add(times!(sum, by), word_zero)), nothing],
        Sums::Halves(by) => {
            let first = times!(isa.add(first, opposite!(first)), by);
            let second = times!(isa.add(second, opposite!(second)), by);
            [isa.xor(isa.words(second, first), isa.splat(WORD_ZEROS)), nothing]
        }
        Sums::Pairs(by) => [pairs!(both, by), nothing],
        Sums::PairHalves(by) => [pairs!(first, by), pairs!(second, by)],
        Sums::PairWords(by) => [pairs!(both, by), isa.up::<16>(sum)],
        Sums::PairScaled(by) => [pairs!(both, by), scaled],
        Sums::TimesScaled(by) => [times!(sum, by), scaled],
    }
}

/// Sums of lanes: of the first two of each four, and of the others, or, if `kept` is not in pairs, of all and 0.
#[inline(always)]
fn sums_of_lanes<I: Isa>(isa: I, v: I::Int, kept: Sums) -> [i32; 2] {
    static FIRST: [[i32; 4]; LANES / 4] = [[-1, -1, 0, 0]; LANES / 4];
    let all = isa.sum(v);
    if !kept.in_pairs() {
        return [all, 0];
    }
    // SAFETY: 64 bytes.
    let first = isa.sum(isa.and(v, unsafe { isa.load(FIRST.as_ptr().cast()) }));
    [first, all - first]
}

/// Packs a group: its codes, its scale and what is kept of their sum. `HALVES`: as in [`Four::pack`].
#[inline(always)]
fn one<I: Isa, const G: usize, const HALVES: bool>(
    isa: I,
    x: &[f32],
    kept: Sums,
    (codes, scales, sums): (&mut [u8], &mut [u8], &mut [u8]),
) {
    let mut largest = isa.splat(0);
    for i in 0..G / LANES {
        largest = isa.max(largest, isa.as_int(isa.abs(load(isa, x, i))));
    }
    let amax = f32::from_bits(isa.largest(largest));
    let inverse = 1.0 / amax;
    if !amax.is_finite() || !(inverse * TOPS[0]).is_finite() {
        codes.fill(0);
        let scale: f32 = if amax.is_finite() { 0.0 } else { f32::NAN };
        kept.write([[0; 2]; 2], scale, sums);
        scales.copy_from_slice(&scale.to_le_bytes());
        return;
    }
    let mut errors = [isa.zero(); TOPS.len()];
    for (errors, top) in errors.iter_mut().zip(TOPS) {
        let up = isa.splat_f32(inverse * top);
        for i in 0..G / LANES {
            let e = isa.fraction(isa.mul(load(isa, x, i), up));
            *errors = isa.mul_add(e, e, *errors);
        }
    }
    // No branch: which of them is best is chance.
    let top = TOPS[isa.least_sum(errors, WORTH)];
    let reach = round::<I, G, HALVES>(isa, x, (amax, top), kept, (&mut *codes, &mut *scales, &mut *sums));
    if HALVES && reach > kept.most() {
        round::<I, G, HALVES>(isa, x, (amax, top * shrink(kept.most(), reach, G)), kept, (codes, scales, sums));
    }
}

/// Rounds a group to codes, so that its largest magnitude, `amax`, becomes `top`. Returns what the magnitudes of the codes of a half sum up to,
/// for `HALVES`; else 0.
#[inline(always)]
fn round<I: Isa, const G: usize, const HALVES: bool>(
    isa: I,
    x: &[f32],
    (amax, top): (f32, f32),
    kept: Sums,
    (codes, scales, sums): (&mut [u8], &mut [u8], &mut [u8]),
) -> i32 {
    let up = isa.splat_f32(1.0 / amax * top);
    let (mut rounded, mut magnitudes) = ([isa.splat(0); 2], [isa.splat(0); 2]);
    for (i, codes) in codes.chunks_exact_mut(LANES).enumerate() {
        let scaled = isa.mul(load(isa, x, i), up);
        let v = isa.rounded(scaled);
        // SAFETY: 16 bytes.
        unsafe { isa.store_i8(codes.as_mut_ptr(), v) };
        let half = if HALVES { i * 2 / (G / LANES) } else { 0 };
        rounded[half] = isa.add(rounded[half], v);
        if HALVES {
            magnitudes[half] = isa.add(magnitudes[half], isa.rounded(isa.abs(scaled)));
        }
    }
    let scale = amax / top;
    scales.copy_from_slice(&scale.to_le_bytes());
    kept.write([sums_of_lanes(isa, rounded[0], kept), sums_of_lanes(isa, rounded[1], kept)], scale, sums);
    if HALVES { isa.sum(magnitudes[0]).max(isa.sum(magnitudes[1])) } else { 0 }
}
