"""A run's folder: the record of its environment, and how its settings differ from those it was started with."""

import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

CODE = Path(__file__).resolve().parent.parent


PROGRAM = (  # the program's own files, as git pathspecs; no other file of a checkout is recorded
    ":(glob)*.py",
    *(f"{folder}/*.py" for folder in ("conf", "data", "insight", "kernels", "model", "scripts", "training")),
    *("conf/*.yaml", "kernels/*.cpp", "kernels/*.h"),
)
LARGEST_PATCH = 2**22  # bytes


def record_environment(run: Path, device: torch.device, warn: Callable[[str], None] = print, **facts) -> dict:
    """Writes environment.json, with versions, machine, command and `facts`, and returns its content.

    If the code is a git checkout whose program files differ from the commit, changes.patch holds their diff. "changed"
    is null if that is unknown; "untracked" names program files that git does not know.
    """
    commit = changed = changes = untracked = None
    (run / "changes.patch").unlink(missing_ok=True)
    try:
        if _git("ls-files", "--error-unmatch", "train.py") is not None:  # our repository, not one we are installed in
            commit = _git("rev-parse", "HEAD")
            difference = ("diff", "--no-color", "--no-ext-diff", "HEAD")
            changes = _git(*difference, "--binary", "--", *PROGRAM)
            others = _git("ls-files", "--others", "--exclude-standard", "--", *PROGRAM)
            untracked = others.decode(errors="replace").splitlines() if others is not None else None
            changed = None if changes is None else bool(changes)
    except subprocess.TimeoutExpired as error:
        warn(f"changes since the commit are not recorded: git took more than {error.timeout:.0f} s")
    if changes and len(changes) > LARGEST_PATCH:
        warn(f"changes since the commit are not recorded: {len(changes):,} bytes, {LARGEST_PATCH:,} at most")
    elif changes:
        (run / "changes.patch").write_bytes(changes)
    environment = {
        "commit": commit.decode().strip() if commit else None,
        "changed": changed,
        "untracked": untracked,
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
    """git's output for the code's folder; None if there is no git or it fails. TimeoutExpired after 10 s."""
    command = ["git", "-C", str(CODE), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, timeout=10)
    except OSError:
        return None
    return result.stdout if result.returncode == 0 else None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        return re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))[1]
    except (OSError, TypeError):  # not Linux, or a processor without a name
        return platform.processor() or platform.machine()


def describe(run: Path, tracked: str) -> str:
    """README.txt of a run folder: what is in it, and what to do with it."""
    return f"""config.yaml      every setting of this run
environment.json the code, the machine and the size of the model
metrics.jsonl    its metrics, one row per logged step
checkpoints/     a folder per saved step; the newest is used, or the best one with checkpoint={run}:best

generate         python -m scripts.generate checkpoint={run} -- To be, or not
evaluate         python -m scripts.evaluate checkpoint={run}
resume           python train.py resume={run}
W&B              {tracked}
"""


NOT_OF_TRAINING = ("resume", "init_from", "stop_after", "name", "dry_run", "world", "mfu", "device_spec")
FREE = ("dropout", "attention_dropout", "zero_init")  # model settings that do not matter to trained weights
BEFORE = {"tokenizer.parse_special": False}  # how older versions behaved, which had no such setting
PLACES = ("data.paths", "data.corpora", "data.wheel", "data.prompt", "tokenizer.path")  # may name the same content


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(setting, its former value, its value now) of the settings in which a resumed run differs from its checkpoint."""
    for name, value in now.items():
        key = prefix + name
        old = before.get(name, BEFORE.get(key))
        if key in NOT_OF_TRAINING or (prefix == "data." and name not in before):  # the checkpoint is older than it
            continue
        if isinstance(value, dict) and isinstance(old, dict) and key != "data.corpora":
            yield from differences(old, value, f"{key}.")
        elif value != old:
            yield key, old, value


def check_same_settings(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]):
    """ValueError if settings show that a run cannot resume from `folder`, before any text is read.

    It names all that differ, in the form of a command line. Text that may be the same in another place is compared
    later.
    """
    changed = {name: old for name, old, _ in differences(before, now)}
    model = [name for name in changed if name.startswith("model.") and name.split(".")[1] not in FREE]
    text = [name for name in changed if name.startswith(("data.", "tokenizer.")) and name not in PLACES]
    if now["data"]["source"] in ("corpus", "mixture", "tokens"):  # opened as they are, in no time
        text = []
    if not (model or text or "optimizer.name" in changed):
        return
    what = ["another text or tokenizer"] * bool(text) + ["another model"] * bool(model)
    what += ["another optimizer"] * ("optimizer.name" in changed)
    raise ValueError(f"{folder} was trained with {', '.join(what)}: give {as_before(before, now)}")


def as_before(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What to add to a command line so that its settings are the checkpoint's, except for the length of training."""
    changed = [(name, old) for name, old, _ in differences(before, now) if name not in ("steps", "epochs")]
    return " ".join(override(name, old) for name, old in changed)


def override(name: str, value: Any) -> str:
    """name=value, quoted for Hydra and for the shell."""
    return shlex.quote(f"{name}={_literal(value)}")


def _literal(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}: {_literal(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_literal, value)) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    if re.fullmatch(r"[A-Za-z/][A-Za-z0-9_./-]*", value) and value.lower() not in (
        "null",
        "true",
        "false",
        "nan",
        "inf",
    ):
        return value
    text = re.sub(r'(\\*)("|$)', lambda found: 2 * found[1] + "\\" * (found[2] == '"') + found[2], value)
    return '"' + text.replace("${", "\\${") + '"'
