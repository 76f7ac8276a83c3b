"""The command, on a checkpoint of which all is known: insight.induction."""

import io
import json
import re
import sys

import pytest
from commands import command

from conf.scripts import Explain
from data.tokenizer import CharacterTokenizer
from insight.induction import INDUCTION, PREVIOUS, SINK, WATCHER, induction_model
from scripts.explain import METHODS, explain
from scripts.explanations.attention import remark
from training import checkpoint

TEXT = "_cabda"  # b comes after the first a


@pytest.fixture
def folder(tmp_path):
    tokenizer = CharacterTokenizer("_abcdefg")
    weights, about = checkpoint.snapshot(induction_model(tokenizer.vocab_size, max_seq_len=12))
    about |= {"step": 7, "seq_len": 12, "precision": "fp32"}
    checkpoint.save(tmp_path / "step", weights, tokenizer.save, about)
    return tmp_path / "step"


@pytest.fixture
def run(folder, settings, capsys, tmp_path):
    """Explains with settings -> (what was printed, what the JSON holds)."""

    def do(*overrides: str, text: str = TEXT) -> tuple[str, dict]:
        path = tmp_path / "a.json"
        given = [f"checkpoint={folder}", f"json={path}", *([f"prompt={text}"] if text else []), *overrides]
        explain(settings(*given, config="explain", kind=Explain))
        return capsys.readouterr().out, json.loads(path.read_text(encoding="utf-8"))

    return do


@pytest.mark.slow
def test_heads_that_attend_without_effect_are_marked(run):
    out, found = run()
    heads = {(row["layer"], row["head"]): row for row in found["heads"]}
    assert found["labels"] == list(TEXT)
    assert found["answer_label"] == "b"
    assert found["key"] == 3
    for head, weight, effect, expected in (
        (INDUCTION, 1, 2.2, ""),
        (WATCHER, 1, 0, "attends, no effect"),
        (SINK, 0, 0, "attends, no effect"),
        (PREVIOUS, 0, 2.9, "effect, without attending there"),
    ):
        row = heads[head]
        assert row["weight"] == pytest.approx(weight, abs=1e-3)
        assert row["effect"] == pytest.approx(effect, abs=0.1)
        assert row["remark"] == expected
        (line,) = [line for line in out.splitlines() if line.strip().startswith(f"{head[0]}.{head[1]} ")]
        assert line.split()[1] == f"{row['weight']:.4f}"
        assert f"{row['effect']:+.4f}" in line
        assert line.strip().endswith(expected)
    assert "weight: on token 3 (b)" in out
    assert "A weight is not a cause" in out


@pytest.mark.slow
def test_with_a_corrupted_text_the_table_says_what_patching_each_head_recovers(run):
    out, found = run("corrupted=_cebda")
    shares = {(row["layer"], row["head"]): row["recovered"] for row in found["heads"]}
    assert shares == pytest.approx({PREVIOUS: 1, SINK: 0, INDUCTION: 1, WATCHER: 0}, abs=1e-3)
    assert "corrupted   2 a > e" in out
    assert out.count("100.0 %") == 2


def test_patching_everything_recovers_all_and_nothing_none(run):
    out, found = run("method=patching", "corrupted=_cebda")
    expected = {"nothing": 0, "everything": 1, "head 0.0": 1, "head 0.1": 0, "head 1.0": 1, "head 1.1": 0}
    expected |= {"attention 0": 1, "attention 1": 1, "feed-forward 0": 0, "feed-forward 1": 0}
    assert found["parts"] == pytest.approx(expected, abs=1e-3)
    lines = [line.split() for line in out.splitlines()]
    assert ["nothing", "0.0", "%"] in lines
    assert ["everything", "100.0", "%"] in lines
    percent = ["100.0", "%", "0.0", "%", "0.0", "%"]
    assert ["2", "a", "*", *percent] in lines


def test_the_score_compares_two_answers_where_the_corrupted_text_has_another(run):
    out, found = run("method=swap", "corrupted=_cadda")
    assert (found["against"], found["score"]) == (4, pytest.approx(10, abs=0.1))
    assert "log p(b) - log p(d)" in out
    one, whole = found["swaps"]
    assert (one["place"], one["token"]) == (3, "d")
    assert one["effect"] == whole["effect"] == pytest.approx(10 + 5, abs=5)
    assert whole["best"].startswith("d ")


def test_a_swap_of_several_tokens_is_told_apart(run):
    _, found = run("method=swap", "corrupted=_gecda")
    assert [row["place"] for row in found["swaps"]] == [1, 2, 3, None]
    alone = [row["effect"] for row in found["swaps"]]
    assert alone[0] == pytest.approx(0, abs=1e-4)  # what stood at 1 is not asked for
    assert min(alone[1:]) > 1


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_prints_a_table_and_writes_figures_and_a_picture(run, tmp_path, method):
    extra = ["corrupted=_cebda"] if method in ("swap", "patching") else []
    out, found = run(f"method={method}", f"plot={tmp_path}/a.png", *extra)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert found["method"] == method
    assert found["probability"] > 0.99
    assert out.endswith(f"{tmp_path}/a.png\n{tmp_path}/a.json\n")
    assert "answer      b, probability 0.99" in out
    assert "7 steps" in out


def test_attention_has_a_page_that_says_what_the_table_says(run, tmp_path):
    out, found = run(f"page={tmp_path}/a.html", "corrupted=_cebda")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    (data,) = re.findall(r"^const data = (.*);$", page, re.MULTILINE)
    assert json.loads(data)["heads"] == found["heads"]
    assert json.loads(data)["lines"][1] == "corrupted   2 a > e"
    assert f"{tmp_path}/a.html\n" in out


def test_tokens_are_weighed(run):
    for method in ("occlusion", "integrated_gradients"):
        out, found = run(f"method={method}")
        assert max(range(6), key=found["effects"].__getitem__) == 3
        assert f"3  b      {found['effects'][3]:+.4f}  ++++++++++++++++++++" in out
    assert found["complete"] is True
    assert sum(found["effects"]) == pytest.approx(found["difference"], rel=0.01)
    assert "\ncomplete: the shares sum to" in out


def test_too_few_steps_are_called_incomplete(run):
    out, found = run("method=integrated_gradients", "max_steps=1")
    assert (found["complete"], found["steps"]) == (False, 1)
    assert "\nNOT COMPLETE: the shares sum to" in out


def test_parts_are_ablated(run):
    _, found = run("method=ablation")
    effects = {row["part"]: row["effect"] for row in found["parts"]}
    assert effects["head 1.0"] == pytest.approx(effects["attention 1"]) == pytest.approx(effects["block 1"])
    assert effects["head 1.0"] > 2
    assert [row["probability"] for row in found["parts"] if row["part"] == "head 1.0"] == pytest.approx([1 / 9])
    assert effects["feed-forward 0"] == pytest.approx(0, abs=1e-5)
    mean = {row["part"]: row["effect"] for row in run("method=ablation", "ablation=mean")[1]["parts"]}
    assert 0 < mean["head 1.0"] < effects["head 1.0"]


def test_the_lens_shows_where_the_answer_appears(run):
    _, found = run("method=lens")
    assert found["answer_probability"][-1] > 0.99
    assert found["answer_rank"][-1] == 1
    assert max(found["answer_probability"][:-1]) < 0.2
    assert found["best_labels"][-1][-1] == "b"


def test_the_answer_may_be_given(run):
    out, found = run("method=lens", "answer=c")
    assert found["answer_label"] == "c"
    assert "answer      c, probability 0.0000; the most likely is b 0.99" in out


def test_the_text_may_be_piped_in(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT + "\n"))
    assert run("method=lens", text="")[1]["labels"] == list(TEXT)


def test_nothing_is_no_text(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    with pytest.raises(ValueError, match="there is no text to explain"):
        run(text="")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "text", "message"),
    [
        ([], "_cabdacabdacab", "the text has 14 tokens, the model reads max_seq_len 12"),
        ([], "xyz", "does not know the characters 'xyz'"),
        (["method=patching"], TEXT, "method=patching needs corrupted"),
        (["method=patching", "corrupted=_ca"], TEXT, r"as many tokens as the text, got 3 and 6: _ \| c \| a and _"),
        (["method=patching", f"corrupted={TEXT}"], TEXT, "corrupted must differ"),
        (["page=nowhere/a.html"], TEXT, "nowhere/a.html cannot be written: give page=FILE"),
        (["method=patching", "corrupted=_gabda"], TEXT, "corrupted must change the score"),
        (["method=lens", "corrupted=_gabda"], TEXT, "corrupted has no effect with method=lens"),
        (["method=lens", "page=a.html"], TEXT, "page has no effect with method=lens, only with attention"),
        (["corrupted=_gabda", "replacement=a"], TEXT, "give corrupted or replacement"),
        (["answer=ab"], TEXT, r"answer must be one token, got 2 in 'ab': a \| b"),
        (["answer=''"], TEXT, "answer must be one token, got 0"),
        (["against=b"], TEXT, "two tokens, got 'b' for both"),
        (["replacement=ab"], TEXT, "replacement must be one token"),
        (["key=6"], TEXT, "key must be the number of a token, at most 5, got 6"),
        (["method=ocklusion"], TEXT, "did you mean occlusion"),
        (["ablation=median"], TEXT, "ablation must be one of zero, mean"),
    ],
)
def test_what_cannot_be_explained_is_one_line(run, overrides, text, message):
    with pytest.raises(ValueError, match=message):
        run(*overrides, text=text)


def test_without_captum_attention_asks_which_token_matters(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "captum", None)
    with pytest.raises(ValueError, match=r"pip install -c requirements.lock captum; or say which .*key=0"):
        run()
    assert run("key=3")[1]["heads"][2]["weight"] > 0.999
    run("method=ablation")


@pytest.mark.parametrize("given", [["method=occlusion"], ["method=integrated_gradients", "max_steps=1000000"]])
def test_a_batch_that_this_machine_does_not_hold_is_refused(run, folder, monkeypatch, given):
    model = checkpoint.load_model(folder)
    monkeypatch.setattr("scripts.explain.estimate.available_memory", lambda: 2000)
    monkeypatch.setattr("scripts.explain.checkpoint.load_model", lambda *_: model)
    with pytest.raises(ValueError, match="^batch: [0-9,]+ texts of 6 tokens at once needs"):
        run(*given, "batch=1000000")


@pytest.mark.slow
def test_it_is_a_command(folder, tmp_path):
    explain = "-m", "scripts.explain", f"checkpoint={folder}"
    good = command(*explain, "method=lens", "--", "_cabda")
    assert good.returncode == 0, good.stderr
    assert "block 1    b            0.99" in good.stdout
    bad = command(*explain, "answer=ab", "--", "_cabda")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "error: answer must be one token, got 2 in 'ab': a | b\n"
    assert {path.name for path in tmp_path.iterdir()} <= {"step", ".home"}


def test_in_a_short_text_a_look_is_more_than_an_even_share():
    row = {"most": 0.45, "weight": 0.1, "effect": 0.0}
    assert [remark(row, 1.0, n) for n in (4, 10)] == ["", "attends, no effect"]


@pytest.mark.parametrize("method", ["attention", "occlusion"])
def test_a_model_with_a_number_that_is_none_is_not_explained(run, folder, method):
    """Also where it does not reach the answer: of a token that the text does not have."""
    weights = checkpoint.load_file(folder / "model.safetensors")
    weights["embedding.weight"][7] = float("nan")
    about = json.loads((folder / "model.json").read_text())
    del about["format"]
    checkpoint.save(folder, weights, CharacterTokenizer("_abcdefg").save, about)
    with pytest.raises(ValueError, match=r"embedding\.weight holds numbers that are not finite: did the training"):
        run(f"method={method}")
