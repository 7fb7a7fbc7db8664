//! The encoders as the instructions that this CPU has: one source, written with [`Lanes`], compiled for any CPU of the target and for AVX2.
//!
//! Functions are compiled for what they are inlined into, so all that counts is `#[inline(always)]`, and loops stand in place of large
//! closures, which nothing can be said of. No additions are fused and none change their order: the bits are the same.

#![allow(unsafe_code)] // AVX2

use super::rows::{self, Band};
use super::search::{Each, Equal, padded};

/// Eight numbers.
pub(super) trait Lanes: Copy {
    fn splat(v: f32) -> Self;
    fn of(v: &[f32; 8]) -> Self;
    fn array(self) -> [f32; 8];
    fn plus(self, other: Self) -> Self;
    fn minus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    /// The larger ones.
    fn max(self, other: Self) -> Self;
    /// The smaller ones.
    fn min(self, other: Self) -> Self;
    /// Their sum: of those four apart, then of those two apart, then of both.
    fn total(self) -> f32;
    /// `then` where these are above `bound`, otherwise 0.
    fn above(self, bound: Self, then: Self) -> Self;
}

/// Whatever the target has.
#[derive(Clone, Copy)]
pub(super) struct Plain([f32; 8]);

impl Plain {
    #[inline(always)]
    fn with(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        let mut out = self.0;
        for (out, b) in out.iter_mut().zip(other.0) {
            *out = f(*out, b);
        }
        Plain(out)
    }
}

impl Lanes for Plain {
    #[inline(always)]
    fn splat(v: f32) -> Self {
        Plain([v; 8])
    }

    #[inline(always)]
    fn of(v: &[f32; 8]) -> Self {
        Plain(*v)
    }

    #[inline(always)]
    fn array(self) -> [f32; 8] {
        self.0
    }

    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        self.with(other, |a, b| a + b)
    }

    #[inline(always)]
    fn minus(self, other: Self) -> Self {
        self.with(other, |a, b| a - b)
    }

    #[inline(always)]
    fn times(self, other: Self) -> Self {
        self.with(other, |a, b| a * b)
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.with(other, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.with(other, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn total(self) -> f32 {
        let l = self.0;
        ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
    }

    #[inline(always)]
    fn above(self, bound: Self, then: Self) -> Self {
        let mut out = then.0;
        for (out, (a, b)) in out.iter_mut().zip(self.0.iter().zip(bound.0)) {
            *out = if *a > b { *out } else { 0.0 };
        }
        Plain(out)
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::Lanes;

    /// Made and used only within [`encode`](super::encode)'s function for AVX2.
    #[derive(Clone, Copy)]
    pub struct Avx2(__m256);

    impl Lanes for Avx2 {
        #[inline(always)]
        fn splat(v: f32) -> Self {
            // SAFETY: the CPU has AVX2.
            Avx2(unsafe { _mm256_set1_ps(v) })
        }

        #[inline(always)]
        fn of(v: &[f32; 8]) -> Self {
            // SAFETY: the CPU has AVX2; eight numbers are there.
            Avx2(unsafe { _mm256_loadu_ps(v.as_ptr()) })
        }

        #[inline(always)]
        fn array(self) -> [f32; 8] {
            let mut out = [0.0; 8];
            // SAFETY: the CPU has AVX2; there is room for eight numbers.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), self.0) };
            out
        }

        #[inline(always)]
        fn plus(self, other: Self) -> Self {
            // SAFETY: the CPU has AVX2.
            Avx2(unsafe { _mm256_add_ps(self.0, other.0) })
        }

        #[inline(always)]
        fn minus(self, other: Self) -> Self {
            // SAFETY: the CPU has AVX2.
            Avx2(unsafe { _mm256_sub_ps(self.0, other.0) })
        }

        #[inline(always)]
        fn times(self, other: Self) -> Self {
            // SAFETY: the CPU has AVX2.
            Avx2(unsafe { _mm256_mul_ps(self.0, other.0) })
        }

        #[inline(always)]
        fn max(self, other: Self) -> Self {
            // SAFETY: the CPU has AVX2.
            Avx2(unsafe { _mm256_max_ps(self.0, other.0) })
        }

        #[inline(always)]
        fn min(self, other: Self) -> Self {
            // SAFETY: the CPU has AVX2.
            Avx2(unsafe { _mm256_min_ps(self.0, other.0) })
        }

        #[inline(always)]
        fn total(self) -> f32 {
            // SAFETY: the CPU has AVX2.
            let four = unsafe { _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0)) };
            // SAFETY: the CPU has AVX2.
            let two = unsafe { _mm_add_ps(four, _mm_movehl_ps(four, four)) };
            // SAFETY: the CPU has AVX2.
            unsafe { _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two))) }
        }

        #[inline(always)]
        fn above(self, bound: Self, then: Self) -> Self {
            // SAFETY: the CPU has AVX2.
            let mask = unsafe { _mm256_cmp_ps::<_CMP_GT_OQ>(self.0, bound.0) };
            // SAFETY: the CPU has AVX2.
            Avx2(unsafe { _mm256_and_ps(mask, then.0) })
        }
    }
}

/// Encodes a band with the best instructions there are; `weights` says for each column how much its squared errors count.
pub(super) fn encode(band: Band<'_>, weights: Option<&[f32]>) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the CPU has AVX2.
        return unsafe { avx2(band, weights) };
    }
    encode_with::<Plain>(band, weights);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn avx2(band: Band<'_>, weights: Option<&[f32]>) {
    encode_with::<x86::Avx2>(band, weights);
}

/// Of two rows: the sums of the first one's magnitudes and squares, and of those of the difference. They are added up in F32 over 64
/// columns, in F64 over these: enough digits for a ratio, and fast.
pub(crate) fn difference(before: &[f32], after: &[f32]) -> [f64; 4] {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the CPU has AVX2.
        return unsafe { difference_avx2(before, after) };
    }
    difference_with::<Plain>(before, after)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn difference_avx2(before: &[f32], after: &[f32]) -> [f64; 4] {
    difference_with::<x86::Avx2>(before, after)
}

#[inline(always)]
pub(super) fn difference_with<L: Lanes>(before: &[f32], after: &[f32]) -> [f64; 4] {
    let (zero, mut sums) = (L::splat(0.0), [0.0; 4]);
    for (before, after) in before.chunks(64).zip(after.chunks(64)) {
        let mut lanes = [zero; 4];
        for (before, after) in before.chunks(8).zip(after.chunks(8)) {
            let (b, a) = (L::of(&padded(before)), L::of(&padded(after)));
            let diff = a.minus(b);
            for (lane, term) in
                lanes.iter_mut().zip([b.max(zero.minus(b)), b.times(b), diff.max(zero.minus(diff)), diff.times(diff)])
            {
                *lane = lane.plus(term);
            }
        }
        for (sum, lanes) in sums.iter_mut().zip(lanes) {
            *sum += lanes.total() as f64;
        }
    }
    sums
}

#[inline(always)]
pub(super) fn encode_with<L: Lanes>(band: Band<'_>, weights: Option<&[f32]>) {
    match weights {
        None => rows::encode(band, Equal::<L>::new()),
        Some(weights) => rows::encode(band, Each::<L>::new(weights)),
    }
}
