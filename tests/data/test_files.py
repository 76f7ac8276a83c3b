"""Invalid files are refused with their path."""

import errno
import json
from dataclasses import asdict
from typing import Annotated, NotRequired

import pytest
from pydantic import Field, FiniteFloat
from texts import BYTES, FILES
from typing_extensions import TypedDict

from data.config import CHAT
from data.files import check_shape, naming, read_json


class Part(TypedDict):
    size: Annotated[int, Field(ge=0, lt=2**63)]
    share: NotRequired[FiniteFloat]


class Whole(TypedDict):
    parts: dict[str, Part]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "whole.json"


def test_a_file_keeps_keys_that_its_type_does_not_name(path):
    whole = {"parts": {"ä": {"size": 3, "share": 1, "later": [None]}}, "format": 2}
    path.write_text(json.dumps(whole))
    assert read_json(path, Whole) == whole


WRONG = {
    "missing": (None, "whole.json is missing"),
    "empty": (b"\n", "whole.json is empty"),
    "cut": (b'{"parts": {', "whole.json is damaged: Invalid JSON: EOF"),
    "binary": (bytes(range(256)), "whole.json is damaged: Invalid JSON"),
    "not UTF-8": ('{"parts": {"ä": {"size": 3}}}'.encode("latin-1"), "whole.json is damaged: Invalid JSON"),
    "deep": (b"[" * 100_000, "whole.json is damaged: Invalid JSON: recursion limit"),
    "too deep inside a part": (b'{"parts": ' * 100_000, "whole.json is damaged: "),
    "of another kind": (b"5", "whole.json is damaged: it should be an object, got 5"),
    "without a key": (b'{"parts": {"a": {}}}', "whole.json is damaged: parts.a.size is missing"),
    "null": (b'{"parts": null}', "whole.json is damaged: parts should be an object, got None"),
    "a text": (b'{"parts": {"a": {"size": "3"}}}', r"parts\.a\.size should be a valid integer, got '3'"),
    "a fraction": (b'{"parts": {"a": {"size": 3.0}}}', r"parts\.a\.size should be a valid integer, got 3\.0"),
    "true": (
        b'{"parts": {"a": {"size": true}}}',
        r"parts\.a\.size should be a valid integer, got True",
    ),
    "not a number": (b'{"parts": {"a": {"size": 3, "share": NaN}}}', r"parts\.a\.share should be a finite number"),
    "infinite": (b'{"parts": {"a": {"size": 3, "share": 1e999}}}', r"parts\.a\.share should be a finite number"),
    "a thousand digits": (b'{"parts": {"a": {"size": 1%s}}}' % (b"0" * 1000), r"parts\.a\.size should be less than"),
    "ten thousand digits": (b'{"parts": {"a": {"size": 1%s}}}' % (b"0" * 10_000), "whole.json is damaged: "),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_invalid_file_is_one_line_with_its_path_and_the_key(path, wrong):
    content, message = WRONG[wrong]
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_json(path, Whole)
    line = str(caught.value)
    assert line.startswith(str(path)) and "\n" not in line and len(line) < len(str(path)) + 200


@pytest.mark.parametrize(("now", "younger"), [(FILES, {*CHAT, "template", "prompt"}), (BYTES, {"parse_special"})])
def test_settings_of_another_version_can_be_read(now, younger):
    older = {name: value for name, value in asdict(now).items() if name not in younger}
    later = asdict(now) | {"not_known_yet": None}
    assert check_shape(older, type(now), "a") == check_shape(later, type(now), "a") == now
    for name in older:
        with pytest.raises(ValueError, match=f"^a is damaged: {name} is missing$"):
            check_shape({other: value for other, value in older.items() if other != name}, type(now), "a")


def test_a_folder_in_place_of_a_file_is_named(path):
    path.mkdir()
    with pytest.raises(ValueError, match="whole.json cannot be read: Is a directory"):
        read_json(path, Whole)


def test_the_error_of_a_full_disk_names_the_folder(tmp_path):
    with pytest.raises(OSError) as raised, naming(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert raised.value.filename == str(tmp_path)
    with pytest.raises(OSError) as raised, naming(tmp_path):
        raise OSError(errno.ECONNREFUSED, "Connection refused")
    assert raised.value.filename is None
