//! Tiles of words that were made, whose sums of products fill the registers, and all else is in memory: six rows and a panel with registers of 256 bits, of which there are 16; six rows and four
//! panels with those of 512 where loads take the time of products, as such tiles load least. Codes are bytes of a line. The numbers are those of the other tiles, bit for bit.

#![allow(unsafe_code)] // kernel

use std::arch::asm;
use std::mem::offset_of;

use super::{CHUNK_BLOCKS, chunk_bytes, lines_of};
use crate::ahead::Rows;
use crate::isa::{Isa, Job};
use crate::layout::{LINE, PANEL};
use crate::tile::{SWAPPED, Tile};
use kt_core::cpu::input::{BLOCK, InputLayout};

/// Rows of the largest tile.
pub(crate) const ROWS: usize = 6;

/// What a tile of `R` rows and `P` panels has in memory.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Memory<const R: usize, const P: usize> {
    /// Sums of the blocks of a unit.
    sums: [[[f32; PANEL]; P]; R],
    /// Sums of the groups of a block.
    products: [[[i32; PANEL]; P]; R],
    /// The order of bytes in which the words of a dword have changed places.
    swapped: [u8; LINE],
}

/// Blocks that share a unit.
#[derive(Debug, Clone, Copy)]
pub struct Unit {
    /// The first line of the first panel, and the words of its first groups.
    line: *const u8,
    words: *const u8,
    /// Bytes from these to those of the next panel.
    stride: usize,
    /// The first block of the first row, and bytes from there to the next block.
    x: *const u8,
    next_x: usize,
    /// How many blocks.
    blocks: usize,
    /// What to ask for meanwhile, a row with each block, in the order of addresses.
    hints: Rows,
}

/// What depends on the registers: instructions; registers for what is broadcast, for sums of groups, and for the order of bytes; and where register `$h` of a row is of what is at `$at`
/// for the first one.
#[rustfmt::skip]
macro_rules! of {
    (ymm, dot) => { "{{vex}} vpdpbusd " };
    (zmm, dot) => { "vpdpbusd " };
    (ymm, dot_words) => { "{{vex}} vpdpwssd " };
    (zmm, dot_words) => { "vpdpwssd " };
    (ymm, x) => { "ymm14" };
    (zmm, x) => { "zmm28" };
    (ymm, sum) => { "ymm15" };
    (zmm, sum) => { "zmm29" };
    // Not needed together.
    (ymm, swapped) => { "ymm15" };
    (zmm, swapped) => { "zmm30" };
    (ymm, $at:literal, $h:literal) => { concat!("ymmword ptr [", $at, " + 32*", $h) };
    (zmm, $at:literal, 0) => { concat!("zmmword ptr [", $at) };
    (zmm, $at:literal, 1) => { concat!("zmmword ptr [", $at, " + {stride}") };
    (zmm, $at:literal, 2) => { concat!("zmmword ptr [", $at, " + 2*{stride}") };
    (zmm, $at:literal, 3) => { concat!("zmmword ptr [", $at, " + {three}") };
}

/// Register `$h` of row `$r` in a tile's memory.
macro_rules! kept {
    (ymm, $of:literal, $r:literal, $h:literal) => {
        concat!("ymmword ptr [{around} + ", $of, " + 64*", $r, " + 32*", $h, "]")
    };
    (zmm, $of:literal, $r:literal, $h:literal) => {
        concat!("zmmword ptr [{around} + ", $of, " + 256*", $r, " + 64*", $h, "]")
    };
}

/// The instructions for a row: its number, its sums of products, and beside each a register for lines and words, and its number in the row. `$p` is which two groups of the block they are of.
#[rustfmt::skip]
macro_rules! row {
    ($w:ident, begin, $p:literal, $r:literal, [$($s:literal, $l:literal, $h:tt);*]) => {
        concat!(
            "vpbroadcastd ", of!($w, x), ", dword ptr [{x} + {begins} + ", $p, "*{pair} + ", $r, "*{row}]\n", $("vmovaps ", $s, ", ", of!($w, x), "\n"),*
        )
    };
    // The first sum goes above what the second one begins with.
    ($w:ident, swap, $p:literal, $r:literal, [$($s:literal, $l:literal, $h:tt);*]) => {
        concat!($("vpshufb ", $s, ", ", $s, ", ", of!($w, swapped), "\n"),*)
    };
    ($w:ident, dot, $p:literal, $r:literal, [$($s:literal, $l:literal, $h:tt);*]) => {
        concat!(
            "vpbroadcastd ", of!($w, x), ", dword ptr [{x} + \\k + ", $r, "*{row}]\n", $(of!($w, dot), $s, ", ", $l, ", ", of!($w, x), "\n"),*
        )
    };
    ($w:ident, begin_dot, $p:literal, $r:literal, $of:tt) => { concat!(row!($w, begin, $p, $r, $of), row!($w, dot, $p, $r, $of)) };
    ($w:ident, swap_dot, $p:literal, $r:literal, $of:tt) => { concat!(row!($w, swap, $p, $r, $of), row!($w, dot, $p, $r, $of)) };
    // Times the scales of the inputs; then, if there are minima, what these are multiplied with.
    ($w:ident, scale, $minima:ident, $p:literal, $r:literal, [$($s:literal, $l:literal, $h:tt);*]) => {
        concat!(
            "vpbroadcastd ", of!($w, x), ", dword ptr [{x} + {begins} - 4 + ", $p, "*{pair} + ", $r, "*{row}]\n",
            $("vpmulhrsw ", $s, ", ", $s, ", ", of!($w, x), "\n"),*, row!($w, minima, $minima, $p, $r)
        )
    };
    ($w:ident, minima, false, $p:literal, $r:literal) => { "" };
    ($w:ident, minima, true, $p:literal, $r:literal) => {
        concat!("vpbroadcastd ", of!($w, x), ", dword ptr [{x} + {begins} + 4 + ", $p, "*{pair} + ", $r, "*{row}]\n")
    };
    // To sums of none or some groups before, the products with the words of the weights.
    ($w:ident, none, $r:literal, $s:literal, $l:literal, $h:tt) => { concat!("vpmaddwd ", of!($w, sum), ", ", $s, ", ", $l, "\n") };
    ($w:ident, some, $r:literal, $s:literal, $l:literal, $h:tt) => {
        concat!(
            "vmovaps ", of!($w, sum), ", ", kept!($w, "{products}", $r, $h), "\n", of!($w, dot_words), of!($w, sum), ", ", $s, ", ", $l, "\n"
        )
    };
    ($w:ident, add_minima, false, $p:literal, $h:tt) => { "" };
    ($w:ident, add_minima, true, $p:literal, $h:tt) => {
        concat!(of!($w, dot_words), of!($w, sum), ", ", of!($w, x), ", ", of!($w, "{words}", $h), " + 128*", $p, " + 64]\n")
    };
    ($w:ident, keep, $from:ident, $minima:ident, $p:literal, $r:literal, [$($s:literal, $l:literal, $h:tt);*]) => {
        concat!(
            row!($w, scale, $minima, $p, $r, [$($s, $l, $h);*]),
            $(
                row!($w, $from, $r, $s, $l, $h), row!($w, add_minima, $minima, $p, $h), "vmovaps ", kept!($w, "{products}", $r, $h), ", ", of!($w, sum), "\n"
            ),*
        )
    };
    ($w:ident, end, $from:ident, $minima:ident, $p:literal, $r:literal, [$($s:literal, $l:literal, $h:tt);*]) => {
        concat!(
            row!($w, scale, $minima, $p, $r, [$($s, $l, $h);*]),
            $(row!($w, $from, $r, $s, $l, $h), row!($w, add_minima, $minima, $p, $h), "vcvtdq2ps ", $s, ", ", of!($w, sum), "\n"),*,
            "vbroadcastss ", of!($w, x), ", dword ptr [{x} + {of_block} + ", $r, "*{row}]\n",
            $(
                "vfmadd213ps ", $s, ", ", of!($w, x), ", ", kept!($w, "{sums}", $r, $h), "\n", "vmovaps ", kept!($w, "{sums}", $r, $h), ", ", $s, "\n"
            ),*
        )
    };
}

/// The same for so many rows: an instruction, and what goes before the row.
#[rustfmt::skip]
macro_rules! rows {
    (ymm, 1, $($op:tt),*) => { row!(ymm, $($op),*, 0, ["ymm0", "ymm12", 0; "ymm1", "ymm13", 1]) };
    (ymm, 2, $($op:tt),*) => { concat!(rows!(ymm, 1, $($op),*), row!(ymm, $($op),*, 1, ["ymm2", "ymm12", 0; "ymm3", "ymm13", 1])) };
    (ymm, 3, $($op:tt),*) => { concat!(rows!(ymm, 2, $($op),*), row!(ymm, $($op),*, 2, ["ymm4", "ymm12", 0; "ymm5", "ymm13", 1])) };
    (ymm, 4, $($op:tt),*) => { concat!(rows!(ymm, 3, $($op),*), row!(ymm, $($op),*, 3, ["ymm6", "ymm12", 0; "ymm7", "ymm13", 1])) };
    (ymm, 5, $($op:tt),*) => { concat!(rows!(ymm, 4, $($op),*), row!(ymm, $($op),*, 4, ["ymm8", "ymm12", 0; "ymm9", "ymm13", 1])) };
    (ymm, 6, $($op:tt),*) => { concat!(rows!(ymm, 5, $($op),*), row!(ymm, $($op),*, 5, ["ymm10", "ymm12", 0; "ymm11", "ymm13", 1])) };
    (zmm, 1, $($op:tt),*) => {
        row!(zmm, $($op),*, 0, ["zmm0", "zmm24", 0; "zmm1", "zmm25", 1; "zmm2", "zmm26", 2; "zmm3", "zmm27", 3])
    };
    (zmm, 2, $($op:tt),*) => { concat!(
        rows!(zmm, 1, $($op),*), row!(zmm, $($op),*, 1, ["zmm4", "zmm24", 0; "zmm5", "zmm25", 1; "zmm6", "zmm26", 2; "zmm7", "zmm27", 3])
    ) };
    (zmm, 3, $($op:tt),*) => { concat!(
        rows!(zmm, 2, $($op),*), row!(zmm, $($op),*, 2, ["zmm8", "zmm24", 0; "zmm9", "zmm25", 1; "zmm10", "zmm26", 2; "zmm11", "zmm27", 3])
    ) };
    (zmm, 4, $($op:tt),*) => { concat!(
        rows!(zmm, 3, $($op),*), row!(zmm, $($op),*, 3, ["zmm12", "zmm24", 0; "zmm13", "zmm25", 1; "zmm14", "zmm26", 2; "zmm15", "zmm27", 3])
    ) };
    (zmm, 5, $($op:tt),*) => { concat!(
        rows!(zmm, 4, $($op),*), row!(zmm, $($op),*, 4, ["zmm16", "zmm24", 0; "zmm17", "zmm25", 1; "zmm18", "zmm26", 2; "zmm19", "zmm27", 3])
    ) };
    (zmm, 6, $($op:tt),*) => { concat!(
        rows!(zmm, 5, $($op),*), row!(zmm, $($op),*, 5, ["zmm20", "zmm24", 0; "zmm21", "zmm25", 1; "zmm22", "zmm26", 2; "zmm23", "zmm27", 3])
    ) };
}

/// Reads the lines of all panels, or their words, at `$at` for the first one.
#[rustfmt::skip]
macro_rules! read {
    (ymm, $at:literal, $more:literal) => {
        concat!("vmovups ymm12, ", of!(ymm, $at, 0), $more, "]\nvmovups ymm13, ", of!(ymm, $at, 1), $more, "]\n")
    };
    (zmm, $at:literal, $more:literal) => {
        concat!(
            "vmovups zmm24, ", of!(zmm, $at, 0), $more, "]\nvmovups zmm25, ", of!(zmm, $at, 1), $more, "]\n",
            "vmovups zmm26, ", of!(zmm, $at, 2), $more, "]\nvmovups zmm27, ", of!(zmm, $at, 3), $more, "]\n"
        )
    };
}

/// The products of lines of 16 outputs x 4 columns that begin with these columns of a block, of the groups `$p`.
macro_rules! lines {
    ($w:ident, $r:tt, $op:ident, $p:literal, $columns:literal) => {
        concat!(".irp k, ", $columns, "\n", read!($w, "{line}", " + 16*\\k"), rows!($w, $r, $op, $p), ".endr\n")
    };
}

/// The products of two groups of a block, the first columns of which are in two lists each, and what is done with them.
#[rustfmt::skip]
macro_rules! pair {
    ($w:ident, $r:tt, $p:literal, $words:literal, [$a:literal, $b:literal, $c:literal, $d:literal], $($then:ident),*) => {
        concat!(
            lines!($w, $r, begin_dot, $p, $a), lines!($w, $r, dot, $p, $b), "vmovaps ", of!($w, swapped), ", ", kept!($w, "{swapped}", 0, 0), "\n",
            lines!($w, $r, swap_dot, $p, $c), lines!($w, $r, dot, $p, $d), read!($w, "{words}", $words), rows!($w, $r, $($then),*, $p)
        )
    };
}

/// All groups of a block.
#[rustfmt::skip]
macro_rules! block {
    ($w:ident, $r:tt, 32, $minima:ident) => {
        concat!(
            pair!($w, $r, 0, " + 0*{step}", ["0", "4, 8, 12, 16, 20, 24, 28", "32", "36, 40, 44, 48, 52, 56, 60"], keep, none, $minima),
            pair!($w, $r, 1, " + 1*{step}", ["64", "68, 72, 76, 80, 84, 88, 92", "96", "100, 104, 108, 112, 116, 120, 124"], end, some, $minima)
        )
    };
    ($w:ident, $r:tt, 16, $minima:ident) => {
        concat!(
            pair!($w, $r, 0, " + 0*{step}", ["0", "4, 8, 12", "16", "20, 24, 28"], keep, none, $minima),
            pair!($w, $r, 1, " + 1*{step}", ["32", "36, 40, 44", "48", "52, 56, 60"], keep, some, $minima),
            pair!($w, $r, 2, " + 2*{step}", ["64", "68, 72, 76", "80", "84, 88, 92"], keep, some, $minima),
            pair!($w, $r, 3, " + 3*{step}", ["96", "100, 104, 108", "112", "116, 120, 124"], end, some, $minima)
        )
    };
}

/// Adds the products of blocks, of `$r` rows.
macro_rules! add {
    ($w:ident, $p:tt, $r:tt, $group:tt, $minima:ident, $memory:ident, $at:ident, [$($clobbered:tt),*]) => {{
        const INPUTS: InputLayout = InputLayout::Int8Words { group: $group, zero: 1, minima: $minima };
        const STEP: usize = lines_of($minima) * LINE;
        asm!(
            "/* {stride} {three} */",
            "2:",
            block!($w, $r, $group, $minima),
            "add {line}, 2048", "add {x}, {next_x}", "add {words}, {words_bytes}",
            "mov {i}, {each}", "test {i}, {i}", "jz 4f",
            "3:", "prefetcht0 byte ptr [{ask}]", "add {ask}, {ask_step}", "dec {i}", "jnz 3b",
            "4:", "dec {n}", "jnz 2b",
            line = inout(reg) $at.line => _, words = inout(reg) $at.words => _, stride = in(reg) $at.stride, three = in(reg) 3 * $at.stride,
            x = inout(reg) $at.x => _, next_x = in(reg) $at.next_x, n = inout(reg) $at.blocks => _, i = out(reg) _,
            ask = inout(reg) $at.hints.at => _, ask_step = in(reg) $at.hints.step, each = in(reg) $at.hints.lines, around = in(reg) $memory,
            row = const INPUTS.block_bytes(), pair = const InputLayout::pair_bytes($minima), begins = const BLOCK + 8, of_block = const BLOCK,
            step = const STEP, words_bytes = const BLOCK / (2 * $group) * STEP, sums = const offset_of!(Memory<$r, $p>, sums),
            products = const offset_of!(Memory<$r, $p>, products), swapped = const offset_of!(Memory<$r, $p>, swapped),
            $(out($clobbered) _,)*
            options(nostack),
        )
    }};
}

/// Defines a function.
macro_rules! define {
    ($name:ident, $w:ident, $panels:tt, [$($group:tt),*], $features:literal, $clobbered:tt) => {
        /// Adds the products of blocks with `R` rows, up to six, times the scales of the inputs, to the sums in memory.
        ///
        /// # Safety
        /// What is read is readable, and the CPU has the instructions.
        #[target_feature(enable = $features)]
        #[inline]
        pub(crate) unsafe fn $name<const R: usize, const P: usize, const GROUP: usize, const MINIMA: bool>(
            memory: &mut Memory<R, P>,
            at: Unit,
        ) {
            assert!(P == $panels && at.blocks > 0);
            let memory: *mut Memory<R, P> = memory;
            macro_rules! add_rows {
                ($r:tt) => {
                    match (GROUP, MINIMA) {
                        $(
                            ($group, false) => add!($w, $panels, $r, $group, false, memory, at, $clobbered),
                            ($group, true) => add!($w, $panels, $r, $group, true, memory, at, $clobbered),
                        )*
                        _ => unreachable!("no groups of {GROUP}"),
                    }
                };
            }
            // SAFETY: the instructions, and what they read, by the caller's promise; they write but `memory`, which is of so many rows and panels.
            unsafe {
                match R {
                    1 => add_rows!(1),
                    2 => add_rows!(2),
                    3 => add_rows!(3),
                    4 => add_rows!(4),
                    5 => add_rows!(5),
                    6 => add_rows!(6),
                    _ => unreachable!("no tile of {R} rows"),
                }
            }
        }
    };
}

define!(
    ymm,
    ymm,
    1,
    [16, 32],
    "avx2,fma,avxvnni",
    [
        "ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7", "ymm8", "ymm9", "ymm10", "ymm11", "ymm12",
        "ymm13", "ymm14", "ymm15"
    ]
);
define!(
    zmm,
    zmm,
    4,
    [32],
    "avx512f,avx512bw,avx512vnni",
    [
        "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9", "zmm10", "zmm11", "zmm12",
        "zmm13", "zmm14", "zmm15", "zmm16", "zmm17", "zmm18", "zmm19", "zmm20", "zmm21", "zmm22", "zmm23", "zmm24",
        "zmm25", "zmm26", "zmm27", "zmm28", "zmm29", "zmm30"
    ]
);

/// A tile of `R` rows x `P` panels. Its `panel` is what [`Prepare`](super::Prepare) made.
pub(crate) struct FullTile<'a, const R: usize, const P: usize, const GROUP: usize, const MINIMA: bool>(pub Tile<'a>);

impl<const R: usize, const P: usize, const GROUP: usize, const MINIMA: bool> Job for FullTile<'_, R, P, GROUP, MINIMA> {
    #[inline(always)]
    fn go<I: Isa>(self, isa: I) {
        let t = self.0;
        let (block, chunk) = (PANEL * BLOCK, const { chunk_bytes(GROUP, MINIMA) });
        let row = const { InputLayout::Int8Words { group: GROUP, zero: 1, minima: MINIMA }.block_bytes() };
        assert!(t.first_block.is_multiple_of(CHUNK_BLOCKS) && t.line_skip == 0 && t.panel_stride == t.weight_stride);
        t.check_words((R, P), block, t.blocks.div_ceil(CHUNK_BLOCKS) * chunk, row);
        let products = [[[0; PANEL]; P]; R];
        let mut memory = Memory::<R, P> { sums: [[[0.0; PANEL]; P]; R], products, swapped: SWAPPED };
        for tile in 0..t.row_tiles {
            let first = tile * R;
            let mut hints = t.later.take_times(t.blocks);
            let out = t.out.as_mut_ptr().wrapping_add(first * t.out_stride);
            let mut at = Unit {
                line: t.weights.as_ptr(),
                words: t.panel.as_ptr().wrapping_add(LINE),
                stride: t.panel_stride,
                x: t.inputs.as_ptr().wrapping_add(first * row),
                next_x: t.input_stride,
                blocks: 0,
                hints,
            };
            let mut done = 0;
            while done < t.blocks {
                at.blocks = CHUNK_BLOCKS.min(t.blocks - done);
                // SAFETY: `check_words` saw the lines of these blocks of all panels, their words, and the inputs of all rows.
                unsafe { isa.add_unit::<R, P, GROUP, MINIMA>(&mut memory, at) };
                let begun = t.first_block + done > 0;
                for p in 0..P {
                    let outputs = t.width.saturating_sub(p * PANEL);
                    // SAFETY: the unit of a panel is a line before its words.
                    let unit = isa.as_f32(unsafe { isa.load(at.words.wrapping_add(p * at.stride).wrapping_sub(LINE)) });
                    for (r, sums) in memory.sums.iter_mut().enumerate() {
                        let to = out.wrapping_add(r * t.out_stride + p * PANEL);
                        // SAFETY: a line; and `check_words` saw that `width` outputs of all rows fit.
                        unsafe {
                            let sum = isa.as_f32(isa.load(sums[p].as_ptr().cast()));
                            let total = if begun { isa.load_first(to, outputs) } else { isa.zero() };
                            isa.store_first(to, outputs, isa.mul_add(sum, unit, total));
                            isa.store(sums[p].as_mut_ptr().cast(), isa.splat(0));
                        }
                    }
                }
                done += at.blocks;
                at.line = at.line.wrapping_add(at.blocks * block);
                at.words = at.words.wrapping_add(chunk);
                at.x = at.x.wrapping_add(at.blocks * at.next_x);
                hints.at = hints.at.wrapping_add(at.blocks * hints.next);
                at.hints = hints;
            }
        }
    }
}
