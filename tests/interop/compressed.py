"""Reads directories of `kt convert` with the package `compressed-tensors`: its values must be those that `check.py` reads, which
compares them with the source's.

usage: compressed.py KT MODEL    (the command `kt`, and a directory of a Qwen3-MoE in BF16)
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import safetensors.torch
import torch
from check import directory, expert_bases, linear
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig

FORMATS = ["int4-g32", "int4-g64", "int4-g128", "int4-asym-g32", "int4-asym-g128", "int8-channel", "int8-g32", "fp8-channel"]


def main(kt, model):
    bases = expert_bases(directory(pathlib.Path(model)))
    with tempfile.TemporaryDirectory() as work:
        for name in FORMATS:
            output = pathlib.Path(work) / name
            subprocess.run([kt, "convert", "--model", model, "--output", output, "--to", name], check=True, stderr=subprocess.PIPE)
            config = json.loads((output / "config.json").read_text())["quantization_config"]
            parsed = QuantizationConfig.model_validate(config)
            (scheme,) = parsed.config_groups.values()
            compressor = BaseCompressor.get_value_from_registry(scheme.format or parsed.format)
            tensors = safetensors.torch.load_file(output / "model.safetensors")
            ours = directory(output)
            for base in bases:
                state = {n[len(base) + 1 :]: t for n, t in tensors.items() if n.startswith(f"{base}.")}
                # In F32 the products are exact.
                state["weight_scale"] = state["weight_scale"].to(torch.float32)
                theirs = compressor.decompress(state, scheme)["weight"].to(torch.float32).numpy()
                assert np.array_equal(theirs, linear(ours, base, config)), f"{name}: {base}"
            print(f"compressed-tensors {name:16} {len(bases)} matrices have the same values")


if __name__ == "__main__":
    main(*sys.argv[1:])
