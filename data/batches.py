"""Batch t as a pure function of (seed, t): resuming needs no loader state, only the number of the step.

The corpus is cut into windows of seq_len tokens; an epoch visits each once, in an order that is computed and not
stored: a permutation keyed by seed and epoch. Epochs begin at different offsets, so that the same token is not always
seen at the same place.
"""

import numpy as np
import torch
from torch import Tensor

from data.corpus import Tokens

ROUNDS = 6


def mix(x: np.ndarray) -> np.ndarray:
    """A hash of 64-bit numbers: every bit of the input changes about half of the output (splitmix64, 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key(*numbers: int) -> np.ndarray:
    """One 64-bit number out of several."""
    out = np.zeros(1, np.uint64)
    for number in numbers:
        out = mix(out ^ np.uint64(number))
    return out


def permute(index: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Where a random-looking permutation of 0 .. n-1 sends each index (any shape), in constant memory.

    A Feistel network permutes the numbers of 2h bits, whatever its round function; a result of n or above is sent
    through again until it falls below (cycle walking, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    bits, mask = np.uint64(half), np.uint64(2**half - 1)
    keys = [key(seed, epoch, round) for round in range(ROUNDS)]

    def feistel(x):
        left, right = x >> bits, x & mask
        for k in keys:
            left, right = right, left ^ (mix(right ^ k) & mask)
        return (left << bits) | right

    x = feistel(index.astype(np.uint64))
    while (outside := x >= n).any():
        x[outside] = feistel(x[outside])
    return x.astype(np.int64)


class Batches:
    """batch(t) gives the tokens and targets of step t, each (rows, seq_len), int64; targets are one token ahead."""

    def __init__(self, tokens: Tokens, rows: int, seq_len: int, seed: int):
        self.tokens, self.rows, self.seq_len, self.seed = tokens, rows, seq_len, seed
        spare = len(tokens) - 1  # the last token is a target only
        self.windows = max(1, (spare - seq_len + 1) // seq_len)
        self.offsets = min(seq_len, spare - self.windows * seq_len + 1)

    def starts(self, step: int) -> np.ndarray:
        """First token of each row of batch `step`."""
        ordinal = step * self.rows + np.arange(self.rows)
        epochs, index = ordinal // self.windows, ordinal % self.windows
        starts = np.empty(self.rows, np.int64)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            offset = int(key(self.seed, epoch, ROUNDS)[0] % np.uint64(self.offsets))
            starts[here] = offset + self.seq_len * permute(index[here], self.windows, self.seed, epoch)
        return starts

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        rows = np.stack([self.tokens.read(start, self.seq_len + 1) for start in self.starts(step).tolist()])
        rows = torch.from_numpy(rows.astype(np.int64))
        return rows[:, :-1], rows[:, 1:]

    def epoch(self, step: int) -> float:
        """Epochs done before step `step`."""
        return step * self.rows / self.windows
