//! From how many rows on tiles are faster than vectors: products of one thread by number of rows, in G multiply-adds a second, with the weights in the cache.
//!
//! `cargo bench -p kt-amx -- [FORMAT,…]`. What comes from memory, and the machine's limits beside it, is measured by `kt bench`.

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::time::{Duration, Instant};

    use kt_amx::{Amx, Crossover};
    use kt_avx512::Avx;
    use kt_core::cpu::kernel::{Kernel, Outputs, Scratch, Weights};
    use kt_core::cpu::memory::AlignedBytes;
    use kt_core::cpu::memory::zeroed_pages;
    use kt_core::cpu::tier::Tier;
    use kt_core::source::WeightSource;
    use kt_core::source::synthetic::SyntheticSource;
    use kt_core::testing::{Random, Rows};
    use kt_core::{Format, Proj};

    /// Outputs of a task, and inputs: of gate or up of Qwen3-30B-A3B.
    const SHAPE: (usize, usize) = (256, 2048);
    const ROWS: [usize; 13] = [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256];
    const FORMATS: [&str; 15] = [
        "bf16",
        "fp8",
        "fp8-channel",
        "mxfp8",
        "int8",
        "int8-g32",
        "int8-g128",
        "int4-channel",
        "int4-g32",
        "int4-g128",
        "mxfp4",
        "nvfp4",
        "q8_0",
        "q4_k",
        "q6_k",
    ];

    pub fn main() {
        let amx = match Amx::detect(Tier::Amx) {
            Ok(amx) => amx,
            Err(why) => return println!("skipped: {why}"),
        };
        let vectors = Avx::detect(Tier::Avx512Bf16).expect("AMX comes with it");
        let formats = std::env::args().skip(1).find(|a| !a.starts_with("--"));
        let formats =
            formats.map_or(FORMATS.map(String::from).to_vec(), |list| list.split(',').map(Into::into).collect());
        println!("G multiply-adds a second\n{:14}{:9}{}", "format", "", ROWS.map(|n| format!("{n:>7}")).concat());
        for name in formats {
            let format: Format = name.parse().unwrap_or_else(|e| panic!("{name}: {e}"));
            let line = |what: &str, speeds: [f64; ROWS.len()]| {
                println!("{name:14}{what:9}{}", speeds.map(|v| format!("{v:7.0}")).concat());
            };
            let few = |rows| amx.with_crossover(Crossover { int8: rows, many: usize::MAX, bf16: rows, fp8: rows });
            if let Some((_, many)) = amx.for_many() {
                line("many", speeds(many, format));
            }
            line("tiles", speeds(few(1), format));
            line("vectors", speeds(few(usize::MAX), format));
            if vectors.accepts(format, SHAPE.0, SHAPE.1).is_ok() {
                line("avx512", speeds(vectors, format));
            }
        }
    }

    fn speeds(kernel: impl Kernel, format: Format) -> [f64; ROWS.len()] {
        let (outputs, cols) = SHAPE;
        let source = SyntheticSource::builder().hidden(cols).intermediate(outputs).format(format).build();
        let matrix = source.and_then(|s| s.matrix(0, 0, Proj::Gate)).expect("a shape that every format can have");
        let weights = match kernel.packed_bytes(format, outputs, cols) {
            None => Weights::in_place(matrix),
            Some(bytes) => {
                let mut pages = zeroed_pages(bytes, Default::default()).expect("some MiB");
                kernel.pack(&matrix, 0..outputs, &mut pages[..bytes]);
                Weights::packed(format, outputs, cols, bytes::Bytes::from_owner(pages).slice(..bytes))
            }
        };
        let (layout, _) = kernel.accepts(format, outputs, cols).expect("a format of AMX's");
        let layout = kernel.inputs_of_rows(layout);
        ROWS.map(|rows| {
            let mut random = Random(2);
            let values: Vec<f32> = (0..rows * cols).map(|_| random.normal()).collect();
            let inputs = Rows::new(kernel, layout, &values, cols);
            let (mut out, mut scratch) = (AlignedBytes::default(), Scratch::default());
            let out = out.floats(rows * outputs);
            let mut run = || {
                kernel.product(Outputs::new(&weights, 0..outputs), inputs.view(), 0..rows, out, &mut scratch);
            };
            run();
            // The best of some rounds: others use the machine, too.
            let seconds = (0..5).map(|_| {
                let (start, mut n) = (Instant::now(), 0);
                while start.elapsed() < Duration::from_millis(2) {
                    run();
                    n += 1;
                }
                start.elapsed().as_secs_f64() / f64::from(n)
            });
            (rows * outputs * cols) as f64 / seconds.fold(f64::MAX, f64::min) / 1e9
        })
    }
}

#[cfg(target_arch = "x86_64")]
fn main() {
    x86::main();
}

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    println!("skipped: AMX is part of x86-64 CPUs");
}
