"""Settings of a command line that Hydra's grammar would refuse: quoted, or given back with the quotes they need.

https://hydra.cc/docs/1.3/advanced/override_grammar/basic/ says what it takes without quotes.
"""

import re
import shlex
from dataclasses import is_dataclass
from typing import Any, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, Quote, QuotedString
from hydra.errors import HydraException

MOST_ITEMS = 2000  # of a list; the parser's time grows faster than a list does
SHOWN = 200  # characters of a setting that cannot be read
IF_ONE = "; or, where the commas belong to one text: "


def readable(argument: str, schema: type, several: bool) -> str:
    """A setting, name=value, as Hydra reads it.

    A text is what stands there, also where Hydra's grammar would take it for a number, a list or several values; and so
    is any other value that the grammar refuses. ValueError, with the setting as it can be pasted into a shell, for what
    has parts: a list, or in `several` runs the values of each. What is no setting, an option say, stays as it is.
    A list of plain words or numbers needs no brackets: runs=runs/A,runs/B is runs=[runs/A,runs/B].
    """
    name, equals, value = argument.partition("=")
    if not equals or argument.startswith("-"):
        return argument
    if any("\ud800" <= letter <= "\udfff" for letter in argument):  # as Python reads bytes that are no text
        raise ValueError(f"{ascii(argument)[1:-1][:SHOWN]} is no text in UTF-8")
    text = _is_text(name, schema) and not several
    if value.count(",") >= MOST_ITEMS and not text:
        raise ValueError(
            f"{name} has {value.count(',') + 1:,} items, too many for a command line: write it into a yaml file of "
            "conf/, as conf/experiment/smoke.yaml, and choose that"
        )
    override = None if value.count(",") >= MOST_ITEMS else _parsed(argument)
    if override is not None and not several and is_list(name, schema) and _is_simple(override):
        return f"{name}=[{value}]"
    if override is not None and not (text and _is_more_than_text(override)):
        return argument
    parts = not text and (value.startswith(("[", "{")) or (several and "," in value))
    ways = _quoted(value) if parts else [QuotedString(value, Quote.double).with_quotes()]
    ways = [f"{name}={way}" for way in ways if _parsed(f"{name}={way}") is not None]
    if not ways:
        if not parts:
            raise ValueError(f"{argument[:SHOWN]} is no setting: settings have the form name=value")
        raise ValueError(f"{argument[:SHOWN]} cannot be read: write it into a yaml file of conf/, and choose that")
    if parts and name != "overrides":  # whose items are settings themselves
        raise ValueError(f"{argument} needs quotes: {IF_ONE.join(map(shlex.quote, ways))}")
    return ways[0]


def _parsed(argument: str) -> Override | None:
    """None where the grammar refuses it, or would."""
    if argument.partition("=")[2].startswith(10 * "["):
        return None  # which Hydra might read, but not compose
    try:
        return OverridesParser.create().parse_override(argument)
    except (HydraException, RecursionError):
        return None


def _is_more_than_text(override: Override) -> bool:
    return override.is_sweep_override() or not isinstance(override.value(), str | None)


def _is_simple(override: Override) -> bool:
    """One word or number, or several, separated by commas."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return value.simple_form
    return isinstance(value, str | int | float) and "${" not in str(value)


def _quoted(parts: str) -> list[str]:
    """A list, or values separated by commas, with quotes around those that need them; and as one text, commas and all.

    The latter where there are commas, and no quotes yet that tell which of them separate.
    """
    begin, end = ("[", "]") if parts.startswith("[") else ("", "")
    if parts.startswith("{") or not parts.endswith(end) or re.search(r"\]\s*,\s*\[", parts):
        return []
    inner = parts[len(begin) : len(parts) - len(end)]
    items = [item for item in _split(inner) if item]
    ways = [",".join(map(_as_item, items))] if items else []
    if "," in inner and not any(item.startswith(("'", '"')) for item in items):
        ways.append(QuotedString(inner.strip(), Quote.double).with_quotes())
    return [begin + way + end for way in ways]


def _split(items: str) -> list[str]:
    """At commas outside quotes."""
    return [item.strip() for item in re.findall(r"""((?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^,])+)(?:,|$)""", items)]


def _as_item(item: str) -> str:
    override = _parsed(f"x=[{item}]")
    if override is not None and (override.value() == [item] or item[:1] in ("'", '"')):
        return item
    return QuotedString(item, Quote.double).with_quotes()


def _is_text(name: str, schema: type) -> bool:
    """Whether the setting is any text: neither a number, nor one of some words, nor a group of settings."""
    return kind_of(name, schema) in (str, str | None)


def is_list(name: str, schema: type) -> bool:
    return get_origin(kind_of(name, schema)) is list


def kind_of(name: str, schema: type) -> Any:
    """The type of a setting; None where there is none of that name."""
    kind: Any = schema
    for part in name.lstrip("+").split("."):
        kind = get_type_hints(kind).get(part) if is_dataclass(kind) else None
    return kind
