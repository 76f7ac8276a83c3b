import numpy as np
import pytest

from data.batches import Batches, permute


class Row:
    """Tokens that name their own place."""

    def __init__(self, n: int):
        self.n = n

    def __len__(self):
        return self.n

    def read(self, start, length):
        assert 0 <= start and start + length <= self.n
        return np.arange(start, start + length)


def test_the_permutation_is_a_bijection_for_every_size():
    for n in range(1, 301):
        assert sorted(permute(np.arange(n), n, seed=n, epoch=1).tolist()) == list(range(n))


def test_the_permutation_depends_on_seed_and_epoch_and_leaves_no_neighbours():
    n = 10_000
    one = permute(np.arange(n), n, 0, 0)
    for seed, epoch in ((0, 1), (1, 0)):
        assert (permute(np.arange(n), n, seed, epoch) == one).mean() < 0.01
    assert (np.abs(np.diff(one)) == 1).mean() < 0.01
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.05


def test_a_billion_windows_cost_nothing():
    out = permute(np.arange(10**9 - 1000, 10**9), 10**9, 0, 0)
    assert len(set(out.tolist())) == 1000 and out.min() >= 0 and out.max() < 10**9


@pytest.mark.parametrize(("n", "seq_len", "rows"), [(101, 10, 3), (100, 7, 4), (11, 10, 2), (12, 10, 2), (500, 16, 1)])
def test_an_epoch_visits_each_window_once(n, seq_len, rows):
    batches = Batches(Row(n), rows, seq_len, seed=3)
    starts = np.concatenate([batches.starts(step) for step in range(3 * batches.windows)])
    for epoch in range(3):
        visited = np.sort(starts[epoch * batches.windows : (epoch + 1) * batches.windows])
        assert (np.diff(visited) == seq_len).all()  # side by side: none twice, none left out
    for step in range(3 * batches.windows):
        batches.batch(step)  # and all of them lie inside the text


def test_a_batch_is_a_function_of_seed_and_step():
    def make(seed=0, rows=4):
        return Batches(Row(1000), rows, 10, seed)

    tokens, targets = make().batch(7)
    again, _ = make().batch(7)
    assert (tokens == again).all()
    assert (targets == tokens + 1).all()
    assert (make(seed=1).batch(7)[0] != tokens).any()
    halves = [make(rows=2).batch(step)[0] for step in (14, 15)]  # the order does not depend on the batch's size
    assert (np.concatenate(halves) == tokens.numpy()).all()


def test_epochs_begin_at_different_offsets():
    batches = Batches(Row(1000), 1, 10, seed=0)
    assert len({int(batches.starts(epoch * batches.windows)[0]) % 10 for epoch in range(20)}) > 3
