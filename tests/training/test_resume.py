"""Resuming: bit for bit as without the stop, and refused if the settings do not fit."""

import json
import os
import shlex
from pathlib import Path

import pytest
import torch
from commands import command
from miniature import REMEMBERED, final, rows, same

import train
from training import checkpoint, run_folder
from training import step as one_step

hardware = pytest.mark.hardware


def half_as_long(state: dict):
    state.update({name: value[: len(value) // 2] for name, value in state.items() if value.ndim > 0})


@hardware
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_resumed_run_equals_one_that_never_stopped(run, stop):
    """Bit for bit in weights, optimizer, random state and rows; with dropout, accumulation, an epoch's end."""
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


@pytest.mark.slow
@pytest.mark.parametrize("stop", [2, 3])
def test_sequence_length_warmup_resumes_and_longer_rows_are_no_spike(run, monkeypatch, stop):
    """Rows of 8, 16 and 32 tokens, before and after the stop. The loss may rise when rows become longer."""
    lengths, real = [], one_step.compute_gradients

    def watched(*arguments, **options):
        lengths.append(options["row_length"])
        real(*arguments, **options)
        return torch.tensor(128.0 * lengths[-1] * (1 + 0.01 * (len(lengths) % 2)))  # rises when rows become longer

    monkeypatch.setattr(one_step, "compute_gradients", watched)
    warmup = ["seq_len_warmup=0.75", "spike_window=2", "on_spike=rollback", "spike_sigmas=10", "every.log=1"]
    whole, parts = run("whole", *warmup), run("parts", *warmup, f"stop_after={stop}")
    assert lengths == [8] * 3 + [16] * 3 + [32] * 2 + lengths[:stop]
    run("parts", *warmup, "resume=auto")
    assert rows(parts) == rows(whole) and same(final(parts)[0], final(whole)[0])
    assert rows(whole)[-1]["spikes"] == 0 and len(final(whole)[1]["guard"]["losses"]) == 2


def test_a_resumed_run_reports_changed_settings_and_uses_them(run, capsys):
    folder = run("one", "stop_after=4")
    run("one", "resume=auto", "optimizer.weight_decay=0.3", "optimizer.betas=[0.8,0.9]")
    output = capsys.readouterr().out
    assert "changed setting: optimizer.weight_decay was 0.0, is now 0.3" in output
    group = final(folder)[1]["optimizer"]["param_groups"][0]
    assert group["weight_decay"] == 0.3 and list(group["betas"]) == [0.8, 0.9]


@pytest.mark.slow
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
    ids=["random state", "guard", "one weight too many", "truncated moments", "groups"],
)
def test_a_training_state_that_does_not_fit_is_refused_in_one_line(run, monkeypatch, damage, patience):
    run("one", "stop_after=1")
    real = checkpoint.load_training

    def damaged(folder):
        saved = real(folder)
        damage(saved)
        return saved

    monkeypatch.setattr(checkpoint, "load_training", damaged)
    with pytest.raises(ValueError, match=r"the checkpoint's optimizer|training\.pt does not fit"):
        run("one", "resume=auto", *patience)


@pytest.mark.slow
def test_another_architecture_or_tokenizer_is_not_resumed(run, tmp_path):
    run("one", "stop_after=4", "tokenizer=chars")
    with pytest.raises(ValueError, match=r"another model: give model.theta=10000.0$"):
        run("one", "resume=auto", "tokenizer=chars", "model.theta=3")
    words = tmp_path / "words.txt"
    words.write_text(words.read_text().replace("times", "tiMes"))
    for changed in (["tokenizer=chars"], ["tokenizer=bytes"]):
        with pytest.raises(ValueError, match="another text"):
            run("one", "resume=auto", *changed)


@pytest.mark.slow
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
    changes = {"moved": ["data.paths=[moved.txt]"], "given": ["data=corpus", f"data.paths=[{corpus}]"]}
    run("parts", "every.checkpoint=4", "resume=auto", *changes.get(what, []))
    output = capsys.readouterr().out
    assert "preparing" not in output
    assert ("the source text is gone: using corpora/" in output) == (what == "gone")
    assert ("the source text is unchanged: using corpora/" in output) == (what in ("newer", "moved"))
    assert rows(parts) == rows(whole) and same(final(parts)[0], final(whole)[0])


@pytest.mark.slow
def test_a_run_knows_its_corpus_from_any_folder(run, tmp_path, monkeypatch):
    folder = run("one")
    (tmp_path / "words.txt").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    evaluated = command("-m", "scripts.evaluate", f"checkpoint={folder}", "device=cpu")
    assert evaluated.returncode == 0 and "validation text of " in evaluated.stdout, evaluated.stderr
    shown = command("-m", "scripts.prepare", "show", f"run={folder}", "step=1")
    assert shown.returncode == 0 and "times" in shown.stdout, shown.stderr


@pytest.mark.slow
def test_differing_settings_are_reported_at_once_and_can_be_pasted(run, settings, monkeypatch):
    """Before any text is read; also if null became a mapping, or a value needs quotes for Hydra and the shell."""
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


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped(run, capsys):
    whole = run("whole", "every.checkpoint=4")
    other = run("other", "every.checkpoint=4")
    (other / "checkpoints" / "step_00000008" / "training.pt").write_bytes(b"")
    run("other", "resume=auto", "every.checkpoint=4")
    assert "skipping a checkpoint" in capsys.readouterr().out
    assert [folder.name for folder in checkpoint.steps(other)] == ["step_00000008", "step_00000004"]
    assert same(final(whole)[0], final(other)[0]) and rows(whole) == rows(other)


@pytest.mark.slow
def test_two_runs_do_not_share_a_folder(run):
    run("one")
    with pytest.raises(ValueError, match="already holds checkpoints"):
        run("one", "seed=1")
    run("two", "stop_after=4")
    with pytest.raises(ValueError, match="already holds checkpoints"):
        run("one", "resume=runs/two")


@pytest.mark.slow
def test_resuming_from_a_path_starts_a_new_run(run):
    first = run("first", "stop_after=4")
    before = (first / "metrics.jsonl").read_text()
    fork = run("fork", f"resume={first}")
    assert [row["step"] for row in rows(fork)] == [6, 8]
    assert (first / "metrics.jsonl").read_text() == before
    assert same(final(run("whole"))[0], final(fork)[0])


def test_a_finished_run_has_nothing_left_to_do(run, capsys):
    first = run("first")
    before = (first / "metrics.jsonl").read_bytes()
    run("first", "resume=auto")
    assert "8 steps are done, the run ends at 8; increase steps" in capsys.readouterr().out
    assert run.code == 0 and (first / "metrics.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match="8 steps are done, the run ends at 8; increase steps"):
        run("fork", f"resume={first}")


@hardware
def test_packed_documents_resume_bit_for_bit_and_differ_from_a_stream(run):
    packed = ["packing=documents", "data.separator='\\n'"]
    whole, parts = run("whole", *packed), run("parts", *packed, "stop_after=3")
    run("parts", *packed, "resume=auto")
    assert rows(parts) == rows(whole)
    assert same(final(parts)[0], final(whole)[0])
    assert rows(run("stream", *packed[1:]))[0]["loss"] != rows(whole)[0]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_epochs_set_the_number_of_steps_for_schedule_and_resuming_too(run, capsys, packing):
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
    assert f"the run ends at {last['step']}; increase steps" in capsys.readouterr().out
    run("parts", *options, "steps=null", "epochs=1", "resume=auto")  # fewer steps than are done
    assert run.code == 0 and rows(parts) == rows(epochs)
    longer = run("parts", *options, "steps=null", "epochs=2", "resume=auto")
    assert rows(longer)[-1]["epoch"] >= 2
    with pytest.raises(ValueError, match=r"schedule.warmup must be below steps, got 99 and \d"):
        run("warm", *options, "steps=null", "epochs=1.5", "schedule.warmup=99")


@pytest.mark.slow
def test_epochs_of_a_mixture_are_passes_over_all_of_it(run):
    run("one", "stop_after=1")
    run("two", "stop_after=1", "tokenizer=bytes", "data.max_tokens=500")
    paths = sorted(str(path) for path in Path("corpora").iterdir() if path.is_dir())
    mixed = ["data=mixture", f"data.corpora={{{paths[0]}: 0.5, {paths[1]}: 0.5}}", "steps=null", "epochs=1"]
    last = rows(run("mixed", *mixed, "sample.prompt=a"))[-1]
    assert last["epoch"] >= 1 > last["epoch"] - 1 / last["step"] * 2


@pytest.mark.slow
def test_a_finished_run_can_be_made_longer(run):
    """It continues like a run of that length, except for the learning rates of the steps before."""
    run("one")
    folder = run("one", "resume=auto", "steps=12")
    assert [row["step"] for row in rows(folder)] == [2, 3, 4, 6, 8, 9, 10, 12]
    assert rows(folder)[-1]["lr"] < rows(folder)[-2]["lr"]


@pytest.mark.slow
@hardware
def test_a_run_can_start_with_the_weights_of_another(run):
    first = run("first", "stop_after=4", "tokenizer=chars")
    options = ["tokenizer=chars", f"init_from={first}", "optimizer=adamw", "optimizer.lr=1e-9", "stop_after=1"]
    tuned = run("tuned", *options, "model.dropout=0")
    assert checkpoint.read_about(checkpoint.find(tuned))["step"] == 1
    for name, weight in final(first)[0].items():
        torch.testing.assert_close(final(tuned)[0][name], weight, rtol=0, atol=1e-6)
    assert final(tuned)[1]["optimizer"]["state"][0]["step"] == 1
    with pytest.raises(ValueError, match="trained with another tokenizer, of 19 tokens, than this run's, of 257"):
        run("other", f"init_from={first}")
    these, those = f"model.d_ff={checkpoint.read_about(checkpoint.find(first))['arguments']['d_ff']}", "model.d_ff=40"
    with pytest.raises(
        ValueError, match=rf"has {these} model.theta=10000.0, this run {those} model.theta=3.0: they must"
    ):
        run("other", *options, "model.d_ff=40", "model.theta=3")
    assert run("started", *options, "model.zero_init=true").is_dir()  # no effect on weights that are loaded
    with pytest.raises(ValueError, match="resume or from init_from, got both"):
        run("other", *options, f"resume={first}")
    with pytest.raises(ValueError, match="there is no checkpoint at nowhere"):
        run("other", "init_from=nowhere")
