"""Runs GGUF files of `kt convert` in llama.cpp (the package `llama-cpp-python`) and compares its predictions with kt's own.

usage: llama.py KT    (the command `kt`, whose built-in model is converted)

Both run the same file on the same tokens. llama.cpp rounds inputs of products to 8 bits, as kt's faster kernels do, so predictions differ
a little: the mean KL divergence of a token stays below 0.003 nats, and perplexities agree within 1 %.
"""

import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import safetensors.numpy
from llama_cpp import Llama

FORMATS = ["bf16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k"]
TEXT = (
    "Returns the number of elements in the vector, also referred to as its length. The ownership of the value is moved into the "
    "closure, which is then called once for each element of the iterator, in order, until it returns an error."
)


def log_probabilities(logits):
    logits = logits.astype(np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def main(kt):
    worst = 0.0
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        for name in FORMATS:
            file, logits = work / f"{name}.gguf", work / "logits.safetensors"
            subprocess.run([kt, "convert", "--to", name, "--output", file], check=True, stderr=subprocess.PIPE)
            llama = Llama(str(file), n_ctx=256, logits_all=True, verbose=False, n_threads=1)
            ids = llama.tokenize(TEXT.encode(), add_bos=False)
            assert llama.detokenize(ids).decode() == TEXT, "the tokenizer does not give back its text"
            llama.eval(ids)
            theirs = log_probabilities(np.array(llama.scores[: len(ids)]))
            command = [kt, "eval", "--model", file, "--ids", ",".join(map(str, ids)), "--logits", logits]
            subprocess.run(command, check=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
            ours = log_probabilities(safetensors.numpy.load_file(logits)["logits"])
            assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
            kl = float((np.exp(ours) * (ours - theirs)).sum(-1).mean())
            predicted = np.arange(len(ids) - 1), ids[1:]
            ours, theirs = (float(np.exp(-p[predicted].mean())) for p in (ours, theirs))
            print(f"llama.cpp {name:8} perplexity {theirs:.4f}, kt's {ours:.4f}, KL divergence {kl:.6f}")
            assert kl < 0.003 and abs(np.log(ours / theirs)) < 0.01, f"{name}: predictions differ"
            worst = max(worst, kl)
    print(f"worst KL divergence {worst:.6f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
