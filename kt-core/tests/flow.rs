//! The CPU flow with a kernel that breaks, so that tasks which wait for others are not left waiting; and with one that has another for many rows.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kt_core::cpu::CpuBackend;
use kt_core::cpu::input::Inputs;
use kt_core::cpu::kernel::{Kernel, Outputs, Scratch};
use kt_core::cpu::portable::Portable;
use kt_core::cpu::team::Team;
use kt_core::cpu::topology::Topology;
use kt_core::source::synthetic::SyntheticSource;
use kt_core::testing::{Products, Random};
use kt_core::{Batch, Candidate, Error, Experts, Format, RuntimeBuilder};

/// Unlike all others, so that products of gate and up are told from those of down.
const INTERMEDIATE: usize = 640;
const HIDDEN: usize = 96;

/// How many products of gate and up there are until one panics.
static LEFT: AtomicUsize = AtomicUsize::new(usize::MAX);

/// A product of [`Portable`], until it breaks.
fn breaks(outputs: Outputs<'_>, x: Inputs<'_>, rows: Range<usize>, out: &mut [f32], scratch: &mut Scratch) {
    if outputs.of.rows() == INTERMEDIATE && LEFT.fetch_sub(1, Ordering::Relaxed) == 0 {
        panic!("broken on purpose");
    }
    Portable.product(outputs, x, rows, out, scratch);
}

#[test]
fn a_task_that_panics_ends_the_call_wherever_it_is() {
    let source = SyntheticSource::builder().hidden(HIDDEN).intermediate(INTERMEDIATE).experts(6).top_k(6).layers(1);
    let source = source.format(Format::Bf16).seed(3).build().unwrap();
    let mut random = Random(4);
    let input: Vec<f32> = (0..2 * HIDDEN).map(|_| random.normal()).collect();
    let batch = || Batch::new(2, input.clone(), vec![0, 1, 2, 3, 4, 5, 2, 0, 1, 5, 3, 4], vec![0.5; 12]).unwrap();
    let forward = |experts: &Experts| {
        let mut batch = batch();
        experts.layer(0).unwrap().forward(&mut batch).map(|()| batch.into_output())
    };
    let two_nodes = Team::builder().topology(Topology::fake(&[3, 2])).threads(5).oversubscribed().build().unwrap();
    for team in [1, 2, 3, 16].map(|threads| Team::oversubscribed(threads).unwrap()).into_iter().chain([two_nodes]) {
        let candidates =
            |_| vec![Candidate::new("breaks", Ok(CpuBackend::new("breaks", Products::<16, _>::new(breaks))))];
        let runtime = RuntimeBuilder::new(candidates).team(Arc::clone(&team)).build().unwrap();
        let experts = runtime.load(&source).unwrap();
        LEFT.store(usize::MAX, Ordering::Relaxed);
        let whole = forward(&experts).unwrap();
        let products = usize::MAX - LEFT.load(Ordering::Relaxed);
        for left in 0..products {
            LEFT.store(left, Ordering::Relaxed);
            let error = forward(&experts).unwrap_err();
            let Error::Backend { what, .. } = &error else { panic!("{error}") };
            assert!(what.contains("broken on purpose"), "{what}");
        }
        LEFT.store(usize::MAX, Ordering::Relaxed);
        assert_eq!(forward(&experts).unwrap(), whole, "after calls that broke");

        // A thread that ends for another reason calls a layer once more: nothing is wrong with that call.
        let mut last = None;
        let ends = catch_unwind(AssertUnwindSafe(|| {
            let _last = Finally(|| last = Some(forward(&experts)));
            panic!("another reason");
        }));
        assert!(ends.is_err());
        assert_eq!(last.unwrap().unwrap(), whole, "a call while unwinding");
    }
}

/// Called when it is dropped.
struct Finally<F: FnMut()>(F);

impl<F: FnMut()> Drop for Finally<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// A product of [`Portable`]; `TWICE`: those of down are twice as large.
fn product<const TWICE: bool>(
    outputs: Outputs<'_>,
    x: Inputs<'_>,
    rows: Range<usize>,
    out: &mut [f32],
    scratch: &mut Scratch,
) {
    let twice = TWICE && outputs.of.rows() == HIDDEN;
    Portable.product(outputs, x, rows, out, scratch);
    if twice {
        out.iter_mut().for_each(|v| *v *= 2.0);
    }
}

type Function = fn(Outputs<'_>, Inputs<'_>, Range<usize>, &mut [f32], &mut Scratch);

#[test]
fn calls_of_many_rows_have_their_own_kernel_unless_numbers_are_not_to_depend_on_it() {
    let source = SyntheticSource::builder().hidden(HIDDEN).intermediate(INTERMEDIATE).experts(4).top_k(2).layers(1);
    let source = source.format(Format::Bf16).seed(3).build().unwrap();
    let mut random = Random(4);
    let input: Vec<f32> = (0..7 * HIDDEN).map(|_| random.normal()).collect();
    let candidates = |_| {
        let kernel = Products::<16, Function>::new(product::<false>).with_many(3, product::<true>);
        vec![Candidate::new("twofold", Ok(CpuBackend::new("twofold", kernel)))]
    };
    for batch_invariant in [false, true] {
        let runtime = RuntimeBuilder::new(candidates).threads(1).batch_invariant(batch_invariant).build().unwrap();
        let experts = runtime.load(&source).unwrap();
        let forward = |tokens: usize| {
            let ids = [0, 1].repeat(tokens);
            let weights = vec![0.5; 2 * tokens];
            let mut batch = Batch::new(tokens, input[..tokens * HIDDEN].to_vec(), ids, weights).unwrap();
            experts.layer(0).unwrap().forward(&mut batch).unwrap();
            batch.into_output()
        };
        let (few, many) = (forward(5), forward(6));
        // Two experts of a token over four experts: five tokens are two rows for each, six are three.
        let times = if batch_invariant { 1.0 } else { 2.0 };
        for (few, many) in few.iter().zip(&many) {
            assert_eq!(few * times, *many, "batch_invariant: {batch_invariant}");
        }
        assert_eq!(forward(1)[..], few[..HIDDEN]);
        assert_eq!(forward(7)[..6 * HIDDEN], many[..]);
    }
}
