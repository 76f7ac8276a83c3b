import copy
import math
import pickle
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from hardware import needs_compiler
from torch import nn
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import build, training
from kernels.decoding import pack_for_decoding
from kernels.training import with_kernels
from model import GPT, collect_attention, functional
from model.gpt import checkpoint_activations
from model.ops import TORCH

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def loaded(monkeypatch):
    """Loads the kernels and uses them for few rows, too."""
    build.load_kernels()
    monkeypatch.setattr(training, "MANY_ROWS", 1)


def refused(*_):
    raise AssertionError("left to torch")


def leaf(name: str):
    """Returns a kernel's function of the table, which fails if it would leave the work to torch."""
    return partial(getattr(training, name), otherwise=refused)


def attention(q, k, v):
    return leaf("attention")(q, k, v, None, None, None, 0.0)[0]


def same(kernel, paper, *inputs, tolerance=1e-5):
    """Checks that values and gradients equal the paper's in float64, relative to the largest of each."""
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


def paper_attention(q, k, v):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, functional.causal_mask(q.shape[2], q.shape[2]))[0]


HEADS = [(1, 1, 1, 1, 1), (2, 4, 2, 7, 3), (1, 2, 1, 50, 16), (2, 2, 2, 130, 20), (1, 6, 2, 49, 32), (1, 1, 1, 300, 64)]


@pytest.mark.parametrize("shape", [*HEADS, (1, 2, 1, 97, 33), (1, 1, 1, 257, 8)], ids=str)
def test_attention_equals_the_papers_for_any_strides(shape):
    b, h, g, s, d = shape
    q, k, v = torch.randn(b, s, h, d).transpose(1, 2), torch.randn(b, g, s, d), torch.randn(b, s, g, d).transpose(1, 2)
    same(attention, paper_attention, q, k, v)
    same(lambda q: attention(*q.unbind(-1)), lambda q: paper_attention(*q.unbind(-1)), torch.randn(b, h, s, d, 3))
    assert attention(q, k, v).transpose(1, 2).is_contiguous()


def test_attention_with_scores_that_overflow_exp():
    q, k, v = torch.randn(3, 1, 2, 60, 16).unbind()
    same(attention, paper_attention, 100 * q, k, v, tolerance=1e-3)


@pytest.mark.parametrize("first", [1, 50, 101, 199])
def test_no_query_attends_to_later_keys(first):
    """They change no bit of its result or gradients."""
    whole = torch.randn(3, 1, 2, 200, 16)
    other = whole.clone()
    other[..., first:, :] = 100 * torch.randn(3, 1, 2, 200 - first, 16)
    results = []
    for inputs in (whole, other):
        inputs.requires_grad_()
        y = attention(*inputs.unbind())[:, :, :first]
        results.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1][..., :first, :], results[1][1][..., :first, :])
    assert (results[1][1][..., first:, :] == 0).all()


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("own_positions", [False, True])
@pytest.mark.parametrize("d", [2, 6, 10, 16, 32, 70])
def test_heads_are_normed_and_rotated(d, own_positions, pairing):
    """Whether their memory layout is that of a projection, (b s h d), or any other."""
    weight = torch.randn(d)
    cos, sin = torch.randn(2, *((2, 1, 70, d // 2) if own_positions else (70, d // 2)))

    def paper(x, weight):
        return functional.rotate(functional.rms_norm(x, weight), cos.to(x.dtype), sin.to(x.dtype), pairing)

    def kernel(x, weight):
        return leaf("rotate")(leaf("rms_norm")(x, weight), cos, sin, pairing)

    for axes in ((0, 2, 1, 3), (0, 1, 2, 3), (3, 1, 2, 0)):
        shape = [(2, 3, 70, d)[axis] for axis in axes]
        x = torch.randn(shape).permute(*(axes.index(axis) for axis in range(4)))
        assert x.shape == (2, 3, 70, d)
        same(kernel, paper, x, weight)
        same(lambda x: leaf("rotate")(x, cos, sin, pairing), lambda x: functional.rotate(x, cos, sin, pairing), x)


@pytest.mark.parametrize("shape", [(1, 2), (3, 7), (200, 128), (5, 30, 33)], ids=str)
def test_norms_equal_those_of_the_model(shape):
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    same(lambda x, g: leaf("rms_norm")(x, g, 0.1), lambda x, g: functional.rms_norm(x, g, 0.1), x, weight)


@pytest.mark.parametrize("shape", [(1, 2), (3, 7), (200, 128), (5, 30, 33)], ids=str)
def test_gated_feed_forwards_equal_those_of_the_model(shape):
    gate, up, weight = 10 * torch.randn(shape), torch.randn(shape), torch.randn(11, shape[-1])

    def paper(gate, up, w):
        return (silu(gate) * up) @ w.t()

    same(gated_linear, paper, gate, up, weight)
    turned = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in (gate, up)]
    same(gated_linear, paper, *turned, weight)


def gated_linear(gate, up, weight):
    down = nn.Linear(*weight.shape[::-1], bias=False)
    del down.weight
    down.weight = weight
    return leaf("gated_linear")(gate, up, down)


def test_gates_with_very_large_inputs_are_exact():
    gate = torch.tensor([-1e4, -200.0, -88.0, 88.0, 200.0, 1e4, torch.nan])
    y = gated_linear(gate.unsqueeze(1), torch.ones(7, 1), torch.ones(1, 1)).squeeze(1)
    torch.testing.assert_close(y, silu(gate), rtol=1e-5, atol=1e-30, equal_nan=True)


def test_hooks_on_the_matrix_after_the_gates_are_called():
    down, seen = nn.Linear(4, 4, bias=False), []
    down.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    gate, up = torch.randn(2, 100, 4)
    TORCH.gated_linear(gate, up, down)
    with_kernels(TORCH).gated_linear(gate, up, down)
    assert torch.equal(*seen)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.999])
def test_dropout_has_the_right_rate_scale_and_gradient(p):
    """Elements are zero with probability p, independently, and scaled otherwise; the gradient has the same mask."""
    n = 100_003
    x = torch.rand(n).add_(0.5).requires_grad_()
    masks = []
    for _ in range(2):
        y = leaf("dropout")(x, p)
        kept = y != 0
        torch.testing.assert_close(y, x * kept / (1 - p))
        (slope,) = torch.autograd.grad((y * x.detach()).sum(), x)
        torch.testing.assert_close(slope, x * kept / (1 - p))
        masks.append((kept.double() - (1 - p)) / math.sqrt(p * (1 - p)))
    one, other = masks
    pairs = [(one, torch.ones(n)), (one, other), (one[1:], other[:-1]), *((one[d:], one[:-d]) for d in (1, 2, 8, 128))]
    for a, b in pairs:
        assert abs((a * b).sum().item()) < 4.5 * math.sqrt(
            len(a)
        )  # the sums are normal with standard deviation sqrt(n)


def test_dropout_depends_only_on_the_generator():
    x, dropout = torch.rand(300, 70), leaf("dropout")
    torch.manual_seed(5)
    one, two = dropout(x, 0.5), dropout(x, 0.5)
    assert not torch.equal(one, two)
    torch.manual_seed(5)
    torch.set_num_threads(2)
    assert torch.equal(dropout(x, 0.5), one)
    assert torch.equal(dropout(x.t().contiguous().t(), 0.5), two)


@pytest.mark.parametrize("shape", [(1, 3, 2), (100, 16, 5), (300, 33, 70), (150, 8, 20000)], ids=str)
def test_the_loss_equals_that_of_the_model(shape):
    """In one chunk and in several; with no, a third or all targets ignored; with a padded vocabulary."""
    rows, d, vocab = shape
    hidden, head = torch.randn(rows, d), 0.3 * torch.randn(vocab + 3, d)
    targets = torch.randint(vocab, (rows,))

    def papers(x, w, t=targets):
        return functional.cross_entropy((x @ w.t())[..., :vocab], t)[0]

    for ignored in (0, 3, 1):
        targets[:: ignored or rows + 1] = functional.IGNORE
        assert head_loss(hidden, head, targets, vocab)[1] == (targets != functional.IGNORE).sum()
        same(lambda x, w: head_loss(x, w, targets, vocab)[0], papers, hidden, head)


def head_loss(x, weight, targets, vocab):
    return leaf("head_loss")(lambda x: (x @ weight.t())[..., :vocab], x, targets, [weight])


def test_tied_parameters_get_their_gradient_once_from_each_chunk(monkeypatch):
    monkeypatch.setattr(training, "CHUNK", 1)
    x, weight, targets = torch.randn(384, 8), torch.randn(5, 8), torch.randint(5, (384,))
    biases = [torch.randn(5, requires_grad=True) for _ in range(2)]
    loss, _ = leaf("head_loss")(lambda x: x @ weight.t() + (biases[0] + biases[1]), x, targets, biases)
    expected, _ = functional.cross_entropy(x @ weight.t() + (biases[0] + biases[1]), targets)
    torch.testing.assert_close(
        torch.autograd.grad(loss, biases), torch.autograd.grad(expected, biases), rtol=1e-4, atol=1e-4
    )


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, arguments=(), more=None):
        result = function(*arguments, **(more or {}))
        self.numel = max(self.numel, result.numel() if isinstance(result, torch.Tensor) else 0)
        return result


def test_the_logits_never_exist_all_at_once():
    hidden, targets = torch.randn(1024, 4, requires_grad=True), torch.randint(50000, (1024,))
    head = torch.randn(50000, 4, requires_grad=True)
    with Largest() as largest:
        head_loss(hidden, head, targets, 50000)[0].backward()
    assert largest.numel <= 1024 * 50000 / 8


def test_the_number_of_threads_changes_no_value():
    """Results are equal bit for bit."""
    x, targets, weight = torch.randn(301, 130), torch.randint(301, (301,)), torch.randn(130)

    def everything():
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        heads = leaf("rms_norm")(*leaves).view(7, 43, 5, 26).transpose(1, 2)
        heads = leaf("rotate")(heads, x[:43, :13], x[:43, 13:26])
        y = attention(heads, heads, heads).transpose(1, 2).reshape(301, 130)
        y = gated_linear(y, y, leaves[0][:130])
        loss, _ = head_loss(y, leaves[0], targets, 301)
        return [loss, *torch.autograd.grad(loss, leaves)]

    alone = everything()
    for n in (2, 3, 7):
        torch.set_num_threads(n)
        assert all(torch.equal(a, b) for a, b in zip(alone, everything(), strict=True))


def test_shapes_that_do_not_fit_are_refused():
    ops, x = torch.ops.inkling, torch.randn(2, 4, 6, 8)
    for k, v in ((x, x[..., :7]), (x[:, :3], x[:, :3]), (x, x[:1])):
        with pytest.raises(RuntimeError, match="do not fit"):
            attention(x, k, v)
    with pytest.raises(RuntimeError, match="float32"):
        ops.attention(x, x, x.double())
    with pytest.raises(RuntimeError, match="side by side"):
        ops.attention(x.transpose(2, 3), x.transpose(2, 3), x.transpose(2, 3))
    with pytest.raises(RuntimeError, match="do not fit"):
        leaf("rms_norm")(x, torch.ones(7))
    with pytest.raises(RuntimeError, match="do not fit"):
        ops.norm_turn(x[0], None, 0.0, torch.ones(4, 3), torch.ones(4, 3), False)
    for target in (5, -1):
        with pytest.raises(RuntimeError, match="beyond the vocabulary"):
            head_loss(torch.randn(64, 8), torch.randn(5, 8), torch.full((64,), target), 5)
    with pytest.raises(RuntimeError, match="one target a row"):
        head_loss(torch.randn(64, 8), torch.randn(5, 8), torch.zeros(63, dtype=torch.long), 5)


# --- models ---------------------------------------------------------------------------------------------------------


def gradients(model, **batch):
    model.zero_grad()
    loss, _ = model(**batch)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def pair(small, **arguments):
    """Returns a model that computes with torch and a copy that uses the kernels."""
    plain = small(**arguments).float()
    fast = copy.deepcopy(plain)
    fast.use(with_kernels(TORCH))
    return plain, fast


def test_every_layer_calls_the_kernels(small):
    """With a plain causal mask none of the functions is left to torch."""
    _, fast = pair(small, qk_norm=True, dropout=0.5, attention_dropout=0.0)
    fast.train()
    used = set()

    def counting(name):
        def f(*arguments):
            used.add(name)
            return leaf(name)(*arguments)

        return f

    fast.use(replace(TORCH, **{field.name: counting(field.name) for field in fields(TORCH)}))
    tokens = torch.randint(17, (4, 30))
    gradients(fast, tokens=tokens, targets=tokens)
    assert used == {field.name for field in fields(TORCH)}


@pytest.mark.parametrize("how", ["float64", "bfloat16", "autocast", "few rows"])
def test_models_that_the_kernels_do_not_cover_run_without_them(how, small, monkeypatch):
    monkeypatch.setattr(training, "MANY_ROWS", 64)
    plain, fast = pair(small)
    tokens = torch.randint(17, (1, 3) if how == "few rows" else (4, 30))
    results = []
    for model in (plain, fast):
        model.to({"float64": torch.float64, "bfloat16": torch.bfloat16}.get(how, torch.float32)).train()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
            results.append(gradients(model, tokens=tokens, targets=tokens))
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value), name


def test_copies_pickles_and_extended_models_are_independent(small):
    plain, fast = pair(small)
    tokens = torch.randint(17, (4, 30))
    expected = plain(tokens)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert {m.ops.attention.func for m in other.modules() if hasattr(m, "ops")} == {training.attention}
        torch.nn.init.zeros_(fast.embedding.weight)
        torch.testing.assert_close(other(tokens), expected, rtol=1e-5, atol=1e-5)
        fast.load_state_dict(plain.state_dict())
    longer = torch.randint(17, (2, 60))
    torch.testing.assert_close(fast.extended(60)(longer), plain.extended(60)(longer), rtol=1e-5, atol=1e-5)
    assert fast.extended(60).blocks[0].attention.rope.ops.rotate.func is training.rotate
    assert list(fast.state_dict()) == list(plain.state_dict())
    assert GPT(fast.vocab_size, fast.config).load_state_dict(fast.state_dict())


def test_other_ways_to_run_a_model_still_work(small):
    """Collecting weights, recomputing activations, and the kernels for generation."""
    plain, fast = pair(small)
    tokens = torch.randint(17, (4, 30))
    batch = {"tokens": tokens, "targets": tokens}
    expected = gradients(plain, **batch)
    with collect_attention(fast) as maps:
        fast(tokens)
    assert len(maps) == 2
    checkpoint_activations(fast)
    torch.testing.assert_close(gradients(fast, **batch), expected, rtol=1e-4, atol=1e-4)
    plain, fast = pair(small)
    pack_for_decoding(fast)
    assert not [module for module in fast.modules() if isinstance(module, nn.Linear)]
    torch.testing.assert_close(fast(tokens), plain(tokens), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fast(**batch)[0], plain(**batch)[0], rtol=1e-5, atol=1e-5)


def test_recomputed_activations_have_the_same_dropout(small):
    tokens, found = torch.randint(17, (4, 30)), []
    _, model = pair(small, dropout=0.5, attention_dropout=0.0)
    for _ in range(2):
        torch.manual_seed(3)
        found.append(gradients(model.train(), tokens=tokens, targets=tokens))
        checkpoint_activations(model)
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def test_without_a_compiler_there_are_no_kernels_and_one_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(build, "loaded", lambda: False)
    said = []
    assert not build.load("training", said.append)
    assert said[1].startswith("the kernels for training cannot be built, continuing without them, more slowly: ")
