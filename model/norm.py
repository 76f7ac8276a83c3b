"""The norms before every residual branch, which keep activations in range."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from model.functional import layer_norm
from model.ops import TORCH


class RMSNorm(nn.Module):
    """functional.rms_norm with a learned weight, over the last axis of width `d`."""

    def __init__(self, d: int, eps: float = 1e-6):
        super().__init__()
        self.ops, self.eps = TORCH, eps
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """functional.layer_norm with a learned weight and bias, over the last axis of width `d`."""

    def __init__(self, d: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d))
        self.bias = nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


NORMS: dict[str, Callable[..., nn.Module]] = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}
