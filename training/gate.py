"""The gate: keeps non-finite numbers and spikes away from the weights, on the device. The guard: what a run counts."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

Count = Annotated[int, Ge(1), Le(10**12)]


@dataclass(frozen=True)
class GuardConfig:
    """What a run does about non-finite numbers and spikes.

    on_nonfinite: what to do after a loss or gradient that is not finite; max_skips in a row end the run in any case.
    on_spike: what to do after a spike, a loss more than spike_sigmas standard deviations above the mean of the last
        spike_window losses.
    skip_batches: steps, from 0, that make no update.
    """

    on_nonfinite: Literal["stop", "skip"]
    max_skips: Count
    on_spike: Literal["count", "rollback"]
    spike_sigmas: Annotated[float, Gt(0), Le(1e30)]
    spike_window: Annotated[int, Ge(2), Le(10**6)]
    skip_batches: list[Annotated[int, Ge(0), Le(10**12)]]


FINE, OVERFLOW, NOT_FINITE, SPIKE, HELD = range(5)  # the gate's verdicts on a step


@dataclass
class Guard:
    """What a run knows about its past steps; saved in its checkpoints.

    losses: of the last steps, as far as their rows were as long as now. skip: steps whose batch is skipped.
    skipped: the number of steps without an update. in_a_row: the number of steps in a row, up to now, that were not
    finite. spikes: the number of spikes. rollbacks: since the last checkpoint that followed an update.
    lowest: the lowest validation loss, after lowest_step steps, always on the same part of the text. waited: the number
    of evaluations since.
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
        """Skips the batches of these steps from now on."""
        self.skip = sorted({*self.skip, *steps})

    def figures(self) -> dict[str, int]:
        """The counts for a row of metrics.jsonl."""
        return {"skipped": self.skipped, "spikes": self.spikes}

    def evaluated(self, step: int, loss: float) -> bool:
        """Takes note of a validation loss; returns whether it is the lowest so far."""
        lower = loss < self.lowest
        if lower:
            self.lowest, self.lowest_step = loss, step
        self.waited = 0 if lower else self.waited + 1
        return lower


class Gate:
    """Judges a step's loss and grad_norm on the device, before the update, so that the host need not wait for them.

    A number that is not finite, or a spike with on_spike=rollback, shuts the gate for that step and every later one, so
    that nothing has changed when the host looks. The host then decides what to do, opens the gate, and repeats the
    later steps.
    """

    def __init__(self, device: torch.device, config: GuardConfig):
        self.sigmas, self.window = config.spike_sigmas, config.spike_window
        self.hold_spikes = config.on_spike == "rollback"
        self.device, self.dtype = device, torch.float32 if device.type == "mps" else torch.float64
        self.verdicts = torch.arange(5, device=device, dtype=self.dtype)
        self.open([])

    def open(self, losses: list[float]):
        """Opens the gate. `losses` are those to compare with: there is no spike until there are `window` of them."""
        self.held = torch.zeros((), dtype=torch.bool, device=self.device)
        self.shut = torch.zeros((), device=self.device)  # 1.0: no update
        known = [math.nan] * (self.window - len(losses)) + list(losses)[-self.window :]
        self.before = torch.tensor(known, dtype=self.dtype, device=self.device)

    def forget_losses(self):
        """Empties the window of losses, when the row length changes: a token then has more or less context."""
        self.before = torch.where(self.held, self.before, math.nan)

    def losses(self) -> list[float]:
        return [loss for loss in self.before.tolist() if not math.isnan(loss)]

    def judge(self, loss: Tensor, norm: Tensor, scaler: torch.amp.GradScaler) -> Tensor:
        """FINE, OVERFLOW (in fp16, the loss scale was too large), NOT_FINITE, SPIKE, or HELD by an earlier step."""
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
        """Restores, in place, what a held step must not have changed."""
        for old, new in zip(before, now, strict=True):
            new.copy_(torch.where(self.held, old, new))
