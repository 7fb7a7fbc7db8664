//! The library of this machine in the suite that every backend passes. `KT_REQUIRE=blis` says that there must be one.

#![cfg(target_arch = "x86_64")]

#[test]
fn conformance() {
    match kt_blis::Library::open(None) {
        Ok(library) => eprintln!("{}", library.name()),
        Err(why) => {
            let required = std::env::var("KT_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|r| r == "blis"), "{why}, but KT_REQUIRE names it");
            eprintln!("skipped: {why}");
            return;
        }
    }
    kt_core::testing::conformance(kt_blis::backend);
}

#[test]
fn conformance_as_a_plugin() {
    kt_core::testing::plugin_conformance("blis");
}
