//! The tile unit: one block of assembly from `ldtilecfg` to `tilerelease`.
//!
//! Tiles are registers that the compiler knows nothing of, so nothing of them outlives the block: no call, no lock, no hand-over to
//! another thread comes in between.
//!
//! ```text
//! tmm0 tmm1   sums of rows 0..16 with both panels        tmm4 tmm5   rows 0..16 and 16..32 of a step
//! tmm2 tmm3   sums of rows 16..32                        tmm6 tmm7   lines of both panels of a step
//! for each block, for each step: load tmm4..8, multiply four times; at the end of a span write the sums and begin anew
//! ```
//!
//! With 16 rows or fewer, the others are left out.

#![allow(unsafe_code)] // kernel

use std::arch::asm;
use std::mem::offset_of;

use kt_avx512::engine::{LINE, PANEL, SUMS_BYTES, TILE_BYTES, TILE_PANELS, TILE_ROWS, TileProduct, TileUnit};
use kt_core::cpu::amx;
use kt_core::cpu::amx::Refusal;

/// The tile unit of this CPU. A value proves that it is there and that this process may use it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unit(());

impl Unit {
    /// Asks for it.
    pub(crate) fn detect() -> Result<Unit, Refusal> {
        amx::permission().map(Unit)
    }

    /// The instructions as the emulator runs them, where there is no unit.
    #[cfg(all(test, target_os = "linux"))]
    pub(crate) fn emulated() -> Unit {
        crate::emulator::install();
        Unit(())
    }
}

/// What `ldtilecfg` reads: rows, and bytes of each, of tmm0 to tmm7.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

const _: () = assert!(size_of::<Config>() == 64);

impl Config {
    fn new(rows: usize, step_bytes: usize) -> Self {
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        let halves = [rows.min(TILE_ROWS), rows.saturating_sub(TILE_ROWS)];
        let mut tile = |tile: usize, rows: usize, bytes: usize| {
            if rows > 0 {
                (config.rows[tile], config.row_bytes[tile]) = (rows as u8, bytes as u16);
            }
        };
        for (half, &rows) in halves.iter().enumerate() {
            for panel in 0..TILE_PANELS {
                tile(half * 2 + panel, rows, LINE);
            }
            tile(4 + half, rows, step_bytes);
        }
        for panel in 0..TILE_PANELS {
            tile(6 + panel, step_bytes / 4, LINE);
        }
        config
    }
}

/// What the assembly reads where registers would be too few.
#[repr(C)]
struct Call {
    config: Config,
    /// Bytes of a step in a row, and in the lines of a panel.
    step_bytes: usize,
    line_bytes: usize,
    steps: usize,
    sum_steps: usize,
    /// From the end of a block of a row to the next one.
    skip: usize,
    /// From the lines of a block to those of the next one.
    line_skip: usize,
}

/// The block of assembly for some of the tiles: sums to clear, to load and to write, operands to load, and products.
macro_rules! tiles {
    (
        $p:ident, $dot:literal,
        clear: [$($clear:literal),*], begin: [$($begin:literal),*],
        load: [$($load:literal),*], multiply: [$($operands:literal),*], write: [$($write:literal),*]
    ) => {{
        let call = Call {
            config: Config::new($p.rows, $p.step_bytes),
            step_bytes: $p.step_bytes,
            line_bytes: $p.step_bytes * PANEL,
            steps: $p.steps,
            sum_steps: $p.sum_steps,
            skip: $p.block_stride.wrapping_sub($p.steps * $p.step_bytes),
            line_skip: $p.line_skip,
        };
        // SAFETY: all pieces that are loaded are readable, and the sums writable, by the caller's promise; `self` proves the
        // instructions. Pointers to absent rows are moved and not used.
        unsafe {
            asm!(
                "ldtilecfg [{call}]",
                "test {bytes}, {bytes}",
                "jnz 2f",
                $($clear,)*
                "jmp 3f",
                "2:",
                $($begin,)*
                "3:",
                "mov {steps}, qword ptr [{call} + {STEPS}]",
                "4:",
                $($load,)*
                $(concat!($dot, " ", $operands),)*
                "mov {bytes}, qword ptr [{call} + {STEP}]",
                "add {a0}, {bytes}",
                "add {a1}, {bytes}",
                "mov {bytes}, qword ptr [{call} + {LINES}]",
                "add {b0}, {bytes}",
                "add {b1}, {bytes}",
                "dec {left}",
                "jnz 5f",
                $($write,)*
                $($clear,)*
                "add {sums}, {SUMS}",
                "mov {left}, qword ptr [{call} + {SUM_STEPS}]",
                "5:",
                "dec {steps}",
                "jnz 4b",
                "mov {bytes}, qword ptr [{call} + {SKIP}]",
                "add {a0}, {bytes}",
                "add {a1}, {bytes}",
                "mov {bytes}, qword ptr [{call} + {LINE_SKIP}]",
                "add {b0}, {bytes}",
                "add {b1}, {bytes}",
                "dec {blocks}",
                "jnz 3b",
                "tilerelease",
                call = in(reg) &call,
                steps = out(reg) _,
                // At first, whether sums are to be loaded.
                bytes = inout(reg) usize::from($p.from_sums) => _,
                a0 = inout(reg) $p.inputs => _,
                a1 = inout(reg) $p.inputs.wrapping_add(TILE_ROWS * $p.row_stride) => _,
                row = in(reg) $p.row_stride,
                b0 = inout(reg) $p.lines => _,
                b1 = inout(reg) $p.lines.wrapping_add($p.panel_stride) => _,
                line = in(reg) LINE,
                sums = inout(reg) $p.sums => _,
                left = inout(reg) $p.sum_steps => _,
                blocks = inout(reg) $p.blocks => _,
                STEP = const offset_of!(Call, step_bytes),
                LINES = const offset_of!(Call, line_bytes),
                STEPS = const offset_of!(Call, steps),
                SUM_STEPS = const offset_of!(Call, sum_steps),
                SKIP = const offset_of!(Call, skip),
                LINE_SKIP = const offset_of!(Call, line_skip),
                SUMS = const SUMS_BYTES,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }};
}

/// The blocks for all numbers of rows.
macro_rules! multiply {
    ($p:ident, $dot:literal) => {
        match $p.rows > TILE_ROWS {
            true => tiles!(
                $p, $dot,
                clear: ["tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3"],
                begin: [
                    "tileloadd tmm0, [{sums} + {line}]", "tileloadd tmm1, [{sums} + {line} + 1024]",
                    "tileloadd tmm2, [{sums} + {line} + 2048]", "tileloadd tmm3, [{sums} + {line} + 3072]"
                ],
                load: [
                    "tileloadd tmm4, [{a0} + {row}]", "tileloadd tmm6, [{b0} + {line}]",
                    "tileloadd tmm7, [{b1} + {line}]", "tileloadd tmm5, [{a1} + {row}]"
                ],
                multiply: ["tmm0, tmm4, tmm6", "tmm1, tmm4, tmm7", "tmm2, tmm5, tmm6", "tmm3, tmm5, tmm7"],
                write: [
                    "tilestored [{sums} + {line}], tmm0", "tilestored [{sums} + {line} + 1024], tmm1",
                    "tilestored [{sums} + {line} + 2048], tmm2", "tilestored [{sums} + {line} + 3072], tmm3"
                ]
            ),
            false => tiles!(
                $p, $dot,
                clear: ["tilezero tmm0", "tilezero tmm1"],
                begin: ["tileloadd tmm0, [{sums} + {line}]", "tileloadd tmm1, [{sums} + {line} + 1024]"],
                load: [
                    "tileloadd tmm4, [{a0} + {row}]", "tileloadd tmm6, [{b0} + {line}]",
                    "tileloadd tmm7, [{b1} + {line}]"
                ],
                multiply: ["tmm0, tmm4, tmm6", "tmm1, tmm4, tmm7"],
                write: ["tilestored [{sums} + {line}], tmm0", "tilestored [{sums} + {line} + 1024], tmm1"]
            ),
        }
    };
}

const _: () = assert!(TILE_BYTES == 1024 && SUMS_BYTES == 4096 && TILE_PANELS == 2, "the assembly has these numbers");

// SAFETY: `detect` has seen the instructions; the assembly touches the rows, lines and sums of the steps that it counts.
unsafe impl TileUnit for Unit {
    unsafe fn multiply(self, p: &TileProduct) {
        // Registers would be configured wrongly, which is a trap.
        assert!((1..=2 * TILE_ROWS).contains(&p.rows));
        assert!(matches!(p.step_bytes, 16 | 32 | 64) && p.blocks > 0 && p.steps > 0 && p.sum_steps > 0);
        #[cfg(all(test, target_os = "linux"))]
        let _bounds = crate::emulator::Bounds::of(p);
        if p.bf16 {
            multiply!(p, "tdpbf16ps");
        } else {
            // Inputs are signed, weights are not.
            multiply!(p, "tdpbsud");
        }
    }
}
