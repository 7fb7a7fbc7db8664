#!/usr/bin/env python3
"""Perplexity of the tiny model on heldout.txt, and greedy continuations, with transformers.

  python evaluate.py [--dtype float32|bfloat16] [--greedy]

Protocol: encode the whole file once (no special tokens added); cut the ids into consecutive windows of 256; each window is
a sequence of its own (position 0 first, empty cache, nothing put in front); the last, shorter window counts too when it
has at least 2 tokens. In each window every token but the first is predicted. Perplexity = exp(mean negative log-likelihood over all
predicted tokens, logits in fp32). Bits per byte = sum of the nats / ln 2 / size of the file.
"""
import argparse
import json
import math
import pathlib

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).resolve().parent
WINDOW = 256
PROMPTS = ["The ownership system in Rust", "fn main() {\n    let mut", "# Error handling\n\n", "A trait object is",
           "To run the tests, use `cargo"]


@torch.no_grad()
def perplexity(model, tok, path=HERE.parents[1] / "tests/data/tiny-moe/heldout.txt"):
    text = pathlib.Path(path).read_text()
    ids = torch.tensor(tok.encode(text, add_special_tokens=False).ids)
    total, count = 0.0, 0
    for a in range(0, len(ids), WINDOW):
        w = ids[a:a + WINDOW]
        if len(w) < 2:
            continue
        lg = model(w[None], use_cache=False).logits[0].float()
        total += torch.nn.functional.cross_entropy(lg[:-1], w[1:], reduction="sum").double().item()
        count += len(w) - 1
    return {"tokens": len(ids), "predicted": count, "nll": total / count, "ppl": math.exp(total / count),
            "bits_per_byte": total / math.log(2) / len(text.encode())}


@torch.no_grad()
def greedy(model, tok, prompt, n=80):
    ids = tok.encode(prompt, add_special_tokens=False).ids
    out, margin = [], []
    for _ in range(n):
        lg = model(torch.tensor([ids + out]), use_cache=False).logits[0, -1].float()
        v, i = torch.topk(lg, 2)
        margin.append(round((v[0] - v[1]).item(), 5))
        out.append(i[0].item())
    return {"prompt": prompt, "prompt_ids": ids, "ids": out, "text": tok.decode(out), "margin": margin}


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--dtype", default="float32")
    ap.add_argument("--greedy", action="store_true")
    a = ap.parse_args()
    m = AutoModelForCausalLM.from_pretrained(HERE, dtype=getattr(torch, a.dtype)).eval()
    t = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    print(json.dumps(perplexity(m, t)))
    if a.greedy:
        for p in PROMPTS:
            g = greedy(m, t, p)
            print("-----", repr(p), "smallest margin", min(g["margin"]))
            print(p + g["text"])
