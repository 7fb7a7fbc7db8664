//! `kt bench --dispatch`: how long it takes to hand work to threads and to have it back, beside rayon; and what becomes of a layer call
//! when another process wants the same cores.
//!
//! A task here does nothing, so what is measured is the handing over: one task a thread, back to back, and after pauses in which
//! threads that spin have gone to sleep. Then the same with a process beside it that never sleeps.
//!
//! With `t` threads and `b` busy processes on `c` CPUs, a fair system gives each of them `c / (t + b)` of a CPU, where that is less than
//! one: calls may then take `(t + b) / c` times as long as alone. What they take beyond that is lost to waiting for threads that are not
//! running. As a call either meets the other process or not, the mean is what counts, not the median.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use kt::Experts;
use kt::cpu::team::Team;
use serde_json::{Value, json};

use super::case::{Caller, Quartiles};
use super::shape::Shape;

/// Pauses between two dispatches, in microseconds: none; shorter than threads spin; longer.
const PAUSES: [u64; 3] = [0, 30, 500];

/// A process that never sleeps, ended when dropped.
struct Busy(Child);

impl Busy {
    fn start() -> anyhow::Result<Busy> {
        let child = Command::new("sh").args(["-c", "while :; do :; done"]).stdin(Stdio::null()).spawn();
        let busy = Busy(child.context("starting a busy process: sh")?);
        // Until the system has placed it.
        std::thread::sleep(Duration::from_millis(100));
        Ok(busy)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Microseconds of one way of dispatching: median and 99th percentile for each of [`PAUSES`].
#[derive(Debug, Clone, PartialEq)]
pub struct Dispatch {
    what: String,
    threads: usize,
    busy: bool,
    us: Vec<(f64, f64)>,
}

impl Dispatch {
    fn measure(what: &str, threads: usize, busy: bool, seconds: f64, mut dispatch: impl FnMut()) -> Self {
        let us = PAUSES.map(|pause| {
            let pause = Duration::from_micros(pause);
            let (begin, length) = (Instant::now(), Duration::from_secs_f64(seconds));
            let mut calls = Vec::new();
            while begin.elapsed() < length || calls.len() < 10 {
                let wait = Instant::now();
                while wait.elapsed() < pause {
                    std::hint::spin_loop();
                }
                let start = Instant::now();
                dispatch();
                calls.push(start.elapsed().as_secs_f64() * 1e6);
            }
            calls.sort_by(f64::total_cmp);
            let high = calls[(calls.len() * 99 / 100).min(calls.len() - 1)];
            (Quartiles::of(calls).median, high)
        });
        Dispatch { what: what.into(), threads, busy, us: us.into() }
    }

    pub fn header() -> String {
        let pauses: String = PAUSES.map(|p| format!(" {:>19}", format!("pause {p} us"))).concat();
        format!("{:<34} {:>7} {:<5}{pauses}", "microseconds, median (99 %)", "threads", "busy")
    }

    pub fn row(&self) -> String {
        let us: String = self.us.iter().map(|(m, h)| format!(" {m:>8.2} ({h:>8.1})")).collect();
        format!("{:<34} {:>7} {:<5}{us}", self.what, self.threads, if self.busy { "yes" } else { "no" })
    }

    pub fn to_json(&self) -> Value {
        let us: Vec<Value> = PAUSES
            .iter()
            .zip(&self.us)
            .map(|(pause, (median, p99))| json!({"pause_us": pause, "median_us": median, "p99_us": p99}))
            .collect();
        json!({"dispatch": {"what": self.what, "threads": self.threads, "busy_process": self.busy, "us": us}})
    }
}

/// All ways of dispatching, for one thread and for `threads`, alone and beside a busy process. `seconds` in all.
pub fn measure(threads: usize, seconds: f64) -> anyhow::Result<Vec<Dispatch>> {
    let counts: Vec<usize> = if threads > 1 { vec![1, threads] } else { vec![1] };
    let seconds = seconds / (counts.len() * 2 * 6 * PAUSES.len()) as f64;
    let mut lines = Vec::new();
    for busy in [false, true] {
        let _process = busy.then(Busy::start).transpose()?;
        for &threads in &counts {
            let team = Team::builder().threads(threads).build()?;
            let of = |what: &str, f: &mut dyn FnMut()| Dispatch::measure(what, threads, busy, seconds, f);
            let run = |team: &Team, runs: usize| {
                let mut region = team.region();
                (0..runs).for_each(|_| region.run(threads, |_, _| ()));
            };
            lines.push(of("kt, one run", &mut || run(&team, 1)));
            lines.push(of("kt, a region of three runs", &mut || run(&team, 3)));
            let pool = || rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            let lent = Team::builder().threads(threads).pool(pool()?).build()?;
            lines.push(of("kt on rayon's threads, three runs", &mut || run(&lent, 3)));
            let pool = Arc::new(pool()?);
            lines.push(of("rayon, broadcast", &mut || drop(pool.broadcast(|_| ()))));
            lines.push(of("rayon, scope and spawns", &mut || {
                pool.scope(|s| (0..threads).for_each(|_| s.spawn(|_| ())));
            }));
            lines.push(of("rayon, three broadcasts", &mut || (0..3).for_each(|_| drop(pool.broadcast(|_| ())))));
        }
    }
    Ok(lines)
}

/// One-token calls of a layer alone and beside busy processes.
#[derive(Debug, Clone, PartialEq)]
pub struct Shared {
    pub shape: String,
    pub format: String,
    pub threads: usize,
    pub cpus: usize,
    /// Mean microseconds of a call alone.
    pub alone: f64,
    /// The same beside one busy process.
    pub beside: f64,
}

impl Shared {
    /// Takes turns, so that a machine that changes its speed does so for both.
    pub fn measure(
        experts: &Experts,
        shape: &Shape,
        (threads, cpus): (usize, usize),
        seconds: f64,
    ) -> anyhow::Result<Self> {
        const TURNS: usize = 4;
        let length = Duration::from_secs_f64(seconds / (2 * TURNS) as f64);
        let mut caller = Caller::new(experts, shape, 1);
        let mut mean = || -> anyhow::Result<f64> {
            let calls = caller.calls(length, || ())?;
            Ok(calls.iter().map(|c| c.seconds * 1e6).sum::<f64>() / calls.len().max(1) as f64)
        };
        mean()?;
        let (mut alone, mut beside) = (Vec::new(), Vec::new());
        for _ in 0..TURNS {
            alone.push(mean()?);
            let _process = Busy::start()?;
            beside.push(mean()?);
        }
        let format = experts.layers().first().map(|l| l.spec().format_label()).unwrap_or_default();
        let middle = |values| Quartiles::of(values).median;
        Ok(Shared { shape: shape.name.clone(), format, threads, cpus, alone: middle(alone), beside: middle(beside) })
    }

    /// How many times as long as alone a fair system would let it take.
    pub fn fair(&self) -> f64 {
        ((self.threads + 1) as f64 / self.cpus.max(1) as f64).max(1.0)
    }

    /// What it takes beside, over its fair share.
    pub fn of_fair(&self) -> f64 {
        self.beside / self.alone / self.fair()
    }

    pub fn row(&self) -> String {
        format!(
            "{} {}, one token, {} threads on {} CPUs: alone {:.1} us, beside a busy process {:.1} us; {:.2}x, fair would be {:.2}x: \
             {:.2} of its fair share",
            self.shape,
            self.format,
            self.threads,
            self.cpus,
            self.alone,
            self.beside,
            self.beside / self.alone,
            self.fair(),
            self.of_fair()
        )
    }

    pub fn to_json(&self) -> Value {
        json!({
            "shared_cores": {
                "shape": self.shape,
                "format": self.format,
                "threads": self.threads,
                "cpus": self.cpus,
                "alone_us": self.alone,
                "beside_us": self.beside,
                "fair": self.fair(),
                "of_fair": self.of_fair(),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_fair_by_the_number_of_cpus() {
        let s = Shared { shape: "s".into(), format: "BF16".into(), threads: 2, cpus: 2, alone: 100.0, beside: 180.0 };
        assert_eq!((s.fair(), s.of_fair()), (1.5, 1.2));
        assert_eq!(Shared { cpus: 8, ..s.clone() }.fair(), 1.0);
        assert!(s.row().contains("1.20 of its fair share"), "{}", s.row());
        assert_eq!(s.to_json()["shared_cores"]["of_fair"], 1.2);
    }

    #[test]
    fn every_way_is_measured_alone_and_beside() {
        let lines = measure(2, 0.1).unwrap();
        assert_eq!(lines.len(), 24);
        assert!(lines.iter().all(|l| l.us.len() == 3 && l.us.iter().all(|(m, h)| *m > 0.0 && h >= m)), "{lines:?}");
        assert_eq!(lines.iter().filter(|l| l.busy).count(), 12);
        assert!(lines[0].row().starts_with("kt, one run"), "{}", lines[0].row());
        assert_eq!(lines[0].to_json()["dispatch"]["us"][2]["pause_us"], 500);
    }
}
