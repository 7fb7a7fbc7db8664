//! Experts on devices and in host memory, working together; on devices without hardware.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use kt_core::cpu::CpuBackend;
use kt_core::cpu::portable::Portable;
use kt_core::heat::LayerHeat;
use kt_core::placement::{Capacity, LiveOptions, PlacementOptions, Policy, Stream};
use kt_core::plan::Verdict;
use kt_core::source::synthetic::SyntheticSource;
use kt_core::testing::{Fault, Naive, Random, TestDevice, mean_error};
use kt_core::{
    Backend, Batch, Candidate, Error, ExpertBank, Experts, Fit, Format, HeatMap, Hidden, LayerSpec, LoadContext,
    LoadOptions, Matrix, Metadata, Pending, Proj, Routing, Runtime, RuntimeBuilder, Unsupported, WeightSource, Work,
};

const HIDDEN: usize = 96;
const EXPERTS: usize = 6;
const TOP_K: usize = 3;
/// The experts of a layer are F32 on both sides: what differs is the order of sums.
const BOUND: f64 = 1e-5;
const MIB: u64 = 1 << 20;

fn source(layers: usize) -> Arc<dyn WeightSource> {
    let source = SyntheticSource::builder()
        .hidden(HIDDEN)
        .intermediate(64)
        .experts(EXPERTS)
        .top_k(TOP_K)
        .layers(layers)
        .format(Format::Bf16)
        .seed(7)
        .build();
    Arc::new(source.unwrap())
}

fn expert_bytes() -> u64 {
    (3 * HIDDEN * 64 * 2) as u64
}

fn builder() -> RuntimeBuilder {
    RuntimeBuilder::new(|_| vec![Candidate::new("portable", Ok(CpuBackend::new("portable", Portable)))]).threads(2)
}

fn runtime(devices: &[&TestDevice]) -> Runtime {
    devices.iter().fold(builder(), |b, d| b.with_backend((*d).clone())).build().unwrap()
}

fn device(name: &str) -> TestDevice {
    TestDevice::new(name, 64 * MIB).unwrap()
}

/// Room for so many experts on every device.
fn on(devices: &[(&str, u64)], policy: Policy) -> LoadOptions {
    let devices = devices.iter().map(|(name, n)| (name.to_string(), Capacity::bytes(n * expert_bytes()))).collect();
    LoadOptions { placement: PlacementOptions { devices, policy, ..Default::default() }, ..Default::default() }
}

/// The same, of a source that is kept.
fn kept(options: LoadOptions, live: bool, stream: Stream) -> LoadOptions {
    LoadOptions { placement: PlacementOptions { live, stream, ..options.placement }, ..options }
}

struct Tokens {
    n: usize,
    input: Vec<f32>,
    ids: Vec<i32>,
    weights: Vec<f32>,
}

impl Tokens {
    fn new(n: usize, seed: u64) -> Tokens {
        let mut random = Random(seed);
        let input = (0..n * HIDDEN).map(|_| random.normal()).collect();
        let ids = (0..n * TOP_K).map(|_| random.below(EXPERTS + 1) as i32 - 1).collect();
        let weights = (0..n * TOP_K).map(|_| random.uniform()).collect();
        Tokens { n, input, ids, weights }
    }

    fn batch(&self) -> Batch {
        Batch::new(self.n, self.input.clone(), self.ids.clone(), self.weights.clone()).unwrap()
    }

    fn want(&self, naive: &Naive) -> Vec<f64> {
        naive.forward(&Hidden::F32(self.input.clone()), self.n, &self.ids, &self.weights, TOP_K)
    }

    fn token(&self, t: usize) -> Tokens {
        Tokens {
            n: 1,
            input: self.input[t * HIDDEN..][..HIDDEN].to_vec(),
            ids: self.ids[t * TOP_K..][..TOP_K].to_vec(),
            weights: self.weights[t * TOP_K..][..TOP_K].to_vec(),
        }
    }
}

/// Batches of several sizes through a layer give what the naive model gives.
fn check(experts: &Experts, layer: usize, naive: &Naive, label: &str) {
    for n in [0, 1, 2, 5, 33] {
        let tokens = Tokens::new(n, 3 + n as u64);
        let mut batch = tokens.batch();
        experts.layer(layer).unwrap().forward(&mut batch).unwrap();
        let error = mean_error(&tokens.want(naive), batch.output());
        assert!(error <= BOUND, "{label}, {n} tokens: {error}");
    }
}

fn naive(source: &Arc<dyn WeightSource>) -> Naive {
    Naive::new(&**source) // of the first layer: what is compared goes through that one
}

fn wait_until(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(30), "never: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn every_placement_computes_the_same() {
    let source = source(2);
    let naive = naive(&source);
    let (a, b) = (device("gpu0"), device("gpu1"));
    let runtime = runtime(&[&a, &b]);
    let heat = HeatMap::new(vec![LayerHeat { layer: 0, tokens: 9, counts: vec![0, 5, 1, 9, 2, 2] }]).unwrap();
    for policy in [Policy::Uniform, Policy::FrontLoading, Policy::Random(5), Policy::Frequency(heat)] {
        for (first, second) in [(0, 0), (1, 0), (5, 0), (4, 3), (2, 8), (12, 0), (6, 6)] {
            let options = on(&[("gpu0", first), ("gpu1", second)], policy.clone());
            let plan = runtime.plan_with(&*source, &options).unwrap();
            let experts = runtime.load_with(&*source, options).unwrap();
            let label = format!("{policy} {first} {second}");
            assert_eq!(experts.placement().on_devices() as u64, (first + second).min(12), "{label}");
            assert_eq!(experts.device_bytes(), (first + second).min(12) * expert_bytes(), "{label}");
            assert_eq!(plan.device_bytes(0) + plan.device_bytes(1), experts.device_bytes(), "{label}");
            assert_eq!(a.used_bytes() + b.used_bytes(), experts.device_bytes(), "{label}");
            // What devices have, the host has not.
            let host = plan.packed_bytes() + plan.copied_bytes() + plan.mapped_bytes();
            assert_eq!(host, (12 - (first + second).min(12)) * expert_bytes(), "{label}");
            check(&experts, 0, &naive, &label);
            let banks: u64 = experts.stats().layers[0].banks.iter().map(|b| b.1.rows).sum();
            assert_eq!(banks, experts.stats().layers[0].usage.rows, "{label}");
        }
    }
    assert_eq!((a.used_bytes(), b.used_bytes()), (0, 0), "memory of experts that were dropped");
}

#[test]
fn a_device_that_is_asked_for_by_name_has_all_or_refuses() {
    let source = source(2);
    let gpu = device("gpu0");
    let runtime = builder().with_backend(gpu.clone()).backend("gpu0").build().unwrap();
    let experts = runtime.load(&*source).unwrap();
    assert_eq!(experts.device_bytes(), 12 * expert_bytes());
    let plan = runtime.plan(&*source).unwrap();
    assert_eq!((plan.packed_bytes(), plan.mapped_bytes(), plan.expert_token_bytes()), (0, 0, 0));
    assert!(plan.explain().contains("on gpu0 (a device without hardware): 12 experts"), "{}", plan.explain());
    check(&experts, 0, &naive(&source), "all on the device");
    let small = TestDevice::new("small", 7 * expert_bytes()).unwrap();
    let runtime = builder().with_backend(small).backend("small").build().unwrap();
    let error = runtime.load(&*source).map(drop).unwrap_err().to_string();
    assert!(error.contains("small was asked for, and") && error.contains("find no room there"), "{error}");
}

#[test]
fn plans_tell_devices_apart() {
    let source = source(3);
    let gpu = device("gpu0").delay(Duration::from_millis(2));
    let runtime = runtime(&[&gpu]);
    let plan = runtime.plan_with(&*source, &on(&[("gpu0", 9)], Policy::Uniform)).unwrap();
    assert_eq!((plan.device_experts(0), plan.device_bytes(0)), (9, 9 * expert_bytes()));
    for layer in &plan.layers {
        assert_eq!((layer.on_devices[0].experts, layer.fit.mapped_bytes), (3, 3 * expert_bytes()));
        // Half of what a token reads is there.
        assert_eq!(layer.token_bytes, TOP_K as u64 * expert_bytes() / 2);
        assert_eq!(layer.on_devices[0].token_bytes, TOP_K as u64 * expert_bytes() / 2);
    }
    // Reading takes no time here: three calls of 2 ms are all.
    let fast = plan.tokens_per_second(1e18);
    assert!((fast - 1.0 / 0.006).abs() / fast < 0.1, "{fast}");
    // And a slow host hides the device.
    let slow = plan.tokens_per_second(1e6);
    assert!((slow - 1e6 / plan.expert_token_bytes() as f64).abs() / slow < 1e-9, "{slow}");
    let text = plan.to_string();
    assert!(text.contains("9 experts on gpu0 (a device without hardware), uniform"), "{text}");
    let json = plan.to_json();
    assert_eq!(
        (&json["devices"][0]["experts"], &json["layers"][2]["on_devices"][0]["experts"]),
        (&9.into(), &3.into())
    );
    // What is on the device, the host need not have; inputs and outputs on their way it must, which is little for a token.
    let need = |options: LoadOptions| {
        let plan = runtime.plan_with(&*source, &LoadOptions { batch_tokens: Some(1), ..options }).unwrap();
        assert_eq!(plan.verdict(), Verdict::Fits);
        plan.need_bytes()
    };
    let (some, none) = (need(on(&[("gpu0", 9)], Policy::Uniform)), need(LoadOptions::default()));
    assert!(some < none - 8 * expert_bytes(), "{some} {none}");
    assert!(plan.extra.iter().any(|e| e.label.contains("on their way to devices") && e.bytes > 0));
    // By a heat map, the share of traffic counts.
    let heat = |layer| LayerHeat { layer, tokens: 30, counts: vec![60, 0, 30, 0, 0, 0] };
    let heat = HeatMap::new((0..3).map(heat).collect()).unwrap();
    let plan = runtime.plan_with(&*source, &on(&[("gpu0", 3)], Policy::Frequency(heat))).unwrap();
    assert_eq!(plan.layers[1].on_devices[0].token_bytes, (TOP_K as u64 * expert_bytes() * 2).div_ceil(3));
    assert_eq!(plan.layers[1].token_bytes, TOP_K as u64 * expert_bytes() / 3);
}

#[test]
fn wrong_wishes_are_refused_with_names() {
    let source = source(1);
    let gpu = device("gpu0");
    let runtime = runtime(&[&gpu]);
    let refused = |options: LoadOptions| runtime.load_with(&*source, options).map(drop).unwrap_err().to_string();
    let error = refused(on(&[("gpu7", 1)], Policy::Uniform));
    assert!(error.contains("no backend `gpu7`") && error.contains("gpu0 (a device without hardware)"), "{error}");
    let error = refused(on(&[("portable", 1)], Policy::Uniform));
    assert!(error.contains("`portable` is no device"), "{error}");
    let error = refused(on(&[("gpu0", 10_000)], Policy::Uniform));
    assert!(error.contains("were asked for on gpu0") && error.contains("free of 64.0 MiB"), "{error}");
    let heat = HeatMap::new(vec![LayerHeat { layer: 5, tokens: 1, counts: vec![1] }]).unwrap();
    let error = refused(on(&[("gpu0", 1)], Policy::Frequency(heat)));
    assert!(error.contains("layer 5 holds no experts in the model"), "{error}");
    let error = refused(kept(on(&[("gpu0", 1)], Policy::Uniform), true, Stream::Never));
    assert!(error.contains("use `load_shared`"), "{error}");
    let error = refused(kept(on(&[], Policy::Uniform), false, Stream::From(8)));
    assert!(error.contains("to devices only"), "{error}");
    // Without a wish, a device gets nothing.
    let experts = runtime.load(&*source).unwrap();
    assert_eq!((experts.device_bytes(), gpu.calls()), (0, 0));
    assert!(experts.live(LiveOptions::default()).unwrap_err().to_string().contains("load_shared"));
    assert!(experts.measure_streaming(64).unwrap_err().to_string().contains("nothing can be streamed"));
}

#[test]
fn banks_work_at_the_same_time() {
    let source = source(1);
    let (a, b) = (device("gpu0"), device("gpu1"));
    let experts = runtime(&[&a, &b]).load_with(&*source, on(&[("gpu0", 2), ("gpu1", 2)], Policy::Uniform)).unwrap();
    let tokens = Tokens::new(9, 4);
    let want = tokens.want(&naive(&source));
    a.hold();
    b.hold();
    let pending = experts.layer(0).unwrap().submit(tokens.batch());
    // Neither can end before the other has begun.
    wait_until("both devices are at work", || a.busy() == 1 && b.busy() == 1);
    a.release();
    b.release();
    let batch = pending.wait().unwrap();
    assert!(mean_error(&want, batch.output()) <= BOUND);
    // The order in which they end changes no bit.
    for (first, second) in [(&a, &b), (&b, &a)] {
        a.hold();
        b.hold();
        let pending = experts.layer(0).unwrap().submit(tokens.batch());
        wait_until("both devices are at work", || a.busy() == 1 && b.busy() == 1);
        first.release();
        wait_until("one is done", || first.busy() == 0);
        second.release();
        assert_eq!(pending.wait().unwrap().output(), batch.output());
    }
}

#[test]
fn pending_work_may_be_dropped() {
    let source = source(1);
    let gpu = device("gpu0");
    let experts = runtime(&[&gpu]).load_with(&*source, on(&[("gpu0", 3)], Policy::Uniform)).unwrap();
    gpu.hold();
    let calls = gpu.calls();
    drop(experts.layer(0).unwrap().submit(Tokens::new(5, 1).batch()));
    wait_until("the dropped batch is begun all the same", || gpu.calls() == calls + 1);
    drop(experts); // the work owns what it needs
    assert_eq!(gpu.busy(), 1);
    gpu.release();
    wait_until("it ends", || gpu.busy() == 0 && gpu.used_bytes() == 0);
}

#[test]
fn a_bank_that_fails_is_named_and_the_next_call_goes_on() {
    let source = source(1);
    let gpu = device("gpu0");
    let runtime = runtime(&[&gpu]);
    let options = || on(&[("gpu0", 3)], Policy::Uniform);
    gpu.fail(Fault::Load);
    let error = runtime.load_with(&*source, options()).map(drop).unwrap_err().to_string();
    assert_eq!(error, "backend gpu0, layer 0: lost the device");
    let experts = runtime.load_with(&*source, options()).unwrap();
    let naive = naive(&source);
    for (fault, says) in [(Fault::Work, "lost the device"), (Fault::Panic, "panicked")] {
        gpu.fail(fault);
        let mut batch = Tokens::new(4, 8).batch();
        let error = experts.layer(0).unwrap().forward(&mut batch).unwrap_err();
        let Error::Backend { backend, layer, what } = error else { panic!("{error}") };
        assert_eq!((backend.as_str(), layer, what.as_str()), ("gpu0", 0, says));
        assert!(batch.output().is_empty(), "half an output");
        check(&experts, 0, &naive, says);
    }
    // Two models on one device: the second finds what the first left.
    let rest = (64 * MIB - gpu.used_bytes()) / expert_bytes();
    let error = runtime.load_with(&*source, on(&[("gpu0", rest + 1)], Policy::Uniform)).map(drop).unwrap_err();
    assert!(error.to_string().contains("free of"), "{error}");
}

#[test]
fn deferred_experts_come_one_layer_later() {
    let source = source(3);
    let gpu = device("gpu0");
    let experts = runtime(&[&gpu]).load_with(&*source, on(&[("gpu0", 9)], Policy::Uniform)).unwrap();
    let tokens = Tokens::new(21, 5);
    let layer = |i: usize| experts.layer(i).unwrap();
    let through = |tokens: &Tokens, defer: usize| -> Vec<Vec<f32>> {
        let mut batch = tokens.batch();
        batch.defer(defer);
        let one = |i: usize| {
            // As a model does it: the same batch, with the next layer's input.
            batch.set(tokens.n, tokens.input.clone(), tokens.ids.clone(), tokens.weights.clone()).unwrap();
            layer(i).forward(&mut batch).unwrap();
            assert_eq!(batch.carries(), defer > 0 && i < 2, "layer {i}");
            batch.output().to_vec()
        };
        (0..3).map(one).collect()
    };
    let plain = through(&tokens, 0);
    for d in 1..=TOP_K {
        let deferred = through(&tokens, d);
        assert_ne!(deferred[0], plain[0]);
        // Nothing is lost and nothing comes twice: all layers together give the same.
        let sum = |layers: &[Vec<f32>]| -> Vec<f64> {
            (0..plain[0].len()).map(|i| layers.iter().map(|l| f64::from(l[i])).sum()).collect()
        };
        let total: Vec<f32> = sum(&deferred).iter().map(|&v| v as f32).collect();
        assert!(mean_error(&sum(&plain), &total) <= BOUND, "{d}");
        if d == TOP_K {
            assert!(deferred[0].iter().all(|&v| v == 0.0), "all of the first layer waits");
        }
        // A token has the same bits alone, and every time.
        assert_eq!(through(&tokens, d), deferred);
        for t in [0, 7, 20] {
            let alone = through(&tokens.token(t), d);
            for (alone, among) in alone.iter().zip(&deferred) {
                assert_eq!(alone[..], among[t * HIDDEN..][..HIDDEN], "d {d}, token {t}");
            }
        }
    }
    // What a request left behind when it was given up does not reach the next.
    let mut batch = tokens.batch();
    batch.defer(2);
    layer(0).forward(&mut batch).unwrap();
    assert!(batch.carries());
    layer(0).forward(&mut batch).unwrap();
    let mut fresh = tokens.batch();
    fresh.defer(2);
    layer(0).forward(&mut fresh).unwrap();
    assert_eq!(batch.output(), fresh.output());
    layer(2).forward(&mut batch).unwrap(); // skips one: nor to a layer that does not follow
    assert_eq!(batch.output(), plain[2]);
    // Other tokens neither.
    layer(0).forward(&mut fresh).unwrap();
    let one = tokens.token(0);
    fresh.set(1, one.input.clone(), one.ids.clone(), one.weights.clone()).unwrap();
    layer(1).forward(&mut fresh).unwrap();
    let mut want = one.batch();
    want.defer(2);
    layer(1).forward(&mut want).unwrap();
    assert_eq!(fresh.output(), want.output());
    // Nor another model, of another width or of the same.
    let narrow = SyntheticSource::builder().hidden(64).intermediate(64).experts(EXPERTS).top_k(TOP_K).layers(2);
    let narrow: Arc<dyn WeightSource> = Arc::new(narrow.format(Format::Bf16).build().unwrap());
    let others: [Arc<dyn WeightSource>; 2] = [narrow, source.clone()];
    for other in others {
        let hidden = other.layers()[0].hidden;
        let other = runtime(&[]).load(&*other).unwrap();
        layer(0).forward(&mut fresh).unwrap();
        assert!(fresh.carries());
        let input = vec![0.5; one.n * hidden];
        fresh.set(one.n, input.clone(), one.ids.clone(), one.weights.clone()).unwrap();
        other.layer(1).unwrap().forward(&mut fresh).unwrap();
        let mut want = Batch::new(one.n, input, one.ids.clone(), one.weights.clone()).unwrap();
        want.defer(2);
        other.layer(1).unwrap().forward(&mut want).unwrap();
        assert_eq!(fresh.output(), want.output(), "hidden {hidden}");
        fresh.set(one.n, one.input.clone(), one.ids.clone(), one.weights.clone()).unwrap();
    }
    // A failure of what was deferred is that of the layer that waits for it.
    let mut batch = tokens.batch();
    batch.defer(TOP_K);
    wait_until("what was dropped is done", || gpu.busy() == 0);
    gpu.fail(Fault::Work);
    layer(0).forward(&mut batch).unwrap();
    wait_until("the deferred work has failed", || gpu.busy() == 0);
    let error = layer(1).forward(&mut batch).unwrap_err().to_string();
    assert_eq!(error, "backend gpu0, layer 0: lost the device");
}

/// What waits was computed with the experts that were chosen, even where these are to move meanwhile.
#[test]
fn deferred_experts_stay_where_they_are() {
    let source = source(2);
    let gpu = device("gpu0");
    let run = |moves: bool| {
        let options = kept(on(&[("gpu0", 2)], Policy::Uniform), true, Stream::Never);
        let experts = runtime(&[&gpu]).load_shared(&source, options).unwrap();
        let placed = experts.placement().layers()[0].clone();
        let (there, here) = (placed.experts(1)[0] as i32, placed.experts(0)[0] as i32);
        let mut live = experts.live(LiveOptions::default()).unwrap();
        // Hot, so that it would take the place of the other.
        let mut many = Batch::new(50, vec![0.1; 50 * HIDDEN], vec![here; 50], vec![1.0; 50]).unwrap();
        experts.layer(0).unwrap().forward(&mut many).unwrap();
        let input = Tokens::new(1, 4).input;
        let mut batch = Batch::new(1, input.clone(), vec![there, here], vec![0.1, 0.9]).unwrap();
        batch.defer(1);
        gpu.hold();
        experts.layer(0).unwrap().forward(&mut batch).unwrap();
        assert!(batch.carries());
        if moves {
            assert_eq!(experts.rebalance(&mut live, Duration::from_secs(1)).unwrap(), []);
        }
        gpu.release();
        batch.set(1, input, vec![-1, -1], vec![0.0; 2]).unwrap();
        experts.layer(1).unwrap().forward(&mut batch).unwrap();
        if moves {
            experts.layer(0).unwrap().forward(&mut many).unwrap();
            assert!(!experts.rebalance(&mut live, Duration::from_secs(1)).unwrap().is_empty(), "now they may");
        }
        batch.output().to_vec()
    };
    let still = run(false);
    assert!(still.iter().any(|&v| v != 0.0));
    assert_eq!(still, run(true));
}

#[test]
fn what_cannot_be_placed_is_refused() {
    let source = source(1);
    let gpu = device("gpu0");
    let twice = runtime(&[&gpu]).plan_with(&*source, &on(&[("gpu0", 2), ("gpu0", 1)], Policy::Uniform));
    let error = twice.map(drop).unwrap_err().to_string();
    assert!(error.contains("`gpu0` is named twice"), "{error}");
    // Kept, and not to be moved.
    let still = runtime(&[&gpu]).load_shared(&source, on(&[("gpu0", 2)], Policy::Uniform)).unwrap();
    let error = still.live(LiveOptions::default()).map(drop).unwrap_err().to_string();
    assert!(error.contains("a placement that is live"), "{error}");
}

#[test]
fn passes_defer_alike() {
    let source = source(2);
    let gpu = device("gpu0");
    let options = || on(&[("gpu0", 5)], Policy::Uniform);
    let whole = runtime(&[&gpu]).load_with(&*source, options()).unwrap();
    let passes = builder().with_backend(gpu.clone()).pass_tokens(4).build().unwrap();
    let passes = passes.load_with(&*source, options()).unwrap();
    let tokens = Tokens::new(11, 6);
    let run = |experts: &Experts| {
        let mut batch = tokens.batch();
        batch.defer(1);
        let layers: Vec<Vec<f32>> = (0..2)
            .map(|i| {
                experts.layer(i).unwrap().forward(&mut batch).unwrap();
                batch.output().to_vec()
            })
            .collect();
        layers
    };
    assert_eq!(run(&whole), run(&passes));
}

#[test]
fn long_batches_are_streamed() {
    let source = source(2);
    let gpu = device("gpu0");
    let runtime = runtime(&[&gpu]);
    let options = kept(on(&[("gpu0", 2)], Policy::Uniform), false, Stream::From(6));
    let plan = runtime.plan_with(&*source, &options).unwrap();
    assert!(plan.extra.iter().any(|e| e.label.contains("streamed layers") && e.bytes == expert_bytes()));
    assert!(plan.devices[0].scratch_bytes >= 2 * expert_bytes(), "{:?}", plan.devices[0]);
    let experts = runtime.load_shared(&source, options).unwrap();
    assert_eq!(experts.stream_from(), Some(6));
    check(&experts, 0, &naive(&source), "short ones and long ones");
    let before = (gpu.uploads(), gpu.used_bytes());
    let tokens = Tokens::new(5, 9);
    experts.layer(0).unwrap().forward(&mut tokens.batch()).unwrap();
    assert_eq!(gpu.uploads(), before.0, "a short one");
    let tokens = Tokens::new(64, 9);
    let mut batch = tokens.batch();
    experts.layer(1).unwrap().forward(&mut batch).unwrap();
    assert_eq!((gpu.uploads(), gpu.used_bytes()), (before.0 + EXPERTS, before.1));
    let usage = experts.stats().layers[1].usage;
    assert_eq!(usage.rows, tokens.ids.iter().filter(|&&id| id >= 0).count() as u64);
    assert_eq!(usage.weight_bytes, EXPERTS as u64 * expert_bytes());
    assert_eq!(experts.heat_map().layers()[1].counts.iter().sum::<u64>(), usage.rows);
    gpu.fail(Fault::Stream);
    let error = experts.layer(1).unwrap().forward(&mut batch).unwrap_err().to_string();
    assert_eq!(error, "backend gpu0, layer 1: lost the device");
    // Deferred experts of a long batch are streamed too.
    let mut batch = tokens.batch();
    batch.defer(1);
    experts.layer(0).unwrap().forward(&mut batch).unwrap();
    experts.layer(1).unwrap().forward(&mut batch).unwrap();
    assert!(batch.output().iter().all(|v| v.is_finite()));
}

#[test]
fn the_threshold_of_streaming_is_measured() {
    let source = source(1);
    // A device whose uploads take for ever is never streamed to; one that is quick where the host's bank is slow is.
    let slow = device("gpu0").upload_delay(Duration::from_millis(20));
    let options = |name: &str, n| kept(on(&[(name, n)], Policy::Uniform), false, Stream::Measured);
    let runtime_of = |device: &TestDevice| runtime(&[device]);
    let experts = runtime_of(&slow).load_shared(&source, options("gpu0", 0)).unwrap();
    assert_eq!(experts.stream_from(), None);
    assert_eq!((experts.stats().total().calls, experts.heat_map().total()), (0, 0), "measuring leaves no trace");
    check(&experts, 0, &naive(&source), "never streamed");
    let quick = device("gpu0").delay(Duration::from_millis(50));
    let experts = runtime_of(&quick).load_shared(&source, options("gpu0", 6)).unwrap();
    assert_eq!(experts.stream_from(), Some(32), "the smallest batch that is tried");
    check(&experts, 0, &naive(&source), "streamed");
}

/// A source that fails after so many matrices.
struct Fails {
    of: Arc<dyn WeightSource>,
    left: AtomicUsize,
}

impl WeightSource for Fails {
    fn path(&self) -> &Path {
        self.of.path()
    }

    fn layers(&self) -> &[LayerSpec] {
        self.of.layers()
    }

    fn matrix(&self, layer: usize, expert: usize, proj: Proj) -> kt_core::Result<Matrix> {
        if self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_err() {
            return Err(Error::tensor("model", format!("expert {expert}"), "the disk is gone"));
        }
        self.of.matrix(layer, expert, proj)
    }

    fn metadata(&self) -> &Metadata {
        self.of.metadata()
    }

    fn routing(&self, layer: usize) -> Option<Routing> {
        self.of.routing(layer)
    }

    fn tensors(&self) -> Vec<String> {
        self.of.tensors()
    }

    fn tensor(&self, name: &str) -> kt_core::Result<Matrix> {
        self.of.tensor(name)
    }

    fn dense_bytes(&self) -> u64 {
        self.of.dense_bytes()
    }
}

#[test]
fn an_expert_is_never_lost_in_silence() {
    let inner = source(1);
    let naive = naive(&inner);
    let fails = Arc::new(Fails { of: inner, left: AtomicUsize::new(usize::MAX) });
    let source: Arc<dyn WeightSource> = fails.clone();
    let gpu = device("gpu0");
    let options = || kept(on(&[("gpu0", 2)], Policy::FrontLoading), true, Stream::Never);
    let hot = || Batch::new(6, vec![0.5; 6 * HIDDEN], [4, 4, 4].repeat(6), vec![0.3; 18]).unwrap();
    // The device packs one, then the host; then the device takes it, or not.
    for (matrices, says) in [(0, "the disk is gone"), (3, "the disk is gone"), (6, "the upload failed")] {
        let experts = runtime(&[&gpu]).load_shared(&source, options()).unwrap();
        let mut live = experts.live(LiveOptions::default()).unwrap();
        experts.layer(0).unwrap().forward(&mut hot()).unwrap();
        if matrices == 6 {
            gpu.fail(Fault::Replace);
        }
        fails.left.store(matrices, Ordering::SeqCst);
        let error = experts.rebalance(&mut live, Duration::from_secs(1)).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        fails.left.store(usize::MAX, Ordering::SeqCst);
        check(&experts, 0, &naive, "both kept their experts");
    }
    // A host that gives its expert up and then fails: the device takes its own back, or it is lost.
    for (matrices, lost) in [(6, true), (9, false)] {
        let runtime = RuntimeBuilder::new(|_| vec![Candidate::new("stubborn", Ok(Stubborn))]).threads(2);
        let runtime = runtime.with_backend(gpu.clone()).build().unwrap();
        let experts = runtime.load_shared(&source, options()).unwrap();
        let mut live = experts.live(LiveOptions::default()).unwrap();
        experts.layer(0).unwrap().forward(&mut hot()).unwrap();
        fails.left.store(matrices, Ordering::SeqCst);
        let error = experts.rebalance(&mut live, Duration::from_secs(1)).unwrap_err().to_string();
        assert_eq!(error, "backend stubborn, layer 0: read it, and would not have it");
        fails.left.store(usize::MAX, Ordering::SeqCst);
        if lost {
            let error = experts.layer(0).unwrap().forward(&mut hot()).unwrap_err().to_string();
            assert!(error.contains("was lost while it was moved: ") && error.contains("the disk is gone"), "{error}");
        } else {
            check(&experts, 0, &naive, "the device took its expert back");
        }
    }
}

/// The portable backend, whose banks take no other experts, and say so late.
struct Stubborn;

struct StubbornBank(Box<dyn ExpertBank>);

impl Backend for Stubborn {
    fn name(&self) -> &str {
        "stubborn"
    }

    fn probe(&self, layer: &LayerSpec) -> Result<Fit, Unsupported> {
        CpuBackend::new("portable", Portable).probe(layer)
    }

    fn load(
        &self,
        layer: &LayerSpec,
        experts: &[u32],
        from: &dyn WeightSource,
        context: &LoadContext,
    ) -> kt_core::Result<Box<dyn ExpertBank>> {
        let bank = CpuBackend::new("portable", Portable).load(layer, experts, from, context)?;
        Ok(Box::new(StubbornBank(bank)))
    }
}

impl ExpertBank for StubbornBank {
    fn submit(&self, work: Work) -> Pending<Work> {
        self.0.submit(work)
    }

    fn packed_bytes(&self) -> u64 {
        self.0.packed_bytes()
    }

    fn replace(&self, local: u32, expert: u32, from: &dyn WeightSource) -> kt_core::Result<()> {
        drop(self.0.replacement(local, expert, from)?);
        Err(Error::Invalid("read it, and would not have it".into()))
    }
}

/// A source that can be held up, and says that somebody waits.
struct Slow {
    of: Arc<dyn WeightSource>,
    held: Mutex<bool>,
    released: Condvar,
    waits: AtomicUsize,
}

impl WeightSource for Slow {
    fn path(&self) -> &Path {
        self.of.path()
    }

    fn layers(&self) -> &[LayerSpec] {
        self.of.layers()
    }

    fn matrix(&self, layer: usize, expert: usize, proj: Proj) -> kt_core::Result<Matrix> {
        self.waits.fetch_add(1, Ordering::SeqCst);
        drop(self.released.wait_while(self.held.lock().unwrap(), |held| *held).unwrap());
        self.of.matrix(layer, expert, proj)
    }

    fn metadata(&self) -> &Metadata {
        self.of.metadata()
    }

    fn routing(&self, layer: usize) -> Option<Routing> {
        self.of.routing(layer)
    }

    fn tensors(&self) -> Vec<String> {
        self.of.tensors()
    }

    fn tensor(&self, name: &str) -> kt_core::Result<Matrix> {
        self.of.tensor(name)
    }

    fn dense_bytes(&self) -> u64 {
        self.of.dense_bytes()
    }
}

/// Reading an expert may take as long as it will: calls of its layer do not wait for it.
#[test]
fn calls_go_on_while_experts_are_packed() {
    let inner = source(1);
    let naive = naive(&inner);
    let (held, released, waits) = (Mutex::new(false), Condvar::new(), AtomicUsize::new(0));
    let slow = Arc::new(Slow { of: inner, held, released, waits });
    let source: Arc<dyn WeightSource> = slow.clone();
    let gpu = device("gpu0");
    let options = kept(on(&[("gpu0", 2)], Policy::FrontLoading), true, Stream::Never);
    let experts = runtime(&[&gpu]).load_shared(&source, options).unwrap();
    let mut live = experts.live(LiveOptions::default()).unwrap();
    experts
        .layer(0)
        .unwrap()
        .forward(&mut Batch::new(6, vec![0.5; 6 * HIDDEN], [4, 4, 4].repeat(6), vec![0.3; 18]).unwrap())
        .unwrap();
    *slow.held.lock().unwrap() = true;
    let before = slow.waits.load(Ordering::SeqCst);
    thread::scope(|scope| {
        let moves = scope.spawn(|| experts.rebalance(&mut live, Duration::from_secs(1)).unwrap());
        wait_until("an expert is read", || slow.waits.load(Ordering::SeqCst) > before);
        check(&experts, 0, &naive, "while an expert is read");
        assert!(!moves.is_finished(), "the expert was read before the calls");
        *slow.held.lock().unwrap() = false;
        slow.released.notify_all();
        assert_eq!(moves.join().unwrap().iter().map(|s| s.hot).collect::<Vec<_>>(), [4]);
    });
    check(&experts, 0, &naive, "after moving");
}

#[test]
fn experts_move_with_the_traffic() {
    let source = source(2);
    let naive = naive(&source);
    let gpu = device("gpu0");
    let options = kept(on(&[("gpu0", 4)], Policy::FrontLoading), true, Stream::Never);
    let experts = runtime(&[&gpu]).load_shared(&source, options).unwrap();
    assert_eq!(experts.placement().layers()[0].experts(1), [0, 1, 2, 3]);
    let mut live = experts.live(LiveOptions::default()).unwrap();
    let hot = || Batch::new(6, vec![0.5; 6 * HIDDEN], [4, 5, 0].repeat(6), vec![0.3; 18]).unwrap();
    experts.layer(0).unwrap().forward(&mut hot()).unwrap();
    let swaps = experts.rebalance(&mut live, Duration::from_secs(1)).unwrap();
    assert_eq!(swaps.iter().map(|s| (s.layer, s.hot)).collect::<Vec<_>>(), [(0, 4), (0, 5)]);
    let placement = experts.placement();
    assert_eq!((&placement, placement.layers()[0].on[0]), (live.placement(), 1), "the hot one that was there stays");
    assert_eq!(gpu.used_bytes(), 4 * expert_bytes());
    assert_eq!(experts.rebalance(&mut live, Duration::ZERO).unwrap(), []);
    check(&experts, 0, &naive, "after moving");
    // A move that fails leaves all where it was.
    experts.rebalance(&mut live, Duration::from_secs(1)).unwrap();
    let before = experts.placement();
    let (swaps, cold) = (live.report().swaps, before.layers()[0].experts(0));
    let cold = [cold[0] as i32, cold[1] as i32, cold[0] as i32, cold[1] as i32];
    let other = || Batch::new(400, vec![0.5; 400 * HIDDEN], cold.repeat(200), vec![0.3; 800]).unwrap();
    experts.layer(0).unwrap().forward(&mut other()).unwrap();
    gpu.fail(Fault::Replace);
    let error = experts.rebalance(&mut live, Duration::from_secs(1)).unwrap_err().to_string();
    assert_eq!(error, "backend gpu0, layer 0: the upload failed");
    assert_eq!((&experts.placement(), live.placement()), (&before, &before));
    check(&experts, 0, &naive, "after a move that failed");
    let report = live.report();
    assert!(report.ended.as_deref().unwrap().contains("could not be moved") && report.swaps == swaps, "{report}");
}

#[test]
fn traces_are_recorded_and_replayed() {
    let source = source(2);
    let experts = runtime(&[]).load(&*source).unwrap();
    experts.layer(0).unwrap().forward(&mut Tokens::new(3, 1).batch()).unwrap();
    experts.record_trace();
    let (a, b) = (Tokens::new(4, 2), Tokens::new(1, 3));
    for tokens in [&a, &b] {
        (0..2).for_each(|l| experts.layer(l).unwrap().forward(&mut tokens.batch()).unwrap());
    }
    let fewer = Batch::new(1, vec![0.0; HIDDEN], vec![2], vec![1.0]);
    experts.layer(1).unwrap().forward(&mut fewer.unwrap()).unwrap();
    let trace = experts.take_trace();
    assert_eq!(trace.layers()[0].ids, [&a.ids[..], &b.ids].concat());
    assert_eq!(trace.layers()[1].ids, [&a.ids[..], &b.ids, &[2, -1, -1]].concat());
    assert_eq!(experts.take_trace().tokens(), 0, "recording has ended");
}
