//! A backend that behaves like a device: memory of its own that runs out, calls that take time, and failures on demand. Its experts are
//! computed by the portable kernel, so that what comes of it is known.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::backend::{Backend, Device, ExpertBank, Fit, LoadContext, Replacement, Streaming};
use crate::cpu::CpuBackend;
use crate::cpu::portable::Portable;
use crate::cpu::team::Team;
use crate::error::{Error, Result, Unsupported};
use crate::layer::LayerSpec;
use crate::pending::Pending;
use crate::source::WeightSource;
use crate::work::Work;

/// Where a [`TestDevice`] fails next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A layer's experts cannot be loaded.
    Load,
    /// Work fails after it was begun.
    Work,
    /// Work panics.
    Panic,
    /// An expert cannot be replaced.
    Replace,
    /// A streamed layer fails.
    Stream,
}

#[derive(Debug, Default)]
struct State {
    used_bytes: AtomicU64,
    /// Calls under way.
    busy: AtomicUsize,
    calls: AtomicUsize,
    uploads: AtomicUsize,
    faults: Mutex<Vec<Fault>>,
    held: Mutex<bool>,
    released: Condvar,
}

impl State {
    /// Whether to fail here, once.
    fn fails(&self, fault: Fault) -> bool {
        let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        faults.iter().position(|f| *f == fault).map(|i| faults.remove(i)).is_some()
    }
}

/// A device without hardware. Clones are the same device.
#[derive(Clone)]
pub struct TestDevice {
    name: String,
    total_bytes: u64,
    delay: Duration,
    upload_delay: Duration,
    state: Arc<State>,
    team: Arc<Team>,
}

impl TestDevice {
    /// A device with memory of so many bytes.
    ///
    /// # Errors
    /// The system refuses to start a thread.
    pub fn new(name: &str, total_bytes: u64) -> Result<Self> {
        let team = Team::builder().threads(1).build()?;
        let (delay, upload_delay) = (Duration::ZERO, Duration::ZERO);
        Ok(TestDevice { name: name.into(), total_bytes, delay, upload_delay, state: Arc::default(), team })
    }

    /// Every call of a bank takes so long.
    pub fn delay(self, delay: Duration) -> Self {
        TestDevice { delay, ..self }
    }

    /// Every expert takes so long to get there.
    pub fn upload_delay(self, upload_delay: Duration) -> Self {
        TestDevice { upload_delay, ..self }
    }

    /// Calls that are begun from now on go on when the device is [released](TestDevice::release).
    pub fn hold(&self) {
        *self.state.held.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }

    /// Lets calls go on.
    pub fn release(&self) {
        *self.state.held.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.state.released.notify_all();
    }

    /// Fails there, the next time only.
    pub fn fail(&self, fault: Fault) {
        self.state.faults.lock().unwrap_or_else(PoisonError::into_inner).push(fault);
    }

    /// Bytes of its memory that are taken.
    pub fn used_bytes(&self) -> u64 {
        self.state.used_bytes.load(Ordering::SeqCst)
    }

    /// Calls begun so far.
    pub fn calls(&self) -> usize {
        self.state.calls.load(Ordering::SeqCst)
    }

    /// Calls under way.
    pub fn busy(&self) -> usize {
        self.state.busy.load(Ordering::SeqCst)
    }

    /// Experts brought to it so far, those streamed and those replaced counted.
    pub fn uploads(&self) -> usize {
        self.state.uploads.load(Ordering::SeqCst)
    }

    fn error(&self, layer: usize, what: &str) -> Error {
        Error::Backend { backend: self.name.clone(), layer, what: what.into() }
    }

    /// Runs on a thread of its own, as a device would beside the host.
    fn start(&self, fault: Fault, layer: usize, f: impl FnOnce() -> Result<Work> + Send + 'static) -> Pending<Work> {
        let (device, begun) = (self.clone(), self.state.clone());
        begun.calls.fetch_add(1, Ordering::SeqCst);
        begun.busy.fetch_add(1, Ordering::SeqCst);
        let thread = thread::spawn(move || {
            if fault == Fault::Work {
                thread::sleep(device.delay);
            }
            let mut held = device.state.held.lock().unwrap_or_else(PoisonError::into_inner);
            while *held {
                held = device.state.released.wait(held).unwrap_or_else(PoisonError::into_inner);
            }
            drop(held);
            let result = if device.state.fails(fault) {
                Err(device.error(layer, "lost the device"))
            } else {
                assert!(!device.state.fails(Fault::Panic), "the device's thread dies");
                f()
            };
            device.state.busy.fetch_sub(1, Ordering::SeqCst);
            result
        });
        let device = self.clone();
        Pending::new(move || {
            thread.join().unwrap_or_else(|_| {
                device.state.busy.fetch_sub(1, Ordering::SeqCst);
                Err(device.error(layer, "panicked"))
            })
        })
    }

    fn context(&self) -> LoadContext {
        LoadContext {
            team: self.team.clone(),
            progress: Arc::default(),
            huge_pages: Default::default(),
            cache: None,
            replaceable: true,
        }
    }
}

impl Backend for TestDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn probe(&self, layer: &LayerSpec) -> Result<Fit, Unsupported> {
        let fit = CpuBackend::new("device", Portable).probe(layer)?;
        Ok(Fit {
            tier: "pretended".into(),
            how: "as the portable kernel does, in memory of its own".into(),
            packed_bytes: fit.packed_bytes + fit.mapped_bytes,
            mapped_bytes: 0,
            ..fit
        })
    }

    fn load(
        &self,
        layer: &LayerSpec,
        experts: &[u32],
        from: &dyn WeightSource,
        context: &LoadContext,
    ) -> Result<Box<dyn ExpertBank>> {
        if self.state.fails(Fault::Load) {
            return Err(self.error(layer.index, "lost the device"));
        }
        let bytes = layer.expert_bytes() * experts.len() as u64;
        let memory = Memory::take(self, layer.index, bytes)?;
        let inner = CpuBackend::new("device", Portable).load(layer, experts, from, &self.context())?;
        context.progress.advance(layer.expert_bytes() * experts.len() as u64)?;
        Ok(Box::new(Bank { device: self.clone(), layer: layer.index, inner: Arc::from(inner), memory }))
    }

    fn device(&self) -> Option<Device> {
        Some(Device {
            label: "a device without hardware".into(),
            total_bytes: self.total_bytes,
            free_bytes: self.total_bytes - self.used_bytes(),
            read_bytes_per_second: Some(1e9),
            call: self.delay,
        })
    }

    fn probe_stream(&self, layer: &LayerSpec) -> Result<Streaming, Unsupported> {
        self.probe(layer)?;
        Ok(Streaming { device_bytes: 2 * layer.expert_bytes(), host_bytes: layer.expert_bytes() })
    }

    fn stream(&self, layer: &LayerSpec, from: &Arc<dyn WeightSource>, work: Work) -> Pending<Work> {
        let (device, layer, from) = (self.clone(), layer.clone(), from.clone());
        self.start(Fault::Stream, layer.index, move || {
            let _two = Memory::take(&device, layer.index, 2 * layer.expert_bytes())?;
            let experts: Vec<u32> = work.experts.iter().map(|e| e.local).collect();
            thread::sleep(device.upload_delay * experts.len() as u32);
            device.state.uploads.fetch_add(experts.len(), Ordering::SeqCst);
            let bank = CpuBackend::new("device", Portable).load(&layer, &experts, &*from, &device.context())?;
            let mut work = work;
            work.experts.iter_mut().zip(0..).for_each(|(e, local)| e.local = local);
            bank.run(work)
        })
    }
}

/// Some of a device's memory, until it is dropped.
struct Memory {
    device: TestDevice,
    bytes: u64,
}

impl Memory {
    fn take(device: &TestDevice, layer: usize, bytes: u64) -> Result<Memory> {
        let taken = device.state.used_bytes.fetch_add(bytes, Ordering::SeqCst) + bytes;
        let memory = Memory { device: device.clone(), bytes };
        match taken > device.total_bytes {
            true => Err(device.error(layer, "out of memory")),
            false => Ok(memory),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.device.state.used_bytes.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}

struct Bank {
    device: TestDevice,
    layer: usize,
    inner: Arc<dyn ExpertBank>,
    memory: Memory,
}

impl ExpertBank for Bank {
    fn submit(&self, work: Work) -> Pending<Work> {
        let inner = self.inner.clone();
        self.device.start(Fault::Work, self.layer, move || inner.run(work))
    }

    fn packed_bytes(&self) -> u64 {
        self.memory.bytes
    }

    fn replace(&self, local: u32, expert: u32, from: &dyn WeightSource) -> Result<()> {
        self.replacement(local, expert, from)?()
    }

    fn replacement<'a>(&'a self, local: u32, expert: u32, from: &'a dyn WeightSource) -> Result<Replacement<'a>> {
        let put = self.inner.replacement(local, expert, from)?;
        Ok(Box::new(move || {
            if self.device.state.fails(Fault::Replace) {
                return Err(self.device.error(self.layer, "the upload failed"));
            }
            self.device.state.uploads.fetch_add(1, Ordering::SeqCst);
            put()
        }))
    }
}
