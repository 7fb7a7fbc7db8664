//! Tile instructions on CPUs without them: they are illegal there, and the handler of that signal runs them on the model.
//!
//! The kernels' own assembly runs unchanged. Rows that are loaded or written by [`multiply`](kt_avx512::engine::TileUnit::multiply) are checked against what the
//! product may touch, which no sanitizer could do: it does not see into assembly. Those of streams are what each step's arguments say.

#![allow(unsafe_code)] // signals and registers

use std::cell::UnsafeCell;
use std::sync::Once;

use kt_avx512::engine::{LINE, PANEL, TILE_PANELS, TileProduct};
use libc::{REG_RIP, c_int, c_void, siginfo_t, ucontext_t};

use crate::model::{Dot, Tiles};

/// What a thread has: tiles, and what its product may touch.
struct State {
    tiles: Tiles,
    bounds: Option<Touched>,
}

thread_local! {
    static STATE: UnsafeCell<State> = const { UnsafeCell::new(State { tiles: Tiles::new(), bounds: None }) };
}

/// The memory of a product, as numbers.
#[derive(Clone, Copy)]
struct Touched {
    inputs: usize,
    rows: usize,
    row_stride: usize,
    block_stride: usize,
    row_bytes: usize,
    blocks: usize,
    lines: usize,
    panel_stride: usize,
    line_skip: usize,
    from: usize,
    from_stride: usize,
    sums: usize,
    sums_stride: usize,
    /// Whether later parts begin with the sums of those before.
    in_parts: bool,
}

impl Touched {
    fn of(p: &TileProduct) -> Self {
        Touched {
            inputs: p.inputs.addr(),
            rows: p.rows * p.row_tiles,
            row_stride: p.row_stride,
            block_stride: p.block_stride,
            row_bytes: p.steps * LINE,
            blocks: p.blocks,
            lines: p.lines.addr(),
            panel_stride: p.panel_stride,
            line_skip: p.line_skip,
            from: p.from.addr(),
            from_stride: p.from_stride,
            sums: p.sums.addr(),
            sums_stride: p.sums_stride,
            in_parts: p.part < p.blocks,
        }
    }

    /// Whether `at .. at + bytes` is within the sums of a row that is there.
    fn sum(&self, at: usize, bytes: usize) -> bool {
        self.rows_of(self.sums, self.sums_stride, at, bytes)
    }

    /// Whether it is within what they begin with.
    fn beginning(&self, at: usize, bytes: usize) -> bool {
        self.from > 0 && self.rows_of(self.from, self.from_stride, at, bytes) || self.in_parts && self.sum(at, bytes)
    }

    /// Whether it is within the numbers of both panels of a row that is there.
    fn rows_of(&self, start: usize, stride: usize, at: usize, bytes: usize) -> bool {
        let within = |start: usize| at >= start && at + bytes <= start + TILE_PANELS * LINE;
        (0..self.rows).any(|r| within(start + r * stride))
    }

    /// Whether it is within a block of an input row, or the lines of a panel.
    fn operand(&self, at: usize, bytes: usize) -> bool {
        let within = |start: usize, len: usize| at >= start && at + bytes <= start + len;
        let row = (0..self.blocks).any(|b| {
            let block = self.inputs + b * self.block_stride;
            at >= block
                && (at - block) / self.row_stride < self.rows
                && within(block + (at - block) / self.row_stride * self.row_stride, self.row_bytes)
        });
        let lines =
            |p: usize, b: usize| self.lines + p * self.panel_stride + b * ((self.row_bytes * PANEL) + self.line_skip);
        let line = |p: usize| (0..self.blocks).any(|b| within(lines(p, b), self.row_bytes * PANEL));
        row || (0..TILE_PANELS).any(line)
    }
}

/// While it lives, the thread's tile instructions may touch what a product names, and nothing else.
pub struct Bounds(());

impl Bounds {
    pub fn of(product: &TileProduct) -> Self {
        // SAFETY: no instruction of this thread is being emulated now, so nobody else looks at its state.
        STATE.with(|s| unsafe { (*s.get()).bounds = Some(Touched::of(product)) });
        Bounds(())
    }
}

impl Drop for Bounds {
    fn drop(&mut self) {
        // SAFETY: as above.
        STATE.with(|s| unsafe { (*s.get()).bounds = None });
    }
}

/// Installs the handler, once for the process.
pub fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: zeros are a valid action, which is then filled in.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = on_illegal as extern "C" fn(c_int, *mut siginfo_t, *mut c_void) as usize;
        action.sa_flags = libc::SA_SIGINFO;
        // SAFETY: the handler touches the thread's own state and registers only.
        let rc = unsafe { libc::sigaction(libc::SIGILL, &action, std::ptr::null_mut()) };
        assert_eq!(rc, 0, "cannot install the emulator");
    });
}

/// Says what is wrong without allocating, and ends the process.
fn fail(what: &str) -> ! {
    for text in ["tile emulator: ", what, "\n"] {
        // SAFETY: writes bytes that are there.
        unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
    }
    // SAFETY: ends the process.
    unsafe { libc::abort() }
}

extern "C" fn on_illegal(_: c_int, _: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the system gives the handler a context of this type.
    let registers = unsafe { &mut (*context.cast::<ucontext_t>()).uc_mcontext.gregs };
    // SAFETY: the thread is in a tile instruction: it has no reference to its state.
    let state = STATE.with(|s| unsafe { &mut *s.get() });
    let mut ran = false;
    // Tile instructions often follow each other: run as many as do.
    loop {
        let rip = registers[REG_RIP as usize] as usize;
        // SAFETY: code is readable; an instruction that is not one of tiles is looked at no further than its second byte, and those
        // that are have five at least.
        let code = unsafe { std::slice::from_raw_parts(rip as *const u8, 2) };
        if code[0] != 0xc4 || code[1] & 0x1f != 2 {
            break;
        }
        // SAFETY: three-byte VEX, map 0F38: 5 to 10 bytes, within the assembly, which ends with other instructions.
        let code = unsafe { std::slice::from_raw_parts(rip as *const u8, 10) };
        match step(state, registers, code) {
            Ok(0) => break,
            Ok(len) => registers[REG_RIP as usize] += len as i64,
            Err(why) => fail(why),
        }
        ran = true;
    }
    if !ran {
        fail("an illegal instruction that is none of tiles");
    }
}

/// General registers in the order of their numbers.
const REGISTERS: [c_int; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

/// Runs one instruction; returns its bytes, or 0 if it is none of tiles.
fn step(state: &mut State, registers: &[i64; 23], code: &[u8]) -> Result<usize, &'static str> {
    // No other instructions of this map have these opcodes.
    if !matches!(code[3], 0x49 | 0x4b | 0x5c | 0x5e) {
        return Ok(0);
    }
    let register = |n: u8| registers[REGISTERS[n as usize] as usize] as usize;
    // The bits of VEX that extend register numbers are inverted, and so is its own operand.
    let [r, x, b] = [7, 6, 5].map(|n| (!code[1] >> n & 1) << 3);
    let (vvvv, l, pp) = (!code[2] >> 3 & 15, code[2] >> 2 & 1, code[2] & 3);
    let (opcode, modrm) = (code[3], code[4]);
    let (mode, reg, rm) = (modrm >> 6, modrm >> 3 & 7 | r, modrm & 7);
    // The address of a memory operand: base and displacement, index times scale, bytes of the instruction.
    let memory = || -> Result<(usize, usize, usize), &'static str> {
        let (mut base, mut index, mut len) = (rm | b, None, 5);
        if rm == 4 {
            let sib = code[5];
            len = 6;
            base = sib & 7 | b;
            let number = sib >> 3 & 7 | x;
            index = (number != 4).then(|| register(number) << (sib >> 6));
        }
        let displacement = match mode {
            0 if base & 7 == 5 => return Err("an address without a base"),
            0 => 0,
            1 => code[len] as i8 as isize,
            2 => i32::from_le_bytes([code[len], code[len + 1], code[len + 2], code[len + 3]]) as isize,
            _ => return Err("a register in place of memory"),
        };
        let len = len + [0, 1, 4][mode as usize];
        Ok((register(base).wrapping_add_signed(displacement), index.unwrap_or(0), len))
    };
    if l != 0 || code[2] & 0x80 != 0 {
        return Err("L or W is set");
    }
    let tiles = &mut state.tiles;
    match (opcode, pp, mode) {
        (0x49, 0, 3) if modrm == 0xc0 => tiles.release(),
        (0x49, 0, 0..=2) => {
            let (at, index, len) = memory()?;
            // SAFETY: the operand of `ldtilecfg`, 64 bytes.
            tiles.configure(unsafe { &*((at + index) as *const [u8; 64]) })?;
            return Ok(len);
        }
        (0x49, 3, 3) => tiles.zero(reg as usize & 7)?,
        (0x4b, 1..=3, 0..=2) => {
            let (at, stride, len) = memory()?;
            if rm != 4 {
                return Err("a tile's rows need an index register");
            }
            let (write, tile) = (pp == 2, reg as usize & 7);
            let (rows, bytes) = tiles.shape(tile)?;
            for (r, row) in tiles.data[tile].iter_mut().enumerate() {
                row[if r < rows && !write {
                    bytes
                } else if write {
                    64
                } else {
                    0
                }..]
                    .fill(0);
                if r >= rows {
                    continue;
                }
                let at = at.wrapping_add(r.wrapping_mul(stride));
                if let Some(bounds) = &state.bounds
                    && !(if write {
                        bounds.sum(at, bytes)
                    } else {
                        bounds.beginning(at, bytes) || bounds.operand(at, bytes)
                    })
                {
                    return Err("a row out of bounds");
                }
                // SAFETY: a row of what the product may touch, or of what a test has given.
                unsafe {
                    if write {
                        std::ptr::copy_nonoverlapping(row.as_ptr(), at as *mut u8, bytes);
                    } else {
                        std::ptr::copy_nonoverlapping(at as *const u8, row.as_mut_ptr(), bytes);
                    }
                }
            }
            return Ok(len);
        }
        (0x5c | 0x5e, 2, 3) => {
            let dot = if opcode == 0x5c { Dot::Bf16 } else { Dot::Bytes };
            tiles.multiply(dot, reg as usize & 7, rm as usize, vvvv as usize)?
        }
        _ => return Err("a tile instruction that kernels do not use"),
    }
    Ok(5)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::arch::asm;

    #[test]
    fn rows_beside_those_of_a_product_are_out_of_bounds() {
        // 17 rows of two blocks with 64 bytes more, panels with 64 bytes between their blocks.
        let p = TileProduct {
            steps: 4,
            rows: 17,
            row_tiles: 1,
            blocks: 2,
            part: 2,
            inputs: 0x10000 as *const u8,
            row_stride: 320,
            block_stride: 0x4000,
            lines: 0x20000 as *const u8,
            line_skip: 64,
            panel_stride: 0x8000,
            from: 0x40000 as *const u8,
            from_stride: 256,
            sums: 0x30000 as *mut u8,
            sums_stride: 128,
            asked: std::ptr::null(),
            asked_rows: 0,
            asked_lines: 0,
        };
        let of = Touched::of(&p);
        for (at, bytes, within) in [
            (0x10000, 64, true),
            (0x10000 + 16 * 320 + 192, 64, true),
            (0x14000 + 320, 64, true),
            (0x10000 + 17 * 320, 64, false), // an absent row
            (0x10000 + 193, 64, false),      // beyond the numbers
            (0x18000, 64, false),            // an absent block
            (0x20000 + 4096 - 64, 64, true),
            (0x20000 + 4096, 64, false), // between blocks
            (0x20000 + 4096 + 64, 64, true),
            (0x20000 + 8192, 64, true),
            (0x20000 + 8192 + 64, 64, false),
            (0x28000, 64, true),  // panel 1
            (0x30000, 64, false), // sums are no operands
        ] {
            assert_eq!(of.operand(at, bytes), within, "{at:#x}");
        }
        for (at, bytes, within) in [
            (0x30000, 64, true),
            (0x30000 + 16 * 128, 64, true),
            (0x30000 + 64, 64, true), // panel 1
            (0x30000 + 128 - 32, 64, false),
            (0x30000 + 17 * 128, 64, false), // row 17
            (0x31000, 64, false),
            (0x2ffff, 64, false),
            (0x40000, 64, false), // not to be written
        ] {
            assert_eq!(of.sum(at, bytes), within, "{at:#x}");
        }
        for (at, bytes, within) in
            [(0x40000, 64, true), (0x40000 + 16 * 256 + 64, 64, true), (0x40000 + 128, 64, false), (0x30000, 64, false)]
        {
            assert_eq!(of.beginning(at, bytes), within, "{at:#x}");
        }
        // Later parts begin with the sums.
        let of = Touched::of(&TileProduct { part: 1, ..p });
        for (at, within) in
            [(0x40000, true), (0x30000, true), (0x30000 + 16 * 128 + 64, true), (0x30000 + 17 * 128, false)]
        {
            assert_eq!(of.beginning(at, 64), within, "{at:#x}");
        }
    }

    #[test]
    fn instructions_are_decoded_as_they_are_assembled() {
        if !std::arch::is_x86_feature_detected!("avx512f") {
            eprintln!("skipped: this CPU has no avx512f");
            return;
        }
        if kt_core::cpu::amx::permission().is_err() {
            install();
        }
        let mut config = [0u8; 64];
        config[0] = 1;
        // 3 rows, 2 dwords, 16 outputs.
        for (tile, (rows, bytes)) in [(3, 64), (3, 8), (2, 64)].into_iter().enumerate() {
            config[16 + 2 * tile] = bytes;
            config[48 + tile] = rows;
        }
        // Small integers as BF16.
        let numbers = |times: usize| -> Vec<u8> {
            (0..128)
                .map(|i| (((i * times % 37) as f32 - 18.0).to_bits() >> 16) as u16)
                .flat_map(u16::to_le_bytes)
                .collect()
        };
        let (a, b) = (numbers(5), numbers(11));
        let mut c = 2f32.to_le_bytes().repeat(4 * 16);
        // SAFETY: operands as large as the configuration says.
        unsafe {
            asm!(
                "ldtilecfg [{config}]",
                "tileloadd tmm0, [{c} + {stride}]",
                "tileloaddt1 tmm1, [{a} + {stride}]",
                "tileloadd tmm2, [{b} + {stride} * 1 + 64]",
                "tdpbf16ps tmm0, tmm1, tmm2",
                "tilestored [{c} + {stride}], tmm0",
                "tilerelease",
                config = in(reg) &config, a = in(reg) a.as_ptr(), b = in(reg) b.as_ptr(), c = in(reg) c.as_mut_ptr(),
                stride = in(reg) 64usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, options(nostack)
            );
        }
        let at = |v: &[u8], k: usize| f32::from_bits(u32::from(u16::from_le_bytes([v[2 * k], v[2 * k + 1]])) << 16);
        for r in 0..4 {
            for n in 0..16 {
                let got = f32::from_le_bytes(c[r * 64 + n * 4..][..4].try_into().unwrap());
                let mut want = 2.0;
                for k in 0..if r < 3 { 4 } else { 0 } {
                    want += at(&a, r * 32 + k) * at(&b, (1 + k / 2) * 32 + 2 * n + k % 2);
                }
                assert_eq!(got, want, "row {r}, output {n}");
            }
        }
    }
}
