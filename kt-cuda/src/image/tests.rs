//! Every kernel compiled to machine code for every architecture, and the PTX that comes with the crate, by a real NVRTC: the library named by
//! `KT_NVRTC`, or one that the dynamic linker finds. `KT_REQUIRE=nvrtc` says that there must be one.

use std::collections::BTreeMap;
use std::ffi::OsString;

use super::*;

/// What the claims of the README are about: A100, RTX 30, RTX 40, H100, B200, RTX 50.
const ARCHS: [i32; 6] = [80, 86, 89, 90, 100, 120];

fn compiler() -> Option<Compiler> {
    let names: Vec<OsString> = match std::env::var_os("KT_NVRTC") {
        Some(path) => vec![path],
        None => crate::COMPILERS.iter().map(Into::into).collect(),
    };
    match Compiler::open(&names.iter().map(OsString::as_os_str).collect::<Vec<_>>()) {
        Ok(compiler) => Some(compiler),
        Err(why) => {
            let required = std::env::var("KT_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|r| r == "nvrtc"), "{why}, but KT_REQUIRE names nvrtc");
            eprintln!("skipped: no NVRTC: {why}");
            None
        }
    }
}

fn sets() -> impl Iterator<Item = Set> {
    Codes::ALL.into_iter().map(Set::Products).chain([Set::Rows])
}

/// PTX as it is kept: what it was made of in front, and none of the compiler's comments. NVRTC writes its own version of PTX on it, which older drivers
/// refuse: it becomes 8.0, and hints that are newer (`used_bytes_mask`, of 8.3) are left out, which says nothing of what the code does. That nothing
/// else is newer is what `ptx_that_comes_with_the_crate_is_of_its_version` looks for.
fn kept(compiler: &Compiler, set: Set) -> String {
    let options: Vec<String> = set.options().into_iter().chain(["-DKT_FEW_ONLY".into()]).collect();
    let (ptx, _) =
        compiler.compile(&set.source(), &options, Target::Ptx(PTX_ARCH)).unwrap_or_else(|e| panic!("{set:?}: {e}"));
    let (major, minor) = compiler.version;
    let mut text = format!("// source {:032x}, NVRTC {major}.{minor}\n", set.fingerprint());
    let ptx = String::from_utf8(ptx).expect("PTX is text");
    let dropped = |line: &str| {
        let line = line.trim_start();
        line.is_empty() || line.starts_with("//") || line.starts_with(".pragma \"used_bytes_mask ")
    };
    for line in ptx.lines().map(str::trim_end).filter(|l| !dropped(l)) {
        text += if line.starts_with(".version ") { ".version 8.0" } else { line };
        text.push('\n');
    }
    text
}

fn path(set: Set) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("kernels/ptx/{}.ptx", set.name()))
}

#[test]
fn ptx_that_comes_with_the_crate_is_of_these_sources() {
    let compiler = compiler();
    for set in sets() {
        let first = ptx(set).lines().next().unwrap_or_default();
        assert!(
            first.starts_with(&format!("// source {:032x}, NVRTC ", set.fingerprint())),
            "kernels/ptx/{}.ptx is of other sources: run `cargo test -p kt-cuda -- --ignored write_ptx`",
            set.name()
        );
        match &compiler {
            Some(c) if first.ends_with(&format!("NVRTC {}.{}", c.version.0, c.version.1)) => {
                assert!(
                    ptx(set) == kept(c, set),
                    "kernels/ptx/{}.ptx is not what NVRTC makes of its sources",
                    set.name()
                );
            }
            _ => eprintln!("{}: compared by its fingerprint only: {first}", set.name()),
        }
    }
}

/// Writes what the test above looks for.
#[test]
#[ignore = "writes into the source tree"]
fn write_ptx() {
    let compiler = compiler().expect("NVRTC");
    for set in sets() {
        std::fs::write(path(set), kept(&compiler, set)).unwrap_or_else(|e| panic!("{}: {e}", path(set).display()));
    }
}

/// The files as a driver translates them: by each ptxas that `KT_PTXAS` names (as PATH names directories), without a word of complaint. One of CUDA 12.0 knows
/// nothing that is newer than 8.0 and passes hints over with a warning; later ones refuse what is newer than the version that a file claims, as drivers do.
/// `KT_REQUIRE=ptxas` says that there must be one.
#[test]
fn ptx_that_comes_with_the_crate_is_of_its_version() {
    let Some(all) = std::env::var_os("KT_PTXAS") else {
        let required = std::env::var("KT_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|r| r == "ptxas"), "KT_PTXAS names no ptxas, but KT_REQUIRE does");
        eprintln!("skipped: PTX of the crate by ptxas: KT_PTXAS names none");
        return;
    };
    for (ptxas, set) in std::env::split_paths(&all).flat_map(|ptxas| sets().map(move |set| (ptxas.clone(), set))) {
        for arch in ["sm_80", "sm_90"] {
            let mut command = std::process::Command::new(&ptxas);
            command.arg(format!("--gpu-name={arch}")).arg(path(set)).args(["--output-file", "/dev/null"]);
            let ran = command.output().unwrap_or_else(|e| panic!("{}: {e}", ptxas.display()));
            let said = [ran.stdout, ran.stderr].concat();
            assert!(
                ran.status.success() && said.is_empty(),
                "{} for {arch}: {}",
                path(set).display(),
                String::from_utf8_lossy(&said)
            );
        }
    }
}

/// Kernels with registers that are kept in memory, and how many bytes of them: none may be added without a word here.
const SPILLS: [(&str, i32, u32); 0] = [];

/// The kernels of a log of ptxas: name, registers, and bytes of spills.
fn kernels(said: &str) -> Vec<(String, u32, u32)> {
    let after = |line: &str, what: &str| -> Option<u32> { line.split(what).nth(1)?.split(' ').next()?.parse().ok() };
    let before = |line: &str, what: &str| -> Option<u32> { line.split(what).next()?.rsplit(' ').next()?.parse().ok() };
    let mut all = Vec::new();
    for part in said.split("Compiling entry function '").skip(1) {
        let name = part.split('\'').next().unwrap_or_default();
        let registers = after(part, "Used ");
        let spills = before(part, " bytes spill stores").zip(before(part, " bytes spill loads"));
        let (Some(registers), Some((stores, loads))) = (registers, spills) else {
            panic!("the log of ptxas reads otherwise than expected: {part}")
        };
        all.push((name.to_string(), registers, stores + loads));
    }
    all
}

#[test]
fn every_kernel_compiles_for_every_architecture_without_spills() {
    let Some(compiler) = compiler() else { return };
    let missing: Vec<i32> = ARCHS.into_iter().filter(|a| !compiler.archs.contains(a)).collect();
    assert!(missing.is_empty(), "this NVRTC does not know {missing:?}; 12.9 does");
    let one = |arch: i32| -> Vec<(String, u32, u32)> {
        let compile = |set: Set| {
            let options: Vec<String> = set.options().into_iter().chain(["--ptxas-options=-v".into()]).collect();
            let (code, said) = compiler
                .compile(&set.source(), &options, Target::Machine(arch))
                .unwrap_or_else(|e| panic!("{} for sm_{arch}: {e}", set.name()));
            assert!(code.starts_with(b"\x7fELF"), "{} for sm_{arch}: no machine code", set.name());
            kernels(&said)
        };
        sets().flat_map(compile).collect()
    };
    let mut most = BTreeMap::<String, u32>::new();
    std::thread::scope(|scope| {
        for (arch, made) in ARCHS.map(|arch| {
            (
                arch,
                scope.spawn({
                    let one = &one;
                    move || one(arch)
                }),
            )
        }) {
            let made = made.join().expect("all kernels");
            assert_eq!(made.len(), Codes::ALL.len() * 4 + 4, "kernels for sm_{arch}");
            for (name, registers, spills) in made {
                let listed = SPILLS.iter().find(|s| (s.0, s.1) == (&*name, arch)).map_or(0, |s| s.2);
                assert_eq!(spills, listed, "bytes of spills of {name} for sm_{arch}");
                let entry = most.entry(name).or_default();
                *entry = registers.max(*entry);
            }
        }
    });
    most.iter().for_each(|(name, registers)| eprintln!("{name}: {registers} registers at most"));
}

#[test]
fn files_of_the_cache_that_do_not_fit_are_refused() {
    let dir = std::env::temp_dir().join(format!("kt-cuda-cache-{}", std::process::id()));
    let file = dir.join("one.cubin");
    assert_eq!(read(&file, "header\n"), Ok(None));
    write(&file, "header\n", b"code").unwrap();
    assert_eq!(read(&file, "header\n"), Ok(Some(b"code".to_vec())));
    assert!(read(&file, "headeR\n").unwrap_err().contains("another version"));
    let good = std::fs::read(&file).unwrap();
    for cut in 0..good.len() {
        std::fs::write(&file, &good[..cut]).unwrap();
        read(&file, "header\n").unwrap_err();
        let mut bad = good.clone();
        bad[cut] ^= 1;
        std::fs::write(&file, &bad).unwrap();
        read(&file, "header\n").unwrap_err();
    }
    std::fs::remove_dir_all(&dir).unwrap();
}
