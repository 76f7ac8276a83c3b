"""W&B in a run."""

from pathlib import Path

import pytest
from miniature import final, rows
from wandb_server import wandb_server

import train
from training import tracking

pytestmark = pytest.mark.slow

hardware = pytest.mark.hardware


def test_tracking_mirrors_the_run(run, monkeypatch):
    folder = run("tracked", "tracking.mode=offline")
    assert list(folder.glob("wandb/offline-run-*"))
    assert f"wandb sync {folder}" in (folder / "README.txt").read_text()


@pytest.mark.parametrize("setting", ["tracking.project=a/b", "WANDB_MODE=sometimes"])
def test_an_invalid_wandb_setting_is_found_before_the_text_is_read(run, monkeypatch, setting):
    monkeypatch.setattr(train, "prepare", lambda *_: pytest.fail("text was read"))
    overrides = [setting] if setting.startswith("tracking") else []
    if not overrides:
        monkeypatch.setenv(*setting.split("="))
    with pytest.raises(ValueError, match=setting.split("=")[1]):
        run("one", *overrides)
    assert not Path("runs/one").exists()


def test_a_wandb_server_that_dies_changes_no_row(run, monkeypatch, capsys):
    with wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        log = tracking.log

        def log_and_kill(mirror, row):
            log(mirror, row)
            if row["step"] == 4:
                server.shutdown()
                server.server_close()

        monkeypatch.setattr(tracking, "log", log_and_kill)
        folder = run("tracked", "tracking.mode=online", "tracking.finish_timeout=1", "every.sample=100")
    assert rows(folder) == rows(run("alone")) and len(final(folder)[0])
    assert "TimeoutError: Timed out finishing run" in capsys.readouterr().out
