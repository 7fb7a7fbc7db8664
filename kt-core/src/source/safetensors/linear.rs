//! One linear layer: which format it is in, told by the tensors that stand next to each other.
//!
//! ```text
//! X.weight BF16 F16 F32                                                       as is
//! X.weight F8_E4M3   X.weight_scale_inv, .weight_scale or .scale [N/128, K/128] FP8 blocks
//!                                               … [N, 1] or [N]               FP8 per channel
//!                                               … [], [1] or [1, 1]           the same, one scale for all
//!                                               … E8M0 [N, K/32]              MXFP8
//! X.weight I8 [N, K/2]   X.scale E8M0 [N, K/32]                               MXFP4
//! X.weight I8        X.weight_scale [N, 1], [N] or [N, K/g]                   INT8
//!                                … and X.weight_zero_point I8, as the scales    INT8, asymmetric
//! X.weight_packed I32 [N, K/8]   X.weight_scale [N, K/g]   X.weight_shape     INT4
//!                     [N, K/4]                                                INT8 with offset 128
//!                                … and X.weight_zero_point I32 [N/8, K/g]       either, asymmetric
//!                                or [N/4, K/g] where codes have 8 bits
//!                                … and X.weight_g_idx I32 [K]                   either, ordered
//! X.weight_packed U8 [N, K/2]    X.weight_scale E8M0 [N, K/32]                MXFP4
//!                        and X.weight_scale E4M3 [N, K/16], X.weight_global_scale F32 NVFP4, divided by it
//! X.weight U8 [N, K/2]       X.weight_scale E4M3 [N, K/16], X.weight_scale_2 F32 NVFP4, multiplied with it
//! X.qweight …                                                                 GPTQ and AWQ: see `transposed`
//!
//! E8M0 scales are of type F8_E8M0 or U8.
//! ```

use bytes::Bytes;
use safetensors::Dtype;

use super::shards::{Shards, Tensor};
use super::transposed::{self, Quantization, Transposed, columns_to_rows};
use crate::error::Result;
use crate::format::float::f32_at;
use crate::format::{Format, Global, Group, Matrix, ScaleType, fp8, mx};

/// What tensors of a linear layer are called, beside `weight`.
pub const COMPANIONS: [&str; 10] = [
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_zero_point",
    "weight_g_idx",
    "scale",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
];

/// A linear layer as headers describe it; [`Linear::matrix`] reads what else it takes.
pub struct Linear<'a> {
    /// The tensor that holds its codes.
    pub name: &'a str,
    pub format: Format,
    pub rows: usize,
    pub cols: usize,
    stored: Stored<'a>,
}

/// A tensor and its name.
pub type Named<'a> = (&'a str, &'a Tensor);

enum Stored<'a> {
    AsIs(Matrix),
    /// FP8 with one scale, which all rows get.
    OneScale {
        codes: Named<'a>,
        scale: Named<'a>,
    },
    /// NVFP4 and the factor of its scales.
    Factor(Matrix, &'a Tensor, fn(f32) -> Global),
    /// compressed-tensors `pack-quantized`: zero points in words, groups of columns, and the shape that the data tells.
    Packed {
        matrix: Matrix,
        zeros: Option<Named<'a>>,
        order: Option<Named<'a>>,
        shape: Named<'a>,
    },
    /// compressed-tensors `int-quantized`: signed codes, scales, and zero points.
    Signed {
        codes: Named<'a>,
        scales: Named<'a>,
        zeros: Named<'a>,
    },
    Transposed(Transposed<'a>),
}

impl<'a> Linear<'a> {
    fn new(name: &'a str, matrix: Matrix, stored: impl FnOnce(Matrix) -> Stored<'a>) -> Self {
        let (format, rows, cols) = (matrix.format(), matrix.rows(), matrix.cols());
        Linear { name, format, rows, cols, stored: stored(matrix) }
    }

    /// The type of its scales, if there are any beside its codes.
    pub fn scale_type(&self, shards: &Shards) -> Option<ScaleType> {
        match &self.stored {
            Stored::AsIs(matrix) | Stored::Factor(matrix, ..) | Stored::Packed { matrix, .. } => {
                matrix.scales().map(|scales| scales.kind())
            }
            Stored::Signed { scales, .. } | Stored::OneScale { scale: scales, .. } => scale_type(shards, *scales).ok(),
            Stored::Transposed(t) => scale_type(shards, t.scales()).ok(),
        }
    }

    /// Whether [`Linear::matrix`] makes a copy of the codes.
    pub fn copies(&self) -> bool {
        matches!(self.stored, Stored::Signed { .. } | Stored::Transposed(_))
    }

    /// The matrix: a handle on the file's bytes where they are as kernels read them, and otherwise a copy that is.
    pub fn matrix(self, shards: &Shards) -> Result<Matrix> {
        let (format, rows, cols) = (self.format, self.rows, self.cols);
        match self.stored {
            Stored::AsIs(matrix) => Ok(matrix),
            Stored::OneScale { codes, scale } => {
                let (scales, kind) = (shards.bytes(scale.1).repeat(rows), scale_type(shards, scale)?);
                let matrix = Matrix::new(format, rows, cols, shards.bytes(codes.1), Some((scales.into(), kind)));
                matrix.map_err(|e| shards.fail(codes.0, e))
            }
            Stored::Factor(matrix, factor, global) => {
                Ok(matrix.with_global_scale(global(f32_at(&shards.bytes(factor), 0))))
            }
            Stored::Packed { mut matrix, zeros, order, shape } => {
                let said = stored_shape(shards, shape.1);
                if said != Some([rows as i64, cols as i64]) {
                    let what = format!("holds {said:?}, but the packed tensor is of [{rows}, {cols}] numbers");
                    return Err(shards.fail(shape.0, what));
                }
                if let Some((name, t)) = zeros {
                    let groups = t.shape.last().copied().unwrap_or(0);
                    let zeros = unpack_rows(&shards.bytes(t), bits(format), rows, groups);
                    matrix = matrix.with_zero_points(zeros).map_err(|e| shards.fail(name, e))?;
                }
                if let Some((name, t)) = order {
                    // What was not calibrated is left at -1 and in order.
                    let groups = i32s(&shards.bytes(t));
                    if !groups.contains(&-1) {
                        matrix = with_column_groups(matrix, &groups).map_err(|e| shards.fail(name, e))?;
                    }
                }
                Ok(matrix)
            }
            Stored::Signed { codes, scales, zeros } => {
                let unsigned: Vec<u8> = shards.bytes(codes.1).iter().map(|c| c ^ 0x80).collect();
                let matrix = matrix(shards, format, (rows, cols), (codes.0, unsigned.into()), Some(scales))?;
                let points = shards.bytes(zeros.1).iter().map(|&z| z as i8 as i16 + 128).collect();
                matrix.with_zero_points(points).map_err(|e| shards.fail(zeros.0, e))
            }
            Stored::Transposed(t) => {
                let matrix = t.matrix(shards, format, rows, cols)?;
                // The copy takes the place of the file's pages.
                shards.release(self.name, 0, 1);
                Ok(matrix)
            }
        }
    }
}

/// The linear layer `base` (its name without `.weight`), told by headers alone.
///
/// `cols` is the number of inputs, where the caller knows it; otherwise packed formats read it from `weight_shape`, which is in
/// the data part of the file.
pub fn linear<'a>(
    shards: &'a Shards,
    quantization: &Quantization,
    base: &str,
    cols: Option<usize>,
) -> Result<Linear<'a>> {
    let get = |suffix: &str| shards.get(&format!("{base}.{suffix}"));
    refuse_unsupported(shards, base)?;
    if let Some(codes) = get("weight_packed") {
        return packed(shards, base, codes, cols);
    }
    if let Some(codes) = get("qweight") {
        let (format, (rows, cols), t) = transposed::describe(shards, quantization, base, codes, cols)?;
        return Ok(Linear { name: codes.0, format, rows, cols, stored: Stored::Transposed(t) });
    }
    let Some((name, codes)) = get("weight") else {
        return Err(shards.fail(&format!("{base}.weight"), "missing from the checkpoint, in any format"));
    };
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
                [] | [1] | [1, 1] => {
                    let (format, kind) = (Format::Fp8Channel, scale_type(shards, (scale_name, scale))?);
                    if !format.takes_scales(kind) {
                        return Err(shards.fail(scale_name, format!("is {kind:?}; {format} has no such scales")));
                    }
                    let stored = Stored::OneScale { codes: (name, codes), scale: (scale_name, scale) };
                    return Ok(Linear { name, format, rows, cols, stored });
                }
                _ => {
                    let what = format!(
                        "has shape {:?}; FP8 weights [{rows}, {cols}] need one scale, or one per row, per block of 128 x 128, or \
                         (E8M0) per 32 columns",
                        scale.shape
                    );
                    return Err(shards.fail(scale_name, what));
                }
            };
            (format, Some((scale_name, scale)))
        }
        Dtype::I8 if get("scale").is_some() => {
            let m = mxfp4(shards, (name, codes), scales()?)?;
            return Ok(Linear::new(name, m, Stored::AsIs));
        }
        Dtype::I8 => {
            let (scale_name, scale) = scales()?;
            let group = group(shards, scale_name, scale, rows, cols)?;
            if let Some(zeros) = get("weight_zero_point") {
                if zeros.1.dtype != Dtype::I8 || zeros.1.shape != scale.shape {
                    let (kind, shape) = (zeros.1.dtype, &zeros.1.shape);
                    let what = format!(
                        "is {kind:?} {shape:?}; signed codes have zero points I8 {:?}, as their scales",
                        scale.shape
                    );
                    return Err(shards.fail(zeros.0, what));
                }
                let (format, scales) = (Format::Int8Asym(group), (scale_name, scale));
                // Checks all sizes; the codes' signs are seen to with the data.
                let m = matrix(shards, format, (rows, cols), (name, shards.bytes(codes)), Some(scales))?;
                return Ok(Linear::new(name, m, |_| Stored::Signed { codes: (name, codes), scales, zeros }));
            }
            (Format::Int8(group), Some((scale_name, scale)))
        }
        Dtype::U8 => return nvfp4(shards, base, (name, codes), scales()?),
        other => match plain_format(other) {
            Some(format) => (format, None),
            None => return Err(shards.fail(name, format!("has type {other:?}, which is not supported as a weight"))),
        },
    };
    let m = matrix(shards, format, (rows, cols), (name, shards.bytes(codes)), scales)?;
    Ok(Linear::new(name, m, Stored::AsIs))
}

/// A tensor that stands for itself, in a floating-point type.
pub fn plain(shards: &Shards, name: &str) -> Result<Matrix> {
    let Some((name, t)) = shards.get(name) else {
        return Err(shards.fail(name, "missing from the checkpoint"));
    };
    let Some(format) = plain_format(t.dtype) else {
        return Err(shards.fail(name, format!("has type {:?}; F32, F16 and BF16 can be read", t.dtype)));
    };
    matrix(shards, format, dimensions(shards, name, t)?, (name, shards.bytes(t)), None)
}

/// Tensors beside each other that mean no format known here.
fn refuse_unsupported(shards: &Shards, base: &str) -> Result<()> {
    let named = |suffix: &str| format!("{base}.{suffix}");
    let has = |suffix: &str| shards.get(&named(suffix)).is_some();
    if has("scale") && ["weight_packed", "weight_scale", "weight_scale_inv"].into_iter().any(has) {
        return Err(shards.fail(&named("scale"), "there are other quantized tensors of its matrix beside it"));
    }
    if has("qweight") && ["weight", "weight_packed"].into_iter().any(has) {
        return Err(shards.fail(&named("qweight"), "its matrix is there in another format, too"));
    }
    let codes = shards.get(&named("weight_packed")).or_else(|| shards.get(&named("weight"))).map(|(_, t)| t.dtype);
    for (suffix, of, what) in [
        ("weight_zero_point", &[Dtype::I8, Dtype::I32][..], "zero points, but its matrix is not of integers"),
        ("weight_g_idx", &[Dtype::I32], "an order of columns, but its matrix is not `pack-quantized`"),
        ("weight_global_scale", &[Dtype::U8], "a factor of scales, but its matrix is not in NVFP4 format"),
        ("weight_scale_2", &[Dtype::U8], "a factor of scales, but its matrix is not in NVFP4 format"),
    ] {
        if has(suffix) && codes.is_none_or(|codes| !of.contains(&codes)) {
            return Err(shards.fail(&named(suffix), what));
        }
    }
    Ok(())
}

/// compressed-tensors `pack-quantized`.
fn packed<'a>(shards: &'a Shards, base: &str, (name, codes): Named<'a>, cols: Option<usize>) -> Result<Linear<'a>> {
    let get = |suffix: &str| shards.get(&format!("{base}.{suffix}"));
    let (scale_name, scale) = scales(shards, base, "weight_scale")?;
    match codes.dtype {
        Dtype::U8 if e8m0(scale) => {
            return Ok(Linear::new(name, mxfp4(shards, (name, codes), (scale_name, scale))?, Stored::AsIs));
        }
        Dtype::U8 if scale.dtype == Dtype::F8_E4M3 => {
            return nvfp4(shards, base, (name, codes), (scale_name, scale));
        }
        Dtype::I32 => {}
        other => {
            let what = format!("has type {other:?}, and scales of type {:?}: a format that is not known", scale.dtype);
            return Err(shards.fail(name, what));
        }
    }
    let (rows, words) = dimensions(shards, name, codes)?;
    let Some(shape) = get("weight_shape") else {
        return Err(shards.fail(&format!("{base}.weight_shape"), "missing: packed weights need it"));
    };
    let cols = match cols {
        Some(cols) => cols,
        None => match stored_shape(shards, shape.1) {
            Some([r, c]) if r == rows as i64 && c > 0 => c as usize,
            found => {
                return Err(shards.fail(shape.0, format!("holds {found:?}, but the packed tensor has {rows} rows")));
            }
        },
    };
    let (zeros, order) = (get("weight_zero_point"), get("weight_g_idx"));
    let group = group(shards, scale_name, scale, rows, cols)?;
    let format = match (words.checked_mul(8), words.checked_mul(4)) {
        (Some(c), _) if c == cols => match (zeros, order) {
            (_, Some(_)) => Format::Int4Ordered(group),
            (Some(_), None) => Format::Int4Asym(group),
            (None, None) => Format::Int4(group),
        },
        (_, Some(c)) if c == cols => match (zeros, order) {
            (_, Some(_)) => Format::Int8Ordered(group),
            (Some(_), None) => Format::Int8Asym(group),
            (None, None) => Format::Int8Offset(group),
        },
        _ => {
            let what = format!("has rows of {words} words for {cols} columns: neither 4 nor 8 bits each");
            return Err(shards.fail(name, what));
        }
    };
    for (tensor, want) in
        [(zeros, vec![rows.div_ceil(32 / bits(format)), cols / group.cols(cols)]), (order, vec![cols])]
    {
        if let Some((name, t)) = tensor.filter(|(_, t)| t.dtype != Dtype::I32 || t.shape != want) {
            let what = format!("is {:?} {:?}; that of {format} [{rows}, {cols}] is I32 {want:?}", t.dtype, t.shape);
            return Err(shards.fail(name, what));
        }
    }
    let m = matrix(shards, format, (rows, cols), (name, shards.bytes(codes)), Some((scale_name, scale)))?;
    Ok(Linear::new(name, m, |matrix| Stored::Packed { matrix, zeros, order, shape }))
}

/// Bits of an integer format's codes.
fn bits(format: Format) -> usize {
    8 / format.block_cols()
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

pub fn i32s(bytes: &[u8]) -> Vec<i32> {
    bytes.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b)).collect()
}

/// Sets the groups of columns as a tensor lists them.
pub fn with_column_groups(matrix: Matrix, groups: &[i32]) -> Result<Matrix, String> {
    if let Some(k) = groups.iter().position(|&g| g < 0) {
        return Err(format!("column {k} is of group {}", groups[k]));
    }
    matrix.with_column_groups(groups.iter().map(|&g| g as u32).collect())
}

/// E2M1 codes of two columns per byte, all dimensions but those of a row folded, with their E8M0 scales.
///
/// `[…, N, K/2]` and `[…, N, K/32]`, or gpt-oss's `[…, N, K/32, 16]` and `[…, N, K/32]`.
pub fn mxfp4(shards: &Shards, codes: Named<'_>, scales: Named<'_>) -> Result<Matrix> {
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
    matrix(shards, Format::Mxfp4, (rows, cols), (codes.0, shards.bytes(codes.1)), Some(scales))
}

fn nvfp4<'a>(shards: &'a Shards, base: &str, codes: Named<'a>, scales: Named<'a>) -> Result<Linear<'a>> {
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
    let ((name, factor), global): (_, fn(f32) -> Global) = match (shards.get(&over), shards.get(&times)) {
        (Some(t), None) => (t, Global::Over),
        (None, Some(t)) => (t, Global::Times),
        (None, None) => return Err(shards.fail(&over, "missing: NVFP4 needs it, or `weight_scale_2`")),
        (Some((name, _)), Some(_)) => return Err(shards.fail(name, "`weight_scale_2` is there, too")),
    };
    if factor.dtype != Dtype::F32 || factor.byte_len() != 4 {
        return Err(shards.fail(name, format!("is {:?} {:?}, expected one F32", factor.dtype, factor.shape)));
    }
    let m = matrix(shards, Format::Nvfp4, (rows, cols), (codes.0, shards.bytes(codes.1)), Some(scales))?;
    Ok(Linear::new(codes.0, m, |m| Stored::Factor(m, factor, global)))
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
fn scales<'a>(shards: &'a Shards, base: &str, suffix: &str) -> Result<Named<'a>> {
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

/// The type of a tensor of scales.
pub fn scale_type(shards: &Shards, (name, t): Named<'_>) -> Result<ScaleType> {
    match t.dtype {
        Dtype::F32 => Ok(ScaleType::F32),
        Dtype::F16 => Ok(ScaleType::F16),
        Dtype::BF16 => Ok(ScaleType::Bf16),
        Dtype::F8_E8M0 | Dtype::U8 => Ok(ScaleType::E8m0),
        Dtype::F8_E4M3 => Ok(ScaleType::E4m3),
        other => {
            Err(shards.fail(name, format!("has type {other:?}; scales of type F32, F16, BF16 and E8M0 are supported")))
        }
    }
}

fn matrix(
    shards: &Shards,
    format: Format,
    (rows, cols): (usize, usize),
    (name, codes): (&str, Bytes),
    scales: Option<Named<'_>>,
) -> Result<Matrix> {
    let scales = match scales {
        None => None,
        Some(scales) => Some((shards.bytes(scales.1), scale_type(shards, scales)?)),
    };
    Matrix::new(format, rows, cols, codes, scales).map_err(|e| shards.fail(name, e))
}

/// Outputs `first`, `first + step`, … (`count` of them) of an expert, out of a floating-point tensor `[experts, cols, tall]`.
pub fn inputs_first(
    shards: &Shards,
    (name, t): Named<'_>,
    expert: usize,
    (tall, cols): (usize, usize),
    outputs: (usize, usize, usize),
) -> Result<Matrix> {
    let Some(format) = plain_format(t.dtype) else {
        return Err(shards.fail(name, format!("has type {:?}; F32, F16 and BF16 can be read", t.dtype)));
    };
    let bytes = shards.bytes(t);
    let codes = if format == Format::F32 {
        columns_to_rows(&bytes.as_chunks::<4>().0[expert * cols * tall..][..cols * tall], tall, outputs)
            .into_flattened()
    } else {
        columns_to_rows(&bytes.as_chunks::<2>().0[expert * cols * tall..][..cols * tall], tall, outputs)
            .into_flattened()
    };
    Matrix::new(format, outputs.2, cols, codes.into(), None).map_err(|e| shards.fail(name, e))
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
