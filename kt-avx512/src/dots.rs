//! Products in assembly, for tiles of four panels and up to six rows on Intel. Its cores write so many registers of 512 bits a cycle, by loads as by products (`PERFORMANCE.md`): such a
//! tile has the fewest loads for each product, and compilers would keep its sums in memory, and what they count, too.

#![allow(unsafe_code)] // kernel

use std::arch::x86_64::{__m512, __m512i, _mm512_set1_epi32};

use crate::ahead::Rows;

/// Lines of a panel that are unrolled, after which some of those that come later are asked for.
pub(crate) const STEP: usize = 8;

/// The products of an operand of each panel with a row: its four sums, the register that its inputs are broadcast to, and where these are.
#[rustfmt::skip]
macro_rules! row {
    ($op:literal, $a:literal, $b:literal, $c:literal, $d:literal, $x:literal, $at:expr) => {
        concat!(
            "vpbroadcastd ", $x, ", dword ptr [", $at, "]\n",
            $op, " ", $a, ", zmm24, ", $x, "\n", $op, " ", $b, ", zmm25, ", $x, "\n",
            $op, " ", $c, ", zmm26, ", $x, "\n", $op, " ", $d, ", zmm27, ", $x, "\n"
        )
    };
}

/// So many rows. Each is at one of two addresses, or two or four times the distance of rows behind one, and so far from there.
#[rustfmt::skip]
macro_rules! rows {
    ($op:literal, 4, $from:literal) => { concat!(
        row!($op, "zmm0", "zmm1", "zmm2", "zmm3", "zmm28", concat!("{x}", $from)),
        row!($op, "zmm4", "zmm5", "zmm6", "zmm7", "zmm29", concat!("{x1}", $from)),
        row!($op, "zmm8", "zmm9", "zmm10", "zmm11", "zmm30", concat!("{x} + 2*{row}", $from)),
        row!($op, "zmm12", "zmm13", "zmm14", "zmm15", "zmm28", concat!("{x1} + 2*{row}", $from))
    ) };
    ($op:literal, 5, $from:literal) => { concat!(
        rows!($op, 4, $from), row!($op, "zmm16", "zmm17", "zmm18", "zmm19", "zmm29", concat!("{x} + 4*{row}", $from))
    ) };
    ($op:literal, 6, $from:literal) => { concat!(
        rows!($op, 5, $from), row!($op, "zmm20", "zmm21", "zmm22", "zmm23", "zmm30", concat!("{x1} + 4*{row}", $from))
    ) };
}

/// Makes an operand of a line of each panel.
#[rustfmt::skip]
macro_rules! operands {
    ($op:literal, $with:literal, $end:literal) => {
        concat!(
            $op, " zmm24, ", $with, "zmmword ptr [{line} + 64*\\k]", $end, "\n",
            $op, " zmm25, ", $with, "zmmword ptr [{line} + {stride} + 64*\\k]", $end, "\n",
            $op, " zmm26, ", $with, "zmmword ptr [{line} + 2*{stride} + 64*\\k]", $end, "\n",
            $op, " zmm27, ", $with, "zmmword ptr [{line} + {three} + 64*\\k]", $end, "\n"
        )
    };
}

/// The products of a line of each panel with so many rows.
#[rustfmt::skip]
macro_rules! products {
    (ints, $r:tt) => { concat!(operands!("vmovdqu64", "", ""), rows!("vpdpbusd", $r, " + 4*\\k")) };
    (floats, $r:tt) => { concat!(operands!("vmovups", "", ""), rows!("vfmadd231ps", $r, " + 4*\\k")) };
    // Even columns are the lower words.
    (pairs, $r:tt) => { concat!(
        operands!("vpslld", "", ", 16"), rows!("vfmadd231ps", $r, " + 8*\\k"),
        operands!("vpandd", "zmm31, ", ""), rows!("vfmadd231ps", $r, " + 8*\\k + 4")
    ) };
}

/// Adds the products, of `$r` rows, whose sums have the registers named.
macro_rules! lines {
    ($name:ident, $bytes:literal, $r:tt, $sums:ident, $at:ident, [$($reg:tt: $i:tt, $p:tt);*]) => {
        std::arch::asm!(
            "2:",
            ".irp k, 0, 1, 2, 3, 4, 5, 6, 7",
            products!($name, $r),
            ".endr",
            "add {line}, 512",
            concat!("add {x}, 8*", $bytes),
            concat!("add {x1}, 8*", $bytes),
            "mov {i}, {each}",
            "test {i}, {i}",
            "jz 4f",
            "3:",
            "prefetcht1 byte ptr [{ask}]",
            "add {ask}, {step}",
            "dec {i}",
            "jnz 3b",
            "4:",
            "dec {n}",
            "jnz 2b",
            line = inout(reg) $at.line => _, stride = in(reg) $at.stride, three = in(reg) 3 * $at.stride,
            x = inout(reg) $at.x => _, x1 = inout(reg) $at.x.wrapping_add($at.row) => _, row = in(reg) $at.row,
            n = inout(reg) $at.steps => _, i = out(reg) _,
            ask = inout(reg) $at.hints.at => _, step = in(reg) $at.hints.step, each = in(reg) $at.hints.lines,
            $(inout($reg) $sums[$i][$p],)*
            out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _, out("zmm28") _, out("zmm29") _, out("zmm30") _,
            in("zmm31") _mm512_set1_epi32(0xffff_0000_u32 as i32),
            options(nostack, readonly),
        )
    };
}

/// What products read.
#[derive(Debug, Clone, Copy)]
pub struct LinesAt {
    /// The first line of the first panel; those of a panel follow each other.
    pub(crate) line: *const u8,
    /// Bytes from a panel to the next one.
    pub(crate) stride: usize,
    /// The first inputs of the first row, four bytes for each line; of pairs of columns eight.
    pub(crate) x: *const u8,
    /// Bytes from a row to the next one.
    pub(crate) row: usize,
    /// Lines of a panel over [`STEP`], at least 1.
    pub(crate) steps: usize,
    /// What to ask for meanwhile, a row with each step, in the order of addresses.
    pub(crate) hints: Rows,
}

/// Defines a function.
macro_rules! define {
    ($(#[$doc:meta])* $name:ident, $sum:ty, $bytes:literal, $features:literal) => {
        $(#[$doc])*
        /// Adds the products of lines of four panels with `R` rows, four to six.
        ///
        /// # Safety
        /// What is read is readable, and the CPU has the instructions.
        #[target_feature(enable = $features)]
        #[inline]
        pub(crate) unsafe fn $name<const R: usize, const P: usize>(sums: &mut [[$sum; P]; R], at: LinesAt) {
            assert!(P == 4 && at.steps > 0);
            // SAFETY: the instructions, and what they read, by the caller's promise.
            unsafe {
                match R {
                    4 => lines!($name, $bytes, 4, sums, at, [
                        "zmm0": 0, 0; "zmm1": 0, 1; "zmm2": 0, 2; "zmm3": 0, 3; "zmm4": 1, 0; "zmm5": 1, 1; "zmm6": 1, 2; "zmm7": 1, 3; "zmm8": 2, 0; "zmm9": 2, 1; "zmm10": 2, 2; "zmm11": 2, 3; "zmm12": 3, 0; "zmm13": 3, 1; "zmm14": 3, 2; "zmm15": 3, 3
                    ]),
                    5 => lines!($name, $bytes, 5, sums, at, [
                        "zmm0": 0, 0; "zmm1": 0, 1; "zmm2": 0, 2; "zmm3": 0, 3; "zmm4": 1, 0; "zmm5": 1, 1; "zmm6": 1, 2; "zmm7": 1, 3; "zmm8": 2, 0; "zmm9": 2, 1; "zmm10": 2, 2; "zmm11": 2, 3; "zmm12": 3, 0; "zmm13": 3, 1; "zmm14": 3, 2; "zmm15": 3, 3; "zmm16": 4, 0; "zmm17": 4, 1; "zmm18": 4, 2; "zmm19": 4, 3
                    ]),
                    6 => lines!($name, $bytes, 6, sums, at, [
                        "zmm0": 0, 0; "zmm1": 0, 1; "zmm2": 0, 2; "zmm3": 0, 3; "zmm4": 1, 0; "zmm5": 1, 1; "zmm6": 1, 2; "zmm7": 1, 3; "zmm8": 2, 0; "zmm9": 2, 1; "zmm10": 2, 2; "zmm11": 2, 3; "zmm12": 3, 0; "zmm13": 3, 1; "zmm14": 3, 2; "zmm15": 3, 3; "zmm16": 4, 0; "zmm17": 4, 1; "zmm18": 4, 2; "zmm19": 4, 3; "zmm20": 5, 0; "zmm21": 5, 1; "zmm22": 5, 2; "zmm23": 5, 3
                    ]),
                    _ => unreachable!("no tile of {R} rows"),
                }
            }
        }
    };
}

define!(
    /// Codes of four columns with those of inputs.
    ///
    ints, __m512i, "4", "avx512f,avx512vnni"
);
define!(
    /// F32 numbers.
    ///
    floats, __m512, "4", "avx512f"
);
define!(
    /// BF16 numbers of two columns with F32 inputs.
    ///
    pairs, __m512, "8", "avx512f"
);
