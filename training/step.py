"""One step of training, as a function."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from model.functional import IGNORE


def train_step(
    forward: Callable,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    tokens: Tensor,
    targets: Tensor,
    *,
    micro_batch: int,
    lr: float,
    clip: float,
    autocast: torch.autocast,
) -> tuple[Tensor, Tensor]:
    """Forward, backward and update over a whole batch (rows, s), micro_batch rows at a time.

    `forward` is the model, compiled or not. Each piece's summed loss is divided by the number of targets of the whole
    batch, counted beforehand, so that the gradient is that of the batch's mean whatever the cut. Returns the mean loss
    in nats and the norm of the gradient before clipping, as tensors: whoever prints them pays for waiting.
    """
    count = (targets != IGNORE).sum()
    total = torch.zeros((), device=tokens.device)
    for some_tokens, some_targets in zip(tokens.split(micro_batch), targets.split(micro_batch), strict=True):
        with autocast:
            loss, _ = forward(some_tokens, targets=some_targets)
        scaler.scale(loss / count).backward()
        total += loss.detach()

    for group in optimizer.param_groups:
        group["lr"] = lr
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return total / count, norm
