//! Configurations that the host cannot run are refused by name.

mod common;

use bytes::Bytes;
use kt::source::safetensors::SafetensorsSource;
use kt_cli::host::config::Attention;
use kt_cli::host::{Model, ModelConfig, Rows};

const DIRECTORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/model/");

/// The built-in model with another configuration.
fn with_config(change: impl FnOnce(&mut serde_json::Value)) -> kt::Result<SafetensorsSource> {
    let file = |name: &str| std::fs::read(format!("{DIRECTORY}{name}")).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&file("config.json")).unwrap();
    change(&mut config);
    SafetensorsSource::from_files(
        "changed",
        vec![
            ("config.json".to_string(), Bytes::from(config.to_string())),
            ("model.safetensors".to_string(), Bytes::from(file("model.safetensors"))),
        ],
    )
}

fn error(change: impl FnOnce(&mut serde_json::Value)) -> String {
    let source = with_config(change).unwrap();
    format!("{:#}", ModelConfig::read(&source).expect_err("this configuration should be refused"))
}

#[test]
fn errors_name_the_key() {
    let text = error(|c| c["model_type"] = "qwen2_moe".into());
    assert!(text.contains("qwen2_moe") && text.contains("qwen3_moe") && text.contains("deepseek_v3"), "{text}");
    let text = error(|c| c["rope_scaling"] = serde_json::json!({"rope_type": "llama3", "factor": 8.0}));
    assert!(text.contains("rope_scaling.rope_type") && text.contains("llama3") && text.contains("yarn"), "{text}");
    let text = error(|c| c["rope_scaling"] = "yarn".into());
    assert!(text.contains("rope_scaling") && text.contains("no object"), "{text}");
    let text = error(|c| c["rope_scaling"] = serde_json::json!({"rope_type": 7, "factor": 8.0}));
    assert!(text.contains("rope_scaling.rope_type") && text.contains("no text"), "{text}");
    let text = error(|c| {
        c["rope_theta"] = 1.0.into();
        c["rope_scaling"] = serde_json::json!({"rope_type": "yarn", "factor": 8.0});
    });
    assert!(text.contains("rope_scaling.rope_type") && text.contains("a base of 1"), "{text}");
    let text = error(|c| c["num_key_value_heads"] = 3.into());
    assert!(text.contains("num_key_value_heads") && text.contains('3'), "{text}");
    let text = error(|c| c["rms_norm_eps"] = "small".into());
    assert!(text.contains("rms_norm_eps"), "{text}");
    let text = error(|c| c["hidden_act"] = "gelu".into());
    assert!(text.contains("hidden_act") && text.contains("gelu"), "{text}");
    let text = error(|c| c["attention_bias"] = true.into());
    assert!(text.contains("attention_bias"), "{text}");
    let text = error(|c| {
        c.as_object_mut().unwrap().remove("rope_theta");
    });
    assert!(text.contains("rope_theta") && text.contains("missing"), "{text}");
    let text = error(|c| c["head_dim"] = (-64).into());
    assert!(text.contains("head_dim"), "{text}");
    let text = error(|c| c["eos_token_id"] = serde_json::json!([1, "two"]));
    assert!(text.contains("eos_token_id"), "{text}");
}

#[test]
fn tensors_must_have_the_configured_shape() {
    let source = with_config(|c| c["head_dim"] = 32.into()).unwrap();
    let config = ModelConfig::read(&source).unwrap();
    assert_eq!(config.attention, Attention::Grouped { kv_heads: 2, head_dim: 32 });
    let text = match Model::plan(&common::runtime(None), &source, &config, 8, Rows::Last, &Default::default()) {
        Ok(_) => panic!("a wrong shape was accepted"),
        Err(e) => format!("{e:#}"),
    };
    assert!(text.contains("model.layers.0.self_attn") && text.contains("256"), "{text}");
}

#[test]
fn newer_and_longer_rope_settings_are_read() {
    let new = with_config(|c| {
        let c = c.as_object_mut().unwrap();
        c.remove("rope_theta");
        c.remove("rope_scaling");
        let yarn = serde_json::json!({
            "rope_theta": 5000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256
        });
        c.insert("rope_parameters".into(), yarn);
    });
    let rope = ModelConfig::read(&new.unwrap()).unwrap().rope;
    let yarn = rope.yarn.unwrap();
    assert_eq!((rope.theta, yarn.factor, yarn.original_positions, yarn.query_factor), (5000.0, 4.0, 256.0, 1.0));
    assert!((yarn.attention_factor - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-12);
    // The base may be outside.
    let apart = with_config(|c| {
        c["rope_theta"] = 7000.0.into();
        c["rope_parameters"] =
            serde_json::json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64});
    });
    let rope = ModelConfig::read(&apart.unwrap()).unwrap().rope;
    assert_eq!((rope.theta, rope.yarn.unwrap().factor), (7000.0, 8.0));
}
