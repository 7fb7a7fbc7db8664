#!/usr/bin/env python3
"""Writes seeds of `safetensors_dir` whose experts are GPTQ, AWQ, compressed-tensors' and ModelOpt's quantized layouts, and gpt-oss'.

Random codes and plain scales, always the same: `kt-core/tests/fuzz_seeds.rs` opens them all. Run from this folder."""

import json
import random
import struct

HIDDEN, INTERMEDIATE, EXPERTS, GROUP = 64, 32, 2, 32
r = random.Random(1)
SIZE = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F16": 2, "BF16": 2, "I32": 4, "F32": 4, "I64": 8}


def count(shape):
    n = 1
    for s in shape:
        n *= s
    return n


def codes(kind, shape):
    return kind, shape, r.randbytes(count(shape) * SIZE[kind])


def of(kind, shape, value):
    """A tensor that is `value`, as its bytes, everywhere."""
    return kind, shape, value * count(shape)


BF16_SCALE = b"\x80\x3c"
F16_SCALE = b"\x00\x24"
E8M0_SCALE = b"\x7a"
E4M3_SCALE = b"\x38"


def ints(shape, values):
    return "I32", shape, struct.pack(f"<{len(values)}i", *values)


def order(cols):
    groups = [k // GROUP for k in range(cols)]
    r.shuffle(groups)
    return ints([cols], groups)


def packed(n, k, per_word):
    return {
        "weight_packed": codes("I32", [n, k // per_word]),
        "weight_scale": of("BF16", [n, k // GROUP], BF16_SCALE),
        "weight_shape": ("I64", [2], struct.pack("<2q", n, k)),
    }


def gptq(n, k, bits):
    return {
        "qweight": codes("I32", [k * bits // 32, n]),
        "qzeros": codes("I32", [k // GROUP, n * bits // 32]),
        "scales": of("F16", [k // GROUP, n], F16_SCALE),
    }


def gptq_method(**more):
    return {"quant_method": "gptq", "group_size": GROUP, "sym": False, **more}


def mx(name, kind, n, k, columns):
    return {name: codes(kind, [n, columns]), "weight_scale": of("U8", [n, k // 32], E8M0_SCALE)}


EACH = {
    "gptq": (lambda n, k: gptq(n, k, 4) | {"g_idx": order(k)}, gptq_method(bits=4, desc_act=True)),
    "gptq_v2_8_bits": (lambda n, k: gptq(n, k, 8), gptq_method(bits=8, desc_act=False, checkpoint_format="gptq_v2")),
    "awq": (
        lambda n, k: {
            "qweight": codes("I32", [k, n // 8]),
            "qzeros": codes("I32", [k // GROUP, n // 8]),
            "scales": of("F16", [k // GROUP, n], F16_SCALE),
        },
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    ),
    "int4_zeros": (lambda n, k: packed(n, k, 8) | {"weight_zero_point": codes("I32", [n // 8, k // GROUP])}, None),
    "int8_packed_zeros": (lambda n, k: packed(n, k, 4) | {"weight_zero_point": codes("I32", [n // 4, k // GROUP])}, None),
    "int4_ordered": (lambda n, k: packed(n, k, 8) | {"weight_g_idx": order(k)}, None),
    "int8_zeros": (
        lambda n, k: {
            "weight": codes("I8", [n, k]),
            "weight_scale": of("BF16", [n, 1], BF16_SCALE),
            "weight_zero_point": codes("I8", [n, 1]),
        },
        None,
    ),
    "mxfp4": (lambda n, k: mx("weight_packed", "U8", n, k, k // 2), None),
    "mxfp4_beside_scale": (
        lambda n, k: {"weight": codes("I8", [n, k // 2]), "scale": of("U8", [n, k // 32], E8M0_SCALE)},
        None,
    ),
    "mxfp8": (lambda n, k: mx("weight", "F8_E4M3", n, k, k), None),
    "nvfp4": (
        lambda n, k: {
            "weight_packed": codes("U8", [n, k // 2]),
            "weight_scale": of("F8_E4M3", [n, k // 16], E4M3_SCALE),
            "weight_global_scale": ("F32", [1], struct.pack("<f", 32.0)),
        },
        None,
    ),
    "nvfp4_modelopt": (
        lambda n, k: {
            "weight": codes("U8", [n, k // 2]),
            "weight_scale": of("F8_E4M3", [n, k // 16], E4M3_SCALE),
            "weight_scale_2": ("F32", [], struct.pack("<f", 0.03)),
        },
        None,
    ),
}


def write(name, config, tensors):
    header, data = {}, b""
    for key, (kind, shape, values) in tensors.items():
        header[key] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    files = [json.dumps(config).encode(), b"", json.dumps(header, separators=(",", ":")).encode() + b"\n\n" + data]
    divider = b"\n---\n"
    assert not any(divider in f for f in files)
    with open(f"seeds/safetensors_dir/{name}", "wb") as out:
        out.write(divider.join(files))


for name, (linear, quantization) in EACH.items():
    config = {"model_type": "qwen3_moe", "num_experts": EXPERTS, "num_experts_per_tok": 1, "num_hidden_layers": 1}
    config |= {"hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE, "norm_topk_prob": True}
    if quantization:
        config["quantization_config"] = quantization
    tensors = {}
    for expert in range(EXPERTS):
        for proj, n, k in [("gate", INTERMEDIATE, HIDDEN), ("up", INTERMEDIATE, HIDDEN), ("down", HIDDEN, INTERMEDIATE)]:
            for key, tensor in linear(n, k).items():
                tensors[f"model.layers.0.mlp.experts.{expert}.{proj}_proj.{key}"] = tensor
    write(name, config, tensors)

config = {"model_type": "gpt_oss", "num_local_experts": EXPERTS, "num_experts_per_tok": 1, "num_hidden_layers": 1}
config |= {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "quantization_config": {"quant_method": "mxfp4"}}
tensors = {}
for proj, n, k in [("gate_up_proj", 2 * INTERMEDIATE, HIDDEN), ("down_proj", HIDDEN, INTERMEDIATE)]:
    stem = f"model.layers.0.mlp.experts.{proj}"
    tensors[f"{stem}_blocks"] = codes("U8", [EXPERTS, n, k // 32, 16])
    tensors[f"{stem}_scales"] = of("U8", [EXPERTS, n, k // 32], E8M0_SCALE)
    tensors[f"{stem}_bias"] = of("BF16", [EXPERTS, n], BF16_SCALE)
write("gpt_oss", config, tensors)
