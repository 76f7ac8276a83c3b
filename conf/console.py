"""The output streams of a command, and signals. Imported first, so that Ctrl-C ends the other imports quietly too.

A pipe or a terminal may close, a disk may be full, a console may lack a character: output alone never ends a run.
"""

import contextlib
import errno
import io
import os
import re
import select
import signal
import sys
from typing import Any

STDOUT = "standard output"  # as the file of an OSError
GONE = (errno.EPIPE, errno.EIO)  # a reader, a terminal
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # control characters except newline and tab


def _leave(number: int, _frame):
    """Exits at once: nothing has started yet."""
    if number == signal.SIGINT:
        os.write(2, b"\ninterrupted\n")
    os._exit(128 + number)


_program = os.path.basename(getattr(sys.modules["__main__"], "__file__", None) or "")
if sys.argv[0] == "-m" or _program in ("train.py", "inkling"):
    for _number in (0, 1, 2):  # where one is closed, the next file that is opened must not become it
        try:
            os.fstat(_number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), _number)
    for _number in ENDING:
        if signal.getsignal(_number) != signal.SIG_IGN:
            signal.signal(_number, _leave)


def hear_signals():
    """Ctrl-C raises KeyboardInterrupt; SIGTERM, and SIGHUP unless ignored (nohup), raise SystemExit: 143 and 129."""

    def end(number: int, _frame):
        signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
        sys.exit(128 + number)

    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (_leave, signal.SIG_DFL):
            signal.signal(number, end)


class Output(io.FileIO):
    """A file descriptor for output: text that cannot be written is dropped, and `error` is the first reason.

    With `needed` the error is raised instead. A closed pipe or terminal is replaced by os.devnull, also for libraries
    and child processes; a full disk may have space again later. `note` is printed on stderr with the first error.
    """

    def __init__(self, descriptor: int, needed: bool = False, note: str = ""):
        super().__init__(descriptor, "wb", closefd=False)
        self.needed, self.note = needed, note
        self.error: OSError | None = None

    def write(self, data) -> int:
        try:
            while (written := super().write(data)) is None:  # another process has made it non-blocking
                select.select([], [self], [])
            return written
        except OSError as error:
            if error.errno in GONE or self.needed:
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, self.fileno())
                os.close(nothing)
            error.filename = STDOUT
            if self.needed:
                raise
            if self.error is None:
                self.error = error
                if self.note:
                    print(f"{error.filename}: {error.strerror}; {self.note}", file=sys.stderr, flush=True)
            return len(data)


def guard_output(needed: bool = False, note: str = ""):
    """Replaces sys.stdout and sys.stderr by streams that show what they can and never raise.

    Characters that their encoding lacks are shown as escapes. With `needed`, stdout raises OSError if it cannot be
    written. Streams without a file descriptor, as in a notebook or a test, stay. A closed stdin becomes an empty one.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    for name, number in (("stderr", 2), ("stdout", 1)):
        stream = getattr(sys, name)
        how: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
        if stream is not None:
            try:
                if stream.fileno() != number:
                    continue
            except (OSError, AttributeError):
                continue
            with contextlib.suppress(OSError):
                stream.flush()
            how |= {"encoding": stream.encoding, "line_buffering": stream.line_buffering}
            how |= {"write_through": stream.write_through}
        output = Output(number if stream else os.open(os.devnull, os.O_WRONLY), *(needed, note) if number == 1 else ())
        if stream is None:
            output.error = OSError(errno.EBADF, "it is closed", STDOUT)
        setattr(sys, name, io.TextIOWrapper(output if how.get("write_through") else io.BufferedWriter(output), **how))


def check():
    """OSError if output on a guarded stdout was lost; not if its reader has closed the pipe."""
    output = getattr(sys.stdout, "buffer", None)
    output = getattr(output, "raw", output)
    if isinstance(output, Output) and output.error is not None and output.error.errno not in GONE:
        raise output.error


def visible(text: str, stream=None) -> str:
    r"""Escapes control characters (\x1b) except newlines and tabs, if `stream` is a terminal, which would obey them.

    For other streams the text is unchanged. The default is sys.stdout.
    """
    if not (stream or sys.stdout).isatty():
        return text
    return CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)
