//! Layers that are on the device, in host memory and elsewhere, on the caller's stream and in graphs. Emulated, and on a GPU where there is one, but for failures.

#![allow(unsafe_code)] // device pointers of prepared calls

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{Driver, Memory, Stream};
use half::bf16;
use kt_core::backend::Backend;
use kt_core::cpu::CpuBackend;
use kt_core::cpu::portable::Portable;
use kt_core::placement::{Capacity, LiveOptions, PlacementOptions, Policy};
use kt_core::source::synthetic::SyntheticSource;
use kt_core::testing::{Fault, Random, TestDevice};
use kt_core::{
    Batch, Candidate, Experts, Format, Group, Hidden, LayerExperts, LoadOptions, RuntimeBuilder, ScaleType,
    WeightSource,
};
use kt_cuda::{CudaBackend, DeviceBatch, Element, HybridCall};

const HIDDEN: usize = 64;
const EXPERTS: usize = 6;
const TOP_K: usize = 3;
const MOST: usize = 5;
const NOWHERE: &str = "/nowhere/libnvrtc.so";

fn source(format: Format) -> Arc<dyn WeightSource> {
    let source = SyntheticSource::builder().hidden(HIDDEN).intermediate(96).experts(EXPERTS).top_k(TOP_K).layers(2);
    Arc::new(source.format(format).seed(7).build().unwrap())
}

/// Where experts may go: a device, and how many.
enum On<'a> {
    Gpu(&'a CudaBackend, usize),
    Other(&'a TestDevice, usize),
}

fn load(source: &Arc<dyn WeightSource>, on: &[On<'_>], live: bool) -> Experts {
    let portable = |_| vec![Candidate::new("portable", Ok(CpuBackend::new("portable", Portable)))];
    let mut builder = RuntimeBuilder::new(portable).threads(2).pass_tokens(64);
    let (layer, mut devices) = (&source.layers()[0], Vec::new());
    for on in on {
        let (name, fit, n) = match on {
            On::Gpu(gpu, n) => (gpu.name(), gpu.probe(layer), n),
            On::Other(device, n) => (device.name(), device.probe(layer), n),
        };
        devices.push((name.to_string(), Capacity::bytes(fit.unwrap().packed_bytes / EXPERTS as u64 * *n as u64)));
        builder = match on {
            On::Gpu(gpu, _) => builder.with_backend((*gpu).clone()),
            On::Other(device, _) => builder.with_backend((*device).clone()),
        };
    }
    let placement = PlacementOptions { devices, policy: Policy::Random(5), live, ..Default::default() };
    builder.build().unwrap().load_shared(source, LoadOptions { placement, ..Default::default() }).unwrap()
}

#[derive(Clone)]
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

    fn halves(&self) -> Vec<bf16> {
        self.input.iter().map(|&v| bf16::from_f32(v)).collect()
    }

    fn forward(&self, layer: &LayerExperts, input: impl Into<Hidden>) -> Vec<f32> {
        let mut batch = Batch::new(self.n, input, self.ids.clone(), self.weights.clone()).unwrap();
        layer.forward(&mut batch).unwrap();
        batch.into_output()
    }
}

/// A batch on the device, and on the host what is copied there and back.
struct There {
    batch: common::Batch,
    from: [Memory; 3],
    back: Memory,
}

impl There {
    fn new(driver: &Driver) -> There {
        let [numbers, choices] = [MOST * HIDDEN * 4, MOST * TOP_K * 4];
        There {
            batch: common::Batch::new(driver, MOST, HIDDEN, TOP_K),
            from: [numbers, choices, choices].map(|bytes| Memory::pinned(driver, bytes)),
            back: Memory::pinned(driver, numbers),
        }
    }

    /// What the stream copies to the device.
    fn put(&self, tokens: &Tokens) {
        self.from[0].put(&tokens.input);
        self.put_choices(tokens);
    }

    fn put_choices(&self, tokens: &Tokens) {
        self.from[1].put(&tokens.ids);
        self.from[2].put(&tokens.weights);
    }

    /// Inputs to the device, on the stream.
    fn bring(&self, stream: &Stream<'_>) {
        for (to, from) in [&self.batch.input, &self.batch.ids, &self.batch.weights].into_iter().zip(&self.from) {
            to.copy("cuMemcpyHtoDAsync_v2", from, stream);
        }
    }

    /// Outputs from the device, on the stream.
    fn fetch(&self, stream: &Stream<'_>) {
        self.back.copy("cuMemcpyDtoHAsync_v2", &self.batch.output, stream);
    }

    /// What was fetched.
    fn output(&self, tokens: usize) -> Vec<f32> {
        let mut output = self.back.floats();
        output.truncate(tokens * HIDDEN);
        output
    }

    fn submit(&self, call: &HybridCall, stream: &Stream<'_>, tokens: usize, add: bool) -> kt_core::Result<()> {
        // SAFETY: memory of these sizes, which lives as long as the driver; calls are one after the other on their stream.
        unsafe { call.submit_on(stream.handle, &self.batch.of(tokens, Element::F32, add)) }
    }
}

fn allocated(driver: &Driver) -> i64 {
    driver.calls("cuMemAlloc_v2") + driver.calls("cuMemAllocHost_v2")
}

/// Batches of all sizes, on the stream between copies there and back; nothing runs before somebody waits.
#[test]
fn every_placement_has_the_bits_of_other_calls() {
    for driver in common::drivers("placements") {
        driver.enter();
        let mut shapes = Vec::new();
        for (format, gpu) in [Format::Int4(Group::Of(32)), Format::Bf16].into_iter().zip(driver.backends()) {
            let source = source(format);
            let [a, b] = ["gpu0", "gpu1"].map(|name| TestDevice::new(name, 64 << 20).unwrap());
            for on in [
                &[On::Gpu(&gpu, 12)][..],
                &[],
                &[On::Gpu(&gpu, 3)],
                &[On::Gpu(&gpu, 9)],
                &[On::Other(&a, 4), On::Gpu(&gpu, 4)],
                &[On::Gpu(&gpu, 4), On::Other(&a, 8)],
                &[On::Other(&a, 3), On::Gpu(&gpu, 5), On::Other(&b, 3)],
            ] {
                let experts = load(&source, on, false);
                let layer = &experts.layers()[0];
                let names: Vec<String> = layer.backends().map(|(name, _)| name.into()).collect();
                let call = gpu.prepare(layer, MOST, TOP_K).unwrap();
                let (there, stream) = (There::new(&driver), Stream::new(&driver));
                for n in (1..=MOST).chain([2, 1]) {
                    let tokens = Tokens::new(n, 10 + n as u64);
                    let label = format!("{format} on {names:?}, {n} tokens");
                    let want = tokens.forward(layer, tokens.input.clone());
                    let before = allocated(&driver);
                    there.put(&tokens);
                    there.bring(&stream);
                    there.submit(&call, &stream, n, false).unwrap();
                    there.fetch(&stream);
                    stream.wait();
                    assert_eq!(there.output(n), want, "{label}");
                    there.submit(&call, &stream, n, true).unwrap();
                    there.fetch(&stream);
                    stream.wait();
                    let twice: Vec<f32> = want.iter().map(|v| v + v).collect();
                    assert_eq!(there.output(n), twice, "{label}, added");
                    assert_eq!(allocated(&driver), before, "{label}");
                    // BF16, of which there are half as many bytes.
                    there.from[0].put(&tokens.halves());
                    there.bring(&stream);
                    // SAFETY: as in `There::submit`.
                    unsafe { call.submit_on(stream.handle, &there.batch.of(n, Element::Bf16, false)) }.unwrap();
                    there.fetch(&stream);
                    stream.wait();
                    assert_eq!(there.output(n), tokens.forward(layer, tokens.halves()), "{label}, BF16");
                    call.check().unwrap();
                }
                let why = there.submit(&call, &stream, MOST + 1, false).unwrap_err().to_string();
                assert!(why.contains("cuda:0") && why.contains("prepared for 1 to 5"), "{why}");
                assert!(there.submit(&call, &stream, 0, false).is_err());
                shapes.push(names.join(" "));
            }
        }
        for shape in ["cuda:0", "portable", "portable cuda:0", "portable gpu0 cuda:0 gpu1", "cuda:0 gpu0"] {
            assert!(shapes.iter().any(|s| s == shape), "{shape} was not among {shapes:?}");
        }
        assert!(driver.calls("host function") > 0 || !driver.emulated);
        assert_eq!(driver.calls("in a host function"), 0, "calls of the driver where there may be none");
    }
}

/// The output of a layer is the input of the next; what the router chose differs from launch to launch, and other calls go on beside it.
#[test]
fn two_layers_in_a_graph_are_launched_again_and_again() {
    for driver in common::drivers("graph") {
        driver.enter();
        let gpu = driver.backend();
        let experts = load(&source(Format::Bf16), &[On::Gpu(&gpu, 6)], false);
        let layers = experts.layers();
        assert!(layers.iter().all(|l| l.backends().count() == 2));
        let calls = [0, 1].map(|i| gpu.prepare(&layers[i], MOST, TOP_K).unwrap());
        let (first, second) = (There::new(&driver), There::new(&driver));
        let stream = Stream::new(&driver);
        let graphs: Vec<_> = (1..=MOST)
            .map(|n| {
                stream.capture(|| {
                    let before = allocated(&driver);
                    first.bring(&stream);
                    first.submit(&calls[0], &stream, n, false).unwrap();
                    second.bring(&stream);
                    let batch =
                        DeviceBatch { input: first.batch.output.address(), ..second.batch.of(n, Element::F32, false) };
                    // SAFETY: as in `There::submit`.
                    unsafe { calls[1].submit_on(stream.handle, &batch) }.unwrap();
                    second.fetch(&stream);
                    assert_eq!(allocated(&driver), before);
                })
            })
            .collect();
        assert_eq!(driver.calls("host function"), 0, "a function that was called while it was captured");
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            // The runtime's threads are not only theirs.
            scope.spawn(|| {
                let tokens = Tokens::new(MOST, 3);
                let batch =
                    || Batch::new(MOST, tokens.input.clone(), tokens.ids.clone(), tokens.weights.clone()).unwrap();
                while !done.load(Ordering::SeqCst) {
                    layers[0].submit(batch()).wait().unwrap();
                }
            });
            for launch in 0..60 {
                let n = [1, MOST, 3][launch as usize % 3];
                let (tokens, other) = (Tokens::new(n, launch), Tokens::new(n, 100 + launch));
                first.put(&tokens);
                second.put_choices(&other);
                graphs[n - 1].launch(&stream);
                stream.wait();
                let middle = tokens.forward(&layers[0], tokens.input.clone());
                assert_eq!(second.output(n), other.forward(&layers[1], middle), "launch {launch}");
            }
            done.store(true, Ordering::SeqCst);
        });
        calls.iter().for_each(|call| call.check().unwrap());
        let functions = if driver.emulated { 60 * 4 } else { 0 };
        assert_eq!((driver.calls("host function"), driver.calls("in a host function")), (functions, 0));
        // A driver that does all at once has the same order.
        driver.set("eager", 1);
        let tokens = Tokens::new(2, 9);
        first.put(&tokens);
        first.bring(&stream);
        first.submit(&calls[0], &stream, 2, false).unwrap();
        first.fetch(&stream);
        if !driver.emulated {
            stream.wait(); // a GPU's does not
        }
        assert_eq!(first.output(2), tokens.forward(&layers[0], tokens.input.clone()));
    }
}

/// A graph goes on, and whoever asks is told once.
#[test]
fn failures_on_the_host_are_told_by_name_and_leave_nan() {
    for driver in common::drivers("failures") {
        driver.enter();
        let gpu = driver.backend();
        let other = TestDevice::new("gpu0", 64 << 20).unwrap();
        let experts = load(&source(Format::Bf16), &[On::Other(&other, 4), On::Gpu(&gpu, 4)], false);
        let layer = &experts.layers()[0];
        let call = gpu.prepare(layer, MOST, TOP_K).unwrap();
        let (there, stream) = (There::new(&driver), Stream::new(&driver));
        let mut tokens = Tokens::new(MOST, 1);
        tokens.ids = (0..(MOST * TOP_K) as i32).map(|i| i % EXPERTS as i32).collect();
        let want = tokens.forward(layer, tokens.input.clone());
        let graph = stream.capture(|| {
            there.bring(&stream);
            there.submit(&call, &stream, MOST, false).unwrap();
            there.fetch(&stream);
        });
        let launch = |tokens: &Tokens| {
            there.put(tokens);
            graph.launch(&stream);
            stream.wait();
            there.output(MOST)
        };
        let mut wrong = tokens.clone();
        wrong.ids[4] = EXPERTS as i32;
        for (fault, tokens, words) in [
            (Some(Fault::Work), &tokens, ["gpu0", "lost the device"]),
            (Some(Fault::Panic), &tokens, ["gpu0", "panicked"]),
            (None, &wrong, ["layer 0", "topk_ids[1, 1] is 6"]),
        ] {
            fault.into_iter().for_each(|fault| other.fail(fault));
            assert!(launch(tokens).iter().all(|v| v.is_nan()), "outputs of a call that failed");
            let why = call.check().unwrap_err().to_string();
            assert!(words.iter().all(|w| why.contains(w)), "{why}");
            call.check().unwrap();
        }
        assert_eq!(launch(&tokens), want);
        // Two failures, and the first is told by the next call, which puts nothing on the stream.
        other.fail(Fault::Work);
        launch(&tokens);
        launch(&wrong);
        let launched = driver.calls("cuLaunchKernel");
        let why = there.submit(&call, &stream, MOST, false).unwrap_err().to_string();
        assert!(why.contains("gpu0") && why.contains("lost the device"), "{why}");
        assert_eq!(driver.calls("cuLaunchKernel"), launched);
        there.put(&tokens);
        there.bring(&stream);
        there.submit(&call, &stream, MOST, false).unwrap();
        there.fetch(&stream);
        stream.wait();
        assert_eq!((there.output(MOST), launch(&tokens)), (want.clone(), want));
        call.check().unwrap();
    }
}

#[test]
fn dropping_waits_for_what_is_under_way() {
    let Some(driver) = common::fake("drop") else { return };
    driver.enter();
    let gpu = driver.backend();
    let other = TestDevice::new("gpu0", 64 << 20).unwrap();
    let experts = load(&source(Format::Bf16), &[On::Other(&other, 4), On::Gpu(&gpu, 4)], false);
    let layer = experts.layers()[0].clone();
    let (there, stream) = (There::new(&driver), Stream::new(&driver));
    let mut tokens = Tokens::new(MOST, 1);
    tokens.ids = (0..(MOST * TOP_K) as i32).map(|i| i % EXPERTS as i32).collect();
    let want = tokens.forward(&layer, tokens.input.clone());
    let live = || (driver.number("fake_live_bytes"), driver.number("fake_live_host_bytes"));
    let before = live();
    // Nothing of it was begun: the stream had not come to it.
    let call = gpu.prepare(&layer, MOST, TOP_K).unwrap();
    there.put(&tokens);
    there.bring(&stream);
    there.submit(&call, &stream, MOST, false).unwrap();
    there.fetch(&stream);
    drop(call);
    assert_eq!((there.output(MOST), live()), (want.clone(), before));
    // The host's part is under way, and does not end before it is let.
    let call = gpu.prepare(&layer, MOST, TOP_K).unwrap();
    there.batch.output.put(&[0f32; MOST * HIDDEN]);
    there.submit(&call, &stream, MOST, false).unwrap();
    there.fetch(&stream);
    other.hold();
    let (begun, released) = (other.calls(), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            driver.enter();
            stream.wait();
        });
        let start = Instant::now();
        while other.calls() == begun {
            assert!(start.elapsed() < Duration::from_secs(60), "the host's part never begins");
            thread::yield_now();
        }
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(50));
            released.store(true, Ordering::SeqCst);
            other.release();
        });
        drop(call);
        assert!(released.load(Ordering::SeqCst), "it was dropped with its work under way");
    });
    assert_eq!((there.output(MOST), live()), (want.clone(), before));
    // The layer, its experts and the backend may go first.
    let call = gpu.prepare(&layer, MOST, TOP_K).unwrap();
    there.batch.output.put(&[0f32; MOST * HIDDEN]);
    there.submit(&call, &stream, MOST, false).unwrap();
    there.fetch(&stream);
    drop((experts, layer, gpu));
    stream.wait();
    assert_eq!(there.output(MOST), want);
    // While a stream is captured nobody can wait: memory stays, rather than being freed under way.
    let kept = live();
    stream.capture(|| drop(call));
    assert_eq!(live(), kept);
}

/// Every function of the driver fails once, at every call of preparing and of putting work on the stream.
#[test]
fn each_call_of_the_driver_may_fail() {
    let Some(driver) = common::fake("each-hybrid") else { return };
    driver.enter();
    let gpu = driver.backend();
    let other = TestDevice::new("gpu1", 64 << 20).unwrap();
    let experts = load(&source(Format::Bf16), &[On::Gpu(&gpu, 4), On::Other(&other, 4)], false);
    let layer = &experts.layers()[0];
    let tokens = Tokens::new(MOST, 1);
    let (there, stream) = (There::new(&driver), Stream::new(&driver));
    let want = tokens.forward(layer, tokens.input.clone());
    there.put(&tokens);
    there.bring(&stream);
    stream.wait();
    let before = (driver.number("fake_live_bytes"), driver.number("fake_live_host_bytes"));
    let all = || -> kt_core::Result<Vec<f32>> {
        let call = gpu.prepare(layer, MOST, TOP_K)?;
        there.submit(&call, &stream, MOST, false)?;
        drop(call);
        let mut output = there.batch.output.floats();
        output.truncate(MOST * HIDDEN);
        Ok(output)
    };
    assert_eq!(all().unwrap(), want);
    for function in [
        "cuMemAlloc_v2",
        "cuMemAllocHost_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuStreamCreate",
        "cuStreamSynchronize",
        "cuLaunchKernel",
        "cuLaunchHostFunc",
        "cuCtxPushCurrent_v2",
    ] {
        let calls = driver.calls(function);
        all().unwrap();
        let calls = driver.calls(function) - calls;
        assert!(calls > 0, "{function} is not called");
        for n in 0..calls {
            driver.fail(function, n, 2);
            let failed = all();
            driver.fail(function, 0, 0);
            match failed {
                Err(why) => {
                    let why = why.to_string();
                    assert!(why.contains("cuda:0") && why.contains("out of memory (CUDA_ERROR"), "{function}: {why}");
                }
                // What is only given back needs no word. Then nobody waited, and memory is kept for good.
                Ok(_) => assert_eq!(function, "cuCtxPushCurrent_v2", "call {n} failed, and nothing was said"),
            }
            stream.wait();
            let live = (driver.number("fake_live_bytes"), driver.number("fake_live_host_bytes"));
            assert!(
                live == before || function == "cuCtxPushCurrent_v2",
                "{live:?} and not {before:?}: {n} of {function}"
            );
            assert_eq!(all().unwrap(), want, "after call {n} of {function} failed");
        }
    }
    // A device that is lost on the way.
    let call = gpu.prepare(layer, MOST, TOP_K).unwrap();
    driver.fail("kernel", 1, 719);
    there.submit(&call, &stream, MOST, false).unwrap();
    assert_eq!(driver.driver("cuStreamSynchronize", [stream.handle]), 719);
    assert!(there.submit(&call, &stream, MOST, false).unwrap_err().to_string().contains("unspecified launch failure"));
    drop(call);
}

#[test]
fn what_cannot_be_prepared_is_declined() {
    let Some(driver) = common::fake("two") else { return };
    driver.enter();
    driver.set("devices", 2);
    let [first, second] = [0, 1].map(|i| driver.builder().nvrtc(NOWHERE).build(i).unwrap());
    let source = source(Format::Bf16);
    let experts = load(&source, &[On::Gpu(&first, 4), On::Gpu(&second, 4)], false);
    let layer = &experts.layers()[0];
    let why = first.prepare(layer, MOST, TOP_K).err().unwrap().to_string();
    assert!(why.contains("layer 0 has experts on cuda:1 besides cuda:0"), "{why}");
    let why = first.prepare(&load(&source, &[], false).layers()[0], 65, TOP_K).err().unwrap().to_string();
    assert!(why.contains("65 tokens with 3 experts") && why.contains("1 to 64 tokens"), "{why}");
}

/// Calls that are prepared after experts were moved find them; while they live nothing is moved.
#[test]
fn experts_that_were_moved_are_found() {
    for driver in common::drivers("moved") {
        driver.enter();
        let gpu = driver.backend();
        let experts = load(&source(Format::Bf16), &[On::Gpu(&gpu, 6)], true);
        let layer = &experts.layers()[0];
        let mut live = experts.live(LiveOptions { half_life_tokens: 1e9, ..Default::default() }).unwrap();
        let mut rebalance = || {
            let cold = experts.placement().layers()[0].experts(0)[0] as i32;
            let mut tokens = Tokens::new(20, 1);
            tokens.ids.fill(cold);
            tokens.forward(layer, tokens.input.clone());
            experts.rebalance(&mut live, Duration::from_secs(1)).unwrap().len()
        };
        assert!(rebalance() > 0);
        let (there, stream) = (There::new(&driver), Stream::new(&driver));
        let tokens = Tokens::new(MOST, 4);
        there.put(&tokens);
        there.bring(&stream);
        let call = gpu.prepare(layer, MOST, TOP_K).unwrap();
        assert_eq!(rebalance(), 0);
        there.submit(&call, &stream, MOST, false).unwrap();
        there.fetch(&stream);
        stream.wait();
        assert_eq!(there.output(MOST), tokens.forward(layer, tokens.input.clone()));
        drop(call);
        assert!(rebalance() > 0);
    }
}

/// What the plan says of a device is what is allocated there: scales of groups too, whatever their type.
#[test]
fn plans_are_exact() {
    let Some(driver) = common::fake("plans") else { return };
    let gpu = driver.backend();
    let portable = |_| vec![Candidate::new("portable", Ok(CpuBackend::new("portable", Portable)))];
    for format in [
        Format::Bf16,
        Format::Fp8Channel,
        Format::Fp8Block,
        Format::Mxfp4,
        Format::Int8(Group::Row),
        Format::Int8(Group::Of(32)),
        Format::Int8Asym(Group::Of(64)),
        Format::Int4(Group::Of(32)),
        Format::Int4Asym(Group::Of(32)),
        Format::Q4K,
    ] {
        let mut sizes = Vec::new();
        for scales in [None, Some(ScaleType::Bf16), Some(ScaleType::F16), Some(ScaleType::F32)] {
            let source = SyntheticSource::builder().hidden(256).intermediate(512).experts(3).layers(2).format(format);
            let source = scales.into_iter().fold(source, |s, kind| s.scales(kind)).build().unwrap();
            let devices = vec![("cuda:0".to_string(), Capacity::bytes(u64::MAX))];
            let options = || LoadOptions {
                placement: PlacementOptions { devices: devices.clone(), ..Default::default() },
                ..Default::default()
            };
            let runtime = RuntimeBuilder::new(portable).threads(1).with_backend(gpu.clone()).build().unwrap();
            let planned = runtime.plan_with(&source, &options()).unwrap().device_bytes(0);
            let before = driver.number("fake_live_bytes");
            let experts = runtime.load_with(&source, options()).unwrap();
            let took = (driver.number("fake_live_bytes") - before) as u64;
            assert_eq!((planned, experts.device_bytes()), (took, took), "{format}, scales {scales:?}");
            sizes.push(took);
        }
        let wider = sizes[3] > sizes[1];
        assert_eq!(wider, matches!(format.group(), Some(Group::Of(_))) && format != Format::Q4K, "{format}: {sizes:?}");
    }
}
