"""What each token of the prompt contributes to the answer.

The methods are captum's. It perturbs and differentiates numbers, which token ids are not: `of_embeddings` hands it the
model as a function of its embeddings.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from insight.patching import Score, last_logits
from model import GPT
from model.hooks import Site, editing


class CaptumMissingError(ValueError):
    """Says what to install."""


def methods():
    """captum.attr, which is imported when it is needed."""
    try:
        import captum.attr
    except ImportError:
        raise CaptumMissingError("attribution needs captum: pip install -c requirements.lock captum") from None
    return captum.attr


def of_embeddings(model: GPT, score: Score) -> Callable[[Tensor], Tensor]:
    """embeddings (b s d_model) as `embed` gives them -> the score behind each row, (b,)."""

    def forward(embeddings: Tensor) -> Tensor:
        tokens = torch.zeros(embeddings.shape[:2], dtype=torch.long, device=embeddings.device)  # not looked at
        with editing(model, {Site("embedding"): lambda _: embeddings}):
            return score(last_logits(model, tokens))

    return forward


@torch.no_grad()
def embed(model: GPT, tokens: Tensor) -> Tensor:
    """tokens (...) -> what they are looked up as (... d_model), behind the embedding's norm and before positions.

    In front of that norm there is no gradient along an embedding, for its length does not count there.
    """
    x = model.embedding(tokens)
    return x if model.embedding_norm is None else model.embedding_norm(x)


def mean_embedding(model: GPT) -> Tensor:
    """(d_model,): the average token, which stands in for one that is taken away."""
    return embed(model, torch.arange(model.vocab_size, device=model.embedding.weight.device)).mean(0)


def occlusion(model: GPT, tokens: Tensor, score: Score, baseline: Tensor, batch: int = 64) -> Tensor:
    """What the score loses when each token in turn is replaced by `baseline` (d_model,): (s,), in nats.

    tokens (1 s). "Visualizing and Understanding Convolutional Networks" (2013), with tokens for patches.
    """
    embeddings = embed(model, tokens)
    effects = (
        methods()
        .Occlusion(of_embeddings(model, score))
        .attribute(
            embeddings,
            sliding_window_shapes=(1, embeddings.shape[-1]),
            baselines=baseline.expand_as(embeddings),
            perturbations_per_eval=batch,
        )
    )
    return effects[0, :, 0]  # the same in all dimensions, which go together


def gradient_x_input(model: GPT, tokens: Tensor, score: Score) -> Tensor:
    """The score's gradient by each embedding times that embedding: (s,), in nats.

    What a token would contribute if the model were linear and zero the embedding of nothing ("Not Just a Black Box",
    2016). tokens (1 s).
    """
    embeddings = embed(model, tokens).requires_grad_()
    return methods().InputXGradient(of_embeddings(model, score)).attribute(embeddings)[0].sum(-1).detach()


class Integrated(NamedTuple):
    attributions: Tensor  # (s,), in nats
    difference: float  # between the scores of the prompt and the baseline, which they should add up to
    error: float  # by how much they do not
    complete: bool  # whether that is little
    steps: int


def integrated_gradients(
    model: GPT,
    tokens: Tensor,
    score: Score,
    baseline: Tensor,
    *,
    steps: int = 32,
    max_steps: int = 1024,
    tolerance: float = 0.01,
    batch: int = 64,
) -> Integrated:
    """Gradients on the straight way from a baseline to the prompt, times that way: each token's share of the score.

    "Axiomatic Attribution for Deep Networks" (2017). Its completeness (the shares add up to what the score gains on the
    way) holds for the integral, and so shows whether the sum stands for it: steps are doubled until the error is within
    `tolerance` of the difference, or there are max_steps. Near a baseline of zero an RMSNorm turns very fast, and no
    number of steps may do. tokens (1 s); baseline broadcasts to (1 s d_model).
    """
    forward, embeddings = of_embeddings(model, score), embed(model, tokens)
    start = baseline.expand_as(embeddings)
    with torch.no_grad():
        difference = (forward(embeddings) - forward(start)).item()
    method, steps = methods().IntegratedGradients(forward), min(steps, max_steps)
    while True:
        shares = method.attribute(embeddings, baselines=start, n_steps=steps, internal_batch_size=batch)
        error = shares.sum().item() - difference
        complete = abs(error) <= tolerance * abs(difference)
        if complete or 2 * steps > max_steps:
            return Integrated(shares[0].sum(-1).detach(), difference, error, complete, steps)
        steps *= 2
