"""Turns text into token shards, once.  python -m scripts.prepare data=shakespeare tokenizer=bpe"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from conf.console import visible
from conf.entry import entry_point
from conf.parsing import parse
from conf.schema import Train
from conf.scripts import Prepare
from data import prepare
from data.batches import IGNORE, ORDER, make_batches
from data.corpus import Corpus, Tokens, learned_from, open_corpus
from training import checkpoint


@entry_point("prepare", Prepare, actions=("show", "merge"))
def main(cfg: Prepare, action: str | None):
    if action == "show" and cfg.run is not None:
        cfg = settings_of(Path(cfg.run), cfg)
    data, tokenizer = cfg.data, cfg.tokenizer
    if (cfg.num_shards > 1 or action == "merge") and cfg.data.source in ("tokens", "corpus", "mixture"):
        raise ValueError(f"data={cfg.data.source} is already prepared: num_shards has no effect here")
    folder = None
    if cfg.num_shards > 1 or action == "merge":
        folder = prepare.corpus_folder(data, tokenizer, Path("corpora"))
    if cfg.num_shards > 1 and folder.exists():
        print(f"prepared already: {folder}")
    elif action == "merge":
        prepare.merge_parts(data, tokenizer, folder, cfg.num_shards)
    elif cfg.num_shards > 1:
        if cfg.shard_index is None:
            raise ValueError(f"num_shards={cfg.num_shards} needs shard_index, 0 to {cfg.num_shards - 1}, or `merge`")
        prepare.prepare_part(data, tokenizer, folder, cfg.shard_index, cfg.num_shards)
        return
    steps = checkpoint.steps(Path(cfg.run)) if action == "show" and cfg.run is not None else []
    about = checkpoint.read_about(steps[0]) if steps else {}
    corpus = prepare.prepare(data, tokenizer, known=learned_from(about, steps[0]) if steps else None)
    if action == "show":
        corpus.check_length(cfg.seq_len)
        show(corpus, cfg, about.get("batch_order", 1) if steps else ORDER)
        return
    print(f"corpus      {corpus.folder}, vocabulary {corpus.tokenizer.vocab_size:,}")
    for name, split in corpus.manifest["splits"].items():
        line = f"{name:<11} {sum(shard['tokens'] for shard in split['shards']):,} tokens"
        if "bytes" in split:
            line += f", {split['documents']:,} documents, {split['bytes']:,} bytes"
        print(line)
    if cfg.verify:
        if cfg.data.source == "tokens":
            raise ValueError("verify=true needs checksums, which token files do not have")
        for part in [part for part, _ in corpus.mixture] or [corpus]:
            open_corpus(part.folder, full=True)
            print(f"verified    every shard of {part.folder} matches its checksum")
    if cfg.report:
        report(corpus)
    if cfg.export is not None:
        Path(cfg.export).write_text(corpus.tokenizer.to_json(), encoding="utf-8")
        print(f"exported    {cfg.export}")


def settings_of(run: Path, cfg: Prepare) -> Prepare:
    """The settings of a run that determine its batches."""
    if not (run / "config.yaml").is_file():
        raise ValueError(f"run {run} is not a run folder: config.yaml is missing")
    trained = parse(OmegaConf.load(run / "config.yaml"), Train)
    names = ("batch_tokens", "seq_len", "packing", "seed", "data", "tokenizer")
    return replace(cfg, **{name: getattr(trained, name) for name in names})


def show(corpus: Corpus, cfg: Prepare, order: int = ORDER):
    """Prints the text of each row of a batch; in packed rows each document starts a new line."""
    batches = make_batches(corpus, cfg.batch_tokens // cfg.seq_len, cfg.seq_len, cfg.seed, cfg.packing, order=order)
    batch = batches.batch(cfg.step)
    for row in range(batches.rows):
        print(f"--- row {row + 1} of {batches.rows}, step {cfg.step}")
        tokens, targets = batch["tokens"][row], batch["targets"][row]
        documents = batch["documents"][row] if "documents" in batch else tokens * 0
        for document in documents[documents >= 0].unique().tolist():
            here = (documents == document) & (targets != IGNORE)
            last = targets[here][-1:].tolist()
            print(visible(corpus.tokenizer.decode(tokens[here].tolist() + last)))


def report(corpus: Corpus):
    """Prints how well the tokenizer fits the text."""
    lengths = corpus.tokenizer.bytes_per_token()
    for name, tokens in (("train", corpus.train), ("validation", corpus.validation)):
        counts = count(tokens, len(lengths))
        print(f"{name:<11} {counts @ lengths / counts.sum():.3f} bytes/token")
        if name == "train":
            used = counts > 0
    longest = Counter({token: int(n) for token, n in enumerate(lengths) if used[token]}).most_common(10)
    print(f"vocabulary  {used.sum():,} of {len(lengths):,} tokens occur in the training text")
    print("longest     " + " ".join(repr(corpus.tokenizer.decode([token])) for token, _ in longest))


def count(tokens: Tokens, vocab_size: int) -> np.ndarray:
    """The number of occurrences of each token, (vocab_size,)."""
    return sum(np.bincount(piece, minlength=vocab_size) for piece in tokens.pieces())


if __name__ == "__main__":
    main()
