//! Checks on a machine with AMX, real or emulated: detection, permission, products. As the first process of a machine
//! (`tests/amx-emulator`), it turns the machine off when it is done.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod check {
    use kt_amx::{Amx, Crossover};
    use kt_core::cpu::CpuBackend;
    use kt_core::cpu::kernel::{Kernel, Outputs, Scratch};
    use kt_core::cpu::portable::Portable;
    use kt_core::cpu::tier::Tier;
    use kt_core::source::WeightSource;
    use kt_core::source::synthetic::SyntheticSource;
    use kt_core::testing::{Random, Rows, mean_error, weights};
    use kt_core::{Batch, Candidate, Format, Group, Proj, RuntimeBuilder};

    const OUTPUTS: usize = 96;
    const COLS: usize = 384;
    const ROWS: usize = 35;

    pub fn run() -> Result<(), String> {
        let kernel = Amx::detect(Tier::Amx).map_err(|why| why.0)?;
        println!("check: AMX is there and granted");
        let few = |rows| kernel.with_crossover(Crossover { int8: rows, many: usize::MAX, bf16: rows, fp8: rows });
        let floats = [Format::Bf16, Format::Fp8Channel, Format::Fp8Block, Format::Mxfp8];
        let mut integers = vec![Format::Int8(Group::Row), Format::Int4(Group::Row)];
        if super::first_process() {
            println!(
                "check: {integers:?} skipped: Bochs 3.0 multiplies bytes of tiles as unsigned ones, whatever the instruction"
            );
            integers.clear();
        }
        for format in floats.into_iter().chain(integers) {
            let on_tiles = product(few(1), format, ROWS)?.0;
            let streamed = product(few(usize::MAX), format, 8)?.0;
            let wrong = on_tiles.iter().zip(&streamed).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            println!("check: {format}: {wrong} of {} numbers differ between tiles and vectors", streamed.len());
            if wrong > 0 || streamed.iter().all(|&v| v == 0.0) {
                return Err(format!("{format}: the products on tiles are wrong"));
            }
        }
        let (_, many) = kernel.for_many().ok_or("no kernel for many rows")?;
        for format in [
            Format::Int4(Group::Of(32)),
            Format::Int4Asym(Group::Of(32)),
            Format::Int8(Group::Of(32)),
            Format::Mxfp4,
            Format::Fp8Block,
        ] {
            let (got, want) = product(many, format, ROWS)?;
            let error = mean_error(&want, &got);
            println!("check: {format}: {error:.5} from the decoded weights, as BF16 numbers on tiles");
            if error.is_nan() || error > 0.004 {
                return Err(format!("{format}: the products of many rows are wrong"));
            }
        }
        mixed(kernel)
    }

    /// Layers of formats that are packed by one kernel and by the other, as a thread alone goes from one matrix to the next.
    fn mixed(kernel: Amx) -> Result<(), String> {
        let text = |e: kt_core::Error| e.to_string();
        let few = Crossover { int8: usize::MAX, many: usize::MAX, bf16: usize::MAX, fp8: usize::MAX };
        let portable = |_| vec![Candidate::new("portable", Ok(CpuBackend::new("portable", Portable)))];
        let builder = || RuntimeBuilder::new(portable).threads(1);
        for formats in [
            [Format::Q8_0, Format::Bf16, Format::Q8_0],
            [Format::Q8_0, Format::Q8_0, Format::Bf16],
            [Format::Bf16, Format::Bf16, Format::Q8_0],
        ] {
            let source = SyntheticSource::builder().hidden(COLS).intermediate(OUTPUTS).experts(2).top_k(2).layers(1);
            let source = source.format(formats).seed(3).build().map_err(text)?;
            let mut random = Random(9);
            let x: Vec<f32> = (0..COLS).map(|_| random.uniform()).collect();
            let run = |builder: RuntimeBuilder| -> Result<Vec<f32>, String> {
                let runtime = builder.build().map_err(text)?;
                let mut batch = Batch::new(1, x.clone(), vec![0, 1], vec![0.5; 2]).map_err(text)?;
                runtime.load(&source).and_then(|e| e.layer(0)?.forward(&mut batch)).map_err(text)?;
                Ok(batch.into_output())
            };
            let got = run(builder().with_backend(kernel.with_crossover(few).into_backend()).backend("amx"))?;
            let want = run(builder().backend("portable"))?;
            let error = mean_error(&want.iter().map(|&v| v.into()).collect::<Vec<f64>>(), &got);
            println!("check: a layer of {}, {} and {}: error {error:.5}", formats[0], formats[1], formats[2]);
            if error.is_nan() || error > 0.02 {
                return Err("a layer of two formats is wrong".into());
            }
        }
        Ok(())
    }

    /// A product of [`ROWS`] rows, so many at a time; and the same of the decoded weights.
    fn product(kernel: Amx, format: Format, at_once: usize) -> Result<(Vec<f32>, Vec<f64>), String> {
        let source = SyntheticSource::builder().hidden(COLS).intermediate(OUTPUTS).experts(1).top_k(1).layers(1);
        let source = source.format(format).seed(3).build().map_err(|e| e.to_string())?;
        let matrix = source.matrix(0, 0, Proj::Gate).map_err(|e| e.to_string())?;
        let (layout, _) = kernel.accepts(format, OUTPUTS, COLS).map_err(|why| why.0)?;
        let layout = kernel.inputs_of_rows(layout);
        let weights = weights(kernel, &matrix);
        let mut random = Random(9);
        let x: Vec<f32> = (0..ROWS * COLS).map(|_| random.normal()).collect();
        let inputs = Rows::new(kernel, layout, &x, COLS);
        let mut out = vec![0.0; ROWS * OUTPUTS];
        let mut scratch = Scratch::default();
        for first in (0..ROWS).step_by(at_once) {
            let rows = first..ROWS.min(first + at_once);
            let out = &mut out[first * OUTPUTS..rows.end * OUTPUTS];
            kernel.product(Outputs::new(&weights, 0..OUTPUTS), inputs.view(), rows, out, &mut scratch);
        }
        let mut want = vec![0f64; ROWS * OUTPUTS];
        let mut decoded = vec![0f32; COLS];
        for o in 0..OUTPUTS {
            matrix.decode_row(o, &mut decoded);
            for row in 0..ROWS {
                want[row * OUTPUTS + o] =
                    decoded.iter().enumerate().map(|(k, &w)| f64::from(w) * inputs.get(row, k)).sum();
            }
        }
        Ok((out, want))
    }
}

/// Whether this is all that runs on the machine: an emulated one, as `tests/amx-emulator/run` boots it.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn first_process() -> bool {
    std::process::id() == 1
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[allow(unsafe_code)] // what the first process of a machine must do
fn main() {
    let first_process = first_process();
    if first_process {
        // An emulator without XFD loses tiles when a thread gives way to another: none may.
        // SAFETY: numbers and a structure that is there.
        unsafe {
            libc::mkdir(c"/proc".as_ptr(), 0o755);
            libc::mount(c"proc".as_ptr(), c"/proc".as_ptr(), c"proc".as_ptr(), 0, std::ptr::null());
        }
        let limit = std::fs::write("/proc/sys/kernel/sched_rt_runtime_us", "-1");
        let priority = libc::sched_param { sched_priority: 99 };
        // SAFETY: as above.
        let rc = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &priority) };
        println!("check: real-time scheduling: {limit:?}, {rc}");
    }
    let result = check::run();
    match &result {
        Ok(()) => println!("check: passed"),
        Err(why) => println!("check: failed: {why}"),
    }
    if first_process {
        // SAFETY: waits until the last line is out, then turns the machine off.
        unsafe {
            libc::tcdrain(1);
            libc::reboot(libc::RB_POWER_OFF);
        }
    }
    std::process::exit(result.is_err().into());
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn main() {
    println!("AMX is part of x86-64 CPUs, and this check is for Linux");
}
