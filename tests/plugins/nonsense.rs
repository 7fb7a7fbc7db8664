//! Libraries that keep to the plugin ABI's types and to nothing else: compiled by the test with `--cfg variant="..."`.
//!
//! Without a variant that the handshake betrays, what is wrong depends on the layer's index.

#![allow(unsafe_op_in_unsafe_fn, clippy::all)]

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use kt_plugin_abi::*;

#[cfg(not(variant = "no_symbol"))]
#[unsafe(no_mangle)]
pub static KT_PLUGIN: Handshake = Handshake {
    magic: if cfg!(variant = "magic") { 7 } else { MAGIC },
    major: if cfg!(variant = "major") { 2 } else { MAJOR },
    minor: if cfg!(variant = "major") || cfg!(variant = "minor") {
        MINOR + 1
    } else if cfg!(variant = "first") {
        0
    } else {
        MINOR
    },
    table_bytes: if cfg!(variant = "small") {
        24
    } else if cfg!(variant = "first") {
        FIRST_TABLE_BYTES as u64
    } else {
        size_of::<Table>() as u64
    },
    unwinds: if cfg!(variant = "unwinds") { 5 } else { cfg!(panic = "unwind") as u32 },
    reserved: 0,
    name: if cfg!(variant = "null_name") {
        Text { bytes: null(), len: 5 }
    } else if cfg!(variant = "bad_name") {
        Text { bytes: b"no\xffway".as_ptr(), len: 6 }
    } else if cfg!(variant = "long_name") {
        Text { bytes: b"x".as_ptr(), len: usize::MAX }
    } else {
        Text::new(if cfg!(variant = "spaces") { "a name" } else { "nonsense" })
    },
    build: Text::new("nonsense 1.0"),
    features: Text::new(if cfg!(variant = "cpu") { "avx1024 sse3" } else { "" }),
    table: if cfg!(variant = "null_table") { null() } else { &TABLE },
};

#[cfg(not(variant = "no_symbol"))]
static TABLE: Table = Table {
    backend_new: Some(backend_new),
    backend_drop: Some(end),
    probe: Some(probe),
    load: Some(load),
    bank_run: Some(bank_run),
    bank_submit: Some(bank_submit),
    pending_wait: if cfg!(variant = "null_entry") { None } else { Some(pending_wait) },
    pending_drop: Some(end),
    bank_drop: Some(end),
    probe_linear: Some(probe_linear),
    linear: Some(linear),
    linear_forward: Some(linear_forward),
    linear_drop: Some(end),
    device: Some(device),
    load_replaceable: None,
    bank_replace: None,
    probe_stream: Some(probe_stream),
    stream: None,
    in_place: Some(in_place),
    invariant: Some(in_place),
};

/// A device, where `bad_device` is the variant: with more bytes free than it has. Elsewhere none; for `first`, nobody may ask.
unsafe extern "C" fn device(_: Backend, device: *mut Device, given: *mut bool, _: *mut Message) -> u32 {
    *given = cfg!(variant = "bad_device") || cfg!(variant = "first");
    (*device).label.set("big");
    ((*device).total_bytes, (*device).free_bytes) = (7, 8);
    DONE
}

/// No choice, said by null or by a failure; for `first`, nobody may ask.
unsafe extern "C" fn in_place(_: Backend, backend: *mut Backend, _: *mut Message) -> u32 {
    *backend = if cfg!(variant = "first") { handle(1) } else { null_mut() };
    if cfg!(variant = "no_device") { FAILED } else { DONE }
}

unsafe extern "C" fn probe_stream(_: Backend, _: *const Layer, streaming: *mut Streaming, _: *mut Message) -> u32 {
    (*streaming).device_bytes = u64::MAX;
    DONE
}

fn handle(n: usize) -> *mut c_void {
    n as *mut c_void
}

unsafe extern "C" fn backend_new(_: *const Host, _: Text, backend: *mut Backend, message: *mut Message) -> u32 {
    if cfg!(variant = "declines") {
        (*message).set("not on a Saturday");
        return UNSUPPORTED;
    }
    *backend = if cfg!(variant = "null_backend") { null_mut() } else { handle(1) };
    DONE
}

unsafe extern "C" fn end(_: *mut c_void, _: *mut Message) -> u32 {
    DONE
}

fn fit() -> Fit {
    let mut fit = Fit {
        rank: 3,
        inputs: [Input { kind: 0, group: 0, sums: 0, times: 0 }; 2],
        packed_bytes: 64,
        mapped_bytes: 0,
        scratch_bytes_per_token: 0,
        tier: Words::EMPTY,
        how: Words::EMPTY,
    };
    fit.tier.set("portable");
    fit.how.set("not at all");
    fit
}

unsafe extern "C" fn probe(_: Backend, layer: *const Layer, out: *mut Fit, message: *mut Message) -> u32 {
    let mut fit = fit();
    match (*layer).index {
        1 => fit.rank = u32::MAX,
        2 => fit.packed_bytes = u64::MAX,
        3 => return DONE,
        4 => fit.tier.len = 9999,
        5 => return 77,
        6 => {
            (*message).len = 5000;
            return FAILED;
        }
        7 => fit.inputs[1].kind = 9,
        8 => fit.inputs[0] = Input { kind: 2, group: 0, sums: 0, times: 0 },
        9 => fit.how.bytes[0] = 0xff,
        10 => fit.scratch_bytes_per_token = u64::MAX,
        11 => fit.mapped_bytes = u64::MAX / 2,
        12 => return UNSUPPORTED,
        _ => {}
    }
    out.write(fit);
    DONE
}

unsafe extern "C" fn load(
    _: Backend,
    _: *const Context,
    layer: *const Layer,
    _: *const u32,
    _: usize,
    packed: *mut Packed,
    _: *mut Message,
) -> u32 {
    let index = (*layer).index;
    *packed = match index {
        20 => Packed { handle: null_mut(), bytes: 64 },
        21 => Packed { handle: handle(index), bytes: 65 },
        22 => return CANCELLED,
        _ => Packed { handle: handle(index), bytes: 64 },
    };
    DONE
}

unsafe extern "C" fn bank_run(bank: Bank, _: *const Work, _: *mut Message) -> u32 {
    if bank as usize == 30 { u32::MAX } else { DONE }
}

unsafe extern "C" fn bank_submit(bank: Bank, _: *const Work, pending: *mut Pending, message: *mut Message) -> u32 {
    if bank as usize == 32 {
        (*message).len = u32::MAX;
        return PANICKED;
    }
    *pending = if bank as usize == 31 { null_mut() } else { handle(1) };
    DONE
}

unsafe extern "C" fn pending_wait(_: Pending, _: *mut f32, _: usize, _: *mut Spent, message: *mut Message) -> u32 {
    (*message).set("lost it");
    FAILED
}

unsafe extern "C" fn probe_linear(_: Backend, _: Text, _: usize, _: usize, out: *mut Fit, _: *mut Message) -> u32 {
    out.write(fit());
    DONE
}

unsafe extern "C" fn linear(
    _: Backend,
    _: *const Context,
    matrix: *const Matrix,
    packed: *mut Packed,
    _: *mut Message,
) -> u32 {
    let rows = (*matrix).rows;
    *packed =
        Packed { handle: if rows == 1 { null_mut() } else { handle(rows) }, bytes: if rows == 2 { 65 } else { 64 } };
    DONE
}

unsafe extern "C" fn linear_forward(_: Linear, _: *const f32, _: usize, _: *mut f32, _: usize, _: *mut Message) -> u32 {
    1000
}
