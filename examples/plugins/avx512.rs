//! The backend `avx512` as a plugin: `cargo build --release --example plugin_avx512` makes `target/release/examples/libplugin_avx512.so`.

kt_core::declare_backend!("avx512", kt_avx512::backend);
