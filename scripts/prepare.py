"""Turns text into token shards, once.  python -m scripts.prepare data=shakespeare tokenizer=bpe"""

from dataclasses import asdict

from conf.entry import entry_point
from conf.schema import Prepare
from data.prepare import prepare


@entry_point("prepare", Prepare)
def main(cfg: Prepare):
    corpus = prepare(asdict(cfg.data), asdict(cfg.tokenizer))
    print(f"corpus      {corpus.folder}, vocabulary {corpus.tokenizer.vocab_size:,}")
    for name, split in corpus.manifest["splits"].items():
        ratio = split["bytes"] / split["tokens"]
        print(
            f"{name:<11} {len(split['documents'])} documents, {split['bytes']:,} bytes, "
            f"{split['tokens']:,} tokens, {ratio:.2f} bytes a token"
        )


if __name__ == "__main__":
    main()
