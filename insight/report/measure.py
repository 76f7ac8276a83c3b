"""Measures a model's predictions on a text, summed over tokens, and how much of its generated text is copied."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from insight import copying, ngrams
from model.generation import generate
from model.gpt import GPT

BINS = 10  # of confidence
LISTED = 40  # documents in the report: half of them the hardest, half the easiest
ENOUGH = 64  # tokens of a document whose loss is ranked, if there are any that long: for fewer it is mostly chance
WORDS = 24  # tokens of a document's beginning that are shown
SCAN = 2**22  # tokens read at once
LOGITS = 2**27  # per forward, at most: half a gigabyte


# --- predictions ----------------------------------------------------------------------------------------------------


@dataclass
class Scored:
    """Consecutive tokens of a text, from index `start` on, with one entry each."""

    start: int
    tokens: np.ndarray
    seen: np.ndarray  # the number of tokens before it in its window
    nats: np.ndarray  # negative log-likelihood
    confidence: np.ndarray  # the probability of the most likely token
    correct: np.ndarray  # whether the most likely token is the right one


@torch.inference_mode()
def score(
    model: GPT,
    text,
    plan: Sequence[tuple[int, int, int]],
    *,
    batch: int = 32,
    autocast: torch.autocast | None = None,
    progress: Callable = iter,
) -> Iterator[Scored]:
    """Scores a text in windows: each (start, length, scored) reads `length` tokens and scores the last `scored` ones.

    The windows of a plan are consecutive: every token but the first is scored once, in order. The model must be in
    evaluation mode. Batches are made smaller if their logits would not fit into memory. ValueError if they are NaN.
    """
    device = next(model.parameters()).device
    longest = max(length for _, length, _ in plan)
    batch = max(1, min(batch, LOGITS // (longest * model.vocab_size)))
    for part in progress([plan[i : i + batch] for i in range(0, len(plan), batch)]):
        inputs, targets = np.zeros((len(part), longest), np.int64), []
        for row, (start, length, scored) in enumerate(part):
            tokens = text.read(start, length + 1).astype(np.int64)
            inputs[row, :length] = tokens[:-1]  # a short window is padded at its end, where causality hides it
            targets.append(tokens[length + 1 - scored :])
        with autocast or torch.autocast(device.type, enabled=False):
            logits = model(torch.from_numpy(inputs).to(device))
        results = []
        for of_row, target, (_, length, scored) in zip(logits, targets, part, strict=True):  # by rows, for memory
            wide = of_row[length - scored : length].float()
            top, best = wide.max(-1)
            total = wide.logsumexp(-1)
            target = torch.from_numpy(target).to(device)
            nats = total - wide.gather(1, target[:, None])[:, 0]
            results.append(torch.stack([nats.double(), (top - total).exp().double(), (best == target).double()]))
        nats, confidence, correct = torch.cat(results, dim=1).cpu().numpy()
        if not np.isfinite(nats).all():
            raise ValueError("the model's probabilities are NaN: did the training diverge?")
        start, length, scored = part[0]
        seen = np.concatenate([np.arange(length - scored, length) + 1 for _, length, scored in part])
        yield Scored(start + length + 1 - scored, np.concatenate(targets), seen, nats, confidence, correct)


# --- sums over tokens -----------------------------------------------------------------------------------------------


class Sums:
    """Sums over the tokens in each bin: an array (bins,) for each name."""

    def __init__(self, n: int):
        self.n, self.of = n, {}

    def add(self, bins: np.ndarray, **values: np.ndarray):
        lowest = bins.min()  # a batch touches few of many documents
        for name, weights in values.items():
            sums = np.bincount(bins - lowest, weights)
            self.of.setdefault(name, np.zeros(self.n))[lowest : lowest + len(sums)] += sums

    def means(self, i: int | slice) -> dict:
        """The number of tokens in a bin, or in several together, and their means; None for means of no tokens."""
        sums = {name: float(values[i].sum()) for name, values in self.of.items()}
        n, size = sums["tokens"], sums["bytes"]
        if n == 0:
            return {"tokens": 0} | dict.fromkeys(("loss", "error", "ngram_loss", "accuracy", "bits_per_byte"))
        loss = sums["nats"] / n
        return {
            "tokens": int(n),
            "loss": loss,
            "error": math.sqrt(max(0.0, sums["squares"] / n - loss**2) / n),
            "ngram_loss": sums["ngram"] / n if "ngram" in sums else None,
            "accuracy": sums["correct"] / n,
            "bits_per_byte": sums["nats"] / math.log(2) / size if size else None,
        }


def count(text, vocab_size: int, progress: Callable = iter) -> np.ndarray:
    """The number of occurrences of each token, (vocab_size,)."""
    counts = np.zeros(vocab_size, np.int64)
    for start in progress(range(0, len(text), SCAN)):
        counts += np.bincount(text.read(start, min(SCAN, len(text) - start)), minlength=vocab_size)
    return counts


def losses(
    model: GPT,
    text,
    plan: Sequence[tuple[int, int, int]],
    bytes_per_token: np.ndarray,
    documents: np.ndarray,
    decode: Callable[[Sequence[int]], str],
    *,
    counts: np.ndarray | None = None,
    baseline: ngrams.NGrams | None = None,
    **scoring,
) -> dict:
    """Breaks the loss of a model down.

    Args:
        text, plan, scoring: see score.
        bytes_per_token (vocab,): bytes of text in each token.
        documents: the index of the first token of each document, ascending from 0.
        decode: tokens -> text, for the beginnings of documents.
        counts (vocab,): the occurrences of each token in the training text.
        baseline: n-grams of that text. It always has the tokens before as context, even at the start of a window.

    Returns a dict with `loss` in nats per token and other means over all tokens, and lists of such dicts, one per bin:
    `by_position`, `by_frequency`, `by_document`, `calibration`. `error` is the standard error of a loss if tokens were
    independent.
    """
    breakdown = Breakdown(text, max(length for _, length, _ in plan), bytes_per_token, documents, counts, baseline)
    for scored in score(model, text, plan, **scoring):
        breakdown.add(scored)
    return breakdown.result(decode)


class Breakdown:
    """The sums behind `losses`, see there for the arguments; `longest` is the length of the longest window."""

    def __init__(
        self,
        text,
        longest: int,
        bytes_per_token: np.ndarray,
        documents: np.ndarray,
        counts: np.ndarray | None,
        baseline: ngrams.NGrams | None,
    ):
        self.text, self.bytes_per_token, self.documents, self.baseline = text, bytes_per_token, documents, baseline
        self.bands = None if counts is None else band(counts)
        self.by_position, self.by_document, self.by_confidence = Sums(longest + 1), Sums(len(documents)), Sums(BINS)
        self.by_frequency = None if self.bands is None else Sums(int(self.bands.max()) + 1)
        self.ngram_nats = np.zeros(0 if baseline is None else len(baseline.levels))  # of order 1, 2, ...

    def add(self, scored: Scored):
        values = {
            "tokens": np.ones(len(scored.tokens)),
            "nats": scored.nats,
            "squares": scored.nats**2,
            "confidence": scored.confidence,
            "correct": scored.correct,
            "bytes": self.bytes_per_token[scored.tokens],
        }
        if self.baseline is not None:
            before = min(scored.start, len(self.ngram_nats) - 1)
            tokens = self.text.read(scored.start - before, before + len(scored.tokens)).astype(np.int64)
            nats = -np.log(ngrams.probabilities(self.baseline, tokens)[:, before:])
            self.ngram_nats += nats.sum(1)
            values["ngram"] = nats[-1]
        numbers = np.arange(scored.start, scored.start + len(scored.tokens))
        self.by_position.add(scored.seen, **values)
        self.by_document.add(np.searchsorted(self.documents, numbers, side="right") - 1, **values)
        self.by_confidence.add(np.minimum((scored.confidence * BINS).astype(np.int64), BINS - 1), **values)
        if self.by_frequency is not None:
            self.by_frequency.add(self.bands[scored.tokens], **values)

    def result(self, decode: Callable[[Sequence[int]], str]) -> dict:
        everything = slice(None)
        total = self.by_position.means(everything)
        bins = [{"from": i / BINS, "to": (i + 1) / BINS, **_confidence(self.by_confidence, i)} for i in range(BINS)]
        gaps = [row["tokens"] * abs(row["confidence"] - row["accuracy"]) for row in bins if row["tokens"]]
        result = total | {
            "nats": float(self.by_position.of["nats"].sum()),
            "bytes": int(self.by_position.of["bytes"].sum()),
            "confidence": _confidence(self.by_confidence, everything)["confidence"],
            "uniform_loss": math.log(len(self.bytes_per_token)),
            "ngram_losses": (self.ngram_nats / total["tokens"]).tolist(),  # of order 1, 2, ...
            "by_position": [{"seen": i, **self.by_position.means(i)} for i in range(1, self.by_position.n)],
            "by_document": by_document(self.by_document, self.text, self.documents, decode),
            "calibration": bins,
            "expected_calibration_error": sum(gaps) / total["tokens"],
        }
        if self.by_frequency is not None:
            types = np.bincount(self.bands, minlength=self.by_frequency.n)
            result["by_frequency"] = [
                {"at_least": 10 ** (i - 1) if i else 0, "types": int(types[i]), **self.by_frequency.means(i)}
                for i in range(len(types))
            ]
        return result


def band(counts: np.ndarray) -> np.ndarray:
    """0 for a count of 0, 1 for 1 to 9, 2 for 10 to 99, and so on."""
    return np.array([len(str(n)) if n else 0 for n in counts.tolist()], np.int64)


def _confidence(sums: Sums, i: int | slice) -> dict:
    row = sums.means(i)
    confidence = float(sums.of["confidence"][i].sum()) / row["tokens"] if row["tokens"] else None
    return {"tokens": row["tokens"], "confidence": confidence, "accuracy": row["accuracy"]}


def by_document(sums: Sums, text, documents: np.ndarray, decode: Callable) -> dict:
    """`count` and the percentiles 0 .. 100 of the losses of documents with `at_least` tokens, and `documents`.

    The latter has a row for each of the hardest and the easiest, or for all, the hardest first.
    """
    tokens = sums.of["tokens"]
    at_least = ENOUGH if (tokens >= ENOUGH).any() else 1
    ranked = np.flatnonzero(tokens >= at_least)
    mean = sums.of["nats"][ranked] / tokens[ranked]
    order = ranked[np.argsort(-mean, kind="stable")]
    listed = order if len(order) <= LISTED else np.concatenate([order[: LISTED // 2], order[-LISTED // 2 :]])
    ends = np.append(documents[1:], len(text))
    rows = []
    for i in listed.tolist():
        start, end = int(documents[i]), int(ends[i])
        begins = " ".join(decode(text.read(start, min(WORDS, end - start)).tolist()).split())
        rows.append({"document": i, "start": start, "begins": begins, **sums.means(i)})
    percentiles = np.percentile(mean, np.arange(101)).tolist()
    return {"at_least": at_least, "count": len(order), "loss_percentiles": percentiles, "documents": rows}


# --- copies of the training text ------------------------------------------------------------------------------------


def copies(
    model: GPT,
    text,
    training,
    decode: Callable[[Sequence[int]], str],
    *,
    samples: int,
    sample_tokens: int,
    prompt_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    writing: Callable = iter,
    searching: Callable = iter,
) -> dict:
    """How much of the model's generated text is copied from its training text, compared with the validation text.

    At evenly spaced positions of a validation text, the model continues prompt_tokens tokens by sample_tokens;
    `validation` is the text's own continuation. A short text gets fewer and shorter samples. Reports the fraction of
    tokens in passages of 8, 16, 32 ... tokens that occur word for word in the training text, and the longest of these.
    """
    prompt_tokens = max(1, min(prompt_tokens, len(text) // 2))
    sample_tokens = max(1, min(sample_tokens, len(text) // 2))
    samples = max(1, min(samples, len(text) // (prompt_tokens + sample_tokens)))
    starts = np.linspace(0, len(text) - prompt_tokens - sample_tokens, samples).astype(np.int64)
    rows = np.stack([text.read(start, prompt_tokens + sample_tokens).astype(np.int64) for start in starts.tolist()])
    prompts, validation = rows[:, :prompt_tokens], rows[:, prompt_tokens:]
    columns = generate(
        model,
        torch.from_numpy(prompts),
        sample_tokens,
        seeds=range(seed, seed + samples),
        overflow="slide",
        temperature=temperature,
    )
    generated = torch.stack([next(columns) for _ in writing(range(sample_tokens))], dim=1).cpu().numpy()
    return {
        "samples": samples,
        "sample_tokens": sample_tokens,
        "prompt_tokens": prompt_tokens,
        "temperature": temperature,
        "seed": seed,
        "generated": _copies(generated, training, decode, searching),
        "validation": _copies(validation, training, decode, searching),
    }


def _copies(rows: np.ndarray, training, decode: Callable, progress: Callable) -> dict:
    found = copying.find_copies(rows, training, progress=progress)
    longest = None
    if found.longest is not None:
        row, first, n, place = found.longest
        longest = {"tokens": n, "text": decode(rows[row, first : first + n].tolist()), "training_token": place}
    shares = {str(n): float(inside.mean()) for n, inside in zip(found.lengths, found.inside, strict=True)}
    return {"shares": shares, "longest": longest}
