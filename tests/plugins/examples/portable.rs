//! kt-core's portable kernel as a plugin, under its own name.

use kt_core::Unsupported;
use kt_core::cpu::CpuBackend;
use kt_core::cpu::portable::Portable;
use kt_core::cpu::tier::Tier;

fn backend(_cap: Tier) -> Result<CpuBackend<Portable>, Unsupported> {
    Ok(CpuBackend::new("portable", Portable))
}

kt_core::declare_backend!("portable", backend);
