"""W&B: the mirror of metrics.jsonl."""

import netrc
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlparse

STEP = "trainer/step"


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
    mode: str, project: str, timeout: float, folder: Path, config: dict, run_id: str | None, warn: Callable[[str], None]
):
    """A W&B run that writes into `folder`; run_id continues an earlier one.

    "auto" is online with a key and offline without; the environment's WANDB_MODE wins. When the server does not answer
    within `timeout` seconds, "auto" goes offline and says so, "online" is an error.
    """
    import wandb

    asked = os.environ.get("WANDB_MODE") or mode
    if asked == "auto":
        asked = "online" if has_key() else "offline"
    if asked not in ("online", "offline", "disabled"):
        raise ValueError(f"WANDB_MODE must be online, offline or disabled, got {asked}")
    settings = wandb.Settings(init_timeout=timeout, finish_timeout=6 * timeout, silent=True, console="off")

    def init(mode: str):
        return wandb.init(
            project=project,
            name=str(folder).removeprefix("runs/"),
            dir=folder,
            config=config,
            id=run_id,
            resume="allow" if mode == "online" else None,
            mode=mode,
            settings=settings,
        )

    try:
        run = init(asked)
    except wandb.errors.Error as error:
        reason = " ".join(str(error).split())
        if mode != "auto" or asked != "online":
            raise ValueError(f"W&B says: {reason} (tracking.mode=disabled does without)") from error
        warn(f"W&B says: {reason}; tracking offline")
        run = init("offline")
    run.define_metric(STEP)
    run.define_metric("*", step_metric=STEP)
    return run


def log(run, row: dict):
    """A row of metrics.jsonl, on our own step axis (wandb's own would drop rows after a resume)."""
    values = {name: value for name, value in row.items() if name not in ("step", "clock")}
    run.log({STEP: row["step"], **values, **{f"clock/{k}": v for k, v in row.get("clock", {}).items()}})


def log_samples(run, samples: list[dict]):
    """All samples so far, as one table."""
    import wandb

    table = wandb.Table(columns=["step", "prompt", "text"])
    for sample in samples:
        table.add_data(sample["step"], sample["prompt"], sample["text"])
    run.log({STEP: samples[-1]["step"], "samples": table})


def where(run) -> str:
    """Where to see a run: its address or, offline, the command that uploads it with all pieces that resuming made."""
    if run.disabled:
        return "metrics.jsonl only"
    return f"wandb sync {Path(run.dir).parent.parent}/offline-run-*" if run.offline else run.url
