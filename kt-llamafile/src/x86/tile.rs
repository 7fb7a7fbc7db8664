//! A tile of input rows, gathered and with the sums that the products need.

#![allow(unsafe_code)] // kernel

use std::ops::Range;

use std::arch::x86_64::*;
use std::mem::{align_of, size_of};

use kt_core::cpu::input::{BLOCK, Inputs};

use crate::kernel::INPUTS;

/// Rows of a tile. 64 rows of 128 columns and their sums (20 KiB) fit a level-1 cache of 32 KiB, while the work of bringing
/// weights into registers is shared by 64.
pub const TILE_ROWS: usize = 64;

/// 128 columns of one row.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Record {
    /// Per group of 32 columns: codes, four to a number.
    pub codes: [[i32; 8]; 4],
    /// Scale per group.
    pub scale: [f32; 4],
    /// Q8_0, Q4_0, Q5_0: -128 * the sum of codes, per group. Q6_K: -32 * the sum of codes, per 16 columns.
    sums: [i32; 8],
    /// Q4_K: the bits of scale * sum of codes. Q6_K: -16 * the sums of codes over 16 columns, two I16 to a number.
    extra: [i32; 4],
}

impl Record {
    /// `-128 *` the sum of codes of a group: what weights with offset 128 add too much.
    #[inline(always)]
    pub fn offset(&self, group: usize) -> i32 {
        self.sums[group]
    }

    /// Scale times sum of codes of a group.
    #[inline(always)]
    pub fn scaled_sum(&self, group: usize) -> f32 {
        f32::from_bits(self.extra[group] as u32)
    }

    /// `-32 *` the sums of codes over the halves of a group.
    #[inline(always)]
    pub fn sums16(&self, group: usize) -> [i32; 2] {
        [self.sums[2 * group], self.sums[2 * group + 1]]
    }

    /// `-16 *` the sums of codes over the halves of a group, as I16.
    #[inline(always)]
    pub fn pairs(&self, group: usize) -> i32 {
        self.extra[group]
    }

    /// Reads a block of int8 inputs with groups of 32.
    #[inline(always)]
    fn fill(&mut self, block: &[u8; INPUTS.block_bytes()], sums16: bool) {
        let block = Block::from(*block);
        self.codes = block.codes;
        self.scale = block.scale;
        if sums16 {
            // SAFETY: every x86-64 has SSE2.
            (self.sums, self.extra) = unsafe { sums_of_16(&block.codes) };
        } else {
            for g in 0..4 {
                self.sums[g] = block.sum[g] * -128;
                self.extra[g] = (block.scale[g] * block.sum[g] as f32).to_bits() as i32;
            }
        }
    }
}

/// A block of [`INPUTS`], as numbers.
#[repr(C)]
struct Block {
    codes: [[i32; 8]; 4],
    scale: [f32; 4],
    sum: [i32; 4],
}

impl From<[u8; INPUTS.block_bytes()]> for Block {
    #[inline(always)]
    fn from(bytes: [u8; INPUTS.block_bytes()]) -> Self {
        // SAFETY: equal sizes, any bytes are a `Block`, and x86 is little-endian as the block is.
        unsafe { std::mem::transmute(bytes) }
    }
}

/// `-32 *` the sum of each 16 codes, and `-16 *` that as I16 by twos. SSE2, which every x86-64 has, sums 8 bytes at once.
#[target_feature(enable = "sse2")]
#[inline]
fn sums_of_16(codes: &[[i32; 8]; 4]) -> ([i32; 8], [i32; 4]) {
    let mut halves = [_mm_setzero_si128(); 2];
    for (half, codes) in halves.iter_mut().zip(codes.chunks_exact(2)) {
        let mut twos = [_mm_setzero_si128(); 2];
        for (two, c) in twos.iter_mut().zip(codes) {
            // Sums of bytes with offset 128.
            let eights = |a, b, c, d| {
                let unsigned = _mm_xor_si128(_mm_setr_epi32(a, b, c, d), _mm_set1_epi8(-128));
                _mm_sad_epu8(unsigned, _mm_setzero_si128())
            };
            let (a, b) = (eights(c[0], c[1], c[2], c[3]), eights(c[4], c[5], c[6], c[7]));
            *two = _mm_add_epi64(_mm_unpacklo_epi64(a, b), _mm_unpackhi_epi64(a, b));
        }
        let sums = _mm_unpacklo_epi64(_mm_shuffle_epi32::<0b10_00>(twos[0]), _mm_shuffle_epi32::<0b10_00>(twos[1]));
        // -32 * (sum - 16 * 128)
        *half = _mm_sub_epi32(_mm_set1_epi32(32 * 16 * 128), _mm_slli_epi32::<5>(sums));
    }
    let pairs = _mm_packs_epi32(_mm_srai_epi32::<1>(halves[0]), _mm_srai_epi32::<1>(halves[1]));
    // SAFETY: equal sizes, and any bits are numbers.
    unsafe { (std::mem::transmute::<[__m128i; 2], [i32; 8]>(halves), std::mem::transmute::<__m128i, [i32; 4]>(pairs)) }
}

/// Up to [`TILE_ROWS`] rows.
pub struct Tile<'a> {
    rows: usize,
    records: &'a [Record],
}

impl<'a> Tile<'a> {
    /// Bytes of scratch for tiles of such rows.
    pub fn bytes(rows: usize, cols: usize) -> usize {
        cols.div_ceil(BLOCK) * rows.min(TILE_ROWS) * size_of::<Record>()
    }

    /// Gathers `rows` of `x` into `memory`, which is 64-byte aligned and of [`Tile::bytes`] at least.
    #[inline(always)]
    pub fn gather(x: &Inputs<'_>, rows: Range<usize>, sums16: bool, memory: &'a mut [u8]) -> Self {
        assert!(memory.as_ptr().addr().is_multiple_of(align_of::<Record>()));
        assert!(rows.len() <= TILE_ROWS && memory.len() >= Self::bytes(rows.len(), x.cols()));
        let count = x.blocks() * rows.len();
        // SAFETY: address and length were just checked, any bytes are a `Record`, and `memory` is borrowed mutably for 'a.
        let records = unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast::<Record>(), count) };
        for (b, records) in records.chunks_exact_mut(rows.len()).enumerate() {
            for (record, row) in records.iter_mut().zip(rows.clone()) {
                let block = x.block(b, row).try_into().expect("the caller checked the layout");
                record.fill(block, sums16);
            }
        }
        Tile { rows: rows.len(), records }
    }

    /// Columns `128 * block` and on, of all rows.
    #[inline(always)]
    pub fn block(&self, block: usize) -> &[Record] {
        &self.records[block * self.rows..][..self.rows]
    }
}
