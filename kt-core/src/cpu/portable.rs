//! The kernel that is always there: every format, every architecture, exact F32 inputs, weights from the map.

use std::ops::Range;

use super::input::{BLOCK, InputLayout, Inputs};
use super::kernel::{Kernel, Outputs, Scratch};
use super::tier::Tier;
use crate::error::Unsupported;
use crate::format::{Format, Matrix};

/// Decodes one weight row at a time into F32 and multiplies it with every input row.
#[derive(Debug, Clone, Copy, Default)]
pub struct Portable;

/// Independent sums of a dot product: enough for one 512-bit register, and summed pairwise at the end in a fixed order.
const LANES: usize = 16;

impl Kernel for Portable {
    fn tier(self) -> Tier {
        Tier::Portable
    }

    fn accepts(self, format: Format, _rows: usize, cols: usize) -> Result<(InputLayout, &'static str), Unsupported> {
        format.row_bytes(cols).map_err(Unsupported)?;
        Ok((InputLayout::F32, "decoded to f32 row by row, from the map"))
    }

    fn packed_bytes(self, _format: Format, _rows: usize, _cols: usize) -> Option<usize> {
        None
    }

    fn layout_version(self) -> u32 {
        0
    }

    fn pack(self, _matrix: &Matrix, _rows: Range<usize>, _out: &mut [u8]) {}

    fn product(
        self,
        Outputs { of: w, range: outputs, .. }: Outputs<'_>,
        x: Inputs<'_>,
        rows: Range<usize>,
        out: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let Some(matrix) = w.matrix() else { return };
        let (width, cols) = (outputs.len(), w.cols());
        let padded = cols.div_ceil(BLOCK) * BLOCK;
        let decoded: &mut [f32] = bytemuck::cast_slice_mut(scratch.panel.get(padded * 4));
        decoded[cols..].fill(0.0);
        for (j, n) in outputs.enumerate() {
            matrix.decode_row(n, &mut decoded[..cols]);
            for (i, row) in rows.clone().enumerate() {
                let mut lanes = [0f32; LANES];
                for (b, w) in decoded.chunks_exact(BLOCK).enumerate() {
                    let x: &[f32] = bytemuck::cast_slice(x.block(b, row));
                    for (w, x) in w.chunks_exact(LANES).zip(x.chunks_exact(LANES)) {
                        for l in 0..LANES {
                            lanes[l] += w[l] * x[l];
                        }
                    }
                }
                let mut n = LANES / 2;
                while n > 0 {
                    for l in 0..n {
                        lanes[l] += lanes[l + n];
                    }
                    n /= 2;
                }
                out[i * width + j] = lanes[0];
            }
        }
    }
}
