#![doc = include_str!("../README.md")]

#[cfg(target_arch = "x86_64")]
mod ffi;
#[cfg(target_arch = "x86_64")]
mod kernel;
#[cfg(target_arch = "x86_64")]
mod library;

use std::path::Path;

use kt_core::cpu::CpuBackend;
use kt_core::cpu::tier::Tier;
use kt_core::{Backend, Unsupported};

#[cfg(target_arch = "x86_64")]
pub use kernel::Blis;
#[cfg(target_arch = "x86_64")]
pub use library::{Library, NAMES};

/// The backend `blis`, with the first library of [`NAMES`] that can multiply here.
///
/// # Errors
/// Every name that was tried, with the dynamic linker's own words or what the library lacks; or `cap` is below what this CPU has, as a library
/// chooses its instructions itself.
pub fn backend(cap: Tier) -> Result<impl Backend, Unsupported> {
    open(None, cap)
}

/// The backend `blis`, with the library at `path` (or of that name, where the dynamic linker looks) and no other.
///
/// # Errors
/// As [`backend`].
pub fn backend_at(path: &Path, cap: Tier) -> Result<impl Backend + use<>, Unsupported> {
    open(Some(path), cap)
}

#[cfg(target_arch = "x86_64")]
fn open(path: Option<&Path>, cap: Tier) -> Result<CpuBackend<Blis>, Unsupported> {
    Ok(CpuBackend::new("blis", Blis::new(Library::open(path)?, cap)?))
}

#[cfg(not(target_arch = "x86_64"))]
fn open(_: Option<&Path>, _: Tier) -> Result<CpuBackend<kt_core::cpu::portable::Portable>, Unsupported> {
    Err(Unsupported::new("BLIS's products are used on x86-64 CPUs only"))
}
