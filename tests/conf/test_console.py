"""A command does its work even if its output cannot be written."""

import errno
import io
import os
import signal
import subprocess
import sys

import pytest

from conf import console
from conf.console import Output, visible
from conf.entry import REPOSITORY, one_line

TRAIN = str(REPOSITORY / "train.py")
FULL = "/dev/full"


def closed_pipe() -> int:
    """Returns the descriptor of a pipe whose reader has closed it."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def closed_terminal() -> int:
    """Returns the descriptor of a terminal that has been closed."""
    master, terminal = os.openpty()
    os.close(master)
    return terminal


def full_disk() -> int:
    return os.open(FULL, os.O_WRONLY)


@pytest.mark.parametrize(
    ("lost", "number"), [(closed_pipe, errno.EPIPE), (closed_terminal, errno.EIO), (full_disk, errno.ENOSPC)]
)
def test_text_that_cannot_be_written_is_dropped_with_one_warning(lost, number, capsys, monkeypatch):
    descriptor = lost()
    output = Output(descriptor, note="continuing without")
    stream = io.TextIOWrapper(output, write_through=True)
    for _ in range(3):
        print("a line", file=stream, flush=True)
    assert output.error.errno == number
    err = capsys.readouterr().err
    assert err == f"standard output: {os.strerror(number)}; continuing without\n"
    gone = number in console.GONE
    # so that libraries and child processes can write, too
    assert os.path.sameopenfile(descriptor, os.open(os.devnull, os.O_WRONLY)) == gone
    monkeypatch.setattr(sys, "stdout", stream)
    if gone:
        console.check()
    else:
        with pytest.raises(OSError, match="No space left"):
            console.check()


@pytest.mark.parametrize("lost", [closed_pipe, full_disk])
def test_requested_output_raises_if_it_cannot_be_written(lost):
    stream = io.TextIOWrapper(Output(lost(), needed=True), write_through=True)
    with pytest.raises(OSError) as raised:
        stream.write("a line")
    assert one_line(raised.value).startswith("standard output: ")
    stream.write("later output is dropped")


def test_a_non_blocking_pipe_receives_the_complete_text():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    text = b"line\n" * 100_000
    if (child := os.fork()) == 0:
        os.close(reader)
        with io.BufferedWriter(Output(writer)) as stream:
            stream.write(text)
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        assert file.read() == text
    assert os.waitpid(child, 0)[1] == 0


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_is_not_sent_control_characters():
    text = "a\tb\n\x1b]0;title\x07\x1b[2J\r\x7f\x9b31m Äpfel ☃"
    assert visible(text, Terminal()) == r"a	b" + "\n" + r"\x1b]0;title\x07\x1b[2J\r\x7f\x9b31m Äpfel ☃"
    assert visible(text, io.StringIO()) == text


def shown(script: str, **options) -> subprocess.CompletedProcess:
    """Runs `script` after guard_output in a Python that a shell starts."""
    code = f"from conf import console; console.guard_output(note='continuing'); {script}"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | options.pop("environment", {})
    command = ["sh", "-c", f'"$0" -c "$1" {options.pop("shell", "")}', sys.executable, code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_character_missing_in_the_encoding_is_escaped(encoding):
    result = shown(r"import sys; print('☃'); print('☃', file=sys.stderr)", environment={"PYTHONIOENCODING": encoding})
    assert (result.returncode, result.stdout, result.stderr) == (0, "\\u2603\n", "\\u2603\n")


@pytest.mark.slow
@pytest.mark.parametrize("shell", [">&-", "2>&-", ">&- 2>&-", ">/dev/full", "2>/dev/full", ">/dev/full 2>&1", "<&-"])
def test_closed_and_full_streams_do_not_end_the_program(shell):
    result = shown("import sys; print('text'); print('text', file=sys.stderr); sys.stdin.read()", shell=shell)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_rich_does_not_end_a_process_with_a_closed_pipe():
    writer = closed_pipe()
    code = """
from conf import console
console.guard_output()
from rich.console import Console
for _ in range(3):
    Console().print("a line")
console.check()
"""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, stdout=writer).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_loop_ends_a_command_cleanly(number):
    code = f"""
import os, signal, sys
from conf import console
console.hear_signals()
try:
    os.kill(os.getpid(), {int(number)})
finally:
    print("cleaned up", flush=True)
"""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (128 + number, "cleaned up\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("number", console.ENDING)
@pytest.mark.parametrize(
    "words", [[TRAIN], ["-m", "scripts.generate"], ["bin/inkling", "train"]], ids=["train", "generate", "inkling"]
)
def test_a_signal_while_modules_are_imported_ends_a_command_quietly(tmp_path, words, number):
    """A module that sends the signal replaces torch, which a command imports next."""
    (tmp_path / "torch.py").write_text(f"import os\nos.kill(os.getpid(), {int(number)})\n")
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/inkling").write_text("from scripts.main import main\nmain()\n")  # as pip writes it
    (tmp_path / "numpy.py").write_text((tmp_path / "torch.py").read_text())
    environment = os.environ | {"PYTHONPATH": path}
    result = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 128 + number, result.stderr
    assert result.stderr == ("\ninterrupted\n" if number == signal.SIGINT else "")
