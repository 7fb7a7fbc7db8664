//! Prepared calls allocate nothing, on any thread: counted by the program's own allocator, so the file holds one test.

use std::sync::Arc;

use kt_core::cpu::CpuBackend;
use kt_core::cpu::portable::Portable;
use kt_core::cpu::team::Team;
use kt_core::cpu::topology::Topology;
use kt_core::source::synthetic::SyntheticSource;
use kt_core::testing::{Counting, prepared_calls_allocate_nothing};
use kt_core::{Candidate, Format, RuntimeBuilder, WeightSource};

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

#[test]
fn prepared_calls_of_the_portable_kernel() {
    for (format, hidden) in [(Format::Bf16, 160), (Format::Q4K, 256)] {
        let source = SyntheticSource::builder().hidden(hidden).intermediate(256).experts(12).top_k(4).layers(2);
        let source: Arc<dyn WeightSource> = Arc::new(source.format(format).seed(7).build().unwrap());
        let portable = |_| vec![Candidate::new("portable", Ok(CpuBackend::new("portable", Portable)))];
        let two_nodes = Team::builder().topology(Topology::fake(&[2, 1])).threads(3).oversubscribed().build();
        for (team, nodes) in [(Team::oversubscribed(3), "one node"), (two_nodes, "two nodes")] {
            let runtime = RuntimeBuilder::new(portable).team(team.unwrap()).build().unwrap();
            prepared_calls_allocate_nothing(&ALLOCATOR, &runtime, &source, &format!("{format}, {nodes}"));
        }
    }
}
