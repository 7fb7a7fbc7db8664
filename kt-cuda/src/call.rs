//! One call of a layer's experts: what goes to the device, and which kernels run.

use std::ops::Range;

use kt_core::activation::Activation;
use kt_core::work::{Hidden, Work};

use crate::ffi::{Buffer, Stream};
use crate::gpu::{Around, Products};
use crate::layout::{ExpertLayout, Part};

/// Rows that the kernels for few take of an expert, and those for many at a time.
pub(crate) const FEW: usize = 16;
pub(crate) const MANY: usize = 64;
/// Most tiles of a launch: a grid's second dimension.
const TILES: usize = 65_535;

/// Rows of one expert, as `Tile` in `kernels/products.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Tile {
    expert: u32,
    first: u32,
    count: u32,
}

/// As `Call` in `kernels/products.cu`; addresses are the device's.
#[repr(C)]
#[derive(Clone, Copy)]
struct Product {
    weights: u64,
    expert_bytes: u64,
    part: [Part; 2],
    x: u64,
    rows: u64,
    tiles: u64,
    tile_count: u64,
    out: u64,
    x_stride: u32,
    out_stride: u32,
    rule: u32,
    halves: u32,
    alpha: f32,
    limit: f32,
}

/// As `Inputs` in `kernels/rows.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Inputs {
    from: u64,
    to: u64,
    tokens: u32,
    hidden: u32,
    padded: u32,
    wide: u32,
    halves: u32,
    _pad: u32,
}

/// As `Outputs` in `kernels/rows.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Outputs {
    rows: u64,
    shares: u64,
    spans: u64,
    to: u64,
    tokens: u32,
    hidden: u32,
    add: u32,
    _pad: u32,
}

/// As `Sum` in `kernels/rows.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Sum {
    from: u64,
    to: u64,
    count: u64,
}

/// Adds `count` F32 at `from` to those at `to`.
///
/// # Errors
/// What the driver says.
///
/// # Safety
/// The device holds both when the stream comes to this, until it is past it.
#[allow(unsafe_code)] // a launch of a kernel on device pointers
pub(crate) unsafe fn add(stream: &Stream, around: &Around, from: u64, to: u64, count: usize) -> Result<(), String> {
    let sum = Sum { from, to, count: count as u64 };
    // SAFETY: the caller's promise.
    unsafe { stream.launch(&around.add, (count.div_ceil(256).min(TILES), 1), 256, &sum) }
}

/// The kernels and layouts of a bank's layer.
pub(crate) struct Shape {
    pub hidden: usize,
    pub activation: Activation,
    pub layout: ExpertLayout,
}

/// Pieces of a buffer, one behind the other, each from a multiple of 256 on.
pub(crate) struct Cuts(usize);

impl Cuts {
    pub fn new() -> Self {
        Cuts(0)
    }

    pub fn take(&mut self, bytes: usize) -> usize {
        let at = self.0;
        self.0 = (at + bytes).next_multiple_of(256);
        at
    }

    pub fn end(&self) -> usize {
        self.0
    }
}

/// Where a call's pieces are in the scratch. Those up to `sent` come from the host in one copy.
pub(crate) struct Places {
    pub input: usize,
    pub rows: usize,
    pub spans: usize,
    pub shares: usize,
    pub few: usize,
    pub many: usize,
    pub counts: usize,
    pub sent: usize,
    /// Of choices that are grouped on the device.
    pub seats: usize,
    /// Inputs as BF16; intermediate rows; an output of each row; the outputs of tokens.
    pub x: usize,
    pub h: usize,
    pub y: usize,
    pub out: usize,
    pub bytes: usize,
}

impl Counts {
    /// Of some work, whose inputs and outputs go through the scratch.
    pub fn of(work: &Work, tiles: &[Vec<Tile>; 2]) -> Self {
        Counts {
            tokens: work.tokens,
            rows: work.rows.len(),
            few: tiles[0].len(),
            many: tiles[1].len(),
            element: if matches!(*work.input, Hidden::F32(_)) { 4 } else { 2 },
            choices: false,
            output: true,
        }
    }
}

/// How many of everything.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Counts {
    pub tokens: usize,
    pub rows: usize,
    pub few: usize,
    pub many: usize,
    /// Bytes of an input element: 4 or 2; 0 where inputs do not come through the scratch.
    pub element: usize,
    /// Whether rows are made of choices on the device.
    pub choices: bool,
    /// Whether outputs are kept in the scratch.
    pub output: bool,
}

impl Places {
    pub fn new(shape: &Shape, n: Counts) -> Self {
        let mut cuts = Cuts::new();
        let padded = |i: usize| shape.layout.of[i].padded_cols();
        let input = cuts.take(n.tokens * shape.hidden * n.element);
        let rows = cuts.take(n.rows * 4);
        let spans = cuts.take(n.tokens * 8);
        let shares = cuts.take(n.rows * 8);
        let few = cuts.take(n.few * size_of::<Tile>());
        let many = cuts.take(n.many * size_of::<Tile>());
        let counts = cuts.take(8);
        let sent = cuts.end();
        let seats = cuts.take(if n.choices { n.rows * 8 } else { 0 });
        let x = cuts.take(n.tokens * padded(0) * 2);
        let h = cuts.take(n.rows * padded(2) * 2);
        let y = cuts.take(n.rows * shape.hidden * 4);
        let out = cuts.take(if n.output { n.tokens * shape.hidden * 4 } else { 0 });
        Places { input, rows, spans, shares, few, many, counts, sent, seats, x, h, y, out, bytes: cuts.end() }
    }
}

/// The tiles of some work: for few rows, and for many. `both` says that there are kernels for many, `place` where an expert's weights are.
///
/// # Errors
/// More than one launch takes.
pub(crate) fn tiles(work: &Work, both: bool, place: impl Fn(u32) -> u32) -> Result<[Vec<Tile>; 2], String> {
    let (mut few, mut many) = (Vec::new(), Vec::new());
    for group in &work.experts {
        let (expert, count) = (place(group.local), group.rows.len());
        let (tiles, most) = if count > FEW && both { (&mut many, MANY) } else { (&mut few, FEW) };
        tiles.extend(group.rows.clone().step_by(most).map(|first| Tile {
            expert,
            first: first as u32,
            count: most.min(group.rows.end - first) as u32,
        }));
    }
    if few.len() > TILES || many.len() > TILES {
        return Err(format!(
            "{} tiles of rows are more than one launch takes, {TILES}; use shorter passes",
            few.len() + many.len()
        ));
    }
    Ok([few, many])
}

/// Writes what the device needs of some work into `there`, as `places` says.
pub(crate) fn write(work: &Work, tiles: &[Vec<Tile>; 2], places: &Places, there: &mut [u8]) {
    let hidden = work.first * work.hidden..(work.first + work.tokens) * work.hidden;
    match &*work.input {
        Hidden::F32(v) => put(there, places.input, v[hidden].iter().map(|v| v.to_le_bytes())),
        Hidden::Bf16(v) => put(there, places.input, v[hidden].iter().map(|v| v.to_le_bytes())),
    }
    put(there, places.rows, work.rows.iter().map(|r| r.token.to_le_bytes()));
    // A token's rows by rising expert: work's rows are in that order already.
    let mut ends = vec![0u32; work.tokens + 1];
    work.rows.iter().for_each(|row| ends[row.token as usize + 1] += 1);
    for i in 1..ends.len() {
        ends[i] += ends[i - 1];
    }
    put(there, places.spans, ends.windows(2).flat_map(|e| [e[0].to_le_bytes(), e[1].to_le_bytes()]));
    for (i, row) in work.rows.iter().enumerate() {
        let at = &mut ends[row.token as usize];
        put(there, places.shares + *at as usize * 8, [(i as u32).to_le_bytes(), row.weight.to_le_bytes()]);
        *at += 1;
    }
    for (at, tiles) in [places.few, places.many].into_iter().zip(tiles) {
        put(there, at, tiles.iter().flat_map(|t| [t.expert, t.first, t.count]).map(u32::to_le_bytes));
    }
    put(there, places.counts, tiles.each_ref().map(|t| (t.len() as u32).to_le_bytes()));
}

fn put<const N: usize>(out: &mut [u8], at: usize, values: impl IntoIterator<Item = [u8; N]>) {
    out[at..].as_chunks_mut::<N>().0.iter_mut().zip(values).for_each(|(o, v)| *o = v);
}

/// Number of a rule in `activate` of `kernels/tools.cu`, and its numbers.
///
/// # Errors
/// A rule that the kernels do not have.
pub(crate) fn rule(activation: Activation) -> Result<(u32, f32, f32), String> {
    Ok(match activation {
        Activation::SiluMul => (0, 0.0, 0.0),
        Activation::ClampedSiluMul { limit } => (1, 0.0, limit),
        Activation::GptOss { alpha, limit } => (2, alpha, limit),
        other => return Err(format!("no kernel for the activation {other:?}")),
    })
}

/// The kernels of a call, on a stream.
pub(crate) struct Launch<'a> {
    pub stream: &'a Stream,
    pub around: &'a Around,
    /// Of gate and up; of down.
    pub products: [&'a Products; 2],
    pub shape: &'a Shape,
    pub weights: &'a Buffer,
    pub scratch: &'a Buffer,
    pub places: &'a Places,
    pub counts: Counts,
}

/// As `Choices` in `kernels/rows.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Choices {
    ids: u64,
    weights: u64,
    homes: u64,
    starts: u64,
    seats: u64,
    rows: u64,
    shares: u64,
    spans: u64,
    few: u64,
    many: u64,
    counts: u64,
    tokens: u32,
    top_k: u32,
    layer_experts: u32,
    experts: u32,
    both: u32,
    _pad: u32,
}

/// A pointer of the device, or an offset in the scratch.
#[derive(Debug, Clone, Copy)]
pub(crate) enum At {
    Scratch(usize),
    Device(u64),
}

impl Launch<'_> {
    /// Groups choices that are on the device: writes rows, shares, spans, tiles and their counts. `homes` has the local expert of each of `layer_experts`, and
    /// room for a number of each of the `experts` here.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// The device holds `ids` (I32) and `weights` (F32), `[tokens, top_k]`, when the stream comes to this, until it is past it.
    #[allow(unsafe_code)] // a launch of a kernel on device pointers
    pub unsafe fn group(
        &self,
        (ids, weights): (u64, u64),
        homes: &Buffer,
        top_k: usize,
        (layer_experts, experts): (usize, usize),
    ) -> Result<(), String> {
        let (places, scratch) = (self.places, |at: usize| self.at(At::Scratch(at)));
        let choices = Choices {
            ids,
            weights,
            homes: homes.address(),
            starts: homes.address() + layer_experts as u64 * 4,
            seats: scratch(places.seats),
            rows: scratch(places.rows),
            shares: scratch(places.shares),
            spans: scratch(places.spans),
            few: scratch(places.few),
            many: scratch(places.many),
            counts: scratch(places.counts),
            tokens: self.counts.tokens as u32,
            top_k: top_k as u32,
            layer_experts: layer_experts as u32,
            experts: experts as u32,
            both: self.products.iter().all(|p| p.many.is_some()).into(),
            _pad: 0,
        };
        // SAFETY: choices are the caller's promise; there is a row, a seat and a share for each, a span for each token, and room for the most tiles that there can be.
        unsafe { self.stream.launch(&self.around.group, (1, 1), 1024, &choices) }
    }

    fn at(&self, at: At) -> u64 {
        match at {
            At::Scratch(offset) => self.scratch.address() + offset as u64,
            At::Device(address) => address,
        }
    }

    /// Inputs to BF16, both products, and the outputs of each token added: to `output`, or in its place.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// As [`Launch::inputs`], [`Launch::products`] and [`Launch::outputs`].
    #[allow(unsafe_code)] // launches of kernels on device pointers
    pub unsafe fn run(&self, input: At, wide: bool, output: At, add: bool) -> Result<(), String> {
        // SAFETY: the caller's promise.
        unsafe { self.inputs(input, wide) }?;
        // SAFETY: the caller's promise.
        unsafe { self.products([0..self.counts.few, 0..self.counts.many]) }?;
        // SAFETY: the caller's promise.
        unsafe { self.outputs(output, add) }
    }

    /// Tokens are the grid's second dimension; kernels go on where it ends.
    fn grid(&self, cols: usize) -> (usize, usize) {
        (cols.div_ceil(256), self.counts.tokens.min(TILES))
    }

    /// Inputs to BF16, in the order of the first product.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// The device holds `input` `[tokens, hidden]` of 4 or 2 bytes each when the stream comes to this, until it is past it.
    #[allow(unsafe_code)] // a launch of a kernel on device pointers
    pub unsafe fn inputs(&self, input: At, wide: bool) -> Result<(), String> {
        let gate = &self.shape.layout.of[0];
        let inputs = Inputs {
            from: self.at(input),
            to: self.at(At::Scratch(self.places.x)),
            tokens: self.counts.tokens as u32,
            hidden: self.shape.hidden as u32,
            padded: gate.padded_cols() as u32,
            wide: wide.into(),
            halves: gate.codes.halves().into(),
            _pad: 0,
        };
        // SAFETY: the input is the caller's promise; `x` has tokens x padded numbers of two bytes.
        unsafe { self.stream.launch(&self.around.inputs, self.grid(gate.padded_cols()), 256, &inputs) }
    }

    /// Both products of these tiles, for few rows and for many.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// The device holds the inputs, rows, tiles and their counts, and weights of this layout at the experts that tiles name, when the stream comes to
    /// this, until it is past it.
    #[allow(unsafe_code)] // launches of kernels on device pointers
    pub unsafe fn products(&self, tiles: [Range<usize>; 2]) -> Result<(), String> {
        let (shape, places) = (self.shape, self.places);
        let [gate, up, down] = &shape.layout.of;
        let part = |i: usize| shape.layout.of[i].part(shape.layout.at[i]);
        let scratch = |at: usize| self.at(At::Scratch(at));
        let (rule, alpha, limit) = rule(shape.activation)?;
        let first = Product {
            weights: self.weights.address(),
            expert_bytes: shape.layout.bytes as u64,
            part: [part(0), part(1)],
            x: scratch(places.x),
            rows: scratch(places.rows),
            tiles: 0,
            tile_count: 0,
            out: scratch(places.h),
            x_stride: gate.padded_cols() as u32,
            out_stride: down.padded_cols() as u32,
            rule,
            halves: down.codes.halves().into(),
            alpha,
            limit,
        };
        let second = Product {
            part: [part(2), part(2)],
            x: scratch(places.h),
            rows: 0,
            out: scratch(places.y),
            x_stride: down.padded_cols() as u32,
            out_stride: shape.hidden as u32,
            ..first
        };
        debug_assert_eq!(gate.padded_cols(), up.padded_cols());
        let [few_tiles, many_tiles] = tiles;
        // Blocks of outputs that a block of threads does: of gate and up 1 and 4, of down 2 and 8.
        let calls = [(first, gate.blocks(), [1, 4]), (second, down.blocks(), [2, 8])];
        for (which, (call, blocks, each)) in calls.into_iter().enumerate() {
            let products = self.products[which];
            let few = (Some(&products.few[which]), &few_tiles, places.few, places.counts);
            let many = (products.many.as_ref().map(|m| &m[which]), &many_tiles, places.many, places.counts + 4);
            for ((kernel, tiles, at, count), each) in [few, many].into_iter().zip(each) {
                let Some(kernel) = kernel.filter(|_| !tiles.is_empty()) else { continue };
                let at = at + tiles.start * size_of::<Tile>();
                let call = Product { tiles: scratch(at), tile_count: scratch(count), ..call };
                let grid = (blocks.div_ceil(each), tiles.len());
                // SAFETY: inputs, tiles and weights are the caller's promise; x, h and y have a row for each of theirs.
                unsafe { self.stream.launch(kernel, grid, 128, &call) }?;
            }
        }
        Ok(())
    }

    /// The outputs of each token's experts, added: to `output`, or in its place.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// The device holds `output` `[tokens, hidden]` F32, spans and shares when the stream comes to this, until it is past it.
    #[allow(unsafe_code)] // a launch of a kernel on device pointers
    pub unsafe fn outputs(&self, output: At, add: bool) -> Result<(), String> {
        let scratch = |at: usize| self.at(At::Scratch(at));
        let outputs = Outputs {
            rows: scratch(self.places.y),
            shares: scratch(self.places.shares),
            spans: scratch(self.places.spans),
            to: self.at(output),
            tokens: self.counts.tokens as u32,
            hidden: self.shape.hidden as u32,
            add: add.into(),
            _pad: 0,
        };
        // SAFETY: shares name rows of y; the output is the caller's promise.
        unsafe { self.stream.launch(&self.around.outputs, self.grid(self.shape.hidden), 256, &outputs) }
    }
}
