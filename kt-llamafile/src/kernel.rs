//! The kernel's face towards the CPU flow: detection, what it accepts, dispatch.

use std::ops::Range;

use kt_avx512::Avx;
use kt_avx512::engine::{
    AsWords, Bytes, E2M1_ZERO, E2m1, Ints, Isa, Job, MOST_PANELS, Nibbles, PANEL, Product, SHIFTED, Worth, panels,
};
use kt_core::activation::Activation;
use kt_core::cpu::input::{BLOCK, InputLayout, Inputs, Sums};
use kt_core::cpu::kernel::{Kernel, Outputs, Scratch};
use kt_core::cpu::tier::Tier;
use kt_core::{Format, Matrix, Unsupported};

use crate::blocks::{Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs};
use crate::layout::{self, packed_layout};
use crate::lines::{
    Eights, FiveBits, Fours, Half, HalfPower, IQ1_ZERO, IQ2_ZERO, IQ3_S_ZERO, IQ3_XXS_ZERO, InUnits, Iq1Codes,
    Iq2Codes, Iq3SCodes, Iq3XxsCodes, Iq4, MoreOrLess, NibblesWithMinima, OfEights, OfUnits, Signed, SignedPairs,
    SixBits, ThreeBits, TwoBits, WithMinima,
};

/// Products of GGUF blocks, by the best instructions of this CPU. Holding a value proves that the CPU has them.
#[derive(Debug, Clone, Copy)]
pub struct Llamafile {
    avx: Avx,
    /// Blocks of IQ1, IQ2 and IQ3 are used as the file has them: less memory, several times slower for few rows.
    in_place: bool,
}

impl Llamafile {
    /// The best instructions of this CPU up to `cap`, from AVX2 to AVX-512 with VNNI: those above do nothing for these formats.
    ///
    /// # Errors
    /// Which CPU features are missing, or that `cap` excludes all of these.
    pub fn detect(cap: Tier) -> Result<Self, Unsupported> {
        let avx = Avx::detect(cap.min(Tier::Avx512Vnni))?;
        Ok(Llamafile { avx, in_place: false })
    }

    /// The same as on a CPU that has such ports.
    pub fn with_ports(self, ports: kt_avx512::engine::Ports) -> Self {
        Llamafile { avx: self.avx.with_ports(ports), ..self }
    }

    /// Whether it uses blocks of this type as the file has them.
    pub fn uses_in_place(self, format: Format) -> bool {
        self.in_place
            && matches!(
                format,
                Format::Iq1S
                    | Format::Iq1M
                    | Format::Iq2Xxs
                    | Format::Iq2Xs
                    | Format::Iq2S
                    | Format::Iq3Xxs
                    | Format::Iq3S
            )
    }
}

impl Kernel for Llamafile {
    /// The panels of the widest tile.
    const PANEL: usize = MOST_PANELS * PANEL;

    fn tier(self) -> Tier {
        self.avx.tier()
    }

    fn accepts(self, format: Format, _rows: usize, _cols: usize) -> Result<(InputLayout, &'static str), Unsupported> {
        // Without VNNI, products of codes of 8 bits subtract the zero point themselves; see `Isa::WIDE_OFFSET`.
        let vnni = !matches!(self.tier(), Tier::Avx2 | Tier::Avx512);
        let wide = Sums::Times(if vnni { -128 } else { 0 });
        let (group, sums) = match format {
            Format::Q8_0 | Format::Iq4Nl | Format::Iq4Xs => (32, wide),
            Format::Q4_0 => (32, Sums::Pairs(-8)),
            Format::Q5_0 => (32, Sums::Pairs(-16)),
            Format::Mxfp4Ggml => (32, Sums::Pairs(-E2M1_ZERO)),
            Format::Tq1_0 | Format::Tq2_0 => (32, Sums::Pairs(-1)),
            Format::Q3K => (32, Sums::PairHalves(-4)),
            Format::Q6K => (32, Sums::PairHalves(-32)),
            Format::Q4K => (32, Sums::PairWords(-8)),
            Format::Q5_1 | Format::Q5K => (32, Sums::PairScaled(-16)),
            Format::Q4_1 => (32, Sums::Scaled),
            Format::Q2K => (16, Sums::Scaled),
            Format::Iq1S => (32, Sums::Pairs(-SHIFTED)),
            Format::Iq1M => (16, Sums::Pairs(-IQ1_ZERO)),
            Format::Iq2Xxs => (32, Sums::Times(-IQ2_ZERO)),
            Format::Iq2Xs | Format::Iq2S => (16, Sums::Times(-IQ2_ZERO)),
            Format::Iq3Xxs => (32, Sums::Times(-IQ3_XXS_ZERO)),
            Format::Iq3S => (32, Sums::Pairs(-IQ3_S_ZERO)),
            _ => {
                return Err(Unsupported::new(format!(
                    "{format} is no GGUF block format, and this backend runs no others"
                )));
            }
        };
        let in_place = self.uses_in_place(format);
        let sums = match (in_place, vnni) {
            // Decoded codes have 8 bits.
            (true, _) => wide,
            // Sums in pairs are for words, which sums of products of small codes are without VNNI.
            (false, true) => sums.whole(),
            (false, false) => sums,
        };
        let how = match (vnni, in_place) {
            (true, false) => "VNNI, blocks repacked by 16 outputs",
            (true, true) => "VNNI, blocks in place, decoded for each product",
            (false, false) => "vpmaddubsw, blocks repacked by 16 outputs",
            (false, true) => "vpmaddubsw, blocks in place, decoded for each product",
        };
        let few = InputLayout::Int8 { group, sums };
        // Of types with small codes that gain by scales as words: columns of a scale, zero point, whether there are minima, and where they gain.
        let many = match format {
            Format::Q4_1 => Some((32, 8, true, Worth::Everywhere)),
            Format::Q5_0 => Some((32, 16, false, Worth::Everywhere)),
            Format::Q5_1 | Format::Q5K => Some((32, 16, true, Worth::Everywhere)),
            Format::Q2K => Some((16, 16, true, Worth::Everywhere)),
            Format::Iq1M => Some((16, IQ1_ZERO, false, Worth::Everywhere)),
            Format::Iq3S => Some((32, IQ3_S_ZERO, false, Worth::Everywhere)),
            Format::Q4_0 => Some((32, 8, false, Worth::TallTiles)),
            Format::Mxfp4Ggml => Some((32, E2M1_ZERO, false, Worth::TallTiles)),
            Format::Q3K => Some((16, 16, false, Worth::NothingFree)),
            Format::Q4K => Some((32, 8, true, Worth::NothingFree)),
            Format::Q6K => Some((16, 32, false, Worth::NothingFree)),
            Format::Iq1S => Some((32, SHIFTED, false, Worth::NothingFree)),
            _ => None,
        };
        let inputs = match many {
            Some((group, zero, minima, worth)) if !in_place => {
                self.avx.inputs_of_many(few, AsWords { group, zero, minima, worth })
            }
            _ => few,
        };
        Ok((inputs, how))
    }

    fn for_many(self) -> Option<(usize, Self)> {
        self.avx.for_many().map(|(rows, avx)| (rows, Llamafile { avx, ..self }))
    }

    fn invariant(self) -> Self {
        Llamafile { avx: self.avx.invariant(), ..self }
    }

    fn packed_bytes(self, format: Format, rows: usize, cols: usize) -> Option<usize> {
        (!self.uses_in_place(format)).then(|| panels(rows) * packed_layout(format, cols).panel_bytes)
    }

    fn in_place(self) -> Self {
        Llamafile { in_place: true, ..self }
    }

    fn layout_version(self) -> u32 {
        layout::VERSION
    }

    fn pack(self, matrix: &Matrix, rows: Range<usize>, out: &mut [u8]) {
        layout::pack(matrix, rows, out);
    }

    fn pack_inputs(self, layout: InputLayout, x: &[f32], rows: (usize, usize), out: &mut [u8]) {
        self.avx.pack_inputs(layout, x, rows, out);
    }

    fn activate(self, rule: Activation, gate: &mut [f32], up: &[f32]) {
        self.avx.activate(rule, gate, up);
    }

    fn add(self, weight: f32, y: &[f32], out: &mut [f32]) {
        self.avx.add(weight, y, out);
    }

    fn product(
        self,
        outputs: Outputs<'_>,
        inputs: Inputs<'_>,
        rows: Range<usize>,
        out: &mut [f32],
        scratch: &mut Scratch,
    ) {
        self.avx.run(OfBlocks(Product { outputs, inputs, rows, out, scratch, zero: 0 }));
    }
}

/// A product of blocks, for what runs jobs: weights as [`Llamafile`] packs them, or in place, with inputs as it wants them.
pub struct OfBlocks<'a>(pub Product<'a>);

impl Job for OfBlocks<'_> {
    fn go<I: Isa>(self, isa: I) {
        let (p, isa) = (self.0, isa.for_int8());
        if p.outputs.of.matrix().is_some() {
            return match p.outputs.of.format() {
                Format::Iq1S => p.decoded::<_, Iq1S, 32>(isa),
                Format::Iq1M => p.decoded::<_, Iq1M, 16>(isa),
                Format::Iq2Xxs => p.decoded::<_, Iq2Xxs, 32>(isa),
                Format::Iq2Xs => p.decoded::<_, Iq2Xs, 16>(isa),
                Format::Iq2S => p.decoded::<_, Iq2S, 16>(isa),
                Format::Iq3Xxs => p.decoded::<_, Iq3Xxs, 32>(isa),
                Format::Iq3S => p.decoded::<_, Iq3S, 32>(isa),
                other => unreachable!("{other} is repacked"),
            };
        }
        let in_words = matches!(p.inputs.layout(), InputLayout::Int8Words { .. });
        match p.outputs.of.format() {
            Format::Q8_0 => p.on::<_, Ints<Bytes<0>, Half<false>, 32, 32>>(isa, packed_layout),
            Format::Q4_0 => p.on_or_in_words::<_, Ints<Nibbles, Half<false>, 32, 32>>(isa, packed_layout),
            Format::Q4_1 => p.on_or_in_words::<_, Ints<Nibbles, Half<true>, 32, 32>>(isa, packed_layout),
            Format::Q5_0 => p.on_or_in_words::<_, Ints<FiveBits, Half<false>, 32, 32>>(isa, packed_layout),
            Format::Q5_1 => p.on_or_in_words::<_, Ints<FiveBits, Half<true>, 32, 32>>(isa, packed_layout),
            Format::Iq4Nl => p.on::<_, Ints<Iq4, Half<false>, 32, 32>>(isa, packed_layout),
            Format::Mxfp4Ggml => p.on_or_in_words::<_, Ints<E2m1, HalfPower, 32, 32>>(isa, packed_layout),
            // Sums of larger codes are rounded less.
            Format::Q2K if in_words => p.in_words::<_, Ints<Eights, OfEights, 16, 16>>(isa, packed_layout),
            Format::Q2K => p.on::<_, Ints<TwoBits, NibblesWithMinima, 16, 16>>(isa, packed_layout),
            Format::Q3K if in_words => p.in_words::<_, Ints<Fours, Signed<4>, 16, 16>>(isa, packed_layout),
            Format::Q4K if in_words => p.in_words::<_, Ints<Nibbles, OfUnits, 32, 32>>(isa, packed_layout),
            Format::Q6K if in_words => p.in_words::<_, Ints<SixBits, Signed<1>, 16, 16>>(isa, packed_layout),
            Format::Q3K => p.on::<_, Ints<ThreeBits, SignedPairs<true>, 16, BLOCK>>(isa, packed_layout),
            Format::Q4K => p.on::<_, Ints<Nibbles, InUnits, 32, BLOCK>>(isa, packed_layout),
            Format::Q5K => p.on_or_in_words::<_, Ints<FiveBits, WithMinima, 32, 32>>(isa, packed_layout),
            Format::Q6K => p.on::<_, Ints<SixBits, SignedPairs<false>, 16, BLOCK>>(isa, packed_layout),
            Format::Iq4Xs => p.on::<_, Ints<Iq4, Signed<1>, 32, 32>>(isa, packed_layout),
            Format::Tq1_0 | Format::Tq2_0 => p.on::<_, Ints<TwoBits, Half<false>, 32, 128>>(isa, packed_layout),
            Format::Iq1S => p.on_or_in_words::<_, Ints<Eights, MoreOrLess, 32, 32>>(isa, packed_layout),
            Format::Iq1M => p.on_or_in_words::<_, Ints<Iq1Codes, Signed<8>, 16, 16>>(isa, packed_layout),
            Format::Iq2Xxs => p.on::<_, Ints<Iq2Codes, Signed<8>, 32, 32>>(isa, packed_layout),
            Format::Iq2Xs | Format::Iq2S => p.on::<_, Ints<Iq2Codes, Signed<8>, 16, 16>>(isa, packed_layout),
            Format::Iq3Xxs => p.on::<_, Ints<Iq3XxsCodes, Signed<4>, 32, 32>>(isa, packed_layout),
            Format::Iq3S => p.on_or_in_words::<_, Ints<Iq3SCodes, Signed<1>, 32, 32>>(isa, packed_layout),
            other => unreachable!("{other} was never accepted"),
        }
    }
}
