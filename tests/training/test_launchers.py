"""Sweeps, SLURM, and a complete session on the command line."""

import json
import subprocess
import sys

import pytest
import torch
from commands import command
from miniature import rows
from wandb_server import wandb_server

from conf.entry import REPOSITORY
from training import checkpoint

pytestmark = pytest.mark.slow

hardware = pytest.mark.hardware


def test_the_jobs_of_a_multirun_are_runs_of_one_group(tmp_path, monkeypatch):
    with wandb_server() as server:
        online = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "k" * 40}
        arguments = [str(REPOSITORY / "train.py"), "-m", "seed=1,2", "experiment=smoke", "steps=4"]
        arguments += ["schedule.warmup=1", "every.evaluate=2", "every.checkpoint=2"]
        arguments += ["tracking.mode=auto", "tracking.artifacts=true"]
        result = command(*arguments, **online)
        assert result.returncode == 0, result.stderr
    (sweep,) = (tmp_path / "runs").iterdir()
    assert [run.name for run in server.runs.values()] == [f"{sweep.name}/0", f"{sweep.name}/1"]
    for seed, run in enumerate(server.runs.values(), 1):
        assert (run.group, run.exit_code, run.config["seed"]) == (sweep.name, 0, seed)
        folder = sweep / str(seed - 1)
        table = rows(folder)
        environment = json.loads((folder / "environment.json").read_text())
        assert run.config["environment"] == environment and run.config["parameters"] == 37184
        assert environment["tokens_per_step"] == 512 and environment["torch"] == torch.__version__
        assert [row["loss"] for row in run.history if "loss" in row] == [row["loss"] for row in table]
        best = min((row for row in table if "val_loss" in row), key=lambda row: row["val_loss"])
        assert (run.summary["best_val_loss"], run.summary["best_step"]) == (
            best["val_loss"],
            best["step"],
        )
    models = [artifact for artifact in server.artifacts if artifact.type == "model"]
    assert len(models) == 4
    for artifact, step in zip(models, ["step-2", "step-4"] * 2, strict=True):
        assert {"latest", step} <= set(artifact.aliases)
    assert {"manifest.json", "model.safetensors", "training.pt"} < set(models[0].files)


def test_a_sweep_goes_through_submitit(tmp_path):
    """With submitit's local executor in place of SLURM's; the second launch resumes the first."""
    small = ["experiment=smoke", "every.sample=100", "hydra.sweep.dir=sweep", "hydra/launcher=submitit_local"]
    for steps in (2, 4):
        more = [f"steps={steps}", "schedule.warmup=1", "hydra.launcher.timeout_min=5"]
        result = command(str(REPOSITORY / "train.py"), "-m", "seed=3", "resume=auto", *small, *more)
        assert result.returncode == 0, result.stderr + result.stdout
    folder = tmp_path / "sweep" / "0"
    assert "seed: 3" in (folder / "config.yaml").read_text()
    assert [path.name for path in checkpoint.steps(folder)] == ["step_00000004", "step_00000002"]


@hardware
def test_training_evaluating_and_generating_from_the_command_line(tmp_path):
    """`experiment=smoke`; its checkpoint is then moved, and used from another folder without the corpus."""

    def fresh(*arguments, cwd=tmp_path):  # a process that has to find its modules by itself
        result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, timeout=120)
        assert result.returncode == 0, result.stderr
        return result

    out = fresh(str(REPOSITORY / "train.py"), "experiment=smoke", "precision=bf16").stdout
    (folder,) = (tmp_path / "runs").iterdir()
    for expected in ("37,184 parameters", "step 20/20", " bpb) |", "def ", str(folder.name)):
        assert expected in out
    assert {p.name for p in folder.iterdir()} - {"changes.patch"} == {
        *("config.yaml", "environment.json", "metrics.jsonl", "README.txt", "checkpoints")
    }
    measured = command("-m", "scripts.evaluate", f"checkpoint={folder}").stdout
    assert f"loss           {rows(folder)[-1]['val_loss']:.4f} nats per token" in measured
    assert f"bits per byte  {rows(folder)[-1]['val_bpb']:.4f}" in measured

    elsewhere = tmp_path / "elsewhere"
    checkpoint.find(folder).rename(elsewhere)
    away = tmp_path / "away"
    for name in ("model", "conf", "data"):  # names that are ours too
        (away / name).mkdir(parents=True)
    arguments = ["-m", "scripts.generate", f"checkpoint={elsewhere}", "max_new_tokens=140", "num_samples=2"]
    first, second = (start(*arguments, "--", "To", "be,", cwd=away) for start in (fresh, command))
    assert first.stdout == second.stdout
    assert first.stdout.count("To be,") == 2
    slides, report = first.stderr.splitlines()
    assert "longer than the context of 32 tokens" in slides and report.endswith("seed 0")
    assert command("-m", "scripts.generate", f"checkpoint={elsewhere}").stdout  # an empty prompt is fine
    assert {path.name for path in away.iterdir()} == {"model", "conf", "data"}
