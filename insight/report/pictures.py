"""The report as a picture, with matplotlib."""

import math
from pathlib import Path

import numpy as np

from insight.drawing import pyplot
from insight.report.bands import copied_shares, counted_documents, highest_ngram, position_bands, shortened


def plot(report: dict, path: str | Path, dpi: int = 120):
    """Draws the report and saves it; needs matplotlib."""
    figure, axes = pyplot().subplots(2, 3, figsize=(14, 8), layout="constrained")
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
    pyplot().close(figure)


def _plot_position(report: dict, axis):
    rows = [row for row in report["by_position"] if row["tokens"]]
    axis.plot([row["seen"] for row in rows], [row["loss"] for row in rows], color="C0", alpha=0.3, linewidth=1)
    bands = position_bands(report["by_position"])
    x = [math.sqrt(low * high) for low, high, _ in bands]
    y = [row["loss"] for _, _, row in bands]
    axis.errorbar(x, y, [row["error"] for _, _, row in bands], color="C0", marker="o", capsize=3, label="model")
    if report["ngram_losses"]:
        axis.axhline(report["ngram_losses"][-1], color="C1", linestyle="--", label=highest_ngram(report))
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.set(title="by position", xlabel="tokens seen in the window", ylabel="nats per token")
    axis.legend()


def _plot_frequency(report: dict, axis):
    rows = [row for row in report["by_frequency"] if row["tokens"]]
    x = np.arange(len(rows))
    axis.bar(x - 0.2, [row["loss"] for row in rows], 0.4, yerr=[row["error"] for row in rows], label="model")
    axis.bar(x + 0.2, [row["ngram_loss"] for row in rows], 0.4, label=highest_ngram(report))
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
        y, labels = np.arange(len(rows)), [shortened(row["begins"], 18).replace("$", r"\$") for row in rows]
        losses, errors = [row["loss"] for row in rows], [row["error"] for row in rows]
        axis.errorbar(losses, y, xerr=errors, color="C0", linestyle="", marker="o", capsize=3, label="model")
        if report["ngram_losses"]:
            of_ngrams = [row["ngram_loss"] for row in rows]
            axis.plot(of_ngrams, y, color="C1", linestyle="", marker="s", label=highest_ngram(report))
        axis.set_yticks(y, labels)
        axis.set(title="by document", xlabel="nats per token", ylim=(-0.5, len(rows) - 0.5))
        axis.legend()
    else:
        axis.plot(np.arange(101), found["loss_percentiles"])
        axis.set(title="by document", xlabel=f"percentile of {counted_documents(found)}", ylabel="nats per token")


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
    bars |= {"uniform guess": report["uniform_loss"]}
    shown = axis.barh(list(bars), list(bars.values()), color=["C0", *["C1"] * (len(bars) - 1)])
    axis.bar_label(shown, fmt="%.2f", padding=3)
    axis.set(title="for scale", xlabel="nats per token", xlim=(0, 1.15 * max(bars.values())))


def _plot_copying(report: dict, axis):
    found = report["copying"]
    shares = copied_shares(found)
    x = np.arange(len(shares))
    for i, name in enumerate(("generated", "validation")):
        longest = found[name]["longest"]
        label = f"{name}, longest {longest['tokens'] if longest else 'shorter'}"
        percent = [100 * row[1 + i] for row in shares]
        shown = axis.bar(x + 0.4 * i - 0.2, percent, 0.4, label=label)
        axis.bar_label(shown, fmt="%.2g")
    axis.set_xticks(x, [f"{n}+" for n, *_ in shares])
    label = f"tokens of a passage, temperature {found['temperature']}"
    axis.set(title="copied from the training text", xlabel=label, ylabel="% of the tokens")
    axis.margins(y=0.35)
    axis.legend()


def _short(n: int) -> str:
    """A power of ten in four characters."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if n >= size:
            return f"{n // size}{letter}"
    return str(n)
