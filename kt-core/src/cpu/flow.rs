//! The CPU flow of one layer call, written once for every [`Kernel`].
//!
//! ```text
//! region   run 1   tokens                        round and pack the input row of each token, once per layer
//!          run 2   (expert, rows) x outputs      gate and up products, biases, activation; pack into the down input
//!          run 3   outputs of down               for each expert, in order: sums += weight * (down product + bias)
//!          run 4   tokens                        output += sums
//! ```
//!
//! Sums of some outputs of all tokens lie side by side: rows of the output are often a power of two apart, so that many of them share a few places of a
//! cache. To add a few numbers to each row at the end of run 3 took 2.6 % of a call of 1024 tokens of INT4 (two threads, Zen 4), and takes 0.5 % by tokens.
//!
//! Of few tokens, down products are tasks of run 2 as well, and run 3 only adds them. Most experts are done whole by one thread: gate, up and down lie
//! one after the other, and are then read as one stream. The last ones are cut, gate and up as said, then down: a task of down waits for those
//! that make its inputs, which threads took before; no thread waits between gate, up and down, and the last tasks are small,
//! so that threads end together.
//!
//! Every number of the output is computed by one task from start to end, and sums run over experts in rising order, so the
//! result is bit-identical for any number of threads. Runs share one parallel region: the team stays awake between them.
//! The kernel sees all rows of an expert at once (up to [`ROWS`]) and chooses its product by their number.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use bytes::Bytes;

use super::cache::{Key, PackedCache};
use super::input::{self, BLOCK, InputLayout, Inputs};
use super::kernel::{Kernel, Outputs, Scratch, Weights};
use super::memory::{AlignedBytes, Grid, GridTile, Marks, Pages, Pieces, pages_near, prefetch, residence};
use super::slice::{Columns, Sliced, Width, cut};
use super::team::{Buffers, Region, Team};
use crate::backend::{Backend, ExpertBank, Fit, LinearOp, LoadContext, Replacement, Residence};
use crate::error::{Error, Result, Unsupported};
use crate::format::{Format, Matrix};
use crate::layer::{LayerSpec, Proj};
use crate::pending::{Pending, contain};
use crate::source::WeightSource;
use crate::work::{Row, Work};

/// Most rows of one expert in one task: unpacked weights are then used often enough (256 times), and gate and up tiles
/// (2 x 256 x 128 x 4 bytes) still fit a second-level cache.
const ROWS: usize = 256;

/// Rows up to which weights stream from memory: then as many outputs are done together as their numbers fit a cache, so that a stream is long.
const FEW: usize = 8;
/// Blocks of outputs of that.
const FEW_BLOCKS: usize = 8;
/// Tokens up to which down products are made beside those of gate and up, and kept until all are there.
pub(crate) const FEW_TOKENS: usize = 64;
/// Rows up to which tiles of the output of a single matrix are wide, so that a stream is long.
const WIDE_ROWS: usize = 32;
const WIDE: Width = Width { most: 1024, each: 2 };
/// Tiles of more tokens.
const NARROW: Width = Width { most: 256, each: 4 };
/// Tokens up to which the sums of such a tile (512 KiB then) leave room in a second-level cache of 1 MiB. Those of more tokens are of half as
/// many outputs.
const NARROW_TOKENS: usize = 512;

/// How many rows before sums are added to, they are asked for: each is somewhere else in memory.
const ADDED_AHEAD: usize = 4;
/// Tasks of packing inputs that a thread has at least, where there are rows enough.
const PACKED_TASKS: usize = 8;
/// Rows of such a task at most. Not one: marks of rows that follow each other share lines, which threads would take from each other.
const PACKED_ROWS: usize = 16;
/// Tokens of a task of run 4.
const ADDED_TOKENS: usize = 16;

/// How wide tiles of the output of `tokens` are.
fn width(tokens: usize) -> Width {
    if tokens <= FEW_TOKENS {
        WIDE
    } else if tokens <= NARROW_TOKENS {
        NARROW
    } else {
        Width { most: NARROW.most / 2, ..NARROW }
    }
}

/// How many of so many experts of few tokens, the first ones, are done whole by `threads` threads: each does as many, and there are as many or more
/// left to cut.
fn whole(experts: usize, threads: usize) -> usize {
    if threads == 1 { experts } else { (experts / threads).saturating_sub(1) * threads }
}

/// How many of `left` units the next task has, of which `units` may be together: most tasks are large, and the last ones small, so that `threads`
/// threads end together.
fn task_of(left: usize, units: usize, threads: usize, whole: usize) -> usize {
    (left / (if whole > 0 { 2 } else { 4 } * threads.max(1))).clamp(1, units)
}

/// The packed inputs of the tokens of one expert, side by side: what a thread gathered last.
#[derive(Default)]
pub(crate) struct Gathered {
    /// The layer call and the chunk that the bytes are of; calls are counted from 1.
    of: (u64, usize),
    bytes: AlignedBytes,
}

impl Gathered {
    /// The rows `tokens` of `x`, which are the rows of chunk `of.1` of layer call `of.0`; a single one as it is.
    fn rows<'a>(&'a mut self, x: PackedTokens<'a>, tokens: &[u32], of: (u64, usize)) -> Inputs<'a> {
        if let [token] = *tokens {
            return Inputs::new(x.layout, 1, x.cols, x.token(token));
        }
        let (n, size) = (tokens.len(), x.layout.block_bytes());
        let bytes = self.bytes.get(x.layout.bytes(n, x.cols));
        if self.of != of {
            for (i, &token) in tokens.iter().enumerate() {
                if let Some(&later) = tokens.get(i + 1) {
                    prefetch(x.token(later));
                }
                for (to, from) in bytes.chunks_exact_mut(n * size).zip(x.token(token).chunks_exact(size)) {
                    to[i * size..][..size].copy_from_slice(from);
                }
            }
            self.of = of;
        }
        Inputs::new(x.layout, n, x.cols, bytes)
    }
}

/// The packed inputs of all tokens, one after another: each is a stream for who gathers it.
#[derive(Clone, Copy)]
struct PackedTokens<'a> {
    layout: InputLayout,
    cols: usize,
    bytes: &'a [u8],
}

impl<'a> PackedTokens<'a> {
    fn token(&self, token: u32) -> &'a [u8] {
        let n = self.layout.bytes(1, self.cols);
        &self.bytes[token as usize * n..][..n]
    }
}

/// What a layer call lists, in memory that is kept from call to call.
#[derive(Default)]
pub(crate) struct Lists {
    /// Which tokens have rows.
    used: Vec<bool>,
    row_tokens: Vec<u32>,
    chunks: Vec<Chunk>,
    /// By node.
    parts: Vec<Vec<Part>>,
    /// How many parts of each node come before down.
    before_down: Vec<usize>,
    /// Where there are several.
    next: Vec<Next>,
    tasks: Vec<usize>,
    columns: Columns,
    marks: Marks,
    /// Of the down products of few tokens.
    y_marks: Marks,
}

/// Which part of a node is next: of those before down, and of down.
#[derive(Default)]
#[repr(align(128))]
struct Next([AtomicUsize; 2]);

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

    /// Bytes of the packed experts of a layer, by projection; 0 for what is used in place.
    fn packed_sizes(&self, layer: &LayerSpec) -> [usize; 3] {
        Proj::ALL.map(|p| {
            let (rows, cols) = layer.shape(p);
            self.kernel.packed_bytes(layer.format(p), rows, cols).unwrap_or(0)
        })
    }

    /// What the packed cache knows these experts by.
    fn key<'a>(&'a self, layer: &'a LayerSpec, experts: &'a [u32]) -> Key<'a> {
        Key {
            backend: self.name,
            tier: self.kernel.tier(),
            layout_version: self.kernel.layout_version(),
            layer,
            experts,
            bytes: self.packed_sizes(layer).iter().sum::<usize>() * experts.len(),
        }
    }

    /// Loads one expert's three matrices: packs each node's outputs (`cuts`) into their piece of that node's arena, or keeps
    /// them in place. Those that are `packed` already are copied there, if there are arenas at all.
    fn load_expert(
        &self,
        layer: &LayerSpec,
        expert: usize,
        from: &dyn WeightSource,
        packed: Option<&[u8]>,
        cuts: &Cuts,
        (arenas, first_piece): (&[Pieces<'_, u8>], usize),
    ) -> Result<[Option<Matrix>; 3]> {
        let mut kept = [None, None, None];
        let sizes = self.packed_sizes(layer);
        for proj in Proj::ALL {
            let size = sizes[proj.index()];
            if let Some(packed) = packed.filter(|_| size > 0) {
                // Slices are whole panels, and follow each other as the nodes do.
                let mut at = sizes[..proj.index()].iter().sum::<usize>();
                for arena in arenas {
                    let out = arena.take(first_piece + proj.index());
                    out.copy_from_slice(&packed[at..at + out.len()]);
                    at += out.len();
                }
                continue;
            }
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
            if size == 0 {
                kept[proj.index()] = Some(matrix);
                continue;
            }
            for (arena, rows) in arenas.iter().zip(cuts.of(proj)) {
                let out = arena.take(first_piece + proj.index());
                if !rows.is_empty() {
                    self.kernel.pack(&matrix, rows.clone(), out);
                }
            }
        }
        if packed.is_none() && kept.iter().all(Option::is_none) {
            from.release(layer.index, expert);
        }
        Ok(kept)
    }
}

impl<K: Kernel> CpuBackend<K> {
    /// Loads experts; see [`Backend::load`].
    fn load_inner(
        &self,
        layer: &LayerSpec,
        experts: &[u32],
        from: &dyn WeightSource,
        context: &LoadContext,
    ) -> Result<BankInner<K>> {
        self.probe(layer)?;
        let nodes: Vec<usize> = context.team.shares().iter().map(|s| s.threads).collect();
        let cuts: Vec<Cuts> = experts.iter().map(|&e| Cuts::new(layer, &nodes, e as usize, K::PANEL)).collect();
        // Bytes of a node's outputs of one matrix.
        let bytes = |cuts: &Cuts, node: usize, p: Proj| {
            let (rows, cols) = (cuts.of(p)[node].len(), layer.shape(p).1);
            self.kernel.packed_bytes(layer.format(p), rows, cols).unwrap_or(0)
        };
        let sizes = |cuts: &[Cuts], node: usize| -> Vec<usize> {
            cuts.iter().flat_map(|c| Proj::ALL.map(|p| bytes(c, node, p))).collect()
        };
        let key = self.key(layer, experts);
        // Experts that will be replaced have memory of their own, that goes with them.
        let together = if context.replaceable && key.bytes > 0 { 1 } else { experts.len().max(1) };
        let cache = context.cache.as_ref().filter(|_| key.bytes > 0);
        let cached = cache.and_then(|cache| cache.load(&key));
        // Where memory has no place to be near to, the map is the arena.
        let mapped = cached.clone().filter(|_| !context.team.wants_memory_near());
        // By group of experts, and node.
        let mut arenas: Vec<Vec<Arena>> = Vec::new();
        for group in cuts.chunks(together) {
            let nodes = 0..if mapped.is_some() { 0 } else { nodes.len() };
            let arena = |node| Arena::new(context, node, sizes(group, node).iter().sum());
            let mut group = nodes.map(arena).collect::<Result<Vec<Arena>>>()?;
            Arena::touch_at_home(&mut group, context);
            arenas.push(group);
        }
        let pieces: Vec<Vec<_>> = arenas
            .iter_mut()
            .zip(cuts.chunks(together))
            .map(|(arenas, group)| {
                arenas.iter_mut().enumerate().map(|(node, a)| Pieces::new(a.bytes_mut(), sizes(group, node))).collect()
            })
            .collect();
        let loaded: Vec<Mutex<Option<Result<LoadedExpert>>>> = experts.iter().map(|_| Mutex::new(None)).collect();
        let cancelled = || context.progress.advance(0).is_err();
        contain(self.name, layer.index, || {
            let load = |i: usize| {
                if cancelled() {
                    return;
                }
                let expert = experts[i] as usize;
                let each = key.bytes / experts.len();
                let packed = cached.as_ref().map(|all| &all[i * each..(i + 1) * each]);
                let result = self
                    .load_expert(layer, expert, from, packed, &cuts[i], (&pieces[i / together], i % together * 3))
                    .and_then(|kept| {
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
            };
            match experts.len() {
                // One that replaces another: the team's threads are at work with the others meanwhile.
                1 => load(0),
                all => context.team.region().run(all, |i, _| load(i)),
            }
        })?;
        drop(pieces);
        context.progress.advance(0)?;
        let mut residence: Vec<Residence> = Vec::new();
        for new in arenas.iter().flatten().filter_map(Arena::residence) {
            match residence.iter_mut().find(|r| r.node == new.node) {
                Some(r) => r.add(&new),
                None => residence.push(new),
            }
        }
        let packed_bytes = arenas.iter().flatten().map(|a| a.len as u64).sum();
        let frozen = |group: Vec<Arena>| group.into_iter().map(Arena::freeze).collect::<Result<Vec<Bytes>>>();
        let mut arenas = arenas.into_iter().map(frozen).collect::<Result<Vec<_>>>()?;
        let together = match mapped {
            Some(all) => {
                arenas = vec![vec![all]];
                experts.len().max(1)
            }
            None => together,
        };
        let mut bank = Vec::with_capacity(experts.len());
        let mut offsets = vec![0; nodes.len()];
        let mut parts = Vec::new();
        for (i, (cell, cuts)) in loaded.into_iter().zip(cuts).enumerate() {
            if i % together == 0 {
                offsets.fill(0);
            }
            let arenas = &arenas[i / together];
            let loaded = cell.into_inner().unwrap_or_else(PoisonError::into_inner).unwrap_or(Err(Error::Cancelled))?;
            let mut kept = loaded.kept.into_iter();
            let weights = Proj::ALL.map(|p| {
                if let Some(matrix) = kept.next().flatten() {
                    return Sliced::in_place(Weights::in_place(matrix));
                }
                let (format, cols) = (layer.format(p), layer.shape(p).1);
                Sliced::packed(cuts.of(p).iter().enumerate().map(|(node, rows)| {
                    let size = bytes(&cuts, node, p);
                    offsets[node] += size;
                    let bytes = arenas[node].slice(offsets[node] - size..offsets[node]);
                    parts.push(bytes.clone());
                    (rows.clone(), Weights::packed(format, rows.len(), cols, bytes))
                }))
            });
            bank.push(Arc::new(Expert { weights, biases: loaded.biases, cuts }));
        }
        if let Some(cache) = cache.filter(|_| cached.is_none()) {
            let parts: Vec<&[u8]> = parts.iter().map(|part| &part[..]).collect();
            cache.save(&key, &parts);
        }
        let few = BankInner {
            name: self.name,
            layer: layer.clone(),
            kernel: self.kernel,
            team: context.team.clone(),
            layouts: layouts(self.kernel, layer)?,
            experts: bank,
            nodes,
            packed_bytes,
            residence,
            many: None,
        };
        let many = match self.kernel.for_many() {
            Some((rows, kernel)) => {
                let many = BankInner { kernel, layouts: layouts(kernel, layer)?, ..few.clone() };
                Some((rows, Arc::new(many)))
            }
            None => None,
        };
        Ok(BankInner { many, ..few })
    }
}

impl<K: Kernel> Backend for CpuBackend<K> {
    fn name(&self) -> &str {
        self.name
    }

    fn probe(&self, layer: &LayerSpec) -> Result<Fit, Unsupported> {
        let (mut packed, mut mapped) = (0u64, 0u64);
        let layouts_of_few = layouts(self.kernel, layer)?;
        let mut hows: Vec<String> = Vec::new();
        let mut say = |how: String| {
            if !hows.contains(&how) {
                hows.push(how);
            }
        };
        for proj in Proj::ALL {
            let (rows, cols) = layer.shape(proj);
            let format = layer.format(proj);
            let (_, how) = self.kernel.accepts(format, rows, cols)?;
            say(how.into());
            match self.kernel.packed_bytes(format, rows, cols) {
                Some(bytes) => packed += bytes as u64,
                None => mapped += format.stored_bytes(rows, cols),
            }
        }
        layouts_of_few.iter().for_each(|layout| say(layout.to_string()));
        let per_row = |layout: InputLayout, cols| layout.bytes(1, cols) as u64;
        let scratch = |[gate, up, down]: [InputLayout; 3]| {
            let up = if up == gate { 0 } else { per_row(up, layer.hidden) };
            per_row(gate, layer.hidden) + up + per_row(down, layer.intermediate) * layer.top_k as u64
        };
        let mut scratch_bytes_per_token = scratch(layouts_of_few);
        if let Some((rows, kernel)) = self.kernel.for_many() {
            let of_many = layouts(kernel, layer)?;
            scratch_bytes_per_token = scratch_bytes_per_token.max(scratch(of_many));
            for layout in of_many.iter().filter(|layout| !layouts_of_few.contains(layout)) {
                say(format!("{layout} in calls of {rows} rows of an expert and more"));
            }
        }
        Ok(Fit {
            rank: self.kernel.rank(),
            tier: self.kernel.label(),
            how: hows.join("; "),
            packed_bytes: packed * layer.experts as u64,
            mapped_bytes: mapped * layer.experts as u64,
            scratch_bytes_per_token,
            inputs: [layouts_of_few[0], layouts_of_few[2]],
        })
    }

    fn in_place(&self) -> Option<Arc<dyn Backend>> {
        Some(Arc::new(CpuBackend::new(self.name, self.kernel.in_place())))
    }

    fn invariant(&self) -> Option<Arc<dyn Backend>> {
        self.kernel.for_many()?;
        Some(Arc::new(CpuBackend::new(self.name, self.kernel.invariant())))
    }

    fn load(
        &self,
        layer: &LayerSpec,
        experts: &[u32],
        from: &dyn WeightSource,
        context: &LoadContext,
    ) -> Result<Box<dyn ExpertBank>> {
        let inner = self.load_inner(layer, experts, from, context)?;
        let replacing = LoadContext { progress: Arc::default(), cache: None, ..context.clone() };
        Ok(Box::new(CpuBank { now: RwLock::new(Arc::new(inner)), context: context.replaceable.then_some(replacing) }))
    }

    fn is_cached(&self, layer: &LayerSpec, experts: &[u32], cache: &PackedCache) -> bool {
        let key = self.key(layer, experts);
        key.bytes > 0 && cache.has(&key)
    }

    fn probe_linear(&self, format: Format, rows: usize, cols: usize) -> Result<Fit, Unsupported> {
        let (layout, how) = self.kernel.accepts(format, rows, cols)?;
        let layout = self.kernel.inputs_of_rows(layout);
        let packed = self.kernel.packed_bytes(format, rows, cols);
        Ok(Fit {
            rank: self.kernel.rank(),
            tier: self.kernel.label(),
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
        let layout = self.kernel.inputs_of_rows(layout);
        matrix.check_scales().map_err(Error::Invalid)?;
        let nodes: Vec<usize> = context.team.shares().iter().map(|s| s.threads).collect();
        let cuts = cut(rows, K::PANEL, &nodes, 0);
        let mut packed_bytes = 0;
        let weights = if self.kernel.packed_bytes(format, rows, cols).is_none() {
            Sliced::in_place(Weights::in_place(matrix.clone()))
        } else {
            let mut slices = Vec::with_capacity(cuts.len());
            for (node, rows) in cuts.iter().enumerate() {
                let bytes = self.kernel.packed_bytes(format, rows.len(), cols).unwrap_or(0);
                let mut arena = Arena::new(context, node, bytes)?;
                contain(self.name, 0, || self.kernel.pack(matrix, rows.clone(), arena.bytes_mut()))?;
                packed_bytes += bytes as u64;
                slices.push((rows.clone(), Weights::packed(format, rows.len(), cols, arena.freeze()?)));
            }
            Sliced::packed(slices)
        };
        Ok(Box::new(CpuLinear {
            kernel: self.kernel,
            team: context.team.clone(),
            layout,
            weights,
            shape: (rows, cols),
            cuts,
            nodes,
            packed_bytes,
        }))
    }
}

/// Which outputs of an expert's matrices each node of the team has.
struct Cuts {
    intermediate: Vec<Range<usize>>,
    hidden: Vec<Range<usize>>,
}

impl Cuts {
    /// `nodes` are the threads of each. Gate and up are cut by whole input blocks of down, of which a small expert has few: from expert
    /// to expert they are dealt in turn. Down is cut alike for all experts, as its tasks go over all of them.
    fn new(layer: &LayerSpec, nodes: &[usize], expert: usize, panel: usize) -> Self {
        Cuts { intermediate: cut(layer.intermediate, BLOCK, nodes, expert), hidden: cut(layer.hidden, panel, nodes, 0) }
    }

    fn of(&self, proj: Proj) -> &[Range<usize>] {
        match proj {
            Proj::Gate | Proj::Up => &self.intermediate,
            Proj::Down => &self.hidden,
        }
    }
}

/// The memory of packed weights on one node, while they are being packed.
struct Arena {
    pages: Pages,
    len: usize,
    node: usize,
    /// Why its pages are not bound to the node; nothing where there is only one.
    unbound: Option<String>,
}

impl Arena {
    /// Memory for `len` bytes on the team's node `share`.
    fn new(context: &LoadContext, share: usize, len: usize) -> Result<Self> {
        let (pages, unbound) = match &context.progress.host {
            Some(host) => {
                let (area, unbound) = host.alloc(share, len)?;
                (Pages::Host(area), unbound)
            }
            None => {
                let (map, unbound) = pages_near(&context.team, share, len, context.huge_pages)?;
                (Pages::Own(map), unbound)
            }
        };
        Ok(Arena { pages, len, node: context.team.shares()[share].node, unbound })
    }

    /// Has the threads of each node touch its pages first, where binding them was refused: the system then puts them there.
    fn touch_at_home(arenas: &mut [Arena], context: &LoadContext) {
        const PART: usize = 16 << 20;
        if arenas.len() == 1 || arenas.iter().all(|a| a.unbound.is_none()) {
            return;
        }
        let tasks: Vec<usize> = arenas.iter().map(|a| a.len.div_ceil(PART)).collect();
        let pieces: Vec<_> = arenas
            .iter_mut()
            .map(|a| {
                let lengths = (0..a.len.div_ceil(PART)).map(|i| PART.min(a.len - i * PART)).collect::<Vec<_>>();
                Pieces::new(a.bytes_mut(), lengths)
            })
            .collect();
        context.team.region().run_at_home(&tasks, |node, part, _| pieces[node].take(part).fill(0));
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.pages.bytes_mut()[..self.len]
    }

    /// Nothing of a host's memory: the host looks itself.
    fn residence(&self) -> Option<Residence> {
        match &self.pages {
            Pages::Own(map) => Some(residence(&map[..self.len], self.node, self.unbound.clone())),
            Pages::Host(_) => None,
        }
    }

    /// The bytes, never to be written again.
    fn freeze(self) -> Result<Bytes> {
        self.pages.freeze(self.len)
    }
}

struct LoadedExpert {
    kept: [Option<Matrix>; 3],
    biases: [Option<Vec<f32>>; 3],
}

struct Expert {
    weights: [Sliced; 3],
    biases: [Option<Vec<f32>>; 3],
    cuts: Cuts,
}

impl Expert {
    fn bias(&self, proj: Proj, outputs: Range<usize>) -> Option<&[f32]> {
        self.biases[proj.index()].as_ref().map(|b| &b[outputs])
    }
}

#[derive(Clone)]
struct BankInner<K> {
    name: &'static str,
    layer: LayerSpec,
    kernel: K,
    team: Arc<Team>,
    /// Of the inputs of gate, up and down.
    layouts: [InputLayout; 3],
    experts: Vec<Arc<Expert>>,
    /// Threads of each node.
    nodes: Vec<usize>,
    packed_bytes: u64,
    residence: Vec<Residence>,
    /// From how many rows of an expert on, on average, the same experts have another kernel, and they with it.
    many: Option<(usize, Arc<BankInner<K>>)>,
}

/// The inputs of gate, up and down, of which those of down are packed in blocks of [`BLOCK`] columns as they are computed.
fn layouts<K: Kernel>(kernel: K, layer: &LayerSpec) -> Result<[InputLayout; 3], Unsupported> {
    let of = |proj: Proj| {
        let (rows, cols) = layer.shape(proj);
        kernel.accepts(layer.format(proj), rows, cols).map(|(layout, _)| layout)
    };
    Ok([kernel.inputs_of_rows(of(Proj::Gate)?), kernel.inputs_of_rows(of(Proj::Up)?), of(Proj::Down)?])
}

struct CpuBank<K> {
    /// Taken by work as it starts, and replaced as a whole.
    now: RwLock<Arc<BankInner<K>>>,
    /// How experts are loaded that replace others, if they may.
    context: Option<LoadContext>,
}

impl<K: Kernel> CpuBank<K> {
    fn now(&self) -> Arc<BankInner<K>> {
        self.now.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl<K: Kernel> ExpertBank for CpuBank<K> {
    fn submit(&self, work: Work) -> Pending<Work> {
        let inner = self.now();
        let (team, name, layer) = (inner.team.clone(), inner.name, inner.layer.index);
        team.spawn(name, layer, move || Ok(inner.of_call(work.tokens).run(work)))
    }

    fn run(&self, work: Work) -> Result<Work> {
        let inner = self.now();
        contain(inner.name, inner.layer.index, || inner.of_call(work.tokens).run(work))
    }

    fn reserve(&self, tokens: usize, top_k: usize) -> Result<()> {
        let inner = self.now();
        contain(inner.name, inner.layer.index, || {
            inner.reserve(tokens, top_k);
            if inner.is_for_many(tokens) {
                // Those before are for calls of fewer.
                inner.of_call(tokens).reserve(tokens, top_k);
            }
        })
    }

    fn packed_bytes(&self) -> u64 {
        self.now().packed_bytes
    }

    fn residence(&self) -> Vec<Residence> {
        self.now().residence.clone()
    }

    fn replace(&self, local: u32, expert: u32, from: &dyn WeightSource) -> Result<()> {
        self.replacement(local, expert, from)?()
    }

    fn replacement<'a>(&'a self, local: u32, expert: u32, from: &'a dyn WeightSource) -> Result<Replacement<'a>> {
        let now = self.now();
        let Some(context) = &self.context else {
            return Err(Unsupported::new("the experts of this bank were loaded to stay").into());
        };
        let new = CpuBackend::new(now.name, now.kernel).load_inner(&now.layer, &[expert], from, context)?;
        let (place, experts) = (local as usize, now.experts.len());
        let expert = new.experts.into_iter().next().filter(|_| place < experts);
        let expert = expert.ok_or_else(|| Error::Invalid(format!("local expert {local} of {experts}")))?;
        Ok(Box::new(move || {
            let mut now = self.now.write().unwrap_or_else(PoisonError::into_inner);
            let mut inner = (**now).clone();
            inner.experts[place] = expert;
            if let Some((_, many)) = &mut inner.many {
                *many = Arc::new(BankInner { experts: inner.experts.clone(), ..(**many).clone() });
            }
            *now = Arc::new(inner);
            Ok(())
        }))
    }
}

/// What gate and up of a chunk have for inputs: the packed tokens of each, and which of them, by layer call and chunk.
struct GateUpInputs<'a> {
    x: [PackedTokens<'a>; 2],
    tokens: &'a [u32],
    of: (u64, usize),
}

/// Rows of one expert that are multiplied together, and where their down inputs lie, if it is not done whole.
struct Chunk {
    expert: usize,
    rows: Range<usize>,
    h: Range<usize>,
}

/// Cuts the rows of an expert into chunks of up to [`ROWS`], as many in each: for a few that were left, weights would be unpacked once more.
fn chunks_of(rows: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let (first, n, chunks) = (rows.start, rows.len(), rows.len().div_ceil(ROWS));
    (0..chunks).map(move |chunk| first + n * chunk / chunks..first + n * (chunk + 1) / chunks)
}

/// Packs rows `0..rows` of a matrix of `cols` columns; `read(row, columns, out)` gets the values, and `place(row, block, blocks)` says which block of
/// `bytes` they become, of so many of a row.
fn pack_rows<K: Kernel>(
    kernel: K,
    region: &mut Region<'_>,
    layout: InputLayout,
    (rows, cols): (usize, usize),
    (bytes, marks): (&mut [u8], &mut Marks),
    read: impl Fn(usize, Range<usize>, &mut [f32]) -> bool + Sync,
    place: impl Fn(usize, usize, usize) -> usize + Sync,
) {
    let pieces = Pieces::every_within(std::mem::take(marks), bytes, layout.block_bytes());
    let pack = |row: usize| {
        let mut values = [0f32; input::WIDE];
        let (blocks, width) = (layout.blocks(cols), layout.columns());
        for b in 0..blocks {
            let columns = b * width..cols.min((b + 1) * width);
            let values = &mut values[..columns.len()];
            if !read(row, columns, values) {
                return;
            }
            kernel.pack_input(layout, values, pieces.take(place(row, b, blocks)));
        }
    };
    // One row takes about a microsecond: less than waking anybody.
    let each = if rows <= 2 { 2 } else { (rows / (PACKED_TASKS * region.threads())).clamp(1, PACKED_ROWS) };
    region.run(rows.div_ceil(each), |task, _| (task * each..rows.min((task + 1) * each)).for_each(pack));
    *marks = pieces.marks();
}

/// Adds the bias of their outputs to some rows, if there is one.
fn add_bias(rows: &mut [f32], bias: Option<&[f32]>) {
    let Some(bias) = bias else { return };
    for row in rows.chunks_exact_mut(bias.len()) {
        row.iter_mut().zip(bias).for_each(|(v, b)| *v += b);
    }
}

/// Blocks of outputs that are done together for so many rows.
fn pieces_of(blocks: Range<usize>, rows: usize) -> impl Iterator<Item = (usize, usize)> {
    let together = if rows <= FEW { FEW_BLOCKS } else { 1 };
    blocks.clone().step_by(together).map(move |block| (block, blocks.end.min(block + together)))
}

/// A task of run 2: all rows of a chunk, and some of its expert's outputs.
struct Part {
    chunk: usize,
    job: Job,
}

enum Job {
    /// Gate and up of these blocks.
    GateUp(Range<usize>),
    /// These outputs of down, after gate and up if the expert is done whole.
    Down(Downs),
}

/// Down products: `[rows, outputs.len()]` of their chunk.
struct Downs {
    whole: bool,
    outputs: Range<usize>,
    /// Which piece of the down products they are, and where it begins.
    piece: usize,
    at: usize,
}

/// How many pieces of down products are listed, and products in them.
#[derive(Clone, Copy, Default)]
struct Made {
    pieces: usize,
    products: usize,
}

impl Part {
    /// What its thread reads first, as a hint for the one before it.
    fn start<'a, K>(&self, bank: &'a BankInner<K>, chunks: &[Chunk]) -> (&'a Weights, usize) {
        let weights = &bank.experts[chunks[self.chunk].expert].weights;
        match &self.job {
            Job::GateUp(blocks) => weights[Proj::Gate.index()].at(blocks.start * BLOCK),
            Job::Down(downs) if downs.whole => weights[Proj::Gate.index()].at(0),
            Job::Down(downs) => weights[Proj::Down.index()].at(downs.outputs.start),
        }
    }
}

impl<K: Kernel> BankInner<K> {
    /// Whether a call of so many tokens has the kernel for many rows.
    fn is_for_many(&self, tokens: usize) -> bool {
        let rows = tokens * self.layer.top_k / self.layer.experts.max(1);
        self.many.as_ref().is_some_and(|&(most, _)| rows >= most)
    }

    /// What runs it.
    fn of_call(&self, tokens: usize) -> &Self {
        match &self.many {
            Some((_, many)) if self.is_for_many(tokens) => many,
            _ => self,
        }
    }

    fn run(&self, mut work: Work) -> Work {
        if work.rows.is_empty() {
            return work;
        }
        let mut region = self.team.region();
        let mut buffers = region.take_buffers();
        let (kernel, tokens, hidden) = (self.kernel, work.tokens, self.layer.hidden);
        let [gate_layout, up_layout, down_layout] = self.layouts;

        let Buffers { x: [x0, x1], h, y, lists } = &mut buffers;
        let Lists { used, row_tokens, chunks, parts, before_down, next, tasks, columns, marks, y_marks } = lists;
        used.clear();
        used.resize(tokens, false);
        work.rows.iter().for_each(|r| used[r.token as usize] = true);
        let input = work.input.clone();
        let first = work.first;
        let read = |row: usize, columns: Range<usize>, out: &mut [f32]| {
            let start = (first + row) * hidden;
            input.read(start + columns.start..start + columns.end, out);
            used[row]
        };
        let place = |row: usize, block: usize, blocks: usize| row * blocks + block;
        let x0 = x0.get(gate_layout.bytes(tokens, hidden));
        pack_rows(kernel, &mut region, gate_layout, (tokens, hidden), (&mut *x0, &mut *marks), read, place);
        let gate_x = PackedTokens { layout: gate_layout, cols: hidden, bytes: x0 };
        let up_x = if up_layout == gate_layout {
            gate_x
        } else {
            let x1 = x1.get(up_layout.bytes(tokens, hidden));
            pack_rows(kernel, &mut region, up_layout, (tokens, hidden), (&mut *x1, &mut *marks), read, place);
            PackedTokens { layout: up_layout, cols: hidden, bytes: x1 }
        };

        chunks.clear();
        for group in &work.experts {
            for rows in chunks_of(group.rows.clone()) {
                chunks.push(Chunk { expert: group.local as usize, rows, h: 0..0 });
            }
        }
        let few = tokens <= FEW_TOKENS;
        let whole = match *self.nodes {
            [threads] if few => whole(chunks.len(), threads),
            _ => 0,
        };
        let mut h_bytes = 0;
        for chunk in &mut chunks[whole..] {
            let bytes = down_layout.bytes(chunk.rows.len(), self.layer.intermediate);
            chunk.h = h_bytes..h_bytes + bytes;
            h_bytes += bytes;
        }
        row_tokens.clear();
        row_tokens.extend(work.rows.iter().map(|r| r.token));
        let h = h.get(h_bytes);
        let blocks = self.layer.intermediate.div_ceil(BLOCK);
        let lengths =
            chunks[whole..].iter().flat_map(|c| (0..blocks).map(move |_| c.rows.len() * down_layout.block_bytes()));
        let pieces = Pieces::within(std::mem::take(marks), h, lengths);
        let call = CALLS.fetch_add(1, Ordering::Relaxed) + 1;
        parts.iter_mut().for_each(Vec::clear);
        parts.resize_with(self.nodes.len(), Vec::new);
        let mut made = Made::default();
        before_down.clear();
        for (node, parts) in parts.iter_mut().enumerate() {
            before_down.push(self.list_parts(node, (chunks, whole, few), parts, &mut made));
        }
        let y = y.floats(if few { made.products } else { tokens * hidden });
        let lengths = parts.iter().flatten().filter_map(|part| match &part.job {
            Job::Down(downs) => Some(chunks[part.chunk].rows.len() * downs.outputs.len()),
            Job::GateUp(_) => None,
        });
        let y_pieces = Pieces::within(std::mem::take(y_marks), &mut y[..made.products], lengths);
        let (parts, chunks, row_tokens) = (&*parts, &*chunks, &*row_tokens);
        let h_pieces = |chunk: usize, of: Range<usize>| {
            let first = (chunk - whole) * blocks;
            first + of.start..first + of.end
        };
        let run = |node: usize, part: usize, scratch: &mut Scratch| {
            // The other threads of the node probably take those in between.
            let after = parts[node].get(part + self.nodes[node]).map(|part| part.start(self, chunks));
            let part = &parts[node][part];
            let chunk = &chunks[part.chunk];
            let x = GateUpInputs { x: [gate_x, up_x], tokens: &row_tokens[chunk.rows.clone()], of: (call, part.chunk) };
            match &part.job {
                Job::GateUp(of) => {
                    let mut h = pieces.fill(h_pieces(part.chunk, of.clone()));
                    self.gate_up(chunk, (of.clone(), after), x, &mut h, scratch);
                    h.done();
                }
                Job::Down(downs) if downs.whole => self.whole(chunk, after, x, y_pieces.take(downs.piece), scratch),
                Job::Down(downs) => {
                    // If a task that should have made them panicked, so does the run.
                    let Some(h) = pieces.filled(h_pieces(part.chunk, 0..blocks)) else { return };
                    self.down(chunk, (downs.outputs.clone(), after), h, y_pieces.take(downs.piece), scratch);
                }
            }
        };
        tasks.clear();
        tasks.extend(parts.iter().map(Vec::len));
        if self.nodes.len() == 1 {
            // Parts are taken in order: when one of down is, those that make its inputs are running, or have run.
            region.run_lanes(tasks, run);
        } else {
            next.clear();
            next.resize_with(self.nodes.len(), Next::default);
            let (next, before_down) = (&*next, &*before_down);
            let take = |node: usize, of: usize| next[node].0[of].fetch_add(1, Ordering::Relaxed);
            let take_gate_up = |node: usize| Some(take(node, 0)).filter(|&part| part < before_down[node]);
            region.run_lanes(tasks, |node, _, scratch| {
                if let Some(part) = take_gate_up(node) {
                    return run(node, part, scratch);
                }
                let part = before_down[node] + take(node, 1);
                let Some(Part { chunk, .. }) = parts[node].get(part) else { return };
                // Its inputs may be another node's to make, and nobody have come there yet: all of gate and up is taken before a thread waits.
                for other in 0..next.len() {
                    while !pieces.are_filled(h_pieces(*chunk, 0..blocks))
                        && let Some(theirs) = take_gate_up(other)
                    {
                        run(other, theirs, scratch);
                    }
                }
                run(node, part, scratch);
            });
        }
        *marks = pieces.marks();
        *y_marks = y_pieces.marks();

        // All tokens in one tile: cut, an expert's rows would be fewer than it has, and its weights read again.
        let outputs = self.experts.first().map_or(&[][..], |e| &e.cuts.hidden);
        columns.set(outputs, &self.nodes, 1, (K::PANEL, width(tokens)));
        tasks.clear();
        tasks.extend(columns.lanes.iter().map(Range::len));
        let columns = &*columns;
        if few {
            let y = &*y;
            let grid = Grid::within(std::mem::take(marks), &mut work.output, tokens, tokens, &columns.ends);
            region.run_lanes(tasks, |node, task, _| {
                let mut tile = grid.take(0, columns.lanes[node].start + task);
                self.add_downs((chunks, &parts[node]), &work.rows, y, &mut tile);
            });
            *marks = grid.marks();
        } else {
            let h = &*h;
            let sums =
                Pieces::within(std::mem::take(y_marks), y, columns.tiles().map(|outputs| tokens * outputs.len()));
            region.run_lanes(tasks, |node, task, scratch| {
                let tile = columns.lanes[node].start + task;
                self.down_tile(chunks, &work.rows, h, (columns.tile(tile), sums.take(tile)), scratch);
            });
            *y_marks = sums.marks();
            self.add_sums(&mut region, tokens, columns, y, (&mut work.output, marks));
        }
        region.put_buffers(buffers);
        work.spent = region.spent();
        work
    }

    /// Lists a node's tasks of run 2: whole experts, gate and up of the others, then down of these if tokens are `few`; says how many come before
    /// down. Pieces of down products follow those that were `made`.
    fn list_parts(
        &self,
        node: usize,
        (chunks, whole, few): (&[Chunk], usize, bool),
        parts: &mut Vec<Part>,
        made: &mut Made,
    ) -> usize {
        let threads = self.nodes[node];
        let mut downs = |chunk: usize, whole: bool, outputs: Range<usize>| {
            let Made { pieces: piece, products: at } = *made;
            *made = Made { pieces: piece + 1, products: at + chunks[chunk].rows.len() * outputs.len() };
            Part { chunk, job: Job::Down(Downs { whole, outputs, piece, at }) }
        };
        parts.extend((0..whole).map(|chunk| downs(chunk, true, 0..self.layer.hidden)));
        let cuts = |chunk: usize| &self.experts[chunks[chunk].expert].cuts;
        let blocks_of = |chunk: usize| {
            let outputs = &cuts(chunk).intermediate[node];
            // A node that has none may have them end within a block.
            outputs.start / BLOCK..if outputs.is_empty() { 0 } else { outputs.end.div_ceil(BLOCK) }
        };
        let mut left: usize = (whole..chunks.len()).map(|chunk| blocks_of(chunk).len()).sum();
        for chunk in whole..chunks.len() {
            let mut blocks = blocks_of(chunk);
            while !blocks.is_empty() {
                let n = task_of(left, blocks.len(), threads, whole);
                parts.push(Part { chunk, job: Job::GateUp(blocks.start..blocks.start + n) });
                blocks.start += n;
                left -= n;
            }
        }
        let before = parts.len();
        let panels_of = |outputs: &Range<usize>| outputs.len().div_ceil(K::PANEL);
        let cut = whole..if few { chunks.len() } else { whole };
        let mut left: usize = cut.clone().map(|chunk| panels_of(&cuts(chunk).hidden[node])).sum();
        for chunk in cut {
            let mut outputs = cuts(chunk).hidden[node].clone();
            while !outputs.is_empty() {
                let n = task_of(left, panels_of(&outputs), threads, whole);
                let end = outputs.end.min(outputs.start + n * K::PANEL);
                parts.push(downs(chunk, false, outputs.start..end));
                outputs.start = end;
                left -= n;
            }
        }
        before
    }

    /// Run 3 of few tokens: adds the down products that run 2 made to a tile of the output.
    fn add_downs(&self, (chunks, parts): (&[Chunk], &[Part]), rows: &[Row], y: &[f32], tile: &mut GridTile<'_>) {
        let first = tile.cols.start;
        for part in parts {
            let Job::Down(Downs { outputs, at, .. }) = &part.job else { continue };
            let (start, end) = (outputs.start.max(first), outputs.end.min(tile.cols.end));
            if start < end {
                let y = y[*at..].chunks_exact(outputs.len());
                for (row, y) in rows[chunks[part.chunk].rows.clone()].iter().zip(y) {
                    let out = &mut tile.row(row.token as usize)[start - first..end - first];
                    self.kernel.add(row.weight, &y[start - outputs.start..end - outputs.start], out);
                }
            }
        }
    }

    /// Run 3 of many tokens: down of all chunks, whose inputs are `h`, for some outputs of all tokens, whose `sums` follow each other.
    fn down_tile(
        &self,
        chunks: &[Chunk],
        rows: &[Row],
        h: &[u8],
        (tile, sums): (Range<usize>, &mut [f32]),
        scratch: &mut Scratch,
    ) {
        let (width, layout) = (tile.len(), self.layouts[Proj::Down.index()]);
        let mut products = std::mem::take(&mut scratch.tiles[0]);
        sums.fill(0.0);
        for (i, chunk) in chunks.iter().enumerate() {
            let expert = &self.experts[chunk.expert];
            let rows = &rows[chunk.rows.clone()];
            let y = products.floats(rows.len() * width);
            let x = Inputs::new(layout, rows.len(), self.layer.intermediate, &h[chunk.h.clone()]);
            let following = chunks.get(i + 1).map(|next| &self.experts[next.expert]);
            let next = following.map(|next| next.weights[Proj::Down.index()].at(tile.start));
            let next_inputs = chunks.get(i + 1).map_or(&[][..], |next| &h[next.h.clone()]);
            let outputs = Outputs { next, next_inputs, ..expert.weights[Proj::Down.index()].outputs(tile.clone()) };
            self.kernel.product(outputs, x, 0..rows.len(), y, scratch);
            add_bias(y, expert.bias(Proj::Down, tile.clone()));
            let sums_of = |row: &Row| row.token as usize * width..(row.token as usize + 1) * width;
            for (i, (row, y)) in rows.iter().zip(y.chunks_exact(width)).enumerate() {
                if let Some(later) = rows.get(i + ADDED_AHEAD) {
                    prefetch(bytemuck::cast_slice(&sums[sums_of(later)]));
                }
                self.kernel.add(row.weight, y, &mut sums[sums_of(row)]);
            }
        }
        scratch.tiles[0] = products;
    }

    /// Run 4: adds the sums of all tiles to the output, some tokens at a time.
    fn add_sums(
        &self,
        region: &mut Region<'_>,
        tokens: usize,
        columns: &Columns,
        sums: &[f32],
        (output, marks): (&mut [f32], &mut Marks),
    ) {
        let hidden = self.layer.hidden;
        let lengths = (0..tokens).step_by(ADDED_TOKENS).map(|first| ADDED_TOKENS.min(tokens - first) * hidden);
        let tasks = lengths.len();
        let pieces = Pieces::within(std::mem::take(marks), output, lengths);
        region.run(tasks, |task, _| {
            for (token, output) in (task * ADDED_TOKENS..).zip(pieces.take(task).chunks_exact_mut(hidden)) {
                for tile in columns.tiles() {
                    let sums = &sums[tokens * tile.start..tokens * tile.end][token * tile.len()..][..tile.len()];
                    self.kernel.add(1.0, sums, &mut output[tile]);
                }
            }
        });
        *marks = pieces.marks();
    }

    /// Makes room for work of `tokens` tokens with `top_k` experts each: in the team's buffers, and in the scratch of each of its threads.
    fn reserve(&self, tokens: usize, top_k: usize) {
        let Some(expert) = self.experts.first() else { return };
        let (hidden, intermediate, rows) = (self.layer.hidden, self.layer.intermediate, tokens * top_k);
        let [gate_layout, up_layout, down_layout] = self.layouts;
        let mut region = self.team.region();
        let mut buffers = region.take_buffers();
        let Buffers { x: [x0, x1], h, y, lists } = &mut buffers;
        x0.get(gate_layout.bytes(tokens, hidden));
        if up_layout != gate_layout {
            x1.get(up_layout.bytes(tokens, hidden));
        }
        h.get(down_layout.bytes(rows, intermediate));
        let few = FEW_TOKENS.min(tokens);
        y.floats((few * top_k).max(if tokens > FEW_TOKENS { tokens } else { 0 }) * hidden);
        let Lists { used, row_tokens, chunks, parts, before_down, next, tasks, columns, marks, y_marks } = lists;
        let most_chunks = self.experts.len().min(rows) + rows / ROWS;
        let blocks = most_chunks * intermediate.div_ceil(BLOCK);
        // Every node may have a panel more of each.
        let most_downs = self.experts.len().min(few * top_k) * (hidden.div_ceil(K::PANEL) + self.nodes.len());
        let most_parts = blocks + most_downs;
        fn room<T>(list: &mut Vec<T>, n: usize) {
            list.clear();
            list.reserve(n);
        }
        room(used, tokens);
        room(row_tokens, rows);
        room(chunks, most_chunks);
        parts.resize_with(self.nodes.len().max(parts.len()), Vec::new);
        parts.iter_mut().for_each(|parts| room(parts, most_parts));
        room(before_down, self.nodes.len());
        room(next, self.nodes.len());
        room(tasks, self.nodes.len());
        let mut widest = |tokens: usize| {
            columns.set(&expert.cuts.hidden, &self.nodes, 1, (K::PANEL, width(tokens)));
            (columns.widest(), columns.ends.len())
        };
        let (of_narrow, _) = widest(NARROW_TOKENS.min(tokens));
        let (_, tiles) = widest(tokens);
        marks.reserve(blocks.max(tokens * hidden.div_ceil(BLOCK)).max(tiles));
        y_marks.reserve(most_downs.max(tiles));
        region.put_buffers(buffers);
        // An expert has a token once.
        let most = tokens.min(ROWS);
        let tile = intermediate.min(FEW_BLOCKS * BLOCK) * most.min(FEW);
        // On several nodes no expert is done whole.
        let whole = if self.nodes.len() == 1 { few } else { 0 };
        region.each_thread(|scratch| {
            scratch.tiles.iter_mut().for_each(|t| _ = t.floats(tile));
            scratch.h.get(down_layout.bytes(whole, intermediate));
            self.reserve_scratch(most, of_narrow.clone(), scratch);
        });
    }

    /// What kernels need of a thread's scratch they know when they run: they do, on zeros, for 1, 2, 4 … `most` rows.
    fn reserve_scratch(&self, most: usize, down: Range<usize>, scratch: &mut Scratch) {
        let Some(expert) = self.experts.first() else { return };
        let outputs = 0..self.layer.intermediate.min(BLOCK);
        let mut zeros = AlignedBytes::default();
        let mut out = vec![0.0; most * outputs.len().max(down.len())];
        for (proj, outputs) in [(Proj::Gate, outputs.clone()), (Proj::Up, outputs), (Proj::Down, down)] {
            let (layout, cols) = (self.layouts[proj.index()], self.layer.shape(proj).1);
            let mut n = 1;
            while n <= most && !outputs.is_empty() {
                let bytes = zeros.get(layout.bytes(n, cols));
                bytes.fill(0);
                let part = expert.weights[proj.index()].outputs(outputs.clone());
                let out = &mut out[..n * outputs.len()];
                self.kernel.product(part, Inputs::new(layout, n, cols, bytes), 0..n, out, scratch);
                n = if n < most { most.min(2 * n) } else { n + 1 };
            }
        }
        scratch.tiles.iter_mut().for_each(|tile| _ = tile.floats(out.len()));
        for (gathered, layout) in scratch.gathered.iter_mut().zip(self.layouts) {
            gathered.bytes.get(layout.bytes(most, self.layer.hidden));
        }
    }

    /// Does an expert whole for the rows of a chunk: its down products go to `y`; `after` is what this thread probably does next.
    fn whole(
        &self,
        chunk: &Chunk,
        after: Option<(&Weights, usize)>,
        x: GateUpInputs<'_>,
        y: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let (layout, blocks) = (self.layouts[Proj::Down.index()], self.layer.intermediate.div_ceil(BLOCK));
        let mut bytes = std::mem::take(&mut scratch.h);
        let h = bytes.get(layout.bytes(x.tokens.len(), self.layer.intermediate));
        let down = self.experts[chunk.expert].weights[Proj::Down.index()].at(0);
        self.gate_up(chunk, (0..blocks, Some(down)), x, h, scratch);
        self.down(chunk, (0..self.layer.hidden, after), h, y, scratch);
        scratch.h = bytes;
    }

    /// Computes `outputs` of down for the rows of a chunk, whose inputs are `h`, to `y`.
    fn down(
        &self,
        chunk: &Chunk,
        (outputs, next): (Range<usize>, Option<(&Weights, usize)>),
        h: &[u8],
        y: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let (expert, rows) = (&self.experts[chunk.expert], chunk.rows.len());
        let x = Inputs::new(self.layouts[Proj::Down.index()], rows, self.layer.intermediate, h);
        let part = Outputs { next, ..expert.weights[Proj::Down.index()].outputs(outputs.clone()) };
        self.kernel.product(part, x, 0..rows, y, scratch);
        add_bias(y, expert.bias(Proj::Down, outputs));
    }

    /// Computes `blocks` of the outputs of gate and up for the rows of a chunk, and packs what the activation makes of them to `h`; `after` is what
    /// this thread probably does next.
    fn gate_up(
        &self,
        chunk: &Chunk,
        (blocks, after): (Range<usize>, Option<(&Weights, usize)>),
        x: GateUpInputs<'_>,
        h: &mut [u8],
        scratch: &mut Scratch,
    ) {
        let (expert, rows) = (&self.experts[chunk.expert], x.tokens.len());
        let [mut gate, mut up] = std::mem::take(&mut scratch.tiles);
        let mut gathered = std::mem::take(&mut scratch.gathered);
        let [of_gate, of_up] = &mut gathered;
        let gate_x = of_gate.rows(x.x[0], x.tokens, x.of);
        let up_x = if self.layouts[1] == self.layouts[0] { gate_x } else { of_up.rows(x.x[1], x.tokens, x.of) };
        let weights = |proj: Proj| &expert.weights[proj.index()];
        let layout = self.layouts[Proj::Down.index()];
        let mut h = h.chunks_exact_mut(rows * layout.block_bytes());
        for (block, end) in pieces_of(blocks.clone(), rows) {
            let outputs = block * BLOCK..self.layer.intermediate.min(end * BLOCK);
            let width = outputs.len();
            let after_gate = Some(weights(Proj::Up).at(outputs.start));
            let after_up = if end < blocks.end { Some(weights(Proj::Gate).at(end * BLOCK)) } else { after };
            for (proj, x, tile, next) in
                [(Proj::Gate, gate_x, &mut gate, after_gate), (Proj::Up, up_x, &mut up, after_up)]
            {
                let tile = tile.floats(rows * width);
                let part = Outputs { next, ..weights(proj).outputs(outputs.clone()) };
                self.kernel.product(part, x, 0..rows, tile, scratch);
                add_bias(tile, expert.bias(proj, outputs.clone()));
            }
            let h_rows = gate.floats(rows * width);
            self.kernel.activate(self.layer.activation, h_rows, up.floats(rows * width));
            for (start, h) in (0..width).step_by(BLOCK).zip(&mut h) {
                let columns = BLOCK.min(width - start);
                self.kernel.pack_inputs(layout, &h_rows[start..], (width, columns), h);
            }
        }
        scratch.tiles = [gate, up];
        scratch.gathered = gathered;
    }
}

struct CpuLinear<K> {
    kernel: K,
    team: Arc<Team>,
    layout: InputLayout,
    weights: Sliced,
    /// Outputs and inputs.
    shape: (usize, usize),
    /// The outputs of each node, and its threads.
    cuts: Vec<Range<usize>>,
    nodes: Vec<usize>,
    packed_bytes: u64,
}

impl<K: Kernel> LinearOp for CpuLinear<K> {
    fn rows(&self) -> usize {
        self.shape.0
    }

    fn cols(&self) -> usize {
        self.shape.1
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
            pack_rows(
                self.kernel,
                &mut region,
                self.layout,
                (n, cols),
                (bytes, &mut buffers.lists.marks),
                |row, columns, out| {
                    out.copy_from_slice(&x[row * cols..][columns]);
                    true
                },
                |row, block, _| block * n + row,
            );
            let inputs = Inputs::new(self.layout, n, cols, bytes);
            let width = if n <= WIDE_ROWS { WIDE } else { NARROW };
            let columns = Columns::new(&self.cuts, &self.nodes, n.div_ceil(ROWS), (K::PANEL, width));
            let tasks: Vec<usize> = columns.lanes.iter().map(|lane| lane.len() * n.div_ceil(ROWS)).collect();
            let grid = Grid::new(y, n, ROWS, &columns.ends);
            region.run_lanes(&tasks, |node, task, scratch| {
                let lane = &columns.lanes[node];
                let mut tile = grid.take(task / lane.len(), lane.start + task % lane.len());
                let mut products = std::mem::take(&mut scratch.tiles[0]);
                let width = tile.cols.len();
                let out = products.floats(tile.rows.len() * width);
                let outputs = self.weights.outputs(tile.cols.clone());
                self.kernel.product(outputs, inputs, tile.rows.clone(), out, scratch);
                for (row, out) in tile.rows.clone().zip(out.chunks_exact(width)) {
                    // All zeros are positive from here on.
                    tile.row(row).iter_mut().zip(out).for_each(|(to, v)| *to = v + 0.0);
                }
                scratch.tiles[0] = products;
            });
        }
        region.put_buffers(buffers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_do_as_many_experts_whole_and_some_are_left() {
        for threads in 2..20 {
            for experts in 0..200 {
                let whole = whole(experts, threads);
                assert!(whole.is_multiple_of(threads));
                assert!(if experts < 2 * threads { whole == 0 } else { whole > 0 });
                assert!(whole == 0 || (threads..2 * threads).contains(&(experts - whole)));
            }
        }
        assert_eq!([1, 2, 3, 8].map(|threads| whole(8, threads)), [8, 6, 3, 0]);
    }

    #[test]
    fn chunks_are_as_few_as_can_be_and_as_large_as_each_other() {
        for rows in 0..5 * ROWS {
            let chunks: Vec<_> = chunks_of(7..7 + rows).collect();
            assert_eq!(chunks.len(), rows.div_ceil(ROWS));
            let ends = chunks.iter().map(|c| c.end);
            assert!(std::iter::once(7).chain(ends).eq(chunks.iter().map(|c| c.start).chain([7 + rows])));
            let lengths = || chunks.iter().map(Range::len);
            assert!(lengths().max() <= lengths().min().map(|n| n + 1) && lengths().all(|n| n <= ROWS), "{chunks:?}");
        }
    }
}
