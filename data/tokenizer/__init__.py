"""Text to tokens and back: bytes, characters, byte-pair encoding, or another model's tokenizer.json, as one class.

A token is a piece of UTF-8, so any text round-trips exactly. The name of a special token in a text is plain text,
unless `parse_special` is set; the end-of-text token is appended to each document by its id.
"""

from data.tokenizer.base import END_OF_TEXT, Decoder, Tokenizer
from data.tokenizer.bpe import BPETokenizer, named_encoding, train_bpe
from data.tokenizer.hugging_face import JSONTokenizer, read_json
from data.tokenizer.plain import ByteTokenizer, CharacterTokenizer
from data.tokenizer.saved import load_tokenizer

__all__ = [
    "END_OF_TEXT",
    "BPETokenizer",
    "ByteTokenizer",
    "CharacterTokenizer",
    "Decoder",
    "JSONTokenizer",
    "Tokenizer",
    "load_tokenizer",
    "named_encoding",
    "read_json",
    "train_bpe",
]
