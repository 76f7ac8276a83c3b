from functools import partial

import pytest
import torch
from hardware import needs_compiler
from torch import nn
from torch.nn.functional import linear as torch_linear

from kernels import build
from kernels.build import load_kernels
from kernels.decoding import FEW_ROWS, DecodeLinear, attention, pack_for_decoding
from model import GPT, ModelConfig, functional, generate
from model.ops import TORCH, fused_attention

SHAPES = [(64, 64), (32, 96), (96, 64), (96, 33), (32, 1), (48, 200), (17, 5), (1, 130)]


@needs_compiler
@pytest.mark.parametrize("int8", [False, True], ids=["fp32", "int8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_multiplies_any_shape_and_each_row_as_if_alone(shape, int8):
    load_kernels()
    linear = nn.Linear(*shape, bias=False)
    packed = DecodeLinear(linear, int8)
    weight = packed.weight if not int8 else packed.weight * packed.scale[: shape[1], None]
    if not int8:
        assert torch.equal(weight, linear.weight)
    assert packed.panels.shape[0] % 4 == 0  # the kernel reads four at once
    assert packed(torch.zeros(0, shape[0])).shape == (0, shape[1])
    x = torch.randn(FEW_ROWS + 1, shape[0])
    assert torch.equal(packed(x[0]), packed(x[:1])[0])
    for rows in (*range(1, 14), 64, FEW_ROWS + 1):
        y = packed(x[None, :rows])
        assert y.shape == (1, rows, shape[1])
        torch.testing.assert_close(y[0], torch_linear(x[:rows], weight), rtol=1e-5, atol=1e-5)
        if rows <= FEW_ROWS:
            assert all(torch.equal(packed(x[i : i + 1])[0], y[0, i]) for i in range(rows))


@needs_compiler
def test_the_number_of_threads_changes_no_value():
    load_kernels()
    packed, x = DecodeLinear(nn.Linear(48, 1000, bias=False)), torch.randn(5, 48)
    alone = packed(x)
    torch.set_num_threads(3)
    assert torch.equal(packed(x), alone)


@pytest.mark.parametrize("kernels", [pytest.param(True, marks=needs_compiler), False])
@pytest.mark.parametrize("rows", [1, 3, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_int8_weights_are_close_to_the_original_weights(kernels, rows, dtype, monkeypatch):
    """Within half a step of each row's scale; and the product is computed with these int8 weights."""
    load_kernels() if kernels else monkeypatch.setattr(build, "loaded", lambda: False)
    linear, x = nn.Linear(48, 33, bias=False), torch.randn(1, rows, 48, dtype=dtype)
    linear.weight.data *= torch.rand(33, 1) + 0.1
    packed = DecodeLinear(linear, int8=True)
    assert packed.panels.dtype == torch.int8
    back = packed.weight * packed.scale[:33, None]
    step = linear.weight.detach().abs().amax(1, keepdim=True) / 127
    assert ((back - linear.weight.detach()).abs() <= 0.501 * step).all()
    y = packed(x)
    assert (y.shape, y.dtype) == ((1, rows, 33), dtype)
    exact = torch_linear(x.double(), back.double())
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=(0.02 if dtype == torch.bfloat16 else 1e-5))


def test_a_row_of_zeros_stays_zero():
    linear = nn.Linear(32, 4, bias=False)
    torch.nn.init.zeros_(linear.weight[1].data)
    assert (DecodeLinear(linear, int8=True)(torch.randn(3, 32))[..., 1] == 0).all()


@needs_compiler
@pytest.mark.parametrize("d", [8, 48, 20, 3])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_attention_of_one_query_equals_the_papers_and_skips_hidden_keys(d, groups):
    """Keys and values are slices of longer tensors, as in a cache; hidden ones are NaN. A fully masked row gives 0."""
    load_kernels()
    attend = partial(attention, bias=None, soft_cap=None, dropout_p=0.0, otherwise=fused_attention)
    q, mask = torch.randn(3, 6, 1, d) * 3, torch.rand(3, 1, 1, 50) < 0.6
    k, v = torch.randn(3, groups, 64, d)[:, :, :50], torch.randn(3, groups, 96, d)[:, :, :50]
    mask[2] = False
    hidden = ~mask[:, :, 0, :, None]
    wide = [x.repeat_interleave(6 // groups, dim=1) for x in (k, v)]
    for large in (1, 100):  # scores that overflow exp
        expected, _ = functional.scaled_dot_product_attention(large * q, *wide, mask)
        for one in (k.masked_fill(hidden, torch.nan), torch.where(hidden, 1e4 * q[:, :1], k)):
            y, _ = attend(large * q, one, v.masked_fill(hidden, torch.nan), mask)
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
            assert (y[2] == 0).all()
    for shape in ((3, 6, 1, 50), (1, 6, 1, 50), (3, 1, 1, 1)):
        mask = torch.rand(shape) < 0.6
        expected, _ = functional.scaled_dot_product_attention(q, *wide, mask)
        torch.testing.assert_close(attend(q, k, v, mask)[0], expected, rtol=1e-4, atol=1e-5)
    apart = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    assert torch.equal(attend(*apart, mask)[0], attend(q, k, v, mask)[0])
    with pytest.raises(RuntimeError, match="side by side"):
        torch.ops.inkling.attend(torch.randn(3, 6, 1, 2 * d)[..., ::2], *wide, mask.expand(3, 6, 1, 50))


@needs_compiler
def test_shapes_that_do_not_fit_are_refused():
    load_kernels()
    with pytest.raises(RuntimeError, match="do not fit"):
        DecodeLinear(nn.Linear(64, 64, bias=False))(torch.randn(2, 50))


CASES = [
    {},
    {"n_kv_heads": 1, "window": 5},
    {"positions": "alibi"},
    {"positions": "learned", "soft_cap": 5.0},
    {"tied": True, "vocab_multiple": 8, "qk_norm": True},
]


@needs_compiler
@pytest.mark.parametrize("arguments", CASES, ids=str)
def test_a_packed_model_generates_the_same_text(small, arguments):
    """Logits agree to 1e-5 and tokens are equal, for rows of different lengths, beyond the context, and extended."""
    model = small(**arguments).float()
    tokens, rows = torch.randint(17, (3, 30)), [[1, 2, 3, 4, 5], [6], [7, 8]]
    whole, text = model(tokens), [column.tolist() for column in generate(model, rows, 60, overflow="slide")]
    longer = model.extended(70)(tokens) if model.config.positions == "rope" else None
    state = model.state_dict()
    packed = pack_for_decoding(model)
    assert packed is model
    assert not [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert all(block.attention.ops.attention.func is attention for block in model.blocks)
    assert torch.equal(model.embedding.weight, state["embedding.weight"])
    torch.testing.assert_close(model(tokens), whole, rtol=1e-5, atol=1e-5)
    cache = model.new_cache()
    pieces = [model(piece, cache=cache) for piece in tokens.split([3, 1, 1, 20, *[1] * 5], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-5, atol=1e-5)
    assert [column.tolist() for column in generate(model, rows, 60, overflow="slide")] == text
    if longer is not None:
        torch.testing.assert_close(model.extended(70)(tokens), longer, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("int8", [False, True], ids=["fp32", "int8"])
@pytest.mark.parametrize("d_head", range(1, 9))
def test_heads_may_have_any_width(small, d_head, int8):
    """For every position scheme and pairing, token by token with a cache equals one forward without."""
    even = [{"pairing": "half"}, {"pairing": "interleaved", "qk_norm": True}, {"window": 3, "n_kv_heads": 4}]
    cases = even if d_head % 2 == 0 else []
    for arguments in (*cases, *({"positions": p} for p in ("learned", "sinusoidal", "alibi", "none"))):
        packed = pack_for_decoding(small(d_model=4 * d_head, **arguments).float(), int8)
        tokens, cache = torch.randint(17, (2, 6)), packed.new_cache()
        pieces = [packed(piece, cache=cache) for piece in tokens.split([3, 1, 1, 1], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), packed(tokens), rtol=1e-4, atol=1e-4)
        one, padding = tokens[:, :1], torch.ones(2, 1, dtype=torch.bool)
        torch.testing.assert_close(packed(one, padding=padding), packed(one), rtol=1e-4, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("int8", [False, True])
def test_a_packed_model_in_bfloat16_stays_close_to_float32(small, int8):
    model, tokens = pack_for_decoding(small(d_model=64, d_ff=96).float(), int8), torch.randint(17, (2, 8))
    expected = model(tokens)
    model, cache = model.bfloat16(), model.new_cache()
    pieces = [model(piece, cache=cache).float() for piece in tokens.split([5, 1, 1, 1], dim=1)]
    assert (torch.cat(pieces, dim=1) - expected).abs().mean() < 0.1 * expected.abs().mean()


@needs_compiler
def test_int8_rows_of_a_batch_equal_the_rows_alone(small):
    model, rows = pack_for_decoding(small(d_model=64, d_ff=96).float(), int8=True), [[1, 2, 3, 4], [6], [7, 8]]
    together = torch.stack(list(generate(model, rows, 20)), 1).tolist()
    for i, row in enumerate(rows):
        assert torch.stack(list(generate(model, [row], 20, seeds=[i])), 1)[0].tolist() == together[i]


@pytest.mark.parametrize("arguments", [{}, {"tied": True, "vocab_multiple": 8}, {"positions": "alibi"}], ids=str)
def test_a_quantized_model_has_nearly_the_same_logits(small, arguments):
    model = small(d_model=64, d_ff=96, **arguments).float()
    tokens = torch.randint(17, (8, 30))
    loss, _ = model(tokens, targets=tokens.roll(-1, 1))
    other, _ = pack_for_decoding(model, int8=True)(tokens, targets=tokens.roll(-1, 1))
    assert abs(other / loss - 1) < 0.03
    assert other != loss
    columns = torch.stack(list(generate(model, tokens[:, :4], 40, overflow="slide", stops=[3])))
    assert columns.max() < 17


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("compiler", ["/no/such/compiler", "false", "'unclosed"])
def test_without_a_compiler_generation_works_and_warns(compiler, int8, small, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(build, "loaded", lambda: False)
    model, tokens, said = small().float(), torch.randint(17, (2, 8)), []
    before = model(tokens)
    pack_for_decoding(model, int8, said.append)
    assert len(said) == 2
    assert said[1].startswith("the kernels for generation cannot be built, continuing without them, more slowly: ")
    torch.testing.assert_close(model(tokens), before, rtol=0, atol=0.3 if int8 else 0)
    assert all(block.attention.ops == TORCH for block in model.blocks)
    assert list((tmp_path / "extensions").iterdir()) == []


def test_a_model_in_another_dtype_is_not_packed(small):
    model = small()
    before = dict(model.named_modules())
    assert dict(pack_for_decoding(model).named_modules()) == before


@needs_compiler
def test_a_tied_head_is_packed_separately():
    model = GPT(17, ModelConfig(16, 1, 2, 24, 32, tied=True))
    embedding = model.embedding.weight
    pack_for_decoding(model)
    assert model.embedding.weight is embedding
    assert torch.equal(model.head.weight, embedding)
