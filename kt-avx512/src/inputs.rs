//! Rounding of input rows to int8: the numbers of [`kt_core::cpu::input::pack_block`], bit for bit, in vector operations.

#![allow(unsafe_code)] // kernel

use kt_core::cpu::input::{self, BLOCK, InputLayout, Sums, TOPS, WORDS_BLOCK, WORTH, shrink};

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
        let mut padded = [0f32; BLOCK];
        let x: &[f32; BLOCK] = match self.x.try_into() {
            Ok(x) => x,
            Err(_) => {
                padded[..self.x.len()].copy_from_slice(self.x);
                &padded
            }
        };
        match self.layout {
            InputLayout::Int8 { group: 16, sums } if !sums.in_halves() => fours::<I, 16, false>(isa, x, sums, self.out),
            InputLayout::Int8 { group: 32, sums } if sums.in_halves() => fours::<I, 32, true>(isa, x, sums, self.out),
            InputLayout::Int8 { group: 32, sums } => fours::<I, 32, false>(isa, x, sums, self.out),
            InputLayout::Int8 { group: BLOCK, sums } if !sums.in_halves() => groups::<I, BLOCK>(isa, x, sums, self.out),
            InputLayout::Int8Words { group, zero, .. } => {
                let mut block = [0; WORDS_BLOCK];
                let sums = InputLayout::before_words(group, zero);
                if group == 16 {
                    fours::<I, 16, false>(isa, x, sums, &mut block);
                } else {
                    fours::<I, 32, true>(isa, x, sums, &mut block);
                }
                input::to_words(self.layout, &block, self.out);
            }
            layout => input::pack_block(layout, x, self.out),
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

/// Packs a block in groups of `G` columns, 16 or 32, four at a time: what is one number for a group then is one operation for four.
/// `HALVES`: [`Sums::Halves`] are kept.
#[inline(always)]
fn fours<I: Isa, const G: usize, const HALVES: bool>(isa: I, x: &[f32; BLOCK], kept: Sums, out: &mut [u8]) {
    let (codes, rest) = out.split_at_mut(BLOCK);
    let (scales, sums) = rest.split_at_mut(BLOCK / G * 4);
    let kept_bytes = kept.of_group() * 4;
    let tops: [f32; LANES] = std::array::from_fn(|i| TOPS[i % TOPS.len()]);
    for first in (0..BLOCK / G).step_by(4) {
        let x = &x[first * G..][..4 * G];
        let at = |g: usize, i: usize| load(isa, x, g * (G / LANES) + i);
        let mut largest = [isa.splat(0); 4];
        for (g, largest) in largest.iter_mut().enumerate() {
            for i in 0..G / LANES {
                *largest = isa.max(*largest, isa.as_int(isa.abs(at(g, i))));
            }
        }
        // Lane `4 * g + t`: of group `g`, with top `t`.
        let amax = isa.as_f32(isa.four_largest(largest));
        let amax_of = lanes(isa, amax);
        let tops = load(isa, &tops, 0);
        let all_up = lanes(isa, isa.mul(isa.div(isa.splat_f32(1.0), amax), tops));
        let all_scales = lanes(isa, isa.div(amax, tops));
        let plain = |g: usize| all_up[g * 4].is_finite() && all_scales[g * 4].is_finite();
        if !(plain(0) && plain(1) && plain(2) && plain(3)) {
            for g in first..first + 4 {
                let kept_of = &mut sums[g * kept_bytes..][..kept_bytes];
                let parts = (&mut codes[g * G..][..G], &mut scales[g * 4..][..4], kept_of);
                one::<I, G, HALVES>(isa, &x[(g - first) * G..][..G], kept, parts);
            }
            continue;
        }
        let mut errors = [[isa.zero(); TOPS.len()]; 4];
        for (g, errors) in errors.iter_mut().enumerate() {
            for (t, errors) in errors.iter_mut().enumerate() {
                let up = isa.splat_f32(all_up[g * 4 + t]);
                for i in 0..G / LANES {
                    let e = isa.fraction(isa.mul(at(g, i), up));
                    *errors = isa.mul_add(e, e, *errors);
                }
            }
        }
        // No branch: which of them is best is chance.
        let best = isa.least_sums(errors, WORTH);
        // Of each half of each group, where it has two; else of the first.
        let mut rounded = [[isa.splat(0); 4]; 2];
        let mut magnitudes = rounded;
        for g in 0..4 {
            let up = isa.splat_f32(all_up[g * 4 + best[g]]);
            for (i, codes) in codes[(first + g) * G..][..G].chunks_exact_mut(LANES).enumerate() {
                let scaled = isa.mul(at(g, i), up);
                let v = isa.rounded(scaled);
                // SAFETY: 16 bytes.
                unsafe { isa.store_i8(codes.as_mut_ptr(), v) };
                let half = if HALVES { i * 2 / (G / LANES) } else { 0 };
                rounded[half][g] = isa.add(rounded[half][g], v);
                if HALVES {
                    magnitudes[half][g] = isa.add(magnitudes[half][g], isa.rounded(isa.abs(scaled)));
                }
            }
        }
        let firsts = sums_of_pairs(isa, rounded[0], kept);
        let seconds = if HALVES { sums_of_pairs(isa, rounded[1], kept) } else { [[0; 2]; 4] };
        for g in 0..4 {
            let scale = all_scales[g * 4 + best[g]];
            scales[(first + g) * 4..][..4].copy_from_slice(&scale.to_le_bytes());
            kept.write([firsts[g], seconds[g]], scale, &mut sums[(first + g) * kept_bytes..][..kept_bytes]);
        }
        if HALVES {
            let reach = [isa.sums(magnitudes[0]), isa.sums(magnitudes[1])];
            for g in 0..4 {
                let reach = reach[0][g].max(reach[1][g]);
                if reach <= kept.most() {
                    continue;
                }
                let top = TOPS[best[g]] * shrink(kept.most(), reach, G);
                let (amax, at) = (amax_of[g * 4], first + g);
                let kept_of = &mut sums[at * kept_bytes..][..kept_bytes];
                let parts = (&mut codes[at * G..][..G], &mut scales[at * 4..][..4], kept_of);
                round::<I, G, true>(isa, &x[g * G..][..G], (amax, top), kept, parts);
            }
        }
    }
}

/// The sums of the first two of each four lanes, and those of the others; if `kept` is not in pairs, of all lanes and 0. Of four registers.
#[inline(always)]
fn sums_of_pairs<I: Isa>(isa: I, v: [I::Int; 4], kept: Sums) -> [[i32; 2]; 4] {
    static FIRST: [[i32; 4]; LANES / 4] = [[-1, -1, 0, 0]; LANES / 4];
    let all = isa.sums(v);
    let mut sums = all.map(|sum| [sum, 0]);
    if kept.in_pairs() {
        // SAFETY: 64 bytes.
        let first = unsafe { isa.load(FIRST.as_ptr().cast()) };
        let firsts = isa.sums([isa.and(v[0], first), isa.and(v[1], first), isa.and(v[2], first), isa.and(v[3], first)]);
        for (sums, (first, all)) in sums.iter_mut().zip(firsts.into_iter().zip(all)) {
            *sums = [first, all - first];
        }
    }
    sums
}

/// The lanes of a register.
#[inline(always)]
fn lanes<I: Isa>(isa: I, v: I::Flt) -> [f32; LANES] {
    let mut lanes = [0f32; LANES];
    // SAFETY: 64 bytes.
    unsafe { isa.store(lanes.as_mut_ptr().cast(), isa.as_int(v)) };
    lanes
}

/// Packs a block in groups of `G` columns.
#[inline(always)]
fn groups<I: Isa, const G: usize>(isa: I, x: &[f32; BLOCK], kept: Sums, out: &mut [u8]) {
    let (codes, rest) = out.split_at_mut(BLOCK);
    let (scales, sums) = rest.split_at_mut(BLOCK / G * 4);
    for g in 0..BLOCK / G {
        let parts = (&mut codes[g * G..][..G], &mut scales[g * 4..][..4], &mut sums[g * 4..][..4]);
        one::<I, G, false>(isa, &x[g * G..][..G], kept, parts);
    }
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
    let [first, second, ..] = sums_of_pairs(isa, [rounded[0], rounded[1], isa.splat(0), isa.splat(0)], kept);
    kept.write([first, second], scale, sums);
    if HALVES { isa.sum(magnitudes[0]).max(isa.sum(magnitudes[1])) } else { 0 }
}
