"""What stands in a run's folder, and how it differs from what it goes on with."""

from collections.abc import Iterator
from pathlib import Path


def describe(run: Path, tracked: str) -> str:
    """README.txt of a run folder: what lies there and what to do with it."""
    return f"""config.yaml      every setting of this run
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
