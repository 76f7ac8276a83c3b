"""Checks the weights themselves, before anything is computed with them."""

import math
import statistics
from collections.abc import Iterator

from torch import Tensor, nn

from insight.doctor.patient import Finding, NotChecked, Patient, rms


def finite_weights(patient: Patient) -> Iterator[Finding]:
    """No weight and no buffer holds NaN or an infinity."""
    tensors = [*patient.model.named_parameters(), *patient.model.named_buffers()]
    for name, tensor in tensors:
        if tensor.is_floating_point() and (bad := (~tensor.isfinite()).sum().item()):
            first = tuple((~tensor.isfinite()).nonzero()[0].tolist())
            what = f"{bad} of {tensor.numel():,} numbers are not finite, first {tensor[first].item()} at {list(first)}"
            do = "use an earlier checkpoint; continue with on_nonfinite=stop, which reports where it starts"
            yield Finding("finite weights", name, what, do, bad, 0)


def tied_weights(patient: Patient) -> Iterator[Finding]:
    """Embedding and head are one matrix if tied=true, and two if not."""
    embedding, head = patient.model.embedding.weight, patient.model.head.weight
    tied, one = patient.model.config.tied, embedding.data_ptr() == head.data_ptr()
    if tied and not one:
        value = (embedding - head).abs().max().item()
        what = f"tied=true, but embedding and head are two matrices that differ by up to {value:.3g}"
        do = "after everything that replaces a parameter, set model.head.weight = model.embedding.weight"
        yield Finding("tied weights", "head.weight", what, do, value, 0.0)
    if one and not tied:
        what = "tied=false, but embedding and head share one matrix: a checkpoint would save it as two"
        yield Finding("tied weights", "head.weight", what, "build the model with tied=true, or copy the matrix")


READERS = {"attention": ("wq", "wk", "wv"), "feed_forward": ("gate", "up")}
WRITERS = {"attention": ("wo",), "feed_forward": ("down",)}


def initial_scale(patient: Patient) -> Iterator[Finding]:
    """In a new model, the matrices that read the residual stream have one size; those that write into it are smaller.

    The 2 n_layers branches add up: GPT-2 divides the latter by sqrt(2 n_layers), others initialise them to zero.
    """
    if patient.trained:
        raise NotChecked("it is trained")
    readers, writers = (dict(_matrices(patient.model, names)) for names in (READERS, WRITERS))
    usual = statistics.median(rms(weight) for weight in readers.values())
    for name, weight in readers.items():
        ratio, slack = rms(weight) / usual if usual else 1.0, _slack(weight)
        if not 1 / slack < ratio < slack:
            what = f"it is initialised {ratio:.3g} times as large as the other matrices that read the stream"
            do = "scale down only the matrices that write into the stream (wo, down)"
            yield Finding("initial scale", name, what, do, ratio, slack if ratio > 1 else 1 / slack)
    small = 1 / math.sqrt(2 * len(patient.model.blocks))
    for name, weight in writers.items():
        widths = math.sqrt(patient.model.config.d_model / weight.shape[1])  # each may be scaled by its own width
        ratio, bound = rms(weight) / usual if usual else 0.0, small * max(1.0, widths) * _slack(weight)
        if ratio > bound:
            what = f"it is initialised {ratio:.3g} times as large as the readers; 2 n_layers such branches add up"
            do = "divide its initial values by sqrt(2 n_layers), or initialise it to zero"
            yield Finding("initial scale", name, what, do, ratio, bound)


def _matrices(model: nn.Module, names: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, Tensor]]:
    for i, block in enumerate(model.blocks):
        for branch, matrices in names.items():
            for matrix in matrices:
                if (module := getattr(getattr(block, branch), matrix, None)) is not None:
                    yield f"blocks.{i}.{branch}.{matrix}", module.weight


def _slack(weight: Tensor) -> float:
    """The factor by which the rms of random numbers may differ from the intended one."""
    return 1.25 + 6 / math.sqrt(2 * weight.numel())
