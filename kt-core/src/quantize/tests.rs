use std::sync::Arc;

use super::*;
use crate::format::ALL;
use crate::layer::Proj;
use crate::source::WeightSource;
use crate::source::synthetic::SyntheticSource;

fn normal(rows: usize, cols: usize) -> Vec<f32> {
    let source =
        SyntheticSource::builder().hidden(cols).intermediate(rows).format(Format::F32).seed(7).build().unwrap();
    source.matrix(0, 0, Proj::Gate).unwrap().decode()
}

/// Shapes and values of expert matrices of a trained model: each projection, from every layer.
fn tiny_model() -> Vec<(usize, usize, Vec<f32>)> {
    let file = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../kt-cli/model/model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let mut out = Vec::new();
    for (layer, expert) in [(0, 0), (1, 5), (2, 3), (3, 7)] {
        for proj in ["gate_proj", "up_proj", "down_proj"] {
            let t = tensors.tensor(&format!("model.layers.{layer}.mlp.experts.{expert}.{proj}.weight")).unwrap();
            let bytes = Bytes::copy_from_slice(t.data());
            let m = Matrix::new(Format::Bf16, t.shape()[0], t.shape()[1], bytes, None).unwrap();
            out.push((m.rows(), m.cols(), m.decode()));
        }
    }
    out
}

#[test]
fn errors_on_a_trained_model_are_at_most_those_of_common_encoders() {
    // Relative RMS errors of round-to-nearest encoders on this model: amax scales (asymmetric: of minimum and maximum; of MX formats the power of
    // two of amax), and ggml's own for GGUF types.
    let bounds = [
        (Format::Bf16, 0.0),
        (Format::Fp8Block, 0.0265),
        (Format::Fp8Channel, 0.0261),
        (Format::Int8(Group::Row), 0.0069),
        (Format::Int8(Group::Of(32)), 0.0057),
        (Format::Int4(Group::Row), 0.1150),
        (Format::Int4(Group::Of(128)), 0.0963),
        // The best scale of either sign, searched in steps of a fiftieth of the largest value's code, gives 0.0805. Q4_K's 0.0712 at as
        // many bits is out of reach of a grid through 0 without minima.
        (Format::Int4(Group::Of(32)), 0.0806),
        (Format::Int4Asym(Group::Row), 0.1085),
        (Format::Int4Asym(Group::Of(128)), 0.0945),
        // The best of all scales and zero points: 0.0763.
        (Format::Int4Asym(Group::Of(32)), 0.0765),
        (Format::Int4Ordered(Group::Row), 0.1085),
        (Format::Int4Ordered(Group::Of(32)), 0.0804),
        (Format::Int8Asym(Group::Row), 0.0069),
        (Format::Int8Asym(Group::Of(32)), 0.0057),
        (Format::Int8Ordered(Group::Of(32)), 0.0057),
        (Format::Mxfp4, 0.1159),
        (Format::Mxfp8, 0.0300),
        (Format::Nvfp4, 0.0952),
        (Format::Q8_0, 0.0053),
        (Format::Q6K, 0.0177),
        (Format::Q5K, 0.0360),
        (Format::Q4K, 0.0712),
        (Format::Q4_0, 0.0856),
        (Format::Q4_1, 0.0780),
        (Format::Q5_0, 0.0425),
        (Format::Q5_1, 0.0378),
        (Format::Mxfp4Ggml, 0.1160),
        // No common encoder was at hand for these: what this one gave when it was written.
        (Format::Q2K, 0.2631),
        (Format::Q3K, 0.1437),
        (Format::Iq4Nl, 0.0733),
        (Format::Iq4Xs, 0.0740),
        (Format::Iq2Xxs, 0.3271),
        (Format::Iq2Xs, 0.2846),
        (Format::Iq2S, 0.2384),
        (Format::Iq3Xxs, 0.1777),
        (Format::Iq3S, 0.1296),
        (Format::Iq1S, 0.4431),
        (Format::Iq1M, 0.4112),
        (Format::Tq1_0, 0.4328),
        (Format::Tq2_0, 0.4328),
    ];
    let model = tiny_model();
    let mut failures = Vec::new();
    for (format, bound) in bounds {
        let (mut reference, mut decoded) = (Vec::new(), Vec::new());
        for (rows, cols, values) in &model {
            decoded.extend(encode(format, *rows, *cols, values).unwrap().decode());
            reference.extend_from_slice(values);
        }
        let rms = relative_error(&reference, &decoded).rms_ratio;
        // Twelve of 96 matrices: their errors differ from those of the whole model by up to 2 %.
        if rms > bound * 1.02 {
            failures.push(format!("{format}: {rms:.5} > {bound}"));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn every_format_and_awkward_shape_comes_back_close() {
    for format in ALL {
        let mut fitting = 0;
        for (rows, cols) in [(1, 32), (3, 96), (17, 704), (129, 256), (40, 512), (130, 192)] {
            let values = normal(rows, cols);
            if format.row_bytes(cols).is_err() {
                assert!(encode(format, rows, cols, &values).unwrap_err().contains("multiples"));
                continue;
            }
            fitting += 1;
            let m = encode(format, rows, cols, &values).unwrap();
            assert_eq!((m.format(), m.rows(), m.cols()), (format, rows, cols));
            assert_eq!(m.byte_len(), format.stored_bytes(rows, cols));
            let error = relative_error(&values, &m.decode()).rms_ratio;
            let bound = match format {
                Format::F32 => 0.0,
                Format::F16 => 3e-4,
                Format::Bf16 => 2e-3,
                Format::Int8(_)
                | Format::Int8Offset(_)
                | Format::Int8Asym(_)
                | Format::Int8Ordered(_)
                | Format::Q8_0 => 0.01,
                Format::Fp8Block | Format::Fp8Channel | Format::Mxfp8 => 0.03,
                Format::Q6K => 0.02,
                Format::Q5K | Format::Q5_0 | Format::Q5_1 => 0.05,
                Format::Q3K => 0.19,
                Format::Q2K => 0.3,
                Format::Mxfp4Ggml | Format::Mxfp4 => 0.14,
                Format::Iq3Xxs => 0.2,
                Format::Iq3S => 0.15,
                Format::Iq2Xxs | Format::Iq2Xs | Format::Iq2S => 0.34,
                Format::Iq1S | Format::Iq1M | Format::Tq1_0 | Format::Tq2_0 => 0.46,
                _ => 0.13,
            };
            assert!(error <= bound, "{format} [{rows}, {cols}]: {error}");
        }
        assert!(fitting >= 2, "{format}");
    }
}

fn zero_points(m: &Matrix) -> Vec<i32> {
    let groups = m.scales().map_or(0, |s| s.cols());
    (0..m.rows()).flat_map(|row| (0..groups).map(move |g| m.zero_point(row, g))).collect()
}

#[test]
fn the_number_of_threads_does_not_matter() {
    let values = normal(150, 256);
    for format in ALL {
        let bytes = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let m = pool.install(|| encode(format, 150, 256, &values)).unwrap();
            (
                m.codes().clone(),
                m.scales().map(|s| s.bytes().to_vec()),
                zero_points(&m),
                m.column_groups().map(<[u32]>::to_vec),
            )
        };
        assert_eq!(bytes(1), bytes(3), "{format}");
    }
}

/// What the encoders make of a band by the instructions that this CPU has, and by those that every CPU has.
#[test]
fn all_instructions_give_the_same_bytes() {
    let (rows, cols) = (5, 512);
    let values = normal(rows, cols);
    let importance: Vec<f32> = normal(1, cols).iter().map(|v| v * v).collect();
    for (format, weights) in ALL.into_iter().flat_map(|f| [(f, None), (f, Some(&importance[..]))]) {
        let band_of = |encode: &dyn Fn(Band<'_>)| {
            let (scale_rows, scale_cols) = format.scale_shape(rows, cols).unwrap_or((0, 0));
            let mut codes = vec![0; rows * format.row_bytes(cols).unwrap()];
            let mut scales = vec![0; scale_rows * scale_cols * scale_type(format).bytes()];
            let mut zeros = vec![0; scale_rows * scale_cols];
            encode(Band {
                format,
                cols,
                values: &values,
                codes: &mut codes,
                scales: &mut scales,
                zeros: &mut zeros,
                global: 0.01,
            });
            (codes, scales, zeros)
        };
        let best = band_of(&|band| tier::encode(band, weights));
        let plain = band_of(&|band| tier::encode_with::<tier::Plain>(band, weights));
        assert!(best == plain, "{format}, weighted: {}", weights.is_some());
    }
    for len in [0, 1, 63, 64, 200] {
        let (before, after) = (&values[..len], &values[300..300 + len]);
        assert_eq!(tier::difference(before, after), tier::difference_with::<tier::Plain>(before, after));
    }
}

/// Root of the weighted mean square of the difference, in proportion.
fn weighted_error(reference: &[f32], got: &[f32], importance: &[f32]) -> f64 {
    let (mut of, mut diff) = (0.0, 0.0);
    for (i, (&r, &g)) in reference.iter().zip(got).enumerate() {
        let (r, g, weight) = (r as f64, g as f64, importance[i % importance.len()] as f64);
        of += weight * r * r;
        diff += weight * (r - g) * (r - g);
    }
    (diff / of).sqrt()
}

#[test]
fn important_columns_are_rounded_better() {
    let (rows, cols) = (24, 512);
    let values = normal(rows, cols);
    // A few columns count much more than the others, as the outliers of activations do.
    let importance: Vec<f32> = normal(1, cols).iter().map(|v| v.powi(6)).collect();
    for format in ALL {
        let plain = encode(format, rows, cols, &values).unwrap().decode();
        let weighted = encode_weighted(format, rows, cols, &values, Some(&importance)).unwrap().decode();
        let errors = [&plain, &weighted].map(|got| weighted_error(&values, got, &importance));
        let searched = match format {
            Format::Int4(_) | Format::Int4Asym(_) | Format::Int4Ordered(_) => true,
            _ => format.to_string().contains("_K") || format.to_string().contains("IQ4"),
        };
        match searched || matches!(format, Format::Q4_0 | Format::Q4_1 | Format::Q5_0 | Format::Q5_1) {
            true => assert!(errors[1] < errors[0] * 0.99, "{format}: {errors:?}"),
            false => assert!(errors[1] <= errors[0] * 1.01, "{format}: {errors:?}"),
        }
        // Alike, or nothing at all: as without.
        for same in [vec![0.25; cols], vec![0.0; cols]] {
            let got = encode_weighted(format, rows, cols, &values, Some(&same)).unwrap().decode();
            assert_eq!(got, plain, "{format}");
        }
    }
    let wrong = |importance: &[f32]| {
        encode_weighted(Format::Q4K, rows, cols, &values, Some(importance)).unwrap_err().to_string()
    };
    assert!(wrong(&importance[1..]).contains("512 columns have the importance of 511"));
    assert!(wrong(&[-1.0; 512]).contains("column 0 is -1"));
}

#[test]
fn ordered_formats_put_columns_of_one_size_together() {
    // Every fourth column is a hundred times as large as the others.
    let (rows, cols) = (20, 256);
    let mut values = normal(rows, cols);
    for (i, v) in values.iter_mut().enumerate() {
        *v *= if i % 4 == 1 { 100.0 } else { 1.0 };
    }
    let small = |values: &[f32]| -> Vec<f32> {
        values.iter().enumerate().filter(|(i, _)| i % 4 != 1).map(|(_, &v)| v).collect()
    };
    let error =
        |format| relative_error(&small(&values), &small(&encode(format, rows, cols, &values).unwrap().decode()));
    for (asymmetric, ordered, bound) in [
        (Format::Int4Asym(Group::Of(32)), Format::Int4Ordered(Group::Of(32)), 0.13),
        (Format::Int8Asym(Group::Of(32)), Format::Int8Ordered(Group::Of(32)), 0.01),
    ] {
        let (without, with) = (error(asymmetric).rms_ratio, error(ordered).rms_ratio);
        assert!(with < bound && without > 10.0 * with.min(0.09), "{ordered}: {with}, in order {without}");
    }
}

#[test]
fn exact_values_stay_exact() {
    // Values on each format's own grid come back as they are, except where scales have to be searched.
    for format in [Format::Q8_0, Format::Int8(Group::Row), Format::Int8(Group::Of(32)), Format::Int4(Group::Of(32))] {
        let values: Vec<f32> =
            (0..512).map(|i| ((i * 37 % 15) as f32 - 7.0) * if i % 32 == 0 { 0.0 } else { 0.25 }).collect();
        let error = relative_error(&values, &encode(format, 2, 256, &values).unwrap().decode());
        let allowed = if matches!(format, Format::Int4(_)) { 0.0 } else { 0.01 };
        assert!(error.rms_ratio <= allowed, "{format}: {error:?}");
    }
    for format in ALL {
        assert_eq!(encode(format, 3, 256, &[0.0; 768]).unwrap().decode(), [0.0; 768], "{format} of zeros");
    }
}

#[test]
fn constant_positive_tiny_and_huge_rows_are_no_trouble() {
    for format in ALL {
        for v in [1.0, -1.0, 3e-5, -1e-30, f32::MIN_POSITIVE / 8.0, 100.0] {
            let decoded = encode(format, 2, 256, &[v; 512]).unwrap().decode();
            assert!(decoded.iter().all(|d| d.is_finite()), "{format} of {v}");
            // F16 scales reach down to 6e-8 only; FP8 and INT8 scales are as fine as F32.
            if v.abs() >= 3e-5 {
                // A K-type's scale is 1/63 (or 1/128) of an F16 number: 3e-5 / 15 / 63 = 3e-8 is below the smallest.
                let bound = if v == 3e-5 { 1.0 } else { 0.05 };
                let error = relative_error(&[v; 512], &decoded).rms_ratio;
                assert!(error <= bound, "{format} of {v}: {error}");
            }
        }
        // One outlier among small values: they may vanish, but nothing may blow up.
        let mut values = vec![1e-3; 256];
        values[77] = 5e3;
        let error = relative_error(&values, &encode(format, 1, 256, &values).unwrap().decode()).rms_ratio;
        let bound = match format {
            // Steps between the largest E2M1 values are a third or half of them: 5000 lies between 4096 and 6144.
            Format::Mxfp4 | Format::Mxfp4Ggml | Format::Nvfp4 => 0.2,
            // Grids have no zeros: what is beside the outlier in its group becomes at least a fifth of it, or a fifteenth.
            Format::Iq2Xxs | Format::Iq2Xs | Format::Iq2S | Format::Iq1S | Format::Iq1M => 1.0,
            Format::Iq3Xxs | Format::Iq3S => 0.5,
            _ => 0.05,
        };
        assert!(error < bound, "{format} with an outlier: {error}");
    }
}

#[test]
fn what_cannot_be_held_is_named() {
    let mut values = vec![0.5; 1024];
    values[256 * 2 + 9] = f32::NAN;
    for format in ALL {
        match format {
            Format::F32 | Format::F16 | Format::Bf16 => {
                assert!(encode(format, 4, 256, &values).unwrap().decode()[521].is_nan());
            }
            _ => {
                let message = encode(format, 4, 256, &values).unwrap_err();
                assert!(message.contains("[2, 9], NaN"), "{message}");
            }
        }
        assert!(encode(format, 4, 256, &values[1..]).unwrap_err().contains("1023 values"));
    }
    assert!(encode(Format::F16, 1, 1, &[7e4]).unwrap_err().contains("[0, 0], 70000"));
    assert!(encode(Format::Q8_0, 1, 32, &[1e10; 32]).unwrap_err().contains("too large"));
    for format in ALL {
        let huge = encode(format, 1, 256, &[1e20; 256]);
        assert_eq!(huge.is_ok(), matches!(format, Format::F32 | Format::Bf16), "{format}");
    }
    assert!(encode(Format::Bf16, 1, 1, &[f32::MAX]).is_err());
}

#[test]
fn empty_matrices_are_matrices() {
    for format in ALL {
        assert_eq!(encode(format, 0, 256, &[]).unwrap().rows(), 0);
    }
}

#[test]
fn relative_errors_are_ratios_of_means() {
    let e = relative_error(&[3.0, -4.0], &[3.0, -3.0]);
    assert!((e.mean_abs_ratio - 1.0 / 7.0).abs() < 1e-12 && (e.rms_ratio - 0.2).abs() < 1e-12);
    assert_eq!(relative_error(&[0.0], &[0.0]), Errors { mean_abs_ratio: 0.0, rms_ratio: 0.0 });
    assert_eq!(relative_error(&[0.0], &[1.0]).rms_ratio, f64::INFINITY);
    assert!(relative_error(&[0.0], &[]).rms_ratio.is_nan());
}

#[test]
fn requantized_experts_are_those_of_encode() {
    let build = || SyntheticSource::builder().hidden(256).intermediate(128).layers(2).biases(true).build().unwrap();
    let plain: Arc<dyn WeightSource> = Arc::new(build());
    let formats = [Format::Q4K, Format::Bf16, Format::Int8(Group::Of(32))];
    let source = Requantized::new(plain.clone(), formats).unwrap();
    assert_eq!(source.layers().len(), 2);
    for layer in source.layers() {
        assert_eq!(layer.formats, formats);
        assert_eq!(layer.hidden, 256);
        for proj in Proj::ALL {
            let (from, to) =
                (plain.matrix(layer.index, 2, proj).unwrap(), source.matrix(layer.index, 2, proj).unwrap());
            let want = encode(layer.format(proj), from.rows(), from.cols(), &from.decode()).unwrap();
            assert_eq!(to.format(), layer.format(proj));
            assert_eq!(to.codes(), want.codes());
            assert_eq!(to.scales().map(|s| s.bytes()), want.scales().map(|s| s.bytes()));
            assert_eq!(zero_points(&to), zero_points(&want));
            assert_eq!(source.bias(layer.index, 2, proj).unwrap(), plain.bias(layer.index, 2, proj).unwrap());
        }
    }
    let up = plain.matrix(1, 2, Proj::Up).unwrap();
    assert_eq!(recode(&up, Format::Bf16).unwrap().codes().as_ptr(), up.codes().as_ptr(), "the same format is no copy");
    assert_eq!(source.path(), plain.path());
    assert_eq!(source.routing(1), plain.routing(1));
    assert!(source.matrix(2, 0, Proj::Up).is_err() && source.matrix(0, 99, Proj::Up).is_err());

    let message = Requantized::new(plain, Format::Q4K).err().unwrap().to_string();
    assert!(message.contains("layer 0, down [256, 128]") && message.contains("256, got 128"), "{message}");
}
