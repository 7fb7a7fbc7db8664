//! The table of model families: what their tensors are called, which layers hold experts, how they route.
//!
//! A new family is a new row. A row gives the names of Hugging Face directories; GGUF files use one scheme for all families
//! (`blk.{i}.ffn_gate_exps.weight` …), so that there a row only says what the metadata leaves open. [`Names`] spells the tensors
//! of one checkpoint, whichever its container.

use serde_json::Value;

use super::{Metadata, WeightSource};
use crate::activation::Activation;
use crate::layer::Proj;
use crate::routing::{Routing, Rule};

/// How the routed experts' tensors are named, after the layer's prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertNames {
    /// One linear layer per expert and projection: `{stem}.{e}.{gate}`, … (gate, up, down), to which `.weight` or a quantized
    /// format's suffix is added.
    Each(&'static str, [&'static str; 3]),
    /// `{stem}.gate_up_proj`: `[experts, 2 * intermediate, hidden]`, gate's rows first, and `{stem}.down_proj`:
    /// `[experts, hidden, intermediate]`. Where they are absent, names as in `Each` are used (FP8 variants have those).
    Packed(&'static str, [&'static str; 3]),
    /// As `Packed`, but the rows of gate and up alternate, there are biases (`gate_up_proj_bias`, `down_proj_bias`), and weights are
    /// MXFP4 (`gate_up_proj_blocks` and `gate_up_proj_scales`, …), or floats with inputs first (`gate_up_proj`:
    /// `[experts, hidden, 2 * intermediate]`).
    Alternating(&'static str),
}

/// Which layers hold experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blocks {
    /// All.
    Every,
    /// Those from `first_k_dense_replace` on that `moe_layer_freq` and `mlp_layer_types` do not exclude.
    AfterDense,
    /// Those with `(i + 1) % decoder_sparse_step == 0` that `mlp_only_layers` does not list.
    SparseStep,
}

/// A family's routing rule, before the numbers of a checkpoint's config.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleKind {
    /// [`Rule::Softmax`].
    Softmax,
    /// [`Rule::GroupedSoftmax`], or [`Rule::Softmax`] where `topk_method` is `greedy`.
    GroupedSoftmax,
    /// [`Rule::BiasedSigmoid`].
    BiasedSigmoid,
    /// [`Rule::TopKSoftmax`].
    TopKSoftmax,
    /// A rule that [`Routing`] does not have yet (DeepSeek-V4: square root of softplus, and tables of token ids).
    Unknown,
}

/// Whether the chosen weights are divided by their sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renormalize {
    /// Whatever the checkpoint says.
    Always,
    /// As `norm_topk_prob` or `expert_weights_norm` says; this where the key is absent (Hugging Face, GGUF).
    Unless(bool, bool),
}

impl Renormalize {
    fn resolve(self, said: Option<bool>, gguf: bool) -> bool {
        match self {
            Renormalize::Always => true,
            Renormalize::Unless(hugging_face, in_gguf) => said.unwrap_or(if gguf { in_gguf } else { hugging_face }),
        }
    }
}

/// One row of the table.
#[derive(Debug)]
pub struct Family {
    /// `model_type` values of `config.json`.
    pub model_types: &'static [&'static str],
    /// `general.architecture` values of GGUF files.
    pub architectures: &'static [&'static str],
    /// What stands before a layer's index; the first that a checkpoint uses counts.
    pub prefixes: &'static [&'static str],
    /// Routed experts.
    pub experts: ExpertNames,
    /// The router's linear layer.
    pub router: &'static str,
    /// The router's correction bias.
    pub correction_bias: Option<&'static str>,
    /// The shared expert: what stands before its projections, and gate, up and down.
    pub shared: Option<(&'static str, [&'static str; 3])>,
    /// The linear layer `[1, hidden]` whose sigmoid weighs the shared expert.
    pub shared_gate: Option<&'static str>,
    /// Config key of the intermediate size.
    pub intermediate_key: &'static str,
    /// Which layers hold experts.
    pub blocks: Blocks,
    /// Routing rule.
    pub rule: RuleKind,
    /// Whether the chosen weights are divided by their sum.
    pub renormalize: Renormalize,
    /// Activation rule.
    pub activation: Activation,
}

/// Config keys of the number of experts, any of which may stand for it.
pub(crate) const EXPERTS_KEYS: &[&str] = &["num_experts", "n_routed_experts", "num_local_experts"];
/// Config keys of the number of experts per token.
pub(crate) const TOP_K_KEYS: &[&str] = &["num_experts_per_tok", "num_experts_per_token"];

const PROJ: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
const W123: [&str; 3] = ["w1", "w3", "w2"];
const MODEL: &[&str] = &["model.layers.", "language_model.model.layers.", "model.language_model.layers."];

/// Names as in Qwen3-MoE: the starting point of most rows.
const QWEN: Family = Family {
    model_types: &["qwen3_moe"],
    architectures: &["qwen3moe"],
    prefixes: MODEL,
    experts: ExpertNames::Each("mlp.experts", PROJ),
    router: "mlp.gate",
    correction_bias: None,
    shared: None,
    shared_gate: None,
    intermediate_key: "moe_intermediate_size",
    blocks: Blocks::SparseStep,
    rule: RuleKind::Softmax,
    renormalize: Renormalize::Unless(false, true),
    activation: Activation::SiluMul,
};

/// With a gated shared expert, as from Qwen2-MoE on.
const QWEN_SHARED: Family =
    Family { shared: Some(("mlp.shared_expert", PROJ)), shared_gate: Some("mlp.shared_expert_gate"), ..QWEN };

/// Names as in DeepSeek-V3.
const DEEPSEEK: Family = Family {
    model_types: &["deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25"],
    architectures: &["deepseek2"],
    correction_bias: Some("mlp.gate.e_score_correction_bias"),
    shared: Some(("mlp.shared_experts", PROJ)),
    blocks: Blocks::AfterDense,
    rule: RuleKind::BiasedSigmoid,
    renormalize: Renormalize::Unless(true, false),
    ..QWEN
};

/// Names as in Mixtral.
const MIXTRAL: Family = Family {
    model_types: &["mixtral"],
    architectures: &["llama"],
    experts: ExpertNames::Each("block_sparse_moe.experts", W123),
    router: "block_sparse_moe.gate",
    intermediate_key: "intermediate_size",
    blocks: Blocks::Every,
    renormalize: Renormalize::Always,
    ..QWEN
};

/// The table.
pub static FAMILIES: &[Family] = &[
    QWEN,
    Family {
        model_types: &["qwen2_moe"],
        architectures: &["qwen2moe"],
        renormalize: Renormalize::Unless(false, false),
        ..QWEN_SHARED
    },
    Family {
        model_types: &["qwen3_next"],
        architectures: &["qwen3next"],
        renormalize: Renormalize::Unless(true, true),
        ..QWEN_SHARED
    },
    Family {
        model_types: &["qwen3_5_moe", "qwen3_5_moe_text"],
        architectures: &["qwen35moe"],
        experts: ExpertNames::Packed("mlp.experts", PROJ),
        blocks: Blocks::Every,
        renormalize: Renormalize::Always,
        ..QWEN_SHARED
    },
    DEEPSEEK,
    Family {
        model_types: &["deepseek_v2"],
        architectures: &[],
        correction_bias: None,
        rule: RuleKind::GroupedSoftmax,
        renormalize: Renormalize::Unless(false, false),
        ..DEEPSEEK
    },
    Family { model_types: &["glm4_moe", "glm4_moe_lite", "glm_moe_dsa"], architectures: &["glm4moe"], ..DEEPSEEK },
    MIXTRAL,
    Family {
        model_types: &["minimax_m2"],
        architectures: &["minimax-m2"],
        correction_bias: Some("block_sparse_moe.e_score_correction_bias"),
        rule: RuleKind::BiasedSigmoid,
        ..MIXTRAL
    },
    Family {
        model_types: &["gpt_oss"],
        architectures: &["gpt-oss"],
        experts: ExpertNames::Alternating("mlp.experts"),
        router: "mlp.router",
        rule: RuleKind::TopKSoftmax,
        activation: Activation::GptOss { alpha: 1.702, limit: 7.0 },
        ..MIXTRAL
    },
    Family {
        model_types: &["deepseek_v4"],
        architectures: &[],
        prefixes: &["layers.", "model.layers."],
        experts: ExpertNames::Each("ffn.experts", W123),
        router: "ffn.gate",
        correction_bias: Some("ffn.gate.bias"),
        shared: Some(("ffn.shared_experts", W123)),
        blocks: Blocks::Every,
        rule: RuleKind::Unknown,
        activation: Activation::ClampedSiluMul { limit: 10.0 },
        ..DEEPSEEK
    },
];

/// The row of a `model_type`.
pub fn by_model_type(name: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|f| f.model_types.contains(&name))
}

/// The row of a GGUF architecture.
pub fn by_architecture(name: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|f| f.architectures.contains(&name))
}

/// The row of a checkpoint's model: by its `model_type` or that of its `text_config`, or by its architecture.
pub fn by_metadata(metadata: &Metadata) -> Option<&'static Family> {
    match metadata {
        Metadata::HuggingFace(config) => {
            let known = |config: &Value| by_model_type(config.get("model_type")?.as_str()?);
            known(config).or_else(|| known(config.get("text_config")?))
        }
        Metadata::Gguf(_) => by_architecture(metadata.family()?),
    }
}

/// All known `model_type`s.
pub fn model_types() -> Vec<&'static str> {
    FAMILIES.iter().flat_map(|f| f.model_types).copied().collect()
}

/// All known GGUF architectures.
pub fn architectures() -> Vec<&'static str> {
    FAMILIES.iter().flat_map(|f| f.architectures).copied().collect()
}

/// A count in a config, under the first of several keys.
pub(crate) fn count(config: &Value, keys: &[&str]) -> Option<usize> {
    keys.iter().find_map(|k| config.get(k)?.as_u64()).and_then(|v| usize::try_from(v).ok())
}

impl Family {
    /// Whether layer `index` holds experts, by the config.
    pub fn holds_experts(&self, config: &Value, index: usize) -> bool {
        let list = |key: &str| config.get(key).and_then(Value::as_array);
        match self.blocks {
            Blocks::Every => true,
            Blocks::AfterDense => {
                let listed = match (list("mlp_layer_types"), list("moe_layer_freq")) {
                    (Some(types), _) => types.get(index).is_none_or(|t| t.as_str() != Some("dense")),
                    (_, Some(flags)) => flags.get(index).is_none_or(|f| f.as_u64() != Some(0)),
                    _ => index.is_multiple_of(count(config, &["moe_layer_freq"]).unwrap_or(1).max(1)),
                };
                listed && index >= count(config, &["first_k_dense_replace"]).unwrap_or(0)
            }
            Blocks::SparseStep => {
                let step = count(config, &["decoder_sparse_step"]).unwrap_or(1).max(1);
                let dense = list("mlp_only_layers").is_some_and(|l| l.iter().any(|i| i.as_u64() == Some(index as u64)));
                index.checked_add(1).is_some_and(|i| i.is_multiple_of(step)) && !dense
            }
        }
    }

    /// The routing rule with a config's numbers. Absent keys: one group, factor 1. `None` for rules that are not known here.
    pub fn routing(&self, config: &Value, top_k: usize) -> Option<Routing> {
        let groups = count(config, &["n_group"]).filter(|&g| g > 0).unwrap_or(1);
        let keep = count(config, &["topk_group"]).filter(|&g| g > 0).unwrap_or(groups);
        let said = config.get("norm_topk_prob").and_then(Value::as_bool);
        let renormalize = self.renormalize.resolve(said, false);
        let scale = config.get("routed_scaling_factor").and_then(Value::as_f64).unwrap_or(1.0) as f32;
        let greedy = config.get("topk_method").and_then(Value::as_str).is_none_or(|m| m == "greedy");
        let (rule, scale) = match self.rule {
            RuleKind::Softmax => (Rule::Softmax { renormalize }, 1.0),
            RuleKind::GroupedSoftmax if greedy => (Rule::Softmax { renormalize }, scale),
            RuleKind::GroupedSoftmax => (Rule::GroupedSoftmax { groups, keep, renormalize }, scale),
            RuleKind::BiasedSigmoid => (Rule::BiasedSigmoid { groups, keep, renormalize }, scale),
            RuleKind::TopKSoftmax => (Rule::TopKSoftmax, 1.0),
            RuleKind::Unknown => return None,
        };
        Some(Routing { top_k, rule, scale })
    }

    /// The routing rule with the numbers of GGUF metadata; `value` gives those under the architecture's prefix.
    ///
    /// `expert_gating_func`: 1 softmax, 2 sigmoid, 3 softmax over the chosen. Where it is absent or 0, `deepseek2` files are of
    /// before it existed, hence DeepSeek-V2 with softmax; other families follow their row. Other absent keys: one group, factor 1
    /// (also for a factor of 0), renormalized as the row says: Qwen3-MoE and Mixtral always were.
    pub(super) fn gguf_routing<'a>(
        &self,
        value: impl Fn(&str) -> Option<&'a super::metadata::Value>,
        top_k: usize,
    ) -> Option<Routing> {
        let number = |key: &str| value(key).and_then(|v| v.as_usize()).filter(|&n| n > 0);
        let groups = number("expert_group_count").unwrap_or(1);
        let keep = number("expert_group_used_count").unwrap_or(groups);
        let said = value("expert_weights_norm").and_then(|v| v.as_bool());
        let renormalize = self.renormalize.resolve(said, true);
        let kind = match (number("expert_gating_func"), self.rule) {
            (None, RuleKind::BiasedSigmoid) if self.architectures.contains(&"deepseek2") => RuleKind::GroupedSoftmax,
            (None, rule) => rule,
            (Some(1), RuleKind::BiasedSigmoid | RuleKind::GroupedSoftmax) => RuleKind::GroupedSoftmax,
            (Some(1), _) => RuleKind::Softmax,
            (Some(2), _) => RuleKind::BiasedSigmoid,
            (Some(3), _) => RuleKind::TopKSoftmax,
            _ => RuleKind::Unknown,
        };
        let rule = match kind {
            RuleKind::GroupedSoftmax if groups > 1 => Rule::GroupedSoftmax { groups, keep, renormalize },
            RuleKind::Softmax | RuleKind::GroupedSoftmax => Rule::Softmax { renormalize },
            RuleKind::BiasedSigmoid => Rule::BiasedSigmoid { groups, keep, renormalize },
            RuleKind::TopKSoftmax => Rule::TopKSoftmax,
            RuleKind::Unknown => return None,
        };
        let scale = value("expert_weights_scale").and_then(|v| v.as_f64()).filter(|&s| s != 0.0).unwrap_or(1.0) as f32;
        Some(Routing { top_k, rule, scale })
    }

    /// The linear layer of one expert's projection, after the layer's prefix, where each has its own.
    pub fn expert(&self, expert: usize, proj: Proj) -> String {
        let (stem, names) = match self.experts {
            ExpertNames::Each(stem, names) | ExpertNames::Packed(stem, names) => (stem, names),
            ExpertNames::Alternating(stem) => (stem, PROJ),
        };
        format!("{stem}.{expert}.{}", names[proj.index()])
    }

    /// What the names of all routed experts' tensors begin with, after the layer's prefix.
    pub(crate) fn expert_stem(&self) -> &'static str {
        match self.experts {
            ExpertNames::Each(stem, _) | ExpertNames::Packed(stem, _) | ExpertNames::Alternating(stem) => stem,
        }
    }

    /// The prefix that tensors of these names (any order) use.
    pub(crate) fn prefix<'a>(&self, names: impl Iterator<Item = &'a str> + Clone) -> &'static str {
        let used = |p: &&&str| names.clone().any(|n| n.starts_with(**p));
        self.prefixes.iter().find(used).copied().unwrap_or(self.prefixes[0])
    }
}

/// Spells the names of a checkpoint's tensors around its experts, for engines that compute routers and shared experts.
#[derive(Debug, Clone, Copy)]
pub struct Names {
    family: &'static Family,
    /// `None` where tensors are called as in GGUF files.
    prefix: Option<&'static str>,
}

impl Names {
    /// Those of a checkpoint, where its family is known.
    pub fn of(source: &dyn WeightSource) -> Option<Names> {
        let family = by_metadata(source.metadata())?;
        let prefix = match source.metadata() {
            Metadata::HuggingFace(_) => {
                let tensors = source.tensors();
                // kt-kernel's converter renames tensors as GGUF does.
                let renamed = tensors.iter().any(|n| n.starts_with("blk."));
                (!renamed).then(|| family.prefix(tensors.iter().map(String::as_str)))
            }
            Metadata::Gguf(_) => None,
        };
        Some(Names { family, prefix })
    }

    /// The family's row.
    pub fn family(&self) -> &'static Family {
        self.family
    }

    fn spell(&self, layer: usize, hugging_face: &str, gguf: &str) -> String {
        match self.prefix {
            Some(prefix) => format!("{prefix}{layer}.{hugging_face}"),
            None => format!("blk.{layer}.{gguf}"),
        }
    }

    /// The router's matrix, `[experts, hidden]`.
    pub fn router(&self, layer: usize) -> String {
        self.spell(layer, &format!("{}.weight", self.family.router), "ffn_gate_inp.weight")
    }

    /// The bias of the router's logits, `[experts]`: gpt-oss only.
    pub fn router_bias(&self, layer: usize) -> Option<String> {
        let has = self.family.rule == RuleKind::TopKSoftmax;
        has.then(|| self.spell(layer, &format!("{}.bias", self.family.router), "ffn_gate_inp.bias"))
    }

    /// The correction bias of [`Rule::BiasedSigmoid`], `[experts]`, in families that may have one.
    pub fn correction_bias(&self, layer: usize) -> Option<String> {
        self.family.correction_bias.map(|name| self.spell(layer, name, "exp_probs_b.bias"))
    }

    /// A projection of the shared expert (all of them in one), in families that may have one.
    pub fn shared(&self, layer: usize, proj: Proj) -> Option<String> {
        let (stem, names) = self.family.shared?;
        let gguf = format!("ffn_{}_shexp.weight", proj.name());
        Some(self.spell(layer, &format!("{stem}.{}.weight", names[proj.index()]), &gguf))
    }

    /// The matrix `[1, hidden]` whose sigmoid weighs the shared expert, in families that have it.
    pub fn shared_gate(&self, layer: usize) -> Option<String> {
        self.family.shared_gate.map(|name| self.spell(layer, &format!("{name}.weight"), "ffn_gate_inp_shexp.weight"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_name_leads_to_one_row() {
        let mut names: Vec<_> = model_types().into_iter().chain(architectures()).collect();
        names.sort_unstable();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all, "a name stands in two rows");
        for family in
            ["qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe", "mixtral", "minimax_m2", "gpt_oss"]
        {
            assert!(by_model_type(family).is_some(), "{family}");
        }
        let nested = json!({"model_type": "kimi_vision", "text_config": {"model_type": "kimi_k2"}});
        assert!(by_metadata(&Metadata::HuggingFace(nested)).is_some());
        assert!(by_metadata(&Metadata::HuggingFace(json!({"model_type": "bert"}))).is_none());
    }

    #[test]
    fn layers_with_experts_follow_the_config() {
        let held = |family: &str, config: Value| -> Vec<usize> {
            (0..6).filter(|&i| by_model_type(family).unwrap().holds_experts(&config, i)).collect()
        };
        assert_eq!(held("qwen3_moe", json!({"decoder_sparse_step": 2, "mlp_only_layers": [3]})), [1, 5]);
        assert_eq!(held("deepseek_v3", json!({"first_k_dense_replace": 4, "moe_layer_freq": 1})), [4, 5]);
        assert_eq!(held("deepseek_v2", json!({"first_k_dense_replace": 1, "moe_layer_freq": 2})), [2, 4]);
        assert_eq!(held("glm4_moe", json!({"moe_layer_freq": [0, 1, 1, 0, 1, 1]})), [1, 2, 4, 5]);
        assert_eq!(held("glm_moe_dsa", json!({"mlp_layer_types": ["dense", "sparse", "sparse"]})), [1, 2, 3, 4, 5]);
        assert_eq!(held("mixtral", json!({})), [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn rules_take_their_numbers_from_the_config() {
        let rule = |family: &str, config: Value| by_model_type(family).unwrap().routing(&config, 4);
        let is = |rule: Rule, scale: f32| Some(Routing { top_k: 4, rule, scale });
        assert_eq!(rule("qwen3_moe", json!({"norm_topk_prob": true})), is(Rule::Softmax { renormalize: true }, 1.0));
        assert_eq!(rule("qwen3_moe", json!({})), is(Rule::Softmax { renormalize: false }, 1.0));
        assert_eq!(rule("mixtral", json!({"norm_topk_prob": false})), is(Rule::Softmax { renormalize: true }, 1.0));
        let v2 = json!({"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0});
        assert_eq!(rule("deepseek_v2", v2), is(Rule::GroupedSoftmax { groups: 8, keep: 3, renormalize: false }, 16.0));
        assert_eq!(
            rule("deepseek_v2", json!({"topk_method": "greedy"})),
            is(Rule::Softmax { renormalize: false }, 1.0)
        );
        let v3 = json!({"n_group": 8, "topk_group": 4, "norm_topk_prob": true, "routed_scaling_factor": 2.5});
        assert_eq!(rule("deepseek_v3", v3), is(Rule::BiasedSigmoid { groups: 8, keep: 4, renormalize: true }, 2.5));
        assert_eq!(
            rule("minimax_m2", json!({})),
            is(Rule::BiasedSigmoid { groups: 1, keep: 1, renormalize: true }, 1.0)
        );
        assert_eq!(rule("gpt_oss", json!({})), is(Rule::TopKSoftmax, 1.0));
        assert_eq!(rule("deepseek_v4", json!({})), None);
    }

    #[test]
    fn gguf_rules_take_theirs_from_the_metadata() {
        use crate::source::metadata::Value as V;
        let rule = |architecture: &str, pairs: &[(&str, V)]| {
            let value = |key: &str| pairs.iter().find(|p| p.0 == key).map(|p| &p.1);
            by_architecture(architecture).unwrap().gguf_routing(value, 2)
        };
        let is = |rule: Rule, scale: f32| Some(Routing { top_k: 2, rule, scale });
        assert_eq!(rule("qwen3moe", &[]), is(Rule::Softmax { renormalize: true }, 1.0));
        assert_eq!(rule("qwen2moe", &[]), is(Rule::Softmax { renormalize: false }, 1.0));
        assert_eq!(rule("llama", &[]), is(Rule::Softmax { renormalize: true }, 1.0));
        assert_eq!(rule("gpt-oss", &[]), is(Rule::TopKSoftmax, 1.0));
        let old = [("expert_weights_scale", V::Float(16.0))];
        assert_eq!(rule("deepseek2", &old), is(Rule::Softmax { renormalize: false }, 16.0));
        let v3 = [
            ("expert_gating_func", V::Uint(2)),
            ("expert_group_count", V::Uint(8)),
            ("expert_group_used_count", V::Uint(4)),
            ("expert_weights_norm", V::Bool(true)),
            ("expert_weights_scale", V::Float(2.5)),
        ];
        assert_eq!(rule("deepseek2", &v3), is(Rule::BiasedSigmoid { groups: 8, keep: 4, renormalize: true }, 2.5));
        assert_eq!(rule("deepseek2", &[("expert_gating_func", V::Uint(9))]), None);
    }
}
