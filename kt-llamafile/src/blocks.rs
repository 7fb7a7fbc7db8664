//! Blocks that are used as the file has them: IQ1, IQ2 and IQ3, whose codes number points of grids and would take up to twice the memory
//! if they were repacked.

use kt_avx512::engine::{Bits, Blocks, Grid, Isa, Row, SUPER};
use kt_core::format::ggml::{self, Points};

static IQ1: Grid<8, 2048> = Grid::new(&ggml::IQ1_GRID, 8, 1);
static IQ2_XXS: Grid<8, 256> = Grid::new(&ggml::IQ2_XXS_GRID, 1, 0);
static IQ2_XS: Grid<8, 512> = Grid::new(&ggml::IQ2_XS_GRID, 1, 0);
static IQ2_S: Grid<8, 1024> = Grid::new(&ggml::IQ2_S_GRID, 1, 0);
static IQ3_XXS: Grid<4, 256> = Grid::new(&ggml::IQ3_XXS_GRID, 1, 0);
static IQ3_S: Grid<4, 512> = Grid::new(&ggml::IQ3_S_GRID, 1, 0);

/// Defines a type: bytes of a block, groups, points, how it is read, its grid, what its bits do, and what its codes are multiplied with
/// beside the scale of their group.
macro_rules! blocks {
    ($name:ident, $bytes:ident, $groups:literal, $points:literal, $read:expr, $grid:ident, $bits:ident, $unit:expr) => {
        /// See the function of the same name in [`ggml`].
        #[derive(Clone, Copy)]
        pub struct $name;

        impl Blocks for $name {
            const BYTES: usize = ggml::$bytes;
            const GROUP: usize = SUPER / $groups;
            const BITS: Bits = Bits::$bits;
            #[inline(always)]
            fn read<I: Isa>(isa: I, block: &[u8], row: &mut Row) {
                let block: &[u8; ggml::$bytes] = block.try_into().expect("a block");
                let of: Points<$groups, $points> = $read(isa, block);
                let unit: f32 = $unit(isa, block);
                row.points[..$points].copy_from_slice(&of.points);
                row.bits = of.bits;
                for (scale, of_group) in row.scales.iter_mut().zip(of.scales) {
                    *scale = (unit * of_group as f32).to_le_bytes();
                }
            }
            #[inline(always)]
            fn look_up<I: Isa>(isa: I, points: &[u16; SUPER / 4]) -> [I::Int; 4] {
                isa.look_up(&$grid, points)
            }
        }
    };
}

/// The F16 that a block begins with.
#[inline(always)]
fn d<I: Isa>(isa: I, block: &[u8]) -> f32 {
    isa.f16(u16::from_le_bytes([block[0], block[1]]))
}

/// [`ggml::iq1_m_scale`].
#[inline(always)]
fn iq1_m_d<I: Isa>(isa: I, block: &[u8; ggml::IQ1_M_BYTES]) -> f32 {
    isa.f16(ggml::iq1_m_scale_bits(block))
}

/// [`ggml::iq2_xxs_points`].
#[inline(always)]
fn iq2_xxs<I: Isa>(isa: I, block: &[u8; ggml::IQ2_XXS_BYTES]) -> Points<8, 32> {
    let [places, words] = isa.dwords(block[2..].first_chunk().expect("eight groups"));
    Points { scales: high_nibbles(&words), points: words_of(&places), bits: isa.even_signs(&words) }
}

/// [`ggml::iq3_xxs_points`].
#[inline(always)]
fn iq3_xxs<I: Isa>(isa: I, block: &[u8; ggml::IQ3_XXS_BYTES]) -> Points<8, 64> {
    let places: &[u8; 64] = block[2..].first_chunk().expect("64 points");
    let words = block[66..].first_chunk().expect("eight words");
    Points { scales: high_nibbles(words), points: words_of(places), bits: isa.even_signs(words) }
}

/// Bytes as words. A loop: mapped arrays of this length are not always vectors.
#[inline(always)]
fn words_of<const N: usize>(bytes: &[u8; N]) -> [u16; N] {
    let mut words = [0; N];
    for (word, &byte) in words.iter_mut().zip(bytes) {
        *word = u16::from(byte);
    }
    words
}

/// The scales in the highest bits of words.
#[inline(always)]
fn high_nibbles(words: &[u8; 32]) -> [u8; 8] {
    let words = words.as_chunks().0;
    std::array::from_fn(|g| (u32::from_le_bytes(words[g]) >> 28) as u8 * 2 + 1)
}

/// [`ggml::iq1_s_points`].
#[inline(always)]
fn iq1_s<I: Isa>(isa: I, block: &[u8; ggml::IQ1_S_BYTES]) -> Points<8, 32> {
    let words = block[34..].first_chunk().expect("eight words");
    let of_points = isa.four_of_each(words);
    let of_points: [u16; 32] = std::array::from_fn(|i| u16::from_le_bytes(of_points.as_chunks().0[i]));
    let (mut points, mut bits) = ([0; 32], [0; 32]);
    for i in 0..32 {
        points[i] = u16::from(block[2 + i]) | (of_points[i] >> (3 * (i % 4)) & 7) << 8;
        bits[i] = (of_points[i] as i16 >> 15) as u8;
    }
    let words = words.as_chunks().0;
    let scales = std::array::from_fn(|g| (u16::from_le_bytes(words[g]) >> 12 & 7) as u8 * 2 + 1);
    Points { scales, points, bits }
}

blocks!(Iq1S, IQ1_S_BYTES, 8, 32, iq1_s, IQ1, TwoLess, |isa, b| d(isa, b) / 8.0);
blocks!(Iq1M, IQ1_M_BYTES, 16, 32, |_, b| ggml::iq1_m_points(b), IQ1, TwoLess, |isa, b| iq1_m_d(isa, b) / 8.0);
blocks!(Iq2Xxs, IQ2_XXS_BYTES, 8, 32, iq2_xxs, IQ2_XXS, Negate, |isa, b| d(isa, b) / 8.0);
blocks!(Iq2Xs, IQ2_XS_BYTES, 16, 32, |_, b| ggml::iq2_xs_points(b), IQ2_XS, Negate, |isa, b| d(isa, b) / 8.0);
blocks!(Iq2S, IQ2_S_BYTES, 16, 32, |_, b| ggml::iq2_s_points(b), IQ2_S, Negate, |isa, b| d(isa, b) / 8.0);
blocks!(Iq3Xxs, IQ3_XXS_BYTES, 8, 64, iq3_xxs, IQ3_XXS, Negate, |isa, b| d(isa, b) / 4.0);
blocks!(Iq3S, IQ3_S_BYTES, 8, 64, |_, b| ggml::iq3_s_points(b), IQ3_S, Negate, d);
