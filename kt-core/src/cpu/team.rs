//! A team of threads for work of microseconds: the caller is one of them, the others spin briefly and then park.
//!
//! ```text
//! caller                                   worker
//! write job; state = open(epoch); unpark   sees open(epoch) != last: inside += 1; state still open(epoch)?
//! take tasks until none is left                yes: take tasks until none is left
//! state = closed(epoch)                        inside -= 1; last = epoch; unpark a caller that parked
//! wait until inside == 0                   spin for the next epoch, then park
//! ```
//!
//! The caller waits only for workers that came inside, so a worker that the system has not scheduled costs its share of the
//! work and nothing more: two processes on the same cores slow each other down by their work, not by their waiting. When a worker was
//! descheduled inside a task, the caller sleeps: its core is then free for that worker.
//!
//! Tasks lie in lanes, one lane a NUMA node or one for all. A thread takes those of its own node's lane first and then helps the others.
//! Which thread runs a task never changes a result.
//!
//! The workers are threads of the team's own, or an application's ([`Pool`]): then each region asks the pool for help and begins without
//! waiting for it. In a plugin they are those of the host's team: a region here is one there.

#![allow(unsafe_code)] // lends closures to threads

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use super::flow::Lists;
use super::kernel::Scratch;
use super::memory::AlignedBytes;
use super::topology::{Share, Topology, cpu_ranges, current_cpu};
use crate::error::{Error, Result};
use crate::pending::{Pending, contain, keep_first};
use crate::plugin::guest::{HostRegion, HostTeam};
use crate::work::Spent;

/// How long a worker spins for the next job before it parks, unless told otherwise: longer than the gap between two layer calls
/// of a running model, shorter than what a neighbour on the same core would notice.
pub const SPIN: Duration = Duration::from_micros(60);

/// How long the caller spins for the others at the end of a run before it sleeps, and a task for what it needs: longer than most tasks.
pub(crate) const CALLER_SPIN: Duration = Duration::from_micros(50);

/// Threads that an application lends to a [`Team`].
///
/// ```
/// # fn main() -> kt_core::Result<()> {
/// let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
/// let team = kt_core::cpu::team::Team::builder().pool(pool).build()?;
/// # let _ = team; Ok(()) }
/// ```
pub trait Pool: Send + Sync + 'static {
    /// Threads that may help at a time, the one that calls a layer not counted.
    fn threads(&self) -> usize;

    /// Asks up to [`threads`](Pool::threads) threads to call `help` once, as soon as they can, and returns at once. A call returns when the
    /// work is done; at once when it was done before, when as many help as the team has threads, and on a thread that already works for a
    /// team: one that waits inside a task may take up whatever is queued, as rayon's do.
    fn start(&self, help: Arc<dyn Fn() + Send + Sync>);
}

impl Pool for rayon::ThreadPool {
    fn threads(&self) -> usize {
        self.current_num_threads()
    }

    fn start(&self, help: Arc<dyn Fn() + Send + Sync>) {
        self.spawn_broadcast(move |_| help());
    }
}

impl<P: Pool + ?Sized> Pool for Arc<P> {
    fn threads(&self) -> usize {
        (**self).threads()
    }

    fn start(&self, help: Arc<dyn Fn() + Send + Sync>) {
        (**self).start(help);
    }
}

/// Which CPUs a team's own threads are kept to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pin {
    /// To those of their NUMA node where the team spans several, else to none.
    #[default]
    Node,
    /// Each to one CPU, cores before siblings.
    Cpu,
    /// To none.
    No,
}

pub(crate) type Body<'a> = dyn Fn(usize, usize, &mut Scratch) + Sync + 'a;

/// One lane's next task, on a cache line of its own.
#[repr(align(128))]
#[derive(Default)]
struct Lane {
    next: AtomicUsize,
}

struct Shared {
    /// `epoch << 1 | open`.
    state: AtomicU64,
    inside: AtomicUsize,
    lanes: Box<[Lane]>,
    job: UnsafeCell<Option<Job>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    /// The region under way, for threads of a pool: they leave when it is over. Odd while there is one.
    region: AtomicU64,
    /// The caller, while it sleeps at the end of a run.
    sleeper: Mutex<Option<Thread>>,
    sleeping: AtomicBool,
    spin: Duration,
}

/// Borrowed from the caller of a run for its length.
#[derive(Clone, Copy)]
struct Job {
    body: *const Body<'static>,
    /// Tasks of each lane.
    tasks: *const [usize],
    /// Whether a thread takes tasks of other lanes when its own has no more.
    share: bool,
}

// SAFETY: `job` is written only by the thread that holds the team's lock while the state is closed and `inside` is 0, and read
// only by workers that are counted in `inside` and saw the state open after that (SeqCst on both sides); the rest is atomics
// and mutexes.
unsafe impl Sync for Shared {}
// SAFETY: the pointers in `job` are dereferenced only under the protocol above, from any thread, and point to a Sync closure and to numbers.
unsafe impl Send for Shared {}

impl Shared {
    fn new(lanes: usize, spin: Duration) -> Self {
        Shared {
            state: AtomicU64::new(0),
            inside: AtomicUsize::new(0),
            lanes: (0..lanes).map(|_| Lane::default()).collect(),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
            region: AtomicU64::new(0),
            sleeper: Mutex::new(None),
            sleeping: AtomicBool::new(false),
            spin,
        }
    }

    /// Takes tasks until none is left; `home` is the thread's own lane.
    fn work(&self, job: Job, home: usize, scratch: &mut Scratch) {
        // SAFETY: the caller of `run_job` keeps closure and counts alive until `inside` is 0 again, and this thread is either that
        // caller or counted in `inside`.
        let (body, tasks) = unsafe { (&*job.body, &*job.tasks) };
        let result = catch_unwind(AssertUnwindSafe(|| {
            let lanes = if job.share || tasks.len() == 1 { tasks.len() } else { 1 };
            for lane in (0..lanes).map(|i| (home + i) % tasks.len()) {
                loop {
                    let task = self.lanes[lane].next.fetch_add(1, Ordering::Relaxed);
                    if task >= tasks[lane] {
                        break;
                    }
                    body(lane, task, scratch);
                }
            }
        }));
        if let Err(payload) = result {
            for (lane, &tasks) in self.lanes.iter().zip(tasks) {
                lane.next.store(tasks, Ordering::Relaxed);
            }
            keep_first(&mut self.panic.lock().unwrap_or_else(PoisonError::into_inner), payload);
        }
    }

    /// Does the open job of `state`, unless it is over.
    fn join(&self, state: u64, home: usize, scratch: &mut Scratch) {
        self.inside.fetch_add(1, Ordering::SeqCst);
        if self.state.load(Ordering::SeqCst) == state {
            // SAFETY: this thread is counted in `inside` and saw the state open afterwards, so the caller has written the job
            // and will not touch it before `inside` is 0.
            let job = unsafe { *self.job.get() };
            if let Some(job) = job {
                self.work(job, home, scratch);
            }
        }
        if self.inside.fetch_sub(1, Ordering::SeqCst) == 1 && self.sleeping.load(Ordering::SeqCst) {
            let sleeper = self.sleeper.lock().unwrap_or_else(PoisonError::into_inner);
            sleeper.iter().for_each(Thread::unpark);
        }
    }

    /// Returns when no worker is inside any more, with whether there was one.
    fn wait_for_workers(&self) -> bool {
        let mut since = None;
        let mut spins = 0u32;
        while self.inside.load(Ordering::SeqCst) != 0 {
            std::hint::spin_loop();
            spins += 1;
            if spins.is_multiple_of(128) && since.get_or_insert_with(Instant::now).elapsed() > CALLER_SPIN {
                // A worker was probably descheduled inside a task: let it have this core.
                *self.sleeper.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread::current());
                self.sleeping.store(true, Ordering::SeqCst);
                while self.inside.load(Ordering::SeqCst) != 0 {
                    thread::park();
                }
                self.sleeping.store(false, Ordering::SeqCst);
                break;
            }
        }
        spins > 0
    }
}

struct Worker {
    parked: Arc<AtomicBool>,
    handle: JoinHandle<()>,
}

fn worker(shared: &Shared, parked: &AtomicBool, home: usize) {
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
                if start.elapsed() > shared.spin {
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
        shared.join(state, home, &mut scratch);
        last = state;
    }
}

thread_local! {
    /// Regions that this thread holds or helps.
    static ENGAGED: Cell<usize> = const { Cell::new(0) };
}

/// While it lives, its thread helps no other region. Inside a task it may wait for a pool that hands it a call for help, even its own region's:
/// it would help until that region is over, which waits for the task. Ends on the thread that it began on.
struct Engaged(PhantomData<*const ()>);

impl Engaged {
    fn new() -> Self {
        ENGAGED.set(ENGAGED.get() + 1);
        Engaged(PhantomData)
    }
}

impl Drop for Engaged {
    fn drop(&mut self) {
        ENGAGED.set(ENGAGED.get() - 1);
    }
}

/// What a thread of a pool does for a region: its jobs, until it is over. As many may help as there are scratches.
fn help(shared: &Shared, region: u64, spare: &Mutex<Vec<Scratch>>) {
    // A region that is over began another's epochs: nothing of it is touched before this is checked, and `join` checks for itself.
    let goes_on = || shared.region.load(Ordering::SeqCst) == region;
    if ENGAGED.get() > 0 || !goes_on() {
        return;
    }
    let Some(mut scratch) = spare.lock().unwrap_or_else(PoisonError::into_inner).pop() else { return };
    let _engaged = Engaged::new();
    let mut last = 0;
    while goes_on() {
        let state = shared.state.load(Ordering::Acquire);
        if state & 1 == 1 && state != last {
            shared.join(state, 0, &mut scratch);
            last = state;
        }
        std::hint::spin_loop();
    }
    spare.lock().unwrap_or_else(PoisonError::into_inner).push(scratch);
}

/// Buffers that one region at a time uses: the packed inputs of a layer call, and down products.
#[derive(Default)]
pub(crate) struct Buffers {
    pub x: [AlignedBytes; 2],
    pub h: AlignedBytes,
    pub y: AlignedBytes,
    pub lists: Lists,
}

#[derive(Default)]
struct CallerState {
    scratch: Scratch,
    buffers: Buffers,
}

/// A pool's threads, as a team keeps them.
struct Lent {
    pool: Box<dyn Pool>,
    /// One for each thread that may help, while it does not.
    spare: Arc<Mutex<Vec<Scratch>>>,
}

/// A team of threads. Dropping it ends those of its own. Several runtimes may share one; their calls then take turns.
pub struct Team {
    shared: Arc<Shared>,
    workers: Vec<Worker>,
    lent: Option<Lent>,
    /// In a plugin: the host's team, which does the work.
    host: Option<HostTeam>,
    topology: Topology,
    shares: Vec<Share>,
    notes: Vec<String>,
    caller: Mutex<CallerState>,
    dispatcher: Mutex<Dispatcher>,
}

/// Work that is handed over again and again, without allocating.
pub(crate) trait Recurring: Send + Sync {
    /// Does it; does not panic.
    fn run(&self);
}

enum Task {
    Once(Box<dyn FnOnce() + Send>),
    Again(Arc<dyn Recurring>),
}

/// The thread that does what is [spawned](Team::spawn). It ends when this is dropped and nothing is left to do.
#[derive(Default)]
struct Dispatcher {
    queue: Arc<Queue>,
    started: bool,
    /// Jobs that there is always room for.
    reserved: usize,
}

#[derive(Default)]
struct Queue {
    /// What is to be done, and whether there may come more.
    tasks: Mutex<(VecDeque<Task>, bool)>,
    changed: Condvar,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, (VecDeque<Task>, bool)> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut tasks = self.lock();
        loop {
            match tasks.0.pop_front() {
                Some(task) => {
                    drop(tasks);
                    match task {
                        Task::Once(f) => f(),
                        Task::Again(job) => job.run(),
                    }
                    tasks = self.lock();
                }
                None if tasks.1 => return,
                None => tasks = self.changed.wait(tasks).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

impl Drop for Dispatcher {
    fn drop(&mut self) {
        self.queue.lock().1 = true;
        self.queue.changed.notify_all();
    }
}

impl Dispatcher {
    fn start(&mut self) -> bool {
        if !self.started {
            let queue = self.queue.clone();
            let (begun, begins) = std::sync::mpsc::channel::<()>();
            let work = move || {
                drop(begun);
                queue.work();
            };
            self.started = thread::Builder::new().name("kt-submit".into()).spawn(work).is_ok();
            // A thread that begins allocates; what is handed to it later shall not.
            let _ = begins.recv();
        }
        self.started
    }

    fn push(&mut self, task: Task) -> bool {
        let started = self.start();
        if started {
            self.queue.lock().0.push_back(task);
            self.queue.changed.notify_one();
        }
        started
    }
}

/// Builds a [`Team`].
#[derive(Default)]
pub struct TeamBuilder {
    threads: Option<usize>,
    oversubscribed: bool,
    topology: Option<Topology>,
    nodes: Option<Vec<usize>>,
    pin: Pin,
    spin: Option<Duration>,
    pool: Option<Box<dyn Pool>>,
}

impl TeamBuilder {
    /// Threads, the caller's counted. Default: one per physical core that this process may use. At most one per CPU, and no more than a CPU
    /// quota pays for; of a [pool](TeamBuilder::pool), no more than it has and the caller.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// The CPUs and nodes to use, in place of [`Topology::detect`].
    pub fn topology(mut self, topology: Topology) -> Self {
        self.topology = Some(topology);
        self
    }

    /// Uses only these NUMA nodes.
    pub fn nodes(mut self, nodes: &[usize]) -> Self {
        self.nodes = Some(nodes.to_vec());
        self
    }

    /// Which CPUs the threads are kept to.
    pub fn pin(mut self, pin: Pin) -> Self {
        self.pin = pin;
        self
    }

    /// How long a thread without work spins before it sleeps (default [`SPIN`]): zero where other programs need the cores more, longer
    /// where calls are far apart and wake-ups (tens of microseconds) hurt.
    pub fn spin(mut self, spin: Duration) -> Self {
        self.spin = Some(spin);
        self
    }

    /// Threads that the application lends, in place of the team's own: of a larger pool any, but never more at a time than
    /// [`TeamBuilder::threads`] allows. They are not bound, and all weights are in one place.
    pub fn pool(mut self, pool: impl Pool) -> Self {
        self.pool = Some(Box::new(pool));
        self
    }

    /// Exactly as many threads as asked for, for tests of what must not depend on their number.
    #[cfg(any(test, feature = "testing"))]
    pub fn oversubscribed(mut self) -> Self {
        self.oversubscribed = true;
        self
    }

    /// Starts the threads.
    ///
    /// # Errors
    /// No threads, a node that cannot be used, or the system refuses to start a thread.
    pub fn build(self) -> Result<Arc<Team>> {
        if self.threads == Some(0) {
            return Err(Error::Invalid("a team has one thread at least: the caller's".into()));
        }
        let mut topology = self.topology.unwrap_or_else(Topology::detect);
        if let Some(nodes) = &self.nodes {
            topology = topology.only(nodes)?;
        }
        let mut notes = topology.notes().to_vec();
        let asked = self.threads.unwrap_or_else(|| topology.default_threads());
        let most = if self.oversubscribed { usize::MAX } else { topology.most_threads() };
        if asked > most {
            notes.push(format!("{asked} threads were asked for; this process may use {most} CPUs"));
        }
        let lent = self.pool.as_ref().map_or(usize::MAX, |pool| pool.threads().saturating_add(1));
        let threads = asked.min(most).min(lent);
        let shares = match self.pool {
            // Nobody can say where the threads of a pool run.
            Some(_) => vec![Share { node: 0, threads, cpus: topology.allowed().to_vec() }],
            None => topology.allot(threads),
        };
        let shared = Arc::new(Shared::new(shares.len().max(1), self.spin.unwrap_or(SPIN)));
        let mut team = Team {
            shared,
            workers: Vec::new(),
            lent: self.pool.map(|pool| {
                let spare = (1..threads).map(|_| Scratch::default()).collect();
                Lent { pool, spare: Arc::new(Mutex::new(spare)) }
            }),
            host: None,
            topology,
            shares,
            notes,
            caller: Mutex::default(),
            dispatcher: Mutex::default(),
        };
        if team.lent.is_none() {
            team.start_workers(threads, self.pin)?;
        }
        Ok(Arc::new(team))
    }
}

impl Team {
    /// Starts building a team.
    pub fn builder() -> TeamBuilder {
        TeamBuilder::default()
    }

    /// A team of exactly `threads` threads, for tests of what must not depend on their number.
    ///
    /// # Errors
    /// The system refuses to start a thread.
    #[cfg(any(test, feature = "testing"))]
    pub fn oversubscribed(threads: usize) -> Result<Arc<Team>> {
        Self::builder().threads(threads.max(1)).oversubscribed().build()
    }

    /// The team of a host, in a plugin: `shares` are its.
    pub(crate) fn of_host(host: HostTeam, topology: Topology, shares: Vec<Share>) -> Team {
        Team {
            shared: Arc::new(Shared::new(shares.len().max(1), SPIN)),
            workers: Vec::new(),
            lent: None,
            host: Some(host),
            topology,
            shares,
            notes: Vec::new(),
            caller: Mutex::default(),
            dispatcher: Mutex::default(),
        }
    }

    /// Starts all threads but the caller's, which is the first of the first node.
    fn start_workers(&mut self, threads: usize, pin: Pin) -> Result<()> {
        let (told, answers) = std::sync::mpsc::channel::<String>();
        let places: Vec<(usize, usize)> =
            self.shares.iter().enumerate().flat_map(|(home, s)| (0..s.threads).map(move |i| (home, i))).collect();
        for (i, (home, nth)) in places.into_iter().enumerate().skip(1) {
            let share = &self.shares[home];
            let cpus = match pin {
                Pin::Cpu => share.cpus.get(nth % share.cpus.len().max(1)).map(|&c| vec![c]),
                Pin::Node if self.shares.len() > 1 => Some(share.cpus.clone()),
                _ => None,
            };
            let binding = cpus.map(|cpus| (cpus, self.topology.clone(), told.clone()));
            let shared = self.shared.clone();
            let parked = Arc::new(AtomicBool::new(false));
            let flag = parked.clone();
            let handle = thread::Builder::new()
                .name(format!("kt-{i}"))
                .spawn(move || {
                    if let Some((cpus, topology, told)) = binding
                        && let Err(why) = topology.bind_thread(&cpus)
                    {
                        let _ = told.send(format!("thread {i} is not bound to CPUs {}: {why}", cpu_ranges(&cpus)));
                    }
                    worker(&shared, &flag, home);
                })
                .map_err(|source| Error::Io { path: format!("(starting thread {i} of {threads})").into(), source })?;
            self.workers.push(Worker { parked, handle });
        }
        drop(told);
        // Until each thread has bound itself, or said why not.
        let refused: Vec<String> = answers.iter().collect();
        match refused.len() {
            0..4 => self.notes.extend(refused),
            n => self.notes.push(format!("{}; so are {} more threads", refused[0], n - 1)),
        }
        if self.shares.len() > 1 || pin == Pin::Cpu {
            self.notes.push("the thread that calls a layer is the application's: it is not bound".into());
        }
        Ok(())
    }

    /// Threads of the team, the caller counted.
    pub fn threads(&self) -> usize {
        self.shares.iter().map(|s| s.threads).sum()
    }

    /// The NUMA nodes that weights are divided over, with the threads of each; one where there are no others.
    pub fn shares(&self) -> &[Share] {
        &self.shares
    }

    /// Whether its threads are an application's.
    pub fn is_lent(&self) -> bool {
        self.lent.is_some()
    }

    /// CPUs and nodes that the team was built on.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Whether memory must lie on the nodes of its threads: there are several, or the application chose this one among several.
    pub(crate) fn wants_memory_near(&self) -> bool {
        self.shares.len() > 1 || self.topology.nodes().len() > 1 && !self.is_lent()
    }

    /// What was not used or not bound, and why.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Enters a parallel region: the team works for this caller until the region is dropped. Other callers wait.
    pub fn region(&self) -> Region<'_> {
        let mut spent = Spent::default();
        let engaged = Engaged::new();
        let state = self.caller.try_lock().unwrap_or_else(|error| match error {
            TryLockError::Poisoned(poisoned) => poisoned.into_inner(),
            TryLockError::WouldBlock => {
                let start = Instant::now();
                let state = self.caller.lock().unwrap_or_else(PoisonError::into_inner);
                spent.waiting = start.elapsed();
                state
            }
        });
        let home = match self.shares.len() {
            0 | 1 => 0,
            _ => current_cpu().map_or(0, |cpu| Topology::share_of_cpu(&self.shares, cpu)),
        };
        if let Some(lent) = &self.lent
            && self.threads() > 1
        {
            let region = self.shared.region.fetch_add(1, Ordering::SeqCst) + 1;
            let (shared, spare) = (self.shared.clone(), lent.spare.clone());
            lent.pool.start(Arc::new(move || help(&shared, region, &spare)));
        }
        let host = self.host.as_ref().and_then(HostTeam::region);
        Region { team: self, state, home, spent, host, _engaged: engaged }
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
        // Without a thread that takes it the work still runs, when it is waited for.
        self.enqueue(Box::new(move || theirs.run(&name, layer)));
        let name = backend.to_string();
        Pending::new(move || slot.wait(&name, layer))
    }

    /// Has a thread that is not of the team call `job`, after those before it; or says that there is none.
    pub(crate) fn enqueue(&self, job: Box<dyn FnOnce() + Send>) -> bool {
        if let Some(host) = &self.host {
            return host.spawn(job);
        }
        self.dispatcher().push(Task::Once(job))
    }

    /// As [`Team::enqueue`], for a job that [`Team::reserve_job`] made room for: then nothing is allocated.
    pub(crate) fn enqueue_again(&self, job: Arc<dyn Recurring>) -> bool {
        match &self.host {
            Some(host) => host.spawn(Box::new(move || job.run())),
            None => self.dispatcher().push(Task::Again(job)),
        }
    }

    /// Makes room for one more job that is enqueued at most once at a time, and starts the thread that does it.
    pub(crate) fn reserve_job(&self) {
        if self.host.is_none() {
            let mut dispatcher = self.dispatcher();
            dispatcher.start();
            dispatcher.reserved += 1;
            // Others that are enqueued take of the room while they wait.
            let room = dispatcher.reserved + 64;
            dispatcher.queue.lock().0.reserve(room);
        }
    }

    fn dispatcher(&self) -> MutexGuard<'_, Dispatcher> {
        self.dispatcher.lock().unwrap_or_else(PoisonError::into_inner)
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
    /// The lane of the node that the caller runs on.
    home: usize,
    spent: Spent,
    /// In a plugin: the host's region.
    host: Option<HostRegion<'a>>,
    _engaged: Engaged,
}

impl Drop for Region<'_> {
    fn drop(&mut self) {
        if self.team.lent.is_some() && self.team.threads() > 1 {
            self.team.shared.region.fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl Region<'_> {
    /// Threads of the team.
    pub fn threads(&self) -> usize {
        self.team.threads()
    }

    /// The team's nodes, which are the lanes of [`Region::run_lanes`].
    pub fn shares(&self) -> &[Share] {
        &self.team.shares
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
        self.run_job(&[tasks], true, &|_, task, scratch| body(task, scratch));
    }

    /// Runs `body(lane, 0..tasks[lane])` for every lane: those of lane `n` on the threads of node `n` first, by others when these have none of
    /// their own left. The tasks of a lane begin in order: one may wait for those before it.
    ///
    /// # Panics
    /// As [`Region::run`]; and when there are more lanes than nodes.
    pub fn run_lanes(&mut self, tasks: &[usize], body: impl Fn(usize, usize, &mut Scratch) + Sync) {
        self.run_job(tasks, true, &body);
    }

    /// As [`Region::run_lanes`], with no thread taking tasks of another node than its own: for touching memory. Tasks of a node whose threads do not come
    /// within some milliseconds are done by the caller.
    pub(crate) fn run_at_home(&mut self, tasks: &[usize], body: impl Fn(usize, usize, &mut Scratch) + Sync) {
        self.run_job(tasks, false, &body);
    }

    /// Runs `body` once on each of the team's threads, as far as they come: within a second, or 50 ms where they are an application's.
    pub(crate) fn each_thread(&mut self, body: impl Fn(&mut Scratch) + Sync) {
        let (threads, arrived) = (self.threads(), AtomicUsize::new(0));
        let patience = Duration::from_millis(if self.team.is_lent() { 50 } else { 1000 });
        let start = Instant::now();
        self.run(threads, |_, scratch| {
            arrived.fetch_add(1, Ordering::SeqCst);
            // Whoever took a task keeps it until there is one for everybody else.
            while arrived.load(Ordering::SeqCst) < threads && start.elapsed() < patience {
                thread::yield_now();
            }
            body(scratch);
        });
    }

    fn run_job(&mut self, tasks: &[usize], share: bool, body: &Body<'_>) {
        let scratch = &mut self.state.scratch;
        let shared = &*self.team.shared;
        let all: usize = tasks.iter().sum();
        // A host that gave no region has none to give: the caller does all.
        let alone = self.team.threads() <= 1 || self.team.host.is_some() && self.host.is_none();
        if alone || (all <= 1 && share) {
            let start = Instant::now();
            for (lane, &tasks) in tasks.iter().enumerate() {
                (0..tasks).for_each(|task| body(lane, task, scratch));
            }
            self.spent.kernels += start.elapsed();
            return;
        }
        assert!(tasks.len() <= shared.lanes.len(), "more lanes than nodes");
        if let Some(host) = &mut self.host {
            let start = Instant::now();
            host.run(tasks, !share, body);
            self.spent.kernels += start.elapsed();
            return;
        }
        // SAFETY: only the lifetime changes; the pointer is used until this function returns and not after, as the wait below is for
        // every worker that may hold it.
        let body: *const Body<'static> = unsafe { std::mem::transmute::<*const Body<'_>, *const Body<'static>>(body) };
        let job = Job { body, tasks, share };
        let epoch = (shared.state.load(Ordering::Relaxed) >> 1) + 1;
        // SAFETY: the state is closed and `inside` is 0 (the last run ended so, and this thread holds the team's lock), so no
        // worker reads the job.
        unsafe { *shared.job.get() = Some(job) };
        for lane in &shared.lanes[..tasks.len()] {
            lane.next.store(0, Ordering::Relaxed);
        }
        shared.state.store(epoch << 1 | 1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        for w in &self.team.workers {
            if w.parked.load(Ordering::SeqCst) {
                w.handle.thread().unpark();
            }
        }
        let start = Instant::now();
        shared.work(job, self.home % tasks.len(), scratch);
        if !share {
            let open = || shared.lanes.iter().zip(tasks).any(|(lane, &n)| lane.next.load(Ordering::Relaxed) < n);
            let begin = Instant::now();
            while open() && begin.elapsed() < Duration::from_millis(20) {
                thread::yield_now();
            }
            shared.work(Job { share: true, ..job }, self.home % tasks.len(), scratch);
        }
        shared.state.store(epoch << 1, Ordering::SeqCst);
        let done = Instant::now();
        self.spent.kernels += done - start;
        if shared.wait_for_workers() {
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
    fn lanes_are_done_whoever_comes() {
        let team = Team::builder().topology(Topology::fake(&[2, 1])).threads(3).build().unwrap();
        assert_eq!(team.shares().iter().map(|s| s.threads).collect::<Vec<_>>(), [2, 1]);
        // Two workers could not be bound, and the caller is not ours.
        assert!(team.notes().iter().any(|n| n.contains("not this machine's")), "{:?}", team.notes());
        for round in 0..200usize {
            let tasks = [round % 13, round % 7];
            let hits: Vec<Vec<AtomicUsize>> = tasks.map(|n| (0..n).map(|_| AtomicUsize::new(0)).collect()).into();
            let mut region = team.region();
            let hit = |lane: usize, task: usize| {
                hits[lane][task].fetch_add(1, Ordering::Relaxed);
            };
            region.run_lanes(&tasks, |lane, task, _| hit(lane, task));
            region.run_at_home(&tasks, |lane, task, _| hit(lane, task));
            region.run(3, |_, _| ());
            assert!(hits.iter().flatten().all(|h| h.load(Ordering::Relaxed) == 2));
        }
    }

    #[test]
    fn a_pool_of_the_application_works_from_outside_and_inside() {
        let pool = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap());
        let team = Team::builder().threads(4).oversubscribed().pool(pool.clone()).build().unwrap();
        assert_eq!((team.threads(), team.is_lent()), (4, true));
        let round = |team: &Team| {
            let names = Mutex::new(std::collections::HashSet::new());
            let mut region = team.region();
            for _ in 0..3 {
                region.run(64, |_, _| {
                    names.lock().unwrap().insert(thread::current().id());
                    thread::sleep(Duration::from_micros(200));
                });
            }
            names.into_inner().unwrap().len()
        };
        // A worker that the system schedules late helps late; over some rounds, others than the caller come.
        assert!((0..20).any(|_| round(&team) > 1));
        assert!((0..20).any(|_| pool.install(|| round(&team)) > 1));
        // A pool whose threads are all busy delays nothing.
        let (busy, release) = (team.clone(), Arc::new(AtomicBool::new(false)));
        let (hold, held) = (release.clone(), Arc::new(AtomicUsize::new(0)));
        let count = held.clone();
        pool.spawn_broadcast(move |_| {
            count.fetch_add(1, Ordering::SeqCst);
            while !hold.load(Ordering::SeqCst) {
                thread::sleep(Duration::from_millis(1));
            }
        });
        while held.load(Ordering::SeqCst) < 3 {
            thread::yield_now();
        }
        assert_eq!(round(&busy), 1);
        release.store(true, Ordering::SeqCst);
        let result = catch_unwind(AssertUnwindSafe(|| team.region().run(10, |t, _| assert!(t != 3, "task three"))));
        assert!(result.is_err());
        assert!(round(&team) >= 1);
    }

    /// What `f` returns; fails where it would wait for good.
    fn in_time<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
        let (told, answer) = std::sync::mpsc::channel();
        thread::spawn(move || told.send(f()));
        answer.recv_timeout(Duration::from_secs(60)).expect("it panicked, or hangs")
    }

    /// Whether `is` becomes true in time.
    fn comes(is: impl Fn() -> bool) -> bool {
        let start = Instant::now();
        while !is() && start.elapsed() < Duration::from_secs(20) {
            thread::sleep(Duration::from_micros(100));
        }
        is()
    }

    fn pool(threads: usize) -> Arc<rayon::ThreadPool> {
        Arc::new(rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap())
    }

    #[test]
    fn of_a_larger_pool_no_more_help_than_there_are_threads() {
        let team = Team::builder().threads(3).oversubscribed().pool(pool(8)).build().unwrap();
        assert_eq!(team.threads(), 3);
        let mut most = 0;
        for _ in 0..50 {
            let ids = Mutex::new(std::collections::HashSet::new());
            team.region().run(64, |_, _| {
                ids.lock().unwrap().insert(thread::current().id());
                thread::sleep(Duration::from_micros(200));
            });
            most = most.max(ids.into_inner().unwrap().len());
        }
        assert!((2..=3).contains(&most), "{most} threads computed");
        // All scratches come back, and there are no others.
        let spare = &team.lent.as_ref().unwrap().spare;
        assert!(comes(|| spare.lock().unwrap().len() == 2));
    }

    #[test]
    fn a_pool_is_held_to_what_the_process_may_use() {
        let builder = || Team::builder().topology(Topology::fake(&[2])).pool(pool(8));
        let team = builder().threads(9).build().unwrap();
        assert_eq!((team.threads(), team.topology().most_threads()), (2, 2));
        assert!(team.notes().iter().any(|n| n.contains("9 threads were asked for")), "{:?}", team.notes());
        assert_eq!(builder().build().unwrap().threads(), team.topology().default_threads());
        assert_eq!(builder().threads(99).oversubscribed().build().unwrap().threads(), 9);
    }

    #[test]
    fn a_caller_that_is_handed_its_own_call_for_help_returns() {
        let done = in_time(|| {
            let pool = pool(1);
            let team = Team::builder().threads(2).oversubscribed().pool(pool.clone()).build().unwrap();
            let done = AtomicUsize::new(0);
            pool.install(|| {
                team.region().run(4, |_, _| {
                    // As whoever waits for rayon inside a task: the only thing queued is this region's call.
                    while let Some(rayon::Yield::Executed) = rayon::yield_now() {}
                    done.fetch_add(1, Ordering::SeqCst);
                });
            });
            done.into_inner()
        });
        assert_eq!(done, 4);
    }

    #[test]
    fn a_helper_that_is_handed_another_region_returns() {
        let done = in_time(|| {
            let pool = pool(1);
            let build = || Team::builder().threads(2).oversubscribed().pool(pool.clone()).build().unwrap();
            let (one, other) = (build(), build());
            let caller = thread::current().id();
            let [came, begun, back] = [(); 3].map(|()| AtomicBool::new(false));
            let done = AtomicUsize::new(0);
            one.region().run(2, |_, _| {
                if thread::current().id() == caller {
                    assert!(comes(|| came.load(Ordering::SeqCst)), "nobody helps");
                    let _region = other.region();
                    begun.store(true, Ordering::SeqCst);
                    assert!(comes(|| back.load(Ordering::SeqCst)), "the helper helps elsewhere");
                } else {
                    came.store(true, Ordering::SeqCst);
                    assert!(comes(|| begun.load(Ordering::SeqCst)));
                    while let Some(rayon::Yield::Executed) = rayon::yield_now() {}
                    back.store(true, Ordering::SeqCst);
                }
                done.fetch_add(1, Ordering::SeqCst);
            });
            done.into_inner()
        });
        assert_eq!(done, 2);
    }

    /// What panics once more when it is dropped.
    struct Bomb;

    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }

    #[test]
    fn panics_whose_payloads_panic_end_no_thread() {
        in_time(|| {
            let team = Team::oversubscribed(3).unwrap();
            for _ in 0..3 {
                let arrived = AtomicUsize::new(0);
                let result = catch_unwind(AssertUnwindSafe(|| {
                    team.region().run(3, |_, _| {
                        arrived.fetch_add(1, Ordering::SeqCst);
                        assert!(comes(|| arrived.load(Ordering::SeqCst) == 3), "not all came");
                        std::panic::panic_any(Bomb);
                    });
                }));
                let payload = result.unwrap_err();
                assert!(payload.is::<Bomb>());
                std::mem::forget(payload);
            }
        });
    }

    #[test]
    fn spawned_work_that_panics_so_is_waited_for_and_others_are_done() {
        in_time(|| {
            let team = Team::oversubscribed(1).unwrap();
            for _ in 0..3 {
                let begun = Arc::new(AtomicBool::new(false));
                let flag = begun.clone();
                let pending = team.spawn("test", 5, move || -> Result<()> {
                    flag.store(true, Ordering::SeqCst);
                    std::panic::panic_any(Bomb)
                });
                // By the dispatcher, not by whoever waits.
                assert!(comes(|| begun.load(Ordering::SeqCst)));
                assert!(matches!(pending.wait(), Err(Error::Backend { layer: 5, .. })));
            }
        });
    }

    #[test]
    fn a_caller_sleeps_until_a_slow_worker_is_done() {
        let team = Team::builder().threads(2).oversubscribed().spin(Duration::ZERO).build().unwrap();
        for _ in 0..20 {
            let done = AtomicUsize::new(0);
            team.region().run(2, |_, _| {
                // One of the two is much slower than the caller spins, whichever thread has it.
                thread::sleep(Duration::from_millis(2));
                done.fetch_add(1, Ordering::SeqCst);
            });
            assert_eq!(done.into_inner(), 2);
        }
    }

    #[test]
    fn what_cannot_be_built_is_refused() {
        assert!(Team::builder().threads(0).build().is_err());
        assert!(Team::builder().nodes(&[77]).build().is_err());
        let all = Team::builder().threads(100_000).build().unwrap();
        assert_eq!(all.threads(), all.topology().most_threads());
        assert!(all.notes().iter().any(|n| n.contains("100000 threads were asked for")), "{:?}", all.notes());
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
