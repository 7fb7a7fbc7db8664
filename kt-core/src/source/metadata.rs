//! What a checkpoint says of its model.

use std::collections::BTreeMap;

/// A checkpoint's description of its model, in the words of its container.
#[derive(Debug, Clone)]
pub enum Metadata {
    /// `config.json` of a Hugging Face directory.
    HuggingFace(serde_json::Value),
    /// Key-value pairs of a GGUF file.
    Gguf(BTreeMap<String, Value>),
}

/// A GGUF metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Any unsigned integer type.
    Uint(u64),
    /// Any signed integer type.
    Int(i64),
    /// Either float type.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// UTF-8 text.
    String(String),
    /// Values of one type.
    Array(Vec<Value>),
}

impl Value {
    /// The number, if it is an integer that fits.
    pub fn as_usize(&self) -> Option<usize> {
        match self {
            Value::Uint(v) => usize::try_from(*v).ok(),
            Value::Int(v) => usize::try_from(*v).ok(),
            _ => None,
        }
    }

    /// The number, of any numeric type.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Value::Uint(v) => Some(*v as f64),
            Value::Int(v) => Some(*v as f64),
            Value::Float(v) => Some(*v),
            _ => None,
        }
    }

    /// The boolean.
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Value::Bool(v) => Some(*v),
            _ => None,
        }
    }

    /// The text.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::String(v) => Some(v),
            _ => None,
        }
    }

    /// The elements.
    pub fn as_array(&self) -> Option<&[Value]> {
        match self {
            Value::Array(v) => Some(v),
            _ => None,
        }
    }
}

impl Metadata {
    /// The family: `model_type`, or `general.architecture`.
    pub fn family(&self) -> Option<&str> {
        match self {
            Metadata::HuggingFace(json) => json.get("model_type")?.as_str(),
            Metadata::Gguf(map) => map.get("general.architecture")?.as_str(),
        }
    }
}
