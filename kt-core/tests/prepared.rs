//! Calls whose memory is prepared: started on one thread, waited for on another, the bits of other calls.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use kt_core::cpu::CpuBackend;
use kt_core::cpu::portable::Portable;
use kt_core::experts::Sums;
use kt_core::placement::{Capacity, LiveOptions, PlacementOptions, Policy};
use kt_core::scheduler;
use kt_core::source::synthetic::SyntheticSource;
use kt_core::testing::{Fault, Random, TestDevice};
use kt_core::work::{Hidden, Spent, Work};
use kt_core::{Batch, Candidate, Experts, Format, LayerExperts, LoadOptions, Prepared, RuntimeBuilder, WeightSource};

const HIDDEN: usize = 96;
const EXPERTS: usize = 6;
const TOP_K: usize = 3;
const MOST: usize = 9;

/// Two layers on these devices, each with room for so many experts.
fn load(devices: &[(&TestDevice, &str, u64)], live: bool) -> Experts {
    let source = SyntheticSource::builder().hidden(HIDDEN).intermediate(64).experts(EXPERTS).top_k(TOP_K).layers(2);
    let source: Arc<dyn WeightSource> = Arc::new(source.format(Format::Bf16).seed(7).build().unwrap());
    let portable = |_| vec![Candidate::new("portable", Ok(CpuBackend::new("portable", Portable)))];
    let builder = RuntimeBuilder::new(portable).threads(2).pass_tokens(64);
    let builder = devices.iter().fold(builder, |b, (d, ..)| b.with_backend((*d).clone()));
    let bytes = |n: u64| Capacity::bytes(n * (3 * HIDDEN * 64 * 2) as u64);
    let devices = devices.iter().map(|(_, name, n)| (name.to_string(), bytes(*n))).collect();
    let placement = PlacementOptions { devices, policy: Policy::Random(5), live, ..Default::default() };
    let options = LoadOptions { placement, ..Default::default() };
    builder.build().unwrap().load_shared(&source, options).unwrap()
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

    fn forward(&self, layer: &LayerExperts) -> Vec<f32> {
        let mut batch = Batch::new(self.n, self.input.clone(), self.ids.clone(), self.weights.clone()).unwrap();
        layer.forward(&mut batch).unwrap();
        batch.into_output()
    }

    fn start(&self, call: &Prepared) -> kt_core::Result<()> {
        call.start(self.n, |input, ids, weights| {
            input.copy_from_slice(&self.input);
            ids.copy_from_slice(&self.ids);
            weights.copy_from_slice(&self.weights);
        })
    }

    /// What the caller's bank gives, computed by the caller.
    fn elsewhere(&self, call: &Prepared, bank: usize) -> Vec<f32> {
        let banks = call.layer().banks().count();
        let share = scheduler::split(&self.ids, &self.weights, TOP_K, &call.homes(), banks).remove(bank);
        let work = Work {
            input: Arc::new(Hidden::F32(self.input.clone())),
            first: 0,
            tokens: self.n,
            hidden: HIDDEN,
            rows: share.rows,
            experts: share.experts,
            output: vec![0.0; self.n * HIDDEN],
            spent: Spent::default(),
        };
        call.layer().banks().nth(bank).unwrap().run(work).unwrap().output
    }

    /// Started here, waited for on another thread.
    fn run(&self, call: &Prepared, bank: Option<usize>) -> Vec<f32> {
        self.start(call).unwrap();
        let elsewhere = bank.map(|bank| self.elsewhere(call, bank));
        let sum = |sums: Sums<'_>| {
            let mut output = sums.before.to_vec();
            let mut add = |part: &[f32]| output.iter_mut().zip(part).for_each(|(o, v)| *o += v);
            assert_eq!(sums.after().len(), call.banks_after());
            elsewhere.iter().for_each(|part| add(part));
            sums.after().for_each(add);
            output
        };
        thread::scope(|scope| scope.spawn(|| call.wait(sum)).join().unwrap()).unwrap()
    }
}

fn device(name: &str) -> TestDevice {
    TestDevice::new(name, 64 << 20).unwrap()
}

#[test]
fn any_placement_and_size_has_the_bits_of_other_calls() {
    let (a, b) = (device("gpu0"), device("gpu1"));
    let mut most_banks = 0;
    for (on_a, on_b) in [(0, 0), (12, 0), (4, 0), (4, 4), (0, 6), (2, 10)] {
        let experts = load(&[(&a, "gpu0", on_a), (&b, "gpu1", on_b)], false);
        let layer = &experts.layers()[0];
        let banks = layer.banks().count();
        most_banks = most_banks.max(banks);
        for bank in (0..banks).map(Some).chain([None]) {
            let call = layer.prepare(MOST, TOP_K, bank).unwrap();
            for n in (1..=MOST).chain([2, 1, 7]) {
                let tokens = Tokens::new(n, n as u64);
                assert_eq!(
                    tokens.run(&call, bank),
                    tokens.forward(layer),
                    "{on_a} {on_b}, {bank:?} elsewhere, {n} tokens"
                );
            }
        }
    }
    assert_eq!(most_banks, 3);
}

#[test]
fn calls_are_counted_as_others() {
    let a = device("gpu0");
    let experts = load(&[(&a, "gpu0", 4)], false);
    let layer = &experts.layers()[0];
    let call = layer.prepare(MOST, TOP_K, Some(1)).unwrap();
    let tokens = Tokens::new(MOST, 4);
    experts.record_trace();
    tokens.forward(layer);
    let (stats, heat, trace) = (experts.stats(), experts.heat_map(), experts.take_trace());
    experts.reset_stats();
    experts.reset_heat_map();
    experts.record_trace();
    tokens.run(&call, Some(1));
    assert_eq!((experts.heat_map(), experts.take_trace()), (heat, trace));
    let [want, got] = [stats, experts.stats()].map(|s| s.layers.into_iter().next().unwrap());
    let numbers = |u: kt_core::stats::Usage| (u.calls, u.tokens, u.rows, u.weight_bytes);
    assert_eq!(numbers(got.usage), numbers(want.usage));
    let numbers = |l: &kt_core::stats::LayerStats| -> Vec<_> {
        l.banks.iter().map(|(name, b)| (name.clone(), b.rows, b.weight_bytes)).collect()
    };
    assert_eq!(numbers(&got), numbers(&want));
    assert!(got.usage.wall >= got.usage.kernels && got.usage.kernels > Duration::ZERO, "{:?}", got.usage);
}

#[test]
fn failures_say_whose_they_are_and_pass() {
    let (a, b) = (device("gpu0"), device("gpu1"));
    let experts = load(&[(&a, "gpu0", 4), (&b, "gpu1", 4)], false);
    let layer = &experts.layers()[0];
    let call = layer.prepare(MOST, TOP_K, Some(2)).unwrap();
    let tokens = Tokens::new(MOST, 4);
    let want = tokens.forward(layer);
    for (fault, word) in [(Fault::Work, "lost the device"), (Fault::Panic, "panicked")] {
        a.fail(fault);
        tokens.start(&call).unwrap();
        let why = call.wait(|_| ()).unwrap_err().to_string();
        assert!(why.contains("gpu0") && why.contains(word), "{why}");
        assert_eq!(tokens.run(&call, Some(2)), want, "after {fault:?}");
    }
    let mut wrong = Tokens::new(2, 4);
    wrong.ids[4] = EXPERTS as i32;
    wrong.start(&call).unwrap();
    let why = call.wait(|_| ()).unwrap_err().to_string();
    assert!(why.contains("topk_ids[1, 1] is 6"), "{why}");
    let why = call.wait(|_| ()).unwrap_err().to_string();
    assert!(why.contains("layer 0 is waited for, and was not started"), "{why}");
    let why = Tokens::new(MOST + 1, 4).start(&call).unwrap_err().to_string();
    assert!(why.contains("prepared for 1 to 9"), "{why}");
    assert!(call.start(0, |_, _, _| ()).is_err());
    // One that is under way: nothing is written into its memory.
    a.hold();
    tokens.start(&call).unwrap();
    while a.busy() == 0 {
        thread::yield_now();
    }
    let mut filled = false;
    let why = call.start(1, |_, _, _| filled = true).unwrap_err().to_string();
    assert!(why.contains("under way") && !filled, "{why}");
    a.release();
    call.wait(|_| ()).unwrap();
    for (n, k, bank) in [(0, 1, None), (1, 0, None), (65, 1, None), (1, EXPERTS + 1, None), (1, 1, Some(3))] {
        assert!(layer.prepare(n, k, bank).is_err(), "{n} {k} {bank:?}");
    }
}

#[test]
fn nobody_has_to_wait() {
    let a = device("gpu0");
    let experts = load(&[(&a, "gpu0", 12)], false);
    let layer = experts.layers()[0].clone();
    let tokens = Tokens::new(MOST, 4);
    let want = tokens.forward(&layer);
    let call = layer.prepare(MOST, TOP_K, None).unwrap();
    a.hold();
    tokens.start(&call).unwrap();
    while a.busy() == 0 {
        thread::yield_now();
    }
    // Its memory is its own, and the experts are too.
    drop((call, experts));
    a.release();
    assert_eq!(tokens.forward(&layer), want);
    // Started many times before anybody comes for it: each takes the place of one that is done.
    let call = layer.prepare(MOST, TOP_K, None).unwrap();
    for seed in 0..20 {
        let tokens = Tokens::new(1 + seed as usize % MOST, seed);
        while tokens.start(&call).is_err() {
            thread::yield_now();
        }
        if seed % 3 == 0 {
            assert_eq!(call.wait(|s| s.before.to_vec()).unwrap(), tokens.forward(&layer));
        }
    }
}

#[test]
fn experts_stay_where_prepared_calls_know_them() {
    let a = device("gpu0");
    let experts = load(&[(&a, "gpu0", 4)], true);
    let mut live = experts.live(LiveOptions { half_life_tokens: 1e9, ..Default::default() }).unwrap();
    let cold: Vec<i32> = (0..EXPERTS as i32).filter(|&e| experts.placement().layers()[0].on[e as usize] == 0).collect();
    let heat = || {
        for layer in experts.layers() {
            let n = 20;
            let ids: Vec<i32> = (0..n * TOP_K).map(|i| cold[i % TOP_K % cold.len()]).collect();
            layer.forward(&mut Batch::new(n, vec![0.5; n * HIDDEN], ids, vec![1.0; n * TOP_K]).unwrap()).unwrap();
        }
    };
    let call = experts.layers()[0].prepare(MOST, TOP_K, Some(1)).unwrap();
    let homes = call.homes();
    heat();
    let swaps = experts.rebalance(&mut live, Duration::from_secs(1)).unwrap();
    assert!(!swaps.is_empty() && swaps.iter().all(|s| s.layer == 1), "{swaps:?}");
    assert_eq!((call.homes(), live.placement().layers()), (homes, experts.placement().layers()));
    assert!(live.report().ended.is_none(), "{}", live.report());
    let tokens = Tokens::new(MOST, 3);
    assert_eq!(tokens.run(&call, Some(1)), tokens.forward(&experts.layers()[0]));
    drop(call);
    let swaps = experts.rebalance(&mut live, Duration::from_secs(1)).unwrap();
    assert!(!swaps.is_empty() && swaps.iter().all(|s| s.layer == 0), "{swaps:?}");
}
