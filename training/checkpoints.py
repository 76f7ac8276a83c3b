"""The checkpoints of a run: saving in the background, keeping the newest and the best, rolling back."""

import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from data.corpus import Corpus
from training import checkpoint, distributed, tracking
from training.auto import Choices
from training.checkpoint import best_first, check, step_folder, steps
from training.recorder import Recorder
from training.resume import Start
from training.state import TrainState

if TYPE_CHECKING:
    from conf.schema import Train

METRICS = ("loss", "val_loss", "val_bpb", "compared_loss")  # of the last row, for model.json


class BackgroundSaver:
    """Saves checkpoints of a run in a thread, one at a time, while training continues; completes the last one on exit.

    A failed save is reported by `warn` and counted in `failed`; training continues. After each save, all checkpoints
    are removed but the newest `keep` (None: all) and the one with the lowest validation loss.
    """

    def __init__(self, run: Path, keep: int | None, warn: Callable[[str], None]):
        self.run, self.keep, self.warn = run, keep, warn
        self.failed = 0
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.writing: Future | None = None
        self.folder: Path | None = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait()
        self.pool.shutdown()

    def save(self, step: int, *content):
        """Starts a save, once the one before is done.

        `content`: the arguments of checkpoint.save after the folder; they must not change any more.
        """
        self.wait()
        self.folder = step_folder(self.run, step)
        self.writing = self.pool.submit(checkpoint.save, self.folder, *content)

    def wait(self):
        """Waits until the last save is on the disk or has failed."""
        if self.writing is None:
            return
        try:
            self.writing.result()
        except Exception as error:  # a full disk raises OSError, RuntimeError or SafetensorError
            self.failed += 1
            self.warn(f"the checkpoint {self.folder} could not be saved, training continues: {_why(error, self.run)}")
        else:
            try:
                prune(self.run, self.keep)
            except (OSError, ValueError) as error:
                self.warn(f"older checkpoints are kept: {error}")
        self.writing = None


class Checkpoints:
    """Saves a run's checkpoints and rolls back to them. Its methods are collectives; rank 0 writes."""

    def __init__(
        self, folder: Path, cfg: "Train", start: Start, steps: int, choices: Choices, corpus: Corpus, recorder: Recorder
    ):
        self.folder, self.tokenizer, self.recorder = folder, corpus.tokenizer, recorder
        self.artifacts = cfg.tracking.artifacts
        self.background = BackgroundSaver(folder, cfg.keep, recorder.say)
        learned_from = {"folder": str(corpus.folder), "fingerprint": corpus.fingerprint()}
        self.about: dict[str, Any] = {"seq_len": cfg.seq_len, "precision": choices.precision, "data": asdict(cfg.data)}
        self.about |= {"tokenizer": asdict(cfg.tokenizer), "tokenizer_hash": corpus.tokenizer.fingerprint()}
        self.about |= {"batch_order": start.batch_order, "corpus": learned_from}
        self.of_run: dict[str, Any] = {
            "choices": asdict(choices),
            "config": asdict(cfg),
            "corpus": learned_from["fingerprint"],
        }
        self.of_run |= {"steps": steps, "wandb_id": recorder.mirror.id}
        if cfg.resume == "auto" and distributed.rank() == 0:
            retire_after(folder, start.step)

    def __enter__(self):
        self.background.__enter__()
        return self

    def __exit__(self, *_):
        self.background.__exit__()

    def save(self, state: TrainState, row: dict):
        """Saves the state in the background. `row` holds the step's metrics, if there are any."""
        if state.step - 1 not in state.guard.skip:
            state.guard.rollbacks = 0
        weights, about = checkpoint.snapshot(state.model)
        memory = state.memory() | self.of_run
        about |= {"step": state.step, **self.about} | {name: row[name] for name in METRICS if name in row}
        if distributed.rank() > 0:
            return
        self.recorder.sync()
        self.background.save(state.step, weights, self.tokenizer.save, about, memory)
        if self.artifacts:
            loss, background = row.get("val_loss"), self.background
            tracking.log_checkpoint(self.recorder.mirror, state.step, background.folder, loss, background.writing)

    def ensure(self, state: TrainState):
        """Saves a checkpoint of this step unless there is one."""
        self.background.wait()
        if not distributed.on_rank0(step_folder(self.folder, state.step).exists):
            self.save(state, {})

    def roll_back(self, state: TrainState):
        """Loads the last checkpoint, but keeps the counts and the steps to skip. ValueError if there is none."""
        self.background.wait()
        folder, known = distributed.on_rank0(checkpoint.find, self.folder, True), state.guard
        state.load(folder)
        state.guard.skip, state.guard.spikes, state.guard.rollbacks = known.skip, known.spikes, known.rollbacks
        if distributed.rank() == 0:
            retire_after(self.folder, state.step)

    def wait(self) -> int:
        """Waits until the last save is on the disk or has failed; returns how many have failed."""
        self.background.wait()
        return self.background.failed


def _why(error: Exception, folder: Path) -> str:
    """Why a save failed, in a line. On a full disk torch only says how many bytes it wrote."""
    reason = " ".join(str(error).split())
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if full or re.search(r"unexpected pos|PytorchStreamWriter|os error (28|122|27)\b|No space left", reason):
        free = shutil.disk_usage(folder).free
        return f"the disk is full, or a quota or file size limit is reached; {free:,} bytes are free ({reason})"
    return reason


def prune(run: Path, keep: int | None):
    """Removes all checkpoints but the newest `keep` and the best; nothing if the newest is not valid."""
    folders = steps(run)
    if keep is None or len(folders) <= keep:
        return
    check(folders[0])
    best = next((folder for folder in best_first(folders) if _valid(folder)), None)
    for folder in folders[keep:]:
        if folder == best:
            continue
        if not folder.is_symlink():
            (folder / "manifest.json").unlink(missing_ok=True)  # first, so that a half-removed folder is no checkpoint
            checkpoint.flush(folder)
        going = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
        checkpoint.rename(folder, going)
        checkpoint.remove(going)


def _valid(folder: Path) -> bool:
    try:
        check(folder, for_training=False)
    except ValueError:
        return False
    return True


@contextmanager
def run_lock(run: Path, first: bool = True) -> Iterator[None]:
    """Locks a run's folder for this process and removes what killed saves left in it. Only rank 0 (`first`) locks.

    ValueError if another process holds the lock or the folder cannot be written. A new folder in which nothing was
    saved is removed again.
    """
    if not first:
        yield
        return
    folder, was_there = run / "checkpoints", run.exists()
    lock = FileLock(folder / ".lock")
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
            for left in folder.glob(".step_*"):
                checkpoint.remove(left)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".trial") as file:
                file.write(b"a trial")
                file.flush()
                os.fsync(file.fileno())
        except Timeout:
            raise ValueError(f"{run} is in use by another process: wait for it, or choose another folder") from None
        except OSError as error:
            raise ValueError(f"checkpoints cannot be written to {folder}: {error}") from error
        yield
    finally:
        if lock.is_locked:
            lock.release()
            if {path.name for path in folder.iterdir()} <= {".lock"}:
                (folder / ".lock").unlink(missing_ok=True)
                checkpoint.remove(folder)
                if not was_there and not any(run.iterdir()):
                    run.rmdir()


def retire_after(run: Path, step: int):
    """Renames the checkpoints after `step`, from which the run continues: they are damaged, or were rolled back."""
    for folder in steps(run):
        if checkpoint.step_of(folder) > step:
            folder.rename(folder.with_name(f"aside_{folder.name}_{secrets.token_hex(3)}"))
