//! The backend `cuda:0` as a plugin: `cargo build --release --example plugin_cuda --features cuda` makes `target/release/examples/libplugin_cuda.so`.

kt_core::declare_backend!("cuda:0", kt_cuda::backend);
