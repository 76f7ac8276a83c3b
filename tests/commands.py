"""`python ARGUMENTS` for tests: each in its own process, forked from one that has already imported the slow modules.

So the imports take their seconds only once per worker. Environment variables that are read during imports have the
values of the first test. Signals, ranks and the search for modules are tested in new Python processes.
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

    With `ranks` above 1, starts that many ranks as torchrun does; the exit code is rank 0's, or 1 if another failed.
    """
    with TemporaryDirectory() as folder:
        outputs = Path(folder, "stdout"), Path(folder, "stderr")
        for path in outputs:
            path.touch()
        values = arguments, os.path.abspath(cwd), os.environ | environment, outputs, ranks
        process = FORKS.Process(target=_run, args=values)
        with mock.patch.dict(os.environ, PYTHONPATH=str(REPOSITORY)):  # for the first call, which starts the server
            process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutExpired(arguments, timeout, *(path.read_text() for path in outputs))
        return CompletedProcess(arguments, process.exitcode, *(path.read_text() for path in outputs))


def _run(arguments: tuple[str, ...], folder: str, environment: dict[str, str], outputs: tuple[Path, Path], ranks: int):
    """Runs the command in this process."""
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
    """Forks this process into ranks. Returns the process ids to wait for: those of all other ranks on rank 0."""
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
