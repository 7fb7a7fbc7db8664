//! The packed cache: what it finds again, what it refuses, and what processes that fail, are killed or write at once leave.

#![cfg(unix)]

mod common;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, SystemTime};

use kt_core::cpu::cache::{Found, Key, PackedCache};
use kt_core::cpu::tier::Tier;
use kt_core::quantize::Requantized;
use kt_core::source::synthetic::SyntheticSource;
use kt_core::{Format, Group, LayerSpec, WeightSource};

use common::gguf::Gguf;
use common::{Dir, bf16, model, safetensors};

/// More than a chunk of the checksum and no multiple of a page.
const BYTES: usize = (9 << 20) + 64;
const HEADER: usize = 4096;

fn source(seed: u64) -> SyntheticSource {
    SyntheticSource::builder().experts(4).layers(3).seed(seed).build().unwrap()
}

fn key(layer: &LayerSpec) -> Key<'_> {
    Key { backend: "some", tier: Tier::Avx2, layout_version: 7, layer, experts: &[0, 1, 2, 3], bytes: BYTES }
}

fn payload(salt: u8) -> Vec<u8> {
    (0..BYTES).map(|i| (i as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0] ^ salt).collect()
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[track_caller]
fn mapped(found: Found) -> bytes::Bytes {
    match found {
        Found::Mapped(bytes) => bytes,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn refused(found: Found, want: &str) {
    match found {
        Found::Refused(why) => assert!(why.contains(want), "`{want}` is not in: {why}"),
        Found::Missing => panic!("missing, but a refusal with `{want}` was expected"),
        Found::Mapped(_) => panic!("mapped, but a refusal with `{want}` was expected"),
    }
}

#[test]
fn what_was_stored_is_found_again() {
    let dir = Dir::new("cache-found");
    let (source, deep) = (source(1), dir.0.join("made/when/needed"));
    let layer = &source.layers()[1];
    let cache = PackedCache::new(&deep, &source);
    assert!(matches!(cache.find(&key(layer)), Found::Missing) && !cache.has(&key(layer)));
    assert!(cache.load(&key(layer)).is_none());
    cache.save(&key(layer), &[&payload(0)]);
    assert!(cache.has(&key(layer)));
    // Another process's cache: nothing is remembered but the files.
    let again = PackedCache::new(&deep, &source);
    let bytes = again.load(&key(layer)).unwrap();
    assert!(bytes == payload(0));
    assert_eq!(bytes.as_ptr() as usize % 4096, 0);
    assert!(matches!(again.find(&key(&source.layers()[2])), Found::Missing));
    assert!(matches!(again.find(&Key { backend: "other", ..key(layer) }), Found::Missing));
    // A rebuilt file takes the place of the old one, and who mapped that keeps it.
    again.save(&key(layer), &[&payload(1)]);
    assert!(mapped(again.find(&key(layer))) == payload(1) && bytes == payload(0));
    assert_eq!(names(&deep).len(), 1);
    let (first, second) = (cache.report(), again.report());
    assert_eq!((first.mapped_layers, first.written_layers, first.written_bytes), (0, 1, BYTES as u64));
    assert_eq!((second.mapped_layers, second.mapped_bytes, second.written_layers), (1, BYTES as u64, 1));
    assert!(first.problems.is_empty() && second.problems.is_empty());
}

#[test]
fn damage_is_refused_and_repaired() {
    let dir = Dir::new("cache-damage");
    let source = source(1);
    let key = key(&source.layers()[0]);
    let cache = PackedCache::new(&dir.0, &source);
    cache.save(&key, &[&payload(0)]);
    let path = cache.path(&key);
    let good = fs::read(&path).unwrap();
    assert_eq!(good.len(), HEADER + BYTES);
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = good.clone();
        change(&mut bytes);
        fs::write(&path, bytes).unwrap();
        cache.find(&key)
    };
    let number = |at: usize, value: &[u8]| {
        let value = value.to_vec();
        with(&move |b| b[at..at + value.len()].copy_from_slice(&value))
    };
    refused(with(&|b| b.clear()), "only 0 bytes: it is truncated");
    refused(with(&|b| b.truncate(20)), "only 20 bytes");
    refused(with(&|b| b.truncate(100)), "truncated");
    refused(with(&|b| b.truncate(HEADER)), "has 4096 bytes where");
    refused(with(&|b| b.truncate(HEADER + BYTES - 1)), "is truncated");
    refused(with(&|b| b.push(0)), "where 9441344 are due");
    refused(with(&|b| b.fill(0xa5)), "no file of packed experts");
    refused(number(8, &2u32.to_le_bytes()), "version 2 of the file format, 1 is due");
    refused(number(12, &u32::MAX.to_le_bytes()), "claims more bytes than there are");
    refused(number(12, &0u32.to_le_bytes()), "backend is missing");
    refused(number(16, &u64::MAX.to_le_bytes()), "damaged");
    refused(number(24, &0u64.to_le_bytes()), "checksum");
    refused(number(32, b"\xff\xfe\0\x1b[2J"), "kt is missing");
    for at in [0, 1, 4095, 4096, 8 << 20, BYTES - 1] {
        refused(with(&|b| b[HEADER + at] ^= 0x10), "checksum is wrong: the file is damaged");
    }
    // Every byte of the header counts.
    let header = &good[..HEADER];
    let file = File::options().write(true).open(&path).unwrap();
    fs::write(&path, &good).unwrap();
    for at in (0..HEADER).filter(|at| !(24..32).contains(at)) {
        use std::os::unix::fs::FileExt;
        file.write_all_at(&[header[at] ^ 1], at as u64).unwrap();
        assert!(matches!(cache.find(&key), Found::Refused(_)) && !cache.has(&key), "byte {at}");
        file.write_all_at(&header[at..at + 1], at as u64).unwrap();
    }
    // `load` reports, `save` repairs.
    number(24, &0u64.to_le_bytes());
    assert!(cache.load(&key).is_none());
    let problems = cache.report().problems;
    let [problem] = &problems[..] else { panic!("{problems:?}") };
    assert!(problem.contains("packed again") && problem.contains(path.to_str().unwrap()), "{problem}");
    cache.save(&key, &[&payload(0)]);
    assert!(mapped(cache.find(&key)) == payload(0));
}

#[test]
fn what_was_made_for_something_else_is_refused() {
    let dir = Dir::new("cache-foreign");
    let (source, other_source) = (source(1), source(2));
    let layer = &source.layers()[0];
    let key = key(layer);
    let cache = PackedCache::new(&dir.0, &source);
    let other = |change: &dyn Fn(&mut LayerSpec)| {
        let mut layer = layer.clone();
        change(&mut layer);
        layer
    };
    let (wide, int8) = (other(&|l| l.hidden = 512), other(&|l| l.formats[2] = Format::Int8(Group::Of(32))));
    let (later, some) = (other(&|l| l.index = 2), [0, 1, 3]);
    let strangers = [
        (Key { tier: Tier::Avx512Vnni, ..key.clone() }, "tier is avx512vnni, avx2 is due"),
        (Key { layout_version: 6, ..key.clone() }, "layout is 6, 7 is due"),
        (Key { backend: "other", ..key.clone() }, "backend is other, some is due"),
        (Key { experts: &some, ..key.clone() }, "experts is 0-1,3, 0-3 is due"),
        (Key { layer: &later, ..key.clone() }, "layer is 2, 0 is due"),
        (Key { layer: &wide, ..key.clone() }, "gate is BF16 [256, 512], BF16 [256, 256] is due"),
        (Key { layer: &int8, ..key.clone() }, "down is INT8-g32 [256, 256], BF16 [256, 256] is due"),
    ];
    for (stranger, want) in &strangers {
        let path = cache.path(stranger);
        cache.save(stranger, &[&payload(0)]);
        if path != cache.path(&key) {
            fs::rename(path, cache.path(&key)).unwrap();
        }
        refused(cache.find(&key), want);
        assert!(!cache.has(&key));
    }
    let short = Key { bytes: BYTES - 64, ..key.clone() };
    cache.save(&short, &[&payload(0)[..BYTES - 64]]);
    refused(cache.find(&key), "damaged");
    // Only what a user chooses is in the name: the rest is replaced.
    assert_eq!(cache.path(&strangers[0].0), cache.path(&key));
    assert_eq!(cache.path(&strangers[1].0), cache.path(&key));
    assert_ne!(cache.path(&strangers[6].0), cache.path(&key));
    let other = PackedCache::new(&dir.0, &other_source);
    other.save(&key, &[&payload(0)]);
    refused(cache.find(&key), "the checkpoint has changed since");
    cache.save(&key, &[&payload(1)]);
    assert!(mapped(cache.find(&key)) == payload(1));
    assert_eq!(names(&dir.0).len(), 1);
    let problems = cache.report().problems;
    assert!(problems.is_empty(), "{problems:?}");
    cache.save(&key, &[&payload(0)[1..]]);
    assert!(cache.report().problems[0].contains("expected 9437248 elements"), "{:?}", cache.report());
}

#[test]
fn checkpoints_are_told_apart_by_their_files() {
    let dir = Dir::new("cache-checkpoint");
    let tensors = model(bf16);
    dir.write("config.json", common::config().to_string());
    let file = dir.write("model.safetensors", safetensors(&tensors));
    let print = || kt_core::open(&dir.0).unwrap().fingerprint().unwrap();
    let first = print();
    assert_eq!(print(), first);
    let time = fs::metadata(&file).unwrap().modified().unwrap();
    let touch = |time: SystemTime| File::options().write(true).open(&file).unwrap().set_modified(time).unwrap();
    touch(time - Duration::from_nanos(1_000_000_000));
    let touched = print();
    assert_ne!(touched, first);
    touch(time);
    assert_eq!(print(), first);
    // Another config, another header of the same length: with the old time.
    let bytes = fs::read(&file).unwrap();
    let mut config = common::config();
    config["vocab_size"] = 7.into();
    dir.write("config.json", config.to_string());
    assert_ne!(print(), first);
    dir.write("config.json", common::config().to_string());
    assert_eq!(print(), first);
    let mut renamed = tensors.clone();
    renamed.iter_mut().find(|t| t.name == "model.norm.weight").unwrap().name = "model.form.weight".into();
    fs::write(&file, safetensors(&renamed)).unwrap();
    assert_eq!(fs::metadata(&file).unwrap().len(), bytes.len() as u64);
    touch(time);
    assert_ne!(print(), first);
    fs::write(&file, &bytes).unwrap();
    touch(time);
    assert_eq!(print(), first);
    // What experts are re-encoded into is part of it.
    let source = kt_core::open(&dir.0).unwrap();
    let as_format = |format| Requantized::new(source.clone(), format).unwrap().fingerprint().unwrap();
    let [a, b] = [Format::Int8(Group::Row), Format::Int4(Group::Of(32))].map(as_format);
    assert!(a != b && a != first && a == as_format(Format::Int8(Group::Row)));

    let gguf = |model: Gguf, time: SystemTime| {
        let path = dir.write("model.gguf", model.bytes());
        File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
        kt_core::open(path).unwrap().fingerprint().unwrap()
    };
    let named = |name: &str| Gguf::model().text("general.name", name);
    let first = gguf(named("one"), time);
    assert_eq!(gguf(named("one"), time), first);
    assert_ne!(gguf(named("one"), time + Duration::from_secs(1)), first);
    assert_ne!(gguf(named("two"), time), first);
    assert_eq!(Gguf::model().open().unwrap().fingerprint(), None);

    // Made-up weights: by shape and seed. Bytes in memory: not at all.
    assert_eq!(self::source(1).fingerprint(), self::source(1).fingerprint());
    assert_ne!(self::source(1).fingerprint(), self::source(2).fingerprint());
    let memory = common::from_tensors(&common::config(), &tensors).unwrap();
    assert_eq!(memory.fingerprint(), None);
    let cache = PackedCache::new(dir.0.join("cache"), &memory);
    let key = key(&memory.layers()[0]);
    cache.save(&key, &[&payload(0)]);
    assert!(cache.load(&key).is_none() && !dir.0.join("cache").exists());
    assert!(cache.report().problems[0].contains("cannot be cached"), "{:?}", cache.report());
}

#[test]
fn what_is_no_plain_file_is_refused() {
    let dir = Dir::new("cache-strange");
    let source = source(1);
    let key = key(&source.layers()[0]);
    let cache = PackedCache::new(dir.0.join("cache"), &source);
    cache.save(&key, &[&payload(0)]);
    let path = cache.path(&key);
    // A link, even to what would be right: refused, and replaced without touching what it leads to.
    let elsewhere = dir.0.join("elsewhere");
    fs::rename(&path, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
    refused(cache.find(&key), "symbolic link");
    cache.save(&key, &[&payload(1)]);
    assert!(mapped(cache.find(&key)) == payload(1));
    assert!(fs::read(&elsewhere).unwrap()[HEADER..] == payload(0));
    // A pipe that nobody writes to.
    fs::remove_file(&path).unwrap();
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    refused(cache.find(&key), "not a plain file");
    // A directory: it stays, and so does nothing else.
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    refused(cache.find(&key), "not a plain file");
    assert!(cache.report().problems.is_empty());
    cache.save(&key, &[&payload(0)]);
    let problems = cache.report().problems;
    assert!(problems[0].contains("not written") && problems[0].contains("irectory"), "{problems:?}");
    assert_eq!(names(&dir.0.join("cache")), [path.file_name().unwrap().to_str().unwrap()]);
    // A cache directory that is a file.
    let cache = PackedCache::new(&elsewhere, &source);
    refused(cache.find(&key), "irectory");
    assert!(cache.store(&key, &[&payload(0)]).unwrap_err().to_string().contains("elsewhere"));
}

#[test]
fn a_reader_among_writers_sees_whole_files() {
    let dir = Dir::new("cache-writers");
    let source = source(1);
    let key = key(&source.layers()[0]);
    let writers: Vec<_> = (0..2).map(|_| child("write", &dir.0).spawn().unwrap()).collect();
    std::thread::scope(|scope| {
        for salt in [3, 4] {
            let (key, source, dir) = (&key, &source, &dir);
            scope.spawn(move || {
                for _ in 0..8 {
                    assert!(PackedCache::new(&dir.0, source).store(key, &[&payload(salt)]).unwrap());
                }
            });
        }
        let cache = PackedCache::new(&dir.0, &source);
        let mut seen = 0;
        while seen < 16 {
            match cache.find(&key) {
                Found::Mapped(bytes) => {
                    let salt = bytes[0] ^ payload(0)[0];
                    assert!([1, 3, 4].contains(&salt) && bytes == payload(salt));
                    seen += 1;
                }
                Found::Missing => assert_eq!(seen, 0),
                Found::Refused(why) => panic!("{why}"),
            }
        }
    });
    for mut writer in writers {
        assert!(writer.wait().unwrap().success());
    }
    assert_eq!(names(&dir.0).len(), 1, "{:?}", names(&dir.0));
    mapped(PackedCache::new(&dir.0, &source).find(&key));
}

#[test]
fn a_full_disk_leaves_nothing_broken() {
    let dir = Dir::new("cache-full");
    let source = source(1);
    let [key, other] = [0, 1].map(|layer| key(&source.layers()[layer]));
    let cache = PackedCache::new(&dir.0, &source);
    assert!(cache.store(&other, &[&payload(0)]).unwrap());
    // A limit of the length of files fails writes as a full disk does: in the middle, where space could not be looked at.
    let status = limited("trap '' XFSZ;", "fail", &dir.0);
    assert!(status.success(), "{status}");
    assert!(matches!(cache.find(&key), Found::Missing));
    assert!(mapped(cache.find(&other)) == payload(0));
    assert_eq!(names(&dir.0).len(), 1, "{:?}", names(&dir.0));
}

#[test]
fn a_small_disk_is_not_filled() {
    let dir = Dir::new("cache-small");
    // A disk of 1 MiB, in a mount namespace that ends with the child.
    let mount = r#"mount -t tmpfs -o size=1m kt "$1" || exit 99; shift; exec "$@""#;
    let test = std::env::current_exe().unwrap();
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", mount, "sh"]).arg(&dir.0).arg(test);
    match as_child(command, "small", &dir.0).status() {
        Ok(status) if status.success() => {}
        Ok(status) if matches!(status.code(), Some(1 | 99)) => {
            println!("skipped: no tmpfs can be mounted here (it takes root)")
        }
        Ok(status) => panic!("{status}"),
        Err(e) => println!("skipped: unshare: {e}"),
    }
}

#[test]
fn a_killed_writer_leaves_nothing_broken() {
    use std::os::unix::process::ExitStatusExt;
    let dir = Dir::new("cache-killed");
    let source = source(1);
    let key = key(&source.layers()[0]);
    let cache = PackedCache::new(&dir.0, &source);
    // Killed by the system in the middle of writing.
    let status = limited("", "fail", &dir.0);
    assert!(status.signal().is_some(), "{status}");
    assert!(matches!(cache.find(&key), Found::Missing));
    let left = names(&dir.0);
    assert!(left.len() == 1 && left[0].ends_with(".tmp"), "{left:?}");
    let length = fs::metadata(dir.0.join(&left[0])).unwrap().len();
    assert!(length > 0 && length < BYTES as u64, "{length}");
    // What somebody else is writing now looks alike, but is locked.
    let mut held = cache.path(&key).into_os_string();
    held.push(".1-0.tmp");
    let held = PathBuf::from(held);
    let file = File::create(&held).unwrap();
    file.lock().unwrap();
    assert!(cache.store(&key, &[&payload(0)]).unwrap());
    assert!(mapped(cache.find(&key)) == payload(0));
    assert!(held.exists() && !dir.0.join(&left[0]).exists(), "{:?}", names(&dir.0));
    // Closing it would not do: a child that another test is about to start may have it open still.
    file.unlock().unwrap();
    assert!(cache.store(&key, &[&payload(0)]).unwrap());
    assert_eq!(names(&dir.0).len(), 1, "{:?}", names(&dir.0));
}

/// The variable that tells a child its directory.
const DIR: &str = "KT_TEST_CACHE_DIR";

/// A child process that does what [`child_process`] has for `what`.
fn child(what: &str, dir: &Path) -> Command {
    as_child(Command::new(std::env::current_exe().unwrap()), what, dir)
}

fn as_child(mut command: Command, what: &str, dir: &Path) -> Command {
    command.args(["--ignored", "--exact", "child_process"]).env("KT_TEST_CACHE_DO", what).env(DIR, dir);
    command
}

/// Runs a child that can write files of no more than 4 MiB, in a shell that first does `before`.
fn limited(before: &str, what: &str, dir: &Path) -> ExitStatus {
    // POSIX counts in blocks of 512 bytes; a shell that counts in others comes out below the payload too.
    let script = format!("{before} ulimit -c 0; ulimit -f 8192; exec \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &script, "sh"]).arg(std::env::current_exe().unwrap());
    as_child(command, what, dir).status().unwrap()
}

#[test]
#[ignore = "is run by other tests, as a process of its own"]
fn child_process() {
    let (Ok(what), Some(dir)) = (std::env::var("KT_TEST_CACHE_DO"), std::env::var_os(DIR)) else { return };
    let source = source(1);
    let key = key(&source.layers()[0]);
    let cache = PackedCache::new(PathBuf::from(&dir), &source);
    match what.as_str() {
        "write" => (0..8).for_each(|_| assert!(cache.store(&key, &[&payload(1)]).unwrap())),
        "fail" => {
            let error = cache.store(&key, &[&payload(0)]).unwrap_err().to_string();
            assert!(error.contains(".tmp") && error.contains("too large"), "{error}");
            cache.save(&key, &[&payload(0)]);
            assert!(cache.report().problems[0].contains("not written"), "{:?}", cache.report());
        }
        "small" => {
            let error = cache.store(&key, &[&payload(0)]).unwrap_err().to_string();
            assert!(error.contains("9441344 bytes are needed here") && error.contains("are free"), "{error}");
            assert!(names(dir.as_ref()).is_empty());
            let small = Key { bytes: 4096, ..key.clone() };
            assert!(cache.store(&small, &[&payload(0)[..4096]]).unwrap());
            assert_eq!(mapped(cache.find(&small)), payload(0)[..4096]);
        }
        other => panic!("{other}"),
    }
}
