"""Training with kernels, torch.compile and bf16 equals training with eager fp32 code."""

import pytest
import torch
from hardware import needs_compiler, needs_torch_compile
from miniature import final, rows, same

from training import engine

pytestmark = pytest.mark.slow

hardware = pytest.mark.hardware


@hardware
def test_rows_of_every_length_are_compiled_before_the_first_step(run, monkeypatch):
    shapes = []
    monkeypatch.setattr(
        engine,
        "compile_forward",
        lambda model, batches, *_, **__: shapes.append([b["tokens"].shape for b in batches]) or model,
    )
    run("whole", "compile=true", "seq_len_warmup=0.75", "stop_after=4")
    run("whole", "compile=true", "seq_len_warmup=0.75", "resume=auto")
    assert shapes == [[(8, 8), (4, 16)], [(4, 16), (2, 32)]]


@hardware
@needs_compiler
def test_training_with_kernels_equals_training_without_them(run):
    fp32 = ["model.dropout=0", "precision=fp32"]
    with_kernels, without = run("kernels", *fp32, "kernels=true"), run("torch", *fp32, "kernels=false")
    assert [final(one)[1]["choices"]["kernels"] for one in (with_kernels, without)] == [True, False]
    for a, b in zip(rows(with_kernels), rows(without), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


@hardware
@needs_torch_compile
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 1e-3)])
def test_compiled_training_equals_eager_training(run, precision, tolerance):
    """In bf16 compiled code rounds less often, since it fuses operations."""
    same = ["model.dropout=0", f"precision={precision}", "kernels=false", "attention=fused"]
    eager, compiled = run("eager", *same, "compile=false"), run("compiled", *same, "compile=true")
    assert [final(one)[1]["choices"]["compile"] for one in (eager, compiled)] == [False, True]
    for a, b in zip(rows(eager), rows(compiled), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=tolerance)


@hardware
def test_bf16_learns_what_fp32_learns(run):
    """On any CPU; weights stay fp32, only the results of matrix products are rounded."""
    wide, half = (run(name, "model.dropout=0", f"precision={name}", "kernels=false") for name in ("fp32", "bf16"))
    assert all(weight.dtype == torch.float32 for weight in final(half)[0].values())
    assert rows(wide) != rows(half)
    for a, b in zip(rows(wide), rows(half), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=5e-3)


@hardware
def test_without_a_compiler_a_run_chooses_neither_kernels_nor_compile(run, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "false")
    folder = run("one", "precision=fp32", "stop_after=1")
    assert final(folder)[1]["choices"] | {"kernels": False, "compile": False} == final(folder)[1]["choices"]


@hardware
def test_if_compiling_fails_training_continues_uncompiled(run, monkeypatch, capsys):
    def refuse(*_, **__):
        raise RuntimeError("no compiler here\nand more lines")

    eager = run("eager", "kernels=false", "attention=fused")
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: refuse)
    compiled = run("compiled", "compile=true", "attention=fused")
    assert "torch.compile failed, continuing without it: RuntimeError: no compiler here\n" in capsys.readouterr().out
    assert same(final(eager)[0], final(compiled)[0])
    assert final(compiled)[1]["choices"]["compile"] is False
