#!/usr/bin/env python3
"""Writes ggml_blocks.safetensors: GGUF blocks of every type that kt decodes, and the values the `gguf` package gives them.

    pip install gguf==0.19.0 numpy safetensors && python make_ggml_blocks.py

`TYPE.blocks` (U8, [blocks, bytes per block]) are random bytes with finite scales, and, for types that the package can
encode, blocks of encoded normal values; `TYPE.values` (F32, [blocks, values per block]) is what they decode to.
`TYPE.grid` (I8) are the points that IQ1 to IQ3 blocks number.
"""

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from safetensors.numpy import save_file

# Where F16 scales are in a block; MXFP4 has an exponent byte at 0 instead, IQ1_M's scale lies in pieces.
SCALES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "MXFP4": [],
    "IQ2_XXS": [0],
    "IQ2_XS": [0],
    "IQ2_S": [0],
    "IQ3_XXS": [0],
    "IQ3_S": [0],
    "IQ1_S": [0],
    "IQ1_M": [],
    "TQ1_0": [52],
    "TQ2_0": [64],
}
GRIDS = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"]


def main():
    rng = np.random.default_rng(11)
    tensors = {}
    for name, scales in SCALES.items():
        kind = GGMLQuantizationType[name]
        cols, size = GGML_QUANT_SIZES[kind]
        count = 16 if cols == 32 else 4
        blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
        for at in scales:
            # Any finite F16: all but exponent 31.
            while (bad := (blocks[:, at + 1] & 0x7C) == 0x7C).any():
                blocks[bad, at + 1] = rng.integers(0, 256, bad.sum(), dtype=np.uint8)
        if name == "MXFP4":
            # The ends of the exponent's range too; 6 * 2^(253 - 127) would overflow.
            blocks[:, 0] = rng.integers(100, 150, count)
            blocks[:4, 0] = [0, 1, 2, 252]
        if name == "IQ1_M":
            # The exponent's highest bits are bits 4 to 6 of the last byte; an exponent below 16 is finite.
            blocks[:, 55] &= 0xBF
        try:
            values = rng.standard_normal((count // 2, cols)).astype(np.float32)
            blocks = np.concatenate([blocks, quants.quantize(values, kind).reshape(-1, size)])
        except NotImplementedError:
            pass
        tensors[f"{name}.blocks"] = blocks
        tensors[f"{name}.values"] = quants.dequantize(blocks, kind).astype(np.float32).reshape(len(blocks), cols)
    for name in GRIDS:
        kind = getattr(quants, name)
        kind.init_grid()
        tensors[f"{name}.grid"] = kind.grid.astype(np.int8).reshape(kind.grid_shape)
    save_file(tensors, Path(__file__).with_name("ggml_blocks.safetensors"))


if __name__ == "__main__":
    main()
