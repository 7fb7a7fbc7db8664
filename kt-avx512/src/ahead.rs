//! How weights and inputs are asked for before they are used.
//!
//! The hardware does so within a page only, and too late for lines that are unpacked. For weights that stream, which hint is best, and
//! how far ahead, differs by CPU by more than any kernel does. Measured in layers (`PERFORMANCE.md`):
//!
//! | CPU | streams of a tile | hint | ahead |
//! | --- | --- | --- | --- |
//! | AMD Zen 5 | any | to the first level, past the others | 4 KiB; 8 KiB from three rows on |
//! | AMD Zen 4 | one panel of integers, up to four rows | none: the order of addresses | |
//! | AMD Zen 4 | a bundle, one or two rows | none: the order of addresses | |
//! | AMD Zen 4 | several panels, part of a bundle, or five rows and more | to the second level | 8 KiB |
//! | AMD Zen 4 | other panels, one at a time, up to four rows | to the first level, past the others | 4 KiB |
//! | AMD Zen 3 | integers and bundles; several panels, part of a bundle, or five rows and more | to the second level | 8 KiB |
//! | AMD Zen 3 | other panels, one at a time, up to four rows | to the first level, past the others | 4 KiB |
//! | Intel, by Xeons with AMX (the 6 KiB by one of two) | any | to the second level, then to the first | 8 KiB, then 6 KiB |
//! | others | with AVX-512 as Zen 4, else as Zen 3; not measured | | |
//!
//! Lines that steps share have two hints each and no branch (`Ahead::ask_at`): for those on Zen 5 the first level is not past the others.

#![allow(unsafe_code)] // hints, and what the CPU is

use std::arch::x86_64::{_MM_HINT_NTA, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
use std::cell::Cell;
use std::sync::LazyLock;

use crate::isa::Ports;
use crate::layout::{LINE, MOST_PANELS};

/// CPUs that want other hints than the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cpu {
    /// Family 1Ah of AMD; 19h is Zen 3 and 4. Measured on server parts: some others have units of 256 bits.
    Zen5,
    /// Any of Intel's.
    Intel,
    /// Zen 3, and those without AVX-512 that nobody measured.
    Zen3,
    /// Zen 4, and those that nobody measured.
    Other,
}

static CPU: LazyLock<Cpu> = LazyLock::new(|| match vendor_and_family() {
    (vendor, 0x1a) if &vendor == AMD => Cpu::Zen5,
    (vendor, _) if &vendor == INTEL => Cpu::Intel,
    _ if !std::arch::is_x86_feature_detected!("avx512f") => Cpu::Zen3,
    _ => Cpu::Other,
});

/// What vector operations beside products cost on this CPU.
pub(crate) fn ports() -> Ports {
    match *CPU {
        Cpu::Intel => Ports::Shared,
        Cpu::Zen5 => Ports::Double,
        Cpu::Zen3 | Cpu::Other => Ports::Own,
    }
}

const AMD: &[u8; 12] = b"AuthenticAMD";
const INTEL: &[u8; 12] = b"GenuineIntel";

/// Where weights that stream are asked for to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum To {
    /// The second level.
    Second,
    /// The first one, past the others.
    First,
    /// The second level, and the first one when they are due [`NEAR`] bytes later.
    Both,
}

/// See [`To::Both`]; over all panels of a tile.
const NEAR: usize = 6 << 10;

/// How a tile asks for lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ahead {
    to: To,
    /// Bytes ahead of use, over all panels of a tile; past the end of a panel, in the panels that come next. 0: of the line itself, which asks for
    /// nothing.
    pub(crate) bytes: usize,
}

impl Ahead {
    /// For lines that are in the cache.
    pub(crate) const NONE: Ahead = Ahead { to: To::Second, bytes: 0 };

    /// For tiles of so many rows and panels, of `integers` or other numbers, where so many panels take turns.
    pub(crate) fn of(rows: usize, panels: usize, integers: bool, bundle: usize) -> Ahead {
        Ahead::on(*CPU, rows, panels, integers, bundle)
    }

    /// [`Ahead::of`], on that CPU.
    fn on(cpu: Cpu, rows: usize, panels: usize, integers: bool, bundle: usize) -> Ahead {
        // Lines of one panel of a bundle are not one after the other.
        let part = panels < bundle;
        let in_order = !part && (integers && panels == 1 && rows <= 4 || panels == bundle && bundle > 1 && rows <= 2);
        let (to, kib) = match cpu {
            Cpu::Zen5 => (To::First, if rows > 2 { 8 } else { 4 }),
            Cpu::Intel => (To::Both, 8),
            Cpu::Other if in_order => (To::Second, 0),
            Cpu::Zen3 | Cpu::Other if in_order || part || panels > 1 || rows > 4 => (To::Second, 8),
            Cpu::Zen3 | Cpu::Other => (To::First, 4),
        };
        Ahead { to, bytes: kib << 10 }
    }

    /// Hints that what is at `p`, but is no line of weights, will be read soon; any address will do.
    #[inline(always)]
    pub(crate) fn ask(self, p: *const u8) {
        if self.to == To::First { prefetch_past(p) } else { prefetch_later(p) }
    }

    /// Hints that the line that is `ahead` bytes from the one at `line` will be read soon, and once; `panels` of them are read by turns, each elsewhere. Any
    /// address will do.
    #[inline(always)]
    pub(crate) fn ask_line(self, line: *const u8, ahead: usize, panels: usize) {
        let p = line.wrapping_add(ahead);
        if self.to == To::Second {
            prefetch_later(p);
        } else if self.to == To::First {
            prefetch_past(p);
        } else {
            prefetch_later(p);
            prefetch_now(line.wrapping_add(NEAR / panels));
        }
    }

    /// How far ahead of a line to ask for another one to the second level, and to the first, if that is `ahead` bytes from it, for [`Ahead::ask_at`]; `panels` are
    /// read by turns, each elsewhere. 0: of the line itself, which asks for nothing.
    #[inline(always)]
    pub(crate) fn distances(self, ahead: usize, panels: usize) -> [usize; 2] {
        match self.to {
            To::Second => [ahead, 0],
            To::First => [0, ahead],
            To::Both => [ahead, NEAR / panels],
        }
    }

    /// Asks for the lines that are so far ahead of one, as [`Ahead::distances`] says: two hints, and no branch, behind which compilers put products off. Any address will do.
    #[inline(always)]
    pub(crate) fn ask_at(line: *const u8, [second, first]: [usize; 2]) {
        prefetch_later(line.wrapping_add(second));
        prefetch_now(line.wrapping_add(first));
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
    /// Lines to ask for at a time, and where to.
    each: Cell<usize>,
    to: Cell<Level>,
}

/// Lines for a loop to ask for, to the second level.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hints {
    /// The first one.
    pub(crate) at: *const u8,
    /// Bytes from one to the next.
    pub(crate) step: usize,
    /// How many each time.
    pub(crate) each: usize,
}

/// Where lines are asked for to.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    /// Where many rows pass over the lines before: layers are up to 8 % faster so, though what is asked for is due only some microseconds later. On Zen 5,
    /// any number of rows. Not where products are in assembly on Intel ([`Later::take_times`]).
    First,
    /// Where there are fewer: with as many hints for less work, what is read now would wait for what the first level has for misses.
    #[default]
    Second,
}

/// From how many rows on it is the first one, with registers of 64 bytes. With weights from memory (Zen 4, INT8) 9 rows took 160 us with hints to the first
/// level and 95 with those to the second, 16 rows 185 and 146, 24 rows 208 and 207, 32 rows 250 and 268. On Zen 5 it always is: layers of 256 tokens, 16 rows,
/// took 28 to 30 ms with hints to the second level and 20 with those to the first (Q6_K), 18.2 and 15.6 (INT4 g32).
const FIRST_ROWS: usize = 24;

impl Level {
    /// For products of so many rows with registers of 64 bytes (`large`), or of 32, which take twice as long: counted, not measured.
    pub(crate) fn of(rows: usize, large: bool) -> Level {
        Level::on(*CPU, rows, large)
    }

    /// [`Level::of`], on that CPU.
    fn on(cpu: Cpu, rows: usize, large: bool) -> Level {
        let few = rows < if large { FIRST_ROWS } else { FIRST_ROWS / 2 };
        if few && cpu != Cpu::Zen5 { Level::Second } else { Level::First }
    }
}

/// Panels, and inputs.
const RANGES: usize = MOST_PANELS + 1;

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

    /// Sets how many lines go each time, for all to be asked for in `times`, and where to.
    pub(crate) fn spread(&self, times: usize, to: Level) {
        let lines: usize = self.ranges[..self.len.get()].iter().map(|range| range.get().1).sum();
        self.each.set(lines.div_ceil(times));
        self.to.set(to);
    }

    /// Asks for those whose turn it is.
    #[inline(always)]
    pub(crate) fn ask(&self) {
        let (mut left, to) = (self.each.get(), self.to.get());
        while let Some((at, lines, step)) = self.take(left) {
            for line in 0..lines {
                let at = at.wrapping_add(line * step);
                match to {
                    Level::First => prefetch_now(at),
                    Level::Second => prefetch_later(at),
                }
            }
            left -= lines;
        }
    }

    /// Whether all of them were asked for.
    pub(crate) fn is_done(&self) -> bool {
        self.next.get() >= self.len.get()
    }

    /// How many go each time.
    #[inline(always)]
    pub(crate) fn each(&self) -> usize {
        self.each.get()
    }

    /// Takes what goes so many times, for a loop to ask for. What does not go on for as long is asked for now.
    #[inline(always)]
    pub(crate) fn take_times(&self, times: usize) -> Hints {
        let mut left = self.each.get() * times;
        let (mut hints, mut most) = (Hints { at: std::ptr::null(), step: 0, each: 0 }, 0);
        while let Some((at, lines, step)) = self.take(left) {
            left -= lines;
            let (now, now_step, now_lines) =
                if lines > most { (hints.at, hints.step, most) } else { (at, step, lines) };
            (0..now_lines).for_each(|line| prefetch_later(now.wrapping_add(line * now_step)));
            if lines > most {
                (hints, most) = (Hints { at, step, each: lines.div_ceil(times) }, lines);
            }
        }
        hints
    }

    /// Takes up to `most` lines that are equally far apart, for the caller to ask for: the first one, how many there are, and bytes from one to the
    /// next. None where `most` is 0 or nothing is left.
    #[inline(always)]
    pub(crate) fn take(&self, most: usize) -> Option<(*const u8, usize, usize)> {
        if most == 0 || self.next.get() >= self.len.get() {
            return None;
        }
        let range = &self.ranges[self.next.get()];
        let (first, lines, step) = range.get();
        let now = most.min(lines);
        range.set((first + now * step, lines - now, step));
        if now == lines {
            self.next.set(self.next.get() + 1);
        }
        Some((std::ptr::without_provenance(first * LINE), now, step * LINE))
    }
}

/// Hints that the line at `p` will be read later, from the second level; any address will do.
#[inline(always)]
pub(crate) fn prefetch_later(p: *const u8) {
    // SAFETY: prefetching faults at no address, and SSE is part of x86-64.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
}

/// Hints that the line at `p` will be read soon, from the first level, and once; any address will do.
#[inline(always)]
fn prefetch_past(p: *const u8) {
    // SAFETY: prefetching faults at no address, and SSE is part of x86-64.
    unsafe { _mm_prefetch::<_MM_HINT_NTA>(p.cast()) }
}

/// Hints that the line at `p` will be read now, from the first level; any address will do.
#[inline(always)]
pub(crate) fn prefetch_now(p: *const u8) {
    // SAFETY: prefetching faults at no address, and SSE is part of x86-64.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
}

/// The CPU's vendor, and its family as that vendor counts.
fn vendor_and_family() -> ([u8; 12], u32) {
    #[allow(unused_unsafe)] // safe in later versions of Rust
    let cpuid = |leaf| {
        // SAFETY: all x86-64 CPUs have the instruction, and these leaves.
        unsafe { std::arch::x86_64::__cpuid(leaf) }
    };
    let id = cpuid(0);
    let mut vendor = [0; 12];
    vendor.as_chunks_mut::<4>().0.copy_from_slice(&[id.ebx, id.edx, id.ecx].map(u32::to_le_bytes));
    let version = cpuid(1).eax;
    let (base, extended) = (version >> 8 & 0xf, version >> 20 & 0xff);
    (vendor, if base == 0xf { base + extended } else { base })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hint_is_as_the_table_says() {
        use To::{Both, First, Second};
        // Rows, panels, integers, panels that take turns; to which level, and KiB ahead, on Zen 5, Intel, Zen 3 and Zen 4.
        for ((rows, panels, integers, bundle), hints) in [
            ((1, 1, true, 1), [(First, 4), (Both, 8), (Second, 8), (Second, 0)]),
            ((4, 1, true, 1), [(First, 8), (Both, 8), (Second, 8), (Second, 0)]),
            ((8, 1, true, 1), [(First, 8), (Both, 8), (Second, 8), (Second, 8)]),
            ((2, 1, false, 1), [(First, 4), (Both, 8), (First, 4), (First, 4)]),
            ((2, 4, false, 4), [(First, 4), (Both, 8), (Second, 8), (Second, 0)]),
            ((4, 4, false, 4), [(First, 8), (Both, 8), (Second, 8), (Second, 8)]),
            ((3, 1, true, 2), [(First, 8), (Both, 8), (Second, 8), (Second, 8)]),
            ((3, 1, false, 4), [(First, 8), (Both, 8), (Second, 8), (Second, 8)]),
            ((1, 4, true, 1), [(First, 4), (Both, 8), (Second, 8), (Second, 8)]),
        ] {
            for (cpu, (to, kib)) in [Cpu::Zen5, Cpu::Intel, Cpu::Zen3, Cpu::Other].into_iter().zip(hints) {
                let expected = Ahead { to, bytes: kib << 10 };
                assert_eq!(
                    Ahead::on(cpu, rows, panels, integers, bundle),
                    expected,
                    "{cpu:?} {rows} {panels} {integers} {bundle}"
                );
            }
        }
    }

    #[test]
    fn few_rows_keep_the_first_level_for_what_is_read_now() {
        for cpu in [Cpu::Zen5, Cpu::Intel, Cpu::Zen3, Cpu::Other] {
            let first = |large, rows| Level::on(cpu, rows, large) == Level::First;
            let few = cpu == Cpu::Zen5;
            assert_eq!([9, 23, 24, 1000].map(|rows| first(true, rows)), [few, few, true, true]);
            assert_eq!([7, 11, 12, 1000].map(|rows| first(false, rows)), [few, few, true, true]);
        }
    }

    #[test]
    fn what_comes_later_is_asked_for_in_so_many_times() {
        let bytes = [0u8; 1000];
        for (lengths, times) in [(&[1000, 64, 1, 0][..], 4), (&[1], 3), (&[], 2), (&[700, 1000], 100)] {
            let later = Later::default();
            lengths.iter().for_each(|&n| later.add(bytes.as_ptr(), n));
            later.spread(times, Level::First);
            let lines: usize = later.ranges.iter().map(|range| range.get().1).sum();
            let asked = || lines - later.ranges.iter().map(|range| range.get().1).sum::<usize>();
            for time in 1..=times {
                later.ask();
                assert_eq!(asked(), lines.min(time * lines.div_ceil(times)), "{lengths:?}, {time} of {times}");
            }
            assert!(later.is_done(), "{lengths:?} in {times}");
        }
    }

    #[test]
    fn loops_are_told_what_to_ask_for() {
        let bytes = [0u8; 4096];
        for (lengths, times) in [(&[1000, 64, 1][..], 4), (&[64, 4000], 7), (&[4000, 64], 7), (&[1], 3), (&[], 2)] {
            let later = Later::default();
            lengths.iter().for_each(|&n| later.add(bytes.as_ptr(), n));
            later.spread(times, Level::First);
            let most = later.ranges.iter().map(|range| range.get().1).max().unwrap_or(0);
            let hints = later.take_times(times);
            // All that the longest range has; a loop that asks as often asks for less than once more for each time beyond it.
            assert_eq!(hints.each, most.div_ceil(times), "{lengths:?} in {times}");
            assert!(most == 0 || hints.step == LINE && hints.at.addr() == bytes.as_ptr().addr() / LINE * LINE);
            assert!(later.is_done(), "{lengths:?} in {times}");
        }
    }

    #[test]
    fn the_cpu_is_what_the_system_says() {
        let Ok(text) = std::fs::read_to_string("/proc/cpuinfo") else {
            return println!("skipped: no /proc/cpuinfo");
        };
        let field = |name: &str| text.lines().find(|l| l.starts_with(name)).and_then(|l| l.split(": ").nth(1));
        let (vendor, family) = vendor_and_family();
        assert_eq!(field("vendor_id").map(str::as_bytes), Some(&vendor[..]));
        assert_eq!(field("cpu family").and_then(|f| f.parse().ok()), Some(family));
    }
}
