//! The backend `llamafile` as a plugin: `cargo build --release --example plugin_llamafile` makes `target/release/examples/libplugin_llamafile.so`.

kt_core::declare_backend!("llamafile", kt_llamafile::backend);
