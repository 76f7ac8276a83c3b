"""The causal mask: one forward pass trains every position at once, if none sees the token it has to predict."""

import math
from contextlib import ExitStack

import torch
from torch import Tensor

from insight.lessons.lesson import Lesson, difference, seeded, train
from model import GPT, ModelConfig, collect_attention, functional
from model.hooks import attending
from model.ops import MATH

LENGTH = 5  # of the triangle
N, CHOICES = 12, 3  # tokens of a small language, and how many may follow
SHAPE = {"d_model": 32, "n_layers": 1, "n_heads": 2, "d_ff": 64}
T, ROWS, STEPS = 32, 16, 120


def lesson(seed: int = 0) -> Lesson:
    """`seed` is for the two small training runs."""
    triangle = functional.causal_mask(LENGTH, LENGTH)
    numbers = {"triangle": triangle.int().tolist()}
    numbers |= {"one forward": _one_forward(), "padding": _padding(), "finite": _finite_values()}
    numbers["floor"] = math.log(CHOICES)
    numbers["trained"] = {name: _train(seed, causal=name == "with") for name in ("with", "without")}

    squares = [["query \\ key", *map(str, range(LENGTH))]]
    squares += [[str(i), *("1" if may else "." for may in row)] for i, row in enumerate(triangle.tolist())]
    trained = [["trained", "training loss", "loss on prefixes", "generated tokens allowed"]]
    for name, (loss, on_prefixes, right) in numbers["trained"].items():
        trained.append([f"{name} the mask", f"{loss:.2f}", f"{on_prefixes:.2f}", f"{100 * right:.0f} %"])
    trained.append(["the language itself", *[f"{numbers['floor']:.2f}"] * 2, "100 %"])
    trained.append(["guessing", *[f"{math.log(N):.2f}"] * 2, f"{100 * CHOICES / N:.0f} %"])
    return Lesson(numbers, [squares, trained], _claims(numbers))


def _claims(numbers: dict) -> list[tuple[bool, str]]:
    forward, padding, finite = numbers["one forward"], numbers["padding"], numbers["finite"]
    (loss, on_prefixes, right), (blind_loss, blind_on_prefixes, blind_right) = numbers["trained"].values()
    ones = LENGTH * (LENGTH + 1) // 2
    return [
        (sum(map(sum, numbers["triangle"])) == ones, f"query i sees keys 0 .. i: {ones} of {LENGTH**2} pairs"),
        (
            forward["difference"] < 1e-12,
            f"one forward pass of {LENGTH} tokens gives the same as {LENGTH} passes of 1 .. {LENGTH} tokens, to 1e-12, "
            f"and processes {forward['tokens once']} tokens, not {forward['tokens each']}",
        ),
        (
            blind_loss < numbers["floor"] / 2,
            f"trained without the mask, the loss is too good: {blind_loss:.2f}; without a look at the answer it "
            f"cannot be below {numbers['floor']:.2f}, ln {CHOICES}",
        ),
        (
            blind_on_prefixes > math.log(N) and blind_right < 0.5 < 0.9 < right,
            f"its text is bad: {100 * blind_right:.0f} % of the generated tokens are allowed, with the mask "
            f"{100 * right:.0f} %",
        ),
        (
            abs(loss - numbers["floor"]) < 0.2 and abs(on_prefixes - loss) < 0.1,
            "with the mask, the training loss is the loss on prefixes, as generation sees them",
        ),
        (
            padding["weight on padding"] == padding["weight on the future"] == 0,
            "causal & padding in one mask: weights exactly 0 on padding and on the future",
        ),
        (padding["row sums"] < 1e-12, "the row of every token still sums to 1"),
        (padding["beside the row alone"] < 1e-12, "a padded row gives the same as without padding, to 1e-12"),
        (
            padding["row of padding"] == 0,
            "a query that may attend to no key, in padding on the left, has weights 0, not NaN",
        ),
        (
            finite["ordinary row"] == 0,
            "-10,000 instead of -inf looks right: an ordinary row has exactly 0 at masked keys",
        ),
        (
            finite["row of nothing"] > 0.9 / LENGTH,
            f"a row with only -10,000 attends to every masked key, with weight {finite['row of nothing']:.2f} each",
        ),
        (
            finite["beside a larger score"] > 0.99,
            f"added to a score of 10,020 it masks nothing: the masked key has weight "
            f"{finite['beside a larger score']:.2f}",
        ),
        (
            finite["two masks in float16"],
            "the lowest number of float16, added twice, is -inf after all, and a row of it gives NaN in a plain "
            "softmax",
        ),
    ]


@torch.no_grad()
def _one_forward() -> dict:
    with seeded(0):
        model = GPT(N, ModelConfig(**SHAPE, max_seq_len=LENGTH)).double()
        tokens = torch.randint(N, (2, LENGTH))
    once = model(tokens)
    each = torch.stack([model(tokens[:, : i + 1])[:, -1] for i in range(LENGTH)], dim=1)
    return {
        "difference": difference(once, each),
        "tokens once": LENGTH,
        "tokens each": sum(range(1, LENGTH + 1)),
    }


@torch.no_grad()
def _padding() -> dict:
    """Two rows; the second has two positions of padding, then three tokens."""
    with seeded(0):
        model = GPT(N, ModelConfig(**SHAPE, max_seq_len=LENGTH)).double()
        tokens = torch.randint(N, (2, LENGTH))
    padding = torch.tensor([[True] * LENGTH, [False] * 2 + [True] * (LENGTH - 2)])
    positions = (padding.cumsum(1) - 1).clamp(min=0)  # of a token in its text, wherever the padding is
    with collect_attention(model) as maps:
        logits = model(tokens, positions, padding=padding)
    weights = maps[0]  # (b h q k)
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    sums = weights.sum(-1).transpose(1, 2)[padding]  # of real tokens
    return {
        "weight on padding": weights[1, :, :, :2].max().item(),
        "weight on the future": weights[:, :, future].max().item(),
        "row sums": difference(sums, torch.ones_like(sums)),
        "row of padding": weights[1, :, :2].abs().max().item(),
        "beside the row alone": difference(logits[1, 2:], model(tokens[1:, 2:])[0]),
    }


def _finite_values() -> dict:
    """Effects of a large finite negative value instead of -inf, with torch's softmax."""
    scores, nowhere = torch.linspace(-1, 1, LENGTH), torch.zeros(LENGTH, dtype=torch.bool)
    last_hidden = torch.arange(LENGTH) < LENGTH - 1
    large = torch.where(last_hidden, scores, torch.tensor(10_020.0))
    lowest = torch.full((LENGTH,), torch.finfo(torch.float16).min, dtype=torch.float16)
    return {
        "ordinary row": scores.masked_fill(~last_hidden, -1e4).softmax(-1)[-1].item(),
        "row of nothing": scores.masked_fill(~nowhere, -1e4).softmax(-1).min().item(),
        "beside a larger score": (large + torch.where(last_hidden, 0.0, -1e4)).softmax(-1)[-1].item(),
        "two masks in float16": bool((lowest + lowest).softmax(-1).isnan().all()),
    }


def _language() -> Tensor:
    """(N, CHOICES): the tokens that may come two positions after each."""
    return torch.stack([torch.randperm(N)[:CHOICES] for _ in range(N)])


def _text(followers: Tensor, rows: int, length: int) -> Tensor:
    """(rows, length): each token is one of those that may come two positions after another, with equal probability."""
    text = torch.randint(N, (rows, length))
    for i in range(2, length):
        text[:, i] = followers[text[:, i - 2], torch.randint(CHOICES, (rows,))]
    return text


def _train(seed: int, causal: bool) -> tuple[float, float, float]:
    """Trains on the language. Returns training loss, loss on prefixes, share of generated tokens allowed."""
    with seeded(seed), ExitStack() as hooks:
        followers = _language()
        model = GPT(N, ModelConfig(**SHAPE, max_seq_len=T))
        if not causal:
            hooks.enter_context(attending(model, lambda i, own, *given: _see_everything(*given)))

        def loss(rows: int = ROWS) -> Tensor:
            text = _text(followers, rows, T + 1)
            targets = text[:, 1:].clone()
            targets[:, 0] = functional.IGNORE  # it follows nothing
            total, count = model(text[:, :-1], targets=targets)
            return total / count

        train(model.parameters(), loss, STEPS)
        with torch.no_grad():
            text = _text(followers, 128, T)
            ends = range(2, T)
            losses = [
                functional.cross_entropy(model(text[:, :end], at=_last(text, end)), text[:, end])[0] for end in ends
            ]
            on_prefixes = sum(losses).item() / (len(ends) * len(text))
            own = text[:, :2]
            while own.shape[1] < T:
                weights = functional.softmax(model(own, at=_last(own, own.shape[1])))
                own = torch.cat([own, torch.multinomial(weights, 1)], dim=1)
            right = (followers[own[:, :-2]] == own[:, 2:, None]).any(-1).double().mean().item()
            return loss(128).item(), on_prefixes, right


def _last(text: Tensor, end: int) -> Tensor:
    return torch.full((len(text),), end - 1)


def _see_everything(q, k, v, mask, bias, soft_cap, dropout_p):
    """Attention with a mask that hides nothing."""
    everything = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    return MATH.attention(q, k, v, everything, bias, soft_cap, dropout_p)


def draw(numbers: dict, figure):
    square, bars = figure.subplots(1, 2)
    square.imshow(numbers["triangle"], cmap="Blues")
    square.set(xlabel="key", ylabel="query", title="which keys each query sees")
    names = list(numbers["trained"])
    for i, (label, column) in enumerate((("training", 0), ("on prefixes", 1))):
        bars.bar(
            [j + 0.4 * i for j in range(2)], [numbers["trained"][name][column] for name in names], 0.4, label=label
        )
    bars.axhline(numbers["floor"], color="grey", linestyle=":", label="the language itself")
    bars.set_xticks([0.2, 1.2], [f"{name} the mask" for name in names])
    bars.set(ylabel="loss, nats per token")
    bars.legend()
