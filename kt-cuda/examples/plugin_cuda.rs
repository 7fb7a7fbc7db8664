//! The backend as a plugin: `cargo build --release -p kt-cuda --example plugin_cuda` makes `target/release/examples/libplugin_cuda.so`.

kt_core::declare_backend!("cuda:0", kt_cuda::backend);
