import math

import pytest
import torch
import torch.nn.functional as F

from model import functional
from model.functional import IGNORE, causal_mask, cross_entropy, document_mask, padding_mask, rms_norm, softmax


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_is_torchs_in_value_and_gradient(dtype, dim):
    x = (10 * torch.randn(4, 5, 6)).to(dtype)
    weight = torch.randn(4, 5, 6).to(dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (softmax(ours, dim) * weight).sum().backward()
    (F.softmax(theirs, dim) * weight).sum().backward()
    tolerance = {"atol": 3e-2, "rtol": 3e-2} if dtype in (torch.bfloat16, torch.float16) else {}
    torch.testing.assert_close(softmax(x, dim), F.softmax(x, dim), **tolerance)
    torch.testing.assert_close(ours.grad, theirs.grad, **tolerance)


def test_softmax_survives_what_overflows_exp():
    x = torch.tensor([1000.0, 999.0, -1000.0])
    assert torch.isinf(x.exp()).any()
    torch.testing.assert_close(softmax(x).sum(), torch.tensor(1.0))


def test_a_row_that_may_look_nowhere_gives_zeros_and_finite_gradients():
    x = torch.full((2, 3), -math.inf)
    x[1] = 0.0
    x.requires_grad_()
    out = softmax(x)
    out.square().sum().backward()
    assert out[0].tolist() == [0.0, 0.0, 0.0]
    assert torch.isfinite(x.grad).all()


MASKS = {
    "none": lambda: None,
    "causal": lambda: causal_mask(5, 5),
    "causal with a cache": lambda: causal_mask(5, 5)[-2:],
    "padding": lambda: causal_mask(5, 5) & padding_mask(torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()),
    "documents": lambda: causal_mask(5, 5) & document_mask(torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])),
}


@pytest.mark.parametrize("name", MASKS)
def test_attention_written_out_is_the_fused_kernel(name):
    mask = MASKS[name]()
    queries = 2 if name == "causal with a cache" else 5
    q = torch.randn(2, 3, queries, 4, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out, weights = functional.scaled_dot_product_attention(q, k, v, mask)
    fused = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(out, fused)
    ones = torch.ones(2, 3, queries, dtype=torch.float64)
    if name == "padding":  # the first query of the first row sees nothing at all
        ones[0, :, 0] = 0
    torch.testing.assert_close(weights.sum(-1), ones)
    if mask is not None:
        assert (weights.masked_select(~mask) == 0).all()
    upstream = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, (q, k, v), upstream), torch.autograd.grad(fused, (q, k, v), upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_causal_mask_is_aligned_to_the_newest_token():
    assert causal_mask(3, 3).tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert causal_mask(1, 3).tolist() == [[True, True, True]]


def test_a_mask_that_does_not_fit_names_both_shapes():
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"\(5, 5\) and \(1, 2, 3, 3\)"):
        functional.scaled_dot_product_attention(q, q, q, causal_mask(5, 5))


def test_rms_norm_is_torchs():
    x, gain = torch.randn(2, 3, 8), torch.randn(8)
    torch.testing.assert_close(rms_norm(x, gain), F.rms_norm(x, (8,), gain, 1e-6))
    assert rms_norm(x.bfloat16(), gain).dtype == torch.bfloat16


def test_cross_entropy_adds_up_over_pieces_and_leaves_out_what_is_ignored():
    logits, targets = torch.randn(4, 6, 9, dtype=torch.float64), torch.randint(9, (4, 6))
    targets[1, 2:] = IGNORE
    whole, count = cross_entropy(logits, targets)
    pieces = [cross_entropy(a, b) for a, b in zip(logits.split(1), targets.split(1), strict=True)]
    torch.testing.assert_close(sum(loss for loss, _ in pieces), whole)
    assert count == sum(n for _, n in pieces) == 20
    picked = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0][targets != IGNORE]
    torch.testing.assert_close(whole.double(), -picked.sum(), rtol=1e-5, atol=1e-5)
