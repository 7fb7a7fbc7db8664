//! The same bits, whatever threads compute: any number of them, on any number of NUMA nodes, of the runtime or of the application.

use std::sync::Arc;

use kt::cpu::team::Team;
use kt::cpu::topology::Topology;
use kt::source::synthetic::SyntheticSource;
use kt::{Batch, Error, Format, Group};
use kt_core::testing::{Random, teams};

const FORMATS: [Format; 8] = [
    Format::F16,
    Format::Bf16,
    Format::Fp8Block,
    Format::Int8(Group::Row),
    Format::Int4(Group::Of(32)),
    Format::Mxfp4,
    Format::Q8_0,
    Format::Iq3S,
];

#[test]
fn random_shapes_give_the_same_bits_on_every_team() {
    let teams = teams().unwrap();
    let mut random = Random(2);
    for case in 0..16 {
        let format = FORMATS[case % FORMATS.len()];
        // Blocks of Q8_0 and IQ3_S, and groups of INT4, divide rows.
        let unit = if format == Format::Iq3S { 256 } else { 32 };
        let (hidden, intermediate) = (unit * (1 + random.below(640 / unit)), unit * (1 + random.below(640 / unit)));
        let (experts, tokens) = (1 + random.below(9), 1 + random.below(30));
        let top_k = 1 + random.below(experts.min(3));
        let source = SyntheticSource::builder()
            .hidden(hidden)
            .intermediate(intermediate)
            .experts(experts)
            .top_k(top_k)
            .layers(1)
            .format(format)
            .seed(case as u64)
            .build()
            .unwrap();
        let input: Vec<f32> = (0..tokens * hidden).map(|_| random.normal()).collect();
        let ids: Vec<i32> = (0..tokens * top_k).map(|_| random.below(experts) as i32).collect();
        let weights: Vec<f32> = ids.iter().map(|_| random.uniform()).collect();
        let mut first: Option<Vec<f32>> = None;
        for (name, team) in &teams {
            // The first team has packed weights; where they are changes nothing either.
            let runtime = kt::runtime().team(team.clone()).in_place(first.is_some() && case % 2 == 0).build().unwrap();
            let loaded = runtime.load(&source).unwrap();
            let mut batch = Batch::new(tokens, input.clone(), ids.clone(), weights.clone()).unwrap();
            loaded.layer(0).unwrap().forward(&mut batch).unwrap();
            let output = batch.into_output();
            assert!(output.iter().any(|v| *v != 0.0));
            match &first {
                None => first = Some(output),
                Some(first) => assert!(
                    output == *first,
                    "{format} {hidden}x{intermediate}, {experts} experts, {tokens} tokens: {name} give other bits than {}",
                    teams[0].0
                ),
            }
            let placed = loaded.residence();
            let packed: u64 = placed.iter().map(|r| r.bytes).sum();
            assert_eq!(packed, loaded.packed_bytes());
            let plan = runtime.plan(&source).unwrap();
            assert_eq!(plan.nodes.len(), team.shares().len());
            if team.shares().len() > 1 {
                let planned: u64 = plan.nodes.iter().map(|n| n.1).sum();
                assert!(planned <= plan.packed_bytes() && planned + 8 > plan.packed_bytes(), "{:?}", plan.nodes);
                assert!(plan.explain().contains("note: the thread that calls a layer"), "{}", plan.explain());
            }
            // Nothing is bound to nodes that this machine does not have, and the load says so.
            if team.shares().len() > 1 && packed > 0 {
                assert!(
                    placed.iter().all(|r| r.is_astray() && r.to_string().contains("not bound: the topology")),
                    "{name}: {placed:?}"
                );
            }
        }
    }
}

/// Machines as the files of their systems tell of them: uneven cores, a node without memory, a node that a cpuset cuts.
#[test]
fn lopsided_machines_give_the_same_bits() {
    let root = std::env::temp_dir().join(format!("kt-teams-{}", std::process::id()));
    let machine = |name: &str, allowed: &str, nodes: &[(&str, &str)]| {
        let root = root.join(name);
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("proc/self/status", &format!("Cpus_allowed_list:\t{allowed}\n"));
        write("sys/devices/system/cpu/online", "0-7\n");
        for (node, (cpus, kib)) in nodes.iter().enumerate() {
            write(&format!("sys/devices/system/node/node{node}/cpulist"), cpus);
            write(&format!("sys/devices/system/node/node{node}/meminfo"), &format!("Node {node} MemTotal: {kib} kB"));
        }
        Topology::under(&root)
    };
    let machines = [
        (machine("one", "0", &[("0-7", "1024")]), vec![1]),
        (machine("uneven", "0-7", &[("0-4", "1024"), ("5-6", "1024"), ("7", "1024")]), vec![5, 2, 1]),
        (machine("no-memory", "0-7", &[("0-3", "1024"), ("4-7", "0")]), vec![8]),
        (machine("three-and-none", "0-7", &[("0-1", "1024"), ("2-3", "0"), ("4-7", "1024")]), vec![4, 4]),
        (machine("cut", "0,4-7", &[("0-3", "1024"), ("4-7", "1024")]), vec![1, 4]),
    ];
    std::fs::remove_dir_all(&root).unwrap();
    let builder = SyntheticSource::builder().hidden(416).intermediate(704).experts(6).top_k(2).layers(1);
    let source = builder.format(Format::Int4(Group::Of(32))).build().unwrap();
    let input: Vec<f32> = (0..11 * 416).map(|i| (i as f32 * 0.61).sin()).collect();
    let ids: Vec<i32> = (0..22).map(|i| i * 5 % 6).collect();
    let mut outputs = Vec::new();
    for (topology, threads) in machines {
        let team = Team::builder().topology(topology).build().unwrap();
        assert_eq!(team.shares().iter().map(|s| s.threads).collect::<Vec<_>>(), threads, "{:?}", team.shares());
        let experts = kt::runtime().team(team).build().unwrap().load(&source).unwrap();
        let mut batch = Batch::new(11, input.clone(), ids.clone(), vec![0.5; 22]).unwrap();
        experts.layer(0).unwrap().forward(&mut batch).unwrap();
        outputs.push(batch.into_output());
    }
    assert!(outputs.windows(2).all(|w| w[0] == w[1]));
}

#[test]
fn dense_matrices_give_the_same_bits_on_every_team() {
    let source = SyntheticSource::builder()
        .hidden(96)
        .intermediate(1000)
        .experts(1)
        .top_k(1)
        .layers(1)
        .format(Format::Int8(Group::Row))
        .build()
        .unwrap();
    let matrix = kt::WeightSource::matrix(&source, 0, 0, kt::Proj::Gate).unwrap();
    let mut random = Random(4);
    for n in [1, 7, 300] {
        let x: Vec<f32> = (0..n * 96).map(|_| random.normal()).collect();
        let outputs: Vec<Vec<f32>> = teams()
            .unwrap()
            .into_iter()
            .map(|(_, team)| {
                let linear = kt::runtime().team(team).build().unwrap().linear(&matrix).unwrap();
                let mut y = vec![f32::NAN; n * 1000];
                linear.forward(&x, &mut y).unwrap();
                y
            })
            .collect();
        assert!(outputs.windows(2).all(|w| w[0] == w[1]));
    }
}

#[test]
fn runtimes_share_a_team_and_a_team_has_its_own_number_of_threads() {
    let team = Team::builder().threads(2).build().unwrap();
    let (a, b) = (kt::runtime().team(team.clone()), kt::runtime().team(team.clone()));
    let (a, b) = (a.build().unwrap(), b.build().unwrap());
    assert!(Arc::ptr_eq(a.team(), b.team()) && a.threads() == team.threads());
    let both = kt::runtime().team(team).threads(2).build();
    assert!(matches!(both, Err(Error::Invalid(text)) if text.contains("team")));
}

#[test]
fn nodes_can_be_chosen() {
    let team = Team::builder().topology(Topology::fake(&[2, 2, 4])).nodes(&[0, 2]).threads(6).oversubscribed();
    let team = team.build().unwrap();
    let shares: Vec<_> = team.shares().iter().map(|s| (s.node, s.threads)).collect();
    assert_eq!(shares, [(0, 2), (2, 4)]);
    assert!(team.notes().iter().any(|n| n.contains("node 1: not in the list")), "{:?}", team.notes());
}
