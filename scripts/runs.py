"""Lists, compares and plots runs, using only their folders.  python -m scripts.runs --help"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from typing_extensions import TypedDict

from conf.console import visible
from conf.entry import check_output, entry_point
from conf.scripts import Runs
from data.files import read_json
from insight.drawing import pyplot
from scripts import terminal
from training.checkpoint import describe_best
from training.metrics import best, read_rows


@entry_point(
    "runs", Runs, {"list": ("folder",), "compare": ("runs",), "plot": ("runs", "output")}, default_action="list"
)
def main(cfg: Runs, action: str):
    if action == "list":
        show_list(Path(cfg.folder), terminal.console())
        return
    runs = [Path(run) for run in cfg.runs]
    if len(runs) < (needed := 2 if action == "compare" else 1):
        what = "two runs or more" if needed == 2 else "a run or more"
        raise ValueError(f"{action} needs {what}, got {', '.join(cfg.runs) or 'none'}: give runs='[runs/A,runs/B]'")
    if action == "compare":
        compare(runs, terminal.console())
    else:
        check_output("output", cfg.output)
        plot(runs, Path(cfg.output))


def rows(run: Path) -> list[dict]:
    """The rows of a run folder's metrics.jsonl."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{run} is not a run folder: metrics.jsonl is missing")
    if not (table := read_rows(path)):
        raise ValueError(f"{path} has no row yet")
    return table


def settings(run: Path) -> dict:
    """The settings in a run folder's config.yaml, by dotted names."""
    path = run / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{run} is not a run folder: config.yaml is missing")
    try:
        return dict(_dotted(OmegaConf.to_container(OmegaConf.load(path))))
    except Exception as error:  # of the YAML reader and OmegaConf, of several kinds
        raise ValueError(f"{path} is damaged: {error}") from error


def _dotted(values: dict, prefix: str = "") -> Iterator[tuple]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def name(run: Path) -> str:
    """The name of a run; of a job of a sweep, the sweep's name and the job's number."""
    path = run.resolve()
    return f"{path.parent.name}/{path.name}" if path.name.isdigit() else path.name


# --- list -----------------------------------------------------------------------------------------------------------


def show_list(folder: Path, console: Console):
    """Prints a line per run, also for the jobs of sweeps; the newest last."""
    found = [path.parent for pattern in ("*", "*/*") for path in folder.glob(f"{pattern}/metrics.jsonl")]
    if not found:
        raise ValueError(f"there is no run in {folder}: start one with python train.py")
    columns = ("steps", "loss", "val", "bpb", "params", "ended", "age")
    table, notes = terminal.table("run", *columns, left={"run"}, gap=1), []
    for run in sorted(found, key=lambda run: (run / "metrics.jsonl").stat().st_mtime):
        try:
            line, note = _line(run), describe_best(run)
        except (ValueError, OSError) as error:  # still list the other runs
            line, note = ["?"], str(error)
        table.add_row(visible(str(run.relative_to(folder))), *line)
        notes += [note] * bool(note)
    console.print(table)
    console.print("val: the lowest validation loss; bpb: bits per byte at that step")
    for note in notes:
        console.print(visible(note))


def _line(run: Path) -> list[str]:
    table = read_rows(run / "metrics.jsonl")
    try:
        given = settings(run)
    except ValueError:
        given = {}
    steps = given.get("steps") or _fact(run, "steps")  # of epochs
    last, lowest = table[-1] if table else {"step": 0}, best(table) or {}
    return [
        f"{last['step']}/{steps or '?'}",
        terminal.number(last.get("loss")),
        terminal.number(lowest.get("val_loss")),
        terminal.number(lowest.get("val_bpb"), 3),
        _count(_fact(run, "parameters")),
        "yes" if last["step"] == steps or _out_of_patience(table, given.get("patience")) else "no",
        _age(time.time() - (run / "metrics.jsonl").stat().st_mtime),
    ]


class Environment(TypedDict, total=False):
    parameters: int
    steps: int


def _out_of_patience(table: list[dict], patience: Any) -> bool:
    losses = [row["val_loss"] for row in table if "val_loss" in row]
    return isinstance(patience, int) and bool(losses) and len(losses) - 1 - losses.index(min(losses)) >= patience


def _fact(run: Path, name: str) -> int | None:
    try:
        return read_json(run / "environment.json", Environment).get(name)
    except ValueError:
        return None


def _count(value: int | None) -> str:
    if value is None:
        return "-"
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return str(value)


def _age(seconds: float) -> str:
    for size, letter in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{letter}"
    return f"{max(0, seconds):.0f}s"


# --- compare --------------------------------------------------------------------------------------------------------


def compare(runs: list[Path], console: Console):
    """Prints the settings that differ, and the last value of every metric, side by side."""
    given = [settings(run) for run in runs]
    figures = [_figures(rows(run)) for run in runs]
    for title, columns in (("setting", given), ("last", figures)):
        table = terminal.table(title, *(visible(name(run)) for run in runs), left={title}, gap=1)
        for key in dict.fromkeys(key for values in columns for key in values):
            cells = [values.get(key) for values in columns]
            if title == "last" or any(cell != cells[0] for cell in cells[1:]):
                shown = (_cell(cell, key in values) for cell, values in zip(cells, columns, strict=True))
                table.add_row(*map(visible, (key, *shown)))
        console.print(table if table.row_count else f"no {title} differs")
        console.print()


def _figures(table: list[dict]) -> dict:
    last = {}
    for row in table:
        last |= {key: value for key, value in row.items() if key != "clock"} | row.get("clock", {})
    if (row := best(table)) is not None:
        last |= {"best val_loss": row["val_loss"], "at step": row["step"]}
    return last


def _cell(value, there: bool) -> str:
    if not there:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "null" if value is None else str(value)


# --- plot -----------------------------------------------------------------------------------------------------------


def plot(runs: list[Path], output: Path):
    """Plots the training and validation loss of runs over tokens."""
    figure, axes = pyplot().subplots(figsize=(7, 4))
    for i, run in enumerate(runs):
        table = rows(run)
        table = [row for row in table if "tokens" in row]
        seen = [(r["tokens"] / 1e6, r["loss"]) for r in table if "loss" in r]  # skipped steps have none
        axes.plot([x for x, _ in seen], [y for _, y in seen], color=f"C{i}", alpha=0.3, linewidth=1)
        validated = [(r["tokens"] / 1e6, r["val_loss"]) for r in table if "val_loss" in r]
        last = table[-1].get("val_bpb") if table else None
        label = name(run) + (f", {last:.3f} bits per byte" if last is not None else "")
        axes.plot([x for x, _ in validated], [y for _, y in validated], color=f"C{i}", marker=".", label=label)
    axes.set(xlabel="million tokens", ylabel="loss, nats per token", title="pale: training, dots: validation")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(output, dpi=120)
    print(output)


if __name__ == "__main__":
    main()
