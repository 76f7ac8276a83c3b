"""What to do when the numbers go wrong: notice before the weights have it, and say where it began."""

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from model.hooks import Place, editing
from training.checkpoint import set_rng_state


@dataclass
class Guard:
    """What a run remembers of its steps, to be saved with it.

    losses: of the last steps, with rows as long as now. skip: steps whose batch is passed over. skipped: steps that
    changed no weight, so or because their numbers were not finite. in_a_row: how many of the latter came last, one
    after the other. spikes: losses more than so many standard deviations above the mean of those before. rollbacks:
    since the last checkpoint behind which a batch was learned from. lowest: the lowest validation loss, after
    lowest_step steps, always on the same part of the text; waited: evaluations since that found none as low.
    """

    losses: list[float] = field(default_factory=list)
    skip: list[int] = field(default_factory=list)
    skipped: int = 0
    in_a_row: int = 0
    spikes: int = 0
    rollbacks: int = 0
    lowest: float = math.inf
    lowest_step: int | None = None
    waited: int = 0

    def passed_over(self):
        """A step without an update."""
        self.skipped += 1

    def not_finite(self):
        self.skipped += 1
        self.in_a_row += 1

    def is_spike(self, loss: float, sigmas: float, window: int) -> bool:
        """Looks at a finite loss, and keeps it; of a window's worth of losses or more."""
        self.in_a_row = 0
        before, self.losses = self.losses, [*self.losses, loss][-window:]
        if len(before) < window:
            return False
        spike = loss > statistics.fmean(before) + sigmas * statistics.pstdev(before)
        self.spikes += spike
        return spike

    def evaluated(self, step: int, loss: float) -> bool:
        """Whether no validation loss before was as low."""
        lower = loss < self.lowest
        if lower:
            self.lowest, self.lowest_step = loss, step
        self.waited = 0 if lower else self.waited + 1
        return lower


NOWHERE = {"micro_batch": None, "module": None, "tensor": None}


def find_origin(model: nn.Module, pieces: list[dict[str, Tensor]], autocast: torch.autocast, rng: dict) -> dict:
    """Where a number was first not finite: repeats a step's micro-batches with the random state it began with.

    -> {"micro_batch", "module", "tensor"}, by name: a weight that is so already, else the first output in the forward,
    else the first gradient in the backward. None where it does not happen again. The gradients are lost.
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
            x = x.view_as(x)  # with a gradient of its own, for others may read the same
            x.register_hook(look(name, "input's gradient"))
            return x

        return check

    edits = {}
    for name, module in model.named_modules():
        if not any(True for _ in module.children()):  # of a parent it would be the children's fault
            edits |= {Place(name): look(name, "output"), Place(name, 0): look_back(name)}
    set_rng_state(rng)
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
    """Writes down what is known of a step whose numbers are not finite, with the text of its batch."""
    numbers = {"step": step, "loss": str(loss), "grad_norm": str(norm)}
    path.write_text(json.dumps({**numbers, **origin, "texts": texts}, indent=2, ensure_ascii=False), encoding="utf-8")


def describe(origin: dict) -> str:
    if origin["tensor"] is None:
        return "it did not happen again when the step was repeated"
    return f"first in the {origin['tensor']} of {origin['module'] or 'the model'}"


def finite(*values: float) -> bool:
    return all(map(math.isfinite, values))
