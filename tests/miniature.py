"""Miniature training runs for tests: see the fixture `run`."""

import json
from dataclasses import fields
from pathlib import Path

import torch

from training import checkpoint
from training import step as one_step
from training.state import TrainState

SMALL = [
    "experiment=smoke",
    "model.n_layers=1",
    "model.dropout=0.1",
    "batch_tokens=128",
    "micro_batch=2",  # of 4 rows
    "steps=8",
    "every.log=2",
    "every.evaluate=3",
    "every.sample=4",
    "every.checkpoint=100",
    "data.paths=[words.txt]",
    "data.validation=[]",
    "sample.prompt='7 times'",
    "sample.tokens=8",
]


REMEMBERED = ["choices", *(one.name for one in fields(TrainState) if one.name not in ("step", "model", "gate"))]


def rows(run: Path) -> list[dict]:
    """The rows of metrics.jsonl without the values that depend on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "clock"} for line in lines]


def final(run: Path) -> tuple[dict, dict]:
    folder = checkpoint.find(run, for_training=True)
    weights = checkpoint.load_file(folder / "model.safetensors")
    return weights, checkpoint.load_training(folder)


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def at_step(monkeypatch, step: int, do, times: int = 1):
    """Calls do(model, total) after the gradients of `times` steps, the first of them the `step`-th from now.

    Its return value replaces the total loss.
    """
    real, calls = one_step.compute_gradients, []

    def wrapped(forward, *arguments, **options):
        total = real(forward, *arguments, **options)
        calls.append(1)
        return do(forward, total) if step <= len(calls) < step + times else total

    monkeypatch.setattr(one_step, "compute_gradients", wrapped)


def equal(whole: Path, parts: Path) -> bool:
    """Whether rows, weights and the training state are equal bit for bit."""
    (weights, state), (others, other_state) = final(whole), final(parts)
    same_memory = all(same(state[name], other_state[name]) for name in REMEMBERED)
    return rows(whole) == rows(parts) and same(weights, others) and same_memory
