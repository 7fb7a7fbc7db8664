//! Routing rules against recorded routers, against the plain definition of each rule, and at their edges.

use std::path::Path;

use kt_core::{Routing, Rule};
use safetensors::SafeTensors;
use serde_json::Value;

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data");
const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../kt-cli/model");

fn route(routing: &Routing, logits: &[f32], bias: Option<&[f32]>) -> (Vec<i32>, Vec<f32>) {
    let (mut ids, mut weights) = (vec![77; routing.top_k], vec![77.0; routing.top_k]);
    routing.route(logits, bias, &mut ids, &mut weights);
    (ids, weights)
}

fn config(dir: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap()
}

fn routing(config: &Value) -> Routing {
    let number = |key: &str| config[key].as_u64().unwrap() as usize;
    let top_k = number("num_experts_per_tok");
    let renormalize = config["norm_topk_prob"].as_bool().unwrap();
    match config["model_type"].as_str().unwrap() {
        "qwen3_moe" => Routing { top_k, rule: Rule::Softmax { renormalize }, scale: 1.0 },
        "deepseek_v3" => {
            let rule = Rule::BiasedSigmoid { groups: number("n_group"), keep: number("topk_group"), renormalize };
            Routing { top_k, rule, scale: config["routed_scaling_factor"].as_f64().unwrap() as f32 }
        }
        family => panic!("no rule for {family}"),
    }
}

fn words<const N: usize, T>(
    tensors: &SafeTensors<'_>,
    name: &str,
    read: impl Fn([u8; N]) -> T,
) -> Option<(usize, Vec<T>)> {
    let t = tensors.tensor(name).ok()?;
    let values = t.data().as_chunks::<N>().0.iter().map(|&b| read(b)).collect();
    Some((*t.shape().last().unwrap(), values))
}

fn f32s(tensors: &SafeTensors<'_>, name: &str) -> Option<(usize, Vec<f32>)> {
    words(tensors, name, f32::from_le_bytes)
}

/// The correction bias of a layer, from whichever shard has it.
fn correction_bias(dir: &Path, layer: usize) -> Option<Vec<f32>> {
    let name = format!("model.layers.{layer}.mlp.gate.e_score_correction_bias");
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.file_name().unwrap().to_str().unwrap().starts_with("model")
            && path.extension().unwrap() == "safetensors"
        {
            let file = std::fs::read(path).unwrap();
            if let Some((_, bias)) = f32s(&SafeTensors::deserialize(&file).unwrap(), &name) {
                return Some(bias);
            }
        }
    }
    None
}

/// Compares with a recorded forward pass; returns how many tokens were compared.
fn replay(reference: &Path, dir: &Path) -> usize {
    let routing = routing(&config(dir));
    let file = std::fs::read(reference).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let mut tokens = 0;
    for layer in 0..8 {
        let name = |what: &str| format!("layers.{layer}.moe.{what}");
        let Some((experts, logits)) = f32s(&tensors, &name("router_logits")) else { continue };
        routing.check(experts).unwrap();
        let (_, want_weights) = f32s(&tensors, &name("topk_weights")).unwrap();
        let (top_k, want_ids) = words(&tensors, &name("topk_ids"), i32::from_le_bytes).unwrap();
        assert_eq!(top_k, routing.top_k);
        let bias = correction_bias(dir, layer);
        assert_eq!(bias.is_some(), matches!(routing.rule, Rule::BiasedSigmoid { .. }));
        for (t, logits) in logits.chunks(experts).enumerate() {
            let (ids, weights) = route(&routing, logits, bias.as_deref());
            let at = t * top_k..(t + 1) * top_k;
            assert_eq!(ids, want_ids[at.clone()], "{} layer {layer} token {t}", dir.display());
            for (got, want) in weights.iter().zip(&want_weights[at]) {
                assert!((got - want).abs() < 2e-6, "{} layer {layer} token {t}: {got} {want}", dir.display());
            }
            tokens += 1;
        }
    }
    tokens
}

#[test]
fn recorded_routers_are_reproduced() {
    for (family, layers) in [("qwen3_moe", 2), ("deepseek_v3", 2)] {
        for format in ["bf16", "fp8_block", "rawint4"] {
            let dir = Path::new(DATA).join("reference").join(family).join(format);
            assert_eq!(replay(&dir.join("reference.safetensors"), &dir), layers * 24);
        }
    }
    assert_eq!(replay(&Path::new(DATA).join("tiny-moe/reference.safetensors"), Path::new(MODEL)), 4 * 16);
}

#[test]
fn a_source_knows_the_rule_of_its_family() {
    for dir in ["reference/qwen3_moe/bf16", "reference/deepseek_v3/bf16"] {
        let dir = Path::new(DATA).join(dir);
        let source = kt_core::open(&dir).unwrap();
        for layer in source.layers() {
            assert_eq!(source.routing(layer.index), Some(routing(&config(&dir))), "{}", dir.display());
        }
    }
}

/// Each rule as its definition says, in double precision.
fn by_definition(routing: &Routing, logits: &[f32], bias: Option<&[f32]>) -> (Vec<i32>, Vec<f64>) {
    let logits: Vec<f64> = logits.iter().map(|&l| l as f64).collect();
    let softmax = |of: &[f64]| -> Vec<f64> {
        let max = of.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = of.iter().map(|l| (l - max).exp()).sum();
        of.iter().map(|l| (l - max).exp() / sum).collect()
    };
    // Scores to choose by, weights, groups and how many stay, number of group members that are summed, renormalize.
    let (scores, weights, (groups, keep), summed, renormalize) = match routing.rule {
        Rule::Softmax { renormalize } => (logits.clone(), softmax(&logits), (1, 1), 1, renormalize),
        Rule::GroupedSoftmax { groups, keep, renormalize } => {
            (softmax(&logits), softmax(&logits), (groups, keep), 1, renormalize)
        }
        Rule::BiasedSigmoid { groups, keep, renormalize } => {
            let s: Vec<f64> = logits.iter().map(|l| 1.0 / (1.0 + (-l).exp())).collect();
            let c = s.iter().enumerate().map(|(e, s)| s + bias.map_or(0.0, |b| b[e] as f64)).collect();
            (c, s, (groups, keep), 2, renormalize)
        }
        Rule::TopKSoftmax => (logits.clone(), softmax(&logits), (1, 1), 1, true),
        _ => panic!("no definition of this rule here"),
    };
    let size = scores.len() / groups;
    let falling = |of: &dyn Fn(usize) -> f64, n: usize| {
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|&a, &b| of(b).total_cmp(&of(a)));
        order
    };
    let group_score = |g: usize| {
        let order = falling(&|i| scores[g * size + i], size);
        order.iter().take(summed).map(|&i| scores[g * size + i]).sum::<f64>()
    };
    let kept: Vec<usize> = falling(&group_score, groups).into_iter().take(keep).collect();
    let mut chosen: Vec<usize> = falling(&|e| scores[e], scores.len());
    chosen.retain(|e| kept.contains(&(e / size)));
    chosen.truncate(routing.top_k);
    chosen.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]).then(a.cmp(&b)));
    let sum: f64 = if renormalize { chosen.iter().map(|&e| weights[e]).sum() } else { 1.0 };
    (
        chosen.iter().map(|&e| e as i32).collect(),
        chosen.iter().map(|&e| weights[e] / sum * routing.scale as f64).collect(),
    )
}

/// Numbers that look random in -1..1, the same in each run.
struct Numbers(u32);

impl Numbers {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.0 >> 8) as f32 / (1 << 23) as f32 - 1.0
    }
}

#[test]
fn rules_do_what_their_definitions_say() {
    let mut numbers = Numbers(1);
    for (experts, groups, keep, top_k) in [
        (8, 1, 1, 2),
        (9, 3, 2, 4),
        (64, 8, 3, 6),
        (256, 8, 4, 8),
        (160, 8, 3, 6),
        (512, 1, 1, 10),
        (12, 6, 6, 12),
        (1, 1, 1, 1),
    ] {
        let mut rules = vec![Rule::TopKSoftmax];
        for renormalize in [false, true] {
            rules.push(Rule::Softmax { renormalize });
            rules.push(Rule::GroupedSoftmax { groups, keep, renormalize });
            rules.push(Rule::BiasedSigmoid { groups, keep, renormalize });
        }
        for (rule, scale) in rules.into_iter().flat_map(|r| [(r.clone(), 1.0), (r, 2.5)]) {
            let routing = Routing { top_k, rule, scale };
            routing.check(experts).unwrap();
            for round in 0..50 {
                let spread = [0.5, 3.0, 20.0][round % 3];
                let logits: Vec<f32> = (0..experts).map(|_| numbers.next() * spread).collect();
                let bias: Vec<f32> = (0..experts).map(|_| numbers.next() - 0.5).collect();
                let bias = (round % 2 == 0).then_some(&bias[..]);
                let (ids, weights) = route(&routing, &logits, bias);
                let (want_ids, want) = by_definition(&routing, &logits, bias);
                // Scores closer than single precision may change places, or make way for each other.
                if ids != want_ids {
                    let gap = want.iter().zip(&weights).map(|(a, b)| (a - *b as f64).abs()).fold(0.0, f64::max);
                    assert!(gap < 1e-5 && spread == 20.0, "{routing:?}: {ids:?} for {want_ids:?}, {gap}");
                }
                for (got, want) in weights.iter().zip(&want) {
                    assert!((*got as f64 - want).abs() <= 2e-6 * scale as f64, "{routing:?}: {got} for {want}");
                }
                assert!(weights.is_sorted_by(|a, b| a >= b));
            }
        }
    }
}

fn assert_close(got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    assert!(got.iter().zip(want).all(|(g, w)| (*g as f64 - w).abs() < 2e-6), "{got:?} for {want:?}");
}

#[test]
fn deepseek_v2_keeps_the_groups_of_the_largest_probability() {
    // Probabilities 0.30 0.02 | 0.20 0.19 | 0.25 0.04: the groups of 0.30 and 0.25 stay, so 0.20 and 0.19 are out.
    let p = [0.30f64, 0.02, 0.20, 0.19, 0.25, 0.04];
    let logits = p.map(|p| p.ln() as f32);
    let rule = Rule::GroupedSoftmax { groups: 3, keep: 2, renormalize: false };
    let (ids, weights) = route(&Routing { top_k: 3, rule, scale: 16.0 }, &logits, None);
    assert_eq!(ids, [0, 4, 5]);
    assert_close(&weights.iter().map(|w| w / 16.0).collect::<Vec<_>>(), &[0.30, 0.25, 0.04]);
    // "greedy" is a single group.
    let rule = Rule::GroupedSoftmax { groups: 1, keep: 1, renormalize: true };
    let (ids, weights) = route(&Routing { top_k: 3, rule, scale: 1.0 }, &logits, None);
    assert_eq!(ids, [0, 4, 2]);
    assert_close(&weights, &[0.4, 0.25 / 0.75, 0.2 / 0.75]);
}

#[test]
fn dropped_groups_stay_out_even_when_all_scores_are_negative() {
    // Sums of two: -1.0, -0.6, -1.4. The middle group stays; an expert of 0 elsewhere, as a mask of 0 gives, would win.
    let bias = [-1.0, -1.0, -0.8, -0.8, -1.2, -1.2];
    let rule = Rule::BiasedSigmoid { groups: 3, keep: 1, renormalize: true };
    let (ids, weights) = route(&Routing { top_k: 2, rule, scale: 2.0 }, &[0.0; 6], Some(&bias));
    assert_eq!(ids, [2, 3]);
    assert_close(&weights, &[1.0, 1.0]);
}

#[test]
fn minimax_chooses_with_the_bias_and_weighs_without() {
    let s = [0.9f64, 0.5, 0.6, 0.2];
    let logits = s.map(|s| (s / (1.0 - s)).ln() as f32);
    let rule = Rule::BiasedSigmoid { groups: 1, keep: 1, renormalize: true };
    let routing = Routing { top_k: 2, rule, scale: 1.0 };
    // With bias: 0.4, 0.5, 0.6, 1.0. The highest score has the lower weight and comes last.
    let (ids, weights) = route(&routing, &logits, Some(&[-0.5, 0.0, 0.0, 0.8]));
    assert_eq!(ids, [2, 3]);
    assert_close(&weights, &[0.75, 0.25]);
    let (ids, weights) = route(&routing, &logits, None);
    assert_eq!(ids, [0, 2]);
    assert_close(&weights, &[0.6, 0.4]);
}

#[test]
fn gpt_oss_takes_the_softmax_of_the_chosen_only() {
    let logits = [0.0, 2f32.ln(), 50f32.ln(), 6f32.ln()];
    let (ids, weights) = route(&Routing { top_k: 2, rule: Rule::TopKSoftmax, scale: 1.0 }, &logits, None);
    assert_eq!(ids, [2, 3]);
    assert_close(&weights, &[50.0 / 56.0, 6.0 / 56.0]);
    let (ids, _) = route(&Routing { top_k: 4, rule: Rule::TopKSoftmax, scale: 1.0 }, &[-1e4, 1e4, 0.0, 1.0], None);
    // All but one weight underflow to zero: equal weights, so by rising id.
    assert_eq!(ids, [1, 0, 2, 3]);
}

fn all_rules() -> Vec<Rule> {
    vec![
        Rule::Softmax { renormalize: true },
        Rule::Softmax { renormalize: false },
        Rule::GroupedSoftmax { groups: 2, keep: 1, renormalize: false },
        Rule::BiasedSigmoid { groups: 1, keep: 1, renormalize: true },
        Rule::BiasedSigmoid { groups: 2, keep: 1, renormalize: false },
        Rule::TopKSoftmax,
    ]
}

#[test]
fn equal_scores_go_to_the_lower_ids() {
    for rule in all_rules() {
        let (ids, weights) = route(&Routing { top_k: 3, rule: rule.clone(), scale: 1.0 }, &[0.25; 8], None);
        assert_eq!(ids, [0, 1, 2], "{rule:?}");
        assert!(weights.iter().all(|&w| w == weights[0]));
    }
}

#[test]
fn nan_loses_and_shows_up_in_the_weights_that_depend_on_it() {
    for rule in all_rules() {
        let routing = Routing { top_k: 2, rule: rule.clone(), scale: 1.0 };
        let (ids, weights) = route(&routing, &[f32::NAN, 1.0, 3.0, 2.0, 0.0, 0.0, 0.0, 0.0], None);
        assert_eq!(ids, [2, 3], "{rule:?}");
        let over_all = matches!(rule, Rule::Softmax { renormalize: false } | Rule::GroupedSoftmax { .. });
        assert_eq!(weights.iter().any(|w| w.is_nan()), over_all, "{rule:?}: {weights:?}");
        let (ids, weights) = route(&routing, &[f32::NAN; 8], None);
        assert_eq!(ids, [0, 1], "{rule:?}");
        assert!(weights.iter().all(|w| w.is_nan()), "{rule:?}");
        for odd in [f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
            let (ids, _) = route(&routing, &[odd, 0.0, 0.5, odd, 1.0, 1.0, 1.0, 1.0], None);
            assert!(ids.iter().all(|id| (0..8).contains(id)) && ids[0] != ids[1], "{rule:?} {odd}");
        }
    }
}

#[test]
fn slots_without_an_expert_are_empty_and_check_tells_beforehand() {
    for rule in all_rules() {
        let routing = Routing { top_k: 5, rule: rule.clone(), scale: 1.0 };
        let grouped = matches!(rule, Rule::GroupedSoftmax { .. } | Rule::BiasedSigmoid { groups: 2, .. });
        assert!(routing.check(4).unwrap_err().to_string().contains("top_k is 5"), "{rule:?}");
        let (ids, weights) = route(&routing, &[0.1, 0.2, 0.3, 0.4], None);
        let filled = if grouped { 2 } else { 4 };
        assert!(
            ids[..filled].iter().all(|&id| id >= 0) && ids[filled..].iter().all(|&id| id == -1),
            "{rule:?} {ids:?}"
        );
        assert!(weights[filled..].iter().all(|&w| w == 0.0));
        assert_eq!(route(&routing, &[], None), (vec![-1; 5], vec![0.0; 5]));
    }
    let refuses = |top_k, rule, scale, says: &str| {
        let message = Routing { top_k, rule, scale }.check(8).unwrap_err().to_string();
        assert!(message.contains("8 experts") && message.contains(says), "{message}");
    };
    let grouped = |groups, keep| Rule::BiasedSigmoid { groups, keep, renormalize: true };
    refuses(0, Rule::TopKSoftmax, 1.0, "top_k is 0");
    refuses(2, grouped(3, 1), 1.0, "3 groups");
    refuses(2, grouped(0, 0), 1.0, "0 groups");
    refuses(2, grouped(4, 5), 1.0, "keeps 5 of 4");
    refuses(3, grouped(4, 1), 1.0, "2 experts to choose from");
    refuses(2, Rule::TopKSoftmax, f32::NAN, "NaN");
    Routing { top_k: 2, rule: grouped(4, 1), scale: 1.0 }.check(8).unwrap();
}
