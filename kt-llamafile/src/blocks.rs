//! Blocks that are used as the file has them: IQ1, IQ2 and IQ3, whose codes number points of grids and would take up to twice the memory
//! if they were repacked.

use kt_avx512::engine::{Blocks, SUPER};
use kt_core::format::float::f16_to_f32;
use kt_core::format::ggml::{self, OddScales};

/// Defines a type: bytes of a block, groups, how it is read, and what its codes are multiplied with beside the scale of their group.
macro_rules! blocks {
    ($name:ident, $bytes:ident, $groups:literal, $codes:ident, $unit:expr) => {
        #[doc = concat!("See [`ggml::", stringify!($codes), "`].")]
        #[derive(Clone, Copy)]
        pub struct $name;

        impl Blocks for $name {
            const BYTES: usize = ggml::$bytes;
            const GROUP: usize = SUPER / $groups;
            #[inline(always)]
            fn decode(block: &[u8], codes: &mut [i8; SUPER], scales: &mut [f32]) {
                let block: &[u8; ggml::$bytes] = block.try_into().expect("a block");
                let (of_groups, all): OddScales<$groups> = ggml::$codes(block);
                let unit: fn(&[u8; ggml::$bytes]) -> f32 = $unit;
                let unit = unit(block);
                *codes = all;
                for (scale, of_group) in scales.iter_mut().zip(of_groups) {
                    *scale = unit * of_group as f32;
                }
            }
        }
    };
}

/// The F16 that a block begins with.
#[inline(always)]
fn d(block: &[u8]) -> f32 {
    f16_to_f32(u16::from_le_bytes([block[0], block[1]]))
}

blocks!(Iq1S, IQ1_S_BYTES, 8, iq1_s_codes, |b| d(b) / 8.0);
blocks!(Iq1M, IQ1_M_BYTES, 16, iq1_m_codes, |b| ggml::iq1_m_scale(b) / 8.0);
blocks!(Iq2Xxs, IQ2_XXS_BYTES, 8, iq2_xxs_codes, |b| d(b) / 8.0);
blocks!(Iq2Xs, IQ2_XS_BYTES, 16, iq2_xs_codes, |b| d(b) / 8.0);
blocks!(Iq2S, IQ2_S_BYTES, 16, iq2_s_codes, |b| d(b) / 8.0);
blocks!(Iq3Xxs, IQ3_XXS_BYTES, 8, iq3_xxs_codes, |b| d(b) / 4.0);
blocks!(Iq3S, IQ3_S_BYTES, 8, iq3_s_codes, |b| d(b));
