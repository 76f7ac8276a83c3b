"""A prepared corpus: opens it, checks it, and reads it as one long sequence of tokens."""

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from data.files import read_json
from data.split import Split, check_names, choose, is_file_named, share_hash
from data.tokenizer import Tokenizer, load_tokenizer

FORMAT = 2
FORMAT_OF_ANSWERS = 3  # of a corpus with a loss mask, which older versions would ignore
IGNORE = -100  # a target that does not count in the loss
SCAN = 2**24  # tokens scanned at once


class Tokens:
    """Several arrays as one sequence; of memory-mapped ones, only the part that is read is loaded.

    vocab_size: tokens outside it are an error when they are read. sums: the path and SHA-256 of each array that is a
    file; the checksum is verified when the file is first read, so that damaged data is never trained on, and only files
    that are used are hashed (one second per gigabyte). loss_mask: one number per token, 0 for tokens
    that are no targets; None if all are targets.
    """

    def __init__(
        self,
        arrays: Sequence[np.ndarray],
        vocab_size: int | None = None,
        sums: list[tuple[Path, str] | None] | None = None,
        loss_mask: "Tokens | None" = None,
    ):
        self.vocab_size, self.sums, self.loss_mask = vocab_size, sums or [], loss_mask
        self.unverified = {number for number, entry in enumerate(self.sums) if entry is not None}
        self.arrays = [array.view(np.ndarray) for array in arrays]  # a memmap's own slicing is slow
        self.ends = list(accumulate(len(array) for array in arrays))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def read(self, start: int, length: int) -> np.ndarray:
        """Returns tokens start .. start + length - 1, across arrays if necessary."""
        tokens = self._read(start, length)
        if self.vocab_size is not None and len(tokens) and (largest := int(tokens.max())) >= self.vocab_size:
            raise ValueError(f"token {largest} in the text is outside the tokenizer's vocabulary of {self.vocab_size}")
        return tokens

    def targets(self, start: int, length: int) -> np.ndarray:
        """Like read, as int64, with IGNORE for tokens that are not trained on."""
        tokens = self.read(start, length).astype(np.int64)
        return tokens if self.loss_mask is None else np.where(self.loss_mask.read(start, length), tokens, IGNORE)

    def _read(self, start: int, length: int) -> np.ndarray:
        array = bisect_right(self.ends, start)
        offset = start - (self.ends[array - 1] if array else 0)
        if self.unverified and length > 0:
            for number in self.unverified.intersection(range(array, bisect_right(self.ends, start + length - 1) + 1)):
                path, sha256 = self.sums[number]
                with advising(delete_advice(path.parent.parent)):
                    check_sum(path, sha256)
                self.unverified.discard(number)
        if start + length <= self.ends[array]:
            return self.arrays[array][offset : offset + length]
        pieces = []
        while length > 0:
            piece = self.arrays[array][offset : offset + length]
            pieces.append(piece)
            length -= len(piece)
            array, offset = array + 1, 0
        return np.concatenate(pieces)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Returns read(start, length) for each start, (n, length) int64."""
        out = np.empty((len(starts), length), np.int64)
        for row, start in zip(out, starts.tolist(), strict=True):
            row[:] = self.read(start, length)
        return out

    def pieces(self) -> Iterator[np.ndarray]:
        """Yields all tokens, SCAN at a time."""
        for start in range(0, len(self), SCAN):
            yield self.read(start, min(SCAN, len(self) - start))

    def find(self, token: int) -> np.ndarray:
        """Returns the positions of a token, in ascending order."""
        found = [i * SCAN + np.flatnonzero(piece == token) for i, piece in enumerate(self.pieces())]
        return np.concatenate(found) if found else np.empty(0, np.int64)


Count = Annotated[int, Field(ge=0, lt=2**60)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Shard(TypedDict):
    file: Annotated[str, Field(pattern=r"^\w+/\w+\.bin$")]  # relative to the corpus folder
    tokens: Annotated[Count, Field(ge=1)]
    sha256: Sha256
    learned_sha256: NotRequired[Sha256]


class Shards(TypedDict):
    """The shards of a split, and their totals."""

    documents: Count
    tokens: Count
    bytes: Count
    shards: list[Shard]


Splits = Annotated[dict[Literal["train", "validation"], Shards], Field(min_length=2)]


class Format(TypedDict):
    format: int


class Manifest(Format):
    """manifest.json, the keys that are read here."""

    dtype: Literal["uint16", "uint32"]
    tokenizer: Sha256
    splits: Splits


@dataclass
class Corpus:
    folder: Path
    tokenizer: Tokenizer
    train: Tokens
    validation: Tokens
    manifest: Mapping[str, Any]
    mixture: list[tuple["Corpus", float]] = field(default_factory=list)  # its parts, with their weights

    def fingerprint(self) -> str:
        """Returns a hash of every token and the tokenizer: equal for equal text, whatever its source."""
        if self.mixture:
            parts = [[corpus.fingerprint(), weight] for corpus, weight in self.mixture]
            return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        files = [shard for split in self.manifest["splits"].values() for shard in split["shards"]]
        shards = [shard[name] for shard in files for name in ("sha256", "learned_sha256") if name in shard]
        return hashlib.sha256(json.dumps([self.manifest["tokenizer"], shards]).encode()).hexdigest()

    def check_length(self, seq_len: int):
        """Raises a ValueError if the text is too short: a window needs seq_len + 1 tokens, for the last target.

        The validation text need not fill a window, but needs two tokens.
        """
        for corpus, _ in self.mixture:
            corpus.check_length(seq_len)
        if len(self.train) < seq_len + 1:
            raise ValueError(
                f"seq_len {seq_len} needs at least {seq_len + 1} tokens, but the training text has {len(self.train)} "
                f"({self.folder}): give more text or a seq_len of at most {len(self.train) - 1}"
            )
        if len(self.validation) < 2:
            raise ValueError(
                f"the validation text has only {len(self.validation)} tokens ({self.folder}): give more text"
            )


def open_corpus(folder: str | Path, full: bool = False) -> Corpus:
    """Opens what prepare() wrote. Raises a ValueError that names a missing file or one of the wrong size.

    full: also verifies the checksum of each shard, which takes one second per gigabyte.
    """
    folder = Path(folder)
    if not (folder / "manifest.json").exists():
        raise ValueError(f"there is no corpus in {folder}: manifest.json is missing")
    with advising(delete_advice(folder)):
        manifest = _read_manifest(folder)
        for split in manifest["splits"].values():
            for shard in split["shards"]:
                check_shard(folder, shard, np.dtype(manifest["dtype"]), full)
        tokenizer = load_tokenizer(folder / "tokenizer")
        if tokenizer.fingerprint() != manifest["tokenizer"]:
            raise ValueError(f"{folder}/tokenizer is not the one that made this corpus")

    def opened(shards: list[Shard], dtype: str, vocab_size: int, loss_mask: Tokens | None = None) -> Tokens:
        arrays = [np.memmap(folder / shard["file"], dtype, "r") for shard in shards]
        return Tokens(arrays, vocab_size, [(folder / shard["file"], shard["sha256"]) for shard in shards], loss_mask)

    texts = {}
    for name in ("train", "validation"):
        shards = manifest["splits"][name]["shards"]
        masks = [mask for shard in shards if (mask := mask_of(shard)) is not None]
        loss_mask = opened(masks, "uint8", 2) if masks else None
        texts[name] = opened(shards, manifest["dtype"], tokenizer.vocab_size, loss_mask)
    return Corpus(folder, tokenizer, texts["train"], texts["validation"], manifest)


def mask_of(shard: Shard) -> Shard | None:
    """Returns the loss mask next to a shard, one byte per token, as a shard itself; None if all tokens are targets."""
    if "learned_sha256" not in shard:
        return None
    file = str(Path(shard["file"]).with_suffix(".learned"))
    return {"file": file, "tokens": shard["tokens"], "sha256": shard["learned_sha256"]}


@dataclass
class Known:
    """The corpus that a checkpoint was trained on: its folder then, its fingerprint, and the checkpoint's folder."""

    folder: str
    fingerprint: str
    checkpoint: Path

    def find(self) -> Corpus | None:
        """Opens it where it was, or in a folder corpora/ here or near the run; None if it is missing or damaged."""
        above = [Path(), *self.checkpoint.resolve().parents[:4]]
        for place in [Path(self.folder), *(folder / "corpora" / Path(self.folder).name for folder in above)]:
            try:
                corpus = open_corpus(place)
            except ValueError:  # missing or damaged: the caller prepares it again
                continue
            if corpus.fingerprint() == self.fingerprint:
                return corpus
        return None


def learned_from(about: Mapping[str, Any], checkpoint: Path) -> Known | None:
    """Returns the corpus named in a checkpoint's model.json, `about`; None if it names none."""
    if "corpus" not in about:
        return None
    return Known(about["corpus"]["folder"], about["corpus"]["fingerprint"], checkpoint)


def _read_manifest(folder: Path) -> Manifest:
    path = folder / "manifest.json"
    version = read_json(path, Format)["format"]
    if version not in (FORMAT, FORMAT_OF_ANSWERS):
        raise ValueError(f"{folder} has format {version}, this version reads {FORMAT} and {FORMAT_OF_ANSWERS}")
    manifest = read_json(path, Manifest)
    for name, split in manifest["splits"].items():
        if any((mask_of(shard) is not None) != (version == FORMAT_OF_ANSWERS) for shard in split["shards"]):
            raise ValueError(
                f"{path} is damaged: in format {FORMAT_OF_ANSWERS} every shard has a learned_sha256, in format "
                f"{FORMAT} none, got format {version} and other shards in {name}"
            )
    return manifest


def delete_advice(folder: Path) -> str:
    return f"delete {folder} and start again"


@contextmanager
def advising(what: str) -> Iterator[None]:
    """Appends to a ValueError what to do about it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}: {what}") from None


def check_shard(folder: Path, shard: Shard, dtype: np.dtype, full: bool):
    """Raises a ValueError unless a shard and its loss mask have their sizes and, if `full`, their checksums."""
    path, expected = folder / shard["file"], shard["tokens"] * dtype.itemsize
    found = path.stat().st_size if path.exists() else None
    if found != expected:
        raise ValueError(f"{path} " + ("is missing" if found is None else f"has {found} bytes, expected {expected}"))
    if full:
        check_sum(path, shard["sha256"])
    if (mask := mask_of(shard)) is not None:
        check_shard(folder, mask, np.dtype(np.uint8), full)


def check_sum(path: Path, sha256: str):
    """Raises a ValueError unless the file has this checksum."""
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise ValueError(f"{path} is damaged: its checksum is not the one in the manifest")


def open_mixture(corpora: dict[str, float]) -> Corpus:
    """Opens several prepared corpora as one, each with its weight; they must have the same tokenizer."""
    mixture = [(open_corpus(folder), float(weight)) for folder, weight in corpora.items()]
    first = mixture[0][0]
    for corpus, weight in mixture:
        if not 0 < weight < math.inf:
            raise ValueError(f"data.corpora: weights must be positive and finite, got {weight} for {corpus.folder}")
        if corpus.manifest["tokenizer"] != first.manifest["tokenizer"]:
            raise ValueError(
                f"data.corpora: {corpus.folder} and {first.folder} have different tokenizers: prepare one with "
                f"tokenizer=saved tokenizer.path={first.folder}/tokenizer"
            )
    train, validation = (
        _joined([getattr(corpus, name) for corpus, _ in mixture], first.tokenizer.vocab_size)
        for name in ("train", "validation")
    )
    return Corpus(first.folder, first.tokenizer, train, validation, first.manifest, mixture)


def _joined(parts: list[Tokens], vocab_size: int) -> Tokens:
    masks = None
    if any(part.loss_mask is not None for part in parts):
        filled = (part.loss_mask or Tokens([np.broadcast_to(np.uint8(1), len(part))], sums=[None]) for part in parts)
        masks = _joined(list(filled), 2)
    arrays, sums = ([entry for part in parts for entry in getattr(part, name)] for name in ("arrays", "sums"))
    return Tokens(arrays, vocab_size, sums, masks)


def open_token_files(paths: list[str], tokenizer: Tokenizer, validation: list[str], share: float) -> Corpus:
    """Opens raw token files, as datatrove writes them (.ds): uint16, or uint32 if the vocabulary exceeds 65,536.

    `validation` is a list of patterns of file names; if it is empty, about `share` of the tokens are chosen by hashes
    of the file names, see `choose`. A file is only cut at the start of a document.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    arrays = {}
    for path in paths:
        size = Path(path).stat().st_size
        if size == 0 or size % dtype.itemsize:
            raise ValueError(
                f"{path} has {size} bytes, which is not a positive multiple of {dtype.itemsize}: it cannot hold "
                f"{dtype.name} tokens"
            )
        arrays[path] = np.memmap(path, dtype, "r")
    check_names(validation, list(arrays))
    hashes = {path: share_hash(Path(path).name) for path in arrays}
    if validation or len(arrays) == 1:
        split = Split(validation, 0.0, cut=share)
    else:
        split = choose(list(hashes.values()), [len(array) for array in arrays.values()], share)
    cuts = {}  # of each file, where its validation text starts
    for path, array in arrays.items():
        part = split.share_of(hashes[path], len(array))
        if validation:
            part = any(is_file_named(path, pattern) for pattern in validation)
        at = int(len(array) * (1 - part))
        cuts[path] = _next_document(array, at, tokenizer) if 0 < part < 1 else at
    train = [array[: cuts[path]] for path, array in arrays.items() if cuts[path] > 0]
    rest = [array[cuts[path] :] for path, array in arrays.items() if cuts[path] < len(array)]
    for name, pieces in (("train", train), ("validation", rest)):
        if not pieces:
            raise ValueError(f"no file is left for {name}: data.validation {validation}, files {', '.join(arrays)}")
    # in place of checksums of what may be terabytes: names, sizes, and the cuts unless the hashes imply them
    lowest = {path for path, value in hashes.items() if value < share} or {min(hashes, key=hashes.__getitem__)}
    by_hash = {path: 0 if path in lowest else len(array) for path, array in arrays.items()}
    implied = validation or len(arrays) == 1 or cuts == by_hash
    shards = [
        {"file": path, "tokens": len(array), "sha256": f"{path}:{len(array)}" + ("" if implied else f":{cuts[path]}")}
        for path, array in arrays.items()
    ]
    manifest = {"tokenizer": tokenizer.fingerprint(), "splits": {"all": {"shards": shards}}}
    splits = Tokens(train, tokenizer.vocab_size), Tokens(rest, tokenizer.vocab_size)
    return Corpus(Path(paths[0]).parent, tokenizer, *splits, manifest)


def _next_document(tokens: np.ndarray, at: int, tokenizer: Tokenizer) -> int:
    """Returns the start of the first document that starts at or after `at`; `at` itself if there is none."""
    before = max(at - 1, 0)
    starts = tokenizer.document_bounds(Tokens([tokens[before:]]))[0]
    return before + int(starts[1]) if len(starts) > 1 else at
