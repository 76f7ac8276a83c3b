"""Loads a saved tokenizer."""

import base64
from pathlib import Path
from typing import Annotated, Literal, NotRequired

from pydantic import Discriminator, Field
from typing_extensions import TypedDict

from data import files
from data.tokenizer.base import FILE, Tokenizer
from data.tokenizer.bpe import BPETokenizer
from data.tokenizer.hugging_face import JSONTokenizer
from data.tokenizer.plain import ByteTokenizer, CharacterTokenizer

Id = Annotated[int, Field(ge=0, lt=2**31)]


class BytesVocabulary(TypedDict):
    kind: Literal["bytes"]


class CharactersVocabulary(TypedDict):
    kind: Literal["chars"]
    characters: str


class BPEVocabulary(TypedDict):
    kind: Literal["bpe"]
    pattern: str
    ranks: list[str]
    special: Annotated[dict[str, Id], Field(min_length=1)]
    parse_special: NotRequired[bool]


class JSONVocabulary(TypedDict):
    kind: Literal["json"]
    beginning: Id | None
    ends: Annotated[list[Id], Field(min_length=1)]
    parse_special: NotRequired[bool]


Vocabulary = Annotated[BytesVocabulary | CharactersVocabulary | BPEVocabulary | JSONVocabulary, Discriminator("kind")]


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Returns the tokenizer saved in a folder."""
    path = Path(folder) / FILE
    if not path.is_file():
        raise ValueError(f"there is no tokenizer in {folder}: {FILE} is missing")
    vocabulary = files.read_json(path, Vocabulary)
    try:
        return _build(vocabulary, Path(folder))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _build(vocabulary: dict, folder: Path) -> Tokenizer:
    if vocabulary["kind"] == "bytes":
        return ByteTokenizer()
    if vocabulary["kind"] == "chars":
        return CharacterTokenizer(vocabulary["characters"])
    parse_special = vocabulary.get("parse_special", False)  # older vocabularies lack this key
    if vocabulary["kind"] == "json":
        content = (folder / JSONTokenizer.FILE).read_text(encoding="utf-8")
        return JSONTokenizer(content, vocabulary["beginning"], vocabulary["ends"], parse_special)
    ranks = [base64.b64decode(token, validate=True) for token in vocabulary["ranks"]]
    return BPETokenizer(ranks, vocabulary["pattern"], vocabulary["special"], parse_special)
