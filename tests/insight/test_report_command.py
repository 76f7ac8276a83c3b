"""python -m scripts.evaluate report=true, for checkpoints with every kind of tokenizer."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from conf.scripts import Evaluate, Prepare
from data.prepare import prepare
from data.tokenizer import ByteTokenizer
from insight import ngrams
from model import GPT, ModelConfig
from scripts import evaluate as script
from training import checkpoint
from training.evaluation import windows

pytestmark = pytest.mark.slow

SMALL = ["samples=2", "sample_tokens=40", "ngram_order=3"]


@pytest.fixture
def trained(settings, tmp_path, llama_tokenizer):
    """Makes a checkpoint, with random weights, that names a corpus of two files as its text."""
    (tmp_path / "train.txt").write_text("".join(f"the {i} hats that eat {i} hats\n" for i in range(300)))
    (tmp_path / "held.txt").write_text("".join(f"the {i} cats that eat {i} hats\n" for i in range(50)))
    (tmp_path / "tokenizer.json").write_text(llama_tokenizer)

    def make(*tokenizer: str) -> Path:
        files = ["data=files", "data.paths=[train.txt,held.txt]", "data.validation=['*held.txt']"]
        cfg = settings(*files, *tokenizer, config="prepare", kind=Prepare)
        corpus = prepare(cfg.data, cfg.tokenizer)
        model = GPT(
            corpus.tokenizer.vocab_size, ModelConfig(d_model=16, n_layers=1, n_heads=2, d_ff=16, max_seq_len=32)
        )
        weights, about = checkpoint.snapshot(model)
        about |= {"seq_len": 32, "step": 7, "precision": "fp32"}
        about |= {"data": asdict(cfg.data), "tokenizer": asdict(cfg.tokenizer)}
        folder = tmp_path / "runs" / "NAME" / "checkpoints" / "step_00000007"
        checkpoint.save(folder, weights, corpus.tokenizer.save, about)
        return folder

    return make


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command, here; gives what it prints."""

    def command(*arguments: str) -> tuple[str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["evaluate", *arguments])
        script.main()
        return capsys.readouterr()

    return command


@pytest.mark.parametrize(
    ("setting", "room", "less"),
    [("batch", 10**6, 2), ("samples", 50_000, 2), ("ngram_tokens", 100_000, 1_000)],
)
def test_more_than_this_machine_holds_is_refused_before_it_is_taken(
    trained, settings, monkeypatch, setting, room, less
):
    folder = trained("tokenizer=bytes")
    model, known = checkpoint.load_model(folder), script.load_tokenizer(folder / "tokenizer")
    corpus = script.trained_on(folder, known)
    monkeypatch.setattr("training.estimate.available_memory", lambda: room)

    def check(n: int):
        given = [] if setting == "batch" else ["report=true", *SMALL]
        cfg = settings(f"checkpoint={folder}", *given, f"{setting}={n}", config="evaluate", kind=Evaluate)
        script.check_memory(cfg, model, len(corpus.validation), 32, 32)
        if setting == "ngram_tokens":
            script.measure(cfg, model, known, corpus.validation, corpus.train, 32, 32, {"batch": 1})

    with pytest.raises(ValueError, match=f"^{setting}: .* needs [0-9.]+ GiB of memory, this machine has"):
        check(10**6)
    check(less)


@pytest.mark.parametrize(
    "tokenizer",
    [
        ["tokenizer=bytes"],
        ["tokenizer=chars"],
        ["tokenizer=bpe", "tokenizer.vocab_size=300"],
        ["tokenizer=json", "tokenizer.path=tokenizer.json", "tokenizer.bos_token='<s>'", "tokenizer.special=['</s>']"],
    ],
)
def test_the_report_knows_every_kind_of_tokenizer(trained, settings, tokenizer):
    folder = trained(*tokenizer)
    cfg = settings(f"checkpoint={folder}", "report=true", *SMALL, config="evaluate", kind=Evaluate)
    made = checkpoint.load_model(folder)
    known = script.load_tokenizer(folder / "tokenizer")
    corpus = script.trained_on(folder, known)
    figures = script.measure(cfg, made, known, corpus.validation, corpus.train, 32, 32, {"batch": 8})
    json.dumps(figures, allow_nan=False)
    assert figures["training_tokens"] == figures["ngram_tokens"] == len(corpus.train)
    assert figures["tokens"] == len(corpus.validation) - 1
    assert figures["bytes"] == known.bytes_per_token()[corpus.validation.read(1, figures["tokens"])].sum()
    assert figures["loss"] > min(figures["ngram_losses"])  # the weights are random, the text is not
    assert figures["by_document"]["documents"][0]["begins"].startswith("the 0 cats")
    assert figures["copying"]["prompt_tokens"] == 16
    assert figures["copying"]["validation"]["shares"]["8"] > 0  # " that eat "
    assert "eat" in figures["copying"]["validation"]["longest"]["text"]


def test_n_grams_take_no_more_than_they_are_told(trained, settings):
    folder = trained("tokenizer=bytes")
    cfg = settings(f"checkpoint={folder}", *SMALL, "ngram_tokens=100", config="evaluate", kind=Evaluate)
    known = ByteTokenizer()
    corpus = script.trained_on(folder, known)
    figures = script.measure(
        cfg, checkpoint.load_model(folder), known, corpus.validation, corpus.train, 32, 32, {"batch": 8}
    )
    assert (figures["ngram_tokens"], figures["training_tokens"]) == (100, len(corpus.train))
    baseline = ngrams.fit(corpus.train.read(0, 100), 257, 3)
    text = corpus.validation.read(0, len(corpus.validation)).astype(np.int64)
    expected = -np.log(ngrams.probabilities(baseline, text))[:, 1:].mean(1)
    np.testing.assert_allclose(figures["ngram_losses"], expected)
    assert len(windows(len(text), 32, 32)) > 8  # it was read in pieces


def test_the_command_saves_its_numbers_and_a_picture_in_the_run(trained, run):
    folder = trained("tokenizer=bytes")
    arguments = [f"checkpoint={folder.parent.parent}"]
    without, result = run(*arguments).out, run(*arguments, "report=true", *SMALL).out
    assert len(without.splitlines()) == 6
    assert result.startswith(without)
    for section in ("for scale", "by position", "by frequency", "by document", "calibration", "copying"):
        assert f"\n{section}" in result
    place = folder.parent.parent / "report_step_00000007"
    assert str(place.with_suffix(".json")) in result
    figures = json.loads(place.with_suffix(".json").read_text())
    assert f"loss           {figures['loss']:.4f} nats" in without
    assert figures["step"] == 7
    assert figures["training_tokens"] == len(Path("train.txt").read_text()) + 1  # end-of-text
    assert place.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert str(place.with_suffix(".png")) in result
    assert checkpoint.find(folder.parent.parent) == folder  # still whole


def test_without_its_training_text_there_is_a_report_of_the_rest(trained, run, tmp_path):
    folder = trained("tokenizer=bytes")
    about = json.loads((folder / "model.json").read_text())
    (tmp_path / "moved").mkdir()
    moved = tmp_path / "moved" / "model"
    weights = checkpoint.load_file(folder / "model.safetensors")
    del about["data"], about["format"]
    checkpoint.save(moved, weights, ByteTokenizer().save, about)
    arguments = [f"checkpoint={moved}", "report=true", "data=files", "data.paths=[held.txt]"]
    result = run(*arguments, "plot=null", "json=figures.json")
    assert "without its training text there are no n-grams, frequencies and copies" in result.err
    assert "by position" in result.out and "copying" not in result.out
    figures = json.loads(Path("figures.json").read_text())
    assert "copying" not in figures and "by_frequency" not in figures and figures["ngram_losses"] == []
    assert not list(Path().glob("*.png"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["json=a.json"], "json needs report=true, got json=a.json"),
        (["report=true", "plot=''"], "plot must be a file, auto or null, got an empty string"),
        (["report=true", "json=nowhere/a.json"], "nowhere/a.json cannot be written: give json=FILE"),
        (["report=true", "json=train.txt/a.json"], "train.txt/a.json cannot be written"),
        (["report=true", "plot=runs"], "runs cannot be written: give plot=FILE"),
    ],
)
def test_what_cannot_be_written_is_refused_before_any_work(trained, settings, arguments, message):
    folder = trained("tokenizer=bytes")
    with pytest.raises(ValueError, match=message):
        cfg = settings(f"checkpoint={folder}", *arguments, config="evaluate", kind=Evaluate)
        for kind in ("json", "plot"):
            script.output(cfg, kind, folder)


def test_files_of_the_report_lie_in_the_run_or_else_where_one_is(trained, settings):
    folder = trained("tokenizer=bytes")
    cfg = settings(f"checkpoint={folder}", "report=true", "plot=null", config="evaluate", kind=Evaluate)
    assert script.output(cfg, "json", folder) == folder.parent.parent / "report_step_00000007.json"
    assert script.output(cfg, "plot", folder) is None
    elsewhere = folder.rename(Path("moved").absolute())
    assert script.output(cfg, "json", elsewhere) == Path("report_moved.json")


def test_a_picture_without_matplotlib_is_named_or_left_out(trained, settings, monkeypatch, capsys):
    folder = trained("tokenizer=bytes")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = f"checkpoint={folder}", "report=true"
    cfg = settings(*arguments, config="evaluate", kind=Evaluate)
    assert script.output(cfg, "plot", folder) is None
    assert "needs matplotlib" in capsys.readouterr().err
    cfg = settings(*arguments, "plot=a.png", config="evaluate", kind=Evaluate)
    with pytest.raises(ValueError, match="needs matplotlib"):
        script.output(cfg, "plot", folder)


@pytest.mark.parametrize("report", ["report=false", "report=true"])
@pytest.mark.parametrize("value", [float("nan"), 3e38])
def test_a_model_that_diverged_is_not_measured(trained, run, tmp_path, capsys, report, value):
    """By its weights, or by what they multiply to."""
    folder = trained("tokenizer=bytes")
    about = without_format(json.loads((folder / "model.json").read_text()))
    weights = checkpoint.load_file(folder / "model.safetensors")
    weights["head.weight"] = torch.full_like(weights["head.weight"], value)
    checkpoint.save(tmp_path / "diverged", weights, ByteTokenizer().save, about)
    arguments = [f"checkpoint={tmp_path}/diverged", report, "data=files", "data.paths=[held.txt]"]
    with pytest.raises(SystemExit) as end:
        run(*arguments, *(["json=figures.json", "plot=null"] if report == "report=true" else []))
    assert end.value.code == 2
    out, error = capsys.readouterr()
    assert "did the training diverge?" in error and "bits per byte" not in out
    assert not Path("figures.json").exists()


def without_format(about: dict) -> dict:
    return {name: value for name, value in about.items() if name not in ("format", "data", "tokenizer")}
