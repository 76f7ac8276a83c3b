"""Turning scores into weights, in the form that cannot overflow."""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from insight.lessons.lesson import Lesson, difference, fixed
from model import functional

SCORES = {
    "2 1 0": [2.0, 1.0, 0.0],
    "1002 1001 1000": [1002.0, 1001.0, 1000.0],
    "89 1 0": [89.0, 1.0, 0.0],
    "-inf 1 0": [-math.inf, 1.0, 0.0],
    "-inf -inf -inf": [-math.inf] * 3,
}


def naive(x: Tensor) -> Tensor:
    """exp(x) / sum(exp(x)), as it is defined."""
    return x.exp() / x.exp().sum(-1, keepdim=True)


def shifted(x: Tensor) -> Tensor:
    """The same after x - max(x), without the special case of functional.softmax for a row with only -inf."""
    return naive(x - x.amax(-1, keepdim=True))


def lesson() -> Lesson:
    forms = {"naive": naive, "stable": functional.softmax}
    found = {name: {scores: _try(form, x) for scores, x in SCORES.items()} for name, form in forms.items()}
    x = torch.tensor(SCORES["2 1 0"])
    weights = functional.softmax(x)
    numbers = {
        "forms": found,
        "sum": weights.sum().item(),
        "order": weights.argsort().tolist() == x.argsort().tolist(),
        "after a shift": difference(functional.softmax(x + 1000), weights),
        "overflows from": {
            "float32": _first_overflow(lambda n: torch.tensor(float(n)).exp().item()),
            "float16": _first_overflow(lambda n: torch.tensor(float(n), dtype=torch.float16).exp().item()),
            "Python": _first_overflow(math.exp),
        },
        "maximum alone, all -inf": shifted(torch.tensor(SCORES["-inf -inf -inf"])).tolist(),
    }
    header = ["scores", *(title for name in forms for title in (f"{name} weights", "gradient of the first"))]
    rows = [[scores, *(fixed(part) for name in forms for part in found[name][scores])] for scores in SCORES]
    limits = numbers["overflows from"]
    (_, large_gradient), (_, empty_gradient) = found["naive"]["89 1 0"], found["naive"]["-inf -inf -inf"]
    claims = [
        (abs(numbers["sum"] - 1) < 1e-6, "the weights sum to 1"),
        (numbers["order"], "their order is that of the scores"),
        (numbers["after a shift"] == 0, "adding 1000 to every score changes nothing"),
        (limits["float32"] == 89, f"exp overflows in float32 from {limits['float32']}"),
        (limits["float16"] == 12, f"exp overflows in float16 from {limits['float16']}"),
        (
            limits["Python"] == 710,
            f"exp overflows in Python's 64-bit float only above {limits['Python'] - 1}",
        ),
        (_finite(found["stable"]), "with the maximum subtracted first, every value and gradient is finite"),
        (_all_nan(large_gradient), "where the naive form overflows, its whole gradient is NaN"),
        (
            found["stable"]["-inf 1 0"][0][0] == found["stable"]["-inf 1 0"][1][0] == 0,
            "a score of -inf gets weight exactly 0, and no gradient",
        ),
        (
            _all_nan(empty_gradient) and _all_nan(numbers["maximum alone, all -inf"]),
            "a row with only -inf gives NaN, even if the maximum is subtracted (-inf + inf)",
        ),
        (
            found["stable"]["-inf -inf -inf"] == [[0, 0, 0], [0, 0, 0]],
            "treated as a special case, it gives zeros: a query that may attend to no key gets no value",
        ),
    ]
    return Lesson(numbers, [[header, *rows]], claims)


def _try(form: Callable[[Tensor], Tensor], scores: list[float]) -> list[list[float]]:
    """The weights, and the gradient of the first of them."""
    x = torch.tensor(scores, requires_grad=True)
    weights = form(x)
    weights[0].backward()
    return [weights.tolist(), x.grad.tolist()]


def _first_overflow(exp: Callable[[int], float]) -> int:
    for n in itertools.count():
        try:
            if math.isinf(exp(n)):
                return n
        except OverflowError:
            return n


def _all_nan(values: list[float]) -> bool:
    return all(map(math.isnan, values))


def _finite(results: dict[str, list[list[float]]]) -> bool:
    return all(math.isfinite(value) for parts in results.values() for part in parts for value in part)


def draw(numbers: dict, figure):
    x = torch.arange(0.0, 120.0)
    axes = figure.subplots()
    for name, form, style in (("stable", functional.softmax, "-"), ("naive", naive, "--")):
        weights = torch.stack([form(torch.tensor([value, 60.0, 0.0]))[0] for value in x])
        axes.plot(x, weights, style, label=name, linewidth=2)
    limit = numbers["overflows from"]["float32"]
    axes.axvline(limit, color="grey", linestyle=":", label=f"from {limit} the naive form is NaN")
    axes.set(xlabel="score x", ylabel="weight of x beside 60 and 0, float32")
    axes.legend()
