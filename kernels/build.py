"""Builds the kernels, *.cpp, for this machine when they are first used, and loads them."""

import functools
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch


def loaded() -> bool:
    return hasattr(torch.ops.inkling, "attend")


def load(what: str, warn: Callable[[str], None] = warnings.warn) -> bool:
    """Loads the kernels for `what` ("training" or "generation"); returns False, with a warning, if that fails."""
    try:
        load_kernels(warn)
    except RuntimeError as error:
        warn(f"the kernels for {what} cannot be built, continuing without them, more slowly: {error}")
        return False
    return True


def has_compiler() -> bool:
    """Whether there is a C++ compiler that works: the one in CXX, or c++."""
    return _compiles(os.environ.get("CXX") or "c++")


@functools.cache
def _compiles(command: str) -> bool:
    options = ["-std=c++20", "-x", "c++", "-fsyntax-only", "-"]
    try:
        tried = subprocess.run([*shlex.split(command), *options], input=b"#include <cstdlib>\n", capture_output=True)
    except (OSError, ValueError):  # not found; unbalanced quotes in CXX
        return False
    return tried.returncode == 0


def load_kernels(say: Callable[[str], None] = warnings.warn):
    """Builds *.cpp for this machine unless there is an intact build, and loads it; RuntimeError if that fails.

    This takes a C++ compiler and some seconds, once. The library is kept in torch's folder for extensions
    (TORCH_EXTENSIONS_DIR). Its name holds a hash of its sources and flags, and one of its own bytes: a damaged library
    is detected and built again.
    """
    if loaded():
        return
    here = Path(__file__).parent
    sources = sorted(here.glob("*.cpp"))
    capability = torch.backends.cpu.get_cpu_capability()
    flags = ["-std=c++20", "-O3", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
    flags += ["-mavx2", "-mfma"] if capability.startswith("AVX") else []
    texts = [path.read_text(encoding="utf-8") for path in (*sources, *sorted(here.glob("*.h")))]
    made_of = f"{texts} {flags} {torch.__version__} {platform.system()} {platform.machine()}"
    name = f"inkling-{_digest(made_of.encode())}"
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    try:
        if not any(_load(library) for library in sorted(folder.glob(f"{name}-*.so"))):
            torch.ops.load_library(str(_build(sources, flags, folder, name, say)))
    except subprocess.CalledProcessError as error:
        reason = next((line for line in error.stderr.splitlines() if "error" in line), "the compiler failed")
        raise RuntimeError(reason) from error
    except (OSError, ValueError) as error:  # no compiler, a library that does not load
        raise RuntimeError(str(error)) from error

    @torch.library.register_fake("inkling::linear")
    def _(x, panels, scale, d_out):
        return x.new_empty(x.shape[0], d_out)

    @torch.library.register_fake("inkling::attend")
    def _(q, k, v, mask):
        return q.new_empty(q.shape)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _load(library: Path) -> bool:
    """Loads a library if its bytes match the hash in its name; returns whether it did."""
    try:
        intact = library.stem.endswith(_digest(library.read_bytes()))
        if intact:
            torch.ops.load_library(str(library))
        return intact
    except OSError:  # unreadable, or built on a machine with other system libraries
        return False


def _build(sources: list[Path], flags: list[str], folder: Path, name: str, say: Callable[[str], None]) -> Path:
    """Compiles the sources into a library, under a temporary name that is then renamed."""
    of_torch = Path(torch.__file__).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside = tempfile.TemporaryDirectory(dir=folder)
    except OSError as error:
        raise RuntimeError(f"{error}: TORCH_EXTENSIONS_DIR may name another folder") from error
    with beside as building:
        say("building the kernels for this machine, once")
        built = Path(building) / "built.so"
        compiler = [*shlex.split(os.environ.get("CXX") or "c++"), *flags, *map(str, sources), "-o", str(built)]
        places = [f"-I{of_torch / 'include'}", f"-L{of_torch / 'lib'}", "-ltorch_cpu"]
        subprocess.run([*compiler, *places], check=True, capture_output=True, text=True)
        with built.open("rb+") as file:
            content = file.read()
            os.fsync(file.fileno())
        return built.replace(folder / f"{name}-{_digest(content)}.so")
