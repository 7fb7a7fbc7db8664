use std::ops::Range;

use kt_core::cpu::CpuBackend;
use kt_core::cpu::input::{InputLayout, Inputs};
use kt_core::cpu::kernel::{Kernel, Outputs, Scratch};
use kt_core::cpu::tier::Tier;
use kt_core::{Format, Matrix, Unsupported};

/// One product after the other, of weights as they are in the checkpoint.
#[derive(Clone, Copy)]
struct Scalar;

impl Kernel for Scalar {
    fn tier(self) -> Tier {
        Tier::Portable
    }

    fn accepts(self, format: Format, _: usize, _: usize) -> Result<(InputLayout, &'static str), Unsupported> {
        match format {
            Format::Bf16 | Format::F16 => Ok((InputLayout::F32, "one product after the other")),
            other => Err(Unsupported::new(format!("{other} is not for this example"))),
        }
    }

    fn layout_version(self) -> u32 {
        0
    }

    fn packed_bytes(self, _: Format, _: usize, _: usize) -> Option<usize> {
        None
    }

    fn pack(self, _: &Matrix, _: Range<usize>, _: &mut [u8]) {}

    fn product(self, outputs: Outputs<'_>, x: Inputs<'_>, rows: Range<usize>, out: &mut [f32], _: &mut Scratch) {
        let Some(matrix) = outputs.of.matrix() else { return };
        let (width, mut weights) = (outputs.range.len(), vec![0.0; matrix.cols()]);
        for (j, output) in outputs.range.enumerate() {
            matrix.decode_row(output, &mut weights);
            for (i, row) in rows.clone().enumerate() {
                let x = (0..x.blocks()).flat_map(|b| x.block(b, row).as_chunks::<4>().0);
                out[i * width + j] = weights.iter().zip(x).map(|(w, x)| w * f32::from_ne_bytes(*x)).sum();
            }
        }
    }
}

fn backend(_cap: Tier) -> Result<CpuBackend<Scalar>, Unsupported> {
    Ok(CpuBackend::new("scalar", Scalar))
}

kt_core::declare_backend!("scalar", backend);
