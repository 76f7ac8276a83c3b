"""Settings of the data and the tokenizer, with their rules."""

import unicodedata
from dataclasses import dataclass, field
from os.path import expanduser
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator


def _text(value: str) -> str:
    if "\0" in value:
        raise ValueError(f"must not contain the character NUL, got {value!r}")
    return value


def _name(value: str) -> str:
    if not value.strip() or any(unicodedata.category(c) == "Cc" for c in value):
        raise ValueError(f"must not be empty or contain control characters, got {value!r}")
    return value


Text = Annotated[str, AfterValidator(_text)]
Name = Annotated[Text, AfterValidator(_name)]  # not empty, without control characters
PathName = Annotated[Name, AfterValidator(expanduser)]  # of a file or folder; ~ and ~user are expanded
Count = Annotated[int, Ge(1), Le(10**15)]
CHAT = ("messages_column", "prompt_column", "answer_column")


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from. Settings with a default are missing in older corpora and checkpoints."""

    source: Literal["shakespeare", "files", "hub", "tokens", "corpus", "mixture"]
    paths: list[PathName]
    separator: Text | None
    column: Name
    encoding_errors: Literal["strict", "replace"]
    wheel: PathName | None
    repo: Name | None
    config: Name | None
    split: Name
    revision: Name | None
    corpora: dict[PathName, Annotated[float, Gt(0), Le(1e12)]] | None
    max_tokens: Count | None
    validation: list[PathName]
    validation_share: Annotated[float, Gt(0), Lt(1)]
    messages_column: Name | None = None
    prompt_column: Name | None = None
    answer_column: Name | None = None
    template: dict[Text, Text] = field(default_factory=dict)
    prompt: Text = ""

    def __post_init__(self):
        if self.source in ("files", "tokens") and not self.paths:
            example = "give for example data.paths='[books/*.txt]'"
            raise ValueError(f"data={self.source} needs data.paths, got []: {example}")
        if self.source == "hub" and self.repo is None:
            raise ValueError("data=hub needs data.repo, got null: give for example data.repo=roneneldan/TinyStories")
        if self.source == "mixture" and not self.corpora:
            example = "data.corpora='{corpora/A: 0.7, corpora/B: 0.3}'"
            raise ValueError(f"data=mixture needs data.corpora, for example {example}")
        if self.source == "corpus" and len(self.paths) != 1:
            raise ValueError(f"data=corpus needs one folder, data.paths='[corpora/NAME]', got {self.paths}")
        if self.source in ("tokens", "corpus", "mixture") and self.max_tokens is not None:
            raise ValueError(f"data.max_tokens has no effect with data={self.source}, got {self.max_tokens}")
        if self.separator == "":
            raise ValueError("data.separator must have at least one character, or be null, got an empty string")
        if chat := list(self.chat_columns()):
            self._check_chat(chat)

    def _check_chat(self, columns: list[str]):
        if self.source not in ("files", "hub"):
            raise ValueError(f"{columns[0]} needs data=files or data=hub, got data={self.source}")
        if columns not in (["data.messages_column"], ["data.prompt_column", "data.answer_column"]):
            given = ", ".join(columns)
            raise ValueError(f"give data.messages_column, or data.prompt_column and data.answer_column, got {given}")
        for role in ("user", "assistant"):
            if role not in self.template:
                got = ", ".join(self.template) or "nothing"
                raise ValueError(f"data.template must have an entry for {role}, got {got}")
        for role, text in self.template.items():
            if text.count("{}") != 1:
                raise ValueError(f"data.template.{role} must contain {{}} once, where the content goes, got {text!r}")

    def chat_columns(self) -> dict[str, str]:
        """Returns the columns of conversations by the settings that name them; empty for plain text."""
        columns = {f"data.{name}": getattr(self, name) for name in CHAT}
        return {name: column for name, column in columns.items() if column is not None}


@dataclass(frozen=True)
class TokenizerConfig:
    """How text becomes tokens. For settings with a default see DataConfig."""

    kind: Literal["bpe", "bytes", "chars", "tiktoken", "json", "saved"]
    vocab_size: Annotated[int, Ge(257), Le(2**24)] | None
    pattern: Text | None
    special: list[Text]
    train_chars: Count
    encoding: Name | None
    path: PathName | None
    bos_token: Text | None
    parse_special: bool = False

    def __post_init__(self):
        if self.kind == "bpe" and (self.vocab_size is None or self.pattern is None):
            raise ValueError("tokenizer.kind=bpe needs tokenizer.vocab_size and tokenizer.pattern, got null")
        if self.kind in ("json", "saved") and self.path is None:
            raise ValueError(f"tokenizer={self.kind} needs tokenizer.path, got null")
        if self.kind == "tiktoken" and self.encoding is None:
            raise ValueError("tokenizer=tiktoken needs tokenizer.encoding, got null")
        if self.kind == "bpe" and self.vocab_size is not None and self.vocab_size < 256 + len(self.special):
            raise ValueError(
                f"tokenizer.vocab_size must be at least {256 + len(self.special)}, for the 256 bytes and the special "
                f"tokens, got {self.vocab_size}"
            )
        if not self.special or len(set(self.special)) < len(self.special) or "" in self.special:
            names = f"different names, at least one and none empty, got {self.special}"
            raise ValueError(f"tokenizer.special must be {names}")
        if self.parse_special and self.kind not in ("bpe", "tiktoken", "json"):
            why = "a saved one keeps its own setting" if self.kind == "saved" else "it has no special tokens to parse"
            needed = "tokenizer=bpe, tiktoken or json"
            raise ValueError(f"tokenizer.parse_special=true needs {needed}, got {self.kind}: {why}")
        prefixes = [(a, b) for a in self.special for b in self.special if a != b and b.startswith(a)]
        if self.parse_special and prefixes:
            a, b = prefixes[0]
            raise ValueError(f"tokenizer.special: with parse_special no name may start with another, got {b} and {a}")


def check_together(data: DataConfig, tokenizer: TokenizerConfig):
    """Raises a ValueError if this source cannot be tokenised by this tokenizer."""
    ready = ("bytes", "tiktoken", "json", "saved")
    if data.source == "tokens" and tokenizer.kind not in ready:
        raise ValueError(f"data=tokens needs the tokenizer that made them, {', '.join(ready)}, got {tokenizer.kind}")
