"""Pictures with matplotlib: attention maps, a number per token, a number per cell, the logit lens.

All take `tokens` in readable form, see `visible`, and save to a path.
"""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from insight.drawing import pyplot
from model import GPT, collect_attention

CAVEAT = (
    "A weight is not a cause: it shows where a head attends, not whether this changes the answer. "
    "The effect is measured by ablating the head."
)
INCHES_A_LABEL = 0.11


SIGNS = str.maketrans(
    {" ": "\N{MIDDLE DOT}", "\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "\t": "\N{RIGHTWARDS ARROW}"}
)


def visible(token: bytes) -> str:
    """A token in visible form: a dot for a space, arrows for newline and tab, <..> for bytes that are no character."""

    def sign(c: str) -> str:
        broken = 0xDC80 <= ord(c) <= 0xDCFF  # a byte of half a character
        return c if c.isprintable() else f"<{ord(c) - 0xDC00 if broken else ord(c):02x}>"

    return "".join(map(sign, token.decode("utf-8", "surrogateescape").translate(SIGNS)))


@torch.no_grad()
def attention_maps(model: GPT, tokens: Tensor) -> Tensor:
    """tokens (1 s) -> the weights of all heads (n_layers, h, q, k)."""
    with collect_attention(model) as maps:
        model(tokens)
    return torch.cat(maps)


def _label(axis, tokens: Sequence[str], inches: float, **options):
    """Writes tokens along an axis of this length; if they do not fit, every second, third, ... of them."""
    step = max(1, math.ceil(len(tokens) * INCHES_A_LABEL / inches))
    places = range(0, len(tokens), step)
    axis.set_ticks(places, [tokens[i] for i in places], fontsize=7, parse_math=False, **options)


def _save(figure, path: str | Path, title: str):
    letters = int(figure.get_figwidth() * 12)  # per line
    lines = [part for line in title.split("\n") for part in textwrap.wrap(line, letters)]
    figure.suptitle("\n".join(lines), fontsize=10, parse_math=False)
    figure.savefig(path, dpi=120)


def draw_attention(path: str | Path, weights: Tensor, tokens: Sequence[str], effects: Tensor, title: str):
    """The map of every head, a row per layer. weights (n_layers, h, q, k); effects (n_layers, h) in nats."""
    n_layers, n_heads, n, _ = weights.shape
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    side = min(max(INCHES_A_LABEL * n, 1.8), max(30 / n_heads, 1.8))
    figure, axes = pyplot().subplots(
        n_layers,
        n_heads,
        figsize=(n_heads * (side + 0.2) + 2.2, n_layers * (side + 0.35) + 1.8),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for i in range(n_layers):
        for h in range(n_heads):
            image = axes[i, h].imshow(weights[i, h].where(seen, math.nan).numpy(), cmap="Blues", vmin=0, vmax=1)
            axes[i, h].set_title(f"head {i}.{h}, effect {effects[i, h]:+.3f}", fontsize=9)
    for row in axes:
        _label(row[0].yaxis, tokens, side)
        row[0].set_ylabel("this token ...", fontsize=8)
    for bottom in axes[-1]:
        _label(bottom.xaxis, tokens, side, rotation=90)
        bottom.set_xlabel("... attends to", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=min(1.0, 4 / (n_layers * side)), label="weight")
    _save(figure, path, f"{title}\n{CAVEAT}")


def draw_bars(path: str | Path, values: Sequence[float], tokens: Sequence[str], title: str, unit: str):
    """A bar per token, the first on top."""
    figure, axes = pyplot().subplots(figsize=(7, max(2.0, 1.4 + 0.17 * len(tokens))), layout="constrained")
    axes.barh(range(len(values)), values, color=["C0" if value >= 0 else "C3" for value in values])
    axes.set_yticks(range(len(tokens)), tokens, fontsize=8, parse_math=False)
    axes.set(ylim=(len(tokens) - 0.4, -0.6), xlabel=unit)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.grid(axis="x", alpha=0.3)
    _save(figure, path, title)


def draw_cells(
    path: str | Path, grids: Sequence[tuple[str, Tensor, Sequence[str], Sequence[str]]], title: str, unit: str
):
    """Grids one below the other: (name, values (rows, columns), row names, column names); 0 is white."""
    rows = [0.25 * len(values) for _, values, _, _ in grids]  # inches
    columns = max(values.shape[1] for _, values, _, _ in grids)
    figure, axes = pyplot().subplots(
        len(grids),
        figsize=(max(7.0, 3 + 0.5 * columns), 1.2 + sum(rows) + 1.2 * len(rows)),
        height_ratios=rows,
        squeeze=False,
        layout="constrained",
    )
    for axis, (name, values, row_names, column_names) in zip(axes[:, 0], grids, strict=True):
        far = max(values.abs().max().item(), 1e-9)
        image = axis.imshow(values.numpy(), cmap="RdBu", vmin=-far, vmax=far, aspect="auto")
        texts = [[f"{round(value, 2) + 0.0:.2f}" for value in row] for row in values.tolist()]  # no -0.00
        _write(axis, texts, values.abs() > 0.6 * far)
        axis.set_yticks(range(len(row_names)), row_names, fontsize=8, parse_math=False)
        axis.set_xticks(range(len(column_names)), column_names, fontsize=8, rotation=45, ha="right", parse_math=False)
        axis.set_title(name, fontsize=9, loc="left")
        figure.colorbar(image, ax=axis, label=unit, aspect=max(8, 0.8 * len(values)))
    _save(figure, path, title)


def draw_lens(path: str | Path, best: Sequence[Sequence[str]], chances: Tensor, tokens: Sequence[str], title: str):
    """The predictions after each token (rows), before the first block and after each block (columns).

    best[layer][token] is the most likely token, chances (n_layers + 1, s) its probability; darker is more likely.
    """
    n_columns, n = chances.shape
    figure, axis = pyplot().subplots(figsize=(max(6.0, 2.8 + 0.8 * n_columns), 2.2 + 0.2 * n), layout="constrained")
    image = axis.imshow(chances.T.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    _write(axis, [[token[:12] for token in row] for row in zip(*best, strict=True)], chances.T > 0.6)
    names = ["embedding", *(f"block {i}" for i in range(n_columns - 1))]
    axis.set_xticks(range(n_columns), names, fontsize=8)
    axis.set_yticks(range(n), tokens, fontsize=8, parse_math=False)
    axis.set_xlabel("if the model ended after", fontsize=8)
    axis.set_ylabel("prediction after this token", fontsize=8)
    figure.colorbar(image, ax=axis, label="probability", aspect=max(8, 0.8 * n))
    _save(figure, path, title)


def _write(axis, texts: Sequence[Sequence[str]], dark: Tensor):
    """Writes a text into each cell, in white if it is dark."""
    for i, row in enumerate(texts):
        for j, text in enumerate(row):
            colour = "white" if dark[i, j] else "black"
            axis.text(j, i, text, ha="center", va="center", fontsize=7, color=colour, parse_math=False)
