"""Finds what is wrong with a model: the checks that a good engineer would make, from causes to consequences.

| file | what it looks at |
| --- | --- |
| weights.py | the numbers as they lie there |
| kernels.py | attention between queries, keys and values |
| layers.py | heads, positions, rotation |
| paths.py | the whole model by ways that must agree: the future, padding, documents, cache, kernels |
| vocabulary.py | tokenizer, text and model |
| signals.py | what flows through it on text of its kind |
| learning.py | how it begins and learns |
| reference.py | attention once more, for comparison |

The checks of kernels.py, layers.py and paths.py run the model's code on random weights of a size at which every fault
shows, in float64; those of weights.py, signals.py and learning.py see the weights as they are.
"""

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from insight.doctor import kernels, layers, learning, paths, signals, vocabulary, weights
from insight.doctor.patient import Finding, NotChecked, Patient

# In this order: what comes first explains what comes later. Behind a finding of the first group nothing can be judged.
CHECKS: dict[str, Callable[[Patient], Iterator[Finding]]] = {
    "finite weights": weights.finite_weights,
    "vocabulary": vocabulary.vocabulary,
    "tied weights": weights.tied_weights,
    "tokenizer": vocabulary.tokenizer,
    "initial scale": weights.initial_scale,
    "position tables": layers.position_tables,
    "masked weights": kernels.masked_weights,
    "row sums": kernels.row_sums,
    "all-masked row": kernels.all_masked_row,
    "scores": kernels.scores,
    "values": kernels.values,
    "head order": layers.head_order,
    "token positions": layers.token_positions,
    "rotation": layers.rotation,
    "row masks": paths.row_masks,
    "padding": paths.padding,
    "documents": paths.documents,
    "leak": paths.leak,
    "cache": paths.cache,
    "fused kernel": paths.fused_kernel,
    "functions": paths.functions,
    "padded ids": vocabulary.padded_ids,
    "score size": signals.score_size,
    "saturation": signals.saturation,
    "entropy": signals.entropy,
    "residual stream": signals.residual_stream,
    "activations": signals.activations,
    "first loss": learning.first_loss,
    "gradients": learning.gradients,
    "learning rate": learning.learning_rate,
    "one batch": learning.one_batch,
}
FATAL = ("finite weights", "vocabulary")

__all__ = ["CHECKS", "Finding", "NotChecked", "Patient", "Result", "examine", "run"]


@dataclass(frozen=True)
class Result:
    """What a check has found, or why it was not made."""

    check: str
    findings: list[Finding]
    not_checked: str | None
    seconds: float


def run(patient: Patient) -> Iterator[Result]:
    """One check after the other, each as soon as it is done. Draws no random numbers of the caller's."""
    ill = None
    for name in CHECKS:
        began, findings, not_checked = time.perf_counter(), [], ill
        if ill is None:
            with torch.random.fork_rng(devices=[]):
                findings, not_checked = _check(name, patient)
        if findings and name in FATAL:
            ill = f"{name} come first"
        yield Result(name, findings, not_checked, time.perf_counter() - began)


def _check(name: str, patient: Patient) -> tuple[list[Finding], str | None]:
    """(findings, why it was not made). That the model raises an error is a finding too."""
    try:
        return list(CHECKS[name](patient)), None
    except NotChecked as reason:
        return [], str(reason)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if not {"insight", "torch", "einops"} & set(Path(frame.filename).parts)]
        at = (ours or frames)[-1]
        what = f"it cannot be made: {type(error).__name__}: {' '.join(str(error).split())}"
        where = f"{at.filename}:{at.lineno}, {at.name}"
        return [Finding(name, where, what, "mend first what raises this error")], None


def examine(patient: Patient) -> list[Finding]:
    """All findings, causes before consequences; none for a healthy model."""
    return [finding for result in run(patient) for finding in result.findings]
