//! The public API on good and bad input: nothing panics, every error says what and where.

use std::sync::Arc;

use kt::plan::{Change, Extra, Kind, Verdict};
use kt::quantize::Requantized;
use kt::source::synthetic::SyntheticSource;
use kt::testing::Random;
use kt::{Batch, Error, Format, Group, LoadOptions, Plan, Progress, Runtime, WeightSource};

const HIDDEN: usize = 256;

fn source(format: Format) -> SyntheticSource {
    SyntheticSource::builder()
        .hidden(HIDDEN)
        .intermediate(128)
        .experts(4)
        .top_k(2)
        .layers(2)
        .format(format)
        .seed(1)
        .build()
        .unwrap()
}

fn input(tokens: usize) -> Vec<f32> {
    let mut random = Random(11);
    (0..tokens * HIDDEN).map(|_| random.normal()).collect()
}

#[test]
fn forward_and_submit_give_the_same() {
    let runtime = kt::runtime().build().unwrap();
    let experts = runtime.load(&source(Format::Bf16)).unwrap();
    let layer = experts.layer(1).unwrap();
    let new = || Batch::new(3, input(3), vec![0, 1, 2, 3, 1, -1], vec![0.5, 0.5, 0.25, 0.75, 1.0, 9.0]).unwrap();
    let mut batch = new();
    layer.forward(&mut batch).unwrap();
    assert!(batch.output().iter().any(|&v| v != 0.0));
    let pending = layer.submit(new());
    assert_eq!(pending.wait().unwrap().output(), batch.output());
    drop(layer.submit(new())); // dropping work under way is fine
    // Ready for the next step, with the same buffers.
    batch.set(1, input(1), vec![2, 0], vec![0.5, 0.5]).unwrap();
    layer.forward(&mut batch).unwrap();
    assert_eq!(batch.output().len(), HIDDEN);
}

#[test]
fn a_backend_of_the_callers_own_takes_the_place_of_the_built_in_one() {
    let names = |runtime: Runtime| runtime.candidates().iter().map(|c| c.name.clone()).collect::<Vec<_>>();
    let built_in = names(kt::runtime().build().unwrap());
    let own = kt::cpu::CpuBackend::new("portable", kt::cpu::portable::Portable);
    let mut with_own = names(kt::runtime().with_backend(own).build().unwrap());
    assert_eq!(with_own[0], "portable", "the caller's come first");
    with_own.rotate_left(1);
    assert_eq!(with_own, built_in);
}

#[test]
fn a_batch_larger_than_a_pass_gives_the_same() {
    let tokens = 600;
    let ids: Vec<i32> = (0..tokens * 2).map(|i| (i * 7 % 5) as i32 - 1).collect();
    let weights: Vec<f32> = ids.iter().map(|&i| 0.3 + i as f32 * 0.1).collect();
    let run = |pass_tokens: usize| {
        // Else passes of many rows are multiplied another way on some tiers.
        let runtime = kt::runtime().pass_tokens(pass_tokens).batch_invariant(true).build().unwrap();
        let experts = runtime.load(&source(Format::Int4(Group::Of(32)))).unwrap();
        let mut batch = Batch::new(tokens, input(tokens), ids.clone(), weights.clone()).unwrap();
        experts.layer(0).unwrap().forward(&mut batch).unwrap();
        batch.into_output()
    };
    // What few tokens make is added to the output in place, that of more beside it.
    let at_once = run(1024);
    for pass_tokens in [5, 31, 64, 65, 300] {
        assert!(at_once == run(pass_tokens), "passes of {pass_tokens} tokens");
    }
}

#[test]
fn bf16_hidden_states_equal_their_f32_values() {
    let runtime = kt::runtime().build().unwrap();
    let experts = runtime.load(&source(Format::Bf16)).unwrap();
    let narrow: Vec<half::bf16> = input(2).into_iter().map(half::bf16::from_f32).collect();
    let wide: Vec<f32> = narrow.iter().map(|v| v.to_f32()).collect();
    let mut a = Batch::new(2, narrow, vec![0, 1, 2, 3], vec![0.5; 4]).unwrap();
    let mut b = Batch::new(2, wide, vec![0, 1, 2, 3], vec![0.5; 4]).unwrap();
    experts.layer(0).unwrap().forward(&mut a).unwrap();
    experts.layer(0).unwrap().forward(&mut b).unwrap();
    assert_eq!(a.output(), b.output());
}

#[test]
fn several_runtimes_live_in_one_process() {
    let outputs: Vec<Vec<f32>> = std::thread::scope(|s| {
        let run = || {
            let runtime = kt::runtime().threads(2).build().unwrap();
            let experts = runtime.load(&source(Format::Int8(Group::Row))).unwrap();
            let mut batch = Batch::new(5, input(5), vec![0, 1, 1, 2, 2, 3, 3, 0, 0, 2], vec![0.5; 10]).unwrap();
            for _ in 0..20 {
                experts.layer(0).unwrap().forward(&mut batch).unwrap();
            }
            batch.into_output()
        };
        let threads: Vec<_> = (0..4).map(|_| s.spawn(run)).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(outputs.iter().all(|o| o == &outputs[0]));
}

#[test]
fn bad_batches_are_refused_at_the_door() {
    let runtime = kt::runtime().build().unwrap();
    let experts = runtime.load(&source(Format::Bf16)).unwrap();
    let layer = experts.layer(0).unwrap();
    for (id, slot) in [(4, 1), (i32::MAX, 0), (-2, 1)] {
        let mut ids = vec![0, 1, 2, 3];
        ids[2 + slot] = id;
        let mut batch = Batch::new(2, input(2), ids, vec![0.5; 4]).unwrap();
        let error = layer.forward(&mut batch).unwrap_err();
        let Error::ExpertOutOfRange { layer: 0, token: 1, experts: 4, .. } = error else { panic!("{error}") };
        let text = error.to_string();
        assert!(text.contains(&format!("topk_ids[1, {slot}] is {id}")) && text.contains("0..4"), "{text}");
        assert!(batch.output().is_empty());
        let mut ids = vec![0, 1];
        ids[slot] = id;
        let batch = Batch::new(1, input(1), ids, vec![0.5; 2]).unwrap();
        assert!(matches!(layer.submit(batch).wait(), Err(Error::ExpertOutOfRange { .. })));
    }
    // Slices of a wrong length.
    assert!(matches!(Batch::new(2, input(2), vec![0, 1, 2], vec![0.5; 3]), Err(Error::Length { .. })));
    assert!(matches!(Batch::new(2, input(2), vec![0, 1], vec![0.5; 3]), Err(Error::Length { .. })));
    assert!(matches!(Batch::new(2, vec![0f32; 3], vec![], vec![]), Err(Error::Length { .. })));
    let mut narrow = Batch::new(1, vec![0f32; HIDDEN - 1], vec![0], vec![1.0]).unwrap();
    let error = layer.forward(&mut narrow).unwrap_err().to_string();
    assert!(error.contains("input [tokens, hidden]") && error.contains("256") && error.contains("255"), "{error}");
    let error = Batch::new(2, vec![0f32; 511], vec![], vec![]).unwrap_err().to_string();
    assert!(error.contains("expected 512 elements, got 511"), "{error}");
    // More tokens than a machine can have; empty as they are, nothing else is wrong with them.
    let mut many = Batch::new(1 << 58, Vec::<f32>::new(), vec![], vec![]).unwrap();
    assert!(matches!(layer.forward(&mut many), Err(Error::Length { .. })));
    let Err(error) = experts.layer(2) else { panic!("layer 2 does not exist") };
    assert!(error.to_string().contains("0-1"), "{error}");
}

#[test]
fn handles_can_be_shared_by_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Runtime>();
    shared::<kt::Experts>();
    shared::<Batch>();
    shared::<Plan>();
    shared::<Error>();
}

#[test]
fn tokens_may_have_no_experts() {
    let runtime = kt::runtime().build().unwrap();
    let experts = runtime.load(&source(Format::Bf16)).unwrap();
    let layer = experts.layer(0).unwrap();
    experts.record_trace();
    let none = || Batch::new(3, input(3), vec![], vec![]).unwrap();
    let mut batch = none();
    assert_eq!(batch.top_k(), 0);
    batch.defer(1);
    layer.forward(&mut batch).unwrap();
    assert_eq!(batch.output(), vec![0.0; 3 * HIDDEN]);
    assert_eq!(layer.submit(none()).wait().unwrap().output(), vec![0.0; 3 * HIDDEN]);
    let heat = experts.heat_map();
    assert_eq!((heat.layers()[0].tokens, heat.total()), (6, 0));
    let trace = experts.take_trace();
    assert_eq!(trace.layers()[0].ids, vec![-1; 6 * trace.layers()[0].top_k]);
}

#[test]
fn passes_without_end_are_planned_as_what_they_take() {
    let plan = |tokens| kt::runtime().pass_tokens(tokens).build().unwrap().plan(&source(Format::Bf16)).unwrap();
    for tokens in [usize::MAX, 1 << 56] {
        let plan = plan(tokens);
        assert!(plan.scratch_bytes >= 1 << 60 && plan.verdict() == Verdict::Refuse, "{tokens}: {plan}");
    }
}

#[test]
fn passes_have_256_rows_of_an_expert_unless_told_otherwise() {
    // Experts, and of how many a token is; then tokens.
    for (experts, top_k, tokens) in [
        (128, 8, 4096),
        (60, 4, 3840),
        (60, 7, 2195),
        (8, 2, 1024),
        (128, 4, 6144),
        (256, 8, 6144),
        (512, 10, 6144),
        (1, 1, 1024),
    ] {
        let source =
            SyntheticSource::builder().hidden(64).intermediate(64).experts(experts).top_k(top_k).build().unwrap();
        let scratch = |builder: kt::RuntimeBuilder| builder.build().unwrap().plan(&source).unwrap().scratch_bytes;
        let by_default = scratch(kt::runtime());
        assert_eq!(by_default, scratch(kt::runtime().pass_tokens(tokens)), "{top_k} of {experts}");
        assert!(by_default < scratch(kt::runtime().pass_tokens(tokens + 1)), "{top_k} of {experts}");
    }
}

#[test]
fn what_does_not_fit_is_refused_with_the_plan() {
    let runtime = kt::runtime().memory_limit(1 << 20).build().unwrap();
    let Err(error) = runtime.load(&source(Format::Bf16)) else { panic!("1 MiB is too little") };
    let text = error.to_string();
    assert!(matches!(error, Error::Memory(_)) && text.contains("REFUSE") && text.contains("1.0 MiB"), "{text}");
    // Memory that the caller announces counts.
    let runtime = kt::runtime().memory_limit(1 << 30).build().unwrap();
    assert!(runtime.load(&source(Format::Bf16)).is_ok());
    let extra = vec![Extra::new("KV cache", Kind::Working, 1 << 30)];
    let refused = runtime.load_with(&source(Format::Bf16), LoadOptions { extra, ..Default::default() });
    assert!(refused.err().unwrap().to_string().contains("KV cache"));
}

/// A plan of 100 layers that is never loaded, under a limit.
fn limited(limit: u64, extra: Vec<Extra>) -> (Runtime, Plan) {
    let builder = SyntheticSource::builder().hidden(1024).intermediate(512).experts(64).top_k(8).layers(100);
    let runtime = kt::runtime().threads(4).memory_limit(limit).build();
    let (runtime, source) = (runtime.unwrap(), builder.build().unwrap());
    let plan = runtime.plan_with(&source, &LoadOptions { extra, ..Default::default() }).unwrap();
    (runtime, plan)
}

#[test]
fn a_plan_that_does_not_fit_says_what_would() {
    let need = limited(1 << 50, Vec::new()).1.need_bytes();
    let verdict = |limit| limited(limit, Vec::new()).1.verdict();
    assert_eq!(
        [need * 2, need + need / 20, need, need - 1].map(verdict),
        [Verdict::Fits, Verdict::Tight, Verdict::Tight, Verdict::Refuse]
    );

    // Half of the memory: a format of less than half the bits helps, and only memory besides.
    let (_, plan) = limited(need / 2, Vec::new());
    assert!(plan.reason().contains("missing") && plan.reason().contains("limit set by the caller"), "{plan}");
    let formats: Vec<_> = plan.remedies.iter().filter(|r| matches!(r.change, Change::ExpertsAs(_))).collect();
    assert!((1..=3).contains(&formats.len()), "{plan}");
    for remedy in &formats {
        assert!(remedy.verdict < Verdict::Refuse && remedy.need_bytes <= need / 2, "{plan}");
        // It is the plan of a source with that format, but for how synthetic weights come to be.
        let Change::ExpertsAs(format) = remedy.change else { continue };
        let base = SyntheticSource::builder().hidden(1024).intermediate(512).experts(64).top_k(8).layers(100);
        let other = Requantized::new(Arc::new(base.build().unwrap()), format).unwrap();
        let other = kt::runtime().threads(4).memory_limit(need / 2).build().unwrap().plan(&other).unwrap();
        assert_eq!((other.need_bytes(), other.verdict()), (remedy.need_bytes, remedy.verdict), "{format}");
    }
    let more = plan.remedies.iter().find_map(|r| match &r.change {
        Change::Memory(bytes, limit) => Some((*bytes, limit.total_bytes)),
        _ => None,
    });
    assert_eq!(more, Some((need - need / 2, need / 2)), "{plan}");
    assert!(!plan.remedies.iter().any(|r| matches!(r.change, Change::PassTokens(_) | Change::Threads(_))), "{plan}");

    // A thousandth of the memory: no format does it; the smallest is told.
    let (_, plan) = limited(need / 1000, Vec::new());
    let formats: Vec<_> = plan.remedies.iter().filter(|r| matches!(r.change, Change::ExpertsAs(_))).collect();
    assert!(formats.len() == 1 && formats[0].verdict == Verdict::Refuse, "{plan}");
    assert!(plan.to_string().contains("not enough: experts re-encoded"), "{plan}");

    // A little too little: smaller passes or fewer threads free scratch, and are what is said.
    let (runtime, plan) = limited(need - (1 << 20), Vec::new());
    let passes = plan.remedies.iter().find_map(|r| match r.change {
        Change::PassTokens(n) => Some((n, r.need_bytes)),
        _ => None,
    });
    let (tokens, with) = passes.unwrap_or_else(|| panic!("{plan}"));
    assert!((1..2048).contains(&tokens) && with <= need - (1 << 20) && with > need - (2 << 20), "{plan}");
    let threads = plan.remedies.iter().find_map(|r| match r.change {
        Change::Threads(n) => Some(n),
        _ => None,
    });
    assert!(threads.is_some_and(|n| n < runtime.threads()), "{plan}");
    let json = plan.to_json();
    assert_eq!(json["remedies"].as_array().unwrap().len(), plan.remedies.len());
    assert_eq!(json["verdict"], "REFUSE");
}

#[test]
fn layers_that_find_no_room_packed_are_used_in_place() {
    let layers = 12;
    let builder = SyntheticSource::builder().hidden(512).intermediate(768).experts(8).top_k(2).layers(layers);
    let source = builder.format(Format::Iq2Xs).seed(4).build().unwrap();
    let runtime = |limit: u64, in_place| {
        kt::runtime().threads(2).pass_tokens(8).memory_limit(limit).in_place(in_place).build().unwrap()
    };
    let plan = |limit| runtime(limit, false).plan(&source).unwrap();
    let packed = plan(1 << 40);
    // What a synthetic source would have mapped is on the heap.
    let mapped = |plan: &Plan| plan.layers.iter().map(|l| l.fit.mapped_bytes).sum::<u64>();
    if mapped(&packed) > 0 {
        println!("skipped: this build or this CPU runs such experts in place only");
        return;
    }
    let in_place = runtime(1 << 40, true).plan(&source).unwrap();
    let stored: u64 = packed.layers.iter().map(|l| l.stored_bytes).sum();
    assert_eq!((in_place.packed_bytes(), mapped(&in_place)), (0, stored));
    assert!(in_place.explain().contains("in place, decoded"), "{}", in_place.explain());
    assert!(packed.notes.iter().chain(&in_place.notes).all(|n| !n.contains("want of memory")), "{:?}", packed.notes);

    let output = |runtime: Runtime| {
        let experts = runtime.load(&source).unwrap();
        let mut batch = Batch::new(3, vec![0.25; 3 * 512], vec![0, 7, 3, 1, 5, 6], vec![0.5; 6]).unwrap();
        let mut all = Vec::new();
        for layer in experts.layers() {
            layer.forward(&mut batch).unwrap();
            all.extend_from_slice(batch.output());
        }
        (all, experts.packed_bytes())
    };
    let (want, all_packed) = output(runtime(1 << 40, false));
    assert_eq!(all_packed, packed.packed_bytes());

    // Between the two: the first layers are packed, the rest is in place, and that fits.
    let limit = (packed.need_bytes() + in_place.need_bytes()) / 2 * 10 / 9;
    let some = plan(limit);
    let mapped: Vec<bool> = some.layers.iter().map(|l| l.fit.mapped_bytes > 0).collect();
    let first = mapped.iter().position(|&m| m).unwrap();
    assert!((2..layers - 2).contains(&first) && mapped[first..].iter().all(|&m| m), "{some}");
    assert_eq!(some.verdict(), Verdict::Fits, "{some}");
    let note = format!("from layer {first} on are used in place");
    assert!(some.notes.iter().any(|n| n.contains(&note)) && some.explain().contains(&note), "{:?}", some.notes);
    let (got, some_packed) = output(runtime(limit, false));
    assert!(got == want && some_packed == some.packed_bytes() && some_packed < all_packed);

    // No room to spare for any; and none for the file's own bytes, which is refused with what would help.
    let tight = plan(in_place.need_bytes() + 1000);
    assert_eq!((tight.packed_bytes(), tight.verdict()), (0, Verdict::Tight), "{tight}");
    let none = plan(in_place.need_bytes() / 2);
    assert_eq!((none.packed_bytes(), none.verdict(), none.need_bytes()), (0, Verdict::Refuse, in_place.need_bytes()));
    assert!(none.remedies.iter().any(|r| matches!(r.change, Change::Memory(..))), "{none}");
    assert!(output(runtime(in_place.need_bytes() + 1000, false)) == (want, 0));
}

#[test]
fn memory_is_counted_when_it_is_taken() {
    let gib = 1 << 30;
    let none = limited(1 << 50, Vec::new()).1;
    let need = |extra: &[(Kind, u64)]| {
        let extra = extra.iter().map(|&(kind, bytes)| Extra::new("x", kind, bytes)).collect();
        let plan = limited(1 << 50, extra).1;
        plan.resident_bytes() - plan.held_bytes
    };
    let base = need(&[]);
    assert_eq!(need(&[(Kind::Weights, gib)]) - base, gib);
    assert_eq!(need(&[(Kind::InPlace, gib), (Kind::Working, gib)]) - base, 2 * gib);
    // What loading takes is given back before working memory is taken: the larger of the two counts.
    assert_eq!(need(&[(Kind::Working, gib), (Kind::Loading, gib / 2)]) - base, gib);
    assert_eq!(need(&[(Kind::Working, gib), (Kind::Loading, 2 * gib)]) - base, 2 * gib - none.scratch_bytes);
    // Biases are copied out of the file.
    let biases = |biases| {
        let source = SyntheticSource::builder().hidden(1024).intermediate(512).experts(3).biases(biases).build();
        kt::runtime().threads(1).build().unwrap().plan(&source.unwrap()).unwrap().copied_bytes()
    };
    assert_eq!(biases(true) - biases(false), 3 * (1024 + 2 * 512) * 4);
    // A batch that is known to be small needs less scratch.
    let source = SyntheticSource::builder().hidden(1024).build().unwrap();
    let runtime = kt::runtime().threads(1).build().unwrap();
    let scratch = |batch_tokens| {
        runtime.plan_with(&source, &LoadOptions { batch_tokens, ..Default::default() }).unwrap().scratch_bytes
    };
    assert!(scratch(Some(1)) < scratch(Some(8)) && scratch(Some(8)) < scratch(None));
    assert_eq!(scratch(Some(1 << 20)), scratch(None));
    // Speed: every byte that a token reads.
    let extra = vec![Extra::new("dense", Kind::Weights, gib).read_per_token(gib / 2)];
    let plan = limited(1 << 50, extra).1;
    assert_eq!(plan.token_bytes(), plan.expert_token_bytes() + gib / 2);
    assert!((plan.tokens_per_second(2.0 * plan.token_bytes() as f64) - 2.0).abs() < 1e-9);
}

#[test]
fn the_plan_tells_what_loading_takes() {
    let runtime = kt::runtime().build().unwrap();
    for format in [Format::Bf16, Format::Fp8Block, Format::Int8(Group::Row), Format::Int4(Group::Of(32)), Format::Q8_0]
    {
        let source = source(format);
        let plan = runtime.plan(&source).unwrap();
        let experts = runtime.load(&source).unwrap();
        assert_eq!(plan.packed_bytes(), experts.packed_bytes(), "{format}");
        let held = plan.packed_bytes() + plan.copied_bytes() + plan.mapped_bytes();
        assert!(held >= plan.layers.iter().map(|l| l.stored_bytes).sum());
        // Synthetic weights are in no file.
        assert_eq!(plan.mapped_bytes(), 0);
        let json = plan.to_json();
        assert_eq!(json["layers"].as_array().unwrap().len(), 2);
        assert_eq!(json["verdict"], "FITS");
    }
}

#[test]
fn explain_names_every_backend_and_its_reason() {
    let runtime = kt::runtime().build().unwrap();
    for format in [Format::Bf16, Format::Q4_0, Format::Q8_0] {
        let text = runtime.explain(&source(format)).unwrap();
        for candidate in runtime.candidates() {
            assert!(text.contains(&candidate.name), "{format}: {} is not explained in\n{text}", candidate.name);
        }
        assert!(text.starts_with("layers 0-1: "), "{text}");
    }
}

#[test]
fn a_named_backend_is_never_replaced_silently() {
    let Err(error) = kt::runtime().backend("quantum").build() else { panic!("no such backend") };
    assert!(error.to_string().contains("quantum") && error.to_string().contains("portable"), "{error}");
    let runtime = kt::runtime().backend("portable").build().unwrap();
    let plan = runtime.plan(&source(Format::Bf16)).unwrap();
    assert!(plan.layers.iter().all(|l| l.backend == "portable"));
    #[cfg(feature = "avx512")]
    if let Ok(runtime) = kt::runtime().backend("avx512").build() {
        let Err(error) = runtime.load(&source(Format::Q4_0)) else { panic!("Q4_0 is not a format of avx512") };
        assert!(error.to_string().contains("avx512") && error.to_string().contains("Q4_0"), "{error}");
    }
}

#[test]
fn loading_reports_progress_and_can_be_cancelled() {
    let runtime = kt::runtime().build().unwrap();
    let progress = Arc::new(Progress::default());
    let options = LoadOptions { progress: progress.clone(), ..Default::default() };
    runtime.load_with(&source(Format::Bf16), options).unwrap();
    assert_eq!(progress.done_bytes(), progress.total_bytes());
    assert_eq!(progress.total_bytes(), 2 * 4 * 3 * 256 * 128 * 2);
    let progress = Arc::new(Progress::default());
    progress.cancel();
    let options = LoadOptions { progress, ..Default::default() };
    assert!(matches!(runtime.load_with(&source(Format::Bf16), options), Err(Error::Cancelled)));
}

#[test]
fn linear_multiplies_and_checks_lengths() {
    let source = source(Format::Bf16);
    let matrix = source.matrix(0, 0, kt::Proj::Gate).unwrap();
    let weights = matrix.decode();
    for name in ["portable", "best"] {
        let builder = kt::runtime();
        let builder = if name == "best" { builder } else { builder.backend(name) };
        let linear = builder.build().unwrap().linear(&matrix).unwrap();
        assert_eq!((linear.rows(), linear.cols()), (128, HIDDEN));
        for n in [0, 1, 3, 300] {
            let x = input(n);
            let mut y = vec![7.0; n * 128];
            linear.forward(&x, &mut y).unwrap();
            for (x, y) in x.chunks_exact(HIDDEN).zip(y.chunks_exact(128)) {
                for (row, y) in weights.chunks_exact(HIDDEN).zip(y) {
                    let want: f64 = row.iter().zip(x).map(|(w, x)| *w as f64 * *x as f64).sum();
                    assert!((want - *y as f64).abs() < 0.05, "{name} {n}: {want} {y}");
                }
            }
        }
        assert!(matches!(linear.forward(&input(1)[1..], &mut [0.0; 128]), Err(Error::Length { .. })));
        assert!(matches!(linear.forward(&input(1), &mut [0.0; 127]), Err(Error::Length { .. })));
    }
}
