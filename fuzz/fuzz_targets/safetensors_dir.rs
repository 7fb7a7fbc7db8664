//! A Hugging Face directory. The input is its files, divided by the line `---`: config.json, the index (may be empty: none), one or
//! two shards. A shard is its header in JSON, an empty line, its data; the header's length is put before it here, so that the
//! fuzzer need not keep it right. Shards that begin with `!` are taken as they are, without that help.

#![no_main]

mod touch;

use bytes::Bytes;
use kt_core::source::safetensors::SafetensorsSource;
use libfuzzer_sys::fuzz_target;

const DIVIDER: &[u8] = b"\n---\n";

fn split_once<'a>(data: &'a [u8], by: &[u8]) -> (&'a [u8], &'a [u8]) {
    match data.windows(by.len()).position(|w| w == by) {
        Some(at) => (&data[..at], &data[at + by.len()..]),
        None => (data, &[]),
    }
}

fn shard(data: &[u8]) -> Bytes {
    if let Some(raw) = data.strip_prefix(b"!") {
        return Bytes::copy_from_slice(raw);
    }
    let (header, data) = split_once(data, b"\n\n");
    [&(header.len() as u64).to_le_bytes(), header, data].concat().into()
}

fuzz_target!(|data: &[u8]| {
    let (config, rest) = split_once(data, DIVIDER);
    let (index, rest) = split_once(rest, DIVIDER);
    let (first, second) = split_once(rest, DIVIDER);
    let mut files =
        vec![("config.json".to_owned(), Bytes::copy_from_slice(config)), ("a.safetensors".to_owned(), shard(first))];
    if !index.is_empty() {
        files.push(("model.safetensors.index.json".to_owned(), Bytes::copy_from_slice(index)));
    }
    if !second.is_empty() {
        files.push(("b.safetensors".to_owned(), shard(second)));
    }
    if let Ok(source) = SafetensorsSource::from_files("fuzz", files) {
        touch::touch(&source);
    }
});
