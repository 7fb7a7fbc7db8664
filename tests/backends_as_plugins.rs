//! The backends of this build as plugins (`examples/plugins`), held to the conformance suite across the boundary.

use std::path::PathBuf;

use kt::cpu::tier::Tier;

/// The plugin that `cargo test` built with the examples.
fn plugin(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("this program has a path");
    let target = test.parent().and_then(|deps| deps.parent()).expect("it is in `deps`");
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let path = target.join("examples").join(format!("{prefix}plugin_{name}{suffix}"));
    assert!(path.exists(), "{}: not there; `cargo test -p kt` without a target builds it", path.display());
    path
}

fn suite(name: &str) {
    let plugin = kt::plugin::load(plugin(name)).unwrap();
    assert_eq!((plugin.name(), plugin.build()), (name, concat!("kt ", env!("CARGO_PKG_VERSION"))));
    match plugin.backend(Tier::Amx) {
        Ok(_) => kt::testing::conformance(|tier| plugin.backend(tier)),
        Err(why) => println!("skipped: {name} cannot run here: {why}"),
    }
}

#[test]
fn avx512() {
    suite("avx512");
}

#[test]
fn llamafile() {
    suite("llamafile");
}

#[test]
fn amx() {
    suite("amx");
}
