//! The C interface: `include/kt.h` says what each function does, this file does it.
//!
//! Types and functions here are those of the header, in its order; a test compiles a C program against it that checks sizes and offsets.

#![allow(unsafe_code)] // reads what C points to
// What callers must keep to is said in the header, once.
#![allow(clippy::missing_safety_doc, missing_docs)]

use std::ffi::{CStr, c_char};
use std::mem::{MaybeUninit, offset_of};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use kt::cpu::tier::Tier;
use kt::plan::Verdict;
use kt::{Batch, Error, Experts, Pending, Result, Runtime, WeightSource};

pub const KT_C_VERSION: u32 = 1;
pub const KT_OK: i32 = 0;
pub const KT_INVALID: i32 = 1;
pub const KT_IO: i32 = 2;
pub const KT_CHECKPOINT: i32 = 3;
pub const KT_UNSUPPORTED: i32 = 4;
pub const KT_MEMORY: i32 = 5;
pub const KT_BACKEND: i32 = 6;
pub const KT_PLUGIN: i32 = 7;
pub const KT_PANIC: i32 = 8;

#[repr(C)]
pub struct kt_error {
    pub code: i32,
    pub text: [c_char; 4092],
}

#[allow(non_camel_case_types)]
pub type kt_runtime = Runtime;
#[allow(non_camel_case_types)]
pub type kt_source = Arc<dyn WeightSource>;
#[allow(non_camel_case_types)]
pub type kt_experts = Experts;
#[allow(non_camel_case_types)]
pub type kt_pending = Pending<Batch>;

#[repr(C)]
pub struct kt_options {
    pub size: usize,
    pub threads: usize,
    pub backend: *const c_char,
    pub max_tier: *const c_char,
    pub memory_limit: u64,
    pub pass_tokens: usize,
    pub plugin: *const c_char,
    pub plugin_dir: *const c_char,
    pub in_place: i32,
    pub batch_invariant: i32,
}

#[repr(C)]
pub struct kt_layer {
    pub index: usize,
    pub experts: usize,
    pub top_k: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub stored_bytes: u64,
}

#[repr(C)]
pub struct kt_plan_bytes {
    pub verdict: i32,
    pub packed_bytes: u64,
    pub mapped_bytes: u64,
    pub need_bytes: u64,
    pub available_bytes: u64,
}

#[repr(C)]
pub struct kt_batch {
    pub tokens: usize,
    pub hidden: usize,
    pub top_k: usize,
    pub input: *const f32,
    pub experts: *const i32,
    pub weights: *const f32,
}

/// Bytes of the first `kt_options` of this version: what was appended since begins here.
const FIRST_OPTIONS: usize = offset_of!(kt_options, in_place);

fn code(error: &Error) -> i32 {
    match error {
        Error::Io { .. } => KT_IO,
        Error::Checkpoint { .. } => KT_CHECKPOINT,
        Error::Unsupported(_) => KT_UNSUPPORTED,
        Error::Memory(_) => KT_MEMORY,
        Error::Backend { .. } => KT_BACKEND,
        #[cfg(feature = "plugins")]
        Error::Plugin(_) => KT_PLUGIN,
        _ => KT_INVALID,
    }
}

/// Copies a text with its final zero, cut at the end of a character to fit.
fn copy_text(text: &str, to: &mut [c_char]) {
    let Some(most) = to.len().checked_sub(1) else { return };
    let mut len = text.len().min(most);
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    for (to, byte) in to.iter_mut().zip(&text.as_bytes()[..len]) {
        *to = *byte as c_char;
    }
    to[len] = 0;
}

/// Runs `f`; what went wrong is written to `error`, where that is not null.
///
/// # Safety
/// - `error` is null or points to one.
unsafe fn answer(error: *mut kt_error, f: impl FnOnce() -> Result<()>) -> i32 {
    let (code, text) = match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(())) => return KT_OK,
        Ok(Err(e)) => (code(&e), e.to_string()),
        Err(payload) => {
            let text = payload.downcast_ref::<String>().cloned();
            let text = text.or_else(|| payload.downcast_ref::<&str>().map(|s| s.to_string()));
            // What a panic carries may panic when it is dropped.
            std::mem::forget(payload);
            (KT_PANIC, format!("panicked: {}", text.unwrap_or_default()))
        }
    };
    // SAFETY: promised by the caller; only bytes are written, through a pointer that may be to none.
    if let Some(error) = unsafe { error.as_mut() } {
        error.code = code;
        copy_text(&text, &mut error.text);
    }
    code
}

fn null(what: &str) -> Error {
    Error::Invalid(format!("{what} is NULL"))
}

/// Whether there is a place to write to.
fn there<T>(pointer: *mut T, what: &str) -> Result<()> {
    if pointer.is_null() { Err(null(what)) } else { Ok(()) }
}

/// What a pointer is to.
///
/// # Safety
/// - It is null, or to a `T` that lives for `'a`.
unsafe fn get<'a, T>(pointer: *const T, what: &str) -> Result<&'a T> {
    // SAFETY: promised by the caller.
    unsafe { pointer.as_ref() }.ok_or_else(|| null(what))
}

/// The numbers of an array.
///
/// # Safety
/// - It is null, or to `len` values that live for `'a`.
unsafe fn array<'a, T>(pointer: *const T, len: usize, what: &str) -> Result<&'a [T]> {
    match (pointer.is_null(), len) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(null(what)),
        // SAFETY: promised by the caller.
        _ => Ok(unsafe { std::slice::from_raw_parts(pointer, len) }),
    }
}

/// A text, where there is one.
///
/// # Safety
/// - It is null, or ends with a zero byte and lives for `'a`.
unsafe fn text<'a>(pointer: *const c_char, what: &str) -> Result<Option<&'a str>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: promised by the caller.
    let text = unsafe { CStr::from_ptr(pointer) }.to_str();
    text.map(Some).map_err(|_| Error::Invalid(format!("{what} is not UTF-8")))
}

/// The caller's options, with zeros for those that its header did not know yet.
///
/// # Safety
/// - `options` is null, or to a `size` and that many bytes in all, where they are no more than a `kt_options`.
unsafe fn options_of(options: *const kt_options) -> Result<Option<kt_options>> {
    if options.is_null() {
        return Ok(None);
    }
    // SAFETY: promised by the caller; a reference would be to more than may be there.
    let size = unsafe { (&raw const (*options).size).read() };
    let known = size_of::<kt_options>();
    if !(FIRST_OPTIONS..=known).contains(&size) {
        return Err(Error::Invalid(format!(
            "options.size is {size}, this library knows {FIRST_OPTIONS} to {known}: set it to sizeof(kt_options), and link a library \
             that is no older than kt.h"
        )));
    }
    let mut copy = MaybeUninit::<kt_options>::zeroed();
    // SAFETY: the caller has promised `size` bytes, and the copy has room for them; numbers and pointers may have any bits.
    Ok(Some(unsafe {
        copy.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(options.cast(), size);
        copy.assume_init()
    }))
}

/// Gives a value away as a handle.
///
/// # Safety
/// - `out` points to a place for one; the caller has seen that it is not null.
unsafe fn give<T>(out: *mut *mut T, value: T) {
    // SAFETY: promised by the caller.
    unsafe { *out = Box::into_raw(Box::new(value)) }
}

/// Ends a handle.
///
/// # Safety
/// - It is null, or was given away by [`give`] and not ended since.
unsafe fn end<T>(handle: *mut T) {
    if !handle.is_null() {
        // SAFETY: promised by the caller.
        let value = unsafe { Box::from_raw(handle) };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(value))) {
            std::mem::forget(payload);
        }
    }
}

// SAFETY of all blocks below: callers keep to what the header says of pointers and handles.

#[unsafe(no_mangle)]
pub extern "C" fn kt_c_version() -> u32 {
    KT_C_VERSION
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kt_runtime_new(
    options: *const kt_options,
    runtime: *mut *mut kt_runtime,
    error: *mut kt_error,
) -> i32 {
    // SAFETY: see above.
    unsafe {
        answer(error, || {
            there(runtime, "runtime")?;
            let mut builder = kt::runtime();
            if let Some(options) = options_of(options)? {
                if options.threads > 0 {
                    builder = builder.threads(options.threads);
                }
                if let Some(name) = text(options.backend, "options.backend")? {
                    builder = builder.backend(name);
                }
                if let Some(tier) = text(options.max_tier, "options.max_tier")? {
                    builder = builder.max_tier(tier.parse::<Tier>()?);
                }
                if options.memory_limit > 0 {
                    builder = builder.memory_limit(options.memory_limit);
                }
                if options.pass_tokens > 0 {
                    builder = builder.pass_tokens(options.pass_tokens);
                }
                builder = builder.in_place(options.in_place != 0).batch_invariant(options.batch_invariant != 0);
                let plugin = text(options.plugin, "options.plugin")?.map(PathBuf::from);
                let plugin_dir = text(options.plugin_dir, "options.plugin_dir")?.map(PathBuf::from);
                builder = with_plugins(builder, plugin, plugin_dir)?;
            }
            give(runtime, builder.build()?);
            Ok(())
        })
    }
}

#[cfg(feature = "plugins")]
fn with_plugins(
    mut builder: kt::RuntimeBuilder,
    plugin: Option<PathBuf>,
    dir: Option<PathBuf>,
) -> Result<kt::RuntimeBuilder> {
    if let Some(path) = plugin {
        builder = builder.plugin(path);
    }
    if let Some(dir) = dir {
        builder = builder.plugin_dir(dir);
    }
    Ok(builder)
}

#[cfg(not(feature = "plugins"))]
fn with_plugins(
    builder: kt::RuntimeBuilder,
    plugin: Option<PathBuf>,
    dir: Option<PathBuf>,
) -> Result<kt::RuntimeBuilder> {
    match plugin.or(dir) {
        Some(_) => Err(kt::Unsupported::new("this library was built without plugins").into()),
        None => Ok(builder),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kt_runtime_free(runtime: *mut kt_runtime) {
    // SAFETY: see above.
    unsafe { end(runtime) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kt_open(path: *const c_char, source: *mut *mut kt_source, error: *mut kt_error) -> i32 {
    // SAFETY: see above.
    unsafe {
        answer(error, || {
            there(source, "source")?;
            let path = text(path, "path")?.ok_or_else(|| null("path"))?;
            give(source, kt::open(path)?);
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kt_source_free(source: *mut kt_source) {
    // SAFETY: see above.
    unsafe { end(source) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kt_layers(source: *const kt_source) -> usize {
    // SAFETY: see above.
    unsafe { source.as_ref() }.map_or(0, |source| source.layers().len())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kt_layer_at(
    source: *const kt_source,
    i: usize,
    layer: *mut kt_layer,
    error: *mut kt_error,
) -> i32 {
    // SAFETY: see above.
    unsafe {
        answer(error, || {
            there(layer, "layer")?;
            let layers = get(source, "source")?.layers();
            let spec = layers.get(i).ok_or_else(|| {
                Error::Invalid(format!("there are {} layers with experts, not one numbered {i}", layers.len()))
            })?;
            layer.write(kt_layer {
                index: spec.index,
                experts: spec.experts,
                top_k: spec.top_k,
                hidden: spec.hidden,
                intermediate: spec.intermediate,
                stored_bytes: spec.expert_bytes() * spec.experts as u64,
            });
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kt_plan(
    runtime: *const kt_runtime,
    source: *const kt_source,
    plan: *mut kt_plan_bytes,
    error: *mut kt_error,
) -> i32 {
    // SAFETY: see above.
    unsafe {
        answer(error, || {
            there(plan, "plan")?;
            let made = get(runtime, "runtime")?.plan(&**get(source, "source")?)?;
            plan.write(kt_plan_bytes {
                verdict: match made.verdict() {
                    Verdict::Fits => 0,
                    Verdict::Tight => 1,
                    Verdict::Refuse => 2,
                },
                packed_bytes: made.packed_bytes(),
                mapped_bytes: made.mapped_bytes(),
                need_bytes: made.need_bytes(),
                available_bytes: made.available.bytes,
            });
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kt_explain(
    runtime: *const kt_runtime,
    source: *const kt_source,
    out: *mut c_char,
    capacity: usize,
    needed: *mut usize,
    error: *mut kt_error,
) -> i32 {
    // SAFETY: see above.
    unsafe {
        answer(error, || {
            let text = get(runtime, "runtime")?.explain(&**get(source, "source")?)?;
            if capacity > 0 {
                there(out, "text")?;
                // Only written: it need not be initialized, which bytes do not mind.
                out.write_bytes(0, capacity);
                copy_text(&text, std::slice::from_raw_parts_mut(out, capacity));
            }
            if let Some(needed) = needed.as_mut() {
                *needed = text.len() + 1;
            }
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kt_load(
    runtime: *const kt_runtime,
    source: *const kt_source,
    experts: *mut *mut kt_experts,
    error: *mut kt_error,
) -> i32 {
    // SAFETY: see above.
    unsafe {
        answer(error, || {
            there(experts, "experts")?;
            give(experts, get(runtime, "runtime")?.load(&**get(source, "source")?)?);
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kt_experts_free(experts: *mut kt_experts) {
    // SAFETY: see above.
    unsafe { end(experts) }
}

/// A copy of a batch.
///
/// # Safety
/// - As the header says of its arrays.
unsafe fn batch_of(batch: *const kt_batch) -> Result<Batch> {
    // SAFETY: promised by the caller.
    unsafe {
        let batch = get(batch, "batch")?;
        let size = |a: usize, b: usize| {
            // No slice is larger than this.
            let len = a.checked_mul(b).filter(|&n| n <= isize::MAX as usize / 4);
            len.ok_or_else(|| Error::Invalid(format!("a batch of {a} x {b} numbers does not fit into memory")))
        };
        let (numbers, slots) = (size(batch.tokens, batch.hidden)?, size(batch.tokens, batch.top_k)?);
        let input = array(batch.input, numbers, "batch.input")?;
        let experts = array(batch.experts, slots, "batch.experts")?;
        let weights = array(batch.weights, slots, "batch.weights")?;
        Batch::new(batch.tokens, input.to_vec(), experts.to_vec(), weights.to_vec())
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kt_forward(
    experts: *const kt_experts,
    layer: usize,
    batch: *const kt_batch,
    output: *mut f32,
    error: *mut kt_error,
) -> i32 {
    // SAFETY: see above.
    unsafe {
        answer(error, || {
            let layer = get(experts, "experts")?.layer(layer)?;
            let mut batch = batch_of(batch)?;
            layer.forward(&mut batch)?;
            write(output, batch.output())
        })
    }
}

/// Writes numbers to the caller's array.
///
/// # Safety
/// - `to` is null or points to a place for all.
unsafe fn write(to: *mut f32, from: &[f32]) -> Result<()> {
    if !from.is_empty() {
        // SAFETY: promised by the caller.
        unsafe {
            there(to, "output")?;
            to.copy_from_nonoverlapping(from.as_ptr(), from.len());
        }
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kt_submit(
    experts: *const kt_experts,
    layer: usize,
    batch: *const kt_batch,
    pending: *mut *mut kt_pending,
    error: *mut kt_error,
) -> i32 {
    // SAFETY: see above.
    unsafe {
        answer(error, || {
            there(pending, "pending")?;
            let layer = get(experts, "experts")?.layer(layer)?;
            give(pending, layer.submit(batch_of(batch)?));
            Ok(())
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kt_wait(pending: *mut kt_pending, output: *mut f32, len: usize, error: *mut kt_error) -> i32 {
    // SAFETY: see above.
    unsafe {
        answer(error, || {
            there(pending, "pending")?;
            let batch = Box::from_raw(pending).wait()?;
            if batch.output().len() != len {
                let expected = batch.output().len();
                return Err(Error::Length { what: "output [tokens, hidden]", expected, got: len });
            }
            write(output, batch.output())
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kt_pending_free(pending: *mut kt_pending) {
    // SAFETY: see above.
    unsafe { end(pending) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_older_headers_are_taken_and_no_more_of_them_is_read() {
        let read = |words: &[usize]| {
            assert!(words[0] > size_of::<kt_options>() || words[0] <= size_of_val(words));
            // SAFETY: as was just seen.
            unsafe { options_of(words.as_ptr().cast()) }
        };
        let words = |bytes: usize| {
            let mut words = vec![0; bytes / size_of::<usize>()];
            (words[0], words[1]) = (bytes, 5);
            words
        };
        // SAFETY: null.
        assert!(unsafe { options_of(std::ptr::null()) }.unwrap().is_none());
        let old = read(&words(FIRST_OPTIONS)).unwrap().unwrap();
        assert!((old.size, old.threads, old.in_place) == (FIRST_OPTIONS, 5, 0) && old.plugin_dir.is_null());
        // Room for all, of which a part is said to be there.
        let mut all = words(size_of::<kt_options>());
        *all.last_mut().unwrap() = usize::MAX;
        let read_all = read(&all).unwrap().unwrap();
        assert_eq!((read_all.in_place, read_all.batch_invariant), (-1, -1));
        all[0] = FIRST_OPTIONS;
        assert_eq!(read(&all).unwrap().unwrap().in_place, 0);
        for size in [0, FIRST_OPTIONS - 1, size_of::<kt_options>() + 1, usize::MAX] {
            all[0] = size;
            let error = read(&all).err().unwrap().to_string();
            assert!(
                error.contains(&format!("options.size is {size}")) && error.contains("sizeof(kt_options)"),
                "{error}"
            );
        }
    }
}
