import os
import subprocess
import sys

import pytest
import torch

from conf.entry import REPOSITORY
from training import auto
from training.auto import DeviceSpec, EngineConfig

pytestmark = pytest.mark.hardware

ASKED = {"precision": "auto", "kernels": False, "compile": "auto", "attention": "auto", "micro_batch": "auto"}
WORK = {"rows": 32, "seq_len": 128, "vocab_size": 4096, "flops": 1e13, "soft_cap": None, "saved": {}}


SPEC = DeviceSpec("h100", "gpu", flops_bf16=None, flops_fp32=1e12, memory=1e9, price_per_hour=None)
OTHERS = {"deterministic": False, "parallel": "ddp", "activation_checkpointing": False, "device_spec": SPEC}


def choose(device="cpu", **changes):
    asked = {name: changes.pop(name, value) for name, value in ASKED.items()}
    config = EngineConfig(device, **asked, **OTHERS)
    return auto.choose(config, **{**WORK, "device": torch.device(device), **changes})


@pytest.mark.parametrize(
    ("units", "precision"), [({}, "fp32"), ({"amx_bf16": True}, "bf16"), ({"avx512_bf16": True}, "bf16")]
)
def test_a_cpu_uses_bf16_only_if_it_has_bf16_units(monkeypatch, units, precision):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units, raising=False)
    assert choose().precision == precision


def test_a_cpu_of_unknown_capabilities_uses_fp32(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert choose().precision == "fp32"


def test_the_precision_decides_between_kernels_and_compile(monkeypatch):
    """With a C++ compiler: kernels on a CPU without bf16 units; torch.compile on one with them, if the run is long."""
    monkeypatch.setattr(auto, "has_compiler", lambda: True)
    for units, kernels, compile in (({}, True, False), ({"amx_bf16": True}, False, True)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda units=units: units, raising=False)
        for flops in (1e9, 1e15):
            choices = choose(kernels="auto", flops=flops)
            assert (choices.kernels, choices.compile) == (kernels, compile and flops > 1e9)


def test_short_runs_are_not_compiled(monkeypatch):
    monkeypatch.setattr(auto, "has_compiler", lambda: True)
    assert choose(precision="fp32", flops=1e15, kernels="auto").compile is False  # kernels instead
    assert choose(flops=1e9).compile is False
    assert choose(flops=1e15).compile is True
    monkeypatch.setattr(auto, "has_compiler", lambda: False)
    assert choose(flops=1e15).compile is False


def test_kernels_are_for_fp32_on_a_cpu_with_a_compiler(monkeypatch):
    monkeypatch.setattr(auto, "has_compiler", lambda: True)
    assert choose(precision="fp32", kernels="auto").kernels is True
    assert choose(precision="bf16", kernels="auto").kernels is False
    assert choose(precision="fp32", kernels="auto", compile=True).kernels is False
    assert choose(precision="fp32", kernels="auto", device="cuda").kernels is False
    monkeypatch.setattr(auto, "has_compiler", lambda: False)
    assert choose(precision="fp32", kernels="auto").kernels is False


def test_kernels_that_would_do_nothing_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    chosen = choose(kernels=True)
    assert chosen.kernels is True and chosen.precision == "fp32" and chosen.compile is False
    for changes in ({"precision": "bf16"}, {"compile": True}, {"device": "cuda", "precision": "fp32"}):
        with pytest.raises(ValueError, match="kernels=true needs a CPU, precision=fp32 and compile=false, got"):
            choose(kernels=True, **changes)


@pytest.mark.parametrize("device", ["meta", "mkldnn", "privateuseone", "nope", "cuda:999999999999"])
def test_a_device_that_cannot_compute_is_refused_in_one_short_line(device):
    with pytest.raises(ValueError, match=f"device {device} cannot be used here: ") as refused:
        auto.choose_device(device)
    assert len(str(refused.value)) < 220 and "\n" not in str(refused.value)


def test_the_micro_batch_divides_a_batch_of_any_size():
    for n in range(1, 200):
        assert auto.divisors(n) == [i for i in range(1, n + 1) if n % i == 0]
    assert choose(rows=10**12).micro_batch == 128  # rows of 128 tokens, with 4,096 fp32 logits each, fill 2^28 bytes


def test_what_was_given_or_saved_is_kept():
    assert choose(precision="bf16", compile=True, attention="math", micro_batch=8) == auto.Choices(
        precision="bf16", kernels=False, compile=True, attention="math", micro_batch=8
    )
    saved = {"precision": "bf16", "kernels": False, "compile": True, "attention": "math", "micro_batch": 2}
    assert choose(saved=saved) == auto.Choices(**saved)
    assert choose(saved=saved, attention="fused").attention == "fused"


def test_attention_is_math_only_where_that_is_faster():
    assert choose(compile=True, precision="bf16").attention == "math"
    for changes in ({"compile": False}, {"precision": "fp32"}, {"seq_len": 1024}):
        assert choose(**{"compile": True, "precision": "bf16", **changes}).attention == "fused"


def test_a_soft_cap_needs_attention_math():
    assert choose(soft_cap=30.0).attention == "math"


def test_micro_batches_divide_the_batch_and_bound_the_logits():
    for rows in (1, 7, 12, 32):
        for vocab_size in (256, 50_000, 10**9):
            micro = choose(rows=rows, vocab_size=vocab_size).micro_batch
            assert rows % micro == 0
            assert micro == 1 or 4 * micro * 128 * vocab_size <= 2**28


def test_what_a_device_cannot_do_is_refused():
    with pytest.raises(ValueError, match="fp16 needs a GPU"):
        choose(precision="fp16")
    with pytest.raises(ValueError, match="device nonsense"):
        auto.choose_device("nonsense")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device cuda"):
            auto.choose_device("cuda")


@pytest.mark.slow
def test_a_cpu_is_deterministic_and_the_compiler_is_not_imported_for_it():
    code = """
import sys, torch
from training.auto import choose_device
choose_device("cpu")
assert torch.are_deterministic_algorithms_enabled() and "torch._inductor" not in sys.modules
choose_device("cpu", deterministic=True)
assert torch._inductor.config.deterministic
"""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
