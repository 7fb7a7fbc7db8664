//! The built-in model: continuations, cache, likelihood.

mod common;

use std::sync::Arc;

use common::{Reference, data, greedy, load, logits, max_difference, median_relative_rms};
use kt::quantize::Requantized;
use kt_cli::eval::score;
use kt_cli::host::{Cache, Model, ModelConfig, Rows, Tokenizer};
use kt_cli::model::built_in;

fn model(backend: Option<&str>) -> Model {
    load(&built_in().unwrap(), backend, 512)
}

#[test]
fn logits_are_those_of_the_reference() {
    let reference = Reference::read(data("tiny-moe/reference.safetensors"));
    let got = logits(&model(Some("portable")), &reference.ids);
    let difference = max_difference(&got, &reference.logits);
    assert!(difference < 1e-3, "{difference}");
    let best = model(None);
    let median = median_relative_rms(&logits(&best, &reference.ids), &reference.logits, best.vocabulary());
    println!("portable: largest difference {difference:.2e}; best backends: median relative RMS {median:.2e}");
    assert!(median < 2e-2, "{median}");
}

#[test]
fn greedy_continuations_are_those_of_the_reference() {
    let cases: serde_json::Value =
        serde_json::from_slice(&std::fs::read(data("tiny-moe/greedy.json")).unwrap()).unwrap();
    let source = built_in().unwrap();
    let tokenizer = Tokenizer::of(&*source).unwrap();
    let model = load(&source, Some("portable"), 256);
    for case in cases.as_array().unwrap() {
        let list =
            |key: &str| case[key].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect::<Vec<_>>();
        let prompt = case["prompt"].as_str().unwrap();
        let (prompt_ids, want) = (list("prompt_ids"), list("ids"));
        assert_eq!(tokenizer.encode(prompt).unwrap(), prompt_ids, "{prompt:?}");
        let got = greedy(&model, &prompt_ids, want.len());
        let same = got.iter().zip(&want).take_while(|(a, b)| a == b).count();
        // Where two tokens are nearly equally likely, other arithmetic may take the other one.
        let margins = case["margin"].as_array().unwrap();
        let certain = margins.iter().position(|m| m.as_f64().unwrap() < 0.02).unwrap_or(want.len());
        println!("{prompt:?}: {same} of {} tokens equal, certain are {certain}", want.len());
        assert!(same >= certain, "{prompt:?}: only {same} of {certain} tokens equal");
        if same == want.len() {
            assert_eq!(tokenizer.decode(&got).unwrap(), case["text"].as_str().unwrap());
        }
    }
}

#[test]
fn the_cache_changes_nothing() {
    for (source, name) in [
        (built_in().unwrap(), "tiny"),
        (
            Arc::new(
                Requantized::new(kt::open(data("reference/deepseek_v3/bf16")).unwrap(), [kt::Format::F32; 3]).unwrap(),
            ),
            "deepseek",
        ),
    ] {
        let model = load(&source, Some("portable"), 64);
        let ids: Vec<u32> = (0..40).map(|i| (i * 37 + 5) % 300).collect();
        let whole = logits(&model, &ids);
        let mut cache = Cache::new(model.config(), ids.len()).unwrap();
        let mut single = Vec::new();
        for &id in &ids {
            single.extend(model.forward(&[id], &mut cache, Rows::Last).unwrap());
        }
        assert_eq!(cache.tokens(), ids.len());
        cache.reset();
        let mut pieces = model.forward(&ids[..7], &mut cache, Rows::All).unwrap();
        // What does not fit leaves the cache as it was.
        assert!(model.forward(&ids, &mut cache, Rows::Last).is_err());
        assert!(model.forward(&[1 << 20], &mut cache, Rows::Last).is_err());
        pieces.extend(model.forward(&ids[7..], &mut cache, Rows::All).unwrap());
        let (a, b) = (max_difference(&whole, &single), max_difference(&whole, &pieces));
        println!("{name}: token by token {a:.1e}, in two pieces {b:.1e}");
        assert!(a < 1e-4 && b < 1e-4, "{name}: {a} {b}");
    }
}

#[test]
fn several_passes_give_the_same_as_one_token_at_a_time() {
    let source = built_in().unwrap();
    let ids: Vec<u32> = (0..700).map(|i| (i * i * 7 + 3 * i) % 1280).collect();
    let load = |pass_tokens: usize| {
        let runtime = kt::runtime().pass_tokens(pass_tokens).build().unwrap();
        let config = ModelConfig::read(&*source).unwrap();
        let size = (ids.len(), Rows::Last);
        Model::load(&runtime, &source, &config, size, &Default::default(), Default::default()).unwrap()
    };
    let mut all = Vec::new();
    // One pass, and seven.
    for model in [load(1000), load(100)] {
        let mut cache = Cache::new(model.config(), ids.len()).unwrap();
        let last = model.forward(&ids, &mut cache, Rows::Last).unwrap();
        cache.reset();
        let head = model.forward(&ids[..699], &mut cache, Rows::Last).unwrap();
        let step = model.forward(&ids[699..], &mut cache, Rows::Last).unwrap();
        assert_ne!(head, step);
        let median = median_relative_rms(&step, &last, model.vocabulary());
        assert!(median < 2e-2, "{median}");
        all.push(last);
    }
    let median = median_relative_rms(&all[0], &all[1], all[0].len());
    assert!(median < 2e-2, "{median}");
}

#[test]
fn likelihood_of_held_out_text() {
    let source = built_in().unwrap();
    let text = std::fs::read_to_string(data("tiny-moe/heldout.txt")).unwrap();
    let ids = Tokenizer::of(&*source).unwrap().encode(&text).unwrap();
    assert_eq!(ids.len(), 24967);
    let ids = &ids[..4 * 256];
    let nll = |model: &Model| score(model, ids, 256, |_| Ok(())).unwrap().mean_nats();
    let (exact, best) = (nll(&model(Some("portable"))), nll(&model(None)));
    println!("portable {exact:.5}, best backends {best:.5}");
    // The whole text has 2.5278; a uniform guess would be ln 1280 = 7.15.
    assert!((2.0..3.1).contains(&exact), "{exact}");
    assert!((exact - best).abs() < 0.01, "portable {exact}, best backends {best}");
}

#[test]
fn the_plan_knows_what_the_host_takes() {
    let source = built_in().unwrap();
    let config = ModelConfig::read(&*source).unwrap();
    let runtime = common::runtime(Some("portable"));
    let plan = Model::plan(&runtime, &*source, &config, 100, Rows::Last, &Default::default()).unwrap();
    let of = |what: &str| plan.extra.iter().find(|e| e.label.contains(what)).map(|e| e.bytes).unwrap();
    // 4 layers, keys and values of 2 heads of 64, F32.
    assert_eq!(of("keys and values"), 4 * 2 * 2 * 64 * 4 * 100);
    let small = kt::runtime().memory_limit(1 << 20).build().unwrap();
    let error = Model::load(&small, &source, &config, (100, Rows::Last), &Default::default(), Default::default());
    let error = error.err().unwrap();
    assert!(matches!(error.downcast_ref(), Some(kt::Error::Memory(_))), "{error:#}");
    let text = error.to_string();
    assert!(text.contains("keys and values") && text.contains("the limit of 1.0 MiB raised by"), "{text}");
}

#[test]
fn passes_are_smaller_where_large_ones_do_not_fit() {
    let source = built_in().unwrap();
    let config = ModelConfig::read(&*source).unwrap();
    let plan = |limit: Option<u64>| {
        let builder = kt::runtime().backend("portable");
        let runtime = match limit {
            Some(bytes) => builder.memory_limit(bytes).build(),
            None => builder.build(),
        };
        Model::plan(&runtime.unwrap(), &*source, &config, 2000, Rows::Last, &Default::default()).unwrap()
    };
    let activations = |plan: &kt::Plan| plan.extra.iter().find(|e| e.label.contains("activations")).unwrap().bytes;
    let large = plan(None);
    let small = plan(Some(large.need_bytes() - 1));
    assert_eq!(small.verdict(), kt::plan::Verdict::Fits, "{small}");
    assert!(activations(&small) < activations(&large) && small.need_bytes() < large.need_bytes(), "{small}\n{large}");
    // What fits into nothing is told of as the smaller one.
    let none = plan(Some(1 << 20));
    assert_eq!((none.verdict(), activations(&none)), (kt::plan::Verdict::Refuse, activations(&small)));
}
