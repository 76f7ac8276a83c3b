"""Checks learning: the first loss, which weights get gradients, overfitting one batch, and the learning rate."""

import copy
import math
import statistics
from collections.abc import Iterator

import torch
from torch import Tensor

from insight.doctor.patient import Finding, NotChecked, Patient, rms
from model import GPT

FIRST_LOSS = 0.5  # nats above or below ln(vocabulary)
ROWS, LENGTH = 4, 32  # the size of the batch that is overfitted
OVERFITTED, STEPS = 0.5, 60  # the fraction of the first loss that must be reached in this many steps
CHANGE = 1.0  # the largest change of a matrix in one step, relative to its size
RISE, LR_STEPS = 1.0, 20  # nats that the loss may rise above its minimum, within this many steps
AWAKE = 4  # steps until gradients have passed everything that is initialised to zero
NOWHERE = 0.99  # the fraction of the first loss below which the loss must be after LR_STEPS


def first_loss(patient: Patient) -> Iterator[Finding]:
    """A new model's loss is that of a uniform guess, ln(vocabulary) nats; a trained one's is lower."""
    vocabulary = math.log(patient.model.vocab_size)
    with torch.no_grad():
        total, count = patient.model(patient.tokens, targets=patient.targets)
    value = (total / count).item()
    if patient.trained and not value < vocabulary:
        what = f"its loss on its kind of text is {value:.3f} nats/token, worse than a uniform guess ({vocabulary:.3f})"
        do = "its ids are probably not those of its training: check tokenizer and text, then the weights"
        yield Finding("first loss", "the model", what, do, value, vocabulary)
    if not patient.trained and not abs(value - vocabulary) <= FIRST_LOSS:
        side, bound = ("above", FIRST_LOSS) if not value < vocabulary else ("below", -FIRST_LOSS)
        what = f"the first loss is {value:.3f} nats, {side} ln({patient.model.vocab_size:,}) = {vocabulary:.3f}"
        do = (
            "initialise the head with smaller weights"
            if side == "above"
            else "it predicts better than is possible: look for a leak of future tokens"
        )
        yield Finding("first loss", "head", what, do, value, vocabulary + bound)


def gradients(patient: Patient) -> Iterator[Finding]:
    """Every parameter gets a finite gradient within the first steps; weights initialised to zero block it at first."""
    model = _copy(patient)
    reached = {name: 0.0 for name, _ in model.named_parameters()}
    for _ in _learn(model, *_batch(patient), AWAKE):
        for name, parameter in model.named_parameters():
            size = 0.0 if parameter.grad is None else parameter.grad.abs().max().item()
            reached[name] = max(reached[name], size) if math.isfinite(size) else math.nan
    silent = [name for name, size in reached.items() if size == 0]
    wild = [name for name, size in reached.items() if math.isnan(size)]
    for names, what, do in (
        (
            silent,
            "no gradient reaches it: it cannot learn",
            "look for detach(), no_grad or requires_grad=False on the way",
        ),
        (wild, "its gradient is not finite", "train with on_nonfinite=stop, which reports the module where it starts"),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield Finding("gradients", names[0] + more, what, do, 0.0 if names is silent else None, 0.0)


def one_batch(patient: Patient) -> Iterator[Finding]:
    """It overfits one batch, with plain Adam: a model that cannot do that cannot learn anything."""
    first = None
    for loss in _learn(_copy(patient), *_batch(patient), STEPS, patient.progress):
        first = loss if first is None else first
        if loss < OVERFITTED * first:
            return
    what = f"it does not overfit one batch: {first:.3f} nats at first, {loss:.3f} after {STEPS} steps"
    do = "see the findings above; then check that targets are the next tokens"
    yield Finding("one batch", "the model", what, do, loss, OVERFITTED * first)


def learning_rate(patient: Patient) -> Iterator[Finding]:
    """At its initial learning rate, a new model of this shape learns one batch without diverging.

    With the optimizer and the settings of training, without warm-up, on the same batch again and again. A step at the
    start that changes a matrix by more than its size destroys its initialisation, and a learning rate that is too high
    for the width raises the loss far above its first value.
    """
    if patient.start_training is None:
        raise NotChecked("the settings of its training are not known")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(patient.model.vocab_size, patient.model.config).to(patient.model.embedding.weight.device)
    model.eval()  # without dropout
    step, batch = patient.start_training(model), _batch(patient)
    matrices, losses = _begun(model), []
    lower = "divide the learning rate by 10 and check again"
    for i in patient.progress(range(1, LR_STEPS + 1)):
        before = {name: weight.detach().clone() for name, weight in matrices.items()} if i <= AWAKE else {}
        losses.append(step(*batch))
        changes = {name: rms(matrices[name] - weight) / rms(weight) for name, weight in before.items()}
        name, ratio = max(changes.items(), key=lambda item: item[1], default=("", 0.0))
        if not ratio <= CHANGE:
            what = f"at the initial learning rate, step {i} changes it by {ratio:.3g} times its size"
            yield Finding("learning rate", f"optimizer, {name}", what, lower, ratio, CHANGE)
            return
        lowest = min(losses[:-1], default=losses[0])
        if not losses[-1] <= lowest + RISE:
            what = (
                f"at the initial learning rate the loss rises from {lowest:.2f} to {losses[-1]:.2f} nats in {i} steps"
            )
            yield Finding("learning rate", "optimizer", what, lower, losses[-1], lowest + RISE)
            return
    if not losses[-1] < NOWHERE * losses[0]:
        what = f"in {LR_STEPS} steps the loss only falls from {losses[0]:.4f} to {losses[-1]:.4f} nats"
        do = "multiply the learning rate by 10 and check again"
        yield Finding("learning rate", "optimizer", what, do, losses[-1], NOWHERE * losses[0])


def _begun(model: GPT) -> dict[str, Tensor]:
    """The matrices that are not initialised to zero, or close to it."""
    matrices = {name: parameter for name, parameter in model.named_parameters() if parameter.ndim == 2}
    usual = statistics.median(rms(weight) for weight in matrices.values())
    return {name: weight for name, weight in matrices.items() if rms(weight) > usual / 20}


def _copy(patient: Patient) -> GPT:
    return copy.deepcopy(patient.model).eval()


def _batch(patient: Patient) -> tuple[Tensor, Tensor]:
    return patient.tokens[:ROWS, :LENGTH], patient.targets[:ROWS, :LENGTH]


def _learn(model: GPT, tokens: Tensor, targets: Tensor, steps: int, progress=iter) -> Iterator[float]:
    """Yields the mean loss of each step of Adam before its update, when the gradients are set."""
    optimizer = torch.optim.Adam(model.parameters(), lr=min(3e-3, 0.3 / model.config.d_model))
    for _ in progress(range(steps)):
        optimizer.zero_grad()
        total, count = model(tokens, targets=targets)
        (total / count).backward()
        yield (total / count).item()
        optimizer.step()
