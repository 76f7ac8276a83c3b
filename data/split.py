"""Splits documents into training and validation: by name, or by a hash of their text for a given share."""

import difflib
import hashlib
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from data.readers import Document

LOOK = 50_000_000  # characters; in a source no longer than this all sizes are known before the split


@dataclass
class Split:
    """Validation documents are those that match a pattern or, without patterns, those whose hash is below `below`.

    With `cut`, the hash does not apply to documents of more than `longest` characters: the last `cut` (a share) of each
    is validation text.
    """

    patterns: list[str]
    below: float
    cut: float | None = None
    longest: float = 0

    def share_of(self, hash: float, size: int) -> float:
        """Returns the share of a document that is validation text, if there are no patterns."""
        if self.cut is not None and size > self.longest:
            return self.cut
        return float(hash < self.below)

    def pieces(self, document: Document) -> Iterator[tuple[str, Document]]:
        """Yields ("train" or "validation", document): the document itself, or its two pieces if it is cut."""
        if self.patterns:
            share = float(any(is_named(document, pattern) for pattern in self.patterns))
        else:
            share = self.share_of(share_hash(document.text), len(document.text))
        first, last = cut_end(document, share) if 0 < share < 1 else (document, document)
        if share < 1 and first.text:
            yield "train", first
        if share > 0 and last.text:
            yield "validation", last


def plan_split(first: list[Document], complete: bool, validation: list[str], share: float) -> Split:
    """Plans the split of a source from its `first` documents, which are all documents if `complete`.

    `validation` is a list of patterns that name the validation documents. If it is empty, a hash of each text decides,
    so that adding documents never reshuffles the others: about `share` of the documents are for validation, and of very
    long ones the end. If all documents are known and this is not about `share` of the text, see `choose`. A single
    document is cut in two. Conversations are never cut.
    """
    sizes = [len(document.text) for document in first]
    whole = first[0].answers is not None
    if validation:
        for pattern in validation:
            if complete and not any(is_named(document, pattern) for document in first):
                hint = similar(pattern, [document.name for document in first])
                raise ValueError(f"data.validation: no document matches {pattern}{hint}")
        split = Split(validation, 0.0)
    elif complete and len(first) == 1 and whole:
        raise ValueError(f"{first[0].name} is the only conversation: another is needed for validation")
    elif complete and len(first) == 1:
        split = Split([], 0.0, cut=share)
        if not all(piece.text for piece in cut_end(first[0], share)):
            raise ValueError(f"{first[0].name} is too short to give {share:.0%} to validation: {sizes[0]} characters")
    elif complete:
        split = choose([share_hash(document.text) for document in first], sizes, share, whole)
    elif whole:
        split = Split([], share)
    else:  # so that no single hash decides about much of the text
        split = Split([], share, cut=share, longest=max(share / 4, 0.01) * max(sum(sizes), LOOK))
    sides = {which for document in first for which, _ in split.pieces(document)} if complete else set()
    if len(sides) == 1:
        equal = ", since they are equal" if len(first) > 1 and len({document.text for document in first}) == 1 else ""
        if sides == {"validation"}:
            what = f"nothing is left to train on: all {len(first)} documents are for validation"
        else:
            what = f"nothing is left for validation: all {len(first)} documents are for training"
        raise ValueError(what + equal)
    return split


def choose(hashes: list[float], sizes: list[int], share: float, whole: bool = False) -> Split:
    """Plans a split with about `share` of the total size, of documents or files that have a hash and a size.

    It takes the first of these that gives about that share: items with a hash below `share`; the lowest hashes among
    items of at most twice the wanted size, or at most that size, while larger items give their end; the end of every
    item; the smallest item alone. If none does, the closest. If `whole`, none is cut.
    """
    total = sum(sizes)

    def lowest(longest: float) -> Split:
        longest = max(longest, 1 / share)  # an item shorter than this would give no character
        split, target = Split([], 0.0, cut=share, longest=longest), 0.0
        grouped: Counter = Counter()  # equal texts stay together
        for hash, size in zip(hashes, sizes, strict=True):
            if size <= longest:
                grouped[hash] += size
                target += share * size
        held = 0
        for hash in sorted(grouped):
            if abs(held + grouped[hash] - target) >= abs(held - target):
                break
            held += grouped[hash]
            split.below = math.nextafter(hash, 1)
        return split

    def held_by(split: Split) -> float:
        return sum(size * split.share_of(hash, size) for hash, size in zip(hashes, sizes, strict=True)) / total

    def distance(split: Split) -> float:
        held = held_by(split)
        return abs(math.log(held / share)) + abs(math.log((1 - held) / (1 - share))) if 0 < held < 1 else math.inf

    smallest, its_hash = min(zip(sizes, hashes, strict=True))
    candidates = [
        Split([], share),
        *(lowest(longest) for longest in (2 * share * total, share * total, 0)[: 0 if whole else 3]),
    ]
    candidates += [lowest(total)] if whole else []
    candidates.append(Split([], math.nextafter(its_hash, 1), cut=0.0, longest=smallest))
    return next((split for split in candidates if is_about(held_by(split), share)), min(candidates, key=distance))


def is_about(held: float, share: float) -> bool:
    """Returns whether the validation share `held`, and the rest, are within a factor of two of those wanted."""
    return all(wanted / 2.001 <= got <= wanted * 2.001 for got, wanted in ((held, share), (1 - held, 1 - share)))


def share_hash(text: str) -> float:
    """Hashes a text to a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64


def cut_end(document: Document, share: float) -> tuple[Document, Document]:
    """Cuts a document in two, about that share before its end: at a line break, or if none is near at any character."""
    text = document.text
    at = int(len(text) * (1 - share))
    line = text.rfind("\n", 0, at) + 1
    if line and len(text) - line <= 2 * share * len(text):  # the line break is near enough
        at = line
    return replace(document, text=text[:at]), replace(document, name=document.name + " (end)", text=text[at:])


# --- names ----------------------------------------------------------------------------------------------------------


def is_named(document: Document, pattern: str) -> bool:
    """Returns whether a pattern matches a document's name, or its file, which selects all documents of that file."""
    if document.file is not None and is_file_named(document.file, pattern):
        return True
    return any(fnmatch(name, pattern) for name in (document.name, Path(document.name).name))


@cache
def is_file_named(file: str, pattern: str) -> bool:
    """Returns whether a pattern matches a path, or the name of the file or of a folder that contains it."""
    whole, wanted = os.path.abspath(file), os.path.abspath(pattern)
    if pattern in (file, Path(file).name) or whole == wanted:  # even if a name looks like a pattern
        return True
    pairs = ((file, pattern), (Path(file).name, pattern), (whole, wanted), (whole, f"{wanted}/*"))
    return any(fnmatch(name, glob) for name, glob in pairs)


def check_names(patterns: list[str], files: list[str]):
    """Raises a ValueError, before any text is read, if a pattern matches none of the files, nor a FILE:ROW of one."""
    for pattern in patterns:
        if not any(
            is_file_named(file, name) for file in files for name in (pattern, pattern.rpartition(":")[0] or pattern)
        ):
            raise ValueError(f"data.validation: no file matches {pattern}{similar(pattern, files)}")


def similar(pattern: str, names: list[str]) -> str:
    """Returns the end of an error about an unknown name: the known names, and which may have been meant."""
    there = f"; there are {', '.join(names[:20])}" + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    by_last = {Path(name).name: name for name in names[:10_000]}
    close = difflib.get_close_matches(Path(pattern).name, by_last, n=3)
    return there + (f": did you mean {' or '.join(by_last[name] for name in close)}?" if close else "")
