//! From how many rows of an expert on the backend amx uses tiles: `kt doctor --measure` measures it and keeps it in the user's cache directory,
//! and whatever builds a runtime uses what is kept. Of `many` it depends which calls round otherwise, unless `--batch-invariant` is given; of the others no bit does.
//!
//! ```text
//! kt 0.1.0: from how many rows of an expert on AMX tiles are used
//! cpu Intel(R) Xeon(R) Platinum 8480+
//! int8=2 many=32 bf16=2 fp8=2
//! ```

use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use kt::Backend;
use kt::amx::{Amx, Crossover};
use kt::cpu::tier::Tier;

use crate::system::System;

/// Another version may multiply otherwise.
const HEAD: &str = concat!("kt ", env!("CARGO_PKG_VERSION"), ": from how many rows of an expert on AMX tiles are used");

/// More than such a file has.
const MOST: u64 = 4096;

/// Where the measurement is kept: `kt/amx-crossover` in the user's cache directory; `None` where there is no such directory.
pub fn file() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(cache.join("kt/amx-crossover"))
}

/// This machine's CPU, as the file names it.
fn cpu(system: &System) -> String {
    system.cpu_model().unwrap_or_else(|| "unknown".into())
}

/// What is kept for this machine; `None` where there is no file.
///
/// # Errors
/// The file cannot be read, or was not written by this version, for this CPU: it says which.
pub fn read(path: &Path, system: &System) -> Result<Option<Crossover>, String> {
    let fail = |what: String| format!("{}: {what}", path.display());
    let mut text = String::new();
    match std::fs::File::open(path).and_then(|file| file.take(MOST).read_to_string(&mut text)) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(fail(error.to_string())),
    }
    let lines: Vec<&str> = text.lines().collect();
    let &[head, of, numbers] = &lines[..] else {
        return Err(fail(format!("it has {} lines in place of 3", lines.len())));
    };
    if head != HEAD {
        return Err(fail(format!("it begins with `{head}` in place of `{HEAD}`")));
    }
    match of.strip_prefix("cpu ") {
        Some(of) if of == cpu(system) => numbers.parse::<Crossover>().map(Some).map_err(|why| fail(why.to_string())),
        _ => Err(fail(format!("its measurement is of `{of}`, and this is `cpu {}`", cpu(system)))),
    }
}

/// Keeps a measurement of this machine; readers see all of it or nothing.
///
/// # Errors
/// The directory or the file cannot be written.
pub fn write(path: &Path, system: &System, crossover: Crossover) -> std::io::Result<()> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    let unfinished = path.with_extension(format!("{}.tmp", std::process::id()));
    std::fs::write(&unfinished, format!("{HEAD}\ncpu {}\n{crossover}\n", cpu(system)))?;
    std::fs::rename(&unfinished, path).inspect_err(|_| {
        // The error that counts is the first one.
        let _ = std::fs::remove_file(&unfinished);
    })
}

/// The backend amx with what is kept for this machine: `None` where it is not for this machine, or nothing is kept, so that the built-in one with
/// the default is right. A file that is refused is told on the standard error.
pub fn backend() -> Option<impl Backend> {
    let amx = Amx::detect(Tier::Amx).ok()?;
    match read(&file()?, &System::here()) {
        Ok(kept) => Some(amx.with_crossover(kept?).into_backend()),
        Err(why) => {
            eprintln!("warning  {why}; tiles are used from {} rows on, the default", Crossover::default());
            None
        }
    }
}

/// Measures this machine and keeps the result, with what is to be said of it; `None` where it has no AMX.
///
/// # Errors
/// There is no memory for the weights that are measured with, or the file cannot be written.
pub fn measure(system: &System) -> anyhow::Result<Option<String>> {
    let Ok(amx) = Amx::detect(Tier::Amx) else { return Ok(None) };
    let crossover = amx.measure()?;
    let Some(path) = file() else {
        return Ok(Some(format!("{crossover} rows on, not kept: there is neither XDG_CACHE_HOME nor HOME")));
    };
    write(&path, system, crossover).map_err(|e| anyhow::anyhow!("{}: {e}", path.display()))?;
    Ok(Some(format!("{crossover} rows on, kept in {}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::system::tests::Tree;

    #[test]
    fn what_is_kept_is_read_again_and_strangers_are_refused() {
        let tree = |name: &str, cpu: &str| Tree::new(name, &[("proc/cpuinfo", &format!("model name : {cpu}\n"))]);
        let (here, there) = (tree("crossover-here", "This CPU"), tree("crossover-there", "That CPU"));
        let (here, there) = (here.system(), there.system());
        let dir = std::env::temp_dir().join(format!("kt-crossover-{}", std::process::id()));
        let path = dir.join("deep/amx-crossover");
        assert_eq!(read(&path, &here), Ok(None));
        let of = Crossover { int8: 17, many: 60, bf16: 31, fp8: 32 };
        write(&path, &here, of).unwrap();
        assert_eq!(read(&path, &here), Ok(Some(of)));
        write(&path, &here, Crossover::default()).unwrap();
        assert_eq!(read(&path, &here), Ok(Some(Crossover::default())), "written over");
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing unfinished is left");

        let refused = |text: &str, word: &str| {
            std::fs::write(&path, text).unwrap();
            let why = read(&path, &here).unwrap_err();
            assert!(why.contains("amx-crossover") && why.contains(word), "{text:?}: {why}");
        };
        let good = std::fs::read_to_string(&path).unwrap();
        let why = read(&path, &there).unwrap_err();
        assert!(why.contains("This CPU") && why.contains("That CPU"), "{why}");
        refused("", "0 lines");
        refused(&format!("{good}more\n"), "4 lines");
        refused(&good.replace("kt 0", "kt 9"), "kt 9");
        refused(&good.replace("cpu This", "gpu This"), "gpu This");
        refused(&good.replace("many=32", "many=some"), "many=some");
        refused(&"\n".repeat(10_000), "4096 lines");
        std::fs::write(&path, b"kt \xff\n").unwrap();
        assert!(read(&path, &here).is_err(), "not UTF-8");
        assert!(read(&dir, &here).is_err(), "a directory");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
