//! The suite that every backend passes, emulated: the kernels' own sources, compiled for a CPU, behind a driver that has no GPU.

mod common;

#[test]
fn conformance_emulated() {
    if let Some(cap) = std::env::var_os("KT_ISA") {
        return eprintln!("skipped: KT_ISA={} is about CPUs, and this is the same for all", cap.display());
    }
    let Some(fake) = common::fake("conformance") else { return };
    let Some(compiler) = common::fake_of("libnvrtc", "conformance") else { return };
    // Experts with few rows and with many have kernels of their own, and the suite compares their bits.
    kt_core::testing::conformance(|_| fake.builder().nvrtc(&compiler.path).build(0));
    let products = fake.number("fake_products");
    eprintln!("emulated: {products} products of 16 x 8 x 16");
    assert!(products > 0);
    assert_eq!(fake.number("fake_live_bytes") + fake.number("fake_live_host_bytes"), 0, "bytes that were not freed");
}

#[test]
fn conformance_as_a_plugin() {
    kt_core::testing::plugin_conformance("cuda");
}
