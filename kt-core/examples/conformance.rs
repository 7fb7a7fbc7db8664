//! The conformance suite on plugins: `conformance PATH...`.
//!
//! A plugin that declines this machine is told with its reason and is no failure, unless `KT_REQUIRE` has its backend's name.

use std::process::ExitCode;
use std::time::Instant;

use kt_core::cpu::tier::Tier;

fn main() -> ExitCode {
    let required = std::env::var("KT_REQUIRE").unwrap_or_default();
    let mut failed = Vec::new();
    let paths: Vec<String> = std::env::args().skip(1).collect();
    if paths.is_empty() {
        eprintln!("usage: conformance PLUGIN...");
        return ExitCode::FAILURE;
    }
    for path in paths {
        let plugin = match kt_core::plugin::load(&path) {
            Ok(plugin) => plugin,
            Err(refusal) => {
                println!("{refusal}");
                failed.push(path);
                continue;
            }
        };
        if let Err(why) = plugin.backend(Tier::Amx) {
            println!("{} ({}) declines: {why}", plugin.name(), plugin.build());
            if required.split(',').any(|name| name == plugin.name()) {
                failed.push(path);
            }
            continue;
        }
        let start = Instant::now();
        // It panics with all failures; the panic's own message tells them.
        let suite = std::panic::catch_unwind(|| kt_core::testing::conformance(|tier| plugin.backend(tier)));
        let seconds = start.elapsed().as_secs();
        println!(
            "{} ({}): {} in {seconds} s",
            plugin.name(),
            plugin.build(),
            if suite.is_ok() { "passes" } else { "fails" }
        );
        if suite.is_err() {
            failed.push(path);
        }
    }
    if failed.is_empty() {
        return ExitCode::SUCCESS;
    }
    println!("failed: {}", failed.join(", "));
    ExitCode::FAILURE
}
