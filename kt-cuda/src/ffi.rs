//! The functions of `libcuda` and `libnvrtc`, behind safe ones that own what they handle: the only foreign functions of this crate.
//!
//! A table of its own and not a binding crate, for three reasons: a driver without one of these functions must be a reason and not a panic at the first
//! call; an application may name the library; and tests run several drivers in one process.

#![allow(unsafe_code)] // FFI

use std::cell::Cell;
use std::error::Error as _;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::{Arc, OnceLock};

/// A `CUresult` or `nvrtcResult`.
type Code = c_int;
/// Context, stream, module, function.
type Handle = *mut c_void;

/// Errors after which a context can do nothing more: illegal address, hardware exceptions, launch failure, and what is not known.
const FATAL: [Code; 10] = [214, 700, 714, 715, 716, 717, 718, 719, 720, 999];

macro_rules! table {
    ($(#[$doc:meta])* $table:ident { $($name:ident: $symbol:literal ($($arg:ty),*);)* }) => {
        $(#[$doc])*
        struct $table {
            $($name: unsafe extern "C" fn($($arg),*) -> Code,)*
        }

        impl $table {
            fn of(library: &'static libloading::Library) -> Result<Self, String> {
                let mut missing = Vec::new();
                $(
                    // SAFETY: the type of the function of this name, by the documentation of the driver API and of NVRTC. The library is never closed.
                    let $name = unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> Code>($symbol) };
                    let $name = $name.map(|f| *f).map_err(|_| missing.push($symbol));
                )*
                match ($($name,)*) {
                    ($(Ok($name),)*) => Ok($table { $($name),* }),
                    _ => Err(format!("has no {}", missing.join(", "))),
                }
            }
        }
    };
}

table! {
    /// What is used of the driver: all of it is there since CUDA 11.0.
    Cuda {
        init: "cuInit" (c_uint);
        driver_version: "cuDriverGetVersion" (*mut c_int);
        device_count: "cuDeviceGetCount" (*mut c_int);
        device: "cuDeviceGet" (*mut c_int, c_int);
        device_name: "cuDeviceGetName" (*mut c_char, c_int, c_int);
        device_attribute: "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
        retain: "cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
        release: "cuDevicePrimaryCtxRelease_v2" (c_int);
        push: "cuCtxPushCurrent_v2" (Handle);
        pop: "cuCtxPopCurrent_v2" (*mut Handle);
        memory: "cuMemGetInfo_v2" (*mut usize, *mut usize);
        alloc: "cuMemAlloc_v2" (*mut u64, usize);
        free: "cuMemFree_v2" (u64);
        alloc_host: "cuMemAllocHost_v2" (*mut *mut c_void, usize);
        free_host: "cuMemFreeHost" (*mut c_void);
        to_device: "cuMemcpyHtoDAsync_v2" (u64, *const c_void, usize, Handle);
        to_host: "cuMemcpyDtoHAsync_v2" (*mut c_void, u64, usize, Handle);
        stream_create: "cuStreamCreate" (*mut Handle, c_uint);
        stream_destroy: "cuStreamDestroy_v2" (Handle);
        stream_wait: "cuStreamSynchronize" (Handle);
        host_function: "cuLaunchHostFunc" (Handle, extern "C" fn(*mut c_void), *mut c_void);
        context_wait: "cuCtxSynchronize" ();
        module_load: "cuModuleLoadData" (*mut Handle, *const c_void);
        module_unload: "cuModuleUnload" (Handle);
        module_function: "cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
        launch: "cuLaunchKernel" (Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void);
        error_name: "cuGetErrorName" (Code, *mut *const c_char);
        error_string: "cuGetErrorString" (Code, *mut *const c_char);
    }
}

table! {
    /// What is used of NVRTC: all of it is there since CUDA 11.2.
    Rtc {
        version: "nvrtcVersion" (*mut c_int, *mut c_int);
        arch_count: "nvrtcGetNumSupportedArchs" (*mut c_int);
        archs: "nvrtcGetSupportedArchs" (*mut c_int);
        create: "nvrtcCreateProgram" (*mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
        destroy: "nvrtcDestroyProgram" (*mut Handle);
        compile: "nvrtcCompileProgram" (Handle, c_int, *const *const c_char);
        log_size: "nvrtcGetProgramLogSize" (Handle, *mut usize);
        log: "nvrtcGetProgramLog" (Handle, *mut c_char);
        ptx_size: "nvrtcGetPTXSize" (Handle, *mut usize);
        ptx: "nvrtcGetPTX" (Handle, *mut c_char);
        cubin_size: "nvrtcGetCUBINSize" (Handle, *mut usize);
        cubin: "nvrtcGetCUBIN" (Handle, *mut c_char);
    }
}

/// Opens a library for good: drivers keep threads of their own.
fn open(name: &OsStr) -> Result<&'static libloading::Library, String> {
    // SAFETY: the driver's and NVRTC's initialisers depend on nothing; another library of that name is the user's choice, as with any program.
    let library = unsafe { libloading::Library::new(name) }.map_err(|e| {
        let mut words = e.to_string();
        let mut cause = e.source();
        while let Some(e) = cause {
            words = format!("{words}: {e}");
            cause = e.source();
        }
        words
    })?;
    Ok(Box::leak(Box::new(library)))
}

/// Opens the first library of these names.
fn open_any(names: &[&OsStr]) -> Result<(String, &'static libloading::Library), String> {
    let mut tried = Vec::new();
    for name in names {
        match open(name) {
            Ok(library) => return Ok((name.display().to_string(), library)),
            Err(why) => tried.push(format!("{}: {why}", name.display())),
        }
    }
    Err(tried.join("; "))
}

/// A driver that was opened and initialised.
pub(crate) struct Driver {
    cuda: Cuda,
    /// 1000 times the major version of CUDA it knows, and 10 times the minor one.
    version: i32,
}

impl Driver {
    /// Opens the library of the first of these names that is there, and initialises it.
    ///
    /// # Errors
    /// The linker's words, symbols that are missing, or what the driver says.
    pub fn open(names: &[&OsStr]) -> Result<Arc<Self>, String> {
        let (name, library) = open_any(names)?;
        let cuda = Cuda::of(library).map_err(|what| format!("{name} {what}"))?;
        let mut driver = Driver { cuda, version: 0 };
        // SAFETY: no other function was called before; the flags must be 0.
        let code = unsafe { (driver.cuda.init)(0) };
        driver.check(code, || format!("{name}: cuInit"))?;
        // SAFETY: writes one int.
        let code = unsafe { (driver.cuda.driver_version)(&mut driver.version) };
        driver.check(code, || format!("{name}: cuDriverGetVersion"))?;
        Ok(Arc::new(driver))
    }

    /// The version of CUDA that the driver knows: (12, 8).
    pub fn version(&self) -> (i32, i32) {
        (self.version / 1000, self.version % 1000 / 10)
    }

    /// How many devices there are.
    pub fn devices(&self) -> Result<usize, String> {
        let mut count = 0;
        // SAFETY: writes one int.
        let code = unsafe { (self.cuda.device_count)(&mut count) };
        self.check(code, || "cuDeviceGetCount".into())?;
        Ok(count.max(0) as usize)
    }

    /// `what: name (text, code)` of a code that is not success.
    fn check(&self, code: Code, what: impl FnOnce() -> String) -> Result<(), String> {
        if code == 0 { Ok(()) } else { Err(format!("{}: {}", what(), self.words(code))) }
    }

    fn words(&self, code: Code) -> String {
        let text = |f: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut p: *const c_char = ptr::null();
            // SAFETY: writes one pointer, to a text that lives as long as the library, or null.
            if unsafe { f(code, &mut p) } != 0 || p.is_null() {
                return None;
            }
            // SAFETY: the driver's texts end with a zero.
            Some(unsafe { CStr::from_ptr(p) }.to_string_lossy().into_owned())
        };
        match (text(self.cuda.error_string), text(self.cuda.error_name)) {
            (Some(string), Some(name)) => format!("{string} ({name})"),
            _ => format!("error {code}"),
        }
    }
}

/// The primary context of a device, which all users of the device in this process share.
pub(crate) struct Context {
    driver: Arc<Driver>,
    device: c_int,
    handle: Handle,
    /// The first error that the context does not recover from.
    lost: OnceLock<String>,
}

// SAFETY: contexts are made for use from any thread: each call makes it current to its own thread first.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks inside.
unsafe impl Sync for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `new`, and everything of it keeps it alive by an Arc.
        unsafe { (self.driver.cuda.release)(self.device) };
    }
}

impl Context {
    /// Device `ordinal`'s.
    pub fn new(driver: &Arc<Driver>, ordinal: usize) -> Result<Arc<Self>, String> {
        let (mut device, mut handle) = (0, ptr::null_mut());
        // SAFETY: writes one int.
        let code = unsafe { (driver.cuda.device)(&mut device, ordinal as c_int) };
        driver.check(code, || format!("device {ordinal}"))?;
        // SAFETY: a device that the driver gave; writes one handle.
        let code = unsafe { (driver.cuda.retain)(&mut handle, device) };
        driver.check(code, || format!("device {ordinal}: cuDevicePrimaryCtxRetain"))?;
        Ok(Arc::new(Context { driver: driver.clone(), device, handle, lost: OnceLock::new() }))
    }

    /// The device's name.
    pub fn name(&self) -> Result<String, String> {
        let mut name = [0u8; 128];
        // SAFETY: writes at most 128 bytes.
        let code =
            unsafe { (self.driver.cuda.device_name)(name.as_mut_ptr().cast(), name.len() as c_int, self.device) };
        self.driver.check(code, || "cuDeviceGetName".into())?;
        Ok(String::from_utf8_lossy(name.split(|&b| b == 0).next().unwrap_or_default()).into_owned())
    }

    /// `CUdevice_attribute` number `which`.
    pub fn attribute(&self, which: i32) -> Result<i32, String> {
        let mut v = 0;
        // SAFETY: writes one int.
        let code = unsafe { (self.driver.cuda.device_attribute)(&mut v, which, self.device) };
        self.driver.check(code, || format!("cuDeviceGetAttribute {which}"))?;
        Ok(v)
    }

    /// Runs `f` with this context current, and puts back what was.
    fn within(&self, what: impl Fn() -> String, f: impl FnOnce(&Cuda) -> Code) -> Result<(), String> {
        if let Some(lost) = self.lost.get() {
            return Err(format!("{}: not tried, as the device was lost by {lost}", what()));
        }
        let cuda = &self.driver.cuda;
        // SAFETY: a context that is retained.
        let pushed = unsafe { (cuda.push)(self.handle) };
        self.driver.check(pushed, &what)?;
        let code = f(cuda);
        let mut before = ptr::null_mut();
        // SAFETY: takes away what was pushed above.
        unsafe { (cuda.pop)(&mut before) };
        let result = self.driver.check(code, &what);
        if let (Err(why), true) = (&result, FATAL.contains(&code)) {
            let _ = self.lost.set(why.clone());
        }
        result
    }

    /// As [`Context::within`], for what is given back whether the device is lost or not.
    fn give_back(&self, f: impl FnOnce(&Cuda)) {
        let cuda = &self.driver.cuda;
        // SAFETY: a context that is retained.
        if unsafe { (cuda.push)(self.handle) } != 0 {
            // A lost context may refuse; the functions that free need no current one then, and fail without harm.
            return f(cuda);
        }
        f(cuda);
        let mut before = ptr::null_mut();
        // SAFETY: takes away what was pushed above.
        unsafe { (cuda.pop)(&mut before) };
    }

    /// Waits for all work of the device, on whichever stream.
    ///
    /// # Errors
    /// What the driver says: a stream is being captured, or the device is lost.
    pub fn wait(&self) -> Result<(), String> {
        // SAFETY: takes nothing.
        self.within(|| "waiting for the device".into(), |cuda| unsafe { (cuda.context_wait)() })
    }

    /// Whether it can do nothing more.
    pub fn is_lost(&self) -> bool {
        self.lost.get().is_some()
    }

    /// Whether both are of one device, by one driver.
    pub fn is_same(&self, other: &Context) -> bool {
        self.handle == other.handle
    }

    /// Bytes of the device's memory that are free, and of all.
    pub fn memory(&self) -> Result<(u64, u64), String> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        self.within(|| "cuMemGetInfo".into(), |cuda| unsafe { (cuda.memory)(&mut free, &mut total) })?;
        Ok((free as u64, total as u64))
    }
}

/// Memory of a device, freed when dropped; uninitialised.
pub(crate) struct Buffer {
    context: Arc<Context>,
    address: u64,
    bytes: usize,
}

impl Buffer {
    /// So many bytes, at least one, for what `what` says in errors.
    pub fn new(context: &Arc<Context>, bytes: usize, what: &str) -> Result<Self, String> {
        let (mut address, bytes) = (0, bytes.max(1));
        let said = || format!("{bytes} bytes of device memory for {what}");
        // SAFETY: writes one address.
        context.within(said, |cuda| unsafe { (cuda.alloc)(&mut address, bytes) })?;
        Ok(Buffer { context: context.clone(), address, bytes })
    }

    /// The address on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, and freed here only. The driver waits for work that uses it.
        self.context.give_back(|cuda| unsafe { _ = (cuda.free)(self.address) });
    }
}

/// Host memory that the device reads and writes by itself, freed when dropped. Zeroed, so that all of it may be looked at.
pub(crate) struct Pinned {
    context: Arc<Context>,
    at: *mut u8,
    bytes: usize,
    /// Whether the device may be using it: from the copy that names it to the stream's next wait.
    in_use: Cell<bool>,
}

// SAFETY: an allocation like any other.
unsafe impl Send for Pinned {}

impl Pinned {
    /// So many bytes, at least one.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, String> {
        let (mut at, bytes) = (ptr::null_mut(), bytes.max(1));
        let what = || format!("{bytes} bytes of pinned host memory");
        // SAFETY: writes one pointer.
        context.within(what, |cuda| unsafe { (cuda.alloc_host)(&mut at, bytes) })?;
        // SAFETY: `bytes` bytes that were just allocated.
        unsafe { ptr::write_bytes(at.cast::<u8>(), 0, bytes) };
        Ok(Pinned { context: context.clone(), at: at.cast(), bytes, in_use: Cell::new(false) })
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// The bytes, when the device has done with them.
    ///
    /// # Panics
    /// Before the wait that follows a copy: that is this crate's mistake, not the caller's.
    pub fn bytes(&mut self) -> &mut [u8] {
        assert!(!self.in_use.get(), "pinned memory is looked at while the device uses it");
        // SAFETY: initialised, of this length, and borrowed from self; the device does not use it.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, and freed here only. The driver waits for copies from and to it.
        self.context.give_back(|cuda| unsafe { _ = (cuda.free_host)(self.at.cast()) });
    }
}

/// Pinned memory that the copies of a caller's stream and functions on the host take turns with.
pub(crate) struct Staging(Pinned);

// SAFETY: its memory is reached by unsafe functions only, whose callers know whose turn it is; the rest is not changed.
unsafe impl Sync for Staging {}

impl Staging {
    /// So many bytes, at least one.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, String> {
        Ok(Staging(Pinned::new(context, bytes)?))
    }

    /// `bytes` bytes at `at`.
    ///
    /// # Safety
    /// It is this caller's turn: nobody, a device included, writes them meanwhile.
    pub unsafe fn read(&self, at: usize, bytes: usize) -> &[u8] {
        self.check(at, bytes);
        // SAFETY: initialised, within the allocation; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts(self.0.at.add(at), bytes) }
    }

    /// `bytes` bytes at `at`, to write.
    ///
    /// # Safety
    /// It is this caller's turn: nobody, a device included, reads or writes them meanwhile.
    #[allow(clippy::mut_from_ref)] // whose turn it is, the caller knows
    pub unsafe fn write(&self, at: usize, bytes: usize) -> &mut [u8] {
        self.check(at, bytes);
        // SAFETY: initialised, within the allocation; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.at.add(at), bytes) }
    }

    fn check(&self, at: usize, bytes: usize) {
        assert!(at.checked_add(bytes).is_some_and(|end| end <= self.0.bytes), "beyond pinned memory");
    }
}

/// What a stream calls on the host, on a thread of the driver's, in its order. It may not call the driver.
pub(crate) trait OnHost: Sync {
    /// Does it.
    fn run(&self);

    /// It panicked, which nobody else is told.
    fn panicked(&self, what: &str);
}

extern "C" fn on_host<T: OnHost>(work: *mut c_void) {
    // SAFETY: `Stream::call` was given a reference to a T, that lives until the stream is past this.
    let work = unsafe { &*work.cast::<T>() };
    // Nothing may unwind into the driver; what `panicked` does is to take a lock and keep the text.
    let told = catch_unwind(AssertUnwindSafe(|| {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| work.run())) {
            let text = payload.downcast_ref::<&str>().copied();
            work.panicked(text.or(payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("unknown panic"));
            // What a panic carries may panic when it is dropped.
            std::mem::forget(payload);
        }
    }));
    if let Err(payload) = told {
        std::mem::forget(payload);
    }
}

/// A queue of work of a device.
pub(crate) struct Stream {
    context: Arc<Context>,
    handle: Handle,
    own: bool,
}

// SAFETY: the driver lets any thread use a stream.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.own {
            // SAFETY: created by `new`, destroyed here only; work on it is done first.
            self.context.give_back(|cuda| unsafe { _ = (cuda.stream_destroy)(self.handle) });
        }
    }
}

impl Stream {
    /// A stream that does not wait for the default one.
    pub fn new(context: &Arc<Context>) -> Result<Self, String> {
        const NON_BLOCKING: c_uint = 1;
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle.
        let create = |cuda: &Cuda| unsafe { (cuda.stream_create)(&mut handle, NON_BLOCKING) };
        context.within(|| "cuStreamCreate".into(), create)?;
        Ok(Stream { context: context.clone(), handle, own: true })
    }

    /// A stream of the application's, which it keeps.
    ///
    /// # Safety
    /// `handle` is a `CUstream` of this context, or null, for as long as this value lives.
    pub unsafe fn borrowed(context: &Arc<Context>, handle: Handle) -> Self {
        Stream { context: context.clone(), handle, own: false }
    }

    /// Waits until all work on it is done; `what` is for errors.
    pub fn wait(&self, what: &str) -> Result<(), String> {
        // SAFETY: a live stream.
        self.context.within(|| what.into(), |cuda| unsafe { (cuda.stream_wait)(self.handle) })
    }

    /// Copies the first `bytes` of `from` to the device. `from` may not be looked at before [`Stream::settle`].
    pub fn upload(&self, to: &Buffer, at: usize, from: &Pinned, bytes: usize) -> Result<(), String> {
        assert!(
            at.checked_add(bytes).is_some_and(|end| end <= to.bytes) && bytes <= from.bytes,
            "a copy beyond its buffers"
        );
        if bytes == 0 {
            return Ok(());
        }
        from.in_use.set(true);
        let (address, host) = (to.address + at as u64, from.at);
        // SAFETY: both ranges are within their buffers; `from` is kept from being written until it settles, and freeing it waits.
        self.context.within(
            || format!("copying {bytes} bytes to the device"),
            |cuda| unsafe { (cuda.to_device)(address, host.cast(), bytes, self.handle) },
        )
    }

    /// Copies `bytes` bytes at `at` of `from` to the front of `to`, which may not be looked at before [`Stream::settle`].
    pub fn download(&self, to: &Pinned, from: &Buffer, at: usize, bytes: usize) -> Result<(), String> {
        assert!(
            at.checked_add(bytes).is_some_and(|end| end <= from.bytes) && bytes <= to.bytes,
            "a copy beyond its buffers"
        );
        if bytes == 0 {
            return Ok(());
        }
        to.in_use.set(true);
        let address = from.address + at as u64;
        // SAFETY: as `upload`.
        self.context.within(
            || format!("copying {bytes} bytes from the device"),
            |cuda| unsafe { (cuda.to_host)(to.at.cast(), address, bytes, self.handle) },
        )
    }

    /// Copies `bytes` bytes at `from` on the device to those at `at`.
    ///
    /// # Safety
    /// Until the stream is past this: the device holds them, and it is this copy's turn with the pinned memory, which lives.
    pub unsafe fn fetch(&self, to: &Staging, at: usize, from: u64, bytes: usize) -> Result<(), String> {
        to.check(at, bytes);
        self.context.within(
            || format!("copying {bytes} bytes from the device"),
            // SAFETY: within the pinned memory; the rest is the caller's promise.
            |cuda| unsafe { (cuda.to_host)(to.0.at.add(at).cast(), from, bytes, self.handle) },
        )
    }

    /// Copies the `bytes` bytes at `at` to `to` on the device.
    ///
    /// # Safety
    /// As [`Stream::fetch`].
    pub unsafe fn place(&self, to: u64, from: &Staging, at: usize, bytes: usize) -> Result<(), String> {
        from.check(at, bytes);
        self.context.within(
            || format!("copying {bytes} bytes to the device"),
            // SAFETY: within the pinned memory; the rest is the caller's promise.
            |cuda| unsafe { (cuda.to_device)(to, from.0.at.add(at).cast_const().cast(), bytes, self.handle) },
        )
    }

    /// Has the stream call `work` on the host, between what is before and what comes after.
    ///
    /// # Safety
    /// `work` lives, and does not move, until the stream (or each launch of a graph that it is captured into) is past this.
    pub unsafe fn call<T: OnHost>(&self, work: &T) -> Result<(), String> {
        let data = ptr::from_ref(work).cast_mut().cast();
        self.context.within(
            || "calling a function on the host".into(),
            // SAFETY: the function takes what it is given here, a T; that it lives is the caller's promise.
            |cuda| unsafe { (cuda.host_function)(self.handle, on_host::<T>, data) },
        )
    }

    /// Waits for all work, after which these buffers may be looked at again. Where waiting fails the device is lost, and uses nothing any more.
    pub fn settle(&self, what: &str, buffers: &[&Pinned]) -> Result<(), String> {
        let result = self.wait(what);
        buffers.iter().for_each(|b| b.in_use.set(false));
        result
    }

    /// Starts `kernel` with its one argument.
    ///
    /// # Safety
    /// `T` is the kernel's argument, and what it points to holds what the kernel reads and writes until it has run.
    pub unsafe fn launch<T: Copy>(
        &self,
        kernel: &Kernel,
        (grid_x, grid_y): (usize, usize),
        threads: u32,
        argument: &T,
    ) -> Result<(), String> {
        let mut arguments = [ptr::from_ref(argument).cast_mut().cast::<c_void>()];
        self.context.within(
            || format!("launching {}", kernel.name),
            // SAFETY: the caller's promise; the driver copies the argument before it returns.
            |cuda| unsafe {
                (cuda.launch)(
                    kernel.handle,
                    grid_x as c_uint,
                    grid_y as c_uint,
                    1,
                    threads,
                    1,
                    1,
                    0,
                    self.handle,
                    arguments.as_mut_ptr(),
                    ptr::null_mut(),
                )
            },
        )
    }
}

/// Code on a device; unloaded when dropped.
pub(crate) struct Module {
    context: Arc<Context>,
    handle: Handle,
}

// SAFETY: the driver lets any thread use a module.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded by `new`, unloaded here only; kernels keep their module alive.
        self.context.give_back(|cuda| unsafe { _ = (cuda.module_unload)(self.handle) });
    }
}

impl Module {
    /// Loads machine code, or PTX, which ends with a zero.
    pub fn new(context: &Arc<Context>, image: &[u8], what: &str) -> Result<Arc<Self>, String> {
        let mut handle = ptr::null_mut();
        // PTX is read up to a zero, and one more does not change machine code.
        let image: Vec<u8> = image.iter().copied().chain([0]).collect();
        // SAFETY: writes one handle; the image is read during the call only.
        let load = |cuda: &Cuda| unsafe { (cuda.module_load)(&mut handle, image.as_ptr().cast()) };
        context.within(|| format!("loading {what}"), load)?;
        Ok(Arc::new(Module { context: context.clone(), handle }))
    }

    /// A kernel by its name.
    pub fn kernel(self: &Arc<Self>, name: String) -> Result<Kernel, String> {
        let text = CString::new(name.as_str()).map_err(|e| e.to_string())?;
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle.
        let get = |cuda: &Cuda| unsafe { (cuda.module_function)(&mut handle, self.handle, text.as_ptr()) };
        self.context.within(|| format!("kernel {name}"), get)?;
        Ok(Kernel { name, handle, _module: self.clone() })
    }
}

/// A kernel, ready to launch.
pub(crate) struct Kernel {
    name: String,
    handle: Handle,
    _module: Arc<Module>,
}

// SAFETY: the driver lets any thread use a function.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// NVRTC, opened.
pub(crate) struct Compiler {
    rtc: Rtc,
    /// Its version, (12, 9).
    pub version: (i32, i32),
    /// The architectures that it knows, rising: 90 is sm_90.
    pub archs: Vec<i32>,
}

/// What a program becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    /// Machine code of an architecture, `sm_90`.
    Machine(i32),
    /// PTX for an architecture and those after it, `compute_80`.
    Ptx(i32),
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Target::Machine(arch) => write!(f, "sm_{arch}"),
            Target::Ptx(arch) => write!(f, "compute_{arch}"),
        }
    }
}

impl Compiler {
    /// Opens the first of these names that is there.
    ///
    /// # Errors
    /// The linker's words, or symbols that are missing.
    pub fn open(names: &[&OsStr]) -> Result<Self, String> {
        let (name, library) = open_any(names)?;
        let rtc = Rtc::of(library).map_err(|what| format!("{name} {what}"))?;
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: writes two ints.
        let code = unsafe { (rtc.version)(&mut major, &mut minor) };
        // SAFETY: writes one int.
        let counted = unsafe { (rtc.arch_count)(&mut count) };
        let mut archs = vec![0; count.clamp(0, 1000) as usize];
        // SAFETY: writes as many as were counted, for which there is room.
        let listed = if (0..=1000).contains(&count) { unsafe { (rtc.archs)(archs.as_mut_ptr()) } } else { -1 };
        if (code, counted, listed) != (0, 0, 0) {
            return Err(format!("{name} does not say its version and architectures"));
        }
        Ok(Compiler { rtc, version: (major, minor), archs })
    }

    /// Compiles a program. Gives its code, and what the compiler said.
    ///
    /// # Errors
    /// The compiler's messages.
    pub fn compile(&self, source: &str, options: &[String], target: Target) -> Result<(Vec<u8>, String), String> {
        let rtc = &self.rtc;
        let arch = format!("--gpu-architecture={target}");
        let text = |s: &str| CString::new(s).map_err(|e| e.to_string());
        let source = text(source)?;
        let options = options.iter().chain([&arch]).map(|o| text(o)).collect::<Result<Vec<_>, _>>()?;
        let options: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut program = Program { rtc, handle: ptr::null_mut() };
        let name = c"kt.cu".as_ptr();
        // SAFETY: texts that end with a zero, no headers; writes one handle.
        let made = unsafe { (rtc.create)(&mut program.handle, source.as_ptr(), name, 0, ptr::null(), ptr::null()) };
        if made != 0 {
            return Err(format!("nvrtcCreateProgram: error {made}"));
        }
        // SAFETY: as many options as there are.
        let code = unsafe { (rtc.compile)(program.handle, options.len() as c_int, options.as_ptr()) };
        let said = program.bytes(rtc.log_size, rtc.log).unwrap_or_default();
        let said = String::from_utf8_lossy(said.strip_suffix(&[0]).unwrap_or(&said)).into_owned();
        if code != 0 {
            return Err(format!("NVRTC error {code}: {said}"));
        }
        let image = match target {
            Target::Machine(_) => program.bytes(rtc.cubin_size, rtc.cubin),
            Target::Ptx(_) => program.bytes(rtc.ptx_size, rtc.ptx),
        };
        let mut image = image.filter(|i| !i.is_empty()).ok_or("NVRTC gave no code")?;
        if let (Target::Ptx(_), Some(0)) = (target, image.last()) {
            image.pop();
        }
        Ok((image, said))
    }
}

struct Program<'a> {
    rtc: &'a Rtc,
    handle: Handle,
}

impl Program<'_> {
    fn bytes(
        &self,
        size: unsafe extern "C" fn(Handle, *mut usize) -> Code,
        get: unsafe extern "C" fn(Handle, *mut c_char) -> Code,
    ) -> Option<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: a program that was created; writes one number.
        if unsafe { size(self.handle, &mut bytes) } != 0 {
            return None;
        }
        let mut out = vec![0u8; bytes];
        // SAFETY: there is room for as many bytes as were told.
        (unsafe { get(self.handle, out.as_mut_ptr().cast()) } == 0).then_some(out)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once; null where creating failed, which is then an error without consequence.
        unsafe { (self.rtc.destroy)(&mut self.handle) };
    }
}
