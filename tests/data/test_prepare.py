import json
import os
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from filelock import FileLock

from data import prepare as prepare_module
from data.corpus import open_corpus
from data.prepare import prepare, write_corpus
from data.sources import Document
from data.tokenizer import ByteTokenizer, CharacterTokenizer

BYTES = {"kind": "bytes", "vocab_size": None, "pattern": None}


@pytest.fixture
def data(tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text(f"document {i}\n" * 50)
    return {
        "source": "files",
        "wheel": None,
        "paths": ["*.txt"],
        "validation": ["3.txt"],
        "validation_share": 0.1,
        "prompt": "",
    }


def test_a_corpus_holds_its_documents_with_end_of_text_between(data):
    corpus = prepare(data, BYTES)
    assert len(corpus.train) == 4 * 551 and len(corpus.validation) == 551
    assert corpus.tokenizer.decode(corpus.validation.read(0, 550)) == "document 3\n" * 50
    assert corpus.validation.read(550, 1)[0] == corpus.tokenizer.end_of_text
    assert corpus.manifest["dtype"] == "uint16"
    assert corpus.manifest["splits"]["train"]["bytes"] == 4 * 550


def test_a_second_start_prepares_nothing(data, capsys):
    first = prepare(data, BYTES)
    before = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")}
    assert "preparing" in capsys.readouterr().out
    assert prepare(data, BYTES).folder == first.folder
    assert "preparing" not in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")} == before


def test_a_changed_file_is_another_corpus(data, tmp_path):
    first = prepare(data, BYTES)
    (tmp_path / "0.txt").write_text("something else, and longer " * 50)
    assert prepare(data, BYTES).folder != first.folder


def test_a_failed_preparation_leaves_no_corpus(data, monkeypatch):
    monkeypatch.setattr(prepare_module, "_write_split", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        prepare(data, BYTES)
    assert [path.name for path in prepare_module.Path("corpora").iterdir() if path.is_dir()] == []


def test_of_two_that_ask_at_once_one_waits_and_prepares_nothing(data, monkeypatch):
    root = Path("corpora")
    root.mkdir()
    folder = prepare_module.corpus_folder(data, BYTES, root)
    results = []
    with FileLock(root / f".{folder.name}.lock"):  # as one that is at work
        other = Thread(target=lambda: results.append(prepare(data, BYTES)))
        other.start()
        other.join(timeout=0.5)
        assert other.is_alive() and not folder.exists()
        prepare_module._prepare(data, BYTES, root, folder)
        monkeypatch.setattr(prepare_module, "_prepare", None)
    other.join(timeout=60)
    assert results[0].folder == folder


def test_shards_join_without_a_seam(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "SHARD_TOKENS", 7)
    documents = [Document("a", "abcdefghij"), Document("b", "klm"), Document("c", "nopqrstuvwxyz" * 3)]
    write_corpus(tmp_path / "c", ByteTokenizer(), documents, documents[:1], source={})
    corpus = open_corpus(tmp_path / "c")
    whole = corpus.train.read(0, len(corpus.train))
    assert len(corpus.train.arrays) == 8
    assert bytes(whole[whole < 256].astype(np.uint8)).decode() == "".join(d.text for d in documents)
    for start in range(len(whole)):
        for length in range(1, len(whole) - start + 1):
            assert np.array_equal(corpus.train.read(start, length), whole[start : start + length])


def test_a_large_vocabulary_takes_wider_numbers(tmp_path):
    tokenizer = CharacterTokenizer("".join(map(chr, range(32, 0xD800))) + "".join(map(chr, range(0xE000, 0x12000))))
    text = "a" + tokenizer.characters[-1]
    write_corpus(tmp_path / "c", tokenizer, [Document("a", text)], [Document("b", text)], source={})
    corpus = open_corpus(tmp_path / "c")
    assert corpus.manifest["dtype"] == "uint32"
    assert corpus.tokenizer.decode(corpus.train.read(0, 2)) == text


def test_damage_is_named(data):
    folder = prepare(data, BYTES).folder
    shard = folder / "train_00000.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=rf"train_00000.bin has {len(content) - 1} bytes, expected {len(content)}"):
        open_corpus(folder)
    shard.unlink()
    with pytest.raises(ValueError, match=r"train_00000.bin is missing"):
        open_corpus(folder)
    shard.write_bytes(content)
    CharacterTokenizer("abc").save(folder / "tokenizer")
    with pytest.raises(ValueError, match="tokenizer is not the one"):
        open_corpus(folder)
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        open_corpus(folder)
    os.truncate(manifest, 10)
    with pytest.raises(ValueError, match="damaged"):
        open_corpus(folder)
    with pytest.raises(ValueError, match="no corpus in nowhere"):
        open_corpus("nowhere")


def test_a_window_longer_than_the_text_is_refused_with_the_numbers(data):
    corpus = prepare(data, BYTES)
    corpus.check_length(550)
    with pytest.raises(ValueError, match=r"seq_len 551 needs at least 552 tokens, but the validation text has 551"):
        corpus.check_length(551)
