"""Which documents are held out for validation: those that are named, or about a share of the text."""

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

LOOK = 50_000_000  # characters; a source that ends within them is split with all its sizes known


@dataclass
class Split:
    """Held out are documents that a pattern names, or else those whose hash is below `below`.

    With `cut`, documents of more than `longest` characters are held out by no hash: each gives that share at its end.
    """

    patterns: list[str]
    below: float
    cut: float | None = None
    longest: float = 0

    def share_of(self, hash: float, size: int) -> float:
        """How much of a document is held out, where no patterns are given."""
        if self.cut is not None and size > self.longest:
            return self.cut
        return float(hash < self.below)

    def pieces(self, document: Document) -> Iterator[tuple[str, Document]]:
        """The document, or of one that is cut two, each with "train" or "validation"."""
        if self.patterns:
            share = float(any(is_named(document, pattern) for pattern in self.patterns))
        else:
            share = self.share_of(share_hash(document.text), len(document.text))
        first, last = cut_end(document, share) if 0 < share < 1 else (document, document)
        if share < 1 and first.text:
            yield "train", first
        if share > 0 and last.text:
            yield "validation", last


def plan_split(some: list[Document], complete: bool, validation: list[str], share: float) -> Split:
    """How to split a source, of which `some` are the first documents, or all if `complete`.

    `validation` names the documents to hold out, by patterns. Where it is empty a hash of each text decides, so that
    adding documents moves no other, and about `share` of them are held out; of very long ones the end. If all are known
    and that is not about `share` of the text, see `choose`. A document that is alone is cut in two. No
    conversation is ever cut.
    """
    sizes = [len(document.text) for document in some]
    whole = some[0].learned is not None
    if validation:
        for pattern in validation:
            if complete and not any(is_named(document, pattern) for document in some):
                hint = similar(pattern, [document.name for document in some])
                raise ValueError(f"data.validation: no document matches {pattern}{hint}")
        split = Split(validation, 0.0)
    elif complete and len(some) == 1 and whole:
        raise ValueError(f"{some[0].name} is the only conversation: one more is needed, to hold out")
    elif complete and len(some) == 1:
        split = Split([], 0.0, cut=share)
        if not all(piece.text for piece in cut_end(some[0], share)):
            raise ValueError(f"{some[0].name} is too short to hold out {share:.0%} of it, got {sizes[0]} characters")
    elif complete:
        split = choose([share_hash(document.text) for document in some], sizes, share, whole)
    elif whole:
        split = Split([], share)
    else:  # a twentieth of what is known, at most, hangs on one hash
        split = Split([], share, cut=share, longest=max(share / 4, 0.01) * max(sum(sizes), LOOK))
    sides = {which for document in some for which, _ in split.pieces(document)} if complete else set()
    if len(sides) == 1:
        equal = ", for they are equal" if len(some) > 1 and len({document.text for document in some}) == 1 else ""
        if sides == {"validation"}:
            what = f"nothing is left to train on: all {len(some)} documents are held out for validation"
        else:
            what = f"nothing is held out for validation: all {len(some)} documents are to train on"
        raise ValueError(what + equal)
    return split


def choose(hashes: list[float], sizes: list[int], share: float, whole: bool = False) -> Split:
    """Of documents, files or whatever has a hash and a size, about `share` of all of it.

    Those with a hash below `share`, if that is about right; else those with the lowest hashes among all that are no
    larger than twice the part asked for, or no larger than it, while larger ones give their end; else the smallest.
    None is cut if they are to stay `whole`.
    """
    total = sum(sizes)

    def lowest(longest: float) -> Split:
        longest = max(longest, 1 / share)  # of what is smaller no character would be held out
        split, target = Split([], 0.0, cut=share, longest=longest), 0.0
        grouped: Counter = Counter()  # equal texts go together
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
    """Whether what is held out, and what is left, is half to twice of what was asked for."""
    return all(asked / 2.001 <= got <= asked * 2.001 for got, asked in ((held, share), (1 - held, 1 - share)))


def share_hash(text: str) -> float:
    """A number in [0, 1) from the text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64


def cut_end(document: Document, share: float) -> tuple[Document, Document]:
    """A document in two, at a line break about that share from its end; where none is near, at any character."""
    text = document.text
    at = int(len(text) * (1 - share))
    line = text.rfind("\n", 0, at) + 1
    if line and len(text) - line <= 2 * share * len(text):  # a break that is not far away
        at = line
    return replace(document, text=text[:at]), replace(document, name=document.name + " (end)", text=text[at:])


# --- names ----------------------------------------------------------------------------------------------------------


def is_named(document: Document, pattern: str) -> bool:
    """Whether a pattern matches a document's name, or its file: then all of a file's documents are meant."""
    if document.file is not None and is_file_named(document.file, pattern):
        return True
    return any(fnmatch(name, pattern) for name in (document.name, Path(document.name).name))


@cache
def is_file_named(file: str, pattern: str) -> bool:
    """Whether a pattern matches a path, or the name of the file or of a folder that it is in."""
    whole, wanted = os.path.abspath(file), os.path.abspath(pattern)
    if pattern in (file, Path(file).name) or whole == wanted:  # also where a name looks like a pattern
        return True
    pairs = ((file, pattern), (Path(file).name, pattern), (whole, wanted), (whole, f"{wanted}/*"))
    return any(fnmatch(name, one) for name, one in pairs)


def check_names(patterns: list[str], files: list[str]):
    """ValueError, before anything is read, where a pattern names none of the files, nor a row, FILE:ROW, of one."""
    for pattern in patterns:
        if not any(
            is_file_named(file, one) for file in files for one in (pattern, pattern.rpartition(":")[0] or pattern)
        ):
            raise ValueError(f"data.validation: no file matches {pattern}{similar(pattern, files)}")


def similar(pattern: str, names: list[str]) -> str:
    """The end of a message on a name that is not there: what is, and what may have been meant."""
    there = f"; there are {', '.join(names[:20])}" + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    by_last = {Path(name).name: name for name in names[:10_000]}
    close = difflib.get_close_matches(Path(pattern).name, by_last, n=3)
    return there + (f": did you mean {' or '.join(by_last[name] for name in close)}?" if close else "")
