//! The tile products against those of kt-avx512 and kt-llamafile, and the suite that every backend passes; where there is no AMX, by
//! the emulator, on any CPU with AVX-512 BF16.

use std::ops::Range;

use kt_core::cpu::input::InputLayout;
use kt_core::cpu::kernel::{Kernel, Weights};
use kt_core::cpu::tier::Tier;
use kt_core::format::ALL;
use kt_core::source::WeightSource;
use kt_core::source::synthetic::SyntheticSource;
use kt_core::testing::{self, Random, Rows, weights};
use kt_core::{Format, Group, Matrix, Proj, ScaleType, Unsupported};

use crate::unit::Unit;
use crate::{Amx, Crossover};

/// Everything on tiles.
const TILES: Crossover = Crossover::all(1);
/// As little as can be.
const VECTORS: Crossover = Crossover::all(usize::MAX);

/// The kernel by the CPU's own tiles or by the emulator.
fn kernel() -> Result<Amx, Unsupported> {
    Amx::with_unit(Unit::detect().unwrap_or_else(|_| Unit::emulated()))
}

/// [`kernel`], or it is said that there is none.
fn kernel_or_skip() -> Option<Amx> {
    kernel().map_err(|why| eprintln!("skipped: {why}")).ok()
}

fn matrix(format: Format, outputs: usize, cols: usize) -> Option<Matrix> {
    format.row_bytes(cols).and_then(|_| format.row_bytes(outputs)).ok()?;
    let source = SyntheticSource::builder().hidden(cols).intermediate(outputs).experts(1).top_k(1).layers(1);
    let source = source.format(format).seed(3).build().expect("a source");
    Some(source.matrix(0, 0, Proj::Gate).expect("a matrix"))
}

fn inputs(n: usize, cols: usize) -> Vec<f32> {
    let mut random = Random(n as u64);
    (0..n * cols).map(|_| random.normal()).collect()
}

/// Bits of a product.
fn product(kernel: impl Kernel, w: &Weights, outputs: Range<usize>, x: &Rows, rows: Range<u32>) -> Vec<u32> {
    let rows: Vec<u32> = rows.collect();
    testing::product(kernel, w, outputs, x, &rows).into_iter().map(f32::to_bits).collect()
}

/// Every format with the shapes it can have: no multiples of tiles, blocks or what is cached, and some that are.
fn cases() -> impl Iterator<Item = (Format, Matrix)> {
    let formats = ALL.into_iter().chain([Format::Int4(Group::Of(96)), Format::Int8(Group::Of(96))]);
    formats.flat_map(|format| {
        [(48, 256), (33, 768), (96, 160), (16, 96), (80, 1536), (17, 3072), (256, 512), (256, 2304)]
            .into_iter()
            .filter_map(move |(outputs, cols)| Some((format, matrix(format, outputs, cols)?)))
    })
}

#[test]
fn int8_products_have_the_bits_of_vnni() {
    let Some(kernel) = kernel_or_skip() else { return };
    let mut formats = Vec::new();
    for (format, matrix) in cases() {
        let (outputs, cols) = (matrix.rows(), matrix.cols());
        let Ok((layout @ InputLayout::Int8 { .. }, _)) = kernel.accepts(format, outputs, cols) else { continue };
        let w = weights(kernel, &matrix);
        let in_place = Some(weights(kernel.in_place(), &matrix)).filter(|w| w.matrix().is_some());
        let x = Rows::new(kernel, layout, &inputs(70, cols), cols);
        for (rows, range) in [
            (0..70, 0..outputs),
            (3..36, 0..outputs),
            (1..2, 0..outputs),
            (5..21, (outputs - 1) / 64 * 64..outputs - 1),
        ] {
            let want = product(kernel.with_crossover(VECTORS), &w, range.clone(), &x, rows.clone());
            assert!(want.iter().any(|&v| v != 0), "{format}: nothing but zeros");
            for w in [Some(&w), in_place.as_ref()].into_iter().flatten() {
                let kernel = if w.matrix().is_some() { kernel.in_place() } else { kernel };
                let got = product(kernel.with_crossover(TILES), w, range.clone(), &x, rows.clone());
                let what = if w.matrix().is_some() { "in place, " } else { "" };
                assert!(got == want, "{format} {what}{outputs}x{cols}, rows {rows:?}, outputs {range:?}");
            }
        }
        if formats.last() != Some(&format) {
            formats.push(format);
        }
    }
    assert!(formats.len() > 30, "{formats:?}");
}

/// Numbers below the first may differ by the second: what is below 2^-126, also in sums, tiles take for zero, and vectors do not.
const TINY: (f32, f32) = (1e-30, 1e-35);

#[test]
fn bf16_products_have_the_same_bits_for_any_number_of_rows() {
    let Some(kernel) = kernel_or_skip() else { return };
    let mut formats = Vec::new();
    for (format, matrix) in cases() {
        let (outputs, cols) = (matrix.rows(), matrix.cols());
        let Ok((layout @ InputLayout::Bf16, _)) = kernel.accepts(format, outputs, cols) else { continue };
        let w = weights(kernel, &matrix);
        let mut x = inputs(40, cols);
        // Of any size, and not numbers.
        let sizes = [0, 46, 80, 110, -20, -80, -110, -118, -122, -126, -130];
        for (row, x) in x.chunks_exact_mut(cols).take(33).enumerate() {
            x.iter_mut().for_each(|x| *x = (*x as f64 * 2f64.powi(sizes[row % sizes.len()])) as f32);
        }
        x[34 * cols + 5] = f32::INFINITY;
        x[35 * cols + 8] = f32::NAN;
        let x = Rows::new(kernel, layout, &x, cols);
        let all = product(kernel.with_crossover(TILES), &w, 0..outputs, &x, 0..40);
        for (n, crossover) in [(1, VECTORS), (3, VECTORS), (8, VECTORS), (9, VECTORS), (1, TILES), (17, TILES)] {
            for first in (0..=40 - n).step_by(n as usize) {
                let got = product(kernel.with_crossover(crossover), &w, 0..outputs, &x, first..first + n);
                for (i, (&got, &want)) in got.iter().zip(&all[first as usize * outputs..]).enumerate() {
                    // Not a number is one for all; which one is the instructions' affair. Next to the smallest normal number tiles round to zero.
                    let [a, b] = [got, want].map(f32::from_bits);
                    let tiny = [a, b].iter().all(|v| v.abs() < TINY.0) && (a - b).abs() < TINY.1;
                    assert!(
                        got == want || tiny || a.is_nan() && b.is_nan(),
                        "{format} {outputs}x{cols}, {n} rows from {first}, {crossover}: number {i}: {a} {b}"
                    );
                }
            }
        }
        for row in 0..40 {
            let finite = all[row * outputs..][..outputs].iter().all(|&v| f32::from_bits(v).is_finite());
            assert_eq!(finite, row != 34 && row != 35, "{format}: row {row}");
        }
        if formats.last() != Some(&format) {
            formats.push(format);
        }
    }
    assert_eq!(formats.len(), 4, "{formats:?}");
}

#[test]
fn bf16_products_are_those_of_the_decoded_weights() {
    let Some(kernel) = kernel_or_skip() else { return };
    for (format, matrix) in cases() {
        let (outputs, cols) = (matrix.rows(), matrix.cols());
        let Ok((layout @ InputLayout::Bf16, _)) = kernel.accepts(format, outputs, cols) else { continue };
        let x = Rows::new(kernel, layout, &inputs(19, cols), cols);
        let got = product(kernel.with_crossover(TILES), &weights(kernel, &matrix), 0..outputs, &x, 0..19);
        let mut decoded = vec![0f32; cols];
        let (mut difference, mut size) = (0f64, 0f64);
        for o in 0..outputs {
            matrix.decode_row(o, &mut decoded);
            for row in 0..19 {
                let want: f64 = decoded.iter().enumerate().map(|(k, &w)| w as f64 * x.get(row, k)).sum();
                difference += (want - f32::from_bits(got[row * outputs + o]) as f64).abs();
                size += want.abs();
            }
        }
        assert!(difference <= 1e-6 * size, "{format} {outputs}x{cols}: {:.1e}", difference / size);
    }
}

#[test]
fn extreme_codes_do_not_saturate() {
    let Some(kernel) = kernel_or_skip() else { return };
    // Weights and inputs at the ends of their ranges: the largest sums that can be.
    let cols = 512;
    for (code, value) in [(0x80u8, -128.0f32), (0x7f, 127.0)] {
        for sign in [-127f32, 127.0] {
            let codes = vec![code; 16 * cols];
            let scales = 1f32.to_le_bytes().repeat(16);
            let format = Format::Int8(Group::Row);
            let scales = Some((scales.into(), ScaleType::F32));
            let matrix = Matrix::new(format, 16, cols, codes.into(), scales).unwrap();
            let (layout, _) = kernel.accepts(format, 16, cols).unwrap();
            let x = Rows::new(kernel, layout, &vec![sign; cols * 20], cols);
            let got = product(kernel.with_crossover(TILES), &weights(kernel, &matrix), 0..16, &x, 0..20);
            let want = sign * value * cols as f32;
            assert!(got.iter().all(|&v| f32::from_bits(v) == want), "{code:#x} {sign}");
        }
    }
}

#[test]
fn what_is_declined_has_a_reason() {
    let why = Amx::detect(Tier::Avx512Bf16).unwrap_err();
    assert!(why.0.contains("avx512bf16") && why.0.contains("amx"), "{why}");
    if let Err(refusal) = kt_core::cpu::amx::permission() {
        let why = Amx::detect(Tier::Amx).unwrap_err();
        assert_eq!(why.0, refusal.to_string());
    }
    let Some(kernel) = kernel_or_skip() else { return };
    for format in [Format::F32, Format::F16, Format::Int4(Group::Of(48))] {
        let why = kernel.accepts(format, 64, 768).unwrap_err();
        assert!(why.0.contains(&format.to_string()), "{why}");
    }
}

#[test]
fn a_crossover_can_be_measured() {
    let Some(kernel) = kernel_or_skip() else { return };
    let found = kernel.measure_on(64, 128).unwrap();
    assert!(found.int8 > 0 && found.groups > 0 && (1..=9).contains(&found.bf16), "{found}");
    assert_eq!(kernel.with_crossover(found).crossover(), found);
}

#[test]
fn conformance() {
    // Whatever tier the suite asks for, this one answers; it is tested once.
    kt_core::testing::conformance(|_| kernel().map(Amx::into_backend));
}

#[test]
fn pieces_of_a_matrix_are_packed_as_the_whole() {
    let Some(kernel) = kernel_or_skip() else { return };
    kt_core::testing::pieces_pack_as_the_whole(kernel);
}
