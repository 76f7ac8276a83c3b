"""Keys and values are cached, so a new token costs one row, if its position and its mask are right."""

import torch
from torch import Tensor
from torch.nn import functional as F

from insight.lessons.lesson import Lesson, difference, seeded
from model import GPT, ModelConfig
from model.hooks import attending

SHAPE = {"d_model": 32, "n_layers": 2, "n_heads": 4, "d_ff": 64, "max_seq_len": 32}
LENGTH, PROMPT = 12, 8
SHIFT = 5
EXACT = 1e-5  # float64, but RoPE's table is float32


@torch.no_grad()
def lesson() -> Lesson:
    with seeded(0):
        model = GPT(17, ModelConfig(**SHAPE)).double()
        for parameter in model.parameters():  # larger than at initialization, so that positions matter
            parameter.mul_(2)
        tokens = torch.randint(model.vocab_size, (2, LENGTH))
    whole = model(tokens)
    cache = model.new_cache()
    fed = []
    for token in tokens.split(1, dim=1):
        position = cache.length
        logits = model(token, cache=cache)
        fed.append(
            {"position": position, "slots": cache.length, "difference": difference(logits[:, 0], whole[:, position])}
        )

    def after_prompt(offset) -> float:
        """Prompt first, then each token at position `offset(place)`: largest difference from one forward pass."""
        return difference(_continued(model, tokens, offset), whole[:, PROMPT:])

    ways = {
        "correct: the length of the cache": after_prompt(lambda place: place),
        f"prompt and new tokens {SHIFT} too far": difference(model(tokens, torch.arange(LENGTH) + SHIFT), whole),
        "new tokens 1 too far": after_prompt(lambda place: place + 1),
        "new tokens 1 too near": after_prompt(lambda place: place - 1),
        "new tokens always at 0": after_prompt(lambda place: 0),
        "correct, but the kernel's causal flag": difference(_top_left(model, tokens), whole[:, PROMPT:]),
    }
    q, k, v = torch.ones(1, 1, 1, 4), torch.ones(1, 1, LENGTH, 4), torch.eye(LENGTH).view(1, 1, LENGTH, LENGTH)
    numbers = {
        "fed": fed,
        "ways": ways,
        # one query, equal keys; the values are unit vectors, so the output is the weights
        "flag": F.scaled_dot_product_attention(q, k, v, is_causal=True).flatten().tolist(),
        "mask": F.scaled_dot_product_attention(q, k, v).flatten().tolist(),
    }
    table = [[f"position, {PROMPT} tokens and {LENGTH - PROMPT} one by one", "error of logits"]]
    table += [[way, "0" if off < EXACT else f"{off:.3f}"] for way, off in ways.items()]
    right, together, far, near, zero, flag = ways.values()
    claims = [
        (
            max(step["difference"] for step in fed) < EXACT,
            f"fed one by one into a cache, {LENGTH} tokens give the logits of one forward pass",
        ),
        (
            [step["position"] for step in fed] == list(range(LENGTH)),
            f"the length of the cache is the position of each: 0 .. {LENGTH - 1}, though every pass gets a single "
            "token",
        ),
        (right < EXACT, "a prompt in one pass and then single tokens give them, too"),
        (
            together < EXACT,
            "RoPE sees distances only: an offset shared by all tokens, prompt included, changes nothing",
        ),
        (
            min(far, near) > 0.01,
            f"an offset of one for new tokens alone changes logits by up to {max(far, near):.3f}, without an error",
        ),
        (zero > 0.01, f"so does position 0 for every new token: {zero:.3f}"),
        (
            numbers["flag"][0] == 1 and max(numbers["flag"][1:]) == 0,
            f"the kernel's causal flag is aligned to the top left: one query with {LENGTH} keys sees only key 0",
        ),
        (
            max(abs(weight - 1 / LENGTH) for weight in numbers["mask"]) < 1e-6,
            "it should see all of them: with a cache, the mask is computed from the slots",
        ),
        (flag > 0.01, f"in the model, the flag changes logits by {flag:.3f}"),
    ]
    return Lesson(numbers, [table], claims)


def _continued(model: GPT, tokens: Tensor, offset) -> Tensor:
    """Logits (b, LENGTH - PROMPT, vocab) of the tokens after the prompt, fed one by one."""
    cache = model.new_cache()
    model(tokens[:, :PROMPT], cache=cache)
    places = range(PROMPT, LENGTH)
    columns = [model(tokens[:, [place]], torch.tensor([offset(place)]), cache=cache) for place in places]
    return torch.cat(columns, dim=1)


def _top_left(model: GPT, tokens: Tensor) -> Tensor:
    """The same, at the right positions, but with torch's flag instead of the mask."""

    def attend(i, own, q, k, v, mask, *others):
        return own(q, k, v, None, *others)

    with attending(model, attend):
        return _continued(model, tokens, lambda place: place)


def draw(numbers: dict, figure):
    axes = figure.subplots()
    bars = axes.barh(list(numbers["ways"]), list(numbers["ways"].values()))
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.invert_yaxis()
    axes.set(xlabel="largest difference in a logit from one forward pass of all tokens")
