"""Damaged files of a corpus are refused in one line that names the file and says what to do."""

import json
import re
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from texts import BYTES, FILES

from conf.entry import one_line
from data import prepare as prepare_module
from data.config import DataConfig
from data.corpus import open_corpus
from data.prepare import corpus_folder, merge_parts, prepare, prepare_part, work_folder

DOCUMENTS = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes, " * 9}]}
             for n in range(9)]  # fmt: skip


def settings(folder: Path, conversations: bool = False) -> DataConfig:
    """Nine short texts or conversations."""
    path = folder / "texts.jsonl"
    rows = DOCUMENTS if conversations else [{"text": f"document {n}\n" * 30} for n in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = replace(FILES, paths=[str(path)], validation_share=0.2)
    if not conversations:
        return data
    template = {"system": "{}\n", "user": "User: {}\n", "assistant": "Assistant: {}\n"}
    return replace(data, messages_column="messages", template=template)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return prepare(settings(folder), BYTES, folder / "corpora").folder


@pytest.fixture
def corpus(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "corpus"))


def without(key):
    return lambda content: {name: value for name, value in content.items() if name != key}


def with_shard(**changes):
    def changed(manifest):
        manifest["splits"]["train"]["shards"][0] |= changes
        return manifest

    return changed


def with_split(**changes):
    def changed(content):
        content["splits"]["train"] |= changes
        return content

    return changed


def with_splits(splits):
    return lambda content: content | {"splits": splits(content["splits"])}


BYTES_OF_A_FILE = {
    "empty": b"",
    "cut": b'{"format": 2, "spl',
    "binary": bytes(range(256)),
    "deep": b"[" * 100_000,
    "deep in a key": b'{"splits":' * 100_000,
    "a list": b"[]",
    "a number": b"5",
    "null": b"null",
    "{}": b"{}",
}
SPLITS = {
    "no splits": without("splits"),
    "splits a list": with_splits(lambda splits: list(splits.values())),
    "splits null": with_splits(lambda _: None),
    "one split": with_splits(without("validation")),
    "a third split": with_splits(lambda splits: splits | {"test": 5}),
    "a split that is a list": with_splits(lambda splits: splits | {"validation": []}),
    "no shards": with_splits(lambda splits: splits | {"train": without("shards")(splits["train"])}),
    "shards an object": with_split(shards={}),
    "shards of texts": with_split(shards=["train_00000.bin"]),
    "tokens of a split a text": with_split(tokens="many"),
    "no file": lambda content: with_split(shards=[without("file")(content["splits"]["train"]["shards"][0])])(content),
    "file a number": with_shard(file=5),
    "file outside": with_shard(file="../../secret.bin"),
    "file elsewhere": with_shard(file="/etc/passwd"),
    "file with a NUL": with_shard(file="part_00000_of_00001/\0.bin"),
    "tokens a text": with_shard(tokens="4"),
    "tokens a fraction": with_shard(tokens=4.0),
    "tokens true": with_shard(tokens=True),
    "tokens negative": with_shard(tokens=-1),
    "no tokens": with_shard(tokens=0),
    "tokens of a thousand digits": with_shard(tokens=10**1000),
    "sha256 null": with_shard(sha256=None),
    "sha256 of another length": with_shard(sha256="abc"),
}
MANIFESTS = SPLITS | {
    "no format": without("format"),
    "format a text": lambda manifest: manifest | {"format": "2"},
    "format a list": lambda manifest: manifest | {"format": [2]},
    "no dtype": without("dtype"),
    "dtype unknown": lambda manifest: manifest | {"dtype": "uint17"},
    "dtype of objects": lambda manifest: manifest | {"dtype": "object"},
    "dtype a number": lambda manifest: manifest | {"dtype": 16},
    "no tokenizer": without("tokenizer"),
    "tokenizer an object": lambda manifest: manifest | {"tokenizer": {}},
    "a mask in a format without": with_shard(learned_sha256="0" * 64),
    "no mask in the format with": lambda manifest: manifest | {"format": 3},
}
STATES = SPLITS | {
    "no groups": without("groups"),
    "groups a text": lambda state: state | {"groups": "1"},
    "groups negative": lambda state: state | {"groups": -1},
    "done a number": lambda state: state | {"done": 1},
    "no rest": without("rest"),
    "rest outside": lambda state: state | {"rest": "../../rest_1.npz", "done": False},
    "rest missing": lambda state: state | {"rest": "rest_99.npz", "done": False},
}
PLANS = {
    "no split": without("split"),
    "split a list": lambda plan: plan | {"split": []},
    "split of nothing": lambda plan: plan | {"split": {}},
    "patterns a text": lambda plan: plan | {"split": plan["split"] | {"patterns": "*"}},
    "below a text": lambda plan: plan | {"split": plan["split"] | {"below": "0.1"}},
    "no hash of the source": without("source_hash"),
    "hash of the source null": lambda plan: plan | {"source_hash": None},
}


def damage(path: Path, how):
    path.write_bytes(how if isinstance(how, bytes) else json.dumps(how(json.loads(path.read_text()))).encode())


def flip(path: Path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def is_a_line(error: BaseException, path: Path, folder: Path):
    line = str(error)
    assert line.startswith(str(path.parent)) and "\n" not in line and len(line) < 1000
    assert line.endswith(f": delete {folder} and start again") and line.count("delete") == 1


@pytest.mark.parametrize("wrong", BYTES_OF_A_FILE | MANIFESTS)
def test_an_invalid_manifest_is_one_line_with_its_path_and_what_to_do(corpus, wrong):
    path = corpus / "manifest.json"
    damage(path, (BYTES_OF_A_FILE | MANIFESTS)[wrong])
    with pytest.raises(ValueError, match=r"manifest\.json is (damaged|empty)") as caught:
        open_corpus(corpus)
    is_a_line(caught.value, path, corpus)


def small_shards(patch):
    patch.setattr(prepare_module, "SHARD_TOKENS", 500)
    patch.setattr(prepare_module, "GROUP_CHARS", 400)


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A folder with a preparation that was interrupted between two shards."""
    folder = tmp_path_factory.mktemp("half")
    data = settings(folder)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        small_shards(patch)
        real = prepare_module.PartWriter._save

        def save(self):
            real(self)
            raise KeyboardInterrupt

        patch.setattr(prepare_module.PartWriter, "_save", save)
        prepare(data, BYTES, folder / "corpora")
    return data, folder / "corpora"


@pytest.fixture
def killed(half, tmp_path, monkeypatch):
    """(settings, root, work folder)"""
    small_shards(monkeypatch)
    data, root = half
    root = Path(shutil.copytree(root, tmp_path / "corpora"))
    return data, root, work_folder(corpus_folder(data, BYTES, root))


@pytest.mark.parametrize("wrong", BYTES_OF_A_FILE | STATES)
def test_an_invalid_state_is_one_line_with_its_path_and_what_to_do(killed, wrong):
    data, root, work = killed
    path = work / "part_00000_of_00001" / "state.json"
    damage(path, (BYTES_OF_A_FILE | STATES)[wrong])
    with pytest.raises(ValueError, match=r"state\.json is (damaged|empty)|rest_99.npz cannot be read") as caught:
        prepare(data, BYTES, root)
    is_a_line(caught.value, path, work)


@pytest.mark.parametrize("wrong", BYTES_OF_A_FILE | PLANS)
@pytest.mark.parametrize("when", ["before a part", "before merging"])
def test_an_invalid_plan_is_one_line_with_its_path_and_what_to_do(killed, wrong, when):
    data, root, work = killed
    folder = corpus_folder(data, BYTES, root)
    if when == "before merging":
        prepare_part(data, BYTES, folder, 0, 1)
    damage(work / "plan.json", (BYTES_OF_A_FILE | PLANS)[wrong])
    with pytest.raises(ValueError, match=r"plan\.json is (damaged|empty)") as caught:
        merge_parts(data, BYTES, folder, 1) if when == "before merging" else prepare(data, BYTES, root)
    is_a_line(caught.value, work / "plan.json", work)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"\x93NUMPY", b"text" * 100], ids=repr)
def test_an_unreadable_rest_is_one_line_with_its_path_and_what_to_do(killed, content):
    data, root, work = killed
    (rest,) = work.rglob("rest_*.npz")
    rest.write_bytes(content)
    with pytest.raises(ValueError, match=r"rest_\d+\.npz cannot be read") as caught:
        prepare(data, BYTES, root)
    is_a_line(caught.value, rest, work)


def test_a_rest_with_a_flipped_bit_is_found(killed):
    data, root, work = killed
    (rest,) = work.rglob("rest_*.npz")
    flip(rest)
    with pytest.raises(ValueError, match=r"rest_\d+\.npz cannot be read"):
        prepare(data, BYTES, root)


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("kind", ["bin", "learned"])
def test_a_flipped_bit_is_found_at_first_read_and_the_corpus_named(tmp_path, split, kind):
    folder = prepare(settings(tmp_path, conversations=True), BYTES, tmp_path / "corpora").folder
    (path,) = folder.rglob(f"{split}_*.{kind}")
    flip(path)
    texts = open_corpus(folder)
    other = texts.train if split == "validation" else texts.validation
    other.targets(0, 5)
    with pytest.raises(ValueError, match=rf"{path.name} is damaged: its checksum") as caught:
        getattr(texts, split).targets(0, 5)
    is_a_line(caught.value, path, folder)


def test_an_error_names_a_token_outside_the_vocabulary(corpus):
    """As in shards made by another tokenizer, with a valid size and checksum."""
    (path,) = corpus.rglob("train_*.bin")
    tokens = np.fromfile(path, np.uint16)
    tokens[5] = 300
    tokens.tofile(path)
    damage(corpus / "manifest.json", with_shard(sha256=prepare_module.hashlib.sha256(tokens.tobytes()).hexdigest()))
    text = open_corpus(corpus).train
    assert len(text.read(0, 5)) == 5
    with pytest.raises(
        ValueError, match=re.escape("token 300 in the text is outside the tokenizer's vocabulary of 257")
    ):
        text.read(0, 6)


@pytest.mark.parametrize("room", [50, 300, 900, 2000])
def test_a_full_disk_is_one_line_with_a_path_and_preparing_resumes(tmp_path, monkeypatch, room):
    """At any file, from the vocabulary to the last shard and the manifest."""
    small_shards(monkeypatch)
    monkeypatch.setattr(prepare_module, "SHARD_TOKENS", 1200)
    data, root = settings(tmp_path), tmp_path / "corpora"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(OSError) as full:
            prepare(data, BYTES, root)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert re.fullmatch(rf"{re.escape(str(root))}/\S+: File too large", one_line(full.value))
    assert not corpus_folder(data, BYTES, root).exists()
    assert prepare(data, BYTES, root).fingerprint() == prepare(data, BYTES, tmp_path / "others").fingerprint()


def test_a_read_only_folder_for_corpora_is_one_line_with_its_path(tmp_path):
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "corpora", Path("/proc/corpora")):
        with pytest.raises(OSError) as caught:
            prepare(settings(tmp_path), BYTES, root)
        assert one_line(caught.value).startswith(f"{root}: ")
