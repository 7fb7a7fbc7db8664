//! The backend `amx` as a plugin: `cargo build --release --example plugin_amx` makes `target/release/examples/libplugin_amx.so`.

kt_core::declare_backend!("amx", kt_amx::backend);
