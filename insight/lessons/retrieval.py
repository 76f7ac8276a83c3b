"""Query, key and value: a lookup that returns a little of every value, most of the one whose key matches."""

import torch

from insight.lessons.lesson import Lesson, difference, fixed
from model import functional

TOPICS = ["sea", "treasure", "war", "love", "horror"]
BOOKS = {  # title: which topics its key names, and the value, its year
    "Treasure Island": ([1, 1, 0, 0, 0], 1883),
    "Moby-Dick": ([1, 0, 0, 0, 0], 1851),
    "War and Peace": ([0, 0, 1, 1, 0], 1869),
    "Emma": ([0, 0, 0, 1, 0], 1815),
    "Frankenstein": ([0, 0, 0, 0, 1], 1818),
}
QUESTION = [1, 1, 0, 0, 0]  # "sea and treasure"
RIGHT = "Treasure Island"
LOUDNESS = [1, 4, 16]  # how much longer the query is than the question


def lesson() -> Lesson:
    k = torch.tensor([key for key, _ in BOOKS.values()], dtype=torch.float64)
    v = torch.tensor([[year] for _, year in BOOKS.values()], dtype=torch.float64)
    q = torch.tensor([QUESTION], dtype=torch.float64)

    def read(q=q, k=k, v=v) -> tuple[torch.Tensor, torch.Tensor]:
        return functional.scaled_dot_product_attention(q, k, v)

    years, weights = zip(*(read(loud * q) for loud in LOUDNESS), strict=True)
    order = torch.tensor([3, 0, 4, 2, 1])
    other_year = v.clone()
    other_year[0] = 2000
    numbers = {
        "weights": {loud: w[0].tolist() for loud, w in zip(LOUDNESS, weights, strict=True)},
        "years": {loud: y.item() for loud, y in zip(LOUDNESS, years, strict=True)},
        "another order": difference(read(k=k[order], v=v[order])[0], years[0]),
        "another value": [difference(a, b) for a, b in zip(read(v=other_year), (years[0], weights[0]), strict=True)],
        "another key": difference(read(k=k.roll(1, 0))[1], weights[0]),
    }
    titles = list(BOOKS)
    rows = [
        [title, str(year), *(f"{w[0, i]:.3f}" for w in weights)] for i, (title, (_, year)) in enumerate(BOOKS.items())
    ]
    header = ["book", "value: its year", *(f"weight, query x {loud}" for loud in LOUDNESS)]
    rows.append(["result", "", *(f"{y.item():.1f}" for y in years)])
    right = [w[0].argmax().item() == titles.index(RIGHT) for w in weights]
    mixed = [difference(w @ v, y) for w, y in zip(weights, years, strict=True)]
    convex = all((w >= 0).all() and abs(w.sum().item() - 1) < 1e-12 for w in weights)
    between = all(v.min() <= y.item() <= v.max() for y in years)
    changed_read, changed_weights = numbers["another value"]
    sharp, right_year = numbers["weights"][LOUDNESS[-1]], BOOKS[RIGHT][1]
    claims = [
        (
            all(right),
            f"for the query sea and treasure, {RIGHT} gets the largest weight: {fixed([weights[0].max().item()])}",
        ),
        (
            max(sharp) > 0.99 and abs(years[-1].item() - right_year) < 1,
            f"a longer query gives sharper weights: at {LOUDNESS[-1]} times the length it returns "
            f"{years[-1].item():.1f}",
        ),
        (
            convex and max(mixed) < 1e-9,
            "the result is a convex combination of the values: the weights are at least 0 and sum to 1",
        ),
        (between, "so it lies between the smallest and the largest value"),
        (
            changed_weights == 0 and changed_read > 1,
            f"another value for {RIGHT} leaves the weights as they are, as Q and K alone give them, and moves the "
            f"result by {changed_read:.1f} years",
        ),
        (numbers["another key"] > 0.1, f"other keys change the weights, by up to {numbers['another key']:.3f}"),
        (
            numbers["another order"] < 1e-9,
            "the order of the books does not matter: reordered, they give the same result",
        ),
    ]
    return Lesson(numbers, [[header, *rows]], claims)


def draw(numbers: dict, figure):
    axes = figure.subplots()
    width = 0.8 / len(LOUDNESS)
    for i, (loud, weights) in enumerate(numbers["weights"].items()):
        label = f"query x {loud}: returns {numbers['years'][loud]:.0f}"
        axes.bar([j + i * width for j in range(len(weights))], weights, width, label=label)
    axes.set_xticks([j + width for j in range(len(BOOKS))], [f"{title}\n{year}" for title, (_, year) in BOOKS.items()])
    axes.set(ylabel="weight")
    axes.legend()
