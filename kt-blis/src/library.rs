//! Which library, what it can do here, and whether its products may be cut as this runtime cuts them.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use kt_core::Unsupported;
use kt_core::cpu::input::BLOCK;
use kt_core::cpu::memory::AlignedBytes;
use kt_core::cpu::tier::Tier;
use kt_core::format::float::{bf16_to_f32, f32_to_bf16};

use crate::ffi::{Aocl, DEPTHS, Opened, PANEL, Sgemm};
use crate::kernel::{COLUMNS, LAYOUT};

/// What is looked for when no path is given, the best first: AOCL-DLP, AMD's BLIS (AOCL-BLAS), any BLIS.
pub const NAMES: [&str; 6] =
    ["libaocl-dlp.so", "libblis-mt.so.5", "libblis-mt.so", "libblis.so.5", "libblis.so.4", "libblis.so"];

/// Numbers of rows that a product of floats is called with, if their bits agree: see [`Steady`].
const CALLS: [usize; 5] = [128, 32, 8, 4, 1];

/// A BLIS library that was opened, tried out, and never will be closed.
pub struct Library {
    name: String,
    /// What runs it and how it stands, for `explain`: `BLIS 0.9.0 skx, slower where measured`.
    pub(crate) label: String,
    /// AOCL's product of signed bytes.
    pub(crate) int8: Result<Aocl<i8, i32>, String>,
    pub(crate) bf16: Result<Steady<Aocl<u16, f32>>, String>,
    pub(crate) sgemm: Result<Steady<Sgemm>, String>,
    pub(crate) how: How,
    /// Of what the library makes of weights: it may be another with another version.
    pub(crate) layout: u32,
}

/// Lines for `explain`.
pub(crate) struct How {
    pub int8: &'static str,
    pub int4: &'static str,
    pub bf16: &'static str,
    pub f32: &'static str,
    /// The same for integer codes and for BF16, with what stands against the product made for them.
    pub f32_codes: &'static str,
    pub f32_bf16: &'static str,
}

/// A product of floats, with the numbers of rows for which it gives the same bits, whichever row is where: the largest first.
///
/// A BLAS has several kernels and chooses by the sizes of the matrices; some of them add in another order. A token's bits would then depend
/// on how many others there are. So columns come in blocks of 128, outputs in panels of 64, and rows in these numbers, filled up with
/// zeros: few shapes, all of which are compared when the library is opened.
pub(crate) struct Steady<F> {
    pub function: F,
    pub calls: Vec<usize>,
}

impl<F> Steady<F> {
    /// Cuts `rows` into calls: the first row and number of each. The last may go beyond the end.
    pub fn calls(&self, rows: usize) -> impl Iterator<Item = (usize, usize)> {
        let mut start = 0;
        std::iter::from_fn(move || {
            let left = rows.checked_sub(start).filter(|&left| left > 0)?;
            let fits = self.calls.iter().find(|&&m| m <= left).or(self.calls.last());
            let (at, m) = (start, *fits?);
            start += m;
            Some((at, m))
        })
    }

    /// The most rows that the calls for `rows` go over.
    pub fn padded(&self, rows: usize) -> usize {
        rows + self.largest()
    }

    /// The largest number of rows of a call.
    pub fn largest(&self) -> usize {
        self.calls.first().copied().unwrap_or(1)
    }
}

impl Library {
    /// Opens the library at a path; or, without one, the first of [`NAMES`] that can multiply here. One that was opened before is given again.
    ///
    /// # Errors
    /// Every name that was tried, with the dynamic linker's own words or what the library lacks.
    pub fn open(path: Option<&Path>) -> Result<&'static Library, Unsupported> {
        static OPENED: Mutex<Vec<(Option<PathBuf>, &'static Library)>> = Mutex::new(Vec::new());
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, library)) = opened.iter().find(|(p, _)| p.as_deref() == path) {
            return Ok(library);
        }
        let names: Vec<&OsStr> = match path {
            Some(path) => vec![path.as_os_str()],
            None => NAMES.iter().map(OsStr::new).collect(),
        };
        let mut tried = Vec::new();
        for name in names {
            match Library::try_out(name) {
                Ok(library) => {
                    let library: &'static Library = Box::leak(Box::new(library));
                    opened.push((path.map(Into::into), library));
                    return Ok(library);
                }
                Err(why) => tried.push(format!("{}: {why}", name.display())),
            }
        }
        let advice = match path {
            Some(_) => "give the path of AOCL-DLP, AOCL-BLAS or BLIS",
            None => "install AOCL or BLIS (Debian: libblis4-serial), or give the library's path",
        };
        Err(Unsupported::new(format!("no BLIS library; tried {}; {advice}", tried.join("; "))))
    }

    /// The name or path that it was opened by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Why AOCL's int8 products are not used: symbols that are missing, or what the CPU lacks.
    pub fn without_int8(&self) -> Option<&str> {
        self.int8.as_ref().err().map(String::as_str)
    }

    /// Why AOCL's bf16 products are not used.
    pub fn without_bf16(&self) -> Option<&str> {
        self.bf16.as_ref().err().map(String::as_str)
    }

    /// Why `cblas_sgemm` is not used.
    pub fn without_sgemm(&self) -> Option<&str> {
        self.sgemm.as_ref().err().map(String::as_str)
    }

    fn try_out(name: &OsStr) -> Result<Library, String> {
        let library = Opened::open(name)?;
        let name = name.display().to_string();
        let lacks = |names: Vec<String>| format!("has no {}", names.join(", "));
        // AOCL's functions print and do nothing on a CPU without these instructions, so they are not asked.
        let needs = |tier: Tier| match &tier.missing()[..] {
            _ if !library.wide_dimensions() => Err("has matrix dimensions of 32 bits".into()),
            [] => Ok(()),
            missing => Err(format!("needs {}, which this CPU lacks", missing.join(", "))),
        };
        let int8 = library.int8().map_err(|names| lacks(names) + " (not built with --enable-addon=aocl_gemm?)");
        let int8 = int8.and_then(|f| needs(Tier::Avx512Vnni).and_then(|()| f.sized())).and_then(exact);
        let bf16 = library.bf16().map_err(lacks);
        let bf16 = bf16.and_then(|f| needs(Tier::Avx512Bf16).and_then(|()| f.sized())).and_then(steady_bf16);
        let sgemm = library.sgemm().map_err(lacks).and_then(steady_sgemm);
        if let (Err(a), Err(b), Err(c)) = (&int8, &bf16, &sgemm) {
            return Err(format!("it {a}; it {b}; it {c}"));
        }
        let architectures = library.architectures().unwrap_or_default();
        let label = match (library.version(), architectures.last()) {
            (Some(version), Some(architecture)) => format!("BLIS {version} {architecture}"),
            (Some(version), None) => format!("BLIS {version}"),
            _ => Path::new(&name).file_name().map_or_else(|| name.clone(), |file| file.display().to_string()),
        };
        // See the README: what `Blis::rank` follows from.
        let label = label + if int8.is_ok() || bf16.is_ok() { ", not measured" } else { ", slower where measured" };
        let generic = match generic(&architectures) {
            Some(advice) if sgemm.is_ok() => {
                tracing::warn!(library = %name, "{advice}");
                format!("; {advice}")
            }
            _ => String::new(),
        };
        let leak = |text: String| -> &'static str { text.leak() };
        let f32 = format!("cblas_sgemm of {name}, decoded to f32 by {PANEL} outputs, from the map{generic}");
        let without = |f32: &str, what: &str, why: Option<&String>| match why {
            Some(why) => format!("{f32}; for {what} it {why}"),
            None => f32.into(),
        };
        let how = How {
            int8: leak(format!("aocl_gemm_s8s8s32os32 of {name}, reordered by {PANEL} outputs")),
            int4: leak(format!("aocl_gemm_s8s8s32os32 of {name}, unpacked to int8 by {PANEL} outputs, from the map")),
            bf16: leak(format!("aocl_gemm_bf16bf16f32of32 of {name}, reordered by {PANEL} outputs")),
            f32: leak(f32.clone()),
            f32_codes: leak(without(&f32, "int8", int8.as_ref().err())),
            f32_bf16: leak(without(&f32, "bf16", bf16.as_ref().err())),
        };
        let layout = layout(int8.as_ref().ok(), bf16.as_ref().ok().map(|bf16| &bf16.function));
        Ok(Library { name, label, int8, bf16, sgemm, how, layout })
    }
}

/// What to do where a library has chosen the last of its architectures: kernels for CPUs that it does not know.
fn generic(architectures: &[String]) -> Option<String> {
    if architectures.last()? != "generic" {
        return None;
    }
    // What these need this crate needs too. By number: BLIS 0.9 takes any name for number 0.
    let number = |better| Some((better, architectures.iter().position(|name| name == better)?));
    let better = ["zen3", "haswell"].into_iter().find_map(number);
    let what = "it does not know this CPU and is slow";
    Some(match better {
        Some((name, number)) => format!("{what}: set BLIS_ARCH_TYPE={number} ({name}) before the program starts"),
        None => format!("{what}; a later version may know it"),
    })
}

/// Test numbers, the same in every run: about evenly spread bits.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 32) as u32
    }

    fn byte(&mut self) -> i8 {
        (self.next() >> 24) as i8
    }

    /// -1 to 1.
    fn float(&mut self) -> f32 {
        (self.next() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Compares the product of signed bytes with plain sums, of all codes that there are.
fn exact(function: Aocl<i8, i32>) -> Result<Aocl<i8, i32>, String> {
    for (m, k) in [(1, 32), (7, 128), (70, 32)] {
        let mut numbers = Numbers(m as u64);
        let bytes = function.reordered_bytes(k);
        let a: Vec<i8> = (0..m * k).map(|_| numbers.byte()).collect();
        let b: Vec<i8> = (0..PANEL * k).map(|_| numbers.byte()).collect();
        let mut reordered = AlignedBytes::default();
        function.reorder(&b, k, reordered.get(bytes));
        let mut c = vec![i32::MIN; m * PANEL];
        function.multiply((m, k), (&a, k), reordered.read(bytes), [1, 0], &mut c);
        for (i, c) in c.iter().enumerate() {
            let (a, b) = (&a[i / PANEL * k..][..k], &b[i % PANEL * k..][..k]);
            let want: i32 = a.iter().zip(b).map(|(&a, &b)| i32::from(a) * i32::from(b)).sum();
            if *c != want {
                return Err(format!("multiplies int8 wrongly: {c} in place of {want} for {m} rows of {k}"));
            }
        }
    }
    Ok(function)
}

/// Rows of the comparison: twice the largest call.
const ROWS: usize = 2 * CALLS[0];

fn steady_bf16(function: Aocl<u16, f32>) -> Result<Steady<Aocl<u16, f32>>, String> {
    let bytes = function.reordered_bytes(BLOCK);
    let narrow = |x: &[f32]| x.iter().map(|&x| f32_to_bf16(x)).collect::<Vec<u16>>();
    let reorder = |b: &[f32]| {
        let mut reordered = AlignedBytes::default();
        function.reorder(&narrow(b), BLOCK, reordered.get(bytes));
        reordered
    };
    let multiply = |m: usize, a: &[f32], b: &AlignedBytes, beta: f32, c: &mut [f32]| {
        function.multiply((m, BLOCK), (&narrow(a), BLOCK), b.read(bytes), [1.0, beta], c);
    };
    let calls = steady("bf16", |x| bf16_to_f32(f32_to_bf16(x)), reorder, multiply)?;
    Ok(Steady { function, calls })
}

fn steady_sgemm(function: Sgemm) -> Result<Steady<Sgemm>, String> {
    // The weights lie in the same way as in a product.
    let bytes = PANEL * COLUMNS * 4;
    let spread = |b: &[f32]| {
        let mut memory = AlignedBytes::default();
        let panel: &mut [f32] = bytemuck::cast_slice_mut(memory.get(bytes));
        for (to, b) in panel.chunks_exact_mut(COLUMNS).zip(b.chunks_exact(BLOCK)) {
            to[..BLOCK].copy_from_slice(b);
        }
        memory
    };
    let multiply = |m: usize, a: &[f32], b: &AlignedBytes, beta: f32, c: &mut [f32]| {
        function.multiply((m, BLOCK), a, (bytemuck::cast_slice(b.read(bytes)), COLUMNS), beta, c);
    };
    let calls = steady("f32", |x| x, spread, multiply)?;
    Ok(Steady { function, calls })
}

/// The numbers of rows of [`CALLS`] for which a product gives the same bits as for the largest that is steady in itself. All rows are
/// multiplied by calls of each number, as they are and moved by some rows, so that each is in different places of a call.
fn steady(
    kind: &str,
    round: impl Fn(f32) -> f32,
    prepare: impl Fn(&[f32]) -> AlignedBytes,
    multiply: impl Fn(usize, &[f32], &AlignedBytes, f32, &mut [f32]),
) -> Result<Vec<usize>, String> {
    let mut numbers = Numbers(1);
    let [a, b] = [ROWS, PANEL]
        .map(|rows| [(); 2].map(|()| (0..rows * BLOCK).map(|_| round(numbers.float())).collect::<Vec<f32>>()));
    let prepared = [prepare(&b[0]), prepare(&b[1])];
    // Of all rows moved up by `shift`, the products by calls of `m`, in the places of the rows as they were.
    let product = |m: usize, shift: usize| {
        let mut c = AlignedBytes::default();
        let c: &mut [f32] = bytemuck::cast_slice_mut(c.get(ROWS * PANEL * 4));
        c.fill(f32::NAN);
        for block in 0..2 {
            let mut moved = AlignedBytes::default();
            let moved: &mut [f32] = bytemuck::cast_slice_mut(moved.get(ROWS * BLOCK * 4));
            moved.copy_from_slice(&a[block]);
            moved.rotate_left(shift * BLOCK);
            for (a, c) in moved.chunks_exact(m * BLOCK).zip(c.chunks_exact_mut(m * PANEL)) {
                multiply(m, a, &prepared[block], block as f32, c);
            }
        }
        c.rotate_right(shift * PANEL);
        c.to_vec()
    };
    let bits = |c: &[f32]| c.iter().map(|c| c.to_bits()).collect::<Vec<u32>>();
    let mut first: Option<Vec<u32>> = None;
    let mut calls = Vec::new();
    for m in CALLS {
        let c = product(m, 0);
        for (i, c) in c.iter().enumerate() {
            let want: f64 = (0..2)
                .flat_map(|block| {
                    a[block][i / PANEL * BLOCK..][..BLOCK].iter().zip(&b[block][i % PANEL * BLOCK..][..BLOCK])
                })
                .map(|(&a, &b)| f64::from(a) * f64::from(b))
                .sum();
            let error = (f64::from(*c) - want).abs();
            // Sums of 256 products below 1: rounding adds up to less than 1e-5.
            if error.is_nan() || error > 1e-4 {
                return Err(format!("multiplies {kind} wrongly: {c} in place of {want} for {m} rows"));
            }
        }
        let c = bits(&c);
        let same = |first: &Vec<u32>| *first == c;
        if first.as_ref().is_none_or(same) && [1, 3, 6].into_iter().all(|shift| bits(&product(m, shift)) == c) {
            calls.push(m);
            first.get_or_insert(c);
        }
    }
    if calls.is_empty() {
        return Err(format!("gives a row of {kind} other bits in another place, for any of {CALLS:?} rows"));
    }
    Ok(calls)
}

/// A number for how the library reorders weights, and for how the panels are laid out.
fn layout(int8: Option<&Aocl<i8, i32>>, bf16: Option<&Aocl<u16, f32>>) -> u32 {
    let mut all = LAYOUT.to_le_bytes().to_vec();
    let mut numbers = Numbers(2);
    let mut memory = AlignedBytes::default();
    for k in DEPTHS {
        let codes: Vec<i8> = (0..PANEL * k).map(|_| numbers.byte()).collect();
        if let Some(f) = int8 {
            let out = memory.get(f.reordered_bytes(k));
            f.reorder(&codes, k, out);
            all.extend_from_slice(out);
        }
    }
    if let Some(f) = bf16 {
        let bits: Vec<u16> = (0..PANEL * BLOCK).map(|_| f32_to_bf16(numbers.float())).collect();
        let out = memory.get(f.reordered_bytes(BLOCK));
        f.reorder(&bits, BLOCK, out);
        all.extend_from_slice(out);
    }
    xxhash_rust::xxh3::xxh3_64(&all) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_advice_for_unknown_cpus_is_a_number_of_the_library() {
        let list = |names: &[&str]| names.iter().map(|&n| n.to_owned()).collect::<Vec<_>>();
        assert_eq!(generic(&list(&["skx", "haswell"])), None);
        assert_eq!(generic(&[]), None);
        let advice = generic(&list(&["knl", "haswell", "zen", "generic"])).unwrap();
        assert!(advice.contains("BLIS_ARCH_TYPE=1 (haswell)"), "{advice}");
        let advice = generic(&list(&["zen", "generic"])).unwrap();
        assert!(!advice.contains("BLIS_ARCH_TYPE") && advice.contains("later version"), "{advice}");
    }

    #[test]
    fn calls_cover_all_rows_with_the_largest_that_fit() {
        let steady = Steady { function: (), calls: vec![128, 32, 8] };
        let calls = |rows| steady.calls(rows).collect::<Vec<_>>();
        assert_eq!(calls(0), []);
        assert_eq!(calls(1), [(0, 8)]);
        assert_eq!(calls(171), [(0, 128), (128, 32), (160, 8), (168, 8)]);
        for rows in 1..300 {
            let end = calls(rows).iter().fold(0, |end, &(at, m)| if at == end { at + m } else { usize::MAX });
            assert!((rows..=steady.padded(rows)).contains(&end), "{rows} rows: {:?}", calls(rows));
        }
    }
}
