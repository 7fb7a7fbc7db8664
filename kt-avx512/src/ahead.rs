//! How weights and inputs are asked for before they are used.
//!
//! The hardware does so within a page only, and too late for lines that are unpacked. For weights that stream, which hint is best, and
//! how far ahead, differs by CPU by more than any kernel does. Measured in layers (`PERFORMANCE.md`):
//!
//! | CPU | streams of a tile | hint | ahead |
//! | --- | --- | --- | --- |
//! | AMD Zen 5 | any | to the first level, past the others | 4 KiB; 8 KiB from three rows on |
//! | AMD Zen 4 | one panel of nibbles, one or two rows; one panel of other integers, up to four | none: the order of addresses | |
//! | AMD Zen 4 | a bundle, one or two rows | none: the order of addresses | |
//! | AMD Zen 4 | several panels, or five rows and more | to the second level | 8 KiB |
//! | AMD Zen 4 | other panels, one at a time, up to four rows | to the first level, past the others | 4 KiB |
//! | AMD Zen 3 | any | as Zen 4; at one row none was better for all formats, more rows not measured | |
//! | others | as Zen 4, not measured | | |

#![allow(unsafe_code)] // hints, and what the CPU is

use std::arch::x86_64::{_MM_HINT_NTA, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
use std::cell::Cell;
use std::sync::LazyLock;

use crate::layout::LINE;

/// Family 1Ah; 19h is Zen 3 and 4.
static IS_ZEN5: LazyLock<bool> = LazyLock::new(|| amd_family() == Some(0x1a));

/// How a tile asks for lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ahead {
    /// To the second level; else to the first one only.
    second: bool,
    /// Bytes ahead of use, over all panels of a tile; past the end of a panel, in the panels that come next. 0: of the line itself, which asks for
    /// nothing.
    pub(crate) bytes: usize,
}

impl Ahead {
    /// For tiles of so many rows and panels, of `integers` or other numbers, that are a whole `bundle` or not.
    pub(crate) fn of(rows: usize, panels: usize, integers: bool, bundle: bool) -> Ahead {
        if !*IS_ZEN5 && (integers && panels == 1 && rows <= 4 || bundle && rows <= 2) {
            return Ahead { second: true, bytes: 0 };
        }
        let second = !*IS_ZEN5 && (panels > 1 || rows > 4);
        let far = second || *IS_ZEN5 && rows > 2;
        Ahead { second, bytes: if far { 8 << 10 } else { 4 << 10 } }
    }

    /// Hints that the line at `p` will be read soon, and once; any address will do.
    #[inline(always)]
    pub(crate) fn ask(self, p: *const u8) {
        if self.second {
            prefetch_later(p);
        } else {
            // SAFETY: prefetching faults at no address, and SSE is part of x86-64.
            unsafe { _mm_prefetch::<_MM_HINT_NTA>(p.cast()) }
        }
    }
}

/// Lines that will be read later, asked for a few at a time while what is in the cache is multiplied: all at once they would wait for each
/// other.
#[derive(Default)]
pub struct Later {
    /// Where each range of lines begins, how many lines it has, and how many lines one is from the next.
    ranges: [Cell<(usize, usize, usize)>; RANGES],
    /// How many of them there are, and which is next.
    len: Cell<usize>,
    next: Cell<usize>,
    /// Lines to ask for at a time.
    each: Cell<usize>,
}

/// Where lines are asked for to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    /// For integer products of many rows: on Zen 4 layers are up to 8 % faster so, though what is asked for is due only some microseconds later.
    /// Those of floats are slower.
    First,
    /// For others.
    Second,
}

/// The parts of two panels, and inputs.
const RANGES: usize = 2 * 2 + 1;

impl Later {
    /// Forgets what is left, to begin anew.
    pub(crate) fn clear(&self) {
        self.len.set(0);
        self.next.set(0);
        self.each.set(0);
    }

    /// Adds `bytes` from `at` on; any address will do.
    pub(crate) fn add(&self, at: *const u8, bytes: usize) {
        self.add_lines(at, bytes, LINE);
    }

    /// Adds `bytes` in lines that are `step` bytes apart, from the beginning of one if that is more than a line.
    pub(crate) fn add_lines(&self, at: *const u8, bytes: usize, step: usize) {
        if bytes > 0 {
            let first = at.addr() / LINE;
            let lines = (at.addr() % LINE + bytes).div_ceil(LINE);
            self.ranges[self.len.get()].set((first, lines, step / LINE));
            self.len.set(self.len.get() + 1);
        }
    }

    /// Sets how many lines go each time, for all to be asked for in `times`.
    pub(crate) fn spread(&self, times: usize) {
        let lines: usize = self.ranges[..self.len.get()].iter().map(|range| range.get().1).sum();
        self.each.set(lines.div_ceil(times));
    }

    /// Asks for those whose turn it is.
    #[inline(always)]
    pub(crate) fn ask(&self, to: Level) {
        let mut left = self.each.get();
        while left > 0 && self.next.get() < self.len.get() {
            let range = &self.ranges[self.next.get()];
            let (first, lines, step) = range.get();
            let now = left.min(lines);
            for line in 0..now {
                let at = std::ptr::without_provenance((first + line * step) * LINE);
                match to {
                    Level::First => prefetch_now(at),
                    Level::Second => prefetch_later(at),
                }
            }
            range.set((first + now * step, lines - now, step));
            left -= now;
            if now == lines {
                self.next.set(self.next.get() + 1);
            }
        }
    }
}

/// Hints that the line at `p` will be read later, from the second level; any address will do.
#[inline(always)]
pub(crate) fn prefetch_later(p: *const u8) {
    // SAFETY: prefetching faults at no address, and SSE is part of x86-64.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
}

/// Hints that the line at `p` will be read now, from the first level; any address will do.
#[inline(always)]
pub(crate) fn prefetch_now(p: *const u8) {
    // SAFETY: prefetching faults at no address, and SSE is part of x86-64.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
}

/// The family of a CPU of AMD.
fn amd_family() -> Option<u32> {
    #[allow(unused_unsafe)] // safe in later versions of Rust
    let cpuid = |leaf| {
        // SAFETY: all x86-64 CPUs have the instruction, and these leaves.
        unsafe { std::arch::x86_64::__cpuid(leaf) }
    };
    let id = cpuid(0);
    let amd = [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD";
    let version = cpuid(1).eax;
    let (base, extended) = (version >> 8 & 0xf, version >> 20 & 0xff);
    amd.then_some(if base == 0xf { base + extended } else { base })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hint_is_as_the_table_says() {
        let zen5 = amd_family() == Some(0x1a);
        for integers in [false, true] {
            for (rows, panels) in [(4, 4), (8, 1)] {
                assert_eq!(Ahead::of(rows, panels, integers, false), Ahead { second: !zen5, bytes: 8192 });
            }
            let none = integers && !zen5;
            for rows in [1, 2] {
                assert_eq!(
                    Ahead::of(rows, 1, integers, false),
                    Ahead { second: none, bytes: if none { 0 } else { 4096 } }
                );
            }
        }
    }

    #[test]
    fn what_comes_later_is_asked_for_in_so_many_times() {
        let bytes = [0u8; 1000];
        for (lengths, times) in [(&[1000, 64, 1, 0][..], 4), (&[1], 3), (&[], 2), (&[700, 1000], 100)] {
            let later = Later::default();
            lengths.iter().for_each(|&n| later.add(bytes.as_ptr(), n));
            later.spread(times);
            let lines: usize = later.ranges.iter().map(|range| range.get().1).sum();
            let asked = || lines - later.ranges.iter().map(|range| range.get().1).sum::<usize>();
            for time in 1..=times {
                later.ask(if time % 2 == 0 { Level::First } else { Level::Second });
                assert_eq!(asked(), lines.min(time * lines.div_ceil(times)), "{lengths:?}, {time} of {times}");
            }
            assert_eq!(later.next, later.len, "{lengths:?} in {times}");
        }
    }

    #[test]
    fn the_family_is_what_the_system_says() {
        let Ok(text) = std::fs::read_to_string("/proc/cpuinfo") else {
            return println!("skipped: no /proc/cpuinfo");
        };
        let field = |name: &str| text.lines().find(|l| l.starts_with(name)).and_then(|l| l.split(": ").nth(1));
        let amd = field("vendor_id") == Some("AuthenticAMD");
        let family = field("cpu family").and_then(|f| f.parse().ok());
        assert_eq!(amd_family(), family.filter(|_| amd));
    }
}
