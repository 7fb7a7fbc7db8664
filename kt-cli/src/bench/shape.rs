//! Sizes of layers, and routings drawn at random.

use std::str::FromStr;

use kt::Format;
use kt::activation::Activation;
use kt::source::synthetic::SyntheticSource;

/// Sizes of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    pub name: String,
    pub hidden: usize,
    pub intermediate: usize,
    pub experts: usize,
    pub top_k: usize,
    pub activation: Activation,
    pub biases: bool,
}

/// The shapes that have names.
const NAMES: [&str; 4] = ["qwen3-30b-a3b", "deepseek-v3", "gpt-oss", "mixtral"];

/// The most outputs, columns or experts of a shape.
const MOST: usize = 1 << 20;

impl FromStr for Shape {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let swiglu = Activation::SiluMul;
        let ([hidden, intermediate, experts, top_k], activation) = match name {
            "qwen3-30b-a3b" => ([2048, 768, 128, 8], swiglu),
            "deepseek-v3" => ([7168, 2048, 32, 8], swiglu),
            "gpt-oss" => ([2880, 2880, 32, 4], Activation::GptOss { alpha: 1.702, limit: 7.0 }),
            "mixtral" => ([4096, 14336, 8, 2], swiglu),
            _ => {
                let sizes: Option<Vec<usize>> = name.split('x').map(|s| s.parse().ok()).collect();
                match sizes.as_deref() {
                    Some(&[h, i, e, k]) if h > 0 && i > 0 && k > 0 && k <= e && h.max(i).max(e) <= MOST => {
                        ([h, i, e, k], swiglu)
                    }
                    _ => {
                        return Err(format!(
                            "known shapes are {}, and `all` of them; or give HIDDENxINTERMEDIATExEXPERTSxTOP_K, such as \
                             2048x768x128x8: each from 1 to {}, TOP_K at most EXPERTS",
                            NAMES.join(", "),
                            MOST
                        ));
                    }
                }
            }
        };
        Ok(Shape { name: name.into(), hidden, intermediate, experts, top_k, activation, biases: name == "gpt-oss" })
    }
}

impl Shape {
    pub fn source(&self, format: Format, layers: usize) -> kt::Result<SyntheticSource> {
        SyntheticSource::builder()
            .hidden(self.hidden)
            .intermediate(self.intermediate)
            .experts(self.experts)
            .top_k(self.top_k)
            .layers(layers)
            .format(format)
            .activation(self.activation)
            .biases(self.biases)
            .seed(1)
            .build()
    }

    /// Operations of a call: gate, up and down are a multiply-add per weight and row each.
    pub fn operations(&self, tokens: usize) -> f64 {
        2.0 * 3.0 * self.hidden as f64 * self.intermediate as f64 * (tokens * self.top_k) as f64
    }

    /// Hidden, intermediate, experts, top-k.
    pub fn sizes(&self) -> [usize; 4] {
        [self.hidden, self.intermediate, self.experts, self.top_k]
    }

    pub fn title(&self) -> String {
        let [hidden, intermediate, experts, top_k] = self.sizes();
        format!("{}: {hidden} x {intermediate}, {experts} experts, top {top_k}", self.name)
    }
}

/// A comma-separated list of shapes; `all` stands for those with names.
#[derive(Debug, Clone, PartialEq)]
pub struct Shapes(pub Vec<Shape>);

impl FromStr for Shapes {
    type Err = String;

    fn from_str(list: &str) -> Result<Self, Self::Err> {
        let names: Vec<&str> = if list == "all" { NAMES.to_vec() } else { list.split(',').map(str::trim).collect() };
        names.into_iter().map(str::parse).collect::<Result<_, _>>().map(Shapes)
    }
}

/// A comma-separated list of formats, or `all`.
#[derive(Debug, Clone, PartialEq)]
pub enum Formats {
    /// Those that a kernel of this machine runs natively.
    All,
    These(Vec<Format>),
}

impl FromStr for Formats {
    type Err = kt::Unsupported;

    fn from_str(list: &str) -> Result<Self, Self::Err> {
        if list == "all" {
            return Ok(Formats::All);
        }
        list.split(',').map(|name| name.trim().parse()).collect::<Result<_, _>>().map(Formats::These)
    }
}

/// `top_k` different experts for every token, all equally likely, with weights that add up to 1.
pub fn route(random: &mut Random, tokens: usize, experts: usize, top_k: usize) -> (Vec<i32>, Vec<f32>) {
    let mut ids = Vec::with_capacity(tokens * top_k);
    let mut weights = Vec::with_capacity(tokens * top_k);
    let mut all: Vec<i32> = (0..experts as i32).collect();
    for _ in 0..tokens {
        for k in 0..top_k {
            all.swap(k, k + random.below(experts - k));
        }
        ids.extend_from_slice(&all[..top_k]);
        let raw: Vec<f32> = (0..top_k).map(|_| 0.1 + random.unit()).collect();
        let sum: f32 = raw.iter().sum();
        weights.extend(raw.iter().map(|w| w / sum));
    }
    (ids, weights)
}

/// SplitMix64: small, seeded, good enough for routing.
pub struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In `0..n`, `n` above 0.
    fn below(&mut self, n: usize) -> usize {
        ((self.next() as u128 * n as u128) >> 64) as usize
    }

    /// In `0..1`.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// About normal: mean 0, variance 1.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() - 6.0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn shapes_are_read() {
        let shape: Shape = "deepseek-v3".parse().unwrap();
        assert_eq!(shape.sizes(), [7168, 2048, 32, 8]);
        let own: Shape = "256x128x4x2".parse().unwrap();
        assert_eq!(own.sizes(), [256, 128, 4, 2]);
        assert_eq!(own.operations(3), 2.0 * 3.0 * 256.0 * 128.0 * 6.0);
        for bad in ["", "qwen", "1x2x3", "256x128x4x5", "0x1x1x1", "256x128x4x0", "99999999x1x1x1"] {
            assert!(bad.parse::<Shape>().unwrap_err().contains("TOP_K"), "{bad}");
        }
    }

    #[test]
    fn lists_of_shapes_and_formats_are_read() {
        let names = |list: &str| list.parse::<Shapes>().unwrap().0.into_iter().map(|s| s.name).collect::<Vec<_>>();
        assert_eq!(names("all"), NAMES);
        assert_eq!(names("mixtral, 256x128x4x2"), ["mixtral", "256x128x4x2"]);
        for bad in ["", "mixtral,", "all,mixtral"] {
            assert!(bad.parse::<Shapes>().is_err(), "{bad}");
        }
        assert_eq!("all".parse::<Formats>().unwrap(), Formats::All);
        let two = vec![Format::Bf16, Format::Int4(kt::Group::Of(64))];
        assert_eq!("bf16, int4-g64".parse::<Formats>().unwrap(), Formats::These(two));
        assert!("bf16,int3".parse::<Formats>().is_err());
    }

    #[test]
    fn routing_chooses_different_experts_evenly() {
        let mut random = Random(7);
        let (ids, weights) = route(&mut random, 2000, 16, 4);
        let mut counts = [0; 16];
        for (ids, weights) in ids.chunks(4).zip(weights.chunks(4)) {
            assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), 4);
            assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-5 && weights.iter().all(|&w| w > 0.0));
            ids.iter().for_each(|&i| counts[i as usize] += 1);
        }
        // 500 each on average, standard deviation about 19.
        assert!(counts.iter().all(|c| (400..600).contains(c)), "{counts:?}");
        assert_ne!(route(&mut random, 1, 16, 4), route(&mut random, 1, 16, 4));
    }
}
