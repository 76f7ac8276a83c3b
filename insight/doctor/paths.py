"""Checks ways through the model that must agree: future tokens, padding, documents, cache, kernels."""

import copy
import math
from collections.abc import Iterator
from dataclasses import fields, replace

import torch
from torch import Tensor

from insight.doctor.patient import SAME, Finding, NotChecked, Patient, deviation, watched, worst_heads
from model import GPT
from model.hooks import Site, editing
from model.ops import MATH, TORCH, Ops

TOO_SHORT = "it needs 3 positions"


def leak(patient: Patient) -> Iterator[Finding]:
    """No token depends on a later one, in its values or its gradients, on any path.

    Changing tokens shows that there is a leak; the gradients within each block show in which block.
    """
    model, T = patient.probe, patient.length
    if T < 3:
        raise NotChecked(TOO_SHORT)
    tokens, t = patient.random_tokens(2), T // 2
    everything = torch.ones(2, T, dtype=torch.bool)
    paths = {
        "one forward": {},
        "a forward with padding": {"padding": everything},
        "a forward with documents": {"documents": everything.long()},
        "a prompt read into a cache": {"cache": None},
    }
    changed = tokens.clone()
    changed[:, t + 1 :] = (tokens[:, t + 1 :] + 1) % model.vocab_size
    for name, extra in paths.items():

        def read(tokens: Tensor, extra=extra) -> Tensor:
            return model(tokens, **{k: model.new_cache(T) if k == "cache" else v for k, v in extra.items()})

        blocks = _leaking_blocks(model, lambda read=read: read(tokens), t)
        value = deviation(read(changed)[:, : t + 1], read(tokens)[:, : t + 1])
        if blocks or value > SAME:
            where = ", ".join(blocks) or "outside the blocks"
            what = f"future tokens leak in {name}: token {t} changes with the tokens after it"
            do = "every mask must include the causal one, see attention_mask in model/functional.py"
            yield Finding("leak", where, what, do, value, SAME)


def _leaking_blocks(model: GPT, read, t: int) -> list[str]:
    """The blocks whose output at position t depends on their input after t, or before the window."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def cut(x: Tensor) -> Tensor:
        outputs.append(x)
        inputs.append(x.detach().requires_grad_())
        return inputs[-1]

    streams = [Site("stream", i) for i in range(len(model.blocks) + 1)]
    with torch.enable_grad(), editing(model, dict.fromkeys(streams, cut)):
        read()
    leaking = []
    for i, (x, out) in enumerate(zip(inputs[:-1], outputs[1:], strict=True)):
        (gradient,) = torch.autograd.grad(out[:, t].square().sum(), x)
        first = 0 if model.window is None else max(0, t - model.window + 1)
        if gradient[:, t + 1 :].any() or gradient[:, :first].any():
            leaking.append(f"blocks.{i}")
    return leaking


def padding(patient: Patient) -> Iterator[Finding]:
    """A left-padded row is what it is alone, in a batch with as many rows as heads, or with another number of rows."""
    model, T = patient.probe, patient.length
    for rows in sorted({2, min(model.config.n_heads, 8)}):
        lengths = [max(1, T - 1 - i) for i in range(rows)]
        tokens = patient.random_tokens(rows)
        real = torch.arange(T) >= T - torch.tensor(lengths).unsqueeze(1)
        places = (torch.arange(T) - (T - torch.tensor(lengths).unsqueeze(1))).clamp(min=0)
        together = model(tokens, places, padding=real)
        off = {}
        for row, length in enumerate(lengths):
            alone = model(tokens[row : row + 1, T - length :])
            if (value := deviation(together[row : row + 1, T - length :], alone)) > SAME:
                off[row] = value
        if off:
            what = f"a padded row differs from the row alone: {len(off)} of {rows} rows"
            do = "padding masks keys: (b k) becomes (b 1 1 k), the same for all heads and queries"
            yield Finding("padding", "the mask of padding", what, do, max(off.values()), SAME)
            return


def documents(patient: Patient) -> Iterator[Finding]:
    """Documents that share a row are what they are alone."""
    model, T = patient.probe, patient.length
    if T < 3:
        raise NotChecked(TOO_SHORT)
    tokens, cut = patient.random_tokens(2), T // 2
    places = torch.cat([torch.arange(cut), torch.arange(T - cut)]).expand(2, T)
    numbers = (torch.arange(T) >= cut).long().expand(2, T)
    together = model(tokens, places, documents=numbers)
    alone = torch.cat([model(tokens[:, :cut]), model(tokens[:, cut:])], dim=1)
    if (value := deviation(together, alone)) > SAME:
        what = "a document that shares a row differs from the document alone"
        do = "a token must attend to its own document only"
        yield Finding("documents", "the mask of documents", what, do, value, SAME)


def row_masks(patient: Patient) -> Iterator[Finding]:
    """A mask (b q k) applies to its row, and to all of its heads, even with as many rows as heads."""
    model, T = patient.probe, patient.length
    heads = model.config.n_heads
    if T < 3 or heads < 2:
        raise NotChecked("it needs 2 heads and 3 positions")
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(heads, T, model.config.d_model, generator=generator, dtype=torch.float64)
    mask = torch.ones(T, T, dtype=torch.bool).tril() & (torch.rand(heads, T, T, generator=generator) < 0.6)
    mask = mask | torch.eye(T, dtype=torch.bool)
    for i, block in enumerate(model.blocks):
        together = block.attention(x, mask=mask)
        alone = torch.cat([block.attention(x[row : row + 1], mask=mask[row, None, None]) for row in range(heads)])
        if (value := deviation(together, alone)) > SAME:
            what = f"{heads} rows with a mask each differ from the rows alone: the mask broadcasts over the wrong axis"
            do = "a mask (b q k) becomes (b 1 q k): without a head axis, its rows are used as heads"
            yield Finding("row masks", f"blocks.{i}.attention", what, do, value, SAME)


def cache(patient: Patient) -> Iterator[Finding]:
    """Read in pieces through a cache, a text gives the logits of one forward."""
    model, T = patient.probe, patient.length
    tokens = patient.random_tokens(2)
    whole = model(tokens)
    for cuts in ([T], [1] * T, [T // 3, T - T // 3]):
        cuts = [n for n in cuts if n]
        through, pieces = model.new_cache(T), []
        for piece in tokens.split(cuts, dim=1):
            pieces.append(model(piece, cache=through))
        found = torch.cat(pieces, dim=1)
        if (value := deviation(found, whole)) > SAME:
            wrong = [t for t in range(T) if deviation(found[:, t], whole[:, t]) > SAME]
            name = {1: "a prompt read at once", T: "token by token"}.get(
                len(cuts), f"pieces of {cuts[0]} and {cuts[1]}"
            )
            what = f"with a cache, {name}, the logits differ from one forward, first at token {wrong[0]}"
            do = "compare the position and the mask of that token with those in one forward"
            yield Finding("cache", _first_layer_that_differs(model, tokens, cuts), what, do, value, SAME)
            return


def _first_layer_that_differs(model: GPT, tokens: Tensor, cuts: list[int]) -> str:
    with watched(model) as layers:
        model(tokens)
    whole = [layer.out for layer in layers]
    through, pieces = model.new_cache(tokens.shape[1]), []
    for piece in tokens.split(cuts, dim=1):
        with watched(model) as layers:
            model(piece, cache=through)
        pieces.append([layer.out for layer in layers])
    for i, expected in enumerate(whole):
        if deviation(torch.cat([piece[i] for piece in pieces], dim=1), expected) > SAME:
            return f"blocks.{i}.attention"
    return "outside attention"


def fused_kernel(patient: Patient) -> Iterator[Finding]:
    """With the model's own weights and text, in float32, torch's kernel gives the result of math_attention."""
    model, bound = patient.model, 1e-4
    if model.config.soft_cap is not None:
        raise NotChecked("torch's kernel has no soft cap")
    rows = patient.tokens[:2]
    with torch.no_grad(), watched(model) as layers:
        model(rows, padding=torch.ones_like(rows, dtype=torch.bool))
        with_mask = [layer.arguments for layer in layers]
        model(rows)
    for i, (layer, block) in enumerate(zip(layers, model.blocks, strict=True)):
        for name, given in (("plain causal", layer.arguments), ("with a mask", with_mask[i])):
            given = [x.float() if torch.is_tensor(x) and x.is_floating_point() else x for x in given]
            expected = MATH.attention(*given)[0]
            found = [ops.attention(*given)[0] for ops in (block.attention.ops, TORCH)]
            y = max(found, key=lambda y: deviation(y, expected))
            if (value := deviation(y, expected)) > bound:
                what = f"the kernel and math_attention differ ({name})"
                where = f"blocks.{i}.attention{worst_heads(y, expected, bound)}"
                yield Finding("fused kernel", where, what, "earlier findings say which of them is wrong", value, bound)
                break


def functions(patient: Patient) -> Iterator[Finding]:
    """In float32, each function of the model's table gives the loss and the gradients of the one in MATH."""
    model, bound = copy.deepcopy(patient.probe).float().requires_grad_(), 1e-3
    length = min(64, model.max_seq_len)
    tokens = patient.random_tokens(math.ceil(256 / length), length)  # enough for the kernels of training

    def learned(ops: Ops) -> Tensor:
        model.use(ops)
        model.zero_grad()
        with torch.enable_grad():
            loss, count = model(tokens, targets=tokens.roll(-1, 1))
            (loss / count).backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return torch.cat([(loss / count).detach().view(1), *gradients])

    ops, expected = patient.model.ops, learned(MATH)
    for name in (field.name for field in fields(ops)):
        if getattr(ops, name) == getattr(MATH, name):
            continue
        found = learned(replace(MATH, **{name: getattr(ops, name)}))
        if not (value := ((found - expected).norm() / expected.norm()).item()) <= bound:
            what = "with it, loss or gradients differ from those of the reference"
            do = f"compare it with {name} of MATH in model/ops.py; kernels=false and attention=math avoid it"
            yield Finding("functions", f"{name} of the model's table", what, do, value, bound)
