"""A hand-written model whose mechanism is known: two layers that continue a pattern (an induction head).

After `^ b a c ... b` it predicts a, the token that followed b before ("A Mathematical Framework for Transformer
Circuits", 2021; "In-context Learning and Induction Heads", 2022). The role of each head is known, and so is what a
method must report about it.

| head | attends to | effect |
| --- | --- | --- |
| 0.0 | the token before | copies it to each token |
| 0.1 | the first token | none: its values are zero |
| 1.0 | the token after an earlier occurrence of this token | predicts that token |
| 1.1 | the same tokens as 1.0, as strongly | none: wo drops its values |
"""

import math

import torch
from torch import Tensor

from model import GPT, ModelConfig

SHARPNESS = 20.0  # how much higher the score of the attended key is than all others
CONFIDENCE = 10.0  # how much higher the logit of the answer is than all others

PREVIOUS, SINK, INDUCTION, WATCHER = (0, 0), (0, 1), (1, 0), (1, 1)


@torch.no_grad()
def induction_model(vocab_size: int, max_seq_len: int) -> GPT:
    """A GPT (learned positions, RMSNorm) whose prompts must start with a token that occurs nowhere else.

    The residual stream has four one-hot parts: the token, its position, the token before, and the answer.
    """
    n_heads, width = 2, 3 * vocab_size + max_seq_len
    d_model = n_heads * max(math.ceil(width / n_heads), vocab_size, max_seq_len)
    shape = {"d_model": d_model, "n_layers": 2, "n_heads": n_heads, "d_ff": 1, "max_seq_len": max_seq_len}
    model = GPT(vocab_size, ModelConfig(**shape, positions="learned", feed_forward="relu2")).eval()
    for parameter in model.parameters():
        parameter.zero_()
    token, place, before, answer, _ = torch.arange(d_model).split(
        [vocab_size, max_seq_len, vocab_size, vocab_size, d_model - width]
    )

    model.embedding.weight[:, token] = torch.eye(vocab_size)
    model.position_embedding.table.weight[:, place] = torch.eye(max_seq_len)
    first, second = model.blocks
    for ones, norm in ((2, first.attention_norm), (3, second.attention_norm), (4, model.norm)):
        norm.weight.fill_(math.sqrt(ones / d_model))  # undoes the division by the rms of this many ones

    write(first.attention, 0, q=place, k=place.roll(1), v=token, o=before)  # keys match the next position
    wq, wk = (w.weight.unflatten(0, (n_heads, -1))[1] for w in (first.attention.wq, first.attention.wk))
    wq[0, place], wk[0, place[0]] = sharp(first.attention), 1.0  # from every position to the first
    write(second.attention, 0, q=token, k=before, v=token, o=answer)
    write(second.attention, 1, q=token, k=before, v=token, o=None)
    model.head.weight[:, answer] = CONFIDENCE * torch.eye(vocab_size)
    return model


def sharp(attention) -> float:
    """The value of a query's entry that gives a score of SHARPNESS."""
    return SHARPNESS * math.sqrt(attention.wq.weight.shape[0] / attention.n_heads)


def write(attention, head: int, *, q: Tensor, k: Tensor, v: Tensor, o: Tensor | None):
    """Makes a head match dimensions q of the query with k of the key, and copy v to o (None: nowhere)."""
    wq, wk, wv = (
        w.weight.unflatten(0, (attention.n_heads, -1))[head] for w in (attention.wq, attention.wk, attention.wv)
    )
    wq[torch.arange(len(q)), q] = sharp(attention)
    wk[torch.arange(len(k)), k] = 1.0
    wv[torch.arange(len(v)), v] = 1.0
    if o is not None:
        wo = attention.wo.weight.unflatten(1, (attention.n_heads, -1))[:, head]
        wo[o, torch.arange(len(o))] = 1.0
