//! The portable kernel in the suite that every backend passes.

use kt_core::cpu::CpuBackend;
use kt_core::cpu::portable::Portable;

#[test]
fn conformance() {
    kt_core::testing::conformance(|_| Ok(CpuBackend::new("portable", Portable)));
}
