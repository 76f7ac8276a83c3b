"""What flows through the model on text of its kind: attention's sharpness, the residual stream, activations."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from insight.doctor import reference
from insight.doctor.patient import Finding, NotChecked, Patient, rms, watched
from model.hooks import Site, recording

LARGE_SCORE = 100.0  # where "Kimi K2: Open Agentic Intelligence" (2025) begins to clip
ATTENTION_ROWS = 2  # of the batch, whose squares of weights are held
SATURATED = 0.99  # a weight above leaves a hundredth of its gradient
LARGE_ACTIVATION = 1e4  # float16 ends at 65504
OUTLIER = 30.0  # times what the other branches write
GROWTH = 30.0  # of a new stream, from the embedding to its end; in six healthy blocks of width 512 it is 7
SOME_KEYS = 4  # that a query must see for its choice to say anything
DEAD_UNITS = 0.9  # share of a layer's hidden units


def _attention(patient: Patient) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """(layer, scores, weights, mask) (b h q k) of each layer on the patient's text, by the reference's mathematics."""
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
    """Scores stay of a size at which training is stable ("Scaling Vision Transformers to 22B Parameters", 2023)."""
    for i, scores, _, mask in _attention(patient):
        largest = scores.masked_fill(~mask, 0.0).abs().amax((0, 2, 3))
        for h in (largest > LARGE_SCORE).nonzero().flatten().tolist():
            what = f"scores reach {largest[h]:.3g} in size"
            do = "model.qk_norm=true bounds them; or model.soft_cap=50, or a lower learning rate"
            yield Finding("score size", f"blocks.{i}.attention, head {h}", what, do, largest[h].item(), LARGE_SCORE)


def saturation(patient: Patient) -> Iterator[Finding]:
    """Heads look at more than one place: a softmax that has saturated passes no gradient on.

    In a new model this holds for every head. A trained head may have learned to look at one place, such as the token
    before; all heads of a layer at once have collapsed ("Stabilizing Transformer Training by Preventing Attention
    Entropy Collapse", 2023).
    """
    for i, _, weights, mask in _attention(patient):
        share = _of_queries_that_choose((weights > SATURATED).any(-1).double(), mask)
        collapsed = share > 0.9
        if patient.trained and not collapsed.all():
            continue
        for h in collapsed.nonzero().flatten().tolist():
            what = f"{100 * share[h]:.0f} % of its queries give more than {SATURATED} to a single key"
            do = "scores too large: check 1/sqrt(d_head) and the size of wq and wk; model.qk_norm=true bounds them"
            yield Finding("saturation", f"blocks.{i}.attention, head {h}", what, do, share[h].item(), 0.9)


def entropy(patient: Patient) -> Iterator[Finding]:
    """A trained head chooses: one whose weights are the same for all keys has not learned to look."""
    if not patient.trained:
        raise NotChecked("it has not learned yet where to look")
    if patient.model.config.positions == "alibi":
        raise NotChecked("ALiBi prefers what is near, whatever the head has learned")
    for i, _, weights, mask in _attention(patient):
        nats = -(weights * weights.clamp(min=1e-300).log()).sum(-1)
        most = mask.sum(-1).double().log()
        if mask.sum(-1).max() < SOME_KEYS:
            raise NotChecked(f"no token sees {SOME_KEYS} others")
        missing = _of_queries_that_choose(1 - nats / most.clamp(min=1e-30), mask)  # share of what it could be
        for h in (missing < 1e-6).nonzero().flatten().tolist():
            what = "its weights are the same for all keys: it averages, and its queries or keys are dead"
            do = f"look at rows of head {h} in wq and wk; a head of zeros may be pruned or begun anew"
            yield Finding("entropy", f"blocks.{i}.attention, head {h}", what, do, missing[h].item(), 1e-6)


def _of_queries_that_choose(x: Tensor, mask: Tensor) -> Tensor:
    """The mean (h) of x (b h q) over the queries that see SOME_KEYS or more."""
    chooses = (mask.sum(-1) >= SOME_KEYS).double().expand_as(x)
    return (x * chooses).sum((0, 2)) / chooses.sum((0, 2)).clamp(min=1)


def _recorded(patient: Patient) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the stream after the embedding and each block, what each branch holds and writes) in one forward, by name."""
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
    """The stream neither explodes nor dies on its way up, and no branch writes far more than the others."""
    stream, inside = _recorded(patient)
    branches = {name: rms(x) for name, x in inside.items() if not name.endswith(".down")}
    writing = sorted(size for size in branches.values() if size > 0)
    if writing and len(writing) > 2:
        usual = writing[(len(writing) - 1) // 2]
        bound = OUTLIER * (10 if patient.trained else 1)
        for name, size in branches.items():
            if size > bound * usual:
                what = f"it writes {size / usual:.3g} times as much into the residual stream as the other branches"
                do = "look at the size of its last matrix (wo or down), then of those before"
                yield Finding("residual stream", name, what, do, size / usual, bound)
    for name, x in stream.items():
        largest = x.abs().max().item()
        if not largest < LARGE_ACTIVATION:
            what = f"numbers of the residual stream reach {largest:.3g}"
            do = "lower the learning rate or raise weight decay; float16 would overflow soon"
            yield Finding("residual stream", name, what, do, largest, LARGE_ACTIVATION)
            return
    sizes = {name: rms(x) for name, x in stream.items()}
    if not patient.trained and not (growth := max(sizes.values()) / max(sizes["embedding"], 1e-300)) <= GROWTH:
        what = "its size by depth is " + ", ".join(f"{size:.3g}" for size in sizes.values()) + ": what was read drowns"
        do = "smaller initial weights in the branches, or begin what writes into the stream at zero"
        yield Finding("residual stream", max(sizes, key=sizes.__getitem__), what, do, growth, GROWTH)
    last = stream[list(stream)[-1]].double()
    spread = (last - last.mean((0, 1))).square().mean().sqrt().item() / max(rms(last), 1e-300)
    if not spread > 1e-4 and len(patient.tokens.unique()) > 1:
        what = "all tokens are alike at the end of the stream: what was read has been lost"
        yield Finding("residual stream", list(stream)[-1], what, "look for a branch that drowns the rest", spread, 1e-4)


def activations(patient: Patient) -> Iterator[Finding]:
    """Hidden units of feed-forwards are finite, of a usual size, and not silent on every token."""
    _, inside = _recorded(patient)
    for name, x in inside.items():
        largest = x.abs().max().item()
        if not largest < LARGE_ACTIVATION:
            do = "look at the weights before it; float16 would overflow soon"
            yield Finding("activations", name, f"activations reach {largest:.3g}", do, largest, LARGE_ACTIVATION)
        elif name.endswith(".down"):
            peaks = x.abs().flatten(0, -2).amax(0)
            dead = (peaks <= 1e-6 * max(largest, 1e-30)).double().mean().item()
            if dead > DEAD_UNITS:
                what = f"{100 * dead:.0f} % of its hidden units are silent on all {x[..., 0].numel()} tokens"
                do = "look at the size and sign of gate and up before it; a rate that was too high kills ReLUs"
                yield Finding("activations", name.removesuffix(".down"), what, do, dead, DEAD_UNITS)
