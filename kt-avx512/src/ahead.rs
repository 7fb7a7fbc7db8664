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
//! | a tile unit (AMX) | more than eight rows of floats | by turns, of all that comes next ([`Later::spread_by_turns`]); then to the first level | 3 KiB |
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
    /// The first level, [`DUE`] bytes before they are due: they are in the second.
    Due,
}

/// See [`To::Both`]; over all panels of a tile.
const NEAR: usize = 6 << 10;
/// See [`To::Due`]; over all panels of a tile.
const DUE: usize = 3 << 10;

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

    /// For lines that are in the second level.
    pub(crate) const DUE: Ahead = Ahead { to: To::Due, bytes: 0 };

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
        } else if self.to == To::Due {
            prefetch_now(line.wrapping_add(DUE / panels));
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
            To::Due => [0, DUE / panels],
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
    ranges: [Cell<Range>; RANGES],
    /// How many of them there are, and which is next.
    len: Cell<usize>,
    next: Cell<usize>,
    /// Lines of a row, how many rows go at a time, and where to.
    each: Cell<usize>,
    rows: Cell<usize>,
    to: Cell<Level>,
}

/// Lines to ask for, in rows. Numbers are of lines.
#[derive(Debug, Default, Clone, Copy)]
struct Range {
    /// The first one of the next row.
    first: usize,
    /// Rows that are left; lines, before they are [spread](Later::spread).
    rows: usize,
    /// From one line of a row to the next.
    step: usize,
    /// From the first one of a row to that of the next.
    next: usize,
}

/// Rows of lines to ask for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows {
    /// The first line.
    pub(crate) at: *const u8,
    pub(crate) rows: usize,
    /// Lines of a row.
    pub(crate) lines: usize,
    /// Bytes from one line of a row to the next.
    pub(crate) step: usize,
    /// Bytes from the first line of a row to that of the next.
    pub(crate) next: usize,
}

impl Rows {
    /// None.
    pub(crate) const NONE: Rows = Rows { at: std::ptr::null(), rows: 0, lines: 0, step: 0, next: 0 };

    /// Asks for them.
    #[inline(always)]
    pub(crate) fn ask(self, to: Level) {
        for row in 0..self.rows {
            for line in 0..self.lines {
                let at = self.at.wrapping_add(row * self.next + line * self.step);
                match to {
                    Level::First => prefetch_now(at),
                    Level::Second => prefetch_later(at),
                }
            }
        }
    }
}

/// Where lines are asked for to.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    /// Where many rows pass over the lines before: layers are up to 8 % faster so, though what is asked for is due only some microseconds later. On Zen 5,
    /// any number of rows. Not in products of `dots.rs`; in those of `words/full.rs` level, 64 and 256 rows.
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

/// Lines of a row at most where they are of parts of a range ([`Later::spread_by_turns`]), but for what it takes to have a row be of one range.
const STREAMS: usize = 8;

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
        if bytes == 0 {
            return;
        }
        let (first, step) = (at.addr() / LINE, step / LINE);
        let lines = (at.addr() % LINE + bytes).div_ceil(LINE);
        // Lines that go on where the last ones end are of the same range.
        if let Some(last) = self.len.get().checked_sub(1).map(|last| &self.ranges[last])
            && let range = last.get()
            && range.step == step
            && range.first + range.rows * step == first
        {
            last.set(Range { rows: range.rows + lines, ..range });
        } else {
            self.ranges[self.len.get()].set(Range { first, rows: lines, step, next: 0 });
            self.len.set(self.len.get() + 1);
        }
    }

    /// Has all be asked for in so many `times`, and where to: in the order of addresses.
    pub(crate) fn spread(&self, times: usize, to: Level) {
        self.cut(times, 1, false);
        self.to.set(to);
    }

    /// Has all be asked for in so many `times`, to the second level. Each range is cut into up to [`STREAMS`] parts, which take turns: what follows a line the
    /// hardware fetches meanwhile, so that no hint has to wait for memory, in the place of what a tile unit reads from the second level (`kt-amx/PERFORMANCE.md`).
    pub(crate) fn spread_by_turns(&self, times: usize) {
        let lines: usize = self.ranges[..self.len.get()].iter().map(|range| range.get().rows).sum();
        self.cut(times, lines.div_ceil(times).div_ceil(STREAMS).max(1), true);
        self.to.set(Level::Second);
    }

    /// Cuts all ranges into rows, of which so many go each time: of lines that follow each other, or of one line of each part.
    fn cut(&self, times: usize, rows: usize, by_turns: bool) {
        let ranges = &self.ranges[..self.len.get()];
        // A row is of one range.
        let rows = rows.max(ranges.len().div_ceil(times));
        let mut each = ranges.iter().map(|range| range.get().rows).sum::<usize>().div_ceil(times * rows);
        // Of each range the last row may be less than whole.
        while ranges.iter().map(|range| range.get().rows.div_ceil(each)).sum::<usize>() > times * rows {
            each += 1;
        }
        for range in ranges {
            let Range { first, rows: lines, step, .. } = range.get();
            let rows = lines.div_ceil(each);
            // Parts are an odd number of lines, so that lines of a row are of many sets of a cache.
            let (step, next) = if by_turns { ((rows | 1) * step, step) } else { (step, each * step) };
            range.set(Range { first, rows, step, next });
        }
        self.each.set(each);
        self.rows.set(rows);
    }

    /// Asks for those whose turn it is.
    #[inline(always)]
    pub(crate) fn ask(&self) {
        let mut left = self.rows.get();
        while let Some(rows) = self.take(left) {
            rows.ask(self.to.get());
            left -= rows.rows;
        }
    }

    /// Whether all of them were asked for.
    pub(crate) fn is_done(&self) -> bool {
        self.next.get() >= self.len.get()
    }

    /// How many lines a row has.
    #[inline(always)]
    pub(crate) fn each(&self) -> usize {
        self.each.get()
    }

    /// How many rows go each time.
    #[inline(always)]
    pub(crate) fn rows(&self) -> usize {
        self.rows.get()
    }

    /// Takes what goes so many times in the order of addresses, for a loop to ask for. What does not go on for as long is asked for now.
    #[inline(always)]
    pub(crate) fn take_times(&self, times: usize) -> Rows {
        let (mut left, mut longest) = (times * self.rows.get(), Rows::NONE);
        while let Some(rows) = self.take(left) {
            left -= rows.rows;
            let now = if rows.rows > longest.rows { std::mem::replace(&mut longest, rows) } else { rows };
            now.ask(Level::Second);
        }
        longest
    }

    /// Takes up to `most` rows of a range, for the caller to ask for; none where `most` is 0 or nothing is left.
    #[inline(always)]
    pub(crate) fn take(&self, most: usize) -> Option<Rows> {
        if most == 0 || self.is_done() {
            return None;
        }
        let cell = &self.ranges[self.next.get()];
        let range = cell.get();
        let rows = most.min(range.rows);
        if rows == range.rows {
            self.next.set(self.next.get() + 1);
        } else {
            cell.set(Range { first: range.first + rows * range.next, rows: range.rows - rows, ..range });
        }
        let at = std::ptr::without_provenance(range.first * LINE);
        Some(Rows { at, rows, lines: self.each.get(), step: range.step * LINE, next: range.next * LINE })
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

    /// Ranges of lines, in bytes, and how many times there are to ask for them; and all of their lines, of memory that begins so.
    const RANGES_IN_TIMES: [(&[usize], usize); 8] = [
        (&[4000, 64, 1, 0], 8),
        (&[64, 4000], 7),
        (&[4000, 64], 7),
        (&[1], 3),
        (&[], 2),
        (&[700, 1000], 100),
        (&[9000], 2),
        (&[100, 300, 200], 2),
    ];

    fn later_of(lengths: &[usize]) -> (Later, Vec<usize>) {
        let (later, mut lines) = (Later::default(), Vec::new());
        for (i, &bytes) in lengths.iter().enumerate() {
            let first = 1000 * (i + 1);
            later.add(std::ptr::without_provenance(first * LINE), bytes);
            lines.extend(first..first + bytes.div_ceil(LINE));
        }
        (later, lines)
    }

    /// The lines of rows.
    fn lines_of(rows: Rows) -> impl Iterator<Item = usize> {
        let at = move |row: usize, line: usize| (rows.at.addr() + row * rows.next + line * rows.step) / LINE;
        (0..rows.rows).flat_map(move |row| (0..rows.lines).map(move |line| at(row, line)))
    }

    #[test]
    fn what_comes_later_is_asked_for_in_so_many_times() {
        for (lengths, times) in RANGES_IN_TIMES {
            let (later, lines) = later_of(lengths);
            later.spread(times, Level::First);
            let mut asked = Vec::new();
            for _ in 0..times {
                let mut left = later.rows();
                while let Some(rows) = later.take(left) {
                    asked.extend(lines_of(rows));
                    left -= rows.rows;
                }
            }
            assert!(later.is_done(), "{lengths:?} in {times}");
            assert!(
                asked.is_sorted() && lines.iter().all(|line| asked.contains(line)),
                "{lengths:?} in {times}: {asked:?}"
            );
            // No more than fills the last row of each range.
            assert!(asked.len() <= lines.len() + lengths.len() * later.each(), "{lengths:?} in {times}: {asked:?}");
        }
    }

    #[test]
    fn what_goes_by_turns_is_asked_for_in_several_places() {
        for (lengths, times) in RANGES_IN_TIMES {
            let (later, lines) = later_of(lengths);
            later.spread_by_turns(times);
            let (rows, each) = (later.rows(), later.each());
            assert!(lines.is_empty() || rows > 0 && (1..=STREAMS).contains(&each), "{rows} of {each}");
            let mut asked = Vec::new();
            for _ in 0..times {
                let mut left = rows;
                while let Some(some) = later.take(left) {
                    assert!(some.lines == 1 || some.step / LINE % 2 == 1, "{some:?}");
                    asked.extend(lines_of(some));
                    left -= some.rows;
                }
            }
            assert!(later.is_done(), "{lengths:?} in {times}");
            asked.sort_unstable();
            let missing = lines.iter().filter(|line| !asked.contains(line)).count();
            assert!(missing <= lengths.len() * each, "{lengths:?} in {times}: {missing} are missing");
            asked.dedup();
            assert!(asked.len() <= lines.len() + lengths.len() * each, "{lengths:?} in {times}");
        }
    }

    #[test]
    fn ranges_that_follow_each_other_are_one() {
        let later = Later::default();
        let at = |line: usize| std::ptr::without_provenance(line * LINE);
        later.add(at(100), 10 * LINE);
        later.add(at(110), LINE + 1);
        later.add(at(113), LINE);
        later.add_lines(at(114), 2 * LINE, 4 * LINE);
        later.add_lines(at(122), LINE, 4 * LINE);
        later.spread(1000, Level::First);
        let mut asked = Vec::new();
        while let Some(rows) = later.take(usize::MAX) {
            asked.push(lines_of(rows).collect::<Vec<_>>());
        }
        assert_eq!(asked, [(100..112).collect(), vec![113], vec![114, 118, 122]]);
    }

    #[test]
    fn loops_are_told_what_to_ask_for() {
        for (lengths, times) in RANGES_IN_TIMES {
            let (later, lines) = later_of(lengths);
            later.spread(times, Level::First);
            let hints = later.take_times(times);
            assert!(later.is_done(), "{lengths:?} in {times}");
            // The longest range, in the order of addresses.
            let longest = lengths.iter().max().map_or(0, |&bytes| bytes.div_ceil(LINE));
            assert_eq!(
                hints.rows * hints.lines,
                longest.next_multiple_of(hints.lines.max(1)),
                "{lengths:?} in {times}"
            );
            assert!(hints.next == hints.lines * hints.step && (lines.is_empty() || hints.step == LINE));
            assert!(lines_of(hints).is_sorted());
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
