//! Products of this crate's kernels on one thread, weights in the cache, on every tier that the CPU has.
//!
//! Names are `product/tier/format/outputs x inputs/rows`. Few rows are told in bytes of packed weights a second, many rows in elements: an
//! element is one operation, two a multiply-add. What comes from memory, and the machine's limits beside it, is measured by `kt bench`.

#[cfg(target_arch = "x86_64")]
mod x86 {
    use criterion::{BenchmarkId, Criterion, Throughput};
    use kt_avx512::Avx;
    use kt_core::Proj;
    use kt_core::cpu::kernel::{Kernel, Outputs, Scratch, Weights};
    use kt_core::cpu::memory::AlignedBytes;
    use kt_core::cpu::memory::zeroed_pages;
    use kt_core::cpu::tier::Tier;
    use kt_core::format::{ALL, Format};
    use kt_core::source::WeightSource;
    use kt_core::source::synthetic::SyntheticSource;
    use kt_core::testing::{Random, Rows};

    /// Outputs and inputs: gate or up of an expert of Qwen3-30B-A3B, 1.5 MiB in INT8.
    const SHAPE: (usize, usize) = (768, 2048);
    /// From here on rows are told in operations.
    const MANY: usize = 16;

    fn weights(kernel: impl Kernel, format: Format) -> Weights {
        let (outputs, cols) = SHAPE;
        let source = SyntheticSource::builder().hidden(cols).intermediate(outputs).format(format).build();
        let matrix = source.and_then(|s| s.matrix(0, 0, Proj::Gate)).expect("a shape that every format can have");
        let Some(bytes) = kernel.packed_bytes(format, outputs, cols) else { return Weights::in_place(matrix) };
        let mut pages = zeroed_pages(bytes, Default::default()).expect("a few MiB");
        kernel.pack(&matrix, 0..outputs, &mut pages[..bytes]);
        Weights::packed(format, outputs, cols, bytes::Bytes::from_owner(pages).slice(..bytes))
    }

    fn products(c: &mut Criterion, kernel: impl Kernel, format: Format) {
        let (outputs, cols) = SHAPE;
        // Not this crate's format, or not this tier's.
        let Ok((layout, _)) = kernel.accepts(format, outputs, cols) else { return };
        let layout = kernel.inputs_of_rows(layout);
        let weights = weights(kernel, format);
        let bytes = weights.matrix().map_or(weights.bytes().len() as u64, |m| m.byte_len());
        let mut group = c.benchmark_group(format!("product/{}/{format}/{outputs}x{cols}", kernel.tier()));
        for rows in [1, 4, 16, 64] {
            let mut random = Random(2);
            let values: Vec<f32> = (0..rows * cols).map(|_| random.normal()).collect();
            let inputs = Rows::new(kernel, layout, &values, cols);
            let x = inputs.view();
            let (mut out, mut scratch) = (AlignedBytes::default(), Scratch::default());
            let out = out.floats(rows * outputs);
            group.throughput(match rows {
                ..MANY => Throughput::Bytes(bytes),
                _ => Throughput::Elements(2 * (rows * outputs * cols) as u64),
            });
            group.bench_function(BenchmarkId::from_parameter(rows), |b| {
                b.iter(|| kernel.product(Outputs::new(&weights, 0..outputs), x, 0..rows, out, &mut scratch));
            });
            assert!(out.iter().all(|v| v.is_finite()), "{format}, {rows} rows: a product is not a number");
        }
    }

    pub fn benches(c: &mut Criterion) {
        for tier in Tier::all_available(Tier::Amx) {
            // A tier that the kernels do not tell apart from the one below was measured there.
            if let Some(kernel) = Avx::detect(tier).ok().filter(|k| k.tier() == tier) {
                ALL.into_iter().for_each(|format| products(c, kernel, format));
            }
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod x86 {
    pub fn benches(_: &mut criterion::Criterion) {}
}

criterion::criterion_group! {
    name = kernels;
    config = criterion::Criterion::default()
        .sample_size(10)
        .warm_up_time(std::time::Duration::from_millis(100))
        .measurement_time(std::time::Duration::from_millis(300));
    targets = x86::benches
}
criterion::criterion_main!(kernels);
