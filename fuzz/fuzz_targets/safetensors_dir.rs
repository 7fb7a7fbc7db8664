//! A Hugging Face directory, whose files [`input::directory`] makes of the input.

#![no_main]

#[allow(dead_code)] // the other target's
mod input;
mod touch;

use kt_core::source::safetensors::SafetensorsSource;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(source) = SafetensorsSource::from_files("fuzz", input::directory(data)) {
        touch::touch(&source);
    }
});
