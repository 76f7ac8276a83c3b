"""Which checkpoints a run keeps, and what it does if it cannot save one."""

import math
import resource
import signal
from pathlib import Path

import pytest
from miniature import at_step, equal, final, rows

from training import checkpoint, checkpoints, evaluation
from training.evaluation import Evaluation

pytestmark = pytest.mark.slow

hardware = pytest.mark.hardware


def losses_are(monkeypatch, *values: float) -> list:
    """Makes the evaluations return these losses in turn; returns a list that collects their limits."""
    values, limits = iter(values), []
    monkeypatch.setattr(
        evaluation, "evaluate", lambda *_, **k: (limits.append(k["limit"]), Evaluation(next(values), 1, 1))[1]
    )
    return limits


PATIENT = ["patience=2", "every.evaluate=1", "keep=1", "every.checkpoint=100"]


def test_the_newest_checkpoints_and_the_best_are_kept(run, monkeypatch):
    losses = iter([5.0, 1.0, 4.0, 3.0, 2.0, 2.5, 2.2, 2.1])
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: Evaluation(next(losses), 1, 1))
    folder = run("kept", "keep=2", "every.checkpoint=1", "every.evaluate=1")
    assert [path.name[-1] for path in checkpoint.steps(folder)] == ["8", "7", "2"]
    assert {path.name for path in (folder / "checkpoints").iterdir() if path.is_dir()} == {
        "step_00000008",
        "step_00000007",
        "step_00000002",
    }


@pytest.mark.parametrize("stop", [None, 3, 4, 5])
def test_patience_ends_the_run_and_keeps_the_best_also_when_resumed(run, monkeypatch, capsys, stop):
    losses_are(monkeypatch, 5.0, 4.0, 3.0, 3.5, math.nan, 1.0)
    if stop:
        run("one", *PATIENT, f"stop_after={stop}")
    folder = run("one", *PATIENT, "resume=auto")
    assert run.code == 0 and rows(folder)[-1]["step"] == 5
    assert [path.name[-1] for path in checkpoint.steps(folder)] == ["5", "3"]
    output = capsys.readouterr().out
    assert "patience    stopped after step 5: 2 evaluations without a lower validation loss" in output or stop == 5
    assert "best        checkpoint=" in output and ":best is step 3, validation loss 3.0000; the last was not" in output
    before = (folder / "metrics.jsonl").read_bytes()
    run("one", *PATIENT, "resume=auto")
    assert run.code == 0 and (folder / "metrics.jsonl").read_bytes() == before
    assert "patience=2 ended the run after 5 steps; increase it" in capsys.readouterr().out
    with pytest.raises(ValueError, match="patience=2 ended the run after 5 steps"):
        run("fork", *PATIENT, f"resume={folder}")
    assert rows(run("fork", *PATIENT, f"resume={folder}:best", "stop_after=4"))[-1]["step"] == 4


def test_validation_losses_are_compared_on_the_same_part_of_the_text(run, monkeypatch, capsys):
    """The last evaluation reads all of the text; its loss is not compared with the others."""
    part = ["every.evaluate=4", "every.checkpoint=4", "eval_tokens=40"]
    limits = losses_are(monkeypatch, 3.0, 2.0, 5.0)
    folder = run("one", *part)
    assert limits == [40, None, 40]
    assert [row["val_loss"] for row in rows(folder) if "val_loss" in row] == [3.0, 2.0]
    assert checkpoint.find(f"{folder}:best").name[-1] == "4"
    assert "the last, 5.0000, is clearly worse" in capsys.readouterr().out
    losses_are(monkeypatch, 4.0, 9.0)
    longer = run("one", *part, "resume=auto", "steps=12")
    assert final(longer)[1]["guard"]["lowest"] == 3.0
    losses_are(monkeypatch, 9.0, 4.0)
    other = run("one", "eval_tokens=39", *part[:2], "resume=auto", "steps=16")
    assert final(other)[1]["guard"]["lowest"] == 4.0


def test_the_lowest_validation_loss_is_reported_even_if_not_saved(run, monkeypatch, capsys):
    losses_are(monkeypatch, 1.0, 4.0, 5.0, 6.0)
    run("one", "every.evaluate=2", "every.checkpoint=4")
    output = capsys.readouterr().out
    assert "runs/one:best is step 4, validation loss 4.0000; the last, 6.0000, is clearly worse" in output
    assert "lowest      validation loss 1.0000 after step 2, which has no checkpoint" in output


def test_a_run_folder_is_used_by_one_process_at_a_time(run):
    with (
        checkpoints.run_lock(Path("runs/one")),
        pytest.raises(ValueError, match="runs/one is in use by another process"),
    ):
        run("one")
    run("one")


def test_an_unwritable_folder_is_found_before_the_first_step(run, tmp_path, monkeypatch):
    at_step(monkeypatch, 1, lambda *_: pytest.fail("a step was made"))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "file").write_text("")
    with pytest.raises(ValueError, match="checkpoints cannot be written to .*Not a directory"):
        run("file/one")


@pytest.mark.parametrize("kind", ["an error", "a full disk"])
def test_a_run_survives_a_failed_save_and_reports_it_in_its_exit_code(run, monkeypatch, kind, capfd):
    every = ["every.checkpoint=2", "every.sample=100"]
    whole = run("whole", *every)
    real, calls = checkpoint.save_file, []

    def failing(weights, path):
        calls.append(path)
        if len(calls) != 2:
            return real(weights, path)
        if kind == "an error":
            raise OSError("Input/output error")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            return real(weights, path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(checkpoint, "save_file", failing)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with pytest.raises(ValueError, match="1 checkpoints could not be saved"):
        run("parts", *every)
    signal.signal(signal.SIGXFSZ, before)
    assert "step_00000004 could not be saved, training continues: " in capfd.readouterr().out
    assert [path.name[-1] for path in checkpoint.steps(Path("runs/parts"))] == ["8", "6", "2"]
    assert equal(whole, Path("runs/parts"))
