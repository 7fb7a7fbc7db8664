//! Making an item: reading its source, rounding it, and measuring what that cost.

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;
use rayon::prelude::*;
use serde_json::{Value, json};

use super::layout::{self, Sides};
use super::plan::{Item, Laid, What};
use crate::error::{Error, Result};
use crate::format::{Format, Matrix};
use crate::importance::Importance;
use crate::layer::Proj;
use crate::quantize::{Errors, difference, recode, recode_weighted};
use crate::source::WeightSource;

/// Rows of an item that are made together: all of them, or some of a matrix too large for that.
pub struct Made {
    /// The codes, or the bytes of a copy.
    pub codes: Bytes,
    pub sides: Sides,
    pub sums: Sums,
}

/// What is added up over the values of a tensor to tell its error.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Sums {
    pub values: u64,
    pub abs: f64,
    pub square: f64,
    pub abs_diff: f64,
    pub square_diff: f64,
}

impl Sums {
    pub fn add(&mut self, other: &Sums) {
        self.values += other.values;
        self.abs += other.abs;
        self.square += other.square;
        self.abs_diff += other.abs_diff;
        self.square_diff += other.square_diff;
    }

    /// In proportion to the values; infinite where zeros became something else.
    pub fn errors(&self) -> Errors {
        let ratio = |diff: f64, of: f64| if diff == 0.0 { 0.0 } else { diff / of };
        Errors {
            mean_abs_ratio: ratio(self.abs_diff, self.abs),
            rms_ratio: ratio(self.square_diff, self.square).sqrt(),
        }
    }

    /// As a journal keeps them, exactly.
    pub fn to_json(self) -> Value {
        let bits = [self.abs, self.square, self.abs_diff, self.square_diff].map(f64::to_bits);
        json!([self.values, bits[0], bits[1], bits[2], bits[3]])
    }

    /// What [`to_json`](Self::to_json) gave.
    pub fn from_json(json: &Value) -> Option<Self> {
        let number = |i: usize| json.get(i)?.as_u64();
        let float = |i: usize| number(i).map(f64::from_bits);
        Some(Sums {
            values: number(0)?,
            abs: float(1)?,
            square: float(2)?,
            abs_diff: float(3)?,
            square_diff: float(4)?,
        })
    }
}

/// Rows that may be cut off: what shares scales over rows, or words of zero points, stays together.
pub const STEP: usize = 128;

/// What all items are made from.
pub struct From<'a> {
    pub source: &'a dyn WeightSource,
    pub importance: Option<&'a Importance>,
}

/// Makes rows of an item. The same bytes come out whichever rows are made together, on any number of threads.
pub fn make(from: &From<'_>, item: &Item, rows: Range<usize>) -> Result<Made> {
    let source = from.source;
    if let What::Bytes(name) = &item.what {
        let stored = source.stored(name).filter(|s| s.bytes.len() as u64 == item.bytes);
        let stored = stored.ok_or_else(|| Error::tensor(source.path(), name, "is not what it was when this began"))?;
        return Ok(Made { codes: stored.bytes.slice(rows), sides: Sides::default(), sums: Sums::default() });
    }
    let fail = |what: String| {
        let (file, name) = match &item.what {
            What::Expert(layer, expert, proj) => source.tensor_name(*layer, *expert, *proj),
            _ => (source.path().to_owned(), item.name.clone()),
        };
        Error::tensor(file, name, what)
    };
    // Of `all` rows of a matrix, those that are asked for.
    let part = |whole: Matrix, all: usize, rows: Range<usize>| {
        if (whole.rows(), whole.cols()) != (all, item.cols) {
            let found = (whole.rows(), whole.cols());
            return Err(fail(format!("is {found:?}, but ({all}, {}) was announced", item.cols)));
        }
        if rows.len() == all { Ok(whole) } else { whole.select_rows(rows.start, 1, rows.len()).map_err(fail) }
    };
    let recoded = |part: &Matrix, of: Option<(usize, usize, Proj)>| {
        let importance = of.and_then(|(layer, expert, proj)| from.importance?.of(layer, expert, proj));
        let made = recode_weighted(part, item.format, importance).map_err(fail)?;
        let sums = if part.format() == item.format { Sums::default() } else { compare(part, &made) };
        Ok::<_, Error>((made, sums))
    };
    let (made, sums) = match item.what {
        What::Both(layer, expert) => {
            let half = rows.start / 2..rows.end / 2;
            let one = |proj: Proj| {
                let part = part(source.matrix(layer, expert, proj)?, item.rows / 2, half.clone())?;
                recoded(&part, Some((layer, expert, proj)))
            };
            let ((gate, mut sums), (up, of_up)) = (one(Proj::Gate)?, one(Proj::Up)?);
            sums.add(&of_up);
            (layout::in_turn(&gate, &up).map_err(fail)?, sums)
        }
        _ => {
            let of = match item.what {
                What::Expert(layer, expert, proj) => Some((layer, expert, proj)),
                _ => None,
            };
            recoded(&part(read(source, &item.what)?, item.rows, rows)?, of)?
        }
    };
    let sides = match item.laid {
        Laid::CodesAndSides | Laid::Scales => Sides::of(&made, item.scales).map_err(fail)?,
        Laid::Codes | Laid::InputsFirst => Sides::default(),
    };
    if item.laid == Laid::CodesAndSides
        && let Some(zero) = layout::zero_point_beyond_codes(&made)
    {
        return Err(fail(format!("has a zero point of {zero}, which packed words cannot hold; choose another format")));
    }
    Ok(match item.laid {
        Laid::Scales => Made { codes: sides.scales.into(), sides: Sides::default(), sums: Sums::default() },
        Laid::InputsFirst => Made { codes: layout::inputs_first(&made), sides, sums },
        Laid::Codes | Laid::CodesAndSides => Made { codes: layout::codes(&made), sides, sums },
    })
}

/// Lets go of the pages of what an item was made of.
pub fn release(source: &dyn WeightSource, item: &Item) {
    match &item.what {
        // All three projections at once: with the last one.
        What::Expert(layer, expert, _) | What::Both(layer, expert) => source.release(*layer, *expert),
        What::Bias(..) | What::BothBiases(..) => {}
        What::Tensor(name) | What::Bytes(name) | What::Heads { from: name, .. } => source.release_tensor(name),
        What::Keys { from, .. } | What::Values { from, .. } => source.release_tensor(from),
        What::KeysAndValues { keys, values, .. } => {
            source.release_tensor(keys);
            source.release_tensor(values);
        }
    }
}

fn read(source: &dyn WeightSource, what: &What) -> Result<Matrix> {
    let numbers = |rows: usize, cols: usize, values: Cow<'_, [f32]>| {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Matrix::new(Format::F32, rows, cols, bytes.into(), None).map_err(|e| Error::file(source.path(), e))
    };
    let bias = |layer: usize, expert: usize, proj: Proj| {
        let bias = source.bias(layer, expert, proj)?;
        bias.ok_or_else(|| Error::file(source.path(), format!("layer {layer}: its biases are gone")))
    };
    match what {
        What::Expert(layer, expert, proj) => source.matrix(*layer, *expert, *proj),
        What::Both(layer, expert) => source.matrix(*layer, *expert, Proj::Gate),
        What::Bias(layer, expert, proj) => {
            let bias = bias(*layer, *expert, *proj)?;
            numbers(1, bias.len(), bias.into())
        }
        What::BothBiases(layer, expert) => {
            let (gate, up) = (bias(*layer, *expert, Proj::Gate)?, bias(*layer, *expert, Proj::Up)?);
            let both: Vec<f32> = gate.into_iter().zip(up).flat_map(|(g, u)| [g, u]).collect();
            numbers(1, both.len(), both.into())
        }
        What::Heads { from, heads, in_turn } => {
            let m = source.tensor(from)?;
            // Of a vector, each number is a row.
            let (rows, width) = if m.rows() == 1 { (m.cols(), 1) } else { (m.rows(), m.cols()) };
            let all = m.decode();
            let half = rows / heads / 2;
            let order = (0..rows).map(|i| {
                let (head, at) = (i / (2 * half), i % (2 * half));
                let (first, second) = if *in_turn { (at / 2, at % 2 * half) } else { (at % half * 2, at / half) };
                head * 2 * half + first + second
            });
            let values: Vec<f32> = order.flat_map(|row| &all[row * width..][..width]).copied().collect();
            let moved = numbers(m.rows(), m.cols(), values.into())?;
            // Numbers that were read from a plain format go back into it as they were.
            let plain = matches!(m.format(), Format::F32 | Format::F16 | Format::Bf16);
            match plain {
                true => recode(&moved, m.format()).map_err(|e| Error::tensor(source.path(), from, e)),
                false => Ok(moved),
            }
        }
        What::Tensor(name) | What::Bytes(name) => source.tensor(name),
        What::Keys { from, nope, value } => {
            let m = source.tensor(from)?;
            let (narrow, all) = (m.cols(), m.decode());
            let heads = all.chunks_exact((nope + value) * narrow);
            let keys: Vec<f32> = heads
                .flat_map(|head| (0..narrow).flat_map(move |l| (0..*nope).map(move |n| head[n * narrow + l])))
                .collect();
            numbers(keys.len() / nope, *nope, keys.into())
        }
        What::Values { from, nope, value } => {
            let m = source.tensor(from)?;
            let (narrow, all) = (m.cols(), m.decode());
            let heads = all.chunks_exact((nope + value) * narrow);
            let values: Vec<f32> = heads.flat_map(|head| &head[nope * narrow..]).copied().collect();
            numbers(values.len() / narrow, narrow, values.into())
        }
        What::KeysAndValues { keys, values, heads } => {
            let (k, v) = (source.tensor(keys)?, source.tensor(values)?);
            let (nope, narrow, value) = (k.cols(), k.rows() / heads, v.rows() / heads);
            let (k, v) = (k.decode(), v.decode());
            let mut all = Vec::with_capacity(k.len() + v.len());
            for (k, v) in k.chunks_exact(nope * narrow).zip(v.chunks_exact(value * narrow)) {
                all.extend((0..nope).flat_map(|n| (0..narrow).map(move |l| k[l * nope + n])));
                all.extend(v);
            }
            numbers(heads * (nope + value), narrow, all.into())
        }
    }
}

/// Adds up over all values how far they are from what they were. Bands are added in their order: the same numbers come out on any
/// number of threads.
fn compare(before: &Matrix, after: &Matrix) -> Sums {
    const BAND: usize = 16;
    let cols = before.cols();
    let bands: Vec<Sums> = (0..before.rows().div_ceil(BAND))
        .into_par_iter()
        .map_init(
            || (vec![0.0; cols], vec![0.0; cols]),
            |(b, a), band| {
                let mut sums = Sums::default();
                for row in band * BAND..before.rows().min((band + 1) * BAND) {
                    before.decode_row(row, b);
                    after.decode_row(row, a);
                    let [abs, square, abs_diff, square_diff] = difference(b, a);
                    sums.add(&Sums { values: b.len() as u64, abs, square, abs_diff, square_diff });
                }
                sums
            },
        )
        .collect();
    let mut sums = Sums::default();
    bands.iter().for_each(|band| sums.add(band));
    sums
}
