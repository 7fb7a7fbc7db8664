"""Converts a BF16 checkpoint with `kt convert` and reads the result with other software: the packages `gguf` and `safetensors`.

usage: check.py KT MODEL    (the command `kt`, and a directory of a Qwen3-MoE in BF16)

Every expert must have the values of the source within the error that its format implies; every other tensor of a directory, and
every norm and router of a GGUF file, exactly the source's.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import gguf
import numpy as np
import safetensors

# Largest error (root mean square, in proportion) of normally distributed weights, with some room.
DIRECTORY = {
    "bf16": 0.0, "fp8-block": 0.04, "fp8-channel": 0.04, "int8-channel": 0.02, "int8-g32": 0.01, "int8-asym-g32": 0.01,
    "int4-g32": 0.12, "int4-g64": 0.13, "int4-g128": 0.14, "int4-asym-g32": 0.11, "int4-asym-g128": 0.13, "mxfp4": 0.15,
}
GGUF = {"bf16": 0.0, "q8_0": 0.01, "q4_0": 0.12, "q5_0": 0.06, "q4_k": 0.10, "q5_k": 0.05, "q6_k": 0.03}
FLOATS = {"F32": "<f4", "F16": "<f2", "I32": "<i4", "I8": "i1", "U8": "u1", "F8_E4M3": "u1"}
PROJ = ["gate", "up", "down"]


def e4m3():
    """The value of every E4M3 code."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value[(code & 127) == 127] = np.nan
    return np.where(code & 128, -value, value).astype(np.float32)


E4M3 = e4m3()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def numbers(kind, shape, data):
    """A tensor as numbers; codes as they are."""
    if kind == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(data, FLOATS[kind]).reshape(shape)


def directory(path):
    """All tensors of a directory, read by the package `safetensors`."""
    tensors = {}
    for file in sorted(path.glob("model*.safetensors")):
        for name, t in safetensors.deserialize(file.read_bytes()):
            assert name not in tensors, name
            tensors[name] = (t["dtype"], numbers(t["dtype"], t["shape"], bytes(t["data"])))
    index = path / "model.safetensors.index.json"
    if index.exists():
        assert set(json.loads(index.read_text())["weight_map"]) == set(tensors), "the index names other tensors"
    return tensors


def unpacked(words, bits, count):
    """Codes out of words along the last axis, lowest first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words.view(np.uint32)[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.reshape(*words.shape[:-1], -1)[..., :count].astype(np.float32)


def linear(tensors, base, config):
    """The weight of a linear layer as its `quantization_config` says."""
    if f"{base}.weight_packed" not in tensors:
        kind, codes = tensors[f"{base}.weight"]
        if kind in ("BF16", "F32", "F16"):
            return codes
        block = f"{base}.weight_scale_inv" in tensors
        scales = tensors[f"{base}.weight_scale_inv" if block else f"{base}.weight_scale"][1]
        values = E4M3[codes] if kind == "F8_E4M3" else codes.astype(np.float32)
        rows, cols = values.shape
        if block:
            assert config["weight_block_size"] == [128, 128]
            return values * scales.repeat(128, 0)[:rows].repeat(128, 1)[:, :cols]
        return values * scales.repeat(cols // scales.shape[1], 1)
    weights = config["config_groups"]["group_0"]["weights"]
    packed, (_, scales) = tensors[f"{base}.weight_packed"][1], tensors[f"{base}.weight_scale"]
    if config["format"] == "mxfp4-pack-quantized":
        values = E2M1[np.stack([packed & 15, packed >> 4], -1)].reshape(packed.shape[0], -1)
        return values * (2.0 ** (scales.astype(np.float32) - 127)).repeat(32, 1)
    assert config["format"] == "pack-quantized", config["format"]
    rows, cols = tensors[f"{base}.weight_shape"][1]
    bits, group = weights["num_bits"], weights["group_size"] or cols
    codes = unpacked(packed, bits, cols)
    if weights["symmetric"]:
        zeros = float(1 << (bits - 1))
    else:
        # Packed along the outputs.
        zeros = unpacked(tensors[f"{base}.weight_zero_point"][1].T.copy(), bits, rows).T.repeat(group, 1)
    return (codes - zeros) * scales.astype(np.float32).repeat(group, 1)


def error(got, due):
    assert got.shape == due.shape, (got.shape, due.shape)
    return float(np.sqrt(np.square(got - due).sum() / np.square(due).sum()))


def expert_bases(tensors):
    return sorted({n[: -len(".weight")] for n in tensors if ".mlp.experts." in n and n.endswith(".weight")})


def main(kt, model):
    model = pathlib.Path(model)
    source = directory(model)
    bases = expert_bases(source)
    with tempfile.TemporaryDirectory() as work:
        for name, most in DIRECTORY.items():
            output = pathlib.Path(work) / name
            subprocess.run([kt, "convert", "--model", model, "--output", output, "--to", name], check=True, stderr=subprocess.PIPE)
            tensors = directory(output)
            config = json.loads((output / "config.json").read_text()).get("quantization_config", {})
            worst = max(error(linear(tensors, base, config), source[f"{base}.weight"][1]) for base in bases)
            assert worst <= most, f"{name}: an error of {worst}"
            for tensor, (kind, values) in source.items():
                if ".mlp.experts." not in tensor:
                    assert tensors[tensor][0] == kind and np.array_equal(tensors[tensor][1], values), tensor
            print(f"directory {name:16} worst error {worst:.4f}")
        for name, most in GGUF.items():
            output = pathlib.Path(work) / f"{name}.gguf"
            subprocess.run([kt, "convert", "--model", model, "--output", output, "--to", name], check=True, stderr=subprocess.PIPE)
            reader = gguf.GGUFReader(output)
            assert reader.get_field("general.architecture").contents() == "qwen3moe"
            tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
            worst = 0.0
            for base in bases:
                _, _, layer, _, _, expert, proj = base.split(".")
                stacked = tensors[f"blk.{layer}.ffn_{proj.removesuffix('_proj')}_exps.weight"]
                worst = max(worst, error(stacked[int(expert)], source[f"{base}.weight"][1]))
            assert worst <= most, f"{name}: an error of {worst}"
            names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, 64)
            for tensor, (_, values) in source.items():
                if ".mlp.experts." not in tensor:
                    to = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
                    assert to in tensors and np.array_equal(tensors[to], values), f"{tensor} as {to}"
            print(f"gguf      {name:16} worst error {worst:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
