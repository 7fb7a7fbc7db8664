//! What the CPU flow does with rows beside products, on one thread and in the portable code: rounding and packing of inputs, and activation.
//!
//! Names are `pack/layout/columns` and `activate/rule/columns`; an element is a column. Kernels may bring faster ones of their own.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kt_core::activation::Activation;
use kt_core::cpu::input::{BLOCK, InputLayout, Sums};
use kt_core::cpu::kernel::Kernel;
use kt_core::cpu::portable::Portable;
use kt_core::testing::Random;

/// Columns of one input row of Qwen3-30B-A3B.
const HIDDEN: usize = 2048;
/// Columns that one task of the flow activates, times the rows of a larger batch.
const TILE: usize = 128 * 64;

fn normals(n: usize) -> Vec<f32> {
    let mut random = Random(1);
    (0..n).map(|_| random.normal()).collect()
}

fn pack(c: &mut Criterion) {
    let mut group = c.benchmark_group("pack");
    group.throughput(Throughput::Elements(HIDDEN as u64));
    let x = normals(HIDDEN);
    for (name, layout) in [
        ("f32", InputLayout::F32),
        ("bf16", InputLayout::Bf16),
        ("int8-g32", InputLayout::Int8 { group: 32, sums: Sums::Times(1) }),
        ("int8-g128", InputLayout::Int8 { group: 128, sums: Sums::Times(1) }),
    ] {
        let mut out = vec![0; layout.bytes(1, HIDDEN)];
        group.bench_function(BenchmarkId::new(name, HIDDEN), |b| {
            b.iter(|| {
                for (x, out) in black_box(&x).chunks(BLOCK).zip(out.chunks_exact_mut(layout.block_bytes())) {
                    Portable.pack_input(layout, x, out);
                }
                black_box(&mut out);
            });
        });
    }
}

fn activate(c: &mut Criterion) {
    let mut group = c.benchmark_group("activate");
    group.throughput(Throughput::Elements(TILE as u64));
    let (gate, up) = (normals(TILE), normals(TILE));
    for (name, rule) in [
        ("silu-mul", Activation::SiluMul),
        ("clamped-silu-mul", Activation::ClampedSiluMul { limit: 10.0 }),
        ("gpt-oss", Activation::GptOss { alpha: 1.702, limit: 7.0 }),
    ] {
        let mut tile = gate.clone();
        group.bench_function(BenchmarkId::new(name, TILE), |b| {
            b.iter(|| {
                // The result replaces its input, which would otherwise drift to zero.
                tile.copy_from_slice(&gate);
                Portable.activate(rule, black_box(&mut tile), black_box(&up));
            });
        });
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(300));
    targets = pack, activate
}
criterion_main!(benches);
