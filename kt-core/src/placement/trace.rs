//! What a router chose, token by token: what placements are compared on without a model.
//!
//! As a file it is JSON, one string of ids a layer: those of a token side by side, `.` for none, tokens apart by a blank:
//!
//! ```text
//! {"kt_trace": 1, "layers": [{"layer": 3, "experts": 128, "top_k": 8, "ids": "17,0,44,… 3,99,…"}, …]}
//! ```

use std::fmt::Write;
use std::path::Path;

use serde_json::{Value, json};

use crate::batch::NO_EXPERT;
use crate::error::{Error, Result};
use crate::heat::{HeatMap, LayerHeat};
use crate::json;

/// Version of the file, its first key.
const VERSION: u64 = 1;
/// Largest file read: a million tokens through 60 layers of 8 experts each take about 2 GiB; traces are of thousands.
const MOST_BYTES: u64 = 256 << 20;

/// No layer has more experts.
const MOST_EXPERTS: usize = 1 << 24;

/// What the router of one layer chose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerTrace {
    /// Index of the layer in the model.
    pub layer: usize,
    /// Its experts.
    pub experts: usize,
    /// Chosen per token.
    pub top_k: usize,
    /// `[tokens, top_k]`, [`NO_EXPERT`] for none.
    pub ids: Vec<i32>,
}

impl LayerTrace {
    /// Tokens in it.
    pub fn tokens(&self) -> usize {
        self.ids.len() / self.top_k.max(1)
    }

    /// Those tokens of a range that there are.
    fn clamp(&self, tokens: std::ops::Range<usize>) -> std::ops::Range<usize> {
        let start = tokens.start.min(self.tokens());
        start..tokens.end.min(self.tokens()).max(start)
    }

    /// How often each expert was chosen by the tokens of a range.
    pub fn counts(&self, tokens: std::ops::Range<usize>) -> Vec<u64> {
        let mut counts = vec![0; self.experts];
        let tokens = self.clamp(tokens);
        let ids = &self.ids[tokens.start * self.top_k..tokens.end * self.top_k];
        for &id in ids.iter().filter(|&&id| id != NO_EXPERT) {
            counts[id as usize] += 1;
        }
        counts
    }
}

/// What the routers of a model chose, token by token.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trace {
    layers: Vec<LayerTrace>,
}

impl Trace {
    /// A trace of these layers.
    ///
    /// # Errors
    /// [`Error::Invalid`]: layers that do not rise, an expert that a layer has not, a part of a token, no choice for a token, more than 2^24 experts.
    pub fn new(layers: Vec<LayerTrace>) -> Result<Trace> {
        let invalid = |l: &LayerTrace, what: String| Err(Error::Invalid(format!("trace: layer {}: {what}", l.layer)));
        for (i, l) in layers.iter().enumerate() {
            if i > 0 && layers[i - 1].layer >= l.layer {
                return invalid(l, format!("follows layer {}; layers must rise", layers[i - 1].layer));
            }
            if l.experts > MOST_EXPERTS {
                return invalid(
                    l,
                    format!("{} experts are more than any layer has ({MOST_EXPERTS} at most)", l.experts),
                );
            }
            if l.top_k == 0 || l.ids.len() % l.top_k != 0 {
                return invalid(l, format!("{} ids are not whole tokens of {} each", l.ids.len(), l.top_k));
            }
            let bad = |id: &&i32| **id != NO_EXPERT && usize::try_from(**id).map_or(true, |id| id >= l.experts);
            if let Some(id) = l.ids.iter().find(bad) {
                return invalid(l, format!("expert {id} of {}", l.experts));
            }
        }
        Ok(Trace { layers })
    }

    pub(crate) fn of(layers: Vec<LayerTrace>) -> Trace {
        Trace { layers }
    }

    /// The layers, by rising index.
    pub fn layers(&self) -> &[LayerTrace] {
        &self.layers
    }

    /// Tokens of the layer that saw the most.
    pub fn tokens(&self) -> usize {
        self.layers.iter().map(LayerTrace::tokens).max().unwrap_or(0)
    }

    /// The same, counted.
    pub fn heat_map(&self) -> HeatMap {
        let layer = |l: &LayerTrace| {
            let tokens = l.tokens();
            LayerHeat { layer: l.layer, tokens: tokens as u64, counts: l.counts(0..tokens) }
        };
        HeatMap::of(self.layers.iter().map(layer).collect())
    }

    /// The tokens of a range: the first part to choose a placement by, say, and the rest to try it on.
    pub fn part(&self, tokens: std::ops::Range<usize>) -> Trace {
        let layer = |l: &LayerTrace| {
            let tokens = l.clamp(tokens.clone());
            LayerTrace { ids: l.ids[tokens.start * l.top_k..tokens.end * l.top_k].to_vec(), ..l.clone() }
        };
        Trace { layers: self.layers.iter().map(layer).collect() }
    }

    /// The content of the file.
    pub fn to_json(&self) -> Value {
        let layer = |l: &LayerTrace| {
            let mut ids = String::new();
            for (i, id) in l.ids.iter().enumerate() {
                if i > 0 {
                    ids.push(if i % l.top_k == 0 { ' ' } else { ',' });
                }
                match *id {
                    NO_EXPERT => ids.push('.'),
                    id => drop(write!(ids, "{id}")), // a String takes anything
                }
            }
            json!({ "layer": l.layer, "experts": l.experts, "top_k": l.top_k, "ids": ids })
        };
        json!({ "kt_trace": VERSION, "layers": self.layers.iter().map(layer).collect::<Vec<_>>() })
    }

    /// Reads what [`Trace::to_json`] gave.
    ///
    /// # Errors
    /// [`Error::Invalid`]: no trace, one of another version, or as [`Trace::new`].
    pub fn from_json(json: &Value) -> Result<Trace> {
        let invalid = |what: String| Error::Invalid(format!("trace: {what}"));
        match json.get("kt_trace").and_then(Value::as_u64) {
            Some(VERSION) => {}
            Some(version) => return Err(invalid(format!("version {version}; this program reads version {VERSION}"))),
            None => return Err(invalid("there is no key kt_trace: this is something else".into())),
        }
        let list =
            json.get("layers").and_then(Value::as_array).ok_or_else(|| invalid("layers must be a list".into()))?;
        let mut layers = Vec::with_capacity(list.len());
        for (i, l) in list.iter().enumerate() {
            let number = |key: &str| {
                let number = l.get(key).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
                number.ok_or_else(|| invalid(format!("layers[{i}].{key} is not a number")))
            };
            let text =
                l.get("ids").and_then(Value::as_str).ok_or_else(|| invalid(format!("layers[{i}].ids is no text")))?;
            let (layer, experts, top_k) = (number("layer")?, number("experts")?, number("top_k")?);
            let mut ids = Vec::new();
            for (t, token) in text.split_ascii_whitespace().enumerate() {
                let before = ids.len();
                for id in token.split(',') {
                    let id = if id == "." { Some(NO_EXPERT) } else { id.parse().ok().filter(|&id: &i32| id >= 0) };
                    ids.push(
                        id.ok_or_else(|| invalid(format!("layers[{i}].ids: token {t} is not a list of experts")))?,
                    );
                }
                if ids.len() - before != top_k {
                    return Err(invalid(format!(
                        "layers[{i}].ids: token {t} has {} experts, not {top_k}",
                        ids.len() - before
                    )));
                }
            }
            layers.push(LayerTrace { layer, experts, top_k, ids });
        }
        Trace::new(layers)
    }

    /// Writes the file, replacing one that is there.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, path: &Path) -> Result<()> {
        json::save(path, &self.to_json())
    }

    /// Reads a file that [`Trace::save`] wrote.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Checkpoint`] with the file's name, as [`Trace::from_json`].
    pub fn load(path: &Path) -> Result<Trace> {
        let json = json::load(path, "trace", MOST_BYTES)?;
        Trace::from_json(&json).map_err(|e| Error::file(path, e.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_comes_back_and_counts() {
        let trace = Trace::new(vec![
            LayerTrace { layer: 1, experts: 4, top_k: 2, ids: vec![0, 3, 3, -1, 1, 3] },
            LayerTrace { layer: 5, experts: 2, top_k: 1, ids: vec![] },
        ])
        .unwrap();
        assert_eq!(trace.to_json()["layers"][0]["ids"], "0,3 3,. 1,3");
        let path = std::env::temp_dir().join(format!("kt-trace-{}.json", std::process::id()));
        trace.save(&path).unwrap();
        assert_eq!(Trace::load(&path).unwrap(), trace);
        std::fs::write(&path, "{").unwrap();
        assert!(Trace::load(&path).unwrap_err().to_string().contains("not JSON"));
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(Trace::load(&path), Err(Error::Io { .. })));
        let heat = trace.heat_map();
        assert_eq!(heat.layers()[0], LayerHeat { layer: 1, tokens: 3, counts: vec![1, 1, 0, 3] });
        assert_eq!((trace.tokens(), heat.layers()[1].tokens), (3, 0));
        assert_eq!(trace.part(1..9).layers()[0].ids, [3, -1, 1, 3]);
        assert_eq!(trace.part(8..9).tokens(), 0);
        assert_eq!(trace.layers()[0].counts(1..usize::MAX), [0, 1, 0, 2]);
        let many = LayerTrace { layer: 1, experts: 1 << 40, top_k: 2, ids: vec![] };
        assert!(Trace::new(vec![many]).unwrap_err().to_string().contains("more than any layer has"));
    }

    #[test]
    fn hostile_files_are_refused_with_the_place() {
        let file = |ids: &str| {
            format!("{{\"kt_trace\": 1, \"layers\": [{{\"layer\": 2, \"experts\": 4, \"top_k\": 2, \"ids\": {ids}}}]}}")
        };
        assert!(Trace::from_json(&serde_json::from_str(&file("\"0,1\"")).unwrap()).is_ok());
        for (text, says) in [
            ("[]".into(), "no key kt_trace"),
            ("{\"kt_trace\": 9}".into(), "version 9"),
            ("{\"kt_trace\": 1}".into(), "layers must be a list"),
            ("{\"kt_trace\": 1, \"layers\": [{\"ids\": \"\"}]}".into(), "layers[0].layer is not a number"),
            (file("[0]"), "ids is no text"),
            (file("\"0,1 2\""), "token 1 has 1 experts, not 2"),
            (file("\"0,4\""), "layer 2: expert 4 of 4"),
            (file("\"0,-1\""), "token 0 is not a list of experts"),
            (file("\"0,\""), "token 0 is not a list of experts"),
            (file("\"0,99999999999\""), "token 0 is not a list"),
        ] {
            let error = Trace::from_json(&serde_json::from_str(&text).unwrap()).unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
        let layer = |layer| LayerTrace { layer, experts: 1, top_k: 1, ids: vec![] };
        assert!(Trace::new(vec![layer(2), layer(2)]).unwrap_err().to_string().contains("layers must rise"));
        let none = LayerTrace { top_k: 0, ..layer(0) };
        assert!(Trace::new(vec![none]).unwrap_err().to_string().contains("whole tokens"));
    }
}
