//! `kt plugins`: which shared libraries of a directory are plugins, and why others are not.

use std::path::PathBuf;

use anyhow::Context;
use kt::cpu::tier::Tier;
use kt::plugin;

/// List the plugins of a directory: each loaded, with what it is; or refused, with the reason. Loading one runs its code.
#[derive(Debug, clap::Args)]
pub struct PluginsArgs {
    /// The directory [default: `plugins` beside this program].
    dir: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: PluginsArgs) -> anyhow::Result<()> {
    let dir = match args.dir {
        Some(dir) => dir,
        None => {
            let program = std::env::current_exe().context("where this program is")?;
            program.with_file_name("plugins")
        }
    };
    let found = plugin::list(&dir)?;
    if found.is_empty() {
        println!("no shared libraries in {}", dir.display());
    }
    for found in found {
        match found {
            Ok(plugin) => {
                let (major, minor) = plugin.version();
                let state = match plugin.backend(Tier::Amx) {
                    Ok(_) => "runs here".into(),
                    Err(why) => format!("cannot run here: {why}"),
                };
                println!("loaded   {:<12} {}", plugin.name(), plugin.path().display());
                println!("{:<21} {}; ABI {major}.{minor}; {state}", "", plugin.build());
                if !plugin.features().is_empty() {
                    println!("{:<21} compiled for {}", "", plugin.features());
                }
            }
            Err(refusal) => {
                println!("refused  {:<12} {}", "", refusal.path.display());
                println!("{:<21} {}", "", refusal.why);
            }
        }
    }
    Ok(())
}
