"""The mathematics, written out as the papers have it.

Every faster path in this package is tested against these functions. Axes are named by the einops patterns and einsum
strings: `b` batch, `s` sequence, `q` and `k` query and key slots, `h` heads, `d` head width, `v` value width.
Boolean masks say who may look: True at (q, k) lets query q see key k.
"""

import math

import torch
from einops import rearrange
from torch import Tensor

IGNORE = -100  # a target with this id is not predicted and not counted


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) along `dim`, with the maximum subtracted first so that no exponent is above 0.

    The shift changes nothing (numerator and denominator share the factor exp(-max)) but keeps exp from overflowing,
    which it would from 89 in float32. A row of -inf only (a query that may look nowhere) gives zeros, not NaN.
    """
    top = x.detach().amax(dim, keepdim=True)
    exp = (x - top.masked_fill(top == -math.inf, 0.0)).exp()
    total = exp.sum(dim, keepdim=True)
    return exp / total.masked_fill(total == 0, 1.0)


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0, training: bool = False
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(d)) v of "Attention Is All You Need" (2017), equation 1.

    q (... q d), k (... k d), v (... k v); mask broadcasts to (... q k), True = may look. Dropout falls on the weights,
    after the softmax and only in training. Returns the output (... q v) and the weights (... q k).
    """
    scores = torch.einsum("... q d, ... k d -> ... q k", q, k) / math.sqrt(q.shape[-1])
    if mask is not None:
        try:
            scores = scores.masked_fill(~mask, -math.inf)
        except RuntimeError as error:
            raise ValueError(
                f"the mask must broadcast to the scores, got {tuple(mask.shape)} and {tuple(scores.shape)}"
            ) from error
    weights = softmax(scores)
    dropped = torch.nn.functional.dropout(weights, dropout_p, training)
    return torch.einsum("... q k, ... k v -> ... q v", dropped, v), weights


# --- masks: combine with `&`, broadcast to (b, h, q, k) -------------------------------------------------------------


def causal_mask(T_q: int, T_k: int, device=None) -> Tensor:
    """(q k): the last query sees every key, each earlier query one key less.

    Aligned to the bottom right, because with a cache the T_q queries are the newest of the T_k slots.
    """
    return torch.ones(T_q, T_k, dtype=torch.bool, device=device).tril(T_k - T_q)


def padding_mask(padding: Tensor) -> Tensor:
    """(b k), True at real tokens -> (b 1 1 k): nobody looks at padding."""
    return rearrange(padding, "b k -> b 1 1 k")


def document_mask(documents: Tensor) -> Tensor:
    """(b s) document numbers -> (b 1 q k): a token sees its own document only."""
    return rearrange(documents, "b q -> b 1 q 1") == rearrange(documents, "b k -> b 1 1 k")


# --- the rest of the block ------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, gain: Tensor, eps: float = 1e-6) -> Tensor:
    """x / rms(x) * gain over the last axis ("Root Mean Square Layer Normalization", 2019); computed in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain.float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairing: str = "half") -> Tensor:
    """Turns each pair of dimensions of x (... d) by the angle whose cos and sin (... d/2) are given ("RoFormer", 2021).

    `pairing` says which dimensions form a pair: "half" takes i with i + d/2, "interleaved" 2i with 2i + 1.
    Computed in the table's precision and cast back to that of x.
    """
    split, join = {
        "half": ("... (two i) -> two ... i", "two ... i -> ... (two i)"),
        "interleaved": ("... (i two) -> two ... i", "two ... i -> ... (i two)"),
    }[pairing]
    a, b = rearrange(x, split, two=2)
    return rearrange(torch.stack([a * cos - b * sin, a * sin + b * cos]), join).to(x.dtype)


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed negative log-likelihood in nats of targets (...) under logits (... vocab), and how many were counted.

    Targets equal to IGNORE are left out of both. Float32 inside. A sum rather than a mean, so that pieces of a batch
    add up to the whole, however it was cut.
    """
    loss = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return loss, (targets != IGNORE).sum()
