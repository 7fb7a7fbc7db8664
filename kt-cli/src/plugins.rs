//! `kt plugins`: which shared libraries of a directory are plugins, and why others are not.

use std::io::ErrorKind;
use std::path::PathBuf;

use anyhow::{Context, bail};
use kt::cpu::tier::Tier;
use kt::plugin;

/// List the plugins of a directory: each loaded, with what it is; or refused, with the reason. Loading one runs its code.
#[derive(Debug, clap::Args)]
pub struct PluginsArgs {
    /// The directory [default: `plugins` beside this program].
    dir: Option<PathBuf>,
}

/// Runs the command.
///
/// # Errors
/// The directory that was named is not there, is none, or cannot be read.
pub fn run(args: PluginsArgs) -> anyhow::Result<()> {
    let (dir, named) = match args.dir {
        Some(dir) => (dir, true),
        None => {
            let program = std::env::current_exe().context("where this program is")?;
            (program.with_file_name("plugins"), false)
        }
    };
    match std::fs::metadata(&dir) {
        Ok(there) if !there.is_dir() => bail!("{}: not a directory; --plugin loads a single library", dir.display()),
        Err(e) if e.kind() == ErrorKind::NotFound && named => bail!("{}: there is no such directory", dir.display()),
        Err(e) if e.kind() == ErrorKind::NotFound => return say!("no plugins: {} does not exist", dir.display()),
        // What else may be wrong is told when it is read.
        _ => {}
    }
    let found = plugin::list(&dir)?;
    if found.is_empty() {
        say!("no shared libraries in {}", dir.display())?;
    }
    for found in found {
        match found {
            Ok(plugin) => {
                let (major, minor) = plugin.version();
                let state = match plugin.backend(Tier::Amx) {
                    Ok(_) => "runs here".into(),
                    Err(why) => format!("cannot run here: {why}"),
                };
                say!("loaded   {:<12} {}", plugin.name(), plugin.path().display())?;
                say!("{:<21} {}; ABI {major}.{minor}; {state}", "", plugin.build())?;
                if !plugin.features().is_empty() {
                    say!("{:<21} compiled for {}", "", plugin.features())?;
                }
            }
            Err(refusal) => {
                say!("refused  {:<12} {}", "", refusal.path.display())?;
                say!("{:<21} {}", "", refusal.why)?;
            }
        }
    }
    Ok(())
}
