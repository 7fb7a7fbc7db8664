//! A test double of AOCL-DLP: its functions by plain loops, with a reordered layout of its own.
//!
//! What `--cfg` names it does otherwise: `unsteady` sums a single row backwards, `placed` sums rows 4 and 5 of each six backwards, `wrong` has
//! one sum of bytes off by one, `helpless` says that it cannot run, `partial` lacks the functions of int8 and bf16 products, `stock` has a
//! `cblas_sgemm` with integers of 64 bits. Products by a thread that did not turn the library's own threads off are wrong.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};
use std::slice::{from_raw_parts, from_raw_parts_mut};

thread_local!(static THREADS: Cell<i64> = const { Cell::new(4) });

#[unsafe(no_mangle)]
pub extern "C" fn dlp_thread_set_num_threads(threads: i64) {
    THREADS.set(threads);
}

fn quiet() -> bool {
    THREADS.get() == 1
}

fn is(c: c_char, want: u8) -> bool {
    c as u8 == want
}

/// The order in which row `i` of `m` sums `k` products.
fn order(i: usize, m: usize, k: usize) -> Box<dyn Iterator<Item = usize>> {
    let backwards = cfg!(unsteady) && m == 1 || cfg!(placed) && i % 6 >= 4;
    if backwards { Box::new((0..k).rev()) } else { Box::new(0..k) }
}

macro_rules! product {
    ($size:ident, $reorder:ident, $gemm:ident, $of:ty, $sum:ty, $widen:expr) => {
        /// The matrix, and a sum for each column that nobody reads.
        #[unsafe(no_mangle)]
        pub extern "C" fn $size(order: c_char, trans: c_char, kind: c_char, k: i64, n: i64, _: *const c_void) -> usize {
            assert!(is(order, b'r') && is(trans, b't') && is(kind, b'B'));
            if cfg!(helpless) { 0 } else { (k * n) as usize * size_of::<$of>() + n as usize * 4 }
        }

        /// Columns in turn, the last first.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $reorder(
            order: c_char, trans: c_char, kind: c_char, from: *const $of, to: *mut $of, k: i64, n: i64, stride: i64, _: *const c_void,
        ) {
            assert!(is(order, b'r') && is(trans, b't') && is(kind, b'B') && stride == k);
            let (k, n) = (k as usize, n as usize);
            let (from, to) = unsafe { (from_raw_parts(from, k * n), from_raw_parts_mut(to, k * n)) };
            for (j, column) in from.chunks_exact(k).enumerate() {
                column.iter().enumerate().for_each(|(i, &v)| to[(k - 1 - i) * n + j] = v);
            }
        }

        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $gemm(
            order_: c_char, ta: c_char, tb: c_char, m: i64, n: i64, k: i64, alpha: $sum, a: *const $of, lda: i64, fa: c_char,
            b: *const $of, ldb: i64, fb: c_char, beta: $sum, c: *mut $sum, ldc: i64, after: *mut c_void,
        ) {
            assert!(is(order_, b'r') && is(ta, b'n') && is(tb, b'n') && is(fa, b'n') && is(fb, b'r'));
            assert!(ldb == n && ldc == n && after.is_null());
            let (m, n, k, lda) = (m as usize, n as usize, k as usize, lda as usize);
            let (a, b) = unsafe { (from_raw_parts(a, (m - 1) * lda + k), from_raw_parts(b, k * n)) };
            let c = unsafe { from_raw_parts_mut(c, m * n) };
            for (i, c) in c.chunks_exact_mut(n).enumerate() {
                let mut sums = vec![<$sum>::default(); n];
                for l in order(i, m, k) {
                    let a = $widen(a[i * lda + l]);
                    let b = &b[(k - 1 - l) * n..][..n];
                    sums.iter_mut().zip(b).for_each(|(sum, &b)| *sum += a * $widen(b));
                }
                for (c, sum) in c.iter_mut().zip(sums) {
                    let before = if beta == <$sum>::default() { beta } else { beta * *c };
                    *c = if quiet() { before + alpha * sum } else { <$sum>::MAX };
                }
            }
            if cfg!(wrong) {
                c[0] += 1 as $sum;
            }
        }
    };
}

#[cfg(not(any(partial, stock)))]
product!(
    aocl_get_reorder_buf_size_s8s8s32os32, aocl_reorder_s8s8s32os32, aocl_gemm_s8s8s32os32, i8, i32, |v: i8| v as i32
);
#[cfg(not(any(partial, stock)))]
product!(
    aocl_get_reorder_buf_size_bf16bf16f32of32, aocl_reorder_bf16bf16f32of32, aocl_gemm_bf16bf16f32of32, u16, f32,
    |v: u16| f32::from_bits((v as u32) << 16)
);

#[cfg(stock)]
#[unsafe(no_mangle)]
pub extern "C" fn bli_info_get_blas_int_type_size() -> i64 {
    64
}

#[cfg(stock)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cblas_sgemm(
    layout: c_int, ta: c_int, tb: c_int, m: i64, n: i64, k: i64, alpha: f32, a: *const f32, lda: i64, b: *const f32, ldb: i64, beta: f32,
    c: *mut f32, ldc: i64,
) {
    assert!((layout, ta, tb) == (101, 111, 112) && lda == k && ldc == n);
    let (m, n, k, ldb) = (m as usize, n as usize, k as usize, ldb as usize);
    let (a, b) = unsafe { (from_raw_parts(a, m * k), from_raw_parts(b, (n - 1) * ldb + k)) };
    let c = unsafe { from_raw_parts_mut(c, m * n) };
    for (i, (a, c)) in a.chunks_exact(k).zip(c.chunks_exact_mut(n)).enumerate() {
        for (b, c) in b.chunks(ldb).zip(c) {
            let sum: f32 = order(i, m, k).map(|l| a[l] * b[l]).fold(0.0, |sum, p| sum + p);
            let before = if beta == 0.0 { 0.0 } else { beta * *c };
            *c = if quiet() { before + alpha * sum } else { f32::NAN };
        }
    }
}
