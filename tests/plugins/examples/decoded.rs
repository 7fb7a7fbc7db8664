//! A kernel that packs: weights become F32 at load, in memory of the host's; or at each product, for who has little of it.

use std::ops::Range;

use kt_core::cpu::CpuBackend;
use kt_core::cpu::input::{BLOCK, InputLayout, Inputs};
use kt_core::cpu::kernel::{Kernel, Outputs, Scratch};
use kt_core::cpu::tier::Tier;
use kt_core::{Format, Group, Matrix, Unsupported};

#[derive(Clone, Copy)]
struct Decoded {
    in_place: bool,
    many: Many,
}

/// What is done with more rows than tests of anything else have: products are zeros, so that they are told.
#[derive(Clone, Copy, PartialEq)]
enum Many {
    /// There is a kernel for that.
    Other,
    /// This is it.
    This,
    /// As with few.
    Same,
}

const MANY: usize = 400;

impl Kernel for Decoded {
    fn tier(self) -> Tier {
        Tier::Portable
    }

    fn accepts(self, format: Format, _: usize, cols: usize) -> Result<(InputLayout, &'static str), Unsupported> {
        format.row_bytes(cols).map_err(Unsupported)?;
        // Each kind of thing that a matrix is made of, once.
        match format {
            Format::Bf16 | Format::Fp8Block | Format::Nvfp4 | Format::Q4K => {}
            Format::Int4Asym(Group::Of(32)) | Format::Int8Ordered(_) => {}
            other => return Err(Unsupported::new(format!("{other} is not for this test"))),
        }
        Ok((InputLayout::F32, "decoded to f32 at load"))
    }

    fn layout_version(self) -> u32 {
        1
    }

    fn packed_bytes(self, _: Format, rows: usize, cols: usize) -> Option<usize> {
        (!self.in_place).then_some(rows.next_multiple_of(16) * cols * 4)
    }

    fn in_place(self) -> Self {
        Decoded { in_place: true, ..self }
    }

    fn for_many(self) -> Option<(usize, Self)> {
        (self.many == Many::Other).then_some((MANY, Decoded { many: Many::This, ..self }))
    }

    fn invariant(self) -> Self {
        Decoded { many: Many::Same, ..self }
    }

    fn pack(self, matrix: &Matrix, rows: Range<usize>, out: &mut [u8]) {
        let mut row = vec![0.0; matrix.cols()];
        for (n, out) in rows.zip(out.chunks_exact_mut(matrix.cols() * 4)) {
            matrix.decode_row(n, &mut row);
            out.as_chunks_mut::<4>().0.iter_mut().zip(&row).for_each(|(o, v)| *o = v.to_ne_bytes());
        }
    }

    fn product(self, outputs: Outputs<'_>, x: Inputs<'_>, rows: Range<usize>, out: &mut [f32], _: &mut Scratch) {
        if self.many == Many::This {
            return out.fill(0.0);
        }
        let (width, cols) = (outputs.range.len(), outputs.of.cols());
        let mut decoded = vec![0; cols * 4];
        for (j, output) in outputs.range.clone().enumerate() {
            let weights = match outputs.of.matrix() {
                None => &outputs.of.bytes()[output * cols * 4..][..cols * 4],
                Some(matrix) => {
                    self.pack(matrix, output..output + 1, &mut decoded);
                    &decoded
                }
            };
            let weights = weights.as_chunks::<4>().0;
            for (i, row) in rows.clone().enumerate() {
                let of_block = |(b, w): (usize, &[[u8; 4]])| {
                    let x = x.block(b, row).as_chunks::<4>().0;
                    let products = w.iter().zip(x).map(|(w, x)| f32::from_ne_bytes(*w) * f32::from_ne_bytes(*x));
                    products.sum::<f32>()
                };
                out[i * width + j] = weights.chunks(BLOCK).enumerate().map(of_block).sum();
            }
        }
    }
}

fn backend(_cap: Tier) -> Result<CpuBackend<Decoded>, Unsupported> {
    Ok(CpuBackend::new("decoded", Decoded { in_place: false, many: Many::Other }))
}

kt_core::declare_backend!("decoded", backend);
