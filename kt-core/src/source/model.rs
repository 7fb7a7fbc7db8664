//! What `config.json` says of a Mixture-of-Experts model, whatever its weights are stored in.

use std::path::Path;

use serde_json::Value;

use super::Metadata;
use super::names::{self, Family, count};
use crate::error::{Error, Result};
use crate::format::Format;
use crate::layer::LayerSpec;
use crate::routing::Routing;

/// No dimension of a model is larger: keeps products of two of them far from overflowing.
const MOST: usize = 1 << 24;

/// No model has more layers.
const MOST_LAYERS: usize = 1 << 14;

/// What is wrong with so many layers, if there are too many.
pub(crate) fn too_many_layers(layers: usize) -> Option<String> {
    (layers > MOST_LAYERS)
        .then(|| format!("is {layers}, more than the {MOST_LAYERS} layers that a model may have here"))
}

/// A model by its config.
pub struct Model {
    pub metadata: Metadata,
    pub family: &'static Family,
    /// Number of layers; those beyond are for multi-token prediction.
    pub blocks: usize,
    /// The layers that hold experts, at least one; their formats and biases are not known here.
    pub layers: Vec<LayerSpec>,
    routing: Option<Routing>,
}

impl Model {
    /// Reads a config; `file` is its path.
    pub fn read(config: Option<Value>, file: &Path) -> Result<Self> {
        let config = config.ok_or_else(|| Error::file(file, "missing: it says what model the tensors are of"))?;
        let metadata = Metadata::HuggingFace(config.clone());
        let family = names::by_metadata(&metadata).ok_or_else(|| match metadata.family() {
            None => Error::tensor(file, "model_type", "missing: what the model is stays unknown"),
            Some(name) => {
                let known = names::model_types().join(", ");
                Error::tensor(file, "model_type", format!("`{name}` is not known here; known are {known}"))
            }
        })?;
        let config = text(&config);
        let number = |keys: &[&str]| {
            let found = count(config, keys).filter(|n| (1..=MOST).contains(n));
            found.ok_or_else(|| {
                Error::tensor(file, keys.join("` or `"), format!("missing from the config, or not in 1..={MOST}"))
            })
        };
        let blocks = number(&["num_hidden_layers"])?;
        if let Some(what) = too_many_layers(blocks) {
            return Err(Error::tensor(file, "num_hidden_layers", what));
        }
        let (experts, top_k) = (number(names::EXPERTS_KEYS)?, number(names::TOP_K_KEYS)?);
        let (hidden, intermediate) = (number(&["hidden_size"])?, number(&[family.intermediate_key])?);
        if top_k > experts {
            let what = format!("is {top_k}, but there are only {experts} experts");
            return Err(Error::tensor(file, names::TOP_K_KEYS[0], what));
        }
        let spec = |index| LayerSpec {
            index,
            experts,
            top_k,
            hidden,
            intermediate,
            formats: [Format::F32; 3],
            scales: [None; 3],
            activation: family.activation,
            biases: false,
        };
        let layers: Vec<LayerSpec> = (0..blocks).filter(|&i| family.holds_experts(config, i)).map(spec).collect();
        if layers.is_empty() {
            return Err(Error::file(file, "no layer of this model holds experts: it is no Mixture-of-Experts model"));
        }
        let routing = family.routing(config, top_k);
        if let Some(routing) = &routing {
            routing.check(experts).map_err(|e| Error::file(file, e.to_string()))?;
        }
        Ok(Model { metadata, family, blocks, layers, routing })
    }

    /// The layer of an index, which must have that expert; `path` is the checkpoint's.
    pub fn layer(&self, layer: usize, expert: usize, path: &Path) -> Result<&LayerSpec> {
        let spec = self.layers.binary_search_by_key(&layer, |l| l.index).ok().map(|i| &self.layers[i]);
        spec.filter(|l| expert < l.experts)
            .ok_or_else(|| Error::file(path, format!("there is no expert {expert} in layer {layer}")))
    }

    /// How the router of a layer chooses.
    pub fn routing(&self, layer: usize) -> Option<Routing> {
        self.layers.iter().any(|l| l.index == layer).then(|| self.routing.clone()).flatten()
    }
}

/// The part of a config that describes the text model: models with more than text have a section for it.
pub fn text(config: &Value) -> &Value {
    config.get("text_config").filter(|t| t.is_object()).unwrap_or(config)
}
