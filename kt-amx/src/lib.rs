#![doc = include_str!("../README.md")]

#[cfg(target_arch = "x86_64")]
mod crossover;
#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod emulator;
#[cfg(target_arch = "x86_64")]
mod kernel;
#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod model;
#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod tests;
#[cfg(target_arch = "x86_64")]
mod unit;

use kt_core::cpu::tier::Tier;
use kt_core::{Backend, Unsupported};

#[cfg(target_arch = "x86_64")]
pub use crossover::Crossover;
#[cfg(target_arch = "x86_64")]
pub use kernel::Amx;

/// The backend `amx`, if `cap` allows the tier.
///
/// # Errors
/// `cap` is below [`Tier::Amx`], the CPU has no AMX, or Linux does not grant it ([`kt_core::cpu::amx::Refusal`]).
#[cfg(target_arch = "x86_64")]
pub fn backend(cap: Tier) -> Result<impl Backend, Unsupported> {
    Amx::detect(cap).map(Amx::into_backend)
}

/// No backend: this is not x86-64.
///
/// # Errors
/// Always.
#[cfg(not(target_arch = "x86_64"))]
pub fn backend(_cap: Tier) -> Result<impl Backend, Unsupported> {
    let declined: Result<kt_core::cpu::CpuBackend<kt_core::cpu::portable::Portable>, _> =
        Err(Unsupported::new("no AMX: it is part of x86-64 CPUs"));
    declined
}
