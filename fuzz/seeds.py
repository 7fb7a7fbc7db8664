#!/usr/bin/env python3
"""Writes the seed inputs of the fuzz targets: one-layer models of a few hundred bytes."""
import json, pathlib, struct

here = pathlib.Path(__file__).resolve().parent / "seeds"


def gguf(version, kind, block_cols, block_bytes, arch="qwen3moe", fused=False, extra=()):
    H, I, E = max(32, block_cols), max(32, block_cols), 2
    s = lambda t: struct.pack("<Q", len(t)) + t.encode()
    meta = [("general.architecture", 8, s(arch)), ("general.alignment", 4, struct.pack("<I", 32))]
    for k, v in (("block_count", 1), ("embedding_length", H), ("expert_used_count", 1), ("expert_count", E)):
        meta.append((f"{arch}.{k}", 4, struct.pack("<I", v)))
    meta.append(("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + s("a") + s("b")))
    meta += list(extra)
    size = lambda ne: ne[0] // block_cols * block_bytes * (ne[1] if len(ne) > 1 else 1) * (ne[2] if len(ne) > 2 else 1)
    if fused:
        tensors = [("blk.0.ffn_gate_up_exps.weight", [H, 2 * I, E])]
    else:
        tensors = [("blk.0.ffn_gate_exps.weight", [H, I, E]), ("blk.0.ffn_up_exps.weight", [H, I, E])]
    tensors += [("blk.0.ffn_down_exps.weight", [I, H, E])]
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors) + 1, len(meta))
    for k, t, v in meta:
        out += s(k) + struct.pack("<I", t) + v
    offset, total = 0, 0
    for name, ne in tensors:
        out += s(name) + struct.pack("<I", len(ne)) + struct.pack(f"<{len(ne)}Q", *ne) + struct.pack("<IQ", kind, offset)
        offset = -(-(offset + size(ne)) // 32) * 32
    out += s("blk.0.attn_norm.weight") + struct.pack("<IQIQ", 1, H, 0, offset)
    offset += 4 * H
    out += b"\0" * (-len(out) % 32)
    return out + bytes(i % 64 for i in range(offset))


def safetensors(tensors):
    header, data = {}, b""
    for name, dtype, shape, body in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(body)]}
        data += body
    h = json.dumps(header).encode()
    return struct.pack("<Q", len(h)) + h + data


def directory(config, shards, with_index):
    files = [safetensors(s) for s in shards]
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = b""
    if with_index:
        index = json.dumps({"weight_map": {t[0]: names[i] for i, s in enumerate(shards) for t in s}}).encode()
    c = json.dumps(config).encode()
    return struct.pack("<HHH", len(c), len(index), len(files[0])) + c + index + b"".join(files)


def qwen(quantized):
    H, I, E = 8, 8, 2
    config = {"model_type": "qwen3_moe", "hidden_size": H, "moe_intermediate_size": I, "num_experts": E,
              "num_experts_per_tok": 1, "num_hidden_layers": 1, "norm_topk_prob": True}
    shards = [[], []]
    for e in range(E):
        for p in ("gate", "up", "down"):
            base = f"model.layers.0.mlp.experts.{e}.{p}_proj"
            if quantized == "fp8":
                t = [(base + ".weight", "F8_E4M3", [8, 8], bytes(64)), (base + ".weight_scale_inv", "F32", [1, 1], bytes(4))]
            elif quantized == "int4":
                t = [(base + ".weight_packed", "I32", [8, 1], bytes(32)), (base + ".weight_scale", "BF16", [8, 1], bytes(16)),
                     (base + ".weight_shape", "I32", [2], struct.pack("<ii", 8, 8))]
            elif quantized == "int8":
                t = [(base + ".weight", "I8", [8, 8], bytes(64)), (base + ".weight_scale", "F32", [8, 1], bytes(32))]
            else:
                t = [(base + ".weight", "BF16", [8, 8], bytes(128))]
            shards[e] += t
    shards[1].append(("model.layers.0.mlp.gate.weight", "F32", [E, H], bytes(4 * E * H)))
    return config, shards


here.joinpath("gguf").mkdir(parents=True, exist_ok=True)
here.joinpath("safetensors_dir").mkdir(parents=True, exist_ok=True)
for name, data in {
    "q8_0": gguf(3, 8, 32, 34), "f32": gguf(2, 0, 1, 4), "q4_0-fused": gguf(3, 2, 32, 18, fused=True),
    "deepseek2": gguf(3, 30, 1, 2, "deepseek2", extra=[("deepseek2.expert_gating_func", 4, struct.pack("<I", 2)),
                                                       ("deepseek2.expert_weights_scale", 6, struct.pack("<f", 2.5))]),
}.items():
    here.joinpath("gguf", name).write_bytes(data)
for q in ("bf16", "fp8", "int4", "int8"):
    config, shards = qwen(q)
    here.joinpath("safetensors_dir", q).write_bytes(directory(config, shards, q != "fp8"))
config, _ = qwen("bf16")
config = {"model_type": "qwen3_5_moe", "text_config": dict(config, model_type="qwen3_5_moe_text")}
packed = [("model.language_model.layers.0.mlp.experts.gate_up_proj", "BF16", [2, 16, 8], bytes(512)),
          ("model.language_model.layers.0.mlp.experts.down_proj", "BF16", [2, 8, 8], bytes(256))]
here.joinpath("safetensors_dir", "packed").write_bytes(directory(config, [packed, []], True))
