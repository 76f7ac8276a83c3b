"""What the model would say if it ended after each block: the logit lens (nostalgebraist, 2020)."""

import torch
from torch import Tensor

from model import GPT
from model.hooks import Site, recording


@torch.no_grad()
def logit_lens(model: GPT, tokens: Tensor) -> Tensor:
    """tokens (1 s) -> logits (n_layers + 1, s, vocab): before the first block, and after each.

    What lies in the stream there is read as the head reads it at the end, behind the final norm; the last are the
    model's own. Early layers need not write in the head's language: an unreadable one says nothing about what is there.
    """
    sites = [Site("stream", i) for i in range(len(model.blocks) + 1)]
    with recording(model, sites) as found:
        model(tokens)
    stream = torch.cat([found[site] for site in sites])
    return model.head(model.norm(stream))[..., : model.vocab_size]
