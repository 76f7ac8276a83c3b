"""Finds and reports where a number was first not finite."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from model.hooks import Edit, Place, Site, editing
from training.state import Generators

NOWHERE = {"micro_batch": None, "module": None, "tensor": None}


def find_origin(model: nn.Module, pieces: list[dict[str, Tensor]], autocast: torch.autocast, rng: dict) -> dict:
    """Finds where a number was first not finite, by replaying a step's micro-batches from its random state `rng`.

    Returns {"micro_batch", "module", "tensor"}: a weight that is not finite before the step, else the first output in
    the forward, else the first gradient in the backward; all None if it cannot be reproduced. Gradients are cleared.
    """
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            module, _, tensor = name.rpartition(".")
            return {"micro_batch": None, "module": module, "tensor": tensor}
    found: list[tuple[str, str]] = []

    def look(name: str, what: str) -> Callable:
        def check(x):
            if isinstance(x, Tensor) and x.is_floating_point() and not x.isfinite().all():
                found.append((name, what))

        return check

    def look_back(name: str) -> Callable:
        def check(x) -> Tensor | None:
            if not isinstance(x, Tensor) or not x.requires_grad:
                return None
            x = x.view_as(x)  # a tensor with a gradient of its own: other modules may read the same input
            x.register_hook(look(name, "input's gradient"))
            return x

        return check

    edits: dict[Site | Place, Edit] = {}
    for name, module in model.named_modules():
        if not any(True for _ in module.children()):  # leaves only: what a parent returns is its children's
            edits |= {Place(name): look(name, "output"), Place(name, 0): look_back(name)}
    Generators().load(rng)
    try:
        with editing(model, edits):
            for i, piece in enumerate(pieces):
                model.zero_grad(set_to_none=True)
                with autocast:
                    loss, count = model(**piece)
                look("", "output")(loss)
                if not found:
                    (loss / count).backward()
                for name, parameter in model.named_parameters():
                    if not found and parameter.grad is not None and not parameter.grad.isfinite().all():
                        module, _, tensor = name.rpartition(".")
                        found.append((module, f"gradient of {tensor}"))
                if found:
                    return {"micro_batch": i, "module": found[0][0], "tensor": found[0][1]}
    finally:
        model.zero_grad(set_to_none=True)
    return NOWHERE


def report(path: Path, step: int, loss: float, norm: float, origin: dict, texts: list[str]):
    """Writes the report on a step that was not finite, with the text of its batch, as JSON."""
    numbers = {"step": step, "loss": str(loss), "grad_norm": str(norm)}
    path.write_text(json.dumps({**numbers, **origin, "texts": texts}, indent=2, ensure_ascii=False), encoding="utf-8")


def describe(origin: dict) -> str:
    if origin["tensor"] is None:
        return "could not be reproduced by replaying the step"
    return f"first not finite: the {origin['tensor']} of {origin['module'] or 'the model'}"
