//! A source whose experts are re-encoded as they are read.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;

use super::recode;
use crate::error::{Error, Result};
use crate::format::{Format, Matrix};
use crate::layer::{LayerSpec, Proj};
use crate::routing::Routing;
use crate::source::fingerprint::Fingerprint;
use crate::source::{Metadata, Reads, Stored, WeightSource};

/// A [`WeightSource`] that gives every routed expert of another in a format of the caller's choice.
///
/// [`matrix`](WeightSource::matrix) decodes and encodes on each call, on rayon's threads, and keeps nothing. A matrix that has
/// its format already is passed on as it is. Everything that is not a routed expert, and the metadata, stay the other's.
pub struct Requantized {
    source: Arc<dyn WeightSource>,
    layers: Vec<LayerSpec>,
}

impl Requantized {
    /// Wraps `source`; `formats` is one [`Format`] for all projections, or one each for gate, up and down.
    ///
    /// # Errors
    /// [`Error::Invalid`] names the first layer and projection whose shape the format cannot have.
    pub fn new(source: Arc<dyn WeightSource>, formats: impl Into<[Format; 3]>) -> Result<Self> {
        let formats = formats.into();
        let mut layers = source.layers().to_vec();
        for layer in &mut layers {
            for proj in Proj::ALL {
                let (format, (rows, cols)) = (formats[proj.index()], layer.shape(proj));
                format.row_bytes(cols).map_err(|e| {
                    let proj = proj.name();
                    Error::Invalid(format!(
                        "layer {}, {proj} [{rows}, {cols}] cannot become {format}: {e}; choose another format for {proj}",
                        layer.index
                    ))
                })?;
                // Scales of its own, unless it is passed on as it is.
                if layer.formats[proj.index()] != format {
                    layer.scales[proj.index()] = None;
                }
            }
            layer.formats = formats;
        }
        Ok(Requantized { source, layers })
    }

    /// Whether no projection of the layer is passed on as it is.
    fn recodes(&self, layer: &LayerSpec) -> bool {
        let stored = self.source.layers().iter().find(|l| l.index == layer.index);
        stored.is_some_and(|stored| Proj::ALL.iter().all(|&p| stored.format(p) != layer.format(p)))
    }
}

impl WeightSource for Requantized {
    fn path(&self) -> &Path {
        self.source.path()
    }

    fn fingerprint(&self) -> Option<u128> {
        let mut fingerprint = Fingerprint::new("re-encoded");
        fingerprint.add(&self.source.fingerprint()?.to_le_bytes());
        for layer in &self.layers {
            fingerprint.add(format!("{} {:?}", layer.index, layer.formats).as_bytes());
        }
        fingerprint.finish()
    }

    fn layers(&self) -> &[LayerSpec] {
        &self.layers
    }

    fn matrix(&self, layer: usize, expert: usize, proj: Proj) -> Result<Matrix> {
        let matrix = self.source.matrix(layer, expert, proj)?;
        let Some(spec) = self.layers.iter().find(|l| l.index == layer) else {
            return Ok(matrix);
        };
        let recoded = recode(&matrix, spec.format(proj)).map_err(|what| {
            let (file, tensor) = self.source.tensor_name(layer, expert, proj);
            Error::tensor(file, tensor, what)
        })?;
        if self.recodes(spec) {
            self.source.release(layer, expert);
        }
        Ok(recoded)
    }

    fn reads(&self, layer: &LayerSpec, proj: Proj) -> Reads {
        let stored = self.source.layers().iter().find(|l| l.index == layer.index).unwrap_or(layer);
        let reads = self.source.reads(stored, proj);
        if stored.format(proj) == layer.format(proj) {
            return reads;
        }
        let (rows, cols) = layer.shape(proj);
        Reads { copied_bytes: layer.format(proj).stored_bytes(rows, cols), ..reads }
    }

    fn bias(&self, layer: usize, expert: usize, proj: Proj) -> Result<Option<Vec<f32>>> {
        self.source.bias(layer, expert, proj)
    }

    fn tensor_name(&self, layer: usize, expert: usize, proj: Proj) -> (PathBuf, String) {
        self.source.tensor_name(layer, expert, proj)
    }

    fn release(&self, layer: usize, expert: usize) {
        self.source.release(layer, expert);
    }

    fn release_tensor(&self, name: &str) {
        self.source.release_tensor(name);
    }

    fn metadata(&self) -> &Metadata {
        self.source.metadata()
    }

    fn routing(&self, layer: usize) -> Option<Routing> {
        self.source.routing(layer)
    }

    fn tensors(&self) -> Vec<String> {
        self.source.tensors()
    }

    fn tensor(&self, name: &str) -> Result<Matrix> {
        self.source.tensor(name)
    }

    fn dense_bytes(&self) -> u64 {
        self.source.dense_bytes()
    }

    fn stored(&self, name: &str) -> Option<Stored> {
        self.source.stored(name)
    }

    fn metadata_bytes(&self, key: &str) -> Option<Bytes> {
        self.source.metadata_bytes(key)
    }

    fn side_file(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.source.side_file(name)
    }
}
