"""The mathematics, written as in the papers.

Every faster implementation is tested against these functions. Axes are named by the einops patterns and einsum
strings: `b` batch, `s` sequence, `q` and `k` query and key slots, `h` heads, `d` head width, `v` value width.
Masks are boolean: True at (q, k) lets query q attend to key k.
"""

import math

import torch
from einops import rearrange
from torch import Tensor

IGNORE = -100  # targets with this id do not count


def _wide(x: Tensor) -> Tensor:
    """x in float32, in which long sums and exponentials are accurate enough; float64 stays float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) along `dim`, with the maximum subtracted first so that no exponent is above 0.

    The shift does not change the result (numerator and denominator share the factor exp(-max)), but keeps exp from
    overflowing, which in float32 it does from 89 on. A row of -inf only (a query that may attend to nothing) gives
    zeros, not NaN, and no gradient. Computed in float32, returned in the dtype of x.
    """
    wide = _wide(x)
    top = wide.detach().amax(dim, keepdim=True)
    exp = (wide - top.masked_fill(top == -math.inf, 0.0)).exp()
    total = exp.sum(dim, keepdim=True)
    return (exp / total.masked_fill(total == 0, 1.0)).to(x.dtype)


def scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = False,
    *,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(d)) v of "Attention Is All You Need" (2017), equation 1.

    q (... q d), k (... k d), v (... k v), with any leading axes. The boolean mask broadcasts to (... q k), True = may
    attend; if q has a head axis, so must the mask. Dropout applies to the weights, after the softmax and in training
    only. `bias` (... q k) is added to the scores, as in ALiBi; before that, `soft_cap` c maps them to
    c tanh(scores / c) ("Gemma 2", 2024). Returns the output (... q v) and the weights (... q k) before dropout, in the
    dtype of q.
    """
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"queries and keys must have the same width, got {q.shape[-1]} and {k.shape[-1]}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"there must be as many keys as values, got {k.shape[-2]} and {v.shape[-2]}")
    scores = torch.einsum("... q d, ... k d -> ... q k", q, k) / math.sqrt(q.shape[-1])
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + _expand("bias", bias, "scores", scores)
    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"the mask must be boolean, True = may attend, got {mask.dtype}")
        scores = scores.masked_fill(~_expand("mask", mask, "scores", scores), -math.inf)
    weights = softmax(scores).to(q.dtype)
    dropped = torch.nn.functional.dropout(weights, dropout_p, training)
    return torch.einsum("... q k, ... k v -> ... q v", dropped, v), weights


def _expand(name: str, x: Tensor, of: str, target: Tensor) -> Tensor:
    try:
        return x.expand_as(target)
    except RuntimeError as error:
        raise ValueError(
            f"the {name} must broadcast to the {of}, got {tuple(x.shape)} and {tuple(target.shape)}"
        ) from error


# --- masks: combine with `&`, broadcast to (b, h, q, k) -------------------------------------------------------------


def attention_mask(
    queries: int | Tensor,
    T_k: int,
    *,
    window: int | None = None,
    padding: Tensor | None = None,
    documents: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """The mask, broadcasting to (b h q k): one function for training, prompts, chunks and single tokens.

    `queries` holds the slots (b q) or (1 q) of the queries among the T_k slots of the keys; or just their number, if
    they are the newest (without a cache: all T_k). Causality follows the order of slots; `window`, `padding` (b k) and
    `documents` (b k) mask more.
    """
    mask = causal_mask(queries, T_k, device)
    if window is not None:
        mask = mask & window_mask(queries, T_k, window, device)
    if padding is not None:
        mask = mask & padding_mask(padding)
    if documents is not None:
        mask = mask & document_mask(documents, queries)
    return mask


def _distance(queries: int | Tensor, T_k: int, device: torch.device | None) -> Tensor:
    """The distance in slots from each query back to each key: (q k), or (b 1 q k) if rows differ."""
    if isinstance(queries, Tensor):
        slots, device = rearrange(queries, "b q -> b 1 q 1"), queries.device
    else:
        slots = torch.arange(T_k - queries, T_k, device=device).unsqueeze(-1)
    return slots - torch.arange(T_k, device=device)


def causal_mask(queries: int | Tensor, T_k: int, device: torch.device | None = None) -> Tensor:
    """A query attends to itself and to what is before it; the last query to every key (bottom-right aligned)."""
    return _distance(queries, T_k, device) >= 0


def window_mask(queries: int | Tensor, T_k: int, window: int, device: torch.device | None = None) -> Tensor:
    """A query attends to itself and to at most window - 1 slots before it ("Longformer", 2020)."""
    return _distance(queries, T_k, device) < window


def padding_mask(padding: Tensor) -> Tensor:
    """(b k), True at real tokens -> (b 1 1 k): no query attends to padding."""
    return rearrange(padding, "b k -> b 1 1 k")


def document_mask(documents: Tensor, queries: int | Tensor) -> Tensor:
    """(b k) document numbers -> (b 1 q k): a token attends to its own document only."""
    if isinstance(queries, Tensor):
        own = documents.gather(1, queries.expand(len(documents), -1))
    else:
        own = documents[:, documents.shape[1] - queries :]
    return rearrange(own, "b q -> b 1 q 1") == rearrange(documents, "b k -> b 1 1 k")


# --- the rest of the block ------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """x / rms(x) * weight over the last axis ("Root Mean Square Layer Normalization", 2019).

    Computed in float32, returned in the dtype of x.
    """
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * _wide(weight)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """(x - mean(x)) / std(x) * weight + bias over the last axis ("Layer Normalization", 2016).

    Computed in float32, returned in the dtype of x.
    """
    wide = _wide(x)
    centred = wide - wide.mean(-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (scaled * _wide(weight) + _wide(bias)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairing: str = "half") -> Tensor:
    """Rotates each pair of dimensions of x (... d) by the angles with these cos and sin (... d/2) ("RoFormer", 2021).

    `pairing` says which dimensions form a pair: "half" takes i with i + d/2, "interleaved" 2i with 2i + 1.
    Computed in the table's precision and cast back to that of x.
    """
    split, join = {
        "half": ("... (two i) -> two ... i", "two ... i -> ... (two i)"),
        "interleaved": ("... (i two) -> two ... i", "two ... i -> ... (i two)"),
    }[pairing]
    a, b = rearrange(x, split, two=2)
    cos, sin = _expand("cosines", cos, "pairs", a), _expand("sines", sin, "pairs", a)
    return rearrange(torch.stack([a * cos - b * sin, a * sin + b * cos]), join).to(x.dtype)


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed negative log-likelihood, in nats, of targets (...) under logits (... vocab), and their number.

    Targets equal to IGNORE do not count. Computed in float32. A sum, not a mean, so that the parts of a batch add up
    to the batch, however it is split.
    """
    loss = torch.nn.functional.cross_entropy(
        _wide(logits).flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return loss, (targets != IGNORE).sum()
