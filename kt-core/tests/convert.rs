//! Conversions: what is written is what the encoders give, whatever the containers; interrupted ones go on to the same bytes.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::gguf::Gguf;
use common::{Dir, Tensor, refused, tensor};
use kt_core::convert::{Container, Conversion, Options, verify};
use kt_core::importance::{Importance, Recorder};
use kt_core::quantize::{encode, recode, relative_error};
use kt_core::source::Stored;
use kt_core::testing::Random;
use kt_core::{Error, Format, Group, LayerSpec, Matrix, Metadata, Progress, Proj, Result, Routing, WeightSource, open};

const REFERENCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/reference");

/// The reference checkpoints.
const SOURCES: [&str; 9] = [
    "qwen3_moe/bf16",
    "qwen3_moe/fp8_block",
    "qwen3_moe/rawint4",
    "qwen3_moe/gguf-Q4_K/qwen3_moe-Q4_K.gguf",
    "qwen3_moe/gguf-Q6_K/qwen3_moe-Q6_K.gguf",
    "qwen3_moe/gguf-Q8_0/qwen3_moe-Q8_0.gguf",
    "deepseek_v3/bf16",
    "deepseek_v3/fp8_block",
    "deepseek_v3/rawint4",
];

const DIRECTORY: [Format; 14] = [
    Format::Bf16,
    Format::Fp8Block,
    Format::Fp8Channel,
    Format::Int4(Group::Of(32)),
    Format::Int4(Group::Of(64)),
    Format::Int4(Group::Of(128)),
    Format::Int4Asym(Group::Of(32)),
    Format::Int4Asym(Group::Of(128)),
    Format::Int8(Group::Row),
    Format::Int8(Group::Of(32)),
    Format::Int8Offset(Group::Of(128)),
    Format::Int8Asym(Group::Of(32)),
    Format::Mxfp4,
    Format::Mxfp8,
];

const GGUF: [Format; 9] = [
    Format::Bf16,
    Format::Q8_0,
    Format::Q4_0,
    Format::Q4_1,
    Format::Q5_0,
    Format::Q4K,
    Format::Q5K,
    Format::Q6K,
    Format::Mxfp4Ggml,
];

fn reference(path: &str) -> Arc<dyn WeightSource> {
    open(Path::new(REFERENCE).join(path)).unwrap()
}

fn convert(source: &Arc<dyn WeightSource>, output: &Path, options: Options) -> Arc<dyn WeightSource> {
    let conversion = Conversion::plan(source.clone(), output, options).unwrap();
    conversion.write(&Progress::default()).unwrap().publish(None).unwrap();
    open(output).unwrap()
}

fn options(output: &Path, format: Format) -> Options {
    Options::new(Container::of(output), format)
}

/// All files of an output by name: of a directory, or a file and its report.
fn files(output: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let dir = if output.is_dir() { output } else { output.parent().unwrap() };
    let all = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    all.map(|p| (p.file_name().unwrap().into(), std::fs::read(&p).unwrap())).collect()
}

/// The format that stands in for one whose blocks are longer than rows.
fn in_place_of(format: Format, cols: usize) -> Format {
    match format {
        _ if format.row_bytes(cols).is_ok() => format,
        Format::Q4K => Format::Q5_0,
        Format::Q5K => Format::Q5_1,
        Format::Q6K => Format::Q8_0,
        _ => panic!("{format} does not take {cols} columns"),
    }
}

/// Every expert of the output is, to the bit, what the encoder makes of the source's.
fn check_experts(source: &dyn WeightSource, output: &dyn WeightSource, format: Format) {
    assert_eq!(source.layers().len(), output.layers().len());
    for (spec, out) in source.layers().iter().zip(output.layers()) {
        assert_eq!((spec.index, spec.experts, spec.top_k), (out.index, out.experts, out.top_k));
        for (expert, proj) in (0..spec.experts).flat_map(|e| Proj::ALL.map(|p| (e, p))) {
            let before = source.matrix(spec.index, expert, proj).unwrap();
            let format = in_place_of(format, before.cols());
            let due = recode(&before, format).unwrap();
            let got = output.matrix(out.index, expert, proj).unwrap();
            // One group a row is read as what it is: a scale per row.
            let whole_row = format.group() == Some(Group::Of(before.cols() as u32));
            assert!(got.format() == format || whole_row, "{proj:?}: {} in place of {format}", got.format());
            assert!(same(&got, &due), "layer {}, expert {expert}, {proj:?} in {format}", spec.index);
        }
    }
}

fn same(a: &Matrix, b: &Matrix) -> bool {
    let bits = |m: &Matrix| m.decode().into_iter().map(f32::to_bits).collect::<Vec<_>>();
    (a.rows(), a.cols()) == (b.rows(), b.cols()) && bits(a) == bits(b)
}

/// Everything else of the output, where the container stays, has the values of the source.
fn check_dense(source: &dyn WeightSource, output: &dyn WeightSource) {
    let weights = |s: &dyn WeightSource| {
        let names = s.tensors().into_iter();
        names.filter(|n| s.tensor(n).is_ok() && !n.contains("scale")).collect::<Vec<_>>()
    };
    assert_eq!(weights(source), weights(output));
    for name in weights(source) {
        assert!(same(&source.tensor(&name).unwrap(), &output.tensor(&name).unwrap()), "{name}");
    }
}

#[test]
fn every_source_becomes_every_format_of_directories() {
    let dir = Dir::new("convert-directories");
    for (i, path) in SOURCES.iter().enumerate() {
        let source = reference(path);
        for (k, format) in DIRECTORY.into_iter().enumerate() {
            let output = dir.0.join(format!("{i}-{k}"));
            let written = convert(&source, &output, options(&output, format));
            check_experts(&*source, &*written, format);
            assert_eq!(source.routing(1), written.routing(1), "{path} to {format}");
            if !path.ends_with(".gguf") {
                check_dense(&*source, &*written);
            }
            verify(&output, &Progress::default()).unwrap();
            std::fs::remove_dir_all(&output).unwrap();
        }
    }
}

#[test]
fn every_source_becomes_every_type_of_gguf() {
    let dir = Dir::new("convert-ggufs");
    for (i, path) in SOURCES.iter().enumerate() {
        let source = reference(path);
        for (k, format) in GGUF.into_iter().enumerate() {
            let output = dir.0.join(format!("{i}-{k}.gguf"));
            let written = convert(&source, &output, options(&output, format));
            check_experts(&*source, &*written, format);
            assert_eq!(source.routing(1), written.routing(1), "{path} to {format}");
            if path.ends_with(".gguf") {
                check_dense(&*source, &*written);
            }
            verify(&output, &Progress::default()).unwrap();
            std::fs::remove_file(&output).unwrap();
        }
    }
}

/// There and back again through GGUF, in formats that lose nothing.
#[test]
fn names_and_numbers_come_back_from_gguf() {
    for path in ["qwen3_moe/bf16", "deepseek_v3/bf16"] {
        let dir = Dir::new(&format!("convert-back-{}", path.len()));
        let (source, file, back) = (reference(path), dir.0.join("m.gguf"), dir.0.join("back"));
        let gguf = convert(&source, &file, options(&file, Format::Bf16));
        let back = convert(&gguf, &back, options(&back, Format::Bf16));
        check_experts(&*source, &*back, Format::Bf16);
        check_dense(&*source, &*back);
        let (Metadata::HuggingFace(before), Metadata::HuggingFace(after)) = (source.metadata(), back.metadata()) else {
            panic!("no configs");
        };
        // What describes the model, and nothing that only transformers knows.
        let free = ["auto_map", "ep_size", "initializer_range", "max_window_layers", "moe_layer_freq"];
        let free = [&free[..], &["output_router_logits", "router_aux_loss_coef", "sliding_window"]].concat();
        let free =
            [&free[..], &["transformers_version", "rope_scaling", "rope_theta", "num_nextn_predict_layers"]].concat();
        for (key, value) in before.as_object().unwrap().iter().filter(|(k, _)| !free.contains(&k.as_str())) {
            assert_eq!(after.get(key), Some(value), "{path}: {key}");
        }
        let number = |c: &serde_json::Value, at: &str| c.pointer(at).and_then(serde_json::Value::as_f64);
        for at in ["/rope_theta", "/rope_scaling/factor", "/rope_scaling/beta_fast", "/rope_scaling/mscale_all_dim"] {
            assert_eq!(number(before, at), number(after, at), "{path}: {at}");
        }
        let json = |s: &dyn WeightSource| -> serde_json::Value {
            serde_json::from_slice(&s.side_file("tokenizer.json").unwrap().unwrap()).unwrap()
        };
        let (before, after) = (json(&*source), json(&*back));
        for at in ["/model/vocab", "/added_tokens", "/normalizer", "/pre_tokenizer"] {
            assert_eq!(before.pointer(at), after.pointer(at), "{path}: {at}");
        }
    }
}

/// Linear layers outside of experts, and both ends, are re-encoded where that is asked for, and nothing else is.
#[test]
fn other_layers_change_when_asked() {
    let dir = Dir::new("convert-dense");
    for path in ["qwen3_moe/bf16", "deepseek_v3/fp8_block", "qwen3_moe/gguf-Q8_0/qwen3_moe-Q8_0.gguf"] {
        let source = reference(path);
        for (name, format) in [("a", Format::Int8(Group::Row)), ("b", Format::Fp8Block), ("c.gguf", Format::Q8_0)] {
            let output = dir.0.join(name);
            let gguf = name.ends_with("gguf");
            let head = gguf.then_some(Format::Q4_0);
            let with = Options { dense: Some(format), head, ..options(&output, format) };
            let written = convert(&source, &output, with);
            check_experts(&*source, &*written, format);
            let kind = |name: &str| written.tensor(name).unwrap().format();
            let (q, norm, end) = match (gguf, path.starts_with("qwen")) {
                (true, true) => ("blk.0.attn_q.weight", "blk.0.attn_norm.weight", "token_embd.weight"),
                (true, false) => ("blk.0.attn_q_b.weight", "blk.0.attn_norm.weight", "token_embd.weight"),
                (false, true) => (
                    "model.layers.0.self_attn.q_proj.weight",
                    "model.layers.0.input_layernorm.weight",
                    "model.embed_tokens.weight",
                ),
                (false, false) => (
                    "model.layers.0.self_attn.q_b_proj.weight",
                    "model.layers.0.input_layernorm.weight",
                    "model.embed_tokens.weight",
                ),
            };
            assert_eq!(kind(q), format, "{path} to {name}");
            assert_eq!(kind(end), if gguf { Format::Q4_0 } else { Format::Bf16 }, "{path} to {name}");
            assert!(matches!(kind(norm), Format::F32 | Format::Bf16), "{path} to {name}");
            match gguf {
                true => std::fs::remove_file(&output).unwrap(),
                false => std::fs::remove_dir_all(&output).unwrap(),
            }
        }
    }
}

#[test]
fn experts_alone_and_kept_formats() {
    let dir = Dir::new("convert-kept");
    for path in SOURCES.iter().filter(|p| !p.ends_with("gguf")) {
        let (source, output) = (reference(path), dir.0.join("kept"));
        let with = Options { experts: None, experts_only: true, ..options(&output, Format::F32) };
        let conversion = Conversion::plan(source.clone(), &output, with).unwrap();
        let report = conversion.write(&Progress::default()).unwrap().publish(None).unwrap();
        assert_eq!(report.experts().rms_ratio, 0.0);
        let written = open(&output).unwrap();
        assert!(written.tensors().is_empty(), "{path}");
        check_experts(&*source, &*written, source.layers()[0].formats[0]);
        std::fs::remove_dir_all(&output).unwrap();
    }
}

/// NVFP4 of random codes and scales, spelled as compressed-tensors or ModelOpt do.
fn nvfp4(base: &str, rows: usize, cols: usize, modelopt: bool, random: &mut Random) -> Vec<Tensor> {
    let [codes, scale, global, input] = match modelopt {
        true => ["weight", "weight_scale", "weight_scale_2", "input_scale"],
        false => ["weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"],
    };
    let mut named = |suffix: &str, kind, shape: &[usize], byte: &mut dyn FnMut(&mut Random) -> u8| {
        let mut t = tensor(format!("{base}.{suffix}"), kind, shape);
        t.bytes.iter_mut().for_each(|b| *b = byte(random));
        t
    };
    let codes = named(codes, "U8", &[rows, cols / 2], &mut |r| r.bits() as u8);
    let scale = named(scale, "F8_E4M3", &[rows, cols / 16], &mut |r| 0x20 + r.below(0x40) as u8);
    let mut all = vec![codes, scale, tensor(format!("{base}.{global}"), "F32", &[1])];
    all[2].bytes = (if modelopt { 0.001_2f32 } else { 877.3 }).to_le_bytes().to_vec();
    all.push(tensor(format!("{base}.{input}"), "F32", &[1]));
    all
}

#[test]
fn nvfp4_is_kept_however_it_is_spelled() {
    let dir = Dir::new("convert-nvfp4");
    for modelopt in [false, true] {
        let random = std::cell::RefCell::new(Random(5));
        let linear = |n: &str, r, c| nvfp4(n, r, c, modelopt, &mut random.borrow_mut());
        let mut tensors = common::model(linear);
        tensors.extend(linear("model.layers.0.self_attn.q_proj", 96, 64));
        let path = dir.0.join(format!("source-{modelopt}"));
        std::fs::create_dir_all(&path).unwrap();
        std::fs::write(path.join("config.json"), common::config().to_string()).unwrap();
        std::fs::write(path.join("model.safetensors"), common::safetensors(&tensors)).unwrap();
        let source = open(&path).unwrap();
        for (i, experts) in [None, Some(Format::Int8(Group::Of(32)))].into_iter().enumerate() {
            let output = dir.0.join(format!("{modelopt}-{i}"));
            let with = Options { experts: experts.map(|f| [f; 3]), ..options(&output, Format::F32) };
            let written = convert(&source, &output, with);
            // A factor becomes a divisor, and the last bit of a product may differ from that of a quotient.
            let near = |a: &Matrix, b: &Matrix| {
                assert_eq!((a.format(), b.format()), (Format::Nvfp4, Format::Nvfp4));
                let (a, b) = (a.decode(), b.decode());
                assert!(a.iter().zip(&b).all(|(a, b)| if modelopt { (a - b).abs() <= 2e-7 * a.abs() } else { a == b }));
            };
            let q = "model.layers.0.self_attn.q_proj.weight";
            near(&source.tensor(q).unwrap(), &written.tensor(q).unwrap());
            match experts {
                Some(format) => check_experts(&*source, &*written, format),
                None => near(&source.matrix(0, 1, Proj::Up).unwrap(), &written.matrix(0, 1, Proj::Up).unwrap()),
            }
            let config = std::fs::read_to_string(output.join("config.json")).unwrap();
            assert!(config.contains("nvfp4-pack-quantized"), "{config}");
            assert!(!written.tensors().iter().any(|n| n.contains("input")), "{:?}", written.tensors());
            verify(&output, &Progress::default()).unwrap();
        }
    }
    // To make it takes a whole matrix at once.
    let output = dir.0.join("made");
    let made = Conversion::plan(reference("qwen3_moe/bf16"), &output, options(&output, Format::Nvfp4));
    refused(made.map(|_| ()), &["NVFP4", "choose another format"]);
}

/// A source whose matrices cannot be read any more after some of them.
struct Failing {
    source: Arc<dyn WeightSource>,
    left: AtomicUsize,
}

impl WeightSource for Failing {
    fn path(&self) -> &Path {
        self.source.path()
    }

    fn fingerprint(&self) -> Option<u128> {
        self.source.fingerprint()
    }

    fn layers(&self) -> &[LayerSpec] {
        self.source.layers()
    }

    fn matrix(&self, layer: usize, expert: usize, proj: Proj) -> Result<Matrix> {
        match self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)) {
            Ok(_) => self.source.matrix(layer, expert, proj),
            Err(_) => Err(Error::file(self.path(), "the disk is gone")),
        }
    }

    fn tensor_name(&self, layer: usize, expert: usize, proj: Proj) -> (PathBuf, String) {
        self.source.tensor_name(layer, expert, proj)
    }

    fn metadata(&self) -> &Metadata {
        self.source.metadata()
    }

    fn routing(&self, layer: usize) -> Option<Routing> {
        self.source.routing(layer)
    }

    fn tensors(&self) -> Vec<String> {
        self.source.tensors()
    }

    fn tensor(&self, name: &str) -> Result<Matrix> {
        self.source.tensor(name)
    }

    fn dense_bytes(&self) -> u64 {
        self.source.dense_bytes()
    }

    fn stored(&self, name: &str) -> Option<Stored> {
        self.source.stored(name)
    }

    fn side_file(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.source.side_file(name)
    }
}

/// Ended over and over, on one thread and with little memory: the bytes are those of one run.
#[test]
fn interrupted_conversions_end_in_the_same_bytes() {
    for (name, source, format) in [
        ("out", "deepseek_v3/fp8_block", Format::Int4Asym(Group::Of(32))),
        ("out.gguf", "deepseek_v3/bf16", Format::Q4K),
    ] {
        let (source, whole) = (reference(source), Dir::new(&format!("convert-whole-{name}")));
        let with = |output: &Path| Options { shard_bytes: 300_000, ..options(output, format) };
        let output = whole.0.join(name);
        convert(&source, &output, with(&output));
        let due = files(&output);
        let cut = Dir::new(&format!("convert-cut-{name}"));
        let output = cut.0.join(name);
        let journal = cut.0.join(format!("{name}.journal"));
        let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let (mut rounds, mut lines) = (0, 0);
        loop {
            let failing = Arc::new(Failing { source: source.clone(), left: AtomicUsize::new(usize::MAX) });
            let little = Options { memory: (1 << 20) + rounds, ..with(&output) };
            let conversion = Conversion::plan(failing.clone(), &output, little).unwrap();
            failing.left.store(7, Ordering::Relaxed);
            match one.install(|| conversion.write(&Progress::default())) {
                Ok(finished) => {
                    finished.publish(None).unwrap();
                    break;
                }
                Err(e) => assert!(e.to_string().contains("the disk is gone"), "{e}"),
            }
            assert!(!output.exists());
            let mut text = std::fs::read(&journal).unwrap();
            let now = text.iter().filter(|&&b| b == b'\n').count();
            assert!(now > lines, "round {rounds} got no further than {lines} lines");
            lines = now;
            match rounds {
                // What a crash may leave: a torn line, and bytes that nobody vouches for.
                2 => {
                    text.extend(br#"{"file": 0, "it"#);
                    std::fs::write(&journal, text).unwrap();
                }
                // What the journal promised is gone.
                4 => {
                    let dir = cut.0.join(format!("{name}.partial"));
                    let partial = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
                    let partial = partial.filter(|p| p.extension().is_some_and(|e| e == "partial")).last().unwrap();
                    let file = std::fs::OpenOptions::new().write(true).open(partial).unwrap();
                    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
                    lines = 0;
                }
                _ => {}
            }
            rounds += 1;
        }
        assert!(rounds > 5, "{rounds}");
        let got = files(&output);
        assert_eq!(got.keys().collect::<Vec<_>>(), due.keys().collect::<Vec<_>>());
        assert!(got == due, "the files of {name} differ");
        // Nothing is left beside.
        assert_eq!(std::fs::read_dir(&cut.0).unwrap().count(), if name == "out" { 1 } else { 2 });
    }
}

/// A copy of a checkpoint with its config changed.
fn copied(from: &str, to: &Path, change: impl Fn(&mut serde_json::Value)) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(Path::new(REFERENCE).join(from)).unwrap() {
        let entry = entry.unwrap();
        if entry.path().is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
    let mut config = serde_json::from_slice(&std::fs::read(to.join("config.json")).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(to.join("config.json"), config.to_string()).unwrap();
}

/// Begins a conversion that ends in the middle.
fn interrupted(source: &Arc<dyn WeightSource>, output: &Path, with: Options) {
    let failing = Arc::new(Failing { source: source.clone(), left: AtomicUsize::new(usize::MAX) });
    let conversion = Conversion::plan(failing.clone(), output, with).unwrap();
    failing.left.store(20, Ordering::Relaxed);
    let error = conversion.write(&Progress::default()).map(drop).unwrap_err();
    assert!(error.to_string().contains("the disk is gone"), "{error}");
}

#[test]
fn an_output_may_be_in_the_directory_of_its_source() {
    let dir = Dir::new("convert-inside");
    copied("deepseek_v3/bf16", &dir.0, |_| ());
    let (source, output) = (open(&dir.0).unwrap(), dir.0.join("q4.gguf"));
    let little = || Options { memory: 1 << 20, ..options(&output, Format::Q4_0) };
    interrupted(&source, &output, little());
    std::fs::write(dir.0.join("notes.md"), "of somebody").unwrap();
    convert(&source, &output, little());
}

#[test]
fn a_source_of_several_files_is_known_by_all_of_them() {
    let dir = Dir::new("convert-parts");
    let number = |n: u16| n.to_le_bytes().to_vec();
    let part = |g: Gguf, i: u16| g.pair("split.count", 2, number(2)).pair("split.no", 2, number(i));
    let mut ends = Gguf::model();
    ends.tensors.clear();
    ends.data.clear();
    ends.tensor("blk.0.attn_norm.weight", &[32], 0, 128);
    let mut experts = Gguf { version: 3, pairs: vec![], tensors: vec![], data: vec![], counts: [None; 2] };
    for proj in Proj::ALL {
        let [rows, cols] = common::gguf::shape(proj);
        let name = format!("blk.0.ffn_{}_exps.weight", proj.name());
        experts.tensor(&name, &[cols as u64, rows as u64, 2], 8, 2 * rows * cols / 32 * 34);
    }
    let second = "m-00002-of-00002.gguf";
    let first = dir.write("m-00001-of-00002.gguf", part(ends, 0).bytes());
    let mut bytes = part(experts, 1).bytes();
    dir.write(second, bytes.clone());
    let output = dir.0.join("o.gguf");
    let plan = || Conversion::plan(open(&first).unwrap(), &output, options(&output, Format::Q4_0)).unwrap();
    drop(plan().write(&Progress::default()).unwrap());
    // Written, not published; and the second part was downloaded again.
    let end = bytes.len();
    bytes[end - 4000..].fill(0x11);
    bytes.extend([0; 32]);
    dir.write(second, bytes);
    refused(plan().write(&Progress::default()).map(drop), &["o.gguf.journal", "another source"]);
}

#[test]
fn all_that_a_gguf_file_has_is_carried() {
    let dir = Dir::new("convert-scales");
    let mut g = Gguf::model();
    g.tensor("blk.0.attn_q.weight", &[32, 32], 8, 34 * 32);
    g.put("blk.0.attn_q.scale", &[1], 0, &2f32.to_le_bytes());
    let source = open(dir.write("m.gguf", g.bytes())).unwrap();
    let output = dir.0.join("o.gguf");
    let got = convert(&source, &output, options(&output, Format::Q4_0));
    assert_eq!(got.tensors(), source.tensors());
    assert_eq!(got.tensor("blk.0.attn_q.scale").unwrap().decode(), [2.0]);
    // Experts, and nothing whose name says that it is of a GGUF file.
    let mut g = Gguf::model();
    g.tensors.retain(|t| t.0.contains("_exps") || !t.0.starts_with("blk."));
    let source = open(dir.write("ends.gguf", g.bytes())).unwrap();
    let output = dir.0.join("ends-q4.gguf");
    assert_eq!(convert(&source, &output, options(&output, Format::Q4_0)).tensors(), source.tensors());
}

#[test]
fn how_a_source_was_quantized_is_not_said_of_the_output() {
    let dir = Dir::new("convert-sides");
    let (from, output) = (dir.0.join("from"), dir.0.join("to"));
    copied("qwen3_moe/bf16", &from, |_| ());
    for name in ["hf_quant_config.json", "quantize_config.json", "quant_config.json", "chat_template.jinja"] {
        std::fs::write(from.join(name), "{}").unwrap();
    }
    convert(&open(&from).unwrap(), &output, options(&output, Format::Bf16));
    let names = files(&output).into_keys().map(|name| name.display().to_string()).collect::<Vec<_>>();
    assert!(names.contains(&"chat_template.jinja".into()) && !names.iter().any(|n| n.contains("quant")), "{names:?}");
}

#[test]
fn numbers_of_configs_that_cannot_be_are_refused() {
    let dir = Dir::new("convert-configs");
    let plan = |from: &str, key: &str, value: u64, experts_only: bool| {
        let to = dir.0.join(format!("{key}-{value}"));
        copied(from, &to, |config| config[key] = value.into());
        let tokenizer = r#"{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}"#;
        std::fs::write(to.join("tokenizer.json"), tokenizer).unwrap();
        let source = open(&to)?;
        let with = Options { experts_only, ..Options::new(Container::Gguf, Format::Q8_0) };
        Conversion::plan(source, &dir.0.join("o.gguf"), with)
    };
    let nope = plan("deepseek_v3/bf16", "qk_nope_head_dim", u64::MAX, false);
    refused(nope.map(drop), &["kv_b_proj", "heads of 18446744073709551615"]);
    for key in ["kv_lora_rank", "qk_rope_head_dim"] {
        let large = plan("deepseek_v3/bf16", key, u32::MAX.into(), false);
        refused(large.map(drop), &["config.json", key, "too large"]);
    }
    refused(plan("qwen3_moe/bf16", "num_hidden_layers", 1 << 24, true).map(drop), &["num_hidden_layers", "16777216"]);
    let plan = plan("qwen3_moe/bf16", "vocab_size", 1 << 60, true).unwrap();
    assert!(plan.notes().iter().any(|n| n.contains("larger than any")), "{:?}", plan.notes());
}

#[test]
fn damaged_files_are_found() {
    let dir = Dir::new("convert-damaged");
    let source = reference("qwen3_moe/bf16");
    let (directory, file) = (dir.0.join("d"), dir.0.join("m.gguf"));
    convert(&source, &directory, Options { shard_bytes: 1 << 20, ..options(&directory, Format::Int4(Group::Of(32))) });
    convert(&source, &file, options(&file, Format::Q8_0));
    let mut shards: Vec<PathBuf> = files(&directory).into_keys().map(|name| directory.join(name)).collect();
    shards.retain(|p| p.extension().is_some_and(|e| e == "safetensors"));
    assert!(shards.len() > 2);
    let shard = shards.swap_remove(1);
    for (output, damaged) in [(&directory, &shard), (&file, &file)] {
        verify(output, &Progress::default()).unwrap();
        let good = std::fs::read(damaged).unwrap();
        let mut bad = good.clone();
        let middle = bad.len() / 2;
        bad[middle] ^= 1;
        std::fs::write(damaged, &bad).unwrap();
        let name = damaged.file_name().unwrap().to_str().unwrap();
        refused(verify(output, &Progress::default()), &[name, "checksum", "1 of"]);
        std::fs::write(damaged, &good[..middle]).unwrap();
        refused(verify(output, &Progress::default()), &[name, "bytes in place of"]);
        std::fs::remove_file(damaged).unwrap();
        refused(verify(output, &Progress::default()), &[name, "cannot be read"]);
    }
    refused(verify(&Path::new(REFERENCE).join("qwen3_moe/bf16"), &Progress::default()), &["no checksums"]);
    refused(verify(&dir.0.join("absent"), &Progress::default()), &["absent", "No such file"]);
    refused(verify(&dir.0.join("absent.gguf"), &Progress::default()), &["absent.gguf", "No such file"]);
    // The checksum is in the GGUF file, too, and counts as well.
    convert(&source, &dir.0.join("alone.gguf"), options(&file, Format::Q8_0));
    let alone = dir.0.join("alone.gguf");
    std::fs::remove_file(dir.0.join("alone.gguf.json")).unwrap();
    verify(&alone, &Progress::default()).unwrap();
    let mut bad = std::fs::read(&alone).unwrap();
    *bad.last_mut().unwrap() ^= 1;
    std::fs::write(&alone, &bad).unwrap();
    refused(verify(&alone, &Progress::default()), &["alone.gguf", "checksum"]);
    // Beside the good file that it was a copy of; and the good one with another name.
    let (good, copy, moved) = (dir.0.join("good.gguf"), dir.0.join("copy.gguf"), dir.0.join("moved.gguf"));
    convert(&source, &good, options(&good, Format::Q8_0));
    let mut bad = std::fs::read(&good).unwrap();
    *bad.last_mut().unwrap() ^= 1;
    std::fs::write(&copy, &bad).unwrap();
    refused(verify(&copy, &Progress::default()), &["copy.gguf", "checksum"]);
    for suffix in ["", ".json"] {
        let name = |path: &Path| PathBuf::from(format!("{}{suffix}", path.display()));
        std::fs::rename(name(&good), name(&moved)).unwrap();
    }
    verify(&moved, &Progress::default()).unwrap();
}

#[test]
fn what_cannot_be_is_refused() {
    let dir = Dir::new("convert-refused");
    let source = reference("qwen3_moe/bf16");
    let plan = |name: &str, with: Options| Conversion::plan(source.clone(), &dir.0.join(name), with).map(|_| ());
    let directory = |format| Options::new(Container::Safetensors, format);
    let gguf = |format| Options::new(Container::Gguf, format);
    refused(plan("a", directory(Format::Q4K)), &["Q4_K", "directory of safetensors"]);
    refused(plan("a.gguf", gguf(Format::Int4(Group::Of(32)))), &["INT4-g32", "GGUF"]);
    refused(plan("a", directory(Format::Int4Ordered(Group::Of(32)))), &["INT4-ordered"]);
    refused(plan("a", directory(Format::Int4(Group::Of(96)))), &["multiples of 96"]);
    refused(plan("a", Options { memory: 1000, ..directory(Format::Bf16) }), &["1 MiB"]);
    refused(plan("a", Options { dense: Some(Format::Q8_0), ..directory(Format::Bf16) }), &["Q8_0", "_proj"]);
    // Somebody else's output, and somebody else's half of one.
    let output = dir.0.join("there");
    convert(&source, &output, directory(Format::Bf16));
    let again = Conversion::plan(source.clone(), &output, directory(Format::Bf16)).unwrap();
    refused(again.is_published(), &["is there already"]);
    // What took the name meanwhile is not what is done beside it, which stays.
    let output = dir.0.join("taken");
    let taken = Conversion::plan(source.clone(), &output, directory(Format::Bf16)).unwrap();
    drop(taken.write(&Progress::default()).unwrap());
    std::fs::create_dir(&output).unwrap();
    std::fs::write(output.join("README"), "of somebody").unwrap();
    refused(taken.is_published(), &["taken", "is there already"]);
    std::fs::remove_dir_all(&output).unwrap();
    taken.write(&Progress::default()).unwrap().publish(None).unwrap();
    // A path that ends in a separator names the same output.
    let again = Conversion::plan(source.clone(), &dir.0.join("taken/"), directory(Format::Bf16)).unwrap();
    refused(again.is_published(), &["is there already"]);
    // A file does not take the place of a directory.
    let output = dir.0.join("directory.gguf");
    std::fs::create_dir(&output).unwrap();
    let file = Conversion::plan(source.clone(), &output, gguf(Format::Q8_0)).unwrap();
    refused(file.write(&Progress::default()).map(drop), &["directory.gguf", "is there already"]);
    let output = dir.0.join("slash/");
    std::fs::create_dir(&output).unwrap();
    convert(&source, &output, directory(Format::Bf16));
    assert!(!output.join(".partial").exists());
    let output = dir.0.join("half");
    let progress = Progress::default();
    progress.cancel();
    let half = Conversion::plan(source.clone(), &output, directory(Format::Bf16)).unwrap();
    assert!(half.write(&progress).is_err());
    let other = Conversion::plan(source.clone(), &output, directory(Format::Mxfp4)).unwrap();
    refused(other.write(&Progress::default()).map(|_| ()), &["half.journal", "other options"]);
}

#[test]
fn rejected_results_are_no_checkpoints() {
    let dir = Dir::new("convert-rejected");
    let (source, output) = (reference("qwen3_moe/bf16"), dir.0.join("out"));
    let plan = || Conversion::plan(source.clone(), &output, options(&output, Format::Int4(Group::Of(128)))).unwrap();
    let conversion = plan();
    let finished = conversion.write(&Progress::default()).unwrap();
    let worst = finished.report().worst(1)[0].clone();
    assert!(worst.errors.rms_ratio > 0.05, "{worst:?}");
    open(finished.path()).unwrap();
    let partial = finished.path();
    let report = finished.reject(None).unwrap();
    assert!(report.is_file() && !output.exists());
    assert!(open(&partial).is_err());
    drop(conversion);
    // Whoever accepts it after all has it at once.
    plan().write(&Progress::default()).unwrap().publish(None).unwrap();
    open(&output).unwrap();
}

/// The report's errors are those of the values.
#[test]
fn reports_tell_the_errors() {
    let dir = Dir::new("convert-report");
    let (source, output) = (reference("qwen3_moe/bf16"), dir.0.join("out"));
    let conversion = Conversion::plan(source.clone(), &output, options(&output, Format::Mxfp4)).unwrap();
    let report = conversion.write(&Progress::default()).unwrap().publish(None).unwrap();
    let experts = source.layers().iter().map(|l| l.experts * 3).sum::<usize>();
    assert_eq!(report.tensors.len(), experts);
    for t in report.worst(3) {
        let name = t.name.strip_prefix("model.layers.").unwrap();
        let parts: Vec<&str> = name.split('.').collect();
        let proj = Proj::ALL[["gate_proj", "up_proj", "down_proj"].iter().position(|p| *p == parts[4]).unwrap()];
        let before = source.matrix(parts[0].parse().unwrap(), parts[3].parse().unwrap(), proj).unwrap();
        let after = encode(Format::Mxfp4, before.rows(), before.cols(), &before.decode()).unwrap();
        let due = relative_error(&before.decode(), &after.decode());
        assert!((t.errors.rms_ratio / due.rms_ratio - 1.0).abs() < 1e-5, "{t:?}, {due:?}");
        assert!((t.errors.mean_abs_ratio / due.mean_abs_ratio - 1.0).abs() < 1e-5, "{t:?}, {due:?}");
    }
    let json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(output.join("kt-convert.json")).unwrap()).unwrap();
    assert_eq!(json["worst"].as_array().unwrap().len(), 10);
    assert_eq!(json["worst"][0]["name"], report.worst(1)[0].name);
}

/// What GGUF metadata say of a conversion is its report's summary; another conversion has its own.
#[test]
fn gguf_files_hold_their_summary() {
    let dir = Dir::new("convert-summary");
    let (source, first, second) = (reference("qwen3_moe/bf16"), dir.0.join("a.gguf"), dir.0.join("b.gguf"));
    for (from, to, format) in [(None, &first, Format::Q8_0), (Some(&first), &second, Format::Q4_0)] {
        let from = from.map_or(source.clone(), |path| open(path).unwrap());
        let written = convert(&from, to, options(to, format));
        let Metadata::Gguf(map) = written.metadata() else { panic!("no metadata") };
        let inside: serde_json::Value = serde_json::from_str(map["kt.convert"].as_str().unwrap()).unwrap();
        let beside = std::fs::read(to.with_extension("gguf.json")).unwrap();
        let beside: serde_json::Value = serde_json::from_slice(&beside).unwrap();
        for key in ["version", "files"] {
            assert_eq!(inside[key], beside[key]);
        }
        let error = |json: &serde_json::Value| json["error"]["experts_rms"].as_f64().unwrap();
        assert!(error(&inside) > 0.0 && (error(&inside) / error(&beside) - 1.0).abs() < 1e-9);
    }
}

/// Inputs of layer `layer` for `tokens` tokens, some columns much larger than others, and two experts for each.
fn batch(spec: &LayerSpec, tokens: usize) -> (Vec<f32>, Vec<i32>) {
    let mut random = kt_core::testing::Random(3 + spec.index as u64);
    let sizes: Vec<f32> = (0..spec.hidden).map(|_| random.normal().powi(4)).collect();
    let x = (0..tokens * spec.hidden).map(|i| random.normal() * sizes[i % spec.hidden]).collect();
    let pair = |t: usize| [t % 3, 3 + t % 2].map(|e| e as i32);
    (x, (0..tokens).flat_map(pair).collect())
}

/// Statistics of two batches of each layer, saved.
fn recorded(source: &Arc<dyn WeightSource>, file: &Path) {
    let recorder = Recorder::new(source.clone());
    for spec in source.layers() {
        let (x, ids) = batch(spec, 20);
        let half = 11 * spec.hidden;
        recorder.record(spec.index, &x[..half], &ids[..22]).unwrap();
        recorder.record(spec.index, &x[half..], &ids[22..]).unwrap();
    }
    recorder.save(file).unwrap();
}

#[test]
fn recorded_importance_is_that_of_the_inputs() {
    let dir = Dir::new("importance-recorded");
    let (source, file) = (reference("qwen3_moe/bf16"), dir.0.join("seen"));
    recorded(&source, &file);
    let importance = Importance::open(&file).unwrap();
    for spec in source.layers() {
        let (x, ids) = batch(spec, 20);
        for expert in 0..spec.experts {
            let rows: Vec<&[f32]> = x
                .chunks_exact(spec.hidden)
                .zip(ids.chunks_exact(2))
                .filter(|(_, ids)| ids.contains(&(expert as i32)))
                .map(|(row, _)| row)
                .collect();
            let of = |proj| importance.of(spec.index, expert, proj);
            assert_eq!(rows.is_empty(), of(Proj::Up).is_none(), "expert {expert}");
            assert_eq!(of(Proj::Gate), of(Proj::Up));
            let (Some(input), Some(intermediate)) = (of(Proj::Up), of(Proj::Down)) else { continue };
            let [gate, up] = [Proj::Gate, Proj::Up].map(|p| source.matrix(spec.index, expert, p).unwrap().decode());
            let close = |got: f32, due: f64| (got as f64 - due).abs() <= 1e-4 * due + 1e-12;
            for k in 0..spec.hidden {
                let due = rows.iter().map(|r| (r[k] as f64).powi(2)).sum::<f64>() / rows.len() as f64;
                assert!(close(input[k], due), "input {k}: {} in place of {due}", input[k]);
            }
            for i in 0..spec.intermediate {
                let dot = |m: &[f32], row: &[f32]| -> f64 {
                    m[i * spec.hidden..][..spec.hidden].iter().zip(row).map(|(w, x)| *w as f64 * *x as f64).sum()
                };
                let active = |row: &&[f32]| {
                    let g = dot(&gate, row);
                    g / (1.0 + (-g).exp()) * dot(&up, row)
                };
                let due = rows.iter().map(|r| active(r).powi(2)).sum::<f64>() / rows.len() as f64;
                assert!(close(intermediate[i], due), "intermediate {i}: {} in place of {due}", intermediate[i]);
            }
        }
    }
    let recorder = Recorder::new(source.clone());
    refused(recorder.save(&file), &["no expert was used"]);
    refused(recorder.record(0, &[0.0; 7], &[1]), &["layer 0", "7 inputs"]);
    refused(recorder.record(77, &[0.0; 256], &[1]), &["layer 77"]);
}

#[test]
fn importance_weighs_the_error_of_conversions() {
    let dir = Dir::new("importance-weighs");
    let (source, file) = (reference("qwen3_moe/bf16"), dir.0.join("seen"));
    recorded(&source, &file);
    let importance = Arc::new(Importance::open(&file).unwrap());
    for (name, format) in [("int4", Format::Int4(Group::Of(32))), ("q4_k.gguf", Format::Q4K)] {
        let (plain, weighted) = (dir.0.join(format!("plain-{name}")), dir.0.join(format!("weighted-{name}")));
        let with = Options { importance: Some(importance.clone()), ..options(&weighted, format) };
        let conversion = Conversion::plan(source.clone(), &weighted, with.clone()).unwrap();
        assert!(conversion.notes().iter().any(|n| n.starts_with("6 of 16 experts have no importance")));
        let (plain, weighted) = (convert(&source, &plain, options(&plain, format)), convert(&source, &weighted, with));
        for spec in source.layers() {
            for (expert, proj) in (0..spec.experts).flat_map(|e| Proj::ALL.map(|p| (e, p))) {
                let [before, plain, weighted] =
                    [&source, &plain, &weighted].map(|s| s.matrix(spec.index, expert, proj).unwrap().decode());
                let Some(counts) = importance.of(spec.index, expert, proj) else {
                    assert_eq!(plain, weighted, "an expert that was not seen");
                    continue;
                };
                let error = |after: &[f32]| -> f64 {
                    let all = before.iter().zip(after).enumerate();
                    all.map(|(i, (b, a))| counts[i % counts.len()] as f64 * (*b as f64 - *a as f64).powi(2)).sum()
                };
                let (plain, weighted) = (error(&plain), error(&weighted));
                assert!(weighted < 0.97 * plain, "{format}, expert {expert}, {proj:?}: {weighted} against {plain}");
            }
        }
    }
    // Half of a conversion is not finished with other statistics.
    let output = dir.0.join("half");
    let with = Options { importance: Some(importance), ..options(&output, Format::Mxfp4) };
    let progress = Progress::default();
    progress.cancel();
    let half = Conversion::plan(source.clone(), &output, with).unwrap();
    assert!(half.write(&progress).is_err());
    let other = Conversion::plan(source.clone(), &output, options(&output, Format::Mxfp4)).unwrap();
    refused(other.write(&Progress::default()).map(|_| ()), &["other options"]);
}

#[test]
fn importance_of_other_models_and_other_files_is_refused() {
    let dir = Dir::new("importance-refused");
    let (source, file) = (reference("qwen3_moe/bf16"), dir.0.join("seen"));
    recorded(&source, &file);
    let importance = Arc::new(Importance::open(&file).unwrap());
    let plan = |path: &str| {
        let output = dir.0.join("out");
        let with = Options { importance: Some(importance.clone()), ..options(&output, Format::Mxfp4) };
        Conversion::plan(reference(path), &output, with).map(|_| ())
    };
    refused(plan("deepseek_v3/bf16"), &["layer 0, expert 0", "another model"]);
    let other = Arc::new(
        kt_core::source::synthetic::SyntheticSource::builder().hidden(128).intermediate(64).experts(8).build().unwrap(),
    );
    refused(importance.check(other.layers()), &["layer 0, expert 0", "input has 256 numbers", "128 columns"]);
    refused(Importance::open(dir.write("text", "nothing of that kind")), &["not a file of importance"]);
    let model = Path::new(REFERENCE).join("qwen3_moe/bf16");
    let mut weights = std::fs::read_dir(model).unwrap().map(|e| e.unwrap().path());
    let weights = weights.find(|p| p.extension().is_some_and(|e| e == "safetensors")).unwrap();
    refused(Importance::open(weights), &["not a file of importance"]);
    refused(Importance::open(Path::new(REFERENCE).join(SOURCES[3])), &["no statistics of experts"]);
}

/// A file of llama.cpp's `llama-imatrix`: sums of squares, and what they are divided by.
#[test]
fn importance_of_llama_cpp_is_read() {
    let dir = Dir::new("importance-imatrix");
    let mut g = Gguf::of("imatrix");
    let put = |g: &mut Gguf, name: &str, shape: [u64; 2], numbers: &[f32]| {
        g.put(name, &shape, 0, &numbers.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
    };
    put(&mut g, "blk.0.ffn_up_exps.weight.in_sum2", [3, 2], &[2.0, 4.0, 6.0, 1.0, 1.0, 1.0]);
    put(&mut g, "blk.0.ffn_up_exps.weight.counts", [1, 2], &[2.0, 0.0]);
    put(&mut g, "blk.0.ffn_down_exps.weight.in_sum2", [2, 2], &[8.0, 4.0, 1.0, 1.0]);
    put(&mut g, "blk.0.ffn_down_exps.weight.counts", [1, 2], &[4.0, 0.0]);
    put(&mut g, "blk.0.attn_q.weight.in_sum2", [3, 1], &[1.0; 3]);
    let importance = Importance::open(dir.write("imatrix.gguf", g.bytes())).unwrap();
    assert_eq!(importance.of(0, 0, Proj::Gate), Some(&[1.0, 2.0, 3.0][..]));
    assert_eq!(importance.of(0, 0, Proj::Down), Some(&[2.0, 1.0][..]));
    assert_eq!(importance.of(0, 1, Proj::Up), None);
    g.tensors.retain(|t| t.0 != "blk.0.ffn_down_exps.weight.counts");
    refused(Importance::open(dir.write("imatrix.gguf", g.bytes())), &["blk.0.ffn_down_exps.weight.counts", "missing"]);
}
