"""Carries whole models of every family through `kt convert` and compares the predictions of transformers and of llama.cpp.

usage: families.py KT    (the command `kt`)

For each family, transformers makes a tiny model of random weights. It becomes a GGUF file, which llama.cpp runs, and that a directory
again, which transformers runs:

- names in the file are those that the package `gguf` gives the family's tensors;
- of a file in F32, llama.cpp's logits are those of transformers but for the order of additions; of one in BF16, it rounds inputs, which may
  change an expert where two are about as good;
- the directory made of a file in BF16 has the same tensors as the first, and exactly the same logits.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import gguf
import numpy as np
import safetensors.torch
import tokenizers
import torch
import transformers
from llama_cpp import Llama

MODEL = dict(
    vocab_size=512, hidden_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    num_experts_per_tok=2, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)
DENSE_FIRST = dict(n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, moe_intermediate_size=64, intermediate_size=192)
FAMILIES = {
    "qwen3_moe": dict(num_experts=8, moe_intermediate_size=64, head_dim=64, norm_topk_prob=True),
    "qwen2_moe": dict(num_experts=8, moe_intermediate_size=64, shared_expert_intermediate_size=128),
    "deepseek_v3": dict(
        DENSE_FIRST, n_group=4, topk_group=2, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32,
        num_key_value_heads=4, routed_scaling_factor=2.5,
    ),
    "mixtral": dict(num_local_experts=8, intermediate_size=64),
    "glm4_moe": dict(
        DENSE_FIRST, n_group=1, topk_group=1, head_dim=64, attention_bias=True, use_qk_norm=True, routed_scaling_factor=1.5,
        num_nextn_predict_layers=0,
    ),
    "glm4_moe, no norms of heads": dict(
        DENSE_FIRST, n_group=1, topk_group=1, head_dim=64, attention_bias=True, use_qk_norm=False, num_nextn_predict_layers=0,
    ),
    "minimax_m2": dict(num_local_experts=8, intermediate_size=64, head_dim=64, rotary_dim=32),
    "gpt_oss": dict(num_local_experts=8, intermediate_size=64, head_dim=64, sliding_window=8),
}
# Stands for a space in pieces.
MARK = "\u2581"
TEXTS = [
    "def the_tensors(path): return the other tokens",
    "The directory made of a file  has two spaces, and \n\ta tab.",
    "Größe, 日本語 😀",
]
IDS = np.random.default_rng(5).integers(0, 256, 40).tolist()


def write(name, more, path):
    """A model of random weights, and a tokenizer of bytes."""
    torch.manual_seed(11)
    config = transformers.AutoConfig.for_model(name, **{**MODEL, **more})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 0.2) + ("norm" in tensor))
        for tensor, b in model.named_buffers():
            if "correction" in tensor:
                b.copy_(torch.randn_like(b) * 0.2)
    model.to(torch.bfloat16).save_pretrained(path)
    if name == "mixtral":
        return write_pieces(path)
    # The characters that stand for bytes in tokenizers of this kind.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    vocab = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)} | {"th": 256}
    tokenizer = {
        "version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": ["t h"]},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))


def write_pieces(path):
    """A tokenizer of pieces with marked spaces and single bytes, as Mixtral has one."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.normalizer = tokenizers.normalizers.Replace(" ", MARK)
    text = pathlib.Path(__file__).read_text()
    model.train_from_iterator(text.splitlines(), tokenizers.trainers.BpeTrainer(vocab_size=240, show_progress=False))
    learned = json.loads(model.to_str())["model"]
    merged = [a + b for a, b in learned["merges"]]
    letters = sorted(set(learned["vocab"]) - set(merged) | {MARK})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *dict.fromkeys(merged), *letters]
    tokens = tokens[: MODEL["vocab_size"]]
    known = set(tokens)
    merges = [m for m in learned["merges"] if {*m, "".join(m)} <= known]
    plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    special = [{"id": i, "content": tokens[i], **plain} for i in range(3)]
    tokenizer = {
        "version": "1.0", "added_tokens": special, "pre_tokenizer": None, "post_processor": None,
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": MARK}, {"type": "Replace", "pattern": {"String": " "}, "content": MARK},
        ]},
        "decoder": None,
        "model": {
            "type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": {t: i for i, t in enumerate(tokens)}, "merges": merges,
        },
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}))


def check_pieces(model, file, back):
    """The tokenizer of pieces, that in the file, and that of the directory made of it give the same tokens."""
    before, after = (tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")) for path in (model, back))
    llama = Llama(str(file), vocab_only=True, verbose=False)
    for text in TEXTS:
        due = before.encode(text, add_special_tokens=False).ids
        assert llama.tokenize(text.encode(), add_bos=False) == due, f"{text!r}: llama.cpp gives other tokens"
        assert after.encode(text, add_special_tokens=False).ids == due, f"{text!r}: the directory gives other tokens"
        assert after.encode(text).ids == [1, *due]
        assert after.decode(due) == text, f"{text!r} becomes {after.decode(due)!r}"


def transformers_logits(path, truncate=False):
    config = transformers.AutoConfig.from_pretrained(path)
    if truncate and config.rope_parameters.get("rope_type") == "yarn":
        # llama.cpp begins and ends the stretching of positions at whole columns of a head, which gpt-oss does not.
        config.rope_parameters["truncate"] = True
    model = transformers.AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].double().numpy()


def llama_logits(path):
    # Keys and values in F32, too.
    llama = Llama(str(path), n_ctx=64, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0)
    llama.eval(IDS)
    return np.array(llama.scores[: len(IDS)], np.float64)


def tensors(path):
    return {k: v for file in path.glob("*.safetensors") for k, v in safetensors.torch.load_file(file).items()}


def check_names(before, file):
    """Every tensor of a file is called as `gguf` calls it, and none is missing."""
    reader = gguf.GGUFReader(file)
    architecture = reader.get_field("general.architecture").contents()
    known = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    names = gguf.get_tensor_name_map(known, MODEL["num_hidden_layers"])
    due = set()
    for name in before:
        if ".experts." in name:
            kind = "bias" if "_bias" in name else "weight"
            due |= {f"blk.{name.split('.')[2]}.ffn_{p}_exps.{kind}" for p in ("gate", "up", "down")}
        elif "kv_b_proj" in name:
            due |= {names.get_name(name.replace("kv_b", part), try_suffixes=(".weight",)) for part in ("k_b", "v_b")}
        else:
            plain = name.replace("e_score_correction_bias", "e_score_correction.bias")
            plain = f"{plain}.weight" if plain.endswith("sinks") else plain
            due.add(names.get_name(plain, try_suffixes=(".weight", ".bias")))
    found = {t.name for t in reader.tensors}
    assert due == found, f"{architecture}: {due ^ found}"


def divergence(ours, theirs):
    """Mean KL divergence of a token in nats, and the largest difference of logits in proportion to their deviation."""
    log = [x - x.max(-1, keepdims=True) for x in (ours, theirs)]
    log = [x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in log]
    return float((np.exp(log[0]) * (log[0] - log[1])).sum(-1).mean()), float(np.abs(ours - theirs).max() / ours.std())


def main(kt, *only):
    def convert(model, output, *options):
        run = [kt, "convert", "--model", model, "--output", output, *options]
        done = subprocess.run(run, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert done.returncode == 0, f"{run}: {done.stderr}"
        subprocess.run([kt, "verify", output], check=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        return output

    f32 = ["--to", "f32", "--dense", "f32", "--head", "f32"]
    transformers.logging.set_verbosity_error()
    for name, more in FAMILIES.items():
        if only and name not in only:
            continue
        with tempfile.TemporaryDirectory() as work:
            work = pathlib.Path(work)
            write(name.split(",")[0], more, work / "model")
            due, theirs = (transformers_logits(work / "model", truncate) for truncate in (False, True))
            kl, most = divergence(theirs, llama_logits(convert(work / "model", work / "f32.gguf", *f32)))
            kept = convert(work / "model", work / "bf16.gguf", "--to", "keep")
            rounded, _ = divergence(theirs, llama_logits(kept))
            back = convert(kept, work / "back", "--to", "keep")
            before, after = tensors(work / "model"), tensors(back)
            check_names(before, kept)
            if name == "mixtral":
                check_pieces(work / "model", kept, back)
            assert before.keys() == after.keys(), before.keys() ^ after.keys()
            for key in before:
                assert before[key].shape == after[key].shape and torch.equal(before[key].float(), after[key].float()), key
            again = transformers_logits(back)
            print(f"{name:28} llama.cpp F32: largest difference {most:.1e}, KL divergence {kl:.1e}; BF16: {rounded:.1e}", flush=True)
            assert most < 1e-3 and kl < 1e-6 and rounded < 0.03, f"{name}: llama.cpp's predictions differ"
            assert np.array_equal(due, again), f"{name}: {divergence(due, again)} after there and back"
            if name == "gpt_oss":
                mxfp4 = convert(work / "model", work / "mxfp4", "--to", "mxfp4")
                due, theirs = (transformers_logits(mxfp4, truncate) for truncate in (False, True))
                file = convert(mxfp4, work / "mxfp4.gguf", "--to", "keep", "--dense", "f32", "--head", "f32")
                kl, most = divergence(theirs, llama_logits(file))
                back = convert(file, work / "mxfp4-back", "--to", "keep")
                same = np.array_equal(due, transformers_logits(back))
                print(f"{name + ' in MXFP4':28} llama.cpp: largest difference {most:.1e}, KL divergence {kl:.1e}", flush=True)
                assert kl < 0.003 and same, f"{name} in MXFP4: predictions differ"


if __name__ == "__main__":
    main(*sys.argv[1:])
