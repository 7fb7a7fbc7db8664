//! The backend as a plugin: `cargo build --release -p kt-avx512 --example plugin_avx512` makes `target/release/examples/libplugin_avx512.so`.

kt_core::declare_backend!("avx512", kt_avx512::backend);
