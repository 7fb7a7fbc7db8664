//! Register tiles on 256-bit registers: R rows x P panels, each line of a panel being two halves of 8 outputs.
//!
//! Every output of every row is the same chain of additions as in the AVX-512 tiles (`crate::tile`), so results are the same bits as
//! there: for int8 on every tier, for F32 inputs on the tier `avx512`.

#![allow(unsafe_code)] // kernel

use std::arch::x86_64::*;

use kt_core::cpu::input::BLOCK;
use kt_core::format::fp8::E4M3;

use crate::isa::prefetch;
use crate::layout::{CHUNK, LINE, PANEL};
use crate::tile::Tile;

/// Half a line.
const HALF: usize = LINE / 2;

/// Lines that are operands.
pub(crate) const DIRECT: u8 = 0;
/// Two int8 operands in nibbles.
pub(crate) const NIBBLES: u8 = 1;
/// Two BF16 operands as E4M3 codes.
pub(crate) const FP8: u8 = 2;

/// Operands per stored line.
pub(crate) const fn operands_of(lines: u8) -> usize {
    if lines == DIRECT { 1 } else { 2 }
}

/// The operands of half a line, in rising k; only the first [`operands_of`] are used.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn operands<const LINES: u8>(v: __m256i) -> [__m256i; 2] {
    match LINES {
        NIBBLES => {
            let low = _mm256_set1_epi8(15);
            [_mm256_and_si256(v, low), _mm256_and_si256(_mm256_srli_epi16::<4>(v), low)]
        }
        FP8 => fp8_to_bf16(v),
        _ => [v, v],
    }
}

/// For the bytes of BF16 numbers, low and high: what a code below 16 adds, by exclusive or, to what would come out if there were no
/// subnormal codes.
static SMALL: [[u8; 16]; 2] = {
    let mut t = [[0; 16]; 2];
    let mut i = 0;
    while i < 16 {
        let exact = (E4M3[i].to_bits() >> 16) as u16;
        t[0][i] = exact as u8 ^ ((i as u8) << 4);
        t[1][i] = (exact >> 8) as u8 ^ 0x3c;
        i += 1;
    }
    t
};

/// High bytes of BF16 numbers by the high nibble of a code: the sign, and the upper three exponent bits moved to the bias of BF16.
static HIGH: [u8; 16] = {
    let mut t = [0; 16];
    let mut i = 0;
    while i < 16 {
        t[i] = (i as u8 & 8) << 4 | (0x3c + (i as u8 & 7));
        i += 1;
    }
    t
};

/// A table of 16 bytes in both lanes.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn table(bytes: &[u8; 16]) -> __m256i {
    // SAFETY: 16 bytes.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) })
}

/// 32 E4M3 codes as BF16, exactly; NaN codes give NaN. In each 128-bit lane the first 8 codes go to the first result, the others to
/// the second.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn fp8_to_bf16(codes: __m256i) -> [__m256i; 2] {
    let magnitude = _mm256_and_si256(codes, _mm256_set1_epi8(0x7f));
    // A lookup gives 0 where bit 7 of the index is set: here, for all codes from 16 up.
    let small = _mm256_add_epi8(magnitude, _mm256_set1_epi8(0x70));
    let low = _mm256_and_si256(_mm256_slli_epi16::<4>(codes), _mm256_set1_epi8(0xf0_u8 as i8));
    let low = _mm256_xor_si256(low, _mm256_shuffle_epi8(table(&SMALL[0]), small));
    let top = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), _mm256_set1_epi8(0x0f));
    let high = _mm256_xor_si256(_mm256_shuffle_epi8(table(&HIGH), top), _mm256_shuffle_epi8(table(&SMALL[1]), small));
    // The mantissa of a NaN code is not zero, so that all ones in sign and exponent suffice.
    let nan = _mm256_cmpeq_epi8(magnitude, _mm256_set1_epi8(0x7f));
    let high = _mm256_or_si256(high, nan);
    [_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)]
}

/// Unpacks all lines of a panel.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn unpack<const LINES: u8>(from: &[u8], to: &mut [u8]) {
    for (from, to) in from.chunks_exact(LINE).zip(to.chunks_exact_mut(LINE * operands_of(LINES))) {
        for h in 0..2 {
            // SAFETY: half `h` of a line.
            let v = unsafe { _mm256_loadu_si256(from.as_ptr().add(h * HALF).cast()) };
            for (to, v) in to.chunks_exact_mut(LINE).zip(operands::<LINES>(v)) {
                // SAFETY: half `h` of a line.
                unsafe { _mm256_storeu_si256(to.as_mut_ptr().add(h * HALF).cast(), v) };
            }
        }
    }
}

/// Sums of R rows and P panels, in halves.
type Sums<T, const R: usize, const P: usize> = [[[T; 2]; P]; R];

/// Multiplies by the row scales that open a panel's scales, if it has them, and writes the results.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn finish<const R: usize, const P: usize>(t: Tile<'_>, total: &Sums<__m256, R, P>, row_scales: bool) {
    let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for p in 0..P {
        for h in 0..2 {
            let first = p * PANEL + h * 8;
            if first >= t.width {
                return;
            }
            let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32((t.width - first).min(8) as i32), lane);
            for (r, total) in total.iter().enumerate() {
                let mut v = total[p][h];
                if row_scales {
                    // SAFETY: `check` saw the scales of P panels.
                    let scale = unsafe { _mm256_loadu_ps(t.scales.as_ptr().add(p * t.scale_stride + h * HALF).cast()) };
                    v = _mm256_mul_ps(v, scale);
                }
                // SAFETY: `check` saw that `width` outputs of R rows fit, and `first` is below `width`.
                let to = unsafe { t.out.as_mut_ptr().add(r * t.out_stride + first) };
                // SAFETY: as above; lanes from `width` on are masked off.
                unsafe { _mm256_maskstore_ps(to, mask, v) };
            }
        }
    }
}

/// Four bytes, 8 times.
///
/// # Safety
/// `p .. p + 4` is readable.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn load_dword(p: *const u8) -> __m256i {
    // SAFETY: readable by the caller's promise.
    _mm256_set1_epi32(unsafe { p.cast::<i32>().read_unaligned() })
}

/// One F32, 8 times.
///
/// # Safety
/// `p .. p + 4` is readable.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn load_f32(p: *const u8) -> __m256 {
    // SAFETY: readable by the caller's promise.
    _mm256_set1_ps(unsafe { p.cast::<f32>().read_unaligned() })
}

/// Unsigned weights x signed inputs with a scale per `XG` columns. `GROUPED`: weights have group scales too.
///
/// `WIDE`, for weights of 8 bits: inputs are words, as `super::product` widens them, and `vpmaddwd` multiplies. Else, for weights up to
/// 15, `vpmaddubsw` does, and its sums stay in 16 bits for a group: 8 times 2 x 15 x 127 at most.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn int8_tile<
    const LINES: u8,
    const WIDE: bool,
    const XG: usize,
    const GROUPED: bool,
    const R: usize,
    const P: usize,
>(
    t: Tile<'_>,
) {
    const { assert!(WIDE || XG <= 32, "sums of more columns do not fit 16 bits") };
    let per_line = operands_of(LINES);
    let groups = BLOCK / XG;
    let code_bytes = if WIDE { BLOCK * 2 } else { BLOCK };
    let block_bytes = code_bytes + groups * 8;
    let group_bytes = if GROUPED { (t.blocks * BLOCK).div_ceil(t.group) * PANEL * 2 } else { 0 };
    t.check(R, P, t.blocks * BLOCK * PANEL / per_line, PANEL * 4 + group_bytes, block_bytes);

    // From here on every read is in bounds: `check` saw all blocks of the lines of P panels and of the inputs of R rows, and a
    // scale for every group, those of the padding included.
    let mut total: Sums<__m256, R, P> = [[[_mm256_setzero_ps(); 2]; P]; R];
    let mut line = t.weights.as_ptr();
    let mut x = t.inputs.as_ptr();
    let mut scale = t.scales[PANEL * 4..].as_ptr();
    let chunks_per_scale = if GROUPED { t.group / CHUNK } else { 1 };
    let mut chunks_left = chunks_per_scale;
    for block in 0..t.blocks {
        let ahead = t.ahead::<R, P>(block, BLOCK * PANEL / per_line);
        for g in 0..groups {
            let mut sums: Sums<__m256i, R, P> = [[[_mm256_setzero_si256(); 2]; P]; R];
            for j in 0..XG / 4 / per_line {
                for p in 0..P {
                    let at = line.wrapping_add(p * t.weight_stride);
                    prefetch(at.wrapping_add(ahead));
                    let mut w = [[_mm256_setzero_si256(); 2]; 2];
                    for (h, w) in w.iter_mut().enumerate() {
                        // SAFETY: half of the next line of panel `p`, in bounds as said above.
                        let v = unsafe { _mm256_loadu_si256(at.wrapping_add(h * HALF).cast()) };
                        *w = operands::<LINES>(v);
                    }
                    for l in 0..per_line {
                        let k = g * XG + (j * per_line + l) * 4;
                        if WIDE {
                            for odd in 0..2 {
                                let w = match odd {
                                    0 => {
                                        let mask = _mm256_set1_epi16(0xff);
                                        [_mm256_and_si256(w[0][l], mask), _mm256_and_si256(w[1][l], mask)]
                                    }
                                    _ => [_mm256_srli_epi16::<8>(w[0][l]), _mm256_srli_epi16::<8>(w[1][l])],
                                };
                                for (r, sums) in sums.iter_mut().enumerate() {
                                    // SAFETY: two words of row `r`, in bounds as said above.
                                    let x = unsafe { load_dword(x.add(r * block_bytes + k * 2 + odd * 4)) };
                                    for h in 0..2 {
                                        sums[p][h] = _mm256_add_epi32(sums[p][h], _mm256_madd_epi16(w[h], x));
                                    }
                                }
                            }
                        } else {
                            for (r, sums) in sums.iter_mut().enumerate() {
                                // SAFETY: four codes of row `r`, in bounds as said above.
                                let x = unsafe { load_dword(x.add(r * block_bytes + k)) };
                                for h in 0..2 {
                                    sums[p][h] = _mm256_add_epi16(sums[p][h], _mm256_maddubs_epi16(w[h][l], x));
                                }
                            }
                        }
                    }
                }
                line = line.wrapping_add(LINE);
            }
            for p in 0..P {
                let mut w_scale = [_mm256_setzero_ps(); 2];
                if GROUPED {
                    let at = scale.wrapping_add(p * t.scale_stride);
                    for (h, w_scale) in w_scale.iter_mut().enumerate() {
                        // SAFETY: half of the 16 scales of this group of panel `p`, in bounds as said above.
                        *w_scale = _mm256_cvtph_ps(unsafe { _mm_loadu_si128(at.wrapping_add(h * 16).cast()) });
                    }
                    prefetch(at.wrapping_add(P * t.scale_stride));
                }
                for (r, sums) in sums.iter().enumerate() {
                    let at = x.wrapping_add(r * block_bytes + code_bytes + g * 4);
                    // SAFETY: the scale of group `g` of row `r`, in bounds as said above.
                    let x_scale = unsafe { load_f32(at) };
                    // SAFETY: its correction, likewise.
                    let correction = unsafe { load_dword(at.wrapping_add(groups * 4)) };
                    for h in 0..2 {
                        let sum = if WIDE { sums[p][h] } else { _mm256_madd_epi16(sums[p][h], _mm256_set1_epi16(1)) };
                        let sum = _mm256_cvtepi32_ps(_mm256_add_epi32(sum, correction));
                        let (a, b) = if GROUPED { (_mm256_mul_ps(sum, x_scale), w_scale[h]) } else { (sum, x_scale) };
                        total[r][p][h] = _mm256_fmadd_ps(a, b, total[r][p][h]);
                    }
                }
            }
            if GROUPED {
                chunks_left -= 1;
                if chunks_left == 0 {
                    chunks_left = chunks_per_scale;
                    scale = scale.wrapping_add(PANEL * 2);
                }
            }
        }
        x = x.wrapping_add(R * block_bytes);
    }
    finish(t, &total, true);
}

/// BF16 weights x F32 inputs. `TILES`: an F32 scale per panel and block (FP8 128x128); else `ROWS`: an F32 scale per output.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn bf16_tile<const LINES: u8, const TILES: bool, const ROWS: bool, const R: usize, const P: usize>(
    t: Tile<'_>,
) {
    let per_line = operands_of(LINES);
    let block_bytes = BLOCK * 4;
    let scale_bytes = if TILES {
        t.blocks * 4
    } else if ROWS {
        PANEL * 4
    } else {
        0
    };
    t.check(R, P, t.blocks * BLOCK * PANEL * 2 / per_line, scale_bytes, block_bytes);

    // From here on every read is in bounds: `check` saw all blocks of the lines of P panels and of the inputs of R rows, and a
    // scale for every block.
    let mut total: Sums<__m256, R, P> = [[[_mm256_setzero_ps(); 2]; P]; R];
    let mut line = t.weights.as_ptr();
    let mut x = t.inputs.as_ptr();
    for block in 0..t.blocks {
        let ahead = t.ahead::<R, P>(block, BLOCK * PANEL * 2 / per_line);
        let mut sums = if TILES { [[[_mm256_setzero_ps(); 2]; P]; R] } else { total };
        for j in 0..BLOCK / 2 / per_line {
            for p in 0..P {
                let at = line.wrapping_add(p * t.weight_stride);
                prefetch(at.wrapping_add(ahead));
                let mut w = [[_mm256_setzero_si256(); 2]; 2];
                for (h, w) in w.iter_mut().enumerate() {
                    // SAFETY: half of the next line of panel `p`, in bounds as said above.
                    let v = unsafe { _mm256_loadu_si256(at.wrapping_add(h * HALF).cast()) };
                    *w = operands::<LINES>(v);
                }
                for l in 0..per_line {
                    for odd in 0..2 {
                        let k = (j * per_line + l) * 2 + odd;
                        let w = match odd {
                            0 => [_mm256_slli_epi32::<16>(w[0][l]), _mm256_slli_epi32::<16>(w[1][l])],
                            _ => {
                                let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
                                [_mm256_and_si256(w[0][l], high), _mm256_and_si256(w[1][l], high)]
                            }
                        };
                        let w = [_mm256_castsi256_ps(w[0]), _mm256_castsi256_ps(w[1])];
                        for (r, sums) in sums.iter_mut().enumerate() {
                            // SAFETY: an input of row `r`, in bounds as said above.
                            let x = unsafe { load_f32(x.add(r * block_bytes + k * 4)) };
                            for h in 0..2 {
                                sums[p][h] = _mm256_fmadd_ps(w[h], x, sums[p][h]);
                            }
                        }
                    }
                }
            }
            line = line.wrapping_add(LINE);
        }
        if TILES {
            for p in 0..P {
                // SAFETY: the scale of this block of panel `p`, in bounds as said above.
                let scale = unsafe { load_f32(t.scales.as_ptr().add(p * t.scale_stride + block * 4)) };
                for r in 0..R {
                    for h in 0..2 {
                        total[r][p][h] = _mm256_fmadd_ps(sums[r][p][h], scale, total[r][p][h]);
                    }
                }
            }
        } else {
            total = sums;
        }
        x = x.wrapping_add(R * block_bytes);
    }
    finish(t, &total, ROWS);
}
