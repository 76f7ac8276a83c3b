"""Prepares documents as token shards on disk, once, and atomically.

    corpora/NAME/             the finished corpus: manifest.json, tokenizer/, shards; created by a single rename
    corpora/.NAME.work/       work in progress: plan.json, tokenizer/, and a folder for each part with its shards
        part_00000_of_00001/  and state.json, from which an interrupted run resumes

One thread reads; one thread per core tokenises, the slow part, a group of documents per call (the tokenizer libraries
release the GIL). Memory holds the first documents while the tokenizer is trained, then a few groups and one unfinished
shard per split, however large the corpus is; a single document must fit in memory.
"""

import hashlib
import json
import math
import os
import sys
import time
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Annotated
from zipfile import BadZipFile

import numpy as np
from filelock import FileLock
from pydantic import Field
from typing_extensions import TypedDict

from data import chat, files, sources
from data.config import DataConfig, TokenizerConfig
from data.corpus import (
    FORMAT,
    FORMAT_OF_ANSWERS,
    Corpus,
    Count,
    Known,
    Shard,
    Shards,
    Splits,
    Tokens,
    advising,
    check_shard,
    delete_advice,
    open_corpus,
    open_mixture,
    open_token_files,
)
from data.readers import Document
from data.split import LOOK, Split, is_about, plan_split
from data.tokenizer import (
    END_OF_TEXT,
    BPETokenizer,
    ByteTokenizer,
    CharacterTokenizer,
    JSONTokenizer,
    Tokenizer,
    load_tokenizer,
    named_encoding,
    read_json,
    train_bpe,
)

SHARD_TOKENS = 2**26  # 128 MB of uint16
GROUP_CHARS = 2**20  # characters in a group of documents, which one thread tokenises
SPLITS = ("train", "validation")
PARSING = ("bpe", "tiktoken", "json")  # tokenizers that have parse_special
TOKENS = (".ds", ".bin")  # suffixes of token files


def prepare(
    data: DataConfig, tokenizer: TokenizerConfig, root: Path = Path("corpora"), known: Known | None = None
) -> Corpus:
    """Opens the corpus of these settings, and prepares it first if it does not exist.

    Its folder name is a hash of the settings and the state of the source, so a changed file or setting makes another
    corpus. If several processes call this at once, one prepares and the others wait. Token files, a prepared corpus and
    a mixture of those are opened as they are. `known` is the corpus that a checkpoint was trained on with the same
    settings: it is used if the files are gone, or were moved or touched with unchanged content.
    """
    if data.source == "corpus":
        return open_corpus(data.paths[0])
    if data.source == "mixture":
        return open_mixture(data.corpora)
    if data.source == "tokens":
        made = make_tokenizer(tokenizer, [], [])
        paths = sources.find(data.paths, TOKENS)
        return _report_share(open_token_files(paths, made, data.validation, data.validation_share), data)
    try:
        folder = corpus_folder(data, tokenizer, root)
    except ValueError:  # the files are gone
        if known is None or (corpus := known.find()) is None:
            raise
        print(f"the source text is gone: using {corpus.folder}, which was prepared from it")
        return corpus
    if not folder.exists() and known is not None and (corpus := known.find()) is not None:
        content = sources.content(data)
        if content is None or content == corpus.manifest.get("content"):
            print(f"the source text is unchanged: using {corpus.folder}, which was prepared from it")
            return corpus
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{folder.name}.lock"):
            if not folder.exists():  # no other process made it while this one waited
                with files.naming(folder):
                    prepare_part(data, tokenizer, folder, 0, 1)
                    merge_parts(data, tokenizer, folder, 1)
    return _report_share(open_corpus(folder), data)


def _report_share(corpus: Corpus, data: DataConfig) -> Corpus:
    """Prints the validation share if it is far from data.validation_share."""
    share = len(corpus.validation) / (len(corpus.train) + len(corpus.validation))
    if not data.validation and not is_about(share, data.validation_share) and os.environ.get("RANK", "0") == "0":
        setting = f"data.validation_share={data.validation_share}"
        print(
            f"validation has {share:.2%} of the text, {setting} asks for {data.validation_share:.2%} ({corpus.folder})"
        )
    return corpus


def corpus_folder(data: DataConfig, tokenizer: TokenizerConfig, root: Path) -> Path:
    text = {name: getattr(data, name) for name in ("source", "max_tokens", "validation", "validation_share")}
    text |= {} if data.max_tokens is None else {"cut": True}  # older corpora exceeded max_tokens
    vocabulary = {**asdict(tokenizer), "path": None}
    vocabulary["beginning"] = vocabulary.pop("bos_token")  # its former name, so that the hash stays the same
    if not tokenizer.parse_special:  # older corpora were named without it
        del vocabulary["parse_special"]
    if tokenizer.path is not None:  # its content counts, not its path
        path = Path(tokenizer.path)
        found = sorted(file for file in path.glob("*") if file.is_file()) if path.is_dir() else [path]
        if not found or not found[0].is_file():
            raise ValueError(f"tokenizer.path: there is no tokenizer in {path}")
        vocabulary["content"] = [hashlib.sha256(file.read_bytes()).hexdigest() for file in found]
    content = [FORMAT, text, sources.identity(data), vocabulary]
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]
    name = f"{tokenizer.kind}{tokenizer.vocab_size or tokenizer.encoding or ''}"
    source = data.repo.split("/")[-1] if data.source == "hub" else data.source
    return root / f"{source}-{name}-{key}"


def work_folder(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.work"


# --- the plan: the split and the tokenizer --------------------------------------------------------------------------


def make_plan(data: DataConfig, tokenizer: TokenizerConfig, folder: Path) -> tuple[Split, Tokenizer]:
    """Makes the plan from the first documents of the source, or loads it if another part has made it."""
    work, cache = work_folder(folder), folder.parent / "downloads"
    if not (work / "plan.json").exists():
        sources.check(data)
        print(f"preparing {folder}: choosing the validation text, making the tokenizer", flush=True)
        stream = sources.documents(data, cache)
        first = list(_first(stream, max(tokenizer.train_chars, LOOK)))
        rest = next(stream, None)
        if not first:
            raise ValueError(f"data: {sources.nothing(data)}")
        split = plan_split(first, rest is None, data.validation, data.validation_share)
        sample = _first(first, tokenizer.train_chars)
        training = (d.text for document in sample for which, d in split.pieces(document) if which == "train")
        unread = chain([rest], stream) if rest is not None else iter(())
        for remark in [*sources.remarks(data, first), *unparsed(tokenizer, first)]:
            print(remark)
        make_tokenizer(tokenizer, training, chain(first, unread)).save(work / "tokenizer")
        _write_json(work / "plan.json", {"split": asdict(split), "source_hash": _source_hash(data)})
    with advising(delete_advice(work)):
        return files.read_json(work / "plan.json", Plan)["split"], load_tokenizer(work / "tokenizer")


def _source_hash(data: DataConfig) -> str:
    return hashlib.sha256(json.dumps(sources.identity(data), sort_keys=True).encode()).hexdigest()


def _first(documents: Iterable[Document], chars: int) -> Iterator[Document]:
    for document in documents:
        yield document
        chars -= len(document.text)
        if chars <= 0:
            return


def saved_tokenizer(folder: Path) -> TokenizerConfig:
    """Returns the settings for a tokenizer saved in a folder."""
    unused = dict.fromkeys(("vocab_size", "pattern", "encoding", "bos_token"))
    return TokenizerConfig("saved", path=str(folder), special=[END_OF_TEXT], train_chars=50_000_000, **unused)


def unparsed(tokenizer: TokenizerConfig, first: list[Document]) -> list[str]:
    """Returns a remark for each special token, except end-of-text, whose name is plain text in the first documents."""
    if tokenizer.kind not in PARSING or tokenizer.parse_special:
        return []
    counts = {name: sum(document.text.count(name) for document in first) for name in tokenizer.special[1:]}
    where = f"in the first {sum(len(document.text) for document in first):,} characters as plain text"
    what = "tokenizer.parse_special=true makes it a token"
    return [f"tokenizer.special {name} occurs {n:,} times {where}: {what}" for name, n in counts.items() if n]


def make_tokenizer(config: TokenizerConfig, training: Iterable[str], all_documents: Iterable[Document]) -> Tokenizer:
    """Makes the tokenizer: BPE is trained on training documents only, an alphabet is taken from all documents."""
    kind, special, parse = config.kind, config.special, config.parse_special
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "chars":
        alphabet: set[str] = set()
        for document in all_documents:
            alphabet.update(document.text)
        return CharacterTokenizer("".join(alphabet))
    if kind == "tiktoken":
        return _with_special(named_encoding(config.encoding, parse), special)
    if kind == "json":
        return _with_special(read_json(config.path, config.bos_token, special[0], parse), special)
    if kind == "saved":
        return load_tokenizer(config.path)
    made = train_bpe(training, config.vocab_size, config.pattern, special, parse)
    if made.vocab_size < config.vocab_size:
        print(f"the text yields only {made.vocab_size} tokens, tokenizer.vocab_size is {config.vocab_size}")
    return made


def _with_special(made: BPETokenizer | JSONTokenizer, names: list[str]) -> Tokenizer:
    """Raises a ValueError if the tokenizer lacks special tokens that parse_special needs."""
    missing = [name for name in names if name not in made.special]
    if made.parse_special and missing:
        there = ", ".join(list(made.special)[:20])
        raise ValueError(f"tokenizer.special: this tokenizer has no {', '.join(missing)}, only {there}")
    return made


CHARACTERS = 128  # assumed size of an alphabet that is not counted yet, with end-of-text
ENCODINGS = {"gpt2": 50257, "r50k_base": 50257, "p50k_base": 50281, "cl100k_base": 100277, "o200k_base": 200019}


def planned_vocabulary(data: DataConfig, tokenizer: TokenizerConfig) -> tuple[int, str]:
    """Returns the vocabulary size of these settings, estimated without reading the text, and where it comes from."""
    if data.source in ("corpus", "mixture"):
        folder = Path(next(iter(data.corpora or data.paths))) / "tokenizer"
        return load_tokenizer(folder).vocab_size, str(folder)
    kind = tokenizer.kind
    if kind == "bpe":
        return tokenizer.vocab_size, "tokenizer.vocab_size"
    if kind == "chars":
        return CHARACTERS, "assumed: the characters are not counted yet"
    if kind == "tiktoken" and tokenizer.encoding in ENCODINGS:
        return ENCODINGS[tokenizer.encoding], tokenizer.encoding
    return make_tokenizer(tokenizer, [], []).vocab_size, tokenizer.encoding or tokenizer.path or kind


# --- a part ---------------------------------------------------------------------------------------------------------


def prepare_part(data: DataConfig, tokenizer: TokenizerConfig, folder: Path, part: int, parts: int):
    """Writes the shards of one of several parts; an interrupted one resumes after its last finished shard."""
    work = work_folder(folder)
    work.mkdir(parents=True, exist_ok=True)
    with files.naming(work), FileLock(work / "plan.lock"):
        split, made = make_plan(data, tokenizer, folder)
    with files.naming(work), FileLock(work / f"{part_name(part, parts)}.lock"):  # the same part, started twice
        _write_part(data, folder, split, made, part, parts)


def _write_part(data: DataConfig, folder: Path, split: Split, made: Tokenizer, part: int, parts: int):
    work = work_folder(folder)
    begin, shown = time.perf_counter(), 0.0
    writer = PartWriter(work / part_name(part, parts), made)
    if writer.done:
        return
    if writer.groups:
        print(f"resuming after {writer.tokens:,} prepared tokens", flush=True)
    empty: Counter = Counter()
    stream = sources.documents(data, folder.parent / "downloads", part, parts, empty)
    each, left = divmod(data.max_tokens, parts) if data.max_tokens is not None else (math.inf, 0)
    limit = each + (part < left)
    groups = _until_full(islice(_groups(stream), writer.groups, None), split, writer, limit)
    size = 0
    expected = sources.expected_bytes(data, part, parts) if writer.groups == 0 else None
    for group in _encoded(groups, split, made, writer.dtype):
        group["train"].cut(limit - writer.tokens, made)
        writer.add(group)
        size += sum(encoded.bytes for encoded in group.values())
        seconds = time.perf_counter() - begin
        if seconds - shown > (1 if sys.stdout.isatty() else 30):
            shown = seconds
            done = [size / expected] if expected else []
            done += [writer.tokens / limit] if limit < math.inf else []
            _show(size, seconds, writer.tokens, max(done, default=None))
    writer.finish()
    if sys.stdout.isatty():
        print("\r\x1b[K", end="")
    if data.chat_columns() and empty["rows"]:
        print(f"left out {empty['rows']:,} rows that have no answer")
    seconds = time.perf_counter() - begin
    print(f"{size:,} bytes to {writer.tokens:,} tokens in {seconds:.1f} s, {size / 1e6 / seconds:.1f} MB/s", flush=True)


def _show(size: int, seconds: float, tokens: int, done: float | None):
    text = f"{size / 1e6:,.0f} MB, {size / 1e6 / seconds:.1f} MB/s, {tokens:,} tokens"
    if done:
        text += f", {max(0, seconds / done - seconds):.0f} s left"
    print(f"\r{text}\x1b[K" if sys.stdout.isatty() else text, end="" if sys.stdout.isatty() else "\n", flush=True)


def part_name(part: int, parts: int) -> str:
    return f"part_{part:05d}_of_{parts:05d}"


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yields documents in groups of about GROUP_CHARS; the same documents always give the same groups."""
    group, chars = [], 0
    for document in documents:
        group.append(document)
        chars += len(document.text)
        if chars >= GROUP_CHARS:
            yield group
            group, chars = [], 0
    if group:
        yield group


def _until_full(
    groups: Iterable[list[Document]], split: Split, writer: "PartWriter", limit: float
) -> Iterator[list[Document]]:
    """Yields groups until `limit` training tokens are written and there is a validation document.

    If data.validation names documents, it reads on to the end to find all of them, and skips the others.
    """
    for group in groups:
        if writer.tokens >= limit:
            if not split.patterns and writer.splits["validation"]["tokens"]:
                return
            group = [document for document in group if any(which != "train" for which, _ in split.pieces(document))]
        yield group


def encode_documents(documents: list[Document], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the concatenated ids of documents and, for conversations, whether each is trained on; otherwise None."""
    if documents[0].answers is None:
        return tokenizer.documents([document.text for document in documents]), None
    pairs = [chat.encode(document.text, document.answers, tokenizer) for document in documents]
    tokens, loss_mask = zip(*pairs, strict=True)
    return np.concatenate(tokens), np.concatenate(loss_mask)


class Encoded:
    """The tokens of a split's documents in a group and, for conversations, their loss mask."""

    def __init__(self, documents: list[Document], tokenizer: Tokenizer, lengths: np.ndarray, dtype: np.dtype):
        texts = [document.text for document in documents]
        nothing: tuple[np.ndarray, np.ndarray | None] = np.empty(0, dtype), None
        tokens, self.loss_mask = encode_documents(documents, tokenizer) if texts else nothing
        if len(tokens) and tokens.max() >= tokenizer.vocab_size:  # astype would wrap around silently
            raise AssertionError(f"token {tokens.max()} is outside the vocabulary of {tokenizer.vocab_size}")
        self.tokens = tokens.astype(dtype)
        self.documents = len(documents)
        self.bytes = len("".join(texts).encode("utf-8"))
        if tokenizer.parse_special and texts:  # a text that contains end-of-text is several documents
            self.documents = len(tokenizer.document_bounds(Tokens([self.tokens]))[0])
            if tokenizer.lossless:  # end-of-text counts no bytes
                self.bytes -= (self.documents - len(documents)) * len(next(iter(tokenizer.special)).encode("utf-8"))
        if tokenizer.lossless and (kept := int(lengths[self.tokens].sum())) != self.bytes:
            raise ValueError(
                f"the tokens of {documents[0].name} and what follows hold {kept:,} of {self.bytes:,} bytes: "
                "tokenizer.pattern must match any text"
            )

    def cut(self, n: float, tokenizer: Tokenizer):
        """Keeps the first n tokens; none if n is not positive."""
        if n >= len(self.tokens):
            return
        self.tokens = self.tokens[: max(0, int(n))]
        self.loss_mask = None if self.loss_mask is None else self.loss_mask[: len(self.tokens)]
        self.documents = len(tokenizer.document_bounds(Tokens([self.tokens]))[0]) if len(self.tokens) else 0
        self.bytes = int(tokenizer.bytes_per_token()[self.tokens].sum())


def _encoded(
    groups: Iterable[list[Document]], split: Split, tokenizer: Tokenizer, dtype: np.dtype
) -> Iterator[dict[str, Encoded]]:
    """Tokenises groups, several in parallel, and yields them in order."""
    lengths = tokenizer.bytes_per_token()

    def encode(group: list[Document]) -> dict[str, Encoded]:
        pieces: dict[str, list[Document]] = {name: [] for name in SPLITS}
        for document in group:
            for which, piece in split.pieces(document):
                pieces[which].append(piece)
        return {name: Encoded(documents, tokenizer, lengths, dtype) for name, documents in pieces.items()}

    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        pending: deque = deque()
        for group in groups:
            pending.append(pool.submit(encode, group))
            if len(pending) > workers + 1:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


class Plan(TypedDict):
    """plan.json"""

    split: Split
    source_hash: str


class State(TypedDict):
    """state.json of a part"""

    groups: Count
    done: bool
    rest: Annotated[str, Field(pattern=r"^rest_\d+\.npz$")]
    splits: Splits


def empty_shards() -> Shards:
    """Returns the entry of a split before anything is written."""
    return {"documents": 0, "tokens": 0, "bytes": 0, "shards": []}


class PartWriter:
    """Writes the shards of a part, and state.json: how many groups are in the shards and the unfinished rest."""

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        self.folder = folder
        self.dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
        self.groups, self.done = 0, False
        self.splits = {name: empty_shards() for name in SPLITS}
        # arrays that do not fill a shard yet; for conversations in two rows, the second the loss mask
        self.rest: dict[str, list[np.ndarray]] = {name: [] for name in SPLITS}
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "state.json").exists():
            with advising(delete_advice(folder.parent)):
                state = files.read_json(folder / "state.json", State)
                self.groups, self.done, self.splits = state["groups"], state["done"], dict(state["splits"])
                if not self.done:
                    self.rest = _read_rest(folder / state["rest"])

    @property
    def tokens(self) -> int:
        """Training tokens, in finished shards or not."""
        return self.splits["train"]["tokens"]

    def add(self, group: dict[str, Encoded]):
        written = False
        for name, encoded in group.items():
            split = self.splits[name]
            split["documents"] += encoded.documents
            split["tokens"] += len(encoded.tokens)
            split["bytes"] += encoded.bytes
            if len(encoded.tokens):
                tokens, mask = encoded.tokens, encoded.loss_mask
                self.rest[name].append(tokens if mask is None else np.stack([tokens, mask]))
            while sum(part.shape[-1] for part in self.rest[name]) >= SHARD_TOKENS:
                tokens = np.concatenate(self.rest[name], axis=-1)
                self._write_shard(name, tokens[..., :SHARD_TOKENS])
                self.rest[name] = [tokens[..., SHARD_TOKENS:]]
                written = True
        self.groups += 1
        if written:
            self._save()

    def finish(self):
        for name, rest in self.rest.items():
            if sum(part.shape[-1] for part in rest):
                self._write_shard(name, np.concatenate(rest, axis=-1))
        self.rest, self.done = {}, True
        self._save()

    def _write_shard(self, name: str, tokens: np.ndarray):
        shards = self.splits[name]["shards"]
        file = f"{name}_{len(shards):05d}.bin"
        tokens, *masks = np.atleast_2d(tokens)
        sha256 = self._write_file(file, tokens)
        shard: Shard = {"file": f"{self.folder.name}/{file}", "tokens": len(tokens), "sha256": sha256}
        for mask in masks:
            shard["learned_sha256"] = self._write_file(Path(file).with_suffix(".learned").name, mask.astype(np.uint8))
        shards.append(shard)

    def _write_file(self, file: str, numbers: np.ndarray) -> str:
        """Returns the checksum."""
        content = numbers.tobytes()
        _write(self.folder / file, content)
        return hashlib.sha256(content).hexdigest()

    def _save(self):
        """Saves the rest under a new name, then the state that names it, so that a complete pair always exists."""
        rest = f"rest_{self.groups}.npz"
        if not self.done:
            with (self.folder / rest).open("wb") as file:
                np.savez(file, **{n: np.concatenate(r, axis=-1) for n, r in self.rest.items() if r})
                os.fsync(file.fileno())
        state = {"groups": self.groups, "done": self.done, "rest": rest, "splits": self.splits}
        _write_json(self.folder / "state.json", state)
        for old in self.folder.glob("rest_*.npz"):
            if old.name != rest or self.done:
                old.unlink()


def _read_rest(path: Path) -> dict[str, list[np.ndarray]]:
    try:
        with np.load(path) as rest:
            return {name: [rest[name]] if name in rest else [] for name in SPLITS}
    except (OSError, EOFError, ValueError, BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _write_json(path: Path, content: dict):
    _write(path, json.dumps(content, indent=2).encode())


def _write(path: Path, content: bytes):
    """Writes a file atomically; it is on the disk when this returns."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


# --- the finished corpus --------------------------------------------------------------------------------------------


def merge_parts(data: DataConfig, tokenizer: TokenizerConfig, folder: Path, parts: int):
    """Verifies every shard of every part, writes the manifest, and renames the folder to its final name."""
    work = work_folder(folder)
    with advising(delete_advice(work)):
        made = load_tokenizer(work / "tokenizer") if (work / "plan.json").exists() else None
    splits = {name: empty_shards() for name in SPLITS}
    names = tuple(part_name(part, parts) for part in range(parts))
    for part, name in enumerate(names):
        writer = PartWriter(work / name, made) if made is not None and (work / name).is_dir() else None
        if writer is None or not writer.done:
            raise ValueError(f"part {part} of {parts} is not prepared: run it with shard_index={part}")
        for name, split in writer.splits.items():
            for shard in split["shards"]:
                with advising(delete_advice(work)):
                    check_shard(work, shard, writer.dtype, full=True)
            total = splits[name]
            total["documents"] += split["documents"]
            total["tokens"] += split["tokens"]
            total["bytes"] += split["bytes"]
            total["shards"] += split["shards"]
    for name, split in splits.items():
        if split["documents"] == 0:
            limit = "" if data.max_tokens is None else f", within data.max_tokens {data.max_tokens}"
            raise ValueError(
                f"there are no documents for {name}: data.validation {data.validation} and "
                f"data.validation_share {data.validation_share} must leave some for both splits{limit}"
            )
    with advising(delete_advice(work)):
        plan = files.read_json(work / "plan.json", Plan)
    if plan["source_hash"] != _source_hash(data):
        raise ValueError(f"the source text changed while it was being prepared: delete {work} and start again")
    others = [path for path in work.glob("part_*_of_*") if not path.name.startswith(names)]
    if others:
        raise ValueError(f"{others[0]} is from a run with another num_shards: finish that, or delete {work}")
    manifest = {
        "format": FORMAT_OF_ANSWERS if data.chat_columns() else FORMAT,
        "dtype": writer.dtype.name,
        "vocab_size": made.vocab_size,
        "tokenizer": made.fingerprint(),
        "source": {**asdict(data), **sources.identity(data)},
        "source_hash": plan["source_hash"],
        "content": sources.content(data),
        "split": asdict(plan["split"]),
        "splits": splits,
    }
    _write_json(work / "manifest.json", manifest)
    os.rename(work, folder)
    for leftover in [*folder.glob("part_*/state.json"), *folder.glob("*.lock"), folder / "plan.json"]:
        leftover.unlink(missing_ok=True)
