import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from model.functional import (
    IGNORE,
    attention_mask,
    causal_mask,
    cross_entropy,
    document_mask,
    layer_norm,
    padding_mask,
    rms_norm,
    scaled_dot_product_attention,
    softmax,
    window_mask,
)

HALF = (torch.bfloat16, torch.float16)
DTYPES = [torch.float64, torch.float32, *HALF]
TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    torch.float16: {"rtol": 3e-3, "atol": 3e-3},
}


def naive_softmax(x, dim=-1):
    return x.exp() / x.exp().sum(dim, keepdim=True)


# --- softmax --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "dim"), [((5,), 0), ((4, 5), 0), ((4, 5), -1), ((2, 3, 4), 1), ((2, 3, 4, 5), -2)])
def test_softmax_sums_to_1_keeps_order_and_ignores_shifts(shape, dim):
    x = 3 * torch.randn(shape, dtype=torch.float64)
    y = softmax(x, dim)
    torch.testing.assert_close(y.sum(dim), torch.ones_like(y.sum(dim)))
    assert torch.equal(y.argsort(dim), x.argsort(dim))
    torch.testing.assert_close(softmax(x + 1000.0, dim), y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_equals_torchs_in_value_and_gradient(dtype, dim):
    x, weight = (3 * torch.randn(4, 5, 6)).to(dtype), torch.randn(4, 5, 6).to(dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (softmax(ours, dim) * weight).sum().backward()
    (F.softmax(theirs, dim) * weight).sum().backward()
    ulp = torch.finfo(dtype).eps
    rtol = ulp if dtype in HALF else 8 * ulp  # both compute the half types in float32
    torch.testing.assert_close(softmax(x, dim), F.softmax(x, dim), rtol=rtol, atol=1e-7 if dtype in HALF else 0)
    torch.testing.assert_close(ours.grad, theirs.grad, **TOLERANCE[dtype])
    assert softmax(x, dim).dtype == ours.grad.dtype == dtype


def test_no_exponent_is_above_0(monkeypatch):
    exponents, exp = [], torch.Tensor.exp
    monkeypatch.setattr(torch.Tensor, "exp", lambda x: exponents.append(x.max().item()) or exp(x))
    softmax(100 * torch.randn(4, 5))
    assert exponents == [0.0]  # that of the maximum; no other is larger


@pytest.mark.parametrize(("dtype", "fits", "overflows"), [(torch.float32, 88, 89), (torch.float16, 11, 12)])
def test_the_naive_softmax_overflows_where_ours_does_not(dtype, fits, overflows):
    assert torch.isfinite(torch.tensor(fits, dtype=dtype).exp())
    assert torch.isinf(torch.tensor(overflows, dtype=dtype).exp())
    for form, finite in ((naive_softmax, False), (softmax, True)):
        x = torch.tensor([overflows, 0.0, 1.0], dtype=dtype, requires_grad=True)
        form(x)[0].backward()
        assert torch.isfinite(x.grad).all() == finite
        assert x.grad.isnan().any() != finite
    x = torch.tensor([1000.0, 999.0, -1000.0], dtype=dtype)
    torch.testing.assert_close(softmax(x), F.softmax(x, -1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fully_masked_row_gives_zeros_in_value_and_gradient(dtype):
    x = torch.tensor([[-math.inf] * 3, [0.0, 1.0, -math.inf]], dtype=dtype, requires_grad=True)
    y = softmax(x)
    (y * torch.randn(3, dtype=dtype)).sum().backward()
    assert y[0].tolist() == x.grad[0].tolist() == [0.0, 0.0, 0.0]
    assert y[1, 2] == x.grad[1, 2] == 0
    assert torch.isfinite(x.grad).all()
    assert x.grad[1, :2].abs().min() > 0


# --- scaled dot-product attention -----------------------------------------------------------------------------------


def qkv(*shape, T_k=None, d_v=None, dtype=torch.float64):
    """Returns q of shape (... q d), and k and v that fit it."""
    *lead, T_q, d = shape
    T_k = T_k or T_q
    shapes = (*lead, T_q, d), (*lead, T_k, d), (*lead, T_k, d_v or d)
    return [torch.randn(s, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def test_each_score_is_the_dot_product_divided_by_the_root_of_the_width():
    q, k, v = qkv(2, 3, 4, 8)
    _, weights = scaled_dot_product_attention(q, k, v)
    for b in range(2):
        for h in range(3):
            for i in range(4):
                scores = [sum(q[b, h, i, n] * k[b, h, j, n] for n in range(8)).item() / 8**0.5 for j in range(4)]
                total = sum(math.exp(score) for score in scores)
                for j in range(4):
                    assert weights[b, h, i, j].item() == pytest.approx(math.exp(scores[j]) / total, rel=1e-9)


@pytest.mark.parametrize("d_k", [4, 16, 64, 256, 1024])
def test_scores_have_variance_1_whatever_the_width(d_k):
    """Computed from the weights: the logarithms of two weights of a query differ by as much as its two scores."""
    q, k, v = (x.detach() for x in qkv(4_000, 1, d_k, T_k=2))
    dots = (q * k[:, :1]).sum(-1)
    assert dots.var() == pytest.approx(d_k, rel=0.1)
    _, weights = scaled_dot_product_attention(q, k, v)
    difference = weights[:, 0, 0].log() - weights[:, 0, 1].log()
    assert difference.var() / 2 == pytest.approx(1, rel=0.1)


def test_without_scaling_the_softmax_saturates_and_its_gradient_shrinks():
    q, k, v = qkv(500, 1, 1024, T_k=8)
    peak, gradient = [], []
    for scale in (1.0, 1024**0.5):  # the second undoes the scaling
        out, weights = scaled_dot_product_attention(q * scale, k, v)
        peak.append(weights.amax(-1).median().item())
        (g,) = torch.autograd.grad(out.sum(), k)
        gradient.append(g.flatten(1).norm(dim=1).median().item())
    assert peak[0] < 0.5 < 0.99 < peak[1]
    assert gradient[1] < gradient[0] / 100


def causal_with(name: str, T_q: int = 5):
    """Returns a mask of the named kind for the last T_q of 5 tokens in 2 rows."""
    padding = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()  # the first query of the first row sees nothing
    documents = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])
    all_kinds = {"window": 2, "padding": padding, "documents": documents}
    given = {
        "none": None,
        "causal": {},
        "window": {"window": 2},
        "padding": {"padding": padding},
        "documents": {"documents": documents},
        "all": all_kinds,
    }[name]
    return None if given is None else attention_mask(T_q, 5, **given)


KINDS = ["none", "causal", "window", "padding", "documents", "all"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T_q", [5, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_our_attention_equals_torchs_kernel(kind, T_q, dtype):
    mask = causal_with(kind, T_q)
    q, k, v = qkv(2, 3, T_q, 8, T_k=5, dtype=dtype)
    out, weights = scaled_dot_product_attention(q, k, v, mask)
    fused = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(out, fused, **TOLERANCE[dtype])
    upstream = torch.randn(out.shape).to(dtype)
    for ours, theirs in zip(
        torch.autograd.grad(out, (q, k, v), upstream), torch.autograd.grad(fused, (q, k, v), upstream), strict=True
    ):
        assert torch.isfinite(ours).all()
        torch.testing.assert_close(ours, theirs, **TOLERANCE[dtype])

    ones = torch.ones(2, 3, T_q)
    if kind in ("padding", "all") and T_q == 5:
        ones[0, :, 0] = 0  # a fully masked row: zeros, in both
        assert (out[0, :, 0] == 0).all()
        assert (fused[0, :, 0] == 0).all()
    torch.testing.assert_close(weights.sum(-1).float(), ones, **TOLERANCE[dtype])
    if mask is not None:
        assert (weights.masked_select(~mask) == 0).all()


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("path", ["math", "fused"])
def test_masked_keys_change_no_bit_of_outputs_and_gradients(kind, path):
    mask = causal_with(kind).expand(2, 3, 5, 5)
    q, k, v = qkv(2, 3, 5, 8, dtype=torch.float32)

    def attention(q, k, v):
        if path == "fused":
            return F.scaled_dot_product_attention(q, k, v, mask)
        return scaled_dot_product_attention(q, k, v, mask)[0]

    for i in range(5):  # the query; the keys that it must not see are replaced
        hidden = ~mask[:, :, i, :, None]
        upstream = torch.zeros(2, 3, 5, 8)
        upstream[:, :, i] = torch.randn(2, 3, 8)
        results = []
        for scale in (0.0, 1.0, 1e4):
            k2 = torch.where(hidden, scale * (2 * torch.rand(k.shape) - 1), k).detach().requires_grad_()
            v2 = torch.where(hidden, scale * (2 * torch.rand(v.shape) - 1), v).detach().requires_grad_()
            out = attention(q, k2, v2)
            results.append([out[:, :, i], *torch.autograd.grad(out, (q, k2, v2), upstream)])
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                assert torch.equal(a, b)


def test_the_output_lies_in_the_convex_hull_of_the_values():
    """In no direction does it extend further than the furthest visible value."""
    q, k, v = qkv(2, 3, 5, 4)
    mask = causal_with("all")
    mask[0, :, 0, 0] = True
    out, _ = scaled_dot_product_attention(3 * q, k, v, mask)
    for _ in range(100):
        direction = torch.randn(4, dtype=torch.float64)
        reach = (v @ direction).unsqueeze(-2).expand(2, 3, 5, 5).masked_fill(~mask, -math.inf).amax(-1)
        assert (out @ direction <= reach + 1e-12).all()


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)])
def test_any_leading_axes_and_the_shapes_of_cross_attention_are_accepted(lead):
    q, k, v = qkv(*lead, 4, 6, T_k=7, d_v=5)
    out, weights = scaled_dot_product_attention(q, k, v)
    assert out.shape == (*lead, 4, 5)
    assert weights.shape == (*lead, 4, 7)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))


def test_dropout_applies_to_the_weights_after_softmax_and_only_in_training():
    q, k, _ = qkv(2, 3, 50, 8)
    v = torch.eye(50, dtype=torch.float64).expand(2, 3, 50, 50)  # so that the output equals the weights after dropout
    out, weights = scaled_dot_product_attention(q, k, v, dropout_p=0.25)
    assert torch.equal(out, weights)
    used, weights = scaled_dot_product_attention(q, k, v, dropout_p=0.25, training=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    kept = used != 0
    torch.testing.assert_close(used[kept], weights[kept] / 0.75)
    assert kept.double().mean() == pytest.approx(0.75, abs=0.02)


def test_a_soft_cap_bounds_the_scores_and_keeps_small_ones():
    q, k, v = (x.detach() for x in qkv(1, 50, 8))
    _, weights = scaled_dot_product_attention(100 * q, k, v, soft_cap=2.0)
    assert (weights.amax(-1) / weights.amin(-1)).max() <= math.exp(4.0) * (1 + 1e-9)
    scores = q @ k.mT / 8**0.5
    _, weights = scaled_dot_product_attention(q, k, v, causal_mask(50, 50), soft_cap=5.0)
    expected = softmax((5 * (scores / 5).tanh()).masked_fill(~causal_mask(50, 50), -math.inf))
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(
        scaled_dot_product_attention(q, k, v, soft_cap=1e6)[1], scaled_dot_product_attention(q, k, v)[1]
    )


def test_a_bias_is_added_to_the_scores():
    q, k, v = qkv(2, 3, 5, 8)
    bias = torch.randn(3, 5, 5, dtype=torch.float64)
    out, _ = scaled_dot_product_attention(q, k, v, bias=bias)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, bias))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": torch.ones(5, 5, dtype=torch.bool)}, r"mask.*\(5, 5\) and \(1, 2, 3, 3\)"),
        ({"mask": torch.ones(4, 1, 2, 3, 3, dtype=torch.bool)}, r"mask.*\(4, 1, 2, 3, 3\) and \(1, 2, 3, 3\)"),
        ({"mask": torch.ones(7, 1, 1, 3, dtype=torch.bool)}, r"mask.*\(7, 1, 1, 3\) and \(1, 2, 3, 3\)"),
        ({"mask": torch.zeros(3, 3)}, "boolean.*float32"),
        ({"bias": torch.zeros(5, 3, 3)}, r"bias.*\(5, 3, 3\) and \(1, 2, 3, 3\)"),
        ({"k": torch.randn(1, 2, 3, 5)}, "width, got 4 and 5"),
        ({"v": torch.randn(1, 2, 6, 4)}, "got 3 and 6"),
    ],
)
def test_the_error_names_shapes_that_do_not_fit(changes, message):
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=message):
        scaled_dot_product_attention(**{"q": x, "k": x, "v": x, **changes})


# --- masks ----------------------------------------------------------------------------------------------------------


def test_causal_and_window_masks_by_hand():
    assert causal_mask(3, 3).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert (causal_mask(4, 4) & window_mask(4, 4, 2)).int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]


def test_with_a_cache_the_newest_query_attends_to_every_key():
    assert causal_mask(1, 4).int().tolist() == [[1, 1, 1, 1]]
    assert causal_mask(2, 4).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    for n in range(1, 7):  # n new tokens after 6 - n: the last rows of the full mask
        assert torch.equal(causal_mask(n, 6), causal_mask(6, 6)[-n:])
        assert torch.equal(window_mask(n, 6, 3), window_mask(6, 6, 3)[-n:])


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_attention_mask_equals_a_loop_over_pairs(data):
    T_k = data.draw(st.integers(1, 7))
    T_q = data.draw(st.integers(1, T_k))
    window = data.draw(st.none() | st.integers(1, 8))
    rows = st.lists(st.lists(st.integers(0, 1), min_size=T_k, max_size=T_k), min_size=2, max_size=2)
    padding, documents = data.draw(st.none() | rows), data.draw(st.none() | rows)
    mask = attention_mask(
        T_q,
        T_k,
        window=window,
        padding=None if padding is None else torch.tensor(padding).bool(),
        documents=None if documents is None else torch.tensor(documents),
    )
    mask = mask.expand(2, 3, T_q, T_k)  # broadcasts to (b, h, q, k)
    for b in range(2):
        for q in range(T_q):
            i = T_k - T_q + q
            for j in range(T_k):
                visible = j <= i
                visible &= window is None or i - j < window
                visible &= padding is None or bool(padding[b][j])
                visible &= documents is None or documents[b][i] == documents[b][j]
                assert mask[b, :, q, j].tolist() == [visible] * 3


def test_masks_combine_and_broadcast_with_the_head_axis_or_without():
    padding, documents = torch.tensor([[True, True, False]]), torch.tensor([[0, 1, 1]])
    assert padding_mask(padding).shape == (1, 1, 1, 3)
    assert document_mask(documents, 3).shape == (1, 1, 3, 3)
    both = causal_mask(3, 3) & padding_mask(padding) & document_mask(documents, 3)
    assert both[0, 0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 0]]
    heads = torch.tensor([True, False]).view(2, 1, 1)  # a mask of shape (h 1 1) hides every key from a head
    assert (both & heads).shape == (1, 2, 3, 3)


def test_masked_keys_have_no_effect_however_large_the_scores():
    """A finite large negative number in place of -inf would be above these scores."""
    q, k, v = torch.tensor([[1e18]]), torch.tensor([[-1e18], [1e18]]), torch.tensor([[1.0], [2.0]])
    out, weights = scaled_dot_product_attention(q, k, v, torch.tensor([[True, False]]))
    assert weights.tolist() == [[1.0, 0.0]]
    assert out.tolist() == [[1.0]]


# --- the rest of the block ------------------------------------------------------------------------------------------


def test_rms_norm_equals_torchs():
    x, weight = torch.randn(2, 3, 8), torch.randn(8)
    torch.testing.assert_close(rms_norm(x, weight), F.rms_norm(x, (8,), weight, 1e-6))


def test_layer_norm_equals_torchs():
    x, weight, bias = torch.randn(2, 3, 8), torch.randn(8), torch.randn(8)
    torch.testing.assert_close(layer_norm(x, weight, bias), F.layer_norm(x, (8,), weight, bias, 1e-5))


@pytest.mark.parametrize("dtype", HALF)
def test_norms_are_computed_in_float32_and_cast_back(dtype):
    """The square of 300 overflows float16; the sum of 1000 squares loses its digits in bfloat16."""
    x, one, zero = (300 * torch.randn(4, 1000)).to(dtype), torch.ones(1000), torch.zeros(1000)
    for norm, arguments in ((rms_norm, (one,)), (layer_norm, (one, zero))):
        y = norm(x, *arguments)
        assert y.dtype == dtype
        assert torch.equal(y, norm(x.float(), *arguments).to(dtype))
        assert torch.isfinite(y).all()


def test_cross_entropy_sums_over_chunks_and_skips_ignored_targets():
    logits, targets = torch.randn(4, 6, 9, dtype=torch.float64), torch.randint(9, (4, 6))
    targets[1, 2:] = IGNORE
    whole, count = cross_entropy(logits, targets)
    pieces = [cross_entropy(a, b) for a, b in zip(logits.split(1), targets.split(1), strict=True)]
    torch.testing.assert_close(sum(loss for loss, _ in pieces), whole)
    assert count == sum(n for _, n in pieces) == 20
    picked = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0][targets != IGNORE]
    torch.testing.assert_close(whole, -picked.sum())
