"""Renders conversations as text by a template, and marks the answers: only these are trained on."""

from collections.abc import Callable

import numpy as np

from data.tokenizer import Tokenizer

ANSWERS = "assistant"  # the role whose turns are trained on

Turns = list[tuple[str, str]]  # of (role, content)
Spans = tuple[tuple[int, int], ...]  # of characters: (start, end), end excluded


def turns(messages, template: dict[str, str], where: str, text: Callable[[object, str], str]) -> Turns:
    """Returns the turns of a list of messages, each a dict with role and content; `text` checks each content.

    Raises a ValueError that starts with `where` for anything else.
    """
    if not isinstance(messages, list):
        raise ValueError(
            f"{where} must have a list of messages, got {type(messages).__name__}: set data.messages_column"
        )
    found = []
    for i, message in enumerate(messages, 1):
        place = f"{where}, message {i}"
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            there = ", ".join(message) if isinstance(message, dict) else type(message).__name__
            raise ValueError(f"{place} must have role and content, got {there or 'nothing'}")
        role, content = message["role"], message["content"]
        if not isinstance(role, str) or role not in template:
            known = ", ".join(template)
            raise ValueError(f"{place} has the role {role!r}, data.template has only {known}: add it there")
        if not isinstance(content, str):
            raise ValueError(f"{place}: content must be a string, got {type(content).__name__}")
        found.append((role, text(content, place)))
    return found


def render(conversation: Turns, template: dict[str, str]) -> tuple[str, Spans]:
    """Returns the text of a conversation, and the spans to train on: each answer with the end of its turn.

    The space before an answer belongs to its span, so that a prompt needs no trailing space. Returns ("", ()) if no
    answer has any text.
    """
    text, answers = "", []
    for role, content in conversation:
        before, after = template[role].split("{}")
        start = len(text) + len(before.rstrip(" "))
        text += before + content + after
        if role == ANSWERS and content.strip():
            answers.append((start, len(text)))
    return (text, tuple(answers)) if answers else ("", ())


def encode(text: str, answers: Spans, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Returns a conversation's ids and, for each id, whether it is trained on.

    Each span is tokenised separately, as a generated answer would follow its prompt. End-of-text is appended, even if
    this tokenizer's documents have only a start token; after an answer it is trained on.
    """
    empty = tokenizer.documents([""])  # the start token, if any, and mostly the end token
    begin = empty[empty != tokenizer.eos_id]
    ids, flags, at = [begin], [np.zeros(len(begin), bool)], 0
    for start, end in (*answers, (len(text), len(text))):
        for piece, flag in ((text[at:start], False), (text[start:end], True)):
            if piece:
                ids.append(tokenizer.encode(piece))
                flags.append(np.full(len(ids[-1]), flag))
        at = end
    ids.append(np.array([tokenizer.eos_id], empty.dtype))
    flags.append(np.array([answers[-1][1] == len(text)]))
    return np.concatenate(ids), np.concatenate(flags)
