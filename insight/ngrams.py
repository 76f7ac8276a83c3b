"""N-gram models as baselines, counted on the same training text.

Interpolated Kneser-Ney smoothing with three discounts ("An Empirical Study of Smoothing Techniques for Language
Modeling", Chen and Goodman, 1998, section 3). An n-gram is identified by the number of its context and its last token:
counting is sorting, one order after the other, and a look-up is a binary search.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

DISCOUNTS = (0.5, 1.0, 1.5)  # if a text is too short, or too uniform, to estimate them


@dataclass
class Level:
    """The n-grams of one order, ascending by key: number of the context * vocab_size + last token.

    Each pair holds the probability mass of an n-gram itself, and the mass that a context leaves to shorter n-grams:
    by_count from the number of occurrences, for the highest order; by_continuation from the number of different tokens
    before the n-gram, for lower orders.
    """

    keys: np.ndarray
    by_count: tuple[np.ndarray, np.ndarray]
    by_continuation: tuple[np.ndarray, np.ndarray] | None = None


@dataclass
class NGrams:
    vocab_size: int
    levels: list[Level]  # of order 1, 2, ...


def fit(tokens: np.ndarray, vocab_size: int, order: int, progress: Callable = iter) -> NGrams:
    """Counts the n-grams of a text (n,) up to an order. ValueError if the text is shorter than that.

    Time and memory are proportional to the tokens: with order 5, one or two seconds per million and, if most n-grams
    differ, 130 bytes each.
    """
    if len(tokens) < order:
        raise ValueError(f"n-grams of order {order} need a text of {order} tokens or more, got {len(tokens)}")
    levels: list[Level] = []
    numbers = np.zeros(len(tokens) + 1, np.int64)  # of the n-gram that starts at each token; the empty one is 0
    n_contexts = 1
    for n in progress(range(1, order + 1)):
        keys, somewhere, which, counts = np.unique(
            numbers[: len(tokens) - n + 1] * vocab_size + tokens[n - 1 :],
            return_index=True,
            return_inverse=True,
            return_counts=True,
        )
        if levels:  # each distinct n-gram is a distinct token before its suffix
            shorter = levels[-1]
            continuations = np.bincount(numbers[somewhere + 1], minlength=n_contexts)
            shorter.by_continuation = smooth(continuations, shorter.keys // vocab_size, len(shorter.by_count[1]))
        levels.append(Level(keys, smooth(counts, keys // vocab_size, n_contexts)))
        numbers, n_contexts = which, len(keys)
    return NGrams(vocab_size, levels)


def smooth(counts: np.ndarray, contexts: np.ndarray, n_contexts: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts of n-grams and their contexts -> the mass of each n-gram itself, and the mass that each context leaves.

    The mass of an n-gram is its count, minus the discount, over the sum of its context's counts; a context without
    n-grams leaves 1.
    """
    taken = discounts(counts)[np.minimum(counts, 3)]
    total = np.bincount(contexts, counts, n_contexts)
    left = np.bincount(contexts, taken, n_contexts)
    left, total = np.where(total > 0, left, 1.0), np.where(total > 0, total, 1.0)
    return ((counts - taken) / total[contexts]).astype(np.float32), (left / total).astype(np.float32)


def discounts(counts: np.ndarray) -> np.ndarray:
    """The discounts of counts 0, 1, 2, and 3 or more: equation 17 of Chen and Goodman."""
    n1, n2, n3, n4 = np.bincount(np.minimum(counts, 5), minlength=6)[1:5]
    if min(n1, n2, n3, n4) > 0:
        y = n1 / (n1 + 2 * n2)
        estimated = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
        if min(estimated) > 0:
            return np.array([0.0, *estimated])
    return np.array([0.0, *DISCOUNTS])


def probabilities(model: NGrams, tokens: np.ndarray) -> np.ndarray:
    """tokens (... s) -> (order, ... s): the probability of each token given those before it in its row.

    Each row of the result is the model of one order, 1 first. Unseen tokens have a probability too. Tokens at the start
    of a row have shorter contexts.
    """
    contexts = np.zeros(tokens.shape, np.int64)  # the number of each token's context; -1: never seen
    shorter = np.full(tokens.shape, 1 / model.vocab_size)
    out = []
    for level in model.levels:
        keys = contexts * model.vocab_size + tokens  # negative, and so not found, if the context was never seen
        numbers = np.searchsorted(level.keys, keys).clip(max=len(level.keys) - 1)
        numbers[level.keys[numbers] != keys] = -1

        def interpolate(own, left, numbers=numbers, contexts=contexts, shorter=shorter):
            return np.where(numbers >= 0, own[numbers], 0.0) + np.where(contexts >= 0, left[contexts], 1.0) * shorter

        out.append(interpolate(*level.by_count))
        if level.by_continuation is not None:
            shorter = interpolate(*level.by_continuation)
        contexts = np.concatenate([np.full((*tokens.shape[:-1], 1), -1), numbers[..., :-1]], axis=-1)
    return np.stack(out)
