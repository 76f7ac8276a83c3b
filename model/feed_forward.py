"""What a block does to each position on its own."""

from torch import Tensor, nn
from torch.nn.functional import silu


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) of "GLU Variants Improve Transformer" (2020); x (... d_model)."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))
