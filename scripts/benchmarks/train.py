"""train: tokens per second and memory of a training step, next to nanoGPT, Hugging Face and the machine's limits."""

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from kernels import build
from model import GPT, ModelConfig
from scripts.benchmarks.measure import alternate, copy_rate, peak_memory, product_rate, synchronise, table
from training import auto
from training.backend import choose_ops
from training.compilation import compile_forward
from training.estimate import flops_per_token
from training.gradients import compute_gradients, gradient_norm
from training.optimizer import OptimizerConfig, build_optimizer
from training.step import update

SHAPES = {  # of models and their batches
    "small": {"d_model": 128, "n_layers": 4, "n_heads": 4, "vocabulary": 65, "rows": 16, "seq_len": 128},
    "medium": {"d_model": 384, "n_layers": 6, "n_heads": 6, "vocabulary": 65, "rows": 8, "seq_len": 256},
    "gpt2": {"d_model": 768, "n_layers": 12, "n_heads": 12, "vocabulary": 50304, "rows": 16, "seq_len": 1024},
}
LRS = dict.fromkeys(("lr", "lr_embedding", "lr_head", "lr_norm"), 1e-3)


class Shape:
    """The shape of all contestants' models, and their batch, on its device."""

    def __init__(
        self, device: str, d_model: int, n_layers: int, n_heads: int, vocabulary: int, rows: int, seq_len: int
    ):
        self.d_model, self.n_layers, self.n_heads, self.vocabulary = d_model, n_layers, n_heads, vocabulary
        self.d_ff = 8 * round(d_model / 3)  # three matrices with as many weights as two of width 4 d_model
        self.rows, self.seq_len, self.device = rows, seq_len, torch.device(device)
        ids = torch.randint(vocabulary, (rows, seq_len + 1), device=device)
        self.tokens, self.targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def training(shape: str, changes: dict, rounds: int, seconds: float, device: str, peer: Path | None) -> list[dict]:
    """The same work for all: forward, backward, gradient clipping, AdamW; all weights random."""
    torch.manual_seed(0)
    auto.choose_device(device)
    s = Shape(device, **SHAPES[shape] | changes)
    steps = dict(contestants(s, peer))
    for name, step in list(steps.items()):
        began = time.perf_counter()
        try:
            step()
        except Exception as error:  # a failing compiler, too little memory: continue with the others
            print(f"{name} does not run here: {type(error).__name__}: {str(error).splitlines()[0]}")
            del steps[name]
            continue
        print(f"  {name:<28} first step {time.perf_counter() - began:.1f} s", file=sys.stderr)

    took = alternate(rounds, **{name: milliseconds(step, seconds, device) for name, step in steps.items()})
    found = {name: [1000 * s.rows * s.seq_len / value for value in values] for name, values in took.items()}
    title = f"training, {shape}: d_model {s.d_model}, {s.n_layers} layers, {s.rows} x {s.seq_len} tokens, {device}"
    first = next(iter(found))
    results = [table(title, "tokens/s", found, first)]
    theirs = [name for name in found if name.startswith("Hugging Face")]
    if theirs:
        best = max(theirs, key=lambda name: statistics.median(found[name]))
        results.append(table(f"{title}; the best of Hugging Face", "tokens/s", found, best))

    flops = flops_per_token(plain_model(s), s.seq_len)
    work = {name: [value * flops / 1e9 for value in values] for name, values in found.items()}
    precision = auto.choose_precision(s.device)
    ceiling = f"matrix product, {precision}"
    results.append(
        table("the same as arithmetic", "GFLOP/s", work | {ceiling: [product_rate(device, precision)]}, ceiling)
    )
    copying = {"copy of 256 MiB": [copy_rate(device)]}
    results.append(table("memory", "GB/s", copying))
    memory = {name: [peak_memory(step, device) / 2**20] for name, step in steps.items()}
    results.append(table("peak memory of a step, besides weights and optimizer", "MiB", memory, first))
    return results


def lengths(shape: str, seq_lens: list[int], rounds: int, seconds: float, device: str) -> list[dict]:
    """Our step with fewer and longer rows, and as many tokens."""
    torch.manual_seed(0)
    auto.choose_device(device)
    tokens = SHAPES[shape]["rows"] * SHAPES[shape]["seq_len"]
    how = "kernels" if device == "cpu" else "compiled"
    steps = {}
    for seq_len in seq_lens:
        s = Shape(device, **SHAPES[shape] | {"rows": tokens // seq_len, "seq_len": seq_len})
        steps[f"{s.rows} x {seq_len}"] = inkling(s, "fp32" if device == "cpu" else auto.choose_precision(s.device), how)
    for step in steps.values():
        step()
    found = alternate(rounds, **{name: milliseconds(step, seconds, device) for name, step in steps.items()})
    return [table(f"a step, {shape}, {tokens} tokens, {how}, {device}", "ms", found, next(iter(found)), digits=2)]


def milliseconds(step: Callable, seconds: float, device: str) -> Callable[[], float]:
    """Measures the milliseconds of a step, over `seconds` seconds."""

    def measure() -> float:
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            step()
            synchronise(device)
            done += 1
        return 1000 * (time.perf_counter() - began) / done

    return measure


def contestants(s: Shape, peer: Path | None):
    """Yields the name and step of each contestant, one after the other, as each is built in its first step."""
    if peer is not None:
        yield "nanoGPT, as it runs", nanogpt(s, peer)
    for precision in dict.fromkeys(["fp32", auto.choose_precision(s.device)]):
        for how in ("eager", "compiled"):
            yield f"Hugging Face, {precision}, {how}", hugging_face(s, precision, how == "compiled")
            yield f"inkling, {precision}, {how}", inkling(s, precision, how)
    if s.device.type == "cpu":
        yield "inkling, fp32, kernels", inkling(s, "fp32", "kernels")


def plain_model(s: Shape) -> GPT:
    shape = {"d_model": s.d_model, "n_layers": s.n_layers, "n_heads": s.n_heads, "d_ff": s.d_ff}
    return GPT(s.vocabulary, ModelConfig(**shape, max_seq_len=s.seq_len)).to(s.device)


def inkling(s: Shape, precision: str, how: str) -> Callable[[], object]:
    """`how`: eager, compiled, or kernels (on a CPU)."""
    model = plain_model(s)
    if how == "kernels" and not build.load("training", warn=print):
        raise ValueError("the kernels cannot be built")
    attention = auto.choose_attention(s.device, how == "compiled", precision, s.seq_len, None)
    model.use(choose_ops(attention, how == "kernels"))
    autocast, forward = auto.autocast(s.device, precision), None
    batch = {"tokens": s.tokens, "targets": s.targets}
    config = OptimizerConfig("adamw", **LRS, betas=[0.9, 0.99], eps=1e-8, weight_decay=0.1)
    optimizer = build_optimizer(model, config, precision)
    scaler = torch.amp.GradScaler(s.device.type, enabled=False)

    def step():
        nonlocal forward
        if forward is None:
            forward = compile_forward(model, [batch], autocast, print) if how == "compiled" else model
        compute_gradients(forward, scaler, batch, micro_batch=s.rows, count=s.targets.numel(), autocast=autocast)
        update(optimizer, scaler, factor=1.0, norm=gradient_norm(optimizer, scaler), clip=1.0)

    return step


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable, autocast) -> Callable[[], None]:
    """A step of a plain torch training loop."""

    def step():
        with autocast:
            loss = loss_of()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def nanogpt(s: Shape, checkout: Path) -> Callable[[], object]:
    """nanoGPT's model and optimizer; in eager fp32 on a CPU, as in its README, compiled in bf16 on a GPU."""
    spec = importlib.util.spec_from_file_location("nanogpt", checkout / "model.py")
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    shape = {"n_embd": s.d_model, "n_layer": s.n_layers, "n_head": s.n_heads, "vocab_size": s.vocabulary}
    model = code.GPT(code.GPTConfig(**shape, block_size=s.seq_len, dropout=0.0, bias=False)).to(s.device)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), s.device.type)
    on_gpu = s.device.type == "cuda"
    forward = torch.compile(model) if on_gpu else model
    autocast = auto.autocast(s.device, "bf16" if on_gpu else "fp32")
    return trained(model, optimizer, lambda: forward(s.tokens, s.targets)[1], autocast)


def hugging_face(s: Shape, precision: str, compiled: bool) -> Callable[[], object]:
    """transformers' Llama of the same shape, with fused AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": s.d_model, "num_hidden_layers": s.n_layers, "num_attention_heads": s.n_heads}
    shape |= {"intermediate_size": s.d_ff, "vocab_size": s.vocabulary, "max_position_embeddings": s.seq_len}
    model = LlamaForCausalLM(LlamaConfig(**shape, use_cache=False)).to(s.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    forward = torch.compile(model) if compiled else model
    labels = torch.cat([s.tokens[:, :1], s.targets[:, :-1]], dim=1)  # it shifts them itself
    return trained(model, optimizer, lambda: forward(s.tokens, labels=labels).loss, auto.autocast(s.device, precision))
