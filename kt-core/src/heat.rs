//! Which experts were used: how often the router chose each, layer by layer.
//!
//! As a file it is JSON:
//!
//! ```text
//! {"kt_heat_map": 1, "layers": [{"layer": 3, "tokens": 120, "counts": [17, 0, 44, …]}, …]}
//! ```

use std::cmp::Reverse;
use std::path::Path;

use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::json;
use crate::layer::LayerSpec;

/// Version of the file, its first key.
const VERSION: u64 = 1;
/// Largest file read: a thousand layers of a thousand experts take 20 MB with the longest numbers.
const MOST_BYTES: u64 = 64 << 20;

/// How often the experts of one layer were chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerHeat {
    /// Index of the layer in the model.
    pub layer: usize,
    /// Tokens that were routed.
    pub tokens: u64,
    /// Times that each expert was chosen: one number per expert.
    pub counts: Vec<u64>,
}

/// How often each expert was chosen. Counts saturate.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HeatMap {
    layers: Vec<LayerHeat>,
}

/// An expert, and how often it was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hot {
    /// Index of the layer in the model.
    pub layer: usize,
    /// The expert.
    pub expert: usize,
    /// Times that it was chosen.
    pub count: u64,
}

impl HeatMap {
    /// A heat map of these layers.
    ///
    /// # Errors
    /// [`Error::Invalid`] when layers do not rise, or one has no experts.
    pub fn new(layers: Vec<LayerHeat>) -> Result<HeatMap> {
        let invalid = |i: usize, what: String| Err(Error::Invalid(format!("heat map: layers[{i}]: {what}")));
        for (i, l) in layers.iter().enumerate() {
            if l.counts.is_empty() {
                return invalid(i, format!("layer {} has no experts", l.layer));
            }
            if i > 0 && layers[i - 1].layer >= l.layer {
                return invalid(
                    i,
                    format!("layer {} follows layer {}; layers must rise", l.layer, layers[i - 1].layer),
                );
            }
        }
        Ok(HeatMap { layers })
    }

    /// As [`HeatMap::new`], of the layers of a model that is loaded.
    pub(crate) fn of(layers: Vec<LayerHeat>) -> HeatMap {
        HeatMap { layers }
    }

    /// The layers, by rising index.
    pub fn layers(&self) -> &[LayerHeat] {
        &self.layers
    }

    fn find(&self, layer: usize) -> Option<usize> {
        self.layers.binary_search_by_key(&layer, |l| l.layer).ok()
    }

    /// Times that an expert was chosen; 0 for one that the heat map does not know.
    pub fn count(&self, layer: usize, expert: usize) -> u64 {
        self.find(layer).and_then(|i| self.layers[i].counts.get(expert)).copied().unwrap_or(0)
    }

    /// Experts of all layers together.
    pub fn experts(&self) -> usize {
        self.layers.iter().map(|l| l.counts.len()).sum()
    }

    /// Times that any expert was chosen.
    pub fn total(&self) -> u64 {
        self.layers.iter().flat_map(|l| &l.counts).fold(0, |sum, &count| sum.saturating_add(count))
    }

    /// Tokens of the layer that saw the most.
    pub fn tokens(&self) -> u64 {
        self.layers.iter().map(|l| l.tokens).max().unwrap_or(0)
    }

    /// The `n` experts chosen most often, all layers together, the hottest first; among equals by layer and expert.
    pub fn hottest(&self, n: usize) -> Vec<Hot> {
        let of = |l: &LayerHeat| -> Vec<Hot> {
            let hot = |(expert, &count)| Hot { layer: l.layer, expert, count };
            l.counts.iter().enumerate().map(hot).collect()
        };
        let mut all: Vec<Hot> = self.layers.iter().flat_map(of).collect();
        all.sort_by_key(|h| Reverse(h.count)); // stable: equals stay in their order
        all.truncate(n);
        all
    }

    /// Adds what another heat map of the same model counted.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the other has a layer that this one has not, or another number of experts in one; nothing is then
    /// added.
    pub fn merge(&mut self, other: &HeatMap) -> Result<()> {
        let known = |layer: usize| self.find(layer).map(|i| self.layers[i].counts.len());
        other.compare(known, "the heat map that it shall be added to")?;
        for theirs in &other.layers {
            let Some(i) = self.find(theirs.layer) else { continue };
            let ours = &mut self.layers[i];
            ours.tokens = ours.tokens.saturating_add(theirs.tokens);
            ours.counts.iter_mut().zip(&theirs.counts).for_each(|(a, b)| *a = a.saturating_add(*b));
        }
        Ok(())
    }

    /// Whether this can be a heat map of a model with these expert layers. It may have fewer of them.
    ///
    /// # Errors
    /// [`Error::Invalid`], naming the layer that the model has not, or whose number of experts is another.
    pub fn check(&self, model: &[LayerSpec]) -> Result<()> {
        self.compare(|layer| model.iter().find(|s| s.index == layer).map(|s| s.experts), "the model")
    }

    /// `experts` gives the number of experts of a layer of `what`, if it has that layer.
    fn compare(&self, experts: impl Fn(usize) -> Option<usize>, what: &str) -> Result<()> {
        for l in &self.layers {
            let (layer, ours) = (l.layer, l.counts.len());
            match experts(layer) {
                Some(n) if n == ours => {}
                Some(n) => {
                    return Err(Error::Invalid(format!(
                        "heat map: layer {layer} has {ours} experts, in {what} it has {n}; are they of the same model?"
                    )));
                }
                None => {
                    return Err(Error::Invalid(format!(
                        "heat map: layer {layer} holds no experts in {what}; are they of the same model?"
                    )));
                }
            }
        }
        Ok(())
    }

    /// The content of the file.
    pub fn to_json(&self) -> Value {
        let layers: Vec<Value> =
            self.layers.iter().map(|l| json!({ "layer": l.layer, "tokens": l.tokens, "counts": l.counts })).collect();
        json!({ "kt_heat_map": VERSION, "layers": layers })
    }

    /// Reads what [`HeatMap::to_json`] gave.
    ///
    /// # Errors
    /// [`Error::Invalid`]: no heat map, one of another version, or a number that is not a count (negative, a fraction, not a
    /// number), with its place.
    pub fn from_json(json: &Value) -> Result<HeatMap> {
        let invalid = |what: String| Error::Invalid(format!("heat map: {what}"));
        match json.get("kt_heat_map") {
            Some(version) if *version == VERSION => {}
            Some(version) => {
                return Err(invalid(format!("version {}; this program reads version {VERSION}", brief(version))));
            }
            None => return Err(invalid("there is no key kt_heat_map: this is something else".into())),
        }
        let list = |json: &Value, key: &str, place: &str| -> Result<Vec<Value>> {
            let list = json.get(key).and_then(Value::as_array).cloned();
            list.ok_or_else(|| invalid(format!("{place}{key} must be a list")))
        };
        let number = |json: Option<&Value>, place: String| -> Result<u64> {
            let json = json.unwrap_or(&Value::Null);
            json.as_u64().ok_or_else(|| invalid(format!("{place} is {}, not a count", brief(json))))
        };
        let mut layers = Vec::new();
        for (i, l) in list(json, "layers", "")?.iter().enumerate() {
            let index = number(l.get("layer"), format!("layers[{i}].layer"))?;
            let layer = usize::try_from(index).map_err(|_| invalid(format!("layers[{i}].layer is {index}")))?;
            let tokens = number(l.get("tokens"), format!("layers[{i}].tokens"))?;
            let counts = list(l, "counts", &format!("layers[{i}]."))?;
            let count = |(e, v)| number(Some(v), format!("layers[{i}].counts[{e}]"));
            layers.push(LayerHeat {
                layer,
                tokens,
                counts: counts.iter().enumerate().map(count).collect::<Result<_>>()?,
            });
        }
        HeatMap::new(layers)
    }

    /// Writes the file, replacing one that is there.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, path: &Path) -> Result<()> {
        json::save(path, &self.to_json())
    }

    /// Reads a file that [`HeatMap::save`] wrote.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Checkpoint`] with the file's name, as [`HeatMap::from_json`].
    pub fn load(path: &Path) -> Result<HeatMap> {
        let json = json::load(path, "heat map", MOST_BYTES)?;
        HeatMap::from_json(&json).map_err(|e| Error::file(path, e.to_string()))
    }
}

/// A value as an error shows it: never a whole file.
fn brief(value: &Value) -> String {
    match value {
        Value::Null => "missing".into(),
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
        Value::String(_) => "a text".into(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heat(layers: &[(usize, u64, &[u64])]) -> HeatMap {
        let layer =
            |&(layer, tokens, counts): &(usize, u64, &[u64])| LayerHeat { layer, tokens, counts: counts.to_vec() };
        HeatMap::new(layers.iter().map(layer).collect()).unwrap()
    }

    #[test]
    fn counts_are_found_summed_and_sorted() {
        let map = heat(&[(3, 5, &[4, 0, 6]), (4, 6, &[6, 1, 5])]);
        assert_eq!((map.count(3, 2), map.count(4, 1), map.count(4, 9), map.count(5, 0)), (6, 1, 0, 0));
        assert_eq!((map.total(), map.tokens(), map.experts()), (22, 6, 6));
        let hottest = |n| map.hottest(n).iter().map(|h| (h.layer, h.expert, h.count)).collect::<Vec<_>>();
        assert_eq!(hottest(3), [(3, 2, 6), (4, 0, 6), (4, 2, 5)]);
        assert_eq!(hottest(100).len(), 6);
    }

    #[test]
    fn merging_adds_or_changes_nothing() {
        let mut map = heat(&[(3, 5, &[4, 0, 6]), (4, 6, &[6, 1, u64::MAX])]);
        map.merge(&heat(&[(4, 2, &[1, 1, 2])])).unwrap();
        assert_eq!(map, heat(&[(3, 5, &[4, 0, 6]), (4, 8, &[7, 2, u64::MAX])]));
        let before = map.clone();
        for (other, says) in [
            (heat(&[(3, 1, &[1, 1, 1]), (9, 1, &[1, 1, 1])]), "layer 9 holds no experts"),
            (heat(&[(3, 1, &[1, 1, 1]), (4, 1, &[1, 1])]), "layer 4 has 2 experts"),
        ] {
            let error = map.merge(&other).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
            assert_eq!(map, before);
        }
    }

    #[test]
    fn a_file_comes_back() {
        let path = std::env::temp_dir().join(format!("kt-heat-{}.json", std::process::id()));
        let map = heat(&[(0, 0, &[0]), (7, u64::MAX, &[u64::MAX, 3])]);
        map.save(&path).unwrap();
        assert_eq!(HeatMap::load(&path).unwrap(), map);
        std::fs::write(&path, "{\"kt_heat_map\": 1").unwrap();
        let error = HeatMap::load(&path).unwrap_err().to_string();
        assert!(error.contains("kt-heat-") && error.contains("not JSON"), "{error}");
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(HeatMap::load(&path), Err(Error::Io { .. })));
    }

    #[test]
    fn hostile_files_are_refused_with_the_place() {
        let layers = |text: &str| format!("{{\"kt_heat_map\": 1, \"layers\": {text}}}");
        let counts = |text: &str| layers(&format!("[{{\"layer\": 2, \"tokens\": 1, \"counts\": {text}}}]"));
        assert!(HeatMap::from_json(&serde_json::from_str(&counts("[1, 2]")).unwrap()).is_ok());
        let cases = [
            ("[]".into(), "no key kt_heat_map"),
            ("{\"kt_heat_map\": 2}".into(), "version 2; this program reads version 1"),
            ("{\"kt_heat_map\": [[1]]}".into(), "version a list"),
            ("{\"kt_heat_map\": 1}".into(), "layers must be a list"),
            (layers("{}"), "layers must be a list"),
            (layers("[3]"), "layers[0].layer is missing"),
            (layers("[{\"layer\": -1}]"), "layers[0].layer is -1"),
            (layers("[{\"layer\": 1}]"), "layers[0].tokens is missing"),
            (layers("[{\"layer\": 1, \"tokens\": 1e300}]"), "layers[0].tokens is 1e+300"),
            (layers("[{\"layer\": 1, \"tokens\": 1, \"counts\": 7}]"), "layers[0].counts must be a list"),
            (counts("[1, -2]"), "layers[0].counts[1] is -2"),
            (counts("[0.5]"), "layers[0].counts[0] is 0.5"),
            (counts("[1, 2, \"NaN\"]"), "layers[0].counts[2] is a text"),
            (counts("[null]"), "layers[0].counts[0] is missing"),
            (counts("[18446744073709551616]"), "layers[0].counts[0] is 1.8446744073709552e+19"),
            (counts("[]"), "layer 2 has no experts"),
            (
                layers(
                    "[{\"layer\": 2, \"tokens\": 0, \"counts\": [1]}, {\"layer\": 2, \"tokens\": 0, \"counts\": [1]}]",
                ),
                "layers[1]: layer 2 follows layer 2",
            ),
        ];
        for (text, says) in cases {
            let error = HeatMap::from_json(&serde_json::from_str(&text).unwrap()).unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
        // JSON has no NaN.
        assert!(serde_json::from_str::<Value>(&counts("[NaN]")).is_err());
    }
}
