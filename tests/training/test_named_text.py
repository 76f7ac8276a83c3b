"""What a checkpoint says of its text is checked before a corpus is looked for."""

from pathlib import Path

import pytest

from training import checkpoint

DATA = {"source": "files", "paths": ["a"], "max_tokens": None, "validation": [], "validation_share": 0.1}
TOKENIZER = {"kind": "bytes", "vocab_size": None, "encoding": None, "path": None, "special": [], "train_chars": 9}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("data", {"paths": "a"}),
        ("data", {"source": 5}),
        ("data", {"validation": None}),
        ("data", {"validation_share": "0.1"}),
        ("data", {"max_tokens": 10**30}),
        ("tokenizer", {"kind": []}),
        ("tokenizer", {"path": {}}),
        ("tokenizer", {"special": "x"}),
    ],
)
def test_settings_of_a_text_with_wrong_values_are_a_line_with_the_file(name, changes):
    about = {"data": DATA, "tokenizer": TOKENIZER}
    checkpoint.check_text(about, Path("run"))
    for wrong in (about[name] | changes, {key: about[name][key] for key in about[name] if key not in changes}):
        with pytest.raises(ValueError, match=rf"^{name} in run/model.json is damaged: {next(iter(changes))} "):
            checkpoint.check_text(about | {name: wrong}, Path("run"))
