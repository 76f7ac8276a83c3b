"""Evaluation in depth: where a model is good and bad at a held-out text, beside what counting n-grams achieves.

`losses` and `copies` measure and give plain dicts and lists, as they go into a JSON file; `show` prints them as tables
and `plot` draws them. A text is anything with len and read(start, length), such as memory-mapped tokens: it is read in
pieces, and sums are all that is kept.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from insight import copying, ngrams
from model.generation import generate
from model.gpt import GPT

BINS = 10  # of confidence
LISTED = 40  # documents: the hardest and the easiest, half each
ENOUGH = 64  # tokens of a document whose loss is ranked, if there are any so long: of fewer it is chance
WORDS = 24  # tokens that a document is known by
SCAN = 2**22  # tokens looked at at once
LOGITS = 2**27  # of one forward, at most: half a gigabyte


# --- what the model says of each token ------------------------------------------------------------------------------


@dataclass
class Scored:
    """Consecutive tokens of a text, from number `start` on; one entry each."""

    start: int
    tokens: np.ndarray
    seen: np.ndarray  # how many tokens of its window stand before it
    nats: np.ndarray  # negative log-likelihood
    confidence: np.ndarray  # the probability of the token that the model finds most likely
    correct: np.ndarray  # whether that is the one that comes


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
    """Scores a text by windows: each (start, length, scored) reads `length` tokens and scores its last targets.

    The windows of a plan follow one another, so that what is scored does, too: every token but the first, once. The
    model is to be in evaluation mode. A batch is made smaller where its logits would not fit into memory. ValueError
    where they are NaN.
    """
    device = next(model.parameters()).device
    longest = max(length for _, length, _ in plan)
    batch = max(1, min(batch, LOGITS // (longest * model.vocab_size)))
    for some in progress([plan[i : i + batch] for i in range(0, len(plan), batch)]):
        inputs, targets = np.zeros((len(some), longest), np.int64), []
        for row, (start, length, scored) in enumerate(some):
            tokens = text.read(start, length + 1).astype(np.int64)
            inputs[row, :length] = tokens[:-1]  # a short window is filled up at its end, where causality hides it
            targets.append(tokens[length + 1 - scored :])
        with autocast or torch.autocast(device.type, enabled=False):
            logits = model(torch.from_numpy(inputs).to(device))
        results = []
        for of_row, target, (_, length, scored) in zip(logits, targets, some, strict=True):  # a row's fit into memory
            wide = of_row[length - scored : length].float()
            top, best = wide.max(-1)
            total = wide.logsumexp(-1)
            target = torch.from_numpy(target).to(device)
            nats = total - wide.gather(1, target[:, None])[:, 0]
            results.append(torch.stack([nats.double(), (top - total).exp().double(), (best == target).double()]))
        nats, confidence, correct = torch.cat(results, dim=1).cpu().numpy()
        if not np.isfinite(nats).all():
            raise ValueError("the model's probabilities are not numbers (NaN): did its training diverge?")
        start, length, scored = some[0]
        seen = np.concatenate([np.arange(length - scored, length) + 1 for _, length, scored in some])
        yield Scored(start + length + 1 - scored, np.concatenate(targets), seen, nats, confidence, correct)


# --- sums over them -------------------------------------------------------------------------------------------------


class Sums:
    """Sums over tokens that fall into bins, one array (bins,) for each name."""

    def __init__(self, n: int):
        self.n, self.of = n, {}

    def add(self, bins: np.ndarray, **values: np.ndarray):
        lowest = bins.min()  # of many documents a batch holds a few
        for name, some in values.items():
            sums = np.bincount(bins - lowest, some)
            self.of.setdefault(name, np.zeros(self.n))[lowest : lowest + len(sums)] += sums

    def means(self, i: int | slice) -> dict:
        """Of a bin, or of several together: how many tokens, and what they are like; None for what none has."""
        sums = {name: float(some[i].sum()) for name, some in self.of.items()}
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
    """How often each token (vocab_size,) is there."""
    counts = np.zeros(vocab_size, np.int64)
    for start in progress(range(0, len(text), SCAN)):
        counts += np.bincount(text.read(start, min(SCAN, len(text) - start)), minlength=vocab_size)
    return counts


def losses(
    model: GPT,
    text,
    plan: Sequence[tuple[int, int, int]],
    token_lengths: np.ndarray,
    documents: np.ndarray,
    decode: Callable[[Sequence[int]], str],
    *,
    counts: np.ndarray | None = None,
    baseline: ngrams.NGrams | None = None,
    **scoring,
) -> dict:
    """Where the loss of a model lies.

    Args:
        text, plan, scoring: see score.
        token_lengths (vocab,): bytes of text in each token.
        documents: the first token of each document, ascending from 0.
        decode: tokens -> text, for what a document begins with.
        counts (vocab,): how often each token stands in the training text.
        baseline: counted on that text. It always sees the tokens before, also where a window has just begun.

    Returns a dict of `loss` in nats per token and what else there is of all tokens, and lists of such dicts, a row a
    bin: `by_position`, `by_frequency`, `by_document`, `calibration`; `error` is the standard error of a loss, if tokens
    are taken as independent.
    """
    order = len(baseline.levels) if baseline is not None else 0
    bands = np.zeros(len(token_lengths), np.int64) if counts is None else band(counts)
    sums = {
        "position": Sums(max(length for _, length, _ in plan) + 1),
        "frequency": Sums(int(bands.max()) + 1),
        "document": Sums(len(documents)),
        "calibration": Sums(BINS),
    }
    of_order = np.zeros(order)  # nats
    for some in score(model, text, plan, **scoring):
        values = {
            "tokens": np.ones(len(some.tokens)),
            "nats": some.nats,
            "squares": some.nats**2,
            "confidence": some.confidence,
            "correct": some.correct,
            "bytes": token_lengths[some.tokens],
        }
        if baseline is not None:
            before = min(some.start, order - 1)
            tokens = text.read(some.start - before, before + len(some.tokens)).astype(np.int64)
            nats = -np.log(ngrams.probabilities(baseline, tokens)[:, before:])
            of_order += nats.sum(1)
            values["ngram"] = nats[-1]
        numbers = np.arange(some.start, some.start + len(some.tokens))
        sums["position"].add(some.seen, **values)
        sums["frequency"].add(bands[some.tokens], **values)
        sums["document"].add(np.searchsorted(documents, numbers, side="right") - 1, **values)
        sums["calibration"].add(np.minimum((some.confidence * BINS).astype(np.int64), BINS - 1), **values)

    everything = slice(None)
    total = sums["position"].means(everything)
    bins = [{"from": i / BINS, "to": (i + 1) / BINS, **_confidence(sums["calibration"], i)} for i in range(BINS)]
    gaps = [row["tokens"] * abs(row["confidence"] - row["accuracy"]) for row in bins if row["tokens"]]
    result = total | {
        "nats": float(sums["position"].of["nats"].sum()),
        "bytes": int(sums["position"].of["bytes"].sum()),
        "confidence": _confidence(sums["calibration"], everything)["confidence"],
        "uniform_loss": math.log(len(token_lengths)),
        "ngram_losses": (of_order / total["tokens"]).tolist(),  # of order 1, 2, ...
        "by_position": [{"seen": i, **sums["position"].means(i)} for i in range(1, sums["position"].n)],
        "by_document": by_document(sums["document"], text, documents, decode),
        "calibration": bins,
        "expected_calibration_error": sum(gaps) / total["tokens"],
    }
    if counts is not None:
        types = np.bincount(bands, minlength=sums["frequency"].n)
        result["by_frequency"] = [
            {"at_least": 10 ** (i - 1) if i else 0, "types": int(types[i]), **sums["frequency"].means(i)}
            for i in range(len(types))
        ]
    return result


def band(counts: np.ndarray) -> np.ndarray:
    """0 for what is not there, 1 for a count of 1 to 9, 2 for 10 to 99, and so on."""
    return np.array([len(str(n)) if n else 0 for n in counts.tolist()], np.int64)


def _confidence(sums: Sums, i: int | slice) -> dict:
    row = sums.means(i)
    confidence = float(sums.of["confidence"][i].sum()) / row["tokens"] if row["tokens"] else None
    return {"tokens": row["tokens"], "confidence": confidence, "accuracy": row["accuracy"]}


def by_document(sums: Sums, text, documents: np.ndarray, decode: Callable) -> dict:
    """Of documents of at_least so many tokens: `count`, percentiles 0 .. 100 of their losses, and `documents`.

    These are the hardest and the easiest, a row each, or all, hardest first.
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


# --- what is copied -------------------------------------------------------------------------------------------------


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
    """How much of what the model writes stands in its training text, beside how much of what an author wrote does.

    From evenly spread places of a held-out text the model continues prompt_tokens tokens by sample_tokens; `held_out`
    is how the text itself goes on there. Fewer and shorter ones are taken of a short text. Of each the share of tokens
    inside passages of 8, 16, 32 ... tokens that stand in the training text word for word, and the longest of these.
    """
    prompt_tokens = max(1, min(prompt_tokens, len(text) // 2))
    sample_tokens = max(1, min(sample_tokens, len(text) // 2))
    samples = max(1, min(samples, len(text) // (prompt_tokens + sample_tokens)))
    starts = np.linspace(0, len(text) - prompt_tokens - sample_tokens, samples).astype(np.int64)
    rows = np.stack([text.read(start, prompt_tokens + sample_tokens).astype(np.int64) for start in starts.tolist()])
    prompts, held_out = rows[:, :prompt_tokens], rows[:, prompt_tokens:]
    columns = generate(
        model,
        torch.from_numpy(prompts),
        sample_tokens,
        seeds=range(seed, seed + samples),
        overflow="slide",
        temperature=temperature,
    )
    written = torch.stack([next(columns) for _ in writing(range(sample_tokens))], dim=1).cpu().numpy()
    return {
        "samples": samples,
        "sample_tokens": sample_tokens,
        "prompt_tokens": prompt_tokens,
        "temperature": temperature,
        "seed": seed,
        "generated": _copies(written, training, decode, searching),
        "held_out": _copies(held_out, training, decode, searching),
    }


def _copies(rows: np.ndarray, training, decode: Callable, progress: Callable) -> dict:
    found = copying.find_copies(rows, training, progress=progress)
    longest = None
    if found.longest is not None:
        row, first, n, place = found.longest
        longest = {"tokens": n, "text": decode(rows[row, first : first + n].tolist()), "training_token": place}
    shares = {str(n): float(inside.mean()) for n, inside in zip(found.lengths, found.inside, strict=True)}
    return {"shares": shares, "longest": longest}


# --- for the eye ----------------------------------------------------------------------------------------------------


def show(report: dict, console: Console):
    """Tables of what `losses` gives, with names of texts and, under `copying`, what `copies` gives."""
    _show_scale(report, console)
    console.print("\nloss in nats per token, error: its standard error if tokens were independent")
    ngram = [_ngram(report)] if report["ngram_losses"] else []  # the column, if there is one

    console.print("\nby position: how many tokens the window shows before the one to predict")
    table = _table("seen", "tokens", "loss", "error", *ngram)
    for low, high, row in position_bands(report["by_position"]):
        table.add_row(_range(low, high), *_cells(row, len(ngram)))
    console.print(table)

    if "by_frequency" in report:
        console.print("\nby frequency: how often a token stands in the training text")
        table = _table("times", "types", "of the loss", "tokens", "loss", "error", *ngram)
        for row in report["by_frequency"]:
            if row["types"]:
                share = (row["loss"] or 0.0) * row["tokens"] / report["nats"]
                table.add_row(_band(row), f"{row['types']:,}", f"{share:.1%}", *_cells(row, len(ngram)))
        console.print(table)

    found = report["by_document"]
    rows, which = found["documents"], "hardest first"
    if len(rows) > 10:
        rows, which = [*rows[:5], *rows[-5:]], "the five hardest and the five easiest"
    console.print(f"\nby document: {_documents(found)}, {which}")
    table = _table("begins", "tokens", "loss", "error", *ngram, "bits per byte")
    for row in rows:
        table.add_row(_shortened(row["begins"], 32), *_cells(row, len(ngram)), _number(row["bits_per_byte"], 3))
    console.print(table)

    error = report["expected_calibration_error"]
    console.print(f"\ncalibration: expected calibration error {error:.2%}")
    table = _table("confidence", "tokens", "on average", "correct")
    for row in report["calibration"]:
        if row["tokens"]:
            cells = f"{row['tokens']:,}", f"{row['confidence']:.1%}", f"{row['accuracy']:.1%}"
            table.add_row(f"{row['from']:.0%} to {row['to']:.0%}", *cells)
    table.add_row("all", f"{report['tokens']:,}", f"{report['confidence']:.1%}", f"{report['accuracy']:.1%}")
    console.print(table)
    if "copying" in report:
        _show_copying(report["copying"], console)


def _show_scale(report: dict, console: Console):
    bits = report["bits_per_byte"] / report["loss"] if report["bits_per_byte"] is not None else None  # of a nat
    ngram_losses = {f"{i + 1}-gram": loss for i, loss in enumerate(report["ngram_losses"])}
    table = _table("", "loss", "perplexity", "bits per byte")
    for name, loss in {"every token alike": report["uniform_loss"], **ngram_losses, "model": report["loss"]}.items():
        perplexity = f"{math.exp(min(loss, 700)):,.1f}"
        table.add_row(name, _number(loss), perplexity, _number(None if bits is None else loss * bits, 3))
    console.print("\nfor scale" + _of_ngrams(report))
    console.print(table)
    if ngram_losses:
        best = min(ngram_losses, key=ngram_losses.__getitem__)
        gap = ngram_losses[best] - report["loss"]
        side = "below" if gap >= 0 else "above"
        console.print(f"the model is {abs(gap):.4f} nats a token {side} the best of them, the {best}")


def _of_ngrams(report: dict) -> str:
    if not report["ngram_losses"]:
        return ""
    n, total = report["ngram_tokens"], report["training_tokens"]
    return f": n-grams of the {'' if n == total else f'first {n:,} of '}{total:,} tokens of training text"


def _show_copying(found: dict, console: Console):
    console.print(
        f"\ncopying: share of tokens in passages that stand in the training text, of {found['samples']} continuations "
        f"of {found['sample_tokens']} tokens, temperature {found['temperature']}"
    )
    table = _table("passages of", "generated", "held out")
    for n, *shares in _shares(found):
        table.add_row(f"{n} tokens or more", *(f"{share:.2%}" for share in shares))
    console.print(table)
    for name in ("generated", "held_out"):
        longest = found[name]["longest"]
        what = f"{longest['tokens']} tokens: {_shortened(repr(longest['text']), 300)}" if longest else "none so long"
        console.print(f"longest, {name.replace('_', ' ')}: {what}")


def _shares(found: dict) -> list[tuple[str, float, float]]:
    """(length, share of what is generated, of what is held out): three lengths, and longer ones that were found."""
    both = [(n, share, found["held_out"]["shares"][n]) for n, share in found["generated"]["shares"].items()]
    return [row for i, row in enumerate(both) if i < 3 or any(row[1:])]


def position_bands(rows: list[dict]) -> list[tuple[int, int, dict]]:
    """Rows of `by_position` in bands 1, 2, 3 to 4, 5 to 8 and so on: (first, last, their means)."""
    out, low = [], 1
    while low <= len(rows):
        high = min(len(rows), 1 if low == 1 else 2 * (low - 1))
        some = [row for row in rows[low - 1 : high] if row["tokens"]]
        n = sum(row["tokens"] for row in some)
        if n:
            merged = {"tokens": n, "error": math.sqrt(sum((row["tokens"] * row["error"]) ** 2 for row in some)) / n}
            for name in ("loss", "ngram_loss"):
                known = some[0][name] is not None
                merged[name] = sum(row["tokens"] * row[name] for row in some) / n if known else None
            out.append((low, high, merged))
        low = high + 1
    return out


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first)
    for column in others:
        table.add_column(column, justify="right")
    return table


def _cells(row: dict, n_ngrams: int) -> list[str]:
    cells = [f"{row['tokens']:,}", _number(row["loss"]), _number(row["error"], 3)]
    return cells + [_number(row["ngram_loss"])] * n_ngrams


def _documents(found: dict) -> str:
    of_length = f" of {found['at_least']} tokens or more" if found["at_least"] > 1 else ""
    return f"{found['count']:,} documents{of_length}"


def _ngram(report: dict) -> str:
    return f"{len(report['ngram_losses'])}-gram"  # the highest order


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _band(row: dict) -> str:
    low = row["at_least"]
    return "never" if low == 0 else _range(low, 10 * low - 1)


def _short(n: int) -> str:
    """A power of ten in four characters."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if n >= size:
            return f"{n // size}{letter}"
    return str(n)


def _shortened(text: str, n: int) -> str:
    return text if len(text) <= n else text[: n - 3] + "..."


def plot(report: dict, path: str | Path, dpi: int = 120):
    """The same as a picture; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(14, 8), layout="constrained")
    panels = {
        "by_position": _plot_position,
        "by_frequency": _plot_frequency,
        "by_document": _plot_documents,
        "calibration": _plot_calibration,
        "uniform_loss": _plot_scale,
        "copying": _plot_copying,
    }
    for (section, panel), axis in zip(panels.items(), axes.flat, strict=True):
        if section in report:
            axis.grid(alpha=0.3)
            axis.set_axisbelow(True)
            panel(report, axis)
        else:
            axis.set_axis_off()
            axis.text(0.5, 0.5, f"{section.replace('_', ' ')}: no training text", ha="center")
    figure.suptitle(f"loss {report['loss']:.4f} nats per token, {report['tokens']:,} tokens: {report['text']}")
    figure.savefig(path, dpi=dpi)
    pyplot.close(figure)


def _plot_position(report: dict, axis):
    rows = [row for row in report["by_position"] if row["tokens"]]
    axis.plot([row["seen"] for row in rows], [row["loss"] for row in rows], color="C0", alpha=0.3, linewidth=1)
    bands = position_bands(report["by_position"])
    x = [math.sqrt(low * high) for low, high, _ in bands]
    y = [row["loss"] for _, _, row in bands]
    axis.errorbar(x, y, [row["error"] for _, _, row in bands], color="C0", marker="o", capsize=3, label="model")
    if report["ngram_losses"]:
        axis.axhline(report["ngram_losses"][-1], color="C1", linestyle="--", label=_ngram(report))
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.set(title="by position", xlabel="tokens seen in the window", ylabel="nats per token")
    axis.legend()


def _plot_frequency(report: dict, axis):
    rows = [row for row in report["by_frequency"] if row["tokens"]]
    x = np.arange(len(rows))
    axis.bar(x - 0.2, [row["loss"] for row in rows], 0.4, yerr=[row["error"] for row in rows], label="model")
    axis.bar(x + 0.2, [row["ngram_loss"] for row in rows], 0.4, label=_ngram(report))
    times = ["never" if row["at_least"] == 0 else f"{_short(row['at_least'])}+" for row in rows]
    shares = [f"{row['tokens'] / report['tokens']:.1%}" for row in rows]
    axis.set_xticks(x, [f"{a}\n{b}" for a, b in zip(times, shares, strict=True)])
    label = "times in the training text, and share of the tokens"
    axis.set(title="by frequency", xlabel=label, ylabel="nats per token")
    axis.legend()


def _plot_documents(report: dict, axis):
    found = report["by_document"]
    if found["count"] <= 12:
        rows = found["documents"][::-1]
        y, labels = np.arange(len(rows)), [_shortened(row["begins"], 18).replace("$", r"\$") for row in rows]
        losses, errors = [row["loss"] for row in rows], [row["error"] for row in rows]
        axis.errorbar(losses, y, xerr=errors, color="C0", linestyle="", marker="o", capsize=3, label="model")
        if report["ngram_losses"]:
            of_ngrams = [row["ngram_loss"] for row in rows]
            axis.plot(of_ngrams, y, color="C1", linestyle="", marker="s", label=_ngram(report))
        axis.set_yticks(y, labels)
        axis.set(title="by document", xlabel="nats per token", ylim=(-0.5, len(rows) - 0.5))
        axis.legend()
    else:
        axis.plot(np.arange(101), found["loss_percentiles"])
        axis.set(title="by document", xlabel=f"percentile of {_documents(found)}", ylabel="nats per token")


def _plot_calibration(report: dict, axis):
    rows = [row for row in report["calibration"] if row["tokens"]]
    axis.plot([0, 1], [0, 1], color="grey", linestyle="--", label="perfect")
    middle = [(row["from"] + row["to"]) / 2 for row in report["calibration"]]
    shares = [row["tokens"] / report["tokens"] for row in report["calibration"]]
    axis.bar(middle, shares, 0.09, color="C0", alpha=0.25, label="share of the tokens")
    axis.plot([r["confidence"] for r in rows], [r["accuracy"] for r in rows], marker="o", label="correct")
    error = report["expected_calibration_error"]
    axis.set(title=f"calibration (expected error {error:.1%})", xlabel="confidence", xlim=(0, 1), ylim=(0, 1))
    axis.legend()


def _plot_scale(report: dict, axis):
    bars = {"model": report["loss"]}
    bars |= {f"{n}-gram": report["ngram_losses"][n - 1] for n in range(len(report["ngram_losses"]), 0, -1)}
    bars |= {"every token alike": report["uniform_loss"]}
    shown = axis.barh(list(bars), list(bars.values()), color=["C0", *["C1"] * (len(bars) - 1)])
    axis.bar_label(shown, fmt="%.2f", padding=3)
    axis.set(title="for scale", xlabel="nats per token", xlim=(0, 1.15 * max(bars.values())))


def _plot_copying(report: dict, axis):
    found = report["copying"]
    shares = _shares(found)
    x = np.arange(len(shares))
    for i, name in enumerate(("generated", "held_out")):
        longest = found[name]["longest"]
        label = f"{name.replace('_', ' ')}, longest {longest['tokens'] if longest else 'shorter'}"
        percent = [100 * row[1 + i] for row in shares]
        shown = axis.bar(x + 0.4 * i - 0.2, percent, 0.4, label=label)
        axis.bar_label(shown, fmt="%.2g")
    axis.set_xticks(x, [f"{n}+" for n, *_ in shares])
    label = f"tokens of a passage, temperature {found['temperature']}"
    axis.set(title="copied from the training text", xlabel=label, ylabel="% of the tokens")
    axis.margins(y=0.35)
    axis.legend()
