//! One thread on one kernel: decode in bytes of weights per second, prefill in multiply-adds (two operations each) per second.
//!
//! Names are `kernel/format/shape/rows`. The limits of the machine are measured in the same run: `limit/read` is one thread
//! summing memory, `limit/int8` the multiply units without memory. Weights rotate through 256 MiB, so that none is cached.

#![allow(unsafe_code)] // kernels

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kt_core::cpu::kernel::{Kernel, Outputs, Scratch, Weights};
use kt_core::cpu::memory::AlignedBytes;
use kt_core::cpu::tier::Tier;
use kt_core::testing::{Random, Rows, weights};
use kt_core::{Format, Matrix};
use kt_llamafile::Llamafile;

const WEIGHT_BYTES: usize = 256 << 20;
/// (outputs, inputs): gate or up, and down, of Qwen3-30B-A3B.
const SHAPES: [(usize, usize); 2] = [(768, 2048), (2048, 768)];
/// Outputs that one task of the CPU flow asks for.
const TASK: usize = 128;

fn kernels() -> Vec<Llamafile> {
    let tiers = [Tier::Avx512Vnni, Tier::Avx512, Tier::Avx2];
    tiers.into_iter().filter_map(|t| Llamafile::detect(t).ok().filter(|k| k.tier() == t)).collect()
}

/// Matrices of random bytes with ordinary scales.
fn matrices(format: Format, (rows, cols): (usize, usize)) -> Vec<Weights> {
    let bytes = rows * format.row_bytes(cols).expect("a multiple of the block");
    let (block, scales): (usize, &[usize]) = match format {
        Format::Q8_0 => (34, &[0]),
        Format::Q4_0 => (18, &[0]),
        Format::Q5_0 => (22, &[0]),
        Format::Q4K => (144, &[0, 2]),
        _ => (210, &[208]),
    };
    let mut random = Random(1);
    let mut codes: Vec<u8> = (0..bytes / 2).flat_map(|_| (random.bits() as u16).to_le_bytes()).collect();
    for block in codes.chunks_exact_mut(block) {
        for &at in scales {
            block[at..at + 2].copy_from_slice(&0x2000u16.to_le_bytes());
        }
    }
    let kernel = Llamafile::detect(Tier::Amx).expect("a kernel to bench");
    let matrix = Matrix::new(format, rows, cols, codes.into(), None).expect("a valid matrix");
    let packed = weights(kernel, &matrix).bytes().to_vec();
    let copies = WEIGHT_BYTES.div_ceil(packed.len());
    (0..copies).map(|_| Weights::packed(format, rows, cols, packed.clone().into())).collect()
}

fn products(c: &mut Criterion) {
    for format in [Format::Q8_0, Format::Q4_0, Format::Q5_0, Format::Q4K, Format::Q6K] {
        for shape in SHAPES {
            let (outputs, cols) = shape;
            let weights = matrices(format, shape);
            for kernel in kernels() {
                let mut group = c.benchmark_group(format!("{}/{format}/{outputs}x{cols}", kernel.tier()));
                for rows in [1, 4, 16, 64, 300] {
                    group.throughput(if rows <= 16 {
                        Throughput::Bytes(format.stored_bytes(outputs, cols))
                    } else {
                        Throughput::Elements(2 * (rows * outputs * cols) as u64)
                    });
                    let (layout, _) = kernel.accepts(format, outputs, cols).expect("a format of this backend");
                    let mut random = Random(2);
                    let values: Vec<f32> = (0..rows * cols).map(|_| random.normal()).collect();
                    let inputs = Rows::new(kernel, layout, &values, cols);
                    let x = inputs.view();
                    let (mut out, mut scratch, mut next) = (AlignedBytes::default(), Scratch::default(), 0);
                    let out = out.floats(rows * TASK);
                    group.bench_function(BenchmarkId::from_parameter(rows), |b| {
                        b.iter(|| {
                            let w = &weights[next % weights.len()];
                            next += 1;
                            for start in (0..outputs).step_by(TASK) {
                                kernel.product(Outputs::new(w, start..start + TASK), x, 0..rows, out, &mut scratch);
                            }
                            black_box(&mut *out);
                        });
                    });
                }
            }
        }
    }
}

fn limits(c: &mut Criterion) {
    let mut group = c.benchmark_group("limit");
    let memory = vec![1u64; WEIGHT_BYTES / 8];
    group.throughput(Throughput::Bytes(WEIGHT_BYTES as u64));
    group.bench_function("read", |b| b.iter(|| limit::sum(black_box(&memory))));
    #[cfg(target_arch = "x86_64")]
    if Tier::Avx512Vnni.available() {
        group.throughput(Throughput::Elements(2 * 64 * 16 * 1000));
        // SAFETY: the tier is available.
        group.bench_function("int8", |b| b.iter(|| unsafe { limit::dpbusd(1000) }));
    }
}

mod limit {
    /// Sums numbers; eight chains keep enough loads in flight.
    pub fn sum(v: &[u64]) -> u64 {
        let mut sums = [0u64; 64];
        for c in v.chunks_exact(64) {
            for (s, v) in sums.iter_mut().zip(c) {
                *s = s.wrapping_add(*v);
            }
        }
        sums.iter().fold(0, |a, b| a.wrapping_add(*b))
    }

    /// 16 independent chains of 64 products each.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vnni")]
    pub fn dpbusd(times: usize) -> i32 {
        use std::arch::x86_64::*;
        let (mut sums, v) = ([_mm512_setzero_si512(); 16], _mm512_set1_epi32(std::hint::black_box(0x0102_0304)));
        for _ in 0..times {
            for s in &mut sums {
                *s = _mm512_dpbusd_epi32(*s, v, v);
            }
        }
        sums.into_iter().map(|s| _mm512_reduce_add_epi32(s)).fold(0, i32::wrapping_add)
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = limits, products
}
criterion_main!(benches);
