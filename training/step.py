"""One step of training, as a function."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from model.functional import IGNORE


def train_step(
    forward: Callable,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    batch: dict[str, Tensor],
    *,
    micro_batch: int,
    lr: float,
    clip: float,
    autocast: torch.autocast,
) -> tuple[Tensor, Tensor]:
    """Forward, backward and update over a whole batch, micro_batch rows at a time.

    `forward` is the model, compiled or not; `batch` holds what it is told, each (rows, s): tokens, targets, and what
    else there is. Each piece's summed loss is divided by the number of targets of the whole batch, counted beforehand,
    so that the gradient is that of the batch's mean whatever the cut. Returns the mean loss in nats and the norm of the
    gradient before clipping, as tensors: whoever prints them pays for waiting.
    """
    count = (batch["targets"] != IGNORE).sum()
    total = torch.zeros((), device=count.device)
    for pieces in zip(*(rows.split(micro_batch) for rows in batch.values()), strict=True):
        with autocast:
            loss, _ = forward(**dict(zip(batch, pieces, strict=True)))
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
