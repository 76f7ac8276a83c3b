"""The command line, in processes of its own."""

import os
import re
import subprocess
import sys

import pytest
from commands import command

from conf.entry import REPOSITORY, run_dir

TRAIN = str(REPOSITORY / "train.py")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([TRAIN, "modle.d_model=3"], "unknown setting modle.d_model: did you mean model.d_model?"),
        ([TRAIN, "experiment=smok"], "experiment=smok is unknown: did you mean smoke?"),
        ([TRAIN, "model.n_heads=7"], "model.d_model must be a multiple of model.n_heads"),
        ([TRAIN, "steps"], "steps"),
        ([TRAIN, "model=1.5"], "Config group override must be a string"),
        ([TRAIN, "--", "hello"], "text after -- has no use here, got 'hello'"),
        ([TRAIN, "resume=nowhere"], "there is no checkpoint at nowhere"),
        (["-m", "scripts.generate", "checkpoint=nowhere"], "there is no checkpoint at nowhere"),
        (["-m", "scripts.generate"], "checkpoint is needed"),
        (["-m", "scripts.generate", "checkpoint=nowhere", "--", "${x} ???"], "there is no checkpoint at nowhere"),
        (["-m", "scripts.generate", "-m", "checkpoint=x", "seed=1,2"], "(-m) are for train.py"),
        (["-m", "scripts.evaluate", "checkpoint=."], "there is no checkpoint in .: no checkpoints/step_* in it"),
        (["-m", "scripts.prepare", "data=files", "data.paths=[x.txt]"], "data.paths: no file matches x.txt"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "",
)
def test_a_users_mistake_is_one_line_and_exit_code_2(arguments, message, tmp_path):
    result = command(*arguments)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: ")
    assert result.stdout == ""
    assert not list(tmp_path.glob("runs/*"))


def test_an_empty_folder_survives_a_mistake(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert command("-m", "scripts.generate", "checkpoint=nowhere", cwd=empty).returncode == 2
    assert empty.exists() and not list(empty.iterdir())


def test_help_explains_itself():
    result = command(TRAIN, "--help")
    assert result.returncode == 0
    for word in ("python train.py", "experiment: ", "d_model: ", "resume=auto"):
        assert word in result.stdout


def test_run_folders_are_new_unless_a_run_is_resumed(tmp_path):
    first, second = run_dir(None, "a.b"), run_dir(None, "a.b")
    assert first != second
    assert re.fullmatch(r"runs/\d{8}-\d{6}-a\.b-[0-9a-f]{6}", first)
    assert run_dir("auto", "a.b") not in (first, second)  # none has a checkpoint
    old, new, other = (
        "runs/20200101-000000-a.b-000000",
        "runs/20210101-000000-a.b-000000",
        "runs/20220101-000000-axb-000000",
    )
    for run in (old, new, other):
        (tmp_path / run / "checkpoints/step_1").mkdir(parents=True)
        (tmp_path / run / "checkpoints/step_1/manifest.json").touch()
    assert run_dir("auto", "a.b") == new
    with pytest.raises(ValueError, match="name must consist of"):
        run_dir(None, "a/b")


def test_every_script_imports_what_it_needs():
    """In a process of its own that has imported torch alone."""
    names = [f"scripts.{path.stem}" for path in (REPOSITORY / "scripts").glob("*.py") if path.stem != "__init__"]
    code = f"""
import importlib, os, torch
for name in {names}:
    if os.fork() == 0:
        importlib.import_module(name)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert len(names) > 7 and result.returncode == 0, result.stderr
