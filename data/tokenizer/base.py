"""The base class of all tokenizers."""

import codecs
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

FILE = "vocabulary.json"
END_OF_TEXT = "<|endoftext|>"


class Tokenizer(ABC):
    """Ids are 0 .. vocab_size - 1; `eos_id` is one of them."""

    kind: str
    vocab_size: int
    eos_id: int
    lossless = True  # the ids' bytes are exactly those of the text
    special: dict[str, int]  # ids by name; the first is end-of-text
    parse_special = False  # if true, the name of a special token in a text becomes that token

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of a text; the name of a special token in it is text, unless parse_special is set."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """Returns a token's bytes: none for a special one, or with parse_special its name, except for end-of-text."""

    @abstractmethod
    def vocabulary(self) -> dict:
        """Returns all that distinguishes this tokenizer from others, for JSON."""

    @abstractmethod
    def to_json(self) -> str:
        """Returns a tokenizer.json for Hugging Face's tokenizers that gives the same ids."""

    def document(self, text: str) -> np.ndarray:
        """Returns the ids of a document, followed by end-of-text."""
        ids = self.encode(text)
        return np.append(ids, ids.dtype.type(self.eos_id))

    def documents(self, texts: list[str]) -> np.ndarray:
        """Returns the concatenated ids of several documents; subclasses do this faster than by `document` for each."""
        return np.concatenate([self.document(text) for text in texts])

    def document_bounds(self, tokens) -> tuple[np.ndarray, np.ndarray]:
        """Returns start and end (excluded) of each document in `tokens`, anything with len and find(token)."""
        ends = tokens.find(self.eos_id) + 1
        if len(ends) == 0 or ends[-1] < len(tokens):
            ends = np.append(ends, len(tokens))  # the last document was cut off
        return np.concatenate([[0], ends[:-1]]), ends

    def prompt(self, text: str) -> list[int]:
        """Returns the ids of a prompt to continue: at least one."""
        return self.encode(text).tolist() or [self.eos_id]

    @property
    def stops(self) -> set[int]:
        """The ids that end a continuation."""
        return {self.eos_id}

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of ids; bytes that are not UTF-8 (half a character) become U+FFFD."""
        return b"".join(self.token_bytes(int(token)) for token in tokens).decode("utf-8", "replace")

    def decoder(self, after: list[int]) -> "Decoder":
        """Returns a decoder of tokens one by one. `after`: the ids that come before them, of whole characters."""
        return Decoder(self)

    def stream(self, tokens: Iterable[int], after: list[int]) -> Iterator[str]:
        """Yields the text of tokens as they come, in whole characters. `after`: see decoder."""
        decoder = self.decoder(after)
        for token in tokens:
            yield decoder.push(int(token))
        yield decoder.end()

    def bytes_per_token(self) -> np.ndarray:
        """Returns the number of bytes in each token, (vocab_size,), to convert nats per token into bits per byte."""
        return np.array([len(self.token_bytes(token)) for token in range(self.vocab_size)])

    def fingerprint(self) -> str:
        """Returns a hash of the vocabulary: equal for tokenizers that give equal ids."""
        return hashlib.sha256(json.dumps(self.vocabulary(), sort_keys=True).encode()).hexdigest()

    def save(self, folder: Path):
        """Saves all that `load_tokenizer` needs."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(json.dumps(self.vocabulary(), ensure_ascii=False), encoding="utf-8")


class Decoder:
    """Decodes tokens one by one; the bytes of an incomplete character are kept until it is complete."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self.characters.decode(self.tokenizer.token_bytes(token))

    def end(self) -> str:
        """Returns the rest: an incomplete character becomes U+FFFD."""
        return self.characters.decode(b"", final=True)
