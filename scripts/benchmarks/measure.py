"""Fair comparisons: measurements in turn, medians, and the limits of the machine."""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from itertools import accumulate

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from torch.profiler import ProfilerActivity, profile

from conf.entry import REPOSITORY
from conf.parsing import parse
from conf.scripts import Prepare
from data.corpus import Corpus
from data.prepare import prepare


def alternate(rounds: int, **contestants: Callable[[], float]) -> dict[str, list[float]]:
    """The measurements of each contestant, taken in turn, so that noise affects all of them."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(rounds):
        for name, measure in contestants.items():
            found[name].append(measure())
            print(f"  round {i + 1} of {rounds}  {name:<32} {found[name][-1]:8.1f}", file=sys.stderr)
    return found


def table(title: str, unit: str, found: dict[str, list[float]], against: str | None = None, digits: int = 1) -> dict:
    """Prints the medians, and their ratios to the contestant `against`."""
    medians = {name: statistics.median(values) for name, values in found.items()}
    print(f"{title}, {unit}, median (lowest to highest)")
    for name, value in medians.items():
        ratio = f"   {value / medians[against]:.2f} times {against}" if against not in (None, name) else ""
        print(
            f"  {name:<32} {value:8.{digits}f} ({min(found[name]):.{digits}f} to {max(found[name]):.{digits}f}){ratio}"
        )
    return {"title": title, "unit": unit, "measured": found}


def synchronise(device: str):
    if device != "cpu":
        torch.cuda.synchronize()


def rate(work: Callable[[], object], size: float, device: str, times: int = 5) -> float:
    """size / 1e9 per second, in the fastest of several tries."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        synchronise(device)
        found.append(time.perf_counter() - began)
    return size / min(found) / 1e9


def product_rate(device: str, precision: str) -> float:
    """GFLOP/s of a product of large square matrices."""
    n = 1024 if device == "cpu" else 8192
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return rate(lambda: a @ b, 2 * n**3, device, times=10)


def copy_rate(device: str) -> float:
    """GB/s read and written while copying."""
    large = torch.ones(2**26, device=device)
    target = torch.empty_like(large)
    return rate(lambda: target.copy_(large), 2 * 4 * large.numel(), device)


def peak_memory(work: Callable[[], object], device: str) -> int:
    """The peak of the bytes that torch allocates during the work, beyond those before."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate((event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())), initial=0))


def prepared(source: str, tokenizer: str) -> tuple[Prepare, Corpus]:
    """The settings and the corpus of a choice of the group `data` and one of `tokenizer`."""
    if GlobalHydra.instance().is_initialized():  # from the entry point
        configs = contextlib.nullcontext()
    else:
        configs = initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3")
    with configs:
        cfg = parse(compose("prepare", overrides=[f"data={source}", f"tokenizer={tokenizer}"]), Prepare)
    return cfg, prepare(cfg.data, cfg.tokenizer)
