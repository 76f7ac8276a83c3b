"""Position schemes: how the position of a token enters the model.

| scheme | effect | class |
| --- | --- | --- |
| rope | rotates queries and keys, in every layer | RotaryPositionalEmbedding |
| learned | adds a learned vector to the token's embedding | LearnedPositionalEmbedding |
| sinusoidal | adds a fixed vector to the token's embedding | SinusoidalPositionalEmbedding |
| alibi | lowers the score of a key in proportion to its distance, in every layer | ALiBi |
| none | none: only the causal mask shows the order of tokens | |

The first three have the same signature, (x, token_positions) -> x; ALiBi compares two lists of positions. All take
token_positions as (s,), or as (b, s) if each row has its own.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from model.ops import TORCH

SCHEMES = ("rope", "learned", "sinusoidal", "alibi", "none")
SCALINGS = ("interpolation", "ntk", "yarn")


def check_positions(token_positions: Tensor, max_seq_len: int):
    """ValueError unless all are in 0 .. max_seq_len - 1. Reads the values: on a GPU this waits for the device."""
    low, high = token_positions.min().item(), token_positions.max().item()
    if low < 0 or high >= max_seq_len:
        raise ValueError(f"token_positions must lie in 0 .. {max_seq_len - 1} (max_seq_len - 1), got {low} .. {high}")


def _check_fit(x: Tensor, token_positions: Tensor):
    """ValueError unless token_positions match x (... s d): (s,) for all rows, or with the first axes of x."""
    *rows, s = token_positions.shape
    if s != x.shape[-2] or len(rows) > x.ndim - 2 or any(n not in (1, m) for n, m in zip(rows, x.shape, strict=False)):
        raise ValueError(
            f"token_positions must be (s,), or (b, s) with the first axes of x (b ... s d), "
            f"got {tuple(token_positions.shape)} for x {tuple(x.shape)}"
        )


def _look_up(table: Tensor, token_positions: Tensor) -> Tensor:
    """The rows (s d) or (b s d) of a table (max_seq_len d).

    On the CPU a position outside the table raises; on a GPU, and in compiled code, the look-up itself fails with an
    assertion.
    """
    try:
        return embedding(token_positions, table)
    except IndexError:
        check_positions(token_positions, len(table))
        raise


class _Fixed(nn.Module):
    """Its buffers move with the module but stay float32: in bfloat16, neighbouring positions would become equal."""

    def _apply(self, fn, recurse=True):
        tables = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, table in tables.items():
            setattr(self, name, table.to(getattr(self, name).device))
        return self


class RotaryPositionalEmbedding(_Fixed):
    """RoPE ("RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021).

    Pair i of a query or key at position p is rotated by the angle p * theta^(-2i / d_k), so that the score of a query
    and a key depends only on the difference of their positions.

    Args:
        theta: base of the wavelengths; a larger theta rotates more slowly.
        d_k: width of a head; even.
        max_seq_len: positions 0 .. max_seq_len - 1 are tabulated, in float32.
        pairing: "half" (Hugging Face, vLLM) or "interleaved" (the paper, llama2.c).
        scaling, factor: reach `factor` times the trained length, max_seq_len / factor; see rope_frequencies.
    """

    def __init__(
        self,
        theta: float,
        d_k: int,
        max_seq_len: int,
        pairing: str = "half",
        scaling: str | None = None,
        factor: float = 1.0,
    ):
        super().__init__()
        if d_k % 2:
            raise ValueError(f"RoPE rotates pairs of dimensions: the head width must be even, got {d_k}")
        if pairing not in ("half", "interleaved"):
            raise ValueError(f"pairing must be half or interleaved, got {pairing}")
        self.arguments = (theta, d_k, max_seq_len, pairing, scaling, factor)
        self.ops, self.pairing = TORCH, pairing
        inv_freq, attention_factor = rope_frequencies(theta, d_k, scaling, factor, max_seq_len)
        # in float64 first: in float32 the angles at position 100,000 are off by 0.005
        angles = torch.outer(torch.arange(max_seq_len).double(), inv_freq)
        self.register_buffer("cos", (attention_factor * angles.cos()).float(), persistent=False)
        self.register_buffer("sin", (attention_factor * angles.sin()).float(), persistent=False)

    def forward(self, x: Tensor, token_positions: Tensor) -> Tensor:
        """x (b h s d) or (b s d), or with any other axes before s; token_positions (s,) or (b, s) -> the rotated x."""
        _check_fit(x, token_positions)
        cos, sin = self.angles(token_positions)
        if token_positions.ndim > 1:
            for _ in range(x.ndim - cos.ndim):
                cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)  # the same for all heads
        return self.ops.rotate(x, cos, sin, self.pairing)

    def angles(self, token_positions: Tensor) -> tuple[Tensor, Tensor]:
        """(s,) or (b, s) -> the cosine and sine of every pair there, (s i) or (b s i)."""
        return _look_up(self.cos, token_positions), _look_up(self.sin, token_positions)

    def extended(self, times: int) -> "RotaryPositionalEmbedding":
        """A RoPE for `times` as many positions, scaled by that factor; with YaRN if this one is not scaled."""
        theta, d_k, max_seq_len, pairing, scaling, factor = self.arguments
        longer = (theta, d_k, max_seq_len * times, pairing, scaling or "yarn", factor * times)
        rope = RotaryPositionalEmbedding(*longer).to(self.cos.device)
        rope.ops = self.ops
        return rope


def rope_frequencies(
    theta: float, d_k: int, scaling: str | None = None, factor: float = 1.0, max_seq_len: int | None = None
) -> tuple[Tensor, float]:
    """The inverse frequencies, radians per position of each pair (d_k / 2,) float64, and the factor of cos and sin.

    To reach max_seq_len, `factor` times the trained length, `scaling` lowers the frequencies:
    interpolation: all by the factor ("Extending Context Window of Large Language Models via Position Interpolation",
        2023); neighbours become hard to tell apart.
    ntk: with a larger theta, so that the lowest frequency falls by the factor and the highest stays ("NTK-aware scaled
        RoPE", bloc97, 2023).
    yarn: pairs that make 32 or more rotations within the trained length stay, those that make one or less fall by the
        factor, with a linear ramp between; scores grow by (1 + 0.1 ln factor)^2 ("YaRN: Efficient Context Window
        Extension of Large Language Models", 2023; the ramp is over pairs, as in its authors' code and in Hugging
        Face's).
    """
    if not 1 < theta < math.inf:
        raise ValueError(f"theta must be above 1 and finite, got {theta}")
    if scaling is None:
        if factor != 1:
            raise ValueError(f"rope_factor {factor} needs rope_scaling, one of {', '.join(SCALINGS)}, got None")
    elif scaling not in SCALINGS:
        raise ValueError(f"rope_scaling must be one of {', '.join(SCALINGS)}, or None, got {scaling}")
    elif not 1 <= factor < math.inf:
        raise ValueError(f"rope_factor must be at least 1 and finite, got {factor}")
    if scaling == "ntk":
        if d_k < 4:
            raise ValueError(f"rope_scaling=ntk needs a head width of at least 4, got {d_k}: take interpolation")
        theta = theta * factor ** (d_k / (d_k - 2))
    inv_freq = theta ** (-torch.arange(0, d_k, 2).double() / d_k)
    if scaling == "interpolation":
        return inv_freq / factor, 1.0
    if scaling != "yarn":
        return inv_freq, 1.0

    trained_len = max_seq_len / factor

    def pair_that_turns(times: float) -> float:
        return d_k * math.log(trained_len / (2 * math.pi * times)) / (2 * math.log(theta))

    fast, slow = max(math.floor(pair_that_turns(32)), 0), min(math.ceil(pair_that_turns(1)), d_k - 1)
    ramp = ((torch.arange(d_k // 2).double() - fast) / (slow - fast or 0.001)).clamp(0, 1)
    return inv_freq * (1 - ramp) + inv_freq / factor * ramp, 1 + 0.1 * math.log(factor)


class LearnedPositionalEmbedding(nn.Module):
    """A learned vector per position, as in GPT-2. (x (b s d_model), token_positions) -> x + vector."""

    def __init__(self, d_model: int, max_seq_len: int):
        super().__init__()
        self.table = nn.Embedding(max_seq_len, d_model)

    def forward(self, x: Tensor, token_positions: Tensor) -> Tensor:
        _check_fit(x, token_positions)
        return x + _look_up(self.table.weight, token_positions)


class SinusoidalPositionalEmbedding(_Fixed):
    """sqrt(d_model) x + PE of "Attention Is All You Need" (2017), sections 3.4 and 3.5.

    PE(p, 2i) = sin(p / 10000^(2i / d_model)) and PE(p, 2i + 1) the cosine; d_model must be even.
    """

    def __init__(self, d_model: int, max_seq_len: int):
        super().__init__()
        if d_model % 2:
            raise ValueError(f"sinusoidal positions come in pairs: d_model must be even, got {d_model}")
        inv_freq, _ = rope_frequencies(10000.0, d_model)
        angles = torch.outer(torch.arange(max_seq_len).double(), inv_freq)
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        self.register_buffer("table", table.float(), persistent=False)

    def forward(self, x: Tensor, token_positions: Tensor) -> Tensor:
        _check_fit(x, token_positions)
        return (math.sqrt(x.shape[-1]) * x + _look_up(self.table, token_positions)).to(x.dtype)


class ALiBi(_Fixed):
    """A penalty on the scores, linear in the distance ("Train Short, Test Long", 2021).

    Head i of h lowers a score by 2^(-8 i / h), i = 1 .. h, per position between query and key. If h is not a power of
    two, the slopes are those of the next smaller power, followed by every other slope of the next larger one.
    """

    def __init__(self, n_heads: int):
        super().__init__()
        if n_heads < 1:
            raise ValueError(f"n_heads must be at least 1, got {n_heads}")
        n = 2 ** math.floor(math.log2(n_heads))
        slopes = [2 ** (-8 * i / n) for i in range(1, n + 1)]
        slopes += [2 ** (-4 * i / n) for i in range(1, 2 * (n_heads - n), 2)]
        self.register_buffer("slopes", torch.tensor(slopes).view(-1, 1, 1), persistent=False)

    def forward(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """(q,) and (k,), or (b, q) and (b, k) -> the bias of the scores, (h q k) or (b h q k), float32."""
        distance = q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)  # (q k) or (b q k)
        return -self.slopes * distance.unsqueeze(-3)
