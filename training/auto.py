"""What `auto` means: a fixed rule for each choice, based on the hardware and the planned work, never on timing.

A run saves its choices, and a resumed run keeps them.
"""

import ctypes
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator
from torch import Tensor, nn

from data.config import Name
from kernels.build import has_compiler
from training import distributed

Flops = Annotated[float, Gt(0), Le(1e24)]


def _switch(value: bool | str) -> bool | str:
    if value not in (True, False, "auto"):
        raise ValueError(f"must be auto, true or false, got {value}")
    return value


def _rows(value: int | str) -> int | str:
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"must be auto or a number of rows, got {value}")
    return value


Switch = Annotated[bool | str, AfterValidator(_switch)]


@dataclass(frozen=True)
class DeviceSpec:
    """A device's data sheet and price, for estimates and for the MFU of a run on it."""

    name: Name
    kind: Literal["gpu", "cpu"]
    flops_bf16: Flops | None
    flops_fp32: Flops
    memory: Annotated[float, Gt(0), Le(1e18)]
    price_per_hour: Annotated[float, Ge(0), Le(1e9)] | None

    def flops(self, precision: str) -> float:
        """Peak FLOP/s in `precision`; in fp32 if the device has no units for it."""
        return self.flops_fp32 if precision == "fp32" or self.flops_bf16 is None else self.flops_bf16


@dataclass(frozen=True)
class EngineConfig:
    """How a model is computed: see engine.py, and `choose` for what `auto` means."""

    device: Name
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    kernels: Switch
    compile: Switch
    attention: Literal["auto", "fused", "math"]
    micro_batch: Annotated[int | str, AfterValidator(_rows)]
    deterministic: bool
    parallel: Literal["ddp", "fsdp"]
    activation_checkpointing: bool
    device_spec: DeviceSpec


COMPILE_FLOPS_CPU = 4e12  # about two minutes on two cores; compiling takes about one
COMPILE_FLOPS_GPU = 1e16  # about a minute


def choose_device(device: str, deterministic: bool = False) -> torch.device:
    """auto: a CUDA GPU if torch sees one, else the CPU. `deterministic`: use kernels that repeat bit for bit.

    On a CPU they always do: it costs nothing there, and compiled code needs it.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        chosen = torch.device(device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
        torch.zeros(1, device=chosen).item()  # "meta" fails here
    except Exception as error:  # of torch, of many kinds
        reason = str(error).splitlines()[0].split(". ")[0]
        raise ValueError(f"device {device} cannot be used here: {reason[:150]}") from error
    if chosen.type == "cuda":  # fp32 matrix products in TF32
        torch.set_float32_matmul_precision("high")
    if deterministic or "torch._inductor" in sys.modules:
        torch.use_deterministic_algorithms(deterministic or chosen.type == "cpu")
    else:  # the same without importing the compiler, which takes a second, to set its flag
        torch.set_deterministic_debug_mode("error" if chosen.type == "cpu" else "default")
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs a tenth of a small step, for memory unread
    return chosen


def keep_freed_memory():
    """Lets the C library keep memory that a step frees, on a CPU: fresh pages cost a twentieth of a small step."""
    with suppress(OSError, AttributeError):  # not glibc, whose malloc.h defines these numbers
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: blocks up to 32 MiB come from the heap
        libc.mallopt(-1, 2**29)  # M_TRIM_THRESHOLD: the top of the heap is returned only above 512 MiB


def peak_flops(device: torch.device, spec: DeviceSpec, precision: str) -> float | None:
    """The peak FLOP/s of this GPU if device_spec describes it; None for any other device."""
    if device.type != "cuda" or spec.name.split("_")[0] not in torch.cuda.get_device_name(device).lower():
        return None
    return spec.flops(precision)


@dataclass
class Choices:
    """What `auto` was resolved to; saved with the run, since a resumed run keeps it."""

    precision: str
    kernels: bool
    compile: bool
    attention: str
    micro_batch: int


def choose(
    asked: EngineConfig,
    *,
    device: torch.device,
    rows: int,
    seq_len: int,
    vocab_size: int,
    flops: float,
    soft_cap: float | None,
    saved: dict[str, Any],
) -> Choices:
    """Each setting as given; where it is auto, as `saved` by the run that is resumed, else by its rule.

    rows: in a batch; flops: of the complete run; soft_cap: the model's.
    """
    names = [one.name for one in fields(Choices)]
    given = {name: getattr(asked, name) for name in names}
    c = Choices(**{name: saved.get(name, "auto") if value == "auto" else value for name, value in given.items()})
    if c.precision == "auto":
        c.precision = "fp32" if asked.kernels is True and device.type == "cpu" else choose_precision(device)
    if c.kernels == "auto":
        c.kernels = _kernels(device, c.precision, c.compile)
    if c.compile == "auto":
        c.compile = not c.kernels and _compile(device, flops)
    if c.attention == "auto":
        c.attention = choose_attention(device, c.compile, c.precision, seq_len, soft_cap)
    if c.micro_batch == "auto" or rows % c.micro_batch:
        c.micro_batch = _micro_batch(device, rows, seq_len, vocab_size)
    if asked.kernels is True and (device.type, c.precision, c.compile) != ("cpu", "fp32", False):
        got = f"device {device.type}, precision {c.precision}, compile {str(c.compile).lower()}"
        raise ValueError(f"kernels=true needs a CPU, precision=fp32 and compile=false, got {got}: give kernels=auto")
    if c.precision == "fp16" and device.type == "cpu":
        raise ValueError("precision=fp16 needs a GPU, got device cpu: give bf16 or fp32")
    return c


def choose_precision(device: torch.device) -> str:
    """bf16 if the hardware has units for it, else fp16 on CUDA, else fp32.

    On a CPU without AMX or AVX-512 BF16, bf16 matrix products are far slower than fp32 ones.
    """
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if device.type == "cpu":
        can: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # absent from torch 2.11
        return "bf16" if can.get("amx_bf16") or can.get("avx512_bf16") else "fp32"
    return "fp32"


def _kernels(device: torch.device, precision: str, compile: bool | str) -> bool:
    """On a CPU in fp32 with a C++ compiler: as fast as torch.compile, without its minute of compiling."""
    return device.type == "cpu" and precision == "fp32" and compile is not True and has_compiler()


def _compile(device: torch.device, flops: float) -> bool:
    """If the run is long enough to earn the compilation back; on a CPU it also takes a C++ compiler."""
    if device.type == "cuda":
        return flops > COMPILE_FLOPS_GPU
    return device.type == "cpu" and flops > COMPILE_FLOPS_CPU and has_compiler()


def choose_attention(device: torch.device, compiled: bool, precision: str, seq_len: int, soft_cap: float | None) -> str:
    """torch's fused kernel; "math" for a soft cap, and where it is faster: short rows, compiled in bf16 on a CPU."""
    if soft_cap is not None:
        return "math"
    return "math" if device.type == "cpu" and compiled and precision == "bf16" and seq_len <= 512 else "fused"


def _micro_batch(device: torch.device, rows: int, seq_len: int, vocab_size: int) -> int:
    """The most rows that divide the batch and keep one forward's fp32 logits within a bound."""
    bound = 2**32 if device.type == "cuda" else 2**28  # bytes
    return max(n for n in divisors(rows) if n == 1 or 4 * n * seq_len * vocab_size <= bound)


def divisors(n: int) -> list[int]:
    """All divisors of n, in ascending order."""
    low = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*low, *(n // i for i in low)})


def largest_that_fits(model: nn.Module, batch: dict[str, Tensor], autocast: torch.autocast) -> int:
    """Finds by trial the most rows, dividing the batch's, whose forward and backward fit into the GPU's memory.

    Leaves room for accumulated gradients and AdamW's moments. Leaves no gradient and draws no random number. ValueError
    if not even one row fits.
    """
    rows = len(batch["tokens"])
    n_bytes = 12 * sum(p.numel() for p in model.parameters())
    for n in reversed(divisors(rows)):
        try:
            with torch.random.fork_rng([batch["tokens"].device] if batch["tokens"].is_cuda else []):
                room = torch.empty(n_bytes, dtype=torch.int8, device=batch["tokens"].device)
                with autocast:
                    loss, _ = model(**{name: rows[:n] for name, rows in batch.items()})
                loss.backward()
                del room
            fits = n
            break
        except torch.OutOfMemoryError:
            fits = 0
        finally:
            loss = room = None  # noqa: F841  their memory
            model.zero_grad(set_to_none=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    fits = int(min(distributed.gather(fits)[0]))
    if fits == 0:
        raise ValueError(
            "not even micro_batch=1 fits into the GPU's memory: give a smaller model or seq_len, or parallel=fsdp"
        )
    return fits


@contextmanager
def explain_oom(model: nn.Module, batch: dict[str, Tensor], micro_batch: int, autocast) -> Iterator[None]:
    """Wraps a step: turns running out of GPU memory into a ValueError that names the micro_batch that would fit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        model.zero_grad(set_to_none=True)
        hint = "a smaller micro_batch, or parallel=fsdp, would need less"
        if distributed.size() == 1 and micro_batch > 1:
            half = {name: rows[: micro_batch // 2] for name, rows in batch.items()}
            hint = f"micro_batch={largest_that_fits(model, half, autocast)} would fit"
        raise ValueError(f"micro_batch {micro_batch} does not fit into the GPU's memory: {hint}") from error


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context in which matrix products run in `precision`; weights stay fp32."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return torch.autocast(device.type, dtype, enabled=dtype is not None)
