//! The suite that every backend passes, on machines with AMX. On others it runs in the unit tests, by the emulator.

#[test]
fn conformance() {
    kt_core::testing::conformance(kt_amx::backend);
}

#[test]
fn conformance_as_a_plugin() {
    kt_core::testing::plugin_conformance("amx");
}
