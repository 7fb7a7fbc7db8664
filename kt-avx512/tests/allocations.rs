//! Prepared calls allocate nothing, on any thread, whichever kernels run: counted by the program's own allocator, so the file holds one test.

#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code)] // an allocator that counts

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kt_core::cpu::team::Team;
use kt_core::cpu::tier::Tier;
use kt_core::source::synthetic::SyntheticSource;
use kt_core::testing::Random;
use kt_core::{Backend, Format, Group, LoadOptions, RuntimeBuilder, WeightSource};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator, counted.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn prepared_calls_allocate_nothing() {
    const MOST: usize = 40;
    const TOP_K: usize = 4;
    let experts = 12;
    let formats = [
        Format::Bf16,
        Format::Fp8Block,
        Format::Int8(Group::Row),
        Format::Int4(Group::Of(32)),
        Format::Mxfp4,
        Format::F32,
    ];
    let cases = Tier::ALL.into_iter().flat_map(|cap| formats.map(|format| (cap, format)));
    for (cap, format) in cases {
        let source = SyntheticSource::builder().hidden(256).intermediate(384).experts(experts).top_k(TOP_K).layers(2);
        let source: Arc<dyn WeightSource> = Arc::new(source.format(format).seed(7).build().unwrap());
        let backend = kt_avx512::backend(cap).ok().filter(|backend| backend.probe(&source.layers()[0]).is_ok());
        let Some(backend) = backend else { continue };
        let runtime = RuntimeBuilder::new(|_| Vec::new()).with_backend(backend);
        let runtime = runtime.team(Team::oversubscribed(2).unwrap()).build().unwrap();
        let loaded = runtime.load_shared(&source, LoadOptions::default()).unwrap();
        let calls = [0, 1].map(|i| loaded.layers()[i].prepare(MOST, TOP_K, None).unwrap());
        let mut random = Random(5);
        let mut read = 0;
        // The first two calls may meet threads that have just begun.
        let mut before = ALLOCATIONS.load(Ordering::SeqCst);
        for round in 0..60 {
            let tokens = [1, MOST, 2, 7, 33][round % 5];
            for call in &calls {
                call.start(tokens, |input, ids, weights| {
                    input.iter_mut().for_each(|v| *v = random.normal());
                    weights.iter_mut().for_each(|v| *v = random.uniform());
                    // All tokens on the same experts, each on others, and with holes.
                    for (i, id) in ids.iter_mut().enumerate() {
                        *id = match round % 4 {
                            0 => i % TOP_K,
                            1 => i % experts,
                            2 => (i % TOP_K + i / TOP_K * 5) % experts,
                            _ => (i % TOP_K * 3 + random.below(3)) % experts,
                        } as i32;
                        if round % 7 == 3 && random.below(3) == 0 {
                            *id = -1;
                        }
                    }
                })
                .unwrap();
                read += call.wait(|sums| sums.before.iter().filter(|v| **v != 0.0).count()).unwrap();
            }
            if round == 0 {
                before = ALLOCATIONS.load(Ordering::SeqCst);
            }
        }
        assert_eq!(ALLOCATIONS.load(Ordering::SeqCst) - before, 0, "allocations in 59 rounds, {format}, at most {cap}");
        assert!(read > 0);
        // The counter counts.
        let one = std::hint::black_box(Box::new(read));
        assert_eq!(ALLOCATIONS.load(Ordering::SeqCst) - before, 1, "{one}");
    }
}
