//! What the output says of its model: `config.json` with its quantization, and GGUF metadata; each made from the other where the
//! container changes.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::family::{Absent, Kind, Rotary, Whole};
use super::layout::Naming;
use super::values::Pairs;
use crate::error::{Error, Result};
use crate::format::{Format, Group};
use crate::source::metadata::Value as Meta;
use crate::source::model::text;
use crate::source::names::{Blocks, EXPERTS_KEYS, Family, Renormalize, TOP_K_KEYS, count};

/// Linear layers of the output, by what they are stored in.
#[derive(Default)]
pub struct Layers {
    /// Modules of each quantized format.
    pub quantized: BTreeMap<String, (Format, Vec<String>)>,
    /// Modules that are plain numbers.
    pub plain: Vec<String>,
}

impl Layers {
    pub fn add(&mut self, module: &str, format: Format) {
        match format {
            Format::F32 | Format::F16 | Format::Bf16 => self.plain.push(module.to_owned()),
            _ => self.quantized.entry(format.to_string()).or_insert((format, Vec::new())).1.push(module.to_owned()),
        }
    }
}

/// How scales are named where linear layers are of these formats.
pub fn naming(formats: &[Format]) -> Naming {
    let plain = |f: &&Format| matches!(f, Format::F32 | Format::F16 | Format::Bf16);
    let mut quantized = formats.iter().filter(|f| !plain(f)).peekable();
    match quantized.peek().is_some() && quantized.all(|f| *f == Format::Fp8Block) {
        true => Naming::Fp8,
        false => Naming::CompressedTensors,
    }
}

/// `quantization_config`, where anything is quantized.
pub fn quantization(layers: &Layers, naming: Naming) -> Option<Value> {
    if layers.quantized.is_empty() {
        return None;
    }
    if naming == Naming::Fp8 {
        return Some(json!({
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": layers.plain,
        }));
    }
    let most = layers.quantized.values().map(|(_, modules)| modules.len()).max();
    let (mut groups, mut formats, mut by_class) = (Map::new(), Vec::new(), false);
    for (i, (format, modules)) in layers.quantized.values().enumerate() {
        let (layout, weights, inputs) = scheme(*format);
        // The commonest is told by its class; the others by name, which counts first.
        let all = !by_class && Some(modules.len()) == most;
        by_class |= all;
        let targets = if all { json!(["Linear"]) } else { json!(modules) };
        let mut group = json!({
            "targets": targets, "weights": weights, "input_activations": inputs, "output_activations": null,
        });
        if layers.quantized.len() > 1 {
            group["format"] = json!(layout);
        }
        groups.insert(format!("group_{i}"), group);
        formats.push(layout);
    }
    Some(json!({
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": if layers.quantized.len() == 1 { formats[0] } else { "mixed-precision" },
        "config_groups": groups,
        "ignore": layers.plain,
        "kv_cache_scheme": null,
        "global_compression_ratio": null,
    }))
}

/// compressed-tensors' name of a layout, its weights, and how inputs are rounded where the layout is for that.
fn scheme(format: Format) -> (&'static str, Value, Value) {
    let weights = |bits: u32, kind: &str, symmetric: bool, strategy: &str, group: Option<u32>| {
        json!({
            "num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy, "group_size": group,
            "block_structure": null, "dynamic": false, "actorder": null, "observer": "minmax", "observer_kwargs": {},
        })
    };
    let per_token = |kind: &str| {
        let mut inputs = weights(8, kind, true, "token", None);
        inputs["dynamic"] = json!(true);
        inputs["observer"] = Value::Null;
        inputs
    };
    if let Some(group) = format.group() {
        let bits = if format.block_cols() == 2 { 4 } else { 8 };
        let (strategy, size) = match group {
            Group::Row => ("channel", None),
            Group::Of(g) => ("group", Some(g)),
        };
        let mut weights = weights(bits, "int", !format.takes_zero_points(), strategy, size);
        if format.is_ordered() {
            weights["actorder"] = json!("group");
        }
        return match format {
            Format::Int8(Group::Row) => ("int-quantized", weights, per_token("int")),
            Format::Int8(_) => ("int-quantized", weights, Value::Null),
            _ => ("pack-quantized", weights, Value::Null),
        };
    }
    match format {
        Format::Fp8Block => {
            let mut weights = weights(8, "float", true, "block", None);
            weights["block_structure"] = json!([128, 128]);
            let mut inputs = per_token("float");
            inputs["strategy"] = json!("group");
            inputs["group_size"] = json!(128);
            ("float-quantized", weights, inputs)
        }
        Format::Fp8Channel => ("float-quantized", weights(8, "float", true, "channel", None), per_token("float")),
        Format::Nvfp4 => {
            let mut weights = weights(4, "float", true, "tensor_group", Some(16));
            weights["scale_dtype"] = json!("torch.float8_e4m3fn");
            ("nvfp4-pack-quantized", weights, Value::Null)
        }
        _ => {
            let (bits, layout) =
                if format == Format::Mxfp8 { (8, "mxfp8-quantized") } else { (4, "mxfp4-pack-quantized") };
            let mut weights = weights(bits, "float", true, "group", Some(32));
            weights["scale_dtype"] = json!("torch.uint8");
            (layout, weights, Value::Null)
        }
    }
}

/// `quantization_config` of gpt-oss' own layout, where experts are MXFP4 and nothing else is quantized.
pub fn quantized_experts() -> Value {
    let plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"];
    json!({"quant_method": "mxfp4", "modules_to_not_convert": plain})
}

/// A config with the output's quantization in place of the source's; layers of multi-token prediction are not carried.
pub fn requantized(mut config: Value, quantization: Option<Value>) -> Value {
    let clean = |config: &mut Value| {
        let Some(map) = config.as_object_mut() else { return };
        map.remove("quantization_config");
        map.remove("expert_dtype");
        for key in ["num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"] {
            if let Some(extra) = map.get_mut(key) {
                *extra = json!(0);
            }
        }
    };
    clean(&mut config);
    if let Some(text) = config.get_mut("text_config") {
        clean(text);
    }
    if let (Some(map), Some(quantization)) = (config.as_object_mut(), quantization) {
        map.insert("quantization_config".into(), quantization);
    }
    config
}

/// A number that was an F32, with no more digits than it takes.
fn short(v: f64) -> Value {
    format!("{}", v as f32).parse::<f64>().map_or(Value::Null, |v| json!(v))
}

/// What the tensors tell beyond the metadata.
pub struct Seen<'a> {
    pub vocabulary: usize,
    pub tied: bool,
    /// Layers without experts.
    pub dense_layers: Vec<usize>,
    pub layers: usize,
    pub intermediate: usize,
    /// Whether some layer has a tensor of this name.
    pub has: &'a dyn Fn(&str) -> bool,
}

/// `config.json` of a GGUF model.
///
/// # Errors
/// A key that is missing, or that says what no config of the family can.
pub fn from_gguf(
    map: &BTreeMap<String, Meta>,
    (family, whole): (&Family, &Whole),
    seen: &Seen<'_>,
    file: &Path,
) -> Result<Value> {
    let architecture = whole.architecture;
    let get = |key: &str| map.get(&format!("{architecture}.{key}"));
    let fail = |key: &str, what: String| Error::tensor(file, format!("{architecture}.{key}"), what);
    let missing = |key: &str| fail(key, "missing: config.json needs it".into());
    let int = |key: &str| get(key).and_then(Meta::as_usize).ok_or_else(|| missing(key));
    let float = |key: &str| get(key).and_then(Meta::as_f64).map(short).ok_or_else(|| missing(key));
    let mut config = json!({
        "model_type": whole.model_types[0],
        "architectures": [whole.class],
        "hidden_act": "silu",
        "attention_bias": (seen.has)("attn_q.bias"),
        "attention_dropout": 0.0,
        "torch_dtype": "bfloat16",
        "hidden_size": int("embedding_length")?,
        "num_hidden_layers": seen.layers,
        "num_attention_heads": int("attention.head_count")?,
        "num_experts_per_tok": int("expert_used_count")?,
        "intermediate_size": get("feed_forward_length").and_then(Meta::as_usize).unwrap_or(seen.intermediate),
        "rms_norm_eps": float("attention.layer_norm_rms_epsilon")?,
        "rope_theta": get("rope.freq_base").and_then(Meta::as_f64).map_or(json!(10000.0), short),
        "max_position_embeddings": int("context_length")?,
        "vocab_size": seen.vocabulary,
        "tie_word_embeddings": seen.tied,
        "use_cache": true,
    });
    let mut set = |key: &str, value: Value| config[key] = value;
    set(family.intermediate_key, json!(seen.intermediate));
    set(whole.experts, json!(int("expert_count")?));
    for (key, gguf) in [("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")] {
        if let Some(id) = map.get(&format!("tokenizer.ggml.{gguf}_token_id")).and_then(Meta::as_usize) {
            set(key, json!(id));
        }
    }
    for (key, due) in whole.stated {
        if let Some(said) = get(key).and_then(Meta::as_usize).filter(|said| said != due) {
            return Err(fail(
                key,
                format!("is {said}; models of this architecture that become directories have {due}"),
            ));
        }
    }
    let mut scaling = json!({});
    if let Value::Object(implied) = (whole.implied)() {
        for (key, value) in implied {
            match key.as_str() {
                "rope_scaling" => scaling = value,
                _ => set(&key, value),
            }
        }
    }
    let dense = seen.dense_layers.len();
    match family.blocks {
        Blocks::Every if dense > 0 => {
            let what = format!("layers {:?} have no experts, which no config of this family says", seen.dense_layers);
            return Err(fail("expert_count", what));
        }
        Blocks::AfterDense if seen.dense_layers.iter().ne(&Vec::from_iter(0..dense)) => {
            let what =
                format!("layers {:?} have no experts; configs can only say how many of the first", seen.dense_layers);
            return Err(fail("leading_dense_block_count", what));
        }
        Blocks::Every => {}
        Blocks::AfterDense => {
            set("first_k_dense_replace", json!(dense));
            set("num_nextn_predict_layers", json!(0));
        }
        Blocks::SparseStep => {
            set("decoder_sparse_step", json!(1));
            set("mlp_only_layers", json!(seen.dense_layers));
        }
    }
    for (key, tensor) in whole.told_by {
        set(key, json!((seen.has)(tensor)));
    }
    for key in whole.keys {
        let said = get(key.gguf).and_then(Meta::as_f64);
        let said = match key.absent {
            Absent::Refused => said,
            // Files say 0 for what is not there, too.
            Absent::Is(value) => said.filter(|&v| v != 0.0).or(Some(value)),
        };
        let said = said.ok_or_else(|| missing(key.gguf))?;
        set(key.config, if key.kind == Kind::Uint { json!(said as u64) } else { short(said) });
    }
    if let Some(every) = whole.window {
        // A number, or one flag a layer; absent, it is what the family has.
        let pattern = get("attention.sliding_window_pattern");
        let same = match pattern {
            None => true,
            Some(Meta::Array(flags)) => flags
                .iter()
                .take(seen.layers)
                .enumerate()
                .all(|(i, f)| f.as_bool() == Some(!(i + 1).is_multiple_of(every))),
            Some(number) => number.as_usize() == Some(every),
        };
        if !same {
            let what = format!("is {pattern:?}; models of this architecture see all tokens in every layer of {every}");
            return Err(fail("attention.sliding_window_pattern", what));
        }
        set("layer_types", (0..seen.layers).map(|i| layer_type(i, every)).collect());
    }
    if architecture == "deepseek2" {
        latent_from_gguf(&get, &int, &missing, &mut set)?;
    } else {
        let heads = int("attention.head_count")?;
        set("num_key_value_heads", json!(get("attention.head_count_kv").and_then(Meta::as_usize).unwrap_or(heads)));
        let said = get("attention.key_length").and_then(Meta::as_usize).filter(|&n| n > 0);
        let all = said.or(int("embedding_length")?.checked_div(heads)).filter(|&n| n > 0);
        let all = all.ok_or_else(|| missing("attention.key_length"))?;
        set("head_dim", json!(all));
        let rotated = get("rope.dimension_count").and_then(Meta::as_usize).unwrap_or(all);
        match whole.rotary {
            Rotary::Factor(_) => set("partial_rotary_factor", short(rotated as f64 / all as f64)),
            Rotary::Count => set("rotary_dim", json!(rotated)),
            Rotary::All | Rotary::AllCounted if rotated != all => {
                let what = format!("is {rotated} of heads of {all}; models of this family rotate all");
                return Err(fail("rope.dimension_count", what));
            }
            Rotary::All | Rotary::AllCounted => {}
        }
        if let Renormalize::Unless(_, absent) = family.renormalize {
            let said = get("expert_weights_norm").and_then(Meta::as_bool);
            set("norm_topk_prob", json!(said.unwrap_or(absent)));
        }
    }
    match get("rope.scaling.type").and_then(Meta::as_str) {
        None | Some("none") => set("rope_scaling", Value::Null),
        Some("yarn") => {
            let kind = if architecture == "deepseek2" { "type" } else { "rope_type" };
            scaling[kind] = json!("yarn");
            scaling["factor"] = float("rope.scaling.factor")?;
            if let Some(original) = get("rope.scaling.original_context_length").and_then(Meta::as_usize) {
                scaling["original_max_position_embeddings"] = json!(original);
            }
            for (key, gguf) in [("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")] {
                if let Some(v) = get(&format!("rope.scaling.{gguf}")).and_then(Meta::as_f64) {
                    scaling[key] = short(v);
                }
            }
            // Stored as a tenth; cosines stay unscaled then, which is so where both of these are the same.
            if let Some(v) = get("rope.scaling.yarn_log_multiplier").and_then(Meta::as_f64) {
                (scaling["mscale"], scaling["mscale_all_dim"]) = (short(v * 10.0), short(v * 10.0));
            }
            set("rope_scaling", scaling);
        }
        Some(other) => {
            let what = format!("is `{other}`, which a Hugging Face directory is not written with; none and yarn are");
            return Err(fail("rope.scaling.type", what));
        }
    }
    Ok(config)
}

fn layer_type(layer: usize, every: usize) -> &'static str {
    if (layer + 1).is_multiple_of(every) { "full_attention" } else { "sliding_attention" }
}

/// What configs of DeepSeek's models have of their own: latent attention, and routing of which two versions differ.
fn latent_from_gguf<'a>(
    get: &impl Fn(&str) -> Option<&'a Meta>,
    int: &impl Fn(&str) -> Result<usize>,
    missing: &impl Fn(&str) -> Error,
    set: &mut impl FnMut(&str, Value),
) -> Result<()> {
    let sigmoid = get("expert_gating_func").and_then(Meta::as_usize) == Some(2);
    set("model_type", json!(if sigmoid { "deepseek_v3" } else { "deepseek_v2" }));
    set("architectures", json!([if sigmoid { "DeepseekV3ForCausalLM" } else { "DeepseekV2ForCausalLM" }]));
    let groups = get("expert_group_count").and_then(Meta::as_usize).unwrap_or(1);
    set("n_group", json!(groups));
    set("topk_group", json!(get("expert_group_used_count").and_then(Meta::as_usize).unwrap_or(groups)));
    let method = match (sigmoid, groups) {
        (true, _) => "noaux_tc",
        (false, 0 | 1) => "greedy",
        (false, _) => "group_limited_greedy",
    };
    set("topk_method", json!(method));
    set("scoring_func", json!(if sigmoid { "sigmoid" } else { "softmax" }));
    let norm = get("expert_weights_norm").and_then(Meta::as_bool).unwrap_or(false);
    set("norm_topk_prob", json!(norm));
    let scale = get("expert_weights_scale").and_then(Meta::as_f64).filter(|&s| s != 0.0);
    set("routed_scaling_factor", scale.map_or(json!(1.0), short));
    set("n_shared_experts", json!(get("expert_shared_count").and_then(Meta::as_usize).unwrap_or(0)));
    set("num_key_value_heads", json!(int("attention.head_count")?));
    let q_lora = get("attention.q_lora_rank").and_then(Meta::as_usize).filter(|&n| n > 0);
    set("q_lora_rank", json!(q_lora));
    set("kv_lora_rank", json!(int("attention.kv_lora_rank")?));
    let rope = int("rope.dimension_count")?;
    let of_head = |mla: &str, plain: &str| int(mla).or_else(|_| int(plain));
    let key = of_head("attention.key_length_mla", "attention.key_length")?;
    let nope = key.checked_sub(rope).ok_or_else(|| missing("attention.key_length_mla"))?;
    set("qk_nope_head_dim", json!(nope));
    set("qk_rope_head_dim", json!(rope));
    set("v_head_dim", json!(of_head("attention.value_length_mla", "attention.value_length")?));
    Ok(())
}

/// A model of a directory, on its way into a GGUF file.
pub struct Model<'a> {
    pub config: &'a Value,
    pub family: &'static Family,
    pub architecture: &'static str,
    /// Its row, where it can be carried whole.
    pub whole: Option<&'static Whole>,
    /// Whether nothing but routed experts is written: then only what they need must be said.
    pub experts_only: bool,
    pub layers: usize,
    pub vocabulary: Option<usize>,
    /// The config's file.
    pub file: &'a Path,
}

impl Model<'_> {
    /// Its GGUF metadata, without tokenizer.
    ///
    /// # Errors
    /// A key that is missing, or that says what GGUF metadata cannot.
    pub fn to_gguf(&self, pairs: &mut Pairs) -> Result<()> {
        let (config, family, architecture, file) = (text(self.config), self.family, self.architecture, self.file);
        let fail = |key: &str, what: String| Error::tensor(file, key, what);
        let missing = |key: &str| fail(key, "missing from the config: GGUF metadata need it".into());
        let number = |key: &str| config.get(key).and_then(Value::as_u64).and_then(|v| u32::try_from(v).ok());
        let float = |key: &str| config.get(key).and_then(Value::as_f64);
        let key = |name: &str| format!("{architecture}.{name}");
        let of =
            |keys: &[&str]| count(config, keys).and_then(|v| u32::try_from(v).ok()).ok_or_else(|| missing(keys[0]));
        pairs.uint(&key("block_count"), self.layers as u32);
        let (heads, hidden) = (of(&["num_attention_heads"])?, of(&["hidden_size"])?);
        pairs.uint(&key("context_length"), number("max_position_embeddings").unwrap_or(4096));
        pairs.uint(&key("embedding_length"), hidden);
        let intermediate = of(&[family.intermediate_key])?;
        pairs.uint(&key("feed_forward_length"), number("intermediate_size").unwrap_or(intermediate));
        pairs.uint(&key("attention.head_count"), heads);
        pairs.uint(&key("expert_count"), of(EXPERTS_KEYS)?);
        pairs.uint(&key("expert_used_count"), of(TOP_K_KEYS)?);
        pairs.uint(&key("expert_feed_forward_length"), intermediate);
        let epsilon = float("rms_norm_eps").ok_or_else(|| missing("rms_norm_eps"))?;
        pairs.float(&key("attention.layer_norm_rms_epsilon"), epsilon);
        if let Some(vocabulary) = self.vocabulary {
            pairs.uint(&key("vocab_size"), vocabulary as u32);
        }
        if family.blocks == Blocks::AfterDense {
            pairs.uint(&key("leading_dense_block_count"), number("first_k_dense_replace").unwrap_or(0));
        }
        if let Some(whole) = self.whole {
            self.own_keys(whole, pairs)?;
        }
        let section = |name: &str| config.get(name).filter(|v| v.is_object());
        let scaling = section("rope_parameters").or_else(|| section("rope_scaling"));
        let scaled = |name: &str| scaling.and_then(|s| s.get(name)).and_then(Value::as_f64);
        if architecture == "deepseek2" {
            self.latent_to_gguf(pairs)?;
        } else {
            let head_dim = number("head_dim").unwrap_or(hidden / heads.max(1));
            pairs.uint(&key("attention.head_count_kv"), number("num_key_value_heads").unwrap_or(heads));
            pairs.uint(&key("attention.key_length"), head_dim);
            pairs.uint(&key("attention.value_length"), head_dim);
            let factor = float("partial_rotary_factor").or(scaled("partial_rotary_factor"));
            let part = |factor: f64| (head_dim as f64 * factor) as u32;
            match self.whole.map_or(Rotary::All, |w| w.rotary) {
                Rotary::Factor(absent) => pairs.uint(&key("rope.dimension_count"), part(factor.unwrap_or(absent))),
                Rotary::Count => {
                    pairs.uint(
                        &key("rope.dimension_count"),
                        number("rotary_dim").unwrap_or(part(factor.unwrap_or(1.0))),
                    );
                }
                Rotary::All | Rotary::AllCounted if factor.is_some_and(|f| f != 1.0) && !self.experts_only => {
                    let what = format!("is {factor:?}; models of this family rotate all of a head");
                    return Err(fail("partial_rotary_factor", what));
                }
                Rotary::AllCounted => pairs.uint(&key("rope.dimension_count"), head_dim),
                Rotary::All => {}
            }
            // Said where it is not what readers take for granted.
            if let Renormalize::Unless(absent, in_gguf) = family.renormalize {
                let norm = config.get("norm_topk_prob").and_then(Value::as_bool).unwrap_or(absent);
                if norm != in_gguf {
                    pairs.flag(&key("expert_weights_norm"), norm);
                }
            }
        }
        pairs.float(&key("rope.freq_base"), scaled("rope_theta").or(float("rope_theta")).unwrap_or(10000.0));
        let kind = scaling.and_then(|s| s.get("rope_type").or_else(|| s.get("type"))).and_then(Value::as_str);
        match kind {
            None | Some("default" | "none") => {}
            Some("yarn") => {
                pairs.text(&key("rope.scaling.type"), "yarn");
                let factor = scaled("factor").ok_or_else(|| missing("rope_scaling.factor"))?;
                pairs.float(&key("rope.scaling.factor"), factor);
                if let Some(original) = scaled("original_max_position_embeddings") {
                    pairs.uint(&key("rope.scaling.original_context_length"), original as u32);
                }
                for (name, gguf) in [("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")] {
                    if let Some(v) = scaled(name) {
                        pairs.float(&key(&format!("rope.scaling.{gguf}")), v);
                    }
                }
                // What follows from the factor need not be said; anything else has no key that all programs read alike.
                let usual = 0.1 * factor.ln() + 1.0;
                if let Some(own) = scaled("attention_factor").filter(|own| (own - usual).abs() > 1e-3) {
                    let what = format!("is {own}; GGUF files can only say {usual:.4}, which follows from the factor");
                    return Err(fail("rope_scaling.attention_factor", what));
                }
                match (scaled("mscale"), scaled("mscale_all_dim")) {
                    (None, None) => {}
                    (Some(m), Some(all)) if m == all => {
                        pairs.float(&key("rope.scaling.yarn_log_multiplier"), all * 0.1);
                    }
                    (m, all) => {
                        let what =
                            format!("mscale {m:?} and mscale_all_dim {all:?} differ, which GGUF metadata cannot say");
                        return Err(fail("rope_scaling", what));
                    }
                }
            }
            Some(other) => {
                let what = format!("is of type `{other}`, which GGUF files are not written with; default and yarn are");
                return Err(fail("rope_scaling", what));
            }
        }
        Ok(())
    }

    /// What the family's row has, and that the config says nothing that a file of it could not.
    fn own_keys(&self, whole: &Whole, pairs: &mut Pairs) -> Result<()> {
        let (config, strict) = (text(self.config), !self.experts_only);
        let fail = |key: &str, what: String| Error::tensor(self.file, key, what);
        let key = |name: &str| format!("{}.{name}", self.architecture);
        for own in whole.keys {
            let value = config.get(own.config).and_then(Value::as_f64).or(match own.absent {
                Absent::Refused => None,
                Absent::Is(value) => Some(value),
            });
            match (value, own.kind) {
                (Some(v), Kind::Uint) => pairs.uint(&key(own.gguf), v as u32),
                (Some(v), Kind::Float) => pairs.float(&key(own.gguf), v),
                (None, _) if strict => {
                    return Err(fail(own.config, "missing from the config: GGUF metadata need it".into()));
                }
                (None, _) => {}
            }
        }
        for (name, value) in whole.stated {
            pairs.uint(&key(name), *value as u32);
        }
        if !strict {
            return Ok(());
        }
        let same = |a: &Value, b: &Value| a == b || a.as_f64().is_some_and(|a| Some(a) == b.as_f64());
        let implied = (whole.implied)();
        let scaling = ["rope_parameters", "rope_scaling"].map(|name| config.get(name));
        let sections = [(Some(config), Some(&implied)), (scaling[0], implied.get("rope_scaling"))];
        for (config, implied) in sections.into_iter().chain([(scaling[1], implied.get("rope_scaling"))]) {
            for (name, due) in implied.and_then(Value::as_object).into_iter().flatten() {
                let said = config.and_then(|c| c.get(name)).filter(|said| !said.is_null() && !due.is_object());
                if let Some(said) = said.filter(|said| !same(said, due)) {
                    let what = format!(
                        "is {said}, which GGUF files of architecture {} cannot say: {due} is meant; --experts-only carries the \
                         routed experts",
                        self.architecture
                    );
                    return Err(fail(name, what));
                }
            }
        }
        let number = |key: &str| config.get(key).and_then(Value::as_u64);
        let layers = config.get("layer_types").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let due = |i: usize| whole.window.map_or("full_attention", |every| layer_type(i, every));
        if let Some((i, kind)) = layers.iter().enumerate().find(|(i, kind)| kind.as_str() != Some(due(*i))) {
            let what =
                format!("has {kind} for layer {i}; GGUF files of architecture {} mean {}", self.architecture, due(i));
            return Err(fail("layer_types", what));
        }
        let window = number("sliding_window").filter(|_| config.get("use_sliding_window") != Some(&json!(false)));
        match window.filter(|&w| whole.window.is_none() && number("max_position_embeddings").is_none_or(|all| w < all))
        {
            None => Ok(()),
            Some(w) => {
                let what = format!("is {w}; GGUF files of architecture {} cannot say that", self.architecture);
                Err(fail("sliding_window", what))
            }
        }
    }

    /// What DeepSeek's models have of their own.
    fn latent_to_gguf(&self, pairs: &mut Pairs) -> Result<()> {
        let config = text(self.config);
        let number = |key: &str| config.get(key).and_then(Value::as_u64).and_then(|v| u32::try_from(v).ok());
        let missing =
            |key: &str| Error::tensor(self.file, key, "missing from the config, or too large: GGUF metadata need it");
        // No dimension of a model is as large, nor are two together.
        let of = |key: &str| number(key).filter(|&n| n < 1 << 30).ok_or_else(|| missing(key));
        let key = |name: &str| format!("{}.{name}", self.architecture);
        let (nope, rope, lora) = (of("qk_nope_head_dim")?, of("qk_rope_head_dim")?, of("kv_lora_rank")?);
        if let Some(shared) = number("n_shared_experts").filter(|&n| n > 0) {
            pairs.uint(&key("expert_shared_count"), shared);
        }
        // Keys and values are one narrow row for all heads.
        pairs.uint(&key("attention.head_count_kv"), 1);
        if let Some(q_lora) = number("q_lora_rank").filter(|&n| n > 0) {
            pairs.uint(&key("attention.q_lora_rank"), q_lora);
        }
        pairs.uint(&key("attention.kv_lora_rank"), lora);
        pairs.uint(&key("attention.key_length"), lora + rope);
        pairs.uint(&key("attention.value_length"), lora);
        pairs.uint(&key("attention.key_length_mla"), nope + rope);
        pairs.uint(&key("attention.value_length_mla"), of("v_head_dim")?);
        pairs.uint(&key("rope.dimension_count"), rope);
        let sigmoid = config
            .get("scoring_func")
            .and_then(Value::as_str)
            .map_or(self.family.correction_bias.is_some(), |scoring| scoring == "sigmoid");
        pairs.uint(&key("expert_gating_func"), if sigmoid { 2 } else { 1 });
        if let (Some(groups), Some(kept)) = (number("n_group"), number("topk_group")) {
            pairs.uint(&key("expert_group_count"), groups);
            pairs.uint(&key("expert_group_used_count"), kept);
        }
        let scale = config.get("routed_scaling_factor").and_then(Value::as_f64).unwrap_or(1.0);
        pairs.float(&key("expert_weights_scale"), scale);
        let norm = config.get("norm_topk_prob").and_then(Value::as_bool).unwrap_or(sigmoid);
        pairs.flag(&key("expert_weights_norm"), norm);
        Ok(())
    }
}

/// `general.file_type`: llama.cpp's number for a file that is mostly of a format.
pub fn file_type(format: Format) -> u32 {
    match format {
        Format::F32 => 0,
        Format::F16 => 1,
        Format::Q4_0 => 2,
        Format::Q4_1 => 3,
        Format::Q8_0 => 7,
        Format::Q5_0 => 8,
        Format::Q5_1 => 9,
        Format::Q2K => 10,
        Format::Q3K => 12,
        Format::Q4K => 15,
        Format::Q5K => 17,
        Format::Q6K => 18,
        Format::Iq2Xxs => 19,
        Format::Iq2Xs => 20,
        Format::Iq3Xxs => 23,
        Format::Iq1S => 24,
        Format::Iq4Nl => 25,
        Format::Iq3S => 26,
        Format::Iq2S => 28,
        Format::Iq4Xs => 30,
        Format::Iq1M => 31,
        Format::Bf16 => 32,
        Format::Tq1_0 => 36,
        Format::Tq2_0 => 37,
        Format::Mxfp4Ggml => 38,
        // Mostly something that has no number: llama.cpp calls it "guessed".
        _ => 1024,
    }
}
