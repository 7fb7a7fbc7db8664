//! `kt`: run, measure and inspect Mixture-of-Experts models.

use std::io::Write;

use clap::{Parser, Subcommand};

/// Run, measure and inspect Mixture-of-Experts models on CPU kernels.
#[derive(Debug, Parser)]
#[command(name = "kt", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(kt_cli::run::RunArgs),
    Eval(kt_cli::eval::EvalArgs),
    Doctor(kt_cli::doctor::DoctorArgs),
    Plan(kt_cli::plan::PlanArgs),
    Bench(kt_cli::bench::BenchArgs),
    Convert(kt_cli::convert::ConvertArgs),
    Verify(kt_cli::convert::VerifyArgs),
    #[cfg(feature = "plugins")]
    Plugins(kt_cli::plugins::PluginsArgs),
}

/// Candle reads `/proc/cpuinfo` with every product, which takes the longer the more CPUs there are, unless this variable says into how many parts a product
/// is cut at most.
#[allow(unsafe_code)] // environment
fn tell_candle_of_threads() {
    const THREADS: &str = "RAYON_NUM_THREADS";
    if std::env::var_os(THREADS).is_none() {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        // SAFETY: `main` calls this first, when no other thread has been started that could read the environment.
        unsafe { std::env::set_var(THREADS, threads.to_string()) };
    }
}

fn main() -> std::process::ExitCode {
    tell_candle_of_threads();
    let result = match Cli::parse().command {
        Command::Run(args) => kt_cli::run::run(args),
        Command::Eval(args) => kt_cli::eval::run(args),
        Command::Doctor(args) => kt_cli::doctor::run(args),
        Command::Plan(args) => kt_cli::plan::run(args),
        Command::Bench(args) => kt_cli::bench::run(args),
        Command::Convert(args) => kt_cli::convert::run(args),
        Command::Verify(args) => kt_cli::convert::verify(args),
        #[cfg(feature = "plugins")]
        Command::Plugins(args) => kt_cli::plugins::run(args),
    };
    match result {
        Ok(()) => std::process::ExitCode::SUCCESS,
        // Whoever read the output has seen enough. The error is found behind what is said of it, too.
        Err(e) if kt_cli::is_closed(&e) => std::process::ExitCode::SUCCESS,
        Err(e) => {
            // Some errors tell their cause themselves: say it once.
            let text = e
                .chain()
                .map(|cause| cause.to_string())
                .reduce(|text, cause| if text.contains(&cause) { text } else { format!("{text}: {cause}") });
            // Where nobody reads it, the code alone says that it failed.
            let _ = writeln!(std::io::stderr(), "kt: {}", text.unwrap_or_default());
            std::process::ExitCode::FAILURE
        }
    }
}
