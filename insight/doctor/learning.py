"""How the model begins and learns: its first loss, where gradients reach, one batch by heart, and the learning rate."""

import copy
import math
import statistics
from collections.abc import Iterator

import torch
from torch import Tensor

from insight.doctor.patient import Finding, NotChecked, Patient, rms
from model import GPT

FIRST_LOSS = 0.5  # nats above or below ln(vocabulary)
ROWS, LENGTH = 4, 32  # of the batch that is learned by heart
BY_HEART, STEPS = 0.5, 60  # share of the first loss that is left after so many steps
CHANGE = 1.0  # of a matrix in one step, in units of its size
RISE, RATE_STEPS = 1.0, 20  # nats that the loss may rise above its lowest, in so many steps
AWAKE = 4  # steps until gradients have come through all that begins at zero
NOWHERE = 0.99  # share of the first loss that may be left after RATE_STEPS


def first_loss(patient: Patient) -> Iterator[Finding]:
    """A new model expects every token alike, ln(vocabulary) nats; a trained one is better than that on its text."""
    vocabulary = math.log(patient.model.vocab_size)
    with torch.no_grad():
        total, count = patient.model(patient.tokens, targets=patient.targets)
    value = (total / count).item()
    if patient.trained and not value < vocabulary:
        what = f"on text of its kind it loses {value:.3f} nats a token, more than knowing nothing, {vocabulary:.3f}"
        do = "it reads other ids than it has learned: check tokenizer and text, then the weights"
        yield Finding("first loss", "the model", what, do, value, vocabulary)
    if not patient.trained and not abs(value - vocabulary) <= FIRST_LOSS:
        side, bound = ("above", FIRST_LOSS) if not value < vocabulary else ("below", -FIRST_LOSS)
        what = f"the first loss is {value:.3f} nats, {side} ln({patient.model.vocab_size:,}) = {vocabulary:.3f}"
        do = (
            "smaller initial weights of the head"
            if side == "above"
            else "it knows what it cannot know: look for a leak"
        )
        yield Finding("first loss", "head", what, do, value, vocabulary + bound)


def gradients(patient: Patient) -> Iterator[Finding]:
    """Every parameter gets a gradient, a finite one: in the first steps, for what begins at zero lets none through."""
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
            "look for detach(), no_grad, requires_grad=False on its way",
        ),
        (wild, "its gradient is not finite", "on_nonfinite=stop in training says in which module it begins"),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield Finding("gradients", names[0] + more, what, do, 0.0 if names is silent else None, 0.0)


def one_batch(patient: Patient) -> Iterator[Finding]:
    """It learns one batch by heart, with a plain Adam of ours: what cannot do that cannot learn anything."""
    first = None
    for loss in _learn(_copy(patient), *_batch(patient), STEPS, patient.progress):
        first = loss if first is None else first
        if loss < BY_HEART * first:
            return
    what = f"one batch is not learned by heart: {first:.3f} nats, after {STEPS} steps {loss:.3f}"
    do = "look at the findings before; then whether targets are the tokens that follow"
    yield Finding("one batch", "the model", what, do, loss, BY_HEART * first)


def learning_rate(patient: Patient) -> Iterator[Finding]:
    """At the peak of its learning rate, a new model of this shape learns one batch and is not thrown back.

    By the optimizer and the settings of training, without the warm-up, on the same batch over and over. What counts is
    what a step does, whatever its optimizer is called: one of the first that changes a matrix by more than its size
    leaves nothing of how it began, and a rate that is too high for the width lifts the loss far above what it was.
    """
    if patient.start_training is None:
        raise NotChecked("the settings of its training are not known")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(patient.model.vocab_size, patient.model.config).to(patient.model.embedding.weight.device)
    model.eval()  # without dropout
    step, batch = patient.start_training(model), _batch(patient)
    matrices, losses = _begun(model), []
    lower = "divide the learning rate by 10 and look again"
    for i in patient.progress(range(1, RATE_STEPS + 1)):
        before = {name: weight.detach().clone() for name, weight in matrices.items()} if i <= AWAKE else {}
        losses.append(step(*batch))
        changes = {name: rms(matrices[name] - weight) / rms(weight) for name, weight in before.items()}
        name, ratio = max(changes.items(), key=lambda item: item[1], default=("", 0.0))
        if not ratio <= CHANGE:
            what = f"at its peak step {i} changes it by {ratio:.3g} times its size"
            yield Finding("learning rate", f"optimizer, {name}", what, lower, ratio, CHANGE)
            return
        lowest = min(losses[:-1], default=losses[0])
        if not losses[-1] <= lowest + RISE:
            what = f"at its peak the loss rises from {lowest:.2f} to {losses[-1]:.2f} nats by step {i}"
            yield Finding("learning rate", "optimizer", what, lower, losses[-1], lowest + RISE)
            return
    if not losses[-1] < NOWHERE * losses[0]:
        what = f"at its peak the loss goes from {losses[0]:.4f} to {losses[-1]:.4f} nats in {RATE_STEPS} steps: nowhere"
        do = "multiply the learning rate by 10 and look again"
        yield Finding("learning rate", "optimizer", what, do, losses[-1], NOWHERE * losses[0])


def _begun(model: GPT) -> dict[str, Tensor]:
    """The matrices that begin at a size of their own. What begins at zero, or near, grows from there."""
    matrices = {name: parameter for name, parameter in model.named_parameters() if parameter.ndim == 2}
    usual = statistics.median(rms(weight) for weight in matrices.values())
    return {name: weight for name, weight in matrices.items() if rms(weight) > usual / 20}


def _copy(patient: Patient) -> GPT:
    return copy.deepcopy(patient.model).eval()


def _batch(patient: Patient) -> tuple[Tensor, Tensor]:
    return patient.tokens[:ROWS, :LENGTH], patient.targets[:ROWS, :LENGTH]


def _learn(model: GPT, tokens: Tensor, targets: Tensor, steps: int, progress=iter) -> Iterator[float]:
    """Mean losses of so many steps of Adam, each before its update; gradients are there when a loss comes."""
    optimizer = torch.optim.Adam(model.parameters(), lr=min(3e-3, 0.3 / model.config.d_model))
    for _ in progress(range(steps)):
        optimizer.zero_grad()
        total, count = model(tokens, targets=targets)
        (total / count).backward()
        yield (total / count).item()
        optimizer.step()
