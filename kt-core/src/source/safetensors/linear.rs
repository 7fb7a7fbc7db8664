//! One linear layer: which format it is in, told by the tensors that stand next to each other.
//!
//! ```text
//! X.weight BF16 F16 F32                                                       as is
//! X.weight F8_E4M3   X.weight_scale_inv, .weight_scale or .scale [N/128, K/128] FP8 blocks
//!                                               … [N, 1] or [N]               FP8 per channel
//!                                               … E8M0 [N, K/32]              MXFP8
//! X.weight I8 [N, K/2]   X.scale E8M0 [N, K/32]                               MXFP4
//! X.weight I8        X.weight_scale [N, 1], [N] or [N, K/g]                   INT8
//! X.weight_packed I32 [N, K/8]   X.weight_scale [N, K/g]   X.weight_shape     INT4
//!                     [N, K/4]                                                INT8 with offset 128
//!                                … and X.weight_zero_point I32 [N/8, K/g]       INT4, asymmetric
//! X.weight_packed U8 [N, K/2]    X.weight_scale E8M0 [N, K/32]                MXFP4
//!                        and X.weight_scale E4M3 [N, K/16], X.weight_global_scale F32 NVFP4, divided by it
//! X.weight U8 [N, K/2]       X.weight_scale E4M3 [N, K/16], X.weight_scale_2 F32 NVFP4, multiplied with it
//!
//! E8M0 scales are of type F8_E8M0 or U8.
//! ```

use safetensors::Dtype;

use super::shards::{Shards, Tensor};
use crate::error::Result;
use crate::format::float::f32_at;
use crate::format::{Format, Global, Group, Matrix, ScaleType, fp8, mx};

/// The linear layer `base` (its name without `.weight`), and the name of the tensor that holds its codes.
///
/// `cols` is the number of inputs, where the caller knows it; otherwise packed formats read it from `weight_shape`, which is in
/// the data part of the file.
pub fn linear<'a>(shards: &'a Shards, base: &str, cols: Option<usize>) -> Result<(&'a str, Matrix)> {
    let get = |suffix: &str| shards.get(&format!("{base}.{suffix}"));
    refuse_unsupported(shards, base)?;
    if let Some((name, codes)) = get("weight_packed") {
        return packed(shards, base, name, codes, cols);
    }
    let Some((name, codes)) = get("weight") else {
        return Err(shards.fail(&format!("{base}.weight"), "missing from the checkpoint, in any format"));
    };
    let inputs = cols;
    let (rows, cols) = dimensions(shards, name, codes)?;
    let scales = || {
        let suffix = ["weight_scale_inv", "scale"].into_iter().find(|suffix| get(suffix).is_some());
        scales(shards, base, suffix.unwrap_or("weight_scale"))
    };
    let (format, scales) = match codes.dtype {
        Dtype::F8_E4M3 => {
            let (scale_name, scale) = scales()?;
            let format = match scale.shape[..] {
                [r, c] if e8m0(scale) && r == rows && c.checked_mul(mx::COLS) == Some(cols) => Format::Mxfp8,
                [r, c] if (r, c) == (rows.div_ceil(fp8::TILE), cols.div_ceil(fp8::TILE)) => Format::Fp8Block,
                [n] | [n, 1] if n == rows => Format::Fp8Channel,
                _ => {
                    let what = format!(
                        "has shape {:?}; FP8 weights [{rows}, {cols}] need a scale per row, per block of 128 x 128, or (E8M0) per \
                         32 columns",
                        scale.shape
                    );
                    return Err(shards.fail(scale_name, what));
                }
            };
            (format, Some((scale_name, scale)))
        }
        Dtype::I8 if get("scale").is_some() => return mxfp4(shards, (name, codes), scales()?).map(|m| (name, m)),
        Dtype::I8 => {
            let (scale_name, scale) = scales()?;
            (Format::Int8(group(shards, scale_name, scale, rows, cols)?), Some((scale_name, scale)))
        }
        Dtype::U8 => return nvfp4(shards, base, (name, codes), scales()?, inputs.is_none()).map(|m| (name, m)),
        other => match plain_format(other) {
            Some(format) => (format, None),
            None => return Err(shards.fail(name, format!("has type {other:?}, which is not supported as a weight"))),
        },
    };
    Ok((name, matrix(shards, format, (rows, cols), (name, codes), scales)?))
}

/// A tensor that stands for itself, in a floating-point type.
pub fn plain(shards: &Shards, name: &str) -> Result<Matrix> {
    let Some((name, t)) = shards.get(name) else {
        return Err(shards.fail(name, "missing from the checkpoint"));
    };
    let Some(format) = plain_format(t.dtype) else {
        return Err(shards.fail(name, format!("has type {:?}; F32, F16 and BF16 can be read", t.dtype)));
    };
    matrix(shards, format, dimensions(shards, name, t)?, (name, t), None)
}

/// Tensors beside the codes that mean a format which is not decoded here.
fn refuse_unsupported(shards: &Shards, base: &str) -> Result<()> {
    let has = |suffix: &str| shards.get(&format!("{base}.{suffix}")).is_some();
    let refused = [
        ("qweight", if has("g_idx") { "in GPTQ format" } else { "in AWQ or GPTQ format" }),
        ("weight_g_idx", "in activation order"),
    ];
    if has("scale") && ["weight_packed", "weight_scale", "weight_scale_inv"].into_iter().any(has) {
        return Err(shards.fail(&format!("{base}.scale"), "there are other quantized tensors of its matrix beside it"));
    }
    let zeros = format!("{base}.weight_zero_point");
    if has("weight_zero_point") && !has("weight_packed") {
        return Err(
            shards.fail(&zeros, "its matrix is asymmetric and not `pack-quantized`, which is not supported yet")
        );
    }
    let nvfp4 = shards
        .get(&format!("{base}.weight_packed"))
        .or_else(|| shards.get(&format!("{base}.weight")))
        .is_some_and(|(_, t)| t.dtype == Dtype::U8);
    for suffix in ["weight_global_scale", "weight_scale_2"] {
        if has(suffix) && !nvfp4 {
            let what = "a factor of scales, but its matrix is not in NVFP4 format";
            return Err(shards.fail(&format!("{base}.{suffix}"), what));
        }
    }
    match refused.into_iter().find(|(suffix, _)| has(suffix)) {
        Some((suffix, what)) => {
            Err(shards.fail(&format!("{base}.{suffix}"), format!("its matrix is {what}, which is not supported yet")))
        }
        None => Ok(()),
    }
}

/// compressed-tensors `pack-quantized`.
fn packed<'a>(
    shards: &'a Shards,
    base: &str,
    name: &'a str,
    codes: &Tensor,
    cols: Option<usize>,
) -> Result<(&'a str, Matrix)> {
    let (scale_name, scale) = scales(shards, base, "weight_scale")?;
    match codes.dtype {
        Dtype::U8 if e8m0(scale) => return Ok((name, mxfp4(shards, (name, codes), (scale_name, scale))?)),
        Dtype::U8 if scale.dtype == Dtype::F8_E4M3 => {
            return Ok((name, nvfp4(shards, base, (name, codes), (scale_name, scale), cols.is_none())?));
        }
        Dtype::I32 => {}
        other => {
            let what = format!("has type {other:?}, and scales of type {:?}: a format that is not known", scale.dtype);
            return Err(shards.fail(name, what));
        }
    }
    let (rows, words) = dimensions(shards, name, codes)?;
    let shape_name = format!("{base}.weight_shape");
    let Some((_, shape)) = shards.get(&shape_name) else {
        return Err(shards.fail(&shape_name, "missing: packed weights need it"));
    };
    let data = cols.is_none();
    let cols = match cols {
        Some(cols) => cols,
        None => match stored_shape(shards, shape) {
            Some([r, c]) if r == rows as i64 && c > 0 => c as usize,
            found => {
                return Err(shards.fail(&shape_name, format!("holds {found:?}, but the packed tensor has {rows} rows")));
            }
        },
    };
    let group = group(shards, scale_name, scale, rows, cols)?;
    let format = match (words.checked_mul(8), words.checked_mul(4)) {
        (Some(c), _) if c == cols => Format::Int4(group),
        (_, Some(c)) if c == cols => Format::Int8Offset(group),
        _ => {
            let what = format!("has rows of {words} words for {cols} columns: neither 4 nor 8 bits each");
            return Err(shards.fail(name, what));
        }
    };
    let zeros_name = format!("{base}.weight_zero_point");
    let Some((_, zeros)) = shards.get(&zeros_name) else {
        return Ok((name, matrix(shards, format, (rows, cols), (name, codes), Some((scale_name, scale)))?));
    };
    let (format, bits) = match format {
        Format::Int4(group) => (Format::Int4Asym(group), 4),
        _ => (Format::Int8Asym(group), 8),
    };
    let groups = cols / group.cols(cols);
    let words = [rows.div_ceil(32 / bits), groups];
    if zeros.dtype != Dtype::I32 || zeros.shape != words {
        let what = format!(
            "is {:?} {:?}; zero points of {format} [{rows}, {cols}] are I32 {words:?}",
            zeros.dtype, zeros.shape
        );
        return Err(shards.fail(&zeros_name, what));
    }
    let m = matrix(shards, format, (rows, cols), (name, codes), Some((scale_name, scale)))?;
    if !data {
        return Ok((name, m));
    }
    let zeros = unpack_rows(&shards.bytes(zeros), bits, rows, groups);
    Ok((name, m.with_zero_points(zeros).map_err(|e| shards.fail(&zeros_name, e))?))
}

/// Numbers `[rows, cols]` out of words `[ceil(rows * bits / 32), cols]` that each hold those of consecutive rows, the first one lowest.
fn unpack_rows(words: &[u8], bits: usize, rows: usize, cols: usize) -> Vec<i16> {
    let mut out = vec![0; rows * cols];
    for (row, out) in out.chunks_exact_mut(cols.max(1)).enumerate() {
        let (word, shift) = (row / (32 / bits), row % (32 / bits) * bits);
        for (o, word) in out.iter_mut().zip(words[word * cols * 4..].as_chunks::<4>().0) {
            *o = (u32::from_le_bytes(*word) >> shift & ((1 << bits) - 1)) as i16;
        }
    }
    out
}

/// E2M1 codes of two columns per byte, all dimensions but those of a row folded, with their E8M0 scales.
///
/// `[…, N, K/2]` and `[…, N, K/32]`, or gpt-oss's `[…, N, K/32, 16]` and `[…, N, K/32]`.
pub fn mxfp4(shards: &Shards, codes: (&str, &Tensor), scales: (&str, &Tensor)) -> Result<Matrix> {
    let (rows, per_row) = dimensions(shards, scales.0, scales.1)?;
    let cols = per_row.checked_mul(mx::COLS).ok_or_else(|| shards.fail(scales.0, "is too large"))?;
    let lead = &scales.1.shape[..scales.1.shape.len().saturating_sub(1)];
    match codes.1.shape.strip_prefix(lead) {
        Some(row) if row == [cols / 2] || row == [per_row, mx::COLS / 2] => {}
        _ => {
            let what = format!("has shape {:?}, which does not fit {:?} of its codes", scales.1.shape, codes.1.shape);
            return Err(shards.fail(scales.0, what));
        }
    }
    matrix(shards, Format::Mxfp4, (rows, cols), codes, Some(scales))
}

/// The factor of the scales is in the data part of the file and read where `data` says so; until then it is 1.
fn nvfp4(shards: &Shards, base: &str, codes: (&str, &Tensor), scales: (&str, &Tensor), data: bool) -> Result<Matrix> {
    let (rows, bytes) = dimensions(shards, codes.0, codes.1)?;
    let cols = bytes.checked_mul(2).ok_or_else(|| shards.fail(codes.0, "is too large"))?;
    if scales.1.dtype != Dtype::F8_E4M3 || scales.1.shape != [rows, cols / mx::NV_COLS] {
        let (kind, shape) = (scales.1.dtype, &scales.1.shape);
        let what = format!(
            "is {kind:?} {shape:?}; NVFP4 [{rows}, {cols}] has scales F8_E4M3 [{rows}, {}]",
            cols / mx::NV_COLS
        );
        return Err(shards.fail(scales.0, what));
    }
    let named = |suffix: &str| format!("{base}.{suffix}");
    let (over, times) = (named("weight_global_scale"), named("weight_scale_2"));
    let (name, global) = match (shards.get(&over), shards.get(&times)) {
        (Some(t), None) | (None, Some(t)) => t,
        (None, None) => return Err(shards.fail(&over, "missing: NVFP4 needs it, or `weight_scale_2`")),
        (Some((name, _)), Some(_)) => return Err(shards.fail(name, "`weight_scale_2` is there, too")),
    };
    if global.dtype != Dtype::F32 || global.byte_len() != 4 {
        return Err(shards.fail(name, format!("is {:?} {:?}, expected one F32", global.dtype, global.shape)));
    }
    let m = matrix(shards, Format::Nvfp4, (rows, cols), codes, Some(scales))?;
    if !data {
        return Ok(m);
    }
    let value = f32_at(&shards.bytes(global), 0);
    Ok(m.with_global_scale(if name == times { Global::Times(value) } else { Global::Over(value) }))
}

/// Whether a tensor can be of E8M0 scales.
fn e8m0(t: &Tensor) -> bool {
    matches!(t.dtype, Dtype::U8 | Dtype::F8_E8M0)
}

/// The two numbers of a `weight_shape`.
fn stored_shape(shards: &Shards, t: &Tensor) -> Option<[i64; 2]> {
    let bytes = shards.bytes(t);
    match (t.dtype, &bytes[..]) {
        (Dtype::I32, &[a, b, c, d, e, f, g, h]) => {
            Some([[a, b, c, d], [e, f, g, h]].map(|v| i32::from_le_bytes(v).into()))
        }
        (Dtype::I64, both) if both.len() == 16 => {
            let (rows, cols) = both.split_first_chunk()?;
            Some([i64::from_le_bytes(*rows), i64::from_le_bytes(*cols.first_chunk()?)])
        }
        _ => None,
    }
}

/// The scales of the codes beside them, of the type that [`matrix`] will check.
fn scales<'a>(shards: &'a Shards, base: &str, suffix: &str) -> Result<(&'a str, &'a Tensor)> {
    let name = format!("{base}.{suffix}");
    shards
        .get(&name)
        .ok_or_else(|| shards.fail(&name, "missing: the weight beside it is quantized and needs its scales"))
}

/// Columns per scale, from the shape of the scales.
fn group(shards: &Shards, name: &str, t: &Tensor, rows: usize, cols: usize) -> Result<Group> {
    let per_row = match t.shape[..] {
        [n] if n == rows => 1,
        [n, per_row] if n == rows && per_row > 0 => per_row,
        _ => return Err(shards.fail(name, format!("has shape {:?}, expected {rows} rows of scales", t.shape))),
    };
    match u32::try_from(cols / per_row) {
        _ if per_row == 1 => Ok(Group::Row),
        Ok(g) if g > 0 && cols.is_multiple_of(per_row) => Ok(Group::Of(g)),
        _ => Err(shards.fail(name, format!("has {per_row} scales a row, which do not divide {cols} columns"))),
    }
}

fn matrix(
    shards: &Shards,
    format: Format,
    (rows, cols): (usize, usize),
    (name, codes): (&str, &Tensor),
    scales: Option<(&str, &Tensor)>,
) -> Result<Matrix> {
    let scales = match scales {
        None => None,
        Some((scale_name, t)) => {
            let kind = match t.dtype {
                Dtype::F32 => ScaleType::F32,
                Dtype::F16 => ScaleType::F16,
                Dtype::BF16 => ScaleType::Bf16,
                Dtype::F8_E8M0 | Dtype::U8 => ScaleType::E8m0,
                Dtype::F8_E4M3 => ScaleType::E4m3,
                other => {
                    let what = format!("has type {other:?}; scales of type F32, F16, BF16 and E8M0 are supported");
                    return Err(shards.fail(scale_name, what));
                }
            };
            Some((shards.bytes(t), kind))
        }
    };
    Matrix::new(format, rows, cols, shards.bytes(codes), scales).map_err(|e| shards.fail(name, e))
}

/// The format of a floating-point type.
pub fn plain_format(dtype: Dtype) -> Option<Format> {
    match dtype {
        Dtype::F32 => Some(Format::F32),
        Dtype::F16 => Some(Format::F16),
        Dtype::BF16 => Some(Format::Bf16),
        _ => None,
    }
}

/// Rows and columns: the last dimension, and all others together.
fn dimensions(shards: &Shards, name: &str, t: &Tensor) -> Result<(usize, usize)> {
    if t.shape.contains(&0) {
        return Err(shards.fail(name, format!("has shape {:?}: it is empty", t.shape)));
    }
    let cols = t.shape.last().copied().unwrap_or(1);
    // No overflow: none is 0, and the header's check multiplied them all.
    Ok((t.shape.iter().rev().skip(1).product(), cols))
}
