"""Trains a GPT: the story of a run, from top to bottom.  python train.py --help"""

from conf import console  # noqa: F401  imported first, so that Ctrl-C during the other imports prints no traceback

# isort: split
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from conf.entry import entry_point
from conf.schema import Train
from data.batches import make_batches
from data.files import naming
from data.prepare import planned_vocabulary, prepare
from training import distributed, estimate, interruption, tracking
from training.checkpoints import Checkpoints, run_lock
from training.engine import Engine, announce
from training.evaluation import validate
from training.interruption import Interruption
from training.recorder import Recorder
from training.recovery import recover
from training.resume import Start, find_start, nothing_left, planned_steps
from training.sampling import write_sample
from training.schedule import Due, lr_factor, row_length, row_lengths
from training.state import TrainState
from training.step import Step, look, train_step


@entry_point("train", Train)
def main(cfg: Train):
    distributed.start(cfg.rank_timeout)
    job = HydraConfig.get()
    group = Path(job.sweep.dir).name if job.mode == RunMode.MULTIRUN else None
    code = train(cfg, folder=Path(os.path.relpath(job.runtime.output_dir)), group=group)
    distributed.stop()
    if code:
        sys.exit(code)


def train(cfg: Train, folder: Path, group: str | None = None) -> int:
    """Trains as configured and returns the exit code. Only rank 0 prints.

    `folder` is the run folder, `group` the name of the sweep that the run belongs to, if any.
    """
    if cfg.dry_run:
        print(estimate.report(cfg, *planned_vocabulary(cfg.data, cfg.tokenizer)))
        return 0
    began, folder = time.monotonic(), distributed.broadcast(folder)
    with run_lock(folder, distributed.rank() == 0), naming(folder):
        tracking.asked_mode(cfg.tracking.mode, cfg.tracking.project)
        start = distributed.on_rank0(find_start, cfg, folder)
        steps = planned_steps(cfg, start)
        if steps is not None and nothing_left(cfg, steps, start):
            return 0
        return run(cfg, folder, group, began, start)


def run(cfg: Train, folder: Path, group: str | None, began: float, start: Start) -> int:
    # --- the text ---
    corpus = prepare(cfg.data, cfg.tokenizer, known=start.known)
    corpus.check_length(cfg.seq_len)
    rows, rank, ranks = cfg.batch_tokens // cfg.seq_len, distributed.rank(), distributed.size()
    batches = make_batches(corpus, rows, cfg.seq_len, cfg.seed, cfg.packing, rank, ranks, start.batch_order)
    start.check_corpus(corpus, cfg)
    steps = planned_steps(cfg, start, batches)
    cfg.schedule.check_steps(steps)
    if nothing_left(cfg, steps, start):
        return 0
    end = min(steps, cfg.stop_after or steps)
    length_at = partial(row_length, steps=steps, seq_len=cfg.seq_len, warmup=cfg.seq_len_warmup)
    lengths = row_lengths(start.step, end, steps, cfg.seq_len, cfg.seq_len_warmup)

    # --- the model, how it is computed here, and the training state ---
    torch.manual_seed(cfg.seed)
    engine = Engine.build(cfg, corpus.tokenizer.vocab_size, steps, start.saved.get("choices", {}), start.weights_of)
    epochs = batches.epoch(end) - batches.epoch(start.step)
    announce(cfg, folder, corpus, engine, end - start.step, epochs, lengths)
    engine.prepare(batches.batch(start.step), lengths, try_sizes=cfg.micro_batch == "auto" and not start.saved)
    state = TrainState.build(engine, cfg.optimizer, cfg, cfg.seed, start.step)
    start.restore(state, cfg)
    state.guard.leave_out(*cfg.skip_batches)

    # --- training ---
    with (
        Interruption(interruption.seconds(cfg.max_time), began, engine.steps_ahead) as interrupted,
        Recorder(folder, cfg, engine, start, steps, group) as recorder,
        Checkpoints(folder, cfg, start, steps, engine.choices, corpus, recorder) as checkpoints,
        distributed.name_missing_ranks(lambda: state.step),
    ):
        if cfg.on_spike == "rollback":
            checkpoints.ensure(state)  # to have one to roll back to
        stream, reason, patient = batches.stream(state.step, end, engine.device), 0, True
        pending: list[Step] = []
        while state.step < end and patient:
            if not pending and (reason := interrupted.requested(state.step)):
                break
            count, batch = next(stream)
            due, length = Due.after(state.step + 1, cfg.every, steps, end), length_at(state.step)
            factor = lr_factor(state.step, steps, cfg.schedule)
            if length != length_at(max(0, state.step - 1)):
                state.gate.forget_losses()
            pending.append(train_step(engine, state, batch, count, factor, cfg.optimizer.grad_clip, length, due.row))
            state.step += 1
            if not (due.any or interrupted.look_due(state.step)):
                continue

            # wait for the device: the outcome of the steps since the last look
            outcome = look(state, pending)
            if outcome.held:
                length = length_at(outcome.number)
                recover(outcome, cfg, engine, state, batches, length, corpus.tokenizer, checkpoints, recorder)
                recorder.rewind(state.step)
                stream = batches.stream(state.step, end, engine.device)
                continue

            # what is due after this step
            with recorder.watch:
                row = {"step": state.step, "tokens": state.step * cfg.batch_tokens, "epoch": batches.epoch(state.step)}
                row |= {"lr": factor * cfg.optimizer.lr} | outcome.figures() | state.guard.figures()
                compared = {}
                if due.evaluate:
                    figures, loss = validate(engine, corpus, cfg.seq_len, cfg.eval_tokens, state.step == steps)
                    row, compared = row | figures, {"compared_loss": loss}
                    lower = state.guard.evaluated(state.step, loss)
                    patient = cfg.patience is None or state.guard.waited < cfg.patience
                    due.checkpoint |= cfg.patience is not None and (lower or not patient)
                if due.row:
                    recorder.write(row, end, length)
                if due.sample:
                    write_sample(engine, state, corpus.tokenizer, cfg.sample, cfg.seed)
                    recorder.sample(state.samples)
                if due.checkpoint:
                    checkpoints.save(state, row | compared)
        if reason:
            checkpoints.ensure(state)
        failed = checkpoints.wait()
    return recorder.farewell(state, reason, patient, failed)


if __name__ == "__main__":
    main()
