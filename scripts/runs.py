"""Looks at runs from their folders alone.  python -m scripts.runs plot runs/A runs/B --output loss.png"""

import argparse
import json
import sys
from pathlib import Path


def rows(run: Path) -> list[dict]:
    """metrics.jsonl of a run folder."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{run} is no run folder: metrics.jsonl is missing")
    table = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            table.append(json.loads(line))
        except json.JSONDecodeError:  # the last line of a killed run
            continue
    if not table:
        raise ValueError(f"{path} has no row yet")
    return table


def plot(runs: list[Path], output: Path):
    """A picture of the loss of some runs, on what they learn from and on held-out text, against tokens."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plotting needs matplotlib: pip install -c requirements.lock matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for i, run in enumerate(runs):
        table = rows(run)
        axes.plot([r["tokens"] / 1e6 for r in table], [r["loss"] for r in table], color=f"C{i}", alpha=0.3, linewidth=1)
        held_out = [(r["tokens"] / 1e6, r["validation_loss"]) for r in table if "validation_loss" in r]
        last = table[-1].get("bits_per_byte")
        label = run.resolve().name + (f", {last:.3f} bits per byte" if last is not None else "")
        axes.plot([x for x, _ in held_out], [y for _, y in held_out], color=f"C{i}", marker=".", label=label)
    axes.set(xlabel="million tokens", ylabel="loss, nats per token", title="pale: training, dots: held-out text")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(output, dpi=120)
    print(output)


def main():
    parser = argparse.ArgumentParser(prog="python -m scripts.runs", description=__doc__.split("  ")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    plotting = actions.add_parser("plot", help="a picture of the loss curves")
    plotting.add_argument("runs", nargs="+", type=Path)
    plotting.add_argument("--output", type=Path, default=Path("loss.png"))
    arguments = parser.parse_args()
    try:
        plot(arguments.runs, arguments.output)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
