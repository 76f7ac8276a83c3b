"""data: from text to shards, and from shards to batches."""

import contextlib
import io
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from data import prepare, sources
from data.batches import Batches, Windows
from data.corpus import open_corpus
from scripts.benchmarks.measure import alternate, prepared, table


def data(source: str, megabytes: int, rounds: int) -> list[dict]:
    """The documents of a source (a choice of the group `data`), repeated, with a BPE trained on them."""
    cfg, corpus = prepared(source, "bpe")
    documents = [d.text for d in sources.documents(cfg.data, Path("corpora/downloads"))]
    size = sum(len(text.encode()) for text in documents)
    texts = [f"{i}\n{text}" for i in range(-(-megabytes * 10**6 // size)) for text in documents]
    size = sum(len(text.encode()) for text in texts)
    tokenizer = prepare.saved_tokenizer(corpus.folder / "tokenizer")

    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for i, text in enumerate(texts):
            (Path(folder) / f"{i:05d}.txt").write_text(text, encoding="utf-8")
        settings = replace(cfg.data, source="files", paths=[f"{folder}/*.txt"], validation=[])
        made: list[Path] = []

        def ours() -> float:
            root = Path(folder) / f"corpora{len(made)}"
            begin = time.perf_counter()
            with contextlib.redirect_stdout(io.StringIO()):
                made.append(prepare.prepare(settings, tokenizer, root=root).folder)
            return size / 1e6 / (time.perf_counter() - begin)

        def theirs() -> float:
            """Dataset.map with as many processes and the same encoding, then one file, as nanoGPT prepares its data."""
            import datasets

            datasets.disable_progress_bars()
            datasets.disable_caching()
            encoding = corpus.tokenizer.encoding
            begin = time.perf_counter()
            rows = datasets.load_dataset("text", data_files=f"{folder}/*.txt", sample_by="document", split="train")

            def process(row):
                ids = encoding.encode_ordinary(row["text"])
                return {"ids": [*ids, encoding.eot_token], "length": len(ids) + 1}

            rows = rows.map(process, remove_columns=["text"], num_proc=cores)
            out = np.memmap(Path(folder) / "theirs.bin", np.uint16, "w+", shape=(sum(rows["length"]),))
            at = 0
            for i in range(parts := min(64, len(rows))):
                part = np.concatenate(rows.shard(parts, i, contiguous=True).with_format("numpy")["ids"])
                out[at : at + len(part)] = part
                at += len(part)
            out.flush()
            return size / 1e6 / (time.perf_counter() - begin)

        text = table(
            "text to shards",
            "MB/s",
            alternate(rounds, inkling=ours, **{(other := f"datasets.map, {cores} processes"): theirs}),
            other,
        )
        rows = {f"rows of {n} tokens": [batches_per_second(made[0], n) for _ in range(rounds)] for n in (1024, 128)}
        reading = table("shards to batches", "million tokens/s", rows)
    return [text, reading]


def batches_per_second(folder: Path, seq_len: int) -> float:
    tokens = open_corpus(folder).train
    batches = Batches(Windows(tokens, seq_len, seed=0), rows=32_768 // seq_len)
    steps, begin = 0, time.perf_counter()
    while (seconds := time.perf_counter() - begin) < 1:
        batches.batch(steps)
        steps += 1
    return steps * batches.rows * seq_len / seconds / 1e6
