//! GGUF files of architecture `deepseek2`, written from a DeepSeek-V3 directory.

mod common;

use common::gguf::{Options, write_deepseek2};
use common::{Reference, data, greedy, load, logits, max_difference, median_relative_rms};
use kt::Format;

fn convert(options: Options) -> std::path::PathBuf {
    let source = kt::open(data("reference/deepseek_v3/bf16")).unwrap();
    let name = format!("kt-deepseek2-{}-{}-{}.gguf", std::process::id(), options.split, options.format);
    let path = std::env::temp_dir().join(name);
    write_deepseek2(&*source, &path, options);
    path
}

#[test]
fn both_ways_to_store_keys_and_values_give_the_reference_logits() {
    let reference = Reference::read(data("reference/deepseek_v3/bf16/reference.safetensors"));
    for split in [false, true] {
        for format in [Format::Bf16, Format::F32] {
            let path = convert(Options { split, format });
            let model = load(&kt::open(&path).unwrap(), Some("portable"), 64);
            assert_eq!(model.config().stop_ids, [1]);
            let difference = max_difference(&logits(&model, &reference.ids), &reference.logits);
            println!("split {split}, {format}: largest difference {difference:.2e}");
            assert!(difference < 1e-3, "split {split}, {format}: {difference}");
            assert_eq!(greedy(&model, &reference.ids, reference.greedy_ids.len()), reference.greedy_ids);
            std::fs::remove_file(path).unwrap();
        }
    }
}

#[test]
fn q8_0_stays_near_it_on_the_best_backends() {
    let reference = Reference::read(data("reference/deepseek_v3/bf16/reference.safetensors"));
    for split in [false, true] {
        let path = convert(Options { split, format: Format::Q8_0 });
        let source = kt::open(&path).unwrap();
        let exact = logits(&load(&source, Some("portable"), 64), &reference.ids);
        let best = load(&source, None, 64);
        let kernels = median_relative_rms(&logits(&best, &reference.ids), &exact, best.vocabulary());
        let weights = median_relative_rms(&exact, &reference.logits, best.vocabulary());
        println!("split {split}: median relative RMS of kernels {kernels:.2e}, of weights {weights:.2e}");
        // 8 bits of inputs and 8 bits of weights: about 1e-2 each in every product, in three layers.
        assert!(kernels < 4e-2 && weights < 4e-2, "split {split}: kernels {kernels}, weights {weights}");
        std::fs::remove_file(path).unwrap();
    }
}
