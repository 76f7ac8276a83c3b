"""Another model's tokenizer.json, run by Hugging Face's tokenizers."""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data.tokenizer.base import Decoder, Tokenizer
from data.tokenizer.byte_level import byte_level_alphabet


class JSONTokenizer(Tokenizer):
    """A tokenizer from `content`, the text of a tokenizer.json.

    `bos_id` is the id that its model saw before every document, or None; `eos_ids` are those that may end one. Whether
    a text round-trips exactly depends on its normalizer: many drop a space at the start.
    """

    kind = "json"
    lossless = False
    FILE = "tokenizer.json"

    def __init__(self, content: str, bos_id: int | None, eos_ids: list[int], parse_special: bool = False):
        import tokenizers

        self.content, self.bos_id, self.eos_ids, self.parse_special = content, bos_id, eos_ids, parse_special
        self.eos_id = eos_ids[0]
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library has no exception class of its own
            raise ValueError(f"this tokenizer.json cannot be read: {error}") from error
        self.tokenizer.no_truncation()  # settings left over from its training
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = not parse_special  # True encodes their names as text
        self.vocab_size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        for id in self.stops:
            if not 0 <= id < self.vocab_size:
                raise ValueError(f"special tokens must be ids below {self.vocab_size}, got {id}")
        self.added = self.tokenizer.get_added_tokens_decoder()
        self.special = {token.content: id for id, token in self.added.items()}
        hidden = self.stops if parse_special else self.added.keys()  # not shown in text
        self.hidden = {id for id, token in self.added.items() if token.special and id in hidden}
        self.bytes_of = {character: byte for byte, character in enumerate(byte_level_alphabet())}
        self.byte_level = '"ByteLevel"' in json.dumps(json.loads(content).get("decoder"))

    @property
    def stops(self) -> set[int]:
        return {*self.eos_ids} | ({self.bos_id} if self.bos_id is not None else set())

    def encode(self, text: str) -> np.ndarray:
        text.encode("utf-8")  # raises a ValueError for half a surrogate pair, which the library does not handle
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    def document(self, text: str) -> np.ndarray:
        return self.documents([text])

    def documents(self, texts: list[str]) -> np.ndarray:
        for text in texts:
            text.encode("utf-8")
        first = [] if self.bos_id is None else [self.bos_id]
        last = [self.eos_id] if self.bos_id is None else []
        encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)  # on all cores
        return np.concatenate([np.array([*first, *encoding.ids, *last], np.uint32) for encoding in encoded])

    def document_bounds(self, tokens) -> tuple[np.ndarray, np.ndarray]:
        if self.bos_id is None:
            return super().document_bounds(tokens)
        starts = tokens.find(self.bos_id)
        if len(starts) == 0 or starts[0] > 0:
            starts = np.concatenate([[0], starts])
        return starts, np.append(starts[1:], len(tokens))

    def prompt(self, text: str) -> list[int]:
        if self.bos_id is None:
            return super().prompt(text)
        return [self.bos_id, *self.encode(text).tolist()]

    def token_bytes(self, token: int) -> bytes:
        piece = self.tokenizer.id_to_token(token)
        if piece is None:  # a gap in the vocabulary
            return b""
        if token in self.added:
            return b"" if token in self.hidden else piece.encode("utf-8")
        if self.byte_level:
            return bytes(self.bytes_of[character] for character in piece)
        if re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode("utf-8")

    def decode(self, tokens: Iterable[int]) -> str:
        return self.tokenizer.decode(self.without_hidden(tokens), skip_special_tokens=False)

    def without_hidden(self, tokens: Iterable[int]) -> list[int]:
        return [int(token) for token in tokens if int(token) not in self.hidden]

    def decoder(self, after: list[int]) -> "JSONDecoder":
        return JSONDecoder(self, after)

    def vocabulary(self) -> dict:
        return {
            "kind": self.kind,
            "beginning": self.bos_id,
            "ends": self.eos_ids,
            "sha256": hashlib.sha256(self.content.encode()).hexdigest(),
            **({"parse_special": True} if self.parse_special else {}),  # older vocabularies lack this key
        }

    def to_json(self) -> str:
        return self.content

    def save(self, folder: Path):
        super().save(folder)
        (folder / self.FILE).write_text(self.content, encoding="utf-8")


class JSONDecoder(Decoder):
    """Decodes with the library's DecodeStream, which treats spaces between tokens as the tokenizer.json says."""

    def __init__(self, tokenizer: JSONTokenizer, after: list[int]):
        from tokenizers.decoders import DecodeStream

        self.json, self.seen = tokenizer, tokenizer.without_hidden(after)
        self.pieces = DecodeStream(ids=self.seen, skip_special_tokens=False)
        self.sent = len(tokenizer.decode(after))

    def push(self, token: int) -> str:
        if token in self.json.hidden:
            return ""
        self.seen.append(token)
        piece = self.pieces.step(self.json.tokenizer, token) or ""
        self.sent += len(piece)
        return piece

    def end(self) -> str:
        return self.json.decode(self.seen)[self.sent :]


def read_json(path: str | Path, bos_token: str | None, eos_token: str, parse_special: bool = False) -> JSONTokenizer:
    """Loads a tokenizer.json, whose special tokens are given by name."""
    try:
        content = Path(path).read_text(encoding="utf-8-sig")
        names = {token["content"]: token["id"] for token in json.loads(content)["added_tokens"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a valid tokenizer.json: {error}") from error
    for name in (bos_token, eos_token):
        if name is not None and name not in names:
            raise ValueError(f"{path} has no special token {name}: there are {', '.join(names)}")
    first = None if bos_token is None else names[bos_token]
    return JSONTokenizer(content, first, [names[eos_token]], parse_special)
