"""The learning rate, and the length of rows, as pure functions of the step."""

import math
from dataclasses import asdict, dataclass


def rate_factor(step: int, steps: int, *, warmup: int, decay: str, cooldown: float, final: float) -> float:
    """What the peak rates are multiplied by in step 0 .. steps - 1.

    Rises in a line over `warmup` steps, from 1 / warmup at step 0 to 1, then falls to `final` at the end: along half a
    "cosine", in a "linear" way, level and then linear over the last share `cooldown` of the run ("wsd": warm-up,
    stable, decay; "MiniCPM", 2024), or not at all ("constant").
    """
    if step < warmup:
        return (step + 1) / warmup
    left = 1 - (step - warmup) / max(1, steps - warmup)
    remaining = {
        "cosine": 0.5 * (1 - math.cos(math.pi * left)),
        "linear": left,
        "wsd": min(1.0, left / cooldown),
        "constant": 1.0,
    }[decay]
    return final + (1 - final) * remaining


def row_length(step: int, steps: int, seq_len: int, warmup: float) -> int:
    """Tokens that a row has in step 0 .. steps - 1.

    In the first half of the share `warmup` of a run a quarter of seq_len, in the second half a half, then seq_len: what
    is near is learned first, by shorter rows, which cost attention less ("The Stability-Efficiency Dilemma", 2022).
    """
    if step < warmup / 2 * steps:
        return seq_len // 4
    return seq_len // 2 if step < warmup * steps else seq_len


def row_lengths(start: int, end: int, steps: int, seq_len: int, warmup: float) -> list[int]:
    """Those that rows have in the steps start .. end - 1, in ascending order."""
    changes = (start, math.ceil(warmup / 2 * steps), math.ceil(warmup * steps))
    return sorted({row_length(step, steps, seq_len, warmup) for step in changes if start <= step < end})


@dataclass
class Due:
    """What is to be done after a step."""

    log: bool
    evaluate: bool
    sample: bool
    checkpoint: bool

    @classmethod
    def after(cls, step: int, every, last: int, end: int) -> "Due":
        """`every`: how often, in steps. All is due after the last step of a run; a checkpoint where it ends before."""
        due = cls(**{what: step % n == 0 or step == last for what, n in asdict(every).items()})
        due.checkpoint |= step == end
        return due

    @property
    def row(self) -> bool:
        return self.log or self.evaluate

    @property
    def any(self) -> bool:
        return self.row or self.sample or self.checkpoint
