import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.continuation import Continuation
from data.tokenizer import ByteTokenizer, CharacterTokenizer, JSONTokenizer, train_bpe

TEXT = "Once upon a time, 有一只猫 — naïve 👩‍🚀🚀 日本語のテキスト。\n\tOK  two  spaces"
PATTERN = r"\p{L}+| ?[^\s\p{L}]+|\s+"


@pytest.fixture(params=["bytes", "chars", "bpe", "json of bpe", "json of llama"])
def tokenizer(request, llama_tokenizer):
    bpe = train_bpe([TEXT] * 3, 280, PATTERN, ["<|endoftext|>"])
    return {
        "bytes": ByteTokenizer,
        "chars": lambda: CharacterTokenizer(TEXT),
        "bpe": lambda: bpe,
        "json of bpe": lambda: JSONTokenizer(bpe.to_json(), None, [bpe.eos_id]),
        "json of llama": lambda: JSONTokenizer(llama_tokenizer, 1, [2]),
    }[request.param]()


@pytest.mark.parametrize("cut", [0, 5, 12, 19, 27])
def test_text_grows_by_whole_characters_and_loses_no_space(tokenizer, cut):
    """Cuts the text anywhere into a prompt and a rest that comes token by token."""
    prompt = tokenizer.prompt(TEXT[:cut])
    ids = tokenizer.encode(TEXT[cut:]).tolist()
    expected = tokenizer.decode([*prompt, *ids])[len(tokenizer.decode(prompt)) :]
    row, seen = Continuation(tokenizer, prompt), ""
    for id in ids:
        row.push(id)
        assert row.text.startswith(seen)
        assert "\N{REPLACEMENT CHARACTER}" not in row.text
        seen = row.text
    row.finish()
    assert row.text == expected
    assert expected.strip() == TEXT[cut:].strip()
    assert (row.tokens, row.finish_reason) == (ids, "length")


def test_an_incomplete_character_at_the_end_becomes_a_replacement():
    row = Continuation(ByteTokenizer(), [0])
    for byte in "a🚀".encode()[:-1]:
        row.push(byte)
    assert row.text == "a"
    row.finish()
    assert row.text == "a\N{REPLACEMENT CHARACTER}"


def test_a_stop_token_ends_the_text():
    row = Continuation(ByteTokenizer(), [0])
    for token in (*b"ab", 256, *b"cd"):
        row.push(token, -1.0)
    row.finish()
    assert (row.text, row.tokens, row.finish_reason) == ("ab", [*b"ab", 256], "stop")
    assert row.log_probabilities == [-1.0] * 3
    assert row.mean_log_probability == -1.0


@pytest.mark.parametrize(
    ("stops", "written", "text"),
    [
        (["ab"], "aab", "a"),  # the first a does not start it, the second does
        (["aab"], "aaab", "a"),
        (["\n\n"], "one\n\ntwo", "one"),
        (["猫"], "一只猫。", "一只"),
        (["bc", "abcd"], "xabcd", "xa"),  # complete first, though it starts later
        (["abcd", "d"], "xabcd", "x"),  # complete at the same time: the one that starts first
        (["zz"], "azbz", "azbz"),  # what was held back turns out to be text
        ([], "abc", "abc"),
    ],
)
def test_the_text_ends_before_a_stop_string(stops, written, text):
    row = Continuation(ByteTokenizer(), [0], stops)
    for byte in written.encode():
        row.push(byte)
        assert row.text == text[: len(row.text)]  # no part of the stop string was ever shown
    row.finish()
    assert row.text == text
    assert row.finish_reason == ("length" if text == written else "stop")


@settings(deadline=None, max_examples=200)
@given(st.text("abc", max_size=14), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.integers())
def test_stop_strings_do_not_depend_on_token_boundaries(written, stops, seed):
    """The stop string that is complete first ends the text, as if it came character by character."""
    ends = [(i + len(stop), i) for stop in stops for i in range(len(written)) if written.startswith(stop, i)]
    expected = written[: min(ends)[1]] if ends else written
    row, rest, rng = Continuation(Pieces(), [], stops), written, random.Random(seed)
    while rest:
        n = rng.randint(1, len(rest))
        row.push(rest[:n])
        rest = rest[n:]
    row.finish()
    assert row.text == expected
    assert row.finish_reason == ("stop" if ends else "length")


class Pieces(ByteTokenizer):
    """A tokenizer whose tokens are these texts."""

    def token_bytes(self, token):
        return token.encode()


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="must have at least one character"):
        Continuation(ByteTokenizer(), [0], ["a", ""])
