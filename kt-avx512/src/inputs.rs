//! Rounding of input rows to int8: the numbers of [`kt_core::cpu::input::pack_block`], bit for bit, in vector operations.

#![allow(unsafe_code)] // kernel

use kt_core::cpu::input::{self, BLOCK, InputLayout, OfGroups, Sums, TOPS, WIDE, WORTH, shrink};

use crate::isa::{Isa, Job};

/// Lanes of a register.
const LANES: usize = 16;

/// Packs up to a block of columns.
pub(crate) struct PackInput<'a> {
    pub layout: InputLayout,
    pub x: &'a [f32],
    pub out: &'a mut [u8],
}

impl Job for PackInput<'_> {
    #[inline(always)]
    fn go<I: Isa>(self, isa: I) {
        assert!(self.out.len() == self.layout.block_bytes());
        if let InputLayout::Int8 { group: WIDE, sums } = self.layout
            && !sums.in_halves()
        {
            let mut memory = [0f32; WIDE];
            return one::<I, WIDE, false>(isa, padded(self.x, &mut memory), sums, input::wide_parts(sums, self.out));
        }
        let mut memory = [0f32; BLOCK];
        let x: &[f32; BLOCK] = match self.layout.columns() {
            BLOCK => padded(self.x, &mut memory),
            _ => return input::pack_block(self.layout, self.x, self.out),
        };
        match self.layout {
            InputLayout::Int8 { group, sums } => {
                let (codes, rest) = self.out.split_at_mut(BLOCK);
                let (scales, kept) = rest.split_at_mut(BLOCK / group * 4);
                match group {
                    16 if !sums.in_halves() => fours::<I, 16, false>(isa, x, sums, codes, scales, kept),
                    32 if sums.in_halves() => fours::<I, 32, true>(isa, x, sums, codes, scales, kept),
                    32 => fours::<I, 32, false>(isa, x, sums, codes, scales, kept),
                    BLOCK if !sums.in_halves() => one::<I, BLOCK, false>(isa, x, sums, (codes, scales, kept)),
                    _ => input::pack_block(self.layout, x, self.out),
                }
            }
            InputLayout::Int8Words { group, zero, .. } => {
                let mut of_groups = OfGroups::default();
                let (codes, words) = self.out.split_at_mut(BLOCK);
                let sums = InputLayout::before_words(group, zero);
                fours::<I, 32, true>(isa, x, sums, codes, &mut of_groups.scales, &mut of_groups.kept);
                input::to_words(self.layout, &of_groups, words);
            }
            layout => input::pack_block(layout, x, self.out),
        }
    }
}

/// Columns, padded with zeros to `N`.
#[inline(always)]
fn padded<'a, const N: usize>(x: &'a [f32], memory: &'a mut [f32; N]) -> &'a [f32; N] {
    if let Ok(x) = x.try_into() {
        return x;
    }
    memory[..x.len()].copy_from_slice(x);
    memory
}

/// Register `i` of a slice.
#[inline(always)]
fn load<I: Isa>(isa: I, x: &[f32], i: usize) -> I::Flt {
    let x = &x[i * LANES..][..LANES];
    // SAFETY: 16 numbers.
    isa.as_f32(unsafe { isa.load(x.as_ptr().cast()) })
}

/// Packs a block in groups of `G` columns, 16 or 32, four at a time, of which each has a quarter of every register: what is one number for a group then is one
/// operation for four. `HALVES`: [`Sums::Halves`] are kept.
#[inline(always)]
fn fours<I: Isa, const G: usize, const HALVES: bool>(
    isa: I,
    x: &[f32; BLOCK],
    kept: Sums,
    codes: &mut [u8],
    scales: &mut [u8],
    sums: &mut [u8],
) {
    let kept_bytes = kept.of_group() * 4;
    let tops: [f32; LANES] = std::array::from_fn(|i| TOPS[i % TOPS.len()]);
    let worth: [f32; LANES] = std::array::from_fn(|i| WORTH[i % WORTH.len()]);
    let (tops, worth) = (load(isa, &tops, 0), load(isa, &worth, 0));
    let registers = G / LANES;
    let shrinks = HALVES && kept.most() < G as i32 / 2 * TOPS[0] as i32;
    for first in (0..BLOCK / G).step_by(4) {
        let x = &x[first * G..][..4 * G];
        // Lane `4 * g + j` of register `i`: column `4 * i + j` of group `g`, then those 16 columns on.
        let mut columns = [[isa.zero(); 4]; 2];
        for (i, columns) in columns.iter_mut().enumerate().take(registers) {
            let of = |g: usize| g * registers + i;
            *columns =
                isa.quarters([load(isa, x, of(0)), load(isa, x, of(1)), load(isa, x, of(2)), load(isa, x, of(3))]);
        }
        let mut largest = isa.splat(0);
        for columns in columns.iter().take(registers) {
            for &v in columns {
                largest = isa.max(largest, isa.as_int(isa.abs(v)));
            }
        }
        let largest = largest_of_quarters(isa, largest);
        let amax = isa.as_f32(largest);
        let inverse = isa.div(isa.splat_f32(1.0), amax);
        // Lane `4 * g + t`: of group `g`, with top `t`.
        let ups = isa.mul(inverse, tops);
        // Not numbers, infinite ones, and what is too small.
        if isa.largest(isa.max(largest, isa.as_int(ups))) >= f32::INFINITY.to_bits() {
            for g in first..first + 4 {
                let kept_of = &mut sums[g * kept_bytes..][..kept_bytes];
                let parts = (&mut codes[g * G..][..G], &mut scales[g * 4..][..4], kept_of);
                one::<I, G, HALVES>(isa, &x[(g - first) * G..][..G], kept, parts);
            }
            continue;
        }
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
        // No branch: which of them is best is chance. The first of equals has the largest top.
        let errors = isa.mul(isa.sums_of_quarters(errors), worth);
        let least = isa.least(errors, isa.as_f32(isa.in_quarters::<OPPOSITE>(isa.as_int(errors))));
        let least = isa.least(least, isa.as_f32(isa.in_quarters::<BESIDE>(isa.as_int(least))));
        let top = isa.as_f32(largest_of_quarters(isa, isa.as_int(isa.where_equal(errors, least, tops))));
        let (up, scale) = (isa.mul(inverse, top), isa.div(amax, top));
        let mut rounded = [[isa.splat(0); 4]; 2];
        let mut magnitudes = [isa.splat(0); 2];
        for ((rounded, magnitudes), columns) in rounded.iter_mut().zip(&mut magnitudes).zip(&columns).take(registers) {
            for (rounded, &v) in rounded.iter_mut().zip(columns) {
                let scaled = isa.mul(v, up);
                *rounded = isa.rounded(scaled);
                if shrinks {
                    *magnitudes = isa.add(*magnitudes, isa.rounded(isa.abs(scaled)));
                }
            }
        }
        let codes_of = &mut codes[first * G..][..4 * G];
        let bytes = isa.bytes(rounded[0]);
        // SAFETY: 64 bytes, or twice that.
        unsafe {
            if G > LANES {
                let [low, high] = isa.mix_quarters(bytes, isa.bytes(rounded[1]));
                isa.store(codes_of.as_mut_ptr(), low);
                isa.store(codes_of[4 * LANES..].as_mut_ptr(), high);
            } else {
                isa.store(codes_of.as_mut_ptr(), bytes);
            }
        }
        let mut of_halves = [isa.splat(0); 2];
        for (sum, &[a, b, c, d]) in of_halves.iter_mut().zip(&rounded).take(registers) {
            *sum = isa.add(isa.add(a, b), isa.add(c, d));
        }
        if !HALVES {
            of_halves = [isa.add(of_halves[0], of_halves[1]), isa.splat(0)];
        }
        let firsts = sums_of_pairs(isa, of_halves[0], kept);
        let seconds = if HALVES { sums_of_pairs(isa, of_halves[1], kept) } else { [[0; 2]; 4] };
        let scale = firsts_of_quarters(isa, isa.as_int(scale));
        for g in 0..4 {
            scales[(first + g) * 4..][..4].copy_from_slice(&scale[g].to_le_bytes());
            let scale = f32::from_bits(scale[g] as u32);
            kept.write([firsts[g], seconds[g]], scale, &mut sums[(first + g) * kept_bytes..][..kept_bytes]);
        }
        if shrinks {
            let [a, b] = magnitudes;
            let reach = isa.max(sum_of_quarters(isa, a), sum_of_quarters(isa, b));
            if isa.largest(reach) <= kept.most() as u32 {
                continue;
            }
            let (reach, top) = (firsts_of_quarters(isa, reach), firsts_of_quarters(isa, isa.as_int(top)));
            let amax = firsts_of_quarters(isa, largest);
            for g in 0..4 {
                if reach[g] <= kept.most() {
                    continue;
                }
                let top = f32::from_bits(top[g] as u32) * shrink(kept.most(), reach[g], G);
                let (amax, at) = (f32::from_bits(amax[g] as u32), first + g);
                let kept_of = &mut sums[at * kept_bytes..][..kept_bytes];
                let parts = (&mut codes[at * G..][..G], &mut scales[at * 4..][..4], kept_of);
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

/// Of each quarter, the sums of its first two and of its other dwords; if `kept` is not in pairs, of all and 0.
#[inline(always)]
fn sums_of_pairs<I: Isa>(isa: I, v: I::Int, kept: Sums) -> [[i32; 2]; 4] {
    let pairs = isa.add(v, isa.in_quarters::<BESIDE>(v));
    let opposite = isa.in_quarters::<OPPOSITE>(pairs);
    if kept.in_pairs() {
        let ([a, b, c, d], [e, f, g, h]) = (firsts_of_quarters(isa, pairs), firsts_of_quarters(isa, opposite));
        [[a, e], [b, f], [c, g], [d, h]]
    } else {
        let [a, b, c, d] = firsts_of_quarters(isa, isa.add(pairs, opposite));
        [[a, 0], [b, 0], [c, 0], [d, 0]]
    }
}

/// The same sums of all lanes: of the first two of each four, and of the others, or 0.
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

/// Packs a group: its codes, its scale and what is kept of their sum. `HALVES`: as in [`fours`].
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
