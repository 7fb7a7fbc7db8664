//! Which tensors the output has, in which files, and what each is made of: all known from headers, before a weight is read.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};

use super::config::{self, Layers, Seen};
use super::dense::{self, Role, Spelling};
use super::family::{self, Whole};
use super::layout::{self, ALIGNMENT, Entry, Naming};
use super::values::Pairs;
use super::{Container, Options, tokenizer};
use crate::error::{Error, Result};
use crate::format::{Format, Matrix, ScaleType};
use crate::layer::{LayerSpec, Proj};
use crate::quantize::scale_type;
use crate::source::gguf::Kind;
use crate::source::metadata::Value as Meta;
use crate::source::model::text;
use crate::source::names::{self, ExpertNames, Family};
use crate::source::parts;
use crate::source::safetensors::linear::COMPANIONS;
use crate::source::{Metadata, WeightSource};

/// Where the numbers of an item come from.
#[derive(Debug, Clone, PartialEq)]
pub enum What {
    /// A projection of an expert.
    Expert(usize, usize, Proj),
    /// Its bias.
    Bias(usize, usize, Proj),
    /// Gate and up of an expert, their rows in turn.
    Both(usize, usize),
    /// Their biases, in turn.
    BothBiases(usize, usize),
    /// Another tensor, with its scales.
    Tensor(String),
    /// A tensor's bytes as they are.
    Bytes(String),
    /// Another tensor whose rows, of each head, come in another order: of two halves one behind the other (as directories have them),
    /// or in turn.
    Heads { from: String, heads: usize, in_turn: bool },
    /// Out of a matrix `[heads * (nope + value), narrow]`: the keys' rows of each head, transposed.
    Keys { from: String, nope: usize, value: usize },
    /// The values' rows of each head of the same.
    Values { from: String, nope: usize, value: usize },
    /// Such a matrix out of these two.
    KeysAndValues { keys: String, values: String, heads: usize },
}

/// What of a matrix is in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Laid {
    /// Its codes, row after row; in GGUF, scales are among them.
    Codes,
    /// Its codes, and behind them its scales and the like.
    CodesAndSides,
    /// Its scales alone.
    Scales,
    /// Its numbers, inputs first.
    InputsFirst,
}

/// A piece of a file that is made at once.
#[derive(Debug, Clone)]
pub struct Item {
    pub what: What,
    /// What it was stored as.
    pub from: Format,
    /// What it is stored as. [`What::Bytes`] are said to be rows of one byte.
    pub format: Format,
    pub rows: usize,
    pub cols: usize,
    pub scales: ScaleType,
    pub laid: Laid,
    /// Bytes in the file.
    pub bytes: u64,
    /// Its name in reports.
    pub name: String,
}

/// Tensors that are written together: several of one item, or one of several items.
#[derive(Debug, Clone)]
pub struct Group {
    pub entries: Vec<Entry>,
    pub items: Vec<Item>,
}

impl Group {
    fn bytes(&self) -> u64 {
        self.items.iter().map(|i| i.bytes).sum()
    }
}

/// A file with weights.
#[derive(Debug, Clone)]
pub struct File {
    pub name: String,
    pub header: Vec<u8>,
    pub items: Vec<Item>,
    /// Bytes of zeros behind each item.
    pub padding: Vec<u64>,
    /// Names of its tensors.
    pub tensors: Vec<String>,
    /// Where the header has spaces that a summary of the report takes the place of.
    pub summary: Option<u64>,
}

impl File {
    pub fn bytes(&self) -> u64 {
        self.header.len() as u64 + self.items.iter().zip(&self.padding).map(|(i, p)| i.bytes + p).sum::<u64>()
    }
}

/// All that is written.
pub struct Output {
    pub files: Vec<File>,
    /// Small files, written last: name and content.
    pub sides: Vec<(String, Vec<u8>)>,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// Plans the conversion; `name` is the output's last component.
pub fn plan(source: &dyn WeightSource, name: &str, options: &Options) -> Result<Output> {
    Planner::new(source, options)?.plan(name)
}

/// A tensor that is not a routed expert.
struct Dense {
    /// As the source spells it, and as the output does.
    from: String,
    to: String,
    /// `None` where it is no matrix of numbers that can be read: copied.
    matrix: Option<Matrix>,
    shape: Vec<usize>,
    role: Role,
    /// Heads whose rows come in another order in the output.
    heads: Option<usize>,
}

impl Dense {
    /// What it is made of; `gguf` where the output is a GGUF file.
    fn what(&self, gguf: bool) -> What {
        match self.heads {
            Some(heads) => What::Heads { from: self.from.clone(), heads, in_turn: gguf },
            None => What::Tensor(self.from.clone()),
        }
    }
}

struct Planner<'a> {
    source: &'a dyn WeightSource,
    options: &'a Options,
    family: &'static Family,
    /// The row of families that can be carried whole.
    whole: Option<&'static Whole>,
    prefix: String,
    notes: BTreeSet<String>,
}

impl<'a> Planner<'a> {
    fn new(source: &'a dyn WeightSource, options: &'a Options) -> Result<Self> {
        let family = names::by_metadata(source.metadata())
            .ok_or_else(|| Error::file(source.path(), "a model of a family that is not known here"))?;
        let tensors = source.tensors();
        let prefix = match source.metadata() {
            Metadata::HuggingFace(_) => family.prefix(tensors.iter().map(String::as_str)),
            Metadata::Gguf(_) => family.prefixes[0],
        };
        let whole = family::of(source.metadata());
        Ok(Planner { source, options, family, whole, prefix: prefix.to_owned(), notes: BTreeSet::new() })
    }

    fn fail(&self, tensor: &str, what: impl Into<String>) -> Error {
        Error::tensor(self.source.path(), tensor, what)
    }

    /// The architecture that GGUF files of the family name.
    fn architecture(&self) -> Option<&'static str> {
        self.whole.map(|w| w.architecture).or_else(|| self.family.architectures.first().copied())
    }

    fn plan(mut self, name: &str) -> Result<Output> {
        let extra = match self.source.metadata() {
            Metadata::HuggingFace(c) => names::count(text(c), &["num_nextn_predict_layers"]),
            Metadata::Gguf(map) => {
                let key = format!("{}.nextn_predict_layers", self.source.metadata().family().unwrap_or_default());
                map.get(&key).and_then(Meta::as_usize)
            }
        };
        if extra.is_some_and(|n| n > 0) && !self.options.experts_only {
            self.notes.insert("layers of multi-token prediction are left out".into());
        }
        if let Some(importance) = &self.options.importance {
            let layers = self.source.layers();
            let (missing, all) = (importance.check(layers)?, layers.iter().map(|l| l.experts).sum::<usize>());
            if missing > 0 {
                self.notes.insert(format!("{missing} of {all} experts have no importance and are rounded without it"));
            }
        }
        let dense = if self.options.experts_only { Vec::new() } else { self.dense()? };
        if dense.is_empty() && !self.options.experts_only {
            self.notes.insert("the source has routed experts only, and so has the output".into());
        }
        match self.options.container {
            Container::Safetensors => self.safetensors(&dense),
            Container::Gguf => self.gguf(&dense, name),
        }
    }

    /// Everything that is not a routed expert.
    fn dense(&mut self) -> Result<Vec<Dense>> {
        let tensors: BTreeSet<String> = self.source.tensors().into_iter().collect();
        let from_gguf = matches!(self.source.metadata(), Metadata::Gguf(_));
        let renamed = from_gguf || tensors.iter().any(|n| n.starts_with("blk."));
        let spelling = Spelling::new(self.family, self.whole, &self.prefix);
        let gguf = self.options.container == Container::Gguf;
        let crosses = renamed != gguf;
        if crosses && self.whole.is_none() {
            let family = self.source.metadata().family().unwrap_or_default();
            let what = format!(
                "models of family `{family}` are not carried whole from one container to the other, only of {}; \
                 --experts-only carries the routed experts",
                family::names()
            );
            return Err(Error::file(self.source.path(), what));
        }
        let mut all = Vec::new();
        for name in &tensors {
            // In GGUF files nothing goes with its layer: scales beside weights stand for themselves.
            let Some(base) = layer_of(name, &tensors).or(from_gguf.then_some(None)) else { continue };
            let (from, stored) = match &base {
                Some(base) => (format!("{base}.weight"), None),
                None => (name.clone(), self.source.stored(name)),
            };
            let matrix = self.source.tensor(&from);
            let (matrix, shape) = match (matrix, stored.map(|s| s.shape)) {
                (Ok(m), Some(shape)) => (Some(m), shape),
                (Ok(m), None) => {
                    let shape = vec![m.rows(), m.cols()];
                    (Some(m), shape)
                }
                // A table of integers or the like.
                (Err(_), Some(shape)) if base.is_none() => (None, shape),
                (Err(e), _) => return Err(e),
            };
            // `base` folds all dimensions; what has another number of them is no linear layer.
            let shape = match self.source.stored(&from) {
                Some(stored) if matrix.as_ref().is_some_and(|m| is_plain(m.format())) => stored.shape,
                _ => shape,
            };
            let role = dense::role(&from, self.family, &shape);
            if crosses
                && (from.ends_with(parts::KV_B.huggingface)
                    || from.ends_with(parts::K_B.gguf)
                    || from.ends_with(parts::V_B.gguf))
            {
                // Cut in two, or joined: see `cut_keys` and `join_keys`.
                all.push(Dense { to: String::new(), from, matrix, shape, role, heads: None });
                continue;
            }
            let to = match (crosses, gguf) {
                (false, _) => Some(from.clone()),
                (true, true) => spelling.to_gguf(&from),
                (true, false) => spelling.to_directory(&from),
            };
            let ignored = match &matrix {
                Some(factors) if from.ends_with("rope_freqs.weight") => {
                    if let Some(v) = factors.decode().iter().find(|&&v| v != 1.0) {
                        let what =
                            format!("has {v}; frequencies that are stretched one by one have no name in a directory");
                        return Err(self.fail(&from, format!("{what}; use --experts-only")));
                    }
                    true
                }
                _ => from.ends_with("rotary_emb.inv_freq"),
            };
            // Other programs' directories may have GGUF's names, but never its order of rows.
            let heads = if from_gguf != gguf { self.heads(&from, &shape)? } else { None };
            // A vector there, a matrix of one row here.
            let shape = match (to.as_deref(), self.family.shared_gate, &shape[..]) {
                (Some(to), ..) if crosses && to.ends_with("ffn_gate_inp_shexp.weight") => vec![shape.iter().product()],
                (Some(to), Some(gate), [n]) if crosses && to.ends_with(&format!("{gate}.weight")) => vec![1, *n],
                _ => shape,
            };
            match to {
                Some(to) => all.push(Dense { from, to, matrix, shape, role, heads }),
                None if ignored => {}
                None => return Err(self.fail(&from, "has no name in the other container; use --experts-only")),
            }
        }
        Ok(all)
    }

    /// The heads of queries or keys, where the containers have their rows in different orders.
    fn heads(&self, from: &str, shape: &[usize]) -> Result<Option<usize>> {
        let parts = [parts::Q, parts::K, parts::QKV_BIASES[0], parts::QKV_BIASES[1]];
        let found = parts.iter().position(|p| from.ends_with(p.huggingface) || from.ends_with(p.gguf));
        let Some(i) = found.filter(|_| self.whole.is_some_and(|w| w.paired)) else { return Ok(None) };
        let (all, narrow) = match self.source.metadata() {
            Metadata::HuggingFace(config) => {
                let number = |key: &str| names::count(text(config), &[key]);
                (number("num_attention_heads"), number("num_key_value_heads"))
            }
            Metadata::Gguf(map) => {
                let family = self.source.metadata().family().unwrap_or_default();
                let number = |key: &str| map.get(&format!("{family}.attention.{key}")).and_then(Meta::as_usize);
                (number("head_count"), number("head_count_kv"))
            }
        };
        let heads = if i % 2 == 0 { all } else { narrow.or(all) };
        let rows = shape.first().copied().unwrap_or(0);
        match heads.filter(|&h| h > 0 && h.checked_mul(2).is_some_and(|halves| rows.is_multiple_of(halves))) {
            Some(heads) => Ok(Some(heads)),
            None => {
                let heads = heads.map_or("not said".to_owned(), |h| h.to_string());
                Err(self.fail(
                    from,
                    format!("has {rows} rows, which the heads ({heads}) do not divide into two halves each"),
                ))
            }
        }
    }

    /// What a tensor that is no routed expert becomes.
    ///
    /// # Errors
    /// It was asked for a format that the output cannot hold.
    fn dense_format(&mut self, d: &Dense, held: Format) -> Result<Format> {
        let gguf = self.options.container == Container::Gguf;
        let asked = match d.role {
            Role::Linear => self.options.dense,
            Role::Ends => self.options.head,
            Role::Other => None,
        };
        if gguf && d.role == Role::Other {
            return Ok(Format::F32);
        }
        let fits = |f: Format| match d.role {
            _ if gguf => Kind::holding(f).is_some(),
            Role::Linear => layout::fits_safetensors(f) && (!layout::is_kept_only(f) || f == held),
            _ => is_plain(f),
        };
        let (wanted, cols) = (asked.unwrap_or(held), d.shape.last().copied().unwrap_or(1));
        if fits(wanted) {
            return Ok(self.fallback(wanted, cols, &d.to));
        }
        if asked.is_some() {
            let container = self.options.container.name();
            return Err(Error::Invalid(format!("`{}` cannot be written as {wanted} in {container}", d.to)));
        }
        self.notes.insert(format!("tensors outside of experts in {wanted} become BF16, which the output can hold"));
        Ok(Format::Bf16)
    }

    /// The format, or the one that takes its place where a row is not made of whole blocks.
    fn fallback(&mut self, format: Format, cols: usize, name: &str) -> Format {
        if format.row_bytes(cols).is_ok() {
            return format;
        }
        let other = match format {
            Format::Q4K => Format::Q5_0,
            Format::Q5K => Format::Q5_1,
            Format::Q6K => Format::Q8_0,
            Format::Q2K | Format::Q3K => Format::Q4_0,
            Format::Iq4Xs => Format::Iq4Nl,
            _ => format,
        };
        let other = if other.row_bytes(cols).is_ok() { other } else { Format::Bf16 };
        self.notes.insert(format!("rows of {cols} columns are not whole blocks of {format}: `{name}` is {other}"));
        other
    }

    fn expert_format(&mut self, layer: &LayerSpec, proj: Proj) -> Result<Format> {
        let wanted = self.options.experts.map_or(layer.format(proj), |formats| formats[proj.index()]);
        // One format in two layouts, of which each container has one.
        let wanted = match (wanted, self.options.container) {
            (Format::Mxfp4, Container::Gguf) => Format::Mxfp4Ggml,
            (Format::Mxfp4Ggml, Container::Safetensors) => Format::Mxfp4,
            _ => wanted,
        };
        let fits = match self.options.container {
            Container::Gguf => Kind::holding(wanted).is_some(),
            Container::Safetensors if self.alternates() => {
                if !is_plain(wanted) && wanted != Format::Mxfp4 {
                    let what = format!(
                        "experts of this family have no layout for {wanted} in a directory; choose mxfp4 or bf16 for them"
                    );
                    return Err(Error::file(self.source.path(), what));
                }
                true
            }
            Container::Safetensors => layout::fits_safetensors(wanted),
        };
        if !fits || layout::is_kept_only(wanted) && layer.format(proj) != wanted {
            let container = self.options.container.name();
            let what = format!("experts cannot be written as {wanted} in {container}; choose another format for them");
            return Err(Error::Invalid(what));
        }
        let (rows, cols) = layer.shape(proj);
        let format = match self.options.container {
            Container::Gguf => self.fallback(wanted, cols, proj.name()),
            Container::Safetensors => wanted,
        };
        format.row_bytes(cols).map_err(|e| {
            let (layer, proj) = (layer.index, proj.name());
            Error::Invalid(format!("layer {layer}, {proj} [{rows}, {cols}] cannot become {format}: {e}"))
        })?;
        Ok(format)
    }

    /// An expert's item.
    fn expert(&self, layer: &LayerSpec, expert: usize, proj: Proj, to: (Format, ScaleType), laid: Laid) -> Item {
        let (rows, cols) = layer.shape(proj);
        let name = self.source.tensor_name(layer.index, expert, proj).1;
        let from = layer.format(proj);
        Item { from, ..item(What::Expert(layer.index, expert, proj), to, (rows, cols), laid, name) }
    }

    fn safetensors(&mut self, dense: &[Dense]) -> Result<Output> {
        let specs = self.source.layers().to_vec();
        let mut formats = Vec::new();
        for layer in &specs {
            for proj in Proj::ALL {
                formats.push(self.expert_format(layer, proj)?);
            }
        }
        let mut dense_formats = Vec::new();
        for d in dense {
            let format = d.matrix.as_ref().map(|m| self.dense_format(d, m.format())).transpose()?;
            formats.extend(format);
            dense_formats.push(format);
        }
        let naming = config::naming(&formats);
        let mut groups = Vec::new();
        let mut layers = Layers::default();
        for (d, format) in dense.iter().zip(dense_formats).filter(|(d, _)| !d.to.is_empty()) {
            groups.push(self.dense_in_directory(d, format, naming, &mut layers)?);
        }
        groups.extend(self.joined_keys(dense, naming, &mut layers)?);
        for (i, layer) in specs.iter().enumerate() {
            let formats: [Format; 3] = std::array::from_fn(|p| formats[i * 3 + p]);
            groups.extend(self.experts_in_directory(layer, formats, naming, &mut layers)?);
        }
        // Tensors begin at multiples of their type's size, as long as what is before them ends so.
        groups.sort_by_key(|g| !g.bytes().is_multiple_of(4));
        let files = safetensors_files(groups, self.options.shard_bytes);
        let mut quantization = config::quantization(&layers, naming);
        if self.alternates() && formats[..specs.len() * 3].contains(&Format::Mxfp4) {
            // One method of quantization is all that a config can name.
            if quantization.is_some() || formats[..specs.len() * 3].iter().any(|f| *f != Format::Mxfp4) {
                let what = "where experts of this family are MXFP4, all of them are, and nothing else is quantized in the directory; \
                            choose bf16 for the others, or for all experts";
                return Err(Error::file(self.source.path(), what));
            }
            quantization = Some(config::quantized_experts());
        }
        let config = self.config(dense, quantization)?;
        let mut sides = self.directory_sides()?;
        sides.push(("config.json".into(), pretty(&config)));
        Ok(Output { files, sides, notes: self.notes.iter().cloned().collect() })
    }

    /// A tensor's bytes as they are.
    fn copied(&self, d: &Dense) -> Result<Group> {
        let stored = self.source.stored(&d.from).ok_or_else(|| self.fail(&d.from, "cannot be copied"))?;
        let item = bytes_item(d, stored.bytes.len());
        let entry = Entry { name: d.to.clone(), kind: stored.kind, shape: d.shape.clone(), bytes: item.bytes };
        Ok(Group { entries: vec![entry], items: vec![item] })
    }

    fn dense_in_directory(
        &self,
        d: &Dense,
        format: Option<Format>,
        naming: Naming,
        layers: &mut Layers,
    ) -> Result<Group> {
        let (Some(m), Some(format)) = (&d.matrix, format) else { return self.copied(d) };
        if let (Some(base), [_, _]) = (d.to.strip_suffix(".weight"), &d.shape[..])
            && !d.to.contains("embed_tokens")
        {
            layers.add(base, format);
        }
        if format == m.format() && is_plain(format) && d.heads.is_none() {
            return self.copied(d);
        }
        let base = d.to.strip_suffix(".weight").unwrap_or(&d.to);
        let scales = scales_of(m, format);
        let mut entries =
            layout::entries(base, format, (m.rows(), m.cols()), scales, naming).map_err(|e| self.fail(&d.from, e))?;
        if is_plain(format) {
            (entries[0].name, entries[0].shape) = (d.to.clone(), d.shape.clone());
        }
        let item = item(d.what(false), (format, scales), (m.rows(), m.cols()), Laid::CodesAndSides, d.from.clone());
        let items = vec![Item { from: m.format(), ..item }];
        Ok(Group { entries, items })
    }

    /// The experts of a layer, each linear layer by itself, or all together where the family has them so and they are plain.
    fn experts_in_directory(
        &self,
        layer: &LayerSpec,
        formats: [Format; 3],
        naming: Naming,
        layers: &mut Layers,
    ) -> Result<Vec<Group>> {
        let prefix = format!("{}{}.", self.prefix, layer.index);
        let mut to = Vec::new();
        for proj in Proj::ALL {
            let m = self.source.matrix(layer.index, 0, proj)?;
            to.push((formats[proj.index()], scales_of(&m, formats[proj.index()])));
        }
        if self.alternates() {
            return self.alternating_in_directory(layer, formats, &prefix);
        }
        let packed = matches!(self.family.experts, ExpertNames::Packed(..));
        let same = formats[0] == formats[1] && formats.iter().all(|&f| is_plain(f));
        if packed && same {
            let kind = |p: Proj| formats[p.index()].to_string();
            let stem = format!("{prefix}{}", self.family.expert_stem());
            let (i, h, e) = (layer.intermediate, layer.hidden, layer.experts);
            let laid = Laid::CodesAndSides;
            let both = |expert| [Proj::Gate, Proj::Up].map(|p| self.expert(layer, expert, p, to[p.index()], laid));
            let gate_up: Vec<Item> = (0..e).flat_map(both).collect();
            let down = (0..e).map(|x| self.expert(layer, x, Proj::Down, to[2], laid)).collect();
            let parts = [
                ("gate_up_proj", vec![e, 2 * i, h], Proj::Gate, gate_up),
                ("down_proj", vec![e, h, i], Proj::Down, down),
            ];
            return Ok(parts
                .into_iter()
                .map(|(name, shape, proj, items)| {
                    let bytes = items.iter().map(|i| i.bytes).sum();
                    Group {
                        entries: vec![Entry { name: format!("{stem}.{name}"), kind: kind(proj), shape, bytes }],
                        items,
                    }
                })
                .collect());
        }
        let mut groups = Vec::new();
        for (expert, proj) in (0..layer.experts).flat_map(|e| Proj::ALL.map(|p| (e, p))) {
            let base = format!("{prefix}{}", self.family.expert(expert, proj));
            let (format, scales) = to[proj.index()];
            layers.add(&base, format);
            let entries = layout::entries(&base, format, layer.shape(proj), scales, naming)
                .map_err(|e| Error::Invalid(format!("`{base}`: {e}")))?;
            let item = self.expert(layer, expert, proj, (format, scales), Laid::CodesAndSides);
            groups.push(Group { entries, items: vec![item] });
        }
        Ok(groups)
    }

    /// Whether experts have the layout of gpt-oss: rows of gate and up in turn, and biases.
    fn alternates(&self) -> bool {
        matches!(self.family.experts, ExpertNames::Alternating(_))
    }

    /// The experts of a layer as gpt-oss has them.
    fn alternating_in_directory(&self, layer: &LayerSpec, formats: [Format; 3], prefix: &str) -> Result<Vec<Group>> {
        let stem = format!("{prefix}{}", self.family.expert_stem());
        if !layer.biases {
            return Err(
                self.fail(&format!("{stem}.gate_up_proj_bias"), "the source has no such biases; the family needs them")
            );
        }
        if formats[0] != formats[1] {
            let what =
                format!("cannot hold {} and {}: gate and up are one tensor, of one format", formats[0], formats[1]);
            return Err(self.fail(&format!("{stem}.gate_up_proj"), what));
        }
        let (e, i, h) = (layer.experts, layer.intermediate, layer.hidden);
        let mut groups = Vec::new();
        for (name, proj, rows, cols) in [("gate_up_proj", Proj::Gate, 2 * i, h), ("down_proj", Proj::Down, h, i)] {
            let format = formats[proj.index()];
            let to = (format, scale_type(format));
            let all = |laid: Laid| -> Vec<Item> {
                let one = |x| match proj {
                    Proj::Down => self.expert(layer, x, proj, to, laid),
                    _ => {
                        let name = self.source.tensor_name(layer.index, x, proj).1;
                        let both = item(What::Both(layer.index, x), to, (rows, cols), laid, name);
                        Item { from: layer.format(proj), ..both }
                    }
                };
                (0..e).map(one).collect()
            };
            let mut put = |suffix: &str, kind: &str, shape: Vec<usize>, items: Vec<Item>| {
                let bytes = items.iter().map(|i| i.bytes).sum();
                let entry = Entry { name: format!("{stem}.{name}{suffix}"), kind: kind.to_owned(), shape, bytes };
                groups.push(Group { entries: vec![entry], items });
            };
            match format {
                Format::Mxfp4 => {
                    put("_blocks", "U8", vec![e, rows, cols / 32, 16], all(Laid::Codes));
                    put("_scales", "U8", vec![e, rows, cols / 32], all(Laid::Scales));
                }
                _ => put("", &format.to_string(), vec![e, cols, rows], all(Laid::InputsFirst)),
            }
            let bias = |x| {
                let what = match proj {
                    Proj::Down => What::Bias(layer.index, x, proj),
                    _ => What::BothBiases(layer.index, x),
                };
                item(what, PLAIN, (1, rows), Laid::Codes, format!("{stem}.{name}_bias[{x}]"))
            };
            put("_bias", "F32", vec![e, rows], (0..e).map(bias).collect());
        }
        Ok(groups)
    }

    /// The matrices that GGUF has cut in two, whole again.
    fn joined_keys(&self, dense: &[Dense], naming: Naming, layers: &mut Layers) -> Result<Vec<Group>> {
        let mut groups = Vec::new();
        for keys in dense.iter().filter(|d| d.to.is_empty() && d.from.ends_with(parts::K_B.gguf)) {
            let values = keys.from.replace(parts::K_B.gguf, parts::V_B.gguf);
            let found = dense.iter().find(|d| d.from == values);
            let found = found.ok_or_else(|| self.fail(&values, "missing from the model: the keys' part is there"))?;
            let ([heads, narrow, nope], [_, value, _]) = (&keys.shape[..], &found.shape[..]) else {
                return Err(self.fail(&keys.from, format!("has shape {:?}; three dimensions are due", keys.shape)));
            };
            if found.shape != [*heads, *value, *narrow] {
                let what = format!("has shape {:?}, which does not fit {:?} of the keys", found.shape, keys.shape);
                return Err(self.fail(&values, what));
            }
            let layer = keys.from.strip_prefix("blk.").and_then(|r| r.split('.').next()).unwrap_or_default();
            let name = format!("{}{layer}.{}", self.prefix, parts::KV_B.huggingface);
            let held = keys.matrix.as_ref().map_or(Format::Bf16, Matrix::format);
            let format = self.options.dense.unwrap_or(if is_plain(held) { held } else { Format::Bf16 });
            let (rows, cols) = (heads * (nope + value), *narrow);
            let base = name.strip_suffix(".weight").unwrap_or(&name);
            layers.add(base, format);
            let to = (format, scale_type(format));
            let entries =
                layout::entries(base, format, (rows, cols), to.1, naming).map_err(|e| self.fail(&keys.from, e))?;
            let what = What::KeysAndValues { keys: keys.from.clone(), values, heads: *heads };
            let item = item(what, to, (rows, cols), Laid::CodesAndSides, keys.from.clone());
            groups.push(Group { entries, items: vec![Item { from: held, ..item }] });
        }
        Ok(groups)
    }

    fn config(&self, dense: &[Dense], quantization: Option<Value>) -> Result<Value> {
        let config = match self.source.metadata() {
            Metadata::HuggingFace(config) => config.clone(),
            Metadata::Gguf(map) => {
                let whole = self.whole.ok_or_else(|| {
                    let what = format!("cannot become a Hugging Face directory; {} can", family::names());
                    self.fail("general.architecture", what)
                })?;
                let has = |name: &str| dense.iter().find(|d| d.from == name);
                let specs = self.source.layers();
                let count = self.layer_count(&self.source.tensors());
                let seen = Seen {
                    vocabulary: match has("token_embd.weight") {
                        Some(d) => d.shape.first().copied().unwrap_or(0),
                        None => map.get("tokenizer.ggml.tokens").and_then(Meta::as_array).map_or(0, <[Meta]>::len),
                    },
                    tied: has("output.weight").is_none(),
                    dense_layers: (0..count).filter(|&i| !specs.iter().any(|l| l.index == i)).collect(),
                    layers: count,
                    intermediate: specs.first().map_or(0, |l| l.intermediate),
                    has: &|name| dense.iter().any(|d| d.from.split('.').skip(2).eq(name.split('.'))),
                };
                config::from_gguf(map, (self.family, whole), &seen, self.source.path())?
            }
        };
        Ok(config::requantized(config, quantization))
    }

    /// Layers of the model, without those of multi-token prediction.
    fn layer_count(&self, tensors: &[String]) -> usize {
        let held = self.source.layers().iter().map(|l| l.index);
        let said = match self.source.metadata() {
            Metadata::HuggingFace(config) => names::count(text(config), &["num_hidden_layers"]),
            Metadata::Gguf(_) => None,
        };
        let indices = tensors.iter().filter_map(|n| n.strip_prefix("blk.")?.split('.').next()?.parse().ok());
        said.unwrap_or_else(|| held.chain(indices).max().map_or(0, |last: usize| last + 1))
    }

    /// Files that belong to the model and hold no weights.
    fn directory_sides(&mut self) -> Result<Vec<(String, Vec<u8>)>> {
        let mut sides = Vec::new();
        if let Metadata::Gguf(map) = self.source.metadata() {
            match tokenizer::from_gguf(map) {
                Ok((tokenizer, config)) => {
                    sides.push(("tokenizer.json".to_owned(), pretty(&tokenizer)));
                    sides.push(("tokenizer_config.json".to_owned(), pretty(&config)));
                }
                Err(why) => {
                    self.notes.insert(format!("no tokenizer.json is written: {why}"));
                }
            }
            return Ok(sides);
        }
        for name in self.side_names()? {
            if let Some(content) = self.source.side_file(&name)? {
                sides.push((name, content));
            }
        }
        Ok(sides)
    }

    /// What lies beside the weights; of sources that are no directory, the common ones.
    fn side_names(&self) -> Result<Vec<String>> {
        let path = self.source.path();
        if !path.is_dir() {
            let names = ["generation_config.json", "tokenizer.json", "tokenizer_config.json"];
            return Ok(names.map(str::to_owned).to_vec());
        }
        let io = |source| Error::Io { path: path.to_owned(), source };
        let mut names = Vec::new();
        for entry in std::fs::read_dir(path).map_err(io)? {
            let entry = entry.map_err(io)?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let kind = Path::new(&name).extension().and_then(|e| e.to_str()).unwrap_or_default();
            let known = ["json", "txt", "model", "jinja", "py", "tiktoken", "md"].contains(&kind)
                || ["LICENSE", "NOTICE"].contains(&name.as_str());
            // Those that say how the source is quantized are no longer true.
            let quantized = ["hf_quant_config.json", "quantize_config.json", "quant_config.json"];
            let own = ["config.json", super::INDEX, super::REPORT].into_iter().chain(quantized).any(|own| own == name);
            if known && !own && !name.starts_with('.') && entry.path().is_file() {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    fn gguf(&mut self, dense: &[Dense], name: &str) -> Result<Output> {
        let specs = self.source.layers().to_vec();
        let mut groups = Vec::new();
        for d in dense {
            groups.extend(self.dense_in_gguf(d)?);
        }
        let mut commonest = Format::F32;
        for layer in &specs {
            for proj in Proj::ALL {
                let format = self.expert_format(layer, proj)?;
                commonest = format;
                let (rows, cols) = layer.shape(proj);
                let stem = format!("blk.{}.ffn_{}_exps", layer.index, dense::GGUF_PROJ[proj.index()]);
                let to = (format, ScaleType::F32);
                let items: Vec<Item> =
                    (0..layer.experts).map(|e| self.expert(layer, e, proj, to, Laid::Codes)).collect();
                groups.push(stacked(format!("{stem}.weight"), vec![layer.experts, rows, cols], format, items)?);
                if layer.biases {
                    let bias = |e| {
                        let name = format!("{stem}.bias[{e}]");
                        item(What::Bias(layer.index, e, proj), PLAIN, (1, rows), Laid::Codes, name)
                    };
                    let items = (0..layer.experts).map(bias).collect();
                    groups.push(stacked(format!("{stem}.bias"), vec![layer.experts, rows], Format::F32, items)?);
                }
            }
        }
        // Whoever looks through a file finds its layers in order.
        groups.sort_by_key(|g| {
            let name = &g.entries[0].name;
            let layer = name.strip_prefix("blk.").and_then(|r| r.split('.').next()?.parse().ok());
            layer.map_or(if name.starts_with("token") { 0 } else { usize::MAX }, |l: usize| l + 1)
        });
        let entries: Vec<&Entry> = groups.iter().flat_map(|g| &g.entries).collect();
        let mut pairs = self.pairs(dense, commonest)?;
        pairs.text(super::SUMMARY, &" ".repeat(super::SUMMARY_BYTES));
        let summary = Some(pairs.end() - super::SUMMARY_BYTES as u64);
        let header = layout::gguf_header(&pairs, &entries).map_err(|e| Error::file(self.source.path(), e))?;
        let tensors = entries.iter().map(|e| e.name.clone()).collect();
        let mut padding = Vec::new();
        for g in &groups {
            padding.extend(std::iter::repeat_n(0, g.items.len().saturating_sub(1)));
            padding.push(g.bytes().next_multiple_of(ALIGNMENT) - g.bytes());
        }
        let items = groups.into_iter().flat_map(|g| g.items).collect();
        let file = File { name: name.to_owned(), header, items, padding, tensors, summary };
        Ok(Output { files: vec![file], sides: Vec::new(), notes: self.notes.iter().cloned().collect() })
    }

    fn dense_in_gguf(&mut self, d: &Dense) -> Result<Vec<Group>> {
        let Some(m) = &d.matrix else { return Ok(vec![self.copied(d)?]) };
        let from_gguf = matches!(self.source.metadata(), Metadata::Gguf(_));
        if d.to.is_empty() && d.from.ends_with(parts::KV_B.huggingface) {
            return self.cut_keys(d, m);
        }
        // Between GGUF files nothing is asked of what is kept.
        let kept = match d.role {
            Role::Linear => self.options.dense.is_none(),
            Role::Ends => self.options.head.is_none(),
            Role::Other => true,
        };
        if from_gguf && kept {
            return Ok(vec![self.copied(d)?]);
        }
        let format = self.dense_format(d, m.format())?;
        if format == m.format() && is_plain(format) && d.heads.is_none() {
            let mut group = self.copied(d)?;
            group.entries[0].kind = format.to_string();
            return Ok(vec![group]);
        }
        let item = item(d.what(true), (format, ScaleType::F32), (m.rows(), m.cols()), Laid::Codes, d.from.clone());
        let items = vec![Item { from: m.format(), ..item }];
        Ok(vec![stacked(d.to.clone(), d.shape.clone(), format, items)?])
    }

    /// `kv_b_proj` as its keys' part, transposed, and its values' part.
    fn cut_keys(&mut self, d: &Dense, m: &Matrix) -> Result<Vec<Group>> {
        let Metadata::HuggingFace(config) = self.source.metadata() else { return Ok(Vec::new()) };
        let int =
            |key: &str| names::count(text(config), &[key]).ok_or_else(|| self.fail(key, "missing from the config"));
        let (heads, nope, value) = (int("num_attention_heads")?, int("qk_nope_head_dim")?, int("v_head_dim")?);
        let narrow = m.cols();
        if nope.checked_add(value).and_then(|n| n.checked_mul(heads)) != Some(m.rows()) {
            let what =
                format!("is [{}, {narrow}], but by the config it has {heads} heads of {nope} + {value}", m.rows());
            return Err(self.fail(&d.from, what));
        }
        let layer = d.from.strip_prefix(&self.prefix).and_then(|r| r.split('.').next()).unwrap_or_default().to_owned();
        let held = self.dense_format(d, m.format())?;
        let from = d.from.clone();
        let mut groups = Vec::new();
        for (name, shape, what) in [
            (parts::K_B.gguf, vec![heads, narrow, nope], What::Keys { from: from.clone(), nope, value }),
            (parts::V_B.gguf, vec![heads, value, narrow], What::Values { from, nope, value }),
        ] {
            let name = format!("blk.{layer}.{name}");
            let format = self.fallback(held, shape[2], &name);
            let item = item(what, (format, ScaleType::F32), (shape[0] * shape[1], shape[2]), Laid::Codes, name.clone());
            groups.push(stacked(name, shape, format, vec![Item { from: m.format(), ..item }])?);
        }
        Ok(groups)
    }

    fn pairs(&mut self, dense: &[Dense], commonest: Format) -> Result<Pairs> {
        let mut pairs = Pairs::default();
        let config = match self.source.metadata() {
            Metadata::Gguf(map) => {
                for (key, value) in map {
                    if key.starts_with("split.") || ["general.alignment", super::SUMMARY].contains(&key.as_str()) {
                        continue;
                    }
                    match (key.as_str(), value.as_usize()) {
                        ("general.file_type", _) => pairs.uint(key, config::file_type(commonest)),
                        (k, Some(count)) if k.ends_with(".block_count") => {
                            // Those of multi-token prediction are not carried.
                            let kept = self.layer_count(&self.source.tensors()).min(count);
                            pairs.uint(key, kept as u32);
                        }
                        (k, Some(_)) if k.ends_with(".nextn_predict_layers") => pairs.uint(key, 0),
                        _ => {
                            let bytes = self.source.metadata_bytes(key);
                            let bytes = bytes.ok_or_else(|| self.fail(key, "its bytes cannot be had"))?;
                            pairs.raw(key, &bytes);
                        }
                    }
                }
                return Ok(pairs);
            }
            Metadata::HuggingFace(config) => config.clone(),
        };
        let architecture = self.architecture().ok_or_else(|| {
            let family = self.source.metadata().family().unwrap_or_default();
            Error::file(self.source.path(), format!("family `{family}` has no architecture in GGUF"))
        })?;
        pairs.text("general.architecture", architecture);
        pairs.text("general.type", "model");
        let name = self.source.path().file_name().and_then(|n| n.to_str()).unwrap_or("model");
        pairs.text("general.name", name);
        pairs.uint("general.quantization_version", 2);
        pairs.uint("general.file_type", config::file_type(commonest));
        let vocabulary = dense.iter().find(|d| d.to == "token_embd.weight").and_then(|d| d.shape.first().copied());
        let vocabulary = vocabulary.or_else(|| names::count(text(&config), &["vocab_size"]));
        let layers = self.layer_count(&[]);
        let file = self.source.path().join("config.json");
        let model = config::Model {
            config: &config,
            family: self.family,
            architecture,
            whole: self.whole,
            experts_only: self.options.experts_only,
            layers,
            vocabulary,
            file: &file,
        };
        model.to_gguf(&mut pairs)?;
        let json = |name: &str| -> Result<Option<Value>> {
            let Some(bytes) = self.source.side_file(name)? else { return Ok(None) };
            let wrong = |e| Error::file(self.source.path().join(name), format!("not valid JSON: {e}"));
            serde_json::from_slice(&bytes).map(Some).map_err(wrong)
        };
        let mut tokens = Pairs::default();
        let made = match (json("tokenizer.json")?, vocabulary) {
            (Some(t), Some(v)) => {
                tokenizer::to_gguf(&mut tokens, &t, json("tokenizer_config.json")?.as_ref(), text(&config), v)
            }
            _ => Err("there is no tokenizer.json".into()),
        };
        match made {
            Ok(()) => pairs.append(tokens),
            Err(why) => {
                self.notes.insert(format!("no tokenizer is in the file, other programs will miss it: {why}"));
            }
        }
        Ok(pairs)
    }
}

/// A tensor that is copied.
fn bytes_item(d: &Dense, bytes: usize) -> Item {
    let item = item(What::Bytes(d.from.clone()), PLAIN, (bytes, 1), Laid::Codes, d.to.clone());
    Item { bytes: bytes as u64, ..item }
}

/// What copies and biases are said to be.
const PLAIN: (Format, ScaleType) = (Format::F32, ScaleType::F32);

fn item(
    what: What,
    (format, scales): (Format, ScaleType),
    (rows, cols): (usize, usize),
    laid: Laid,
    name: String,
) -> Item {
    let bytes = match laid {
        Laid::Codes | Laid::InputsFirst => format.row_bytes(cols).unwrap_or(0) as u64 * rows as u64,
        // What `layout::entries` lists; a shape that it refuses is refused before.
        Laid::CodesAndSides => {
            let all = layout::entries("", format, (rows, cols), scales, Naming::CompressedTensors).unwrap_or_default();
            all.iter().map(|e| e.bytes).sum()
        }
        Laid::Scales => {
            let (high, wide) = format.scale_shape(rows, cols).unwrap_or_default();
            (high * wide * scales.bytes()) as u64
        }
    };
    Item { what, from: format, format, rows, cols, scales, laid, bytes, name }
}

/// A GGUF tensor of items, one behind the other.
fn stacked(name: String, shape: Vec<usize>, format: Format, items: Vec<Item>) -> Result<Group> {
    let kind = Kind::holding(format);
    let kind = kind.ok_or_else(|| Error::Invalid(format!("`{name}`: GGUF files cannot hold {format}")))?;
    let bytes = items.iter().map(|i| i.bytes).sum();
    Ok(Group { entries: vec![Entry { name, kind: kind.name.to_owned(), shape, bytes }], items })
}

fn is_plain(format: Format) -> bool {
    matches!(format, Format::F32 | Format::F16 | Format::Bf16)
}

/// Type of the scales that a matrix has in a format: its own where it stays in it.
fn scales_of(matrix: &Matrix, format: Format) -> ScaleType {
    let own = matrix.scales().filter(|_| matrix.format() == format);
    own.map_or(scale_type(format), |s| s.kind())
}

/// Which linear layer a tensor is the codes of: `Some(Some(base))`, or `Some(None)` where it stands for itself. `None` for scales and
/// the like, which go with their layer.
fn layer_of(name: &str, all: &BTreeSet<String>) -> Option<Option<String>> {
    const CODES: [&str; 3] = ["weight", "weight_packed", "qweight"];
    // Outputs do not say how inputs are rounded, so the scales for that are left behind.
    const MORE: [&str; 5] =
        ["weight_shape", "weight_global_scale", "weight_scale_2", "input_scale", "input_global_scale"];
    let Some((base, suffix)) = name.rsplit_once('.') else { return Some(None) };
    if CODES.contains(&suffix) {
        return Some(Some(base.to_owned()));
    }
    let codes = CODES.iter().any(|codes| all.contains(&format!("{base}.{codes}")));
    match codes && (COMPANIONS.contains(&suffix) || MORE.contains(&suffix)) {
        true => None,
        false => Some(None),
    }
}

/// Groups in files of about `shard_bytes`.
fn safetensors_files(groups: Vec<Group>, shard_bytes: u64) -> Vec<File> {
    let mut shards: Vec<Vec<Group>> = vec![Vec::new()];
    let mut bytes = 0;
    for group in groups {
        if bytes > 0 && bytes + group.bytes() > shard_bytes {
            shards.push(Vec::new());
            bytes = 0;
        }
        bytes += group.bytes();
        if let Some(last) = shards.last_mut() {
            last.push(group);
        }
    }
    let count = shards.len();
    let file = |(i, groups): (usize, Vec<Group>)| {
        let name = match count {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
        };
        let header = layout::safetensors_header(groups.iter().flat_map(|g| &g.entries));
        let tensors = groups.iter().flat_map(|g| &g.entries).map(|e| e.name.clone()).collect();
        let items: Vec<Item> = groups.into_iter().flat_map(|g| g.items).collect();
        File { name, header, padding: vec![0; items.len()], items, tensors, summary: None }
    };
    shards.into_iter().enumerate().map(file).collect()
}

/// JSON as people read it, with a line's end behind it.
pub fn pretty(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}

/// `model.safetensors.index.json`; `about` goes into its metadata.
pub fn index(files: &[File], about: Value) -> Vec<u8> {
    let map = files.iter().flat_map(|f| f.tensors.iter().map(|t| (t.clone(), json!(f.name))));
    let map: serde_json::Map<String, Value> = map.collect();
    let total: u64 = files.iter().map(|f| f.bytes() - f.header.len() as u64).sum();
    let mut metadata = json!({"total_size": total});
    metadata["kt"] = about;
    pretty(&json!({"metadata": metadata, "weight_map": map}))
}
