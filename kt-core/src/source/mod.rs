//! Checkpoints on disk, read through memory maps.
//!
//! [`open`] tells a container by its content. One container is one file here; `names` is the table of model families.
//!
//! | container | told by | formats of experts |
//! | --- | --- | --- |
//! | `safetensors` | `config.json` and `*.safetensors` | floats, FP8, MXFP4, MXFP8, NVFP4, compressed-tensors' integers, GPTQ, AWQ |
//! | `converted` | tensors `blk.{L}.ffn_*_exps.{e}.numa.{t}`, or directories `_layer_{L}` | kt-kernel's AMXINT4, AMXINT8, MOE_INT8 |
//! | `gguf` | magic `GGUF` | GGUF's block types |
//! | `synthetic` | made by a program | all |

pub mod converted;
pub mod cutting;
pub(crate) mod fingerprint;
pub mod gguf;
pub(crate) mod map;
pub mod metadata;
pub(crate) mod model;
pub mod names;
pub mod parts;
pub mod safetensors;
pub mod synthetic;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::format::Matrix;
use crate::layer::{LayerSpec, Proj};
use crate::routing::Routing;

pub use metadata::Metadata;
use safetensors::shards::{Files, Shards};

/// What one call of [`WeightSource::matrix`] takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reads {
    /// Bytes of mapped files that reading the whole matrix touches.
    pub mapped_bytes: u64,
    /// Bytes on the heap that the handle keeps: of a matrix that is not in the file as kernels read it.
    pub copied_bytes: u64,
}

/// A checkpoint: shapes and formats of its expert layers, and handles on their bytes.
///
/// The loader calls [`matrix`](WeightSource::matrix) from several threads at once, and keeps each returned handle for as long
/// as it needs the bytes. Opening checks everything that headers say; [`Matrix`] handles are valid for the source's map.
pub trait WeightSource: Send + Sync {
    /// The file or directory, for messages.
    fn path(&self) -> &Path;

    /// What tells this state of the checkpoint from any other, or `None` where nothing does and packed experts of it cannot be
    /// cached. It is made of names, sizes, times of change and headers of the files, and of all else that decides what
    /// [`matrix`](WeightSource::matrix) returns; no weights are read for it.
    fn fingerprint(&self) -> Option<u128> {
        None
    }

    /// The expert layers, by rising [`LayerSpec::index`]. Layers of multi-token prediction are not among them.
    fn layers(&self) -> &[LayerSpec];

    /// One projection of one expert. `layer` is a [`LayerSpec::index`].
    ///
    /// # Errors
    /// A layer or expert that the checkpoint does not have, or a tensor of a wrong type or shape.
    fn matrix(&self, layer: usize, expert: usize, proj: Proj) -> Result<Matrix>;

    /// The bias of one projection of one expert, where the family has them ([`LayerSpec::biases`]).
    ///
    /// # Errors
    /// As [`matrix`](WeightSource::matrix).
    fn bias(&self, _layer: usize, _expert: usize, _proj: Proj) -> Result<Option<Vec<f32>>> {
        Ok(None)
    }

    /// What one projection of an expert of a layer takes to read; headers tell. Without a word to the contrary, its stored
    /// bytes, from the file's map.
    fn reads(&self, layer: &LayerSpec, proj: Proj) -> Reads {
        let (rows, cols) = layer.shape(proj);
        Reads { mapped_bytes: layer.format(proj).stored_bytes(rows, cols), copied_bytes: 0 }
    }

    /// File and name of a projection's tensor, for messages.
    fn tensor_name(&self, layer: usize, expert: usize, proj: Proj) -> (PathBuf, String) {
        (self.path().to_owned(), format!("layer {layer}, expert {expert}, {}", proj.name()))
    }

    /// Tells the source that the bytes of this expert were copied and will not be read again soon, so that their pages
    /// need not count as this process's memory. Handles stay valid.
    fn release(&self, _layer: usize, _expert: usize) {}

    /// As [`release`](WeightSource::release), for a tensor that is not a routed expert.
    fn release_tensor(&self, _name: &str) {}

    /// What the checkpoint says of its model: `config.json`, or GGUF metadata.
    fn metadata(&self) -> &Metadata;

    /// How the router of a layer chooses experts, where the family is known.
    fn routing(&self, layer: usize) -> Option<Routing>;

    /// Names of all tensors that are not routed experts, as the container spells them.
    fn tensors(&self) -> Vec<String>;

    /// A tensor that is not a routed expert, by the container's name for it (`model.layers.0.self_attn.q_proj.weight`,
    /// `blk.0.attn_q.weight`), with its scales where it is quantized. Tensors of one dimension are matrices of one row, those of
    /// three have their first two (in row-major order) folded into rows.
    ///
    /// # Errors
    /// No such tensor, or one of a type or shape that cannot be read.
    fn tensor(&self, name: &str) -> Result<Matrix>;

    /// Bytes of all tensors that are not routed experts.
    fn dense_bytes(&self) -> u64;

    /// A tensor that is not a routed expert as its file holds it, without looking for scales beside it; of containers that have
    /// tensors by name.
    fn stored(&self, _name: &str) -> Option<Stored> {
        None
    }

    /// A value of GGUF metadata in the file's own encoding, its type in front: what a writer copies.
    fn metadata_bytes(&self, _key: &str) -> Option<Bytes> {
        None
    }

    /// The text of a file that belongs to the checkpoint (`tokenizer.json`), where there is one.
    ///
    /// # Errors
    /// The file exists and cannot be read.
    fn side_file(&self, _name: &str) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }
}

/// A tensor as its file holds it.
#[derive(Debug, Clone)]
pub struct Stored {
    /// The type's name in its container: `BF16`, `F8_E4M3`; `Q4_K`.
    pub kind: String,
    /// Dimensions, slowest first.
    pub shape: Vec<usize>,
    /// Its bytes, on the map.
    pub bytes: Bytes,
}

/// Opens a checkpoint: a safetensors directory, one of experts that kt-kernel converted, or a GGUF file (of a split file, any part).
/// Reads headers only (of converted INT8 experts, one matrix too).
///
/// # Errors
/// The path does not exist, is neither, or its headers are wrong; the error names the file and the tensor.
pub fn open(path: impl AsRef<Path>) -> Result<Arc<dyn WeightSource>> {
    let path = path.as_ref();
    let io = |source| Error::Io { path: path.to_owned(), source };
    if std::fs::metadata(path).map_err(io)?.is_dir() {
        // GGUF files may come with stray safetensors beside them; a Hugging Face checkpoint always has its config.
        let mut ggufs: Vec<PathBuf> = Vec::new();
        let mut safetensors = false;
        for entry in std::fs::read_dir(path).map_err(io)? {
            let p = entry.map_err(io)?.path();
            match p.extension().and_then(|e| e.to_str()) {
                Some("safetensors") => safetensors = true,
                Some("gguf") => ggufs.push(p),
                _ => {}
            }
        }
        ggufs.sort();
        let config = path.join("config.json").is_file();
        return match ggufs.first() {
            Some(first) if !(safetensors && config) => {
                if !ggufs.iter().all(|g| gguf::is_part_of(first, g)) {
                    let what = format!("{} GGUF files of different models here; name the one to open", ggufs.len());
                    return Err(Error::file(path, what));
                }
                Ok(Arc::new(gguf::GgufSource::open(first)?))
            }
            _ if !safetensors && converted::is_tree(path) => Ok(Arc::new(converted::ConvertedSource::open(path)?)),
            _ if safetensors || config => open_safetensors(path),
            _ => {
                let what =
                    "no .safetensors and no .gguf file in this directory; name a checkpoint's directory or a GGUF file";
                Err(Error::file(path, what))
            }
        };
    }
    let mut magic = [0u8; 4];
    let mut file = std::fs::File::open(path).map_err(io)?;
    let got = std::io::Read::read(&mut file, &mut magic).map_err(io)?;
    if got == 4 && &magic == b"GGUF" {
        return Ok(Arc::new(gguf::GgufSource::open(path)?));
    }
    if path.extension().is_some_and(|e| e == "safetensors") {
        let dir = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        return open_safetensors(dir);
    }
    Err(Error::file(path, "neither a GGUF file (magic `GGUF`) nor a safetensors checkpoint's directory"))
}

/// A directory of safetensors files: as published, or as kt-kernel's converter leaves it.
fn open_safetensors(path: &Path) -> Result<Arc<dyn WeightSource>> {
    let shards = Shards::open(path, Files::Directory)?;
    match converted::is_merged(&shards) {
        true => Ok(Arc::new(converted::ConvertedSource::from_shards(shards, None)?)),
        false => Ok(Arc::new(safetensors::SafetensorsSource::from_shards(shards)?)),
    }
}
