//! Plugins: the conformance suite across the boundary, every refusal, every failure, and no growth.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use kt_core::backend::{Backend, ExpertBank, LoadContext};
use kt_core::cpu::CpuBackend;
use kt_core::cpu::portable::Portable;
use kt_core::cpu::team::Team;
use kt_core::cpu::tier::Tier;
use kt_core::placement::{Capacity, LiveOptions, PlacementOptions, Stream};
use kt_core::plugin::{self, Why};
use kt_core::source::synthetic::SyntheticSource;
use kt_core::testing::{Random, TestDevice, teams};
use kt_core::{
    Batch, Candidate, Error, Format, Group, LayerSpec, LoadOptions, Matrix, Metadata, Progress, Proj, Routing,
    RuntimeBuilder, WeightSource,
};

fn work_dir() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("plugins")
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(output.status.success(), "{command:?}\n{}", String::from_utf8_lossy(&output.stderr));
}

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/plugins")
}

/// A plugin of the crate `tests/plugins`, which is outside of the workspace: `scalar` is its library, the others are examples.
fn plugin(name: &str) -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        run(Command::new(env!("CARGO"))
            .args(["build", "--lib", "--examples", "--manifest-path"])
            .arg(sources().join("Cargo.toml"))
            .arg("--target-dir")
            .arg(work_dir()));
        work_dir().join("debug")
    });
    let file = format!("{}{name}{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    if name == "scalar" { built.join(file) } else { built.join("examples").join(file) }
}

/// A library that keeps to the ABI's types only, made wrong by `--cfg variant`, or by other options of rustc.
fn nonsense(variant: &str, options: &[&str]) -> PathBuf {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let dir = work_dir().join("nonsense");
    static ABI: OnceLock<()> = OnceLock::new();
    ABI.get_or_init(|| {
        std::fs::create_dir_all(&dir).unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kt-plugin-abi/src/lib.rs");
        run(Command::new(&rustc)
            .args(["--edition=2024", "--crate-type=rlib", "--crate-name=kt_plugin_abi", "--out-dir"])
            .arg(&dir)
            .arg(source));
    });
    let out = dir.join(format!("lib{variant}{}", std::env::consts::DLL_SUFFIX));
    run(Command::new(&rustc)
        .args(["--edition=2024", "--crate-type=cdylib", "--crate-name=nonsense", "-A", "unexpected_cfgs"])
        .args(["--cfg", &format!("variant=\"{variant}\"")])
        .args(options)
        .arg("--extern")
        .arg(format!("kt_plugin_abi={}", dir.join("libkt_plugin_abi.rlib").display()))
        .arg("-o")
        .arg(&out)
        .arg(sources().join("nonsense.rs")));
    out
}

fn refusal(path: &Path) -> (Why, String) {
    let refusal = plugin::load(path).unwrap_err();
    let text = refusal.to_string();
    assert!(text.contains(path.to_str().unwrap()), "{text}");
    (refusal.why, text)
}

fn linked(_: Tier) -> Vec<Candidate> {
    vec![Candidate::new("portable", Ok(CpuBackend::new("portable", Portable)))]
}

fn none(_: Tier) -> Vec<Candidate> {
    Vec::new()
}

fn source(format: Format) -> SyntheticSource {
    SyntheticSource::builder()
        .hidden(128)
        .intermediate(256)
        .experts(5)
        .top_k(2)
        .layers(1)
        .format(format)
        .build()
        .unwrap()
}

/// A batch for [`source`].
fn batch(tokens: usize) -> Batch {
    let mut random = Random(11);
    let input: Vec<f32> = (0..tokens * 128).map(|_| random.normal()).collect();
    let ids = (0..tokens * 2).map(|_| random.below(5) as i32).collect();
    let weights = (0..tokens * 2).map(|_| random.uniform()).collect();
    Batch::new(tokens, input, ids, weights).unwrap()
}

/// The conformance suite, across the boundary.
fn suite(name: &str) {
    let plugin = plugin::load(plugin(name)).unwrap();
    assert_eq!((plugin.name(), plugin.version()), (name, (1, 3)));
    assert_eq!(plugin.build(), "kt-test-plugins 0.1.0");
    kt_core::testing::conformance(|tier| plugin.backend(tier));
}

#[test]
fn the_portable_kernel_passes_the_suite_as_a_plugin() {
    suite("portable");
}

#[test]
fn a_kernel_that_packs_passes_the_suite_as_a_plugin() {
    suite("decoded");
}

#[test]
fn the_plugin_of_the_architecture_passes_the_suite() {
    suite("scalar");
}

/// What a run on a device gives: every output, and what was told of it.
fn on_a_device(builder: RuntimeBuilder) -> (Vec<Vec<f32>>, Vec<String>) {
    let source: Arc<dyn WeightSource> = Arc::new(source(Format::Bf16));
    let devices = vec![("device:0".into(), Capacity::bytes(2 * 3 * 128 * 256 * 2))];
    let placement = PlacementOptions { devices, live: true, stream: Stream::From(16), ..Default::default() };
    let options = LoadOptions { placement, ..Default::default() };
    let runtime = builder.threads(2).build().unwrap();
    let plan = runtime.plan_with(&*source, &options).unwrap();
    let experts = runtime.load_shared(&source, options).unwrap();
    let mut told = vec![format!("{:?} {:?}", plan.devices, plan.layers), format!("{:?}", experts.placement())];
    let run = |tokens: usize| {
        let mut batch = batch(tokens);
        experts.layer(0).unwrap().forward(&mut batch).unwrap();
        batch.into_output()
    };
    let mut outputs = vec![run(1), run(7), run(40)];
    // Tokens that take the last two experts only bring those to the device.
    let mut live = experts.live(LiveOptions::default()).unwrap();
    let mut hot = Batch::new(40, vec![0.5; 40 * 128], [3, 4].repeat(40), vec![0.5; 80]).unwrap();
    experts.layer(0).unwrap().forward(&mut hot).unwrap();
    let swaps = experts.rebalance(&mut live, Duration::from_secs(1)).unwrap();
    assert!(!swaps.is_empty());
    told.push(format!("{swaps:?} {:?}", experts.placement()));
    outputs.extend([run(1), run(7), run(40)]);
    (outputs, told)
}

#[test]
fn a_device_is_the_same_linked_and_as_a_plugin() {
    let device = TestDevice::new("device:0", 64 << 20).unwrap();
    let here = on_a_device(RuntimeBuilder::new(linked).with_backend(device.clone()));
    assert!(device.uploads() >= 5 + 2, "streamed, and replaced");
    let there = on_a_device(RuntimeBuilder::new(linked).plugin(plugin("device")));
    assert_eq!(here.1, there.1);
    assert!(here.0 == there.0, "other bits");
}

/// A source whose last expert cannot be read.
struct Torn(SyntheticSource);

impl WeightSource for Torn {
    fn path(&self) -> &Path {
        self.0.path()
    }

    fn layers(&self) -> &[LayerSpec] {
        self.0.layers()
    }

    fn matrix(&self, layer: usize, expert: usize, proj: Proj) -> kt_core::Result<Matrix> {
        match expert {
            4 => Err(Error::tensor("torn.safetensors", "experts.4", "the file ends before it")),
            _ => self.0.matrix(layer, expert, proj),
        }
    }

    fn bias(&self, layer: usize, expert: usize, proj: Proj) -> kt_core::Result<Option<Vec<f32>>> {
        self.0.bias(layer, expert, proj)
    }

    fn tensor_name(&self, layer: usize, expert: usize, proj: Proj) -> (PathBuf, String) {
        self.0.tensor_name(layer, expert, proj)
    }

    fn metadata(&self) -> &Metadata {
        self.0.metadata()
    }

    fn routing(&self, layer: usize) -> Option<Routing> {
        self.0.routing(layer)
    }

    fn tensors(&self) -> Vec<String> {
        self.0.tensors()
    }

    fn tensor(&self, name: &str) -> kt_core::Result<Matrix> {
        self.0.tensor(name)
    }

    fn dense_bytes(&self) -> u64 {
        self.0.dense_bytes()
    }
}

#[test]
fn sources_fail_across_the_boundary_with_their_own_words() {
    let backend = plugin::load(plugin("device")).unwrap().backend(Tier::Amx).unwrap();
    let torn: Arc<dyn WeightSource> = Arc::new(Torn(source(Format::Bf16)));
    let spec = torn.layers()[0].clone();
    let context = LoadContext { replaceable: true, ..context() };
    let bank = backend.load(&spec, &[0, 1], &*torn, &context).unwrap();
    let words = "torn.safetensors: tensor `experts.4`: the file ends before it";
    let is_torn =
        |error: Error| assert!(!matches!(&error, Error::Backend { .. }) && error.to_string() == words, "{error}");
    is_torn(bank.replace(1, 4, &*torn).unwrap_err());
    bank.replace(1, 3, &*torn).unwrap();
    let rows = |expert| kt_core::work::ExpertRows { local: expert, rows: 0..1 };
    is_torn(backend.stream(&spec, &torn, kt_core::Work { experts: vec![rows(4)], ..work() }).wait().unwrap_err());
    let streamed = backend.stream(&spec, &torn, kt_core::Work { experts: vec![rows(3)], ..work() }).wait().unwrap();
    let replaced = bank.run(kt_core::Work { experts: vec![rows(1)], ..work() }).unwrap();
    assert!(streamed.output == replaced.output && streamed.output.iter().any(|v| *v != 0.0));
    // Nobody waits: the work ends by itself, and what it uses with it.
    drop(backend.stream(&spec, &torn, kt_core::Work { experts: vec![rows(3)], ..work() }));
    drop((bank, backend));
}

#[test]
fn plugins_of_the_first_version_have_no_devices() {
    let plugin = plugin::load(nonsense("first", &[])).unwrap();
    assert_eq!(plugin.version(), (1, 0));
    let backend = plugin.backend(Tier::Amx).unwrap();
    assert_eq!(backend.device(), None);
    let layer = &source(Format::Bf16).layers()[0].clone();
    let why = backend.probe_stream(layer).unwrap_err().0;
    assert!(why.contains("nonsense") && why.contains("ABI 1.0") && why.contains("streaming"), "{why}");
    assert!(backend.in_place().is_none() && backend.invariant().is_none());
}

#[test]
fn a_plugin_uses_weights_in_place_for_want_of_memory() {
    // Blocks of 256 columns.
    let source = SyntheticSource::builder().hidden(256).intermediate(256).experts(5).top_k(2).layers(1);
    let source = source.format(Format::Q4K).build().unwrap();
    let run = |builder: RuntimeBuilder| {
        let runtime = builder.plugin(plugin("decoded")).threads(2).pass_tokens(4).build().unwrap();
        let plan = runtime.plan(&source).unwrap();
        let experts = runtime.load(&source).unwrap();
        let mut batch = Batch::new(2, vec![0.5; 512], vec![0, 4, 1, 3], vec![0.5, 0.25, 1.0, 2.0]).unwrap();
        experts.layer(0).unwrap().forward(&mut batch).unwrap();
        (batch.into_output(), experts.packed_bytes(), plan)
    };
    let builder = || RuntimeBuilder::new(none);
    let (want, packed, plan) = run(builder());
    assert!(packed == 5 * 3 * 256 * 256 * 4 && want.iter().any(|&v| v != 0.0));
    let (asked, none, lean) = run(builder().in_place(true));
    assert!(asked == want && none == 0 && lean.layers[0].fit.mapped_bytes == plan.layers[0].stored_bytes, "{lean}");
    assert_eq!((lean.layers[0].backend.as_str(), lean.packed_bytes()), ("decoded", 0));
    let (forced, none, small) = run(builder().memory_limit(plan.need_bytes() - 1));
    assert!(forced == want && none == 0 && small.notes.iter().any(|n| n.contains("want of memory")), "{small}");

    // Null is no such choice, and so is a failure.
    for variant in ["no_choice", "no_device"] {
        let backend = plugin::load(nonsense(variant, &[])).unwrap().backend(Tier::Amx).unwrap();
        assert!(backend.in_place().is_none() && backend.invariant().is_none(), "{variant}");
    }
}

#[test]
fn a_plugin_leaves_its_kernel_for_many_rows_where_numbers_are_not_to_depend_on_their_number() {
    let source = source(Format::Bf16);
    for batch_invariant in [false, true] {
        let builder = RuntimeBuilder::new(none).plugin(plugin("decoded")).threads(2).pass_tokens(4096);
        let runtime = builder.batch_invariant(batch_invariant).build().unwrap();
        let experts = runtime.load(&source).unwrap();
        let run = |tokens: usize| {
            let input: Vec<f32> = (0..tokens * 128).map(|i| (i % 19) as f32 - 9.0).collect();
            let mut batch = Batch::new(tokens, input, [1, 4].repeat(tokens), vec![0.5; 2 * tokens]).unwrap();
            experts.layer(0).unwrap().forward(&mut batch).unwrap();
            batch.into_output()
        };
        // Of five experts a token has two. That plugin gives zeros from 400 rows of each on.
        let (few, many) = (run(999), run(1000));
        assert!(few.iter().any(|&v| v != 0.0));
        assert_eq!(many.iter().all(|&v| v == 0.0), !batch_invariant);
        assert!(!batch_invariant || many.starts_with(&few));
    }
}

#[test]
fn devices_that_cannot_be_are_refused() {
    let why = plugin::load(nonsense("bad_device", &[])).unwrap().backend(Tier::Amx).err().unwrap().0;
    assert!(why.contains("8 bytes free of a device of 7"), "{why}");
    let backend = plugin::load(nonsense("no_device", &[])).unwrap().backend(Tier::Amx).unwrap();
    assert_eq!(backend.device(), None);
    let why = backend.probe_stream(&source(Format::Bf16).layers()[0].clone()).unwrap_err().0;
    assert!(why.contains("is broken") && why.contains("to stream through"), "{why}");
}

#[test]
fn the_plugin_shown_in_the_architecture_is_the_tested_one() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = std::fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
    let code = std::fs::read_to_string(sources().join("src/lib.rs")).unwrap();
    assert!(text.contains(&format!("```rust\n{code}```")), "ARCHITECTURE.md shows other code than tests/plugins has");
}

#[test]
fn a_plugin_has_the_bits_of_the_linked_backend_on_every_team() {
    let path = plugin("portable");
    let formats = [
        Format::Bf16,
        Format::Int4Asym(Group::Of(32)),
        Format::Int8Ordered(Group::Of(32)),
        Format::Nvfp4,
        Format::Fp8Block,
    ];
    for format in formats {
        let source = source(format);
        for (name, team) in teams().unwrap() {
            let run = |builder: RuntimeBuilder| {
                let runtime = builder.team(team.clone()).build().unwrap();
                let experts = runtime.load(&source).unwrap();
                let layer = experts.layer(0).unwrap();
                let (mut waited, mut called) = (batch(19), batch(19));
                layer.forward(&mut called).unwrap();
                waited = layer.submit(waited).wait().unwrap();
                assert_eq!(waited.output(), called.output());
                (called.into_output(), runtime.plan(&source).unwrap().layers)
            };
            let (here, plan) = run(RuntimeBuilder::new(linked));
            let (there, plan_there) = run(RuntimeBuilder::new(none).plugin(&path));
            assert!(here == there, "{format}, {name}: other bits");
            assert_eq!(plan, plan_there);
        }
    }
}

#[test]
fn packed_weights_are_in_memory_of_the_host() {
    let source = source(Format::Bf16);
    let runtime = RuntimeBuilder::new(none).plugin(plugin("decoded")).build().unwrap();
    let plan = runtime.plan(&source).unwrap();
    let experts = runtime.load(&source).unwrap();
    assert_eq!(experts.packed_bytes(), plan.layers[0].fit.packed_bytes);
    let residence = experts.residence();
    assert_eq!(residence.iter().map(|r| r.bytes).sum::<u64>(), experts.packed_bytes());
    assert_eq!(residence.len(), runtime.team().shares().len());
}

#[test]
fn matrices_outside_of_experts() {
    let mut random = Random(3);
    let mut bytes = Vec::new();
    (0..40 * 64).for_each(|_| bytes.extend(half::bf16::from_f32(random.normal()).to_le_bytes()));
    let matrix = Matrix::new(Format::Bf16, 40, 64, Bytes::from(bytes), None).unwrap();
    let x: Vec<f32> = (0..3 * 64).map(|_| random.normal()).collect();
    let run = |builder: RuntimeBuilder| {
        let linear = builder.build().unwrap().linear(&matrix).unwrap();
        let mut y = vec![0.0; 3 * 40];
        linear.forward(&x, &mut y).unwrap();
        y
    };
    let y = run(RuntimeBuilder::new(none).plugin(plugin("portable")));
    assert!(y.iter().any(|v| *v != 0.0));
    assert_eq!(y, run(RuntimeBuilder::new(linked)));
}

#[test]
fn what_is_no_plugin_is_refused_with_path_wanted_and_found() {
    let dir = work_dir().join("refused");
    std::fs::create_dir_all(&dir).unwrap();
    let (why, text) = refusal(&dir.join("absent.so"));
    assert!(matches!(why, Why::Unreadable(_)) && text.contains("wanted a file"), "{text}");
    assert!(matches!(refusal(&dir).0, Why::Unreadable(_)));

    let text_file = dir.join("text.so");
    std::fs::write(&text_file, "not a library").unwrap();
    let (why, text) = refusal(&text_file);
    assert!(matches!(&why, Why::NotALibrary(said) if said.contains("text.so")), "{text}");

    let (why, text) = refusal(&nonsense("no_symbol", &[]));
    assert!(matches!(why, Why::NoSymbol) && text.contains("KT_PLUGIN"), "{text}");
    let (why, text) = refusal(&nonsense("magic", &[]));
    assert!(matches!(why, Why::NotAPlugin { found: 7 }), "{text}");
    let (why, text) = refusal(&nonsense("major", &[]));
    assert!(matches!(why, Why::Version { major: 2, minor: 4 }) && text.contains("1.x, found 2.4"), "{text}");
    let (why, text) = refusal(&nonsense("small", &[]));
    assert!(matches!(why, Why::SmallTable { found: 24 }) && text.contains("24"), "{text}");
    let (why, text) = refusal(&nonsense("abort", &["-Cpanic=abort"]));
    assert!(matches!(why, Why::Aborts), "{text}");
    let (why, text) = refusal(&nonsense("cpu", &[]));
    assert!(matches!(&why, Why::Cpu { missing } if missing.starts_with("avx1024")), "{text}");
    for variant in ["null_table", "null_entry", "null_name", "bad_name", "long_name", "spaces", "unwinds"] {
        let (why, text) = refusal(&nonsense(variant, &[]));
        assert!(matches!(why, Why::Nonsense(_)) && text.contains("wanted") && text.contains("found"), "{text}");
    }
    // Another minor is no reason.
    assert_eq!(plugin::load(nonsense("minor", &[])).unwrap().version(), (1, 4));

    // A builder says the same, as an error.
    let error = RuntimeBuilder::new(linked).plugin(&text_file).build().err().unwrap();
    assert!(matches!(&error, Error::Plugin(r) if r.path == text_file), "{error}");
    assert!(RuntimeBuilder::new(linked).plugin_dir(dir.join("absent")).build().is_err());
}

#[test]
#[cfg(unix)]
fn a_pipe_is_refused_and_nobody_waits_for_it() {
    let dir = std::env::temp_dir().join(format!("kt-plugins-pipe-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let pipe = dir.join("pipe").with_extension(std::env::consts::DLL_EXTENSION);
    run(Command::new("mkfifo").arg(&pipe));
    let link = dir.join("link").with_extension(std::env::consts::DLL_EXTENSION);
    std::os::unix::fs::symlink(&pipe, &link).unwrap();
    let listed = dir.clone();
    let (told, answer) = std::sync::mpsc::channel();
    std::thread::spawn(move || told.send(plugin::list(listed)));
    let found = answer.recv_timeout(std::time::Duration::from_secs(60)).expect("it waits for the pipe").unwrap();
    assert_eq!(found.len(), 2);
    for (found, path) in found.into_iter().zip([link, pipe]) {
        let refusal = found.unwrap_err();
        let text = refusal.to_string();
        assert!(refusal.path == path && text.contains("found: not a plain file"), "{text}");
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
#[cfg(unix)]
fn a_file_without_permission_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    const NAME: &str = "a_file_without_permission_is_refused";
    let dir = std::env::temp_dir().join(format!("kt-plugins-{}", std::process::id()));
    let path = dir.join("locked.so");
    if let Some(path) = std::env::var_os("KT_TEST_LOCKED") {
        let (why, text) = refusal(Path::new(&path));
        assert!(matches!(&why, Why::Unreadable(e) if e.kind() == std::io::ErrorKind::PermissionDenied), "{text}");
        println!("refused");
        return;
    }
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::copy(plugin("portable"), &path).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o000)).unwrap();
    if std::fs::File::open(&path).is_err() {
        assert!(matches!(refusal(&path).0, Why::Unreadable(_)));
    } else {
        // For the superuser everything is permitted: this test once more, as somebody else.
        let test = dir.join("test");
        std::fs::copy(std::env::current_exe().unwrap(), &test).unwrap();
        for p in [&dir, &test] {
            std::fs::set_permissions(p, PermissionsExt::from_mode(0o755)).unwrap();
        }
        let mut other = Command::new(&test);
        other.args(["--exact", NAME, "--nocapture"]).env("KT_TEST_LOCKED", &path).current_dir("/").uid(65534);
        match other.output() {
            Ok(o) => assert!(String::from_utf8_lossy(&o.stdout).contains("refused"), "{o:?}"),
            Err(e) => eprintln!("skipped: this process may neither be refused a file nor become another user: {e}"),
        }
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn two_of_one_name() {
    let (one, other) = (nonsense("one", &[]), nonsense("other", &[]));
    let error = RuntimeBuilder::new(linked).plugin(&one).plugin(&other).build().err().unwrap().to_string();
    assert!(error.contains("libone") && error.contains("libother") && error.contains("`nonsense`"), "{error}");
    // The same one twice is one.
    let twice = RuntimeBuilder::new(linked).plugin(&one).plugin(&one).build().unwrap();
    assert_eq!(twice.candidates().len(), 2);

    // In a directory the first by path counts; the others, and what is no plugin, decline with the reason.
    let dir = work_dir().join("several");
    // An earlier run may have left its own.
    _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::copy(&one, dir.join("a.so")).unwrap();
    std::fs::copy(&other, dir.join("b.so")).unwrap();
    std::fs::write(dir.join("c.so"), "text").unwrap();
    std::fs::write(dir.join("notes.txt"), "not looked at").unwrap();
    let found = plugin::list(&dir).unwrap();
    assert_eq!(found.len(), 3);
    assert_eq!(found[0].as_ref().unwrap().path(), dir.join("a.so"));
    assert!(matches!(&found[1].as_ref().unwrap_err().why, Why::Twice { other, .. } if *other == dir.join("a.so")));
    assert!(matches!(&found[2].as_ref().unwrap_err().why, Why::NotALibrary(_)));
    let runtime = RuntimeBuilder::new(linked).plugin_dir(&dir).build().unwrap();
    let states: Vec<_> = runtime.candidates().iter().map(|c| (c.name.as_str(), c.backend.is_ok())).collect();
    assert_eq!(states, [("nonsense", true), ("b", false), ("c", false), ("portable", true)]);
    let plan = RuntimeBuilder::new(linked).plugin_dir(&dir).backend("portable").build().unwrap();
    assert!(plan.plan(&source(Format::Bf16)).is_ok());
    // What is refused does not hide a backend of its name.
    std::fs::write(dir.join("portable.so"), "text").unwrap();
    let plan = RuntimeBuilder::new(linked).plugin_dir(&dir).backend("portable").build().unwrap();
    assert!(plan.plan(&source(Format::Bf16)).is_ok());
}

/// Loads the one layer of a checkpoint, which says that it is number `index`.
fn load_as(
    backend: &dyn Backend,
    index: usize,
    context: &LoadContext,
) -> Result<(LayerSpec, Box<dyn ExpertBank>), String> {
    let source = source(Format::Bf16);
    let spec = LayerSpec { index, ..source.layers()[0].clone() };
    let bank = backend.load(&spec, &[0, 1, 2, 3, 4], &source, context).map_err(|e| e.to_string())?;
    Ok((spec, bank))
}

fn context() -> LoadContext {
    LoadContext {
        team: Team::oversubscribed(3).unwrap(),
        progress: Arc::<Progress>::default(),
        huge_pages: Default::default(),
        cache: None,
        replaceable: false,
    }
}

/// A token on one expert.
fn work() -> kt_core::Work {
    kt_core::Work {
        input: Arc::new(vec![1f32; 128].into()),
        first: 0,
        tokens: 1,
        hidden: 128,
        rows: vec![kt_core::work::Row { token: 0, weight: 1.0 }],
        experts: vec![kt_core::work::ExpertRows { local: 0, rows: 0..1 }],
        output: vec![0.5; 128],
        spent: Default::default(),
    }
}

fn matrix(rows: usize) -> Matrix {
    Matrix::new(Format::F32, rows, 4, Bytes::from(vec![0; rows * 16]), None).unwrap()
}

#[test]
fn a_panic_in_any_function_is_an_error() {
    let plugin = plugin::load(plugin("panics")).unwrap();
    let constructor = plugin.backend(Tier::Portable).err().unwrap().to_string();
    assert!(constructor.contains("panicked: in the constructor"), "{constructor}");
    // Which panics again when it is dropped.
    let backend = plugin.backend(Tier::Amx).unwrap();
    let context = context();
    let says = |result: Result<(), String>, what: &str| {
        let text = result.unwrap_err();
        assert!(text.contains("panics") && text.contains(&format!("panicked: in {what}")), "{text}");
    };
    let load = |index| load_as(&backend, index, &context).map(|(_, bank)| bank);
    let run = |index| load(index)?.run(work()).map(|_| ()).map_err(|e| e.to_string());
    let wait = |index| load(index)?.submit(work()).wait().map(|_| ()).map_err(|e| e.to_string());
    assert!(backend.probe(&LayerSpec { index: 1, ..source(Format::Bf16).layers()[0].clone() }).is_err());
    says(load(1).map(|_| ()), "probe");
    says(load(2).map(|_| ()), "load");
    says(run(3), "run");
    says(wait(4), "submit");
    says(wait(5), "wait");
    drop(load(6).unwrap().submit(work()));
    says(load(7).map(|_| ()), "packed_bytes");
    drop(load(8).unwrap());
    // On the host's threads; whose team lives on.
    for _ in 0..3 {
        says(run(9), "task forty");
    }
    let done = std::sync::atomic::AtomicUsize::new(0);
    context.team.region().run(50, |_, _| {
        done.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(done.into_inner(), 50);
    assert_eq!(load(10).unwrap().run(work()).unwrap().output, [0.5; 128]);

    says(backend.probe_linear(Format::F32, 1, 4).map(|_| ()).map_err(|e| e.to_string()), "probe_linear");
    says(backend.linear(&matrix(2), &context).map(|_| ()).map_err(|e| e.to_string()), "linear");
    drop(backend.linear(&matrix(4), &context).unwrap());
    let runtime = RuntimeBuilder::new(none).with_backend(backend).build().unwrap();
    let error = runtime.linear(&matrix(3)).unwrap().forward(&[0.0; 4], &mut [0.0; 3]).unwrap_err().to_string();
    assert!(error.contains("panicked: in forward"), "{error}");
}

#[test]
fn nothing_that_a_plugin_returns_is_trusted() {
    let plugin = plugin::load(nonsense("nonsense", &[])).unwrap();
    let backend = plugin.backend(Tier::Amx).unwrap();
    let context = context();
    let spec = source(Format::Bf16).layers()[0].clone();
    for (index, what) in [
        (1, "rank 4294967295"),
        (2, "18446744073709551615 bytes packed"),
        (3, "it says rank"),
        (4, "no readable tier"),
        (5, "it returned 77"),
        (6, "its message is not readable"),
        (7, "a rounding of inputs"),
        (8, "a rounding of inputs"),
        (9, "no readable description"),
        (10, "bytes of scratch"),
        (11, "bytes mapped"),
        (12, "it gave no reason"),
    ] {
        let text = backend.probe(&LayerSpec { index, ..spec.clone() }).unwrap_err().0;
        assert!(text.contains(what), "{index}: {text}");
        // And it is loaded no more than it is chosen.
        assert!(load_as(&backend, index, &context).is_err());
    }
    for (index, what) in
        [(20, "load reported success and gave null"), (21, "packed 65 bytes, and had announced 64"), (22, "cancelled")]
    {
        let text = load_as(&backend, index, &context).err().unwrap();
        assert!(text.contains(what), "{index}: {text}");
    }
    let bank = |index| load_as(&backend, index, &context).unwrap().1;
    let text = bank(30).run(work()).unwrap_err().to_string();
    assert!(text.contains("it returned 4294967295") && text.contains("nonsense"), "{text}");
    for (index, what) in [(31, "gave null"), (32, "its message is not readable"), (33, "lost it")] {
        let text = bank(index).submit(work()).wait().unwrap_err().to_string();
        assert!(text.contains(what), "{index}: {text}");
    }
    for (rows, what) in [(1, "gave null"), (2, "packed 65 bytes")] {
        let text = backend.linear(&matrix(rows), &context).err().unwrap().to_string();
        assert!(text.contains(what), "{text}");
    }
    let runtime = RuntimeBuilder::new(none).with_backend(backend).build().unwrap();
    let error = runtime.linear(&matrix(3)).unwrap().forward(&[0.0; 4], &mut [0.0; 3]).unwrap_err().to_string();
    assert!(error.contains("it returned 1000"), "{error}");

    let text = plugin::load(nonsense("null_backend", &[])).unwrap().backend(Tier::Amx).err().unwrap().0;
    assert!(text.contains("backend_new reported success and gave null"), "{text}");
    let text = plugin::load(nonsense("declines", &[])).unwrap().backend(Tier::Amx).err().unwrap().0;
    assert_eq!(text, "not on a Saturday");
}

#[test]
fn errors_of_the_checkpoint_and_cancellation_come_through() {
    let plugin = plugin::load(plugin("decoded")).unwrap();
    let backend = plugin.backend(Tier::Amx).unwrap();
    // The source has no layer of this number.
    let text = load_as(&backend, 44, &context()).err().unwrap();
    let here = source(Format::Bf16).matrix(44, 0, kt_core::Proj::Gate).unwrap_err().to_string();
    assert_eq!(text, here);

    let runtime = RuntimeBuilder::new(none).with_backend(backend).build().unwrap();
    let options = LoadOptions::default();
    let progress = options.progress.clone();
    let source = source(Format::Bf16);
    runtime.load_with(&source, options).unwrap();
    assert_eq!(progress.done_bytes(), progress.total_bytes());
    let options = LoadOptions::default();
    options.progress.cancel();
    assert!(matches!(runtime.load_with(&source, options), Err(Error::Cancelled)));
}

/// KiB of this process in memory.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
#[cfg(target_os = "linux")]
fn ten_thousand_rounds_do_not_grow() {
    if std::env::var_os("KT_TEST_ROUNDS").is_none() {
        // Alone in a process, so that no other test is measured.
        let mut alone = Command::new(std::env::current_exe().unwrap());
        run(alone.args(["--exact", "ten_thousand_rounds_do_not_grow"]).env("KT_TEST_ROUNDS", "1"));
        return;
    }
    let source = SyntheticSource::builder()
        .hidden(32)
        .intermediate(32)
        .experts(2)
        .top_k(1)
        .layers(1)
        .format(Format::Int4Asym(Group::Of(32)))
        .build()
        .unwrap();
    let spec = &source.layers()[0];
    let plugin = plugin::load(plugin("decoded")).unwrap();
    let context = LoadContext { team: Team::oversubscribed(2).unwrap(), ..context() };
    let work = || kt_core::Work { input: Arc::new(vec![1f32; 32].into()), hidden: 32, output: vec![0.0; 32], ..work() };
    let round = |n: usize| {
        let backend = plugin.backend(Tier::Amx).unwrap();
        let bank = backend.load(spec, &[0, 1], &source, &context).unwrap();
        let pending = bank.submit(work());
        // Work may outlive bank and backend, and need not be waited for.
        match n % 3 {
            0 => assert!(pending.wait().is_ok()),
            1 => drop(pending),
            _ => {
                drop((bank, backend));
                assert!(pending.wait().is_ok());
            }
        }
    };
    // Work that nobody waited for is queued, with its bank, until the thread that runs it comes: now and then, wait for that.
    let rounds = |rounds: usize| {
        for n in 0..rounds {
            round(n);
            if n % 50 == 49 {
                let (done, come) = std::sync::mpsc::channel();
                drop(context.team.spawn("test", 0, move || done.send(()).map_err(|e| Error::Invalid(e.to_string()))));
                come.recv().unwrap();
            }
        }
    };
    rounds(1000);
    let before = resident_kib();
    rounds(10_000);
    let grown = resident_kib().saturating_sub(before);
    // A leak of 100 bytes a round would be 1000 KiB.
    assert!(grown < 1000, "{grown} KiB more after 10000 rounds");
}

/// `cargo test -p kt-core --test plugins -- --ignored --nocapture`: what a call costs more across the boundary.
#[test]
#[ignore = "a measurement"]
fn the_cost_of_the_boundary() {
    let fastest = |bank: &dyn ExpertBank, hidden: usize, tokens: usize, rounds: usize| {
        let mut work = kt_core::Work {
            input: Arc::new(vec![0.1f32; tokens * hidden].into()),
            tokens,
            hidden,
            rows: (0..tokens as u32).map(|token| kt_core::work::Row { token, weight: 1.0 }).collect(),
            experts: vec![kt_core::work::ExpertRows { local: 0, rows: 0..tokens }],
            output: vec![0.0; tokens * hidden],
            ..self::work()
        };
        let mut times = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            let start = std::time::Instant::now();
            work = bank.run(work).unwrap();
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        times.sort_by(f64::total_cmp);
        (times[0], times[rounds / 2])
    };
    let plugin = plugin::load(plugin("portable")).unwrap();
    let there = plugin.backend(Tier::Amx).unwrap();
    let here = CpuBackend::new("portable", Portable);
    for (hidden, intermediate, tokens, rounds) in [(16, 16, 1, 200_000), (2048, 16, 1, 20_000)] {
        let shape = SyntheticSource::builder().hidden(hidden).intermediate(intermediate).experts(1).top_k(1).layers(1);
        let source = shape.format(Format::F32).build().unwrap();
        for threads in [1, 2] {
            let context = LoadContext { team: Team::oversubscribed(threads).unwrap(), ..context() };
            let load = |backend: &dyn Backend| backend.load(&source.layers()[0], &[0], &source, &context).unwrap();
            let (linked, called) = (load(&here), load(&there));
            let (linked, called) =
                (fastest(&*linked, hidden, tokens, rounds), fastest(&*called, hidden, tokens, rounds));
            println!(
                "{hidden}x{intermediate}, {tokens} tokens, {threads} threads: linked {:.2} us (median {:.2}), plugin {:.2} us \
                 (median {:.2})",
                linked.0, linked.1, called.0, called.1
            );
        }
    }
}
