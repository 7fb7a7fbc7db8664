//! Calls of one layer whose memory is all there before they begin, which are started by one thread and waited for by another: for callers
//! that run some of the layer's experts themselves meanwhile, as a stream of a device does.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::{Counted, LayerExperts, Stays};
use crate::cpu::team::Recurring;
use crate::error::{Error, Result};
use crate::pending::contain;
use crate::scheduler::{Home, Share, Splitter};
use crate::stats::{BankUsage, Usage};
use crate::work::{Hidden, Spent, Work};

/// A layer ready for batches of up to so many tokens, one at a time: see [`LayerExperts::prepare`].
///
/// While it lives the layer's experts stay where they are: [`Experts::rebalance`](crate::Experts::rebalance) leaves them alone. Dropping
/// it while a call is under way is sound: the call has its own memory, and ends by itself.
pub struct Prepared {
    shared: Arc<Shared>,
    /// A call that is under way when this is dropped looks for experts itself, and they do not move while it computes.
    _stays: Stays,
}

/// What the banks of a call give, `[tokens, hidden]` each, for adding in the order of the banks: `before`, what the caller has, `after`.
#[derive(Debug)]
pub struct Sums<'a> {
    /// The sum of the banks before the caller's; all of them, where it has none.
    pub before: &'a [f32],
    after: &'a [Vec<f32>],
}

impl Sums<'_> {
    /// Those of the banks after the caller's, one by one.
    pub fn after(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.after.iter().map(Vec::as_slice)
    }
}

struct Shared {
    layer: Arc<LayerExperts>,
    elsewhere: Option<usize>,
    tokens: usize,
    top_k: usize,
    state: Mutex<State>,
    done: Condvar,
}

struct State {
    stage: Stage,
    /// The memory of a call, when nobody computes in it.
    call: Option<Call>,
    /// Whether the runtime's thread has the job before it.
    queued: bool,
}

enum Stage {
    Idle,
    Started,
    Running,
    Done(Result<()>),
}

/// The memory of a call.
struct Call {
    tokens: usize,
    input: Arc<Hidden>,
    ids: Vec<i32>,
    weights: Vec<f32>,
    splitter: Splitter,
    /// By bank.
    shares: Vec<Share>,
    /// By bank. The first becomes the sum of those before the caller's bank, which has none itself.
    outputs: Vec<Vec<f32>>,
    counted: Counted,
}

impl Call {
    /// The input `[tokens, hidden]`, of this length.
    fn input(&mut self, len: usize) -> &mut [f32] {
        // Shared still where work of a call that failed is under way somewhere: that keeps the old one.
        if !matches!(Arc::get_mut(&mut self.input), Some(Hidden::F32(_))) {
            self.input = Arc::new(Hidden::F32(Vec::new()));
        }
        match Arc::get_mut(&mut self.input) {
            Some(Hidden::F32(values)) => {
                values.resize(len, 0.0);
                values
            }
            _ => &mut [],
        }
    }
}

impl LayerExperts {
    /// Allocates all that calls of up to `tokens` tokens with `top_k` experts each need in host memory. `elsewhere` is the bank whose
    /// experts the caller runs itself (an index of [`LayerExperts::banks`]): what the router chose there is counted, and not computed.
    ///
    /// Outputs have the bits of [`LayerExperts::forward`]; experts are not streamed, and none are deferred. A call allocates nothing
    /// where its one bank does not ([`ExpertBank::reserve`](crate::ExpertBank::reserve)): those in host memory do not, with threads of
    /// the team's own; those on devices and of plugins do, and so do calls after one that failed, and those of which a trace is recorded.
    ///
    /// # Errors
    /// No token or no choice, more tokens than the runtime computes at once
    /// ([`pass_tokens`](crate::RuntimeBuilder::pass_tokens)), no such bank, or what a bank says.
    pub fn prepare(self: &Arc<Self>, tokens: usize, top_k: usize, elsewhere: Option<usize>) -> Result<Prepared> {
        let banks = self.banks.len();
        if tokens == 0 || top_k == 0 || tokens > self.pass_tokens || top_k > self.spec.experts {
            return Err(Error::Invalid(format!(
                "calls of {tokens} tokens with {top_k} experts each cannot be prepared for layer {}; 1 to {} tokens (the runtime's \
                 pass_tokens) with 1 to {} experts can",
                self.spec.index, self.pass_tokens, self.spec.experts
            )));
        }
        if let Some(bank) = elsewhere.filter(|&bank| bank >= banks) {
            return Err(Error::Invalid(format!("layer {} has no bank {bank}, only 0..{banks}", self.spec.index)));
        }
        let (rows, outputs) = (tokens * top_k, tokens * self.spec.hidden);
        for (_, bank) in self.banks.iter().enumerate().filter(|(b, _)| Some(*b) != elsewhere) {
            bank.experts.reserve(tokens, top_k).map_err(|e| bank.named(self.spec.index, e))?;
        }
        self.team.reserve_job();
        let mut call = Call {
            tokens: 0,
            input: Arc::new(Hidden::F32(Vec::with_capacity(outputs))),
            ids: Vec::with_capacity(rows),
            weights: Vec::with_capacity(rows),
            splitter: Splitter::default(),
            shares: vec![Share::default(); banks],
            outputs: (0..banks.max(1)).map(|_| Vec::with_capacity(outputs)).collect(),
            counted: Counted::new(self, 0),
        };
        call.splitter.reserve(self.spec.experts, rows, &mut call.shares);
        let stays = {
            // Whoever moves experts has this lock alone, and sees the count.
            let _still = self.placed();
            Stays::new(&self.staying)
        };
        let state = Mutex::new(State { stage: Stage::Idle, call: Some(call), queued: false });
        let layer = self.clone();
        let shared = Arc::new(Shared { layer, elsewhere, tokens, top_k, state, done: Condvar::new() });
        Ok(Prepared { shared, _stays: stays })
    }
}

impl Prepared {
    /// The layer.
    pub fn layer(&self) -> &Arc<LayerExperts> {
        &self.shared.layer
    }

    /// Most tokens of a call.
    pub fn tokens(&self) -> usize {
        self.shared.tokens
    }

    /// Experts of each token.
    pub fn top_k(&self) -> usize {
        self.shared.top_k
    }

    /// Where each of the layer's experts is, as long as this lives.
    pub fn homes(&self) -> Vec<Home> {
        self.shared.layer.placed().homes.clone()
    }

    /// Banks behind the caller's, whose outputs are added after its own: [`Sums::after`] has so many.
    pub fn banks_after(&self) -> usize {
        self.shared.elsewhere.map_or(0, |bank| self.shared.layer.banks.len() - bank - 1)
    }

    /// Starts a call of `tokens` tokens on a thread of the runtime's, and returns. `fill` is called before that, with room for
    ///
    /// - the input `[tokens, hidden]`
    /// - `topk_ids: [tokens, top_k]`, -1 for none
    /// - `topk_weights: [tokens, top_k]`
    ///
    /// What is wrong with the ids, [`Prepared::wait`] says.
    ///
    /// # Errors
    /// More tokens than were prepared for, or none; the call before is under way.
    pub fn start(&self, tokens: usize, fill: impl FnOnce(&mut [f32], &mut [i32], &mut [f32])) -> Result<()> {
        let shared = &self.shared;
        let named =
            |what: &str| Error::Invalid(format!("a prepared call of layer {}: {what}", shared.layer.spec.index));
        if !(1..=shared.tokens).contains(&tokens) {
            return Err(named(&format!("of {tokens} tokens; it was prepared for 1 to {}", shared.tokens)));
        }
        let mut guard = shared.lock();
        let state = &mut *guard;
        let (Stage::Idle | Stage::Done(_), Some(call)) = (&state.stage, &mut state.call) else {
            return Err(named("started while the one before is under way"));
        };
        call.tokens = tokens;
        call.ids.resize(tokens * shared.top_k, 0);
        call.weights.resize(tokens * shared.top_k, 0.0);
        let (mut ids, mut weights) = (std::mem::take(&mut call.ids), std::mem::take(&mut call.weights));
        fill(call.input(tokens * shared.layer.spec.hidden), &mut ids, &mut weights);
        (call.ids, call.weights) = (ids, weights);
        state.stage = Stage::Started;
        if !std::mem::replace(&mut state.queued, true) {
            drop(guard);
            // Without a thread that takes it the call still runs, when it is waited for.
            if !shared.layer.team.enqueue_again(shared.clone()) {
                shared.lock().queued = false;
            }
        }
        Ok(())
    }

    /// Waits for the call that was started, from any thread, and gives what the banks gave to `read`. A call that nobody has begun runs
    /// here.
    ///
    /// # Errors
    /// An id out of range, or a bank that failed or panicked, by name. Nothing was started.
    pub fn wait<T>(&self, read: impl FnOnce(Sums<'_>) -> T) -> Result<T> {
        let shared = &self.shared;
        shared.begin(false);
        let mut state = shared.lock();
        while matches!(state.stage, Stage::Started | Stage::Running) {
            state = shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        match std::mem::replace(&mut state.stage, Stage::Idle) {
            Stage::Done(result) => result?,
            _ => {
                let index = shared.layer.spec.index;
                return Err(Error::Invalid(format!(
                    "a prepared call of layer {index} is waited for, and was not started"
                )));
            }
        }
        let outputs = state.call.as_ref().map_or(&[][..], |call| &call.outputs);
        let (before, after) = outputs.split_at(shared.elsewhere.map_or(outputs.len(), |bank| bank + 1));
        Ok(read(Sums { before: before.first().map_or(&[], Vec::as_slice), after }))
    }
}

impl Recurring for Shared {
    fn run(&self) {
        self.begin(true);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the call unless somebody else has begun it; `dequeued` by the runtime's thread.
    fn begin(&self, dequeued: bool) {
        let mut state = self.lock();
        if dequeued {
            state.queued = false;
        }
        if !matches!(state.stage, Stage::Started) {
            return;
        }
        let Some(mut call) = state.call.take() else { return };
        state.stage = Stage::Running;
        drop(state);
        let layer = &self.layer;
        let backend = layer.banks.first().map_or("", |bank| &bank.backend);
        let result = contain(backend, layer.spec.index, || self.compute(&mut call)).and_then(|r| r);
        let mut state = self.lock();
        state.call = Some(call);
        state.stage = Stage::Done(result);
        drop(state);
        self.done.notify_all();
    }

    fn compute(&self, call: &mut Call) -> Result<()> {
        let (layer, start) = (&self.layer, Instant::now());
        layer.check_ids(&call.ids, self.top_k)?;
        let placed = layer.placed();
        layer.check_whole(&placed)?;
        call.counted.usage = Usage { calls: 1, tokens: call.tokens as u64, ..Usage::default() };
        call.counted.banks.fill(BankUsage::default());
        layer.trace(call.tokens, &call.ids);
        call.splitter.split(&call.ids, &call.weights, self.top_k, &placed.homes, &mut call.shares);
        layer.count(&placed, &call.shares, false, &mut call.counted);
        self.run_banks(call)?;
        call.counted.usage.wall = start.elapsed();
        let mut observed = layer.observed();
        observed.usage += call.counted.usage;
        observed.banks.iter_mut().zip(&call.counted.banks).for_each(|(all, one)| *all += *one);
        Ok(())
    }

    /// All banks work at the same time. Where one fails the others are waited for all the same.
    fn run_banks(&self, call: &mut Call) -> Result<()> {
        let (layer, tokens) = (&self.layer, call.tokens);
        // The bank that this thread works for: the first that has anything to do, as in any other call.
        let (mut own, mut others) = (None, Vec::new());
        for (b, (share, output)) in call.shares.iter_mut().zip(&mut call.outputs).enumerate() {
            output.clear();
            output.resize(tokens * layer.spec.hidden, 0.0);
            if Some(b) == self.elsewhere || share.rows.is_empty() {
                continue;
            }
            let work = layer.work(&call.input, &(0..tokens), std::mem::take(share), std::mem::take(output));
            match own {
                None => own = Some((b, work)),
                Some(_) => others.push((b, layer.banks[b].experts.submit(work))),
            }
        }
        let mut failed = None;
        let mut take = |b: usize, done: Result<Work>, since: Instant| match done {
            Ok(work) => {
                call.shares[b] = Share { rows: work.rows, experts: work.experts };
                call.outputs[b] = work.output;
                call.counted.banks[b].waited += since.elapsed();
                work.spent
            }
            Err(e) => {
                failed.get_or_insert(layer.banks[b].named(layer.spec.index, e));
                Spent::default()
            }
        };
        if let Some((b, work)) = own {
            let since = Instant::now();
            let done = layer.banks[b].experts.run(work);
            call.counted.usage += take(b, done, since);
        }
        for (b, pending) in others {
            let since = Instant::now();
            let done = pending.wait();
            let (spent, waited) = (take(b, done, since), since.elapsed());
            let kernels = spent.kernels.min(waited);
            call.counted.usage += Spent { kernels, waiting: waited - kernels };
        }
        if let Some(e) = failed {
            return Err(e);
        }
        let last = self.elsewhere.unwrap_or(layer.banks.len());
        if let Some((sum, outputs)) = call.outputs.split_first_mut() {
            let with_rows = outputs.iter().zip(call.shares.iter().skip(1)).take(last.saturating_sub(1));
            for (output, _) in with_rows.filter(|(_, share)| !share.rows.is_empty()) {
                sum.iter_mut().zip(output).for_each(|(sum, v)| *sum += v);
            }
        }
        Ok(())
    }
}
