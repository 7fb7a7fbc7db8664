//! How weights that stream from memory are asked for before they are used.
//!
//! The hardware does so within a page only, and too late for lines that are unpacked. Which hint is best, and how far ahead, differs by CPU
//! by more than any kernel does. Measured in layers (`PERFORMANCE.md`):
//!
//! | CPU | streams of a tile | hint | ahead |
//! | --- | --- | --- | --- |
//! | AMD Zen 5 | any | to the first level, past the others | 4 KiB; 8 KiB from three rows on |
//! | AMD Zen 4 | several panels, or five rows and more | to the second level | 8 KiB |
//! | AMD Zen 4 | one panel, up to four rows | to the first level, past the others | 4 KiB |
//! | others | as Zen 4, not measured | | |

#![allow(unsafe_code)] // hints, and what the CPU is

use std::arch::x86_64::{_MM_HINT_NTA, _MM_HINT_T1, _mm_prefetch};
use std::sync::LazyLock;

/// How a tile asks for lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ahead {
    /// To the second level; else to the first one only.
    second: bool,
    /// Bytes ahead of use, over all panels of a tile; past the end of a panel, in the panels that come next.
    pub(crate) bytes: usize,
}

impl Ahead {
    /// For tiles of so many rows and panels.
    pub(crate) fn of(rows: usize, panels: usize) -> Ahead {
        /// Family 1Ah; 19h is Zen 3 and 4.
        const ZEN5: u32 = 0x1a;
        static IS_ZEN5: LazyLock<bool> = LazyLock::new(|| amd_family() == Some(ZEN5));
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

/// Hints that the line at `p` will be read later, from the second level; any address will do.
#[inline(always)]
pub(crate) fn prefetch_later(p: *const u8) {
    // SAFETY: prefetching faults at no address, and SSE is part of x86-64.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
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
    fn few_rows_of_one_panel_are_asked_for_alike_everywhere() {
        assert_eq!(Ahead::of(1, 1), Ahead { second: false, bytes: 4096 });
        for (rows, panels) in [(4, 4), (8, 1)] {
            let ahead = Ahead::of(rows, panels);
            assert!(ahead.bytes == 8192 && ahead.second != (amd_family() == Some(0x1a)), "{ahead:?}");
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
