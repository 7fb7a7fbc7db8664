//! The library's C functions, as safe ones: the only unsafe code of this crate.
//!
//! Every product has the same form: `C[m, 64] = beta * C + A[m, k] * B`, with `B` the weights of a panel of 64 outputs, all row-major. The
//! slices' lengths are checked here; that the library then reads and writes nothing else is its side of the contract.

#![allow(unsafe_code)] // FFI

use std::cell::Cell;
use std::error::Error;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::ptr;

/// Outputs of a panel: the width of AOCL's widest tile.
pub(crate) const PANEL: usize = 64;

/// Columns of a product of AOCL's: those of the shortest group that is worth a call, and of a block of inputs.
pub(crate) const DEPTHS: [usize; 2] = [32, 128];

/// A library that was opened, and stays so until the process ends: its threads and thread-locals may outlive any handle.
#[derive(Clone, Copy)]
pub(crate) struct Opened(&'static libloading::Library);

/// `dim_t` and `md_t` are 64 bits wide wherever they are not configured otherwise; see [`Opened::wide_dimensions`].
type Dim = i64;
type Threads = unsafe extern "C" fn(Dim);
/// AOCL-DLP has one more pointer at the end of this and the next than AOCL-BLAS. A callee that knows nothing of it does not look: on
/// x86-64 the caller puts arguments where they are and takes them away again.
type ReorderedBytes = unsafe extern "C" fn(c_char, c_char, c_char, Dim, Dim, *const c_void) -> usize;
type Reorder<T> = unsafe extern "C" fn(c_char, c_char, c_char, *const T, *mut T, Dim, Dim, Dim, *const c_void);
#[rustfmt::skip]
type Gemm<T, S> = unsafe extern "C" fn(
    c_char, c_char, c_char, Dim, Dim, Dim, S, *const T, Dim, c_char, *const T, Dim, c_char, S, *mut S, Dim, *mut c_void,
);
#[rustfmt::skip]
type CblasSgemm<I> = unsafe extern "C" fn(
    c_int, c_int, c_int, I, I, I, f32, *const f32, I, *const f32, I, f32, *mut f32, I,
);

impl Opened {
    /// Opens a library by its path, or by a name that the dynamic linker looks for.
    ///
    /// # Errors
    /// The linker's own words.
    pub fn open(name: &OsStr) -> Result<Self, String> {
        // SAFETY: BLIS libraries have no initialisers that depend on anything; another library of that name is the user's choice, as with any program.
        let library = unsafe { libloading::Library::new(name) }.map_err(|e| words(&e))?;
        Ok(Opened(Box::leak(Box::new(library))))
    }

    /// The function of this name.
    ///
    /// # Safety
    /// `F` is its type.
    unsafe fn function<F: Copy>(self, name: &str) -> Option<F> {
        // SAFETY: the caller's promise. The library is never closed, so that the copy stays valid.
        unsafe { self.0.get::<F>(name) }.ok().map(|f| *f)
    }

    /// The three functions of AOCL's `suffix`.
    ///
    /// # Safety
    /// `T` and `S` are the types of its matrices and sums.
    unsafe fn aocl<T, S>(self, suffix: &str) -> Result<Aocl<T, S>, Vec<String>> {
        let names = ["aocl_get_reorder_buf_size_", "aocl_reorder_", "aocl_gemm_"].map(|f| format!("{f}{suffix}"));
        // SAFETY: the type of all functions of this prefix.
        let bytes = unsafe { self.function::<ReorderedBytes>(&names[0]) };
        // SAFETY: as above, for these matrices.
        let reorder = unsafe { self.function::<Reorder<T>>(&names[1]) };
        // SAFETY: as above.
        let gemm = unsafe { self.function::<Gemm<T, S>>(&names[2]) };
        match (bytes, reorder, gemm) {
            (Some(bytes), Some(reorder), Some(gemm)) => {
                Ok(Aocl { bytes, reorder, gemm, quiet: self.quiet(), sizes: [0; 2] })
            }
            (bytes, reorder, gemm) => {
                let found = [bytes.is_some(), reorder.is_some(), gemm.is_some()];
                Err(names.into_iter().zip(found).filter(|(_, found)| !found).map(|(name, _)| name).collect())
            }
        }
    }

    /// AOCL's product of signed bytes.
    ///
    /// # Errors
    /// The symbols that are missing.
    pub fn int8(self) -> Result<Aocl<i8, i32>, Vec<String>> {
        // SAFETY: the types in the name.
        unsafe { self.aocl("s8s8s32os32") }
    }

    /// AOCL's product of bf16, as their bits.
    ///
    /// # Errors
    /// The symbols that are missing.
    pub fn bf16(self) -> Result<Aocl<u16, f32>, Vec<String>> {
        // SAFETY: the types in the name.
        unsafe { self.aocl("bf16bf16f32of32") }
    }

    /// The product of f32.
    ///
    /// # Errors
    /// The symbol that is missing.
    pub fn sgemm(self) -> Result<Sgemm, Vec<String>> {
        let name = "cblas_sgemm";
        let function = match self.integer("bli_info_get_blas_int_type_size") {
            // SAFETY: the library says that its BLAS has integers of 64 bits.
            Some(64) => unsafe { self.function(name) }.map(Cblas::Wide),
            // SAFETY: the type of this function wherever nothing else is said.
            _ => unsafe { self.function(name) }.map(Cblas::Int),
        };
        match function {
            Some(function) => Ok(Sgemm { function, quiet: self.quiet() }),
            None => Err(vec![name.into()]),
        }
    }

    /// Whether matrix dimensions have 64 bits, as AOCL's functions are declared here.
    pub fn wide_dimensions(self) -> bool {
        self.integer("bli_info_get_int_type_size").is_none_or(|bits| bits == 64)
    }

    /// What a function says that takes nothing and returns a `gint_t`.
    fn integer(self, name: &str) -> Option<i64> {
        // SAFETY: the type of BLIS's `bli_info_get_*_size`.
        let f = unsafe { self.function::<unsafe extern "C" fn() -> Dim>(name) }?;
        // SAFETY: it only returns a constant.
        let value = unsafe { f() };
        // Where it is 32 bits wide, the upper half is undefined; what is asked for is 32 or 64.
        Some(value & 0xff)
    }

    /// BLIS's version, where the library is one.
    pub fn version(self) -> Option<String> {
        // SAFETY: the type of this function.
        let f = unsafe { self.function::<unsafe extern "C" fn() -> *const c_char>("bli_info_get_version_str") }?;
        // SAFETY: it returns a constant string.
        text(unsafe { f() })
    }

    /// The names of the architectures that BLIS has kernels for, by their numbers, up to the one that it has chosen for this CPU.
    pub fn architectures(self) -> Option<Vec<String>> {
        // SAFETY: the type of this function: an enumeration.
        let id = unsafe { self.function::<unsafe extern "C" fn() -> c_int>("bli_arch_query_id") }?;
        // SAFETY: the type of this function.
        let name = unsafe { self.function::<unsafe extern "C" fn(c_int) -> *const c_char>("bli_arch_string") }?;
        // SAFETY: it detects the CPU once, under a lock of its own.
        let id = unsafe { id() };
        // SAFETY: the library's own id and those below are indices of its table.
        (0..=id).map(|id| text(unsafe { name(id) })).collect()
    }

    fn quiet(self) -> Quiet {
        // SAFETY: the type of these functions.
        let of = |name: &str| unsafe { self.function::<Threads>(name) };
        // By their number: not by one that an application may have set for its own calls.
        Quiet {
            library: ptr::from_ref(self.0).addr(),
            set: [of("bli_thread_set_num_threads"), of("dlp_thread_set_num_threads")],
        }
    }
}

/// A string of the library's, of static lifetime.
fn text(p: *const c_char) -> Option<String> {
    // SAFETY: not null, and a constant of the library's.
    (!p.is_null()).then(|| unsafe { CStr::from_ptr(p) }.to_string_lossy().into_owned())
}

/// An error with its causes: libloading's own says only which call failed.
fn words(e: &dyn Error) -> String {
    let causes = std::iter::successors(e.source(), |&e| e.source());
    causes.last().map_or_else(|| e.to_string(), ToString::to_string)
}

/// Turns a library's own threads off: the team above has one for each core.
#[derive(Clone, Copy)]
struct Quiet {
    /// Its address: tells libraries apart.
    library: usize,
    set: [Option<Threads>; 2],
}

impl Quiet {
    /// For the calling thread, as some versions keep the number by thread.
    fn ensure(self) {
        thread_local!(static DONE: Cell<usize> = const { Cell::new(0) });
        if DONE.get() != self.library {
            for set in self.set.into_iter().flatten() {
                // SAFETY: it stores a number.
                unsafe { set(1) };
            }
            DONE.set(self.library);
        }
    }
}

const ROW_MAJOR: c_char = b'r' as c_char;
const PLAIN: c_char = b'n' as c_char;
const TRANSPOSED: c_char = b't' as c_char;
const REORDERED: c_char = b'r' as c_char;
const OF_B: c_char = b'B' as c_char;

/// The product of two matrices of `T`, with sums in `S`.
#[derive(Clone, Copy)]
pub(crate) struct Aocl<T, S> {
    bytes: ReorderedBytes,
    reorder: Reorder<T>,
    gemm: Gemm<T, S>,
    quiet: Quiet,
    /// Bytes of a reordered panel of each of [`DEPTHS`].
    sizes: [usize; 2],
}

impl<T: bytemuck::Pod, S: bytemuck::Pod> Aocl<T, S> {
    /// Asks how many bytes panels take. Before, none can be made.
    ///
    /// # Errors
    /// The library says that it cannot multiply on this CPU.
    pub fn sized(mut self) -> Result<Self, String> {
        self.quiet.ensure();
        // SAFETY: plain numbers, and no metadata.
        self.sizes =
            DEPTHS.map(|k| unsafe { (self.bytes)(ROW_MAJOR, TRANSPOSED, OF_B, k as Dim, PANEL as Dim, ptr::null()) });
        if self.sizes.contains(&0) { Err("says that this product cannot run on this CPU".into()) } else { Ok(self) }
    }

    /// Bytes of a panel of `k` columns, one of [`DEPTHS`], as the library wants it.
    pub fn reordered_bytes(&self, k: usize) -> usize {
        self.sizes[usize::from(k != DEPTHS[0])]
    }

    /// Reorders a panel `[64, k]` of weights into `out`, of at least [`Self::reordered_bytes`].
    pub fn reorder(&self, b: &[T], k: usize, out: &mut [u8]) {
        assert!(
            DEPTHS.contains(&k) && b.len() == PANEL * k && out.len() >= self.reordered_bytes(k),
            "weights of another shape"
        );
        let out: &mut [T] = bytemuck::cast_slice_mut(out);
        self.quiet.ensure();
        let (k, n, null) = (k as Dim, PANEL as Dim, ptr::null());
        // SAFETY: `b` is [64, k], its transpose the k x n matrix that is asked for; `out` has the bytes that the library wants for it.
        unsafe { (self.reorder)(ROW_MAJOR, TRANSPOSED, OF_B, b.as_ptr(), out.as_mut_ptr(), k, n, k, null) }
    }

    /// `C[m, 64] = beta * C + A[m, k] * B`: the rows of `a` are `stride` apart, `b` is a reordered panel.
    pub fn multiply(
        &self,
        (m, k): (usize, usize),
        (a, stride): (&[T], usize),
        b: &[u8],
        [one, beta]: [S; 2],
        c: &mut [S],
    ) {
        assert!(m > 0 && a.len() >= (m - 1) * stride + k && c.len() >= m * PANEL, "matrices of another shape");
        assert!(DEPTHS.contains(&k) && b.len() >= self.reordered_bytes(k), "weights of another shape");
        let b: &[T] = bytemuck::cast_slice(b);
        self.quiet.ensure();
        let (m, n, k, stride) = (m as Dim, PANEL as Dim, k as Dim, stride as Dim);
        // SAFETY: `a` holds m rows of k, `stride` apart; `b` what `reorder` made of a panel of k columns; `c` m rows of 64. No operation follows the product.
        unsafe {
            (self.gemm)(
                ROW_MAJOR,
                PLAIN,
                PLAIN,
                m,
                n,
                k,
                one,
                a.as_ptr(),
                stride,
                PLAIN,
                b.as_ptr(),
                n,
                REORDERED,
                beta,
                c.as_mut_ptr(),
                n,
                ptr::null_mut(),
            );
        }
    }
}

/// The product of two matrices of F32.
#[derive(Clone, Copy)]
pub(crate) struct Sgemm {
    function: Cblas,
    quiet: Quiet,
}

#[derive(Clone, Copy)]
enum Cblas {
    Int(CblasSgemm<c_int>),
    Wide(CblasSgemm<i64>),
}

impl Sgemm {
    /// `C[m, 64] = beta * C + A[m, k] * B^T`: `a` is contiguous, the 64 rows of `b` are `stride` apart.
    pub fn multiply(&self, (m, k): (usize, usize), a: &[f32], (b, stride): (&[f32], usize), beta: f32, c: &mut [f32]) {
        /// Of CBLAS's enumerations.
        const ROWS: c_int = 101;
        const AS_IS: c_int = 111;
        const TURNED: c_int = 112;
        assert!(
            a.len() >= m * k && b.len() >= (PANEL - 1) * stride + k && c.len() >= m * PANEL,
            "matrices of another shape"
        );
        self.quiet.ensure();
        let (pa, pb, pc) = (a.as_ptr(), b.as_ptr(), c.as_mut_ptr());
        match self.function {
            Cblas::Int(f) => {
                let (m, n, k, stride) = (m as c_int, PANEL as c_int, k as c_int, stride as c_int);
                // SAFETY: `a` holds m rows of k, `b` 64 of k, `stride` apart, `c` m of 64.
                unsafe { f(ROWS, AS_IS, TURNED, m, n, k, 1.0, pa, k, pb, stride, beta, pc, n) }
            }
            Cblas::Wide(f) => {
                let (m, n, k, stride) = (m as i64, PANEL as i64, k as i64, stride as i64);
                // SAFETY: as above.
                unsafe { f(ROWS, AS_IS, TURNED, m, n, k, 1.0, pa, k, pb, stride, beta, pc, n) }
            }
        }
    }
}
