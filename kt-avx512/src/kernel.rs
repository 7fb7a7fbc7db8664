//! The kernel: what it accepts, and one dispatch per call.

#![allow(unsafe_code)] // kernel

use std::ops::Range;

use kt_core::activation::Activation;
use kt_core::cpu::input::{BLOCK, InputLayout, Inputs, Sums, WIDE};
use kt_core::cpu::kernel::{Kernel, Outputs, Scratch};
use kt_core::cpu::tier::Tier;
use kt_core::format::mx;
use kt_core::{Format, Group, Matrix, Unsupported};

use crate::ahead;
use crate::inputs::PackInputs;
use crate::isa::{self, Isa, Job, Ports};
use crate::layout::{self, CHUNK, Layout, MOST_PANELS, PANEL};
use crate::lines::{E2M1_ZERO, SHIFTED};
use crate::product::Product;
use crate::tiled::TileUnit;

/// The best of this CPU's AVX tiers, `avx2` to `avx512bf16`. A value proves that the instructions exist. Weights are packed the same
/// for all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Avx {
    tier: Tier,
    ports: Ports,
    calls: Calls,
}

/// Which calls a kernel is for; see `words.rs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Calls {
    /// All.
    All,
    /// Those of few rows: others have scales as words.
    Few,
    /// Those of many rows, with scales as words.
    Many,
}

/// How scales become words in calls of many rows, see [`InputLayout::Int8Words`], and where.
#[derive(Debug, Clone, Copy)]
pub struct AsWords {
    /// Columns of a scale, or a part of these: 16 or 32.
    pub group: usize,
    /// The zero point of the codes.
    pub zero: i32,
    /// Whether there are minima.
    pub minima: bool,
    /// On which CPUs, if they have VNNI.
    pub worth: Worth,
}

/// On which CPUs with VNNI scales as words are faster (`PERFORMANCE.md`).
#[derive(Debug, Clone, Copy)]
pub enum Worth {
    /// All.
    Everywhere,
    /// Where tiles of words have six rows, not four: all but those of [`Ports::Own`] with 512 bits.
    TallTiles,
    /// Where what there is beside products takes their time: [`Ports::Shared`], and all with 256 bits.
    NothingFree,
}

/// From how many rows of an expert on, on average, calls have scales as words: making them is to be worth it.
const MANY_ROWS: usize = 32;

/// Whether a tier has VNNI, of which there are two.
const fn has_vnni(tier: Tier) -> bool {
    !matches!(tier, Tier::Avx2 | Tier::Avx512)
}

impl Avx {
    /// The best tier that this CPU has, up to `cap`.
    ///
    /// # Errors
    /// The CPU features that are missing, or that `cap` is below AVX2.
    pub fn detect(cap: Tier) -> Result<Self, Unsupported> {
        if cap < Tier::Avx2 {
            return Err(Unsupported::new(format!("limited to tier {cap}, needs tier {} at least", Tier::Avx2)));
        }
        let missing = Tier::Avx2.missing();
        if !missing.is_empty() {
            return Err(Unsupported::new(format!("this CPU has no {}", missing.join(", "))));
        }
        // AMX is above but none of this kernel's.
        let tier = Tier::detect(cap.min(Tier::Avx512Bf16));
        let calls = if has_vnni(tier) { Calls::Few } else { Calls::All };
        Ok(Avx { tier, ports: ahead::ports(), calls })
    }

    /// Does a job for this CPU: the only place where tiers are told apart at run time.
    #[inline(always)]
    pub fn run(self, job: impl Job) {
        match self.tier {
            // SAFETY: `detect` saw the instructions of `self.tier`.
            Tier::Avx512Bf16 if self.multiplies_bf16() => job.go(unsafe { isa::Bf16::new(self.ports) }),
            // SAFETY: as above.
            Tier::Avx512Bf16 => job.go(unsafe { isa::Vbmi::new(self.ports) }),
            // SAFETY: as above.
            Tier::Avx512Vnni => job.go(unsafe { isa::Vnni::new(self.ports) }),
            // SAFETY: as above.
            Tier::Avx512 => job.go(unsafe { isa::Plain::new(self.ports) }),
            // SAFETY: as above.
            Tier::AvxVnni => job.go(unsafe { isa::AvxVnni::new(self.ports) }),
            // SAFETY: `detect` saw AVX2 and gives no tier below.
            _ => job.go(unsafe { isa::Avx2::new(self.ports) }),
        }
    }
}

impl Avx {
    /// Whether BF16 weights meet BF16 inputs: where the CPU has instructions for that, but for those that are slower than F32's.
    fn multiplies_bf16(self) -> bool {
        self.tier == Tier::Avx512Bf16 && self.ports != Ports::Shared
    }

    /// The same as on a CPU that has such ports. Beside a tile unit, [`Ports::Own`]: few rows then have BF16 inputs, as many rows have.
    pub fn with_ports(self, ports: Ports) -> Avx {
        Avx { ports, ..self }
    }

    /// Inputs of weights whose scales may become words: `few` are those of calls of few rows.
    pub fn inputs_of_many(self, few: InputLayout, words: AsWords) -> InputLayout {
        let AsWords { group, zero, minima, worth } = words;
        let worth = match worth {
            Worth::Everywhere => true,
            Worth::TallTiles => self.ports != Ports::Own || self.tier == Tier::AvxVnni,
            Worth::NothingFree => self.ports == Ports::Shared || self.tier == Tier::AvxVnni,
        };
        if worth && self.calls == Calls::Many { InputLayout::Int8Words { group, zero, minima } } else { few }
    }

    /// Does a job with a tile unit for products of many rows; those of up to `stream_rows` rows with BF16 inputs stream (8 at most), in the unit's order
    /// of additions. `None`: weights with scales are BF16 numbers, rounded after they were multiplied with them (but for scales of outputs). Integers are so in
    /// any case, but for INT8 per channel, which stays what it is.
    ///
    /// # Panics
    /// When this is not of tier `avx512bf16`.
    #[inline(always)]
    pub fn run_with_tiles(self, unit: impl TileUnit, stream_rows: Option<usize>, job: impl Job) {
        assert_eq!(self.tier, Tier::Avx512Bf16, "tiles go with the highest tier only");
        // SAFETY: `detect` saw the instructions of `self.tier`.
        job.go(unsafe { isa::Tiled::new(unit, stream_rows) });
    }
}

/// A line for `explain`: the instructions that multiply, and how the weights are packed.
macro_rules! how {
    ($kernel:ident, int8, $packed:literal) => {
        match $kernel.tier {
            Tier::Avx2 | Tier::Avx512 => concat!("vpmaddubsw, ", $packed),
            _ => concat!("VNNI, ", $packed),
        }
    };
    ($kernel:ident, bf16, $packed:literal) => {
        match $kernel.tier {
            Tier::Avx512Bf16 if $kernel.multiplies_bf16() => concat!("vdpbf16ps, ", $packed),
            Tier::Avx512Bf16 => {
                concat!("F32 products of widened weights in place of vdpbf16ps, which Intel's cores do half as fast (measured on Emerald Rapids), ", $packed)
            }
            _ => concat!("F32 products of widened weights, ", $packed),
        }
    };
}

impl Kernel for Avx {
    /// The panels of the widest tile.
    const PANEL: usize = MOST_PANELS * PANEL;

    fn tier(self) -> Tier {
        self.tier
    }

    fn accepts(self, format: Format, _rows: usize, _cols: usize) -> Result<(InputLayout, &'static str), Unsupported> {
        // Sums of codes come multiplied with what they are to add, where one number does for all weights.
        let int8 = |group: usize, times: i32, how| Ok((InputLayout::Int8 { group, sums: Sums::Times(times) }, how));
        let vnni = has_vnni(self.tier);
        // Codes of 8 bits: without VNNI, products subtract the zero point themselves; see `Isa::WIDE_OFFSET`.
        let wide = if vnni { -128 } else { 0 };
        // Small codes: without VNNI, sums of their products are words for the length of a group.
        let small = |group: usize, times: i32, how| {
            let sums = Sums::Pairs(times);
            Ok((InputLayout::Int8 { group, sums: if vnni { sums.whole() } else { sums } }, how))
        };
        let bf16 = if self.multiplies_bf16() { InputLayout::Bf16 } else { InputLayout::F32 };
        let in_words = |accepted: Result<(InputLayout, &'static str), Unsupported>, group, zero, worth| {
            let words = AsWords { group, zero, minima: false, worth };
            accepted.map(|(few, how)| (self.inputs_of_many(few, words), how))
        };
        // Of groups of whole blocks sums are scaled once a block: that is little, where not all of it counts.
        let worth = |g: Group| match g.cols(BLOCK) {
            columns if columns.is_multiple_of(BLOCK) => Worth::NothingFree,
            _ => Worth::TallTiles,
        };
        match format {
            Format::F32 => Ok((InputLayout::F32, "F32 products, packed 16 x 1")),
            Format::F16 => Ok((InputLayout::F32, "F32 products of widened weights, packed 2 x 16")),
            Format::Bf16 => Ok((bf16, how!(self, bf16, "packed 16 x 2"))),
            Format::Fp8Block | Format::Fp8Channel => Ok((bf16, how!(self, bf16, "E4M3 codes packed 16 x 4"))),
            Format::Mxfp8 => Ok((bf16, how!(self, bf16, "E4M3 codes packed 16 x 4, E8M0 scales"))),
            Format::Int8(Group::Row) | Format::Int8Offset(Group::Row) => {
                int8(BLOCK, wide, how!(self, int8, "unsigned codes packed 16 x 4"))
            }
            Format::Int8(g) | Format::Int8Offset(g) => {
                check_group(format, g)?;
                int8(CHUNK, wide, how!(self, int8, "unsigned codes packed 16 x 4, F16 scales"))
            }
            // Sums of so many codes are words, which are multiplied with zero points.
            Format::Int8Asym(Group::Row) => {
                int8(BLOCK, 1, how!(self, int8, "unsigned codes packed 16 x 4, zero points"))
            }
            // Of groups of whole blocks zero points, less 128, come once a block.
            Format::Int8Asym(g) if g.cols(BLOCK).is_multiple_of(BLOCK) => {
                check_group(format, g)?;
                let how = how!(self, int8, "unsigned codes packed 16 x 4, F16 scales, zero points");
                Ok((InputLayout::Int8 { group: CHUNK, sums: Sums::TimesScaled(wide) }, how))
            }
            Format::Int8Asym(g) => {
                check_group(format, g)?;
                int8(CHUNK, 1, how!(self, int8, "unsigned codes packed 16 x 4, F16 scales, zero points"))
            }
            Format::Int4(Group::Row) => int8(BLOCK, -8, how!(self, int8, "nibbles packed 16 x 8")),
            Format::Int4(g) => {
                check_group(format, g)?;
                let how = how!(self, int8, "nibbles packed 16 x 8, F16 scales");
                in_words(small(CHUNK, -8, how), CHUNK, 8, worth(g))
            }
            Format::Int4Asym(Group::Row) => {
                int8(BLOCK, -SHIFTED, how!(self, int8, "nibbles packed 16 x 8, zero points"))
            }
            Format::Int4Asym(g) => {
                check_group(format, g)?;
                let few = small(CHUNK, -SHIFTED, how!(self, int8, "nibbles packed 16 x 8, F16 scales, zero points"));
                in_words(few, CHUNK, SHIFTED, worth(g))
            }
            Format::Mxfp4 => {
                let how = how!(self, int8, "E2M1 codes packed 16 x 8, doubled by a table, E8M0 scales");
                in_words(small(CHUNK, -E2M1_ZERO, how), CHUNK, E2M1_ZERO, Worth::NothingFree)
            }
            Format::Nvfp4 => {
                let how = how!(self, int8, "E2M1 codes packed 16 x 8, doubled by a table, E4M3 scales");
                in_words(small(mx::NV_COLS, -E2M1_ZERO, how), mx::NV_COLS, E2M1_ZERO, Worth::Everywhere)
            }
            other => Err(Unsupported::new(format!("no AVX product of {other}"))),
        }
    }

    fn packed_bytes(self, format: Format, rows: usize, cols: usize) -> Option<usize> {
        Some(layout::panels(rows) * Layout::new(format, cols).panel_bytes)
    }

    fn for_many(self) -> Option<(usize, Self)> {
        (self.calls == Calls::Few).then_some((MANY_ROWS, Avx { calls: Calls::Many, ..self }))
    }

    fn invariant(self) -> Self {
        Avx { calls: Calls::All, ..self }
    }

    fn layout_version(self) -> u32 {
        layout::VERSION
    }

    fn pack(self, matrix: &Matrix, rows: Range<usize>, out: &mut [u8]) {
        layout::pack(matrix, rows, out);
    }

    /// Of weights with one scale an output, inputs have one for as many columns as they can: sums are scaled a fourth as often. Not of those with zero points:
    /// the sum of so many codes is no word.
    fn inputs_of_rows(self, layout: InputLayout) -> InputLayout {
        match layout {
            InputLayout::Int8 { group: BLOCK, sums: Sums::Times(times) } if times == 1 || times == -SHIFTED => layout,
            InputLayout::Int8 { group: BLOCK, sums } => InputLayout::Int8 { group: WIDE, sums },
            layout => layout,
        }
    }

    fn pack_inputs(self, layout: InputLayout, x: &[f32], (stride, columns): (usize, usize), out: &mut [u8]) {
        let width = layout.columns();
        if columns == width {
            return self.run(Compiled(PackInputs { layout, x, stride, out }));
        }
        let mut padded = [0f32; WIDE];
        for (i, out) in out.chunks_exact_mut(layout.block_bytes()).enumerate() {
            padded[..columns].copy_from_slice(&x[i * stride..][..columns]);
            self.run(Compiled(PackInputs { layout, x: &padded[..width], stride: width, out }));
        }
    }

    fn activate(self, rule: Activation, gate: &mut [f32], up: &[f32]) {
        self.run(Compiled(Activate { rule, gate, up }));
    }

    fn add(self, weight: f32, y: &[f32], out: &mut [f32]) {
        self.run(Compiled(Add { weight, y, out }));
    }

    fn product(
        self,
        outputs: Outputs<'_>,
        inputs: Inputs<'_>,
        rows: Range<usize>,
        out: &mut [f32],
        scratch: &mut Scratch,
    ) {
        self.run(Product { outputs, inputs, rows, out, scratch, zero: 0 });
    }
}

/// Weight groups must be whole groups of the inputs.
fn check_group(format: Format, group: Group) -> Result<(), Unsupported> {
    match group {
        Group::Of(g) if g == 0 || !(g as usize).is_multiple_of(CHUNK) => {
            Err(Unsupported::new(format!("{format}: groups must be multiples of {CHUNK} columns")))
        }
        _ => Ok(()),
    }
}

struct Add<'a> {
    weight: f32,
    y: &'a [f32],
    out: &'a mut [f32],
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

impl Job for Add<'_> {
    #[inline(always)]
    fn go<I: Isa>(self, _: I) {
        kt_core::cpu::kernel::add(self.weight, self.y, self.out);
    }
}

impl Job for Activate<'_> {
    #[inline(always)]
    fn go<I: Isa>(self, _: I) {
        self.rule.apply_fused(self.gate, self.up);
    }
}
