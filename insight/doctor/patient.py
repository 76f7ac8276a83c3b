"""The examined model, the findings of a check, and tools to watch a forward without changing it."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from model import GPT
from model.hooks import Place, Site, attending, editing


@dataclass(frozen=True)
class Finding:
    """What is wrong, where, by how much, and what to do. `value` violates `bound`, if both are given."""

    check: str
    where: str
    what: str
    do: str
    value: float | None = None
    bound: float | None = None


class NotChecked(Exception):  # noqa: N818  not an error: the reason why a check does not apply
    """Raised by a check that does not apply to the patient, with the reason."""


@dataclass
class Patient:
    """A model and what is known about it. What is not known is None; the checks that need it are then not made.

    Args:
        model: in evaluation mode; no check changes it.
        tokens, targets: (b s), a batch of the model's kind of text.
        trained: whether it has been trained; if not, its weights are as initialise() left them.
        tokenizer: with vocab_size, eos_id, lossless, encode(text), decode(ids) and fingerprint().
        text: a piece of the model's kind of text.
        fingerprint: of the tokenizer that the model is trained with.
        start_training: start_training(model) returns step(tokens, targets) -> the mean loss before it: a real training
            step, at the initial learning rate.
        progress: wraps long iterations.
    """

    model: GPT
    tokens: Tensor
    targets: Tensor
    trained: bool
    tokenizer: Any = None
    text: str | None = None
    fingerprint: str | None = None
    start_training: Callable[[GPT], Callable[[Tensor, Tensor], float]] | None = None
    progress: Callable[[Iterable], Iterable] = iter

    @cached_property
    def probe(self) -> GPT:
        """The same code with random weights, large enough to reveal every fault, in float64.

        A new model hides faults, since its branches write little, or nothing if they are initialised to zero. A trained
        one hides faults that it has adapted to. Buffers stay as they are.
        """
        probe = copy.deepcopy(self.model).double().cpu().eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        for parameter in probe.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 1 + noise / 10)
        for embedding in (module for module in probe.modules() if isinstance(module, nn.Embedding)):
            embedding.weight.mul_(embedding.weight.shape[-1] ** 0.5)
        return probe

    @property
    def length(self) -> int:
        """The number of tokens in the probe's rows."""
        return min(12, self.model.max_seq_len)

    def random_tokens(self, rows: int, length: int | None = None, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.model.vocab_size, (rows, length or self.length), generator=generator)


# --- watching a forward ---------------------------------------------------------------------------------------------


@dataclass
class Layer:
    """The inputs and outputs of an attention layer in the last forward."""

    x: Tensor | None = None  # (b s d_model)
    out: Tensor | None = None  # (b s d_model)
    arguments: tuple | None = None  # of attend: q, k, v, mask, bias, soft_cap, dropout_p
    y: Tensor | None = None  # (b h q d), the result of attend


@contextmanager
def watched(model: GPT) -> Iterator[list[Layer]]:
    """`with watched(model) as layers: model(tokens)` fills one Layer for each attention layer."""
    layers = [Layer() for _ in model.blocks]

    def attend(i: int, own: Callable, *arguments) -> tuple[Tensor, Tensor | None]:
        layers[i].arguments = arguments
        layers[i].y, weights = own(*arguments)
        return layers[i].y, weights

    ends = {Place(f"blocks.{i}.attention", 0): partial(setattr, layer, "x") for i, layer in enumerate(layers)}
    ends |= {Site("attention", i): partial(setattr, layer, "out") for i, layer in enumerate(layers)}
    with attending(model, attend), editing(model, ends):
        yield layers


# --- comparing ------------------------------------------------------------------------------------------------------

SAME = 1e-8  # bound for two ways through the same code in float64, relative to the largest value
CLOSE = 1e-5  # the same for a formula in float64 and code that uses a table in float32


def deviation(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value; inf if a number is not finite."""
    if found.shape != expected.shape:
        return float("inf")
    difference = (found.double() - expected.double()).abs().max().item()
    size = expected.double().abs().max().item()
    value = difference / max(size, 1e-30) if difference else 0.0
    return value if value == value else float("inf")


def rms(x: Tensor) -> float:
    """The root mean square."""
    return x.detach().double().square().mean().sqrt().item()


def worst_heads(found: Tensor, expected: Tensor, bound: float) -> str:
    """The heads (axis 1) that differ by more than bound, as words; "" if all do."""
    if found.shape != expected.shape:
        return ""
    off = [h for h in range(expected.shape[1]) if deviation(found[:, h], expected[:, h]) > bound]
    return "" if len(off) == expected.shape[1] else f", head {', '.join(map(str, off))}"
