"""The processor that tests simulate: `pytest --hardware=bf16` (or fp32) simulates a CPU with (or without) bf16 units.

Only the capabilities that torch reports are replaced, hence what `auto` chooses: any CPU computes in bf16, if slowly.
Processes that tests start read the choice from an environment variable. CXX=false hides the compiler, and
ATEN_CPU_CAPABILITY=avx2 or default hides vector units.
"""

import os
import sysconfig
from pathlib import Path

import pytest
import torch

from kernels.build import has_compiler

PLAYED = "INKLING_TESTS_HARDWARE"
KINDS = ("bf16", "fp32", "other", "native")  # other: the opposite of the native one

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")
can_compile = has_compiler() and Path(sysconfig.get_path("include"), "Python.h").exists()
needs_torch_compile = pytest.mark.skipif(not can_compile, reason="torch.compile needs a C++ compiler and Python.h")


def play():
    """Simulates the processor in this process; one call is enough."""
    kind = os.environ.get(PLAYED, "native")
    if kind == "native":
        return
    real = getattr(torch.cpu, "get_capabilities", dict)()
    units = kind == "bf16" or (kind == "other" and not (real.get("amx_bf16") or real.get("avx512_bf16")))
    torch.cpu.get_capabilities = lambda: {**real, "amx_bf16": False, "avx512_bf16": units}
