//! Counting what a test program allocates, and prepared calls that must not.

#![allow(unsafe_code)] // an allocator

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Random;
use crate::cpu::FEW_TOKENS;
use crate::runtime::{LoadOptions, Runtime};
use crate::source::WeightSource;

/// The system's allocator, counted. A test program with `#[global_allocator] static ALLOCATOR: Counting = Counting::new();` holds one test: those
/// beside it would be counted, too.
#[derive(Debug, Default)]
pub struct Counting {
    allocations: AtomicUsize,
}

impl Counting {
    /// None so far.
    pub const fn new() -> Self {
        Counting { allocations: AtomicUsize::new(0) }
    }

    /// Allocations of the program so far, on all threads.
    pub fn allocations(&self) -> usize {
        self.allocations.load(Ordering::SeqCst)
    }
}

// SAFETY: the system's allocator, to which all calls go as they are.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.allocations.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Holds prepared calls of two layers to allocating nothing, on any thread, whatever the router chooses.
///
/// # Panics
/// They did allocate, the layers give nothing, or `counter` is not the program's allocator.
pub fn prepared_calls_allocate_nothing(
    counter: &Counting,
    runtime: &Runtime,
    source: &Arc<dyn WeightSource>,
    label: &str,
) {
    const MOST: usize = FEW_TOKENS + 8;
    let fail = |e| panic!("{label}: {e}");
    let loaded = runtime.load_shared(source, LoadOptions::default()).unwrap_or_else(fail);
    let (experts, top_k) = (source.layers()[0].experts, source.layers()[0].top_k);
    let calls =
        [0, 1].map(|i| loaded.layers()[i].prepare(MOST, top_k, None).unwrap_or_else(|e| panic!("{label}: {e}")));
    let mut random = Random(5);
    let mut read = 0;
    let mut before = 0;
    for round in 0..60 {
        let tokens = [1, MOST, 2, 7, FEW_TOKENS + 1][round % 5];
        for call in &calls {
            call.start(tokens, |input, ids, weights| {
                input.iter_mut().for_each(|v| *v = random.normal());
                weights.iter_mut().for_each(|v| *v = random.uniform());
                // All tokens on the same experts, each on others, and with holes.
                for (i, id) in ids.iter_mut().enumerate() {
                    *id = match round % 4 {
                        0 => i % top_k,
                        1 => i % experts,
                        2 => (i % top_k + i / top_k * 5) % experts,
                        _ => (i % top_k * 3 + random.below(3)) % experts,
                    } as i32;
                    if round % 7 == 3 && random.below(3) == 0 {
                        *id = -1;
                    }
                }
            })
            .unwrap_or_else(|e| panic!("{label}: {e}"));
            let waited = call.wait(|sums| sums.before.iter().filter(|v| **v != 0.0).count());
            read += waited.unwrap_or_else(|e| panic!("{label}: {e}"));
        }
        // The first two calls may meet threads that have just begun.
        if round == 0 {
            before = counter.allocations();
        }
    }
    assert_eq!(counter.allocations() - before, 0, "allocations in 59 rounds, {label}");
    assert!(read > 0, "{label}: no output");
    let one = std::hint::black_box(Box::new(read));
    assert_eq!(counter.allocations() - before, 1, "the counter counts, {one}");
}
