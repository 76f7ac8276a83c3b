"""Training on a CPU in float32, by training.cpp: what model/functional.py says, in less time.

Attention computes only what a query may see, what lies between products is one pass over memory, and threads share all
of it without changing a bit. `with_kernels` puts these functions into a model's table; each does what it covers and
leaves the rest to the function whose place it takes: few rows, masks, biases, soft caps, dropout in attention, other
types and devices, autocast, compiled.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

IGNORE = -100  # a target without a loss, as in torch
CHUNK = 2**21  # logits that exist at once, or those of MIN_ROWS rows where that is more
MIN_ROWS = 128
MANY_ROWS = 64  # with fewer, calling a kernel is what takes the time


def with_kernels(ops):
    """A table of functions as `ops` (model/ops.py), which compute by kernel what they cover. They must be loaded."""
    ours = {f.__name__: f for f in (attention, rms_norm, rotate, gated_linear, dropout, head_loss)}
    return replace(ops, **{name: partial(f, otherwise=getattr(ops, name)) for name, f in ours.items()})


def covers(*tensors: Tensor) -> bool:
    """Whether the kernels can compute with these, the first of which has many rows: by types, never by values."""
    x = tensors[0]
    return (
        x.numel() >= MANY_ROWS * x.shape[-1] > 0
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and all(
            type(tensor) in (Tensor, nn.Parameter) and tensor.dtype == torch.float32 and tensor.device.type == "cpu"
            for tensor in tensors
        )
    )


class _Attention(Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        y, log_sums = torch.ops.inkling.attention(q, k, v)
        y = y.transpose(1, 2)
        ctx.save_for_backward(q, k, v, y, log_sums)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        return tuple(x.transpose(1, 2) for x in torch.ops.inkling.attention_backward(dy, *ctx.saved_tensors))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    soft_cap: float | None,
    dropout_p: float,
    *,
    otherwise: Callable,
) -> tuple[Tensor, Tensor | None]:
    """Where it is plain causal: softmax(q k^T / sqrt(d)) v for q (b h s d), k and v (b g s d).

    The result (b h s d) lies in memory as (b s h d), so that joining its heads moves nothing. No square of weights is
    held: "FlashAttention" (2022).
    """
    plain = mask is None and bias is None and soft_cap is None and dropout_p == 0
    if not plain or q.shape[2] != k.shape[2] or not covers(q, k, v):
        return otherwise(q, k, v, mask, bias, soft_cap, dropout_p)
    return _Attention.apply(q, k, v), None


class _NormRotate(Function):
    """rms_norm of x (b s h d) by a gain (d), and rotation by cos and sin (n i), n = s or b s; either may be None."""

    @staticmethod
    def forward(ctx, x: Tensor, gain: Tensor | None, eps: float, cos, sin, interleaved: bool) -> Tensor:
        rows = x.contiguous().view(-1, *x.shape[-2:])
        ctx.save_for_backward(rows if gain is not None else rows[:0], gain, cos, sin)
        ctx.eps, ctx.interleaved, ctx.shape = eps, interleaved, x.shape
        return torch.ops.inkling.norm_turn(rows, gain, eps, cos, sin, interleaved).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, gain, cos, sin = ctx.saved_tensors
        dy = dy.contiguous().view(-1, *ctx.shape[-2:])
        x = dy if gain is None else x
        dx, dgain = torch.ops.inkling.norm_turn_backward(dy, x, gain, ctx.eps, cos, sin, ctx.interleaved)
        return dx.view(ctx.shape), None if gain is None else dgain[0], None, None, None, None


def rms_norm(x: Tensor, gain: Tensor, eps: float = 1e-6, *, otherwise: Callable) -> Tensor:
    """x / rms(x) * gain over the last axis. Heads (b h s d) lie in memory as (b s h d), before and after."""
    if not covers(x, gain):
        return otherwise(x, gain, eps)
    if x.ndim == 4:
        return _NormRotate.apply(x.transpose(1, 2), gain, eps, None, None, False).transpose(1, 2)
    return _NormRotate.apply(x.unsqueeze(-2), gain, eps, None, None, False).squeeze(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairing: str = "half", *, otherwise: Callable) -> Tensor:
    """Heads x (b h s d), each pair of dimensions turned by angles of cos and sin (s i), or (b 1 s i)."""
    if x.ndim != 4 or cos.shape not in ((x.shape[2], x.shape[3] // 2), (x.shape[0], 1, x.shape[2], x.shape[3] // 2)):
        return otherwise(x, cos, sin, pairing)
    if not covers(x, cos, sin):
        return otherwise(x, cos, sin, pairing)
    cos, sin = (table.contiguous().view(-1, table.shape[-1]) for table in (cos, sin))
    return _NormRotate.apply(x.transpose(1, 2), None, 0.0, cos, sin, pairing == "interleaved").transpose(1, 2)


def _silu_times(gate: Tensor, up: Tensor) -> Tensor:
    y = torch.empty_like(gate)
    torch.ops.inkling.silu_times(gate, up, y)
    return y


class _GatedLinear(Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up, weight)
        return _silu_times(gate, up) @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        gate, up, weight = ctx.saved_tensors
        dy, product = dy.reshape(-1, len(weight)), _silu_times(gate, up)
        dweight = dy.t() @ product.view(-1, gate.shape[-1]) if ctx.needs_input_grad[2] else None
        dgate, dup = (dy @ weight).view(gate.shape), product
        torch.ops.inkling.silu_times_backward(dgate, gate, up, dgate, dup)  # into what is not needed any more
        return dgate, dup, dweight


def gated_linear(gate: Tensor, up: Tensor, down: nn.Module, *, otherwise: Callable) -> Tensor:
    """down(silu(gate) * up), where `down` is nothing but a matrix, and nobody looks into it.

    The product that it meets is not held for the backward pass, which computes it again.
    """
    plain = type(down) is nn.Linear and down.bias is None and not (down._forward_hooks or down._forward_pre_hooks)
    if not plain or down._backward_hooks or down._backward_pre_hooks or not covers(gate, up, down.weight):
        return otherwise(gate, up, down)
    return _GatedLinear.apply(gate, up, down.weight)


class _Dropout(Function):
    @staticmethod
    def forward(ctx, x: Tensor, p: float, seed: int) -> Tensor:
        ctx.p, ctx.seed = p, seed
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        torch.ops.inkling.dropout(x.contiguous(), y, p, seed)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        return _Dropout.apply(dy, ctx.p, ctx.seed), None, None


def dropout(x: Tensor, p: float, *, otherwise: Callable) -> Tensor:
    """x, each number zero with probability p, else times 1 / (1 - p), by one draw of torch's generator.

    The backward pass finds the same numbers again by that draw; no mask is held.
    """
    if not (0 < p < 1 and covers(x)):
        return otherwise(x, p)
    return _Dropout.apply(x, p, torch.randint(2**63 - 1, ()).item())


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor) -> Tensor:
        losses, scales = torch.ops.inkling.cross_entropy(logits, targets, IGNORE)
        ctx.save_for_backward(logits, targets, scales)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, change: Tensor):
        return torch.ops.inkling.cross_entropy_backward(change, *ctx.saved_tensors, IGNORE), None


def head_loss(logits: Callable, x: Tensor, targets: Tensor, *, otherwise: Callable) -> tuple[Tensor, Tensor]:
    """The summed loss of logits(x) for targets (...) that are not IGNORE, and the number of these.

    Many logits never exist all at once: of rows of x (... d_model) a chunk at a time, and in the backward pass again.
    """
    if not covers(x):
        return otherwise(logits, x, targets)
    with torch.no_grad():
        n = max(MIN_ROWS, CHUNK // logits(x[:0]).shape[-1])
    pieces = [(x, targets)]
    if n < targets.numel():
        pieces = list(zip(x.reshape(-1, x.shape[-1]).split(n), targets.flatten().split(n), strict=True))

    def loss(x: Tensor, targets: Tensor) -> Tensor:
        y = logits(x)
        if not covers(y):  # of another type than x
            return otherwise(lambda _: y, x, targets)[0]
        return _CrossEntropy.apply(y.reshape(-1, y.shape[-1]).contiguous(), targets.flatten())

    losses = [checkpoint(loss, *piece, use_reentrant=False) if len(pieces) > 1 else loss(*piece) for piece in pieces]
    return torch.stack(losses).sum(), (targets != IGNORE).sum()
