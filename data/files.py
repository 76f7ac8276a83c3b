"""Files that others wrote, or that a disk damaged: what stands in them is checked before it is believed."""

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

OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def read_json(path: str | Path, shape: Any) -> Any:
    """What a JSON file holds, which must have `shape`: a type with those of its parts, for dicts a TypedDict.

    Types are taken strictly (no "1" or 1.0 or true for 1), keys that the shape does not name are kept as they are. For
    numbers write pydantic's FiniteFloat, since JSON's reader takes NaN and 1e999, and bounds for whole ones, which
    may have thousands of digits. ValueError, a line with the file and the place in it, for whatever does not fit.
    """
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    return parse_json(content, shape, str(path))


def parse_json(content: bytes | str, shape: Any, name: str) -> Any:
    """As read_json, of what is there already; `name` says what it is in the ValueError."""
    if not content.strip():
        raise ValueError(f"{name} is empty")
    with _in_a_line(name):
        return _adapter(shape).validate_json(content, strict=True, extra="allow")


def check_shape(value: Any, shape: Any, name: str) -> Any:
    """The same of what another reader has read; where `shape` is a dataclass, one of these."""
    with _in_a_line(name):
        adapter = _adapter(shape)
        if is_dataclass(shape):
            return adapter.validate_json(json.dumps(value, default=repr), strict=True, extra="ignore")
        return adapter.validate_python(value, strict=True, extra="allow")


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Of a disk that is full, read-only or broken, where the OSError names no file, it names this folder."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in OF_A_DISK:
            error.filename = str(folder)
        raise


@contextmanager
def _in_a_line(name: str) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise ValueError(f"{name} is damaged: {_in_words(error)}") from None


@cache
def _adapter(shape: Any) -> TypeAdapter:
    return TypeAdapter(shape)


def _in_words(error: ValidationError) -> str:
    """The first of what is wrong."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or "it"
    if first["type"] == "json_invalid":
        return first["msg"]
    if (
        first["type"] == "value_error"
    ):  # by a rule of a dataclass, which names the settings itself, or by one of a field
        return f"{where} {first['ctx']['error']}" if first["loc"] else str(first["ctx"]["error"])
    if first["type"] == "missing":
        return f"{where} is missing"
    return f"{where} {first['msg'].removeprefix('Input ')}, got {reprlib.repr(first['input'])}"
