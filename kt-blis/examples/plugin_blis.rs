//! The backend as a plugin: `cargo build --release -p kt-blis --example plugin_blis` makes `target/release/examples/libplugin_blis.so`.

kt_core::declare_backend!("blis", kt_blis::backend);
