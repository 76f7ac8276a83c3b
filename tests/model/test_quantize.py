import pytest
import torch
from torch import nn

from model import generate
from model.quantize import FEW_ROWS, Int8Linear, favour_few_rows, quantize_int8


@pytest.mark.parametrize("rows", [1, 3, FEW_ROWS, FEW_ROWS + 1, 100])
@pytest.mark.parametrize("shape", [(64, 64), (32, 96), (96, 64), (96, 33), (32, 1), (48, 33), (17, 5)])
def test_a_byte_a_weight_is_near_the_weight(rows, shape):
    """Within half a step of each row's scale, and the product within what bfloat16 adds to that."""
    linear, x = nn.Linear(*shape, bias=False), torch.randn(2, rows, shape[0])[:1]
    linear.weight.data *= torch.rand(shape[1], 1) + 0.1
    quantized = Int8Linear(linear)
    assert quantized.weight.dtype == torch.int8
    back = quantized.weight * quantized.scale.float().unsqueeze(1)
    step = linear.weight.detach().abs().amax(1, keepdim=True) / 127
    assert ((back - linear.weight.detach()).abs() <= 0.52 * step).all()
    exact = nn.functional.linear(x, back)
    y = quantized(x)
    assert y.shape == (1, rows, shape[1])
    assert y.dtype == x.dtype
    tolerance = 1e-5 if rows > FEW_ROWS or shape[0] % 32 else 0.01
    torch.testing.assert_close(y, exact, rtol=tolerance, atol=tolerance * exact.abs().max().item())


def test_a_row_of_zeros_stays_zero():
    linear = nn.Linear(32, 4, bias=False)
    torch.nn.init.zeros_(linear.weight[1].data)
    assert (Int8Linear(linear)(torch.randn(3, 32))[:, 1] == 0).all()


@pytest.mark.parametrize("arguments", [{}, {"tied": True, "vocab_multiple": 8}, {"positions": "alibi"}], ids=str)
def test_a_quantized_model_says_nearly_what_it_said(small, arguments):
    model = small(d_model=64, d_ff=96, **arguments).float()
    tokens = torch.randint(17, (8, 30))
    loss, _ = model(tokens, targets=tokens.roll(-1, 1))
    embedding = model.embedding.weight
    other, _ = quantize_int8(model)(tokens, targets=tokens.roll(-1, 1))
    assert model.embedding.weight is embedding
    assert not [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert abs(other / loss - 1) < 0.03
    assert other != loss
    cache = model.new_cache()
    pieces = [model(piece, cache=cache) for piece in tokens.split([20, 1, 1, 8], dim=1)]
    whole = model(tokens)
    error = (torch.cat(pieces, dim=1) - whole).abs().mean()
    assert error < 0.02 * whole.abs().mean()
    columns = torch.stack(list(generate(model, tokens[:, :4], 40, overflow="slide", stops=[3])))
    assert columns.max() < 17


def test_another_layout_changes_no_value(small):
    model, tokens = small(), torch.randint(17, (2, 10))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    logits = model(tokens)
    favour_few_rows(model)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    torch.testing.assert_close(model(tokens), logits, rtol=0, atol=1e-12)
    wide = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m.out_features > m.in_features]
    assert len(wide) == 5  # gate and up of two blocks, the head
    assert all(weight.stride() == (1, weight.shape[0]) for weight in wide)
    model(tokens, targets=tokens)[0].backward()
    assert model.head.weight.grad is not None


def test_a_tied_head_stays_tied(small):
    model = favour_few_rows(small(tied=True))
    assert model.head.weight is model.embedding.weight
