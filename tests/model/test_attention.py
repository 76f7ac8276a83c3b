import pytest
import torch

from model.attention import CausalMultiHeadAttention


def attention(**arguments):
    shape = {"d_model": 16, "n_heads": 4, "use_rope": True, "max_seq_len": 32}
    return CausalMultiHeadAttention(**{**shape, **arguments}).double().eval()


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_the_two_backends_agree_in_values_and_gradients(n_kv_heads):
    module = attention(n_kv_heads=n_kv_heads, qk_norm=True)
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    results = []
    for backend in ("fused", "written"):
        module.backend = backend
        module.zero_grad()
        y = module(x)
        y.square().sum().backward()
        results.append([y, *(p.grad.clone() for p in module.parameters())])
    for fused, written in zip(*results, strict=True):
        torch.testing.assert_close(fused, written)


def test_heads_side_by_side_are_the_heads_one_by_one():
    module = attention()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    whole, parts = module(x), torch.zeros(2, 9, 16, dtype=torch.float64)
    for head in range(4):
        rows = slice(4 * head, 4 * head + 4)
        single = attention(d_model=4, n_heads=1)
        for name in ("wq", "wk", "wv"):  # a head reads the whole stream, through its own rows
            getattr(single, name).weight = torch.nn.Parameter(getattr(module, name).weight[rows])
        single.wo.weight = torch.nn.Parameter(module.wo.weight[:, rows])
        parts += single(x)
    torch.testing.assert_close(parts, whole)


def test_grouped_query_attention_is_full_attention_with_repeated_heads():
    grouped, full = attention(n_kv_heads=2), attention()
    full.load_state_dict(
        {
            name: weight
            if name in ("wq.weight", "wo.weight")
            else weight.view(2, 1, 4, 16).repeat(1, 2, 1, 1).view(16, 16)
            for name, weight in grouped.state_dict().items()
        }
    )
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    torch.testing.assert_close(grouped(x), full(x))


def test_without_positions_the_order_of_earlier_tokens_is_invisible():
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    shuffled = torch.cat([x[:, torch.randperm(8)], x[:, 8:]], dim=1)
    blind, rope = attention(use_rope=False), attention()
    torch.testing.assert_close(blind(shuffled)[:, -1], blind(x)[:, -1])
    assert not torch.allclose(rope(shuffled)[:, -1], rope(x)[:, -1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"d_model": 65, "n_heads": 12}, "65 and 12"),
        ({"n_kv_heads": 3}, "4 and 3"),
        ({"d_model": 12, "n_heads": 4}, "even, got 3"),
        ({"max_seq_len": None}, "max_seq_len"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_both_values(arguments, message):
    with pytest.raises(ValueError, match=message):
        attention(**arguments)
