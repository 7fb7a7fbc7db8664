//! How fast a GPU does a layer's experts, beside what its memory moves: calls on a stream, in a graph, as an application's step has them.
//!
//! `cargo bench -p kt-cuda -- [FORMAT,…] [TOKENS,…]`. `KT_NVRTC` names the compiler where the linker does not find it.

#![allow(unsafe_code)] // device pointers

#[path = "../tests/common/mod.rs"]
mod common;

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Batch, Driver, Graph, Memory, Stream};
use kt_core::backend::{Backend, LoadContext, Progress};
use kt_core::cpu::team::Team;
use kt_core::source::synthetic::SyntheticSource;
use kt_core::testing::Random;
use kt_core::{Format, WeightSource};
use kt_cuda::{CudaBackend, DeviceBatch, Element};

/// Qwen3-30B-A3B's.
const HIDDEN: usize = 2048;
const INTERMEDIATE: usize = 768;
const EXPERTS: usize = 128;
const TOP_K: usize = 8;
/// Calls of a graph, each with choices of its own: at one token no expert is in two of them.
const CALLS: usize = EXPERTS / TOP_K;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let formats = match arguments.first() {
        Some(list) => list.split(',').map(|f| f.parse().unwrap_or_else(|e| panic!("{f}: {e}"))).collect(),
        None => ["bf16", "fp8", "int8", "int8-g32", "int4-g32", "int4-g128", "mxfp4", "q8_0", "q4_k", "q6_k"]
            .map(|f| f.parse::<Format>().expect("a format"))
            .to_vec(),
    };
    let tokens: Vec<usize> = match arguments.get(1) {
        Some(list) => list.split(',').map(|n| n.parse().unwrap_or_else(|e| panic!("{n}: {e}"))).collect(),
        None => vec![1, 4, 16, 64, 256, 1024],
    };
    let Some(driver) = common::silicon() else { return };
    driver.enter();
    let gpu = driver.compiling().expect("a compiler").build(0).unwrap_or_else(|e| panic!("{e}"));
    let device = gpu.device().expect("a device");
    let copied = copied(&driver);
    println!(
        "{}, {}: reads {} GB/s by its clocks; a copy moves {:.0} GB/s",
        device.label,
        gpu.tier(),
        device.read_bytes_per_second.map_or("?".into(), |v| format!("{:.0}", v / 1e9)),
        copied / 1e9
    );
    println!("format  tokens  us a call  GB/s of weights  % of the copy  TFLOP/s");
    for format in formats {
        format_at(&driver, &gpu, format, &tokens, copied);
    }
}

/// Bytes a second that a copy within the device reads and writes.
fn copied(driver: &Driver) -> f64 {
    const BYTES: usize = 1 << 30;
    let [from, to] = [(); 2].map(|()| Memory::new(driver, BYTES));
    let stream = Stream::new(driver);
    let graph = stream.capture(|| to.copy("cuMemcpyDtoDAsync_v2", &from, &stream));
    2.0 * BYTES as f64 / seconds(&stream, &graph)
}

/// Seconds of a launch: the least mean of five rounds.
fn seconds(stream: &Stream<'_>, graph: &Graph<'_>) -> f64 {
    let launches = |n: u32| {
        let start = Instant::now();
        (0..n).for_each(|_| graph.launch(stream));
        stream.wait();
        start.elapsed()
    };
    launches(2);
    let one = launches(1).max(Duration::from_micros(1));
    let n = (Duration::from_millis(30).as_nanos() / one.as_nanos()).clamp(2, 1000) as u32;
    (0..5).map(|_| launches(n).as_secs_f64() / f64::from(n)).fold(f64::MAX, f64::min)
}

fn format_at(driver: &Driver, gpu: &CudaBackend, format: Format, tokens: &[usize], copied: f64) {
    let source = SyntheticSource::builder().hidden(HIDDEN).intermediate(INTERMEDIATE).experts(EXPERTS).top_k(TOP_K);
    let source = source.layers(1).format(format).seed(1).build().unwrap_or_else(|e| panic!("{e}"));
    let layer = &source.layers()[0];
    let context = LoadContext {
        team: Team::oversubscribed(std::thread::available_parallelism().map_or(1, |n| n.get())).expect("threads"),
        progress: Arc::<Progress>::default(),
        huge_pages: Default::default(),
        cache: None,
        replaceable: false,
    };
    let all: Vec<u32> = (0..EXPERTS as u32).collect();
    let start = Instant::now();
    let bank = gpu.load_bank(layer, &all, &source, &context).unwrap_or_else(|e| panic!("{e}"));
    let bytes = gpu.probe(layer).expect("it was loaded").packed_bytes as f64 / EXPERTS as f64;
    println!("{format}: loaded {:.2} GB in {:.1} s", bytes * EXPERTS as f64 / 1e9, start.elapsed().as_secs_f64());
    let stream = Stream::new(driver);
    for &tokens in tokens {
        let call = bank.prepare(tokens, TOP_K).unwrap_or_else(|e| panic!("{e}"));
        let mut random = Random(tokens as u64);
        let batch = Batch::new(driver, tokens, HIDDEN, TOP_K);
        batch.input.put(&(0..tokens * HIDDEN).map(|_| random.normal()).collect::<Vec<f32>>());
        batch.weights.put(&vec![1.0f32 / TOP_K as f32; tokens * TOP_K]);
        let mut read = 0;
        let choices: Vec<Memory> = (0..CALLS)
            .map(|call| {
                let ids: Vec<i32> = (0..tokens)
                    .flat_map(|token| chosen(&mut random, if token == 0 { Some(call * TOP_K) } else { None }))
                    .collect();
                let mut used: Vec<i32> = ids.clone();
                used.sort_unstable();
                used.dedup();
                read += used.len();
                let memory = Memory::new(driver, tokens * TOP_K * 4);
                memory.put(&ids);
                memory
            })
            .collect();
        let graph = stream.capture(|| {
            for ids in &choices {
                let batch = DeviceBatch { topk_ids: ids.address(), ..batch.of(tokens, Element::F32, false) };
                // SAFETY: memory of these sizes, which is never freed.
                unsafe { call.submit_on(stream.handle, &batch) }.unwrap_or_else(|e| panic!("{e}"));
            }
        });
        let seconds = seconds(&stream, &graph) / CALLS as f64;
        let read = read as f64 / CALLS as f64 * bytes / seconds;
        let flops = (tokens * TOP_K * 3 * HIDDEN * INTERMEDIATE * 2) as f64 / seconds;
        println!(
            "{format}  {tokens}  {:.1}  {:.0}  {:.0}  {:.1}",
            seconds * 1e6,
            read / 1e9,
            100.0 * read / copied,
            flops / 1e12
        );
        let wrong = batch.output.floats().iter().filter(|v| !v.is_finite()).count();
        assert_eq!(wrong, 0, "outputs that are no numbers");
        drop(graph);
        for memory in choices.iter().chain([&batch.input, &batch.ids, &batch.weights, &batch.output]) {
            driver.driver("cuMemFree_v2", [ptr::without_provenance_mut::<c_void>(memory.address() as usize)]);
        }
    }
}

/// Different experts: those from `first` on, or any.
fn chosen(random: &mut Random, first: Option<usize>) -> Vec<i32> {
    if let Some(first) = first {
        return (first..first + TOP_K).map(|e| e as i32).collect();
    }
    let mut ids: Vec<i32> = Vec::with_capacity(TOP_K);
    while ids.len() < TOP_K {
        let id = random.below(EXPERTS) as i32;
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    ids
}
