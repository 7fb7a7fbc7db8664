//! The suite that every backend passes.

#![cfg(target_arch = "x86_64")]

#[test]
fn conformance() {
    kt_core::testing::conformance(kt_avx512::backend);
}

#[test]
fn conformance_as_a_plugin() {
    kt_core::testing::plugin_conformance("avx512");
}
