import json
import subprocess
import sys

import pytest

from training import tracking


def start(folder, mode="auto", **changes):
    options = {"project": "p", "timeout": 5.0, "config": {"steps": 3}, "run_id": None, "warn": print}
    return tracking.start(mode, folder=folder, **{**options, **changes})


def test_without_a_key_the_run_is_offline_and_holds_what_was_logged(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    run = start(folder)
    for step in (10, 20):
        tracking.log(run, {"step": step, "loss": 1.0 / step, "clock": {"seconds": 2.5}})
    tracking.log_samples(run, [{"step": 20, "prompt": "a", "text": "abc"}])
    run.finish()
    command = tracking.where(run)
    assert command == f"wandb sync {folder}/wandb/offline-run-*"
    (written,) = folder.glob("wandb/offline-run-*")
    inspect = [
        sys.executable,
        "-m",
        "wandb",
        "leet",
        "inspect",
        "--json",
        "--summary",
        str(written),
    ]
    result = subprocess.run(inspect, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    text = result.stdout
    assert json.loads(text)
    for expected in ("trainer/step", "loss", "clock/seconds", "samples"):
        assert expected in text


def test_disabled_writes_nothing(tmp_path):
    run = start(tmp_path, mode="disabled")
    tracking.log(run, {"step": 1, "loss": 1.0})
    run.finish()
    assert tracking.where(run) == "metrics.jsonl only"
    assert not (tmp_path / "wandb").exists()


def test_the_environment_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert start(tmp_path, mode="offline").disabled


def test_a_key_is_found_in_the_environment_or_in_netrc_for_the_server_in_use(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://tracker.example:8080")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not tracking.has_key()
    (tmp_path / "netrc").write_text("machine other.example login user password x\n")
    assert not tracking.has_key()
    (tmp_path / "netrc").write_text("machine tracker.example login user password x\n")
    assert tracking.has_key()
    monkeypatch.delenv("NETRC")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert tracking.has_key()


def test_a_server_that_is_not_there_sends_auto_offline_and_stops_online(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    said = []
    run = start(tmp_path, timeout=1.0, warn=said.append)
    assert run.offline and len(said) == 1 and "tracking offline" in said[0]
    run.finish()
    with pytest.raises(ValueError, match="W&B says"):
        start(tmp_path, mode="online", timeout=1.0)


def test_what_wandb_refuses_is_one_error(tmp_path, monkeypatch):
    for mode in ("auto", "offline"):
        with pytest.raises(ValueError, match="W&B says"):
            start(tmp_path, mode=mode, project="a/b")
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(ValueError, match="online, offline or disabled, got sometimes"):
        start(tmp_path)
