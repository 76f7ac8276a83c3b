"""Signals, time limits and power cuts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from miniature import at_step, equal, final, rows, same

import train
from conf.entry import REPOSITORY
from training import checkpoint, evaluation

pytestmark = pytest.mark.slow

hardware = pytest.mark.hardware


@pytest.mark.parametrize(
    ("step", "number"),
    [(1, signal.SIGTERM), (5, signal.SIGTERM), (5, signal.SIGINT), (1, signal.SIGUSR1), (5, signal.SIGHUP)],
)
def test_a_signal_stops_the_run_after_its_step_and_resuming_is_exact(run, monkeypatch, number, step):
    whole = run("whole")
    with monkeypatch.context() as patch:
        at_step(patch, step, lambda _, total: os.kill(os.getpid(), number) or total)
        parts = run("parts")
    assert run.code == 128 + number
    assert checkpoint.find(parts, for_training=True).name == f"step_{step:08}"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert equal(whole, run("parts", "resume=auto"))


@pytest.mark.parametrize(("step", "cut"), [(2, 0), (5, 30), (8, 30)])
def test_kill_9_and_a_power_cut_lose_only_steps_since_the_checkpoint(run, monkeypatch, step, cut):
    """The process dies within a step; a power cut also loses the last bytes that had not reached the disk."""
    every = ["every.checkpoint=3", "every.evaluate=2", "every.log=1"]
    whole = run("whole", *every)
    if (child := os.fork()) == 0:
        at_step(monkeypatch, step, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        run("parts", *every)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    metrics = Path("runs/parts/metrics.jsonl")
    os.truncate(metrics, metrics.stat().st_size - cut)
    assert equal(whole, run("parts", *every, "resume=auto"))


def test_a_run_ends_within_max_time_and_can_resume(run):
    began = time.monotonic()
    folder = run("long", "steps=100000", "max_time=4s", "compile=false", "schedule.warmup=2", "every.evaluate=100000")
    assert time.monotonic() - began < 30  # 100,000 steps take ten minutes and more
    step = checkpoint.read_about(checkpoint.find(folder, for_training=True))["step"]
    assert 1 < step < 100000
    assert rows(run("long", "resume=auto", f"steps={step + 2}", "schedule.warmup=2"))[-1]["step"] == step + 2


def test_a_second_signal_ends_a_process_at_once(tmp_path):
    code = """
import os, signal, time
from training.interruption import Interruption
with Interruption(None, 0.0) as interrupted:
    assert interrupted.stop_requested() == 0
    os.kill(os.getpid(), signal.SIGTERM)
    assert interrupted.stop_requested() == signal.SIGTERM
    print("caught", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=50)
    assert (result.stdout, result.returncode) == ("caught\n", -signal.SIGTERM), result.stderr


@pytest.mark.parametrize("how", ["time", "signal", "signal in a fork"])
def test_a_run_stopped_before_its_first_step_can_resume(run, monkeypatch, how):
    whole, options = run("whole"), ["max_time=0s"] if how == "time" else []
    if "fork" in how:
        options += [f"resume={run('first', 'stop_after=3')}"]
    with monkeypatch.context() as patch:
        if "signal" in how:
            real = train.tracking.start
            patch.setattr(
                train.tracking,
                "start",
                lambda *a, **k: (os.kill(os.getpid(), signal.SIGTERM), real(*a, **k))[1],
            )
        parts = run("parts", *options)
    assert run.code == (0 if how == "time" else 143)
    assert checkpoint.read_about(checkpoint.find(parts, for_training=True))["step"] == (3 if "fork" in how else 0)
    run("parts", "resume=auto")
    assert same(final(whole)[0], final(parts)[0])


def test_after_a_signal_in_an_evaluation_its_loss_is_in_the_checkpoint(run, monkeypatch):
    real = evaluation.evaluate
    stopping = lambda *a, **k: (os.kill(os.getpid(), signal.SIGTERM), real(*a, **k))[1]  # noqa: E731
    monkeypatch.setattr(evaluation, "evaluate", stopping)
    folder = run("one", "every.checkpoint=3")
    assert run.code == 143
    assert "val_loss" in checkpoint.read_about(checkpoint.find(folder))
