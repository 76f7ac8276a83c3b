"""A prepared corpus: opened, checked, and read as one long row of tokens."""

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np

from data.split import Split, check_names, choose, is_file_named, share_hash
from data.tokenizer import Tokenizer, load_tokenizer

FORMAT = 2
SCAN = 2**24  # tokens looked at at once


class Tokens:
    """Several arrays as one sequence; where they are memory-mapped, only what is read is loaded.

    vocab_size: read refuses tokens outside it. sums: of each array that is a file its path and SHA-256, which are
    compared where the file is first read, so that what a disk has damaged is refused before anything is learned from
    it, and no more is hashed (a second a gigabyte) than is read.
    """

    def __init__(
        self, arrays: list[np.ndarray], vocab_size: int | None = None, sums: list[tuple[Path, str]] | None = None
    ):
        self.vocab_size, self.sums = vocab_size, sums or []
        self.unread = set(range(len(self.sums)))
        self.arrays = [array.view(np.ndarray) for array in arrays]  # a memmap's own slicing is slow
        self.ends = list(accumulate(len(array) for array in arrays))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens start .. start + length - 1, across arrays where need be."""
        tokens = self._read(start, length)
        if self.vocab_size is not None and len(tokens) and (largest := int(tokens.max())) >= self.vocab_size:
            raise ValueError(f"token {largest} in the text is outside the tokenizer's vocabulary of {self.vocab_size}")
        return tokens

    def _read(self, start: int, length: int) -> np.ndarray:
        array = bisect_right(self.ends, start)
        offset = start - (self.ends[array - 1] if array else 0)
        if self.unread and length > 0:
            for number in self.unread.intersection(range(array, bisect_right(self.ends, start + length - 1) + 1)):
                check_sum(*self.sums[number])
                self.unread.discard(number)
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
        """read(start, length) for each start, (n, length) int64."""
        out = np.empty((len(starts), length), np.int64)
        for row, start in zip(out, starts.tolist(), strict=True):
            row[:] = self.read(start, length)
        return out

    def pieces(self) -> Iterator[np.ndarray]:
        """All of it, piece by piece."""
        for start in range(0, len(self), SCAN):
            yield self.read(start, min(SCAN, len(self) - start))

    def find(self, token: int) -> np.ndarray:
        """Where a token stands, all of it, in order."""
        found = [i * SCAN + np.flatnonzero(piece == token) for i, piece in enumerate(self.pieces())]
        return np.concatenate(found) if found else np.empty(0, np.int64)


@dataclass
class Corpus:
    folder: Path
    tokenizer: Tokenizer
    train: Tokens
    validation: Tokens
    manifest: dict
    mixture: list[tuple["Corpus", float]] = field(default_factory=list)  # what it is mixed from, with weights

    def fingerprint(self) -> str:
        """A hash of every token and the tokenizer: equal for equal text, wherever it came from."""
        if self.mixture:
            parts = [[corpus.fingerprint(), weight] for corpus, weight in self.mixture]
            return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        shards = [shard["sha256"] for split in self.manifest["splits"].values() for shard in split["shards"]]
        return hashlib.sha256(json.dumps([self.manifest["tokenizer"], shards]).encode()).hexdigest()

    def check_length(self, seq_len: int):
        """Refuses a text that is too short: a window needs one token more than it reads, the last target.

        Held-out text need not fill a window, but two tokens there must be.
        """
        for corpus, _ in self.mixture:
            corpus.check_length(seq_len)
        if len(self.train) < seq_len + 1:
            raise ValueError(
                f"seq_len {seq_len} needs at least {seq_len + 1} tokens, but the training text has {len(self.train)} "
                f"({self.folder}): give more text or a seq_len of at most {len(self.train) - 1}"
            )
        if len(self.validation) < 2:
            raise ValueError(f"the held-out text has {len(self.validation)} tokens ({self.folder}): give more text")


def open_corpus(folder: str | Path, full: bool = False) -> Corpus:
    """Opens what prepare() wrote; a file that is missing or of the wrong size is refused by name.

    full: each shard is read and compared with its checksum too, which takes a second a gigabyte.
    """
    folder = Path(folder)
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no corpus in {folder}: manifest.json is missing") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder}/manifest.json is damaged ({error}): {_MEND.format(folder)}") from None
    if not isinstance(manifest, dict) or "splits" not in manifest:
        raise ValueError(f"{folder}/manifest.json is damaged (no splits): {_MEND.format(folder)}")
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"{folder} has format {manifest['format']}, this version reads {FORMAT}: {_MEND.format(folder)}"
        )
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            try:
                check_shard(folder, shard, np.dtype(manifest["dtype"]), full)
            except ValueError as error:
                raise ValueError(f"{error}: {_MEND.format(folder)}") from None
    tokenizer = load_tokenizer(folder / "tokenizer")
    if tokenizer.fingerprint() != manifest["tokenizer"]:
        raise ValueError(f"{folder}/tokenizer is not the one that made this corpus: {_MEND.format(folder)}")
    train, validation = (
        Tokens(
            [np.memmap(folder / shard["file"], manifest["dtype"], "r") for shard in split["shards"]],
            tokenizer.vocab_size,
            [(folder / shard["file"], shard["sha256"]) for shard in split["shards"]],
        )
        for split in (manifest["splits"][name] for name in ("train", "validation"))
    )
    return Corpus(folder, tokenizer, train, validation, manifest)


_MEND = "delete {} and start again to prepare it anew"


def check_shard(folder: Path, shard: dict, dtype: np.dtype, full: bool):
    """ValueError unless the file has its size and, if `full`, its checksum."""
    path, expected = folder / shard["file"], shard["tokens"] * dtype.itemsize
    found = path.stat().st_size if path.exists() else None
    if found != expected:
        raise ValueError(f"{path} " + ("is missing" if found is None else f"has {found} bytes, expected {expected}"))
    if full:
        check_sum(path, shard["sha256"])


def check_sum(path: Path, sha256: str):
    """ValueError unless the file has this checksum."""
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise ValueError(
                f"{path} is damaged, its checksum is not that of the manifest: " + _MEND.format("the corpus")
            )


def open_mixture(corpora: dict[str, float]) -> Corpus:
    """Several prepared corpora as one, each with its weight; they must share one tokenizer."""
    mixture = [(open_corpus(folder), float(weight)) for folder, weight in corpora.items()]
    first = mixture[0][0]
    for corpus, weight in mixture:
        if not 0 < weight < math.inf:
            raise ValueError(f"data.corpora: weights must be above 0 and finite, got {weight} for {corpus.folder}")
        if corpus.manifest["tokenizer"] != first.manifest["tokenizer"]:
            raise ValueError(
                f"data.corpora: {corpus.folder} and {first.folder} have different tokenizers: prepare one with "
                f"tokenizer=saved tokenizer.path={first.folder}/tokenizer"
            )
    train, validation = (
        Tokens(
            [array for corpus, _ in mixture for array in getattr(corpus, name).arrays],
            first.tokenizer.vocab_size,
            [one for corpus, _ in mixture for one in getattr(corpus, name).sums],
        )
        for name in ("train", "validation")
    )
    return Corpus(first.folder, first.tokenizer, train, validation, first.manifest, mixture)


def open_token_files(paths: list[str], tokenizer: Tokenizer, validation: list[str], share: float) -> Corpus:
    """Raw tokens, uint16 or by a vocabulary above 65,536 uint32, as datatrove writes them (.ds), read as they are.

    Held out are the files that `validation` names by patterns; where it is empty about `share` of the tokens, by hashes
    of the files' names, as of documents: see `choose`. A file that is cut is cut where a document begins.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    arrays = {}
    for path in map(Path, paths):
        size = path.stat().st_size
        if size == 0 or size % dtype.itemsize:
            raise ValueError(
                f"{path} has {size} bytes, no multiple of {dtype.itemsize}: it holds no {dtype.name} tokens"
            )
        arrays[str(path)] = np.memmap(path, dtype, "r")
    check_names(validation, list(arrays))
    hashes = {path: share_hash(Path(path).name) for path in arrays}
    if validation or len(arrays) == 1:
        split = Split(validation, 0.0, cut=share)
    else:
        split = choose(list(hashes.values()), [len(array) for array in arrays.values()], share)
    cuts = {}  # where what is held out of a file begins
    for path, array in arrays.items():
        part = split.share_of(hashes[path], len(array))
        if validation:
            part = any(is_file_named(path, pattern) for pattern in validation)
        at = int(len(array) * (1 - part))
        cuts[path] = _next_document(array, at, tokenizer) if 0 < part < 1 else at
    train = [array[: cuts[path]] for path, array in arrays.items() if cuts[path] > 0]
    rest = [array[cuts[path] :] for path, array in arrays.items() if cuts[path] < len(array)]
    for name, some in (("train", train), ("validation", rest)):
        if not some:
            raise ValueError(f"no file is left for {name}: data.validation {validation}, files {', '.join(arrays)}")
    # no checksum of what may be terabytes: names and sizes, and how they are cut where hashes alone do not tell it
    lowest = {path for path, value in hashes.items() if value < share} or {min(hashes, key=hashes.__getitem__)}
    by_hash = {path: 0 if path in lowest else len(array) for path, array in arrays.items()}
    told = validation or len(arrays) == 1 or cuts == by_hash
    shards = [
        {"file": path, "tokens": len(array), "sha256": f"{path}:{len(array)}" + ("" if told else f":{cuts[path]}")}
        for path, array in arrays.items()
    ]
    manifest = {"tokenizer": tokenizer.fingerprint(), "splits": {"all": {"shards": shards}}}
    train, rest = (Tokens(some, tokenizer.vocab_size) for some in (train, rest))
    return Corpus(Path(paths[0]).parent, tokenizer, train, rest, manifest)


def _next_document(tokens: np.ndarray, at: int, tokenizer: Tokenizer) -> int:
    """Where the first document that does not begin before `at` begins; `at` itself where there is none."""
    before = max(at - 1, 0)
    starts = tokenizer.document_bounds(Tokens([tokens[before:]]))[0]
    return before + int(starts[1]) if len(starts) > 1 else at
