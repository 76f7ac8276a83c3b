import math

import pytest
import torch
from einops import rearrange
from torch.utils.flop_counter import FlopCounterMode

from model import collect_attention
from model.attention import CausalMultiHeadAttention
from model.cache import KVCache
from model.functional import attention_mask, causal_mask, scaled_dot_product_attention
from model.ops import BACKENDS, MATH, TORCH, fused_attention, math_attention
from model.positions import ALiBi

PROJECTIONS = ("wq", "wk", "wv", "wo")


def attention(**arguments):
    shape = {"d_model": 16, "n_heads": 4, "use_rope": True, "max_seq_len": 32}
    module = CausalMultiHeadAttention(**{**shape, **arguments}).double().eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return module


def random_input(*shape):
    return torch.randn(*(shape or (2, 9, 16)), dtype=torch.float64)


# --- heads ----------------------------------------------------------------------------------------------------------


def test_a_worked_example():
    """B = 2, T = 4, d_model = 8, 2 heads, every projection the identity, so that queries, keys and values are x.

    In row 0, head 0 reads a e_t at token t with a^2 = 2 log 3, and sqrt(d_head) = 2: a token's score with itself is
    log 3, with any other 0, so it has three times their weight. Head 1 reads zeros, and in row 1 all tokens are equal:
    equal weights.
    """
    module = CausalMultiHeadAttention(8, 2).double()
    for name in PROJECTIONS:
        torch.nn.init.eye_(getattr(module, name).weight)
    a = math.sqrt(2 * math.log(3))
    x = torch.zeros(2, 4, 8, dtype=torch.float64)
    x[0, :, :4] = a * torch.eye(4)
    x[1] = 1.0
    with collect_attention(module) as maps:
        y = module(x)
    (weights,) = maps
    assert weights.shape == (2, 2, 4, 4)
    thrice = [[1, 0, 0, 0], [1 / 4, 3 / 4, 0, 0], [1 / 5, 1 / 5, 3 / 5, 0], [1 / 6, 1 / 6, 1 / 6, 3 / 6]]
    alike = [[1, 0, 0, 0], [1 / 2, 1 / 2, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0], [1 / 4, 1 / 4, 1 / 4, 1 / 4]]
    expected = torch.tensor([[thrice, alike], [alike, alike]], dtype=torch.float64)
    torch.testing.assert_close(weights, expected)
    assert y.shape == (2, 4, 8)
    torch.testing.assert_close(y[0, :, :4], a * torch.tensor(thrice, dtype=torch.float64))
    assert (y[0, :, 4:] == 0).all()
    torch.testing.assert_close(y[1], torch.ones(4, 8, dtype=torch.float64))


def test_all_heads_at_once_equal_the_heads_one_by_one():
    module, x = attention(), random_input()
    parts = torch.zeros_like(x)
    for head in range(4):
        rows = slice(4 * head, 4 * head + 4)
        single = attention(d_model=4, n_heads=1)
        for name in ("wq", "wk", "wv"):  # a head reads the complete stream, through its own rows
            getattr(single, name).weight = torch.nn.Parameter(getattr(module, name).weight[rows])
        single.wo.weight = torch.nn.Parameter(module.wo.weight[:, rows])
        parts += single(x)
    torch.testing.assert_close(parts, module(x))


def test_batched_attention_equals_a_loop_over_rows_and_heads():
    module, x = attention(use_rope=False), random_input()
    out = torch.zeros_like(x)
    for row in range(2):
        for head in range(4):
            q, k, v = (
                getattr(module, name)(x[row]).unflatten(-1, (4, 4))[:, head] for name in ("wq", "wk", "wv")
            )  # (h d): a head's columns are adjacent
            y, _ = scaled_dot_product_attention(q, k, v, causal_mask(9, 9))
            out[row] += y @ module.wo.weight[:, 4 * head : 4 * head + 4].T
    torch.testing.assert_close(module(x), out)


def test_columns_are_split_into_heads_in_the_order_h_d_and_not_d_h():
    x = random_input(2, 9, 12)
    torch.testing.assert_close(
        rearrange(rearrange(x, "b s (h d) -> b h s d", h=3), "b h s d -> b s (h d)"), x, rtol=0, atol=0
    )
    module, y = attention(d_model=12, n_heads=3, use_rope=False), {}
    for order in ("(h d)", "(d h)"):
        q, k, v = (rearrange(getattr(module, name)(x), f"b s {order} -> b h s d", h=3) for name in ("wq", "wk", "wv"))
        out, _ = scaled_dot_product_attention(q, k, v, causal_mask(9, 9))
        y[order] = module.wo(rearrange(out, f"b h s d -> b s {order}"))
    torch.testing.assert_close(module(x), y["(h d)"])
    assert not torch.allclose(module(x), y["(d h)"], atol=1e-3)


def test_heads_are_independent_of_each_other():
    module, x = attention(), random_input()
    torch.nn.init.eye_(module.wo.weight)
    before = module(x).detach()
    for name in ("wq", "wk", "wv"):
        getattr(module, name).weight.data[4:8] += 1.0  # head 1
    changed = (module(x) != before).any(dim=0).any(dim=0)
    assert changed.tolist() == [False] * 4 + [True] * 4 + [False] * 8


def test_grouped_query_attention_is_full_attention_with_repeated_heads():
    grouped, full, x = attention(n_kv_heads=2), attention(), random_input()
    full.load_state_dict(
        {
            name: weight
            if name in ("wq.weight", "wo.weight")
            else weight.view(2, 1, 4, 16).repeat(1, 2, 1, 1).view(16, 16)
            for name, weight in grouped.state_dict().items()
        }
    )
    torch.testing.assert_close(grouped(x), full(x))


def test_with_qk_norm_the_scale_of_queries_and_keys_is_irrelevant():
    normed, plain, x = attention(qk_norm=True, norm_eps=1e-12), attention(), random_input()
    for module, same in ((normed, True), (plain, False)):
        before = module(x).detach()
        module.wq.weight.data *= 7
        module.wk.weight.data *= 0.3
        assert torch.allclose(module(x), before, rtol=1e-6) == same


def test_the_work_does_not_depend_on_the_number_of_heads():
    def flops(n_heads: int) -> int:
        module = CausalMultiHeadAttention(64, n_heads)
        module.ops = MATH  # FlopCounterMode does not count the CPU's fused kernel
        with FlopCounterMode(display=False) as counter:
            module(torch.randn(2, 32, 64))
        return counter.get_total_flops()

    projections, square = 4 * 2 * (2 * 32) * 64 * 64, 2 * 2 * 2 * 32 * 32 * 64
    assert {flops(n) for n in (1, 2, 4, 8, 32)} == {projections + square}


# --- the two ways to compute ----------------------------------------------------------------------------------------

PADDING = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9]).bool()
VARIANTS = {
    "plain": {},
    "mask": {"mask": attention_mask(9, 9, window=3, padding=PADDING)},
    "mask without head axis": {"mask": attention_mask(9, 9, padding=PADDING)[:, 0]},
    "bias": {"bias": ALiBi(4)(torch.arange(9), torch.arange(9))},
    "bias and mask": {
        "bias": ALiBi(4)(torch.arange(9), torch.arange(9)),
        "mask": attention_mask(9, 9, padding=PADDING),
    },
}


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_and_math_agree_in_values_and_gradients(n_kv_heads, variant):
    module, x, results = attention(n_kv_heads=n_kv_heads, qk_norm=True), random_input(), []
    for module.ops in (TORCH, MATH):
        module.zero_grad()
        y = module(x, **VARIANTS[variant])
        y.square().sum().backward()
        results.append([y, *(p.grad.clone() for p in module.parameters())])
    for fused, expected in zip(*results, strict=True):
        assert torch.isfinite(expected).all()
        torch.testing.assert_close(fused, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_and_math_agree_in_every_dtype(dtype, heads, variant):
    q, *kv = (torch.randn(2, h, 9, 8, dtype=torch.float64).to(dtype).requires_grad_() for h in (4, heads, heads))
    given = {"mask": None, "bias": None, **VARIANTS[variant]}
    if given["mask"] is not None and given["mask"].ndim == 3:
        given["mask"] = given["mask"].unsqueeze(1)
    upstream, results = torch.randn(2, 4, 9, 8).to(dtype), []
    for attend in (fused_attention, math_attention):
        y, _ = attend(q, *kv, **given, soft_cap=None, dropout_p=0.0)
        results.append([y, *torch.autograd.grad(y, [q, *kv], upstream)])
    tolerance = {torch.bfloat16: 5e-2, torch.float16: 5e-3, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    for fused, expected in zip(*results, strict=True):
        assert fused.dtype == expected.dtype == dtype
        torch.testing.assert_close(fused, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(9, 9).tril(), "boolean.*float32"),  # torch would add it to the scores, which hides nothing
        (torch.ones(9, 8).bool(), r"\(9, 8\) and \(2, 4, 9, 9\)"),
        (torch.ones(3, 9, 9).bool(), r"\(3, 9, 9\) and \(2, 4, 9, 9\)"),
        (torch.ones(1, 1, 1, 9, 9).bool(), r"\(1, 1, 1, 9, 9\) and \(2, 4, 9, 9\)"),
    ],
)
def test_a_mask_of_wrong_dtype_or_shape_is_refused(backend, mask, message):
    module = attention()
    module.ops = BACKENDS[backend]
    with pytest.raises(ValueError, match=message):
        module(random_input(), mask=mask)


def test_qk_norm_comes_before_rope():
    """The norm's weight, which differs between dimensions, does not commute with the rotation."""
    module, x = attention(qk_norm=True), random_input()
    q, k = (getattr(module, name)(x).unflatten(-1, (4, 4)).transpose(1, 2) for name in ("wq", "wk"))
    positions = torch.arange(9)
    q, k = module.rope(module.q_norm(q), positions), module.rope(module.k_norm(k), positions)
    with collect_attention(module) as maps:
        module(x)
    _, weights = scaled_dot_product_attention(q, k, k, causal_mask(9, 9))
    torch.testing.assert_close(maps[0], weights)


def test_a_mask_without_head_axis_applies_to_all_heads():
    module, x, mask = attention(), random_input(), attention_mask(9, 9, padding=PADDING)
    assert torch.equal(module(x, mask=mask[:, 0]), module(x, mask=mask))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_acts_only_in_training(backend):
    module, x = attention(dropout=0.5), random_input()
    module.ops = BACKENDS[backend]
    assert torch.equal(module(x), module(x))
    assert torch.equal(module(x), attention_without_dropout(module)(x))
    module.train()
    assert not torch.equal(module(x), module(x))


def attention_without_dropout(module):
    same = attention()
    same.load_state_dict(module.state_dict())
    same.ops = module.ops
    return same


def test_a_soft_cap_bounds_the_weights():
    module, x = attention(soft_cap=1.0), 100 * random_input()
    with collect_attention(module) as maps:
        module(x)
    last = maps[0][:, :, -1]  # sees all keys
    assert (last.amax(-1) / last.amin(-1)).max() <= math.exp(2.0) * (1 + 1e-9)
    weights = maps[0].detach()
    v = rearrange(module.wv(x), "b s (h d) -> b h s d", h=4)
    for module.ops in (TORCH, MATH):  # torch's kernel has no soft cap, so it is not used
        torch.testing.assert_close(module.wo(rearrange(weights @ v, "b h s d -> b s (h d)")), module(x))


# --- weights on request ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, {"n_kv_heads": 1, "qk_norm": True}])
def test_the_collected_weights_are_those_of_the_fused_path(arguments):
    module, x = attention(**arguments), random_input()
    module.train()
    fused = module(x)
    with collect_attention(module) as maps:
        assert torch.allclose(module(x), fused)
    (weights,) = maps
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert (weights.masked_select(~causal_mask(9, 9)) == 0).all()
    v = rearrange(module.wv(x), "b s (g d) -> b g s d", d=4).repeat_interleave(4 // module.n_kv_heads, dim=1)
    torch.testing.assert_close(module.wo(rearrange(weights @ v, "b h s d -> b s (h d)")), fused)


def test_every_layer_and_head_is_collected_and_no_hook_remains(small):
    model, tokens = small(n_layers=3), torch.randint(17, (2, 6))
    before = [block.attention.ops for block in model.blocks]
    logits = model(tokens)
    with collect_attention(model) as maps:
        assert maps == []
        torch.testing.assert_close(model(tokens), logits)
        assert [m.shape for m in maps] == [(2, 4, 6, 6)] * 3
        model(tokens[:, :4])
        assert [m.shape for m in maps] == [(2, 4, 4, 4)] * 3  # the newest forward only
        cache = model.new_cache()
        model(tokens[:, :4], cache=cache)
        model(tokens[:, 4:], cache=cache)
        last = list(maps)
        model(tokens)
        for chunk, whole in zip(last, maps, strict=True):
            torch.testing.assert_close(chunk, whole[:, :, 4:])
    with pytest.raises(KeyError), collect_attention(model):
        raise KeyError
    assert [block.attention.ops for block in model.blocks] == before
    assert torch.equal(model(tokens), logits)


@pytest.mark.slow
def test_weights_are_collected_from_a_compiled_model_which_stays_compiled(small):
    model, tokens, compiled = small(), torch.randint(17, (2, 6)), []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    logits = model(tokens)
    model.compile(backend=backend)
    torch.testing.assert_close(model(tokens), logits)
    n = len(compiled)
    assert n > 0
    with collect_attention(model) as maps:
        torch.testing.assert_close(model(tokens), logits)
    assert [m.shape for m in maps] == [(2, 4, 6, 6)] * 2
    torch.testing.assert_close(model(tokens), logits)
    assert len(compiled) == n


# --- positions and cache --------------------------------------------------------------------------------------------


def test_values_are_never_rotated():
    """If the queries are zero, all keys have equal weight, and positions have no effect."""
    module, x = attention(), random_input()
    torch.nn.init.zeros_(module.wq.weight)
    far = module(x, torch.arange(20, 29))
    assert torch.equal(far, module(x))
    torch.testing.assert_close(far[:, -1], module.wo(module.wv(x)).mean(1))


def test_positions_may_be_shared_by_all_rows_or_given_for_each_row():
    module, x = attention(), random_input()
    own = torch.stack([torch.tensor([0, 3, 4, 5, 9, 11, 12, 13, 31]), torch.arange(9)])
    y = module(x, own)
    for row in range(2):
        torch.testing.assert_close(y[row : row + 1], module(x[row : row + 1], own[row]))
    assert torch.equal(module(x, torch.arange(9)), module(x))


def test_unused_cache_slots_are_zero():
    cache, module = KVCache(1, capacity=20), attention()
    cache.reserve(2, 9, torch.device("cpu"))
    module(random_input(), cache=cache.layer(0, cache.next_slots(9)))
    for slots in (cache.k[0], cache.v[0]):
        assert slots.shape == (2, 4, 20, 4)
        assert (slots[:, :, :9].abs().sum(-1) > 0).all()
        assert (slots[:, :, 9:] == 0).all()


@pytest.mark.parametrize(("rows", "tokens", "message"), [(1, 3, "2 rows, got 1"), (2, 12, "21 tokens.*capacity 20")])
def test_keys_that_do_not_fit_the_cache_are_refused(rows, tokens, message):
    cache = KVCache(1, capacity=20)
    cache.reserve(2, 9, torch.device("cpu"))
    cache.advance(9)
    with pytest.raises(ValueError, match=message):
        cache.reserve(rows, tokens, torch.device("cpu"))
    assert (cache.rows, cache.length) == (2, 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"d_model": 65, "n_heads": 12}, "65 and 12"),
        ({"n_kv_heads": 3}, "4 and 3"),
        ({"d_model": 12, "n_heads": 4}, "even, got 12 / 4 = 3"),
        ({"n_heads": 0}, "at least 1, got 0 and 0"),
        ({"n_kv_heads": 0}, "at least 1, got 4 and 0"),
        ({"theta": 1.0}, "theta must be above 1.*got 1.0"),
        ({"rope_scaling": "yarn", "rope_factor": 0.0}, "at least 1 and finite, got 0.0"),
        ({"max_seq_len": None}, "max_seq_len"),
        ({"soft_cap": 0.0}, "soft_cap.*0.0"),
        ({"pairing": "both"}, "half or interleaved, got both"),
        ({"rope_scaling": "yarm", "rope_factor": 2.0}, "interpolation, ntk, yarn.*yarm"),
        ({"rope_factor": 2.0}, "rope_factor 2.0 needs rope_scaling"),
        ({"rope_scaling": "ntk", "rope_factor": 0.5}, "at least 1 and finite, got 0.5"),
        ({"rope_scaling": "ntk", "rope_factor": 2.0, "n_heads": 8}, "at least 4, got 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_both_values(arguments, message):
    with pytest.raises(ValueError, match=message):
        attention(**arguments)


@pytest.mark.parametrize("positions", [torch.arange(24, 33), torch.arange(-1, 8), torch.full((2, 9), 32)])
def test_a_position_out_of_range_is_refused_with_both_numbers(positions):
    low, high = positions.min().item(), positions.max().item()
    with pytest.raises(ValueError, match=rf"0 \.\. 31 .*got {low} \.\. {high}"):
        attention()(random_input(), positions)
