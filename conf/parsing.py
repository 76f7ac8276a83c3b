"""Turns the config that Hydra composed into checked settings, or into a line that says which is wrong, and how."""

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from data import older

Settings = TypeVar("Settings")
BOUNDS = {"greater_than_equal": "at least", "greater_than": "above", "less_than_equal": "at most", "less_than": "below"}
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "a text"}


def parse(cfg: DictConfig, schema: type[Settings]) -> Settings:
    """The composed config as a `schema` dataclass. ValueError names the setting, its value and what is expected."""
    try:
        values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ValueError(f"{error.full_key} is needed: give {error.full_key}=...") from error
    except OmegaConfBaseException as error:
        reason = str(error).split("\n")[0].replace("'", "")
        if own := reason.partition("ValueError raised while resolving interpolation: ")[2]:
            raise ValueError(own) from error
        raise ValueError(f"{error.full_key}: {reason}" if error.full_key else reason) from error
    return checked(values, schema)


def checked(values: Any, schema: Any) -> Any:
    """The same for a config that is resolved already."""
    try:
        return _adapter(schema).validate_python(_typed(values, schema), extra="forbid")
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
        unknown = [one for one in mistakes if one["type"] == "unexpected_keyword_argument"]
        raise ValueError(_in_a_line((unknown or mistakes)[0], schema)) from None


def _typed(value: Any, kind: Any, key: str = "") -> Any:
    """Adjusts the types of YAML and the command line: a number may be meant as a string, and `true` is not a number."""
    if isinstance(value, list):
        return [_typed(one, kind, key) for one in value]
    if isinstance(value, dict):
        group = next((one for one in (kind, *get_args(kind)) if is_dataclass(one)), None)
        kinds: dict[str, Any] = get_type_hints(group) if group is not None else dict.fromkeys(value, kind)
        dot = "." if key else ""
        return {name: _typed(one, kinds.get(name, Any), f"{key}{dot}{name}") for name, one in value.items()}
    leaves = _leaves(kind)
    if str in leaves and isinstance(value, bool | int | float) and not leaves & {bool, int, float}:
        return str(value)
    if isinstance(value, bool) and leaves & {int, float} and bool not in leaves:
        raise ValueError(f"{key} must be a number, got {str(value).lower()}")
    return value


def _leaves(kind: Any) -> set[Any]:
    """The types that a type is composed of."""
    parts = [part for part in get_args(kind) if not isinstance(part, str)]
    return set().union(*map(_leaves, parts)) if parts else {kind}


def changed(cfg: Any, key: str, value: str) -> Any:
    """Parsed settings with one value changed, as on a command line; ValueError as from parse."""
    if key not in {item.name for item in fields(cfg)}:
        raise ValueError(unknown_key(key, type(cfg)))
    try:
        new: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"{key}={value}"]), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{key} cannot be {value}: {str(error).splitlines()[0]}") from error
    return checked(asdict(cfg) | new, type(cfg))


@cache
def _adapter(schema: Any) -> TypeAdapter:
    return TypeAdapter(schema)


def _in_a_line(mistake: Any, schema: type) -> str:
    """An error of pydantic's in one line."""
    kind, where, value, more = mistake["type"], mistake["loc"], mistake["input"], mistake.get("ctx", {})
    if kind == "unexpected_keyword_argument":
        return unknown_key(".".join(map(str, where)), schema)
    known, parts = setting_names(schema), [str(part) for part in where]
    while parts and ".".join(parts) not in known:  # an index in a list, or a type in a union
        parts.pop()
    key = ".".join(parts)
    if kind == "missing":
        return f"{'.'.join(map(str, where))} is needed: give {'.'.join(map(str, where))}=..."
    if kind == "value_error":
        message = str(more["error"])
        return f"{key} {message}" if message.startswith("must ") else _with_group(message, key, schema)
    if isinstance(value, float) and not math.isfinite(value):
        return f"{key} must be {'a number' if math.isnan(value) else 'finite'}, got {value}"
    if kind in BOUNDS:
        (bound,) = more.values()
        if isinstance(bound, float):
            bound, value = int(bound) if bound.is_integer() and abs(bound) < 1e5 else bound, float(value)
        return f"{key} must be {BOUNDS[kind]} {bound}, got {value}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", more["expected"])
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        if current := older.VALUES.get((parts[-1], str(value))):
            hint = f" (it is called {current} now)"
        return f"{key} must be one of {', '.join(choices)}, got {value}{hint}"
    if kind == "list_type":
        return f"{key}: must be a list, such as [one,two], got {value}"
    expected = KINDS.get(kind.split("_")[0])
    if expected is None:
        return f"{key}: {mistake['msg'].removeprefix('Input ')}, got {value}"
    return f"{key}: Value {value} of type {type(value).__name__} could not be converted to {expected}"


def _with_group(message: str, group: str, schema: type) -> str:
    """The message of a group's own rule, with the group's name before its settings' names."""
    own = {name.rpartition(".")[2] for name in setting_names(schema) if group and name.startswith(f"{group}.")}
    names = "|".join(name if "_" in name else f"{name}(?==)|^{name}" for name in sorted(own, key=len, reverse=True))
    return re.sub(rf"(?<![\w.])({names})\b", rf"{group}.\1", message) if own else message


def unknown_key(key: str, schema: type) -> str:
    """The message for a setting that does not exist, with the nearest existing name."""
    known = setting_names(schema)
    group, dot, last = key.rpartition(".")
    if (current := f"{group}{dot}{older.NAMES.get(last)}") in known:
        return f"unknown setting {key}: it is called {current} now"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if not near:  # only the last part of a name, or in another group
        by_last = {name.split(".")[-1]: name for name in sorted(known, key=lambda name: -name.count("."))}
        near = [by_last[last] for last in difflib.get_close_matches(key.split(".")[-1], by_last, n=1)]
    return f"unknown setting {key}: " + (f"did you mean {near[0]}?" if near else "--help lists all there are")


def setting_names(schema: type) -> list[str]:
    """All settings by their dotted names, and the groups themselves."""
    return list(_names(schema))


def _names(schema: Any, prefix: str = "") -> Iterator[str]:
    for item in fields(schema):
        yield prefix + item.name
        for kind in get_args(item.type) or [item.type]:
            if isinstance(kind, type) and is_dataclass(kind):  # not a bound of Annotated, which is one, too
                yield from _names(kind, f"{prefix}{item.name}.")
