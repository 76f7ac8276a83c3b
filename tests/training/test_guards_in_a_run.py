"""Non-finite numbers and spikes in a run, noticed at once or some steps later."""

import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from hardware import needs_torch_compile
from miniature import REMEMBERED, at_step, equal, final, rows, same
from reads import noting

import train
from training import checkpoint, engine
from training import step as one_step

pytestmark = pytest.mark.slow

hardware = pytest.mark.hardware


def break_gradient(forward, total):
    next(forward.parameters()).grad.view(-1)[0] = math.nan
    return total


SELDOM = ["every.log=8", "every.evaluate=8", "every.sample=8"]  # the host looks as rarely as on a GPU


@pytest.fixture(params=[1, 16])
def ahead(request, monkeypatch):
    """How many steps the host may run ahead of the device."""
    monkeypatch.setattr(engine.Engine, "steps_ahead", request.param)


@hardware
def test_a_non_finite_loss_ends_the_run_before_it_reaches_the_weights(run):
    with pytest.raises(ValueError, match=r"the loss of step 2 is .*: first not finite: the .*; step 1 is saved: try"):
        run("hot", "optimizer=adamw", "optimizer.lr=1e30", "optimizer.grad_clip=1e30")
    (path,) = Path("runs/hot").glob("nonfinite_*.json")
    found = json.loads(path.read_text())
    assert found["step"] == 1 and len(found["texts"]) == 4 and found["texts"][0] in Path("words.txt").read_text()
    assert all(weight.isfinite().all() for weight in final(Path("runs/hot"))[0].values())


@pytest.mark.parametrize("step", [1, 4])
def test_a_batch_with_a_non_finite_gradient_changes_nothing(run, monkeypatch, step):
    plain = ["on_nonfinite=skip"]
    without = run("without", *plain, f"skip_batches=[{step - 1}]")
    with monkeypatch.context() as patch:
        at_step(patch, step, break_gradient)
        skipping = run("skipping", *plain)
    assert same(final(without)[0], final(skipping)[0]) and same(
        final(without)[1]["optimizer"], final(skipping)[1]["optimizer"]
    )
    assert [row["skipped"] for row in rows(skipping)] == [int(row["step"] >= step) for row in rows(skipping)]
    assert all(("loss" in row) == (row["step"] != step) for row in rows(skipping))
    assert same(rows(without), rows(skipping))


def test_a_run_that_a_non_finite_batch_ended_resumes_without_it(run, monkeypatch):
    without = run("without", "skip_batches=[4]")
    at_step(monkeypatch, 5, break_gradient, times=2)
    with pytest.raises(ValueError, match=r"gradient norm nan: could not be reproduced .*step 4 is saved"):
        run("stopping")
    resumed = run("stopping", "resume=auto", "on_nonfinite=skip")
    assert rows(without) == rows(resumed) and same(final(without)[0], final(resumed)[0])


def test_too_many_non_finite_steps_in_a_row_end_the_run(run, monkeypatch):
    at_step(monkeypatch, 3, break_gradient, times=3)
    with pytest.raises(ValueError, match=r"the loss of step 5 .*step 4 is saved"):
        run("one", "on_nonfinite=skip", "max_skips=2")


@hardware
@pytest.mark.parametrize(("step", "every"), [(7, 1), (5, 100)])
def test_after_a_spike_a_run_rolls_back_and_ends_as_without_that_batch(run, monkeypatch, step, every):
    """With dropout; it rolls back to an earlier checkpoint or to the start."""
    options = ["spike_window=3", "spike_sigmas=50", f"every.checkpoint={every}"]
    without = run("without", *options, f"skip_batches=[{step - 1}]")
    at_step(monkeypatch, step, lambda _, total: total * 10)
    back = run("back", *options, "on_spike=rollback")
    assert same(final(without)[0], final(back)[0])
    assert [row["step"] for row in rows(back)] == [row["step"] for row in rows(without)]
    assert final(back)[1]["guard"]["skip"] == [step - 1]
    assert final(back)[1]["guard"]["spikes"] == rows(back)[-1]["spikes"] == 1
    for name in ("lowest", "lowest_step", "waited"):
        assert final(back)[1]["guard"][name] == final(without)[1]["guard"][name]


@pytest.mark.parametrize("every", [1, 100])
def test_repeated_spikes_end_the_run_where_it_can_resume(run, monkeypatch, every):
    """However often it saves. Every loss is a spike from step 5 on, as if the text had changed there."""
    options = ["spike_window=3", "spike_sigmas=10", f"every.checkpoint={every}", "steps=12"]
    without = run("without", *options, "skip_batches=[4,5,6]")
    steps, lr_factor, gradients = [], train.lr_factor, one_step.compute_gradients
    with monkeypatch.context() as patch:
        patch.setattr(train, "lr_factor", lambda step, *a, **k: (steps.append(step), lr_factor(step, *a, **k))[1])
        patch.setattr(one_step, "compute_gradients", lambda *a, **k: gradients(*a, **k) * 100 ** (steps[-1] >= 4))
        with pytest.raises(ValueError, match="step 8 jumped to .*, after 3 rollbacks .*; step 7 is saved: try"):
            run("jumping", *options, "on_spike=rollback", "max_skips=3")
    back = run("jumping", *options, "resume=auto", "on_spike=rollback", "max_skips=3")
    assert same(final(without)[0], final(back)[0]) and final(back)[1]["guard"]["rollbacks"] == 0
    assert final(back)[1]["guard"]["spikes"] == 3


def test_a_run_resumed_into_a_new_folder_can_roll_back_to_its_start(run, monkeypatch):
    first = run("first", "stop_after=3")
    options = [f"resume={first}", "every.checkpoint=100", "spike_window=2", "spike_sigmas=50"]
    without = run("without", *options, "skip_batches=[4]")
    at_step(monkeypatch, 2, lambda _, total: total * 10)
    back = run("back", *options, "on_spike=rollback")
    assert same(final(without)[0], final(back)[0])


def test_without_a_checkpoint_to_roll_back_to_the_batch_is_skipped(run, monkeypatch, capsys):
    options = ["spike_window=3", "spike_sigmas=50"]
    without = run("without", *options, "skip_batches=[4]")

    def spoil(_, total):
        checkpoint.steps(Path("runs/back"))[0].joinpath("training.pt").write_bytes(b"")
        return total * 10

    at_step(monkeypatch, 5, spoil)
    back = run("back", *options, "on_spike=rollback")
    assert "1 there, none valid: only the batch is skipped" in capsys.readouterr().out
    assert same(final(without)[0], final(back)[0])


@hardware
@pytest.mark.parametrize("stop", [3, 5])
def test_an_fp16_overflow_skips_the_step_and_the_scale_is_saved(run, monkeypatch, stop):
    """In fp32 here: an overflow is counted and halves the loss scale, and resuming changes nothing."""
    real = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: real(device, enabled=True))

    def overflow(forward, total):
        next(forward.parameters()).grad.view(-1)[0] = math.inf
        return total

    def part(name: str, at: int, *overrides: str) -> Path:
        with monkeypatch.context() as patch:
            at_step(patch, at, overflow)
            return run(name, *overrides)

    whole = part("whole", 4)
    assert [row["skipped"] for row in rows(whole)] == [0, 0, 1, 1, 1]
    assert "loss" not in rows(whole)[2] and "loss" in rows(whole)[3]
    assert final(whole)[1]["scaler"]["scale"] == 2.0**15
    part("parts", 4, f"stop_after={stop}")
    assert equal(whole, part("parts", 4 - stop, "resume=auto"))


def test_spikes_are_counted(run, monkeypatch):
    at_step(monkeypatch, 5, lambda _, total: total * 10)
    assert [row["spikes"] for row in rows(run("one", "spike_window=3", "spike_sigmas=50"))] == [0, 0, 0, 1, 1]


def test_a_bad_step_that_is_noticed_late_changes_nothing(run, monkeypatch, ahead):
    without = run("without", *SELDOM, "skip_batches=[2]")
    with monkeypatch.context() as patch:
        at_step(patch, 3, break_gradient)
        skipping = run("skipping", *SELDOM, "on_nonfinite=skip")
    assert rows(without) == rows(skipping) and same(final(without)[0], final(skipping)[0])
    assert same(final(without)[1]["optimizer"], final(skipping)[1]["optimizer"])


def test_a_run_that_stops_late_is_saved_as_it_was_before_the_bad_step(run, monkeypatch, ahead):
    before = run("before", *SELDOM, "stop_after=2")
    with monkeypatch.context() as patch:
        at_step(patch, 3, break_gradient)
        with pytest.raises(ValueError, match=r"the loss of step 3 .*step 2 is saved"):
            run("stopping", *SELDOM)
    (weights, state), (others, other_state) = final(before), final(Path("runs/stopping"))
    for memory in (state, other_state):
        memory["optimizer"] = memory["optimizer"]["state"]  # lr is set in every step
    assert same(weights, others) and all(same(state[name], other_state[name]) for name in REMEMBERED)


def test_a_spike_that_is_noticed_late_is_rolled_back(run, monkeypatch, ahead):
    options = ["spike_window=3", "spike_sigmas=50", "every.checkpoint=4", *SELDOM]
    without = run("without", *options, "skip_batches=[4]")
    with monkeypatch.context() as patch:
        at_step(patch, 5, lambda _, total: total * 10)
        back = run("back", *options, "on_spike=rollback")
    assert same(final(without)[0], final(back)[0]) and final(back)[1]["guard"]["skip"] == [4]


def test_a_signal_is_handled_while_the_device_is_behind(run, monkeypatch, ahead):
    whole = run("whole", *SELDOM)
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda _, total: os.kill(os.getpid(), signal.SIGTERM) or total)
        parts = run("parts", *SELDOM)
    assert run.code == 143 and checkpoint.find(parts, for_training=True).name == "step_00000003"
    assert equal(whole, run("parts", *SELDOM, "resume=auto"))


@needs_torch_compile
@pytest.mark.parametrize("how", ["adamw", "muon", "fp16", "compiled"])
def test_a_steady_step_reads_nothing_back_from_the_device(run, monkeypatch, how):
    """On a GPU each read would wait for the device. Only a step that reports may read."""
    if how == "fp16":
        real = torch.amp.GradScaler
        monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: real(device, enabled=True))
    monkeypatch.setattr(engine.Engine, "steps_ahead", 16)
    read = []
    monkeypatch.setattr(train, "train_step", noting(train.train_step, read))
    options = [f"optimizer={how if how in ('adamw', 'muon') else 'adamw'}", "kernels=false", "attention=fused"]
    run("one", *SELDOM, *options, f"compile={str(how == 'compiled').lower()}")
    assert read == [[]] * 8
    norm = one_step.gradient_norm
    monkeypatch.setattr(one_step, "gradient_norm", lambda *a: torch.tensor(norm(*a).item()))
    run("other", *SELDOM, *options, "compile=false")
    assert all(read[8:])
