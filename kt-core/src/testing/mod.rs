//! What a backend is tested against: a naive model, awkward shapes, named bounds, and the conformance suite that a backend
//! joins in one line:
//!
//! ```no_run
//! // in a #[test]; here the portable kernel's backend stands for yours
//! use kt_core::cpu::{CpuBackend, portable::Portable};
//! kt_core::testing::conformance(|_tier| Ok(CpuBackend::new("portable", Portable)));
//! ```
//!
//! Two environment variables switch these tests: `KT_ISA=avx512` caps the tier (that of `kt bench`, too), `KT_REQUIRE=avx512bf16,amx` turns a tier
//! that would be skipped into a failure.

mod allocations;
mod device;
mod naive;
mod packed;
mod products;

use std::sync::Arc;

use crate::activation::Activation;
use crate::backend::{Backend, ExpertBank, Fit, LoadContext, Progress};
use crate::cpu::FEW_TOKENS;
use crate::cpu::input::InputLayout;
use crate::cpu::kernel::Kernel;
use crate::cpu::memory::AlignedBytes;
use crate::cpu::team::Team;
use crate::cpu::tier::Tier;
use crate::cpu::topology::Topology;
use crate::error::Unsupported;
use crate::format::{ALL, Format};
use crate::layer::Proj;
use crate::scheduler::{self, Home};
use crate::source::WeightSource;
use crate::source::synthetic::{SyntheticBuilder, SyntheticSource};
use crate::work::{Hidden, Spent, Work};

pub use allocations::{Counting, prepared_calls_allocate_nothing};
pub use device::{Fault, TestDevice};
pub use naive::Naive;
pub use packed::{Rows, layouts, packs_as_known, product, weights};
pub use products::Products;

/// Deterministic random numbers (splitmix64): for test data, not for statistics.
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n.max(1) as u64) as usize
    }

    /// Uniform in 0..1.
    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// About normal: mean 0, deviation 1.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum::<f32>() - 6.0
    }
}

/// (hidden, intermediate, experts): one below, at and above tiles and blocks, and what real models have.
pub const SHAPES: [(usize, usize, usize); 6] =
    [(256, 256, 4), (96, 160, 3), (704, 96, 2), (128, 1408, 2), (2880, 64, 1), (1024, 768, 5)];

/// Largest allowed mean |difference| / mean |reference| over a whole MoE block, from how inputs are rounded.
///
/// F32 sums in another order than the reference: 1e-5. BF16 keeps 8 bits: 0.2 % per input, three products. int8 with a scale
/// per 32 rounds by about 0.5 % of the input's deviation, with one per 128 by 0.6 % and more where gate x up has outliers.
pub fn bound(fit: &Fit) -> f64 {
    fit.inputs
        .iter()
        .map(|layout| match layout {
            InputLayout::F32 => 1e-5,
            InputLayout::Bf16 => 0.005,
            InputLayout::Int8 { group, .. } if *group <= 32 => 0.012,
            InputLayout::Int8 { .. } => 0.02,
            InputLayout::Int8Words { .. } => 0.012,
        })
        .fold(0.0, f64::max)
}

/// The tiers to test: those this CPU has, up to `KT_ISA`. Says which are skipped, and fails for those in `KT_REQUIRE`.
pub fn tiers() -> Vec<Tier> {
    let cap = match std::env::var("KT_ISA") {
        Ok(name) if !name.is_empty() => name.parse().unwrap_or_else(|e| panic!("KT_ISA: {e}")),
        _ => Tier::Amx,
    };
    let required = std::env::var("KT_REQUIRE").unwrap_or_default();
    for tier in Tier::ALL {
        let missing = tier.missing();
        if !missing.is_empty() {
            let text = format!("tier {tier}: this CPU lacks {}", missing.join(", "));
            assert!(!required.split(',').any(|r| r == tier.name()), "{text}, but KT_REQUIRE names it");
            eprintln!("skipped {text}");
        } else if tier > cap {
            eprintln!("skipped tier {tier}: above KT_ISA={cap}");
        }
    }
    Tier::all_available(cap)
}

/// Routings that have broken kernels before: name, tokens, top_k, ids.
fn routings(experts: usize, many_rows: bool, random: &mut Random) -> Vec<(&'static str, usize, usize, Vec<i32>)> {
    let mut any = |n: usize| -> Vec<i32> { (0..n).map(|_| random.below(experts) as i32).collect() };
    let mut cases = vec![
        ("no token", 0, 2, vec![]),
        ("one token", 1, 2, any(2)),
        ("an expert chosen twice", 1, 2, vec![0, 0]),
        ("a token without experts", 2, 2, vec![-1, -1, 0, -1]),
        ("seven tokens", 7, 2, any(14)),
        ("all tokens on one expert", 33, 1, vec![experts as i32 - 1; 33]),
    ];
    if many_rows {
        cases.push(("more rows than a task takes", 261, 1, vec![0; 261]));
    }
    cases
}

/// How far one or two tokens may lie above the mean error of many: int8 rounding of groups of 32 gives 0.011 on average and
/// up to 0.0137 for a single token of normal data (measured in f64, without any kernel).
const SCATTER: f64 = 1.35;

struct Case<'a> {
    bank: &'a dyn ExpertBank,
    naive: &'a Naive,
    experts: usize,
    bound: f64,
    many_rows: bool,
}

fn work(
    input: &Hidden,
    tokens: usize,
    hidden: usize,
    ids: &[i32],
    weights: &[f32],
    top_k: usize,
    experts: usize,
) -> Work {
    let homes: Vec<Home> = (0..experts as u32).map(|local| Home { bank: 0, local }).collect();
    let share = scheduler::split(ids, weights, top_k, &homes, 1).remove(0);
    Work {
        input: Arc::new(input.clone()),
        first: 0,
        tokens,
        hidden,
        rows: share.rows,
        experts: share.experts,
        output: vec![0.0; tokens * hidden],
        spent: Spent::default(),
    }
}

impl Case<'_> {
    /// Runs every routing, some with BF16 inputs too; collects what is wrong. The bound holds for all tokens together; the few
    /// tokens of one routing scatter around the mean, so each alone is held to [`SCATTER`] times the bound.
    fn check(&self, label: &str, failures: &mut Vec<String>) {
        let hidden = self.naive.hidden();
        let (mut all_want, mut all_got) = (Vec::new(), Vec::new());
        let mut random = Random(7);
        for (name, tokens, top_k, ids) in routings(self.experts, self.many_rows, &mut random) {
            let values: Vec<f32> = (0..tokens * hidden).map(|_| random.normal()).collect();
            let narrow: Vec<half::bf16> = values.iter().map(|&v| half::bf16::from_f32(v)).collect();
            let weights: Vec<f32> = ids.iter().map(|_| random.uniform()).collect();
            let inputs = [Some(Hidden::F32(values)), (tokens < 8).then_some(Hidden::Bf16(narrow))];
            for input in inputs.into_iter().flatten() {
                let got =
                    match self.bank.submit(work(&input, tokens, hidden, &ids, &weights, top_k, self.experts)).wait() {
                        Ok(work) => work.output,
                        Err(e) => {
                            failures.push(format!("{label}, {name}: {e}"));
                            continue;
                        }
                    };
                let want = self.naive.forward(&input, tokens, &ids, &weights, top_k);
                let (error, bound) = (mean_error(&want, &got), self.bound * SCATTER);
                if error.is_nan() || error > bound {
                    failures.push(format!("{label}, {name}: error {error:.6}, bound {bound}"));
                }
                all_want.extend(want);
                all_got.extend(got);
            }
        }
        let error = mean_error(&all_want, &all_got);
        if error.is_nan() || error > self.bound {
            failures.push(format!("{label}, all tokens: error {error:.6}, bound {}", self.bound));
        }
    }

    /// A token with a NaN or an infinity is NaN; its neighbours are untouched.
    fn check_poison(&self, label: &str, failures: &mut Vec<String>) {
        let (hidden, tokens) = (self.naive.hidden(), 3);
        let mut random = Random(9);
        let clean: Vec<f32> = (0..tokens * hidden).map(|_| random.normal()).collect();
        let ids = vec![0; tokens];
        let weights = vec![1.0; tokens];
        let run = |values: &[f32]| {
            let input = Hidden::F32(values.to_vec());
            self.bank.run(work(&input, tokens, hidden, &ids, &weights, 1, self.experts)).map(|w| w.output)
        };
        for bad in [f32::NAN, f32::INFINITY] {
            let mut values = clean.clone();
            values[hidden + hidden / 2] = bad;
            match (run(&clean), run(&values)) {
                (Ok(a), Ok(b)) => {
                    if a[..hidden] != b[..hidden] || a[2 * hidden..] != b[2 * hidden..] {
                        failures.push(format!("{label}: {bad} in one token changed another"));
                    }
                    if b[hidden..2 * hidden].iter().any(|v| v.is_finite()) {
                        failures.push(format!("{label}: {bad} in a token gave finite outputs"));
                    }
                }
                (Err(e), _) | (_, Err(e)) => failures.push(format!("{label}: {e}")),
            }
        }
    }
}

/// Where the F16 numbers, scales and minima, are in a block of a GGUF format, in bytes: what random blocks must have ordinary numbers in.
pub fn f16_scales_at(format: Format) -> &'static [usize] {
    match format {
        // IQ1_M has its scale in pieces.
        Format::Mxfp4Ggml | Format::Iq1M => &[],
        Format::Q4_1 | Format::Q5_1 | Format::Q4K | Format::Q5K => &[0, 2],
        Format::Q2K => &[80, 82],
        Format::Q3K => &[108],
        Format::Q6K => &[208],
        Format::Tq1_0 => &[52],
        Format::Tq2_0 => &[64],
        _ => &[0],
    }
}

/// Checks that matrices cut at any multiple of [`Kernel::PANEL`] are packed as they are when whole: nodes hold such pieces, and the packed cache puts them
/// together and divides them anew.
///
/// # Panics
/// When a format is packed in another way.
pub fn pieces_pack_as_the_whole<K: Kernel>(kernel: K) {
    let cols = 512;
    let mut packed = 0;
    for format in ALL {
        // A last piece that is no whole panel, where the format has such shapes.
        let odd = 4 * K::PANEL + 24;
        let rows = if format.row_bytes(odd).is_ok() { odd } else { cols };
        if kernel.accepts(format, rows, cols).is_err() {
            continue;
        }
        let Some(size) = kernel.packed_bytes(format, rows, cols) else { continue };
        let source = SyntheticSource::builder().hidden(cols).intermediate(rows).format(format).build();
        let matrix = source.and_then(|s| s.matrix(0, 0, Proj::Gate)).expect("a shape that every format can have");
        let of = |rows: std::ops::Range<usize>| {
            let bytes = kernel.packed_bytes(format, rows.len(), cols).expect("the format is packed");
            let mut out = AlignedBytes::default();
            kernel.pack(&matrix, rows, out.get(bytes));
            out.read(bytes).to_vec()
        };
        let whole = of(0..rows);
        assert_eq!(whole.len(), size, "{format}");
        for at in (K::PANEL..rows.min(5 * K::PANEL)).step_by(K::PANEL) {
            assert!([of(0..at), of(at..rows)].concat() == whole, "{format}, cut at output {at} of {rows}");
        }
        packed += 1;
    }
    assert!(packed > 0, "the kernel packs no format");
}

/// The conformance suite on a backend as a plugin: the example `plugin_NAME` of the crate that is tested, a `cdylib`, which `cargo test` builds beside the
/// tests unless it is told to build only one of them.
///
/// Says so where the plugin declines this machine; with its backend's name in `KT_REQUIRE` that is a failure.
///
/// # Panics
/// When the plugin is not there, is refused, or fails.
#[cfg(feature = "plugins")]
pub fn plugin_conformance(name: &str) {
    let test = std::env::current_exe().expect("this program has a path");
    let target = test.parent().and_then(std::path::Path::parent).expect("it is in a folder of the target directory");
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let plugin = crate::plugin::load(target.join("examples").join(format!("{prefix}plugin_{name}{suffix}")));
    let plugin =
        plugin.unwrap_or_else(|refusal| panic!("{refusal}; `cargo test` builds it, but not `cargo test --test`"));
    match plugin.backend(Tier::Amx) {
        Ok(_) => conformance(|tier| plugin.backend(tier)),
        Err(why) => {
            let required = std::env::var("KT_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|r| r == plugin.name()), "{why}, but KT_REQUIRE names it");
            println!("skipped: {} as a plugin: {why}", plugin.name());
        }
    }
}

/// mean |difference| / mean |reference|; 0 for empty outputs, infinite when a zero reference is missed.
pub fn mean_error(want: &[f64], got: &[f32]) -> f64 {
    if want.len() != got.len() {
        return f64::INFINITY;
    }
    let difference: f64 = want.iter().zip(got).map(|(w, g)| (w - *g as f64).abs()).sum();
    let reference: f64 = want.iter().map(|w| w.abs()).sum();
    if difference == 0.0 { 0.0 } else { difference / reference }
}

fn load(
    backend: &dyn Backend,
    source: &SyntheticSource,
    experts: &[u32],
    team: &Arc<Team>,
) -> crate::Result<Box<dyn ExpertBank>> {
    let context = LoadContext {
        team: team.clone(),
        progress: Arc::<Progress>::default(),
        huge_pages: Default::default(),
        cache: None,
        replaceable: false,
    };
    backend.load(&source.layers()[0], experts, source, &context)
}

fn synthetic(
    formats: impl Into<[Format; 3]>,
    (hidden, intermediate, experts): (usize, usize, usize),
) -> SyntheticBuilder {
    SyntheticSource::builder()
        .hidden(hidden)
        .intermediate(intermediate)
        .experts(experts)
        .top_k(2.min(experts))
        .layers(1)
        .format(formats)
        .seed(42)
}

/// The conformance suite. For every tier of this CPU, every format and awkward shape that the backend takes: accuracy within
/// [`bound`], NaN contained, the same bits for any number of threads and NUMA nodes, two banks together equal to one, biases and every
/// activation, refusals with a reason.
///
/// # Panics
/// With all failures, collected; or when the backend runs here and takes no format at all.
pub fn conformance<B: Backend>(backend: impl Fn(Tier) -> Result<B, Unsupported>) {
    let team = Team::oversubscribed(2).unwrap_or_else(|e| panic!("{e}"));
    let teams = teams().unwrap_or_else(|e| panic!("{e}"));
    let mut failures = Vec::new();
    let mut last_tier = String::new();
    let (mut built, mut ran) = (false, 0);
    for tier in tiers() {
        let backend = match backend(tier) {
            Ok(b) => b,
            Err(why) => {
                eprintln!("not at {tier}: {why}");
                continue;
            }
        };
        built = true;
        let mut declined = Vec::new();
        let mut label_tier = String::new();
        let mut accepted_formats: Vec<(Format, f64)> = Vec::new();
        for format in ALL {
            let mut accepted = false;
            for shape in SHAPES {
                let (hidden, intermediate, experts) = shape;
                if format.row_bytes(hidden).is_err() || format.row_bytes(intermediate).is_err() {
                    continue;
                }
                let source = match synthetic(format, shape).build() {
                    Ok(s) => s,
                    Err(e) => {
                        failures.push(format!("{format} {shape:?}: synthetic source: {e}"));
                        continue;
                    }
                };
                let fit = match backend.probe(&source.layers()[0]) {
                    Ok(fit) => fit,
                    Err(why) => {
                        if why.0.is_empty() {
                            failures.push(format!("{format}: declined without a reason"));
                        }
                        if !declined.contains(&why.0) {
                            declined.push(why.0);
                        }
                        continue;
                    }
                };
                if fit.tier == last_tier {
                    continue; // a lower tier under another cap: tested already
                }
                (accepted, label_tier) = (true, fit.tier.clone());
                ran += 1;
                let label = format!("{} {} {format} {hidden}x{intermediate}", backend.name(), fit.tier);
                let all: Vec<u32> = (0..experts as u32).collect();
                let bank = match load(&backend, &source, &all, &team) {
                    Ok(bank) => bank,
                    Err(e) => {
                        failures.push(format!("{label}: load: {e}"));
                        continue;
                    }
                };
                if bank.packed_bytes() != fit.packed_bytes {
                    failures.push(format!(
                        "{label}: packed {} bytes, probe said {}",
                        bank.packed_bytes(),
                        fit.packed_bytes
                    ));
                }
                let naive = Naive::new(&source);
                let many_rows = shape == SHAPES[0];
                let case = Case { bank: &*bank, naive: &naive, experts, bound: bound(&fit), many_rows };
                case.check(&label, &mut failures);
                case.check_poison(&label, &mut failures);
                if many_rows {
                    accepted_formats.push((format, bound(&fit)));
                    same_bits(&backend, &source, &teams, &label, &mut failures);
                    if let Err(why) = replacing(&backend, &source, &team, &label, &mut failures)
                        && !declined.contains(&why)
                    {
                        declined.push(why);
                    }
                    two_banks(&backend, &source, &naive, &team, bound(&fit), &label, &mut failures);
                    activations(&backend, format, shape, &team, bound(&fit), &label, &mut failures);
                }
            }
            if accepted {
                eprintln!("{} {label_tier} {format}: ran", backend.name());
            }
        }
        mixed(&backend, &accepted_formats, &mut failures);
        for why in declined {
            eprintln!("{} at {tier} declines: {why}", backend.name());
        }
        if !label_tier.is_empty() {
            last_tier = label_tier;
        }
    }
    assert!(ran > 0 || !built, "the backend runs on this CPU and took no format at all");
    if !built {
        eprintln!("skipped: the backend has no kernel for any tier that is tested here");
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

/// Teams that must all give the same bits: one to three threads, more of them than a layer has experts, one to eight NUMA nodes, even and uneven, and a pool of an application.
///
/// # Errors
/// The system refuses to start threads.
pub fn teams() -> crate::Result<Vec<(String, Arc<Team>)>> {
    let mut teams = Vec::new();
    for threads in [1, 2, 3, 16] {
        teams.push((format!("{threads} threads"), Team::oversubscribed(threads)?));
    }
    for cpus in [&[1, 1][..], &[2, 1], &[1, 1, 1, 1], &[1; 8]] {
        let team =
            Team::builder().topology(Topology::fake(cpus)).threads(cpus.iter().sum()).oversubscribed().build()?;
        teams.push((format!("nodes of {cpus:?} CPUs"), team));
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build();
    let pool = pool.map_err(|e| crate::Error::Invalid(format!("a pool of two threads: {e}")))?;
    teams.push(("a pool".into(), Team::builder().pool(pool).threads(3).oversubscribed().build()?));
    Ok(teams)
}

/// Layers of two formats, each with the next one that the backend takes: as up or as down, and the other way round. A thread alone goes through experts one
/// by one, from one matrix to the next.
fn mixed(backend: &dyn Backend, formats: &[(Format, f64)], failures: &mut Vec<String>) {
    let alone = Team::oversubscribed(1).unwrap_or_else(|e| panic!("{e}"));
    let others = formats.iter().cycle().skip(1);
    let mut ran = 0;
    for (&(a, bound_a), &(b, bound_b)) in formats.iter().zip(others) {
        for three in [[a, b, a], [a, a, b], [b, b, a]] {
            let label = format!("{} {}, {}, {}", backend.name(), three[0], three[1], three[2]);
            let source = match synthetic(three, SHAPES[0]).build() {
                Ok(source) => source,
                Err(e) => {
                    failures.push(format!("{label}: synthetic source: {e}"));
                    continue;
                }
            };
            if backend.probe(&source.layers()[0]).is_err() {
                continue;
            }
            let experts = SHAPES[0].2;
            let all: Vec<u32> = (0..experts as u32).collect();
            match load(backend, &source, &all, &alone) {
                Ok(bank) => {
                    ran += 1;
                    let naive = Naive::new(&source);
                    let bound = bound_a.max(bound_b);
                    let case = Case { bank: &*bank, naive: &naive, experts, bound, many_rows: false };
                    case.check(&label, failures);
                }
                Err(e) => failures.push(format!("{label}: load: {e}")),
            }
        }
    }
    if formats.len() > 1 {
        eprintln!("{} layers of two formats: {ran} ran", backend.name());
        if ran == 0 {
            failures.push(format!("{}: takes {} formats, and no layer of two", backend.name(), formats.len()));
        }
    }
}

fn same_bits(
    backend: &dyn Backend,
    source: &SyntheticSource,
    teams: &[(String, Arc<Team>)],
    label: &str,
    failures: &mut Vec<String>,
) {
    // Where calls of many rows have another way, numbers may depend on it.
    let invariant = backend.invariant();
    let backend = invariant.as_deref().unwrap_or(backend);
    let spec = &source.layers()[0];
    let (hidden, experts, tokens) = (spec.hidden, spec.experts, FEW_TOKENS + 5);
    let mut random = Random(3);
    let input = Hidden::F32((0..tokens * hidden).map(|_| random.normal()).collect());
    let ids: Vec<i32> = (0..tokens * 2).map(|_| random.below(experts) as i32).collect();
    let weights: Vec<f32> = ids.iter().map(|_| random.uniform()).collect();
    let all: Vec<u32> = (0..experts as u32).collect();
    let mut values = vec![0.0; tokens * hidden];
    input.read(0..tokens * hidden, &mut values);
    // Few tokens as well, which the flow cuts into other tasks.
    let few = 9;
    let few_input = Hidden::F32(values[..few * hidden].to_vec());
    let mut first: Option<Vec<f32>> = None;
    for (name, team) in teams {
        let outputs = load(backend, source, &all, team).and_then(|bank| {
            let many = bank.run(work(&input, tokens, hidden, &ids, &weights, 2, experts))?;
            let few = work(&few_input, few, hidden, &ids[..few * 2], &weights[..few * 2], 2, experts);
            Ok([many.output, bank.run(few)?.output])
        });
        match (outputs, &first) {
            (Err(e), _) => failures.push(format!("{label}, {name}: {e}")),
            (Ok(outputs), known) => {
                for output in &outputs {
                    let same = known.as_ref().unwrap_or(&outputs[0]);
                    if *output != same[..output.len()] {
                        let n = output.len() / hidden;
                        failures.push(format!("{label}: {name} give {n} tokens other bits than {}", teams[0].0));
                    }
                }
                let [many, _] = outputs;
                first.get_or_insert(many);
            }
        }
    }
    // And a token gets the same bits alone as among others.
    let (Some(first), Ok(bank)) = (first, load(backend, source, &all, &teams[0].1)) else { return };
    for token in [0, 17, tokens - 1] {
        let row = token * hidden..(token + 1) * hidden;
        let values = values[row.clone()].to_vec();
        let (ids, weights) = (&ids[token * 2..][..2], &weights[token * 2..][..2]);
        match bank.run(work(&Hidden::F32(values), 1, hidden, ids, weights, 2, experts)) {
            Err(e) => failures.push(format!("{label}, token {token} alone: {e}")),
            Ok(alone) if alone.output != first[row] => {
                failures.push(format!("{label}: token {token} has other bits alone than among {tokens}"));
            }
            Ok(_) => {}
        }
    }
}

/// An expert that took another's place gives the bits that it gives where it was loaded. Banks need not be able to: then the reason comes back.
fn replacing(
    backend: &dyn Backend,
    source: &SyntheticSource,
    team: &Arc<Team>,
    label: &str,
    failures: &mut Vec<String>,
) -> Result<(), String> {
    let spec = &source.layers()[0];
    let (hidden, last) = (spec.hidden, spec.experts as u32 - 1);
    let context = LoadContext {
        team: team.clone(),
        progress: Arc::default(),
        huge_pages: Default::default(),
        cache: None,
        replaceable: true,
    };
    let mut random = Random(11);
    let input = Hidden::F32((0..3 * hidden).map(|_| random.normal()).collect());
    let run = |bank: &dyn ExpertBank| {
        bank.run(work(&input, 3, hidden, &[0, 1, 0, 1, 1, 0], &[0.5; 6], 2, 2)).map(|w| w.output)
    };
    let load = |experts: &[u32]| backend.load(spec, experts, source, &context);
    let (bank, fresh) = match (load(&[0, 1]), load(&[last, 1])) {
        (Ok(bank), Ok(fresh)) => (bank, fresh),
        (Err(e), _) | (_, Err(e)) => {
            failures.push(format!("{label}, to be replaced: load: {e}"));
            return Ok(());
        }
    };
    match bank.replace(0, last, source) {
        Err(crate::Error::Unsupported(why)) => return Err(format!("to replace experts: {why}")),
        Err(e) => failures.push(format!("{label}: replace: {e}")),
        Ok(()) => match (run(&*bank), run(&*fresh)) {
            (Ok(a), Ok(b)) if a == b => {}
            (Ok(_), Ok(_)) => failures.push(format!("{label}: an expert has other bits in another's place")),
            (Err(e), _) | (_, Err(e)) => failures.push(format!("{label}, replaced: {e}")),
        },
    }
    if bank.replace(2, 0, source).is_ok() {
        failures.push(format!("{label}: an expert was put where there is none"));
    }
    Ok(())
}

fn two_banks(
    backend: &dyn Backend,
    source: &SyntheticSource,
    naive: &Naive,
    team: &Arc<Team>,
    bound: f64,
    label: &str,
    failures: &mut Vec<String>,
) {
    let spec = &source.layers()[0];
    let (hidden, tokens) = (spec.hidden, 9);
    let split: [Vec<u32>; 2] = [vec![0, 2], vec![1, 3]];
    let homes: Vec<Home> = (0..4u32).map(|e| Home { bank: e % 2, local: e / 2 }).collect();
    let mut random = Random(5);
    let input = Hidden::F32((0..tokens * hidden).map(|_| random.normal()).collect());
    let ids: Vec<i32> = (0..tokens * 2).map(|_| random.below(4) as i32).collect();
    let weights: Vec<f32> = ids.iter().map(|_| random.uniform()).collect();
    let mut sum = vec![0f32; tokens * hidden];
    for (experts, share) in split.iter().zip(scheduler::split(&ids, &weights, 2, &homes, 2)) {
        let work = Work {
            input: Arc::new(input.clone()),
            first: 0,
            tokens,
            hidden,
            rows: share.rows,
            experts: share.experts,
            output: vec![0.0; tokens * hidden],
            spent: Spent::default(),
        };
        match load(backend, source, experts, team).and_then(|bank| bank.run(work)) {
            Ok(work) => sum.iter_mut().zip(work.output).for_each(|(s, v)| *s += v),
            Err(e) => failures.push(format!("{label}, two banks: {e}")),
        }
    }
    let error = mean_error(&naive.forward(&input, tokens, &ids, &weights, 2), &sum);
    let bound = bound * SCATTER;
    if error.is_nan() || error > bound {
        failures.push(format!("{label}, two banks: error {error:.6}, bound {bound}"));
    }
}

fn activations(
    backend: &dyn Backend,
    format: Format,
    shape: (usize, usize, usize),
    team: &Arc<Team>,
    bound: f64,
    label: &str,
    failures: &mut Vec<String>,
) {
    let rules = [Activation::ClampedSiluMul { limit: 0.5 }, Activation::GptOss { alpha: 1.702, limit: 1.0 }];
    for rule in rules {
        let source = match synthetic(format, shape).activation(rule).biases(true).build() {
            Ok(s) => s,
            Err(e) => {
                failures.push(format!("{label}: synthetic source: {e}"));
                continue;
            }
        };
        let all: Vec<u32> = (0..shape.2 as u32).collect();
        match load(backend, &source, &all, team) {
            Ok(bank) => {
                let naive = Naive::new(&source);
                let case = Case { bank: &*bank, naive: &naive, experts: shape.2, bound, many_rows: false };
                case.check(&format!("{label} {rule:?}"), failures);
            }
            Err(e) => failures.push(format!("{label} {rule:?}: load: {e}")),
        }
    }
}
