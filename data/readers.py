r"""Your own files, read as documents: text, rows of JSON, CSV, TSV and Parquet; all but Parquet also compressed.

The end of a file's name, in capitals or not, tells its format. Text files and tables are read as prompts are: a
byte-order mark is left out, every line break (\r\n, \r) becomes \n. Texts in JSON and Parquet stay as they are.

Nothing here holds more than a document, or a small group of them, in memory; of a .json file that is one array, all.
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
BINARY = {  # by its first bytes
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
    b"\xd0\xcf\x11\xe0": "a file of an old Office program",
    b"SQLite format 3": "a database",
    b"PAR1": "Parquet: its name must end in .parquet",
    codecs.BOM_UTF32_LE: "UTF-32: write it as UTF-8, for example by iconv -f UTF-32 -t UTF-8",
    codecs.BOM_UTF32_BE: "UTF-32: write it as UTF-8, for example by iconv -f UTF-32 -t UTF-8",
    codecs.BOM_UTF16_LE: "UTF-16: write it as UTF-8, for example by iconv -f UTF-16 -t UTF-8",
    codecs.BOM_UTF16_BE: "UTF-16: write it as UTF-8, for example by iconv -f UTF-16 -t UTF-8",
}


@dataclass
class Document:
    name: str
    text: str
    file: str | None = None  # that it comes from
    learned: chat.Spans | None = None  # of a conversation: its answers


def find(paths: list[str], endings: tuple[str, ...] = TEXT + ROWS) -> list[str]:
    """The files that the patterns name, sorted, each once; of a folder all those, at any depth, with these endings."""
    found = {}
    for pattern in paths:
        if Path(pattern).is_dir():
            matches = _inside(pattern, endings)
        elif Path(pattern).is_file():  # also where its name looks like a pattern
            matches = [pattern]
        else:
            matches = [p for p in glob.glob(pattern, recursive=True) if Path(p).is_file()]
        if not matches:
            raise ValueError(f"data.paths: no file matches {pattern}, seen from {Path.cwd()}")
        if archives := [path for path in matches if ending(path) in ARCHIVES]:
            raise ValueError(f"{archives[0]} is an archive: unpack it, and give its files")
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
    """What tells a file's format, in small letters: .txt of a/B.TXT.gz."""
    name = Path(path.lower())
    return (name.with_suffix("") if name.suffix in COMPRESSED else name).suffix


def read_file(path: str, data: DataConfig) -> Iterator[Document]:
    """The documents of a file, by the end of its name; what is no known format is read as text.

    Text: one document a file, or several with data.separator between them (a line break: one a line). Others: one
    document a row. ValueError, with the path and the place, for what cannot be read.
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
        raise ValueError(f"{path} has no columns: {', '.join(data.chat_columns())} is for {', '.join(ROWS)}")
    try:
        yield from reader(path, data)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


# --- rows -----------------------------------------------------------------------------------------------------------


def document(row, name: str, where: str, data: DataConfig, file: str | None = None) -> Document:
    """A row of any format as a document. `where` tells a user which row it is."""
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
    text, learned = chat.render(turns, template)
    return Document(name, text, file, learned)


def columns(data: DataConfig, there: list[str], where: str) -> list[str]:
    """Of the columns that are there those that `document` needs; ValueError where one is missing."""
    needed = []
    for setting, column in (data.chat_columns() or {"data.column": data.column}).items():
        needed.append(column if column in there else column.split(".")[0])
        if needed[-1] not in there:
            raise ValueError(f"{where} has no column {column}: set {setting} to one of {', '.join(there)}")
    return needed


def cell(row, column: str, where: str, setting: str = "data.column"):
    """The value of a column; meta.text is what is called text in the value of meta, where no column has that name."""
    if isinstance(row, dict) and column in row:
        return row[column]
    value = row
    for name in column.split("."):
        if not isinstance(value, dict) or name not in value:
            raise ValueError(f"{where} has no {column}: set {setting}, there is {_names(row)}")
        value = value[name]
        if value is None:
            return None
    return value


def _names(row) -> str:
    """The columns of a row, for a message."""
    if not isinstance(row, dict):
        return "null" if row is None else type(row).__name__
    inside = (f"{name}.{key}" for name, value in row.items() if isinstance(value, dict) for key in value)
    return ", ".join([*row, *inside][:40]) or "none"


def _text(value, where: str, errors: str, setting: str = "data.column") -> str:
    """A value of a column as text; null is no text. Half a surrogate pair, which JSON can hold, is no text either."""
    if value is None:
        return ""
    if not isinstance(value, str):
        hint = ", or data.messages_column if these are messages" if isinstance(value, list) else ""
        raise ValueError(f"{where} holds no text but {type(value).__name__}: set {setting}{hint}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        if errors == "strict":
            raise ValueError(
                f"{where} holds half a surrogate pair at character {error.start}; data.encoding_errors=replace puts "
                "U+FFFD there"
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
    """An array of rows, or a row a line."""
    with _open(path) as file:
        if not file.peek().removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            try:
                yield from _json_lines(path, data)
            except ValueError as error:
                raise ValueError(f"{error}; a .json file must be an array of rows, or hold a row a line") from error
            return
        rows = _loads(_decode(file.read(), path, 0, data.encoding_errors), path)
    for i, row in enumerate(rows):
        yield document(row, f"{path}:{i}", f"{path}, row {i + 1}", data, path)


def _loads(text: str, where: str):
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{where}: JSON nested too deep") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: no JSON ({error})") from error
    except ValueError as error:
        raise ValueError(f"{where}: a number of more digits than Python reads") from error


def _table(path: str, data: DataConfig) -> Iterator[Document]:
    """CSV or TSV: names of columns first; a text that holds a separator, a quote or a line break is in quotes."""
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
                        "empty cell what separates it"
                    )
                yield document(row, f"{path}:{i}", where, data, path)
        except csv.Error as error:
            where = f"{path}, the row from line {rows.line_num + 1} on"
            raise ValueError(f"{where}: {error}; a quote in quotes is written twice") from error


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
        raise ValueError(f"{path} is no Parquet file that can be read: {error}") from error


# --- text -----------------------------------------------------------------------------------------------------------


def _plain_text(path: str, data: DataConfig) -> Iterator[Document]:
    """Pieces that hold line breaks only are empty documents."""
    errors = data.encoding_errors
    with _open(path) as file:
        if data.separator is None:
            yield Document(path, _newlines(_decode(file.read(), path, 0, errors)), path)
            return
        for i, (offset, piece) in enumerate(_pieces(file, unescape(data.separator))):
            yield Document(f"{path}:{i}", _newlines(_decode(piece, path, offset, errors)), path)


def unescape(text: str) -> str:
    r"""Line breaks and tabs for \n, \r and \t, which a shell hands on as two characters."""
    return text.replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t")


def _newlines(text: str) -> str:
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text if text.strip("\n") else ""


def _pieces(file: io.BufferedReader, separator: str) -> Iterator[tuple[int, bytes]]:
    """What lies between separators, with its place in the file, read chunk by chunk; a line break is any kind."""
    parts = [part.encode() for part in re.split("\r\n|\r|\n", separator)]
    plain = b"\n".join(parts)
    pattern = re.compile(b"(" + rb"(?:\r\n|\r(?!\n)|\n)".join(map(re.escape, parts)) + b")")
    rest, offset = b"", 0
    while chunk := file.read(max(CHUNK, len(rest))):
        while chunk.endswith(b"\r") and (more := file.read(1)):  # not between \r and \n
            chunk += more
        rest += chunk
        if b"\r" in rest:
            *cut, rest = pattern.split(rest)  # and between the pieces what separates them
        else:
            *pieces, rest = rest.split(plain)
            cut = [part for piece in pieces for part in (piece, plain)]
        for piece, between in zip(cut[::2], cut[1::2], strict=True):
            yield offset, piece
            offset += len(piece) + len(between)
    yield offset, rest


def _open(path: str) -> io.BufferedReader:
    """The bytes of a text file, decompressed by its name; ValueError for what is no text."""
    import pyarrow

    compression = COMPRESSED.get(Path(path).suffix.lower())
    if compression is not None and Path(path).stat().st_size == 0:
        raise ValueError(f"{path} cannot be read: it is empty, not even a compressed file of nothing")
    raw = lzma.LZMAFile(path) if compression == "xz" else pyarrow.input_stream(path, compression=compression)  # noqa: SIM115
    file = io.BufferedReader(raw, CHUNK)
    head = file.peek()
    for beginning, what in BINARY.items():
        if head.startswith(beginning):
            raise ValueError(f"{path} is no text in UTF-8 but {what}")
    if b"\0" in head:
        raise ValueError(f"{path} is no text in UTF-8: it holds NUL bytes, as UTF-16 and binary files do")
    return file


def _decode(content: bytes, path: str, offset: int, errors: str) -> str:
    """Bytes from `offset` of a file on as text, without the byte-order mark at its beginning."""
    try:
        text = content.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: {error.reason} at byte {offset + error.start}; data.encoding_errors=replace puts "
            "U+FFFD there"
        ) from error
    return text.removeprefix("\ufeff") if offset == 0 else text
