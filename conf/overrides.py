"""Settings that Hydra's grammar would refuse: they are quoted, or the error shows them with the quotes they need.

See https://hydra.cc/docs/1.3/advanced/override_grammar/basic/ for what the grammar accepts without quotes.
"""

import re
import shlex
from dataclasses import is_dataclass
from typing import Any, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, Quote, QuotedString
from hydra.errors import HydraException

MOST_ITEMS = 2000  # in a list; the parser's time grows faster than linearly
SHOWN = 200  # characters of an invalid setting that an error shows
IF_ONE = "; or, where the commas belong to one text: "


def readable(argument: str, schema: type, several: bool) -> str:
    """A setting, name=value, in a form that Hydra reads.

    A string setting is taken literally, even if Hydra's grammar would read it as a number, a list or several values;
    so is any other value that the grammar refuses. A list, or the values of `several` runs, that the grammar refuses is
    a ValueError that shows the setting as it can be pasted into a shell. Options and other words stay as they are.
    A list of plain words or numbers needs no brackets: runs=runs/A,runs/B is runs=[runs/A,runs/B].
    """
    name, equals, value = argument.partition("=")
    if not equals or argument.startswith("-"):
        return argument
    if any("\ud800" <= letter <= "\udfff" for letter in argument):  # how Python decodes bytes that are not UTF-8
        raise ValueError(f"{ascii(argument)[1:-1][:SHOWN]} is not valid UTF-8")
    text = _is_text(name, schema) and not several
    if value.count(",") >= MOST_ITEMS and not text:
        raise ValueError(
            f"{name} has {value.count(',') + 1:,} items, too many for a command line: put it into a YAML file in "
            "conf/, such as conf/experiment/smoke.yaml, and select that"
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
            raise ValueError(f"{argument[:SHOWN]} is not a setting: settings have the form name=value")
        raise ValueError(f"{argument[:SHOWN]} cannot be read: put it into a YAML file in conf/, and select that")
    if parts and name != "overrides":  # its items are settings themselves
        raise ValueError(f"{argument} needs quotes: {IF_ONE.join(map(shlex.quote, ways))}")
    return ways[0]


def _parsed(argument: str) -> Override | None:
    """The parsed setting, or None if the grammar refuses it."""
    if argument.partition("=")[2].startswith(10 * "["):
        return None  # Hydra may parse it, but not compose it
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
    """A list, or values separated by commas, with quotes around those that need them; and as a single string.

    The single string is offered if there are commas and no quotes that tell which of them separate items.
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
    """Splits at commas outside quotes."""
    return [item.strip() for item in re.findall(r"""((?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^,])+)(?:,|$)""", items)]


def _as_item(item: str) -> str:
    override = _parsed(f"x=[{item}]")
    if override is not None and (override.value() == [item] or item[:1] in ("'", '"')):
        return item
    return QuotedString(item, Quote.double).with_quotes()


def _is_text(name: str, schema: type) -> bool:
    """Whether the setting is a free string: not a number, a choice of words, or a group of settings."""
    return kind_of(name, schema) in (str, str | None)


def is_list(name: str, schema: type) -> bool:
    return get_origin(kind_of(name, schema)) is list


def kind_of(name: str, schema: type) -> Any:
    """The type of a setting; None if there is no setting of that name."""
    kind: Any = schema
    for part in name.lstrip("+").split("."):
        kind = get_type_hints(kind).get(part) if is_dataclass(kind) else None
    return kind
