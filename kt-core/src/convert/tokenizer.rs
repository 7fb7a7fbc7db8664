//! Byte-level BPE tokenizers between `tokenizer.json` and GGUF metadata.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::values::Pairs;
use crate::source::cutting::{self, Cutting};
use crate::source::metadata::Value as Meta;

/// `tokenizer.ggml.token_type` of what stands for itself, of what ends texts and the like, of what users added, and of holes.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// Puts a `tokenizer.json` into GGUF metadata; `config` is `tokenizer_config.json`, `model` the model's config.
///
/// # Errors
/// Why a GGUF file cannot hold this tokenizer.
pub fn to_gguf(
    pairs: &mut Pairs,
    json: &Value,
    config: Option<&Value>,
    model: &Value,
    vocabulary: usize,
) -> Result<(), String> {
    let bpe = json.get("model").filter(|m| m.get("type").and_then(Value::as_str) == Some("BPE"));
    let bpe = bpe.ok_or("the tokenizer is no BPE")?;
    let cutting = cutting_of(json).ok_or("the tokenizer cuts texts in a way that has no name here")?;
    let pre = cutting.pre.first().ok_or("a way to cut texts without a name")?;
    let words = bpe.get("vocab").and_then(Value::as_object).ok_or("the tokenizer has no `vocab`")?;
    let mut tokens = vec![None; vocabulary];
    let mut put = |text: &str, id: Option<u64>, kind: i32| {
        let slot = id.and_then(|id| tokens.get_mut(usize::try_from(id).ok()?));
        *slot.ok_or_else(|| format!("token `{text}` is outside the vocabulary of {vocabulary}"))? =
            Some((text.to_owned(), kind));
        Ok::<(), String>(())
    };
    for (text, id) in words {
        put(text, id.as_u64(), NORMAL)?;
    }
    for added in json.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
        let text = added.get("content").and_then(Value::as_str).unwrap_or_default();
        let special = added.get("special").and_then(Value::as_bool).unwrap_or(false);
        put(text, added.get("id").and_then(Value::as_u64), if special { CONTROL } else { USER_DEFINED })?;
    }
    let (tokens, kinds): (Vec<String>, Vec<i32>) =
        tokens.into_iter().enumerate().map(|(id, t)| t.unwrap_or_else(|| (format!("[PAD{id}]"), UNUSED))).unzip();
    let merge = |m: &Value| match m {
        Value::String(text) => Some(text.clone()),
        Value::Array(pair) => Some(format!("{} {}", pair.first()?.as_str()?, pair.get(1)?.as_str()?)),
        _ => None,
    };
    let merges = bpe.get("merges").and_then(Value::as_array).ok_or("the tokenizer has no `merges`")?;
    let merges: Vec<String> =
        merges.iter().map(merge).collect::<Option<_>>().ok_or("an element of `merges` is no pair")?;
    pairs.text("tokenizer.ggml.model", "gpt2");
    pairs.text("tokenizer.ggml.pre", pre);
    pairs.texts("tokenizer.ggml.tokens", &tokens);
    pairs.ints("tokenizer.ggml.token_type", &kinds);
    pairs.texts("tokenizer.ggml.merges", &merges);
    let named = |key: &str| {
        let said = config?.get(key)?;
        let text = said.as_str().or_else(|| said.get("content")?.as_str())?;
        tokens.iter().position(|t| t == text).map(|id| id as u64)
    };
    for (key, gguf) in [("bos", "bos"), ("eos", "eos"), ("pad", "padding")] {
        let by_config = || {
            let id = model.get(format!("{key}_token_id"))?;
            id.as_u64().or_else(|| id.as_array()?.first()?.as_u64())
        };
        let id = by_config().or_else(|| named(&format!("{key}_token"))).and_then(|id| u32::try_from(id).ok());
        if let Some(id) = id {
            pairs.uint(&format!("tokenizer.ggml.{gguf}_token_id"), id);
        }
    }
    let flag = config.and_then(|c| c.get("add_bos_token")).and_then(Value::as_bool);
    pairs.flag("tokenizer.ggml.add_bos_token", flag.unwrap_or(false));
    if let Some(template) = config.and_then(|c| c.get("chat_template")).and_then(Value::as_str) {
        pairs.text("tokenizer.chat_template", template);
    }
    Ok(())
}

/// The named way in which a `tokenizer.json` cuts texts.
fn cutting_of(json: &Value) -> Option<&'static Cutting> {
    let pre = json.get("pre_tokenizer")?;
    let steps = match pre.get("type")?.as_str()? {
        "Sequence" => pre.get("pretokenizers")?.as_array()?.iter().collect(),
        _ => vec![pre],
    };
    let (mut patterns, mut bytes) = (Vec::new(), false);
    for step in steps {
        match step.get("type")?.as_str()? {
            "Split" => patterns.push(step.get("pattern")?.get("Regex")?.as_str()?),
            "ByteLevel" => {
                bytes = true;
                if step.get("add_prefix_space").and_then(Value::as_bool) == Some(true) {
                    return None;
                }
                if step.get("use_regex").and_then(Value::as_bool).unwrap_or(true) {
                    patterns.push(cutting::GPT2);
                }
            }
            _ => return None,
        }
    }
    let nfc = match json.get("normalizer").filter(|n| !n.is_null()) {
        None => false,
        Some(n) if n.get("type").and_then(Value::as_str) == Some("NFC") => true,
        Some(n) if n.get("normalizers").and_then(Value::as_array).is_some_and(Vec::is_empty) => false,
        Some(_) => return None,
    };
    let same = |c: &&Cutting| c.patterns.iter().map(|p| unescaped(p)).eq(patterns.iter().map(|p| unescaped(p)));
    cutting::ALL.iter().find(|c| bytes && c.nfc == nfc && same(c))
}

/// A pattern with its `\x{…}` as characters: files have either.
fn unescaped(pattern: &str) -> String {
    let mut parts = pattern.split("\\x{");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (hex, rest) = part.split_once('}').unwrap_or((part, ""));
        out.extend(u32::from_str_radix(hex, 16).ok().and_then(char::from_u32));
        out.push_str(rest);
    }
    out
}

/// `tokenizer.json` and `tokenizer_config.json` out of GGUF metadata.
///
/// # Errors
/// Why they cannot be made.
pub fn from_gguf(map: &BTreeMap<String, Meta>) -> Result<(Value, Value), String> {
    let text = |key: &str| map.get(key).and_then(Meta::as_str);
    let texts = |key: &str| -> Result<Vec<&str>, String> {
        let list = map.get(key).and_then(Meta::as_array).ok_or_else(|| format!("`{key}` is missing"))?;
        list.iter().map(Meta::as_str).collect::<Option<_>>().ok_or_else(|| format!("`{key}` has something but texts"))
    };
    if text("tokenizer.ggml.model") != Some("gpt2") {
        return Err("`tokenizer.ggml.model` is not `gpt2` (byte-level BPE)".into());
    }
    let pre = text("tokenizer.ggml.pre").unwrap_or_default();
    let cutting = cutting::named(pre).ok_or_else(|| format!("`tokenizer.ggml.pre` `{pre}` is not known here"))?;
    let (tokens, merges) = (texts("tokenizer.ggml.tokens")?, texts("tokenizer.ggml.merges")?);
    let kinds = map.get("tokenizer.ggml.token_type").and_then(Meta::as_array).unwrap_or_default();
    let (mut vocab, mut added, mut decoder) = (Map::new(), Vec::new(), Map::new());
    for (id, token) in tokens.iter().enumerate() {
        let kind = kinds.get(id).and_then(Meta::as_usize).map_or(NORMAL, |k| k as i32);
        // Holes of the vocabulary have no text of their own.
        if kind != UNUSED {
            vocab.insert((*token).to_owned(), json!(id));
        }
        if kind == CONTROL || kind == USER_DEFINED {
            let entry = json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": kind == CONTROL,
            });
            decoder.insert(id.to_string(), entry.clone());
            added.push(entry);
        }
    }
    let split = |pattern: &&str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let bytes =
        |regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex});
    let pre = match cutting.patterns {
        [cutting::GPT2] => bytes(true),
        patterns => {
            let steps: Vec<Value> = patterns.iter().map(split).chain([bytes(false)]).collect();
            json!({"type": "Sequence", "pretokenizers": steps})
        }
    };
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": if cutting.nfc { json!({"type": "NFC"}) } else { Value::Null },
        "pre_tokenizer": pre,
        "post_processor": null,
        "decoder": bytes(true),
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": cutting.whole,
            "vocab": vocab, "merges": merges,
        },
    });
    let mut config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": false,
        "add_bos_token": map.get("tokenizer.ggml.add_bos_token").and_then(Meta::as_bool).unwrap_or(false),
        "added_tokens_decoder": decoder,
    });
    for (key, gguf) in [("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")] {
        let id = map.get(&format!("tokenizer.ggml.{gguf}_token_id")).and_then(Meta::as_usize);
        if let Some(token) = id.and_then(|id| tokens.get(id)) {
            config[key] = json!(token);
        }
    }
    if let Some(template) = text("tokenizer.chat_template") {
        config["chat_template"] = json!(template);
    }
    Ok((tokenizer, config))
}
