"""AdamW, with decay where it belongs."""

import torch
from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices decay; norms and embeddings do not, and a head tied to the embedding counts as one."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decay, rest = [], []
    for parameter in model.parameters():  # a shared parameter comes once
        (decay if parameter.ndim == 2 and id(parameter) not in embeddings else rest).append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


def build_optimizer(model: nn.Module, *, lr: float, betas: list[float], eps: float, weight_decay: float):
    """torch's fused AdamW."""
    groups = parameter_groups(model, weight_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=tuple(betas), eps=eps, fused=True)
