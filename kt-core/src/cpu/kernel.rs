//! What one CPU instruction set must provide: packing and product, nothing else.

use std::ops::Range;

use bytes::Bytes;

use super::input::{self, InputLayout, Inputs};
use super::tier::Tier;
use crate::activation::Activation;
use crate::error::Unsupported;
use crate::format::{Format, Matrix};

/// One matrix as a kernel wants it: packed into memory of ours, or as it is in the checkpoint's map.
#[derive(Debug, Clone)]
pub struct Weights {
    matrix: WeightsKind,
    format: Format,
    rows: usize,
    cols: usize,
}

#[derive(Debug, Clone)]
enum WeightsKind {
    Packed(Bytes),
    InPlace(Matrix),
}

impl Weights {
    /// Weights in a kernel's packed layout.
    pub fn packed(format: Format, rows: usize, cols: usize, bytes: Bytes) -> Self {
        Weights { matrix: WeightsKind::Packed(bytes), format, rows, cols }
    }

    /// Weights used from the checkpoint.
    pub fn in_place(matrix: Matrix) -> Self {
        let (format, rows, cols) = (matrix.format(), matrix.rows(), matrix.cols());
        Weights { matrix: WeightsKind::InPlace(matrix), format, rows, cols }
    }

    /// Format of the matrix in the checkpoint.
    #[inline(always)]
    pub fn format(&self) -> Format {
        self.format
    }

    /// Outputs.
    #[inline(always)]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    #[inline(always)]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The packed bytes; empty for weights in place.
    #[inline(always)]
    pub fn bytes(&self) -> &[u8] {
        match &self.matrix {
            WeightsKind::Packed(b) => b,
            WeightsKind::InPlace(_) => &[],
        }
    }

    /// The checkpoint's matrix, for weights in place.
    #[inline(always)]
    pub fn matrix(&self) -> Option<&Matrix> {
        match &self.matrix {
            WeightsKind::Packed(_) => None,
            WeightsKind::InPlace(m) => Some(m),
        }
    }
}

/// The outputs of a matrix that one product computes.
#[derive(Debug, Clone)]
pub struct Outputs<'a> {
    /// The matrix.
    pub of: &'a Weights,
    /// Its outputs; they start at a multiple of [`Kernel::PANEL`].
    pub range: Range<usize>,
    /// What the same thread will probably multiply next, and from which output on: a hint, so that its weights are on their way.
    pub next: Option<(&'a Weights, usize)>,
    /// Input rows that it will probably multiply then, if it did not just make them itself: a hint as well.
    pub next_inputs: &'a [u8],
}

impl<'a> Outputs<'a> {
    /// Some outputs of a matrix, with nothing known of what comes next.
    pub fn new(of: &'a Weights, range: Range<usize>) -> Self {
        Outputs { of, range, next: None, next_inputs: &[] }
    }
}

/// Memory that a thread keeps between products, so that kernels never allocate on a hot path.
#[derive(Default)]
pub struct Scratch {
    /// For unpacked weights, decoded rows: grows as asked, content undefined.
    pub panel: super::memory::AlignedBytes,
    /// For the flow: gate and up tiles.
    pub(crate) tiles: [super::memory::AlignedBytes; 2],
    /// For the flow: the down inputs of an expert that is done whole.
    pub(crate) h: super::memory::AlignedBytes,
    /// For the flow: the rows of one expert, of the inputs of gate and of up.
    pub(crate) gathered: [super::flow::Gathered; 2],
}

/// What [`Kernel::add`] does. Vectorizes inside a `#[target_feature]` caller.
#[inline(always)]
pub fn add(weight: f32, y: &[f32], out: &mut [f32]) {
    for (o, &y) in out.iter_mut().zip(y) {
        *o += weight * y;
    }
}

/// Packing and product for one instruction set.
///
/// Holding a value proves that the instructions exist: constructors detect. The flow calls [`pack`](Kernel::pack) while
/// loading, from many threads; [`pack_inputs`](Kernel::pack_inputs), [`product`](Kernel::product), [`activate`](Kernel::activate) and
/// [`add`](Kernel::add) from the team's threads, never two at once on the same output.
pub trait Kernel: Copy + Send + Sync + 'static {
    /// Outputs that are packed together: 16, 32, 64 or 128. Matrices are cut at multiples of it only.
    const PANEL: usize = 16;

    /// The instruction set.
    fn tier(self) -> Tier;

    /// How good the kernel is among those that take a format: the highest is chosen. By default as good as its tier.
    fn rank(self) -> u32 {
        Tier::ALL.iter().position(|&t| t == self.tier()).unwrap_or(0) as u32
    }

    /// What runs it, for `explain`. By default its tier.
    fn label(self) -> String {
        self.tier().to_string()
    }

    /// Which number path runs this format: the layout of its input rows, and one line for `explain` (`VNNI, unsigned codes
    /// packed 16 x 4`).
    ///
    /// # Errors
    /// Why it does not run the format natively.
    fn accepts(self, format: Format, rows: usize, cols: usize) -> Result<(InputLayout, &'static str), Unsupported>;

    /// Bytes of the packed matrix (a multiple of 64), or `None` when the checkpoint's bytes are used in place.
    fn packed_bytes(self, format: Format, rows: usize, cols: usize) -> Option<usize>;

    /// The same kernel for who has little memory: what it can multiply as the checkpoint has it is not packed, even where packing makes it
    /// faster. No bit of any number differs. By default nothing changes.
    fn in_place(self) -> Self {
        self
    }

    /// From how many rows on, on average over the experts of a layer, calls have another kernel, and which: with the same packed weights, and perhaps
    /// other inputs. Numbers may differ between the two, as those of a token then do between calls of few and of many. By default there is none.
    fn for_many(self) -> Option<(usize, Self)> {
        None
    }

    /// The same without another kernel for many rows: the numbers of a token do not depend on what else is in a call. By default nothing changes.
    fn invariant(self) -> Self {
        self
    }

    /// The version of what [`pack`](Kernel::pack) makes: another number whenever it makes other bytes of some matrix, so that
    /// packed bytes on disk are not taken for what they are not. Kernels that pack nothing say 0.
    fn layout_version(self) -> u32;

    /// Packs rows `rows` of a matrix of an accepted format into `out`, which is zeroed, 64-byte aligned and of
    /// [`packed_bytes`](Kernel::packed_bytes) for so many rows. They start at a multiple of [`PANEL`](Kernel::PANEL), and end at one or at the matrix's end; the
    /// bytes are the same, and in the same order, as those of these rows when the whole matrix is packed.
    fn pack(self, matrix: &Matrix, rows: Range<usize>, out: &mut [u8]);

    /// The inputs of products whose rows are known as a whole before they are packed, as those of gate and up are, where [`accepts`](Kernel::accepts) says `layout`, whose
    /// blocks are small enough to be packed as they are computed. By default the same.
    fn inputs_of_rows(self, layout: InputLayout) -> InputLayout {
        layout
    }

    /// Rounds `columns` columns of some rows, [`InputLayout::columns`] at most, into blocks of `layout` that follow each other in `out`: the rows
    /// begin `stride` numbers apart in `x`, and there are as many as `out` has blocks.
    fn pack_inputs(self, layout: InputLayout, x: &[f32], (stride, columns): (usize, usize), out: &mut [u8]) {
        for (i, out) in out.chunks_exact_mut(layout.block_bytes()).enumerate() {
            input::pack_block(layout, &x[i * stride..][..columns], out);
        }
    }

    /// The same of one row.
    fn pack_input(self, layout: InputLayout, x: &[f32], out: &mut [u8]) {
        self.pack_inputs(layout, x, (x.len(), x.len()), out);
    }

    /// Applies the activation; the result replaces `gate`.
    fn activate(self, rule: Activation, gate: &mut [f32], up: &[f32]) {
        rule.apply(gate, up);
    }

    /// Adds `weight * y` to `out`, the product rounded before the sum.
    fn add(self, weight: f32, y: &[f32], out: &mut [f32]) {
        add(weight, y, out);
    }

    /// `out[i, j] = sum_k W[outputs.range.start + j, k] * x[rows.start + i, k]`: `out` is `[rows.len(), outputs.range.len()]`
    /// row-major, overwritten. Each number must come out the same whatever the other rows are and
    /// however the outputs are cut, except where the kernel's choice by number of rows is documented to change it. A zero may have
    /// either sign: sums begin with a positive one, so that what is made of it later does not depend on that.
    fn product(self, outputs: Outputs<'_>, x: Inputs<'_>, rows: Range<usize>, out: &mut [f32], scratch: &mut Scratch);
}
