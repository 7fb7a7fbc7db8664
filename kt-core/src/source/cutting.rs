//! How byte-level BPE tokenizers cut texts before merging: public patterns of the models that GGUF's `tokenizer.ggml.pre` is named
//! after.

/// One way to cut.
#[derive(Debug)]
pub struct Cutting {
    /// Names in GGUF files.
    pub pre: &'static [&'static str],
    /// Regular expressions, one after the other; what matches is a piece.
    pub patterns: &'static [&'static str],
    /// Composes characters first.
    pub nfc: bool,
    /// A piece that is a token is that token, whatever merges would make of it.
    pub whole: bool,
}

/// The pattern that byte-level tokenizers have where they name none.
pub const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// All that are known.
pub static ALL: &[Cutting] = &[
    Cutting { pre: &["gpt-2"], patterns: &[GPT2], nfc: false, whole: false },
    Cutting {
        pre: &["qwen2"],
        patterns: &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        nfc: true,
        whole: false,
    },
    Cutting {
        pre: &["deepseek-v3"],
        patterns: &[
            r"\p{N}{1,3}",
            r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
        ],
        nfc: false,
        whole: false,
    },
    // GLM-4, and Llama 3.
    Cutting {
        pre: &["glm4", "llama-bpe", "llama3", "llama-v3"],
        patterns: &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        nfc: false,
        whole: true,
    },
    // gpt-oss, and MiniMax-M2.
    Cutting {
        pre: &["gpt-4o", "minimax-m2"],
        patterns: &[concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
            r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )],
        nfc: false,
        whole: true,
    },
];

/// The one of a name.
pub fn named(pre: &str) -> Option<&'static Cutting> {
    ALL.iter().find(|c| c.pre.contains(&pre))
}
