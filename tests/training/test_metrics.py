import errno
import json
import os
import resource
import signal

import pytest

from training.metrics import MetricsLog, Screen, Stopwatch, duration


def test_rows_are_on_the_disk_at_once_and_a_resumed_run_rewinds(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    for step in (10, 20, 30):
        log.write({"step": step, "loss": 1 / step})
        assert json.loads(path.read_text().splitlines()[-1])["step"] == step
    with path.open("a") as file:
        file.write('5\n{"loss": 1}\n{"step": "ten"}\n')  # no rows
        file.write('{"step": 40, "lo')  # killed
    MetricsLog(path, 20).write({"step": 30, "loss": 7})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20, 30]
    assert json.loads(path.read_text().splitlines()[-1])["loss"] == 7


def steps(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_rows_wait_while_the_disk_is_full_and_are_written_in_order(tmp_path):
    """The disk has room for half of the second row; the file holds complete rows at any time."""
    path, warnings = tmp_path / "metrics.jsonl", []
    log = MetricsLog(path, 0, warnings.append)
    log.write({"step": 1, "text": "x" * 100})
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, most))
        for step in (2, 3, 4):
            log.write({"step": step, "text": "x" * 100})
            log.sync()
            assert steps(path) == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
        signal.signal(signal.SIGXFSZ, before)
    assert len(warnings) == 1 and str(path) in warnings[0]
    assert [row["step"] for row in log.waiting] == [2, 3, 4]
    log.write({"step": 5})
    assert steps(path) == [1, 2, 3, 4, 5] and not log.waiting


def test_rewinding_drops_rows_on_the_disk_and_rows_that_wait(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    for step in (1, 2, 3):
        log.write({"step": step})
    log.waiting = [{"step": 4}, {"step": 5}]
    log.rewind(4)
    log.sync()
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]
    log.rewind(2)
    assert steps(tmp_path / "metrics.jsonl") == [1, 2]


def test_a_disk_on_which_fsync_fails_does_not_end_the_run(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    warnings = []
    log = MetricsLog(tmp_path / "metrics.jsonl", 0, warnings.append)
    monkeypatch.setattr(os, "fsync", fail)
    log.write({"step": 1})
    log.sync()
    log.sync()
    assert len(warnings) == 1 and "Input/output error" in warnings[0]


def test_without_a_terminal_every_report_is_a_plain_line(capsys):
    row = {"loss": 2.5, "lr": 1e-3, "grad_norm": 0.5, "clock": {"tok_per_sec": 12345.6}}
    with Screen(100) as screen:
        screen.report(10, row, 75, keep=False)
        screen.report(20, row | {"val_loss": 3.0, "val_bpb": 1.5}, 0, keep=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step  10/100 | loss 2.500 | lr 1.00e-03 | grad_norm 0.50 | 12.3k tok/s | eta 1:15"
    assert lines[1:] == [
        "step  20/100 | loss 2.500 | val 3.000 (1.500 bpb) | lr 1.00e-03 | grad_norm 0.50 | 12.3k tok/s | eta 0:00"
    ]


def test_the_line_on_a_terminal_fits_80_columns():
    screen = Screen(2000)
    row = {"loss": 3.87364, "lr": 1.5e-6, "grad_norm": 0.82, "clock": {"tok_per_sec": 7778.0}}
    for values in ({"val_loss": 4.1321, "val_bpb": 2.097}, {}):
        screen.report(1980, row | values, 75, keep=False)
    text = screen.progress.tasks[0].description
    assert text == "1980/2000 | loss 3.874 | val 4.132 | grad_norm 0.82 | 7.8k tok/s | eta 1:15"
    assert len(text) <= 80


def test_a_paused_stopwatch_does_not_run(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("training.metrics.time.perf_counter", lambda: now[0])
    watch = Stopwatch()
    now[0] = 3
    with watch:
        now[0] = 10
        assert watch.seconds() == 3
    now[0] = 11
    assert watch.seconds() == 4


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3661, "1:01:01")])
def test_a_duration_is_hours_minutes_and_seconds(seconds, text):
    assert duration(seconds) == text
