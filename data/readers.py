r"""Reads your own files as documents: text, and rows of JSON, CSV, TSV and Parquet; all but Parquet also compressed.

A file's suffix, in upper or lower case, gives its format. In text files and tables a byte-order mark is dropped and
every line break (\r\n, \r) becomes \n, as in prompts. Strings in JSON and Parquet stay as they are.

Memory holds one document, or a small group, at a time; but all of a .json file that is one array.
"""

import codecs
import csv
import glob
import io
import json
import lzma
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data import chat
from data.config import DataConfig

CHUNK = 2**20  # bytes read at once
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
TEXT = (".txt", ".text")
ROWS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
ARCHIVES = (".zip", ".tar", ".tgz", ".tbz2", ".txz", ".7z", ".rar")
BINARY = {  # by first bytes
    b"%PDF-": "a PDF",
    b"PK\x03\x04": "a ZIP archive, as .docx, .xlsx and .epub are",
    b"\x1f\x8b": "compressed by gzip: its name must end in .gz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: its name must end in .zst",
    b"BZh91AY&SY": "compressed by bzip2: its name must end in .bz2",
    b"\xfd7zXZ\0": "compressed by xz: its name must end in .xz",
    b"7z\xbc\xaf": "a 7z archive",
    b"Rar!\x1a": "a RAR archive",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"GIF89a": "a picture",
    b"\xd0\xcf\x11\xe0": "a file of an old Office format",
    b"SQLite format 3": "a database",
    b"PAR1": "Parquet: its name must end in .parquet",
    codecs.BOM_UTF32_LE: "UTF-32: convert it to UTF-8, for example by iconv -f UTF-32 -t UTF-8",
    codecs.BOM_UTF32_BE: "UTF-32: convert it to UTF-8, for example by iconv -f UTF-32 -t UTF-8",
    codecs.BOM_UTF16_LE: "UTF-16: convert it to UTF-8, for example by iconv -f UTF-16 -t UTF-8",
    codecs.BOM_UTF16_BE: "UTF-16: convert it to UTF-8, for example by iconv -f UTF-16 -t UTF-8",
}


@dataclass
class Document:
    name: str
    text: str
    file: str | None = None  # path of the file it comes from
    answers: chat.Spans | None = None  # of a conversation: the spans to train on


def find(paths: list[str], endings: tuple[str, ...] = TEXT + ROWS) -> list[str]:
    """Returns the files that match patterns, sorted, each once; of a folder, all with these endings, at any depth."""
    found = {}
    for pattern in paths:
        if Path(pattern).is_dir():
            matches = _inside(pattern, endings)
        elif Path(pattern).is_file():  # even if its name looks like a pattern
            matches = [pattern]
        else:
            matches = [p for p in glob.glob(pattern, recursive=True) if Path(p).is_file()]
        if not matches:
            raise ValueError(f"data.paths: no file matches {pattern} (the current folder is {Path.cwd()})")
        if archives := [path for path in matches if ending(path) in ARCHIVES]:
            raise ValueError(f"{archives[0]} is an archive: unpack it and give its files")
        if strange := [path for path in matches if any("\ud800" <= letter <= "\udfff" for letter in path)]:
            raise ValueError(f"data.paths: {strange[0]!a} has a name that is not UTF-8: rename it")
        found.update({os.path.abspath(path): path for path in sorted(matches, reverse=True)})
    return sorted(found.values())


def _inside(folder: str, endings: tuple[str, ...]) -> list[str]:
    every: list[str] = []
    errors: list[OSError] = []
    for place, folders, files in os.walk(folder, onerror=errors.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        every += [os.path.join(place, name) for name in files if not name.startswith(".")]
    if errors:
        raise ValueError(f"data.paths: {errors[0].filename} cannot be read: {errors[0].strerror}")
    found = [path for path in every if ending(path) in endings]
    if not found:
        others = ", ".join(sorted({ending(path) or Path(path).name for path in every})[:20])
        raise ValueError(
            f"data.paths: {folder} is a folder without {', '.join(endings)}; "
            + (
                f"it holds {others}: give a pattern of its files, such as {Path(folder)}/*.EXT"
                if every
                else "it is empty"
            )
        )
    return found


def ending(path: str) -> str:
    """Returns the suffix that gives a file's format, in lower case: .txt for a/B.TXT.gz."""
    name = Path(path.lower())
    return (name.with_suffix("") if name.suffix in COMPRESSED else name).suffix


def read_file(path: str, data: DataConfig) -> Iterator[Document]:
    """Yields the documents of a file, read by its suffix; an unknown suffix is read as text.

    A text file is one document, or several separated by data.separator (a line break: one per line). In other formats
    each row is a document. Raises a ValueError with the path and the position for what cannot be read.
    """
    readers = {
        ".parquet": _parquet,
        ".jsonl": _json_lines,
        ".ndjson": _json_lines,
        ".json": _json,
        ".csv": _table,
        ".tsv": _table,
    }
    reader = readers.get(ending(path), _plain_text)
    if reader == _plain_text and data.chat_columns():
        raise ValueError(f"{path} has no columns: {', '.join(data.chat_columns())} needs {', '.join(ROWS)}")
    try:
        yield from reader(path, data)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


# --- rows -----------------------------------------------------------------------------------------------------------


def document(row, name: str, where: str, data: DataConfig, file: str | None = None) -> Document:
    """Returns a row of any format as a document. `where` names the row in error messages."""
    errors = data.encoding_errors
    if not (settings := data.chat_columns()):
        return Document(name, _text(cell(row, data.column, where), where, errors), file)
    template = {role: unescape(text) for role, text in data.template.items()}
    values = [cell(row, column, where, setting) for setting, column in settings.items()]
    if len(values) == 1:
        turns = chat.turns(values[0], template, where, lambda content, place: _text(content, place, errors))
    else:
        pairs = zip(("user", chat.ANSWERS), values, settings, strict=True)
        turns = [(role, _text(value, where, errors, setting)) for role, value, setting in pairs]
    text, answers = chat.render(turns, template)
    return Document(name, text, file, answers)


def columns(data: DataConfig, there: list[str], where: str) -> list[str]:
    """Returns the columns that `document` needs, of those that exist; raises a ValueError if one is missing."""
    needed = []
    for setting, column in (data.chat_columns() or {"data.column": data.column}).items():
        needed.append(column if column in there else column.split(".")[0])
        if needed[-1] not in there:
            raise ValueError(f"{where} has no column {column}: set {setting} to one of {', '.join(there)}")
    return needed


def cell(row, column: str, where: str, setting: str = "data.column"):
    """Returns the value of a column; meta.text is the key text in column meta, if no column is named meta.text."""
    if isinstance(row, dict) and column in row:
        return row[column]
    value = row
    for name in column.split("."):
        if not isinstance(value, dict) or name not in value:
            raise ValueError(f"{where} has no {column}, it has {_names(row)}: set {setting}")
        value = value[name]
        if value is None:
            return None
    return value


def _names(row) -> str:
    """Returns the columns of a row, for an error message."""
    if not isinstance(row, dict):
        return "null" if row is None else type(row).__name__
    inside = (f"{name}.{key}" for name, value in row.items() if isinstance(value, dict) for key in value)
    return ", ".join([*row, *inside][:40]) or "none"


def _text(value, where: str, errors: str, setting: str = "data.column") -> str:
    """Returns a value as text; null is empty text. Half a surrogate pair, which JSON allows, is an encoding error."""
    if value is None:
        return ""
    if not isinstance(value, str):
        hint = ", or data.messages_column if these are messages" if isinstance(value, list) else ""
        raise ValueError(f"{where} must have text, got {type(value).__name__}: set {setting}{hint}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        if errors == "strict":
            raise ValueError(
                f"{where} has half a surrogate pair at character {error.start}; data.encoding_errors=replace makes it "
                "U+FFFD"
            ) from error
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def _json_lines(path: str, data: DataConfig) -> Iterator[Document]:
    with _open(path) as file:
        for i, (offset, line) in enumerate(_pieces(file, "\n")):
            if text := _decode(line, path, offset, data.encoding_errors).strip():
                where = f"{path}, line {i + 1}"
                yield document(_loads(text, where), f"{path}:{i}", where, data, path)


def _json(path: str, data: DataConfig) -> Iterator[Document]:
    """Reads an array of rows, or one row per line."""
    with _open(path) as file:
        if not file.peek().removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            try:
                yield from _json_lines(path, data)
            except ValueError as error:
                raise ValueError(f"{error}; a .json file must be an array of rows, or have one row per line") from error
            return
        rows = _loads(_decode(file.read(), path, 0, data.encoding_errors), path)
    for i, row in enumerate(rows):
        yield document(row, f"{path}:{i}", f"{path}, row {i + 1}", data, path)


def _loads(text: str, where: str):
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{where}: the JSON is nested too deep") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error})") from error
    except ValueError as error:
        raise ValueError(f"{where}: a number has more digits than Python reads") from error


def _table(path: str, data: DataConfig) -> Iterator[Document]:
    """Reads CSV or TSV: the first line names the columns; a text with a separator, quote or line break is quoted."""
    csv.field_size_limit(2**31 - 1)
    with _open(path) as file:
        lines = (_decode(line, path, at, data.encoding_errors) + "\n" for at, line in _pieces(file, "\n"))
        rows = csv.DictReader(lines, delimiter="\t" if ending(path) == ".tsv" else ",", strict=True)
        i = -1
        try:
            for i, row in enumerate(rows):
                where = f"{path}, line {rows.line_num}"
                if None in row:
                    raise ValueError(f"{where} has more cells than the first line: a text with commas needs quotes")
                if None in row.values():
                    raise ValueError(
                        f"{where} has fewer cells than the first line: a text with line breaks needs quotes, and an "
                        "empty cell its separator"
                    )
                yield document(row, f"{path}:{i}", where, data, path)
        except csv.Error as error:
            where = f"{path}, the row that starts at line {rows.line_num + 1}"
            raise ValueError(f"{where}: {error}; double a quote within quotes") from error


def _parquet(path: str, data: DataConfig) -> Iterator[Document]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path)
        needed = columns(data, file.schema_arrow.names, path)
        i = 0
        for batch in file.iter_batches(batch_size=256, columns=needed):
            for row in batch.to_pylist():
                yield document(row, f"{path}:{i}", f"{path}, row {i}", data, path)
                i += 1
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a valid Parquet file: {error}") from error


# --- text -----------------------------------------------------------------------------------------------------------


def _plain_text(path: str, data: DataConfig) -> Iterator[Document]:
    """Reads text; a piece of only line breaks is an empty document."""
    errors = data.encoding_errors
    with _open(path) as file:
        if data.separator is None:
            yield Document(path, _newlines(_decode(file.read(), path, 0, errors)), path)
            return
        for i, (offset, piece) in enumerate(_pieces(file, unescape(data.separator))):
            yield Document(f"{path}:{i}", _newlines(_decode(piece, path, offset, errors)), path)


def unescape(text: str) -> str:
    r"""Replaces \n, \r and \t, which a shell passes as two characters, by line breaks and tabs."""
    return text.replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t")


def _newlines(text: str) -> str:
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text if text.strip("\n") else ""


def _pieces(file: io.BufferedReader, separator: str) -> Iterator[tuple[int, bytes]]:
    """Yields the pieces between separators with their offsets, reading chunk by chunk; \\n matches any line break."""
    parts = [part.encode() for part in re.split("\r\n|\r|\n", separator)]
    plain = b"\n".join(parts)
    pattern = re.compile(b"(" + rb"(?:\r\n|\r(?!\n)|\n)".join(map(re.escape, parts)) + b")")
    rest, offset = b"", 0
    while chunk := file.read(max(CHUNK, len(rest))):
        while chunk.endswith(b"\r") and (more := file.read(1)):  # a chunk must not end between \r and \n
            chunk += more
        rest += chunk
        if b"\r" in rest:
            *cut, rest = pattern.split(rest)  # pieces and separators, alternating
        else:
            *pieces, rest = rest.split(plain)
            cut = [part for piece in pieces for part in (piece, plain)]
        for piece, between in zip(cut[::2], cut[1::2], strict=True):
            yield offset, piece
            offset += len(piece) + len(between)
    yield offset, rest


def _open(path: str) -> io.BufferedReader:
    """Opens a text file as bytes, decompressed by its suffix; raises a ValueError if it is binary."""
    import pyarrow

    compression = COMPRESSED.get(Path(path).suffix.lower())
    if compression is not None and Path(path).stat().st_size == 0:
        raise ValueError(f"{path} cannot be read: it is empty, which no compressed file is")
    raw = lzma.LZMAFile(path) if compression == "xz" else pyarrow.input_stream(path, compression=compression)  # noqa: SIM115
    file = io.BufferedReader(raw, CHUNK)
    head = file.peek()
    for first_bytes, what in BINARY.items():
        if head.startswith(first_bytes):
            raise ValueError(f"{path} is not UTF-8 text but {what}")
    if b"\0" in head:
        raise ValueError(f"{path} is not UTF-8 text: it has NUL bytes, as UTF-16 and binary files do")
    return file


def _decode(content: bytes, path: str, offset: int, errors: str) -> str:
    """Decodes a file's bytes from `offset` on, without a byte-order mark at the start of the file."""
    try:
        text = content.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: {error.reason} at byte {offset + error.start}; data.encoding_errors=replace makes "
            "it U+FFFD"
        ) from error
    return text.removeprefix("\ufeff") if offset == 0 else text
