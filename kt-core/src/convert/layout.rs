//! How an encoded matrix lies in a file: its tensors in a Hugging Face directory, its type in a GGUF file, and files' headers.

use bytes::Bytes;
use serde_json::{Map, Value, json};

use super::values::Pairs;
use crate::format::{Format, Matrix, ScaleType};
use crate::source::gguf::Kind;
use crate::source::safetensors::transposed::columns_to_rows;

/// GGUF data begins, and each of its tensors, at a multiple of this.
pub const ALIGNMENT: u64 = 32;

/// A tensor as a header lists it.
#[derive(Debug, Clone)]
pub struct Entry {
    pub name: String,
    /// The type's name in the container.
    pub kind: String,
    /// Slowest dimension first.
    pub shape: Vec<usize>,
    pub bytes: u64,
}

/// How the scales of FP8 blocks are called, which the rest of the directory decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Naming {
    /// `weight_scale`, as all of compressed-tensors.
    CompressedTensors,
    /// `weight_scale_inv`, where nothing but FP8 blocks is quantized.
    Fp8,
}

/// Whether a Hugging Face directory can hold a format as it is.
pub fn fits_safetensors(format: Format) -> bool {
    match format {
        Format::F32 | Format::F16 | Format::Bf16 => true,
        Format::Fp8Block | Format::Fp8Channel | Format::Mxfp4 | Format::Mxfp8 | Format::Nvfp4 => true,
        _ => format.group().is_some(),
    }
}

/// Whether a format is kept and not made, as making it takes all of a matrix at once, or an order of its columns.
pub fn is_kept_only(format: Format) -> bool {
    format.is_ordered() || format == Format::Nvfp4
}

/// The tensors of the linear layer `base` `[rows, cols]`: codes first, then what [`tail`] gives, in its order.
///
/// # Errors
/// A shape that the format's layout cannot have.
pub fn entries(
    base: &str,
    format: Format,
    (rows, cols): (usize, usize),
    scales: ScaleType,
    naming: Naming,
) -> Result<Vec<Entry>, String> {
    let entry = |suffix: &str, kind: &str, shape: Vec<usize>, each: usize| {
        let bytes = shape.iter().product::<usize>() as u64 * each as u64;
        Entry { name: format!("{base}.{suffix}"), kind: kind.to_owned(), shape, bytes }
    };
    let row_bytes = format.row_bytes(cols)?;
    let scale_shape = format.scale_shape(rows, cols);
    let scale = |suffix: &str| {
        let (r, c) = scale_shape.unwrap_or_default();
        entry(suffix, scale_kind(scales), vec![r, c], scales.bytes())
    };
    if format.group().is_some() {
        if let Format::Int8(_) = format {
            return Ok(vec![entry("weight", "I8", vec![rows, cols], 1), scale("weight_scale")]);
        }
        if !row_bytes.is_multiple_of(4) {
            return Err(format!("packed rows are whole words of 32 bits, and {cols} columns of {format} are not"));
        }
        let mut all = vec![entry("weight_packed", "I32", vec![rows, row_bytes / 4], 4)];
        if format.takes_zero_points() {
            let groups = scale_shape.map_or(0, |s| s.1);
            all.push(entry("weight_zero_point", "I32", vec![rows.div_ceil(codes_per_word(format)), groups], 4));
        }
        if format.is_ordered() {
            all.push(entry("weight_g_idx", "I32", vec![cols], 4));
        }
        all.extend([entry("weight_shape", "I32", vec![2], 4), scale("weight_scale")]);
        return Ok(all);
    }
    Ok(match format {
        Format::F32 => vec![entry("weight", "F32", vec![rows, cols], 4)],
        Format::F16 => vec![entry("weight", "F16", vec![rows, cols], 2)],
        Format::Bf16 => vec![entry("weight", "BF16", vec![rows, cols], 2)],
        Format::Fp8Block if naming == Naming::Fp8 => {
            vec![entry("weight", "F8_E4M3", vec![rows, cols], 1), scale("weight_scale_inv")]
        }
        Format::Fp8Block | Format::Fp8Channel | Format::Mxfp8 => {
            vec![entry("weight", "F8_E4M3", vec![rows, cols], 1), scale("weight_scale")]
        }
        Format::Nvfp4 => vec![
            entry("weight_packed", "U8", vec![rows, row_bytes], 1),
            scale("weight_scale"),
            entry("weight_global_scale", "F32", vec![1], 4),
        ],
        Format::Mxfp4 => vec![entry("weight_packed", "U8", vec![rows, row_bytes], 1), scale("weight_scale")],
        _ => return Err(format!("a Hugging Face directory cannot hold {format}")),
    })
}

fn scale_kind(scales: ScaleType) -> &'static str {
    match scales {
        ScaleType::F32 => "F32",
        ScaleType::F16 => "F16",
        ScaleType::Bf16 => "BF16",
        ScaleType::E8m0 => "U8",
        ScaleType::E4m3 => "F8_E4M3",
    }
}

/// Codes of a packed format in a word of 32 bits.
fn codes_per_word(format: Format) -> usize {
    4 * format.block_cols()
}

/// What is collected of a matrix, some rows at a time, for the tensors behind its codes.
#[derive(Default)]
pub struct Sides {
    pub scales: Vec<u8>,
    pub zeros: Vec<i16>,
    pub column_groups: Vec<u32>,
    /// What all scales of NVFP4 are divided by.
    pub divisor: Option<f32>,
}

impl Sides {
    /// Those of a matrix whose scales are of type `scales`.
    ///
    /// # Errors
    /// They are of another type.
    pub fn of(matrix: &Matrix, scales: ScaleType) -> Result<Self, String> {
        let mut sides = Sides::default();
        let Some(held) = matrix.scales() else { return Ok(sides) };
        if held.kind() != scales {
            let what = "expert 0 tells what all have; convert with another format in between";
            return Err(format!("its scales are of type {:?}, those of expert 0 {scales:?}: {what}", held.kind()));
        }
        let (rows, cols) = matrix.format().scale_shape(matrix.rows(), matrix.cols()).unwrap_or_default();
        for (row, col) in (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))) {
            match scales {
                ScaleType::E8m0 | ScaleType::E4m3 => sides.scales.push(held.byte(row, col)),
                // Exact: the number came from that type.
                ScaleType::F32 => sides.scales.extend(held.get(row, col).to_le_bytes()),
                ScaleType::F16 => sides.scales.extend(half::f16::from_f32(held.get(row, col)).to_le_bytes()),
                ScaleType::Bf16 => sides.scales.extend(half::bf16::from_f32(held.get(row, col)).to_le_bytes()),
            }
            if matrix.format().takes_zero_points() {
                sides.zeros.push(matrix.zero_point(row, col) as i16);
            }
        }
        sides.column_groups = matrix.column_groups().unwrap_or_default().to_vec();
        sides.divisor = (matrix.format() == Format::Nvfp4).then(|| held.divisor());
        Ok(sides)
    }

    /// Adds those of the rows that follow.
    pub fn extend(&mut self, next: Sides) {
        self.scales.extend(next.scales);
        self.zeros.extend(next.zeros);
        self.column_groups = next.column_groups;
        self.divisor = next.divisor;
    }
}

/// The bytes behind the codes of a matrix in a Hugging Face directory.
pub fn tail(format: Format, (rows, cols): (usize, usize), sides: Sides) -> Vec<u8> {
    let mut tail = Vec::new();
    if format.group().is_some() && !matches!(format, Format::Int8(_)) {
        if format.takes_zero_points() {
            let groups = format.scale_shape(rows, cols).map_or(0, |s| s.1).max(1);
            let (per_word, bits) = (codes_per_word(format), 32 / codes_per_word(format));
            for rows in sides.zeros.chunks(per_word * groups) {
                for group in 0..groups {
                    let codes = rows.iter().skip(group).step_by(groups).enumerate();
                    let word = codes.fold(0u32, |word, (i, &zero)| word | (zero as u32) << (i * bits));
                    tail.extend(word.to_le_bytes());
                }
            }
        }
        tail.extend(sides.column_groups.iter().flat_map(|g| g.to_le_bytes()));
        tail.extend([rows, cols].into_iter().flat_map(|n| (n as u32).to_le_bytes()));
    }
    tail.extend(sides.scales);
    tail.extend(sides.divisor.iter().flat_map(|d| d.to_le_bytes()));
    tail
}

/// The codes of a matrix, rows without gaps.
pub fn codes(matrix: &Matrix) -> Bytes {
    match matrix.contiguous() {
        Some(_) => matrix.codes().clone(),
        None => (0..matrix.rows()).flat_map(|row| matrix.row(row)).copied().collect::<Vec<u8>>().into(),
    }
}

/// The numbers of a plain matrix, inputs first.
pub fn inputs_first(matrix: &Matrix) -> Bytes {
    let (codes, cols) = (codes(matrix), matrix.cols());
    let turned = match matrix.format() {
        Format::F32 => columns_to_rows(codes.as_chunks::<4>().0, cols, (0, 1, cols)).into_flattened(),
        _ => columns_to_rows(codes.as_chunks::<2>().0, cols, (0, 1, cols)).into_flattened(),
    };
    turned.into()
}

/// The rows of two matrices of one shape and format in turn.
///
/// # Errors
/// They are not alike, or of a format whose rows share scales.
pub fn in_turn(first: &Matrix, second: &Matrix) -> Result<Matrix, String> {
    let like = |m: &Matrix| (m.format(), m.rows(), m.cols());
    if like(first) != like(second) || first.format() == Format::Fp8Block {
        return Err(format!("{:?} and {:?} cannot alternate", like(first), like(second)));
    }
    let codes: Vec<u8> = (0..first.rows()).flat_map(|i| [first.row(i), second.row(i)]).flatten().copied().collect();
    let scales = match first.scales() {
        None => None,
        Some(scales) => {
            let kind = scales.kind();
            let wide = first.format().scale_shape(first.rows(), first.cols()).map_or(0, |s| s.1) * kind.bytes();
            let (a, b) = (Sides::of(first, kind)?.scales, Sides::of(second, kind)?.scales);
            let both = a.chunks(wide.max(1)).zip(b.chunks(wide.max(1))).flat_map(|(a, b)| [a, b]);
            Some((both.flatten().copied().collect::<Vec<u8>>().into(), kind))
        }
    };
    Matrix::new(first.format(), 2 * first.rows(), first.cols(), codes.into(), scales)
}

/// A zero point above the largest code, which unsigned words cannot store.
pub fn zero_point_beyond_codes(matrix: &Matrix) -> Option<i16> {
    let top = (1i16 << (32 / codes_per_word(matrix.format()))) - 1;
    let (rows, groups) = matrix.format().scale_shape(matrix.rows(), matrix.cols())?;
    let mut all = (0..rows).flat_map(|r| (0..groups).map(move |g| matrix.zero_point(r, g) as i16));
    all.find(|&zero| matrix.format().takes_zero_points() && zero > top)
}

/// The header of a safetensors file whose data are these tensors, one behind the other.
pub fn safetensors_header<'a>(entries: impl Iterator<Item = &'a Entry>) -> Vec<u8> {
    let (mut map, mut at) = (Map::new(), 0);
    map.insert("__metadata__".into(), json!({"format": "pt"}));
    for e in entries {
        let info = json!({"dtype": e.kind, "shape": e.shape, "data_offsets": [at, at + e.bytes]});
        map.insert(e.name.clone(), info);
        at += e.bytes;
    }
    let mut text = Value::Object(map).to_string().into_bytes();
    // The data begin at a multiple of 8.
    text.resize(text.len().next_multiple_of(8), b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text].concat()
}

/// The header of a GGUF file whose data are these tensors, each at the next multiple of [`ALIGNMENT`].
///
/// # Errors
/// Names a tensor of a type that GGUF does not have.
pub fn gguf_header(pairs: &Pairs, entries: &[&Entry]) -> Result<Vec<u8>, String> {
    let mut header = b"GGUF".to_vec();
    header.extend(3u32.to_le_bytes());
    header.extend((entries.len() as u64).to_le_bytes());
    pairs.write(&mut header);
    let mut at = 0u64;
    for e in entries {
        let kind =
            Kind::named(&e.kind).ok_or_else(|| format!("`{}` is of type {}, unknown in GGUF", e.name, e.kind))?;
        super::values::string(&mut header, &e.name);
        header.extend((e.shape.len() as u32).to_le_bytes());
        header.extend(e.shape.iter().rev().flat_map(|&dim| (dim as u64).to_le_bytes()));
        header.extend(kind.id().to_le_bytes());
        header.extend(at.to_le_bytes());
        at = (at + e.bytes).next_multiple_of(ALIGNMENT);
    }
    header.resize(header.len().next_multiple_of(ALIGNMENT as usize), 0);
    Ok(header)
}
