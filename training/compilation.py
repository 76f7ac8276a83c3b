"""torch.compile, where it works."""

from collections.abc import Callable

import torch
from torch import Tensor

from model.gpt import GPT


def compile_forward(
    model: GPT, batch: dict[str, Tensor], autocast: torch.autocast, warn: Callable[[str], None]
) -> Callable:
    """A compiled model(**batch) for exactly these shapes, tried out; the model itself if that fails.

    The model stays as it is, for evaluation and sampling in other shapes, and shares its weights with the result. The
    trial leaves no gradient and draws no random number.
    """
    compiled = torch.compile(model, dynamic=False)
    device = batch["tokens"].device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            with autocast:
                loss, _ = compiled(**batch)
            loss.backward()
        except Exception as error:  # of many kinds: no compiler, no headers, an operation that is not covered
            reason = next(iter(str(error).splitlines()), "")
            warn(f"torch.compile failed, going on without: {type(error).__name__}: {reason}")
            compiled = model
    model.zero_grad(set_to_none=True)
    return compiled
