//! How GGUF blocks are repacked.
//!
//! ```text
//! matrix   panel of outputs 0..16 | panel of outputs 16..32 | …                      outputs padded to 64, four panels
//! panel    super records | group records, where they are not in blocks | block 0 | block 1 | …   each part padded to 64 bytes
//! block    group records, unless a group is longer | group 0 | group 1 | …                       columns padded to 128
//! group    steps of 8 columns                                                                    what the second table has as a group
//! bundle   line 0 of panel 0, line 0 of panel 1, line 1 of panel 0, …                            of two panels
//!
//! operand  64 bytes: the code of column k + i (i in 0..4) of output o is byte 4 * o + i
//! step     operand A (columns 0..4) and operand B (columns 4..8)
//! ```
//!
//! Codes of two, five and six bits lie in bundles: unpacking them takes so long that two panels are done at once, and so they are one stream from memory
//! (`kt-avx512/src/layout.rs`).
//!
//! Codes are unsigned, as the readers of `kt_core::format::ggml` give them; those of Q8_0 are 128 more than their values. They take so many bytes a step:
//!
//! | bits | bytes a step | where they are |
//! | --- | --- | --- |
//! | 8 | 128 | A, then B |
//! | 6 | 96 | three lines have operands 0, 1 and 2 of four in their low 6 bits, and above these bits 0 and 1, 2 and 3, 4 and 5 of operand 3 |
//! | 5 | 80 | five lines have operands 0 to 4 of eight in their low 5 bits; bits 5 to 7 of lines 0, 2 and 4 are bits 0 to 2 of operands 5, 6 and 7, bits 5 and 6 of lines 1 and 3 bits 3 and 4 of operands 5 and 7, bit 7 of these lines bits 3 and 4 of operand 6 |
//! | 4 | 64 | byte `j` is `A[j] \| B[j] << 4` |
//! | 3 | 48 | of each four operands 64 bytes have operands 0 and 1, three bits each, and above them bits 0 and 1 of operand 3; then 32 bytes have nibbles, those of its first half low and of its second high: operand 2, and above it bit 2 of operand 3 |
//! | 2 | 32 | byte `j` is `A[j] \| A[32 + j] << 2 \| B[j] << 4 \| B[32 + j] << 6` |
//!
//! | types | bits | a group, and its record | record of 256 columns |
//! | --- | --- | --- | --- |
//! | Q8_0 | 8 | 32 columns: 16 F16 `d` | none |
//! | Q4_0, IQ4_NL | 4 | as Q8_0 | none |
//! | Q5_0 | 5 | as Q8_0 | none |
//! | Q4_1 | 4 | 32 columns: 16 F16 `d`, 16 F16 `m` | none |
//! | Q5_1 | 5 | as Q4_1 | none |
//! | MXFP4 | 4 | 32 columns: 16 exponent bytes | none |
//! | TQ1_0, TQ2_0 | 2 | 256 columns: 16 F16 `d` | none |
//! | Q2_K | 2 | 16 columns: 16 bytes, scale low and minimum high | 16 F16 `d`, 16 F16 `dmin` |
//! | Q3_K | 3 | 16 columns: 16 I8 scales | 16 F16 `d` |
//! | Q4_K | 4 | 32 columns: a U8 scale and a U8 minimum, 16 times | 16 F16, 16 times 16 bits: a `Ratio` (`lines.rs`) |
//! | Q5_K | 5 | 32 columns: 16 U8 scales, 16 U8 minima | as Q2_K |
//! | Q6_K | 6 | as Q3_K | as Q3_K |
//! | IQ4_XS, IQ3_XXS, IQ3_S | 4 | 32 columns: 16 I8 scales | as Q3_K |
//! | IQ2_XXS | 3 | as IQ4_XS | as Q3_K |
//! | IQ2_XS, IQ2_S, IQ1_M | 3 | as Q3_K | as Q3_K |
//! | IQ1_S | 2 | 32 columns: 16 bytes, scale and, in bit 7, whether codes are one less | as Q3_K |
//!
//! Codes of IQ1, IQ2 and IQ3 are places among the few values that coordinates of their points have, with signs, and of IQ1_M with one more or less
//! (`lines.rs`): the points themselves take fewer bytes, and more instructions than the bytes saved are worth (`PERFORMANCE.md`). Memory may be worth them, so a kernel
//! may leave these types in the file too (`blocks.rs`).
//!
//! An unpacked operand is one of `vpdpbusd`. Records lie in the order of their columns, and F16 numbers keep their bits, so that nothing
//! is rounded. What pads outputs and columns is zero in every part, which adds nothing to a product: scales and minima are
//! zero, or (MXFP4) the value of code zero is.

use std::ops::Range;

pub(crate) use kt_avx512::engine::PANEL;
use kt_avx512::engine::{LINE, Layout, Parts};
use kt_core::cpu::input::BLOCK;
use kt_core::format::ggml;
use kt_core::{Format, Matrix};

use crate::lines::{
    IQ1_FLIP, IQ1_S_LESS, IQ1_S_VALUES, IQ1_VALUES, IQ2_FLIP, IQ2_VALUES, IQ3_FLIP, IQ3_S_VALUES, IQ3_XXS_VALUES, Ratio,
};

/// The version of everything said above. Packed weights are kept on disk with it: raise it with any change of the bytes, and
/// write the checksums that `tests/products.rs` then prints into it.
pub(crate) const VERSION: u32 = 10;

/// Columns that are packed at a time: a block of the K types, two of a panel.
const TILE: usize = ggml::K_COLS;
/// Bytes of an F16 number of each output.
const HALVES: usize = PANEL * 2;
/// Bytes of the records of a tile's groups, at most: 8 of two F16 numbers.
const MOST_RECORDS: usize = 8 * HALVES * 2;

/// The layout of a matrix of a type that is repacked.
///
/// # Panics
/// When it is of another type: a caller's error.
pub(crate) fn packed_layout(format: Format, cols: usize) -> Layout {
    let Shape { bits, bundle, group, record, super_record } = shape(format);
    Layout::of(
        cols,
        Parts {
            lines: bits * BLOCK * PANEL / 8,
            outputs: 0,
            groups: Some((group, record)),
            super_record,
            among: true,
            bundle,
        },
    )
}

/// What a type is made of: the table above.
struct Shape {
    /// Bits of a code.
    bits: usize,
    /// How many panels take turns with their lines.
    bundle: usize,
    /// Columns of a group.
    group: usize,
    /// Bytes of its record, of a panel.
    record: usize,
    /// Bytes of the record of 256 columns.
    super_record: usize,
}

fn shape(format: Format) -> Shape {
    let (bits, group, record, super_record) = match format {
        Format::Q8_0 => (8, 32, HALVES, 0),
        Format::Q4_0 | Format::Iq4Nl => (4, 32, HALVES, 0),
        Format::Q5_0 => (5, 32, HALVES, 0),
        Format::Q4_1 => (4, 32, HALVES * 2, 0),
        Format::Q5_1 => (5, 32, HALVES * 2, 0),
        Format::Mxfp4Ggml => (4, 32, PANEL, 0),
        Format::Tq1_0 | Format::Tq2_0 => (2, 256, HALVES, 0),
        Format::Q2K => (2, 16, PANEL, HALVES * 2),
        Format::Q3K => (3, 16, PANEL, HALVES),
        Format::Q4K => (4, 32, PANEL * 2, HALVES * 2),
        Format::Q5K => (5, 32, PANEL * 2, HALVES * 2),
        Format::Q6K => (6, 16, PANEL, HALVES),
        Format::Iq4Xs | Format::Iq3Xxs | Format::Iq3S => (4, 32, PANEL, HALVES),
        Format::Iq1S => (2, 32, PANEL, HALVES),
        Format::Iq2Xxs => (3, 32, PANEL, HALVES),
        Format::Iq2Xs | Format::Iq2S | Format::Iq1M => (3, 16, PANEL, HALVES),
        other => panic!("{other} is not repacked"),
    };
    let bundle = if matches!(bits, 2 | 5 | 6) { 2 } else { 1 };
    Shape { bits, bundle, group, record, super_record }
}

/// The weights that a matrix has once it is packed: those of Q4_K with minima in units of their scales, which moves them by less than 0.1 % in blocks like
/// those of real files, all others as they are.
pub fn as_packed(matrix: &Matrix) -> Vec<f32> {
    if matrix.format() != Format::Q4K {
        return matrix.decode();
    }
    let blocks = (0..matrix.rows()).flat_map(|row| matrix.row(row).as_chunks::<{ ggml::Q4K_BYTES }>().0);
    blocks.flat_map(q4_k_as_packed).collect()
}

fn q4_k_as_packed(block: &[u8; ggml::Q4K_BYTES]) -> [f32; ggml::K_COLS] {
    let [d, dmin, scales @ ..] = block.as_chunks::<2>().0 else { unreachable!("a block has more") };
    let ratio = Ratio::of(u16::from_le_bytes(*d), u16::from_le_bytes(*dmin));
    let (scales, mins) = ggml::q4k_scales(scales.as_flattened().first_chunk().expect("12 bytes of 140"));
    let codes = ggml::q4k_codes(block);
    std::array::from_fn(|k| {
        let [scale, min, code] = [scales[k / 32], mins[k / 32], codes[k]].map(i32::from);
        ratio.weight(scale, min, code)
    })
}

/// Packs rows `rows` of `matrix` into `out`, which is zeroed and has all [`panels`](kt_avx512::engine::panels).
pub(crate) fn pack(matrix: &Matrix, rows: Range<usize>, out: &mut [u8]) {
    let layout = packed_layout(matrix.format(), matrix.cols());
    if layout.panel_bytes == 0 {
        return;
    }
    let mut alone = vec![0; if layout.bundle > 1 { layout.panel_bytes } else { 0 }];
    for (panel, first) in rows.clone().step_by(PANEL).enumerate() {
        let rows = first..rows.end.min(first + PANEL);
        let at = layout.panel_at(panel);
        if layout.bundle == 1 {
            pack_panel(matrix, &layout, rows, &mut out[at..][..layout.panel_bytes]);
            continue;
        }
        alone.fill(0);
        pack_panel(matrix, &layout, rows, &mut alone);
        for (line, out) in alone.chunks_exact(LINE).zip(out[at..].chunks_mut(layout.step())) {
            out[..LINE].copy_from_slice(line);
        }
    }
}

/// Packs a panel, which has these rows of `matrix`, as if it were alone, into `out`, which is zeroed.
fn pack_panel(matrix: &Matrix, layout: &Layout, rows: Range<usize>, out: &mut [u8]) {
    let (format, first, outputs) = (matrix.format(), rows.start, rows.len());
    let (cols, bytes) = ggml::block(format).expect("types that are repacked have blocks");
    let Shape { bits, group, .. } = shape(format);
    let (records, tile_bytes) = (cols / group * layout.record, TILE / cols * bytes);
    // Those of absent outputs stay zero.
    let mut operands = [[0; PANEL]; TILE / 4];
    let mut groups = [0; MOST_RECORDS];
    for tile in 0..(layout.blocks * BLOCK).div_ceil(TILE) {
        groups.fill(0);
        for o in 0..outputs {
            let row = matrix.row(first + o);
            let blocks = &row[tile * tile_bytes..row.len().min((tile + 1) * tile_bytes)];
            for (operand, codes) in operands.iter_mut().zip(codes(format, blocks).as_chunks::<4>().0) {
                operand[o] = u32::from_le_bytes(*codes);
            }
            for (b, block) in blocks.chunks_exact(bytes).enumerate() {
                let groups = &mut groups[b * records..][..records];
                let super_record = &mut out[layout.supers_at + tile * layout.super_record..];
                put_scales(format, block, o, groups, &mut super_record[..layout.super_record]);
            }
        }
        let blocks = tile * (TILE / BLOCK)..layout.blocks;
        for (block, operands) in blocks.zip(operands.as_chunks::<{ BLOCK / 4 }>().0) {
            let at = layout.lines_at(block);
            // Groups of several blocks go on as if there were no groups.
            let columns = group.min(BLOCK);
            for (g, operands) in operands.chunks_exact(columns / 4).enumerate() {
                let bytes = bits * PANEL * columns / 8;
                let out = &mut out[at + g * bytes..][..bytes];
                match bits {
                    8 => put_bytes(operands, out),
                    6 => put_sixes(operands, out),
                    5 => put_fives(operands, out),
                    4 => put_nibbles(operands, out),
                    3 => put_threes(operands, out),
                    _ => put_pairs(operands, out),
                }
            }
        }
        for (g, record) in groups[..TILE / group * layout.record].chunks_exact(layout.record).enumerate() {
            let g = tile * (TILE / group) + g;
            if g * group < layout.blocks * BLOCK {
                out[layout.record_at(g)..][..layout.record].copy_from_slice(record);
            }
        }
    }
}

/// The codes of a block of 256 columns, or of up to 8 blocks of 32; zeros where there are fewer.
fn codes(format: Format, blocks: &[u8]) -> [u8; TILE] {
    match format {
        Format::Q8_0 => by_blocks(blocks, |b: &[u8; ggml::Q8_0_BYTES]| std::array::from_fn(|j| b[2 + j] ^ 0x80)),
        Format::Q4_0 => by_blocks(blocks, ggml::q4_0_codes),
        Format::Q4_1 => by_blocks(blocks, |b: &[u8; ggml::Q4_1_BYTES]| ggml::nibbles(tail(b))),
        Format::Q5_0 => by_blocks(blocks, |b: &[u8; ggml::Q5_0_BYTES]| ggml::five_bit_codes(tail(b))),
        Format::Q5_1 => by_blocks(blocks, |b: &[u8; ggml::Q5_1_BYTES]| ggml::five_bit_codes(tail(b))),
        Format::Iq4Nl => by_blocks(blocks, |b: &[u8; ggml::IQ4_NL_BYTES]| ggml::nibbles(tail(b))),
        Format::Mxfp4Ggml => by_blocks(blocks, |b: &[u8; ggml::MXFP4_BYTES]| ggml::nibbles(tail(b))),
        Format::Q2K => ggml::bit_pairs(part(blocks, 16)),
        Format::Q3K => ggml::q3k_codes(part(blocks, 0)),
        Format::Q4K => ggml::q4k_codes(part(blocks, 0)),
        Format::Q5K => ggml::q5k_codes(part(blocks, 0)),
        Format::Q6K => ggml::q6k_codes(part(blocks, 0)),
        Format::Iq4Xs => ggml::iq4_xs_codes(part(blocks, 0)),
        Format::Tq1_0 => ggml::tq1_0_codes(part(blocks, 0)),
        Format::Tq2_0 => ggml::bit_pairs(part(blocks, 0)),
        Format::Iq1S => of_points(&ggml::iq1_s_points(part(blocks, 0)), &IQ1_S_CODES, 0),
        Format::Iq1M => of_points(&ggml::iq1_m_points(part(blocks, 0)), &IQ1_CODES, IQ1_FLIP),
        Format::Iq2Xxs => of_points(&ggml::iq2_xxs_points(part(blocks, 0)), &IQ2_XXS_CODES, IQ2_FLIP),
        Format::Iq2Xs => of_points(&ggml::iq2_xs_points(part(blocks, 0)), &IQ2_XS_CODES, IQ2_FLIP),
        Format::Iq2S => of_points(&ggml::iq2_s_points(part(blocks, 0)), &IQ2_S_CODES, IQ2_FLIP),
        Format::Iq3Xxs => of_points(&ggml::iq3_xxs_points(part(blocks, 0)), &IQ3_XXS_CODES, IQ3_FLIP),
        Format::Iq3S => of_points(&ggml::iq3_s_points(part(blocks, 0)), &IQ3_S_CODES, IQ3_FLIP),
        _ => [0; TILE],
    }
}

/// The codes of a grid's points: where `times * coordinate + plus` is among `values`.
const fn coded<const COLS: usize, const N: usize>(
    grid: &[[i8; COLS]; N],
    (times, plus): (i8, i8),
    values: &[i8],
) -> [[u8; COLS]; N] {
    let mut codes = [[0; COLS]; N];
    let mut i = 0;
    while i < N * COLS {
        let value = times * grid[i / COLS][i % COLS] + plus;
        let mut code = 0;
        while values[code] != value {
            code += 1;
        }
        codes[i / COLS][i % COLS] = code as u8;
        i += 1;
    }
    codes
}

static IQ1_S_CODES: [[u8; 8]; 2048] = coded(&ggml::IQ1_GRID, (1, 0), &IQ1_S_VALUES);
static IQ1_CODES: [[u8; 8]; 2048] = coded(&ggml::IQ1_GRID, (8, 1), &IQ1_VALUES);
static IQ2_XXS_CODES: [[u8; 8]; 256] = coded(&ggml::IQ2_XXS_GRID, (1, 0), &IQ2_VALUES);
static IQ2_XS_CODES: [[u8; 8]; 512] = coded(&ggml::IQ2_XS_GRID, (1, 0), &IQ2_VALUES);
static IQ2_S_CODES: [[u8; 8]; 1024] = coded(&ggml::IQ2_S_GRID, (1, 0), &IQ2_VALUES);
static IQ3_XXS_CODES: [[u8; 4]; 256] = coded(&ggml::IQ3_XXS_GRID, (1, 0), &IQ3_XXS_VALUES);
static IQ3_S_CODES: [[u8; 4]; 512] = coded(&ggml::IQ3_S_GRID, (1, 0), &IQ3_S_VALUES);

/// Eight bytes of zeros, or of ones where the bit is set, for each byte.
static SPREAD: [u64; 256] = {
    let mut spread = [0; 256];
    let mut i = 0;
    while i < 256 * 8 {
        if (i / 8) >> (i % 8) & 1 != 0 {
            spread[i / 8] |= 0xff << (i % 8 * 8);
        }
        i += 1;
    }
    spread
};

/// The codes of points, with `flip` flipped where a column's bit is set.
#[inline(always)]
fn of_points<const G: usize, const N: usize, const COLS: usize>(
    points: &ggml::Points<G, N>,
    codes: &[[u8; COLS]],
    flip: u8,
) -> [u8; TILE] {
    let mut out = [0; TILE];
    for (out, &point) in out.as_chunks_mut().0.iter_mut().zip(&points.points) {
        *out = codes[point as usize];
    }
    for (out, &bits) in out.as_chunks_mut().0.iter_mut().zip(&points.bits) {
        let flip = u64::from_le_bytes([flip; 8]) & SPREAD[bits as usize];
        *out = (u64::from_le_bytes(*out) ^ flip).to_le_bytes();
    }
    out
}

/// The codes of blocks of 32 columns, one block after another.
#[inline(always)]
fn by_blocks<const BYTES: usize>(blocks: &[u8], codes: impl Fn(&[u8; BYTES]) -> [u8; ggml::COLS]) -> [u8; TILE] {
    let mut out = [0; TILE];
    for (out, block) in out.as_chunks_mut().0.iter_mut().zip(blocks.as_chunks().0) {
        *out = codes(block);
    }
    out
}

/// `N` bytes of a block from `at` on.
#[inline(always)]
fn part<const N: usize>(block: &[u8], at: usize) -> &[u8; N] {
    block[at..].first_chunk().expect("a whole block")
}

/// The last `N` bytes of a block.
#[inline(always)]
fn tail<const N: usize>(block: &[u8]) -> &[u8; N] {
    block.last_chunk().expect("a whole block")
}

/// Writes what a block of output `o` has besides codes: to the records of its groups, and of its 256 columns.
fn put_scales(format: Format, block: &[u8], o: usize, groups: &mut [u8], super_record: &mut [u8]) {
    // Number `i` of those at `at`, as part `i` of a record.
    let halves = |i: usize, at: usize, record: &mut [u8]| {
        record[i * HALVES + o * 2..][..2].copy_from_slice(&block[at + i * 2..][..2]);
    };
    match format {
        Format::Q8_0 | Format::Q4_0 | Format::Q5_0 | Format::Iq4Nl => halves(0, 0, groups),
        Format::Q4_1 | Format::Q5_1 => {
            halves(0, 0, groups);
            halves(1, 0, groups);
        }
        Format::Mxfp4Ggml => groups[o] = block[0],
        Format::Tq1_0 => halves(0, 52, groups),
        Format::Tq2_0 => halves(0, 64, groups),
        Format::Q2K => {
            put_each(&block[..16], o, groups);
            halves(0, 80, super_record);
            halves(1, 80, super_record);
        }
        Format::Q3K => {
            put_each(&ggml::q3k_scales(part(block, 96)).map(|s| s as u8), o, groups);
            halves(0, 108, super_record);
        }
        Format::Q4K => {
            let [d, dmin] = [0, 2].map(|at| u16::from_le_bytes([block[at], block[at + 1]]));
            let ratio = Ratio::of(d, dmin);
            let (scales, mins) = ggml::q4k_scales(part(block, 4));
            for ((record, scale), min) in groups.as_chunks_mut::<{ PANEL * 2 }>().0.iter_mut().zip(scales).zip(mins) {
                record[2 * o..][..2].copy_from_slice(&[if ratio.scales { scale } else { 0 }, min]);
            }
            super_record[o * 2..][..2].copy_from_slice(&ratio.base.to_le_bytes());
            super_record[HALVES + o * 2..][..2].copy_from_slice(&ratio.bits().to_le_bytes());
        }
        Format::Q5K => {
            let (scales, mins) = ggml::q4k_scales(part(block, 4));
            for ((record, scale), min) in groups.as_chunks_mut::<{ PANEL * 2 }>().0.iter_mut().zip(scales).zip(mins) {
                record[o] = scale;
                record[PANEL + o] = min;
            }
            halves(0, 0, super_record);
            halves(1, 0, super_record);
        }
        Format::Q6K => {
            put_each(&block[192..208], o, groups);
            halves(0, 208, super_record);
        }
        Format::Iq4Xs => {
            put_each(&ggml::iq4_xs_scales(part(block, 2)).map(|s| s as u8), o, groups);
            halves(0, 0, super_record);
        }
        Format::Iq1S => {
            let of = ggml::iq1_s_points(part(block, 0));
            // Its bits are the same for all columns of a group.
            let scales: [u8; 8] = std::array::from_fn(|g| of.scales[g] | of.bits[4 * g] & IQ1_S_LESS);
            put_each(&scales, o, groups);
            halves(0, 0, super_record);
        }
        Format::Iq1M => {
            put_each(&ggml::iq1_m_points(part(block, 0)).scales, o, groups);
            super_record[o * 2..][..2].copy_from_slice(&ggml::iq1_m_scale_bits(part(block, 0)).to_le_bytes());
        }
        Format::Iq2Xxs => {
            put_each(&ggml::iq2_xxs_points(part(block, 0)).scales, o, groups);
            halves(0, 0, super_record);
        }
        Format::Iq2Xs => {
            put_each(&ggml::iq2_xs_points(part(block, 0)).scales, o, groups);
            halves(0, 0, super_record);
        }
        Format::Iq2S => {
            put_each(&ggml::iq2_s_points(part(block, 0)).scales, o, groups);
            halves(0, 0, super_record);
        }
        Format::Iq3Xxs => {
            put_each(&ggml::iq3_xxs_points(part(block, 0)).scales, o, groups);
            halves(0, 0, super_record);
        }
        Format::Iq3S => {
            put_each(&ggml::iq3_s_points(part(block, 0)).scales, o, groups);
            halves(0, 0, super_record);
        }
        _ => {}
    }
}

/// Writes a byte of each group to its record.
#[inline(always)]
fn put_each(bytes: &[u8], o: usize, groups: &mut [u8]) {
    for (record, &byte) in groups.as_chunks_mut::<PANEL>().0.iter_mut().zip(bytes) {
        record[o] = byte;
    }
}

/// The operands of a group: four codes of each output.
type Operands = [[u32; PANEL]];

/// 8 bits of each code.
fn put_bytes(operands: &Operands, out: &mut [u8]) {
    for (operand, line) in operands.iter().zip(out.as_chunks_mut::<LINE>().0) {
        put_line(operand, line);
    }
}

/// The low 4 bits of each code.
fn put_nibbles(operands: &Operands, out: &mut [u8]) {
    for ([a, b], line) in operands.as_chunks().0.iter().zip(out.as_chunks_mut::<LINE>().0) {
        let nibbles: [u32; PANEL] = std::array::from_fn(|o| a[o] & 0x0f0f_0f0f | (b[o] & 0x0f0f_0f0f) << 4);
        put_line(&nibbles, line);
    }
}

/// 6 bits of each code.
fn put_sixes(operands: &Operands, out: &mut [u8]) {
    for (operands, lines) in operands.as_chunks::<4>().0.iter().zip(out.as_chunks_mut::<{ 3 * LINE }>().0) {
        for (n, line) in lines.as_chunks_mut::<LINE>().0.iter_mut().enumerate() {
            let codes: [u32; PANEL] =
                std::array::from_fn(|o| operands[n][o] | some_bits(operands[3][o], 2 * n as u32, 2) << 6);
            put_line(&codes, line);
        }
    }
}

/// 5 bits of each code.
fn put_fives(operands: &Operands, out: &mut [u8]) {
    for (operands, lines) in operands.as_chunks::<8>().0.iter().zip(out.as_chunks_mut::<{ 5 * LINE }>().0) {
        for (n, line) in lines.as_chunks_mut::<LINE>().0.iter_mut().enumerate() {
            let codes: [u32; PANEL] = std::array::from_fn(|o| {
                let of = |operand: usize, from: u32, bits: u32| some_bits(operands[operand][o], from, bits);
                let above = match n {
                    0 | 2 | 4 => of(5 + n / 2, 0, 3),
                    1 => of(5, 3, 2) | of(6, 3, 1) << 2,
                    _ => of(7, 3, 2) | of(6, 4, 1) << 2,
                };
                operands[n][o] | above << 5
            });
            put_line(&codes, line);
        }
    }
}

/// So many bits of each of four codes, from bit `from` on.
fn some_bits(codes: u32, from: u32, bits: u32) -> u32 {
    codes >> from & (0x0101_0101 * ((1 << bits) - 1))
}

/// The low 2 bits of each code.
fn put_pairs(operands: &Operands, out: &mut [u8]) {
    const HALF: usize = PANEL / 2;
    let pair = |v: u32| v & 0x0303_0303;
    for ([a, b], line) in operands.as_chunks().0.iter().zip(out.as_chunks_mut::<{ LINE / 2 }>().0) {
        let pairs: [u32; HALF] =
            std::array::from_fn(|o| pair(a[o]) | pair(a[HALF + o]) << 2 | pair(b[o]) << 4 | pair(b[HALF + o]) << 6);
        put_line(&pairs, line);
    }
}

/// Of each four operands 3 bits of the first two and the low 2 of the last one; then 3 bits of the third and bit 2 of the last one, as nibbles.
fn put_threes(operands: &Operands, out: &mut [u8]) {
    const HALF: usize = PANEL / 2;
    for ([a, b, c, d], out) in operands.as_chunks().0.iter().zip(out.as_chunks_mut::<{ LINE + LINE / 2 }>().0) {
        let (line, half) = out.split_at_mut(LINE);
        let codes: [u32; PANEL] = std::array::from_fn(|o| a[o] | b[o] << 3 | some_bits(d[o], 0, 2) << 6);
        put_line(&codes, line);
        let nibble = |o: usize| c[o] | some_bits(d[o], 2, 1) << 3;
        let nibbles: [u32; HALF] = std::array::from_fn(|o| nibble(o) | nibble(HALF + o) << 4);
        put_line(&nibbles, half);
    }
}

#[inline(always)]
fn put_line(dwords: &[u32], line: &mut [u8]) {
    for (out, v) in line.as_chunks_mut::<4>().0.iter_mut().zip(dwords) {
        *out = v.to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kt_core::format::float::f16_at;
    use kt_core::testing::{Random, f16_scales_at};

    const FORMATS: [Format; 22] = [
        Format::Q8_0,
        Format::Q4_0,
        Format::Q4_1,
        Format::Q5_0,
        Format::Q5_1,
        Format::Iq4Nl,
        Format::Mxfp4Ggml,
        Format::Q2K,
        Format::Q3K,
        Format::Q4K,
        Format::Q5K,
        Format::Q6K,
        Format::Iq4Xs,
        Format::Tq1_0,
        Format::Tq2_0,
        Format::Iq1S,
        Format::Iq1M,
        Format::Iq2Xxs,
        Format::Iq2Xs,
        Format::Iq2S,
        Format::Iq3Xxs,
        Format::Iq3S,
    ];

    /// Shapes in units of a block's columns: less than a panel, whole panels, a part of one; odd and even numbers of 128 columns, whole
    /// and with padding.
    const SHAPES: [(usize, usize); 8] = [(21, 3), (21, 5), (1, 1), (16, 4), (32, 8), (15, 9), (33, 12), (47, 2)];

    /// Random bytes in valid blocks: every code, every scale, and every F16 that is finite.
    fn random_matrix(format: Format, rows: usize, cols: usize, seed: u64) -> Matrix {
        let mut random = Random(seed);
        let (_, block_bytes) = ggml::block(format).unwrap();
        let mut bytes: Vec<u8> = (0..rows * format.row_bytes(cols).unwrap()).map(|_| random.bits() as u8).collect();
        for block in bytes.chunks_exact_mut(block_bytes) {
            for &at in f16_scales_at(format) {
                let v = random.below(0x7c00) as u16 | (random.below(2) as u16) << 15;
                block[at..at + 2].copy_from_slice(&v.to_le_bytes());
            }
            if format == Format::Mxfp4Ggml {
                block[0] = random.below(255) as u8;
            }
            if format == Format::Iq1M {
                let v = random.below(0x7c00) as u16 | (random.below(2) as u16) << 15;
                ggml::iq1_m_pack_scale(v.to_le_bytes(), (&mut *block).try_into().unwrap());
            }
        }
        Matrix::new(format, rows, cols, bytes.into(), None).unwrap()
    }

    fn packed(matrix: &Matrix) -> Vec<u8> {
        let panel = packed_layout(matrix.format(), matrix.cols()).panel_bytes;
        let mut out = vec![0; kt_avx512::engine::panels(matrix.rows()) * panel];
        pack(matrix, 0..matrix.rows(), &mut out);
        out
    }

    /// Reads a panel one number at a time, straight from the description.
    struct Reader<'a> {
        format: Format,
        layout: Layout,
        panel: &'a [u8],
    }

    impl Reader<'_> {
        /// A code of 8, 4 or 2 bits, of column `k` of a group of output `o` that begins at `at`.
        fn bits(&self, bits: usize, at: usize, o: usize, k: usize) -> usize {
            let (step, is_b, n) = (k / 8, k % 8 / 4, o * 4 + k % 4);
            let byte = |step_bytes: usize, j: usize| self.panel[at + step * step_bytes + j] as usize;
            match bits {
                8 => byte(128, is_b * 64 + n),
                4 => byte(64, n) >> (is_b * 4) & 15,
                _ => byte(32, n % 32) >> (is_b * 4 + n / 32 * 2) & 3,
            }
        }

        /// A code of 5 or 6 bits, of column `k` of a group that begins at `at`.
        fn shared(&self, bits: usize, at: usize, o: usize, k: usize) -> usize {
            let byte = |line: usize| self.panel[at + line * LINE + o * 4 + k % 4] as usize;
            match (bits, k / 4) {
                (_, operand) if operand < if bits == 5 { 5 } else { 3 } => byte(operand) & ((1 << bits) - 1),
                (5, 5) => byte(0) >> 5 | (byte(1) >> 5 & 3) << 3,
                (5, 6) => byte(2) >> 5 | (byte(1) >> 7) << 3 | (byte(3) >> 7) << 4,
                (5, 7) => byte(4) >> 5 | (byte(3) >> 5 & 3) << 3,
                _ => byte(0) >> 6 | byte(1) >> 6 << 2 | byte(2) >> 6 << 4,
            }
        }

        /// A code of 3 bits, of column `k` of a group that begins at `at`.
        fn three(&self, at: usize, o: usize, k: usize) -> usize {
            let (at, n) = (at + k / 16 * 96, o * 4 + k % 4);
            let line = self.panel[at + n] as usize;
            let nibble = self.panel[at + 64 + n % 32] as usize >> (n / 32 * 4) & 15;
            match k % 16 / 4 {
                0 => line & 7,
                1 => line >> 3 & 7,
                2 => nibble & 7,
                _ => line >> 6 | nibble >> 3 << 2,
            }
        }

        fn code(&self, o: usize, k: usize) -> usize {
            let bits = match self.format {
                Format::Q8_0 => 8,
                Format::Q2K | Format::Tq1_0 | Format::Tq2_0 | Format::Iq1S => 2,
                Format::Q3K | Format::Iq1M | Format::Iq2Xxs | Format::Iq2Xs | Format::Iq2S => 3,
                Format::Q5_0 | Format::Q5_1 | Format::Q5K => 5,
                Format::Q6K => 6,
                _ => 4,
            };
            let supers = (self.layout.super_record * self.layout.blocks.div_ceil(2)).next_multiple_of(64);
            let (group, blocks) = (self.group_cols(), self.layout.blocks);
            let (front, within) = match group > BLOCK {
                false => (supers, BLOCK / group * self.layout.record),
                true => (supers + (self.layout.record * (blocks * BLOCK).div_ceil(group)).next_multiple_of(64), 0),
            };
            let (b, g, k) = (k / BLOCK, k % BLOCK / group, k % BLOCK % group);
            let at = front + b * (within + bits * 256) + within + g * bits * group * 2;
            match bits {
                3 => self.three(at, o, k),
                5 | 6 => self.shared(bits, at, o, k),
                _ => self.bits(bits, at, o, k),
            }
        }

        fn group_cols(&self) -> usize {
            self.layout.group.unwrap()
        }

        fn group(&self, k: usize) -> &[u8] {
            &self.panel[self.layout.record_at(k / self.group_cols())..][..self.layout.record]
        }

        fn super_record(&self, k: usize) -> &[u8] {
            &self.panel[self.layout.supers_at + k / 256 * self.layout.super_record..][..self.layout.super_record]
        }

        fn value(&self, o: usize, k: usize) -> f32 {
            let (q, group, sup) = (self.code(o, k), self.group(k), self.super_record(k));
            let signed = |scale: u8| f16_at(sup, o) * scale as i8 as f32;
            let minus = |v: i32| (q as i32 - v) as f32;
            match self.format {
                Format::Q8_0 => f16_at(group, o) * minus(128),
                Format::Q4_0 => f16_at(group, o) * minus(8),
                Format::Q5_0 => f16_at(group, o) * minus(16),
                Format::Q4_1 | Format::Q5_1 => f16_at(group, o) * minus(0) + f16_at(group, 16 + o),
                Format::Iq4Nl => f16_at(group, o) * ggml::IQ4_VALUES[q] as f32,
                Format::Mxfp4Ggml => ggml::e8m0_half(group[o]) * ggml::MXFP4_HALVES[q] as f32,
                Format::Tq1_0 | Format::Tq2_0 => f16_at(group, o) * minus(1),
                Format::Q2K => {
                    let (scale, min) = (group[o] & 15, group[o] >> 4);
                    f16_at(sup, o) * scale as f32 * minus(0) - f16_at(sup, 16 + o) * min as f32
                }
                Format::Q4K => {
                    let (scale, min) = (i32::from(group[2 * o]), i32::from(group[2 * o + 1]));
                    let bits = i16::from_le_bytes([sup[32 + 2 * o], sup[33 + 2 * o]]);
                    let (s, eighths) = (1 << (bits & 7), i32::from(bits >> 3));
                    let units = s * scale * q as i32 + ((eighths * min + 4) >> 3);
                    f16_at(sup, o) / s as f32 * units as f32
                }
                Format::Q5K => {
                    let (scale, min) = (group[o], group[16 + o]);
                    f16_at(sup, o) * scale as f32 * minus(0) - f16_at(sup, 16 + o) * min as f32
                }
                Format::Q3K => signed(group[o]) * minus(4),
                Format::Q6K => signed(group[o]) * minus(32),
                Format::Iq4Xs => signed(group[o]) * ggml::IQ4_VALUES[q] as f32,
                Format::Iq1S => {
                    let one = if group[o] & 0x80 != 0 { -1.0 } else { 1.0 };
                    f16_at(sup, o) * (group[o] & 0x7f) as f32 * 0.125 * (8.0 * minus(1) + one)
                }
                Format::Iq1M => signed(group[o]) * 0.125 * [-9.0, -7.0, -1.0, 1.0, 7.0, 9.0][q],
                Format::Iq2Xxs | Format::Iq2Xs | Format::Iq2S => {
                    signed(group[o]) * 0.125 * [8.0, 25.0, 43.0, f32::NAN, -8.0, -25.0, -43.0][q]
                }
                Format::Iq3Xxs => {
                    let v = [62.0, 52.0, 44.0, 36.0, 28.0, 20.0, 12.0, 4.0];
                    signed(group[o]) * 0.25 * if q < 8 { -v[q] } else { v[15 - q] }
                }
                Format::Iq3S => signed(group[o]) * (2 * q as i32 - 15) as f32,
                other => panic!("{other}"),
            }
        }

        /// The code and what scales it, for outputs and columns that are not there.
        fn assert_nothing(&self, o: usize, k: usize) {
            assert_eq!(self.code(o, k), 0, "{}: code of output {o}, column {k}", self.format);
            let by_turns = self.format == Format::Q4K;
            let bytes = self.format == Format::Mxfp4Ggml || self.layout.super_record > 0 && !by_turns;
            for (name, record, width) in
                [("group", self.group(k), if bytes { 1 } else { 2 }), ("256 columns", self.super_record(k), 2)]
            {
                for part in record.chunks_exact(width * PANEL) {
                    let v = &part[o * width..][..width];
                    assert!(v.iter().all(|&b| b == 0), "{}: {name} of output {o}, column {k}: {v:?}", self.format);
                }
            }
            assert_eq!(self.value(o, k), 0.0, "{}: output {o}, column {k}", self.format);
        }
    }

    /// Reads everything back and compares it with what it should be, bit for bit: with what decoders say, but for Q4_K.
    fn check(matrix: &Matrix) {
        let (format, rows, cols) = (matrix.format(), matrix.rows(), matrix.cols());
        let layout = packed_layout(format, cols);
        let (bytes, want) = (packed(matrix), as_packed(matrix));
        let panels = rows.div_ceil(PANEL);
        for p in 0..panels {
            // Its lines among those of its bundle.
            let bundled = matches!(format, Format::Q2K | Format::Tq1_0 | Format::Tq2_0 | Format::Iq1S)
                || matches!(format, Format::Q5_0 | Format::Q5_1 | Format::Q5K | Format::Q6K);
            let bundle = if bundled { 2 } else { 1 };
            let start = (p - p % bundle) * layout.panel_bytes + p % bundle * LINE;
            let lines = bytes[start..].chunks(bundle * LINE).map(|lines| &lines[..LINE]);
            let panel: Vec<u8> = lines.take(layout.panel_bytes / LINE).flatten().copied().collect();
            let reader = Reader { format, layout, panel: &panel };
            for o in 0..PANEL {
                let row = p * PANEL + o;
                let there = if row < rows { cols } else { 0 };
                for k in 0..there {
                    let (got, want) = (reader.value(o, k), want[row * cols + k]);
                    assert_eq!(
                        got.to_bits(),
                        want.to_bits(),
                        "{format} {rows}x{cols}: row {row}, column {k}: {got} {want}"
                    );
                }
                for k in there..layout.blocks * BLOCK {
                    reader.assert_nothing(o, k);
                }
            }
            let padded = layout.blocks * BLOCK;
            let supers_end = layout.supers_at + padded.div_ceil(256) * layout.super_record;
            assert!(panel[supers_end..layout.groups_at].iter().all(|&b| b == 0));
            if layout.groups_at < layout.blocks_at {
                let groups_end = layout.groups_at + padded.div_ceil(layout.group.unwrap()) * layout.record;
                assert!(panel[groups_end..layout.blocks_at].iter().all(|&b| b == 0));
            }
        }
    }

    #[test]
    fn every_number_is_found_where_the_layout_says() {
        for format in FORMATS {
            for (i, (rows, blocks)) in SHAPES.into_iter().enumerate() {
                check(&random_matrix(format, rows, blocks * format.block_cols(), 7 + i as u64));
            }
        }
    }

    #[test]
    fn rows_need_not_be_neighbours() {
        for format in FORMATS {
            let both = random_matrix(format, 42, 3 * format.block_cols(), 3);
            check(&both.select_rows(1, 2, 21).unwrap());
            check(&both.select_rows(21, 1, 21).unwrap());
        }
    }

    #[test]
    fn a_matrix_of_no_size_packs_to_nothing() {
        for format in FORMATS {
            let layout = packed_layout(format, 0);
            assert_eq!((layout.blocks, layout.panel_bytes), (0, 0), "{format}");
            pack(&random_matrix(format, 0, format.block_cols(), 1), 0..0, &mut []);
            pack(&random_matrix(format, 5, 0, 1), 0..5, &mut []);
        }
    }

    /// One code with all bits set, at output 13 and some column of 256: where its bits are, by hand.
    #[test]
    fn bits_of_a_code_are_where_the_layout_says() {
        // Column 22 of block 1: step 2 (of a group of 16 columns step 0), operand B (operand 5 of 32 columns, 1 of 16); column 30: the last operand
        // of both. Byte 4 * 13 + 2: after what is in front, and block 0.
        type Bits<'a> = &'a [(usize, u8)];
        let places: [(Format, usize, Bits<'_>); 9] = [
            (Format::Q8_0, 22, &[(2176 + 128 + 2 * 128 + 64 + 54, 0xff)]),
            (Format::Q4_0, 22, &[(1152 + 128 + 2 * 64 + 54, 0xf0)]),
            (Format::Q5_0, 22, &[(256 + 1280 + 54, 0xe0), (256 + 1280 + 64 + 54, 0x60)]),
            (Format::Q5_0, 30, &[(256 + 1280 + 3 * 64 + 54, 0x60), (256 + 1280 + 4 * 64 + 54, 0xe0)]),
            (Format::Tq2_0, 22, &[(64 + 512 + 2 * 32 + 22, 0xc0)]),
            (Format::Q3K, 22, &[(64 + 896 + 128 + 96 + 54, 7 << 3)]),
            (Format::Q3K, 30, &[(64 + 896 + 128 + 96 + 54, 3 << 6), (64 + 896 + 128 + 96 + 64 + 22, 1 << 7)]),
            (Format::Q6K, 22, &[(64 + 1664 + 128 + 192 + 64 + 54, 0x3f)]),
            (Format::Q6K, 30, &[0, 1, 2].map(|line| (64 + 1664 + 128 + 192 + line * 64 + 54, 0xc0))),
        ];
        for (format, column, want) in places {
            let (cols, bytes) = ggml::block(format).unwrap();
            let mut row = vec![0; 256 / cols * bytes];
            // Of block 4 of 32 columns, or of the second half of one of 256.
            match format {
                Format::Q8_0 => row[4 * 34 + 2 + column] = 0x7f,
                Format::Q4_0 => row[4 * 18 + 2 + column - 16] = 0xf0,
                Format::Q5_0 => {
                    row[4 * 22 + 2 + column / 8] = 1 << (column % 8);
                    row[4 * 22 + 6 + column - 16] = 0xf0;
                }
                Format::Tq2_0 => row[32 + column] = 3,
                Format::Q3K => {
                    row[column] = 1 << 4;
                    row[32 + 32 + column] = 3;
                }
                _ => {
                    row[64 + column] = 15;
                    row[128 + 32 + column] = 3;
                }
            }
            let codes_of_zeros = codes(format, &vec![0; row.len()]);
            let mut rows = vec![0; 13 * row.len()];
            rows.extend(row);
            let matrix = Matrix::new(format, 14, 256, rows.into(), None).unwrap();
            let layout = packed_layout(format, 256);
            // The first panel, alone.
            let bytes = packed(&matrix);
            let lines = bytes.chunks(layout.step()).map(|lines| &lines[..LINE]).take(layout.panel_bytes / LINE);
            let mut got: Vec<u8> = lines.flatten().copied().collect();
            for g in 0..256 / layout.group.unwrap() {
                // A scale of Q3_K that is not set is -32.
                got[layout.record_at(g)..][..layout.record].fill(0);
            }
            if format == Format::Q8_0 {
                // What is not set is 0x80 here.
                assert_eq!(codes_of_zeros, [0x80; TILE]);
                got.iter_mut().filter(|v| **v == 0x80).for_each(|v| *v = 0);
            }
            let set: Vec<_> = got.iter().copied().enumerate().filter(|&(_, v)| v != 0).collect();
            assert_eq!(set, want, "{format}");
        }
    }

    #[test]
    fn sizes_are_what_the_types_need() {
        let bytes = |f, cols| packed_layout(f, cols).panel_bytes;
        assert_eq!(bytes(Format::Q8_0, 96), 16 * 128 + 32 * 4);
        assert_eq!(bytes(Format::Q4_0, 2048), 16 * 1024 + 32 * 64);
        assert_eq!(bytes(Format::Q5_1, 160), 16 * 160 + 64 * 8);
        assert_eq!(bytes(Format::Mxfp4Ggml, 2880), 16 * 1472 + 16 * 92);
        assert_eq!(bytes(Format::Q2K, 256), 16 * 64 + 16 * 16 + 64);
        assert_eq!(bytes(Format::Q3K, 768), 16 * 288 + 16 * 48 + 128);
        assert_eq!(bytes(Format::Q4K, 768), 16 * 384 + 32 * 24 + 64 * 3);
        assert_eq!(bytes(Format::Q5K, 512), 16 * 320 + 32 * 16 + 64 * 2);
        assert_eq!(bytes(Format::Q6K, 2048), 16 * 1536 + 16 * 128 + 32 * 8);
        assert_eq!(bytes(Format::Iq4Xs, 256), 16 * 128 + 16 * 8 + 64);
        assert_eq!(bytes(Format::Tq1_0, 768), 16 * 192 + 128);
        assert_eq!(bytes(Format::Iq1S, 768), 16 * 192 + 16 * 24 + 128);
        assert_eq!(bytes(Format::Iq2S, 768), 16 * 288 + 16 * 48 + 128);
        assert_eq!(bytes(Format::Iq3Xxs, 2048), 16 * 1024 + 16 * 64 + 256);
        for format in FORMATS {
            for blocks in 1..20 {
                let layout = packed_layout(format, blocks * format.block_cols());
                let Layout { groups_at, supers_at, blocks_at, head, panel_bytes, lines, .. } = layout;
                for at in [groups_at, supers_at, blocks_at, head, panel_bytes, lines] {
                    assert_eq!(at % 64, 0, "{format}: {layout:?}");
                }
                assert_eq!(panel_bytes, blocks_at + layout.blocks * (head + lines), "{format}");
            }
        }
    }
}
