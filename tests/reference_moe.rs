//! MoE blocks of real checkpoints against their independent reference outputs, for every tier of this CPU.
//!
//! Input, experts and weights are given, so no routing decision depends on rounding.

use std::path::PathBuf;

use kt::testing::{bound, mean_error, tiers};
use kt::{Batch, WeightSource};
use safetensors::SafeTensors;

fn data(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)
}

fn floats(tensors: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let tensor = tensors.tensor(name).unwrap();
    tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn ints(tensors: &SafeTensors<'_>, name: &str) -> Vec<i32> {
    let tensor = tensors.tensor(name).unwrap();
    tensor.data().chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// Runs each expert layer of the checkpoint on the given input and compares with `routed_output`.
fn check(source: &dyn WeightSource, reference: &str, failures: &mut Vec<String>) {
    let bytes = std::fs::read(data(reference)).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    for tier in tiers() {
        let runtime = kt::runtime().max_tier(tier).build().unwrap();
        let plan = runtime.plan(source).unwrap();
        let experts = runtime.load(source).unwrap();
        for (layer, planned) in experts.layers().iter().zip(&plan.layers) {
            let name = |what: &str| format!("layers.{}.moe.{what}", planned.index);
            let input = floats(&tensors, &name("input"));
            let tokens = input.len() / layer.spec().hidden;
            let ids = ints(&tensors, &name("topk_ids"));
            let weights = floats(&tensors, &name("topk_weights"));
            let want: Vec<f64> = floats(&tensors, &name("routed_output")).iter().map(|&v| v as f64).collect();
            let mut batch = Batch::new(tokens, input, ids, weights).unwrap();
            layer.forward(&mut batch).unwrap();
            let error = mean_error(&want, batch.output());
            let label = format!(
                "{reference} layer {}: {} on {} ({})",
                planned.index, planned.format, planned.backend, planned.fit.tier
            );
            println!("{label}: {error:.2e}, bound {:.2e}", bound(&planned.fit));
            if error.is_nan() || error > bound(&planned.fit) {
                failures.push(format!("{label}: error {error}"));
            }
        }
    }
}

#[test]
fn moe_blocks_equal_the_reference() {
    let mut failures = Vec::new();
    let mut directories = 0;
    for family in ["qwen3_moe", "deepseek_v3"] {
        for entry in std::fs::read_dir(data("reference").join(family)).unwrap() {
            let path = entry.unwrap().path();
            let variant = path.file_name().unwrap().to_str().unwrap().to_string();
            let source = kt::open(path).unwrap();
            check(&*source, &format!("reference/{family}/{variant}/reference.safetensors"), &mut failures);
            directories += 1;
        }
    }
    assert_eq!(directories, 9);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn moe_blocks_of_the_tiny_model_equal_the_reference() {
    let source = kt::open(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("kt-cli/model")).unwrap();
    let mut failures = Vec::new();
    check(&*source, "tiny-moe/reference.safetensors", &mut failures);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
