"""An n-gram model as a yardstick: what counting alone predicts, of the same training text.

Interpolated Kneser-Ney smoothing with three discounts ("An Empirical Study of Smoothing Techniques for Language
Modeling", Chen and Goodman, 1998, section 3). An n-gram is known by the number of its beginning and its last token, so
that counting is sorting, one order after the other, and looking up is a binary search.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

DISCOUNTS = (0.5, 1.0, 1.5)  # where a text is too small, or too even, to estimate them


@dataclass
class Level:
    """The n-grams of one order, ascending by key: number of the beginning (its context) * vocab_size + last token.

    Of each pair, the first array holds what an n-gram gets by itself, the second what a context leaves to shorter ones:
    by how often n-grams were seen, which counts in the highest order, and by how many different tokens were seen in
    front of them, which counts in those below.
    """

    keys: np.ndarray
    by_count: tuple[np.ndarray, np.ndarray]
    by_continuation: tuple[np.ndarray, np.ndarray] | None = None


@dataclass
class NGrams:
    vocab_size: int
    levels: list[Level]  # of order 1, 2, ...


def fit(tokens: np.ndarray, vocab_size: int, order: int, progress: Callable = iter) -> NGrams:
    """Counts the n-grams of a text (n,) up to an order. ValueError for a text that is shorter than one.

    Takes time and memory in proportion to the tokens: with order 5 one or two seconds a million and, if most n-grams
    are different ones, 130 bytes each.
    """
    if len(tokens) < order:
        raise ValueError(f"n-grams of order {order} need a text of {order} tokens or more, got {len(tokens)}")
    levels: list[Level] = []
    numbers = np.zeros(len(tokens) + 1, np.int64)  # of the n-gram that begins at each token; the empty one has 0
    n_contexts = 1
    for n in progress(range(1, order + 1)):
        keys, somewhere, which, counts = np.unique(
            numbers[: len(tokens) - n + 1] * vocab_size + tokens[n - 1 :],
            return_index=True,
            return_inverse=True,
            return_counts=True,
        )
        if levels:  # each different n-gram is a token seen in front of its end
            shorter = levels[-1]
            continuations = np.bincount(numbers[somewhere + 1], minlength=n_contexts)
            shorter.by_continuation = smooth(continuations, shorter.keys // vocab_size, len(shorter.by_count[1]))
        levels.append(Level(keys, smooth(counts, keys // vocab_size, n_contexts)))
        numbers, n_contexts = which, len(keys)
    return NGrams(vocab_size, levels)


def smooth(counts: np.ndarray, contexts: np.ndarray, n_contexts: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts of n-grams and their contexts -> what each n-gram gets by itself, and what each context has left.

    The counts of a context, less what is taken off each, over their sum; 1 is left where a context has none.
    """
    taken = discounts(counts)[np.minimum(counts, 3)]
    total = np.bincount(contexts, counts, n_contexts)
    left = np.bincount(contexts, taken, n_contexts)
    left, total = np.where(total > 0, left, 1.0), np.where(total > 0, total, 1.0)
    return ((counts - taken) / total[contexts]).astype(np.float32), (left / total).astype(np.float32)


def discounts(counts: np.ndarray) -> np.ndarray:
    """What is taken off a count of 0, 1, 2, and 3 or more: equation 17 of Chen and Goodman."""
    n1, n2, n3, n4 = np.bincount(np.minimum(counts, 5), minlength=6)[1:5]
    if min(n1, n2, n3, n4) > 0:
        y = n1 / (n1 + 2 * n2)
        estimated = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
        if min(estimated) > 0:
            return np.array([0.0, *estimated])
    return np.array([0.0, *DISCOUNTS])


def probabilities(model: NGrams, tokens: np.ndarray) -> np.ndarray:
    """tokens (... s) -> (order, ... s): of each, given those before it in its row, under a model of each order.

    Each row of the result is a model of its own, that of order 1 first; a token that was never seen has a probability,
    too. What stands at the beginning of a row is predicted from what there is.
    """
    contexts = np.zeros(tokens.shape, np.int64)  # number of what stands before each token; -1: never seen
    shorter = np.full(tokens.shape, 1 / model.vocab_size)
    out = []
    for level in model.levels:
        keys = contexts * model.vocab_size + tokens  # below 0, like no other, where the context was never seen
        numbers = np.searchsorted(level.keys, keys).clip(max=len(level.keys) - 1)
        numbers[level.keys[numbers] != keys] = -1

        def interpolate(own, left, numbers=numbers, contexts=contexts, shorter=shorter):
            return np.where(numbers >= 0, own[numbers], 0.0) + np.where(contexts >= 0, left[contexts], 1.0) * shorter

        out.append(interpolate(*level.by_count))
        if level.by_continuation is not None:
            shorter = interpolate(*level.by_continuation)
        contexts = np.concatenate([np.full((*tokens.shape[:-1], 1), -1), numbers[..., :-1]], axis=-1)
    return np.stack(out)
