use super::*;
use crate::format::ALL;

fn moments(values: &[f32]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().map(|&v| v as f64).sum::<f64>() / n;
    (mean, (values.iter().map(|&v| (v as f64 - mean).powi(2)).sum::<f64>() / n).sqrt())
}

#[test]
fn every_format_decodes_to_normal_values_of_the_right_size() {
    let shapes = [(96, 704), (704, 96), (512, 256), (130, 192), (256, 768)];
    let mut seen = Vec::new();
    for format in ALL {
        for (intermediate, hidden) in shapes {
            let source = SyntheticSource::builder().hidden(hidden).intermediate(intermediate).format(format).build();
            let Ok(source) = source else {
                assert!(format.row_bytes(hidden).is_err() || format.row_bytes(intermediate).is_err());
                continue;
            };
            seen.push(format);
            for proj in Proj::ALL {
                let m = source.matrix(0, 3, proj).unwrap();
                assert_eq!((m.rows(), m.cols()), source.layers()[0].shape(proj));
                m.check_scales().unwrap();
                let values = m.decode();
                let target = 1.0 / (m.cols() as f64).sqrt();
                let (mean, deviation) = moments(&values);
                let ratio = deviation / target;
                assert!((0.85..1.15).contains(&ratio), "{format} {proj:?} {hidden}: {ratio}");
                assert!(mean.abs() < 0.06 * target, "{format} {proj:?} {hidden}: mean {mean}");
                // A normal distribution has 4.55 % of its values beyond two deviations.
                let far = values.iter().filter(|v| (v.abs() as f64) > 2.0 * deviation).count();
                let share = far as f64 / values.len() as f64;
                let allowed = match format {
                    // Codes as coarse as E2M1, with powers of two, have few values there or many.
                    Format::Mxfp4 | Format::Mxfp4Ggml | Format::Nvfp4 => 0.015..0.1,
                    // Ternary codes have next to none, and IQ1's are nearly ternary.
                    Format::Tq1_0 | Format::Tq2_0 => 0.0..0.01,
                    Format::Iq1S | Format::Iq1M => 0.0..0.05,
                    _ => 0.025..0.07,
                };
                assert!(allowed.contains(&share), "{format} {proj:?} {hidden}: {share}");
            }
        }
    }
    seen.dedup();
    assert_eq!(seen, ALL, "each format fits at least one of the shapes");
}

#[test]
fn the_seed_decides_and_no_two_matrices_are_equal() {
    let build = |seed| SyntheticSource::builder().layers(2).experts(3).biases(true).seed(seed).build().unwrap();
    for format in ALL {
        let one = SyntheticSource::builder().format(format).build().unwrap();
        let two = SyntheticSource::builder().format(format).build().unwrap();
        let (a, b) = (one.matrix(0, 1, Proj::Up).unwrap(), two.matrix(0, 1, Proj::Up).unwrap());
        assert_eq!(a.codes(), b.codes());
        assert_eq!(a.scales().map(|s| s.bytes()), b.scales().map(|s| s.bytes()));
    }
    let mut seen = std::collections::HashSet::new();
    let mut count = 0;
    for seed in [0, 1, u64::MAX] {
        let source = build(seed);
        for (layer, expert) in (0..2).flat_map(|l| (0..3).map(move |e| (l, e))) {
            for proj in Proj::ALL {
                seen.insert(source.matrix(layer, expert, proj).unwrap().codes().to_vec());
                let bias = source.bias(layer, expert, proj).unwrap().unwrap();
                assert_eq!(bias, build(seed).bias(layer, expert, proj).unwrap().unwrap());
                seen.insert(bytemuck::cast_slice(&bias).to_vec());
                count += 2;
            }
        }
    }
    assert_eq!(seen.len(), count);
}

#[test]
fn fp8_codes_are_never_nan() {
    assert!(TABLES.fp8.codes.iter().all(|c| c & 0x7f != 0x7f));
}

#[test]
fn quantiles_are_those_of_a_normal_distribution() {
    let q = quantiles::<TABLE>();
    // 97.5 % lie below 1.96, 99.98779 % (the last of 4096) below 3.6697.
    assert!((q[3993] - 1.959).abs() < 0.003 && (q[4095] - 3.6697).abs() < 0.003, "{} {}", q[3993], q[4095]);
    assert!(q.is_sorted() && q[0] == -q[4095]);
}

#[test]
fn impossible_sources_are_refused_with_a_reason() {
    let message = |b: SyntheticBuilder| b.build().unwrap_err().to_string();
    let b = SyntheticSource::builder;
    assert!(message(b().hidden(704).format(Format::Q4K)).contains("gate"));
    assert!(message(b().intermediate(704).format([Format::Q4K, Format::Q4K, Format::Q6K])).contains("down: Q6_K"));
    assert!(message(b().hidden(0)).contains("hidden is 0"));
    assert!(message(b().top_k(9)).contains("9 of 8"));
    let source = b().build().unwrap();
    assert!(matches!(source.matrix(1, 0, Proj::Up), Err(Error::NoSuchLayer { layer: 1, .. })));
    assert!(source.matrix(0, 8, Proj::Up).unwrap_err().to_string().contains("expert 8"));
    assert!(source.tensor("x").is_err() && source.bias(0, 0, Proj::Up).unwrap().is_none());
    source.routing(0).unwrap().check(8).unwrap();
}
