"""What all tokenizers share."""

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
    lossless = True  # the bytes of the ids are those of the text, whatever it is
    special: dict[str, int]  # ids by name; the first is end-of-text
    parse_special = False  # a name of a special token in a text becomes that token

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, an array of integers; the name of a special token in it is text, or see parse_special."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """What a token stands for; nothing, for a special one. With parse_special its name, but for end-of-text's."""

    @abstractmethod
    def vocabulary(self) -> dict:
        """All that tells this tokenizer from others, for JSON."""

    @abstractmethod
    def to_json(self) -> str:
        """A tokenizer.json for Hugging Face's tokenizers that gives the same ids."""

    def document(self, text: str) -> np.ndarray:
        """The ids of a whole document, one of many in a row: end-of-text follows it."""
        ids = self.encode(text)
        return np.append(ids, ids.dtype.type(self.eos_id))

    def documents(self, texts: list[str]) -> np.ndarray:
        """The ids of several documents, one behind the other: what document gives for each, faster for many."""
        return np.concatenate([self.document(text) for text in texts])

    def document_bounds(self, tokens) -> tuple[np.ndarray, np.ndarray]:
        """First token of each document in a row of them (anything with len and find(token)), and the one behind it."""
        ends = tokens.find(self.eos_id) + 1
        if len(ends) == 0 or ends[-1] < len(tokens):
            ends = np.append(ends, len(tokens))  # one that was cut off
        return np.concatenate([[0], ends[:-1]]), ends

    def prompt(self, text: str) -> list[int]:
        """The ids that a continuation of `text` starts from: at least one."""
        return self.encode(text).tolist() or [self.eos_id]

    @property
    def stops(self) -> set[int]:
        """The ids at which a continuation ends."""
        return {self.eos_id}

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some ids; bytes that are no UTF-8 (half a character) become U+FFFD."""
        return b"".join(self.token_bytes(int(token)) for token in tokens).decode("utf-8", "replace")

    def decoder(self, after: list[int]) -> "Decoder":
        """What turns tokens into text one by one. `after`: the ids that they follow, whole text."""
        return Decoder(self)

    def stream(self, tokens: Iterable[int], after: list[int]) -> Iterator[str]:
        """The text of tokens as they come, never half a character. `after`: the ids that they follow, whole text."""
        decoder = self.decoder(after)
        for token in tokens:
            yield decoder.push(int(token))
        yield decoder.end()

    def bytes_per_token(self) -> np.ndarray:
        """Bytes of text in each token, (vocab_size,): what turns nats per token into bits per byte."""
        return np.array([len(self.token_bytes(token)) for token in range(self.vocab_size)])

    def fingerprint(self) -> str:
        """A hash of the vocabulary: equal for tokenizers that give equal ids."""
        return hashlib.sha256(json.dumps(self.vocabulary(), sort_keys=True).encode()).hexdigest()

    def save(self, folder: Path):
        """Writes all that `load_tokenizer` needs."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(json.dumps(self.vocabulary(), ensure_ascii=False), encoding="utf-8")


class Decoder:
    """Text of tokens that come one by one; what is not yet a whole character waits for the next."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self.characters.decode(self.tokenizer.token_bytes(token))

    def end(self) -> str:
        """What still waits: half a character becomes U+FFFD."""
        return self.characters.decode(b"", final=True)
