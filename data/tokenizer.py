"""Text to tokens and back: bytes, characters, byte-pair encoding, or another's tokenizer.json, behind one class.

A token is a piece of UTF-8, so any text comes back exactly. Text that looks like a special token is text; the
end-of-text token, which stands after each document, is only ever put there by its id.
"""

import base64
import codecs
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

FILE = "vocabulary.json"


class Tokenizer(ABC):
    """Ids are 0 .. vocab_size - 1; of those made here, `end_of_text` is the last."""

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

    def document(self, text: str) -> np.ndarray:
        """The ids of a whole document, one of many in a row: end-of-text follows it."""
        return np.append(self.encode(text), self.end_of_text)

    def prompt(self, text: str) -> list[int]:
        """The ids that a continuation of `text` starts from: at least one."""
        return self.encode(text).tolist() or [self.end_of_text]

    @property
    def stops(self) -> set[int]:
        """The ids at which a continuation ends."""
        return {self.end_of_text}

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some ids; bytes that are no UTF-8 (half a character) become U+FFFD."""
        return b"".join(self.token_bytes(int(token)) for token in tokens).decode("utf-8", "replace")

    def stream(self, tokens: Iterable[int], after: list[int]) -> Iterator[str]:
        """The text of tokens as they come, never half a character. `after`: the ids that they follow, whole text."""
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


class JSONTokenizer(Tokenizer):
    """Another model's tokenizer.json, run by Hugging Face's tokenizers.

    `content` is that file, `beginning` the id that its model has seen before every text, `ends` those that may follow
    one. Its normalizer decides whether a text comes back exactly: many drop a space at the start.
    """

    kind = "json"
    FILE = "tokenizer.json"

    def __init__(self, content: str, beginning: int, ends: list[int]):
        import tokenizers

        self.content, self.beginning, self.ends = content, beginning, ends
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library has no kind of its own
            raise ValueError(f"this tokenizer.json is no tokenizer that can be read: {error}") from error
        self.tokenizer.no_truncation()  # settings of a training long past
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True  # text that looks like a special token is text
        self.vocab_size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        for id in (beginning, *ends):
            if not 0 <= id < self.vocab_size:
                raise ValueError(f"special tokens must be ids below {self.vocab_size}, got {id}")
        self.added = self.tokenizer.get_added_tokens_decoder()
        self.bytes_of = {character: byte for byte, character in enumerate(_byte_level_alphabet())}
        self.byte_level = '"ByteLevel"' in json.dumps(json.loads(content).get("decoder"))

    @property
    def end_of_text(self) -> int:
        return self.ends[0]

    @property
    def stops(self) -> set[int]:
        return {self.beginning, *self.ends}

    def encode(self, text: str) -> np.ndarray:
        text.encode("utf-8")  # half a surrogate pair is a ValueError here, and worse there
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def document(self, text: str) -> np.ndarray:
        return np.array(self.prompt(text), np.int64)

    def prompt(self, text: str) -> list[int]:
        return [self.beginning, *self.encode(text).tolist()]

    def token_bytes(self, token: int) -> bytes:
        piece = self.tokenizer.id_to_token(token)
        if piece is None:  # a gap in the vocabulary
            return b""
        if token in self.added:
            return b"" if self.added[token].special else piece.encode("utf-8")
        if self.byte_level:
            return bytes(self.bytes_of[character] for character in piece)
        if re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode("utf-8")

    def decode(self, tokens: Iterable[int]) -> str:
        return self.tokenizer.decode([int(token) for token in tokens])

    def stream(self, tokens: Iterable[int], after: list[int]) -> Iterator[str]:
        from tokenizers.decoders import DecodeStream

        decoder = DecodeStream(ids=after, skip_special_tokens=True)
        seen, sent = list(after), len(self.decode(after))
        for token in tokens:
            seen.append(int(token))
            piece = decoder.step(self.tokenizer, seen[-1])
            if piece is not None:
                sent += len(piece)
                yield piece
        yield self.decode(seen)[sent:]  # half a character at the end

    def vocabulary(self) -> dict:
        return {
            "kind": self.kind,
            "beginning": self.beginning,
            "ends": self.ends,
            "sha256": hashlib.sha256(self.content.encode()).hexdigest(),
        }

    def save(self, folder: Path):
        super().save(folder)
        (folder / self.FILE).write_text(self.content, encoding="utf-8")


def _byte_level_alphabet() -> list[str]:
    """The character that stands for each byte in GPT-2's vocabulary: itself where it prints, else one from 256 on."""
    prints = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in prints]
    return [chr(byte) if byte in prints else chr(256 + others.index(byte)) for byte in range(256)]


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
    if vocabulary["kind"] == "json":
        content = (Path(folder) / JSONTokenizer.FILE).read_text(encoding="utf-8")
        return JSONTokenizer(content, vocabulary["beginning"], vocabulary["ends"])
    return BPETokenizer([base64.b64decode(token) for token in vocabulary["ranks"]], vocabulary["pattern"])
