//! Drivers for these tests: one without a GPU, compiled for them (see `fake/libcuda.cpp`), and that of this machine, if it has a GPU.

#![allow(unsafe_code)] // the fake's own functions
#![allow(dead_code)] // each test file uses some

use std::ffi::{CString, c_char, c_int, c_long, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock};

use kt_core::cpu::tier::Tier;
use kt_cuda::{Builder, CudaBackend, DeviceBatch, Element};

/// Compiles `fake/{name}.cpp` as a shared library; `None`, said aloud, where there is no C++ compiler for x86-64. `KT_REQUIRE=g++` says that there must be one.
pub fn compiled(name: &str) -> Option<PathBuf> {
    static MADE: Mutex<Vec<(String, Option<PathBuf>)>> = Mutex::new(Vec::new());
    let mut made = MADE.lock().unwrap_or_else(|e| e.into_inner());
    if let Some((_, path)) = made.iter().find(|(n, _)| n == name) {
        return path.clone();
    }
    // What was compiled of the same sources before is taken again.
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files: Vec<PathBuf> = ["kernels", "tests/fake"]
        .iter()
        .flat_map(|dir| std::fs::read_dir(crate_dir.join(dir)).expect("the crate's sources"))
        .map(|file| file.expect("the crate's sources").path())
        .filter(|file| file.is_file())
        .collect();
    files.sort();
    let mut sources = include_bytes!("mod.rs").to_vec();
    files.iter().for_each(|f| sources.extend(std::fs::read(f).expect("the crate's sources")));
    let hash = xxhash_rust::xxh3::xxh3_64(&sources);
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{hash:016x}.so"));
    if out.exists() {
        made.push((name.into(), Some(out.clone())));
        return Some(out);
    }
    let part = out.with_extension(format!("{}.part", std::process::id()));
    let mut command = Command::new("g++");
    // Else variables of templates would be one for all copies of the library.
    command.args(["-std=c++17", "-O2", "-ftree-vectorize", "-ffp-contract=off", "-fPIC", "-shared", "-fno-gnu-unique"]);
    command.args(["-Wall", "-Wno-unknown-pragmas", "-Werror"]).arg("-o").arg(&part);
    command.arg(crate_dir.join(format!("tests/fake/{name}.cpp")));
    let path = match (cfg!(all(target_arch = "x86_64", target_os = "linux")), command.output()) {
        (true, Ok(ran)) => {
            assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
            std::fs::rename(&part, &out).expect("the library that was compiled");
            Some(out)
        }
        (there, why) => {
            let why = if there {
                format!("g++: {}", why.unwrap_err())
            } else {
                "kernels are emulated on x86-64 Linux".into()
            };
            let required = std::env::var("KT_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|r| r == "g++"), "{why}, but KT_REQUIRE names it");
            eprintln!("skipped: {why}");
            None
        }
    };
    made.push((name.into(), path.clone()));
    path
}

/// What a test runs on: a driver of its own (a copy of the library, so that its state is nobody else's), or this machine's.
pub struct Driver {
    pub path: PathBuf,
    /// Whether there is no GPU behind it.
    pub emulated: bool,
    library: libloading::Library,
    compiler: OnceLock<Option<Box<Driver>>>,
}

impl Drop for Driver {
    fn drop(&mut self) {
        if self.emulated {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// The drivers that a test runs on: one without a GPU, and this machine's.
pub fn drivers(test: &str) -> impl Iterator<Item = Driver> {
    fake(test).into_iter().chain(silicon())
}

/// This machine's driver; `None`, said aloud, where it has no GPU. `KT_REQUIRE=cuda` says that there must be one.
pub fn silicon() -> Option<Driver> {
    if let Err(why) = kt_cuda::backend(Tier::Portable) {
        let required = std::env::var("KT_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|r| r == "cuda"), "{why}, but KT_REQUIRE names it");
        eprintln!("skipped: on a GPU: {why}");
        return None;
    }
    let path = PathBuf::from("libcuda.so.1");
    // SAFETY: the driver, which is open already.
    let library = unsafe { libloading::Library::new(&path) }.expect("the driver that was opened before");
    Some(Driver { path, emulated: false, library, compiler: OnceLock::new() })
}

/// A driver without a GPU, for one test.
pub fn fake(test: &str) -> Option<Driver> {
    fake_of("libcuda", test)
}

/// The library of that name, for one test.
pub fn fake_of(name: &str, test: &str) -> Option<Driver> {
    let compiled = compiled(name)?;
    let path = compiled.with_file_name(format!("{name}-{}-{test}.so", std::process::id()));
    std::fs::copy(&compiled, &path).expect("a copy of the library");
    // SAFETY: the library was compiled for this test.
    let library = unsafe { libloading::Library::new(&path) }.expect("the library that was compiled");
    Some(Driver { path, emulated: true, library, compiler: OnceLock::new() })
}

impl Driver {
    fn function<F: Copy>(&self, name: &str) -> F {
        // With its zero, so that nothing is allocated to find it.
        let mut symbol = [0; 64];
        symbol[..name.len()].copy_from_slice(name.as_bytes());
        // SAFETY: each use below names the type that the source has.
        unsafe { *self.library.get::<F>(&symbol[..=name.len()]).expect(name) }
    }

    /// How the emulation behaves. A GPU takes no notice.
    pub fn set(&self, what: &str, value: i64) {
        if !self.emulated {
            return;
        }
        let what = CString::new(what).unwrap();
        // SAFETY: a text and a number.
        unsafe {
            self.function::<unsafe extern "C" fn(*const c_char, c_long)>("fake_set")(what.as_ptr(), value as c_long)
        }
    }

    /// After so many more calls, calls of `function` fail with `code`; 0 ends that. For emulation only.
    pub fn fail(&self, function: &str, after: i64, code: i64) {
        assert!(self.emulated);
        let function = CString::new(function).unwrap();
        // SAFETY: a text and two numbers.
        unsafe {
            self.function::<unsafe extern "C" fn(*const c_char, c_long, c_long)>("fake_fail")(
                function.as_ptr(),
                after as c_long,
                code as c_long,
            )
        }
    }

    /// How often a function was called; a GPU's driver does not tell, and it is 0.
    pub fn calls(&self, function: &str) -> i64 {
        if !self.emulated {
            return 0;
        }
        let function = CString::new(function).unwrap();
        // SAFETY: a text.
        unsafe { self.function::<unsafe extern "C" fn(*const c_char) -> c_long>("fake_calls")(function.as_ptr()) }
    }

    /// A number that the emulation tells: `fake_live_bytes`, `fake_live_host_bytes`, `fake_products`; 0 on a GPU.
    pub fn number(&self, what: &str) -> i64 {
        if !self.emulated {
            return 0;
        }
        // SAFETY: takes nothing.
        unsafe { self.function::<unsafe extern "C" fn() -> c_long>(what)() }
    }

    /// A function of the driver with up to four arguments, each a pointer or as wide as one.
    pub fn driver<const N: usize>(&self, name: &str, arguments: [*mut c_void; N]) -> c_int {
        type Function = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_void, *mut c_void) -> c_int;
        let [a, b, c, d] = std::array::from_fn(|i| arguments.get(i).copied().unwrap_or(std::ptr::null_mut()));
        // SAFETY: what the test says; arguments that a function does not have are not looked at.
        unsafe { self.function::<Function>(name)(a, b, c, d) }
    }

    /// Makes the context of device 0 this thread's.
    pub fn enter(&self) {
        let mut context: *mut c_void = std::ptr::null_mut();
        assert_eq!(self.driver("cuInit", []), 0);
        assert_eq!(self.driver("cuDevicePrimaryCtxRetain", [(&raw mut context).cast()]), 0);
        assert_eq!(self.driver("cuCtxPushCurrent_v2", [context]), 0);
    }

    /// The backend on device 0, with the PTX that comes with the crate.
    pub fn backend(&self) -> CudaBackend {
        self.builder().nvrtc("/nowhere/libnvrtc.so").build(0).unwrap_or_else(|e| panic!("{e}"))
    }

    pub fn builder(&self) -> Builder {
        match self.emulated {
            true => kt_cuda::builder().driver(&self.path),
            false => kt_cuda::builder(),
        }
    }

    /// A builder whose backends compile their kernels; `None` where nothing compiles, said aloud. `KT_NVRTC` names the compiler of a machine with a GPU.
    pub fn compiling(&self) -> Option<Builder> {
        if !self.emulated {
            // Tests of one format, and later runs, compile it once.
            let builder = self.builder().kernel_cache(Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels"));
            return Some(match std::env::var_os("KT_NVRTC") {
                Some(path) => builder.nvrtc(path),
                None => builder,
            });
        }
        let test = self.path.file_stem().and_then(|s| s.to_str()).expect("a name of ours").to_string();
        let compiler = self.compiler.get_or_init(|| fake_of("libnvrtc", &test).map(Box::new)).as_ref()?;
        Some(self.builder().nvrtc(&compiler.path))
    }

    /// Both kinds of backend: of the PTX that comes with the crate, and of kernels that were compiled.
    pub fn backends(&self) -> Vec<CudaBackend> {
        let compiled = self.compiling().map(|b| b.build(0).unwrap_or_else(|e| panic!("{e}")));
        [Some(self.backend()), compiled].into_iter().flatten().collect()
    }
}

/// A copy between host and device, which waits: `cuMemcpyHtoD_v2`, `cuMemcpyDtoH_v2`.
type Copier = unsafe extern "C" fn(*mut c_void, *mut c_void, usize) -> c_int;

/// Memory of a test, the device's or the host's. That of the emulated device is the host's, so that it can be looked at.
pub struct Memory {
    at: *mut u8,
    bytes: usize,
    /// Of a GPU: there and back.
    copies: Option<[Copier; 2]>,
}

impl Memory {
    /// On the device.
    pub fn new(driver: &Driver, bytes: usize) -> Self {
        let copies = ["cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2"];
        let copies = (!driver.emulated).then(|| copies.map(|name| driver.function::<Copier>(name)));
        Memory { copies, ..Self::by(driver, "cuMemAlloc_v2", bytes) }
    }

    /// On the host, pinned.
    pub fn pinned(driver: &Driver, bytes: usize) -> Self {
        Self::by(driver, "cuMemAllocHost_v2", bytes)
    }

    fn by(driver: &Driver, function: &str, bytes: usize) -> Self {
        let mut at: *mut c_void = std::ptr::null_mut();
        assert_eq!(driver.driver(function, [(&raw mut at).cast(), std::ptr::without_provenance_mut(bytes)]), 0);
        Memory { at: at.cast(), bytes, copies: None }
    }

    pub fn address(&self) -> u64 {
        self.at as u64
    }

    pub fn put<T: bytemuck::Pod>(&self, values: &[T]) {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        assert!(bytes.len() <= self.bytes);
        if let Some([there, _]) = self.copies {
            // SAFETY: an allocation of that size on the device, and one of the host that is only read.
            let code = unsafe { there(self.at.cast(), bytes.as_ptr().cast_mut().cast(), bytes.len()) };
            return assert_eq!(code, 0);
        }
        // SAFETY: an allocation of that size.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at, bytes.len()) }
    }

    pub fn floats(&self) -> Vec<f32> {
        let mut floats = vec![0f32; self.bytes / 4];
        let (to, bytes) = (floats.as_mut_ptr(), self.bytes / 4 * 4);
        if let Some([_, back]) = self.copies {
            // SAFETY: allocations of that size, one on the device.
            let code = unsafe { back(to.cast(), self.at.cast(), bytes) };
            assert_eq!(code, 0);
            return floats;
        }
        // SAFETY: allocations of that size; any bytes are floats.
        unsafe { std::ptr::copy_nonoverlapping(self.at, to.cast(), bytes) };
        floats
    }

    /// Copies all of it from other memory, on a stream.
    pub fn copy(&self, function: &str, from: &Memory, stream: &Stream<'_>) {
        let bytes = std::ptr::without_provenance_mut(self.bytes.min(from.bytes));
        assert_eq!(stream.driver.driver(function, [self.at.cast(), from.at.cast(), bytes, stream.handle]), 0);
    }
}

/// A batch on the device: its memory.
pub struct Batch {
    pub input: Memory,
    pub ids: Memory,
    pub weights: Memory,
    pub output: Memory,
}

impl Batch {
    /// Room for so many tokens, in F32.
    pub fn new(driver: &Driver, tokens: usize, hidden: usize, top_k: usize) -> Self {
        let [input, output] = [(); 2].map(|()| Memory::new(driver, tokens * hidden * 4));
        let [ids, weights] = [(); 2].map(|()| Memory::new(driver, tokens * top_k * 4));
        Batch { input, ids, weights, output }
    }

    pub fn put(&self, input: &[f32], ids: &[i32], weights: &[f32]) {
        self.input.put(input);
        self.ids.put(ids);
        self.weights.put(weights);
    }

    /// Its first tokens.
    pub fn of(&self, tokens: usize, element: Element, add: bool) -> DeviceBatch {
        DeviceBatch {
            tokens,
            input: self.input.address(),
            element,
            topk_ids: self.ids.address(),
            topk_weights: self.weights.address(),
            output: self.output.address(),
            add,
        }
    }
}

/// A stream of a test's.
pub struct Stream<'a> {
    driver: &'a Driver,
    pub handle: *mut c_void,
}

// SAFETY: the driver lets any thread use a stream.
unsafe impl Sync for Stream<'_> {}

impl<'a> Stream<'a> {
    pub fn new(driver: &'a Driver) -> Self {
        let mut handle: *mut c_void = std::ptr::null_mut();
        assert_eq!(driver.driver("cuStreamCreate", [(&raw mut handle).cast(), std::ptr::null_mut()]), 0);
        Stream { driver, handle }
    }

    pub fn wait(&self) {
        assert_eq!(self.driver.driver("cuStreamSynchronize", [self.handle]), 0);
    }

    /// What `submit` puts on the stream, as a graph.
    pub fn capture(&self, submit: impl FnOnce()) -> Graph<'a> {
        // Other tests go on meanwhile.
        const THREAD_LOCAL: *mut c_void = std::ptr::without_provenance_mut(1);
        let (mut graph, mut exec): (*mut c_void, *mut c_void) = (std::ptr::null_mut(), std::ptr::null_mut());
        let driver = self.driver;
        assert_eq!(driver.driver("cuStreamBeginCapture_v2", [self.handle, THREAD_LOCAL]), 0);
        submit();
        assert_eq!(driver.driver("cuStreamEndCapture", [self.handle, (&raw mut graph).cast()]), 0);
        assert_eq!(driver.driver("cuGraphInstantiateWithFlags", [(&raw mut exec).cast(), graph]), 0);
        assert_eq!(driver.driver("cuGraphDestroy", [graph]), 0);
        Graph { driver, exec }
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        self.driver.driver("cuStreamDestroy_v2", [self.handle]);
    }
}

/// A graph of a test's, ready to launch.
pub struct Graph<'a> {
    driver: &'a Driver,
    exec: *mut c_void,
}

impl Graph<'_> {
    pub fn launch(&self, stream: &Stream<'_>) {
        assert_eq!(self.driver.driver("cuGraphLaunch", [self.exec, stream.handle]), 0);
    }
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        self.driver.driver("cuGraphExecDestroy", [self.exec]);
    }
}
