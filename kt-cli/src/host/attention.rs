//! Attention over the cache.
//!
//! Both kinds end in the same product, [`attend`]: groups of query heads over one head of keys and values. Latent attention gets
//! there by moving the expansion of keys and values to the other side: instead of expanding every cached row `c` to
//! `k = Wk c` and `v = Wv c` for each head, `q . (Wk c)` is computed as `(q Wk) . c`, and `sum p (Wv c)` as `Wv (sum p c)`. So the cache
//! holds one narrow row per token, and a step costs the same whatever the number of heads that share it. The price is
//! F32 copies of `Wk` and `Wv`, and wider dot products at prefill.

use candle_core::{D, Device, Tensor};
use kt::Linear;

use super::config::{Attention as Kind, ModelConfig};
use super::model::{LayerCache, multiply, norm};
use super::names;
use super::rope::Angles;
use super::weights::LayerWeights;

/// Most scores held at once (16 MiB): longer inputs go through in slices of queries.
pub(super) const SCORES: usize = 4 << 20;

/// The attention of one layer.
pub(super) struct Attention {
    kind: Weights,
    output: Linear,
    heads: usize,
    scale: f64,
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
            scale: query_factor * query_factor / (width as f64).sqrt(),
            norm_epsilon: config.norm_epsilon,
        })
    }

    /// Attention of `x: [tokens, hidden]`, whose first token has position `past`; its keys and values join the cache.
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
                let q = norm(&heads(multiply(q, x)?, self.heads)?, q_norm, self.norm_epsilon)?;
                let k = norm(&heads(multiply(k, x)?, *kv_heads)?, k_norm, self.norm_epsilon)?;
                let v = heads(multiply(v, x)?, *kv_heads)?.transpose(0, 1)?.contiguous()?;
                let q = angles.rotate(&q.transpose(0, 1)?)?;
                let k = angles.rotate(&k.transpose(0, 1)?)?;
                let (keys, values) = cache.extend(&k, Some(&v), past)?;
                let q = q.reshape((*kv_heads, self.heads / kv_heads, tokens, *head_dim))?;
                attend(&(q * self.scale)?, &keys, &values, past)?.reshape((self.heads, tokens, *head_dim))?
            }
            Weights::Latent { q, kv_a, kv_a_norm, keys, values, kv_lora, nope, rope } => {
                let q = match q {
                    Queries::Direct(q) => multiply(q, x)?,
                    Queries::Narrow { a, a_norm, b } => {
                        multiply(b, &norm(&multiply(a, x)?, a_norm, self.norm_epsilon)?)?
                    }
                };
                let q = q.reshape((tokens, self.heads, nope + rope))?.transpose(0, 1)?;
                let q_rotated = angles.rotate(&q.narrow(2, *nope, *rope)?)?;
                let q_narrow = q.narrow(2, 0, *nope)?.contiguous()?.matmul(keys)?;
                let q = Tensor::cat(&[q_narrow, q_rotated], 2)?.unsqueeze(0)?;
                let row = multiply(kv_a, x)?;
                let narrow = norm(&row.narrow(1, 0, *kv_lora)?.contiguous()?, kv_a_norm, self.norm_epsilon)?;
                let k_rotated = angles.rotate(&row.narrow(1, *kv_lora, *rope)?.unsqueeze(0)?)?;
                let row = Tensor::cat(&[narrow.unsqueeze(0)?, k_rotated], 2)?;
                let (cached, _) = cache.extend(&row, None, past)?;
                let mixed = attend(&(q * self.scale)?, &cached, &cached.narrow(2, 0, *kv_lora)?, past)?;
                mixed.squeeze(0)?.matmul(values)?
            }
        };
        let mixed = mixed.transpose(0, 1)?.flatten_from(1)?;
        multiply(&self.output, &mixed)
    }
}

/// Causal attention of `q: [groups, heads per group, tokens, key]` (scaled) over `keys: [groups, past + tokens, key]` and
/// `values: [groups, past + tokens, value]`; gives `[groups, heads per group, tokens, value]`.
fn attend(q: &Tensor, keys: &Tensor, values: &Tensor, past: usize) -> candle_core::Result<Tensor> {
    let (groups, heads, tokens, width) = q.dims4()?;
    let slice = (SCORES / (groups * heads * (past + tokens))).max(1);
    let mut parts = Vec::with_capacity(tokens.div_ceil(slice));
    for first in (0..tokens).step_by(slice) {
        let count = slice.min(tokens - first);
        // No query of the slice sees a later key.
        let seen = past + first + count;
        let (keys, values) = (keys.narrow(1, 0, seen)?, values.narrow(1, 0, seen)?);
        let q = q.narrow(2, first, count)?.contiguous()?.reshape((groups, heads * count, width))?;
        let mut scores = q.matmul(&keys.transpose(1, 2)?)?;
        if count > 1 {
            let mask = mask(past + first, count)?;
            scores = scores.reshape((groups, heads, count, seen))?.broadcast_add(&mask)?.reshape((
                groups,
                heads * count,
                seen,
            ))?;
        }
        let mixed = candle_nn::ops::softmax_last_dim(&scores)?.matmul(&values)?;
        parts.push(mixed.reshape((groups, heads, count, mixed.dim(D::Minus1)?))?);
    }
    if parts.len() == 1 { Ok(parts.remove(0)) } else { Tensor::cat(&parts, 2) }
}

/// `[count, past + count]`: 0 where the query of a row may see the key of a column, minus infinity elsewhere.
fn mask(past: usize, count: usize) -> candle_core::Result<Tensor> {
    let seen = past + count;
    let mut mask = vec![0f32; count * seen];
    for (i, row) in mask.chunks_exact_mut(seen).enumerate() {
        row[past + i + 1..].fill(f32::NEG_INFINITY);
    }
    Tensor::from_vec(mask, (count, seen), &Device::Cpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attend_is_causal_softmax_and_slices_agree() {
        let (groups, heads, tokens, past, width) = (2, 3, 5, 2, 4);
        let numbers =
            |n: usize, seed: usize| (0..n).map(|i| ((i * 37 + seed * 11) % 19) as f32 / 9.0 - 1.0).collect::<Vec<_>>();
        let all = past + tokens;
        let q = numbers(groups * heads * tokens * width, 1);
        let (k, v) = (numbers(groups * all * width, 2), numbers(groups * all * width, 3));
        let tensor = |v: &[f32], shape: &[usize]| Tensor::from_vec(v.to_vec(), shape, &Device::Cpu).unwrap();
        let (keys, values) = (tensor(&k, &[groups, all, width]), tensor(&v, &[groups, all, width]));
        let whole = attend(&tensor(&q, &[groups, heads, tokens, width]), &keys, &values, past).unwrap();
        let got = whole.flatten_all().unwrap().to_vec1::<f32>().unwrap();
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
