"""Batch t is a pure function of (seed, t): resuming needs no loader state, only the step number.

The corpus is a sequence of rows: windows, or packed documents. An epoch visits each row once, in an order that is
computed, not stored: a permutation keyed by seed and epoch. Rows are numbered from the start of training, so the batch
size changes only how many are taken at once, not their order. Each epoch cuts its windows at a different offset, so a
token is not always at the same position.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from data.corpus import IGNORE, Corpus, Tokens
from data.tokenizer import Tokenizer

ROUNDS = 6
BLOCK = 4096  # rows whose starts are computed at once; fewer if an epoch has fewer
ORDER = 2  # version of the batch order; runs started with order 1 keep it when they resume


def mix(x: np.ndarray) -> np.ndarray:
    """Hashes 64-bit numbers: flipping any input bit flips about half of the output bits (splitmix64, 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key(*numbers: int) -> np.ndarray:
    """Hashes several integers to one 64-bit number."""
    out = np.zeros(1, np.uint64)
    for number in numbers:
        out = mix(out ^ np.uint64(number))
    return out


def permute(index: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Maps each index (any shape) by a pseudorandom permutation of 0 .. n-1, in constant memory.

    A Feistel network permutes the 2h-bit numbers, whatever its round function; a result of n or more is passed through
    again until it is below n (cycle walking, "Ciphers with Arbitrary Finite Domains", 2002).
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


class Windows:
    """Rows are consecutive windows of seq_len tokens, cut from the concatenated text (packing "stream").

    An epoch's offset is drawn from all that leave room for its windows, so every token but the first is a target in
    some epoch. Order 1 drew from at most seq_len offsets, so up to seq_len - 1 tokens at the end were never seen.
    """

    def __init__(self, tokens: Tokens, seq_len: int, seed: int, order: int = ORDER):
        self.tokens, self.seq_len, self.seed = tokens, seq_len, seed
        spare = len(tokens) - 1  # the last token is a target only
        self.count = max(1, (spare - seq_len + 1) // seq_len)
        self.offsets = spare - self.count * seq_len + 1
        if order == 1:
            self.offsets = min(seq_len, self.offsets)
        self.block = min(BLOCK, self.count)
        self._of_block = lru_cache(maxsize=4)(lambda i: self.starts(np.arange(i * self.block, (i + 1) * self.block)))

    def starts(self, ordinals: np.ndarray) -> np.ndarray:
        """Returns the first token of each row; `ordinals` number rows from the start of training."""
        epochs, index = ordinals // self.count, ordinals % self.count
        starts = np.empty(len(ordinals), np.int64)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            offset = int(key(self.seed, epoch, ROUNDS)[0] % np.uint64(self.offsets))
            starts[here] = offset + self.seq_len * permute(index[here], self.count, self.seed, epoch)
        return starts

    def rows(self, ordinals: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the rows with these ordinals, which must ascend: tokens and targets, each (n, seq_len)."""
        blocks = ordinals // self.block  # computing many starts at once costs little more than a few
        parts = [self._of_block(i)[ordinals[blocks == i] % self.block] for i in np.unique(blocks).tolist()]
        starts = np.concatenate(parts)
        rows = self.tokens.windows(starts, self.seq_len + 1)
        if self.tokens.loss_mask is None:
            return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
        targets = [self.tokens.targets(start + 1, self.seq_len) for start in starts.tolist()]
        return {"tokens": rows[:, :-1], "targets": np.stack(targets)}


class Documents:
    """Rows are packed with documents, which do not attend to each other (packing "documents").

    A document longer than a row is cut into pieces of seq_len. Rows are packed in corpus order, each filled until the
    next piece does not fit; each epoch visits the rows in its own order. The rest of a row is padding: its targets are
    IGNORE, and it has document number -1. Pieces of conversations that hold no part of an answer are left out.
    """

    def __init__(self, tokens: Tokens, seq_len: int, seed: int, tokenizer: Tokenizer):
        self.tokens, self.seq_len, self.seed = tokens, seq_len, seed
        starts, ends = tokenizer.document_bounds(tokens)
        pairs = ends - starts - 1  # inputs that have a target in their document
        starts, pairs = starts[pairs > 0], pairs[pairs > 0]
        if len(starts) == 0:
            raise ValueError("packing=documents needs documents of at least 2 tokens, but there are none")
        cuts = -(-pairs // seq_len)
        piece = np.arange(cuts.sum()) - np.repeat(np.cumsum(cuts) - cuts, cuts)  # number of the piece in its document
        self.starts = np.repeat(starts, cuts) + seq_len * piece
        self.lengths = np.minimum(np.repeat(pairs, cuts) - seq_len * piece, seq_len)
        if tokens.loss_mask is not None:
            loss_mask = tokens.loss_mask.find(1)
            first, end = (np.searchsorted(loss_mask, self.starts + 1 + shift) for shift in (0, self.lengths))
            self.starts, self.lengths = self.starts[end > first], self.lengths[end > first]
        filled = np.cumsum(self.lengths)
        firsts = [0]  # the first piece of each row
        while firsts[-1] < len(filled):
            before = filled[firsts[-1] - 1] if firsts[-1] else 0
            firsts.append(int(np.searchsorted(filled, before + seq_len, side="right")))
        self.firsts = np.array(firsts)
        self.count = len(firsts) - 1

    def rows(self, ordinals: np.ndarray) -> dict[str, np.ndarray]:
        shape = len(ordinals), self.seq_len
        tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64)
        positions, documents = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
        epochs, index = ordinals // self.count, ordinals % self.count
        for epoch in np.unique(epochs).tolist():
            here = np.flatnonzero(epochs == epoch)
            packed = permute(index[here], self.count, self.seed, epoch)
            for row, pack in zip(here.tolist(), packed.tolist(), strict=True):
                at = 0
                for number, piece in enumerate(range(self.firsts[pack], self.firsts[pack + 1])):
                    n = int(self.lengths[piece])
                    start = int(self.starts[piece])
                    tokens[row, at : at + n] = self.tokens.read(start, n)
                    targets[row, at : at + n] = self.tokens.targets(start + 1, n)
                    positions[row, at : at + n], documents[row, at : at + n] = np.arange(n), number
                    at += n
        return {"tokens": tokens, "targets": targets, "token_positions": positions, "documents": documents}


class Mixture:
    """Interleaves rows of several sources: after any n rows, each source has given n times its share, rounded."""

    UNITS = 2**20

    def __init__(self, sources: list, weights: list[float]):
        self.sources = sources
        ends = np.round(np.cumsum(weights) / np.sum(weights) * self.UNITS).astype(np.int64)
        self.units = np.diff(ends, prepend=0).tolist()
        self.count = sum(source.count for source in sources)

    def assign(self, ordinals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each row and the row's ordinal in that source, in closed form and evenly interleaved.

        The first source takes row n if floor(n * share) steps up there; the remaining rows, renumbered from 0, are
        shared by the other sources in the same way.
        """
        which, index = np.empty_like(ordinals), ordinals.copy()
        left, total = np.arange(len(ordinals)), self.UNITS
        for k, units in enumerate(self.units):
            n = index[left]
            before, after = n * units // total, (n + 1) * units // total
            taken = after > before
            which[left[taken]], index[left[taken]] = k, before[taken]
            left = left[~taken]
            index[left] -= before[~taken]
            total -= units
            if len(left) == 0:
                break
        return which, index

    def rows(self, ordinals: np.ndarray) -> dict[str, np.ndarray]:
        which, index = self.assign(ordinals)
        rows: dict[str, np.ndarray] = {}
        for k in np.unique(which).tolist():
            here = which == k
            for name, array in self.sources[k].rows(index[here]).items():
                rows.setdefault(name, np.empty((len(ordinals), *array.shape[1:]), array.dtype))[here] = array
        return rows


class Batches:
    """batch(t) returns the batch of step t: tokens and targets, (rows, seq_len) int64, and forward's other arguments.

    The `rows` of a batch are divided equally among the ranks: rank i takes the i-th part.
    """

    def __init__(self, source: Windows | Documents | Mixture, rows: int, rank: int = 0, ranks: int = 1):
        if rows % ranks:
            raise ValueError(
                f"a batch of {rows} rows (batch_tokens / seq_len) cannot be divided equally among {ranks} ranks"
            )
        self.source, self.rows, self.rank, self.ranks = source, rows, rank, ranks

    def batch(self, step: int) -> dict[str, Tensor]:
        mine = self.rows // self.ranks
        ordinals = step * self.rows + self.rank * mine + np.arange(mine)
        return {name: torch.from_numpy(array) for name, array in self.source.rows(ordinals).items()}

    def count(self, step: int) -> int:
        """Returns the number of targets that count in the loss of `step`, over all ranks, without communication."""
        if isinstance(self.source, Windows) and self.source.tokens.loss_mask is None:
            return self.rows * self.source.seq_len
        rows = self.source.rows(step * self.rows + np.arange(self.rows))
        return int((rows["targets"] != IGNORE).sum())

    def epoch(self, step: int) -> float:
        """Returns the epochs completed before `step`."""
        return step * self.rows / self.source.count

    def steps(self, epochs: float) -> int:
        """Returns the number of steps, at least 1, that complete `epochs`."""
        return max(1, math.ceil(round(epochs * self.source.count / self.rows, 9)))

    def stream(self, start: int, end: int, device: torch.device) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yields (count, batch) for steps start .. end - 1, the batch on `device`.

        A thread reads the next batch while the current one is used.
        """

        def read(step: int) -> tuple[int, dict[str, Tensor]]:
            batch = self.batch(step)
            count = int((batch["targets"] != IGNORE).sum()) if self.ranks == 1 else self.count(step)
            return count, {n: x.pin_memory() for n, x in batch.items()} if device.type == "cuda" else batch

        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(read, start)
            for step in range(start, end):
                count, batch = pending.result()
                if step + 1 < end:
                    pending = pool.submit(read, step + 1)
                yield count, {name: x.to(device, non_blocking=True) for name, x in batch.items()}


def make_batches(
    corpus: Corpus,
    rows: int,
    seq_len: int,
    seed: int,
    packing: str = "stream",
    rank: int = 0,
    ranks: int = 1,
    order: int = ORDER,
) -> Batches:
    """Makes the batches of a corpus, or of a weighted mixture; `packing` is "stream" or "documents"."""
    if not 1 <= order <= ORDER:
        raise ValueError(f"the run uses batch order {order}, this version knows 1 to {ORDER}")

    def source(corpus: Corpus):
        if packing == "documents":
            return Documents(corpus.train, seq_len, seed, corpus.tokenizer)
        return Windows(corpus.train, seq_len, seed, order)

    if corpus.mixture:
        sources = [source(part) for part, _ in corpus.mixture]
        return Batches(Mixture(sources, [weight for _, weight in corpus.mixture]), rows, rank, ranks)
    return Batches(source(corpus), rows, rank, ranks)
