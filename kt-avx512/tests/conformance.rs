//! The suite that every backend passes.

#![cfg(target_arch = "x86_64")]

#[test]
fn conformance() {
    kt_core::testing::conformance(kt_avx512::backend);
}
