//! A GGUF file as it is; or one in two parts, when the input does not begin with `GGUF`: then the first byte says where the second
//! part begins, in 256ths of the rest.

#![no_main]

mod touch;

use bytes::Bytes;
use kt_core::source::gguf::GgufSource;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let parts = match data {
        [] => return,
        [b'G', b'G', b'U', b'F', ..] => vec![data],
        [split, rest @ ..] => {
            let (first, second) = rest.split_at(rest.len() * *split as usize / 256);
            vec![first, second]
        }
    };
    let parts = parts.into_iter().map(Bytes::copy_from_slice).collect();
    if let Ok(source) = GgufSource::from_bytes("fuzz.gguf", parts) {
        touch::touch(&source);
    }
});
