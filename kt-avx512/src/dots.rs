//! Products of integers with VNNI in assembly, for tiles of many rows on Intel: compilers either keep a loop over lines, with all that it counts and looks up, or unroll it, read inputs
//! far ahead of their products, and put sums aside. On Intel's cores, where a loop's other instructions wait with the products, such tiles took a tenth to a seventh more time (`PERFORMANCE.md`).

#![allow(unsafe_code)] // kernel

use std::arch::x86_64::__m512i;

/// The products of a line of each panel with a row: its two sums, the register that its codes are broadcast to, and where they are.
#[rustfmt::skip]
macro_rules! row {
    ($a:literal, $b:literal, $x:literal, $at:literal) => {
        concat!(
            "vpbroadcastd ", $x, ", dword ptr [", $at, " + 4*\\k]\n",
            "vpdpbusd ", $a, ", zmm28, ", $x, "\n", "vpdpbusd ", $b, ", zmm29, ", $x, "\n"
        )
    };
}

/// So many rows. Each is at one of three addresses, or the distance of rows, or two or four times that, behind one.
#[rustfmt::skip]
macro_rules! rows {
    (4) => { concat!(
        row!("zmm0", "zmm1", "zmm30", "{x}"),
        row!("zmm2", "zmm3", "zmm31", "{x} + {row}"),
        row!("zmm4", "zmm5", "zmm30", "{x} + 2*{row}"),
        row!("zmm6", "zmm7", "zmm31", "{x1} + 2*{row}")
    ) };
    (5) => { concat!(rows!(4), row!("zmm8", "zmm9", "zmm30", "{x} + 4*{row}")) };
    (6) => { concat!(rows!(5), row!("zmm10", "zmm11", "zmm31", "{x1} + 4*{row}")) };
    (7) => { concat!(rows!(6), row!("zmm12", "zmm13", "zmm30", "{x2} + 4*{row}")) };
}

/// Adds the products, of `$r` rows, whose sums have the registers named.
macro_rules! lines {
    ($r:tt, $sums:ident, $lines:ident, $x:ident, $row:ident, [$($reg:tt: $i:tt, $p:tt);*]) => {
        std::arch::asm!(
            // Not all numbers of rows need it.
            "/* {x2} */",
            ".irp k, 0, 1, 2, 3, 4, 5, 6, 7",
            "vmovdqu64 zmm28, zmmword ptr [{first} + 64*\\k]",
            "vmovdqu64 zmm29, zmmword ptr [{second} + 64*\\k]",
            rows!($r),
            ".endr",
            first = in(reg) $lines[0], second = in(reg) $lines[1], row = in(reg) $row,
            x = in(reg) $x, x1 = in(reg) $x.wrapping_add($row), x2 = in(reg) $x.wrapping_add(2 * $row),
            $(inout($reg) $sums[$i][$p],)*
            out("zmm28") _, out("zmm29") _, out("zmm30") _, out("zmm31") _,
            options(nostack, readonly, preserves_flags),
        )
    };
}

/// [`Isa::dot_lines`](crate::isa::Isa::dot_lines).
///
/// # Safety
/// As there; the CPU has AVX-512 F and VNNI.
#[target_feature(enable = "avx512f,avx512vnni")]
#[inline]
pub(crate) unsafe fn lines<const R: usize, const P: usize>(
    sums: &mut [[__m512i; P]; R],
    lines: [*const u8; 2],
    x: *const u8,
    row: usize,
) {
    assert!(P == 2);
    // SAFETY: the instructions, and what they read, by the caller's promise.
    unsafe {
        match R {
            4 => {
                lines!(4, sums, lines, x, row, ["zmm0": 0, 0; "zmm1": 0, 1; "zmm2": 1, 0; "zmm3": 1, 1; "zmm4": 2, 0; "zmm5": 2, 1; "zmm6": 3, 0; "zmm7": 3, 1])
            }
            5 => {
                lines!(5, sums, lines, x, row, ["zmm0": 0, 0; "zmm1": 0, 1; "zmm2": 1, 0; "zmm3": 1, 1; "zmm4": 2, 0; "zmm5": 2, 1; "zmm6": 3, 0; "zmm7": 3, 1; "zmm8": 4, 0; "zmm9": 4, 1])
            }
            6 => {
                lines!(6, sums, lines, x, row, ["zmm0": 0, 0; "zmm1": 0, 1; "zmm2": 1, 0; "zmm3": 1, 1; "zmm4": 2, 0; "zmm5": 2, 1; "zmm6": 3, 0; "zmm7": 3, 1; "zmm8": 4, 0; "zmm9": 4, 1; "zmm10": 5, 0; "zmm11": 5, 1])
            }
            7 => {
                lines!(7, sums, lines, x, row, ["zmm0": 0, 0; "zmm1": 0, 1; "zmm2": 1, 0; "zmm3": 1, 1; "zmm4": 2, 0; "zmm5": 2, 1; "zmm6": 3, 0; "zmm7": 3, 1; "zmm8": 4, 0; "zmm9": 4, 1; "zmm10": 5, 0; "zmm11": 5, 1; "zmm12": 6, 0; "zmm13": 6, 1])
            }
            _ => unreachable!("no tile of {R} rows"),
        }
    }
}
