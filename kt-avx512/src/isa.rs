//! The instructions, as safe operations on a value that proves them.
//!
//! A kernel is generic over [`Isa`] and marked `#[inline(always)]`; [`Isa::run`] is the one function per tier that carries
//! `#[target_feature]`. Everything inlines into it, so each kernel is compiled once per tier with that tier's instructions.

#![allow(unsafe_code)] // kernel

use std::arch::x86_64::*;

use kt_core::format::fp8::E4M3;

/// Work that is to be compiled for an instruction set.
pub(crate) trait Job {
    /// Does it. For [`Isa::run`], implementations are `#[inline(always)]`: else they would be compiled without the instructions.
    fn go<I: Isa>(self, isa: I);
}

/// An instruction set: at least AVX-512 F, BW, VL and DQ, and what differs between the tiers.
///
/// # Safety
/// A value must exist only on a CPU with AVX-512 F, BW, VL, DQ and the features that its `run` enables.
pub(crate) unsafe trait Isa: Copy {
    /// Two consecutive inputs of the bf16 path, broadcast to all outputs.
    type Pair: Copy;
    /// The lowest tier with the same int8 path: code is compiled for that one only.
    type ForInt8: Isa;
    /// The lowest tier with the same bf16 path.
    type ForBf16: Isa;
    /// Bytes of one number in the inputs of the bf16 path: 2 (BF16) or 4 (F32).
    const INPUT_BYTES: usize;

    /// Does a job with the instructions enabled.
    fn run<J: Job>(self, job: J);

    /// See [`Isa::ForInt8`].
    fn for_int8(self) -> Self::ForInt8;

    /// See [`Isa::ForBf16`].
    fn for_bf16(self) -> Self::ForBf16;

    /// Adds to each of 16 sums the products of 4 unsigned bytes of `w` with 4 signed bytes of `x`, exactly.
    fn dot_int8(self, acc: __m512i, w: __m512i, x: __m512i) -> __m512i;

    /// Broadcasts two inputs.
    ///
    /// # Safety
    /// `2 * INPUT_BYTES` bytes at `p` are readable.
    unsafe fn load_pair(self, p: *const u8) -> Self::Pair;

    /// Adds to each of 16 sums the products of 2 BF16 weights with 2 inputs.
    fn dot_bf16(self, acc: __m512, w: __m512i, x: Self::Pair) -> __m512;

    /// The tables of [`Isa::fp8_to_bf16`], to be loaded once per loop.
    fn fp8_table(self) -> [__m512i; 4];

    /// 64 E4M3 codes as BF16, exactly; NaN codes give NaN. In each 128-bit lane the first 8 codes go to the first result, the
    /// others to the second.
    fn fp8_to_bf16(self, table: [__m512i; 4], codes: __m512i) -> [__m512i; 2];
}

/// Wraps intrinsics of AVX-512 F, BW and DQ that read no memory.
macro_rules! base_ops {
    ($($(#[$doc:meta])* fn $name:ident($($a:ident: $t:ty),*) -> $r:ty { $e:expr })*) => {
        /// Operations that all tiers have.
        pub(crate) trait Base: Isa {
            $($(#[$doc])*
            #[inline(always)]
            fn $name(self, $($a: $t),*) -> $r {
                // SAFETY: a value of an `Isa` proves AVX-512 F, BW and DQ; the intrinsic touches registers only.
                unsafe { $e }
            })*

            /// 64 bytes.
            ///
            /// # Safety
            /// `p .. p + 64` is readable.
            #[inline(always)]
            unsafe fn load(self, p: *const u8) -> __m512i {
                // SAFETY: readable by the caller's promise; unaligned is fine.
                unsafe { _mm512_loadu_si512(p.cast()) }
            }

            /// Four bytes, 16 times.
            ///
            /// # Safety
            /// `p .. p + 4` is readable.
            #[inline(always)]
            unsafe fn load_dword(self, p: *const u8) -> __m512i {
                // SAFETY: readable by the caller's promise.
                let v = unsafe { p.cast::<i32>().read_unaligned() };
                self.splat(v)
            }

            /// One F32, 16 times.
            ///
            /// # Safety
            /// `p .. p + 4` is readable.
            #[inline(always)]
            unsafe fn load_f32(self, p: *const u8) -> __m512 {
                // SAFETY: readable by the caller's promise.
                self.as_f32(unsafe { self.load_dword(p) })
            }

            /// 16 F16 as F32.
            ///
            /// # Safety
            /// `p .. p + 32` is readable.
            #[inline(always)]
            unsafe fn load_f16(self, p: *const u8) -> __m512 {
                // SAFETY: readable by the caller's promise, and `self` proves AVX-512 F.
                unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
            }

            /// Writes the first `n` numbers.
            ///
            /// # Safety
            /// `p .. p + n` is writable.
            #[inline(always)]
            unsafe fn store_first(self, p: *mut f32, n: usize, v: __m512) {
                let mask = if n >= 16 { 0xffff } else { (1u16 << n) - 1 };
                // SAFETY: lanes beyond `n` are masked off and not touched.
                unsafe { _mm512_mask_storeu_ps(p, mask, v) }
            }

            /// Writes 64 bytes.
            ///
            /// # Safety
            /// `p .. p + 64` is writable.
            #[inline(always)]
            unsafe fn store(self, p: *mut u8, v: __m512i) {
                // SAFETY: writable by the caller's promise; unaligned is fine.
                unsafe { _mm512_storeu_si512(p.cast(), v) }
            }
        }
        impl<I: Isa> Base for I {}
    };
}

base_ops! {
    fn zero() -> __m512 { _mm512_setzero_ps() }
    fn splat(v: i32) -> __m512i { _mm512_set1_epi32(v) }
    fn as_f32(v: __m512i) -> __m512 { _mm512_castsi512_ps(v) }
    fn to_f32(v: __m512i) -> __m512 { _mm512_cvtepi32_ps(v) }
    fn mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
    fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
    /// Low and high nibbles, each in a byte of its own.
    fn nibbles(v: __m512i) -> [__m512i; 2] {{
        let low = _mm512_set1_epi8(15);
        [_mm512_and_si512(v, low), _mm512_and_si512(_mm512_srli_epi16::<4>(v), low)]
    }}
    /// The numbers of even and of odd index of 32 BF16, as F32.
    fn bf16_halves(v: __m512i) -> [__m512; 2] {{
        let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(v)), _mm512_castsi512_ps(_mm512_and_si512(v, high))]
    }}
}

/// Hints that the line at `p` will be read soon; any address will do. Into the second level: the few buffers of the first, held for
/// as long as memory takes, would limit the bandwidth to half of what it is.
#[inline(always)]
pub(crate) fn prefetch(p: *const u8) {
    // SAFETY: prefetching faults at no address, and SSE is part of x86-64.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
}

/// AVX-512 F, BW, VL, DQ.
#[derive(Clone, Copy)]
pub(crate) struct Plain(());

/// and VNNI.
#[derive(Clone, Copy)]
pub(crate) struct Vnni(());

/// and BF16 and VBMI.
#[derive(Clone, Copy)]
pub(crate) struct Bf16(());

macro_rules! token {
    ($name:ident, $tier:literal) => {
        impl $name {
            #[doc = concat!("A value for a CPU with the instructions of tier `", $tier, "`.")]
            ///
            /// # Safety
            /// The CPU must have them.
            #[inline(always)]
            pub(crate) unsafe fn new() -> Self {
                Self(())
            }
        }
    };
}
token!(Plain, "avx512");
token!(Vnni, "avx512vnni");
token!(Bf16, "avx512bf16");

/// `dot_int8` by VNNI.
macro_rules! vnni_dot {
    () => {
        #[inline(always)]
        fn dot_int8(self, acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
            // SAFETY: `self` proves VNNI.
            unsafe { _mm512_dpbusd_epi32(acc, w, x) }
        }
    };
}

/// The bf16 path without BF16 instructions: F32 inputs, weights widened, multiplied exactly but for the rounding of each sum.
macro_rules! widened_bf16 {
    () => {
        type Pair = [__m512; 2];
        const INPUT_BYTES: usize = 4;

        #[inline(always)]
        unsafe fn load_pair(self, p: *const u8) -> [__m512; 2] {
            // SAFETY: the caller promises 8 bytes.
            let first = unsafe { self.load_f32(p) };
            // SAFETY: as above.
            let second = unsafe { self.load_f32(p.add(4)) };
            [first, second]
        }

        #[inline(always)]
        fn dot_bf16(self, acc: __m512, w: __m512i, x: [__m512; 2]) -> __m512 {
            let [even, odd] = self.bf16_halves(w);
            self.mul_add(odd, x[1], self.mul_add(even, x[0], acc))
        }

        #[inline(always)]
        fn fp8_table(self) -> [__m512i; 4] {
            let at = |i: usize| FP8_WORDS[i].as_ptr().cast();
            // SAFETY: each table is 64 bytes long.
            unsafe { [self.load(at(0)), self.load(at(1)), self.load(at(2)), self.load(at(3))] }
        }

        #[inline(always)]
        fn fp8_to_bf16(self, table: [__m512i; 4], codes: __m512i) -> [__m512i; 2] {
            // SAFETY: `self` proves AVX-512 F and BW; registers only.
            let [low, high] = unsafe {
                let zero = _mm512_setzero_si512();
                [_mm512_unpacklo_epi8(codes, zero), _mm512_unpackhi_epi8(codes, zero)]
            };
            [fp8_words(self, table, low), fp8_words(self, table, high)]
        }
    };
}

// SAFETY: `Plain::new` asks for the base features, and `run` enables no others.
unsafe impl Isa for Plain {
    type ForInt8 = Plain;
    type ForBf16 = Plain;

    #[inline(always)]
    fn for_int8(self) -> Plain {
        self
    }

    #[inline(always)]
    fn for_bf16(self) -> Plain {
        self
    }

    #[inline(always)]
    fn run<J: Job>(self, job: J) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
        fn inner<J: Job>(isa: Plain, job: J) {
            job.go(isa);
        }
        // SAFETY: `self` proves the features.
        unsafe { inner(self, job) }
    }

    #[inline(always)]
    fn dot_int8(self, acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
        // Bytes of even and odd index, widened to 16 bits; `madd` of u8 and s8 in 16 bits cannot overflow.
        // SAFETY: `self` proves AVX-512 F and BW; registers only.
        unsafe {
            let w_even = _mm512_and_si512(w, _mm512_set1_epi16(0xff));
            let w_odd = _mm512_srli_epi16::<8>(w);
            let x_even = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(x));
            let x_odd = _mm512_srai_epi16::<8>(x);
            let acc = _mm512_add_epi32(acc, _mm512_madd_epi16(w_even, x_even));
            _mm512_add_epi32(acc, _mm512_madd_epi16(w_odd, x_odd))
        }
    }

    widened_bf16!();
}

// SAFETY: `Vnni::new` asks for the base features and VNNI, and `run` enables no others.
unsafe impl Isa for Vnni {
    type ForInt8 = Vnni;
    type ForBf16 = Plain;

    #[inline(always)]
    fn for_int8(self) -> Vnni {
        self
    }

    #[inline(always)]
    fn for_bf16(self) -> Plain {
        Plain(())
    }

    #[inline(always)]
    fn run<J: Job>(self, job: J) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,avx512vnni")]
        fn inner<J: Job>(isa: Vnni, job: J) {
            job.go(isa);
        }
        // SAFETY: `self` proves the features.
        unsafe { inner(self, job) }
    }

    vnni_dot!();
    widened_bf16!();
}

// SAFETY: `Bf16::new` asks for the base features, VNNI, BF16 and VBMI, and `run` enables no others.
unsafe impl Isa for Bf16 {
    type ForInt8 = Vnni;
    type ForBf16 = Bf16;

    #[inline(always)]
    fn for_int8(self) -> Vnni {
        Vnni(())
    }

    #[inline(always)]
    fn for_bf16(self) -> Bf16 {
        self
    }

    type Pair = __m512i;
    const INPUT_BYTES: usize = 2;

    #[inline(always)]
    fn run<J: Job>(self, job: J) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,avx512vnni,avx512bf16,avx512vbmi")]
        fn inner<J: Job>(isa: Bf16, job: J) {
            job.go(isa);
        }
        // SAFETY: `self` proves the features.
        unsafe { inner(self, job) }
    }

    vnni_dot!();

    #[inline(always)]
    unsafe fn load_pair(self, p: *const u8) -> __m512i {
        // SAFETY: the caller promises 4 bytes.
        unsafe { self.load_dword(p) }
    }

    #[inline(always)]
    fn dot_bf16(self, acc: __m512, w: __m512i, x: __m512i) -> __m512 {
        // SAFETY: `self` proves BF16; the vector types differ in name only.
        unsafe {
            _mm512_dpbf16_ps(
                acc,
                std::mem::transmute::<__m512i, __m512bh>(w),
                std::mem::transmute::<__m512i, __m512bh>(x),
            )
        }
    }

    #[inline(always)]
    fn fp8_table(self) -> [__m512i; 4] {
        let at = |i: usize| FP8_BYTES[i].as_ptr();
        // SAFETY: each table is 64 bytes long.
        unsafe { [self.load(at(0)), self.load(at(1)), self.load(at(2)), self.load(at(3))] }
    }

    #[inline(always)]
    fn fp8_to_bf16(self, table: [__m512i; 4], codes: __m512i) -> [__m512i; 2] {
        // SAFETY: `self` proves AVX-512 F, BW and VBMI; registers only.
        unsafe {
            // An index has 7 bits: the whole table. Bit 7, the sign, is or-ed into the high byte: 0xf8 = a | (b & c).
            let low = _mm512_permutex2var_epi8(table[0], codes, table[1]);
            let high = _mm512_permutex2var_epi8(table[2], codes, table[3]);
            let sign = _mm512_set1_epi8(0x80_u8 as i8);
            let high = _mm512_ternarylogic_epi32::<0xf8>(high, codes, sign);
            [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
        }
    }
}

/// 32 E4M3 codes, widened to words, as BF16.
#[inline(always)]
fn fp8_words<I: Isa>(_proof: I, table: [__m512i; 4], c: __m512i) -> __m512i {
    // SAFETY: a value of an `Isa` proves AVX-512 F and BW; registers only.
    unsafe {
        // An index has 6 bits; bit 6 of the code picks the half of the table, bit 7 is the sign.
        let low = _mm512_permutex2var_epi16(table[0], c, table[1]);
        let high = _mm512_permutex2var_epi16(table[2], c, table[3]);
        let magnitude = _mm512_mask_mov_epi16(low, _mm512_test_epi16_mask(c, _mm512_set1_epi16(64)), high);
        let sign = _mm512_slli_epi16::<8>(_mm512_and_si512(c, _mm512_set1_epi16(128)));
        _mm512_or_si512(magnitude, sign)
    }
}

/// BF16 bits of the non-negative E4M3 codes; each is exact, subnormal codes being normal BF16 numbers.
const fn fp8_magnitude(code: usize) -> u16 {
    (E4M3[code].to_bits() >> 16) as u16
}

/// [`fp8_magnitude`] in four registers of words.
static FP8_WORDS: [[u16; 32]; 4] = {
    let mut t = [[0; 32]; 4];
    let mut i = 0;
    while i < 128 {
        t[i / 32][i % 32] = fp8_magnitude(i);
        i += 1;
    }
    t
};

/// [`fp8_magnitude`] in registers of bytes: two of low bytes, two of high bytes.
static FP8_BYTES: [[u8; 64]; 4] = {
    let mut t = [[0; 64]; 4];
    let mut i = 0;
    while i < 128 {
        t[i / 64][i % 64] = fp8_magnitude(i) as u8;
        t[2 + i / 64][i % 64] = (fp8_magnitude(i) >> 8) as u8;
        i += 1;
    }
    t
};
