//! What crosses between a host (kt-core with its feature `plugins`) and a plugin (a shared library that holds one backend).
//!
//! A plugin exports one static, [`Handshake`], by the name [`SYMBOL`]. The host reads it and judges it before it calls anything of the
//! plugin; then it calls the functions of its [`Table`], to which it gives its own, [`Host`].
//!
//! Rules of the boundary:
//!
//! - The major version must be equal. Within one, tables only grow at their end, and each side knows the other's size; all other types
//!   stay as they are.
//! - Nothing unwinds across it: each side catches its own panics. A plugin built with `panic=abort` is refused.
//! - Nothing allocated on one side is freed on the other: what is given comes with a function that takes it back, and words are written into
//!   buffers of the caller's ([`Words`]).
//! - What is pointed to by an argument is valid until the call returns, unless its description says otherwise. Texts are UTF-8.
//! - Handles may be used from any thread, several at a time, but for a region, which stays on the thread that began it.
//! - Neither side is ever unloaded.
//!
//! Formats, tiers and activations cross by name, so that one side may know more of them than the other.
//!
//! Functions that can fail return [`DONE`] or what kind of failure it was, and then have written why into the message.

#![no_std]
#![allow(unsafe_code)] // reads what the other side points to

use core::ffi::{CStr, c_void};

/// The name of the exported [`Handshake`].
pub const SYMBOL: &CStr = c"KT_PLUGIN";
/// What a handshake begins with: `kt-plugi` as bytes.
pub const MAGIC: u64 = u64::from_le_bytes(*b"kt-plugi");
/// Versions with another major number cannot talk to each other.
pub const MAJOR: u32 = 1;
/// Rises when a table grows.
pub const MINOR: u32 = 3;
/// Bytes of the table of version 1.0: none has fewer.
pub const FIRST_TABLE_BYTES: usize = core::mem::offset_of!(Table, device);

/// It worked.
pub const DONE: u32 = 0;
/// The backend declines: this machine or this layer is not for it.
pub const UNSUPPORTED: u32 = 1;
/// The host cancelled the load.
pub const CANCELLED: u32 = 2;
/// Any other failure.
pub const FAILED: u32 = 3;
/// The code panicked; the message is the panic's.
pub const PANICKED: u32 = 4;

/// Borrowed UTF-8.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Text {
    /// The first byte; may be null where there is none.
    pub bytes: *const u8,
    /// Their number.
    pub len: usize,
}

impl Text {
    /// The text, borrowed: valid as long as `text` is.
    pub const fn new(text: &str) -> Self {
        Text { bytes: text.as_ptr(), len: text.len() }
    }

    /// What it says; `None` when it is null, longer than `most` bytes, or not UTF-8.
    ///
    /// # Safety
    /// - A pointer that is not null is one to `len` readable bytes, which nobody writes during `'a`.
    pub unsafe fn get<'a>(self, most: usize) -> Option<&'a str> {
        if self.bytes.is_null() || self.len > most {
            return None;
        }
        // SAFETY: promised by the caller.
        core::str::from_utf8(unsafe { core::slice::from_raw_parts(self.bytes, self.len) }).ok()
    }
}

/// A buffer of the caller's for up to `N` bytes of UTF-8.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Words<const N: usize> {
    /// Bytes used.
    pub len: u32,
    /// The bytes.
    pub bytes: [u8; N],
}

/// Why something failed.
pub type Message = Words<1020>;

impl<const N: usize> Words<N> {
    /// No words.
    pub const EMPTY: Self = Words { len: 0, bytes: [0; N] };

    /// Writes `text`, cut at the end of a character where it is too long.
    pub fn set(&mut self, text: &str) {
        let mut len = text.len().min(N);
        while !text.is_char_boundary(len) {
            len -= 1;
        }
        self.bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
        self.len = len as u32;
    }

    /// What was written; `None` when it is longer than the buffer, or not UTF-8.
    pub fn get(&self) -> Option<&str> {
        core::str::from_utf8(self.bytes.get(..self.len as usize)?).ok()
    }
}

/// What a plugin exports. Its first 16 bytes mean the same in all versions.
#[repr(C)]
pub struct Handshake {
    /// [`MAGIC`].
    pub magic: u64,
    /// [`MAJOR`] that the plugin was built for.
    pub major: u32,
    /// [`MINOR`] that the plugin was built for.
    pub minor: u32,
    /// Bytes of the table.
    pub table_bytes: u64,
    /// 1 when its panics unwind, so that they can be caught; 0 when they abort.
    pub unwinds: u32,
    /// 0.
    pub reserved: u32,
    /// The backend's name.
    pub name: Text,
    /// Which build this is: package, version.
    pub build: Text,
    /// The CPU features that the whole plugin was compiled for, as rustc names them, with spaces between. Those that it looks for itself are not
    /// among them.
    pub features: Text,
    /// What it can do.
    pub table: *const Table,
}

// SAFETY: constant data, with pointers to constant data.
unsafe impl Sync for Handshake {}

/// A backend: an opaque handle of the plugin's.
pub type Backend = *mut c_void;
/// A bank of experts: an opaque handle of the plugin's.
pub type Bank = *mut c_void;
/// Work under way: an opaque handle of the plugin's.
pub type Pending = *mut c_void;
/// A packed matrix outside of experts: an opaque handle of the plugin's.
pub type Linear = *mut c_void;

/// What a plugin can do. Entries of version 1.0 are never null; those beyond [`Handshake::table_bytes`] are not there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Table {
    /// Makes the backend, which uses no instruction set above the tier named; `host` is valid for ever.
    pub backend_new: Option<unsafe extern "C" fn(host: *const Host, cap: Text, *mut Backend, *mut Message) -> u32>,
    /// Ends it; all its banks, work and matrices have ended before.
    pub backend_drop: Option<unsafe extern "C" fn(Backend, *mut Message) -> u32>,
    /// Could it hold experts of this layer?
    pub probe: Option<unsafe extern "C" fn(Backend, *const Layer, *mut Fit, *mut Message) -> u32>,
    /// Loads experts, whose weights it gets from the host by their position in `experts`.
    pub load: Option<
        unsafe extern "C" fn(
            Backend,
            *const Context,
            *const Layer,
            experts: *const u32,
            count: usize,
            *mut Packed,
            *mut Message,
        ) -> u32,
    >,
    /// Does work, returning when it is done: adds to its output.
    pub bank_run: Option<unsafe extern "C" fn(Bank, *const Work, *mut Message) -> u32>,
    /// Starts work. Only the pending work is kept: all that `Work` points to was copied when the call returns.
    pub bank_submit: Option<unsafe extern "C" fn(Bank, *const Work, *mut Pending, *mut Message) -> u32>,
    /// Waits for work, writes its output `[tokens, hidden]` (what it was given, added to), and ends the handle, also when it fails.
    pub pending_wait:
        Option<unsafe extern "C" fn(Pending, output: *mut f32, len: usize, *mut Spent, *mut Message) -> u32>,
    /// Ends the handle of work that nobody waits for.
    pub pending_drop: Option<unsafe extern "C" fn(Pending, *mut Message) -> u32>,
    /// Ends a bank; work on it may still be under way.
    pub bank_drop: Option<unsafe extern "C" fn(Bank, *mut Message) -> u32>,
    /// Could it multiply with a matrix outside of experts?
    pub probe_linear:
        Option<unsafe extern "C" fn(Backend, format: Text, rows: usize, cols: usize, *mut Fit, *mut Message) -> u32>,
    /// Packs a matrix, and takes its handle over, also when it fails.
    pub linear: Option<unsafe extern "C" fn(Backend, *const Context, *const Matrix, *mut Packed, *mut Message) -> u32>,
    /// Multiplies `x: [n, cols]` into `y: [n, rows]`.
    pub linear_forward: Option<
        unsafe extern "C" fn(Linear, x: *const f32, x_len: usize, y: *mut f32, y_len: usize, *mut Message) -> u32,
    >,
    /// Ends a packed matrix.
    pub linear_drop: Option<unsafe extern "C" fn(Linear, *mut Message) -> u32>,
    /// Since 1.1. The device whose memory holds experts; `given` says whether there is one.
    pub device: Option<unsafe extern "C" fn(Backend, *mut Device, given: *mut bool, *mut Message) -> u32>,
    /// Since 1.1. As `load`, of experts that `bank_replace` may replace.
    pub load_replaceable: Option<
        unsafe extern "C" fn(
            Backend,
            *const Context,
            *const Layer,
            experts: *const u32,
            count: usize,
            *mut Packed,
            *mut Message,
        ) -> u32,
    >,
    /// Since 1.1. Puts expert `expert` of the layer in the place of local expert `local`. `load` is for the host's functions, which know this one
    /// expert, at position 0; valid during the call only. Nothing is submitted to the bank meanwhile.
    pub bank_replace:
        Option<unsafe extern "C" fn(Bank, load: *const c_void, local: u32, expert: u32, *mut Message) -> u32>,
    /// Since 1.1. What `stream` would take for a layer.
    pub probe_stream: Option<unsafe extern "C" fn(Backend, *const Layer, *mut Streaming, *mut Message) -> u32>,
    /// Since 1.1. Does work with experts that are brought for this call and not kept: adds to its output. The work names experts by the layer's own
    /// numbers, which are their positions in `load`; this is for the host's functions, and valid during the call only.
    pub stream:
        Option<unsafe extern "C" fn(Backend, load: *const c_void, *const Layer, *const Work, *mut Message) -> u32>,
    /// Since 1.2. The same backend for who has little memory, as a backend of its own that is ended like others: it uses weights in place
    /// wherever it can. Null where there is no such choice.
    pub in_place: Option<unsafe extern "C" fn(Backend, *mut Backend, *mut Message) -> u32>,
    /// Since 1.3. The same backend with numbers for a token that do not depend on what else is in a call, as a backend of its own that is ended like
    /// others. Null where they never do.
    pub invariant: Option<unsafe extern "C" fn(Backend, *mut Backend, *mut Message) -> u32>,
}

/// A device whose own memory holds experts.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Device {
    /// What it is, for people.
    pub label: Words<124>,
    /// Its memory.
    pub total_bytes: u64,
    /// What of it can be had now.
    pub free_bytes: u64,
    /// How fast it reads its memory, bytes per second; 0 where that is not known.
    pub read_bytes_per_second: f64,
    /// What a call costs besides the experts' work, in nanoseconds.
    pub call: u64,
}

/// What streaming the experts of a layer takes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Streaming {
    /// Bytes of the device's memory.
    pub device_bytes: u64,
    /// Bytes of the host's memory.
    pub host_bytes: u64,
}

/// What is known of a layer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Layer {
    /// Index in the model.
    pub index: usize,
    /// Routed experts.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Width of the hidden state.
    pub hidden: usize,
    /// Width of an expert's intermediate state.
    pub intermediate: usize,
    /// Names of the formats of gate, up and down; for plugins since 1.1, where the type of the scales is known, followed by `@` and its name
    /// ([`Matrix::scale_type`]).
    pub formats: [Text; 3],
    /// Name of the activation.
    pub activation: Text,
    /// Its numbers.
    pub numbers: [f32; 2],
    /// Whether the projections carry biases.
    pub biases: bool,
}

/// How well a backend fits.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Fit {
    /// Higher is better.
    pub rank: u32,
    /// How gate and up inputs, and down inputs, are rounded.
    pub inputs: [Input; 2],
    /// Bytes of packed experts.
    pub packed_bytes: u64,
    /// Bytes used in place.
    pub mapped_bytes: u64,
    /// Bytes of scratch per token of a pass.
    pub scratch_bytes_per_token: u64,
    /// Instruction set or device.
    pub tier: Words<60>,
    /// One line for people.
    pub how: Words<508>,
}

/// How inputs are rounded.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Input {
    /// 0: F32, 1: BF16, 2: int8, 3: int8 with integer scales.
    pub kind: u32,
    /// Columns per scale of int8.
    pub group: u32,
    /// Which sums of int8 codes are kept: 0: times a number, 1: scaled, 2: of each half of a group, times a number, in words, 3: as words; 4, 5, 6, 7: as 0,
    /// 2, 3 and 1, in pairs of columns; 8: as 0 and as 1. With integer scales: 1 for weights with minima, else 0.
    pub sums: u32,
    /// That number.
    pub times: i32,
}

/// What was packed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Packed {
    /// A bank, or a matrix outside of experts.
    pub handle: *mut c_void,
    /// Bytes of the backend's memory that it takes.
    pub bytes: u64,
}

/// What a load may use.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Context {
    /// The threads: valid during the call, or longer by [`Host::team_keep`].
    pub team: *const c_void,
    /// The team's threads by node: its lanes.
    pub shares: *const Share,
    /// Their number, at least 1.
    pub shares_len: usize,
    /// The load, for the host's functions; valid during the call only.
    pub load: *const c_void,
}

/// A node's part of a team.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Share {
    /// The node.
    pub node: usize,
    /// Its threads.
    pub threads: usize,
}

/// One weight matrix `[rows, cols]` of the host's. All that it points to is valid until its handle is given to [`Host::matrix_drop`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Matrix {
    /// Keeps the bytes alive.
    pub handle: *mut c_void,
    /// Name of the format.
    pub format: Text,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Codes, row by row.
    pub codes: *const u8,
    /// Their bytes, from the first row's to the last one's.
    pub codes_len: usize,
    /// Bytes from one row to the next.
    pub stride: usize,
    /// The scale tensor; null where the format has none.
    pub scales: *const u8,
    /// Its bytes.
    pub scales_len: usize,
    /// Type of its numbers: `F32`, `F16`, `BF16`, `E8M0`, `E4M3`.
    pub scale_type: Text,
    /// Scales per row of the scale tensor.
    pub scale_cols: usize,
    /// Scales from one row to the next.
    pub scale_stride: usize,
    /// Whether all scales are divided by `global`; else they are multiplied with it.
    pub global_over: bool,
    /// The factor of all scales; 1 where there is none.
    pub global: f32,
    /// Zero points: that of a row and group is `zeros[row * zero_stride + group]`; null where there are none.
    pub zeros: *const i16,
    /// How many.
    pub zeros_len: usize,
    /// Zero points from one row to the next.
    pub zero_stride: usize,
    /// Each column's group, in ordered formats: `cols` of them, or null.
    pub column_groups: *const u32,
}

/// One (token, expert) pair.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Row {
    /// Token of the work.
    pub token: u32,
    /// Routing weight.
    pub weight: f32,
}

/// The rows of one expert.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ExpertRows {
    /// The expert's position among those that the bank was loaded with.
    pub local: u32,
    /// Its first row.
    pub start: usize,
    /// The row after its last.
    pub end: usize,
}

/// A bank's share of a batch. All indices were checked.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Work {
    /// Hidden states `[tokens, hidden]`: F32, or BF16.
    pub input: *const c_void,
    /// Whether they are BF16.
    pub bf16: bool,
    /// Tokens.
    pub tokens: usize,
    /// Width of the hidden state.
    pub hidden: usize,
    /// Rows, grouped by expert.
    pub rows: *const Row,
    /// How many.
    pub rows_len: usize,
    /// The groups, by rising expert.
    pub experts: *const ExpertRows,
    /// How many.
    pub experts_len: usize,
    /// `[tokens, hidden]`.
    pub output: *mut f32,
    /// Where [`Table::bank_run`] writes what it knows of its time.
    pub spent: *mut Spent,
}

/// What the thread that ran some work did with its time, in nanoseconds: all 0 where the backend does not know.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Spent {
    /// It computed.
    pub kernels: u64,
    /// It waited for other threads.
    pub waiting: u64,
}

/// Memory of the host's: zeroed, on a page boundary.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Area {
    /// The bytes, for the plugin to write until its load returns, and to read until it frees them.
    pub bytes: *mut u8,
    /// What [`Host::free`] takes.
    pub handle: *mut c_void,
    /// Whether it is on its node for certain; else whoever touches it first decides.
    pub bound: bool,
}

/// A task of a region: its own pointer, lane, number. Anything but 0 ends the run: no further tasks are begun.
pub type Task = unsafe extern "C" fn(ctx: *const c_void, lane: usize, task: usize) -> u32;

/// What a host does for its plugins.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Host {
    /// Bytes of this table.
    pub bytes: u64,
    /// Writes a line to the host's log; levels from 1, an error, to 5, a trace.
    pub log: unsafe extern "C" fn(level: u32, text: Text),
    /// Counts checkpoint bytes as loaded; [`CANCELLED`] when the load shall end.
    pub advance: unsafe extern "C" fn(load: *const c_void, bytes: u64) -> u32,
    /// One projection (0: gate, 1: up, 2: down) of an expert, by its position in the list that is loaded.
    pub matrix: unsafe extern "C" fn(load: *const c_void, expert: usize, proj: u32, *mut Matrix, *mut Message) -> u32,
    /// Ends the handle of a matrix.
    pub matrix_drop: unsafe extern "C" fn(matrix: *mut c_void),
    /// The bias of a projection, `len` numbers, one per output; `given` says whether there is one.
    pub bias: unsafe extern "C" fn(
        load: *const c_void,
        expert: usize,
        proj: u32,
        out: *mut f32,
        len: usize,
        given: *mut bool,
        *mut Message,
    ) -> u32,
    /// File and tensor of a projection, for messages.
    pub tensor_name: unsafe extern "C" fn(load: *const c_void, expert: usize, proj: u32, *mut Message, *mut Message),
    /// The expert's bytes were copied and will not be read again soon.
    pub release: unsafe extern "C" fn(load: *const c_void, expert: usize),
    /// Memory for packed weights on the node of a share of the team.
    pub alloc: unsafe extern "C" fn(load: *const c_void, share: usize, len: usize, *mut Area, *mut Message) -> u32,
    /// Takes memory back.
    pub free: unsafe extern "C" fn(area: *mut c_void),
    /// Keeps a team for longer than the call that it came with.
    pub team_keep: unsafe extern "C" fn(team: *const c_void),
    /// Ends what [`Host::team_keep`] began.
    pub team_drop: unsafe extern "C" fn(team: *const c_void),
    /// Begins a parallel region: the team works for this thread until it ends, and other threads that ask for one wait. Not from within a task.
    pub region_begin: unsafe extern "C" fn(team: *const c_void) -> *mut c_void,
    /// Runs `tasks[lane]` tasks of each of up to as many lanes as the team has shares, and returns when all are done: [`DONE`], or else some task ended
    /// the run. The tasks of a lane begin in the order of their numbers: one may wait for those before it. With `at_home`, no thread takes tasks of another lane than its own.
    pub region_run: unsafe extern "C" fn(
        region: *mut c_void,
        tasks: *const usize,
        lanes: usize,
        at_home: bool,
        task: Task,
        ctx: *const c_void,
    ) -> u32,
    /// Ends a region, on the thread that began it.
    pub region_end: unsafe extern "C" fn(region: *mut c_void),
    /// Calls `job` once, on a thread of the host's, later; or returns [`FAILED`] and never does.
    pub spawn:
        unsafe extern "C" fn(team: *const c_void, job: unsafe extern "C" fn(ctx: *mut c_void), ctx: *mut c_void) -> u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_cut_between_characters() {
        let mut words = Words::<5>::EMPTY;
        words.set("ab\u{e9}\u{e9}");
        assert_eq!(words.get(), Some("ab\u{e9}"));
        words.len = 6;
        assert_eq!(words.get(), None);
        words.len = 3;
        assert_eq!(words.get(), None, "half a character");
    }

    #[test]
    fn texts_that_cannot_be_are_none() {
        // SAFETY: null, or pointers to whole literals.
        unsafe {
            assert_eq!(Text { bytes: core::ptr::null(), len: 3 }.get(10), None);
            assert_eq!(Text::new("abc").get(2), None);
            assert_eq!(Text::new("abc").get(3), Some("abc"));
            assert_eq!(Text { bytes: b"\xff".as_ptr(), len: 1 }.get(3), None);
        }
    }
}
