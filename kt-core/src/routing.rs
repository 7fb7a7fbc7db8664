//! How a router's logits become experts and weights: one rule per family, as plain functions on logits.

use std::ops::Range;

use crate::activation::{exp, sigmoid};
use crate::error::{Error, Result};

/// How the router of a layer chooses experts. See [`Routing::route`].
#[derive(Debug, Clone, PartialEq)]
pub struct Routing {
    /// Experts per token.
    pub top_k: usize,
    /// The family's rule.
    pub rule: Rule,
    /// Factor on every weight (`routed_scaling_factor`); 1 where a family has none.
    pub scale: f32,
}

/// A family's rule for choosing experts and their weights.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Rule {
    /// Softmax over all experts, the `top_k` largest, divided by their sum when `renormalize` (Qwen3-MoE, Qwen3-Next,
    /// Qwen3.5-MoE, Mixtral).
    Softmax {
        /// Divide the chosen weights by their sum.
        renormalize: bool,
    },
    /// Softmax; groups scored by their largest probability, the best `keep` of `groups` stay; not renormalized unless told
    /// (DeepSeek-V2).
    GroupedSoftmax {
        /// Number of groups of consecutive experts.
        groups: usize,
        /// Groups that stay.
        keep: usize,
        /// Divide the chosen weights by their sum.
        renormalize: bool,
    },
    /// Sigmoid plus a correction bias for choosing only; groups scored by the sum of their two largest; weights are the
    /// sigmoids (DeepSeek-V3, Kimi-K2, GLM-4-MoE with `groups` 1; MiniMax-M2 with `groups` 1 and `renormalize`).
    BiasedSigmoid {
        /// Number of groups of consecutive experts.
        groups: usize,
        /// Groups that stay.
        keep: usize,
        /// Divide the chosen weights by their sum (+ 1e-20).
        renormalize: bool,
    },
    /// The `top_k` largest logits, then softmax over those (gpt-oss; its router's bias is already in the logits).
    TopKSoftmax,
}

impl Routing {
    /// Checks that the rule can be applied to a layer of that many experts; [`Routing::route`] then fills every slot.
    ///
    /// # Errors
    /// [`Error::Invalid`]: `top_k` of 0 or more than the kept groups hold, groups that do not divide the experts, a factor that
    /// is no finite number.
    pub fn check(&self, experts: usize) -> Result<()> {
        let invalid = |what: String| Err(Error::Invalid(format!("routing over {experts} experts: {what}")));
        let mut choice = experts;
        if let Rule::GroupedSoftmax { groups, keep, .. } | Rule::BiasedSigmoid { groups, keep, .. } = self.rule {
            if groups == 0 || !experts.is_multiple_of(groups) {
                return invalid(format!("{groups} groups do not divide them"));
            }
            if keep == 0 || keep > groups {
                return invalid(format!("keeps {keep} of {groups} groups"));
            }
            choice = experts / groups * keep;
        }
        if self.top_k == 0 || self.top_k > choice {
            return invalid(format!("top_k is {}, with {choice} experts to choose from", self.top_k));
        }
        if !self.scale.is_finite() {
            return invalid(format!("the factor on the weights is {}", self.scale));
        }
        Ok(())
    }

    /// Chooses the experts of one token: `ids` and `weights` (`[top_k]`) by falling weight, equal ones by rising id.
    ///
    /// `logits: [experts]` are the router's outputs; `bias: [experts]` is the correction bias of [`Rule::BiasedSigmoid`],
    /// which other rules ignore. Choosing prefers higher scores and, among equals, lower ids. A NaN score loses against every
    /// number. A NaN logit makes those weights NaN that depend on it; nothing panics. Slots that cannot be filled (see
    /// [`Routing::check`]) get id -1 and weight 0.
    pub fn route(&self, logits: &[f32], bias: Option<&[f32]>, ids: &mut [i32], weights: &mut [f32]) {
        ids.fill(-1);
        weights.fill(0.0);
        let slots = self.top_k.min(ids.len()).min(weights.len());
        let (ids, weights) = (&mut ids[..slots], &mut weights[..slots]);
        let corrected = |e: usize| sigmoid(logits[e]) + bias.and_then(|b| b.get(e)).copied().unwrap_or(0.0);
        // Softmax is monotone: choosing by logits is choosing by probability, without ties from rounding.
        let chosen = match self.rule {
            Rule::Softmax { .. } | Rule::TopKSoftmax => choose(logits.len(), None, |e| logits[e], ids, weights),
            Rule::GroupedSoftmax { groups, keep, .. } => {
                let groups = Groups::score(logits.len(), groups, keep, |group| largest(group.map(|e| logits[e])));
                choose(logits.len(), groups, |e| logits[e], ids, weights)
            }
            Rule::BiasedSigmoid { groups, keep, .. } => {
                let groups = Groups::score(logits.len(), groups, keep, |group| two_largest(group.map(corrected)));
                choose(logits.len(), groups, corrected, ids, weights)
            }
        };
        let (ids, weights) = (&mut ids[..chosen], &mut weights[..chosen]);
        self.weigh(logits, ids, weights);
        // The order of the scores is that of the weights, but for a correction bias and for rounding.
        for i in 1..chosen {
            let (id, weight) = (ids[i], weights[i]);
            let before = (0..i).find(|&j| beats(weight, weights[j]) || (!beats(weights[j], weight) && id < ids[j]));
            if let Some(j) = before {
                ids[j..=i].rotate_right(1);
                weights[j..=i].rotate_right(1);
            }
        }
    }

    /// Fills the weights of the chosen experts.
    fn weigh(&self, logits: &[f32], ids: &[i32], weights: &mut [f32]) {
        let logit = |id: i32| logits[id as usize];
        let divisor = match self.rule {
            Rule::Softmax { renormalize } | Rule::GroupedSoftmax { renormalize, .. } if !renormalize => {
                let max = largest(logits.iter().copied());
                for (w, &id) in weights.iter_mut().zip(ids) {
                    *w = exp(logit(id) - max);
                }
                logits.iter().map(|l| exp(l - max)).sum()
            }
            // The sum over all experts cancels: only the chosen ones count.
            Rule::Softmax { .. } | Rule::GroupedSoftmax { .. } | Rule::TopKSoftmax => {
                let max = largest(ids.iter().map(|&id| logit(id)));
                for (w, &id) in weights.iter_mut().zip(ids) {
                    *w = exp(logit(id) - max);
                }
                weights.iter().sum()
            }
            Rule::BiasedSigmoid { renormalize, .. } => {
                for (w, &id) in weights.iter_mut().zip(ids) {
                    *w = sigmoid(logit(id));
                }
                if renormalize { weights.iter().sum::<f32>() + 1e-20 } else { 1.0 }
            }
        };
        for w in weights {
            *w = *w / divisor * self.scale;
        }
    }
}

/// Is `a` the better score? A number is better than NaN.
#[inline(always)]
fn beats(a: f32, b: f32) -> bool {
    a > b || (b.is_nan() && !a.is_nan())
}

fn largest(values: impl Iterator<Item = f32>) -> f32 {
    values.fold(f32::NAN, f32::max)
}

fn two_largest(values: impl Iterator<Item = f32>) -> f32 {
    let (mut first, mut second) = (f32::NAN, f32::NAN);
    for v in values {
        if beats(v, first) {
            (first, second) = (v, first);
        } else if beats(v, second) {
            second = v;
        }
    }
    if second.is_nan() { first } else { first + second }
}

/// Groups of consecutive experts, of which some were kept.
struct Groups {
    size: usize,
    kept: Vec<bool>,
}

impl Groups {
    /// Keeps the `keep` best groups; `None` when that is all of them.
    fn score(experts: usize, groups: usize, keep: usize, score: impl Fn(Range<usize>) -> f32) -> Option<Self> {
        if keep >= groups {
            return None;
        }
        let size = experts.div_ceil(groups);
        let scores: Vec<f32> =
            (0..groups).map(|g| score((g * size).min(experts)..((g + 1) * size).min(experts))).collect();
        let better = |g: usize| {
            scores.iter().enumerate().filter(|&(o, &s)| beats(s, scores[g]) || (o < g && !beats(scores[g], s))).count()
        };
        Some(Groups { size, kept: (0..groups).map(|g| better(g) < keep).collect() })
    }
}

/// Writes the experts of highest score, best first, and their scores; returns how many there are.
fn choose(
    experts: usize,
    groups: Option<Groups>,
    score: impl Fn(usize) -> f32,
    ids: &mut [i32],
    scores: &mut [f32],
) -> usize {
    let mut chosen = 0;
    for e in (0..experts).filter(|e| groups.as_ref().is_none_or(|g| g.kept[e / g.size])) {
        let s = score(e);
        if chosen < ids.len() {
            chosen += 1;
        } else if chosen == 0 || !beats(s, scores[chosen - 1]) {
            continue;
        }
        // Experts come by rising id, so an equal score stays behind.
        let mut at = chosen - 1;
        while at > 0 && beats(s, scores[at - 1]) {
            (ids[at], scores[at]) = (ids[at - 1], scores[at - 1]);
            at -= 1;
        }
        (ids[at], scores[at]) = (e as i32, s);
    }
    chosen
}
