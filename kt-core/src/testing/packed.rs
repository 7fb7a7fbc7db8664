//! Inputs and weights as a kernel packs them, and products of both.

use std::ops::Range;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::cpu::input::{BLOCK, InputLayout, Inputs};
use crate::cpu::kernel::{Kernel, Outputs, Scratch, Weights};
use crate::cpu::memory::AlignedBytes;
use crate::format::float::bf16_to_f32;
use crate::format::{Format, Matrix};

/// Input rows as a kernel packs them.
pub struct Rows {
    layout: InputLayout,
    rows: usize,
    cols: usize,
    bytes: AlignedBytes,
}

impl Rows {
    /// Packs `x: [rows, cols]`.
    pub fn new<K: Kernel>(kernel: K, layout: InputLayout, x: &[f32], cols: usize) -> Self {
        let rows = x.len() / cols;
        // On a boundary as in layers: tile units load rows that straddle lines at a fraction of the speed.
        let mut bytes = AlignedBytes::default();
        for (i, out) in bytes.get(layout.bytes(rows, cols)).chunks_exact_mut(layout.block_bytes()).enumerate() {
            let (block, row, width) = (i / rows, i % rows, layout.columns());
            kernel.pack_input(layout, &x[row * cols..][block * width..cols.min((block + 1) * width)], out);
        }
        Rows { layout, rows, cols, bytes }
    }

    /// What a product takes.
    pub fn view(&self) -> Inputs<'_> {
        Inputs::new(self.layout, self.rows, self.cols, self.bytes.read(self.layout.bytes(self.rows, self.cols)))
    }

    /// Some of them, as often as they are named.
    pub fn pick(&self, rows: &[u32]) -> Self {
        let x = self.view();
        let blocks = (0..x.blocks()).flat_map(|b| rows.iter().map(move |&row| (b, row as usize)));
        let mut bytes = AlignedBytes::default();
        let to = bytes.get(self.layout.bytes(rows.len(), self.cols));
        to.iter_mut().zip(blocks.flat_map(|(b, row)| x.block(b, row))).for_each(|(to, &byte)| *to = byte);
        Rows { layout: self.layout, rows: rows.len(), cols: self.cols, bytes }
    }

    /// Input `k` of a row, as packed.
    pub fn get(&self, row: usize, k: usize) -> f64 {
        let width = self.layout.columns();
        let (block, k) = (self.view().block(k / width, row), k % width);
        let f32_at = |at: usize| f32::from_le_bytes([0, 1, 2, 3].map(|i| block[at + i])) as f64;
        match self.layout {
            InputLayout::F32 => f32_at(k * 4),
            InputLayout::Bf16 => bf16_to_f32(u16::from_le_bytes([block[k * 2], block[k * 2 + 1]])) as f64,
            InputLayout::Int8 { group, .. } => block[k] as i8 as f64 * f32_at(width + k / group * 4),
            InputLayout::Int8Words { group, minima, .. } => {
                let pair = BLOCK + 4 + k / (2 * group) * InputLayout::pair_bytes(minima);
                // The first one's scale is above.
                let at = pair + if k / group % 2 == 0 { 2 } else { 0 };
                let scale = i16::from_le_bytes([block[at], block[at + 1]]) as f64 / 32768.0;
                block[k] as i8 as f64 * scale * f32_at(BLOCK)
            }
        }
    }
}

/// The layouts of inputs that a kernel multiplies a format with: of those that are packed as they are computed, and of those whose rows are known before, if they have another one.
///
/// # Panics
/// When it does not accept the format.
pub fn layouts<K: Kernel>(kernel: K, format: Format, rows: usize, cols: usize) -> Vec<InputLayout> {
    let (layout, _) = kernel.accepts(format, rows, cols).expect("accepted");
    let mut layouts = vec![layout, kernel.inputs_of_rows(layout)];
    layouts.dedup();
    layouts
}

/// Weights as a kernel wants them: packed, or as they are.
pub fn weights<K: Kernel>(kernel: K, matrix: &Matrix) -> Weights {
    let (format, rows, cols) = (matrix.format(), matrix.rows(), matrix.cols());
    let Some(bytes) = kernel.packed_bytes(format, rows, cols) else { return Weights::in_place(matrix.clone()) };
    let mut memory = AlignedBytes::default();
    let out = memory.get(bytes);
    out.fill(0);
    kernel.pack(matrix, 0..rows, out);
    Weights::packed(format, rows, cols, out.to_vec().into())
}

/// The product `[rows, outputs]` of some outputs with some rows of `x`. They lie between others, and what is in its memory before is no number.
pub fn product<K: Kernel>(kernel: K, weights: &Weights, outputs: Range<usize>, x: &Rows, rows: &[u32]) -> Vec<f32> {
    let mut out = vec![f32::NAN; rows.len() * outputs.len()];
    let mut scratch = Scratch::default();
    scratch.panel.get(1 << 20).fill(0xff);
    let x = x.pick(&[&[0, 0], rows, &[0]].concat());
    kernel.product(Outputs::new(weights, outputs), x.view(), 2..2 + rows.len(), &mut out, &mut scratch);
    out
}

/// Checks that matrices, some of each format, are packed as they were when their checksums became known, by the names of their formats: packed experts are kept on disk, and
/// those of another [`Kernel::layout_version`] are packed anew.
///
/// # Panics
/// When they are not; with the checksums as they would have to be.
pub fn packs_as_known<K: Kernel>(
    kernel: K,
    known: &[(&str, u64)],
    matrices: impl Iterator<Item = (Format, Vec<Matrix>)>,
) {
    let found: Vec<(String, u64)> = matrices
        .map(|(format, matrices)| {
            let bytes: Vec<u8> = matrices.iter().flat_map(|m| weights(kernel, m).bytes().to_vec()).collect();
            assert!(!bytes.is_empty(), "{format} is not packed");
            (format.to_string(), xxh3_64_with_seed(&bytes, kernel.layout_version().into()))
        })
        .collect();
    let table: String = found.iter().map(|(name, sum)| format!("    ({name:?}, {sum:#018x}),\n")).collect();
    assert!(
        found.iter().map(|(name, sum)| (name.as_str(), *sum)).eq(known.iter().copied()),
        "what is packed has changed: raise the layout version, run again, and make this what is known:\n{table}"
    );
}
