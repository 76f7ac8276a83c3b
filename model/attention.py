"""Causal multi-head attention."""

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from model import functional
from model.cache import LayerCache
from model.functional import causal_mask, rms_norm
from model.positions import RotaryPositionalEmbedding


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, backend: str, dropout_p: float, training: bool
) -> Tensor:
    """q (b h q d), k and v (b g k d) with g key/value heads shared by h / g query heads each -> (b h q d).

    `mask` is what may be seen; None means plain causal, which lets the fused kernel skip the upper triangle. Both
    backends compute functional.scaled_dot_product_attention: "fused" by torch's kernel, "written" as it stands there.
    """
    group = q.shape[1] // k.shape[1]
    if backend == "fused":
        dropout_p = dropout_p if training else 0.0
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal=mask is None, enable_gqa=group > 1)
    if group > 1:
        k, v = (repeat(x, "b g k d -> b (g r) k d", r=group) for x in (k, v))
    if mask is None:
        mask = causal_mask(q.shape[2], k.shape[2], q.device)
    return functional.scaled_dot_product_attention(q, k, v, mask, dropout_p, training)[0]


class RMSNorm(nn.Module):
    """functional.rms_norm with a learned gain, over the last axis of width `d`."""

    def __init__(self, d: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.gain)


class CausalMultiHeadAttention(nn.Module):
    """Every token looks back at itself and what came before, n_heads times in parallel ("Attention Is All You Need").

    Args:
        d_model: width of the residual stream; a multiple of n_heads.
        n_heads: query heads.
        use_rope: rotate queries and keys by their positions; needs max_seq_len and an even head width.
        max_seq_len, theta, pairing: see RotaryPositionalEmbedding.
        n_kv_heads: key/value heads, each shared by n_heads / n_kv_heads query heads ("GQA", 2023); None: n_heads.
        qk_norm: RMSNorm on each query and key head, before RoPE ("Scaling Vision Transformers to 22B", 2023).
        dropout: on the attention weights, in training.

    `backend`, "fused" or "written", says how `attend` computes.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        use_rope: bool = False,
        max_seq_len: int | None = None,
        theta: float = 10000.0,
        *,
        n_kv_heads: int | None = None,
        pairing: str = "half",
        qk_norm: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if d_model % n_heads:
            raise ValueError(f"d_model must be a multiple of n_heads, got {d_model} and {n_heads}")
        if n_heads % n_kv_heads:
            raise ValueError(f"n_heads must be a multiple of n_kv_heads, got {n_heads} and {n_kv_heads}")
        if use_rope and max_seq_len is None:
            raise ValueError("use_rope needs max_seq_len, the number of positions to tabulate, got None")
        d_head = d_model // n_heads
        self.n_heads, self.n_kv_heads, self.dropout, self.backend = n_heads, n_kv_heads, dropout, "fused"
        self.wq = nn.Linear(d_model, n_heads * d_head, bias=False)
        self.wk = nn.Linear(d_model, n_kv_heads * d_head, bias=False)
        self.wv = nn.Linear(d_model, n_kv_heads * d_head, bias=False)
        self.wo = nn.Linear(n_heads * d_head, d_model, bias=False)
        self.q_norm = RMSNorm(d_head) if qk_norm else None
        self.k_norm = RMSNorm(d_head) if qk_norm else None
        self.rope = RotaryPositionalEmbedding(theta, d_head, max_seq_len, pairing) if use_rope else None

    def forward(
        self,
        x: Tensor,
        token_positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """x (b s d_model) -> (b s d_model).

        token_positions (s,) or (b, s) feed RoPE alone, and default to 0 .. s-1 (after what the cache holds). `mask`
        broadcasts to (b h q k) and must itself be causal; None is the causal mask.
        """
        s, start = x.shape[1], cache.cache.length if cache is not None else 0
        q = rearrange(self.wq(x), "b s (h d) -> b h s d", h=self.n_heads)
        k, v = (rearrange(w(x), "b s (h d) -> b h s d", h=self.n_kv_heads) for w in (self.wk, self.wv))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            if token_positions is None:
                token_positions = torch.arange(start, start + s, device=x.device)
            q, k = self.rope(q, token_positions), self.rope(k, token_positions)
        if cache is not None:
            k, v = cache.append(k, v)  # everything seen so far
            if mask is None:  # the fused kernel's own causal flag would align to the top left
                mask = causal_mask(s, start + s, x.device)
        y = attend(q, k, v, mask, self.backend, self.dropout, self.training)
        return self.wo(rearrange(y, "b h s d -> b s (h d)"))
