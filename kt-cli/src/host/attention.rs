//! Attention over the cache.
//!
//! Both kinds end in the same product, [`attend`]: groups of query heads over one head of keys and values. Latent attention gets
//! there by moving the expansion of keys and values to the other side: instead of expanding every cached row `c` to
//! `k = Wk c` and `v = Wv c` for each head, `q . (Wk c)` is computed as `(q Wk) . c`, and `sum p (Wv c)` as `Wv (sum p c)`. So the cache
//! holds one narrow row per token, and a step costs the same whatever the number of heads that share it. The price is
//! F32 copies of `Wk` and `Wv`, and wider dot products at prefill.

use candle_core::{CpuStorage, D, InplaceOp1, Layout, Tensor};
use kt::Linear;
use rayon::prelude::*;

use super::config::{Attention as Kind, ModelConfig};
use super::model::{LayerCache, multiply, norm};
use super::names;
use super::rope::Angles;
use super::weights::LayerWeights;

/// Scores that all threads hold at once (16 MiB), where a query has not more: longer inputs go through in slices of queries.
const SCORES: usize = 4 << 20;
/// Fewest scores whose softmax is worth another thread.
const SCORES_OF_TASK: usize = 16 << 10;

/// As many scores as one thread may hold.
fn scores_of_thread() -> usize {
    SCORES / rayon::current_num_threads()
}

/// Bytes of the scores that threads hold, for passes of so many tokens. A thread that waits for others in a product may begin a second slice.
pub(super) fn scores_bytes(heads_per_group: usize, positions: usize, tokens: usize) -> u64 {
    let of_query = heads_per_group.saturating_mul(positions);
    let of_slice = of_query.saturating_mul(tokens).min(scores_of_thread()).max(of_query);
    (of_slice as u64).saturating_mul(2 * (rayon::current_num_threads() * size_of::<f32>()) as u64)
}

/// Most numbers of each token that [`Attention::forward`] makes and has at once, besides scores and cache.
pub(super) fn numbers_of_token(heads: usize, kind: &Kind) -> usize {
    match *kind {
        // Of queries: as a product, normed, transposed and rotated, of which three at a time; then those, parts of the outputs, and these put together.
        Kind::Grouped { kv_heads, head_dim } => (heads * 3 + kv_heads * 3) * head_dim,
        // Queries as a product, their two parts, and these as one; then that, and outputs twice.
        Kind::Latent { kv_lora, nope, rope, value, .. } => {
            heads * (2 * kv_lora + nope + 3 * rope).max(3 * kv_lora + rope + value) + 4 * (kv_lora + rope)
        }
    }
}

/// The attention of one layer.
pub(super) struct Attention {
    kind: Weights,
    output: Linear,
    heads: usize,
    scale: f32,
    norm_epsilon: f32,
}

enum Weights {
    Grouped {
        q: Linear,
        k: Linear,
        v: Linear,
        q_norm: Tensor,
        k_norm: Tensor,
        kv_heads: usize,
        head_dim: usize,
    },
    Latent {
        q: Queries,
        kv_a: Linear,
        kv_a_norm: Tensor,
        keys: Tensor,
        values: Tensor,
        kv_lora: usize,
        nope: usize,
        rope: usize,
    },
}

enum Queries {
    Direct(Linear),
    Narrow { a: Linear, a_norm: Tensor, b: Linear },
}

impl Attention {
    /// Takes its weights out of those of the layer.
    pub(super) fn new(config: &ModelConfig, weights: &mut LayerWeights) -> anyhow::Result<Self> {
        let query_factor = config.rope.yarn.as_ref().map_or(1.0, |y| y.query_factor);
        let heads = config.heads;
        let (kind, width) = match config.attention {
            Kind::Grouped { kv_heads, head_dim } => {
                let kind = Weights::Grouped {
                    q: weights.linear(names::Q)?,
                    k: weights.linear(names::K)?,
                    v: weights.linear(names::V)?,
                    q_norm: weights.vector(names::Q_NORM)?,
                    k_norm: weights.vector(names::K_NORM)?,
                    kv_heads,
                    head_dim,
                };
                (kind, head_dim)
            }
            Kind::Latent { q_lora, kv_lora, nope, rope, value } => {
                let q = match q_lora {
                    None => Queries::Direct(weights.linear(names::Q)?),
                    Some(_) => Queries::Narrow {
                        a: weights.linear(names::Q_A)?,
                        a_norm: weights.vector(names::Q_A_NORM)?,
                        b: weights.linear(names::Q_B)?,
                    },
                };
                let (keys, values) = if weights.has(names::KV_B) {
                    let both = weights.numbers(names::KV_B)?.reshape((heads, nope + value, kv_lora))?;
                    (both.narrow(1, 0, nope)?, both.narrow(1, nope, value)?)
                } else {
                    let keys = weights.numbers(names::K_B)?.reshape((heads, kv_lora, nope))?;
                    (keys.transpose(1, 2)?, weights.numbers(names::V_B)?.reshape((heads, value, kv_lora))?)
                };
                let kind = Weights::Latent {
                    q,
                    kv_a: weights.linear(names::KV_A)?,
                    kv_a_norm: weights.vector(names::KV_A_NORM)?,
                    keys: keys.force_contiguous()?,
                    values: values.transpose(1, 2)?.force_contiguous()?,
                    kv_lora,
                    nope,
                    rope,
                };
                (kind, nope + rope)
            }
        };
        Ok(Attention {
            kind,
            output: weights.linear(names::O)?,
            heads,
            scale: (query_factor * query_factor / (width as f64).sqrt()) as f32,
            norm_epsilon: config.norm_epsilon,
        })
    }

    /// Attention of `x: [tokens, hidden]`, whose first token has position `past`; its keys and values join the cache. What is no longer needed is dropped at
    /// once: the plan counts on that ([`numbers_of_token`]).
    pub(super) fn forward(
        &self,
        x: &Tensor,
        angles: &Angles,
        cache: &mut LayerCache,
        past: usize,
    ) -> anyhow::Result<Tensor> {
        let tokens = x.dim(0)?;
        let mixed = match &self.kind {
            Weights::Grouped { q, k, v, q_norm, k_norm, kv_heads, head_dim } => {
                let heads = |x: Tensor, heads: usize| x.reshape((tokens, heads, *head_dim));
                let rotated = |linear: &Linear, weight: &Tensor, count: usize| -> anyhow::Result<Tensor> {
                    let normed = norm(&heads(multiply(linear, x)?, count)?, weight, self.norm_epsilon)?;
                    Ok(angles.rotate(&normed.transpose(0, 1)?)?)
                };
                let q = rotated(q, q_norm, self.heads)?;
                let (keys, values) = {
                    let k = rotated(k, k_norm, *kv_heads)?;
                    let v = heads(multiply(v, x)?, *kv_heads)?.transpose(0, 1)?.contiguous()?;
                    cache.extend(&k, Some(&v), past)?
                };
                let q = q.reshape((*kv_heads, self.heads / kv_heads, tokens, *head_dim))?;
                attend(&q, &keys, &values, past, self.scale)?.reshape((self.heads, tokens, *head_dim))?
            }
            Weights::Latent { q, kv_a, kv_a_norm, keys, values, kv_lora, nope, rope } => {
                let q = {
                    let q = match q {
                        Queries::Direct(q) => multiply(q, x)?,
                        Queries::Narrow { a, a_norm, b } => {
                            multiply(b, &norm(&multiply(a, x)?, a_norm, self.norm_epsilon)?)?
                        }
                    };
                    let q = q.reshape((tokens, self.heads, nope + rope))?.transpose(0, 1)?;
                    let rotated = angles.rotate(&q.narrow(2, *nope, *rope)?)?;
                    let narrow = q.narrow(2, 0, *nope)?.contiguous()?.matmul(keys)?;
                    Tensor::cat(&[narrow, rotated], 2)?.unsqueeze(0)?
                };
                let row = multiply(kv_a, x)?;
                let narrow = norm(&row.narrow(1, 0, *kv_lora)?.contiguous()?, kv_a_norm, self.norm_epsilon)?;
                let k_rotated = angles.rotate(&row.narrow(1, *kv_lora, *rope)?.unsqueeze(0)?)?;
                let row = Tensor::cat(&[narrow.unsqueeze(0)?, k_rotated], 2)?;
                let (cached, _) = cache.extend(&row, None, past)?;
                let mixed = attend(&q, &cached, &cached.narrow(2, 0, *kv_lora)?, past, self.scale)?;
                mixed.squeeze(0)?.matmul(values)?
            }
        };
        let mixed = mixed.transpose(0, 1)?.flatten_from(1)?;
        multiply(&self.output, &mixed)
    }
}

/// Causal attention of `q: [groups, heads per group, tokens, key]` over `keys: [groups, past + tokens, key]`, their products times `scale`, and
/// `values: [groups, past + tokens, value]`; gives `[groups, heads per group, tokens, value]`. Threads take groups and slices of queries.
fn attend(q: &Tensor, keys: &Tensor, values: &Tensor, past: usize, scale: f32) -> candle_core::Result<Tensor> {
    let (_, heads, tokens, _) = q.dims4()?;
    let slice = (scores_of_thread() / (heads * (past + tokens))).clamp(1, tokens);
    attend_by(slice, q, keys, values, (past, scale))
}

/// [`attend`] by slices of so many queries.
fn attend_by(
    slice: usize,
    q: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    (past, scale): (usize, f32),
) -> candle_core::Result<Tensor> {
    let (groups, heads, tokens, width) = q.dims4()?;
    let slices = tokens.div_ceil(slice);
    let part = |i: usize| {
        let (group, first) = (i / slices, i % slices * slice);
        let count = slice.min(tokens - first);
        // No query of the slice sees a later key.
        let seen = past + first + count;
        let of_group = |x: &Tensor| x.narrow(0, group, 1)?.narrow(1, 0, seen)?.squeeze(0);
        let q = q.narrow(0, group, 1)?.narrow(2, first, count)?.contiguous()?.reshape((heads * count, width))?;
        let scores = q.matmul(&of_group(keys)?.t()?)?;
        scores.inplace_op1(&CausalSoftmax { queries: count, past: past + first, scale })?;
        let mixed = scores.matmul(&of_group(values)?)?;
        let value = mixed.dim(D::Minus1)?;
        mixed.reshape((1, heads, count, value))
    };
    let parts = (0..groups * slices).into_par_iter().map(part).collect::<candle_core::Result<Vec<_>>>()?;
    let of_groups = parts.chunks(slices).map(|parts| Tensor::cat(parts, 2)).collect::<candle_core::Result<Vec<_>>>()?;
    drop(parts);
    Tensor::cat(&of_groups, 0)
}

/// The softmax of scores `[heads * queries, keys]` times a positive `scale`, of what the queries see: query `i` of each head sees `past + i + 1` keys. Others
/// get 0.
struct CausalSoftmax {
    queries: usize,
    past: usize,
    scale: f32,
}

impl InplaceOp1 for CausalSoftmax {
    fn name(&self) -> &'static str {
        "causal softmax"
    }

    fn cpu_fwd(&self, scores: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let (CpuStorage::F32(scores), Some((start, end))) = (scores, layout.contiguous_offsets()) else {
            candle_core::bail!("scores are not contiguous f32 numbers");
        };
        let (_, keys) = layout.shape().dims2()?;
        // Threads take rows, too: one slice may be all there is.
        let rows = scores[start..end].par_chunks_exact_mut(keys).with_min_len(SCORES_OF_TASK.div_ceil(keys));
        rows.enumerate().for_each(|(i, row)| {
            let (seen, later) = row.split_at_mut(self.past + i % self.queries + 1);
            let most = fold(seen, f32::NEG_INFINITY, |most, s| if s > most { s } else { most });
            seen.iter_mut().for_each(|s| *s = exp((*s - most) * self.scale));
            let part = 1.0 / fold(seen, 0.0, |sum, s| sum + s);
            seen.iter_mut().for_each(|s| *s *= part);
            later.fill(0.0);
        });
        Ok(())
    }
}

/// A fold that vectorizes: of each 16th number, then of those.
fn fold(numbers: &[f32], start: f32, f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [start; 16];
    let (chunks, rest) = numbers.as_chunks::<16>();
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, &x)| *lane = f(*lane, x));
    }
    rest.iter().chain(&lanes).fold(start, |folded, &x| f(folded, x))
}

/// `exp(x)` of `x` up to 0 to about 2e-7 relative, in operations that vectorize on any x86-64 (`kt`'s own rounds by some that came later); below
/// -87 it stays what it is there, 2e-38. NaN stays NaN.
fn exp(x: f32) -> f32 {
    let x = if x < -87.0 { -87.0 } else { x };
    // Adding 1.5 * 2^23 rounds to an integer, and leaves it in the low bits.
    const ROUND: f32 = (3 << 22) as f32;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    // Cody-Waite: ln 2 in two parts, so that n * ln 2 is exact enough.
    let r = (x - n * 0.693_359_4) - n * -2.121_944_4e-4;
    // Taylor coefficients; |r| <= ln 2 / 2 leaves an error below 1e-8.
    let mut p = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = p * r + coefficient;
    }
    p * f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn exp_is_accurate_over_its_range() {
        for i in 0..=870_000 {
            let x = i as f32 / -10_000.0;
            let want = (x as f64).exp();
            assert!(((exp(x) as f64) - want).abs() < 3e-7 * want, "{x}: {}", exp(x));
        }
        assert!(exp(f32::NEG_INFINITY) < 1e-37 && exp(f32::NAN).is_nan());
    }

    #[test]
    fn a_softmax_is_of_what_queries_see() {
        // Two heads of three queries, whose first one sees five keys.
        let (queries, past, keys, scale) = (3, 4, 40, 0.25);
        let numbers: Vec<f32> = (0..2 * queries * keys).map(|i| ((i * 37) % 101) as f32 / 9.0 - 5.0).collect();
        let of = |numbers: &[f32]| {
            let scores = Tensor::from_slice(numbers, (2 * queries, keys), &Device::Cpu).unwrap();
            scores.inplace_op1(&CausalSoftmax { queries, past, scale }).unwrap();
            scores.to_vec2::<f32>().unwrap()
        };
        let got = of(&numbers);
        for (i, (got, scores)) in got.iter().zip(numbers.chunks(keys)).enumerate() {
            let seen = past + i % queries + 1;
            let exp = |s: f32| (s as f64 * scale as f64).exp();
            let sum: f64 = scores[..seen].iter().map(|&s| exp(s)).sum();
            for (&got, &score) in got.iter().zip(&scores[..seen]) {
                assert!((got as f64 - exp(score) / sum).abs() < 1e-6, "{i}");
            }
            assert!(got[seen..].iter().all(|&p| p == 0.0), "{i}");
        }
        // A NaN, or an infinity, stays in its row, and in none that does not see it.
        for bad in [f32::NAN, f32::INFINITY] {
            let mut numbers = numbers.clone();
            numbers[keys + 5] = bad; // seen by query 1
            numbers[5] = bad; // not seen by query 0
            let other = of(&numbers);
            assert!(other[1][..6].iter().all(|p| p.is_nan()), "{bad}");
            assert!([0, 2, 3, 4, 5].iter().all(|&i| other[i] == got[i]), "{bad}");
        }
    }

    #[test]
    fn attend_is_causal_softmax_in_slices_of_any_size() {
        let (groups, heads, tokens, past, width) = (2, 3, 5, 2, 4);
        let numbers =
            |n: usize, seed: usize| (0..n).map(|i| ((i * 37 + seed * 11) % 19) as f32 / 9.0 - 1.0).collect::<Vec<_>>();
        let all = past + tokens;
        let q = numbers(groups * heads * tokens * width, 1);
        let (k, v) = (numbers(groups * all * width, 2), numbers(groups * all * width, 3));
        let tensor = |v: &[f32], shape: &[usize]| Tensor::from_vec(v.to_vec(), shape, &Device::Cpu).unwrap();
        let (keys, values) = (tensor(&k, &[groups, all, width]), tensor(&v, &[groups, all, width]));
        let q_tensor = tensor(&q, &[groups, heads, tokens, width]);
        for slice in 1..=tokens {
            let mixed = attend_by(slice, &q_tensor, &keys, &values, (past, 1.0)).unwrap();
            let got = mixed.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            for g in 0..groups {
                for h in 0..heads {
                    for t in 0..tokens {
                        let q = &q[((g * heads + h) * tokens + t) * width..][..width];
                        let row = |m: &[f32], j: usize| m[(g * all + j) * width..][..width].to_vec();
                        let p: Vec<f64> = (0..past + t + 1)
                            .map(|j| q.iter().zip(row(&k, j)).map(|(a, b)| (a * b) as f64).sum::<f64>().exp())
                            .collect();
                        for c in 0..width {
                            let want: f64 = p.iter().enumerate().map(|(j, p)| p * row(&v, j)[c] as f64).sum::<f64>()
                                / p.iter().sum::<f64>();
                            let got = got[((g * heads + h) * tokens + t) * width + c] as f64;
                            assert!((want - got).abs() < 1e-5, "{g} {h} {t} {c}: {want} {got}");
                        }
                    }
                }
            }
        }
    }
}
