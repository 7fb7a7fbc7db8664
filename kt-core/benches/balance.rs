//! How evenly the CPU flow divides a layer call over threads, on any machine: products sleep as long as they would take, so that threads need no CPUs.
//!
//! A thread reads 9 GB/s or multiplies 150 billion numbers a second, and every thread is up to a quarter slower than the fastest, as siblings on a core and CPUs of
//! virtual machines are. What the team's own work takes is 1 / `SLOWED` of what it is beside real products: this is about tasks, not about microseconds.

use std::cell::Cell;
use std::error::Error;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kt_core::cpu::CpuBackend;
use kt_core::cpu::input::Inputs;
use kt_core::cpu::kernel::{Outputs, Scratch};
use kt_core::cpu::team::Team;
use kt_core::cpu::topology::Topology;
use kt_core::source::synthetic::SyntheticSource;
use kt_core::testing::{Products, Random};
use kt_core::{Batch, Candidate, Format, RuntimeBuilder};

/// Bytes of a weight, as of Q4_K.
const BYTES: f64 = 0.5625;
/// Bytes that a thread reads in a second.
const READ: f64 = 9e9;
/// Products that it makes in a second.
const PRODUCTS: f64 = 150e9;
/// How many times as long everything takes, so that the shortest sleeps are exact.
const SLOWED: f64 = 100.0;
const CALLS: usize = 5;

/// Nanoseconds in products, of all threads.
static BUSY: AtomicU64 = AtomicU64::new(0);
static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// How many times as long as the fastest this thread takes.
    static SLOWNESS: Cell<f64> = Cell::new(1.0 + (THREADS.fetch_add(7, Ordering::Relaxed) % 16) as f64 / 64.0);
}

/// Makes zeros, in time.
fn sleeps(outputs: Outputs<'_>, _: Inputs<'_>, rows: Range<usize>, out: &mut [f32], _: &mut Scratch) {
    let weights = (outputs.range.len() * outputs.of.cols()) as f64;
    let seconds = (weights * BYTES / READ).max(weights * rows.len() as f64 / PRODUCTS);
    let time = Duration::from_secs_f64(seconds * SLOWED * SLOWNESS.get());
    thread::sleep(time);
    BUSY.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    out.fill(0.0);
}

/// Calls a layer of this shape, `(hidden, intermediate, experts, top_k)`.
fn measure(team: &Arc<Team>, shape: (usize, usize, usize, usize), tokens: usize) -> Result<(f64, f64), Box<dyn Error>> {
    let (hidden, intermediate, experts, top_k) = shape;
    let source = SyntheticSource::builder().hidden(hidden).intermediate(intermediate).experts(experts).top_k(top_k);
    let source = source.layers(1).format(Format::Q4_0).build()?;
    let candidates = |_| vec![Candidate::new("sleeps", Ok(CpuBackend::new("sleeps", Products::<64, _>::new(sleeps))))];
    let loaded = RuntimeBuilder::new(candidates).team(team.clone()).build()?.load(&source)?;
    let mut random = Random(1);
    let mut ids = Vec::new();
    for _ in 0..tokens {
        let mut left: Vec<i32> = (0..experts as i32).collect();
        ids.extend((0..top_k).map(|_| left.swap_remove(random.below(left.len()))));
    }
    let mut times = Vec::new();
    for _ in 0..CALLS {
        let mut batch = Batch::new(tokens, vec![1.0; tokens * hidden], ids.clone(), vec![1.0; tokens * top_k])?;
        BUSY.store(0, Ordering::Relaxed);
        let start = Instant::now();
        loaded.layer(0)?.forward(&mut batch)?;
        let time = start.elapsed().as_secs_f64();
        times.push((time / SLOWED, BUSY.load(Ordering::Relaxed) as f64 / 1e9 / team.threads() as f64 / time));
    }
    times.sort_by(|a, b| a.0.total_cmp(&b.0));
    Ok(times[CALLS / 2])
}

fn main() -> Result<(), Box<dyn Error>> {
    // `cargo test --benches` calls it without.
    if !std::env::args().any(|arg| arg == "--bench") {
        return Ok(());
    }
    let shapes = [
        ("qwen3-30b-a3b", (2048, 768, 128, 8), &[1, 4, 16, 64, 256][..]),
        ("deepseek-v3", (7168, 2048, 16, 8), &[1, 4]),
        ("gpt-oss", (2880, 2880, 8, 4), &[1, 4]),
        ("mixtral", (4096, 14336, 4, 2), &[1]),
    ];
    println!("{:10} {:14} {:>6}  {:>9}  threads in products", "threads", "shape", "tokens", "us a call");
    for nodes in [&[2][..], &[8], &[16], &[32], &[8, 8], &[16, 16]] {
        let team = Team::builder().topology(Topology::fake(nodes)).threads(nodes.iter().sum()).oversubscribed();
        let team = team.build()?;
        let name = nodes.iter().map(usize::to_string).collect::<Vec<_>>().join(" + ");
        for (shape, sizes, tokens) in shapes {
            // Two threads would sleep for minutes.
            for &tokens in tokens.iter().filter(|&&tokens| tokens < 20 * team.threads()) {
                let (time, busy) = measure(&team, sizes, tokens)?;
                println!("{name:10} {shape:14} {tokens:6}  {:9.1}  {:.0} %", time * 1e6, busy * 100.0);
            }
        }
    }
    Ok(())
}
