//! Many rows of integers whose groups of columns have integer scales, or get them: their tiles, by hand.
//!
//! **Types that have them** (Q3_K, Q4_K, Q6_K): sums of products are words, multiplied by scales of one or two groups, become F32, and are scaled once more for
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
//! when lines are unpacked ([`Prepare`], [`PrepareSupers`]).

#![allow(unsafe_code)] // kernel

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

use kt_core::cpu::input::{BLOCK, InputLayout, Sums, WORD_ZERO, WORD_ZEROS};

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

/// The largest word: sums of a block are dwords, of products with words that are 2^15 at most, and of minima with the sums of codes.
const fn most(group: usize) -> i32 {
    if group == 16 { 7700 } else { 14000 }
}

/// Unpacks the lines of a block, whose scales are for words.
#[inline(always)]
fn unpack<I: Isa, L: Codes, const G: usize>(isa: I, layout: &Layout, panel: &[u8], block: usize, to: &mut [u8]) {
    let step = layout.step();
    let from = &panel[spread(layout.lines_at(block), step)..];
    let scales = &mut Scales { panel, step, record: 0, left: 0, group: 0, above: 0, small: 0, zero: 0 };
    Unpack::<L, NoScale, G, false> { from, scales, to, kind: PhantomData }.go(isa);
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
        let most = isa.splat_f32(const { most(G) } as f32);
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
                    unpack::<I, L, G>(isa, layout, panel, block, to);
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
                    unpack::<I, L, G>(isa, layout, panel, block, &mut *to);
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
    /// Their words; of tall tiles by words of the type those of the last group before.
    words: [*const u8; P],
    /// The block of the first row.
    x: *const u8,
    /// Of tall tiles by words of the type: the first row's scale of the last group before, bytes from there to that of the first one, and whether that is the
    /// first of a unit.
    scale: *const u8,
    /// See `scale`.
    step: usize,
    /// See `scale`.
    begins: bool,
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
            "vpxord ", $a, ", ", $a, ", zmm30\n", "vpxord ", $b, ", ", $b, ", zmm30\n", "vpmaddwd ", $a, ", ", $a, ", zmmword ptr [{words}]\n",
            "vpmaddwd ", $b, ", ", $b, ", zmmword ptr [{others}]\n", row!(of_type_end, $r, $a, $b, $s, $t, $p, $q, $x)
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
            "vmovaps ", $x, ", zmmword ptr [{totals} + ", $r, "*128]\n", "vfmadd132ps ", $p, ", ", $x, ", zmmword ptr [{words} - {back}]\n",
            "vmovaps zmmword ptr [{totals} + ", $r, "*128], ", $p, "\n", "vpxord ", $p, ", ", $p, ", ", $p, "\n",
            "vmovaps ", $x, ", zmmword ptr [{totals} + ", $r, "*128 + 64]\n", "vfmadd132ps ", $q, ", ", $x, ", zmmword ptr [{others} - {back}]\n",
            "vmovaps zmmword ptr [{totals} + ", $r, "*128 + 64], ", $q, "\n", "vpxord ", $q, ", ", $q, ", ", $q, "\n"
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
            row!(scale_at, $r, $a, $b, $s, $t, $p, $q, $x), "vpbroadcastd ", $x, ", dword ptr [{n} + 8 + ", $r, "*{row}]\n",
            "vpdpwssd ", $s, ", ", $x, ", zmmword ptr [{words} + 64]\n", "vpdpwssd ", $t, ", ", $x, ", zmmword ptr [{others} + 64]\n",
            "vpbroadcastd ", $a, ", dword ptr [{n} + 12 + 4 + ", $r, "*{row}]\n", "vmovdqa64 ", $b, ", ", $a, "\n", row!(first, $r, $a, $b, $s, $t, $p, $q, $x)
        )
    };
    (scale_at, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            "vpbroadcastd ", $x, ", dword ptr [{n} + ", $r, "*{row}]\n", "vpmulhrsw ", $a, ", ", $a, ", ", $x, "\n", "vpmulhrsw ", $b, ", ", $b, ", ", $x, "\n",
            "vpdpwssd ", $s, ", ", $a, ", zmmword ptr [{words}]\n", "vpdpwssd ", $t, ", ", $b, ", zmmword ptr [{others}]\n"
        )
    };
    // The same with totals in memory, at `{totals}`.
    (total_in_memory, $r:literal, $a:literal, $b:literal, $s:literal, $t:literal, $p:literal, $q:literal, $x:literal) => {
        concat!(
            "vbroadcastss ", $x, ", dword ptr [{unit} + ", $r, "*{row}]\n", "vcvtdq2ps ", $s, ", ", $s, "\n", "vcvtdq2ps ", $t, ", ", $t, "\n",
            "vfmadd213ps ", $s, ", ", $x, ", zmmword ptr [{totals} + ", $r, "*128]\n",
            "vfmadd213ps ", $t, ", ", $x, ", zmmword ptr [{totals} + ", $r, "*128 + 64]\n",
            "vmovaps zmmword ptr [{totals} + ", $r, "*128], ", $s, "\n", "vmovaps zmmword ptr [{totals} + ", $r, "*128 + 64], ", $t, "\n"
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

/// The parts of [`block_of_type`], by words that the type has or of folded scales: what rows begin with; the products of 32 columns after that (first), or
/// with what is due after the 32 before them and what they begin with done row by row (next, and where the 32 before them end a unit); what is due after the
/// last ones; going on to the next scales.
#[rustfmt::skip]
macro_rules! of_type {
    (begin, $r:tt, folded) => { rows!($r, folded_begin) };
    (begin, $r:tt, $group:tt) => { rows!($r, begin) };
    (next, $r:tt, $codes:ident, folded) => { columns!($r, $codes, folded, folded_first) };
    (next, $r:tt, $codes:ident, $group:tt) => { columns!($r, $codes, $group, of_type_first) };
    (next_unit, $r:tt, $codes:ident, folded) => { columns!($r, $codes, folded, folded_unit_first) };
    (next_unit, $r:tt, $codes:ident, $group:tt) => { columns!($r, $codes, $group, of_type_unit_first) };
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
    (step_unit, folded) => { of_type!(step, folded) };
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

/// The same in a tall tile: what is due after a group is done with the first line of the next one, row by row, be that of the next block. All at once it
/// would take the place of products, of which there are as many as all else together. What is due after the last group is left to do.
#[rustfmt::skip]
macro_rules! tall_block_of_type {
    ($r:tt, $codes:ident, $group:tt) => {
        concat!(
            "test {begins:e}, {begins:e}\n", "jz 2f\n", of_type!(next_unit, $r, $codes, $group), of_type!(step_unit, $group), "dec {groups}\n",
            "2:\n", of_type!(next, $r, $codes, $group), of_type!(step, $group), "dec {groups}\n", "jnz 2b\n"
        )
    };
}

/// The same by words that were made.
#[rustfmt::skip]
macro_rules! block {
    (tall $r:tt, $codes:ident, $group:tt, $minima:tt, $op:ident, $after:literal) => {
        concat!(
            products!($r, $codes, $group, begin_first), products!($r, $codes, $group, swap_first), "dec {pairs}\n", "2:\n",
            products!($r, $codes, $group, $op), $after, products!($r, $codes, $group, swap_first), "dec {pairs}\n", "jnz 2b\n",
            "vmovdqu64 zmm24, zmmword ptr [{words}]\n", "vmovdqu64 zmm25, zmmword ptr [{others}]\n", rows!($r, scale), minima!($r, $minima),
            rows!($r, total_in_memory)
        )
    };
    (tall $r:tt, $codes:ident, $group:tt, true) => {
        block!(tall $r, $codes, $group, true, scale_first_minima, "add {words}, 128\nadd {others}, 128\nadd {n}, 12\n")
    };
    (tall $r:tt, $codes:ident, $group:tt, false) => {
        block!(tall $r, $codes, $group, false, scale_first, "add {words}, 64\nadd {others}, 64\nadd {n}, 8\n")
    };
    (5, $codes:ident, $group:tt, $minima:tt) => {
        block!(tall 5, $codes, $group, $minima)
    };
    (6, $codes:ident, $group:tt, $minima:tt) => {
        block!(tall 6, $codes, $group, $minima)
    };
    ($r:tt, $codes:ident, $group:tt, $minima:tt) => {
        concat!(
            "2:\n", rows!($r, begin), products!($r, $codes, $group, first), rows!($r, swap), products!($r, $codes, $group, first),
            "vmovdqu64 zmm24, zmmword ptr [{words}]\n", "vmovdqu64 zmm25, zmmword ptr [{others}]\n", rows!($r, scale), minima!($r, $minima),
            "dec {pairs}\n", "jnz 2b\n", rows!($r, total)
        )
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

/// What sums of products are by words of the type if no products were added.
#[target_feature(enable = "avx512f")]
#[inline]
fn nothing_due(kind: Kind) -> __m512i {
    match (kind.words, kind.group) {
        (Words::OfType, _) => constants(kind)[0],
        _ => _mm512_setzero_si512(),
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
                tile_of::<{ 2 * $r }, true, false>(t, KIND, |at, [_, parts, _]| {
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
                }, |_, _, _| ());
            }
        }
    };
}

/// Defines a tall one.
macro_rules! tall_tile_of_type {
    ($name:ident, $r:tt, $codes:ident, $group:tt, [$($sum:tt $total:tt: $i:tt),*]) => {
        /// A tile of that many rows.
        ///
        /// # Safety
        /// The CPU has the instructions.
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
        unsafe fn $name(t: &mut Tile<'_>) {
            const KIND: Kind = kind!($codes, $group, Words::OfType);
            let [zmm30, zmm31] = constants(KIND);
            // SAFETY: the instructions by the caller's promise; `block` and `end` read what `tile_of` says is there, and write the totals, of which there are
            // as many as it says.
            unsafe {
                tile_of::<{ 2 * $r }, true, true>(t, KIND, |at, [due, parts, totals]| {
                    let [mut first, mut second] = at.lines;
                    let [mut words, mut others] = at.words;
                    let (mut x, mut unit, mut step) = (at.x, at.scale, at.step);
                    // What inputs have begins with the sums: there are no words of theirs before them.
                    let mut n = x.wrapping_add(BLOCK + BLOCK / 32 * 4 - 4);
                    let mut groups = BLOCK / 32;
                    std::arch::asm!(
                        tall_block_of_type!($r, $codes, $group),
                        first = inout(reg) first, second = inout(reg) second, words = inout(reg) words, others = inout(reg) others,
                        n = inout(reg) n, x = inout(reg) x, unit = inout(reg) unit, step = inout(reg) step, groups = inout(reg) groups,
                        begins = in(reg) u32::from(at.begins), totals = in(reg) totals.as_mut_ptr(),
                        row = const KIND.inputs().block_bytes(), back = const KIND.chunk().2 * (SUPER / BLOCK),
                        $(inout($sum) due[$i], inout($total) parts[$i],)*
                        out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _, out("zmm28") _, out("zmm29") _, in("zmm30") zmm30, in("zmm31") zmm31,
                        options(nostack),
                    );
                    let _ = (first, second, words, others, n, x, unit, step, groups);
                }, |[words, others], unit, [due, parts]| {
                    std::arch::asm!(
                        "/* {words} {others} */",
                        of_type!(end, $r, $group),
                        words = in(reg) words, others = in(reg) others, unit = in(reg) unit, row = const KIND.inputs().block_bytes(),
                        $(inout($sum) due[$i], inout($total) parts[$i],)*
                        out("zmm24") _, out("zmm25") _, out("zmm28") _, out("zmm29") _, in("zmm30") zmm30, in("zmm31") zmm31,
                        options(nostack, readonly),
                    );
                });
            }
        }
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
            tall_tile_of_type!(five, 5, $codes, $group, [
                "zmm0" "zmm12": 0, "zmm1" "zmm13": 1, "zmm2" "zmm14": 2, "zmm3" "zmm15": 3, "zmm4" "zmm16": 4, "zmm5" "zmm17": 5,
                "zmm6" "zmm18": 6, "zmm7" "zmm19": 7, "zmm8" "zmm20": 8, "zmm9" "zmm21": 9
            ]);
            tall_tile_of_type!(six, 6, $codes, $group, [
                "zmm0" "zmm12": 0, "zmm1" "zmm13": 1, "zmm2" "zmm14": 2, "zmm3" "zmm15": 3, "zmm4" "zmm16": 4, "zmm5" "zmm17": 5,
                "zmm6" "zmm18": 6, "zmm7" "zmm19": 7, "zmm8" "zmm20": 8, "zmm9" "zmm21": 9, "zmm10" "zmm22": 10, "zmm11" "zmm23": 11
            ]);

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
    ($name:ident, $r:tt, $codes:ident, $group:tt, $minima:tt, [$($total:tt: $i:tt),*] $($other:tt)*) => {
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
                tile_of::<{ 2 * $r }, false, false>(t, KIND, |at, [_, totals, _]| {
                    let [mut first, mut second] = at.lines;
                    let [mut words, mut others] = at.words;
                    let mut n = at.x.wrapping_add(BLOCK + 4);
                    let (mut x, unit) = (at.x, at.x.wrapping_add(BLOCK));
                    let mut pairs = BLOCK / (2 * KIND.group);
                    std::arch::asm!(
                        // Not all tiles have it.
                        "/* {totals} */",
                        rows!($r, clear),
                        block!($r, $codes, $group, $minima),
                        first = inout(reg) first, second = inout(reg) second, words = inout(reg) words, others = inout(reg) others,
                        n = inout(reg) n, x = inout(reg) x, unit = in(reg) unit, pairs = inout(reg) pairs, row = const KIND.inputs().block_bytes(),
                        totals = in(reg) totals.as_mut_ptr(),
                        $(inout($total) totals[$i],)*
                        out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _, out("zmm6") _,
                        out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _, out("zmm12") _,
                        out("zmm13") _, out("zmm14") _, out("zmm15") _, $(out($other) _,)* out("zmm24") _, out("zmm25") _, out("zmm26") _,
                        out("zmm27") _, out("zmm28") _, out("zmm29") _, in("zmm30") zmm30, in("zmm31") zmm31,
                        options(nostack),
                    );
                    let _ = (first, second, words, others, n, x, pairs);
                }, |_, _, _| ());
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
            tile!(five, 5, $codes, $group, $minima, []
                "zmm16" "zmm17" "zmm18" "zmm19" "zmm20" "zmm21" "zmm22" "zmm23");
            tile!(six, 6, $codes, $group, $minima, []
                "zmm16" "zmm17" "zmm18" "zmm19" "zmm20" "zmm21" "zmm22" "zmm23");

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

/// Goes over the blocks of a tile; `N` is rows times panels, and `block` adds the products of a block to that many sums, the second of what it is given.
/// `KEPT`: there are registers for totals, which else are added to the output with each unit. `LATE`: what is due after the last group of a block, `block`
/// does with the next one, and `end` after the last; meanwhile its sums of products are the first of what they are given. Then it also adds the sums to the
/// totals, the third, times a unit, with the block after that.
///
/// # Safety
/// The CPU has AVX-512 F. `block` reads the lines of a block of each panel, the words of its groups, or from those of the last group before on, with their
/// unit if that ends, and the blocks of all rows, with the scales of the last group before. So does `end`, of the last group.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[inline]
unsafe fn tile_of<const N: usize, const KEPT: bool, const LATE: bool>(
    t: &mut Tile<'_>,
    kind: Kind,
    block: impl Fn(Block, [&mut [__m512; N]; 3]),
    end: impl Fn([*const u8; P], *const u8, [&mut [__m512; N]; 2]),
) {
    let rows = N / P;
    let (row_bytes, block_bytes) = (kind.inputs().block_bytes(), kind.line_bytes());
    let (chunk_blocks, chunk_bytes, words_bytes) = kind.chunk();
    assert!(t.first_block.is_multiple_of(chunk_blocks));
    t.check_words(rows, block_bytes, t.blocks.div_ceil(chunk_blocks) * chunk_bytes, row_bytes);
    let out = t.out.as_mut_ptr();
    // Which outputs of a panel there are.
    let masks: [u16; P] = std::array::from_fn(|p| match t.width.saturating_sub(p * PANEL) {
        PANEL.. => !0,
        n => (1 << n) - 1,
    });
    for tile in 0..t.row_tiles {
        let first = tile * rows;
        let mut parts = [_mm512_setzero_ps(); N];
        let mut totals = parts;
        // Such that nothing is due before the first group.
        let mut due = [_mm512_castsi512_ps(nothing_due(kind)); N];
        let mut line = t.weights.as_ptr();
        let mut x = t.inputs.as_ptr().wrapping_add(first * row_bytes);
        let mut words = t.panel.as_ptr();
        let mut units = words;
        // Before the first group as well there are a line and the scale of a group to read.
        let (mut before, mut scale, mut step) = (words, x.wrapping_add(BLOCK), 0);
        let of_both = |at: *const u8, stride: usize| [at, at.wrapping_add(stride)];
        let out_at = |r: usize, p: usize| out.wrapping_add((first + r) * t.out_stride + p * PANEL);
        if KEPT && t.first_block > 0 {
            for (r, totals) in totals.as_chunks_mut::<P>().0.iter_mut().enumerate() {
                for (p, total) in totals.iter_mut().enumerate() {
                    // SAFETY: `check_words` saw that `width` outputs of all rows fit; lanes beyond are masked off and not touched.
                    *total = unsafe { _mm512_maskz_loadu_ps(masks[p], out_at(r, p)) };
                }
            }
        }
        for i in 0..t.blocks {
            t.later.ask();
            let begins = i & (chunk_blocks - 1) == 0;
            if begins {
                units = words;
                words = words.wrapping_add(LINE);
            }
            let at = Block {
                lines: of_both(line, t.weight_stride),
                words: of_both(if LATE { before } else { words }, t.panel_stride),
                x,
                scale,
                step,
                begins: begins && i > 0,
            };
            block(at, [&mut due, &mut parts, &mut totals]);
            words = words.wrapping_add(words_bytes);
            let last = i + 1 == t.blocks;
            if LATE {
                before = words.wrapping_sub(LINE);
                scale = x.wrapping_add(BLOCK + (BLOCK / 32 - 1) * 4);
                step = t.input_stride.wrapping_sub((BLOCK / 32 - 1) * 4);
                if last {
                    end(of_both(before, t.panel_stride), scale, [&mut due, &mut parts]);
                }
            }
            if last || !LATE && (i + 1) & (chunk_blocks - 1) == 0 {
                // SAFETY: the units of both panels, which are a line before the words of a chunk.
                let units = of_both(units, t.panel_stride).map(|at| unsafe { _mm512_loadu_ps(at.cast()) });
                let begun = if t.first_block + i >= chunk_blocks { masks } else { [0; P] };
                let rows = totals.as_chunks_mut::<P>().0.iter_mut().zip(parts.as_chunks_mut::<P>().0);
                for (r, (totals, parts)) in rows.enumerate() {
                    for p in 0..P {
                        let part = std::mem::replace(&mut parts[p], _mm512_setzero_ps());
                        if KEPT {
                            totals[p] = _mm512_fmadd_ps(part, units[p], totals[p]);
                            continue;
                        }
                        let out = out_at(r, p);
                        // SAFETY: as above.
                        unsafe {
                            let before = _mm512_maskz_loadu_ps(begun[p], out);
                            _mm512_mask_storeu_ps(out, masks[p], _mm512_fmadd_ps(part, units[p], before));
                        }
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
        if KEPT {
            for (r, totals) in totals.as_chunks::<P>().0.iter().enumerate() {
                for (p, total) in totals.iter().enumerate() {
                    // SAFETY: as above.
                    unsafe { _mm512_mask_storeu_ps(out_at(r, p), masks[p], *total) };
                }
            }
        }
    }
}

impl Tile<'_> {
    /// Checks that everything is there that tiles of `rows` rows read and write, if a block of lines has `block_bytes`, a block of inputs `input_bytes`, and
    /// words are `words` bytes for each panel.
    fn check_words(&self, rows: usize, block_bytes: usize, words: usize, input_bytes: usize) {
        assert!(self.blocks > 0 && self.row_tiles > 0);
        let rows = rows * self.row_tiles;
        let lines = self.lines_before(self.blocks - 1, block_bytes) + block_bytes;
        assert!(self.weights.len() >= (P - 1) * self.weight_stride + lines);
        assert!(self.panel.len() >= (P - 1) * self.panel_stride + words);
        assert!(self.inputs.len() >= (self.blocks - 1) * self.input_stride + rows * input_bytes);
        assert!(self.width <= P * PANEL && self.out.len() >= (rows - 1) * self.out_stride + self.width);
    }
}
