"""How a token's place in the sequence enters the model."""

import torch
from torch import Tensor, nn

from model.functional import rotate


class RotaryPositionalEmbedding(nn.Module):
    """RoPE ("RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021).

    Pair i of a query or key at position p is turned by the angle p * theta^(-2i / d_k), so that the score of a query
    and a key depends on the difference of their positions only.

    Args:
        theta: base of the wavelengths; larger turns more slowly.
        d_k: width of a head; even.
        max_seq_len: positions 0 .. max_seq_len - 1 are tabulated.
        pairing: "half" (Hugging Face, vLLM) or "interleaved" (the paper, llama2.c).
    """

    def __init__(self, theta: float, d_k: int, max_seq_len: int, pairing: str = "half"):
        super().__init__()
        if d_k % 2:
            raise ValueError(f"RoPE turns pairs of dimensions: the head width must be even, got {d_k}")
        self.max_seq_len, self.pairing = max_seq_len, pairing
        # float64 first: in float32 the angles at position 100,000 are already off by 0.005
        angles = torch.outer(torch.arange(max_seq_len).double(), theta ** (-torch.arange(0, d_k, 2).double() / d_k))
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def _apply(self, fn, recurse=True):
        """Moves with the module but stays float32: in bfloat16 neighbouring positions would become equal."""
        cos, sin = self.cos, self.sin
        super()._apply(fn, recurse)
        self.cos, self.sin = cos.to(self.cos.device), sin.to(self.sin.device)
        return self

    def forward(self, x: Tensor, token_positions: Tensor) -> Tensor:
        """x (b h s d), token_positions (s,) or (b, s) -> the rotated x."""
        cos, sin = self.cos[token_positions], self.sin[token_positions]  # (s i) or (b s i)
        if token_positions.ndim == 2:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # the same for all heads
        return rotate(x, cos, sin, self.pairing)
