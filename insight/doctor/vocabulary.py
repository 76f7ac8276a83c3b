"""Checks that tokenizer, text and model use the same ids."""

from collections.abc import Iterator

import torch

from insight.doctor.patient import SAME, Finding, NotChecked, Patient, deviation
from model import generate


def vocabulary(patient: Patient) -> Iterator[Finding]:
    """Tokenizer, embedding, head and text have the same vocabulary."""
    model, tokenizer = patient.model, patient.tokenizer
    if tokenizer is not None and tokenizer.vocab_size != model.vocab_size:
        what = f"the tokenizer has {tokenizer.vocab_size:,} tokens, the model {model.vocab_size:,}"
        do = "vocab_size is the tokenizer's: use the tokenizer of the model's training, or build a new model"
        yield Finding("vocabulary", "embedding and head", what, do, tokenizer.vocab_size, model.vocab_size)
    for name in ("embedding", "head"):
        if (rows := len(getattr(model, name).weight)) < model.vocab_size:
            what = f"{name} has {rows:,} rows for {model.vocab_size:,} tokens"
            yield Finding("vocabulary", name, what, "build the model again", rows, model.vocab_size)
    for name, ids in (("tokens", patient.tokens), ("targets", patient.targets)):
        low, high = ids[ids != -100].min().item(), ids.max().item()
        if low < 0 or high >= model.vocab_size:
            worst = low if low < 0 else high
            what = f"the text holds the id {worst}, outside the model's 0 .. {model.vocab_size - 1}"
            yield Finding(
                "vocabulary", name, what, "encode the text with the model's tokenizer", worst, model.vocab_size
            )


def padded_ids(patient: Patient) -> Iterator[Finding]:
    """Padding rows of the vocabulary give no logit and are never generated, whatever they contain."""
    model = patient.probe
    extra = len(model.head.weight) - model.vocab_size
    with torch.no_grad():
        logits = model(patient.random_tokens(2))
        if logits.shape[-1] == model.vocab_size and extra > 0:
            rows = model.head.weight[model.vocab_size :]
            kept = rows.clone()
            rows.mul_(1e3)
            if (value := deviation(model(patient.random_tokens(2)), logits)) > SAME:
                what = f"the {extra} padding rows of the vocabulary change the logits"
                yield Finding("padded ids", "head", what, "cut the logits at vocab_size", value, SAME)
            rows.copy_(kept)
    if logits.shape[-1] != model.vocab_size:
        what = f"there are {logits.shape[-1]:,} logits for {model.vocab_size:,} tokens"
        do = "cut the head's output at vocab_size, in every path"
        yield Finding("padded ids", "head", what, do, logits.shape[-1], model.vocab_size)
    prompts = patient.random_tokens(4, length=1)
    tokens = torch.stack(list(generate(model, prompts, max(1, patient.length), temperature=10.0, overflow="slide")))
    if (value := tokens.max().item()) >= model.vocab_size:
        what = f"the id {value} is generated, which the tokenizer does not have"
        yield Finding("padded ids", "generate", what, "cut the logits at vocab_size", value, model.vocab_size - 1)


def tokenizer(patient: Patient) -> Iterator[Finding]:
    """The tokenizer is that of the model's training, and encodes and decodes the text without loss."""
    ours = patient.tokenizer
    if ours is None:
        raise NotChecked("there is none")
    if patient.fingerprint is not None and patient.fingerprint != ours.fingerprint():
        what = "it is not the tokenizer of the model's training: the same ids mean other text"
        do = "copy the folder tokenizer/ from the run's own checkpoint or corpus"
        yield Finding("tokenizer", "tokenizer", what, do)
    if not 0 <= ours.eos_id < ours.vocab_size:
        what = f"end-of-text is {ours.eos_id}, outside 0 .. {ours.vocab_size - 1}"
        yield Finding("tokenizer", "eos_id", what, "name a special token that it has", ours.eos_id)
    if patient.text is None:
        return
    try:
        ids = ours.encode(patient.text)
    except ValueError as error:
        what = f"it cannot encode the text: {error}"
        yield Finding("tokenizer", "the text", what, "use the tokenizer that was made for this text")
        return
    if len(ids) and int(ids.max()) >= ours.vocab_size:
        what = f"it gives the id {int(ids.max())}, beyond its vocabulary of {ours.vocab_size:,}"
        yield Finding("tokenizer", "the text", what, "prepare it again", int(ids.max()), ours.vocab_size)
    elif ours.lossless and ours.decode(ids.tolist()) != patient.text:
        what = "decode(encode(text)) differs from the text"
        yield Finding("tokenizer", "the text", what, "compare it with the tokenizer in the corpus's folder")
