//! Loads with a packed cache: the same bits as without, on any team; what does not fit is told and packed again.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kt::cpu::cache::CacheReport;
use kt::cpu::team::Team;
use kt::cpu::topology::Topology;
use kt::quantize::Requantized;
use kt::source::synthetic::SyntheticSource;
use kt::testing::{Random, teams};
use kt::{Batch, Experts, Format, Group, Runtime, RuntimeBuilder, WeightSource};

const HIDDEN: usize = 512;
const LAYERS: usize = 2;

/// A directory that is removed with its content.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kt-packed-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Dir(path)
    }

    fn files(&self) -> Vec<PathBuf> {
        let mut files: Vec<_> = fs::read_dir(&self.0).into_iter().flatten().map(|e| e.unwrap().path()).collect();
        files.sort();
        files
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn source(formats: [Format; 3], biases: bool) -> SyntheticSource {
    let builder = SyntheticSource::builder().hidden(HIDDEN).intermediate(768).experts(5).top_k(2).layers(LAYERS);
    builder.format(formats).biases(biases).seed(3).build().unwrap()
}

fn output(experts: &Experts) -> Vec<f32> {
    let tokens = 9;
    let mut random = Random(11);
    let ids = (0..tokens * 2).map(|i| (i * 7 % 6) as i32 - 1).collect();
    let weights = (0..tokens * 2).map(|_| random.uniform()).collect();
    let input: Vec<f32> = (0..tokens * HIDDEN).map(|_| random.normal()).collect();
    let mut batch = Batch::new(tokens, input, ids, weights).unwrap();
    let mut all = Vec::new();
    for layer in experts.layers() {
        layer.forward(&mut batch).unwrap();
        all.extend_from_slice(batch.output());
    }
    assert!(all.iter().any(|v| *v != 0.0) && all.iter().all(|v| v.is_finite()));
    all
}

/// Whether experts of this source are packed at all; says so where they are not.
fn is_packed(source: &SyntheticSource) -> bool {
    let packed = kt::runtime().build().unwrap().plan(source).unwrap().packed_bytes() > 0;
    if !packed {
        println!("skipped: this build or this CPU runs such experts in place");
    }
    packed
}

fn report(experts: &Experts) -> CacheReport {
    experts.packed_cache().expect("a cache").clone()
}

/// Threads on a machine of one node, whatever this one is.
fn one_node() -> Arc<Team> {
    Team::builder().topology(Topology::fake(&[2])).threads(2).oversubscribed().build().unwrap()
}

fn with_cache(builder: RuntimeBuilder, dir: &Path) -> Runtime {
    builder.packed_cache(dir).build().unwrap()
}

#[test]
fn a_cached_load_gives_the_same_bits() {
    let one = |format: Format| [format; 3];
    let cases = [
        (one(Format::Bf16), false),
        (one(Format::Int4(Group::Of(32))), true),
        (one(Format::Fp8Block), false),
        // Down in place, if that is asked for, and the rest packed; and all in place.
        ([Format::Q4K, Format::Q4K, Format::Iq3S], false),
        (one(Format::Iq2Xs), false),
        (one(Format::Q6K), false),
    ];
    for ((formats, biases), in_place) in cases.into_iter().flat_map(|case| [(case, false), (case, true)]) {
        let dir = Dir::new(&format!("bits-{}-{}", formats[0], formats[2]));
        let source = source(formats, biases);
        let plain = kt::runtime().team(one_node()).build().unwrap();
        let want = output(&plain.load(&source).unwrap());
        let experts = kt::runtime().team(one_node()).in_place(in_place).build().unwrap().load(&source).unwrap();
        let packed = experts.packed_bytes();
        assert!(experts.packed_cache().is_none());

        let runtime = with_cache(kt::runtime().team(one_node()).in_place(in_place), &dir.0);
        let before = runtime.plan(&source).unwrap();
        let first = runtime.load(&source).unwrap();
        let (layers, empty) =
            (if packed > 0 { LAYERS } else { 0 }, CacheReport { dir: dir.0.clone(), ..Default::default() });
        assert_eq!(report(&first), CacheReport { written_layers: layers, written_bytes: packed, ..empty.clone() });
        assert_eq!((first.packed_bytes(), before.packed_bytes()), (packed, packed));
        assert_eq!(dir.files().len(), layers);
        assert!(output(&first) == want, "{formats:?}");

        let after = runtime.plan(&source).unwrap();
        let second = runtime.load(&source).unwrap();
        assert_eq!(report(&second), CacheReport { mapped_layers: layers, mapped_bytes: packed, ..empty });
        assert_eq!((second.packed_bytes(), after.packed_bytes()), (0, 0));
        // Nothing more than before; loading takes less.
        assert!(after.need_bytes() <= before.need_bytes(), "{after}\n{before}");
        assert_eq!(after.mapped_bytes(), before.mapped_bytes() + packed);
        assert_eq!(after.explain().contains("from the packed cache"), packed > 0);
        assert!(output(&second) == want, "{formats:?}");
        // What is mapped does not need its name.
        drop(dir);
        assert!(output(&second) == want, "{formats:?}");
    }
}

#[test]
fn a_cache_serves_every_team() {
    let source = source([Format::Int8(Group::Row), Format::Int8(Group::Row), Format::Bf16], false);
    if !is_packed(&source) {
        return;
    }
    let teams = teams().unwrap();
    let mut want: Option<Vec<f32>> = None;
    let mut files: Option<Vec<Vec<u8>>> = None;
    for (writer, team) in &teams {
        let dir = Dir::new(&format!("teams-{}", writer.replace(' ', "-")));
        let written = with_cache(kt::runtime().team(team.clone()), &dir.0).load(&source).unwrap();
        assert_eq!((report(&written).written_layers, report(&written).problems.len()), (LAYERS, 0), "{writer}");
        let first = want.get_or_insert_with(|| output(&written));
        assert!(output(&written) == *first, "{writer}");
        // However experts are divided over nodes, the files are the same.
        let content: Vec<Vec<u8>> = dir.files().iter().map(|f| fs::read(f).unwrap()).collect();
        assert!(content == *files.get_or_insert_with(|| content.clone()), "{writer}");
        for (reader, team) in &teams {
            let runtime = with_cache(kt::runtime().team(team.clone()), &dir.0);
            let plan = runtime.plan(&source).unwrap();
            let read = runtime.load(&source).unwrap();
            assert_eq!((report(&read).mapped_layers, report(&read).problems.len()), (LAYERS, 0), "{reader}");
            assert!(output(&read) == *first, "{writer} wrote, {reader} read");
            // Several nodes copy what is theirs; otherwise the map is used.
            let near = team.shares().len() > 1 || team.topology().nodes().len() > 1 && !team.is_lent();
            assert_eq!(read.packed_bytes() > 0, near, "{reader}");
            assert_eq!(plan.packed_bytes(), read.packed_bytes(), "{reader}");
        }
    }
}

#[test]
fn what_does_not_fit_is_told_and_packed_again() {
    let dir = Dir::new("again");
    let source = Arc::new(source([Format::Bf16; 3], false));
    if !is_packed(&source) {
        return;
    }
    let runtime = with_cache(kt::runtime().team(one_node()), &dir.0);
    let want = output(&runtime.load(&*source).unwrap());
    let damaged = &dir.files()[1];
    let good = fs::read(damaged).unwrap();
    let mut bad = good.clone();
    *bad.last_mut().unwrap() ^= 1;
    fs::write(damaged, &bad).unwrap();
    // The plan looks at headers only, and counts the damaged layer as mapped.
    assert_eq!(runtime.plan(&*source).unwrap().packed_bytes(), 0);
    let experts = runtime.load(&*source).unwrap();
    let told = report(&experts);
    assert_eq!((told.mapped_layers, told.written_layers), (1, 1));
    let [problem] = &told.problems[..] else { panic!("{told:?}") };
    assert!(problem.contains("checksum is wrong") && problem.contains("layer-001"), "{problem}");
    assert!(output(&experts) == want && fs::read(damaged).unwrap() == good);

    // Re-encoded experts are others, beside the first; of another seed, others in their place.
    let int8 = Requantized::new(source.clone(), Format::Int8(Group::Row)).unwrap();
    assert_eq!(report(&runtime.load(&int8).unwrap()).written_layers, LAYERS);
    assert_eq!(report(&runtime.load(&int8).unwrap()).mapped_layers, LAYERS);
    assert_eq!(report(&runtime.load(&*source).unwrap()).mapped_layers, LAYERS);
    assert_eq!(dir.files().len(), 2 * LAYERS);
    let other = SyntheticSource::builder().hidden(HIDDEN).intermediate(768).experts(5).top_k(2).layers(LAYERS);
    let other = other.seed(4).build().unwrap();
    let told = report(&runtime.load(&other).unwrap());
    assert_eq!((told.mapped_layers, told.written_layers, told.problems.len()), (0, LAYERS, LAYERS));
    assert!(told.problems[0].contains("the checkpoint has changed since"), "{told:?}");
    assert_eq!(dir.files().len(), 2 * LAYERS);

    // A cache that cannot be written: the load goes on.
    let file = dir.0.join("a-file");
    fs::write(&file, "").unwrap();
    let experts = with_cache(kt::runtime(), &file).load(&*source).unwrap();
    let told = report(&experts);
    assert_eq!((told.written_layers, told.mapped_layers), (0, 0));
    assert!(told.problems.iter().any(|p| p.contains("not written") && p.contains("a-file")), "{told:?}");
    assert!(output(&experts) == want);
}

#[test]
fn two_runtimes_load_and_write_at_once() {
    let dir = Dir::new("at-once");
    let source = source([Format::Int8(Group::Of(32)); 3], false);
    if !is_packed(&source) {
        return;
    }
    let team = Team::builder().threads(1).build().unwrap();
    let want = output(&kt::runtime().team(team).build().unwrap().load(&source).unwrap());
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..4 {
                    let experts = with_cache(kt::runtime().threads(1), &dir.0).load(&source).unwrap();
                    assert!(report(&experts).problems.is_empty(), "{:?}", report(&experts));
                    assert!(output(&experts) == want);
                }
            });
        }
    });
    assert_eq!(dir.files().len(), source.layers().len());
}
