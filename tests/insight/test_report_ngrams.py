"""The n-gram model against sums by hand and against its definition, written with dictionaries."""

from collections import Counter
from itertools import product

import numpy as np
import pytest

from insight.ngrams import DISCOUNTS, discounts, fit, probabilities


def chain(n: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    """A text in which the last two tokens say much about the next."""
    rng = np.random.default_rng(seed)
    likely = rng.dirichlet(np.full(vocab_size, 0.2), (vocab_size, vocab_size))
    text = [0, 1]
    for _ in range(n - 2):
        text.append(int(rng.choice(vocab_size, p=likely[text[-2], text[-1]])))
    return np.array(text, np.uint16)


def test_on_a_tiny_text_it_is_what_the_formula_gives_by_hand():
    a, b, c, d = range(4)
    assert DISCOUNTS == (0.5, 1, 1.5)  # a b a c a b is too small to estimate them
    model = fit(np.array([a, b, a, c, a, b]), 4, order=2)
    # order 1: 3, 2 and 1 of 6 lose 1.5, 1 and 0.5, together a half, of which each of 4 tokens gets a quarter
    np.testing.assert_allclose(
        probabilities(model, np.array([[a], [b], [c], [d]]))[0, :, 0],
        [1.5 / 6 + 1 / 8, 1 / 6 + 1 / 8, 0.5 / 6 + 1 / 8, 1 / 8],
        rtol=1e-6,
    )
    # below order 2: in front of a stand b and c, in front of b and c only a; of 4 pairs
    below = {a: 1 / 4 + 1 / 8, b: 0.5 / 4 + 1 / 8, c: 0.5 / 4 + 1 / 8, d: 1 / 8}
    expected = {
        (a, b): 1 / 3 + 1.5 / 3 * below[b],  # a is followed 2 times by b and once by c
        (a, c): 0.5 / 3 + 1.5 / 3 * below[c],
        (a, a): 1.5 / 3 * below[a],
        (a, d): 1.5 / 3 * below[d],
        (b, a): 0.5 + 0.5 * below[a],
        (d, c): below[c],  # what follows d is not known
    }
    pairs = np.array(list(expected))
    np.testing.assert_allclose(probabilities(model, pairs)[1, :, 1], list(expected.values()), rtol=1e-6)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_over_the_vocabulary_probabilities_sum_to_one_whatever_stands_before(order):
    vocab_size = 7
    model = fit(chain(400, 6), vocab_size, order)  # token 6 was never seen
    contexts = np.array(list(product(range(vocab_size), repeat=4))[::7])
    rows = np.concatenate(
        [np.repeat(contexts, vocab_size, axis=0), np.tile(np.arange(vocab_size), len(contexts))[:, None]], axis=1
    )
    found = probabilities(model, rows)
    assert found.shape == (order, len(rows), 5) and found.min() > 0
    sums = found[:, :, -1].reshape(order, len(contexts), vocab_size).sum(-1)
    np.testing.assert_allclose(sums, 1, rtol=1e-6)


def test_what_only_begins_the_text_leaves_all_to_shorter_contexts():
    text = np.array([3, 0, 1, 0, 2, 0, 1, 2, 2, 1])  # nothing stands in front of 3
    found = probabilities(fit(text, 4, 3), np.array([[1, 3, token] for token in range(4)]))[:, :, -1]
    below = probabilities(fit(text, 4, 2), np.array([[1, 3, token] for token in range(4)]))[:, :, -1]
    assert found.sum(1) == pytest.approx([1, 1, 1])
    assert below[1, 0] > 2 * found[2, 0]  # 3 was followed by 0, but in front of both there was nothing


def by_definition(text: list[int], vocab_size: int, order: int):
    """Interpolated modified Kneser-Ney as Chen and Goodman write it, a sum at a time."""
    grams = {n: Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1)) for n in range(1, order + 1)}
    in_front = {n: Counter(gram[1:] for gram in grams[n + 1]) for n in range(1, order)}

    def probability(context: tuple, token: int, highest: bool) -> float:
        n = len(context) + 1
        counts = grams[n] if highest else in_front[n]
        many = Counter(counts.values())
        assert min(many[i] for i in (1, 2, 3, 4)) > 0
        y = many[1] / (many[1] + 2 * many[2])
        discount = {i: i - (i + 1) * y * many[i + 1] / many[i] for i in (1, 2, 3)}
        assert min(discount.values()) > 0
        shorter = probability(context[1:], token, False) if context else 1 / vocab_size
        following = {gram: count for gram, count in counts.items() if gram[:-1] == context}
        if not following:
            return shorter
        left = sum(discount[min(count, 3)] for count in following.values())
        own = counts[(*context, token)]
        own = own - discount[min(own, 3)] if own else 0.0
        return (own + left * shorter) / sum(following.values())

    return probability


@pytest.mark.parametrize("order", [1, 2, 3])
def test_it_equals_the_definition_with_estimated_discounts(order):
    vocab_size = 121  # of which a few are often there, and most seldom
    text = np.random.default_rng(1).zipf(1.4, size=600).clip(max=vocab_size - 1).astype(np.uint16)
    probability = by_definition(text.tolist(), vocab_size, order)
    model = fit(text, vocab_size, order)
    other = np.random.default_rng(1).integers(vocab_size, size=60)
    other[::2] = text[:30]
    for some in (text[:60].astype(np.int64), other):
        expected = [
            probability(tuple(some[max(0, i - order + 1) : i].tolist()), int(some[i]), highest=True)
            for i in range(order - 1, len(some))
        ]
        np.testing.assert_allclose(probabilities(model, some)[-1, order - 1 :], expected, rtol=1e-6)


def test_the_orders_of_one_model_are_models_of_their_own():
    text = chain(500, 12)
    five = probabilities(fit(text, 12, 5), text[:100].astype(np.int64))
    for order in (1, 2, 4):
        own = probabilities(fit(text, 12, order), text[:100].astype(np.int64))
        np.testing.assert_allclose(five[:order], own, rtol=1e-6)


def test_it_finds_out_how_far_back_a_text_looks():
    text = chain(24_000, 6)
    unseen = text[20_000:].astype(np.int64)
    losses = -np.log(probabilities(fit(text[:20_000], 6, 4), unseen)).mean(1)
    assert losses[0] > losses[1] + 0.1 > losses[2] + 0.2  # two tokens decide
    assert abs(losses[3] - losses[2]) < 0.02


def test_discounts_follow_the_counts_of_counts():
    counts = np.repeat([0, 1, 2, 3, 4, 9], [5, 40, 20, 10, 5, 3])
    y = 40 / (40 + 2 * 20)
    np.testing.assert_allclose(discounts(counts), [0, 1 - 2 * y * 20 / 40, 2 - 3 * y * 10 / 20, 3 - 4 * y * 5 / 10])


def test_a_text_shorter_than_the_order_is_refused():
    with pytest.raises(ValueError, match="order 3 need a text of 3 tokens or more, got 2"):
        fit(np.array([0, 1]), 2, 3)
