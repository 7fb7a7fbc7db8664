//! A layer of experts on the backend of a plugin, beside the best one of this build.
//!
//! ```text
//! cargo build --release -p kt-llamafile --example plugin_llamafile
//! cargo run --release --features plugins --example plugin -- target/release/examples/libplugin_llamafile.so q4_k
//! ```

use kt::source::synthetic::SyntheticSource;
use kt::{Batch, Error, Format, Result, Runtime, WeightSource};

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let Some(path) = arguments.next() else {
        return Err(Error::Invalid("usage: plugin PATH [FORMAT]".into()));
    };
    let format: Format = arguments.next().as_deref().unwrap_or("bf16").parse()?;
    let plugin = kt::plugin::load(&path)?;
    let (major, minor) = plugin.version();
    println!("{}: {}, ABI {major}.{minor}", plugin.name(), plugin.build());

    let source =
        SyntheticSource::builder().hidden(1024).intermediate(512).experts(16).top_k(4).format(format).build()?;
    // Only the plugin's backend is asked; `.plugin(path)` alone would let it compete with those of the build.
    let there = kt::runtime().plugin(&path).backend(plugin.name()).build()?;
    println!("{}", there.explain(&source)?);
    let (there, here) = (run(&there, &source)?, run(&kt::runtime().build()?, &source)?);
    let difference: f32 = there.iter().zip(&here).map(|(a, b)| (a - b).abs()).sum();
    let magnitude: f32 = here.iter().map(|v| v.abs()).sum();
    println!("mean difference from this build's best: {:.3} % of the mean magnitude", 100.0 * difference / magnitude);
    Ok(())
}

/// Loads the layer and returns its output for one token.
fn run(runtime: &Runtime, source: &dyn WeightSource) -> Result<Vec<f32>> {
    let experts = runtime.load(source)?;
    let layer = experts.layer(0)?;
    let hidden: Vec<f32> = (0..layer.spec().hidden).map(|i| (i as f32 * 0.37).sin()).collect();
    let mut batch = Batch::new(1, hidden, vec![0, 3, 7, 12], vec![0.25; 4])?;
    layer.forward(&mut batch)?;
    Ok(batch.into_output())
}
