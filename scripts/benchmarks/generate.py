"""generate: the shape of llama2.c's 15 M model with random weights, next to Hugging Face and llama2.c."""

import atexit
import copy
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from einops import rearrange

from kernels.decoding import pack_for_decoding
from model import GPT, ModelConfig, generate
from scripts.benchmarks.measure import alternate, copy_rate, rate, table
from training.compilation import compile_step

SHAPE = {"d_model": 288, "n_layers": 6, "n_heads": 6, "d_ff": 768, "tied": True}
VOCABULARY = 32_000
PROMPT = 4


def generation(
    new_tokens: int, batch: int, far: int, rounds: int, threads: int, device: str, peer: Path | None
) -> list[dict]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = GPT(VOCABULARY, ModelConfig(**SHAPE, max_seq_len=max(far + 16, PROMPT + new_tokens))).to(device).eval()
    plain, small = pack_for_decoding(copy.deepcopy(model)), pack_for_decoding(copy.deepcopy(model), int8=True)
    other = hugging_face(model)
    results = []
    for rows in (1, batch):
        prompts = torch.randint(VOCABULARY, (rows, PROMPT), device=device)
        steps = {}
        for name, one in (("inkling", plain), ("inkling int8", small)):
            began = time.perf_counter()
            steps[name] = compile_step(one, rows, lambda text: print(text, file=sys.stderr))
            print(f"{name}, {rows} rows: compiled in {time.perf_counter() - began:.1f} s, not counted below")

        def ours(one: GPT, step=None, prompts=prompts) -> Callable[[], float]:
            def measure() -> float:
                began = time.perf_counter()
                columns = list(generate(one, prompts, new_tokens, temperature=0, step=step))
                torch.stack(columns).tolist()
                return len(prompts) * new_tokens / (time.perf_counter() - began)

            return measure

        def theirs(prompts=prompts) -> float:
            began = time.perf_counter()
            written = continued(other, prompts, new_tokens)
            written.tolist()
            return len(prompts) * new_tokens / (time.perf_counter() - began)

        contestants = {
            "inkling, compiled": ours(plain, steps["inkling"]),
            "inkling": ours(plain),
            "inkling int8, compiled": ours(small, steps["inkling int8"]),
            "inkling int8": ours(small),
            "Hugging Face": theirs,
        }
        if peer is not None and rows == 1:
            contestants["llama2.c"] = llama2c(peer, model, new_tokens, threads)
        for contestant in contestants.values():  # warm-up: memory, caches
            contestant()
        title = f"{rows} rows of {new_tokens} new tokens, {threads} threads"
        found = alternate(rounds, **contestants)
        results.append(table(title, "tokens/s", found, "Hugging Face"))
        if peer is not None and rows == 1:
            table(title, "tokens/s", found, "llama2.c")

        ids = [
            torch.stack(list(generate(plain, prompts, new_tokens, temperature=0, step=step)), 1)
            for step in (None, steps["inkling"])
        ]
        same = [(one == continued(other, prompts, new_tokens)).all(1).sum().item() for one in ids]
        print(f"greedy tokens equal to Hugging Face's: {same[0]} of {rows} rows, compiled {same[1]}")
        if rows == 1:
            results.append(by_position(plain, small, steps, far, rounds))
        results.append(bandwidth(model, found, rows, device))
    return results


def hugging_face(model: GPT):
    """The same weights in transformers' Llama, whose RoPE pairs dimensions as ours does."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = model.config
    shape = {"hidden_size": c.d_model, "num_hidden_layers": c.n_layers, "num_attention_heads": c.n_heads}
    shape |= {"intermediate_size": c.d_ff, "vocab_size": model.vocab_size, "rms_norm_eps": c.norm_eps}
    config = LlamaConfig(**shape, max_position_embeddings=c.max_seq_len, tie_word_embeddings=True, eos_token_id=None)
    other = LlamaForCausalLM(config).to(model.embedding.weight.device).eval()
    others = {"attention_norm.weight": "input_layernorm", "feed_forward_norm.weight": "post_attention_layernorm"}
    others |= {f"attention.w{x}.weight": f"self_attn.{x}_proj" for x in "qkvo"}
    others |= {f"feed_forward.{x}.weight": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    weights = {"model.embed_tokens.weight": model.embedding.weight, "lm_head.weight": model.head.weight}
    weights["model.norm.weight"] = model.norm.weight
    for i, block in enumerate(model.blocks):
        of_block = dict(block.named_parameters())
        weights |= {f"model.layers.{i}.{theirs}.weight": of_block[ours] for ours, theirs in others.items()}
    other.load_state_dict(weights)
    return other


@torch.inference_mode()
def continued(other, prompts: torch.Tensor, n: int) -> torch.Tensor:
    everything = torch.ones_like(prompts)
    ids = other.generate(prompts, attention_mask=everything, max_new_tokens=n, do_sample=False, pad_token_id=0)
    return ids[:, prompts.shape[1] :]


def llama2c(checkout: Path, model: GPT, n: int, threads: int) -> Callable[[], float]:
    """llama2.c's run.c, built here with its fastest flags, with the same weights in a file of its first format."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    flags = ["-Ofast", "-march=native", "-fopenmp"]
    subprocess.run(["cc", *flags, "-o", folder / "run", checkout / "run.c", "-lm"], check=True)
    c, blocks = model.config, [dict(block.named_parameters()) for block in model.blocks]

    def interleaved(weight: torch.Tensor) -> torch.Tensor:
        return rearrange(weight, "(h two i) d -> (h i two) d", h=c.n_heads, two=2)

    pieces = [model.embedding.weight]
    pieces += [block["attention_norm.weight"] for block in blocks]
    pieces += [interleaved(block[f"attention.w{x}.weight"]) for x in "qk" for block in blocks]
    pieces += [block[f"attention.w{x}.weight"] for x in "vo" for block in blocks]
    pieces += [block["feed_forward_norm.weight"] for block in blocks]
    pieces += [block[f"feed_forward.{x}.weight"] for x in ("gate", "down", "up") for block in blocks]
    rope = torch.zeros(c.max_seq_len, c.d_model // c.n_heads)  # RoPE tables, which it skips
    header = [c.d_model, c.d_ff, c.n_layers, c.n_heads, c.n_heads, model.vocab_size, c.max_seq_len]
    with (folder / "model.bin").open("wb") as file:
        file.write(np.array(header, np.int32).tobytes())
        for piece in [*pieces, model.norm.weight, rope]:
            file.write(piece.detach().cpu().numpy().tobytes())
    command = [folder / "run", folder / "model.bin", "-t", "0", "-n", str(n), "-z", checkout / "tokenizer.bin"]

    def measure() -> float:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        result = subprocess.run(command, capture_output=True, env=environment, check=True)
        return float(re.search(rb"tok/s: ([\d.]+)", result.stdout + result.stderr)[1])

    return measure


def by_position(plain: GPT, small: GPT, steps: dict, far: int, rounds: int) -> dict:
    """The time of a token after 100 others and after `far` others, in microseconds."""
    contestants = {}
    for name, one in (("inkling", plain), ("inkling int8", small)):
        for position in (100, far):

            def measure(one=one, step=steps[name], position=position) -> float:
                prompt = torch.randint(VOCABULARY, (1, position), device=one.embedding.weight.device)
                columns = generate(one, prompt, 16, temperature=0, step=step)
                next(columns).item()  # the prompt
                began = time.perf_counter()
                torch.stack(list(columns)).tolist()
                return (time.perf_counter() - began) / 15 * 1e6

            contestants[f"{name}, position {position}"] = measure
    for contestant in contestants.values():
        contestant()
    return table("a token, compiled", "microseconds", alternate(rounds, **contestants), "inkling, position 100")


def bandwidth(model: GPT, found: dict[str, list[float]], rows: int, device: str) -> dict:
    """GB/s of weights read while generating `rows` rows, next to the machine's rates of reading and copying."""
    n = model.n_parameters()
    large = torch.ones(2**26, device=device)
    size = 4 * large.numel()
    measured = {
        "weights, fp32": [4 * n * statistics.median(found["inkling, compiled"]) / rows / 1e9],
        "weights, int8": [n * statistics.median(found["inkling int8, compiled"]) / rows / 1e9],
        "copy of 256 MiB": [copy_rate(device)],
        "sum of 256 MiB": [rate(large.sum, size, device)],
    }
    return table(f"memory read (and written), {rows} rows", "GB/s", measured, "copy of 256 MiB")
