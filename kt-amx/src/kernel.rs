//! The kernel: which products run on tiles, and what the others run on.

use std::ops::Range;

use kt_avx512::Avx;
use kt_avx512::engine::{Ports, Product};
use kt_core::activation::Activation;
use kt_core::cpu::CpuBackend;
use kt_core::cpu::input::{InputLayout, Inputs};
use kt_core::cpu::kernel::{Kernel, Outputs, Scratch};
use kt_core::cpu::tier::Tier;
use kt_core::format::ggml;
use kt_core::{Format, Group, Matrix, Unsupported};
use kt_llamafile::{Llamafile, OfBlocks};

use crate::Crossover;
use crate::unit::Unit;

/// Products on AMX tiles where an expert has rows enough, and those of kt-avx512 and kt-llamafile where it has not. A value proves that
/// this process may use AMX.
#[derive(Debug, Clone, Copy)]
pub struct Amx {
    unit: Unit,
    avx: Avx,
    llamafile: Llamafile,
    crossover: Crossover,
    /// Whether it is the one for many rows.
    many: bool,
}

impl Amx {
    /// The kernel, if `cap` allows its tier.
    ///
    /// # Errors
    /// `cap` is below [`Tier::Amx`], the CPU has no AMX or lacks what comes with it, or Linux does not grant it.
    pub fn detect(cap: Tier) -> Result<Self, Unsupported> {
        if cap < Tier::Amx {
            return Err(Unsupported::new(format!("limited to tier {cap}, needs tier {}", Tier::Amx)));
        }
        Self::with_unit(Unit::detect().map_err(|why| Unsupported::new(why.to_string()))?)
    }

    pub(crate) fn with_unit(unit: Unit) -> Result<Self, Unsupported> {
        let avx = Avx::detect(Tier::Avx512Bf16)?.with_ports(Ports::Own);
        if avx.tier() != Tier::Avx512Bf16 {
            return Err(Unsupported::new(format!(
                "this CPU has AMX and lacks what its kernels use besides: {}",
                Tier::Avx512Bf16.missing().join(", ")
            )));
        }
        let llamafile = Llamafile::detect(Tier::Avx512Bf16)?;
        Ok(Amx { unit, avx, llamafile, crossover: Crossover::default(), many: false })
    }

    /// The same with another crossover.
    pub fn with_crossover(self, crossover: Crossover) -> Self {
        Amx { crossover, ..self }
    }

    /// From how many rows on products run on tiles.
    pub fn crossover(self) -> Crossover {
        self.crossover
    }

    /// The kernel for many rows.
    pub(crate) fn with_many(self) -> Self {
        Amx { many: true, ..self }
    }

    /// The inputs of a format in calls of few rows.
    fn inputs_of_few(self, format: Format, rows: usize, cols: usize) -> Result<InputLayout, Unsupported> {
        let accepted = match Self::is_gguf(format) {
            true => self.llamafile.accepts(format, rows, cols),
            false => self.avx.accepts(format, rows, cols),
        };
        accepted.map(|(layout, _)| layout)
    }

    /// The backend `amx` with this kernel.
    pub fn into_backend(self) -> CpuBackend<Self> {
        CpuBackend::new("amx", self)
    }

    /// From how many rows on products of integers with one scale an output are on tiles.
    fn int8_on_tiles(self, format: Format) -> usize {
        match format {
            Format::Int4(_) => self.crossover.int8.max(NIBBLE_ROWS),
            _ => self.crossover.int8,
        }
    }

    /// Whether many rows of a format are on tiles of int8: integers with one scale an output, and the same zero point for all.
    pub(crate) fn has_int8_tiles(format: Format) -> bool {
        matches!(format, Format::Int8(Group::Row) | Format::Int8Offset(Group::Row) | Format::Int4(Group::Row))
    }

    /// The kernel that packs a format and multiplies few rows with it.
    fn is_gguf(format: Format) -> bool {
        ggml::block(format).is_some()
    }
}

/// The least rows for which nibbles are split for tiles: that takes as long for two rows as for 16, and memory brings twice as many weights meanwhile as of INT8
/// (`PERFORMANCE.md`).
const NIBBLE_ROWS: usize = 8;

impl Kernel for Amx {
    /// That of the kernel that packs, which is a multiple of the other one's.
    const PANEL: usize = <Avx as Kernel>::PANEL;

    fn tier(self) -> Tier {
        Tier::Amx
    }

    fn accepts(self, format: Format, rows: usize, cols: usize) -> Result<(InputLayout, &'static str), Unsupported> {
        let layout = self.inputs_of_few(format, rows, cols)?;
        match layout {
            InputLayout::Int8 { .. } if self.llamafile.uses_in_place(format) => {
                Ok((layout, "VNNI; blocks in place, decoded for each product"))
            }
            InputLayout::Int8 { .. } if Self::has_int8_tiles(format) => {
                Ok((layout, "AMX tiles of int8 for most rows, VNNI for few; packed by 16 outputs"))
            }
            InputLayout::Int8 { .. } if self.many => {
                Ok((InputLayout::Bf16, "AMX tiles of bf16, unpacked with their scales; packed by 16 outputs"))
            }
            InputLayout::Int8 { .. } if self.crossover.many == usize::MAX => Ok((layout, "VNNI; packed by 16 outputs")),
            InputLayout::Int8 { .. } => Ok((
                layout,
                "VNNI, and in calls of many rows AMX tiles of bf16, unpacked with their scales; packed by 16 outputs",
            )),
            InputLayout::Bf16 => Ok((
                layout,
                "AMX tiles of bf16 for most rows, F32 products in the same order for few; packed by 16 outputs",
            )),
            // Those in words are of kernels for many rows, which these are not.
            InputLayout::F32 | InputLayout::Int8Words { .. } => {
                Err(Unsupported::new(format!("{format} meets {layout}, of which AMX has no products")))
            }
        }
    }

    fn packed_bytes(self, format: Format, rows: usize, cols: usize) -> Option<usize> {
        if Self::is_gguf(format) {
            self.llamafile.packed_bytes(format, rows, cols)
        } else {
            self.avx.packed_bytes(format, rows, cols)
        }
    }

    fn in_place(self) -> Self {
        Amx { llamafile: self.llamafile.in_place(), ..self }
    }

    fn for_many(self) -> Option<(usize, Self)> {
        (self.crossover.many < usize::MAX).then(|| (self.crossover.many, self.with_many()))
    }

    fn invariant(self) -> Self {
        Amx { crossover: Crossover { many: usize::MAX, ..self.crossover }, ..self }
    }

    fn layout_version(self) -> u32 {
        // Weights are packed as by the one or the other.
        self.avx.layout_version() << 16 | self.llamafile.layout_version()
    }

    fn pack(self, matrix: &Matrix, rows: Range<usize>, out: &mut [u8]) {
        if Self::is_gguf(matrix.format()) {
            self.llamafile.pack(matrix, rows, out)
        } else {
            self.avx.pack(matrix, rows, out)
        }
    }

    fn inputs_of_rows(self, layout: InputLayout) -> InputLayout {
        self.avx.inputs_of_rows(layout)
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
        let gguf = Self::is_gguf(outputs.of.format());
        // What comes next may be packed by the other one, in a layout that this one does not know.
        let next = outputs.next.filter(|(weights, _)| Self::is_gguf(weights.format()) == gguf);
        let outputs = Outputs { next, ..outputs };
        let n = rows.len();
        if inputs.layout() == InputLayout::Bf16 {
            let format = outputs.of.format();
            let zero = match self.inputs_of_few(format, outputs.of.rows(), outputs.of.cols()) {
                Ok(InputLayout::Int8 { sums, .. }) => sums.zero_point(),
                _ => 0,
            };
            // Streams here too, since kt-avx512 on its own adds in another order.
            let exact = matches!(format, Format::Bf16 | Format::Fp8Channel | Format::Fp8Block) || !self.many;
            let on_tiles = match format {
                Format::Fp8Block | Format::Fp8Channel | Format::Mxfp8 => self.crossover.fp8,
                _ => self.crossover.bf16,
            };
            let stream_rows = exact.then_some(if n < on_tiles { n } else { 0 });
            let product = Product { outputs, inputs, rows, out, scratch, zero };
            if gguf {
                self.avx.run_with_tiles(self.unit, stream_rows, OfBlocks(product));
            } else {
                self.avx.run_with_tiles(self.unit, stream_rows, product);
            }
        } else if gguf {
            self.llamafile.product(outputs, inputs, rows, out, scratch);
        } else if Self::has_int8_tiles(outputs.of.format()) && n >= self.int8_on_tiles(outputs.of.format()) {
            let product = Product { outputs, inputs, rows, out, scratch, zero: 0 };
            self.avx.run_with_tiles(self.unit, Some(0), product);
        } else {
            self.avx.product(outputs, inputs, rows, out, scratch);
        }
    }
}
