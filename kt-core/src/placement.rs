//! Which backend each expert lives in.
//!
//! Every layer has one backend in host memory; devices take experts from it, as many as their [`Capacity`] allows. A [`Policy`] is nothing but
//! an order of all experts of the model: [`place`] goes along it and gives each expert to a device that has room.
//!
//! ```
//! use kt_core::placement::{Capacity, Need, Policy, place};
//!
//! let layers = [Need { layer: 3, experts: 8, expert_bytes: vec![Some(100)] }];
//! let placement = place(&Policy::FrontLoading, &layers, &[Capacity::bytes(250)]);
//! assert_eq!(placement.layers()[0].on, [1, 1, 0, 0, 0, 0, 0, 0]); // 0 is the host, 1 the first device
//! ```

mod live;
mod trace;

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::heat::HeatMap;

pub use live::{Live, LiveOptions, LiveReport, Swap};
pub use trace::{LayerTrace, Trace};

/// Which devices take experts of a model, and how.
#[derive(Debug, Clone, Default)]
pub struct PlacementOptions {
    /// Names of backends of devices, each with what it takes. None: all experts are in host memory.
    pub devices: Vec<(String, Capacity)>,
    /// Which experts go there.
    pub policy: Policy,
    /// Experts will be moved while the model runs ([`Experts::rebalance`](crate::Experts::rebalance)): each gets memory of its own.
    pub live: bool,
    /// When whole layers are streamed to the first of the devices.
    pub stream: Stream,
}

/// When the experts of a layer are streamed to a device for a batch, in place of being computed where they live.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Stream {
    /// Never.
    #[default]
    Never,
    /// For batches of so many tokens and more.
    From(usize),
    /// For batches of so many tokens that it was faster, as measured at load with batches of up to the tokens of a pass.
    Measured,
}

/// In which order experts go to devices.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Policy {
    /// Every layer gives the same number of experts (to within one), evenly spaced.
    #[default]
    Uniform,
    /// The first layers give all of theirs.
    FrontLoading,
    /// The experts chosen most often, by the bytes that each takes.
    Frequency(HeatMap),
    /// Any, the same for the same seed: what the others are compared with.
    Random(u64),
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Policy::Uniform => f.write_str("uniform"),
            Policy::FrontLoading => f.write_str("front-loading"),
            Policy::Frequency(heat) => write!(f, "frequency, by {} tokens", heat.tokens()),
            Policy::Random(seed) => write!(f, "random:{seed}"),
        }
    }
}

/// Reads those that need no heat map.
impl FromStr for Policy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "uniform" => Ok(Policy::Uniform),
            "front-loading" => Ok(Policy::FrontLoading),
            _ => match text.strip_prefix("random:").map(str::parse) {
                Some(Ok(seed)) => Ok(Policy::Random(seed)),
                _ => Err(Error::Invalid(format!(
                    "`{text}` is no placement; there are: uniform, front-loading, random:SEED, and by a heat map"
                ))),
            },
        }
    }
}

/// What a device takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Bytes of experts.
    pub bytes: u64,
    /// Experts of one layer.
    pub experts_per_layer: usize,
}

impl Capacity {
    /// So many bytes, however many experts that is.
    pub fn bytes(bytes: u64) -> Self {
        Capacity { bytes, experts_per_layer: usize::MAX }
    }
}

/// A layer that experts are taken from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Need {
    /// Its index in the model.
    pub layer: usize,
    /// Its experts.
    pub experts: usize,
    /// Bytes that one of them takes on each device; `None` on one that cannot run this layer.
    pub expert_bytes: Vec<Option<u64>>,
}

/// Where the experts of one layer live.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerPlacement {
    /// The layer's index in the model.
    pub layer: usize,
    /// For each expert: 0 in host memory, `n` on device `n - 1`.
    pub on: Vec<u32>,
}

impl LayerPlacement {
    /// The experts at one place, rising.
    pub fn experts(&self, place: u32) -> Vec<u32> {
        (0..self.on.len() as u32).filter(|&e| self.on[e as usize] == place).collect()
    }
}

/// Where the experts of a model live.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Placement {
    layers: Vec<LayerPlacement>,
}

impl Placement {
    pub(crate) fn of(layers: Vec<LayerPlacement>) -> Placement {
        Placement { layers }
    }

    /// The layers, by rising index.
    pub fn layers(&self) -> &[LayerPlacement] {
        &self.layers
    }

    /// The layer of this index.
    pub fn layer(&self, index: usize) -> Option<&LayerPlacement> {
        self.layers.iter().find(|l| l.layer == index)
    }

    /// Experts on devices, all layers together.
    pub fn on_devices(&self) -> usize {
        self.layers.iter().flat_map(|l| &l.on).filter(|&&place| place > 0).count()
    }

    /// The share of all choices of a heat map that are of experts on devices; 0 for an empty one.
    pub fn hit_rate(&self, heat: &HeatMap) -> f64 {
        let hits = self.layers.iter().flat_map(|l| {
            let on = l.on.iter().enumerate().filter(|(_, place)| **place > 0);
            on.map(|(expert, _)| heat.count(l.layer, expert) as f64)
        });
        hits.sum::<f64>() / (heat.total() as f64).max(1.0)
    }
}

/// Steps that visit every number below `n` once, evenly spaced however few are taken.
fn spread(n: usize) -> impl Iterator<Item = usize> {
    fn divisor(a: usize, b: usize) -> usize {
        if b == 0 { a } else { divisor(b, a % b) }
    }
    // The golden section is as far from fractions of small numbers as can be.
    let near = ((n as f64 * 0.618_034) as usize).max(1);
    let step = (near..near + n.max(1)).find(|&s| divisor(s, n) == 1).unwrap_or(1);
    (0..n).map(move |i| i * step % n)
}

impl Policy {
    /// All experts as (place of their layer among `layers`, expert), the first to go to a device first.
    fn order(&self, layers: &[Need]) -> Vec<(usize, usize)> {
        let all = |l: usize| (0..layers[l].experts).map(move |e| (l, e));
        let mut order: Vec<(usize, usize)> = (0..layers.len()).flat_map(all).collect();
        match self {
            Policy::FrontLoading => {}
            Policy::Uniform => {
                let mut ranks: Vec<Vec<usize>> = layers.iter().map(|l| vec![0; l.experts]).collect();
                for (ranks, layer) in ranks.iter_mut().zip(layers) {
                    spread(layer.experts).enumerate().for_each(|(rank, e)| ranks[e] = rank);
                }
                order.sort_by_key(|&(l, e)| (ranks[l][e], l));
            }
            Policy::Frequency(heat) => {
                let worth = |(l, e): (usize, usize)| {
                    let bytes = layers[l].expert_bytes.iter().flatten().next().copied().unwrap_or(u64::MAX);
                    heat.count(layers[l].layer, e) as f64 / bytes.max(1) as f64
                };
                order.sort_by(|&a, &b| worth(b).total_cmp(&worth(a))); // stable: equals stay in their order
            }
            Policy::Random(seed) => {
                let mut state = *seed;
                for i in (1..order.len()).rev() {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    order.swap(i, ((state >> 33) % (i as u64 + 1)) as usize);
                }
            }
        }
        order
    }
}

/// Gives experts to devices along the order of a policy: each to the device that has the most room left, by its capacity's share. What no
/// device takes stays in host memory.
pub fn place(policy: &Policy, layers: &[Need], devices: &[Capacity]) -> Placement {
    let mut placement = Placement {
        layers: layers.iter().map(|l| LayerPlacement { layer: l.layer, on: vec![0; l.experts] }).collect(),
    };
    let mut used = vec![0u64; devices.len()];
    let mut taken = vec![vec![0usize; layers.len()]; devices.len()];
    for (l, expert) in policy.order(layers) {
        let room = |d: &usize| {
            let bytes = layers[l].expert_bytes.get(*d).copied().flatten()?;
            let fits = taken[*d][l] < devices[*d].experts_per_layer
                && used[*d].checked_add(bytes).is_some_and(|sum| sum <= devices[*d].bytes);
            fits.then(|| 1.0 - used[*d] as f64 / devices[*d].bytes.max(1) as f64)
        };
        let best = (0..devices.len()).filter_map(|d| Some((room(&d)?, d))).reduce(|a, b| if b.0 > a.0 { b } else { a });
        if let Some((_, d)) = best {
            placement.layers[l].on[expert] = d as u32 + 1;
            used[d] += layers[l].expert_bytes[d].unwrap_or(0);
            taken[d][l] += 1;
        }
    }
    placement
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heat::LayerHeat;

    fn layers(experts: &[usize]) -> Vec<Need> {
        let need = |(i, &experts)| Need { layer: i + 1, experts, expert_bytes: vec![Some(10), Some(20)] };
        experts.iter().enumerate().map(need).collect()
    }

    fn counts(placement: &Placement, place: u32) -> Vec<usize> {
        placement.layers().iter().map(|l| l.experts(place).len()).collect()
    }

    #[test]
    fn uniform_takes_as_many_of_every_layer() {
        let layers = layers(&[8, 8, 8]);
        let one = |bytes| place(&Policy::Uniform, &layers, &[Capacity::bytes(bytes)]);
        assert_eq!(counts(&one(60), 1), [2, 2, 2]);
        assert_eq!(counts(&one(79), 1), [3, 2, 2]);
        assert_eq!(counts(&one(1000), 1), [8, 8, 8]);
        assert_eq!(counts(&one(9), 1), [0, 0, 0]);
        // Evenly spaced: no two neighbours among two of eight.
        let experts = one(60).layers()[0].experts(1);
        assert!(experts[1] - experts[0] >= 3, "{experts:?}");
        for n in 1..70 {
            let mut all: Vec<usize> = spread(n).collect();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..n), "{n}");
        }
    }

    #[test]
    fn front_loading_and_counts_per_layer() {
        let layers = layers(&[4, 4, 4]);
        let placement = place(&Policy::FrontLoading, &layers, &[Capacity::bytes(60)]);
        assert_eq!(counts(&placement, 1), [4, 2, 0]);
        let capacity = Capacity { bytes: u64::MAX, experts_per_layer: 3 };
        assert_eq!(counts(&place(&Policy::FrontLoading, &layers, &[capacity]), 1), [3, 3, 3]);
    }

    #[test]
    fn frequency_takes_the_hottest() {
        let layer = |layer, counts: &[u64]| LayerHeat { layer, tokens: 9, counts: counts.to_vec() };
        let heat = HeatMap::new(vec![layer(1, &[1, 9, 2, 0]), layer(2, &[8, 0, 0, 7])]).unwrap();
        let policy = Policy::Frequency(heat.clone());
        let placement = place(&policy, &layers(&[4, 4]), &[Capacity::bytes(30)]);
        assert_eq!(placement.layers()[0].on, [0, 1, 0, 0]);
        assert_eq!(placement.layers()[1].on, [1, 0, 0, 1]);
        assert!((placement.hit_rate(&heat) - 24.0 / 27.0).abs() < 1e-12);
        assert!(
            placement.hit_rate(&heat)
                > place(&Policy::Random(1), &layers(&[4, 4]), &[Capacity::bytes(30)]).hit_rate(&heat)
        );
        assert_eq!(Placement::default().hit_rate(&HeatMap::default()), 0.0);
    }

    #[test]
    fn random_is_reproducible_and_depends_on_the_seed() {
        let layers = layers(&[64]);
        let at = |seed| place(&Policy::Random(seed), &layers, &[Capacity::bytes(320)]);
        assert_eq!(at(5), at(5));
        assert_ne!(at(5), at(6));
        assert_eq!(counts(&at(5), 1), [32]);
    }

    #[test]
    fn several_devices_share_by_their_room_and_never_overflow() {
        let mut layers = layers(&[16, 16]);
        layers[1].expert_bytes[0] = None; // the first device cannot run the second layer
        let capacities = [Capacity::bytes(100), Capacity { bytes: 200, experts_per_layer: 6 }];
        for policy in [Policy::Uniform, Policy::FrontLoading, Policy::Random(3)] {
            let placement = place(&policy, &layers, &capacities);
            for (d, capacity) in capacities.iter().enumerate() {
                let n = counts(&placement, d as u32 + 1);
                let bytes: u64 = n.iter().zip(&layers).map(|(&n, l)| n as u64 * l.expert_bytes[d].unwrap_or(0)).sum();
                assert!(
                    bytes <= capacity.bytes && n.iter().all(|&n| n <= capacity.experts_per_layer),
                    "{policy} {n:?}"
                );
            }
            assert_eq!(counts(&placement, 1)[1], 0);
            assert!(placement.on_devices() >= 16, "{policy}");
        }
    }

    #[test]
    fn policies_are_read() {
        assert_eq!("random:7".parse::<Policy>().unwrap(), Policy::Random(7));
        for text in ["uniform", "front-loading"] {
            assert_eq!(text.parse::<Policy>().unwrap().to_string(), text);
        }
        for text in ["", "random:", "random:x", "hot"] {
            assert!(text.parse::<Policy>().unwrap_err().to_string().contains("no placement"), "{text}");
        }
    }
}
