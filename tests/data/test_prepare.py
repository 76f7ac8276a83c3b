import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from filelock import FileLock
from texts import BYTES, FILES

from conf.entry import REPOSITORY
from data import prepare as prepare_module
from data.corpus import open_corpus, open_mixture, open_token_files
from data.prepare import merge_parts, planned_vocabulary, prepare, prepare_part
from data.readers import Document
from data.tokenizer import ByteTokenizer, CharacterTokenizer


@pytest.fixture
def data(tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text(f"document {i}\n" * 50)
    return replace(FILES, validation=["3.txt"])


def test_end_of_text_follows_each_document_of_a_corpus(data):
    corpus = prepare(data, BYTES)
    assert len(corpus.train) == 4 * 551 and len(corpus.validation) == 551
    assert corpus.tokenizer.decode(corpus.validation.read(0, 550)) == "document 3\n" * 50
    assert corpus.validation.read(550, 1)[0] == corpus.tokenizer.eos_id
    assert corpus.manifest["dtype"] == "uint16"
    assert corpus.manifest["splits"]["train"]["bytes"] == 4 * 550


BPE = replace(BYTES, kind="bpe", vocab_size=270, pattern=r"\w+|\W", special=["<|end|>", "<|user|>", "<|bot|>"])


def test_a_corpus_keeps_its_name_across_versions():
    """Also one that was prepared before there were parse_special and conversations."""
    hub = replace(FILES, source="hub", repo="a/b")
    both = BPE, replace(BPE, parse_special=True)
    assert [prepare_module.corpus_folder(hub, tokenizer, Path()).name for tokenizer in both] == [
        "b-bpe270-6b75be76f3",
        "b-bpe270-6ac05ce474",
    ]


def test_special_tokens_in_a_text_are_parsed_if_set_or_else_remarked(data, tmp_path, capsys):
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text(f"<|user|>say {i}<|bot|>é<|user|>no<|end|>another one\n")
    plain = prepare(data, BPE)
    assert [line for line in capsys.readouterr().out.splitlines() if "tokenizer.special" in line] == [
        f"tokenizer.special {name} occurs {n} times in the first 250 characters as plain text: "
        "tokenizer.parse_special=true makes it a token"
        for name, n in (("<|user|>", 10), ("<|bot|>", 5))
    ]
    corpus = prepare(data, replace(BPE, parse_special=True))
    assert corpus.folder != plain.folder and "tokenizer.special" not in capsys.readouterr().out
    end, user, bot = corpus.tokenizer.special.values()
    ids = corpus.validation.read(0, len(corpus.validation))
    assert [int(id) for id in ids if id in (end, user, bot)] == [user, bot, user, end, end]
    assert corpus.tokenizer.decode(ids) == "<|user|>say 3<|bot|>é<|user|>noanother one\n"
    held = corpus.manifest["splits"]["validation"]
    assert held["documents"] == 2 and held["bytes"] == corpus.tokenizer.bytes_per_token()[ids].sum()
    assert set(plain.train.read(0, len(plain.train))).isdisjoint(range(end + 1, user + 2))
    again = prepare(data, prepare_module.saved_tokenizer(corpus.folder / "tokenizer"))
    assert again.fingerprint() == corpus.fingerprint()


def test_parse_special_needs_names_that_the_tokenizer_json_has(llama_tokenizer):
    Path("tokenizer.json").write_text(llama_tokenizer)
    settings = replace(BYTES, kind="json", path="tokenizer.json", bos_token="<s>")
    for special, message in ((["</s>", "<|user|>"], "<|user|> is none of"), (["</s>", "<unk>"], None)):
        assert not prepare_module.make_tokenizer(replace(settings, special=special), [], []).parse_special
        parsed = replace(settings, special=special, parse_special=True)
        if message is None:
            assert prepare_module.make_tokenizer(parsed, [], []).encode("<unk>").tolist() == [0]
            continue
        with pytest.raises(ValueError, match=r"this tokenizer has no <\|user\|>, only <unk>, <s>, </s>"):
            prepare_module.make_tokenizer(parsed, [], [])


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
    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(prepare_module, "_write", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
        prepare(data, BYTES)
    assert not prepare_module.corpus_folder(data, BYTES, Path("corpora")).exists()
    assert len(prepare(data, BYTES).train) == 4 * 551


def test_a_second_process_waits_and_prepares_nothing(data, monkeypatch):
    root = Path("corpora")
    root.mkdir()
    folder = prepare_module.corpus_folder(data, BYTES, root)
    results = []
    with FileLock(root / f".{folder.name}.lock"):  # as another process that is preparing it
        other = Thread(target=lambda: results.append(prepare(data, BYTES)))
        other.start()
        other.join(timeout=0.5)
        assert other.is_alive() and not folder.exists()
        prepare_part(data, BYTES, folder, 0, 1)
        merge_parts(data, BYTES, folder, 1)
        monkeypatch.setattr(prepare_module, "prepare_part", None)
    other.join(timeout=60)
    assert results[0].folder == folder


def test_tokens_are_read_across_shards(data, monkeypatch):
    monkeypatch.setattr(prepare_module, "SHARD_TOKENS", 70)
    monkeypatch.setattr(prepare_module, "GROUP_CHARS", 100)
    corpus = prepare(data, BYTES)
    whole = corpus.train.read(0, len(corpus.train))
    assert [len(array) for array in corpus.train.arrays] == [70] * (4 * 551 // 70) + [4 * 551 % 70]
    text = "".join(f"document {i}\n" * 50 for i in (0, 1, 2, 4))
    assert bytes(whole[whole < 256].astype(np.uint8)).decode() == text
    for start in range(0, len(whole), 13):
        for length in range(1, len(whole) - start + 1, 17):
            assert np.array_equal(corpus.train.read(start, length), whole[start : start + length])
    assert np.array_equal(np.concatenate(list(corpus.train.pieces())), whole)
    assert corpus.train.find(256).tolist() == [550, 1101, 1652, 2203]


@pytest.mark.slow
def test_a_large_vocabulary_uses_uint32(data, tmp_path):
    characters = "".join(map(chr, range(32, 0xD800))) + "".join(map(chr, range(0xE000, 0x12000)))
    (tmp_path / "0.txt").write_text(characters, encoding="utf-8")
    corpus = prepare(data, replace(BYTES, kind="chars"))
    assert corpus.manifest["dtype"] == "uint32"
    assert corpus.tokenizer.decode(corpus.train.read(0, len(characters))) == characters


def test_an_id_outside_the_vocabulary_is_never_stored():
    class Broken(ByteTokenizer):
        def encode(self, text):
            return super().encode(text).astype(np.uint32) + 70_000  # uint16 would wrap around silently

    with pytest.raises(AssertionError, match="outside the vocabulary of 257"):
        prepare_module.Encoded([Document("a", "text")], Broken(), np.ones(257), np.dtype(np.uint16))


def test_a_pattern_that_loses_text_is_refused(data):
    letters = replace(BYTES, kind="bpe", vocab_size=300, pattern=r"\p{L}+")
    with pytest.raises(
        ValueError, match=r"the tokens of 0.txt and what follows hold 1,600 of 2,200 bytes: tokenizer.pattern must"
    ):
        prepare(data, letters)


@pytest.mark.parametrize("killed", [False, True])
def test_max_tokens_limits_the_training_tokens(data, monkeypatch, killed):
    """Also when a run resumes that was killed just before its end; the last document is cut."""
    whole = prepare(replace(data, validation=["0.txt"]), BYTES)
    monkeypatch.setattr(prepare_module, "GROUP_CHARS", 100)
    data = replace(data, validation=["0.txt"], max_tokens=1000)
    if killed:
        monkeypatch.setattr(prepare_module, "SHARD_TOKENS", 551)
        with monkeypatch.context() as patch, pytest.raises(KeyError):
            patch.setattr(prepare_module.PartWriter, "finish", lambda self: {}["killed"])
            prepare(data, BYTES)
    corpus = prepare(data, BYTES)
    assert corpus.train.read(0, len(corpus.train)).tolist() == whole.train.read(0, 1000).tolist()
    assert corpus.manifest["splits"]["train"] | {"shards": []} == {
        "documents": 2,
        "tokens": 1000,
        "bytes": 999,  # without one end-of-text
        "shards": [],
    }


def test_max_tokens_applies_to_a_single_text_and_to_several_parts(data, monkeypatch):
    monkeypatch.setattr(prepare_module, "GROUP_CHARS", 100)
    Path("one").mkdir()
    Path("one", "long.txt").write_text("0123456789\n" * 500)
    one = prepare(replace(data, paths=["one/*.txt"], validation=[], max_tokens=100), BYTES)
    assert len(one.train) == 100 and len(one.validation) > 0
    data = replace(data, validation=["0.txt"], max_tokens=100)
    folder = one.folder.with_name("parts")
    for part in range(3):
        prepare_part(data, BYTES, folder, part, 3)
    merge_parts(data, BYTES, folder, 3)
    assert len(open_corpus(folder).train) == 100


def test_named_validation_documents_are_found_after_max_tokens(data, monkeypatch):
    monkeypatch.setattr(prepare_module, "GROUP_CHARS", 100)
    last = "4.txt"
    named = prepare(replace(data, validation=[last]), BYTES)
    corpus = prepare(replace(data, validation=[last], max_tokens=10), BYTES)
    assert len(corpus.train) == 10
    assert (
        corpus.validation.read(0, len(corpus.validation)).tolist()
        == named.validation.read(0, len(named.validation)).tolist()
    )


def test_several_parts_make_the_same_corpus_as_one(data):
    data = replace(data, validation=["0.txt"])
    whole = prepare(data, BYTES)
    folder = whole.folder.with_name("shared")
    for part in (2, 0):
        prepare_part(data, BYTES, folder, part, 3)
    with pytest.raises(ValueError, match="part 1 of 3 is not prepared: run it with shard_index=1"):
        merge_parts(data, BYTES, folder, 3)
    prepare_part(data, BYTES, folder, 1, 3)
    merge_parts(data, BYTES, folder, 3)
    merged = open_corpus(folder, full=True)

    def documents(corpus):
        return sorted(corpus.tokenizer.decode(corpus.train.read(0, len(corpus.train))).split("document"))

    assert documents(merged) == documents(whole)
    assert merged.manifest["splits"]["train"]["bytes"] == whole.manifest["splits"]["train"]["bytes"]
    assert not list(folder.rglob("state.json"))


def test_a_changed_text_and_parts_of_another_num_shards_are_refused(data, tmp_path):
    folder = prepare_module.corpus_folder(data, BYTES, Path("corpora"))
    prepare_part(data, BYTES, folder, 1, 2)
    prepare_part(data, BYTES, folder, 0, 1)
    with pytest.raises(ValueError, match="part_00001_of_00002 is from a run with another num_shards"):
        merge_parts(data, BYTES, folder, 1)
    (tmp_path / "0.txt").write_text("changed " * 100)
    with pytest.raises(ValueError, match="the source text changed while it was being prepared"):
        merge_parts(data, BYTES, folder, 1)


def test_a_corpus_depends_on_a_tokenizers_content_not_on_its_path(data, tmp_path):
    first = prepare(data, replace(BYTES, kind="chars"))
    saved = replace(BYTES, kind="saved", path="later")
    names = []
    for place in ("a", "b"):
        first.tokenizer.save(tmp_path / place)
        names.append(prepare_module.corpus_folder(data, replace(saved, path=str(tmp_path / place)), Path("corpora")))
    assert names[0] == names[1]
    with pytest.raises(ValueError, match="tokenizer.path: there is no tokenizer in nowhere"):
        prepare(data, replace(saved, path="nowhere"))


def test_a_shard_that_changed_before_merging_is_found(data):
    folder = prepare_module.corpus_folder(data, BYTES, Path("corpora"))
    prepare_part(data, BYTES, folder, 0, 1)
    (shard,) = prepare_module.work_folder(folder).glob("part*/train_00000.bin")
    flip(shard)
    with pytest.raises(ValueError, match="train_00000.bin is damaged"):
        merge_parts(data, BYTES, folder, 1)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


KILLED = """
import os, signal, sys
from data import prepare
from data.config import DataConfig, TokenizerConfig
prepare.SHARD_TOKENS, prepare.GROUP_CHARS = 300, 200
replace, left = os.replace, int(sys.argv[1])
def dying(source, target):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    replace(source, target)
os.replace = dying
print(prepare.prepare(*eval(sys.argv[2])).fingerprint())
"""


@pytest.mark.slow
def test_a_killed_preparation_resumes_to_the_same_corpus(data, monkeypatch, tmp_path):
    """Kills the run (-9) after every four renamed files, until one finishes."""

    def run():
        arguments = [sys.executable, "-c", KILLED, "4", repr((data, BYTES))]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        return subprocess.run(arguments, capture_output=True, text=True, env=environment)

    data = replace(data, validation=[])
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text("".join(f"line {line} of {i}\n" for line in range(10)))
    resumed = 0
    while (result := run()).returncode != 0:
        assert result.returncode == -signal.SIGKILL, result.stderr
        assert not prepare_module.corpus_folder(data, BYTES, Path("corpora")).exists()
        resumed += "resuming after" in result.stdout
    assert resumed >= 2
    monkeypatch.setattr(prepare_module, "SHARD_TOKENS", 300)
    monkeypatch.setattr(prepare_module, "GROUP_CHARS", 200)
    undisturbed = prepare(data, BYTES, root=Path("other"))
    assert result.stdout.split()[-1] == undisturbed.fingerprint()
    killed = open_corpus(prepare_module.corpus_folder(data, BYTES, Path("corpora")), full=True)
    assert killed.manifest["splits"] == undisturbed.manifest["splits"]
    assert not list(killed.folder.rglob("*.npz"))


@pytest.mark.slow
def test_preparing_needs_no_torch():
    code = "import sys, data.prepare; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert result.stdout.strip() == "False", result.stderr


# --- prepared corpora -----------------------------------------------------------------------------------------------


def test_corpora_are_mixed_if_they_share_a_tokenizer(data):
    first = prepare(data, BYTES)
    second = prepare(replace(data, validation=["0.txt"]), BYTES)
    mixed = open_mixture({str(first.folder): 0.7, str(second.folder): 0.3})
    assert len(mixed.train) == len(first.train) + len(second.train)
    assert len(mixed.validation) == 2 * 551
    assert [weight for _, weight in mixed.mixture] == [0.7, 0.3]
    assert mixed.fingerprint() != open_mixture({str(first.folder): 0.6, str(second.folder): 0.4}).fingerprint()
    other = prepare(data, replace(BYTES, kind="chars"))
    with pytest.raises(ValueError, match="different tokenizers: prepare one with tokenizer=saved"):
        open_mixture({str(first.folder): 0.7, str(other.folder): 0.3})
    for weight in (-1, 0, float("nan")):
        with pytest.raises(ValueError, match="positive and finite, got"):
            open_mixture({str(first.folder): weight})
    again = prepare(data, replace(BYTES, kind="saved", path=str(other.folder / "tokenizer")))
    assert again.tokenizer.fingerprint() == other.tokenizer.fingerprint()


def test_token_files_are_read_as_they_are(tmp_path):
    tokenizer = ByteTokenizer()
    for name in "abc":
        tokens = np.concatenate([tokenizer.document(f"{name} {i}") for i in range(100)]).astype(np.uint16)
        tokens.tofile(tmp_path / f"{name}.ds")
    paths = [f"{name}.ds" for name in "abc"]
    corpus = open_token_files(paths, tokenizer, ["b.*"], 0.1)
    assert tokenizer.decode(corpus.train.read(0, 3)) == "a 0"
    assert tokenizer.decode(corpus.validation.read(0, 3)) == "b 0"
    third = open_token_files(paths, tokenizer, [], 0.3)
    assert len(third.train.arrays) == 2 and len(third.validation.arrays) == 1
    single = open_token_files(["a.ds"], tokenizer, [], 0.1)
    assert tokenizer.decode(single.validation.read(0, 2)) == "a "  # starts with a document
    assert 0.05 < len(single.validation) / (len(single.train) + len(single.validation)) < 0.15
    each = open_token_files(paths, tokenizer, [], 0.1)  # a whole file, a third, would be too much: each gives its end
    assert [len(array) for array in each.train.arrays] == [len(single.train)] * 3
    assert [len(array) for array in each.validation.arrays] == [len(single.validation)] * 3
    (tmp_path / "odd.ds").write_bytes(b"odd")
    with pytest.raises(ValueError, match="odd.ds has 3 bytes, which is not a positive multiple of 2"):
        open_token_files(["odd.ds"], tokenizer, [], 0.1)
    with pytest.raises(ValueError, match="no file is left for train"):
        open_token_files(paths, tokenizer, ["*"], 0.1)
    np.full(100, 300, np.uint16).tofile(tmp_path / "other.ds")  # of a larger vocabulary
    with pytest.raises(ValueError, match="token 300 in the text is outside the tokenizer's vocabulary of 257"):
        open_token_files(["other.ds"], tokenizer, [], 0.1).train.read(0, 10)


# --- damage ---------------------------------------------------------------------------------------------------------


def test_damage_is_named(data):
    folder = prepare(data, BYTES).folder
    shard = folder / "part_00000_of_00001" / "train_00000.bin"
    content = shard.read_bytes()
    flip(shard)
    opened = open_corpus(folder)  # sizes do not reveal the damage, reading does
    opened.validation.read(0, 10)
    with pytest.raises(ValueError, match=r"train_00000.bin is damaged: its checksum"):
        opened.train.read(0, 10)
    with pytest.raises(ValueError, match=r"train_00000.bin is damaged: its checksum"):
        open_corpus(folder, full=True)
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
    manifest.write_text("[]")
    with pytest.raises(ValueError, match="damaged"):
        open_corpus(folder)
    manifest.write_text('{"format": 2')
    with pytest.raises(ValueError, match="damaged"):
        open_corpus(folder)
    with pytest.raises(ValueError, match="no corpus in nowhere"):
        open_corpus("nowhere")


def test_a_window_longer_than_the_text_is_refused_with_the_numbers(data):
    corpus = prepare(data, BYTES)
    corpus.check_length(2203)
    with pytest.raises(ValueError, match=r"seq_len 2204 needs at least 2205 tokens, but the training text has 2204"):
        corpus.check_length(2204)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "json", "saved"])
def test_the_vocabulary_size_is_planned_without_the_text(tmp_path, llama_tokenizer, kind):
    (tmp_path / "tokenizer.json").write_text(llama_tokenizer)
    ByteTokenizer().save(tmp_path / "saved")
    path = {"json": "tokenizer.json", "saved": "saved"}.get(kind)
    tokenizer = replace(BYTES, kind=kind, vocab_size=300, pattern=".", path=path, special=["</s>"], bos_token="<s>")
    size, _ = planned_vocabulary(FILES, tokenizer)
    assert size == {"bytes": 257, "bpe": 300, "json": 267, "saved": 257}[kind]


def test_a_mixture_has_the_vocabulary_of_its_corpora(tmp_path):
    ByteTokenizer().save(tmp_path / "a" / "tokenizer")
    assert planned_vocabulary(replace(FILES, source="mixture", corpora={"a": 1.0}), BYTES)[0] == 257
