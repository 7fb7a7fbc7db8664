//! BPE tokenizers between `tokenizer.json` and GGUF metadata: of bytes, or of pieces with marked spaces as SentencePiece has them.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::values::Pairs;
use crate::source::cutting::{self, Cutting};
use crate::source::metadata::Value as Meta;

/// `tokenizer.ggml.token_type` of what stands for itself, of what is not in the vocabulary, of what ends texts and the like, of what users
/// added, of holes, and of single bytes.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// More tokens than any model has.
const MOST_TOKENS: usize = 1 << 24;
/// Bytes of a token beyond which nothing is asked of what it may be made of: more than any has.
const LONGEST: usize = 1 << 12;

/// What stands for a space in pieces.
const MARK: &str = "\u{2581}";

/// Whether a token is one byte, as pieces have those.
fn is_byte(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>'));
    digits.is_some_and(|d| d.len() == 2 && d.bytes().all(|b| b.is_ascii_hexdigit()))
}

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
    let pieces = bpe.get("byte_fallback").and_then(Value::as_bool).unwrap_or(false);
    let unknown = bpe.get("unk_token").and_then(Value::as_str).filter(|_| pieces);
    let words = bpe.get("vocab").and_then(Value::as_object).ok_or("the tokenizer has no `vocab`")?;
    if vocabulary > MOST_TOKENS {
        return Err(format!("a vocabulary of {vocabulary} is larger than any; {MOST_TOKENS} tokens are read at most"));
    }
    let mut tokens = vec![None; vocabulary];
    let mut put = |text: &str, id: Option<u64>, kind: i32| {
        let slot = id.and_then(|id| tokens.get_mut(usize::try_from(id).ok()?));
        *slot.ok_or_else(|| format!("token `{text}` is outside the vocabulary of {vocabulary}"))? =
            Some((text.to_owned(), kind));
        Ok::<(), String>(())
    };
    for (text, id) in words {
        put(text, id.as_u64(), if pieces && is_byte(text) { BYTE } else { NORMAL })?;
    }
    for added in json.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
        let text = added.get("content").and_then(Value::as_str).unwrap_or_default();
        let special = added.get("special").and_then(Value::as_bool).unwrap_or(false);
        let kind = if special { CONTROL } else { USER_DEFINED };
        put(text, added.get("id").and_then(Value::as_u64), if unknown == Some(text) { UNKNOWN } else { kind })?;
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
    if pieces {
        let prefix = prefix_of(json).ok_or("the tokenizer marks spaces in a way that has no name here")?;
        pairs.text("tokenizer.ggml.model", "llama");
        pairs.text("tokenizer.ggml.pre", "default");
        pairs.texts("tokenizer.ggml.tokens", &tokens);
        pairs.floats("tokenizer.ggml.scores", &scores(&tokens, &merges));
        pairs.ints("tokenizer.ggml.token_type", &kinds);
        pairs.flag("tokenizer.ggml.add_space_prefix", prefix);
        if let Some(id) = unknown.and_then(|u| tokens.iter().position(|t| t == u)) {
            pairs.uint("tokenizer.ggml.unknown_token_id", id as u32);
        }
    } else {
        let cutting = cutting_of(json).ok_or("the tokenizer cuts texts in a way that has no name here")?;
        let pre = cutting.pre.first().ok_or("a way to cut texts without a name")?;
        pairs.text("tokenizer.ggml.model", "gpt2");
        pairs.text("tokenizer.ggml.pre", pre);
        pairs.texts("tokenizer.ggml.tokens", &tokens);
        pairs.ints("tokenizer.ggml.token_type", &kinds);
        pairs.texts("tokenizer.ggml.merges", &merges);
    }
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
    // Tokenizers of pieces begin texts with their first token where nothing else is said.
    pairs.flag("tokenizer.ggml.add_bos_token", flag.unwrap_or(pieces));
    if let Some(template) = config.and_then(|c| c.get("chat_template")).and_then(Value::as_str) {
        pairs.text("tokenizer.chat_template", template);
    }
    Ok(())
}

/// Scores that make programs merge pieces in the order of these merges: the earlier, the higher. What nothing is merged into comes last.
fn scores(tokens: &[String], merges: &[String]) -> Vec<f32> {
    let mut ranks = BTreeMap::new();
    for merge in merges {
        let next = ranks.len();
        ranks.entry(merge.replacen(' ', "", 1)).or_insert(next);
    }
    let last = ranks.len();
    tokens.iter().map(|t| -(ranks.get(t).copied().unwrap_or(last) as f32)).collect()
}

/// The merges that scores stand for: of every piece that is made of two others, by falling score, its longest first parts first.
fn merges_of(tokens: &[&str], scores: &[f32], kinds: &[i32]) -> Vec<Value> {
    let normal = |id: &usize| kinds[*id] == NORMAL && tokens[*id].len() <= LONGEST;
    let known: BTreeSet<&str> = (0..tokens.len()).filter(normal).map(|id| tokens[id]).collect();
    let mut order: Vec<usize> = (0..tokens.len()).filter(normal).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    let halves = |id: usize| {
        let token = tokens[id];
        let ends = token.char_indices().rev().map(|(i, _)| token.split_at(i));
        ends.filter(|(a, b)| known.contains(a) && known.contains(b)).map(|(a, b)| json!([a, b]))
    };
    order.into_iter().flat_map(halves).collect()
}

/// Whether a tokenizer of pieces puts a marked space in front of texts; `None` where it treats spaces otherwise.
fn prefix_of(json: &Value) -> Option<bool> {
    let of = |v: &Value, key: &str| v.get(key).and_then(Value::as_str).map(str::to_owned);
    let section = |key: &str| json.get(key).filter(|v| !v.is_null());
    match (section("normalizer"), section("pre_tokenizer")) {
        (Some(normalizer), None) => {
            let steps = match of(normalizer, "type")?.as_str() {
                "Sequence" => normalizer.get("normalizers")?.as_array()?.iter().collect(),
                _ => vec![normalizer],
            };
            let (mut prefix, mut marked) = (false, false);
            for step in steps {
                match of(step, "type")?.as_str() {
                    "Prepend" if of(step, "prepend")? == MARK && !marked => prefix = true,
                    "Replace" if of(step, "content")? == MARK && of(step.get("pattern")?, "String")? == " " => {
                        marked = true
                    }
                    _ => return None,
                }
            }
            marked.then_some(prefix)
        }
        (None, Some(pre)) if of(pre, "type")? == "Metaspace" && of(pre, "replacement")? == MARK => {
            if pre.get("split").and_then(Value::as_bool) != Some(false) {
                return None;
            }
            Some(of(pre, "prepend_scheme")? != "never")
        }
        _ => None,
    }
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
    let pieces = match text("tokenizer.ggml.model") {
        Some("gpt2") => false,
        Some("llama") => true,
        _ => return Err("`tokenizer.ggml.model` is neither `gpt2` (BPE of bytes) nor `llama` (of pieces)".into()),
    };
    let tokens = texts("tokenizer.ggml.tokens")?;
    let kinds = map.get("tokenizer.ggml.token_type").and_then(Meta::as_array).unwrap_or_default();
    let (mut vocab, mut added, mut decoder) = (Map::new(), Vec::new(), Map::new());
    for (id, token) in tokens.iter().enumerate() {
        let kind = kinds.get(id).and_then(Meta::as_usize).map_or(NORMAL, |k| k as i32);
        // Holes of the vocabulary have no text of their own.
        if kind != UNUSED {
            vocab.insert((*token).to_owned(), json!(id));
        }
        if [CONTROL, USER_DEFINED, UNKNOWN].contains(&kind) {
            let entry = json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": kind != USER_DEFINED,
            });
            decoder.insert(id.to_string(), entry.clone());
            added.push(entry);
        }
    }
    let split = |pattern: &&str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let bytes =
        |regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex});
    let bos = map.get("tokenizer.ggml.bos_token_id").and_then(Meta::as_usize);
    let first = map.get("tokenizer.ggml.add_bos_token").and_then(Meta::as_bool).unwrap_or(pieces);
    let tokenizer = if pieces {
        let scores = map.get("tokenizer.ggml.scores").and_then(Meta::as_array).unwrap_or_default();
        let scores: Vec<f32> = scores.iter().filter_map(|s| Some(s.as_f64()? as f32)).collect();
        if scores.len() != tokens.len() {
            return Err(format!("`tokenizer.ggml.scores` has {} numbers for {} tokens", scores.len(), tokens.len()));
        }
        let of = |id: usize| kinds.get(id).and_then(Meta::as_usize).map_or(NORMAL, |k| k as i32);
        let kinds: Vec<i32> = (0..tokens.len()).map(of).collect();
        let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
        let prefix = map.get("tokenizer.ggml.add_space_prefix").and_then(Meta::as_bool).unwrap_or(true);
        let mut marks = vec![replace(" ", MARK)];
        let mut ends = vec![replace(MARK, " "), json!({"type": "ByteFallback"}), json!({"type": "Fuse"})];
        if prefix {
            marks.insert(0, json!({"type": "Prepend", "prepend": MARK}));
            ends.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let unknown = kinds.iter().position(|&k| k == UNKNOWN).map(|id| tokens[id]);
        let begin = bos.and_then(|id| Some((id, tokens.get(id)?))).filter(|_| first).map(|(id, token)| {
            let begins = json!({"SpecialToken": {"id": token, "type_id": 0}});
            let text = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
            json!({
                "type": "TemplateProcessing", "single": [begins, text("A")], "pair": [begins, text("A"), text("B")],
                "special_tokens": {*token: {"id": token, "ids": [id], "tokens": [token]}},
            })
        });
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": {"type": "Sequence", "normalizers": marks},
            "pre_tokenizer": null,
            "post_processor": begin,
            "decoder": {"type": "Sequence", "decoders": ends},
            "model": {
                "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
                "vocab": vocab, "merges": merges_of(&tokens, &scores, &kinds),
            },
        })
    } else {
        let pre = text("tokenizer.ggml.pre").unwrap_or_default();
        let cutting = cutting::named(pre).ok_or_else(|| format!("`tokenizer.ggml.pre` `{pre}` is not known here"))?;
        let pre = match cutting.patterns {
            [cutting::GPT2] => bytes(true),
            patterns => {
                let steps: Vec<Value> = patterns.iter().map(split).chain([bytes(false)]).collect();
                json!({"type": "Sequence", "pretokenizers": steps})
            }
        };
        json!({
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
                "vocab": vocab, "merges": texts("tokenizer.ggml.merges")?,
            },
        })
    };
    let mut config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": false,
        "add_bos_token": first,
        "added_tokens_decoder": decoder,
    });
    for (key, gguf) in [("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown")]
    {
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
