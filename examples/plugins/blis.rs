//! The backend `blis` as a plugin: `cargo build --release --example plugin_blis --features blis` makes `target/release/examples/libplugin_blis.so`.

kt_core::declare_backend!("blis", kt_blis::backend);
