//! The plugin's side: a backend behind the functions of the table, and the host's services behind this crate's own types.
//!
//! Nothing here is called by hand: [`declare_backend!`](crate::declare_backend) does.

#![allow(unsafe_code)] // calls through, and reads, what the host points to

use std::any::Any;
use std::cell::RefCell;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak};

use bytes::Bytes;
#[doc(hidden)]
pub use kt_plugin_abi as abi;

use super::wire::{self, answer};
use crate::backend::{Backend, ExpertBank, LinearOp, LoadContext, Progress};
use crate::cpu::kernel::Scratch;
use crate::cpu::memory::HugePages;
use crate::cpu::team::{Body, Team};
use crate::cpu::tier::Tier;
use crate::cpu::topology::{Share, Topology};
use crate::error::{Error, Result, Unsupported};
use crate::format::{Global, Matrix, Parts, Scales, ZeroPoints};
use crate::layer::{LayerSpec, Proj};
use crate::pending::{Pending, keep_first};
use crate::routing::Routing;
use crate::source::{Metadata, WeightSource};
use crate::work::{ExpertRows, Hidden, Row, Work};

type Host = &'static abi::Host;

/// Words that the host wrote, as the error that its code stands for.
fn failed(code: u32, message: &abi::Message) -> Error {
    let words = message.get().unwrap_or("the host's message is not readable");
    match code {
        abi::UNSUPPORTED => Unsupported::new(words).into(),
        abi::CANCELLED => Error::Cancelled,
        _ => Error::Invalid(words.into()),
    }
}

/// Calls a function of the host's that may fail.
fn ask(f: impl FnOnce(&mut abi::Message) -> u32) -> Result<()> {
    let mut message = abi::Message::EMPTY;
    match f(&mut message) {
        abi::DONE => Ok(()),
        code => Err(failed(code, &message)),
    }
}

/// The host's side of a load, as long as that is under way.
pub(crate) struct HostLoad {
    host: Host,
    /// `None` when the load has returned: whoever keeps this learns so.
    load: RwLock<Option<Pointer>>,
}

#[derive(Clone, Copy)]
struct Pointer(*const c_void);

// SAFETY: a handle of the host's, which it lets be used from any thread.
unsafe impl Send for Pointer {}
// SAFETY: as above.
unsafe impl Sync for Pointer {}

impl std::fmt::Debug for HostLoad {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostLoad").finish_non_exhaustive()
    }
}

impl HostLoad {
    fn with<T>(&self, f: impl FnOnce(*const c_void) -> Result<T>) -> Result<T> {
        let load = self.load.read().unwrap_or_else(PoisonError::into_inner);
        f(load.ok_or_else(|| Error::Invalid("the load that this belongs to is over".into()))?.0)
    }

    fn close(&self) {
        *self.load.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Goes on with another load of the host's, for what was kept of the first one.
    fn open(&self, load: *const c_void) {
        *self.load.write().unwrap_or_else(PoisonError::into_inner) = Some(Pointer(load));
    }

    pub(crate) fn advance(&self, bytes: u64) -> Result<()> {
        self.with(|load| {
            // SAFETY: the load is under way.
            match unsafe { (self.host.advance)(load, bytes) } {
                abi::DONE => Ok(()),
                _ => Err(Error::Cancelled),
            }
        })
    }

    /// Zeroed memory on the node of a share, and why it is not bound to it.
    pub(crate) fn alloc(&self, share: usize, len: usize) -> Result<(HostArea, Option<String>)> {
        let mut area = abi::Area { bytes: std::ptr::null_mut(), handle: std::ptr::null_mut(), bound: true };
        self.with(|load| {
            // SAFETY: the load is under way; the rest points to locals.
            ask(|message| unsafe { (self.host.alloc)(load, share, len, &mut area, message) })
        })?;
        let unbound = (!area.bound).then(|| "the host could not bind it".into());
        Ok((HostArea { host: self.host, area, len }, unbound))
    }

    /// Calls `f` with the load and a place for a matrix, which it then owns.
    fn matrix(&self, expert: usize, proj: Proj) -> Result<Matrix> {
        let mut view = std::mem::MaybeUninit::<abi::Matrix>::uninit();
        self.with(|load| {
            // SAFETY: the load is under way; the rest points to locals.
            ask(|message| unsafe { (self.host.matrix)(load, expert, proj.index() as u32, view.as_mut_ptr(), message) })
        })?;
        // SAFETY: the host has written it, and gave its handle away.
        unsafe { matrix_of(self.host, &view.assume_init()) }
    }
}

/// Memory that the host has allocated.
pub(crate) struct HostArea {
    host: Host,
    area: abi::Area,
    len: usize,
}

// SAFETY: memory that this value alone owns, and a handle that may be given back from any thread.
unsafe impl Send for HostArea {}
// SAFETY: shared references only read.
unsafe impl Sync for HostArea {}

impl HostArea {
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the host gave `len` zeroed bytes for this value alone, until it gives them back.
        unsafe { std::slice::from_raw_parts_mut(self.area.bytes, self.len) }
    }
}

impl AsRef<[u8]> for HostArea {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: as in `bytes_mut`.
        unsafe { std::slice::from_raw_parts(self.area.bytes, self.len) }
    }
}

impl Drop for HostArea {
    fn drop(&mut self) {
        // SAFETY: the handle came from this host and is given back once.
        unsafe { (self.host.free)(self.area.handle) }
    }
}

/// A team of the host's, kept.
pub(crate) struct HostTeam {
    host: Host,
    team: Pointer,
}

impl HostTeam {
    /// # Safety
    /// - `team` is a live one of this host.
    unsafe fn keep(host: Host, team: *const c_void) -> Self {
        // SAFETY: promised by the caller.
        unsafe { (host.team_keep)(team) };
        HostTeam { host, team: Pointer(team) }
    }

    /// Enters a region of the host's, if it has one to give.
    pub(crate) fn region(&self) -> Option<HostRegion<'_>> {
        // SAFETY: the team is kept.
        let region = unsafe { (self.host.region_begin)(self.team.0) };
        (!region.is_null()).then_some(HostRegion { host: self.host, region, _team: PhantomData })
    }

    /// Has a thread of the host's call `job` later; or says that there is none.
    pub(crate) fn spawn(&self, job: Box<dyn FnOnce() + Send>) -> bool {
        unsafe extern "C" fn call(ctx: *mut c_void) {
            // SAFETY: made by `Box::into_raw` below, and called once.
            let job = unsafe { Box::from_raw(ctx.cast::<Box<dyn FnOnce() + Send>>()) };
            // Jobs catch their own panics; this is for those of drops.
            if let Err(payload) = catch_unwind(AssertUnwindSafe(job)) {
                std::mem::forget(payload);
            }
        }
        let ctx = Box::into_raw(Box::new(job));
        // SAFETY: the team is kept, and `call` takes what `ctx` points to.
        if unsafe { (self.host.spawn)(self.team.0, call, ctx.cast()) } == abi::DONE {
            return true;
        }
        // SAFETY: the host said that it will never call.
        drop(unsafe { Box::from_raw(ctx) });
        false
    }
}

impl Drop for HostTeam {
    fn drop(&mut self) {
        // SAFETY: kept once, dropped once.
        unsafe { (self.host.team_drop)(self.team.0) }
    }
}

/// A region of the host's.
pub(crate) struct HostRegion<'a> {
    host: Host,
    /// Not `Send`: it ends on the thread that began it.
    region: *mut c_void,
    _team: PhantomData<&'a HostTeam>,
}

thread_local! {
    /// What kernels keep between products, on the host's threads.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Calls `f` with this thread's scratch.
fn with_scratch(f: impl FnOnce(&mut Scratch)) {
    let mut f = Some(f);
    let mut call = |scratch: &mut Scratch| {
        if let Some(f) = f.take() {
            f(scratch);
        }
    };
    let kept = SCRATCH.try_with(|s| match s.try_borrow_mut() {
        Ok(mut scratch) => call(&mut scratch),
        Err(_) => call(&mut Scratch::default()),
    });
    // The thread is ending.
    if kept.is_err() {
        call(&mut Scratch::default());
    }
}

impl HostRegion<'_> {
    /// Runs `body(lane, 0..tasks[lane])` for every lane.
    ///
    /// # Panics
    /// With the payload of the first task that panicked.
    pub(crate) fn run(&mut self, tasks: &[usize], at_home: bool, body: &Body<'_>) {
        struct Call<'a> {
            body: &'a Body<'a>,
            panic: Mutex<Option<Box<dyn Any + Send>>>,
        }
        unsafe extern "C" fn run(ctx: *const c_void, lane: usize, task: usize) -> u32 {
            // SAFETY: the host calls only during `region_run`, for whose length `call` below lives; it is Sync but for the payload, which
            // has a lock.
            let call = unsafe { &*ctx.cast::<Call<'_>>() };
            match catch_unwind(AssertUnwindSafe(|| with_scratch(|scratch| (call.body)(lane, task, scratch)))) {
                Ok(()) => 0,
                Err(payload) => {
                    keep_first(&mut call.panic.lock().unwrap_or_else(PoisonError::into_inner), payload);
                    1
                }
            }
        }
        let call = Call { body, panic: Mutex::new(None) };
        let ctx = (&raw const call).cast();
        // SAFETY: the region is begun and not ended, tasks and context outlive the call.
        let code = unsafe { (self.host.region_run)(self.region, tasks.as_ptr(), tasks.len(), at_home, run, ctx) };
        if let Some(payload) = call.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(payload);
        }
        assert!(code == abi::DONE, "the host did not run all tasks of a region");
    }
}

impl Drop for HostRegion<'_> {
    fn drop(&mut self) {
        // SAFETY: begun on this thread (the type is not Send), and ended once.
        unsafe { (self.host.region_end)(self.region) }
    }
}

/// Bytes that the host keeps as long as a matrix's handle lives.
struct Borrowed {
    bytes: *const u8,
    len: usize,
    _handle: Arc<MatrixHandle>,
}

// SAFETY: bytes that nobody writes, and a handle that may be given back from any thread.
unsafe impl Send for Borrowed {}

impl AsRef<[u8]> for Borrowed {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the host keeps them until the handle is given back, and writes them no more.
        unsafe { slice(self.bytes, self.len) }
    }
}

struct MatrixHandle {
    host: Host,
    handle: *mut c_void,
}

// SAFETY: the host takes a handle back from any thread.
unsafe impl Send for MatrixHandle {}
// SAFETY: it is used when it is dropped only.
unsafe impl Sync for MatrixHandle {}

impl Drop for MatrixHandle {
    fn drop(&mut self) {
        // SAFETY: given by this host, and given back once.
        unsafe { (self.host.matrix_drop)(self.handle) }
    }
}

/// What `pointer` points to; nothing where there is nothing.
///
/// # Safety
/// - A pointer that is not null is one to `len` values, which nobody writes during `'a`.
unsafe fn slice<'a, T>(pointer: *const T, len: usize) -> &'a [T] {
    if pointer.is_null() || len == 0 {
        return &[];
    }
    // SAFETY: promised by the caller.
    unsafe { std::slice::from_raw_parts(pointer, len) }
}

/// A matrix of the host's, in place: its handle goes back when the last clone is dropped.
///
/// # Safety
/// - The view is one of this host's, whose handle is given away.
unsafe fn matrix_of(host: Host, view: &abi::Matrix) -> Result<Matrix> {
    let handle = Arc::new(MatrixHandle { host, handle: view.handle });
    let bytes = |bytes: *const u8, len: usize| match len {
        0 => Bytes::new(),
        _ => Bytes::from_owner(Borrowed { bytes, len, _handle: handle.clone() }),
    };
    // SAFETY: names and numbers are valid as long as the handle.
    let (format, kind, zeros, groups) = unsafe {
        (
            wire::text(view.format)?,
            (!view.scales.is_null()).then(|| wire::text(view.scale_type)).transpose()?,
            slice(view.zeros, view.zeros_len),
            slice(view.column_groups, view.cols),
        )
    };
    let global = if view.global_over { Global::Over(view.global) } else { Global::Times(view.global) };
    let scales = kind.map(wire::scale_type_of).transpose()?.map(|kind| Scales {
        bytes: bytes(view.scales, view.scales_len),
        kind,
        cols: view.scale_cols,
        stride: view.scale_stride,
        global,
    });
    let parts = Parts {
        format: format.parse()?,
        rows: view.rows,
        cols: view.cols,
        codes: bytes(view.codes, view.codes_len),
        stride: view.stride,
        scales,
        zeros: (!view.zeros.is_null()).then(|| ZeroPoints { values: zeros.into(), first: 0, stride: view.zero_stride }),
        column_groups: (!view.column_groups.is_null()).then(|| groups.into()),
    };
    parts.matrix().map_err(Error::Invalid)
}

/// The host's checkpoint, as far as one load may see it.
struct HostSource {
    load: Arc<HostLoad>,
    layer: LayerSpec,
    experts: Vec<u32>,
    path: PathBuf,
    metadata: Metadata,
}

impl HostSource {
    fn new(load: &Arc<HostLoad>, layer: &LayerSpec, experts: Vec<u32>) -> Self {
        HostSource {
            load: load.clone(),
            layer: layer.clone(),
            experts,
            path: "(the host's checkpoint)".into(),
            metadata: Metadata::HuggingFace(serde_json::Value::Null),
        }
    }

    /// The place of an expert in the list that is loaded.
    fn place(&self, expert: usize) -> Result<usize> {
        let place = self.experts.iter().position(|&e| e as usize == expert);
        place.ok_or_else(|| Error::Invalid(format!("expert {expert} is not among those that are loaded")))
    }
}

impl WeightSource for HostSource {
    fn path(&self) -> &Path {
        &self.path
    }

    fn layers(&self) -> &[LayerSpec] {
        std::slice::from_ref(&self.layer)
    }

    fn matrix(&self, _layer: usize, expert: usize, proj: Proj) -> Result<Matrix> {
        self.load.matrix(self.place(expert)?, proj)
    }

    fn bias(&self, _layer: usize, expert: usize, proj: Proj) -> Result<Option<Vec<f32>>> {
        let expert = self.place(expert)?;
        let mut bias = vec![0.0; self.layer.shape(proj).0];
        let mut given = false;
        self.load.with(|load| {
            let (out, len) = (bias.as_mut_ptr(), bias.len());
            // SAFETY: the load is under way; the rest points to locals.
            ask(|message| unsafe {
                (self.load.host.bias)(load, expert, proj.index() as u32, out, len, &mut given, message)
            })
        })?;
        Ok(given.then_some(bias))
    }

    fn tensor_name(&self, layer: usize, expert: usize, proj: Proj) -> (PathBuf, String) {
        let (mut file, mut name) = (abi::Message::EMPTY, abi::Message::EMPTY);
        let told = self.place(expert).and_then(|expert| {
            self.load.with(|load| {
                // SAFETY: the load is under way; the rest points to locals.
                unsafe {
                    (self.load.host.tensor_name)(load, expert, proj.index() as u32, &mut file, &mut name);
                }
                Ok(())
            })
        });
        match (told, file.get(), name.get()) {
            (Ok(()), Some(file), Some(name)) => (file.into(), name.into()),
            _ => (self.path.clone(), format!("layer {layer}, expert {expert}, {}", proj.name())),
        }
    }

    fn release(&self, _layer: usize, expert: usize) {
        let _ = self.place(expert).and_then(|expert| {
            self.load.with(|load| {
                // SAFETY: the load is under way.
                unsafe { (self.load.host.release)(load, expert) };
                Ok(())
            })
        });
    }

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn routing(&self, _layer: usize) -> Option<Routing> {
        None
    }

    fn tensors(&self) -> Vec<String> {
        Vec::new()
    }

    fn tensor(&self, name: &str) -> Result<Matrix> {
        Err(Error::Invalid(format!("a plugin sees experts only, not `{name}`")))
    }

    fn dense_bytes(&self) -> u64 {
        0
    }
}

/// What the handle of a backend points to.
struct Guest {
    host: Host,
    backend: Arc<dyn Backend>,
    /// The host's teams in use: their buffers are shared by all banks.
    teams: Mutex<Vec<(Pointer, Weak<Team>)>>,
}

impl Guest {
    /// What a load may use.
    ///
    /// # Safety
    /// - The context is one of the host's, of a call that is under way.
    unsafe fn context(&self, context: &abi::Context, replaceable: bool) -> (LoadContext, Arc<HostLoad>) {
        let load = Arc::new(HostLoad { host: self.host, load: RwLock::new(Some(Pointer(context.load))) });
        let mut teams = self.teams.lock().unwrap_or_else(PoisonError::into_inner);
        teams.retain(|(_, team)| team.strong_count() > 0);
        let known = teams.iter().find(|(at, _)| at.0 == context.team).and_then(|(_, team)| team.upgrade());
        let team = known.unwrap_or_else(|| {
            // SAFETY: promised by the caller.
            let (shares, host) =
                unsafe { (slice(context.shares, context.shares_len), HostTeam::keep(self.host, context.team)) };
            let share = |s: &abi::Share| Share { node: s.node, threads: s.threads, cpus: Vec::new() };
            static HERE: OnceLock<Topology> = OnceLock::new();
            let here = HERE.get_or_init(Topology::detect).clone();
            let team = Arc::new(Team::of_host(host, here, shares.iter().map(share).collect()));
            teams.push((Pointer(context.team), Arc::downgrade(&team)));
            team
        });
        let progress = Arc::new(Progress::of_host(load.clone()));
        (LoadContext { team, progress, huge_pages: HugePages::default(), cache: None, replaceable }, load)
    }
}

struct GuestBank {
    bank: Box<dyn ExpertBank>,
    layer: LayerSpec,
    /// What the bank was loaded by, and loads others by: one at a time.
    load: Mutex<Arc<HostLoad>>,
}

struct GuestPending {
    pending: Pending<Work>,
}

struct GuestLinear {
    op: Box<dyn LinearOp>,
}

/// Work of the host's, copied: it outlives the call.
///
/// # Safety
/// - The work is one of the host's, of a call that is under way.
unsafe fn work_of(work: &abi::Work) -> Work {
    let len = work.tokens * work.hidden;
    // SAFETY: promised by the caller; a row is the same on both sides.
    let (rows, experts, output) = unsafe {
        (
            slice(work.rows.cast::<Row>(), work.rows_len),
            slice(work.experts, work.experts_len),
            slice(work.output.cast_const(), len),
        )
    };
    let input = match work.bf16 {
        // SAFETY: as above.
        true => Hidden::Bf16(unsafe { slice(work.input.cast(), len) }.to_vec()),
        // SAFETY: as above.
        false => Hidden::F32(unsafe { slice(work.input.cast(), len) }.to_vec()),
    };
    Work {
        input: Arc::new(input),
        first: 0,
        tokens: work.tokens,
        hidden: work.hidden,
        rows: rows.to_vec(),
        experts: experts.iter().map(|e| ExpertRows { local: e.local, rows: e.start..e.end }).collect(),
        output: output.to_vec(),
        spent: Default::default(),
    }
}

/// Gives the output of finished work to the host.
///
/// # Safety
/// - `output` points to `len` numbers, and `spent` to a place for its type, or to nothing.
unsafe fn give(work: &Work, output: *mut f32, len: usize, spent: *mut abi::Spent) -> Result<()> {
    if work.output.len() != len {
        return Err(Error::Length { what: "output [tokens, hidden]", expected: len, got: work.output.len() });
    }
    if len > 0 {
        // SAFETY: promised by the caller.
        unsafe { std::slice::from_raw_parts_mut(output, len) }.copy_from_slice(&work.output);
    }
    if !spent.is_null() {
        // SAFETY: promised by the caller.
        unsafe { *spent = wire::spent(work.spent) };
    }
    Ok(())
}

/// Makes a backend for the host.
///
/// # Safety
/// - The pointers are as [`abi::Table::backend_new`] says.
#[doc(hidden)]
pub unsafe fn new_backend<B: Backend + 'static>(
    name: &str,
    constructor: fn(Tier) -> Result<B, Unsupported>,
    host: *const abi::Host,
    cap: abi::Text,
    backend: *mut abi::Backend,
    message: *mut abi::Message,
) -> u32 {
    // SAFETY: promised by the caller. A host's table is valid for ever, and its size is its first field in all versions.
    unsafe {
        answer(message, || {
            let bytes = *host.cast::<u64>();
            if bytes < size_of::<abi::Host>() as u64 {
                let wanted = size_of::<abi::Host>();
                return Err(Error::Invalid(format!("the host's table has {bytes} bytes, the plugin needs {wanted}")));
            }
            let host: Host = &*host;
            log::to(host);
            let made = constructor(wire::text(cap)?.parse()?)?;
            if made.name() != name {
                return Err(Error::Invalid(format!("it is declared as `{name}` and calls itself `{}`", made.name())));
            }
            *backend = boxed(Guest { host, backend: Arc::new(made), teams: Mutex::default() });
            Ok(())
        })
    }
}

fn boxed<T>(value: T) -> *mut c_void {
    Box::into_raw(Box::new(value)).cast()
}

/// The table of a backend that `new` makes.
#[doc(hidden)]
pub const fn table(
    new: unsafe extern "C" fn(*const abi::Host, abi::Text, *mut abi::Backend, *mut abi::Message) -> u32,
) -> abi::Table {
    abi::Table {
        backend_new: Some(new),
        backend_drop: Some(backend_drop),
        probe: Some(probe),
        load: Some(load),
        bank_run: Some(bank_run),
        bank_submit: Some(bank_submit),
        pending_wait: Some(pending_wait),
        pending_drop: Some(pending_drop),
        bank_drop: Some(bank_drop),
        probe_linear: Some(probe_linear),
        linear: Some(linear),
        linear_forward: Some(linear_forward),
        linear_drop: Some(linear_drop),
        device: Some(device),
        load_replaceable: Some(load_replaceable),
        bank_replace: Some(bank_replace),
        probe_stream: Some(probe_stream),
        stream: Some(stream),
        in_place: Some(in_place),
        invariant: Some(invariant),
    }
}

/// The names of those that are true, with spaces between.
#[doc(hidden)]
pub const fn compiled_for(features: &[(&str, bool)]) -> abi::Message {
    let mut words = abi::Message::EMPTY;
    let (mut i, mut at) = (0, 0);
    while i < features.len() {
        let (name, on) = (features[i].0.as_bytes(), features[i].1);
        if on {
            if at > 0 {
                words.bytes[at] = b' ';
                at += 1;
            }
            let mut j = 0;
            while j < name.len() {
                words.bytes[at] = name[j];
                at += 1;
                j += 1;
            }
        }
        i += 1;
    }
    words.len = at as u32;
    words
}

// The functions of the table. SAFETY of all blocks in them: the host keeps to what the table says of pointers and handles, and handles were
// made by `boxed` with the type they are read as.

unsafe extern "C" fn backend_drop(backend: abi::Backend, message: *mut abi::Message) -> u32 {
    // SAFETY: see above.
    unsafe {
        answer(message, || {
            drop(Box::from_raw(backend.cast::<Guest>()));
            Ok(())
        })
    }
}

unsafe extern "C" fn probe(
    backend: abi::Backend,
    layer: *const abi::Layer,
    fit: *mut abi::Fit,
    message: *mut abi::Message,
) -> u32 {
    // SAFETY: see above.
    unsafe {
        answer(message, || {
            let guest = &*backend.cast::<Guest>();
            fit.write(wire::fit(&guest.backend.probe(&wire::layer_of(&*layer)?)?));
            Ok(())
        })
    }
}

/// Closes a load when it is over, however it ends.
struct Close(Arc<HostLoad>);

impl Drop for Close {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Guest {
    /// # Safety
    /// - The context is one of the host's, of a call that is under way.
    unsafe fn load(
        &self,
        context: &abi::Context,
        layer: LayerSpec,
        experts: &[u32],
        replaceable: bool,
    ) -> Result<abi::Packed> {
        // SAFETY: promised by the caller.
        let (context, load) = unsafe { self.context(context, replaceable) };
        let close = Close(load);
        let from = HostSource::new(&close.0, &layer, experts.to_vec());
        let bank = self.backend.load(&layer, experts, &from, &context)?;
        let bytes = bank.packed_bytes();
        let bank = GuestBank { bank, layer, load: Mutex::new(close.0.clone()) };
        Ok(abi::Packed { handle: boxed(bank), bytes })
    }
}

unsafe extern "C" fn load(
    backend: abi::Backend,
    context: *const abi::Context,
    layer: *const abi::Layer,
    experts: *const u32,
    count: usize,
    packed: *mut abi::Packed,
    message: *mut abi::Message,
) -> u32 {
    // SAFETY: see above.
    unsafe {
        answer(message, || {
            let guest = &*backend.cast::<Guest>();
            *packed = guest.load(&*context, wire::layer_of(&*layer)?, slice(experts, count), false)?;
            Ok(())
        })
    }
}

unsafe extern "C" fn load_replaceable(
    backend: abi::Backend,
    context: *const abi::Context,
    layer: *const abi::Layer,
    experts: *const u32,
    count: usize,
    packed: *mut abi::Packed,
    message: *mut abi::Message,
) -> u32 {
    // SAFETY: see above.
    unsafe {
        answer(message, || {
            let guest = &*backend.cast::<Guest>();
            *packed = guest.load(&*context, wire::layer_of(&*layer)?, slice(experts, count), true)?;
            Ok(())
        })
    }
}

unsafe extern "C" fn in_place(backend: abi::Backend, made: *mut abi::Backend, message: *mut abi::Message) -> u32 {
    // SAFETY: see above.
    unsafe { another(backend, made, message, |backend| backend.in_place()) }
}

unsafe extern "C" fn invariant(backend: abi::Backend, made: *mut abi::Backend, message: *mut abi::Message) -> u32 {
    // SAFETY: see above.
    unsafe { another(backend, made, message, |backend| backend.invariant()) }
}

/// Makes a backend of another one.
///
/// # Safety
/// As that of the entries.
unsafe fn another(
    backend: abi::Backend,
    made: *mut abi::Backend,
    message: *mut abi::Message,
    of: fn(&dyn Backend) -> Option<Arc<dyn Backend>>,
) -> u32 {
    // SAFETY: see above.
    unsafe {
        answer(message, || {
            let guest = &*backend.cast::<Guest>();
            made.write(match of(&*guest.backend) {
                Some(backend) => boxed(Guest { host: guest.host, backend, teams: Mutex::default() }),
                None => std::ptr::null_mut(),
            });
            Ok(())
        })
    }
}

unsafe extern "C" fn device(
    backend: abi::Backend,
    device: *mut abi::Device,
    given: *mut bool,
    message: *mut abi::Message,
) -> u32 {
    // SAFETY: see above.
    unsafe {
        answer(message, || {
            let told = (*backend.cast::<Guest>()).backend.device();
            given.write(told.is_some());
            if let Some(told) = &told {
                device.write(wire::device(told));
            }
            Ok(())
        })
    }
}

unsafe extern "C" fn bank_replace(
    bank: abi::Bank,
    load: *const c_void,
    local: u32,
    expert: u32,
    message: *mut abi::Message,
) -> u32 {
    // SAFETY: see above.
    unsafe {
        answer(message, || {
            let bank = &*bank.cast::<GuestBank>();
            let kept = bank.load.lock().unwrap_or_else(PoisonError::into_inner);
            kept.open(load);
            let close = Close(kept.clone());
            bank.bank.replace(local, expert, &HostSource::new(&close.0, &bank.layer, vec![expert]))
        })
    }
}

unsafe extern "C" fn probe_stream(
    backend: abi::Backend,
    layer: *const abi::Layer,
    streaming: *mut abi::Streaming,
    message: *mut abi::Message,
) -> u32 {
    // SAFETY: see above.
    unsafe {
        answer(message, || {
            let guest = &*backend.cast::<Guest>();
            streaming.write(wire::streaming(guest.backend.probe_stream(&wire::layer_of(&*layer)?)?));
            Ok(())
        })
    }
}

unsafe extern "C" fn stream(
    backend: abi::Backend,
    load: *const c_void,
    layer: *const abi::Layer,
    work: *const abi::Work,
    message: *mut abi::Message,
) -> u32 {
    // SAFETY: see above.
    unsafe {
        answer(message, || {
            let (guest, layer, work) = (&*backend.cast::<Guest>(), wire::layer_of(&*layer)?, &*work);
            let close = Close(Arc::new(HostLoad { host: guest.host, load: RwLock::new(Some(Pointer(load))) }));
            let all = (0..layer.experts as u32).collect();
            let from: Arc<dyn WeightSource> = Arc::new(HostSource::new(&close.0, &layer, all));
            let done = guest.backend.stream(&layer, &from, work_of(work)).wait()?;
            give(&done, work.output, work.tokens * work.hidden, work.spent)
        })
    }
}

unsafe extern "C" fn bank_run(bank: abi::Bank, work: *const abi::Work, message: *mut abi::Message) -> u32 {
    // SAFETY: see above.
    unsafe {
        answer(message, || {
            let (bank, work) = (&*bank.cast::<GuestBank>(), &*work);
            let done = bank.bank.run(work_of(work))?;
            give(&done, work.output, work.tokens * work.hidden, work.spent)
        })
    }
}

unsafe extern "C" fn bank_submit(
    bank: abi::Bank,
    work: *const abi::Work,
    pending: *mut abi::Pending,
    message: *mut abi::Message,
) -> u32 {
    // SAFETY: see above.
    unsafe {
        answer(message, || {
            let bank = &*bank.cast::<GuestBank>();
            *pending = boxed(GuestPending { pending: bank.bank.submit(work_of(&*work)) });
            Ok(())
        })
    }
}

unsafe extern "C" fn pending_wait(
    pending: abi::Pending,
    output: *mut f32,
    len: usize,
    spent: *mut abi::Spent,
    message: *mut abi::Message,
) -> u32 {
    // SAFETY: see above.
    unsafe {
        answer(message, || {
            let pending = Box::from_raw(pending.cast::<GuestPending>());
            give(&pending.pending.wait()?, output, len, spent)
        })
    }
}

unsafe extern "C" fn pending_drop(pending: abi::Pending, message: *mut abi::Message) -> u32 {
    // SAFETY: see above.
    unsafe {
        answer(message, || {
            drop(Box::from_raw(pending.cast::<GuestPending>()));
            Ok(())
        })
    }
}

unsafe extern "C" fn bank_drop(bank: abi::Bank, message: *mut abi::Message) -> u32 {
    // SAFETY: see above.
    unsafe {
        answer(message, || {
            drop(Box::from_raw(bank.cast::<GuestBank>()));
            Ok(())
        })
    }
}

unsafe extern "C" fn probe_linear(
    backend: abi::Backend,
    format: abi::Text,
    rows: usize,
    cols: usize,
    fit: *mut abi::Fit,
    message: *mut abi::Message,
) -> u32 {
    // SAFETY: see above.
    unsafe {
        answer(message, || {
            let guest = &*backend.cast::<Guest>();
            fit.write(wire::fit(&guest.backend.probe_linear(wire::text(format)?.parse()?, rows, cols)?));
            Ok(())
        })
    }
}

unsafe extern "C" fn linear(
    backend: abi::Backend,
    context: *const abi::Context,
    matrix: *const abi::Matrix,
    packed: *mut abi::Packed,
    message: *mut abi::Message,
) -> u32 {
    // SAFETY: see above.
    unsafe {
        answer(message, || {
            let guest = &*backend.cast::<Guest>();
            let matrix = matrix_of(guest.host, &*matrix)?;
            let (context, load) = guest.context(&*context, false);
            let _close = Close(load);
            let op = guest.backend.linear(&matrix, &context)?;
            if (op.rows(), op.cols()) != (matrix.rows(), matrix.cols()) {
                return Err(Error::Invalid(format!("it packed {} rows, {} columns", op.rows(), op.cols())));
            }
            let bytes = op.packed_bytes();
            *packed = abi::Packed { handle: boxed(GuestLinear { op }), bytes };
            Ok(())
        })
    }
}

unsafe extern "C" fn linear_forward(
    linear: abi::Linear,
    x: *const f32,
    x_len: usize,
    y: *mut f32,
    y_len: usize,
    message: *mut abi::Message,
) -> u32 {
    // SAFETY: see above; `y` is not read before it is written by anybody else during the call.
    unsafe {
        answer(message, || {
            let y = if y_len == 0 { &mut [] } else { std::slice::from_raw_parts_mut(y, y_len) };
            (*linear.cast::<GuestLinear>()).op.forward(slice(x, x_len), y);
            Ok(())
        })
    }
}

unsafe extern "C" fn linear_drop(linear: abi::Linear, message: *mut abi::Message) -> u32 {
    // SAFETY: see above.
    unsafe {
        answer(message, || {
            drop(Box::from_raw(linear.cast::<GuestLinear>()));
            Ok(())
        })
    }
}

/// Events of this library, written to the host's log: a plugin has a `tracing` of its own, which nobody listens to.
mod log {
    use std::fmt::Write;

    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Level, Metadata, Subscriber};

    use super::{Host, abi};

    struct ToHost(Host);

    /// Sends events there from now on, unless this library has a listener.
    pub fn to(host: Host) {
        let _ = tracing::subscriber::set_global_default(ToHost(host));
    }

    struct Line(String);

    impl Visit for Line {
        fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
            let space = if self.0.is_empty() { "" } else { " " };
            // Writing to a string does not fail.
            let _ = match field.name() {
                "message" => write!(self.0, "{space}{value:?}"),
                name => write!(self.0, "{space}{name}={value:?}"),
            };
        }
    }

    impl Subscriber for ToHost {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.is_event() && *metadata.level() <= Level::INFO
        }

        fn event(&self, event: &Event<'_>) {
            let mut line = Line(String::new());
            event.record(&mut line);
            let level = match *event.metadata().level() {
                Level::ERROR => 1,
                Level::WARN => 2,
                _ => 3,
            };
            // SAFETY: the text is borrowed for the call.
            unsafe { (self.0.log)(level, abi::Text::new(&line.0)) }
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }
}
