import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.tokenizer import BPETokenizer, ByteTokenizer, CharacterTokenizer, load_tokenizer, train_bpe

PATTERN = r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s+"

TEXT = "To be, or not to be: that is the question. " * 20 + "naïve café 💡 <|endoftext|>\n\n  \t12345"
TOKENIZERS = {
    "bytes": ByteTokenizer(),
    "chars": CharacterTokenizer(TEXT),
    "bpe": train_bpe([TEXT], 300, PATTERN),
}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


@every_tokenizer
def test_text_comes_back_exactly_and_special_looking_text_is_text(tokenizer):
    tokens = tokenizer.encode(TEXT)
    assert tokenizer.decode(tokens) == TEXT
    assert tokenizer.end_of_text not in tokens
    assert 0 <= tokens.min() and tokens.max() < tokenizer.vocab_size
    assert tokenizer.token_lengths()[tokens].sum() == len(TEXT.encode())


@pytest.mark.parametrize("tokenizer", [TOKENIZERS["bytes"], TOKENIZERS["bpe"]], ids=["bytes", "bpe"])
@given(text=st.text())
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@every_tokenizer
def test_a_stream_never_shows_half_a_character(tokenizer):
    pieces = list(tokenizer.stream(tokenizer.encode("a💡é")))
    assert "".join(pieces) == "a💡é"
    assert not any("\ufffd" in piece for piece in pieces)


@every_tokenizer
def test_a_saved_tokenizer_is_the_same_tokenizer(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "t")
    again = load_tokenizer(tmp_path / "t")
    assert again.fingerprint() == tokenizer.fingerprint()
    assert np.array_equal(again.encode(TEXT), tokenizer.encode(TEXT))


def test_fingerprints_tell_tokenizers_apart():
    assert len({t.fingerprint() for t in [*TOKENIZERS.values(), train_bpe([TEXT], 299, PATTERN)]}) == 4


def test_bpe_learns_what_is_frequent():
    tokenizer = TOKENIZERS["bpe"]
    assert tokenizer.vocab_size == 300
    assert len(tokenizer.encode(TEXT)) < len(TEXT.encode()) / 2
    assert b" be" in tokenizer.ranks


def test_tiktoken_and_the_trainer_agree():
    import rustbpe

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter([TEXT]), 299, pattern=PATTERN)
    assert TOKENIZERS["bpe"].encode(TEXT).tolist() == trainer.encode(TEXT)


def test_a_vocabulary_that_the_text_cannot_fill_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"vocab_size 5000.*ask for at most"):
        train_bpe(["abab"], 5000, PATTERN)


def test_unknown_characters_are_listed():
    with pytest.raises(ValueError, match="'xz'"):
        CharacterTokenizer("abc").encode("axbzx")


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match="vocabulary.json is missing"):
        load_tokenizer(tmp_path)


def test_end_of_text_is_the_last_id_and_stands_for_no_bytes():
    for tokenizer in TOKENIZERS.values():
        assert tokenizer.end_of_text == tokenizer.vocab_size - 1
        assert tokenizer.token_bytes(tokenizer.end_of_text) == b""
    assert isinstance(TOKENIZERS["bpe"], BPETokenizer)
