//! Choosing the next token from logits.

use anyhow::{Result, bail};

/// Chooses tokens; reproducible for a seed.
#[derive(Debug, Clone)]
pub struct Sampler {
    temperature: f32,
    top_k: usize,
    top_p: f32,
    state: u64,
}

impl Sampler {
    /// A sampler. Temperature 0 always takes the likeliest token; otherwise the choice is among the `top_k` likeliest (0: all),
    /// and of those among the fewest whose probabilities reach `top_p`.
    ///
    /// # Errors
    /// A temperature that is negative or not finite, or a `top_p` of 0 or less or above 1.
    pub fn new(temperature: f32, top_k: usize, top_p: f32, seed: u64) -> Result<Self> {
        if !(temperature.is_finite() && temperature >= 0.0) {
            bail!("the temperature must be a finite number, 0 or more, got {temperature}");
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            bail!("top-p must be above 0 and at most 1, got {top_p}");
        }
        Ok(Sampler { temperature, top_k, top_p, state: seed })
    }

    /// The likeliest token always.
    pub fn greedy() -> Self {
        Sampler { temperature: 0.0, top_k: 0, top_p: 1.0, state: 0 }
    }

    /// The next token. Logits that are NaN are never chosen, unless all are.
    pub fn next(&mut self, logits: &[f32]) -> u32 {
        let best = likeliest(logits);
        let max = logits.get(best as usize).copied().unwrap_or(f32::NAN);
        if self.temperature == 0.0 || !max.is_finite() {
            return best;
        }
        let mut choice: Vec<(u32, f64)> = logits
            .iter()
            .enumerate()
            .filter(|(_, l)| !l.is_nan())
            .map(|(i, &l)| (i as u32, (((l - max) / self.temperature) as f64).exp()))
            .collect();
        choice.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if self.top_k > 0 {
            choice.truncate(self.top_k);
        }
        let total: f64 = choice.iter().map(|c| c.1).sum();
        let mut kept = 0.0;
        let enough = choice.iter().position(|c| {
            kept += c.1;
            kept >= total * self.top_p as f64
        });
        choice.truncate(enough.map_or(choice.len(), |i| i + 1));
        let mut point = self.uniform() * choice.iter().map(|c| c.1).sum::<f64>();
        for &(id, p) in &choice {
            point -= p;
            if point < 0.0 {
                return id;
            }
        }
        choice.last().map_or(best, |c| c.0)
    }

    /// A number in `0..1` (splitmix64).
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Index of the largest logit, the first among equals.
pub fn likeliest(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, &l) in logits.iter().enumerate() {
        if l > logits[best] || (logits[best].is_nan() && !l.is_nan()) {
            best = i;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        assert_eq!(Sampler::greedy().next(&[f32::NAN, 1.0, 3.0, 3.0]), 2);
        assert_eq!(likeliest(&[f32::NEG_INFINITY, f32::NEG_INFINITY]), 0);
    }

    #[test]
    fn a_seed_reproduces_and_frequencies_follow_the_probabilities() {
        let logits = [0.0, 3f32.ln(), f32::NEG_INFINITY];
        let draw = |seed| {
            let mut s = Sampler::new(1.0, 0, 1.0, seed).unwrap();
            (0..4000).map(|_| s.next(&logits)).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        let ones = draw(7).iter().filter(|&&id| id == 1).count();
        assert!((2850..3150).contains(&ones), "{ones}");
        assert!(!draw(7).contains(&2));
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        let logits = [4f32.ln(), 3f32.ln(), 2f32.ln(), 1f32.ln()]; // 0.4, 0.3, 0.2, 0.1
        let seen = |top_k, top_p| {
            let mut s = Sampler::new(1.0, top_k, top_p, 1).unwrap();
            let mut ids: Vec<u32> = (0..500).map(|_| s.next(&logits)).collect();
            ids.sort();
            ids.dedup();
            ids
        };
        assert_eq!(seen(2, 1.0), [0, 1]);
        assert_eq!(seen(0, 0.65), [0, 1]);
        assert_eq!(seen(0, 0.75), [0, 1, 2]);
        assert_eq!(seen(0, 1.0), [0, 1, 2, 3]);
        assert!(Sampler::new(-1.0, 0, 1.0, 0).is_err() && Sampler::new(1.0, 0, 0.0, 0).is_err());
        assert!(Sampler::new(f32::INFINITY, 0, 1.0, 0).unwrap_err().to_string().contains("a finite number"));
    }
}
