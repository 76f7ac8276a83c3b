"""The learning rate and the row length, as pure functions of the step."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

Count = Annotated[int, Ge(1), Le(10**12)]


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate's warm-up and decay, see lr_factor."""

    decay: Literal["cosine", "linear", "wsd", "constant"]
    warmup: Annotated[int, Ge(0), Le(10**12)]
    cooldown: Annotated[float, Gt(0), Le(1)]
    final: Annotated[float, Ge(0), Le(1)]

    def check_steps(self, steps: int):
        """ValueError if a run of this many steps would never leave its warm-up."""
        if self.warmup >= steps:
            raise ValueError(f"schedule.warmup must be below steps, got {self.warmup} and {steps}")


@dataclass(frozen=True)
class Every:
    """The interval of each of these, in steps."""

    log: Count
    evaluate: Count
    sample: Count
    checkpoint: Count


def lr_factor(step: int, steps: int, schedule: ScheduleConfig) -> float:
    """The factor of the initial learning rates in step 0 .. steps - 1.

    It rises linearly over `warmup` steps, from 1 / warmup at step 0 to 1, then decays to `final` at the end of the run:
    along half a cosine ("cosine"), linearly ("linear"), constant and then linearly over the last fraction `cooldown`
    ("wsd": warm-up, stable, decay; "MiniCPM", 2024), or not at all ("constant").
    """
    warmup, cooldown, final = schedule.warmup, schedule.cooldown, schedule.final
    if step < warmup:
        return (step + 1) / warmup
    left = 1 - (step - warmup) / max(1, steps - warmup)
    remaining = {
        "cosine": 0.5 * (1 - math.cos(math.pi * left)),
        "linear": left,
        "wsd": min(1.0, left / cooldown),
        "constant": 1.0,
    }[schedule.decay]
    return final + (1 - final) * remaining


def row_length(step: int, steps: int, seq_len: int, warmup: float) -> int:
    """The row length in step 0 .. steps - 1, in tokens: sequence-length warm-up.

    A quarter of seq_len in the first half of the fraction `warmup` of a run, half of seq_len in its second half, then
    seq_len. Short rows teach what is near first, and cost attention less ("The Stability-Efficiency Dilemma", 2022).
    """
    if step < warmup / 2 * steps:
        return seq_len // 4
    return seq_len // 2 if step < warmup * steps else seq_len


def row_lengths(start: int, end: int, steps: int, seq_len: int, warmup: float) -> list[int]:
    """The row lengths that occur in steps start .. end - 1, in ascending order."""
    changes = (start, math.ceil(warmup / 2 * steps), math.ceil(warmup * steps))
    return sorted({row_length(step, steps, seq_len, warmup) for step in changes if start <= step < end})


@dataclass
class Due:
    """What is due after a step."""

    log: bool
    evaluate: bool
    sample: bool
    checkpoint: bool

    @classmethod
    def after(cls, step: int, every: Every, last: int, end: int) -> "Due":
        """Everything is due after the last step of a run; a checkpoint also where this start of it ends."""
        log, evaluate, sample, checkpoint = (
            step % n == 0 or step == last for n in (every.log, every.evaluate, every.sample, every.checkpoint)
        )
        return cls(log, evaluate, sample, checkpoint or step == end)

    @property
    def row(self) -> bool:
        return self.log or self.evaluate

    @property
    def any(self) -> bool:
        return self.row or self.sample or self.checkpoint
