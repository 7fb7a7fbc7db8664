#![doc = include_str!("../README.md")]

mod bank;
mod call;
mod ffi;
mod gpu;
mod hybrid;
mod image;
mod layout;

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::Arc;

use kt_core::cpu::tier::Tier;
use kt_core::{Candidate, Unsupported};

pub use bank::{CudaBackend, CudaBank, DeviceBatch, Element, PreparedCall};
pub use hybrid::HybridCall;

/// Names of the driver's library.
const DRIVERS: [&str; 2] = ["libcuda.so.1", "libcuda.so"];
/// Names of NVRTC's, the newest first.
const COMPILERS: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
/// The first version of CUDA whose drivers are used.
const OLDEST: (i32, i32) = (12, 0);

/// Which device, by which libraries.
#[derive(Debug, Clone, Default)]
pub struct Builder {
    driver: Option<PathBuf>,
    nvrtc: Option<PathBuf>,
    kernel_cache: Option<PathBuf>,
}

/// Starts describing a device and its libraries; without more words, those that the dynamic linker finds.
pub fn builder() -> Builder {
    Builder::default()
}

impl Builder {
    /// The driver's library, in place of `libcuda.so.1`.
    pub fn driver(mut self, path: impl Into<PathBuf>) -> Self {
        self.driver = Some(path.into());
        self
    }

    /// NVRTC's library, in place of `libnvrtc.so.13`, `.12` or `libnvrtc.so`.
    pub fn nvrtc(mut self, path: impl Into<PathBuf>) -> Self {
        self.nvrtc = Some(path.into());
        self
    }

    /// A directory for compiled kernels, made if it is not there. Without one each process compiles what it uses: about a second for a format.
    pub fn kernel_cache(mut self, dir: impl Into<PathBuf>) -> Self {
        self.kernel_cache = Some(dir.into());
        self
    }

    fn open(&self) -> Result<(Arc<ffi::Driver>, usize), Unsupported> {
        let names: Vec<&OsStr> = match &self.driver {
            Some(path) => vec![path.as_os_str()],
            None => DRIVERS.iter().map(OsStr::new).collect(),
        };
        let driver = ffi::Driver::open(&names)
            .map_err(|why| Unsupported::new(format!("no NVIDIA driver that can be used: {why}")))?;
        let (major, minor) = driver.version();
        if (major, minor) < OLDEST {
            let (a, b) = OLDEST;
            return Err(Unsupported::new(format!(
                "the driver knows CUDA {major}.{minor}; {a}.{b} is needed (driver 525 or later)"
            )));
        }
        match driver.devices() {
            Ok(0) => Err(Unsupported::new("the NVIDIA driver has no device (is CUDA_VISIBLE_DEVICES empty?)")),
            Ok(count) => Ok((driver, count)),
            Err(why) => Err(Unsupported::new(format!("the NVIDIA driver cannot be asked for devices: {why}"))),
        }
    }

    fn make(&self, driver: &Arc<ffi::Driver>, ordinal: usize) -> Result<CudaBackend, Unsupported> {
        let names: Vec<&OsStr> = match &self.nvrtc {
            Some(path) => vec![path.as_os_str()],
            None => COMPILERS.iter().map(OsStr::new).collect(),
        };
        let compiler = ffi::Compiler::open(&names).map_err(|why| format!("no NVRTC: {why}"));
        let images = image::Images { compiler, cache: self.kernel_cache.clone() };
        let context = ffi::Context::new(driver, ordinal);
        let gpu = context.and_then(|context| gpu::Gpu::new(name(ordinal), context, images));
        gpu.map(|gpu| CudaBackend { gpu: Arc::new(gpu) }).map_err(Unsupported::new)
    }

    /// The backend `cuda:N` on device `ordinal`.
    ///
    /// # Errors
    /// What is missing: the driver (with the linker's words), a function of it, a new enough one, a device, one that is new enough.
    pub fn build(&self, ordinal: usize) -> Result<CudaBackend, Unsupported> {
        let (driver, count) = self.open()?;
        if ordinal >= count {
            return Err(Unsupported::new(format!("there is no device {ordinal}, only 0..{count}")));
        }
        self.make(&driver, ordinal)
    }

    /// All devices as backends `cuda:0`, `cuda:1` …; where there is none, `cuda:0` with the reason.
    pub fn candidates(&self) -> Vec<Candidate> {
        match self.open() {
            Err(why) => vec![Candidate::new(&name(0), Err::<CudaBackend, _>(why))],
            Ok((driver, count)) => (0..count).map(|i| Candidate::new(&name(i), self.make(&driver, i))).collect(),
        }
    }
}

fn name(ordinal: usize) -> String {
    format!("cuda:{ordinal}")
}

/// The first device, with the libraries that the dynamic linker finds. `cap` is about CPUs, and changes nothing here.
///
/// # Errors
/// As [`Builder::build`].
pub fn backend(_cap: Tier) -> Result<CudaBackend, Unsupported> {
    builder().build(0)
}

/// All devices: [`Builder::candidates`] with the libraries that the dynamic linker finds.
pub fn candidates() -> Vec<Candidate> {
    builder().candidates()
}
