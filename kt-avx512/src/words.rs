//! Many rows of integers whose groups of columns have integer scales, or get them: their tiles, by hand.
//!
//! **Types that have them** (Q3_K, Q4_K, Q6_K; where what is beside products is free): sums of products are words, multiplied by scales of one or two groups, become F32, and are scaled once more for
//! 256 columns. The numbers are those of [`IntTile`](crate::tile::IntTile), bit for bit, in 2 to 7 % less time than what compilers make of it.
//!
//! Where codes times scales are bytes (Q3_K), lines are unpacked to these, which rounds nothing; beside products nothing is left then but the scales of the inputs.
//!
//! **Others, in calls of many rows**: a group's sum of products takes two multiplications beside its products if its scales are F32, one with that of the weights and one with that of the
//! inputs, and one for a minimum. Here the sums of two groups are the words of a dword ([`InputLayout::Int8Words`]): one multiplication by both scales of the inputs, and
//! one by both of the weights, which adds up the two as well, to sums of a block of 128 columns. For that, scales become integers: of the inputs relative to the largest
//! of a block, of the weights (and minima) to the largest of [`CHUNK_BLOCKS`] of them, 14 bits or 13. What that rounds is little beside rounding inputs to 8 bits (`PERFORMANCE.md`). Numbers are not
//! those of F32 scales to the last bit; so this is for calls of many rows alone.
//!
//! All formats are alike here: their codes, as bytes of a line or as nibbles, and two words a dword for each output, made of their scales
//! when lines are unpacked ([`Prepare`], [`PrepareSupers`]). The tiles here have two panels and registers of 512 bits; others, and why, are in [`full`].

#![allow(unsafe_code)] // kernel

pub(crate) mod full;

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::mem::offset_of;
use std::ops::Range;

use kt_core::cpu::input::{BLOCK, InputLayout, Sums, WORD_ZERO, WORD_ZEROS};

use crate::ahead::{Level, Rows};
use crate::isa::{Isa, Job};
use crate::layout::{LINE, Layout, PANEL, SUPER, spread};
use crate::lines::{Codes, NoScale, Scale, Scales, Unpack, of_group};
use crate::tile::{SWAPPED, Tile};

/// Blocks whose scales are relative to the same unit of an output.
pub(crate) const CHUNK_BLOCKS: usize = 4;

/// Bytes of the scales of a block as F32, with groups of `group` columns.
pub(crate) const fn scales_bytes(group: usize, minima: bool) -> usize {
    BLOCK / group * lines_of(minima) * LINE
}

/// Bytes of the words of a chunk: the units, then a line or two for each two groups.
pub(crate) const fn chunk_bytes(group: usize, minima: bool) -> usize {
    LINE + CHUNK_BLOCKS * BLOCK / (2 * group) * lines_of(minima) * LINE
}

/// Lines for each two groups.
const fn lines_of(minima: bool) -> usize {
    if minima { 2 } else { 1 }
}

/// The largest word: sums of a block are dwords, of products with words that are 2^15 at most, and of minima with the sums of codes. Of powers of two it is one,
/// with which all of the next 13 are exact.
const fn most<S: Scale>(group: usize) -> i32 {
    match group {
        _ if S::POWERS => 1 << 13,
        16 => 7700,
        _ => 14000,
    }
}

/// Unpacks the lines of a block, whose scales are for words. `scales` is where those of the block begin, if zero points of groups [shift](Scale::SHIFTS) codes.
#[inline(always)]
fn unpack<I: Isa, L: Codes, S: Scale, const G: usize>(
    isa: I,
    layout: &Layout,
    mut scales: Scales<'_>,
    block: usize,
    to: &mut [u8],
) {
    let from = &scales.panel[spread(layout.lines_at(block), scales.step)..];
    let scales = &mut scales;
    if S::SHIFTS {
        Unpack::<L, S, G, false> { from, scales, to, kind: PhantomData }.go(isa);
    } else {
        Unpack::<L, NoScale, G, false> { from, scales, to, kind: PhantomData }.go(isa);
    }
}

/// Prepares some blocks of a panel for [`run`]: unpacks their lines, if they are not nibbles that stay, and makes words of their scales.
pub(crate) struct Prepare<'a, L, S, const G: usize, const WG: usize, const UNPACK: bool> {
    pub layout: &'a Layout,
    /// The panel.
    pub panel: &'a [u8],
    /// Which blocks.
    pub blocks: Range<usize>,
    /// The zero point of the codes as tiles have them.
    pub zero: i32,
    /// Where their lines go.
    pub lines: &'a mut [u8],
    /// Where their words go: [`chunk_bytes`] for each [`CHUNK_BLOCKS`].
    pub words: &'a mut [u8],
    /// Memory for the scales of a chunk as F32.
    pub scales: &'a mut [u8],
    pub kind: PhantomData<(L, S)>,
}

impl<L: Codes, S: Scale, const G: usize, const WG: usize, const UNPACK: bool> Job for Prepare<'_, L, S, G, WG, UNPACK> {
    #[inline(always)]
    fn go<I: Isa>(self, isa: I) {
        let (layout, panel, step) = (self.layout, self.panel, self.layout.step());
        let start = self.blocks.start;
        assert!(start.is_multiple_of(CHUNK_BLOCKS) && self.scales.len() >= CHUNK_BLOCKS * scales_bytes(G, S::MINIMA));
        let group = layout.group.unwrap_or(BLOCK);
        let mut cursor = Scales {
            panel,
            step,
            record: layout.first_record(start),
            left: group - start * BLOCK % group,
            group,
            above: 0,
            small: 0,
            zero: self.zero,
        };
        let lines = lines_of(S::MINIMA);
        let zero = isa.splat_f32(self.zero as f32);
        let most = isa.splat_f32(const { most::<S>(G) } as f32);
        let outputs = if S::OUTPUTS {
            // SAFETY: the bytes of a line.
            isa.as_f32(unsafe { isa.load(panel[spread(layout.outputs_at, step)..][..LINE].as_ptr()) })
        } else {
            isa.splat_f32(1.0)
        };
        let line_bytes = PANEL * BLOCK;
        let chunks = self.words.chunks_exact_mut(chunk_bytes(G, S::MINIMA));
        assert!(chunks.len() >= self.blocks.len().div_ceil(CHUNK_BLOCKS));
        for (first, words) in self.blocks.clone().step_by(CHUNK_BLOCKS).zip(chunks) {
            let blocks = CHUNK_BLOCKS.min(self.blocks.end - first);
            let mut largest = isa.splat(0);
            for (i, scales) in self.scales.chunks_exact_mut(scales_bytes(G, S::MINIMA)).take(blocks).enumerate() {
                let block = first + i;
                cursor.above = layout.supers_at + block * BLOCK / SUPER * layout.super_record;
                if UNPACK {
                    let to = &mut self.lines[(block - start) * line_bytes..][..line_bytes];
                    unpack::<I, L, S, G>(isa, layout, cursor, block, to);
                }
                for (g, to) in scales.chunks_exact_mut(lines * LINE).enumerate() {
                    let [scale, add] = of_group::<I, S, G, WG>(isa, &mut cursor, g);
                    // Magnitudes are ordered as their bits, what is not a number above all.
                    largest = isa.max(largest, isa.as_int(isa.abs(scale)));
                    // SAFETY: a line or two.
                    unsafe {
                        isa.store(to.as_mut_ptr(), isa.as_int(scale));
                        if S::MINIMA {
                            let add = isa.mul_add(scale, zero, add);
                            largest = isa.max(largest, isa.as_int(isa.abs(add)));
                            isa.store(to[LINE..].as_mut_ptr(), isa.as_int(add));
                        }
                    }
                }
                if (block + 1) & (layout.unit - 1) == 0 {
                    cursor.record += layout.record_skip();
                }
            }
            let largest = isa.as_f32(largest);
            // Of zeros, what is not a number: no word then, as what it is rounded to has none of the low bits.
            let up = isa.div(most, largest);
            let (unit, words) = words.split_at_mut(LINE);
            // SAFETY: a line.
            unsafe { isa.store(unit.as_mut_ptr(), isa.as_int(isa.mul(isa.div(largest, most), outputs))) };
            let pairs = self.scales.chunks_exact(2 * lines * LINE).take(blocks * BLOCK / (2 * G));
            for (scales, to) in pairs.zip(words.chunks_exact_mut(lines * LINE)) {
                for (i, to) in to.chunks_exact_mut(LINE).enumerate() {
                    // SAFETY: lines, of which each group has as many.
                    unsafe {
                        let first = isa.as_f32(isa.load(scales[i * LINE..][..LINE].as_ptr()));
                        let second = isa.as_f32(isa.load(scales[(lines + i) * LINE..][..LINE].as_ptr()));
                        let words = isa.words(isa.rounded(isa.mul(first, up)), isa.rounded(isa.mul(second, up)));
                        isa.store(to.as_mut_ptr(), words);
                    }
                }
            }
        }
    }
}

/// Bytes of a unit for 256 columns, and of the words of these, of types that have scales as words.
pub(crate) const SUPER_BYTES: usize = LINE + SUPER / BLOCK * SUPER_WORDS;

/// Bytes of the words of a block: a line for 32 columns.
const SUPER_WORDS: usize = BLOCK / 32 * LINE;

/// The zero point of codes whose scales are [folded](Scale::FOLDS).
const CODE_ZERO: i32 = 4;

/// How many times that the zero point of codes times scales is: `(code - 4) * scale + 124` is 0 to 252 with codes of 0 to 7 and scales of -32 to 31.
const FOLDED: i32 = 31;

/// Bytes of what [`PrepareSupers`] makes for 256 columns: a unit, and words, if scales are not [folded](Scale::FOLDS).
pub(crate) const fn supers_bytes(folds: bool) -> usize {
    if folds { LINE } else { SUPER_BYTES }
}

/// Makes the codes of a group, which are bytes, codes times scales, which are signed bytes.
#[inline(always)]
fn fold<I: Isa>(isa: I, scales: &[u8; PANEL], lines: &mut [u8]) {
    // SAFETY: one for each output.
    let scale = unsafe { isa.load_i8(scales.as_ptr()) };
    let words = isa.words(scale, scale);
    // What any code times the scale is not negative with, in both bytes of a word.
    let add = isa.mul_words(isa.sub(isa.splat(FOLDED), scale), isa.splat(257 * CODE_ZERO));
    let add = isa.words(add, add);
    for line in lines.chunks_exact_mut(LINE) {
        // SAFETY: a line.
        unsafe {
            // Both bytes of a word at once: in the end neither is more than a byte.
            let codes = isa.mul_words(isa.load(line.as_ptr()), words);
            isa.store(line.as_mut_ptr(), isa.add_words(codes, add));
        }
    }
}

/// Prepares some blocks of a panel as [`Prepare`] does, of types that have scales as words.
pub(crate) struct PrepareSupers<'a, L, S, const G: usize, const UNPACK: bool> {
    pub layout: &'a Layout,
    /// The panel.
    pub panel: &'a [u8],
    /// Which blocks.
    pub blocks: Range<usize>,
    /// Where their lines go.
    pub lines: &'a mut [u8],
    /// Where their words go: [`supers_bytes`] for each two.
    pub words: &'a mut [u8],
    pub kind: PhantomData<(L, S)>,
}

impl<L: Codes, S: Scale, const G: usize, const UNPACK: bool> Job for PrepareSupers<'_, L, S, G, UNPACK> {
    #[inline(always)]
    fn go<I: Isa>(self, isa: I) {
        assert!(S::WORDS * G == 32 && S::SUPER > 0 && !S::SHIFTS && SUPER == 2 * BLOCK);
        let (layout, panel, step) = (self.layout, self.panel, self.layout.step());
        let start = self.blocks.start;
        let bytes = |at: usize, bytes: usize| panel[spread(at, step)..][..bytes].as_ptr();
        assert!(!S::FOLDS || UNPACK && S::WORDS == 2 && S::RECORD == PANEL);
        let chunks = self.words.chunks_exact_mut(const { supers_bytes(S::FOLDS) });
        assert!(start.is_multiple_of(2) && chunks.len() >= self.blocks.len().div_ceil(2));
        let line_bytes = PANEL * BLOCK;
        let scales = Scales { panel, step, record: 0, left: 0, group: 0, above: 0, small: 0, zero: 0 };
        let mut record = layout.first_record(start);
        for (first, words) in self.blocks.clone().step_by(2).zip(chunks) {
            let above = bytes(layout.supers_at + first / 2 * layout.super_record, S::SUPER);
            let (unit, words) = words.split_at_mut(LINE);
            // SAFETY: all bytes of the record; and a line.
            let factors = unsafe {
                isa.store(unit.as_mut_ptr(), isa.as_int(S::load(isa, above, above)));
                S::factors(isa, above)
            };
            let mut words = words.chunks_exact_mut(LINE);
            for block in first..self.blocks.end.min(first + SUPER / BLOCK) {
                if UNPACK {
                    let to = &mut self.lines[(block - start) * line_bytes..][..line_bytes];
                    unpack::<I, L, S, G>(isa, layout, scales, block, &mut *to);
                    for lines in to.chunks_exact_mut(G * PANEL).take(if S::FOLDS { BLOCK / G } else { 0 }) {
                        let scales = panel[spread(record, step)..].first_chunk().expect("packed otherwise");
                        fold(isa, scales, lines);
                        record += S::RECORD;
                    }
                }
                for words in words.by_ref().take(if S::FOLDS { 0 } else { SUPER_WORDS / LINE }) {
                    // SAFETY: all bytes of one record, or of two; and a line.
                    unsafe {
                        let scales = S::words(isa, bytes(record, S::WORDS * S::RECORD), factors);
                        isa.store(words.as_mut_ptr(), scales);
                    }
                    record += S::WORDS * S::RECORD;
                }
                if (block + 1) & (layout.unit - 1) == 0 {
                    record += layout.record_skip();
                }
            }
        }
    }
}

/// A kind of tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    /// Whether lines are nibbles that are packed; else the codes are bytes.
    pub nibbles: bool,
    /// Columns of a group: 16, or 32.
    pub group: usize,
    /// What words are.
    pub words: Words,
}

/// What words are, and so how inputs are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Words {
    /// Scales that the type has as integers: inputs are [`InputLayout::Int8`] in groups of 32, with what [`Sums`] keeps of their halves if weights' groups are these.
    OfType,
    /// None: the scales that the type has are [folded](Scale::FOLDS) into its codes. Inputs are the same.
    Folded,
    /// Scales that became integers: inputs are [`InputLayout::Int8Words`].
    Made {
        /// Whether there are minima.
        minima: bool,
    },
}

impl Kind {
    /// How inputs are.
    const fn inputs(self) -> InputLayout {
        match (self.words, self.group) {
            (Words::Made { minima }, group) => InputLayout::Int8Words { group, zero: 1, minima },
            (Words::OfType | Words::Folded, 16) => InputLayout::Int8 { group: 32, sums: Sums::Halves(1) },
            (Words::OfType | Words::Folded, _) => InputLayout::Int8 { group: 32, sums: Sums::Words(1) },
        }
    }

    /// Bytes of the lines of a block.
    const fn line_bytes(self) -> usize {
        PANEL * BLOCK / if self.nibbles { 2 } else { 1 }
    }

    /// Blocks that share a unit; bytes of that and their words, and of the words of one of them.
    const fn chunk(self) -> (usize, usize, usize) {
        match self.words {
            Words::Made { minima } => {
                let words = BLOCK / (2 * self.group) * lines_of(minima) * LINE;
                (CHUNK_BLOCKS, chunk_bytes(self.group, minima), words)
            }
            Words::OfType => (SUPER / BLOCK, SUPER_BYTES, SUPER_WORDS),
            Words::Folded => (SUPER / BLOCK, LINE, 0),
        }
    }

    /// Bytes from a block of the inputs to what it has for its first groups. What it has for [`Words::OfType`] begins with the sums, which in
    /// [`Words::Made`] are the second: there, a number before.
    const fn first_n(self) -> usize {
        match self.words {
            Words::Made { .. } => BLOCK + 4,
            Words::OfType | Words::Folded => BLOCK + BLOCK / 32 * 4 - 4,
        }
    }

    /// Bytes of what the inputs have for two groups by words that were made.
    const fn pair_bytes(self) -> usize {
        InputLayout::pair_bytes(matches!(self.words, Words::Made { minima: true }))
    }

    /// Bytes from the unit of a chunk to the words of its last groups, if there are any.
    const fn last_words(self) -> usize {
        let last = match self.words {
            Words::Made { minima } => lines_of(minima) * LINE,
            Words::OfType | Words::Folded => LINE,
        };
        self.chunk().1 - last
    }
}

/// Rows of the largest tile: sums of products, of these times scales, and totals are 24 registers then. The second: of tall ones, where eight sums are too few for two
/// products a cycle. Their totals are in memory, or the type's words need no sums beside them.
pub(crate) const WORD_ROWS: [usize; 2] = [4, 6];

/// Panels of a tile.
const P: usize = 2;

/// A block of a tile.
struct Block {
    /// The lines of both panels.
    lines: [*const u8; P],
    /// Their words.
    words: [*const u8; P],
    /// The block of the first row.
    x: *const u8,
}

/// Where a tall tile begins. It is one piece of assembly, over all blocks: what compilers put between blocks takes time beside products.
struct Whole {
    /// The lines of both panels.
    lines: [*const u8; P],
    /// The words of their first groups, or, where there are none, the units.
    words: [*const u8; P],
    /// The first block of the first row.
    x: *const u8,
    /// How many blocks come before.
    block: usize,
}

/// What a tall tile of `N` sums finds in memory.
#[repr(C, align(64))]
struct Around<const N: usize> {
    /// Totals of all units but the last one.
    totals: [__m512; N],
    /// By words that were made: sums of the blocks of a unit, but for the last one.
    sums: [__m512; N],
    /// How many blocks there are, with those that come before.
    end: usize,
    /// Of a number of blocks, the bits that are 0 where lines go on elsewhere.
    unit_blocks: usize,
    /// How many bytes from there that is.
    line_skip: usize,
    /// From behind the codes of a block of the inputs to the next one.
    next_x: usize,
    /// From the scale of a block's last group to that of the next one's first.
    next_scale: usize,
    /// A line to ask for.
    ask: *const u8,
    /// Bytes from there to the next one.
    ask_step: usize,
    /// How many to ask for with each block.
    asks: usize,
}

/// The instructions for a row: its number, two registers for sums of products, two for those times scales, two for totals, one for what is broadcast. `{x}` is where its codes
/// are, `{n}` what the inputs have for two groups.
#[rustfmt::skip]
macro_rules! row {
    (clear, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!("vpxord ", $s, ", ", $s, ", ", $s, "\n", "vpxord ", $t, ", ", $t, ", ", $t, "\n")
    };
    (begin, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!("vpbroadcastd ", $a, ", dword ptr [{n} + 4 + ", $r, "*{row}]\n", "vmovdqa64 ", $b, ", ", $a, "\n")
    };
    // The first sum goes above what the second one begins with.
    (swap, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!("vpshufb ", $a, ", ", $a, ", zmm30\n", "vpshufb ", $b, ", ", $b, ", zmm30\n")
    };
    (of_type_swap, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!("vpshufb ", $a, ", ", $a, ", zmm31\n", "vpshufb ", $b, ", ", $b, ", zmm31\n")
    };
    // Of columns k and on, and of the four after those.
    (first, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            "vpbroadcastd ", $x, ", dword ptr [{x} + \\k + ", $r, "*{row}]\n", "vpdpbusd ", $a, ", zmm24, ", $x, "\n",
            "vpdpbusd ", $b, ", zmm25, ", $x, "\n"
        )
    };
    (second, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            "vpbroadcastd ", $x, ", dword ptr [{x} + \\k + 4 + ", $r, "*{row}]\n", "vpdpbusd ", $a, ", zmm24, ", $x, "\n",
            "vpdpbusd ", $b, ", zmm25, ", $x, "\n"
        )
    };
    (scale, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            "vpbroadcastd ", $x, ", dword ptr [{n} + ", $r, "*{row}]\n", "vpmulhrsw ", $a, ", ", $a, ", ", $x, "\n",
            "vpdpwssd ", $s, ", ", $a, ", zmm24\n", "vpmulhrsw ", $b, ", ", $b, ", ", $x, "\n", "vpdpwssd ", $t, ", ", $b, ", zmm25\n"
        )
    };
    (minima, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            "vpbroadcastd ", $x, ", dword ptr [{n} + 8 + ", $r, "*{row}]\n", "vpdpwssd ", $s, ", ", $x, ", zmm24\n",
            "vpdpwssd ", $t, ", ", $x, ", zmm25\n"
        )
    };
    // Of sums of words, with `{unit}` the scale of a group of 32 columns.
    (of_type_total, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            "vpxord ", $a, ", ", $a, ", zmm30\n", "vpxord ", $b, ", ", $b, ", zmm30\n", "vpmaddwd ", $a, ", ", $a, ", zmm24\n",
            "vpmaddwd ", $b, ", ", $b, ", zmm25\n", row!(of_type_end, $r, $a, $b, $s, $t, $p, $q, $x)
        )
    };
    (of_type_end, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            "vbroadcastss ", $x, ", dword ptr [{unit} + ", $r, "*{row}]\n", "vcvtdq2ps ", $a, ", ", $a, "\n", "vcvtdq2ps ", $b, ", ", $b, "\n",
            "vfmadd231ps ", $p, ", ", $a, ", ", $x, "\n", "vfmadd231ps ", $q, ", ", $b, ", ", $x, "\n"
        )
    };
    // Of codes times scales: what both halves of the 32 columns add, [`FOLDED`] times, without the 2^15 that each has.
    (folded_begin, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            "vpbroadcastd ", $a, ", dword ptr [{n} + 4 + ", $r, "*{row}]\n", "vpsrld ", $b, ", ", $a, ", 16\n", "vpandd ", $a, ", ", $a, ", zmm31\n",
            "vpsubd ", $b, ", ", $b, ", zmm30\n", "vpaddd ", $a, ", ", $a, ", ", $b, "\n", "vpslld ", $b, ", ", $a, ", 5\n",
            "vpsubd ", $a, ", ", $b, ", ", $a, "\n", "vmovdqa64 ", $b, ", ", $a, "\n"
        )
    };
    (folded_begin_first, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            row!(folded_begin, $r, $a, $b, $s, $t, $p, $q, $x), row!(first, $r, $a, $b, $s, $t, $p, $q, $x)
        )
    };
    (folded_first, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            row!(of_type_end, $r, $a, $b, $s, $t, $p, $q, $x), row!(folded_begin_first, $r, $a, $b, $s, $t, $p, $q, $x)
        )
    };
    (total, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            "vbroadcastss ", $x, ", dword ptr [{unit} + ", $r, "*{row}]\n", "vcvtdq2ps ", $s, ", ", $s, "\n",
            "vfmadd231ps ", $p, ", ", $s, ", ", $x, "\n", "vcvtdq2ps ", $t, ", ", $t, "\n", "vfmadd231ps ", $q, ", ", $t, ", ", $x, "\n"
        )
    };
    // Of tall tiles, row by row: what is due before the first line of a group, after the group before that.
    (begin_first, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            row!(begin, $r, $a, $b, $s, $t, $p, $q, $x), row!(first, $r, $a, $b, $s, $t, $p, $q, $x)
        )
    };
    (swap_first, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            row!(swap, $r, $a, $b, $s, $t, $p, $q, $x), row!(first, $r, $a, $b, $s, $t, $p, $q, $x)
        )
    };
    (of_type_swap_first, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            row!(of_type_swap, $r, $a, $b, $s, $t, $p, $q, $x), row!(first, $r, $a, $b, $s, $t, $p, $q, $x)
        )
    };
    (of_type_due, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            "vpxord ", $a, ", ", $a, ", zmm30\n", "vpxord ", $b, ", ", $b, ", zmm30\n", "vpmaddwd ", $a, ", ", $a, ", zmm26\n",
            "vpmaddwd ", $b, ", ", $b, ", zmm27\n", row!(of_type_end, $r, $a, $b, $s, $t, $p, $q, $x)
        )
    };
    (of_type_first, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            row!(of_type_due, $r, $a, $b, $s, $t, $p, $q, $x), row!(begin_first, $r, $a, $b, $s, $t, $p, $q, $x)
        )
    };
    // The same where a unit ends, which is `{back}` bytes before the words.
    (of_type_unit_first, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            row!(of_type_due, $r, $a, $b, $s, $t, $p, $q, $x), row!(unit, $r, $a, $b, $s, $t, $p, $q, $x),
            row!(begin_first, $r, $a, $b, $s, $t, $p, $q, $x)
        )
    };
    (folded_unit_first, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            row!(of_type_end, $r, $a, $b, $s, $t, $p, $q, $x), row!(unit, $r, $a, $b, $s, $t, $p, $q, $x),
            row!(folded_begin_first, $r, $a, $b, $s, $t, $p, $q, $x)
        )
    };
    (unit, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            "vmovaps ", $x, ", zmmword ptr [{around} + ", $r, "*128]\n", "vfmadd132ps ", $p, ", ", $x, ", zmmword ptr [{words} - {back}]\n",
            "vmovaps zmmword ptr [{around} + ", $r, "*128], ", $p, "\n", "vpxord ", $p, ", ", $p, ", ", $p, "\n",
            "vmovaps ", $x, ", zmmword ptr [{around} + ", $r, "*128 + 64]\n", "vfmadd132ps ", $q, ", ", $x, ", zmmword ptr [{others} - {back}]\n",
            "vmovaps zmmword ptr [{around} + ", $r, "*128 + 64], ", $q, "\n", "vpxord ", $q, ", ", $q, ", ", $q, "\n"
        )
    };
    (scale_first, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            row!(scale_at, $r, $a, $b, $s, $t, $p, $q, $x), "vpbroadcastd ", $a, ", dword ptr [{n} + 8 + 4 + ", $r, "*{row}]\n", "vmovdqa64 ", $b, ", ", $a, "\n",
            row!(first, $r, $a, $b, $s, $t, $p, $q, $x)
        )
    };
    (scale_first_minima, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            row!(scale_at, $r, $a, $b, $s, $t, $p, $q, $x), row!(minima_at, $r, $a, $b, $s, $t, $p, $q, $x),
            "vpbroadcastd ", $a, ", dword ptr [{n} + 12 + 4 + ", $r, "*{row}]\n", "vmovdqa64 ", $b, ", ", $a, "\n", row!(first, $r, $a, $b, $s, $t, $p, $q, $x)
        )
    };
    (minima_at, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            "vpbroadcastd ", $x, ", dword ptr [{n} + 8 + ", $r, "*{row}]\n", "vpdpwssd ", $s, ", ", $x, ", zmmword ptr [{words} + 64]\n",
            "vpdpwssd ", $t, ", ", $x, ", zmmword ptr [{others} + 64]\n"
        )
    };
    (scale_at, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            "vpbroadcastd ", $x, ", dword ptr [{n} + ", $r, "*{row}]\n", "vpmulhrsw ", $a, ", ", $a, ", ", $x, "\n", "vpmulhrsw ", $b, ", ", $b, ", ", $x, "\n",
            "vpdpwssd ", $s, ", ", $a, ", zmm26\n", "vpdpwssd ", $t, ", ", $b, ", zmm27\n"
        )
    };
    // Of tall tiles, where a block ends: its sums times the scale of the inputs, and what the blocks of the unit before it have, at `{around} + {sums}`.
    (sum, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            "vbroadcastss ", $x, ", dword ptr [{n} - {last_scale} + ", $r, "*{row}]\n", "vcvtdq2ps ", $s, ", ", $s, "\n", "vcvtdq2ps ", $t, ", ", $t, "\n",
            "vfmadd213ps ", $s, ", ", $x, ", zmmword ptr [{around} + {sums} + ", $r, "*128]\n",
            "vfmadd213ps ", $t, ", ", $x, ", zmmword ptr [{around} + {sums} + ", $r, "*128 + 64]\n"
        )
    };
    // What is due before the first line of a block, after the block before that.
    (block_first, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            row!(scale_at, $r, $a, $b, $s, $t, $p, $q, $x), row!(block_due, $r, $a, $b, $s, $t, $p, $q, $x)
        )
    };
    (block_first_minima, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            row!(scale_at, $r, $a, $b, $s, $t, $p, $q, $x), row!(minima_at, $r, $a, $b, $s, $t, $p, $q, $x),
            row!(block_due, $r, $a, $b, $s, $t, $p, $q, $x)
        )
    };
    (block_due, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            row!(sum, $r, $a, $b, $s, $t, $p, $q, $x), "vmovaps zmmword ptr [{around} + {sums} + ", $r, "*128], ", $s, "\n",
            "vmovaps zmmword ptr [{around} + {sums} + ", $r, "*128 + 64], ", $t, "\n", row!(block_begin, $r, $a, $b, $s, $t, $p, $q, $x)
        )
    };
    (block_begin, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            row!(clear, $r, $a, $b, $s, $t, $p, $q, $x), "vpbroadcastd ", $a, ", dword ptr [{x} + {begins} + ", $r, "*{row}]\n",
            "vmovdqa64 ", $b, ", ", $a, "\n", row!(first, $r, $a, $b, $s, $t, $p, $q, $x)
        )
    };
    // The same where a unit ends, which is `{back}` bytes before the words.
    (unit_first, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            row!(scale_at, $r, $a, $b, $s, $t, $p, $q, $x), row!(unit_due, $r, $a, $b, $s, $t, $p, $q, $x)
        )
    };
    (unit_first_minima, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            row!(scale_at, $r, $a, $b, $s, $t, $p, $q, $x), row!(minima_at, $r, $a, $b, $s, $t, $p, $q, $x),
            row!(unit_due, $r, $a, $b, $s, $t, $p, $q, $x)
        )
    };
    (unit_due, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            row!(sum, $r, $a, $b, $s, $t, $p, $q, $x), row!(unit, $r, $a, $b, $s, $t, $s, $t, $x),
            "vmovaps zmmword ptr [{around} + {sums} + ", $r, "*128], ", $s, "\n", "vmovaps zmmword ptr [{around} + {sums} + ", $r, "*128 + 64], ", $t, "\n",
            row!(block_begin, $r, $a, $b, $s, $t, $p, $q, $x)
        )
    };
}

/// The same for so many rows.
#[rustfmt::skip]
macro_rules! rows {
    (1, $op:ident) => {
        row!($op, 0, "zmm0", "zmm1", "zmm8", "zmm9", "zmm16", "zmm17", "zmm28")
    };
    (2, $op:ident) => {
        concat!(rows!(1, $op), row!($op, 1, "zmm2", "zmm3", "zmm10", "zmm11", "zmm18", "zmm19", "zmm29"))
    };
    (3, $op:ident) => {
        concat!(rows!(2, $op), row!($op, 2, "zmm4", "zmm5", "zmm12", "zmm13", "zmm20", "zmm21", "zmm28"))
    };
    (4, $op:ident) => {
        concat!(rows!(3, $op), row!($op, 3, "zmm6", "zmm7", "zmm14", "zmm15", "zmm22", "zmm23", "zmm29"))
    };
    // Of tall tiles, whose sums times scales, or whose totals if there are none, have other registers.
    (5, $op:ident) => {
        concat!(
            row!($op, 0, "zmm0", "zmm1", "zmm12", "zmm13", "zmm12", "zmm13", "zmm28"),
            row!($op, 1, "zmm2", "zmm3", "zmm14", "zmm15", "zmm14", "zmm15", "zmm29"),
            row!($op, 2, "zmm4", "zmm5", "zmm16", "zmm17", "zmm16", "zmm17", "zmm28"),
            row!($op, 3, "zmm6", "zmm7", "zmm18", "zmm19", "zmm18", "zmm19", "zmm29"),
            row!($op, 4, "zmm8", "zmm9", "zmm20", "zmm21", "zmm20", "zmm21", "zmm28")
        )
    };
    (6, $op:ident) => {
        concat!(rows!(5, $op), row!($op, 5, "zmm10", "zmm11", "zmm22", "zmm23", "zmm22", "zmm23", "zmm29"))
    };
}

/// The products of lines of 16 outputs x 4 columns, or of nibbles of 8, that begin with these columns of a group, and what else there is to do with each row of the first of
/// such 4 columns.
#[rustfmt::skip]
macro_rules! lines {
    (5, nibbles, $op:ident, $columns:literal) => { lines!(5, tall_nibbles, $op, $columns) };
    (6, nibbles, $op:ident, $columns:literal) => { lines!(6, tall_nibbles, $op, $columns) };
    // Read twice: tall tiles have words where others have lines that were not split yet.
    ($r:tt, tall_nibbles, $op:ident, $columns:literal) => {
        concat!(
            ".irp k, ", $columns, "\n", "vpandq zmm24, zmm31, zmmword ptr [{first} + 8*\\k]\n", "vpandq zmm25, zmm31, zmmword ptr [{second} + 8*\\k]\n",
            rows!($r, $op), "vpsrlw zmm24, zmmword ptr [{first} + 8*\\k], 4\n", "vpsrlw zmm25, zmmword ptr [{second} + 8*\\k], 4\n",
            "vpandq zmm24, zmm24, zmm31\n", "vpandq zmm25, zmm25, zmm31\n", rows!($r, second), ".endr\n"
        )
    };
    ($r:tt, nibbles, $op:ident, $columns:literal) => {
        concat!(
            ".irp k, ", $columns, "\n", "vmovdqu64 zmm26, zmmword ptr [{first} + 8*\\k]\n", "vmovdqu64 zmm27, zmmword ptr [{second} + 8*\\k]\n",
            "vpandq zmm24, zmm26, zmm31\n", "vpandq zmm25, zmm27, zmm31\n", rows!($r, $op), "vpsrlw zmm26, zmm26, 4\n", "vpsrlw zmm27, zmm27, 4\n",
            "vpandq zmm24, zmm26, zmm31\n", "vpandq zmm25, zmm27, zmm31\n", rows!($r, second), ".endr\n"
        )
    };
    ($r:tt, bytes, $op:ident, $columns:literal) => {
        concat!(
            ".irp k, ", $columns, "\n", "vmovdqu64 zmm24, zmmword ptr [{first} + 16*\\k]\n", "vmovdqu64 zmm25, zmmword ptr [{second} + 16*\\k]\n",
            rows!($r, $op), ".endr\n"
        )
    };
}

/// The products of a group, whose lines begin at `{first}` and `{second}`, and what else there is to do with each row of its first line; goes on to the next one.
#[rustfmt::skip]
macro_rules! products {
    ($r:tt, nibbles, 32, $op:ident) => {
        concat!(
            lines!($r, nibbles, $op, "0"), lines!($r, nibbles, first, "8, 16, 24"), "add {first}, 256\n", "add {second}, 256\n", "add {x}, 32\n"
        )
    };
    ($r:tt, bytes, 32, $op:ident) => {
        concat!(
            lines!($r, bytes, $op, "0"), lines!($r, bytes, first, "4, 8, 12, 16, 20, 24, 28"), "add {first}, 512\n", "add {second}, 512\n",
            "add {x}, 32\n"
        )
    };
    ($r:tt, bytes, 16, $op:ident) => {
        concat!(
            lines!($r, bytes, $op, "0"), lines!($r, bytes, first, "4, 8, 12"), "add {first}, 256\n", "add {second}, 256\n", "add {x}, 16\n"
        )
    };
}

/// What words of minima add, and what is after the words of two groups.
#[rustfmt::skip]
macro_rules! minima {
    ($r:tt, true) => {
        concat!(
            "vmovdqu64 zmm24, zmmword ptr [{words} + 64]\n", "vmovdqu64 zmm25, zmmword ptr [{others} + 64]\n", rows!($r, minima),
            "add {words}, 128\n", "add {others}, 128\n", "add {n}, 12\n"
        )
    };
    ($r:tt, false) => {
        concat!("add {words}, 64\n", "add {others}, 64\n", "add {n}, 8\n")
    };
}

/// The kind of tile.
macro_rules! kind {
    (bytes, folded, $words:expr) => {
        Kind { nibbles: false, group: 16, words: Words::Folded }
    };
    (nibbles, $group:tt, $words:expr) => {
        Kind { nibbles: true, group: $group, words: $words }
    };
    (bytes, $group:tt, $words:expr) => {
        Kind { nibbles: false, group: $group, words: $words }
    };
}

/// The products of 32 columns, of one group or of two of 16, whose sums then are words, or of codes times scales.
#[rustfmt::skip]
macro_rules! columns {
    ($r:tt, $codes:ident, folded, $op:ident) => {
        concat!(products!($r, $codes, 32, $op), "add {n}, 4\n")
    };
    (5, $codes:ident, 16, $op:ident) => {
        concat!(products!(5, $codes, 16, $op), products!(5, $codes, 16, of_type_swap_first), "add {n}, 4\n")
    };
    (6, $codes:ident, 16, $op:ident) => {
        concat!(products!(6, $codes, 16, $op), products!(6, $codes, 16, of_type_swap_first), "add {n}, 4\n")
    };
    ($r:tt, $codes:ident, 16, $op:ident) => {
        concat!(products!($r, $codes, 16, $op), rows!($r, of_type_swap), products!($r, $codes, 16, first), "add {n}, 4\n")
    };
    ($r:tt, $codes:ident, 32, $op:ident) => {
        concat!(products!($r, $codes, 32, $op), "add {n}, 4\n")
    };
}

/// Reads the words of two groups, or of the one that the type has, into zmm26 and zmm27 of tall tiles: all rows need them.
#[rustfmt::skip]
macro_rules! read_words {
    () => { "vmovdqu64 zmm26, zmmword ptr [{words}]\nvmovdqu64 zmm27, zmmword ptr [{others}]\n" };
}

/// The parts of [`block_of_type`], by words that the type has or of folded scales: what rows begin with; the products of 32 columns after that (first), or
/// with what is due after the 32 before them and what they begin with done row by row (next, and where the 32 before them end a unit); what is due after the
/// last ones; going on to the next scales.
#[rustfmt::skip]
macro_rules! of_type {
    (begin, $r:tt, folded) => { rows!($r, folded_begin) };
    (begin, $r:tt, $group:tt) => { rows!($r, begin) };
    (start, $r:tt, $codes:ident, folded) => { columns!($r, $codes, folded, folded_begin_first) };
    (start, $r:tt, $codes:ident, $group:tt) => { columns!($r, $codes, $group, begin_first) };
    (next, $r:tt, $codes:ident, folded) => { columns!($r, $codes, folded, folded_first) };
    (next, $r:tt, $codes:ident, $group:tt) => { concat!(read_words!(), columns!($r, $codes, $group, of_type_first)) };
    (next_unit, $r:tt, $codes:ident, folded) => { columns!($r, $codes, folded, folded_unit_first) };
    (next_unit, $r:tt, $codes:ident, $group:tt) => { concat!(read_words!(), columns!($r, $codes, $group, of_type_unit_first)) };
    (end, $r:tt, folded) => { rows!($r, of_type_end) };
    (end, $r:tt, $group:tt) => {
        concat!(
            "vmovdqu64 zmm24, zmmword ptr [{words}]\n", "vmovdqu64 zmm25, zmmword ptr [{others}]\n", rows!($r, of_type_total)
        )
    };
    (go_on, folded) => { "add {unit}, 4\n" };
    (go_on, $group:tt) => { "add {words}, 64\nadd {others}, 64\nadd {unit}, 4\n" };
    // From the last group of a block to the first one of the next, and from there on.
    (step, folded) => { "add {unit}, {step}\nmov {step:e}, 4\n" };
    (step, $group:tt) => { "add {words}, 64\nadd {others}, 64\nadd {unit}, {step}\nmov {step:e}, 4\n" };
    // The same where a unit ends.
    (step_unit, folded) => { concat!("add {words}, 64\nadd {others}, 64\n", of_type!(step, folded)) };
    (step_unit, $group:tt) => { "add {words}, 128\nadd {others}, 128\nadd {unit}, {step}\nmov {step:e}, 4\n" };
}

/// The products of a block, and what there is to do with them, by words that the type has, or of folded scales.
#[rustfmt::skip]
macro_rules! block_of_type {
    ($r:tt, $codes:ident, $group:tt) => {
        concat!(
            "2:\n", of_type!(begin, $r, $group), columns!($r, $codes, $group, first), of_type!(end, $r, $group), of_type!(go_on, $group),
            "dec {groups}\n", "jnz 2b\n"
        )
    };
}

/// What there is to do between blocks in a tall tile: to the end if that was the last one; lines and inputs go on; some of what comes later is asked for.
#[rustfmt::skip]
macro_rules! next_block {
    () => {
        concat!(
            "inc {block}\n", "cmp {block}, qword ptr [{around} + {end}]\n", "je 9f\n",
            "xor {groups:e}, {groups:e}\n", "test qword ptr [{around} + {unit_blocks}], {block}\n", "cmovz {groups}, qword ptr [{around} + {line_skip}]\n",
            "add {first}, {groups}\n", "add {second}, {groups}\n",
            "mov {groups}, qword ptr [{around} + {asks}]\n", "test {groups}, {groups}\n", "jz 8f\n", "mov {step}, qword ptr [{around} + {ask}]\n",
            "7:\n", "prefetcht0 byte ptr [{step}]\n", "add {step}, qword ptr [{around} + {ask_step}]\n", "dec {groups}\n", "jnz 7b\n",
            "mov qword ptr [{around} + {ask}], {step}\n",
            "8:\n", "add {x}, qword ptr [{around} + {next_x}]\n"
        )
    };
}

/// The same of all blocks, in a tall tile: what is due after a group is done with the first line of the next one, row by row, be that of the next block. All
/// at once it would take the place of products, of which there are as many as all else together.
#[rustfmt::skip]
macro_rules! whole_of_type {
    ($r:tt, $codes:ident, $group:tt) => {
        concat!(
            of_type!(start, $r, $codes, $group), "mov {groups:e}, 3\n", "jmp 3f\n",
            "2:\n", of_type!(next_unit, $r, $codes, $group), of_type!(step_unit, $group), "dec {groups}\n",
            "3:\n", of_type!(next, $r, $codes, $group), of_type!(step, $group), "dec {groups}\n", "jnz 3b\n",
            next_block!(), "lea {n}, [{x} + {first_n}]\n", "mov {step}, qword ptr [{around} + {next_scale}]\n",
            "mov {groups:e}, 4\n", "test {block:l}, {in_unit}\n", "jz 2b\n", "jmp 3b\n",
            "9:\n", of_type!(end, $r, $group)
        )
    };
}

/// The same by words that were made.
#[rustfmt::skip]
macro_rules! block {
    ($r:tt, $codes:ident, $group:tt, $minima:tt) => {
        concat!(
            "2:\n", rows!($r, begin), products!($r, $codes, $group, first), rows!($r, swap), products!($r, $codes, $group, first),
            "vmovdqu64 zmm24, zmmword ptr [{words}]\n", "vmovdqu64 zmm25, zmmword ptr [{others}]\n", rows!($r, scale), minima!($r, $minima),
            "dec {pairs}\n", "jnz 2b\n", rows!($r, total)
        )
    };
}

/// The same of all blocks, in a tall tile.
#[rustfmt::skip]
macro_rules! whole {
    ($r:tt, $codes:ident, $group:tt, $block:ident, $unit:ident, $scale:ident, $words:literal, $n:literal, $end:expr) => {
        concat!(
            products!($r, $codes, $group, begin_first), "mov {groups:e}, {pairs}\n", "jmp 5f\n",
            "2:\n", read_words!(), products!($r, $codes, $group, $unit), "add {words}, 64\nadd {others}, 64\n", "jmp 4f\n",
            "3:\n", read_words!(), products!($r, $codes, $group, $block),
            "4:\n", "add {words}, ", $words, "\nadd {others}, ", $words, "\n", "lea {n}, [{x} + {next_n}]\n", "mov {groups:e}, {pairs}\n", "jmp 5f\n",
            "6:\n", read_words!(), products!($r, $codes, $group, $scale),
            "add {words}, ", $words, "\nadd {others}, ", $words, "\nadd {n}, ", $n, "\n",
            "5:\n", products!($r, $codes, $group, swap_first), "dec {groups:e}\n", "jnz 6b\n",
            next_block!(), "test {block:l}, {in_unit}\n", "jz 2b\n", "jmp 3b\n",
            "9:\n", read_words!(), $end, rows!($r, sum)
        )
    };
    ($r:tt, $codes:ident, $group:tt, true) => {
        whole!(
            $r, $codes, $group, block_first_minima, unit_first_minima, scale_first_minima, "128", "12",
            concat!(rows!($r, scale_at), rows!($r, minima_at))
        )
    };
    ($r:tt, $codes:ident, $group:tt, false) => {
        whole!($r, $codes, $group, block_first, unit_first, scale_first, "64", "8", rows!($r, scale_at))
    };
}

/// What zmm30 and zmm31 are in tiles of a kind. By words of the type: what makes sums signed words, and the low nibble of each byte, or, of groups of 16,
/// [`SWAPPED`]; of folded scales what is taken off the upper word of an input's sums, and the lower word. By words that were made: [`SWAPPED`], and the low
/// nibbles.
#[target_feature(enable = "avx512f")]
#[inline]
fn constants(kind: Kind) -> [__m512i; 2] {
    let nibbles = _mm512_set1_epi32(0x0f0f_0f0f);
    // SAFETY: 64 bytes.
    let swapped = unsafe { _mm512_loadu_si512(SWAPPED.as_ptr().cast()) };
    match (kind.words, kind.group) {
        (Words::Made { .. }, _) => [swapped, nibbles],
        (Words::Folded, _) => [_mm512_set1_epi32(1 << 16), _mm512_set1_epi32(0xffff)],
        (Words::OfType, 16) => [_mm512_set1_epi32(WORD_ZEROS), swapped],
        (Words::OfType, _) => [_mm512_set1_epi32(WORD_ZERO), nibbles],
    }
}

/// Defines a tile of so many rows, of words that the type has.
macro_rules! tile_of_type {
    ($name:ident, $r:tt, $codes:ident, $group:tt, [$($total:tt: $i:tt),*]) => {
        /// A tile of that many rows.
        ///
        /// # Safety
        /// The CPU has the instructions.
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
        unsafe fn $name(t: &mut Tile<'_>) {
            const KIND: Kind = kind!($codes, $group, Words::OfType);
            let [zmm30, zmm31] = constants(KIND);
            // SAFETY: the instructions by the caller's promise; `block` reads what `tile_of` says is there.
            unsafe {
                tile_of::<{ 2 * $r }>(t, KIND, |at, parts| {
                    let [mut first, mut second] = at.lines;
                    let [mut words, mut others] = at.words;
                    let (mut x, mut unit) = (at.x, at.x.wrapping_add(BLOCK));
                    // What inputs have begins with the sums: there are no words of theirs before them.
                    let mut n = unit.wrapping_add(BLOCK / 32 * 4 - 4);
                    let mut groups = BLOCK / 32;
                    std::arch::asm!(
                        // Folded scales have none.
                        "/* {words} {others} */",
                        block_of_type!($r, $codes, $group),
                        first = inout(reg) first, second = inout(reg) second, words = inout(reg) words, others = inout(reg) others,
                        n = inout(reg) n, x = inout(reg) x, unit = inout(reg) unit, groups = inout(reg) groups,
                        row = const KIND.inputs().block_bytes(),
                        $(inout($total) parts[$i],)*
                        out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _, out("zmm6") _,
                        out("zmm7") _, out("zmm24") _, out("zmm25") _, out("zmm26") _,
                        out("zmm27") _, out("zmm28") _, out("zmm29") _, in("zmm30") zmm30, in("zmm31") zmm31,
                        options(nostack, readonly),
                    );
                    let _ = (first, second, words, others, n, x, unit, groups);
                });
            }
        }
    };
}

/// Defines a tile of so many rows that goes over all blocks itself, by such assembly.
macro_rules! tall_tile {
    ($name:ident, $r:tt, $kind:expr, $whole:expr, [$($total:tt: $i:tt),*]) => {
        /// A tile of that many rows.
        ///
        /// # Safety
        /// The CPU has the instructions.
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
        unsafe fn $name(t: &mut Tile<'_>) {
            const KIND: Kind = $kind;
            const PAIRS: usize = BLOCK / (2 * KIND.group);
            type Memory = Around<{ 2 * $r }>;
            let [zmm30, zmm31] = constants(KIND);
            // SAFETY: the instructions by the caller's promise; the tile reads what `tall_of` says is there, and writes the totals and sums, of which there
            // are as many as it says.
            unsafe {
                tall_of::<{ 2 * $r }>(t, KIND, |at, around, parts| {
                    let [mut first, mut second] = at.lines;
                    let [mut words, mut others] = at.words;
                    let (mut x, mut unit, mut block) = (at.x, at.x.wrapping_add(BLOCK), at.block);
                    let (mut n, mut step, mut groups) = (x.wrapping_add(KIND.first_n()), 4usize, 0usize);
                    let around: *mut Memory = around;
                    std::arch::asm!(
                        // What not all kinds have.
                        "/* {unit} {back} {pairs} {begins} {first_n} {next_n} {last_scale} {sums} {next_scale} */",
                        $whole,
                        first = inout(reg) first, second = inout(reg) second, words = inout(reg) words, others = inout(reg) others,
                        n = inout(reg) n, x = inout(reg) x, unit = inout(reg) unit, step = inout(reg) step, groups = inout(reg) groups,
                        block = inout(reg) block, around = in(reg) around, row = const KIND.inputs().block_bytes(), pairs = const PAIRS, in_unit = const KIND.chunk().0 - 1,
                        back = const KIND.last_words(), begins = const KIND.first_n() + 4, first_n = const KIND.first_n(),
                        next_n = const KIND.first_n() - KIND.group, last_scale = const 4 + (PAIRS - 1) * KIND.pair_bytes(),
                        sums = const offset_of!(Memory, sums), end = const offset_of!(Memory, end), unit_blocks = const offset_of!(Memory, unit_blocks),
                        line_skip = const offset_of!(Memory, line_skip), next_x = const offset_of!(Memory, next_x),
                        next_scale = const offset_of!(Memory, next_scale), ask = const offset_of!(Memory, ask),
                        ask_step = const offset_of!(Memory, ask_step), asks = const offset_of!(Memory, asks),
                        $(inout($total) parts[$i],)*
                        out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _, out("zmm6") _,
                        out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _, out("zmm24") _, out("zmm25") _,
                        out("zmm26") _, out("zmm27") _, out("zmm28") _, out("zmm29") _, in("zmm30") zmm30, in("zmm31") zmm31,
                        options(nostack),
                    );
                    let _ = (first, second, words, others, n, x, unit, step, groups, block);
                });
            }
        }
    };
    (five, $kind:expr, $whole:expr) => {
        tall_tile!(five, 5, $kind, $whole, [
            "zmm12": 0, "zmm13": 1, "zmm14": 2, "zmm15": 3, "zmm16": 4, "zmm17": 5, "zmm18": 6, "zmm19": 7, "zmm20": 8, "zmm21": 9
        ]);
    };
    (six, $kind:expr, $whole:expr) => {
        tall_tile!(six, 6, $kind, $whole, [
            "zmm12": 0, "zmm13": 1, "zmm14": 2, "zmm15": 3, "zmm16": 4, "zmm17": 5, "zmm18": 6, "zmm19": 7, "zmm20": 8, "zmm21": 9,
            "zmm22": 10, "zmm23": 11
        ]);
    };
}

/// Defines the tiles of three and four rows of such a kind, in a module.
macro_rules! tiles_of_type {
    ($name:ident, $codes:ident, $group:tt) => {
        mod $name {
            use super::*;
            tile_of_type!(three, 3, $codes, $group, ["zmm16": 0, "zmm17": 1, "zmm18": 2, "zmm19": 3, "zmm20": 4, "zmm21": 5]);
            tile_of_type!(four, 4, $codes, $group, [
                "zmm16": 0, "zmm17": 1, "zmm18": 2, "zmm19": 3, "zmm20": 4, "zmm21": 5, "zmm22": 6, "zmm23": 7
            ]);
            tall_tile!(five, kind!($codes, $group, Words::OfType), whole_of_type!(5, $codes, $group));
            tall_tile!(six, kind!($codes, $group, Words::OfType), whole_of_type!(6, $codes, $group));

            /// Runs that of `r` rows.
            ///
            /// # Safety
            /// The CPU has AVX-512 F, BW and VNNI.
            pub(super) unsafe fn run(r: usize, t: &mut Tile<'_>) {
                // SAFETY: by the caller's promise.
                unsafe {
                    match r {
                        3 => three(t),
                        4 => four(t),
                        5 => five(t),
                        6 => six(t),
                        r => unreachable!("no tile of {r} rows"),
                    }
                }
            }
        }
    };
}

/// Defines a tile of so many rows.
macro_rules! tile {
    ($name:ident, $r:tt, $codes:ident, $group:tt, $minima:tt, [$($total:tt: $i:tt),*]) => {
        /// A tile of that many rows.
        ///
        /// # Safety
        /// The CPU has the instructions.
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
        unsafe fn $name(t: &mut Tile<'_>) {
            const KIND: Kind = kind!($codes, $group, Words::Made { minima: $minima });
            let [zmm30, zmm31] = constants(KIND);
            // SAFETY: the instructions by the caller's promise; `block` reads what `tile_of` says is there, and writes `totals`.
            unsafe {
                tile_of::<{ 2 * $r }>(t, KIND, |at, totals| {
                    let [mut first, mut second] = at.lines;
                    let [mut words, mut others] = at.words;
                    let mut n = at.x.wrapping_add(BLOCK + 4);
                    let (mut x, unit) = (at.x, at.x.wrapping_add(BLOCK));
                    let mut pairs = BLOCK / (2 * KIND.group);
                    std::arch::asm!(
                        rows!($r, clear),
                        block!($r, $codes, $group, $minima),
                        first = inout(reg) first, second = inout(reg) second, words = inout(reg) words, others = inout(reg) others,
                        n = inout(reg) n, x = inout(reg) x, unit = in(reg) unit, pairs = inout(reg) pairs, row = const KIND.inputs().block_bytes(),
                        $(inout($total) totals[$i],)*
                        out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _, out("zmm6") _,
                        out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _, out("zmm12") _,
                        out("zmm13") _, out("zmm14") _, out("zmm15") _, out("zmm24") _, out("zmm25") _, out("zmm26") _,
                        out("zmm27") _, out("zmm28") _, out("zmm29") _, in("zmm30") zmm30, in("zmm31") zmm31,
                        options(nostack),
                    );
                    let _ = (first, second, words, others, n, x, pairs);
                });
            }
        }
    };
}

/// Defines the tiles of one to [`WORD_ROWS`] rows of a kind, in a module.
macro_rules! tiles {
    ($name:ident, $codes:ident, $group:tt, $minima:tt) => {
        mod $name {
            use super::*;
            tile!(one, 1, $codes, $group, $minima, ["zmm16": 0, "zmm17": 1]);
            tile!(two, 2, $codes, $group, $minima, ["zmm16": 0, "zmm17": 1, "zmm18": 2, "zmm19": 3]);
            tile!(three, 3, $codes, $group, $minima, ["zmm16": 0, "zmm17": 1, "zmm18": 2, "zmm19": 3, "zmm20": 4, "zmm21": 5]);
            tile!(four, 4, $codes, $group, $minima, [
                "zmm16": 0, "zmm17": 1, "zmm18": 2, "zmm19": 3, "zmm20": 4, "zmm21": 5, "zmm22": 6, "zmm23": 7
            ]);
            tall_tile!(five, kind!($codes, $group, Words::Made { minima: $minima }), whole!(5, $codes, $group, $minima));
            tall_tile!(six, kind!($codes, $group, Words::Made { minima: $minima }), whole!(6, $codes, $group, $minima));

            /// Runs that of `r` rows.
            ///
            /// # Safety
            /// The CPU has AVX-512 F, BW and VNNI.
            pub(super) unsafe fn run(r: usize, t: &mut Tile<'_>) {
                // SAFETY: by the caller's promise.
                unsafe {
                    match r {
                        1 => one(t),
                        2 => two(t),
                        3 => three(t),
                        4 => four(t),
                        5 => five(t),
                        6 => six(t),
                        r => unreachable!("no tile of {r} rows"),
                    }
                }
            }
        }
    };
}

tiles!(nibbles32, nibbles, 32, false);
tiles!(nibbles32_minima, nibbles, 32, true);
tiles!(bytes32, bytes, 32, false);
tiles!(bytes32_minima, bytes, 32, true);
tiles!(bytes16, bytes, 16, false);
tiles!(bytes16_minima, bytes, 16, true);
tiles_of_type!(nibbles32_of_type, nibbles, 32);
tiles_of_type!(bytes32_of_type, bytes, 32);
tiles_of_type!(bytes16_of_type, bytes, 16);
tiles_of_type!(bytes_folded, bytes, folded);

/// Runs a tile of `r` rows x two panels over lines in the cache, or nibbles that are packed. The tile's `panel` is what [`Prepare`] made.
///
/// # Safety
/// The CPU has AVX-512 F, BW and VNNI.
pub(crate) unsafe fn run(kind: Kind, r: usize, mut t: Tile<'_>) {
    let run = match (kind.nibbles, kind.group, kind.words) {
        (true, 32, Words::OfType) => nibbles32_of_type::run,
        (false, 32, Words::OfType) => bytes32_of_type::run,
        (false, 16, Words::OfType) => bytes16_of_type::run,
        (false, 16, Words::Folded) => bytes_folded::run,
        (true, 32, Words::Made { minima: false }) => nibbles32::run,
        (true, 32, Words::Made { minima: true }) => nibbles32_minima::run,
        (false, 32, Words::Made { minima: false }) => bytes32::run,
        (false, 32, Words::Made { minima: true }) => bytes32_minima::run,
        (false, 16, Words::Made { minima: false }) => bytes16::run,
        (false, 16, Words::Made { minima: true }) => bytes16_minima::run,
        _ => unreachable!("no tile of {kind:?}"),
    };
    // SAFETY: by the caller's promise.
    unsafe { run(r, &mut t) }
}

/// Goes over the blocks of a tile; `N` is rows times panels, and `block` adds the products of a block to that many sums.
///
/// # Safety
/// The CPU has AVX-512 F. `block` reads the lines of a block of each panel, the words of its groups, and the blocks of all rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[inline]
unsafe fn tile_of<const N: usize>(t: &mut Tile<'_>, kind: Kind, block: impl Fn(Block, &mut [__m512; N])) {
    let rows = N / P;
    let (row_bytes, block_bytes) = (kind.inputs().block_bytes(), kind.line_bytes());
    let (chunk_blocks, chunk_bytes, words_bytes) = kind.chunk();
    assert!(t.first_block.is_multiple_of(chunk_blocks));
    t.check_words((rows, P), block_bytes, t.blocks.div_ceil(chunk_blocks) * chunk_bytes, row_bytes);
    let out = t.out.as_mut_ptr();
    let masks = t.masks();
    for tile in 0..t.row_tiles {
        let first = tile * rows;
        let mut parts = [_mm512_setzero_ps(); N];
        let mut totals = parts;
        let mut line = t.weights.as_ptr();
        let mut x = t.inputs.as_ptr().wrapping_add(first * row_bytes);
        let mut words = t.panel.as_ptr();
        let mut units = words;
        let of_both = |at: *const u8, stride: usize| [at, at.wrapping_add(stride)];
        let out_at = |r: usize, p: usize| out.wrapping_add((first + r) * t.out_stride + p * PANEL);
        if t.first_block > 0 {
            for (r, totals) in totals.as_chunks_mut::<P>().0.iter_mut().enumerate() {
                for (p, total) in totals.iter_mut().enumerate() {
                    // SAFETY: `check_words` saw that `width` outputs of all rows fit; lanes beyond are masked off and not touched.
                    *total = unsafe { _mm512_maskz_loadu_ps(masks[p], out_at(r, p)) };
                }
            }
        }
        for i in 0..t.blocks {
            t.later.ask();
            if i & (chunk_blocks - 1) == 0 {
                units = words;
                words = words.wrapping_add(LINE);
            }
            block(
                Block { lines: of_both(line, t.weight_stride), words: of_both(words, t.panel_stride), x },
                &mut parts,
            );
            words = words.wrapping_add(words_bytes);
            if i + 1 == t.blocks || (i + 1) & (chunk_blocks - 1) == 0 {
                // SAFETY: the units of both panels, which are a line before the words of a chunk.
                let units = of_both(units, t.panel_stride).map(|at| unsafe { _mm512_loadu_ps(at.cast()) });
                for (totals, parts) in totals.as_chunks_mut::<P>().0.iter_mut().zip(parts.as_chunks_mut::<P>().0) {
                    for p in 0..P {
                        let part = std::mem::replace(&mut parts[p], _mm512_setzero_ps());
                        totals[p] = _mm512_fmadd_ps(part, units[p], totals[p]);
                    }
                }
            }
            line = line.wrapping_add(block_bytes);
            // No division: the next lines would wait for it.
            if (t.first_block + i + 1) & (t.unit - 1) == 0 {
                line = line.wrapping_add(t.line_skip);
            }
            x = x.wrapping_add(t.input_stride);
        }
        for (r, totals) in totals.as_chunks::<P>().0.iter().enumerate() {
            for (p, total) in totals.iter().enumerate() {
                // SAFETY: as above.
                unsafe { _mm512_mask_storeu_ps(out_at(r, p), masks[p], *total) };
            }
        }
    }
}

/// The same of a tall tile: `whole` goes over the blocks, and leaves the sums of the last unit.
///
/// # Safety
/// The CPU has AVX-512 F. `whole` reads the lines of all blocks of each panel, their words and units, and the blocks of all rows; it writes the totals.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[inline]
unsafe fn tall_of<const N: usize>(
    t: &mut Tile<'_>,
    kind: Kind,
    whole: impl Fn(Whole, &mut Around<N>, &mut [__m512; N]),
) {
    let rows = N / P;
    let (row_bytes, block_bytes) = (kind.inputs().block_bytes(), kind.line_bytes());
    let (chunk_blocks, chunk_bytes, words_bytes) = kind.chunk();
    assert!(t.first_block.is_multiple_of(chunk_blocks));
    let chunks = t.blocks.div_ceil(chunk_blocks);
    t.check_words((rows, P), block_bytes, chunks * chunk_bytes, row_bytes);
    let masks = t.masks();
    let of_both = |at: *const u8, stride: usize| [at, at.wrapping_add(stride)];
    let last_scale = (BLOCK / 32 - 1) * 4;
    // SAFETY: the last units of both panels.
    let units = of_both(t.panel[(chunks - 1) * chunk_bytes..].as_ptr(), t.panel_stride)
        .map(|at| unsafe { _mm512_loadu_ps(at.cast()) });
    let mut around = Around {
        totals: [_mm512_setzero_ps(); N],
        sums: [_mm512_setzero_ps(); N],
        end: t.first_block + t.blocks,
        unit_blocks: t.unit - 1,
        line_skip: t.line_skip,
        next_x: t.input_stride.wrapping_sub(BLOCK),
        next_scale: t.input_stride.wrapping_sub(last_scale),
        ask: std::ptr::null(),
        ask_step: 0,
        asks: 0,
    };
    for tile in 0..t.row_tiles {
        let first = tile * rows;
        let out = t.out.as_mut_ptr().wrapping_add(first * t.out_stride);
        let out_at = |r: usize, p: usize| out.wrapping_add(r * t.out_stride + p * PANEL);
        if t.first_block > 0 {
            for (r, totals) in around.totals.as_chunks_mut::<P>().0.iter_mut().enumerate() {
                for (p, total) in totals.iter_mut().enumerate() {
                    // SAFETY: `check_words` saw that `width` outputs of all rows fit; lanes beyond are masked off and not touched.
                    *total = unsafe { _mm512_maskz_loadu_ps(masks[p], out_at(r, p)) };
                }
            }
        } else {
            around.totals = [_mm512_setzero_ps(); N];
        }
        // What comes later is asked for with each block, from the second one on; where a range of it ends meanwhile, a few lines beyond that, too.
        let mut left = t.blocks * t.later.rows();
        around.asks = 0;
        while let Some(rows) = t.later.take(left) {
            left -= rows.rows;
            let now = if around.asks > 0 { rows } else { Rows { rows: 1, ..rows } };
            now.ask(Level::First);
            if rows.rows > now.rows {
                around.ask = rows.at.wrapping_add(rows.next);
                (around.ask_step, around.asks) = (rows.step, rows.lines);
            }
        }
        if matches!(kind.words, Words::Made { .. }) {
            around.sums = [_mm512_setzero_ps(); N];
        }
        let mut parts = [_mm512_setzero_ps(); N];
        let at = Whole {
            lines: of_both(t.weights.as_ptr(), t.weight_stride),
            words: of_both(t.panel.as_ptr().wrapping_add(if words_bytes > 0 { LINE } else { 0 }), t.panel_stride),
            x: t.inputs.as_ptr().wrapping_add(first * row_bytes),
            block: t.first_block,
        };
        whole(at, &mut around, &mut parts);
        for (r, (totals, parts)) in around.totals.as_chunks::<P>().0.iter().zip(parts.as_chunks::<P>().0).enumerate() {
            for p in 0..P {
                // SAFETY: as above.
                unsafe {
                    _mm512_mask_storeu_ps(out_at(r, p), masks[p], _mm512_fmadd_ps(parts[p], units[p], totals[p]))
                };
            }
        }
    }
}

impl Tile<'_> {
    /// Which outputs of each panel there are.
    fn masks(&self) -> [u16; P] {
        std::array::from_fn(|p| match self.width.saturating_sub(p * PANEL) {
            PANEL.. => !0,
            n => (1 << n) - 1,
        })
    }

    /// Checks that everything is there that tiles of `rows` rows and `panels` panels read and write, if a block of lines has `block_bytes`, a block of inputs `input_bytes`, and
    /// words are `words` bytes for each panel.
    fn check_words(&self, (rows, panels): (usize, usize), block_bytes: usize, words: usize, input_bytes: usize) {
        assert!(self.blocks > 0 && self.row_tiles > 0);
        let rows = rows * self.row_tiles;
        let lines = self.lines_before(self.blocks - 1, block_bytes) + block_bytes;
        assert!(self.weights.len() >= (panels - 1) * self.weight_stride + lines);
        assert!(self.panel.len() >= (panels - 1) * self.panel_stride + words);
        assert!(self.inputs.len() >= (self.blocks - 1) * self.input_stride + rows * input_bytes);
        assert!(self.width <= panels * PANEL && self.out.len() >= (rows - 1) * self.out_stride + self.width);
    }
}
