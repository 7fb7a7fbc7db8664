//! Encoders, from a BF16 matrix on one thread: names are `encode/format/columns`, bytes are those of the BF16 input.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kt_core::quantize::{encode, recode};
use kt_core::testing::Random;
use kt_core::{Format, Group};

/// A piece of an expert of Qwen3-30B-A3B.
const ROWS: usize = 256;
const COLS: usize = 2048;

fn formats(c: &mut Criterion) {
    let mut random = Random(1);
    let values: Vec<f32> = (0..ROWS * COLS).map(|_| random.normal()).collect();
    let Ok(matrix) = encode(Format::Bf16, ROWS, COLS, &values) else { return };
    let Ok(pool) = rayon::ThreadPoolBuilder::new().num_threads(1).build() else { return };
    let mut group = c.benchmark_group("encode");
    group.throughput(Throughput::Bytes(matrix.byte_len()));
    for format in [
        Format::Int4(Group::Of(32)),
        Format::Int4(Group::Of(128)),
        Format::Int4(Group::Row),
        Format::Int4Asym(Group::Of(32)),
        Format::Int8(Group::Row),
        Format::Int8(Group::Of(32)),
        Format::Fp8Block,
        Format::Mxfp4,
        Format::Q4_0,
        Format::Q8_0,
        Format::Q4K,
        Format::Q5K,
        Format::Q6K,
    ] {
        group.bench_function(BenchmarkId::new(format.to_string(), COLS), |b| {
            b.iter(|| pool.install(|| black_box(recode(black_box(&matrix), format))));
        });
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(400));
    targets = formats
}
criterion_main!(benches);
