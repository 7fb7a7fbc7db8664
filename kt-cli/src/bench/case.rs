//! One case: a layer, called with so many tokens, in slices between looks at the machine's limits.
//!
//! ```text
//! limits  calls  limits  calls  limits …     ten slices of calls, eleven looks at the limits
//! ```
//!
//! On a shared machine limits move by half within a minute, and a layer's speed moves with them. So each slice of calls is judged by the limits
//! on both sides of it, a tenth of a second away, and the middle of the slices' fractions counts; the quartiles tell how far
//! to believe it.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::bail;
use half::bf16;
use kt::{Batch, Experts, LayerExperts};

use super::shape::{Random, Shape, route};
use crate::limits::{Factors, Meter, Moment, median_of_sorted};

/// Slices that a case is cut into.
const SLICES: usize = 10;
/// Fewest slices of a case whose calls take longer than slices should.
const FEWEST: usize = 3;
/// How often the time asked for such a case may take.
const PATIENCE: f64 = 4.0;
/// Quartiles that are further apart than this share of the middle make a case doubtful.
const SPREAD: f64 = 0.15;
/// No case can be above 1; this much is the error of measurement.
const POSSIBLE: f64 = 1.03;

/// The middle half of some numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Quartiles {
    pub low: f64,
    pub median: f64,
    pub high: f64,
}

impl Quartiles {
    /// All 0 for no numbers.
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let n = values.len();
        // The medians of both halves, the middle one counted in each.
        let (low, high) = (&values[..n.div_ceil(2)], &values[n / 2..]);
        Quartiles { low: median_of_sorted(low), median: median_of_sorted(&values), high: median_of_sorted(high) }
    }
}

/// One layer call.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    pub seconds: f64,
    /// Stored bytes of the experts that it touched, each once.
    pub bytes: f64,
}

/// What a case came to.
#[derive(Debug, Clone, PartialEq)]
pub struct Speed {
    /// Of a call.
    pub seconds: Quartiles,
    /// Stored bytes: 10^9 a second.
    pub gb_per_s: f64,
    /// 10^12 operations a second.
    pub tera_op_per_s: f64,
    /// The time that reading the bytes takes at least, over the time taken: middle of the slices.
    pub of_read: f64,
    /// The same of the time that multiplying takes at least.
    pub of_peak: f64,
    /// The same of the longer of the two, which is the limit.
    pub of_limit: Quartiles,
    /// Whether reading is the limit.
    pub reads: bool,
    /// Middle of the looks at the limits.
    pub limits: Moment,
    pub slices: usize,
}

impl Speed {
    /// `limits[i]` and `limits[i + 1]` are on both sides of `slices[i]`; neither is empty.
    fn of(slices: &[Vec<Call>], limits: &[Moment], operations: f64) -> Speed {
        let median = |values: Vec<f64>| Quartiles::of(values).median;
        let all = |f: &dyn Fn(&Call) -> f64| slices.iter().flatten().map(f).collect::<Vec<f64>>();
        let (mut of_read, mut of_peak, mut of_limit) = (Vec::new(), Vec::new(), Vec::new());
        for (calls, sides) in slices.iter().zip(limits.windows(2)) {
            let read = (sides[0].read_gb_per_s + sides[1].read_gb_per_s) / 2.0 * 1e9;
            let multiply = operations / ((sides[0].tera_op_per_s + sides[1].tera_op_per_s) / 2.0 * 1e12);
            let share = |least: &dyn Fn(&Call) -> f64| median(calls.iter().map(|c| least(c) / c.seconds).collect());
            of_read.push(share(&|c| c.bytes / read));
            of_peak.push(share(&|_| multiply));
            of_limit.push(share(&|c| multiply.max(c.bytes / read)));
        }
        let (of_read, of_peak) = (median(of_read), median(of_peak));
        let seconds = Quartiles::of(all(&|c| c.seconds));
        Speed {
            seconds,
            gb_per_s: median(all(&|c| c.bytes / c.seconds * 1e-9)),
            tera_op_per_s: operations / seconds.median * 1e-12,
            of_read,
            of_peak,
            of_limit: Quartiles::of(of_limit),
            reads: of_read >= of_peak,
            limits: Moment {
                read_gb_per_s: median(limits.iter().map(|l| l.read_gb_per_s).collect()),
                tera_op_per_s: median(limits.iter().map(|l| l.tera_op_per_s).collect()),
            },
            slices: slices.len(),
        }
    }

    /// Why the fraction should not be believed, if so.
    pub fn doubt(&self) -> Option<String> {
        let Quartiles { low, median, high } = self.of_limit;
        if high - low > SPREAD * median {
            return Some("the machine was too restless".into());
        }
        (median > POSSIBLE).then(|| "above its limit, which must have moved".into())
    }
}

/// Calls layers in turn.
pub struct Caller<'a> {
    experts: &'a Experts,
    shape: &'a Shape,
    tokens: usize,
    hidden: Vec<bf16>,
    random: Random,
    next_layer: usize,
    /// Used again and again, as an application would: memory new to the process costs more than what some calls compute.
    batches: Vec<Batch>,
}

impl<'a> Caller<'a> {
    pub fn new(experts: &'a Experts, shape: &'a Shape, tokens: usize) -> Self {
        let mut random = Random(tokens as u64);
        let hidden = (0..tokens * shape.hidden).map(|_| bf16::from_f32(random.normal())).collect();
        Caller { experts, shape, tokens, hidden, random, next_layer: 0, batches: Vec::new() }
    }

    /// The layer whose turn it is.
    fn layer(&mut self) -> &'a LayerExperts {
        let layers = self.experts.layers();
        self.next_layer += 1;
        &layers[self.next_layer % layers.len()]
    }

    /// Draws the routing of `count` batches.
    fn draw(&mut self, count: usize) -> kt::Result<()> {
        for i in 0..count {
            let (ids, weights) = route(&mut self.random, self.tokens, self.shape.experts, self.shape.top_k);
            match self.batches.get_mut(i) {
                Some(batch) => batch.set(self.tokens, self.hidden.clone(), ids, weights)?,
                None => self.batches.push(Batch::new(self.tokens, self.hidden.clone(), ids, weights)?),
            }
        }
        Ok(())
    }

    /// Calls for `length`, at least one; `pause` goes before each.
    pub fn calls(&mut self, length: Duration, pause: impl Fn()) -> anyhow::Result<Vec<Call>> {
        // Drawn ahead in groups, so that small calls follow each other as closely as those of a model do.
        let group = (256 / self.tokens).clamp(1, 32);
        let mut calls = Vec::new();
        let start = Instant::now();
        while calls.is_empty() || start.elapsed() < length {
            self.draw(group)?;
            for i in 0..group {
                let layer = self.layer();
                let batch = &mut self.batches[i];
                pause();
                let start = Instant::now();
                layer.forward(batch)?;
                let seconds = start.elapsed().as_secs_f64();
                let distinct = batch.topk_ids().iter().collect::<BTreeSet<_>>().len();
                calls.push(Call { seconds, bytes: distinct as f64 * layer.spec().expert_bytes() as f64 });
            }
            let output = self.batches.last().map(Batch::output).unwrap_or_default();
            if !output.iter().all(|v| v.is_finite()) || output.iter().all(|&v| v == 0.0) {
                bail!(
                    "the layer's output is not made of numbers, or all zero: a kernel is broken, its speed means nothing"
                );
            }
        }
        Ok(calls)
    }

    /// Measures for about `seconds`, and the limits besides.
    pub fn measure(&mut self, meter: &Meter, factors: Factors, seconds: f64) -> anyhow::Result<Speed> {
        let slice = Duration::from_secs_f64(seconds / SLICES as f64);
        // A short case has short looks at the limits as well.
        let effort = (seconds / 2.0).min(1.0);
        self.calls(slice, || ())?;
        let mut limits = vec![meter.moment(factors, effort)];
        let mut slices = Vec::new();
        let mut spent = 0.0;
        while slices.len() < SLICES && (spent < PATIENCE * seconds || slices.len() < FEWEST) {
            let start = Instant::now();
            slices.push(self.calls(slice, || ())?);
            spent += start.elapsed().as_secs_f64();
            limits.push(meter.moment(factors, effort));
        }
        Ok(Speed::of(&slices, &limits, self.shape.operations(self.tokens)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quartiles(values: &[f64]) -> [f64; 3] {
        let q = Quartiles::of(values.to_vec());
        [q.low, q.median, q.high]
    }

    #[test]
    fn quartiles_are_medians_of_halves() {
        assert_eq!(quartiles(&[]), [0.0; 3]);
        assert_eq!(quartiles(&[7.0]), [7.0; 3]);
        assert_eq!(quartiles(&[2.0, 1.0]), [1.0, 1.5, 2.0]);
        assert_eq!(quartiles(&[5.0, 1.0, 2.0, 4.0, 3.0]), [2.0, 3.0, 4.0]);
        assert_eq!(quartiles(&[1.0, 2.0, 3.0, 4.0]), [1.5, 2.5, 3.5]);
    }

    fn calls(seconds: f64, bytes: f64) -> Vec<Call> {
        vec![Call { seconds, bytes }; 3]
    }

    fn moment(read_gb_per_s: f64, tera_op_per_s: f64) -> Moment {
        Moment { read_gb_per_s, tera_op_per_s }
    }

    #[test]
    fn the_longer_of_both_times_is_the_limit() {
        // 4 GB at 40 GB/s take 0.1 s; 0.1 tera-operations at 2 a second take 0.05 s.
        let l = [moment(40.0, 2.0); 2];
        let s = Speed::of(&[calls(0.125, 4e9)], &l, 1e11);
        assert!(s.reads);
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
        near(s.of_limit.median, 0.8);
        near(s.of_read, 0.8);
        near(s.of_peak, 0.4);
        near(s.gb_per_s, 32.0);
        near(s.tera_op_per_s, 0.8);
        let s = Speed::of(&[calls(0.125, 1e9)], &l, 1e11);
        assert!(!s.reads);
        near(s.of_limit.median, 0.4);
        near(s.of_read, 0.2);
    }

    #[test]
    fn a_machine_that_slows_down_in_step_does_not_change_the_fraction() {
        let limits = [moment(40.0, 1.0), moment(40.0, 1.0), moment(20.0, 1.0), moment(20.0, 1.0)];
        let slices = [calls(0.1, 2e9), calls(0.1 * 4.0 / 3.0, 2e9), calls(0.2, 2e9)];
        let s = Speed::of(&slices, &limits, 1.0);
        assert!((s.of_limit.low - 0.5).abs() < 1e-12 && (s.of_limit.high - 0.5).abs() < 1e-12, "{s:?}");
        assert_eq!((s.doubt(), s.slices, s.limits.read_gb_per_s), (None, 3, 30.0));
    }

    #[test]
    fn spread_and_impossible_fractions_are_doubted() {
        let l = [moment(40.0, 1.0); 6];
        let of = |seconds: [f64; 5]| Speed::of(&seconds.map(|s| calls(s, 4e9)), &l, 1.0).doubt();
        assert_eq!(of([0.11, 0.11, 0.5, 0.11, 0.11]), None, "one slice out of step");
        assert!(of([0.11, 0.12, 0.15, 0.5, 0.11]).unwrap().contains("restless"));
        assert!(of([0.09; 5]).unwrap().contains("above its limit"));
    }
}
