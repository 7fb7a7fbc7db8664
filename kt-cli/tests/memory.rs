//! The plan tells the truth: peak resident memory of `kt run` on a checkpoint on disk is within 5 % of what `kt plan` says.
//!
//! `KT_TEST_GIB` sets the size of the checkpoint (default 0.5; the figure in the README was made with 4).

#![allow(unsafe_code)] // getrusage

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use kt::source::synthetic::SyntheticSource;
use kt::{Format, Proj, WeightSource};

const HIDDEN: usize = 1024;
const INTERMEDIATE: usize = 512;
const EXPERTS: usize = 64;
const HEADS: usize = 8;
const HEAD_DIM: usize = 64;
const VOCABULARY: usize = 1280;

struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Writes one safetensors file of BF16 tensors.
fn write_shard(path: &Path, tensors: &[(String, Vec<usize>, Vec<u8>)]) {
    let mut header = serde_json::Map::new();
    let mut offset = 0;
    for (name, shape, data) in tensors {
        let end = offset + data.len();
        header
            .insert(name.clone(), serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}));
        offset = end;
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut file = std::io::BufWriter::new(std::fs::File::create(path).unwrap());
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    for (_, _, data) in tensors {
        file.write_all(data).unwrap();
    }
    file.into_inner().unwrap().sync_all().unwrap();
}

/// A Qwen3-MoE checkpoint of random weights with the tiny model's tokenizer.
fn write_checkpoint(dir: &Path, layers: usize) {
    let source = SyntheticSource::builder()
        .hidden(HIDDEN)
        .intermediate(INTERMEDIATE)
        .experts(EXPERTS)
        .top_k(4)
        .layers(layers)
        .format(Format::Bf16)
        .seed(5)
        .build()
        .unwrap();
    // Dense matrices of any shape: the gate of a one-layer source of that shape.
    let dense = |name: String, rows: usize, cols: usize| {
        let source = SyntheticSource::builder()
            .hidden(cols)
            .intermediate(rows)
            .experts(1)
            .top_k(1)
            .layers(1)
            .format(Format::Bf16)
            .seed(name.len() as u64)
            .build()
            .unwrap();
        (name, vec![rows, cols], source.matrix(0, 0, Proj::Gate).unwrap().codes().to_vec())
    };
    let ones = |name: String, n: usize| (name, vec![n], [0x80, 0x3f].repeat(n));
    std::fs::create_dir_all(dir).unwrap();
    let files = layers + 1;
    let file = |i: usize| format!("model-{:05}-of-{files:05}.safetensors", i + 1);
    let mut map = serde_json::Map::new();
    for layer in 0..files {
        let mut tensors = Vec::new();
        if layer == layers {
            tensors.push(dense("model.embed_tokens.weight".into(), VOCABULARY, HIDDEN));
            tensors.push(dense("lm_head.weight".into(), VOCABULARY, HIDDEN));
            tensors.push(ones("model.norm.weight".into(), HIDDEN));
        } else {
            let p = format!("model.layers.{layer}");
            for e in 0..EXPERTS {
                for proj in Proj::ALL {
                    let m = source.matrix(layer, e, proj).unwrap();
                    let name = format!("{p}.mlp.experts.{e}.{}_proj.weight", proj.name());
                    tensors.push((name, vec![m.rows(), m.cols()], m.codes().to_vec()));
                }
            }
            tensors.push(dense(format!("{p}.mlp.gate.weight"), EXPERTS, HIDDEN));
            for (name, rows, cols) in [
                ("q_proj", HEADS * HEAD_DIM, HIDDEN),
                ("k_proj", 2 * HEAD_DIM, HIDDEN),
                ("v_proj", 2 * HEAD_DIM, HIDDEN),
                ("o_proj", HIDDEN, HEADS * HEAD_DIM),
            ] {
                tensors.push(dense(format!("{p}.self_attn.{name}.weight"), rows, cols));
            }
            for (name, n) in [
                ("self_attn.q_norm", HEAD_DIM),
                ("self_attn.k_norm", HEAD_DIM),
                ("input_layernorm", HIDDEN),
                ("post_attention_layernorm", HIDDEN),
            ] {
                tensors.push(ones(format!("{p}.{name}.weight"), n));
            }
        }
        tensors.iter().for_each(|(name, _, _)| drop(map.insert(name.clone(), file(layer).into())));
        write_shard(&dir.join(file(layer)), &tensors);
    }
    let index = serde_json::json!({"metadata": {}, "weight_map": map});
    std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
    let config = serde_json::json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN,
        "moe_intermediate_size": INTERMEDIATE, "intermediate_size": INTERMEDIATE, "num_experts": EXPERTS,
        "num_experts_per_tok": 4, "norm_topk_prob": true, "num_hidden_layers": layers, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": HEAD_DIM,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": null,
        "max_position_embeddings": 1024, "tie_word_embeddings": false, "vocab_size": VOCABULARY, "eos_token_id": 0,
        "attention_bias": false
    });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("model").join(name), dir.join(name)).unwrap();
    }
}

/// The largest resident set of any child waited for so far, in bytes.
fn peak_of_children() -> u64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is to a whole rusage, which the call fills; all-zero is a valid value should it fail.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr());
        usage.assume_init()
    };
    usage.ru_maxrss as u64 * 1024
}

#[test]
fn peak_memory_is_what_the_plan_says() {
    let gib: f64 = std::env::var("KT_TEST_GIB").ok().and_then(|v| v.parse().ok()).unwrap_or(0.5);
    let layer_bytes = (EXPERTS * 3 * HIDDEN * INTERMEDIATE * 2) as f64;
    let layers = (gib * (1u64 << 30) as f64 / layer_bytes).ceil() as usize;
    let dir = Temporary(std::env::temp_dir().join(format!("kt-memory-test-{}", std::process::id())));
    write_checkpoint(&dir.0, layers);

    let kt = |args: &[&str]| {
        let out = Command::new(env!("CARGO_BIN_EXE_kt")).args(args).arg("--model").arg(&dir.0).output().unwrap();
        assert!(out.status.success(), "kt {args:?}: {}", String::from_utf8_lossy(&out.stderr));
        out
    };
    let plan: serde_json::Value = serde_json::from_slice(&kt(&["plan", "--json", "--context", "16"]).stdout).unwrap();
    let planned = plan["resident_bytes"].as_u64().unwrap();
    kt(&["run", "--prompt", "fn main() {", "--max-tokens", "4"]);
    let peak = peak_of_children();
    let ratio = peak as f64 / planned as f64;
    println!("{layers} layers: planned {planned} bytes, peak {peak} bytes, ratio {ratio:.4}");
    assert!((0.95..=1.05).contains(&ratio), "planned {planned} bytes, peak resident {peak} bytes: ratio {ratio:.4}");
}
