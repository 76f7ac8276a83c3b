"""How fast the parts are, beside others in the same run.  python -m scripts.benchmark data (or generate)"""

import argparse
import atexit
import contextlib
import copy
import io
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from hydra import compose, initialize_config_dir

from conf.entry import REPOSITORY
from conf.schema import Prepare, parse
from data import prepare, sources
from data.batches import Batches, Windows
from data.corpus import open_corpus
from model import GPT, generate
from model.few_rows import for_few_rows
from training.compilation import compile_step


def alternate(rounds: int, **contestants: Callable[[], float]) -> dict[str, list[float]]:
    """Each contestant's measurements, taken in turn so that a noisy machine is noisy for all."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(rounds):
        for name, measure in contestants.items():
            found[name].append(measure())
            print(f"  round {i + 1} of {rounds}  {name:<24} {found[name][-1]:8.1f}", file=sys.stderr)
    return found


def table(title: str, unit: str, found: dict[str, list[float]], against: str | None = None) -> dict:
    """Prints the medians, and how many times that of the contestant `against` each is."""
    medians = {name: statistics.median(values) for name, values in found.items()}
    print(f"{title}, {unit}, median (lowest to highest)")
    for name, value in medians.items():
        ratio = f"   {value / medians[against]:.2f} times {against}" if against not in (None, name) else ""
        print(f"  {name:<24} {value:8.1f} ({min(found[name]):.1f} to {max(found[name]):.1f}){ratio}")
    return {"title": title, "unit": unit, "measured": found}


# --- data: text to shards, and shards to batches --------------------------------------------------------------------


def data(source: str, megabytes: int, rounds: int) -> list[dict]:
    """The documents of a source (a choice of the group `data`), over and over, with a BPE trained on them."""
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        cfg = parse(compose("prepare", overrides=[f"data={source}"]), Prepare)
    corpus = prepare.prepare(asdict(cfg.data), asdict(cfg.tokenizer))
    documents = [d.text for d in sources.documents(asdict(cfg.data), Path("corpora/downloads"))]
    size = sum(len(text.encode()) for text in documents)
    texts = [f"{i}\n{text}" for i in range(-(-megabytes * 10**6 // size)) for text in documents]
    size = sum(len(text.encode()) for text in texts)
    tokenizer = prepare.saved_tokenizer(corpus.folder / "tokenizer")

    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for i, text in enumerate(texts):
            (Path(folder) / f"{i:05d}.txt").write_text(text, encoding="utf-8")
        settings = {**asdict(cfg.data), "source": "files", "paths": [f"{folder}/*.txt"], "validation": []}
        made: list[Path] = []

        def ours() -> float:
            root = Path(folder) / f"corpora{len(made)}"
            begin = time.perf_counter()
            with contextlib.redirect_stdout(io.StringIO()):
                made.append(prepare.prepare(settings, tokenizer, root=root).folder)
            return size / 1e6 / (time.perf_counter() - begin)

        def theirs() -> float:
            """Dataset.map in as many processes with the same encoding, then one file, as nanoGPT prepares its data."""
            import datasets

            datasets.disable_progress_bars()
            datasets.disable_caching()
            encoding = corpus.tokenizer.encoding
            begin = time.perf_counter()
            rows = datasets.load_dataset("text", data_files=f"{folder}/*.txt", sample_by="document", split="train")

            def process(row):
                ids = encoding.encode_ordinary(row["text"])
                return {"ids": [*ids, encoding.eot_token], "length": len(ids) + 1}

            rows = rows.map(process, remove_columns=["text"], num_proc=cores)
            out = np.memmap(Path(folder) / "theirs.bin", np.uint16, "w+", shape=(sum(rows["length"]),))
            at = 0
            for i in range(parts := min(64, len(rows))):
                some = np.concatenate(rows.shard(parts, i, contiguous=True).with_format("numpy")["ids"])
                out[at : at + len(some)] = some
                at += len(some)
            out.flush()
            return size / 1e6 / (time.perf_counter() - begin)

        text = table(
            "text to shards",
            "MB/s",
            alternate(rounds, inkling=ours, **{(other := f"datasets.map, {cores} processes"): theirs}),
            other,
        )
        rows = {f"rows of {n} tokens": [batches_per_second(made[0], n) for _ in range(rounds)] for n in (1024, 128)}
        reading = table("shards to batches", "million tokens/s", rows)
    return [text, reading]


def batches_per_second(folder: Path, seq_len: int) -> float:
    tokens = open_corpus(folder).train
    batches = Batches(Windows(tokens, seq_len, seed=0), rows=32_768 // seq_len)
    steps, begin = 0, time.perf_counter()
    while (seconds := time.perf_counter() - begin) < 1:
        batches.batch(steps)
        steps += 1
    return steps * batches.rows * seq_len / seconds / 1e6


# --- generate: the shape of llama2.c's 15 M model, random weights -----------------------------------------------------

SHAPE = {"d_model": 288, "n_layers": 6, "n_heads": 6, "d_ff": 768, "tied": True}
VOCABULARY = 32_000
PROMPT = 4


def generation(
    new_tokens: int, batch: int, far: int, rounds: int, threads: int, device: str, peer: Path | None
) -> list[dict]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = GPT(VOCABULARY, **SHAPE, max_seq_len=max(far + 16, PROMPT + new_tokens)).to(device).eval()
    plain, small = for_few_rows(copy.deepcopy(model)), for_few_rows(copy.deepcopy(model), int8=True)
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
        for contestant in contestants.values():  # once for nothing: memory, caches
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
    """The same weights in transformers' Llama, whose RoPE pairs dimensions as ours."""
    from transformers import LlamaConfig, LlamaForCausalLM

    a = model.arguments
    shape = {"hidden_size": a["d_model"], "num_hidden_layers": a["n_layers"], "num_attention_heads": a["n_heads"]}
    shape |= {"intermediate_size": a["d_ff"], "vocab_size": a["vocab_size"], "rms_norm_eps": a["norm_eps"]}
    config = LlamaConfig(**shape, max_position_embeddings=a["max_seq_len"], tie_word_embeddings=True, eos_token_id=None)
    other = LlamaForCausalLM(config).to(model.embedding.weight.device).eval()
    others = {"attention_norm.gain": "input_layernorm", "feed_forward_norm.gain": "post_attention_layernorm"}
    others |= {f"attention.w{x}.weight": f"self_attn.{x}_proj" for x in "qkvo"}
    others |= {f"feed_forward.{x}.weight": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    weights = {"model.embed_tokens.weight": model.embedding.weight, "lm_head.weight": model.head.weight}
    weights["model.norm.weight"] = model.norm.gain
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
    """Its run.c built here with its fastest flags, reading the same weights from a file in its first format."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    flags = ["-Ofast", "-march=native", "-fopenmp"]
    subprocess.run(["cc", *flags, "-o", folder / "run", checkout / "run.c", "-lm"], check=True)
    a, blocks = model.arguments, [dict(block.named_parameters()) for block in model.blocks]

    def interleaved(weight: torch.Tensor) -> torch.Tensor:
        return rearrange(weight, "(h two i) d -> (h i two) d", h=a["n_heads"], two=2)

    pieces = [model.embedding.weight]
    pieces += [block["attention_norm.gain"] for block in blocks]
    pieces += [interleaved(block[f"attention.w{x}.weight"]) for x in "qk" for block in blocks]
    pieces += [block[f"attention.w{x}.weight"] for x in "vo" for block in blocks]
    pieces += [block["feed_forward_norm.gain"] for block in blocks]
    pieces += [block[f"feed_forward.{x}.weight"] for x in ("gate", "down", "up") for block in blocks]
    rope = torch.zeros(a["max_seq_len"], a["d_model"] // a["n_heads"])  # tables that it skips
    header = [a["d_model"], a["d_ff"], a["n_layers"], a["n_heads"], a["n_heads"], a["vocab_size"], a["max_seq_len"]]
    with (folder / "model.bin").open("wb") as file:
        file.write(np.array(header, np.int32).tobytes())
        for piece in [*pieces, model.norm.gain, rope]:
            file.write(piece.detach().cpu().numpy().tobytes())
    command = [folder / "run", folder / "model.bin", "-t", "0", "-n", str(n), "-z", checkout / "tokenizer.bin"]

    def measure() -> float:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        result = subprocess.run(command, capture_output=True, env=environment, check=True)
        return float(re.search(rb"tok/s: ([\d.]+)", result.stdout + result.stderr)[1])

    return measure


def by_position(plain: GPT, small: GPT, steps: dict, far: int, rounds: int) -> dict:
    """What a token costs behind 100 others and behind `far` others, in microseconds."""
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
    """Bytes of weights read in a second while so many rows are written, beside what reading and copying reaches."""
    n = model.n_parameters()
    large = torch.ones(2**26, device=device)
    target = torch.empty_like(large)

    def rate(work: Callable[[], object], size: int) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            work()
            if device != "cpu":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return size / min(times) / 1e9

    size = large.numel() * 4
    measured = {
        "weights, fp32": [4 * n * statistics.median(found["inkling, compiled"]) / rows / 1e9],
        "weights, int8": [n * statistics.median(found["inkling int8, compiled"]) / rows / 1e9],
        "copy of 256 MiB": [rate(lambda: target.copy_(large), 2 * size)],
        "sum of 256 MiB": [rate(lambda: large.sum(), size)],
    }
    return table(f"memory read (and written), {rows} rows", "GB/s", measured, "copy of 256 MiB")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["data", "generate"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="writes every measurement here")
    parser.add_argument("--source", default="shakespeare", help="data: a choice of the group data, see conf/data")
    parser.add_argument("--megabytes", type=int, default=100, help="data: of text")
    parser.add_argument("--new-tokens", type=int, default=256, help="generate: in each row")
    parser.add_argument("--batch", type=int, default=16, help="generate: rows at once, beside one")
    parser.add_argument("--far", type=int, default=2000, help="generate: a position to compare with 100")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="generate: of the CPU")
    parser.add_argument("--device", default="cpu", help="generate: cpu or cuda")
    parser.add_argument("--peer", type=Path, help="generate: a checkout of llama2.c to race against")
    a = parser.parse_args()
    if a.what == "data":
        results = data(a.source, a.megabytes, a.rounds)
    else:
        results = generation(a.new_tokens, a.batch, a.far, a.rounds, a.threads, a.device, a.peer)
    if a.json is not None:
        a.json.write_text(
            json.dumps({"cores": len(os.sched_getaffinity(0)), "results": results}, indent=2), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
