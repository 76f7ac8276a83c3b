"""The processor that tests run on, or that they play: `pytest --hardware=bf16` (or fp32) claims (or denies) bf16 units.

Only what torch says of the CPU is played, hence what `auto` chooses: any CPU computes in bf16, if slowly. It
travels to processes that tests start in an environment variable. The compiler can be taken away by CXX=false, vector
units by ATEN_CPU_CAPABILITY=avx2 or default.
"""

import os
import sysconfig
from pathlib import Path

import pytest
import torch

from kernels.build import has_compiler

PLAYED = "INKLING_TESTS_HARDWARE"
KINDS = ("bf16", "fp32", "other", "native")  # other: than the native one

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")
can_compile = has_compiler() and Path(sysconfig.get_path("include"), "Python.h").exists()
needs_torch_compile = pytest.mark.skipif(not can_compile, reason="torch.compile needs a C++ compiler and Python.h")


def play():
    """In this process; once is enough."""
    kind = os.environ.get(PLAYED, "native")
    if kind == "native":
        return
    real = getattr(torch.cpu, "get_capabilities", dict)()
    units = kind == "bf16" or (kind == "other" and not (real.get("amx_bf16") or real.get("avx512_bf16")))
    torch.cpu.get_capabilities = lambda: {**real, "amx_bf16": False, "avx512_bf16": units}
