"""Tables of the functions that a model computes with; all tables give the same result.

The modules hold the weights and know the order of operations. What can be computed in more than one way, they look up
in `self.ops`; `GPT.use` gives a model another table. kernels/training.py makes a third table, in C++ for a CPU.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from einops import repeat
from torch import Tensor
from torch.nn import functional as F

from model import functional


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, soft_cap: float | None, dropout_p: float
) -> tuple[Tensor, Tensor | None]:
    """torch's fused kernel, which never holds the square of weights and, for the causal mask, skips its upper half.

    It has no soft cap: with one, falls back to math_attention.
    """
    if soft_cap is not None:
        return math_attention(q, k, v, mask, bias, soft_cap, dropout_p)
    if bias is not None:
        may_look = functional.causal_mask(q.shape[2], k.shape[2], q.device) if mask is None else mask
        mask = bias.to(q.dtype).masked_fill(~may_look, -math.inf)
    grouped = q.shape[1] > k.shape[1]
    y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal=mask is None, enable_gqa=grouped)
    return y, None


def math_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, soft_cap: float | None, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """functional.scaled_dot_product_attention, which holds the full square of weights."""
    k, v = (repeat(x, "b g k d -> b (g r) k d", r=q.shape[1] // k.shape[1]) for x in (k, v))
    if mask is None:
        mask = functional.causal_mask(q.shape[2], k.shape[2], q.device)
    return functional.scaled_dot_product_attention(
        q, k, v, mask, dropout_p, training=dropout_p > 0, bias=bias, soft_cap=soft_cap
    )


def gated_linear(gate: Tensor, up: Tensor, down: Callable) -> Tensor:
    """down(silu(gate) * up)."""
    return down(F.silu(gate) * up)


def head_loss(logits: Callable, x: Tensor, targets: Tensor, parameters: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """functional.cross_entropy of logits(x) and targets."""
    return functional.cross_entropy(logits(x), targets)


@dataclass(frozen=True)
class Ops:
    """An implementation of each of these functions.

    attention(q, k, v, mask, bias, soft_cap, dropout_p): q (b h q d), k and v (b g k d) with g key/value heads, each
        shared by h / g query heads -> y (b h q d) and the weights (b h q k) or None. `mask` (b h q k) is True where a
        query may attend, None for the causal mask; `bias` is added to the scores (b h q k).
    rms_norm(x, weight, eps), rotate(x, cos, sin, pairing): see functional.py.
    gated_linear(gate, up, down): down(silu(gate) * up), with a module `down`.
    dropout(x, p): in training.
    head_loss(logits, x, targets, parameters): functional.cross_entropy of logits(x), for a function `logits` of
        (... d_model). Gradients reach x and these parameters only, so they must include all that `logits` uses.
    """

    attention: Callable
    rms_norm: Callable = functional.rms_norm
    rotate: Callable = functional.rotate
    gated_linear: Callable = gated_linear
    dropout: Callable = F.dropout
    head_loss: Callable = head_loss


MATH = Ops(math_attention)
TORCH = replace(MATH, attention=fused_attention)
BACKENDS = {"fused": TORCH, "math": MATH}  # the choices of the setting `attention`
