"""Signals and the time limit: they end a run after the current step, with a checkpoint."""

import math
import os
import re
import signal
import time

from training import distributed

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
TIME_IS_UP = 1000  # used like the number of a signal; no signal has it
PASSED_ON = 5.0  # seconds in which torchrun may repeat a signal that the terminal has sent to every process


class Interruption:
    """Catches signals and watches the time limit (seconds, or None).

    A second signal ends the process at once; under torchrun only after PASSED_ON seconds, since Ctrl-C reaches every
    process of a terminal and torchrun also forwards it to each rank. SIGHUP does not count as the first or the second
    signal: a closing terminal sends it twice, and a system that ends a session sends SIGTERM as well.

    The host may run ahead of the device by `steps_ahead` steps or by a second, whichever is less. It then looks at the
    outcome of these steps, and the ranks agree whether to stop.

    A reason to stop is the number of a signal or TIME_IS_UP; 0 means none. The time limit leaves room for one more step
    with everything due after it, and for the last checkpoint, each as long as the longest step so far.
    """

    def __init__(self, max_seconds: float | None, began: float, steps_ahead: int = 1):
        self.began, self.max_seconds, self.steps_ahead = began, max_seconds, steps_ahead
        self.looked, self.next_look = 0, 0  # steps
        self.longest = 0.0
        self.last: float | None = None
        self.signal, self.heard = 0, -math.inf

    def __enter__(self):
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()  # by nohup
        self.before = {number: signal.signal(number, self._heard) for number in SIGNALS if number not in ignored}
        return self

    def __exit__(self, *_):
        if self._is_passed_on():
            return  # a signal that torchrun still forwards must not end what follows the last checkpoint
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, _frame):
        if number == signal.SIGHUP:
            self.signal = self.signal or number
        elif self.signal in (0, signal.SIGHUP):
            self.signal, self.heard = number, time.monotonic()
        elif not self._is_passed_on():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _is_passed_on(self) -> bool:
        """Whether a signal that arrives now is the first one, forwarded by torchrun."""
        return "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - self.heard < PASSED_ON

    def look_due(self, step: int) -> bool:
        return step >= self.next_look or (self.signal != 0 and distributed.size() == 1)

    def requested(self, step: int) -> int:
        """The reason to stop on any rank, or 0, after `step` steps. A collective, called after each look."""
        before, reason = self.last, self.stop_requested()
        pace = 0.0 if before is None or step <= self.looked else (self.last - before) / (step - self.looked)
        reasons, paces = distributed.gather(reason, pace)
        self.looked, slowest = step, max(paces)
        self.next_look = step + max(1, min(self.steps_ahead, int(1 / slowest) if slowest else 1))
        return int(max(reasons))

    def stop_requested(self) -> int:
        """This rank's reason to stop, or 0. Called once a look."""
        now = time.monotonic()
        if self.last is not None:
            self.longest = max(self.longest, now - self.last)
        self.last = now
        if self.signal:
            return self.signal
        late = self.max_seconds is not None and now - self.began + 2 * self.longest > self.max_seconds
        return TIME_IS_UP if late else 0


def exit_code(reason: int) -> int:
    """The exit code for a reason to stop: 143 for SIGTERM, 130 for Ctrl-C, 129 for SIGHUP, 0 for the time limit."""
    return 0 if reason in (0, TIME_IS_UP) else 128 + reason


def describe(reason: int) -> str:
    return "time limit reached" if reason == TIME_IS_UP else signal.Signals(reason).name


def seconds(limit: str | None) -> float | None:
    """The seconds of "3h50m", "90m", "45s" or "1d12h"; None for None."""
    if limit is None:
        return None
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    return float(sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([dhms])", limit)))
