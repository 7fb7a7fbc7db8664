//! `kt bench --scheduling`: what a layer call takes beside its products.
//!
//! A layer of tiny experts, whose products are a few microseconds, is called with one token. The same products are then done
//! in one call each for gate and up together and for down, on one thread. What the layer call takes above its threads' share of that is
//! splitting the batch, handing out tasks, waiting for each other between the runs, and activation: it hardly depends on
//! the size of experts, so it is held against a one-token call of the shape that was asked for.

use std::time::{Duration, Instant};

use kt::source::WeightSource;
use kt::{Format, Linear, Proj, Runtime};
use serde_json::{Value, json};

use super::case::{Call, Caller, Quartiles};
use super::shape::Shape;

/// Hidden and intermediate size; the experts are all used.
const SIZE: usize = 64;
const EXPERTS: usize = 8;
/// Between two calls of a team that shall have gone to sleep: several times as long as its threads stay awake.
const PAUSE: Duration = Duration::from_micros(300);

/// What scheduling takes, in microseconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Scheduling {
    pub backend: String,
    pub tier: String,
    pub format: String,
    pub threads: usize,
    /// A call of the tiny layer right behind another.
    pub layer: f64,
    /// The same when the threads have gone to sleep.
    pub layer_asleep: f64,
    /// The same products on one thread.
    pub products: f64,
}

/// The layer of tiny experts.
pub fn tiny() -> Shape {
    Shape {
        name: "tiny".into(),
        hidden: SIZE,
        intermediate: SIZE,
        experts: EXPERTS,
        top_k: EXPERTS,
        activation: kt::activation::Activation::SiluMul,
        biases: false,
    }
}

fn microseconds(calls: Vec<Call>) -> f64 {
    Quartiles::of(calls.into_iter().map(|c| c.seconds * 1e6).collect()).median
}

/// Waits without sleeping: the system shall not move the caller elsewhere.
fn wait() {
    let start = Instant::now();
    while start.elapsed() < PAUSE {
        std::hint::spin_loop();
    }
}

/// The same products as the tiny layer's: gate and up of all experts as one matrix, down of all experts as another.
struct Products {
    gate_up: Linear,
    down: Linear,
}

impl Products {
    fn new(one_thread: &Runtime, format: Format) -> kt::Result<Self> {
        let source = Shape { intermediate: 2 * SIZE * EXPERTS, experts: 1, top_k: 1, ..tiny() }.source(format, 1)?;
        let gate_up = one_thread.linear(&source.matrix(0, 0, Proj::Gate)?)?;
        let source = Shape { intermediate: SIZE * EXPERTS, experts: 1, top_k: 1, ..tiny() }.source(format, 1)?;
        let down = one_thread.linear(&source.matrix(0, 0, Proj::Down)?)?;
        Ok(Products { gate_up, down })
    }

    fn calls(&self, length: Duration) -> kt::Result<Vec<Call>> {
        let x: Vec<f32> = (0..self.gate_up.cols()).map(|i| (i as f32 * 0.37).sin()).collect();
        let (mut h, mut y) = (vec![0.0; self.gate_up.rows()], vec![0.0; self.down.rows()]);
        let mut calls = Vec::new();
        let begin = Instant::now();
        while begin.elapsed() < length {
            let start = Instant::now();
            self.gate_up.forward(&x, &mut h)?;
            self.down.forward(&h[..self.down.cols()], &mut y)?;
            calls.push(Call { seconds: start.elapsed().as_secs_f64(), bytes: 0.0 });
        }
        Ok(calls)
    }
}

impl Scheduling {
    /// Measures for about `seconds`; `one_thread` is a runtime like `runtime`, with one thread.
    pub fn measure(runtime: &Runtime, one_thread: &Runtime, format: Format, seconds: f64) -> anyhow::Result<Self> {
        let shape = tiny();
        let experts = runtime.load(&shape.source(format, 1)?)?;
        let products = Products::new(one_thread, format)?;
        let third = Duration::from_secs_f64(seconds / 3.0);
        let mut caller = Caller::new(&experts, &shape, 1);
        caller.calls(third / 10, || ())?;
        let layer = microseconds(caller.calls(third, || ())?);
        let layer_asleep = microseconds(caller.calls(third, wait)?);
        let products = microseconds(products.calls(third)?);
        let first = &experts.layers()[0];
        let (backend, tier) = first.backends().next().unwrap_or_default();
        Ok(Scheduling {
            backend: backend.into(),
            tier: tier.into(),
            format: first.spec().format_label(),
            threads: runtime.threads(),
            layer,
            layer_asleep,
            products,
        })
    }

    /// Microseconds of a layer call that are no products, with the threads awake and asleep.
    pub fn beside_products(&self) -> [f64; 2] {
        // As if products were spread evenly: whatever is not is the scheduling's fault.
        [self.layer, self.layer_asleep].map(|t| (t - self.products / self.threads as f64).max(0.0))
    }

    /// `one_token_us`: of a one-token call of `shape`.
    pub fn to_json(&self, shape: &Shape, one_token_us: f64) -> Value {
        let [awake, asleep] = self.beside_products();
        json!({
            "scheduling": {
                "backend": self.backend,
                "tier": self.tier,
                "format": self.format,
                "threads": self.threads,
                "tiny_layer_us": self.layer,
                "tiny_layer_asleep_us": self.layer_asleep,
                "products_on_one_thread_us": self.products,
                "scheduling_us": awake,
                "scheduling_asleep_us": asleep,
                "shape": shape.name,
                "one_token_us": one_token_us,
                "share_of_one_token": awake / one_token_us,
                "share_of_one_token_asleep": asleep / one_token_us,
            }
        })
    }

    pub fn header() -> String {
        format!(
            "{:<14} {:<10} {:<11} {:>10} {:>9} {:>11} {:>7} {:>11} {:>7}",
            "format", "backend", "tier", "tiny layer", "products", "scheduling", "share", "asleep", "share"
        )
    }

    pub fn row(&self, one_token_us: f64) -> String {
        let [awake, asleep] = self.beside_products();
        format!(
            "{:<14} {:<10} {:<11} {:>7.2} us {:>6.2} us {:>8.2} us {:>5.2} % {:>8.2} us {:>5.2} %",
            self.format,
            self.backend,
            self.tier,
            self.layer,
            self.products,
            awake,
            awake / one_token_us * 100.0,
            asleep,
            asleep / one_token_us * 100.0
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scheduling_is_what_products_leave() {
        let s = Scheduling {
            backend: "b".into(),
            tier: "t".into(),
            format: "BF16".into(),
            threads: 2,
            layer: 5.0,
            layer_asleep: 9.0,
            products: 4.0,
        };
        assert_eq!(s.beside_products(), [3.0, 7.0]);
        assert_eq!(Scheduling { layer: 1.0, ..s.clone() }.beside_products(), [0.0, 7.0]);
        let json = s.to_json(&tiny(), 60.0);
        assert_eq!(json["scheduling"]["share_of_one_token"], 0.05);
        assert!(s.row(60.0).contains(" 5.00 %"), "{}", s.row(60.0));
    }

    #[test]
    fn a_tiny_layer_and_its_products_are_measured() {
        let build = |threads| kt::runtime().threads(threads).build().unwrap();
        let s = Scheduling::measure(&build(2), &build(1), Format::Bf16, 0.03).unwrap();
        // 8 experts x 3 products of 64 x 64: more than nothing, and far below a millisecond even when the machine is busy.
        assert!(s.layer > 0.0 && s.products > 0.0 && s.products < 1000.0, "{s:?}");
        assert!(s.layer_asleep > 0.0 && s.format == "BF16");
        // Blocks of 256 columns do not fit 64.
        assert!(Scheduling::measure(&build(1), &build(1), Format::Q4K, 0.03).is_err());
    }
}
