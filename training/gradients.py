"""Gradients of a batch, whatever pieces it is cut into."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from training import distributed
from training.distributed import full_tensor, synchronised


def micro_batches(batch: dict[str, Tensor], rows: int, row_length: int | None = None) -> Iterator[dict[str, Tensor]]:
    """A batch, `rows` rows at a time, each of them cut into rows of row_length if that is given."""
    for pieces in zip(*(tensor.split(rows) for tensor in batch.values()), strict=True):
        length = pieces[0].shape[1] if row_length is None else row_length
        yield {name: piece.reshape(-1, length) for name, piece in zip(batch, pieces, strict=True)}


def compute_gradients(
    forward: nn.Module,
    scaler: torch.amp.GradScaler,
    batch: dict[str, Tensor],
    *,
    micro_batch: int,
    count: float,
    autocast: torch.autocast,
    row_length: int | None = None,
) -> Tensor:
    """Forward and backward over this rank's rows of a batch, micro_batch rows at a time -> their summed loss in nats.

    `forward` is the model, compiled or not, on one rank or several; `batch` holds its arguments, each (rows, s):
    tokens, targets, and what else there is. Where row_length is given, which divides s, rows are cut into such, each
    with the token_positions that it had, if there are any. Each piece's summed loss is divided by `count`, the number
    of targets of the whole batch on all ranks, so that the gradient is that of the batch's mean, whatever the cut.
    (Ranks average their gradients, hence their number.)
    """
    total = torch.zeros((), device=batch["targets"].device)
    pieces = list(micro_batches(batch, micro_batch, row_length))
    for i, piece in enumerate(pieces):
        with synchronised(forward, last=i == len(pieces) - 1):
            with autocast:
                loss, _ = forward(**piece)
            scaler.scale(loss / (count / distributed.size())).backward()
        total += loss.detach()
    return total


def gradient_norm(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> Tensor:
    """The norm of all gradients together, which are unscaled first."""
    scaler.unscale_(optimizer)
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return full_tensor(nn.utils.get_total_norm(gradients))
