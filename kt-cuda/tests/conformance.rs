//! The suite that every backend passes: emulated (the kernels' own sources, compiled for a CPU, behind a driver that has no GPU), and on a GPU where there is one.

mod common;

#[test]
fn conformance() {
    if let Some(cap) = std::env::var_os("KT_ISA") {
        return eprintln!("skipped: KT_ISA={} is about CPUs, and this is the same for all", cap.display());
    }
    for driver in common::drivers("conformance") {
        // Experts with few rows and with many have kernels of their own, and the suite compares their bits.
        kt_core::testing::conformance(|_| driver.compiling().expect("a compiler").build(0));
        let products = driver.number("fake_products");
        if driver.emulated {
            eprintln!("emulated: {products} products of 16 x 8 x 16");
            assert!(products > 0);
        } else {
            // And once more by the PTX that comes with the crate, as its driver translates it.
            kt_core::testing::conformance(|_| Ok::<_, kt_core::Unsupported>(driver.backend()));
        }
        assert_eq!(
            driver.number("fake_live_bytes") + driver.number("fake_live_host_bytes"),
            0,
            "bytes that were not freed"
        );
    }
}

#[test]
fn conformance_as_a_plugin() {
    kt_core::testing::plugin_conformance("cuda");
}
