"""A second, plain implementation of attention in float64, with which the model's own is compared.

It shares no code with model/functional.py, so that a fault there cannot hide itself.
"""

import math

import torch
from torch import Tensor

from model import ModelConfig
from model.positions import rope_frequencies


def causal(T_q: int, T_k: int) -> Tensor:
    """(q k), True where a query may attend; the last query is at the position of the last key."""
    return torch.ones(T_q, T_k, dtype=torch.bool).tril(T_k - T_q)


def attention_weights(
    q: Tensor, k: Tensor, mask: Tensor, bias: Tensor | float = 0.0, soft_cap: float | None = None
) -> Tensor:
    """q (b h q d), k (b g k d), mask True = may attend -> (b h q k); zeros for fully masked queries."""
    scores = q @ shared(k, q.shape[1]).transpose(-1, -2) / math.sqrt(q.shape[-1])
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    mask = mask.expand_as(scores)
    weights = torch.softmax((scores + bias).masked_fill(~mask, -math.inf), dim=-1)
    return torch.where(mask.any(-1, keepdim=True), weights, torch.zeros_like(weights))


def shared(x: Tensor, n_heads: int) -> Tensor:
    """(b g k d) -> (b h k d): each key/value head serves a group of h / g consecutive query heads."""
    return x.repeat_interleave(n_heads // x.shape[1], dim=1)


def heads(x: Tensor, n: int) -> Tensor:
    """(b s (h d)) -> (b h s d): head i is the i-th block of the width."""
    return torch.stack(x.split(x.shape[-1] // n, dim=-1), dim=1)


def transposed_heads(x: Tensor, n: int) -> Tensor:
    """(b s (d h)) -> (b h s d): a common mistake instead of heads()."""
    return torch.stack([x[..., i::n] for i in range(n)], dim=1)


def merged(y: Tensor) -> Tensor:
    """(b h s d) -> (b s (h d)): the inverse of heads()."""
    return torch.cat(y.unbind(1), dim=-1)


def rope_angles(config: ModelConfig, token_positions: Tensor) -> tuple[Tensor, float]:
    """The angles (... d_head / 2) of the pairs at token_positions (...), and the factor of their norm."""
    d_head = config.d_model // config.n_heads
    if config.rope_scaling is None:
        exponents = torch.arange(d_head // 2, dtype=torch.float64) * 2 / d_head
        inv_freq, attention_factor = 1 / torch.tensor(config.theta, dtype=torch.float64) ** exponents, 1.0
    else:
        factor, reach = config.rope_factor, config.max_seq_len
        inv_freq, attention_factor = rope_frequencies(config.theta, d_head, config.rope_scaling, factor, reach)
    return token_positions.double().unsqueeze(-1) * inv_freq, attention_factor


def pairs(x: Tensor, pairing: str) -> Tensor:
    """(... d) -> (... d/2) complex numbers, the pairs that RoPE rotates."""
    a, b = x.chunk(2, dim=-1) if pairing == "half" else (x[..., 0::2], x[..., 1::2])
    return torch.complex(a, b)


def rotated(x: Tensor, config: ModelConfig, token_positions: Tensor, pairing: str | None = None) -> Tensor:
    """RoPE of x (b h s d) at token_positions (s,): each pair times attention_factor e^(i angle)."""
    pairing = pairing or config.pairing
    angles, attention_factor = rope_angles(config, token_positions)
    z = pairs(x, pairing) * torch.polar(torch.full_like(angles, attention_factor), angles)
    parts = [z.real, z.imag]
    return torch.cat(parts, dim=-1) if pairing == "half" else torch.stack(parts, dim=-1).flatten(-2)
