"""The learning rate as a pure function of the step."""

import math


def learning_rate(step: int, *, steps: int, peak: float, warmup: int, decay: str, final: float) -> float:
    """The rate of step 0 .. steps - 1.

    Rises in a line over `warmup` steps, from peak / warmup at step 0 to the peak, then falls to final * peak at the
    end: along half a "cosine", in a "linear" way, or not at all ("constant").
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    remaining = {
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "linear": 1 - done,
        "constant": 1.0,
    }[decay]
    return peak * (final + (1 - final) * remaining)
