//! The CPU flow of one layer call, written once for every [`Kernel`].
//!
//! ```text
//! region   run 1   tokens                        round and pack the input row of each token, once per layer
//!          run 2   (expert, rows) x 128 outputs  gate and up products, biases, activation; pack into the down input
//!          run 3   outputs of down               for each expert, in order: output += weight * (down product + bias)
//! ```
//!
//! Every number of the output is computed by one task from start to end, and sums run over experts in rising order, so the
//! result is bit-identical for any number of threads. Runs share one parallel region: the team stays awake between them.
//! The kernel sees all rows of an expert at once (up to [`ROWS`]) and chooses its product by their number.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use super::input::{BLOCK, InputLayout, Inputs};
use super::kernel::{Kernel, Outputs, Scratch, Weights};
use super::memory::{AlignedBytes, Grid, Pieces, zeroed_pages};
use super::team::{Region, Team};
use super::tier::Tier;
use crate::activation::Activation;
use crate::backend::{Backend, ExpertBank, Fit, LinearOp, LoadContext};
use crate::error::{Error, Result, Unsupported};
use crate::format::{Format, Matrix};
use crate::layer::{LayerSpec, Proj};
use crate::pending::{Pending, contain};
use crate::source::WeightSource;
use crate::work::Work;

/// Most rows of one expert in one task: unpacked weights are then used often enough (256 times), and gate and up tiles
/// (2 x 256 x 128 x 4 bytes) still fit a second-level cache.
const ROWS: usize = 256;

/// The packed inputs of the tokens of one expert, side by side: what a thread gathered last.
#[derive(Default)]
pub(crate) struct Gathered {
    /// The layer call and the chunk that the bytes are of; calls are counted from 1.
    of: (u64, usize),
    bytes: AlignedBytes,
}

impl Gathered {
    /// The rows `tokens` of `x`, which are the rows of chunk `of.1` of layer call `of.0`; as they are where they follow each other.
    fn rows<'a>(&'a mut self, x: Inputs<'a>, tokens: &[u32], of: (u64, usize)) -> (Inputs<'a>, Range<usize>) {
        if let [first, ..] = *tokens
            && tokens.windows(2).all(|w| w[0] + 1 == w[1])
        {
            return (x, first as usize..first as usize + tokens.len());
        }
        let bytes = self.bytes.get(x.layout().bytes(tokens.len(), x.cols()));
        if self.of != of {
            let mut to = bytes.chunks_exact_mut(x.layout().block_bytes());
            for block in 0..x.blocks() {
                for (&token, to) in tokens.iter().zip(&mut to) {
                    to.copy_from_slice(x.block(block, token as usize));
                }
            }
            self.of = of;
        }
        (Inputs::new(x.layout(), tokens.len(), x.cols(), bytes), 0..tokens.len())
    }
}

/// Counts layer calls, so that no thread takes what it gathered for an earlier one for this one's.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// Experts on the CPU, with one kernel.
pub struct CpuBackend<K> {
    name: &'static str,
    kernel: K,
}

impl<K: Kernel> CpuBackend<K> {
    /// A backend of this name; the kernel value proves that its instructions exist.
    pub fn new(name: &'static str, kernel: K) -> Self {
        CpuBackend { name, kernel }
    }

    fn rank(&self) -> u32 {
        Tier::ALL.iter().position(|&t| t == self.kernel.tier()).unwrap_or(0) as u32
    }

    /// Loads one expert's three matrices: packs them into their pieces of the layer's arena, or keeps them in place.
    fn load_expert(
        &self,
        layer: &LayerSpec,
        expert: usize,
        from: &dyn WeightSource,
        arena: &Pieces<'_, u8>,
        first_piece: usize,
    ) -> Result<[Option<Matrix>; 3]> {
        let mut kept = [None, None, None];
        for proj in Proj::ALL {
            let matrix = from.matrix(layer.index, expert, proj)?;
            let (rows, cols) = layer.shape(proj);
            let fail = |what: String| {
                let (file, name) = from.tensor_name(layer.index, expert, proj);
                Error::tensor(file, name, what)
            };
            if (matrix.rows(), matrix.cols(), matrix.format()) != (rows, cols, layer.format(proj)) {
                return Err(fail(format!(
                    "is {} [{}, {}], its layer says {} [{rows}, {cols}]",
                    matrix.format(),
                    matrix.rows(),
                    matrix.cols(),
                    layer.format(proj)
                )));
            }
            matrix.check_scales().map_err(fail)?;
            let out = arena.take(first_piece + proj.index());
            if out.is_empty() {
                kept[proj.index()] = Some(matrix);
            } else {
                self.kernel.pack(&matrix, out);
            }
        }
        if kept.iter().all(Option::is_none) {
            from.release(layer.index, expert);
        }
        Ok(kept)
    }
}

impl<K: Kernel> Backend for CpuBackend<K> {
    fn name(&self) -> &str {
        self.name
    }

    fn probe(&self, layer: &LayerSpec) -> Result<Fit, Unsupported> {
        let (mut packed, mut mapped) = (0u64, 0u64);
        let mut layouts = [InputLayout::F32; 3];
        let mut hows: Vec<&str> = Vec::new();
        for proj in Proj::ALL {
            let (rows, cols) = layer.shape(proj);
            let format = layer.format(proj);
            let (layout, how) = self.kernel.accepts(format, rows, cols)?;
            layouts[proj.index()] = layout;
            if !hows.contains(&how) {
                hows.push(how);
            }
            match self.kernel.packed_bytes(format, rows, cols) {
                Some(bytes) => packed += bytes as u64,
                None => mapped += format.stored_bytes(rows, cols),
            }
        }
        let per_row = |layout: InputLayout, cols| layout.bytes(1, cols) as u64;
        let mut scratch =
            per_row(layouts[0], layer.hidden) + per_row(layouts[2], layer.intermediate) * layer.top_k as u64;
        if layouts[1] != layouts[0] {
            scratch += per_row(layouts[1], layer.hidden);
        }
        Ok(Fit {
            rank: self.rank(),
            tier: self.kernel.tier().to_string(),
            how: format!("{}; {}", hows.join("; "), layouts[0]),
            packed_bytes: packed * layer.experts as u64,
            mapped_bytes: mapped * layer.experts as u64,
            scratch_bytes_per_token: scratch,
            inputs: [layouts[0], layouts[2]],
        })
    }

    fn load(
        &self,
        layer: &LayerSpec,
        experts: &[u32],
        from: &dyn WeightSource,
        context: &LoadContext,
    ) -> Result<Box<dyn ExpertBank>> {
        self.probe(layer)?;
        let sizes = Proj::ALL.map(|p| {
            let (rows, cols) = layer.shape(p);
            self.kernel.packed_bytes(layer.format(p), rows, cols).unwrap_or(0)
        });
        let mut arena = zeroed_pages(sizes.iter().sum::<usize>() * experts.len())?;
        let used = sizes.iter().sum::<usize>() * experts.len();
        let pieces = Pieces::new(&mut arena[..used], experts.iter().flat_map(|_| sizes));
        let loaded: Vec<Mutex<Option<Result<LoadedExpert>>>> = experts.iter().map(|_| Mutex::new(None)).collect();
        let cancelled = || context.progress.advance(0).is_err();
        contain(self.name, layer.index, || {
            context.team.region().run(experts.len(), |i, _| {
                if cancelled() {
                    return;
                }
                let expert = experts[i] as usize;
                let result = self.load_expert(layer, expert, from, &pieces, i * 3).and_then(|kept| {
                    let mut biases: [Option<Vec<f32>>; 3] = [None, None, None];
                    if layer.biases {
                        for proj in Proj::ALL {
                            biases[proj.index()] = from.bias(layer.index, expert, proj)?;
                        }
                    }
                    context.progress.advance(layer.expert_bytes())?;
                    Ok(LoadedExpert { kept, biases })
                });
                *loaded[i].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
            });
        })?;
        drop(pieces);
        context.progress.advance(0)?;
        let arena = arena
            .make_read_only()
            .map_err(|source| Error::Io { path: "(protecting packed weights)".into(), source })?;
        let arena = Bytes::from_owner(arena);
        let mut bank = Vec::with_capacity(experts.len());
        let mut offset = 0;
        for cell in loaded {
            let loaded = cell.into_inner().unwrap_or_else(PoisonError::into_inner).unwrap_or(Err(Error::Cancelled))?;
            let mut kept = loaded.kept.into_iter();
            let weights = Proj::ALL.map(|p| {
                let (rows, cols) = layer.shape(p);
                let size = sizes[p.index()];
                offset += size;
                match kept.next().flatten() {
                    Some(matrix) => Weights::in_place(matrix),
                    None => Weights::packed(layer.format(p), rows, cols, arena.slice(offset - size..offset)),
                }
            });
            bank.push(Expert { weights, biases: loaded.biases });
        }
        let layouts = self.probe(layer)?.inputs;
        let (up_layout, _) = self.kernel.accepts(layer.format(Proj::Up), layer.intermediate, layer.hidden)?;
        Ok(Box::new(CpuBank(Arc::new(BankInner {
            name: self.name,
            layer: layer.index,
            kernel: self.kernel,
            team: context.team.clone(),
            hidden: layer.hidden,
            intermediate: layer.intermediate,
            activation: layer.activation,
            layouts: [layouts[0], up_layout, layouts[1]],
            experts: bank,
            packed_bytes: used as u64,
        }))))
    }

    fn probe_linear(&self, format: Format, rows: usize, cols: usize) -> Result<Fit, Unsupported> {
        let (layout, how) = self.kernel.accepts(format, rows, cols)?;
        let packed = self.kernel.packed_bytes(format, rows, cols);
        Ok(Fit {
            rank: self.rank(),
            tier: self.kernel.tier().to_string(),
            how: format!("{how}; {layout}"),
            packed_bytes: packed.unwrap_or(0) as u64,
            mapped_bytes: if packed.is_none() { format.stored_bytes(rows, cols) } else { 0 },
            scratch_bytes_per_token: layout.bytes(1, cols) as u64,
            inputs: [layout; 2],
        })
    }

    fn linear(&self, matrix: &Matrix, context: &LoadContext) -> Result<Box<dyn LinearOp>> {
        let (format, rows, cols) = (matrix.format(), matrix.rows(), matrix.cols());
        let (layout, _) = self.kernel.accepts(format, rows, cols)?;
        matrix.check_scales().map_err(Error::Invalid)?;
        let (weights, packed_bytes) = match self.kernel.packed_bytes(format, rows, cols) {
            None => (Weights::in_place(matrix.clone()), 0),
            Some(bytes) => {
                let mut map = zeroed_pages(bytes)?;
                contain(self.name, 0, || self.kernel.pack(matrix, &mut map[..bytes]))?;
                let map = map
                    .make_read_only()
                    .map_err(|source| Error::Io { path: "(protecting packed weights)".into(), source })?;
                (Weights::packed(format, rows, cols, Bytes::from_owner(map).slice(..bytes)), bytes as u64)
            }
        };
        Ok(Box::new(CpuLinear { kernel: self.kernel, team: context.team.clone(), layout, weights, packed_bytes }))
    }
}

struct LoadedExpert {
    kept: [Option<Matrix>; 3],
    biases: [Option<Vec<f32>>; 3],
}

struct Expert {
    weights: [Weights; 3],
    biases: [Option<Vec<f32>>; 3],
}

impl Expert {
    fn bias(&self, proj: Proj, outputs: Range<usize>) -> Option<&[f32]> {
        self.biases[proj.index()].as_ref().map(|b| &b[outputs])
    }
}

struct BankInner<K> {
    name: &'static str,
    layer: usize,
    kernel: K,
    team: Arc<Team>,
    hidden: usize,
    intermediate: usize,
    activation: Activation,
    /// Of the inputs of gate, up and down.
    layouts: [InputLayout; 3],
    experts: Vec<Expert>,
    packed_bytes: u64,
}

struct CpuBank<K>(Arc<BankInner<K>>);

impl<K: Kernel> ExpertBank for CpuBank<K> {
    fn submit(&self, work: Work) -> Pending<Work> {
        let inner = self.0.clone();
        self.0.team.spawn(self.0.name, self.0.layer, move || Ok(inner.run(work)))
    }

    fn run(&self, work: Work) -> Result<Work> {
        contain(self.0.name, self.0.layer, || self.0.run(work))
    }

    fn packed_bytes(&self) -> u64 {
        self.0.packed_bytes
    }
}

/// Rows of one expert that are multiplied together, and where their down inputs lie.
struct Chunk {
    expert: usize,
    rows: Range<usize>,
    h: Range<usize>,
}

/// Packs rows `0..rows` of a matrix of `cols` columns, one task per row; `read(row, columns, out)` gets the values.
fn pack_rows<K: Kernel>(
    kernel: K,
    region: &mut Region<'_>,
    layout: InputLayout,
    (rows, cols): (usize, usize),
    bytes: &mut [u8],
    read: impl Fn(usize, Range<usize>, &mut [f32]) -> bool + Sync,
) {
    let pieces = Pieces::every(bytes, layout.block_bytes());
    let pack = |row: usize| {
        let mut values = [0f32; BLOCK];
        for b in 0..cols.div_ceil(BLOCK) {
            let columns = b * BLOCK..cols.min((b + 1) * BLOCK);
            let values = &mut values[..columns.len()];
            if !read(row, columns, values) {
                return;
            }
            kernel.pack_input(layout, values, pieces.take(b * rows + row));
        }
    };
    // One row takes about a microsecond: less than waking anybody.
    if rows <= 2 {
        region.run(1, |_, _| (0..rows).for_each(pack));
    } else {
        region.run(rows, |row, _| pack(row));
    }
}

/// Width of output tiles: enough of them for the team, and never below the 16 outputs of a panel. The wider, the fewer times inputs are
/// read.
fn tile_cols(outputs: usize, row_tiles: usize, threads: usize) -> usize {
    let mut width = 2 * BLOCK;
    while width > 16 && outputs.div_ceil(width) * row_tiles < 4 * threads {
        width /= 2;
    }
    width
}

impl<K: Kernel> BankInner<K> {
    fn run(&self, mut work: Work) -> Work {
        if work.rows.is_empty() {
            return work;
        }
        let mut region = self.team.region();
        let mut buffers = region.take_buffers();
        let (kernel, tokens, hidden) = (self.kernel, work.tokens, self.hidden);
        let [gate_layout, up_layout, down_layout] = self.layouts;

        let mut used = vec![false; tokens];
        work.rows.iter().for_each(|r| used[r.token as usize] = true);
        let input = work.input.clone();
        let first = work.first;
        let read = |row: usize, columns: Range<usize>, out: &mut [f32]| {
            let start = (first + row) * hidden;
            input.read(start + columns.start..start + columns.end, out);
            used[row]
        };
        let [x0, x1] = &mut buffers.x;
        let x0 = x0.get(gate_layout.bytes(tokens, hidden));
        pack_rows(kernel, &mut region, gate_layout, (tokens, hidden), x0, read);
        let gate_x = Inputs::new(gate_layout, tokens, hidden, x0);
        let up_x = if up_layout == gate_layout {
            gate_x
        } else {
            let x1 = x1.get(up_layout.bytes(tokens, hidden));
            pack_rows(kernel, &mut region, up_layout, (tokens, hidden), x1, read);
            Inputs::new(up_layout, tokens, hidden, x1)
        };

        let mut chunks = Vec::new();
        let mut h_bytes = 0;
        for group in &work.experts {
            for start in group.rows.clone().step_by(ROWS) {
                let rows = start..group.rows.end.min(start + ROWS);
                let bytes = down_layout.bytes(rows.len(), self.intermediate);
                chunks.push(Chunk { expert: group.local as usize, rows, h: h_bytes..h_bytes + bytes });
                h_bytes += bytes;
            }
        }
        let row_tokens: Vec<u32> = work.rows.iter().map(|r| r.token).collect();
        let h = buffers.h.get(h_bytes);
        let blocks = self.intermediate.div_ceil(BLOCK);
        let lengths = chunks.iter().flat_map(|c| (0..blocks).map(move |_| c.rows.len() * down_layout.block_bytes()));
        let pieces = Pieces::new(h, lengths);
        let threads = region.threads();
        let call = CALLS.fetch_add(1, Ordering::Relaxed) + 1;
        // With experts enough for all threads, each does all blocks of one, whose rows then stay in its cache.
        let together = if chunks.len() >= 8 * threads { blocks } else { 1 };
        let parts = chunks.len() * blocks;
        region.run(parts / together, |task, scratch| {
            for part in task * together..(task + 1) * together {
                let (chunk, block) = (&chunks[part / blocks], part % blocks);
                let outputs = block * BLOCK..self.intermediate.min((block + 1) * BLOCK);
                let of = (call, part / blocks);
                let tokens = &row_tokens[chunk.rows.clone()];
                // The other threads probably take the tasks in between.
                let next =
                    if (part + 1).is_multiple_of(together) { part + 1 + (threads - 1) * together } else { part + 1 };
                let next = chunks.get(next / blocks).map(|chunk| (&self.experts[chunk.expert], next % blocks * BLOCK));
                self.gate_up((chunk, of), (outputs, next), [gate_x, up_x], tokens, pieces.take(part), scratch);
            }
        });
        drop(pieces);

        let h = &*h;
        // All tokens in one tile: cut, an expert's rows would be fewer than it has, and its weights read again.
        let width = tile_cols(hidden, 1, region.threads());
        let grid = Grid::new(&mut work.output, tokens, hidden, tokens, width);
        region.run(grid.tiles(), |task, scratch| {
            let mut tile = grid.take(task);
            let mut y = std::mem::take(&mut scratch.tiles[0]);
            for (i, chunk) in chunks.iter().enumerate() {
                let expert = &self.experts[chunk.expert];
                let width = tile.cols.len();
                y.resize(chunk.rows.len() * width, 0.0);
                let x = Inputs::new(down_layout, chunk.rows.len(), self.intermediate, &h[chunk.h.clone()]);
                let weights = &expert.weights[Proj::Down.index()];
                let following = chunks.get(i + 1).map(|next| &self.experts[next.expert]);
                let next = following.map(|next| (&next.weights[Proj::Down.index()], tile.cols.start));
                let outputs = Outputs { of: weights, range: tile.cols.clone(), next };
                kernel.product(outputs, x, 0..chunk.rows.len(), &mut y, scratch);
                let bias = expert.bias(Proj::Down, tile.cols.clone());
                for (row, y) in work.rows[chunk.rows.clone()].iter().zip(y.chunks_exact_mut(width)) {
                    if let Some(bias) = bias {
                        y.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
                    }
                    kernel.add(row.weight, y, tile.row(row.token as usize));
                }
            }
            scratch.tiles[0] = y;
        });
        drop(grid);
        region.put_buffers(buffers);
        work.spent = region.spent();
        work
    }

    fn gate_up(
        &self,
        (chunk, of): (&Chunk, (u64, usize)),
        (outputs, next): (Range<usize>, Option<(&Expert, usize)>),
        x: [Inputs<'_>; 2],
        tokens: &[u32],
        h: &mut [u8],
        scratch: &mut Scratch,
    ) {
        let (expert, width) = (&self.experts[chunk.expert], outputs.len());
        let [mut gate, mut up] = std::mem::take(&mut scratch.tiles);
        let mut gathered = std::mem::take(&mut scratch.gathered);
        let [of_gate, of_up] = &mut gathered;
        let gate_x = of_gate.rows(x[0], tokens, of);
        let up_x = if self.layouts[1] == self.layouts[0] { gate_x.clone() } else { of_up.rows(x[1], tokens, of) };
        let weights = |proj: Proj| &expert.weights[proj.index()];
        let after_gate = Some((weights(Proj::Up), outputs.start));
        let after_up = next.map(|(expert, start)| (&expert.weights[Proj::Gate.index()], start));
        for (proj, (x, rows), tile, next) in
            [(Proj::Gate, gate_x, &mut gate, after_gate), (Proj::Up, up_x, &mut up, after_up)]
        {
            tile.resize(tokens.len() * width, 0.0);
            let part = Outputs { of: weights(proj), range: outputs.clone(), next };
            self.kernel.product(part, x, rows, tile, scratch);
            if let Some(bias) = expert.bias(proj, outputs.clone()) {
                for row in tile.chunks_exact_mut(width) {
                    row.iter_mut().zip(bias).for_each(|(v, b)| *v += b);
                }
            }
        }
        self.kernel.activate(self.activation, &mut gate, &up);
        let layout = self.layouts[Proj::Down.index()];
        for (row, out) in gate.chunks_exact(width).zip(h.chunks_exact_mut(layout.block_bytes())) {
            self.kernel.pack_input(layout, row, out);
        }
        scratch.tiles = [gate, up];
        scratch.gathered = gathered;
    }
}

struct CpuLinear<K> {
    kernel: K,
    team: Arc<Team>,
    layout: InputLayout,
    weights: Weights,
    packed_bytes: u64,
}

impl<K: Kernel> LinearOp for CpuLinear<K> {
    fn rows(&self) -> usize {
        self.weights.rows()
    }

    fn cols(&self) -> usize {
        self.weights.cols()
    }

    fn packed_bytes(&self) -> u64 {
        self.packed_bytes
    }

    fn forward(&self, x: &[f32], y: &mut [f32]) {
        let (outputs, cols) = (self.rows(), self.cols());
        if outputs == 0 || cols == 0 {
            y.fill(0.0);
            return;
        }
        let n = x.len() / cols;
        let mut region = self.team.region();
        let mut buffers = region.take_buffers();
        // Passes of ROWS * 16 rows keep the packed input small however long the prompt is.
        for (x, y) in x.chunks(cols * ROWS * 16).zip(y.chunks_mut(outputs * ROWS * 16)) {
            let n = n.min(x.len() / cols);
            let bytes = buffers.x[0].get(self.layout.bytes(n, cols));
            pack_rows(self.kernel, &mut region, self.layout, (n, cols), bytes, |row, columns, out| {
                out.copy_from_slice(&x[row * cols..][columns]);
                true
            });
            let inputs = Inputs::new(self.layout, n, cols, bytes);
            let width = tile_cols(outputs, n.div_ceil(ROWS), region.threads());
            let grid = Grid::new(y, n, outputs, ROWS, width);
            region.run(grid.tiles(), |task, scratch| {
                let mut tile = grid.take(task);
                let mut out = std::mem::take(&mut scratch.tiles[0]);
                let width = tile.cols.len();
                out.resize(tile.rows.len() * width, 0.0);
                let outputs = Outputs::new(&self.weights, tile.cols.clone());
                self.kernel.product(outputs, inputs, tile.rows.clone(), &mut out, scratch);
                for (row, out) in tile.rows.clone().zip(out.chunks_exact(width)) {
                    tile.row(row).copy_from_slice(out);
                }
                scratch.tiles[0] = out;
            });
        }
        region.put_buffers(buffers);
    }
}
