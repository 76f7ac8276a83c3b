"""Who is examined, what a check may find, and how to look inside a forward without changing it."""

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
    """What is wrong, where, by how much, and what to do. `value` broke `bound`, where both are numbers."""

    check: str
    where: str
    what: str
    do: str
    value: float | None = None
    bound: float | None = None


class NotChecked(Exception):  # noqa: N818  no error: says why a check has no use for this patient
    """Raised by a check that cannot say anything about the patient, with the reason."""


@dataclass
class Patient:
    """A model and what is known of it. What is not known is None, and the checks that need it say so.

    Args:
        model: as it is to be used; no check changes it.
        tokens, targets: (b s), a batch of the kind that it reads.
        trained: whether its weights have learned something; if not they are as initialise() left them.
        tokenizer: with vocab_size, eos_id, lossless, encode(text), decode(ids) and fingerprint().
        text: some text of the kind that it reads.
        fingerprint: of the tokenizer that the model has learned with, or is to learn with.
        start_training: start_training(model) gives step(tokens, targets) -> mean loss before it: real steps of
            training, at the peak of the learning rate.
        progress: wraps what is iterated over for long.
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
        """The same code with random weights of a size at which everything shows, in float64.

        A fresh model hides much: its branches write little, or nothing where they begin at zero. A trained one hides
        what it has learned to live with. Buffers stay as they are.
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
        """Tokens in a row of the probe's."""
        return min(12, self.model.max_seq_len)

    def random_tokens(self, rows: int, length: int | None = None, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.model.vocab_size, (rows, length or self.length), generator=generator)


# --- looking inside -------------------------------------------------------------------------------------------------


@dataclass
class Layer:
    """What one attention layer got and gave in the last forward."""

    x: Tensor | None = None  # (b s d_model)
    out: Tensor | None = None  # (b s d_model)
    arguments: tuple | None = None  # of attend: q, k, v, mask, bias, soft_cap, dropout_p
    y: Tensor | None = None  # (b h q d), what attend gave


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

SAME = 1e-8  # between two ways through the same code in float64, in units of the values' own size
CLOSE = 1e-5  # to a formula in float64, where a table in float32 lies between


def deviation(found: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the largest expected value; inf where a number is not finite."""
    if found.shape != expected.shape:
        return float("inf")
    difference = (found.double() - expected.double()).abs().max().item()
    size = expected.double().abs().max().item()
    value = difference / max(size, 1e-30) if difference else 0.0
    return value if value == value else float("inf")


def rms(x: Tensor) -> float:
    """Root of the mean square: the size of a typical number in it."""
    return x.detach().double().square().mean().sqrt().item()


def worst_heads(found: Tensor, expected: Tensor, bound: float) -> str:
    """The heads (axis 1) that differ by more than bound, as words; nothing where all do."""
    if found.shape != expected.shape:
        return ""
    off = [h for h in range(expected.shape[1]) if deviation(found[:, h], expected[:, h]) > bound]
    return "" if len(off) == expected.shape[1] else f", head {', '.join(map(str, off))}"
