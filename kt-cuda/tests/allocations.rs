//! Launches of a hybrid layer allocate nothing on the host, on any thread, nor on the device: counted by the program's own allocator, so
//! the file holds one test. What the driver driver takes for itself is not the program's.

#![allow(unsafe_code)] // device pointers

mod common;

use std::sync::Arc;

use common::{Memory, Stream};
use kt_core::backend::Backend;
use kt_core::cpu::CpuBackend;
use kt_core::cpu::portable::Portable;
use kt_core::placement::{Capacity, PlacementOptions, Policy};
use kt_core::source::synthetic::SyntheticSource;
use kt_core::testing::{Counting, Random};
use kt_core::{Candidate, Format, LoadOptions, RuntimeBuilder, WeightSource};
use kt_cuda::{DeviceBatch, Element};

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

const HIDDEN: usize = 64;
const EXPERTS: usize = 6;
const TOP_K: usize = 3;
const MOST: usize = 7;

#[test]
fn launches_allocate_nothing() {
    for driver in common::drivers("allocations") {
        driver.enter();
        let gpu = driver.backend();
        let source = SyntheticSource::builder().hidden(HIDDEN).intermediate(96).experts(EXPERTS).top_k(TOP_K).layers(2);
        let source: Arc<dyn WeightSource> = Arc::new(source.format(Format::Bf16).seed(7).build().unwrap());
        let portable = |_| vec![Candidate::new("portable", Ok(CpuBackend::new("portable", Portable)))];
        let runtime = RuntimeBuilder::new(portable).threads(2).with_backend(gpu.clone()).build().unwrap();
        let half = gpu.probe(&source.layers()[0]).unwrap().packed_bytes;
        let devices = vec![("cuda:0".to_string(), Capacity::bytes(half))];
        let placement = PlacementOptions { devices, policy: Policy::Random(5), ..Default::default() };
        let experts = runtime.load_shared(&source, LoadOptions { placement, ..Default::default() }).unwrap();
        assert!(experts.layers().iter().all(|l| l.backends().count() == 2), "host and device in both layers");
        let calls = [0, 1].map(|i| gpu.prepare(&experts.layers()[i], MOST, TOP_K).unwrap());
        let [input, middle, output] = [(); 3].map(|()| Memory::new(&driver, MOST * HIDDEN * 4));
        let [ids, weights] = [(); 2].map(|()| Memory::new(&driver, MOST * TOP_K * 4));
        let batch = |tokens: usize, from: &Memory, to: &Memory, add: bool| DeviceBatch {
            tokens,
            input: from.address(),
            element: Element::F32,
            topk_ids: ids.address(),
            topk_weights: weights.address(),
            output: to.address(),
            add,
        };
        let stream = Stream::new(&driver);
        let submit = |tokens: usize| {
            // SAFETY: memory of these sizes, which lives as long as the driver; calls are one after the other on their stream.
            unsafe { calls[0].submit_on(stream.handle, &batch(tokens, &input, &middle, false)) }.unwrap();
            // SAFETY: as above.
            unsafe { calls[1].submit_on(stream.handle, &batch(tokens, &middle, &output, true)) }.unwrap();
        };
        let graphs: Vec<_> = (1..=MOST).map(|n| stream.capture(|| submit(n))).collect();
        let mut random = Random(3);
        let (mut numbers, mut chosen, mut shares) = ([0f32; MOST * HIDDEN], [0i32; MOST * TOP_K], [0f32; MOST * TOP_K]);
        let (host, device) = (ALLOCATOR.allocations(), driver.calls("cuMemAlloc_v2"));
        let mut counted = [host; 25];
        for round in 0..24 {
            numbers.iter_mut().for_each(|v| *v = random.normal());
            chosen.iter_mut().for_each(|v| *v = random.below(EXPERTS + 1) as i32 - 1);
            shares.iter_mut().for_each(|v| *v = random.uniform());
            input.put(&numbers);
            output.put(&numbers);
            ids.put(&chosen);
            weights.put(&shares);
            let tokens = 1 + round % MOST;
            match round % 3 {
                0 => submit(tokens),
                _ => graphs[tokens - 1].launch(&stream),
            }
            stream.wait();
            calls.iter().for_each(|call| call.check().unwrap());
            counted[round + 1] = ALLOCATOR.allocations();
        }
        // The first launch and wait may be the first of their threads.
        assert_eq!(counted[24], counted[1], "allocations on the host, after each of 24 rounds: {counted:?}");
        assert_eq!(driver.calls("cuMemAlloc_v2"), device);
        assert!(output.floats().iter().all(|v| v.is_finite()));
        let before = ALLOCATOR.allocations();
        let one = std::hint::black_box(Box::new(numbers));
        assert_eq!(ALLOCATOR.allocations(), before + 1, "the counter counts, {}", one.len());
    }
}
