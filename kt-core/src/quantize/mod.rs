//! Encoding of F32 rows into every weight format, and what it costs in accuracy.
//!
//! Encoders work on bands of rows in parallel and give the same bytes for any number of threads. Scales of integer formats
//! are searched so that the squared error of the decoded values is smallest, with the columns' importance if it is given. Separate scales
//! are F32 where they are per row or tile, BF16 where they are per group, powers of two in MX formats.
//!
//! [`Requantized`] is a source whose experts are re-encoded as they are read.

mod blocks;
mod grids;
mod repack;
mod rows;
mod search;
mod source;
mod tier;

use std::ops::Range;

use bytes::Bytes;
use rayon::prelude::*;

use crate::format::{Format, Global, Group, Matrix, ScaleType, fp8};
use rows::Band;

pub use source::Requantized;
pub(crate) use tier::difference;

/// Encodes `values: [rows, cols]`, row-major.
///
/// # Errors
/// A shape that the format cannot have, `values` of another length, or a value that the format cannot hold: NaN and
/// infinities except in F32, F16 and BF16, and numbers beyond the format's range or, except in F32 and BF16, of 2^60 and more. The message gives row
/// and column.
pub fn encode(format: Format, rows: usize, cols: usize, values: &[f32]) -> Result<Matrix, String> {
    encode_weighted(format, rows, cols, values, None)
}

/// As [`encode`], but the squared errors of a column count as much as its `importance: [cols]` says: the mean square of the
/// inputs that it is multiplied with, say. Formats whose scales are searched heed it: integers of 4 bits, asymmetric ones of 8, and
/// GGUF's `Q*_0` but Q8_0, `Q*_1`, `Q*_K` and `IQ4_*`.
///
/// # Errors
/// As [`encode`], and an importance of another length, or with numbers that are negative or not finite.
pub fn encode_weighted(
    format: Format,
    rows: usize,
    cols: usize,
    values: &[f32],
    importance: Option<&[f32]>,
) -> Result<Matrix, String> {
    if rows.checked_mul(cols) != Some(values.len()) {
        return Err(format!("[{rows}, {cols}] was given {} values", values.len()));
    }
    encode_bands(format, rows, cols, importance, |range, out| {
        out.copy_from_slice(&values[range.start * cols..range.end * cols]);
    })
}

/// Encodes a matrix again in another format, with little memory beyond the result. The same format gives the same matrix.
///
/// # Errors
/// As [`encode`].
pub fn recode(matrix: &Matrix, format: Format) -> Result<Matrix, String> {
    recode_weighted(matrix, format, None)
}

/// [`recode`] with errors weighted as in [`encode_weighted`].
///
/// # Errors
/// As [`encode_weighted`].
pub fn recode_weighted(matrix: &Matrix, format: Format, importance: Option<&[f32]>) -> Result<Matrix, String> {
    if matrix.format() == format {
        return Ok(matrix.clone());
    }
    if let Some(moved) = repack::mxfp4(matrix, format) {
        return Ok(moved);
    }
    let cols = matrix.cols();
    encode_bands(format, matrix.rows(), cols, importance, |range, out| {
        for (row, out) in range.zip(out.chunks_exact_mut(cols.max(1))) {
            matrix.decode_row(row, out);
        }
    })
}

/// The importance of columns as encoders take it: with a mean of 1, and never so little that a group has none. `None` where all
/// columns are alike.
fn weights(importance: Option<&[f32]>, cols: usize) -> Result<Option<Vec<f32>>, String> {
    let Some(importance) = importance else { return Ok(None) };
    if importance.len() != cols {
        return Err(format!("{cols} columns have the importance of {}", importance.len()));
    }
    if let Some((i, v)) = importance.iter().enumerate().find(|(_, v)| !v.is_finite() || **v < 0.0) {
        return Err(format!("the importance of column {i} is {v}"));
    }
    let mean = importance.iter().map(|&v| v as f64).sum::<f64>() / cols.max(1) as f64;
    let weigh = |v: &f32| ((*v as f64 / mean) as f32).clamp(1e-4, 1e6);
    Ok((mean > 0.0).then(|| importance.iter().map(weigh).collect()))
}

/// How far decoded values are from their originals, in proportion.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Errors {
    /// Mean |difference| over mean |reference|.
    pub mean_abs_ratio: f64,
    /// Root mean square of the difference over that of the reference.
    pub rms_ratio: f64,
}

/// Compares values with their reference. Slices of different lengths have NaN errors; a reference of zeros has errors of 0
/// where all values are zero too, and infinite ones otherwise.
pub fn relative_error(reference: &[f32], got: &[f32]) -> Errors {
    if reference.len() != got.len() {
        return Errors { mean_abs_ratio: f64::NAN, rms_ratio: f64::NAN };
    }
    let (mut abs, mut abs_diff, mut square, mut square_diff) = (0.0, 0.0, 0.0, 0.0);
    for (&r, &g) in reference.iter().zip(got) {
        let (r, diff) = (r as f64, g as f64 - r as f64);
        abs += r.abs();
        square += r * r;
        abs_diff += diff.abs();
        square_diff += diff * diff;
    }
    let ratio = |diff: f64, of: f64| if diff == 0.0 { 0.0 } else { diff / of };
    Errors { mean_abs_ratio: ratio(abs_diff, abs), rms_ratio: ratio(square_diff, square).sqrt() }
}

/// Type of the separate scales that encoding to a format writes.
pub(crate) fn scale_type(format: Format) -> ScaleType {
    match format {
        _ if matches!(format.group(), Some(Group::Of(_))) => ScaleType::Bf16,
        Format::Mxfp4 | Format::Mxfp8 => ScaleType::E8m0,
        Format::Nvfp4 => ScaleType::E4m3,
        _ => ScaleType::F32,
    }
}

/// Rows per task: all that share scales of tiles, or enough to make handing out tasks cheap.
fn band_rows(format: Format) -> usize {
    if format == Format::Fp8Block { fp8::TILE } else { 16 }
}

/// Encodes band by band; `read` fills `[range, cols]` values.
fn encode_bands(
    format: Format,
    rows: usize,
    cols: usize,
    importance: Option<&[f32]>,
    read: impl Fn(Range<usize>, &mut [f32]) + Sync,
) -> Result<Matrix, String> {
    let weights = weights(importance, cols)?;
    let overflow = || format!("[{rows}, {cols}] overflows");
    let row_bytes = format.row_bytes(cols)?;
    let kind = scale_type(format);
    let (scale_rows, scale_cols) = format.scale_shape(rows, cols).unwrap_or((0, 0));
    let mut codes = vec![0u8; rows.checked_mul(row_bytes).ok_or_else(overflow)?];
    let zero_cols = if format.takes_zero_points() { scale_cols } else { 0 };
    let mut zeros = vec![0i16; scale_rows * zero_cols];
    let mut scales = vec![0u8; scale_rows * scale_cols * kind.bytes()];

    let band = band_rows(format);
    let band_scale_bytes = scales.len() / scale_rows.max(1) * if format == Format::Fp8Block { 1 } else { band };
    let mut bands = Vec::with_capacity(rows.div_ceil(band));
    let (mut codes_left, mut scales_left, mut zeros_left) = (&mut codes[..], &mut scales[..], &mut zeros[..]);
    for first in (0..rows).step_by(band) {
        let range = first..rows.min(first + band);
        let codes = codes_left.split_off_mut(..range.len() * row_bytes).ok_or_else(overflow)?;
        let scales = scales_left.split_off_mut(..band_scale_bytes.min(scales_left.len())).ok_or_else(overflow)?;
        let zeros = zeros_left.split_off_mut(..range.len() * zero_cols).ok_or_else(overflow)?;
        bands.push((range, codes, scales, zeros));
    }
    // NVFP4's factor makes the largest value that of the largest code and scale; ordered formats sort columns by their largest values.
    let largest = if format == Format::Nvfp4 || format.is_ordered() {
        let bands = bands.par_iter().map_init(Vec::new, |values, (range, ..)| {
            values.resize(range.len() * cols, 0.0);
            read(range.clone(), values);
            rows::column_amax(values, cols)
        });
        let max = |a: Vec<f32>, b: Vec<f32>| a.iter().zip(&b).map(|(a, b)| a.max(*b)).collect();
        bands.reduce(|| vec![0.0; cols], max)
    } else {
        Vec::new()
    };
    let global = if format == Format::Nvfp4 { rows::divisor(rows::amax(&largest), 448.0 * 6.0) } else { 1.0 };
    let order = format.group().filter(|_| format.is_ordered()).map(|group| Order::new(&largest, group.cols(cols)));
    bands.into_par_iter().try_for_each_init(Vec::new, |values, (range, codes, scales, zeros)| {
        let first = range.start;
        values.resize(range.len() * cols, 0.0);
        read(range, values);
        if let Some(i) = rows::unfit(format, values) {
            return Err(format!(
                "{format} cannot be made of value [{}, {}], {}",
                first + i / cols,
                i % cols,
                values[i]
            ));
        }
        match &order {
            None => tier::encode(Band { format, cols, values, codes, scales, zeros, global }, weights.as_deref()),
            Some(order) => {
                order.encode(Band { format, cols, values, codes, scales, zeros, global }, weights.as_deref())
            }
        }
        Ok(())
    })?;

    let scales = format.scale_shape(rows, cols).map(|_| (Bytes::from(scales), kind));
    let mut matrix =
        Matrix::new(format, rows, cols, Bytes::from(codes), scales)?.with_global_scale(Global::Times(global));
    if format.takes_zero_points() {
        matrix = matrix.with_zero_points(zeros)?;
    }
    if let Some(order) = order {
        matrix = matrix.with_column_groups(order.column_groups)?;
    }
    matrix.check_scales().map_err(|e| format!("values are too large for {format}: {e}"))?;
    Ok(matrix)
}

/// Which columns share a group in an ordered format: those of about the same size.
struct Order {
    /// Column that comes first, second, …: those of a group follow each other.
    columns: Vec<usize>,
    column_groups: Vec<u32>,
}

impl Order {
    /// `largest` holds the largest magnitude of each column.
    fn new(largest: &[f32], group: usize) -> Order {
        let mut columns: Vec<usize> = (0..largest.len()).collect();
        columns.sort_by(|&a, &b| largest[b].total_cmp(&largest[a]));
        let mut column_groups = vec![0; largest.len()];
        for (i, &column) in columns.iter().enumerate() {
            column_groups[column] = (i / group.max(1)) as u32;
        }
        Order { columns, column_groups }
    }

    /// Encodes a band as if its columns were in this order, and puts their codes back.
    fn encode(&self, band: Band<'_>, weights: Option<&[f32]>) {
        let Band { cols, values, codes, .. } = band;
        let in_order = |row: &[f32]| self.columns.iter().map(|&c| row[c]).collect::<Vec<f32>>();
        let sorted: Vec<f32> = values.chunks_exact(cols.max(1)).flat_map(in_order).collect();
        let mut sorted_codes = vec![0; codes.len()];
        let weights = weights.map(in_order);
        tier::encode(Band { values: &sorted, codes: &mut sorted_codes, ..band }, weights.as_deref());
        let row_bytes = (codes.len() * cols / values.len().max(1)).max(1);
        for (codes, sorted) in codes.chunks_exact_mut(row_bytes).zip(sorted_codes.chunks_exact(row_bytes)) {
            for (i, &column) in self.columns.iter().enumerate() {
                match row_bytes == cols {
                    true => codes[column] = sorted[i],
                    false => codes[column / 2] |= (sorted[i / 2] >> (i % 2 * 4) & 15) << (column % 2 * 4),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
