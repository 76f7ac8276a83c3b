"""scripts.runs, on run folders that the tests write themselves."""

import json
import os
import time

import pytest
from commands import command

from scripts import runs
from training import checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture
def make(tmp_path):
    """Writes a run folder: one row of metrics per step, validation losses from `validation`."""

    def write(name: str, seed: int, losses: list[float], validation: dict[int, float], steps: int = 3):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(
            f"seed: {seed}\nsteps: {steps}\nresume: null\nmodel:\n  d_model: {16 * seed}\n  tied: true\n"
        )
        with (folder / "metrics.jsonl").open("w") as file:
            for step, loss in enumerate(losses, 1):
                row = {"step": step, "tokens": 100 * step, "loss": loss, "clock": {"seconds": 0.5 * step}}
                if step in validation:
                    row |= {"val_loss": validation[step], "val_bpb": validation[step] / 2}
                file.write(json.dumps(row) + "\n")
            file.write('{"step": 4, "lo')  # the run was killed while it wrote this line
        return folder

    return write


def table(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_the_list_has_one_line_per_run_including_sweeps_and_damaged_runs(make, tmp_path):
    whole = make("whole", 1, [3.0, 2.0, 1.0], {1: 2.5, 2: 2.25, 3: 2.75})
    (whole / "environment.json").write_text('{"parameters": 1377664}')
    make("sweep/0", 2, [3.0, 2.0], {})
    (make("broken", 3, [3.0], {}) / "config.yaml").write_text("a: [")
    make("fresh", 4, [], {})
    for age, name in enumerate(("fresh", "broken", "sweep/0", "whole")):
        then = time.time() - (0, 90, 7200, 200000)[age]
        os.utime(tmp_path / "runs" / name / "metrics.jsonl", (then, then))
    result = command("-m", "scripts.runs")
    assert result.returncode == 0, result.stderr
    assert table(result.stdout)[:5] == [
        ["run", "steps", "loss", "val", "bpb", "params", "ended", "age"],
        ["whole", "3/3", "1.0000", "2.2500", "1.125", "1.38M", "yes", "2d"],
        ["sweep/0", "2/3", "2.0000", "-", "-", "-", "no", "2h"],
        ["broken", "1/?", "3.0000", "-", "-", "-", "no", "2m"],
        ["fresh", "0/3", "-", "-", "-", "-", "no", table(result.stdout)[4][-1]],
    ]


def test_the_list_compares_the_best_checkpoint_with_the_last(make, small, tmp_path):
    for name, losses in {"over": [2.0, 3.0], "level": [2.0, 2.001], "down": [3.0, 2.0], "unknown": [2.0, None]}.items():
        run = make(name, 1, [3.0, 2.0], {1: 2.5})
        for step, loss in enumerate(losses, 1):
            folder = run / "checkpoints" / f"step_{step:08}"
            folder.mkdir(parents=True)
            about = {"arguments": checkpoint.arguments_of(small(17)), "step": step, "seq_len": 8, "precision": "fp32"}
            metrics = {} if loss is None else {"val_loss": 9.0, "compared_loss": loss}
            (folder / "model.json").write_text(json.dumps(about | metrics))
            manifest = {"format": checkpoint.FORMAT, "files": {"model.json": checkpoint._facts(folder / "model.json")}}
            (folder / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "runs" / "down" / "checkpoints" / "step_00000003").mkdir()  # damaged
    said = command("-m", "scripts.runs", "list").stdout
    best = "is step 1, validation loss 2.0000; the last"
    assert f"checkpoint=runs/over:best {best}, 3.0000, is clearly worse\n" in said
    assert f"checkpoint=runs/level:best {best}, 2.0010, is not much worse\n" in said
    assert f"checkpoint=runs/unknown:best {best} was not evaluated\n" in said
    assert "runs/down:best is step 2, validation loss 2.0000; the last was not evaluated\n" in said


def test_a_run_that_ran_out_of_patience_has_ended(make):
    for name, patience in (("out", 2), ("in", 3)):
        with (make(name, 1, [4.0, 3.0, 2.0], {1: 2.5, 2: 2.75, 3: 2.75}, 9) / "config.yaml").open("a") as file:
            file.write(f"patience: {patience}\n")
    lines = table(command("-m", "scripts.runs", "list").stdout)
    assert {line[0]: line[6] for line in lines[1:3]} == {"out": "yes", "in": "no"}


def test_comparing_shows_different_settings_and_the_last_metrics(make):
    make("a", 1, [3.0, 2.0, 1.0], {1: 2.5, 2: 2.25})
    make("b", 2, [3.5, 2.5], {1: 2.0})
    result = command("-m", "scripts.runs", "compare", "runs=[runs/a,runs/b]")
    assert result.returncode == 0, result.stderr
    settings, metrics = result.stdout.strip().split("\n\n")
    assert table(settings) == [["setting", "a", "b"], ["seed", "1", "2"], ["model.d_model", "16", "32"]]
    lines = {" ".join(line[:-2]): line[-2:] for line in table(metrics)}
    assert lines["loss"] == ["1", "2.5"] and lines["step"] == ["3", "2"] and lines["seconds"] == ["1.5", "1"]
    assert lines["val_loss"] == ["2.25", "2"]
    assert lines["best val_loss"] == ["2.25", "2"] and lines["at step"] == ["2", "1"]


def test_equal_settings_are_reported_and_a_missing_metric_is_a_dash(make):
    make("a", 1, [3.0], {1: 2.5})
    make("b", 1, [3.0], {})
    result = command("-m", "scripts.runs", "compare", "runs=[runs/a,runs/b]")
    assert "no setting differs" in result.stdout
    assert ["val_loss", "2.5", "-"] in table(result.stdout)


def test_a_plot_is_saved(make, tmp_path):
    make("sweep/0", 1, [3.0, 2.0, 1.0], {1: 2.5, 3: 2.25})
    result = command("-m", "scripts.runs", "plot", "runs=runs/sweep/0", "output=picture.png")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert runs.name(tmp_path / "runs" / "sweep" / "0") == "sweep/0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no run in runs: start one with python train.py"),
        (["list", "folder=elsewhere"], "there is no run in elsewhere"),
        (["list", "elsewhere"], "settings have the form name=value, got elsewhere: give folder=elsewhere"),
        (["plto"], "plto is not an action: it must be one of list, compare, plot"),
        (["compare"], "compare needs two runs or more, got none: give runs='[runs/A,runs/B]'"),
        (["compare", "runs=[a]"], "compare needs two runs or more, got a: give"),
        (["compare", "a", "b"], "settings have the form name=value, got a b: give 'runs=[a,b]'"),
        (["compare", "runs=[a,b]"], "a is not a run folder: config.yaml is missing"),
        (
            ["plot", "runs=20261201-122516-a-00ff-1"],
            "20261201-122516-a-00ff-1 is not a run folder: metrics.jsonl is missing",
        ),
        (
            ["plot", "a", "--output", "x.png"],
            "settings have the form name=value, got a --output: give 'runs=[a]' output=",
        ),
        (["plot", "runs=a", "output=nope/x.png"], "nope/x.png cannot be written: give output=FILE"),
        (["compare", "runs=[a,b]", "folder=runs"], "folder has no effect with compare, only with list"),
    ],
)
def test_a_mistake_is_one_line(arguments, message):
    result = command("-m", "scripts.runs", *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {message}") and result.stderr.count("\n") == 1


def test_the_error_names_a_damaged_config(make):
    (make("a", 1, [3.0], {}) / "config.yaml").write_text("a: [")
    result = command("-m", "scripts.runs", "compare", "runs=[runs/a,runs/a]")
    assert result.returncode == 2 and "runs/a/config.yaml is damaged" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "row", ["5", "[]", "{}", '{"step": "3"}', '{"step": 3, "loss": "low"}', '{"step": 3, "clock": 5}', "null"]
)
def test_a_damaged_run_is_listed_with_a_note_and_hides_no_other(make, row):
    make("whole", 1, [3.0, 2.0, 1.0], {})
    bad = make("bad", 2, [3.0], {}) / "metrics.jsonl"
    bad.write_text(row + "\n" + bad.read_text())
    result = command("-m", "scripts.runs", "list")
    assert result.returncode == 0, result.stderr
    assert ["whole", "3/3", "1.0000"] in [line[:3] for line in table(result.stdout)]
    assert ["bad", "?"] in table(result.stdout)
    assert "metrics.jsonl, line 1, is damaged: " in result.stdout
    result = command("-m", "scripts.runs", "compare", "runs=runs/whole,runs/bad")
    assert result.returncode == 2
    assert "error: runs/bad/metrics.jsonl, line 1, is damaged: " in result.stderr


def test_invalid_json_is_skipped_like_the_last_line_of_a_killed_run(make):
    path = make("whole", 1, [3.0, 2.0], {}) / "metrics.jsonl"
    path.write_bytes(b"\x00\xff" * 99 + b"\n" + b"[" * 100_000 + b"\n" + path.read_bytes())
    assert [row["step"] for row in runs.rows(path.parent)] == [1, 2]
