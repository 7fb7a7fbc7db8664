//! A GGUF file, whose parts [`input::parts`] makes of the input.

#![no_main]

#[allow(dead_code)] // the other target's
mod input;
mod touch;

use kt_core::source::gguf::GgufSource;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(source) = GgufSource::from_bytes("fuzz.gguf", input::parts(data)) {
        touch::touch(&source);
    }
});
