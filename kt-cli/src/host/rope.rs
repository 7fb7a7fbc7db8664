//! Rotary positions: frequencies once, cosines and sines for the positions of each call.

use candle_core::{Device, Result, Tensor};

use super::config::Rope;

/// The frequencies of a model's rotary positions.
pub(super) struct Rotary {
    frequencies: Vec<f32>,
    factor: f32,
    interleaved: bool,
}

/// Cosines and sines of some positions, `[positions, dim / 2]`.
pub(super) struct Angles {
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
}

impl Rotary {
    pub(super) fn new(rope: &Rope) -> Self {
        let dim = rope.dim as f64;
        let half = rope.dim / 2;
        let plain = |i: usize| rope.theta.powf(-2.0 * i as f64 / dim);
        let (frequencies, factor) = match &rope.yarn {
            None => ((0..half).map(|i| plain(i) as f32).collect(), 1.0),
            Some(y) => {
                // The pair that turns `rotations` times within the original context.
                let pair = |rotations: f64| {
                    dim * (y.original_positions / (rotations * std::f64::consts::TAU)).ln() / (2.0 * rope.theta.ln())
                };
                let low = pair(y.beta_fast).floor().max(0.0);
                let high = pair(y.beta_slow).ceil().min(dim - 1.0);
                let width = if high == low { 0.001 } else { high - low };
                let stretched = |i: usize| ((i as f64 - low) / width).clamp(0.0, 1.0);
                let mix = |i: usize| plain(i) * (1.0 - stretched(i)) + plain(i) / y.factor * stretched(i);
                ((0..half).map(|i| mix(i) as f32).collect(), y.attention_factor as f32)
            }
        };
        Rotary { frequencies, factor, interleaved: rope.interleaved }
    }

    /// Cosines and sines of positions `first..first + count`.
    pub(super) fn angles(&self, first: usize, count: usize) -> Result<Angles> {
        let shape = (count, self.frequencies.len());
        let (mut cos, mut sin) = (Vec::with_capacity(shape.0 * shape.1), Vec::with_capacity(shape.0 * shape.1));
        for position in first..first + count {
            for &f in &self.frequencies {
                // The angle is rounded to F32, as the models were trained and published.
                let (s, c) = (position as f32 * f).sin_cos();
                cos.push(c * self.factor);
                sin.push(s * self.factor);
            }
        }
        Ok(Angles {
            cos: Tensor::from_vec(cos, shape, &Device::Cpu)?,
            sin: Tensor::from_vec(sin, shape, &Device::Cpu)?,
            interleaved: self.interleaved,
        })
    }
}

impl Angles {
    /// Rotates the columns of `x: [heads, positions, dim]`.
    pub(super) fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.contiguous()?.unsqueeze(0)?;
        let turned = match self.interleaved {
            true => candle_nn::rotary_emb::rope_i(&x, &self.cos, &self.sin)?,
            false => candle_nn::rotary_emb::rope(&x, &self.cos, &self.sin)?,
        };
        turned.squeeze(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::config::Yarn;

    #[test]
    fn yarn_keeps_fast_pairs_and_stretches_slow_ones() {
        let yarn = Yarn {
            factor: 4.0,
            original_positions: 1024.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 1.0,
            query_factor: 1.0,
        };
        let plain = Rope { dim: 64, theta: 10000.0, interleaved: false, yarn: None };
        let long = Rope { yarn: Some(yarn), ..plain.clone() };
        let (a, b) = (Rotary::new(&plain).frequencies, Rotary::new(&long).frequencies);
        assert_eq!(a[0], b[0]);
        assert!((a[31] / b[31] - 4.0).abs() < 1e-5);
        assert!(a.iter().zip(&b).all(|(a, b)| (1.0 - 1e-6..4.0 + 1e-5).contains(&(a / b))));
    }

    #[test]
    fn both_pairings_turn_the_same_angle() {
        let rope = Rope { dim: 4, theta: 10000.0, interleaved: true, yarn: None };
        let half = Rope { interleaved: false, ..rope.clone() };
        let x = |v: [f32; 4]| Tensor::from_vec(v.to_vec(), (1, 1, 4), &Device::Cpu).unwrap();
        let turn = |rope: &Rope, v| {
            let angles = Rotary::new(rope).angles(3, 1).unwrap();
            angles.rotate(&x(v)).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        let (a, b) = (turn(&rope, [1.0, 2.0, 3.0, 4.0]), turn(&half, [1.0, 3.0, 2.0, 4.0]));
        assert_eq!([a[0], a[1], a[2], a[3]], [b[0], b[2], b[1], b[3]]);
        let (s, c) = 3f32.sin_cos();
        assert!((a[0] - (c - 2.0 * s)).abs() < 1e-6 && (a[1] - (s + 2.0 * c)).abs() < 1e-6, "{a:?}");
    }
}
