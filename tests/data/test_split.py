"""The split: about the given share of the text is for validation, or the documents that are named."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from texts import BYTES, FILES

from data.corpus import open_token_files
from data.prepare import prepare
from data.readers import Document
from data.split import choose, is_about, is_file_named, plan_split, share_hash
from data.tokenizer import ByteTokenizer


def texts(sizes, seed=0) -> list[Document]:
    """Returns documents of these sizes, all lines different."""
    draw = random.Random(f"{sizes} {seed}")
    lines = [[draw.randbytes(20).hex()[: draw.randrange(8, 40)] for _ in range(size // 8 + 1)] for size in sizes]
    return [Document(f"{i}", "\n".join(words)[:size]) for i, (words, size) in enumerate(zip(lines, sizes, strict=True))]


def validation_part(documents, share, complete=True) -> float:
    split = plan_split(documents, complete, [], share)
    pieces = [(which, piece) for document in documents for which, piece in split.pieces(document)]
    assert "".join(piece.text for _, piece in pieces) == "".join(document.text for document in documents)
    held = sum(len(piece.text) for which, piece in pieces if which == "validation")
    return held / sum(len(document.text) for document in documents)


UNEVEN = [
    [169_000, 2_000],
    [2_000, 169_000],
    [58_500, *[2_400] * 5],
    [30_000, *[100] * 19],
    [30_000, *[1_500] * 19],
    [5_000, 5_000],
    [5_000] * 3,
    [5_000] * 4,
    [9_000, 8_000, 5_000, 3_000, 2_000, 1_000, 500, 100],
]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", UNEVEN, ids=str)
@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.9])
def test_about_the_share_of_the_text_is_validation_for_any_sizes(sizes, share):
    for seed in range(3):
        assert is_about(validation_part(texts(sizes, seed), share), share)


def test_documents_are_not_cut_if_whole_ones_give_about_the_share():
    for seed in range(20):
        documents = texts([1000] * 8, seed)
        split = plan_split(documents, True, [], 0.1)
        names = [piece.name for d in documents for which, piece in split.pieces(d) if which == "validation"]
        assert len(names) in (1, 2) and not any("end" in name for name in names)


def test_adding_a_document_moves_few_others():
    documents = texts([40_000, *[1_000] * 60], seed=1)

    def held(documents):
        split = plan_split(documents, True, [], 0.1)
        return {
            d.name
            for d in documents
            for which, piece in split.pieces(d)
            if which == "validation" and piece.text == d.text
        }

    before, after = held(documents[:-1]), held(documents)
    assert len(before ^ after) <= 2 and before


def test_sizes_do_not_matter_if_hashes_give_about_the_share():
    documents = texts([200] * 100)
    split = plan_split(documents, True, [], 0.1)
    held = {d.name for d in documents for which, _ in split.pieces(d) if which == "validation"}
    assert held == {d.name for d in documents if share_hash(d.text) < 0.1} and 5 <= len(held) <= 20


def test_equal_documents_are_in_the_same_split():
    documents = texts([300, 300, 5_000, 400]) * 2
    split = plan_split(documents, True, [], 0.2)
    sides = [[(which, len(piece.text)) for which, piece in split.pieces(d)] for d in documents]
    assert sides[:4] == sides[4:]
    copies = [Document("a", "the same\n" * 50)] * 10  # equal hashes cannot be split: each gives its end
    assert is_about(validation_part(copies, 0.1), 0.1)


@pytest.mark.parametrize("hash", [0.05, 0.5])
def test_a_long_document_of_a_stream_is_never_all_validation(monkeypatch, hash):
    monkeypatch.setattr("data.split.LOOK", 10_000)
    monkeypatch.setattr("data.split.share_hash", lambda text: hash)
    documents = texts([9_000, 900, 100])
    split = plan_split(documents[:1], False, [], 0.1)  # the rest of the stream is unknown
    (first, second), *others = ([which for which, _ in split.pieces(d)] for d in documents)
    assert (first, second) == ("train", "validation")
    assert others[1] == ["validation" if hash < 0.1 else "train"]  # the hash still decides about a short one


def test_the_split_does_not_depend_on_train_chars(tmp_path):
    for document in texts([4_000, *[300] * 9]):
        (tmp_path / f"{document.name}.txt").write_text(document.text)
    held = []
    for train_chars in (10, 1_000, 10**6):
        corpus = prepare(FILES, replace(BYTES, train_chars=train_chars), root=Path(f"corpora{train_chars}"))
        held.append(len(corpus.validation))
        assert is_about(len(corpus.validation) / (len(corpus.train) + len(corpus.validation)), 0.1)
    assert len(set(held)) == 1


def test_a_share_is_reported_only_if_far_from_the_setting(tmp_path, capsys):
    for document in texts([3_000] * 10):
        (tmp_path / f"{document.name}.txt").write_text(document.text)
    prepare(FILES, BYTES)
    assert "of the text, data.validation_share" not in capsys.readouterr().out
    for path in tmp_path.glob("?.txt"):
        path.write_text(path.name)
    prepare(replace(FILES, validation_share=0.01), BYTES)  # less than a character
    assert "validation has 10.00% of the text, data.validation_share=0.01 asks for 1.00%" in capsys.readouterr().out


@pytest.mark.parametrize("sizes", [[60_000, 700], [700, 60_000], [30_000, *[200] * 9], [2_000] * 3], ids=str)
def test_about_the_share_of_token_files_is_validation(tmp_path, sizes):
    tokenizer = ByteTokenizer()
    for i, size in enumerate(sizes):
        tokens = np.resize(tokenizer.document("a text of some length"), size).astype(np.uint16)
        tokens.tofile(tmp_path / f"{i}.ds")
    paths = [f"{i}.ds" for i in range(len(sizes))]
    corpus = open_token_files(paths, tokenizer, [], 0.1)
    assert is_about(len(corpus.validation) / sum(sizes), 0.1)
    assert len(corpus.train) + len(corpus.validation) == sum(sizes)
    for array in corpus.validation.arrays:  # starts with a document
        assert tokenizer.decode(array[:6]) == "a text"


def test_token_files_split_differently_have_another_fingerprint(tmp_path):
    for name, size in (("a", 1_000), ("b", 50), ("c", 50)):
        np.zeros(size, np.uint16).tofile(tmp_path / f"{name}.ds")
    paths = ["a.ds", "b.ds", "c.ds"]
    fingerprints = [open_token_files(paths, ByteTokenizer(), [], share).fingerprint() for share in (0.1, 0.2)]
    assert fingerprints[0] != fingerprints[1]


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    ["q/v.jsonl", "v.jsonl", "*v.jsonl", "./q/v.jsonl", "q", "q/", "*/v.*", "{here}/q/v.jsonl", "q/v.jsonl:*"],
)
def test_a_file_pattern_selects_all_documents_of_the_file(tmp_path, pattern):
    (tmp_path / "q").mkdir()
    for name in ("t.jsonl", "q/v.jsonl"):
        rows = [json.dumps({"text": f"{name} {i}"}) for i in range(30)]
        (tmp_path / name).write_text("\n".join(rows))
    paths = {"paths": ["t.jsonl", "q/*.jsonl"], "validation": [pattern.format(here=tmp_path)]}
    splits = prepare(replace(FILES, **paths), BYTES).manifest["splits"]
    assert [splits[name]["documents"] for name in ("train", "validation")] == [30, 30]


def test_a_file_whose_name_looks_like_a_pattern_matches_itself(tmp_path):
    for name in ("a[1].txt", "b.txt"):
        (tmp_path / name).write_text(name * 20)
    splits = prepare(replace(FILES, validation=["a[1].txt"]), BYTES).manifest["splits"]
    assert splits["validation"]["bytes"] == 8 * 20
    assert is_file_named("a[1].txt", "a*") and not is_file_named("a1.txt", "a[2].txt")


@pytest.mark.parametrize(
    ("validation", "message"),
    [
        (["vla.txt"], r"data.validation: no file matches vla.txt; there are t.txt, val.txt: did you mean val.txt"),
        (["val.txt", "other/*.txt"], "no file matches other/"),
        (["t.text:1*"], "no file matches t.text:1"),
        (["*.txt"], "nothing is left to train on: data.validation matches all 2 files"),
    ],
)
def test_validation_names_are_checked_before_any_text_is_read(tmp_path, monkeypatch, validation, message):
    for name in ("t.txt", "val.txt"):
        (tmp_path / name).write_text(name * 20)
    monkeypatch.setattr("data.sources.documents", None)
    with pytest.raises(ValueError, match=message):
        prepare(replace(FILES, validation=validation), BYTES)


def test_impossible_names_of_hub_documents_are_refused_before_reading(monkeypatch):
    monkeypatch.setattr("data.sources.documents", None)
    hub = {"source": "hub", "repo": "someone/stories", "validation": ["validation.jsonl"]}
    with pytest.raises(ValueError, match="jsonl is not a document of the Hub, such as someone/stories:0:17"):
        prepare(replace(FILES, **hub), BYTES)


def test_token_files_are_selected_by_name_like_others(tmp_path):
    (tmp_path / "x").mkdir()
    for name in ("x/a.ds", "x/b.ds"):
        np.zeros(100, np.uint16).tofile(tmp_path / name)
    corpus = open_token_files(["x/a.ds", "x/b.ds"], ByteTokenizer(), ["b.ds"], 0.1)
    assert len(corpus.validation) == 100
    with pytest.raises(ValueError, match=r"no file matches c.ds; there are x/a.ds, x/b.ds"):
        open_token_files(["x/a.ds", "x/b.ds"], ByteTokenizer(), ["c.ds"], 0.1)


def test_the_smallest_document_is_validation_if_nothing_else_fits():
    split = choose([0.9, 0.2, 0.5], [3, 1, 2], 0.01)
    assert [split.share_of(*one) for one in ((0.9, 3), (0.2, 1), (0.5, 2))] == [0, 1, 0]
