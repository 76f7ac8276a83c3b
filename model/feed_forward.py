"""Feed-forward layers: x (... d_model) -> (... d_model), each position on its own. `down` writes into the stream."""

from torch import Tensor, nn
from torch.nn.functional import gelu, relu

from model.ops import TORCH


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), "GLU Variants Improve Transformer" (2020). Three matrices; the others have two."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.ops = TORCH
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.gated_linear(self.gate(x), self.up(x), self.down)


class GELU(nn.Module):
    """down(gelu(up(x))), as in GPT-2, with the exact function of "Gaussian Error Linear Units" (2016)."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x)))


class ReLU2(nn.Module):
    """down(relu(up(x))^2), "Primer: Searching for Efficient Transformers for Language Modeling" (2021)."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(relu(self.up(x)).square())


FEED_FORWARDS: dict[str, type[nn.Module]] = {"swiglu": SwiGLU, "gelu": GELU, "relu2": ReLU2}
