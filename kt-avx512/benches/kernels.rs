//! Products on one thread: few rows in GB/s of packed weights, many rows in operations a second, next to what the machine can do.
//!
//! Names are `decode|prefill/tier/format/shape/rows`. `limit/read` is the read bandwidth of one core and `limit/int8`, `limit/bf16` its
//! multiply rate from registers, measured in the same run. Decoding walks over experts far larger than the cache.

#![allow(unsafe_code)] // kernels

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use criterion::{BenchmarkId, Criterion, Throughput};
    use kt_avx512::Avx;
    use kt_core::cpu::input::{BLOCK, Inputs};
    use kt_core::cpu::kernel::{Kernel, Outputs, Scratch, Weights};
    use kt_core::cpu::memory::zeroed_pages;
    use kt_core::cpu::tier::Tier;
    use kt_core::testing::Random;
    use kt_core::{Format, Group, Matrix, ScaleType};

    const FORMATS: [Format; 6] = [
        Format::Bf16,
        Format::Fp8Block,
        Format::Fp8Channel,
        Format::Int8(Group::Row),
        Format::Int4(Group::Of(32)),
        Format::Int4(Group::Of(128)),
    ];
    /// gate and up of one expert of Qwen3-30B-A3B.
    const SHAPE: (usize, usize) = (1536, 2048);
    const POOL_BYTES: usize = 256 << 20;

    fn matrix(format: Format) -> Matrix {
        let (rows, cols) = SHAPE;
        let mut random = Random(1);
        let n = format.row_bytes(cols).expect("a valid shape") * rows;
        let codes: Vec<u8> = (0..n).map(|_| random.bits() as u8 & 0x3f).collect();
        let scales = format.scale_shape(rows, cols).map(|(r, c)| (vec![0x3c; r * c * 2].into(), ScaleType::Bf16));
        Matrix::new(format, rows, cols, codes.into(), scales).expect("a matrix")
    }

    fn inputs(kernel: Avx, format: Format, rows: usize) -> Vec<u8> {
        let (layout, _) = kernel.accepts(format, SHAPE.0, SHAPE.1).expect("accepted");
        let mut random = Random(2);
        let mut bytes = vec![0; layout.bytes(rows, SHAPE.1)];
        for out in bytes.chunks_exact_mut(layout.block_bytes()) {
            let x: [f32; BLOCK] = std::array::from_fn(|_| random.normal());
            kernel.pack_input(layout, &x, out);
        }
        bytes
    }

    fn products(c: &mut Criterion, kernel: Avx, format: Format) {
        let (outputs, cols) = SHAPE;
        let size = kernel.packed_bytes(format, outputs, cols).expect("packed");
        let experts = POOL_BYTES.div_ceil(size);
        let mut pool = zeroed_pages(size * experts).expect("memory");
        let matrix = matrix(format);
        for out in pool.chunks_exact_mut(size) {
            kernel.pack(&matrix, out);
        }
        let pool = bytes::Bytes::from_owner(pool);
        let experts: Vec<_> = (0..experts)
            .map(|i| Weights::packed(format, outputs, cols, pool.slice(i * size..(i + 1) * size)))
            .collect();
        let (layout, _) = kernel.accepts(format, outputs, cols).expect("accepted");
        let mut scratch = Scratch::default();
        for (kind, rows) in [("decode", &[1, 2, 4, 8, 16][..]), ("prefill", &[64, 256])] {
            let mut group = c.benchmark_group(format!("{kind}/{}/{format}/qwen3-{outputs}x{cols}", kernel.tier()));
            for &rows in rows {
                let packed = inputs(kernel, format, rows);
                let x = Inputs::new(layout, rows, cols, &packed);
                let mut out = vec![0.0; rows * outputs];
                group.throughput(if kind == "decode" {
                    Throughput::Bytes(size as u64)
                } else {
                    Throughput::Elements((2 * rows * outputs * cols) as u64)
                });
                let mut next = 0;
                group.bench_function(BenchmarkId::from_parameter(rows), |b| {
                    b.iter(|| {
                        kernel.product(Outputs::new(&experts[next], 0..outputs), x, 0..rows, &mut out, &mut scratch);
                        next = (next + 1) % experts.len();
                    });
                });
                black_box(&out);
            }
        }
    }

    const REPEATS: usize = 10_000;
    /// Independent sums: enough to cover the latency.
    const CHAINS: usize = 16;

    #[target_feature(enable = "avx512f,avx512vnni")]
    fn int8_dots(w: __m512i, x: __m512i) -> [__m512i; CHAINS] {
        let mut sums = [w; CHAINS];
        for _ in 0..REPEATS {
            for s in &mut sums {
                *s = _mm512_dpbusd_epi32(*s, w, x);
            }
        }
        sums
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    fn bf16_dots(w: __m512bh, x: __m512bh) -> [__m512; CHAINS] {
        let mut sums = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..REPEATS {
            for s in &mut sums {
                *s = _mm512_dpbf16_ps(*s, w, x);
            }
        }
        sums
    }

    #[target_feature(enable = "avx512f")]
    fn read(data: &[[i64; 8]]) -> __m512i {
        let mut sums = [_mm512_setzero_si512(); 8];
        for lines in data.as_chunks::<8>().0 {
            for (s, line) in sums.iter_mut().zip(lines) {
                // SAFETY: a line is 64 bytes.
                *s = _mm512_xor_si512(*s, unsafe { _mm512_loadu_si512(line.as_ptr().cast()) });
            }
        }
        sums.into_iter().fold(_mm512_setzero_si512(), |a, b| _mm512_xor_si512(a, b))
    }

    fn limits(c: &mut Criterion, tier: Tier) {
        let mut group = c.benchmark_group("limit");
        let mut pool = zeroed_pages(POOL_BYTES).expect("memory");
        pool.fill(1);
        // SAFETY: pages are aligned to more than 8 bytes, and any bytes are numbers.
        let lines = unsafe { std::slice::from_raw_parts(pool.as_ptr().cast::<[i64; 8]>(), POOL_BYTES / 64) };
        group.throughput(Throughput::Bytes(POOL_BYTES as u64));
        // SAFETY: only called with an AVX-512 kernel at hand.
        group.bench_function("read", |b| b.iter(|| black_box(unsafe { read(lines) })));
        group.throughput(Throughput::Elements((REPEATS * CHAINS * 64 * 2) as u64));
        if tier >= Tier::Avx512Vnni {
            // SAFETY: any bytes are a vector, and the tier has VNNI.
            let v = || black_box(unsafe { std::mem::transmute::<[u8; 64], __m512i>([1; 64]) });
            // SAFETY: as above.
            group.bench_function("int8", |b| b.iter(|| black_box(unsafe { int8_dots(v(), v()) })));
        }
        group.throughput(Throughput::Elements((REPEATS * CHAINS * 32 * 2) as u64));
        if tier >= Tier::Avx512Bf16 {
            // SAFETY: any bytes are a vector, and the tier has BF16.
            let v = || black_box(unsafe { std::mem::transmute::<[u8; 64], __m512bh>([1; 64]) });
            // SAFETY: as above.
            group.bench_function("bf16", |b| b.iter(|| black_box(unsafe { bf16_dots(v(), v()) })));
        }
    }

    pub fn benches(c: &mut Criterion) {
        let best = match Avx::detect(Tier::Avx512Bf16) {
            Ok(kernel) => kernel,
            Err(why) => return eprintln!("nothing to measure: {why}"),
        };
        limits(c, best.tier());
        for format in FORMATS {
            products(c, best, format);
        }
        for tier in [Tier::Avx2, Tier::Avx512, Tier::Avx512Vnni] {
            if let Ok(kernel) = Avx::detect(tier)
                && kernel.tier() < best.tier()
            {
                for format in if tier < Tier::Avx512Vnni { &FORMATS[..] } else { &FORMATS[..2] } {
                    products(c, kernel, *format);
                }
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
        .warm_up_time(std::time::Duration::from_millis(200))
        .measurement_time(std::time::Duration::from_millis(600));
    targets = x86::benches
}
criterion::criterion_main!(kernels);
