//! Searches for the scale, or the scale and minimum, of a group of values that leave the smallest squared error.
//!
//! For given codes the best scale is a least-squares fit; for a given scale the best codes are the nearest ones. So a few
//! scales around the one that spans the largest value are tried, each with its nearest codes and the fit to them. Clipping
//! the largest values often pays, because all others then have finer steps.

use std::marker::PhantomData;

use super::tier::Lanes;

/// How much the squared error of each value counts.
pub(super) trait Weights: Copy {
    /// What computes.
    type Lanes: Lanes;

    /// Those of the values from `first` on.
    fn from(self, first: usize) -> Self;

    /// Those of eight values from `first` on.
    fn eight(self, first: usize) -> Self::Lanes;

    /// Those of `count` values from `first` on, and 0 for the others of eight.
    fn some(self, first: usize, count: usize) -> Self::Lanes;
}

/// All alike.
#[derive(Clone, Copy)]
pub(super) struct Equal<L>(PhantomData<L>);

impl<L> Equal<L> {
    pub(super) fn new() -> Self {
        Equal(PhantomData)
    }
}

impl<L: Lanes> Weights for Equal<L> {
    type Lanes = L;

    #[inline(always)]
    fn from(self, _: usize) -> Self {
        self
    }

    #[inline(always)]
    fn eight(self, _: usize) -> L {
        L::splat(1.0)
    }

    #[inline(always)]
    fn some(self, _: usize, count: usize) -> L {
        L::of(&padded(&[1.0; 8][..count]))
    }
}

/// One for each value.
#[derive(Clone, Copy)]
pub(super) struct Each<'a, L>(&'a [f32], PhantomData<L>);

impl<'a, L> Each<'a, L> {
    pub(super) fn new(weights: &'a [f32]) -> Self {
        Each(weights, PhantomData)
    }
}

impl<L: Lanes> Weights for Each<'_, L> {
    type Lanes = L;

    #[inline(always)]
    fn from(self, first: usize) -> Self {
        Each(&self.0[first..], PhantomData)
    }

    #[inline(always)]
    fn eight(self, first: usize) -> L {
        match self.0[first..].first_chunk() {
            Some(eight) => L::of(eight),
            None => L::splat(0.0),
        }
    }

    #[inline(always)]
    fn some(self, first: usize, count: usize) -> L {
        L::of(&padded(&self.0[first..first + count]))
    }
}

/// Up to eight numbers, and zeros.
#[inline(always)]
pub(super) fn padded(some: &[f32]) -> [f32; 8] {
    let mut eight = [0.0; 8];
    eight[..some.len()].copy_from_slice(some);
    eight
}

/// Numbers are integers in their lowest bits after this is added, the nearest ones, ties to even: for |x| < 2^22.
const SHIFT: f32 = 12_582_912.0;

/// Rounds to the nearest integer, ties to even, for |x| < 2^22: in two additions, which vectorize on any machine. Larger
/// numbers stay about as large.
#[inline(always)]
pub(super) fn nearest(x: f32) -> f32 {
    (x + SHIFT) - SHIFT
}

#[inline(always)]
fn nearest_lanes<L: Lanes>(x: L) -> L {
    x.plus(L::splat(SHIFT)).minus(L::splat(SHIFT))
}

#[inline(always)]
fn splat<L: Lanes, const T: usize>(numbers: [f32; T]) -> [L; T] {
    let mut lanes = [L::splat(0.0); T];
    for (lanes, v) in lanes.iter_mut().zip(numbers) {
        *lanes = L::splat(v);
    }
    lanes
}

/// What gives values their codes. No closure: see [`tier`](super::tier).
pub(super) trait Round<L> {
    /// The codes as numbers.
    fn round(&self, v: L) -> L;
}

/// Stores the codes of values: their lowest bytes.
#[inline(always)]
pub(super) fn store_codes<L: Lanes>(values: &[f32], codes: &mut [u8], integer: impl Round<L>) {
    let (chunks, rest) = values.as_chunks::<8>();
    let (code_chunks, code_rest) = codes.as_chunks_mut::<8>();
    for (values, codes) in chunks.iter().zip(code_chunks) {
        let numbers = integer.round(L::of(values)).plus(L::splat(SHIFT)).array();
        for (code, v) in codes.iter_mut().zip(numbers) {
            *code = v.to_bits() as u8;
        }
    }
    if !rest.is_empty() {
        let numbers = integer.round(L::of(&padded(rest))).plus(L::splat(SHIFT)).array();
        for (code, v) in code_rest.iter_mut().zip(numbers) {
            *code = v.to_bits() as u8;
        }
    }
}

/// The integers in `low..=high` nearest to `(v + minimum) * inverse`, plus `add`.
#[derive(Clone, Copy)]
pub(super) struct Nearest<L> {
    minimum: L,
    inverse: L,
    low: L,
    high: L,
    add: L,
}

impl<L: Lanes> Nearest<L> {
    #[inline(always)]
    pub(super) fn new(inverse: f32, (low, high): (f32, f32), add: f32) -> Self {
        let [minimum, inverse, low, high, add] = splat([0.0, inverse, low, high, add]);
        Nearest { minimum, inverse, low, high, add }
    }

    #[inline(always)]
    pub(super) fn above(minimum: f32, inverse: f32, top: u8) -> Self {
        Nearest { minimum: L::splat(minimum), ..Nearest::new(inverse, (0.0, top as f32), 0.0) }
    }
}

impl<L: Lanes> Round<L> for Nearest<L> {
    #[inline(always)]
    fn round(&self, v: L) -> L {
        let x = v.plus(self.minimum).times(self.inverse);
        nearest_lanes(x.max(self.low).min(self.high)).plus(self.add)
    }
}

/// Scales that are tried in one pass over the values.
const TRIED: usize = 4;

/// What is added up over a group: `N` numbers for each of some scales that are tried. No closure: see [`tier`](super::tier).
trait Terms<L, const N: usize> {
    /// Those of number `t` of them, for values and their weights; 0 where the weight is.
    fn of(&self, t: usize, v: L, weight: L) -> [L; N];
}

/// Sums over a group for `T` scales that are tried.
#[inline(always)]
fn sums<W: Weights, const T: usize, const N: usize>(
    values: &[f32],
    weights: W,
    terms: impl Terms<W::Lanes, N>,
) -> [[f32; N]; T] {
    let mut lanes = [[W::Lanes::splat(0.0); N]; T];
    let mut at = 0;
    while at < values.len() {
        let (v, weight) = match values[at..].first_chunk() {
            Some(eight) => (W::Lanes::of(eight), weights.eight(at)),
            None => (W::Lanes::of(&padded(&values[at..])), weights.some(at, values.len() - at)),
        };
        for (t, lanes) in lanes.iter_mut().enumerate() {
            for (lane, term) in lanes.iter_mut().zip(terms.of(t, v, weight)) {
                *lane = lane.plus(term);
            }
        }
        at += 8;
    }
    let mut sums = [[0.0; N]; T];
    for (sums, lanes) in sums.iter_mut().zip(lanes) {
        for (sum, lanes) in sums.iter_mut().zip(lanes) {
            *sum = lanes.total();
        }
    }
    sums
}

/// The smallest value and the largest one, or 0 where that is beyond them.
#[inline(always)]
fn range<L: Lanes>(values: &[f32]) -> (f32, f32) {
    range_beyond::<L>(values, (0.0, 0.0))
}

/// The smallest value and the largest one, or these where they are beyond them.
#[inline(always)]
fn range_beyond<L: Lanes>(values: &[f32], (mut least, mut most): (f32, f32)) -> (f32, f32) {
    let (mut low, mut high) = (L::splat(least), L::splat(most));
    let (chunks, rest) = values.as_chunks::<8>();
    for chunk in chunks {
        (low, high) = (L::of(chunk).min(low), L::of(chunk).max(high));
    }
    let (mut low, mut high) = (low.array(), high.array());
    for half in [4, 2, 1] {
        for i in 0..half {
            low[i] = if low[i + half] < low[i] { low[i + half] } else { low[i] };
            high[i] = if high[i + half] > high[i] { high[i + half] } else { high[i] };
        }
    }
    (least, most) = (low[0], high[0]);
    for &v in rest {
        least = if v < least { v } else { least };
        most = if v > most { v } else { most };
    }
    (least, most)
}

/// `v * q` and `q * q` of the integers `q` nearest to `v * inverse`, within bounds.
struct Fit<L> {
    inverse: [L; TRIED],
    low: [L; TRIED],
    high: [L; TRIED],
}

impl<L: Lanes> Fit<L> {
    #[inline(always)]
    fn new(inverse: [f32; TRIED], low: [f32; TRIED], high: [f32; TRIED]) -> Self {
        Fit { inverse: splat(inverse), low: splat(low), high: splat(high) }
    }
}

impl<L: Lanes> Terms<L, 2> for Fit<L> {
    #[inline(always)]
    fn of(&self, t: usize, v: L, weight: L) -> [L; 2] {
        let q = nearest_lanes(v.times(self.inverse[t])).max(self.low[t]).min(self.high[t]);
        let wq = weight.times(q);
        [v.times(wq), q.times(wq)]
    }
}

/// Scale `s`, of either sign, for `v = s * q`, with codes `q` in `-half..half`; 0 for a group of zeros.
///
/// The largest value takes the code of largest magnitude, `-half`: the scale has the opposite sign of that value.
#[inline(always)]
pub(super) fn symmetric_scale<W: Weights>(values: &[f32], weights: W, half: u8) -> f32 {
    let (low, high) = (-(half as f32), half as f32 - 1.0);
    let (smallest, largest) = range::<W::Lanes>(values);
    let unit = 1.0 / if largest > -smallest { largest } else { smallest };
    let (mut best, mut best_gain) = (0.0, 0.0);
    // The code that the largest value is sent to, in steps of a quarter from three quarters below the edge on: beyond it, it is
    // clipped. The further a long row's largest value stands out, the more clipping pays: go on as long as it does.
    for pass in 0..64 {
        let mut inverse = [0.0; TRIED];
        for (t, inverse) in inverse.iter_mut().enumerate() {
            *inverse = (low + 0.75 - (pass * TRIED + t) as f32 * 0.25) * unit;
        }
        if !inverse[TRIED - 1].is_normal() {
            break;
        }
        let mut better = None;
        let tried: [[f32; 2]; TRIED] = sums(values, weights, Fit::new(inverse, [low; TRIED], [high; TRIED]));
        for (t, [vq, qq]) in tried.into_iter().enumerate() {
            // The squared error is sum(v * v) - vq * vq / qq.
            if vq * vq > best_gain * qq {
                (best, best_gain, better) = (vq / qq, vq * vq / qq, Some(t));
            }
        }
        // What is best in the middle of a pass is best.
        if pass > 0 && better < Some(TRIED / 2) {
            break;
        }
    }
    best
}

/// Scale `s > 0` and zero point `z` in `0..=top` for `v = s * (q - z)`, with codes `q` in `0..=top`; of values too small for numbers,
/// the scale is 0.
#[inline(always)]
pub(super) fn scale_and_zero<W: Weights>(values: &[f32], weights: W, top: u8) -> (f32, f32) {
    let top = top as f32;
    let (low, high) = range::<W::Lanes>(values);
    let unit = 1.0 / (high - low);
    let (mut best, mut best_gain) = ((0.0, nearest(top * 0.5)), 0.0);
    // Steps that the values span, from less than there are on: more are clipped at one end or both. With each, the two zero points
    // beside the one that leaves as much at both ends.
    for pass in 0..64 {
        let (mut inverse, mut least, mut most) = ([0.0; TRIED], [0.0; TRIED], [0.0; TRIED]);
        for t in 0..TRIED {
            inverse[t] = (top - 1.5 + (pass * (TRIED / 2) + t / 2) as f32 * 0.5) * unit;
            let middle = top * 0.5 - (high + low) * 0.5 * inverse[t];
            let zero = (nearest(middle - 0.5) + (t % 2) as f32).clamp(0.0, top);
            (least[t], most[t]) = (-zero, top - zero);
        }
        if !inverse[TRIED - 1].is_normal() {
            break;
        }
        let mut better = false;
        let tried: [[f32; 2]; TRIED] = sums(values, weights, Fit::new(inverse, least, most));
        for (least, [vq, qq]) in least.into_iter().zip(tried) {
            if vq > 0.0 && vq * vq > best_gain * qq {
                (best, best_gain, better) = ((vq / qq, -least), vq * vq / qq, true);
            }
        }
        if pass > 2 && !better {
            break;
        }
    }
    best
}

/// Of values as they are: their weight, they, and their squares.
struct Moments;

impl<L: Lanes> Terms<L, 3> for Moments {
    #[inline(always)]
    fn of(&self, _: usize, v: L, weight: L) -> [L; 3] {
        let wv = weight.times(v);
        [weight, wv, wv.times(v)]
    }
}

/// `q`, `q * q` and `v * q` of the integers `q` in `0..=top` nearest to `(v - low) * inverse`.
struct FitAbove<L> {
    inverse: [L; TRIED],
    low: L,
    zero: L,
    top: L,
}

impl<L: Lanes> Terms<L, 3> for FitAbove<L> {
    #[inline(always)]
    fn of(&self, t: usize, v: L, weight: L) -> [L; 3] {
        let q = nearest_lanes(v.minus(self.low).times(self.inverse[t])).max(self.zero).min(self.top);
        let wq = weight.times(q);
        [wq, q.times(wq), v.times(wq)]
    }
}

/// Scale `s >= 0` and minimum `m` for `v = s * q - m`, with codes `q` in `0..=top`; `m >= 0` unless it is `signed`.
#[inline(always)]
pub(super) fn scale_and_minimum<W: Weights, const N: usize>(
    values: &[f32; N],
    weights: W,
    top: u8,
    signed: bool,
) -> (f32, f32) {
    let top = top as f32;
    let (least, most) = if signed { (f32::INFINITY, f32::NEG_INFINITY) } else { (0.0, 0.0) };
    let (low, high) = range_beyond::<W::Lanes>(values, (least, most));
    let [[count, v1, vv]] = sums::<W, 1, 3>(values, weights, Moments);
    let unit = 1.0 / (high - low);
    let (mut best, mut best_error) = ((0.0, -low), f32::INFINITY);
    for pass in 0..4 {
        let mut inverse = [0.0; TRIED];
        for (t, inverse) in inverse.iter_mut().enumerate() {
            *inverse = (top - 0.9 + (pass * TRIED + t) as f32 * 0.15) * unit;
        }
        if !inverse[TRIED - 1].is_normal() {
            break;
        }
        let [low, zero, top] = splat([low, 0.0, top]);
        let fit = FitAbove { inverse: splat(inverse), low, zero, top };
        let tried: [[f32; 3]; TRIED] = sums(values, weights, fit);
        for [q1, qq, vq] in tried {
            let spread = count * qq - q1 * q1;
            let (mut scale, mut offset) = ((count * vq - v1 * q1) / spread, (qq * v1 - q1 * vq) / spread);
            // Equal codes do not determine both, and most minima cannot be negative.
            if spread <= 0.0 || offset > 0.0 && !signed {
                (scale, offset) = (vq / qq, 0.0);
            }
            let error = vv - 2.0 * (scale * vq + offset * v1)
                + scale * scale * qq
                + 2.0 * scale * offset * q1
                + count * offset * offset;
            if scale > 0.0 && error < best_error {
                (best, best_error) = ((scale, -offset), error);
            }
        }
    }
    best
}

/// The square of what is left of a value with the nearest code, and each of some minima.
struct ErrorAbove<L, const T: usize> {
    inverse: L,
    scale: L,
    zero: L,
    top: L,
    minima: [L; T],
}

impl<L: Lanes, const T: usize> Terms<L, 1> for ErrorAbove<L, T> {
    #[inline(always)]
    fn of(&self, t: usize, v: L, weight: L) -> [L; 1] {
        let minimum = self.minima[t];
        let q = nearest_lanes(v.plus(minimum).times(self.inverse)).max(self.zero).min(self.top);
        let diff = self.scale.times(q).minus(minimum).minus(v);
        [weight.times(diff).times(diff)]
    }
}

/// Squared error of `v = s * q - m` with the nearest codes in `0..=top`, for each of some minima.
#[inline(always)]
pub(super) fn errors_with_minima<W: Weights, const N: usize, const T: usize>(
    values: &[f32; N],
    weights: W,
    scale: f32,
    minima: [f32; T],
    top: u8,
) -> [f32; T] {
    let [inverse, scale, zero, top] = splat([reciprocal(scale), scale, 0.0, top as f32]);
    let error = ErrorAbove { inverse, scale, zero, top, minima: splat(minima) };
    let errors: [[f32; 1]; T] = sums(values, weights, error);
    let mut flat = [0.0; T];
    for (flat, [error]) in flat.iter_mut().zip(errors) {
        *flat = error;
    }
    flat
}

/// What a group's values are divided by their scale into.
pub(super) trait Grid: Copy {
    /// The numbers nearest to some.
    fn nearest<L: Lanes>(self, x: L) -> L;

    /// The scale, of either sign, that leaves the smallest error; 0 for a group of zeros.
    fn scale<W: Weights>(self, values: &[f32], weights: W) -> f32;

    /// Squared error with a scale.
    #[inline(always)]
    fn error<W: Weights>(self, values: &[f32], weights: W, scale: f32) -> f32 {
        let [inverse, scale] = splat([reciprocal(scale), scale]);
        let [[error]] = sums::<W, 1, 1>(values, weights, GridError { grid: self, inverse, scale });
        error
    }
}

/// The square of what is left of a value with the nearest number of a grid.
struct GridError<G, L> {
    grid: G,
    inverse: L,
    scale: L,
}

impl<G: Grid, L: Lanes> Terms<L, 1> for GridError<G, L> {
    #[inline(always)]
    fn of(&self, _: usize, v: L, weight: L) -> [L; 1] {
        let diff = self.scale.times(self.grid.nearest(v.times(self.inverse))).minus(v);
        [weight.times(diff).times(diff)]
    }
}

/// `v * q` and `q * q` of the numbers `q` of a grid nearest to `v * inverse`.
struct GridFit<G, L> {
    grid: G,
    inverse: L,
}

impl<G: Grid, L: Lanes> Terms<L, 2> for GridFit<G, L> {
    #[inline(always)]
    fn of(&self, _: usize, v: L, weight: L) -> [L; 2] {
        let q = self.grid.nearest(v.times(self.inverse));
        let wq = weight.times(q);
        [v.times(wq), q.times(wq)]
    }
}

/// Integers in `-half..half`.
#[derive(Clone, Copy)]
pub(super) struct Integers(pub u8);

impl Grid for Integers {
    #[inline(always)]
    fn nearest<L: Lanes>(self, x: L) -> L {
        let half = self.0 as f32;
        nearest_lanes(x).max(L::splat(-half)).min(L::splat(half - 1.0))
    }

    #[inline(always)]
    fn scale<W: Weights>(self, values: &[f32], weights: W) -> f32 {
        symmetric_scale(values, weights, self.0)
    }
}

/// A rising table.
#[derive(Clone, Copy)]
pub(super) struct Table(pub &'static [i8; 16]);

impl Table {
    /// Codes of values.
    #[inline(always)]
    pub(super) fn codes<L: Lanes>(self, values: &[f32; 32], scale: f32) -> [u8; 32] {
        let mut codes = [0; 32];
        store_codes(values, &mut codes, Entry { table: self, inverse: L::splat(reciprocal(scale)) });
        codes
    }
}

/// The number of the nearest entry of a table.
struct Entry<L> {
    table: Table,
    inverse: L,
}

impl<L: Lanes> Round<L> for Entry<L> {
    #[inline(always)]
    fn round(&self, v: L) -> L {
        let (x, mut entry) = (v.times(self.inverse), L::splat(0.0));
        for pair in self.table.0.windows(2) {
            entry = entry.plus(x.above(L::splat(middle(pair)), L::splat(1.0)));
        }
        entry
    }
}

/// Between two entries of a table.
#[inline(always)]
fn middle(pair: &[i8]) -> f32 {
    (pair[0] as f32 + pair[1] as f32) * 0.5
}

impl Grid for Table {
    #[inline(always)]
    fn nearest<L: Lanes>(self, x: L) -> L {
        let mut entry = L::splat(self.0[0] as f32);
        for pair in self.0.windows(2) {
            entry = entry.plus(x.above(L::splat(middle(pair)), L::splat(pair[1] as f32 - pair[0] as f32)));
        }
        entry
    }

    #[inline(always)]
    fn scale<W: Weights>(self, values: &[f32], weights: W) -> f32 {
        let (smallest, largest) = range::<W::Lanes>(values);
        let extreme = if largest > -smallest { largest } else { smallest };
        let (mut best, mut best_gain) = (0.0, 0.0);
        for edge in [self.0[0] as f32, self.0[15] as f32] {
            // The number that the largest value is sent to: from a tenth below the edge to a fifth beyond it, where it is clipped.
            for step in -5..=10 {
                let inverse = edge * (1.0 + step as f32 * 0.02) / extreme;
                if !inverse.is_normal() {
                    break;
                }
                let fit = GridFit { grid: self, inverse: W::Lanes::splat(inverse) };
                let [[vq, qq]] = sums::<W, 1, 2>(values, weights, fit);
                if vq * vq > best_gain * qq {
                    (best, best_gain) = (vq / qq, vq * vq / qq);
                }
            }
        }
        best
    }
}

/// `1 / scale`, and 0 for scales that are zero or too small to divide by: their codes are then zero.
#[inline(always)]
pub(super) fn reciprocal(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}
