"""Why scores are divided by sqrt(d_k): otherwise a wide head attends to a single key and hardly learns."""

import math

import torch
from torch import Tensor

from insight.lessons.lesson import Lesson, seeded
from model import functional

WIDTHS = [4, 16, 64, 256, 1024]
QUERIES, KEYS = 512, 16


def lesson() -> Lesson:
    with seeded(0):
        rows = [_measure(d_k) for d_k in WIDTHS]
    numbers = {"d_k": WIDTHS, **{name: [row[name] for row in rows] for name in rows[0]}}
    titles = ["variance", "scaled", "entropy", "scaled", "gradient", "scaled"]
    digits = [1, 2, 3, 3, 4, 4]
    table = [["d_k", *titles]]
    for d_k, row in zip(WIDTHS, rows, strict=True):
        table.append([str(d_k), *(f"{x:.{n}f}" for x, n in zip(row.values(), digits, strict=True))])
    raw, scaled = numbers["variance"], numbers["variance, scaled"]
    entropy, gradient = numbers["entropy"], numbers["gradient"]
    even, even_gradient = numbers["entropy, scaled"], numbers["gradient, scaled"]
    claims = [
        (
            all(abs(variance / d_k - 1) < 0.1 for d_k, variance in zip(WIDTHS, raw, strict=True)),
            "the variance of q.k is d_k, for q and k of variance 1",
        ),
        (all(abs(variance - 1) < 0.1 for variance in scaled), "divided by sqrt(d_k) it is 1, whatever the width"),
        (
            entropy == sorted(entropy, reverse=True) and entropy[-1] < entropy[0] / 10,
            f"without the division, the entropy of {KEYS} weights falls from {entropy[0]:.3f} to "
            f"{entropy[-1]:.3f} nats "
            f"(uniform: {math.log(KEYS):.3f})",
        ),
        (max(even) - min(even) < 0.1, f"with the division, the entropy stays at {sum(even) / len(even):.2f}"),
        (
            gradient[-1] < gradient[0] / 5,
            f"a saturated softmax passes little gradient: {gradient[0]:.4f} becomes {gradient[-1]:.4f}",
        ),
        (
            max(even_gradient) < 1.1 * min(even_gradient),
            f"with the division, the gradient stays at {sum(even_gradient) / len(even_gradient):.2f}",
        ),
    ]
    return Lesson(numbers, [table], claims)


def _measure(d_k: int) -> dict[str, float]:
    q, k, v = torch.randn(QUERIES, 1, d_k), torch.randn(QUERIES, KEYS, d_k), torch.randn(QUERIES, KEYS)
    raw = (q * k).sum(-1)
    result = {}
    for name, measure in (("variance", torch.var), ("entropy", _entropy), ("gradient", lambda x: _gradient(x, v))):
        for suffix, scores in (("", raw), (", scaled", raw / math.sqrt(d_k))):
            result[name + suffix] = measure(scores).item()
    return result


def _entropy(scores: Tensor) -> Tensor:
    """Entropy of the weights of scores (queries, keys) in nats, averaged over queries."""
    weights = functional.softmax(scores)
    return -torch.special.xlogy(weights, weights).sum(-1).mean()


def _gradient(scores: Tensor, v: Tensor) -> Tensor:
    """Norm of the gradient that reaches the scores of a query from its output, a mean of values of variance 1."""
    scores = scores.clone().requires_grad_()
    (functional.softmax(scores) * v).sum().backward()
    return scores.grad.norm(dim=-1).mean()


def draw(numbers: dict, figure):
    panels = figure.subplots(1, 3)
    for axes, name in zip(panels, ("variance", "entropy", "gradient"), strict=True):
        axes.plot(numbers["d_k"], numbers[name], "o-", label="q.k")
        axes.plot(numbers["d_k"], numbers[f"{name}, scaled"], "o-", label="q.k / sqrt(d_k)")
        axes.set(xscale="log", xlabel="d_k", title=name)
        axes.set_xticks(numbers["d_k"], numbers["d_k"])
        axes.minorticks_off()
    panels[0].set_yscale("log")
    for axes in panels[1:]:
        axes.set_ylim(bottom=0)
    panels[0].legend()
