"""The report: each of its sections against the sum that its name promises, and all of them against evaluate."""

import io
import json
import math

import numpy as np
import pytest
import torch
from rich.console import Console

from data.corpus import Tokens
from insight import copying, ngrams, report
from insight.report import copies, count, losses
from insight.report.bands import position_bands
from insight.report.measure import band, score
from model import generate
from training.evaluation import evaluate, windows

VOCAB = 17
LENGTHS = np.arange(VOCAB) % 4  # bytes in each token


def text_of(n: int, seed: int = 0) -> Tokens:
    return Tokens([np.random.default_rng(seed).zipf(1.5, size=n).clip(max=VOCAB).astype(np.uint16) - 1])


def read(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


def measure(model, text, seq_len=8, stride=8, documents=(0,), **more) -> dict:
    plan = windows(len(text), seq_len, stride)
    return losses(model, text, plan, LENGTHS, np.array(documents), read, **{"batch": 3, **more})


def every_loss(model, text, seq_len: int) -> tuple[np.ndarray, torch.Tensor]:
    """The loss of each token but the first, and its probabilities, by whole windows side by side."""
    assert (len(text) - 1) % seq_len == 0
    tokens = torch.from_numpy(text.read(0, len(text)).astype(np.int64))
    rows = [model(tokens[i : i + seq_len][None])[0].log_softmax(-1) for i in range(0, len(tokens) - 1, seq_len)]
    log_probabilities = torch.cat(rows).detach()
    return -log_probabilities.gather(1, tokens[1:, None])[:, 0].numpy(), log_probabilities.exp()


@pytest.mark.parametrize(("n", "seq_len", "stride"), [(2, 8, 8), (61, 8, 8), (61, 8, 3), (20, 16, 1), (30, 32, 32)])
def test_its_sums_are_those_of_evaluate(small, n, seq_len, stride):
    model, text = small(), text_of(n)
    expected = evaluate(model, text.read, n, LENGTHS, seq_len=seq_len, stride=stride)
    baseline = ngrams.fit(text_of(300, seed=1).read(0, 300), VOCAB, 3)
    result = measure(model, text, seq_len, stride, (0, n // 2), counts=np.arange(VOCAB), baseline=baseline)
    assert result["nats"] == pytest.approx(expected.nats, rel=1e-6)
    assert (result["tokens"], result["bytes"]) == (expected.tokens, expected.bytes)
    assert result["loss"] == pytest.approx(expected.loss, rel=1e-6)
    assert result["bits_per_byte"] in (None, pytest.approx(expected.bits_per_byte, rel=1e-6))
    for rows in (result["by_position"], result["by_frequency"], result["by_document"]["documents"]):
        assert sum(row["tokens"] for row in rows) == expected.tokens
        nats = sum(row["tokens"] * row["loss"] for row in rows if row["tokens"])
        assert nats == pytest.approx(expected.nats, rel=1e-6)
    assert sum(row["tokens"] for row in result["calibration"]) == expected.tokens


@pytest.mark.parametrize(("seq_len", "stride"), [(8, 8), (8, 3)])
def test_tokens_are_scored_one_after_the_other(small, seq_len, stride):
    text, at = text_of(50), 1
    for some in score(small(), text, windows(50, seq_len, stride), batch=2):
        assert some.start == at
        np.testing.assert_array_equal(some.tokens, text.read(at, len(some.tokens)))
        assert all(1 <= seen <= seq_len for seen in some.seen)
        at += len(some.tokens)
    assert at == 50


def test_the_logits_of_a_batch_are_bounded(small, monkeypatch):
    monkeypatch.setattr(report.measure, "LOGITS", 3 * 8 * VOCAB)
    model, rows = small(), []
    model.register_forward_hook(lambda _, inputs, logits: rows.append(len(logits)))
    assert sum(len(some.tokens) for some in score(model, text_of(65), windows(65, 8, 8), batch=8)) == 64
    assert rows == [3, 3, 2]


def test_by_position_is_the_mean_over_windows(small):
    model, text = small(), text_of(65)
    expected, _ = every_loss(model, text, 8)
    rows = measure(model, text)["by_position"]
    assert [row["seen"] for row in rows] == list(range(1, 9))
    for i, row in enumerate(rows):
        some = expected[i::8]
        assert row["tokens"] == len(some)
        assert row["loss"] == pytest.approx(some.mean(), rel=1e-5)
        assert row["error"] == pytest.approx(some.std() / math.sqrt(len(some)), rel=1e-4)


def test_by_frequency_is_the_mean_over_tokens_as_often_seen(small):
    model, text = small(), text_of(65)
    expected, _ = every_loss(model, text, 8)
    counts = np.array([0, 9, 10, 99, 100, *[5] * (VOCAB - 5)])
    rows = measure(model, text, counts=counts)["by_frequency"]
    assert [(row["at_least"], row["types"]) for row in rows] == [(0, 1), (1, 13), (10, 2), (100, 1)]
    targets = text.read(1, 64)
    for row, some in zip(rows, ([0], [1, *range(5, VOCAB)], [2, 3], [4]), strict=True):
        inside = np.isin(targets, some)
        assert row["tokens"] == inside.sum() > 0
        assert row["loss"] == pytest.approx(expected[inside].mean(), rel=1e-5)


def test_by_document_the_hardest_comes_first_and_short_ones_are_not_ranked(small):
    model, text = small(), text_of(401)
    expected, _ = every_loss(model, text, 8)
    starts = [0, 100, 170, 175, 300]
    found = measure(model, text, documents=starts)["by_document"]
    assert (found["at_least"], found["count"]) == (64, 4)  # not the one of 5 tokens
    bounds = {a: (max(a, 1), b) for a, b in zip(starts, [*starts[1:], 401], strict=True) if a != 170}
    means = {a: expected[first - 1 : last - 1].mean() for a, (first, last) in bounds.items()}
    assert [row["start"] for row in found["documents"]] == sorted(means, key=means.get, reverse=True)
    for row in found["documents"]:
        assert row["loss"] == pytest.approx(means[row["start"]], rel=1e-5)
        assert row["tokens"] == bounds[row["start"]][1] - bounds[row["start"]][0]
        assert read(text.read(row["start"], 5).tolist()) in row["begins"]
    np.testing.assert_allclose(found["loss_percentiles"][::100], [min(means.values()), max(means.values())], rtol=1e-5)


def test_of_many_documents_the_hardest_and_the_easiest_are_listed(small):
    found = measure(small(), text_of(400), documents=range(0, 400, 4))["by_document"]
    assert (found["at_least"], found["count"], len(found["documents"])) == (1, 100, report.measure.LISTED)
    listed = [row["loss"] for row in found["documents"]]
    assert listed == sorted(listed, reverse=True)
    assert (listed[0], listed[-1]) == (found["loss_percentiles"][100], found["loss_percentiles"][0])


class Fixed(torch.nn.Module):
    """Finds token 0 likely by `confidence`, whatever came, and all others alike."""

    vocab_size = VOCAB

    def __init__(self, confidence: float):
        super().__init__()
        probabilities = torch.full((VOCAB,), (1 - confidence) / (VOCAB - 1))
        probabilities[0] = confidence
        self.logits = torch.nn.Parameter(probabilities.log())

    def forward(self, tokens):
        return self.logits.expand(*tokens.shape, VOCAB)


@pytest.mark.parametrize(("confidence", "i"), [(0.75, 7), (0.32, 3), (1 - 1e-9, 9)])
def test_the_calibration_error_is_the_gap_of_confidence_and_accuracy(confidence, i):
    text = Tokens([np.tile(np.array([0, 0, 0, 1, 2], np.uint16), 20)])
    result = measure(Fixed(confidence), text)
    accuracy = (3 * 20 - 1) / 99
    row = result["calibration"][i]
    assert row["from"] <= confidence <= row["to"]
    assert (row["tokens"], row["accuracy"]) == (99, pytest.approx(accuracy))
    assert row["confidence"] == result["confidence"] == pytest.approx(confidence)
    assert result["expected_calibration_error"] == pytest.approx(abs(confidence - accuracy))
    assert [other["tokens"] for j, other in enumerate(result["calibration"]) if j != i] == [0] * 9


def test_calibration_bins_hold_what_the_model_said(small):
    model, text = small(), Tokens([np.random.default_rng(0).integers(VOCAB, size=305).astype(np.uint16)])
    model.head.weight.data *= 3  # from unsure to sure
    _, probabilities = every_loss(model, text, 8)
    confidence, choice = probabilities.max(-1)
    correct = (choice.numpy() == text.read(1, 304)).astype(float)
    confidence, error = confidence.numpy(), 0.0
    result = measure(model, text)
    for row in result["calibration"]:
        inside = (confidence >= row["from"]) & (confidence < row["to"])
        assert row["tokens"] == inside.sum()
        if inside.any():
            assert row["confidence"] == pytest.approx(confidence[inside].mean(), rel=1e-5)
            assert row["accuracy"] == pytest.approx(correct[inside].mean())
            error += inside.mean() * abs(confidence[inside].mean() - correct[inside].mean())
    assert sum(row["tokens"] > 0 for row in result["calibration"]) > 3
    assert result["expected_calibration_error"] == pytest.approx(error, rel=1e-5)


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_the_n_grams_read_the_text_as_one(small, batch):
    text, training = text_of(90), text_of(2000, seed=1)
    baseline = ngrams.fit(training.read(0, 2000), VOCAB, 4)
    whole = -np.log(ngrams.probabilities(baseline, text.read(0, 90).astype(np.int64)))[:, 1:]
    result = measure(small(), text, baseline=baseline, batch=batch, documents=(0, 40))
    np.testing.assert_allclose(result["ngram_losses"], whole.mean(1))
    assert result["ngram_loss"] == pytest.approx(whole[-1].mean())
    assert result["by_position"][2]["ngram_loss"] == pytest.approx(whole[-1, 2::8].mean())
    by_start = {row["start"]: row["ngram_loss"] for row in result["by_document"]["documents"]}
    assert by_start == {0: pytest.approx(whole[-1, :39].mean()), 40: pytest.approx(whole[-1, 39:].mean())}
    assert result["uniform_loss"] == math.log(VOCAB)


def test_counts_are_those_of_all_pieces(monkeypatch):
    monkeypatch.setattr(report.measure, "SCAN", 7)
    text = text_of(100)
    np.testing.assert_array_equal(count(text, VOCAB + 3), np.bincount(text.read(0, 100), minlength=VOCAB + 3))


def test_bands_are_powers_of_ten():
    np.testing.assert_array_equal(band(np.array([0, 1, 9, 10, 99, 100, 10**9])), [0, 1, 1, 2, 2, 3, 10])


def test_bands_of_positions_are_means_over_tokens():
    names = ("tokens", "loss", "error", "ngram_loss")
    rows = [dict(zip(names, row, strict=True)) for row in [(4, 1.0, 0.1, 2.0), (3, 2.0, 0.3, 3.0), (1, 6.0, 0.4, 7.0)]]
    empty = {"tokens": 0} | dict.fromkeys(names[1:])
    bands = position_bands([*rows[:1], empty, *rows[1:], empty])
    assert [band[:2] for band in bands] == [(1, 1), (3, 4)]
    error = math.sqrt((3 * 0.3) ** 2 + 0.4**2) / 4
    assert bands[1][2] == {"tokens": 4, "loss": 3.0, "error": pytest.approx(error), "ngram_loss": 4.0}


def test_a_model_of_no_numbers_is_refused(small):
    model = small()
    model.head.weight.data[3, 3] = math.nan
    with pytest.raises(ValueError, match="probabilities are NaN"):
        measure(model, text_of(30))


def copies_of(model, text, training, **more) -> dict:
    settings = {"samples": 3, "sample_tokens": 40, "prompt_tokens": 6}
    return copies(model, text, training, read, **settings | more)


def test_what_stands_in_the_training_text_is_found_and_what_does_not_is_not(small):
    text = text_of(300)
    found = copies_of(small(), text, text)["validation"]
    assert found["shares"] == {"8": 1, "16": 1, "32": 1}
    assert found["longest"]["tokens"] == 40
    at = found["longest"]["training_token"]
    assert found["longest"]["text"] == read(text.read(at, 40).tolist())
    elsewhere = Tokens([np.full(500, VOCAB - 1, np.uint16)])
    found = copies_of(small(), text, elsewhere)
    for name in ("generated", "validation"):
        assert found[name] == {"shares": {"8": 0, "16": 0, "32": 0}, "longest": None}


def test_copies_are_searched_in_text_generated_from_spread_prompts(small, monkeypatch):
    model, text, searched = small(), text_of(300), []
    real = copying.find_copies
    monkeypatch.setattr(copying, "find_copies", lambda rows, *a, **k: (searched.append(rows), real(rows, *a, **k))[1])
    first = copies_of(model, text, text, seed=5, temperature=0.8)
    torch.manual_seed(1)
    assert copies_of(model, text, text, seed=5, temperature=0.8) == first
    written, validation = searched[:2]
    starts = [0, 127, 254]
    prompts = [text.read(start, 6).tolist() for start in starts]
    columns = generate(model, prompts, 40, seeds=[5, 6, 7], overflow="slide", temperature=0.8)
    np.testing.assert_array_equal(written, torch.stack(list(columns), dim=1).numpy())
    np.testing.assert_array_equal(validation, np.stack([text.read(start + 6, 40) for start in starts]))


@pytest.mark.parametrize("n", [2, 3, 11, 60])
def test_a_short_text_gets_fewer_and_shorter_samples(small, n):
    found = copies_of(small(), text_of(n), text_of(300))
    assert found["prompt_tokens"] + found["sample_tokens"] <= n
    assert found["samples"] * found["sample_tokens"] <= n


def reports(small) -> dict[str, dict]:
    model, text, training = small(), text_of(400), text_of(3000, seed=1)
    known = {"counts": count(training, VOCAB), "baseline": ngrams.fit(training.read(0, 3000), VOCAB, 3)}
    names = {"text": "a $text", "training_tokens": 3000, "ngram_tokens": 3000}
    elsewhere = Tokens([np.full(500, VOCAB - 1, np.uint16)])
    nothing = {"copying": copies_of(model, text, elsewhere), "ngram_tokens": 2000}
    return {
        "whole": names | measure(model, text, documents=(0, 200), **known) | {"copying": copies_of(model, text, text)},
        "many": names | nothing | measure(model, text, documents=range(0, 400, 4), **known),
        "alone": names | {"training_tokens": None} | measure(model, text, stride=3),
        "short": names | measure(model, text_of(2)) | {"copying": copies_of(model, text_of(2), training)},
    }


def test_the_tables_say_what_was_measured(small):
    shown, made = {}, reports(small)
    for name, result in made.items():
        json.dumps(result, allow_nan=False)
        out = io.StringIO()
        report.show(result, Console(file=out, width=200))
        shown[name] = out.getvalue()
    whole = made["whole"]
    lines = [line.split() for line in shown["whole"].splitlines()]
    assert ["3-gram", f"{whole['ngram_losses'][2]:.4f}"] in [line[:2] for line in lines]
    assert ["model", f"{whole['loss']:.4f}"] in [line[:2] for line in lines]
    gap = whole["loss"] - min(whole["ngram_losses"])
    assert f"the model is {gap:.4f} nats/token above the best of them" in shown["whole"]  # random weights
    row = whole["by_position"][0]
    assert ["1", str(row["tokens"]), f"{row['loss']:.4f}", f"{row['error']:.3f}", f"{row['ngram_loss']:.4f}"] in lines
    assert "longest, validation: 40 tokens" in shown["whole"]
    assert "100.00%" in shown["whole"]
    assert "n-grams of the 3,000 tokens of training text" in shown["whole"]
    assert "n-grams of the first 2,000 of 3,000 tokens of training text" in shown["many"]
    assert "2 documents of 64 tokens or more, hardest first" in shown["whole"]
    assert "100 documents, the five hardest and the five easiest" in shown["many"]
    assert ["32", "tokens", "or", "more", "0.00%", "0.00%"] in [line.split() for line in shown["many"].splitlines()]
    assert not any(word in shown["alone"] for word in ("gram", "frequency", "copying"))
    assert "none that long" in shown["short"]


@pytest.mark.slow
def test_there_is_a_picture_of_every_report(small, tmp_path):
    pytest.importorskip("matplotlib")
    for name, result in reports(small).items():
        report.plot(result, tmp_path / f"{name}.png", dpi=20)
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
