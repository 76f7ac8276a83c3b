import json
import shutil
import subprocess

import pytest
import torch

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


def test_what_differs_from_the_commit_is_a_patch_that_makes_it_again(checkout, tmp_path):
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


def test_a_checkout_that_is_not_ours_or_none_has_no_commit(checkout, tmp_path, monkeypatch):
    code, _ = checkout
    (code / "installed").mkdir()
    (code / "installed" / "train.py").write_text("a = 1\n")
    monkeypatch.setattr(run_folder, "CODE", code / "installed")
    (code / "train.py").write_text("secret = 2\n")
    assert record(tmp_path / "run")["commit"] is None and not (tmp_path / "run" / "changes.patch").exists()
    monkeypatch.setenv("PATH", "")
    assert record(tmp_path / "run")["commit"] is None
