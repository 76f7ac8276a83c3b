"""`python -m scripts.doctor`: what it prints and writes, and how it ends."""

import json
import sys

import pytest
from faults import CHARACTERS, OtherText, trained

from insight.doctor import CHECKS
from scripts import doctor
from training import checkpoint

pytestmark = pytest.mark.slow


def main(monkeypatch, *arguments) -> int:
    """The exit code of a command line."""
    monkeypatch.setattr(sys, "argv", ["doctor.py", *arguments])
    try:
        doctor.main()
    except SystemExit as end:
        return end.code
    return 0


def save(model, folder, tokenizer, **about):
    weights, arguments = checkpoint.snapshot(model)
    about = {"step": 40, "seq_len": 24, "precision": "fp32", "tokenizer_hash": CHARACTERS.fingerprint(), **about}
    checkpoint.save(folder, weights, tokenizer.save, arguments | about)


def test_the_settings_of_a_run_are_examined_and_a_healthy_one_ends_with_0(monkeypatch, capsys, tmp_path):
    assert main(monkeypatch, "experiment=smoke", "json=findings.json") == 0
    out = capsys.readouterr().out
    assert "model  new, " in out and f"no findings in {len(CHECKS) - 1} checks" in out
    for check in CHECKS:
        assert f"\n{check} " in out
    written = json.loads((tmp_path / "findings.json").read_text())
    assert written["findings"] == []
    assert [row["check"] for row in written["checks"]] == list(CHECKS)
    assert {path.name for path in tmp_path.iterdir()} <= {"findings.json", "corpora", ".home"}


def test_a_finding_ends_with_1_and_says_what_where_how_much_and_what_to_do(monkeypatch, capsys, tmp_path):
    arguments = [
        "experiment=smoke",
        "model.positions=alibi",
        "optimizer=adamw",
        "optimizer.lr=1.0",
        "json=findings.json",
    ]
    assert main(monkeypatch, *arguments) == 1
    out = capsys.readouterr().out
    (finding,) = json.loads((tmp_path / "findings.json").read_text())["findings"]
    assert finding["check"] == "learning rate" and finding["value"] > finding["bound"]
    for part in ("where", "what", "do"):
        assert finding[part] in out
    assert "1 finding in" in out


def test_a_checkpoint_is_examined_without_its_corpus(monkeypatch, capsys):
    save(trained(40), doctor.Path("healthy"), CHARACTERS)
    assert main(monkeypatch, "checkpoint=healthy") == 0
    out = capsys.readouterr().out
    assert "healthy, 40 steps" in out and "written by the model" in out
    assert "learning rate    not checked: the settings of its training are not known" in out


def test_a_checkpoint_with_the_tokenizer_of_another_corpus_is_found_out(monkeypatch, tmp_path):
    save(trained(5), doctor.Path("ill"), OtherText())
    assert main(monkeypatch, "checkpoint=ill", "json=findings.json") == 1
    findings = json.loads((tmp_path / "findings.json").read_text())["findings"]
    assert findings[0]["check"] == "tokenizer" and "tokenizer/" in findings[0]["do"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoint=nowhere"], "there is no checkpoint at nowhere"),
        (["checkpoint=x", "model=nano"], "a checkpoint has settings of its own: model=nano has no use"),
        (["model.n_heads=7"], "model.d_model must be a multiple of model.n_heads"),
        (["modle=nano"], "modle"),
        (["json=nowhere/a.json"], "nowhere/a.json cannot be written: give json=FILE"),
    ],
    ids=str,
)
def test_a_users_mistake_is_one_line_and_exit_code_2(arguments, message, monkeypatch, capsys):
    assert main(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err
