"""How much of some rows of tokens stands word for word in a text: passages, found by their hashes.

The text is read as a stream, once, whatever its length; memory holds a piece of it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PIECE = 2**18  # tokens looked at at once: their hashes fit into a processor's cache
FILTER = 2**16


@dataclass
class Copies:
    """lengths: of passages, in tokens. inside[i] (rows, s): which tokens lie in a passage of lengths[i] that was found.

    longest: row, first token and number of tokens of the longest passage found, and where it stands in the text; None
    where none of lengths[0] tokens was found.
    """

    lengths: list[int]
    inside: list[np.ndarray]
    longest: tuple[int, int, int, int] | None


def find_copies(rows: np.ndarray, text, shortest: int = 8, progress: Callable = iter) -> Copies:
    """Which passages of `rows` (rows, s) stand in `text`: anything with len and read(start, length).

    Lengths are `shortest`, a power of two, and its doubles up to s. A passage counts as found when its 64-bit hash is:
    a false one among so many has a chance of one in a million; of the longest the tokens themselves are compared.
    """
    s = rows.shape[1]
    if shortest < 1 or shortest & (shortest - 1):
        raise ValueError(f"shortest must be a power of two, got {shortest}")
    lengths = [shortest * 2**i for i in range(s.bit_length()) if shortest * 2**i <= s]
    ours = [hashes(rows, n) for n in lengths]
    distinct = [np.unique(some, return_inverse=True) for some in ours]
    found = [np.zeros(len(values), bool) for values, _ in distinct]
    longest, goal = None, shortest  # how long the next longest must be

    def ours_of_goal() -> tuple[np.ndarray, np.ndarray]:
        i = np.searchsorted(lengths, goal, side="right") - 1
        return np.unique(stretch(ours[i], lengths[i], goal), return_index=True)

    wanted = ours_of_goal() if lengths else None
    for start in progress(range(0, len(text), PIECE)):
        piece = np.asarray(text.read(start, min(PIECE + s - 1, len(text) - start)))
        places = np.arange(len(piece))  # where passages of ours begin, of the longer lengths fewer and fewer
        for i, n in enumerate(lengths):
            theirs = hashes(piece, n)
            places = places[: np.searchsorted(places, len(theirs))]
            at, which = members(theirs[places], distinct[i][0])
            places = places[at]
            found[i][which] = True
            while n <= goal < min(2 * n, s + 1):  # one token more, as long as there is such a passage
                some = places[: np.searchsorted(places, len(piece) - goal + 1)]
                at, which = members(stretch(theirs, n, goal, some), wanted[0])
                if len(at) == 0:
                    break
                row, first = divmod(int(wanted[1][which[0]]), s - goal + 1)
                place = int(some[at[0]])
                assert np.array_equal(piece[place : place + goal], rows[row, first : first + goal])
                longest, goal = (row, first, goal, start + place), goal + 1
                if goal <= s:
                    wanted = ours_of_goal()
            if len(places) == 0:
                break
    starts = [flags[inverse].reshape(len(rows), -1) for flags, (_, inverse) in zip(found, distinct, strict=True)]
    return Copies(lengths, [cover(some, n) for some, n in zip(starts, lengths, strict=True)], longest)


def cover(starts: np.ndarray, n: int) -> np.ndarray:
    """Where passages of n tokens start (rows, s - n + 1) -> which tokens lie in one (rows, s)."""
    rows, places = starts.shape
    inside = np.zeros((rows, places + n - 1), bool)
    for offset in range(n):
        inside[:, offset : offset + places] |= starts
    return inside


def hashes(tokens: np.ndarray, n: int) -> np.ndarray:
    """(... s) -> (... s - n + 1): 64 bits for each passage of n tokens, a power of two; from those of half the size."""
    out, size = mix(tokens.astype(np.uint64)), 1
    while size < n:
        out, size = join(out[..., :-size], out[..., size:]), 2 * size
    return out


def stretch(some: np.ndarray, n: int, length: int, places: np.ndarray | slice = slice(None)) -> np.ndarray:
    """Hashes of passages of n tokens (... s - n + 1) -> of n .. 2 n - 1 tokens, whose two ends of n tokens they join.

    places: only of passages that begin there.
    """
    if length == n:
        return some[..., places]
    ends = some[..., length - n :]
    return join(some[..., : ends.shape[-1]][..., places], ends[..., places])


def join(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return mix(left * np.uint64(0x9E3779B97F4A7C15) + right)


def mix(x: np.ndarray) -> np.ndarray:
    """Spreads every bit over the others."""
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return x ^ (x >> np.uint64(32))


def members(values: np.ndarray, among: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of some values are among others, ascending: their indices, and those of what they are equal to."""
    low_bits = np.zeros(FILTER, bool)
    low_bits[among % FILTER] = True
    at = np.flatnonzero(low_bits[values % FILTER])  # all the others need no search
    which = np.searchsorted(among, values[at]).clip(max=len(among) - 1)
    equal = among[which] == values[at]
    return at[equal], which[equal]
