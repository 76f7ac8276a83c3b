import json
from pathlib import Path

import pytest
import torch
from commands import command

from conf.entry import REPOSITORY
from conf.parsing import setting_names
from conf.scripts import Benchmark
from model.generation import next_logits
from scripts import benchmark
from scripts.benchmarks import generate, learn
from scripts.benchmarks.train import lengths, training

pytestmark = pytest.mark.slow


def test_the_data_benchmark_measures_both_sides(monkeypatch):
    arguments = ["data", "source=repository", "megabytes=1", "rounds=1", "json=out.json"]
    result = command("-m", "scripts.benchmark", *arguments)
    assert result.returncode == 0, result.stderr
    writing, reading = json.loads(Path("out.json").read_text())["results"]
    assert [name.split(",")[0] for name in writing["measured"]] == ["inkling", "datasets.map"]
    assert all(value > 0 for table in (writing, reading) for values in table["measured"].values() for value in values)
    assert "times datasets.map" in result.stdout


def test_the_generation_benchmark_compares_equal_weights(monkeypatch, capsys):
    """Tiny models, not compiled: all candidates run, and ours generates the same text as Hugging Face's."""
    shape = {"d_model": 32, "n_layers": 2, "n_heads": 2, "d_ff": 48, "tied": True}
    monkeypatch.setattr(generate, "SHAPE", shape)
    monkeypatch.setattr(generate, "VOCABULARY", 64)
    monkeypatch.setattr(generate, "compile_step", lambda model, rows, warn: next_logits)
    results = generate.generation(new_tokens=8, batch=3, far=130, rounds=1, threads=1, device="cpu", peer=None)
    single, position, memory, batch, memory_of_batch = results
    candidates = ["inkling, compiled", "inkling", "inkling int8, compiled", "inkling int8", "Hugging Face"]
    assert list(single["measured"]) == list(batch["measured"]) == candidates
    assert list(position["measured"])[:2] == ["inkling, position 100", "inkling, position 130"]
    assert list(memory["measured"]) == list(memory_of_batch["measured"])
    assert all(value > 0 for table in results for values in table["measured"].values() for value in values)
    out = capsys.readouterr().out
    assert "equal to Hugging Face's: 1 of 1 rows, compiled 1" in out
    assert "equal to Hugging Face's: 3 of 3 rows, compiled 3" in out


def test_the_training_benchmark_measures_every_model(capsys, monkeypatch):
    """Tiny models, not compiled; the comparison with Hugging Face's best has its own table."""
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)
    shape = {"d_model": 32, "n_layers": 2, "n_heads": 2, "vocabulary": 17, "rows": 4, "seq_len": 32}
    speed, best, work, _, memory = training("small", shape, rounds=1, seconds=0.01, device="cpu", peer=None)
    names = ["Hugging Face, fp32, eager", "inkling, fp32, eager", "inkling, fp32, kernels"]
    assert set(names) <= set(speed["measured"]) == set(best["measured"]) == set(memory["measured"])
    assert all(
        value > 0 for table in (speed, work, memory) for values in table["measured"].values() for value in values
    )
    assert "times Hugging Face" in capsys.readouterr().out


def test_the_sequence_length_benchmark_uses_equally_many_tokens(capsys):
    (result,) = lengths("small", [64, 512], rounds=1, seconds=0.01, device="cpu")
    assert list(result["measured"]) == ["32 x 64", "4 x 512"]
    assert "2048 tokens" in capsys.readouterr().out


def test_the_learning_benchmark_is_a_complete_run(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    overrides = ["experiment=smoke", "data=repository", "every.evaluate=5"]
    *_, last = learn.learning(60, [0], "repository", None, overrides, Path("picture.png"))
    (run,) = last["runs"]["inkling"]
    rows = [json.loads(line) for line in next(Path("runs").rglob("metrics.jsonl")).read_text().splitlines()]
    assert run["val_bpb"] == rows[-1]["val_bpb"]
    assert [tokens for _, tokens, _ in run["curve"]] == [512 * step for step in (5, 10, 15, 20)]
    assert 0 < run["curve"][0][0] < run["curve"][-1][0] <= run["seconds"]
    assert Path("picture.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train rounds=0", "rounds must be at least 1, got 0"),
        ("train rounds=-1", "rounds must be at least 1, got -1"),
        ("length threads=0", "threads must be at least 1, got 0"),
        ("length seq_lens=[]", "seq_lens"),
        ("train seconds=nan", "seconds must be a number, got nan"),
        ("train shape=tiny", "shape must be one of small, medium, gpt2, got tiny"),
        ("generate batch=1e9", "batch must be at most 1000000, got 1000000000.0"),
        ("generate json=nope/x.json", "nope/x.json cannot be written: give json=FILE in an existing folder"),
        ("learn picture=.", ". cannot be written: give picture=FILE"),
        ("learn peer=nope", "peer must be a folder with a checkout, got nope"),
        ("learn new_tokens=3", "new_tokens has no effect with learn, only with generate"),
        ("data shape=small", "shape has no effect with data, only with train, length"),
        ("", "an action must come first, one of train, length, learn, generate, data"),
        ("trian", "trian is not an action: it must be one of train, length, learn, generate, data"),
        ("train --shape small --seq-len=5", "got --shape --seq-len: give shape=small seq_len=5"),
        ("learn --seeds 0 1 --peer x", "got --seeds --peer: give 'seeds=[0,1]' peer=x"),
        ("learn model.n_layers=6", "belong in overrides, got model.n_layers=6: give 'overrides=[model.n_layers=6]'"),
    ],
)
def test_impossible_benchmarks_are_refused_before_any_work(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmark", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


def test_the_settings_of_an_action_are_used(monkeypatch):
    measured = []
    monkeypatch.setattr(benchmark, "learning", lambda *given: measured.append(given))
    for arguments in ("", "seconds=5 seeds=[1,2] overrides=[model.n_layers=6,optimizer.lr=1e-3] picture=x.png"):
        monkeypatch.setattr("sys.argv", ["benchmark", "learn", *arguments.split()])
        benchmark.main()
    overrides = ["model.n_layers=6", "optimizer.lr=1e-3"]
    assert measured == [
        (300.0, [0], "shakespeare", None, [], None),
        (5.0, [1, 2], "shakespeare", None, overrides, Path("x.png")),
    ]


def test_every_setting_belongs_to_an_action():
    assert {name for uses in benchmark.USES.values() for name in uses} == set(setting_names(Benchmark))
