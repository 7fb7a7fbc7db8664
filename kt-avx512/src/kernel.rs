//! The kernel: what it accepts, and one dispatch per call.

#![allow(unsafe_code)] // kernel

use std::ops::Range;

use kt_core::activation::Activation;
use kt_core::cpu::input::{self, BLOCK, InputLayout, Inputs};
use kt_core::cpu::kernel::{Kernel, Scratch, Weights};
use kt_core::cpu::tier::Tier;
use kt_core::{Format, Group, Matrix, Unsupported};

use crate::isa::{self, Isa, Job};
use crate::layout::{self, CHUNK, Layout, PANEL};
use crate::product::Product;

/// AVX-512 with what else the CPU has of VNNI, BF16 and VBMI. A value proves that the instructions exist.
#[derive(Debug, Clone, Copy)]
pub struct Avx512 {
    tier: Tier,
}

impl Avx512 {
    /// The best of the tiers `avx512`, `avx512vnni` and `avx512bf16` that this CPU has, up to `cap`.
    ///
    /// # Errors
    /// The CPU features that are missing, or that `cap` is below.
    pub fn detect(cap: Tier) -> Result<Self, Unsupported> {
        if cap < Tier::Avx512 {
            return Err(Unsupported::new(format!("limited to tier {cap}, AVX-512 starts at tier {}", Tier::Avx512)));
        }
        let missing = Tier::Avx512.missing();
        if !missing.is_empty() {
            return Err(Unsupported::new(format!("this CPU has no {}", missing.join(", "))));
        }
        // AMX is above but none of this kernel's.
        Ok(Avx512 { tier: Tier::detect(cap.min(Tier::Avx512Bf16)) })
    }

    /// Does a job for this CPU: the only place where tiers are told apart at run time.
    #[inline(always)]
    fn run(self, job: impl Job) {
        match self.tier {
            // SAFETY: `detect` saw the instructions of `self.tier`.
            Tier::Avx512Bf16 => job.go(unsafe { isa::Bf16::new() }),
            // SAFETY: as above.
            Tier::Avx512Vnni => job.go(unsafe { isa::Vnni::new() }),
            // SAFETY: `detect` gives no tier below AVX-512.
            _ => job.go(unsafe { isa::Plain::new() }),
        }
    }

    fn has_bf16(self) -> bool {
        self.tier == Tier::Avx512Bf16
    }
}

impl Kernel for Avx512 {
    fn tier(self) -> Tier {
        self.tier
    }

    fn accepts(self, format: Format, _rows: usize, _cols: usize) -> Result<(InputLayout, &'static str), Unsupported> {
        let grouped = InputLayout::Int8 { group: CHUNK };
        let vnni = self.tier >= Tier::Avx512Vnni;
        match format {
            Format::Bf16 if self.has_bf16() => Ok((InputLayout::Bf16, "vdpbf16ps, packed 16 x 2")),
            Format::Bf16 => Ok((InputLayout::F32, "F32 products of widened weights, packed 16 x 2")),
            Format::Fp8Block | Format::Fp8Channel if self.has_bf16() => {
                Ok((InputLayout::Bf16, "vdpbf16ps, E4M3 codes packed 16 x 4, to BF16 by byte tables"))
            }
            Format::Fp8Block | Format::Fp8Channel => {
                Ok((InputLayout::F32, "F32 products, E4M3 codes packed 16 x 4, to BF16 by word tables"))
            }
            Format::Int8(Group::Row) | Format::Int8Offset(Group::Row) => Ok((
                InputLayout::Int8 { group: BLOCK },
                if vnni { "VNNI, unsigned codes packed 16 x 4" } else { "vpmaddwd, unsigned codes packed 16 x 4" },
            )),
            Format::Int8(g) | Format::Int8Offset(g) => check_group(format, g).map(|()| {
                (
                    grouped,
                    if vnni {
                        "VNNI, unsigned codes packed 16 x 4, F16 scales"
                    } else {
                        "vpmaddwd, unsigned codes packed 16 x 4, F16 scales"
                    },
                )
            }),
            Format::Int4(g) => check_group(format, g).map(|()| {
                (
                    grouped,
                    if vnni {
                        "VNNI, nibbles packed 16 x 8, F16 scales"
                    } else {
                        "vpmaddwd, nibbles packed 16 x 8, F16 scales"
                    },
                )
            }),
            other => Err(Unsupported::new(format!("no AVX-512 product of {other}"))),
        }
    }

    fn packed_bytes(self, format: Format, rows: usize, cols: usize) -> Option<usize> {
        Some(rows.div_ceil(PANEL) * Layout::new(format, cols).panel_bytes())
    }

    fn pack(self, matrix: &Matrix, out: &mut [u8]) {
        layout::pack(matrix, out);
    }

    fn pack_input(self, layout: InputLayout, x: &[f32], out: &mut [u8]) {
        self.run(Compiled(PackInput { layout, x, out }));
    }

    fn activate(self, rule: Activation, gate: &mut [f32], up: &[f32]) {
        self.run(Compiled(Activate { rule, gate, up }));
    }

    fn product(
        self,
        weights: &Weights,
        outputs: Range<usize>,
        inputs: Inputs<'_>,
        rows: &[u32],
        out: &mut [f32],
        scratch: &mut Scratch,
    ) {
        self.run(Product { weights, outputs, inputs, rows, out, scratch });
    }
}

/// Weight groups must be whole groups of the inputs.
pub(crate) fn check_group(format: Format, group: Group) -> Result<(), Unsupported> {
    match group {
        Group::Of(g) if g == 0 || !(g as usize).is_multiple_of(CHUNK) => {
            Err(Unsupported::new(format!("{format}: groups must be multiples of {CHUNK} columns")))
        }
        _ => Ok(()),
    }
}

struct PackInput<'a> {
    layout: InputLayout,
    x: &'a [f32],
    out: &'a mut [u8],
}

struct Activate<'a> {
    rule: Activation,
    gate: &'a mut [f32],
    up: &'a [f32],
}

/// A job that is one function compiled for the tier, as opposed to one that calls several.
struct Compiled<J>(J);

impl<J: Job> Job for Compiled<J> {
    fn go<I: Isa>(self, isa: I) {
        isa.run(self.0);
    }
}

impl Job for PackInput<'_> {
    #[inline(always)]
    fn go<I: Isa>(self, _: I) {
        input::pack_block(self.layout, self.x, self.out);
    }
}

impl Job for Activate<'_> {
    #[inline(always)]
    fn go<I: Isa>(self, _: I) {
        self.rule.apply(self.gate, self.up);
    }
}
