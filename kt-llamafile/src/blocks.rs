//! Blocks that are used as the file has them: IQ1, IQ2 and IQ3, whose codes number points of grids and would take up to twice the memory
//! if they were repacked.

use kt_avx512::engine::{Bits, Blocks, Grid, Isa, Row, SUPER};
use kt_core::format::float::f16_to_f32;
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
    ($name:ident, $bytes:ident, $groups:literal, $points:literal, $read:ident, $grid:ident, $bits:ident, $unit:expr) => {
        #[doc = concat!("See [`ggml::", stringify!($read), "`].")]
        #[derive(Clone, Copy)]
        pub struct $name;

        impl Blocks for $name {
            const BYTES: usize = ggml::$bytes;
            const GROUP: usize = SUPER / $groups;
            const BITS: Bits = Bits::$bits;
            #[inline(always)]
            fn read(block: &[u8], row: &mut Row) {
                let block: &[u8; ggml::$bytes] = block.try_into().expect("a block");
                let of: Points<$groups, $points> = ggml::$read(block);
                let unit: fn(&[u8; ggml::$bytes]) -> f32 = $unit;
                let unit = unit(block);
                row.points[..$points].copy_from_slice(&of.points);
                row.bits = of.bits;
                for (scale, of_group) in row.scales.iter_mut().zip(of.scales) {
                    *scale = (unit * of_group as f32).to_le_bytes();
                }
            }
            #[inline(always)]
            fn look_up<I: Isa>(isa: I, row: &mut Row) {
                isa.look_up(&$grid, &row.points, &mut row.codes);
            }
        }
    };
}

/// The F16 that a block begins with.
#[inline(always)]
fn d(block: &[u8]) -> f32 {
    f16_to_f32(u16::from_le_bytes([block[0], block[1]]))
}

blocks!(Iq1S, IQ1_S_BYTES, 8, 32, iq1_s_points, IQ1, TwoLess, |b| d(b) / 8.0);
blocks!(Iq1M, IQ1_M_BYTES, 16, 32, iq1_m_points, IQ1, TwoLess, |b| ggml::iq1_m_scale(b) / 8.0);
blocks!(Iq2Xxs, IQ2_XXS_BYTES, 8, 32, iq2_xxs_points, IQ2_XXS, Negate, |b| d(b) / 8.0);
blocks!(Iq2Xs, IQ2_XS_BYTES, 16, 32, iq2_xs_points, IQ2_XS, Negate, |b| d(b) / 8.0);
blocks!(Iq2S, IQ2_S_BYTES, 16, 32, iq2_s_points, IQ2_S, Negate, |b| d(b) / 8.0);
blocks!(Iq3Xxs, IQ3_XXS_BYTES, 8, 64, iq3_xxs_points, IQ3_XXS, Negate, |b| d(b) / 4.0);
blocks!(Iq3S, IQ3_S_BYTES, 8, 64, iq3_s_points, IQ3_S, Negate, |b| d(b));
