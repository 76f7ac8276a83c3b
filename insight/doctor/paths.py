"""The model as a whole, by different ways that must give the same: what a token may know, and through which path."""

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
    """No token knows of a later one: neither by its values nor by gradients, on any path.

    Gradients within each block say in which one it happens; changed tokens say that it happens at all.
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
            what = f"the future is seen in {name}: token {t} changes with those behind it"
            do = "every mask begins with the causal one, see attention_mask in model/functional.py"
            yield Finding("leak", where, what, do, value, SAME)


def _leaking_blocks(model: GPT, read, t: int) -> list[str]:
    """The blocks whose output at place t has a gradient with respect to their input behind t, or too far before it."""
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
    """A row that is filled up on the left is what it is alone, in a batch of as many rows as heads or of others."""
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
            what = f"a row that is filled up is not what it is alone: {len(off)} of {rows} rows differ"
            do = "padding hides keys: (b k) becomes (b 1 1 k), the same for all heads and queries"
            yield Finding("padding", "the mask of padding", what, do, max(off.values()), SAME)
            return


def documents(patient: Patient) -> Iterator[Finding]:
    """Documents side by side in a row are what they are alone."""
    model, T = patient.probe, patient.length
    if T < 3:
        raise NotChecked(TOO_SHORT)
    tokens, cut = patient.random_tokens(2), T // 2
    places = torch.cat([torch.arange(cut), torch.arange(T - cut)]).expand(2, T)
    numbers = (torch.arange(T) >= cut).long().expand(2, T)
    together = model(tokens, places, documents=numbers)
    alone = torch.cat([model(tokens[:, :cut]), model(tokens[:, cut:])], dim=1)
    if (value := deviation(together, alone)) > SAME:
        what = "a document beside another is not what it is alone"
        yield Finding("documents", "the mask of documents", what, "a token sees its own document only", value, SAME)


def row_masks(patient: Patient) -> Iterator[Finding]:
    """A mask (b q k) goes to its rows, and to all heads of each, also where there are as many rows as heads."""
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
            do = "a mask (b q k) becomes (b 1 q k): without the axis of heads, rows are taken for heads"
            yield Finding("row masks", f"blocks.{i}.attention", what, do, value, SAME)


def cache(patient: Patient) -> Iterator[Finding]:
    """Read in pieces through a cache, a text gives what it gives whole."""
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
            do = "compare the positions and the mask of that token with those of one forward"
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
    """On the model's own weights and text, in float32, torch's kernel gives what the mathematics written out gives."""
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
            written = MATH.attention(*given)[0]
            found = [ops.attention(*given)[0] for ops in (block.attention.ops, TORCH)]
            y = max(found, key=lambda y: deviation(y, written))
            if (value := deviation(y, written)) > bound:
                what = f"the kernel and the mathematics written out differ ({name})"
                where = f"blocks.{i}.attention{worst_heads(y, written, bound)}"
                yield Finding("fused kernel", where, what, "the checks before say which of them is wrong", value, bound)
                break


def functions(patient: Patient) -> Iterator[Finding]:
    """In float32, each function that the model computes with gives the loss and the gradients of that written out."""
    model, bound = copy.deepcopy(patient.probe).float().requires_grad_(), 1e-3
    length = min(64, model.max_seq_len)
    tokens = patient.random_tokens(math.ceil(256 / length), length)  # as many as kernels for training want

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
            what = "with it, loss or gradients differ from those of the mathematics written out"
            do = f"compare it with {name} of MATH in model/ops.py; kernels=false and attention=math do without"
            yield Finding("functions", f"{name} of the model's table", what, do, value, bound)
