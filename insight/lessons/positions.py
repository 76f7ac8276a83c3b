"""Without positions, order is invisible: five schemes compared, also beyond the trained length."""

import math

import torch
from torch import Tensor

from insight.lessons.lesson import Lesson, difference, seeded, train
from model import GPT, ModelConfig, collect_attention, functional

SCHEMES = ("none", "sinusoidal", "learned", "rope", "alibi")
N, CLEAR = 8, 0.8  # tokens of a small language, and how often a token follows the rule
SHAPE = {"d_model": 32, "n_layers": 1, "n_heads": 4, "d_ff": 64}
TRAINED, REACH = 16, 64  # tokens in training, tokens in evaluation
ROWS, STEPS = 32, 150
SHIFT = 7
EXACT = 1e-6  # float64, but fixed tables are float32


def lesson(seed: int = 0) -> Lesson:
    """`seed` is for the five small training runs."""
    losses = {scheme: _loss_by_position(scheme, seed) for scheme in SCHEMES}
    bands = [(2, TRAINED), *((start, start + TRAINED) for start in range(TRAINED, REACH, TRAINED))]
    numbers = {
        "shuffled without mask": _shuffled(),
        "reordered, two layers": _reordered("none", n_layers=2),
        "reordered": {scheme: _reordered(scheme) for scheme in SCHEMES},
        "shifted": {scheme: _shifted(scheme) for scheme in SCHEMES},
        "floor": _floor(),
        "loss": losses,
        "bands": [[start + 1, end] for start, end in bands],
        "loss in bands": {
            scheme: [sum(loss[start:end]) / (end - start) for start, end in bands] for scheme, loss in losses.items()
        },
    }
    header = ["positions", "reordered", f"shifted by {SHIFT}", *(f"loss {start + 1}-{end}" for start, end in bands)]
    rows = []
    for scheme in SCHEMES:
        changes = (numbers["reordered"][scheme], numbers["shifted"][scheme])
        cells = ["0" if change < EXACT else f"{change:.3f}" for change in changes]
        rows.append([scheme, *cells, *(f"{loss:.2f}" for loss in numbers["loss in bands"][scheme])])
    return Lesson(numbers, [[header, *rows]], _claims(numbers))


def _claims(numbers: dict) -> list[tuple[bool, str]]:
    reordered, shifted, losses = numbers["reordered"], numbers["shifted"], numbers["loss in bands"]
    others = [scheme for scheme in SCHEMES if scheme != "none"]
    added = max(losses[scheme][1] for scheme in ("sinusoidal", "learned"))
    guessing, floor, alibi, rope = math.log(N), numbers["floor"], losses["alibi"], losses["rope"]
    return [
        (
            numbers["shuffled without mask"] < EXACT,
            "attention without positions and mask: shuffled tokens give the same outputs, shuffled",
        ),
        (
            reordered["none"] < EXACT,
            "one causal layer without positions: reordering earlier tokens leaves the last logits equal",
        ),
        (
            all(reordered[scheme] > EXACT for scheme in others),
            "with any of the four schemes they differ",
        ),
        (
            numbers["reordered, two layers"] > EXACT,
            "with two layers they differ even without positions: the mask gives each position another set to see",
        ),
        (
            shifted["rope"] < EXACT and shifted["alibi"] < EXACT,
            f"scores of RoPE and ALiBi depend on distance alone: positions shifted by {SHIFT} give the same weights",
        ),
        (
            shifted["sinusoidal"] > EXACT and shifted["learned"] > EXACT,
            "with sinusoidal and learned vectors the weights change",
        ),
        (
            losses["none"][0] > 1.5 > 1.0 > max(losses[scheme][0] for scheme in others),
            f"within the {TRAINED} trained positions each of the four learns the order (best possible loss "
            f"{floor:.2f}); without positions the loss is {losses['none'][0]:.2f}",
        ),
        (
            min(losses[scheme][1] for scheme in ("sinusoidal", "learned")) > guessing,
            f"right after them sinusoidal and learned are worse than guessing ({guessing:.2f}): up to {added:.2f}",
        ),
        (
            rope[1] < rope[0] + 0.2 and rope[3] > rope[0] + 1,
            f"RoPE works up to {2 * TRAINED} positions and fails later: {rope[1]:.2f}, then {rope[3]:.2f}",
        ),
        (
            max(alibi) < alibi[0] + 0.2,
            f"ALiBi works for all {REACH}: {alibi[0]:.2f} becomes {alibi[3]:.2f}",
        ),
    ]


@torch.no_grad()
def _shuffled() -> float:
    """Difference between unmasked attention on shuffled tokens and its shuffled outputs on the same tokens in order."""
    with seeded(0):
        q, k, v = (torch.randn(TRAINED, 8).double() for _ in range(3))
        order = torch.randperm(TRAINED)
    y, _ = functional.scaled_dot_product_attention(q, k, v)
    shuffled, _ = functional.scaled_dot_product_attention(q[order], k[order], v[order])
    return difference(shuffled, y[order])


def _untrained(scheme: str, n_layers: int = 1) -> tuple[GPT, Tensor]:
    with seeded(0):
        model = GPT(N, ModelConfig(**{**SHAPE, "n_layers": n_layers}, max_seq_len=REACH, positions=scheme)).double()
        return model, torch.randint(N, (4, TRAINED))


@torch.no_grad()
def _reordered(scheme: str, n_layers: int = 1) -> float:
    """How much the last logits of a random model change when all tokens but the last are reversed."""
    model, tokens = _untrained(scheme, n_layers)
    flipped = torch.cat([tokens[:, :-1].flip(1), tokens[:, -1:]], dim=1)
    return difference(model(tokens)[:, -1], model(flipped)[:, -1])


@torch.no_grad()
def _shifted(scheme: str) -> float:
    """How much the attention weights of a random model change when all positions are larger by SHIFT."""
    model, tokens = _untrained(scheme)
    found = []
    for start in (0, SHIFT):
        with collect_attention(model) as maps:
            model(tokens, torch.arange(start, start + TRAINED))
        found.append(maps[0])
    return difference(*found)


def _text(rows: int, length: int) -> Tensor:
    """(rows, length): a token is the one two positions before it plus 1, with probability CLEAR, else any token."""
    text = torch.randint(N, (rows, length))
    clear = torch.rand(rows, length) < CLEAR
    for i in range(2, length):
        text[:, i] = torch.where(clear[:, i], (text[:, i - 2] + 1) % N, text[:, i])
    return text


def _floor() -> float:
    """The entropy of a token of the language, given the tokens before it: no model can have a lower loss."""
    other = (1 - CLEAR) / N
    return -((CLEAR + other) * math.log(CLEAR + other) + (N - 1) * other * math.log(other))


def _loss_by_position(scheme: str, seed: int) -> list[float]:
    """Trained on texts of TRAINED tokens: the loss at each of REACH positions."""
    with seeded(seed):
        model = GPT(N, ModelConfig(**SHAPE, max_seq_len=REACH, positions=scheme))

        def loss() -> Tensor:
            text = _text(ROWS, TRAINED + 1)
            total, count = model(text[:, :-1], targets=text[:, 1:])
            return total / count

        train(model.parameters(), loss, STEPS)
        text = _text(256, REACH + 1)
        with torch.no_grad():
            logits, targets = model(text[:, :-1]), text[:, 1:]
        return (
            torch.stack([functional.cross_entropy(logits[:, i], targets[:, i])[0] for i in range(REACH)])
            .div(len(text))
            .tolist()
        )


def draw(numbers: dict, figure):
    axes = figure.subplots()
    for scheme, loss in numbers["loss"].items():
        axes.plot(range(2, REACH + 1), loss[1:], label=scheme)  # no rule for the first token
    axes.axvline(TRAINED, color="grey", linestyle=":", label="trained up to here")
    axes.axhline(math.log(N), color="grey", linestyle="--", linewidth=1, label="guessing")
    axes.set(xlabel="position", ylabel="loss, nats per token")
    figure.legend(loc="outside right upper")
