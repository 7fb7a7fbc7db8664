//! From how many rows of an expert on tiles are faster.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use kt_core::cpu::input::Inputs;
use kt_core::cpu::kernel::{Kernel, Outputs, Scratch, Weights};
use kt_core::cpu::memory::AlignedBytes;
use kt_core::{Error, Format, Group, Unsupported};

use crate::Amx;

/// From how many rows of an expert on its products run on tiles.
///
/// Written and read as `int8=2 many=32 bf16=2 fp8=2`, so that what [`Amx::measure`] found may be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Crossover {
    /// For INT8 per channel, and INT4, which is on tiles from eight rows on at least; their products have the bits of VNNI: a matter of speed. `usize::MAX`: never.
    pub int8: usize,
    /// For all other weights of integers, and MXFP8: from so many rows on, on average over the experts of a layer, a call multiplies them as BF16 numbers with BF16 inputs. `usize::MAX`: never. What a token gives then differs between calls of
    /// few and of many tokens, within the bounds of both.
    pub many: usize,
    /// For BF16 weights; these are on tiles from 9 rows on in any case. A matter of speed: no bit depends on it.
    pub bf16: usize,
    /// For FP8, and MXFP8 in calls of few rows; as `bf16`.
    pub fp8: usize,
}

/// As measured on Emerald Rapids; see `PERFORMANCE.md`.
impl Default for Crossover {
    fn default() -> Self {
        Crossover { int8: 2, many: 32, bf16: 2, fp8: 2 }
    }
}

/// As a number of rows.
const NEVER: usize = usize::MAX;

impl fmt::Display for Crossover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |rows| if rows == NEVER { "never".into() } else { format!("{rows}") };
        let [int8, many, bf16, fp8] = [self.int8, self.many, self.bf16, self.fp8].map(text);
        write!(f, "int8={int8} many={many} bf16={bf16} fp8={fp8}")
    }
}

impl FromStr for Crossover {
    type Err = Unsupported;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let wrong = || {
            let as_in = Self::default();
            Unsupported::new(format!("AMX crossover `{s}`: write four numbers of rows or `never`, as in `{as_in}`"))
        };
        let mut parts = s.split_whitespace();
        let mut number = |name: &str| {
            let value = parts.next().and_then(|p| p.strip_prefix(name)).and_then(|p| p.strip_prefix('='));
            value.and_then(|v| if v == "never" { Some(NEVER) } else { v.parse().ok() }).ok_or_else(wrong)
        };
        let of = Crossover { int8: number("int8")?, many: number("many")?, bf16: number("bf16")?, fp8: number("fp8")? };
        if parts.next().is_some() { Err(wrong()) } else { Ok(of) }
    }
}

/// Numbers of rows that are tried.
const ROWS: [usize; 12] = [1, 2, 4, 6, 8, 9, 12, 16, 24, 32, 48, 64];

impl Amx {
    /// Measures on one thread, with 16 to 32 MiB of weights, where tiles begin to be faster than what they replace: INT8 per channel, INT4 in groups of 32
    /// for all that are BF16 numbers for many rows, BF16, and FP8 per channel. Takes about a second.
    ///
    /// # Errors
    /// There is no memory for the weights.
    pub fn measure(self) -> Result<Crossover, Error> {
        self.measure_on(8192, 4096)
    }

    /// As [`Amx::measure`], with matrices of this shape.
    pub(crate) fn measure_on(self, outputs: usize, cols: usize) -> Result<Crossover, Error> {
        let of = |format, [tiles, vectors]: [Amx; 2], most: usize| -> Result<Option<usize>, Error> {
            let bytes = self.packed_bytes(format, outputs, cols).unwrap_or(0);
            let mut packed = kt_core::cpu::memory::zeroed_pages(bytes, Default::default())?;
            // Pages that were never written may all be the same one.
            packed.chunks_mut(4096).for_each(|page| page[0] = 1);
            let packed = packed
                .make_read_only()
                .map_err(|source| Error::Io { path: "(weights to measure with)".into(), source })?;
            let weights = Weights::packed(format, outputs, cols, bytes::Bytes::from_owner(packed).slice(..bytes));
            Ok(first_of_a_run(ROWS.into_iter().filter(|&rows| rows <= most), |rows| {
                let time = |kernel| time(kernel, &weights, rows);
                // The better of two, in turns.
                let [a, b, c, d] = [time(tiles), time(vectors), time(tiles), time(vectors)];
                a.min(c) < b.min(d)
            }))
        };
        let streams = |rows| self.with_crossover(Crossover { int8: rows, many: NEVER, bf16: rows, fp8: rows });
        Ok(Crossover {
            int8: of(Format::Int8(Group::Row), [streams(1), streams(NEVER)], usize::MAX)?.unwrap_or(NEVER),
            many: of(Format::Int4(Group::Of(32)), [self.with_many(), streams(1)], usize::MAX)?.unwrap_or(NEVER),
            bf16: of(Format::Bf16, [streams(1), streams(NEVER)], STREAMED)?.unwrap_or(STREAMED + 1),
            fp8: of(Format::Fp8Channel, [streams(1), streams(NEVER)], STREAMED)?.unwrap_or(STREAMED + 1),
        })
    }
}

/// Most rows of bf16 products that are not on tiles.
const STREAMED: usize = 8;

/// The first of the numbers from which on `better` holds for all, if there is one.
fn first_of_a_run(numbers: impl IntoIterator<Item = usize>, better: impl Fn(usize) -> bool) -> Option<usize> {
    let mut first = None;
    for n in numbers {
        first = if better(n) { first.or(Some(n)) } else { None };
    }
    first
}

/// The time of a product of all weights with so many rows.
fn time(kernel: Amx, weights: &Weights, rows: usize) -> Duration {
    const WIDTH: usize = 128;
    let (outputs, cols) = (weights.rows(), weights.cols());
    let (layout, _) = kernel.accepts(weights.format(), outputs, cols).expect("a format of this kernel");
    let layout = kernel.inputs_of_rows(layout);
    // On boundaries as in layers: tile units load rows that straddle lines at a fraction of the speed.
    let (mut memory, mut out) = (AlignedBytes::default(), AlignedBytes::default());
    let x = memory.get(layout.bytes(rows, cols));
    x.fill(0);
    let x = Inputs::new(layout, rows, cols, x);
    let out = out.floats(rows * WIDTH);
    let mut scratch = Scratch::default();
    let start = Instant::now();
    for first in (0..outputs).step_by(WIDTH) {
        let range = first..outputs.min(first + WIDTH);
        let out = &mut out[..rows * range.len()];
        kernel.product(Outputs::new(weights, range), x, 0..rows, out, &mut scratch);
    }
    start.elapsed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crossover_is_read_as_it_is_written() {
        let never = Crossover { int8: NEVER, many: NEVER, bf16: NEVER, fp8: NEVER };
        for of in [Crossover { int8: 3, many: 40, bf16: 1, fp8: 2 }, Crossover::default(), never] {
            assert_eq!(of.to_string().parse::<Crossover>().unwrap(), of);
        }
        let default = Crossover::default().to_string();
        assert_eq!(default, "int8=2 many=32 bf16=2 fp8=2");
        for wrong in [
            "",
            "int8=1",
            "int8=1 many=1 bf16=1",
            "int8=1 many=x bf16=1 fp8=1",
            "bf16=1 many=1 int8=1 fp8=1",
            "int8=1 many=1 bf16=1 fp8=1 more=1",
            "int8=1 many=-1 bf16=1 fp8=1",
            "many=32 bf16=5 fp8=7",
            "int8=2 groups=never bf16=5 fp8=7",
        ] {
            let why = wrong.parse::<Crossover>().unwrap_err();
            assert!(why.0.contains(&format!("`{wrong}`")) && why.0.contains(&default), "{why}");
        }
    }

    #[test]
    fn a_crossover_is_where_tiles_begin_to_win_for_good() {
        let first = |wins: &[usize]| first_of_a_run([1, 2, 4, 8], |n| wins.contains(&n));
        assert_eq!(first(&[1, 2, 4, 8]), Some(1));
        assert_eq!(first(&[2, 4, 8]), Some(2));
        assert_eq!(first(&[1, 4, 8]), Some(4));
        assert_eq!(first(&[1, 2, 4]), None);
        assert_eq!(first(&[]), None);
    }
}
