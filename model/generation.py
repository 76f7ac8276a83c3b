"""Writing: one column of tokens after the other, each from the logits of the last."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from model.functional import softmax
from model.gpt import GPT

RANDOM_BLOCK = 256  # random numbers drawn at once for a row


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """logits (b vocab) with all but the k largest of each row at -inf; ties with the k-th stay."""
    kth = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < kth, -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """logits (b vocab) with only the smallest set of most likely tokens whose probabilities reach p; never empty.

    Nucleus sampling, "The Curious Case of Neural Text Degeneration" (2019).
    """
    ordered, order = logits.sort(descending=True, stable=True)
    probabilities = softmax(ordered)
    before = probabilities.cumsum(-1) - probabilities  # what stands ahead of each token
    drop = (before >= p).scatter(-1, order, before >= p)
    drop.scatter_(-1, order[:, :1], False)
    return logits.masked_fill(drop, -math.inf)


def sample(
    logits: Tensor, uniform: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
):
    """logits (b vocab) and one uniform number in [0, 1) a row -> tokens (b,).

    Temperature first (0 takes the most likely token), then top_k, then top_p, then the inverse of the cumulative
    distribution: a row depends on its own logits and its own number only.
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    cumulative = softmax(logits).double().cumsum(-1)
    # the first token whose cumulative probability exceeds the number; one of probability 0 never is the first
    return torch.searchsorted(cumulative, uniform.double()[:, None] * cumulative[:, -1:], right=True)[:, 0]


def uniform_numbers(seeds: list[int]) -> Iterator[Tensor]:
    """Columns (b,) of numbers in [0, 1); row i depends on seeds[i] alone. Drawn in blocks, on the CPU."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    while True:
        block = torch.stack([torch.rand(RANDOM_BLOCK, generator=generator) for generator in generators], dim=1)
        yield from block


def generate(
    model: GPT,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seeds: list[int] | None = None,
    overflow: str = "error",
) -> Iterator[Tensor]:
    """Continues prompt (b, s), s > 0: yields max_new_tokens columns (b,) of tokens, each as soon as it is drawn.

    Args:
        temperature, top_k, top_p: see `sample`.
        seeds: one a row; None: 0, 1, 2, ... The same seed and prompt give the same row, whatever its neighbours.
        overflow: when the text outgrows max_seq_len, "error" refuses before any work; "slide" encodes the last
            max_seq_len // 2 tokens again from position 0 and goes on. (Cached keys cannot slide themselves: from the
            second layer on they know of the tokens that were dropped.)
    """
    b, s = prompt.shape
    seeds = list(range(b)) if seeds is None else seeds
    if s == 0:
        raise ValueError("the prompt must hold at least one token, got 0: start from a beginning or end-of-text token")
    if not temperature >= 0:
        raise ValueError(f"temperature must be 0 or more, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be 1 or more, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
    if len(seeds) != b:
        raise ValueError(f"there must be one seed a row, got {len(seeds)} seeds and {b} rows")
    if overflow not in ("error", "slide"):
        raise ValueError(f"overflow must be error or slide, got {overflow}")
    # the last token drawn is never read again, hence the -1
    if overflow == "error" and s + max_new_tokens - 1 > model.max_seq_len:
        raise ValueError(
            f"{s} prompt tokens and {max_new_tokens} new ones are more than max_seq_len {model.max_seq_len} reads"
        )
    return _generate(model, prompt, max_new_tokens, temperature, top_k, top_p, seeds)


def _generate(model, prompt, max_new_tokens, temperature, top_k, top_p, seeds) -> Iterator[Tensor]:
    window = model.max_seq_len
    text = unread = prompt
    cache = model.new_cache(min(window, prompt.shape[1] + max_new_tokens))
    numbers = uniform_numbers(seeds)
    for _ in range(max_new_tokens):
        if cache.length + unread.shape[1] > window:  # full: encode the last half again, from position 0
            cache = model.new_cache(window)
            unread = text[:, -max(1, window // 2) :]
        with torch.inference_mode():
            logits = model(unread, cache=cache)[:, -1]
            unread = sample(logits, next(numbers).to(logits.device), temperature, top_k, top_p)[:, None]
        text = torch.cat([text, unread], dim=1)
        yield unread[:, 0]
