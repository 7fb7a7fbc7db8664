//! Text to token ids and back: `tokenizer.json`, or the tokenizer inside a GGUF file.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use kt::source::cutting;
use kt::source::metadata::Value;
use kt::{Metadata, WeightSource};
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

/// A tokenizer.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Put in front of a prompt, where a GGUF file asks for it (`tokenizer.json` says so itself).
    first: Option<u32>,
}

impl Tokenizer {
    /// The tokenizer that belongs to a checkpoint.
    ///
    /// # Errors
    /// There is none, or one that cannot be read; the error says what to do.
    pub fn of(source: &dyn WeightSource) -> Result<Self> {
        match source.metadata() {
            Metadata::Gguf(map) => from_gguf(map).with_context(|| format!("{}: tokenizer", source.path().display())),
            Metadata::HuggingFace(_) => {
                let file = source.path().join("tokenizer.json");
                let bytes = source.side_file("tokenizer.json")?.with_context(|| {
                    format!("{} does not exist; give a tokenizer with --tokenizer FILE", file.display())
                })?;
                Self::from_json(&bytes).with_context(|| file.display().to_string())
            }
        }
    }

    /// Reads a `tokenizer.json` of the caller's choice.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn from_file(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
        Self::from_json(&bytes).with_context(|| path.display().to_string())
    }

    fn from_json(bytes: &[u8]) -> Result<Self> {
        let wrong = |e| anyhow!("not a tokenizer: {e}");
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(wrong)?;
        // As training left them: they would cut texts, or fill them up.
        inner.with_truncation(None).map_err(wrong)?.with_padding(None);
        Ok(Tokenizer { inner, first: None })
    }

    /// Token ids of a prompt, with what the model wants in front of one.
    ///
    /// # Errors
    /// The text cannot be encoded.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let ids = self.ids(text, true)?;
        Ok(self.first.into_iter().filter(|first| ids.first() != Some(first)).chain(ids.iter().copied()).collect())
    }

    /// Token ids of a text alone.
    ///
    /// # Errors
    /// The text cannot be encoded.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.ids(text, false)
    }

    fn ids(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        Ok(self
            .inner
            .encode_fast(text, special)
            .map_err(|e| anyhow!("cannot encode the text: {e}"))?
            .get_ids()
            .to_vec())
    }

    /// Text of token ids, without special tokens; bytes that are no UTF-8 become replacement characters.
    ///
    /// # Errors
    /// The ids cannot be decoded.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, true).map_err(|e| anyhow!("cannot decode tokens: {e}"))
    }
}

/// Builds a byte-level BPE tokenizer from GGUF metadata.
fn from_gguf(map: &BTreeMap<String, Value>) -> Result<Tokenizer> {
    let text = |key: &str| map.get(key).and_then(Value::as_str);
    let list = |key: &str| {
        map.get(key).and_then(Value::as_array).with_context(|| format!("key `{key}` is missing or not a list"))
    };
    match text("tokenizer.ggml.model") {
        Some("gpt2") => {}
        other => bail!(
            "key `tokenizer.ggml.model` is {}; only `gpt2` (byte-level BPE) is supported: give the model's tokenizer.json with \
             --tokenizer FILE",
            other.unwrap_or("missing")
        ),
    }
    let pre = text("tokenizer.ggml.pre").unwrap_or("missing");
    let cutting = cutting::named(pre).with_context(|| {
        let known: Vec<_> = cutting::ALL.iter().flat_map(|c| c.pre).copied().collect();
        format!(
            "key `tokenizer.ggml.pre` is `{pre}`; supported are {}: give the model's tokenizer.json with --tokenizer FILE",
            known.join(", ")
        )
    })?;
    let tokens = list("tokenizer.ggml.tokens")?
        .iter()
        .map(|t| t.as_str().map(str::to_owned))
        .collect::<Option<Vec<_>>>()
        .context("key `tokenizer.ggml.tokens` has an element that is no text")?;
    let merges = list("tokenizer.ggml.merges")?
        .iter()
        .map(|m| m.as_str()?.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned())))
        .collect::<Option<Merges>>()
        .context("key `tokenizer.ggml.merges` has an element that is no pair")?;
    let vocabulary: Vocab = tokens.iter().enumerate().map(|(id, t)| (t.clone(), id as u32)).collect();
    let model = BPE::builder().vocab_and_merges(vocabulary, merges).ignore_merges(cutting.whole);
    let model = model.build().map_err(|e| anyhow!("{e}"))?;
    let mut inner = tokenizers::Tokenizer::new(model);
    if cutting.nfc {
        inner.with_normalizer(Some(NFC)).map_err(|e| anyhow!("{e}"))?;
    }
    let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
    for pattern in cutting.patterns {
        let split = Split::new(SplitPattern::Regex((*pattern).to_owned()), SplitDelimiterBehavior::Isolated, false);
        steps.push(split.map_err(|e| anyhow!("{e}"))?.into());
    }
    steps.push(ByteLevel::new(false, true, false).into());
    inner.with_pre_tokenizer(Some(Sequence::new(steps)));
    inner.with_decoder(Some(ByteLevel::new(false, true, false)));
    // Control tokens and tokens that users defined are matched whole, before anything is cut.
    const CONTROL: usize = 3;
    const USER_DEFINED: usize = 4;
    if let Some(kinds) = map.get("tokenizer.ggml.token_type").and_then(Value::as_array) {
        let of_kind = |kind: usize| {
            let chosen = tokens.iter().zip(kinds).filter(move |(_, k)| k.as_usize() == Some(kind));
            chosen.map(move |(t, _)| AddedToken::from(t.clone(), kind == CONTROL).normalized(false)).collect::<Vec<_>>()
        };
        inner.add_special_tokens(of_kind(CONTROL)).map_err(|e| anyhow!("{e}"))?;
        inner.add_tokens(of_kind(USER_DEFINED)).map_err(|e| anyhow!("{e}"))?;
    }
    let first = match map.get("tokenizer.ggml.add_bos_token").and_then(Value::as_bool) {
        Some(true) => {
            let id = map.get("tokenizer.ggml.bos_token_id").and_then(Value::as_usize).filter(|&id| id < tokens.len());
            Some(id.context("key `tokenizer.ggml.bos_token_id` is missing or outside the vocabulary")? as u32)
        }
        _ => None,
    };
    Ok(Tokenizer { inner, first })
}

#[cfg(test)]
mod tests {
    use super::*;

    const REFERENCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/reference/qwen3_moe");
    const TEXTS: [&str; 4] = [
        "The quick brown fox, it's 1234567 times!",
        "  fn main() {\n\n\tprintln!(\"日本語 😀\");\r\n}   ",
        "<|begin|>a<|endoftext|> b <|pad|>",
        "",
    ];

    fn gguf() -> BTreeMap<String, Value> {
        let source = kt::open(format!("{REFERENCE}/gguf-Q8_0/qwen3_moe-Q8_0.gguf")).unwrap();
        let Metadata::Gguf(map) = source.metadata() else { panic!("not GGUF metadata") };
        map.clone()
    }

    #[test]
    fn the_tokenizer_inside_gguf_is_that_of_tokenizer_json() {
        let json = Tokenizer::from_file(format!("{REFERENCE}/bf16/tokenizer.json").as_ref()).unwrap();
        let gguf = from_gguf(&gguf()).unwrap();
        for text in TEXTS {
            let ids = json.encode(text).unwrap();
            assert_eq!(gguf.encode(text).unwrap(), ids, "{text:?}");
            assert_eq!(gguf.encode_prompt(text).unwrap(), ids, "{text:?}");
            assert_eq!(gguf.decode(&ids).unwrap(), json.decode(&ids).unwrap(), "{text:?}");
        }
        assert!(json.encode(TEXTS[2]).unwrap().starts_with(&[0]));
    }

    #[test]
    fn texts_are_neither_cut_nor_filled_up() {
        let json = std::fs::read(format!("{REFERENCE}/bf16/tokenizer.json")).unwrap();
        let ids = Tokenizer::from_json(&json).unwrap().encode(TEXTS[0]).unwrap();
        let mut json: serde_json::Value = serde_json::from_slice(&json).unwrap();
        json["truncation"] = serde_json::json!({
            "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0
        });
        json["padding"] = serde_json::json!({
            "strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0,
            "pad_token": "<|pad|>"
        });
        let as_trained = Tokenizer::from_json(json.to_string().as_bytes()).unwrap();
        assert_eq!(as_trained.encode(TEXTS[0]).unwrap(), ids);
        assert!(ids.len() > 3 && ids.len() < 64);
    }

    #[test]
    fn every_known_cutting_keeps_the_text() {
        for cutting in cutting::ALL {
            for pre in cutting.pre {
                let mut map = gguf();
                map.insert("tokenizer.ggml.pre".into(), Value::String(pre.to_string()));
                let tokenizer = from_gguf(&map).unwrap();
                for text in [TEXTS[0], TEXTS[1]] {
                    assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()).unwrap(), text, "{pre}");
                }
            }
        }
    }

    #[test]
    fn a_first_token_is_put_in_front_once() {
        let mut map = gguf();
        map.insert("tokenizer.ggml.add_bos_token".into(), Value::Bool(true));
        let tokenizer = from_gguf(&map).unwrap();
        let plain = tokenizer.encode("fox").unwrap();
        assert_eq!(tokenizer.encode_prompt("fox").unwrap(), [&[0], &plain[..]].concat());
        assert_eq!(tokenizer.encode_prompt("<|begin|>fox").unwrap(), [&[0], &plain[..]].concat());
    }

    #[test]
    fn unknown_kinds_are_refused_by_name() {
        for (key, value) in [("tokenizer.ggml.pre", "mystery"), ("tokenizer.ggml.model", "llama")] {
            let mut map = gguf();
            map.insert(key.into(), Value::String(value.into()));
            let text = from_gguf(&map).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(text.contains(key) && text.contains(value) && text.contains("--tokenizer"), "{text:?}");
        }
    }
}
