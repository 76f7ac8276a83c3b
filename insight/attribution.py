"""The contribution of each token of the prompt to the answer.

The methods are captum's, which perturbs and differentiates continuous inputs; token ids are not. `of_embeddings` turns
the model into a function of its embeddings.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from insight.patching import Score, last_logits
from model import GPT
from model.hooks import Site, editing


class CaptumMissingError(ValueError):
    """captum is not installed; the message says how to install it."""


def methods():
    """captum.attr, imported on first use."""
    try:
        import captum.attr
    except ImportError:
        raise CaptumMissingError("attribution needs captum: pip install -c requirements.lock captum") from None
    return captum.attr


def of_embeddings(model: GPT, score: Score) -> Callable[[Tensor], Tensor]:
    """A function of embeddings (b s d_model), as returned by `embed` -> the score after each row, (b,)."""

    def forward(embeddings: Tensor) -> Tensor:
        tokens = torch.zeros(embeddings.shape[:2], dtype=torch.long, device=embeddings.device)  # replaced below
        with editing(model, {Site("embedding"): lambda _: embeddings}):
            return score(last_logits(model, tokens))

    return forward


@torch.no_grad()
def embed(model: GPT, tokens: Tensor) -> Tensor:
    """tokens (...) -> their embeddings (... d_model), after the embedding's norm and before positions are added.

    Before that norm, the length of an embedding has no effect, and so no gradient.
    """
    x = model.embedding(tokens)
    return x if model.embedding_norm is None else model.embedding_norm(x)


def mean_embedding(model: GPT) -> Tensor:
    """(d_model,): the average embedding, which replaces that of a removed token."""
    return embed(model, torch.arange(model.vocab_size, device=model.embedding.weight.device)).mean(0)


def occlusion(model: GPT, tokens: Tensor, score: Score, baseline: Tensor, batch: int = 64) -> Tensor:
    """The decrease of the score if each token in turn is replaced by `baseline` (d_model,): (s,), in nats.

    tokens (1 s). "Visualizing and Understanding Convolutional Networks" (2013), with tokens instead of patches.
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
    return effects[0, :, 0]  # the same in all dimensions of a token


def gradient_x_input(model: GPT, tokens: Tensor, score: Score) -> Tensor:
    """The gradient of the score with respect to each embedding, times that embedding: (s,), in nats.

    The contribution of each token if the model were linear ("Not Just a Black Box", 2016). tokens (1 s).
    """
    embeddings = embed(model, tokens).requires_grad_()
    return methods().InputXGradient(of_embeddings(model, score)).attribute(embeddings)[0].sum(-1).detach()


class Integrated(NamedTuple):
    attributions: Tensor  # (s,), in nats
    difference: float  # of the scores of prompt and baseline: the sum that attributions should have
    error: float  # the sum of the attributions minus that difference
    complete: bool  # whether the error is within the tolerance
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
    """The mean gradient on the straight line from a baseline to the prompt, times that line: attributions by token.

    "Axiomatic Attribution for Deep Networks" (2017). The integral is complete: attributions add up to the difference of
    the scores. Steps are doubled until the error of the sum is within `tolerance` of that difference, up to max_steps.
    Near a baseline of zero an RMSNorm changes so fast that no number of steps may suffice. tokens (1 s); baseline
    broadcasts to (1 s d_model).
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
