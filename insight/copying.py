"""Finds passages of rows of tokens that occur word for word in a text, by their hashes.

The text is read once, in pieces, so that memory does not depend on its length.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PIECE = 2**18  # tokens read at once: their hashes fit into the CPU's cache
FILTER = 2**16


@dataclass
class Copies:
    """lengths: of passages, in tokens. inside[i] (rows, s): whether a token is in a passage of lengths[i] that occurs.

    longest: row, first token, number of tokens and index in the text of the longest passage; None if there is none of
    lengths[0] tokens.
    """

    lengths: list[int]
    inside: list[np.ndarray]
    longest: tuple[int, int, int, int] | None


def find_copies(rows: np.ndarray, text, shortest: int = 8, progress: Callable = iter) -> Copies:
    """Finds the passages of `rows` (rows, s) that occur in `text`: anything with len and read(start, length).

    Lengths are `shortest`, a power of two, times powers of two up to s. A passage counts as found if its 64-bit hash
    occurs: the chance of a false one is about one in a million. For the longest, the tokens themselves are compared.
    """
    s = rows.shape[1]
    if shortest < 1 or shortest & (shortest - 1):
        raise ValueError(f"shortest must be a power of two, got {shortest}")
    lengths = [shortest * 2**i for i in range(s.bit_length()) if shortest * 2**i <= s]
    ours = [hashes(rows, n) for n in lengths]
    distinct = [np.unique(of_length, return_inverse=True) for of_length in ours]
    found = [np.zeros(len(values), bool) for values, _ in distinct]
    longest, goal = None, shortest  # goal: the length that the next longest passage must have

    def ours_of_goal() -> tuple[np.ndarray, np.ndarray]:
        i = np.searchsorted(lengths, goal, side="right") - 1
        return np.unique(stretch(ours[i], lengths[i], goal), return_index=True)

    wanted = ours_of_goal() if lengths else None
    for start in progress(range(0, len(text), PIECE)):
        piece = np.asarray(text.read(start, min(PIECE + s - 1, len(text) - start)))
        places = np.arange(len(piece))  # where found passages start; fewer with each length
        for i, n in enumerate(lengths):
            theirs = hashes(piece, n)
            places = places[: np.searchsorted(places, len(theirs))]
            at, which = members(theirs[places], distinct[i][0])
            places = places[at]
            found[i][which] = True
            while n <= goal < min(2 * n, s + 1):  # try one token more as long as a passage is found
                starts = places[: np.searchsorted(places, len(piece) - goal + 1)]
                at, which = members(stretch(theirs, n, goal, starts), wanted[0])
                if len(at) == 0:
                    break
                row, first = divmod(int(wanted[1][which[0]]), s - goal + 1)
                place = int(starts[at[0]])
                assert np.array_equal(piece[place : place + goal], rows[row, first : first + goal])
                longest, goal = (row, first, goal, start + place), goal + 1
                if goal <= s:
                    wanted = ours_of_goal()
            if len(places) == 0:
                break
    occurs = [flags[inverse].reshape(len(rows), -1) for flags, (_, inverse) in zip(found, distinct, strict=True)]
    return Copies(lengths, [cover(starts, n) for starts, n in zip(occurs, lengths, strict=True)], longest)


def cover(starts: np.ndarray, n: int) -> np.ndarray:
    """Whether a passage of n tokens starts at each token (rows, s - n + 1) -> whether a token is in one (rows, s)."""
    rows, places = starts.shape
    inside = np.zeros((rows, places + n - 1), bool)
    for offset in range(n):
        inside[:, offset : offset + places] |= starts
    return inside


def hashes(tokens: np.ndarray, n: int) -> np.ndarray:
    """(... s) -> (... s - n + 1): a 64-bit hash of each passage of n tokens, a power of two, by doubling."""
    out, size = mix(tokens.astype(np.uint64)), 1
    while size < n:
        out, size = join(out[..., :-size], out[..., size:]), 2 * size
    return out


def stretch(hashed: np.ndarray, n: int, length: int, places: np.ndarray | slice = slice(None)) -> np.ndarray:
    """Hashes of passages of n tokens (... s - n + 1) -> hashes of passages of n .. 2 n - 1 tokens, from their two ends.

    places: where the passages start.
    """
    if length == n:
        return hashed[..., places]
    ends = hashed[..., length - n :]
    return join(hashed[..., : ends.shape[-1]][..., places], ends[..., places])


def join(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return mix(left * np.uint64(0x9E3779B97F4A7C15) + right)


def mix(x: np.ndarray) -> np.ndarray:
    """Mixes all bits."""
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return x ^ (x >> np.uint64(32))


def members(values: np.ndarray, among: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The indices of `values` that are in `among` (ascending), and the indices of their matches there."""
    low_bits = np.zeros(FILTER, bool)
    low_bits[among % FILTER] = True
    at = np.flatnonzero(low_bits[values % FILTER])  # the others need no search
    which = np.searchsorted(among, values[at]).clip(max=len(among) - 1)
    equal = among[which] == values[at]
    return at[equal], which[equal]
