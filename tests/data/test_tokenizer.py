import base64
import hashlib
import json
import socket

import numpy as np
import pytest
import tokenizers
import yaml
from hypothesis import given
from hypothesis import strategies as st

from conf.entry import REPOSITORY
from data.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    CharacterTokenizer,
    JSONTokenizer,
    bpe,
    load_tokenizer,
    named_encoding,
    read_json,
    train_bpe,
)

PATTERN = yaml.safe_load((REPOSITORY / "conf" / "tokenizer" / "bpe.yaml").read_text())["pattern"]

TEXT = "To be, or not to be: that is the question. " * 20 + "naïve café 💡 <|endoftext|>\n\n  \t12345"
TOKENIZERS = {
    "bytes": ByteTokenizer(),
    "chars": CharacterTokenizer(TEXT),
    "bpe": train_bpe([TEXT], 300, PATTERN, ["<|endoftext|>"]),
}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


@every_tokenizer
def test_text_round_trips_and_names_of_special_tokens_are_text(tokenizer):
    tokens = tokenizer.encode(TEXT)
    assert tokenizer.decode(tokens) == TEXT
    assert tokenizer.eos_id not in tokens
    assert 0 <= tokens.min() and tokens.max() < tokenizer.vocab_size
    assert tokenizer.bytes_per_token()[tokens].sum() == len(TEXT.encode())


@pytest.mark.parametrize("tokenizer", [TOKENIZERS["bytes"], TOKENIZERS["bpe"]], ids=["bytes", "bpe"])
@given(text=st.text())
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@every_tokenizer
def test_a_stream_yields_only_whole_characters(tokenizer):
    pieces = list(tokenizer.stream(tokenizer.encode("a💡é"), after=tokenizer.prompt("")))
    assert "".join(pieces) == "a💡é"
    assert not any("\ufffd" in piece for piece in pieces)


@every_tokenizer
def test_a_saved_tokenizer_is_the_same_tokenizer(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "t")
    again = load_tokenizer(tmp_path / "t")
    assert again.fingerprint() == tokenizer.fingerprint()
    assert np.array_equal(again.encode(TEXT), tokenizer.encode(TEXT))


def test_different_tokenizers_have_different_fingerprints():
    assert (
        len({t.fingerprint() for t in [*TOKENIZERS.values(), train_bpe([TEXT], 299, PATTERN, ["<|endoftext|>"])]}) == 4
    )


def test_bpe_merges_frequent_pairs():
    tokenizer = TOKENIZERS["bpe"]
    assert tokenizer.vocab_size == 300
    assert len(tokenizer.encode(TEXT)) < len(TEXT.encode()) / 2
    assert b" be" in tokenizer.ranks


def test_tiktoken_and_the_trainer_agree():
    import rustbpe

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter([TEXT]), 299, pattern=PATTERN)
    assert TOKENIZERS["bpe"].encode(TEXT).tolist() == trainer.encode(TEXT)


def test_a_short_text_gives_fewer_tokens():
    tokenizer = train_bpe(["abab"], 5000, PATTERN, ["<|endoftext|>"])
    assert 257 < tokenizer.vocab_size < 262
    assert tokenizer.eos_id == tokenizer.vocab_size - 1
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_special_tokens_come_last_and_are_parsed_only_if_set():
    names = ["<|endoftext|>", "<|user|>", "<|bot|>"]
    tokenizer, asked = (train_bpe([TEXT], 302, PATTERN, names, parse) for parse in (False, True))
    text = "<|user|>To be?<|bot|>Not.<|endoftext|>x"
    for either in (tokenizer, asked):
        assert either.vocab_size == 302
        assert either.special == {"<|endoftext|>": 299, "<|user|>": 300, "<|bot|>": 301}
    assert tokenizer.encode(text).max() < 299
    assert tokenizer.decode(tokenizer.encode(text)) == text
    expected = [300, *asked.encode("To be?"), 301, *asked.encode("Not."), 299, *asked.encode("x")]
    assert asked.encode(text).tolist() == asked.prompt(text) == expected
    assert asked.document(text).tolist() == asked.documents([text]).tolist() == [*expected, 299]
    assert asked.documents([text, "a", text]).tolist() == [*expected, 299, *asked.encode("a"), 299, *expected, 299]
    shown = text.replace("<|endoftext|>", "")
    assert asked.decode(expected) == "".join(asked.stream(expected, after=[299])) == shown
    assert asked.bytes_per_token()[expected].sum() == len(shown)
    assert asked.stops == {299}


def test_bpe_is_not_trained_on_names_of_parsed_special_tokens():
    texts = ["<|user|>a b<|bot|>"] * 50
    tokenizer, asked = (train_bpe(texts, 300, PATTERN, ["<|end|>", "<|user|>", "<|bot|>"], p) for p in (False, True))
    assert b"user" in tokenizer.ranks
    assert [token for token in asked.ranks if len(token) > 1] == [b" b"]


def test_parse_special_is_saved_and_changes_the_fingerprint(tmp_path, llama_tokenizer):
    ranks, special = [bytes([byte]) for byte in range(256)], {"<|end|>": 256, "<|user|>": 257}
    text = "a<|user|>b<unk>"
    for make in (
        lambda *parse: BPETokenizer(ranks, ".", special, *parse),
        lambda *parse: JSONTokenizer(llama_tokenizer, 1, [2], *parse),
    ):
        plain, off, on = make(), make(False), make(True)
        assert "parse_special" not in plain.vocabulary()  # as in older checkpoints
        assert plain.fingerprint() == off.fingerprint() != on.fingerprint()
        on.save(tmp_path / on.kind)
        again = load_tokenizer(tmp_path / on.kind)
        assert again.parse_special and again.fingerprint() == on.fingerprint()
        assert again.encode(text).tolist() == on.encode(text).tolist() != plain.encode(text).tolist()
    known = "5419ee4b17169d406a5853db0431cc0594de61241ce364d1c55c3a097e777b87"
    assert BPETokenizer(ranks, ".", special).fingerprint() == known


def test_unknown_characters_are_named():
    with pytest.raises(ValueError, match="'xz'"):
        CharacterTokenizer("abc").encode("axbzx")


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match="vocabulary.json is missing"):
        load_tokenizer(tmp_path)


def test_an_empty_prompt_starts_from_end_of_text():
    for tokenizer in TOKENIZERS.values():
        assert tokenizer.prompt("") == [tokenizer.eos_id]
        assert tokenizer.prompt("be") == tokenizer.encode("be").tolist()


def test_end_of_text_is_the_last_id_and_has_no_bytes():
    for tokenizer in TOKENIZERS.values():
        assert tokenizer.eos_id == tokenizer.vocab_size - 1
        assert tokenizer.token_bytes(tokenizer.eos_id) == b""
    assert isinstance(TOKENIZERS["bpe"], BPETokenizer)


# --- another model's tokenizer.json ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def byte_level():
    """A tokenizer.json like GPT-2's: bytes spelled as printable characters, spaces kept."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return JSONTokenizer(tokenizer.to_str(), bos_id=0, eos_ids=[0])


@pytest.fixture(params=["byte level", "llama"])
def other(request, byte_level, llama_tokenizer):
    return byte_level if request.param == "byte level" else JSONTokenizer(llama_tokenizer, bos_id=1, eos_ids=[2])


def test_a_tokenizer_json_round_trips_text(other):
    tokens = other.encode(TEXT)
    assert other.decode(tokens) == TEXT
    assert other.eos_id not in tokens and other.bos_id not in tokens
    assert 0 <= tokens.min() and tokens.max() < other.vocab_size
    added = 1 if other.bos_id == 1 else 0  # Llama's normalizer prepends a space
    assert other.bytes_per_token()[tokens].sum() == len(TEXT.encode()) + added
    assert b"".join(other.token_bytes(token) for token in tokens).decode() == " " * added + TEXT


def test_special_tokens_of_a_tokenizer_json_are_text_in_a_text(other):
    text = "<s> the <|endoftext|> </s>"
    tokens = other.encode(text)
    assert other.decode(tokens) == text
    assert not set(tokens.tolist()) & other.stops


def test_special_tokens_of_a_tokenizer_json_are_parsed_if_set(other):
    asked = JSONTokenizer(other.content, other.bos_id, other.eos_ids, parse_special=True)
    for name in asked.special:
        text = f"the{name}hat{name}the"
        tokens = asked.encode(text).tolist()
        assert tokens.count(asked.special[name]) == 2
        assert asked.prompt(text) == [asked.bos_id, *tokens]
        assert list(asked.documents([text]))[: len(tokens) + 1] == [asked.bos_id, *tokens]
        hidden = asked.special[name] in asked.stops
        assert asked.decode(tokens).count(name) == (0 if hidden else 2)
        assert "".join(asked.stream(tokens, after=asked.prompt(""))) == asked.decode(tokens)
        assert asked.token_bytes(asked.special[name]) == (b"" if hidden else name.encode())


def test_a_tokenizer_json_streams_spaces_and_whole_characters(other):
    prompt = other.prompt("the hat")
    assert prompt[0] == other.bos_id
    tokens = other.encode("the hat the 💡 é the")[len(prompt) - 1 :].tolist()
    pieces = list(other.stream(tokens, after=prompt))
    assert "".join(pieces) == " the 💡 é the"
    assert not any("\ufffd" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 5
    from_the_start = list(other.stream(other.encode("the hat").tolist(), after=other.prompt("")[:1]))
    assert "".join(from_the_start) == "the hat"
    cut = "".join(other.stream(other.encode("the hat💡")[:-1].tolist(), after=other.prompt("")[:1]))
    assert cut.startswith("the hat") and set(cut[7:]) == {"\ufffd"}


def test_truncation_and_padding_of_a_tokenizer_json_are_off(llama_tokenizer):
    content = json.loads(llama_tokenizer)
    content["truncation"] = {"max_length": 5, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    content["padding"] = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_id": 0, "pad_type_id": 0}
    content["padding"] |= {"pad_to_multiple_of": None, "pad_token": "<unk>"}
    tokenizer = JSONTokenizer(json.dumps(content), bos_id=1, eos_ids=[2])
    for text in ("the", TEXT):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_documents_of_a_tokenizer_json_have_its_start_and_end_tokens(llama_tokenizer):
    tokenizer = JSONTokenizer(llama_tokenizer, bos_id=1, eos_ids=[2, 0])
    assert tokenizer.document("the").tolist() == [1, *tokenizer.encode("the")]
    assert tokenizer.stops == {0, 1, 2}
    with pytest.raises(ValueError, match="below 267, got 267"):
        JSONTokenizer(llama_tokenizer, bos_id=1, eos_ids=[267])
    with pytest.raises(ValueError, match="surrogates not allowed"):
        tokenizer.prompt("\ud800")


def test_added_tokens_of_a_tokenizer_json_decode_to_their_text(byte_level):
    content = json.loads(byte_level.content)
    token = {**content["added_tokens"][0], "id": 300, "content": "   \N{EM SPACE}", "special": False}
    content["added_tokens"].append(token)
    tokenizer = JSONTokenizer(json.dumps(content), bos_id=0, eos_ids=[0])
    assert tokenizer.vocab_size == 301
    assert tokenizer.token_bytes(300) == "   \N{EM SPACE}".encode()


def test_a_saved_tokenizer_json_is_the_same_tokenizer(other, tmp_path):
    other.save(tmp_path / "t")
    again = load_tokenizer(tmp_path / "t")
    assert again.fingerprint() == other.fingerprint()
    assert np.array_equal(again.encode(TEXT), other.encode(TEXT))
    assert again.stops == other.stops
    assert JSONTokenizer(other.content, 3, other.eos_ids).fingerprint() != other.fingerprint()


# --- exports, and GPT-2's vocabulary --------------------------------------------------------------------------------

TRICKY = [
    "",
    " ",
    "    leading and trailing   ",
    "\n\n\r\n\t \n",
    "tab\tand\x00NUL\x7f",
    "don't we'll I'VE it's 12345 3.14159 1,000,000",
    "naïve café e\u0301 ﬁ ½ Ⅷ",
    "日本語のテキスト 中文 한국어",
    "👩‍👩‍👧‍👦 💡🇩🇪 ✨",
    "עברית العربية \u200f\u202e",
    "<|endoftext|> <s></s> [INST] <|im_start|>",
    "https://example.org/a?b=c&d=%20#e",
    "def f(x):\n    return {x: [1, 2, 3]}  # comment",
    "a" * 3000,
    "ab" * 2000,
    "\U0010ffff\ufffd\ufeff",
    "ǅ ß İ \N{LATIN SMALL LETTER DOTLESS I}",
]


def tricky_texts(n=300) -> list[str]:
    alphabet = "".join(TRICKY)
    random = np.random.default_rng(0)
    made = ["".join(random.choice(list(alphabet), size=random.integers(1, 60))) for _ in range(n)]
    return TRICKY + made


@pytest.mark.slow
@every_tokenizer
def test_the_exported_tokenizer_gives_the_same_ids(tokenizer):
    other = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    other.encode_special_tokens = True
    for text in [TEXT, *tricky_texts()]:
        if tokenizer.kind == "chars":
            text = "".join(c for c in text if c in tokenizer.characters)
        assert other.encode(text, add_special_tokens=False).ids == tokenizer.encode(text).tolist(), repr(text)
        assert other.decode(tokenizer.encode(text).tolist()) == text
    assert other.token_to_id("<|endoftext|>") == tokenizer.eos_id
    assert other.get_vocab_size() == tokenizer.vocab_size


@pytest.fixture(scope="module")
def gpt2(reference):
    """GPT-2's vocabulary as a BPETokenizer."""
    from data.tokenizer.byte_level import byte_level_alphabet

    byte = {character: i for i, character in enumerate(byte_level_alphabet())}
    ids = json.loads((reference / "gpt2" / "vocab.json").read_text(encoding="utf-8"))
    ranks = sorted(ids, key=ids.__getitem__)[:-1]
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    return BPETokenizer([bytes(byte[c] for c in rank) for rank in ranks], pattern, {"<|endoftext|>": 50256})


@pytest.mark.slow
def test_gpt2_gives_the_ids_of_transformers(gpt2, reference):
    from transformers import GPT2Tokenizer

    folder = reference / "gpt2"
    theirs = GPT2Tokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    for text in tricky_texts():
        text = text.replace("<|endoftext|>", "<|end|>")  # which transformers parses as the token
        assert gpt2.encode(text).tolist() == theirs.encode(text), repr(text)
        assert gpt2.decode(gpt2.encode(text)) == text
    asked = BPETokenizer(gpt2.ranks, gpt2.encoding._pat_str, gpt2.special, parse_special=True)
    assert asked.encode("a<|endoftext|>").tolist() == theirs.encode("a<|endoftext|>")
    with pytest.raises(ValueError, match="surrogates not allowed"):
        gpt2.encode("half \ud83d here")


@pytest.mark.slow
def test_the_exported_gpt2_gives_its_ids_and_its_merges(gpt2, reference):
    lines = (reference / "gpt2" / "merges.txt").read_text(encoding="utf-8").splitlines()
    other = tokenizers.Tokenizer.from_str(gpt2.to_json())
    other.encode_special_tokens = True
    merges = json.loads(gpt2.to_json())["model"]["merges"]
    assert [" ".join(pair) for pair in merges] == [line for line in lines if not line.startswith("#version")]
    for text in tricky_texts():
        assert other.encode(text).ids == gpt2.encode(text).tolist(), repr(text)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["a" * 1_000_000, " " * 1_000_000, "a\n" + "\n \t" * 300_000 + "b"], ids=len)
def test_a_million_equal_characters_are_encoded(gpt2, text):
    assert gpt2.decode(gpt2.encode(text)) == text


@every_tokenizer
def test_documents_encoded_together_equal_documents_one_by_one(tokenizer):
    texts = [TEXT, "", "be", "question ", " be"]
    assert np.array_equal(tokenizer.documents(texts), np.concatenate([tokenizer.document(text) for text in texts]))
    plain = [text.replace("<|endoftext|>", "") for text in texts]  # encoded by a single call
    assert np.array_equal(tokenizer.documents(plain), np.concatenate([tokenizer.document(text) for text in plain]))


# --- tiktoken's encodings -------------------------------------------------------------------------------------------


def test_a_named_encoding_comes_from_the_cache(tmp_path, monkeypatch):
    """Makes p50k_base's file here; its name in the cache is the hash of its URL."""
    import tiktoken.registry

    address = "http://127.0.0.1:9/made_up.tiktoken"
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)] + ["dGhl 258"]  # 256: a gap
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))

    def made_up():
        from tiktoken.load import load_tiktoken_bpe

        special = {"<|pad|>": 300, "<|endoftext|>": 256}
        ranks = load_tiktoken_bpe(address)
        return {"name": "made_up", "pat_str": r"\w+|\W", "mergeable_ranks": ranks, "special_tokens": special}

    tiktoken.registry.list_encoding_names()
    monkeypatch.setitem(tiktoken.registry.ENCODING_CONSTRUCTORS, "made_up", made_up)
    with pytest.raises(ValueError, match=rf"needs {address}, which cannot be fetched.*tokenizer=bpe") as error:
        named_encoding("made_up")
    name = hashlib.sha1(address.encode()).hexdigest()
    assert f"{tmp_path}/{name}" in str(error.value)
    (tmp_path / name).write_text("\n".join(lines))
    tokenizer = named_encoding("made_up")
    assert tokenizer.encode("the thé").tolist() == tiktoken.get_encoding("made_up").encode("the thé")
    assert tokenizer.encode("the").tolist() == [258]
    assert tokenizer.eos_id == 256 and tokenizer.vocab_size == 301
    assert [tokenizer.token_bytes(id) for id in (256, 257, 258, 280, 300)] == [b"", b"", b"the", b"", b""]
    tokenizer.save(tmp_path / "saved")  # complete without the cache
    again = load_tokenizer(tmp_path / "saved")
    assert again.fingerprint() == tokenizer.fingerprint()
    assert again.encode("the thé").tolist() == tokenizer.encode("the thé").tolist()
    (tmp_path / "saved" / "vocabulary.json").write_text("{")
    with pytest.raises(ValueError, match="vocabulary.json is damaged"):
        load_tokenizer(tmp_path / "saved")


def test_a_download_from_a_silent_server_times_out(tmp_path, monkeypatch):
    import tiktoken.registry

    monkeypatch.setattr(bpe, "DOWNLOAD_TIMEOUT", 0.3)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    tiktoken.registry.list_encoding_names()
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts the connection and sends nothing

        def silent():
            return tiktoken.load.load_tiktoken_bpe(f"http://127.0.0.1:{server.getsockname()[1]}/a.tiktoken")

        monkeypatch.setitem(tiktoken.registry.ENCODING_CONSTRUCTORS, "silent", silent)
        with pytest.raises(ValueError, match="cannot be fetched .ReadTimeout.: save that file"):
            named_encoding("silent")


def test_an_unknown_encoding_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no encoding gpt3: there are .*gpt2"):
        named_encoding("gpt3")


def test_special_tokens_of_a_tokenizer_json_are_given_by_name(tmp_path, llama_tokenizer):
    path = tmp_path / "tokenizer.json"
    path.write_text(llama_tokenizer)
    tokenizer = read_json(path, "<s>", "</s>")
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, [2])
    assert tokenizer.document("the").tolist() == [1, *tokenizer.encode("the")]
    ended = read_json(path, None, "</s>")
    assert ended.document("the").tolist() == [*ended.encode("the"), 2]
    assert ended.prompt("") == [2] and ended.stops == {2}
    with pytest.raises(ValueError, match="no special token <pad>: there are <unk>, <s>, </s>"):
        read_json(path, None, "<pad>")
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not a valid tokenizer.json"):
        read_json(path, None, "</s>")


def test_a_byte_order_mark_before_a_tokenizer_json_is_dropped(tmp_path, llama_tokenizer):
    (tmp_path / "a.json").write_text(llama_tokenizer, encoding="utf-8")
    (tmp_path / "b.json").write_text(llama_tokenizer, encoding="utf-8-sig")
    a, b = (read_json(tmp_path / name, "<s>", "</s>") for name in ("a.json", "b.json"))
    assert a.fingerprint() == b.fingerprint()


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "is not a valid regular expression, got '\\('"),
        ("", "at least one character"),
        ("^", "at least"),
        ("(?=a)", "at least"),
    ],
)
def test_an_invalid_tokenizer_pattern_is_refused(pattern, message):
    with pytest.raises(ValueError, match=f"tokenizer.pattern .*{message}"):
        train_bpe(["a text"], 260, pattern, ["<end>"])


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[]",
        "5",
        "",
        '{"kind": "words"}',
        '{"kind": "chars"}',
        '{"kind": "chars", "characters": 5}',
        '{"kind": "bpe", "pattern": ".", "ranks": ["%"]}',
        '{"kind": "bpe", "pattern": "(", "ranks": ["YQ=="]}',
        '{"kind": "bpe", "pattern": ".", "ranks": ["YQ=="], "special": {}}',
        '{"kind": "bpe", "pattern": ".", "ranks": ["YQ=="], "special": {"<e>": -1}}',
        '{"kind": "bpe", "pattern": null, "ranks": {}}',
        '{"kind": "json", "beginning": null, "ends": []}',
    ],
)
def test_an_invalid_vocabulary_is_an_error_with_its_path(tmp_path, content):
    (tmp_path / "vocabulary.json").write_text(content)
    with pytest.raises(ValueError, match=r"vocabulary\.json is (damaged|empty)") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)
