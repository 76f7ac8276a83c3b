"""W&B: the mirror of metrics.jsonl. Nothing that it does holds a step up or ends a run."""

import netrc
import os
import queue
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from urllib.parse import urlparse

from training.metrics import best, read_rows

STEP = "trainer/step"
BYTES_PER_ROW = 100  # no row takes less in W&B's own file


class Mirror:
    """A W&B run and the thread that talks to it: W&B asks its server before it takes a table or an artifact.

    What goes wrong there is said once, for metrics.jsonl has every row.
    """

    def __init__(self, run, finish_timeout: float, warn: Callable[[str], None]):
        self.run, self.finish_timeout, self.warn = run, finish_timeout, warn
        self.id = run.id
        self.lowest = float("inf")  # validation loss
        self.failed = False
        self.tasks = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.work, name="wandb", daemon=True)
        self.thread.start()

    def do(self, task: Callable):
        """task(run) soon, after those before it."""
        if not self.run.disabled:
            self.tasks.put(task)

    def work(self):
        while (task := self.tasks.get()) is not None:
            try:
                task(self.run)
            except Exception as error:  # whatever it is, training has nothing to do with it
                self.fail(error)

    def fail(self, error: Exception):
        if not self.failed:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self.warn(
                f"W&B says: {reason}; metrics.jsonl has everything, and {where(self, pieces=True)} sends it again"
            )
        self.failed = True


def has_key() -> bool:
    """Whether there is a key for the server that wandb would talk to: WANDB_API_KEY or a line in netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    import wandb

    host = urlparse(wandb.setup().settings.base_url).hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        return False


def start(
    mode: str | None,
    *,
    project: str,
    timeout: float,
    finish_timeout: float,
    folder: Path,
    config: dict,
    run_id: str | None,
    warn: Callable[[str], None],
    group: str | None = None,
) -> Mirror:
    """A W&B run that writes into `folder`; run_id continues an earlier one, `group` holds the runs of a sweep together.

    "auto" is online with a key and offline without; the environment's WANDB_MODE wins. When the server does not answer
    within `timeout` seconds, or refuses the key, "auto" goes offline and says so, "online" is an error. None, of a rank
    that is not the first, tracks nothing.
    """
    import wandb

    asked = "disabled" if mode is None else os.environ.get("WANDB_MODE") or mode
    if asked == "auto":
        asked = "online" if has_key() else "offline"
    if asked not in ("online", "offline", "disabled"):
        raise ValueError(f"WANDB_MODE must be online, offline or disabled, got {asked}")
    settings = wandb.Settings(
        init_timeout=timeout, finish_timeout=finish_timeout, finish_timeout_raises=True, silent=True, console="off"
    )
    first = rows_before(folder) if run_id is not None else 0

    def init(mode: str):
        return wandb.init(
            project=project,
            name=str(folder).removeprefix("runs/"),
            group=group,
            dir=folder,
            config=config,
            id=run_id,
            resume="allow" if mode == "online" else None,
            reinit="finish_previous",  # of a job before this one that ended with an error
            mode=mode,
            settings=settings,
        )

    try:
        run = init(asked)
    except Exception as error:
        reason = " ".join(str(error).split())
        if mode != "auto" or asked != "online":
            raise ValueError(f"W&B says: {reason} (tracking.mode=disabled does without)") from error
        warn(f"W&B says: {reason}; tracking offline")
        run = init("offline")
    run.define_metric(STEP)
    run.define_metric("*", step_metric=STEP)
    mirror = Mirror(run, finish_timeout, warn)
    try:
        if not run.disabled:
            _begin(run, folder, first)
    except Exception as error:
        mirror.fail(error)
    if (row := best(read_rows(folder / "metrics.jsonl"))) is not None:
        _log_best(mirror, row)
    return mirror


def rows_before(folder: Path) -> int:
    """A number that the rows of the pieces so far do not reach, in which resuming has cut a run.

    An offline piece counts its rows from 0, and a server may take rows of equal numbers for one.
    """
    return sum(path.stat().st_size for path in folder.glob("wandb/*run-*/*.wandb")) // BYTES_PER_ROW


def _begin(run, folder: Path, first: int):
    for name in ("environment.json", "changes.patch"):
        if (folder / name).exists():
            shutil.copy(folder / name, run.dir)
            run.save(Path(run.dir) / name, base_path=run.dir, policy="now")
    run.log({}, step=max(first, run.step), commit=False)  # the first row's number; wandb imports what logging needs


def log(mirror: Mirror, row: dict):
    """A row of metrics.jsonl, on our own step axis (wandb's own would drop rows after a resume)."""
    values = {name: value for name, value in row.items() if name not in ("step", "clock")}
    values = {STEP: row["step"], **values, **{f"clock/{k}": v for k, v in row.get("clock", {}).items()}}
    mirror.do(lambda run: run.log(values))
    if row.get("validation_loss", float("inf")) < mirror.lowest:
        _log_best(mirror, row)


def _log_best(mirror: Mirror, row: dict):
    mirror.lowest = row["validation_loss"]
    summary = {"best_validation_loss": row["validation_loss"], "best_step": row["step"]}
    mirror.do(lambda run: run.summary.update(summary))


def log_samples(mirror: Mirror, samples: list[dict]):
    """All samples so far, as one table."""
    rows = [[sample["step"], sample["prompt"], sample["text"]] for sample in samples]

    def task(run):
        import wandb

        run.log({STEP: rows[-1][0], "samples": wandb.Table(columns=["step", "prompt", "text"], data=rows)})

    mirror.do(task)


def log_checkpoint(mirror: Mirror, step: int, folder: Path, validation_loss: float | None, saved: Future):
    """A step folder as an artifact, once it is saved: the latest, and the best where no loss before was as low."""
    aliases = ["latest", f"step-{step}"]
    if validation_loss is not None and validation_loss <= mirror.lowest:
        aliases.append("best")

    def task(run):
        import wandb

        if saved.exception() is not None or not folder.exists():  # which is said elsewhere
            return
        artifact = wandb.Artifact(f"model-{run.id}", type="model", metadata={"step": step})
        artifact.add_dir(str(folder))
        run.log_artifact(artifact, aliases=aliases)

    mirror.do(task)


def finish(mirror: Mirror):
    """Ends the W&B run. A server that takes longer than finish_timeout is not waited for."""
    mirror.tasks.put(None)
    mirror.thread.join(mirror.finish_timeout)
    try:
        mirror.run.finish()
    except Exception as error:
        mirror.fail(error)


def where(mirror: Mirror, pieces: bool = False) -> str:
    """Where to see a run: its address or, offline, the command that uploads it with all pieces that resuming made."""
    run = mirror.run
    if run.disabled:
        return "metrics.jsonl only"
    folder = Path(run.dir).parent.parent
    if pieces and not run.offline:
        return f"wandb sync --include-online {folder}"
    return f"wandb sync {folder}/offline-run-*" if run.offline else run.url
