"""Ends a run in time: after the step at hand, with a checkpoint."""

import math
import os
import re
import signal
import time

from training import distributed

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
TIME_IS_UP = 1000  # where the number of a signal stands else; no signal has it
PASSED_ON = 5.0  # seconds in which torchrun says again what the terminal has said to all


class Interruption:
    """Listens for signals and watches the time limit, in seconds or None.

    A second signal ends the process at once. Under torchrun only after PASSED_ON seconds: Ctrl-C reaches every process
    of a terminal, and torchrun sends each rank what it hears itself. SIGHUP is neither first nor second: a terminal
    that closes sends it twice, and a system that ends a session with SIGTERM.

    The host may be `steps_ahead` steps ahead of the device, or a second, whichever is less. Then it looks what has
    become of them, and the ranks agree on whether to end.

    `wanted` is 0, the number of a signal, or TIME_IS_UP. The latter comes early enough for one more step, with all that
    may be due behind it, and for the last checkpoint: each as long as the longest step so far.
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
            return  # what is still to come must not end what follows the last checkpoint
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
        """Whether a signal, now, is the first one once more."""
        return "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - self.heard < PASSED_ON

    def look_due(self, step: int) -> bool:
        return step >= self.next_look or (self.signal != 0 and distributed.size() == 1)

    def requested(self, step: int) -> int:
        """What is wanted on any rank. Asked by all alike, after each look; `step` steps are done."""
        before, reason = self.last, self.stop_requested()
        pace = 0.0 if before is None or step <= self.looked else (self.last - before) / (step - self.looked)
        reasons, paces = distributed.gather(reason, pace)
        self.looked, slowest = step, max(paces)
        self.next_look = step + max(1, min(self.steps_ahead, int(1 / slowest) if slowest else 1))
        return int(max(reasons))

    def stop_requested(self) -> int:
        """Asked once a look."""
        now = time.monotonic()
        if self.last is not None:
            self.longest = max(self.longest, now - self.last)
        self.last = now
        if self.signal:
            return self.signal
        late = self.max_seconds is not None and now - self.began + 2 * self.longest > self.max_seconds
        return TIME_IS_UP if late else 0


def exit_code(reason: int) -> int:
    """Of a run that was ended so: 143 by SIGTERM, 130 by Ctrl-C, 129 by SIGHUP, 0 by its own time limit."""
    return 0 if reason in (0, TIME_IS_UP) else 128 + reason


def describe(reason: int) -> str:
    return "the time is up" if reason == TIME_IS_UP else signal.Signals(reason).name


def seconds(limit: str | None) -> float | None:
    """Of "3h50m", "90m", "45s" or "1d12h"; None stays."""
    if limit is None:
        return None
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    return float(sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([dhms])", limit)))
