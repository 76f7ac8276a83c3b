"""What a run tells about itself: metrics.jsonl, which is the truth, and a line on the screen."""

import json
import math
import os
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TextColumn


class MetricsLog:
    """metrics.jsonl: one row a logged step, flushed at once.

    A row is {"step": steps done, values that a rerun repeats exactly, "clock": {values that it does not}}. Opening it
    at a step (a run resumed) removes what a lost continuation wrote after that step. A path of None keeps nothing.
    """

    def __init__(self, path: Path | None, step: int):
        if path is None:
            self.file = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            return
        kept = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= step:
                        kept.append(line)
                except json.JSONDecodeError:  # the last line of a killed run
                    continue
        rewound = path.with_suffix(".tmp")
        rewound.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        rewound.replace(path)
        self.file = path.open("a", encoding="utf-8")

    def write(self, row: dict):
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def sync(self):
        """Waits until the disk has it, so that no checkpoint is ahead of its rows."""
        if self.file.name != os.devnull:
            os.fsync(self.file.fileno())


class Stopwatch:
    """Seconds of training alone: evaluation, samples and checkpoints run with it paused."""

    def __init__(self):
        self.total, self.since = 0.0, time.perf_counter()

    def seconds(self) -> float:
        return self.total + (time.perf_counter() - self.since if self.since is not None else 0.0)

    def __enter__(self):
        self.total, self.since = self.seconds(), None

    def __exit__(self, *_):
        self.since = time.perf_counter()


class Screen:
    """On a terminal one line that stays in place, elsewhere a plain line a report."""

    def __init__(self, steps: int):
        self.console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self.live = sys.stdout.isatty()
        column = TextColumn("{task.description}", markup=False)
        self.progress = Progress(column, console=self.console, transient=True, disable=not self.live)
        self.task = self.progress.add_task("the first steps")
        self.steps = steps
        self.validation = ""  # the last one

    def __enter__(self):
        self.progress.start()
        return self

    def __exit__(self, *_):
        self.progress.stop()

    def say(self, text: str):
        """A line, or several, that stay."""
        self.console.print(text)

    def report(self, step: int, row: dict, seconds_left: float, keep: bool):
        """Where the run stands; `keep`: leave the line on the terminal too."""
        width, left, speed = len(str(self.steps)), duration(seconds_left), row["clock"]["tokens_per_second"]
        loss, norm = row.get("loss", math.nan), row.get("grad_norm", math.nan)  # none of a step passed over
        line = f"step {step:>{width}}/{self.steps}  left {left}  loss {loss:.4f}"
        if "validation_loss" in row:
            line += f"  validation {row['validation_loss']:.4f} ({row['bits_per_byte']:.3f} bits per byte)"
            self.validation = f"  val {row['validation_loss']:.3f}"
        line += f"  rate {row['lr']:.2e}  norm {norm:.2f}  {speed:,.0f} tokens/s"
        short = f"{step}/{self.steps}  left {left}  loss {loss:.3f}{self.validation}"  # 80 columns
        short += f"  lr {row['lr']:.1e}  norm {norm:.2f}  {speed:,.0f} tok/s"
        self.progress.update(self.task, description=short)
        if keep or not self.live:
            self.say(line)


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
