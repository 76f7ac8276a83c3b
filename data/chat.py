"""Conversations as text, by a template, and which of it a model is to learn: the answers."""

from collections.abc import Callable

import numpy as np

from data.tokenizer import Tokenizer

ANSWERS = "assistant"  # the role whose turns are learned

Turns = list[tuple[str, str]]  # of (role, content)
Spans = tuple[tuple[int, int], ...]  # of characters, from one to the one before another


def turns(messages, template: dict[str, str], where: str, text: Callable[[object, str], str]) -> Turns:
    """A list of messages, each a mapping with role and content; `text` checks a content.

    ValueError, which begins with `where`, for anything else.
    """
    if not isinstance(messages, list):
        raise ValueError(f"{where} holds no list of messages but {type(messages).__name__}: set data.messages_column")
    found = []
    for i, message in enumerate(messages, 1):
        place = f"{where}, message {i}"
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            there = ", ".join(message) if isinstance(message, dict) else type(message).__name__
            raise ValueError(f"{place} must have role and content, there is {there or 'nothing'}")
        role, content = message["role"], message["content"]
        if not isinstance(role, str) or role not in template:
            known = ", ".join(template)
            raise ValueError(f"{place} has the role {role!r}, known are {known}: give data.template one more")
        if not isinstance(content, str):
            raise ValueError(f"{place} must have a text as content, got {type(content).__name__}")
        found.append((role, text(content, place)))
    return found


def render(conversation: Turns, template: dict[str, str]) -> tuple[str, Spans]:
    """The text of a conversation, and the spans of it that are learned: answers, with what ends their turn.

    A space before an answer is learned with it, so that a prompt ends where nobody types one. ("", ()) where there is
    no answer to learn; an empty answer is none.
    """
    text, learned = "", []
    for role, content in conversation:
        before, after = template[role].split("{}")
        start = len(text) + len(before.rstrip(" "))
        text += before + content + after
        if role == ANSWERS and content.strip():
            learned.append((start, len(text)))
    return (text, tuple(learned)) if learned else ("", ())


def encode(text: str, learned: Spans, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """(ids, learned) of a conversation, equally long: each span is tokenised on its own, as it comes after a prompt.

    End-of-text follows, also where documents of this tokenizer only have a beginning; it is learned after an answer.
    """
    empty = tokenizer.documents([""])  # what begins any text, and mostly what ends it
    begin = empty[empty != tokenizer.eos_id]
    ids, flags, at = [begin], [np.zeros(len(begin), bool)], 0
    for start, end in (*learned, (len(text), len(text))):
        for piece, flag in ((text[at:start], False), (text[start:end], True)):
            if piece:
                ids.append(tokenizer.encode(piece))
                flags.append(np.full(len(ids[-1]), flag))
        at = end
    ids.append(np.array([tokenizer.eos_id], empty.dtype))
    flags.append(np.array([learned[-1][1] == len(text)]))
    return np.concatenate(ids), np.concatenate(flags)
