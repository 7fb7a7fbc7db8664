//! What this machine can do at most: memory read bandwidth and multiply-add peaks, measured in this process.
//!
//! A kernel's speed means little without the limit it runs into, and on a shared machine that limit moves, so it is measured
//! in the same run. Two kinds of loops, on every thread at once, each thread on a CPU of its own:
//! - reads: XOR of wide loads over memory much larger than the caches, all bytes over the time from the first thread's start
//!   to the last one's end;
//! - peaks: independent multiply-adds on registers, enough of them in flight to cover the latency, two operations each.
//!
//! Both are cut into windows of a few milliseconds, of which the median counts, and a thread that is done with its own part
//! of a window helps the others. A layer call is as short, shares its work as well, and is judged by its median too: long
//! passes over fixed shares would lose more to other processes than the calls do, and fractions would come out too high.

#![allow(unsafe_code)] // kernels that measure the machine

use std::hint::black_box;
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kt::cpu::input::InputLayout;
use kt::cpu::memory::zeroed_pages;
use kt::cpu::tier::Tier;
use kt::cpu::topology::Topology;

use crate::options::threads_text;

/// Passes over the memory.
const PASSES: usize = 5;
/// Bytes per thread and window of reading: milliseconds, and with all threads more than the last-level cache's share of them.
const WINDOW_BYTES: usize = 32 << 20;
/// Bytes that a thread takes at a time.
const CHUNK_BYTES: usize = 1 << 20;
/// Windows of each peak, and the length of one.
const STRETCHES: usize = 40;
const STRETCH: Duration = Duration::from_millis(3);
/// Until the clock frequency has settled.
const WARM_UP: Duration = Duration::from_millis(30);
/// The same for [`Meter::moment`], which is called while the machine is at work already.
const MOMENT_WINDOWS: usize = 20;
const MOMENT_STRETCHES: usize = 8;
const MOMENT_WARM_UP: Duration = Duration::from_millis(4);
/// Rounds of a peak loop between two looks at the clock: about 50 microseconds.
const ROUNDS: u64 = 20_000;
/// Bytes that the read bandwidth is measured over, where memory allows.
pub const READ_BYTES: u64 = 1 << 30;

/// A number measured several times.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// The highest.
    pub best: f64,
    /// The middle one: what fractions are taken of.
    pub median: f64,
}

impl Measured {
    fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        Measured { best: samples.last().copied().unwrap_or(0.0), median: median_of_sorted(&samples) }
    }
}

/// The middle of sorted numbers, 0 when there are none.
pub fn median_of_sorted(sorted: &[f64]) -> f64 {
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// The highest rate of one kind of multiply-add.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peak {
    /// 10^12 operations per second, all threads together; a multiply-add is two.
    pub tera: Measured,
    /// The instruction that reaches it.
    pub instruction: &'static str,
}

/// The limits of this machine for a number of threads.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Threads that measured.
    pub threads: usize,
    /// Bytes that were read in each pass.
    pub read_bytes: u64,
    /// Read bandwidth in 10^9 bytes per second.
    pub read_gb_per_s: Measured,
    /// int8 x int8; without such an instruction that of F32.
    pub int8: Peak,
    /// bf16 x bf16; without such an instruction that of F32.
    pub bf16: Peak,
    /// F32 x F32.
    pub f32: Peak,
}

impl Limits {
    /// One line for a reader.
    pub fn summary(&self) -> String {
        let peak = |p: &Peak| format!("{:.3} ({})", p.tera.median, p.instruction);
        format!(
            "limits, {}: read {:.1} GB/s (best {:.1}), tera-op/s: int8 {}, bf16 {}, f32 {}",
            threads_text(self.threads),
            self.read_gb_per_s.median,
            self.read_gb_per_s.best,
            peak(&self.int8),
            peak(&self.bf16),
            peak(&self.f32)
        )
    }

    /// The same as JSON.
    pub fn to_json(&self) -> serde_json::Value {
        let peak = |p: &Peak| serde_json::json!({ "median": p.tera.median, "best": p.tera.best, "instruction": p.instruction });
        serde_json::json!({
            "threads": self.threads,
            "read_bytes": self.read_bytes,
            "read_gb_per_s": { "median": self.read_gb_per_s.median, "best": self.read_gb_per_s.best },
            "int8_tera_op_per_s": peak(&self.int8),
            "bf16_tera_op_per_s": peak(&self.bf16),
            "f32_tera_op_per_s": peak(&self.f32),
        })
    }
}

/// The CPUs that so many threads of a team have: those of its nodes, cores before siblings.
pub fn cpus_of(topology: &Topology, threads: usize) -> Vec<usize> {
    let shares = topology.allot(threads);
    shares.iter().flat_map(|share| share.cpus.iter().copied().cycle().take(share.threads)).collect()
}

/// Keeps the calling thread on one CPU; where the system refuses, it runs wherever it is put.
fn stay_on(cpus: &[usize], thread: usize) {
    #[cfg(target_os = "linux")]
    if let Some(&cpu) = cpus.get(thread % cpus.len().max(1)).filter(|&&c| c < libc::CPU_SETSIZE as usize) {
        // SAFETY: cpu_set_t is plain bits, of which all-zero is the empty set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: `cpu` is below CPU_SETSIZE, checked above.
        unsafe { libc::CPU_SET(cpu, &mut set) };
        // SAFETY: pid 0 is the calling thread; the set is initialized and its size is given.
        let _ = unsafe { libc::sched_setaffinity(0, size_of_val(&set), &set) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (cpus, thread);
}

/// What is multiplied with what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Factors {
    /// int8 with int8.
    Int8,
    /// bf16 with bf16.
    Bf16,
    /// F32 with F32.
    F32,
}

impl Factors {
    /// What a kernel multiplies whose inputs are rounded like this.
    pub fn of(inputs: InputLayout) -> Factors {
        match inputs {
            InputLayout::F32 => Factors::F32,
            InputLayout::Bf16 => Factors::Bf16,
            InputLayout::Int8 { .. } | InputLayout::Int8Words { .. } => Factors::Int8,
        }
    }

    /// Name of the limit.
    pub fn peak_name(self) -> &'static str {
        match self {
            Factors::Int8 => "int8 peak",
            Factors::Bf16 => "bf16 peak",
            Factors::F32 => "f32 peak",
        }
    }
}

/// The two limits of one kernel at one moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Moment {
    /// Read bandwidth in 10^9 bytes per second.
    pub read_gb_per_s: f64,
    /// Multiply-adds in 10^12 operations per second, two each.
    pub tera_op_per_s: f64,
}

/// Measures [`Limits`], as often as asked, over memory that it keeps.
pub struct Meter {
    threads: usize,
    cpus: Vec<usize>,
    cap: Tier,
    map: Box<dyn Deref<Target = [u8]> + Sync>,
    /// Bytes of each thread's own part of the memory.
    slice: usize,
}

impl Meter {
    /// For `threads` threads on the given CPUs (in turns, when there are fewer), about `read_bytes` to read, and instructions
    /// up to tier `cap`.
    ///
    /// # Errors
    /// The memory to read cannot be had.
    pub fn new(threads: usize, cpus: &[usize], read_bytes: u64, cap: Tier) -> anyhow::Result<Meter> {
        let threads = threads.max(1);
        let slice = (read_bytes as usize / threads).next_multiple_of(CHUNK_BYTES).max(CHUNK_BYTES);
        let mut map = zeroed_pages(slice * threads, Default::default())?;
        std::thread::scope(|scope| {
            for (thread, mine) in map.chunks_exact_mut(slice).enumerate() {
                scope.spawn(move || {
                    // Each thread touches first what it reads; untouched pages would all read from one page of zeros.
                    stay_on(cpus, thread);
                    mine.fill(1);
                });
            }
        });
        Ok(Meter { threads, cpus: cpus.to_vec(), cap, map: Box::new(map), slice })
    }

    /// Measures: less than a second.
    pub fn measure(&self) -> Limits {
        let loops = Peaks::detect(self.cap);
        // On a CPU without narrow multiply-adds the three are one loop; measured once, they also agree.
        let peak = |l| self.peak(l, WARM_UP, STRETCHES);
        let f32 = peak(loops.f32);
        let or_f32 = |l: Loop| if l.instruction == loops.f32.instruction { f32 } else { peak(l) };
        Limits {
            threads: self.threads,
            read_bytes: self.map.len() as u64,
            read_gb_per_s: self.read_passes(),
            int8: or_f32(loops.int8),
            bf16: or_f32(loops.bf16),
            f32,
        }
    }

    /// The read bandwidth alone, in 10^9 bytes per second.
    pub fn read_gb_per_s(&self) -> f64 {
        self.read_passes().median
    }

    fn read_passes(&self) -> Measured {
        self.read_bandwidth(PASSES * (self.slice / WINDOW_BYTES.min(self.slice)))
    }

    /// Measures the read bandwidth and one peak in some 50 milliseconds times `effort`: less exact, to be repeated.
    pub fn moment(&self, factors: Factors, effort: f64) -> Moment {
        let some = |n: usize| (n as f64 * effort).ceil().max(1.0) as usize;
        let loops = Peaks::detect(self.cap);
        let peak = match factors {
            Factors::Int8 => loops.int8,
            Factors::Bf16 => loops.bf16,
            Factors::F32 => loops.f32,
        };
        Moment {
            read_gb_per_s: self.read_bandwidth(some(MOMENT_WINDOWS)).median,
            tera_op_per_s: self.peak(peak, MOMENT_WARM_UP, some(MOMENT_STRETCHES)).tera.median,
        }
    }

    /// Runs `f(thread)` on every thread and returns the answers.
    fn on_all<T: Send>(&self, f: impl Fn(usize) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let f = &f;
            let start = |thread| {
                scope.spawn(move || {
                    stay_on(&self.cpus, thread);
                    f(thread)
                })
            };
            let running: Vec<_> = (0..self.threads).map(start).collect();
            running.into_iter().map(|t| t.join().expect("measuring does not panic")).collect()
        })
    }

    fn read_bandwidth(&self, windows: usize) -> Measured {
        let read = reader(self.cap);
        let window = WINDOW_BYTES.min(self.slice);
        // Chunks taken so far, of each thread's part of each window.
        let taken: Vec<AtomicUsize> = (0..windows * self.threads).map(|_| AtomicUsize::new(0)).collect();
        let gate = Gate::default();
        let spans = self.on_all(|thread| {
            let one = |w: usize| {
                gate.pass(self.threads, w);
                let start = Instant::now();
                let first = w % (self.slice / window) * window;
                for owner in (0..self.threads).map(|i| (thread + i) % self.threads) {
                    loop {
                        let chunk = taken[w * self.threads + owner].fetch_add(1, Ordering::Relaxed) * CHUNK_BYTES;
                        if chunk >= window {
                            break;
                        }
                        black_box(read.run(&self.map[owner * self.slice + first + chunk..][..CHUNK_BYTES]));
                    }
                }
                (start, Instant::now())
            };
            (0..windows).map(one).collect::<Vec<_>>()
        });
        let rate = |w: usize| {
            let first = spans.iter().map(|s| s[w].0).min().expect("at least one thread");
            let last = spans.iter().map(|s| s[w].1).max().expect("at least one thread");
            (window * self.threads) as f64 / (last - first).as_secs_f64() * 1e-9
        };
        Measured::of((0..windows).map(rate).collect())
    }

    fn peak(&self, each: Loop, warm_up: Duration, stretches: usize) -> Peak {
        let gate = Gate::default();
        let rates = self.on_all(|_| {
            each.stretch(warm_up);
            let one = |w: usize| {
                gate.pass(self.threads, w);
                each.stretch(STRETCH)
            };
            (0..stretches).map(one).collect::<Vec<f64>>()
        });
        let tera = Measured::of((0..stretches).map(|w| rates.iter().map(|r| r[w]).sum::<f64>() * 1e-12).collect());
        Peak { tera, instruction: each.instruction }
    }
}

/// A barrier that spins: waking a parked thread would take a noticeable part of a window.
#[derive(Default)]
struct Gate {
    arrived: AtomicUsize,
}

impl Gate {
    /// Waits until all threads have come to their pass `n`, counted from 0.
    fn pass(&self, threads: usize, n: usize) {
        self.arrived.fetch_add(1, Ordering::AcqRel);
        let mut spins = 0u32;
        while self.arrived.load(Ordering::Acquire) < (n + 1) * threads {
            std::hint::spin_loop();
            spins += 1;
            // With more threads than CPUs the missing one may be waiting for this CPU.
            if spins.is_multiple_of(1 << 12) {
                std::thread::yield_now();
            }
        }
    }
}

/// A loop over memory; holding one proves that its instructions exist.
#[derive(Clone, Copy)]
enum Reader {
    Plain,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

fn reader(cap: Tier) -> Reader {
    #[cfg(target_arch = "x86_64")]
    {
        if cap >= Tier::Avx512 && Tier::Avx512.available() {
            return Reader::Avx512;
        }
        if cap >= Tier::Avx2 && Tier::Avx2.available() {
            return Reader::Avx2;
        }
    }
    let _ = cap;
    Reader::Plain
}

impl Reader {
    fn run(self, data: &[u8]) -> u64 {
        match self {
            Reader::Plain => {
                data.chunks_exact(8).fold(0, |sum, c| sum ^ u64::from_le_bytes(c.try_into().expect("8 bytes")))
            }
            // SAFETY: `reader` found AVX2.
            #[cfg(target_arch = "x86_64")]
            Reader::Avx2 => unsafe { x86::read_avx2(data) },
            // SAFETY: `reader` found AVX-512 F.
            #[cfg(target_arch = "x86_64")]
            Reader::Avx512 => unsafe { x86::read_avx512(data) },
        }
    }
}

/// One peak loop: does that many rounds. Made by [`Peaks::detect`] only, which checks that the CPU has the instructions.
#[derive(Clone, Copy)]
struct Loop {
    instruction: &'static str,
    operations_per_round: u64,
    /// # Safety
    /// The CPU must have `instruction`.
    run: unsafe fn(u64),
}

struct Peaks {
    int8: Loop,
    bf16: Loop,
    f32: Loop,
}

impl Peaks {
    /// The fastest loops that this CPU has, with instructions up to `cap`.
    fn detect(cap: Tier) -> Peaks {
        let plain = Loop { instruction: "plain f32 multiply, add", operations_per_round: 64 * 2, run: plain_f32 };
        let mut best = Peaks { int8: plain, bf16: plain, f32: plain };
        #[cfg(target_arch = "x86_64")]
        {
            let has = |tier: Tier| tier <= cap && tier.available();
            if has(Tier::Avx2) {
                let fma = Loop { instruction: "vfmadd231ps ymm", operations_per_round: 12 * 16, run: x86::f32_avx2 };
                best = Peaks { int8: x86::INT8_AVX2, bf16: fma, f32: fma };
            }
            if has(Tier::AvxVnni) {
                best.int8 = x86::INT8_AVXVNNI;
            }
            if has(Tier::Avx512) {
                best.f32 = Loop { instruction: "vfmadd231ps zmm", operations_per_round: 24 * 32, run: x86::f32_avx512 };
                best.bf16 = best.f32;
            }
            if has(Tier::Avx512Vnni) {
                best.int8 = Loop { instruction: "vpdpbusd zmm", operations_per_round: 24 * 128, run: x86::int8_avx512 };
            }
            if has(Tier::Avx512Bf16) {
                best.bf16 = Loop { instruction: "vdpbf16ps zmm", operations_per_round: 24 * 64, run: x86::bf16_avx512 };
            }
            if has(Tier::Amx) {
                best.int8 = x86::INT8_AMX;
                best.bf16 = x86::BF16_AMX;
            }
        }
        let _ = cap;
        best
    }
}

impl Loop {
    /// Operations per second over about `length`.
    fn stretch(self, length: Duration) -> f64 {
        let (start, mut rounds) = (Instant::now(), 0);
        loop {
            // SAFETY: `Peaks::detect` made this loop after finding its instructions.
            unsafe { (self.run)(ROUNDS) };
            rounds += ROUNDS;
            let elapsed = start.elapsed();
            if elapsed >= length {
                return (rounds * self.operations_per_round) as f64 / elapsed.as_secs_f64();
            }
        }
    }
}

/// 64 F32 accumulators, a multiply and an add each, in whatever the compiler makes of them for the build's target.
fn plain_f32(rounds: u64) {
    let (a, b) = (black_box(0.999f32), black_box(0.001f32));
    let mut sums: [f32; 64] = std::array::from_fn(|i| black_box(i as f32));
    for _ in 0..rounds {
        for s in &mut sums {
            *s = *s * a + b;
        }
    }
    black_box(sums);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use super::Loop;

    /// Bytes that a reader asks for ahead of its loads: four rounds of eight lines.
    const AHEAD: usize = 2048;

    #[target_feature(enable = "avx512f")]
    pub fn read_avx512(data: &[u8]) -> u64 {
        // SAFETY: any 64 bytes are a vector of integers; align_to keeps to the slice.
        let (_, vectors, _) = unsafe { data.align_to::<__m512i>() };
        let mut sums = [_mm512_setzero_si512(); 8];
        for eight in vectors.chunks_exact(8) {
            for (sum, v) in sums.iter_mut().zip(eight) {
                // A prefetch accesses nothing; its address need not be mapped.
                _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(v).cast::<i8>().wrapping_add(AHEAD));
                *sum = _mm512_xor_si512(*sum, *v);
            }
        }
        let sum = sums.into_iter().fold(_mm512_setzero_si512(), |a, b| _mm512_xor_si512(a, b));
        _mm512_reduce_add_epi64(sum) as u64
    }

    #[target_feature(enable = "avx2")]
    pub fn read_avx2(data: &[u8]) -> u64 {
        // SAFETY: any 32 bytes are a vector of integers; align_to keeps to the slice.
        let (_, vectors, _) = unsafe { data.align_to::<__m256i>() };
        let mut sums = [_mm256_setzero_si256(); 8];
        for eight in vectors.chunks_exact(8) {
            for (i, (sum, v)) in sums.iter_mut().zip(eight).enumerate() {
                if i % 2 == 0 {
                    _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(v).cast::<i8>().wrapping_add(AHEAD));
                }
                *sum = _mm256_xor_si256(*sum, *v);
            }
        }
        let sum = sums.into_iter().fold(_mm256_setzero_si256(), |a, b| _mm256_xor_si256(a, b));
        let halves = _mm_xor_si128(_mm256_castsi256_si128(sum), _mm256_extracti128_si256::<1>(sum));
        (_mm_extract_epi64::<0>(halves) ^ _mm_extract_epi64::<1>(halves)) as u64
    }

    /// A loop of `$n` independent accumulators: start values that the compiler cannot see keep it from merging them.
    macro_rules! accumulate {
        ($rounds:ident, $n:literal, $start:expr, |$sum:ident| $step:expr) => {{
            let mut sums: [_; $n] = std::array::from_fn($start);
            for _ in 0..$rounds {
                for $sum in &mut sums {
                    *$sum = $step;
                }
            }
            black_box(sums);
        }};
    }

    #[target_feature(enable = "avx512f")]
    pub fn f32_avx512(rounds: u64) {
        let (a, b) = (_mm512_set1_ps(black_box(0.001)), _mm512_set1_ps(black_box(0.999)));
        accumulate!(rounds, 24, |i| black_box(_mm512_set1_ps(i as f32)), |sum| _mm512_fmadd_ps(a, b, *sum));
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn f32_avx2(rounds: u64) {
        let (a, b) = (_mm256_set1_ps(black_box(0.001)), _mm256_set1_ps(black_box(0.999)));
        accumulate!(rounds, 12, |i| black_box(_mm256_set1_ps(i as f32)), |sum| _mm256_fmadd_ps(a, b, *sum));
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    pub fn int8_avx512(rounds: u64) {
        let (a, b) = (_mm512_set1_epi8(black_box(1)), _mm512_set1_epi8(black_box(1)));
        accumulate!(rounds, 24, |i| black_box(_mm512_set1_epi32(i as i32)), |sum| _mm512_dpbusd_epi32(*sum, a, b));
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub fn bf16_avx512(rounds: u64) {
        // Pairs of 2^-31 and 1 as BF16: products that neither overflow nor become subnormal.
        let a: __m512bh = bf16_pairs(_mm512_set1_epi32(black_box(0x3000_3000)));
        let b: __m512bh = bf16_pairs(_mm512_set1_epi32(black_box(0x3f80_3f80)));
        accumulate!(rounds, 24, |i| black_box(_mm512_set1_ps(i as f32)), |sum| _mm512_dpbf16_ps(*sum, a, b));
    }

    fn bf16_pairs(v: __m512i) -> __m512bh {
        // SAFETY: both are 64 bytes without invalid values.
        unsafe { std::mem::transmute::<__m512i, __m512bh>(v) }
    }

    /// Rounds in which a loop of tiles multiplies once: its four products take as long as so many times 24 of vectors, or less.
    const TILE_ROUNDS: u64 = 16;

    /// What `ldtilecfg` reads: eight tiles of 16 rows of 64 bytes.
    #[repr(C, align(64))]
    struct Tiles {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    static TILES: Tiles = {
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        let mut tile = 0;
        while tile < 8 {
            (row_bytes[tile], rows[tile]) = (64, 16);
            tile += 1;
        }
        Tiles { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
    };

    /// A loop of four products of tiles with four sums, of operands that hold a dword each.
    macro_rules! tiles {
        ($instruction:literal, $rounds:ident, $a:literal, $b:literal) => {{
            let (a, b) = (black_box([$a; 256]), black_box([$b; 256]));
            // SAFETY: the caller has the instructions, and the operating system's permission. The loads read 16 rows of 64 bytes, which is all of `a`
            // and `b`; tiles are released before the compiler has its registers again.
            unsafe {
                asm!(
                    "ldtilecfg [{config}]",
                    "tileloadd tmm4, [{a} + {row}]",
                    "tileloadd tmm5, [{a} + {row}]",
                    "tileloadd tmm6, [{b} + {row}]",
                    "tileloadd tmm7, [{b} + {row}]",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "2:",
                    concat!($instruction, " tmm0, tmm4, tmm6"),
                    concat!($instruction, " tmm1, tmm4, tmm7"),
                    concat!($instruction, " tmm2, tmm5, tmm6"),
                    concat!($instruction, " tmm3, tmm5, tmm7"),
                    "dec {left}",
                    "jnz 2b",
                    "tilerelease",
                    config = in(reg) &raw const TILES,
                    a = in(reg) a.as_ptr(),
                    b = in(reg) b.as_ptr(),
                    row = in(reg) 64_usize,
                    left = inout(reg) $rounds.div_ceil(TILE_ROUNDS).max(1) => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack, readonly),
                );
            }
        }};
    }

    /// Of four products of tiles: 16 x 16 sums of `k` products each.
    const fn tile_operations(k: u64) -> u64 {
        4 * 16 * 16 * k * 2 / TILE_ROUNDS
    }

    pub const INT8_AMX: Loop =
        Loop { instruction: "tdpbusd", operations_per_round: tile_operations(64), run: int8_amx };

    pub const BF16_AMX: Loop =
        Loop { instruction: "tdpbf16ps", operations_per_round: tile_operations(32), run: bf16_amx };

    /// # Safety
    /// The CPU has AMX with int8, which this process may use.
    unsafe fn int8_amx(rounds: u64) {
        tiles!("tdpbusd", rounds, 0x0101_0101_u32, 0x0101_0101_u32);
    }

    /// # Safety
    /// The CPU has AMX with bf16, which this process may use.
    unsafe fn bf16_amx(rounds: u64) {
        // As `bf16_avx512`.
        tiles!("tdpbf16ps", rounds, 0x3000_3000_u32, 0x3f80_3f80_u32);
    }

    pub const INT8_AVXVNNI: Loop =
        Loop { instruction: "vpdpbusd ymm (VEX)", operations_per_round: 12 * 64, run: int8_avxvnni };

    #[target_feature(enable = "avx2,avxvnni")]
    fn int8_avxvnni(rounds: u64) {
        let (a, b) = (_mm256_set1_epi8(black_box(1)), _mm256_set1_epi8(black_box(1)));
        accumulate!(rounds, 12, |i| black_box(_mm256_set1_epi32(i as i32)), |sum| _mm256_dpbusd_avx_epi32(*sum, a, b));
    }

    pub const INT8_AVX2: Loop =
        Loop { instruction: "vpmaddubsw, vpmaddwd, vpaddd ymm", operations_per_round: 12 * 64, run: int8_avx2 };

    #[target_feature(enable = "avx2")]
    fn int8_avx2(rounds: u64) {
        let (a, ones) = (_mm256_set1_epi8(black_box(1)), _mm256_set1_epi16(black_box(1)));
        // The sum itself is an operand, or the compiler would multiply once for all rounds.
        accumulate!(rounds, 12, |i| black_box(_mm256_set1_epi32(i as i32)), |sum| {
            _mm256_add_epi32(*sum, _mm256_madd_epi16(_mm256_maddubs_epi16(*sum, a), ones))
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_bests() {
        assert_eq!(Measured::of(vec![3.0, 1.0, 2.0]), Measured { best: 3.0, median: 2.0 });
        assert_eq!(median_of_sorted(&[1.0, 3.0]), 2.0);
        assert_eq!(median_of_sorted(&[]), 0.0);
    }

    #[test]
    fn readers_read_every_lane() {
        for tier in Tier::all_available(Tier::Amx) {
            let read = reader(tier);
            // Bits in the middle of 8 KiB, where no alignment cuts them off; at most 576 bytes at an end are.
            for bit in 4096 * 8..4096 * 8 + 1024 {
                let mut data = vec![0u8; 8192];
                data[bit / 8] = 1 << (bit % 8);
                assert_ne!(read.run(&data), 0, "{tier}: bit {bit} is not part of the sum");
            }
        }
    }

    #[test]
    fn limits_of_lower_tiers_are_lower() {
        let measure = |cap| Meter::new(1, &[], 8 << 20, cap).unwrap().measure();
        let plain = measure(Tier::Portable);
        assert!(plain.read_gb_per_s.median > 0.0 && plain.read_gb_per_s.best >= plain.read_gb_per_s.median);
        assert_eq!((plain.int8, plain.bf16), (plain.f32, plain.f32));
        if Tier::Avx2.available() {
            let wide = measure(Tier::Amx);
            assert!(wide.int8.tera.best > plain.int8.tera.best, "{} {}", wide.summary(), plain.summary());
            assert!(wide.f32.tera.best > plain.f32.tera.best, "{} {}", wide.summary(), plain.summary());
        }
        if Tier::Amx.available() {
            let (tiles, vectors) = (measure(Tier::Amx), measure(Tier::Avx512Bf16));
            assert_eq!((tiles.int8.instruction, tiles.bf16.instruction), ("tdpbusd", "tdpbf16ps"));
            assert!(tiles.bf16.tera.best > vectors.bf16.tera.best, "{} {}", tiles.summary(), vectors.summary());
        } else {
            println!("skipped: the limits of tier amx, which this CPU does not have");
        }
    }

    #[test]
    fn more_threads_than_cpus_come_to_an_end() {
        let limits = Meter::new(5, &[0], 5 << 20, Tier::Amx).unwrap().measure();
        assert_eq!((limits.threads, limits.read_bytes), (5, 5 << 20));
        assert!(limits.read_gb_per_s.median > 0.0 && limits.f32.tera.median > 0.0);
    }

    #[test]
    fn a_moment_sees_what_a_measurement_sees() {
        let meter = Meter::new(1, &[], 64 << 20, Tier::Amx).unwrap();
        // Other processes may take any part of the machine at any time: of several tries, one is not disturbed.
        let near = |a: f64, b: f64| a > 0.2 * b && b > 0.2 * a;
        let seen = (0..10).any(|_| {
            let (all, int8, f32) = (meter.measure(), meter.moment(Factors::Int8, 1.0), meter.moment(Factors::F32, 0.1));
            near(int8.read_gb_per_s, all.read_gb_per_s.best)
                && near(int8.tera_op_per_s, all.int8.tera.best)
                && near(f32.tera_op_per_s, all.f32.tera.best)
        });
        assert!(seen, "ten times, moments were far from measurements");
    }
}
