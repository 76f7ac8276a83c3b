"""Which documents are held out for validation."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch

from data.readers import Document


@dataclass
class Split:
    """Which documents are held out: those whose name matches a pattern, or else whose hash is below `below`."""

    patterns: list[str]
    below: float
    cut: float | None = None  # of a document that is alone, the share at its end

    def holds_out(self, document: Document) -> bool:
        if self.patterns:
            return any(fnmatch(document.name, pattern) for pattern in self.patterns)
        return share_hash(document.text) < self.below

    def pieces(self, document: Document) -> Iterator[tuple[str, Document]]:
        """The document, or of one that is alone two, each with "train" or "validation"."""
        if self.cut is None:
            yield ("validation" if self.holds_out(document) else "train"), document
        else:
            first, last = cut_end(document, self.cut)
            yield "train", first
            yield "validation", last


def plan_split(some: list[Document], complete: bool, validation: list[str], share: float) -> Split:
    """How to split a source, of which `some` are the first documents, or all if `complete`.

    `validation` names the documents to hold out, by patterns. Where it is empty a hash of each text decides, so that
    adding documents moves no other, and about `share` of them are held out; if none would be, the one with the lowest
    hash. A document that is alone is cut in two, at a line break about that share from its end.
    """
    if validation:
        for pattern in validation:
            if complete and not any(fnmatch(d.name, pattern) for d in some):
                names = ", ".join(d.name for d in some[:40])
                raise ValueError(f"data.validation: no document matches {pattern}; there are {names}")
        split = Split(validation, 0.0)
    elif complete and len(some) == 1:
        return Split([], 0.0, cut=share)
    else:
        hashes = sorted(share_hash(d.text) for d in some)
        split = Split([], share)
        if complete and hashes and hashes[0] >= share:  # none would be held out
            split = Split([], math.nextafter(hashes[0], 1))
    if complete and some and all(split.holds_out(d) for d in some):
        raise ValueError(f"nothing is left to train on: all {len(some)} documents are held out for validation")
    return split


def share_hash(text: str) -> float:
    """A number in [0, 1) from the text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64


def cut_end(document: Document, share: float) -> tuple[Document, Document]:
    text = document.text
    at = int(len(text) * (1 - share))
    line = text.rfind("\n", 0, at) + 1
    if line and len(text) - line <= 2 * share * len(text):  # a break that is not far away
        at = line
    if not 0 < at < len(text):
        raise ValueError(f"{document.name} is too short to hold out {share:.0%} of it, got {len(text)} characters")
    return Document(document.name, text[:at]), Document(document.name + " (end)", text[at:])
