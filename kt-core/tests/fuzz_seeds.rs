//! The seeds of the fuzz targets (`fuzz/`): each is a checkpoint that opens, so that what the fuzzer changes begins behind the doors; and some thousand changes of
//! each, always the same, do not make readers panic. That is no fuzzing, which looks for new paths; it is what runs with every test.

#[path = "../../fuzz/fuzz_targets/input.rs"]
mod input;
#[path = "../../fuzz/fuzz_targets/touch.rs"]
mod touch;

use std::path::Path;

use kt_core::source::gguf::GgufSource;
use kt_core::source::safetensors::SafetensorsSource;
use kt_core::testing::Random;
use kt_core::{Result, WeightSource};

/// Changes of each seed.
const CHANGES: usize = 5000;

fn directory(data: &[u8]) -> Result<Box<dyn WeightSource>> {
    Ok(Box::new(SafetensorsSource::from_files("seed", input::directory(data))?))
}

fn gguf(data: &[u8]) -> Result<Box<dyn WeightSource>> {
    Ok(Box::new(GgufSource::from_bytes("seed.gguf", input::parts(data))?))
}

/// What a seed becomes: a byte or a digit changed, or some bytes left out, twice, or moved.
fn change(seed: &[u8], random: &mut Random) -> Vec<u8> {
    let mut data = seed.to_vec();
    for _ in 0..1 + random.below(3) {
        let at = random.below(data.len());
        let end = (at + 1 + random.below(16)).min(data.len());
        match random.below(6) {
            0 => data[at] ^= 1 << random.below(8),
            1 => data[at] = random.below(256) as u8,
            2 => drop(data.drain(at..end)),
            3 => {
                let again = data[at..end].to_vec();
                data.splice(at..at, again);
            }
            4 => data.truncate(at.max(1)),
            // What headers say of sizes and places is what matters most.
            _ => match data.iter().skip(at).position(u8::is_ascii_digit) {
                Some(next) => data[at + next] = b"0123456789"[random.below(10)],
                None => data[at] = 0xff,
            },
        }
        if data.is_empty() {
            break;
        }
    }
    data
}

fn all_seeds(folder: &str, open: fn(&[u8]) -> Result<Box<dyn WeightSource>>, least: usize) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds").join(folder);
    let mut seeds: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    seeds.sort();
    assert!(seeds.len() >= least, "{} seeds in {}", seeds.len(), folder.display());
    let mut opened = 0;
    for path in seeds {
        let seed = std::fs::read(&path).unwrap();
        let source = open(&seed).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        touch::touch(&*source);
        for layer in source.layers() {
            for proj in kt_core::Proj::ALL {
                source.matrix(layer.index, 0, proj).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            }
        }
        let mut random = Random(1);
        for _ in 0..CHANGES {
            if let Ok(source) = open(&change(&seed, &mut random)) {
                touch::touch(&*source);
                opened += 1;
            }
        }
    }
    assert!(opened > CHANGES, "of all changes {opened} opened: too few get behind the doors");
}

#[test]
fn seeds_of_directories_open_and_their_changes_do_not_panic() {
    all_seeds("safetensors_dir", directory, 25);
}

#[test]
fn seeds_of_gguf_files_open_and_their_changes_do_not_panic() {
    all_seeds("gguf", gguf, 11);
}
