//! A device with its kernels, and the streams and buffers that calls take turns with.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use kt_core::Unsupported;

use crate::ffi::{Buffer, Context, Kernel, Module, Pinned, Stream};
use crate::image::{Images, Set};
use crate::layout::Codes;

/// The products of one format.
pub(crate) struct Products {
    /// Gate, up and activation; down: for few rows, and for many.
    pub few: [Kernel; 2],
    /// Not in the PTX that comes with this crate: few do it then, with the same bits.
    pub many: Option<[Kernel; 2]>,
}

/// What is around the products.
pub(crate) struct Around {
    pub inputs: Kernel,
    pub outputs: Kernel,
    pub add: Kernel,
    pub group: Kernel,
}

/// A device.
pub(crate) struct Gpu {
    pub name: String,
    pub context: Arc<Context>,
    /// What it is: `Emulated GPU`, and 90 for sm_90.
    pub label: String,
    pub arch: i32,
    images: Images,
    products: Mutex<HashMap<Codes, Arc<Products>>>,
    around: Mutex<Option<Arc<Around>>>,
    /// Streams and buffers that no call is using.
    idle: Mutex<Vec<Lane>>,
}

/// What one call at a time uses: a stream, host memory that the device reads and writes, and device memory.
pub(crate) struct Lane {
    pub stream: Stream,
    pub there: Pinned,
    pub back: Pinned,
    pub scratch: Buffer,
}

impl Gpu {
    /// # Errors
    /// Why the device cannot be used.
    pub fn new(name: String, context: Arc<Context>, images: Images) -> Result<Self, String> {
        const MAJOR: i32 = 75;
        const MINOR: i32 = 76;
        let label = context.name()?;
        let (major, minor) = (context.attribute(MAJOR)?, context.attribute(MINOR)?);
        if major < 8 {
            return Err(format!(
                "{label} has compute capability {major}.{minor}; products of BF16 need 8.0 (Ampere) or later"
            ));
        }
        Ok(Gpu {
            name,
            context,
            label,
            arch: major * 10 + minor,
            images,
            products: Mutex::default(),
            around: Mutex::default(),
            idle: Mutex::default(),
        })
    }

    /// The code of a set on the device, and whether it is all of it.
    fn module(&self, set: Set) -> Result<(Arc<Module>, bool), Unsupported> {
        let image = self.images.get(set, self.arch)?;
        tracing::info!(backend = self.name, kernels = set.name(), "{}", image.how);
        let what = format!("kernels of {}, {}", set.name(), image.how);
        let module = Module::new(&self.context, &image.code, &what);
        Ok((module.map_err(|why| Unsupported::new(format!("{}: {why}", self.name)))?, image.whole))
    }

    /// The products of a format, compiled if they are not yet.
    pub fn products(&self, codes: Codes) -> Result<Arc<Products>, Unsupported> {
        let mut all = self.products.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(products) = all.get(&codes) {
            return Ok(products.clone());
        }
        let (module, whole) = self.module(Set::Products(codes))?;
        let kernel = |what: &str| {
            let kernel = module.kernel(format!("kt_{what}_{}", codes.name()));
            kernel.map_err(|why| Unsupported::new(format!("{}: {why}", self.name)))
        };
        let products = Arc::new(Products {
            few: [kernel("few_gate_up")?, kernel("few_down")?],
            many: if whole { Some([kernel("many_gate_up")?, kernel("many_down")?]) } else { None },
        });
        all.insert(codes, products.clone());
        Ok(products)
    }

    /// What is around the products.
    pub fn around(&self) -> Result<Arc<Around>, Unsupported> {
        let mut around = self.around.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(around) = &*around {
            return Ok(around.clone());
        }
        let (module, _) = self.module(Set::Rows)?;
        let kernel =
            |name: &str| module.kernel(name.into()).map_err(|why| Unsupported::new(format!("{}: {why}", self.name)));
        let made = Around {
            inputs: kernel("kt_inputs")?,
            outputs: kernel("kt_outputs")?,
            add: kernel("kt_add")?,
            group: kernel("kt_group")?,
        };
        Ok(around.insert(Arc::new(made)).clone())
    }

    /// A stream with buffers of at least these sizes: bytes there, bytes back, bytes of scratch.
    ///
    /// # Errors
    /// What the driver says: too little memory, a device that is lost.
    pub fn lane(&self, there: usize, back: usize, scratch: usize) -> Result<Lane, String> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let (host, device) = ("inputs and outputs", "inputs, intermediate rows and outputs");
        let grown = |bytes: usize| bytes.next_power_of_two();
        let pinned = |bytes| Pinned::new(&self.context, bytes).map_err(|why| format!("{why} (for {host})"));
        let Some(mut lane) = idle else {
            return Ok(Lane {
                stream: Stream::new(&self.context)?,
                there: pinned(grown(there))?,
                back: pinned(grown(back))?,
                scratch: Buffer::new(&self.context, grown(scratch), device)?,
            });
        };
        if lane.there.len() < there {
            lane.there = pinned(grown(there))?;
        }
        if lane.back.len() < back {
            lane.back = pinned(grown(back))?;
        }
        if lane.scratch.len() < scratch {
            lane.scratch = Buffer::new(&self.context, grown(scratch), device)?;
        }
        Ok(lane)
    }

    /// Gives a lane back whose work is done.
    pub fn idle(&self, lane: Lane) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(lane);
    }
}
