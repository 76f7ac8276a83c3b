import json
from pathlib import Path

import pytest
from commands import command
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from conf import resumed
from conf.entry import REPOSITORY
from conf.parsing import parse
from conf.schema import Train

TRAIN = str(REPOSITORY / "train.py")


@pytest.fixture
def run(tmp_path) -> Path:
    """The folder of a run with its own settings and a checkpoint."""
    run = tmp_path / "runs" / "own"
    (run / "checkpoints" / "step_00000001").mkdir(parents=True)
    (run / "checkpoints" / "step_00000001" / "manifest.json").write_text("{}")
    own = ["experiment=smoke", "optimizer=adamw", "optimizer.lr=0.125", "model.d_ff=40", "stop_after=3", "name=own"]
    OmegaConf.save(OmegaConf.create(OmegaConf.to_container(composed(*own), resolve=True)), run / "config.yaml")
    return run


def composed(*overrides: str):
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        return compose("train", overrides=list(overrides))


def settings(run: Path, *typed: str) -> Train:
    return parse(resumed.with_its_own(composed(*typed), list(typed), run, Train), Train)


def test_a_resumed_run_keeps_its_settings_except_those_of_its_launch(run):
    cfg = settings(run, "resume=auto")
    assert (cfg.optimizer.name, cfg.optimizer.lr, cfg.model.d_ff, cfg.name) == ("adamw", 0.125, 40, "own")
    assert (cfg.steps, cfg.stop_after, cfg.resume) == (20, None, "auto")


@pytest.mark.parametrize(
    ("typed", "name", "value"),
    [
        ("optimizer.lr=0.25", "lr", 0.25),
        ("optimizer=muon", "name", "muon"),  # a chosen group replaces all its settings
    ],
)
def test_the_command_line_overrides_the_settings_of_the_run(run, typed, name, value):
    assert getattr(settings(run, typed).optimizer, name) == value


def test_an_experiment_on_the_command_line_overrides_the_run_too(run):
    cfg = settings(run, "experiment=smoke", "steps=30")
    assert (cfg.model.d_ff, cfg.steps) == (composed("experiment=smoke").model.d_ff, 30)
    assert (cfg.optimizer.lr, cfg.every.log) == (0.125, 5)


def test_epochs_on_the_command_line_replace_the_steps_of_the_run(run):
    cfg = settings(run, "epochs=2")
    assert (cfg.steps, cfg.epochs) == (None, 2.0)


@pytest.mark.parametrize("text", ["[1, 2", "- 1", "a: ${b}"])
def test_a_damaged_config_is_a_one_line_error(run, text):
    (run / "config.yaml").write_text(text)
    if text.startswith("a"):
        assert settings(run).name == "inkling"  # it has no setting
        return
    with pytest.raises(ValueError, match=r"config\.yaml (cannot be read|is damaged)"):
        settings(run)


def test_only_resuming_by_the_run_folder_writes_into_it(run, tmp_path):
    same = ["steps=9", "resume=auto", f'hydra.run.dir="{run}"']
    assert resumed.in_place([f"resume={run}", "steps=9"]) == same
    (run.parent / "empty").mkdir()
    for other in (
        [f"resume={run}", "name=fork"],
        [f"resume={run}", "hydra.run.dir=elsewhere"],
        ["-m", f"resume={run}", "seed=1,2"],
        [f"resume={run}:best"],
        [f"resume={run}:1"],
        [f"resume={run}/checkpoints/step_00000001"],
        [f"resume={run.parent}/empty"],
        ["resume=auto"],
        ["steps=9"],
    ):
        assert resumed.in_place(other) == other
    for checkpoint in (f"{run}", f"{run}:best", f"{run}:1", f"{run}/checkpoints/step_00000001"):
        assert resumed.run_of(checkpoint) == run
    assert resumed.run_of("nowhere") is None


def rows(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "clock"} for line in lines]


@pytest.mark.slow
def test_a_run_resumes_by_its_folder_and_a_fork_gets_a_new_one():
    own = ["experiment=smoke", "steps=6", "optimizer=adamw", "optimizer.lr=0.003", "every.log=1", "sample.tokens=2"]
    quick = ["schedule.warmup=2", "every.evaluate=100"]
    for name, options in (("whole", []), ("parts", ["stop_after=3"])):
        result = command(TRAIN, *own, *quick, *options, f"hydra.run.dir=runs/{name}")
        assert result.returncode == 0, result.stderr
    fork = command(TRAIN, "resume=runs/parts", "name=fork", "optimizer.lr=0.002")
    assert fork.returncode == 0, fork.stderr
    assert "changed setting: optimizer.lr was 0.003, is now 0.002" in fork.stdout and fork.stdout.count("changed") == 1
    assert [row["step"] for row in rows(Path("runs/parts"))] == [1, 2, 3]
    result = command(TRAIN, "resume=runs/parts")
    assert result.returncode == 0 and "changed" not in result.stdout, result.stderr
    assert rows(Path("runs/parts")) == rows(Path("runs/whole"))
    assert len([path for path in Path("runs").iterdir() if "fork" in path.name]) == 1
