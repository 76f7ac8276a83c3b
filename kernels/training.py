"""Training on a CPU in float32: faster versions of model/functional.py, in training.cpp.

Attention skips masked scores, elementwise work between matrix products is one pass over memory, and the number of
threads changes no bit of a result. `with_kernels` puts these functions into a model's table. Each handles what it
covers and passes the rest on to the function that it replaces: few rows, masks, biases, soft caps, dropout in
attention, other dtypes and devices, autocast, torch.compile.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

IGNORE = -100  # targets with this id do not count, as in torch
CHUNK = 2**21  # logits held at once; at least those of MIN_ROWS rows
MIN_ROWS = 128
MANY_ROWS = 64  # with fewer rows, the call of a kernel takes longer than its work


def with_kernels(ops):
    """The table `ops` (model/ops.py) with kernels for what they cover. The kernels must be loaded."""
    ours = {f.__name__: f for f in (attention, rms_norm, rotate, gated_linear, dropout, head_loss)}
    return replace(ops, **{name: partial(f, otherwise=getattr(ops, name)) for name, f in ours.items()})


def covers(*tensors: Tensor) -> bool:
    """Whether the kernels support these tensors, of which the first must have many rows; never depends on values."""
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
    """Causal attention without extras: softmax(q k^T / sqrt(d)) v for q (b h s d), k and v (b g s d).

    The result (b h s d) is stored as (b s h d), so that joining the heads moves no data. The square of weights is never
    held: "FlashAttention" (2022).
    """
    plain = mask is None and bias is None and soft_cap is None and dropout_p == 0
    if not plain or q.shape[2] != k.shape[2] or not covers(q, k, v):
        return otherwise(q, k, v, mask, bias, soft_cap, dropout_p)
    return _Attention.apply(q, k, v), None


class _Norm(Function):
    """rms_norm of x (... d) with a weight (d). Heads (b h s d) are stored as (b s h d), before and after."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = (x.transpose(1, 2) if x.ndim == 4 else x).contiguous()
        ctx.save_for_backward(rows, weight)
        ctx.eps = eps
        return _laid_out(torch.ops.inkling.norm_turn(_rows(rows), weight, eps, None, None, False), rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        rows, weight = ctx.saved_tensors
        dy = (dy.transpose(1, 2) if dy.ndim == 4 else dy).contiguous()
        dx, dweight = torch.ops.inkling.norm_turn_backward(_rows(dy), _rows(rows), weight, ctx.eps, None, None, False)
        return _laid_out(dx, rows), dweight[0], None


class _Rotate(Function):
    """Rotates heads (b h s d), stored as (b s h d), by cos and sin (n i), n = s or b s."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        rows = x.transpose(1, 2).contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _laid_out(torch.ops.inkling.norm_turn(_rows(rows), None, 0.0, cos, sin, interleaved), rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        rows = dy.transpose(1, 2).contiguous()
        turns = (None, 0.0, *ctx.saved_tensors, ctx.interleaved)
        dx, _ = torch.ops.inkling.norm_turn_backward(_rows(rows), _rows(rows), *turns)
        return _laid_out(dx, rows), None, None, None


def _rows(x: Tensor) -> Tensor:
    """(b s h d) -> (b s, h, d), and (... d) -> (..., 1, d)."""
    return x.view(-1, x.shape[-2] if x.ndim == 4 else 1, x.shape[-1])


def _laid_out(y: Tensor, like: Tensor) -> Tensor:
    """Rows y in the shape of `like`; heads (b s h d) become (b h s d) again."""
    y = y.view(like.shape)
    return y.transpose(1, 2) if y.ndim == 4 else y


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, otherwise: Callable) -> Tensor:
    """x / rms(x) * weight over the last axis."""
    return _Norm.apply(x, weight, eps) if covers(x, weight) else otherwise(x, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairing: str = "half", *, otherwise: Callable) -> Tensor:
    """Rotates each pair of dimensions of heads x (b h s d) by the angles of cos and sin (s i), or (b 1 s i)."""
    if x.ndim != 4 or cos.shape not in ((x.shape[2], x.shape[3] // 2), (x.shape[0], 1, x.shape[2], x.shape[3] // 2)):
        return otherwise(x, cos, sin, pairing)
    if not covers(x, cos, sin):
        return otherwise(x, cos, sin, pairing)
    cos, sin = (table.contiguous().view(-1, table.shape[-1]) for table in (cos, sin))
    return _Rotate.apply(x, cos, sin, pairing == "interleaved")


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
        torch.ops.inkling.silu_times_backward(dgate, gate, up, dgate, dup)  # reuses the memory of its inputs
        return dgate, dup, dweight


def gated_linear(gate: Tensor, up: Tensor, down: nn.Module, *, otherwise: Callable) -> Tensor:
    """down(silu(gate) * up), if `down` is a plain nn.Linear without bias and hooks.

    silu(gate) * up is not kept for the backward pass, which computes it again.
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
    """Zeroes each element of x with probability p and scales the others by 1 / (1 - p).

    torch's generator draws one seed; the backward pass recomputes the mask from it, so none is kept.
    """
    if not (0 < p < 1 and covers(x)):
        return otherwise(x, p)
    return _Dropout.apply(x, p, torch.randint(2**63 - 1, ()).item())


class _HeadLoss(Function):
    """Computes logits and gradients of one chunk of rows after the other; the backward pass only scales the gradients.

    As in "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024). `logits` is any function of rows and
    parameters.
    """

    @staticmethod
    def forward(ctx, logits: Callable, chunks: list, shape: torch.Size, x: Tensor, *parameters: Tensor) -> Tensor:
        loss, dxs, sums = x.new_zeros(()), [], [None] * len(parameters)
        for rows, targets in chunks:
            with torch.enable_grad():
                rows = rows.detach().requires_grad_()
                y = logits(rows)
            losses, slopes = _cross_entropy(y.detach(), targets, slopes=True)
            loss += losses.sum()
            dx, *changes = torch.autograd.grad(y, [rows, *parameters], slopes.view_as(y), allow_unused=True)
            dxs.append(torch.zeros_like(rows) if dx is None else dx)  # None: the logits do not depend on x
            sums = [new if old is None else old + new for old, new in zip(sums, changes, strict=True)]
        ctx.save_for_backward((dxs[0] if len(dxs) == 1 else torch.cat(dxs)).view(shape), *sums)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, change: Tensor):
        return None, None, None, *(None if slope is None else slope * change for slope in ctx.saved_tensors)


def _cross_entropy(logits: Tensor, targets: Tensor, slopes: bool = False) -> tuple[Tensor, Tensor]:
    """The loss of each row of logits (... vocab) and, with `slopes`, the gradient of their sum."""
    rows = logits.reshape(-1, logits.shape[-1]).contiguous()
    return torch.ops.inkling.cross_entropy(rows, targets.flatten(), IGNORE, slopes)


def head_loss(
    logits: Callable, x: Tensor, targets: Tensor, parameters: Iterable[Tensor], *, otherwise: Callable
) -> tuple[Tensor, Tensor]:
    """The summed loss of logits(x) for targets (...) that are not IGNORE, and their number.

    The logits never exist all at once: they are computed for one chunk of rows of x (... d_model) at a time.
    """
    if not covers(x):
        return otherwise(logits, x, targets, parameters)
    with torch.no_grad():
        none = logits(x[:0])
    if type(none) is not Tensor or none.dtype != torch.float32:
        return otherwise(logits, x, targets, parameters)
    n, chunks = max(MIN_ROWS, CHUNK // none.shape[-1]), [(x, targets)]
    if n < targets.numel():
        chunks = list(zip(x.reshape(-1, x.shape[-1]).split(n), targets.flatten().split(n), strict=True))
    learned = [p for p in parameters if p.requires_grad]
    if torch.is_grad_enabled() and (x.requires_grad or learned):
        loss = _HeadLoss.apply(logits, chunks, x.shape, x, *learned)
    else:
        loss = torch.stack([_cross_entropy(logits(rows), of_rows)[0].sum() for rows, of_rows in chunks]).sum()
    return loss, (targets != IGNORE).sum()
