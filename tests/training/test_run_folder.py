import json
import shutil
import subprocess
import tomllib
from dataclasses import asdict

import pytest
import torch

from conf.entry import REPOSITORY
from training import run_folder


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A git checkout in place of ours, and a function that calls git there."""
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    code = tmp_path / "code"
    code.mkdir()
    monkeypatch.setattr(run_folder, "CODE", code)

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        return subprocess.check_output(["git", "-C", str(code), *identity, *arguments], text=True).strip()

    git("init", "-q")
    (code / "train.py").write_text("a = 1\n")
    git("add", "train.py")
    git("commit", "-qm", "first")
    return code, git


def record(run) -> dict:
    run.mkdir(exist_ok=True)
    environment = run_folder.record_environment(run, torch.device("cpu"), parameters=7)
    assert json.loads((run / "environment.json").read_text()) == environment
    return environment


def test_the_environment_names_commit_versions_and_machine(checkout, tmp_path):
    _, git = checkout
    environment = record(tmp_path / "run")
    assert environment["commit"] == git("rev-parse", "HEAD") and environment["changed"] is False
    assert environment["torch"] == torch.__version__ and environment["parameters"] == 7
    assert environment["device"] and environment["python"].startswith("3.")
    assert not (tmp_path / "run" / "changes.patch").exists()


def test_changes_since_the_commit_are_saved_as_a_patch_that_applies(checkout, tmp_path):
    code, git = checkout
    (code / "train.py").write_text("a = 2\n")
    (code / "new.py").write_bytes(b"b = '\xff'\n")
    git("add", "new.py")
    assert record(tmp_path / "run")["changed"] is True
    patch = tmp_path / "run" / "changes.patch"
    git("reset", "-q", "--hard")
    git("apply", str(patch))
    assert (code / "train.py").read_text() == "a = 2\n" and (code / "new.py").read_bytes() == b"b = '\xff'\n"
    git("checkout", "-q", "train.py")
    assert record(tmp_path / "run")["changed"] is False and not patch.exists()


def test_no_commit_is_recorded_outside_our_own_checkout(checkout, tmp_path, monkeypatch):
    code, _ = checkout
    (code / "installed").mkdir()
    (code / "installed" / "train.py").write_text("a = 1\n")
    monkeypatch.setattr(run_folder, "CODE", code / "installed")
    (code / "train.py").write_text("secret = 2\n")
    assert record(tmp_path / "run")["commit"] is None and not (tmp_path / "run" / "changes.patch").exists()
    monkeypatch.setenv("PATH", "")
    environment = record(tmp_path / "run")
    assert environment["commit"] is None and environment["changed"] is None


def test_the_patch_holds_only_program_files_and_untracked_ones_are_named(checkout, tmp_path):
    code, git = checkout
    for name in (".env", "notes.txt", "conf/keys.env", "private/x.py", "model/.env.local", "runs/a.yaml"):
        (code / name).parent.mkdir(exist_ok=True)
        (code / name).write_text("KEY=hunter2\n")
        git("add", "-N", "-f", name)
    assert record(tmp_path / "run")["changed"] is False and not (tmp_path / "run" / "changes.patch").exists()
    for name in ("conf/experiment/mine.yaml", "kernels/block.cpp", "model/deep/new.py", "own.py", "private/y.py"):
        (code / name).parent.mkdir(exist_ok=True, parents=True)
        (code / name).write_text("mine = 1\n")
    environment = record(tmp_path / "run")
    assert environment["changed"] is False
    assert environment["untracked"] == ["conf/experiment/mine.yaml", "kernels/block.cpp", "model/deep/new.py", "own.py"]
    git("add", ".")
    environment, patch = record(tmp_path / "run"), (tmp_path / "run" / "changes.patch").read_text()
    assert environment["changed"] is True and environment["untracked"] == []
    assert "hunter2" not in patch and patch.count("+mine = 1") == 4


def test_a_slow_git_is_reported_and_whether_code_changed_is_unknown(checkout, tmp_path, monkeypatch):
    code, git = checkout
    real = subprocess.run
    (code / "train.py").write_text("a = 2\n")

    def slow(command, **options):
        if "diff" in command:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return real(command, **options)

    monkeypatch.setattr(run_folder.subprocess, "run", slow)
    warnings = []
    environment = run_folder.record_environment(tmp_path, torch.device("cpu"), warnings.append)
    assert environment["commit"] == git("rev-parse", "HEAD") and environment["changed"] is None
    assert warnings == ["changes since the commit are not recorded: git took more than 10 s"]


def test_a_large_patch_is_not_saved_and_an_old_one_is_removed(checkout, tmp_path, monkeypatch):
    code, _ = checkout
    (code / "train.py").write_text("a = 2\n")
    assert record(tmp_path / "run")["changed"] is True and (tmp_path / "run" / "changes.patch").exists()
    monkeypatch.setattr(run_folder, "LARGEST_PATCH", 10)
    warnings = []
    assert run_folder.record_environment(tmp_path / "run", torch.device("cpu"), warnings.append)["changed"] is True
    assert not (tmp_path / "run" / "changes.patch").exists() and "bytes, 10 at most" in warnings[0]


def test_an_old_run_resumes_only_with_special_tokens_as_plain_text(settings):
    now = [
        asdict(settings("experiment=smoke", "tokenizer=bpe", f"tokenizer.parse_special={parse}"))
        for parse in ("false", "true")
    ]
    before = asdict(settings("experiment=smoke", "tokenizer=bpe"))
    del before["tokenizer"]["parse_special"]
    assert list(run_folder.differences(before, now[0])) == []
    run_folder.check_same_settings("run", before, now[0])
    with pytest.raises(ValueError, match=r"another text or tokenizer: give tokenizer.parse_special=false"):
        run_folder.check_same_settings("run", before, now[1])


def test_every_package_of_the_program_is_recorded():
    """Its C++ too: a new folder must be added to PROGRAM."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    packages = {name.split(".")[0] for name in project["tool"]["setuptools"]["packages"]}
    assert {f"{package}/*.py" for package in packages} <= set(run_folder.PROGRAM)
    cpp = {f"{path.parent.name}/*{path.suffix}" for path in REPOSITORY.glob("*/*") if path.suffix in (".cpp", ".h")}
    assert cpp and cpp <= set(run_folder.PROGRAM)
