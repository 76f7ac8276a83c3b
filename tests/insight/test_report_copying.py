"""The search for copies against the one that tries everything."""

import numpy as np
import pytest

from data.corpus import Tokens
from insight import copying
from insight.copying import find_copies


def by_trying(rows: np.ndarray, text: np.ndarray, n: int) -> np.ndarray:
    """Which tokens of rows lie in a passage of n tokens that stands in the text."""
    there = {tuple(text[i : i + n].tolist()) for i in range(len(text) - n + 1)}
    inside = np.zeros(rows.shape, bool)
    for row in range(len(rows)):
        for i in range(rows.shape[1] - n + 1):
            if tuple(rows[row, i : i + n].tolist()) in there:
                inside[row, i : i + n] = True
    return inside


@pytest.mark.parametrize("piece", [8, 50, 10_000])  # where passages lie across pieces, too
@pytest.mark.parametrize(("vocab_size", "shortest"), [(2, 8), (3, 4), (50, 1), (50_000, 8), (1, 8)])
def test_it_finds_what_trying_everything_finds(monkeypatch, vocab_size, shortest, piece):
    monkeypatch.setattr(copying, "PIECE", piece)
    rng = np.random.default_rng(vocab_size)
    text = rng.integers(vocab_size, size=600).astype(np.uint16)
    rows = rng.integers(vocab_size, size=(4, 37))
    rows[0, 5:25] = text[95:115]  # a passage of 20
    rows[3, 30:] = text[-7:]
    found = find_copies(rows, Tokens([text[:99], text[99:]]), shortest)
    assert found.lengths == [n for n in (1, 2, 4, 8, 16, 32) if n >= shortest]
    for n, inside in zip(found.lengths, found.inside, strict=True):
        np.testing.assert_array_equal(inside, by_trying(rows, text, n))
    row, first, length, place = found.longest
    np.testing.assert_array_equal(rows[row, first : first + length], text[place : place + length])
    assert length == max(n for n in range(1, 38) if by_trying(rows, text, n).any())


def test_where_nothing_is_copied_it_says_so():
    rows, text = np.arange(64).reshape(2, 32), np.arange(1000, 2000)
    found = find_copies(rows, Tokens([text]))
    assert found.longest is None and not any(inside.any() for inside in found.inside)
    found = find_copies(rows[:, :5], Tokens([text]))  # too short to hold a passage
    assert found.longest is None and found.lengths == []


def test_lengths_must_be_powers_of_two():
    with pytest.raises(ValueError, match="power of two, got 12"):
        find_copies(np.zeros((1, 20), np.int64), Tokens([np.zeros(20, np.uint16)]), shortest=12)
