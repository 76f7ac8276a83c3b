import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.batches import IGNORE, Batches, Documents, Mixture, Windows, make_batches, permute
from data.corpus import Tokens
from data.tokenizer import ByteTokenizer
from model import functional


def row(n: int) -> Tokens:
    """Tokens equal to their own position, in three arrays."""
    return Tokens(np.array_split(np.arange(n), 3))


def test_the_permutation_is_a_bijection_for_every_size():
    for n in range(1, 301):
        assert sorted(permute(np.arange(n), n, seed=n, epoch=1).tolist()) == list(range(n))


def test_the_permutation_depends_on_seed_and_epoch_and_parts_neighbours():
    n = 10_000
    one = permute(np.arange(n), n, 0, 0)
    for seed, epoch in ((0, 1), (1, 0)):
        assert (permute(np.arange(n), n, seed, epoch) == one).mean() < 0.01
    assert (np.abs(np.diff(one)) == 1).mean() < 0.01
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.05


def test_a_billion_windows_are_permuted_without_being_stored():
    out = permute(np.arange(10**9 - 1000, 10**9), 10**9, 0, 0)
    assert len(set(out.tolist())) == 1000 and out.min() >= 0 and out.max() < 10**9


@pytest.mark.parametrize(("n", "seq_len"), [(101, 10), (100, 7), (11, 10), (12, 10), (500, 16)])
def test_an_epoch_visits_each_window_once(n, seq_len):
    windows = Windows(row(n), seq_len, seed=3)
    starts = windows.starts(np.arange(3 * windows.count))
    for epoch in range(3):
        visited = np.sort(starts[epoch * windows.count : (epoch + 1) * windows.count])
        assert (np.diff(visited) == seq_len).all()  # adjacent: none repeated, none left out
    rows = windows.rows(np.arange(3 * windows.count))  # all of them inside the text
    assert (rows["tokens"] == starts[:, None] + np.arange(seq_len)).all()
    assert (rows["targets"] == rows["tokens"] + 1).all()


def test_a_batch_is_a_function_of_seed_and_step():
    def make(seed=0, rows=4):
        return Batches(Windows(row(1000), 10, seed), rows)

    batch = make().batch(7)
    assert (batch["tokens"] == make().batch(7)["tokens"]).all()
    assert (make(seed=1).batch(7)["tokens"] != batch["tokens"]).any()
    halves = [make(rows=2).batch(step)["tokens"] for step in (14, 15)]  # the order does not depend on the batch size
    assert (torch.cat(halves) == batch["tokens"]).all()


def test_epochs_start_at_different_offsets():
    windows = Windows(row(1000), 10, seed=0)
    assert len({int(windows.starts(np.array([epoch * windows.count]))[0]) % 10 for epoch in range(20)}) > 3


@given(st.integers(1, 200).flatmap(lambda s: st.tuples(st.just(s), st.integers(s + 1, 5 * s + 3))))
def test_window_offsets_reach_the_last_token_without_a_gap(sizes):
    seq_len, n = sizes
    windows = Windows(row(n), seq_len, seed=3)
    width = windows.count * seq_len  # targets of an epoch, the first at offset + 1
    assert windows.offsets + width == n
    assert windows.offsets <= width + seq_len


@pytest.mark.parametrize(("n", "seq_len"), [(8, 4), (15, 5), (30, 13)])
def test_every_token_but_the_first_is_a_target_of_some_epoch(n, seq_len):
    windows = Windows(row(n), seq_len, seed=3)
    starts = windows.starts(np.arange(400))
    assert {t for start in starts.tolist() for t in range(start + 1, start + seq_len + 1)} == set(range(1, n))


def test_a_run_keeps_the_batch_order_it_started_with():
    old = Windows(row(30), 13, seed=0, order=1)
    assert set(old.starts(np.arange(400)).tolist()) == set(range(13))
    assert set(Windows(row(30), 13, seed=0).starts(np.arange(400)).tolist()) == set(range(17))
    with pytest.raises(ValueError, match="batch order 3, this version knows 1 to 2"):
        make_batches(None, 1, 1, 0, order=3)


def test_a_stream_is_the_batches_in_order():
    batches = Batches(Windows(row(1000), 10, 0), 4)
    found = list(batches.stream(3, 9, torch.device("cpu")))
    assert len(found) == 6
    for step, (count, batch) in enumerate(found, 3):
        assert count == 40
        assert all(torch.equal(batch[name], expected) for name, expected in batches.batch(step).items())


# --- packed documents -----------------------------------------------------------------------------------------------

LENGTHS = [3, 1, 8, 25, 2, 7, 12, 4, 9, 30, 5]


def packed(seq_len=10):
    """Documents d with tokens 100 d + position, each ended by 9999."""

    class Ended:
        eos_id = 9999
        document_bounds = ByteTokenizer.document_bounds

    text = [np.append(100 * d + np.arange(n - 1), 9999) for d, n in enumerate(LENGTHS)]
    return Documents(Tokens(np.array_split(np.concatenate(text), 4)), seq_len, 0, Ended())


def test_a_packed_epoch_has_every_input_target_pair_once():
    documents = packed()
    expected = [
        (100 * d + i, 100 * d + i + 1 if i + 2 < n else 9999) for d, n in enumerate(LENGTHS) for i in range(n - 1)
    ]
    for epoch in range(3):
        rows = documents.rows(np.arange(documents.count) + epoch * documents.count)
        counted = rows["targets"] != IGNORE
        pairs = list(zip(rows["tokens"][counted].tolist(), rows["targets"][counted].tolist(), strict=True))
        assert sorted(pairs) == sorted(expected)
    assert counted.mean() > 0.75  # well filled


def test_positions_restart_with_each_document_and_with_padding():
    documents = packed()
    rows = documents.rows(np.arange(documents.count))
    for tokens, targets, positions, numbers in zip(*(rows[name] for name in rows), strict=True):
        for number in set(numbers.tolist()):
            here = numbers == number
            if number == -1:
                assert (targets[here] == IGNORE).all()
                continue
            assert positions[here].tolist() == list(range(here.sum()))
            assert len({token // 100 for token in tokens[here]}) == 1  # of one document
            assert (np.diff(tokens[here]) == 1).all()


def test_documents_that_fit_a_row_are_not_cut():
    documents = packed(seq_len=29)
    rows = documents.rows(np.arange(documents.count))
    found = [
        len(set(rows["documents"][row][rows["tokens"][row] // 100 == d].tolist()))
        for d in range(1, len(LENGTHS))
        for row in range(documents.count)
        if ((rows["tokens"][row] // 100 == d) & (rows["documents"][row] >= 0)).any()
    ]
    assert set(found) == {1}


def test_a_packed_row_gives_the_logits_and_loss_of_its_documents(small):
    documents, model = packed(seq_len=16), small(vocab_size=10_000)
    rows = {name: torch.from_numpy(array) for name, array in documents.rows(np.arange(documents.count)).items()}
    targets = rows.pop("targets")
    logits, total = model(**rows), 0.0
    for row in range(documents.count):
        for number in rows["documents"][row].unique().tolist():
            here = rows["documents"][row] == number
            if number >= 0:
                alone = model(rows["tokens"][row, here][None])
                torch.testing.assert_close(logits[row, here], alone[0], rtol=0, atol=1e-10)
                total += model(rows["tokens"][row, here][None], targets=targets[row, here][None])[0]
    loss, count = model(**rows, targets=targets)
    torch.testing.assert_close(loss, total)
    assert count == (targets != IGNORE).sum() == sum(n - 1 for n in LENGTHS)


def test_batches_and_model_ignore_the_same_target():
    assert IGNORE == functional.IGNORE


# --- mixtures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [[1.0], [0.7, 0.3], [5, 3, 2], [0.01, 0.99], [1, 1, 1, 1]])
def test_a_mixture_keeps_its_shares_everywhere_and_skips_no_row(weights):
    sources = [Windows(Tokens([np.arange(1000) + 10_000 * k]), 10, seed=0) for k in range(len(weights))]
    mixture = Mixture(sources, weights)
    which, index = mixture.assign(np.arange(5000))
    for k, weight in enumerate(weights):
        share = weight / sum(weights)
        assert index[which == k].tolist() == list(range((which == k).sum()))  # its own rows, each once, in order
        counts = np.cumsum(which == k)
        assert (np.abs(counts - share * np.arange(1, 5001)) < len(weights)).all()
    far, _ = mixture.assign(np.arange(10**12, 10**12 + 1000))  # without computing the rows before
    assert abs((far == 0).mean() - weights[0] / sum(weights)) < 0.01
    rows = mixture.rows(np.arange(500))
    assert ((rows["tokens"] // 10_000)[:, 0] == which[:500]).all()


def test_reading_windows_equals_reading_them_one_by_one():
    tokens = Tokens(np.array_split(np.arange(997) % 251, 7))
    starts = np.random.default_rng(0).integers(0, 997 - 40, 200)
    assert np.array_equal(tokens.windows(starts, 40), np.stack([tokens.read(s, 40) for s in starts.tolist()]))
    tiny = Tokens([np.arange(3), np.arange(3, 50)])  # the first is shorter than a window
    assert np.array_equal(tiny.windows(np.array([0, 2, 10]), 10)[:, 0], [0, 2, 10])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_a_batch_in_equal_parts(ranks):
    source = Windows(row(1000), 10, 0)
    whole = Batches(source, 4).batch(7)
    parts = [Batches(source, 4, rank, ranks).batch(7) for rank in range(ranks)]
    assert all(torch.equal(torch.cat([part[name] for part in parts]), expected) for name, expected in whole.items())
    with pytest.raises(ValueError, match="a batch of 4 rows .* cannot be divided equally among 3 ranks"):
        Batches(source, 4, 0, 3)
