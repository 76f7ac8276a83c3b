"""Checks the functions that compute attention, each with inputs made to reveal faults.

The weights of any implementation, even of one that never holds them, are its output for values that are the identity.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from insight.doctor import reference
from insight.doctor.patient import CLOSE, SAME, Finding, Patient, deviation, worst_heads
from model.ops import MATH, TORCH

FAR = 1e12  # larger than any finite number that masks are usually filled with


def implementations(patient: Patient) -> Iterator[tuple[str, Callable]]:
    """(where, attend) of every function that computes attention in this model, or would with another backend."""
    layers: dict[Callable, list[int]] = {}
    for i, block in enumerate(patient.model.blocks):
        layers.setdefault(block.attention.ops.attention, []).append(i)
    layers.setdefault(MATH.attention, [])
    if patient.model.config.soft_cap is None:
        layers.setdefault(TORCH.attention, [])
    for attend, used in layers.items():
        where = f"layer {', '.join(map(str, used))}" if used else "not used now"
        yield f"{getattr(attend, 'func', attend).__name__} ({where})", attend


def numbers(patient: Patient, T_q: int, T_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random q (b h q d), k and v (b g k d) in the shapes of the model's heads, in a few rows."""
    config, generator = patient.model.config, torch.Generator().manual_seed(0)
    h, d = config.n_heads, config.d_model // config.n_heads
    g = config.n_kv_heads or h
    q, k, v = (
        torch.randn(min(h, 4), heads, T, d, generator=generator, dtype=torch.float64)
        for heads, T in ((h, T_q), (g, T_k), (g, T_k))
    )
    return q, k, v


def length(patient: Patient) -> int:
    """The number of queries and keys: the head width, so that a product with untransposed keys is possible."""
    return max(4, patient.model.config.d_model // patient.model.config.n_heads)


def weights(attend: Callable, q: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """The attention weights (b h q k) of any implementation."""
    identity = torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:2], -1, -1)
    return attend(q, k, identity.contiguous(), mask, bias, None, 0.0)[0]


def masks(patient: Patient, rows: int, T: int) -> Iterator[tuple[str, Tensor | None, Tensor | None, Tensor]]:
    """(name, mask, bias, where queries may attend) for every kind of mask that an implementation gets."""
    generator = torch.Generator().manual_seed(1)
    plain = reference.causal(T, T)
    random = plain & (torch.rand(rows, 1, T, T, generator=generator) < 0.7) | torch.eye(T, dtype=torch.bool)
    yield "plain causal", None, None, plain
    yield "an explicit mask", random, None, random
    if patient.model.config.positions == "alibi":
        bias = torch.randn(patient.model.config.n_heads, T, T, generator=generator, dtype=torch.float64)
        yield "plain causal with a bias", None, bias, plain
        yield "an explicit mask with a bias", random, bias, random


def row_sums(patient: Patient) -> Iterator[Finding]:
    """The weights of a query sum to 1."""
    T = length(patient)
    for where, attend in implementations(patient):
        q, k, _ = numbers(patient, T, T)
        for name, mask, bias, _ in masks(patient, len(q), T):
            found = weights(attend, q, k, mask, bias)
            sums = found.sum(-1)
            if (value := deviation(sums, torch.ones_like(sums))) > SAME:
                columns = found.sum(-2)
                over_queries = deviation(columns, torch.ones_like(columns)) < SAME
                what = f"the weights of a query sum to {sums.min():.3g} to {sums.max():.3g}, not 1, with {name}"
                what += "; those of a key do: the softmax runs over the queries" if over_queries else ""
                yield Finding("row sums", where, what, "take the softmax over the keys, dim=-1", value, SAME)
                break


def masked_weights(patient: Patient) -> Iterator[Finding]:
    """Masked keys have weight exactly 0, even if all other keys have far lower scores."""
    T = length(patient)
    for where, attend in implementations(patient):
        q, k, _ = numbers(patient, T, T)
        far_q, far_k = torch.zeros_like(q), torch.zeros_like(k)
        far_q[..., 0] = math.sqrt(q.shape[-1])
        far_k[..., 0] = FAR * (torch.arange(T) - T)  # the later, the higher, and all of them far below 0
        for name, mask, bias, allowed in masks(patient, len(q), T):
            calm = weights(attend, q, k, mask, bias).masked_fill(allowed, 0.0)
            extreme = weights(attend, far_q, far_k, mask, bias).masked_fill(allowed, 0.0)
            do = "True = may attend: fill the scores with -math.inf where the mask is False"
            if (value := calm.abs().max().item()) != 0:
                seen = weights(attend, q, k, mask, bias).masked_fill(~allowed, 0.0)
                what = "masked keys have weight: the mask is not applied, or not to these queries and keys"
                if not seen.any():
                    what = "only masked keys have weight: the mask is inverted"
            elif (value := extreme.abs().max().item()) != 0:
                what = "masked keys have weight if all other scores are lower: the mask is filled with a finite number"
            else:
                continue
            yield Finding("masked weights", where, f"{what} ({name})", do, value, 0.0)
            break


def all_masked_row(patient: Patient) -> Iterator[Finding]:
    """A fully masked query gets zeros and finite gradients: a single NaN would reach every weight."""
    T = length(patient)
    for where, attend in implementations(patient):
        q, k, v = (x.requires_grad_() for x in numbers(patient, T, T))
        mask = reference.causal(T, T).expand(len(q), 1, T, T).clone()
        mask[0, :, 2] = False
        y = attend(q, k, v, mask, None, None, 0.0)[0]
        row = y[0, :, 2].detach()
        gradients = torch.autograd.grad(y.square().sum(), (q, k, v))
        finite = all(gradient.isfinite().all() for gradient in gradients)
        if row.isfinite().all() and (row == 0).all() and finite:
            continue
        value = row.abs().max().item()
        if not row.isfinite().all():
            what = "a fully masked query gets numbers that are not finite"
        elif value > 0:
            what = "a fully masked query gets a mean of masked values, not zeros"
        else:
            what = "a fully masked query has gradients that are not finite"
        do = "in the softmax, replace a maximum of -inf by 0 and a sum of 0 by 1"
        yield Finding("all-masked row", where, what, do, value, 0.0)


def scores(patient: Patient) -> Iterator[Finding]:
    """The scores, from the weights: log w = q.k / sqrt(d_head) + bias, up to a constant in each row.

    The factors of both terms are fitted, without a mask.
    """
    expected = 1 / math.sqrt(patient.model.config.d_model // patient.model.config.n_heads)
    for where, attend in implementations(patient):
        for T in (length(patient), length(patient) + 1):
            q, k, _ = numbers(patient, T, T)
            q = q / 4  # so that no weight underflows
            generator = torch.Generator().manual_seed(2)
            bias = torch.randn(q.shape[1], T, T, generator=generator, dtype=torch.float64).expand(*q.shape[:2], T, T)
            everything = torch.ones(T, T, dtype=torch.bool)
            try:
                found = weights(attend, q, k, everything, bias).log()
            except RuntimeError as error:
                what = f"{T} queries and keys of width {q.shape[-1]} fail: {' '.join(str(error).split())}"
                yield Finding("scores", where, what, "the product is q k^T: transpose the last two axes of k")
                break
            if not found.isfinite().all():
                break  # earlier checks report it
            products = q @ reference.shared(k, q.shape[1]).transpose(-1, -2)
            wrong = _explain(found, products, bias, expected, q, k)
            if wrong is not None:
                yield Finding("scores", where, *wrong)
                break


def _explain(found: Tensor, products: Tensor, bias: Tensor, expected: float, q: Tensor, k: Tensor) -> tuple | None:
    """(what, do, value, bound) of log-weights (b h q k) that are not products * expected + bias; None if they are."""
    (scale, of_bias), left = _fit(found, products, bias)
    if left > CLOSE:
        confused = {
            ("k is not transposed: queries are multiplied by columns of k", "transpose the last two axes of k"): (
                q @ reference.shared(k, q.shape[1]) if k.shape[2] == k.shape[3] else products
            ),
            ("query heads take key heads in turn, not in groups", "'b g k d -> b (g r) k d'"): (
                q @ k.repeat(1, q.shape[1] // k.shape[1], 1, 1).transpose(-1, -2)
            ),
        }
        for (what, do), other in confused.items():
            if _fit(found, other, bias)[1] < CLOSE:
                return what, do, left, CLOSE
        off = []
        for h in range(q.shape[1]):
            (scale, _), left_of_head = _fit(found[:, h], products[:, h], bias[:, h])
            if left_of_head > CLOSE or abs(scale / expected - 1) > CLOSE:
                off.append(str(h))
        which = f" in head {', '.join(off)}" if len(off) < q.shape[1] else ""
        what = f"the scores are not q k^T / sqrt(d_head){which}"
        return what, "compare with softmax(q k^T / sqrt(d_head) + bias)", left, CLOSE
    if abs(scale / expected - 1) > CLOSE:
        what = f"the scores are q k^T times {scale:.4g}, not 1 / sqrt(d_head)"
        if abs(scale - 1) < CLOSE:
            what = "the scores are not divided by sqrt(d_head)"
        return what, "divide q k^T by math.sqrt(q.shape[-1]), once", scale, expected
    if abs(of_bias - 1) > CLOSE:
        return f"the bias is added {of_bias:.4g} times", "add it once, to the scaled scores", of_bias, 1.0
    return None


def _fit(found: Tensor, products: Tensor, bias: Tensor) -> tuple[list[float], float]:
    """The factors of products and bias that give `found`, up to a constant per row; and the residual."""
    y, *x = (t - t.mean(-1, keepdim=True) for t in (found, products, bias))
    columns = torch.stack([t.flatten() for t in x], dim=1)
    factors = torch.linalg.lstsq(columns, y.flatten().unsqueeze(1)).solution
    return factors[:, 0].tolist(), deviation((columns @ factors)[:, 0], y.flatten())


def values(patient: Patient) -> Iterator[Finding]:
    """The output is the weighted sum of the values."""
    T = length(patient)
    for where, attend in implementations(patient):
        q, k, v = numbers(patient, T, T)
        mask = reference.causal(T, T)
        found = attend(q, k, v, None, None, None, 0.0)[0]
        expected = weights(attend, q, k, None) @ reference.shared(v, q.shape[1])
        if (value := deviation(found, expected)) > SAME and expected.isfinite().all():
            what = f"the output is not the sum of values times weights{worst_heads(found, expected, SAME)}"
            do = "check which value head each query head uses, and the axis of the sum"
            yield Finding("values", where, what, do, value, SAME)
            continue
        cap = patient.model.config.soft_cap
        if cap is not None:
            found = attend(q, k, v, mask, None, cap, 0.0)[0]
            expected = reference.attention_weights(q, k, mask, soft_cap=cap) @ reference.shared(v, q.shape[1])
            if (value := deviation(found, expected)) > SAME:
                what = "scores are not bounded as cap * tanh(scores / cap)"
                yield Finding("values", where, what, "apply it before bias and mask", value, SAME)
