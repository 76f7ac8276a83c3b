import os
import signal
import time

import pytest

from training import interruption
from training.interruption import TIME_IS_UP, Interruption


@pytest.mark.parametrize("number", interruption.SIGNALS)
def test_a_signal_is_remembered_and_the_old_handlers_are_restored(number):
    before = signal.getsignal(number)
    with Interruption(None, time.monotonic()) as interrupted:
        assert interrupted.stop_requested() == 0
        os.kill(os.getpid(), number)
        assert interrupted.stop_requested() == number
    assert signal.getsignal(number) == before
    assert interruption.exit_code(number) == 128 + number


@pytest.mark.parametrize("names", ["HUP HUP HUP", "TERM HUP HUP", "HUP TERM HUP", "HUP INT"])
def test_a_closing_terminal_kills_no_process_however_often_it_signals(monkeypatch, names):
    numbers, ended = [signal.Signals[f"SIG{name}"] for name in names.split()], []
    with Interruption(None, time.monotonic()) as interrupted:
        monkeypatch.setattr(os, "kill", lambda _, number: ended.append(number))
        for number in numbers:
            signal.raise_signal(number)
        assert ended == []
        assert interrupted.stop_requested() == next((one for one in numbers if one != signal.SIGHUP), signal.SIGHUP)


def test_a_signal_forwarded_by_torchrun_is_not_the_second_one(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    before, now, ended = signal.getsignal(signal.SIGINT), [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "kill", lambda _, number: ended.append(number))
    try:
        with Interruption(None, began=90.0) as interrupted:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            assert interrupted.stop_requested() == signal.SIGINT
        signal.raise_signal(signal.SIGINT)  # while W&B is finished, say
        assert ended == []
        now[0] += interruption.PASSED_ON
        signal.raise_signal(signal.SIGINT)
        assert ended == [signal.SIGINT]
    finally:
        for number, handler in interrupted.before.items():
            signal.signal(number, handler)
    assert signal.getsignal(signal.SIGINT) == before


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption(None, time.monotonic()) as interrupted:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupted.stop_requested() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_time_limit_leaves_room_for_one_more_of_the_longest_steps(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Interruption(60.0, began=90.0) as interrupted:
        for wait, expected in [(5, 0), (10, 0), (5, 0), (5, 0), (5, 0), (1, TIME_IS_UP)]:
            now[0] += wait
            assert interrupted.stop_requested() == expected, now
    assert interruption.exit_code(TIME_IS_UP) == 0


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, None), ("45s", 45), ("90m", 5400), ("3h50m", 13800), ("1d12h", 129600)]
)
def test_a_time_limit_is_read(limit, expected):
    assert interruption.seconds(limit) == expected


@pytest.mark.parametrize("limit", ["", "3", "3h50", "50m3h", "-1s", "1.5h", 400 * "9" + "d"])
def test_an_invalid_time_limit_is_refused(settings, limit):
    with pytest.raises(ValueError, match="max_time must look like 3h50m"):
        settings(f"max_time='{limit}'")
