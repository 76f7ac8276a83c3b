"""Tokenizers that need no training: bytes, and the characters of an alphabet."""

import numpy as np

from data.tokenizer.base import END_OF_TEXT, Tokenizer
from data.tokenizer.byte_level import byte_level_json


class ByteTokenizer(Tokenizer):
    """Each byte of UTF-8 is a token."""

    kind = "bytes"
    vocab_size = 257
    eos_id = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint16)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def vocabulary(self) -> dict:
        return {"kind": self.kind}

    def to_json(self) -> str:
        return byte_level_json([bytes([byte]) for byte in range(256)], [], {END_OF_TEXT: self.eos_id}, None)


class CharacterTokenizer(Tokenizer):
    """Each character of a known alphabet is a token."""

    kind = "chars"

    def __init__(self, characters: str):
        self.characters = "".join(sorted(set(characters)))
        self.vocab_size = len(self.characters) + 1
        self.eos_id = len(self.characters)
        codes = self._codes(self.characters)
        self.ids = np.full(
            codes.max(initial=0) + 2, self.vocab_size, np.uint32
        )  # by code point; the last entry is for all above
        self.ids[codes] = np.arange(len(codes))

    @staticmethod
    def _codes(text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-32-le"), np.uint32)

    def encode(self, text: str) -> np.ndarray:
        ids = self.ids[np.minimum(self._codes(text), len(self.ids) - 1)]
        if (ids == self.vocab_size).any():
            unknown = "".join(sorted(set(text) - set(self.characters)))[:20]
            raise ValueError(
                f"the tokenizer does not know the characters {unknown!r}; tokenizer=bytes or bpe knows all"
            )
        return ids

    def token_bytes(self, token: int) -> bytes:
        return self.characters[token].encode("utf-8") if token < len(self.characters) else b""

    def vocabulary(self) -> dict:
        return {"kind": self.kind, "characters": self.characters}

    def to_json(self) -> str:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        ids = {character: id for id, character in enumerate(self.characters)}
        other = Tokenizer(models.WordLevel({**ids, END_OF_TEXT: self.eos_id}, END_OF_TEXT))
        other.pre_tokenizer = pre_tokenizers.Split(Regex("(?m:.)"), "isolated")  # m: matches line breaks too
        other.decoder = decoders.Fuse()
        other.add_special_tokens([END_OF_TEXT])
        return other.to_str()
