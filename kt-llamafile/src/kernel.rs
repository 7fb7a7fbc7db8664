//! The kernel's face towards the CPU flow: detection, what it accepts, dispatch.

#![allow(unsafe_code)] // kernel

use std::ops::Range;

use kt_core::activation::Activation;
use kt_core::cpu::input::{InputLayout, Inputs};
use kt_core::cpu::kernel::{Kernel, Outputs, Scratch};
use kt_core::cpu::tier::Tier;
use kt_core::format::ggml;
use kt_core::{Format, Matrix, Unsupported};

#[cfg(target_arch = "x86_64")]
use crate::x86;

/// How input rows are rounded for every format here: groups of 32, the groups of Q8_0 and Q4_K.
pub(crate) const INPUTS: InputLayout = InputLayout::Int8 { group: 32, times: 1 };

/// The instruction sets that this crate has products for; a value of it proves that the CPU has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
}

/// Best first.
const ISAS: &[(Tier, Isa)] = &[
    #[cfg(target_arch = "x86_64")]
    (Tier::Avx512Vnni, Isa::Avx512Vnni),
    #[cfg(target_arch = "x86_64")]
    (Tier::Avx512, Isa::Avx512),
    #[cfg(target_arch = "x86_64")]
    (Tier::Avx2, Isa::Avx2),
];

/// Products with GGUF blocks in place. Holding a value proves that the CPU has the instructions.
#[derive(Debug, Clone, Copy)]
pub struct Llamafile(Isa);

impl Llamafile {
    /// The best instructions of this CPU up to `cap`: AVX-512 with VNNI, AVX-512, or AVX2 with FMA and F16C.
    ///
    /// # Errors
    /// Which CPU features are missing, or that `cap` excludes all of these.
    pub fn detect(cap: Tier) -> Result<Self, Unsupported> {
        if let Some(&(_, isa)) = ISAS.iter().find(|(tier, _)| *tier <= cap && tier.available()) {
            return Ok(Llamafile(isa));
        }
        Err(Unsupported::new(if cap < Tier::Avx2 {
            format!("needs at least tier {}, but tiers are capped at {cap}", Tier::Avx2)
        } else {
            format!("needs at least tier {}; this CPU lacks {}", Tier::Avx2, Tier::Avx2.missing().join(", "))
        }))
    }
}

/// Calls a function of the instruction set's module.
macro_rules! dispatch {
    ($isa:expr, $function:ident($($arg:expr),* $(,)?)) => {
        match $isa {
            // SAFETY: `Llamafile::detect` makes this value only where tier avx2 is available.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { x86::avx2::$function($($arg),*) },
            // SAFETY: `Llamafile::detect` makes this value only where tier avx512 is available.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { x86::avx512::$function($($arg),*) },
            // SAFETY: `Llamafile::detect` makes this value only where tier avx512vnni is available.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => unsafe { x86::avx512vnni::$function($($arg),*) },
        }
    };
}

impl Kernel for Llamafile {
    fn tier(self) -> Tier {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Tier::Avx2,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Tier::Avx512,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => Tier::Avx512Vnni,
        }
    }

    fn accepts(self, format: Format, _rows: usize, _cols: usize) -> Result<(InputLayout, &'static str), Unsupported> {
        match (format, self.tier() == Tier::Avx512Vnni) {
            (Format::Q8_0 | Format::Q4_0 | Format::Q5_0 | Format::Q4K | Format::Q6K, true) => {
                Ok((INPUTS, "GGUF blocks in place, VNNI"))
            }
            (Format::Q8_0 | Format::Q4_0 | Format::Q5_0 | Format::Q4K | Format::Q6K, false) => {
                Ok((INPUTS, "GGUF blocks in place, byte multiply-add"))
            }
            _ if ggml::block(format).is_some() => {
                Err(Unsupported::new(format!("{format} is not native yet; runs on the portable kernel")))
            }
            _ => Err(Unsupported::new(format!(
                "{format} is not a GGUF block format; this backend runs Q8_0, Q4_0, Q5_0, Q4_K and Q6_K"
            ))),
        }
    }

    fn packed_bytes(self, _format: Format, _rows: usize, _cols: usize) -> Option<usize> {
        None
    }

    /// Not called: all weights are used in place, so there is nothing to write.
    fn pack(self, _matrix: &Matrix, _out: &mut [u8]) {}

    #[allow(unused_variables)] // where there is no instruction set there is no value of this type either
    fn pack_input(self, layout: InputLayout, x: &[f32], out: &mut [u8]) {
        dispatch!(self.0, pack_input(layout, x, out))
    }

    #[allow(unused_variables)] // as above
    fn activate(self, rule: Activation, gate: &mut [f32], up: &[f32]) {
        dispatch!(self.0, activate(rule, gate, up))
    }

    /// Bit-identical on every tier, for any number of rows and any cut of the outputs.
    ///
    /// # Panics
    /// When shapes, formats or the input layout do not belong together: a caller's error.
    fn product(
        self,
        Outputs { of: w, range: outputs, .. }: Outputs<'_>,
        x: Inputs<'_>,
        rows: Range<usize>,
        out: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let matrix = w.matrix().expect("this kernel uses weights in place and packs none");
        assert!(outputs.start <= outputs.end && outputs.end <= matrix.rows(), "outputs {outputs:?} out of range");
        assert!(x.layout() == INPUTS && x.cols() == matrix.cols(), "input rows of another layout or width");
        assert_eq!(out.len(), rows.len() * outputs.len(), "output of another shape");
        assert!(rows.end <= x.rows(), "rows {rows:?} out of range");
        let _ = &scratch; // used by every instruction set there is
        dispatch!(self.0, product(matrix, outputs, x, rows, out, &mut scratch.panel))
    }
}
