"""Notices before the weights have it when numbers go wrong, on the device; and what a run remembers of that."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

Count = Annotated[int, Ge(1), Le(10**12)]


@dataclass(frozen=True)
class GuardConfig:
    """What a run does where its numbers go wrong.

    on_nonfinite: what follows a loss or gradient that is not finite; max_skips of these in a row end the run, too.
    on_spike: what follows a loss more than spike_sigmas standard deviations above the mean of the last spike_window.
    skip_batches: steps, from 0, whose batches change nothing.
    """

    on_nonfinite: Literal["stop", "skip"]
    max_skips: Count
    on_spike: Literal["count", "rollback"]
    spike_sigmas: Annotated[float, Gt(0), Le(1e30)]
    spike_window: Annotated[int, Ge(2), Le(10**6)]
    skip_batches: list[Annotated[int, Ge(0), Le(10**12)]]


FINE, OVERFLOW, NOT_FINITE, SPIKE, HELD = range(5)  # what the gate makes of a step's numbers


@dataclass
class Guard:
    """What a run remembers of its steps, to be saved with it.

    losses: of the last steps, with rows as long as now. skip: steps whose batch is passed over. skipped: steps that
    changed no weight. in_a_row: how many came last, one after the other, whose numbers were not finite. spikes: losses
    more than so many standard deviations above the mean of those before. rollbacks: since the last checkpoint after
    which a batch was learned from. lowest: the lowest validation loss, after lowest_step steps, always on the same part
    of the text; waited: evaluations since that found none as low.
    """

    losses: list[float] = field(default_factory=list)
    skip: list[int] = field(default_factory=list)
    skipped: int = 0
    in_a_row: int = 0
    spikes: int = 0
    rollbacks: int = 0
    lowest: float = math.inf
    lowest_step: int | None = None
    waited: int = 0

    def leave_out(self, *steps: int):
        """Their batches, from now on."""
        self.skip = sorted({*self.skip, *steps})

    def figures(self) -> dict[str, int]:
        """For a row of metrics.jsonl."""
        return {"skipped": self.skipped, "spikes": self.spikes}

    def evaluated(self, step: int, loss: float) -> bool:
        """Whether no validation loss before was as low."""
        lower = loss < self.lowest
        if lower:
            self.lowest, self.lowest_step = loss, step
        self.waited = 0 if lower else self.waited + 1
        return lower


class Gate:
    """Judges a step's numbers where they are, on the device, before the update: the host need not wait for them.

    A number that is not finite, or with on_spike=rollback a loss that jumps, shuts the gate for that step and all that
    follow, so that nothing has changed since when the host comes to look: it decides, opens the gate, and has the steps
    after it made again. A loss jumps that is more than spike_sigmas standard deviations above the mean of the
    spike_window losses before.
    """

    def __init__(self, device: torch.device, config: GuardConfig):
        self.sigmas, self.window = config.spike_sigmas, config.spike_window
        self.hold_spikes = config.on_spike == "rollback"
        self.device, self.dtype = device, torch.float32 if device.type == "mps" else torch.float64
        self.verdicts = torch.arange(5, device=device, dtype=self.dtype)
        self.open([])

    def open(self, losses: list[float]):
        """With the losses to measure jumps against: none is one until there are `window` of them."""
        self.held = torch.zeros((), dtype=torch.bool, device=self.device)
        self.shut = torch.zeros((), device=self.device)  # 1.0: no update
        known = [math.nan] * (self.window - len(losses)) + list(losses)[-self.window :]
        self.before = torch.tensor(known, dtype=self.dtype, device=self.device)

    def forget(self):
        """The losses before: rows have another length now, and a token more or less before it."""
        self.before = torch.where(self.held, self.before, math.nan)

    def losses(self) -> list[float]:
        return [loss for loss in self.before.tolist() if not math.isnan(loss)]

    def judge(self, loss: Tensor, norm: Tensor, scaler: torch.amp.GradScaler) -> Tensor:
        """FINE, OVERFLOW (in fp16, whose scale was too large), NOT_FINITE, SPIKE, or HELD by a step before."""
        fine, overflow, not_finite, spike, held = self.verdicts
        finite = loss.isfinite() & norm.isfinite()
        jumps = loss > self.before.mean() + self.sigmas * self.before.std(correction=0)
        verdict = torch.where(finite, torch.where(jumps, spike, fine), not_finite)
        if scaler.is_enabled():
            too_large = loss.isfinite() & ~norm.isfinite() & (scaler._scale >= 1)
            verdict = torch.where(too_large, overflow, verdict)
        verdict = torch.where(self.held, held, verdict)
        hold = verdict == not_finite
        if self.hold_spikes:
            hold = hold | (verdict == spike)
        self.held = self.held | hold
        self.shut = (self.held | (verdict == overflow)).float()
        known = torch.cat([self.before[1:], loss.to(self.dtype).view(1)])
        self.before = torch.where(self.held | (verdict == overflow), self.before, known)
        return verdict

    def keep_if_held(self, before: tuple[Tensor, ...], now: tuple[Tensor, ...]):
        """What a held step must not change, in place."""
        for old, new in zip(before, now, strict=True):
            new.copy_(torch.where(self.held, old, new))
