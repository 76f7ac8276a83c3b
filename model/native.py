"""The kernels of this folder, *.cpp: built for this machine when they are first wanted, and loaded."""

import hashlib
import os
import shlex
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch


def kernels_loaded() -> bool:
    return hasattr(torch.ops.inkling, "attend")


def load_kernels(say: Callable[[str], None] = warnings.warn):
    """Builds *.cpp for this machine when there is no build of them yet; RuntimeError where that fails.

    Takes a C++ compiler and some seconds, once: the result stays where torch keeps extensions (TORCH_EXTENSIONS_DIR),
    under a name made of all that it is made of.
    """
    if kernels_loaded():
        return
    here, of_torch = Path(__file__).parent, Path(torch.__file__).parent
    sources = sorted(here.glob("*.cpp"))
    capability = torch.backends.cpu.get_cpu_capability()
    flags = ["-std=c++20", "-O3", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
    flags += ["-mavx2", "-mfma"] if capability.startswith("AVX") else []
    texts = [path.read_text(encoding="utf-8") for path in (*sources, *sorted(here.glob("*.h")))]
    made_of = f"{texts} {flags} {torch.__version__}"
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    library = folder / f"inkling-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    try:
        if not library.exists():
            say("building the kernels for this machine, once")
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as building:  # beside, then renamed: whole or not at all
                built = Path(building) / library.name
                compiler = [*shlex.split(os.environ.get("CXX") or "c++"), *flags, *map(str, sources), "-o", str(built)]
                places = [f"-I{of_torch / 'include'}", f"-L{of_torch / 'lib'}", "-ltorch_cpu"]
                subprocess.run([*compiler, *places], check=True, capture_output=True, text=True)
                built.replace(library)
        torch.ops.load_library(str(library))
    except subprocess.CalledProcessError as error:
        reason = next((line for line in error.stderr.splitlines() if "error" in line), "the compiler failed")
        raise RuntimeError(reason) from error
    except OSError as error:  # no compiler, no place to write, a library that does not load
        raise RuntimeError(str(error)) from error

    @torch.library.register_fake("inkling::linear")
    def _(x, panels, scale, d_out):
        return x.new_empty(x.shape[0], d_out)

    @torch.library.register_fake("inkling::attend")
    def _(q, k, v, mask):
        return q.new_empty(q.shape)
