//! A source of seeded random weights, of any shape and format, that stores none of them.
//!
//! Each matrix is made when asked for, from its seed, layer, expert and projection, so that a model of hundreds of gigabytes
//! can be benchmarked without a checkpoint. Codes are drawn directly in the format: decoded values look like a normal
//! distribution of standard deviation `1 / sqrt(cols)`, which keeps outputs of the size of inputs.

use std::path::Path;
use std::sync::LazyLock;

use bytes::Bytes;

use super::fingerprint::Fingerprint;
use super::{Metadata, Reads, WeightSource};
use crate::activation::{Activation, exp};
use crate::error::{Error, Result};
use crate::format::float::f32_to_bf16;
use crate::format::fp8::{E4M3, f32_to_e4m3};
use crate::format::mx::{E2M1, e8m0_to_f32, f32_to_e2m1};
use crate::format::{Format, Global, Matrix, ScaleType, ggml};
use crate::layer::{LayerSpec, Proj};
use crate::quantize::scale_type;
use crate::routing::{Routing, Rule};

/// A [`WeightSource`] of random weights. The same builder gives the same bytes, on any machine.
#[derive(Debug)]
pub struct SyntheticSource {
    layers: Vec<LayerSpec>,
    metadata: Metadata,
    seed: u64,
}

/// What a [`SyntheticSource`] shall be; start with [`SyntheticSource::builder`].
#[derive(Debug, Clone)]
pub struct SyntheticBuilder {
    spec: LayerSpec,
    layers: usize,
    seed: u64,
}

impl SyntheticSource {
    /// Starts with one BF16 layer of 8 experts, 2 of them per token, hidden and intermediate size 256, seed 0.
    pub fn builder() -> SyntheticBuilder {
        let spec = LayerSpec {
            index: 0,
            experts: 8,
            top_k: 2,
            hidden: 256,
            intermediate: 256,
            formats: [Format::Bf16; 3],
            scales: [None; 3],
            activation: Activation::SiluMul,
            biases: false,
        };
        SyntheticBuilder { spec, layers: 1, seed: 0 }
    }

    fn spec(&self, layer: usize, expert: usize, proj: Proj) -> Result<&LayerSpec> {
        let spec = self
            .layers
            .get(layer)
            .ok_or_else(|| Error::NoSuchLayer { layer, known: format!("0..{}", self.layers.len()) })?;
        if expert >= spec.experts {
            let (file, tensor) = self.tensor_name(layer, expert, proj);
            return Err(Error::tensor(file, tensor, format!("the layer has experts 0..{}", spec.experts)));
        }
        Ok(spec)
    }

    fn random(&self, layer: usize, expert: usize, part: usize) -> Random {
        let mut random = Random(self.seed);
        for key in [layer, expert, part] {
            random = Random(random.next() ^ key as u64);
        }
        random
    }
}

impl SyntheticBuilder {
    /// Width of the hidden state.
    pub fn hidden(mut self, hidden: usize) -> Self {
        self.spec.hidden = hidden;
        self
    }

    /// Width of an expert's intermediate state.
    pub fn intermediate(mut self, intermediate: usize) -> Self {
        self.spec.intermediate = intermediate;
        self
    }

    /// Experts per layer.
    pub fn experts(mut self, experts: usize) -> Self {
        self.spec.experts = experts;
        self
    }

    /// Experts per token.
    pub fn top_k(mut self, top_k: usize) -> Self {
        self.spec.top_k = top_k;
        self
    }

    /// Number of layers, all alike.
    pub fn layers(mut self, layers: usize) -> Self {
        self.layers = layers;
        self
    }

    /// One [`Format`] for all projections, or one each for gate, up and down.
    pub fn format(mut self, formats: impl Into<[Format; 3]>) -> Self {
        self.spec.formats = formats.into();
        self
    }

    /// The type of scales beside codes, for formats that leave it open; others keep their own. Default: BF16 for groups.
    pub fn scales(mut self, kind: ScaleType) -> Self {
        self.spec.scales = [Some(kind); 3];
        self
    }

    /// The rule between gate, up and down.
    pub fn activation(mut self, activation: Activation) -> Self {
        self.spec.activation = activation;
        self
    }

    /// Whether projections have biases (of standard deviation 0.1).
    pub fn biases(mut self, biases: bool) -> Self {
        self.spec.biases = biases;
        self
    }

    /// Another seed, other weights.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Checks sizes and makes the source.
    ///
    /// # Errors
    /// [`Error::Invalid`]: a size of 0, more experts per token than there are, or a shape that a format cannot have.
    pub fn build(self) -> Result<SyntheticSource> {
        let invalid = |what: String| Err(Error::Invalid(format!("synthetic source: {what}")));
        let spec = &self.spec;
        for (what, size) in [
            ("hidden", spec.hidden),
            ("intermediate", spec.intermediate),
            ("experts", spec.experts),
            ("top_k", spec.top_k),
            ("layers", self.layers),
        ] {
            if size == 0 || size > i32::MAX as usize {
                return invalid(format!("{what} is {size}"));
            }
        }
        if spec.top_k > spec.experts {
            return invalid(format!("top_k is {} of {} experts", spec.top_k, spec.experts));
        }
        for proj in Proj::ALL {
            if let Err(e) = spec.format(proj).row_bytes(spec.shape(proj).1) {
                return invalid(format!("{}: {e}", proj.name()));
            }
        }
        let metadata = Metadata::HuggingFace(serde_json::json!({
            "model_type": "synthetic",
            "hidden_size": spec.hidden,
            "moe_intermediate_size": spec.intermediate,
            "num_experts": spec.experts,
            "num_experts_per_tok": spec.top_k,
            "num_hidden_layers": self.layers,
        }));
        let layers = (0..self.layers).map(|index| LayerSpec { index, ..spec.clone() }).collect();
        Ok(SyntheticSource { layers, metadata, seed: self.seed })
    }
}

impl WeightSource for SyntheticSource {
    fn path(&self) -> &Path {
        Path::new("synthetic")
    }

    /// Of a layer and the seed: layers are alike, and how many there are changes none of them.
    fn fingerprint(&self) -> Option<u128> {
        let mut fingerprint = Fingerprint::new("synthetic");
        fingerprint.add(format!("{:?}, seed {}", self.layers[0], self.seed).as_bytes());
        fingerprint.finish()
    }

    fn layers(&self) -> &[LayerSpec] {
        &self.layers
    }

    fn matrix(&self, layer: usize, expert: usize, proj: Proj) -> Result<Matrix> {
        let spec = self.spec(layer, expert, proj)?;
        let (rows, cols) = spec.shape(proj);
        let (random, scales) = (self.random(layer, expert, proj.index()), spec.scales[proj.index()]);
        generate(random, (spec.format(proj), scales), rows, cols).map_err(|what| {
            let (file, tensor) = self.tensor_name(layer, expert, proj);
            Error::tensor(file, tensor, what)
        })
    }

    fn reads(&self, layer: &LayerSpec, proj: Proj) -> Reads {
        let (rows, cols) = layer.shape(proj);
        Reads { mapped_bytes: 0, copied_bytes: layer.format(proj).stored_bytes(rows, cols) }
    }

    fn bias(&self, layer: usize, expert: usize, proj: Proj) -> Result<Option<Vec<f32>>> {
        let spec = self.spec(layer, expert, proj)?;
        if !spec.biases {
            return Ok(None);
        }
        let mut random = self.random(layer, expert, Proj::ALL.len() + proj.index());
        Ok(Some((0..spec.shape(proj).0).map(|_| TABLES.normal[random.next() as usize % TABLE] * 0.1).collect()))
    }

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn routing(&self, layer: usize) -> Option<Routing> {
        let spec = self.layers.get(layer)?;
        Some(Routing { top_k: spec.top_k, rule: Rule::Softmax { renormalize: true }, scale: 1.0 })
    }

    fn tensors(&self) -> Vec<String> {
        Vec::new()
    }

    fn tensor(&self, name: &str) -> Result<Matrix> {
        Err(Error::tensor(self.path(), name, "synthetic weights are routed experts only"))
    }

    fn dense_bytes(&self) -> u64 {
        0
    }
}

/// SplitMix64: a counter and a mixing function, so that consecutive numbers do not wait for each other.
struct Random(u64);

impl Random {
    #[inline(always)]
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Fills `out` with entries of a table: five of 12 bits out of each number.
    #[inline(always)]
    fn fill<T: Copy>(&mut self, table: &[T; TABLE], out: &mut [T]) {
        for chunk in out.chunks_mut(5) {
            let mut bits = self.next();
            for o in chunk {
                *o = table[bits as usize % TABLE];
                bits >>= 12;
            }
        }
    }

    /// Uniform in 0..1.
    #[inline(always)]
    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// A factor in 0.75..1.25, so that neighbouring scales differ.
    #[inline(always)]
    fn factor(&mut self) -> f32 {
        0.75 + self.uniform() * 0.5
    }
}

/// Entries of a table: as many as 12 bits of a random number can pick.
const TABLE: usize = 4096;

/// Codes that a uniform random index turns into normally distributed values, and the standard deviation of those.
struct Codes {
    codes: [u8; TABLE],
    deviation: f32,
}

impl Codes {
    /// Codes `round(v * steps + offset)` in `0..=top`, which stand for the code minus `offset`.
    fn new(normal: &[f32], steps: f32, offset: f32, top: f32) -> Self {
        Self::of(normal, |v| {
            let code = (v * steps + offset).round_ties_even().clamp(0.0, top);
            (code as u8, code - offset)
        })
    }

    /// `code` gives the code for a standard normal value, and what it stands for.
    fn of(normal: &[f32], code: impl Fn(f32) -> (u8, f32)) -> Self {
        let mut table = Codes { codes: [0; TABLE], deviation: 0.0 };
        for (entry, &v) in table.codes.iter_mut().zip(normal) {
            let (code, value) = code(v);
            *entry = code;
            table.deviation += value * value;
        }
        table.deviation = (table.deviation / normal.len() as f32).sqrt();
        table
    }

    /// Two nibbles per byte.
    fn nibbles(offset: f32) -> Self {
        Codes::new(&quantiles::<64>(), 2.9, offset, 15.0).paired()
    }

    /// Pairs of nibbles that stand for the entry of `values` nearest to a normal value times `steps`.
    fn nearest(values: [f32; 16], steps: f32) -> Self {
        let distance = |v: f32, i: usize| (values[i] - v * steps).abs();
        let nearest = |v| (0..16).fold(0, |best, i| if distance(v, i) < distance(v, best) { i } else { best });
        Codes::of(&quantiles::<64>(), |v| (nearest(v) as u8, values[nearest(v)])).paired()
    }

    /// All pairs of the first 64 codes, which are nibbles.
    fn paired(self) -> Self {
        let one = self;
        Codes { codes: std::array::from_fn(|i| one.codes[i % 64] | one.codes[i / 64] << 4), ..one }
    }
}

/// The numbers below were chosen so that the largest of 4096 normal values (3.67) just fits the codes.
struct Tables {
    normal: [f32; TABLE],
    fp8: Codes,
    /// Signed bytes.
    int8: Codes,
    /// Pairs of nibbles, minus 8.
    nibbles: Codes,
    /// Pairs of nibbles, E2M1.
    e2m1: Codes,
    /// Pairs of nibbles, minus 7.5.
    centred_nibbles: Codes,
    /// Pairs of nibbles, for values of IQ4 types.
    iq4: Codes,
    /// 0..4, minus 1.5.
    two_bits: Codes,
    /// 0..8, minus 4.
    three_bits: Codes,
    /// 0..32, minus 15.5.
    five_bits: Codes,
    /// 0..32, minus 16.
    signed_five_bits: Codes,
    /// 0..64, minus 32.
    six_bits: Codes,
    /// Five ternary digits, minus 1.
    ternary: Codes,
    /// Four pairs of bits, 0..3, minus 1.
    ternary_pairs: Codes,
}

static TABLES: LazyLock<Tables> = LazyLock::new(|| {
    let normal = quantiles::<TABLE>();
    let mut int8 = Codes::new(&normal, 34.0, 128.0, 255.0);
    int8.codes = int8.codes.map(|c| c ^ 0x80);
    Tables {
        fp8: Codes::of(&normal, |v| {
            let code = f32_to_e4m3(v * 100.0);
            (code, E4M3[code as usize])
        }),
        int8,
        nibbles: Codes::nibbles(8.0),
        e2m1: Codes::of(&quantiles::<64>(), |v| {
            let code = f32_to_e2m1(v * 2.2);
            (code, E2M1[code as usize])
        })
        .paired(),
        centred_nibbles: Codes::nibbles(7.5),
        iq4: Codes::nearest(ggml::IQ4_VALUES.map(f32::from), 45.0),
        two_bits: Codes::new(&normal, 0.5, 1.5, 3.0),
        three_bits: Codes::new(&normal, 1.2, 4.0, 7.0),
        five_bits: Codes::new(&normal, 4.2, 15.5, 31.0),
        signed_five_bits: Codes::new(&normal, 4.2, 16.0, 31.0),
        six_bits: Codes::new(&normal, 8.6, 32.0, 63.0),
        // Three values are all alike.
        ternary: Codes {
            codes: std::array::from_fn(|i| ((i % 243) * 256).div_ceil(243) as u8),
            deviation: (2.0f32 / 3.0).sqrt(),
        },
        // 1 twice as often as 0 and 2, which pairs of bits do not have in equal shares.
        ternary_pairs: Codes {
            codes: std::array::from_fn(|i| i as u8 & !((i as u8 & 0x55) << 1)),
            deviation: 0.5f32.sqrt(),
        },
        normal,
    }
});

/// The middles of `N` equally likely ranges of the standard normal distribution, rising.
///
/// Found by adding up the density, in operations that every machine rounds alike.
fn quantiles<const N: usize>() -> [f32; N] {
    let mut out = [0.0; N];
    let (step, density) = (1.0 / 2048.0, |x: f64| 0.398_942_280_401_432_7 * exp((-0.5 * x * x) as f32) as f64);
    let (mut x, mut area) = (0.0, 0.5);
    for i in N / 2..N {
        let p = (i as f64 + 0.5) / N as f64;
        let mut slab = density(x + step / 2.0) * step;
        while area + slab < p {
            area += slab;
            x += step;
            slab = density(x + step / 2.0) * step;
        }
        out[i] = (x + step * (p - area) / slab) as f32;
        out[N - 1 - i] = -out[i];
    }
    out
}

/// Random codes and scales of a matrix.
fn generate(
    mut random: Random,
    (format, scales): (Format, Option<ScaleType>),
    rows: usize,
    cols: usize,
) -> Result<Matrix, String> {
    let deviation = 1.0 / (cols as f32).sqrt();
    let t = &*TABLES;
    let size = rows.checked_mul(format.row_bytes(cols)?).ok_or("shape overflows")?;
    let (codes, separate) = match format {
        Format::F32 => (floats(&mut random, rows * cols, |v| (v * deviation).to_le_bytes()), None),
        Format::F16 => (floats(&mut random, rows * cols, |v| f16(v * deviation)), None),
        Format::Bf16 => (floats(&mut random, rows * cols, |v| f32_to_bf16(v * deviation).to_le_bytes()), None),
        Format::Fp8Block | Format::Fp8Channel | Format::Mxfp8 => (bytes(&mut random, size, &t.fp8), Some(&t.fp8)),
        Format::Mxfp4 | Format::Nvfp4 => (bytes(&mut random, size, &t.e2m1), Some(&t.e2m1)),
        Format::Int8(_) => (bytes(&mut random, size, &t.int8), Some(&t.int8)),
        Format::Int8Offset(_) | Format::Int8Asym(_) | Format::Int8Ordered(_) => {
            let mut codes = bytes(&mut random, size, &t.int8);
            codes.iter_mut().for_each(|c| *c ^= 0x80);
            (codes, Some(&t.int8))
        }
        Format::Int4(_) | Format::Int4Asym(_) | Format::Int4Ordered(_) => {
            (bytes(&mut random, size, &t.nibbles), Some(&t.nibbles))
        }
        _ => {
            let mut codes = vec![0; size];
            match format {
                Format::Q8_0 => {
                    blocks(&mut codes, |b| simple::<{ ggml::Q8_0_BYTES }>(&mut random, b, &t.int8, deviation))
                }
                Format::Q4_0 => {
                    blocks(&mut codes, |b| simple::<{ ggml::Q4_0_BYTES }>(&mut random, b, &t.nibbles, deviation))
                }
                Format::Iq4Nl => {
                    blocks(&mut codes, |b| simple::<{ ggml::IQ4_NL_BYTES }>(&mut random, b, &t.iq4, deviation))
                }
                Format::Q4_1 => blocks(&mut codes, |b: &mut [u8; ggml::Q4_1_BYTES]| {
                    b[..4].copy_from_slice(&minimum(&mut random, 7.5, deviation / t.centred_nibbles.deviation));
                    random.fill(&t.centred_nibbles.codes, &mut b[4..]);
                }),
                Format::Q5_0 => blocks(&mut codes, |b: &mut [u8; ggml::Q5_0_BYTES]| {
                    b[..2].copy_from_slice(&f16(deviation / t.signed_five_bits.deviation * random.factor()));
                    b[2..].copy_from_slice(&five_bits(&mut random, &t.signed_five_bits));
                }),
                Format::Q5_1 => blocks(&mut codes, |b: &mut [u8; ggml::Q5_1_BYTES]| {
                    b[..4].copy_from_slice(&minimum(&mut random, 15.5, deviation / t.five_bits.deviation));
                    b[4..].copy_from_slice(&five_bits(&mut random, &t.five_bits));
                }),
                Format::Mxfp4Ggml => blocks(&mut codes, |b: &mut [u8; ggml::MXFP4_BYTES]| {
                    b[0] = exponent(&mut random, deviation / t.e2m1.deviation);
                    random.fill(&t.e2m1.codes, &mut b[1..]);
                }),
                Format::Q2K => blocks(&mut codes, |b| q2k(&mut random, b, deviation)),
                Format::Q3K => blocks(&mut codes, |b| q3k(&mut random, b, deviation)),
                Format::Iq4Xs => blocks(&mut codes, |b: &mut [u8; ggml::IQ4_XS_BYTES]| {
                    let scales = signed_scales(&mut random);
                    b[..2].copy_from_slice(&f16(deviation / t.iq4.deviation / SIGNED_SCALES * random.factor()));
                    b[2..8].copy_from_slice(&ggml::iq4_xs_pack_scales(&scales));
                    random.fill(&t.iq4.codes, &mut b[8..]);
                }),
                Format::Tq1_0 => blocks(&mut codes, |b: &mut [u8; ggml::TQ1_0_BYTES]| {
                    random.fill(&t.ternary.codes, &mut b[..52]);
                    b[52..].copy_from_slice(&f16(deviation / t.ternary.deviation * random.factor()));
                }),
                Format::Tq2_0 => blocks(&mut codes, |b: &mut [u8; ggml::TQ2_0_BYTES]| {
                    random.fill(&t.ternary_pairs.codes, &mut b[..64]);
                    b[64..].copy_from_slice(&f16(deviation / t.ternary_pairs.deviation * random.factor()));
                }),
                Format::Iq2Xxs
                | Format::Iq2Xs
                | Format::Iq2S
                | Format::Iq3Xxs
                | Format::Iq3S
                | Format::Iq1S
                | Format::Iq1M => on_grid(&mut random, format, &mut codes, deviation),
                Format::Q4K => blocks(&mut codes, |b: &mut [u8; ggml::Q4K_BYTES]| {
                    b[..16].copy_from_slice(&with_minima(&mut random, 7.5, deviation / t.centred_nibbles.deviation));
                    random.fill(&t.centred_nibbles.codes, &mut b[16..]);
                }),
                Format::Q5K => blocks(&mut codes, |b: &mut [u8; ggml::Q5K_BYTES]| {
                    b[..16].copy_from_slice(&with_minima(&mut random, 15.5, deviation / t.five_bits.deviation));
                    let mut q = [0; ggml::K_COLS];
                    random.fill(&t.five_bits.codes, &mut q);
                    ggml::q5k_pack_codes(&q, b);
                }),
                _ => blocks(&mut codes, |b| q6k(&mut random, b, deviation)),
            }
            (codes, None)
        }
    };
    let scales = separate.map(|table| {
        let (r, c) = format.scale_shape(rows, cols).unwrap_or((0, 0));
        let kind = scales.filter(|&kind| format.takes_scales(kind)).unwrap_or(scale_type(format));
        let mut out = Vec::with_capacity(r * c * kind.bytes());
        for _ in 0..r * c {
            let scale = deviation / table.deviation * random.factor();
            match kind {
                ScaleType::F32 => out.extend_from_slice(&scale.to_le_bytes()),
                ScaleType::F16 => out.extend_from_slice(&f16(scale)),
                ScaleType::Bf16 => out.extend_from_slice(&f32_to_bf16(scale).to_le_bytes()),
                ScaleType::E8m0 => out.push(power_of_two(&mut random, scale)),
                ScaleType::E4m3 => out.push(f32_to_e4m3(scale / deviation)),
            }
        }
        (Bytes::from(out), kind)
    });
    let mut matrix =
        Matrix::new(format, rows, cols, Bytes::from(codes), scales)?.with_global_scale(Global::Times(deviation));
    if let Some((rows, groups)) = format.scale_shape(rows, cols).filter(|_| format.takes_zero_points()) {
        matrix = matrix.with_zero_points((0..rows * groups).map(|i| zero_point(format, i)).collect())?;
    }
    if let Some(in_order) = matrix.column_groups() {
        let mut groups = in_order.to_vec();
        for i in (1..cols).rev() {
            groups.swap(i, random.next() as usize % (i + 1));
        }
        matrix = matrix.with_column_groups(groups)?;
    }
    Ok(matrix)
}

/// Zero point `i`: around the middle in turns, so that their mean is the middle. None far from it, as none is in a real model: such a
/// row has nearly equal weights, and a product with it is a small difference of large numbers.
fn zero_point(format: Format, i: usize) -> i16 {
    let (middle, step) = if format.block_cols() == 2 { (8, 1) } else { (128, 8) };
    match i % 8 {
        3 => middle + step,
        6 => middle - step,
        _ => middle,
    }
}

fn floats<const N: usize>(random: &mut Random, count: usize, code: impl Fn(f32) -> [u8; N]) -> Vec<u8> {
    let mut out = vec![[0; N]; count];
    random.fill(&TABLES.normal.map(code), &mut out);
    out.into_flattened()
}

fn bytes(random: &mut Random, count: usize, table: &Codes) -> Vec<u8> {
    let mut out = vec![0; count];
    random.fill(&table.codes, &mut out);
    out
}

/// One of the two powers of two around `scale`, so that their mean square is that of `scale`.
fn power_of_two(random: &mut Random, scale: f32) -> u8 {
    let low = ((scale.to_bits() >> 23) as u8).min(253);
    let above = ((scale / e8m0_to_f32(low)).powi(2) - 1.0) / 3.0;
    low + ((random.next() >> 40) as f32 / ((1u64 << 24) as f32) < above) as u8
}

fn f16(v: f32) -> [u8; 2] {
    half::f16::from_f32(v).to_le_bytes()
}

fn blocks<const BYTES: usize>(codes: &mut [u8], mut block: impl FnMut(&mut [u8; BYTES])) {
    codes.as_chunks_mut().0.iter_mut().for_each(&mut block);
}

/// A block of `d` and codes that stand for themselves.
fn simple<const BYTES: usize>(random: &mut Random, block: &mut [u8; BYTES], table: &Codes, deviation: f32) {
    block[..2].copy_from_slice(&f16(deviation / table.deviation * random.factor()));
    random.fill(&table.codes, &mut block[2..]);
}

/// Scale and minimum of a Q4_1 or Q5_1 block whose codes have their middle at `centre`; `unit` is the mean of the scale.
fn minimum(random: &mut Random, centre: f32, unit: f32) -> [u8; 4] {
    let d = unit * random.factor();
    // A little off the middle, to either side.
    let m = -d * (centre + 0.25 * (random.factor() - 1.0));
    let (d, m) = (f16(d), f16(m));
    [d[0], d[1], m[0], m[1]]
}

/// The codes of a Q5_0 or Q5_1 block.
fn five_bits(random: &mut Random, table: &Codes) -> [u8; 20] {
    let mut q = [0; ggml::COLS];
    random.fill(&table.codes, &mut q);
    ggml::pack_five_bit_codes(&q)
}

/// Exponent byte of a scale, one of the powers of two around `scale`, so often that their mean square is its square.
fn exponent(random: &mut Random, scale: f32) -> u8 {
    let below = (scale.to_bits() >> 23) as u8;
    let ratio = scale / f32::from_bits((below as u32) << 23);
    below + u8::from(random.uniform() * 3.0 < ratio * ratio - 1.0)
}

/// Root mean square of [`signed_scales`].
const SIGNED_SCALES: f32 = 25.93;

/// Scales of either sign, 20..=31 in size.
fn signed_scales<const N: usize>(random: &mut Random) -> [i8; N] {
    let mut scales = [0; N];
    for scales in scales.chunks_mut(8) {
        for (scale, b) in scales.iter_mut().zip(random.next().to_le_bytes()) {
            let size = 20 + (((b as u16 & 127) * 12) >> 7) as i8;
            *scale = if b & 128 == 0 { size } else { -size };
        }
    }
    scales
}

/// Blocks whose codes number points of a grid, all alike. Their scales are from the upper half of those there are.
fn on_grid(random: &mut Random, format: Format, codes: &mut [u8], deviation: f32) {
    // Where scales begin, their highest bits, over and over, and the mean square of columns with `d` and scales of 1.
    let (scales, highest, square): (usize, &[u8], f32) = match format {
        Format::Iq2Xxs => (2, &[0, 0, 0, 0, 0, 0, 0, 0x80], mean_square(&ggml::IQ2_XXS_GRID) / 64.0),
        Format::Iq2Xs => (66, &[0x88], mean_square(&ggml::IQ2_XS_GRID) / 64.0),
        Format::Iq2S => (74, &[0x88], mean_square(&ggml::IQ2_S_GRID) / 64.0),
        Format::Iq3Xxs => (66, &[0, 0, 0, 0x80], mean_square(&ggml::IQ3_XXS_GRID) / 16.0),
        Format::Iq3S => (106, &[0x88], mean_square(&ggml::IQ3_S_GRID)),
        Format::Iq1S => (34, &[0, 0x40], mean_square(&ggml::IQ1_GRID) + 1.0 / 64.0),
        _ => (48, &[0x24, 0x09], mean_square(&ggml::IQ1_GRID) + 1.0 / 64.0),
    };
    // Mean squares of the odd numbers in 9..=15 and in 17..=31.
    let square = square * if matches!(format, Format::Iq1S | Format::Iq1M) { 149.0 } else { 597.0 };
    let (_, bytes) = ggml::block(format).expect("a format with blocks");
    for block in codes.chunks_exact_mut(bytes) {
        for bytes in block.chunks_mut(8) {
            bytes.copy_from_slice(&random.next().to_le_bytes()[..bytes.len()]);
        }
        block[scales..].iter_mut().zip(highest.iter().cycle()).for_each(|(byte, bits)| *byte |= bits);
        let d = f16(deviation / square.sqrt() * random.factor());
        match block.first_chunk_mut() {
            Some(block) if format == Format::Iq1M => ggml::iq1_m_pack_scale(d, block),
            _ => block[..2].copy_from_slice(&d),
        }
    }
}

/// Mean square of the coordinates of points.
fn mean_square<const N: usize>(points: &[[i8; N]]) -> f32 {
    let sum: u32 = points.as_flattened().iter().map(|&v| (v as i32 * v as i32) as u32).sum();
    sum as f32 / (points.len() * N) as f32
}

fn q2k(random: &mut Random, block: &mut [u8; ggml::Q2K_BYTES], deviation: f32) {
    // Scales 9..=14, 11.63 in root mean square; minima as far from them as in Q4_K, one in 16 of the time.
    for bytes in block[..16].as_chunks_mut::<8>().0 {
        for (byte, b) in bytes.iter_mut().zip(random.next().to_le_bytes()) {
            let scale = 9 + (((b & 15) as u16 * 6) >> 4) as u8;
            let minimum = match b >> 4 {
                0 => scale - 1,
                1 => scale + 1,
                _ => scale,
            };
            *byte = scale | minimum << 4;
        }
    }
    let mut q = [0; ggml::K_COLS];
    random.fill(&TABLES.two_bits.codes, &mut q);
    block[16..80].copy_from_slice(&ggml::pack_bit_pairs(&q));
    let d = deviation / TABLES.two_bits.deviation / 11.63 * random.factor();
    block[80..82].copy_from_slice(&f16(d));
    block[82..].copy_from_slice(&f16(d * 1.5));
}

fn q3k(random: &mut Random, block: &mut [u8; ggml::Q3K_BYTES], deviation: f32) {
    let mut q = [0; ggml::K_COLS];
    random.fill(&TABLES.three_bits.codes, &mut q);
    ggml::q3k_pack_codes(&q, block);
    block[96..108].copy_from_slice(&ggml::q3k_pack_scales(&signed_scales(random)));
    let d = deviation / TABLES.three_bits.deviation / SIGNED_SCALES * random.factor();
    block[108..].copy_from_slice(&f16(d));
}

/// The scales of a Q4_K or Q5_K block whose codes have their middle at `centre`; `unit` is the mean of `d * scale`.
fn with_minima(random: &mut Random, centre: f32, unit: f32) -> [u8; 16] {
    // Root mean square of the scales 32..=62.
    let d = unit / 47.84 * random.factor();
    let scales = random.next().to_le_bytes().map(|b| 32 + ((b as u16 * 31) >> 8) as u8);
    // With minimum = scale and dmin = centre * d the mean is 0; minima one off move it by a twentieth of a deviation.
    let moves = random.next().to_le_bytes();
    let mins = std::array::from_fn(|g| scales[g] + moves[g] % 3 - 1);
    let mut header = [0; 16];
    header[..2].copy_from_slice(&f16(d));
    header[2..4].copy_from_slice(&f16(d * centre));
    header[4..].copy_from_slice(&ggml::q4k_pack_scales(&scales, &mins));
    header
}

fn q6k(random: &mut Random, block: &mut [u8; ggml::Q6K_BYTES], deviation: f32) {
    let mut q = [0; ggml::K_COLS];
    random.fill(&TABLES.six_bits.codes, &mut q);
    ggml::q6k_pack_codes(&q, block);
    // Scales of either sign, 96..=127 in size; 111.9 is their root mean square.
    for scales in block[192..208].as_chunks_mut::<8>().0 {
        for (scale, b) in scales.iter_mut().zip(random.next().to_le_bytes()) {
            let size = 96 + (b & 31) as i8;
            *scale = (if b & 32 == 0 { size } else { -size }) as u8;
        }
    }
    block[208..].copy_from_slice(&f16(deviation / TABLES.six_bits.deviation / 111.9 * random.factor()));
}

#[cfg(test)]
mod tests;
