//! The backend as a plugin: `cargo build --release -p kt-llamafile --example plugin_llamafile` makes `target/release/examples/libplugin_llamafile.so`.

kt_core::declare_backend!("llamafile", kt_llamafile::backend);
