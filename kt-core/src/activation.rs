//! How an expert's gate and up outputs become the input of its down projection.

/// The activation rule of a layer. `sigmoid(t) = 1 / (1 + exp(-t))`, `silu(t) = t * sigmoid(t)`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Activation {
    /// `silu(gate) * up`: all families but the ones below.
    SiluMul,
    /// `silu(min(gate, limit)) * clamp(up, -limit, limit)` (DeepSeek-V4: limit 10).
    ClampedSiluMul {
        /// Largest gate, and largest magnitude of up.
        limit: f32,
    },
    /// `g * sigmoid(alpha * g) * (u + 1)` with `g = min(gate, limit)`, `u = clamp(up, -limit, limit)`
    /// (gpt-oss: alpha 1.702, limit 7).
    GptOss {
        /// Steepness of the sigmoid.
        alpha: f32,
        /// Largest gate, and largest magnitude of up.
        limit: f32,
    },
}

/// `exp(x)` to about 2e-7 relative, in operations that vectorize: `2^n * 2^f` with `n` the nearest integer of `x * log2(e)`.
///
/// Saturates to 0 below -87.3 and to infinity above 88.7; NaN stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let clamped = x.clamp(-87.3, 88.7);
    let t = clamped * std::f32::consts::LOG2_E;
    let n = t.round_ties_even();
    // Cody-Waite: ln 2 in two parts, so that n * ln 2 is exact enough for |n| < 128.
    let r = (clamped - n * 0.693_359_4) - n * -2.121_944_4e-4;
    // Taylor coefficients; |r| <= ln 2 / 2 leaves an error below 1e-8.
    let mut p = 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    // n is in -126..=128; two factors keep each power of two representable.
    let half = (n * 0.5).floor();
    // Adding 1.5 * 2^23 leaves the integer in the low bits, where a cast would check its range lane by lane.
    let pow = |k: f32| f32::from_bits(((k + (3 << 22) as f32).to_bits() << 23).wrapping_add(127 << 23));
    let y = p * pow(half) * pow(n - half);
    if x < -87.3 {
        0.0
    } else if x > 88.7 {
        f32::INFINITY
    } else {
        y // of a NaN, a NaN: it passes through clamp and polynomial
    }
}

/// `1 / (1 + exp(-t))`.
#[inline(always)]
pub fn sigmoid(t: f32) -> f32 {
    1.0 / (1.0 + exp(-t))
}

/// `t * sigmoid(t)`.
#[inline(always)]
pub fn silu(t: f32) -> f32 {
    t / (1.0 + exp(-t))
}

impl Activation {
    /// Applies the rule to slices of equal length; the result replaces `gate`.
    #[inline(always)]
    pub fn apply(self, gate: &mut [f32], up: &[f32]) {
        match self {
            Activation::SiluMul => {
                for (g, &u) in gate.iter_mut().zip(up) {
                    *g = silu(*g) * u;
                }
            }
            Activation::ClampedSiluMul { limit } => {
                for (g, &u) in gate.iter_mut().zip(up) {
                    *g = silu(at_most(*g, limit)) * u.clamp(-limit, limit);
                }
            }
            Activation::GptOss { alpha, limit } => {
                for (g, &u) in gate.iter_mut().zip(up) {
                    let t = at_most(*g, limit);
                    *g = t * sigmoid(alpha * t) * (u.clamp(-limit, limit) + 1.0);
                }
            }
        }
    }
}

/// `min` that keeps NaN.
#[inline(always)]
fn at_most(v: f32, limit: f32) -> f32 {
    if v > limit { limit } else { v }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_over_its_range() {
        let mut worst = 0f64;
        for i in -873_000..=887_000 {
            let x = i as f32 / 10_000.0;
            let want = (x as f64).exp();
            worst = worst.max(((exp(x) as f64) - want).abs() / want);
        }
        assert!(worst < 3e-7, "relative error {worst}");
        assert_eq!(exp(-1000.0), 0.0);
        assert_eq!(exp(1000.0), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn rules_follow_their_formulas() {
        let gates = [-9.0f32, -1.5, 0.0, 0.3, 6.9, 12.0];
        let ups = [-8.0f32, 2.0, 1.0, -0.5, 7.5, 3.0];
        let sig = |t: f64| 1.0 / (1.0 + (-t).exp());
        type Formula = fn(f64, f64, &dyn Fn(f64) -> f64) -> f64;
        let cases: [(Activation, Formula); 3] = [
            (Activation::SiluMul, |g, u, sig| g * sig(g) * u),
            (Activation::ClampedSiluMul { limit: 10.0 }, |g, u, sig| {
                let g = g.min(10.0);
                g * sig(g) * u.clamp(-10.0, 10.0)
            }),
            (Activation::GptOss { alpha: 1.702, limit: 7.0 }, |g, u, sig| {
                let g = g.min(7.0);
                g * sig(1.702 * g) * (u.clamp(-7.0, 7.0) + 1.0)
            }),
        ];
        for (rule, formula) in cases {
            let mut got = gates;
            rule.apply(&mut got, &ups);
            for i in 0..gates.len() {
                let want = formula(gates[i] as f64, ups[i] as f64, &sig);
                assert!((got[i] as f64 - want).abs() <= 1e-5 * want.abs().max(1e-3), "{rule:?} {}", gates[i]);
            }
            let mut nan = [f32::NAN];
            rule.apply(&mut nan, &[1.0]);
            assert!(nan[0].is_nan(), "{rule:?} swallows NaN");
        }
    }
}
