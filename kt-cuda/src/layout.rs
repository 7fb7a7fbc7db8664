//! How an expert lies in a device's memory: the bytes of its format, in the order in which a warp's lanes take them.
//!
//! Sixteen outputs are a block, 32 columns a step. A block's steps follow each other, and a step's codes are those of lane after lane, so that
//! a warp reads them as one run of bytes: lane `4g + t` has eight columns of outputs `g` and `g + 8` (`kernels/formats.cu` reads
//! what is written here). Scales are in planes of their own, 16 outputs side by side. Outputs are filled up to a
//! multiple of 32, columns too: with zeros, which meet inputs of zero.

use std::ops::Range;
use std::sync::Mutex;

use kt_core::format::ggml;
use kt_core::{Format, LayerSpec, Matrix, Proj, ScaleType, Unsupported};

/// Outputs of a block.
const BLOCK: usize = 16;
/// Columns of a step.
pub(crate) const STEP: usize = 32;
/// Blocks that are packed as one task.
const TASK: usize = 4;

/// The kernels for one way of holding weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Codes {
    Bf16,
    Fp8,
    Fp8Block,
    Mxfp8,
    Mxfp4,
    Int8,
    Int8Zero,
    Int4,
    Int4Zero,
    Q4K,
    Q6K,
}

impl Codes {
    /// All of them, for tests.
    #[cfg(test)]
    pub const ALL: [Codes; 11] = [
        Codes::Bf16,
        Codes::Fp8,
        Codes::Fp8Block,
        Codes::Mxfp8,
        Codes::Mxfp4,
        Codes::Int8,
        Codes::Int8Zero,
        Codes::Int4,
        Codes::Int4Zero,
        Codes::Q4K,
        Codes::Q6K,
    ];

    /// As in the names of the kernels.
    pub fn name(self) -> &'static str {
        match self {
            Codes::Bf16 => "bf16",
            Codes::Fp8 => "fp8",
            Codes::Fp8Block => "fp8_block",
            Codes::Mxfp8 => "mxfp8",
            Codes::Mxfp4 => "mxfp4",
            Codes::Int8 => "int8",
            Codes::Int8Zero => "int8_zero",
            Codes::Int4 => "int4",
            Codes::Int4Zero => "int4_zero",
            Codes::Q4K => "q4_k",
            Codes::Q6K => "q6_k",
        }
    }

    /// Whether a lane's eight columns are four of one group of 16 and four of the next: then inputs are permuted likewise.
    pub fn halves(self) -> bool {
        self == Codes::Q6K
    }

    /// Bytes of the codes of 16 outputs x 32 columns.
    fn step_bytes(self) -> usize {
        match self {
            Codes::Bf16 => 1024,
            Codes::Fp8 | Codes::Fp8Block | Codes::Mxfp8 | Codes::Int8 | Codes::Int8Zero => 512,
            Codes::Q6K => 384,
            Codes::Mxfp4 | Codes::Int4 | Codes::Int4Zero | Codes::Q4K => 256,
        }
    }
}

/// Where the parts of an expert's projection are, as `Part` in `kernels/formats.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Part {
    codes: u64,
    scales: u64,
    zeros: u64,
    biases: u64,
    rows: u32,
    steps: u32,
    groups: u32,
    _pad: u32,
    per_group: u64,
    kind: u32,
    biased: u32,
}

/// How one projection is held.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Layout {
    pub codes: Codes,
    format: Format,
    rows: usize,
    cols: usize,
    /// Scales of a row, and the type they are held in.
    groups: usize,
    kind: ScaleType,
    biased: bool,
}

/// Calls the function with 0, 1, … up to the number, on several threads, and returns when all calls have.
pub(crate) type Threads<'a> = &'a dyn Fn(usize, &(dyn Fn(usize) + Sync));

/// One task of packing: some blocks of each plane.
struct Piece<'a> {
    blocks: Range<usize>,
    codes: &'a mut [u8],
    scales: &'a mut [u8],
    zeros: &'a mut [u8],
}

impl Layout {
    /// How a matrix of this format and shape is held, with scales of this type where it is known.
    ///
    /// # Errors
    /// Why it is not.
    pub fn new(
        format: Format,
        rows: usize,
        cols: usize,
        biased: bool,
        scales: Option<ScaleType>,
    ) -> Result<Self, Unsupported> {
        format.row_bytes(cols).map_err(Unsupported::new)?;
        let codes = match format {
            Format::Bf16 => Codes::Bf16,
            Format::Fp8Channel => Codes::Fp8,
            Format::Fp8Block => Codes::Fp8Block,
            Format::Mxfp8 => Codes::Mxfp8,
            Format::Mxfp4 | Format::Mxfp4Ggml => Codes::Mxfp4,
            Format::Int8(_) | Format::Int8Offset(_) | Format::Q8_0 => Codes::Int8,
            Format::Int8Asym(_) => Codes::Int8Zero,
            Format::Int4(_) | Format::Q4_0 => Codes::Int4,
            Format::Int4Asym(_) => Codes::Int4Zero,
            Format::Q4K => Codes::Q4K,
            Format::Q6K => Codes::Q6K,
            other => return Err(Unsupported::new(format!("no kernel for {other}"))),
        };
        let group = format.group().map(|g| g.cols(cols));
        if let Some(g) = group.filter(|&g| g != cols && !g.is_multiple_of(STEP)) {
            return Err(Unsupported::new(format!("{format}: groups of {g} columns; multiples of {STEP} are taken")));
        }
        // BF16 is what files mostly have; `with_scales` puts this right where headers did not tell.
        let kind = match format {
            Format::Q8_0 | Format::Q4_0 => ScaleType::F16,
            _ if group.is_some_and(|g| g != cols) => scales.unwrap_or(ScaleType::Bf16),
            _ => ScaleType::F32,
        };
        let groups = match (format, group) {
            (_, Some(g)) => cols.div_ceil(g.max(1)),
            (Format::Fp8Block, _) => cols.div_ceil(128),
            (Format::Fp8Channel, _) => 1,
            _ => cols.div_ceil(STEP),
        };
        Ok(Layout { codes, format, rows, cols, groups, kind, biased })
    }

    /// The same for a matrix like this one, whose groups may have scales of another type.
    pub fn with_scales(mut self, like: &Matrix) -> Self {
        if let (true, Some(scales)) = (self.format.group().is_some() && self.groups > 1, like.scales()) {
            self.kind = scales.kind();
        }
        self
    }

    /// Blocks of outputs: an even number.
    pub fn blocks(&self) -> usize {
        self.rows.div_ceil(2 * BLOCK) * 2
    }

    fn steps(&self) -> usize {
        self.cols.div_ceil(STEP)
    }

    /// Columns of its inputs, filled up.
    pub fn padded_cols(&self) -> usize {
        self.steps() * STEP
    }

    /// Bytes of the planes, one block's of each; where there is no plane for each block, all of it.
    fn planes(&self) -> [usize; 3] {
        let steps = self.steps();
        let group = |bytes: usize| self.groups * BLOCK * bytes;
        let (scales, zeros) = match self.codes {
            Codes::Bf16 | Codes::Fp8Block => (0, 0),
            Codes::Fp8 | Codes::Int8 | Codes::Int4 => (group(self.kind.bytes()), 0),
            Codes::Int8Zero | Codes::Int4Zero => (group(self.kind.bytes()), group(2)),
            Codes::Mxfp8 | Codes::Mxfp4 => (steps * BLOCK, 0),
            Codes::Q4K => (steps * BLOCK * 2, steps / 8 * BLOCK * 4),
            Codes::Q6K => (steps * BLOCK * 2, steps / 8 * BLOCK * 2),
        };
        [steps * self.codes.step_bytes(), scales, zeros]
    }

    /// Bytes of scales that blocks share.
    fn shared_bytes(&self) -> usize {
        if self.codes == Codes::Fp8Block { self.rows.div_ceil(128) * self.groups * 4 } else { 0 }
    }

    /// Bytes of the projection: codes, scales, zero points, biases, each from a multiple of 16 on.
    fn ends(&self) -> [usize; 4] {
        let up = |bytes: usize| bytes.next_multiple_of(16);
        let [codes, scales, zeros] = self.planes().map(|b| b * self.blocks());
        let codes = up(codes);
        let scales = codes + up(scales + self.shared_bytes());
        let zeros = scales + up(zeros);
        [codes, scales, zeros, zeros + if self.biased { up(self.rows * 4) } else { 0 }]
    }

    /// All of them.
    pub fn bytes(&self) -> usize {
        self.ends()[3]
    }

    /// For kernels, of a projection that begins at byte `at` of its expert.
    pub fn part(&self, at: usize) -> Part {
        let [codes, scales, zeros, _] = self.ends().map(|end| (at + end) as u64);
        // Steps that share a scale, as what a product of 64 bits divides by.
        let steps = self.steps();
        let shared = self.format.group().map_or(steps, |g| g.cols(self.cols).div_ceil(STEP)).max(1);
        let shared = if self.format.group().is_none() && self.groups > 1 { 1 } else { shared };
        Part {
            codes: at as u64,
            scales: codes,
            zeros: scales,
            biases: zeros,
            rows: self.rows as u32,
            steps: steps as u32,
            groups: self.groups as u32,
            _pad: 0,
            per_group: (1 << 32) / shared as u64 + 1,
            kind: match self.kind {
                ScaleType::F16 => 1,
                ScaleType::Bf16 => 2,
                _ => 0,
            },
            biased: self.biased.into(),
        }
    }

    /// Writes a matrix and its biases into `out`, of [`Layout::bytes`], with `threads`.
    ///
    /// # Errors
    /// What is not as the layout takes it.
    pub fn pack(
        &self,
        matrix: &Matrix,
        bias: Option<&[f32]>,
        threads: Threads<'_>,
        out: &mut [u8],
    ) -> Result<(), String> {
        let (format, rows, cols) = (matrix.format(), matrix.rows(), matrix.cols());
        if (format, rows, cols) != (self.format, self.rows, self.cols) {
            return Err(format!(
                "is {format} [{rows}, {cols}], its layer says {} [{}, {}]",
                self.format, self.rows, self.cols
            ));
        }
        if self.with_scales(matrix).kind != self.kind {
            let found = self.with_scales(matrix).kind;
            return Err(format!("has scales of type {found:?}, the first expert of its layer {:?}", self.kind));
        }
        if bias.is_some_and(|b| b.len() != rows) {
            return Err(format!("has {} biases for {rows} outputs", bias.map_or(0, <[f32]>::len)));
        }
        let [codes_end, scales_end, zeros_end, _] = self.ends();
        out.fill(0);
        let (codes, rest) = out.split_at_mut(codes_end);
        let (scales, rest) = rest.split_at_mut(scales_end - codes_end);
        let (zeros, biases) = rest.split_at_mut(zeros_end - scales_end);
        for (b, v) in biases.as_chunks_mut::<4>().0.iter_mut().zip(bias.unwrap_or_default()) {
            *b = v.to_le_bytes();
        }
        if let (Codes::Fp8Block, Some(s)) = (self.codes, matrix.scales()) {
            for (i, out) in scales.as_chunks_mut::<4>().0.iter_mut().enumerate().take(rows.div_ceil(128) * self.groups)
            {
                *out = s.get(i / self.groups, i % self.groups).to_le_bytes();
            }
        }
        let planes = self.planes().map(|b| b * TASK);
        // A plane that is not there is cut into nothing.
        fn cut(plane: usize, all: &mut [u8]) -> (&mut [u8], &mut [u8]) {
            all.split_at_mut(plane.min(all.len()))
        }
        let (mut codes, mut scales, mut zeros) = (codes, scales, zeros);
        let mut pieces = Vec::new();
        for first in (0..self.blocks()).step_by(TASK) {
            let blocks = first..(first + TASK).min(self.blocks());
            let (c, s, z);
            (c, codes) = cut(planes[0], codes);
            (s, scales) = cut(planes[1], scales);
            (z, zeros) = cut(planes[2], zeros);
            pieces.push(Mutex::new(Piece { blocks, codes: c, scales: s, zeros: z }));
        }
        threads(pieces.len(), &|i| {
            let mut piece = pieces[i].lock().unwrap_or_else(|e| e.into_inner());
            self.pack_blocks(matrix, &mut piece);
        });
        Ok(())
    }

    fn pack_blocks(&self, matrix: &Matrix, piece: &mut Piece<'_>) {
        let planes = self.planes();
        let mut codes = vec![0u8; self.padded_cols()];
        for block in piece.blocks.clone() {
            let at = block - piece.blocks.start;
            let plane = |i: usize| planes[i] * at..planes[i] * (at + 1);
            let out = &mut piece.codes[plane(0)];
            let (scales, zeros) = (&mut piece.scales[plane(1)], &mut piece.zeros[plane(2)]);
            for in_block in 0..BLOCK.min(self.rows.saturating_sub(block * BLOCK)) {
                let row = block * BLOCK + in_block;
                let bytes = matrix.row(row);
                if self.codes == Codes::Bf16 {
                    for (out, bytes) in out.chunks_exact_mut(1024).zip(bytes.chunks(64)) {
                        out[in_block / 8 * 512 + in_block % 8 * 64..][..bytes.len()].copy_from_slice(bytes);
                    }
                } else {
                    self.unpack(bytes, &mut codes);
                    self.place_codes(&codes, in_block, out);
                }
                self.place_scales(matrix, row, in_block, scales, zeros);
            }
        }
    }

    /// The codes of a row, a byte for each column, as kernels take them.
    fn unpack(&self, row: &[u8], codes: &mut [u8]) {
        let nibbles = |codes: &mut [u8]| {
            for (c, b) in codes.as_chunks_mut::<2>().0.iter_mut().zip(row) {
                *c = [b & 15, b >> 4];
            }
        };
        /// Blocks of `B` bytes for `N` columns.
        fn blocks<const B: usize, const N: usize>(row: &[u8], codes: &mut [u8], f: impl Fn(&[u8; B]) -> [u8; N]) {
            for (c, b) in codes.as_chunks_mut::<N>().0.iter_mut().zip(row.as_chunks::<B>().0) {
                *c = f(b);
            }
        }
        match self.format {
            Format::Int8(_) => codes.iter_mut().zip(row).for_each(|(c, b)| *c = b ^ 0x80),
            Format::Q8_0 => {
                blocks::<{ ggml::Q8_0_BYTES }, 32>(row, codes, |b| std::array::from_fn(|i| b[i + 2] ^ 0x80))
            }
            Format::Q4_0 => blocks(row, codes, ggml::q4_0_codes),
            Format::Mxfp4Ggml => blocks::<{ ggml::MXFP4_BYTES }, 32>(row, codes, |b| {
                std::array::from_fn(|i| if i < 16 { b[i + 1] & 15 } else { b[i - 15] >> 4 })
            }),
            Format::Q4K => blocks(row, codes, ggml::q4k_codes),
            Format::Q6K => blocks(row, codes, ggml::q6k_codes),
            Format::Mxfp4 | Format::Int4(_) | Format::Int4Asym(_) => nibbles(codes),
            _ => codes[..row.len()].copy_from_slice(row),
        }
    }

    /// Puts a row's codes into the steps of its block.
    fn place_codes(&self, codes: &[u8], in_block: usize, out: &mut [u8]) {
        let (g, half) = (in_block % 8, in_block / 8);
        let steps = out.chunks_exact_mut(self.codes.step_bytes()).zip(codes.as_chunks::<STEP>().0);
        for (out, codes) in steps {
            for t in 0..4 {
                // The lane's eight columns.
                let c: [u8; 8] = match self.codes.halves() {
                    true => std::array::from_fn(|i| codes[i / 4 * 16 + 4 * t + i % 4]),
                    false => std::array::from_fn(|i| codes[8 * t + i]),
                };
                let lane = 4 * g + t;
                if self.codes.step_bytes() == 512 {
                    out[lane * 16 + half * 8..][..8].copy_from_slice(&[c[0], c[2], c[1], c[3], c[4], c[6], c[5], c[7]]);
                    continue;
                }
                // Even columns in nibbles 0..4, odd ones in 4..8.
                let low = (0..4).fold(0u32, |w, i| {
                    w | u32::from(c[2 * i] & 15) << (4 * i) | u32::from(c[2 * i + 1] & 15) << (4 * i + 16)
                });
                out[lane * 8 + half * 4..][..4].copy_from_slice(&low.to_le_bytes());
                if self.codes == Codes::Q6K {
                    let high = (0..4).fold(0u16, |w, i| {
                        w | u16::from(c[2 * i] >> 4) << (2 * i) | u16::from(c[2 * i + 1] >> 4) << (2 * i + 8)
                    });
                    out[256 + lane * 4 + half * 2..][..2].copy_from_slice(&high.to_le_bytes());
                }
            }
        }
    }

    /// Puts a row's scales and zero points beside those of its block.
    fn place_scales(&self, matrix: &Matrix, row: usize, in_block: usize, scales: &mut [u8], zeros: &mut [u8]) {
        let bytes = matrix.row(row);
        fn put<const N: usize>(plane: &mut [u8], group: usize, in_block: usize, v: [u8; N]) {
            // Outputs g and g + 8 are neighbours: a lane has both.
            plane[(group * BLOCK + in_block % 8 * 2 + in_block / 8) * N..][..N].copy_from_slice(&v);
        }
        match self.format {
            Format::Bf16 | Format::Fp8Block => {}
            Format::Q8_0 | Format::Q4_0 => {
                let block = bytes.len() / self.groups.max(1);
                for (g, b) in bytes.chunks_exact(block.max(2)).enumerate() {
                    put(scales, g, in_block, [b[0], b[1]]);
                }
            }
            Format::Mxfp4Ggml => {
                bytes.chunks_exact(ggml::MXFP4_BYTES).enumerate().for_each(|(g, b)| put(scales, g, in_block, [b[0]]));
            }
            Format::Q4K => {
                for (i, b) in bytes.as_chunks::<{ ggml::Q4K_BYTES }>().0.iter().enumerate() {
                    put(zeros, i, in_block, [b[0], b[1], b[2], b[3]]);
                    // Groups 0..4: six bits of bytes j and j + 4. Groups 4..8: four bits of byte j + 4, and the top two of bytes j - 4 and j.
                    let six = &b[4..16];
                    for j in 0..4 {
                        put(scales, i * 8 + j, in_block, [six[j] & 63, six[j + 4] & 63]);
                        let (low, high) = (six[j + 8], [six[j] >> 6, six[j + 4] >> 6]);
                        put(scales, i * 8 + 4 + j, in_block, [low & 15 | high[0] << 4, low >> 4 | high[1] << 4]);
                    }
                }
            }
            Format::Q6K => {
                for (i, b) in bytes.as_chunks::<{ ggml::Q6K_BYTES }>().0.iter().enumerate() {
                    for step in 0..8 {
                        put(scales, i * 8 + step, in_block, [b[192 + 2 * step], b[193 + 2 * step]]);
                    }
                    put(zeros, i, in_block, [b[208], b[209]]);
                }
            }
            _ => {
                let Some(s) = matrix.scales() else { return };
                for g in 0..self.groups {
                    match self.kind {
                        _ if matches!(self.codes, Codes::Mxfp4 | Codes::Mxfp8) => {
                            put(scales, g, in_block, [s.byte(row, g)])
                        }
                        // They were of these types, so that nothing is rounded.
                        ScaleType::Bf16 => put(scales, g, in_block, half::bf16::from_f32(s.get(row, g)).to_le_bytes()),
                        ScaleType::F16 => put(scales, g, in_block, half::f16::from_f32(s.get(row, g)).to_le_bytes()),
                        _ => put(scales, g, in_block, s.get(row, g).to_le_bytes()),
                    }
                    if matches!(self.codes, Codes::Int8Zero | Codes::Int4Zero) {
                        put(zeros, g, in_block, (matrix.zero_point(row, g) as u16).to_le_bytes());
                    }
                }
            }
        }
    }
}

/// Offsets of an expert's gate, up and down, its bytes (a multiple of 256), and their layouts.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ExpertLayout {
    pub of: [Layout; 3],
    pub at: [usize; 3],
    pub bytes: usize,
}

impl ExpertLayout {
    /// # Errors
    /// Why the layer's experts cannot be held.
    pub fn new(layer: &LayerSpec) -> Result<Self, Unsupported> {
        let layout = |proj| {
            let (rows, cols) = layer.shape(proj);
            Layout::new(layer.format(proj), rows, cols, layer.biases, layer.scales[proj.index()])
        };
        let of = [layout(Proj::Gate)?, layout(Proj::Up)?, layout(Proj::Down)?];
        if of[0].codes != of[1].codes {
            let [gate, up, _] = layer.formats;
            return Err(Unsupported::new(format!("gate is {gate} and up {up}; they are multiplied by one kernel")));
        }
        Ok(ExpertLayout::of(of))
    }

    fn of(of: [Layout; 3]) -> Self {
        let mut end = 0;
        let at = of.map(|layout| {
            let at = end;
            end = (at + layout.bytes()).next_multiple_of(256);
            at
        });
        ExpertLayout { of, at, bytes: end }
    }

    /// The same, for scales of the types that these matrices have.
    pub fn with_scales(&self, like: &[Matrix; 3]) -> Self {
        ExpertLayout::of(std::array::from_fn(|i| self.of[i].with_scales(&like[i])))
    }
}
