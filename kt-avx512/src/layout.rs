//! How matrices are packed.
//!
//! ```text
//! matrix   panel of outputs 0..16 | panel of outputs 16..32 | …          outputs padded to 64, four panels
//! panel    front: scales of outputs, of 256 columns (FP8, MXFP8: bits of lines), of groups | block 0 | block 1 | …   sections padded to 64 bytes
//! block    scales of groups, of integer codes of 4 or 8 bits and of MXFP8 | lines                           128 columns; k padded to that
//! bundle   line 0 of its panels, one after the other | line 1 of them | …                       of four panels
//! ```
//!
//! Lines that take long to unpack need several panels at once, whose sums do not wait for each other: four streams, if panels lie one after the
//! other. So those of F16, FP8 and MXFP8 take turns in bundles ([`Layout::bundle`]). Where something is in a panel is said as if the panel were
//! alone; [`spread`] makes of it where it is in a bundle.
//!
//! Integer codes of 4 or 8 bits have the scales of their groups at hand: then what a product needs comes in the order of addresses, one panel
//! after another, and a single stream is what memory is read fastest in (`PERFORMANCE.md`). That is, if the groups divide a block and their scales
//! fill lines; where a group is a block, the first of two blocks or of four has the scales of all of them. Else they are in front.
//!
//! | formats | a line | scales of a panel |
//! | --- | --- | --- |
//! | F32 | 16 outputs x 1 k | none |
//! | F16 | 16 outputs of one k, then 16 of the next | none |
//! | BF16 | 16 outputs x 2 k | none |
//! | FP8, MXFP8 | 16 outputs x 4 k, codes | per channel: 16 F32; 128x128: an F32 per 128 k; MXFP8: 16 E8M0 per 32 k |
//! | INT8 | 16 outputs x 4 k, unsigned codes | 16 F32, and for groups a record each: 16 F16, then 16 zero points as I16 |
//! | INT4 | 16 outputs x 8 k, unsigned codes: k 0..4 in the low nibbles, k 4..8 in the high ones | as INT8, zero points as bytes |
//! | MXFP4, NVFP4 | as INT4, E2M1 codes | 16 F32, and per 32 k 16 E8M0, or per 16 k 16 E4M3 |
//!
//! An unpacked line (INT4, MXFP4 and NVFP4 give two of 16 x 4 bytes, FP8 two of 16 x 2 BF16) is an operand of `vpdpbusd` or
//! `vdpbf16ps`, and a row of an AMX B tile. In an FP8 line each 128-bit lane holds 4 outputs x k 0..2, then the same outputs x
//! k 2..4, because interleaving low and high bytes of BF16 numbers works within halves of a lane. E2M1 codes stand for halves, so
//! that twice their values are integers; the F32 scale of an output takes the factor back.
//!
//! With BF16 instructions, an FP8 line becomes operands by shifts, if it has neither zeros nor subnormal codes, which few have. So each block of FP8
//! and MXFP8 has a bit in front of its panel for each of its 32 lines, that is set where there are such codes.
//!
//! NaN codes of FP8 and MXFP8 (0x7f, 0xff) are finite (480) once they are BF16. So packing makes the scale of what
//! they are in NaN: of the output, of the output's 32 columns, or of the 128 columns of the panel. An output whose weights contain a NaN
//! is NaN for every input; with blocks of 128x128, so are the others of its panel.
//!
//! Weights are stored unsigned since `vpdpbusd` wants one unsigned operand; inputs are signed. The zero point is subtracted by
//! starting each sum at minus zero point times the sum of the input codes.
//!
//! Group scales are bandwidth. Those of one byte stay as they are. Others take two bytes whatever the checkpoint has: F16 relative
//! to a power of two per output, which is exact for BF16 and F16 scales (unless one output's scales span more than 2^28), and rounds
//! F32 scales to 11 bits (2.4e-4 at most, a twentieth of what rounding inputs to int8 costs). An output with one scale keeps it as F32.

use std::ops::Range;

use half::f16;
use kt_core::cpu::input::BLOCK;
use kt_core::format::mx;
use kt_core::{Format, Group, Matrix};

/// The version of everything said above, and of how scales are rounded. Packed weights are kept on disk with it: raise it with any
/// change of the bytes, and write the checksums that `tests/products.rs` then prints into it.
pub(crate) const VERSION: u32 = 7;

/// Outputs of a panel.
pub const PANEL: usize = 16;
/// Bytes of a line.
pub const LINE: usize = 64;
/// Columns that share a record above those of groups, in formats that have two levels of scales.
pub const SUPER: usize = 256;
/// Columns per scale of the inputs that most grouped weights are multiplied with; their groups are multiples of it.
pub(crate) const CHUNK: usize = 32;

/// Where things are in a packed matrix, and in each of its panels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Blocks of 128 columns.
    pub blocks: usize,
    /// Bytes of the lines of a block.
    pub lines: usize,
    /// Where the scales of outputs begin in a panel.
    pub outputs_at: usize,
    /// Where the scales of the first group begin in a panel: in the first block, or in front, after all others.
    pub groups_at: usize,
    /// Columns that share a scale (and a zero point), for formats with scales of groups or blocks.
    pub group: Option<usize>,
    /// Bytes of the scales of one group of all outputs of a panel.
    pub record: usize,
    /// Where the records of [`SUPER`] columns begin in a panel, if there are any.
    pub supers_at: usize,
    /// Bytes of such a record.
    pub super_record: usize,
    /// Where the first block begins in a panel.
    pub blocks_at: usize,
    /// Blocks, one, two or four, the first of which has the scales of all their groups before its lines; if these are not in front.
    pub unit: usize,
    /// Bytes of these scales, whole lines; or 0.
    pub head: usize,
    /// Bytes of a panel.
    pub panel_bytes: usize,
    /// How many panels take turns with their lines: 1, none; a divisor of [`MOST_PANELS`].
    pub bundle: usize,
}

/// Panels of a bundle of floating-point weights.
pub(crate) const BUNDLE: usize = 4;

/// Panels of the widest tile. Packed matrices are padded to a multiple of it, so that tiles of fewer panels for what is left need not be compiled.
pub const MOST_PANELS: usize = 4;

/// Panels of a packed matrix of so many outputs.
pub fn panels(rows: usize) -> usize {
    rows.div_ceil(PANEL).next_multiple_of(MOST_PANELS)
}

/// Where byte `at` of a panel is, counted from the panel's first line, if its lines are `step` bytes apart.
#[inline(always)]
pub fn spread(at: usize, step: usize) -> usize {
    at / LINE * step + at % LINE
}

/// What a [`Layout`] is made of.
#[derive(Debug, Clone, Copy)]
pub struct Parts {
    /// Bytes of the lines of a block of 128 columns.
    pub lines: usize,
    /// Bytes of the scales of outputs.
    pub outputs: usize,
    /// Columns of a group, and bytes of its scales.
    pub groups: Option<(usize, usize)>,
    /// Bytes of a record of [`SUPER`] columns.
    pub super_record: usize,
    /// Whether scales of groups are to be among the blocks, if they fill lines there.
    pub among: bool,
    /// See [`Layout::bundle`].
    pub bundle: usize,
}

impl Layout {
    /// The layout of a matrix of so many columns that has these parts.
    pub fn of(cols: usize, parts: Parts) -> Self {
        let Parts { lines, outputs, groups, super_record, among, bundle } = parts;
        let blocks = cols.div_ceil(BLOCK);
        let padded = blocks * BLOCK;
        let supers_at = outputs.next_multiple_of(LINE);
        let groups_at = supers_at + (padded.div_ceil(SUPER) * super_record).next_multiple_of(LINE);
        let (group, record) = (groups.map(|g| g.0), groups.map_or(0, |g| g.1));
        let of_block = group.filter(|&g| among && g > 0 && BLOCK.is_multiple_of(g)).map_or(0, |g| BLOCK / g * record);
        let (unit, head) = unit_of(of_block, group == Some(BLOCK));
        let in_front = match group {
            Some(g) if head == 0 && padded > 0 => padded.div_ceil(g) * record,
            _ => 0,
        };
        let blocks_at = if blocks > 0 { groups_at + in_front.next_multiple_of(LINE) } else { 0 };
        let mut layout = Layout {
            blocks,
            lines,
            outputs_at: 0,
            groups_at,
            group,
            record,
            supers_at,
            super_record,
            blocks_at,
            unit,
            head,
            panel_bytes: 0,
            bundle,
        };
        layout.panel_bytes = layout.end_at(blocks);
        layout
    }

    /// The layout of a matrix of an accepted format.
    pub fn new(format: Format, cols: usize) -> Self {
        let padded = cols.next_multiple_of(BLOCK);
        let each = PANEL * 4;
        let of = |g: Group, record: usize| match g {
            Group::Row => (each, None),
            Group::Of(g) => (each, Some((g as usize, record * PANEL))),
        };
        let asymmetric = |g: Group, record: usize| (each, Some((g.cols(padded), record * PANEL)));
        let (bits, (outputs, groups)) = match format {
            Format::F32 => (32, (0, None)),
            Format::F16 | Format::Bf16 => (16, (0, None)),
            Format::Fp8Channel => (8, (each, None)),
            Format::Fp8Block => (8, (0, Some((BLOCK, 4)))),
            Format::Mxfp8 => (8, (0, Some((mx::COLS, PANEL)))),
            Format::Int4(g) => (4, of(g, 2)),
            Format::Int4Asym(g) => (4, asymmetric(g, 3)),
            Format::Int8Asym(g) => (8, asymmetric(g, 4)),
            Format::Mxfp4 => (4, (each, Some((mx::COLS, PANEL)))),
            Format::Nvfp4 => (4, (each, Some((mx::NV_COLS, PANEL)))),
            Format::Int8(g) | Format::Int8Offset(g) => (8, of(g, 2)),
            _ => (8, (each, None)),
        };
        let among = format != Format::Fp8Block;
        let super_record = if is_fp8(format) { SUPER / BLOCK * BITS } else { 0 };
        let bundle = if is_fp8(format) || format == Format::F16 { BUNDLE } else { 1 };
        Layout::of(cols, Parts { lines: PANEL * BLOCK * bits / 8, outputs, groups, super_record, among, bundle })
    }

    /// Where panel `panel` begins in a matrix.
    pub fn panel_at(&self, panel: usize) -> usize {
        // A power of two: this is asked for with every panel.
        let place = panel & (self.bundle - 1);
        (panel - place) * self.panel_bytes + place * LINE
    }

    /// Bytes from a line of a panel to the next one.
    pub fn step(&self) -> usize {
        self.bundle * LINE
    }

    /// Bytes from a panel to the next one of its bundle, or of the matrix.
    pub fn stride(&self) -> usize {
        if self.bundle > 1 { LINE } else { self.panel_bytes }
    }

    /// Bytes between the scales of a unit's groups and those of the next one's.
    pub(crate) fn record_skip(&self) -> usize {
        if self.head > 0 { self.unit * self.lines } else { 0 }
    }

    /// Where the scales of group `i` begin in a panel.
    pub fn record_at(&self, i: usize) -> usize {
        let units = self.group.map_or(0, |group| self.units(i * group / BLOCK));
        self.groups_at + i * self.record + units * self.record_skip()
    }

    /// Where the scales of the group begin that column `BLOCK * block` is of.
    pub(crate) fn first_record(&self, block: usize) -> usize {
        self.group.map_or(self.groups_at, |group| self.record_at(block * BLOCK / group))
    }

    /// Where the lines of a block begin in a panel.
    pub fn lines_at(&self, block: usize) -> usize {
        self.blocks_at + (self.units(block) + 1) * self.head + block * self.lines
    }

    /// Units that so many blocks fill: a shift, as this is asked for with every block that is unpacked.
    fn units(&self, blocks: usize) -> usize {
        blocks >> self.unit.trailing_zeros()
    }

    /// Where so many blocks end.
    fn end_at(&self, blocks: usize) -> usize {
        self.blocks_at + self.units(blocks + self.unit - 1) * self.head + blocks * self.lines
    }

    /// Where the bytes of some blocks are in a panel, with all that is in front if the first one is among them.
    pub(crate) fn bytes_of(&self, blocks: Range<usize>) -> Range<usize> {
        let at = |block: usize| if block > 0 { self.end_at(block) } else { 0 };
        at(blocks.start)..at(blocks.end)
    }
}

/// How many blocks of a unit there are, one, two or four, and bytes of the scales of all their groups, if those of a block are `of_block` bytes:
/// whole lines, or none, where they are in front. Only where groups are `whole` blocks is a unit more than one.
pub(crate) const fn unit_of(of_block: usize, whole: bool) -> (usize, usize) {
    let mut unit = 1;
    while whole && unit < 4 && !(unit * of_block).is_multiple_of(LINE) {
        unit *= 2;
    }
    if (unit * of_block).is_multiple_of(LINE) { (unit, unit * of_block) } else { (1, 0) }
}

/// Packs rows `rows` of `matrix` into `out`, which is zeroed.
pub(crate) fn pack(matrix: &Matrix, rows: Range<usize>, out: &mut [u8]) {
    let format = matrix.format();
    let layout = Layout::new(format, matrix.cols());
    if layout.panel_bytes == 0 {
        return;
    }
    let step = layout.step();
    for (panel, first) in rows.clone().step_by(PANEL).enumerate() {
        let outputs = PANEL.min(rows.end - first);
        let row_bytes = layout.lines / PANEL;
        let out = &mut out[layout.panel_at(panel)..];
        // By blocks, whose lines stay in the cache until all outputs have written to them.
        for block in 0..layout.blocks {
            let mut small = 0;
            for o in 0..outputs {
                let codes = matrix.row(first + o);
                let codes = &codes[block * row_bytes..codes.len().min((block + 1) * row_bytes)];
                let lines = out[spread(layout.lines_at(block), step)..].chunks_mut(step);
                match format {
                    Format::Int8(_) => each_dword(codes, lines, o * 4, |v| (v ^ 0x8080_8080).to_le_bytes()),
                    Format::Int4(_) | Format::Int4Asym(_) | Format::Mxfp4 | Format::Nvfp4 => {
                        each_dword(codes, lines, o * 4, split_nibbles)
                    }
                    Format::Fp8Block | Format::Fp8Channel | Format::Mxfp8 => {
                        let at = o / 4 * 16 + o % 4 * 2;
                        each_dword(codes, lines, [at, at + 8], u32::to_le_bytes);
                        small |= small_lines(codes);
                    }
                    Format::F16 => each_dword(codes, lines, [o * 2, o * 2 + LINE / 2], u32::to_le_bytes),
                    _ => each_dword(codes, lines, o * 4, u32::to_le_bytes),
                }
            }
            if is_fp8(format) {
                out[spread(layout.supers_at + block * BITS, step)..][..BITS].copy_from_slice(&small.to_le_bytes());
            }
        }
        pack_scales(matrix, layout, (first, outputs), out, step);
    }
}

/// Bytes of the bits of a block's lines, one after another in what a panel has for [`SUPER`] columns: see above.
pub(crate) const BITS: usize = 4;

/// Whether codes are E4M3, and lines have bits.
fn is_fp8(format: Format) -> bool {
    matches!(format, Format::Fp8Block | Format::Fp8Channel | Format::Mxfp8)
}

/// The bits of a block's lines, as far as they are those of an output's codes: whether one of four is zero or subnormal, that is, below 8.
fn small_lines(codes: &[u8]) -> u32 {
    let (whole, rest) = codes.as_chunks::<4>();
    let mut last = [8; 4];
    last[..rest.len()].copy_from_slice(rest);
    // Bit 7 of each byte, if there is no such code: no sum of bytes exceeds one.
    let small = |four| ((u32::from_le_bytes(four) & 0x7878_7878) + 0x7878_7878) & 0x8080_8080 != 0x8080_8080;
    whole.iter().chain([&last]).enumerate().fold(0, |bits, (i, &four)| bits | u64::from(small(four)) << i) as u32
}

/// Where in a line four bytes go: together, or two and two.
trait Place: Copy {
    fn put(self, line: &mut [u8], v: [u8; 4]);
}

impl Place for usize {
    fn put(self, line: &mut [u8], v: [u8; 4]) {
        line[self..self + 4].copy_from_slice(&v);
    }
}

impl Place for [usize; 2] {
    fn put(self, line: &mut [u8], v: [u8; 4]) {
        line[self[0]..self[0] + 2].copy_from_slice(&v[..2]);
        line[self[1]..self[1] + 2].copy_from_slice(&v[2..]);
    }
}

/// Writes the dwords of a row, transformed, to the same place of lines that begin what follows each other.
fn each_dword<'a>(row: &[u8], lines: impl Iterator<Item = &'a mut [u8]>, at: impl Place, f: impl Fn(u32) -> [u8; 4]) {
    for (v, line) in dwords(row).zip(lines) {
        at.put(line, f(v));
    }
}

/// A row's bytes four at a time, the last ones padded with zeros.
fn dwords(row: &[u8]) -> impl Iterator<Item = u32> + '_ {
    let (whole, rest) = row.as_chunks::<4>();
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    let tail = (!rest.is_empty()).then_some(u32::from_le_bytes(last));
    whole.iter().map(|b| u32::from_le_bytes(*b)).chain(tail)
}

/// Nibbles k = 0..8 of a dword, lowest first, to bytes with k in the low and k + 4 in the high nibble.
fn split_nibbles(v: u32) -> [u8; 4] {
    let spread = |v: u32| {
        let v = (v | v << 8) & 0x00ff_00ff;
        (v | v << 4) & 0x0f0f_0f0f
    };
    (spread(v & 0xffff) | spread(v >> 16) << 4).to_le_bytes()
}

/// Writes the scales of a panel, whose lines are `step` bytes apart.
fn pack_scales(matrix: &Matrix, layout: Layout, (first, outputs): (usize, usize), out: &mut [u8], step: usize) {
    let Some(scales) = matrix.scales() else { return };
    let mut put = |at: usize, v: f32| out[spread(at, step)..][..4].copy_from_slice(&v.to_le_bytes());
    let format = matrix.format();
    // Whether there are NaN codes among columns `group` of some that share a scale.
    let nan = |o: usize, group: usize, of: usize| {
        let codes = matrix.row(first + o);
        has_nan(&codes[(group * of).min(codes.len())..((group + 1) * of).min(codes.len())])
    };
    let base: Vec<f32> = match format {
        Format::Fp8Block => {
            // 16 divides 128: all outputs of a panel are in one row of tiles.
            for tile in 0..scales.cols() {
                let poisoned = (0..outputs).any(|o| nan(o, tile, BLOCK));
                let scale = scales.get(first / kt_core::format::fp8::TILE, tile);
                put(layout.groups_at + tile * 4, if poisoned { f32::NAN } else { scale });
            }
            return;
        }
        Format::Fp8Channel => (0..outputs)
            .map(|o| if nan(o, 0, matrix.cols()) { f32::NAN } else { base_scale(scales, first + o) })
            .collect(),
        Format::Mxfp8 => Vec::new(),
        // Codes are twice the values.
        Format::Mxfp4 => vec![0.5; outputs],
        // And the scales are read as 2^-8 of theirs.
        Format::Nvfp4 => vec![128.0 * scales.factor(); outputs],
        _ => (0..outputs).map(|o| base_scale(scales, first + o)).collect(),
    };
    for (o, &base) in base.iter().enumerate() {
        put(layout.outputs_at + o * 4, base);
    }
    let groups = if layout.record > 0 { scales.cols() } else { 0 };
    for g in 0..groups {
        let out = &mut out[spread(layout.record_at(g), step)..][..layout.record];
        for o in 0..outputs {
            match format {
                Format::Mxfp8 if nan(o, g, mx::COLS) => out[o] = 255,
                Format::Mxfp4 | Format::Mxfp8 | Format::Nvfp4 => out[o] = scales.byte(first + o, g),
                _ => {
                    let relative = if scales.cols() == 1 { 1.0 } else { scales.get(first + o, g) / base[o] };
                    out[o * 2..][..2].copy_from_slice(&f16::from_f32(relative).to_le_bytes());
                }
            }
            let zero = matrix.zero_point(first + o, g);
            match format {
                Format::Int4Asym(_) => out[PANEL * 2 + o] = zero as u8,
                Format::Int8Asym(_) => {
                    out[PANEL * 2 + o * 2..][..2].copy_from_slice(&(zero as i16).to_le_bytes());
                }
                _ => {}
            }
        }
    }
}

/// Whether there is a NaN among E4M3 codes.
fn has_nan(codes: &[u8]) -> bool {
    // No early exit, so that it vectorizes.
    codes.iter().fold(false, |nan, &c| nan | (c & 0x7f == 0x7f))
}

/// What an output's group scales are relative to: its only scale, or a power of two that brings the largest to 2^14..2^15.
fn base_scale(scales: &kt_core::format::Scales, row: usize) -> f32 {
    if scales.cols() == 1 {
        return scales.get(row, 0);
    }
    let largest = (0..scales.cols()).map(|g| scales.get(row, g).abs()).fold(0f32, f32::max);
    let exponent = (largest.to_bits() >> 23) as i32 - 127;
    // The base must be a normal number; scales below 2^-112 lose bits of no consequence.
    if largest == 0.0 || !largest.is_finite() { 1.0 } else { 2f32.powi((exponent - 14).max(-126)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nibbles_are_split_by_fours() {
        assert_eq!(split_nibbles(0x7654_3210), [0x40, 0x51, 0x62, 0x73]);
    }

    #[test]
    fn bytes_of_all_blocks_are_the_panel() {
        // Records of 256 columns as well, which no format of this crate has.
        let parts =
            Parts { lines: 1024, outputs: 4, groups: Some((64, 32)), super_record: 32, among: false, bundle: 1 };
        let others = [
            (Format::Bf16, 100),
            (Format::Int4(Group::Of(32)), 704),
            (Format::Fp8Block, 2048),
            (Format::Mxfp8, 2880),
            (Format::Int4(Group::Of(128)), 704),
            (Format::Int4Asym(Group::Of(128)), 2880),
            (Format::Int8(Group::Of(32)), 2880),
            (Format::Int8(Group::Of(128)), 700),
        ];
        for layout in
            others.map(|(format, cols)| Layout::new(format, cols)).into_iter().chain([Layout::of(1100, parts)])
        {
            let whole = layout.bytes_of(0..layout.blocks);
            assert_eq!(whole, 0..layout.panel_bytes, "{layout:?}");
            for cut in 0..=layout.blocks {
                let (before, after) = (layout.bytes_of(0..cut), layout.bytes_of(cut..layout.blocks));
                assert_eq!(before.start..after.end, whole);
                assert_eq!(before.end, after.start);
                // Blocks end where products look for their lines.
                if cut > 0 {
                    assert_eq!(layout.lines_at(cut - 1) + layout.lines, before.end);
                }
            }
        }
    }

    #[test]
    fn scales_of_small_groups_are_among_the_blocks() {
        let layout = Layout::new(Format::Int4(Group::Of(32)), 300);
        assert_eq!((layout.blocks_at, layout.unit, layout.head), (64, 1, 4 * 32));
        assert_eq!([0, 3, 4, 9].map(|g| layout.record_at(g)), [64, 64 + 96, 64 + 1152, 64 + 2 * 1152 + 32]);
        assert_eq!(layout.first_record(2), layout.record_at(8));
        // Half a line a block, and three quarters.
        let layout = Layout::new(Format::Int4(Group::Of(128)), 300);
        assert_eq!((layout.blocks_at, layout.unit, layout.head), (64, 2, 64));
        assert_eq!([0, 1, 2].map(|g| layout.record_at(g)), [64, 64 + 32, 64 + 64 + 2048]);
        assert_eq!([0, 1, 2].map(|b| layout.lines_at(b)), [128, 128 + 1024, 128 + 2048 + 64]);
        assert_eq!(layout.panel_bytes, 64 + 3 * 1024 + 2 * 64);
        let layout = Layout::new(Format::Int4Asym(Group::Of(128)), 5 * 128);
        assert_eq!((layout.unit, layout.head, layout.panel_bytes), (4, 192, 64 + 5 * 1024 + 2 * 192));
        assert_eq!([3, 4].map(|g| layout.record_at(g)), [64 + 144, 64 + 192 + 4096]);
        // Codes of 8 bits.
        let layout = Layout::new(Format::Int8(Group::Of(32)), 300);
        assert_eq!((layout.unit, layout.head, layout.panel_bytes), (1, 128, 64 + 3 * (128 + 2048)));
        let layout = Layout::new(Format::Int8(Group::Of(128)), 300);
        assert_eq!((layout.unit, layout.head, layout.panel_bytes), (2, 64, 64 + 3 * 2048 + 2 * 64));
        // Groups that no block divides, and such of several blocks.
        for (group, front) in [(96, 64 + 4 * 32), (256, 64 + 2 * 32)] {
            let layout = Layout::new(Format::Int4(Group::Of(group)), 300);
            assert_eq!((layout.blocks_at, layout.head), (front, 0));
            assert_eq!((layout.record_skip(), layout.record_at(2)), (0, 64 + 64));
        }
    }

    #[test]
    fn lines_with_zeros_or_subnormal_codes_have_bits() {
        // Codes from 8 on are normal numbers, and so are those with a sign.
        let mut codes = [0x88; 128];
        (codes[7], codes[64], codes[127]) = (0x07, 0x80, 0x87);
        assert_eq!(small_lines(&codes), 1 << 1 | 1 << 16 | 1 << 31);
        assert_eq!([&[0x08, 0x7e, 0xf0][..], &[0x08, 0x08, 0x08, 0x08, 0x00], &[]].map(small_lines), [0, 2, 0]);
    }

    #[test]
    fn sizes_are_what_the_formats_need() {
        let bytes = |f, cols| Layout::new(f, cols).panel_bytes;
        assert_eq!(bytes(Format::Bf16, 128), 16 * 128 * 2);
        assert_eq!(bytes(Format::Int4(Group::Of(32)), 2048), 16 * 1024 + 64 + 64 * 32);
        assert_eq!(bytes(Format::Int8(Group::Row), 129), 16 * 256 + 64);
        // With bits of lines, and scales of blocks.
        assert_eq!(bytes(Format::Fp8Block, 2048), 16 * 2048 + 2 * 64);
        assert_eq!(bytes(Format::Fp8Channel, 704), 16 * 768 + 2 * 64);
        assert_eq!(bytes(Format::Mxfp8, 704), 16 * 768 + 64 + 6 * 64);
    }
}
