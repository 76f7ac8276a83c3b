"""A prepared corpus: opened, checked, and read as one long row of tokens."""

import hashlib
import json
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from data.tokenizer import Tokenizer, load_tokenizer

FORMAT = 1


class Tokens:
    """The shards of a split as one sequence, memory-mapped: only what is read is loaded."""

    def __init__(self, folder: Path, shards: list[dict], dtype: str):
        self.arrays = [np.memmap(folder / shard["file"], dtype, mode="r") for shard in shards]
        self.ends = list(accumulate(len(array) for array in self.arrays))

    def __len__(self) -> int:
        return self.ends[-1]

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens start .. start + length - 1, across shards where need be."""
        pieces = []
        shard = bisect_right(self.ends, start)
        offset = start - (self.ends[shard - 1] if shard else 0)
        while length > 0:
            piece = self.arrays[shard][offset : offset + length]
            pieces.append(piece)
            length -= len(piece)
            shard, offset = shard + 1, 0
        return np.concatenate(pieces) if len(pieces) != 1 else pieces[0]


@dataclass
class Corpus:
    folder: Path
    tokenizer: Tokenizer
    train: Tokens
    validation: Tokens
    manifest: dict

    def fingerprint(self) -> str:
        """A hash of every token and the tokenizer: equal for equal text, wherever it came from."""
        shards = [shard["sha256"] for split in self.manifest["splits"].values() for shard in split["shards"]]
        return hashlib.sha256(json.dumps([self.manifest["tokenizer"], shards]).encode()).hexdigest()

    def check_length(self, seq_len: int):
        """Refuses a window that does not fit: it needs one token more than it reads, the last target."""
        for name in ("train", "validation"):
            tokens = len(getattr(self, name))
            if tokens < seq_len + 1:
                raise ValueError(
                    f"seq_len {seq_len} needs at least {seq_len + 1} tokens, but the {name} text has {tokens} "
                    f"({self.folder}): give more text or a seq_len of at most {tokens - 1}"
                )


def open_corpus(folder: str | Path) -> Corpus:
    """Opens what prepare() wrote; a file that is missing or of the wrong size is refused by name."""
    folder = Path(folder)
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no corpus in {folder}: manifest.json is missing") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder}/manifest.json is damaged ({error}): {_MEND.format(folder)}") from None
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"{folder} has format {manifest['format']}, this version reads {FORMAT}: {_MEND.format(folder)}"
        )
    size = np.dtype(manifest["dtype"]).itemsize
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            path, expected = folder / shard["file"], shard["tokens"] * size
            found = path.stat().st_size if path.exists() else None
            if found != expected:
                what = "is missing" if found is None else f"has {found} bytes, expected {expected}"
                raise ValueError(f"{path} {what}: {_MEND.format(folder)}")
    tokenizer = load_tokenizer(folder / "tokenizer")
    if tokenizer.fingerprint() != manifest["tokenizer"]:
        raise ValueError(f"{folder}/tokenizer is not the one that made this corpus: {_MEND.format(folder)}")
    train, validation = (
        Tokens(folder, manifest["splits"][name]["shards"], manifest["dtype"]) for name in ("train", "validation")
    )
    return Corpus(folder, tokenizer, train, validation, manifest)


_MEND = "delete {} and start again to prepare it anew"
