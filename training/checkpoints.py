"""The checkpoints of a run: saved in the background, the newest and the best kept, and gone back to."""

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

FIGURES = ("loss", "val_loss", "val_bpb", "compared_loss")  # of the last row, for model.json


class Saver:
    """Saves checkpoints of a run in a thread, while training goes on; one at a time, none lost at the end.

    A save that fails is reported by `warn` and counted in `failed`; training goes on. After each that succeeds, older
    ones are removed but for the newest `keep` (None: all) and the one with the lowest validation loss.
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
        """`content`: what checkpoint.save takes after the folder; not to change any more. Waits for the save before."""
        self.wait()
        self.folder = step_folder(self.run, step)
        self.writing = self.pool.submit(checkpoint.save, self.folder, *content)

    def wait(self):
        """Until the last save is on the disk, or has failed."""
        if self.writing is None:
            return
        try:
            self.writing.result()
        except Exception as error:  # a full disk comes as OSError, RuntimeError or SafetensorError
            self.failed += 1
            self.warn(f"the checkpoint {self.folder} could not be saved, training goes on: {_why(error, self.run)}")
        else:
            try:
                prune(self.run, self.keep)
            except (OSError, ValueError) as error:
                self.warn(f"older checkpoints stay: {error}")
        self.writing = None


class Checkpoints:
    """What a run saves, and goes back to. Of several ranks the first writes; the methods are called by all alike."""

    def __init__(
        self, folder: Path, cfg: "Train", start: Start, steps: int, choices: Choices, corpus: Corpus, recorder: Recorder
    ):
        self.folder, self.tokenizer, self.recorder = folder, corpus.tokenizer, recorder
        self.artifacts = cfg.tracking.artifacts
        self.saver = Saver(folder, cfg.keep, recorder.say)
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
        self.saver.__enter__()
        return self

    def __exit__(self, *_):
        self.saver.__exit__()

    def save(self, state: TrainState, row: dict):
        """In the background; `row` holds the step's figures, as far as there are any."""
        if state.step - 1 not in state.guard.skip:
            state.guard.rollbacks = 0
        weights, about = checkpoint.snapshot(state.model)
        memory = state.memory() | self.of_run
        about |= {"step": state.step, **self.about} | {name: row[name] for name in FIGURES if name in row}
        if distributed.rank() > 0:
            return
        self.recorder.sync()
        self.saver.save(state.step, weights, self.tokenizer.save, about, memory)
        if self.artifacts:
            loss, saver = row.get("val_loss"), self.saver
            tracking.log_checkpoint(self.recorder.mirror, state.step, saver.folder, loss, saver.writing)

    def ensure(self, state: TrainState):
        """A checkpoint of this step, which may or may not have been due."""
        self.saver.wait()
        if not distributed.on_rank0(step_folder(self.folder, state.step).exists):
            self.save(state, {})

    def roll_back(self, state: TrainState):
        """To the last checkpoint; what jumped, and is to be left out, stays known. ValueError if there is none."""
        self.saver.wait()
        folder, known = distributed.on_rank0(checkpoint.find, self.folder, True), state.guard
        state.load(folder)
        state.guard.skip, state.guard.spikes, state.guard.rollbacks = known.skip, known.spikes, known.rollbacks
        if distributed.rank() == 0:
            retire_after(self.folder, state.step)

    def wait(self) -> int:
        """Until the last save is on the disk, or has failed -> how many have failed."""
        self.saver.wait()
        return self.saver.failed


def _why(error: Exception, folder: Path) -> str:
    """What kept a checkpoint from the disk, in a line; torch says of a full one only how far it came."""
    reason = " ".join(str(error).split())
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if full or re.search(r"unexpected pos|PytorchStreamWriter|os error (28|122|27)\b|No space left", reason):
        free = shutil.disk_usage(folder).free
        return f"the disk is full, or a quota or file size limit is reached, {free:,} bytes are free ({reason})"
    return reason


def prune(run: Path, keep: int | None):
    """Removes all but the newest `keep` checkpoints and the best; nothing if the newest is not valid."""
    folders = steps(run)
    if keep is None or len(folders) <= keep:
        return
    check(folders[0])
    best = next((folder for folder in best_first(folders) if _valid(folder)), None)
    for folder in folders[keep:]:
        if folder == best:
            continue
        if not folder.is_symlink():
            (folder / "manifest.json").unlink(missing_ok=True)  # first: what is half removed is no checkpoint
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
    """A run's folder for this process alone; removes what killed saves left there. Of several ranks the first takes it.

    ValueError where another process has it, or nothing can be written. What it made is gone again if nothing was saved.
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
            raise ValueError(f"{run} is in use by another process: wait for it, or take another folder") from None
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
    """Renames what a run saved after `step`, where it goes on from there: damaged, or passed over."""
    for folder in steps(run):
        if checkpoint.step_of(folder) > step:
            folder.rename(folder.with_name(f"aside_{folder.name}_{secrets.token_hex(3)}"))
