//! Searches for the scale, or the scale and minimum, of a group of values that leave the smallest squared error.
//!
//! For given codes the best scale is a least-squares fit; for a given scale the best codes are the nearest ones. So a few
//! scales around the one that spans the largest value are tried, each with its nearest codes and the fit to them. Clipping
//! the largest values often pays, because all others then have finer steps.

/// Rounds to the nearest integer, ties to even, for |x| < 2^22: in two additions, which vectorize on any machine. Larger
/// numbers stay about as large.
#[inline(always)]
pub(super) fn nearest(x: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0;
    (x + SHIFT) - SHIFT
}

/// Sums over a group of what `term` gives for a value, in 8 lanes so that they vectorize.
#[inline(always)]
fn sums<const N: usize>(values: &[f32], term: impl Fn(f32) -> [f32; N]) -> [f32; N] {
    let mut lanes = [[0f32; 8]; N];
    let (chunks, rest) = values.as_chunks::<8>();
    for chunk in chunks {
        for (i, &v) in chunk.iter().enumerate() {
            let t = term(v);
            for n in 0..N {
                lanes[n][i] += t[n];
            }
        }
    }
    for (i, &v) in rest.iter().enumerate() {
        let t = term(v);
        for n in 0..N {
            lanes[n][i] += t[n];
        }
    }
    lanes.map(|l| ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7])))
}

/// Scale `s` for `v = s * q`, with codes `q` in `-half..half`; 0 for a group of zeros.
///
/// The largest value takes the code of largest magnitude, `-half`, where the scale may be negative (`signed`).
pub(super) fn symmetric_scale(values: &[f32], half: u8, signed: bool) -> f32 {
    let (low, high) = (-(half as f32), half as f32 - 1.0);
    let extreme = values.iter().fold(0f32, |a, &v| if v.abs() > a.abs() { v } else { a });
    let edge = if signed || extreme < 0.0 { low } else { high };
    let (mut best, mut best_gain, mut best_step) = (0.0, 0.0, 0);
    // The code that the largest value is sent to, in steps of an eighth: beyond the edge it is clipped. The further a long row's
    // largest value stands out, the more clipping pays: go on as long as it does.
    for step in -6..200 {
        let inverse = (edge + step as f32 * 0.125 * edge.signum()) / extreme;
        if !inverse.is_normal() || step > best_step + 6 {
            break;
        }
        let [vq, qq] = sums(values, |v| {
            let q = nearest(v * inverse).clamp(low, high);
            [v * q, q * q]
        });
        // The squared error is sum(v * v) - vq * vq / qq.
        if vq * vq > best_gain * qq {
            (best, best_gain, best_step) = (vq / qq, vq * vq / qq, step);
        }
    }
    best
}

/// Scale `s >= 0` and minimum `m` for `v = s * q - m`, with codes `q` in `0..=top`; `m >= 0` unless it is `signed`.
pub(super) fn scale_and_minimum<const N: usize>(values: &[f32; N], top: u8, signed: bool) -> (f32, f32) {
    let top = top as f32;
    let low = values.iter().fold(if signed { f32::INFINITY } else { 0.0 }, |a, &v| if v < a { v } else { a });
    let high = values.iter().fold(low, |a, &v| if v > a { v } else { a });
    let count = values.len() as f32;
    let [v1, vv] = sums(values, |v| [v, v * v]);
    let (mut best, mut best_error) = ((0.0, -low), f32::INFINITY);
    for step in -6..=10 {
        let inverse = (top + step as f32 * 0.15) / (high - low);
        if !inverse.is_normal() {
            continue;
        }
        let [q1, qq, vq] = sums(values, |v| {
            let q = nearest((v - low) * inverse).clamp(0.0, top);
            [q, q * q, v * q]
        });
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
    best
}

/// Scale `s` and zero point `z` in `0..=top` for `v = s * (q - z)`, with codes `q` in `0..=top`. `stored` gives what a scale is stored as;
/// values too small for it have scale 1.
pub(super) fn scale_and_zero(values: &[f32], top: u8, stored: fn(f32) -> f32) -> (f32, f32) {
    let top = top as f32;
    let low = values.iter().fold(0f32, |a, &v| if v < a { v } else { a });
    let high = values.iter().fold(0f32, |a, &v| if v > a { v } else { a });
    let (mut best, mut best_error) = ((1.0, (top + 1.0) * 0.5), f32::INFINITY);
    // Steps that the values span, more than there are clipped at one end or both.
    for step in -4..=16 {
        let scale = stored((high - low) / (top + step as f32 * 0.25));
        let inverse = 1.0 / scale;
        if !scale.is_normal() || !inverse.is_normal() {
            continue;
        }
        let middle = nearest(top * 0.5 - (high + low) * 0.5 * inverse);
        for zero in [middle - 1.0, middle, middle + 1.0] {
            let zero = zero.clamp(0.0, top);
            let [error] = sums(values, |v| {
                let diff = scale * ((nearest(v * inverse) + zero).clamp(0.0, top) - zero) - v;
                [diff * diff]
            });
            if error < best_error {
                (best, best_error) = ((scale, zero), error);
            }
        }
    }
    best
}

/// Squared error of `v = s * q - m` with the nearest codes in `0..=top`.
pub(super) fn error_with_minimum<const N: usize>(values: &[f32; N], scale: f32, minimum: f32, top: u8) -> f32 {
    let (inverse, top) = (reciprocal(scale), top as f32);
    let [error] = sums(values, |v| {
        let diff = scale * nearest((v + minimum) * inverse).clamp(0.0, top) - minimum - v;
        [diff * diff]
    });
    error
}

/// Squared error of `v = s * q` with the nearest codes in `-half..half`.
pub(super) fn symmetric_error(values: &[f32], scale: f32, half: u8) -> f32 {
    let (inverse, low, high) = (reciprocal(scale), -(half as f32), half as f32 - 1.0);
    let [error] = sums(values, |v| {
        let diff = scale * nearest(v * inverse).clamp(low, high) - v;
        [diff * diff]
    });
    error
}

/// Index of the entry of a rising table that is nearest to a number.
#[inline(always)]
fn nearest_entry(table: &[i8; 16], x: f32) -> usize {
    (1..16).map(|i| usize::from(2.0 * x > table[i - 1] as f32 + table[i] as f32)).sum()
}

/// Codes of the entries of a rising table that are nearest to `v / scale`.
pub(super) fn table_codes(values: &[f32; 32], scale: f32, table: &[i8; 16]) -> [u8; 32] {
    let inverse = reciprocal(scale);
    values.map(|v| nearest_entry(table, v * inverse) as u8)
}

/// Squared error of `v = s * table[q]` with the nearest entries of a rising table.
pub(super) fn table_error(values: &[f32; 32], scale: f32, table: &[i8; 16]) -> f32 {
    let inverse = reciprocal(scale);
    let [error] = sums(values, |v| {
        let diff = scale * table[nearest_entry(table, v * inverse)] as f32 - v;
        [diff * diff]
    });
    error
}

/// Scale `s`, of either sign, for `v = s * table[q]` with a rising table; 0 for a group of zeros.
pub(super) fn table_scale(values: &[f32; 32], table: &[i8; 16]) -> f32 {
    let extreme = values.iter().fold(0f32, |a, &v| if v.abs() > a.abs() { v } else { a });
    let (mut best, mut best_gain) = (0.0, 0.0);
    for edge in [table[0] as f32, table[15] as f32] {
        // The number that the largest value is sent to: from a tenth below the edge to a fifth beyond it, where it is clipped.
        for step in -5..=10 {
            let inverse = edge * (1.0 + step as f32 * 0.02) / extreme;
            if !inverse.is_normal() {
                break;
            }
            let [vq, qq] = sums(values, |v| {
                let q = table[nearest_entry(table, v * inverse)] as f32;
                [v * q, q * q]
            });
            if vq * vq > best_gain * qq {
                (best, best_gain) = (vq / qq, vq * vq / qq);
            }
        }
    }
    best
}

/// `1 / scale`, and 0 for scales that are zero or too small to divide by: their codes are then zero.
#[inline(always)]
pub(super) fn reciprocal(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}
