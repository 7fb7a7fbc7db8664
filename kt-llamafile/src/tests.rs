//! The products against plain arithmetic, on every tier that this CPU has.

use std::ops::Range;

use kt_core::activation::Activation;
use kt_core::cpu::input::{BLOCK, InputLayout, Inputs, pack_block};
use kt_core::cpu::kernel::{Kernel, Outputs, Scratch, Weights};
use kt_core::cpu::memory::AlignedBytes;
use kt_core::cpu::tier::Tier;
use kt_core::testing::Random;
use kt_core::{Format, Group, Matrix};

use crate::Llamafile;

const LAYOUT: InputLayout = InputLayout::Int8 { group: 32, times: 1 };
const ROWS: [usize; 8] = [1, 2, 3, 5, 8, 13, 40, 300];

/// What this backend multiplies itself.
const NATIVE: [Format; 5] = [Format::Q8_0, Format::Q4_0, Format::Q5_0, Format::Q4K, Format::Q6K];

/// Formats with widths that are not multiples of tiles or input blocks, and tall and short matrices.
const CASES: [(Format, usize, usize); 22] = [
    (Format::Q8_0, 16, 32),
    (Format::Q8_0, 17, 96),
    (Format::Q8_0, 96, 160),
    (Format::Q8_0, 1, 128),
    (Format::Q8_0, 33, 2880),
    (Format::Q4_0, 17, 96),
    (Format::Q4_0, 96, 160),
    (Format::Q4_0, 1, 128),
    (Format::Q4_0, 33, 2880),
    (Format::Q5_0, 17, 96),
    (Format::Q5_0, 96, 160),
    (Format::Q5_0, 1, 32),
    (Format::Q5_0, 33, 2880),
    (Format::Q4K, 16, 256),
    (Format::Q4K, 17, 768),
    (Format::Q4K, 96, 512),
    (Format::Q4K, 704, 256),
    (Format::Q4K, 31, 2048),
    (Format::Q6K, 16, 256),
    (Format::Q6K, 17, 768),
    (Format::Q6K, 96, 512),
    (Format::Q6K, 31, 2048),
];

/// The kernels of this CPU; says which tiers are left out.
fn kernels() -> Vec<Llamafile> {
    let mut kernels = Vec::new();
    for tier in [Tier::Avx2, Tier::Avx512, Tier::Avx512Vnni] {
        match Llamafile::detect(tier) {
            Ok(k) if k.tier() == tier => kernels.push(k),
            _ => println!("skipped {tier}: this CPU lacks {}", tier.missing().join(", ")),
        }
    }
    kernels
}

/// A scale of ordinary size as F16: 2^-9 .. 2^-5, either sign.
fn scale(random: &mut Random) -> [u8; 2] {
    let bits = random.bits();
    ((bits as u16 & 0x83ff) | (6 + (bits >> 32) as u16 % 4) << 10).to_le_bytes()
}

/// Byte offsets of the F16 scales in a block of so many bytes.
fn layout(format: Format) -> (usize, &'static [usize]) {
    match format {
        Format::Q8_0 => (34, &[0]),
        Format::Q4_0 => (18, &[0]),
        Format::Q5_0 => (22, &[0]),
        Format::Q4K => (144, &[0, 2]),
        Format::Q6K => (210, &[208]),
        other => panic!("{other}"),
    }
}

/// Random bytes in valid blocks.
fn matrix(format: Format, rows: usize, cols: usize, seed: u64) -> Matrix {
    let mut random = Random(seed);
    let mut bytes: Vec<u8> = (0..rows * format.row_bytes(cols).unwrap()).map(|_| random.bits() as u8).collect();
    let (block_bytes, scales) = layout(format);
    for block in bytes.chunks_exact_mut(block_bytes) {
        for &at in scales {
            block[at..at + 2].copy_from_slice(&scale(&mut random));
        }
    }
    Matrix::new(format, rows, cols, bytes.into(), None).unwrap()
}

/// Every code, scale and minimum at an extreme.
fn extreme(format: Format, rows: usize, cols: usize) -> Matrix {
    let (block_bytes, scales) = layout(format);
    let mut bytes = vec![0; rows * format.row_bytes(cols).unwrap()];
    for (i, block) in bytes.chunks_exact_mut(block_bytes).enumerate() {
        // Q8_0 -128, 127; others all bits, or none but those that make scales -128.
        block.fill(if format == Format::Q8_0 { [0x80, 0x7f][i % 2] } else { [0xff, 0x00, 0x80][i % 3] });
        for &at in scales {
            block[at..at + 2].copy_from_slice(&0x1c00u16.to_le_bytes());
        }
    }
    Matrix::new(format, rows, cols, bytes.into(), None).unwrap()
}

fn random_rows(rows: usize, cols: usize, seed: u64) -> Vec<f32> {
    let mut random = Random(seed);
    (0..rows * cols).map(|_| random.normal()).collect()
}

/// Packs `x: [rows, cols]` as the portable code does.
fn packed(x: &[f32], rows: usize, cols: usize) -> Vec<u8> {
    let mut bytes = vec![0; LAYOUT.bytes(rows, cols)];
    for (i, block) in bytes.chunks_exact_mut(LAYOUT.block_bytes()).enumerate() {
        let (b, r) = (i / rows, i % rows);
        let row = &x[r * cols..][..cols];
        pack_block(LAYOUT, &row[b * BLOCK..cols.min((b + 1) * BLOCK)], block);
    }
    bytes
}

/// The packed rows as numbers, exactly.
fn unpacked(x: &Inputs<'_>) -> Vec<f64> {
    let mut out = vec![0.0; x.rows() * x.cols()];
    for (i, v) in out.iter_mut().enumerate() {
        let (r, k) = (i / x.cols(), i % x.cols());
        let block = x.block(k / BLOCK, r);
        let scale = f32::from_le_bytes(block[BLOCK + k % BLOCK / 32 * 4..][..4].try_into().unwrap());
        *v = scale as f64 * (block[k % BLOCK] as i8) as f64;
    }
    out
}

/// The product with some rows of `x`.
fn product(k: Llamafile, m: &Matrix, outputs: Range<usize>, x: Inputs<'_>, rows: &[u32]) -> Vec<f32> {
    let mut out = vec![f32::NAN; rows.len() * outputs.len()];
    let blocks = (0..x.blocks()).flat_map(|b| rows.iter().map(move |&r| x.block(b, r as usize)));
    let mut memory = AlignedBytes::default();
    let picked = memory.get(LAYOUT.bytes(rows.len(), x.cols()));
    for (to, from) in picked.chunks_exact_mut(LAYOUT.block_bytes()).zip(blocks) {
        to.copy_from_slice(from);
    }
    let x = Inputs::new(LAYOUT, rows.len(), x.cols(), picked);
    let weights = Weights::in_place(m.clone());
    k.product(Outputs::new(&weights, outputs), x, 0..rows.len(), &mut out, &mut Scratch::default());
    out
}

/// The largest error relative to the sum of magnitudes, against F64 arithmetic on decoded weights and packed inputs.
fn error(m: &Matrix, x: &Inputs<'_>, rows: &[u32], out: &[f32]) -> f64 {
    let (w, x_values, cols) = (m.decode(), unpacked(x), m.cols());
    let mut worst = 0f64;
    for (&row, out) in rows.iter().zip(out.chunks_exact(m.rows())) {
        let x = &x_values[row as usize * cols..][..cols];
        for (w, &got) in w.chunks_exact(cols).zip(out) {
            let (mut want, mut size) = (0f64, f64::MIN_POSITIVE);
            for (&w, &x) in w.iter().zip(x) {
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
    for (format, outputs, cols) in CASES {
        let m = matrix(format, outputs, cols, cols as u64);
        for count in ROWS {
            let x = random_rows(count, cols, count as u64);
            let bytes = packed(&x, count, cols);
            let x = Inputs::new(LAYOUT, count, cols, &bytes);
            let rows: Vec<u32> = (0..count as u32).collect();
            let results: Vec<_> = kernels().into_iter().map(|k| (k, product(k, &m, 0..outputs, x, &rows))).collect();
            for (k, out) in &results {
                let what = format!("{format} [{outputs}, {cols}] x {count} rows on {}", k.tier());
                // One rounding of F32 per step of 32 columns, far below the sum of magnitudes.
                let error = error(&m, &x, &rows, out);
                assert!(error < 2e-6, "{what}: relative error {error:e}");
                let same = out.iter().zip(&results[0].1).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{what} differs from {}", results[0].0.tier());
            }
        }
    }
}

#[test]
fn extreme_codes_do_not_overflow() {
    for format in NATIVE {
        let m = extreme(format, 18, 512);
        for pattern in [[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]] {
            let x: Vec<f32> = (0..2 * 512).map(|i| pattern[i % 2]).collect();
            let bytes = packed(&x, 2, 512);
            let x = Inputs::new(LAYOUT, 2, 512, &bytes);
            for k in kernels() {
                let error = error(&m, &x, &[0, 1], &product(k, &m, 0..18, x, &[0, 1]));
                assert!(error < 2e-6, "{format} on {}: relative error {error:e}", k.tier());
            }
        }
    }
}

#[test]
fn numbers_do_not_depend_on_other_rows_or_on_cuts() {
    for (format, outputs, cols) in [
        (Format::Q8_0, 96, 160),
        (Format::Q4_0, 81, 160),
        (Format::Q5_0, 60, 96),
        (Format::Q4K, 83, 768),
        (Format::Q6K, 50, 256),
    ] {
        let m = matrix(format, outputs, cols, 7);
        let count = 70;
        let bytes = packed(&random_rows(count, cols, 3), count, cols);
        let x = Inputs::new(LAYOUT, count, cols, &bytes);
        for k in kernels() {
            let all: Vec<u32> = (0..count as u32).collect();
            let whole = product(k, &m, 0..outputs, x, &all);
            let lists: [&[u32]; 5] = [&[69], &[5, 5, 5], &[3, 1, 2, 1], &[0, 69, 34, 17, 8, 8, 2], &[]];
            for rows in lists {
                for cut in [0..outputs, 0..16, 16..outputs, 32..33, 16..49, 48..48] {
                    let out = product(k, &m, cut.clone(), x, rows);
                    assert_eq!(out.len(), rows.len() * cut.len());
                    for (i, &row) in rows.iter().enumerate() {
                        for (j, output) in cut.clone().enumerate() {
                            let (got, want) = (out[i * cut.len() + j], whole[row as usize * outputs + output]);
                            assert_eq!(got.to_bits(), want.to_bits(), "{format} on {}: row {row} {cut:?}", k.tier());
                        }
                    }
                }
            }
            // A list longer than a tile, with repeats, backwards.
            let rows: Vec<u32> = (0..150).map(|i| 69 - i % 70).collect();
            let out = product(k, &m, 0..outputs, x, &rows);
            for (&row, out) in rows.iter().zip(out.chunks_exact(outputs)) {
                assert_eq!(out, &whole[row as usize * outputs..][..outputs], "{format} on {}", k.tier());
            }
        }
    }
}

#[test]
fn rows_may_lie_apart() {
    let m = matrix(Format::Q4K, 66, 256, 11);
    let odd = m.select_rows(1, 2, 33).unwrap();
    let bytes = packed(&random_rows(3, 256, 5), 3, 256);
    let x = Inputs::new(LAYOUT, 3, 256, &bytes);
    for k in kernels() {
        let (all, some) = (product(k, &m, 0..66, x, &[2]), product(k, &odd, 0..33, x, &[2]));
        for (i, v) in some.iter().enumerate() {
            assert_eq!(*v, all[2 * i + 1]);
        }
    }
}

#[test]
fn a_non_finite_input_poisons_its_row_only() {
    for format in NATIVE {
        let m = matrix(format, 16, 256, 9);
        let mut x = random_rows(3, 256, 1);
        x[256 + 77] = f32::NAN;
        let bytes = packed(&x, 3, 256);
        let x = Inputs::new(LAYOUT, 3, 256, &bytes);
        for k in kernels() {
            let out = product(k, &m, 0..16, x, &[0, 1, 2]);
            assert!(out[16..32].iter().all(|v| v.is_nan()), "{format} on {}", k.tier());
            assert!(out[..16].iter().chain(&out[32..]).all(|v| v.is_finite()), "{format} on {}", k.tier());
        }
    }
}

#[test]
fn packing_and_activation_equal_the_portable_code() {
    let x = random_rows(1, 128, 2);
    for k in kernels() {
        for layout in [LAYOUT, InputLayout::Int8 { group: 128, times: 1 }, InputLayout::Bf16, InputLayout::F32] {
            for len in [0, 1, 33, 96, 128] {
                let (mut got, mut want) = (vec![1; layout.block_bytes()], vec![2; layout.block_bytes()]);
                k.pack_input(layout, &x[..len], &mut got);
                pack_block(layout, &x[..len], &mut want);
                assert!(got == want, "{layout}, {len} columns, on {}", k.tier());
            }
        }
        for rule in [Activation::SiluMul, Activation::GptOss { alpha: 1.702, limit: 7.0 }] {
            let (mut got, mut want) = (x.clone(), x.clone());
            k.activate(rule, &mut got, &x);
            rule.apply(&mut want, &x);
            assert_eq!(got, want, "{rule:?} on {}", k.tier());
        }
    }
}

#[test]
fn detection_respects_the_cap_and_declines_with_a_reason() {
    assert!(Llamafile::detect(Tier::Portable).unwrap_err().0.contains("capped at portable"));
    for k in kernels() {
        assert_eq!(Llamafile::detect(k.tier()).unwrap().tier(), k.tier());
        for format in NATIVE {
            assert_eq!(k.accepts(format, 10, 256).unwrap().0, LAYOUT);
            assert_eq!(k.packed_bytes(format, 10, 256), None);
        }
        let reason = k.accepts(Format::Q5K, 10, 256).unwrap_err().0;
        assert_eq!(reason, "Q5_K is not native yet; runs on the portable kernel");
        for format in [Format::Bf16, Format::Int4(Group::Of(32))] {
            assert!(k.accepts(format, 10, 256).unwrap_err().0.contains(&format.to_string()));
        }
    }
}
