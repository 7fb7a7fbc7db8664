//! Encoders of IQ1, IQ2 and IQ3 blocks: scales, and the points of grids that are nearest.
//!
//! Every point is looked at for every 4 or 8 columns and scale that is tried, thousands of multiplications per weight: hundreds of
//! times the work of other formats.

use std::sync::LazyLock;

use super::rows::amax;
use super::search::{nearest, reciprocal};
use crate::format::ggml::*;

/// A grid in the order of a search: eight points side by side, as many as there are coordinates in each column's array.
struct Grid<const COLS: usize> {
    points: &'static [[i8; COLS]],
    factor: f32,
    /// Coordinates times the factor, and half the square of their length.
    eights: Vec<([[f32; 8]; COLS], [f32; 8])>,
    /// Magnitudes of coordinates, rising, and their root mean square; all with the factor.
    sizes: Vec<f32>,
    mean: f32,
}

impl<const COLS: usize> Grid<COLS> {
    fn new(points: &'static [[i8; COLS]], factor: f32) -> Self {
        let eights = points.as_chunks::<8>().0.iter().map(|eight| {
            let columns: [[f32; 8]; COLS] = std::array::from_fn(|c| eight.map(|p| p[c] as f32 * factor));
            (columns, std::array::from_fn(|i| columns.iter().map(|column| column[i] * column[i]).sum::<f32>() / 2.0))
        });
        let mut sizes: Vec<f32> = points.as_flattened().iter().map(|&v| (v as f32 * factor).abs()).collect();
        let mean = (sizes.iter().map(|v| v * v).sum::<f32>() / sizes.len() as f32).sqrt();
        sizes.sort_unstable_by(f32::total_cmp);
        sizes.dedup();
        Grid { points, factor, eights: eights.collect(), sizes, mean }
    }

    /// The number of the point nearest to `x`, and `x * p - p * p / 2` with it: half of what it takes off the square of `x`.
    fn nearest(&self, x: &[f32; COLS]) -> (usize, f32) {
        let (mut best, mut best_gain) = ([0; 8], [f32::NEG_INFINITY; 8]);
        for (at, (columns, half)) in self.eights.iter().enumerate() {
            let mut gain = half.map(|h| -h);
            for (column, &x) in columns.iter().zip(x) {
                for (gain, c) in gain.iter_mut().zip(column) {
                    *gain += c * x;
                }
            }
            for i in 0..8 {
                let better = gain[i] > best_gain[i];
                best_gain[i] = if better { gain[i] } else { best_gain[i] };
                best[i] = if better { at as u32 } else { best[i] };
            }
        }
        let lane = (1..8).fold(0, |best, i| if best_gain[i] > best_gain[best] { i } else { best });
        (best[lane] as usize * 8 + lane, best_gain[lane])
    }
}

static IQ2_XXS: LazyLock<Grid<8>> = LazyLock::new(|| Grid::new(&IQ2_XXS_GRID, 1.0));
static IQ2_XS: LazyLock<Grid<8>> = LazyLock::new(|| Grid::new(&IQ2_XS_GRID, 1.0));
static IQ2_S: LazyLock<Grid<8>> = LazyLock::new(|| Grid::new(&IQ2_S_GRID, 1.0));
static IQ3_XXS: LazyLock<Grid<4>> = LazyLock::new(|| Grid::new(&IQ3_XXS_GRID, 1.0));
static IQ3_S: LazyLock<Grid<4>> = LazyLock::new(|| Grid::new(&IQ3_S_GRID, 1.0));
static IQ1: LazyLock<Grid<8>> = LazyLock::new(|| Grid::new(&IQ1_GRID, 8.0));

/// What a group of up to 32 columns becomes.
#[derive(Clone, Copy)]
struct Pick {
    codes: [f32; 32],
    /// Numbers of its points.
    points: [usize; 8],
    /// A bit for each negated column.
    signs: u32,
    /// A bit per eight columns, set where IQ1 takes one off.
    less: u8,
}

const NOTHING: Pick = Pick { codes: [0.0; 32], points: [0; 8], signs: 0, less: 0 };

/// Nearest points and signs, of which among eight an `even` number is set where the format has it so.
fn pick_signed<const COLS: usize>(grid: &Grid<COLS>, even: bool, values: &[f32], inverse: f32) -> Pick {
    let mut pick = NOTHING;
    for (i, values) in values.as_chunks::<8>().0.iter().enumerate() {
        let mut signs = values.iter().enumerate().fold(0u32, |signs, (c, &v)| signs | u32::from(v < 0.0) << c);
        if even && signs.count_ones() % 2 == 1 {
            // The smallest one loses least.
            let smallest = (1..8).fold(0, |s, c| if values[c].abs() < values[s].abs() { c } else { s });
            signs ^= 1 << smallest;
        }
        let sign = |c: usize| if signs >> c & 1 == 0 { 1.0 } else { -1.0 };
        let x: [f32; 8] = std::array::from_fn(|c| values[c] * inverse * sign(c));
        for (part, x) in x.as_chunks::<COLS>().0.iter().enumerate() {
            let (number, _) = grid.nearest(x);
            pick.points[i * (8 / COLS) + part] = number;
            for (c, &v) in grid.points[number].iter().enumerate() {
                let c = part * COLS + c;
                pick.codes[8 * i + c] = v as f32 * sign(c);
            }
        }
        pick.signs |= signs << (8 * i);
    }
    pick
}

/// Nearest points of IQ1, one more or less for every `span` columns.
fn pick_shifted(span: usize, values: &[f32], inverse: f32) -> Pick {
    let grid = &*IQ1;
    let mut pick = NOTHING;
    for (at, values) in values.chunks_exact(span).enumerate() {
        let mut best_error = f32::INFINITY;
        for less in [false, true] {
            let shift = if less { -1.0 } else { 1.0 };
            let (mut error, mut points) = (0.0, [0; 4]);
            for (point, values) in points.iter_mut().zip(values.as_chunks::<8>().0) {
                let x = values.map(|v| v * inverse - shift);
                let (number, gain) = grid.nearest(&x);
                *point = number;
                error += x.iter().map(|x| x * x).sum::<f32>() - 2.0 * gain;
            }
            if error < best_error || !less {
                best_error = error;
                let first = at * span / 8;
                for (i, &number) in points[..span / 8].iter().enumerate() {
                    pick.points[first + i] = number;
                    let bit = 1 << (first + i);
                    pick.less = pick.less & !bit | if less { bit } else { 0 };
                    for (code, &p) in pick.codes[8 * (first + i)..].iter_mut().zip(&grid.points[number]) {
                        *code = p as f32 * grid.factor + shift;
                    }
                }
            }
        }
    }
    pick
}

/// The least-squares scale for codes, and what it takes off the squared error; zeros where none does.
fn scale_for(pairs: impl Iterator<Item = (f32, f32)>) -> (f32, f32) {
    let (vq, qq) = pairs.fold((0.0, 0.0), |(vq, qq), (v, q)| (vq + v * q, qq + q * q));
    if vq > 0.0 { (vq / qq, vq * (vq / qq)) } else { (0.0, 0.0) }
}

/// Scale that suits a group; 0 for a group of zeros. Of some scales that which is best if each column could have any magnitude that
/// coordinates have, then fitted to the points that it leads to.
fn fit<const COLS: usize>(grid: &Grid<COLS>, values: &[f32], pick: &impl Fn(&[f32], f32) -> Pick) -> f32 {
    let (least, most) = (grid.sizes.iter().find(|&&s| s > 0.0).unwrap_or(&1.0), amax(values));
    let size = (values.iter().map(|v| v * v).sum::<f32>() / values.len() as f32).sqrt() / grid.mean;
    let (mut best, mut best_gain) = (0.0, 0.0);
    // The first: where all are about as large, the smallest coordinates give the points that surely exist.
    for start in [most / least, size * 0.7, size * 0.8, size * 0.9, size, size * 1.1, size * 1.25] {
        let inverse = reciprocal(start);
        let codes = values.iter().map(|v| {
            let x = v.abs() * inverse;
            let above = grid.sizes.windows(2).filter(|pair| 2.0 * x > pair[0] + pair[1]).count();
            (v.abs(), grid.sizes[above])
        });
        let (scale, gain) = scale_for(codes);
        if gain > best_gain {
            (best, best_gain) = (scale, gain);
        }
    }
    scale_for(values.iter().copied().zip(pick(values, reciprocal(best)).codes)).0
}

/// A block's scale, and for each of `G` groups the scale (0..=top, which stands for the odd number after twice it) and what columns
/// become, where values are `d * unit * scale * code`.
fn block<const G: usize, const COLS: usize>(
    values: &[f32; K_COLS],
    grid: &Grid<COLS>,
    unit: f32,
    top: u8,
    pick: impl Fn(&[f32], f32) -> Pick,
) -> ([u8; 2], [(u8, Pick); G]) {
    let group = |g: usize| &values[g * (K_COLS / G)..][..K_COLS / G];
    let fits: [f32; G] = std::array::from_fn(|g| fit(grid, group(g), &pick));
    let d = half::f16::from_f32(fits.iter().fold(0.0, |a, &s| s.max(a)) / (unit * (2 * top + 1) as f32));
    let step = d.to_f32() * unit;
    let groups = std::array::from_fn(|g| {
        let near = nearest(((fits[g] * reciprocal(step) - 1.0) / 2.0).clamp(0.0, top as f32)) as i32;
        let (mut best, mut best_error) = ((0, NOTHING), f32::INFINITY);
        for scale in [near, near - 1, near + 1] {
            if !(0..=top as i32).contains(&scale) {
                continue;
            }
            let size = step * (2 * scale + 1) as f32;
            let pick = pick(group(g), reciprocal(size));
            let error = group(g).iter().zip(&pick.codes).map(|(v, q)| (v - size * q) * (v - size * q)).sum::<f32>();
            if error < best_error || best_error.is_infinite() {
                (best, best_error) = ((scale as u8, pick), error);
            }
        }
        best
    });
    (d.to_le_bytes(), groups)
}

/// Four times seven bits of signs, and the scale.
fn signs_and_scale(scale: u8, signs: u32) -> [u8; 4] {
    let bits = (0..4).fold(0, |bits, i| bits | (signs >> (8 * i) & 127) << (7 * i));
    (bits | (scale as u32) << 28).to_le_bytes()
}

/// Scales as nibbles, low ones first.
fn nibbles<const G: usize>(groups: &[(u8, Pick); G], out: &mut [u8]) {
    for (byte, pair) in out.iter_mut().zip(groups.as_chunks::<2>().0) {
        *byte = pair[0].0 | pair[1].0 << 4;
    }
}

pub(super) fn iq2_xxs(values: &[f32; K_COLS], out: &mut [u8; IQ2_XXS_BYTES]) {
    let grid = &*IQ2_XXS;
    let (d, groups) = block::<8, 8>(values, grid, 0.125, 15, |v, inverse| pick_signed(grid, true, v, inverse));
    out[..2].copy_from_slice(&d);
    for ((scale, pick), out) in groups.iter().zip(out[2..].as_chunks_mut::<8>().0) {
        out[..4].copy_from_slice(&[0, 1, 2, 3].map(|i: usize| pick.points[i] as u8));
        out[4..].copy_from_slice(&signs_and_scale(*scale, pick.signs));
    }
}

pub(super) fn iq2_xs(values: &[f32; K_COLS], out: &mut [u8; IQ2_XS_BYTES]) {
    let grid = &*IQ2_XS;
    let (d, groups) = block::<16, 8>(values, grid, 0.125, 15, |v, inverse| pick_signed(grid, true, v, inverse));
    out[..2].copy_from_slice(&d);
    for (i, out) in out[2..66].as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let (_, pick) = &groups[i / 2];
        let signs = pick.signs >> (8 * (i % 2)) & 127;
        *out = (pick.points[i % 2] as u16 | (signs as u16) << 9).to_le_bytes();
    }
    nibbles(&groups, &mut out[66..]);
}

pub(super) fn iq2_s(values: &[f32; K_COLS], out: &mut [u8; IQ2_S_BYTES]) {
    let grid = &*IQ2_S;
    let (d, groups) = block::<16, 8>(values, grid, 0.125, 15, |v, inverse| pick_signed(grid, false, v, inverse));
    out.fill(0);
    out[..2].copy_from_slice(&d);
    for i in 0..32 {
        let (_, pick) = &groups[i / 2];
        let number = pick.points[i % 2];
        out[2 + i] = number as u8;
        out[34 + i] = (pick.signs >> (8 * (i % 2))) as u8;
        out[66 + i / 4] |= ((number >> 8) as u8) << (2 * (i % 4));
    }
    nibbles(&groups, &mut out[74..]);
}

pub(super) fn iq3_xxs(values: &[f32; K_COLS], out: &mut [u8; IQ3_XXS_BYTES]) {
    let grid = &*IQ3_XXS;
    let (d, groups) = block::<8, 4>(values, grid, 0.25, 15, |v, inverse| pick_signed(grid, true, v, inverse));
    out[..2].copy_from_slice(&d);
    for (g, (scale, pick)) in groups.iter().enumerate() {
        out[2 + 8 * g..][..8].copy_from_slice(&pick.points.map(|number| number as u8));
        out[66 + 4 * g..][..4].copy_from_slice(&signs_and_scale(*scale, pick.signs));
    }
}

pub(super) fn iq3_s(values: &[f32; K_COLS], out: &mut [u8; IQ3_S_BYTES]) {
    let grid = &*IQ3_S;
    let (d, groups) = block::<8, 4>(values, grid, 1.0, 15, |v, inverse| pick_signed(grid, false, v, inverse));
    out[..2].copy_from_slice(&d);
    for (g, (_, pick)) in groups.iter().enumerate() {
        out[2 + 8 * g..][..8].copy_from_slice(&pick.points.map(|number| number as u8));
        out[66 + g] = (0..8).fold(0, |bits, i| bits | ((pick.points[i] >> 8) as u8) << i);
        out[74 + 4 * g..][..4].copy_from_slice(&pick.signs.to_le_bytes());
    }
    nibbles(&groups, &mut out[106..]);
}

pub(super) fn iq1_s(values: &[f32; K_COLS], out: &mut [u8; IQ1_S_BYTES]) {
    let (d, groups) = block::<8, 8>(values, &IQ1, 0.125, 7, |v, inverse| pick_shifted(32, v, inverse));
    out[..2].copy_from_slice(&d);
    for (g, (scale, pick)) in groups.iter().enumerate() {
        let mut word = (*scale as u16) << 12 | ((pick.less & 1) as u16) << 15;
        for i in 0..4 {
            out[2 + 4 * g + i] = pick.points[i] as u8;
            word |= ((pick.points[i] >> 8) as u16) << (3 * i);
        }
        out[34 + 2 * g..][..2].copy_from_slice(&word.to_le_bytes());
    }
}

pub(super) fn iq1_m(values: &[f32; K_COLS], out: &mut [u8; IQ1_M_BYTES]) {
    let (d, groups) = block::<16, 8>(values, &IQ1, 0.125, 7, |v, inverse| pick_shifted(8, v, inverse));
    out.fill(0);
    for i in 0..32 {
        let (_, pick) = &groups[i / 2];
        let number = pick.points[i % 2];
        out[i] = number as u8;
        out[32 + i / 2] |= ((number >> 8) as u8 | (pick.less >> (i % 2) & 1) << 3) << (4 * (i % 2));
    }
    for (word, groups) in out[48..].as_chunks_mut::<2>().0.iter_mut().zip(groups.as_chunks::<4>().0) {
        *word = (0..4).fold(0, |word, g| word | (groups[g].0 as u16) << (3 * g)).to_le_bytes();
    }
    iq1_m_pack_scale(d, out);
}
