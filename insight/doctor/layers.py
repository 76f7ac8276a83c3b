"""Checks what an attention layer does around attention: splitting and merging heads, positions, rotation."""

import copy
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from insight.doctor import reference
from insight.doctor.patient import CLOSE, SAME, Finding, NotChecked, Patient, deviation, watched, worst_heads
from model import GPT, ModelConfig
from model.attention import CausalMultiHeadAttention
from model.hooks import Place, editing


def head_order(patient: Patient) -> Iterator[Finding]:
    """Head i is the i-th block of rows of wq, wk and wv, and of columns of wo.

    With RoPE, queries and keys are compared by their norms, which no rotation changes.
    """
    model = patient.probe
    with watched(model) as layers:
        model(patient.random_tokens(2))
    for i, (layer, block) in enumerate(zip(layers, model.blocks, strict=True)):
        where, attention = f"blocks.{i}.attention", block.attention
        if layer.arguments is None:
            yield Finding("head order", where, "its attention is never called", "compute it by self.ops.attention")
            continue
        q, k, v = layer.arguments[:3]
        for name, found in (("wq", q), ("wk", k), ("wv", v)):
            expected, confused = (
                _comparable(name, _projected(attention, name, layer.x, split), model.config)
                for split in (reference.heads, reference.transposed_heads)
            )
            found = _comparable(name, found, model.config, rotated=True)
            if (value := deviation(found, expected)) > CLOSE:
                what = f"the heads of {name}{worst_heads(found, expected, CLOSE)} are not its blocks of rows, in order"
                if deviation(found, confused) < CLOSE:
                    what = f"the heads of {name} are transposed: rows are distributed in turn, not in blocks"
                yield Finding("head order", where, what, "split by 'b s (h d) -> b h s d'", value, CLOSE)
        expected = attention.wo(reference.merged(layer.y))
        if (value := deviation(layer.out, expected)) > SAME:
            what = "the output is not wo of the concatenated heads"
            if deviation(layer.out, attention.wo(layer.y.permute(0, 2, 3, 1).flatten(2))) < SAME:
                what = "the heads are transposed before wo: interleaved, not concatenated"
            yield Finding("head order", where, what, "merge them by 'b h s d -> b s (h d)', then wo", value, SAME)


def _projected(attention: CausalMultiHeadAttention, name: str, x: Tensor, split: Callable) -> Tensor:
    """Queries, keys or values (b h s d) before RoPE."""
    n = attention.n_heads if name == "wq" else attention.n_kv_heads
    heads = split(x @ getattr(attention, name).weight.T, n)
    norm = {"wq": attention.q_norm, "wk": attention.k_norm, "wv": None}[name]
    return heads if norm is None else norm(heads)


def _comparable(name: str, x: Tensor, config: ModelConfig, rotated: bool = False) -> Tensor:
    """What RoPE does not change: the norms of queries and keys, and the values."""
    if name == "wv" or config.positions != "rope":
        return x
    _, amplitude = reference.rope_angles(config, torch.zeros(1))
    return x.norm(dim=-1, keepdim=True) / (amplitude if rotated else 1.0)


def rotation(patient: Patient) -> Iterator[Finding]:
    """Each pair of each query and key is rotated by position * theta^(-2i / d_head)."""
    model = patient.probe
    if model.config.positions != "rope":
        raise NotChecked("it has no RoPE")
    with watched(model) as layers:
        model(patient.random_tokens(2))
    config, positions = model.config, torch.arange(patient.length)
    for i, (layer, block) in enumerate(zip(layers, model.blocks, strict=True)):
        if layer.arguments is None:
            continue
        for name, found in (("wq", layer.arguments[0]), ("wk", layer.arguments[1])):
            plain = _projected(block.attention, name, layer.x, reference.heads)
            expected = reference.rotated(plain, config, positions)
            if (value := deviation(found, expected)) > CLOSE:
                other = {"half": "interleaved", "interleaved": "half"}[config.pairing]
                causes = {
                    "not rotated": plain,
                    "rotated backwards": reference.rotated(plain, config, -positions),
                    f"paired as {other}, not {config.pairing}": reference.rotated(plain, config, positions, other),
                    "rotated as if at the next position": reference.rotated(plain, config, positions + 1),
                    "rotated as if at the previous position": reference.rotated(plain, config, positions - 1),
                }
                why = [cause for cause, tensor in causes.items() if deviation(found, tensor) < CLOSE]
                of = {"wq": "queries", "wk": "keys"}[name]
                what = f"{of}{worst_heads(found, expected, CLOSE)} are " + (why[0] if why else "not rotated as in RoPE")
                do = "see rotate in model/functional.py, and the positions and table that it gets"
                yield Finding("rotation", f"blocks.{i}.attention", what, do, value, CLOSE)


def token_positions(patient: Patient) -> Iterator[Finding]:
    """Every layer gets the right positions: 0 .. s-1 in one forward, and after the cached tokens with a cache."""
    model, T = patient.probe, patient.length
    tokens = patient.random_tokens(2)
    cut = T // 2
    for name, cuts in {"one forward": [T], "a prompt read into a cache": [cut, T - cut], "decoding": [1] * T}.items():
        cuts = [n for n in cuts if n]
        cache = None if name == "one forward" else model.new_cache(T)
        start = 0
        for piece in tokens.split(cuts, dim=1):
            s = piece.shape[1]
            given: dict[Place, list[Tensor]] = {place: [] for place in _inputs_of_positions(model)}
            with editing(model, {place: seen.append for place, seen in given.items()}):
                model(piece, cache=cache)
            expected = torch.arange(start, start + s)
            wrong = {
                place.module: seen
                for place, all_seen in given.items()
                for seen in all_seen
                if not _equal(seen, expected)
            }
            if wrong:
                where, seen = next(iter(wrong.items()))
                off = (seen.double() - expected).flatten()
                by = f"off by {off[0].item():+g}" if (off == off[0]).all() else "wrong"
                what = f"token_positions are {by} in {name}: token {start} has position {seen.flatten()[0].item()}"
                more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                do = "the position of the first new token is the number of tokens in the cache"
                yield Finding("token positions", where + more, what, do, seen.flatten()[0].item(), start)
                break
            start += s


def _equal(seen: Tensor, expected: Tensor) -> bool:
    return seen.shape[-1] == len(expected) and bool((seen == expected).all())


def _inputs_of_positions(model: GPT) -> list[Place]:
    """The inputs through which modules get token positions; RoPE twice per forward, for queries and for keys."""
    arguments = {"position_embedding": 1, "alibi": 0}
    arguments |= {f"blocks.{i}.attention.rope": 1 for i in range(len(model.blocks))}
    there = dict(model.named_modules())
    return [Place(name, i) for name, i in arguments.items() if name in there]


def position_tables(patient: Patient) -> Iterator[Finding]:
    """Position tables match the formula, in float32, and stay float32 when the model becomes bfloat16."""
    model, config = patient.model, patient.model.config
    if config.positions in ("learned", "none"):
        raise NotChecked("it has none")
    places = torch.arange(config.max_seq_len)
    tables: dict[str, tuple[torch.nn.Module, str, Tensor]] = {}
    if config.positions == "rope":
        angles, amplitude = reference.rope_angles(config, places)
        for i, block in enumerate(model.blocks):
            tables[f"blocks.{i}.attention.rope.cos"] = block.attention.rope, "cos", amplitude * angles.cos()
            tables[f"blocks.{i}.attention.rope.sin"] = block.attention.rope, "sin", amplitude * angles.sin()
    elif config.positions == "sinusoidal":
        d = config.d_model
        angles = places.double().unsqueeze(1) / 10000.0 ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        tables["position_embedding.table"] = model.position_embedding, "table", table
    elif config.positions == "alibi":
        tables["alibi.slopes"] = model.alibi, "slopes", _slopes(config.n_heads)
    wrong: dict[str, list[tuple[str, float]]] = {}
    for name, (module, attribute, expected) in tables.items():
        table = getattr(module, attribute).detach().cpu()
        error = (table.double() - expected).abs().max().item() if table.shape == expected.shape else math.inf
        after = getattr(copy.deepcopy(module).bfloat16(), attribute)
        if table.dtype != torch.float32:
            wrong.setdefault(f"the table is {table.dtype}", []).append((name, error))
        elif not error < 1e-6:
            wrong.setdefault("the table does not match the formula", []).append((name, error))
        elif after.dtype != torch.float32:
            error = (after.cpu().double() - expected).abs().max().item()
            wrong.setdefault(f"the table becomes {after.dtype} when the model does", []).append((name, error))
    for what, found in wrong.items():
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        error = max(error for _, error in found)
        do = "compute it in float64, keep it in float32 even if the model is cast, and rotate in float32"
        yield Finding("position tables", found[0][0] + more, f"{what}: it is off by up to {error:.2g}", do, error, 1e-6)


def _slopes(n_heads: int) -> Tensor:
    """ALiBi's slopes: geometric, down to 2^-8; between powers of two, the smaller power's and some of the larger's."""
    if n_heads & (n_heads - 1) == 0:
        return torch.tensor([2.0 ** (-8 * (i + 1) / n_heads) for i in range(n_heads)]).double().view(-1, 1, 1)
    smaller = 1 << (n_heads.bit_length() - 1)
    larger = _slopes(2 * smaller)[::2][: n_heads - smaller]
    return torch.cat([_slopes(smaller), larger])
