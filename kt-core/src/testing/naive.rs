//! The model of an MoE layer that nothing can be simpler than: decoded weights, f64 arithmetic, one token at a time.

use crate::activation::Activation;
use crate::layer::{LayerSpec, Proj};
use crate::source::WeightSource;
use crate::work::Hidden;

/// One layer's experts, decoded.
pub struct Naive {
    spec: LayerSpec,
    /// Per expert: gate, up, down, each `[rows, cols]`.
    weights: Vec<[Vec<f32>; 3]>,
    biases: Vec<[Vec<f32>; 3]>,
}

/// Eight sums side by side: the order does not matter in f64, and it is four times as fast as one.
fn dot(w: &[f32], x: &[f64]) -> f64 {
    let mut sums = [0f64; 8];
    for (w, x) in w.chunks(8).zip(x.chunks(8)) {
        for (s, (w, x)) in sums.iter_mut().zip(w.iter().zip(x)) {
            *s += *w as f64 * x;
        }
    }
    sums.iter().sum()
}

fn sigmoid(t: f64) -> f64 {
    1.0 / (1.0 + (-t).exp())
}

fn activate(rule: Activation, gate: f64, up: f64) -> f64 {
    match rule {
        Activation::SiluMul => gate * sigmoid(gate) * up,
        Activation::ClampedSiluMul { limit } => {
            let (limit, g) = (limit as f64, gate.min(limit as f64));
            g * sigmoid(g) * up.clamp(-limit, limit)
        }
        Activation::GptOss { alpha, limit } => {
            let (limit, g) = (limit as f64, gate.min(limit as f64));
            g * sigmoid(alpha as f64 * g) * (up.clamp(-limit, limit) + 1.0)
        }
    }
}

impl Naive {
    /// Decodes the source's first layer.
    ///
    /// # Panics
    /// When the source cannot be read: this is for tests.
    pub fn new(source: &dyn WeightSource) -> Self {
        let spec = source.layers()[0].clone();
        let read = |e: usize| Proj::ALL.map(|p| source.matrix(spec.index, e, p).expect("a readable matrix").decode());
        let bias = |e: usize| {
            Proj::ALL.map(|p| {
                let bias = if spec.biases { source.bias(spec.index, e, p).expect("a readable bias") } else { None };
                bias.unwrap_or_else(|| vec![0.0; spec.shape(p).0])
            })
        };
        let weights = (0..spec.experts).map(read).collect();
        let biases = (0..spec.experts).map(bias).collect();
        Naive { spec, weights, biases }
    }

    /// Width of the hidden state.
    pub fn hidden(&self) -> usize {
        self.spec.hidden
    }

    fn product(&self, expert: usize, proj: Proj, x: &[f64]) -> Vec<f64> {
        let w = &self.weights[expert][proj.index()];
        let bias = &self.biases[expert][proj.index()];
        let row = |(row, b): (&[f32], &f32)| dot(row, x) + *b as f64;
        w.chunks_exact(x.len()).zip(bias).map(row).collect()
    }

    /// One expert's output for one token.
    pub fn expert(&self, expert: usize, x: &[f64]) -> Vec<f64> {
        let gate = self.product(expert, Proj::Gate, x);
        let up = self.product(expert, Proj::Up, x);
        let h: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| activate(self.spec.activation, *g, *u)).collect();
        self.product(expert, Proj::Down, &h)
    }

    /// The block's output `[tokens, hidden]`.
    pub fn forward(&self, input: &Hidden, tokens: usize, ids: &[i32], weights: &[f32], top_k: usize) -> Vec<f64> {
        let hidden = self.spec.hidden;
        let mut out = vec![0.0; tokens * hidden];
        let mut x = vec![0f32; hidden];
        for token in 0..tokens {
            input.read(token * hidden..(token + 1) * hidden, &mut x);
            let x: Vec<f64> = x.iter().map(|&v| v as f64).collect();
            for slot in token * top_k..(token + 1) * top_k {
                if ids[slot] >= 0 {
                    let y = self.expert(ids[slot] as usize, &x);
                    let out = &mut out[token * hidden..(token + 1) * hidden];
                    out.iter_mut().zip(y).for_each(|(o, y)| *o += weights[slot] as f64 * y);
                }
            }
        }
        out
    }
}
