"""Shared by the lessons: the Lesson and its text, seeds, a small training loop, exponents."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Lesson:
    """What was measured.

    numbers: plain data (numbers, words, lists and dicts of them) by name.
    tables: rows of cells, the first row the header.
    claims: (whether the numbers support it, the claim in words).
    """

    numbers: dict
    tables: list[list[list[str]]]
    claims: list[tuple[bool, str]]

    @property
    def holds(self) -> bool:
        return all(holds for holds, _ in self.claims)


def as_text(lesson: Lesson) -> str:
    """The tables, then one claim per line, after "yes" or "NO"."""
    claims = [f"{'yes' if holds else 'NO':3}  {words}" for holds, words in lesson.claims]
    return "\n\n".join([*map(_align, lesson.tables), "\n".join(claims)])


def _align(table: list[list[str]]) -> str:
    """Columns two spaces apart, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for first, *others in table:
        cells = [first.ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, random numbers start from this seed; outside, they continue as if none had been drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def train(parameters: Iterable[nn.Parameter], loss: Callable[[], Tensor], steps: int, lr: float = 1e-2):
    """Trains with Adam for `steps` steps; each `loss()` is that of a new batch."""
    optimizer = torch.optim.Adam(parameters, lr, fused=True)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def exponent(sizes: list[int], measured: list[float]) -> float:
    """p of measured ~ size^p: the slope of a straight line through the logarithms, by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(measured), 1)[0])


def difference(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference between two tensors of one shape."""
    return (a - b).abs().max().item()


def fixed(values: Iterable[float], digits: int = 3) -> str:
    """Numbers in a row, for a cell."""
    return " ".join(f"{value:z.{digits}f}" for value in values)
