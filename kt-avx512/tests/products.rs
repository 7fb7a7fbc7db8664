//! Products against plain F64 sums over the decoded weights and the inputs exactly as packed, for each tier of this CPU.

#![cfg(target_arch = "x86_64")]

use kt_core::cpu::input::{InputLayout, Sums, WIDE};
use kt_core::cpu::kernel::Kernel;
use kt_core::cpu::tier::Tier;
use kt_core::format::float::f32_to_bf16;
use kt_core::format::fp8::E4M3;
use kt_core::testing::{Random, Rows, layouts, packs_as_known, product, weights};
use kt_core::{Format, Group, Matrix, ScaleType};

use kt_avx512::Avx;
use kt_avx512::engine::{PANEL, Ports};

/// What the packed layout makes of fixed matrices: checksums, by format. A test compares; it prints this table as it should be.
const PACKED: &[(&str, u64)] = &[
    ("F32", 0xa0cf7bb11da8d8a7),
    ("F16", 0x31e3392648688a21),
    ("BF16", 0xaecd6615058fccca),
    ("FP8-block", 0x1637f5b9a05d0ce4),
    ("FP8-channel", 0xc6ef44e95afaedd5),
    ("INT8-channel", 0x66d6907f77d491ac),
    ("INT8-g32", 0xd04df3df183c53f5),
    ("INT8-g128", 0xc3b2071f637a730a),
    ("INT8-offset-channel", 0x2e18aabc87538e84),
    ("INT8-offset-g128", 0x8f8a43d34540b96d),
    ("INT8-asym-channel", 0xed754804c262af7f),
    ("INT8-asym-g32", 0xb1ba5a8b5a5d13af),
    ("INT8-asym-g128", 0xf3bf609fc7b39aea),
    ("INT4-channel", 0x45840d696791cdf5),
    ("INT4-g32", 0x9b7a80732e1007af),
    ("INT4-g64", 0xfcfea3e082ee6130),
    ("INT4-g128", 0xcc5ced0da23a435d),
    ("INT4-asym-channel", 0xe2031589e49e34b1),
    ("INT4-asym-g32", 0x624961184e31e22d),
    ("INT4-asym-g128", 0x39d8935ab545e0cb),
    ("MXFP4", 0x629d2191e373ba65),
    ("MXFP8", 0x927c4a56b98d68d1),
    ("NVFP4", 0x088e42f2c86cae99),
    ("INT4-g96", 0x293c18617ee2d13c),
];

const TIERS: [Tier; 5] = [Tier::Avx2, Tier::AvxVnni, Tier::Avx512, Tier::Avx512Vnni, Tier::Avx512Bf16];

/// What the kernels accept, and a group that is no power of two.
fn formats() -> Vec<Format> {
    let Some(kernel) = kernels().pop() else { return Vec::new() };
    let mut formats = kt_core::format::ALL.to_vec();
    formats.push(Format::Int4(Group::Of(96)));
    formats.retain(|&format| kernel.accepts(format, 16, 384).is_ok());
    assert!(formats.len() > 20, "{formats:?}");
    formats
}

const SHAPES: [(usize, usize); 8] =
    [(16, 128), (17, 32), (96, 160), (704, 96), (33, 704), (48, 2880), (15, 1), (80, 254)];

/// Kernels of the tiers of this CPU up to `KT_ISA`, where it matters both for CPUs with these ports and with the others; says which are skipped.
fn kernels() -> Vec<Avx> {
    let tiers = kt_core::testing::tiers();
    let kernels = TIERS.into_iter().filter(|t| tiers.contains(t)).flat_map(|tier| {
        let kernel = Avx::detect(tier).expect("this CPU has the tier");
        assert_eq!(kernel.tier(), tier);
        let all = [Ports::Own, Ports::Double, Ports::Shared].map(|ports| kernel.with_ports(ports));
        all.into_iter().take(if tier < Tier::Avx512Vnni { 1 } else { 3 })
    });
    kernels.collect()
}

#[test]
fn bf16_instructions_are_used_where_they_are_worth_it() {
    for kernel in kernels() {
        let (layout, how) = kernel.accepts(Format::Fp8Block, 128, 128).expect("accepted");
        let own = kernel.tier() == Tier::Avx512Bf16 && kernel != kernel.with_ports(Ports::Shared);
        assert_eq!(layout, if own { InputLayout::Bf16 } else { InputLayout::F32 }, "{kernel:?}");
        let named = how.starts_with("vdpbf16ps");
        assert_eq!(named, own, "{how}");
        // Where a tier has them and they are left, it says so.
        assert_eq!(how.contains("vdpbf16ps"), kernel.tier() == Tier::Avx512Bf16, "{how}");
    }
}

/// A random matrix, with scales of type `kind` if the format has such; `None` if the format has no such shape.
fn random_matrix(format: Format, rows: usize, cols: usize, kind: ScaleType, seed: u64) -> Option<Matrix> {
    let kinds = [kind, ScaleType::E8m0, ScaleType::E4m3];
    let kind = *kinds.iter().find(|&&kind| format.takes_scales(kind)).unwrap_or(&kind);
    let mut random = Random(seed);
    let bytes = format.row_bytes(cols).ok()? * rows;
    let codes: Vec<u8> = match format {
        Format::Bf16 => {
            (0..bytes / 2).flat_map(|_| f32_to_bf16(random.normal() * 0.05).to_le_bytes()).collect::<Vec<u8>>()
        }
        Format::F16 => (0..bytes / 2)
            .flat_map(|_| {
                half::f16::from_f32(random.normal() * 0.05 * 2f32.powi(-(random.below(16) as i32))).to_le_bytes()
            })
            .collect(),
        Format::F32 => (0..bytes / 4).flat_map(|_| (random.normal() * 0.05).to_le_bytes()).collect(),
        // NaN codes have a test of their own. Every other eight columns have neither zeros nor subnormal codes, which are unpacked otherwise.
        Format::Fp8Block | Format::Fp8Channel | Format::Mxfp8 => (0..bytes)
            .map(|i| match (random.bits() as u8, i % cols / 8 % 2) {
                (c, _) if c & 0x7f == 0x7f => 0x30,
                (c, 1) if c & 0x78 == 0 => c | 0x08,
                (c, _) => c,
            })
            .collect(),
        _ => (0..bytes).map(|_| random.bits() as u8).collect(),
    };
    let scales = format.scale_shape(rows, cols).map(|(r, c)| {
        let mut bytes = Vec::new();
        for _ in 0..r * c {
            let v = 0.01 * (1.0 + random.uniform()) * 2f32.powi(random.below(6) as i32);
            match kind {
                ScaleType::F32 => bytes.extend(v.to_le_bytes()),
                ScaleType::F16 => bytes.extend(half::f16::from_f32(v).to_le_bytes()),
                ScaleType::Bf16 => bytes.extend(f32_to_bf16(v).to_le_bytes()),
                ScaleType::E8m0 => bytes.push((v.to_bits() >> 23) as u8),
                ScaleType::E4m3 => bytes.push(kt_core::format::fp8::f32_to_e4m3(v)),
            }
        }
        (bytes.into(), kind)
    });
    let matrix = Matrix::new(format, rows, cols, codes.into(), scales).expect("a matrix of this shape");
    let most = match format {
        Format::Int4Asym(_) => 16,
        Format::Int8Asym(_) => 256,
        _ => return Some(matrix),
    };
    let (r, c) = format.scale_shape(rows, cols).expect("scales");
    let zeros = (0..r * c).map(|_| random.below(most + 1) as i16).collect();
    Some(matrix.with_zero_points(zeros).expect("zero points"))
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|v| v.to_bits()).collect()
}

fn random_inputs(n: usize, cols: usize, seed: u64) -> Vec<f32> {
    let mut random = Random(seed);
    (0..n * cols).map(|_| random.normal()).collect()
}

/// Largest error relative to `sum |w * x|`, which rounded F32 sums and products are bounded by.
fn worst_error(matrix: &Matrix, x: &Rows, rows: &[u32], got: &[f32]) -> f64 {
    let w = matrix.decode();
    let (n, cols) = (matrix.rows(), matrix.cols());
    let mut worst = 0f64;
    for (i, &row) in rows.iter().enumerate() {
        let x: Vec<f64> = (0..cols).map(|k| x.get(row as usize, k)).collect();
        for o in 0..n {
            let products = w[o * cols..][..cols].iter().zip(&x).map(|(&w, x)| w as f64 * x);
            let (sum, size) = products.fold((0.0, 0.0), |(s, a), p| (s + p, a + p.abs()));
            let error = (got[i * n + o] as f64 - sum).abs() / size.max(1e-30);
            worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
        }
    }
    worst
}

#[test]
fn products_match_plain_sums() {
    for kernel in kernels() {
        for format in formats() {
            for (rows, cols) in SHAPES {
                let Some(matrix) = random_matrix(format, rows, cols, ScaleType::Bf16, 7) else { continue };
                for layout in layouts(kernel, format, rows, cols) {
                    let w = weights(kernel, &matrix);
                    let x = Rows::new(kernel, layout, &random_inputs(40, cols, 9), cols);
                    let mut random = Random(3);
                    for n in [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 40, 300] {
                        let pick: Vec<u32> = (0..n).map(|_| random.below(40) as u32).collect();
                        let got = product(kernel, &w, 0..rows, &x, &pick);
                        let error = worst_error(&matrix, &x, &pick, &got);
                        // A chain of cols / 2 roundings of 2^-24, of random sign: far below 1e-6 of the sum of magnitudes.
                        assert!(error < 1e-6, "{} {format} {rows}x{cols}, {n} rows: {error:.1e}", kernel.tier());
                    }
                }
            }
        }
    }
}

#[test]
fn all_scale_types_are_kept() {
    for kernel in kernels() {
        for format in formats() {
            let kinds = [ScaleType::F32, ScaleType::F16, ScaleType::Bf16, ScaleType::E8m0, ScaleType::E4m3];
            for kind in kinds.into_iter().filter(|&kind| format.takes_scales(kind)) {
                let Some(matrix) = random_matrix(format, 40, 384, kind, 17) else { continue };
                for layout in layouts(kernel, format, 40, 384) {
                    let x = Rows::new(kernel, layout, &random_inputs(3, 384, 19), 384);
                    let got = product(kernel, &weights(kernel, &matrix), 0..40, &x, &[0, 1, 2]);
                    let error = worst_error(&matrix, &x, &[0, 1, 2], &got);
                    let grouped = matches!(
                        format,
                        Format::Int8(Group::Of(_))
                            | Format::Int8Offset(Group::Of(_))
                            | Format::Int8Asym(Group::Of(_))
                            | Format::Int4(Group::Of(_))
                            | Format::Int4Asym(Group::Of(_))
                    );
                    // Only F32 scales of groups are rounded, to 11 bits.
                    let bound = if grouped && kind == ScaleType::F32 { 2.5e-4 } else { 1e-6 };
                    assert!(error < bound, "{} {format} {kind:?}: {error:.1e}", kernel.tier());
                }
            }
        }
    }
}

#[test]
fn a_number_does_not_depend_on_what_is_computed_with_it() {
    const N: usize = 300;
    for kernel in kernels() {
        for format in formats() {
            let (rows, cols) = (139, 768);
            let Some(matrix) = random_matrix(format, rows, cols, ScaleType::Bf16, 27) else { continue };
            for layout in layouts(kernel, format, rows, cols) {
                let w = weights(kernel, &matrix);
                let x = Rows::new(kernel, layout, &random_inputs(N, cols, 29), cols);
                let all: Vec<u32> = (0..N as u32).collect();
                let want = product(kernel, &w, 0..rows, &x, &all);
                for n in 1..=30 {
                    let mut random = Random(n as u64);
                    let pick: Vec<u32> = (0..n).map(|_| random.below(N) as u32).collect();
                    let start = random.below(rows.div_ceil(Avx::PANEL)) * Avx::PANEL;
                    let end = start + 1 + random.below(rows - start);
                    let got = product(kernel, &w, start..end, &x, &pick);
                    for (i, &row) in pick.iter().enumerate() {
                        assert_eq!(
                            bits(&got[i * (end - start)..][..end - start]),
                            bits(&want[row as usize * rows..][start..end]),
                            "{} {format}: {n} rows, outputs {start}..{end}, row {i}",
                            kernel.tier()
                        );
                    }
                }
            }
        }
    }
}

/// The kernels for many rows that have other inputs of a format.
fn in_words(format: Format) -> Vec<Avx> {
    let many = kernels().into_iter().filter_map(|kernel| kernel.for_many());
    let many = many.map(|(_, kernel)| kernel);
    many.filter(|k| matches!(k.accepts(format, 16, 384), Ok((InputLayout::Int8Words { .. }, _)))).collect()
}

#[test]
fn products_with_scales_as_words_are_near_and_the_same_in_any_batch() {
    let mut found = 0;
    for format in formats() {
        for (rows, cols) in SHAPES {
            let Some(matrix) = random_matrix(format, rows, cols, ScaleType::Bf16, 7) else { continue };
            let mut first: Option<Vec<f32>> = None;
            for kernel in in_words(format) {
                found += 1;
                let (layout, _) = kernel.accepts(format, rows, cols).expect("accepted");
                let w = weights(kernel, &matrix);
                let x = Rows::new(kernel, layout, &random_inputs(70, cols, 9), cols);
                let all: Vec<u32> = (0..70).collect();
                let want = product(kernel, &w, 0..rows, &x, &all);
                let error = worst_error(&matrix, &x, &all, &want);
                // Of scales that differ by 2^6 and more the least have a word of some 100, and a sum of some 10 is rounded to an integer.
                assert!(error < 1e-3, "{format} {rows}x{cols}: {error:.1e}");
                let first = first.get_or_insert_with(|| want.clone());
                assert!(bits(first) == bits(&want), "{format} {rows}x{cols} differs by ports");
                for n in [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 40] {
                    let pick: Vec<u32> = (0..n).map(|i| (i * 17 + n) % 70).collect();
                    let got = product(kernel, &w, 0..rows, &x, &pick);
                    for (got, &row) in got.chunks_exact(rows).zip(&pick) {
                        assert_eq!(bits(got), bits(&want[row as usize * rows..][..rows]), "{format}, {n} rows");
                    }
                }
            }
        }
    }
    assert!(found > 0 || kernels().iter().all(|k| k.for_many().is_none()));
}

#[test]
fn int8_products_are_the_same_on_every_tier() {
    let kernels = kernels();
    for format in formats() {
        let (layout, _) = kernels[0].accepts(format, 96, 768).expect("accepted");
        if !matches!(layout, InputLayout::Int8 { .. }) {
            continue;
        }
        let matrix = random_matrix(format, 96, 768, ScaleType::F16, 37).expect("a matrix");
        let results: Vec<_> = kernels
            .iter()
            .map(|&kernel| {
                let w = weights(kernel, &matrix);
                let of = |layout| {
                    let x = Rows::new(kernel, layout, &random_inputs(10, 768, 39), 768);
                    bits(&product(kernel, &w, 0..96, &x, &[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]))
                };
                layouts(kernel, format, 96, 768).into_iter().map(of).collect::<Vec<_>>()
            })
            .collect();
        assert!(results.windows(2).all(|w| w[0] == w[1]), "{format} differs between tiers");
    }
}

#[test]
fn products_of_f32_inputs_are_the_same_on_every_tier_that_has_them() {
    for format in [Format::F32, Format::F16, Format::Bf16, Format::Fp8Block, Format::Fp8Channel, Format::Mxfp8] {
        let matrix = random_matrix(format, 75, 768, ScaleType::Bf16, 57).expect("a matrix");
        let rows: Vec<u32> = (0..20).collect();
        let mut results = Vec::new();
        for kernel in kernels() {
            let (layout, _) = kernel.accepts(format, 75, 768).expect("accepted");
            if layout == InputLayout::F32 {
                let x = Rows::new(kernel, layout, &random_inputs(20, 768, 59), 768);
                results.push(bits(&product(kernel, &weights(kernel, &matrix), 0..75, &x, &rows)));
            }
        }
        assert!(results.windows(2).all(|w| w[0] == w[1]), "{format} differs between tiers");
    }
}

#[test]
fn without_avx512_there_is_avx2() {
    if Tier::Avx2.available() {
        assert_eq!(Avx::detect(Tier::Avx2).expect("a kernel").tier(), Tier::Avx2);
        let next = if Tier::AvxVnni.available() { Tier::AvxVnni } else { Tier::Avx2 };
        assert_eq!(Avx::detect(Tier::AvxVnni).expect("a kernel").tier(), next);
    }
}

#[test]
fn extreme_codes_do_not_saturate() {
    // Every weight at the end of its range and every input code at its own: the largest sums that can be.
    for kernel in kernels() {
        for (format, code, zero, value) in [
            (Format::Int8(Group::Row), 0x80, 0, -128.0),
            (Format::Int8(Group::Row), 0x7f, 0, 127.0),
            (Format::Int8Offset(Group::Of(32)), 0xff, 0, 127.0),
            (Format::Int4(Group::Of(32)), 0xff, 0, 7.0),
            (Format::Int4(Group::Of(32)), 0x00, 0, -8.0),
            (Format::Int4(Group::Row), 0xff, 0, 7.0),
            (Format::Int4(Group::Row), 0x00, 0, -8.0),
            (Format::Int4Asym(Group::Of(32)), 0xff, 0, 15.0),
            (Format::Int4Asym(Group::Of(32)), 0x00, 16, -16.0),
            (Format::Mxfp4, 0x77, 0, 6.0),
            (Format::Mxfp4, 0xff, 0, -6.0),
            (Format::Nvfp4, 0x77, 0, 6.0),
            (Format::Nvfp4, 0xff, 0, -6.0),
        ] {
            let cols = 512;
            let codes = vec![code; format.row_bytes(cols).unwrap() * 16];
            let (r, c) = format.scale_shape(16, cols).unwrap();
            let (one, kind): (&[u8], _) = match format {
                Format::Mxfp4 => (&[127], ScaleType::E8m0),
                Format::Nvfp4 => (&[0x38], ScaleType::E4m3),
                _ => (&[0, 0, 0x80, 0x3f], ScaleType::F32),
            };
            let mut matrix =
                Matrix::new(format, 16, cols, codes.into(), Some((one.repeat(r * c).into(), kind))).unwrap();
            if format.takes_zero_points() {
                matrix = matrix.with_zero_points(vec![zero; r * c]).unwrap();
            }
            for layout in layouts(kernel, format, 16, cols) {
                for sign in [-127.0f32, 127.0] {
                    let x = Rows::new(kernel, layout, &vec![sign; cols * 9], cols);
                    for rows in [&[0u32][..], &[0, 1, 2, 3, 4, 5, 6, 7, 8]] {
                        let got = product(kernel, &weights(kernel, &matrix), 0..16, &x, rows);
                        let want = sign * value * cols as f32;
                        assert!(got.iter().all(|&v| v == want), "{} {format} {code:#x}: {want} {got:?}", kernel.tier());
                    }
                }
            }
            if let Some((_, kernel)) = kernel.for_many().filter(|(_, kernel)| in_words(format).contains(kernel)) {
                let (layout, _) = kernel.accepts(format, 16, cols).unwrap();
                for sign in [-127.0f32, 127.0] {
                    let x = Rows::new(kernel, layout, &vec![sign; cols * 9], cols);
                    let got = product(kernel, &weights(kernel, &matrix), 0..16, &x, &[0, 1, 2, 3, 4, 5, 6, 7, 8]);
                    let want = sign * value * cols as f32;
                    // Inputs are rounded to half as much where sums of products with weights of up to 16 would be no words; beside MXFP4's, of up to 12, to 85 for 85.3.
                    let bound = match format {
                        Format::Int4Asym(_) => 2e-3,
                        Format::Mxfp4 => 5e-3,
                        _ => 1e-3,
                    };
                    assert!(got.iter().all(|v| (v / want - 1.0).abs() < bound), "{format} {code:#x}: {want} {got:?}");
                }
            }
        }
    }
}

#[test]
fn every_fp8_code_is_exact() {
    for kernel in kernels() {
        for format in [Format::Fp8Channel, Format::Fp8Block] {
            // Output o has its number as the code of one column, and zeros. NaN codes have a test of their own.
            let (rows, cols) = (256, 8);
            let code = |o: usize| if o % 128 == 127 { 0 } else { o as u8 };
            let codes: Vec<u8> =
                (0..rows * cols).map(|i| if i % cols == (i / cols) % cols { code(i / cols) } else { 0 }).collect();
            let (r, c) = format.scale_shape(rows, cols).unwrap();
            let scales: Vec<u8> = (0..r * c).flat_map(|_| 1f32.to_le_bytes()).collect();
            let matrix = Matrix::new(format, rows, cols, codes.into(), Some((scales.into(), ScaleType::F32))).unwrap();
            let w = weights(kernel, &matrix);
            let (layout, _) = kernel.accepts(format, rows, cols).unwrap();
            let x = Rows::new(kernel, layout, &vec![1.0; cols * 9], cols);
            for n in [1, 9] {
                let pick: Vec<u32> = (0..n).collect();
                let got = product(kernel, &w, 0..rows, &x, &pick);
                for (i, v) in got.iter().enumerate() {
                    assert_eq!(*v, E4M3[code(i % rows) as usize], "{} {format} {:#x}", kernel.tier(), i % rows);
                }
            }
        }
    }
}

#[test]
fn every_fp8_code_is_exact_among_its_like() {
    // Lines of normal codes alone take another way. Output o has its number as the code of all columns, but for one zero in every panel of an odd
    // number; each row of inputs sees one column.
    let (rows, cols) = (256, 160);
    let code = |o: usize| if o % 128 == 127 { 8 } else { o as u8 };
    let zero = |o: usize| if o % 32 == 16 { Some(o % cols) } else { None };
    for kernel in kernels() {
        for format in [Format::Fp8Channel, Format::Fp8Block, Format::Mxfp8] {
            let codes: Vec<u8> =
                (0..rows * cols).map(|i| if zero(i / cols) == Some(i % cols) { 0 } else { code(i / cols) }).collect();
            let (r, c) = format.scale_shape(rows, cols).unwrap();
            let (scales, kind) = match format {
                Format::Mxfp8 => (vec![127; r * c], ScaleType::E8m0),
                _ => ((0..r * c).flat_map(|_| 1f32.to_le_bytes()).collect(), ScaleType::F32),
            };
            let matrix = Matrix::new(format, rows, cols, codes.into(), Some((scales.into(), kind))).unwrap();
            let w = weights(kernel, &matrix);
            let (layout, _) = kernel.accepts(format, rows, cols).unwrap();
            let x: Vec<f32> = (0..cols * cols).map(|i| f32::from(i / cols == i % cols)).collect();
            let x = Rows::new(kernel, layout, &x, cols);
            for n in 1..=9 {
                for first in [0, 15, 16, 47, 127, cols - n] {
                    let pick: Vec<u32> = (first as u32..).take(n).collect();
                    let got = product(kernel, &w, 0..rows, &x, &pick);
                    for (i, v) in got.iter().enumerate() {
                        let (row, o) = (first + i / rows, i % rows);
                        let want = if zero(o) == Some(row) { 0.0 } else { E4M3[code(o) as usize] };
                        assert_eq!(*v, want, "{} {format} {n} rows from {first}, output {o}", kernel.tier());
                    }
                }
            }
        }
    }
}

#[test]
fn nan_codes_make_their_output_nan_and_touch_no_other_panel() {
    let (rows, cols) = (75, 300);
    for kernel in kernels() {
        for format in [Format::Fp8Block, Format::Fp8Channel, Format::Mxfp8] {
            let (layout, _) = kernel.accepts(format, rows, cols).expect("accepted");
            let x = Rows::new(kernel, layout, &random_inputs(13, cols, 69), cols);
            let all: Vec<u32> = (0..13).collect();
            let Some(matrix) = random_matrix(format, rows, cols, ScaleType::Bf16, 67) else { continue };
            let without = product(kernel, &weights(kernel, &matrix), 0..rows, &x, &all);
            for (output, column, nan) in [(0, 0, 0x7f), (17, 131, 0xff), (47, 299, 0x7f), (74, 97, 0xff)] {
                let mut codes: Vec<u8> = (0..rows).flat_map(|o| matrix.row(o).to_vec()).collect();
                codes[output * cols + column] = nan;
                let scales = matrix.scales().expect("scales");
                let scales = Some((scales.bytes().to_vec().into(), scales.kind()));
                let w = weights(kernel, &Matrix::new(format, rows, cols, codes.into(), scales).expect("a matrix"));
                let got = product(kernel, &w, 0..rows, &x, &all);
                for (i, (got, without)) in got.iter().zip(&without).enumerate() {
                    let o = i % rows;
                    if o == output {
                        assert!(got.is_nan(), "{} {format} {output}, {column}: {got}", kernel.tier());
                    } else if format == Format::Fp8Block && o / PANEL == output / PANEL {
                        assert!(got.is_nan(), "{} {format} {output}, {column}: {got} in output {o}", kernel.tier());
                    } else {
                        assert_eq!(got.to_bits(), without.to_bits(), "{} {format} {output}: {o}", kernel.tier());
                    }
                }
                for n in 1..13 {
                    let few = product(kernel, &w, 0..rows, &x, &all[..n]);
                    assert_eq!(bits(&few), bits(&got[..n * rows]), "{} {format}: {n} rows", kernel.tier());
                }
            }
        }
    }
}

#[test]
fn inputs_of_any_size_give_the_same_in_any_batch() {
    // Some products multiply inputs by a power of two first.
    let (rows, cols) = (75, 384);
    for kernel in kernels() {
        for format in [Format::Fp8Block, Format::Fp8Channel, Format::Mxfp8] {
            let (layout, _) = kernel.accepts(format, rows, cols).expect("accepted");
            let Some(matrix) = random_matrix(format, rows, cols, ScaleType::Bf16, 77) else { continue };
            let w = weights(kernel, &matrix);
            let mut x = random_inputs(13, cols, 79);
            for (row, x) in x.chunks_exact_mut(cols).enumerate() {
                let sizes = [0, 46, 47, 48, 80, 100, 110, -20, -60, -80, -100, -126, -140];
                x.iter_mut().for_each(|x| *x = (*x as f64 * 2f64.powi(sizes[row])) as f32);
            }
            x[5] = 1e30;
            x[cols * 2 - 1] = f32::INFINITY;
            x[cols * 12 + 200] = f32::NAN;
            let x = Rows::new(kernel, layout, &x, cols);
            let all: Vec<u32> = (0..13).collect();
            let want = product(kernel, &w, 0..rows, &x, &all);
            for (row, want) in want.chunks_exact(rows).enumerate() {
                assert_eq!(want.iter().all(|v| v.is_finite()), row != 1 && row != 12, "{} {format}", kernel.tier());
            }
            for n in 1..9 {
                for start in 0..=13 - n {
                    let got = product(kernel, &w, 0..rows, &x, &all[start..start + n]);
                    let same = bits(&got) == bits(&want[start * rows..(start + n) * rows]);
                    assert!(same, "{} {format}: {n} rows from {start}", kernel.tier());
                }
            }
        }
    }
}

#[test]
fn nan_and_infinity_stay_in_their_row() {
    let many = kernels().into_iter().filter_map(|kernel| kernel.for_many()).map(|(_, kernel)| kernel);
    for kernel in kernels().into_iter().chain(many) {
        for format in formats() {
            let (rows, cols) = (48, 192);
            let Some(matrix) = random_matrix(format, rows, cols, ScaleType::Bf16, 47) else { continue };
            for layout in layouts(kernel, format, rows, cols) {
                let w = weights(kernel, &matrix);
                for bad in [f32::NAN, f32::INFINITY] {
                    let mut x = random_inputs(13, cols, 49);
                    x[5 * cols + 150] = bad;
                    let x = Rows::new(kernel, layout, &x, cols);
                    for pick in [&[4u32, 5][..], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]] {
                        let got = product(kernel, &w, 0..rows, &x, pick);
                        for (i, &row) in pick.iter().enumerate() {
                            let finite = got[i * rows..][..rows].iter().all(|v| v.is_finite());
                            assert_eq!(finite, row != 5, "{} {format} {bad}: row {row}", kernel.tier());
                        }
                    }
                }
            }
        }
    }
}

/// All kinds of groups and of what is kept of sums.
const INPUT_LAYOUTS: [InputLayout; 19] = [
    InputLayout::F32,
    InputLayout::Bf16,
    InputLayout::Int8 { group: 16, sums: Sums::Times(1) },
    InputLayout::Int8 { group: 32, sums: Sums::Times(-8) },
    InputLayout::Int8 { group: 32, sums: Sums::Scaled },
    InputLayout::Int8 { group: 32, sums: Sums::Halves(-32) },
    InputLayout::Int8 { group: 16, sums: Sums::Pairs(-12) },
    InputLayout::Int8 { group: 32, sums: Sums::Pairs(-16) },
    InputLayout::Int8 { group: 32, sums: Sums::PairHalves(-32) },
    InputLayout::Int8 { group: 32, sums: Sums::PairWords(-8) },
    InputLayout::Int8 { group: 32, sums: Sums::PairScaled(-16) },
    InputLayout::Int8 { group: 32, sums: Sums::TimesScaled(-128) },
    InputLayout::Int8 { group: 128, sums: Sums::Times(-128) },
    InputLayout::Int8 { group: WIDE, sums: Sums::Times(-128) },
    InputLayout::Int8 { group: WIDE, sums: Sums::Halves(-32) },
    InputLayout::Int8Words { group: 16, zero: 12, minima: false },
    InputLayout::Int8Words { group: 16, zero: 2, minima: true },
    InputLayout::Int8Words { group: 32, zero: 8, minima: false },
    InputLayout::Int8Words { group: 32, zero: 16, minima: true },
];

#[test]
fn inputs_of_some_rows_are_those_of_each() {
    for kernel in kernels() {
        for layout in INPUT_LAYOUTS {
            for (rows, columns) in [(0, layout.columns()), (1, layout.columns()), (5, layout.columns()), (3, 100)] {
                let stride = columns + 7;
                let mut x = random_inputs(1, (rows * stride).max(1), rows as u64);
                if rows > 2 {
                    // A row of zeros before one with a number that is none, which no other may have anything of.
                    x[stride..][..columns].fill(0.0);
                    x[2 * stride + 40] = f32::NAN;
                }
                let size = layout.block_bytes();
                let mut got = vec![1; rows * size];
                kernel.pack_inputs(layout, &x, (stride, columns), &mut got);
                for (row, got) in got.chunks_exact(size).enumerate() {
                    let mut want = vec![2; size];
                    kt_core::cpu::input::pack_block(layout, &x[row * stride..][..columns], &mut want);
                    assert_eq!(got, want, "{layout:?}, row {row} of {rows} of {columns}");
                }
            }
        }
    }
}

#[test]
fn inputs_and_activations_are_those_of_the_core() {
    use kt_core::activation::Activation;
    for kernel in kernels() {
        for len in [1, 31, 100, 128, 129, 400, 512] {
            let x: Vec<f32> = random_inputs(1, len, len as u64);
            // Codes of one magnitude, which may add up to more than there is room for, in some groups.
            let flat: Vec<f32> =
                x.iter().enumerate().map(|(i, v)| if i < 40 { *v } else { v.signum() * 3.0 }).collect();
            for layout in INPUT_LAYOUTS {
                for x in [&x, &flat].map(|x| &x[..len.min(layout.columns())]) {
                    let (mut got, mut want) = (vec![1; layout.block_bytes()], vec![2; layout.block_bytes()]);
                    kernel.pack_input(layout, x, &mut got);
                    kt_core::cpu::input::pack_block(layout, x, &mut want);
                    assert_eq!(got, want, "{layout} of {len}");
                }
            }
            let up = random_inputs(1, len, 5);
            for rule in [Activation::SiluMul, Activation::GptOss { alpha: 1.702, limit: 7.0 }] {
                let (mut got, mut want) = (x.clone(), x.clone());
                kernel.activate(rule, &mut got, &up);
                rule.apply_fused(&mut want, &up);
                assert_eq!(bits(&got), bits(&want), "{rule:?} of {len}");
            }
        }
    }
}

#[test]
fn what_is_declined_has_a_reason() {
    for kernel in kernels() {
        for format in [
            Format::Q8_0,
            Format::Q4K,
            Format::Int4(Group::Of(48)),
            Format::Int4Asym(Group::Of(8)),
            Format::Int8(Group::Of(0)),
        ] {
            let why = kernel.accepts(format, 64, 768).unwrap_err();
            assert!(why.0.contains(&format.to_string()), "{why}");
        }
    }
    assert!(Avx::detect(Tier::Portable).unwrap_err().0.contains("portable"));
}

/// Matrices of random bits at a shape that is no multiple of anything, with scales of each type that the format takes. No arithmetic
/// goes into them, so that they are the same everywhere.
fn fixed_matrices(format: Format) -> Vec<Matrix> {
    let (rows, cols) = (37, if format.row_bytes(416).is_ok() { 416 } else { 384 });
    let mut random = Random(1);
    let mut bytes = |n: usize| (0..n).map(|_| random.bits() as u8).collect::<Vec<u8>>();
    let codes = bytes(format.row_bytes(cols).unwrap() * rows);
    let Some((r, c)) = format.scale_shape(rows, cols) else {
        return vec![Matrix::new(format, rows, cols, codes.into(), None).unwrap()];
    };
    let kinds = [ScaleType::F32, ScaleType::F16, ScaleType::Bf16, ScaleType::E8m0, ScaleType::E4m3];
    let kinds = kinds.into_iter().filter(|&kind| format.takes_scales(kind));
    kinds
        .map(|kind| {
            // Positive, of a few powers of two.
            let scales: Vec<u8> = (0..r * c)
                .flat_map(|_| {
                    let [low, high] = [bytes(1)[0], bytes(1)[0]];
                    match kind {
                        ScaleType::F32 => vec![low, high, 0x40 | low & 0x3f, 0x3c],
                        ScaleType::F16 => vec![low, 0x18 | high & 7],
                        ScaleType::Bf16 => vec![low, 0x3c],
                        ScaleType::E8m0 => vec![118 + low % 8],
                        ScaleType::E4m3 => vec![0x10 + low % 0x40],
                    }
                })
                .collect();
            let matrix = Matrix::new(format, rows, cols, codes.clone().into(), Some((scales.into(), kind))).unwrap();
            let most = match format {
                Format::Int4Asym(_) => 17,
                Format::Int8Asym(_) => 257,
                _ => return matrix,
            };
            let zeros = (0..r * c).map(|_| i16::from_le_bytes([bytes(1)[0], bytes(1)[0] & 1]) % most).collect();
            matrix.with_zero_points(zeros).unwrap()
        })
        .collect()
}

#[test]
fn packed_bytes_change_with_the_layout_version_only() {
    for kernel in kernels() {
        packs_as_known(kernel, PACKED, formats().into_iter().map(|format| (format, fixed_matrices(format))));
    }
}

#[test]
fn pieces_of_a_matrix_are_packed_as_the_whole() {
    for kernel in kernels() {
        kt_core::testing::pieces_pack_as_the_whole(kernel);
    }
}
