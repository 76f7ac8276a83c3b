"""The metrics of a run: metrics.jsonl, which is complete, and a line on the screen."""

import contextlib
import errno
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NotRequired

import torch
from pydantic_core import from_json
from rich.console import Console
from rich.progress import Progress, TextColumn
from typing_extensions import TypedDict

from data.files import check_shape
from data.older import renamed


class MetricsLog:
    """metrics.jsonl: one row per logged step, written at once. While the disk is full, rows wait in memory.

    A row is {"step": steps done, values that a rerun repeats exactly, "clock": {values that it does not}}. Opening the
    file at a step, to resume there, removes the rows after that step. A path of None writes nothing. Later disk errors
    are reported once, by `warn`.
    """

    def __init__(self, path: Path | None, step: int, warn: Callable[[str], None] = print):
        self.path, self.warn, self.warned = path, warn, False
        self.waiting: list[dict] = []
        self.end = 0  # bytes of complete rows in the file
        if path is not None:
            self.file = path.open("ab", buffering=0)
        self.rewind(step)

    def rewind(self, step: int):
        """Removes the rows after a step, and an incomplete last row."""
        self.waiting = [row for row in self.waiting if row["step"] <= step]
        if self.path is None:
            return
        steps = ((line, row.get("step") if isinstance(row, dict) else None) for _, line, row in _lines(self.path))
        kept = b"".join(line + b"\n" for line, n in steps if type(n) is int and n <= step)
        if not self.path.read_bytes().startswith(kept):  # there are damaged lines between the rows
            rewound = self.path.with_suffix(".tmp")
            rewound.write_bytes(kept)
            rewound.replace(self.path)
            self.file = self.path.open("ab", buffering=0)
        self.end = len(kept)
        self.file.truncate(self.end)

    def write(self, row: dict):
        if self.path is not None:
            self.waiting.append(row)
            self.flush()

    def flush(self):
        """Writes the waiting rows, in order."""
        try:
            while self.waiting:
                line = (json.dumps(self.waiting[0]) + "\n").encode()
                self.file.truncate(self.end)  # removes what a failed write left
                if self.file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.end += len(line)
                del self.waiting[0]
        except OSError as error:
            with contextlib.suppress(OSError):
                self.file.truncate(self.end)  # removes an incomplete row
            self._failed(error)

    def sync(self):
        """Flushes the rows to the disk, so that no checkpoint is ahead of them."""
        if self.path is None:
            return
        self.flush()
        try:
            os.fsync(self.file.fileno())
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError):
        if not self.warned:
            self.warn(f"{self.path} cannot be written: {error.strerror}; rows are kept in memory, training continues")
        self.warned = True


class Row(TypedDict):
    """A line of metrics.jsonl, as far as it is read here. Numbers may be NaN or infinite."""

    step: int
    tokens: NotRequired[int]
    loss: NotRequired[float]
    val_loss: NotRequired[float]
    val_bpb: NotRequired[float]
    clock: NotRequired[dict[str, float]]


def read_rows(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl without lines that are cut off; [] if there is no file.

    ValueError, with the line number, for a line that is JSON but not a row.
    """
    return [check_shape(renamed(row), Row, f"{path}, line {number},") for number, _, row in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[int, bytes, Any]]:
    """(number, line, parsed line) of each line that is JSON; the last line of a killed run may not be."""
    for number, line in enumerate(path.read_bytes().split(b"\n") if path.is_file() else [], start=1):
        with contextlib.suppress(ValueError):
            yield number, line, from_json(line)


def best(rows: list[dict]) -> dict | None:
    """The row with the lowest validation loss."""
    measured = [row for row in rows if math.isfinite(row.get("val_loss", math.nan))]
    return min(measured, key=lambda row: row["val_loss"], default=None)


def peak_memory(device: torch.device) -> float:
    """The peak memory of this process so far, in GiB: on the GPU if there is one, else in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


class Stopwatch:
    """Measures training time; paused during evaluation, sampling and checkpoints (`with watch:`)."""

    def __init__(self):
        self.total, self.since = 0.0, time.perf_counter()

    def seconds(self) -> float:
        return self.total + (time.perf_counter() - self.since if self.since is not None else 0.0)

    def __enter__(self):
        self.total, self.since = self.seconds(), None

    def __exit__(self, *_):
        self.since = time.perf_counter()


class Screen:
    """Prints progress: on a terminal one line that is updated in place, elsewhere a line per report."""

    def __init__(self, steps: int):
        self.console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self.live = sys.stdout.isatty()
        column = TextColumn("{task.description}", markup=False)
        self.progress = Progress(column, console=self.console, transient=True, disable=not self.live)
        self.task = self.progress.add_task("the first steps")
        self.steps = steps
        self.validation: list[str] = []  # the last one

    def __enter__(self):
        self.progress.start()
        return self

    def __exit__(self, *_):
        self.progress.stop()

    def say(self, text: str):
        """Prints lines that stay."""
        self.console.print(text)

    def report(self, step: int, row: dict, seconds_left: float, keep: bool):
        """Prints the metrics of a step; `keep`: the line stays on a terminal too."""
        width, speed = len(str(self.steps)), rate(row["clock"]["tok_per_sec"])
        loss, norm = row.get("loss", math.nan), row.get("grad_norm", math.nan)  # none of a step without an update
        parts = [f"step {step:>{width}}/{self.steps}", f"loss {loss:.3f}"]
        if "val_loss" in row:
            parts.append(f"val {row['val_loss']:.3f} ({row['val_bpb']:.3f} bpb)")
            self.validation = [f"val {row['val_loss']:.3f}"]
        end = [f"grad_norm {norm:.2f}", f"{speed} tok/s", f"eta {duration(seconds_left)}"]
        line = " | ".join([*parts, f"lr {row['lr']:.2e}", *end])
        short = " | ".join([f"{step}/{self.steps}", f"loss {loss:.3f}", *self.validation, *end])  # 80 columns
        self.progress.update(self.task, description=short)
        if keep or not self.live:
            self.say(line)


def rate(per_second: float) -> str:
    """16.5k, or 812."""
    return f"{per_second / 1000:.1f}k" if per_second >= 1000 else f"{per_second:.0f}"


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
