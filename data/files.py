"""Reads files that may be damaged or come from elsewhere: their content is validated before it is used."""

import errno
import json
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def read_json(path: str | Path, shape: Any) -> Any:
    """Returns the content of a JSON file, which must have the type `shape`; for dicts, a TypedDict.

    Types are strict (no "1", 1.0 or true for 1); keys that `shape` does not name are kept as they are. Declare floats
    as pydantic's FiniteFloat, since the JSON parser accepts NaN and 1e999, and give integers bounds, since they may
    have thousands of digits. Raises a ValueError of one line, with the file and the key, for whatever does not fit.
    """
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    return parse_json(content, shape, str(path))


def parse_json(content: bytes | str, shape: Any, name: str) -> Any:
    """Like read_json, for content already in memory; `name` is what the ValueError calls it."""
    if not content.strip():
        raise ValueError(f"{name} is empty")
    with _one_line_error(name):
        return _adapter(shape).validate_json(content, strict=True, extra="allow")


def check_shape(value: Any, shape: Any, name: str) -> Any:
    """Like read_json, for a parsed value; if `shape` is a dataclass, returns an instance of it."""
    with _one_line_error(name):
        adapter = _adapter(shape)
        if is_dataclass(shape):
            return adapter.validate_json(json.dumps(value, default=repr), strict=True, extra="ignore")
        return adapter.validate_python(value, strict=True, extra="allow")


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Names this folder in an OSError of a full, read-only or broken disk that names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in DISK_ERRORS:
            error.filename = str(folder)
        raise


@contextmanager
def _one_line_error(name: str) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise ValueError(f"{name} is damaged: {_describe(error)}") from None


@cache
def _adapter(shape: Any) -> TypeAdapter:
    return TypeAdapter(shape)


def _describe(error: ValidationError) -> str:
    """Describes the first validation error."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or "it"
    if first["type"] == "json_invalid":
        return first["msg"]
    if first["type"] == "value_error":  # from a dataclass's rule, which names the settings itself, or from a field's
        return f"{where} {first['ctx']['error']}" if first["loc"] else str(first["ctx"]["error"])
    if first["type"] == "missing":
        return f"{where} is missing"
    return f"{where} {first['msg'].removeprefix('Input ')}, got {reprlib.repr(first['input'])}"
