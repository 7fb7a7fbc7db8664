//! AOCL's products by a test double (`double/aocl.rs`), and what is said of libraries that cannot be used.

#![cfg(target_arch = "x86_64")]

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use kt_blis::Library;
use kt_core::cpu::input::{BLOCK, InputLayout, Inputs};
use kt_core::cpu::kernel::{Kernel, Outputs, Scratch, Weights};
use kt_core::cpu::memory::AlignedBytes;
use kt_core::cpu::tier::Tier;
use kt_core::format::float::f32_to_bf16;
use kt_core::source::synthetic::SyntheticSource;
use kt_core::testing::Random;
use kt_core::{Backend, Candidate, Format, Group, Matrix, RuntimeBuilder};

/// Compiles the double as a shared library, once: another test may have it open.
fn double(variant: Option<&str>) -> PathBuf {
    static MADE: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    let name = format!("libdouble-{}.so", variant.unwrap_or("aocl"));
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if made.contains(&out) {
        return out;
    }
    let beside = Path::new(env!("CARGO")).with_file_name("rustc");
    let rustc = if beside.exists() { beside } else { "rustc".into() };
    let mut command = Command::new(rustc);
    command.args(["--edition=2024", "--crate-type=cdylib", "-O", "-Aunexpected_cfgs", "-Adead_code", "-Aunused"]);
    command.args(variant.iter().flat_map(|v| ["--cfg", v])).arg("-o").arg(&out);
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/double/aocl.rs"));
    let ran = command.output().expect("rustc, as for this test");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    made.push(out.clone());
    out
}

fn open(path: impl AsRef<Path>) -> Result<&'static Library, String> {
    Library::open(Some(path.as_ref())).map_err(|why| why.to_string())
}

fn has(tier: Tier) -> bool {
    let missing = tier.missing();
    if !missing.is_empty() {
        eprintln!("skipped: this CPU lacks {}", missing.join(", "));
    }
    missing.is_empty()
}

#[test]
fn conformance_of_aocl_products() {
    if has(Tier::Avx512Vnni) {
        let path = double(None);
        kt_core::testing::conformance(|cap| kt_blis::backend_at(&path, cap));
    }
}

#[test]
fn what_is_faster_or_not_measured_is_told_beside_the_backend_that_is_chosen() {
    if !has(Tier::Avx512Vnni) {
        return;
    }
    let builder = RuntimeBuilder::new(|cap| vec![Candidate::new("avx512", kt_avx512::backend(cap))]);
    let builder = builder.with_backend(kt_blis::backend_at(&double(None), Tier::Amx).unwrap());
    let source = SyntheticSource::builder().layers(1).format(Format::Int8(Group::Row)).build().unwrap();
    let layer = builder.build().unwrap().plan(&source).unwrap().layers.remove(0);
    assert_eq!(layer.backend, "avx512");
    let (_, why) = layer.declined.iter().find(|(name, _)| name == "blis").unwrap();
    assert!(why.starts_with("ranks below avx512 (libdouble-aocl.so, not measured against"), "{why}");
}

#[test]
fn formats_take_the_product_made_for_them() {
    if !has(Tier::Avx512Bf16) {
        return;
    }
    let library = open(double(None)).unwrap();
    assert_eq!((library.without_int8(), library.without_bf16()), (None, None));
    assert_eq!(library.without_sgemm(), Some("has no cblas_sgemm"));
    let kernel = kt_blis::Blis::new(library, Tier::Amx).unwrap();
    let layout = |format| kernel.accepts(format, 64, 384).map(|(layout, _)| layout).map_err(|why| why.to_string());
    for (format, columns) in [
        (Format::Int8(Group::Row), 128),
        (Format::Int8Asym(Group::Of(128)), 128),
        (Format::Int8Offset(Group::Of(96)), 32),
        (Format::Int4(Group::Of(32)), 32),
        (Format::Int4Asym(Group::Of(128)), 128),
    ] {
        let layout = layout(format);
        assert!(matches!(layout, Ok(InputLayout::Int8 { group, .. }) if group == columns), "{format}: {layout:?}");
        let packed = kernel.packed_bytes(format, 64, 384).is_some();
        assert_eq!(packed, !matches!(format, Format::Int4(_) | Format::Int4Asym(_)), "{format}");
    }
    assert_eq!(layout(Format::Bf16), Ok(InputLayout::Bf16));
    for format in [Format::Int4(Group::Of(16)), Format::Q8_0, Format::F32] {
        let why = layout(format).unwrap_err();
        assert!(why.contains("has no cblas_sgemm") && why.contains("multiples of 32"), "{format}: {why}");
    }
}

#[test]
fn a_cap_below_the_cpu_is_refused() {
    let path = double(Some("stock"));
    let best = Tier::detect(Tier::Amx);
    if best <= Tier::Avx2 {
        return eprintln!("skipped: there is no tier to cap");
    }
    let why = kt_blis::backend_at(&path, Tier::Avx2).err().expect("a refusal").to_string();
    assert!(why.contains("limited to tier avx2") && why.contains("chooses its instructions itself"), "{why}");
    assert_eq!(kt_blis::backend_at(&path, Tier::Amx).map_err(|e| e.to_string()).unwrap().name(), "blis");
}

#[test]
fn stock_libraries_with_wide_integers_run_everything_as_f32() {
    let library = open(double(Some("stock"))).unwrap();
    let kernel = kt_blis::Blis::new(library, Tier::Amx).unwrap();
    for format in kt_core::format::ALL {
        let (layout, how) = kernel.accepts(format, 64, 512).unwrap();
        assert_eq!(layout, InputLayout::F32, "{format}");
        let (int8, bf16) = (how.contains("aocl_gemm_s8s8s32os32"), how.contains("aocl_gemm_bf16bf16f32of32"));
        assert!(how.contains("cblas_sgemm"), "{how}");
        assert_eq!((int8, bf16), (format.group().is_some(), format == Format::Bf16), "{how}");
        assert_eq!(kernel.packed_bytes(format, 64, 512), None);
    }
}

/// The product of some outputs and rows, of BF16 numbers that are the same in every call.
fn product(kernel: kt_blis::Blis, outputs: Range<usize>, rows: Range<usize>) -> Vec<u32> {
    let (all_outputs, all_rows, cols) = (192, 200, 384);
    let mut random = Random(1);
    let bits: Vec<u8> = (0..all_outputs * cols).flat_map(|_| f32_to_bf16(random.normal()).to_le_bytes()).collect();
    let matrix = Matrix::new(Format::Bf16, all_outputs, cols, bits.into(), None).unwrap();
    let mut packed = AlignedBytes::default();
    let packed = packed.get(kernel.packed_bytes(Format::Bf16, all_outputs, cols).unwrap());
    kernel.pack(&matrix, 0..all_outputs, packed);
    let layout = kernel.accepts(Format::Bf16, all_outputs, cols).unwrap().0;
    let mut inputs = AlignedBytes::default();
    let inputs = inputs.get(layout.bytes(all_rows, cols));
    for block in inputs.chunks_exact_mut(layout.block_bytes()) {
        let x: Vec<f32> = (0..BLOCK).map(|_| random.normal()).collect();
        kernel.pack_input(layout, &x, block);
    }
    let inputs = Inputs::new(layout, all_rows, cols, inputs);
    let weights = Weights::packed(Format::Bf16, all_outputs, cols, packed.to_vec().into());
    let mut out = vec![f32::NAN; outputs.len() * rows.len()];
    kernel.product(Outputs::new(&weights, outputs), inputs, rows, &mut out, &mut Scratch::default());
    out.iter().map(|v| v.to_bits()).collect()
}

/// A library that adds in another order for some numbers of rows, or in some places, is called with the others only.
#[test]
fn numbers_of_rows_that_change_bits_are_not_used() {
    if !has(Tier::Avx512Bf16) {
        return;
    }
    for variant in [None, Some("unsteady"), Some("placed")] {
        let kernel = kt_blis::Blis::new(open(double(variant)).unwrap(), Tier::Amx).unwrap();
        let whole = product(kernel, 0..192, 0..200);
        assert!(whole.iter().all(|&bits| f32::from_bits(bits).is_finite()));
        for (outputs, rows) in
            [(0..192, 0..1), (0..192, 5..6), (64..128, 3..40), (128..190, 60..200), (0..64, 199..200)]
        {
            let part = product(kernel, outputs.clone(), rows.clone());
            let want = rows.clone().flat_map(|row| whole[row * 192..][outputs.clone()].to_vec());
            assert!(want.eq(part), "{variant:?}: outputs {outputs:?} of rows {rows:?} have other bits than among all");
        }
    }
}

#[test]
fn what_cannot_be_used_is_named() {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("text.so");
    std::fs::write(&file, "no library").unwrap();
    let refusals = [
        (PathBuf::from("/nowhere/libblis.so"), vec!["/nowhere/libblis.so", "No such file"]),
        (file.clone(), vec!["text.so", "too short"]),
        (
            double(Some("partial")),
            vec!["aocl_gemm_s8s8s32os32", "aocl_reorder_bf16bf16f32of32", "cblas_sgemm", "addon=aocl_gemm"],
        ),
    ];
    for (path, wanted) in refusals {
        let why = open(&path).err().expect("a refusal");
        wanted.iter().for_each(|w| assert!(why.contains(w), "{w}: {why}"));
        assert!(why.contains("give the path"), "{why}");
    }
    if has(Tier::Avx512Bf16) {
        for (variant, wanted) in
            [("wrong", "multiplies int8 wrongly"), ("helpless", "says that this product cannot run")]
        {
            let why = open(double(Some(variant))).err().expect("a refusal");
            assert!(why.contains(wanted) && why.contains("cblas_sgemm"), "{why}");
        }
    }
}

#[test]
fn a_library_is_opened_once() {
    let path = double(Some("stock"));
    let first = open(&path).unwrap();
    assert!((0..100).all(|_| std::ptr::eq(open(&path).unwrap(), first)));
}
