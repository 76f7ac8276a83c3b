"""Checks activations on the model's kind of text: attention scores and weights, the residual stream, hidden units."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from insight.doctor import reference
from insight.doctor.patient import Finding, NotChecked, Patient, rms, watched
from model.hooks import Site, recording

LARGE_SCORE = 100.0  # the score from which "Kimi K2: Open Agentic Intelligence" (2025) clips
ATTENTION_ROWS = 2  # rows of the batch for which the full attention weights are computed
SATURATED = 0.99  # a larger weight leaves less than a hundredth of the gradient
LARGE_ACTIVATION = 1e4  # float16 overflows at 65504
OUTLIER = 30.0  # times the output of the other branches
GROWTH = 30.0  # of a new model's stream, from first to last; six healthy blocks of width 512 have 7
SOME_KEYS = 4  # keys that a query must attend to for its weights to be informative
DEAD_UNITS = 0.9  # fraction of a layer's hidden units


def _attention(patient: Patient) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """(layer, scores, weights, mask) (b h q k) of each layer on the patient's text, by the reference."""
    model = patient.model
    with torch.no_grad(), watched(model) as layers:
        model(patient.tokens[:ATTENTION_ROWS])
    for i, layer in enumerate(layers):
        q, k, _, mask, bias, soft_cap, _ = layer.arguments
        q, k = q.double().cpu(), k.double().cpu()
        mask = reference.causal(q.shape[2], k.shape[2]) if mask is None else mask.cpu()
        bias = 0.0 if bias is None else bias.double().cpu()
        scores = q @ reference.shared(k, q.shape[1]).transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
        yield i, scores, reference.attention_weights(q, k, mask, bias, soft_cap), mask.expand_as(scores)


def score_size(patient: Patient) -> Iterator[Finding]:
    """Scores are small enough for stable training ("Scaling Vision Transformers to 22B Parameters", 2023)."""
    for i, scores, _, mask in _attention(patient):
        largest = scores.masked_fill(~mask, 0.0).abs().amax((0, 2, 3))
        for h in (largest > LARGE_SCORE).nonzero().flatten().tolist():
            what = f"scores reach {largest[h]:.3g} in absolute value"
            do = "model.qk_norm=true bounds them; or model.soft_cap=50, or a lower learning rate"
            yield Finding("score size", f"blocks.{i}.attention, head {h}", what, do, largest[h].item(), LARGE_SCORE)


def saturation(patient: Patient) -> Iterator[Finding]:
    """Heads attend to more than one key: a saturated softmax passes no gradient.

    In a new model this holds for every head. A trained head may have learned to attend to a single key, such as the
    token before; but if all heads of a layer do, they have collapsed ("Stabilizing Transformer Training by Preventing
    Attention Entropy Collapse", 2023).
    """
    for i, _, weights, mask in _attention(patient):
        share = _of_queries_that_choose((weights > SATURATED).any(-1).double(), mask)
        collapsed = share > 0.9
        if patient.trained and not collapsed.all():
            continue
        for h in collapsed.nonzero().flatten().tolist():
            what = f"{100 * share[h]:.0f} % of its queries have a weight above {SATURATED} on a single key"
            do = "scores are too large: check 1/sqrt(d_head) and the size of wq and wk; model.qk_norm=true bounds them"
            yield Finding("saturation", f"blocks.{i}.attention, head {h}", what, do, share[h].item(), 0.9)


def entropy(patient: Patient) -> Iterator[Finding]:
    """The weights of a trained head depend on the key: a uniform head has learned nothing."""
    if not patient.trained:
        raise NotChecked("it is not trained yet")
    if patient.model.config.positions == "alibi":
        raise NotChecked("with ALiBi even an untrained head prefers near keys")
    for i, _, weights, mask in _attention(patient):
        nats = -(weights * weights.clamp(min=1e-300).log()).sum(-1)
        most = mask.sum(-1).double().log()
        if mask.sum(-1).max() < SOME_KEYS:
            raise NotChecked(f"no token attends to {SOME_KEYS} keys")
        missing = _of_queries_that_choose(1 - nats / most.clamp(min=1e-30), mask)  # relative to the maximum entropy
        for h in (missing < 1e-6).nonzero().flatten().tolist():
            what = "its weights are the same for all keys: its queries or keys are dead"
            do = f"check the rows of head {h} in wq and wk; a head of zeros may be pruned or initialised again"
            yield Finding("entropy", f"blocks.{i}.attention, head {h}", what, do, missing[h].item(), 1e-6)


def _of_queries_that_choose(x: Tensor, mask: Tensor) -> Tensor:
    """The mean (h) of x (b h q) over the queries that attend to SOME_KEYS keys or more."""
    chooses = (mask.sum(-1) >= SOME_KEYS).double().expand_as(x)
    return (x * chooses).sum((0, 2)) / chooses.sum((0, 2)).clamp(min=1)


def _recorded(patient: Patient) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the stream after the embedding and each block, the hidden units and outputs of each branch), by name."""
    model, stream, inside = patient.model, {"embedding": Site("stream", 0)}, {}
    for i, block in enumerate(model.blocks):
        stream[f"blocks.{i}"] = Site("stream", i + 1)
        inside[f"blocks.{i}.attention"] = Site("attention", i)
        if hasattr(block.feed_forward, "down"):
            inside[f"blocks.{i}.feed_forward.down"] = Site("hidden", i)
        inside[f"blocks.{i}.feed_forward"] = Site("feed_forward", i)
    with torch.no_grad(), recording(model, [*stream.values(), *inside.values()]) as found:
        model(patient.tokens)
    return {name: found[site] for name, site in stream.items()}, {name: found[site] for name, site in inside.items()}


def residual_stream(patient: Patient) -> Iterator[Finding]:
    """The residual stream neither explodes nor collapses, and no branch adds far more than the others."""
    stream, inside = _recorded(patient)
    branches = {name: rms(x) for name, x in inside.items() if not name.endswith(".down")}
    writing = sorted(size for size in branches.values() if size > 0)
    if writing and len(writing) > 2:
        usual = writing[(len(writing) - 1) // 2]
        bound = OUTLIER * (10 if patient.trained else 1)
        for name, size in branches.items():
            if size > bound * usual:
                what = f"it adds {size / usual:.3g} times as much to the residual stream as the other branches"
                do = "check the size of its last matrix (wo or down), then of those before it"
                yield Finding("residual stream", name, what, do, size / usual, bound)
    for name, x in stream.items():
        largest = x.abs().max().item()
        if not largest < LARGE_ACTIVATION:
            what = f"the residual stream reaches {largest:.3g}"
            do = "lower the learning rate or raise weight decay; float16 would overflow soon"
            yield Finding("residual stream", name, what, do, largest, LARGE_ACTIVATION)
            return
    sizes = {name: rms(x) for name, x in stream.items()}
    if not patient.trained and not (growth := max(sizes.values()) / max(sizes["embedding"], 1e-300)) <= GROWTH:
        what = "its size by depth is " + ", ".join(f"{size:.3g}" for size in sizes.values()) + ": the input is lost"
        do = "initialise the branches with smaller weights, or their last matrices to zero (model.zero_init=true)"
        yield Finding("residual stream", max(sizes, key=sizes.__getitem__), what, do, growth, GROWTH)
    last = stream[list(stream)[-1]].double()
    spread = (last - last.mean((0, 1))).square().mean().sqrt().item() / max(rms(last), 1e-300)
    if not spread > 1e-4 and len(patient.tokens.unique()) > 1:
        what = "all tokens are the same at the end of the stream: the input is lost"
        do = "look for a branch that dominates the stream"
        yield Finding("residual stream", list(stream)[-1], what, do, spread, 1e-4)


def activations(patient: Patient) -> Iterator[Finding]:
    """Hidden units of feed-forward layers are finite, of normal size, and not zero on every token."""
    _, inside = _recorded(patient)
    for name, x in inside.items():
        largest = x.abs().max().item()
        if not largest < LARGE_ACTIVATION:
            do = "check the weights before it; float16 would overflow soon"
            yield Finding("activations", name, f"activations reach {largest:.3g}", do, largest, LARGE_ACTIVATION)
        elif name.endswith(".down"):
            peaks = x.abs().flatten(0, -2).amax(0)
            dead = (peaks <= 1e-6 * max(largest, 1e-30)).double().mean().item()
            if dead > DEAD_UNITS:
                what = f"{100 * dead:.0f} % of its hidden units are zero on all {x[..., 0].numel()} tokens"
                do = "check size and sign of gate and up before it; too high a learning rate kills ReLUs"
                yield Finding("activations", name.removesuffix(".down"), what, do, dead, DEAD_UNITS)
