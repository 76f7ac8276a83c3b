"""Training on a CPU in float32, by kernels of our own (kernels.cpp): what functional.py says, in less time.

Attention computes only what a query may see, what lies between products is one pass over memory, logits never exist
whole, and threads share all of it without changing a bit. First the operations, each with its gradient, then the
modules that call them; `use_kernels` makes a model one of these.
"""

import warnings
from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from model.attention import CausalMultiHeadAttention, fused_attention
from model.cache import LayerCache
from model.feed_forward import SwiGLU
from model.functional import IGNORE
from model.gpt import GPT
from model.native import load_kernels
from model.norm import RMSNorm

MANY_ROWS = 64  # with fewer, reading the weights is what takes the time, and torch does it as well
OWN_PRODUCTS = torch.backends.cpu.get_cpu_capability() == "AVX2"  # torch's use wider vectors where there are any,
WIDE = 256  # and are as good where no side is shorter than this
CHUNK = 2**21  # logits that exist at once, or those of MIN_ROWS rows where that is more
MIN_ROWS = 128


def covers(x: Tensor, *weights: Tensor) -> bool:
    """Whether the kernels can compute with these: decided by types, never by values."""
    return (
        x.numel() >= MANY_ROWS * x.shape[-1] > 0
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and all(
            type(tensor) in (Tensor, nn.Parameter) and tensor.dtype == torch.float32 and tensor.device.type == "cpu"
            for tensor in (x, *weights)
        )
    )


def multiply(left: Tensor, right: Tensor, onto: Tensor | None = None) -> Tensor:
    """left (m k) @ right (k n), either of them transposed or not; added to `onto`, in place, if that is given."""
    if not OWN_PRODUCTS or min(*left.shape, right.shape[1]) >= WIDE:
        return torch.mm(left, right) if onto is None else onto.addmm_(left, right)
    out = left.new_empty(left.shape[0], right.shape[1]) if onto is None else onto
    torch.ops.inkling.multiply(out, left, right, onto is not None)
    return out


class _Linear(Function):
    @staticmethod
    def forward(ctx, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        rows = x.reshape(-1, x.shape[-1])
        return tuple(multiply(rows, w.t()).view(*x.shape[:-1], len(w)) for w in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *changes: Tensor | None):
        x, *weights = ctx.saved_tensors
        rows, dx, dws = x.reshape(-1, x.shape[-1]), None, []
        for w, dy, wanted in zip(weights, changes, ctx.needs_input_grad[1:], strict=True):
            dy = None if dy is None else dy.reshape(-1, len(w))
            if dy is not None and ctx.needs_input_grad[0]:
                dx = multiply(dy, w, onto=dx)
            dws.append(multiply(dy.t(), rows) if dy is not None and wanted else None)
        return dx if dx is None else dx.view(x.shape), *dws


def linear(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """x (... d_in) times each of the weights (d_out d_in), transposed -> one (... d_out) each."""
    return _Linear.apply(x, *weights)


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


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax(q k^T / sqrt(d)) v for q (b h s d), k and v (b g s d) with g heads shared by h / g queries each.

    The result (b h s d) lies in memory as (b s h d), so that joining its heads moves nothing. No square of weights is
    held: "FlashAttention" (2022).
    """
    return _Attention.apply(q, k, v)


class _NormRotate(Function):
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


def norm_rotate(
    x: Tensor,
    gain: Tensor | None = None,
    eps: float = 1e-6,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    pairing: str = "half",
) -> Tensor:
    """rms_norm(x, gain, eps) of x (b s h d), where there is a gain; then rotate, by cos and sin (s i) or (b s i)."""
    if cos is not None:
        cos, sin = (table.contiguous().view(-1, table.shape[-1]) for table in (cos, sin))
    return _NormRotate.apply(x, gain, eps, cos, sin, pairing == "interleaved")


def rms_norm(x: Tensor, gain: Tensor, eps: float = 1e-6) -> Tensor:
    """functional.rms_norm of x (... d)."""
    return norm_rotate(x.unsqueeze(-2), gain, eps).squeeze(-2)


def _silu_times(gate: Tensor, up: Tensor) -> Tensor:
    y = torch.empty_like(gate)
    torch.ops.inkling.silu_times(gate, up, y)
    return y


class _GatedLinear(Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up, weight)
        rows = _silu_times(gate, up).view(-1, gate.shape[-1])
        return multiply(rows, weight.t()).view(*gate.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        gate, up, weight = ctx.saved_tensors
        dy = dy.reshape(-1, len(weight))
        rows = _silu_times(gate, up).view(-1, gate.shape[-1])
        dweight = multiply(dy.t(), rows) if ctx.needs_input_grad[2] else None
        dgate, dup = multiply(dy, weight).view(gate.shape), rows.view(gate.shape)
        torch.ops.inkling.silu_times_backward(dgate, gate, up, dgate, dup)  # into what is not needed any more
        return dgate, dup, dweight


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up (... d_in), times the weight (d_out d_in) transposed -> (... d_out).

    The product that the weight meets is not held for the backward pass, which computes it again.
    """
    return _GatedLinear.apply(gate, up, weight)


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


def dropout(x: Tensor, p: float) -> Tensor:
    """x, each number zero with probability p below 1, else times 1 / (1 - p), by one draw of torch's generator.

    The backward pass finds the same numbers again by that draw; no mask is held.
    """
    return _Dropout.apply(x, p, torch.randint(2**63 - 1, ()).item())


class _HeadLoss(Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, gradients: bool) -> Tensor:
        by_kernel = dtype == torch.float32 and covers(hidden, weight)
        wide = torch.promote_types(dtype, torch.float32)
        rows, w = hidden.reshape(-1, hidden.shape[-1]).to(dtype), weight.to(dtype)
        loss = hidden.new_zeros((), dtype=wide)
        dx = torch.empty_like(hidden, memory_format=torch.contiguous_format) if gradients else None
        dw = torch.zeros_like(weight, dtype=wide) if gradients else None
        n = max(MIN_ROWS, CHUNK // len(weight))
        pieces = [rows.split(n), targets.flatten().split(n), (rows if dx is None else dx.view(rows.shape)).split(n)]
        for x, target, out in zip(*pieces, strict=True):
            if by_kernel:
                slopes = multiply(x, w.t())
                loss += torch.ops.inkling.cross_entropy(slopes, target).sum()
                if gradients:
                    multiply(slopes, w, onto=out.zero_())
                    multiply(slopes.t(), x, onto=dw)
                continue
            logits = (x @ w.t()).to(wide)
            counts = (target != IGNORE).unsqueeze(1)
            index = target.unsqueeze(1).clamp(min=0)
            log_sums = logits.logsumexp(1, keepdim=True)
            loss += ((log_sums - logits.gather(1, index)) * counts).sum()
            if gradients:
                slopes = logits.sub_(log_sums).exp_().scatter_add_(1, index, -torch.ones_like(log_sums)) * counts
                slopes = slopes.to(dtype)
                out.copy_(slopes @ w)
                dw += slopes.t() @ x
        if gradients:
            ctx.save_for_backward(dx, dw.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, change: Tensor):
        dx, dw = ctx.saved_tensors
        return (dx * change).to(dx.dtype), (dw * change).to(dw.dtype), None, None, None


def head_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """cross_entropy(hidden @ weight^T, targets), for logits that never exist whole: the summed loss and its count.

    hidden (... d), weight (vocab d), targets (...), on any device, under autocast too. A chunk of rows at a time gets
    its logits and gives its gradients at once, in the forward pass: the backward pass only scales them, as in "Liger
    Kernel: Efficient Triton Kernels for LLM Training" (2024).
    """
    kind, dtype = hidden.device.type, hidden.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.autocast(kind, enabled=False):
        loss = _HeadLoss.apply(hidden, weight, targets, dtype, gradients)
    return loss, (targets != IGNORE).sum()


# --- the modules: those of this package where the kernels cover what they are given, and otherwise as they were ------


class KernelLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)[0] if self.bias is None and covers(x, self.weight) else super().forward(x)


class KernelRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.gain, self.eps) if covers(x, self.gain) else super().forward(x)


class KernelSwiGLU(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        projections = (self.gate, self.up, self.down)
        if not (_are_linear(*projections) and covers(x, *(projection.weight for projection in projections))):
            return super().forward(x)
        return gated_linear(*linear(x, self.gate.weight, self.up.weight), self.down.weight)


class KernelAttention(CausalMultiHeadAttention):
    def forward(
        self,
        x: Tensor,
        token_positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        special = mask is not None or cache is not None or bias is not None or (self.training and self.dropout > 0)
        projections = (self.wq, self.wk, self.wv)
        if (
            special
            or self.attend is not fused_attention
            or not _are_linear(*projections)
            or not covers(x, *(projection.weight for projection in projections))
        ):
            return super().forward(x, token_positions, mask, cache, bias)
        heads = (self.n_heads, self.n_kv_heads, self.n_kv_heads)
        q, k, v = (
            rearrange(y, "b s (h d) -> b s h d", h=h)
            for y, h in zip(linear(x, *(projection.weight for projection in projections)), heads, strict=True)
        )
        cos = sin = None
        if self.rope is not None:
            positions = torch.arange(x.shape[1]) if token_positions is None else token_positions
            cos, sin = self.rope.angles(positions)
        if self.rope is not None or self.q_norm is not None:
            pairing = "half" if self.rope is None else self.rope.pairing
            q, k = (
                norm_rotate(y, *((None, 0.0) if norm is None else (norm.gain, norm.eps)), cos, sin, pairing)
                for y, norm in ((q, self.q_norm), (k, self.k_norm))
            )
        y = attention(*(rearrange(y, "b s h d -> b h s d") for y in (q, k, v)))
        return self.wo(rearrange(y, "b h s d -> b s (h d)"))


class KernelDropout(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training and 0 < self.p < 1 and covers(x) else super().forward(x)


class KernelGPT(GPT):
    def loss(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if not (_are_linear(self.head) and covers(x, self.head.weight)):
            return super().loss(x, targets)
        return head_cross_entropy(x, self.head.weight[: self.vocab_size], targets)


KERNELS = {
    nn.Linear: KernelLinear,
    nn.Dropout: KernelDropout,
    RMSNorm: KernelRMSNorm,
    SwiGLU: KernelSwiGLU,
    CausalMultiHeadAttention: KernelAttention,
    GPT: KernelGPT,
}


def _are_linear(*modules: nn.Module) -> bool:
    return all(isinstance(module, nn.Linear) for module in modules)


def use_kernels(model: GPT, warn: Callable[[str], None] = warnings.warn) -> bool:
    """Makes the modules of a model those above, in place; False, and a line, where the kernels cannot be built.

    Only what they call changes: weights, their names and what a checkpoint holds stay. What the kernels do not cover
    goes on as before: few rows, masks, caches, biases, soft caps, dropout in attention, other types and devices,
    autocast, compiled.
    """
    try:
        load_kernels(warn)
    except RuntimeError as error:
        warn(f"the kernels of training cannot be built, going on without, slower: {error}")
        return False
    for module in model.modules():
        module.__class__ = KERNELS.get(type(module), type(module))
    return True
