//! MXFP4 between its two layouts: scales beside the codes, or one in front of each block as GGUF has them. Bits move, none changes.

use crate::format::{Format, Matrix, ScaleType};

/// Columns of a block, and its bytes in GGUF: the scale, then codes of column `j` (low) and `j + 16` (high).
const COLS: usize = 32;
const BLOCK: usize = 17;

/// The matrix in the other layout, where that is what `format` is. `None` also where a scale is no number, which encoders refuse by place.
pub fn mxfp4(matrix: &Matrix, format: Format) -> Option<Matrix> {
    let blocks = matrix.cols() / COLS;
    match (matrix.format(), format) {
        (Format::Mxfp4, Format::Mxfp4Ggml) => {
            let scales = matrix.scales()?;
            let mut all = Vec::with_capacity(matrix.rows() * blocks * BLOCK);
            for row in 0..matrix.rows() {
                for (block, codes) in matrix.row(row).as_chunks::<16>().0.iter().enumerate() {
                    let scale = Some(scales.byte(row, block)).filter(|&s| s != 255)?;
                    let code = |col: usize| codes[col / 2] >> (4 * (col % 2)) & 15;
                    all.push(scale);
                    all.extend((0..16).map(|j| code(j) | code(j + 16) << 4));
                }
            }
            Matrix::new(format, matrix.rows(), matrix.cols(), all.into(), None).ok()
        }
        (Format::Mxfp4Ggml, Format::Mxfp4) => {
            let mut codes = Vec::with_capacity(matrix.rows() * blocks * 16);
            let mut scales = Vec::with_capacity(matrix.rows() * blocks);
            for row in 0..matrix.rows() {
                for block in matrix.row(row).as_chunks::<BLOCK>().0 {
                    let code = |col: usize| block[1 + col % 16] >> (4 * (col / 16)) & 15;
                    scales.push(Some(block[0]).filter(|&s| s != 255)?);
                    codes.extend((0..16).map(|j| code(2 * j) | code(2 * j + 1) << 4));
                }
            }
            let scales = Some((scales.into(), ScaleType::E8m0));
            Matrix::new(format, matrix.rows(), matrix.cols(), codes.into(), scales).ok()
        }
        _ => None,
    }
}
