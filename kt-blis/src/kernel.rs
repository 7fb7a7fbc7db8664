//! The kernel: which of the library's products runs a format, how weights are packed for it, and the loops around it.
//!
//! ```text
//! path    weights of a panel of 64 outputs                                            sums
//! codes   signed bytes by pieces of 32 or 128 columns, reordered by the library       i32 by piece, scaled and added here
//!         (at load; INT4: in place, unpacked and reordered for each product)
//! bf16    blocks of 128 columns, reordered by the library at load                     f32, by the library
//! f32     in place, decoded for each product                                          f32, by the library
//! ```
//!
//! Sums of integers are exact, so codes come in any number of rows. Sums of floats are called as [`Steady`] says.

use std::ops::Range;

use kt_avx512::Avx;
use kt_avx512::engine::{Isa, Job};
use kt_core::activation::Activation;
use kt_core::cpu::input::{BLOCK, InputLayout, Inputs, Sums};
use kt_core::cpu::kernel::{Kernel, Outputs, Scratch};
use kt_core::cpu::tier::Tier;
use kt_core::{Format, Group, Matrix, Unsupported};

use crate::ffi::{Aocl, DEPTHS, PANEL, Sgemm};
use crate::library::{Library, Steady};

/// The version of the layout of panels, apart from the library's part of it.
pub(crate) const LAYOUT: u32 = 1;

/// Columns that are decoded at once: those of the largest GGUF block.
pub(crate) const COLUMNS: usize = 256;

/// Columns of the shortest piece.
const SHORT: usize = DEPTHS[0];
const _: () = assert!(DEPTHS[1] == BLOCK);

/// Products by a BLIS library, between this workspace's own rounding and activation.
#[derive(Clone, Copy)]
pub struct Blis {
    library: &'static Library,
    own: Avx,
}

/// Which product runs a format.
enum Path<'a> {
    Codes(&'a Aocl<i8, i32>, Codes),
    Bf16(&'a Steady<Aocl<u16, f32>>),
    F32,
}

/// How codes are cut.
#[derive(Clone, Copy)]
struct Codes {
    /// Columns with one scale of inputs and one of weights.
    piece: usize,
    /// Columns of a scale of weights.
    group: usize,
    /// Columns, filled up to whole blocks.
    cols: usize,
    /// Whether groups have zero points.
    zeros: bool,
    /// Bytes of a reordered piece, rounded up to whole lines.
    piece_bytes: usize,
}

impl Codes {
    fn new(aocl: &Aocl<i8, i32>, format: Format, cols: usize) -> Option<Self> {
        let padded = cols.div_ceil(BLOCK) * BLOCK;
        let (piece, group) = match format.group()? {
            Group::Row => (BLOCK, padded),
            Group::Of(g) if (g as usize).is_multiple_of(BLOCK) && g > 0 => (BLOCK, g as usize),
            Group::Of(g) if (g as usize).is_multiple_of(SHORT) && g > 0 => (SHORT, g as usize),
            Group::Of(_) => return None,
        };
        let piece_bytes = aocl.reordered_bytes(piece).next_multiple_of(64);
        Some(Codes { piece, group, cols: padded, zeros: format.takes_zero_points(), piece_bytes })
    }

    fn pieces(self) -> usize {
        self.cols / self.piece
    }

    fn groups(self) -> usize {
        self.cols.div_ceil(self.group)
    }

    /// Of a packed panel: its pieces; then 64 scales as F32 for each group; then 64 zero points as I32 for each, if there are such.
    fn panel_bytes(self) -> usize {
        self.pieces() * self.piece_bytes + self.groups() * PANEL * if self.zeros { 8 } else { 4 }
    }
}

impl Blis {
    /// Products by `library`, with this crate's own part on the best instructions of this CPU.
    ///
    /// # Errors
    /// The CPU has no AVX2. Or `cap` is below what it has: a library chooses its instructions itself, and cannot be held to fewer.
    pub fn new(library: &'static Library, cap: Tier) -> Result<Self, Unsupported> {
        let own = Avx::detect(Tier::Amx)?;
        if cap < own.tier() {
            return Err(Unsupported::new(format!(
                "limited to tier {cap}, but {} chooses its instructions itself, up to this CPU's {}",
                library.name(),
                own.tier()
            )));
        }
        Ok(Blis { library, own })
    }

    /// The library.
    pub fn library(self) -> &'static Library {
        self.library
    }

    fn path(self, format: Format, cols: usize) -> Result<Path<'static>, Unsupported> {
        let library = self.library;
        if let (
            Format::Int8(_) | Format::Int8Offset(_) | Format::Int8Asym(_) | Format::Int4(_) | Format::Int4Asym(_),
            Ok(aocl),
        ) = (format, &library.int8)
            && let Some(codes) = Codes::new(aocl, format, cols)
        {
            return Ok(Path::Codes(aocl, codes));
        }
        if let (Format::Bf16, Ok(bf16)) = (format, &library.bf16) {
            return Ok(Path::Bf16(bf16));
        }
        match &library.sgemm {
            Ok(_) => Ok(Path::F32),
            Err(why) => {
                let bf16 = library.without_bf16().filter(|_| format == Format::Bf16);
                Err(Unsupported::new(format!(
                    "{} {why}; besides, it runs INT8 and INT4 with groups of multiples of {SHORT}, and BF16{}",
                    library.name(),
                    bf16.map(|why| format!(", for which it {why}")).unwrap_or_default()
                )))
            }
        }
    }
}

/// Whether codes stay in the checkpoint until they are multiplied.
fn in_place(format: Format) -> bool {
    matches!(format, Format::Int4(_) | Format::Int4Asym(_))
}

/// What is taken from stored codes to make signed bytes of them.
fn middle(format: Format) -> i32 {
    match format {
        Format::Int8(_) => 0,
        Format::Int4(_) | Format::Int4Asym(_) => 8,
        _ => 128,
    }
}

impl Kernel for Blis {
    const PANEL: usize = PANEL;

    fn tier(self) -> Tier {
        self.own.tier()
    }

    /// Below every tier of this workspace's own, next to the portable kernel: BLIS's `sgemm` was measured to be slower than any of them and than
    /// portable for one token (README.md), and AOCL's products were not measured.
    fn rank(self) -> u32 {
        0
    }

    fn label(self) -> String {
        self.library.label.clone()
    }

    fn accepts(self, format: Format, _rows: usize, cols: usize) -> Result<(InputLayout, &'static str), Unsupported> {
        format.row_bytes(cols).map_err(Unsupported)?;
        let how = &self.library.how;
        Ok(match self.path(format, cols)? {
            Path::Codes(_, codes) => {
                let how = if in_place(format) { how.int4 } else { how.int8 };
                (InputLayout::Int8 { group: codes.piece, sums: Sums::Times(1) }, how)
            }
            Path::Bf16(_) => (InputLayout::Bf16, how.bf16),
            Path::F32 if format.group().is_some() => (InputLayout::F32, how.f32_codes),
            Path::F32 if format == Format::Bf16 => (InputLayout::F32, how.f32_bf16),
            Path::F32 => (InputLayout::F32, how.f32),
        })
    }

    fn packed_bytes(self, format: Format, rows: usize, cols: usize) -> Option<usize> {
        let panel_bytes = match self.path(format, cols) {
            Ok(Path::Codes(_, codes)) if !in_place(format) => codes.panel_bytes(),
            Ok(Path::Bf16(steady)) => cols.div_ceil(BLOCK) * block_bytes(steady),
            _ => return None,
        };
        Some(rows.div_ceil(PANEL) * panel_bytes)
    }

    fn layout_version(self) -> u32 {
        self.library.layout
    }

    fn pack(self, matrix: &Matrix, rows: Range<usize>, out: &mut [u8]) {
        let path = self.path(matrix.format(), matrix.cols());
        let panels = rows.clone().step_by(PANEL).map(|first| first..rows.end.min(first + PANEL));
        match path {
            Ok(Path::Codes(aocl, codes)) => {
                let mut plain = vec![0i8; PANEL * codes.piece];
                for (outputs, out) in panels.zip(out.chunks_exact_mut(codes.panel_bytes())) {
                    let (pieces, rest) = out.split_at_mut(codes.pieces() * codes.piece_bytes);
                    for (p, out) in pieces.chunks_exact_mut(codes.piece_bytes).enumerate() {
                        self.own.run(Compiled(Unpack {
                            matrix,
                            outputs: outputs.clone(),
                            first: p * codes.piece,
                            to: &mut plain,
                        }));
                        aocl.reorder(&plain, codes.piece, out);
                    }
                    let (scales, zeros) = rest.split_at_mut(codes.groups() * PANEL * 4);
                    let zeros: &mut [i32] = bytemuck::cast_slice_mut(zeros);
                    for (g, scales) in bytemuck::cast_slice_mut::<u8, f32>(scales).chunks_exact_mut(PANEL).enumerate() {
                        let zeros = zeros.chunks_exact_mut(PANEL).nth(g);
                        group_numbers(matrix, outputs.clone(), g, scales, zeros);
                    }
                }
            }
            Ok(Path::Bf16(steady)) => {
                let blocks = matrix.cols().div_ceil(BLOCK);
                let mut plain = vec![0u16; PANEL * BLOCK];
                for (outputs, out) in panels.zip(out.chunks_exact_mut(blocks * block_bytes(steady))) {
                    for (b, out) in out.chunks_exact_mut(block_bytes(steady)).enumerate() {
                        plain.fill(0);
                        for (row, plain) in outputs.clone().zip(plain.chunks_exact_mut(BLOCK)) {
                            let bits = matrix.row(row)[b * BLOCK * 2..].as_chunks::<2>().0;
                            plain.iter_mut().zip(bits).for_each(|(to, &bits)| *to = u16::from_le_bytes(bits));
                        }
                        steady.function.reorder(&plain, BLOCK, out);
                    }
                }
            }
            _ => {}
        }
    }

    fn pack_inputs(self, layout: InputLayout, x: &[f32], rows: (usize, usize), out: &mut [u8]) {
        self.own.pack_inputs(layout, x, rows, out);
    }

    fn activate(self, rule: Activation, gate: &mut [f32], up: &[f32]) {
        self.own.activate(rule, gate, up);
    }

    fn add(self, weight: f32, y: &[f32], out: &mut [f32]) {
        self.own.add(weight, y, out);
    }

    fn product(self, outputs: Outputs<'_>, x: Inputs<'_>, rows: Range<usize>, out: &mut [f32], scratch: &mut Scratch) {
        let (format, cols) = (outputs.of.format(), outputs.of.cols());
        if rows.is_empty() {
            return;
        }
        match (self.path(format, cols), &self.library.sgemm) {
            (Ok(Path::Codes(aocl, codes)), _) => self.codes(aocl, codes, outputs, (x, rows), out, scratch),
            (Ok(Path::Bf16(steady)), _) => bf16(steady, outputs, (x, rows), out, scratch),
            (Ok(Path::F32), Ok(steady)) => f32s(steady, outputs, (x, rows), out, scratch),
            _ => unreachable!("{format} was never accepted"),
        }
    }
}

/// The panels of some outputs, which begin with a panel: the outputs of each.
fn panels(outputs: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    outputs.clone().step_by(PANEL).map(move |first| first..outputs.end.min(first + PANEL))
}

/// Bytes of a reordered block of bf16, rounded up to whole lines.
fn block_bytes(steady: &Steady<Aocl<u16, f32>>) -> usize {
    steady.function.reordered_bytes(BLOCK).next_multiple_of(64)
}

/// The scales of a group for a panel's outputs, and how far their zero points are from [`middle`]; 0 for outputs that there are not.
fn group_numbers(matrix: &Matrix, outputs: Range<usize>, group: usize, scales: &mut [f32], zeros: Option<&mut [i32]>) {
    let Some(stored) = matrix.scales() else { return };
    scales.fill(0.0);
    // The columns after the last group's are none of the matrix's.
    if group >= stored.cols() {
        return;
    }
    outputs.clone().zip(scales).for_each(|(row, scale)| *scale = stored.get(row, group));
    if let Some(zeros) = zeros {
        zeros.fill(0);
        let middle = middle(matrix.format());
        outputs.zip(zeros).for_each(|(row, zero)| *zero = matrix.zero_point(row, group) - middle);
    }
}

impl Blis {
    fn codes(
        self,
        aocl: &Aocl<i8, i32>,
        codes: Codes,
        Outputs { of: weights, range, .. }: Outputs<'_>,
        (x, rows): (Inputs<'_>, Range<usize>),
        out: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let (width, start, stride) = (range.len(), range.start, x.layout().block_bytes());
        let sums_bytes = rows.len() * PANEL * 4;
        let plain_bytes = if weights.matrix().is_some() { PANEL * codes.piece } else { 0 };
        let numbers_bytes = PANEL * 8;
        let all = scratch.panel.get(sums_bytes + numbers_bytes + plain_bytes + codes.piece_bytes);
        let (sums, all) = all.split_at_mut(sums_bytes);
        let (numbers, all) = all.split_at_mut(numbers_bytes);
        let (plain, reordered) = all.split_at_mut(plain_bytes);
        let sums: &mut [i32] = bytemuck::cast_slice_mut(sums);
        let plain: &mut [i8] = bytemuck::cast_slice_mut(plain);
        let (scales, zeros) = numbers.split_at_mut(PANEL * 4);
        let (scales, zeros): (&mut [f32], &mut [i32]) =
            (bytemuck::cast_slice_mut(scales), bytemuck::cast_slice_mut(zeros));
        out.fill(0.0);
        for outputs in panels(range) {
            let packed =
                weights.bytes().chunks_exact(codes.panel_bytes()).nth(outputs.start / PANEL).unwrap_or_default();
            let mut group = usize::MAX;
            for p in 0..codes.pieces() {
                let first = p * codes.piece;
                let new = std::mem::replace(&mut group, first / codes.group) != group;
                let piece: &[u8] = match weights.matrix() {
                    Some(matrix) => {
                        self.own.run(Compiled(Unpack { matrix, outputs: outputs.clone(), first, to: plain }));
                        aocl.reorder(plain, codes.piece, reordered);
                        if new {
                            group_numbers(matrix, outputs.clone(), group, scales, codes.zeros.then_some(&mut *zeros));
                        }
                        reordered
                    }
                    None => {
                        let numbers = &packed[codes.pieces() * codes.piece_bytes..];
                        if new {
                            let at = |g: usize| &numbers[g * PANEL * 4..][..PANEL * 4];
                            scales.copy_from_slice(bytemuck::cast_slice(at(group)));
                            if codes.zeros {
                                zeros.copy_from_slice(bytemuck::cast_slice(at(codes.groups() + group)));
                            }
                        }
                        &packed[p * codes.piece_bytes..][..codes.piece_bytes]
                    }
                };
                let (block, within) = (first / BLOCK, first % BLOCK);
                let inputs = &x.bytes()[(block * x.rows() + rows.start) * stride..][..rows.len() * stride];
                let a: &[i8] = bytemuck::cast_slice(&inputs[within..]);
                aocl.multiply((rows.len(), codes.piece), (a, stride), piece, [1, 0], sums);
                let out = &mut out[outputs.start - start..];
                let zeros = codes.zeros.then_some(&zeros[..outputs.len()]);
                self.own.run(Compiled(Add {
                    sums,
                    inputs,
                    stride,
                    piece: (within / codes.piece, codes.piece),
                    scales: &scales[..outputs.len()],
                    zeros,
                    width,
                    out,
                }));
            }
        }
    }
}

/// A job that is one function compiled for the tier.
struct Compiled<J>(J);

impl<J: Job> Job for Compiled<J> {
    fn go<I: Isa>(self, isa: I) {
        isa.run(self.0);
    }
}

/// Columns `first..` of some outputs as signed bytes, `[64, piece]`; 0 for outputs and columns that there are not.
struct Unpack<'a> {
    matrix: &'a Matrix,
    outputs: Range<usize>,
    first: usize,
    to: &'a mut [i8],
}

impl Job for Unpack<'_> {
    #[inline(always)]
    fn go<I: Isa>(self, _: I) {
        let piece = self.to.len() / PANEL;
        let cols = self.matrix.cols().saturating_sub(self.first).min(piece);
        let (whole, nibbles) = (cols == piece && self.outputs.len() == PANEL, in_place(self.matrix.format()));
        let middle = middle(self.matrix.format()) as u8;
        if !whole {
            self.to.fill(0);
        }
        if cols == 0 {
            return;
        }
        for (row, to) in self.outputs.zip(self.to.chunks_exact_mut(piece)) {
            let (codes, to) = (self.matrix.row(row), &mut to[..cols]);
            if nibbles {
                for (to, &byte) in to.as_chunks_mut::<2>().0.iter_mut().zip(&codes[self.first / 2..]) {
                    *to = [(byte & 15).wrapping_sub(middle) as i8, (byte >> 4).wrapping_sub(middle) as i8];
                }
            } else {
                to.iter_mut().zip(&codes[self.first..]).for_each(|(to, &code)| *to = code.wrapping_sub(middle) as i8);
            }
        }
    }
}

/// `out[i, j] += scale of inputs * scale of weights * (sums[i, j] - zero * sum of inputs)`.
struct Add<'a> {
    /// `[rows, 64]`.
    sums: &'a [i32],
    /// The blocks of the rows.
    inputs: &'a [u8],
    stride: usize,
    /// Which piece of the block, and its columns.
    piece: (usize, usize),
    scales: &'a [f32],
    zeros: Option<&'a [i32]>,
    /// From a row to the next.
    width: usize,
    out: &'a mut [f32],
}

impl Job for Add<'_> {
    #[inline(always)]
    fn go<I: Isa>(self, _: I) {
        let n = self.scales.len();
        let (piece, cols) = self.piece;
        let rows = self.inputs.chunks_exact(self.stride).zip(self.sums.chunks_exact(PANEL));
        for ((input, sums), out) in rows.zip(self.out.chunks_mut(self.width)) {
            let numbers: &[[u8; 4]] = input[BLOCK..].as_chunks().0;
            let scale = f32::from_le_bytes(numbers[piece]);
            let (sums, out) = (&sums[..n], &mut out[..n]);
            if let Some(zeros) = self.zeros {
                let sum = i32::from_le_bytes(numbers[BLOCK / cols + piece]);
                for j in 0..n {
                    out[j] += scale * self.scales[j] * (sums[j] - zeros[j] * sum) as f32;
                }
            } else {
                for j in 0..n {
                    out[j] += scale * self.scales[j] * sums[j] as f32;
                }
            }
        }
    }
}

/// The rows of a block that a call reads: as they are, or copied and filled up with zeros where there are not so many.
fn call_rows<'a>(
    x: Inputs<'a>,
    block: usize,
    (rows, at, m): (&Range<usize>, usize, usize),
    pad: &'a mut [u8],
) -> &'a [u8] {
    let size = x.layout().block_bytes();
    let first = rows.start + at;
    // Rows after those that are asked for do as well: what comes of them is not used.
    let from = (block * x.rows() + first) * size;
    if first + m <= x.rows() {
        return &x.bytes()[from..][..m * size];
    }
    let there = (x.rows() - first) * size;
    let pad = &mut pad[..m * size];
    pad[..there].copy_from_slice(&x.bytes()[from..][..there]);
    pad[there..].fill(0);
    pad
}

/// Copies a panel's sums `[rows, 64]` to its place in `out`, whose rows are `width` long.
fn copy_out(sums: &[f32], outputs: usize, width: usize, out: &mut [f32]) {
    for (out, sums) in out.chunks_mut(width).zip(sums.chunks_exact(PANEL)) {
        out[..outputs].copy_from_slice(&sums[..outputs]);
    }
}

fn bf16(
    steady: &Steady<Aocl<u16, f32>>,
    Outputs { of: weights, range, .. }: Outputs<'_>,
    (x, rows): (Inputs<'_>, Range<usize>),
    out: &mut [f32],
    scratch: &mut Scratch,
) {
    let (width, start) = (range.len(), range.start);
    let bytes = block_bytes(steady);
    let sums_bytes = steady.padded(rows.len()) * PANEL * 4;
    let (sums, pad) =
        scratch.panel.get(sums_bytes + steady.largest() * x.layout().block_bytes()).split_at_mut(sums_bytes);
    let sums: &mut [f32] = bytemuck::cast_slice_mut(sums);
    for outputs in panels(range) {
        for block in 0..x.blocks() {
            let weights = &weights.bytes()[(outputs.start / PANEL * x.blocks() + block) * bytes..][..bytes];
            for (at, m) in steady.calls(rows.len()) {
                let a = bytemuck::cast_slice(call_rows(x, block, (&rows, at, m), pad));
                let beta = if block == 0 { 0.0 } else { 1.0 };
                steady.function.multiply((m, BLOCK), (a, BLOCK), weights, [1.0, beta], &mut sums[at * PANEL..]);
            }
        }
        copy_out(&sums[..rows.len() * PANEL], outputs.len(), width, &mut out[outputs.start - start..]);
    }
}

fn f32s(
    steady: &Steady<Sgemm>,
    Outputs { of: weights, range, .. }: Outputs<'_>,
    (x, rows): (Inputs<'_>, Range<usize>),
    out: &mut [f32],
    scratch: &mut Scratch,
) {
    let Some(matrix) = weights.matrix() else { return };
    let (width, start, cols) = (range.len(), range.start, weights.cols());
    let sums_bytes = steady.padded(rows.len()) * PANEL * 4;
    let panel_bytes = PANEL * COLUMNS * 4;
    let all = scratch.panel.get(sums_bytes + panel_bytes + steady.largest() * x.layout().block_bytes());
    let (sums, all) = all.split_at_mut(sums_bytes);
    let (panel, pad) = all.split_at_mut(panel_bytes);
    let (sums, panel): (&mut [f32], &mut [f32]) = (bytemuck::cast_slice_mut(sums), bytemuck::cast_slice_mut(panel));
    for outputs in panels(range) {
        for first in (0..cols).step_by(COLUMNS) {
            let there = COLUMNS.min(cols - first);
            if there < COLUMNS || outputs.len() < PANEL {
                panel.fill(0.0);
            }
            for (row, to) in outputs.clone().zip(panel.chunks_exact_mut(COLUMNS)) {
                matrix.decode_range(row, first, &mut to[..there]);
            }
            for (block, panel) in (first / BLOCK..x.blocks()).zip([&panel[..], &panel[BLOCK..]]) {
                for (at, m) in steady.calls(rows.len()) {
                    let a = bytemuck::cast_slice(call_rows(x, block, (&rows, at, m), pad));
                    let beta = if block == 0 { 0.0 } else { 1.0 };
                    steady.function.multiply((m, BLOCK), a, (panel, COLUMNS), beta, &mut sums[at * PANEL..]);
                }
            }
        }
        copy_out(&sums[..rows.len() * PANEL], outputs.len(), width, &mut out[outputs.start - start..]);
    }
}
