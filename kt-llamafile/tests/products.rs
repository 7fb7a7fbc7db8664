//! The products against plain arithmetic, on every tier that this CPU has.

#![cfg(target_arch = "x86_64")]

use kt_avx512::engine::Ports;
use kt_core::cpu::input::InputLayout;
use kt_core::cpu::kernel::Kernel;
use kt_core::cpu::tier::Tier;
use kt_core::format::{ALL, ggml};
use kt_core::testing::{Random, Rows, f16_scales_at, packs_as_known, product, weights};
use kt_core::{Format, Group, Matrix};
use kt_llamafile::{Llamafile, as_packed};

/// What the packed layout makes of fixed matrices: checksums, by format. A test compares; it prints this table as it should be.
const PACKED: &[(&str, u64)] = &[
    ("Q8_0", 0xb86fc5ed2168a633),
    ("Q4_0", 0x9c05fb3bcba6a1ae),
    ("Q4_K", 0x2e4db9c2926e3708),
    ("Q5_K", 0x9f5cdc0c04dc4140),
    ("Q6_K", 0x3cb01c30f004d635),
    ("Q4_1", 0xfea4fab5694eb3b0),
    ("Q5_0", 0x596d09a4eebf0c14),
    ("Q5_1", 0x672d446ca38a1348),
    ("Q2_K", 0x85008537031a65da),
    ("Q3_K", 0x94e25034af26d666),
    ("IQ4_NL", 0x9c05fb3bcba6a1ae),
    ("IQ4_XS", 0x571f67bebb5fd95f),
    ("IQ2_XXS", 0xcf56759bbf86e254),
    ("IQ2_XS", 0xf9d1dd5919700dd2),
    ("IQ2_S", 0x58d1f011a377ce97),
    ("IQ3_XXS", 0x3b21a381a24de756),
    ("IQ3_S", 0x4da60321181c8535),
    ("IQ1_S", 0x4394583366ff601a),
    ("IQ1_M", 0x67b1084e021f6ef1),
    ("TQ1_0", 0x01630d3988906e6d),
    ("TQ2_0", 0x2b9a9f76cbfe8818),
    ("MXFP4-ggml", 0x0e34c5c7ac23b6eb),
];

const ROWS: [usize; 15] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 40, 130];

/// The formats that this backend multiplies.
fn native() -> Vec<Format> {
    let kernel = kernels()[0];
    ALL.into_iter().filter(|&f| kernel.accepts(f, 16, 256).is_ok()).collect()
}

/// Outputs and inputs: tall and short, and widths that are no multiples of tiles or input blocks.
fn shapes(format: Format) -> &'static [(usize, usize)] {
    match ggml::block(format).unwrap().0 {
        32 => &[(16, 32), (17, 96), (96, 160), (1, 128), (33, 1440), (50, 2880)],
        _ => &[(16, 256), (17, 768), (96, 512), (1, 1280), (50, 2304)],
    }
}

/// The kernels of this CPU, with VNNI of 512 bits both for CPUs with these ports and with the others; says which tiers are left out.
fn kernels() -> Vec<Llamafile> {
    let mut kernels = Vec::new();
    for tier in [Tier::Avx2, Tier::AvxVnni, Tier::Avx512, Tier::Avx512Vnni] {
        match Llamafile::detect(tier) {
            Ok(k) if k.tier() == tier && tier == Tier::Avx512Vnni => {
                kernels.extend([Ports::Own, Ports::Double, Ports::Shared].map(|ports| k.with_ports(ports)));
            }
            Ok(k) if k.tier() == tier => kernels.push(k),
            _ => println!("skipped {tier}: this CPU lacks {}", tier.missing().join(", ")),
        }
    }
    kernels
}

/// The kernels of this CPU, and for a type that may be in place those that leave it there.
fn kernels_of(format: Format) -> Vec<Llamafile> {
    let both = |k: Llamafile| [Some(k), Some(k.in_place()).filter(|k| k.uses_in_place(format))];
    kernels().into_iter().flat_map(both).flatten().collect()
}

/// The kernels for many rows that make words of this type's scales.
fn in_words(format: Format) -> Vec<Llamafile> {
    let many = kernels().into_iter().filter_map(|k| k.for_many());
    let many = many.map(|(_, k)| k);
    many.filter(|k| matches!(k.accepts(format, 16, 256), Ok((InputLayout::Int8Words { .. }, _)))).collect()
}

/// A kernel, for messages.
fn name(k: Llamafile, format: Format) -> String {
    format!("{}{}", k.tier(), if k.uses_in_place(format) { " in place" } else { "" })
}

/// A scale of ordinary size as F16: 2^-9 .. 2^-5, either sign.
fn scale(random: &mut Random) -> [u8; 2] {
    let bits = random.bits();
    ((bits as u16 & 0x83ff) | (6 + (bits >> 32) as u16 % 4) << 10).to_le_bytes()
}

/// What Q4_K loses: nothing that rounding inputs would not bury.
#[test]
fn minima_in_units_of_scales_are_near() {
    let mut random = Random(8);
    // About what quantizers write: a minimum is some 8 times a scale.
    let mut worst = 0f32;
    for _ in 0..2000 {
        let mut block: [u8; ggml::Q4K_BYTES] = std::array::from_fn(|_| random.bits() as u8);
        let d = 0.001 * (1.0 + random.below(1000) as f32 / 500.0);
        let dmin = d * (1.0 + random.below(1000) as f32 / 70.0);
        for (at, v) in [(0, d), (2, dmin)] {
            block[at..at + 2].copy_from_slice(&half::f16::from_f32(v).to_le_bytes());
        }
        let m = Matrix::new(Format::Q4K, 1, ggml::K_COLS, block.to_vec().into(), None).unwrap();
        let (want, got) = (m.decode(), as_packed(&m));
        let size = |v: &[f32]| v.iter().map(|v| v.abs()).sum::<f32>();
        let error: Vec<f32> = want.iter().zip(&got).map(|(a, b)| a - b).collect();
        worst = worst.max(size(&error) / size(&want));
    }
    assert!(worst < 1e-3 && worst > 0.0, "{worst:e}");
}

/// Random bytes in valid blocks.
fn matrix(format: Format, rows: usize, cols: usize, seed: u64) -> Matrix {
    let mut random = Random(seed);
    let mut bytes: Vec<u8> = (0..rows * format.row_bytes(cols).unwrap()).map(|_| random.bits() as u8).collect();
    for block in bytes.chunks_exact_mut(ggml::block(format).unwrap().1) {
        for &at in f16_scales_at(format) {
            block[at..at + 2].copy_from_slice(&scale(&mut random));
        }
        if format == Format::Mxfp4Ggml {
            block[0] = 118 + block[0] % 8;
        }
        if format == Format::Iq1M {
            ggml::iq1_m_pack_scale(scale(&mut random), (&mut *block).try_into().unwrap());
        }
    }
    Matrix::new(format, rows, cols, bytes.into(), None).unwrap()
}

/// Rows of 512 columns of each byte: codes, scales and minima at their extremes, and all points of grids that have as many.
fn extreme(format: Format) -> Matrix {
    let (rows, cols) = (256, 512);
    let row_bytes = format.row_bytes(cols).unwrap();
    let mut bytes = vec![0; rows * row_bytes];
    let block_bytes = ggml::block(format).unwrap().1;
    for (i, block) in bytes.chunks_exact_mut(block_bytes).enumerate() {
        block.fill((i * block_bytes / row_bytes) as u8);
        for &at in f16_scales_at(format) {
            block[at..at + 2].copy_from_slice(&0x1c00u16.to_le_bytes());
        }
        if format == Format::Mxfp4Ggml {
            block[0] = 120;
        }
        if format == Format::Iq1M {
            ggml::iq1_m_pack_scale(0x1c00u16.to_le_bytes(), block.try_into().unwrap());
        }
    }
    Matrix::new(format, rows, cols, bytes.into(), None).unwrap()
}

fn random_rows(rows: usize, cols: usize, seed: u64) -> Vec<f32> {
    let mut random = Random(seed);
    (0..rows * cols).map(|_| random.normal()).collect()
}

/// The largest error relative to the sum of magnitudes, against F64 arithmetic on packed weights and inputs.
fn error(m: &Matrix, x: &Rows, rows: &[u32], out: &[f32]) -> f64 {
    let (w, cols) = (as_packed(m), m.cols());
    let mut worst = 0f64;
    for (&row, out) in rows.iter().zip(out.chunks_exact(m.rows())) {
        let x: Vec<f64> = (0..cols).map(|k| x.get(row as usize, k)).collect();
        for (w, &got) in w.chunks_exact(cols).zip(out) {
            let (mut want, mut size) = (0f64, f64::MIN_POSITIVE);
            for (&w, &x) in w.iter().zip(&x) {
                want += w as f64 * x;
                size += (w as f64 * x).abs();
            }
            let error = (got as f64 - want).abs() / size;
            worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
        }
    }
    worst
}

#[test]
fn products_match_plain_arithmetic_for_all_shapes() {
    for format in native() {
        for &(outputs, cols) in shapes(format) {
            let m = matrix(format, outputs, cols, cols as u64);
            for count in ROWS {
                let values = random_rows(count, cols, count as u64);
                let rows: Vec<u32> = (0..count as u32).collect();
                let mut first: Option<Vec<f32>> = None;
                for k in kernels_of(format) {
                    let (layout, _) = k.accepts(format, outputs, cols).unwrap();
                    let x = Rows::new(k, layout, &values, cols);
                    let out = product(k, &weights(k, &m), 0..outputs, &x, &rows);
                    let what = format!("{format} [{outputs}, {cols}] x {count} rows on {}", name(k, format));
                    // One rounding of F32 per step of 16 or 32 columns, far below the sum of magnitudes.
                    let error = error(&m, &x, &rows, &out);
                    assert!(error < 3e-6, "{what}: relative error {error:e}");
                    let first = first.get_or_insert_with(|| out.clone());
                    assert!(out.iter().zip(first).all(|(a, b)| a.to_bits() == b.to_bits()), "{what} differs from avx2");
                }
            }
        }
    }
}

#[test]
fn products_with_scales_as_words_are_near_and_the_same_in_any_batch() {
    let mut types = 0;
    for format in native() {
        types += usize::from(!in_words(format).is_empty());
        for &(outputs, cols) in shapes(format) {
            let m = matrix(format, outputs, cols, cols as u64);
            let values = random_rows(70, cols, 3);
            let rows: Vec<u32> = (0..70).collect();
            let mut first: Option<Vec<f32>> = None;
            for k in in_words(format) {
                let (layout, _) = k.accepts(format, outputs, cols).unwrap();
                let (x, w) = (Rows::new(k, layout, &values, cols), weights(k, &m));
                let out = product(k, &w, 0..outputs, &x, &rows);
                let error = error(&m, &x, &rows, &out);
                assert!(error < 1e-3, "{format} [{outputs}, {cols}]: relative error {error:e}");
                let first = first.get_or_insert_with(|| out.clone());
                assert!(out.iter().zip(first).all(|(a, b)| a.to_bits() == b.to_bits()), "{format} differs by ports");
                for n in [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 40] {
                    let pick: Vec<u32> = (0..n).map(|i| (i * 17 + n) % 70).collect();
                    let got = product(k, &w, 0..outputs, &x, &pick);
                    for (got, &row) in got.chunks_exact(outputs).zip(&pick) {
                        let want = &out[row as usize * outputs..][..outputs];
                        assert!(got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits()), "{format}, {n} rows");
                    }
                }
            }
        }
    }
    let vnni = [Tier::AvxVnni, Tier::Avx512Vnni];
    assert_eq!(types, if kernels().iter().any(|k| vnni.contains(&k.tier())) { 13 } else { 0 });
}

#[test]
fn extreme_codes_do_not_overflow() {
    const ALL: [u32; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
    for format in native() {
        let m = extreme(format);
        for pattern in [[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]] {
            let values: Vec<f32> = (0..16 * 512).map(|i| pattern[i % 2]).collect();
            for k in kernels_of(format) {
                let (layout, _) = k.accepts(format, m.rows(), m.cols()).unwrap();
                let x = Rows::new(k, layout, &values, m.cols());
                // Rows that stream, with 256 bits and with 512, and rows that do not.
                for rows in [2, 10, 16].map(|rows| &ALL[..rows]) {
                    let error = error(&m, &x, rows, &product(k, &weights(k, &m), 0..m.rows(), &x, rows));
                    assert!(error < 3e-6, "{format} on {}: relative error {error:e}", name(k, format));
                }
            }
            for k in in_words(format) {
                let (layout, _) = k.accepts(format, m.rows(), m.cols()).unwrap();
                let x = Rows::new(k, layout, &values, m.cols());
                let got = product(k, &weights(k, &m), 0..m.rows(), &x, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
                let w = as_packed(&m);
                let most = w.iter().fold(0f32, |most, w| most.max(w.abs()));
                for (o, w) in w.chunks_exact(m.cols()).enumerate() {
                    let want: f64 = w.iter().enumerate().map(|(k, &w)| w as f64 * x.get(9, k)).sum();
                    // Of outputs whose scales and minima cancel out what is left is anything: as a fraction of the largest that there are.
                    let error = (got[9 * m.rows() + o] as f64 - want).abs() / (most as f64 * m.cols() as f64);
                    assert!(error < 1e-3, "{format} in words: output {o} is off by {error:e}");
                }
            }
        }
    }
}

#[test]
fn numbers_do_not_depend_on_other_rows_or_on_cuts() {
    for format in native() {
        // Several cuts of the columns too.
        let (outputs, cols) = (211, 2304);
        let m = matrix(format, outputs, cols, 7);
        let count = 70;
        let values = random_rows(count, cols, 3);
        for k in kernels_of(format) {
            let (layout, _) = k.accepts(format, outputs, cols).unwrap();
            let x = Rows::new(k, layout, &values, cols);
            let w = weights(k, &m);
            let all: Vec<u32> = (0..count as u32).collect();
            let whole = product(k, &w, 0..outputs, &x, &all);
            let lists: [&[u32]; 6] =
                [&[69], &[5, 5, 5], &[3, 1, 2, 1], &[0, 69, 34, 17, 8, 8, 2], &[9, 8, 7, 6, 5, 4, 3, 2, 1, 0], &[]];
            for rows in lists {
                for cut in [0..outputs, 0..16, 64..outputs, 128..129, 64..150, 128..128] {
                    let out = product(k, &w, cut.clone(), &x, rows);
                    assert_eq!(out.len(), rows.len() * cut.len());
                    for (i, &row) in rows.iter().enumerate() {
                        for (j, output) in cut.clone().enumerate() {
                            let (got, want) = (out[i * cut.len() + j], whole[row as usize * outputs + output]);
                            assert_eq!(
                                got.to_bits(),
                                want.to_bits(),
                                "{format} on {}: row {row} {cut:?}",
                                name(k, format)
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn rows_may_lie_apart() {
    let m = matrix(Format::Q4K, 66, 256, 11);
    let odd = m.select_rows(1, 2, 33).unwrap();
    for k in kernels() {
        let (layout, _) = k.accepts(Format::Q4K, 66, 256).unwrap();
        let x = Rows::new(k, layout, &random_rows(3, 256, 5), 256);
        let of = |m: &Matrix| product(k, &weights(k, m), 0..m.rows(), &x, &[2]);
        let (all, some) = (of(&m), of(&odd));
        for (i, v) in some.iter().enumerate() {
            assert_eq!(*v, all[2 * i + 1]);
        }
    }
}

#[test]
fn a_non_finite_input_poisons_its_row_only() {
    for format in native() {
        let m = matrix(format, 16, 256, 9);
        let mut values = random_rows(3, 256, 1);
        values[256 + 77] = f32::NAN;
        for k in kernels_of(format).into_iter().chain(in_words(format)) {
            let (layout, _) = k.accepts(format, 16, 256).unwrap();
            let x = Rows::new(k, layout, &values, 256);
            let out = product(k, &weights(k, &m), 0..16, &x, &[0, 1, 2]);
            assert!(out[16..32].iter().all(|v| v.is_nan()), "{format} on {}", name(k, format));
            assert!(out[..16].iter().chain(&out[32..]).all(|v| v.is_finite()), "{format} on {}", name(k, format));
        }
    }
}

#[test]
fn what_is_declined_has_a_reason() {
    assert!(Llamafile::detect(Tier::Portable).unwrap_err().0.contains("limited to tier portable"));
    for k in kernels() {
        assert_eq!(Llamafile::detect(k.tier()).unwrap().tier(), k.tier());
        for format in [Format::F32, Format::Bf16, Format::Int4(Group::Of(32))] {
            assert!(k.accepts(format, 10, 256).unwrap_err().0.contains(&format.to_string()));
        }
    }
}

#[test]
fn only_iq1_iq2_and_iq3_can_be_in_place() {
    for format in native() {
        let in_place = format.to_string().starts_with(['I']) && !format.to_string().starts_with("IQ4");
        for k in kernels() {
            let lean = k.in_place();
            assert_eq!(lean.uses_in_place(format), in_place, "{format}");
            assert!(k.packed_bytes(format, 32, 256).is_some() && !k.uses_in_place(format), "{format}");
            assert_eq!(lean.packed_bytes(format, 32, 256).is_none(), in_place, "{format}");
            let how = |k: Llamafile| k.accepts(format, 32, 256).unwrap().1;
            assert!(how(k).contains("repacked"), "{}", how(k));
            assert_eq!(how(lean).contains("in place"), in_place, "{}", how(lean));
        }
    }
}

#[test]
fn packed_bytes_change_with_the_layout_version_only() {
    let matrices = |format: Format| {
        let (rows, cols) = (37, if ggml::block(format).unwrap().0 == 32 { 416 } else { 1280 });
        // Random bits, as scales too: they are moved, not computed with.
        let mut random = Random(1);
        let blocks: Vec<u8> = (0..rows * format.row_bytes(cols).unwrap()).map(|_| random.bits() as u8).collect();
        (format, vec![Matrix::new(format, rows, cols, blocks.into(), None).unwrap()])
    };
    for kernel in kernels() {
        packs_as_known(kernel, PACKED, native().into_iter().map(matrices));
    }
}

#[test]
fn pieces_of_a_matrix_are_packed_as_the_whole() {
    if let Ok(kernel) = Llamafile::detect(Tier::Amx) {
        kt_core::testing::pieces_pack_as_the_whole(kernel);
    }
}
