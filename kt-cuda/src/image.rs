//! Code for a device: compiled by NVRTC and kept on disk, or PTX that came with this crate.
//!
//! A file of the cache begins with a text that names all that its code depends on; it is compared with the one that is due and never
//! believed. What does not fit, or has another checksum, is told, compiled again and replaced.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use kt_core::Unsupported;
use xxhash_rust::xxh3::xxh3_128;

use crate::ffi::{Compiler, Target};
use crate::layout::Codes;

const TOOLS: &str = include_str!("../kernels/tools.cu");
const FORMATS: &str = include_str!("../kernels/formats.cu");
const PRODUCTS: &str = include_str!("../kernels/products.cu");
const ENTRIES: &str = include_str!("../kernels/entries.cu");
const ROWS: &str = include_str!("../kernels/rows.cu");

/// The architecture of the PTX that comes with this crate: the first with `mma` of BF16.
const PTX_ARCH: i32 = 80;

/// PTX of all sets; of the products without those for many rows, as the ones for few do these too.
macro_rules! prebuilt {
    ($($set:pat => $file:literal,)*) => {
        fn ptx(set: Set) -> &'static str {
            match set {
                $($set => include_str!(concat!("../kernels/ptx/", $file, ".ptx")),)*
            }
        }
    };
}
prebuilt! {
    Set::Products(Codes::Bf16) => "bf16",
    Set::Products(Codes::Fp8) => "fp8",
    Set::Products(Codes::Fp8Block) => "fp8_block",
    Set::Products(Codes::Mxfp8) => "mxfp8",
    Set::Products(Codes::Mxfp4) => "mxfp4",
    Set::Products(Codes::Int8) => "int8",
    Set::Products(Codes::Int8Zero) => "int8_zero",
    Set::Products(Codes::Int4) => "int4",
    Set::Products(Codes::Int4Zero) => "int4_zero",
    Set::Products(Codes::Q4K) => "q4_k",
    Set::Products(Codes::Q6K) => "q6_k",
    Set::Rows => "rows",
}

/// A set of kernels that is compiled together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Set {
    /// The products of a format.
    Products(Codes),
    /// What is around them.
    Rows,
}

impl Set {
    pub fn name(self) -> &'static str {
        match self {
            Set::Products(codes) => codes.name(),
            Set::Rows => "rows",
        }
    }

    pub fn source(self) -> String {
        let last = if self == Set::Rows { ROWS } else { ENTRIES };
        [TOOLS, FORMATS, PRODUCTS, last].concat()
    }

    /// Without contraction of products and sums where none is written, so that all kernels round alike.
    pub fn options(self) -> Vec<String> {
        vec!["--std=c++17".into(), "--fmad=false".into(), format!("-DKT_FORMAT={}", self.name())]
    }

    /// What tells the source and its options from any other.
    fn fingerprint(self) -> u128 {
        xxh3_128((self.source() + &self.options().join(" ")).as_bytes())
    }
}

/// Code for a device.
pub(crate) struct Image {
    pub code: Vec<u8>,
    /// Whether it has the kernels for many rows.
    pub whole: bool,
    /// How it was come by.
    pub how: String,
}

/// Where code comes from.
pub(crate) struct Images {
    /// NVRTC, or why there is none.
    pub compiler: Result<Compiler, String>,
    /// Where compiled code is kept.
    pub cache: Option<PathBuf>,
}

impl Images {
    /// Code of a set for an architecture (90 is sm_90).
    ///
    /// # Errors
    /// What the compiler says.
    pub fn get(&self, set: Set, arch: i32) -> Result<Image, Unsupported> {
        let compiler = match &self.compiler {
            Ok(compiler) => compiler,
            Err(why) => return Ok(prebuilt(set, why)),
        };
        let (major, minor) = compiler.version;
        // A device that is newer than the compiler gets PTX of the last one before it, which its driver translates.
        let target = match compiler.archs.iter().copied().filter(|&a| a <= arch).max() {
            Some(known) if known == arch => Target::Machine(arch),
            Some(before) if before >= PTX_ARCH => Target::Ptx(before),
            _ => return Ok(prebuilt(set, &format!("NVRTC {major}.{minor} does not know sm_{arch}"))),
        };
        let (name, source) = (set.name(), set.fingerprint());
        let header =
            format!("kt-cuda 1\nkernels {name}\nsource {source:032x}\ntarget {target}\nnvrtc {major}.{minor}\n");
        let ending = if matches!(target, Target::Ptx(_)) { "ptx" } else { "cubin" };
        let file = self.cache.as_ref().map(|dir| dir.join(format!("kt-cuda-{name}-{target}.{ending}")));
        if let Some(file) = &file {
            match read(file, &header) {
                Ok(Some(code)) => return Ok(Image { code, whole: true, how: format!("from {}", file.display()) }),
                Ok(None) => {}
                Err(why) => tracing::warn!(file = %file.display(), "compiled kernels are not used: {why}"),
            }
        }
        let compiled = compiler.compile(&set.source(), &set.options(), target);
        let (code, _) = compiled.map_err(|why| Unsupported::new(format!("kernels of {name} for {target}: {why}")))?;
        if let Some(file) = &file
            && let Err(why) = write(file, &header, &code)
        {
            tracing::warn!(file = %file.display(), "compiled kernels are not kept: {why}");
        }
        Ok(Image { code, whole: true, how: format!("compiled for {target} by NVRTC {major}.{minor}") })
    }
}

fn prebuilt(set: Set, why: &str) -> Image {
    let how = format!("PTX for compute_{PTX_ARCH} without kernels for many rows, as {why}");
    Image { code: ptx(set).into(), whole: false, how }
}

/// The code of a file with this header, `None` where there is no file.
fn read(file: &Path, header: &str) -> Result<Option<Vec<u8>>, String> {
    let mut bytes = match fs::read(file) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e.to_string()),
    };
    if !bytes.starts_with(header.as_bytes()) {
        return Err("it is of another version, source or architecture".into());
    }
    let image = bytes.split_off(header.len());
    match image.split_first_chunk::<16>() {
        Some((sum, image)) if xxh3_128(image).to_le_bytes() == *sum => Ok(Some(image.to_vec())),
        _ => Err("its checksum does not fit".into()),
    }
}

/// Writes beside the file and renames, so that readers see all of it or nothing.
fn write(file: &Path, header: &str, image: &[u8]) -> std::io::Result<()> {
    if let Some(dir) = file.parent() {
        fs::create_dir_all(dir)?;
    }
    let beside = file.with_extension(format!("{}.part", std::process::id()));
    let mut out = fs::File::create(&beside)?;
    let written = [header.as_bytes(), &xxh3_128(image).to_le_bytes(), image].iter().try_for_each(|b| out.write_all(b));
    let renamed = written.and_then(|()| fs::rename(&beside, file));
    if renamed.is_err() {
        let _ = fs::remove_file(&beside);
    }
    renamed
}

#[cfg(test)]
mod tests;
