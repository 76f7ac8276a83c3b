import copy
import math
import pickle

import pytest
import torch
from hardware import needs_compiler
from torch import nn
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from model import GPT, collect_attention, functional, generate, kernels, native
from model.few_rows import for_few_rows
from model.gpt import checkpoint_activations
from model.kernels import KERNELS, use_kernels

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def loaded(monkeypatch):
    native.load_kernels()
    monkeypatch.setattr(kernels, "OWN_PRODUCTS", True)


def same(kernel, paper, *inputs, tolerance=1e-5):
    """Values and gradients of both agree, against the paper's in float64, relative to the largest of each."""
    results = []
    for function, dtype in ((kernel, torch.float32), (paper, torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        values = function(*leaves)
        values = values if isinstance(values, tuple) else (values,)
        weights = [torch.randn(y.shape, generator=torch.manual_seed(1), dtype=torch.float64) for y in values]
        total = sum((y * w.to(dtype)).sum() for y, w in zip(values, weights, strict=True))
        results.append([*values, *torch.autograd.grad(total, leaves)])
        with torch.no_grad():
            again = function(*(x.detach().to(dtype) for x in inputs))
            assert torch.equal((again if isinstance(again, tuple) else (again,))[0], values[0])
    for ours, expected in zip(*results, strict=True):
        assert ours.dtype == torch.float32
        assert ours.shape == expected.shape
        scale = expected.abs().max().item() + 0.1
        torch.testing.assert_close(ours.double(), expected, rtol=0, atol=tolerance * scale)


SHAPES = [
    (1, 1, 1),
    (7, 5, 3),
    (64, 17, 16),
    (100, 33, 17),
    (130, 300, 70),
    (97, 600, 40),
    (13, 20, 600),
    (601, 9, 25),
    (300, 260, 270),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_any_shape_and_their_gradients(shape):
    rows, d_in, d_out = shape
    x, w, other = torch.randn(rows, d_in), torch.randn(d_out, d_in), torch.randn(d_out + 1, d_in)
    same(kernels.linear, lambda x, *ws: tuple(x @ w.t() for w in ws), x, w, other)
    same(lambda x, w: kernels.linear(x.t(), w.t())[0], lambda x, w: x.t() @ w, torch.randn(d_in, rows), w.t())
    same(lambda x, w: kernels.linear(x[:, ::2], w[:, ::2])[0], lambda x, w: x[:, ::2] @ w[:, ::2].t(), x, w)
    onto = torch.randn(rows, d_out)
    expected = onto + x @ w.t()
    torch.testing.assert_close(kernels.multiply(x, w.t(), onto=onto), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(onto, expected, rtol=1e-4, atol=1e-4)


def paper_attention(q, k, v):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, functional.causal_mask(q.shape[2], q.shape[2]))[0]


HEADS = [(1, 1, 1, 1, 1), (2, 4, 2, 7, 3), (1, 2, 1, 50, 16), (2, 2, 2, 130, 20), (1, 6, 2, 49, 32), (1, 1, 1, 300, 64)]


@pytest.mark.parametrize("shape", [*HEADS, (1, 2, 1, 97, 33), (1, 1, 1, 257, 8)], ids=str)
def test_attention_is_that_of_the_paper_wherever_its_numbers_lie(shape):
    b, h, g, s, d = shape
    q, k, v = torch.randn(b, s, h, d).transpose(1, 2), torch.randn(b, g, s, d), torch.randn(b, s, g, d).transpose(1, 2)
    same(kernels.attention, paper_attention, q, k, v)
    same(
        lambda q: kernels.attention(*q.unbind(-1)), lambda q: paper_attention(*q.unbind(-1)), torch.randn(b, h, s, d, 3)
    )
    assert kernels.attention(q, k, v).transpose(1, 2).is_contiguous()


def test_attention_with_scores_beyond_what_exp_can_hold():
    q, k, v = torch.randn(3, 1, 2, 60, 16).unbind()
    same(kernels.attention, paper_attention, 100 * q, k, v, tolerance=1e-3)


@pytest.mark.parametrize("first", [1, 50, 101, 199])
def test_no_query_knows_of_later_keys(first):
    """Not a bit of its result, nor of a gradient."""
    whole = torch.randn(3, 1, 2, 200, 16)
    other = whole.clone()
    other[..., first:, :] = 100 * torch.randn(3, 1, 2, 200 - first, 16)
    results = []
    for inputs in (whole, other):
        inputs.requires_grad_()
        y = kernels.attention(*inputs.unbind())[:, :, :first]
        results.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1][..., :first, :], results[1][1][..., :first, :])
    assert (results[1][1][..., first:, :] == 0).all()


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("own_positions", [False, True])
@pytest.mark.parametrize("d", [2, 6, 10, 16, 32, 70])
def test_heads_are_normed_and_rotated(d, own_positions, pairing):
    x, gain = torch.randn(2, 70, 3, d), torch.randn(d)
    cos, sin = torch.randn(2, *((2, 70, d // 2) if own_positions else (70, d // 2)))

    def rotate(x):
        return functional.rotate(x, cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype), pairing)

    same(lambda x: kernels.norm_rotate(x, None, 0.0, cos, sin, pairing), rotate, x)
    same(
        lambda x, g: kernels.norm_rotate(x, g, 1e-6, cos, sin, pairing),
        lambda *x: rotate(functional.rms_norm(*x)),
        x,
        gain,
    )
    turned = x.transpose(1, 3).contiguous().transpose(1, 3)
    same(
        lambda x, g: kernels.norm_rotate(x, g, 1e-6, cos, sin, pairing),
        lambda *x: rotate(functional.rms_norm(*x)),
        turned,
        gain,
    )


@pytest.mark.parametrize("shape", [(1, 2), (3, 7), (200, 128), (5, 30, 33)], ids=str)
def test_norms_and_gates(shape):
    same(
        lambda x, g: kernels.rms_norm(x, g, 0.1),
        lambda x, g: functional.rms_norm(x, g, 0.1),
        torch.randn(shape),
        torch.randn(shape[-1]),
    )
    gate, up, down = 10 * torch.randn(shape), torch.randn(shape), torch.randn(11, shape[-1])
    same(kernels.gated_linear, lambda gate, up, w: (silu(gate) * up) @ w.t(), gate, up, down)
    same(
        lambda g, u, w: kernels.gated_linear(g.t(), u.t(), w),
        lambda g, u, w: (silu(g) * u).t() @ w.t(),
        torch.randn(5, 9),
        torch.randn(5, 9),
        torch.randn(2, 5),
    )


def test_gates_that_are_far_open_or_shut():
    gate = torch.tensor([-1e4, -200.0, -88.0, 88.0, 200.0, 1e4, torch.nan])
    y = kernels.gated_linear(gate.unsqueeze(1), torch.ones(7, 1), torch.ones(1, 1)).squeeze(1)
    torch.testing.assert_close(y, silu(gate), rtol=1e-5, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.999])
def test_dropout(p):
    """Nothing but zeros and scaled numbers, as many as p says, without a pattern; the same in the gradient."""
    n = 100_003
    x = torch.rand(n).add_(0.5).requires_grad_()
    masks = []
    for _ in range(2):
        y = kernels.dropout(x, p)
        kept = y != 0
        torch.testing.assert_close(y, x * kept / (1 - p))
        (slope,) = torch.autograd.grad((y * x.detach()).sum(), x)
        torch.testing.assert_close(slope, x * kept / (1 - p))
        masks.append((kept.double() - (1 - p)) / math.sqrt(p * (1 - p)))
    one, other = masks
    pairs = [(one, torch.ones(n)), (one, other), (one[1:], other[:-1]), *((one[d:], one[:-d]) for d in (1, 2, 8, 128))]
    for a, b in pairs:
        assert abs((a * b).sum().item()) < 4.5 * math.sqrt(len(a))  # of sums that are normal with sqrt(n)


def test_dropout_is_a_function_of_the_generator_and_of_nothing_else():
    x = torch.rand(300, 70)
    torch.manual_seed(5)
    one, two = kernels.dropout(x, 0.5), kernels.dropout(x, 0.5)
    assert not torch.equal(one, two)
    torch.manual_seed(5)
    torch.set_num_threads(2)
    assert torch.equal(kernels.dropout(x, 0.5), one)
    assert torch.equal(kernels.dropout(x.t().contiguous().t(), 0.5), two)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 3, 2), (100, 16, 5), (300, 33, 70), (150, 8, 20000)], ids=str)
def test_the_loss_in_pieces_is_the_loss(shape, dtype):
    """By kernel in float32, otherwise by torch; some targets are ignored, and once all."""
    rows, d, vocab = shape
    hidden, head = torch.randn(rows, d), 0.3 * torch.randn(vocab, d)
    targets = torch.randint(vocab, (rows,))
    for ignored in (0, 3, 1):
        targets[:: ignored or rows + 1] = functional.IGNORE
        loss, count = kernels.head_cross_entropy(hidden.to(dtype), head.to(dtype), targets)
        assert count == functional.cross_entropy(hidden @ head.t(), targets)[1]
        assert loss.dtype == dtype

        def ours(x, w, targets=targets):
            return kernels.head_cross_entropy(x.to(dtype), w.to(dtype), targets)[0].float()

        same(ours, lambda x, w, t=targets: functional.cross_entropy(x @ w.t(), t)[0].double(), hidden, head)


def test_the_loss_in_pieces_under_autocast_is_near():
    hidden, head = torch.randn(300, 64, requires_grad=True), (0.1 * torch.randn(50, 64)).requires_grad_()
    targets = torch.randint(50, (300,))
    exact = torch.autograd.grad(functional.cross_entropy(hidden @ head.t(), targets)[0], (hidden, head))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = kernels.head_cross_entropy(hidden, head, targets)
    for near, gradient in zip(torch.autograd.grad(loss, (hidden, head)), exact, strict=True):
        assert near.dtype == torch.float32
        assert 1e-4 < (near - gradient).norm() / gradient.norm() < 0.01  # not float32, and no worse than bfloat16


def test_threads_change_nothing():
    """Bit for bit, and so from run to run."""
    x, w = torch.randn(301, 130), torch.randn(77, 130)
    targets, gain = torch.randint(77, (301,)), torch.randn(130)

    def everything():
        leaves = [tensor.clone().requires_grad_() for tensor in (x, w, gain)]
        y, g = leaves[0], leaves[2]
        y = kernels.rms_norm(y, g)
        heads = y.view(7, 43, 5, 26).transpose(1, 2)
        y = kernels.attention(heads, heads, heads).transpose(1, 2).reshape(301, 130)
        loss, _ = kernels.head_cross_entropy(
            kernels.gated_linear(y, kernels.linear(y, w[:26].t() @ w[:26])[0], w[:26].t() @ w[:26]), leaves[1], targets
        )
        return [loss, *torch.autograd.grad(loss, leaves)]

    alone = everything()
    for n in (2, 3, 7):
        torch.set_num_threads(n)
        assert all(torch.equal(a, b) for a, b in zip(alone, everything(), strict=True))


def test_what_does_not_fit_is_refused():
    ops, x = torch.ops.inkling, torch.randn(2, 4, 6, 8)
    with pytest.raises(RuntimeError, match="do not fit"):
        kernels.multiply(torch.randn(2, 4), torch.randn(5, 3))
    with pytest.raises(RuntimeError, match="float32"):
        kernels.multiply(torch.randn(2, 4).double(), torch.randn(4, 3).double())
    for k, v in ((x[:, :, :5], x), (x, x[..., :7]), (x[:, :3], x[:, :3]), (x, x[:1])):
        with pytest.raises(RuntimeError, match="do not fit"):
            kernels.attention(x, k, v)
    with pytest.raises(RuntimeError, match="float32"):
        kernels.attention(x, x, x.double())
    with pytest.raises(RuntimeError, match="side by side"):
        ops.attention(x.transpose(2, 3), x.transpose(2, 3), x.transpose(2, 3))
    with pytest.raises(RuntimeError, match="do not fit"):
        kernels.rms_norm(x, torch.ones(7))
    with pytest.raises(RuntimeError, match="do not fit"):
        kernels.norm_rotate(x, None, 0.0, torch.ones(4, 3), torch.ones(4, 3))
    with pytest.raises(RuntimeError, match="beyond the vocabulary"):
        kernels.head_cross_entropy(torch.randn(64, 8), torch.randn(5, 8), torch.full((64,), 5))


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that was made."""

    numel = 0

    def __torch_dispatch__(self, function, types, arguments=(), more=None):
        result = function(*arguments, **(more or {}))
        self.numel = max(self.numel, result.numel() if isinstance(result, torch.Tensor) else 0)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_loss_in_pieces_never_holds_all_logits(dtype):
    hidden = torch.randn(1024, 4, dtype=dtype, requires_grad=True)
    head, targets = torch.randn(50000, 4, dtype=dtype, requires_grad=True), torch.randint(50000, (1024,))
    with Largest() as largest:
        kernels.head_cross_entropy(hidden, head, targets)[0].backward()
    assert largest.numel <= 1024 * 50000 / 8


CASES = [
    {},
    {"n_kv_heads": 1, "qk_norm": True, "pairing": "interleaved", "tied": True, "vocab_multiple": 8},
    {"positions": "learned", "feed_forward": "gelu", "norm": "layernorm"},
    {"positions": "alibi", "feed_forward": "relu2"},
    {"soft_cap": 5.0},
    {"window": 4, "positions": "sinusoidal"},
    {"rope_scaling": "yarn", "rope_factor": 2.0},
]


def gradients(model, **batch):
    model.zero_grad()
    loss, _ = model(**batch)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def pair(small, **arguments):
    plain = small(**arguments).float()
    fast = copy.deepcopy(plain)
    assert use_kernels(fast)
    return plain, fast


@pytest.mark.parametrize("arguments", CASES, ids=str)
def test_a_model_learns_by_kernels_what_it_learns_without(arguments, small):
    """Loss and every gradient, with ignored targets, positions and masks of its own; logits, tokens, weights."""
    plain, fast = pair(small, **arguments)
    tokens = torch.randint(17, (4, 30))
    targets = tokens.roll(-1, 1)
    targets[:, ::5] = functional.IGNORE
    batch = {"tokens": tokens, "targets": targets}
    positions = {"token_positions": torch.stack([torch.randperm(32)[:30] for _ in range(4)])}
    for more in (
        {},
        positions,
        {"padding": torch.rand(4, 30) < 0.8},
        {"documents": torch.arange(30).expand(4, 30) // 9},
    ):
        expected = gradients(plain, **batch, **more)
        for name, value in gradients(fast, **batch, **more).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=2e-5 * expected[name].abs().max().item())
    torch.testing.assert_close(fast(tokens), plain(tokens), rtol=1e-5, atol=1e-5)
    rows = [[1, 2, 3], [4]]
    written = [[c.tolist() for c in generate(model, rows, 20)] for model in (plain, fast)]
    assert written[0] == written[1]
    assert list(fast.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_every_layer_calls_the_kernels(small, monkeypatch, dropout):
    _, fast = pair(small, qk_norm=True, dropout=dropout, attention_dropout=0.0)
    fast.train()
    called = []
    for name in ("linear", "attention", "norm_rotate", "gated_linear", "dropout", "head_cross_entropy"):
        function = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *x, f=function, name=name, **y: called.append(name) or f(*x, **y))
    tokens = torch.randint(17, (4, 30))
    with FlopCounterMode(display=False) as counter:
        gradients(fast, tokens=tokens, targets=tokens)
    assert counter.get_total_flops() == 0  # no product is left to torch
    counts = {"linear": 6, "attention": 2, "norm_rotate": 9, "gated_linear": 2, "head_cross_entropy": 1}
    counts |= {"dropout": 5 if dropout else 0}
    assert {name: called.count(name) for name in counts} == counts


@pytest.mark.parametrize("how", ["float64", "bfloat16", "autocast", "attention dropout", "few rows"])
def test_what_the_kernels_do_not_cover_goes_on_as_before(how, small):
    plain, fast = pair(small, attention_dropout=0.5 if how == "attention dropout" else 0.0)
    tokens = torch.randint(17, (1, 3) if how == "few rows" else (4, 30))
    for model in (plain, fast):
        model.to({"float64": torch.float64, "bfloat16": torch.bfloat16}.get(how, torch.float32)).train()
    results = []
    for model in (plain, fast):
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
            results.append(gradients(model, tokens=tokens, targets=tokens))
    for name, value in results[0].items():
        tolerance = (
            {"rtol": 1e-5, "atol": 2e-5 * value.abs().max().item()}
            if how == "attention dropout"
            else {"rtol": 0, "atol": 0}
        )
        torch.testing.assert_close(results[1][name], value, **tolerance)


def test_copies_pickles_and_longer_ones_are_models_of_their_own(small):
    plain, fast = pair(small)
    tokens = torch.randint(17, (4, 30))
    expected = plain(tokens)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        torch.nn.init.zeros_(fast.embedding.weight)
        torch.testing.assert_close(other(tokens), expected, rtol=1e-5, atol=1e-5)
        fast.load_state_dict(plain.state_dict())
    longer = torch.randint(17, (2, 60))
    torch.testing.assert_close(fast.extended(60)(longer), plain.extended(60)(longer), rtol=1e-5, atol=1e-5)
    assert GPT(**fast.arguments).load_state_dict(fast.state_dict())


def test_other_ways_to_run_a_model_still_work(small):
    """Written attention, collected weights, recomputed activations, and the kernels of generation."""
    plain, fast = pair(small)
    tokens = torch.randint(17, (4, 30))
    batch = {"tokens": tokens, "targets": tokens}
    expected = gradients(plain, **batch)
    with collect_attention(fast) as maps:
        fast(tokens)
    assert len(maps) == 2
    fast.use_attention("written")
    torch.testing.assert_close(gradients(fast, **batch), expected, rtol=1e-4, atol=1e-4)
    fast.use_attention("fused")
    checkpoint_activations(fast)
    torch.testing.assert_close(gradients(fast, **batch), expected, rtol=1e-4, atol=1e-4)
    plain, fast = pair(small)
    for_few_rows(fast)
    assert not [module for module in fast.modules() if isinstance(module, nn.Linear)]
    torch.testing.assert_close(fast(tokens), plain(tokens), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fast(**batch)[0], plain(**batch)[0], rtol=1e-5, atol=1e-5)


def test_what_is_computed_again_drops_the_same(small):
    tokens, found = torch.randint(17, (4, 30)), []
    _, model = pair(small, dropout=0.5, attention_dropout=0.0)
    for _ in range(2):
        torch.manual_seed(3)
        found.append(gradients(model.train(), tokens=tokens, targets=tokens))
        checkpoint_activations(model)
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def test_without_a_compiler_the_model_stays_as_it_is_and_says_so(small, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(native, "kernels_loaded", lambda: False)
    model, said = small().float(), []
    assert not use_kernels(model, said.append)
    assert said[1].startswith("the kernels of training cannot be built, going on without, slower: ")
    assert not any(type(module) in KERNELS.values() for module in model.modules())
