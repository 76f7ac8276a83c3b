"""Datasets of the Hub, read by the real `datasets` library from a local server."""

import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from commands import command

from data import prepare as prepare_module
from data.corpus import open_corpus

pytestmark = pytest.mark.slow

TEXTS = [f"Story {i}: " + "once upon a time there was a number. " * 40 for i in range(200)]


@pytest.fixture
def stories(hub):
    """A dataset of two Parquet files."""
    folder = hub.root / "someone" / "stories" / "data"
    folder.mkdir(parents=True)
    for i in range(2):
        table = pyarrow.table({"story": TEXTS[100 * i : 100 * i + 100], "id": range(100)})
        pyarrow.parquet.write_table(table, folder / f"train-{i:05d}-of-00002.parquet", compression="none")
    return hub


def run(hub, tmp_path, *arguments, **environment):
    action = [word for word in arguments[:1] if "=" not in word]
    arguments = arguments[len(action) :]
    settings = ["data=hub", "data.repo=someone/stories", "data.column=story", "data.validation_share=0.1"]
    environment = {"HF_DATASETS_STREAMING_READ_MAX_RETRIES": "2"} | environment
    return command(
        *("-m", "scripts.prepare", *action, *settings, "tokenizer=bytes", *arguments),
        **{"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")} | environment,
    )


def texts_of(corpus) -> set[str]:
    found = set()
    for tokens in (corpus.train, corpus.validation):
        starts, ends = corpus.tokenizer.document_bounds(tokens)
        found |= {corpus.tokenizer.decode(tokens.read(a, b - a)) for a, b in zip(starts, ends, strict=True)}
    return found


def test_a_dataset_is_streamed_and_then_needs_no_network(stories, tmp_path):
    result = run(stories, tmp_path)
    assert result.returncode == 0, result.stderr
    (folder,) = Path("corpora").glob("stories-*")
    assert texts_of(open_corpus(folder, full=True)) == set(TEXTS)
    assert not list((tmp_path / "hf").rglob("*.parquet")) and not list((tmp_path / "hf").rglob("*.arrow"))
    asked = stories.asked
    again = run(stories, tmp_path, HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert stories.asked == asked
    assert "preparing" not in again.stdout


def test_workers_share_the_files_of_a_dataset(stories, tmp_path):
    for part in range(2):
        result = run(stories, tmp_path, "num_shards=2", f"shard_index={part}")
        assert result.returncode == 0, result.stderr
    result = run(stories, tmp_path, "merge", "num_shards=2")
    assert result.returncode == 0, result.stderr
    corpus = open_corpus(next(Path("corpora").glob("stories-*")), full=True)
    assert texts_of(corpus) == set(TEXTS)
    assert corpus.manifest["splits"]["train"]["documents"] + corpus.manifest["splits"]["validation"]["documents"] == 200
    result = run(stories, tmp_path, "num_shards=3", "shard_index=2", "data.max_tokens=10")
    assert result.returncode == 2 and "has fewer files than num_shards 3" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.repo=someone/nothing"], "data.repo=someone/nothing.*(not found|Not Found|doesn't exist)"),
        (["data.column=text"], "has no column text: set data.column to one of story, id"),
        (["data.split=tset"], "data.split=tset"),
        (["data.config=large"], "data.config=large"),
    ],
)
def test_a_missing_dataset_split_or_column_is_one_line(stories, tmp_path, arguments, message):
    result = run(stories, tmp_path, *arguments)
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert re.search(message, result.stderr)


def test_a_broken_connection_is_retried(stories, tmp_path):
    stories.breaks["data/train-00001-of-00002.parquet"] = 2
    result = run(stories, tmp_path)
    assert result.returncode == 0, result.stderr
    assert not stories.breaks
    assert texts_of(open_corpus(next(Path("corpora").glob("stories-*")), full=True)) == set(TEXTS)


def test_a_lost_connection_is_one_line_and_leaves_no_partial_corpus(monkeypatch, settings):
    """As `datasets` reports it after its retries, which take minutes."""
    import datasets

    rows, broken = [{"text": text} for text in TEXTS], True

    def load_dataset(*arguments, **options):
        yield from rows[:120]
        if broken:
            raise ConnectionError("the server is gone")
        yield from rows[120:]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(prepare_module, "SHARD_TOKENS", 1000)
    monkeypatch.setattr(prepare_module, "GROUP_CHARS", 2000)
    cfg = settings(
        "data=hub", "data.repo=a/b", "data.validation_share=0.1", "tokenizer=bytes", "tokenizer.train_chars=9"
    )
    arguments = cfg.data, cfg.tokenizer
    with pytest.raises(ValueError, match=r"data.repo=a/b: reading failed after row 119: the server is gone"):
        prepare_module.prepare(*arguments)
    assert not list(Path("corpora").glob("b-*"))
    broken = False
    assert texts_of(prepare_module.prepare(*arguments)) == set(TEXTS)
