//! Prepared calls allocate nothing, on any thread, whichever kernels run: counted by the program's own allocator, so the file holds one test.

#![cfg(target_arch = "x86_64")]

use std::sync::Arc;

use kt_core::cpu::team::Team;
use kt_core::cpu::tier::Tier;
use kt_core::source::synthetic::SyntheticSource;
use kt_core::testing::{Counting, prepared_calls_allocate_nothing};
use kt_core::{Backend, Format, Group, RuntimeBuilder, WeightSource};

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

#[test]
fn prepared_calls_of_all_tiers() {
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
        let source = SyntheticSource::builder().hidden(256).intermediate(384).experts(12).top_k(4).layers(2);
        let source: Arc<dyn WeightSource> = Arc::new(source.format(format).seed(7).build().unwrap());
        let backend = kt_avx512::backend(cap).ok().filter(|backend| backend.probe(&source.layers()[0]).is_ok());
        let Some(backend) = backend else { continue };
        let runtime = RuntimeBuilder::new(|_| Vec::new()).with_backend(backend);
        let runtime = runtime.team(Team::oversubscribed(2).unwrap()).build().unwrap();
        prepared_calls_allocate_nothing(&ALLOCATOR, &runtime, &source, &format!("{format}, at most {cap}"));
    }
}
