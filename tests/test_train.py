"""Whole runs, in miniature."""

import json
import math
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from commands import command
from hardware import needs_compiler, needs_torch_compile
from reads import noting
from wandb_server import wandb_server

import train
from conf.entry import REPOSITORY
from conf.scripts import Prepare
from data.tokenizer import ByteTokenizer
from training import checkpoint, checkpoints, engine, evaluation, run_folder, tracking
from training import step as one_step
from training.evaluation import Evaluation
from training.state import TrainState

hardware = pytest.mark.hardware

SMALL = [
    "experiment=smoke",
    "model.dropout=0.1",
    "batch_tokens=128",
    "micro_batch=2",  # of 4 rows
    "steps=8",
    "every.log=2",
    "every.evaluate=3",
    "every.sample=4",
    "every.checkpoint=100",
    "data.paths=[words.txt]",
    "data.validation=[]",
    "sample.prompt='7 times'",
    "sample.tokens=8",
]


REMEMBERED = ["choices", *(one.name for one in fields(TrainState) if one.name not in ("step", "model", "gate"))]


@pytest.fixture
def run(settings, tmp_path):
    """Trains with SMALL and the given overrides; returns the run's folder, and keeps the exit code."""
    (tmp_path / "words.txt").write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(50)))

    def make(name: str, *overrides: str) -> Path:
        make.code = train.train(settings(*SMALL, *overrides), tmp_path / "runs" / name)
        return tmp_path / "runs" / name

    return make


def rows(run: Path) -> list[dict]:
    """metrics.jsonl without what a clock decides."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "clock"} for line in lines]


def final(run: Path) -> tuple[dict, dict]:
    folder = checkpoint.find(run, for_training=True)
    weights = checkpoint.load_file(folder / "model.safetensors")
    return weights, checkpoint.load_training(folder)


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@hardware
@pytest.mark.parametrize("stop", [1, 3, 4, 7])
def test_stopping_and_resuming_is_never_having_stopped(run, stop):
    """Bit for bit in weights, optimizer, random state and rows; with dropout, accumulation and an epoch's edge."""
    whole = run("whole")
    assert rows(whole)[-1]["epoch"] > 1
    parts = run("parts", f"stop_after={stop}")
    assert all(row["step"] <= stop for row in rows(parts))
    run("parts", "resume=auto")
    assert rows(parts) == rows(whole) and [row["step"] for row in rows(whole)] == [2, 3, 4, 6, 8]
    (weights, state), (resumed_weights, resumed_state) = final(whole), final(parts)
    assert same(weights, resumed_weights)
    for name in REMEMBERED:
        assert same(state[name], resumed_state[name]), name


@pytest.mark.parametrize("stop", [2, 3])
def test_rows_that_grow_are_resumed_and_a_step_up_is_no_jump(run, monkeypatch, stop):
    """Rows of 8, 16 and 32 tokens, before and behind the stop; what has seen none so long may lose more at first."""
    lengths, real = [], one_step.compute_gradients

    def watched(*arguments, **options):
        lengths.append(options["row_length"])
        real(*arguments, **options)
        return torch.tensor(128.0 * lengths[-1] * (1 + 0.01 * (len(lengths) % 2)))  # it jumps where rows grow

    monkeypatch.setattr(one_step, "compute_gradients", watched)
    growing = ["seq_len_warmup=0.75", "spike_window=2", "on_spike=rollback", "spike_sigmas=10", "every.log=1"]
    whole, parts = run("whole", *growing), run("parts", *growing, f"stop_after={stop}")
    assert lengths == [8] * 3 + [16] * 3 + [32] * 2 + lengths[:stop]
    run("parts", *growing, "resume=auto")
    assert rows(parts) == rows(whole) and same(final(parts)[0], final(whole)[0])
    assert rows(whole)[-1]["spikes"] == 0 and len(final(whole)[1]["guard"]["losses"]) == 2


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


def test_a_resumed_run_says_what_has_changed_and_follows_it(run, capsys):
    folder = run("one", "stop_after=4")
    run("one", "resume=auto", "optimizer.weight_decay=0.3", "optimizer.betas=[0.8,0.9]")
    said = capsys.readouterr().out
    assert "a setting has changed: optimizer.weight_decay was 0.0, is 0.3" in said
    group = final(folder)[1]["optimizer"]["param_groups"][0]
    assert group["weight_decay"] == 0.3 and list(group["betas"]) == [0.8, 0.9]


def half_as_long(state: dict):
    state.update({name: value[: len(value) // 2] for name, value in state.items() if value.ndim > 0})


@pytest.mark.parametrize("patience", [["patience=2"], []], ids=["patience", ""])
@pytest.mark.parametrize(
    "damage",
    [
        lambda saved: saved["rng"][0].update(cpu=torch.zeros(3)),
        lambda saved: saved["guard"].update(mood="good"),
        lambda saved: saved["optimizer"]["state"].update({1000: {"exp_avg": torch.zeros(2)}}),
        lambda saved: half_as_long(saved["optimizer"]["state"][0]),
        lambda saved: saved["optimizer"].update(param_groups=[{"name": "weights"}]),
    ],
    ids=["random state", "guard", "a weight too many", "half a moment", "groups"],
)
def test_what_training_cannot_go_on_with_is_one_line(run, monkeypatch, damage, patience):
    run("one", "stop_after=1")
    real = checkpoint.load_training

    def damaged(folder):
        saved = real(folder)
        damage(saved)
        return saved

    monkeypatch.setattr(checkpoint, "load_training", damaged)
    with pytest.raises(ValueError, match=r"the checkpoint's optimizer|training\.pt does not fit"):
        run("one", "resume=auto", *patience)


def test_another_architecture_or_tokenizer_is_not_resumed(run, tmp_path):
    run("one", "stop_after=4", "tokenizer=chars")
    with pytest.raises(ValueError, match=r"another model: give model.theta=10000.0$"):
        run("one", "resume=auto", "tokenizer=chars", "model.theta=3")
    words = tmp_path / "words.txt"
    words.write_text(words.read_text().replace("times", "tiMes"))
    for changed in (["tokenizer=chars"], ["tokenizer=bytes"]):
        with pytest.raises(ValueError, match="another text"):
            run("one", "resume=auto", *changed)


@pytest.mark.parametrize("what", ["gone", "newer", "moved", "given"])
def test_a_corpus_outlives_the_text_that_it_was_made_from(run, tmp_path, capsys, what):
    words, whole = tmp_path / "words.txt", run("whole", "every.checkpoint=4")
    parts = run("parts", "every.checkpoint=4", "stop_after=4")
    corpus = next(path.parent for path in (tmp_path / "corpora").glob("*/manifest.json"))
    capsys.readouterr()
    if what == "newer":
        os.utime(words, ns=(1, 1))
    elif what == "moved":
        words.rename(tmp_path / "moved.txt")
    else:
        words.unlink()
    told = {"moved": ["data.paths=[moved.txt]"], "given": ["data=corpus", f"data.paths=[{corpus}]"]}
    run("parts", "every.checkpoint=4", "resume=auto", *told.get(what, []))
    said = capsys.readouterr().out
    assert "preparing" not in said
    assert ("the text is not here any more: taking corpora/" in said) == (what == "gone")
    assert ("the text is as it was: taking corpora/" in said) == (what in ("newer", "moved"))
    assert rows(parts) == rows(whole) and same(final(parts)[0], final(whole)[0])


def test_a_run_knows_its_corpus_from_any_folder(run, tmp_path, monkeypatch):
    folder = run("one")
    (tmp_path / "words.txt").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    evaluated = command("-m", "scripts.evaluate", f"checkpoint={folder}", "device=cpu")
    assert evaluated.returncode == 0 and "held out in " in evaluated.stdout, evaluated.stderr
    shown = command("-m", "scripts.prepare", "show", f"run={folder}", "step=1")
    assert shown.returncode == 0 and "times" in shown.stdout, shown.stderr


def test_what_differs_is_said_at_once_before_any_text_and_can_be_pasted(run, settings, monkeypatch):
    """Also where null became a mapping, and where values need quotes of Hydra and of the shell."""
    odd = """sample.prompt='it\\'s 7 "times", ü={1}'"""
    run("one", "stop_after=4", "model.theta=3", "model.n_layers=1", "optimizer=adamw", odd)
    with monkeypatch.context() as patch:
        patch.setattr(train, "prepare", lambda *_: pytest.fail("text was read"))
        with pytest.raises(
            ValueError, match="another text or tokenizer, another model, another optimizer: give "
        ) as error:
            train.train(settings("resume=auto", "steps=8"), Path("runs/one"))
    pasted = shlex.split(str(error.value).split(": give ")[1])
    now = settings("resume=auto", "steps=8", *pasted)
    assert now.sample.prompt == """it's 7 "times", ü={1}""" and now.model.n_layers == 1
    assert train.train(now, Path("runs/one")) == 0
    mixed = ["data=mixture", "data.corpora={a: 0.5, b: 0.5}"]
    with pytest.raises(ValueError, match="a/manifest.json|there is no .*a"):
        run("one", "resume=auto", "steps=9", "model.theta=3", "model.n_layers=1", "optimizer=adamw", *mixed)


@pytest.mark.parametrize(
    ("before", "now", "what"),
    [
        ({"a": None}, {"a": {"b": 1}}, [("a", None, {"b": 1})]),
        ({"a": {"b": 1}}, {"a": None}, [("a", {"b": 1}, None)]),
        ({"a": [1]}, {"a": {"b": [1]}}, [("a", [1], {"b": [1]})]),
        ({"a": {"b": 1, "c": [2]}}, {"a": {"b": 1, "c": [2, 3]}}, [("a.c", [2], [2, 3])]),
        ({"data": {"corpora": {"x/y": 1.0}}}, {"data": {"corpora": {}}}, [("data.corpora", {"x/y": 1.0}, {})]),
        ({}, {"a": {"b": 1}}, [("a", None, {"b": 1})]),
    ],
)
def test_any_two_values_of_a_setting_can_be_compared(before, now, what):
    assert list(run_folder.differences(before, now)) == what


def test_a_damaged_checkpoint_is_passed_over(run, capsys):
    whole = run("whole", "every.checkpoint=4")
    other = run("other", "every.checkpoint=4")
    (other / "checkpoints" / "step_00000008" / "training.pt").write_bytes(b"")
    run("other", "resume=auto", "every.checkpoint=4")
    assert "skipping a checkpoint" in capsys.readouterr().out
    assert [folder.name for folder in checkpoint.steps(other)] == ["step_00000008", "step_00000004"]
    assert same(final(whole)[0], final(other)[0]) and rows(whole) == rows(other)


def test_two_runs_do_not_share_a_folder(run):
    run("one")
    with pytest.raises(ValueError, match="already holds checkpoints"):
        run("one", "seed=1")
    run("two", "stop_after=4")
    with pytest.raises(ValueError, match="already holds checkpoints"):
        run("one", "resume=runs/two")


def test_a_prompt_that_cannot_be_encoded_is_found_before_training(run, tmp_path):
    with pytest.raises(ValueError, match="sample.prompt: .* has not seen: 'Z'"):
        run("one", "tokenizer=chars", "sample.prompt=Z")
    assert not (tmp_path / "runs" / "one").exists()


def test_resuming_from_a_path_is_a_new_run(run):
    first = run("first", "stop_after=4")
    before = (first / "metrics.jsonl").read_text()
    fork = run("fork", f"resume={first}")
    assert [row["step"] for row in rows(fork)] == [6, 8]
    assert (first / "metrics.jsonl").read_text() == before
    assert same(final(run("whole"))[0], final(fork)[0])


@hardware
def test_evaluating_sampling_and_logging_change_nothing(run):
    often = run("often", "every.evaluate=1", "every.sample=1", "every.checkpoint=1")
    seldom = run("seldom", "every.evaluate=8", "every.sample=8", "every.log=8")
    assert same(final(often)[0], final(seldom)[0])


def test_another_seed_is_another_run(run):
    assert not same(final(run("one"))[0], final(run("two", "seed=1"))[0])


def test_a_finished_run_has_nothing_left_to_do(run, capsys):
    first = run("first")
    before = (first / "metrics.jsonl").read_bytes()
    run("first", "resume=auto")
    assert "8 steps are done, the run ends at 8; give more steps" in capsys.readouterr().out
    assert run.code == 0 and (first / "metrics.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match="8 steps are done, the run ends at 8; give more steps"):
        run("fork", f"resume={first}")


def test_a_context_longer_than_the_corpus_is_refused_with_the_numbers(run):
    with pytest.raises(ValueError, match=r"seq_len 60000 needs at least 60001 tokens, but the training text has \d+"):
        run("long", "seq_len=60000", "batch_tokens=240000")


def test_held_out_text_may_be_shorter_than_the_context(run):
    folder = run("long", "seq_len=60", "batch_tokens=240", "data.validation_share=0.01")
    assert all(math.isfinite(row["validation_loss"]) for row in rows(folder) if "validation_loss" in row)


@hardware
def test_a_run_on_packed_documents_resumes_to_the_bit_and_learns_from_other_rows(run):
    packed = ["packing=documents", "data.separator='\\n'"]
    whole, parts = run("whole", *packed), run("parts", *packed, "stop_after=3")
    run("parts", *packed, "resume=auto")
    assert rows(parts) == rows(whole)
    assert same(final(parts)[0], final(whole)[0])
    assert rows(run("stream", *packed[1:]))[0]["loss"] != rows(whole)[0]["loss"]


@hardware
def test_a_checkpoint_is_evaluated_without_the_tokenizer_file_that_it_was_trained_with(run, tmp_path):
    ByteTokenizer().save(tmp_path / "elsewhere")
    folder = run("borrowed", "tokenizer=saved", f"tokenizer.path={tmp_path / 'elsewhere'}")
    shutil.rmtree(tmp_path / "elsewhere")
    result = command("-m", "scripts.evaluate", f"checkpoint={folder}")
    assert result.returncode == 0, result.stderr
    assert f"loss           {rows(folder)[-1]['validation_loss']:.4f}" in result.stdout


def test_the_text_of_a_batch_can_be_shown(run, settings, capsys):
    from data.batches import make_batches
    from data.corpus import open_corpus
    from scripts import prepare as script

    folder = run("shown", "packing=documents", "data.separator='\\n'", "seed=3")
    capsys.readouterr()
    corpus = open_corpus(next(path for path in Path("corpora").iterdir() if path.is_dir()))
    cfg = script.settings_of(folder, settings("step=5", config="prepare", kind=Prepare))
    assert (cfg.seed, cfg.packing, cfg.batch_tokens) == (3, "documents", 128)
    script.show(corpus, cfg)
    shown = capsys.readouterr().out
    batch = make_batches(corpus, 4, 32, 3, "documents").batch(5)
    for row in range(4):
        first = batch["tokens"][row][batch["documents"][row] == 0]
        assert corpus.tokenizer.decode(first.tolist()) in shown
    with pytest.raises(ValueError, match="nowhere is no run folder: config.yaml is missing"):
        script.settings_of(Path("nowhere"), cfg)


# --- ends before the end ---


def at_step(monkeypatch, step: int, do, times: int = 1):
    """Calls do(model, total) behind the gradients of the `step`-th step from now, and so many in all.

    What it returns is taken for the loss.
    """
    real, calls = one_step.compute_gradients, []

    def wrapped(forward, *arguments, **options):
        total = real(forward, *arguments, **options)
        calls.append(1)
        return do(forward, total) if step <= len(calls) < step + times else total

    monkeypatch.setattr(one_step, "compute_gradients", wrapped)


def equal(whole: Path, parts: Path) -> bool:
    """Bit for bit, in rows, weights and everything with memory."""
    (weights, state), (others, other_state) = final(whole), final(parts)
    same_memory = all(same(state[name], other_state[name]) for name in REMEMBERED)
    return rows(whole) == rows(parts) and same(weights, others) and same_memory


@pytest.mark.parametrize(
    ("step", "number"),
    [(1, signal.SIGTERM), (5, signal.SIGTERM), (5, signal.SIGINT), (1, signal.SIGUSR1), (5, signal.SIGHUP)],
)
def test_a_signal_ends_the_run_behind_its_step_and_resuming_changes_nothing(run, monkeypatch, number, step):
    whole = run("whole")
    with monkeypatch.context() as patch:
        at_step(patch, step, lambda _, total: os.kill(os.getpid(), number) or total)
        parts = run("parts")
    assert run.code == 128 + number
    assert checkpoint.find(parts, for_training=True).name == f"step_{step:08}"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert equal(whole, run("parts", "resume=auto"))


@pytest.mark.parametrize(("step", "cut"), [(2, 0), (5, 30), (8, 30)])
def test_kill_9_and_a_power_cut_lose_no_more_than_the_steps_since_the_checkpoint(run, monkeypatch, step, cut):
    """The machine goes down in the middle of a step; with it the last bytes of what the disk did not have yet."""
    every = ["every.checkpoint=3", "every.evaluate=2", "every.log=1"]
    whole = run("whole", *every)
    if (child := os.fork()) == 0:
        at_step(monkeypatch, step, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        run("parts", *every)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    metrics = Path("runs/parts/metrics.jsonl")
    os.truncate(metrics, metrics.stat().st_size - cut)
    assert equal(whole, run("parts", *every, "resume=auto"))


def test_a_run_ends_within_its_time_and_goes_on_later(run):
    began = time.monotonic()
    folder = run("long", "steps=100000", "max_time=4s", "compile=false", "schedule.warmup=2", "every.evaluate=100000")
    assert time.monotonic() - began < 30  # 100,000 steps take ten minutes and more
    step = checkpoint.read_about(checkpoint.find(folder, for_training=True))["step"]
    assert 1 < step < 100000
    assert rows(run("long", "resume=auto", f"steps={step + 2}", "schedule.warmup=2"))[-1]["step"] == step + 2


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_epochs_are_so_many_passes_over_the_text_and_schedule_and_resuming_follow(run, capsys, packing):
    options = [f"packing={packing}", "data.separator='\\n'", "every.log=1"]
    epochs = run("epochs", *options, "steps=null", "epochs=1.5")
    last = rows(epochs)[-1]
    assert last["epoch"] >= 1.5 > rows(epochs)[-2]["epoch"]
    assert f"steps     {last['step']} of 128 tokens, {last['epoch']:.1f} epochs" in capsys.readouterr().out
    steps = run("steps", *options, f"steps={last['step']}")
    assert rows(epochs) == rows(steps) and same(final(epochs)[0], final(steps)[0])
    run("parts", *options, "steps=null", "epochs=1.5", "stop_after=3")
    parts = run("parts", *options, "steps=null", "epochs=1.5", "resume=auto")
    assert rows(parts) == rows(epochs) and same(final(parts)[0], final(epochs)[0])
    assert final(parts)[1]["steps"] == json.loads((parts / "environment.json").read_text())["steps"] == last["step"]
    run("parts", *options, "steps=null", "epochs=1.5", "resume=auto")
    assert f"the run ends at {last['step']}; give more steps" in capsys.readouterr().out
    run("parts", *options, "steps=null", "epochs=1", "resume=auto")  # fewer than are done
    assert run.code == 0 and rows(parts) == rows(epochs)
    longer = run("parts", *options, "steps=null", "epochs=2", "resume=auto")
    assert rows(longer)[-1]["epoch"] >= 2
    with pytest.raises(ValueError, match=r"schedule.warmup must be below steps, got 99 and \d"):
        run("warm", *options, "steps=null", "epochs=1.5", "schedule.warmup=99")


def test_epochs_of_a_mixture_are_passes_over_all_of_it(run):
    run("one", "stop_after=1")
    run("two", "stop_after=1", "tokenizer=bytes", "data.max_tokens=500")
    paths = sorted(str(path) for path in Path("corpora").iterdir() if path.is_dir())
    mixed = ["data=mixture", f"data.corpora={{{paths[0]}: 0.5, {paths[1]}: 0.5}}", "steps=null", "epochs=1"]
    last = rows(run("mixed", *mixed, "sample.prompt=a"))[-1]
    assert last["epoch"] >= 1 > last["epoch"] - 1 / last["step"] * 2


def test_a_finished_run_can_be_made_longer(run):
    """As if it had never been shorter but for the learning rates that it has seen."""
    run("one")
    folder = run("one", "resume=auto", "steps=12")
    assert [row["step"] for row in rows(folder)] == [2, 3, 4, 6, 8, 9, 10, 12]
    assert rows(folder)[-1]["lr"] < rows(folder)[-2]["lr"]


def test_a_second_signal_ends_a_process_at_once(tmp_path):
    code = """
import os, signal, time
from training.interruption import Interruption
with Interruption(None, 0.0) as interrupted:
    assert interrupted.wanted() == 0
    os.kill(os.getpid(), signal.SIGTERM)
    assert interrupted.wanted() == signal.SIGTERM
    print("heard", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=50)
    assert (result.stdout, result.returncode) == ("heard\n", -signal.SIGTERM), result.stderr


# --- begins with something ---


@hardware
def test_a_run_may_begin_with_the_weights_of_another(run):
    first = run("first", "stop_after=4", "tokenizer=chars")
    options = ["tokenizer=chars", f"init_from={first}", "optimizer=adamw", "optimizer.lr=1e-9", "stop_after=1"]
    tuned = run("tuned", *options, "model.dropout=0")
    assert checkpoint.read_about(checkpoint.find(tuned))["step"] == 1
    for name, weight in final(first)[0].items():
        torch.testing.assert_close(final(tuned)[0][name], weight, rtol=0, atol=1e-6)
    assert final(tuned)[1]["optimizer"]["state"][0]["step"] == 1
    with pytest.raises(ValueError, match="learned with another tokenizer, of 19 tokens, than this run's, of 257"):
        run("other", f"init_from={first}")
    these, those = f"model.d_ff={checkpoint.read_about(checkpoint.find(first))['arguments']['d_ff']}", "model.d_ff=40"
    with pytest.raises(
        ValueError, match=rf"has {these} model.theta=10000.0, this run {those} model.theta=3.0: they must"
    ):
        run("other", *options, "model.d_ff=40", "model.theta=3")
    assert run("begun", *options, "model.zero_init=true").is_dir()  # which has no bearing on weights that are there
    with pytest.raises(ValueError, match="resume or with init_from, got both"):
        run("other", *options, f"resume={first}")
    with pytest.raises(ValueError, match="there is no checkpoint at nowhere"):
        run("other", "init_from=nowhere")


def test_the_newest_checkpoints_and_the_best_are_kept(run, monkeypatch):
    losses = iter([5.0, 1.0, 4.0, 3.0, 2.0, 2.5, 2.2, 2.1])
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: Evaluation(next(losses), 1, 1))
    folder = run("kept", "keep=2", "every.checkpoint=1", "every.evaluate=1")
    assert [path.name[-1] for path in checkpoint.steps(folder)] == ["8", "7", "2"]
    assert {path.name for path in (folder / "checkpoints").iterdir() if path.is_dir()} == {
        "step_00000008",
        "step_00000007",
        "step_00000002",
    }


def losses_are(monkeypatch, *values: float) -> list:
    """What evaluations find, one after the other -> how much of the text each was to take."""
    values, limits = iter(values), []
    monkeypatch.setattr(
        evaluation, "evaluate", lambda *_, **k: (limits.append(k["limit"]), Evaluation(next(values), 1, 1))[1]
    )
    return limits


PATIENT = ["patience=2", "every.evaluate=1", "keep=1", "every.checkpoint=100"]


@pytest.mark.parametrize("stop", [None, 3, 4, 5])
def test_without_a_lower_validation_loss_the_run_ends_and_its_best_is_saved_also_when_resumed(
    run, monkeypatch, capsys, stop
):
    losses_are(monkeypatch, 5.0, 4.0, 3.0, 3.5, math.nan, 1.0)
    if stop:
        run("one", *PATIENT, f"stop_after={stop}")
    folder = run("one", *PATIENT, "resume=auto")
    assert run.code == 0 and rows(folder)[-1]["step"] == 5
    assert [path.name[-1] for path in checkpoint.steps(folder)] == ["5", "3"]
    said = capsys.readouterr().out
    assert "patience    ended after step 5: 2 evaluations without a lower validation loss" in said or stop == 5
    assert "best        checkpoint=" in said and ":best is step 3, validation loss 3.0000; the last is not" in said
    before = (folder / "metrics.jsonl").read_bytes()
    run("one", *PATIENT, "resume=auto")
    assert run.code == 0 and (folder / "metrics.jsonl").read_bytes() == before
    assert "5 steps are done, and patience=2 has ended; give more" in capsys.readouterr().out
    with pytest.raises(ValueError, match="patience=2 has ended; give more"):
        run("fork", *PATIENT, f"resume={folder}")
    assert rows(run("fork", *PATIENT, f"resume={folder}:best", "stop_after=4"))[-1]["step"] == 4


def test_validation_losses_are_compared_on_the_same_part_of_the_text(run, monkeypatch, capsys):
    """The last evaluation takes all of it, and says nothing of which checkpoint is better."""
    part = ["every.evaluate=4", "every.checkpoint=4", "evaluation_tokens=40"]
    limits = losses_are(monkeypatch, 3.0, 2.0, 5.0)
    folder = run("one", *part)
    assert limits == [40, None, 40]
    assert [row["validation_loss"] for row in rows(folder) if "validation_loss" in row] == [3.0, 2.0]
    assert checkpoint.find(f"{folder}:best").name[-1] == "4"
    assert "the last, 5.0000, is clearly worse" in capsys.readouterr().out
    losses_are(monkeypatch, 4.0, 9.0)
    longer = run("one", *part, "resume=auto", "steps=12")
    assert final(longer)[1]["guard"]["lowest"] == 3.0
    losses_are(monkeypatch, 9.0, 4.0)
    other = run("one", "evaluation_tokens=39", *part[:2], "resume=auto", "steps=16")
    assert final(other)[1]["guard"]["lowest"] == 4.0


def test_the_lowest_validation_loss_is_named_also_where_it_was_not_saved(run, monkeypatch, capsys):
    losses_are(monkeypatch, 1.0, 4.0, 5.0, 6.0)
    run("one", "every.evaluate=2", "every.checkpoint=4")
    said = capsys.readouterr().out
    assert "runs/one:best is step 4, validation loss 4.0000; the last, 6.0000, is clearly worse" in said
    assert "lowest      1.0000 after step 2, of which no checkpoint is left" in said


def test_a_folder_has_one_run_at_a_time(run):
    with (
        checkpoints.taken(Path("runs/one")),
        pytest.raises(ValueError, match="runs/one is in use by another process"),
    ):
        run("one")
    run("one")


def test_a_folder_that_cannot_be_written_is_found_before_the_first_step(run, tmp_path, monkeypatch):
    at_step(monkeypatch, 1, lambda *_: pytest.fail("a step was made"))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "file").write_text("")
    with pytest.raises(ValueError, match="checkpoints cannot be written to .*Not a directory"):
        run("file/one")


@pytest.mark.parametrize("kind", ["an error", "a full disk"])
def test_a_checkpoint_that_cannot_be_saved_does_not_end_the_run_but_its_exit_code_says_so(
    run, monkeypatch, kind, capfd
):
    every = ["every.checkpoint=2", "every.sample=100"]
    whole = run("whole", *every)
    real, calls = checkpoint.save_file, []

    def failing(weights, path):
        calls.append(path)
        if len(calls) != 2:
            return real(weights, path)
        if kind == "an error":
            raise OSError("Input/output error")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            return real(weights, path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(checkpoint, "save_file", failing)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with pytest.raises(ValueError, match="1 checkpoints could not be saved"):
        run("parts", *every)
    signal.signal(signal.SIGXFSZ, before)
    assert "step_00000004 could not be saved, training goes on: " in capfd.readouterr().out
    assert [path.name[-1] for path in checkpoint.steps(Path("runs/parts"))] == ["8", "6", "2"]
    assert equal(whole, Path("runs/parts"))


# --- numbers that go wrong ---


def break_gradient(forward, total):
    next(forward.parameters()).grad.view(-1)[0] = math.nan
    return total


@hardware
def test_a_loss_that_is_not_finite_ends_the_run_before_the_weights_have_it(run):
    with pytest.raises(ValueError, match=r"the loss of step 2 is .*: first in the .* of .*; step 1 is saved: try"):
        run("hot", "optimizer=adamw", "optimizer.lr=1e30", "optimizer.clip=1e30")
    (path,) = Path("runs/hot").glob("nonfinite_*.json")
    found = json.loads(path.read_text())
    assert found["step"] == 1 and len(found["texts"]) == 4 and found["texts"][0] in Path("words.txt").read_text()
    assert all(weight.isfinite().all() for weight in final(Path("runs/hot"))[0].values())


@pytest.mark.parametrize("step", [1, 4])
def test_a_batch_whose_numbers_are_not_finite_changes_nothing(run, monkeypatch, step):
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


def test_the_run_stops_at_such_a_batch_and_may_go_on_without_it(run, monkeypatch):
    without = run("without", "skip_batches=[4]")
    at_step(monkeypatch, 5, break_gradient, times=2)
    with pytest.raises(ValueError, match=r"gradient norm nan: it did not happen again .*step 4 is saved"):
        run("stopping")
    resumed = run("stopping", "resume=auto", "on_nonfinite=skip")
    assert rows(without) == rows(resumed) and same(final(without)[0], final(resumed)[0])


def test_too_many_in_a_row_end_the_run(run, monkeypatch):
    at_step(monkeypatch, 3, break_gradient, times=3)
    with pytest.raises(ValueError, match=r"the loss of step 5 .*step 4 is saved"):
        run("one", "on_nonfinite=skip", "max_skips=2")


@hardware
@pytest.mark.parametrize(("step", "every"), [(7, 1), (5, 3), (5, 100)])
def test_after_a_jump_the_run_goes_back_and_ends_as_without_that_batch(run, monkeypatch, step, every):
    """With dropout; from a checkpoint before, or from the beginning."""
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


@pytest.mark.parametrize("every", [1, 2, 100])
def test_losses_that_go_on_jumping_end_the_run_where_it_can_go_on(run, monkeypatch, every):
    """However often it saves; another text from step 5 on, say."""
    options = ["spike_window=3", "spike_sigmas=10", f"every.checkpoint={every}", "steps=12"]
    without = run("without", *options, "skip_batches=[4,5,6]")
    steps, rate_factor, gradients = [], train.rate_factor, one_step.compute_gradients
    with monkeypatch.context() as patch:
        patch.setattr(train, "rate_factor", lambda step, *a, **k: (steps.append(step), rate_factor(step, *a, **k))[1])
        patch.setattr(one_step, "compute_gradients", lambda *a, **k: gradients(*a, **k) * 100 ** (steps[-1] >= 4))
        with pytest.raises(ValueError, match="step 8 jumped to .*, after max_skips=3 times back; step 7 is saved: try"):
            run("jumping", *options, "on_spike=rollback", "max_skips=3")
    back = run("jumping", *options, "resume=auto", "on_spike=rollback", "max_skips=3")
    assert same(final(without)[0], final(back)[0]) and final(back)[1]["guard"]["rollbacks"] == 0
    assert final(back)[1]["guard"]["spikes"] == 3


def test_there_is_something_to_go_back_to_in_a_run_that_began_elsewhere(run, monkeypatch):
    first = run("first", "stop_after=3")
    options = [f"resume={first}", "every.checkpoint=100", "spike_window=2", "spike_sigmas=50"]
    without = run("without", *options, "skip_batches=[4]")
    at_step(monkeypatch, 2, lambda _, total: total * 10)
    back = run("back", *options, "on_spike=rollback")
    assert same(final(without)[0], final(back)[0])


def test_with_nothing_to_go_back_to_the_batch_is_skipped(run, monkeypatch, capsys):
    options = ["spike_window=3", "spike_sigmas=50"]
    without = run("without", *options, "skip_batches=[4]")

    def spoil(_, total):
        checkpoint.steps(Path("runs/back"))[0].joinpath("training.pt").write_bytes(b"")
        return total * 10

    at_step(monkeypatch, 5, spoil)
    back = run("back", *options, "on_spike=rollback")
    assert "1 there, none valid: only the batch is skipped" in capsys.readouterr().out
    assert same(final(without)[0], final(back)[0])


@pytest.mark.parametrize("how", ["time", "signal", "signal in a fork"])
def test_a_run_that_is_ended_before_its_first_step_can_go_on(run, monkeypatch, how):
    whole, options = run("whole"), ["max_time=0s"] if how == "time" else []
    if "fork" in how:
        options += [f"resume={run('first', 'stop_after=3')}"]
    with monkeypatch.context() as patch:
        if "signal" in how:
            real = train.tracking.start
            patch.setattr(
                train.tracking,
                "start",
                lambda *a, **k: (os.kill(os.getpid(), signal.SIGTERM), real(*a, **k))[1],
            )
        parts = run("parts", *options)
    assert run.code == (0 if how == "time" else 143)
    assert checkpoint.read_about(checkpoint.find(parts, for_training=True))["step"] == (3 if "fork" in how else 0)
    run("parts", "resume=auto")
    assert same(final(whole)[0], final(parts)[0])


def test_a_signal_during_an_evaluation_leaves_its_figures_in_the_checkpoint(run, monkeypatch):
    real = evaluation.evaluate
    stopping = lambda *a, **k: (os.kill(os.getpid(), signal.SIGTERM), real(*a, **k))[1]  # noqa: E731
    monkeypatch.setattr(evaluation, "evaluate", stopping)
    folder = run("one", "every.checkpoint=3")
    assert run.code == 143
    assert "validation_loss" in checkpoint.read_about(checkpoint.find(folder))


@hardware
@pytest.mark.parametrize("stop", [3, 5])
def test_fp16_skips_what_its_scale_was_too_large_for_and_remembers_the_scale(run, monkeypatch, stop):
    """Here with fp32: an overflow is counted and halves the scale, and resuming changes nothing."""
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


def test_jumps_are_counted(run, monkeypatch):
    at_step(monkeypatch, 5, lambda _, total: total * 10)
    assert [row["spikes"] for row in rows(run("one", "spike_window=3", "spike_sigmas=50"))] == [0, 0, 0, 1, 1]


# --- the device may be behind the host ---

SELDOM = ["every.log=8", "every.evaluate=8", "every.sample=8"]  # looks at a CPU that plays a GPU


@pytest.fixture(params=[1, 16])
def ahead(request, monkeypatch):
    """How many steps the host may be ahead of the device."""
    monkeypatch.setattr(engine.Engine, "steps_ahead", request.param)


def test_a_step_that_is_found_out_late_changes_as_little(run, monkeypatch, ahead):
    without = run("without", *SELDOM, "skip_batches=[2]")
    with monkeypatch.context() as patch:
        at_step(patch, 3, break_gradient)
        skipping = run("skipping", *SELDOM, "on_nonfinite=skip")
    assert rows(without) == rows(skipping) and same(final(without)[0], final(skipping)[0])
    assert same(final(without)[1]["optimizer"], final(skipping)[1]["optimizer"])


def test_a_run_that_stops_late_is_saved_as_before_that_step(run, monkeypatch, ahead):
    before = run("before", *SELDOM, "stop_after=2")
    with monkeypatch.context() as patch:
        at_step(patch, 3, break_gradient)
        with pytest.raises(ValueError, match=r"the loss of step 3 .*step 2 is saved"):
            run("stopping", *SELDOM)
    (weights, state), (others, other_state) = final(before), final(Path("runs/stopping"))
    for memory in (state, other_state):
        memory["optimizer"] = memory["optimizer"]["state"]  # the rate is set anew in each step
    assert same(weights, others) and all(same(state[name], other_state[name]) for name in REMEMBERED)


def test_a_jump_that_is_found_out_late_is_gone_back_from(run, monkeypatch, ahead):
    options = ["spike_window=3", "spike_sigmas=50", "every.checkpoint=4", *SELDOM]
    without = run("without", *options, "skip_batches=[4]")
    with monkeypatch.context() as patch:
        at_step(patch, 5, lambda _, total: total * 10)
        back = run("back", *options, "on_spike=rollback")
    assert same(final(without)[0], final(back)[0]) and final(back)[1]["guard"]["skip"] == [4]


def test_a_signal_is_heard_while_the_device_is_behind(run, monkeypatch, ahead):
    whole = run("whole", *SELDOM)
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda _, total: os.kill(os.getpid(), signal.SIGTERM) or total)
        parts = run("parts", *SELDOM)
    assert run.code == 143 and checkpoint.find(parts, for_training=True).name == "step_00000003"
    assert equal(whole, run("parts", *SELDOM, "resume=auto"))


@needs_torch_compile
@pytest.mark.parametrize("how", ["adamw", "muon", "fp16", "compiled"])
def test_a_steady_step_reads_nothing_back_from_the_device(run, monkeypatch, how):
    """Where the device is a GPU, each reading would wait for it; a step that reports reads."""
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


def test_tracking_mirrors_the_run(run, monkeypatch):
    folder = run("tracked", "tracking.mode=offline")
    assert list(folder.glob("wandb/offline-run-*"))
    assert f"wandb sync {folder}" in (folder / "README.txt").read_text()


@pytest.mark.parametrize("setting", ["tracking.project=a/b", "WANDB_MODE=sometimes"])
def test_what_wandb_cannot_be_told_is_found_before_the_text_is_read(run, monkeypatch, setting):
    monkeypatch.setattr(train, "prepare", lambda *_: pytest.fail("text was read"))
    overrides = [setting] if setting.startswith("tracking") else []
    if not overrides:
        monkeypatch.setenv(*setting.split("="))
    with pytest.raises(ValueError, match=setting.split("=")[1]):
        run("one", *overrides)
    assert not Path("runs/one").exists()


def test_a_wandb_server_that_dies_changes_no_row(run, monkeypatch, capsys):
    with wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        log = tracking.log

        def log_and_kill(mirror, row):
            log(mirror, row)
            if row["step"] == 4:
                server.shutdown()
                server.server_close()

        monkeypatch.setattr(tracking, "log", log_and_kill)
        folder = run("tracked", "tracking.mode=online", "tracking.finish_timeout=1", "every.sample=100")
    assert rows(folder) == rows(run("alone")) and len(final(folder)[0])
    assert "TimeoutError: Timed out finishing run" in capsys.readouterr().out


def test_the_jobs_of_a_multirun_are_runs_of_one_group(tmp_path, monkeypatch):
    with wandb_server() as server:
        online = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "k" * 40}
        arguments = [str(REPOSITORY / "train.py"), "-m", "seed=1,2", "experiment=smoke", "steps=4"]
        arguments += ["schedule.warmup=1", "every.evaluate=2", "every.checkpoint=2"]
        arguments += ["tracking.mode=auto", "tracking.artifacts=true"]
        result = command(*arguments, **online)
        assert result.returncode == 0, result.stderr
    (sweep,) = (tmp_path / "runs").iterdir()
    assert [run.name for run in server.runs.values()] == [f"{sweep.name}/0", f"{sweep.name}/1"]
    for seed, run in enumerate(server.runs.values(), 1):
        assert (run.group, run.exit_code, run.config["seed"]) == (sweep.name, 0, seed)
        folder = sweep / str(seed - 1)
        table = rows(folder)
        environment = json.loads((folder / "environment.json").read_text())
        assert run.config["environment"] == environment and run.config["parameters"] == 37184
        assert environment["tokens_per_step"] == 512 and environment["torch"] == torch.__version__
        assert [row["loss"] for row in run.history if "loss" in row] == [row["loss"] for row in table]
        best = min((row for row in table if "validation_loss" in row), key=lambda row: row["validation_loss"])
        assert (run.summary["best_validation_loss"], run.summary["best_step"]) == (
            best["validation_loss"],
            best["step"],
        )
    models = [artifact for artifact in server.artifacts if artifact.type == "model"]
    assert len(models) == 4
    for artifact, step in zip(models, ["step-2", "step-4"] * 2, strict=True):
        assert {"latest", step} <= set(artifact.aliases)
    assert {"manifest.json", "model.safetensors", "training.pt"} < set(models[0].files)


@hardware
@needs_compiler
def test_training_by_kernels_is_training_without_them(run):
    fp32 = ["model.dropout=0", "precision=fp32"]
    with_kernels, without = run("kernels", *fp32, "kernels=true"), run("torch", *fp32, "kernels=false")
    assert [final(one)[1]["choices"]["kernels"] for one in (with_kernels, without)] == [True, False]
    for a, b in zip(rows(with_kernels), rows(without), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


@hardware
@needs_torch_compile
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 1e-3)])
def test_compiled_training_is_eager_training(run, precision, tolerance):
    """In bf16 compiled code rounds less often, between operations that it joins."""
    same = ["model.dropout=0", f"precision={precision}", "kernels=false", "attention=fused"]
    eager, compiled = run("eager", *same, "compile=false"), run("compiled", *same, "compile=true")
    assert [final(one)[1]["choices"]["compile"] for one in (eager, compiled)] == [False, True]
    for a, b in zip(rows(eager), rows(compiled), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=tolerance)


@hardware
def test_bf16_learns_what_fp32_learns(run):
    """On any CPU; weights stay fp32, and only what products round is different."""
    wide, half = (run(name, "model.dropout=0", f"precision={name}", "kernels=false") for name in ("fp32", "bf16"))
    assert all(weight.dtype == torch.float32 for weight in final(half)[0].values())
    assert rows(wide) != rows(half)
    for a, b in zip(rows(wide), rows(half), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=5e-3)


@hardware
def test_without_a_compiler_a_run_chooses_to_go_without_it(run, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "false")
    folder = run("one", "precision=fp32", "stop_after=1")
    assert final(folder)[1]["choices"] | {"kernels": False, "compile": False} == final(folder)[1]["choices"]


@hardware
def test_where_compiling_fails_training_goes_on_without(run, monkeypatch, capsys):
    def refuse(*_, **__):
        raise RuntimeError("no compiler here\nand more lines")

    eager = run("eager", "kernels=false", "attention=fused")
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: refuse)
    compiled = run("compiled", "compile=true", "attention=fused")
    assert "torch.compile failed, going on without: RuntimeError: no compiler here\n" in capsys.readouterr().out
    assert same(final(eager)[0], final(compiled)[0])
    assert final(compiled)[1]["choices"]["compile"] is False


def test_a_sweep_goes_through_submitit(tmp_path):
    """The launcher of SLURM, with submitit's executor for this machine in its place; then once more, to go on."""
    small = ["experiment=smoke", "every.sample=100", "hydra.sweep.dir=sweep", "hydra/launcher=submitit_local"]
    for steps, seeds in ((2, "3"), (4, "3,4")):
        more = [f"steps={steps}", "schedule.warmup=1", "hydra.launcher.timeout_min=5"]
        result = command(str(REPOSITORY / "train.py"), "-m", f"seed={seeds}", "resume=auto", *small, *more)
        assert result.returncode == 0, result.stderr + result.stdout
    for job, steps in enumerate((["step_00000004", "step_00000002"], ["step_00000004"])):
        folder = tmp_path / "sweep" / str(job)
        assert f"seed: {3 + job}" in (folder / "config.yaml").read_text()
        assert [path.name for path in checkpoint.steps(folder)] == steps


@hardware
def test_the_whole_story_on_the_command_line(tmp_path):
    """`experiment=smoke`, then its checkpoint moved away and used without corpus, from another folder."""

    def anew(*arguments, cwd=tmp_path):  # finding its modules by itself
        result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, timeout=120)
        assert result.returncode == 0, result.stderr
        return result

    out = anew(str(REPOSITORY / "train.py"), "experiment=smoke", "precision=bf16").stdout
    (folder,) = (tmp_path / "runs").iterdir()
    for expected in ("37,184 parameters", "step 20/20", "bits per byte", "def ", str(folder.name)):
        assert expected in out
    assert {p.name for p in folder.iterdir()} - {"changes.patch"} == {
        *("config.yaml", "environment.json", "metrics.jsonl", "README.txt", "checkpoints")
    }
    measured = command("-m", "scripts.evaluate", f"checkpoint={folder}").stdout
    assert f"loss           {rows(folder)[-1]['validation_loss']:.4f} nats per token" in measured
    assert f"bits per byte  {rows(folder)[-1]['bits_per_byte']:.4f}" in measured

    elsewhere = tmp_path / "elsewhere"
    checkpoint.find(folder).rename(elsewhere)
    away = tmp_path / "away"
    for name in ("model", "conf", "data"):  # names that are ours too
        (away / name).mkdir(parents=True)
    arguments = ["-m", "scripts.generate", f"checkpoint={elsewhere}", "max_new_tokens=140", "num_samples=2"]
    first, second = (start(*arguments, "--", "To", "be,", cwd=away) for start in (anew, command))
    assert first.stdout == second.stdout
    assert first.stdout.count("To be,") == 2
    slides, report = first.stderr.splitlines()
    assert "longer than the context of 32 tokens" in slides and report.endswith("seed 0")
    assert command("-m", "scripts.generate", f"checkpoint={elsewhere}").stdout  # an empty prompt is fine
    assert {path.name for path in away.iterdir()} == {"model", "conf", "data"}
