//! A layer of experts on the backend blis beside avx512, one thread each: microseconds of the best of several runs.
//!
//! `compare [LIBRARY]`: the library of the backend blis [default: the first that is found].

use std::error::Error;
use std::time::Instant;

use kt_core::source::synthetic::SyntheticSource;
use kt_core::testing::Random;
use kt_core::{Batch, Candidate, Format, Group, RuntimeBuilder};

/// Of Qwen3-30B-A3B's layers, with fewer experts.
const SHAPE: (usize, usize, usize, usize) = (2048, 768, 16, 8);

fn main() -> Result<(), Box<dyn Error>> {
    let library = std::env::args().nth(1);
    println!("hidden {}, intermediate {}, {} experts, {} for a token", SHAPE.0, SHAPE.1, SHAPE.2, SHAPE.3);
    for format in [Format::Int8(Group::Row), Format::Int8(Group::Of(128)), Format::Int4(Group::Of(32)), Format::Bf16] {
        for tokens in [1, 16, 256] {
            let mut line = format!("{format:12} {tokens:4} tokens");
            let mut fastest = Vec::new();
            for name in ["blis", "avx512"] {
                let mut builder = RuntimeBuilder::new(|cap| vec![Candidate::new("avx512", kt_avx512::backend(cap))]);
                if name == "blis" {
                    let best = kt_core::cpu::tier::Tier::Amx;
                    builder = match &library {
                        Some(path) => builder.with_backend(kt_blis::backend_at(path.as_ref(), best)?),
                        None => builder.with_backend(kt_blis::backend(best)?),
                    };
                }
                let us = microseconds(builder.backend(name).threads(1), format, tokens)?;
                line += &format!("  {name} {us:9.0} us");
                fastest.push(us);
            }
            println!("{line}  x {:.2}", fastest[0] / fastest[1]);
        }
    }
    Ok(())
}

fn microseconds(builder: RuntimeBuilder, format: Format, tokens: usize) -> Result<f64, Box<dyn Error>> {
    let (hidden, intermediate, experts, top_k) = SHAPE;
    let source = SyntheticSource::builder().hidden(hidden).intermediate(intermediate).experts(experts).top_k(top_k);
    let source = source.layers(1).format(format).build()?;
    let loaded = builder.build()?.load(&source)?;
    let layer = loaded.layer(0)?;
    let mut random = Random(1);
    let input: Vec<f32> = (0..tokens * hidden).map(|_| random.normal()).collect();
    let ids = (0..tokens).flat_map(|t| (0..top_k).map(move |k| ((t * 5 + k * 3) % experts) as i32)).collect();
    let mut batch = Batch::new(tokens, input, ids, vec![1.0 / top_k as f32; tokens * top_k])?;
    let mut best = f64::INFINITY;
    for _ in 0..if tokens == 1 { 30 } else { 6 } {
        let start = Instant::now();
        layer.forward(&mut batch)?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best * 1e6)
}
