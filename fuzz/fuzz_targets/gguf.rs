#![no_main]
//! Any bytes as a GGUF file: an error or a model, never a panic, a hang or a huge allocation.

use bytes::Bytes;
use kt_core::source::gguf::GgufSource;
use libfuzzer_sys::fuzz_target;

#[path = "touch.rs"]
mod touch;

fuzz_target!(|data: &[u8]| {
    if let Ok(source) = GgufSource::from_bytes("fuzz.gguf", vec![Bytes::copy_from_slice(data)]) {
        touch::everything(&source);
    }
});
