"""Text to tokens and back: bytes, characters, byte-pair encoding, or another's tokenizer.json, behind one class.

A token is a piece of UTF-8, so any text comes back exactly. Text that looks like a special token is text, unless
`parse_special` makes it that token; the end-of-text token, which stands after each document, is put there by its id.
"""

import base64
import codecs
import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from pydantic import Discriminator, Field
from typing_extensions import TypedDict

from data import files

FILE = "vocabulary.json"
END_OF_TEXT = "<|endoftext|>"
DOWNLOAD_TIMEOUT = 30  # seconds without a byte


class Tokenizer(ABC):
    """Ids are 0 .. vocab_size - 1; `end_of_text` is one of them."""

    kind: str
    vocab_size: int
    end_of_text: int
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
        return np.append(ids, ids.dtype.type(self.end_of_text))

    def documents(self, texts: list[str]) -> np.ndarray:
        """The ids of several documents, one behind the other: what document gives for each, faster for many."""
        return np.concatenate([self.document(text) for text in texts])

    def document_bounds(self, tokens) -> tuple[np.ndarray, np.ndarray]:
        """First token of each document in a row of them (anything with len and find(token)), and the one behind it."""
        ends = tokens.find(self.end_of_text) + 1
        if len(ends) == 0 or ends[-1] < len(tokens):
            ends = np.append(ends, len(tokens))  # one that was cut off
        return np.concatenate([[0], ends[:-1]]), ends

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

    def decoder(self, after: list[int]) -> "Decoder":
        """What turns tokens into text one by one. `after`: the ids that they follow, whole text."""
        return Decoder(self)

    def stream(self, tokens: Iterable[int], after: list[int]) -> Iterator[str]:
        """The text of tokens as they come, never half a character. `after`: the ids that they follow, whole text."""
        decoder = self.decoder(after)
        for token in tokens:
            yield decoder.push(int(token))
        yield decoder.end()

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


class ByteTokenizer(Tokenizer):
    """Each byte of UTF-8 is a token."""

    kind = "bytes"
    vocab_size = 257
    end_of_text = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint16)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def vocabulary(self) -> dict:
        return {"kind": self.kind}

    def to_json(self) -> str:
        return _byte_level_json([bytes([byte]) for byte in range(256)], [], {END_OF_TEXT: self.end_of_text}, None)


class CharacterTokenizer(Tokenizer):
    """Each character of a known alphabet is a token."""

    kind = "chars"

    def __init__(self, characters: str):
        self.characters = "".join(sorted(set(characters)))
        self.vocab_size = len(self.characters) + 1
        self.end_of_text = len(self.characters)
        codes = self._codes(self.characters)
        self.ids = np.full(codes.max(initial=0) + 2, self.vocab_size, np.uint32)  # by code; the last: all beyond
        self.ids[codes] = np.arange(len(codes))

    @staticmethod
    def _codes(text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-32-le"), np.uint32)

    def encode(self, text: str) -> np.ndarray:
        ids = self.ids[np.minimum(self._codes(text), len(self.ids) - 1)]
        if (ids == self.vocab_size).any():
            unknown = "".join(sorted(set(text) - set(self.characters)))[:20]
            raise ValueError(
                f"characters that the tokenizer has not seen: {unknown!r}; tokenizer=bytes or bpe knows all"
            )
        return ids

    def token_bytes(self, token: int) -> bytes:
        return self.characters[token].encode("utf-8") if token < len(self.characters) else b""

    def vocabulary(self) -> dict:
        return {"kind": self.kind, "characters": self.characters}

    def to_json(self) -> str:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        ids = {character: id for id, character in enumerate(self.characters)}
        other = Tokenizer(models.WordLevel({**ids, END_OF_TEXT: self.end_of_text}, END_OF_TEXT))
        other.pre_tokenizer = pre_tokenizers.Split(Regex("(?m:.)"), "isolated")  # m: a line break is a character too
        other.decoder = decoders.Fuse()
        other.add_special_tokens([END_OF_TEXT])
        return other.to_str()


class BPETokenizer(Tokenizer):
    """Byte-pair encoding ("Neural Machine Translation of Rare Words with Subword Units", 2015), run by tiktoken.

    `ranks` holds the bytes of each token in the order in which they were merged, none where an id is not used;
    `pattern` is the regular expression that cuts text into pieces first, which no token crosses; `special` gives ids to
    names, the first is end-of-text.
    """

    kind = "bpe"

    def __init__(self, ranks: list[bytes], pattern: str, special: dict[str, int], parse_special: bool = False):
        import tiktoken

        self.ranks, self.pattern, self.special, self.parse_special = ranks, pattern, special, parse_special
        self.end_of_text = next(iter(special.values()))
        self.vocab_size = max([len(ranks) - 1, *special.values()]) + 1
        self.encoding = tiktoken.Encoding(
            name="inkling",
            pat_str=pattern,
            mergeable_ranks={token: rank for rank, token in enumerate(ranks) if token},
            special_tokens=special,
        )
        self.shown = {id: name.encode() for name, id in special.items() if parse_special and id != self.end_of_text}

    def encode(self, text: str) -> np.ndarray:
        return self._encode(text, set(self.special) if self.parse_special else set())

    def documents(self, texts: list[str]) -> np.ndarray:
        name = next(iter(self.special))
        if self.parse_special or any(name in text for text in texts):
            return super().documents(texts)
        return self._encode("".join(text + name for text in texts), {name})  # one call, whatever their number

    def _encode(self, text: str, special: set[str]) -> np.ndarray:
        try:
            return self.encoding.encode_to_numpy(text, allowed_special=special, disallowed_special=())
        except ValueError as error:
            if "Regex error" not in str(error):
                raise
            # a run of spaces so long that looking ahead runs out of stack: it is cut, and nothing is lost
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
        parse = {"parse_special": True} if self.parse_special else {}  # older vocabularies lack it
        return {"kind": self.kind, "pattern": self.pattern, "ranks": ranks, "special": self.special, **parse}

    def merges(self) -> Iterator[tuple[bytes, bytes]]:
        """The two tokens that each longer one was merged from, in order."""
        rank = {token: i for i, token in enumerate(self.ranks)}
        for i, token in enumerate(self.ranks):
            if len(token) < 2:
                continue
            parts = [bytes([byte]) for byte in token]
            while len(parts) > 2:  # as an encoder would that knows no token from i on
                pairs = [rank.get(a + b, i) for a, b in pairwise(parts)]
                if (best := min(pairs)) >= i:
                    break
                at = pairs.index(best)
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            if len(parts) == 2:  # else a token that merges cannot reach, only a whole piece
                yield parts[0], parts[1]

    def to_json(self) -> str:
        return _byte_level_json(self.ranks, self.merges(), self.special, self.pattern)


def _check_pattern(pattern: str):
    """ValueError for what is no regular expression, or finds pieces without a character, of which BPE knows nothing."""
    import regex
    import rustbpe

    try:
        rustbpe.Tokenizer().train_from_iterator(iter([]), 256, pattern=pattern)
    except ValueError as error:
        raise ValueError(f"tokenizer.pattern is no regular expression, got {pattern!r}: {error}") from error
    try:
        found = list(regex.finditer(pattern, "".join(map(chr, range(256)))))
    except regex.error:  # another dialect
        return
    if any(piece.start() == piece.end() for piece in found):
        raise ValueError(f"tokenizer.pattern must find pieces of at least one character, got {pattern!r}")


def train_bpe(
    texts: Iterable[str], vocab_size: int, pattern: str, special: list[str], parse_special: bool = False
) -> BPETokenizer:
    """Learns vocab_size - len(special) tokens from texts, or as many as they give; the special ones come after them.

    With parse_special nothing is learned from the names of special tokens in the texts.
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
    """One of tiktoken's encodings, such as gpt2, cl100k_base and o200k_base.

    Its file is downloaded once, into TIKTOKEN_CACHE_DIR where that is set; ValueError says which one to bring if there
    is no network, after a bounded wait.
    """
    import requests
    import tiktoken
    import tiktoken.load

    asked: list[str] = []

    def read(url: str) -> bytes:  # tiktoken's own would wait for ever behind a silent proxy
        asked.append(url)
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
        file = hashlib.sha1(asked[-1].encode()).hexdigest()
        folder = os.environ.get("TIKTOKEN_CACHE_DIR")
        place = f"{folder}/{file}" if folder else f"{file} in a folder and set TIKTOKEN_CACHE_DIR to it"
        raise ValueError(
            f"the encoding {name} needs {asked[-1]}, which cannot be fetched ({type(error).__name__}): bring that file "
            f"as {place}, or take tokenizer=bpe, bytes or chars, which need no network"
        ) from error
    finally:
        loading.read_file = original
    ranks = [b""] * (max(encoding._mergeable_ranks.values()) + 1)
    for token, rank in encoding._mergeable_ranks.items():
        ranks[rank] = token
    special = dict(sorted(encoding._special_tokens.items(), key=lambda item: item[0] != END_OF_TEXT))
    return BPETokenizer(ranks, encoding._pat_str, special, parse_special)


class JSONTokenizer(Tokenizer):
    """Another model's tokenizer.json, run by Hugging Face's tokenizers.

    `content` is that file, `beginning` the id that its model has seen before every text, if any, `ends` those that may
    follow one. Its normalizer decides whether a text comes back exactly: many drop a space at the start.
    """

    kind = "json"
    lossless = False
    FILE = "tokenizer.json"

    def __init__(self, content: str, beginning: int | None, ends: list[int], parse_special: bool = False):
        import tokenizers

        self.content, self.beginning, self.ends, self.parse_special = content, beginning, ends, parse_special
        self.end_of_text = ends[0]
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library has no kind of its own
            raise ValueError(f"this tokenizer.json is no tokenizer that can be read: {error}") from error
        self.tokenizer.no_truncation()  # settings of a training long past
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = not parse_special  # true: as text
        self.vocab_size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        for id in self.stops:
            if not 0 <= id < self.vocab_size:
                raise ValueError(f"special tokens must be ids below {self.vocab_size}, got {id}")
        self.added = self.tokenizer.get_added_tokens_decoder()
        self.special = {token.content: id for id, token in self.added.items()}
        hidden = self.stops if parse_special else self.added.keys()  # in a text
        self.hidden = {id for id, token in self.added.items() if token.special and id in hidden}
        self.bytes_of = {character: byte for byte, character in enumerate(_byte_level_alphabet())}
        self.byte_level = '"ByteLevel"' in json.dumps(json.loads(content).get("decoder"))

    @property
    def stops(self) -> set[int]:
        return {*self.ends} | ({self.beginning} if self.beginning is not None else set())

    def encode(self, text: str) -> np.ndarray:
        text.encode("utf-8")  # half a surrogate pair is a ValueError here, and worse there
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    def document(self, text: str) -> np.ndarray:
        return self.documents([text])

    def documents(self, texts: list[str]) -> np.ndarray:
        for text in texts:
            text.encode("utf-8")
        first = [] if self.beginning is None else [self.beginning]
        last = [self.end_of_text] if self.beginning is None else []
        encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)  # on all cores
        return np.concatenate([np.array([*first, *some.ids, *last], np.uint32) for some in encoded])

    def document_bounds(self, tokens) -> tuple[np.ndarray, np.ndarray]:
        if self.beginning is None:
            return super().document_bounds(tokens)
        starts = tokens.find(self.beginning)
        if len(starts) == 0 or starts[0] > 0:
            starts = np.concatenate([[0], starts])
        return starts, np.append(starts[1:], len(tokens))

    def prompt(self, text: str) -> list[int]:
        if self.beginning is None:
            return super().prompt(text)
        return [self.beginning, *self.encode(text).tolist()]

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
            "beginning": self.beginning,
            "ends": self.ends,
            "sha256": hashlib.sha256(self.content.encode()).hexdigest(),
            **({"parse_special": True} if self.parse_special else {}),  # older vocabularies lack it
        }

    def to_json(self) -> str:
        return self.content

    def save(self, folder: Path):
        super().save(folder)
        (folder / self.FILE).write_text(self.content, encoding="utf-8")


class JSONDecoder(Decoder):
    """By the library's own stream, which knows what a tokenizer.json does to spaces between tokens."""

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


def read_json(path: str | Path, beginning: str | None, end_of_text: str, parse_special: bool = False) -> JSONTokenizer:
    """The tokenizer of a tokenizer.json, whose special tokens are given by name."""
    try:
        content = Path(path).read_text(encoding="utf-8-sig")
        names = {token["content"]: token["id"] for token in json.loads(content)["added_tokens"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no tokenizer.json that can be read: {error}") from error
    for name in (beginning, end_of_text):
        if name is not None and name not in names:
            raise ValueError(f"{path} has no special token {name}: there are {', '.join(names)}")
    first = None if beginning is None else names[beginning]
    return JSONTokenizer(content, first, [names[end_of_text]], parse_special)


def _byte_level_json(
    ranks: list[bytes], merges: Iterable[tuple[bytes, bytes]], special: dict[str, int], pattern: str | None
) -> str:
    """A tokenizer.json over bytes that are spelled as GPT-2 spells them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    alphabet = _byte_level_alphabet()

    def spell(token: bytes) -> str:
        return "".join(alphabet[byte] for byte in token)

    vocabulary = {spell(token): id for id, token in enumerate(ranks) if token} | special
    pairs = [(spell(a), spell(b)) for a, b in merges]
    other = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=True))
    cut = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    other.pre_tokenizer = pre_tokenizers.Sequence([*cut, spelled])
    other.decoder = decoders.ByteLevel()
    other.add_special_tokens(list(special))
    return other.to_str()


def _byte_level_alphabet() -> list[str]:
    """The character that stands for each byte in GPT-2's vocabulary: itself where it prints, else one from 256 on."""
    prints = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in prints]
    return [chr(byte) if byte in prints else chr(256 + others.index(byte)) for byte in range(256)]


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
    """The tokenizer saved in a folder."""
    path = Path(folder) / FILE
    if not path.is_file():
        raise ValueError(f"there is no tokenizer in {folder}: {FILE} is missing")
    vocabulary = files.read_json(path, Vocabulary)
    try:
        return _made_of(vocabulary, Path(folder))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _made_of(vocabulary: dict, folder: Path) -> Tokenizer:
    if vocabulary["kind"] == "bytes":
        return ByteTokenizer()
    if vocabulary["kind"] == "chars":
        return CharacterTokenizer(vocabulary["characters"])
    parse_special = vocabulary.get("parse_special", False)  # older ones lack it
    if vocabulary["kind"] == "json":
        content = (folder / JSONTokenizer.FILE).read_text(encoding="utf-8")
        return JSONTokenizer(content, vocabulary["beginning"], vocabulary["ends"], parse_special)
    ranks = [base64.b64decode(token, validate=True) for token in vocabulary["ranks"]]
    return BPETokenizer(ranks, vocabulary["pattern"], vocabulary["special"], parse_special)
