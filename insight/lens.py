"""The logit lens (nostalgebraist, 2020): the predictions of the model if it ended after each block."""

import torch
from torch import Tensor

from model import GPT
from model.hooks import Site, recording


@torch.no_grad()
def logit_lens(model: GPT, tokens: Tensor) -> Tensor:
    """tokens (1 s) -> logits (n_layers + 1, s, vocab): before the first block, and after each.

    The final norm and the head are applied to the residual stream; the last logits are the model's. Nonsense from an
    early layer does not mean that it holds no information: it need not be in the form that the head reads.
    """
    sites = [Site("stream", i) for i in range(len(model.blocks) + 1)]
    with recording(model, sites) as found:
        model(tokens)
    stream = torch.cat([found[site] for site in sites])
    return model.head(model.norm(stream))[..., : model.vocab_size]
