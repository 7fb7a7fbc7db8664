//! What a model is, read from `config.json` or GGUF metadata and checked.

use std::path::Path;

use anyhow::{Result, bail};
use kt::{Error, Metadata, WeightSource};

use super::{deepseek, qwen3_moe};

/// The shape of a model, whatever its container.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The family as the checkpoint names it: `model_type`, or `general.architecture`.
    pub family: String,
    /// Number of layers.
    pub layers: usize,
    /// Width of the hidden state.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// How keys and values are made.
    pub attention: Attention,
    /// Rotary positions.
    pub rope: Rope,
    /// Epsilon of every RMS norm.
    pub norm_epsilon: f32,
    /// Width of the dense feed-forward layers, where there are any.
    pub dense_intermediate: usize,
    /// Width of the shared experts of an expert layer, all together; 0 where there are none.
    pub shared_intermediate: usize,
    /// The head is the embedding, where the checkpoint has no head of its own.
    pub tied_head: bool,
    /// Positions that the model was made for.
    pub max_positions: Option<usize>,
    /// Tokens that end a text.
    pub stop_ids: Vec<u32>,
}

/// How keys and values are made.
#[derive(Debug, Clone, PartialEq)]
pub enum Attention {
    /// Groups of query heads share a key and value head; each head of q and k is normed.
    Grouped {
        /// Key and value heads.
        kv_heads: usize,
        /// Width of a head.
        head_dim: usize,
    },
    /// Multi-head latent attention: keys and values are expanded from one narrow row per token.
    Latent {
        /// Width of the queries' own narrow row, where there is one.
        q_lora: Option<usize>,
        /// Width of the narrow row of keys and values.
        kv_lora: usize,
        /// Columns of a query or key head without position.
        nope: usize,
        /// Columns of a query or key head with rotary position.
        rope: usize,
        /// Width of a value head.
        value: usize,
    },
}

/// Rotary positions.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Columns that are rotated.
    pub dim: usize,
    /// Base of the frequencies.
    pub theta: f64,
    /// Pairs are neighbours (0, 1), (2, 3) …; otherwise column `i` goes with `i + dim / 2`.
    pub interleaved: bool,
    /// Stretching to longer contexts.
    pub yarn: Option<Yarn>,
}

/// YaRN: low frequencies are stretched by `factor`, high ones stay.
#[derive(Debug, Clone, PartialEq)]
pub struct Yarn {
    /// Context over original context.
    pub factor: f64,
    /// Positions that the model was first trained for.
    pub original_positions: f64,
    /// Rotations within the original context above which a frequency stays.
    pub beta_fast: f64,
    /// Rotations below which it is stretched by the whole factor.
    pub beta_slow: f64,
    /// Factor on cosines and sines.
    pub attention_factor: f64,
    /// Factor on queries besides: its square scales the scores (DeepSeek).
    pub query_factor: f64,
}

/// Reads a model's configuration from a family's keys.
type Reader = fn(&Keys<'_>) -> Result<ModelConfig>;

/// The families that the host runs: `model_type` of a Hugging Face directory, or architecture of a GGUF file.
const FAMILIES: &[(&str, Reader)] = &[
    ("qwen3_moe", qwen3_moe::config),
    ("qwen3moe", qwen3_moe::config),
    ("deepseek_v3", deepseek::config),
    ("kimi_k2", deepseek::config),
    ("deepseek2", deepseek::config),
];

impl ModelConfig {
    /// Reads and checks what a checkpoint says of its model.
    ///
    /// # Errors
    /// A family that the host does not run (the error lists those it does), or a key that is missing or wrong (by name).
    pub fn read(source: &dyn WeightSource) -> Result<Self> {
        let keys = Keys { metadata: source.metadata(), path: source.path() };
        let known = || FAMILIES.iter().map(|f| f.0).collect::<Vec<_>>().join(", ");
        let Some(family) = keys.metadata.family() else {
            bail!(
                keys.wrong(("model_type", "general.architecture"), &format!("is missing; the host runs {}", known()))
            );
        };
        let Some((_, reader)) = FAMILIES.iter().find(|f| f.0 == family) else {
            bail!(
                "{}: the host does not run models of family `{family}`; it runs {}. (The expert layers alone can still be \
                 planned and loaded: `kt plan`.)",
                source.path().display(),
                known()
            );
        };
        let mut config = reader(&keys)?;
        config.stop_ids = stop_ids(source, &keys)?;
        Ok(config)
    }

    /// Width of a query or key head as the cache holds it.
    pub fn key_dim(&self) -> usize {
        match self.attention {
            Attention::Grouped { head_dim, .. } => head_dim,
            Attention::Latent { kv_lora, rope, .. } => kv_lora + rope,
        }
    }

    /// Bytes of a [`Cache`](super::Cache) that holds `positions` tokens: F32 keys and values of every layer, for latent attention
    /// the narrow row and the rotated key.
    pub fn cache_bytes(&self, positions: usize) -> u64 {
        let per_token = match self.attention {
            Attention::Grouped { kv_heads, head_dim } => 2 * kv_heads * head_dim,
            Attention::Latent { kv_lora, rope, .. } => kv_lora + rope,
        };
        (self.layers as u64 * per_token as u64 * 4).saturating_mul(positions as u64)
    }
}

/// Tokens that end a text, from `generation_config.json` (which overrules) or the model's own configuration.
fn stop_ids(source: &dyn WeightSource, keys: &Keys<'_>) -> Result<Vec<u32>> {
    let (json, file) = match keys.metadata {
        Metadata::Gguf(_) => {
            let names = ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"];
            let ids = names.iter().filter_map(|name| Some((name, keys.raw(("", name))?)));
            return ids
                .map(|(name, v)| {
                    let id =
                        v.as_f64().filter(|v| v.fract() == 0.0 && (0.0..u32::MAX as f64).contains(v)).map(|v| v as u32);
                    id.ok_or_else(|| keys.wrong(("", name), "is not a token id").into())
                })
                .collect();
        }
        Metadata::HuggingFace(own) => match source.side_file("generation_config.json")? {
            Some(bytes) => {
                let json: serde_json::Value = serde_json::from_slice(&bytes).map_err(|e| {
                    Error::file(source.path().join("generation_config.json"), format!("not valid JSON: {e}"))
                })?;
                if json.get("eos_token_id").is_some_and(|v| !v.is_null()) {
                    (json, "generation_config.json")
                } else {
                    (own.clone(), "config.json")
                }
            }
            None => (own.clone(), "config.json"),
        },
    };
    let ids = match &json["eos_token_id"] {
        serde_json::Value::Null => vec![],
        serde_json::Value::Array(ids) => ids.iter().map(|v| v.as_u64()).collect(),
        one => vec![one.as_u64()],
    };
    ids.into_iter()
        .map(|id| {
            id.and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
                Error::tensor(source.path().join(file), "eos_token_id", "is neither a token id nor a list of them")
                    .into()
            })
        })
        .collect()
}

/// A key's name in `config.json` and in GGUF metadata (there without the architecture's prefix).
pub type Key<'a> = (&'a str, &'a str);

/// A configuration's keys, read with checks; every error names the key as its container spells it.
pub struct Keys<'a> {
    metadata: &'a Metadata,
    path: &'a Path,
}

/// No dimension of a model is larger: keeps products of two of them far from overflowing.
const MOST: usize = 1 << 24;

impl Keys<'_> {
    /// Whether this is GGUF metadata.
    pub fn is_gguf(&self) -> bool {
        matches!(self.metadata, Metadata::Gguf(_))
    }

    /// The family's name.
    pub fn family(&self) -> String {
        self.metadata.family().unwrap_or_default().to_owned()
    }

    fn spelled(&self, key: Key<'_>) -> String {
        match self.metadata {
            Metadata::HuggingFace(_) => key.0.to_owned(),
            Metadata::Gguf(_) if key.1.starts_with("tokenizer.") || key.1.starts_with("general.") => key.1.to_owned(),
            Metadata::Gguf(_) => format!("{}.{}", self.family(), key.1),
        }
    }

    /// An error about a key.
    pub fn wrong(&self, key: Key<'_>, what: &str) -> Error {
        let file = if self.is_gguf() { self.path.to_owned() } else { self.path.join("config.json") };
        Error::Checkpoint { file, tensor: None, what: format!("key `{}` {what}", self.spelled(key)) }
    }

    fn raw(&self, key: Key<'_>) -> Option<Scalar> {
        match self.metadata {
            Metadata::HuggingFace(json) => {
                let v = key.0.split('.').try_fold(json, |v, part| v.get(part))?;
                Some(match v {
                    serde_json::Value::Null => return None,
                    serde_json::Value::Bool(b) => Scalar::Bool(*b),
                    serde_json::Value::Number(n) => Scalar::Number(n.as_f64()?),
                    serde_json::Value::String(s) => Scalar::Text(s.clone()),
                    _ => Scalar::Other,
                })
            }
            Metadata::Gguf(map) => {
                let v = map.get(&self.spelled(key))?;
                Some(match (v.as_f64(), v.as_bool(), v.as_str()) {
                    (Some(n), ..) => Scalar::Number(n),
                    (_, Some(b), _) => Scalar::Bool(b),
                    (.., Some(s)) => Scalar::Text(s.to_owned()),
                    _ => Scalar::Other,
                })
            }
        }
    }

    /// A count, where the key is there and not null.
    ///
    /// # Errors
    /// It is no whole number in `0..=16777216`.
    pub fn optional_count(&self, key: Key<'_>) -> Result<Option<usize>> {
        let Some(v) = self.raw(key) else { return Ok(None) };
        match v.as_f64().filter(|n| n.fract() == 0.0 && (0.0..=MOST as f64).contains(n)) {
            Some(n) => Ok(Some(n as usize)),
            None => Err(self.wrong(key, &format!("is not a whole number in 0..={MOST}")).into()),
        }
    }

    /// A count of at least 1.
    ///
    /// # Errors
    /// The key is missing or no such number.
    pub fn count(&self, key: Key<'_>) -> Result<usize> {
        match self.optional_count(key)? {
            None => Err(self.wrong(key, "is missing").into()),
            Some(0) => Err(self.wrong(key, "is 0").into()),
            Some(n) => Ok(n),
        }
    }

    /// Number of layers; GGUF counts those of multi-token prediction with them, which are not run.
    ///
    /// # Errors
    /// The key is missing or wrong, or no layer is left.
    pub fn layers(&self) -> Result<usize> {
        let key = ("num_hidden_layers", "block_count");
        let extra = self.optional_count(("", "nextn_predict_layers"))?.unwrap_or(0);
        match self.count(key)?.checked_sub(extra).filter(|&n| n > 0) {
            Some(n) => Ok(n),
            None => {
                Err(self.wrong(key, &format!("counts no layer beyond the {extra} of multi-token prediction")).into())
            }
        }
    }

    /// A finite number, where the key is there and not null.
    ///
    /// # Errors
    /// It is something else.
    pub fn optional_number(&self, key: Key<'_>) -> Result<Option<f64>> {
        let Some(v) = self.raw(key) else { return Ok(None) };
        match v.as_f64().filter(|n| n.is_finite()) {
            Some(n) => Ok(Some(n)),
            None => Err(self.wrong(key, "is not a finite number").into()),
        }
    }

    /// A number above 0.
    ///
    /// # Errors
    /// The key is missing or no such number.
    pub fn positive(&self, key: Key<'_>) -> Result<f64> {
        match self.optional_number(key)? {
            None => Err(self.wrong(key, "is missing").into()),
            Some(n) if n > 0.0 => Ok(n),
            Some(n) => Err(self.wrong(key, &format!("is {n}, must be above 0")).into()),
        }
    }

    /// A text, where the key is there.
    pub fn text(&self, key: Key<'_>) -> Option<String> {
        match self.raw(key) {
            Some(Scalar::Text(t)) => Some(t),
            _ => None,
        }
    }

    /// A switch; absent means off.
    pub fn flag(&self, key: Key<'_>) -> Option<bool> {
        match self.raw(key) {
            Some(Scalar::Bool(b)) => Some(b),
            _ => None,
        }
    }

    /// Whether a missing head means that the embedding is it.
    pub fn tied_head(&self) -> bool {
        self.is_gguf() || self.flag(("tie_word_embeddings", "")) == Some(true)
    }

    /// Refuses a model that has a feature the host does not compute.
    ///
    /// # Errors
    /// The switch is on.
    pub fn refuse_flag(&self, key: Key<'_>) -> Result<()> {
        if self.flag(key) == Some(true) {
            return Err(self.wrong(key, "is true, which the host does not support").into());
        }
        Ok(())
    }

    /// Checks that the feed-forward layers use SiLU (GGUF files do not say).
    ///
    /// # Errors
    /// They use another activation.
    pub fn check_silu(&self) -> Result<()> {
        match self.text(("hidden_act", "")) {
            Some(act) if act != "silu" => {
                Err(self.wrong(("hidden_act", ""), &format!("is `{act}`; the host supports silu")).into())
            }
            _ => Ok(()),
        }
    }

    /// Base and stretching of rotary positions over `dim` columns.
    ///
    /// # Errors
    /// A kind of scaling other than none, default and yarn (by name), or a wrong key.
    pub fn rope(&self, dim: usize, interleaved: bool) -> Result<Rope> {
        if !dim.is_multiple_of(2) {
            return Err(Error::file(self.path, format!("rotary positions over an odd number of columns, {dim}")).into());
        }
        // Newer directories keep scaling, and most of them the base, in `rope_parameters`.
        let section = if self.raw(("rope_parameters", "")).is_some() { "rope_parameters" } else { "rope_scaling" };
        if !self.is_gguf() && self.raw((section, "")).is_some_and(|v| !matches!(v, Scalar::Other)) {
            return Err(self.wrong((section, ""), "is no object").into());
        }
        let named = |name: &str| format!("{section}.{name}");
        let number = |name: &str, gguf: &str| self.optional_number((&named(name), gguf));
        let theta = match self.raw((&named("rope_theta"), "")) {
            Some(_) if !self.is_gguf() => self.positive((&named("rope_theta"), ""))?,
            _ => self.positive(("rope_theta", "rope.freq_base"))?,
        };
        let kinds = [named("rope_type"), named("type")];
        let keys = kinds.iter().map(|k| (k.as_str(), "rope.scaling.type"));
        if let Some(key) = keys.clone().find(|&key| self.raw(key).is_some_and(|v| !matches!(v, Scalar::Text(_)))) {
            return Err(self.wrong(key, "is no text").into());
        }
        let kind = keys.into_iter().find_map(|key| Some((key, self.text(key)?)));
        let yarn = match kind {
            None => None,
            Some((_, kind)) if kind == "default" || kind == "none" => None,
            Some((key, kind)) if kind == "yarn" && theta <= 1.0 => {
                return Err(self
                    .wrong(key, &format!("is yarn, which a base of {theta} has no frequencies for"))
                    .into());
            }
            Some((_, kind)) if kind == "yarn" => {
                let factor = self.positive((&named("factor"), "rope.scaling.factor"))?;
                let original = named("original_max_position_embeddings");
                let original = (original.as_str(), "rope.scaling.original_context_length");
                let original_positions = match self.optional_number(original)? {
                    Some(_) => self.positive(original)?,
                    None => self.positive(("max_position_embeddings", "context_length"))?,
                };
                let growth = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
                let (attention_factor, query_factor) = if self.is_gguf() {
                    let own = number("", "rope.scaling.attn_factor")?.unwrap_or(1.0);
                    // Converters store 0.1 * mscale_all_dim. Where they do, cosines stay unscaled and queries are scaled.
                    match number("", "rope.scaling.yarn_log_multiplier")? {
                        Some(multiplier) => (own, growth(multiplier * 10.0)),
                        None => (own * growth(1.0), 1.0),
                    }
                } else {
                    let all_dim = number("mscale_all_dim", "")?.filter(|&m| m != 0.0);
                    let derived = match (number("mscale", "")?.filter(|&m| m != 0.0), all_dim) {
                        (Some(mscale), Some(all_dim)) => growth(mscale) / growth(all_dim),
                        _ => growth(1.0),
                    };
                    (number("attention_factor", "")?.unwrap_or(derived), all_dim.map_or(1.0, growth))
                };
                Some(Yarn {
                    factor,
                    original_positions,
                    beta_fast: number("beta_fast", "rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                    beta_slow: number("beta_slow", "rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                    attention_factor,
                    query_factor,
                })
            }
            Some((key, kind)) => {
                return Err(self.wrong(key, &format!("is `{kind}`; the host supports none, default and yarn")).into());
            }
        };
        Ok(Rope { dim, theta, interleaved, yarn })
    }
}

/// A value of either container.
enum Scalar {
    Number(f64),
    Bool(bool),
    Text(String),
    Other,
}

impl Scalar {
    fn as_f64(&self) -> Option<f64> {
        match self {
            Scalar::Number(n) => Some(*n),
            _ => None,
        }
    }
}
