"""Settings of data and tokenizers for tests, to be varied with dataclasses.replace."""

from data.config import DataConfig, TokenizerConfig

FILES = DataConfig(
    source="files",
    paths=["*.txt"],
    separator=None,
    column="text",
    encoding_errors="strict",
    wheel=None,
    repo=None,
    config=None,
    split="train",
    revision=None,
    corpora=None,
    max_tokens=None,
    validation=[],
    validation_share=0.1,
)
BYTES = TokenizerConfig(
    kind="bytes",
    vocab_size=None,
    pattern=None,
    special=["<|endoftext|>"],
    train_chars=10**6,
    encoding=None,
    path=None,
    bos_token=None,
)
