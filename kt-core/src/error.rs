//! What can go wrong, said so that the reader knows what, where, and what to do.

use std::path::{Path, PathBuf};

use crate::plan::Plan;

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that this crate and its backends report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused to open, map or read a file.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A checkpoint's content is wrong: truncated, inconsistent, incomplete or of an unknown kind.
    #[error("{}: {}{what}", file.display(), tensor.as_ref().map(|t| format!("{} `{t}`: ", noun(file))).unwrap_or_default())]
    Checkpoint {
        /// The file (or the directory, where no single file is to blame).
        file: PathBuf,
        /// The tensor or metadata key it is about, where there is one.
        tensor: Option<String>,
        /// What is wrong, and what to do about it.
        what: String,
    },
    /// No backend, or not the one asked for, can do this.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// A slice handed in by the caller has the wrong length.
    #[error("{what}: expected {expected} elements, got {got}")]
    Length {
        /// Which slice, with its shape.
        what: &'static str,
        /// Elements it must have.
        expected: usize,
        /// Elements it has.
        got: usize,
    },
    /// A batch names an expert that the layer does not have.
    #[error(
        "layer {layer}: topk_ids[{token}, {slot}] is {id}, but the layer has experts 0..{experts} (and -1 for none)"
    )]
    ExpertOutOfRange {
        /// Index of the layer in the model.
        layer: usize,
        /// Row of `topk_ids`.
        token: usize,
        /// Column of `topk_ids`.
        slot: usize,
        /// The id found there.
        id: i32,
        /// Experts of the layer.
        experts: usize,
    },
    /// The model has no expert layer of this index.
    #[error("layer {layer} holds no experts; the layers that do are {known}")]
    NoSuchLayer {
        /// The index asked for.
        layer: usize,
        /// The indices that exist, abbreviated.
        known: String,
    },
    /// The weights do not fit into the memory that this process may use.
    #[error("refusing to load: it does not fit the memory available\n{0}")]
    Memory(Box<Plan>),
    /// The caller cancelled the operation.
    #[error("cancelled")]
    Cancelled,
    /// A backend failed while loading or running.
    #[error("backend {backend}, layer {layer}: {what}")]
    Backend {
        /// Name of the backend.
        backend: String,
        /// Index of the layer in the model.
        layer: usize,
        /// What it said.
        what: String,
    },
    /// A shared library that is not loaded as a plugin.
    #[cfg(feature = "plugins")]
    #[error(transparent)]
    Plugin(#[from] crate::plugin::Refusal),
    /// An option of a builder or function that cannot be.
    #[error("{0}")]
    Invalid(String),
}

impl Error {
    /// A [`Error::Checkpoint`] about a tensor (or metadata key).
    pub fn tensor(file: impl Into<PathBuf>, tensor: impl Into<String>, what: impl Into<String>) -> Self {
        Error::Checkpoint { file: file.into(), tensor: Some(tensor.into()), what: what.into() }
    }

    /// A [`Error::Checkpoint`] about a whole file.
    pub fn file(file: impl Into<PathBuf>, what: impl Into<String>) -> Self {
        Error::Checkpoint { file: file.into(), tensor: None, what: what.into() }
    }
}

/// What the names in a file are names of. Those in the index of a directory of safetensors are tensors'.
fn noun(file: &Path) -> &'static str {
    let name = file.to_string_lossy();
    match name.ends_with(".json") && !name.ends_with(".safetensors.index.json") {
        true => "key",
        false => "tensor",
    }
}

/// Why a backend or kernel declines a piece of work. The text ends up in `explain`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unsupported(pub String);

impl Unsupported {
    /// Declines for the given reason.
    pub fn new(reason: impl Into<String>) -> Self {
        Unsupported(reason.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_a_config_are_no_tensors() {
        let says = |file: &str| Error::tensor(file, "name", "missing").to_string();
        assert_eq!(says("m/config.json"), "m/config.json: key `name`: missing");
        for file in ["m/model.safetensors.index.json", "m/model.safetensors", "m.gguf", "m"] {
            assert_eq!(says(file), format!("{file}: tensor `name`: missing"));
        }
    }
}
