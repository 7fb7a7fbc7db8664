//! Weight formats: how one matrix is encoded, and its exact decoding.
//!
//! A linear weight is a matrix `[rows, cols]`: `rows` output features, `cols` input features, row-major. A [`Matrix`] is a
//! cheap, reference-counted handle on its encoded bytes (usually a slice of a memory map). Each family of encodings has
//! a file of its own with its decoder; a new format (`ARCHITECTURE.md` says what it takes) then runs everywhere
//! through decoding, and natively where a kernel accepts it.

pub mod float;
pub mod fp8;
pub mod ggml;
pub mod int;
pub mod mx;

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

/// How many consecutive columns share one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Group {
    /// One scale for the whole row ("per channel").
    Row,
    /// One scale for this many consecutive columns.
    Of(u32),
}

impl Group {
    /// Columns per scale in a row of `cols` columns.
    pub fn cols(self, cols: usize) -> usize {
        match self {
            Group::Row => cols,
            Group::Of(g) => g as usize,
        }
    }
}

/// How one matrix is encoded. Layouts are described in each family's module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// Upper half of an F32.
    Bf16,
    /// E4M3 codes, one scale (F32 or BF16) per tile of 128 x 128 weights.
    Fp8Block,
    /// E4M3 codes, one scale (F32 or BF16) per row.
    Fp8Channel,
    /// Signed bytes (compressed-tensors `int-quantized`), symmetric.
    Int8(Group),
    /// Bytes with offset 128 (compressed-tensors 8-bit `pack-quantized`, its I32 words read as bytes), symmetric.
    Int8Offset(Group),
    /// Two columns per byte, low nibble first, value = nibble - 8 (compressed-tensors `pack-quantized`), symmetric.
    Int4(Group),
    /// As `Int4`, but value = nibble - zero point, one per scale ([`Matrix::zero_point`]).
    Int4Asym(Group),
    /// As `Int4Asym`, but column `k` has the scale and zero point of group [`Matrix::column_groups`]`[k]` (GPTQ's activation order).
    Int4Ordered(Group),
    /// Bytes, value = byte - zero point, one per scale ([`Matrix::zero_point`]).
    Int8Asym(Group),
    /// As `Int8Asym`, with columns in groups as in `Int4Ordered`.
    Int8Ordered(Group),
    /// E2M1 codes, two columns per byte, low nibble first, and an E8M0 scale per 32 columns.
    Mxfp4,
    /// E4M3 codes, and an E8M0 scale per 32 columns.
    Mxfp8,
    /// E2M1 codes as in `Mxfp4`, an E4M3 scale per 16 columns, and one [`Global`] factor of all scales.
    Nvfp4,
    /// GGUF: 32 columns, F16 scale, signed bytes.
    Q8_0,
    /// GGUF: 32 columns, F16 scale, nibbles minus 8.
    Q4_0,
    /// GGUF: 256 columns in 8 groups with 6-bit scales and minima, 4-bit codes.
    Q4K,
    /// GGUF: as Q4_K with 5-bit codes.
    Q5K,
    /// GGUF: 256 columns in 16 groups with 8-bit scales, 6-bit codes.
    Q6K,
    /// GGUF: 32 columns, F16 scale and minimum, nibbles.
    Q4_1,
    /// GGUF: 32 columns, F16 scale, five-bit codes minus 16.
    Q5_0,
    /// GGUF: 32 columns, F16 scale and minimum, five-bit codes.
    Q5_1,
    /// GGUF: 256 columns in 16 groups with 4-bit scales and minima, 2-bit codes.
    Q2K,
    /// GGUF: 256 columns in 16 groups with 6-bit scales, 3-bit codes.
    Q3K,
    /// GGUF: 32 columns, F16 scale, nibbles that pick one of 16 fixed numbers.
    Iq4Nl,
    /// GGUF: 256 columns in 8 groups with 6-bit scales, codes as IQ4_NL.
    Iq4Xs,
    /// GGUF: 256 columns in 8 groups with 4-bit scales; eight columns are one of 256 points, with signs.
    Iq2Xxs,
    /// GGUF: 256 columns in 16 groups with 4-bit scales; eight columns are one of 512 points, with signs.
    Iq2Xs,
    /// GGUF: as IQ2_XS, of 1024 points.
    Iq2S,
    /// GGUF: 256 columns in 8 groups with 4-bit scales; four columns are one of 256 points, with signs.
    Iq3Xxs,
    /// GGUF: as IQ3_XXS, of 512 points.
    Iq3S,
    /// GGUF: 256 columns in 8 groups with 3-bit scales; eight columns are one of 2048 points of -1, 0 and 1, moved by an eighth.
    Iq1S,
    /// GGUF: as IQ1_S, in 16 groups.
    Iq1M,
    /// GGUF: 256 columns of -1, 0 and 1, five to a byte, one F16 scale.
    Tq1_0,
    /// GGUF: as TQ1_0, four to a byte.
    Tq2_0,
    /// GGUF's MXFP4: 32 columns, their power-of-two scale in front of their E2M1 nibbles.
    Mxfp4Ggml,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((name, group)) = self.integer_name() {
            return match group {
                Group::Row => f.pad(&format!("{name}-channel")),
                Group::Of(g) => f.pad(&format!("{name}-g{g}")),
            };
        }
        let name = match self {
            Format::F32 => "F32",
            Format::F16 => "F16",
            Format::Bf16 => "BF16",
            Format::Fp8Block => "FP8-block",
            Format::Fp8Channel => "FP8-channel",
            Format::Mxfp4 => "MXFP4",
            Format::Mxfp8 => "MXFP8",
            Format::Nvfp4 => "NVFP4",
            Format::Q8_0 => "Q8_0",
            Format::Q4_0 => "Q4_0",
            Format::Q4K => "Q4_K",
            Format::Q5K => "Q5_K",
            Format::Q6K => "Q6_K",
            Format::Q4_1 => "Q4_1",
            Format::Q5_0 => "Q5_0",
            Format::Q5_1 => "Q5_1",
            Format::Q2K => "Q2_K",
            Format::Q3K => "Q3_K",
            Format::Iq4Nl => "IQ4_NL",
            Format::Iq4Xs => "IQ4_XS",
            Format::Iq2Xxs => "IQ2_XXS",
            Format::Iq2Xs => "IQ2_XS",
            Format::Iq2S => "IQ2_S",
            Format::Iq3Xxs => "IQ3_XXS",
            Format::Iq3S => "IQ3_S",
            Format::Iq1S => "IQ1_S",
            Format::Iq1M => "IQ1_M",
            Format::Tq1_0 => "TQ1_0",
            Format::Tq2_0 => "TQ2_0",
            Format::Mxfp4Ggml => "MXFP4-ggml",
            // Integers: named above.
            _ => "",
        };
        f.pad(name)
    }
}

/// The same format for gate, up and down.
impl From<Format> for [Format; 3] {
    fn from(format: Format) -> Self {
        [format; 3]
    }
}

impl std::str::FromStr for Format {
    type Err = crate::Unsupported;

    /// Reads a format's name as [`Format`] displays it, in any case; `fp8`, `int8` and `int4` stand for the common
    /// variants (128x128 blocks, per channel, groups of 32).
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let name = s.to_ascii_lowercase().replace('_', "-");
        let integer = INTEGERS.iter().find_map(|&(prefix, format)| {
            match name.strip_prefix(&prefix.to_ascii_lowercase())?.strip_prefix('-')? {
                "channel" => Some(format(Group::Row)),
                group => Some(format(Group::Of(group.strip_prefix('g')?.parse().ok().filter(|&g| g > 0)?))),
            }
        });
        if let Some(format) = integer {
            return Ok(format);
        }
        Ok(match name.as_str() {
            "f32" => Format::F32,
            "f16" => Format::F16,
            "bf16" => Format::Bf16,
            "fp8" | "fp8-block" => Format::Fp8Block,
            "fp8-channel" => Format::Fp8Channel,
            "int8" => Format::Int8(Group::Row),
            "int4" => Format::Int4(Group::Of(32)),
            "mxfp4" => Format::Mxfp4,
            "mxfp8" => Format::Mxfp8,
            "nvfp4" => Format::Nvfp4,
            "q8-0" => Format::Q8_0,
            "q4-0" => Format::Q4_0,
            "q4-k" => Format::Q4K,
            "q5-k" => Format::Q5K,
            "q6-k" => Format::Q6K,
            "q4-1" => Format::Q4_1,
            "q5-0" => Format::Q5_0,
            "q5-1" => Format::Q5_1,
            "q2-k" => Format::Q2K,
            "q3-k" => Format::Q3K,
            "iq4-nl" => Format::Iq4Nl,
            "iq4-xs" => Format::Iq4Xs,
            "iq2-xxs" => Format::Iq2Xxs,
            "iq2-xs" => Format::Iq2Xs,
            "iq2-s" => Format::Iq2S,
            "iq3-xxs" => Format::Iq3Xxs,
            "iq3-s" => Format::Iq3S,
            "iq1-s" => Format::Iq1S,
            "iq1-m" => Format::Iq1M,
            "tq1-0" => Format::Tq1_0,
            "tq2-0" => Format::Tq2_0,
            "mxfp4-ggml" => Format::Mxfp4Ggml,
            _ => {
                return Err(crate::Unsupported::new(format!(
                    "unknown format `{s}`; known are f32 f16 bf16 fp8-block fp8-channel mxfp4 mxfp8 nvfp4 q8_0 q4_0 q4_1 q5_0 \
                     q5_1 q2_k q3_k q4_k q5_k q6_k iq4_nl iq4_xs iq2_xxs iq2_xs iq2_s \
                     iq3_xxs iq3_s iq1_s iq1_m tq1_0 tq2_0 mxfp4-ggml; int8 int4 int8-asym int4-asym int8-ordered \
                     int4-ordered int8-offset, each with -gN (groups of N columns) or -channel"
                )));
            }
        })
    }
}

type WithGroup = fn(Group) -> Format;

/// Names of the integer formats, before their group's.
const INTEGERS: [(&str, WithGroup); 7] = [
    ("INT8", Format::Int8),
    ("INT8-offset", Format::Int8Offset),
    ("INT8-asym", Format::Int8Asym),
    ("INT8-ordered", Format::Int8Ordered),
    ("INT4", Format::Int4),
    ("INT4-asym", Format::Int4Asym),
    ("INT4-ordered", Format::Int4Ordered),
];

/// Every format that this build knows, those with groups in sizes that checkpoints use: what tests and listings go through.
pub const ALL: [Format; 50] = [
    Format::F32,
    Format::F16,
    Format::Bf16,
    Format::Fp8Block,
    Format::Fp8Channel,
    Format::Int8(Group::Row),
    Format::Int8(Group::Of(32)),
    Format::Int8(Group::Of(128)),
    Format::Int8Offset(Group::Row),
    Format::Int8Offset(Group::Of(16)),
    Format::Int8Offset(Group::Of(128)),
    Format::Int8Asym(Group::Row),
    Format::Int8Asym(Group::Of(32)),
    Format::Int8Asym(Group::Of(128)),
    Format::Int8Ordered(Group::Of(32)),
    Format::Int4(Group::Row),
    Format::Int4(Group::Of(32)),
    Format::Int4(Group::Of(64)),
    Format::Int4(Group::Of(128)),
    Format::Int4Asym(Group::Row),
    Format::Int4Asym(Group::Of(32)),
    Format::Int4Asym(Group::Of(128)),
    Format::Int4Ordered(Group::Row),
    Format::Int4Ordered(Group::Of(32)),
    Format::Int4Ordered(Group::Of(128)),
    Format::Mxfp4,
    Format::Mxfp8,
    Format::Nvfp4,
    Format::Q8_0,
    Format::Q4_0,
    Format::Q4K,
    Format::Q5K,
    Format::Q6K,
    Format::Q4_1,
    Format::Q5_0,
    Format::Q5_1,
    Format::Q2K,
    Format::Q3K,
    Format::Iq4Nl,
    Format::Iq4Xs,
    Format::Iq2Xxs,
    Format::Iq2Xs,
    Format::Iq2S,
    Format::Iq3Xxs,
    Format::Iq3S,
    Format::Iq1S,
    Format::Iq1M,
    Format::Tq1_0,
    Format::Tq2_0,
    Format::Mxfp4Ggml,
];

impl Format {
    /// Name without the group, and the group, of an integer format.
    fn integer_name(self) -> Option<(&'static str, Group)> {
        let group = self.group()?;
        INTEGERS.iter().find(|(_, format)| format(group) == self).map(|&(name, _)| (name, group))
    }

    /// How many columns share a scale, in formats of integer codes with scales of their own.
    pub fn group(self) -> Option<Group> {
        match self {
            Format::Int8(g)
            | Format::Int8Offset(g)
            | Format::Int8Asym(g)
            | Format::Int8Ordered(g)
            | Format::Int4(g)
            | Format::Int4Asym(g)
            | Format::Int4Ordered(g) => Some(g),
            _ => None,
        }
    }

    /// Whether two columns share a byte in a format of integer codes.
    fn nibbles(self) -> bool {
        matches!(self, Format::Int4(_) | Format::Int4Asym(_) | Format::Int4Ordered(_))
    }

    /// The code of value 0 where nothing else is said: half of the codes that integers have.
    fn middle(self) -> i32 {
        if self.nibbles() { 8 } else { 128 }
    }

    /// Whether a matrix may have a zero point per scale.
    pub fn takes_zero_points(self) -> bool {
        matches!(self, Format::Int4Asym(_) | Format::Int4Ordered(_) | Format::Int8Asym(_) | Format::Int8Ordered(_))
    }

    /// Whether a matrix says for each column which group it is of.
    pub fn is_ordered(self) -> bool {
        matches!(self, Format::Int4Ordered(_) | Format::Int8Ordered(_))
    }

    /// Columns that are encoded together: decoding starts at multiples of it, and rows of GGUF formats are multiples of it.
    pub fn block_cols(self) -> usize {
        match self {
            Format::Mxfp4 | Format::Nvfp4 => 2,
            _ if self.nibbles() => 2,
            _ => ggml::block(self).map_or(1, |(cols, _)| cols),
        }
    }

    /// Bytes of the codes of one row, or why a row cannot have that many columns.
    pub fn row_bytes(self, cols: usize) -> Result<usize, String> {
        let blocks = |cols_per: usize, bytes: usize| {
            if cols.is_multiple_of(cols_per) {
                Ok(cols / cols_per * bytes)
            } else {
                Err(format!("{self} needs columns in multiples of {cols_per}, got {cols}"))
            }
        };
        if let Some(group) = self.group() {
            return match (group, self.nibbles()) {
                (Group::Row, false) => blocks(1, 1),
                (Group::Row, true) => blocks(2, 1),
                (Group::Of(0), _) => Err(format!("{self}: a group has at least one column")),
                (Group::Of(g), false) => blocks(g as usize, g as usize),
                (Group::Of(g), true) if g >= 2 && g % 2 == 0 => blocks(g as usize, g as usize / 2),
                (Group::Of(g), true) => Err(format!("INT4 groups must be even, got {g}")),
            };
        }
        match self {
            Format::F32 => blocks(1, 4),
            Format::F16 | Format::Bf16 => blocks(1, 2),
            Format::Fp8Block | Format::Fp8Channel => blocks(1, 1),
            Format::Mxfp4 => blocks(mx::COLS, mx::COLS / 2),
            Format::Mxfp8 => blocks(mx::COLS, mx::COLS),
            Format::Nvfp4 => blocks(mx::NV_COLS, mx::NV_COLS / 2),
            // GGUF's: their sizes stand in one table.
            _ => match ggml::block(self) {
                Some((cols, bytes)) => blocks(cols, bytes),
                None => Err(format!("{self} has no blocks")),
            },
        }
    }

    /// Shape of the separate scale tensor, for formats that have one.
    pub fn scale_shape(self, rows: usize, cols: usize) -> Option<(usize, usize)> {
        match self {
            Format::Fp8Block => Some((rows.div_ceil(fp8::TILE), cols.div_ceil(fp8::TILE))),
            Format::Fp8Channel => Some((rows, 1)),
            Format::Mxfp4 | Format::Mxfp8 => Some((rows, cols.div_ceil(mx::COLS))),
            Format::Nvfp4 => Some((rows, cols.div_ceil(mx::NV_COLS))),
            _ => self.group().map(|g| (rows, cols.div_ceil(g.cols(cols).max(1)))),
        }
    }

    /// Whether separate scales may be of a type.
    pub fn takes_scales(self, kind: ScaleType) -> bool {
        match self {
            Format::Mxfp4 | Format::Mxfp8 => kind == ScaleType::E8m0,
            Format::Nvfp4 => kind == ScaleType::E4m3,
            Format::Fp8Block => kind != ScaleType::E4m3,
            _ => kind != ScaleType::E8m0 && kind != ScaleType::E4m3,
        }
    }

    /// Bytes of the zero points, for formats that may have them: an I16 per scale.
    pub fn zero_point_bytes(self, rows: usize, cols: usize) -> usize {
        match self.scale_shape(rows, cols) {
            Some((rows, groups)) if self.takes_zero_points() => rows * groups * 2,
            _ => 0,
        }
    }

    /// Bytes of a whole matrix as held: codes, scales (taken as F32 for FP8 and integers per row, BF16 for groups of integers), zero
    /// points and column groups.
    pub fn stored_bytes(self, rows: usize, cols: usize) -> u64 {
        let codes = self.row_bytes(cols).unwrap_or(0) as u64 * rows as u64;
        let scale = match self {
            Format::Mxfp4 | Format::Mxfp8 | Format::Nvfp4 => 1,
            _ if matches!(self.group(), Some(Group::Of(_))) => 2,
            _ => 4,
        };
        let scales = self.scale_shape(rows, cols).map_or(0, |(r, c)| r as u64 * c as u64 * scale);
        let order = if self.is_ordered() { cols as u64 * 4 } else { 0 };
        codes + scales + self.zero_point_bytes(rows, cols) as u64 + order
    }
}

/// Type of the numbers in a scale tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// Upper half of an F32.
    Bf16,
    /// A power of two: one byte, its exponent plus 127.
    E8m0,
    /// E4M3, which a [`Global`] factor may go with.
    E4m3,
}

/// What all scales of a matrix are multiplied with, or divided by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Global {
    /// ModelOpt's `weight_scale_2`.
    Times(f32),
    /// compressed-tensors' `weight_global_scale`.
    Over(f32),
}

impl ScaleType {
    /// Bytes of one scale.
    pub fn bytes(self) -> usize {
        match self {
            ScaleType::F32 => 4,
            ScaleType::F16 | ScaleType::Bf16 => 2,
            ScaleType::E8m0 | ScaleType::E4m3 => 1,
        }
    }
}

/// The separate scale tensor of a matrix: `[rows, cols]` of [`Format::scale_shape`], row-major.
#[derive(Debug, Clone)]
pub struct Scales {
    pub(crate) bytes: Bytes,
    pub(crate) kind: ScaleType,
    pub(crate) cols: usize,
    /// Scales from one row to the next; more than `cols` when rows of two matrices alternate.
    pub(crate) stride: usize,
    pub(crate) global: Global,
}

impl Scales {
    /// Type of the stored numbers.
    pub fn kind(&self) -> ScaleType {
        self.kind
    }

    /// Scales per row of the scale tensor.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The stored bytes, from the first row's to the last one's.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The stored byte of the scale at `[row, col]`, for types of one byte.
    #[inline]
    pub fn byte(&self, row: usize, col: usize) -> u8 {
        self.bytes[row * self.stride + col]
    }

    /// What all E4M3 scales are multiplied with.
    pub fn factor(&self) -> f32 {
        match self.global {
            Global::Times(v) => v,
            Global::Over(v) => 1.0 / v,
        }
    }

    /// What all E4M3 scales are divided by: the nearest number where they are multiplied.
    pub fn divisor(&self) -> f32 {
        match self.global {
            Global::Over(v) => v,
            Global::Times(v) => {
                let near = 1.0 / v;
                // Rounded twice, it may be one off where another is exact.
                let exact = [near, near.next_up(), near.next_down()].into_iter().find(|d| 1.0 / d == v);
                exact.unwrap_or(near)
            }
        }
    }

    /// The scale at `[row, col]` of the scale tensor.
    #[inline]
    pub fn get(&self, row: usize, col: usize) -> f32 {
        let i = row * self.stride + col;
        match self.kind {
            ScaleType::F32 => float::f32_at(&self.bytes, i),
            ScaleType::F16 => float::f16_at(&self.bytes, i),
            ScaleType::Bf16 => float::bf16_at(&self.bytes, i),
            ScaleType::E8m0 => mx::e8m0_to_f32(self.bytes[i]),
            ScaleType::E4m3 => match self.global {
                Global::Times(v) => fp8::E4M3[self.bytes[i] as usize] * v,
                Global::Over(v) => fp8::E4M3[self.bytes[i] as usize] / v,
            },
        }
    }
}

/// One encoded weight matrix `[rows, cols]`: a handle on bytes that somebody else owns (a memory map, an allocation).
///
/// Cloning is cheap and keeps the owner alive. Lengths are checked once, here; decoding trusts them.
#[derive(Debug, Clone)]
pub struct Matrix {
    format: Format,
    rows: usize,
    cols: usize,
    codes: Bytes,
    row_bytes: usize,
    /// Bytes from one row to the next; more than `row_bytes` when rows of two matrices alternate.
    stride: usize,
    scales: Option<Scales>,
    zeros: Option<ZeroPoints>,
    /// Of each column; there exactly in ordered formats.
    column_groups: Option<Arc<[u32]>>,
}

/// Zero points `[rows, groups]`; that of a row and group is `values[first + row * stride + group]`.
#[derive(Debug, Clone)]
pub(crate) struct ZeroPoints {
    pub(crate) values: Arc<[i16]>,
    pub(crate) first: usize,
    pub(crate) stride: usize,
}

/// All that a matrix is made of, to hand it to a plugin and to put it together there.
pub(crate) struct Parts {
    pub format: Format,
    pub rows: usize,
    pub cols: usize,
    pub codes: Bytes,
    pub stride: usize,
    pub scales: Option<Scales>,
    pub zeros: Option<ZeroPoints>,
    pub column_groups: Option<Arc<[u32]>>,
}

impl Parts {
    /// The matrix of these parts; whatever would be read past an end is refused.
    pub fn matrix(self) -> Result<Matrix, String> {
        let Parts { format, rows, cols, codes, stride, scales, zeros, column_groups } = self;
        let row_bytes = format.row_bytes(cols)?;
        let fits = |len: usize, rows: usize, stride: usize, row: usize| {
            let last = rows.saturating_sub(1).checked_mul(stride).and_then(|n| n.checked_add(row));
            rows == 0 || stride >= row && last.is_some_and(|last| last <= len)
        };
        let shape = format.scale_shape(rows, cols);
        let groups = shape.map_or(0, |(_, groups)| groups);
        let scales_fit = match (&scales, shape) {
            (None, None) => true,
            (Some(s), Some((rows, groups))) => {
                s.cols == groups
                    && format.takes_scales(s.kind)
                    && fits(s.bytes.len() / s.kind.bytes(), rows, s.stride, groups)
            }
            _ => false,
        };
        let zeros_fit = zeros.as_ref().is_none_or(|z| {
            format.takes_zero_points()
                && z.first <= z.values.len()
                && fits(z.values.len() - z.first, rows, z.stride, groups)
        });
        let groups_fit = match &column_groups {
            Some(of) => format.is_ordered() && of.len() == cols && of.iter().all(|&g| (g as usize) < groups),
            None => !format.is_ordered(),
        };
        if !(fits(codes.len(), rows, stride, row_bytes) && scales_fit && zeros_fit && groups_fit) {
            return Err(format!("the parts of a matrix {format} [{rows}, {cols}] do not fit each other"));
        }
        Ok(Matrix { format, rows, cols, codes, row_bytes, stride, scales, zeros, column_groups })
    }
}

impl Matrix {
    /// What it is made of.
    #[cfg(feature = "plugins")]
    pub(crate) fn parts(&self) -> Parts {
        let Matrix { format, rows, cols, codes, row_bytes: _, stride, scales, zeros, column_groups } = self.clone();
        Parts { format, rows, cols, codes, stride, scales, zeros, column_groups }
    }

    /// A matrix over `codes` (contiguous rows) and, for formats with a separate scale tensor, `scales`.
    ///
    /// # Errors
    /// Says which length does not fit the format and shape. The caller adds file and tensor.
    pub fn new(
        format: Format,
        rows: usize,
        cols: usize,
        codes: Bytes,
        scales: Option<(Bytes, ScaleType)>,
    ) -> Result<Self, String> {
        let row_bytes = format.row_bytes(cols)?;
        let want = rows.checked_mul(row_bytes).ok_or("shape overflows")?;
        if codes.len() != want {
            return Err(format!("{format} [{rows}, {cols}] takes {want} bytes, found {}", codes.len()));
        }
        let scales = match (format.scale_shape(rows, cols), scales) {
            (None, None) => None,
            (None, Some(_)) => return Err(format!("{format} has no separate scales, but some were given")),
            (Some((r, c)), None) => {
                return Err(format!("{format} [{rows}, {cols}] needs scales [{r}, {c}], found none"));
            }
            (Some(_), Some((_, kind))) if !format.takes_scales(kind) => {
                return Err(format!("{format} has no scales of type {kind:?}"));
            }
            (Some((r, c)), Some((bytes, kind))) => {
                let want = r.checked_mul(c).and_then(|n| n.checked_mul(kind.bytes())).ok_or("shape overflows")?;
                if bytes.len() != want {
                    return Err(format!(
                        "{format} [{rows}, {cols}] needs scales [{r}, {c}] of type {kind:?} in {want} bytes, found {}",
                        bytes.len()
                    ));
                }
                Some(Scales { bytes, kind, cols: c, stride: c, global: Global::Times(1.0) })
            }
        };
        let column_groups = match format.group() {
            Some(group) if format.is_ordered() => {
                let group = group.cols(cols);
                Some((0..cols).map(|k| (k / group) as u32).collect())
            }
            _ => None,
        };
        Ok(Matrix { format, rows, cols, codes, row_bytes, stride: row_bytes, scales, zeros: None, column_groups })
    }

    /// Sets the factor of all E4M3 scales; without, it is 1. Nothing else has one.
    pub fn with_global_scale(mut self, global: Global) -> Self {
        if let Some(scales) = &mut self.scales {
            scales.global = global;
        }
        self
    }

    /// Adds the zero points of an asymmetric or ordered format: `[rows, groups]`, as its scales. Without them all are 8, or 128 where
    /// codes are bytes.
    ///
    /// # Errors
    /// Another format, another length, or a zero point that is neither a code nor one above the largest.
    pub fn with_zero_points(self, zeros: Vec<i16>) -> Result<Self, String> {
        let (format, rows, cols) = (self.format, self.rows, self.cols);
        let shape = format.scale_shape(rows, cols).filter(|_| format.takes_zero_points());
        let Some((_, groups)) = shape.filter(|&(r, c)| zeros.len() == r * c) else {
            return Err(match shape {
                Some((r, c)) => {
                    format!("{format} [{rows}, {cols}] takes zero points [{r}, {c}], found {} of them", zeros.len())
                }
                None => format!("{format} has no zero points, but some were given"),
            });
        };
        let most = 2 * format.middle() as i16;
        if let Some(i) = zeros.iter().position(|z| !(0..=most).contains(z)) {
            return Err(format!(
                "zero point [{}, {}] is {}; those of {format} are 0..={most}",
                i / groups,
                i % groups,
                zeros[i]
            ));
        }
        Ok(Matrix { zeros: Some(ZeroPoints { values: zeros.into(), first: 0, stride: groups }), ..self })
    }

    /// Sets the group of each column of an ordered format; without, columns are in the order of their groups.
    ///
    /// # Errors
    /// Another format, another length, or a group that there is not.
    pub fn with_column_groups(self, column_groups: Vec<u32>) -> Result<Self, String> {
        let (format, rows, cols) = (self.format, self.rows, self.cols);
        if !format.is_ordered() || column_groups.len() != cols {
            let found = column_groups.len();
            return Err(format!("{format} [{rows}, {cols}] was given groups of {found} columns"));
        }
        let groups = self.groups();
        if let Some(k) = column_groups.iter().position(|&g| g as usize >= groups) {
            return Err(format!("column {k} is of group {}, but there are {groups}", column_groups[k]));
        }
        Ok(Matrix { column_groups: Some(column_groups.into()), ..self })
    }

    /// The zero point of a row's group: of asymmetric and ordered formats what value 0 has as code, and 0 for all others, whose
    /// offsets are in their definition.
    ///
    /// # Panics
    /// May panic where there is no such row or group.
    #[inline]
    pub fn zero_point(&self, row: usize, group: usize) -> i32 {
        match &self.zeros {
            Some(zeros) => zeros.values[zeros.first + row * zeros.stride + group] as i32,
            None if self.format.takes_zero_points() => self.format.middle(),
            None => 0,
        }
    }

    /// Whether zero points were given. Without, those of asymmetric and ordered formats are all 8, or 128 where codes are bytes.
    pub fn has_zero_points(&self) -> bool {
        self.zeros.is_some()
    }

    /// The group of each column of an ordered format, each below the number of groups, and `None` for all others.
    pub fn column_groups(&self) -> Option<&[u32]> {
        self.column_groups.as_deref()
    }

    /// Scales per row.
    fn groups(&self) -> usize {
        self.scales.as_ref().map_or(0, |s| s.cols)
    }

    /// How the matrix is encoded.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The separate scale tensor, where the format has one.
    pub fn scales(&self) -> Option<&Scales> {
        self.scales.as_ref()
    }

    /// Codes of one row.
    #[inline]
    pub fn row(&self, row: usize) -> &[u8] {
        &self.codes[row * self.stride..][..self.row_bytes]
    }

    /// All codes, when rows are contiguous.
    pub fn contiguous(&self) -> Option<&[u8]> {
        (self.stride == self.row_bytes).then_some(&self.codes[..])
    }

    /// All codes as stored: `rows` of [`Matrix::stride`] bytes, the last one possibly shorter.
    pub fn codes(&self) -> &Bytes {
        &self.codes
    }

    /// Bytes from one row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Bytes of codes, scales, zero points and column groups that this handle covers.
    pub fn byte_len(&self) -> u64 {
        let scales = self.scales.as_ref().map_or(0, |s| self.scale_rows() * s.cols * s.kind.bytes());
        let zeros = if self.has_zero_points() { self.rows * self.groups() * 2 } else { 0 };
        let order = self.column_groups.as_ref().map_or(0, |g| g.len() * 4);
        (self.rows * self.row_bytes + scales + zeros + order) as u64
    }

    fn scale_rows(&self) -> usize {
        self.format.scale_shape(self.rows, self.cols).map_or(0, |shape| shape.0)
    }

    /// Rows `first`, `first + step`, … (`count` of them) as a matrix of their own, without copying.
    ///
    /// For fused gate and up tensors: `step` 1 where the halves follow each other, 2 where their rows alternate.
    ///
    /// # Errors
    /// When rows are out of range, or share scales in a way that the selection would break.
    pub fn select_rows(&self, first: usize, step: usize, count: usize) -> Result<Self, String> {
        let past = count.checked_sub(1).and_then(|c| c.checked_mul(step)).and_then(|c| c.checked_add(first));
        if past.is_none_or(|last| last >= self.rows) || step == 0 {
            return Err(format!("rows {first} + {step} * 0..{count} are not within {} rows", self.rows));
        }
        let begin = first * self.stride;
        let end = begin + (count - 1) * step * self.stride + self.row_bytes;
        let scales = match &self.scales {
            None => None,
            Some(s) => {
                let tall = if self.format == Format::Fp8Block { fp8::TILE } else { 1 };
                if tall > 1 && (step != 1 || !first.is_multiple_of(tall)) {
                    return Err(format!(
                        "{} cannot be split at row {first}, step {step}: rows share scales",
                        self.format
                    ));
                }
                let last = (first + (count - 1) * step) / tall;
                let range = first / tall * s.stride..last * s.stride + s.cols;
                let bytes = s.bytes.slice(range.start * s.kind.bytes()..range.end * s.kind.bytes());
                Some(Scales { bytes, stride: s.stride * step, ..s.clone() })
            }
        };
        let zeros = self.zeros.as_ref().map(|zeros| ZeroPoints {
            values: zeros.values.clone(),
            first: zeros.first + first * zeros.stride,
            stride: zeros.stride * step,
        });
        Ok(Matrix {
            zeros,
            rows: count,
            codes: self.codes.slice(begin..end),
            stride: self.stride * step,
            scales,
            ..self.clone()
        })
    }

    /// Decodes columns `start..start + out.len()` of a row into F32, exactly as the format defines.
    ///
    /// `start` must be a multiple of [`Format::block_cols`]; `out` may end anywhere that a block ends, or at the row's end.
    ///
    /// # Panics
    /// When the range is outside the row or not aligned so: a caller's error, not a file's.
    pub fn decode_range(&self, row: usize, start: usize, out: &mut [f32]) {
        let block = self.format.block_cols();
        assert!(start.is_multiple_of(block) && start + out.len() <= self.cols, "columns out of range");
        assert!(out.len().is_multiple_of(block) || start + out.len() == self.cols, "columns split a block");
        match self.format {
            Format::F32 | Format::F16 | Format::Bf16 => float::decode(self, row, start, out),
            Format::Fp8Block | Format::Fp8Channel => fp8::decode(self, row, start, out),
            Format::Mxfp4 | Format::Mxfp8 | Format::Nvfp4 => mx::decode(self, row, start, out),
            _ if self.format.group().is_some() => int::decode(self, row, start, out),
            _ => ggml::decode(self, row, start, out),
        }
    }

    /// Decodes one row into `out` (`cols` long).
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        self.decode_range(row, 0, out);
    }

    /// Decodes the whole matrix, `[rows, cols]` row-major.
    pub fn decode(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        for (row, out) in out.chunks_exact_mut(self.cols.max(1)).enumerate() {
            self.decode_row(row, out);
        }
        out
    }

    /// Looks at every scale; reading them also brings the pages of formats that interleave them into memory.
    ///
    /// # Errors
    /// Names the first scale that is not a finite number.
    pub fn check_scales(&self) -> Result<(), String> {
        if let Some(s) = &self.scales {
            for (row, col) in (0..self.scale_rows()).flat_map(|r| (0..s.cols).map(move |c| (r, c))) {
                let v = s.get(row, col);
                if !v.is_finite() {
                    return Err(format!("scale [{row}, {col}] is {v}"));
                }
            }
        }
        if ggml::block(self.format).is_some() {
            for row in 0..self.rows {
                ggml::check_scales(self.format, self.row(row)).map_err(|e| format!("row {row}, {e}"))?;
            }
        }
        Ok(())
    }
}
