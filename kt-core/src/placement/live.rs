//! Placement that follows the traffic: counts with decay, a bounded rate of uploads, and an end where it gains nothing.
//!
//! It decides and counts; who holds the experts moves them ([`Experts::rebalance`](crate::Experts::rebalance)), or nobody does, on a
//! [`Trace`](super::Trace).

use std::fmt;
use std::time::Duration;

use super::{LayerPlacement, Need, Placement};
use crate::heat::{HeatMap, LayerHeat};
use crate::plan::human_bytes;

/// How live placement goes about it.
#[derive(Debug, Clone, PartialEq)]
pub struct LiveOptions {
    /// Tokens after which a choice counts half.
    pub half_life_tokens: f64,
    /// Most that moves may bring to devices, bytes per second. What is not used is kept, up to a second's.
    pub upload_bytes_per_second: u64,
    /// How much hotter than the expert that it drives out an expert must be: 1.5 is half again as hot.
    pub margin: f64,
    /// Tokens after which the gain is judged.
    pub window_tokens: u64,
    /// Share of all choices that must have become hits by moving, in a window; with less, moving ends.
    pub least_gain: f64,
}

impl Default for LiveOptions {
    fn default() -> Self {
        LiveOptions {
            half_life_tokens: 256.0,
            upload_bytes_per_second: 1 << 30,
            margin: 1.5,
            window_tokens: 1024,
            least_gain: 0.01,
        }
    }
}

/// Two experts of a layer that change places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Swap {
    /// Index of the layer in the model.
    pub layer: usize,
    /// The expert that goes to a device.
    pub hot: u32,
    /// The expert that it drives out of there, into host memory.
    pub cold: u32,
    /// Bytes that go to the device.
    pub bytes: u64,
}

/// What live placement came to so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LiveReport {
    /// Choices of experts seen.
    pub rows: u64,
    /// Of these, of experts that were on a device.
    pub hits: u64,
    /// Those that would have been, had nothing been moved.
    pub initial_hits: u64,
    /// Experts moved to devices.
    pub swaps: u64,
    /// Bytes moved to devices.
    pub uploaded_bytes: u64,
    /// Why it moves nothing any more.
    pub ended: Option<String>,
}

impl fmt::Display for LiveReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let share = |n: u64| 100.0 * n as f64 / self.rows.max(1) as f64;
        write!(
            f,
            "{:.1} % of {} choices on a device ({:.1} % without moving), {} experts moved, {}",
            share(self.hits),
            self.rows,
            share(self.initial_hits),
            self.swaps,
            human_bytes(self.uploaded_bytes)
        )?;
        match &self.ended {
            Some(why) => write!(f, "; ended: {why}"),
            None => Ok(()),
        }
    }
}

/// Decides which experts change places, from what the router chose lately.
#[derive(Debug, Clone)]
pub struct Live {
    options: LiveOptions,
    needs: Vec<Need>,
    initial: Placement,
    placement: Placement,
    /// By layer and expert, with decay.
    heat: Vec<Vec<f64>>,
    /// Bytes that may be moved now.
    allowance: f64,
    report: LiveReport,
    /// At the start of the window: tokens, and the report.
    window: (u64, LiveReport),
    tokens: u64,
    /// The heat map that was followed last.
    seen: HeatMap,
}

impl Live {
    /// Starts from a placement of these layers.
    pub fn new(options: LiveOptions, needs: Vec<Need>, placement: Placement) -> Live {
        Live {
            heat: needs.iter().map(|n| vec![0.0; n.experts]).collect(),
            needs,
            initial: placement.clone(),
            placement,
            allowance: options.upload_bytes_per_second as f64,
            report: LiveReport::default(),
            window: (0, LiveReport::default()),
            tokens: 0,
            seen: HeatMap::default(),
            options,
        }
    }

    /// Where experts are now.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// What came of it.
    pub fn report(&self) -> &LiveReport {
        &self.report
    }

    /// Takes in what the router of a layer chose for `tokens` tokens: times each expert was chosen. Layers that are not known are left out.
    pub fn observe(&mut self, layer: usize, tokens: u64, counts: &[u64]) {
        let Some(i) = self.needs.iter().position(|n| n.layer == layer) else { return };
        let decay = 0.5f64.powf(tokens as f64 / self.options.half_life_tokens.max(1e-9));
        let hits = |l: &LayerPlacement| l.on.iter().zip(counts).filter(|(on, _)| **on > 0).map(|(_, n)| n).sum::<u64>();
        self.report.rows += counts.iter().sum::<u64>();
        self.report.hits += hits(&self.placement.layers[i]);
        self.report.initial_hits += hits(&self.initial.layers[i]);
        for (heat, &n) in self.heat[i].iter_mut().zip(counts) {
            *heat = *heat * decay + n as f64;
        }
        if i == 0 {
            self.tokens += tokens;
        }
    }

    /// Takes in what is new in a heat map since it was last shown one. A layer of which the tokens or any expert's count fell was started
    /// anew, and all of it is new. One that was started anew and has come to as much again everywhere cannot be told from one that went on:
    /// only what is beyond what was seen is then new.
    pub fn follow(&mut self, heat: &HeatMap) {
        let seen = std::mem::replace(&mut self.seen, heat.clone());
        for l in heat.layers() {
            let went_on =
                |s: &LayerHeat| s.tokens <= l.tokens && s.counts.iter().zip(&l.counts).all(|(was, n)| was <= n);
            let before = seen.layers().iter().find(|s| s.layer == l.layer).filter(|s| went_on(s));
            let was = |e: usize| before.and_then(|b| b.counts.get(e)).copied().unwrap_or(0);
            let counts: Vec<u64> = l.counts.iter().enumerate().map(|(e, n)| n - was(e)).collect();
            self.observe(l.layer, l.tokens - before.map_or(0, |b| b.tokens), &counts);
        }
    }

    /// Forgets all counts, as if nothing had been observed; not the heat map that it was shown last.
    pub fn forget(&mut self) {
        let new = Live::new(self.options.clone(), self.needs.clone(), self.placement.clone());
        *self = Live { seen: std::mem::take(&mut self.seen), ..new };
    }

    /// Swaps that should be made now, the most useful first, within what may be moved after `elapsed` more time. They count as made: see
    /// [`Live::undo`].
    pub fn swaps(&mut self, elapsed: Duration) -> Vec<Swap> {
        self.judge();
        if self.report.ended.is_some() {
            return Vec::new();
        }
        let rate = self.options.upload_bytes_per_second as f64;
        self.allowance = (self.allowance + rate * elapsed.as_secs_f64()).min(rate);
        let mut candidates: Vec<(f64, usize, u32, u32)> = Vec::new();
        for (i, layer) in self.placement.layers.iter().enumerate() {
            let heat = |e: &u32| self.heat[i][*e as usize];
            let (mut hot, mut cold): (Vec<u32>, Vec<u32>) =
                (0..layer.on.len() as u32).partition(|&e| layer.on[e as usize] == 0);
            hot.sort_by(|a, b| heat(b).total_cmp(&heat(a)));
            cold.sort_by(|a, b| heat(a).total_cmp(&heat(b)));
            for (hot, cold) in hot.into_iter().zip(cold) {
                let gain = heat(&hot) - heat(&cold);
                // Two choices more, at least: one is chance.
                if heat(&hot) <= heat(&cold) * self.options.margin || gain < 2.0 {
                    break;
                }
                candidates.push((gain, i, hot, cold));
            }
        }
        candidates.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut swaps = Vec::new();
        for (_, i, hot, cold) in candidates {
            let on = &mut self.placement.layers[i].on;
            let device = on[cold as usize];
            let Some(bytes) = self.needs[i].expert_bytes.get(device as usize - 1).copied().flatten() else { continue };
            if bytes as f64 > self.allowance {
                break;
            }
            self.allowance -= bytes as f64;
            on.swap(hot as usize, cold as usize);
            self.report.swaps += 1;
            self.report.uploaded_bytes += bytes;
            swaps.push(Swap { layer: self.needs[i].layer, hot, cold, bytes });
        }
        swaps
    }

    /// Takes back a swap that could not be made.
    pub fn undo(&mut self, swap: &Swap) {
        if let Some(layer) = self.placement.layers.iter_mut().find(|l| l.layer == swap.layer) {
            layer.on.swap(swap.hot as usize, swap.cold as usize);
            self.report.swaps -= 1;
            self.report.uploaded_bytes -= swap.bytes;
        }
    }

    /// Moves nothing any more.
    pub fn end(&mut self, why: impl Into<String>) {
        self.report.ended.get_or_insert(why.into());
    }

    /// Ends when the window that has passed gained too little, if anything had been moved before it.
    fn judge(&mut self) {
        let (start, before) = &self.window;
        if self.tokens - start < self.options.window_tokens {
            return;
        }
        let (rows, moved) = (self.report.rows - before.rows, before.swaps > 0);
        let gain = (self.report.hits - before.hits) as f64 - (self.report.initial_hits - before.initial_hits) as f64;
        let gain = gain / rows.max(1) as f64;
        if moved && gain < self.options.least_gain {
            let tokens = self.tokens - start;
            self.end(format!(
                "of the last {tokens} tokens' choices, moving brought {:.1} % to a device; it takes {:.1} %",
                gain * 100.0,
                self.options.least_gain * 100.0
            ));
        }
        self.window = (self.tokens, self.report.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Capacity, Policy, place};
    use super::*;

    const BYTES: u64 = 1000;

    fn live(options: LiveOptions) -> Live {
        let needs = vec![Need { layer: 2, experts: 8, expert_bytes: vec![Some(BYTES)] }];
        let placement = place(&Policy::FrontLoading, &needs, &[Capacity::bytes(2 * BYTES)]);
        Live::new(options, needs, placement)
    }

    fn once(experts: &[usize]) -> [u64; 8] {
        let mut counts = [0; 8];
        experts.iter().for_each(|&e| counts[e] += 1);
        counts
    }

    #[test]
    fn it_follows_the_traffic_within_its_rate() {
        let mut live = live(LiveOptions { upload_bytes_per_second: BYTES, ..LiveOptions::default() });
        let mut moved = Vec::new();
        for step in 0..40 {
            live.observe(2, 1, &once(&[6, 7]));
            let swaps = live.swaps(Duration::from_millis(100));
            assert!(swaps.len() <= 1, "step {step}: a second's bytes are one expert");
            moved.extend(swaps.into_iter().map(|s| (step, s.hot)));
        }
        // The first as soon as it is hot enough, the second when a second has passed.
        assert_eq!(moved.iter().map(|m| m.1).collect::<Vec<_>>(), [6, 7]);
        assert!(moved[1].0 - moved[0].0 >= 9, "{moved:?}");
        assert_eq!(live.placement().layers()[0].experts(1), [6, 7]);
        let report = live.report();
        assert_eq!((report.swaps, report.uploaded_bytes, report.initial_hits), (2, 2 * BYTES, 0));
        assert!(report.hits > 50 && report.rows == 80 && report.to_string().contains("2 experts moved"), "{report}");
    }

    #[test]
    fn it_forgets_and_does_not_flutter() {
        let mut live = live(LiveOptions { half_life_tokens: 8.0, ..LiveOptions::default() });
        for _ in 0..64 {
            live.observe(2, 1, &once(&[3, 4]));
            live.swaps(Duration::from_secs(1));
        }
        assert_eq!(live.placement().layers()[0].experts(1), [3, 4]);
        // Traffic that is everywhere alike moves nothing.
        for step in 0..64 {
            live.observe(2, 1, &once(&[step % 8, (step + 4) % 8]));
        }
        let before = live.report().swaps;
        for step in 0..64 {
            live.observe(2, 1, &once(&[step % 8, (step + 4) % 8]));
            live.swaps(Duration::from_secs(1));
        }
        assert_eq!(live.report().swaps, before);
        // New favourites come after a few half-lives.
        for _ in 0..32 {
            live.observe(2, 1, &once(&[0, 5]));
            live.swaps(Duration::from_secs(1));
        }
        assert_eq!(live.placement().layers()[0].experts(1), [0, 5]);
    }

    #[test]
    fn it_ends_where_it_gains_nothing() {
        // Favourites change faster than moving can follow.
        let options = LiveOptions { half_life_tokens: 4.0, window_tokens: 64, ..LiveOptions::default() };
        let mut live = live(options);
        for step in 0..2000usize {
            let e = step / 4 * 3 % 8;
            live.observe(2, 1, &once(&[e, (step / 4 * 3 + 1) % 8]));
            // It moves after the fact: by then the next favourites are due.
            if step % 4 == 3 {
                live.swaps(Duration::from_secs(1));
            }
        }
        let report = live.report().clone();
        let why = report.ended.clone().expect("it goes on");
        assert!(why.contains("moving brought") && report.swaps > 0, "{why}");
        live.observe(2, 100, &once(&[7; 50]));
        assert_eq!(live.swaps(Duration::from_secs(9)), []);
        assert!(report.to_string().contains("ended: of the last"));
    }

    #[test]
    fn a_layer_that_was_started_anew_is_all_new() {
        let map = |tokens, counts: [u64; 8]| {
            HeatMap::new(vec![LayerHeat { layer: 2, tokens, counts: counts.into() }]).unwrap()
        };
        let mut live = live(LiveOptions::default());
        let mut rows = |tokens, counts| {
            let before = (live.report().rows, live.tokens);
            live.follow(&map(tokens, counts));
            (live.report().rows - before.0, live.tokens - before.1)
        };
        assert_eq!(rows(10, [10, 8, 2, 0, 0, 0, 0, 0]), (20, 10));
        assert_eq!(rows(11, [11, 8, 2, 0, 1, 0, 0, 0]), (2, 1)); // it went on
        assert_eq!(rows(12, [12, 3, 9, 0, 0, 0, 0, 0]), (24, 12)); // more tokens, but one expert's count fell
        assert_eq!(rows(3, [12, 3, 9, 0, 0, 0, 0, 0]), (24, 3)); // fewer tokens
        assert_eq!(rows(3, [12, 3, 9, 0, 0, 0, 0, 0]), (0, 0)); // nothing new
        assert_eq!(rows(13, [13, 4, 9, 0, 0, 0, 0, 0]), (2, 10)); // nothing fell: if it was started anew, nobody can tell
    }

    #[test]
    fn a_swap_that_failed_is_taken_back() {
        let mut live = live(LiveOptions::default());
        live.observe(2, 3, &once(&[5, 5, 5]));
        let before = live.placement().clone();
        let swaps = live.swaps(Duration::ZERO);
        assert_eq!(swaps, [Swap { layer: 2, hot: 5, cold: 0, bytes: BYTES }]);
        live.undo(&swaps[0]);
        assert_eq!((live.placement(), live.report().swaps, live.report().uploaded_bytes), (&before, 0, 0));
        live.observe(77, 1, &[1]); // a layer that it does not know
        live.end("asked to");
        assert_eq!(live.swaps(Duration::from_secs(1)), []);
    }
}
