"""What a run does after a non-finite loss or gradient, or a spike: stop after saving, skip the batch, or roll back."""

from typing import TYPE_CHECKING

from torch import Tensor

from data.batches import Batches
from data.tokenizer import Tokenizer
from training import distributed, nonfinite
from training.checkpoints import Checkpoints
from training.engine import Engine
from training.gate import NOT_FINITE
from training.gradients import micro_batches
from training.recorder import Recorder
from training.state import TrainState
from training.step import Outcome

if TYPE_CHECKING:
    from conf.schema import Train


def recover(
    outcome: Outcome,
    cfg: "Train",
    engine: Engine,
    state: TrainState,
    batches: Batches,
    row_length: int,
    tokenizer: Tokenizer,
    checkpoints: Checkpoints,
    recorder: Recorder,
):
    """Handles a held step: skips its batch from here on, or from the last checkpoint on (on_spike=rollback).

    `row_length`: the step's. Where the run must stop it raises a ValueError; the state before the step is saved.
    """
    guard, step = state.guard, outcome.number
    if outcome.verdict == NOT_FINITE:
        batch = {name: rows.to(engine.device) for name, rows in batches.batch(step).items()}
        what = explain(outcome, batch, row_length, engine, state, tokenizer, recorder)
        if cfg.on_nonfinite == "stop" or guard.in_a_row >= cfg.max_skips:
            hint = f"resume=auto with on_nonfinite=skip, or a lower optimizer.lr than {cfg.optimizer.lr}"
            raise ValueError(f"{what}; {_saved(checkpoints, state)}try {hint}")
        recorder.say(f"{what}; the batch is skipped")
        guard.in_a_row += 1
        guard.leave_out(step)
        return
    what = f"the loss of step {step + 1} jumped to {outcome.loss:.4f}"
    if guard.rollbacks >= cfg.max_skips:
        hint = f"resume=auto with on_spike=count, or a higher spike_sigmas than {cfg.spike_sigmas}"
        times = f"after {cfg.max_skips} rollbacks (max_skips)"
        raise ValueError(f"{what}, {times}; {_saved(checkpoints, state)}try {hint}")
    recorder.say(f"{what}: rolling back to the last checkpoint")
    guard.leave_out(step)
    guard.spikes, guard.rollbacks = guard.spikes + 1, guard.rollbacks + 1
    try:
        checkpoints.roll_back(state)
    except ValueError as error:
        recorder.say(f"{error}: only the batch is skipped")


def _saved(checkpoints: Checkpoints, state: TrainState) -> str:
    checkpoints.ensure(state)
    return f"step {state.step} is saved: " if checkpoints.wait() == 0 else ""


def explain(
    outcome: Outcome,
    batch: dict[str, Tensor],
    row_length: int,
    engine: Engine,
    state: TrainState,
    tokenizer: Tokenizer,
    recorder: Recorder,
) -> str:
    """Replays the step to find where a number was first not finite; reports that, with the text of the batch."""
    rng = state.rng.state()
    origin = nonfinite.NOWHERE
    if engine.searchable:
        pieces = list(micro_batches(batch, engine.choices.micro_batch, row_length))
        origin = nonfinite.find_origin(engine.model, pieces, engine.autocast, rng)
    state.rng.load(rng)
    own = [tokenizer.decode(row) for row in batch["tokens"].tolist()]
    origins, texts = zip(*distributed.gather_objects((origin, own)), strict=True)
    origin = next((one for one in origins if one["tensor"] is not None), nonfinite.NOWHERE)
    path = recorder.folder / f"nonfinite_{outcome.number:08}.json"
    if distributed.rank() == 0:
        try:
            every = [text for of_rank in texts for text in of_rank]
            nonfinite.report(path, outcome.number, outcome.loss, outcome.grad_norm, origin, every)
        except OSError as error:
            recorder.say(f"{path} cannot be written: {error.strerror}")
    what = f"the loss of step {outcome.number + 1} is {outcome.loss}, its gradient norm {outcome.grad_norm}"
    return f"{what}: {nonfinite.describe(origin)}; see {path}"
