"""The cost of attention as the text grows, with and without a cache, compared with recurrence and convolution."""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad
from torch.utils.flop_counter import FlopCounterMode

from insight.lessons.lesson import Lesson, exponent, seeded
from model import GPT, ModelConfig
from model.attention import CausalMultiHeadAttention
from model.cache import KVCache
from model.ops import MATH, fused_attention, math_attention

LENGTHS = [256, 512, 1024, 2048, 4096]
D_HEAD = 64
MODEL = {"d_model": 64, "n_layers": 2, "n_heads": 4, "d_ff": 192, "max_seq_len": 4096}
CONTEXTS = [256, 512, 1024, 2048]  # tokens before the one that is timed
D_LAYER, KERNEL = 8, 3
SEQUENCES = [16, 32, 64, 128]
ROUNDS = 3


def lesson() -> Lesson:
    numbers = {"attention": _attention(), "token": _token(), "layers": _layers()}
    attention, token, layers = numbers.values()
    growth = [["T", *(f"{name}, {what}" for name in attention for what in ("ms", "MiB"))]]
    for i, T in enumerate(LENGTHS):
        cells = [f"{values[i]:.1f}" for one in attention.values() for values in (one["ms"], one["MiB"])]
        growth.append([str(T), *cells])
    powers = [one[f"{what} exponent"] for one in attention.values() for what in ("ms", "MiB")]
    growth.append(["grows as T to the power", *(f"{power:.2f}" for power in powers)])

    per_token = [["a new token after", *(f"{name} cache, ms" for name in token)]]
    per_token += [[str(n), *(f"{one['ms'][i]:.2f}" for one in token.values())] for i, n in enumerate(CONTEXTS)]
    per_token.append(["grows as T to the power", *(f"{one['exponent']:.2f}" for one in token.values())])

    n = SEQUENCES[-1]
    compared = [
        [
            f"layer, {n} tokens",
            "products in a row",
            "inputs seen",
            "layers to see all",
            "first to last",
            "FLOPs",
            "as n to the power",
        ]
    ]
    for name, one in layers.items():
        cells = [one["chain"][-1], one["seen"], one["layers"], one["path"], f"{one['flops'][-1]:,}"]
        compared.append([name, *map(str, cells), f"{one['flops exponent']:.2f}"])
    return Lesson(numbers, [growth, per_token, compared], _claims(attention, token, layers))


def _claims(attention: dict, token: dict, layers: dict) -> list[tuple[bool, str]]:
    math, fused = attention.values()
    without, cached = token.values()
    recurrent, convolution, attending = layers.values()
    n = SEQUENCES[-1]
    return [
        (
            1.4 < math["ms exponent"] < 2.6 and 1.4 < fused["ms exponent"] < 2.6,
            "the time of attention grows about as the square of T",
        ),
        (
            abs(math["MiB exponent"] - 2) < 0.15,
            "so does the memory that plain math keeps for the backward pass: it stores the T x T weights",
        ),
        (abs(fused["MiB exponent"] - 1) < 0.15, "the fused kernel never stores them: its memory grows as T"),
        (
            math["ms"][-1] > fused["ms"][-1],
            f"and it is {math['ms'][-1] / fused['ms'][-1]:.1f} times as fast at {LENGTHS[-1]} tokens",
        ),
        (
            without["exponent"] > 0.6 > 0.4 > cached["exponent"],
            "without a cache a new token costs in proportion to the tokens before it, with one it hardly depends "
            "on them",
        ),
        (
            without["ms"][-1] > 3 * cached["ms"][-1],
            f"after {CONTEXTS[-1]} tokens it is {without['ms'][-1] / cached['ms'][-1]:.0f} times as fast with the "
            "cache",
        ),
        (
            recurrent["chain"] == SEQUENCES,
            "recurrence waits for each token: as many products in a row as there are tokens",
        ),
        (
            len(set(convolution["chain"])) == len(set(attending["chain"])) == 1,
            f"convolution and attention do not: {convolution['chain'][0]} and {attending['chain'][0]} for any n",
        ),
        (
            convolution["seen"] == KERNEL and convolution["layers"] == -(-(n - 1) // (KERNEL - 1)),
            f"a convolution of width {KERNEL} sees {KERNEL} inputs, and takes (n - 1) / {KERNEL - 1} layers to see {n}",
        ),
        (recurrent["seen"] == attending["seen"] == n, "in one layer of the others a gradient reaches every input"),
        (
            recurrent["path"] == n and attending["path"] == attending["chain"][0],
            f"from the first token to the last, recurrence takes {recurrent['path']} products, convolution "
            f"{convolution['path']}, attention {attending['path']}",
        ),
        (
            recurrent["gradient"] < 1e-6 < 1e-2 < attending["gradient"],
            f"over many products the gradient vanishes: the first input gets {recurrent['gradient']:.0e} of the last "
            f"input's in recurrence, {attending['gradient']:.0e} in attention",
        ),
        (
            attending["flops exponent"] > 1.5 > 1.1 > max(recurrent["flops exponent"], convolution["flops exponent"]),
            "the price: the FLOPs of attention approach the square of n, those of the others grow as n",
        ),
    ]


# --- attention as plain math, and fused -------------------------------------------------------------------------------


def _attention() -> dict:
    """One head of width D_HEAD, causal: milliseconds of a forward pass, MiB kept for the backward pass."""
    inputs = [[torch.randn(1, 1, T, D_HEAD, requires_grad=True) for _ in range(3)] for T in LENGTHS]
    found = {}
    for name, attend in (("math", math_attention), ("fused", fused_attention)):
        forward = [partial(attend, q, k, v, None, None, None, 0.0) for q, k, v in inputs]
        mib = [_kept(work) / 2**20 for work in forward]
        with torch.no_grad():
            ms = _milliseconds(forward)
        found[name] = {
            "ms": ms,
            "MiB": mib,
            "ms exponent": exponent(LENGTHS, ms),
            "MiB exponent": exponent(LENGTHS, mib),
        }
    return found


def _milliseconds(works: list[Callable[[], object]]) -> list[float]:
    """Processor time of each, the least of ROUNDS after one to warm up; other programs on the machine do not count.

    They take turns, so that a slow moment of the machine does not fall on one of them alone.
    """
    times = [[] for _ in works]
    for _ in range(1 + ROUNDS):
        for work, mine in zip(works, times, strict=True):
            began = time.process_time()
            work()
            mine.append(time.process_time() - began)
    return [1000 * min(mine[1:]) for mine in times]


def _kept(work: Callable[[], object]) -> int:
    """Bytes of the tensors that autograd keeps from `work` for the backward pass, each memory once."""
    memories = {}

    def keep(x: Tensor) -> Tensor:
        memory = x.untyped_storage()
        memories[memory.data_ptr()] = memory.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        result = work()  # kept until all is counted, so that no memory is reused
    del result
    return sum(memories.values())


# --- one more token, with and without a cache -------------------------------------------------------------------------


@torch.no_grad()
def _token() -> dict:
    with seeded(0):
        model = GPT(64, ModelConfig(**MODEL))
        tokens = torch.randint(model.vocab_size, (1, CONTEXTS[-1] + 1))
    caches = [model.new_cache() for _ in CONTEXTS]
    for n, cache in zip(CONTEXTS, caches, strict=True):
        model(tokens[:, :n], cache=cache)

    def cached(n: int, cache: KVCache):
        cache.set_lengths([n])
        model(tokens[:, n : n + 1], cache=cache)

    ways = {
        "without": [partial(model, tokens[:, : n + 1], at=torch.tensor([n])) for n in CONTEXTS],
        "with a": [partial(cached, n, cache) for n, cache in zip(CONTEXTS, caches, strict=True)],
    }
    found = {name: _milliseconds(works) for name, works in ways.items()}
    return {name: {"ms": ms, "exponent": exponent(CONTEXTS, ms)} for name, ms in found.items()}


# --- recurrence, convolution, attention -----------------------------------------------------------------------------


def recurrence(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """h_t = tanh(x_t w + h_(t-1) u) on x (n d)."""
    h, states = x.new_zeros(1, len(u)), []
    for row in (x @ w).split(1):
        h = torch.tanh(row + h @ u)
        states.append(h)
    return torch.cat(states)


def convolution(x: Tensor, w: Tensor) -> Tensor:
    """Each output a product of w (d d KERNEL) with the last KERNEL inputs of x (n d)."""
    return conv1d(pad(x.T, (KERNEL - 1, 0)).unsqueeze(0), w).squeeze(0).T


def _layers() -> dict:
    """Three layers (n d) -> (n d) that are causal, with random weights, measured in the same way."""
    bound = D_LAYER**-0.5  # of torch.nn.RNN's initial weights
    with seeded(0):
        w, u, w_conv = (
            torch.empty(D_LAYER, D_LAYER, *more).double().uniform_(-bound, bound).requires_grad_()
            for more in ((), (), (KERNEL,))
        )
        attention = CausalMultiHeadAttention(D_LAYER, 1).double()
        x = torch.randn(SEQUENCES[-1], D_LAYER).double()
    attention.ops = MATH
    layers = {
        "recurrence": lambda x: recurrence(x, w, u),
        "convolution": lambda x: convolution(x, w_conv),
        "attention": lambda x: attention(x.unsqueeze(0)).squeeze(0),
    }
    return {name: _measure_layer(layer, x) for name, layer in layers.items()}


def _measure_layer(layer: Callable[[Tensor], Tensor], x: Tensor) -> dict:
    flops = [_flops(layer, x[:n]) for n in SEQUENCES]
    reaching = _reaching(layer, x, 1)
    n_layers, reached = 1, reaching
    while reached[0] == 0:
        n_layers += 1
        reached = _reaching(layer, x, n_layers)
    return {
        "chain": [longest_chain(layer(x[:n])) for n in SEQUENCES],
        "seen": sum(size > 0 for size in reaching),
        "layers": n_layers,
        "path": longest_chain(_stacked(layer, x, n_layers)),
        "gradient": reached[0] / reached[-1],
        "flops": flops,
        "flops exponent": exponent(SEQUENCES, flops),
    }


def _stacked(layer: Callable[[Tensor], Tensor], x: Tensor, n_layers: int) -> Tensor:
    for _ in range(n_layers):
        x = layer(x)
    return x


def _reaching(layer: Callable[[Tensor], Tensor], x: Tensor, n_layers: int) -> list[float]:
    """Size of the gradient that comes from the last output to each input."""
    x = x.clone().requires_grad_()
    _stacked(layer, x, n_layers)[-1].sum().backward()
    return x.grad.norm(dim=-1).tolist()


def _flops(layer: Callable[[Tensor], Tensor], x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(x)
    return counter.get_total_flops()


def longest_chain(y: Tensor) -> int:
    """How many matrix products, convolutions included, wait for one another on the way to y, by its autograd graph."""
    length, waiting = {}, [y.grad_fn]
    while waiting:
        node = waiting[-1]
        below = [other for other, _ in node.next_functions if other is not None]
        unknown = [other for other in below if other not in length]
        if unknown:
            waiting += unknown
            continue
        product = node.name().startswith(("MmBackward", "BmmBackward", "AddmmBackward", "ConvolutionBackward"))
        length[node] = product + max((length[other] for other in below), default=0)
        waiting.pop()
    return length[y.grad_fn]


def draw(numbers: dict, figure):
    panels = figure.subplots(1, 3)
    for axes, what in zip(panels, ("ms", "MiB"), strict=False):
        for name, one in numbers["attention"].items():
            label = f"{name}, as T^{one[f'{what} exponent']:.2f}"
            axes.plot(LENGTHS, one[what], "o-", label=label)
        axes.set(xscale="log", yscale="log", xlabel="T", title=f"attention, {what}")
        axes.set_xticks(LENGTHS, LENGTHS)
    for name, one in numbers["token"].items():
        panels[2].plot(CONTEXTS, one["ms"], "o-", label=f"{name} cache, as T^{one['exponent']:.2f}")
    panels[2].set(xscale="log", yscale="log", xlabel="tokens before", title="a new token, ms")
    panels[2].set_xticks(CONTEXTS, CONTEXTS)
    for axes in panels:
        axes.xaxis.minorticks_off()
        axes.legend(fontsize="small")
