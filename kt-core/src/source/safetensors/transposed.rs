//! GPTQ and AWQ: inputs first, and several numbers of few bits in a word.
//!
//! ```text
//! GPTQ  X.qweight I32 [K*b/32, N]   a word holds the codes of consecutive inputs of an output, the first one lowest
//!       X.qzeros  I32 [K/g, N*b/32] a word holds the zero points of consecutive outputs, minus 1 but in `gptq_v2`
//!       X.scales  [K/g, N]          X.g_idx I32 [K] (optional): the group of each input
//! AWQ   X.qweight I32 [K, N/8]      a word holds the codes of eight outputs, in the order 0 2 4 6 1 3 5 7 from the lowest nibble
//!       X.qzeros  I32 [K/g, N/8]    zero points in that order           X.scales [K/g, N]
//! ```
//!
//! `W[n, k] = (code - zero) * scales[g, n]`. `b` is 4 or 8 bits in GPTQ, 4 in AWQ. Codes are turned into rows of outputs when a matrix
//! is asked for: a GPTQ word is then, as it is, a word of a row.
//!
//! What the tensors do not tell is in `quantization_config`: that all zero points are in the middle (`sym`), that columns have their
//! groups in order (`desc_act` false), and how GPTQ's zero points are stored (`checkpoint_format`). Matrices that are not so are
//! refused when they are read.

use std::path::Path;

use safetensors::Dtype;
use serde_json::Value;

use super::linear::{Named, i32s, scale_type, with_column_groups};
use super::shards::Shards;
use crate::error::{Error, Result};
use crate::format::{Format, Group, Matrix, ScaleType};

/// What a checkpoint's `quantization_config` says of GPTQ or AWQ.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Quantization {
    method: Option<Method>,
    /// `None` also where modules differ: then tensors alone tell.
    bits: Option<usize>,
    /// Inputs that share a scale, all of them for -1; `None` as of `bits`.
    group: Option<i64>,
    symmetric: bool,
    ordered: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Method {
    /// What its stored zero points lack.
    Gptq {
        less: i16,
    },
    Awq,
}

impl Quantization {
    /// Reads a `quantization_config` of the `config.json` that `file` is. Other methods than GPTQ and AWQ say nothing here.
    pub fn read(q: &Value, file: &Path) -> Result<Self> {
        let fail = |key: &str, what: String| Err(Error::tensor(file, format!("quantization_config.{key}"), what));
        let word = |key: &str| q.get(key).and_then(Value::as_str).unwrap_or("");
        let flag = |key: &str| q.get(key).and_then(Value::as_bool);
        let packing = word("packing_format");
        let method = match word("quant_method") {
            "gptq" => {
                let key = if q.get("checkpoint_format").is_some() { "checkpoint_format" } else { "format" };
                match word(key) {
                    "gptq" | "" => Some(Method::Gptq { less: 1 }),
                    "gptq_v2" => Some(Method::Gptq { less: 0 }),
                    other => return fail(key, format!("is `{other}`; known are gptq and gptq_v2")),
                }
            }
            "awq" => match word("version") {
                "gemm" | "GEMM" | "" => Some(Method::Awq),
                other => return fail("version", format!("is `{other}`; AWQ's `gemm` can be read")),
            },
            "auto-round" | "intel/auto-round" if packing.ends_with("auto_gptq") => Some(Method::Gptq { less: 1 }),
            "auto-round" | "intel/auto-round" if packing.ends_with("awq") => Some(Method::Awq),
            _ => None,
        };
        let numbers = (q.get("bits"), q.get("group_size"));
        if method.is_some() && numbers.0.is_some_and(|b| ![4, 8].contains(&b.as_u64().unwrap_or(0))) {
            return fail("bits", format!("is {}; 4 and 8 can be read", numbers.0.unwrap_or(&Value::Null)));
        }
        // Modules with their own numbers ("+:" or no sign before the pattern; "-:" leaves modules as they were).
        let overrides: Vec<&Value> = ["dynamic", "extra_config"]
            .into_iter()
            .filter_map(|key| q.get(key)?.as_object())
            .flat_map(|modules| modules.iter().filter(|(name, _)| !name.starts_with("-:")).map(|(_, own)| own))
            .collect();
        let differ = |key: &str| overrides.iter().any(|own| own.get(key).is_some());
        Ok(Quantization {
            method,
            bits: numbers.0.and_then(Value::as_u64).map(|b| b as usize).filter(|_| !differ("bits")),
            group: numbers.1.and_then(Value::as_i64).filter(|_| !differ("group_size")),
            symmetric: method != Some(Method::Awq) && flag("sym") == Some(true) && !differ("sym"),
            ordered: flag("desc_act") == Some(true) || differ("desc_act"),
        })
    }
}

/// The tensors of a matrix.
pub struct Transposed<'a> {
    method: Method,
    codes: Named<'a>,
    scales: Named<'a>,
    zeros: Option<Named<'a>>,
    /// Whether all zero points are in the middle.
    symmetric: bool,
    order: Option<Named<'a>>,
    bits: usize,
}

/// Format and shape of the linear layer `base`, of which `codes` is the `qweight`, by its headers and the config.
pub fn describe<'a>(
    shards: &'a Shards,
    q: &Quantization,
    base: &str,
    codes: Named<'a>,
    cols: Option<usize>,
) -> Result<(Format, (usize, usize), Transposed<'a>)> {
    let named = |suffix: &str| format!("{base}.{suffix}");
    let get = |suffix: &str| shards.get(&named(suffix));
    let fail = |tensor: Named<'_>, what: String| Err(shards.fail(tensor.0, what));
    let Some(method) = q.method else {
        let what = "its matrix is in GPTQ or AWQ format, but `quantization_config` in config.json does not say which: \
                    `quant_method` should be gptq or awq";
        return fail(codes, what.into());
    };
    let Some(scales) = get("scales") else {
        return Err(shards.fail(&named("scales"), "missing: the codes beside it need their scales"));
    };
    let ([high, wide], [groups, rows]) = (&codes.1.shape[..], &scales.1.shape[..]) else {
        let what = format!("has shape {:?} and scales {:?}: two dimensions are due", codes.1.shape, scales.1.shape);
        return fail(codes, what);
    };
    let (high, wide, groups, rows) = (*high, *wide, *groups, *rows);
    if codes.1.dtype != Dtype::I32 || [high, wide, groups, rows].contains(&0) {
        let what = format!(
            "is {:?} {:?} with scales {:?}; I32 is due, and nothing empty",
            codes.1.dtype, codes.1.shape, scales.1.shape
        );
        return fail(codes, what);
    }
    if !matches!(scale_type(shards, scales)?, ScaleType::F32 | ScaleType::F16 | ScaleType::Bf16) {
        return fail(scales, format!("has type {:?}; F16, BF16 and F32 can be read", scales.1.dtype));
    }
    // An order of one group is none.
    let order = get("g_idx").filter(|_| method != Method::Awq);
    let (bits, cols) = match method {
        Method::Awq => (4, high),
        Method::Gptq { .. } => {
            let known = cols.or(order.and_then(|(_, t)| t.shape.first().copied()));
            // 32 bits of each of `high` words, for `cols` inputs.
            match known.map(|cols| (cols, high.checked_mul(32))) {
                Some((cols, Some(all))) if cols > 0 && all % cols == 0 && [4, 8].contains(&(all / cols)) => {
                    (all / cols, cols)
                }
                Some((cols, _)) => {
                    return fail(
                        codes,
                        format!("has {high} rows of words for {cols} inputs: neither 4 nor 8 bits each"),
                    );
                }
                None => match q.bits {
                    Some(bits) => (bits, high * (32 / bits)),
                    None => {
                        return fail(
                            codes,
                            "its `g_idx` is missing, and `quantization_config` does not give its bits".into(),
                        );
                    }
                },
            }
        }
    };
    if q.bits.is_some_and(|said| said != bits) {
        let said = q.bits.unwrap_or(0);
        return fail(codes, format!("has {bits} bits for each input, but `quantization_config` says bits {said}"));
    }
    let words = rows.div_ceil(32 / bits);
    let due = if method == Method::Awq { (cols, words) } else { (cols * bits / 32, rows) };
    if (high, wide) != due || rows % 8 != 0 || cols % 8 != 0 {
        let name = if method == Method::Awq { "AWQ" } else { "GPTQ" };
        let what = format!(
            "is [{high}, {wide}], but {name} of {bits} bits with scales {:?} is [{}, {}], in multiples of eight inputs and outputs; \
             is `quant_method` right?",
            scales.1.shape, due.0, due.1
        );
        return fail(codes, what);
    }
    let group = match u32::try_from(cols / groups) {
        _ if groups == 1 => Group::Row,
        Ok(g) if cols.is_multiple_of(groups) => Group::Of(g),
        _ => return fail(scales, format!("has {groups} groups, which do not divide {cols} inputs")),
    };
    if let Some(said) = q.group {
        let due = if said <= 0 { 1 } else { cols.div_ceil(said as usize) };
        if groups != due {
            let what =
                format!("has {groups} groups of {cols} inputs, but `quantization_config` says group_size {said}");
            return fail(scales, what);
        }
    }
    let zeros = get("qzeros");
    match zeros {
        Some((_, t)) if t.dtype == Dtype::I32 && t.shape == [groups, words] => {}
        Some((name, t)) => {
            let what = format!(
                "is {:?} {:?}; the zero points of [{rows}, {cols}] are I32 [{groups}, {words}]",
                t.dtype, t.shape
            );
            return Err(shards.fail(name, what));
        }
        None if q.symmetric => {}
        None => return Err(shards.fail(&named("qzeros"), "missing: only `sym` matrices can do without")),
    }
    match order {
        Some((name, t)) if t.dtype != Dtype::I32 || t.shape != [cols] => {
            return Err(
                shards.fail(name, format!("is {:?} {:?}; groups of {cols} inputs are I32 [{cols}]", t.dtype, t.shape))
            );
        }
        None if q.ordered && method != Method::Awq && groups > 1 => {
            return Err(shards.fail(&named("g_idx"), "missing, but `quantization_config` says desc_act true"));
        }
        _ => {}
    }
    let ordered = q.ordered && order.is_some() && groups > 1;
    let format = match (bits, ordered, q.symmetric) {
        (4, true, _) => Format::Int4Ordered(group),
        (4, false, true) => Format::Int4(group),
        (4, false, false) => Format::Int4Asym(group),
        (_, true, _) => Format::Int8Ordered(group),
        (_, false, true) => Format::Int8Offset(group),
        (_, false, false) => Format::Int8Asym(group),
    };
    format.row_bytes(cols).map_err(|e| shards.fail(scales.0, e))?;
    Ok((format, (rows, cols), Transposed { method, codes, scales, zeros, symmetric: q.symmetric, order, bits }))
}

impl Transposed<'_> {
    /// The tensor of its scales, whose type rows have too.
    pub fn scales(&self) -> Named<'_> {
        self.scales
    }

    /// A copy in rows of outputs.
    pub fn matrix(&self, shards: &Shards, format: Format, rows: usize, cols: usize) -> Result<Matrix> {
        let kind = scale_type(shards, self.scales)?;
        let groups = self.scales.1.shape[0];
        let codes = match self.method {
            Method::Gptq { .. } => to_rows(shards.bytes(self.codes.1).as_chunks::<4>().0, rows).into_flattened(),
            Method::Awq => awq_to_rows(shards.bytes(self.codes.1).as_chunks::<4>().0, rows).into_flattened(),
        };
        let scales = shards.bytes(self.scales.1);
        let scales = match kind.bytes() {
            4 => to_rows(scales.as_chunks::<4>().0, rows).into_flattened(),
            _ => to_rows(scales.as_chunks::<2>().0, rows).into_flattened(),
        };
        let mut matrix = Matrix::new(format, rows, cols, codes.into(), Some((scales.into(), kind)))
            .map_err(|e| shards.fail(self.codes.0, e))?;
        if let Some((name, t)) = self.zeros {
            let zeros = self.zero_points(&shards.bytes(t), rows, groups);
            let middle = 1 << (self.bits - 1);
            if !self.symmetric {
                matrix = matrix.with_zero_points(zeros).map_err(|e| shards.fail(name, e))?;
            } else if let Some(i) = zeros.iter().position(|&z| z != middle) {
                let what = format!(
                    "zero point [{}, {}] is {}, but `quantization_config` says sym true, which makes all {middle}; set it to false",
                    i / groups,
                    i % groups,
                    zeros[i]
                );
                return Err(shards.fail(name, what));
            }
        }
        let Some((name, t)) = self.order else { return Ok(matrix) };
        let order = i32s(&shards.bytes(t));
        if format.is_ordered() {
            return with_column_groups(matrix, &order).map_err(|e| shards.fail(name, e));
        }
        match order.iter().enumerate().position(|(k, &g)| g as usize != k / (cols / groups)) {
            None => Ok(matrix),
            Some(k) => {
                let what = format!(
                    "input {k} is of group {}, but `quantization_config` says desc_act false, which makes it {}",
                    order[k],
                    k / (cols / groups)
                );
                Err(shards.fail(name, what))
            }
        }
    }

    /// The zero points as `[rows, groups]`.
    fn zero_points(&self, words: &[u8], rows: usize, groups: usize) -> Vec<i16> {
        let (mut out, per_word) = (vec![0; rows * groups], 32 / self.bits);
        let words = words.as_chunks::<4>().0.chunks_exact(rows.div_ceil(per_word));
        for (group, words) in words.enumerate() {
            for (j, word) in words.iter().enumerate() {
                let word = u32::from_le_bytes(*word);
                for (i, awq_row) in AWQ_ORDER.into_iter().enumerate().take(per_word) {
                    let code = (word >> (i * self.bits) & ((1 << self.bits) - 1)) as i16;
                    let (row, zero) = match self.method {
                        Method::Gptq { less } => (j * per_word + i, code + less),
                        Method::Awq => (j * per_word + awq_row, code),
                    };
                    out[row * groups + group] = zero;
                }
            }
        }
        out
    }
}

/// Which of eight outputs each nibble of a word is of.
const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Sides of the squares that are turned at once: the words of a cache line.
const TILE: usize = 16;

/// Turns `[n, rows]` into `[rows, n]`.
fn to_rows<T: Copy + Default>(from: &[T], rows: usize) -> Vec<T> {
    columns_to_rows(from, rows, (0, 1, rows))
}

/// Columns `first`, `first + step`, … (`count` of them) of `[n, wide]` as rows `[count, n]`.
pub fn columns_to_rows<T: Copy + Default>(from: &[T], wide: usize, columns: (usize, usize, usize)) -> Vec<T> {
    let n = from.len() / wide.max(1);
    let mut out = vec![T::default(); n * columns.2];
    for (i, from) in from.chunks(TILE * wide.max(1)).enumerate() {
        turn(from, wide, columns, &mut out, n, i * TILE);
    }
    out
}

/// Writes columns of up to [`TILE`] rows `from: [_, wide]` to columns from `start` of `out: [count, n]`.
fn turn<T: Copy + Default>(
    from: &[T],
    wide: usize,
    (first, step, count): (usize, usize, usize),
    out: &mut [T],
    n: usize,
    start: usize,
) {
    for done in (0..count).step_by(TILE) {
        let width = TILE.min(count - done);
        // Whole cache lines are read, and then whole ones written.
        let mut tile = [[T::default(); TILE]; TILE];
        let high = from.len() / wide;
        for (i, from) in from.chunks_exact(wide).enumerate() {
            for (j, &v) in from[first + done * step..].iter().step_by(step).take(width).enumerate() {
                tile[j][i] = v;
            }
        }
        for (j, tile) in tile[..width].iter().enumerate() {
            out[(done + j) * n + start..][..high].copy_from_slice(&tile[..high]);
        }
    }
}

/// AWQ's words `[cols, rows / 8]` as words of eight codes of a row, `[rows, cols / 8]`.
fn awq_to_rows(words: &[[u8; 4]], rows: usize) -> Vec<[u8; 4]> {
    let wide = rows / 8;
    let n = words.len() / wide / 8;
    let mut out = vec![[0; 4]; n * rows];
    // As GPTQ has them: `[_, rows]`.
    let mut turned = vec![[0; 4]; TILE * rows];
    for (i, words) in words.chunks(TILE * 8 * wide).enumerate() {
        let high = words.len() / wide / 8;
        for (words, turned) in words.chunks_exact(8 * wide).zip(turned.chunks_exact_mut(rows)) {
            for (j, turned) in turned.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                let mut nibbles = std::array::from_fn(|k| u32::from_le_bytes(words[k * wide + j]));
                turn_nibbles(&mut nibbles);
                for (word, row) in nibbles.into_iter().zip(AWQ_ORDER) {
                    turned[row] = word.to_le_bytes();
                }
            }
        }
        turn(&turned[..high * rows], rows, (0, 1, rows), &mut out, n, i * TILE);
    }
    out
}

/// Swaps nibble `i` of word `j` with nibble `j` of word `i`, by halves, quarters and eighths of words.
fn turn_nibbles(words: &mut [u32; 8]) {
    for (distance, mask) in [(4, 0x0000_ffff), (2, 0x00ff_00ff), (1, 0x0f0f_0f0f)] {
        for i in (0..8).filter(|i| i & distance == 0) {
            let swap = (words[i] >> (4 * distance) ^ words[i + distance]) & mask;
            words[i + distance] ^= swap;
            words[i] ^= swap << (4 * distance);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turning_is_what_indices_say() {
        for (n, rows) in [(1, 1), (16, 16), (3, 17), (40, 24), (33, 8), (16, 129)] {
            let from: Vec<u16> = (0..n * rows).map(|i| i as u16).collect();
            let out = to_rows(&from, rows);
            for (i, j) in (0..n).flat_map(|i| (0..rows).map(move |j| (i, j))) {
                assert_eq!(out[j * n + i], from[i * rows + j], "[{n}, {rows}] [{i}, {j}]");
            }
        }
        assert!(to_rows::<u16>(&[], 0).is_empty());
        let from: Vec<u16> = (0..35 * 40).collect();
        for (first, step, count) in [(0, 2, 20), (1, 2, 20), (5, 1, 30), (39, 7, 1)] {
            let out = columns_to_rows(&from, 40, (first, step, count));
            for (i, j) in (0..35).flat_map(|i| (0..count).map(move |j| (i, j))) {
                assert_eq!(out[j * 35 + i], from[i * 40 + first + j * step]);
            }
        }
    }

    #[test]
    fn awq_words_become_rows() {
        for (rows, cols) in [(8, 8), (16, 136), (40, 256)] {
            let wide = rows / 8;
            let words: Vec<[u8; 4]> =
                (0..cols * wide).map(|i| (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()).collect();
            let out = awq_to_rows(&words, rows).into_flattened();
            for (n, k) in (0..rows).flat_map(|n| (0..cols).map(move |k| (n, k))) {
                let nibble = [0, 4, 1, 5, 2, 6, 3, 7][n % 8];
                let want = u32::from_le_bytes(words[k * wide + n / 8]) >> (4 * nibble) & 15;
                let got = out[n * cols / 2 + k / 2] >> (4 * (k % 2)) & 15;
                assert_eq!(got as u32, want, "[{n}, {k}]");
            }
        }
    }
}
