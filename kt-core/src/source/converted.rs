//! kt-kernel's converted experts: what its `convert_cpu_weights.py` writes for the methods AMXINT4, AMXINT8 and MOE_INT8.
//!
//! ```text
//! merged  *.safetensors  blk.{L}.ffn_{gate|up|down}_exps.{e}.numa.{t}.weight  I8 [bytes]     ….scale F32 [N]
//! tree    _layer_{L}/_numa_{t}/{method}_{gate|up|down}_{e}_{bytes}Byte_quant_.kt  codes       …_scale_.kt  F32 [N]
//! ```
//!
//! Both need the model's `config.json` beside them; what it says of a quantization is of the model before it was converted, and not
//! looked at. An expert is cut for the `T` NUMA nodes of the machine that it was converted for: gate and up by outputs
//! (`[I/T, H]` each), down by inputs (`[H, I/T]`), each slice with its own scale per row. Here they are whole again, in row-major
//! order: gate and up with a scale per row, down with one per row and slice, hence groups of `I/T`.
//!
//! INT8 is `code * scale`; AMXINT8 stores tiles for AMX, MOE_INT8 plain rows, in as many bytes. INT4 codes were rounded to steps of
//! 16 of the INT8 grid: a nibble is the upper half of a signed byte, and `W = (signed nibble) * 16 * scale`.
//!
//! ```text
//! tile    32 rows x 64 columns of bytes, or x 128 columns of nibbles: 2048 bytes, two halves of 16 rows
//!         half: word (c, n) of 16 x 16 is bytes 4c .. 4c + 4 of row n; the low nibble of byte j is column j, the high one column 64 + j
//! slice   blocks of N rows (64 for INT8, 128 for INT4), in them blocks of 3584 columns, in them strips of 32 rows, in them tiles
//! ```

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use safetensors::Dtype;

use super::fingerprint::{Fingerprint, Stamp};
use super::model::Model;
use super::safetensors::linear::{linear, plain};
use super::safetensors::shards::{Files, Shards, parsed, side_file};
use super::safetensors::transposed::Quantization;
use super::{Metadata, Reads, Stored, WeightSource};
use crate::error::{Error, Result};
use crate::format::float::f32_at;
use crate::format::{Format, Group, Matrix, ScaleType};
use crate::layer::{LayerSpec, Proj};
use crate::routing::Routing;

/// How the bytes of INT8 codes lie, which their number does not tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Int8Layout {
    /// Tiles for AMX: method AMXINT8.
    Tiles,
    /// Rows: method MOE_INT8, as builds for x86 write it.
    Rows,
}

/// How codes lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Codes {
    Int4Tiles,
    Int8Tiles,
    Int8Rows,
}

impl Codes {
    /// Bytes of `n` codes.
    fn bytes(self, n: usize) -> usize {
        if self == Codes::Int4Tiles { n / 2 } else { n }
    }

    /// What rows and columns of a slice are multiples of.
    fn step(self) -> (usize, usize) {
        match self {
            Codes::Int4Tiles => (TILE_ROWS, 2 * TILE_BYTES),
            Codes::Int8Tiles => (TILE_ROWS, TILE_BYTES),
            Codes::Int8Rows => (1, 1),
        }
    }

    /// Its method's name in the files of a tree.
    fn method(self) -> &'static str {
        match self {
            Codes::Int4Tiles => "INT4",
            Codes::Int8Tiles => "INT8",
            Codes::Int8Rows => "MOE_INT8",
        }
    }
}

const TILE_ROWS: usize = 32;
/// Bytes of a row of a tile.
const TILE_BYTES: usize = 64;
/// Columns of a block of tiles.
const BLOCK_COLS: usize = 3584;

/// Where the slices are.
enum Store {
    Merged(Shards),
    Tree(PathBuf),
}

/// Which slice.
#[derive(Debug, Clone, Copy)]
struct Slice {
    layer: usize,
    expert: usize,
    proj: Proj,
    node: usize,
}

/// A directory of experts that kt-kernel's converter wrote, merged into safetensors files or as its tree of `.kt` files.
pub struct ConvertedSource {
    path: PathBuf,
    store: Store,
    model: Model,
    codes: Codes,
    nodes: usize,
}

impl ConvertedSource {
    /// Opens a directory. Where names do not tell whether INT8 codes lie in tiles or rows, one matrix does: in the right order,
    /// the largest code of each row is 127 or -127.
    ///
    /// # Errors
    /// Files that are missing, truncated or of sizes that do not fit the config; INT8 codes that could be either.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::read(path.as_ref(), None)
    }

    /// As [`ConvertedSource::open`], for INT8 codes that are known to lie in some order. INT4 codes always lie in tiles.
    ///
    /// # Errors
    /// As [`ConvertedSource::open`], and where names say otherwise.
    pub fn open_as(path: impl AsRef<Path>, layout: Int8Layout) -> Result<Self> {
        Self::read(path.as_ref(), Some(layout))
    }

    fn read(path: &Path, layout: Option<Int8Layout>) -> Result<Self> {
        match is_tree(path) {
            true => Self::from_store(path.to_owned(), Store::Tree(path.to_owned()), layout),
            false => Self::from_shards(Shards::open(path, Files::Directory)?, layout),
        }
    }

    pub(super) fn from_shards(shards: Shards, layout: Option<Int8Layout>) -> Result<Self> {
        Self::from_store(shards.path().to_owned(), Store::Merged(shards), layout)
    }

    fn from_store(path: PathBuf, store: Store, layout: Option<Int8Layout>) -> Result<Self> {
        let file = path.join("config.json");
        let config = match &store {
            Store::Merged(shards) => shards.json("config.json")?,
            Store::Tree(path) => match side_file(path, "config.json")? {
                Some(text) => Some(parsed(file.clone(), &text)?),
                None => return Err(Error::file(&file, "missing: copy that of the model that was converted here")),
            },
        };
        let model = Model::read(config, &file)?;
        let mut source = ConvertedSource { path, store, model, codes: Codes::Int8Tiles, nodes: 0 };
        source.nodes = source.count_nodes()?;
        source.codes = source.find_codes(layout)?;
        let told = matches!(source.store, Store::Tree(_)) || layout.is_some() || source.codes == Codes::Int4Tiles;
        if !told {
            source.codes = source.tell_order()?;
        }
        source.check()?;
        let formats = Proj::ALL.map(|proj| source.format(proj));
        source.model.layers.iter_mut().for_each(|layer| {
            layer.formats = formats;
            layer.scales = [Some(ScaleType::F32); 3];
        });
        Ok(source)
    }

    /// The first slice there must be.
    fn first(&self) -> Slice {
        Slice { layer: self.model.layers[0].index, expert: 0, proj: Proj::Gate, node: 0 }
    }

    /// Into how many slices experts are cut.
    fn count_nodes(&self) -> Result<usize> {
        let nodes = match &self.store {
            Store::Merged(shards) => {
                let number =
                    |name: &String| name.strip_suffix(".weight")?.rsplit_once(".numa.")?.1.parse::<usize>().ok();
                shards.tensors().keys().filter_map(number).max()
            }
            Store::Tree(path) => {
                let layer = path.join(format!("_layer_{}", self.first().layer));
                let io = |source| Error::Io { path: layer.clone(), source };
                let mut most = None;
                for entry in std::fs::read_dir(&layer).map_err(io)? {
                    let name = entry.map_err(io)?.file_name();
                    let number = name.to_str().and_then(|n| n.strip_prefix("_numa_")?.parse::<usize>().ok());
                    most = most.max(number);
                }
                most
            }
        };
        let wide = self.model.layers[0].intermediate;
        match nodes.and_then(|most| most.checked_add(1)) {
            None => Err(self.fail(self.first(), "weight", "missing: experts of no NUMA node are here")),
            Some(nodes) if wide.is_multiple_of(nodes) => Ok(nodes),
            Some(nodes) => {
                let what =
                    format!("experts of {nodes} NUMA nodes are here, but their width, {wide}, is no multiple of that");
                Err(Error::file(&self.path, what))
            }
        }
    }

    /// Rows and columns of a slice.
    fn shape(&self, proj: Proj) -> (usize, usize) {
        let (rows, cols) = self.model.layers[0].shape(proj);
        if proj == Proj::Down { (rows, cols / self.nodes) } else { (rows / self.nodes, cols) }
    }

    /// How codes lie, by the first slice's name or size; between tiles and rows of bytes, as `layout` says or tiles.
    fn find_codes(&self, layout: Option<Int8Layout>) -> Result<Codes> {
        let first = self.first();
        let (rows, cols) = self.shape(first.proj);
        let codes = match &self.store {
            Store::Merged(shards) => {
                let name = name(first, "weight");
                let Some((_, t)) = shards.get(&name) else {
                    return Err(self.fail(first, "weight", "missing from the checkpoint"));
                };
                let bytes = t.byte_len();
                match (bytes == rows * cols, bytes == rows * cols / 2) {
                    (true, _) if layout == Some(Int8Layout::Rows) => Codes::Int8Rows,
                    (true, _) => Codes::Int8Tiles,
                    (_, true) => Codes::Int4Tiles,
                    _ => {
                        let what = format!(
                            "has {bytes} bytes; a slice [{rows}, {cols}] for one of {} NUMA nodes has as many codes, of 8 or 4 bits",
                            self.nodes
                        );
                        return Err(self.fail(first, "weight", what));
                    }
                }
            }
            Store::Tree(path) => {
                let dir = node_dir(path, first);
                let names = files(&dir)?;
                let known = [Codes::Int4Tiles, Codes::Int8Tiles, Codes::Int8Rows];
                let held = |codes: &Codes| {
                    let start = format!("{}_gate_0_", codes.method());
                    names.keys().any(|n| n.starts_with(&start))
                };
                match (known.into_iter().find(held), layout) {
                    (Some(Codes::Int8Tiles), Some(Int8Layout::Rows))
                    | (Some(Codes::Int8Rows), Some(Int8Layout::Tiles)) => {
                        let what =
                            format!("INT8 codes were said to lie in {layout:?}, but their files are named otherwise");
                        return Err(Error::file(dir, what.to_lowercase()));
                    }
                    (Some(codes), _) => codes,
                    (None, _) => {
                        let known = known.map(Codes::method).join(", ");
                        let what = format!(
                            "no file of the first expert's gate by one of the methods that can be read: {known}"
                        );
                        return Err(Error::file(dir, what));
                    }
                }
            }
        };
        Ok(codes)
    }

    /// Checks that slices are of whole tiles, and that every one is there, with its size.
    fn check(&self) -> Result<()> {
        let (row_step, col_step) = self.codes.step();
        for proj in Proj::ALL {
            let (rows, cols) = self.shape(proj);
            if rows % row_step != 0 || cols % col_step != 0 {
                let what = format!(
                    "a slice [{rows}, {cols}] for one of {} NUMA nodes is not of whole tiles of [{row_step}, {col_step}]",
                    self.nodes
                );
                return Err(self.fail(Slice { proj, ..self.first() }, "weight", what));
            }
        }
        for (layer, node) in self.model.layers.iter().flat_map(|l| (0..self.nodes).map(move |node| (l, node))) {
            let files = match &self.store {
                Store::Merged(_) => BTreeMap::new(),
                Store::Tree(path) => files(&node_dir(path, Slice { layer: layer.index, node, ..self.first() }))?,
            };
            for (expert, proj) in (0..layer.experts).flat_map(|e| Proj::ALL.map(|p| (e, p))) {
                let slice = Slice { layer: layer.index, expert, proj, node };
                let (rows, cols) = self.shape(proj);
                for (part, kind, want) in
                    [("weight", Dtype::I8, self.codes.bytes(rows * cols)), ("scale", Dtype::F32, rows * 4)]
                {
                    let found = match &self.store {
                        Store::Merged(shards) => match shards.get(&name(slice, part)) {
                            Some((_, t)) if t.dtype != kind => {
                                let what = format!("is of type {:?}, {kind:?} is due", t.dtype);
                                return Err(self.fail(slice, part, what));
                            }
                            tensor => tensor.map(|(_, t)| t.byte_len() as u64),
                        },
                        Store::Tree(_) => files.get(&self.file_name(slice, part)).map(|f| f.len()),
                    };
                    match found {
                        Some(bytes) if bytes == want as u64 => {}
                        Some(bytes) => {
                            return Err(self.fail(slice, part, format!("has {bytes} bytes, but {want} are due")));
                        }
                        None => return Err(self.fail(slice, part, "missing from the checkpoint")),
                    }
                }
            }
        }
        Ok(())
    }

    /// Tells tiles of bytes from rows of them by the first slice: encoders give the largest value of a row the code 127.
    fn tell_order(&self) -> Result<Codes> {
        let first = self.first();
        let (rows, cols) = self.shape(first.proj);
        let bytes = self.bytes(first, "weight")?;
        let mut out = vec![0; rows * cols];
        let mut fits = |codes: Codes| {
            let (row_step, col_step) = codes.step();
            rows % row_step == 0 && cols % col_step == 0 && {
                to_rows(codes, &bytes, (rows, cols), &mut out, cols);
                let largest = |row: &[u8]| row.iter().map(|&c| (c as i8).unsigned_abs()).max();
                out.chunks_exact(cols).all(|row| matches!(largest(row), Some(0 | 127)))
            }
        };
        match (fits(Codes::Int8Tiles), fits(Codes::Int8Rows)) {
            (true, false) => Ok(Codes::Int8Tiles),
            (false, true) => Ok(Codes::Int8Rows),
            _ => {
                let what = "INT8 codes that can lie in AMXINT8's tiles or in MOE_INT8's rows, and neither names nor codes tell: \
                            open them as one or the other (`ConvertedSource::open_as`)";
                Err(self.fail(first, "weight", what))
            }
        }
    }

    /// The bytes of a slice's codes or scales.
    fn bytes(&self, slice: Slice, part: &str) -> Result<Bytes> {
        match &self.store {
            Store::Merged(shards) => match shards.get(&name(slice, part)) {
                Some((_, t)) => Ok(shards.bytes(t)),
                None => Err(self.fail(slice, part, "missing from the checkpoint")),
            },
            Store::Tree(path) => {
                let path = node_dir(path, slice).join(self.file_name(slice, part));
                std::fs::read(&path).map(Bytes::from).map_err(|source| Error::Io { path, source })
            }
        }
    }

    /// A file of a tree; its name has the size of what it holds.
    fn file_name(&self, slice: Slice, part: &str) -> String {
        let (rows, cols) = self.shape(slice.proj);
        let (bytes, part) = match part {
            "weight" => (self.codes.bytes(rows * cols), "quant"),
            _ => (rows * 4, "scale"),
        };
        format!("{}_{}_{}_{bytes}Byte_{part}_.kt", self.codes.method(), slice.proj.name(), slice.expert)
    }

    /// File and tensor of a slice.
    fn place(&self, slice: Slice, part: &str) -> (PathBuf, String) {
        let name = name(slice, part);
        match &self.store {
            Store::Merged(shards) => (shards.file_of(&name), name),
            Store::Tree(path) => (node_dir(path, slice).join(self.file_name(slice, part)), name),
        }
    }

    fn fail(&self, slice: Slice, part: &str, what: impl Into<String>) -> Error {
        let (file, name) = self.place(slice, part);
        Error::tensor(file, name, what)
    }

    fn format(&self, proj: Proj) -> Format {
        let group = match (proj, self.nodes) {
            (Proj::Down, 2..) => Group::Of(self.shape(proj).1 as u32),
            _ => Group::Row,
        };
        if self.codes == Codes::Int4Tiles { Format::Int4(group) } else { Format::Int8(group) }
    }
}

/// Whether a directory holds a tree of `.kt` files.
pub(super) fn is_tree(path: &Path) -> bool {
    let layer = |entry: std::io::Result<std::fs::DirEntry>| {
        let name = entry.ok()?.file_name();
        name.to_str()?.strip_prefix("_layer_")?.parse::<usize>().ok()
    };
    std::fs::read_dir(path).is_ok_and(|mut entries| entries.any(|e| layer(e).is_some()))
}

/// Whether safetensors files hold converted experts.
pub(super) fn is_merged(shards: &Shards) -> bool {
    shards.tensors().keys().any(|n| n.starts_with("blk.") && n.contains("_exps.") && n.contains(".numa."))
}

/// The name of a slice's codes or scales in merged files.
fn name(slice: Slice, part: &str) -> String {
    format!("blk.{}.ffn_{}_exps.{}.numa.{}.{part}", slice.layer, slice.proj.name(), slice.expert, slice.node)
}

fn node_dir(path: &Path, slice: Slice) -> PathBuf {
    path.join(format!("_layer_{}", slice.layer)).join(format!("_numa_{}", slice.node))
}

/// A directory's files by name.
fn files(dir: &Path) -> Result<BTreeMap<String, std::fs::Metadata>> {
    let io = |source| Error::Io { path: dir.to_owned(), source };
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(dir).map_err(io)? {
        let entry = entry.map_err(io)?;
        if let Ok(name) = entry.file_name().into_string() {
            files.insert(name, entry.metadata().map_err(io)?);
        }
    }
    Ok(files)
}

/// Writes a slice of codes row by row; rows of `out` are `stride` bytes apart.
fn to_rows(codes: Codes, from: &[u8], (rows, cols): (usize, usize), out: &mut [u8], stride: usize) {
    let row_bytes = codes.bytes(cols);
    if codes == Codes::Int8Rows {
        for (from, out) in from.chunks_exact(row_bytes).zip(out.chunks_mut(stride)) {
            out[..row_bytes].copy_from_slice(from);
        }
        return;
    }
    let nibbles = codes == Codes::Int4Tiles;
    let block_rows = if nibbles { 128 } else { 64 };
    let tile_cols = codes.step().1;
    // The order in which halves of tiles follow each other.
    let mut halves = from.as_chunks::<1024>().0.iter();
    for block in (0..rows).step_by(block_rows) {
        for block_col in (0..cols).step_by(BLOCK_COLS) {
            for strip in (block..rows.min(block + block_rows)).step_by(TILE_ROWS) {
                for col in (block_col..cols.min(block_col + BLOCK_COLS)).step_by(tile_cols) {
                    for (first, half) in [strip, strip + TILE_ROWS / 2].into_iter().zip(&mut halves) {
                        for n in 0..TILE_ROWS / 2 {
                            let mut row = [0; TILE_BYTES];
                            for (c, word) in row.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                                word.copy_from_slice(&half[c * 64 + n * 4..][..4]);
                            }
                            let at = (first + n) * stride + codes.bytes(col);
                            out[at..at + TILE_BYTES].copy_from_slice(&if nibbles { pairs(&row) } else { row });
                        }
                    }
                }
            }
        }
    }
}

/// Signed nibbles of columns `j` and `64 + j` in byte `j`, as nibbles with offset 8 of columns `2j` and `2j + 1`.
fn pairs(row: &[u8; TILE_BYTES]) -> [u8; TILE_BYTES] {
    let mut out = [0; TILE_BYTES];
    let (low, high) = out.split_at_mut(TILE_BYTES / 2);
    for ((low, high), [a, b]) in low.iter_mut().zip(high).zip(row.as_chunks::<2>().0) {
        *low = (a & 15 | b << 4) ^ 0x88;
        *high = (a >> 4 | b & 0xf0) ^ 0x88;
    }
    out
}

impl WeightSource for ConvertedSource {
    fn path(&self) -> &Path {
        &self.path
    }

    fn fingerprint(&self) -> Option<u128> {
        let mut fingerprint = match &self.store {
            Store::Merged(shards) => shards.fingerprint(),
            Store::Tree(_) => Fingerprint::new("tree"),
        };
        fingerprint.add(format!("{:?}, {} nodes, {:?}", self.codes, self.nodes, self.model.layers).as_bytes());
        if let Store::Tree(path) = &self.store {
            for (layer, node) in self.model.layers.iter().flat_map(|l| (0..self.nodes).map(move |node| (l, node))) {
                let dir = node_dir(path, Slice { layer: layer.index, node, ..self.first() });
                for (name, file) in files(&dir).ok()? {
                    fingerprint.file(dir.strip_prefix(path).ok()?.join(name).as_path(), Stamp::of(&file), &[]);
                }
            }
        }
        fingerprint.finish()
    }

    fn layers(&self) -> &[LayerSpec] {
        &self.model.layers
    }

    fn matrix(&self, layer: usize, expert: usize, proj: Proj) -> Result<Matrix> {
        let (rows, cols) = self.model.layer(layer, expert, &self.path)?.shape(proj);
        let (slice_rows, slice_cols) = self.shape(proj);
        let stride = self.codes.bytes(cols);
        let mut codes = vec![0; rows * stride];
        let per_row = cols / slice_cols;
        let mut scales = vec![[0; 4]; rows * per_row];
        // Steps of the INT8 grid that a code counts.
        let unit = if self.codes == Codes::Int4Tiles { 16.0 } else { 1.0 };
        for node in 0..self.nodes {
            let slice = Slice { layer, expert, proj, node };
            let (first_row, first_col) = if proj == Proj::Down { (0, node) } else { (node * slice_rows, 0) };
            let from = self.bytes(slice, "weight")?;
            if from.len() != self.codes.bytes(slice_rows * slice_cols) {
                return Err(self.fail(slice, "weight", format!("has {} bytes now", from.len())));
            }
            let at = first_row * stride + self.codes.bytes(first_col * slice_cols);
            to_rows(self.codes, &from, (slice_rows, slice_cols), &mut codes[at..], stride);
            let from = self.bytes(slice, "scale")?;
            if from.len() != slice_rows * 4 {
                return Err(self.fail(slice, "scale", format!("has {} bytes now", from.len())));
            }
            for n in 0..slice_rows {
                scales[(first_row + n) * per_row + first_col] = (f32_at(&from, n) * unit).to_le_bytes();
            }
            if let Store::Merged(shards) = &self.store {
                // The copy takes the place of the file's pages.
                shards.release(&name(slice, "weight"), 0, 1);
            }
        }
        let scales = Some((scales.into_flattened().into(), ScaleType::F32));
        Matrix::new(self.format(proj), rows, cols, codes.into(), scales).map_err(|what| {
            let (file, name) = self.tensor_name(layer, expert, proj);
            Error::tensor(file, name, what)
        })
    }

    fn reads(&self, layer: &LayerSpec, proj: Proj) -> Reads {
        let (rows, cols) = layer.shape(proj);
        let bytes = layer.format(proj).stored_bytes(rows, cols);
        Reads { mapped_bytes: bytes, copied_bytes: bytes }
    }

    fn tensor_name(&self, layer: usize, expert: usize, proj: Proj) -> (PathBuf, String) {
        self.place(Slice { layer, expert, proj, node: 0 }, "weight")
    }

    fn release_tensor(&self, name: &str) {
        if let Store::Merged(shards) = &self.store {
            shards.release(name, 0, 1);
        }
    }

    fn metadata(&self) -> &Metadata {
        &self.model.metadata
    }

    fn routing(&self, layer: usize) -> Option<Routing> {
        self.model.routing(layer)
    }

    fn tensors(&self) -> Vec<String> {
        match &self.store {
            Store::Merged(shards) => shards.tensors().keys().filter(|n| is_dense(n)).cloned().collect(),
            Store::Tree(_) => Vec::new(),
        }
    }

    fn tensor(&self, name: &str) -> Result<Matrix> {
        let Store::Merged(shards) = &self.store else {
            let what = "a tree of `.kt` files has routed experts only; take other tensors from the original model";
            return Err(Error::tensor(&self.path, name, what));
        };
        match name.strip_suffix(".weight") {
            Some(base) => linear(shards, &Quantization::default(), base, None)?.matrix(shards),
            None => plain(shards, name),
        }
    }

    fn dense_bytes(&self) -> u64 {
        match &self.store {
            Store::Merged(shards) => {
                shards.tensors().iter().filter(|(n, _)| is_dense(n)).map(|(_, t)| t.byte_len() as u64).sum()
            }
            Store::Tree(_) => 0,
        }
    }

    fn stored(&self, name: &str) -> Option<Stored> {
        match &self.store {
            Store::Merged(shards) => shards.stored(name),
            Store::Tree(_) => None,
        }
    }

    fn side_file(&self, name: &str) -> Result<Option<Vec<u8>>> {
        match &self.store {
            Store::Merged(shards) => Ok(shards.read(name)?.map(|b| b.to_vec())),
            Store::Tree(path) => Ok(side_file(path, name)?.map(|b| b.to_vec())),
        }
    }
}

/// Whether a tensor of merged files is no part of a routed expert (`ffn_gate_exps`, and `ffn_gate_bwd_exps` for training).
fn is_dense(name: &str) -> bool {
    !(name.contains("_exps.") && name.contains(".numa."))
}
