"""Conversations: which tokens are trained on, from rows in files to targets in batches."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import BYTES, FILES

from data import chat, sources
from data import prepare as prepare_module
from data.batches import IGNORE, make_batches
from data.config import DataConfig
from data.corpus import open_corpus, open_mixture
from data.prepare import prepare
from data.tokenizer import BPETokenizer, ByteTokenizer, read_json
from model import GPT, ModelConfig
from training.evaluation import evaluate

TEMPLATE = {"system": "{}\n", "user": "User: {}\n", "assistant": "Assistant: {}\n"}
TURNS = st.lists(st.tuples(st.sampled_from(sorted(TEMPLATE)), st.text("ab \n:ü{}", max_size=6)), max_size=6)


def settings_of(**changes) -> DataConfig:
    chat = {"paths": ["chat.jsonl"], "template": TEMPLATE, "messages_column": "messages", "validation_share": 0.2}
    return replace(FILES, **chat | changes)


def messages(turns) -> list[dict]:
    return [{"role": role, "content": content} for role, content in turns]


def write(rows: list, name: str = "chat.jsonl"):
    with open(name, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def reference(turns) -> tuple[list[int], list[bool]]:
    """Returns the bytes of a conversation, and whether each is trained on; empty if there is no answer."""
    ids, loss_mask = [], []

    def put(text: str, flag: bool):
        ids.extend(text.encode())
        loss_mask.extend([flag] * len(text.encode()))

    for role, content in turns:
        answers = role == "assistant" and bool(content.strip())
        put({"system": "", "user": "User: ", "assistant": "Assistant:"}[role], False)
        put((" " if role == "assistant" else "") + content + "\n", answers)
    if not any(loss_mask):
        return [], []
    return [*ids, 256], [*loss_mask, loss_mask[-1]]


@settings(max_examples=200, deadline=None)
@given(TURNS)
def test_only_answers_and_the_ends_of_their_turns_are_trained_on(turns):
    text, spans = chat.render(turns, TEMPLATE)
    expected, flags = reference(turns)
    assert bool(text) == bool(expected)
    if text:
        ids, loss_mask = chat.encode(text, spans, ByteTokenizer())
        assert ids.tolist() == expected and loss_mask.tolist() == flags


@settings(max_examples=100, deadline=None)
@given(TURNS)
def test_a_template_may_contain_special_tokens(turns):
    special = {"<|end|>": 256, "<|user|>": 257, "<|bot|>": 258}
    tokenizer = BPETokenizer([bytes([byte]) for byte in range(256)], "(?s:.)", special, parse_special=True)
    template = {"system": "{}", "user": "<|user|>{}", "assistant": "<|bot|>{}<|end|>"}
    text, spans = chat.render(turns, template)
    if not text:
        return
    ids, loss_mask = chat.encode(text, spans, tokenizer)
    expected, flags = [], []
    for role, content in turns:
        answer = role == "assistant"
        begin, end = [257] * (role == "user") + [258] * answer, [256] * answer
        expected += [*begin, *content.encode(), *end]
        flags += [False] * len(begin) + [answer and bool(content.strip())] * (len(content.encode()) + len(end))
    assert ids.tolist() == [*expected, 256] and loss_mask.tolist() == [*flags, flags[-1]]


ROWS = [
    [("user", f"say {i}"), ("assistant", "x" * (i % 7 + 1)), *[("user", "more"), ("assistant", "yes")][: 2 * (i % 2)]]
    for i in range(20)
]


@pytest.mark.parametrize("shard", [2**26, 50])
def test_a_corpus_of_conversations_has_their_tokens_and_loss_masks(monkeypatch, shard):
    monkeypatch.setattr(prepare_module, "SHARD_TOKENS", shard)
    monkeypatch.setattr(prepare_module, "GROUP_CHARS", 100)
    write([{"messages": messages(turns)} for turns in ROWS])
    corpus = prepare(settings_of(), BYTES)
    found = {}
    for name, text in (("train", corpus.train), ("validation", corpus.validation)):
        ids, loss_mask = text.read(0, len(text)).tolist(), text.loss_mask.read(0, len(text)).tolist()
        assert len(loss_mask) == len(ids)
        starts, ends = corpus.tokenizer.document_bounds(text)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            found[tuple(ids[start:end])] = (name, [bool(flag) for flag in loss_mask[start:end]])
    assert {ids: flags for ids, (_, flags) in found.items()} == {tuple(a): b for a, b in map(reference, ROWS)}
    assert 1 <= sum(name == "validation" for name, _ in found.values()) <= 8  # whole, none is cut
    assert len(corpus.train.arrays) == len(corpus.train.loss_mask.arrays) == -(-len(corpus.train) // shard)


def test_loss_masks_are_verified_and_part_of_the_fingerprint():
    write([{"messages": messages(turns), "text": chat.render(turns, TEMPLATE)[0]} for turns in ROWS])
    corpus = prepare(settings_of(validation=["chat.jsonl:3"]), BYTES)
    plain = prepare(settings_of(validation=["chat.jsonl:3"], messages_column=None), BYTES)
    assert plain.train.loss_mask is None and plain.manifest["format"] == 2 and corpus.manifest["format"] == 3
    for one, other in ((plain.train, corpus.train), (plain.validation, corpus.validation)):
        assert np.array_equal(one.read(0, len(one)), other.read(0, len(other)))
    assert plain.fingerprint() != corpus.fingerprint()
    both = open_mixture({str(plain.folder): 0.5, str(corpus.folder): 0.5}).train.loss_mask
    expected = [1] * len(plain.train) + corpus.train.loss_mask.read(0, len(corpus.train)).tolist()
    assert both.read(0, len(both)).tolist() == expected
    mask = next(corpus.folder.rglob("train*.learned"))
    content = mask.read_bytes()
    mask.write_bytes(bytes([1 - content[0]]) + content[1:])
    with pytest.raises(ValueError, match="learned is damaged"):
        open_corpus(corpus.folder, full=True)
    mask.unlink()
    with pytest.raises(ValueError, match="learned is missing"):
        open_corpus(corpus.folder)


def test_an_interrupted_preparation_resumes_to_the_same_masks(monkeypatch):
    write([{"messages": messages(turns)} for turns in ROWS])
    whole = prepare(settings_of(), BYTES)
    monkeypatch.setattr(prepare_module, "GROUP_CHARS", 100)
    monkeypatch.setattr(prepare_module, "SHARD_TOKENS", 150)
    real, left = prepare_module.PartWriter.add, [3]

    def add(self, group):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        real(self, group)

    whole.folder.rename("whole")
    monkeypatch.setattr(prepare_module.PartWriter, "add", add)
    with pytest.raises(KeyboardInterrupt):
        prepare(settings_of(), BYTES)
    monkeypatch.setattr(prepare_module.PartWriter, "add", real)
    again = prepare(settings_of(), BYTES)
    assert len(again.train.arrays) > 1
    for one, other in ((whole.train, again.train), (whole.train.loss_mask, again.train.loss_mask)):
        assert np.array_equal(np.concatenate(one.arrays), np.concatenate(other.arrays))


def test_the_loss_of_packed_rows_is_that_of_each_answer_alone():
    write([{"messages": messages(turns)} for turns in ROWS])
    corpus = prepare(settings_of(), BYTES)
    torch.manual_seed(0)
    model = GPT(257, ModelConfig(d_model=16, n_layers=2, n_heads=2, d_ff=32, max_seq_len=64)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    batches = make_batches(corpus, rows=1, seq_len=64, seed=0, packing="documents")
    total = counted = 0
    with torch.no_grad():
        for row in range(batches.source.count):
            loss, count = model(**batches.batch(row))
            total, counted = total + loss.item(), counted + int(count)
        expected = n = 0
        starts, ends = corpus.tokenizer.document_bounds(corpus.train)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            ids = torch.from_numpy(corpus.train.read(start, end - start).astype(np.int64))
            loss_mask = corpus.train.loss_mask.read(start, end - start)
            logs = model(ids[None])[0].log_softmax(-1)
            for at in range(1, len(ids)):
                if loss_mask[at]:
                    expected, n = expected - logs[at - 1, ids[at]].item(), n + 1
    assert counted == n == int(corpus.train.loss_mask.read(0, len(corpus.train)).sum())
    assert total == pytest.approx(expected, rel=1e-5)


def test_a_stream_counts_the_same_targets():
    write([{"messages": messages(turns)} for turns in ROWS])
    corpus = prepare(settings_of(), BYTES)
    ids, loss_mask = (part.read(0, len(corpus.train)) for part in (corpus.train, corpus.train.loss_mask))
    batch = make_batches(corpus, rows=3, seq_len=16, seed=1).batch(0)
    for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
        at = next(i for i in range(len(ids)) if ids[i : i + 16].tolist() == tokens)
        assert targets == np.where(loss_mask, ids.astype(int), IGNORE)[at + 1 : at + 17].tolist()


def test_pieces_of_long_conversations_without_an_answer_are_left_out():
    rows = [[("user", "u" * 100 * (i % 2)), ("assistant", f"{i:02}")] for i in range(12)]
    write([{"messages": messages(turns)} for turns in rows])
    corpus = prepare(settings_of(), BYTES)
    batches = make_batches(corpus, rows=1, seq_len=24, seed=0, packing="documents")
    counts = 0
    for row in range(batches.source.count):
        batch = batches.batch(row)
        for document in set(batch["documents"][0].tolist()) - {-1}:
            assert (batch["targets"][0][batch["documents"][0] == document] != IGNORE).any()
        counts += int((batch["targets"] != IGNORE).sum())
    assert counts == int(corpus.train.loss_mask.read(0, len(corpus.train)).sum())


def test_validation_counts_answers_and_their_bytes_only():
    write([{"messages": messages(turns)} for turns in ROWS])
    corpus = prepare(settings_of(), BYTES)
    text = corpus.validation
    model = GPT(257, ModelConfig(d_model=16, n_layers=1, n_heads=2, d_ff=32, max_seq_len=16))
    lengths = corpus.tokenizer.bytes_per_token()
    for limit in (None, 16):
        result = evaluate(model, text.read, len(text), lengths, loss_mask=text.loss_mask, seq_len=16, limit=limit)
        assert result.tokens > 0 and np.isfinite(result.loss)
        if limit is None:
            answers = text.read(0, len(text))[text.loss_mask.read(0, len(text)) == 1]
            assert (result.tokens, result.bytes) == (len(answers), int((answers < 256).sum()))


@pytest.mark.parametrize("beginning", [None, "<s>"])
def test_the_end_of_an_answer_is_trained_on_with_any_tokenizer(llama_tokenizer, beginning):
    with open("tokenizer.json", "w") as file:
        file.write(llama_tokenizer)
    tokenizer = read_json("tokenizer.json", beginning, "</s>")
    text, spans = chat.render([("user", "the heat"), ("assistant", "eats the hat")], TEMPLATE)
    ids, loss_mask = chat.encode(text, spans, tokenizer)
    assert ids[-1] == tokenizer.eos_id and loss_mask[-1]
    assert ids[~loss_mask].tolist() == tokenizer.prompt("User: the heat\nAssistant:")
    assert tokenizer.decode(ids[loss_mask]).strip() == "eats the hat"


def read(rows, name="chat.jsonl", **changes):
    write(rows, name)
    return list(sources.documents(settings_of(paths=[name], **changes), "downloads"))


def test_prompts_and_answers_are_conversations_of_two_turns():
    pairs = {"messages_column": None, "prompt_column": "q", "answer_column": "a"}
    rows = [{"q": "hi", "a": "hello"}, {"q": "nothing", "a": " "}, {"q": "null", "a": None}]
    found = read(rows, **pairs)
    assert [(d.name, d.text, d.answers) for d in found] == [
        ("chat.jsonl:0", "User: hi\nAssistant: hello\n", ((19, 26),))
    ]
    with open("chat.csv", "w") as file:
        file.write('q,a\nhi,"hello, you"\n')
    found = list(sources.documents(settings_of(paths=["chat.csv"], **pairs), "downloads"))
    assert found[0].text == "User: hi\nAssistant: hello, you\n"
    with pytest.raises(ValueError, match=r"chat.jsonl, line 1 has no a, it has q, b: set data.answer_column"):
        read([{"q": "hi", "b": "hello"}], **pairs)
    with pytest.raises(ValueError, match=r"chat.jsonl, line 1 must have text, got int: set data.answer_column"):
        read([{"q": "hi", "a": 4}], **pairs)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "hi"}, "line 2 must have a list of messages, got str: set data.messages_column"),
        ({"messages": None}, "line 2 must have a list of messages, got NoneType"),
        ({"talk": []}, "line 2 has no messages, it has talk: set data.messages_column"),
        ({"messages": ["hi"]}, "line 2, message 1 must have role and content, got str"),
        ({"messages": [{"from": "a", "value": "b"}]}, "message 1 must have role and content, got from, value"),
        ({"messages": messages([("user", "a"), ("tool", "b")])}, "message 2 has the role 'tool', data.template has"),
        ({"messages": messages([(None, "a")])}, "message 1 has the role None"),
        ({"messages": messages([("user", [{"type": "text"}])])}, "message 1: content must be a string, got list"),
        ({"messages": messages([("assistant", None)])}, "message 1: content must be a string, got NoneType"),
        ({"messages": messages([("assistant", "\ud800")])}, "message 1 has half a surrogate pair"),
    ],
    ids=str,
)
def test_invalid_messages_are_named_with_file_and_row(row, message):
    good = {"messages": messages([("user", "hi"), ("assistant", "hello")])}
    with pytest.raises(ValueError, match=f"^chat.jsonl, .*{message}"):
        read([good, row])


def test_rows_without_an_answer_are_left_out_and_counted(capsys):
    silent = [[], [("user", "hi")], [("user", "hi"), ("assistant", "")]]
    write([{"messages": messages(turns)} for turns in [*ROWS, *silent]])
    prepare(settings_of(), BYTES)
    assert "left out 3 rows that have no answer" in capsys.readouterr().out


def test_conversations_without_any_answer_are_an_error_of_one_line():
    write([{"messages": messages(turns)} for turns in ([("user", "hi")], [("system", "be kind"), ("user", "hi")])])
    with pytest.raises(ValueError, match="nothing to train on, no turn of the role assistant has any text"):
        prepare(settings_of(), BYTES)
    with pytest.raises(ValueError, match=r"\(data.messages_column=messages\)$"):
        prepare(settings_of(), BYTES)


@pytest.mark.parametrize("share", [1e-9, 0.2, 1 - 1e-9])
def test_equal_conversations_cannot_be_split(share):
    write([{"messages": messages(ROWS[0])}] * 9)
    with pytest.raises(ValueError, match="all 9 documents are for (training|validation), since they are equal"):
        prepare(settings_of(validation_share=share), BYTES)


def test_errors_about_columns_hint_at_messages_and_at_formats():
    with pytest.raises(ValueError, match="text, got list: set data.column, or data.messages_column if these are"):
        read([{"text": [{"role": "user", "content": "hi"}]}], messages_column=None)
    with pytest.raises(ValueError, match=r"chat.txt has no columns: data.messages_column needs .jsonl"):
        read([], "chat.txt")


def test_a_single_conversation_cannot_be_split():
    write([{"messages": messages(ROWS[0])}])
    with pytest.raises(ValueError, match="chat.jsonl:0 is the only conversation"):
        prepare(settings_of(), BYTES)


@pytest.mark.parametrize("n", [2, 3, 5, 9])
def test_few_conversations_give_some_to_both_splits(n):
    write([{"messages": messages(turns)} for turns in ROWS[:n]])
    corpus = prepare(settings_of(), BYTES)
    for text in (corpus.train, corpus.validation):
        assert text.loss_mask.read(0, len(text)).any()
