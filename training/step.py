"""A training step: gradients, the gate's verdict, the update. It does not wait for the device; `look` does."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training import distributed
from training.distributed import full_tensor
from training.engine import Engine
from training.gate import NOT_FINITE, OVERFLOW, SPIKE, Gate
from training.gradients import compute_gradients, gradient_norm
from training.state import TrainState


@dataclass
class Step:
    """A step that the device may still be computing."""

    number: int
    rng: dict  # random states before it
    numbers: Tensor | None  # (4,): loss, grad_norm, verdict, update ratio; None if its batch was skipped


@dataclass
class Outcome:
    """The outcome of a step. `held`: nothing has changed since before it, and the host has to decide what to do."""

    number: int
    loss: float | None = None  # None if no weight changed
    grad_norm: float | None = None
    update_ratio: float | None = None
    verdict: int | None = None
    held: bool = False

    def figures(self) -> dict[str, float]:
        """The metrics for a row: none without an update; the update ratio if it was measured."""
        values = {"loss": self.loss, "grad_norm": self.grad_norm, "update_ratio": self.update_ratio}
        return {name: value for name, value in values.items() if value is not None}


def train_step(
    engine: Engine,
    state: TrainState,
    batch: dict[str, Tensor],
    count: int,
    factor: float,
    clip: float,
    row_length: int,
    measure: bool = False,
) -> Step:
    """Makes the update of one batch, with `count` targets on all ranks, unless the gate is shut.

    `factor` multiplies the initial learning rates. `measure`: measure the update ratio too. `state.step` stays.
    """
    rng = state.rng.state()
    if state.step in state.guard.skip or count == 0:
        return Step(state.step, rng, None)
    with engine.explain_oom(batch):
        total = compute_gradients(
            engine.forward,
            state.scaler,
            batch,
            micro_batch=engine.choices.micro_batch,
            count=count,
            autocast=engine.autocast,
            row_length=row_length,
        )
        norm = gradient_norm(state.optimizer, state.scaler)
        loss = distributed.total(total) / count
    verdict = state.gate.judge(loss, norm, state.scaler)
    ratio = update(state.optimizer, state.scaler, factor=factor, norm=norm, clip=clip, gate=state.gate, measure=measure)
    return Step(state.step, rng, torch.stack([loss, norm.to(loss.dtype), verdict, ratio.to(loss.dtype)]))


def update(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    *,
    factor: float,
    norm: Tensor,
    clip: float,
    gate: Gate | None = None,
    measure: bool = False,
) -> Tensor:
    """Clips the gradients to the norm `clip` and updates the weights; changes nothing while the gate is shut.

    Each group's learning rate is its initial_lr times `factor`. Returns the update ratio with `measure`, else NaN: the
    norm of the change over the norm of the weights, about 1e-3 in a healthy run.
    """
    weights = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    before = [w.clone() for w in weights] if measure else None
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
        nn.utils.clip_grads_with_norm_(group["params"], clip, norm)
    # fused AdamW and Muon read these attributes, as GradScaler sets them: where found_inf is 1, step() changes nothing,
    # and the host need not know
    optimizer.grad_scale, optimizer.found_inf = None, None if gate is None else gate.shut
    optimizer.step()
    if scaler.is_enabled():
        scaled = scaler._scale.clone(), scaler._growth_tracker.clone()
        scaler.update()
        if gate is not None:
            gate.keep_if_held(scaled, (scaler._scale, scaler._growth_tracker))
    optimizer.zero_grad(set_to_none=True)
    if not measure:
        return torch.full((), math.nan, device=norm.device)
    change = nn.utils.get_total_norm([new - old for new, old in zip(weights, before, strict=True)])
    return full_tensor(change) / full_tensor(nn.utils.get_total_norm(before))


def look(state: TrainState, steps: list[Step]) -> Outcome:
    """Waits for the device, records what became of these consecutive steps, and returns the outcome of the last.

    If one was held, returns the outcome of the first held one, and the state is as it was before that step.
    """
    measured = [step.numbers for step in steps if step.numbers is not None]
    numbers = iter(torch.stack(measured).tolist() if measured else [])
    guard, outcome = state.guard, None
    for step in steps:
        outcome = Outcome(step.number)
        if step.numbers is None:
            guard.skipped += 1
            continue
        loss, norm, verdict, ratio = next(numbers)
        if verdict == OVERFLOW:
            guard.skipped += 1
            continue
        outcome = Outcome(step.number, loss, norm, None if math.isnan(ratio) else ratio, verdict)
        if verdict == NOT_FINITE or (verdict == SPIKE and state.gate.hold_spikes):
            outcome.held = True
            state.step = step.number
            state.rng.load(step.rng)
            state.gate.open(state.gate.losses())
            break
        guard.in_a_row = 0
        guard.spikes += verdict == SPIKE
    steps.clear()
    return outcome
