"""Causal multi-head attention."""

import math

import torch
from einops import rearrange
from torch import Tensor, nn

from model.cache import LayerCache
from model.functional import causal_mask
from model.norm import RMSNorm
from model.ops import TORCH
from model.positions import RotaryPositionalEmbedding


class CausalMultiHeadAttention(nn.Module):
    """Each token attends to itself and the tokens before it, n_heads times in parallel ("Attention Is All You Need").

    Args:
        d_model: width of the residual stream; a multiple of n_heads.
        n_heads: query heads.
        use_rope: rotate queries and keys by their positions; needs max_seq_len and an even head width.
        max_seq_len, theta, pairing, rope_scaling, rope_factor: see RotaryPositionalEmbedding.
        n_kv_heads: key/value heads, each shared by n_heads / n_kv_heads query heads ("GQA", 2023); None: n_heads.
        qk_norm: RMSNorm (with norm_eps) on each query and key head, before RoPE ("Scaling Vision Transformers to 22B
            Parameters", 2023).
        soft_cap: bounds the scores smoothly to +- soft_cap ("Gemma 2", 2024); torch's fused kernel does not support it.
        dropout: on the attention weights, in training.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        use_rope: bool = False,
        max_seq_len: int | None = None,
        theta: float = 10000.0,
        *,
        pairing: str = "half",
        rope_scaling: str | None = None,
        rope_factor: float = 1.0,
        n_kv_heads: int | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        soft_cap: float | None = None,
        dropout: float = 0.0,
    ):
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        check_heads(d_model, n_heads, n_kv_heads, use_rope)
        if soft_cap is not None and not 0 < soft_cap < math.inf:
            raise ValueError(f"soft_cap must be above 0 and finite, or None, got {soft_cap}")
        d_head = d_model // n_heads
        self.ops = TORCH
        self.n_heads, self.n_kv_heads, self.soft_cap, self.dropout = n_heads, n_kv_heads, soft_cap, dropout
        self.wq = nn.Linear(d_model, n_heads * d_head, bias=False)
        self.wk = nn.Linear(d_model, n_kv_heads * d_head, bias=False)
        self.wv = nn.Linear(d_model, n_kv_heads * d_head, bias=False)
        self.wo = nn.Linear(n_heads * d_head, d_model, bias=False)
        self.q_norm = RMSNorm(d_head, norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(d_head, norm_eps) if qk_norm else None
        self.rope = None
        if use_rope:
            if max_seq_len is None:
                raise ValueError("use_rope needs max_seq_len, the number of positions to tabulate, got None")
            self.rope = RotaryPositionalEmbedding(theta, d_head, max_seq_len, pairing, rope_scaling, rope_factor)

    def forward(
        self,
        x: Tensor,
        token_positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """x (b s d_model) -> (b s d_model).

        token_positions (s,) or (b, s) are used by RoPE only; the default is 0 .. s-1, plus the length of the cache.
        `mask` broadcasts to (b h q k), or is (b q k) for all heads, and must itself be causal; None is the causal mask.
        `bias` broadcasts to (b h q k) and is added to the scores.
        """
        q = rearrange(self.wq(x), "b s (h d) -> b h s d", h=self.n_heads)
        k, v = (rearrange(w(x), "b s (h d) -> b h s d", h=self.n_kv_heads) for w in (self.wk, self.wv))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            if token_positions is None:
                token_positions = torch.arange(x.shape[1], device=x.device) if cache is None else cache.slots
            q, k = self.rope(q, token_positions), self.rope(k, token_positions)
        if cache is not None:
            k, v = cache.append(k, v)  # everything seen so far
            if mask is None:  # the fused kernel's own causal flag would align to the top left
                mask = causal_mask(cache.slots, k.shape[2])
        if mask is not None:
            mask = _fit_mask(mask, (*q.shape[:3], k.shape[2]))
        y, _ = self.ops.attention(q, k, v, mask, bias, self.soft_cap, self.dropout if self.training else 0.0)
        return self.wo(rearrange(y, "b h s d -> b s (h d)"))


def check_heads(d_model: int, n_heads: int, n_kv_heads: int, use_rope: bool):
    """ValueError unless n_heads divides d_model, n_kv_heads divides n_heads and, for RoPE, the head width is even."""
    if n_heads < 1 or n_kv_heads < 1:
        raise ValueError(f"n_heads and n_kv_heads must be at least 1, got {n_heads} and {n_kv_heads}")
    if d_model % n_heads:
        raise ValueError(f"d_model must be a multiple of n_heads, got {d_model} and {n_heads}")
    if n_heads % n_kv_heads:
        raise ValueError(f"n_heads must be a multiple of n_kv_heads, got {n_heads} and {n_kv_heads}")
    if use_rope and (d_head := d_model // n_heads) % 2:
        raise ValueError(
            f"RoPE rotates pairs of dimensions: d_model / n_heads must be even, got {d_model} / {n_heads} = {d_head}"
        )


def _fit_mask(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """The mask with a head axis; ValueError unless it is boolean and broadcasts to `shape` (b h q k).

    A mask of numbers would be added to the scores by the fused kernel, and mask nothing.
    """
    if mask.dtype != torch.bool:
        raise ValueError(f"the mask must be boolean, True = may attend, got {mask.dtype}")
    full = rearrange(mask, "b q k -> b 1 q k") if mask.ndim == 3 else mask
    if full.ndim > 4 or any(n not in (1, m) for n, m in zip(reversed(full.shape), reversed(shape), strict=False)):
        raise ValueError(f"the mask must broadcast to (b, h, q, k), got {tuple(mask.shape)} and {tuple(shape)}")
    return full
