//! Whole models with some experts on a device, which has no hardware: text, likelihood, traces.

mod common;

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use common::{data, greedy};
use kt::cpu::tier::Tier;
use kt::placement::{Capacity, Live, LiveOptions, Need, Placement, PlacementOptions, Policy, Stream, Trace, place};
use kt::{Candidate, RuntimeBuilder};
use kt_cli::eval::score;
use kt_cli::host::{Model, ModelConfig, Rows, Tokenizer};
use kt_cli::model::built_in;
use kt_core::testing::TestDevice;

const LAYERS: usize = 4;
const EXPERTS: usize = 8;
const EXPERT_BYTES: u64 = 3 * 256 * 256 * 2;

fn portable(_: Tier) -> Vec<Candidate> {
    kt::registry(Tier::Portable).into_iter().filter(|c| c.name == "portable").collect()
}

/// The built-in model with placement options on a device with room for all.
fn model(device: &TestDevice, options: PlacementOptions, positions: usize) -> Model {
    let source = built_in().unwrap();
    let runtime = RuntimeBuilder::new(portable).with_backend(device.clone()).build().unwrap();
    let config = ModelConfig::read(&*source).unwrap();
    Model::load(&runtime, &source, &config, (positions, Rows::All), &options, Arc::default()).unwrap()
}

fn on_device(experts: u64, policy: Policy) -> PlacementOptions {
    let devices = vec![("gpu0".into(), Capacity::bytes(experts * EXPERT_BYTES))];
    PlacementOptions { devices, policy, ..PlacementOptions::default() }
}

fn device() -> TestDevice {
    TestDevice::new("gpu0", 1 << 30).unwrap()
}

/// Nats per predicted token of held-out text.
fn nats(model: &Model, tokens: usize) -> f64 {
    let source = built_in().unwrap();
    let text = std::fs::read_to_string(data("tiny-moe/heldout.txt")).unwrap();
    let ids = Tokenizer::of(&*source).unwrap().encode(&text).unwrap();
    score(model, &ids[..tokens], 256, |_| Ok(())).unwrap().mean_nats()
}

#[test]
fn a_model_says_the_same_wherever_its_experts_are() {
    let gpu = device();
    let prompt = [17, 300, 4, 711, 55];
    let want = greedy(&model(&gpu, PlacementOptions::default(), 64), &prompt, 40);
    for policy in [Policy::Uniform, Policy::FrontLoading, Policy::Random(2)] {
        let hybrid = model(&gpu, on_device(11, policy), 64);
        assert_eq!(hybrid.experts().placement().on_devices(), 11);
        assert_eq!(greedy(&hybrid, &prompt, 40), want);
    }
    let streamed = PlacementOptions { stream: Stream::From(4), ..on_device(0, Policy::Uniform) };
    let uploads = gpu.uploads();
    assert_eq!(greedy(&model(&gpu, streamed, 64), &prompt, 40), want);
    assert!(gpu.uploads() > uploads, "the prompt was not streamed");
    // Moving experts while it talks changes nothing either.
    let moving = model(&gpu, PlacementOptions { live: true, ..on_device(8, Policy::Uniform) }, 64);
    let mut live = moving.experts().live(LiveOptions::default()).unwrap();
    let mut text = prompt.to_vec();
    while text.len() < prompt.len() + 40 {
        text.extend(greedy(&moving, &text, 1));
        moving.experts().rebalance(&mut live, Duration::from_secs(1)).unwrap();
    }
    assert_eq!(text[prompt.len()..], want);
    assert!(live.report().swaps > 0, "{}", live.report());
}

#[test]
fn deferral_costs_a_little_likelihood() {
    let mut model = model(&device(), PlacementOptions::default(), 256);
    let exact = nats(&model, 1024);
    for d in 1..=2 {
        model.defer(d);
        let deferred = nats(&model, 1024);
        println!(
            "defer {d}: {:+.4} nats per token, perplexity {:.3} (exact {:.3})",
            deferred - exact,
            deferred.exp(),
            exact.exp()
        );
        assert!(deferred > exact && deferred < exact + 2.0, "{deferred} {exact}");
    }
    model.defer(0);
    assert_eq!(nats(&model, 1024), exact);
}

fn needs() -> Vec<Need> {
    (0..LAYERS).map(|layer| Need { layer, experts: EXPERTS, expert_bytes: vec![Some(EXPERT_BYTES)] }).collect()
}

fn hits(placement: &Placement, trace: &Trace) -> f64 {
    placement.hit_rate(&trace.heat_map())
}

/// Replays a trace token by token; the share of choices that found their expert on the device.
fn replay(live: &mut Live, trace: &Trace) -> f64 {
    let before = live.report().clone();
    for t in 0..trace.tokens() {
        for l in trace.layers() {
            live.observe(l.layer, 1, &l.counts(t..t + 1));
        }
        live.swaps(Duration::from_millis(20));
    }
    let after = live.report();
    (after.hits - before.hits) as f64 / (after.rows - before.rows) as f64
}

#[test]
fn placements_on_recorded_traces() {
    let traces = ["prose", "code"].map(|name| Trace::load(&data(&format!("traces/{name}.json"))).unwrap());
    let capacity = [Capacity::bytes(8 * EXPERT_BYTES)]; // a quarter
    for (i, trace) in traces.iter().enumerate() {
        assert_eq!((trace.layers().len(), trace.tokens()), (LAYERS, 512));
        let (first, rest) = (trace.part(0..256), trace.part(256..512));
        let rate = |policy: &Policy, on: &Trace| hits(&place(policy, &needs(), &capacity), on);
        let own = rate(&Policy::Frequency(first.heat_map()), &rest);
        let other = rate(&Policy::Frequency(traces[1 - i].heat_map()), &rest);
        let random = (0..20).map(|seed| rate(&Policy::Random(seed), &rest)).sum::<f64>() / 20.0;
        let best = rate(&Policy::Frequency(rest.heat_map()), &rest);
        let uniform = rate(&Policy::Uniform, &rest);
        let front = rate(&Policy::FrontLoading, &rest);
        let mut live = Live::new(LiveOptions::default(), needs(), place(&Policy::Uniform, &needs(), &capacity));
        replay(&mut live, &first);
        let moved = replay(&mut live, &rest);
        println!(
            "trace {i}: uniform {uniform:.3}, front-loading {front:.3}, random {random:.3}, frequency {own:.3} \
             (by the other trace {other:.3}, by hindsight {best:.3}), live {moved:.3}; {}",
            live.report()
        );
        // A quarter of the experts has a quarter of the traffic, unless they are chosen by it.
        assert!((random - 0.25).abs() < 0.05, "{random}");
        assert!(own > random + 0.05 && own <= best + 1e-9, "frequency {own}, random {random}, best {best}");
        assert!(moved > uniform + 0.05, "live {moved}, uniform {uniform}");
    }
}

#[test]
fn the_command_records_traces_and_refuses_what_cannot_be() {
    let path = std::env::temp_dir().join(format!("kt-cli-trace-{}.json", std::process::id()));
    let kt = |args: &[&str]| Command::new(env!("CARGO_BIN_EXE_kt")).args(args).output().unwrap();
    let text = path.to_str().unwrap();
    let out = kt(&["run", "--prompt", "The borrow checker", "--max-tokens", "9", "--defer", "1", "--trace", text]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let trace = Trace::load(&path).unwrap();
    assert_eq!(trace.layers().len(), LAYERS);
    assert!(trace.tokens() > 9);
    std::fs::remove_file(&path).unwrap();
    let refused = |args: &[&str], says: &str| {
        let out = kt(args);
        let error = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success() && error.contains(says), "{args:?}: {error}");
    };
    refused(&["run", "--live"], "--placement and --live need --gpu-budget");
    refused(&["run", "--gpu-budget", "2 parsecs"], "is no unit of bytes");
    refused(&["run", "--gpu-experts", "2", "--placement", "frequency:/no/such.json"], "/no/such.json");
    refused(&["plan", "--placement", "hottest"], "is no placement");
}
