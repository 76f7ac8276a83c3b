"""Byte-pair encoding: trained here, or one of tiktoken's encodings."""

import base64
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from data.tokenizer.base import END_OF_TEXT, Tokenizer
from data.tokenizer.byte_level import byte_level_json

DOWNLOAD_TIMEOUT = 30  # seconds without receiving a byte


class BPETokenizer(Tokenizer):
    """Byte-pair encoding ("Neural Machine Translation of Rare Words with Subword Units", 2015), run by tiktoken.

    `ranks` holds the bytes of each token in the order of merging, empty for unused ids; `pattern` is the regular
    expression that first splits text into pieces, which no token crosses; `special` maps names to ids, end-of-text
    first.
    """

    kind = "bpe"

    def __init__(self, ranks: list[bytes], pattern: str, special: dict[str, int], parse_special: bool = False):
        import tiktoken

        self.ranks, self.pattern, self.special, self.parse_special = ranks, pattern, special, parse_special
        self.eos_id = next(iter(special.values()))
        self.vocab_size = max([len(ranks) - 1, *special.values()]) + 1
        self.encoding = tiktoken.Encoding(
            name="inkling",
            pat_str=pattern,
            mergeable_ranks={token: rank for rank, token in enumerate(ranks) if token},
            special_tokens=special,
        )
        self.shown = {id: name.encode() for name, id in special.items() if parse_special and id != self.eos_id}

    def encode(self, text: str) -> np.ndarray:
        return self._encode(text, set(self.special) if self.parse_special else set())

    def documents(self, texts: list[str]) -> np.ndarray:
        name = next(iter(self.special))
        if self.parse_special or any(name in text for text in texts):
            return super().documents(texts)
        return self._encode("".join(text + name for text in texts), {name})  # one call for all

    def _encode(self, text: str, special: set[str]) -> np.ndarray:
        try:
            return self.encoding.encode_to_numpy(text, allowed_special=special, disallowed_special=())
        except ValueError as error:
            if "Regex error" not in str(error):
                raise
            # a run of spaces so long that the pattern's lookahead overflows the stack: split it, which loses nothing
            pieces = [piece for piece in re.split(r"(\s{1000})", text) if piece]
            if len(pieces) == 1:
                raise
            return np.concatenate([self._encode(piece, special) for piece in pieces])

    def token_bytes(self, token: int) -> bytes:
        if token in self.shown:
            return self.shown[token]
        return self.ranks[token] if token < len(self.ranks) else b""

    def vocabulary(self) -> dict:
        ranks = [base64.b64encode(token).decode() for token in self.ranks]
        parse = {"parse_special": True} if self.parse_special else {}  # older vocabularies lack this key
        return {"kind": self.kind, "pattern": self.pattern, "ranks": ranks, "special": self.special, **parse}

    def merges(self) -> Iterator[tuple[bytes, bytes]]:
        """Yields the two tokens that each longer token was merged from, in order."""
        rank = {token: i for i, token in enumerate(self.ranks)}
        for i, token in enumerate(self.ranks):
            if len(token) < 2:
                continue
            parts = [bytes([byte]) for byte in token]
            while len(parts) > 2:  # as an encoder that knows only the tokens before i
                pairs = [rank.get(a + b, i) for a, b in pairwise(parts)]
                if (best := min(pairs)) >= i:
                    break
                at = pairs.index(best)
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            if len(parts) == 2:  # otherwise merges cannot reach the token, it only matches a whole piece
                yield parts[0], parts[1]

    def to_json(self) -> str:
        return byte_level_json(self.ranks, self.merges(), self.special, self.pattern)


def _check_pattern(pattern: str):
    """Raises a ValueError if this is not a regular expression or matches empty pieces, which BPE cannot handle."""
    import regex
    import rustbpe

    try:
        rustbpe.Tokenizer().train_from_iterator(iter([]), 256, pattern=pattern)
    except ValueError as error:
        raise ValueError(f"tokenizer.pattern is not a valid regular expression, got {pattern!r}: {error}") from error
    try:
        found = list(regex.finditer(pattern, "".join(map(chr, range(256)))))
    except regex.error:  # rustbpe accepts another dialect
        return
    if any(piece.start() == piece.end() for piece in found):
        raise ValueError(f"tokenizer.pattern must find pieces of at least one character, got {pattern!r}")


def train_bpe(
    texts: Iterable[str], vocab_size: int, pattern: str, special: list[str], parse_special: bool = False
) -> BPETokenizer:
    """Learns up to vocab_size - len(special) tokens from texts, fewer if the texts are short; special ids come last.

    With parse_special the names of special tokens in the texts are left out of training.
    """
    import rustbpe

    _check_pattern(pattern)
    n = vocab_size - len(special)
    trainer = rustbpe.Tokenizer()
    if parse_special:
        names = re.compile("|".join(map(re.escape, special)))
        texts = (piece for text in texts for piece in names.split(text))
    trainer.train_from_iterator(iter(texts), n, pattern=pattern)
    ranks = sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])
    special_ids = {name: len(ranks) + i for i, name in enumerate(special)}
    return BPETokenizer([bytes(token) for token, _ in ranks], pattern, special_ids, parse_special)


def named_encoding(name: str, parse_special: bool = False) -> BPETokenizer:
    """Loads one of tiktoken's encodings, such as gpt2, cl100k_base or o200k_base.

    Its file is downloaded once, into TIKTOKEN_CACHE_DIR if that is set. Without a network a ValueError names the file
    to provide, after at most DOWNLOAD_TIMEOUT.
    """
    import requests
    import tiktoken
    import tiktoken.load

    urls: list[str] = []

    def read(url: str) -> bytes:  # tiktoken's own has no timeout
        urls.append(url)
        response = requests.get(url, timeout=DOWNLOAD_TIMEOUT)
        response.raise_for_status()
        return response.content

    if name not in tiktoken.list_encoding_names():
        raise ValueError(f"tiktoken has no encoding {name}: there are {', '.join(tiktoken.list_encoding_names())}")
    loading: Any = tiktoken.load
    original, loading.read_file = loading.read_file, read
    try:
        encoding = tiktoken.get_encoding(name)
    except requests.RequestException as error:
        file = hashlib.sha1(urls[-1].encode()).hexdigest()
        folder = os.environ.get("TIKTOKEN_CACHE_DIR")
        place = f"{folder}/{file}" if folder else f"{file} in a folder and set TIKTOKEN_CACHE_DIR to it"
        raise ValueError(
            f"the encoding {name} needs {urls[-1]}, which cannot be fetched ({type(error).__name__}): save that file "
            f"as {place}, or use tokenizer=bpe, bytes or chars, which need no network"
        ) from error
    finally:
        loading.read_file = original
    ranks = [b""] * (max(encoding._mergeable_ranks.values()) + 1)
    for token, rank in encoding._mergeable_ranks.items():
        ranks[rank] = token
    special = dict(sorted(encoding._special_tokens.items(), key=lambda item: item[0] != END_OF_TEXT))
    return BPETokenizer(ranks, encoding._pat_str, special, parse_special)
