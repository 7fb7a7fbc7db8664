//! The backend as a plugin: `cargo build --release -p kt-amx --example plugin_amx` makes `target/release/examples/libplugin_amx.so`.

kt_core::declare_backend!("amx", kt_amx::backend);
