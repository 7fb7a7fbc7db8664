//! The tile unit: for products of many rows one block of assembly from `ldtilecfg` to `tilerelease`.
//!
//! Tiles are registers that the compiler knows nothing of, so nothing of them outlives the block: no call, no lock, no hand-over to
//! another thread comes in between. For streams of lines, which are unpacked beside products, there is a block for each step, and sums stay in
//! tiles meanwhile: compilers have no instructions for these, and what is between the blocks is inlined there (`tests/check-asm` looks for calls).
//!
//! ```text
//! tmm0 tmm1   sums of rows 0..16 with both panels        tmm4 tmm5   rows 0..16 and 16..32 of a step
//! tmm2 tmm3   sums of rows 16..32                        tmm6 tmm7   lines of both panels of a step
//! for each part, for each tile of rows
//!     for each block, for each step: load and multiply by turns, four times each, and ask for what comes later
//!     write the sums
//! ```
//!
//! Operands are set to zero as soon as they are not needed any more: that takes no time, and what the core has for tiles is free for those that come next
//! (`PERFORMANCE.md`: at times loads and products take four times as long otherwise).
//!
//! With 16 rows or fewer, the others are left out.

#![allow(unsafe_code)] // kernel

use std::arch::asm;
use std::mem::offset_of;

use kt_avx512::engine::{Asked, LINE, PANEL, STEP_LINES, TILE_PANELS, TILE_ROWS, TileProduct, TileUnit};
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
    /// Of up to 16 input rows with lines of panels that take turns: sums in tmm0 to tmm3, inputs in tmm4, lines in tmm5 to tmm7.
    fn of_stream(rows: usize) -> Self {
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        for tile in 0..8 {
            config.row_bytes[tile] = LINE as u16;
            config.rows[tile] = if tile < 5 { rows } else { PANEL } as u8;
        }
        config
    }

    fn new(rows: usize) -> Self {
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
            tile(4 + half, rows, LINE);
        }
        for panel in 0..TILE_PANELS {
            tile(6 + panel, PANEL, LINE);
        }
        config
    }
}

/// What the assembly reads, and counts down, where registers would be too few.
#[repr(C)]
struct Call {
    config: Config,
    /// Tiles of rows that are left in the part, and all of them.
    row_tiles: usize,
    all_row_tiles: usize,
    /// Of the next tile of rows, and from one to the next.
    inputs: *const u8,
    inputs_step: usize,
    /// Where the part begins in the inputs and lines, and from one part to the next.
    part_inputs: *const u8,
    part_inputs_step: usize,
    lines: *const u8,
    lines_step: usize,
    panel_stride: usize,
    /// Where sums of the next tile of rows begin and what they begin with, and from one tile to the next.
    from: *const u8,
    from_stride: usize,
    from_step: usize,
    next_sums: *mut u8,
    sums_step: usize,
    /// The first of all.
    first_sums: *mut u8,
    /// Where the next sums go.
    sums: *mut u8,
    sums_stride: usize,
    /// Blocks of the part, those that are left of them, and those of later parts.
    blocks: usize,
    blocks_left: usize,
    blocks_later: usize,
    asked: *const Asked,
    asked_rows: usize,
    asked_lines: usize,
    /// Rows that are left to ask for.
    asked_left: usize,
    /// Of a block.
    steps: usize,
    /// From the end of a block of a row to the next one.
    skip: usize,
    /// From the lines of a block to those of the next one.
    line_skip: usize,
}

/// The block of assembly for some of the tiles: sums to clear, to load and to write, and by turns operands to load and products.
macro_rules! tiles {
    (
        $p:ident,
        clear: [$($clear:literal),*], begin: [$($begin:literal),*],
        step: [$($load:literal, [$($operands:literal),*], [$($spent:literal),*]);*], write: [$($write:literal),*]
    ) => {{
        let mut call = Call {
            config: Config::new($p.rows),
            row_tiles: $p.row_tiles,
            all_row_tiles: $p.row_tiles,
            inputs: $p.inputs,
            inputs_step: $p.rows * $p.row_stride,
            part_inputs: $p.inputs,
            part_inputs_step: $p.part * $p.block_stride,
            lines: $p.lines,
            lines_step: $p.part * ($p.steps * STEP_LINES + $p.line_skip),
            panel_stride: $p.panel_stride,
            from: $p.from,
            from_stride: $p.from_stride,
            from_step: $p.rows * $p.from_stride,
            next_sums: $p.sums,
            sums_step: $p.rows * $p.sums_stride,
            first_sums: $p.sums,
            sums: $p.sums,
            sums_stride: $p.sums_stride,
            blocks: $p.part.min($p.blocks),
            blocks_left: 0,
            blocks_later: $p.blocks.saturating_sub($p.part),
            asked: $p.asked,
            asked_rows: $p.asked_rows,
            asked_lines: $p.asked_lines,
            asked_left: 0,
            steps: $p.steps,
            skip: $p.block_stride.wrapping_sub($p.steps * LINE),
            line_skip: $p.line_skip,
        };
        // SAFETY: all pieces that are loaded are readable, and the sums writable, by the caller's promise; `self` proves the
        // instructions. Pointers to absent rows are moved and not used; hints fault at no address.
        unsafe {
            asm!(
                "ldtilecfg [{call}]",
                "8:",
                "mov {a0}, qword ptr [{call} + {INPUTS}]",
                "mov {a1}, {row}",
                "shl {a1}, 4",
                "add {a1}, {a0}",
                "mov {b0}, qword ptr [{call} + {LINES}]",
                "mov {b1}, qword ptr [{call} + {PANEL_STRIDE}]",
                "add {b1}, {b0}",
                "mov {half}, qword ptr [{call} + {INPUTS_STEP}]",
                "add qword ptr [{call} + {INPUTS}], {half}",
                "mov {half}, qword ptr [{call} + {NEXT_SUMS}]",
                "mov qword ptr [{call} + {SUMS}], {half}",
                "add {half}, qword ptr [{call} + {SUMS_STEP}]",
                "mov qword ptr [{call} + {NEXT_SUMS}], {half}",
                "mov {half}, qword ptr [{call} + {BLOCKS}]",
                "mov qword ptr [{call} + {BLOCKS_LEFT}], {half}",
                "mov {at}, qword ptr [{call} + {FROM}]",
                "test {at}, {at}",
                "jnz 2f",
                $($clear,)*
                "jmp 3f",
                "2:",
                "mov {half}, qword ptr [{call} + {FROM_STEP}]",
                "add qword ptr [{call} + {FROM}], {half}",
                "mov {stride}, qword ptr [{call} + {FROM_STRIDE}]",
                "mov {half}, {stride}",
                "shl {half}, 4",
                "add {half}, {at}",
                $($begin,)*
                "3:",
                "mov {half}, qword ptr [{call} + {ASKED}]",
                "mov {at}, qword ptr [{half}]",
                "mov {stride}, qword ptr [{half} + 8]",
                "add qword ptr [{call} + {ASKED}], {ASKED_SIZE}",
                "mov {steps}, qword ptr [{call} + {STEPS}]",
                "4:",
                $($load, $(concat!("tdpbf16ps ", $operands),)* $(concat!("tilezero ", $spent),)*)*
                "mov {half}, qword ptr [{call} + {ASKED_ROWS}]",
                "mov qword ptr [{call} + {ASKED_LEFT}], {half}",
                "7:",
                "mov {half}, qword ptr [{call} + {ASKED_LINES}]",
                "test {half}, {half}",
                "jz 6f",
                "5:",
                "prefetcht1 [{at}]",
                "add {at}, {stride}",
                "dec {half}",
                "jnz 5b",
                "mov {half}, qword ptr [{call} + {ASKED}]",
                "add {at}, qword ptr [{half} - 8]",
                "dec qword ptr [{call} + {ASKED_LEFT}]",
                "jnz 7b",
                "6:",
                "add {a0}, {LINE}",
                "add {a1}, {LINE}",
                "add {b0}, {STEP_LINES}",
                "add {b1}, {STEP_LINES}",
                "dec {steps}",
                "jnz 4b",
                "add {a0}, qword ptr [{call} + {SKIP}]",
                "add {a1}, qword ptr [{call} + {SKIP}]",
                "add {b0}, qword ptr [{call} + {LINE_SKIP}]",
                "add {b1}, qword ptr [{call} + {LINE_SKIP}]",
                "dec qword ptr [{call} + {BLOCKS_LEFT}]",
                "jnz 3b",
                "mov {sums}, qword ptr [{call} + {SUMS}]",
                "mov {sums_stride}, qword ptr [{call} + {SUMS_STRIDE}]",
                "mov {half}, {sums_stride}",
                "shl {half}, 4",
                "add {half}, {sums}",
                $($write,)*
                "dec qword ptr [{call} + {ROW_TILES}]",
                "jnz 8b",
                // The next part, which begins with the sums.
                "mov {half}, qword ptr [{call} + {BLOCKS_LATER}]",
                "test {half}, {half}",
                "jz 9f",
                "mov {steps}, qword ptr [{call} + {BLOCKS}]",
                "cmp {steps}, {half}",
                "cmova {steps}, {half}",
                "mov qword ptr [{call} + {BLOCKS}], {steps}",
                "sub {half}, {steps}",
                "mov qword ptr [{call} + {BLOCKS_LATER}], {half}",
                "mov {half}, qword ptr [{call} + {PART_INPUTS}]",
                "add {half}, qword ptr [{call} + {PART_INPUTS_STEP}]",
                "mov qword ptr [{call} + {PART_INPUTS}], {half}",
                "mov qword ptr [{call} + {INPUTS}], {half}",
                "mov {half}, qword ptr [{call} + {LINES_STEP}]",
                "add qword ptr [{call} + {LINES}], {half}",
                "mov {half}, qword ptr [{call} + {FIRST_SUMS}]",
                "mov qword ptr [{call} + {NEXT_SUMS}], {half}",
                "mov qword ptr [{call} + {FROM}], {half}",
                "mov qword ptr [{call} + {FROM_STRIDE}], {sums_stride}",
                "mov {half}, qword ptr [{call} + {SUMS_STEP}]",
                "mov qword ptr [{call} + {FROM_STEP}], {half}",
                "mov {half}, qword ptr [{call} + {ALL_ROW_TILES}]",
                "mov qword ptr [{call} + {ROW_TILES}], {half}",
                "jmp 8b",
                "9:",
                "tilerelease",
                call = in(reg) &mut call,
                a0 = out(reg) _,
                a1 = out(reg) _,
                row = in(reg) $p.row_stride,
                b0 = out(reg) _,
                b1 = out(reg) _,
                line = in(reg) LINE,
                steps = out(reg) _,
                // Where totals begin, then what is asked for; and how far rows, or lines, are apart.
                at = out(reg) _,
                stride = out(reg) _,
                // Where the other 16 rows of sums begin, or a number to count down.
                half = out(reg) _,
                sums = out(reg) _,
                sums_stride = out(reg) _,
                ROW_TILES = const offset_of!(Call, row_tiles),
                ALL_ROW_TILES = const offset_of!(Call, all_row_tiles),
                PART_INPUTS = const offset_of!(Call, part_inputs),
                PART_INPUTS_STEP = const offset_of!(Call, part_inputs_step),
                LINES_STEP = const offset_of!(Call, lines_step),
                FIRST_SUMS = const offset_of!(Call, first_sums),
                BLOCKS_LATER = const offset_of!(Call, blocks_later),
                INPUTS = const offset_of!(Call, inputs),
                INPUTS_STEP = const offset_of!(Call, inputs_step),
                LINES = const offset_of!(Call, lines),
                PANEL_STRIDE = const offset_of!(Call, panel_stride),
                FROM = const offset_of!(Call, from),
                FROM_STEP = const offset_of!(Call, from_step),
                NEXT_SUMS = const offset_of!(Call, next_sums),
                SUMS_STEP = const offset_of!(Call, sums_step),
                BLOCKS_LEFT = const offset_of!(Call, blocks_left),
                FROM_STRIDE = const offset_of!(Call, from_stride),
                SUMS = const offset_of!(Call, sums),
                SUMS_STRIDE = const offset_of!(Call, sums_stride),
                BLOCKS = const offset_of!(Call, blocks),
                ASKED = const offset_of!(Call, asked),
                ASKED_SIZE = const size_of::<Asked>(),
                ASKED_ROWS = const offset_of!(Call, asked_rows),
                ASKED_LEFT = const offset_of!(Call, asked_left),
                ASKED_LINES = const offset_of!(Call, asked_lines),
                SKIP = const offset_of!(Call, skip),
                LINE_SKIP = const offset_of!(Call, line_skip),
                STEPS = const offset_of!(Call, steps),
                LINE = const LINE,
                STEP_LINES = const PANEL * LINE,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }};
}

/// The blocks for all numbers of rows.
macro_rules! multiply {
    ($p:ident) => {
        match $p.rows > TILE_ROWS {
            true => tiles!(
                $p,
                clear: ["tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3"],
                begin: [
                    "tileloadd tmm0, [{at} + {stride}]", "tileloadd tmm1, [{at} + {stride} + 64]",
                    "tileloadd tmm2, [{half} + {stride}]", "tileloadd tmm3, [{half} + {stride} + 64]"
                ],
                step: [
                    "tileloaddt1 tmm4, [{a0} + {row}]", [], [];
                    "tileloadd tmm6, [{b0} + {line}]", ["tmm0, tmm4, tmm6"], [];
                    "tileloadd tmm7, [{b1} + {line}]", ["tmm1, tmm4, tmm7"], ["tmm4"];
                    "tileloaddt1 tmm5, [{a1} + {row}]", ["tmm2, tmm5, tmm6", "tmm3, tmm5, tmm7"], ["tmm5", "tmm6", "tmm7"]
                ],
                write: [
                    "tilestored [{sums} + {sums_stride}], tmm0", "tilestored [{sums} + {sums_stride} + 64], tmm1",
                    "tilestored [{half} + {sums_stride}], tmm2", "tilestored [{half} + {sums_stride} + 64], tmm3"
                ]
            ),
            false => tiles!(
                $p,
                clear: ["tilezero tmm0", "tilezero tmm1"],
                begin: ["tileloadd tmm0, [{at} + {stride}]", "tileloadd tmm1, [{at} + {stride} + 64]"],
                step: [
                    "tileloadd tmm4, [{a0} + {row}]", [], [];
                    "tileloadd tmm6, [{b0} + {line}]", ["tmm0, tmm4, tmm6"], ["tmm6"];
                    "tileloadd tmm7, [{b1} + {line}]", ["tmm1, tmm4, tmm7"], ["tmm4", "tmm7"]
                ],
                write: ["tilestored [{sums} + {sums_stride}], tmm0", "tilestored [{sums} + {sums_stride} + 64], tmm1"]
            ),
        }
    };
}

const _: () = assert!(
    size_of::<Asked>() == 24 && offset_of!(Asked, step) == 8 && offset_of!(Asked, next) == 16 && TILE_ROWS == 1 << 4
);
const _: () = assert!(TILE_PANELS == 2, "the assembly has these numbers");

// SAFETY: `detect` has seen the instructions; the assembly touches the rows, lines and sums of the steps that it counts.
unsafe impl TileUnit for Unit {
    unsafe fn multiply(self, p: &TileProduct) {
        // Registers would be configured wrongly, which is a trap.
        assert!((1..=2 * TILE_ROWS).contains(&p.rows));
        assert!(p.row_tiles > 0 && p.blocks > 0 && p.part > 0 && p.steps > 0);
        #[cfg(all(test, target_os = "linux"))]
        let _bounds = crate::emulator::Bounds::of(p);
        multiply!(p);
    }

    #[inline(always)]
    fn begin(self, rows: usize) {
        // Registers would be configured wrongly, which is a trap.
        assert!((1..=TILE_ROWS).contains(&rows));
        let config = Config::of_stream(rows);
        // SAFETY: `self` proves the instruction; a valid configuration.
        unsafe { asm!("ldtilecfg [{config}]", config = in(reg) &config, options(nostack, readonly)) }
    }

    #[inline(always)]
    unsafe fn clear(self) {
        // SAFETY: `self` proves the instructions; the tiles are configured, by the caller's promise.
        unsafe {
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, nomem),
            );
        }
    }

    #[inline(always)]
    unsafe fn load<const P: usize>(self, sums: *const u8) {
        assert!(P == 1 || P == 4);
        // SAFETY: sums are readable by the caller's promise; the tiles are configured since `begin`.
        unsafe {
            asm!(
                "tileloadd tmm0, [{sums} + {row}]",
                sums = in(reg) sums, row = in(reg) P * LINE, out("tmm0") _, options(nostack, readonly)
            );
            if P == 4 {
                asm!(
                    "tileloadd tmm1, [{sums} + {row} + {LINE}]",
                    "tileloadd tmm2, [{sums} + {row} + 2 * {LINE}]",
                    "tileloadd tmm3, [{sums} + {row} + 3 * {LINE}]",
                    sums = in(reg) sums, row = in(reg) P * LINE, LINE = const LINE,
                    out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    options(nostack, readonly),
                );
            }
        }
    }

    #[inline(always)]
    unsafe fn step<const P: usize>(self, inputs: *const u8, row_stride: usize, lines: *const u8) {
        assert!(P == 1 || P == 4);
        // SAFETY: rows and lines are readable by the caller's promise; the tiles are configured, and have their sums, since `begin`: compilers have no
        // instructions that touch them.
        unsafe {
            if P == 1 {
                asm!(
                    "tileloadd tmm4, [{inputs} + {row}]",
                    "tileloadd tmm5, [{lines} + {line}]",
                    "tdpbf16ps tmm0, tmm4, tmm5",
                    "tilezero tmm4",
                    "tilezero tmm5",
                    inputs = in(reg) inputs, row = in(reg) row_stride, lines = in(reg) lines, line = in(reg) LINE,
                    out("tmm0") _, out("tmm4") _, out("tmm5") _,
                    options(nostack, readonly),
                );
            } else {
                asm!(
                    "tileloadd tmm4, [{inputs} + {row}]",
                    "tileloadd tmm5, [{lines} + {line}]",
                    "tdpbf16ps tmm0, tmm4, tmm5",
                    "tilezero tmm5",
                    "tileloadd tmm6, [{lines} + {line} + {STEP_LINES}]",
                    "tdpbf16ps tmm1, tmm4, tmm6",
                    "tilezero tmm6",
                    "tileloadd tmm7, [{lines} + {line} + 2 * {STEP_LINES}]",
                    "tdpbf16ps tmm2, tmm4, tmm7",
                    "tilezero tmm7",
                    "tileloadd tmm5, [{lines} + {line} + 3 * {STEP_LINES}]",
                    "tdpbf16ps tmm3, tmm4, tmm5",
                    "tilezero tmm4",
                    "tilezero tmm5",
                    inputs = in(reg) inputs, row = in(reg) row_stride, lines = in(reg) lines, line = in(reg) LINE,
                    STEP_LINES = const STEP_LINES,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack, readonly),
                );
            }
        }
    }

    #[inline(always)]
    unsafe fn step_int8(self, inputs: *const u8, row_stride: usize, lines: *const u8, panel_stride: usize) {
        // SAFETY: rows and lines of four panels are readable by the caller's promise; the tiles are configured, and have their sums, since `begin`.
        unsafe {
            // Inputs are signed, weights are not.
            asm!(
                "tileloadd tmm4, [{inputs} + {row}]",
                "tileloadd tmm5, [{lines} + {line}]",
                "tdpbsud tmm0, tmm4, tmm5",
                "tilezero tmm5",
                "tileloadd tmm6, [{second} + {line}]",
                "tdpbsud tmm1, tmm4, tmm6",
                "tilezero tmm6",
                "tileloadd tmm7, [{third} + {line}]",
                "tdpbsud tmm2, tmm4, tmm7",
                "tilezero tmm7",
                "tileloadd tmm5, [{fourth} + {line}]",
                "tdpbsud tmm3, tmm4, tmm5",
                "tilezero tmm4",
                "tilezero tmm5",
                inputs = in(reg) inputs, row = in(reg) row_stride, line = in(reg) LINE,
                lines = in(reg) lines,
                second = in(reg) lines.wrapping_add(panel_stride),
                third = in(reg) lines.wrapping_add(2 * panel_stride),
                fourth = in(reg) lines.wrapping_add(3 * panel_stride),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly),
            );
        }
    }

    #[inline(always)]
    unsafe fn write<const P: usize>(self, sums: *mut u8) {
        assert!(P == 1 || P == 4);
        // SAFETY: sums are writable by the caller's promise; the tiles are configured, and have their sums, since `begin`.
        unsafe {
            asm!("tilestored [{sums} + {row}], tmm0", sums = in(reg) sums, row = in(reg) P * LINE, options(nostack));
            if P == 4 {
                asm!(
                    "tilestored [{sums} + {row} + {LINE}], tmm1",
                    "tilestored [{sums} + {row} + 2 * {LINE}], tmm2",
                    "tilestored [{sums} + {row} + 3 * {LINE}], tmm3",
                    sums = in(reg) sums, row = in(reg) P * LINE, LINE = const LINE,
                    options(nostack),
                );
            }
        }
    }

    #[inline(always)]
    fn end(self) {
        // SAFETY: `self` proves the instruction.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }
}
