//! What the backend makes of drivers: of none, of old ones, of failures anywhere; the order of work; prepared calls. Emulated, and on a GPU where there is one, but for failures.

#![allow(unsafe_code)] // device pointers of prepared calls

mod common;

use std::path::PathBuf;
use std::sync::Arc;

use common::{Batch, Driver, Stream};
use kt_core::activation::Activation;
use kt_core::backend::{LoadContext, Progress};
use kt_core::cpu::team::Team;
use kt_core::cpu::tier::Tier;
use kt_core::scheduler::{self, Home};
use kt_core::source::synthetic::SyntheticSource;
use kt_core::testing::{Naive, Random, mean_error};
use kt_core::work::{Hidden, Spent, Work};
use kt_core::{Backend, ExpertBank, Format, Group, WeightSource};
use kt_cuda::{CudaBackend, CudaBank, Element};

const NOWHERE: &str = "/nowhere/libnvrtc.so";
const EXPERTS: usize = 4;

fn source(format: Format, hidden: usize, intermediate: usize) -> SyntheticSource {
    let builder =
        SyntheticSource::builder().hidden(hidden).intermediate(intermediate).experts(EXPERTS).top_k(2).layers(1);
    builder.format(format).seed(5).build().unwrap()
}

fn context(replaceable: bool) -> LoadContext {
    LoadContext {
        team: Team::oversubscribed(1).unwrap(),
        progress: Arc::<Progress>::default(),
        huge_pages: Default::default(),
        cache: None,
        replaceable,
    }
}

fn load(backend: &CudaBackend, source: &SyntheticSource, experts: &[u32]) -> kt_core::Result<CudaBank> {
    backend.load_bank(&source.layers()[0], experts, source, &context(false))
}

struct Example {
    input: Vec<f32>,
    ids: Vec<i32>,
    weights: Vec<f32>,
    tokens: usize,
    hidden: usize,
}

fn example(tokens: usize, hidden: usize, seed: u64) -> Example {
    let mut random = Random(seed);
    Example {
        input: (0..tokens * hidden).map(|_| random.normal()).collect(),
        ids: (0..tokens * 2).map(|_| random.below(EXPERTS + 1) as i32 - 1).collect(),
        weights: (0..tokens * 2).map(|_| random.uniform()).collect(),
        tokens,
        hidden,
    }
}

impl Example {
    fn work(&self) -> Work {
        let homes: Vec<Home> = (0..EXPERTS as u32).map(|local| Home { bank: 0, local }).collect();
        let share = scheduler::split(&self.ids, &self.weights, 2, &homes, 1).remove(0);
        Work {
            input: Arc::new(Hidden::F32(self.input.clone())),
            first: 0,
            tokens: self.tokens,
            hidden: self.hidden,
            rows: share.rows,
            experts: share.experts,
            output: vec![0.0; self.tokens * self.hidden],
            spent: Spent::default(),
        }
    }

    fn run(&self, bank: &CudaBank) -> Vec<f32> {
        bank.run(self.work()).unwrap().output
    }
}

fn reason(driver: &Driver) -> String {
    driver.builder().nvrtc(NOWHERE).build(0).err().expect("a reason").to_string()
}

#[test]
fn what_is_missing_is_named() {
    let open = |path: &str| kt_cuda::builder().driver(path).build(0).err().expect("a reason").to_string();
    let none = open("/nowhere/libcuda.so.1");
    assert!(none.contains("/nowhere/libcuda.so.1") && none.contains("No such file"), "{none}");
    let other = open("libm.so.6");
    assert!(other.contains("libm.so.6 has no cuInit, cuDriverGetVersion"), "{other}");
    // Whatever this machine has: no panic.
    match kt_cuda::backend(Tier::Portable) {
        Ok(backend) => eprintln!("{} {}", backend.name(), backend.tier()),
        Err(why) => eprintln!("{why}"),
    }
    assert!(!kt_cuda::candidates().is_empty());
}

#[test]
fn drivers_and_devices_that_will_not_do_are_named() {
    let Some(driver) = common::fake("reasons") else { return };
    driver.set("version", 11040);
    assert!(reason(&driver).contains("the driver knows CUDA 11.4; 12.0 is needed"), "{}", reason(&driver));
    driver.set("version", 12000);
    driver.set("devices", 0);
    assert!(reason(&driver).contains("has no device"), "{}", reason(&driver));
    driver.set("devices", 1);
    driver.fail("cuInit", 0, 100);
    assert!(
        reason(&driver).contains("no CUDA-capable device is detected (CUDA_ERROR_NO_DEVICE)"),
        "{}",
        reason(&driver)
    );
    driver.fail("cuInit", 0, 12345);
    assert!(reason(&driver).contains("cuInit: error 12345"), "{}", reason(&driver));
    driver.fail("cuInit", 0, 0);
    driver.set("major", 7);
    driver.set("minor", 5);
    assert!(reason(&driver).contains("compute capability 7.5"), "{}", reason(&driver));
    driver.set("major", 12);
    driver.set("minor", 0);
    assert_eq!(driver.backend().tier(), "sm_120");
    let why = driver.builder().build(1).err().unwrap().to_string();
    assert!(why.contains("no device 1, only 0..1"), "{why}");
    driver.set("devices", 3);
    let names: Vec<String> = driver.builder().nvrtc(NOWHERE).candidates().into_iter().map(|c| c.name).collect();
    assert_eq!(names, ["cuda:0", "cuda:1", "cuda:2"]);
    let device = driver.backend().device().unwrap();
    assert_eq!((device.label.as_str(), device.total_bytes), ("Emulated GPU", 8 << 30));
}

#[test]
fn codes_reach_the_products_exactly() {
    let Some(driver) = common::fake("codes") else { return };
    assert_eq!(driver.number("fake_wrong_codes"), 0);
}

#[test]
fn choices_are_grouped_as_they_should() {
    let Some(driver) = common::fake("groups") else { return };
    for backwards in [0, 1] {
        driver.set("backwards", backwards);
        assert_eq!(driver.number("fake_wrong_groups"), 0);
    }
}

/// Hidden and intermediate sizes that are multiples of nothing.
#[test]
fn odd_shapes_are_filled_up() {
    for driver in common::drivers("odd") {
        let backend = driver.compiling().unwrap().build(0).unwrap();
        for (format, hidden, intermediate) in [
            (Format::Bf16, 50, 37),
            (Format::Bf16, 1, 1),
            (Format::Bf16, 129, 17),
            (Format::Fp8Channel, 33, 100),
            (Format::Fp8Block, 200, 131),
            (Format::Int8(Group::Row), 77, 45),
            (Format::Int8Asym(Group::Row), 45, 77),
            (Format::Int4(Group::Row), 70, 34),
            (Format::Int4Asym(Group::Row), 34, 70),
            (Format::Int4(Group::Of(96)), 288, 96),
        ] {
            let source = source(format, hidden, intermediate);
            let bank = load(&backend, &source, &[0, 1, 2, 3]).unwrap();
            let naive = Naive::new(&source);
            for tokens in [1, 9, 70] {
                let example = example(tokens, hidden, 11);
                let want =
                    naive.forward(&Hidden::F32(example.input.clone()), tokens, &example.ids, &example.weights, 2);
                let error = mean_error(&want, &example.run(&bank));
                // A single column is one rounding, not a mean of many.
                assert!(error < 0.007, "{format} {hidden}x{intermediate}, {tokens} tokens: {error}");
            }
        }
    }
}

/// The PTX that comes with the crate has no kernels for many rows.
#[test]
fn few_rows_at_a_time_give_the_bits_of_many_in_any_order_of_threads() {
    for driver in common::drivers("bits") {
        let backends = <[CudaBackend; 2]>::try_from(driver.backends()).ok().expect("a compiler");
        for format in [Format::Bf16, Format::Int4(Group::Of(32)), Format::Q4K, Format::Q6K] {
            let source = source(format, 256, 512);
            let example = example(150, 256, 3);
            let run = || backends.each_ref().map(|b| example.run(&load(b, &source, &[0, 1, 2, 3]).unwrap()));
            let [few, both] = run();
            assert!(few.iter().any(|&v| v != 0.0) && few == both, "{format}");
            // Where a barrier was missing, the order of threads would show.
            driver.set("backwards", 1);
            assert_eq!(run(), [few, both], "{format}");
            driver.set("backwards", 0);
        }
    }
}

#[test]
fn work_in_flight_keeps_to_itself() {
    for driver in common::drivers("flight") {
        let backend = driver.backend();
        let source = source(Format::Bf16, 64, 96);
        let bank = load(&backend, &source, &[0, 1, 2, 3]).unwrap();
        let examples: Vec<Example> = (0..6).map(|i| example(5 + i, 64, i as u64)).collect();
        let alone: Vec<Vec<f32>> = examples.iter().map(|e| e.run(&bank)).collect();
        // Waited for in another order, some not at all. Nothing of the device's work runs before a wait.
        let mut pending: Vec<_> = examples.iter().map(|e| Some(bank.submit(e.work()))).collect();
        for i in [4, 1, 5] {
            assert_eq!(pending[i].take().unwrap().wait().unwrap().output, alone[i], "work {i}");
        }
        drop(pending);
        assert_eq!(examples[3].run(&bank), alone[3]);
        // From several threads at once, and with a driver that does all at once.
        driver.set("eager", 1);
        std::thread::scope(|scope| {
            for (example, alone) in examples.iter().zip(&alone) {
                scope.spawn(|| (0..3).for_each(|_| assert_eq!(example.run(&bank), *alone)));
            }
        });
        // What is under way outlives its bank and backend.
        driver.set("eager", 0);
        let last = bank.submit(examples[2].work());
        drop((bank, backend));
        assert_eq!(last.wait().unwrap().output, alone[2]);
        assert_eq!(
            driver.number("fake_live_bytes") + driver.number("fake_live_host_bytes"),
            0,
            "bytes that were not freed"
        );
    }
}

#[test]
fn too_little_memory_is_an_error_and_leaves_nothing() {
    let Some(driver) = common::fake("memory") else { return };
    let backend = driver.backend();
    let source = source(Format::Bf16, 256, 256);
    driver.set("memory", 1 << 20);
    let why = load(&backend, &source, &[0, 1, 2, 3]).err().unwrap().to_string();
    assert!(
        why.contains("cuda:0")
            && why.contains("bytes of device memory for 4 experts: out of memory (CUDA_ERROR_OUT_OF_MEMORY)"),
        "{why}"
    );
    assert_eq!(driver.number("fake_live_bytes"), 0);
    driver.set("memory", (4 * 3 * 256 * 256 * 2) + 1000);
    let bank = load(&backend, &source, &[0, 1, 2, 3]).unwrap();
    let example = example(3, 256, 1);
    let why = bank.submit(example.work()).wait().err().unwrap().to_string();
    assert!(why.contains("intermediate rows and outputs: out of memory"), "{why}");
    driver.set("memory", 1 << 30);
    assert!(example.run(&bank).iter().any(|&v| v != 0.0));
}

#[test]
fn a_lost_device_is_told_and_stays_lost() {
    let Some(driver) = common::fake("lost") else { return };
    let backend = driver.backend();
    let bank = load(&backend, &source(Format::Bf16, 64, 64), &[0, 1, 2, 3]).unwrap();
    let example = example(3, 64, 1);
    driver.fail("kernel", 1, 719);
    let (first, second) = (bank.submit(example.work()), bank.submit(example.work()));
    let why = first.wait().err().unwrap().to_string();
    assert!(why.contains("waiting for experts: unspecified launch failure (CUDA_ERROR_LAUNCH_FAILED)"), "{why}");
    assert!(second.wait().is_err());
    let later = bank.submit(example.work()).wait().err().unwrap().to_string();
    assert!(later.contains("the device was lost by waiting for experts: unspecified launch failure"), "{later}");
    drop((bank, backend));
}

/// Every function of the driver fails once, at every call of a load and of some work.
#[test]
fn each_call_may_fail() {
    let Some(driver) = common::fake("each") else { return };
    let source = source(Format::Q8_0, 64, 64);
    let example = example(20, 64, 1);
    let all = |driver: &Driver| -> Result<Vec<f32>, String> {
        let backend = driver.builder().nvrtc(NOWHERE).build(0).map_err(|e| e.to_string())?;
        let bank = load(&backend, &source, &[0, 1, 2, 3]).map_err(|e| e.to_string())?;
        bank.run(example.work()).map(|w| w.output).map_err(|e| e.to_string())
    };
    let right = all(&driver).unwrap();
    let functions = [
        "cuInit",
        "cuDriverGetVersion",
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetName",
        "cuDeviceGetAttribute",
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent_v2",
        "cuMemAlloc_v2",
        "cuMemAllocHost_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuStreamCreate",
        "cuStreamSynchronize",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuLaunchKernel",
    ];
    for function in functions {
        let before = driver.calls(function);
        all(&driver).unwrap();
        let calls = driver.calls(function) - before;
        assert!(calls > 0, "{function} is not called");
        for n in 0..calls.min(40) {
            driver.fail(function, n, 2);
            match all(&driver) {
                Err(why) => {
                    assert!(why.contains("out of memory (CUDA_ERROR_OUT_OF_MEMORY)"), "{function}: {why}");
                }
                // What is only given back needs no word.
                Ok(output) => {
                    assert_eq!(
                        (function, &output),
                        ("cuCtxPushCurrent_v2", &right),
                        "call {n} failed, and nothing was said"
                    );
                }
            }
            driver.fail(function, 0, 0);
            let live = driver.number("fake_live_bytes") + driver.number("fake_live_host_bytes");
            assert_eq!(live, 0, "bytes that were not freed when call {n} of {function} failed");
        }
    }
    assert_eq!(all(&driver).unwrap(), right);
}

#[test]
fn experts_are_replaced() {
    for driver in common::drivers("replace") {
        let backend = driver.backend();
        let source = source(Format::Int8(Group::Of(32)), 64, 96);
        let layer = &source.layers()[0];
        let example = example(6, 64, 1);
        let want = example.run(&load(&backend, &source, &[0, 3, 2, 2]).unwrap());
        let bank = backend.load_bank(layer, &[0, 1, 2, 3], &source, &context(true)).unwrap();
        assert_ne!(example.run(&bank), want);
        bank.replace(1, 3, &source).unwrap();
        bank.replace(3, 2, &source).unwrap();
        assert_eq!(example.run(&bank), want);
        assert!(bank.replace(4, 0, &source).err().unwrap().to_string().contains("only 0..4"));
        // Calls that are prepared now know them: expert 1 is no longer here, and 3 is in its place.
        driver.enter();
        let call = bank.prepare(6, 2).unwrap();
        let batch = Batch::new(&driver, 6, 64, 2);
        let there: Vec<i32> = example.ids.iter().map(|&id| if id == 1 { -1 } else { id }).collect();
        batch.put(&example.input, &example.ids, &example.weights);
        let stream = Stream::new(&driver);
        // SAFETY: memory of these sizes, which lives as long as the driver.
        unsafe { call.submit_on(stream.handle, &batch.of(6, Element::F32, false)) }.unwrap();
        stream.wait();
        let all = load(&backend, &source, &[0, 1, 2, 3]).unwrap();
        let want = Example { ids: there, input: example.input.clone(), weights: example.weights.clone(), ..example };
        assert_eq!(batch.output.floats(), want.run(&all));
        let fixed = load(&backend, &source, &[0, 1]).unwrap();
        assert!(
            fixed
                .replace(0, 1, &source)
                .err()
                .unwrap()
                .to_string()
                .contains("not loaded as one whose experts are replaced")
        );
    }
}

/// A layer whose experts are nowhere on the device: brought for one call, with the bits of those that are loaded.
#[test]
fn streamed_layers_have_the_bits_of_loaded_ones() {
    for driver in common::drivers("stream") {
        for backend in driver.backends() {
            let source: Arc<dyn WeightSource> = Arc::new(source(Format::Int4(Group::Of(32)), 64, 96));
            let layer = source.layers()[0].clone();
            let bank = backend.load_bank(&layer, &[0, 1, 2, 3], &*source, &context(false)).unwrap();
            for tokens in [1, 20, 90] {
                let example = example(tokens, 64, 8);
                let want = example.run(&bank);
                let live = driver.number("fake_live_bytes");
                let got = backend.stream(&layer, &source, example.work()).wait().unwrap();
                assert_eq!(got.output, want, "{tokens} tokens");
                assert_eq!(driver.number("fake_live_bytes"), live, "what was streamed is not kept");
            }
            let took = backend.probe_stream(&layer).unwrap();
            assert_eq!((took.device_bytes, took.host_bytes), (bank.packed_bytes() / 2, bank.packed_bytes() / 2));
        }
        let backend = driver.backend();
        let source: Arc<dyn WeightSource> = Arc::new(source(Format::Bf16, 64, 96));
        // One that nobody waits for goes on by itself, and another beside it.
        drop(backend.stream(&source.layers()[0], &source, example(3, 64, 1).work()));
        assert!(backend.stream(&source.layers()[0], &source, example(9, 64, 8).work()).wait().is_ok());
        if !driver.emulated {
            continue;
        }
        driver.fail("kernel", 3, 719);
        let why =
            backend.stream(&source.layers()[0], &source, example(9, 64, 8).work()).wait().err().unwrap().to_string();
        assert!(why.contains("cuda:0") && why.contains("unspecified launch failure"), "{why}");
    }
}

#[test]
fn declined_layers_have_reasons() {
    let Some(driver) = common::fake("declines") else { return };
    let backend = driver.backend();
    let mut layer = source(Format::Bf16, 64, 64).layers()[0].clone();
    layer.activation = Activation::GptOss { alpha: 1.702, limit: 7.0 };
    assert_eq!(backend.probe(&layer).unwrap().tier, "sm_90");
    layer.formats = [Format::Bf16, Format::Q8_0, Format::Bf16];
    assert!(backend.probe(&layer).err().unwrap().0.contains("gate is BF16 and up Q8_0"));
    layer.formats = [Format::Int4(Group::Of(16)); 3];
    assert!(backend.probe(&layer).err().unwrap().0.contains("groups of 16 columns"));
}

#[test]
fn compiled_kernels_are_kept_and_checked() {
    let Some(driver) = common::fake("cache") else { return };
    let Some(compiler) = common::fake_of("libnvrtc", "cache") else { return };
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("kernels-{}", std::process::id()));
    let source = source(Format::Bf16, 64, 64);
    let example = example(3, 64, 1);
    let run = || {
        let backend = driver.builder().nvrtc(&compiler.path).kernel_cache(&dir).build(0).unwrap();
        load(&backend, &source, &[0, 1, 2, 3]).map(|bank| example.run(&bank))
    };
    let first = run().unwrap();
    assert_eq!(compiler.calls(""), 2, "the format's kernels, and those for rows");
    assert_eq!((run().unwrap(), compiler.calls("")), (first.clone(), 2));
    let file = dir.join("kt-cuda-bf16-sm_90.cubin");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    assert_eq!((run().unwrap(), compiler.calls("")), (first.clone(), 3));
    assert_eq!((run().unwrap(), compiler.calls("")), (first.clone(), 3), "what was refused is replaced");
    // Another architecture is another file; one that the compiler does not know gets PTX for the one before.
    driver.set("minor", 1);
    assert_eq!((run().unwrap(), compiler.calls("")), (first, 5));
    assert!(dir.join("kt-cuda-bf16-compute_90.ptx").exists());
    driver.set("minor", 0);
    driver.set("major", 8);
    compiler.set("broken", 1);
    let why = run().err().unwrap().to_string();
    assert!(why.contains("kernels of bf16 for sm_80: NVRTC error 6: kt.cu(1): error: expected a ;"), "{why}");
    std::fs::remove_dir_all(&dir).unwrap();
}

/// On the caller's stream, in order with its other work, and in a graph; the bits are those of `submit`.
#[test]
fn prepared_calls_run_on_streams_and_in_graphs() {
    for driver in common::drivers("prepared") {
        driver.enter();
        for backend in driver.backends() {
            let source = source(Format::Q4K, 256, 256);
            for most in [1, 4, 90] {
                // Expert 1 is elsewhere.
                let bank = load(&backend, &source, &[3, 0, 2]).unwrap();
                let homes = [1, 9, 2, 0];
                let call = bank.prepare(most, 2).unwrap();
                let there = Batch::new(&driver, most, 256, 2);
                let batch = |tokens, add| there.of(tokens, Element::F32, add);
                let want = |example: &Example| {
                    let mut work = example.work();
                    let homes: Vec<Home> =
                        homes.iter().map(|&local| Home { bank: u32::from(local == 9) as _, local }).collect();
                    let share = scheduler::split(&example.ids, &example.weights, 2, &homes, 2).remove(0);
                    (work.rows, work.experts) = (share.rows, share.experts);
                    bank.run(work).unwrap().output
                };
                let put = |example: &Example| there.put(&example.input, &example.ids, &example.weights);
                let stream = Stream::new(&driver);
                // As many as were prepared for, and fewer.
                for tokens in [most, 1, most / 2 + 1] {
                    let examples = [1, 2, 3].map(|seed| example(tokens, 256, seed));
                    put(&examples[0]);
                    // SAFETY: memory of these sizes, which lives as long as the driver.
                    unsafe { call.submit_on(stream.handle, &batch(tokens, false)) }.unwrap();
                    // SAFETY: as above.
                    unsafe { call.submit_on(stream.handle, &batch(tokens, true)) }.unwrap();
                    stream.wait();
                    let twice: Vec<f32> = want(&examples[0]).iter().map(|v| v + v).collect();
                    assert_eq!(there.output.floats()[..tokens * 256], twice, "{tokens} tokens");

                    let allocated = || driver.calls("cuMemAlloc_v2") + driver.calls("cuMemAllocHost_v2");
                    let before = allocated();
                    // SAFETY: as above.
                    let graph =
                        stream.capture(|| unsafe { call.submit_on(stream.handle, &batch(tokens, false)) }.unwrap());
                    assert_eq!(allocated(), before);
                    for example in &examples[1..] {
                        put(example);
                        graph.launch(&stream);
                        stream.wait();
                        assert_eq!(there.output.floats()[..tokens * 256], want(example), "{tokens} tokens, in a graph");
                    }
                }
                // SAFETY: nothing is done with it.
                let why = unsafe { call.submit_on(stream.handle, &batch(most + 1, false)) }.err().unwrap().to_string();
                assert!(why.contains("cuda:0") && why.contains("prepared for 1 to"), "{why}");
                assert!(bank.prepare(0, 2).is_err() && bank.prepare(usize::MAX, 2).is_err());
            }
        }
    }
}

/// More choices than warps of the grouping kernel have at a time.
#[test]
fn prepared_calls_of_many_tokens_have_the_bits_of_works() {
    const TOKENS: usize = 1500;
    for driver in common::drivers("large") {
        driver.enter();
        let backend = driver.compiling().unwrap().build(0).unwrap();
        let bank = load(&backend, &source(Format::Bf16, 32, 32), &[0, 1, 2, 3]).unwrap();
        let call = bank.prepare(TOKENS, 2).unwrap();
        let batch = Batch::new(&driver, TOKENS, 32, 2);
        let example = example(TOKENS, 32, 4);
        batch.put(&example.input, &example.ids, &example.weights);
        let stream = Stream::new(&driver);
        // SAFETY: memory of these sizes, which lives as long as the driver.
        unsafe { call.submit_on(stream.handle, &batch.of(TOKENS, Element::F32, false)) }.unwrap();
        stream.wait();
        assert_eq!(batch.output.floats(), example.run(&bank));
    }
}
