"""The text settings of a checkpoint are checked before its corpus is searched for."""

from pathlib import Path

import pytest

from training import checkpoint

DATA = {"source": "files", "paths": ["a"], "max_tokens": None, "validation": [], "validation_share": 0.1}
DATA |= dict.fromkeys(("separator", "wheel", "repo", "config", "revision", "corpora"))
DATA |= {"column": "text", "encoding_errors": "strict", "split": "train"}
TOKENIZER = {"kind": "bytes", "special": ["<|endoftext|>"], "train_chars": 9}
TOKENIZER |= dict.fromkeys(("vocab_size", "pattern", "encoding", "path", "bos_token"))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("data", {"paths": "a"}),
        ("data", {"source": 5}),
        ("data", {"validation": None}),
        ("data", {"validation_share": "0.1"}),
        ("data", {"validation_share": float("nan")}),
        ("data", {"max_tokens": 10**30}),
        ("data", {"column": None}),
        ("data", {"wheel": 5}),
        ("data", {"corpora": ["a"]}),
        ("tokenizer", {"kind": []}),
        ("tokenizer", {"path": {}}),
        ("tokenizer", {"special": "x"}),
        ("tokenizer", {"special": []}),
    ],
)
def test_wrong_text_settings_are_reported_in_one_line_with_the_file(name, changes):
    about = {"data": DATA, "tokenizer": TOKENIZER}
    checkpoint.text_of(about, Path("run"))
    for wrong in (about[name] | changes, {key: about[name][key] for key in about[name] if key not in changes}):
        with pytest.raises(
            ValueError, match=rf"^{name} in run/model.json is damaged: ({name}.)?{next(iter(changes))} "
        ):
            checkpoint.text_of(about | {name: wrong}, Path("run"))


@pytest.mark.parametrize(
    ("name", "changes", "lacking"),
    [
        ("data", {"source": "hub"}, "data=hub needs data.repo"),
        ("data", {"source": "mixture", "corpora": {}}, "data=mixture needs data.corpora"),
        ("data", {"source": "corpus", "paths": []}, "data=corpus needs one folder, data.paths"),
        ("tokenizer", {"kind": "bpe"}, "tokenizer.kind=bpe needs tokenizer.vocab_size"),
        ("tokenizer", {"kind": "tiktoken"}, "tokenizer=tiktoken needs tokenizer.encoding"),
    ],
)
def test_missing_text_settings_are_reported_in_one_line_with_the_file(name, changes, lacking):
    about = {"data": DATA, "tokenizer": TOKENIZER}
    with pytest.raises(ValueError, match=rf"^{name} in run/model.json is damaged: {lacking}.*$"):
        checkpoint.text_of(about | {name: about[name] | changes}, Path("run"))
