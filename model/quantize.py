"""Weights as they are read fastest when few rows come at a time, as in generation: what counts is how many bytes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.gpt import GPT

FEW_ROWS = 16


class Int8Linear(nn.Module):
    """A linear layer that holds a byte a weight: rows of int8, each with its scale, the largest weight / 127.

    For few rows of x on a CPU, torch's kernel multiplies the bytes as they are, with x in bfloat16; it reads a row's
    weights 32 at a time, with no regard for what is left. Else they are brought back to the type of x first; so the
    last digits depend on the number of rows.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach()
        scale = (weight.abs().amax(1) / 127).clamp(min=1e-12).bfloat16()
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (weight / scale.unsqueeze(1)).round().clamp(-127, 127).to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        """x (... d_in) -> (... d_out), in the type of x."""
        rows = x.flatten(0, -2)
        if x.device.type == "cpu" and len(rows) <= FEW_ROWS and self.weight.shape[1] % 32 == 0:
            y = torch._weight_int8pack_mm(rows.bfloat16().contiguous(), self.weight, self.scale)
            return y.to(x.dtype).unflatten(0, x.shape[:-1])
        return F.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)


def quantize_int8(model: GPT) -> GPT:
    """Turns every linear layer of the model into an Int8Linear, in place. For generation: it has no gradients.

    The embedding, of which a token reads a single row, stays; a tied head gets bytes of its own.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Int8Linear(child))
    return model


def favour_few_rows(model: GPT) -> GPT:
    """On a CPU, stores matrices with more outputs than inputs by columns, in place; not a value changes.

    The product of one row with such a matrix (the head above all) then reads memory in one stream: up to three times
    as fast; products of many rows take what they took. On another device it does nothing.
    """
    if model.embedding.weight.device.type != "cpu":
        return model
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.out_features > module.in_features:
            module.weight.data = module.weight.data.T.contiguous().T
    return model
