"""`python ARGUMENTS` for tests: each in a process of its own, forked from one that has imported all that takes long.

So the seconds of the imports are paid once a worker. What is read while importing is that of the first test's
environment. Signals, ranks, and how modules are found are tested in processes that begin from nothing.
"""

import atexit
import multiprocessing
import os
import runpy
import socket
import sys
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from tempfile import TemporaryDirectory
from unittest import mock

import hardware
import torch

from conf.entry import REPOSITORY

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train", "torch._inductor", "wandb"])


def command(
    *arguments: str, cwd: str | Path = ".", timeout: float = 200, ranks: int = 1, **environment: str
) -> CompletedProcess:
    """As subprocess.run([sys.executable, *arguments], capture_output=True, text=True) for FILE ... and -m MODULE ...

    With `ranks` as torchrun starts so many; the exit code is that of rank 0, or else of one that failed.
    """
    with TemporaryDirectory() as folder:
        outputs = Path(folder, "stdout"), Path(folder, "stderr")
        for path in outputs:
            path.touch()
        what = arguments, os.path.abspath(cwd), os.environ | environment, outputs, ranks
        process = FORKS.Process(target=_be, args=what)
        with mock.patch.dict(os.environ, PYTHONPATH=str(REPOSITORY)):  # for the first, which makes the server
            process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutExpired(arguments, timeout, *(path.read_text() for path in outputs))
        return CompletedProcess(arguments, process.exitcode, *(path.read_text() for path in outputs))


def _be(arguments: tuple[str, ...], folder: str, environment: dict[str, str], outputs: tuple[Path, Path], ranks: int):
    """Becomes that command."""
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    assert Path(sys.modules["train"].__file__).parent == REPOSITORY  # of this checkout, and preloaded
    hardware.play()
    atexit._clear()
    others = _fork_ranks(ranks) if ranks > 1 else []
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
    codes = [os.waitpid(other, 0)[1] for other in others]
    if any(codes):
        sys.exit("another rank has failed")


def _fork_ranks(ranks: int) -> list[int]:
    """One process becomes rank 0 and all others -> those that are to be waited for: on rank 0 all others."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    rank, others = 0, []
    while rank == 0 and len(others) < ranks - 1:
        other = os.fork()
        rank, others = (0, [*others, other]) if other else (len(others) + 1, [])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    return others
