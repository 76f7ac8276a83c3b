"""One word in two sentences: the same vector before the first block, different ones after it."""

import torch
from torch import Tensor

from insight.lessons.lesson import Lesson, difference, seeded
from model import GPT, ModelConfig
from model.hooks import Site, recording

WORD = "bank"
SENTENCES = ["we walked along the river to the bank", "we took all our money to the bank"]
RIVER = ["river", "water", "boat", "fish", "shore"]
MONEY = ["money", "loan", "gold", "debt", "coin"]
EITHER = ["we", "the", "to", "all", "our", "walked", "took", "along", "saw", "a"]
N_LAYERS = 3
MANY, LENGTH = 1000, 8  # sentences of each sense, and their words


@torch.no_grad()
def lesson() -> Lesson:
    words = sorted({*RIVER, *MONEY, *EITHER, WORD, *" ".join(SENTENCES).split()})
    ids = {word: i for i, word in enumerate(words)}
    with seeded(0):
        model = GPT(len(words), ModelConfig(d_model=32, n_layers=N_LAYERS, n_heads=4, d_ff=64, max_seq_len=LENGTH))
        senses = [torch.stack([_sentence(ids, topic) for _ in range(MANY)]) for topic in (RIVER, MONEY)]
    two = torch.tensor([[ids[word] for word in sentence.split()] for sentence in SENTENCES])
    pairs = [(x[0, -1], x[1, -1]) for x in stream(model, two)]
    by_sense = zip(*([x[:, -1] for x in stream(model, tokens)] for tokens in senses), strict=True)
    numbers = {
        "difference": [difference(a, b) for a, b in pairs],
        "cosine": [torch.cosine_similarity(a, b, dim=0).item() for a, b in pairs],
        "told apart": [told_apart(river, money) for river, money in by_sense],
        "places": [sentence.split().index(WORD) for sentence in SENTENCES],
    }
    places = ["before the first block", *(f"after block {i + 1}" for i in range(N_LAYERS))]
    columns = zip(places, numbers["difference"], numbers["cosine"], numbers["told apart"], strict=True)
    table = [[f'"{WORD}"', "largest difference", "cosine", "sense right"]]
    table += [[place, f"{off:.3f}", f"{alike:.3f}", f"{100 * share:.1f} %"] for place, off, alike, share in columns]
    off, cosine, share = numbers["difference"], numbers["cosine"], numbers["told apart"]
    claims = [
        (
            off[0] == 0 and len(set(numbers["places"])) == 1,
            f'before the first block "{WORD}" is the same vector in any sentence: static',
        ),
        (min(off[1:]) > 0, "after it there are two, one for each sentence: contextual"),
        (
            cosine[0] > 0.999 > cosine[1] and cosine == sorted(cosine, reverse=True),
            f"each block mixes in more of the sentence: the cosine falls to {cosine[-1]:.3f}",
        ),
        (
            abs(share[0] - 0.5) < 1e-9,
            f"a linear classifier of static vectors gets the sense right in {100 * share[0]:.0f} % of sentences: "
            "chance",
        ),
        (
            share[1] > 0.95 and min(share[2:]) > 0.8,
            f"of contextual ones, after one block of random weights, in {100 * share[1]:.0f} %: the sentence is in the "
            "vector of a word from the start, and training decides what of it matters",
        ),
    ]
    return Lesson(numbers, [table], claims)


def stream(model: GPT, tokens: Tensor) -> list[Tensor]:
    """The residual stream (b s d_model) before the first block and after each."""
    sites = [Site("stream", i) for i in range(len(model.blocks) + 1)]
    with recording(model, sites) as found:
        model(tokens)
    return [found[site] for site in sites]


def _sentence(ids: dict[str, int], topic: list[str]) -> Tensor:
    """LENGTH words: common ones, two of the topic, and the word last."""
    words = [EITHER[i] for i in torch.randint(len(EITHER), (LENGTH - 1,))]
    for place in torch.randperm(LENGTH - 1)[:2]:
        words[place] = topic[torch.randint(len(topic), ())]
    return torch.tensor([ids[word] for word in [*words, WORD]])


def told_apart(one: Tensor, other: Tensor) -> float:
    """Accuracy of a linear classifier of two kinds of vectors (n d).

    It is fitted by least squares to the first half of each kind and evaluated on the second half.
    """
    half = len(one) // 2
    sides = torch.cat([torch.ones(half), -torch.ones(half)]).double()
    read, asked = (
        torch.nn.functional.pad(torch.cat(parts), (0, 1), value=1.0).double()
        for parts in ((one[:half], other[:half]), (one[half:], other[half:]))
    )
    cut = torch.linalg.pinv(read) @ sides
    return ((asked @ cut > 0) == (sides > 0)).double().mean().item()


def draw(numbers: dict, figure):
    axes = figure.subplots()
    places = range(len(numbers["cosine"]))
    axes.plot(places, numbers["cosine"], "o-", label=f'cosine of the two "{WORD}"')
    axes.plot(places, numbers["told apart"], "o-", label="sense right, share")
    axes.set_xticks(places, ["before", *(f"block {i}" for i in places[1:])])
    axes.set(ylim=(0, 1.05))
    axes.legend()
