"""What stands in a run's folder, and how it differs from what it goes on with."""

import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

CODE = Path(__file__).resolve().parent.parent


def record_environment(run: Path, device: torch.device, **facts) -> dict:
    """Writes environment.json: with what the run was made, and `facts`; gives what it says.

    Where the code is a git checkout that differs from its commit, changes.patch holds the difference.
    """
    commit = changes = None
    if _git("ls-files", "--error-unmatch", "train.py"):  # the checkout is ours, not one that we are installed in
        commit, changes = _git("rev-parse", "HEAD"), _git("diff", "--binary", "--no-color", "--no-ext-diff", "HEAD")
    if changes:
        (run / "changes.patch").write_bytes(changes)
    else:
        (run / "changes.patch").unlink(missing_ok=True)
    environment = {
        "commit": commit.decode().strip() if commit else None,
        "changed": bool(changes),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": _device_name(device),
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "command": sys.argv,
        **facts,
    }
    (run / "environment.json").write_text(json.dumps(environment, indent=2) + "\n", encoding="utf-8")
    return environment


def _git(*arguments: str) -> bytes | None:
    """What git says about the code; None where there is no git, or it refuses."""
    command = ["git", "-C", str(CODE), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        return re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))[1]
    except (OSError, TypeError):  # not Linux, or a processor that gives no name
        return platform.processor() or platform.machine()


def describe(run: Path, tracked: str) -> str:
    """README.txt of a run folder: what lies there and what to do with it."""
    return f"""config.yaml      every setting of this run
environment.json the code, the machine and the size of the model
metrics.jsonl    its figures, a row a logged step
checkpoints/     step folders, each whole; the newest is used

write text       python -m scripts.generate checkpoint={run} -- To be, or not
measure          python -m scripts.evaluate checkpoint={run}
go on            python train.py resume=auto hydra.run.dir={run} (and its settings)
W&B              {tracked}
"""


NOT_OF_TRAINING = ("resume", "stop_after", "name", "dry_run", "world", "mfu", "device_spec")


def differences(before: dict, now: dict, prefix: str = "") -> Iterator[str]:
    """What a resumed run is told otherwise than the run it goes on with."""
    for name, value in now.items():
        if name in NOT_OF_TRAINING:
            continue
        if isinstance(value, dict):
            yield from differences(before.get(name, {}), value, f"{prefix}{name}.")
        elif value != before.get(name):
            yield f"{prefix}{name} was {before.get(name)}, is {value}"
