//! Whole models against the outputs of an independent implementation.

mod common;

use common::{REFERENCES, Reference, data, greedy, load, logits, max_difference, median_relative_rms, open};

#[test]
fn portable_gives_the_reference_logits_and_tokens() {
    let mut failures = Vec::new();
    for directory in REFERENCES {
        let path = data("reference").join(directory);
        let reference = Reference::read(path.join("reference.safetensors"));
        let source = open(&path);
        let model = load(&source, Some("portable"), 64);
        let difference = max_difference(&logits(&model, &reference.ids), &reference.logits);
        println!("{directory}: largest difference {difference:.2e}");
        if difference.is_nan() || difference >= 1e-4 {
            failures.push(format!("{directory}: logits differ by {difference}"));
        }
        let ids = greedy(&model, &reference.ids, reference.greedy_ids.len());
        if ids != reference.greedy_ids {
            failures.push(format!("{directory}: greedy ids {ids:?}, not {:?}", reference.greedy_ids));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

/// Kernels that round inputs to BF16 are off by about 5e-3 in each block, those with 8-bit inputs by 1e-2; the dense matrices go
/// through the same kernels. The bounds are about twice what is measured with AVX-512 (6e-3 and 1.2e-2).
#[test]
fn the_best_backends_stay_near_the_reference() {
    let mut failures = Vec::new();
    for directory in REFERENCES {
        let path = data("reference").join(directory);
        let reference = Reference::read(path.join("reference.safetensors"));
        let source = open(&path);
        let model = load(&source, None, 64);
        let median = median_relative_rms(&logits(&model, &reference.ids), &reference.logits, model.vocabulary());
        let bound = if directory.ends_with("bf16") || directory.ends_with("fp8_block") { 1.2e-2 } else { 2.5e-2 };
        println!("{directory}: median relative RMS {median:.2e} (bound {bound})");
        if median.is_nan() || median >= bound {
            failures.push(format!("{directory}: {median} is not below {bound}"));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
