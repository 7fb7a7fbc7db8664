//! Whether this process may use AMX: what the CPU has, whether Linux keeps tiles, and its permission.
//!
//! Tiles are 8 KiB of state that a thread has only after its process has asked for them, once and for all threads. So asking whether
//! the tier is there asks Linux too.

#![allow(unsafe_code)] // CPU identification and a system call

use std::fmt;
use std::io;
use std::sync::OnceLock;

/// Why AMX is not to be used.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// The CPU has no AMX, or not all of it: the features that it lacks.
    Cpu(Vec<&'static str>),
    /// The CPU has it, and the operating system does not know of it.
    OldKernel,
    /// The operating system knows of it and refuses it: the number of its error.
    Denied(i32),
}

impl Refusal {
    /// What is lacking, in a few words each.
    pub fn missing(&self) -> Vec<&'static str> {
        match self {
            Refusal::Cpu(features) => features.clone(),
            Refusal::OldKernel => vec!["a kernel that keeps AMX tiles (Linux 5.16 or newer)"],
            Refusal::Denied(_) => vec!["permission of the operating system to use AMX"],
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Cpu(features) => write!(f, "no AMX: this CPU lacks {}", features.join(", ")),
            Refusal::OldKernel => {
                write!(f, "kernel too old: the CPU has AMX, but needs Linux 5.16 or newer to keep its tiles")
            }
            Refusal::Denied(code) => write!(
                f,
                "denied: Linux refuses AMX to this process ({}); a sandbox may not allow arch_prctl, or a thread's signal stack is too \
                 small for tiles",
                io::Error::from_raw_os_error(*code)
            ),
        }
    }
}

/// Asks for AMX with int8 and bf16 products, once per process: CPU, operating system, permission.
///
/// # Errors
/// The first of them that refuses.
pub fn permission() -> Result<(), Refusal> {
    static ANSWER: OnceLock<Result<(), Refusal>> = OnceLock::new();
    ANSWER.get_or_init(here).clone()
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn here() -> Result<(), Refusal> {
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
    let cpuid = |leaf: u32, part: u32| {
        #[allow(unused_unsafe)] // newer compilers know
        // SAFETY: every x86-64 CPU has the instruction.
        let (most, v) = unsafe { (__cpuid(0).eax, __cpuid_count(leaf, part)) };
        if leaf <= most { [v.eax, v.ebx, v.ecx, v.edx] } else { [0; 4] }
    };
    // SAFETY: called only where the CPU says that the operating system has turned the instruction on.
    let state = || unsafe { _xgetbv(0) };
    let ask = || {
        // Request permission for a state component, by its number.
        const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
        // SAFETY: the call takes two numbers.
        match unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) } {
            0 => 0,
            _ => io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL),
        }
    };
    judge(cpuid, state, ask)
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn here() -> Result<(), Refusal> {
    Err(Refusal::Cpu(vec!["amx-tile on Linux"]))
}

/// The state component of tiles; that of their configuration comes before it.
#[cfg(target_arch = "x86_64")]
const TILE_DATA: u32 = 18;

/// The answer, of registers of `cpuid`, the enabled state components, and the error number of asking (0: granted).
#[cfg(target_arch = "x86_64")]
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
fn judge(
    cpuid: impl Fn(u32, u32) -> [u32; 4],
    state: impl FnOnce() -> u64,
    ask: impl FnOnce() -> i32,
) -> Result<(), Refusal> {
    let bit = |v: u32, n: u32| v >> n & 1 == 1;
    let [.., edx] = cpuid(7, 0);
    let mut lacking = Vec::new();
    for (n, name) in [(24, "amx-tile"), (25, "amx-int8"), (22, "amx-bf16")] {
        if !bit(edx, n) {
            lacking.push(name);
        }
    }
    // Palette 1: tiles of 1024 bytes, rows of 64, 8 tiles, 16 rows.
    let [sizes, rows, most, _] = cpuid(0x1d, 1);
    if lacking.is_empty() && (sizes >> 16, rows & 0xffff, rows >> 16, most & 0xffff) != (1024, 64, 8, 16) {
        lacking.push("amx-tile with 8 tiles of 16 rows x 64 bytes");
    }
    if !lacking.is_empty() {
        return Err(Refusal::Cpu(lacking));
    }
    let [_, _, ecx, _] = cpuid(1, 0);
    let both = 3 << (TILE_DATA - 1);
    if !bit(ecx, 27) || state() & both != both {
        return Err(Refusal::OldKernel);
    }
    match ask() {
        0 => Ok(()),
        // What an operation has that nobody knows.
        libc::EINVAL | libc::ENOSYS => Err(Refusal::OldKernel),
        code => Err(Refusal::Denied(code)),
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    /// A Sapphire Rapids with some bits of leaf 7 taken away.
    fn cpu(without: u32) -> impl Fn(u32, u32) -> [u32; 4] {
        move |leaf, part| match (leaf, part) {
            (1, _) => [0, 0, 1 << 27, 0],
            (7, 0) => [0, 0, 0, (1 << 22 | 1 << 24 | 1 << 25) & !without],
            (0x1d, 1) => [1024 << 16 | 8192, 8 << 16 | 64, 16, 0],
            _ => [0; 4],
        }
    }

    const ALL: u64 = 0x602e7;

    #[test]
    fn each_refusal_has_its_name() {
        assert_eq!(judge(cpu(0), || ALL, || 0), Ok(()));
        let unasked = || panic!("asked in vain");
        let none = judge(|_, _| [0; 4], || panic!("no XGETBV here"), unasked).unwrap_err();
        assert_eq!(none, Refusal::Cpu(vec!["amx-tile", "amx-int8", "amx-bf16"]));
        assert!(none.to_string().starts_with("no AMX"), "{none}");
        assert_eq!(judge(cpu(1 << 22), || ALL, unasked), Err(Refusal::Cpu(vec!["amx-bf16"])));
        for state in [0x2e7, 0x202e7, 0x402e7] {
            assert_eq!(judge(cpu(0), || state, unasked), Err(Refusal::OldKernel), "{state:#x}");
        }
        for (code, named) in [(libc::EINVAL, "kernel too old"), (libc::EPERM, "denied"), (libc::ENOSPC, "denied")] {
            let why = judge(cpu(0), || ALL, || code).unwrap_err();
            assert!(why.to_string().starts_with(named), "{why}");
            assert_eq!(why.missing().len(), 1);
        }
    }

    #[test]
    fn the_answer_here_is_the_tiers() {
        use crate::cpu::tier::Tier;
        let answer = permission();
        assert_eq!(answer, permission());
        if let Err(why) = answer {
            let missing = Tier::Amx.missing();
            assert!(why.missing().iter().all(|m| missing.contains(m)), "{missing:?}");
        }
    }
}
