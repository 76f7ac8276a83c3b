"""Several heads that share the width of one: what they cost, what they lose and why they help."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from insight.lessons.lesson import Lesson, difference, seeded, train
from model import collect_attention, functional
from model.attention import CausalMultiHeadAttention
from model.ops import MATH

D_MODEL, N_HEADS = 16, (1, 2, 4, 8)
SLOTS, VALUES = 16, 8  # of the matching task
TOKENS, LENGTH, NEAR, FAR = 4, 12, 1, 3  # of the task with two positions
ROWS, MATCHING_STEPS, TWO_STEPS = 32, 150, 250


def lesson(seed: int = 0) -> Lesson:
    """`seed` is for the small training runs."""
    matching = {h: _matching(h, seed) for h in N_HEADS}
    two_places = {h: _two_places(h, seed) for h in (1, 2)}
    numbers = {
        "fused projections": _fused_projections(),
        "flops": {h: _flops(h) for h in N_HEADS},
        "rank": {h: _rank(h) for h in N_HEADS},
        "matching loss": {h: loss for h, (loss, _) in matching.items()},
        "matching right": {h: right for h, (_, right) in matching.items()},
        "two places loss": {h: loss for h, (loss, _) in two_places.items()},
        "looks back": {h: looks for h, (_, looks) in two_places.items()},
    }
    narrow = [["heads", "width", "FLOPs", "rank of a head's scores", "matching loss", "right"]]
    for h in N_HEADS:
        loss, right = matching[h]
        cells = [D_MODEL // h, f"{numbers['flops'][h]:,}", numbers["rank"][h], f"{loss:.3f}", f"{100 * right:.0f} %"]
        narrow.append([str(h), *map(str, cells)])
    looks = [["task with two positions", "loss", *(f"{back} back" for back in range(FAR + 1))]]
    for h, (loss, backs) in two_places.items():
        for i, back in enumerate(backs):
            looks.append([f"head {i + 1} of {h}", f"{loss:.3f}", *(f"{weight:.2f}" for weight in back)])
    return Lesson(numbers, [narrow, looks], _claims(numbers))


def _claims(numbers: dict) -> list[tuple[bool, str]]:
    flops, rank, loss = numbers["flops"], numbers["rank"], numbers["matching loss"]
    right, two = numbers["matching right"], numbers["two places loss"]
    first, last = N_HEADS[0], N_HEADS[-1]
    near, far = sorted(numbers["looks back"][2], key=lambda back: back[FAR])
    return [
        (
            numbers["fused projections"] < 1e-12,
            "one matrix for q, k and v of all heads gives the same as three for each head, to 1e-12",
        ),
        (len(set(flops.values())) == 1, "more heads at the same d_model cost nothing more: the FLOPs are equal"),
        (
            all(rank[h] == D_MODEL // h for h in N_HEADS),
            f"but each is narrower: the scores of {D_MODEL} tokens have only rank d_model / heads",
        ),
        (
            loss[last] > 10 * loss[first] and right[first] > 0.99 and right[last] < 0.9,
            f"too narrow to tell {SLOTS} keys apart, {last} heads find {100 * right[last]:.0f} % of the keys, "
            f"one head {100 * right[first]:.0f} %",
        ),
        (
            two[1] > 0.5 > 0.1 > two[2],
            f"where two positions matter, one wide head fails (loss {two[1]:.2f}), two of half the width do not "
            f"({two[2]:.2f})",
        ),
        (
            near[NEAR] == max(near) and far[FAR] == max(far) and near[NEAR] > 0.5 < far[FAR],
            f"they specialise: one attends to {NEAR} back (weight {near[NEAR]:.2f}), the other to {FAR} back "
            f"({far[FAR]:.2f})",
        ),
    ]


@torch.no_grad()
def _fused_projections() -> float:
    """Largest difference between the model's attention, three small matrices for each head, and one large matrix."""
    with seeded(0):
        x = torch.randn(2, LENGTH, D_MODEL).double()
        attention = CausalMultiHeadAttention(D_MODEL, 4).double()
    matrices = [attention.wq.weight, attention.wk.weight, attention.wv.weight]  # each (h d, d_model)
    causal = functional.causal_mask(LENGTH, LENGTH)
    of_heads = zip(*(matrix.chunk(4) for matrix in matrices), strict=True)
    mixed = [functional.scaled_dot_product_attention(*(x @ w.T for w in three), causal)[0] for three in of_heads]
    separate = difference(attention(x), attention.wo(torch.cat(mixed, dim=-1)))
    one_product = difference(x @ torch.cat(matrices).T, torch.cat([x @ matrix.T for matrix in matrices], dim=-1))
    return max(separate, one_product)


def _flops(n_heads: int) -> int:
    """FLOPs of the matrix products in one forward pass of one row."""
    attention = CausalMultiHeadAttention(D_MODEL, n_heads)
    attention.ops = MATH
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        attention(torch.zeros(1, LENGTH, D_MODEL))
    return counter.get_total_flops()


@torch.no_grad()
def _rank(n_heads: int) -> int:
    """Rank of the scores (D_MODEL, D_MODEL) of the first head for D_MODEL orthogonal tokens."""
    with seeded(0):
        attention = CausalMultiHeadAttention(D_MODEL, n_heads).double()
    q, k = (w.weight.chunk(attention.n_heads)[0] for w in (attention.wq, attention.wk))  # (d, D_MODEL)
    return torch.linalg.matrix_rank(q.T @ k).item()


def _matching(n_heads: int, seed: int) -> tuple[float, float]:
    """Find the slot with the key that is asked for, predict its value: the loss after training, and the accuracy.

    Only the scores can tell the slots apart, so this measures how many keys a head can tell apart.
    """
    with seeded(seed):
        keys_in, values_in = nn.Embedding(SLOTS, D_MODEL), nn.Embedding(VALUES, D_MODEL)
        attention, head = CausalMultiHeadAttention(D_MODEL, n_heads), nn.Linear(D_MODEL, VALUES)
        parts = nn.ModuleList([keys_in, values_in, attention, head])

        def answers(rows: int) -> tuple[Tensor, Tensor]:
            keys, values = torch.rand(rows, SLOTS).argsort(-1), torch.randint(VALUES, (rows, SLOTS))
            asked = torch.randint(SLOTS, (rows, 1))
            x = torch.cat([keys_in(keys) + values_in(values), keys_in(asked)], dim=1)
            return head(attention(x)[:, -1]), values[keys == asked]

        train(parts.parameters(), lambda: cross_entropy(*answers(ROWS)), MATCHING_STEPS)
        with torch.no_grad():
            logits, right = answers(1024)
    return cross_entropy(logits, right).item(), (logits.argmax(-1) == right).double().mean().item()


def _two_places(n_heads: int, seed: int) -> tuple[float, list[list[float]]]:
    """Predict the tokens NEAR and FAR back: the loss, and the weight that each head puts 0, 1, ... back."""
    with seeded(seed):
        embedding, head = nn.Embedding(TOKENS, D_MODEL), nn.Linear(D_MODEL, TOKENS**2)
        attention = CausalMultiHeadAttention(D_MODEL, n_heads, use_rope=True, max_seq_len=LENGTH)
        parts = nn.ModuleList([embedding, head, attention])

        def loss(rows: int = ROWS) -> Tensor:
            tokens = torch.randint(TOKENS, (rows, LENGTH))
            pairs = TOKENS * tokens[:, FAR - NEAR : LENGTH - NEAR] + tokens[:, : LENGTH - FAR]
            return cross_entropy(head(attention(embedding(tokens)))[:, FAR:].flatten(0, 1), pairs.flatten())

        train(parts.parameters(), loss, TWO_STEPS)
        with torch.no_grad(), collect_attention(attention) as maps:
            found = loss(256).item()
    weights = maps[0].mean(0)[:, FAR:]  # (h q k), the queries with a token FAR back
    return found, [[square.diagonal(FAR - back).mean().item() for back in range(FAR + 1)] for square in weights]


def draw(numbers: dict, figure):
    left, right = figure.subplots(1, 2)
    left.plot(N_HEADS, list(numbers["matching loss"].values()), "o-")
    left.set(xscale="log", xlabel="heads, at one d_model", ylabel="loss", title=f"matching one of {SLOTS} keys")
    left.set_xticks(N_HEADS, N_HEADS)
    left.minorticks_off()
    rows = [
        (f"head {i + 1} of {h}", back) for h, backs in numbers["looks back"].items() for i, back in enumerate(backs)
    ]
    right.imshow([back for _, back in rows], cmap="Blues", vmin=0, vmax=1)
    for y, (_, back) in enumerate(rows):
        for x, weight in enumerate(back):
            right.text(x, y, f"{weight:.2f}", ha="center", va="center", color="white" if weight > 0.5 else "black")
    right.set_yticks(range(len(rows)), [name for name, _ in rows])
    right.set_xticks(range(FAR + 1))
    right.set(xlabel="tokens back", title=f"where heads attend (task: {NEAR} and {FAR} back)")
