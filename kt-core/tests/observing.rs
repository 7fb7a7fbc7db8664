//! Statistics and heat maps of batches whose every number is known.

use std::collections::BTreeSet;
use std::time::Duration;

use kt_core::cpu::CpuBackend;
use kt_core::cpu::portable::Portable;
use kt_core::cpu::tier::Tier;
use kt_core::source::synthetic::SyntheticSource;
use kt_core::testing::Random;
use kt_core::{Batch, Candidate, Experts, Format, HeatMap, RuntimeBuilder, WeightSource};

const HIDDEN: usize = 256;
const EXPERTS: usize = 6;

fn portable(_: Tier) -> Vec<Candidate> {
    vec![Candidate::new("portable", Ok(CpuBackend::new("portable", Portable)))]
}

fn source() -> SyntheticSource {
    let builder = SyntheticSource::builder().hidden(HIDDEN).intermediate(128).experts(EXPERTS).top_k(2).layers(3);
    builder.format(Format::Q4_0).build().unwrap()
}

fn load(threads: usize, pass_tokens: usize) -> Experts {
    let runtime = RuntimeBuilder::new(portable).threads(threads).pass_tokens(pass_tokens).build().unwrap();
    runtime.load(&source()).unwrap()
}

fn batch(tokens: usize, ids: &[i32]) -> Batch {
    let mut random = Random(tokens as u64);
    let input: Vec<f32> = (0..tokens * HIDDEN).map(|_| random.normal()).collect();
    Batch::new(tokens, input, ids.to_vec(), vec![0.5; ids.len()]).unwrap()
}

fn counts(map: &HeatMap, layer: usize) -> Vec<u64> {
    (0..EXPERTS).map(|e| map.count(layer, e)).collect()
}

#[test]
fn counts_are_exact() {
    let experts = load(2, 1024);
    let expert_bytes = source().layers()[0].expert_bytes();
    let layer = experts.layer(1).unwrap();
    // Expert 0 twice by one token, a token with one expert, one with none.
    layer.forward(&mut batch(4, &[0, 0, 5, -1, -1, -1, 2, 5])).unwrap();
    assert_eq!(counts(&experts.heat_map(), 1), [2, 0, 1, 0, 0, 2]);
    let usage = experts.stats().layers[1].usage;
    assert_eq!((usage.calls, usage.tokens, usage.rows, usage.weight_bytes), (1, 4, 5, 3 * expert_bytes));

    layer.submit(batch(1, &[3, 5])).wait().unwrap();
    layer.forward(&mut batch(0, &[])).unwrap();
    experts.layer(2).unwrap().forward(&mut batch(1, &[1, -1])).unwrap();
    let map = experts.heat_map();
    assert_eq!(counts(&map, 0), [0; EXPERTS]);
    assert_eq!(counts(&map, 1), [2, 0, 1, 1, 0, 3]);
    assert_eq!(counts(&map, 2), [0, 1, 0, 0, 0, 0]);
    assert_eq!(map.layers().iter().map(|l| (l.layer, l.tokens)).collect::<Vec<_>>(), [(0, 0), (1, 5), (2, 1)]);
    let total = experts.stats().total();
    assert_eq!((total.calls, total.tokens, total.rows, total.weight_bytes), (4, 6, 8, 6 * expert_bytes));

    // What is refused is not counted.
    assert!(layer.forward(&mut batch(1, &[0, 6])).is_err());
    assert!(layer.submit(batch(1, &[0, 6])).wait().is_err());
    assert_eq!((experts.heat_map(), experts.stats().total()), (map.clone(), total));

    experts.reset_stats();
    assert_eq!((experts.heat_map(), experts.stats().total()), (map, Default::default()));
    experts.layer(0).unwrap().forward(&mut batch(1, &[1, 2])).unwrap();
    experts.reset_heat_map();
    assert_eq!((experts.heat_map().total(), experts.heat_map().tokens(), experts.stats().total().rows), (0, 0, 2));
}

#[test]
fn passes_read_weights_anew_and_count_rows_once() {
    let (tokens, pass) = (23, 5);
    let ids: Vec<i32> = (0..tokens * 2).map(|i| (i * i * 7 % 11) as i32 - 1).map(|id| id.min(5)).collect();
    let experts = load(1, pass);
    experts.layer(0).unwrap().forward(&mut batch(tokens, &ids)).unwrap();
    let mut expected = [0u64; EXPERTS];
    ids.iter().filter(|&&id| id >= 0).for_each(|&id| expected[id as usize] += 1);
    let used = |ids: &[i32]| ids.iter().filter(|&&id| id >= 0).collect::<BTreeSet<_>>().len() as u64;
    let readings: u64 = ids.chunks(pass * 2).map(used).sum();
    assert!(readings > used(&ids), "the test must see an expert in two passes");
    let map = experts.heat_map();
    assert_eq!((&counts(&map, 0)[..], map.tokens()), (&expected[..], tokens as u64));
    let usage = experts.stats().layers[0].usage;
    let expected = (1, tokens as u64, expected.iter().sum(), readings * source().layers()[0].expert_bytes());
    assert_eq!((usage.calls, usage.tokens, usage.rows, usage.weight_bytes), expected);
}

#[test]
fn the_parts_of_the_time_fit_into_it() {
    for threads in [1, 2] {
        let experts = load(threads, 1024);
        for tokens in [1, 2, 3, 40] {
            let ids: Vec<i32> = (0..tokens * 2).map(|i| (i % EXPERTS) as i32).collect();
            experts.layer(0).unwrap().forward(&mut batch(tokens, &ids)).unwrap();
            experts.layer(1).unwrap().submit(batch(tokens, &ids)).wait().unwrap();
        }
        for l in &experts.stats().layers[..2] {
            let usage = l.usage;
            assert!(usage.kernels > Duration::ZERO && usage.kernels + usage.waiting <= usage.wall, "{usage:?}");
            assert!(threads > 1 || usage.waiting == Duration::ZERO, "{usage:?}");
            assert!(usage.gb_per_s() > 0.0);
        }
        assert_eq!(experts.stats().layers[2].usage, Default::default());
    }
}
