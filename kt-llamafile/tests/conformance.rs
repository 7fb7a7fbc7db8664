//! The suite that every backend passes, on every tier of this CPU.

#[test]
fn conformance() {
    kt_core::testing::conformance(kt_llamafile::backend);
}

#[test]
fn conformance_as_a_plugin() {
    kt_core::testing::plugin_conformance("llamafile");
}
