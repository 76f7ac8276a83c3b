import math

import numpy as np
import pytest
import torch

from model.functional import cross_entropy
from training.evaluation import evaluate, windows


@pytest.mark.parametrize("n", [2, 5, 16, 17, 18, 50])
@pytest.mark.parametrize(("seq_len", "stride"), [(8, 8), (8, 3), (8, 1), (16, 16)])
def test_every_token_but_the_first_is_scored_once_with_its_context(n, seq_len, stride):
    scored = []
    for start, length, count in windows(n, seq_len, stride):
        assert 0 < count <= length <= seq_len and start >= 0
        if scored:
            assert length - count >= min(seq_len - stride, len(scored))  # tokens of context before the first scored
        scored += range(start + length - count + 1, start + length + 1)
    assert scored == list(range(1, n))


def test_the_loss_of_a_text_that_fits_is_that_of_one_forward(small):
    model, text = small(), np.random.default_rng(0).integers(17, size=30)
    lengths = np.arange(17)
    tokens = torch.from_numpy(text)[None]
    nats, count = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
    result = evaluate(model, lambda start, n: text[start : start + n], 30, lengths, seq_len=32)
    assert result.tokens == count == 29
    assert result.nats == pytest.approx(nats.item(), rel=1e-6)
    assert result.bytes == lengths[text[1:]].sum()
    assert result.loss == pytest.approx(nats.item() / 29)
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    assert result.bits_per_byte == pytest.approx(nats.item() / math.log(2) / result.bytes)


def test_with_stride_one_each_token_has_all_available_context(small):
    model, text = small(), np.random.default_rng(0).integers(17, size=20)
    expected = 0.0
    for t in range(1, 20):
        context = torch.from_numpy(text[max(0, t - 8) : t])[None]
        expected -= model(context)[0, -1].log_softmax(-1)[text[t]].item()
    result = evaluate(model, lambda start, n: text[start : start + n], 20, np.ones(17), seq_len=8, stride=1, batch=3)
    assert result.nats == pytest.approx(expected, rel=1e-5)


def test_a_limit_spreads_its_windows_and_keeps_mode_and_rng_state(small):
    model, text = small(dropout=0.5).train(), np.random.default_rng(0).integers(17, size=1000)
    state = torch.get_rng_state()
    read = []

    def note(start, n):
        read.append(start)
        return text[start : start + n]

    first = evaluate(model, note, 1000, np.ones(17), seq_len=10, limit=50)
    assert first.tokens == 50 and len(read) == 5
    assert max(np.diff(read)) <= 210 and read[-1] >= 790
    assert evaluate(model, note, 1000, np.ones(17), seq_len=10, limit=50) == first
    assert model.training and torch.equal(torch.get_rng_state(), state)
