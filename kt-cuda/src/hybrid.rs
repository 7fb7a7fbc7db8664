//! A layer whose experts are on the device and in host memory, on the caller's stream.
//!
//! ```text
//! stream   inputs, choices ─▶ host   start   the device's experts    wait   sums ─▶ device   + the device's
//! host                               └▶ a thread of the runtime's: split, the host's experts ─┘
//! ```
//!
//! `start` and `wait` are functions that the stream calls on a thread of the driver's. They call nothing of CUDA and allocate nothing.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kt_core::{Error, LayerExperts, Prepared, Result, Unsupported};

use crate::bank::{CudaBackend, CudaBank, DeviceBatch, Element, PreparedCall, failed};
use crate::call;
use crate::ffi::{Buffer, OnHost, Staging, Stream};
use crate::gpu::{Around, Gpu};

/// A layer ready for batches of up to some tokens that are on a device, wherever its experts are: see [`CudaBackend::prepare`].
///
/// Dropping it waits for all work of the device, whose memory is freed then.
pub struct HybridCall {
    gpu: Arc<Gpu>,
    layer: usize,
    hidden: usize,
    tokens: usize,
    top_k: usize,
    memory: Arc<Memory>,
}

/// What work under way needs.
struct Memory {
    /// The experts on the device, if any are.
    device: Option<PreparedCall>,
    /// Those elsewhere, if any are.
    host: Option<Host>,
    around: Arc<Around>,
    /// Where there are none: what keeps the layer's experts where they are.
    _still: Option<Prepared>,
}

struct Host {
    joint: Arc<Joint>,
    /// For each number of tokens, those of `Kind::ALL`.
    steps: Vec<Step>,
    /// The sum, where it is not the caller's output: `[tokens, hidden]`.
    sum: Buffer,
    /// The output of one bank behind the device's, if there are any: the same.
    part: Option<Buffer>,
    banks_after: usize,
}

/// What the stream and the host's part share.
struct Joint {
    backend: String,
    prepared: Prepared,
    /// Inputs and choices, from the device.
    there: Staging,
    ids_at: usize,
    weights_at: usize,
    /// The sum of the banks before the device's, and the outputs of each after it, to the device.
    back: Staging,
    /// The first error that nobody was told yet.
    failure: Mutex<Option<Error>>,
    /// Held by the function that the stream is in; whether the call was started.
    turn: Mutex<bool>,
}

/// What a function on the host does.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Start(Element),
    Wait,
}

impl Kind {
    const ALL: [Kind; 3] = [Kind::Start(Element::F32), Kind::Start(Element::Bf16), Kind::Wait];
}

/// A function on the host, for so many tokens.
struct Step {
    joint: Arc<Joint>,
    tokens: usize,
    kind: Kind,
}

impl OnHost for Step {
    fn run(&self) {
        let mut started = self.joint.turn.lock().unwrap_or_else(PoisonError::into_inner);
        match self.kind {
            Kind::Start(element) => {
                *started = false;
                match self.joint.start(self.tokens, element) {
                    Ok(()) => *started = true,
                    Err(e) => self.joint.fail(e),
                }
            }
            Kind::Wait => self.joint.wait(self.tokens, std::mem::take(&mut *started)),
        }
    }

    fn panicked(&self, what: &str) {
        let what = format!("panicked in a function on the host: {what}");
        let layer = self.joint.prepared.layer().spec().index;
        self.joint.fail(Error::Backend { backend: self.joint.backend.clone(), layer, what });
    }
}

impl Joint {
    fn failure(&self) -> MutexGuard<'_, Option<Error>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, e: Error) {
        self.failure().get_or_insert(e);
    }

    fn hidden(&self) -> usize {
        self.prepared.layer().spec().hidden
    }

    /// Hands the inputs over.
    fn start(&self, tokens: usize, element: Element) -> Result<()> {
        let (numbers, choices) = (tokens * self.hidden(), tokens * self.prepared.top_k());
        // SAFETY: the stream is in this function: its copies to this memory are done, and the next call's come behind it.
        #[allow(unsafe_code)]
        let [input, ids, weights] = unsafe {
            [
                self.there.read(0, numbers * if element == Element::F32 { 4 } else { 2 }),
                self.there.read(self.ids_at, choices * 4),
                self.there.read(self.weights_at, choices * 4),
            ]
        };
        self.prepared.start(tokens, |to, topk_ids, topk_weights| {
            match element {
                Element::F32 => put(to, input, f32::from_ne_bytes),
                Element::Bf16 => put(to, input, |v| f32::from_bits(u32::from(u16::from_ne_bytes(v)) << 16)),
            }
            put(topk_ids, ids, i32::from_ne_bytes);
            put(topk_weights, weights, f32::from_ne_bytes);
        })
    }

    /// Waits for what was started, and leaves its outputs for the device: NaN where it failed.
    fn wait(&self, tokens: usize, started: bool) {
        let bytes = tokens * self.hidden() * 4;
        let all = bytes * (1 + self.prepared.banks_after());
        // SAFETY: the stream is in this function: its copies from this memory come behind it, and those of the call before are done.
        #[allow(unsafe_code)]
        let back = unsafe { self.back.write(0, all) };
        let nothing = |back: &mut [u8]| back.as_chunks_mut().0.iter_mut().for_each(|v| *v = f32::NAN.to_ne_bytes());
        if !started {
            return nothing(back); // and why, `start` told
        }
        let taken = self.prepared.wait(|sums| {
            for (to, from) in back.chunks_exact_mut(bytes).zip([sums.before].into_iter().chain(sums.after())) {
                to.as_chunks_mut().0.iter_mut().zip(from).for_each(|(to, v)| *to = v.to_ne_bytes());
            }
        });
        if let Err(e) = taken {
            nothing(back);
            self.fail(e);
        }
    }
}

/// Numbers as the device wrote them.
fn put<T, const N: usize>(to: &mut [T], bytes: &[u8], value: impl Fn([u8; N]) -> T) {
    to.iter_mut().zip(bytes.as_chunks().0).for_each(|(to, v)| *to = value(*v));
}

impl CudaBackend {
    /// Allocates all that batches of up to `tokens` tokens with `top_k` experts each need for a layer whose experts are on this device,
    /// in host memory, or some here and some there: for [`HybridCall::submit_on`]. While it lives, the layer's experts stay where they
    /// are.
    ///
    /// # Errors
    /// More tokens or experts than the layer can do (see [`LayerExperts::prepare`]), experts on another GPU, too little memory.
    pub fn prepare(&self, layer: &Arc<LayerExperts>, tokens: usize, top_k: usize) -> Result<HybridCall> {
        let mut own: Option<(usize, &CudaBank)> = None;
        for (i, bank) in layer.banks().enumerate() {
            let bank: &dyn std::any::Any = bank;
            match bank.downcast_ref::<CudaBank>() {
                Some(bank) if bank.gpu.context.is_same(&self.gpu.context) => own = Some((i, bank)),
                // Its work would be submitted by a function on the host, which may not.
                Some(bank) => {
                    return Err(Unsupported::new(format!(
                        "layer {} has experts on {} besides {}; calls on a stream are prepared for one GPU and the host",
                        layer.spec().index,
                        bank.gpu.name,
                        self.gpu.name
                    ))
                    .into());
                }
                None => {}
            }
        }
        let prepared = layer.prepare(tokens, top_k, own.map(|(i, _)| i))?;
        let homes = prepared.homes();
        let local = |expert: u32, bank: usize| match homes.get(expert as usize) {
            Some(home) if home.bank as usize == bank => Some(home.local),
            _ => None,
        };
        let device = match own {
            Some((i, bank)) => Some(bank.prepare_for(tokens, top_k, |expert| local(expert, i))?),
            None => None,
        };
        let around = self.gpu.around()?;
        let hidden = layer.spec().hidden;
        let make = |prepared: Prepared| -> Result<Host, String> {
            let (context, numbers) = (&self.gpu.context, tokens * hidden);
            let (ids_at, weights_at) = (numbers * 4, numbers * 4 + tokens * top_k * 4);
            let banks_after = prepared.banks_after();
            let buffer = |what| Buffer::new(context, numbers * 4, what);
            let joint = Arc::new(Joint {
                backend: self.gpu.name.clone(),
                there: Staging::new(context, weights_at + tokens * top_k * 4)?,
                ids_at,
                weights_at,
                back: Staging::new(context, numbers * 4 * (1 + banks_after))?,
                failure: Mutex::default(),
                turn: Mutex::default(),
                prepared,
            });
            let step = |i: usize| Step {
                joint: joint.clone(),
                tokens: 1 + i / Kind::ALL.len(),
                kind: Kind::ALL[i % Kind::ALL.len()],
            };
            Ok(Host {
                steps: (0..tokens * Kind::ALL.len()).map(step).collect(),
                joint,
                sum: buffer("a prepared call's sum")?,
                part: if banks_after > 0 { Some(buffer("a prepared call's outputs")?) } else { None },
                banks_after,
            })
        };
        let here = own.is_some() && layer.banks().count() == 1;
        let (host, still) = match here {
            true => (None, Some(prepared)),
            false => (Some(make(prepared).map_err(|what| failed(&self.gpu, layer.spec().index, what))?), None),
        };
        let memory = Arc::new(Memory { device, host, around, _still: still });
        Ok(HybridCall { gpu: self.gpu.clone(), layer: layer.spec().index, hidden, tokens, top_k, memory })
    }
}

impl HybridCall {
    /// Puts the layer's work on a stream of the caller's, behind what is there, and returns. The stream may be one that is captured into
    /// a graph: what the router chose is read when the stream comes to it. Nothing is allocated, neither now nor when the work is done,
    /// where the layer's experts are on this GPU and in host memory (see [`LayerExperts::prepare`]). Outputs have the bits of
    /// [`LayerExperts::forward`].
    ///
    /// Where all of the layer's experts are on the GPU the host has no part in it, and statistics and heat maps do not see the call.
    ///
    /// What fails on the host, [`HybridCall::check`] tells; the outputs of such a call are NaN.
    ///
    /// # Errors
    /// What failed on the host since the last check (nothing was put on the stream then); more tokens than were prepared for, or none;
    /// what the driver says: nothing is known of the outputs then.
    ///
    /// # Safety
    /// - `stream` is a `CUstream` of the device's primary context, or null;
    /// - the batch's addresses are of this device's memory, of the sizes and alignments that their types say, and so they stay until the
    ///   stream (or each launch of the graph) is past this work;
    /// - calls of this value are one after the other, in the order of a stream or of a graph: they share its memory;
    /// - a graph that was captured is not launched any more when this value is dropped, which is not done while a stream is being captured.
    #[allow(unsafe_code)] // device pointers are the caller's
    pub unsafe fn submit_on(&self, stream: *mut std::ffi::c_void, batch: &DeviceBatch) -> Result<()> {
        self.check()?;
        let failed = |what: String| failed(&self.gpu, self.layer, what);
        if !(1..=self.tokens).contains(&batch.tokens) {
            let (tokens, most) = (batch.tokens, self.tokens);
            return Err(failed(format!("a batch of {tokens} tokens; the call was prepared for 1 to {most}")));
        }
        // SAFETY: the caller's promise; the borrow ends with this call.
        let stream = unsafe { Stream::borrowed(&self.gpu.context, stream) };
        // SAFETY: the caller's promise.
        unsafe { self.put_on(&stream, batch) }.map_err(failed)
    }

    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// As [`HybridCall::submit_on`]; the size was checked.
    #[allow(unsafe_code)] // device pointers are the caller's
    unsafe fn put_on(&self, stream: &Stream, batch: &DeviceBatch) -> Result<(), String> {
        let Memory { device, host, around, .. } = &*self.memory;
        let (numbers, choices) = (batch.tokens * self.hidden, batch.tokens * self.top_k);
        if let Some(host) = host {
            let wide = if batch.element == Element::F32 { 4 } else { 2 };
            for (at, from, bytes) in [
                (0, batch.input, numbers * wide),
                (host.joint.ids_at, batch.topk_ids, choices * 4),
                (host.joint.weights_at, batch.topk_weights, choices * 4),
            ] {
                // SAFETY: the caller's promise; who reads this memory is behind on the stream, or was before this call.
                unsafe { stream.fetch(&host.joint.there, at, from, bytes) }?;
            }
            // SAFETY: steps are dropped when no work of the device is left.
            unsafe { stream.call(host.step(batch.tokens, Kind::Start(batch.element))) }?;
        }
        if let Some(device) = device {
            // SAFETY: the caller's promise.
            unsafe { device.begin(stream, batch) }?;
        }
        let Some(host) = host else {
            // SAFETY: the caller's promise. Experts are here if they are nowhere else.
            return device.iter().try_for_each(|d| unsafe { d.end(stream, batch.tokens, batch.output, batch.add) });
        };
        // SAFETY: as above.
        unsafe { stream.call(host.step(batch.tokens, Kind::Wait)) }?;
        // In the order of the banks, which is that of every other call.
        let to = if batch.add { host.sum.address() } else { batch.output };
        // SAFETY: the caller's promise; the function before this on the stream wrote what is copied.
        unsafe { stream.place(to, &host.joint.back, 0, numbers * 4) }?;
        if let Some(device) = device {
            // SAFETY: behind `begin`, on the same stream.
            unsafe { device.end(stream, batch.tokens, to, true) }?;
        }
        for (i, part) in (0..host.banks_after).zip(host.part.iter().cycle()) {
            // SAFETY: as above.
            unsafe { stream.place(part.address(), &host.joint.back, (1 + i) * numbers * 4, numbers * 4) }?;
            // SAFETY: both were written before, on the same stream.
            unsafe { call::add(stream, around, part.address(), to, numbers) }?;
        }
        match batch.add {
            // SAFETY: as above; the output is the caller's promise.
            true => unsafe { call::add(stream, around, to, batch.output, numbers) },
            false => Ok(()),
        }
    }

    /// Whether something failed on the host since this was asked last, which is told once: by this or by [`HybridCall::submit_on`]. To be
    /// asked when the stream is past the calls in question.
    ///
    /// # Errors
    /// The first failure: a bank's, by name, its panics too; an expert that there is not.
    pub fn check(&self) -> Result<()> {
        let failure = self.memory.host.as_ref().and_then(|host| host.joint.failure().take());
        failure.map_or(Ok(()), Err)
    }

    /// Most tokens of a batch.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Experts of each token.
    pub fn top_k(&self) -> usize {
        self.top_k
    }
}

impl Host {
    fn step(&self, tokens: usize, kind: Kind) -> &Step {
        let kind = Kind::ALL.iter().position(|&k| k == kind).unwrap_or_default();
        &self.steps[(tokens - 1) * Kind::ALL.len() + kind]
    }
}

impl Drop for HybridCall {
    fn drop(&mut self) {
        let Some(host) = &self.memory.host else { return }; // freeing waits for kernels
        if let Err(why) = self.gpu.context.wait()
            && !self.gpu.context.is_lost()
        {
            tracing::warn!(backend = self.gpu.name, layer = self.layer, "memory of a call is kept for good: {why}");
            std::mem::forget(self.memory.clone());
        }
        // A lost device calls nothing any more; what it is in the midst of ends first.
        drop(host.joint.turn.lock());
    }
}
