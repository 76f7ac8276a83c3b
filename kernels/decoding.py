"""Generation on a CPU: matrix products of few rows and attention of one query, in decoding.cpp.

A token's time is spent on reading every weight once, for very few rows; torch's kernels are made for many rows. These
read the weights in the order in which they are stored, in float32 or int8, two to three times as fast.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from kernels import build

FEW_ROWS = 512  # with more, torch's product pays for a copy of the weights


class DecodeLinear(nn.Module):
    """A linear layer for generation, without gradients, whose weights are stored in the order that decoding.cpp reads.

    With `int8` a weight is one byte, and each output has a scale, its largest weight / 127. For few rows in float32 on
    a CPU, the result of a row does not depend on the number of rows.
    """

    def __init__(self, linear: nn.Linear, int8: bool = False):
        super().__init__()
        weight, scale = linear.weight.detach(), None
        self.d_out, self.with_kernels = len(weight), build.loaded()
        side_by_side, together = torch.ops.inkling.layout() if self.with_kernels else (1, 1)
        fill = -len(weight) % together
        if int8:
            weight = weight.float()
            scale = (weight.abs().amax(1) / 127).clamp(min=1e-12)
            weight = (weight / scale.unsqueeze(1)).round().to(torch.int8)
            scale = F.pad(scale, (0, fill))
        panels = rearrange(F.pad(weight, (0, 0, 0, fill)), "(panel out) d -> panel d out", out=side_by_side)
        self.register_buffer("panels", panels.contiguous())
        self.register_buffer("scale", scale)

    @property
    def weight(self) -> Tensor:
        """(d_out d_in), as in nn.Linear: a copy. With int8 it must be multiplied by scale[:d_out]."""
        return rearrange(self.panels, "panel d out -> (panel out) d")[: self.d_out]

    def forward(self, x: Tensor) -> Tensor:
        """x (... d_in) -> (... d_out), in the dtype of x."""
        rows = x.reshape(-1, x.shape[-1])
        readable = (
            x.device.type == "cpu" and x.dtype != torch.float64 and self.panels.dtype in (torch.int8, torch.float32)
        )
        if self.with_kernels and readable and len(rows) <= FEW_ROWS:
            scale = None if self.scale is None else self.scale.float()
            y = torch.ops.inkling.linear(rows.float().contiguous(), self.panels, scale, self.d_out)
            return y.to(x.dtype).reshape(*x.shape[:-1], self.d_out)
        y = F.linear(x, self.weight.to(x.dtype))
        return y if self.scale is None else y * self.scale[: self.d_out].to(x.dtype)


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
    """Computes attention in decoding.cpp if each row has a single query: reads only the keys that the mask allows."""
    plain = bias is None and soft_cap is None and dropout_p == 0
    if q.shape[2] > 1 or mask is None or not plain or q.dtype != torch.float32 or q.device.type != "cpu":
        return otherwise(q, k, v, mask, bias, soft_cap, dropout_p)
    mask = mask.expand(q.shape[0], q.shape[1], 1, k.shape[2])
    # a head's numbers must be contiguous; RoPE returns them strided if a head has only one pair
    q, k, v = (x if x.stride(3) == 1 else x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
    return torch.ops.inkling.attend(q, k, v, mask), None


def pack_for_decoding(model: nn.Module, int8: bool = False, warn: Callable[[str], None] = warnings.warn) -> nn.Module:
    """Prepares a GPT for generation, in place: its linear layers become DecodeLinear, without gradients.

    The embedding stays, since a token reads only one row of it; a tied head gets its own copy of the weights. Without
    int8 nothing changes where there is no gain: without kernels, on another device, or in another dtype than float32.
    """
    with_kernels = model.embedding.weight.device.type == "cpu" and model.embedding.weight.dtype == torch.float32
    with_kernels = with_kernels and build.load("generation", warn)
    if not with_kernels and not int8:
        return model
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, DecodeLinear(child, int8))
    if with_kernels:
        model.use(replace(model.ops, attention=partial(attention, otherwise=model.ops.attention)))
    return model
