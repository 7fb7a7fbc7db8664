//! Hot experts on a device, the rest in host memory, both at work at the same time:
//!
//! ```sh
//! cargo run --release --example hybrid
//! ```
//!
//! The device here is one without hardware, from the test kit; the backend of a GPU takes its place with the same calls.

use std::sync::Arc;
use std::time::Duration;

use kt::placement::{Capacity, LiveOptions, PlacementOptions, Policy};
use kt::source::synthetic::SyntheticSource;
use kt::{Batch, Format, LoadOptions, WeightSource};
use kt_core::testing::{Random, TestDevice};

const HIDDEN: usize = 512;
const EXPERTS: usize = 16;

/// Tokens whose router likes some experts, `favourite` most of all.
fn batch(tokens: usize, favourite: usize, random: &mut Random) -> kt::Result<Batch> {
    let input: Vec<f32> = (0..tokens * HIDDEN).map(|_| random.normal()).collect();
    let mut ids = Vec::new();
    for _ in 0..tokens {
        ids.push(((favourite + random.below(3)) % EXPERTS) as i32);
        ids.push(((favourite + 3 + random.below(EXPERTS - 3)) % EXPERTS) as i32);
    }
    Batch::new(tokens, input, ids, vec![0.5; tokens * 2])
}

fn main() -> kt::Result<()> {
    let source: Arc<dyn WeightSource> = Arc::new(
        SyntheticSource::builder()
            .hidden(HIDDEN)
            .intermediate(256)
            .experts(EXPERTS)
            .top_k(2)
            .layers(2)
            .format(Format::Bf16)
            .build()?,
    );
    let device = TestDevice::new("gpu0", 256 << 20)?.delay(Duration::from_micros(200));
    let runtime = kt::runtime().with_backend(device).build()?;
    let mut random = Random(1);

    // What is used how often, from a run on the CPU alone.
    let experts = runtime.load(&*source)?;
    for layer in experts.layers() {
        layer.forward(&mut batch(64, 5, &mut random)?)?;
    }
    let heat = experts.heat_map();
    drop(experts);

    // Room for six experts: the hottest go there. What a plan says is what loading takes.
    let budget = 6 * source.layers()[0].expert_bytes();
    let options = || LoadOptions {
        placement: PlacementOptions {
            devices: vec![("gpu0".into(), Capacity::bytes(budget))],
            policy: Policy::Frequency(heat.clone()),
            live: true,
            ..PlacementOptions::default()
        },
        ..LoadOptions::default()
    };
    println!("{}\n", runtime.plan_with(&*source, &options())?);
    let experts = runtime.load_shared(&source, options())?;
    println!(
        "{:.0} % of the traffic so far would have been on the device",
        100.0 * experts.placement().hit_rate(&heat)
    );

    // The traffic changes; experts follow it between steps.
    let mut live = experts.live(LiveOptions::default())?;
    for _ in 0..40 {
        for layer in experts.layers() {
            layer.forward(&mut batch(4, 11, &mut random)?)?;
        }
        experts.rebalance(&mut live, Duration::from_millis(20))?;
    }
    println!("{}\n\n{}", live.report(), experts.stats());
    Ok(())
}
