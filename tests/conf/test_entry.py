"""The command line, in separate processes."""

import errno
import os
import re
import subprocess
import sys

import pytest
from commands import command

from conf.entry import REPOSITORY, entry_point, of_checkpoint, run_dir
from conf.schema import Train

TRAIN = str(REPOSITORY / "train.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([TRAIN, "modle.d_model=3"], "unknown setting modle.d_model: did you mean model.d_model?"),
        ([TRAIN, "experiment=smok"], "experiment=smok is unknown: did you mean smoke?"),
        ([TRAIN, "model.n_heads=7"], "model.d_model must be a multiple of model.n_heads"),
        ([TRAIN, "steps"], "steps"),
        ([TRAIN, "model=1.5"], "Config group override must be a string"),
        ([TRAIN, "--", "hello"], "text after -- has no effect here, got 'hello'"),
        ([TRAIN, "resume=nowhere"], "there is no checkpoint at nowhere"),
        (["-m", "scripts.generate", "checkpoint=nowhere"], "there is no checkpoint at nowhere"),
        (["-m", "scripts.generate"], "checkpoint is needed"),
        (["-m", "scripts.generate", "checkpoint=nowhere", "--", "${x} ???"], "there is no checkpoint at nowhere"),
        (["-m", "scripts.generate", "-m", "checkpoint=x", "seed=1,2"], "only train.py takes several runs (-m)"),
        ([TRAIN, "data.paths=[ü.txt]"], """data.paths=[ü.txt] needs quotes: 'data.paths=["ü.txt"]'"""),
        ([TRAIN, "resume=runs/ü,lr=0.1(x)"], "there is no checkpoint at runs/ü,lr=0.1(x)"),
        ([TRAIN, "name=${"], "name"),
        ([TRAIN, "+steps=3"], "steps exists already: give steps=... without +"),
        ([TRAIN, "hydra.run.dir=${nope}"], "hydra.run.dir: Interpolation key 'nope' not found"),
        ([TRAIN, "experiment="], "experiment= is unknown: there are finetune, fineweb_124m, smoke, tinyshakespeare"),
        (["-m", "scripts.evaluate", "checkpoint=x", "data.paths=[x]"], "give data=files or data=repository as well"),
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


@pytest.mark.slow
def test_an_empty_folder_survives_a_mistake(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert command("-m", "scripts.generate", "checkpoint=nowhere", cwd=empty).returncode == 2
    assert empty.exists() and not list(empty.iterdir())


@pytest.mark.slow
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


@pytest.mark.slow
def test_every_script_can_be_imported_alone():
    """In a separate process that has imported only torch."""
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


def sweep(run, capsys, monkeypatch, *arguments: str) -> tuple[int, str]:
    """Runs `python train.py -m ARGUMENTS` with `run` in place of training; returns the exit code and stderr."""
    monkeypatch.setattr(sys, "argv", [TRAIN, "-m", *arguments])
    try:
        entry_point("train", Train)(run)()
        code = 0
    except SystemExit as ended:
        code = ended.code
    return code, capsys.readouterr().err


@pytest.mark.slow
def test_a_job_that_fails_does_not_end_the_sweep(capsys, monkeypatch):
    seeds = []

    def run(cfg):
        seeds.append(cfg.seed)
        if cfg.seed == 1:
            raise ValueError("the loss of step 7\nis nan")
        if cfg.seed == 3:
            raise PermissionError(errno.EACCES, "Permission denied", "metrics.jsonl")

    arguments = ["seed=1,2,3,4", "model.n_heads=7,2", "hydra.sweeper.max_batch_size=3"]
    code, said = sweep(run, capsys, monkeypatch, *arguments)
    assert code == 2
    assert seeds == [1, 2, 3, 4]  # every other job, with 7 heads, is refused
    *lines, last = said.splitlines()
    assert [line.split("(")[0] for line in lines] == [f"error: job {i} " for i in (0, 1, 2, 4, 5, 6)]
    assert "job 1 (seed=1 model.n_heads=2): the loss of step 7 is nan" in lines[1]
    assert "must be a multiple of model.n_heads, got 128 and 7" in lines[0]
    assert last == "error: 6 of 8 jobs failed: 0, 1, 2, 4, 5, 6"


def test_a_bug_in_a_job_is_shown_and_does_not_end_the_sweep(capsys, monkeypatch):
    seeds = []

    def run(cfg):
        seeds.append(cfg.seed)
        if cfg.seed == 1:
            raise ZeroDivisionError("a bug")

    code, said = sweep(run, capsys, monkeypatch, "seed=1,2")
    assert code == 1 and seeds == [1, 2]
    assert "Traceback" in said and "ZeroDivisionError: a bug" in said
    assert said.endswith("error: job 0 (seed=1): ZeroDivisionError\nerror: 1 of 2 jobs failed: 0\n")


@pytest.mark.slow
@pytest.mark.parametrize("ended", [SystemExit(143), KeyboardInterrupt()], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_ends_the_whole_sweep(capsys, monkeypatch, ended):
    seeds = []

    def run(cfg):
        seeds.append(cfg.seed)
        raise ended

    code, _ = sweep(run, capsys, monkeypatch, "seed=1,2")
    assert code == (143 if isinstance(ended, SystemExit) else 130)
    assert seeds == [1]


@pytest.mark.slow
def test_a_sweep_resumes_failed_jobs_and_skips_finished_ones(tmp_path):
    (tmp_path / "t.txt").write_text("\n".join(map(str, range(2000))))
    settings = [TRAIN, "-m", "experiment=smoke", "tracking.mode=disabled", "data=files", "tokenizer=bytes", "steps=2"]
    settings += ["data.paths=[t.txt]", "precision=fp32", "kernels=false", "compile=false", "sample.tokens=3"]
    settings += ["optimizer=adamw", "optimizer.lr=1e30,1e-3", "hydra.sweep.dir=runs/s", "resume=auto"]
    settings += ["schedule.warmup=0", "model.norm=layernorm", "model.qk_norm=false"]
    for again in (False, True):
        result = command(*settings)
        assert result.returncode == 2, result.stdout + result.stderr
        first, last = result.stderr.splitlines()
        assert first.startswith("error: job 0 (") and "the loss of step 2 is nan" in first
        assert last == "error: 1 of 2 jobs failed: 0"
        assert (tmp_path / "runs/s/1/checkpoints/step_00000002").is_dir()
        assert ("nothing left to do: 2 steps are done" in result.stdout) == again


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "abc"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", ""), ("LOCAL_RANK", "-1"), ("RANK", "1.5")]
)
def test_an_environment_without_a_rank_is_a_one_line_error(name, value):
    result = command(TRAIN, "dry_run=true", **{name: value})
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert f"error: the environment's {name} must be a number from" in result.stderr and repr(value) in result.stderr


@pytest.mark.parametrize("content", ["[" * 100_000, "", "[]", '{"arguments": 5}', '{"seq_len": ' + "1" * 5000])
def test_a_checkpoint_that_lacks_a_setting_is_a_one_line_error(tmp_path, content):
    (tmp_path / "model.json").write_text(content)
    for name in ("seq_len", "d_model"):
        with pytest.raises(ValueError, match=f"^init_from: .*/model.json does not say {name}") as error:
            of_checkpoint(str(tmp_path), name)
        assert "\n" not in str(error.value)


def test_a_checkpoint_in_the_home_folder_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model.json").write_text('{"seq_len": 32, "arguments": {"d_model": 16}}')
    assert (of_checkpoint("~/base", "seq_len"), of_checkpoint("~/base", "d_model")) == (32, 16)
