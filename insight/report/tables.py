"""The report as tables."""

import math

from rich.console import Console
from rich.table import Table

from insight.report.bands import copied_shares, counted_documents, highest_ngram, position_bands, shortened


def show(report: dict, console: Console):
    """Prints the result of `losses` and, under `copying`, of `copies`, as tables."""
    _show_scale(report, console)
    console.print("\nloss in nats per token, error: its standard error if tokens were independent")
    ngram = [highest_ngram(report)] if report["ngram_losses"] else []  # the column, if there is one

    console.print("\nby position: the number of tokens in the window before the predicted one")
    table = _table("seen", "tokens", "loss", "error", *ngram)
    for low, high, row in position_bands(report["by_position"]):
        table.add_row(_range(low, high), *_cells(row, len(ngram)))
    console.print(table)

    if "by_frequency" in report:
        console.print("\nby frequency: how often a token occurs in the training text")
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
    console.print(f"\nby document: {counted_documents(found)}, {which}")
    table = _table("begins", "tokens", "loss", "error", *ngram, "bits per byte")
    for row in rows:
        table.add_row(shortened(row["begins"], 32), *_cells(row, len(ngram)), _number(row["bits_per_byte"], 3))
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
    for name, loss in {"uniform guess": report["uniform_loss"], **ngram_losses, "model": report["loss"]}.items():
        perplexity = f"{math.exp(min(loss, 700)):,.1f}"
        table.add_row(name, _number(loss), perplexity, _number(None if bits is None else loss * bits, 3))
    console.print("\nfor scale" + _of_ngrams(report))
    console.print(table)
    if ngram_losses:
        best = min(ngram_losses, key=ngram_losses.__getitem__)
        gap = ngram_losses[best] - report["loss"]
        side = "below" if gap >= 0 else "above"
        console.print(f"the model is {abs(gap):.4f} nats/token {side} the best of them, the {best}")


def _of_ngrams(report: dict) -> str:
    if not report["ngram_losses"]:
        return ""
    n, total = report["ngram_tokens"], report["training_tokens"]
    return f": n-grams of the {'' if n == total else f'first {n:,} of '}{total:,} tokens of training text"


def _show_copying(found: dict, console: Console):
    console.print(
        f"\ncopying: fraction of tokens in passages of the training text, in {found['samples']} continuations "
        f"of {found['sample_tokens']} tokens, temperature {found['temperature']}"
    )
    table = _table("passages of", "generated", "validation")
    for n, *shares in copied_shares(found):
        table.add_row(f"{n} tokens or more", *(f"{share:.2%}" for share in shares))
    console.print(table)
    for name in ("generated", "validation"):
        longest = found[name]["longest"]
        what = f"{longest['tokens']} tokens: {shortened(repr(longest['text']), 300)}" if longest else "none that long"
        console.print(f"longest, {name}: {what}")


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first)
    for column in others:
        table.add_column(column, justify="right")
    return table


def _cells(row: dict, n_ngrams: int) -> list[str]:
    cells = [f"{row['tokens']:,}", _number(row["loss"]), _number(row["error"], 3)]
    return cells + [_number(row["ngram_loss"])] * n_ngrams


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _band(row: dict) -> str:
    low = row["at_least"]
    return "never" if low == 0 else _range(low, 10 * low - 1)
