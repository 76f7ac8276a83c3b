"""Text to tokens and back: bytes, characters, or byte-pair encoding, behind one class.

A token is a piece of UTF-8, so any text comes back exactly. Text that looks like a special token is text; the
end-of-text token, which stands after each document, is only ever put there by its id.
"""

import base64
import codecs
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

FILE = "vocabulary.json"


class Tokenizer(ABC):
    """Ids are 0 .. vocab_size - 1; `end_of_text` is the last."""

    kind: str
    vocab_size: int

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, int64."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """What a token stands for; nothing, for end-of-text."""

    @abstractmethod
    def vocabulary(self) -> dict:
        """All that tells this tokenizer from others, for JSON."""

    @property
    def end_of_text(self) -> int:
        return self.vocab_size - 1

    @property
    def beginning(self) -> int:
        """What an empty prompt starts from."""
        return self.end_of_text

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some ids; bytes that are no UTF-8 (half a character) become U+FFFD."""
        return b"".join(self.token_bytes(int(token)) for token in tokens).decode("utf-8", "replace")

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text of tokens as they come, never half a character."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            yield decoder.decode(self.token_bytes(int(token)))
        yield decoder.decode(b"", final=True)

    def token_lengths(self) -> np.ndarray:
        """Bytes of text in each token, (vocab_size,): what turns nats per token into bits per byte."""
        return np.array([len(self.token_bytes(token)) for token in range(self.vocab_size)])

    def fingerprint(self) -> str:
        """A hash of the vocabulary: equal for tokenizers that give equal ids."""
        return hashlib.sha256(json.dumps(self.vocabulary(), sort_keys=True).encode()).hexdigest()

    def save(self, folder: Path):
        """Writes all that `load_tokenizer` needs."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(json.dumps(self.vocabulary(), ensure_ascii=False), encoding="utf-8")


class ByteTokenizer(Tokenizer):
    """Each byte of UTF-8 is a token."""

    kind = "bytes"
    vocab_size = 257

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int64)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def vocabulary(self) -> dict:
        return {"kind": self.kind}


class CharacterTokenizer(Tokenizer):
    """Each character of a known alphabet is a token."""

    kind = "chars"

    def __init__(self, characters: str):
        self.characters = "".join(sorted(set(characters)))
        self.vocab_size = len(self.characters) + 1
        self.ids = {character: i for i, character in enumerate(self.characters)}

    def encode(self, text: str) -> np.ndarray:
        try:
            return np.array([self.ids[character] for character in text], np.int64)
        except KeyError:
            unknown = "".join(sorted(set(text) - set(self.characters)))[:20]
            raise ValueError(
                f"characters that the tokenizer has not seen: {unknown!r}; tokenizer=bytes or bpe knows all"
            ) from None

    def token_bytes(self, token: int) -> bytes:
        return self.characters[token].encode("utf-8") if token < len(self.characters) else b""

    def vocabulary(self) -> dict:
        return {"kind": self.kind, "characters": self.characters}


class BPETokenizer(Tokenizer):
    """Byte-pair encoding ("Neural Machine Translation of Rare Words with Subword Units", 2015), run by tiktoken.

    `ranks` holds the bytes of each token in the order in which they were merged, `pattern` the regular expression that
    cuts text into pieces first; no token crosses a piece.
    """

    kind = "bpe"

    def __init__(self, ranks: list[bytes], pattern: str):
        import tiktoken

        self.ranks, self.pattern = ranks, pattern
        self.vocab_size = len(ranks) + 1
        self.encoding = tiktoken.Encoding(
            name="inkling",
            pat_str=pattern,
            mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
            special_tokens={"<|endoftext|>": len(ranks)},
        )

    def encode(self, text: str) -> np.ndarray:
        # encode_ordinary: text that looks like a special token is text
        return np.array(self.encoding.encode_ordinary(text), np.int64)

    def token_bytes(self, token: int) -> bytes:
        return self.ranks[token] if token < len(self.ranks) else b""

    def vocabulary(self) -> dict:
        ranks = [base64.b64encode(token).decode() for token in self.ranks]
        return {"kind": self.kind, "pattern": self.pattern, "ranks": ranks}


def train_bpe(texts: Iterable[str], vocab_size: int, pattern: str) -> BPETokenizer:
    """Learns vocab_size - 1 tokens from texts; the last is end-of-text."""
    import rustbpe

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(texts), vocab_size - 1, pattern=pattern)
    ranks = sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])
    if len(ranks) < vocab_size - 1:
        raise ValueError(
            f"tokenizer.vocab_size {vocab_size} is more than this text can give: "
            f"it holds {len(ranks) + 1} tokens, end-of-text included; ask for at most that"
        )
    return BPETokenizer([bytes(token) for token, _ in ranks], pattern)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer saved in a folder."""
    path = Path(folder) / FILE
    if not path.is_file():
        raise ValueError(f"there is no tokenizer in {folder}: {FILE} is missing")
    vocabulary = json.loads(path.read_text(encoding="utf-8"))
    if vocabulary["kind"] == "bytes":
        return ByteTokenizer()
    if vocabulary["kind"] == "chars":
        return CharacterTokenizer(vocabulary["characters"])
    return BPETokenizer([base64.b64decode(token) for token in vocabulary["ranks"]], vocabulary["pattern"])
