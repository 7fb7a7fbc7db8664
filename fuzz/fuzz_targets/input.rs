//! How an input becomes files: see the targets.

use bytes::Bytes;

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

/// The files of a directory: config.json, the index (may be empty: none), one or two shards, divided by the line `---`. A shard is its header
/// in JSON, an empty line, its data; the header's length is put before it here, so that the fuzzer need not keep it right. Shards that
/// begin with `!` are taken as they are, without that help.
pub fn directory(data: &[u8]) -> Vec<(String, Bytes)> {
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
    files
}

/// The parts of a GGUF file: one, as it is; or two, when the input does not begin with `GGUF`: then the first byte says where the second one begins, in 256ths of
/// the rest.
pub fn parts(data: &[u8]) -> Vec<Bytes> {
    let parts = match data {
        [] | [b'G', b'G', b'U', b'F', ..] => vec![data],
        [split, rest @ ..] => {
            let (first, second) = rest.split_at(rest.len() * *split as usize / 256);
            vec![first, second]
        }
    };
    parts.into_iter().map(Bytes::copy_from_slice).collect()
}
