"""What stands in a run's folder."""

from pathlib import Path


def describe(run: Path, sync: str | None) -> str:
    """README.txt of a run folder: what lies there and what to do with it."""
    return f"""config.yaml      every setting of this run
metrics.jsonl    its figures, a row a logged step
checkpoints/     step folders, each whole; the newest is used

write text       python -m scripts.generate checkpoint={run} -- To be, or not
measure          python -m scripts.evaluate checkpoint={run}
go on            python train.py resume=auto hydra.run.dir={run} (and its settings)
upload to W&B    {sync or "not an offline run"}
"""
