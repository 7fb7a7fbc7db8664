//! The tile products against those of kt-avx512 and kt-llamafile, and the suite that every backend passes; where there is no AMX, by
//! the emulator, on any CPU with AVX-512 BF16.

use std::ops::Range;

use kt_avx512::Avx;
use kt_core::cpu::input::InputLayout;
use kt_core::cpu::kernel::{Kernel, Weights};
use kt_core::cpu::tier::Tier;
use kt_core::format::ALL;
use kt_core::source::WeightSource;
use kt_core::source::synthetic::SyntheticSource;
use kt_core::testing::{self, Random, Rows, layouts, weights};
use kt_core::{Format, Group, Matrix, Proj, ScaleType, Unsupported};
use kt_llamafile::Llamafile;

use crate::unit::Unit;
use crate::{Amx, Crossover};

/// As much on tiles as can be, in calls of few tokens.
const TILES: Crossover = Crossover { int8: 1, many: usize::MAX, bf16: 1, fp8: 1 };
/// As little as can be.
const VECTORS: Crossover = Crossover { int8: usize::MAX, many: usize::MAX, bf16: usize::MAX, fp8: usize::MAX };

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
fn few_rows_of_integers_have_the_bits_of_vnni() {
    let Some(kernel) = kernel_or_skip() else { return };
    let (avx, llamafile) = (Avx::detect(Tier::Avx512Bf16).unwrap(), Llamafile::detect(Tier::Avx512Bf16).unwrap());
    for format in [Format::Int8(Group::Of(32)), Format::Int4(Group::Of(32)), Format::Q4K] {
        let matrix = matrix(format, 256, 256).unwrap();
        let (layout, _) = kernel.accepts(format, 256, 256).unwrap();
        let x = Rows::new(kernel, layout, &inputs(20, 256), 256);
        let got = product(kernel, &weights(kernel, &matrix), 0..256, &x, 0..20);
        let want = match format {
            Format::Q4K => product(llamafile, &weights(llamafile, &matrix), 0..256, &x, 0..20),
            _ => product(avx, &weights(avx, &matrix), 0..256, &x, 0..20),
        };
        assert!(got == want && want.iter().any(|&v| v != 0), "{format}");
    }
}

#[test]
fn int8_products_have_the_bits_of_vnni() {
    let Some(kernel) = kernel_or_skip() else { return };
    let mut formats = Vec::new();
    for (format, matrix) in cases() {
        let (outputs, cols) = (matrix.rows(), matrix.cols());
        if !Amx::has_int8_tiles(format) {
            continue;
        }
        let (layout, _) = kernel.accepts(format, outputs, cols).expect("accepted");
        assert_eq!(kernel.with_many().accepts(format, outputs, cols).unwrap().0, layout, "{format}");
        let w = weights(kernel, &matrix);
        for layout in layouts(kernel, format, outputs, cols) {
            let x = Rows::new(kernel, layout, &inputs(70, cols), cols);
            for (rows, range) in [
                (0..70, 0..outputs),
                (3..36, 0..outputs),
                (1..2, 0..outputs),
                (5..21, (outputs - 1) / 64 * 64..outputs - 1),
            ] {
                let want = product(kernel.with_crossover(VECTORS), &w, range.clone(), &x, rows.clone());
                assert!(want.iter().any(|&v| v != 0), "{format}: nothing but zeros");
                for kernel in [kernel, kernel.with_many()] {
                    let got = product(kernel.with_crossover(TILES), &w, range.clone(), &x, rows.clone());
                    assert!(got == want, "{format} {outputs}x{cols}, rows {rows:?}, outputs {range:?}");
                }
            }
        }
        formats.push(format);
    }
    for format in [Format::Int8(Group::Row), Format::Int8Offset(Group::Row), Format::Int4(Group::Row)] {
        assert!(formats.contains(&format), "{format} is not on tiles of int8");
    }
}

#[test]
fn extreme_codes_do_not_saturate() {
    let Some(kernel) = kernel_or_skip() else { return };
    // Weights and inputs at the ends of their ranges: the largest sums that can be.
    let cols = 512;
    let (int8, int4) = (Format::Int8(Group::Row), Format::Int4(Group::Row));
    for (format, code, value) in [(int8, 0x80u8, -128.0f32), (int8, 0x7f, 127.0), (int4, 0x00, -8.0), (int4, 0xff, 7.0)]
    {
        for sign in [-127f32, 127.0] {
            let codes = vec![code; 16 * format.row_bytes(cols).unwrap()];
            let scales = 1f32.to_le_bytes().repeat(16);
            let scales = Some((scales.into(), ScaleType::F32));
            let matrix = Matrix::new(format, 16, cols, codes.into(), scales).unwrap();
            for layout in layouts(kernel, format, 16, cols) {
                let x = Rows::new(kernel, layout, &vec![sign; cols * 20], cols);
                let got = product(kernel.with_crossover(TILES), &weights(kernel, &matrix), 0..16, &x, 0..20);
                let want = sign * value * cols as f32;
                assert!(got.iter().all(|&v| f32::from_bits(v) == want), "{format} {code:#x} {sign}");
            }
        }
    }
}

/// The kernel for many rows, and its inputs of formats that it has other ones of, or other weights, than that for few.
fn many(kernel: Amx, matrix: &Matrix) -> Option<(Amx, InputLayout)> {
    let (format, outputs, cols) = (matrix.format(), matrix.rows(), matrix.cols());
    let (_, many) = kernel.for_many()?;
    let (few, _) = kernel.accepts(format, outputs, cols).ok()?;
    let (layout, _) = many.accepts(format, outputs, cols).ok()?;
    let exact = matches!(format, Format::Bf16 | Format::Fp8Channel | Format::Fp8Block);
    (layout == InputLayout::Bf16 && (few != layout || !exact)).then_some((many, layout))
}

#[test]
fn many_rows_are_products_of_the_decoded_weights_rounded_to_bf16() {
    let Some(kernel) = kernel_or_skip() else { return };
    let mut formats = Vec::new();
    for (format, matrix) in cases() {
        let (outputs, cols) = (matrix.rows(), matrix.cols());
        let Some((kernel, layout)) = many(kernel, &matrix) else { continue };
        let w = weights(kernel, &matrix);
        // More rows go over parts of a piece; they take long where tiles are emulated.
        let n = if outputs < 48 && cols > 512 { 100 } else { 70 };
        let x = Rows::new(kernel, layout, &inputs(n, cols), cols);
        let all = product(kernel, &w, 0..outputs, &x, 0..n as u32);
        let mut decoded = vec![0f32; cols];
        let (mut difference, mut size) = (0f64, 0f64);
        for o in 0..outputs {
            matrix.decode_row(o, &mut decoded);
            for row in (0..n).step_by(3) {
                let (mut want, mut most) = (0f64, 0f64);
                for (k, &w) in decoded.iter().enumerate() {
                    let product = w as f64 * x.get(row, k);
                    want += product;
                    most += product.abs();
                }
                let got = f32::from_bits(all[row * outputs + o]) as f64;
                // A BF16 number is off by 2^-9 of itself at most; scales of packed weights and F32 sums by less.
                assert!(
                    (got - want).abs() <= 1.2 / 512.0 * most,
                    "{format} {outputs}x{cols}, row {row}, output {o}: {got} {want}"
                );
                difference += (got - want).abs();
                size += want.abs();
            }
        }
        assert!(difference <= 0.004 * size, "{format} {outputs}x{cols}: {:.2e}", difference / size);
        for (first, end, outputs_of) in [
            (0, 1, 0..outputs),
            (3, 36, 0..outputs),
            (5, 21, (outputs - 1) / 64 * 64..outputs - 1),
            (0, 33, 0..outputs),
        ] {
            let got = product(kernel, &w, outputs_of.clone(), &x, first..end);
            let want = (first..end).flat_map(|row| &all[row as usize * outputs..][outputs_of.clone()]);
            assert!(got.iter().eq(want), "{format} {outputs}x{cols}, rows {first}..{end}, outputs {outputs_of:?}");
        }
        if formats.last() != Some(&format) {
            formats.push(format);
        }
    }
    assert!(formats.len() > 30, "{formats:?}");
}

#[test]
fn what_is_no_number_stays_in_its_row_and_output() {
    let Some(kernel) = kernel_or_skip() else { return };
    let (outputs, cols) = (32, 256);
    // An F16 scale whose bits are all ones is one of output 3; another one is infinite.
    for format in [Format::Q8_0, Format::Q4_0, Format::Q4_1, Format::Q5_1, Format::Iq4Nl] {
        let from = matrix(format, outputs, cols).unwrap();
        let row_bytes = format.row_bytes(cols).unwrap();
        let mut bytes: Vec<u8> = (0..outputs).flat_map(|o| from.row(o).to_vec()).collect();
        bytes[3 * row_bytes..][..2].copy_from_slice(&[0xff, 0x7f]);
        bytes[9 * row_bytes..][..2].copy_from_slice(&[0xff, 0xff]);
        let matrix = Matrix::new(format, outputs, cols, bytes.into(), None).unwrap();
        let (kernel, layout) = many(kernel, &matrix).unwrap();
        let mut x = inputs(20, cols);
        x[7 * cols + 100] = f32::NAN;
        x[8 * cols + 200] = f32::INFINITY;
        let x = Rows::new(kernel, layout, &x, cols);
        let got = product(kernel, &weights(kernel, &matrix), 0..outputs, &x, 0..20);
        for (i, v) in got.into_iter().map(f32::from_bits).enumerate() {
            let (row, o) = (i / outputs, i % outputs);
            assert_eq!(v.is_finite(), o != 3 && o != 9 && row != 7 && row != 8, "{format}: row {row}, output {o}: {v}");
        }
    }
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
fn rows_of_several_passes_have_the_bits_of_few() {
    let Some(kernel) = kernel_or_skip() else { return };
    let n = 300;
    let small = [Format::Bf16, Format::Fp8Block, Format::Fp8Channel, Format::Mxfp8];
    let integers = [Format::Int8(Group::Row), Format::Int4(Group::Row)];
    let small = small.into_iter().chain(integers).map(|format| (format, 96, 384));
    // In parts of a piece, the last of which has fewer blocks, and with outputs that are no whole panels.
    for (format, outputs, cols) in small.chain([(Format::Bf16, 40, 1280)]) {
        let matrix = matrix(format, outputs, cols).unwrap();
        let (layout, _) = kernel.accepts(format, outputs, cols).unwrap();
        let (w, x) = (weights(kernel, &matrix), Rows::new(kernel, layout, &inputs(n as usize, cols), cols));
        let all = product(kernel, &w, 0..outputs, &x, 0..n);
        assert!(all.iter().any(|&v| v != 0), "{format}: nothing but zeros");
        for few in [5, 16, 17, 128, 129] {
            for first in (0..=n - few).step_by(61) {
                let got = product(kernel.with_crossover(TILES), &w, 0..outputs, &x, first..first + few);
                assert!(got == all[first as usize * outputs..][..got.len()], "{format}: {few} rows from {first}");
            }
        }
    }
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
    assert!(found.int8 > 0 && found.many > 0 && (1..=9).contains(&found.bf16), "{found}");
    assert_eq!(kernel.with_crossover(found).crossover(), found);
}

#[test]
fn conformance() {
    // Whatever tier the suite asks for, this one answers; it is tested once.
    kt_core::testing::conformance(|_| kernel().map(|amx| amx.invariant().into_backend()));
}

#[test]
fn conformance_of_many_rows() {
    kt_core::testing::conformance(|_| {
        kernel().map(|amx| amx.with_crossover(Crossover { many: 0, ..amx.crossover() }).into_backend())
    });
}

#[test]
fn pieces_of_a_matrix_are_packed_as_the_whole() {
    let Some(kernel) = kernel_or_skip() else { return };
    kt_core::testing::pieces_pack_as_the_whole(kernel);
}
