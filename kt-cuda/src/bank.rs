//! The backend, and the experts of a layer in a device's memory.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kt_core::backend::{Device, Replacement, Streaming};
use kt_core::cpu::input::InputLayout;
use kt_core::cpu::team::Team;
use kt_core::work::{Spent, Work};
use kt_core::{
    Backend, Error, ExpertBank, Fit, LayerSpec, LoadContext, Matrix, Pending, Proj, Result, Unsupported, WeightSource,
};

use crate::call::{self, At, Counts, Launch, Places, Shape};
use crate::ffi::{Buffer, Pinned, Stream};
use crate::gpu::{Around, Gpu, Lane, Products};
use crate::layout::{ExpertLayout, Threads};

/// The lowest: experts come to a device by placement, or where it is the only backend, and not because it is there.
const RANK: u32 = 0;

/// A call's own time, besides the experts': some launches, two copies over PCIe and a wait. From the documentation's numbers; not measured.
const CALL: Duration = Duration::from_micros(40);

/// Experts on one device. Cheap to make; a context of the device is kept while it, or a bank of it, lives. Clones are the same backend.
#[derive(Clone)]
pub struct CudaBackend {
    pub(crate) gpu: Arc<Gpu>,
}

impl CudaBackend {
    /// The architecture that kernels are compiled for: `sm_90`.
    pub fn tier(&self) -> String {
        format!("sm_{}", self.gpu.arch)
    }

    /// As [`Backend::load`], for the bank's own interface: device pointers, and the caller's streams.
    ///
    /// # Errors
    /// As [`Backend::load`].
    pub fn load_bank(
        &self,
        layer: &LayerSpec,
        experts: &[u32],
        from: &dyn WeightSource,
        context: &LoadContext,
    ) -> Result<CudaBank> {
        self.probe(layer)?;
        let failed = |what: String| failed(&self.gpu, layer.index, what);
        let planned = ExpertLayout::new(layer)?;
        let layout = match experts.first() {
            Some(&first) => planned.with_scales(&read(layer, first, from)?),
            None => planned,
        };
        let [gate, _, down] = layout.of;
        let products = [self.gpu.products(gate.codes)?, self.gpu.products(down.codes)?];
        let around = self.gpu.around()?;
        let bytes = layout.bytes * experts.len();
        let weights = Buffer::new(&self.gpu.context, bytes, &format!("{} experts", experts.len())).map_err(failed)?;
        let shape = Shape { hidden: layer.hidden, activation: layer.activation, layout };
        let bank = CudaBank {
            gpu: self.gpu.clone(),
            inner: Arc::new(Bank {
                layer: layer.clone(),
                shape,
                products,
                around,
                weights,
                count: experts.len(),
                experts: Mutex::new(experts.to_vec()),
            }),
            team: context.team.clone(),
            uploads: Mutex::default(),
        };
        let mut uploads = Uploads::new(&self.gpu, bank.inner.shape.layout.bytes).map_err(failed)?;
        for (local, &expert) in experts.iter().enumerate() {
            uploads.send(&bank, local, expert, from)?;
            context.progress.advance(layer.expert_bytes())?;
        }
        uploads.finish().map_err(failed)?;
        // Staging memory stays only for banks whose experts are exchanged.
        if context.replaceable {
            *bank.uploads.lock().unwrap_or_else(PoisonError::into_inner) = Some(uploads);
        }
        Ok(bank)
    }
}

pub(crate) fn failed(gpu: &Gpu, layer: usize, what: String) -> Error {
    Error::Backend { backend: gpu.name.clone(), layer, what }
}

/// The matrices of an expert, with scales that are numbers.
fn read(layer: &LayerSpec, expert: u32, from: &dyn WeightSource) -> Result<[Matrix; 3]> {
    let read = |proj: Proj| -> Result<Matrix> {
        let matrix = from.matrix(layer.index, expert as usize, proj)?;
        matrix.check_scales().map_err(|what| at_tensor(layer, expert, proj, from, what))?;
        Ok(matrix)
    };
    Ok([read(Proj::Gate)?, read(Proj::Up)?, read(Proj::Down)?])
}

fn at_tensor(layer: &LayerSpec, expert: u32, proj: Proj, from: &dyn WeightSource, what: String) -> Error {
    let (file, name) = from.tensor_name(layer.index, expert as usize, proj);
    Error::tensor(file, name, what)
}

/// An expert's matrices and biases, in the order of the device.
fn pack(
    layer: &LayerSpec,
    layout: &ExpertLayout,
    expert: u32,
    from: &dyn WeightSource,
    threads: Threads<'_>,
    out: &mut [u8],
) -> Result<()> {
    let matrices = read(layer, expert, from)?;
    for (i, (proj, matrix)) in Proj::ALL.into_iter().zip(&matrices).enumerate() {
        let bias = if layer.biases { from.bias(layer.index, expert as usize, proj)? } else { None };
        let out = &mut out[layout.at[i]..][..layout.of[i].bytes()];
        layout.of[i]
            .pack(matrix, bias.as_deref(), threads, out)
            .map_err(|what| at_tensor(layer, expert, proj, from, what))?;
    }
    drop(matrices);
    from.release(layer.index, expert as usize);
    Ok(())
}

/// Two buffers of an expert each, which are filled in turns while the other one is copied.
struct Uploads {
    stream: [Stream; 2],
    buffers: [Pinned; 2],
    next: usize,
}

impl Uploads {
    fn new(gpu: &Gpu, bytes: usize) -> Result<Self, String> {
        let context = &gpu.context;
        Ok(Uploads {
            stream: [Stream::new(context)?, Stream::new(context)?],
            buffers: [Pinned::new(context, bytes)?, Pinned::new(context, bytes)?],
            next: 0,
        })
    }

    /// Packs an expert and starts its copy to the place of local expert `local`.
    fn send(&mut self, bank: &CudaBank, local: usize, expert: u32, from: &dyn WeightSource) -> Result<()> {
        let threads = |n: usize, body: &(dyn Fn(usize) + Sync)| bank.team.region().run(n, |i, _| body(i));
        self.pack(bank, expert, from, &threads)?;
        self.copy(bank, local).map_err(|what| failed(&bank.gpu, bank.inner.layer.index, what))
    }

    /// Packs an expert, for [`Uploads::copy`].
    fn pack(&mut self, bank: &CudaBank, expert: u32, from: &dyn WeightSource, threads: Threads<'_>) -> Result<()> {
        let (layer, layout) = (&bank.inner.layer, &bank.inner.shape.layout);
        let (stream, buffer) = (&self.stream[self.next], &mut self.buffers[self.next]);
        stream
            .settle("copying experts to the device", &[buffer])
            .map_err(|what| failed(&bank.gpu, layer.index, what))?;
        pack(layer, layout, expert, from, threads, buffer.bytes())
    }

    /// Starts the copy of what was packed last to the place of local expert `local`.
    fn copy(&mut self, bank: &CudaBank, local: usize) -> Result<(), String> {
        let bytes = bank.inner.shape.layout.bytes;
        self.stream[self.next].upload(&bank.inner.weights, local * bytes, &self.buffers[self.next], bytes)?;
        self.next = 1 - self.next;
        Ok(())
    }

    /// Waits for all that was started.
    fn finish(&self) -> Result<(), String> {
        let [a, b] = &self.buffers;
        let first = self.stream[0].settle("waiting for experts", &[a]);
        first.and(self.stream[1].settle("waiting for experts", &[b]))
    }
}

/// Packing for a streamed layer, which no team is there for.
fn spread(tasks: usize, body: &(dyn Fn(usize) + Sync)) {
    let next = AtomicUsize::new(0);
    let take = || {
        while let Some(i) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&i| i < tasks) {
            body(i)
        }
    };
    let helpers = std::thread::available_parallelism().map_or(0, |n| n.get() - 1).min(tasks.saturating_sub(1));
    std::thread::scope(|scope| {
        for _ in 0..helpers {
            // Where the system has no thread, the others do its share.
            let _ = std::thread::Builder::new().spawn_scoped(scope, take);
        }
        take();
    });
}

/// All of a streamed call. Two experts are on their way at a time, each on a stream of its own: one is packed while the other is copied or computes.
fn stream(gpu: &Arc<Gpu>, layer: &LayerSpec, from: &dyn WeightSource, mut work: Work) -> Result<Work> {
    let failed = |what: String| failed(gpu, layer.index, what);
    let Some(first) = work.experts.first() else { return Ok(work) };
    let layout = ExpertLayout::new(layer)?.with_scales(&read(layer, first.local, from)?);
    let [gate, _, down] = &layout.of;
    let products = [gpu.products(gate.codes)?, gpu.products(down.codes)?];
    let around = gpu.around()?;
    let bytes = layout.bytes;
    let shape = Shape { hidden: layer.hidden, activation: layer.activation, layout };
    let both = products.iter().all(|p| p.many.is_some());
    // Each expert's weights are the only ones of its buffer.
    let tiles = call::tiles(&work, both, |_| 0).map_err(failed)?;
    let counts = Counts::of(&work, &tiles);
    let places = Places::new(&shape, counts);
    let back = work.tokens * work.hidden * 4;
    let slots = Buffer::new(&gpu.context, bytes, "an expert on its way").map_err(failed)?;
    let slots = [slots, Buffer::new(&gpu.context, bytes, "an expert on its way").map_err(failed)?];
    let mut uploads = Uploads::new(gpu, bytes).map_err(failed)?;
    let mut lane = gpu.lane(places.sent, back, places.bytes).map_err(failed)?;
    call::write(&work, &tiles, &places, lane.there.bytes());
    let launch = |stream, weights| Launch {
        stream,
        around: &around,
        products: products.each_ref().map(|p| &**p),
        shape: &shape,
        weights,
        scratch: &lane.scratch,
        places: &places,
        counts,
    };
    lane.stream.upload(&lane.scratch, 0, &lane.there, places.sent).map_err(failed)?;
    // SAFETY: the input is in the scratch, which is freed when the device has done with it.
    #[allow(unsafe_code)]
    unsafe { launch(&lane.stream, &slots[0]).inputs(At::Scratch(places.input), counts.element == 4) }
        .map_err(failed)?;
    lane.stream.wait("copying inputs").map_err(failed)?;
    let mut at = [0, 0];
    for (i, group) in work.experts.iter().enumerate() {
        let (stream, buffer) = (&uploads.stream[i % 2], &mut uploads.buffers[i % 2]);
        stream.settle("waiting for experts", &[buffer]).map_err(failed)?;
        pack(layer, &shape.layout, group.local, from, &spread, buffer.bytes())?;
        stream.upload(&slots[i % 2], 0, buffer, bytes).map_err(failed)?;
        let mut own = [at[0]..at[0], at[1]..at[1]];
        let which = usize::from(both && group.rows.len() > call::FEW);
        own[which].end += group.rows.len().div_ceil([call::FEW, call::MANY][which]);
        at = own.each_ref().map(|r| r.end);
        // SAFETY: inputs, rows and tiles were waited for above; weights are before this on its stream. All buffers are freed when the device has done with them.
        #[allow(unsafe_code)]
        unsafe { launch(stream, &slots[i % 2]).products(own) }.map_err(failed)?;
    }
    uploads.finish().map_err(failed)?;
    // SAFETY: rows of all experts were waited for.
    #[allow(unsafe_code)]
    unsafe { launch(&lane.stream, &slots[0]).outputs(At::Scratch(places.out), false) }.map_err(failed)?;
    lane.stream.download(&lane.back, &lane.scratch, places.out, back).map_err(failed)?;
    lane.stream.settle("waiting for outputs", &[&lane.there, &lane.back]).map_err(failed)?;
    add(&mut work.output, lane.back.bytes());
    gpu.idle(lane);
    Ok(work)
}

/// Adds F32 numbers as the device wrote them.
fn add(output: &mut [f32], sums: &[u8]) {
    output.iter_mut().zip(sums.as_chunks::<4>().0).for_each(|(o, v)| *o += f32::from_ne_bytes(*v));
}

impl Backend for CudaBackend {
    fn name(&self) -> &str {
        &self.gpu.name
    }

    fn probe(&self, layer: &LayerSpec) -> Result<Fit, Unsupported> {
        let layout = ExpertLayout::new(layer)?;
        call::rule(layer.activation).map_err(Unsupported::new)?;
        let [gate, _, down] = &layout.of;
        let kernels = match gate.codes == down.codes {
            true => gate.codes.name().to_string(),
            false => format!("{} and {}", gate.codes.name(), down.codes.name()),
        };
        Ok(Fit {
            rank: RANK,
            tier: self.tier(),
            how: format!("mma of bf16, {kernels} in lanes' order, exact in registers"),
            packed_bytes: (layout.bytes * layer.experts) as u64,
            mapped_bytes: 0,
            // As `Places` has it with inputs in F32 and all of a token's experts here; buffers grow to powers of two.
            scratch_bytes_per_token: {
                let each_row = down.padded_cols() * 2 + layer.hidden * 4 + 12;
                2 * (layer.hidden * 8 + gate.padded_cols() * 2 + 8 + layer.top_k * each_row) as u64
            },
            inputs: [InputLayout::Bf16; 2],
        })
    }

    fn load(
        &self,
        layer: &LayerSpec,
        experts: &[u32],
        from: &dyn WeightSource,
        context: &LoadContext,
    ) -> Result<Box<dyn ExpertBank>> {
        Ok(Box::new(self.load_bank(layer, experts, from, context)?))
    }

    fn probe_stream(&self, layer: &LayerSpec) -> Result<Streaming, Unsupported> {
        self.probe(layer)?;
        let bytes = 2 * ExpertLayout::new(layer)?.bytes as u64;
        Ok(Streaming { device_bytes: bytes, host_bytes: bytes })
    }

    fn stream(&self, layer: &LayerSpec, from: &Arc<dyn WeightSource>, work: Work) -> Pending<Work> {
        let (gpu, layer, from) = (self.gpu.clone(), layer.clone(), from.clone());
        let (name, index) = (gpu.name.clone(), layer.index);
        let run = move || stream(&gpu, &layer, &*from, work);
        let failed = move |what: String| Error::Backend { backend: name, layer: index, what };
        match std::thread::Builder::new().name("kt-cuda-stream".into()).spawn(run) {
            Ok(thread) => Pending::new(move || match thread.join() {
                Ok(result) => result,
                Err(_) => Err(failed("panicked while it streamed experts".into())),
            }),
            Err(why) => Pending::ready(Err(failed(format!("no thread to stream experts: {why}")))),
        }
    }

    fn device(&self) -> Option<Device> {
        const MEMORY_KHZ: i32 = 36;
        const BUS_BITS: i32 = 37;
        let (free_bytes, total_bytes) = self.gpu.context.memory().ok()?;
        let number = |which| self.gpu.context.attribute(which).ok().filter(|&v| v > 0).map(f64::from);
        // Two transfers a clock.
        let read = number(MEMORY_KHZ).zip(number(BUS_BITS)).map(|(khz, bits)| 2.0 * khz * 1e3 * bits / 8.0);
        Some(Device { label: self.gpu.label.clone(), total_bytes, free_bytes, read_bytes_per_second: read, call: CALL })
    }
}

/// Experts of one layer in the memory of a device.
pub struct CudaBank {
    pub(crate) gpu: Arc<Gpu>,
    inner: Arc<Bank>,
    team: Arc<Team>,
    /// Of a bank whose experts are exchanged.
    uploads: Mutex<Option<Uploads>>,
}

/// What work under way needs of it.
pub(crate) struct Bank {
    pub layer: LayerSpec,
    shape: Shape,
    products: [Arc<Products>; 2],
    pub around: Arc<Around>,
    weights: Buffer,
    /// How many experts.
    count: usize,
    /// The layer's experts that these are.
    experts: Mutex<Vec<u32>>,
}

/// Work on the device. Dropped, it waits before others get its buffers.
struct Flight {
    gpu: Arc<Gpu>,
    bank: Arc<Bank>,
    lane: Option<Lane>,
}

impl Flight {
    /// Waits, and gives the lane to `read`.
    fn land<T>(&mut self, read: impl FnOnce(&mut Lane) -> T) -> Result<T, String> {
        let Some(mut lane) = self.lane.take() else { return Err("was waited for already".into()) };
        // A lane whose stream fails is not used again.
        lane.stream.settle("waiting for experts", &[&lane.there, &lane.back])?;
        let result = read(&mut lane);
        self.gpu.idle(lane);
        Ok(result)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if self.lane.is_some() {
            let _ = self.land(|_| ());
        }
    }
}

impl CudaBank {
    fn start(&self, work: &Work) -> Result<Flight, String> {
        let bank = &self.inner;
        let tiles = call::tiles(work, bank.products.iter().all(|p| p.many.is_some()), |local| local)?;
        let counts = Counts::of(work, &tiles);
        let places = Places::new(&bank.shape, counts);
        let back = work.tokens * work.hidden * 4;
        let lane = self.gpu.lane(places.sent, back, places.bytes)?;
        let mut flight = Flight { gpu: self.gpu.clone(), bank: bank.clone(), lane: Some(lane) };
        let Some(lane) = &mut flight.lane else { return Err("has no lane".into()) };
        call::write(work, &tiles, &places, lane.there.bytes());
        lane.stream.upload(&lane.scratch, 0, &lane.there, places.sent)?;
        let launch = Launch {
            stream: &lane.stream,
            around: &bank.around,
            products: bank.products.each_ref().map(|p| &**p),
            shape: &bank.shape,
            weights: &bank.weights,
            scratch: &lane.scratch,
            places: &places,
            counts,
        };
        // SAFETY: all places are in the scratch, were written above, and the flight keeps scratch and weights until the stream is done.
        #[allow(unsafe_code)]
        unsafe { launch.run(At::Scratch(places.input), counts.element == 4, At::Scratch(places.out), false) }?;
        lane.stream.download(&lane.back, &lane.scratch, places.out, back)?;
        Ok(flight)
    }
}

/// How inputs on the device are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// IEEE single precision.
    F32,
    /// Upper half of an F32.
    Bf16,
}

/// A batch on the device, row-major.
#[derive(Debug, Clone, Copy)]
pub struct DeviceBatch {
    /// Rows: 1 to as many as were prepared for.
    pub tokens: usize,
    /// Address of hidden states `[tokens, hidden]`.
    pub input: u64,
    /// What they are made of.
    pub element: Element,
    /// Address of the chosen experts `[tokens, top_k]`, I32: the layer's numbers. Those that this bank does not hold, and negative ones, are passed over.
    pub topk_ids: u64,
    /// Address of their weights `[tokens, top_k]`, F32.
    pub topk_weights: u64,
    /// Address of outputs `[tokens, hidden]`, F32.
    pub output: u64,
    /// Whether results are added to outputs, or take their place.
    pub add: bool,
}

/// A bank ready for batches of up to some tokens that are on the device, see [`CudaBank::prepare`].
pub struct PreparedCall {
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) bank: Arc<Bank>,
    scratch: Buffer,
    homes: Buffer,
    places: Places,
    tokens: usize,
    top_k: usize,
}

impl PreparedCall {
    /// Puts the experts' work on a stream of the caller's, behind what is there, and returns. Nothing is allocated, copied from or to the host, or waited
    /// for: the stream may be one that is captured into a graph. Each token's result has the same bits as by [`ExpertBank::submit`], which adds to zero.
    ///
    /// # Errors
    /// More tokens than were prepared for, or none; what the driver says: nothing is known of the outputs then.
    ///
    /// # Safety
    /// - `stream` is a `CUstream` of the device's primary context, or null;
    /// - the batch's addresses are of this device's memory, of the sizes and alignments that their types say, and so they stay until the stream (or
    ///   each launch of the graph) is past this work;
    /// - so does this value, and its calls are one after the other: they share its memory.
    #[allow(unsafe_code)] // device pointers are the caller's
    pub unsafe fn submit_on(&self, stream: *mut std::ffi::c_void, batch: &DeviceBatch) -> Result<()> {
        self.check(batch)?;
        // SAFETY: the caller's promise; the borrow ends with this call.
        let stream = unsafe { Stream::borrowed(&self.gpu.context, stream) };
        // SAFETY: the caller's promise.
        let begun = unsafe { self.begin(&stream, batch) };
        // SAFETY: the caller's promise; rows are what was begun before, on the same stream.
        let done = begun.and_then(|()| unsafe { self.end(&stream, batch.tokens, batch.output, batch.add) });
        done.map_err(|what| failed(&self.gpu, self.bank.layer.index, what))
    }

    /// # Errors
    /// A batch of another size than was prepared for.
    fn check(&self, batch: &DeviceBatch) -> Result<()> {
        match (1..=self.tokens).contains(&batch.tokens) {
            true => Ok(()),
            false => Err(failed(
                &self.gpu,
                self.bank.layer.index,
                format!("a batch of {} tokens; the call was prepared for 1 to {}", batch.tokens, self.tokens),
            )),
        }
    }

    fn launch<'a>(&'a self, stream: &'a Stream, tokens: usize) -> Launch<'a> {
        let bank = &self.bank;
        Launch {
            stream,
            around: &bank.around,
            products: bank.products.each_ref().map(|p| &**p),
            shape: &bank.shape,
            weights: &bank.weights,
            scratch: &self.scratch,
            places: &self.places,
            counts: bank.most(tokens, self.top_k),
        }
    }

    /// The experts' outputs, of each row of the batch's that is theirs.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// As [`PreparedCall::submit_on`].
    #[allow(unsafe_code)] // device pointers are the caller's
    pub(crate) unsafe fn begin(&self, stream: &Stream, batch: &DeviceBatch) -> Result<(), String> {
        let (launch, bank) = (self.launch(stream, batch.tokens), &self.bank);
        let (choices, experts) = ((batch.topk_ids, batch.topk_weights), (bank.layer.experts, bank.count));
        // SAFETY: the caller's promise.
        unsafe { launch.group(choices, &self.homes, self.top_k, experts) }?;
        // SAFETY: the caller's promise.
        unsafe { launch.inputs(At::Device(batch.input), batch.element == Element::F32) }?;
        // SAFETY: inputs and rows are written before, on the same stream.
        unsafe { launch.products([0..launch.counts.few, 0..launch.counts.many]) }
    }

    /// The sum of each token's rows: to `output`, or in its place.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// As [`PreparedCall::submit_on`], with this output; behind [`PreparedCall::begin`] of as many tokens.
    #[allow(unsafe_code)] // device pointers are the caller's
    pub(crate) unsafe fn end(&self, stream: &Stream, tokens: usize, output: u64, add: bool) -> Result<(), String> {
        // SAFETY: the caller's promise.
        unsafe { self.launch(stream, tokens).outputs(At::Device(output), add) }
    }
}

impl Bank {
    /// The most rows and tiles that so many choices can come to.
    fn most(&self, tokens: usize, top_k: usize) -> Counts {
        let rows = tokens * top_k;
        // An expert with more than FEW rows goes to `many`, if there is that.
        let both = self.products.iter().all(|p| p.many.is_some());
        let experts = self.count.min(rows);
        let (few, many) = match both {
            true if rows > call::FEW => (experts, (rows / (call::FEW + 1)).min(experts) + rows / call::MANY),
            true => (experts, 0),
            false => (experts + rows / call::FEW, 0),
        };
        Counts { tokens, rows, few, many, element: 0, choices: true, output: false }
    }
}

impl CudaBank {
    /// Allocates all that batches of up to `tokens` tokens with `top_k` choices each need, for [`PreparedCall::submit_on`]. Experts that
    /// are replaced afterwards are not known to it.
    ///
    /// # Errors
    /// No token or no choice, or more than 1048576 choices; too little memory.
    pub fn prepare(&self, tokens: usize, top_k: usize) -> Result<PreparedCall> {
        let experts = self.inner.experts.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.prepare_for(tokens, top_k, |expert| experts.iter().position(|&e| e == expert).map(|i| i as u32))
    }

    /// As [`CudaBank::prepare`], with `local` saying which of its experts each of the layer's is.
    pub(crate) fn prepare_for(
        &self,
        tokens: usize,
        top_k: usize,
        local: impl Fn(u32) -> Option<u32>,
    ) -> Result<PreparedCall> {
        let bank = &self.inner;
        if tokens == 0 || top_k == 0 || tokens.checked_mul(top_k).is_none_or(|n| n > 1 << 20) {
            return Err(Error::Invalid(format!(
                "a call of {tokens} tokens with {top_k} experts each cannot be prepared; 1 to 1048576 choices can"
            )));
        }
        let places = Places::new(&bank.shape, bank.most(tokens, top_k));
        let make = || -> Result<PreparedCall, String> {
            let context = &self.gpu.context;
            let scratch = Buffer::new(context, places.bytes, "rows of a prepared call")?;
            // Behind the homes, a number for each expert that is here.
            let layer = bank.layer.experts;
            let homes = Buffer::new(context, (layer + bank.count) * 4, "experts' places")?;
            let mut table = Pinned::new(context, layer * 4)?;
            for (expert, home) in table.bytes().as_chunks_mut::<4>().0.iter_mut().enumerate() {
                *home = local(expert as u32).unwrap_or(u32::MAX).to_ne_bytes();
            }
            let stream = Stream::new(context)?;
            stream.upload(&homes, 0, &table, layer * 4)?;
            stream.settle("copying experts' places", &[&table])?;
            Ok(PreparedCall { gpu: self.gpu.clone(), bank: bank.clone(), scratch, homes, places, tokens, top_k })
        };
        make().map_err(|what| failed(&self.gpu, bank.layer.index, what))
    }
}

impl ExpertBank for CudaBank {
    fn submit(&self, work: Work) -> Pending<Work> {
        if work.rows.is_empty() {
            return Pending::ready(Ok(work));
        }
        let mut flight = match self.start(&work) {
            Ok(flight) => flight,
            Err(what) => return Pending::ready(Err(failed(&self.gpu, self.inner.layer.index, what))),
        };
        Pending::new(move || {
            let mut work = work;
            let start = Instant::now();
            let added = flight.land(|lane| {
                add(&mut work.output, lane.back.bytes());
            });
            added.map_err(|what| failed(&flight.gpu, flight.bank.layer.index, what))?;
            work.spent = Spent { kernels: Duration::ZERO, waiting: work.spent.waiting + start.elapsed() };
            Ok(work)
        })
    }

    fn packed_bytes(&self) -> u64 {
        (self.inner.shape.layout.bytes * self.inner.count) as u64
    }

    fn replace(&self, local: u32, expert: u32, from: &dyn WeightSource) -> Result<()> {
        self.replacement(local, expert, from)?()
    }

    /// Packed into pinned memory, and copied to the device by the second part.
    fn replacement<'a>(&'a self, local: u32, expert: u32, from: &'a dyn WeightSource) -> Result<Replacement<'a>> {
        let failed = |what| failed(&self.gpu, self.inner.layer.index, what);
        let mut guard = self.uploads.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(uploads) = &mut *guard else {
            return Err(Unsupported::new("this bank was not loaded as one whose experts are replaced").into());
        };
        if local as usize >= self.inner.count {
            return Err(failed(format!("has no local expert {local}, only 0..{}", self.inner.count)));
        }
        // By this thread alone: the team's are at work with the other experts meanwhile.
        uploads.pack(self, expert, from, &|n, body| (0..n).for_each(body))?;
        // The lock stays: what was packed is in the buffer until then.
        Ok(Box::new(move || {
            let Some(uploads) = &mut *guard else { return Err(failed("has no memory for uploads".into())) };
            uploads.copy(self, local as usize).and_then(|()| uploads.finish()).map_err(failed)?;
            let mut experts = self.inner.experts.lock().unwrap_or_else(PoisonError::into_inner);
            experts.iter_mut().skip(local as usize).take(1).for_each(|e| *e = expert);
            Ok(())
        }))
    }
}
