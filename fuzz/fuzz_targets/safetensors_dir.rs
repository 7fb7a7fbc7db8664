#![no_main]
//! Any bytes as the files of a Hugging Face directory.
//!
//! Input: three little-endian u16 lengths, then config.json, the index (none if empty), the first shard; the rest is a second shard.

use bytes::Bytes;
use kt_core::source::safetensors::SafetensorsSource;
use libfuzzer_sys::fuzz_target;

#[path = "touch.rs"]
mod touch;

fuzz_target!(|data: &[u8]| {
    let Some((lengths, mut rest)) = data.split_at_checked(6) else { return };
    let mut files = Vec::new();
    let names = ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"];
    for (length, name) in lengths.chunks_exact(2).zip(names) {
        let n = usize::from(u16::from_le_bytes([length[0], length[1]])).min(rest.len());
        let (file, after) = rest.split_at(n);
        if n > 0 {
            files.push((name.to_string(), Bytes::copy_from_slice(file)));
        }
        rest = after;
    }
    if !rest.is_empty() {
        files.push(("model-00002-of-00002.safetensors".to_string(), Bytes::copy_from_slice(rest)));
    }
    if let Ok(source) = SafetensorsSource::from_files("fuzz", files) {
        touch::everything(&source);
    }
});
