#![doc = include_str!("../README.md")]

pub use kt_core::*;

/// The backend `amx`, for [`RuntimeBuilder::with_backend`] with a crossover that was measured.
#[cfg(feature = "amx")]
pub use kt_amx as amx;
/// The backend `blis`, for [`RuntimeBuilder::with_backend`] with a library of the caller's choice.
#[cfg(feature = "blis")]
pub use kt_blis as blis;

/// The backends `cuda:0`, `cuda:1` …, for [`RuntimeBuilder::with_backend`] with libraries and a cache of the caller's choice.
#[cfg(feature = "cuda")]
pub use kt_cuda as cuda;

use kt_core::cpu::CpuBackend;
use kt_core::cpu::portable::Portable;
use kt_core::cpu::tier::Tier;

/// The backends of this build, best first among equals; each with the backend, or why this machine cannot run it.
///
/// `cap` limits the instruction sets that CPU backends may use.
pub fn registry(cap: Tier) -> Vec<Candidate> {
    let mut list = Vec::new();
    #[cfg(feature = "amx")]
    list.push(Candidate::new("amx", kt_amx::backend(cap)));
    #[cfg(feature = "avx512")]
    list.push(Candidate::new("avx512", kt_avx512::backend(cap)));
    #[cfg(feature = "llamafile")]
    list.push(Candidate::new("llamafile", kt_llamafile::backend(cap)));
    #[cfg(feature = "blis")]
    list.push(Candidate::new("blis", kt_blis::backend(cap)));
    #[cfg(feature = "cuda")]
    list.extend(kt_cuda::candidates());
    let _ = cap;
    list.push(Candidate::new("portable", Ok(CpuBackend::new("portable", Portable))));
    list
}

/// Starts building a [`Runtime`] over the backends of this build.
pub fn runtime() -> RuntimeBuilder {
    RuntimeBuilder::new(registry)
}
