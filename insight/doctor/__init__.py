"""Finds what is wrong with a model: the checks that a good engineer would make, from causes to consequences.

| file | what it checks |
| --- | --- |
| weights.py | the weights themselves |
| attention.py | the functions that compute attention |
| layers.py | heads, positions, rotation |
| paths.py | ways through the model that must agree: future tokens, padding, documents, cache, kernels |
| vocabulary.py | tokenizer, text and model |
| signals.py | attention scores and activations on the model's kind of text |
| learning.py | the first loss, gradients, learning |
| reference.py | a second implementation of attention, for comparison |

The checks in attention.py, layers.py and paths.py run the model's code in float64 with random weights, large enough to
reveal every fault; those in weights.py, signals.py and learning.py use the model's own weights.
"""

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from insight.doctor import attention, layers, learning, paths, signals, vocabulary, weights
from insight.doctor.patient import Finding, NotChecked, Patient

# The order matters: earlier findings explain later ones.
CHECKS: dict[str, Callable[[Patient], Iterator[Finding]]] = {
    "finite weights": weights.finite_weights,
    "vocabulary": vocabulary.vocabulary,
    "tied weights": weights.tied_weights,
    "tokenizer": vocabulary.tokenizer,
    "initial scale": weights.initial_scale,
    "position tables": layers.position_tables,
    "masked weights": attention.masked_weights,
    "row sums": attention.row_sums,
    "all-masked row": attention.all_masked_row,
    "scores": attention.scores,
    "values": attention.values,
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
FATAL = ("finite weights", "vocabulary")  # after a finding of these, no other check is meaningful

__all__ = ["CHECKS", "Finding", "NotChecked", "Patient", "Result", "examine", "run"]


@dataclass(frozen=True)
class Result:
    """The findings of a check, or the reason why it was not made."""

    check: str
    findings: list[Finding]
    not_checked: str | None
    seconds: float


def run(patient: Patient) -> Iterator[Result]:
    """Yields the result of each check as soon as it is done. Leaves the caller's random state alone."""
    ill = None
    for name in CHECKS:
        began, findings, not_checked = time.perf_counter(), [], ill
        if ill is None:
            with torch.random.fork_rng(devices=[]):
                findings, not_checked = _check(name, patient)
        if findings and name in FATAL:
            ill = f"first fix: {name}"
        yield Result(name, findings, not_checked, time.perf_counter() - began)


def _check(name: str, patient: Patient) -> tuple[list[Finding], str | None]:
    """(findings, the reason why it was not made). An error raised by the model is a finding too."""
    try:
        return list(CHECKS[name](patient)), None
    except NotChecked as reason:
        return [], str(reason)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if not {"insight", "torch", "einops"} & set(Path(frame.filename).parts)]
        at = (ours or frames)[-1]
        what = f"the check fails: {type(error).__name__}: {' '.join(str(error).split())}"
        where = f"{at.filename}:{at.lineno}, {at.name}"
        return [Finding(name, where, what, "first fix what raises this error")], None


def examine(patient: Patient) -> list[Finding]:
    """All findings, causes before consequences; none for a healthy model."""
    return [finding for result in run(patient) for finding in result.findings]
