//! A layer of experts on the backend blis beside kt-avx512 (on this CPU's best tier, and held to AVX2) and portable, one thread each, in turns: the
//! median of several runs, as GB/s of weights read for 1 token and as GFLOP/s for more.
//!
//! `compare [LIBRARY]`: the library of the backend blis [default: the first that is found].

use std::error::Error;
use std::time::Instant;

use kt_core::cpu::CpuBackend;
use kt_core::cpu::portable::Portable;
use kt_core::cpu::tier::Tier;
use kt_core::source::synthetic::SyntheticSource;
use kt_core::testing::Random;
use kt_core::{Batch, Candidate, Experts, Format, Group, RuntimeBuilder};

/// Of Qwen3-30B-A3B's layers, with fewer experts.
const SHAPE: (usize, usize, usize, usize) = (2048, 768, 32, 8);

fn main() -> Result<(), Box<dyn Error>> {
    let library = std::env::args().nth(1);
    let (hidden, intermediate, experts, top_k) = SHAPE;
    println!("hidden {hidden}, intermediate {intermediate}, {experts} experts, {top_k} for a token");
    for format in [Format::Int8(Group::Row), Format::Int8(Group::Of(128)), Format::Int4(Group::Of(32)), Format::Bf16] {
        let source = SyntheticSource::builder().hidden(hidden).intermediate(intermediate).experts(experts);
        let source = source.top_k(top_k).layers(1).format(format).build()?;
        let mut loaded = Vec::new();
        for name in ["blis", "avx512", "avx2", "portable"] {
            let mut builder = RuntimeBuilder::new(|cap| {
                vec![
                    Candidate::new("avx512", kt_avx512::backend(cap)),
                    Candidate::new("portable", Ok(CpuBackend::new("portable", Portable))),
                ]
            });
            if name == "blis" {
                builder = match &library {
                    Some(path) => builder.with_backend(kt_blis::backend_at(path.as_ref(), Tier::Amx)?),
                    None => builder.with_backend(kt_blis::backend(Tier::Amx)?),
                };
            }
            // What blis is beside on a CPU without AVX-512; the library itself cannot be held to fewer instructions.
            let runtime = match name {
                "avx2" => builder.backend("avx512").max_tier(Tier::Avx2),
                _ => builder.backend(name),
            };
            let runtime = runtime.threads(1).build()?;
            println!("{format} {name}: {}", runtime.plan(&source)?.layers[0].fit.how);
            loaded.push((name, runtime.load(&source)?));
        }
        for (tokens, rounds) in [(1, 15), (16, 5), (256, 2)] {
            let times = seconds(&loaded, tokens, rounds)?;
            let mut line = format!("{format:12} {tokens:4} tokens");
            for ((name, _), time) in loaded.iter().zip(&times) {
                line += &match tokens {
                    1 => format!("  {name} {:6.2} GB/s", read_bytes(format)? / time / 1e9),
                    _ => format!("  {name} {:6.1} GFLOP/s", operations(tokens) / time / 1e9),
                };
            }
            println!(
                "{line}  blis / avx512 {:.3}, / avx2 {:.3}, / portable {:.2}",
                times[1] / times[0],
                times[2] / times[0],
                times[3] / times[0]
            );
        }
    }
    Ok(())
}

/// Bytes of codes that one token reads.
fn read_bytes(format: Format) -> Result<f64, Box<dyn Error>> {
    let (hidden, intermediate, _, top_k) = SHAPE;
    Ok((top_k * (2 * intermediate * format.row_bytes(hidden)? + hidden * format.row_bytes(intermediate)?)) as f64)
}

/// Multiplications and additions of a layer call.
fn operations(tokens: usize) -> f64 {
    let (hidden, intermediate, _, top_k) = SHAPE;
    (tokens * top_k * 3 * hidden * intermediate * 2) as f64
}

/// The median time of a layer call on each. The experts of one call are not those of the call before, so that weights come from memory.
fn seconds(loaded: &[(&str, Experts)], tokens: usize, rounds: usize) -> Result<Vec<f64>, Box<dyn Error>> {
    let (hidden, _, experts, top_k) = SHAPE;
    let mut random = Random(1);
    let input: Vec<f32> = (0..tokens * hidden).map(|_| random.normal()).collect();
    let mut times = vec![Vec::new(); loaded.len()];
    for round in 0..rounds {
        let expert = |t: usize, k: usize| ((round * top_k + t * 5 + k) % experts) as i32;
        let ids = (0..tokens).flat_map(|t| (0..top_k).map(move |k| expert(t, k))).collect();
        let mut batch = Batch::new(tokens, input.clone(), ids, vec![1.0 / top_k as f32; tokens * top_k])?;
        for ((_, experts), times) in loaded.iter().zip(&mut times) {
            let start = Instant::now();
            experts.layer(0)?.forward(&mut batch)?;
            times.push(start.elapsed().as_secs_f64());
        }
    }
    Ok(times
        .iter_mut()
        .map(|times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        })
        .collect())
}
