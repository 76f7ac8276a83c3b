"""The modules are the same for every backend: an edit of a module changes training and generation."""

import copy
from functools import partial

import pytest
import torch
from architectures import ARCHITECTURES
from hardware import needs_compiler, needs_torch_compile

from kernels import build
from kernels.decoding import pack_for_decoding
from kernels.training import with_kernels
from model import attention, feed_forward, functional, generate, gpt, norm, positions
from model.ops import MATH, TORCH

BACKENDS = ["math", "torch", pytest.param("kernels", marks=needs_compiler)]
backends = pytest.mark.parametrize("backend", BACKENDS)


def table(backend: str):
    if backend == "kernels":
        build.load_kernels()
        return with_kernels(TORCH)
    return {"math": MATH, "torch": TORCH}[backend]


def batch(rows=4, length=30):
    """Enough tokens for the kernels to be used, with a few ignored targets."""
    tokens = torch.randint(17, (rows, length), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)
    targets[:, ::5] = functional.IGNORE
    return {"tokens": tokens, "targets": targets}


def loss_and_gradients(model, **given):
    model.zero_grad()
    loss, count = model(**given)
    (loss / count).backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


GIVEN = {
    "plain": {},
    "positions": {"token_positions": torch.stack([torch.arange(32).roll(i)[:30] for i in range(4)])},
    "padding": {"padding": torch.arange(30).expand(4, 30) % 7 != 3},
    "documents": {"documents": torch.arange(30).expand(4, 30) // 9},
}


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("arguments", ARCHITECTURES, ids=str)
def test_every_backend_computes_an_edited_module(small, arguments, backend):
    """Loss and gradients in float32, logits with and without a cache, text, and names of weights are equal."""
    plain, other = small(**arguments).float(), small(**arguments).float()
    other.load_state_dict(plain.state_dict())
    plain.use(MATH)
    other.use(table(backend))
    for given in GIVEN.values():
        expected = loss_and_gradients(plain, **batch(), **given)
        for name, value in loss_and_gradients(other, **batch(), **given).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=2e-5 * expected[name].abs().max().item())
    tokens, cache = batch()["tokens"], other.new_cache()
    expected = plain(tokens)
    torch.testing.assert_close(other(tokens), expected, rtol=1e-5, atol=1e-5)
    pieces = [other(piece, cache=cache) for piece in tokens.split([20, 1, 9], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-5, atol=1e-5)
    texts = [[c.tolist() for c in generate(model, [[1, 2, 3], [4]], 20)] for model in (plain, other)]
    assert texts[0] == texts[1]


def copy_with(model, ops):
    other = copy.deepcopy(model)
    other.use(ops)
    return other


EDITS = {  # what a user may edit, and the arguments of a model that has it
    "attention": (attention.CausalMultiHeadAttention, "forward", {}),
    "swiglu": (feed_forward.SwiGLU, "forward", {}),
    "gelu": (feed_forward.GELU, "forward", {"feed_forward": "gelu"}),
    "relu2": (feed_forward.ReLU2, "forward", {"feed_forward": "relu2"}),
    "rmsnorm": (norm.RMSNorm, "forward", {"qk_norm": True}),
    "layernorm": (norm.LayerNorm, "forward", {"norm": "layernorm"}),
    "rope": (positions.RotaryPositionalEmbedding, "forward", {}),
    "block": (gpt.Block, "forward", {}),
    "hidden": (gpt.GPT, "hidden", {}),
    "logits": (gpt.GPT, "logits", {}),
    "loss": (gpt.GPT, "loss", {}),
}


def edit(monkeypatch, owner, method):
    """Multiplies the method's result by 3."""
    right = getattr(owner, method)

    def edited(*given, **more):
        result = right(*given, **more)
        return (3 * result[0], result[1]) if isinstance(result, tuple) else 3 * result

    monkeypatch.setattr(owner, method, edited)


def check_equal_to_math(model, forward):
    """Loss and gradients of `forward`, which is `model` or compiled from it, equal those of the math backend."""
    plain = copy_with(model, MATH)
    expected, loss = loss_and_gradients(plain, **batch())["loss"], backward(forward, model)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4 * q.grad.abs().max().item(), msg=name)


def backward(forward, model):
    model.zero_grad()
    loss, count = forward(**batch())
    (loss / count).backward()
    return loss.detach()


@backends
@pytest.mark.parametrize("name", EDITS)
def test_an_edited_module_is_what_trains(small, name, backend, monkeypatch):
    """With every backend the loss is that of the edited module, and differs from the loss before."""
    owner, method, arguments = EDITS[name]
    model = small(**arguments).float()
    model.use(table(backend))
    before = backward(model, model)
    edit(monkeypatch, owner, method)
    check_equal_to_math(model, model)
    assert abs(backward(model, model) / before - 1) > 1e-4


@pytest.mark.slow
@needs_torch_compile
@backends
def test_edited_modules_are_what_is_compiled(small, backend, monkeypatch):
    """All modules of a model are edited at once; it is compiled afterwards."""
    model = small(n_layers=1, qk_norm=True).float()
    model.use(table(backend))
    for owner, method, arguments in EDITS.values():
        if arguments in ({}, {"qk_norm": True}):
            edit(monkeypatch, owner, method)
    check_equal_to_math(model, torch.compile(model, backend="eager", dynamic=False))


class Sharper(attention.CausalMultiHeadAttention):
    """Attention with a keyword argument that a user has added."""

    def __init__(self, *arguments, sharpness: float = 1.0, **others):
        super().__init__(*arguments, **others)
        self.sharpness = sharpness

    def forward(self, x, *given, **more):
        return self.sharpness * super().forward(self.sharpness * x, *given, **more)


@backends
def test_a_new_keyword_acts_in_training_and_in_generation(small, backend, monkeypatch):
    """The log probabilities of the generated tokens sum to the loss; without the keyword the loss differs."""
    plain = small().float()
    monkeypatch.setattr(gpt, "CausalMultiHeadAttention", partial(Sharper, sharpness=1.5))
    model = small().float()
    model.load_state_dict(plain.state_dict())
    model.use(table(backend))
    prompt = torch.randint(17, (4, 6))
    generating = copy.deepcopy(model)
    if backend == "kernels":
        pack_for_decoding(generating)
    tokens, log_p = zip(*generate(generating, prompt, 20, log_probabilities=True), strict=True)
    tokens = torch.cat([prompt, torch.stack(tokens, dim=1)], dim=1)
    targets = tokens[:, 1:].clone()
    targets[:, :5] = functional.IGNORE  # the prompt
    loss, count = model(tokens[:, :-1], targets=targets)
    assert count == 80
    torch.testing.assert_close(loss, -torch.stack(log_p).sum(), rtol=1e-5, atol=0)
    assert abs(plain(tokens[:, :-1], targets=targets)[0] / loss - 1) > 1e-3


def test_use_sets_the_same_operations_in_every_module(small):
    model = small(qk_norm=True)
    with_ops = [module for module in model.modules() if hasattr(module, "ops")]
    assert {type(module).__name__ for module in with_ops} == {
        "GPT",
        "CausalMultiHeadAttention",
        "RMSNorm",
        "RotaryPositionalEmbedding",
        "SwiGLU",
        "Dropout",
    }
    assert {module.ops for module in with_ops} == {TORCH}
    model.use(MATH)
    assert {module.ops for module in with_ops} == {MATH}
    assert small().ops == TORCH


@backends
def test_logits_may_have_their_own_parameter(small, backend, monkeypatch):
    """As if a user scales them; with every backend the scale has a gradient."""
    right = gpt.GPT.logits
    monkeypatch.setattr(gpt.GPT, "logits", lambda self, x: right(self, x) * self.scale)
    model = small().float()
    model.scale = torch.nn.Parameter(torch.tensor(0.7))
    model.use(table(backend))
    check_equal_to_math(model, model)
    assert model.scale.grad != 0
