"""W&B, a mirror of metrics.jsonl. It never delays a step or ends a run."""

import netrc
import os
import queue
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlparse

from annotated_types import Gt, Le

from data.config import Name
from training.metrics import best, read_rows

Seconds = Annotated[float, Gt(0), Le(1e6)]


@dataclass(frozen=True)
class TrackingConfig:
    """The settings of W&B, see `start`. artifacts: upload checkpoints too."""

    mode: Literal["auto", "online", "offline", "disabled"]
    project: Name | None
    name: Name | None
    timeout: Seconds
    finish_timeout: Seconds
    artifacts: bool


STEP = "trainer/step"
BYTES_PER_ROW = 100  # no row takes less in W&B's own file


class Mirror:
    """A W&B run and the thread that talks to it, since W&B waits for its server before it accepts tables or artifacts.

    Only the first error is reported: metrics.jsonl has every row.
    """

    def __init__(self, run, finish_timeout: float, warn: Callable[[str], None]):
        self.run, self.finish_timeout, self.warn = run, finish_timeout, warn
        self.id = run.id
        self.lowest = float("inf")  # validation loss
        self.failed = False
        self.tasks: queue.SimpleQueue[Callable | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.work, name="wandb", daemon=True)
        self.thread.start()

    def do(self, task: Callable):
        """Queues task(run)."""
        if not self.run.disabled:
            self.tasks.put(task)

    def work(self):
        while (task := self.tasks.get()) is not None:
            try:
                task(self.run)
            except Exception as error:  # of any type: it must not end training
                self.fail(error)

    def fail(self, error: Exception):
        if not self.failed:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self.warn(
                f"W&B says: {reason}; metrics.jsonl has everything, and {where(self, pieces=True)} sends it again"
            )
        self.failed = True


def has_key() -> bool:
    """Whether there is a key for wandb's server: WANDB_API_KEY or an entry in netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    import wandb

    host = urlparse(wandb.setup().settings.base_url).hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, UnicodeDecodeError, netrc.NetrcParseError):  # no file, a folder, or not a netrc file
        return False


TRUE = ("1", "true", "t", "yes", "y", "on")
MODES = {"dryrun": "offline", "run": "online", "shared": "online"}  # W&B's other words; here one process writes


def asked_mode(mode: str, project: str | None = None) -> str:
    """The requested mode, which may be "auto"; WANDB_DISABLED and WANDB_MODE override tracking.mode.

    ValueError for an unknown mode, or a project name that W&B would refuse.
    """
    if project is not None and (not project or len(project) > 128 or set(project) & set("/\\#?%:")):
        raise ValueError(f"tracking.project: W&B says a name has 1 to 128 letters, none of /\\#?%:, got {project!r}")
    if os.environ.get("WANDB_DISABLED", "").lower() in TRUE:
        return "disabled"
    asked = (os.environ.get("WANDB_MODE") or mode).lower()
    asked = MODES.get(asked, asked)
    if asked not in ("auto", "online", "offline", "disabled"):
        raise ValueError(f"WANDB_MODE must be online, offline or disabled, got {asked}")
    return asked


def clean_environment(warn: Callable[[str], None]):
    """Removes from the environment each variable with which W&B would refuse to start, and names it."""
    import wandb

    for name, value in [*os.environ.items()]:
        if name.startswith("WANDB_"):
            try:
                wandb.Settings().update_from_env_vars({name: value})
            except Exception as error:  # W&B's and pydantic's, of several types
                warn(f"W&B does not accept {name}={value}, which is ignored: {' '.join(str(error).split())}")
                del os.environ[name]


def start(
    mode: str | None,
    *,
    project: str | None,
    timeout: float,
    finish_timeout: float,
    folder: Path,
    config: dict,
    run_id: str | None,
    warn: Callable[[str], None],
    group: str | None = None,
    name: str | None = None,
) -> Mirror:
    """Starts a W&B run that writes into `folder`. run_id continues an earlier run, `group` is the sweep's name.

    "auto" is online with a key and offline without. The variables WANDB_MODE, WANDB_DISABLED, WANDB_DIR and
    WANDB_RUN_GROUP override the settings; a project or name that is None is taken from WANDB_PROJECT and WANDB_NAME,
    else it is "inkling" and the folder's name. If W&B cannot start, "online" is an error; otherwise the run is tracked
    offline, or in metrics.jsonl only, with a warning. mode None, on ranks other than 0, tracks nothing.
    """
    import wandb

    asked = "disabled" if mode is None else asked_mode(mode, project)
    if os.environ.pop("WANDB_MODE", None) and asked != "auto":
        os.environ["WANDB_MODE"] = asked  # as W&B spells it
    clean_environment(warn)
    if asked == "auto":
        asked = "online" if has_key() else "offline"
    place = Path(os.environ.get("WANDB_DIR") or folder)
    first = rows_before(place, run_id) if run_id is not None else 0
    options: dict[str, Any] = {
        "project": project or os.environ.get("WANDB_PROJECT") or "inkling",
        "name": name or os.environ.get("WANDB_NAME") or str(folder).removeprefix("runs/"),
        "group": os.environ.get("WANDB_RUN_GROUP") or group,
        "dir": place,
        "config": config,
        "id": run_id,
        "reinit": "finish_previous",  # left by an earlier job of a sweep that failed
    }

    def init(mode: Any):
        settings = wandb.Settings(
            init_timeout=timeout, finish_timeout=finish_timeout, finish_timeout_raises=True, silent=True, console="off"
        )
        return wandb.init(mode=mode, resume="allow" if mode == "online" else None, settings=settings, **options)

    before, run = set(place.glob("wandb/run-*")), None
    for attempt in dict.fromkeys((asked, "offline")) if asked != "disabled" else ():
        try:
            run = init(attempt)
            break
        except Exception as error:
            reason = " ".join(str(error).split())
            if mode == attempt == "online":
                raise ValueError(f"W&B says: {reason} (tracking.mode=disabled trains without W&B)") from error
            warn(f"W&B says: {reason}; tracking " + ("offline" if attempt == "online" else "in metrics.jsonl only"))
            for folder_of_none in set(place.glob("wandb/run-*")) - before:
                shutil.rmtree(folder_of_none, ignore_errors=True)
    if run is None:  # a disabled run, whatever the environment says
        if asked != "disabled":  # stops what failed to start; never the service of a parent process
            wandb.teardown()
        theirs = {variable: os.environ.pop(variable) for variable in [*os.environ] if variable.startswith("WANDB_")}
        run = wandb.init(mode="disabled", settings=wandb.Settings(silent=True))
        os.environ |= theirs
    mirror = Mirror(run, finish_timeout, warn)
    try:
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        if not run.disabled:
            _begin(run, folder, first)
    except Exception as error:
        mirror.fail(error)
    if (row := best(read_rows(folder / "metrics.jsonl"))) is not None:
        _log_best(mirror, row)
    return mirror


def rows_before(place: Path, run_id: str) -> int:
    """An upper bound for the number of rows in a run's files so far, one file for each time it was resumed.

    Each offline file counts its rows from 0, and a server may merge rows with equal numbers.
    """
    return sum(path.stat().st_size for path in place.glob(f"wandb/*run-*-{run_id}/*.wandb")) // BYTES_PER_ROW


def _begin(run, folder: Path, first: int):
    for name in ("environment.json", "changes.patch"):
        if (folder / name).exists():
            shutil.copy(folder / name, run.dir)
            run.save(Path(run.dir) / name, base_path=run.dir, policy="now")
    run.log({}, step=max(first, run.step), commit=False)  # sets the first row's number, and imports what logging needs


def log(mirror: Mirror, row: dict):
    """Logs a row of metrics.jsonl, on a step axis of our own (wandb's would drop rows after a resume)."""
    values = {name: value for name, value in row.items() if name not in ("step", "clock")}
    values = {STEP: row["step"], **values, **{f"clock/{k}": v for k, v in row.get("clock", {}).items()}}
    mirror.do(lambda run: run.log(values))
    if row.get("val_loss", float("inf")) < mirror.lowest:
        _log_best(mirror, row)


def _log_best(mirror: Mirror, row: dict):
    mirror.lowest = row["val_loss"]
    summary = {"best_val_loss": row["val_loss"], "best_step": row["step"]}
    mirror.do(lambda run: run.summary.update(summary))


def log_samples(mirror: Mirror, samples: list[dict]):
    """Logs all samples so far, as one table."""
    rows = [[sample["step"], sample["prompt"], sample["text"]] for sample in samples]

    def task(run):
        import wandb

        run.log({STEP: rows[-1][0], "samples": wandb.Table(columns=["step", "prompt", "text"], data=rows)})

    mirror.do(task)


def log_checkpoint(mirror: Mirror, step: int, folder: Path, val_loss: float | None, saved: Future):
    """Uploads a step folder as an artifact, once it is saved: "latest", and "best" if its validation loss is lowest."""
    aliases = ["latest", f"step-{step}"]
    if val_loss is not None and val_loss <= mirror.lowest:
        aliases.append("best")

    def task(run):
        import wandb

        if saved.exception() is not None or not folder.exists():  # BackgroundSaver reports it
            return
        artifact = wandb.Artifact(f"model-{run.id}", type="model", metadata={"step": step})
        artifact.add_dir(str(folder))
        run.log_artifact(artifact, aliases=aliases)

    mirror.do(task)


def finish(mirror: Mirror):
    """Ends the W&B run; waits for its server for finish_timeout seconds at most."""
    mirror.tasks.put(None)
    mirror.thread.join(mirror.finish_timeout)
    try:
        mirror.run.finish()
    except Exception as error:
        mirror.fail(error)


def where(mirror: Mirror, pieces: bool = False) -> str:
    """Where to see a run: its URL or, if offline, the command that uploads all of its files."""
    run = mirror.run
    if run.disabled:
        return "metrics.jsonl only"
    folder = Path(run.dir).parent.parent
    shared = f"-{run.id}" if os.environ.get("WANDB_DIR") else ""  # with other runs
    if pieces and not run.offline:
        return f"wandb sync --include-online {folder}" + (f"/*run-*{shared}" if shared else "")
    return f"wandb sync {folder}/offline-run-*{shared}" if run.offline else run.url
