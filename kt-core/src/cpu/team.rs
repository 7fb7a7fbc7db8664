//! A fixed team of threads for work of microseconds: the caller is one of them, the others spin briefly and then park.
//!
//! ```text
//! caller                                   worker
//! write job; state = open(epoch); unpark   sees open(epoch) != last: inside += 1; state still open(epoch)?
//! take tasks until none is left                yes: take tasks until none is left
//! state = closed(epoch)                        inside -= 1; last = epoch
//! wait until inside == 0                   spin for the next epoch, then park
//! ```
//!
//! The caller waits only for workers that came inside, so a worker that the system has not scheduled costs its share of the
//! work and nothing more: two processes on the same cores slow each other down by their work, not by their waiting.
//! Tasks are handed out by one counter; which thread runs a task never changes a result.

#![allow(unsafe_code)] // lends closures to threads

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::kernel::Scratch;
use super::memory::AlignedBytes;
use crate::error::{Error, Result};
use crate::pending::{Pending, contain};
use crate::work::Spent;

/// How long a worker spins for the next job before it parks: longer than the gap between two layer calls of a running
/// model, shorter than what a neighbour on the same core would notice.
const SPIN: Duration = Duration::from_micros(60);

/// How many CPUs this process may use: affinity and cgroup quota counted.
pub fn allowed_cpus() -> usize {
    thread::available_parallelism().map_or(1, |n| n.get())
}

type Body<'a> = dyn Fn(usize, &mut Scratch) + Sync + 'a;

struct Shared {
    /// `epoch << 1 | open`.
    state: AtomicU64,
    inside: AtomicUsize,
    next: AtomicUsize,
    job: UnsafeCell<Option<Job>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
}

#[derive(Clone, Copy)]
struct Job {
    body: *const Body<'static>,
    tasks: usize,
}

// SAFETY: `job` is written only by the thread that holds the team's lock while the state is closed and `inside` is 0, and read
// only by workers that are counted in `inside` and saw the state open after that (SeqCst on both sides); the rest is atomics
// and a mutex.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is dereferenced only under the protocol above, from any thread, and points to a Sync closure.
unsafe impl Send for Shared {}

impl Shared {
    fn work(&self, job: Job, scratch: &mut Scratch) {
        let result = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: the caller of `run_tasks` keeps the closure alive until `inside` is 0 again, and this thread is either that
            // caller or counted in `inside`.
            let body = unsafe { &*job.body };
            loop {
                let task = self.next.fetch_add(1, Ordering::Relaxed);
                if task >= job.tasks {
                    break;
                }
                body(task, scratch);
            }
        }));
        if let Err(payload) = result {
            self.next.store(job.tasks, Ordering::Relaxed);
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
        }
    }
}

struct Worker {
    parked: Arc<AtomicBool>,
    handle: JoinHandle<()>,
}

fn worker(shared: &Shared, parked: &AtomicBool) {
    let mut scratch = Scratch::default();
    let mut last = 0;
    loop {
        let mut since = None;
        let mut spins = 0u32;
        let state = loop {
            let state = shared.state.load(Ordering::Acquire);
            if state & 1 == 1 && state != last {
                break state;
            }
            if shared.stop.load(Ordering::Relaxed) {
                return;
            }
            std::hint::spin_loop();
            spins += 1;
            if spins.is_multiple_of(128) {
                let start = *since.get_or_insert_with(Instant::now);
                if start.elapsed() > SPIN {
                    parked.store(true, Ordering::SeqCst);
                    let state = shared.state.load(Ordering::SeqCst);
                    let new_job = state & 1 == 1 && state != last;
                    if !new_job && !shared.stop.load(Ordering::SeqCst) {
                        thread::park();
                    }
                    parked.store(false, Ordering::SeqCst);
                    since = None;
                }
            }
        };
        shared.inside.fetch_add(1, Ordering::SeqCst);
        if shared.state.load(Ordering::SeqCst) == state {
            // SAFETY: this thread is counted in `inside` and saw the state open afterwards, so the caller has written the job
            // and will not touch it before `inside` is 0.
            let job = unsafe { *shared.job.get() };
            if let Some(job) = job {
                shared.work(job, &mut scratch);
            }
        }
        shared.inside.fetch_sub(1, Ordering::SeqCst);
        last = state;
    }
}

/// Buffers that one region at a time uses: the packed inputs of a layer call.
#[derive(Default)]
pub(crate) struct Buffers {
    pub x: [AlignedBytes; 2],
    pub h: AlignedBytes,
}

#[derive(Default)]
struct CallerState {
    scratch: Scratch,
    buffers: Buffers,
}

/// A team of threads. Dropping it ends them.
pub struct Team {
    shared: Arc<Shared>,
    workers: Vec<Worker>,
    caller: Mutex<CallerState>,
    dispatcher: Mutex<Option<Dispatcher>>,
}

struct Dispatcher {
    queue: std::sync::mpsc::Sender<Box<dyn FnOnce() + Send>>,
}

impl Team {
    /// A team of `threads` threads, the caller of [`Team::region`] counted as one; never more than [`allowed_cpus`].
    ///
    /// # Errors
    /// The system refuses to start a thread.
    pub fn new(threads: usize) -> Result<Arc<Team>> {
        Self::start(threads.clamp(1, allowed_cpus()))
    }

    /// A team of exactly `threads` threads, for tests of what must not depend on their number.
    ///
    /// # Errors
    /// As [`Team::new`].
    #[cfg(any(test, feature = "testing"))]
    pub fn oversubscribed(threads: usize) -> Result<Arc<Team>> {
        Self::start(threads.max(1))
    }

    fn start(threads: usize) -> Result<Arc<Team>> {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            inside: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
        });
        let mut team = Team { shared, workers: Vec::new(), caller: Mutex::default(), dispatcher: Mutex::new(None) };
        for i in 1..threads {
            let shared = team.shared.clone();
            let parked = Arc::new(AtomicBool::new(false));
            let flag = parked.clone();
            let handle = thread::Builder::new()
                .name(format!("kt-{i}"))
                .spawn(move || worker(&shared, &flag))
                .map_err(|source| Error::Io { path: format!("(starting thread {i} of {threads})").into(), source })?;
            team.workers.push(Worker { parked, handle });
        }
        Ok(Arc::new(team))
    }

    /// Threads of the team, the caller counted.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Enters a parallel region: the team works for this caller until the region is dropped. Other callers wait.
    pub fn region(&self) -> Region<'_> {
        let mut spent = Spent::default();
        let state = self.caller.try_lock().unwrap_or_else(|error| match error {
            TryLockError::Poisoned(poisoned) => poisoned.into_inner(),
            TryLockError::WouldBlock => {
                let start = Instant::now();
                let state = self.caller.lock().unwrap_or_else(PoisonError::into_inner);
                spent.waiting = start.elapsed();
                state
            }
        });
        Region { team: self, state, spent }
    }

    /// Starts `f` on a thread of its own and returns at once; whoever waits before it has started runs it instead.
    pub fn spawn<T: Send + 'static>(
        &self,
        backend: &str,
        layer: usize,
        f: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Pending<T> {
        let slot = Arc::new(Slot { state: Mutex::new(SlotState::Queued(Box::new(f))), done: Condvar::new() });
        let theirs = slot.clone();
        let name = backend.to_string();
        let job = Box::new(move || theirs.run(&name, layer));
        let mut dispatcher = self.dispatcher.lock().unwrap_or_else(PoisonError::into_inner);
        if dispatcher.is_none() {
            let (queue, jobs) = std::sync::mpsc::channel::<Box<dyn FnOnce() + Send>>();
            let started = thread::Builder::new().name("kt-submit".into()).spawn(move || {
                for job in jobs {
                    job();
                }
            });
            // Without the thread the work still runs, when it is waited for.
            if started.is_ok() {
                *dispatcher = Some(Dispatcher { queue });
            }
        }
        if let Some(d) = dispatcher.as_ref() {
            let _ = d.queue.send(job);
        }
        drop(dispatcher);
        let name = backend.to_string();
        Pending::new(move || slot.wait(&name, layer))
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for w in self.workers.drain(..) {
            w.handle.thread().unpark();
            // A worker's panics are caught in `work`; nothing else in it can panic.
            let _ = w.handle.join();
        }
    }
}

struct Slot<T> {
    state: Mutex<SlotState<T>>,
    done: Condvar,
}

enum SlotState<T> {
    Queued(Box<dyn FnOnce() -> Result<T> + Send>),
    Running,
    Done(Result<T>),
    Taken,
}

impl<T> Slot<T> {
    fn lock(&self) -> MutexGuard<'_, SlotState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the job unless somebody else has begun it.
    fn run(&self, backend: &str, layer: usize) {
        let mut state = self.lock();
        if !matches!(*state, SlotState::Queued(_)) {
            return;
        }
        let SlotState::Queued(f) = std::mem::replace(&mut *state, SlotState::Running) else { return };
        drop(state);
        let result = contain(backend, layer, f).and_then(|r| r);
        *self.lock() = SlotState::Done(result);
        self.done.notify_all();
    }

    fn wait(&self, backend: &str, layer: usize) -> Result<T> {
        self.run(backend, layer);
        let mut state = self.lock();
        loop {
            match std::mem::replace(&mut *state, SlotState::Taken) {
                SlotState::Done(result) => return result,
                other => *state = other,
            }
            state = self.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A parallel region: several runs of tasks one after the other, with the team kept awake in between.
pub struct Region<'a> {
    team: &'a Team,
    state: MutexGuard<'a, CallerState>,
    spent: Spent,
}

impl Region<'_> {
    /// Threads of the team.
    pub fn threads(&self) -> usize {
        self.team.threads()
    }

    /// What the caller did with its time so far: in tasks, and waiting for the others. Waking threads is neither.
    pub fn spent(&self) -> Spent {
        self.spent
    }

    /// Lends the layer call's buffers; give them back with [`Region::put_buffers`].
    pub(crate) fn take_buffers(&mut self) -> Buffers {
        std::mem::take(&mut self.state.buffers)
    }

    pub(crate) fn put_buffers(&mut self, buffers: Buffers) {
        self.state.buffers = buffers;
    }

    /// Runs `body(0..tasks)` on the team and returns when all are done.
    ///
    /// # Panics
    /// With the payload of the first task that panicked; the others are not started any more.
    pub fn run(&mut self, tasks: usize, body: impl Fn(usize, &mut Scratch) + Sync) {
        let scratch = &mut self.state.scratch;
        let shared = &*self.team.shared;
        if tasks <= 1 || self.team.workers.is_empty() {
            let start = Instant::now();
            for task in 0..tasks {
                body(task, scratch);
            }
            self.spent.kernels += start.elapsed();
            return;
        }
        let body: &Body<'_> = &body;
        // SAFETY: only the lifetime changes; the pointer is used until this function returns and not after, as `Closing` below
        // waits for every worker that may hold it.
        let body: *const Body<'static> = unsafe { std::mem::transmute::<*const Body<'_>, *const Body<'static>>(body) };
        let job = Job { body, tasks };
        let epoch = (shared.state.load(Ordering::Relaxed) >> 1) + 1;
        // SAFETY: the state is closed and `inside` is 0 (the last run ended so, and this thread holds the team's lock), so no
        // worker reads the job.
        unsafe { *shared.job.get() = Some(job) };
        shared.next.store(0, Ordering::Relaxed);
        shared.state.store(epoch << 1 | 1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        for w in &self.team.workers {
            if w.parked.load(Ordering::SeqCst) {
                w.handle.thread().unpark();
            }
        }
        let start = Instant::now();
        shared.work(job, scratch);
        shared.state.store(epoch << 1, Ordering::SeqCst);
        let done = Instant::now();
        self.spent.kernels += done - start;
        let mut spins = 0u32;
        while shared.inside.load(Ordering::SeqCst) != 0 {
            std::hint::spin_loop();
            spins += 1;
            if spins > 20_000 {
                // A worker was descheduled inside a task: let it have this core.
                thread::yield_now();
            }
        }
        if spins > 0 {
            self.spent.waiting += done.elapsed();
        }
        let payload = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(payload) = payload {
            resume_unwind(payload);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_over_many_regions() {
        let team = Team::oversubscribed(4).unwrap();
        for round in 0..3000usize {
            let tasks = round % 37;
            let hits: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            let mut region = team.region();
            for _ in 0..2 {
                region.run(tasks, |t, _| {
                    hits[t].fetch_add(1, Ordering::Relaxed);
                });
            }
            assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 2));
            if round % 500 == 0 {
                thread::sleep(Duration::from_millis(2)); // let the workers park
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_survives() {
        let team = Team::oversubscribed(2).unwrap();
        let result = catch_unwind(AssertUnwindSafe(|| {
            team.region().run(10, |t, _| assert!(t != 3, "task three"));
        }));
        assert!(result.is_err());
        let count = AtomicUsize::new(0);
        team.region().run(10, |_, _| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.into_inner(), 10);
    }

    #[test]
    fn callers_from_several_threads_take_turns() {
        let team = Team::oversubscribed(2).unwrap();
        thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for _ in 0..500 {
                        let sum = AtomicUsize::new(0);
                        team.region().run(5, |t, _| {
                            sum.fetch_add(t, Ordering::Relaxed);
                        });
                        assert_eq!(sum.into_inner(), 10);
                    }
                });
            }
        });
    }

    #[test]
    fn a_region_tells_where_its_time_went() {
        let team = Team::oversubscribed(2).unwrap();
        let caller = thread::current().id();
        let (long, short) = (Duration::from_millis(60), Duration::from_millis(20));
        // The caller computes for a while, once the worker has begun a longer task.
        let begun = AtomicBool::new(false);
        let mut region = team.region();
        assert_eq!(region.spent(), Spent::default());
        region.run(2, |_, _| {
            if thread::current().id() == caller {
                let start = Instant::now();
                while !begun.load(Ordering::SeqCst) && start.elapsed() < Duration::from_secs(10) {
                    thread::yield_now();
                }
                thread::sleep(short);
            } else {
                begun.store(true, Ordering::SeqCst);
                thread::sleep(long);
            }
        });
        let spent = region.spent();
        assert!(begun.load(Ordering::SeqCst) && spent.kernels >= short && spent.waiting > Duration::ZERO, "{spent:?}");
        drop(region);
        // Somebody else waits for the team; again if that thread came too late.
        let waited = (0..100).any(|_| {
            let region = team.region();
            thread::scope(|s| {
                let other = s.spawn(|| team.region().spent());
                thread::sleep(short);
                drop(region);
                let spent = other.join().unwrap();
                assert_eq!(spent.kernels, Duration::ZERO);
                spent.waiting > Duration::ZERO
            })
        });
        assert!(waited);
    }

    #[test]
    fn spawned_work_finishes_whether_waited_for_or_not() {
        let team = Team::oversubscribed(2).unwrap();
        let done = Arc::new(AtomicUsize::new(0));
        for i in 0..100 {
            let d = done.clone();
            let pending = team.spawn("test", 0, move || {
                d.fetch_add(1, Ordering::SeqCst);
                Ok(i)
            });
            if i % 2 == 0 {
                assert_eq!(pending.wait().unwrap(), i);
            }
        }
        let start = Instant::now();
        while done.load(Ordering::SeqCst) < 100 && start.elapsed() < Duration::from_secs(10) {
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(done.load(Ordering::SeqCst), 100);
        let failed = team.spawn("test", 7, || -> Result<()> { panic!("on purpose") }).wait();
        assert!(matches!(failed, Err(Error::Backend { layer: 7, .. })));
    }
}
