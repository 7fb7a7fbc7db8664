//! Decoders against the reference checkpoints (SHA-256 of every dequantized matrix) and against blocks worked by hand and
//! decoded by the `gguf` package.

#![allow(
    clippy::excessive_precision,
    reason = "nine digits name an F32; the formats' definitions print their examples so"
)]

use std::path::{Path, PathBuf};

use bytes::Bytes;
use kt_core::format::ALL;
use kt_core::{Format, Group, Matrix, Proj, ScaleType, WeightSource};
use sha2::{Digest, Sha256};

const REFERENCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/reference");

/// Directories of the reference data that have dequantized hashes.
fn directories() -> Vec<PathBuf> {
    let children = |dir: &Path| -> Vec<PathBuf> {
        let mut paths: Vec<_> =
            std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir()).collect();
        paths.sort();
        paths
    };
    let families = children(Path::new(REFERENCE));
    families.iter().flat_map(|f| children(f)).filter(|d| d.join("dequant_sha256.json").exists()).collect()
}

/// Layer, expert (none when experts are stacked) and projection of a routed expert's tensor.
fn expert(name: &str) -> Option<(usize, Option<usize>, Proj)> {
    let parts: Vec<&str> = name.split('.').collect();
    let proj = |s: &str| Proj::ALL.into_iter().find(|p| s.split('_').any(|part| part == p.name()));
    match parts[..] {
        ["model", "layers", i, "mlp", "experts", e, p, "weight"] => {
            Some((i.parse().ok()?, Some(e.parse().ok()?), proj(p)?))
        }
        ["blk", i, p, "weight"] if p.ends_with("_exps") => Some((i.parse().ok()?, None, proj(p)?)),
        _ => None,
    }
}

fn decode(source: &dyn WeightSource, name: &str) -> kt_core::Result<Vec<f32>> {
    match expert(name) {
        None => Ok(source.tensor(name)?.decode()),
        Some((layer, Some(expert), proj)) => Ok(source.matrix(layer, expert, proj)?.decode()),
        Some((layer, None, proj)) => {
            let experts = source.layers().iter().find(|l| l.index == layer).expect("an expert layer").experts;
            let mut all = Vec::new();
            for e in 0..experts {
                all.extend(source.matrix(layer, e, proj)?.decode());
            }
            Ok(all)
        }
    }
}

#[test]
fn every_matrix_of_the_reference_checkpoints_decodes_bit_for_bit() {
    let (mut failures, mut formats) = (Vec::new(), Vec::new());
    let directories = directories();
    assert_eq!(directories.len(), 7);
    for dir in directories {
        // The GGUF directories hold safetensors files too, of reference outputs: name the file there.
        let mut files = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path());
        let gguf = files.find(|p| p.extension().is_some_and(|e| e == "gguf"));
        let source = kt_core::open(gguf.as_ref().unwrap_or(&dir)).unwrap();
        for layer in source.layers() {
            formats.extend(layer.formats);
        }
        let hashes: serde_json::Value =
            serde_json::from_slice(&std::fs::read(dir.join("dequant_sha256.json")).unwrap()).unwrap();
        let hashes = hashes.as_object().unwrap();
        assert!(hashes.keys().filter(|n| expert(n).is_some()).count() >= 6, "{}", dir.display());
        for (name, want) in hashes {
            let outcome = decode(&*source, name).map(|values| {
                let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect::<String>()
            });
            match outcome {
                Ok(hash) if Some(hash.as_str()) == want.as_str() => {}
                Ok(_) => failures.push(format!("{}: {name} decodes to other values", dir.display())),
                Err(e) => failures.push(e.to_string()),
            }
        }
    }
    assert!(failures.is_empty(), "{} matrices: {failures:#?}", failures.len());
    for format in [Format::Fp8Block, Format::Int4(Group::Of(32)), Format::Q4K, Format::Q6K, Format::Q8_0] {
        assert!(formats.contains(&format), "no expert of the reference data is {format}");
    }
}

/// The first columns of the worked row: `((37 i + 11) mod 101) / 50 - 1`.
fn worked_row(cols: usize) -> Vec<f32> {
    (0..cols).map(|i| ((37 * i + 11) % 101) as f32 / 50.0 - 1.0).collect()
}

fn from_hex(hex: &str) -> Bytes {
    (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()).collect::<Vec<_>>().into()
}

fn matrix(format: Format, rows: usize, cols: usize, codes: &[u8], scales: Option<(&[f32], ScaleType)>) -> Matrix {
    let scales = scales.map(|(values, kind)| {
        let bytes: Vec<u8> = match kind {
            ScaleType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            ScaleType::F16 => values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect(),
            ScaleType::Bf16 => values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect(),
            ScaleType::E4m3 => values.iter().map(|v| kt_core::format::fp8::f32_to_e4m3(*v)).collect(),
            ScaleType::E8m0 => values.iter().map(|v| (v.log2() + 127.0) as u8).collect(),
        };
        (Bytes::from(bytes), kind)
    });
    Matrix::new(format, rows, cols, Bytes::copy_from_slice(codes), scales).unwrap()
}

/// A block's bytes, and its values from some columns on.
type Worked<'a> = (Format, &'a str, &'a [(usize, [f32; 4])]);

#[test]
fn gguf_blocks_decode_to_the_worked_values() {
    let blocks: [Worked<'_>; 13] = [
        (
            Format::Q8_0,
            "08209dfb59b61472d02e8be947a50361be1c7ad73593f14fac0a68c62481df3d9af8",
            &[
                (0, [-0.77947998, -0.0393676758, 0.700744629, -0.582641602]),
                (16, [0.960571289, -0.322814941, 0.417297363, -0.858215332]),
            ],
        ),
        (
            Format::Q4_0,
            "0030f258be1379df359bf147ac0268ce248a",
            &[(0, [-0.75, 0.0, 0.75, -0.625]), (16, [0.875, -0.375, 0.375, -0.875])],
        ),
        (
            Format::Q4K,
            "65182924fffffffafff8fafaceafbfbcc2278dd3499e055ab1167cc2388de449af056bb1277cd3389ee45aa0166bc22748ad0469c0157bd1379c\
             f358ae046ac0268be2379df359be157ad1268ce248ada0156bc1278cd3489e045ab0167bc2378de349ae056ab1267cd2389de459af15268ce248\
             ad0459b0157bd1379ce348ae046ac0267bd2379df359be156ac1268c",
            &[
                (0, [-0.753421783, -0.0775051117, 0.733594894, -0.618238449]),
                (32, [0.712165833, -0.639667511, 0.171432495, 0.847349167]),
                (252, [-0.186309814, 0.586166382, -0.701293945, 0.071182251]),
            ],
        ),
        (
            Format::Q5K,
            "2d140c24fdfdfdfdfefbfdfeffcdedfd26cc9366c9336499324c9926cd9366d9336c9936cc9b66cdb366d9326c9936cca35f1bd6924e0ac6813d\
             f9b4602ce7a35f1bd7924e0ac5713df8a4602ce7a35f915d09c5803cf8b36f2be7a26e1ad6914d09c4703cf7b37f2be7a25e1ad5814d702be7a3\
             5f1ad6824d09c5813cf8b4602be7935e1ad6924d09c5703cf8a46f2b5e1ad5915d09c5803cf8b36f2be6a25e1ad6914d09c4703cf7b36f2be7a2\
             5e1a",
            &[
                (0, [-0.793538094, -0.0472803116, 0.69897747, -0.606973648]),
                (32, [0.684213638, -0.62173748, 0.124520302, 0.870778084]),
                (252, [-0.125276566, 0.620981216, -0.684969902, 0.0612878799]),
            ],
        ),
        (
            Format::Q6K,
            "45df28bc069f137cf08ad367f14ade285ed67df57c038b02aa22b931b85fd75e26ac058d037bf179d258d048ce27af2583fc741d960eb62fd840\
             b961da53fb74d158bf37be25ad048b047bf37ad159d0c941ea63eb74fb741d951ea72fc841c9bf35ad169b048df26be069d147cf38bd1a922c84\
             0d85ed77ff57d038b04aa22b6cb11b6cc61b71c61cb1cb6cb21b6cc6e74d3ad04d37904ae7913ae44d3a904d18b1c66cb11b6c861b71c61cb1c7\
             6cb22453f9248ef9138ef4538d2452f9248e8d81877c897a8677807f897a867a8487228c",
            &[
                (0, [-0.78322649, -0.0290083885, 0.696201324, -0.58016777]),
                (32, [0.671481133, -0.610437393, 0.152609348, 0.88513422]),
                (252, [-0.152609348, 0.610437393, -0.671481133, 0.0610437393]),
            ],
        ),
        (
            Format::Q4_1,
            "2e3000bcf257bd1379cf358ae146ac0268bd2479",
            &[
                (0, [-0.738769531, -0.0856933594, 0.697998047, -0.608154297]),
                (16, [0.959228516, -0.346923828, 0.436767578, -0.869384766]),
            ],
        ),
        (
            Format::Q5_0,
            "002cb4b4a525f4bf7b27e3ae5a16d19d4904c08c38f4",
            &[(0, [-0.75, -0.0625, 0.6875, -0.5625]), (16, [0.9375, -0.3125, 0.4375, -0.875])],
        ),
        (
            Format::Q5_1,
            "0c2c00bcb4b4a525f3bf6b27e2ae5a16d19d4904c07c38f3",
            &[
                (0, [-0.810302734, -0.0515136719, 0.707275391, -0.557373047]),
                (16, [0.960205078, -0.304443359, 0.391113281, -0.873535156]),
            ],
        ),
        (
            Format::Iq4Nl,
            "3820f157ce137adf249be146bd0258ce137a",
            &[
                (0, [-0.856933594, -0.0823974609, 0.733337402, -0.535583496]),
                (16, [0.931091309, -0.288391113, 0.436706543, -0.856933594]),
            ],
        ),
        (
            Format::Mxfp4Ggml,
            "7d6db035dc9146db135ec924eda045dc02",
            &[(0, [-0.75, 0.0, 0.75, -0.5]), (16, [1.0, -0.375, 0.375, -0.75])],
        ),
        (
            Format::Q2K,
            "bcdfeebeefaceeacdedecddffedeffce6cb51b6cc61ba1c66cb1db6cb61b6cc61b71c618b1c66cb21b6dc618b1c628b168b1d66cb11b6c\
             861bb1c66cb1d66cb21b6d861b71c628b1d76cb61b6d861bb120293c2c",
            &[
                (0, [-0.727783203, -0.247314453, 0.713623047, -0.727783203]),
                (32, [0.755371094, -0.365722656, 0.194824219, 0.755371094]),
                (252, [-0.233398438, 0.327148438, -0.793945312, 0.327148438]),
            ],
        ),
        (
            Format::Q3K,
            "66cdb366d9336c9936cc9b66cdb366d94d1ae74cb3e758b3ed18b74c9ae74cb3897833de9d7727ed886be2d97837de9ddb2f7589dc2276\
             88df2275c91f7285d84827e28d7823de897722dd8877e29d785df2b79c2db68b5de2f7485d22b7882d66a260aa50aa660900fc003f09a1",
            &[
                (0, [-0.767074585, 0.0, 0.767074585, -0.511383057]),
                (32, [0.629394531, -0.629394531, 0.0, 0.944091797]),
                (252, [0.0, 0.629394531, -0.629394531, 0.0]),
            ],
        ),
        (
            Format::Iq4Xs,
            "448c3c0ce00ee021f157ce137adf249be146bd0258ce137a42fd9621ec741fda530eb831fd9620eba721ec751fda530eb842fd9620ec74\
             1f248be035acf157ce137adf249be146bde035acf157ce1369df249be136adf258630fc942fea721ec751fda530eb842fd47be1269df24\
             8be035adf157ce137adf0269df138be035adf147ce1269df249b",
            &[
                (0, [-0.866455078, -0.0833129883, 0.741485596, -0.541534424]),
                (32, [0.64827919, -0.538930893, 0.171833038, 0.812301636]),
                (252, [-0.171833038, 0.538930893, -0.64827919, 0.101537704]),
            ],
        ),
    ];
    for (format, hex, expected) in blocks {
        let block = from_hex(hex);
        let cols = format.block_cols();
        // Two equal rows of three blocks each, so that rows and ranges are addressed too.
        let m = matrix(format, 2, 3 * cols, &block.repeat(6), None);
        m.check_scales().unwrap();
        let values = m.decode();
        for (i, &v) in values.iter().enumerate() {
            assert_eq!(v, values[i % cols], "{format} value {i}");
        }
        for (start, want) in expected {
            assert_eq!(values[*start..start + 4], want[..], "{format} from column {start}");
        }
        // Rounding errors of the format aside, it is the worked row.
        for (got, want) in values.iter().zip(worked_row(cols)) {
            let step = match format {
                Format::Q2K => 0.4,
                Format::Q3K => 0.2,
                _ => 0.13,
            };
            assert!((got - want).abs() < step, "{format}: {got} for {want}");
        }
        // ggml's own encoder made the block; ours comes as close.
        let row = worked_row(cols);
        let ours = kt_core::quantize::encode(format, 1, cols, &row).unwrap().decode();
        let error = |values: &[f32]| kt_core::quantize::relative_error(&row, values).rms_ratio;
        let (ours, theirs) = (error(&ours), error(&values[..cols]));
        assert!(ours <= theirs * 1.02, "{format}: {ours}, ggml {theirs}");
        let mut middle = vec![0.0; cols];
        m.decode_range(1, cols, &mut middle);
        assert_eq!(middle, values[..cols]);
        assert!(matrix(format, 0, cols, &[], None).decode().is_empty());
    }
}

#[test]
fn gguf_blocks_decode_as_the_gguf_package_decodes_them() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/ggml_blocks.safetensors");
    let file = std::fs::read(path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let formats: Vec<Format> =
        ALL.into_iter().filter(|f| f.scale_shape(1, 256).is_none() && f.block_cols() >= 32).collect();
    assert_eq!(tensors.len(), 2 * formats.len() + 6);
    for format in formats {
        let name = format.to_string().replace("-ggml", "");
        let tensor = |what: &str| tensors.tensor(&format!("{name}.{what}")).unwrap();
        let (blocks, values) = (tensor("blocks"), tensor("values"));
        let (count, cols) = (blocks.shape()[0], format.block_cols());
        assert_eq!(blocks.shape()[1], format.row_bytes(cols).unwrap(), "{format}");
        assert!(values.shape() == [count, cols] && count >= 4, "{format}");
        // All blocks in one row, and two to a row.
        for rows in [1, count / 2] {
            let m = matrix(format, rows, count / rows * cols, blocks.data(), None);
            m.check_scales().unwrap();
            for (i, (got, want)) in m.decode().iter().zip(values.data().as_chunks::<4>().0).enumerate() {
                let want = f32::from_le_bytes(*want);
                assert_eq!(got.to_bits(), want.to_bits(), "{format}, value {i}: {got} is not {want}");
            }
        }
    }
}

#[test]
fn grids_have_the_points_of_the_gguf_package() {
    use kt_core::format::ggml::{
        IQ1_GRID, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID, even_signs,
    };
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/ggml_blocks.safetensors");
    let file = std::fs::read(path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    for (name, points) in [
        ("IQ2_XXS", IQ2_XXS_GRID.as_flattened()),
        ("IQ2_XS", IQ2_XS_GRID.as_flattened()),
        ("IQ2_S", IQ2_S_GRID.as_flattened()),
        ("IQ3_XXS", IQ3_XXS_GRID.as_flattened()),
        ("IQ3_S", IQ3_S_GRID.as_flattened()),
        ("IQ1_S", IQ1_GRID.as_flattened()),
    ] {
        let want = tensors.tensor(&format!("{name}.grid")).unwrap();
        let want: Vec<i8> = want.data().iter().map(|&b| b as i8).collect();
        assert_eq!(points, want, "{name}");
    }
    for bits in 0..128 {
        for at in 0..4 {
            let signs = even_signs(bits << (7 * at) | 0xf000_0000);
            let want = bits as u8 | (bits.count_ones() as u8 & 1) << 7;
            assert_eq!(signs, std::array::from_fn(|i| if i == at { want } else { 0 }));
        }
    }
}

#[test]
fn floats_are_stored_as_they_are() {
    assert_eq!(matrix(Format::Bf16, 1, 2, &[0x80, 0x3f, 0xc8, 0xbf], None).decode(), [1.0, -1.5625]);
    // Halves: 1, -2, the smallest subnormal, the largest number.
    let halves = [0x00, 0x3c, 0x00, 0xc0, 0x01, 0x00, 0xff, 0x7b];
    assert_eq!(matrix(Format::F16, 2, 2, &halves, None).decode(), [1.0, -2.0, 2f32.powi(-24), 65504.0]);
    let values = [1.5f32, -0.0, f32::MIN_POSITIVE / 2.0, 3e38];
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let m = matrix(Format::F32, 2, 2, &bytes, None);
    assert_eq!(m.decode().iter().map(|v| v.to_bits()).collect::<Vec<_>>(), values.map(f32::to_bits));
    let mut one = [0.0];
    m.decode_range(1, 1, &mut one);
    assert_eq!(one, [3e38]);
}

#[test]
fn fp8_scales_belong_to_tiles_or_rows() {
    let values = worked_row(128);
    let codes = |m: &Matrix| m.row(0)[..4].to_vec();
    let two: Vec<f32> = values.iter().copied().chain(values.iter().map(|v| -0.5 * v)).collect();
    let blocks = kt_core::quantize::encode(Format::Fp8Block, 2, 128, &two).unwrap();
    assert_eq!(blocks.scales().unwrap().get(0, 0), 0.0022321430);
    assert_eq!(codes(&blocks), [0xfb, 0xd9, 0x7a, 0xf8]);
    assert_eq!(blocks.decode()[..4], [-0.78571433, -0.040178575, 0.71428573, -0.5714286]);

    let rows = matrix(
        Format::Fp8Channel,
        2,
        4,
        &[0xfb, 0xd9, 0x7a, 0xf8, 0x7b, 0x59, 0xfa, 0x78],
        Some((&[0.0022321430, 0.0011160715], ScaleType::F32)),
    );
    let expected = [-0.78571433, -0.040178575, 0.71428573, -0.5714286, 0.39285716, 0.020089287, -0.35714287, 0.2857143];
    assert_eq!(rows.decode(), expected);
    let rows = matrix(Format::Fp8Channel, 2, 2, &[0x38, 0x7e, 0xb8, 0x01], Some((&[0.5, 2.0], ScaleType::Bf16)));
    assert_eq!(rows.decode(), [0.5, 224.0, -2.0, 2f32.powi(-8)]);

    // 130 x 200 has four tiles, three of them partial; every code is 1.
    let tiles = matrix(Format::Fp8Block, 130, 200, &[0x38; 130 * 200], Some((&[1.0, 2.0, 3.0, 4.0], ScaleType::F32)));
    for (i, v) in tiles.decode().into_iter().enumerate() {
        let (row, col) = (i / 200, i % 200);
        assert_eq!(v, (1 + 2 * (row / 128) + col / 128) as f32, "[{row}, {col}]");
    }
    let mut across = [0.0; 4];
    tiles.decode_range(129, 126, &mut across);
    assert_eq!(across, [3.0, 3.0, 4.0, 4.0]);
    assert!(matrix(Format::Fp8Channel, 1, 1, &[0x7f], Some((&[1.0], ScaleType::F32))).decode()[0].is_nan());
}

#[test]
fn int8_is_signed_or_offset_and_scaled_by_row_or_group() {
    let signed = [0x80u8, 0xff, 0x00, 0x01, 0x7f, 0x02, 0xfe, 0x40];
    let offset = signed.map(|c| c ^ 0x80);
    let values = [-128.0, -1.0, 0.0, 1.0, 127.0, 2.0, -2.0, 64.0];
    for kind in [ScaleType::F32, ScaleType::F16, ScaleType::Bf16] {
        for (codes, by_row, by_group) in [
            (signed, Format::Int8(Group::Row), Format::Int8(Group::Of(2))),
            (offset, Format::Int8Offset(Group::Row), Format::Int8Offset(Group::Of(2))),
        ] {
            let m = matrix(by_row, 2, 4, &codes, Some((&[0.5, 3.0], kind)));
            let want: Vec<f32> = values.iter().enumerate().map(|(i, v)| v * [0.5, 3.0][i / 4]).collect();
            assert_eq!(m.decode(), want, "{by_row} {kind:?}");
            let scales = [0.25, 2.0, 1.0, 0.125];
            let m = matrix(by_group, 2, 4, &codes, Some((&scales, kind)));
            let want: Vec<f32> = values.iter().enumerate().map(|(i, v)| v * scales[i / 2]).collect();
            assert_eq!(m.decode(), want, "{by_group} {kind:?}");
            let mut across = [0.0; 2];
            m.decode_range(1, 1, &mut across);
            assert_eq!(across, want[5..7]);
        }
    }
}

#[test]
fn int4_has_its_even_column_in_the_low_nibble() {
    // The worked example: word 0xb5f94d82, scale 0.1337890625; the other columns of the group are zero (nibble 8).
    let mut codes = vec![0x88; 32];
    codes[..4].copy_from_slice(&0xb5f9_4d82u32.to_le_bytes());
    codes[16..20].copy_from_slice(&0xb5f9_4d82u32.to_le_bytes());
    let m = matrix(Format::Int4(Group::Of(32)), 1, 64, &codes, Some((&[0.1337890625, 0.5], ScaleType::Bf16)));
    let values = m.decode();
    let q = [-6.0, 0.0, 5.0, -4.0, 1.0, 7.0, -3.0, 3.0];
    assert_eq!(values[..8], q.map(|q| q * 0.1337890625));
    assert_eq!(values[..4], [-0.802734375, 0.0, 0.6689453125, -0.53515625]);
    assert_eq!(values[8..32], [0.0; 24]);
    assert_eq!(values[32..40], q.map(|q| q * 0.5));
    let mut across = [0.0; 6];
    m.decode_range(0, 30, &mut across);
    assert_eq!(across, values[30..36]);
    let by_row = matrix(Format::Int4(Group::Row), 2, 4, &[0x82, 0x4d, 0xf9, 0xb5], Some((&[1.0, 2.0], ScaleType::F32)));
    assert_eq!(by_row.decode(), [-6.0, 0.0, 5.0, -4.0, 2.0, 14.0, -6.0, 6.0]);
}

/// Code of a column in a row of nibbles or bytes.
fn code(format: Format, codes: &[u8], i: usize) -> i32 {
    match format {
        Format::Int4Asym(_) | Format::Int4Ordered(_) => (codes[i / 2] >> (4 * (i % 2)) & 15).into(),
        _ => codes[i].into(),
    }
}

#[test]
fn every_scale_has_a_zero_point() {
    let (rows, cols, g) = (10, 8, Group::Of(4));
    for (format, middle) in [
        (Format::Int4Asym(g), 8),
        (Format::Int8Asym(g), 128),
        (Format::Int4Ordered(g), 8),
        (Format::Int8Ordered(g), 128),
    ] {
        // Zero points from 0 to one above the largest code, both included.
        let zero = |n: usize, g: usize| ((2 * n + g) * 2 * middle / 19) as i16;
        let zeros: Vec<i16> = (0..rows).flat_map(|n| [zero(n, 0), zero(n, 1)]).collect();
        assert_eq!((zeros[0], zeros[19]), (0, 2 * middle as i16));
        let codes: Vec<u8> = (0..rows * format.row_bytes(cols).unwrap()).map(|i| (i * 91 % 256) as u8).collect();
        let scales: Vec<f32> = (0..rows * 2).map(|i| (i + 1) as f32 / 8.0).collect();
        let plain = matrix(format, rows, cols, &codes, Some((&scales, ScaleType::Bf16)));
        assert!(!plain.has_zero_points());
        let m = plain.clone().with_zero_points(zeros.clone()).unwrap();
        assert!(m.has_zero_points());
        let want =
            |n: usize, k: usize, zero: i32| (code(format, &codes, n * cols + k) - zero) as f32 * scales[n * 2 + k / 4];
        let (all, symmetric) = (m.decode(), plain.decode());
        for (n, k) in (0..rows).flat_map(|n| (0..cols).map(move |k| (n, k))) {
            assert_eq!(m.zero_point(n, k / 4), zero(n, k / 4) as i32);
            assert_eq!(plain.zero_point(n, k / 4), middle as i32);
            assert_eq!(all[n * cols + k], want(n, k, zero(n, k / 4) as i32), "{format} [{n}, {k}]");
            assert_eq!(symmetric[n * cols + k], want(n, k, middle as i32), "{format} [{n}, {k}]");
        }
        assert_eq!(m.byte_len(), format.stored_bytes(rows, cols));
        for (first, step, count) in [(0, 1, 3), (3, 1, 7), (1, 2, 4), (9, 1, 1)] {
            let some = m.select_rows(first, step, count).unwrap();
            let values = some.decode();
            for row in 0..count {
                let from = first + row * step;
                assert_eq!(some.zero_point(row, 1), zero(from, 1) as i32);
                assert_eq!(
                    values[row * cols..][..cols],
                    all[from * cols..][..cols],
                    "{format} rows {first} + {step} * {row}"
                );
            }
            let last = some.select_rows(count - 1, 1, 1).unwrap();
            assert_eq!(last.zero_point(0, 0), zero(first + (count - 1) * step, 0) as i32);
        }
        assert!(plain.clone().with_zero_points(zeros[1..].to_vec()).unwrap_err().contains("[10, 2], found 19"));
        let mut bad = zeros.clone();
        for (i, z) in [(3, -1), (19, 2 * middle as i16 + 1)] {
            bad[i] = z;
            let message = plain.clone().with_zero_points(bad.clone()).unwrap_err();
            assert!(message.contains(&format!("[{}, 1] is {z}", i / 2)), "{message}");
            bad[i] = 0;
        }
    }
    let int8 = matrix(Format::Int8(Group::Row), 1, 1, &[0], Some((&[1.0], ScaleType::F32)));
    assert_eq!(int8.zero_point(0, 0), 0);
    assert!(int8.with_zero_points(vec![0]).unwrap_err().contains("has no zero points"));
}

#[test]
fn columns_of_ordered_formats_say_which_group_they_are_of() {
    let (rows, cols) = (3, 12);
    let groups = vec![2, 0, 1, 1, 2, 2, 0, 1, 0, 2, 1, 0];
    for format in [Format::Int4Ordered(Group::Of(4)), Format::Int8Ordered(Group::Of(4))] {
        let codes: Vec<u8> = (0..rows * format.row_bytes(cols).unwrap()).map(|i| (i * 53 % 256) as u8).collect();
        let scales: Vec<f32> = (0..rows * 3).map(|i| (i + 1) as f32 / 4.0).collect();
        let zeros: Vec<i16> = (0..rows as i16 * 3).collect();
        let in_order = matrix(format, rows, cols, &codes, Some((&scales, ScaleType::F32)))
            .with_zero_points(zeros.clone())
            .unwrap();
        assert_eq!(in_order.column_groups().unwrap(), [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]);
        let m = in_order.clone().with_column_groups(groups.clone()).unwrap();
        assert_eq!(m.column_groups().unwrap(), groups);
        let value = |n: usize, k: usize, g: u32| {
            let at = n * 3 + g as usize;
            (code(format, &codes, n * cols + k) - zeros[at] as i32) as f32 * scales[at]
        };
        let all = m.decode();
        for (n, k) in (0..rows).flat_map(|n| (0..cols).map(move |k| (n, k))) {
            assert_eq!(all[n * cols + k], value(n, k, groups[k]), "{format} [{n}, {k}]");
            assert_eq!(in_order.decode()[n * cols + k], value(n, k, k as u32 / 4), "{format} [{n}, {k}]");
        }
        let mut across = [0.0; 6];
        m.decode_range(1, 2, &mut across);
        assert_eq!(across, all[cols + 2..cols + 8]);
        assert_eq!(m.select_rows(1, 1, 2).unwrap().decode(), all[cols..]);
        assert!(in_order.clone().with_column_groups(groups[1..].to_vec()).unwrap_err().contains("11 columns"));
        let mut beyond = groups.clone();
        beyond[7] = 3;
        assert!(in_order.with_column_groups(beyond).unwrap_err().contains("column 7 is of group 3"));
        let one = format.to_string().replace("g4", "channel").parse().unwrap();
        let one = matrix(one, rows, cols, &codes, Some((&scales[..3], ScaleType::F32)));
        assert_eq!(one.column_groups().unwrap(), [0; 12]);
        assert_eq!(one.byte_len(), one.format().stored_bytes(rows, cols) - rows as u64 * 2);
    }
    let asym = matrix(Format::Int8Asym(Group::Row), 1, 1, &[0], Some((&[1.0], ScaleType::F32)));
    assert!(asym.column_groups().is_none() && asym.with_column_groups(vec![0]).is_err());
}

#[test]
fn every_format_has_a_name_that_leads_back() {
    let mut names: Vec<String> = ALL.map(|f| f.to_string()).to_vec();
    for (format, name) in ALL.iter().zip(&names) {
        assert_eq!(name.parse::<Format>().unwrap(), *format);
        assert_eq!(name.to_lowercase().replace('-', "_").parse::<Format>().unwrap(), *format);
        assert_eq!(format!("{format:>24}").trim_start(), name);
    }
    assert_eq!(Format::Int8Asym(Group::Of(128)).to_string(), "INT8-asym-g128");
    assert_eq!(Format::Int4Ordered(Group::Row).to_string(), "INT4-ordered-channel");
    names.sort();
    names.dedup();
    assert_eq!(names.len(), ALL.len());
    for wrong in ["int4-g0", "int4-g", "int4-gx", "int4-ordered", "int8-asym-g-1", "int5", "int4-sorted-g32", ""] {
        assert!(wrong.parse::<Format>().unwrap_err().0.contains("int4-ordered"), "{wrong}");
    }
}

#[test]
fn mxfp4_has_its_even_column_in_the_low_nibble() {
    // The worked example: scale byte 125; then every code, with the smallest and the largest scale.
    let mut codes = vec![0x00; 48];
    codes[..4].copy_from_slice(&[0x8d, 0xc5, 0x61, 0x3b]);
    for (i, code) in codes[16..].iter_mut().enumerate() {
        let low = 2 * i as u8 % 16;
        *code = low + (low + 1) * 16;
    }
    let scales = Some((Bytes::from_static(&[125, 0, 252]), ScaleType::E8m0));
    let m = Matrix::new(Format::Mxfp4, 1, 96, codes.into(), scales).unwrap();
    let values = m.decode();
    assert_eq!(values[..8], [-0.75, -0.0, 0.75, -0.5, 0.125, 1.0, -0.375, 0.375]);
    assert!(values[1].is_sign_negative() && values[8..32] == [0.0; 24]);
    let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    for (i, &v) in values[32..].iter().enumerate() {
        let sign = if i % 16 < 8 { 1.0 } else { -1.0 };
        let scale = 2f64.powi(if i < 32 { -127 } else { 125 });
        assert_eq!(v as f64, sign * magnitudes[i % 8] * scale, "column {}", 32 + i);
    }
    let mut across = [0.0; 4];
    m.decode_range(0, 30, &mut across);
    assert_eq!(across, values[30..34]);
}

#[test]
fn nvfp4_has_scales_of_16_columns_and_one_of_all() {
    use kt_core::format::Global;
    let codes: Vec<u8> = [0x8d, 0xc5, 0x61, 0x3b, 0, 0, 0, 0x70].repeat(2);
    let m = matrix(Format::Nvfp4, 1, 32, &codes, Some((&[0.5, 320.0], ScaleType::E4m3)));
    let (e2m1, third) = ([-3.0, -0.0, 3.0, -2.0, 0.5, 4.0, -1.5, 1.5], 1.0 / 3.0f32);
    assert_eq!(m.decode()[..8], e2m1.map(|v| v * 0.5));
    assert_eq!(m.decode()[30..], [0.0, 6.0 * 320.0]);
    let times = m.clone().with_global_scale(Global::Times(third)).decode();
    assert_eq!(times[16..24], e2m1.map(|v| v * (320.0 * third)));
    let over = m.clone().with_global_scale(Global::Over(3.0));
    assert_eq!(over.decode()[16..24], e2m1.map(|v| v * (320.0f32 / 3.0)));
    let mut across = [0.0; 4];
    over.decode_range(0, 14, &mut across);
    assert_eq!(across, over.decode()[14..18]);
    assert!(m.with_global_scale(Global::Over(0.0)).check_scales().unwrap_err().contains("inf"));
    let nan = Some((Bytes::from_static(&[0x38, 0xff]), ScaleType::E4m3));
    let nan = Matrix::new(Format::Nvfp4, 1, 32, codes.into(), nan).unwrap();
    assert!(nan.check_scales().unwrap_err().contains("[0, 1] is NaN"));
}

#[test]
fn mxfp8_has_a_power_of_two_per_32_columns() {
    let codes: Vec<u8> = (0..64).map(|i| [0x38, 0x01, 0xf8, 0x7a][i % 4]).collect();
    let m = matrix(Format::Mxfp8, 1, 64, &codes, Some((&[0.25, 2f32.powi(100)], ScaleType::E8m0)));
    let values = m.decode();
    assert_eq!(values[..4], [0.25, 2f32.powi(-11), -64.0, 80.0]);
    assert_eq!(values[60..], [1.0, 2f32.powi(-9), -256.0, 320.0].map(|v| v * 2f32.powi(100)));
    let mut across = [0.0; 3];
    m.decode_range(0, 31, &mut across);
    assert_eq!(across, values[31..34]);
}

#[test]
fn rows_that_alternate_keep_their_own_scales() {
    let codes: Vec<u8> = (0..6 * 32).map(|i| (i * 37 % 251) as u8).collect();
    let scales: Vec<u8> = (0..12).map(|i| 120 + i as u8).collect();
    let m = Matrix::new(Format::Mxfp4, 6, 64, codes.into(), Some((scales.into(), ScaleType::E8m0))).unwrap();
    let all = m.decode();
    for (first, step, count) in [(0, 2, 3), (1, 2, 3), (2, 3, 2), (3, 1, 2), (5, 7, 1)] {
        let some = m.select_rows(first, step, count).unwrap();
        for row in 0..count {
            let mut got = [0.0; 64];
            some.decode_row(row, &mut got);
            assert_eq!(got, all[(first + row * step) * 64..][..64], "rows {first} + {step} * {row}");
        }
        assert_eq!(some.byte_len(), (count * (32 + 2)) as u64);
        let again = some.select_rows(count - 1, 1, 1).unwrap();
        assert_eq!(again.decode(), all[(first + (count - 1) * step) * 64..][..64]);
    }
    assert!(m.select_rows(1, 2, 4).is_err() && m.select_rows(0, 0, 1).is_err());
    let fp8 = matrix(Format::Fp8Block, 256, 1, &[0; 256], Some((&[1.0, 2.0], ScaleType::F32)));
    assert!(fp8.select_rows(0, 2, 2).unwrap_err().contains("share scales"));
    assert_eq!(fp8.select_rows(128, 1, 128).unwrap().scales().unwrap().get(0, 0), 2.0);
}

#[test]
fn scales_that_are_no_numbers_are_named() {
    let nan = Some((Bytes::from_static(&[127, 127, 127, 255]), ScaleType::E8m0));
    let mx = Matrix::new(Format::Mxfp8, 2, 64, vec![0; 128].into(), nan).unwrap();
    assert!(mx.check_scales().unwrap_err().contains("[1, 1] is NaN"));
    mx.select_rows(0, 1, 1).unwrap().check_scales().unwrap();
    let f32s = Some((Bytes::from_static(&[0; 8]), ScaleType::F32));
    assert!(Matrix::new(Format::Mxfp4, 1, 64, vec![0; 32].into(), f32s).unwrap_err().contains("F32"));
    let powers = Some((Bytes::from_static(&[127]), ScaleType::E8m0));
    assert!(Matrix::new(Format::Int8(Group::Row), 1, 2, vec![0; 2].into(), powers).unwrap_err().contains("E8m0"));
    assert!(Matrix::new(Format::Mxfp4, 1, 48, vec![0; 24].into(), None).unwrap_err().contains("multiples of 32"));
    let m = matrix(Format::Int8(Group::Row), 3, 1, &[1, 1, 1], Some((&[1.0, 1.0, f32::NAN], ScaleType::F32)));
    assert!(m.check_scales().unwrap_err().contains("[2, 0]"));
    let mut rows = from_hex("0030f258be1379df359bf147ac0268ce248a").repeat(4);
    rows[18 * 3..][..2].copy_from_slice(&[0x00, 0xfc]);
    let message = matrix(Format::Q4_0, 2, 64, &rows, None).check_scales().unwrap_err();
    assert!(message.contains("row 1") && message.contains("block 1"), "{message}");
}
