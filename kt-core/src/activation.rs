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

/// `a * b + c`; `FUSED`: rounded once, which is slow where the caller is not compiled for a CPU that does it in one instruction.
#[inline(always)]
fn mul_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// `exp(x)` of `x` from -87.3 to 88.7 to about 2e-7 relative, in operations that vectorize; of what is beyond, that of the next of them, and of NaN anything:
/// `2^n * exp(r)` with `n` the nearest integer of `x * log2(e)`.
#[inline(always)]
fn exp_within<const FUSED: bool>(x: f32) -> f32 {
    let x = x.clamp(-87.3, 88.7);
    // 1.5 * 2^23 leaves the integer in the low bits, where a cast would check its range lane by lane.
    const TO_INTEGER: f32 = (3 << 22) as f32;
    let shifted = mul_add::<FUSED>(x, std::f32::consts::LOG2_E, TO_INTEGER);
    let n = shifted - TO_INTEGER;
    // Cody-Waite: ln 2 in two parts, so that n * ln 2 is exact enough for |n| <= 128.
    let r = mul_add::<FUSED>(n, 2.121_944_4e-4, mul_add::<FUSED>(n, -0.693_359_4, x));
    // exp(r) = 1 + r + r^2 q(r): for |r| <= ln 2 / 2 the polynomial with the least largest error, 4e-9.
    let mut q = 0.001_381_454;
    q = mul_add::<FUSED>(q, r, 0.008_368_745);
    q = mul_add::<FUSED>(q, r, 0.041_668_39);
    q = mul_add::<FUSED>(q, r, 0.166_665_21);
    q = mul_add::<FUSED>(q, r, 0.499_999_94);
    let p = mul_add::<FUSED>(r * r, q, r) + 1.0;
    // To the exponent: the result is a normal number, as p is below 1 where n is 128, and above where it is -126.
    f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// `exp(x)` to about 2e-7 relative, in operations that vectorize.
///
/// Saturates to 0 below -87.3 and to infinity above 88.7; NaN stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let y = exp_within::<false>(x);
    if x < -87.3 {
        0.0
    } else if x <= 88.7 {
        y
    } else {
        x * f32::INFINITY
    }
}

/// `1 + exp(-t)`; of NaN anything.
#[inline(always)]
fn one_and_exp<const FUSED: bool>(t: f32) -> f32 {
    1.0 + if t < -88.7 { f32::INFINITY } else { exp_within::<FUSED>(-t) }
}

/// `1 / (1 + exp(-t))`.
#[inline(always)]
pub fn sigmoid(t: f32) -> f32 {
    1.0 / (1.0 + exp(-t))
}

/// `t * sigmoid(t)`.
#[inline(always)]
fn silu<const FUSED: bool>(t: f32) -> f32 {
    t / one_and_exp::<FUSED>(t)
}

impl Activation {
    /// Applies the rule to slices of equal length; the result replaces `gate`.
    #[inline(always)]
    pub fn apply(self, gate: &mut [f32], up: &[f32]) {
        self.apply_with::<false>(gate, up);
    }

    /// [`Activation::apply`] with fused multiplications and additions, whose last bits differ: for callers that are compiled for CPUs with FMA. On others it is slow.
    #[inline(always)]
    pub fn apply_fused(self, gate: &mut [f32], up: &[f32]) {
        self.apply_with::<true>(gate, up);
    }

    #[inline(always)]
    fn apply_with<const FUSED: bool>(self, gate: &mut [f32], up: &[f32]) {
        match self {
            Activation::SiluMul => {
                for (g, &u) in gate.iter_mut().zip(up) {
                    *g = silu::<FUSED>(*g) * u;
                }
            }
            Activation::ClampedSiluMul { limit } => {
                for (g, &u) in gate.iter_mut().zip(up) {
                    *g = silu::<FUSED>(at_most(*g, limit)) * u.clamp(-limit, limit);
                }
            }
            Activation::GptOss { alpha, limit } => {
                for (g, &u) in gate.iter_mut().zip(up) {
                    let t = at_most(*g, limit);
                    *g = t / one_and_exp::<FUSED>(alpha * t) * (u.clamp(-limit, limit) + 1.0);
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
        for bits in [0x7fc0_0000, 0xffc0_0000, 0x7fc0_0081, 0x7fff_ffff, 0x7f80_0001] {
            assert!(exp(f32::from_bits(bits)).is_nan());
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!((exp(f32::NEG_INFINITY), exp(f32::INFINITY)), (0.0, f32::INFINITY));
    }

    #[test]
    fn silu_is_accurate_and_ends_in_zero() {
        for i in -900_000..=900_000 {
            let t = i as f32 / 10_000.0;
            let want = t as f64 / (1.0 + (-t as f64).exp());
            for got in [silu::<false>(t), silu::<true>(t)] {
                assert!((got as f64 - want).abs() <= 4e-7 * want.abs() + 1e-36, "{t}: {got}, not {want}");
            }
        }
        assert_eq!(silu::<true>(-1e30), 0.0);
        assert_eq!(silu::<true>(f32::INFINITY), f32::INFINITY);
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
            for apply in [Activation::apply, Activation::apply_fused] {
                let mut got = gates;
                apply(rule, &mut got, &ups);
                for i in 0..gates.len() {
                    let want = formula(gates[i] as f64, ups[i] as f64, &sig);
                    assert!((got[i] as f64 - want).abs() <= 1e-5 * want.abs().max(1e-3), "{rule:?} {}", gates[i]);
                }
                // NaN of all kinds of low bits, and what has no silu.
                for bits in [0x7fc0_0000, 0xffc0_0000, 0x7fc0_0081, 0x7fff_ffff, 0x7f80_0001, 0xff80_0000] {
                    let mut nan = [f32::from_bits(bits)];
                    apply(rule, &mut nan, &[1.0]);
                    assert!(nan[0].is_nan(), "{rule:?} makes {} of {bits:#x}", nan[0]);
                }
            }
        }
    }
}
