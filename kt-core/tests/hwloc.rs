//! NUMA nodes by hwloc: its own synthetic machines, and this one.
#![cfg(feature = "numa")]

use kt_core::cpu::CpuBackend;
use kt_core::cpu::portable::Portable;
use kt_core::cpu::team::Team;
use kt_core::cpu::tier::Tier;
use kt_core::cpu::topology::Topology;
use kt_core::source::synthetic::SyntheticSource;
use kt_core::testing::Random;
use kt_core::{Batch, Candidate, Format, RuntimeBuilder};

fn portable(_cap: Tier) -> Vec<Candidate> {
    vec![Candidate::new("portable", Ok(CpuBackend::new("portable", Portable)))]
}

#[test]
fn synthetic_machines_of_hwloc_give_the_same_bits() {
    let source = SyntheticSource::builder()
        .hidden(704)
        .intermediate(416)
        .experts(5)
        .top_k(2)
        .layers(1)
        .format(Format::Int4(kt_core::Group::Of(32)))
        .build()
        .unwrap();
    let mut random = Random(6);
    let input: Vec<f32> = (0..9 * 704).map(|_| random.normal()).collect();
    let ids: Vec<i32> = (0..18).map(|_| random.below(5) as i32).collect();
    let mut outputs = Vec::new();
    for (description, nodes, threads) in [
        ("numa:1 core:1 pu:1", 1, 1),
        ("pack:2 [numa(memory=64GB)] l3:1 core:4 pu:2", 2, 8),
        ("pack:2 [numa] l3:2 core:3 pu:1", 2, 12),
        ("pack:2 numa:2 core:3 pu:2", 4, 12),
        ("pack:4 numa:2 core:1 pu:1", 8, 8),
    ] {
        let topology = Topology::synthetic(description).unwrap();
        assert_eq!((topology.nodes().len(), topology.default_threads()), (nodes, threads), "{description}");
        let team = Team::builder().topology(topology).build().unwrap();
        assert_eq!((team.shares().len(), team.threads()), (nodes, threads), "{description}");
        assert!(threads == 1 || team.notes().iter().any(|n| n.contains("synthetic")), "{:?}", team.notes());
        let loaded = RuntimeBuilder::new(portable).team(team).build().unwrap().load(&source).unwrap();
        let mut batch = Batch::new(9, input.clone(), ids.clone(), vec![0.5; 18]).unwrap();
        loaded.layer(0).unwrap().forward(&mut batch).unwrap();
        outputs.push(batch.into_output());
    }
    assert!(outputs.windows(2).all(|w| w[0] == w[1]));
    assert!(Topology::synthetic("pack:2 [nonsense").is_err());
}

#[test]
fn this_machine_is_the_same_by_hwloc_and_by_its_files() {
    let (hwloc, files) = (Topology::detect(), Topology::under("/".as_ref()));
    let cpus = |t: &Topology| t.nodes().iter().map(|n| (n.index, n.cores, n.cpus.len())).collect::<Vec<_>>();
    assert_eq!(cpus(&hwloc), cpus(&files));
    assert_eq!((hwloc.allowed(), hwloc.default_threads()), (files.allowed(), files.default_threads()));
    // Bound by hwloc.
    let cpu = hwloc.allowed()[0];
    let bound = std::thread::spawn(move || {
        hwloc.bind_thread(&[cpu]).unwrap();
        Topology::detect().allowed().to_vec()
    });
    assert_eq!(bound.join().unwrap(), [cpu]);
}
