//! One layer of experts on two backends: how fast each is, and how far they differ.
//!
//! ```text
//! cargo run --release --example quickstart
//! ```

use std::time::Instant;

use kt::source::synthetic::SyntheticSource;
use kt::{Batch, Format, Group, Result, Runtime, WeightSource};

const TOKENS: usize = 4;

fn main() -> Result<()> {
    // A checkpoint would be `kt::open("/models/Qwen3-30B-A3B")?`; this is one layer of such a shape with made-up weights.
    let source = SyntheticSource::builder()
        .hidden(2048)
        .intermediate(768)
        .experts(32)
        .top_k(8)
        .format(Format::Int4(Group::Of(32)))
        .build()?;

    // The best backend that this machine and this build have, and the one that is always there.
    let best = kt::runtime().build()?;
    println!("{}\n", best.plan(&source)?);
    let output = measure(&best, &source)?;
    let portable = kt::runtime().backend("portable").build()?;
    let reference = measure(&portable, &source)?;

    let difference: f32 = output.iter().zip(&reference).map(|(a, b)| (a - b).abs()).sum();
    let magnitude: f32 = reference.iter().map(|r| r.abs()).sum();
    println!("mean difference: {:.3} % of the mean magnitude", 100.0 * difference / magnitude);
    Ok(())
}

/// Loads the layer, runs a batch through it a few times, prints the speed, and returns the output `[tokens, hidden]`.
fn measure(runtime: &Runtime, source: &dyn WeightSource) -> Result<Vec<f32>> {
    let experts = runtime.load(source)?;
    let experts = experts.layer(0)?;
    let layer = experts.spec();

    // Token t goes to experts 8t..8t+8, so that together they use every expert once; a model's router chooses here.
    let hidden: Vec<f32> = (0..TOKENS * layer.hidden).map(|i| (i as f32 * 0.37).sin()).collect();
    let ids = (0..TOKENS * layer.top_k).map(|i| (i % layer.experts) as i32).collect();
    let weights = vec![1.0 / layer.top_k as f32; TOKENS * layer.top_k];
    let mut batch = Batch::new(TOKENS, hidden, ids, weights)?;

    let mut fastest = f64::INFINITY;
    for _ in 0..5 {
        let start = Instant::now();
        experts.forward(&mut batch)?;
        fastest = fastest.min(start.elapsed().as_secs_f64());
    }
    let bytes = layer.expert_bytes() * layer.experts as u64;
    for (backend, tier) in experts.backends() {
        println!("{backend} ({tier}): {:.2} ms, {:.1} GB/s of weights", fastest * 1e3, bytes as f64 / fastest * 1e-9);
    }
    Ok(batch.into_output())
}
