"""The six steps of self-attention with every shape, for a small example or for a checkpoint."""

import math

import torch
from einops import rearrange, repeat
from torch import Tensor

from insight.lessons.lesson import Lesson, difference, seeded
from model import GPT, ModelConfig, functional
from model.attention import CausalMultiHeadAttention

B, T = 2, 4
EXAMPLE = {"d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 16, "max_seq_len": T}
TOLERANCE = 1e-5


def lesson(model: GPT | None = None) -> Lesson:
    """Steps of a model's first block; None: of a small example with random weights."""
    with seeded(0), torch.no_grad():
        model = GPT(16, ModelConfig(**EXAMPLE)) if model is None else model
        length = min(T, model.max_seq_len)
        tokens = torch.randint(model.vocab_size, (B, length))
        token_positions = torch.arange(length)
        x = model.embedding(tokens)
        if model.embedding_norm is not None:
            x = model.embedding_norm(x)
        if model.position_embedding is not None:
            x = model.position_embedding(x, token_positions)
        block = model.blocks[0]
        x = block.attention_norm(x)
        bias = None if model.alibi is None else model.alibi(token_positions, token_positions)
        mask = functional.attention_mask(length, length, window=model.window)
        steps = walk(block.attention, x, token_positions, mask, bias)
        whole = block.attention(x, token_positions, mask, bias=bias)
    a = block.attention
    d_model, d_head = x.shape[-1], model.config.d_model // a.n_heads
    named = {name: tensor for _, name, _, tensor in steps}
    numbers = {
        "shapes": {name: list(tensor.shape) for name, tensor in named.items()},
        "d_model": d_model,
        "n_heads": a.n_heads,
        "n_kv_heads": a.n_kv_heads,
        "d_head": d_head,
        "difference": difference(named["output"], whole),
        "row sums": difference(named["weights"].sum(-1), torch.ones(B, a.n_heads, length)),
        "above the diagonal": named["weights"].triu(1).abs().max().item(),
        "parameters": sum(w.weight.numel() for w in (a.wq, a.wk, a.wv, a.wo)),
    }
    header = ["step", "tensor", "axes", "shape"]
    rows = [[step, name, axes, " x ".join(map(str, tensor.shape))] for step, name, axes, tensor in steps]
    matrices = 2 * d_model * (a.n_heads + a.n_kv_heads) * d_head
    claims = [
        (
            numbers["difference"] < TOLERANCE,
            f"the six steps give the same as the model's attention, to {TOLERANCE:.0e}",
        ),
        (
            numbers["shapes"]["x"] == numbers["shapes"]["output"],
            "the output has the shape of the input: blocks can be stacked",
        ),
        (a.n_heads * d_head == d_model, f"{a.n_heads} heads of width {d_head} share the width {d_model}"),
        (numbers["row sums"] < TOLERANCE, "the weights of each head are a T x T matrix; each row sums to 1"),
        (numbers["above the diagonal"] == 0, "everything above the diagonal is 0"),
        (
            numbers["parameters"] == matrices,
            f"no parameter has T in its shape: wq, wk, wv, wo hold {numbers['parameters']:,} numbers for any length",
        ),
    ]
    if length == d_head:
        q, k = named["q, in heads"], named["k, in heads"]
        k = repeat(k, "b g k d -> b (g r) k d", r=a.n_heads // a.n_kv_heads)
        numbers["forgotten transpose"] = difference(q @ k / math.sqrt(d_head), named["scores"])
        claims.append(
            (
                numbers["forgotten transpose"] > 1e-3,
                f"here T = d_head = {d_head}, so q k without the transpose runs, and is wrong: test with different "
                "sizes",
            )
        )
    return Lesson(numbers, [[header, *rows]], claims)


def walk(
    attention: CausalMultiHeadAttention, x: Tensor, token_positions: Tensor, mask: Tensor, bias: Tensor | None
) -> list[tuple[str, str, str, Tensor]]:
    """Attention on x (b s d_model), step by step: (step, name, axes, tensor) of every intermediate result."""
    a = attention
    q, k, v = a.wq(x), a.wk(x), a.wv(x)
    steps = [("input", "x", "b s d_model", x)]
    steps += [("1 project", name, "b s (h d)", y) for name, y in (("q", q), ("k", k), ("v", v))]

    q = rearrange(q, "b s (h d) -> b h s d", h=a.n_heads)
    k, v = (rearrange(y, "b s (h d) -> b h s d", h=a.n_kv_heads) for y in (k, v))
    if a.q_norm is not None:
        q, k = a.q_norm(q), a.k_norm(k)
    if a.rope is not None:
        q, k = a.rope(q, token_positions), a.rope(k, token_positions)
    steps += [("2 split", f"{name}, in heads", "b h s d", y) for name, y in (("q", q), ("k", k), ("v", v))]

    k, v = (repeat(y, "b g k d -> b (g r) k d", r=a.n_heads // a.n_kv_heads) for y in (k, v))
    scores = torch.einsum("b h q d, b h k d -> b h q k", q, k) / math.sqrt(q.shape[-1])
    if a.soft_cap is not None:
        scores = a.soft_cap * torch.tanh(scores / a.soft_cap)
    if bias is not None:
        scores = scores + bias
    steps.append(("3 compare: q k^T / sqrt(d)", "scores", "b h q k", scores))

    weights = functional.softmax(scores.masked_fill(~mask, -math.inf))
    steps.append(("4 mask, softmax over k", "weights", "b h q k", weights))

    y = torch.einsum("b h q k, b h k d -> b h q d", weights, v)
    steps.append(("5 mix: weights v", "mixed", "b h q d", y))

    steps.append(("6 join heads, project", "output", "b s d_model", a.wo(rearrange(y, "b h s d -> b s (h d)"))))
    return steps


def draw(numbers: dict, figure):
    """Each tensor as the rectangle of its last two axes, copies behind it for the others."""
    from matplotlib.patches import Rectangle

    panels = figure.subplots(2, 6).flatten()
    for axes in panels:
        axes.set_axis_off()
    # in logarithms: the sizes of a real model differ too much for a page
    sizes = {name: [math.log2(1 + n) for n in shape[-2:]] for name, shape in numbers["shapes"].items()}
    highest, widest = (1 + max(both) for both in zip(*sizes.values(), strict=True))
    for axes, (name, (height, width)) in zip(panels, sizes.items(), strict=False):
        shape = numbers["shapes"][name]
        for copy in reversed(range(min(4, math.prod(shape[:-2])))):
            corner = (0.2 * copy, 0.2 * copy)
            axes.add_patch(Rectangle(corner, width, height, facecolor="#cfe0f3", edgecolor="#1f4e79"))
        axes.set(xlim=(-0.1, widest), ylim=(-0.1, highest), aspect="equal")
        axes.set_title(f"{name}\n{' x '.join(map(str, shape))}", fontsize=9)
    figure.suptitle(
        "the last two axes of each tensor, in logarithms; a copy behind for each of the others, four at most"
    )
